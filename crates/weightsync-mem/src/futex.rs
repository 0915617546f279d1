//! Sleeping on the live word.
//!
//! The word is 64 bits wide and a futex 32: its low half, which holds the slot
//! and the low bits of the sequence, changes with every publication. The kernel
//! needs no more than to read it, so a reader's read-only mapping will do.

use std::sync::atomic::AtomicU32;
use std::time::Instant;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};

use crate::error::{Error, os};
use crate::protocol::LiveWord;
use crate::wait::{Deadline, timespec};

#[cfg(not(target_endian = "little"))]
compile_error!("the low half of the live word is expected at its address");

impl LiveWord {
    /// What [`LiveWord::futex_wait`] compares with.
    pub(crate) fn futex_value(&self) -> u32 {
        self.raw() as u32
    }

    /// Sleeps while the low half is `value`, until somebody wakes the word or
    /// the deadline comes. It may wake for nothing.
    pub(crate) fn futex_wait(&self, value: u32, deadline: Deadline) -> Result<(), Error> {
        let left = deadline.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        match futex::wait(self.low_half(), Flags::empty(), value, left.as_ref()) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
            Err(errno) => Err(os("sleeping on the live word")(errno)),
        }
    }

    /// Wakes everybody who sleeps on the word.
    pub(crate) fn futex_wake(&self) {
        // It fails only on an address that is not mapped.
        let _ = futex::wake(self.low_half(), Flags::empty(), i32::MAX as u32);
    }

    fn low_half(&self) -> &AtomicU32 {
        // SAFETY: the word is 8 bytes long and aligned, and lives as long as
        // `self`. Rust never accesses it through this reference: only its
        // address goes to the kernel, which reads it by itself.
        unsafe { &*std::ptr::from_ref(self).cast::<AtomicU32>() }
    }
}
