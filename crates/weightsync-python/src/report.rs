//! Reports of sends, bound to Python.

use std::collections::BTreeMap;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use weightsync_engine::{Error, ModelId, Outcome, Version, WorkerId};

use crate::errors::{ModelError, exception, make};
use crate::options::{Seconds, level_of, timeout_of};
use crate::wait::released;

/// The result of one send: a line per worker.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Report(pub weightsync_engine::Report);

#[pymethods]
impl Report {
    /// The version of each model that was sent; of several versions of one, the
    /// last.
    #[getter]
    fn versions(&self) -> BTreeMap<String, u64> {
        versions_of(&self.0.versions)
    }

    /// The version that was sent; a `ModelError` if there were several models.
    #[getter]
    fn version(&self) -> PyResult<u64> {
        only(&self.versions())
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
        self.0.level.as_str()
    }

    /// One line per worker.
    #[getter]
    fn workers(&self) -> Vec<WorkerReport> {
        let lines = self.0.workers.iter();
        lines.map(|line| self.line(line)).collect()
    }

    /// Whether there is a worker that has loaded it, and every worker that belongs to the
    /// sender, and that the send was for, has.
    #[getter]
    fn all_applied(&self) -> bool {
        self.0.all_applied()
    }

    /// Whether every worker got as far as the send was to wait.
    #[getter]
    fn all_reached(&self) -> bool {
        self.0.all_reached()
    }

    /// The lines of workers that did not, and will not without a remedy.
    #[getter]
    fn failed(&self) -> Vec<WorkerReport> {
        self.0.failed().map(|line| self.line(line)).collect()
    }

    /// One worker's line, or None.
    fn worker(&self, worker: u32) -> Option<WorkerReport> {
        self.0.worker(worker).map(|line| self.line(line))
    }

    /// The report itself, if all have applied it; otherwise a `NotAppliedError`, which has
    /// it as `report`.
    fn ensure_applied(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let py = slf.py();
        // The whole report travels with the exception, so a caller can look at every worker.
        match slf.get().0.clone().ensure_applied() {
            Ok(_) => Ok(slf),
            Err(error) => {
                let raised = make(py, &error)?;
                raised.value(py).setattr("report", slf)?;
                Err(raised)
            }
        }
    }

    /// All of it as plain values: numbers, text, lists and dicts.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("text", self.0.to_string())?;
        dict.set_item("versions", self.versions())?;
        dict.set_item("bytes", self.bytes())?;
        dict.set_item("partial", self.partial())?;
        dict.set_item("changed", self.changed())?;
        dict.set_item("delta_bytes", self.delta_bytes())?;
        dict.set_item("copied", self.copied())?;
        dict.set_item("took", self.took())?;
        dict.set_item("level", self.level())?;
        dict.set_item("all_applied", self.all_applied())?;
        dict.set_item("all_reached", self.all_reached())?;
        let lines = self.workers().into_iter().map(|line| line.to_dict(py));
        dict.set_item("workers", lines.collect::<PyResult<Vec<_>>>()?)?;
        Ok(dict)
    }

    /// Makes one again of what `__reduce__` took apart.
    #[staticmethod]
    fn _of(parts: Parts) -> PyResult<Self> {
        parts.report().map(Self)
    }

    fn __reduce__<'py>(slf: Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Parts,))> {
        // Pickled as plain values: a report can go to another process, and nothing of it is
        // executed.
        let parts = Parts::of(&slf.get().0);
        Ok((slf.get_type().getattr("_of")?, (parts,)))
    }

    fn __eq__(&self, other: &Self) -> bool {
        Parts::of(&self.0) == Parts::of(&other.0)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Report: {}>", self.0)
    }
}

impl Report {
    fn line(&self, line: &weightsync_engine::WorkerReport) -> WorkerReport {
        WorkerReport(line.clone())
    }
}

/// One worker's line.
#[pyclass(frozen, module = "weightsync._native")]
pub struct WorkerReport(weightsync_engine::WorkerReport);

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
    /// "left", "failed", "lost", "late", "held", "full", "asks" or "absent".
    #[getter]
    fn outcome(&self) -> &'static str {
        self.0.outcome.as_str()
    }

    /// The worker's words, if it refused or failed.
    #[getter]
    fn reason(&self) -> Option<String> {
        self.0.outcome.reason().map(str::to_owned)
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

    /// Of a worker that was late for an earlier send and has not moved since: for how
    /// many seconds. The send did not wait for it. None for all others.
    #[getter]
    fn late(&self) -> Option<f64> {
        self.0.late.map(|late| late.as_secs_f64())
    }

    /// All of it as plain values.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("worker", self.worker())?;
        dict.set_item("pid", self.pid())?;
        dict.set_item("outcome", self.outcome())?;
        dict.set_item("reason", self.reason())?;
        dict.set_item("versions", self.versions())?;
        dict.set_item("current", self.current())?;
        dict.set_item("after", self.after())?;
        dict.set_item("late", self.late())?;
        Ok(dict)
    }

    /// Makes one again of what `__reduce__` took apart.
    #[staticmethod]
    fn _of(parts: LineParts) -> PyResult<Self> {
        line_of(parts).map(Self)
    }

    fn __reduce__<'py>(slf: Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (LineParts,))> {
        let parts = line_parts(&slf.get().0);
        Ok((slf.get_type().getattr("_of")?, (parts,)))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn __repr__(&self) -> String {
        let (worker, pid) = (self.0.worker, self.0.pid);
        let outcome = self.0.outcome.as_str();
        match self.0.outcome.reason() {
            Some(reason) => format!("<WorkerReport {worker} (pid {pid}): {outcome}, {reason}>"),
            None => format!("<WorkerReport {worker} (pid {pid}): {outcome}>"),
        }
    }
}

/// A line as it is pickled: worker, process, outcome, reason, versions, whether they are
/// what was sent, and nanoseconds: since the version went live, and for how long it has
/// been late.
type LineParts = (
    u32,
    u32,
    String,
    Option<String>,
    Vec<u64>,
    bool,
    u64,
    Option<u64>,
);

fn line_parts(line: &weightsync_engine::WorkerReport) -> LineParts {
    (
        line.worker.0,
        line.pid,
        line.outcome.as_str().to_owned(),
        line.outcome.reason().map(str::to_owned),
        line.versions.iter().map(|version| version.0).collect(),
        line.current,
        nanos(line.after),
        line.late.map(nanos),
    )
}

fn line_of(parts: LineParts) -> PyResult<weightsync_engine::WorkerReport> {
    let (worker, pid, word, reason, versions, current, after, late) = parts;
    Ok(weightsync_engine::WorkerReport {
        worker: WorkerId(worker),
        pid,
        outcome: outcome_of(&word, reason)?,
        versions: versions.into_iter().map(Version).collect(),
        current,
        after: Duration::from_nanos(after),
        late: late.map(Duration::from_nanos),
    })
}

/// A report as it is pickled.
#[derive(PartialEq, FromPyObject, IntoPyObject)]
#[pyo3(from_item_all)]
struct Parts {
    versions: Vec<(String, u64)>,
    bytes: u64,
    partial: Option<Vec<String>>,
    changes: Option<(u64, u64, u64, u64)>,
    copied: u64,
    took: u64,
    level: String,
    workers: Vec<LineParts>,
}

impl Parts {
    fn of(report: &weightsync_engine::Report) -> Self {
        let versions = report.versions.iter();
        Self {
            versions: versions
                .map(|(model, version)| (model.to_string(), version.0))
                .collect(),
            bytes: report.bytes,
            partial: report.partial.clone(),
            changes: report
                .changes
                .map(|one| (one.elements, one.changed, one.bytes, one.whole)),
            copied: nanos(report.copied),
            took: nanos(report.took),
            level: report.level.as_str().to_owned(),
            workers: report.workers.iter().map(line_parts).collect(),
        }
    }

    fn report(self) -> PyResult<weightsync_engine::Report> {
        let versions = self.versions.into_iter().map(|(model, version)| {
            let model = ModelId::new(&model).map_err(|error| raised(error.into()))?;
            Ok((model, Version(version)))
        });
        let changes = self.changes.map(|(elements, changed, bytes, whole)| {
            weightsync_engine::Changes::new(elements, changed, bytes, whole)
        });
        Ok(weightsync_engine::Report {
            versions: versions.collect::<PyResult<_>>()?,
            bytes: self.bytes,
            partial: self.partial,
            changes,
            copied: Duration::from_nanos(self.copied),
            took: Duration::from_nanos(self.took),
            level: level_of(&self.level)?,
            workers: self
                .workers
                .into_iter()
                .map(line_of)
                .collect::<PyResult<_>>()?,
        })
    }
}

fn raised(error: Error) -> PyErr {
    Python::attach(|py| exception(py, error))
}

fn nanos(time: Duration) -> u64 {
    // Whole nanoseconds come back exactly. Seconds as a float would not.
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A worker as the sender sees it.
#[pyclass(frozen, module = "weightsync._native")]
pub struct WorkerStatus(pub weightsync_engine::WorkerStatus);

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

    /// The newest version it has loaded; a `ModelError` if there are several models.
    #[getter]
    fn version(&self) -> PyResult<u64> {
        match self.0.versions[..] {
            [] => Ok(0),
            [version] => Ok(version.0),
            _ => Err(ModelError::new_err(format!(
                "version is for one model, and worker {} runs {}: use versions",
                self.0.worker,
                self.0.versions.len()
            ))),
        }
    }

    fn __repr__(&self) -> String {
        let versions: Vec<_> = self.0.versions.iter().map(Version::to_string).collect();
        let (worker, pid, versions) = (self.0.worker, self.0.pid, versions.join(", "));
        format!("<WorkerStatus {worker} (pid {pid}): {versions}>")
    }
}

/// A send whose workers may still be on their way.
#[pyclass(frozen, module = "weightsync._native")]
pub struct PendingSend(pub weightsync_engine::PendingSend);

#[pymethods]
impl PendingSend {
    /// Waits, in seconds, until every worker has its line; those that are not
    /// there by then are "late", and can be waited for again.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Report> {
        let timeout = timeout_of(timeout);
        // The wait runs without the lock, so that workers in this process can load meanwhile.
        released(py, || self.0.wait(timeout)).map(Report)
    }

    /// `await`: [`wait`](Self::wait) on a thread of its own.
    fn __await__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let wait = slf.getattr("wait")?;
        // A thread of the loop's executor waits, so the event loop goes on.
        let to_thread = slf.py().import("asyncio")?.getattr("to_thread")?;
        to_thread.call1((wait,))?.call_method0("__await__")
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

    /// The version that is sent; a `ModelError` if there are several models.
    #[getter]
    fn version(&self) -> PyResult<u64> {
        only(&self.versions())
    }

    fn __repr__(&self) -> String {
        let versions: Vec<_> = self
            .versions()
            .values()
            .map(|one| format!("v{one}"))
            .collect();
        format!("<PendingSend {}>", versions.join(", "))
    }
}

pub fn versions_of(versions: &[(ModelId, Version)]) -> BTreeMap<String, u64> {
    let versions = versions.iter();
    let named = versions.map(|(model, version)| (model.to_string(), version.0));
    named.collect()
}

/// The version of a call for one model.
fn only(versions: &BTreeMap<String, u64>) -> PyResult<u64> {
    if versions.len() > 1 {
        let models: Vec<_> = versions.keys().map(String::as_str).collect();
        return Err(ModelError::new_err(format!(
            "version is for one model, and {} were sent: use versions",
            models.join(", ")
        )));
    }
    Ok(versions.values().next().copied().unwrap_or(0))
}

/// The outcome of a word that a report has.
fn outcome_of(word: &str, reason: Option<String>) -> PyResult<Outcome> {
    Outcome::of(word, reason.unwrap_or_default()).ok_or_else(|| {
        raised(Error::BadSetting {
            setting: "an outcome".into(),
            expected: Outcome::words().collect::<Vec<_>>().join(", "),
            got: word.into(),
        })
    })
}
