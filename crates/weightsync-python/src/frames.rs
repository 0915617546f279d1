//! Trajectories of frames, bound to Python: their numbers, and where they are in a batch.

use std::sync::Mutex;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_rl::frames;

use crate::errors::SettingError;

/// Gives the trajectories of a collector's workers one growing count.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Trajectories(Mutex<frames::Trajectories>);

#[pymethods]
impl Trajectories {
    #[new]
    fn new(workers: usize) -> Self {
        Self(Mutex::new(frames::Trajectories::new(workers)))
    }

    /// The number that the next trajectory gets.
    #[getter]
    fn next_id(&self) -> u64 {
        self.with(|held| held.next_id())
    }

    /// Has all trajectories get numbers from this one on, also those that are under way.
    fn go_on_from(&self, next: u64) {
        self.with(|held| held.go_on_from(next));
    }

    /// Takes note that a part has come from a worker, and returns its place.
    fn arrived(&self, worker: usize) -> PyResult<u64> {
        self.of(worker, |held| held.arrived(worker))
    }

    /// Takes note that another has taken a worker's place.
    fn replaced(&self, worker: usize) -> PyResult<()> {
        self.of(worker, |held| held.replaced(worker))
    }

    /// Renames the trajectories of a part, in place: an `int64` array `[P, T]` of any strides.
    fn rename(&self, py: Python<'_>, worker: usize, part: u64, ids: PyBuffer<i64>) -> PyResult<()> {
        // Copied out and back, because the array may have any strides.
        let (mut renamed, steps) = read(py, &ids)?;
        self.of(worker, |held| {
            held.rename(worker, part, &mut renamed, steps)
        })?;
        let renamed: Vec<i64> = renamed.into_iter().map(u64::cast_signed).collect();
        ids.copy_from_slice(py, &renamed)
    }
}

impl Trajectories {
    fn with<T>(&self, act: impl FnOnce(&mut frames::Trajectories) -> T) -> T {
        // Each change is whole once it is made, also after a panic.
        act(&mut self.0.locked())
    }

    fn of<T>(
        &self,
        worker: usize,
        act: impl FnOnce(&mut frames::Trajectories) -> T,
    ) -> PyResult<T> {
        // A wrong number would be a panic below.
        self.with(|held| match held.workers() {
            workers if worker < workers => Ok(act(held)),
            workers => Err(SettingError::new_err(format!(
                "there is no worker {worker}: the collector has {workers}, from 0 on"
            ))),
        })
    }
}

/// Where the trajectories of a batch begin, and how long they are: the frames of an `int64` array
/// whose last dimension is time, in their order.
#[pyfunction]
pub fn runs(py: Python<'_>, ids: PyBuffer<i64>) -> PyResult<(Vec<usize>, Vec<usize>)> {
    let (ids, steps) = read(py, &ids)?;
    let runs = frames::runs(&ids, steps);
    Ok(runs.into_iter().map(|run| (run.start, run.len())).unzip())
}

/// The numbers of an array, and the length of its last dimension.
fn read(py: Python<'_>, ids: &PyBuffer<i64>) -> PyResult<(Vec<u64>, usize)> {
    let Some(steps) = ids.shape().last().copied() else {
        return Err(SettingError::new_err(
            "numbers of trajectories need a dimension for time: got an array without dimensions",
        ));
    };
    // In row-major order, whatever the array's own.
    let ids = ids.to_vec(py)?;
    Ok((ids.into_iter().map(i64::cast_unsigned).collect(), steps))
}
