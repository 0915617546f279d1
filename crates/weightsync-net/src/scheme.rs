//! The scheme of many hosts.

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use strum::{EnumString, IntoStaticStr};
use weightsync_engine::settings::{self, Setting, flag, number, set_flag, word};
use weightsync_engine::transport::{
    Capabilities, Deadline, Endpoint, Joining, Opening, ReceiverTransport, Registration, Scheme,
    SenderTransport, register,
};
use weightsync_engine::{
    AnyScheme, Error, InitInfo, ModelId, Queue, Result, SenderStatus, WorkerId,
};
use weightsync_link::access::{Access, Token};
use weightsync_link::address::{PortFile, bad, listen_error, listening, reached, told};
use weightsync_link::reach::{self, Reached};
use weightsync_link::tls::CertificateRole;
use weightsync_mem::threads::LockExt as _;
use weightsync_mem::{Delivery, Listener};

use crate::agent::Agent;
use crate::agent::local::{self, NameOwner};
use crate::error::{os, transport};
use crate::receiver::NetReceiver;
use crate::root::NetSender;
use crate::status::{self, not_asked};

/// Many hosts: workers dial in. With a relay on each host, each version goes to a
/// host once, from one to the next, and all workers of the host share that copy;
/// without one, a worker is its own relay.
///
/// `distributed`, with the settings of [`SETTINGS`](Self::SETTINGS).
///
/// Without a [`Token`] (`WEIGHTSYNC_TOKEN_FILE`, `WEIGHTSYNC_TOKEN`, or
/// [`token`](Self::token)) nothing listens on an address that is not loopback.
///
/// Workers find a trainer that has restarted by its run directory. Without one they
/// end with it, also where another one comes to the same port.
///
/// ```
/// use weightsync::scheme::AnyScheme;
/// use weightsync::{SenderSetup, Tensors};
/// use weightsync_net::Distributed;
///
/// let mut weights = Tensors::new();
/// weights.insert("bias", [2], vec![0.5_f32, 1.5])?;
/// let setup = SenderSetup::new("policy", &weights)?.scheme(Distributed::new())?;
/// assert!(setup.init_info().scheme().starts_with("distributed"));
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Distributed {
    pub(crate) listen: Option<String>,
    pub(crate) advertise: Option<String>,
    pub(crate) insecure_plaintext: bool,
    pub(crate) queue: Queue,
    pub(crate) pull: bool,
    pub(crate) own_copy: bool,
    pub(crate) share: Share,
    pub(crate) arity: usize,
    pub(crate) connections: usize,
    pub(crate) deltas: Deltas,
    pub(crate) verify: Verify,
    pub(crate) token: Option<Token>,
    pub(crate) tls: Option<PathBuf>,
    /// The listening addresses, by the addresses that init infos name.
    allocated: Arc<Mutex<HashMap<String, Allocated>>>,
    /// The agents of workers whose `connect` ended before their first version was whole. They go
    /// on fetching for the next `connect` of this scheme or of a clone.
    unfinished: Arc<Mutex<HashMap<Unfinished, Agent>>>,
}

/// Where an unfinished agent fetches from, and for which worker.
pub(crate) type Unfinished = (String, [u8; 16], WorkerId);

/// Where an allocated endpoint listens. Workers may reach it at another address.
#[derive(Debug)]
struct Allocated {
    address: SocketAddr,
    /// The listener that holds the address until the sender opens.
    listener: Option<TcpListener>,
}

/// Whose memory a worker reads. Without any, the worker fetches a copy of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Share {
    /// The trainer's on the trainer's host, the relay's elsewhere.
    #[default]
    All,
    /// Only the memory of the host's relay.
    Relay,
    /// No shared memory: each worker fetches its own copy.
    #[strum(serialize = "none")]
    Nothing,
}

/// Whether hosts with an older version get only the changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Deltas {
    /// Where that is faster, which a sample of each version shows.
    #[default]
    Auto,
    /// Wherever it takes fewer bytes.
    Always,
    /// Never: no version is compared with another.
    Never,
}

/// What a host compares that it gets of a relay of another host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Verify {
    /// The checksum that the relay sends along, which finds accidents.
    #[default]
    Checksums,
    /// Also the BLAKE3 digest of each block of 1 MiB, which the sender tells each host over a link
    /// of its own. A relay that sends anything else is named in the sender's log and in its
    /// [status](weightsync_core::RelayStatus::altered_for), and no host that it lied to fetches from it until one of the two connects again.
    /// Hosts that fetch from the sender itself compare nothing.
    ///
    /// The relay of a worker's own host is trusted: it runs as the same user.
    Blake3,
}

/// The scheme's name.
const WORD: &str = "distributed";

impl Default for Distributed {
    fn default() -> Self {
        Self::new()
    }
}

impl Reached for Distributed {
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
    Registration::new(WORD, |given| Ok(AnyScheme::new(Distributed::parse(given)?)))
        .settings(|| settings::declared(Distributed::SETTINGS))
}

impl Distributed {
    /// A scheme that listens on loopback, at a port that the system chooses.
    pub fn new() -> Self {
        Self {
            listen: None,
            advertise: None,
            insecure_plaintext: false,
            queue: Queue::Newest,
            pull: false,
            own_copy: false,
            share: Share::default(),
            arity: 1,
            connections: 2,
            deltas: Deltas::Auto,
            verify: Verify::Checksums,
            token: None,
            tls: None,
            allocated: Arc::default(),
            unfinished: Arc::default(),
        }
    }

    /// Sets the listening address `host:port`; with port 0 the system chooses the port.
    #[must_use]
    pub fn listen(mut self, address: impl Into<String>) -> Self {
        self.listen = Some(address.into());
        self
    }

    /// Where the sender of an init info is asked over the network: for its status, or by a relay.
    ///
    /// # Errors
    ///
    /// [`NetError::NotAsked`](crate::NetError::NotAsked) for the sender of another scheme.
    pub fn endpoint_of(info: &InitInfo) -> Result<&Endpoint> {
        let at = info.endpoint();
        match info.scheme().split(':').next() {
            Some(WORD) => Ok(at),
            scheme => Err(not_asked(scheme.unwrap_or_default(), at.address())),
        }
    }

    /// Sets the address at which workers reach the sender, if it is not the listening one. With
    /// port 0 the port is the listening one.
    #[must_use]
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.advertise = Some(address.into());
        self
    }

    /// Allows unencrypted connections to other machines. The init info allows them for the workers,
    /// too.
    #[must_use]
    pub fn insecure_plaintext(mut self) -> Self {
        self.insecure_plaintext = true;
        self
    }

    /// Sets the token to listen with, instead of the environment's. The scheme's text does not
    /// contain it.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Sets where the certificates are, instead of the environment's. Workers look for theirs at the
    /// same path, unless the environment names another.
    #[must_use]
    pub fn tls(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls = Some(reach::certificates(path.into()));
        self
    }

    /// Sets which versions workers get.
    #[must_use]
    pub fn queue(mut self, queue: Queue) -> Self {
        self.queue = queue;
        self
    }

    /// Workers ask for versions; the sender pushes none.
    #[must_use]
    pub fn pull(mut self) -> Self {
        self.pull = true;
        self
    }

    /// Sets whose memory workers share.
    #[must_use]
    pub fn share(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// Sets how many hosts fetch from each host; 1 makes a chain.
    #[must_use]
    pub fn arity(mut self, arity: usize) -> Self {
        self.arity = arity.clamp(1, 64);
        self
    }

    /// Sets how many connections a host fetches over.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections.clamp(1, 8);
        self
    }

    /// Each version is copied into the worker's own memory.
    #[must_use]
    pub fn own_copy(mut self) -> Self {
        self.own_copy = true;
        self
    }

    /// Sets whether hosts with an older version get only the changes.
    #[must_use]
    pub fn deltas(mut self, deltas: Deltas) -> Self {
        self.deltas = deltas;
        self
    }

    /// Sets whether hosts trust what relays send.
    #[must_use]
    pub fn verify(mut self, verify: Verify) -> Self {
        self.verify = verify;
        self
    }

    /// The settings of this scheme's text.
    pub const SETTINGS: &[Setting<Self>] = &[
        reach::listen(),
        reach::advertise(),
        reach::tls(),
        reach::insecure_plaintext(),
        Setting {
            key: "every",
            takes: "1 to 32",
            about: "every version in order, with at most this many in a worker's queue; the newest alone, \
                    without it",
            set: |scheme, value| {
                let bound = number(value, 1..=32)?;
                scheme.queue = Queue::Every { bound };
                Ok(())
            },
            get: |scheme| match scheme.queue {
                Queue::Every { bound } => Some(bound.to_string()),
                _ => None,
            },
        },
        Setting {
            key: "pull",
            takes: "",
            about: "workers take a version only when they ask for one; none is pushed",
            set: |scheme, value| {
                scheme.pull = flag(value)?;
                Ok(())
            },
            get: |scheme| set_flag(scheme.pull),
        },
        Setting {
            key: "own-copy",
            takes: "",
            about: "each version is copied into the worker's own memory",
            set: |scheme, value| {
                scheme.own_copy = flag(value)?;
                Ok(())
            },
            get: |scheme| set_flag(scheme.own_copy),
        },
        Setting {
            key: "share",
            takes: "all, relay or none",
            about: "whose memory workers read: the trainer's on its host and their relay's elsewhere, only \
                    their relay's, or none: each fetches a copy of its own",
            set: |scheme, value| {
                scheme.share = word(value)?;
                Ok(())
            },
            get: |scheme| Some(<&str>::from(scheme.share).into()),
        },
        Setting {
            key: "deltas",
            takes: "auto, always or never",
            about: "when hosts with an older version get the changes alone: if that is quicker, if it takes \
                    fewer bytes, or never",
            set: |scheme, value| {
                scheme.deltas = word(value)?;
                Ok(())
            },
            get: |scheme| Some(<&str>::from(scheme.deltas).into()),
        },
        Setting {
            key: "verify",
            takes: "checksums or blake3",
            about: "what hosts compare that relays send: checksums, which find accidents, or the BLAKE3 \
                    digests that the trainer tells them, for relays that nobody trusts",
            set: |scheme, value| {
                scheme.verify = word(value)?;
                Ok(())
            },
            get: |scheme| Some(<&str>::from(scheme.verify).into()),
        },
        Setting {
            key: "arity",
            takes: "1 to 64",
            about: "how many hosts fetch from each host; 1 is a chain",
            set: |scheme, value| {
                scheme.arity = number(value, 1..=64)?;
                Ok(())
            },
            get: |scheme| Some(scheme.arity.to_string()),
        },
        Setting {
            key: "connections",
            takes: "1 to 8",
            about: "how many connections a host fetches over",
            set: |scheme, value| {
                scheme.connections = number(value, 1..=8)?;
                Ok(())
            },
            get: |scheme| Some(scheme.connections.to_string()),
        },
    ];

    fn parse(given: &BTreeMap<String, String>) -> Result<Self> {
        let scheme = settings::read(WORD, Self::SETTINGS, given)?;
        // A worker that only asks has no queue to bound.
        if scheme.pull && scheme.queue != Queue::Newest {
            return Err(bad("pull", "not to be set with `every`", "both"));
        }
        Ok(scheme)
    }

    /// The settings as an agent gets them, without those that say where this sender is reached.
    pub(crate) fn told_to_agents(&self) -> String {
        let reach = [
            reach::listen::<Self>().key,
            reach::advertise::<Self>().key,
            reach::tls::<Self>().key,
            reach::insecure_plaintext::<Self>().key,
        ];
        let told = settings::given(self, Self::SETTINGS).into_iter();
        let told = told.filter(|(key, _)| !reach.contains(&key.as_str()));
        let told = told.map(|(key, value)| match value.is_empty() {
            true => key,
            false => format!("{key}={value}"),
        });
        told.collect::<Vec<_>>().join(",")
    }

    /// The other side of [`told_to_agents`](Self::told_to_agents).
    pub(crate) fn told_by_sender(text: &str) -> Result<Self> {
        let told = text.split(',').filter(|one| !one.is_empty());
        let told = told.map(|one| one.split_once('=').unwrap_or((one, "")));
        Self::parse(
            &told
                .map(|(key, value)| (key.into(), value.into()))
                .collect(),
        )
    }

    /// Whether blocks that come of relays are compared with the sender's digests.
    pub(crate) fn verifies(&self) -> bool {
        self.verify == Verify::Blake3
    }

    pub(crate) fn delivery(&self) -> Delivery {
        match (self.pull, self.queue) {
            (true, _) => Delivery::Asked,
            (false, Queue::Every { bound }) => Delivery::Every { bound },
            (false, _) => Delivery::Newest,
        }
    }

    /// The access settings; the environment supplies those that were not set.
    pub(crate) fn access(&self) -> Result<Access> {
        let token = match &self.token {
            Some(token) => Some(token.clone()),
            None => Token::from_env().map_err(transport)?,
        };
        let access = self.access_with(token)?;
        let tls = access.with_tls(CertificateRole::Trainer, self.tls.as_deref());
        tls.map_err(transport)
    }

    /// The access settings of an end that only connects: an init info's secret is as good as a
    /// token.
    pub(crate) fn access_to_dial(&self) -> Result<Access> {
        let access = self.access_with(self.token.clone())?;
        let tls = access.with_told_tls(CertificateRole::Worker, self.tls.as_deref());
        tls.map_err(transport)
    }

    fn access_with(&self, token: Option<Token>) -> Result<Access> {
        let mut access = Access::with_token(token).map_err(transport)?;
        access.insecure_plaintext |= self.insecure_plaintext;
        Ok(access)
    }

    fn allocated(&self) -> MutexGuard<'_, HashMap<String, Allocated>> {
        self.allocated.locked()
    }

    pub(crate) fn unfinished(&self) -> MutexGuard<'_, HashMap<Unfinished, Agent>> {
        self.unfinished.locked()
    }

    /// The address to listen at; with port 0 the system chooses the port.
    pub(crate) fn listens(&self) -> Result<SocketAddr> {
        let name = self.listen.as_deref().unwrap_or("127.0.0.1:0");
        listening("listen", name)
    }

    /// Binds a listener.
    pub(crate) fn bind(&self, address: SocketAddr) -> Result<TcpListener> {
        self.access()?.may_listen(address).map_err(transport)?;
        TcpListener::bind(address).map_err(|source| listen_error(address, source))
    }

    /// The address at which workers reach a listener.
    pub(crate) fn reached_at(&self, bound: SocketAddr) -> Result<String> {
        let Some(advertise) = &self.advertise else {
            return Ok(reached(bound)?.to_string());
        };
        Ok(match told("advertise", advertise)? {
            (host, 0) => format!("{host}:{}", bound.port()),
            _ => advertise.clone(),
        })
    }
}

impl Scheme for Distributed {
    fn name(&self) -> &str {
        WORD
    }

    fn settings(&self) -> Vec<(String, String)> {
        settings::given(self, Self::SETTINGS)
    }

    fn capabilities(&self) -> Capabilities {
        let every = matches!(self.queue, Queue::Every { .. });
        let mut can = Capabilities::ALL;
        can.push = !self.pull;
        can.pull = !every;
        can.every_version = every;
        // A version that no other host has is lost with the trainer.
        can.outlives = false;
        can
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        // The run directory's secret, if there is one.
        let fresh = Endpoint::fresh(models, run_dir)?;
        let access = self.access()?;
        let secret = match &access.token {
            Some(token) => token.secret(),
            None => *fresh.secret(),
        };
        let mut address = self.listens()?;
        // Workers know the address of an earlier sender, so its successor takes the same port.
        let file = match (run_dir, address.port()) {
            (Some(dir), 0) => Some(PortFile::new(dir, WORD, models)),
            _ => None,
        };
        if let Some(port) = file.as_ref().map(PortFile::saved).transpose()?.flatten() {
            address.set_port(port);
        }
        // An earlier setup of this process may still hold the address.
        self.allocated().clear();
        let mut listener = match self.bind(address) {
            // The predecessor still holds the port and may be alive; `open` finds out.
            Err(Error::AddressInUse { .. }) if run_dir.is_some() => None,
            listener => Some(listener?),
        };
        if let Some(listener) = &listener {
            address = local_address(listener)?;
        }
        if let Some(file) = file {
            let port = file.keep(address.port())?;
            if port != address.port() {
                // Another process chose a port first.
                listener = None;
                address.set_port(port);
            }
        }
        let endpoint = Allocated { address, listener };
        let address = self.reached_at(address)?;
        self.allocated().insert(address.clone(), endpoint);
        // Without a run directory, a later sender at this port is another run.
        Endpoint::new(address, secret, run_dir.is_some())
    }

    fn release_endpoint(&self, at: &Endpoint) {
        self.allocated().remove(at.address());
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        let address = opening.at.address();
        let kept = {
            let mut allocated = self.allocated();
            let endpoint = allocated.get_mut(address);
            endpoint.map(|endpoint| (endpoint.address, endpoint.listener.take()))
        };
        let remote = match kept {
            Some((_, Some(listener))) => listener,
            // The predecessor held the address at the set-up, and may be gone by now.
            Some((listens, None)) => self.bind(listens)?,
            // This scheme did not make the endpoint. The workers were told its port.
            None => {
                let mut listens = self.listens()?;
                if listens.port() == 0 {
                    listens.set_port(port_of(address).unwrap_or(0));
                }
                self.bind(listens)?
            }
        };
        let names = local::names(opening.at.secret(), address, NameOwner::Sender);
        // Elsewhere than on Linux, other processes of this host come over TCP.
        let (local, _) = local::first_free(&names, Listener::at_least_here)?;
        Ok(Box::new(NetSender::open(self, opening, (local, remote))?))
    }

    fn ask_status(&self, at: &Endpoint, timeout: Duration) -> Result<SenderStatus> {
        let access = self.access()?;
        status::ask(
            at.address(),
            at.secret(),
            access.tls.as_ref(),
            Some(timeout),
        )
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        Ok(Box::new(NetReceiver::join(self, at, joining, deadline)?))
    }
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr> {
    listener
        .local_addr()
        .map_err(os("asking a socket for its address"))
}

fn port_of(address: &str) -> Option<u16> {
    address.rsplit_once(':')?.1.parse().ok()
}

#[cfg(test)]
mod tests;
