//! The status of a sender, its agents and workers, for `weightsync status`.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use weightsync_engine::Result;

use crate::access::Key;
use crate::address::{check_asked, host_of, resolve_all};
use crate::link::{Credentials, blocking};
use crate::relay::unreachable;
use crate::tls::{Peer, Tls};
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::Role;
use crate::wire::message::{self, MAX_JSON, Message};

/// The answer to a waiting client until the real one is ready.
pub(crate) const NOT_YET: &str = "{}";

/// The most hosts in an answer of bounded length.
pub(crate) const MAX_LISTED: usize = 500;

/// A sender and everything it reaches, at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The sender's name for itself.
    pub address: String,
    /// The sender's process.
    pub pid: u32,
    /// The sender's run.
    pub run: String,
    /// How long the sender has been running, in seconds.
    pub up_seconds: f64,
    /// The sender's models, in the order of the set.
    pub models: Vec<Model>,
    /// Bytes that the sender has sent to relays and to workers without one.
    pub served: u64,
    /// The workers on the sender's own host.
    pub local: Vec<Worker>,
    /// The relays, in the order in which they fetch, then workers without one.
    pub relays: Vec<Relay>,
    /// Workers that no agent reaches now.
    pub lost: Vec<u32>,
    /// What the answer leaves out to stay within its limit.
    #[serde(default)]
    pub left_out: Omitted,
}

/// How many entries an answer leaves out to stay within its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Omitted {
    /// Relays, and workers without one, with everything below them.
    pub relays: usize,
    /// Workers in total.
    pub workers: usize,
}

/// A model of the sender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// The model's name.
    pub name: String,
    /// The newest version that was published; 0 before the first.
    pub version: u64,
    /// Bytes of a version.
    #[serde(default)]
    pub bytes: u64,
    /// The share of elements that changed since the version before, from 0 to 1, if the version is
    /// sent as a delta.
    #[serde(default)]
    pub changed: Option<f64>,
    /// Bytes of that delta.
    #[serde(default)]
    pub delta_bytes: Option<u64>,
}

/// A relay, the one process of a host that fetches; or a worker without one, which fetches for
/// itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Relay {
    /// The agent's number.
    pub agent: u64,
    /// Whether this is a relay: other hosts may fetch from it.
    #[serde(default = "yes")]
    pub serves: bool,
    /// The agent it fetches from; 0 is the sender.
    pub parent: u64,
    /// The host's name.
    pub name: String,
    /// The address it is connected from.
    pub address: String,
    /// Its process.
    pub pid: u32,
    /// Bytes that it has fetched.
    pub received: u64,
    /// How many agents got other bytes from it than were published, as they say, and do not fetch
    /// from it any more. Looked for with `verify=blake3`.
    #[serde(default)]
    pub altered_for: usize,
    /// The measured speed of its link, in bytes a second.
    pub bytes_per_second: Option<f64>,
    /// The versions that it has, as pairs of a model's index and a version.
    pub holds: Vec<(u8, u64)>,
    /// The workers that it serves.
    pub workers: Vec<Worker>,
}

/// A worker. It has no transfer counters of its own, because it reads the memory of its relay or of
/// the trainer; a worker without a relay has a [`Relay`] entry. Compare `versions` with those of
/// the [`Model`]s to see how far it is behind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// The worker's number.
    pub worker: u32,
    /// The worker's process, on its host.
    pub pid: u32,
    /// Where the worker's weights live.
    pub device: String,
    /// The version that the worker runs of each model; 0 for none.
    pub versions: Vec<u64>,
}

impl Status {
    /// Asks the sender at `address` (`host:port`) for its status. `secret` is that of its
    /// [`Token`](crate::Token), or of an init info's endpoint. Each step takes at most `timeout`.
    /// With `None` connecting takes as long as the system lets it, the handshake takes at most 2
    /// seconds, and the wait for the answer ends when the connection does.
    ///
    /// # Errors
    ///
    /// [`NetError`](crate::NetError), as an
    /// [`Error::Transport`](weightsync_engine::Error::Transport).
    pub fn ask(
        address: &str,
        secret: &[u8; 16],
        tls: Option<&Tls>,
        timeout: Option<Duration>,
    ) -> Result<Self> {
        ask(address, secret, tls, Role::Status, timeout)
    }

    /// The status as JSON. Entries without room are left out and counted.
    pub(crate) fn to_json(&self) -> String {
        let whole = json(self);
        if whole.len() <= MAX_JSON {
            return whole;
        }
        let mut short = Self {
            local: Vec::new(),
            relays: Vec::new(),
            lost: Vec::new(),
            ..self.clone()
        };
        let all = |of: &mut Omitted, relays: usize, workers: usize| {
            of.relays += relays;
            of.workers += workers;
        };
        // Leaves room for the counts to grow by some digits.
        let mut room = MAX_JSON.saturating_sub(json(&short).len() + 64);
        // Relays first, without their workers: a worker that no relay is listed for has no place.
        for relay in &self.relays {
            let bare = Relay {
                workers: Vec::new(),
                ..relay.clone()
            };
            match takes(&mut room, &bare) {
                true => short.relays.push(bare),
                false => all(&mut short.left_out, 1, 0),
            }
        }
        for number in &self.lost {
            match takes(&mut room, number) {
                true => short.lost.push(*number),
                false => all(&mut short.left_out, 0, 1),
            }
        }
        for worker in &self.local {
            match takes(&mut room, worker) {
                true => short.local.push(worker.clone()),
                false => all(&mut short.left_out, 0, 1),
            }
        }
        let mut kept = short.relays.iter_mut().peekable();
        for relay in &self.relays {
            let Some(place) = kept.next_if(|one| one.agent == relay.agent) else {
                all(&mut short.left_out, 0, relay.workers.len());
                continue;
            };
            for worker in &relay.workers {
                match takes(&mut room, worker) {
                    true => place.workers.push(worker.clone()),
                    false => all(&mut short.left_out, 0, 1),
                }
            }
        }
        json(&short)
    }
}

/// Asks the sender for the answer of this role.
pub(crate) fn ask<T: DeserializeOwned>(
    address: &str,
    secret: &[u8; 16],
    tls: Option<&Tls>,
    role: Role,
    timeout: Option<Duration>,
) -> Result<T> {
    check_asked(address)?;
    let mut last = unreachable(address, &io::ErrorKind::NotFound.into());
    let credentials = Credentials {
        key: Key::new(secret),
        tls: tls.cloned(),
    };
    let peer = Peer::Trainer(host_of(address));
    for one in resolve_all(address)? {
        match ask_at(one, &credentials, peer, role, timeout) {
            Ok(answer) => return Ok(answer),
            Err(error) => last = unreachable(address, &error),
        }
    }
    Err(last)
}

fn ask_at<T: DeserializeOwned>(
    address: SocketAddr,
    credentials: &Credentials,
    peer: Peer<'_>,
    role: Role,
    timeout: Option<Duration>,
) -> io::Result<T> {
    let mut socket = blocking::dial(address, credentials, peer, role, timeout)?;
    loop {
        let mut header = [0; HEADER_BYTES];
        socket.read_exact(&mut header)?;
        let header = Header::decode(&header, &[Kind::Control]).map_err(io::Error::other)?;
        let mut payload = vec![0; header.len];
        socket.read_exact(&mut payload)?;
        header.check(&payload).map_err(io::Error::other)?;
        let message::Status { json } =
            message::Status::decode(&payload).map_err(io::Error::other)?;
        if json != NOT_YET {
            return serde_json::from_str(&json).map_err(io::Error::other);
        }
    }
}

fn yes() -> bool {
    true
}

fn json(of: &impl Serialize) -> String {
    serde_json::to_string(of).unwrap_or_default()
}

/// Whether there is room for another element of a list; takes the room if so.
fn takes(room: &mut usize, element: &impl Serialize) -> bool {
    let bytes = json(element).len() + 1;
    let left = room.checked_sub(bytes);
    *room = left.unwrap_or(*room);
    left.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(worker: u32) -> Worker {
        Worker {
            worker,
            pid: 4_000_000_000,
            device: "cuda:0".into(),
            versions: vec![u64::MAX; 2],
        }
    }

    /// The status of a sender with this many workers on each of its relays.
    fn status(relays: u64, workers: u32) -> Status {
        let relay = |agent| Relay {
            agent,
            serves: workers > 1,
            parent: 0,
            name: "a host of some name".into(),
            address: "10.200.200.200".into(),
            pid: 4_000_000_000,
            received: u64::MAX,
            altered_for: 0,
            bytes_per_second: Some(1e9 / 3.0),
            holds: vec![(0, u64::MAX); 3],
            workers: (0..workers).map(worker).collect(),
        };
        Status {
            address: "10.0.0.9:7070".into(),
            pid: 42,
            run: "epoch 3".into(),
            up_seconds: 90.0,
            models: Vec::new(),
            served: 1 << 30,
            local: vec![worker(0)],
            relays: (1..=relays).map(relay).collect(),
            lost: vec![7],
            left_out: Omitted::default(),
        }
    }

    #[test]
    fn status_counts_workers_beyond_its_limit() {
        for (relays, workers) in [(10, 10), (100, 200), (5000, 1), (16_000, 1), (20_000, 0)] {
            let whole = status(relays, workers);
            let json = whole.to_json();
            assert!(json.len() <= MAX_JSON);
            let said: Status = serde_json::from_str(&json).unwrap();
            let there: usize = said.relays.iter().map(|one| one.workers.len()).sum();
            let all = relays as usize * workers as usize + 2;
            let listed = there + said.local.len() + said.lost.len();
            assert_eq!(listed + said.left_out.workers, all, "{relays}, {workers}");
            assert_eq!(said.relays.len() + said.left_out.relays, relays as usize);
            let fits = said.left_out == Omitted::default();
            assert_eq!(fits, said == whole, "{relays}, {workers}");
            // There is no room left for one more.
            assert!(fits || json.len() > MAX_JSON - 1000, "{}", json.len());
        }
    }
}
