//! Locks, deadlines and wake-ups shared by both ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use weightsync_mem::threads::{CondvarExt as _, LockExt as _};
use weightsync_mem::{Error as MemoryError, Origin, interrupt, left};

use super::error::WorkerError;
use super::system;
pub(super) use crate::transport::deadline;

/// Waits for `changed` until `deadline`; `Err` when that has passed.
pub(super) fn wait<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> Result<MutexGuard<'a, T>, MutexGuard<'a, T>> {
    match left(deadline) {
        Some(Duration::ZERO) => Err(guard),
        left => Ok(changed.wait_at_most(guard, left)),
    }
}

/// As [`wait`], and [`WaitEnd::Interrupted`] if this thread's check says so.
pub(super) fn wait_or_interrupt<'a, T>(
    (mutex, changed): (&'a Mutex<T>, &Condvar),
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> Result<MutexGuard<'a, T>, (MutexGuard<'a, T>, WaitEnd)> {
    if interrupt::is_due() {
        // Asked without the lock; then the caller looks again.
        drop(guard);
        let asked = interrupt::ask();
        let guard = mutex.locked();
        return match asked {
            Ok(()) => Ok(guard),
            Err(_) => Err((guard, WaitEnd::Interrupted)),
        };
    }
    // The sleep ends at the deadline, or when the check is due; the caller looks again either way.
    let slice = self::deadline(interrupt::slice(None));
    let until = [deadline, slice].into_iter().flatten().min();
    match wait(changed, guard, until) {
        // The deadline itself has come, not just the end of a slice.
        Err(guard) if deadline.is_some_and(|at| at <= Instant::now()) => {
            Err((guard, WaitEnd::Deadline))
        }
        Ok(guard) | Err(guard) => Ok(guard),
    }
}

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitEnd {
    Deadline,
    Interrupted,
}

/// The process that made something. After a fork, the copy has neither the threads nor the right.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner(Origin);

impl Owner {
    pub(super) fn this_process() -> Self {
        Self(Origin::here())
    }

    /// Refuses the call in a forked copy of the owning process.
    pub(super) fn check(self) -> Result<(), WorkerError> {
        match self.0.check() {
            Err(MemoryError::Forked { owner, child }) => {
                Err(WorkerError::Forked { owner, here: child })
            }
            _ => Ok(()),
        }
    }
}

/// Wakes a thread out of `poll`.
#[derive(Debug)]
pub(super) struct Waker(OwnedFd);

impl Waker {
    pub(super) fn new() -> Result<Self, WorkerError> {
        system::counter()
            .map(Self)
            .map_err(WorkerError::os("making an eventfd"))
    }

    pub(super) fn wake(&self) {
        // Fails only when 2^64 - 2 wake-ups are pending: the thread is awake by then.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(super) fn clear(&self) {
        // Fails when nothing is pending: the counter is clear then.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn forked_copy_gets_an_error_naming_the_owner() {
        assert!(Owner::this_process().check().is_ok());
        // Process 0 is nobody's, so this end is another process's.
        match Owner(Origin::NOWHERE).check() {
            Err(WorkerError::Forked { owner: 0, here }) => assert_eq!(here, std::process::id()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_timeout_beyond_the_clock_is_none() {
        assert_eq!(deadline(Some(Duration::MAX)), None);
        assert_eq!(deadline(None), None);
        assert!(deadline(Some(Duration::ZERO)).is_some_and(|deadline| deadline <= Instant::now()));
    }
}
