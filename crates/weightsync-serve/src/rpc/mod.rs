//! The RPC scheme: the sender calls its workers.
//!
//! Every worker serves a small HTTP endpoint and registers with the sender. A send is a call to
//! each worker, to all at the same time. The worker fetches the blocks that it does not have,
//! checks each, and stages the version. Later it answers that it has applied the version, or
//! why not. `openapi.json` describes both endpoints.
//!
//! | step of the journey | here |
//! |---|---|
//! | stage, swap | the sender's segment: every worker is a remote reader of it |
//! | transport | `sender::caller` calls, `receiver::fetch` fetches |
//! | verify | `receiver::fetch`, block by block; then the digest, if there is one |
//! | hand over | `receiver::inbox` |
//! | report the outcome | `receiver`; `sender::workers` passes it on to the segment |
//!
//! Each end holds a connection to the other for its whole life, and sends a sign of life on it
//! five times a second. If the connection ends, the other end has died, unless it announced
//! that it leaves. Silence alone is not a death.

mod address;
mod error;
mod receiver;
mod sender;
pub(crate) mod wire;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use weightsync_engine::settings::{self, Setting, Wrong};
use weightsync_engine::transport::{
    Deadline, Endpoint, FirstWeights, Joining, Opening, ReceiverTransport, Registration, Scheme,
    SenderTransport, register,
};
use weightsync_engine::{AnyScheme, Capabilities, Error, ModelId, Result, SenderStatus};
use weightsync_link::access::{Access, AccessError, encrypts_loopback};
use weightsync_link::reach::{self, Reached};
use weightsync_link::tls::CertificateRole;
use weightsync_mem::threads::{CondvarExt as _, LockExt as _};

use self::error::RpcError;
use self::wire::of_sender;
use crate::http::{Ask, Bearer, Client, Encryption, Fault, To};

/// The longest status, in bytes.
const MAX_STATUS: usize = 64 << 20;

/// How often each end sends a sign of life.
const BEAT: Duration = Duration::from_millis(200);

/// How long an end may be silent before others stop waiting for it.
const SILENCE: Duration = Duration::from_millis(800);

/// How long the system of a silent end may take to answer, and how often it is asked. If the
/// system does not answer, the end is out of reach or off. If it does, the end is stopped.
const PROBE: Duration = Duration::from_millis(250);

/// The same while a version is being sent there, which may fill every queue.
const PROBE_BEHIND: Duration = Duration::from_millis(1500);
const PROBE_AGAIN: Duration = Duration::from_secs(10);

/// How long a single answer may take that waits for nothing.
const PATIENCE: Duration = Duration::from_secs(10);

/// The sender calls its workers over HTTP, and they fetch what it published.
///
/// `rpc`, with the settings of [`SETTINGS`](Self::SETTINGS). See `docs/rpc.md`.
///
/// ```
/// use weightsync::{SenderSetup, Tensors};
/// use weightsync_serve::Rpc;
///
/// let mut weights = Tensors::new();
/// weights.insert("bias", [1], [0.5_f32])?;
/// let setup = SenderSetup::new("policy", &weights)?.scheme(Rpc::default())?;
/// assert_eq!(setup.init_info().scheme(), "rpc");
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Rpc {
    initial: FirstWeights,
    /// [`ANYWHERE`] without it.
    listen: Option<String>,
    advertise: Option<String>,
    tls: Option<PathBuf>,
    insecure_plaintext: bool,
    access: Option<Access>,
}

/// Where a sender listens by default.
const ANYWHERE: &str = "127.0.0.1:0";

impl Default for Rpc {
    /// At a free port of this machine; the first weights come with the first send.
    fn default() -> Self {
        Self {
            initial: FirstWeights::AtFirstSend,
            listen: None,
            advertise: None,
            tls: None,
            insecure_plaintext: false,
            access: None,
        }
    }
}

impl Rpc {
    /// When workers get their first weights: with the first send (the default), or
    /// with the rendez-vous.
    #[must_use]
    pub fn initial(mut self, when: FirstWeights) -> Self {
        self.initial = when;
        self
    }

    /// Where the sender listens, as `HOST:PORT`. With port 0 it chooses one, and keeps
    /// it where there is a run directory.
    ///
    /// An address that is not loopback requires a token ([`Access`]) on every machine, and
    /// [certificates](Self::tls) or permission to send [plain text](Self::insecure_plaintext). If
    /// the sender listens on every address (`0.0.0.0`), workers get the address that this machine
    /// has towards others.
    #[must_use]
    pub fn listen(mut self, at: &str) -> Self {
        self.listen = Some(at.to_owned()).filter(|at| at != ANYWHERE);
        self
    }

    /// Where workers find the sender, as `HOST:PORT`, if this differs from where it listens.
    /// Port 0 stands for the port on which it listens.
    #[must_use]
    pub fn advertise(mut self, at: &str) -> Self {
        self.advertise = Some(at.into());
        self
    }

    /// Sets where the certificates are, instead of the environment's. Workers look for theirs at the
    /// same path, unless the environment names another.
    #[must_use]
    pub fn tls(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls = Some(reach::certificates(path.into()));
        self
    }

    /// Allows unencrypted connections to other machines. Workers take the setting from the init
    /// info.
    #[must_use]
    pub fn insecure_plaintext(mut self) -> Self {
        self.insecure_plaintext = true;
        self
    }

    /// Sets who may connect and where the sender may listen, with its certificates: those of
    /// [`tls`](Self::tls) then do not count. The default comes from the environment.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// The settings of this scheme's text.
    pub const SETTINGS: &[Setting<Self>] = &[
        Setting {
            key: "initial",
            takes: "connect or send",
            about: "when workers get their first weights: with the first send, or with the rendez-vous",
            set: |scheme, value| {
                scheme.initial = match value {
                    "send" => FirstWeights::AtFirstSend,
                    "connect" => FirstWeights::AtConnect,
                    _ => return Err(Wrong::Value),
                };
                Ok(())
            },
            get: |scheme| {
                let when = match scheme.initial {
                    FirstWeights::AtFirstSend => "send",
                    FirstWeights::AtConnect => "connect",
                };
                Some(when.into())
            },
        },
        reach::listen(),
        reach::advertise(),
        reach::tls(),
        reach::insecure_plaintext(),
    ];

    /// Who may connect to the sender.
    fn allowed(&self) -> Result<Access> {
        let access = match &self.access {
            Some(access) => Ok(access.clone()),
            None => {
                let tls = self.tls.as_deref();
                Access::from_env().and_then(|access| access.with_tls(CertificateRole::Trainer, tls))
            }
        };
        self.with_plaintext(access)
    }

    fn with_plaintext(&self, access: Result<Access, AccessError>) -> Result<Access> {
        let mut access = access.map_err(RpcError::from)?;
        // Either may allow it: this scheme's setting or the access.
        access.insecure_plaintext |= self.insecure_plaintext;
        Ok(access)
    }

    /// The same for a worker. A worker needs no token for a sender on its own machine: a token
    /// in the environment may be for something else.
    fn allowed_to(&self, sender: SocketAddr) -> Result<Access> {
        let access = match &self.access {
            Some(access) => Ok(access.clone()),
            // Loopback stays plain unless both ends ask for encryption there.
            None if sender.ip().to_canonical().is_loopback()
                && !encrypts_loopback().map_err(RpcError::from)? =>
            {
                Access::with_token(None)
            }
            None => {
                let tls = self.tls.as_deref();
                Access::from_env()
                    // The path of the certificates comes from the sender's init info, unless this
                    // worker's environment names another.
                    .and_then(|access| access.with_told_tls(CertificateRole::Worker, tls))
            }
        };
        self.with_plaintext(access)
    }
}

impl Reached for Rpc {
    fn listen(&mut self) -> &mut Option<String> {
        &mut self.listen
    }

    fn advertise(&mut self) -> &mut Option<String> {
        &mut self.advertise
    }

    fn tls(&mut self) -> &mut Option<PathBuf> {
        &mut self.tls
    }

    fn insecure_plaintext(&mut self) -> &mut bool {
        &mut self.insecure_plaintext
    }
}

register! {
    Registration::new("rpc", |given| {
        let mut scheme = settings::read("rpc", Rpc::SETTINGS, given)?;
        // Said or not, it is the same scheme.
        scheme.listen = scheme.listen.filter(|at| at != ANYWHERE);
        Ok(AnyScheme::new(scheme))
    })
    .settings(|| settings::declared(Rpc::SETTINGS))
}

impl Scheme for Rpc {
    fn name(&self) -> &str {
        "rpc"
    }

    fn settings(&self) -> Vec<(String, String)> {
        settings::given(self, Self::SETTINGS)
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::ALL;
        // A newer version replaces one that a worker has not begun to fetch. Both are gone with
        // their sender.
        can.every_version = false;
        can.outlives = false;
        can
    }

    fn first_weights(&self) -> FirstWeights {
        self.initial
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        let access = self.allowed()?;
        let listens = address::listening("listen", self.listen.as_deref().unwrap_or(ANYWHERE))?;
        access.may_listen(listens).map_err(RpcError::from)?;
        // The name and the secret follow from the run directory, if there is one: a successor has
        // the same.
        let fresh = Endpoint::fresh(models, run_dir)?;
        let secret = match access.token {
            Some(token) => token.secret(),
            None => *fresh.secret(),
        };
        // Before any socket listens: the init info goes out first, and the address in it must stay
        // true.
        let listens = address::allocate(listens, &fresh, run_dir, models)?;
        let mut found = match &self.advertise {
            None => address::reached(listens)?,
            Some(name) => address::listening("advertise", name)?,
        };
        // Port 0 in `advertise` stands for the port that was found.
        if found.port() == 0 {
            found.set_port(listens.port());
        }
        let at = Addresses { found, listens };
        Endpoint::new(at.to_string(), secret, fresh.restarts())
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        let sender = sender::RpcSender::open(opening, &self.allowed()?)?;
        Ok(Box::new(sender))
    }

    fn ask_status(&self, at: &Endpoint, timeout: Duration) -> Result<SenderStatus> {
        let sender = Addresses::of(at)?.found;
        let access = self.allowed_to(sender)?;
        // The bearer is made of the secret, so it is sent only where the access allows it.
        access
            .may_dial_with_secret(sender)
            .map_err(RpcError::from)?;
        let encryption = Encryption {
            tls: access.tls.clone(),
            to: To::Sender,
        };
        let client = Client::new(sender, Bearer::to_sender(at.secret()), encryption);
        let since = Instant::now();
        // One deadline for each of the two steps, the head and the body.
        let asked = async {
            let reply = client.ask(Ask::get(of_sender::STATUS), timeout).await?;
            match reply.status {
                StatusCode::OK => reply.json(MAX_STATUS, timeout).await,
                status => Err(Fault::Status {
                    addr: sender,
                    status,
                }),
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(RpcError::Thread)?;
        // In a thread of its own, to its end: the caller's may belong to an async runtime, which must
        // neither block nor drop another runtime.
        let asked = thread::scope(|scope| scope.spawn(move || runtime.block_on(asked)).join());
        let asked = asked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        asked.map_err(|fault| Error::NoSender {
            address: at.address().into(),
            waited: since.elapsed(),
            last: Some(fault.to_string()),
        })
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        let access = self.allowed_to(Addresses::of(at)?.found)?;
        let receiver = receiver::RpcReceiver::join(at, joining, &access, deadline)?;
        Ok(Box::new(receiver))
    }
}

/// The addresses in an endpoint. They contain no names, so a worker does not wait for name
/// resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// Where workers find the sender.
    pub(crate) found: SocketAddr,
    /// Where it listens.
    listens: SocketAddr,
}

impl Addresses {
    /// # Errors
    ///
    /// [`Error::BadInitInfo`] for an address that no [`place`](Scheme::allocate_endpoint) has made.
    pub(crate) fn of(at: &Endpoint) -> Result<Self> {
        let address = at.address();
        // One address stands for both, if they are equal.
        let (found, listens) = address.split_once(" at ").unwrap_or((address, address));
        match (found.parse(), listens.parse()) {
            (Ok(found), Ok(listens)) => Ok(Self { found, listens }),
            _ => Err(Error::BadInitInfo(
                "its address is not that of a sender of rpc".into(),
            )),
        }
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.found)?;
        match self.found == self.listens {
            true => Ok(()),
            false => write!(f, " at {}", self.listens),
        }
    }
}

/// Waits on a condition until something may have changed, at most until the deadline. The
/// caller's check, which may end the wait, runs without the lock.
fn wait_on<'a, T>(
    condition: &std::sync::Condvar,
    lock: &'a std::sync::Mutex<T>,
    guard: std::sync::MutexGuard<'a, T>,
    deadline: Deadline,
) -> Result<std::sync::MutexGuard<'a, T>> {
    use weightsync_engine::transport::{interrupt, left};

    // The check may call the user's program, such as Python's signal handlers, so it runs without
    // the lock.
    if interrupt::is_due() {
        drop(guard);
        interrupt::ask()?;
        return Ok(lock.locked());
    }
    // With an interrupt check the wait goes in slices, and the caller's loop looks again after
    // each.
    Ok(condition.wait_at_most(guard, interrupt::slice(left(deadline))))
}
