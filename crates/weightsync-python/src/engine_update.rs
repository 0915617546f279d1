//! The update of one engine, decided step by step.

use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use weightsync_core::engine_update::{self, EngineEvent, EngineWeights};
use weightsync_engine::transport::threads::LockExt as _;

use crate::errors::LifecycleError;
use crate::options::{wants, whole};

/// Which call to make next around a sync. An engine resumes only on weights that are known to
/// be whole.
#[pyclass(frozen, module = "weightsync._native")]
pub struct EngineUpdate(Mutex<engine_update::EngineUpdate>);

#[pymethods]
impl EngineUpdate {
    /// `updates` is the number of update calls: one for each chunk.
    #[new]
    #[pyo3(signature = (updates = Updates(NonZeroU32::MIN)), text_signature = "(updates=1)")]
    fn new(updates: Updates) -> Self {
        Self(Mutex::new(engine_update::EngineUpdate::new(updates.0)))
    }

    /// The sync begins; the first call to make.
    fn begin(&self) -> PyResult<Option<String>> {
        self.step(EngineEvent::Begin)
    }

    /// The engine has done the call; the next one, or None when the update is over.
    fn done(&self) -> PyResult<Option<String>> {
        self.step(EngineEvent::Done)
    }

    /// The call failed, and the engine is known to hold `weights`; the next call, or None
    /// when the update is over.
    fn failed(&self, reason: String, weights: Holds) -> PyResult<Option<String>> {
        let weights = weights.0;
        self.step(EngineEvent::Failed { reason, weights })
    }

    /// The engine is gone, which may be said at any time: there is no call to make.
    fn died(&self, reason: String) -> PyResult<Option<String>> {
        self.step(EngineEvent::Died { reason })
    }

    /// What has happened so far, in a word.
    #[getter]
    fn state(&self) -> String {
        self.update().state().to_string()
    }

    /// How the update ended; None until it is over.
    #[getter]
    fn outcome(&self) -> Option<String> {
        self.update().outcome().map(|outcome| outcome.to_string())
    }

    /// What the engine is known to hold: old, new or unknown.
    #[getter]
    fn weights(&self) -> String {
        self.update().weights().to_string()
    }

    /// Each failure so far, in order; None if there was none.
    #[getter]
    fn reason(&self) -> Option<String> {
        self.update().reason().map(str::to_owned)
    }

    fn __repr__(&self) -> String {
        let update = self.update();
        let (state, weights) = (update.state(), update.weights());
        match update.reason() {
            Some(reason) => format!("<EngineUpdate: {state}, {weights} weights, {reason}>"),
            None => format!("<EngineUpdate: {state}, {weights} weights>"),
        }
    }
}

impl EngineUpdate {
    fn step(&self, event: EngineEvent) -> PyResult<Option<String>> {
        let mut update = self.update();
        // A step either changes everything or fails and changes nothing.
        let stepped = update.step(event);
        let (next, call) = stepped.map_err(|error| LifecycleError::new_err(error.to_string()))?;
        *update = next;
        Ok(call.map(|call| call.to_string()))
    }

    /// Held for a step at most, and never while Python runs.
    fn update(&self) -> MutexGuard<'_, engine_update::EngineUpdate> {
        self.0.locked()
    }
}

/// The number of update calls.
struct Updates(NonZeroU32);

impl<'a, 'py> FromPyObject<'a, 'py> for Updates {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        whole("updates", "a whole number from 1 on", &value).map(Self)
    }
}

/// What the engine is known to hold.
struct Holds(EngineWeights);

impl<'a, 'py> FromPyObject<'a, 'py> for Holds {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let word = value.extract::<String>().unwrap_or_default();
        let all = [
            EngineWeights::Old,
            EngineWeights::New,
            EngineWeights::Unknown,
        ];
        let known = all.into_iter().find(|weights| weights.to_string() == word);
        let possible = "\"old\", \"new\" or \"unknown\"";
        known
            .map(Self)
            .ok_or_else(|| wants("weights", possible, &value))
    }
}
