//! Waiting: deadlines, the yield-then-sleep style, and polls that a death ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::error::{Error, os};
use crate::interrupt;
use crate::protocol::SleepWord;

/// When a wait ends at the latest. `None`: only by what is waited for, by the
/// peer's death, or by shutdown.
pub type Deadline = Option<Instant>;

/// How an end waits for the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitStyle {
    /// Sleep in the kernel at once: costs no processor time, 50–75 µs to wake.
    Sleep,
    /// Give the processor away up to 400 times, looking each time, then sleep:
    /// a few microseconds while the other end is busy with the same version.
    /// There is no bare spinning: with more processes than cores it collapses.
    #[default]
    YieldThenSleep,
}

/// How often [`WaitStyle::YieldThenSleep`] yields before it sleeps.
const YIELDS: u32 = 400;

impl WaitStyle {
    /// Looks, and yields, up to the style's bound.
    pub(crate) fn brief<T>(
        self,
        deadline: Deadline,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let found = look();
        if found.is_some() || self == Self::Sleep {
            return found;
        }
        for _ in 0..YIELDS {
            rustix::thread::sched_yield();
            let found = look();
            if found.is_some() || passed(deadline) {
                return found;
            }
        }
        None
    }
}

/// Whether the deadline has come.
pub(crate) fn passed(deadline: Deadline) -> bool {
    deadline.is_some_and(|at| Instant::now() >= at)
}

/// Waits until one of the descriptors has something to say or the deadline
/// comes; says which have.
pub(crate) fn poll<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    deadline: Deadline,
) -> Result<[bool; N], Error> {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    poll_slice(&mut polled, deadline)?;
    Ok(std::array::from_fn(|i| !polled[i].revents().is_empty()))
}

/// The same over any number of descriptors; the answers stay in `polled`.
pub(crate) fn poll_slice(polled: &mut [PollFd<'_>], deadline: Deadline) -> Result<(), Error> {
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        // Who only looks does not wait.
        let pause = match left {
            Some(Duration::ZERO) => left,
            left => interrupt::at_most(left)?,
        };
        match rustix::event::poll(polled, pause.map(timespec).as_ref()) {
            Ok(0) if pause != left => {}
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => interrupt::ask()?,
            Err(errno) => return Err(os("waiting for the peer")(errno)),
        }
    }
}

pub(crate) fn timespec(left: Duration) -> Timespec {
    Timespec::try_from(left).unwrap_or(Timespec {
        tv_sec: i64::MAX,
        tv_nsec: 0,
    })
}

/// A bell that many can ring and one listens to. Rings add up to one.
#[derive(Debug)]
pub(crate) struct Doorbell(OwnedFd);

impl Doorbell {
    pub(crate) fn new() -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        rustix::event::eventfd(0, flags)
            .map(Self)
            .map_err(os("making an eventfd"))
    }

    /// A bell received from its owner.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    pub(crate) fn ring(&self) {
        // It can fail only if the counter is full, and then the bell rings
        // already, or if its owner is gone, and then nobody listens.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The sender's bells: one of its own, and one for each reader.
///
/// **Guarantee.** A reader can ring, and nothing else: it cannot silence the bell of
/// another, nor have anybody wait who listens. Its bell costs no descriptor.
///
/// Each reader gets an eventfd of its own, which the sender watches by its *edges* (each
/// ring is one) and never reads. So nothing that a reader does with it, from reading it to
/// making it blocking, is felt by anybody else. The sender closes its descriptor as soon as
/// it has handed the bell out: the kernel watches it for as long as the reader has it.
#[derive(Debug)]
pub(crate) struct Doorbells {
    edges: OwnedFd,
    own: Arc<Doorbell>,
}

impl Doorbells {
    pub(crate) fn new() -> Result<Self, Error> {
        let edges = epoll::create(CreateFlags::CLOEXEC).map_err(os("making an epoll"))?;
        let own = Arc::new(Doorbell::new()?);
        let bells = Self { edges, own };
        bells.watch(&bells.own)?;
        Ok(bells)
    }

    /// The bell of this process.
    pub(crate) fn own(&self) -> &Arc<Doorbell> {
        &self.own
    }

    /// A new one, for a reader.
    pub(crate) fn for_reader(&self) -> Result<Doorbell, Error> {
        let bell = Doorbell::new()?;
        self.watch(&bell)?;
        Ok(bell)
    }

    pub(crate) fn ring(&self) {
        self.own.ring();
    }

    /// Takes note of what has rung: a ring after this is heard by the next poll.
    pub(crate) fn silence(&self) {
        let mut rung = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 64];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // Once: what does not fit rings again.
        let _ = epoll::wait(&self.edges, &mut rung, Some(&now));
    }

    fn watch(&self, bell: &Doorbell) -> Result<(), Error> {
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&self.edges, bell, EventData::new_u64(0), edges)
            .map_err(os("watching a reader's bell"))
    }
}

impl AsFd for Doorbells {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.edges.as_fd()
    }
}

/// The sender's threads that wait for its readers.
///
/// One of them leads: it alone announces sleep and listens to the doorbell. The
/// others look again whenever it has heard something. When the leader has found
/// what it waits for, another takes its place.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    line: Mutex<Line>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Line {
    led: bool,
    /// Counts what the leaders have heard.
    news: u64,
}

impl Watchers {
    /// Looks again and again until something is found or the deadline comes.
    /// `sleep` says to readers that they are waited for, and `bells` are what they ring
    /// then.
    pub(crate) fn wait<T>(
        &self,
        sleep: &SleepWord,
        bells: &Doorbells,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        loop {
            let mut line = self.line();
            if !line.led {
                // Announced before anybody can follow: what happens after a
                // follower's look rings the bell, or is seen by that look.
                sleep.announce();
                line.led = true;
                drop(line);
                let lead = Lead {
                    watchers: self,
                    sleep,
                };
                return lead.wait(bells, deadline, look);
            }
            let news = line.news;
            drop(line);
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            loop {
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                // Asked without the lock.
                let pause = interrupt::at_most(left)?;
                let line = self.line();
                if !line.led || line.news != news {
                    break;
                }
                match pause {
                    Some(Duration::ZERO) => return Ok(None),
                    Some(left) => {
                        let waited = self.changed.wait_timeout(line, left);
                        drop(waited.unwrap_or_else(PoisonError::into_inner));
                    }
                    None => {
                        let waited = self.changed.wait(line);
                        drop(waited.unwrap_or_else(PoisonError::into_inner));
                    }
                }
            }
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        // Changed in single steps, so it holds after a panic.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The leader's part, given up when dropped, also by a panic of what it looks at.
struct Lead<'a> {
    watchers: &'a Watchers,
    sleep: &'a SleepWord,
}

impl Lead<'_> {
    fn wait<T>(
        &self,
        bells: &Doorbells,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        loop {
            let found = look()?;
            if found.is_some() || passed(deadline) {
                return Ok(found);
            }
            poll([bells.as_fd()], deadline)?;
            // Silenced before the others look: a ring after that is heard by the
            // next poll.
            bells.silence();
            self.watchers.line().news += 1;
            self.watchers.changed.notify_all();
        }
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut line = self.watchers.line();
        self.sleep.awake();
        line.led = false;
        line.news += 1;
        drop(line);
        self.watchers.changed.notify_all();
    }
}
