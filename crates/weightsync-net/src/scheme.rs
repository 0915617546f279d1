//! The scheme of many hosts.

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weightsync_engine::transport::{
    Capabilities, Deadline, Endpoint, Joining, Opening, ReceiverTransport, Registration, Scheme,
    SenderTransport, register,
};
use weightsync_engine::{AnyScheme, Error, ModelId, Queue, Result, WorkerId};
use weightsync_mem::{Delivery, Listener};

use crate::access::{Access, Token};
use crate::address::{PortFile, bad, host_and_port, reached, resolve};
use crate::error::{listen_error, os, transport};
use crate::receiver::NetReceiver;
use crate::relay::Agent;
use crate::relay::local::{self, Owner};
use crate::root::NetSender;
use crate::tls::Part;

/// Many hosts: workers dial in. With a relay on each host, each version goes to a
/// host once, from one to the next, and all workers of the host share that copy;
/// without one, a worker is its own relay.
///
/// `distributed`, with these settings:
///
/// | | |
/// |---|---|
/// | `listen=HOST:PORT` | where the trainer listens; `127.0.0.1:0` by default |
/// | `advertise=HOST:PORT` | the address at which workers reach it, if that is another one; port 0 is the listening port |
/// | `tls=DIR` | the certificates of encrypted links (see [`tls`](crate::tls)); workers look for theirs at the same path, unless `WEIGHTSYNC_TLS_DIR` names another |
/// | `insecure-plaintext` | allow unencrypted connections to other machines; workers take this from the init info |
/// | `every=N` | every version in order, with at most N in a worker's queue (1 to 32) |
/// | `pull` | workers ask for versions; none is pushed |
/// | `own-copy` | each version is copied into the worker's own memory |
/// | `share=all`, `relay`, `none` | whose memory workers read: the trainer's if it is on their host, else their relay's (default); only their relay's; none, each fetches its own copy |
/// | `arity=N` | how many hosts fetch from each; 1 by default, a chain |
/// | `connections=N` | how many connections a host fetches over, 1 to 8 |
/// | `verify=blake3` | hosts do not trust relays: each compares what relays send with BLAKE3 digests that the sender tells it |
/// | `deltas=auto`, `always`, `never` | when hosts with an older version get only the changes: if that is faster (default), if it takes fewer bytes, never |
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Share {
    /// The trainer's on the trainer's host, the relay's elsewhere.
    #[default]
    All,
    /// Only the memory of the host's relay.
    Relay,
    /// No shared memory: each worker fetches its own copy.
    Nothing,
}

/// Whether hosts with an older version get only the changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verify {
    /// The checksum that the relay sends along, which finds accidents.
    #[default]
    Checksums,
    /// Also the BLAKE3 digest of each block of 1 MiB, which the sender tells each host over a link
    /// of its own. A relay that sends anything else is named in the sender's log and in its
    /// [status](crate::status::Relay::altered_for), and no host that it lied to fetches from it until one of the two connects again.
    /// Hosts that fetch from the sender itself compare nothing.
    ///
    /// The relay of a worker's own host is trusted: it runs as the same user.
    Blake3,
}

/// The scheme's name.
const WORD: &str = "distributed";

/// The settings, for errors about a wrong one.
const SETTINGS: &str = "listen=HOST:PORT, advertise=HOST:PORT, tls=DIR, insecure-plaintext, every=1 to 32, \
                        pull, own-copy, share=all, relay or none, arity=1 to 64, connections=1 to 8, \
                        deltas=auto, always or never, verify=checksums or blake3";

impl Default for Distributed {
    fn default() -> Self {
        Self::new()
    }
}

register! {
    Registration::new(WORD, |settings| Ok(AnyScheme::new(Distributed::parse(settings)?)))
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
        let path = path.into();
        // Workers may run in another folder.
        self.tls = Some(std::path::absolute(&path).unwrap_or(path));
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

    fn parse(settings: &BTreeMap<String, String>) -> Result<Self> {
        let mut scheme = Self::new();
        for (key, value) in settings {
            match key.as_str() {
                "listen" | "advertise" => {
                    host_and_port(key, value)?;
                    let value = Some(value.clone());
                    match key.as_str() {
                        "listen" => scheme.listen = value,
                        _ => scheme.advertise = value,
                    }
                }
                "tls" if value.is_empty() => {
                    return Err(bad(key, "a folder or a file of certificates", value));
                }
                "tls" => scheme = scheme.tls(value),
                "insecure-plaintext" => scheme.insecure_plaintext = flag(key, value)?,
                "pull" => scheme.pull = flag(key, value)?,
                "own-copy" => scheme.own_copy = flag(key, value)?,
                "every" => {
                    let bound = number(key, value, 1, 32)? as u8;
                    scheme.queue = Queue::Every { bound };
                }
                "share" => {
                    scheme.share = match value.as_str() {
                        "all" => Share::All,
                        "relay" => Share::Relay,
                        "none" => Share::Nothing,
                        _ => return Err(bad(key, "all, relay or none", value)),
                    }
                }
                "deltas" => {
                    scheme.deltas = match value.as_str() {
                        "auto" => Deltas::Auto,
                        "always" => Deltas::Always,
                        "never" => Deltas::Never,
                        _ => return Err(bad(key, "auto, always or never", value)),
                    }
                }
                "verify" => {
                    scheme.verify = match value.as_str() {
                        "checksums" => Verify::Checksums,
                        "blake3" => Verify::Blake3,
                        _ => return Err(bad(key, "checksums or blake3", value)),
                    }
                }
                "arity" => scheme.arity = number(key, value, 1, 64)?,
                "connections" => scheme.connections = number(key, value, 1, 8)?,
                _ => return Err(bad(key, SETTINGS, key)),
            }
        }
        if scheme.pull && scheme.queue != Queue::Newest {
            return Err(bad("pull", "not to be set with `every`", "both"));
        }
        Ok(scheme)
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
        let tls = access.with_tls(Part::Trainer, self.tls.as_deref());
        tls.map_err(transport)
    }

    /// The access settings of an end that only connects: an init info's secret is as good as a
    /// token.
    pub(crate) fn access_to_dial(&self) -> Result<Access> {
        let access = self.access_with(self.token.clone())?;
        let tls = access.with_told_tls(Part::Worker, self.tls.as_deref());
        tls.map_err(transport)
    }

    fn access_with(&self, token: Option<Token>) -> Result<Access> {
        let mut access = Access::with_token(token).map_err(transport)?;
        access.insecure_plaintext |= self.insecure_plaintext;
        Ok(access)
    }

    fn allocated(&self) -> MutexGuard<'_, HashMap<String, Allocated>> {
        self.allocated
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn unfinished(&self) -> MutexGuard<'_, HashMap<Unfinished, Agent>> {
        self.unfinished
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The address to listen at; with port 0 the system chooses the port.
    pub(crate) fn listens(&self) -> Result<SocketAddr> {
        let name = self.listen.as_deref().unwrap_or("127.0.0.1:0");
        host_and_port("listen", name)?;
        resolve(name)
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
        Ok(match host_and_port("advertise", advertise)? {
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
        let mut settings = Vec::new();
        let mut set = |key: &str, value: String| settings.push((key.to_owned(), value));
        if let Some(listen) = &self.listen {
            set("listen", listen.clone());
        }
        if let Some(advertise) = &self.advertise {
            set("advertise", advertise.clone());
        }
        if let Some(tls) = &self.tls {
            set("tls", tls.display().to_string());
        }
        if self.insecure_plaintext {
            set("insecure-plaintext", String::new());
        }
        if let Queue::Every { bound } = self.queue {
            set("every", bound.to_string());
        }
        if self.pull {
            set("pull", String::new());
        }
        if self.own_copy {
            set("own-copy", String::new());
        }
        match self.share {
            Share::All => {}
            Share::Relay => set("share", "relay".into()),
            Share::Nothing => set("share", "none".into()),
        }
        match self.deltas {
            Deltas::Auto => {}
            Deltas::Always => set("deltas", "always".into()),
            Deltas::Never => set("deltas", "never".into()),
        }
        if self.verify == Verify::Blake3 {
            set("verify", "blake3".into());
        }
        if self.arity != 1 {
            set("arity", self.arity.to_string());
        }
        if self.connections != 2 {
            set("connections", self.connections.to_string());
        }
        settings
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
            Some((listens, None)) => self.bind(listens)?,
            None => {
                let mut listens = self.listens()?;
                if listens.port() == 0 {
                    listens.set_port(port_of(address).unwrap_or(0));
                }
                self.bind(listens)?
            }
        };
        let names = local::names(opening.at.secret(), address, Owner::Sender);
        // Elsewhere than on Linux, other processes of this host come over TCP.
        let (local, _) = local::first_free(&names, Listener::at_least_here)?;
        Ok(Box::new(NetSender::open(self, opening, (local, remote))?))
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

fn flag(key: &str, value: &str) -> Result<bool> {
    match value {
        "" | "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(bad(key, "no value, true or false", value)),
    }
}

fn number(key: &str, value: &str, least: usize, most: usize) -> Result<usize> {
    let number = value.parse().ok();
    let number = number.filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| bad(key, &format!("a number from {least} to {most}"), value))
}

#[cfg(test)]
mod tests;
