//! How things are: what `weightsync status` shows.

use std::io::{self, Read};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync::Result;

use crate::access::Key;
use crate::link::blocking;
use crate::relay::unreachable;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::hello::Role;
use crate::wire::message::{self, MAX_JSON, Message};

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
    /// What went out from it to relays, in bytes.
    pub served: u64,
    /// The workers of its own host.
    pub local: Vec<Worker>,
    /// The relays, in the order in which they fetch.
    pub relays: Vec<Relay>,
    /// Workers that were not reached a moment ago.
    pub lost: Vec<u32>,
}

/// A model of the sender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// The newest version that was published; 0 before the first.
    pub version: u64,
}

/// A relay: the one process of a host that fetches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Relay {
    /// Its number.
    pub agent: u64,
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

/// A worker.
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
    /// [`Error::Transport`](weightsync::Error::Transport).
    pub fn ask(address: &str, secret: &[u8; 16], patience: Duration) -> Result<Self> {
        let mut last = unreachable(address, &io::ErrorKind::NotFound.into());
        let failed = |error: io::Error| unreachable(address, &error);
        for one in address.to_socket_addrs().map_err(failed)? {
            match Self::ask_at(one, secret, patience) {
                Ok(status) => return Ok(status),
                Err(error) => last = unreachable(address, &error),
            }
        }
        Err(last)
    }

    fn ask_at(address: SocketAddr, secret: &[u8; 16], patience: Duration) -> io::Result<Self> {
        let key = Key::new(secret);
        let mut socket = blocking::dial(address, &key, Role::Status, patience)?;
        let mut header = [0; HEADER_BYTES];
        socket.read_exact(&mut header)?;
        let header = Header::decode(&header, &[Kind::Control]).map_err(io::Error::other)?;
        let mut payload = vec![0; header.len];
        socket.read_exact(&mut payload)?;
        header.check(&payload).map_err(io::Error::other)?;
        let message::Status { json } =
            message::Status::decode(&payload).map_err(io::Error::other)?;
        serde_json::from_str(&json).map_err(io::Error::other)
    }

    /// As JSON, without workers if it would be too long with them.
    pub(crate) fn to_json(&self) -> String {
        let whole = serde_json::to_string(self).unwrap_or_default();
        if whole.len() <= MAX_JSON {
            return whole;
        }
        let mut short = self.clone();
        short.local.clear();
        for relay in &mut short.relays {
            relay.workers.clear();
        }
        let short = serde_json::to_string(&short).unwrap_or_default();
        match short.len() <= MAX_JSON {
            true => short,
            false => "{}".into(),
        }
    }
}
