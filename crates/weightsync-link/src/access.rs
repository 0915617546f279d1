//! Who may connect, and where an end may listen.
//!
//! A [`Token`] is text that a person shares between machines. The token gives a *secret* of 16
//! bytes, which an init info carries. The secret gives the [`Key`] with which both ends of a
//! link prove that they have it. So an init info admits a worker without the token, and a relay
//! that has the token needs no init info.
//!
//! Certificates encrypt a link to or from another machine ([`Access::tls`]). Without them such a link
//! is made only if the user has accepted that it is plain: [`Access::insecure_plaintext`].

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use weightsync_core::Remedy;
use weightsync_engine::files;

use crate::tls::{CertificateRole, TLS_VARIABLE, Tls, TlsError};

/// The environment variable that holds a token.
pub const TOKEN_VARIABLE: &str = "WEIGHTSYNC_TOKEN";

/// The environment variable that names a file with a token.
pub const TOKEN_FILE_VARIABLE: &str = "WEIGHTSYNC_TOKEN_FILE";

/// The environment variable that allows unencrypted connections to other machines if it is 1.
pub const PLAINTEXT_VARIABLE: &str = "WEIGHTSYNC_INSECURE_PLAINTEXT";

/// The environment variable that allows unencrypted connections to other machines if it is 1 where code
/// travels: to the workers of a collector. The one for weights does not allow that.
pub const PLAINTEXT_CODE_VARIABLE: &str = "WEIGHTSYNC_INSECURE_PLAINTEXT_CODE";

/// The environment variable that encrypts loopback too if it is 1, where there are certificates: a
/// tunnel or a proxy of this host brings clients of other machines in as loopback.
pub const TLS_LOOPBACK_VARIABLE: &str = "WEIGHTSYNC_TLS_LOOPBACK";

/// The ways to allow unencrypted connections, for errors.
const PERMISSION: &str = "the scheme's setting insecure-plaintext (in Python: \
                          insecure_plaintext=True; of a command: --insecure-plaintext), or \
                          WEIGHTSYNC_INSECURE_PLAINTEXT=1";

/// The same where code travels.
const CODE_PERMISSION: &str = "the collector's setting insecure_plaintext_code=True (of a worker: \
                               --insecure-plaintext-code), or WEIGHTSYNC_INSECURE_PLAINTEXT_CODE=1";

/// The ways to name certificates, for errors.
const CERTIFICATES: &str = "tls=DIR, of a command: --tls, or WEIGHTSYNC_TLS_DIR; `weightsync certs \
                            new` makes them";

/// How to make a token, for errors.
const MAKE_ONE: &str = "make one with `head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE` \
                        and give every machine the same";

/// Separates a token's secret from other uses of the token.
const SECRET_CONTEXT: &str = "weightsync-net 2026-11 secret of a token";

/// Separates a link's key from other uses of the secret.
const KEY_CONTEXT: &str = "weightsync-net 2026-11 key of a link";

/// What a person gives to every machine that may connect: [`Token::MIN_BYTES`] to
/// [`Token::MAX_BYTES`] bytes, without the white space around them. It is not shown in `Debug`.
///
/// ```
/// use weightsync_link::access::Token;
///
/// let token = Token::new("kq0UfKOLPCkF2Q==ZmFzZQ\n")?;
/// assert_eq!(token, Token::new("  kq0UfKOLPCkF2Q==ZmFzZQ")?);
/// assert!(Token::new("too short").is_err());
/// assert_eq!(format!("{token:?}"), "Token(..)");
/// # Ok::<(), weightsync_link::access::AccessError>(())
/// ```
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl Token {
    /// The shortest token, in bytes.
    pub const MIN_BYTES: usize = 16;

    /// The longest token, in bytes.
    pub const MAX_BYTES: usize = 4096;

    /// A token of these bytes, any bytes, without the white space around them.
    ///
    /// # Errors
    ///
    /// [`AccessError::TokenLength`].
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, AccessError> {
        Self::from_bytes(bytes.as_ref(), TokenSource::Given)
    }

    /// The token in [`TOKEN_VARIABLE`], or in the file that [`TOKEN_FILE_VARIABLE`] names; `None`
    /// if neither is set. An empty variable counts as a token that is too short, not as a missing
    /// one.
    ///
    /// # Errors
    ///
    /// [`AccessError::TwoTokens`] if both are set, those of [`from_file`](Self::from_file), and
    /// [`AccessError::TokenLength`].
    pub fn from_env() -> Result<Option<Self>, AccessError> {
        let variable = std::env::var_os;
        Self::from_variables(variable(TOKEN_VARIABLE), variable(TOKEN_FILE_VARIABLE))
    }

    /// The token in a file. A symbolic link is followed.
    ///
    /// # Errors
    ///
    /// [`AccessError::TokenFile`] if it cannot be read or is not a regular file,
    /// [`AccessError::TokenFileOpen`] if anybody but its owner may do anything with it, and
    /// [`AccessError::TokenLength`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, AccessError> {
        let path = path.as_ref();
        let failed = |source: io::Error| AccessError::TokenFile {
            path: path.into(),
            source,
        };
        let (file, mode) = open_file(path).map_err(failed)?;
        if mode & 0o077 != 0 {
            return Err(AccessError::TokenFileOpen {
                path: path.into(),
                mode,
            });
        }
        // The file may also have white space around the token; more than this is never read.
        const MOST: u64 = 2 * Token::MAX_BYTES as u64;
        let mut bytes = Vec::new();
        file.take(MOST).read_to_end(&mut bytes).map_err(failed)?;
        Self::from_bytes(&bytes, TokenSource::File(path.into()))
    }

    /// The secret derived from this token; an init info carries it instead of the token.
    pub fn secret(&self) -> [u8; 16] {
        let [first, _] = *blake3::derive_key(SECRET_CONTEXT, &self.0)
            .as_chunks::<16>()
            .0
        else {
            unreachable!("32 bytes are two times 16")
        };
        first
    }

    fn from_variables(
        token: Option<OsString>,
        file: Option<OsString>,
    ) -> Result<Option<Self>, AccessError> {
        match (token, file) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => Err(AccessError::TwoTokens),
            (Some(token), None) => {
                Self::from_bytes(&token.into_vec(), TokenSource::Variable).map(Some)
            }
            (None, Some(file)) => Self::from_file(PathBuf::from(file)).map(Some),
        }
    }

    fn from_bytes(bytes: &[u8], origin: TokenSource) -> Result<Self, AccessError> {
        let bytes = bytes.trim_ascii();
        if !(Self::MIN_BYTES..=Self::MAX_BYTES).contains(&bytes.len()) {
            return Err(AccessError::TokenLength {
                origin,
                got: bytes.len(),
            });
        }
        Ok(Self(bytes.into()))
    }
}

/// Opens a file with a secret; its permission bits.
pub(crate) fn open_file(path: &Path) -> io::Result<(File, u32)> {
    let file = files::open(path)?;
    // Of the open file: the path may lead to another one by now.
    let mode = file.metadata()?.permissions().mode();
    Ok((file, mode & 0o777))
}

// Takes the same time wherever the first difference is, so that the time reveals nothing.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        blake3::hash(&self.0) == blake3::hash(&other.0)
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The key with which both ends of a link prove that they have the same secret. `Debug` does not
/// show it.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of a secret, which comes from an init info's endpoint or a [`Token`].
    pub fn new(secret: &[u8; 16]) -> Self {
        Self(blake3::derive_key(KEY_CONTEXT, secret))
    }

    /// The proof for the concatenation of these parts. Proofs that must differ have a part of
    /// another fixed length.
    pub(crate) fn proof(&self, parts: &[&[u8]]) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in parts {
            hasher.update(part);
        }
        Proof(hasher.finalize())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// A value that only a process with the key can make. `==` takes the same time wherever the first
/// difference is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Proof(blake3::Hash);

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Proof(..)")
    }
}

impl Proof {
    /// The wire form.
    pub(crate) fn bytes(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }

    /// A received proof.
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes.into())
    }
}

/// Who is let in, and which addresses may be used.
///
/// **Guarantee.** Without a token nothing listens where another machine could reach it. Without
/// [`tls`](Self::tls) and [`insecure_plaintext`](Self::insecure_plaintext) nothing travels to or from
/// another machine, and with `tls` nothing travels there unencrypted.
///
/// ```
/// use weightsync_link::access::{Access, Token};
///
/// let mut access = Access::default();
/// assert!(access.may_listen("127.0.0.1:7007".parse()?).is_ok());
/// assert!(access.may_listen("0.0.0.0:7007".parse()?).is_err());
///
/// access.token = Some(Token::new("kq0UfKOLPCkF2Q==ZmFzZQ")?);
/// access.insecure_plaintext = true;
/// assert!(access.may_listen("0.0.0.0:7007".parse()?).is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The token that every machine that connects must have.
    pub token: Option<Token>,
    /// Whether unencrypted connections to other machines are allowed. A program that can read the
    /// network's traffic can then read the weights, and one that can change it can change the
    /// weights.
    pub insecure_plaintext: bool,
    /// The certificates of encrypted connections. With them all connections to and from other
    /// machines are encrypted, whatever `insecure_plaintext` says.
    pub tls: Option<Tls>,
    /// Why there are none, where another end's settings name them. They may not be needed here.
    pub(crate) no_tls: Option<String>,
    /// Whether code travels, and not weights alone.
    pub(crate) carries_code: bool,
}

impl Access {
    /// The settings of the environment: [`Token::from_env`] and [`PLAINTEXT_VARIABLE`].
    ///
    /// # Errors
    ///
    /// Those of [`Token::from_env`]; [`AccessError::Variable`] if that variable is neither
    /// 0 nor 1, nor empty.
    pub fn from_env() -> Result<Self, AccessError> {
        Self::with_token(Token::from_env()?)
    }

    /// These settings of the environment, but with this token or none. The environment's token is
    /// not read, so it may be invalid.
    ///
    /// # Errors
    ///
    /// [`AccessError::Variable`].
    pub fn with_token(token: Option<Token>) -> Result<Self, AccessError> {
        Ok(Self {
            token,
            insecure_plaintext: is_set(PLAINTEXT_VARIABLE, std::env::var_os(PLAINTEXT_VARIABLE))?,
            tls: None,
            no_tls: None,
            carries_code: false,
        })
    }

    /// The same for connections that carry code. For these, plain text has a permission of its own: this
    /// one, or [`PLAINTEXT_CODE_VARIABLE`].
    ///
    /// # Errors
    ///
    /// [`AccessError::Variable`].
    pub fn carrying_code(mut self, insecure_plaintext: bool) -> Result<Self, AccessError> {
        let variable = PLAINTEXT_CODE_VARIABLE;
        // In place of the permission for weights, which does not cover code.
        self.insecure_plaintext =
            insecure_plaintext | is_set(variable, std::env::var_os(variable))?;
        self.carries_code = true;
        Ok(self)
    }

    /// The same, with the certificates at this path, else at [`TLS_VARIABLE`]; without any, if
    /// neither is there.
    ///
    /// # Errors
    ///
    /// [`AccessError::Tls`], [`AccessError::TlsVariable`].
    pub fn with_tls(
        mut self,
        part: CertificateRole,
        path: Option<&Path>,
    ) -> Result<Self, AccessError> {
        let variable = std::env::var_os(TLS_VARIABLE).filter(|value| !value.is_empty());
        if let Some(path) = path {
            // The path of a trainer goes into the text of its scheme.
            let has_comma = path.as_os_str().as_encoded_bytes().contains(&b',');
            if part == CertificateRole::Trainer && has_comma {
                let path = path.to_owned();
                return Err(TlsError::Comma { path }.into());
            }
            self.tls = Some(Tls::read(path, part)?);
        } else if let Some(path) = variable {
            self.tls = Some(Tls::read(path, part).map_err(AccessError::TlsVariable)?);
        }
        self.with_loopback()
    }

    /// Those at [`TLS_VARIABLE`], else at the path that a trainer has told. A worker of its host
    /// needs none, so a path that is not there is an error only once another machine is dialled.
    ///
    /// # Errors
    ///
    /// [`AccessError::TlsVariable`].
    pub fn with_told_tls(
        self,
        part: CertificateRole,
        told: Option<&Path>,
    ) -> Result<Self, AccessError> {
        let mut access = self.with_tls(part, None)?;
        if let (None, Some(told)) = (&access.tls, told) {
            match Tls::read(told, part) {
                Ok(tls) => access.tls = Some(tls),
                // Links within the host need no certificate, so only `may` reports this.
                Err(error) => access.no_tls = Some(error.to_string()),
            }
        }
        access.with_loopback()
    }

    fn with_loopback(mut self) -> Result<Self, AccessError> {
        if encrypts_loopback()? {
            self.tls = self.tls.map(Tls::on_loopback);
        }
        Ok(self)
    }

    /// Checks that this process may listen at an address. Loopback is always allowed. Any other
    /// address, also an unspecified one (`0.0.0.0`, `::`), needs the token, and
    /// [`tls`](Self::tls) or [`insecure_plaintext`](Self::insecure_plaintext).
    ///
    /// # Errors
    ///
    /// [`AccessError::NoToken`], else [`AccessError::Plaintext`].
    pub fn may_listen(&self, addr: SocketAddr) -> Result<(), AccessError> {
        self.may(Use::Listen, addr, self.token.is_some())
    }

    /// Checks that this process may connect to an address, with the rules of
    /// [`may_listen`](Self::may_listen).
    ///
    /// # Errors
    ///
    /// [`AccessError::NoToken`], else [`AccessError::Plaintext`].
    pub fn may_dial(&self, addr: SocketAddr) -> Result<(), AccessError> {
        self.may(Use::Dial, addr, self.token.is_some())
    }

    /// The same for a process with an init info, whose secret is as good as the token.
    ///
    /// # Errors
    ///
    /// [`AccessError::Plaintext`].
    pub fn may_dial_with_secret(&self, addr: SocketAddr) -> Result<(), AccessError> {
        self.may(Use::Dial, addr, true)
    }

    fn may(&self, to: Use, addr: SocketAddr, has_secret: bool) -> Result<(), AccessError> {
        // An IPv4 address mapped into IPv6 counts as the IPv4 address.
        if addr.ip().to_canonical().is_loopback() {
            return Ok(());
        }
        // The trainer's settings name certificates, so a plain link is not what its user wants.
        if let Some(why) = &self.no_tls {
            let why = why.clone();
            return Err(AccessError::NoCertificate { addr, why });
        }
        // With certificates no link to another machine is plain, so none needs a permission.
        let plaintext = self.insecure_plaintext || self.tls.is_some();
        let code = self.carries_code;
        match (has_secret, plaintext) {
            (true, true) => Ok(()),
            (true, false) => Err(AccessError::Plaintext { to, addr, code }),
            // Says what else is missing, so that the user does not fail once for each.
            (false, plaintext) => Err(AccessError::NoToken {
                to,
                addr,
                plaintext,
                code,
            }),
        }
    }
}

/// Whether [`TLS_LOOPBACK_VARIABLE`] is 1.
///
/// # Errors
///
/// [`AccessError::Variable`].
pub fn encrypts_loopback() -> Result<bool, AccessError> {
    is_set(
        TLS_LOOPBACK_VARIABLE,
        std::env::var_os(TLS_LOOPBACK_VARIABLE),
    )
}

fn is_set(variable: &'static str, value: Option<OsString>) -> Result<bool, AccessError> {
    let Some(value) = value else {
        return Ok(false);
    };
    match value.as_encoded_bytes() {
        b"" | b"0" => Ok(false),
        b"1" => Ok(true),
        _ => Err(AccessError::Variable { variable, value }),
    }
}

/// Where a token came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// From the caller.
    Given,
    /// From [`TOKEN_VARIABLE`].
    Variable,
    /// From this file.
    File(PathBuf),
}

impl fmt::Display for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.write_str("the token"),
            Self::Variable => write!(f, "the token in {TOKEN_VARIABLE}"),
            Self::File(path) => write!(f, "the token in {}", path.display()),
        }
    }
}

/// The use of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To listen at it.
    Listen,
    /// To connect to it.
    Dial,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Listen => "listen at",
            Self::Dial => "connect to",
        })
    }
}

/// Why there is no token, or an address may not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// A token that is too short to be safe, or too long.
    #[error(
        "{origin} has {got} bytes, expected {} to {}; {MAKE_ONE}",
        Token::MIN_BYTES,
        Token::MAX_BYTES
    )]
    TokenLength {
        /// Where the token came from.
        origin: TokenSource,
        /// The token's length in bytes, without the white space around it.
        got: usize,
    },
    /// The file with the token cannot be read.
    #[error("reading the token in {} failed: {source}; {MAKE_ONE}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Other users can access the file with the token.
    #[error(
        "the token file {path} has mode {mode:03o}, so other users can use it; run `chmod 600 \
         {path}`",
        path = path.display()
    )]
    TokenFileOpen {
        /// The file.
        path: PathBuf,
        /// The permission bits of the file.
        mode: u32,
    },
    /// Both token variables are set, so it is unclear which one counts.
    #[error("both {TOKEN_VARIABLE} and {TOKEN_FILE_VARIABLE} are set; unset one of them")]
    TwoTokens,
    /// A variable is neither yes nor no.
    #[error("{variable} is {value:?}; set it to 1 or to 0")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// The variable's value.
        value: OsString,
    },
    /// An address of another machine needs a token.
    #[error(
        "without a token this process does not {to} {addr}, which is not loopback: any host there \
         could join; {MAKE_ONE} ({TOKEN_FILE_VARIABLE}=FILE, or {TOKEN_VARIABLE}){}",
        if *plaintext { String::new() } else { format!("; what travels there is not encrypted, so \
         this takes {} too, or for links certificates ({CERTIFICATES})", permission(*code)) }
    )]
    NoToken {
        /// The intended use.
        to: Use,
        /// The address.
        addr: SocketAddr,
        /// Whether unencrypted connections were allowed.
        plaintext: bool,
        /// Whether code would travel there.
        code: bool,
    },
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The certificates that the environment names cannot be used.
    #[error("{TLS_VARIABLE}: {0}")]
    TlsVariable(TlsError),
    /// The trainer wants an encrypted link, and this host has no certificates where it says.
    #[error(
        "the sender at {addr} takes encrypted links alone, and this host has no certificate where the \
         sender's settings say: {why}; set {TLS_VARIABLE} to where they are here"
    )]
    NoCertificate {
        /// The sender's address.
        addr: SocketAddr,
        /// Why they cannot be read.
        why: String,
    },
    /// There are no certificates, and the user has not allowed plain connections to other machines.
    #[error(
        "this process does not {to} {addr}, which is not loopback: what travels there is not encrypted, \
         so others on that network can {}; give both ends \
         certificates ({CERTIFICATES}), or, if you trust that network, allow it with \
         {}",
        if *code { "run programs on the workers, by changing the code that the trainer sends" } else {
            "read and change the weights"
        },
        permission(*code)
    )]
    Plaintext {
        /// The intended use.
        to: Use,
        /// The address.
        addr: SocketAddr,
        /// Whether code would travel there.
        code: bool,
    },
}

/// The ways to allow unencrypted connections.
fn permission(code: bool) -> &'static str {
    match code {
        true => CODE_PERMISSION,
        false => PERMISSION,
    }
}

impl AccessError {
    /// Whether it is about files of this machine, and may name them: not for other machines to know.
    pub fn is_of_files(&self) -> bool {
        matches!(
            self,
            Self::TokenLength { .. }
                | Self::TokenFile { .. }
                | Self::TokenFileOpen { .. }
                | Self::Tls(_)
                | Self::TlsVariable(_)
                | Self::NoCertificate { .. }
        )
    }

    /// What to do: the caller has to change something.
    pub fn remedy(&self) -> Remedy {
        Remedy::GiveUp
    }
}

#[cfg(test)]
mod tests;
