//! Calls that may wait, without the interpreter's lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use weightsync_engine::transport::threads::{CondvarExt as _, LockExt as _};
use weightsync_engine::{Error, Origin};

use crate::errors::{busy, ended, exception, forked, within_itself};

/// How long a thread waits for its turn before it looks for signals.
const SLICE: Duration = Duration::from_millis(50);

/// Runs a call that may wait or copy, without the interpreter's lock. A signal
/// whose handler raises (Ctrl-C) ends it with that exception.
pub fn released<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    released_until(py, &AtomicBool::new(false), None, call)
}

/// As [`released`], and its waits end once `ending` is set, or with what `watch` raises,
/// which is called in between.
pub fn released_until<T: Send>(
    py: Python<'_>,
    ending: &AtomicBool,
    watch: Option<&Py<PyAny>>,
    call: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut raised = None;
    // Everything that waits or copies runs without the interpreter's lock, so the other threads of
    // Python go on.
    let done = py.detach(|| {
        // Called from time to time by the wait, in this thread.
        let check = || {
            raised = looked(watch);
            raised.is_some() || ending.load(Ordering::SeqCst)
        };
        weightsync_engine::interruptible(check, call)
    });
    match (done, raised) {
        // What was done is done; the signal is the next thing to know.
        (_, Some(raised)) => Err(raised),
        (Ok(value), None) => Ok(value),
        (Err(Error::Interrupted), None) => Err(ended()),
        (Err(error), None) => Err(exception(py, error)),
    }
}

/// What one thread at a time uses, in calls that may wait.
///
/// **Guarantee.** Waiting for one's turn ends as any other wait does, and by the call's timeout; ending
/// it from another thread, or from a signal's handler, ends the call that is on.
pub struct Turns<T> {
    held: Mutex<TurnsState<T>>,
    free: Condvar,
    end: fn(&mut T, Option<&str>),
    /// Whether it was to be ended; for good.
    ending: AtomicBool,
    /// Why, if not in order.
    why: Mutex<Option<String>>,
    origin: Origin,
}

struct TurnsState<T> {
    /// None while a call has it.
    value: Option<T>,
    by: Option<TurnHolder>,
}

/// The call that has it.
#[derive(Clone, Copy)]
struct TurnHolder {
    call: &'static str,
    thread: ThreadId,
    /// The thread's number in Python.
    number: u64,
}

impl<T: Send> Turns<T> {
    /// `end` is what an end is, in order or for a reason; any number of times.
    pub fn new(value: T, end: fn(&mut T, Option<&str>)) -> Self {
        Self {
            held: Mutex::new(TurnsState {
                value: Some(value),
                by: None,
            }),
            free: Condvar::new(),
            end,
            ending: AtomicBool::new(false),
            why: Mutex::default(),
            origin: Origin::here(),
        }
    }

    /// Makes a call of this name when it is this thread's turn, without the interpreter's lock.
    pub fn with<R: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        call: impl FnOnce(&mut T) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        self.timed(py, name, None, None, |value, _| call(value))
    }

    /// As [`with`](Self::with), for a call with a timeout: it gets what the wait for its turn has left of
    /// that, and is not made, a `DeadlineError`, if that leaves nothing. `watch` is called in both waits,
    /// and what it raises ends the call.
    pub fn timed<R: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        timeout: Option<Duration>,
        watch: Option<&Py<PyAny>>,
        call: impl FnOnce(&mut T, Option<Duration>) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        match self.turn(py, name, timeout, watch)? {
            Ok(turn) => self.made(py, turn, watch, call),
            Err(by) => Err(busy(
                py,
                name,
                (by.call, by.number),
                timeout.unwrap_or_default(),
            )),
        }
    }

    /// As [`timed`](Self::timed), for a call whose timeout is an answer: None.
    pub fn polled<R: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        timeout: Option<Duration>,
        call: impl FnOnce(&mut T, Option<Duration>) -> Result<Option<R>, Error> + Send,
    ) -> PyResult<Option<R>> {
        match self.turn(py, name, timeout, None)? {
            Ok(turn) => self.made(py, turn, None, call),
            // The timeout is an answer here, also that of the wait for the turn.
            Err(_) => Ok(None),
        }
    }

    /// Looks at it, if no call has it.
    pub fn look<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        self.lock().value.as_ref().map(look)
    }

    /// Ends it, and the call that has it; in order, unless there is a reason.
    pub fn end(&self, py: Python<'_>, why: Option<String>) -> PyResult<()> {
        if let Some(why) = why {
            let mut said = self.why.locked();
            said.get_or_insert(why);
        }
        // Set before the lock is asked for: the call that has the value looks at it in its next
        // wait.
        self.ending.store(true, Ordering::SeqCst);
        let by = self.lock().by;
        if by.is_some_and(|by| by.thread == std::thread::current().id()) {
            // A signal's handler, in the middle of a wait: ended when that returns.
            return Ok(());
        }
        // Giving it back is what ends it.
        self.with(py, "shutdown", |_| Ok(()))
    }

    /// Ends it where nobody will call it any more, unless it was ended before.
    pub fn abandon(&mut self, why: &str) {
        // In a forked child the ends belong to the parent.
        if !*self.ending.get_mut() && self.origin.is_here() {
            let held = self.held.get_mut();
            let held = held.unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = &mut held.value {
                (self.end)(value, Some(why));
            }
        }
    }

    /// Makes a call whose turn it is.
    fn made<R: Send>(
        &self,
        py: Python<'_>,
        mut turn: Turn<'_, T>,
        watch: Option<&Py<PyAny>>,
        call: impl FnOnce(&mut T, Option<Duration>) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let left = turn.left;
        let done = released_until(py, &self.ending, watch, || match &mut turn.value {
            Some(value) => call(value, left),
            None => Err(Error::Interrupted),
        });
        // It may be what ends the value: threads are joined then, and memory is given back.
        py.detach(|| drop(turn));
        done
    }

    /// Waits for this thread's turn; or returns the call that has it at the timeout.
    fn turn(
        &self,
        py: Python<'_>,
        call: &'static str,
        timeout: Option<Duration>,
        watch: Option<&Py<PyAny>>,
    ) -> PyResult<Result<Turn<'_, T>, TurnHolder>> {
        // A deadline beyond the clock's range is none.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut left = timeout;
        let me = TurnHolder {
            call,
            thread: std::thread::current().id(),
            // The number is for the error that another thread gets.
            number: thread_number(py)?,
        };
        loop {
            // Short slices: a condition variable does not wake for a signal.
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            let taken = py.detach(|| {
                let mut held = self.lock();
                // A thread that has the value is inside a call of its own, such as a model's
                // `load`. To wait would be for ever.
                let is_mine = held.by.is_some_and(|by| by.thread == me.thread);
                // In a forked child nobody gives the value back, so the wait is left out.
                if held.value.is_none() && !is_mine && self.origin.is_here() {
                    held = self.free.wait_at_most(held, slice);
                    left = weightsync_engine::transport::left(until);
                }
                match held.value.take() {
                    Some(value) => {
                        held.by = Some(me);
                        Ok(value)
                    }
                    None => Err(held.by),
                }
            });
            match taken {
                Ok(value) => {
                    let value = Some(value);
                    let of = self;
                    return Ok(Ok(Turn { of, value, left }));
                }
                Err(Some(by)) if by.thread == me.thread => return Err(within_itself()),
                // The thread that has it was not forked along.
                Err(_) if !self.origin.is_here() => return Err(forked()),
                Err(Some(by)) if left == Some(Duration::ZERO) => return Ok(Err(by)),
                Err(_) => {
                    if let Some(raised) = looked(watch) {
                        return Err(raised);
                    }
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, TurnsState<T>> {
        self.held.locked()
    }
}

/// One thread's turn; given back also by a panic.
struct Turn<'a, T> {
    of: &'a Turns<T>,
    value: Option<T>,
    /// What the wait for it has left of the call's timeout.
    left: Option<Duration>,
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        // Ended while the call had the value: the end is made here, in the thread that is allowed
        // to use it.
        if let (Some(value), true) = (&mut self.value, self.of.ending.load(Ordering::SeqCst)) {
            let why = self.of.why.locked().clone();
            (self.of.end)(value, why.as_deref());
        }
        // Also after a panic, so the next thread does not wait for ever.
        let mut held = self.of.held.locked();
        *held = TurnsState {
            value: self.value.take(),
            by: None,
        };
        drop(held);
        // One value, so one waiter is enough.
        self.of.free.notify_one();
    }
}

/// This thread's number in Python, by which Python finds its name.
fn thread_number(py: Python<'_>) -> PyResult<u64> {
    static NUMBER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let number = NUMBER.get_or_try_init(py, || {
        let module = py.import("threading")?;
        module.getattr("get_ident").map(Bound::unbind)
    })?;
    number.call0(py)?.extract(py)
}

/// Logs queued messages, and returns the exception of a signal handler or of `watch`, if any.
fn looked(watch: Option<&Py<PyAny>>) -> Option<PyErr> {
    // After the end of the interpreter nothing is to be looked at.
    let looked = Python::try_attach(|py| {
        // Signals first. Only the main thread has their handlers: in others this does nothing.
        py.check_signals()?;
        crate::log::flush(py);
        watch.map_or(Ok(()), |watch| watch.call0(py).map(drop))
    });
    looked?.err()
}
