//! Calls that may wait, without the interpreter's lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use pyo3::prelude::*;
use weightsync_engine::{Error, Origin};

use crate::errors::{ended, exception, forked, within_itself};

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
    let done = py.detach(|| {
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
/// **Guarantee.** Waiting for one's turn ends as any other wait does; ending it
/// from another thread, or from a signal's handler, ends the call that is on.
pub struct Turns<T> {
    /// None while a call has it.
    value: Mutex<(Option<T>, Option<ThreadId>)>,
    free: Condvar,
    end: fn(&mut T, Option<&str>),
    /// Whether it was to be ended; for good.
    ending: AtomicBool,
    /// Why, if not in order.
    why: Mutex<Option<String>>,
    origin: Origin,
}

impl<T: Send> Turns<T> {
    /// `end` is what an end is, in order or for a reason; any number of times.
    pub fn new(value: T, end: fn(&mut T, Option<&str>)) -> Self {
        Self {
            value: Mutex::new((Some(value), None)),
            free: Condvar::new(),
            end,
            ending: AtomicBool::new(false),
            why: Mutex::default(),
            origin: Origin::here(),
        }
    }

    /// Makes a call when it is this thread's turn, without the interpreter's lock.
    pub fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut T) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        self.watched(py, None, call)
    }

    /// As [`with`](Self::with); `watch` is called while the call waits, and what it raises
    /// ends the call.
    pub fn watched<R: Send>(
        &self,
        py: Python<'_>,
        watch: Option<&Py<PyAny>>,
        call: impl FnOnce(&mut T) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let mut turn = self.turn(py)?;
        let done = released_until(py, &self.ending, watch, || match &mut turn.value {
            Some(value) => call(value),
            None => Err(Error::Interrupted),
        });
        // It may be what ends the value: threads are joined then, and memory is given back.
        py.detach(|| drop(turn));
        done
    }

    /// Looks at it, if no call has it.
    pub fn look<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        self.lock().0.as_ref().map(look)
    }

    /// Ends it, and the call that has it; in order, unless there is a reason.
    pub fn end(&self, py: Python<'_>, why: Option<String>) -> PyResult<()> {
        if let Some(why) = why {
            let mut said = self.why.lock().unwrap_or_else(PoisonError::into_inner);
            said.get_or_insert(why);
        }
        self.ending.store(true, Ordering::SeqCst);
        if self.lock().1 == Some(std::thread::current().id()) {
            // A signal's handler, in the middle of a wait: ended when that returns.
            return Ok(());
        }
        // Giving it back is what ends it.
        self.with(py, |_| Ok(()))
    }

    /// Ends it where nobody will call it any more, unless it was ended before.
    pub fn abandon(&mut self, why: &str) {
        if !*self.ending.get_mut() && self.origin.is_here() {
            let held = self.value.get_mut();
            let (value, _) = held.unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = value {
                (self.end)(value, Some(why));
            }
        }
    }

    fn turn(&self, py: Python<'_>) -> PyResult<Turn<'_, T>> {
        let me = std::thread::current().id();
        loop {
            let taken = py.detach(|| {
                let mut held = self.lock();
                if held.0.is_none() && held.1 != Some(me) && self.origin.is_here() {
                    let waited = self.free.wait_timeout(held, SLICE);
                    held = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                match held.0.take() {
                    Some(value) => {
                        held.1 = Some(me);
                        Ok(value)
                    }
                    None => Err(held.1),
                }
            });
            match taken {
                Ok(value) => {
                    let value = Some(value);
                    return Ok(Turn { of: self, value });
                }
                Err(Some(owner)) if owner == me => return Err(within_itself()),
                // The thread that has it was not forked along.
                Err(_) if !self.origin.is_here() => return Err(forked()),
                Err(_) => py.check_signals()?,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Option<T>, Option<ThreadId>)> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread's turn; given back also by a panic.
struct Turn<'a, T> {
    of: &'a Turns<T>,
    value: Option<T>,
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        if let (Some(value), true) = (&mut self.value, self.of.ending.load(Ordering::SeqCst)) {
            let why = self
                .of
                .why
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            (self.of.end)(value, why.as_deref());
        }
        let mut held = self.of.value.lock().unwrap_or_else(PoisonError::into_inner);
        *held = (self.value.take(), None);
        drop(held);
        self.of.free.notify_one();
    }
}

/// Logs queued messages, and returns the exception of a signal handler or of `watch`, if any.
fn looked(watch: Option<&Py<PyAny>>) -> Option<PyErr> {
    let looked = Python::try_attach(|py| {
        py.check_signals()?;
        crate::log::flush(py);
        watch.map_or(Ok(()), |watch| watch.call0(py).map(drop))
    });
    looked?.err()
}
