//! The status of a sender, its agents and workers, for `weightsync status`.

use std::io::{self, Read};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use weightsync_engine::Result;

use crate::access::Key;
use crate::link::blocking;
use crate::relay::unreachable;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::Role;
use crate::wire::message::{self, MAX_JSON, Message};

/// What somebody who waits for an answer hears until it is there.
pub(crate) const NOT_YET: &str = "{}";

/// The most hosts that are listed in an answer of a bounded length.
pub(crate) const MAX_LISTED: usize = 500;

/// A sender and everybody it reaches, at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What the sender calls itself.
    pub address: String,
    /// Its process.
    pub pid: u32,
    /// Its run.
    pub run: String,
    /// How long it has been there, in seconds.
    pub up_seconds: f64,
    /// Its models, in the order of the set.
    pub models: Vec<Model>,
    /// What went out from it to relays and to workers without one, in bytes.
    pub served: u64,
    /// The workers of its own host.
    pub local: Vec<Worker>,
    /// The relays, in the order in which they fetch, then workers without one.
    pub relays: Vec<Relay>,
    /// Workers that were not reached a moment ago.
    pub lost: Vec<u32>,
    /// What an answer has no room for.
    #[serde(default)]
    pub left_out: LeftOut,
}

/// How many are not in an answer that would be too long with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Relays, and workers without one, each with all that it has.
    pub relays: usize,
    /// Workers, of these and of others.
    pub workers: usize,
}

/// A model of the sender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// The newest version that was published; 0 before the first.
    pub version: u64,
    /// Bytes of a version.
    #[serde(default)]
    pub bytes: u64,
    /// The share of its elements that changed since the version before, from 0 to 1, where
    /// it is sent as what changed.
    #[serde(default)]
    pub changed: Option<f64>,
    /// The bytes that takes.
    #[serde(default)]
    pub delta_bytes: Option<u64>,
}

/// A relay: the one process of a host that fetches; or a worker without one, which does
/// so for itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Relay {
    /// Its number.
    pub agent: u64,
    /// Whether others may fetch from it: it is a relay.
    #[serde(default = "yes")]
    pub serves: bool,
    /// From whom it fetches; 0 is the sender.
    pub parent: u64,
    /// Its host's name.
    pub name: String,
    /// From where it is connected.
    pub address: String,
    /// Its process.
    pub pid: u32,
    /// What it has fetched, in bytes.
    pub received: u64,
    /// How fast its link was measured to be, in bytes a second.
    pub bytes_per_second: Option<f64>,
    /// The versions it has, as pairs of a model's index and a version.
    pub holds: Vec<(u8, u64)>,
    /// Its workers.
    pub workers: Vec<Worker>,
}

/// A worker. It has no bytes of its own: it reads the memory of its relay, or of the
/// trainer, and what one without a relay fetches is counted at its [`Relay`]. How far it is
/// behind is what its versions are below those of the [`Model`]s.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Its number.
    pub worker: u32,
    /// Its process, on its host.
    pub pid: u32,
    /// Where its weights live.
    pub device: String,
    /// The version it runs of each model; 0 for none.
    pub versions: Vec<u64>,
}

impl Status {
    /// Asks the sender at `address` (`host:port`), for who has its secret: that of its
    /// [`Token`](crate::Token), or of the endpoint of an init info. Each step of it
    /// takes at most `patience`.
    ///
    /// # Errors
    ///
    /// [`NetError`](crate::NetError), as an
    /// [`Error::Transport`](weightsync_engine::Error::Transport).
    pub fn ask(address: &str, secret: &[u8; 16], patience: Duration) -> Result<Self> {
        ask(address, secret, Role::Status, patience)
    }

    /// As JSON; without those for whom there is no room, who are counted.
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
        let all = |of: &mut LeftOut, relays: usize, workers: usize| {
            of.relays += relays;
            of.workers += workers;
        };
        // The counts grow, by some digits.
        let mut room = MAX_JSON.saturating_sub(json(&short).len() + 64);
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

/// Asks the sender for what this role gets.
pub(crate) fn ask<T: DeserializeOwned>(
    address: &str,
    secret: &[u8; 16],
    role: Role,
    patience: Duration,
) -> Result<T> {
    let mut last = unreachable(address, &io::ErrorKind::NotFound.into());
    let failed = |error: io::Error| unreachable(address, &error);
    for one in address.to_socket_addrs().map_err(failed)? {
        match ask_at(one, secret, role, patience) {
            Ok(answer) => return Ok(answer),
            Err(error) => last = unreachable(address, &error),
        }
    }
    Err(last)
}

fn ask_at<T: DeserializeOwned>(
    address: SocketAddr,
    secret: &[u8; 16],
    role: Role,
    patience: Duration,
) -> io::Result<T> {
    let key = Key::new(secret);
    let mut socket = blocking::dial(address, &key, role, patience)?;
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

/// Whether there is room for another element of a list, and then it is taken.
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

    /// A sender with so many workers on each of so many relays.
    fn status(relays: u64, workers: u32) -> Status {
        let relay = |agent| Relay {
            agent,
            serves: workers > 1,
            parent: 0,
            name: "a host of some name".into(),
            address: "10.200.200.200".into(),
            pid: 4_000_000_000,
            received: u64::MAX,
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
            left_out: LeftOut::default(),
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
            let fits = said.left_out == LeftOut::default();
            assert_eq!(fits, said == whole, "{relays}, {workers}");
            // There is no room left for one more.
            assert!(fits || json.len() > MAX_JSON - 1000, "{}", json.len());
        }
    }
}
