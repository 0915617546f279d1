//! Calls that may wait, without the interpreter's lock.

use pyo3::prelude::*;
use weightsync::Error;

use crate::errors::exception;

/// Runs a call that may wait or copy without the interpreter's lock. A signal
/// whose handler raises, such as Ctrl-C, ends it with that exception.
pub fn released<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    py.detach(call).map_err(|error| exception(py, error))
}
