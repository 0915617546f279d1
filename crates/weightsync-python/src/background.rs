//! Receiving in a thread of its own, and the permits that keep models as they are.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_engine::{BackgroundState, BackgroundStatus, Error, Receiver, SafePoints};

use crate::errors::exception;
use crate::loader::{Target, set_of};
use crate::options::{Seconds, timeout_of};
use crate::report::versions_of;
use crate::session::{DROPPED, run_of};
use crate::wait::{released, released_until};

type Inner = weightsync_engine::Background<Vec<Target>>;

thread_local! {
    /// Calls of this thread that a signal's handler may be in the middle of.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// A receiver that a thread of its own keeps up to date.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Background {
    /// None once it was shut down.
    inner: Mutex<Option<Arc<Inner>>>,
    /// Set by the thread that ends it: then no call waits any longer.
    ending: AtomicBool,
}

#[pymethods]
impl Background {
    /// Takes a permit for this thread. The models do not change until the permit is released. Any
    /// number of threads may have one.
    fn acquire_permit(&self, py: Python<'_>) -> PyResult<Permit> {
        // The forward of a module comes through here, so the usual case has to be quick.
        let Ok(inner) = self.running(py) else {
            // Another thread is ending the receiver. A forward continues without a permit.
            return Ok(Permit(Mutex::new(None)));
        };
        // The usual case takes no lock, and need not release the interpreter's.
        let permit = inner.try_hold();
        // The last reference ends the receiver's thread, which may be waiting for the interpreter's
        // lock.
        release(py, inner);
        let permit = match permit.map_err(|error| exception(py, error))? {
            Some(permit) => permit,
            // A load is in progress. The wait for it has to release the lock, because the load
            // needs it.
            None => self.call(py, |inner| inner.hold())?,
        };
        Ok(Permit(Mutex::new(Some(permit))))
    }

    /// A safe point: the models may change now. Returns their versions if they did.
    fn safe_point(&self, py: Python<'_>) -> PyResult<Option<BTreeMap<String, u64>>> {
        let versions = self.call(py, |inner| inner.safe_point())?;
        Ok(versions.map(|versions| versions_of(&versions)))
    }

    /// Calls a function while this thread alone is with the models. If it returns, nothing is applied
    /// from here on. The timeout, in seconds, is that of the wait for other threads.
    #[pyo3(signature = (function, timeout = None))]
    fn hand_over(
        &self,
        py: Python<'_>,
        function: Py<PyAny>,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let timeout = timeout_of(timeout);
        self.call(py, |inner| {
            inner.hand_over(timeout, || {
                // The library calls this without the lock, and while no other thread has the
                // models.
                Python::attach(|py| function.call0(py).map(drop))
            })
        })?
    }

    /// The state (`following`, `searching`, `closed`, `died` or `failed`), its description, and the
    /// failure of the status.
    fn state(&self, py: Python<'_>) -> PyResult<(&'static str, String, Option<String>)> {
        let status = self.status(py)?;
        Ok((
            word(&status.state),
            status.state.to_string(),
            status.failure,
        ))
    }

    /// The version of each model that this worker runs.
    fn versions(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let status = self.status(py)?;
        Ok(versions_of(&status.versions))
    }

    /// The versions that wait for a safe point; empty if none do.
    fn staged(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let status = self.status(py)?;
        Ok(versions_of(&status.staged))
    }

    /// The run of the versions that this worker runs.
    fn run(&self, py: Python<'_>) -> PyResult<(u64, String)> {
        Ok(run_of(self.status(py)?.run))
    }

    /// Waits, in seconds, until every model named has at least this version, or,
    /// with none named, until something is applied; False if the timeout came
    /// first or nothing will arrive any more. Of another run than the one given, any version does: its
    /// numbers begin again. A safe point.
    #[pyo3(signature = (versions, timeout = None, run = None))]
    fn wait(
        &self,
        py: Python<'_>,
        versions: BTreeMap<String, u64>,
        timeout: Option<Seconds>,
        run: Option<(u64, String)>,
    ) -> PyResult<bool> {
        // One deadline for the whole call.
        let until = timeout_of(timeout).and_then(|timeout| Instant::now().checked_add(timeout));
        self.call(py, |inner| {
            // Taken here, so only a version that is applied from now on ends the wait.
            let before = inner.status()?;
            let left = weightsync_engine::transport::left(until);
            inner.wait(left, |status| match versions.is_empty() {
                true => (&status.versions, &status.run) != (&before.versions, &before.run),
                false if run.as_ref().is_some_and(|run| run_of(status.run) != *run) => true,
                false => {
                    let mut wanted = versions.iter();
                    wanted.all(|(model, version)| {
                        let mut has = status.versions.iter();
                        has.any(|(one, has)| one.as_str() == model && has.0 >= *version)
                    })
                }
            })
        })
    }

    /// Ends the thread and the receiver; any number of times. With a reason the receiver has failed,
    /// and its sender is told the reason.
    #[pyo3(signature = (reason = None))]
    fn shutdown(&self, py: Python<'_>, reason: Option<String>) -> PyResult<()> {
        // Taken out first: calls from here on find no receiver.
        let Some(inner) = self.take() else {
            return Ok(());
        };
        // Ends the waits of the calls that are on, in any thread.
        self.ending.store(true, Ordering::SeqCst);
        // The handler interrupts a wait of this very thread. To wait for that call here would be
        // for ever.
        if INSIDE.get() > 0 {
            // A signal handler made this call during a wait: the thread ends when the wait returns.
            if let Some(reason) = reason {
                inner.fail_at_end(&reason);
            }
            release(py, inner);
            return Ok(());
        }
        // The thread that ends may be loading a version, for which it needs the lock.
        py.detach(|| end(alone(inner), reason.as_deref()));
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.lock().is_none() {
            return Ok("<Background: shut down>".into());
        }
        let status = self.status(py)?;
        let versions = status.versions.iter();
        let versions: Vec<_> = versions
            .map(|(model, one)| format!("{model} {one}"))
            .collect();
        Ok(format!(
            "<Background {}: {}>",
            versions.join(", "),
            status.state
        ))
    }
}

impl Background {
    pub fn start(
        py: Python<'_>,
        receiver: Receiver,
        targets: Vec<Target>,
        declared: bool,
    ) -> PyResult<Self> {
        let when = match declared {
            true => SafePoints::Declared,
            false => SafePoints::Implied,
        };
        // The thread starts without the lock held, because its first load may need it.
        let inner = released(py, || {
            receiver.set_in_background(targets, |targets| set_of(targets), when)
        })?;
        Ok(Self {
            inner: Mutex::new(Some(Arc::new(inner))),
            ending: AtomicBool::new(false),
        })
    }

    fn running(&self, py: Python<'_>) -> PyResult<Arc<Inner>> {
        self.lock().clone().ok_or_else(|| {
            exception(
                py,
                Error::WrongOrder {
                    call: "this",
                    state: "after shutdown",
                    fix: "make a new receiver from the init info",
                },
            )
        })
    }

    /// Keeps the interpreter's lock, because this does not wait. A thread that asks in a loop would
    /// release the lock for less time than the loading thread needs to wake.
    fn status(&self, py: Python<'_>) -> PyResult<BackgroundStatus> {
        let inner = self.running(py)?;
        let status = inner.status();
        release(py, inner);
        status.map_err(|error| exception(py, error))
    }

    /// Makes a call that may wait. Shutdown ends the wait.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Inner) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let inner = self.running(py)?;
        // The count tells a signal's handler in this thread that it is inside.
        let inside = Inside::enter();
        let done = released_until(py, &self.ending, None, || call(&inner));
        drop(inside);
        release(py, inner);
        done
    }

    fn take(&self) -> Option<Arc<Inner>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Inner>>> {
        self.inner.locked()
    }
}

/// A call of this thread that waits. It is counted down by a panic too.
struct Inside;

impl Inside {
    fn enter() -> Self {
        INSIDE.set(INSIDE.get() + 1);
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
    }
}

/// Ending the thread waits for it, and it may be waiting for the interpreter's lock.
impl Drop for Background {
    fn drop(&mut self) {
        let Some(inner) = self.take() else {
            return;
        };
        self.ending.store(true, Ordering::SeqCst);
        // After the end of the interpreter, no thread waits for its lock or for this thread.
        let inner = std::mem::ManuallyDrop::new(inner);
        let _ = Python::try_attach(|py| {
            py.detach(|| {
                if let Some(inner) = Arc::into_inner(std::mem::ManuallyDrop::into_inner(inner)) {
                    end(inner, Some(DROPPED));
                }
            });
        });
    }
}

/// Ends the thread, and leaves in order, or with a reason as failed.
fn end(inner: Inner, reason: Option<&str>) {
    match reason {
        None => drop(inner),
        // In a forked child there is nothing to end.
        Some(reason) => drop(inner.fail(reason)),
    }
}

/// Drops a call's reference. After a shutdown, the last reference ends the thread, which may be
/// waiting for the interpreter's lock: so the lock is released here.
fn release(py: Python<'_>, inner: Arc<Inner>) {
    // Only the last reference gives the value. The others just go.
    if let Some(inner) = Arc::into_inner(inner) {
        py.detach(|| drop(inner));
    }
}

/// Waits for the calls of other threads to return, and takes the receiver out.
fn alone(mut inner: Arc<Inner>) -> Inner {
    loop {
        // The other references belong to calls whose waits have been ended.
        match Arc::try_unwrap(inner) {
            Ok(inner) => return inner,
            Err(shared) => inner = shared,
        }
        // Rare and short: a call of another thread is about to return.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A permit: the models of a background receiver do not change while a thread has one.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Permit(Mutex<Option<weightsync_engine::ModelHold>>);

#[pymethods]
impl Permit {
    /// Lets the models change again.
    fn release(&self, py: Python<'_>) {
        // Released at most once: a second call finds nothing.
        let permit = self.0.locked().take();
        // Dropping the permit wakes the loading thread, which needs the interpreter's lock next.
        py.detach(|| drop(permit));
    }
}

fn word(state: &BackgroundState) -> &'static str {
    match state {
        BackgroundState::Following => "following",
        BackgroundState::Searching => "searching",
        BackgroundState::Closed => "closed",
        BackgroundState::Died { .. } => "died",
        _ => "failed",
    }
}
