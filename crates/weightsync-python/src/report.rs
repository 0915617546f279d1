//! What became of a send, seen from Python.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use weightsync::{ModelId, Outcome, Version, WaitFor};

use crate::options::timeout_of;
use crate::wait::released;

/// The result of one send: a line per worker.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Report(pub weightsync::Report);

#[pymethods]
impl Report {
    /// The version of each model that was sent; of several versions of one, the
    /// last.
    #[getter]
    fn versions(&self) -> BTreeMap<String, u64> {
        versions_of(&self.0.versions)
    }

    /// The version that was sent; of the first model, if there were several.
    #[getter]
    fn version(&self) -> u64 {
        self.0.versions.first().map_or(0, |(_, version)| version.0)
    }

    /// Bytes of the tensors that were sent.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The tensors that a partial update carried; None for a whole one.
    #[getter]
    fn partial(&self) -> Option<Vec<String>> {
        self.0.partial.clone()
    }

    /// The share of the elements that changed since the versions before, from 0 to 1; None
    /// where no changes were sent.
    #[getter]
    fn changed(&self) -> Option<f64> {
        self.0.changes.map(|changes| changes.share())
    }

    /// Bytes that say what changed, to each host that has the versions before; None where
    /// no changes were sent.
    #[getter]
    fn delta_bytes(&self) -> Option<u64> {
        self.0.changes.map(|changes| changes.bytes)
    }

    /// Seconds until the version was live.
    #[getter]
    fn copied(&self) -> f64 {
        self.0.copied.as_secs_f64()
    }

    /// Seconds until the last line was settled.
    #[getter]
    fn took(&self) -> f64 {
        self.0.took.as_secs_f64()
    }

    /// How far the send waited: "sent", "staged" or "applied".
    #[getter]
    fn level(&self) -> &'static str {
        level_word(self.0.level)
    }

    /// One line per worker.
    #[getter]
    fn workers(&self) -> Vec<WorkerReport> {
        let lines = self.0.workers.iter();
        lines.map(|line| self.line(line)).collect()
    }

    /// Whether every worker has loaded it.
    #[getter]
    fn all_applied(&self) -> bool {
        self.0.all_applied()
    }

    /// Whether every worker got as far as the send was to wait.
    #[getter]
    fn all_reached(&self) -> bool {
        self.0.all_reached()
    }

    /// The lines of those that did not, and will not by themselves.
    #[getter]
    fn failed(&self) -> Vec<WorkerReport> {
        self.0.failed().map(|line| self.line(line)).collect()
    }

    /// One worker's line, or None.
    fn worker(&self, worker: u32) -> Option<WorkerReport> {
        self.0.worker(worker).map(|line| self.line(line))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Report: {}>", self.0)
    }
}

impl Report {
    fn line(&self, line: &weightsync::WorkerReport) -> WorkerReport {
        WorkerReport(line.clone())
    }
}

/// One worker's line.
#[pyclass(frozen, module = "weightsync._native")]
pub struct WorkerReport(weightsync::WorkerReport);

#[pymethods]
impl WorkerReport {
    #[getter]
    fn worker(&self) -> u32 {
        self.0.worker.0
    }

    /// Its process; 0 if it is not known.
    #[getter]
    fn pid(&self) -> u32 {
        self.0.pid
    }

    /// What became of the version there: "applied", "staged", "refused", "died",
    /// "left", "lost", "late", "held", "full", "asks" or "absent".
    #[getter]
    fn outcome(&self) -> &'static str {
        outcome_word(&self.0.outcome)
    }

    /// The worker's words, if it refused.
    #[getter]
    fn reason(&self) -> Option<String> {
        match &self.0.outcome {
            Outcome::Refused { reason } => Some(reason.clone()),
            _ => None,
        }
    }

    /// The version it has loaded of each model that was sent; 0 before the first.
    #[getter]
    fn versions(&self) -> Vec<u64> {
        self.0.versions.iter().map(|version| version.0).collect()
    }

    /// Whether that is what was sent, or newer.
    #[getter]
    fn current(&self) -> bool {
        self.0.current
    }

    /// Seconds after the version went live.
    #[getter]
    fn after(&self) -> f64 {
        self.0.after.as_secs_f64()
    }

    fn __repr__(&self) -> String {
        let (worker, pid) = (self.0.worker, self.0.pid);
        let outcome = outcome_word(&self.0.outcome);
        match &self.0.outcome {
            Outcome::Refused { reason } => {
                format!("<WorkerReport {worker} (pid {pid}): refused, {reason}>")
            }
            _ => format!("<WorkerReport {worker} (pid {pid}): {outcome}>"),
        }
    }
}

/// A worker as the sender sees it.
#[pyclass(frozen, module = "weightsync._native")]
pub struct WorkerStatus(pub weightsync::WorkerStatus);

#[pymethods]
impl WorkerStatus {
    #[getter]
    fn worker(&self) -> u32 {
        self.0.worker.0
    }

    #[getter]
    fn pid(&self) -> u32 {
        self.0.pid
    }

    /// Where it runs its models.
    #[getter]
    fn device(&self) -> &str {
        &self.0.device
    }

    /// Whether it is held at the versions it has.
    #[getter]
    fn held(&self) -> bool {
        self.0.held
    }

    /// The newest version it has loaded of each model; 0 before the first.
    #[getter]
    fn versions(&self) -> Vec<u64> {
        self.0.versions.iter().map(|version| version.0).collect()
    }

    /// The version of the first model.
    #[getter]
    fn version(&self) -> u64 {
        self.0.version().0
    }

    fn __repr__(&self) -> String {
        let (worker, pid, version) = (self.0.worker, self.0.pid, self.0.version());
        format!("<WorkerStatus {worker} (pid {pid}): {version}>")
    }
}

/// A send whose workers may still be on their way.
#[pyclass(frozen, module = "weightsync._native")]
pub struct PendingSend(pub weightsync::PendingSend);

#[pymethods]
impl PendingSend {
    /// Waits, in seconds, until every worker has its line; those that are not
    /// there by then are "late", and can be waited for again.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Report> {
        let timeout = timeout_of(timeout)?;
        released(py, || self.0.wait(timeout)).map(Report)
    }

    /// Whether there is nothing left to wait for.
    #[getter]
    fn is_settled(&self, py: Python<'_>) -> PyResult<bool> {
        released(py, || self.0.is_settled())
    }

    #[getter]
    fn versions(&self) -> BTreeMap<String, u64> {
        versions_of(self.0.versions())
    }

    #[getter]
    fn version(&self) -> u64 {
        self.0.version().0
    }

    fn __repr__(&self) -> String {
        format!("<PendingSend {}>", self.0.version())
    }
}

pub fn versions_of(versions: &[(ModelId, Version)]) -> BTreeMap<String, u64> {
    let versions = versions.iter();
    let named = versions.map(|(model, version)| (model.to_string(), version.0));
    named.collect()
}

fn level_word(level: WaitFor) -> &'static str {
    match level {
        WaitFor::Sent => "sent",
        WaitFor::Staged => "staged",
        _ => "applied",
    }
}

fn outcome_word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Applied => "applied",
        Outcome::Staged => "staged",
        Outcome::Refused { .. } => "refused",
        Outcome::Died => "died",
        Outcome::Left => "left",
        Outcome::Lost => "lost",
        Outcome::Late => "late",
        Outcome::Held => "held",
        Outcome::Full => "full",
        Outcome::Asks => "asks",
        Outcome::Absent => "absent",
        _ => "unknown",
    }
}
