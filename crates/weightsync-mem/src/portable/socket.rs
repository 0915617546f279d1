//! Packets with descriptors, between the ends of one process.
//!
//! Sharing memory between processes needs seals, without which a peer could resize what this
//! process reads or writes, and names that end with their process. Only Linux has both. Here a name
//! is known to this process alone. So a worker that fetches from another host can still read the
//! memory that its own threads fill, and no memory of another process is ever accepted.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::PollFlags;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};

use crate::error::{Error, bad, os};
use crate::fork::Origin;
use crate::threads::LockExt as _;
use crate::wait::Doorbell;
use crate::wire::Packet;

/// What a poll asks for that waits for a hang-up alone: macOS reports none that is not asked for.
pub(crate) const HANG_UP: PollFlags = PollFlags::HUP;

/// The listeners of this process, by name.
static DOORS: Mutex<BTreeMap<String, Weak<Door>>> = Mutex::new(BTreeMap::new());

/// Fails: only Linux can share memory between processes.
///
/// # Errors
///
/// [`Error::NeedsLinux`].
pub fn check_sharing() -> Result<(), Error> {
    Err(Error::NeedsLinux {
        what: "sharing memory between processes",
    })
}

/// One end of a connection: non-blocking, closed on exec.
#[derive(Debug)]
pub(crate) struct Socket {
    /// Carries a byte for each packet, and the end of the connection.
    signal: OwnedFd,
    to_peer: Arc<Queue>,
    from_peer: Arc<Queue>,
}

type Queue = Mutex<VecDeque<(Vec<u8>, Vec<OwnedFd>)>>;

/// A listener at a name that this process alone knows. Dropping it refuses queued connections.
#[derive(Debug)]
pub struct Listener {
    name: String,
    door: Arc<Door>,
}

#[derive(Debug)]
struct Door {
    bell: Doorbell,
    /// Connections that wait; `None` once the listener is gone.
    queue: Mutex<Option<VecDeque<Socket>>>,
    /// A forked child has a copy of the table, and nobody listens at its names there.
    origin: Origin,
}

impl Listener {
    /// Fails: only Linux can share memory between processes.
    ///
    /// # Errors
    ///
    /// [`Error::NeedsLinux`].
    pub fn at(_name: &str) -> Result<Self, Error> {
        check_sharing()?;
        unreachable!("other systems share nothing")
    }

    /// As [`at`](Self::at).
    ///
    /// # Errors
    ///
    /// [`Error::NeedsLinux`].
    pub fn at_free(name: &str) -> Result<Self, Error> {
        Self::at(name)
    }

    /// Listens for this process. On Linux, other processes find it too.
    ///
    /// # Errors
    ///
    /// [`Error::AddressInUse`]; [`Error::BadOption`] for a name without a byte, or with more than
    /// 107; [`Error::Os`].
    pub fn at_least_here(name: &str) -> Result<Self, Error> {
        if !(1..=107).contains(&name.len()) {
            let got = format!("{} bytes", name.len());
            return Err(bad("the segment's name", "1 to 107 bytes", got));
        }
        let door = Arc::new(Door {
            bell: Doorbell::new()?,
            queue: Mutex::new(Some(VecDeque::new())),
            origin: Origin::here(),
        });
        // Looked up and inserted under one lock, so that two listeners never share a name.
        let mut doors = DOORS.locked();
        if doors.get(name).and_then(open).is_some() {
            return Err(Error::AddressInUse {
                address: name.into(),
            });
        }
        doors.insert(name.into(), Arc::downgrade(&door));
        Ok(Self {
            name: name.into(),
            door,
        })
    }

    /// Accepts the next connection; `None` if there is none.
    pub(crate) fn accept(&self) -> Result<Option<Socket>, Error> {
        let mut queue = self.door.queue.locked();
        let next = queue.as_mut().and_then(VecDeque::pop_front);
        if queue.as_ref().is_none_or(VecDeque::is_empty) {
            // Only with an empty queue. A connection that comes later rings under the queue's lock.
            self.door.bell.silence();
        }
        Ok(next)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.door.bell.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.door.origin.is_here() {
            // A forked child's copy. The name may be another listener's there, and a thread that the
            // child does not have may hold the lock.
            return;
        }
        DOORS.locked().remove(&self.name);
        // Dropped after the lock is released; it hangs up.
        let refused = self.door.queue.locked().take();
        drop(refused);
    }
}

/// The listener behind an entry of the table, if it is this process's and still there.
fn open(door: &Weak<Door>) -> Option<Arc<Door>> {
    door.upgrade().filter(|door| door.origin.is_here())
}

fn find(name: &str) -> Option<Arc<Door>> {
    DOORS.locked().get(name).and_then(open)
}

/// Whether this process listens on a name.
///
/// # Errors
///
/// None here.
pub fn is_served(name: &str) -> Result<bool, Error> {
    Ok(find(name).is_some())
}

impl Socket {
    /// Connects; `None` if nothing in this process listens there.
    pub(crate) fn connect(name: &str) -> Result<Option<Self>, Error> {
        let Some(door) = find(name) else {
            return Ok(None);
        };
        // Packets go through two queues in this process's memory. The sockets carry only a byte for
        // each, so that a poll sees them.
        let (ours, theirs) = pair()?;
        let (one, other) = (Arc::<Queue>::default(), Arc::<Queue>::default());
        let ours = Self {
            signal: ours,
            to_peer: one.clone(),
            from_peer: other.clone(),
        };
        let theirs = Self {
            signal: theirs,
            to_peer: other,
            from_peer: one,
        };
        let mut queue = door.queue.locked();
        let Some(waiting) = queue.as_mut() else {
            return Ok(None);
        };
        waiting.push_back(theirs);
        // Under the lock, so that it is not silenced before it is rung.
        door.bell.ring();
        Ok(Some(ours))
    }

    /// False: the peer's process is this one.
    pub(crate) fn is_peer_dead(&self) -> bool {
        false
    }

    pub(crate) fn peer_pid(&self) -> u32 {
        std::process::id()
    }

    /// None: the peer's process is this one.
    pub(crate) fn peer_death(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Sends one packet. False if the peer does not read or is gone.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool, Error> {
        let copies = fds.iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 0));
        let copies = copies.collect::<Result<_, _>>();
        let packet = (bytes.to_vec(), copies.map_err(os("sending to the peer"))?);
        // Held until both are there, so that the peer finds a packet for each byte.
        let mut queue = self.to_peer.locked();
        match rustix::io::retry_on_intr(|| rustix::io::write(&self.signal, &[1])) {
            Ok(_) => {
                queue.push_back(packet);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(false),
            Err(errno) => Err(os("sending to the peer")(errno)),
        }
    }

    /// Shuts the connection down, for all copies of its descriptor in forked children too.
    pub(crate) fn shut_down(&self) {
        // Fails only if the peer has shut it down before.
        let _ = rustix::net::shutdown(&self.signal, Shutdown::Both);
    }

    /// Reads one packet without waiting.
    pub(crate) fn receive(&self) -> Result<Packet, Error> {
        let mut byte = [0];
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.signal, &mut byte)) {
            Ok(0) | Err(Errno::CONNRESET) => Ok(Packet::HungUp),
            // A byte without a packet comes from a forked child's copy of this connection.
            Ok(_) => Ok(match self.from_peer.locked().pop_front() {
                Some((bytes, fds)) => Packet::Data(bytes, fds),
                None => Packet::Empty,
            }),
            Err(Errno::AGAIN) => Ok(Packet::Empty),
            Err(errno) => Err(os("receiving from the peer")(errno)),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}

/// Two connected stream sockets, non-blocking and closed on exec.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Error> {
    // There are no flags for it, so a fork at this moment may copy them.
    let none = SocketFlags::empty();
    let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, none, None)
        .map_err(os("making a Unix socket"))?;
    for fd in [&one, &other] {
        set_up(fd).map_err(os("setting a socket's flags"))?;
    }
    Ok((one, other))
}

fn set_up(fd: &OwnedFd) -> Result<(), Errno> {
    fcntl_setfd(fd, FdFlags::CLOEXEC)?;
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
    // Else a write to a peer that hung up is a signal.
    #[cfg(target_vendor = "apple")]
    rustix::net::sockopt::set_socket_nosigpipe(fd, true)?;
    Ok(())
}
