//! The status of a sender, its agents and workers, for `weightsync status`.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use weightsync_engine::{Error, Result, SenderStatus};
use weightsync_link::access::Key;
use weightsync_link::address::{host_and_port, host_of, resolve_all};
use weightsync_link::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use weightsync_link::hello::LinkRole;
use weightsync_link::message::Message;
use weightsync_link::tls::{Tls, TlsPeer};
use weightsync_link::{Credentials, blocking};

use crate::agent::unreachable;
use crate::error::NetError;
use crate::wire::message::{self, MAX_JSON};

/// The answer to a waiting client until the real one is ready.
pub(crate) const NOT_YET: &str = "{}";

/// The most hosts in an answer of bounded length.
pub(crate) const MAX_LISTED: usize = 500;

/// Asks the sender at `address` (`host:port`) for its status. `secret` is that of its
/// [`Token`](weightsync_link::access::Token), or of an init info's endpoint. Each step takes at most `timeout`.
/// With `None` connecting takes as long as the system lets it, the handshake takes at most 2
/// seconds, and the wait for the answer ends when the connection does.
///
/// # Errors
///
/// [`NetError`], as an [`Error::Transport`].
pub fn ask(
    address: &str,
    secret: &[u8; 16],
    tls: Option<&Tls>,
    timeout: Option<Duration>,
) -> Result<SenderStatus> {
    ask_as(LinkRole::Status, address, secret, tls, timeout)
}

/// Checks that a sender is asked at a port. The scheme [`Distributed`](crate::Distributed) alone
/// has one for that.
///
/// # Errors
///
/// [`NetError::NotAsked`] for an address in shared memory, [`Error::BadSetting`].
pub fn check_asked(address: &str) -> Result<()> {
    match address.starts_with("weightsync/") {
        true => Err(not_asked("shared-mem", address)),
        false => host_and_port("the sender's address", address).map(drop),
    }
}

/// The error for asking a sender that has no port for that.
pub(crate) fn not_asked(scheme: &str, address: &str) -> Error {
    const IN_PROGRAM: &str = "`weightsync status --info FILE` with the init info, and \
                              `sender.status()` in the trainer's program, say what every worker runs";
    let instead = match scheme {
        "shared-mem" | "multi-process" => format!(
            "it and its workers share the memory of one machine ({scheme}), and it has no port. \
             {IN_PROGRAM}; `weightsync doctor` says what this machine allows"
        ),
        "store" => format!(
            "its versions go through a store, and `weightsync log {address}` shows them. {IN_PROGRAM}"
        ),
        _ => format!("its scheme is {scheme}, and `distributed` alone answers that. {IN_PROGRAM}"),
    };
    NetError::NotAsked { instead }.into()
}

/// A status as JSON. Entries without room are left out and counted: relays first, because a worker
/// whose relay is not listed can still be shown.
pub(crate) fn to_json(mut status: SenderStatus) -> String {
    let whole = json(&status);
    if whole.len() <= MAX_JSON {
        return whole;
    }
    // Both lists are taken out, and come back as far as there is room.
    let relays = std::mem::take(&mut status.relays);
    let workers = std::mem::take(&mut status.workers);
    // Leaves room for the counts to grow by some digits.
    let mut room = MAX_JSON.saturating_sub(json(&status).len() + 64);
    for relay in relays {
        match takes(&mut room, &relay) {
            true => status.relays.push(relay),
            false => status.left_out.relays += 1,
        }
    }
    for worker in workers {
        match takes(&mut room, &worker) {
            true => status.workers.push(worker),
            false => status.left_out.workers += 1,
        }
    }
    json(&status)
}

/// Asks the sender for the answer of this role.
pub(crate) fn ask_as<T: DeserializeOwned>(
    role: LinkRole,
    address: &str,
    secret: &[u8; 16],
    tls: Option<&Tls>,
    timeout: Option<Duration>,
) -> Result<T> {
    check_asked(address)?;
    let mut last = unreachable(address, &io::ErrorKind::NotFound.into());
    let credentials = Credentials {
        key: Key::new(secret),
        tls: tls.cloned(),
    };
    let peer = TlsPeer::Trainer(host_of(address));
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
    peer: TlsPeer<'_>,
    role: LinkRole,
    timeout: Option<Duration>,
) -> io::Result<T> {
    let mut socket = blocking::dial(address, credentials, peer, role, timeout)?;
    loop {
        let mut header = [0; HEADER_BYTES];
        socket.read_exact(&mut header)?;
        let header =
            FrameHeader::decode(&header, &[FrameKind::Control]).map_err(io::Error::other)?;
        let mut payload = vec![0; header.len];
        socket.read_exact(&mut payload)?;
        header.check(&payload).map_err(io::Error::other)?;
        let message::JsonReply { json } =
            message::JsonReply::decode(&payload).map_err(io::Error::other)?;
        // Otherwise the sender is still at work, and another answer follows.
        if json != NOT_YET {
            return serde_json::from_str(&json).map_err(io::Error::other);
        }
    }
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
    use weightsync_core::{RelayStatus, Version, WorkerId, WorkerRoute, WorkerStatus};

    use super::*;

    /// The status of a sender with this many workers on each of its relays.
    fn status(relays: u64, workers: u32) -> SenderStatus {
        let relay = |agent| RelayStatus {
            agent,
            serves: workers > 1,
            parent: 0,
            name: "a host of some name".into(),
            address: "10.200.200.200".into(),
            pid: 4_000_000_000,
            received: u64::MAX,
            altered_for: 0,
            bytes_per_second: Some(1e9 / 3.0),
            holds: vec![(0, Version(u64::MAX)); 3],
        };
        let worker = |number: u32| {
            let mut worker = WorkerStatus::new(WorkerId(number), 4_000_000_000, 2);
            worker.route = WorkerRoute::Agent(u64::from(number) / u64::from(workers.max(1)) + 1);
            worker
        };
        let mut status = SenderStatus::default();
        status.relays = (1..=relays).map(relay).collect();
        status.workers = (0..relays as u32 * workers).map(worker).collect();
        status
    }

    #[test]
    fn status_counts_workers_beyond_its_limit() {
        for (relays, workers) in [(10, 10), (100, 200), (5000, 1), (16_000, 1), (20_000, 0)] {
            let whole = status(relays, workers);
            let json = to_json(whole.clone());
            assert!(json.len() <= MAX_JSON);
            let said: SenderStatus = serde_json::from_str(&json).unwrap();
            let all = relays as usize * workers as usize;
            assert_eq!(
                said.workers.len() + said.left_out.workers,
                all,
                "{relays}, {workers}"
            );
            assert_eq!(said.relays.len() + said.left_out.relays, relays as usize);
            let fits = said.left_out == Default::default();
            assert_eq!(fits, said == whole, "{relays}, {workers}");
            // There is no room left for one more.
            assert!(fits || json.len() > MAX_JSON - 1000, "{}", json.len());
        }
    }
}
