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

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::{Error, os, unexpected};
use crate::interrupt;
use crate::limits;
use crate::protocol::MAX_SLOTS;
use crate::wait::poll;
use crate::wire::MAX_PACKET;

/// How long a name that is taken, or a queue that is full, is tried again.
const GRACE: Duration = Duration::from_secs(1);

/// A model's description, its page and every slot.
const MAX_FDS: usize = MAX_SLOTS + 2;

/// One end of a connection: non-blocking, closed on exec.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Readable once the other end's process is gone, where the kernel can say.
    peer: Option<OwnedFd>,
    peer_pid: u32,
}

/// What a read brought.
#[derive(Debug)]
pub(crate) enum Packet {
    /// One packet.
    Data(Vec<u8>, Vec<OwnedFd>),
    /// Nothing yet.
    Empty,
    /// The other end hung up.
    HungUp,
}

/// A name that is listened on: a process with the init info can queue up there.
///
/// Dropping it refuses them, and ends those that wait for an answer, also where a
/// forked child of this process keeps a copy of the socket.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
}

impl Listener {
    /// Listens on an abstract name.
    ///
    /// A name that is taken is tried again for a second: a sender that was
    /// killed while it started a process leaves a copy of its socket to that
    /// process, until the process has become its program.
    ///
    /// # Errors
    ///
    /// [`Error::AddressInUse`]; [`Error::BadOption`] for a name of no byte, or of
    /// more than 107; [`Error::Os`].
    pub fn at(name: &str) -> Result<Self, Error> {
        Self::at_within(name, GRACE)
    }

    /// The same, and a name that is taken is not tried again: where there are others.
    ///
    /// # Errors
    ///
    /// As [`at`](Self::at).
    pub fn at_free(name: &str) -> Result<Self, Error> {
        Self::at_within(name, Duration::ZERO)
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

    /// Takes the next connection; `None` if there is none.
    pub(crate) fn accept(&self) -> Result<Option<Socket>, Error> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            return match rustix::net::accept_with(&self.fd, flags) {
                Ok(fd) => {
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
        // It fails only if it has been done already.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
        while let Ok(fd) = rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            let _ = rustix::net::shutdown(&fd, Shutdown::Both);
        }
    }
}

/// Whether a living process of this user listens on an abstract name. A copy of a
/// dead one's socket, which a child it forked may keep for long, does not.
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
            // The thread that serves it takes queued connections as they come.
            Err(Errno::AGAIN) if Instant::now() >= until => return Ok(false),
            Err(Errno::AGAIN | Errno::INTR) => interrupt::sleep(Duration::from_millis(5))?,
            Err(errno) => return Err(os("asking who serves a name")(errno)),
        }
    }
}

impl Socket {
    /// Connects; `None` if nobody listens there (yet), or only a dead sender's
    /// child has the socket.
    pub(crate) fn connect(name: &str) -> Result<Option<Self>, Error> {
        let fd = endpoint()?;
        match rustix::net::connect(&fd, &abstract_address(name)?) {
            Ok(()) => {
                let socket = Self::with_checked_peer(fd)?;
                Ok(socket.filter(|socket| !socket.is_peer_dead()))
            }
            Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(os("connecting to the sender")(errno)),
        }
    }

    /// `None` if the peer is known to be dead, and nothing is left of it to watch.
    fn with_checked_peer(fd: OwnedFd) -> Result<Option<Self>, Error> {
        let peer = peer_credentials(fd.as_fd())?;
        let own = rustix::process::geteuid().as_raw();
        if peer.uid != own {
            return Err(Error::Protocol {
                expected: "a peer of the same user",
                got: format!("user id {} (this process runs as {own})", peer.uid),
            });
        }
        let pidfd = match peer_pidfd(fd.as_fd(), peer.pid) {
            Peer::Watched(pidfd) => Some(pidfd),
            Peer::Unknown => None,
            Peer::Gone => return Ok(None),
        };
        Ok(Some(Self {
            fd,
            peer: pidfd,
            peer_pid: peer.pid.cast_unsigned(),
        }))
    }

    /// Whether the process at the other end is dead, where the kernel can say.
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

    /// Sends one packet. False if the peer does not drain its socket or is gone.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool, Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Error::Protocol {
                expected: "at most 66 descriptors in a packet",
                got: fds.len().to_string(),
            });
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut ancillary, flags) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(false),
            Err(errno) => Err(os("sending to the peer")(errno)),
        }
    }

    /// Ends the connection for every copy of it, also those of forked children.
    pub(crate) fn shut_down(&self) {
        // It fails only if the peer has done so already.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Reads one packet without waiting.
    pub(crate) fn receive(&self) -> Result<Packet, Error> {
        let mut bytes = [0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = loop {
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
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(match rustix::io::dup(&self.fd) {
                Err(Errno::MFILE) => Error::TooManyFiles {
                    limit: limits::files(),
                },
                _ => unexpected("descriptors that there is room for", "more".into()),
            });
        }
        // The ends never send an empty packet, so no bytes means end of file.
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

/// Raises this process's limit on open files when a new one is near it: each has
/// the lowest number that is free. The usual limit of 1024 is for programs that call
/// `select`, and a worker takes two.
fn keep_files_free(newest: &OwnedFd) {
    const SPARED: u64 = 64;
    let number = u64::from(newest.as_raw_fd().unsigned_abs());
    if limits::files().is_some_and(|limit| number + SPARED >= limit) {
        // What cannot be raised is told when it is reached.
        limits::raise_files();
    }
}

fn endpoint() -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(os("making a Unix socket"))
}

fn abstract_address(name: &str) -> Result<SocketAddrUnix, Error> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| Error::BadOption {
        option: "the segment's name",
        expected: "1 to 107 bytes",
        got: format!("{} bytes", name.len()),
    })
}

/// Who is at the other end. The process id is 0 if it is of another process
/// namespace (which is why rustix's own call, whose ids are never 0, is not used).
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

/// The process at the other end.
enum Peer {
    /// Readable once it is dead.
    Watched(OwnedFd),
    /// The kernel cannot say: the hang-up of the socket is what tells of its death.
    Unknown,
    Gone,
}

/// A descriptor of the process at the other end, which cannot be confused with
/// a later process of the same number.
///
/// Kernels before 6.5 cannot give one. There it is asked for by the number (5.3):
/// should that be another process's by now, the one that was meant is dead, and
/// the worst is that it is not told before the socket's hang-up.
fn peer_pidfd(socket: BorrowedFd<'_>, pid: libc::pid_t) -> Peer {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    match socket_option(socket, SO_PEERPIDFD, &mut fd) {
        // SAFETY: the kernel has just opened this descriptor (close-on-exec) for
        // this process, so nobody else owns it.
        Ok(()) if fd >= 0 => Peer::Watched(unsafe { OwnedFd::from_raw_fd(fd) }),
        Ok(()) => Peer::Unknown,
        Err(error) => match error.raw_os_error() {
            // Nobody is left to have a descriptor of; by some kernels EINVAL.
            Some(libc::ESRCH) => Peer::Gone,
            Some(libc::ENOPROTOOPT | libc::EINVAL) => by_number(pid),
            _ => Peer::Unknown,
        },
    }
}

fn by_number(pid: libc::pid_t) -> Peer {
    // 0 is one of another process namespace.
    let Some(pid) = Pid::from_raw(pid) else {
        return Peer::Unknown;
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Peer::Watched(pidfd),
        Err(Errno::SRCH) => Peer::Gone,
        Err(_) => Peer::Unknown,
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
