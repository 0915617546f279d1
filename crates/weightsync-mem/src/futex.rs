//! Sleeping on a word of a mailbox.
//!
//! The word has 64 bits and a futex 32. The low half changes with every event that must wake
//! the sleeper: it holds the record and the low bits of the sequence, of the count of entries,
//! or of the question's number. The kernel only reads the word, so a reader's read-only mapping
//! is enough.

use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};

use crate::error::{Error, os};
use crate::interrupt;
use crate::sync::load_acquire;
use crate::wait::{Deadline, timespec};

#[cfg(not(target_endian = "little"))]
compile_error!("the low half of a mailbox's word is expected at its address");

/// The value that [`wait`] compares.
pub(crate) fn value(word: &AtomicU64) -> u32 {
    load_acquire(word) as u32
}

/// Sleeps while the low half is `value`, until the word is woken, the deadline comes, or this
/// thread is interrupted. May wake without a reason.
pub(crate) fn wait(word: &AtomicU64, value: u32, deadline: Deadline) -> Result<(), Error> {
    let left = crate::wait::left(deadline);
    // The caller sleeps in slices if its thread has a check, and looks again after each.
    let left = interrupt::at_most(left)?.map(timespec);
    // Not a private futex: sleeper and waker are processes, which map the page at different
    // addresses. The kernel compares the value once more before it sleeps, so a change in between
    // is not slept through.
    match futex::wait(low_half(word), Flags::empty(), value, left.as_ref()) {
        Ok(()) | Err(Errno::AGAIN | Errno::TIMEDOUT) => Ok(()),
        Err(Errno::INTR) => interrupt::ask(),
        Err(errno) => Err(os("sleeping on the mailbox")(errno)),
    }
}

/// Wakes all that sleep on the word.
pub(crate) fn wake(word: &AtomicU64) {
    // Fails only for an address that is not mapped.
    let _ = futex::wake(low_half(word), Flags::empty(), i32::MAX as u32);
}

fn low_half(word: &AtomicU64) -> &AtomicU32 {
    // SAFETY: the word is 8 bytes long and aligned, and lives as long as the
    // borrow. Rust never accesses it through this reference: only its address
    // goes to the kernel, which reads it on its own.
    unsafe { &*std::ptr::from_ref(word).cast::<AtomicU32>() }
}
