//! The scheme of many hosts.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weightsync::transport::{
    Capabilities, Deadline, Endpoint, Joining, Opening, ReceiverTransport, Scheme, SenderTransport,
};
use weightsync::{AnyScheme, Error, MemoryError, ModelId, Queue, Result, Schemes};
use weightsync_mem::Delivery;

use crate::access::{Access, Token};
use crate::error::{NetError, transport};
use crate::receiver::NetReceiver;
use crate::relay::local::{self, Whose};
use crate::root::NetSender;

/// Many hosts: workers dial in. With a relay on each host, each version goes to a
/// host once, from one to the next, and all workers of the host share that copy;
/// without one, a worker is its own relay.
///
/// `distributed`, with these settings:
///
/// | | |
/// |---|---|
/// | `listen=HOST:PORT` | where the trainer listens; `127.0.0.1:0` unless it is said |
/// | `advertise=HOST:PORT` | how workers reach it, if that is another address; port 0 is the one it listens at |
/// | `insecure-plaintext` | links that leave this machine are fine, although they are not encrypted; workers take it from the init info |
/// | `every=N` | every version in order, with at most N in a worker's queue (1 to 32) |
/// | `pull` | workers ask; nothing is pushed |
/// | `own-copy` | each version is copied into the worker's own memory |
/// | `share=all`, `relay`, `none` | whose memory workers read: that of the trainer if it is on their host, or of their host's relay (unless it is said); only of the relay; nobody's |
/// | `arity=N` | how many hosts fetch from each: 1, a chain, unless it is said |
/// | `connections=N` | connections by which a host fetches, 1 to 8 |
///
/// Without a [`Token`] (`WEIGHTSYNC_TOKEN_FILE`, `WEIGHTSYNC_TOKEN`, or
/// [`token`](Self::token)) nothing listens on an address that is not loopback.
///
/// Workers find a trainer that has restarted by its run directory. Without one they
/// end with it, also where another one comes to the same port.
///
/// ```
/// use weightsync::{AnyScheme, SenderSetup, Tensors};
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
    pub(crate) token: Option<Token>,
    /// Sockets that listen already, so that their addresses can be told; by these.
    listeners: Arc<Mutex<HashMap<String, TcpListener>>>,
}

/// Whose memory a worker reads. Where there is nobody's, it fetches a copy of its
/// own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Share {
    /// The trainer's, on its host; elsewhere that of the host's relay.
    #[default]
    All,
    /// That of the host's relay.
    Relay,
    /// Nobody's.
    Nothing,
}

/// The word the scheme is chosen by.
const WORD: &str = "distributed";

/// What the settings are, for who gets one wrong.
const SETTINGS: &str = "listen=HOST:PORT, advertise=HOST:PORT, insecure-plaintext, every=1 to 32, \
                        pull, own-copy, share=all, relay or none, arity=1 to 64, connections=1 to 8";

impl Default for Distributed {
    fn default() -> Self {
        Self::new()
    }
}

impl Distributed {
    /// On loopback, at a port the system chooses.
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
            token: None,
            listeners: Arc::default(),
        }
    }

    /// Listens there: `host:port`, port 0 for one that the system chooses.
    #[must_use]
    pub fn listen(mut self, address: impl Into<String>) -> Self {
        self.listen = Some(address.into());
        self
    }

    /// Says that workers reach it at another address than it listens on: `host:port`,
    /// port 0 for the one it listens at.
    #[must_use]
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.advertise = Some(address.into());
        self
    }

    /// Uses links that leave this machine, although they are not encrypted. So do the
    /// workers: the init info says it to them.
    #[must_use]
    pub fn insecure_plaintext(mut self) -> Self {
        self.insecure_plaintext = true;
        self
    }

    /// The token to listen with, in place of that of the environment. It is not
    /// part of the scheme's text.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Which versions workers get.
    #[must_use]
    pub fn queue(mut self, queue: Queue) -> Self {
        self.queue = queue;
        self
    }

    /// Workers ask; nothing is pushed.
    #[must_use]
    pub fn pull(mut self) -> Self {
        self.pull = true;
        self
    }

    /// Whose memory workers share.
    #[must_use]
    pub fn share(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// How many hosts fetch from each; 1 is a chain.
    #[must_use]
    pub fn arity(mut self, arity: usize) -> Self {
        self.arity = arity.clamp(1, 64);
        self
    }

    /// The built-in schemes and this one.
    pub fn among_schemes() -> Schemes {
        let mut schemes = Schemes::default();
        Self::add_to(&mut schemes);
        schemes
    }

    /// Adds this scheme to others.
    pub fn add_to(schemes: &mut Schemes) {
        schemes.insert(WORD, |settings| Ok(AnyScheme::new(Self::parse(settings)?)));
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

    /// With the environment's words where nothing else was said.
    pub(crate) fn access(&self) -> Result<Access> {
        let mut access = Access::from_env().map_err(transport)?;
        if let Some(token) = &self.token {
            access.token = Some(token.clone());
        }
        access.insecure_plaintext |= self.insecure_plaintext;
        Ok(access)
    }

    fn listeners(&self) -> MutexGuard<'_, HashMap<String, TcpListener>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens where it is said; at `port` if the system may choose.
    fn bind(&self, port: Option<u16>) -> Result<TcpListener> {
        let name = self.listen.as_deref().unwrap_or("127.0.0.1:0");
        host_and_port("listen", name)?;
        let mut address = resolve(name)?;
        if address.port() == 0 {
            address.set_port(port.unwrap_or(0));
        }
        self.access()?.may_listen(address).map_err(transport)?;
        TcpListener::bind(address).map_err(|source| in_use(address, source))
    }

    /// What is said to workers of where it listens, at this port if none is said.
    fn advertised(&self, bound: u16) -> Result<Option<String>> {
        let Some(advertise) = &self.advertise else {
            return Ok(None);
        };
        Ok(Some(match host_and_port("advertise", advertise)? {
            (host, 0) => format!("{host}:{bound}"),
            _ => advertise.clone(),
        }))
    }

    /// How workers reach what listens there.
    fn reached_at(&self, listener: &TcpListener) -> Result<String> {
        let bound = listener.local_addr().map_err(|source| Error::Os {
            action: "asking a socket for its address",
            source,
        })?;
        if let Some(advertised) = self.advertised(bound.port())? {
            return Ok(advertised);
        }
        match bound.ip().is_unspecified() {
            false => Ok(bound.to_string()),
            true => {
                let ip = outward(bound.ip()).ok_or_else(|| NetError::Advertise {
                    address: bound.to_string(),
                })?;
                Ok(SocketAddr::new(ip, bound.port()).to_string())
            }
        }
    }
}

impl Scheme for Distributed {
    fn word(&self) -> &str {
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
        // What had not left when the trainer was killed is gone with it.
        can.outlives = false;
        can
    }

    fn place(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        // The secret of the run directory, if there is one.
        let fresh = Endpoint::fresh(models, run_dir)?;
        let access = self.access()?;
        let secret = match &access.token {
            Some(token) => token.secret(),
            None => *fresh.secret(),
        };
        let file = run_dir.map(|dir| port_file(dir, models));
        let known = file.as_deref().and_then(read_port);
        // A setup that was placed before, without its run directory perhaps, listens
        // at the very address that is wanted now.
        self.listeners().clear();
        let listener = match self.bind(known) {
            // Its predecessor is still there, and may be alive: that is for `open`
            // to find.
            Err(Error::Memory(MemoryError::AddressInUse { address })) if known.is_some() => {
                let port = port_of(&address).unwrap_or(0);
                let address = self.advertised(port)?.unwrap_or(address);
                return Endpoint::new(address, secret, true);
            }
            listener => listener?,
        };
        let address = self.reached_at(&listener)?;
        if let (Some(file), Ok(bound)) = (&file, listener.local_addr())
            && known != Some(bound.port())
        {
            write_port(file, bound.port())?;
        }
        self.listeners().insert(address.clone(), listener);
        // Without a run directory whoever comes to the same port is of another run.
        Endpoint::new(address, secret, run_dir.is_some())
    }

    fn give_up(&self, at: &Endpoint) {
        self.listeners().remove(at.address());
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        let address = opening.at.address();
        let kept = self.listeners().remove(address);
        let remote = match kept {
            Some(listener) => listener,
            None => self.bind(port_of(address))?,
        };
        let names = local::names(opening.at.secret(), address, Whose::Sender);
        let (local, _) = local::first_free(&names)?;
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

fn in_use(address: SocketAddr, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::AddrInUse => MemoryError::AddressInUse {
            address: address.to_string(),
        }
        .into(),
        _ => NetError::Listen {
            address: address.to_string(),
            source,
        }
        .into(),
    }
}

fn resolve(name: &str) -> Result<SocketAddr> {
    use std::net::ToSocketAddrs;
    let not_found = |source| NetError::Listen {
        address: name.into(),
        source,
    };
    let mut addresses = name.to_socket_addrs().map_err(not_found)?;
    let none = || not_found(io::ErrorKind::NotFound.into());
    Ok(addresses.next().ok_or_else(none)?)
}

/// The address of this machine towards others: nothing is sent to find it.
fn outward(any: IpAddr) -> Option<IpAddr> {
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    let elsewhere: SocketAddr = match any {
        IpAddr::V4(_) => ([192, 0, 2, 1], 9).into(),
        IpAddr::V6(_) => ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 9).into(),
    };
    socket.connect(elsewhere).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The parts of `host:port`.
fn host_and_port<'a>(key: &str, text: &'a str) -> Result<(&'a str, u16)> {
    let parts = text.rsplit_once(':');
    let parts = parts.and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let is_host = |host: &str| {
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        !host.is_empty() && (bare.is_some() || !host.contains(':'))
    };
    parts
        .filter(|(host, _)| is_host(host))
        .ok_or_else(|| bad(key, "HOST:PORT, such as 10.0.0.1:7070 or [::1]:7070", text))
}

fn port_of(address: &str) -> Option<u16> {
    address.rsplit_once(':')?.1.parse().ok()
}

/// Where senders of a run directory note their port.
fn port_file(dir: &Path, models: &[ModelId]) -> PathBuf {
    let mut hasher = blake3::Hasher::new();
    for model in models {
        hasher.update(model.to_string().as_bytes());
        hasher.update(&[0]);
    }
    dir.join(format!("port-{}", &hasher.finalize().to_hex()[..16]))
}

fn read_port(file: &Path) -> Option<u16> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn write_port(file: &Path, port: u16) -> Result<()> {
    let failed = |source: io::Error| Error::File {
        action: "noting the port in",
        path: file.into(),
        source: source.into(),
    };
    let part = file.with_extension(format!("{}.part", std::process::id()));
    let write = || {
        let mut new = std::fs::File::create(&part)?;
        writeln!(new, "{port}")?;
        new.sync_all()?;
        std::fs::rename(&part, file)
    };
    write().map_err(failed)
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

fn bad(setting: &str, expected: &str, got: &str) -> Error {
    Error::BadSetting {
        setting: setting.chars().take(80).collect(),
        expected: expected.into(),
        got: got.chars().take(80).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(scheme: &Distributed) -> Result<Endpoint> {
        scheme.place(&["policy".parse()?], None)
    }

    #[test]
    fn where_it_listens_and_is_reached_is_a_host_and_a_port() {
        for key in ["listen", "advertise"] {
            for wrong in [
                "127.0.0.1",
                "myhost",
                ":7070",
                "host:",
                "host:70000",
                "::1:80",
                "",
            ] {
                let settings = BTreeMap::from([(key.to_owned(), wrong.to_owned())]);
                let parsed = Distributed::parse(&settings);
                let built = place(&match key {
                    "listen" => Distributed::new().listen(wrong),
                    _ => Distributed::new().advertise(wrong),
                });
                for error in [parsed.unwrap_err(), built.unwrap_err()] {
                    let Error::BadSetting {
                        setting, expected, ..
                    } = &error
                    else {
                        panic!("{key}={wrong}: {error}");
                    };
                    assert_eq!(setting, key);
                    assert!(expected.starts_with("HOST:PORT"), "{expected}");
                }
            }
        }
    }

    #[test]
    fn an_advertised_port_of_0_is_the_one_it_listens_at() {
        let scheme = Distributed::new().advertise("10.0.0.1:0");
        let at = place(&scheme).unwrap();
        let (host, port) = host_and_port("advertise", at.address()).unwrap();
        assert_eq!(host, "10.0.0.1");
        let bound = scheme.listeners()[at.address()].local_addr().unwrap();
        assert_eq!(port, bound.port());
        let said = place(&Distributed::new().advertise("[::1]:9")).unwrap();
        assert_eq!(said.address(), "[::1]:9");
    }
}
