//! Waiting: deadlines, the yield-then-sleep style, and polls that a death ends.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

pub(crate) use crate::bell::{Doorbell, Doorbells};
use crate::error::{Error, os};
use crate::interrupt;
use crate::protocol::SleepWord;
use crate::threads::{CondvarExt as _, LockExt as _};

/// The latest end of a wait. With `None`, only its event, the peer's death or a shutdown ends it.
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
        // Once even if the deadline has come: a call with no time left still takes what is there.
        let found = look();
        if found.is_some() || self == Self::Sleep {
            return found;
        }
        for _ in 0..YIELDS {
            rustix::thread::sched_yield();
            let found = look();
            // On a busy machine a yield takes milliseconds. The sleep that follows asks the check.
            if found.is_some() || passed(deadline) || interrupt::is_due() {
                return found;
            }
        }
        None
    }
}

/// Whether the deadline has come.
pub fn passed(deadline: Deadline) -> bool {
    deadline.is_some_and(|at| Instant::now() >= at)
}

/// How long it is until the deadline; zero once it has come, `None` without one.
pub fn left(deadline: Deadline) -> Option<Duration> {
    deadline.map(|at| at.saturating_duration_since(Instant::now()))
}

/// Waits until one of the descriptors is ready or the deadline comes; returns which are ready.
pub(crate) fn poll<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    deadline: Deadline,
) -> Result<[bool; N], Error> {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    poll_slice(&mut polled, deadline)?;
    Ok(std::array::from_fn(|i| !polled[i].revents().is_empty()))
}

/// The same for any number of descriptors; the results stay in `polled`.
pub(crate) fn poll_slice(polled: &mut [PollFd<'_>], deadline: Deadline) -> Result<(), Error> {
    loop {
        let left = left(deadline);
        // A poll whose deadline has come does not wait.
        let pause = match left {
            // Such a poll asks no check, either.
            Some(Duration::ZERO) => left,
            left => interrupt::at_most(left)?,
        };
        match rustix::event::poll(polled, pause.map(timespec).as_ref()) {
            // Only a slice is over. The check is asked, and the poll goes on.
            Ok(0) if pause != left => {}
            Ok(_) => return Ok(()),
            // A signal, such as Ctrl-C: the check says whether it ends the wait.
            Err(Errno::INTR) => interrupt::ask()?,
            Err(errno) => return Err(os("waiting for the peer")(errno)),
        }
    }
}

pub(crate) fn timespec(left: Duration) -> Timespec {
    Timespec::try_from(left).unwrap_or(Timespec {
        // Longer than the kernel can count is as good as without a limit.
        tv_sec: i64::MAX,
        tv_nsec: 0,
    })
}

/// The sender's threads that wait for its readers.
///
/// One of them leads: only it announces that it sleeps, and listens to the doorbell. The others
/// look again after each ring. When the leader has found its event, another thread leads.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    line: Mutex<WatchersState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WatchersState {
    led: bool,
    /// How many rings the leaders have heard.
    news: u64,
}

impl Watchers {
    /// Looks until something is found or the deadline comes. `sleep` tells readers that a thread
    /// waits for them, and `bells` are the bells that they ring then.
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
                // Announced before another thread can follow: a later event rings the bell, and an
                // earlier one is seen by the follower's look.
                sleep.announce();
                line.led = true;
                drop(line);
                let lead = Lead {
                    watchers: self,
                    sleep,
                };
                return lead.wait(bells, deadline, look);
            }
            // Read before the look: a ring after the look changes it, and the wait below ends at
            // once.
            let news = line.news;
            drop(line);
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            loop {
                // The check runs without the lock.
                let pause = interrupt::at_most(left(deadline))?;
                let line = self.line();
                // Either there is something to look at, or this thread must lead now.
                if !line.led || line.news != news {
                    break;
                }
                if pause == Some(Duration::ZERO) {
                    return Ok(None);
                }
                // Every ring ends this wait, and so does the end of the leader.
                drop(self.changed.wait_at_most(line, pause));
            }
        }
    }

    fn line(&self) -> MutexGuard<'_, WatchersState> {
        // Each change is one step, so the state is valid after a panic.
        self.line.locked()
    }
}

/// The leader's part, given up when dropped, also after a panic of `look`.
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
            // The sleep was announced before this look, so an event that comes later rings the
            // bell.
            let found = look()?;
            if found.is_some() || passed(deadline) {
                return Ok(found);
            }
            poll([bells.as_fd()], deadline)?;
            // Silenced before the others look, so that a later ring ends the next poll.
            bells.silence();
            self.watchers.line().news += 1;
            self.watchers.changed.notify_all();
        }
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut line = self.watchers.line();
        // Withdrawn before another thread can lead. Otherwise this store could undo that thread's
        // announcement, and it would sleep on.
        self.sleep.awake();
        line.led = false;
        // The followers look again, and one of them leads.
        line.news += 1;
        drop(line);
        self.watchers.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yields_end_once_the_check_is_due() {
        let looks = |wait: fn()| {
            let mut looks = 0;
            wait();
            let found = WaitStyle::YieldThenSleep.brief(None, || {
                looks += 1;
                None::<()>
            });
            assert_eq!(found, None);
            looks
        };
        assert_eq!(looks(|| ()), YIELDS + 1);
        let due = || std::thread::sleep(interrupt::SLICE);
        assert_eq!(looks(due), YIELDS + 1, "nothing is asked here");
        assert_eq!(interrupt::with(|| false, || looks(due)), 2);
    }
}
