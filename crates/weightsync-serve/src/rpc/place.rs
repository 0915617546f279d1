//! Where a sender is found: an address that is final before anybody listens there.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use weightsync::transport::Endpoint;
use weightsync::{ModelId, Result};

use super::error::Trouble;

/// How many ports are tried.
const TRIES: u64 = 64;

/// The lowest port that is chosen without being told.
const LOWEST: u16 = 20_000;

/// The ports from which the system serves programs that name none.
const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// The address of a host and a port, as a person writes it.
///
/// # Errors
///
/// If there is none.
pub(super) fn resolve(name: &str) -> Result<SocketAddr> {
    let failed = |source| Trouble::Resolve {
        name: name.into(),
        source,
    };
    let mut found = name.to_socket_addrs().map_err(failed)?;
    let found = found.next();
    Ok(found.ok_or_else(|| failed(io::Error::other("there is no address of that name")))?)
}

/// Where others reach what listens there: at every address, it is the one that this
/// machine has towards others.
///
/// # Errors
///
/// If it has none.
pub(super) fn reached(listens: SocketAddr) -> Result<SocketAddr> {
    if !listens.ip().is_unspecified() {
        return Ok(listens);
    }
    // Nobody is there, and nothing is sent.
    let elsewhere: SocketAddr = match listens {
        SocketAddr::V4(_) => ([192, 0, 2, 1], 9).into(),
        SocketAddr::V6(_) => ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 9).into(),
    };
    let own = local_ip(elsewhere).map_err(|source| Trouble::Outward { listens, source })?;
    Ok(SocketAddr::new(own, listens.port()))
}

/// This machine's address on the way to another.
pub(super) fn local_ip(to: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Nothing is sent by this: the system only looks for the way.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

/// The address for a sender that was told this one: where its port is 0, a free port.
/// With a run directory the port is kept there, and is the same for every sender of
/// these models.
///
/// **Guarantee.** Nobody listens there afterwards who did not before: it was looked at
/// and let go. So that nobody else is given it meanwhile, it is a port that the system
/// gives to nobody by itself, where there are such.
///
/// # Errors
///
/// If there is no free port, or the run directory cannot be used.
pub(super) fn address(
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
    let file = port_file(dir, models);
    if let Some(port) = kept(&file)? {
        return Ok(at(port));
    }
    keep(&file, free_port(listen.ip(), fresh)?)?;
    // Another one may have been quicker.
    let port = kept(&file)?;
    let failed = || failed("reading", &file)(io::Error::other("it has no port in it"));
    Ok(at(port.ok_or_else(failed)?))
}

/// Listens at a place.
///
/// # Errors
///
/// If somebody else does.
pub(super) fn listen(addr: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(addr).map_err(|source| match source.kind() {
        ErrorKind::AddrInUse => Trouble::Taken { addr },
        _ => Trouble::Listen { addr, source },
    });
    Ok(listener?)
}

/// A port that nobody listens at. What is tried follows from the endpoint's name,
/// which is random, and the same for a run directory.
fn free_port(host: IpAddr, fresh: &Endpoint) -> Result<u16> {
    let ports = match ephemeral_from() {
        Some(end) if end > LOWEST + 1000 => Some(LOWEST..end),
        // All ports are given out by the system; then it may as well choose.
        _ => None,
    };
    let mut last = io::Error::other("none was tried");
    for attempt in 0..TRIES {
        let port = match &ports {
            Some(ports) => {
                let name = blake3::hash(format!("{attempt} {}", fresh.address()).as_bytes());
                let [low, high, ..] = *name.as_bytes();
                ports.start + u16::from_le_bytes([low, high]) % (ports.end - ports.start)
            }
            None => 0,
        };
        match TcpListener::bind((host, port)).and_then(|free| free.local_addr()) {
            Ok(free) => return Ok(free.port()),
            Err(error) => last = error,
        }
    }
    Err(Trouble::NoPort { host, source: last }.into())
}

/// The first of the ports that the system gives out by itself.
fn ephemeral_from() -> Option<u16> {
    let text = fs::read_to_string(RANGE).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

fn port_file(dir: &Path, models: &[ModelId]) -> PathBuf {
    let names: Vec<_> = models.iter().map(ModelId::as_str).collect();
    let hash = blake3::hash(names.join("\0").as_bytes()).to_hex();
    dir.join(format!("rpc-port-{}", &hash[..16]))
}

/// The port in a file; `None` without one.
fn kept(file: &Path) -> Result<Option<u16>> {
    let mut text = String::new();
    let read = fs::File::open(file).and_then(|file| file.take(64).read_to_string(&mut text));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("reading", file)(error).into()),
    }
    let port = text.trim().parse().ok().filter(|port| *port != 0);
    let wrong = || {
        let words = format!("{text:?} is no port; remove it while no trainer runs");
        failed("reading", file)(io::Error::new(ErrorKind::InvalidData, words))
    };
    Ok(Some(port.ok_or_else(wrong)?))
}

/// Puts a port into a file, whole or not at all, unless there is one already.
fn keep(file: &Path, port: u16) -> Result<()> {
    let beside = file.with_extension(format!("{}.new", std::process::id()));
    let put = || -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut made = options.open(&beside)?;
        made.write_all(format!("{port}\n").as_bytes())?;
        made.sync_all()?;
        match fs::hard_link(&beside, file) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    };
    let put = put().map_err(failed("writing", file));
    let _ = fs::remove_file(&beside);
    Ok(put?)
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Trouble {
    let path = path.to_owned();
    move |source| Trouble::File {
        action,
        path,
        source,
    }
}
