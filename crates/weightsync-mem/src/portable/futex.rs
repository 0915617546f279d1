//! Sleeping on a word of a mailbox, without futexes.
//!
//! The sleeper is woken by a thread of this process, so one condition serves all words. A thread
//! that is woken for another word sleeps again.

use std::sync::atomic::AtomicU64;
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::error::Error;
use crate::interrupt;
use crate::sync::load_acquire;
use crate::threads::{CondvarExt as _, LockExt as _};
use crate::wait::{Deadline, left};

static ASLEEP: Mutex<()> = Mutex::new(());
static WOKEN: Condvar = Condvar::new();

/// The value that [`wait`] compares.
pub(crate) fn value(word: &AtomicU64) -> u32 {
    load_acquire(word) as u32
}

/// Sleeps while the low half is `value`, until the word is woken, the deadline comes, or this
/// thread is interrupted. May wake without a reason.
pub(crate) fn wait(word: &AtomicU64, value: u32, deadline: Deadline) -> Result<(), Error> {
    // The check runs without the lock.
    let left = interrupt::at_most(left(deadline))?;
    let lock = asleep();
    // Under the lock, which the thread that changes the word takes before it wakes.
    if self::value(word) != value {
        return Ok(());
    }
    drop(WOKEN.wait_at_most(lock, left));
    Ok(())
}

/// Wakes all that sleep on the word, which was changed before.
pub(crate) fn wake(_word: &AtomicU64) {
    drop(asleep());
    WOKEN.notify_all();
}

fn asleep() -> MutexGuard<'static, ()> {
    // There is no state to be left half changed.
    ASLEEP.locked()
}
