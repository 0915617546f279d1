//! When a trainer and its explorers synchronise: the service that decides, and its parties.
//!
//! | step | here |
//! |---|---|
//! | decide | `weightsync_core::synchronizer`, a pure function |
//! | take events in, do what was decided | `service`: one thread |
//! | hold the newest versions in memory | `memory`: a worker of the trainer, and the sender of the explorers |
//! | ask, publish, load | [`Trainer`] and [`Explorer`], through `link` |
//! | outlast a restart | `lasting`: a store, and a file in the run directory |
//! | answer other processes | `server`, over HTTP; `files` for versions, `watching` for people |
//!
//! Weights travel by weightsync's own senders and receivers. What passes between a party and the service
//! is small: steps, needs, version numbers, and the init info by which versions can be had.

mod error;
mod events;
mod explorer;
mod fetcher;
mod files;
mod lasting;
mod link;
mod membership;
mod memory;
mod party;
mod server;
mod service;
mod settings;
mod watching;
mod wire;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use weightsync_engine::{AnyScheme, InitInfo, Origin, Result, SharedMem};
use weightsync_link::access::Access;
use weightsync_link::address::{listen_error, listening, local_ip, reached};
use weightsync_link::tls::{CertificateRole, ClientAuth};
use weightsync_net::Distributed;
use weightsync_store::Keep;

pub use self::error::SyncError;
pub use self::explorer::{Explorer, Fetch};
pub use self::fetcher::Fetcher;
pub use self::party::{PartyOptions, Trainer};
pub use self::settings::{StyleWords, method, method_word};
pub use self::wire::{Ended, ExplorerLine, NeedAnswer, Role, SyncAnswer, TrainerAnswer};
pub use weightsync_core::synchronizer::{Method, Need, State, Style};

use self::lasting::Lasting;
use self::link::{RemoteService, ServiceLink};
use self::service::{ServiceOptions, ServiceThread};
use crate::http::{Bearer, HttpThread, Limits, Server};

/// What a synchronizer is made with.
#[derive(Clone, Debug)]
#[must_use]
pub struct SynchronizerOptions {
    options: ServiceOptions,
    access: Option<Access>,
}

impl Default for SynchronizerOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl SynchronizerOptions {
    /// The method that the first trainer chooses, or `memory`; the style `fixed` with an interval of 1.
    pub fn new() -> Self {
        let style = Style::Fixed {
            interval: std::num::NonZero::<u64>::MIN,
            offset: 0,
        };
        Self {
            options: ServiceOptions {
                method: None,
                style,
                scheme: AnyScheme::new(SharedMem::default()),
                history: 1,
                lasting: Lasting::default(),
                max_parties: 4096,
            },
            access: None,
        }
    }

    /// How versions travel. By default the first trainer chooses.
    pub fn method(mut self, method: impl Into<Option<Method>>) -> Self {
        self.options.method = method.into();
        self
    }

    /// When parties synchronise that do not say so.
    pub fn style(mut self, style: Style) -> Self {
        self.options.style = style;
        self
    }

    /// How many older versions are kept in memory.
    pub fn history(mut self, versions: u8) -> Self {
        self.options.history = versions;
        self
    }

    /// Keeps versions in a store, a directory or an address such as `s3://bucket/path`, and begins with the
    /// newest one there. With the method `checkpoint` it is the trainer's store.
    pub fn store(mut self, address: impl Into<Option<String>>) -> Self {
        self.options.lasting.store = address.into();
        self
    }

    /// Which versions that store keeps; all by default. With the method `checkpoint` the trainer's scheme
    /// says it.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.options.lasting.keep = keep;
        self
    }

    /// A directory for what a later life of the synchronizer has to know: the epochs of trainers, so that
    /// an old trainer stays fenced off, and the steps of versions.
    pub fn run_dir(mut self, dir: impl Into<Option<PathBuf>>) -> Self {
        self.options.lasting.run_dir = dir.into();
        self
    }

    /// How many parties there may be at a time.
    pub fn max_parties(mut self, parties: usize) -> Self {
        self.options.max_parties = parties;
        self
    }

    /// Who may connect to a synchronizer that [serves](Synchronizer::serve). The default comes from the
    /// environment.
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }
}

impl SynchronizerOptions {
    /// Refuses settings that do not fit each other, before anything is started.
    ///
    /// # Errors
    ///
    /// [`Error::BadSetting`](weightsync_engine::Error::BadSetting).
    pub fn check(&self) -> Result<()> {
        self.options.lasting.check(self.options.first_method())
    }
}

impl Drop for Synchronizer {
    fn drop(&mut self) {
        // First, so that nothing the server waits for waits for a trainer.
        if let Some(service) = &self.service {
            service.stop();
        }
    }
}

/// Decides when a trainer and its explorers synchronise, in this program or in another one.
///
/// Dropping it ends a synchronizer of this program, with its threads. Its parties are told.
#[derive(Debug)]
pub struct Synchronizer {
    link: ServiceLink,
    /// Whether the environment says who may connect.
    finds_access: bool,
    /// The HTTP server, first: it uses the service.
    server: Option<(HttpThread, SocketAddr)>,
    service: Option<ServiceThread>,
}

impl Synchronizer {
    /// One inside this program: its parties are threads of it, or other processes if it
    /// [serves](Self::serve).
    ///
    /// # Errors
    ///
    /// If its thread cannot be started.
    pub fn local(options: SynchronizerOptions) -> Result<Self> {
        let service = ServiceThread::start(options.options)?;
        Ok(Self {
            link: ServiceLink::Local(service.inputs(), Origin::here()),
            finds_access: false,
            server: None,
            service: Some(service),
        })
    }

    /// One inside this program that other processes reach over HTTP at `HOST:PORT`; with port 0 at a
    /// port that the system chooses.
    ///
    /// An address that is not loopback requires a token ([`Access`]), and certificates or permission to
    /// send plain text. With certificates other machines use HTTPS. On loopback, without a token, every
    /// user of this machine may connect.
    ///
    /// # Errors
    ///
    /// If it may not or cannot listen there, and as [`local`](Self::local).
    pub fn serve(mut options: SynchronizerOptions, listen: &str) -> Result<Self> {
        // Everything that can be refused is refused here, before a thread starts.
        let access = allowed(options.access.take(), CertificateRole::Trainer)?;
        let at = listening("listen", listen)?;
        access.may_listen(at).map_err(SyncError::from)?;
        // Bound before the service starts: an address that is taken costs no thread.
        let listener = TcpListener::bind(at).map_err(|source| listen_error(at, source))?;
        let at = listener
            .local_addr()
            .map_err(|source| listen_error(at, source))?;
        // Explorers get versions from the service's own sender, which listens at the same address
        // as the server and with the same certificates and token. Port 0: the system chooses its
        // port.
        let mut scheme = Distributed::new().listen(SocketAddr::new(at.ip(), 0).to_string());
        if access.insecure_plaintext {
            scheme = scheme.insecure_plaintext();
        }
        if let Some(tls) = &access.tls {
            scheme = scheme.tls(tls.path());
        }
        if let Some(token) = &access.token {
            scheme = scheme.token(token.clone());
        }
        options.options.scheme = AnyScheme::new(scheme);
        let service = ServiceThread::start(options.options)?;
        // Without a token there is no bearer, and only loopback may listen then.
        let secret = access.token.as_ref().map(|token| token.secret());
        let failed = |source| SyncError::Start {
            what: format!("serve at {at}"),
            source,
        };
        let bearer = Bearer::to_synchronizer(secret.as_ref());
        // A browser has no certificate. The token lets it read, and a certificate says who may be what.
        let tls = access.tls.clone().map(|tls| (tls, ClientAuth::IfAny));
        let server = Server::new(listener, bearer, tls, Limits::default()).map_err(failed)?;
        let app = server::App::new(
            service.inputs(),
            service.events(),
            service.held(),
            service.shelf(),
            secret.is_some(),
        );
        // The server has a thread of its own: the service decides and never waits for a socket.
        let thread = HttpThread::start("sync-http", move |stopping| {
            let router = server::router(app, stopping.clone());
            server.serve(router, stopping, |_| {})
        });
        Ok(Self {
            link: ServiceLink::Local(service.inputs(), Origin::here()),
            finds_access: false,
            server: Some((thread.map_err(failed)?, at)),
            service: Some(service),
        })
    }

    /// One of another process, at `HOST:PORT`. Nothing is sent before a party joins.
    ///
    /// Without `access` it comes from the environment: a trainer joins with the trainer's certificate
    /// there, and an explorer with a worker's. A synchronizer with certificates takes no others.
    ///
    /// # Errors
    ///
    /// If the address cannot be resolved, or may not be connected to.
    pub fn connect(address: &str, access: Option<Access>) -> Result<Self> {
        let finds_access = access.is_none();
        let access = allowed(access, CertificateRole::Worker)?;
        // The runtime of the client's requests. Its main future only waits for the end.
        let thread = HttpThread::start("sync", |mut stopping| async move {
            stopping.wait().await;
        });
        let thread = thread.map_err(|source| SyncError::Start {
            what: "start a thread".into(),
            source,
        })?;
        Ok(Self {
            link: ServiceLink::Remote(Arc::new(RemoteService::new(
                address,
                access,
                Arc::new(thread),
            )?)),
            finds_access,
            server: None,
            service: None,
        })
    }

    /// Where it serves, or where the one of another process is.
    pub fn address(&self) -> Option<SocketAddr> {
        match (&self.server, &self.link) {
            // An address such as 0.0.0.0 cannot be connected to, so parties get the one that this
            // machine has towards others.
            (Some((_, at)), _) => reached(*at).ok().or(Some(*at)),
            (None, ServiceLink::Remote(remote)) => Some(remote.addr()),
            (None, ServiceLink::Local(..)) => None,
        }
    }

    /// This machine's address towards a synchronizer that is, or may be reached from, elsewhere: there a
    /// sender listens whose versions are to come to it. `None` within one machine.
    ///
    /// # Errors
    ///
    /// If there is no route.
    pub fn route(&self) -> Result<Option<IpAddr>> {
        // On loopback every sender of this machine can be reached, so there is no route to name.
        let Some(at) = self.address().filter(|at| !at.ip().is_loopback()) else {
            return Ok(None);
        };
        let failed = |source| SyncError::Start {
            what: format!("find the route to {at}"),
            source,
        };
        Ok(Some(local_ip(at).map_err(failed)?))
    }

    /// Joins as the trainer. `from` says where its versions can be had: the init info of its sender.
    /// The timeout is for a synchronizer that is not there yet.
    ///
    /// # Errors
    ///
    /// If the synchronizer is not there in time, or refuses it.
    pub fn trainer(
        &self,
        options: PartyOptions,
        from: InitInfo,
        timeout: Option<Duration>,
    ) -> Result<Trainer> {
        let link = match &self.link {
            // The trainer's certificate is another than the explorers', so it is read again for
            // this role.
            ServiceLink::Remote(remote) if self.finds_access => {
                let access = allowed(None, CertificateRole::Trainer)?;
                ServiceLink::Remote(Arc::new(remote.with_access(access)?))
            }
            link => link.clone(),
        };
        Trainer::join(link, options, from, timeout)
    }

    /// Joins as an explorer.
    ///
    /// # Errors
    ///
    /// As [`trainer`](Self::trainer).
    pub fn explorer(&self, options: PartyOptions, timeout: Option<Duration>) -> Result<Explorer> {
        Explorer::join(self.link.clone(), options, timeout)
    }
}

/// The value of the header `Authorization` that requests to a synchronizer need; none if it has no token.
pub fn authorization(access: &Access) -> Option<String> {
    let secret = access.token.as_ref()?.secret();
    let header = Bearer::to_synchronizer(Some(&secret)).header();
    header.to_str().ok().map(str::to_owned)
}

fn allowed(access: Option<Access>, part: CertificateRole) -> Result<Access> {
    let access = match access {
        Some(access) => Ok(access),
        None => Access::from_env().and_then(|access| access.with_tls(part, None)),
    };
    Ok(access.map_err(SyncError::from)?)
}
