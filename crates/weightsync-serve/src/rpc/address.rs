//! Chooses a sender's address, which is final before a socket listens there.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;

use weightsync_engine::transport::Endpoint;
use weightsync_engine::{ModelId, Result};
use weightsync_link::address::{PortFile, listen_error};
pub(super) use weightsync_link::address::{listening, local_ip, reached};

use super::error::RpcError;

/// How many ports are tried.
const TRIES: u64 = 64;

/// The lowest port that is chosen automatically.
const LOWEST: u16 = 20_000;

/// The ports that the system assigns to programs that name none.
const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// The sender's address for this setting: port 0 is replaced by a free port. With a run
/// directory the port is kept there, and is the same for every sender of these models.
///
/// **Guarantee.** The port was free when it was checked, and nobody listens on it afterwards
/// because of the check. Where possible the port is one that the system does not assign
/// automatically, so that no other program gets it meanwhile.
///
/// # Errors
///
/// If there is no free port, or the run directory cannot be used.
pub(super) fn allocate(
    listen: SocketAddr,
    fresh: &Endpoint,
    run_dir: Option<&Path>,
    models: &[ModelId],
) -> Result<SocketAddr> {
    if listen.port() != 0 {
        return Ok(listen);
    }
    let at = |port| SocketAddr::new(listen.ip(), port);
    let Some(dir) = run_dir else {
        return Ok(at(free_port(listen.ip(), fresh)?));
    };
    let file = PortFile::new(dir, "rpc", models);
    let port = match file.saved()? {
        Some(port) => port,
        // Another process may be quicker.
        None => file.keep(free_port(listen.ip(), fresh)?)?,
    };
    Ok(at(port))
}

/// Listens on an address.
///
/// # Errors
///
/// If another process listens there.
pub(super) fn listen(addr: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(addr).map_err(|source| listen_error(addr, source))
}

/// A port on which nobody listens. The ports to try follow from the endpoint's name, which is
/// random, but the same for a run directory.
fn free_port(host: IpAddr, fresh: &Endpoint) -> Result<u16> {
    let ports = match ephemeral_from() {
        // Below the ephemeral range nothing is assigned to outgoing connections. The range must
        // leave enough ports.
        Some(end) if end > LOWEST + 1000 => Some(LOWEST..end),
        // The system may assign any port, so it may as well choose this one.
        _ => None,
    };
    let mut last = io::Error::other("none was tried");
    for attempt in 0..TRIES {
        let port = match &ports {
            Some(ports) => {
                // Hashed, so that senders with different names try different ports, and a name
                // always tries the same ones.
                let name = blake3::hash(format!("{attempt} {}", fresh.address()).as_bytes());
                let [low, high, ..] = *name.as_bytes();
                ports.start + u16::from_le_bytes([low, high]) % (ports.end - ports.start)
            }
            None => 0,
        };
        // The probe binds and closes. Without a connection the port has no TIME_WAIT and is free
        // again at once.
        match TcpListener::bind((host, port)).and_then(|free| free.local_addr()) {
            Ok(free) => return Ok(free.port()),
            Err(error) => last = error,
        }
    }
    Err(RpcError::NoPort { host, source: last }.into())
}

/// The first of the ports that the system assigns automatically.
fn ephemeral_from() -> Option<u16> {
    let text = fs::read_to_string(RANGE).ok()?;
    text.split_whitespace().next()?.parse().ok()
}
