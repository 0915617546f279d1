//! Certificates: who an end of a link is, and which authority it trusts.
//!
//! Both ends of an encrypted link have a certificate of one private authority (mutual TLS 1.3). The
//! token stays as a second factor: the handshake of the link runs inside. A certificate also names
//! what its owner is ([`CertificateRole`]), so that a worker cannot pose as the trainer.

mod expiry;
mod make;
pub(crate) mod session;
mod verify;

use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use weightsync_mem::threads::LockExt as _;

pub use self::make::{CertificateRequest, MadeFiles, make};
pub(crate) use self::verify::explain;
use self::verify::{FromPart, OfPart};
use crate::access::open_file;
use crate::hello::HelloError;

/// The environment variable that names the folder of the certificates, or a file with one.
pub const TLS_VARIABLE: &str = "WEIGHTSYNC_TLS_DIR";

/// How often an end looks whether its certificate expires, while it makes no new link.
const LOOK: Duration = Duration::from_secs(3600);

/// No file of certificates is longer.
const LONGEST: u64 = 1 << 20;

/// What the owner of a certificate is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertificateRole {
    /// The trainer, which workers connect to.
    Trainer,
    /// A relay of a host.
    Relay,
    /// A worker, or a person who asks for the status.
    Worker,
}

impl CertificateRole {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Trainer, Self::Relay, Self::Worker];

    /// The word, which is also the file's name.
    pub fn word(self) -> &'static str {
        match self {
            Self::Trainer => "trainer",
            Self::Relay => "relay",
            Self::Worker => "worker",
        }
    }

    /// The name that a certificate of this part has among its DNS names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trainer => "weightsync-trainer",
            Self::Relay => "weightsync-relay",
            Self::Worker => "weightsync-worker",
        }
    }

    /// Whose files an end of this part can use, the best first.
    fn files(self) -> &'static [Self] {
        match self {
            Self::Trainer => &[Self::Trainer],
            Self::Relay => &[Self::Relay],
            Self::Worker => &[Self::Worker, Self::Relay, Self::Trainer],
        }
    }
}

impl fmt::Display for CertificateRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// The certificate of this end, its key, and the authority that it trusts. They are read again for
/// the next link when the files change.
#[derive(Clone)]
pub struct Tls(Arc<Identity>);

struct Identity {
    path: PathBuf,
    part: CertificateRole,
    loaded: Mutex<TlsConfigs>,
    on_loopback: bool,
}

#[derive(Clone)]
struct TlsConfigs {
    stamps: Vec<Stamp>,
    /// Of those who connect it asks a certificate.
    server: Arc<ServerConfig>,
    /// Of those who connect it asks the trainer's.
    called: Arc<ServerConfig>,
    /// It takes those who show none, too.
    open: Arc<ServerConfig>,
    /// By what a link is dialled to.
    to: [Arc<ClientConfig>; 4],
    expires: SystemTime,
}

/// What tells whether a file has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    path: PathBuf,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

/// What a connection is made to, which decides what its certificate must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPeer<'a> {
    /// The trainer, by the host's name or address that the user knows.
    Trainer(&'a str),
    /// The trainer, by an address that it has told.
    Sender(IpAddr),
    /// A relay, by an address that the trainer has told.
    Relay(IpAddr),
    /// A worker that has asked to be called, by its address. A trainer or a relay may be one too.
    Worker(IpAddr),
}

/// What the end that listens asks of those who connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// A certificate of its own authority.
    Certificate,
    /// The same, and it must be the trainer's: a worker is called by nobody else.
    Trainer,
    /// The same, where there is one: a browser has none. What a peer without one may do is for the
    /// caller to decide, by [`AsyncStream::part`](crate::stream::AsyncStream::part).
    IfAny,
}

impl Tls {
    /// Reads the certificates of this part.
    ///
    /// `path` is a file with the certificate, its key and the authority's certificate, as
    /// `weightsync certs new` makes them; or a folder with `trainer.pem`, `relay.pem` or
    /// `worker.pem`; or one with `tls.crt`, `tls.key` and `ca.crt`, as a Kubernetes secret has them.
    ///
    /// # Errors
    ///
    /// [`TlsError`], if a file is missing, open to other users, or no such certificate.
    pub fn read(path: impl Into<PathBuf>, part: CertificateRole) -> Result<Self, TlsError> {
        let path = path.into();
        let loaded = TlsConfigs::read(&path, part)?;
        Ok(Self(Arc::new(Identity {
            path,
            part,
            loaded: Mutex::new(loaded),
            on_loopback: false,
        })))
    }

    /// Encrypts links over loopback too, as [`TLS_LOOPBACK_VARIABLE`] asks for. Otherwise they are
    /// plain: what they carry does not leave the machine.
    ///
    /// [`TLS_LOOPBACK_VARIABLE`]: crate::access::TLS_LOOPBACK_VARIABLE
    #[must_use]
    pub fn on_loopback(self) -> Self {
        if self.0.on_loopback {
            return self;
        }
        let loaded = self.loaded();
        Self(Arc::new(Identity {
            path: self.0.path.clone(),
            part: self.0.part,
            loaded: Mutex::new(loaded),
            on_loopback: true,
        }))
    }

    /// The folder or file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// When the certificate expires.
    pub fn expires(&self) -> SystemTime {
        self.loaded().expires
    }

    /// Whether a link to or from this address is encrypted.
    pub fn covers(&self, address: SocketAddr) -> bool {
        self.0.on_loopback || !address.ip().to_canonical().is_loopback()
    }

    /// A session of the end that connects.
    pub(crate) fn dial(&self, peer: TlsPeer<'_>) -> io::Result<session::TlsSession> {
        let [to_trainer, to_sender, to_relay, to_worker] = self.current().to;
        let (config, name) = match peer {
            TlsPeer::Trainer(host) => {
                let name = ServerName::try_from(host.to_owned()).map_err(|_| {
                    let what = format!(
                        "no certificate can be for {host:?}: connect by a name or an address"
                    );
                    let is_of_time = false;
                    io::Error::other(HelloError::Tls { what, is_of_time })
                })?;
                (to_trainer, name)
            }
            TlsPeer::Sender(address) => (to_sender, ServerName::from(address)),
            TlsPeer::Relay(address) => (to_relay, ServerName::from(address)),
            TlsPeer::Worker(address) => (to_worker, ServerName::from(address)),
        };
        session::TlsSession::client(config, name).map_err(session::failed)
    }

    /// A session of the end that listens.
    pub(crate) fn accept(&self, asks: ClientAuth) -> io::Result<session::TlsSession> {
        let loaded = self.current();
        let config = match asks {
            ClientAuth::Certificate => loaded.server,
            ClientAuth::Trainer => loaded.called,
            ClientAuth::IfAny => loaded.open,
        };
        session::TlsSession::server(config).map_err(session::failed)
    }

    /// Says from time to time that the certificate expires, until it is dropped.
    pub async fn watch(self) {
        loop {
            // This looks at the files, and warns.
            drop(self.current());
            tokio::time::sleep(LOOK).await;
        }
    }

    fn loaded(&self) -> TlsConfigs {
        self.0.loaded.locked().clone()
    }

    /// What the files have now. Files that cannot be used leave what was read before.
    fn current(&self) -> TlsConfigs {
        // Held while files are read, so that one thread reads a change, and the others wait for it.
        let mut loaded = self.0.loaded.locked();
        let before = stamps(&loaded.paths());
        if before != loaded.stamps {
            match TlsConfigs::read(&self.0.path, self.0.part) {
                Ok(new) => {
                    tracing::info!(
                        "the certificate in {} was read again",
                        self.0.path.display()
                    );
                    *loaded = new;
                }
                Err(error) => {
                    tracing::warn!("the certificate before stays in use: {error}");
                    // Said once for each change. A file that was half written is read again.
                    loaded.stamps = before;
                }
            }
        }
        expiry::warn(&loaded.stamps[0].path, loaded.expires);
        loaded.clone()
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        // By where they are: the certificates in the files may change at any time.
        let of = |one: &Self| (one.0.path.clone(), one.0.part, one.0.on_loopback);
        of(self) == of(other)
    }
}

impl Eq for Tls {}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("path", &self.0.path)
            .field("part", &self.0.part)
            .finish_non_exhaustive()
    }
}

impl TlsConfigs {
    fn read(path: &Path, part: CertificateRole) -> Result<Self, TlsError> {
        let files = CertificateFiles::find(path, part)?;
        let paths = files.paths();
        // Before the files are read: one that changes meanwhile is read again for the next link.
        let stamps = stamps(&paths);
        let (chain, key, authority) = files.read()?;
        let invalid = |what: String| TlsError::Invalid {
            path: paths[0].clone(),
            what,
        };
        let expires = expiry::expires(&chain[0]).map_err(invalid)?;
        let roots = trusted(authority).map_err(|error| invalid(error.to_string()))?;
        let (roots, provider) = (Arc::new(roots), provider());
        let failed = |error: rustls::Error| invalid(explain(&error));
        let [clients, anybody] =
            client_verifiers(&roots, &provider).map_err(|error| invalid(error.to_string()))?;
        let server = |clients: Arc<dyn ClientCertVerifier>| -> Result<_, TlsError> {
            let mut server = ServerConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(VERSIONS)
                .map_err(failed)?
                .with_client_cert_verifier(clients)
                .with_single_cert(chain.clone(), key.clone_key())
                .map_err(failed)?;
            // Each link proves itself: a session that was resumed would outlive a certificate.
            server.send_tls13_tickets = 0;
            Ok(Arc::new(server))
        };
        let client = |parts: &'static [CertificateRole], by_host: bool| -> Result<_, TlsError> {
            let verifier = OfPart::new(roots.clone(), provider.clone(), (parts, by_host))
                .map_err(|error| invalid(error.to_string()))?;
            // Rustls calls any own verifier dangerous. This one makes the ordinary checks, and then
            // one more.
            let mut client = ClientConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(VERSIONS)
                .map_err(failed)?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_client_auth_cert(chain.clone(), key.clone_key())
                .map_err(failed)?;
            // As for the server: each link proves itself.
            client.resumption = rustls::client::Resumption::disabled();
            Ok(Arc::new(client))
        };
        Ok(Self {
            stamps,
            called: server(Arc::new(FromPart::new(
                clients.clone(),
                CertificateRole::Trainer,
            )))?,
            server: server(clients)?,
            open: server(anybody)?,
            to: [
                client(&[CertificateRole::Trainer], true)?,
                client(&[CertificateRole::Trainer], false)?,
                client(&[CertificateRole::Relay], false)?,
                client(CertificateRole::Worker.files(), false)?,
            ],
            expires,
        })
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.stamps.iter().map(|one| one.path.clone()).collect()
    }
}

/// The only version of TLS.
const VERSIONS: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// The authorities that an end trusts.
fn trusted(authority: Vec<CertificateDer<'static>>) -> Result<RootCertStore, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for one in authority {
        roots.add(one)?;
    }
    Ok(roots)
}

/// Verifiers of those who connect: the first asks them for a certificate, the second also takes
/// those who show none.
fn client_verifiers(
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
) -> Result<[Arc<dyn ClientCertVerifier>; 2], VerifierBuilderError> {
    let clients = || WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
    // For browsers. What a client without a certificate may do is decided elsewhere.
    let anybody = clients().allow_unauthenticated().build()?;
    Ok([clients().build()?, anybody])
}

/// AES-128 first, as its hardware instructions make it the fastest.
fn provider() -> Arc<CryptoProvider> {
    use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider, kx_group};
    let mut provider = default_provider();
    // A stranger chooses among these: the one that costs least.
    provider.kx_groups = vec![kx_group::X25519];
    provider.cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(provider)
}

/// Where the certificates of an end are.
enum CertificateFiles {
    /// All in one.
    Bundle(PathBuf),
    /// A certificate, its key, and the authority's certificate.
    Three([PathBuf; 3]),
}

type Read3 = (
    Vec<CertificateDer<'static>>,
    PrivateKeyDer<'static>,
    Vec<CertificateDer<'static>>,
);

impl CertificateFiles {
    fn find(path: &Path, part: CertificateRole) -> Result<Self, TlsError> {
        if !path.is_dir() {
            return Ok(Self::Bundle(path.into()));
        }
        // The files of `weightsync certs new` first, then those of a Kubernetes secret.
        let bundles = part.files().iter();
        let mut bundles = bundles.map(|part| path.join(format!("{part}.pem")));
        if let Some(bundle) = bundles.find(|bundle| bundle.exists()) {
            return Ok(Self::Bundle(bundle));
        }
        let three = ["tls.crt", "tls.key", "ca.crt"].map(|name| path.join(name));
        if three.iter().all(|file| file.exists()) {
            return Ok(Self::Three(three));
        }
        Err(TlsError::Missing {
            path: path.into(),
            part,
        })
    }

    fn paths(&self) -> Vec<PathBuf> {
        match self {
            Self::Bundle(path) => vec![path.clone()],
            Self::Three(paths) => paths.to_vec(),
        }
    }

    fn read(&self) -> Result<Read3, TlsError> {
        match self {
            Self::Bundle(path) => {
                let text = contents(path, true)?;
                let own = certificates(path, &text)?;
                // Several authorities are trusted while one takes the place of another.
                let is_root = |one: &CertificateDer<'_>| verify::is_self_signed(one);
                let (authority, chain): (Vec<_>, Vec<_>) = own.into_iter().partition(is_root);
                if authority.is_empty() || chain.is_empty() {
                    return Err(TlsError::Invalid {
                        path: path.clone(),
                        what: "expected the end's certificate, and the authority's".into(),
                    });
                }
                Ok((chain, key(path, &text)?, authority))
            }
            Self::Three([certificate, own, authority]) => Ok((
                certificates(certificate, &contents(certificate, false)?)?,
                key(own, &contents(own, true)?)?,
                certificates(authority, &contents(authority, false)?)?,
            )),
        }
    }
}

fn contents(path: &Path, has_key: bool) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read {
        path: path.into(),
        source,
    };
    let (file, mode) = open_file(path).map_err(failed)?;
    // The group may read it: that is how Kubernetes hands out secrets.
    if has_key && mode & 0o027 != 0 {
        return Err(TlsError::Open {
            path: path.into(),
            mode,
        });
    }
    let mut text = Vec::new();
    // One byte more than is allowed tells that a file is too long.
    let read = file.take(LONGEST + 1).read_to_end(&mut text);
    let read = read.map_err(failed)?;
    match read as u64 > LONGEST {
        true => Err(failed(io::Error::other(
            "it is longer than certificates are",
        ))),
        false => Ok(text),
    }
}

fn certificates(path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let invalid = |what| TlsError::Invalid {
        path: path.into(),
        what,
    };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let all = all.map_err(|error| invalid(error.to_string()))?;
    match all.is_empty() {
        true => Err(invalid("it has no certificate".into())),
        false => Ok(all),
    }
}

fn key(path: &Path, text: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(text).map_err(|error| TlsError::Invalid {
        path: path.into(),
        what: format!("it has no private key: {error}"),
    })
}

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        // A file that is missing has a stamp, too, so its return counts as a change.
        let known = std::fs::metadata(path).ok();
        Stamp {
            path: path.clone(),
            inode: known.as_ref().map_or(0, std::fs::Metadata::ino),
            bytes: known.as_ref().map_or(0, std::fs::Metadata::len),
            // Also another mode: files that were open to others are read once they are not.
            changed: known.map_or((0, 0), |known| (known.ctime(), known.ctime_nsec())),
        }
    };
    paths.iter().map(stamp).collect()
}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A folder without a certificate of this part.
    #[error(
        "{} has no certificate of a {part}: expected {part}.pem, or tls.crt, tls.key and ca.crt; \
         `weightsync certs new --out DIR --hosts NAMES` makes them",
        path.display()
    )]
    Missing {
        /// The folder.
        path: PathBuf,
        /// The part.
        part: CertificateRole,
    },
    /// A file that cannot be read.
    #[error("reading the certificate in {} failed: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A setting's path with a comma, which separates settings where a scheme is written as text.
    #[error(
        "the path of certificates {} has a comma, which separates settings: use a path without one",
        path.display()
    )]
    Comma {
        /// The folder or file.
        path: PathBuf,
    },
    /// Other users can read the key, or change it.
    #[error(
        "{path} has a private key and mode {mode:03o}, so other users can use it; run `chmod 600 \
         {path}`",
        path = path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// The permission bits of the file.
        mode: u32,
    },
    /// A file with something else.
    #[error("{} is not a certificate with its key: {what}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The certificates cannot be made.
    #[error("making certificates failed: {what}")]
    Make {
        /// Why.
        what: String,
    },
}

#[cfg(test)]
mod tests;
