//! Calls that may wait, without the interpreter's lock.

use pyo3::prelude::*;
use weightsync::Error;

use crate::errors::exception;

/// Runs a call that may wait or copy, without the interpreter's lock. A signal
/// whose handler raises (Ctrl-C) ends it with that exception.
pub fn released<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let done = py.detach(|| {
        let check = || match Python::try_attach(|py| py.check_signals()) {
            Some(Err(signal)) => {
                raised = Some(signal);
                true
            }
            _ => false,
        };
        weightsync::interruptible(check, call)
    });
    match (done, raised) {
        // What was done is done; the signal is the next thing to know.
        (_, Some(signal)) => Err(signal),
        (Ok(value), None) => Ok(value),
        (Err(error), None) => Err(exception(py, error)),
    }
}
