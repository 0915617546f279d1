//! Locks, waits and threads as the whole workspace takes them.

use std::io;
use std::sync::{
    Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

/// A lock that a panic of its holder does not close.
///
/// **Guarantee.** Every critical section of this workspace leaves its state whole at each step that can
/// panic. So the state of a poisoned lock is as good as any, and a panic in one thread does not spread
/// to the others. (A lock without poison, such as `parking_lot`'s, would do as well, were it not for
/// forks: its waiters meet in one table, whose locks a forked child may find taken for good.)
pub trait LockExt<T: ?Sized> {
    /// Locks it, also after a panic.
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T: ?Sized> LockExt<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As [`LockExt`], for locks that several readers share.
pub trait RwLockExt<T: ?Sized> {
    /// Locks it for reading, also after a panic.
    fn reading(&self) -> RwLockReadGuard<'_, T>;

    /// Locks it for writing, also after a panic.
    fn writing(&self) -> RwLockWriteGuard<'_, T>;
}

impl<T: ?Sized> RwLockExt<T> for RwLock<T> {
    fn reading(&self) -> RwLockReadGuard<'_, T> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> RwLockWriteGuard<'_, T> {
        self.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As [`LockExt`], for what waits with a lock.
pub trait CondvarExt {
    /// Waits until it is notified, for this long at most (`None`: without a limit), also after a
    /// panic. It may return earlier: the caller looks, and waits again.
    fn wait_at_most<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        most: impl Into<Option<Duration>>,
    ) -> MutexGuard<'a, T>;
}

impl CondvarExt for Condvar {
    fn wait_at_most<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        most: impl Into<Option<Duration>>,
    ) -> MutexGuard<'a, T> {
        match most.into() {
            None => self.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(most) => {
                let waited = self.wait_timeout(guard, most);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

/// Starts a thread that tools show as `weightsync-` and `name`, as far as the system has room for it
/// (15 bytes on Linux).
///
/// # Errors
///
/// Those of the system, which bounds how many threads a process or a user has.
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new()
        .name(format!("weightsync-{name}"))
        .spawn(body)
}

/// As [`spawn`], for a thread that ends within a scope.
///
/// # Errors
///
/// As [`spawn`].
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new()
        .name(format!("weightsync-{name}"))
        .spawn_scoped(scope, body)
}

/// Does work that may block, and waits for its end in a thread of its own: in one that drives async
/// tasks, where a caller may drop what needs such work too, blocking calls panic. Gives back what the
/// work takes where no thread can be started.
pub fn run_apart<T: Send>(name: &str, input: T, work: impl FnOnce(T) + Send) -> Option<T> {
    let input = Mutex::new(Some(input));
    let take = || {
        let taken = input.locked().take();
        if let Some(input) = taken {
            work(input);
        }
    };
    // The scope's end joins the thread. One that did not start took nothing.
    let _ = std::thread::scope(|scope| spawn_scoped(scope, name, take).map(drop));
    input.into_inner().unwrap_or_else(PoisonError::into_inner)
}
