//! Packets with descriptors, over a Unix socket in the abstract namespace.
//!
//! An abstract name lives as long as the socket bound to it, including copies that a fork made.
//! So a killed sender leaves no file behind, and the kernel refuses a second sender with the
//! same name. The namespace has no file modes. Therefore both ends check the other's user id,
//! and the sender asks for the secret that only the init info carries.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::{Error, bad, os, unexpected};
use crate::interrupt;
use crate::limits;
use crate::protocol::MAX_SLOTS;
use crate::wait::poll;
use crate::wire::{MAX_PACKET, Packet};

/// How long a connect or a bind is retried while the queue is full or the name is taken.
const GRACE: Duration = Duration::from_secs(1);

/// The descriptors of a model: its description, its page and every slot.
const MAX_FDS: usize = MAX_SLOTS + 2;

/// What a poll asks for that waits for a hang-up alone, which is always reported.
pub(crate) const HANG_UP: PollFlags = PollFlags::empty();

/// Checks that this system can share memory between processes; it can.
///
/// # Errors
///
/// [`Error::NeedsLinux`] on other systems.
pub fn check_sharing() -> Result<(), Error> {
    Ok(())
}

/// One end of a connection: non-blocking, closed on exec.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Readable once the peer's process is gone, if the kernel supports that.
    peer: Option<OwnedFd>,
    peer_pid: u32,
}

/// A listener at a name. Processes with the init info can queue there.
///
/// Dropping it refuses queued connections and ends waits for an answer, even if a forked child of
/// this process keeps a copy of the socket.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
}

impl Listener {
    /// Listens on an abstract name.
    ///
    /// A taken name is retried for a second. A sender that was killed while it started a process
    /// leaves a copy of its socket to that process, until the process runs its own program.
    ///
    /// # Errors
    ///
    /// [`Error::AddressInUse`]; [`Error::BadOption`] for a name without a byte, or with more than
    /// 107; [`Error::Os`].
    pub fn at(name: &str) -> Result<Self, Error> {
        Self::at_within(name, GRACE)
    }

    /// The same without the retries, for callers that have other names to try.
    ///
    /// # Errors
    ///
    /// As [`at`](Self::at).
    pub fn at_free(name: &str) -> Result<Self, Error> {
        Self::at_within(name, Duration::ZERO)
    }

    /// As [`at_free`](Self::at_free), for callers that reach other processes in another way too: on
    /// systems other than Linux, this process alone finds the listener.
    ///
    /// # Errors
    ///
    /// As [`at`](Self::at).
    pub fn at_least_here(name: &str) -> Result<Self, Error> {
        Self::at_free(name)
    }

    fn at_within(name: &str, patience: Duration) -> Result<Self, Error> {
        let until = Instant::now() + patience;
        let fd = endpoint()?;
        let address = abstract_address(name)?;
        loop {
            match rustix::net::bind(&fd, &address) {
                Ok(()) => break,
                Err(Errno::ADDRINUSE) if Instant::now() < until => {
                    interrupt::sleep(Duration::from_millis(5))?;
                }
                Err(Errno::ADDRINUSE) => {
                    return Err(Error::AddressInUse {
                        address: name.into(),
                    });
                }
                Err(errno) => return Err(os("binding the segment's socket")(errno)),
            }
        }
        rustix::net::listen(&fd, 1024).map_err(os("listening for readers"))?;
        Ok(Self { fd })
    }

    /// Accepts the next connection; `None` if there is none.
    pub(crate) fn accept(&self) -> Result<Option<Socket>, Error> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            return match rustix::net::accept_with(&self.fd, flags) {
                Ok(fd) => {
                    // Before the process comes to its limit: other threads open files, too.
                    keep_files_free(&fd);
                    match Socket::with_checked_peer(fd)? {
                        None => continue,
                        socket => Ok(socket),
                    }
                }
                Err(Errno::MFILE) if limits::raise_files() => continue,
                Err(Errno::MFILE) => Err(Error::TooManyFiles {
                    limit: limits::files(),
                }),
                // The next poll tells whether there is still a connection.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
                Err(errno) => Err(os("accepting a reader")(errno)),
            };
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Fails only if it was shut down before.
        // A close alone leaves the socket open in a forked child that has a copy.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
        // Workers in the queue wait for an answer, and nobody would ever read their hellos.
        while let Ok(fd) = rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            let _ = rustix::net::shutdown(&fd, Shutdown::Both);
        }
    }
}

/// Whether a living process of this user listens on an abstract name. A copy of a dead process's
/// socket, which a forked child may keep for long, does not count.
///
/// # Errors
///
/// [`Error::Os`], [`Error::BadOption`], [`Error::Interrupted`].
pub fn is_served(name: &str) -> Result<bool, Error> {
    let until = Instant::now() + GRACE;
    let address = abstract_address(name)?;
    loop {
        let fd = endpoint()?;
        match rustix::net::connect(&fd, &address) {
            Ok(()) => {
                return match Socket::with_checked_peer(fd) {
                    Ok(socket) => Ok(socket.is_some_and(|socket| !socket.is_peer_dead())),
                    Err(error) if error.is_peer_fault() => Ok(false),
                    Err(error) => Err(error),
                };
            }
            Err(Errno::CONNREFUSED) => return Ok(false),
            // The thread that serves the name accepts queued connections at once.
            Err(Errno::AGAIN) if Instant::now() >= until => return Ok(false),
            Err(Errno::AGAIN | Errno::INTR) => interrupt::sleep(Duration::from_millis(5))?,
            Err(errno) => return Err(os("asking who serves a name")(errno)),
        }
    }
}

impl Socket {
    /// Connects; `None` if nothing listens there yet, or only a dead sender's child has the socket.
    pub(crate) fn connect(name: &str) -> Result<Option<Self>, Error> {
        let fd = endpoint()?;
        match rustix::net::connect(&fd, &abstract_address(name)?) {
            Ok(()) => {
                let socket = Self::with_checked_peer(fd)?;
                Ok(socket.filter(|socket| !socket.is_peer_dead()))
            }
            // A full queue counts like no listener: the caller tries again until its deadline.
            Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(os("connecting to the sender")(errno)),
        }
    }

    /// `None` if the peer is known to be dead.
    fn with_checked_peer(fd: OwnedFd) -> Result<Option<Self>, Error> {
        // The abstract namespace has no file modes, so any user can connect.
        let peer = peer_credentials(fd.as_fd())?;
        let own = rustix::process::geteuid().as_raw();
        if peer.uid != own {
            return Err(Error::Protocol {
                expected: "a peer of the same user",
                got: format!("user id {} (this process runs as {own})", peer.uid),
            });
        }
        let pidfd = match peer_pidfd(fd.as_fd(), peer.pid) {
            PeerProcess::Watched(pidfd) => Some(pidfd),
            PeerProcess::Unknown => None,
            // The peer died after it had connected, and its child may hold the connection.
            PeerProcess::Gone => return Ok(None),
        };
        Ok(Some(Self {
            fd,
            peer: pidfd,
            peer_pid: peer.pid.cast_unsigned(),
        }))
    }

    /// Whether the peer's process is dead, if the kernel supports that.
    pub(crate) fn is_peer_dead(&self) -> bool {
        let now = Some(Instant::now());
        self.peer_death()
            .is_some_and(|death| matches!(poll([death], now), Ok([true])))
    }

    pub(crate) fn peer_pid(&self) -> u32 {
        self.peer_pid
    }

    /// Becomes readable when the peer's process is gone.
    pub(crate) fn peer_death(&self) -> Option<BorrowedFd<'_>> {
        self.peer.as_ref().map(AsFd::as_fd)
    }

    /// Sends one packet. False if the peer does not read or is gone.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool, Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Error::Protocol {
                expected: "at most 66 descriptors in a packet",
                got: fds.len().to_string(),
            });
        }
        // No thread waits for a peer that does not read. A peer that is gone is an answer here and
        // not a signal that ends the process.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut ancillary, flags) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(false),
            Err(errno) => Err(os("sending to the peer")(errno)),
        }
    }

    /// Shuts the connection down, for all copies of its descriptor in forked children too.
    pub(crate) fn shut_down(&self) {
        // Fails only if the peer has shut it down before.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Reads one packet without waiting.
    pub(crate) fn receive(&self) -> Result<Packet, Error> {
        let mut bytes = [0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        // Descriptors close on exec from the first moment: another thread may start a process.
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = loop {
            // A packet that is longer is cut by the kernel. No message is that long, so it then
            // fails to decode.
            let mut part = [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.fd, &mut part, &mut ancillary, flags) {
                Ok(got) => break got,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Packet::Empty),
                Err(Errno::CONNRESET) => return Ok(Packet::HungUp),
                Err(errno) => return Err(os("receiving from the peer")(errno)),
            }
        };
        let fds = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        // The kernel does not say why it dropped descriptors. If this process cannot have one more,
        // that was the reason.
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(match rustix::io::dup(&self.fd) {
                Err(Errno::MFILE) => Error::TooManyFiles {
                    limit: limits::files(),
                },
                _ => unexpected("descriptors that there is room for", "more".into()),
            });
        }
        // The ends never send an empty packet, so no bytes mean the end of the stream.
        if got.bytes == 0 {
            return Ok(Packet::HungUp);
        }
        Ok(Packet::Data(bytes[..got.bytes].to_vec(), fds))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Raises this process's limit on open files when a new descriptor is near it: a new one always has
/// the lowest free number. The usual limit of 1024 is for programs that call `select`, and a worker
/// takes two descriptors.
fn keep_files_free(newest: &OwnedFd) {
    const SPARED: u64 = 64;
    let number = u64::from(newest.as_raw_fd().unsigned_abs());
    if limits::files().is_some_and(|limit| number + SPARED >= limit) {
        // If the limit cannot be raised, the error appears when it is reached.
        limits::raise_files();
    }
}

fn endpoint() -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(os("making a Unix socket"))
}

fn abstract_address(name: &str) -> Result<SocketAddrUnix, Error> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| {
        bad(
            "the segment's name",
            "1 to 107 bytes",
            format!("{} bytes", name.len()),
        )
    })
}

/// The peer's credentials. The process id is 0 for another process namespace. rustix's own call
/// cannot be used, because its ids are never 0.
fn peer_credentials(socket: BorrowedFd<'_>) -> Result<libc::ucred, Error> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: libc::uid_t::MAX,
        gid: libc::gid_t::MAX,
    };
    let got = socket_option(socket, libc::SO_PEERCRED, &mut peer);
    got.map_err(|source| Error::Os {
        action: "asking who the peer is",
        source,
    })?;
    Ok(peer)
}

/// The peer's process.
enum PeerProcess {
    /// Readable once the process is dead.
    Watched(OwnedFd),
    /// The kernel cannot tell; only the socket's hang-up shows the death.
    Unknown,
    Gone,
}

/// A descriptor of the peer's process, which a later process with the same number cannot be
/// confused with.
///
/// Kernels before 6.5 cannot give one; there this asks by number (Linux 5.3). If the number already
/// belongs to another process, the peer is dead, and at worst its death is noticed only at the
/// socket's hang-up.
fn peer_pidfd(socket: BorrowedFd<'_>, pid: libc::pid_t) -> PeerProcess {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    match socket_option(socket, SO_PEERPIDFD, &mut fd) {
        // SAFETY: the kernel has just opened this descriptor (close-on-exec) for
        // this process, so nobody else owns it.
        Ok(()) if fd >= 0 => PeerProcess::Watched(unsafe { OwnedFd::from_raw_fd(fd) }),
        Ok(()) => PeerProcess::Unknown,
        Err(error) => match error.raw_os_error() {
            // The process is gone; some kernels report EINVAL.
            Some(libc::ESRCH) => PeerProcess::Gone,
            Some(libc::ENOPROTOOPT | libc::EINVAL) => by_number(pid),
            _ => PeerProcess::Unknown,
        },
    }
}

fn by_number(pid: libc::pid_t) -> PeerProcess {
    // 0 means another process namespace.
    let Some(pid) = Pid::from_raw(pid) else {
        return PeerProcess::Unknown;
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => PeerProcess::Watched(pidfd),
        Err(Errno::SRCH) => PeerProcess::Gone,
        Err(_) => PeerProcess::Unknown,
    }
}

/// Reads a socket option whose value is a plain C structure of integers.
fn socket_option<T: Copy>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &mut T,
) -> std::io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` and `len` are valid for writes of the sizes passed, any
    // bytes are a valid value of the integers behind `value`, and the
    // descriptor is open for as long as it is borrowed.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(value).cast(),
            &raw mut len,
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}
