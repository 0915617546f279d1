//! Lets a caller end the waits of its own thread, for callers whose signals must be handled
//! during a wait (Ctrl-C in a Python program).
//!
//! [`with`] gives this thread a *check* for the time of one call. Every wait that the thread
//! makes in this call sleeps at most [`SLICE`] at a time. After each sleep it asks the check: at once
//! when a signal arrives, but for waits with a condition, which a signal does not end. Once the check has said yes, that wait and every later
//! one of the call end with [`Error::Interrupted`]. Other threads are not affected, including
//! those that belong to the ends in use. A thread without a check sleeps without slices.
//!
//! The result of a wait comes before the check: a call that does not have to wait never asks.
//! The yields before a sleep take microseconds and ask nothing; they end once the check is due.
//!
//! # Where threads of a caller wait
//!
//! | what for | where |
//! |---|---|
//! | a free slot, workers that join, workers that apply | `Watchers` in `wait.rs`: a poll, or a condition for all but the first thread |
//! | a version, an answer | `futex.rs`, by `Watch::sleep` |
//! | a slot that is on its way | `Watch::slots` |
//! | a sender that is not there yet, its answer, a name that comes free | [`sleep`] and `wait::poll`, by `Reader::attach` and `Socket::listen` |
//! | a lock of the run directory | [`sleep`], in weightsync's `run_dir.rs` |
//! | a background receiver: its status, the receiver, the models, its end | the handoff in
//! weightsync's `background/thread.rs` |
//! | worker processes: their frames, room in their pipes, their end | weightsync's `worker/wait.rs` |
//! | a change in a place that is looked at by turns | `Pause::until` of weightsync's `transport/polled.rs` |
//!
//! These waits always end soon and are not interruptible: a lock held for a few steps; the join
//! of a thread that was told to end (when an end is dropped); the join of threads that copy;
//! and the waits of a worker process before it has its init bytes.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::thread::{NanosleepRelativeResult, nanosleep};

use crate::error::Error;
use crate::wait::timespec;

/// The longest sleep of a wait between two calls of the check.
pub const SLICE: Duration = Duration::from_millis(50);

/// Runs a call whose waits end with [`Error::Interrupted`] once `check` says
/// yes.
///
/// **Guarantee.** The check is asked by this thread, between two sleeps and with
/// no lock of this crate's held, at most once per [`SLICE`] and once per signal.
/// After its first yes it is asked no more. While it is asked, this thread has no
/// check; within `call` another `with` takes the place of this one for its time.
///
/// What an interrupted call had done, and what it leaves, is what it leaves at its
/// deadline.
pub fn with<T>(mut check: impl FnMut() -> bool, call: impl FnOnce() -> T) -> T {
    let check: *mut (dyn FnMut() -> bool + '_) = &raw mut check;
    // SAFETY: this only forgets how long the check lives. The pointer is used by
    // `ask` alone, which finds it in `CHECK`, and `Restore` takes it out of there
    // before `check` goes out of scope, also by a panic.
    let check = unsafe {
        std::mem::transmute::<*mut (dyn FnMut() -> bool + '_), *mut (dyn FnMut() -> bool + 'static)>(
            check,
        )
    };
    let _restore = Restore(CHECK.replace(Some(InterruptCheck {
        check,
        due: Instant::now() + SLICE,
        yes: false,
    })));
    call()
}

/// Whether this thread's check has said yes. Does not call it.
pub fn is_interrupted() -> bool {
    CHECK.get().is_some_and(|check| check.yes)
}

/// How long a wait with `left` to go (`None`: no limit) may sleep now. Calls the check if it is
/// due, so call this before each sleep, with no lock held that the check may need.
///
/// # Errors
///
/// [`Error::Interrupted`].
pub fn at_most(left: Option<Duration>) -> Result<Option<Duration>, Error> {
    if is_due() {
        ask()?;
    }
    Ok(slice(left))
}

/// Whether the check is due. A wait that holds a lock releases it, [asks](ask), and looks again;
/// then it sleeps for a [`slice()`].
pub fn is_due() -> bool {
    let check = CHECK.get();
    // After its yes it stays due: every later wait of the call must end.
    check.is_some_and(|check| check.yes || Instant::now() >= check.due)
}

/// How long a wait with `left` to go may sleep now, without calling the check.
pub fn slice(left: Option<Duration>) -> Option<Duration> {
    let Some(check) = CHECK.get() else {
        return left;
    };
    let pause = check.due.saturating_duration_since(Instant::now());
    Some(left.map_or(pause, |left| left.min(pause)))
}

/// Calls the check, unless it has said yes before. Call this also after a sleep that a signal
/// ended.
///
/// # Errors
///
/// [`Error::Interrupted`].
pub fn ask() -> Result<(), Error> {
    let Some(mut known) = CHECK.get() else {
        return Ok(());
    };
    if !known.yes {
        // Removed meanwhile: the check may wait itself, and must not be called within itself.
        let place = Restore(CHECK.replace(None));
        // SAFETY: `with` keeps the check alive and untouched while it is in its
        // place, where it was until just now, and cannot return before this does.
        // It is not borrowed a second time: nobody finds it while it is asked.
        known.yes = unsafe { (*known.check)() };
        drop(place);
        // From the end of the check, so that a slow check does not take all of the time.
        known.due = Instant::now() + SLICE;
        CHECK.set(Some(known));
    }
    match known.yes {
        true => Err(Error::Interrupted),
        false => Ok(()),
    }
}

/// Sleeps for this long.
///
/// # Errors
///
/// [`Error::Interrupted`].
pub fn sleep(time: Duration) -> Result<(), Error> {
    // The sleep may be cut by slices and signals, so the end is fixed first.
    let until = Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        let pause = at_most(Some(left))?.unwrap_or(left);
        if let NanosleepRelativeResult::Interrupted(_) = nanosleep(&timespec(pause)) {
            ask()?;
        }
    }
}

thread_local! {
    static CHECK: Cell<Option<InterruptCheck>> = const { Cell::new(None) };
}

#[derive(Clone, Copy)]
struct InterruptCheck {
    check: *mut (dyn FnMut() -> bool + 'static),
    /// When the check is due next.
    due: Instant,
    yes: bool,
}

/// Restores the earlier check.
struct Restore(Option<InterruptCheck>);

impl Drop for Restore {
    fn drop(&mut self) {
        CHECK.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn check_ends_a_wait_and_every_later_wait() {
        let mut asked = 0;
        let since = Instant::now();
        let ends = with(
            || {
                asked += 1;
                asked == 3
            },
            || {
                let first = sleep(LONG);
                assert!(is_interrupted());
                [first, sleep(LONG), at_most(None).map(drop)]
            },
        );
        assert!(
            ends.iter()
                .all(|end| matches!(end, Err(Error::Interrupted)))
        );
        assert_eq!(asked, 3, "no more than once per slice, nor after its yes");
        let took = since.elapsed();
        assert!(took >= SLICE * 3 && took < LONG / 2, "{took:?}");
        assert!(!is_interrupted());
        sleep(Duration::from_millis(1)).unwrap();
        assert_eq!(at_most(None).unwrap(), None, "nothing is left of it");
    }

    #[test]
    fn inner_check_and_panic_keep_the_outer_check() {
        let outer = AtomicBool::new(false);
        with(
            || outer.load(Ordering::Relaxed),
            || {
                let panicked = std::panic::catch_unwind(|| {
                    with(|| panic!("in the check"), || sleep(LONG)).unwrap();
                });
                assert!(panicked.is_err());
                let inner = with(|| true, || sleep(LONG));
                assert!(matches!(inner, Err(Error::Interrupted)));
                sleep(SLICE * 2).unwrap();
                outer.store(true, Ordering::Relaxed);
                assert!(matches!(sleep(LONG), Err(Error::Interrupted)));
            },
        );
    }

    #[test]
    fn a_check_may_wait_itself() {
        let mut asked = 0;
        let ended = with(
            || {
                asked += 1;
                sleep(SLICE * 2).is_err()
                    || matches!(with(|| true, || sleep(LONG)), Err(Error::Interrupted))
            },
            || sleep(LONG),
        );
        assert!(matches!(ended, Err(Error::Interrupted)));
        assert_eq!(asked, 1);
    }

    #[test]
    fn a_signal_has_the_check_asked_at_once() {
        extern "C" fn nothing(_: libc::c_int) {}
        let handler: extern "C" fn(libc::c_int) = nothing;
        // SAFETY: all zeros is a valid `sigaction`.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        // SAFETY: the handler does nothing, which any state allows.
        let set =
            unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
        assert_eq!(set, 0);
        let (send, waits) = mpsc::channel();
        let (answer, signalled) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut asked = Vec::new();
            let since = Instant::now();
            let ended = with(
                || {
                    // SAFETY: it has no preconditions.
                    let me = unsafe { libc::pthread_self() };
                    match asked.is_empty() {
                        // From here on signals come until the next question.
                        true => send.send(me).unwrap(),
                        false => answer.send(()).unwrap(),
                    }
                    asked.push(since.elapsed());
                    asked.len() == 2
                },
                || sleep(LONG),
            );
            assert!(matches!(ended, Err(Error::Interrupted)));
            asked[1] - asked[0]
        });
        let sleeper = waits.recv().unwrap();
        while signalled.try_recv().is_err() {
            // SAFETY: the thread is there until it is joined below.
            let _ = unsafe { libc::pthread_kill(sleeper, libc::SIGUSR1) };
            std::thread::yield_now();
        }
        let between = thread.join().unwrap();
        assert!(between < SLICE, "{between:?}");
    }
}
