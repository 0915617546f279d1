//! Addresses at which an end listens, or is reached.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};

use weightsync_engine::{Error, ModelId, Remedy, Result, files};

/// The parts of a `host:port` setting. An IPv6 address is in brackets, and may name an interface of
/// this machine after a percent sign.
///
/// # Errors
///
/// [`Error::BadSetting`].
pub fn host_and_port<'a>(setting: &str, text: &'a str) -> Result<(&'a str, u16)> {
    let parts = text.rsplit_once(':');
    let parts = parts.and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let is_host = |host: &str| match bare(host) {
        Some(bare) => {
            let (address, interface) = bare.split_once('%').unwrap_or((bare, "any"));
            address.parse::<Ipv6Addr>().is_ok() && !interface.is_empty()
        }
        None => !host.is_empty() && !host.contains([':', '[', ']', '%']),
    };
    let wanted = "HOST:PORT, such as 10.0.0.1:7070 or [::1]:7070";
    parts
        .filter(|(host, _)| is_host(host))
        .ok_or_else(|| bad(setting, wanted, text))
}

/// What is in brackets.
fn bare(host: &str) -> Option<&str> {
    host.strip_prefix('[')?.strip_suffix(']')
}

/// The same for an address that other machines are told. A link-local one means something with the
/// name of an interface alone, and each machine has its own.
///
/// # Errors
///
/// [`Error::BadSetting`].
pub fn told<'a>(setting: &str, text: &'a str) -> Result<(&'a str, u16)> {
    let (host, port) = host_and_port(setting, text)?;
    let address = bare(host).map(|bare| bare.split('%').next().unwrap_or(bare).parse::<Ipv6Addr>());
    let is_local = matches!(address, Some(Ok(address)) if address.is_unicast_link_local());
    match host.contains('%') || is_local {
        true => Err(of_one_link(setting, text)),
        false => Ok((host, port)),
    }
}

/// The address at which an end listens, and which others are told.
///
/// # Errors
///
/// [`Error::BadSetting`]; [`AddressError::Resolve`] if there is no address.
pub fn listening(setting: &str, text: &str) -> Result<SocketAddr> {
    told(setting, text)?;
    let at = resolve(text)?;
    match at.ip() {
        IpAddr::V6(ip) if ip.is_unicast_link_local() => Err(of_one_link(setting, text)),
        _ => Ok(at),
    }
}

fn of_one_link(setting: &str, text: &str) -> Error {
    let wanted = "an address that means the same on every machine, such as one of fd00::/8, or the \
                  name of a host: a link-local one (fe80::…%eth0) is of an interface of one machine";
    bad(setting, wanted, text)
}

/// The error for a wrong value of a setting.
pub fn bad(setting: &str, expected: &str, got: &str) -> Error {
    let cut = |text: &str| text.chars().take(80).collect();
    Error::BadSetting {
        setting: cut(setting),
        expected: expected.into(),
        got: cut(got),
    }
}

/// Resolves `host:port`.
///
/// # Errors
///
/// [`AddressError::Resolve`] if there is no address.
pub fn resolve(name: &str) -> Result<SocketAddr> {
    let all = resolve_all(name)?;
    Ok(all[0])
}

/// Resolves `host:port` to all its addresses; there is at least one.
///
/// # Errors
///
/// As [`resolve`].
pub fn resolve_all(name: &str) -> Result<Vec<SocketAddr>> {
    let failed = |source| AddressError::Resolve {
        name: name.into(),
        source,
    };
    let (host, port) = host_and_port("address", name)?;
    // Without brackets the system finds the interface by its name.
    let host = bare(host).unwrap_or(host);
    let all: Vec<_> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    match all.is_empty() {
        true => Err(failed(io::Error::other("there is no address of that name")).into()),
        false => Ok(all),
    }
}

/// The address at which other machines reach a listener. For an unspecified address this is the
/// machine's own address towards others.
///
/// # Errors
///
/// [`AddressError::Advertise`] if the machine has none.
pub fn reached(listens: SocketAddr) -> Result<SocketAddr> {
    if !listens.ip().is_unspecified() {
        return Ok(listens);
    }
    // No machine has this address, and nothing is sent to it.
    let elsewhere: SocketAddr = match listens {
        SocketAddr::V4(_) => ([192, 0, 2, 1], 9).into(),
        SocketAddr::V6(_) => ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 9).into(),
    };
    let own = local_ip(elsewhere).map_err(|source| AddressError::Advertise {
        address: listens.to_string(),
        source,
    })?;
    Ok(SocketAddr::new(own, listens.port()))
}

/// This machine's address on the route to another one.
///
/// # Errors
///
/// The system's error if there is no route.
pub fn local_ip(to: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a UDP socket sends nothing: the system only looks up the route.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

/// The file in a run directory that keeps the port of its senders.
#[derive(Debug)]
pub struct PortFile(PathBuf);

impl PortFile {
    /// The file for a scheme and these models.
    pub fn new(run_dir: &Path, scheme: &str, models: &[ModelId]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for model in models {
            hasher.update(model.as_str().as_bytes());
            // Names must not run into each other: `a, bc` are other models than `ab, c`.
            hasher.update(&[0]);
        }
        let hash = hasher.finalize().to_hex();
        Self(run_dir.join(format!("{scheme}-port-{}", &hash[..16])))
    }

    /// The port; `None` if none was chosen yet.
    ///
    /// # Errors
    ///
    /// [`Error::File`], also if the file has other content.
    pub fn saved(&self) -> Result<Option<u16>> {
        let mut text = String::new();
        let read = files::open(&self.0).and_then(|file| file.take(64).read_to_string(&mut text));
        match read {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.failed("reading", error)),
        }
        // Port 0 lets the system choose, so it cannot be a port to come back to.
        let port = text.trim().parse().ok().filter(|port| *port != 0);
        let wrong = || {
            let words = format!("{text:?} is no port; remove it while no trainer runs");
            self.failed("reading", io::Error::new(ErrorKind::InvalidData, words))
        };
        Ok(Some(port.ok_or_else(wrong)?))
    }

    /// Saves a port atomically unless one is saved already; returns the saved port.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn keep(&self, port: u16) -> Result<u16> {
        let text = format!("{port}\n");
        match files::create(&self.0, files::PRIVATE, |file| {
            file.write_all(text.as_bytes())
        }) {
            // If another process was first, its port counts.
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(self.failed("writing", error));
            }
            _ => {}
        }
        let none = || self.failed("reading", io::Error::other("it has no port in it"));
        self.saved()?.ok_or_else(none)
    }

    fn failed(&self, action: &'static str, source: io::Error) -> Error {
        Error::File {
            action,
            path: self.0.clone(),
            source: source.into(),
        }
    }
}

/// The host in `HOST:PORT` as certificates have it: without the brackets of an IPv6 address, and
/// without the interface.
pub fn host_of(name: &str) -> &str {
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    let host = bare(host).unwrap_or(host);
    host.split('%').next().unwrap_or(host)
}

/// Why nothing can listen at an address.
pub fn listen_error(address: SocketAddr, source: io::Error) -> Error {
    let address = address.to_string();
    match source.kind() {
        ErrorKind::AddrInUse => Error::AddressInUse { address },
        _ => AddressError::Listen { address, source }.into(),
    }
}

/// Why an address is of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// Nothing can listen at the address.
    #[error(
        "cannot listen at {address}: {source}; choose an address of this machine, and a port that \
         this user may open"
    )]
    Listen {
        /// The configured address.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// This end does not know an address at which other hosts reach it.
    #[error(
        "other hosts cannot connect to {address}: name an address that they can reach with \
         `advertise=HOST:PORT`: {source}"
    )]
    Advertise {
        /// The listening address.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// A name that does not resolve to an address.
    #[error("{name:?} is not an address to listen at or connect to: {source}")]
    Resolve {
        /// The name, with its port.
        name: String,
        /// The resolver's error.
        source: io::Error,
    },
}

impl AddressError {
    /// What to do: the caller has to change something.
    pub fn remedy(&self) -> Remedy {
        Remedy::GiveUp
    }
}

impl From<AddressError> for Error {
    fn from(error: AddressError) -> Self {
        Self::Transport {
            remedy: error.remedy(),
            source: error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_sender_of_a_run_directory_chooses_the_port() {
        let dir = tempfile::tempdir().unwrap();
        let file = |scheme, models: &[&str]| {
            let models: Vec<_> = models.iter().map(|name| name.parse().unwrap()).collect();
            PortFile::new(dir.path(), scheme, &models)
        };
        let first = file("rpc", &["policy"]);
        assert_eq!(first.saved().unwrap(), None);
        assert_eq!(first.keep(7070).unwrap(), 7070);
        assert_eq!(file("rpc", &["policy"]).keep(8080).unwrap(), 7070);
        assert_eq!(first.saved().unwrap(), Some(7070));
        for (scheme, models) in [
            ("distributed", &["policy"][..]),
            ("rpc", &["critic"]),
            ("rpc", &["policy", "critic"]),
        ] {
            assert_eq!(file(scheme, models).saved().unwrap(), None, "{models:?}");
        }
        let names = std::fs::read_dir(dir.path()).unwrap();
        assert_eq!(names.count(), 1, "nothing is left next to it");
    }

    #[test]
    fn address_of_ipv6_is_kept_or_refused() {
        for (text, host) in [
            ("[::1]:7070", "::1"),
            ("[fd00::1]:7070", "fd00::1"),
            ("[::ffff:10.0.0.1]:7070", "::ffff:10.0.0.1"),
            ("[::]:0", "::"),
        ] {
            let (kept, port) = told("listen", text).unwrap();
            assert_eq!(format!("{kept}:{port}"), text);
            assert_eq!(host_of(text), host);
            let at = listening("listen", text).unwrap();
            assert_eq!(at.ip().to_string(), host);
        }
        for text in [
            "::1:7070",
            "[::1]",
            "[::1]7070",
            "[]:7070",
            "[host]:7070",
            "[::1%]:7070",
            "a%eth0:1",
        ] {
            for error in [
                told("listen", text).unwrap_err(),
                resolve(text).unwrap_err(),
            ] {
                let Error::BadSetting { expected, .. } = &error else {
                    panic!("{text}: {error}");
                };
                assert!(expected.contains("[::1]:7070"), "{error}");
            }
        }
        // The loopback interface has number 1.
        let local = "[fe80::1%lo]:7070";
        assert_eq!(resolve(local).unwrap().to_string(), "[fe80::1%1]:7070");
        assert_eq!(host_of(local), "fe80::1");
        for text in [local, "[fe80::1]:7070", "[::1%lo]:7070"] {
            for error in [
                told("listen", text).unwrap_err(),
                listening("listen", text).unwrap_err(),
            ] {
                assert!(error.to_string().contains("fd00::/8"), "{text}: {error}");
            }
        }
        let unknown = resolve("[fe80::1%none]:7070").unwrap_err();
        assert!(
            unknown.to_string().contains("[fe80::1%none]:7070"),
            "{unknown}"
        );
    }

    #[test]
    fn port_file_rejects_other_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = PortFile::new(dir.path(), "rpc", &["policy".parse().unwrap()]);
        for wrong in ["", "seven", "0", "70000"] {
            std::fs::write(&file.0, wrong).unwrap();
            for error in [file.saved().unwrap_err(), file.keep(7070).unwrap_err()] {
                assert!(error.to_string().contains("is no port"), "{wrong}: {error}");
            }
        }
    }
}
