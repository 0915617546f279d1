//! Errors of the library as exceptions: one class for each category, defined in
//! `weightsync/errors.py`.

use std::time::Duration;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use weightsync_engine::{Error, ErrorKind, files};
use weightsync_serve::synchronizer::SyncError;
use weightsync_store::StoreError;

pyo3::import_exception!(weightsync.errors, LifecycleError);
pyo3::import_exception!(weightsync.errors, ModelError);
pyo3::import_exception!(weightsync.errors, SettingError);
pyo3::import_exception!(weightsync.errors, WrongTypeError);
pyo3::import_exception!(weightsync.errors, WrongWeightsError);

/// The name of the class of a kind of error.
fn class_of(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Other => "WeightsyncError".into(),
        kind => format!("{kind:?}Error"),
    }
}

/// The exception of an error, with `remedy` as its attribute. An exception that
/// a model of the worker's raised is its cause.
pub fn exception(py: Python<'_>, error: Error) -> PyErr {
    let made = make(py, &error);
    let cause = cause_of(py, &error);
    // Ctrl-C in the middle of a load is Ctrl-C.
    if let Some(cause) = &cause
        && !cause.is_instance_of::<PyException>(py)
    {
        return cause.clone_ref(py);
    }
    match made {
        Ok(made) => {
            if cause.is_some() {
                // Python then shows both, the model's own exception first.
                made.set_cause(py, cause);
            }
            made
        }
        Err(broken) => broken,
    }
}

/// A call whose end was shut down meanwhile.
pub fn ended() -> PyErr {
    let text = "this end was shut down, so make a new one";
    LifecycleError::new_err(text)
}

/// A call from within another of the same end, such as by a model that is loaded.
pub fn within_itself() -> PyErr {
    let text = "this thread is already in a call of this end: let that call return first";
    LifecycleError::new_err(text)
}

/// A call whose turn did not come in time, since another thread is in a call of the same end: that
/// call's name, and the thread's number in Python.
pub fn busy(py: Python<'_>, call: &str, by: (&str, u64), timeout: Duration) -> PyErr {
    let module = py.import("weightsync._turns");
    let arguments = (call, by.0, by.1, timeout.as_secs_f64());
    // Made in Python, which knows the threads' names.
    let made = module.and_then(|module| module.call_method1("busy", arguments));
    made.map_or_else(|broken| broken, PyErr::from_value)
}

/// A call of an end that another thread was using when this process was forked.
pub fn forked() -> PyErr {
    let text = "this end belongs to the parent process: open another one in this process";
    LifecycleError::new_err(text)
}

pub fn make(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let kind = match error {
        // Errors of the store and the synchronizer travel as errors of a transport. Their own kind
        // says more.
        Error::Transport { source, .. } => {
            let of_store = source.downcast_ref().map(StoreError::kind);
            of_store.or_else(|| source.downcast_ref().map(SyncError::kind))
        }
        _ => None,
    };
    let class = class(py, &class_of(kind.unwrap_or_else(|| error.kind())))?;
    let remedy = error.remedy().to_string();
    let text = match error {
        // Texts about the order of calls name Rust's functions.
        Error::WrongOrder { .. } => in_python(error.to_string()),
        _ => said(error),
    };
    let made = class.call1((text, remedy))?;
    Ok(PyErr::from_value(made))
}

/// The exception of an error of replay buffers and environments.
pub fn rl_exception(py: Python<'_>, error: weightsync_rl::Error) -> PyErr {
    use weightsync_rl::Error;
    let name = match error {
        Error::NoSuchTask { .. }
        | Error::ReplaySettings { .. }
        | Error::BatchShape { .. }
        | Error::BatchTooLong { .. }
        | Error::ColumnCount { .. }
        | Error::ColumnLen { .. }
        | Error::SliceCount { .. }
        | Error::PriorityCount { .. }
        | Error::Priority { .. }
        | Error::NoPriorities
        | Error::OtherReplayBuffer { .. } => "SettingError",
        Error::NothingToSample { .. }
        | Error::FrameGone { .. }
        | Error::ReplayBufferInUse { .. } => "LifecycleError",
        Error::NoSuchAction { .. } | Error::ReplayBufferDamaged { .. } => "CorruptError",
        Error::MissingTensor { .. } | Error::TensorLen { .. } => "WrongTypeError",
        Error::ReplayBufferFile { .. } => "OperatingSystemError",
        _ => "WeightsyncError",
    };
    // If the class cannot be found, the reason is the exception.
    let made = class(py, name).and_then(|class| class.call1((said(&error),)));
    made.map_or_else(|broken| broken, PyErr::from_value)
}

/// An error in words. A file that is not there may be one of a directory that is not there any more.
fn said(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let is_missing = causes.any(|cause| {
        let cause = cause.downcast_ref::<std::io::Error>();
        cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::NotFound)
    });
    // A directory that was removed while it was in use makes every file in it vanish.
    if let Some(lost) = files::lost_directory()
        && is_missing
        && !text.contains(lost)
    {
        text = format!("{text}; {lost}");
    }
    text
}

/// A session's calls by the names that they have in Python.
fn in_python(text: String) -> String {
    const NAMES: &[(&str, &str)] = &[
        ("connect_sender", "connect"),
        ("connect_receiver_into", "connect"),
        ("connect_receiver", "connect"),
        ("join_receiver", "connect"),
        ("load_joined", "connect"),
        ("init_on_sender", "Sender(…)"),
        ("init_on_receiver", "Receiver(…)"),
    ];
    let names = NAMES.iter();
    names.fold(text, |text, (in_rust, here)| text.replace(in_rust, here))
}

/// A class of `weightsync.errors` by its name.
fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    // Imported once. The classes are looked up by name, so that Python defines them alone.
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module =
        MODULE.get_or_try_init(py, || py.import("weightsync.errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(name)?.cast_into()?)
}

/// An exception on its way through the library: what a model of the worker's,
/// or a source of the trainer's, has raised.
#[derive(Debug)]
pub struct Raised(PyErr);

impl Raised {
    /// To be carried by an error of the library.
    pub fn boxed(error: PyErr) -> Box<dyn std::error::Error + Send + Sync> {
        Box::new(Self(error))
    }
}

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Raised {}

fn cause_of(py: Python<'_>, error: &Error) -> Option<PyErr> {
    // Only these two can come from Python's own code.
    let source = match error {
        Error::Load { source, .. } | Error::Extract { source, .. } => source,
        _ => return None,
    };
    // What reads a tensor passes it on as an error of input.
    let read = source.downcast_ref::<std::io::Error>();
    let raised = match read.and_then(std::io::Error::get_ref) {
        Some(within) => within.downcast_ref::<Raised>(),
        None => source.downcast_ref::<Raised>(),
    };
    raised.map(|raised| raised.0.clone_ref(py))
}
