//! What a worker holds, seen from Python.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use weightsync::{Error, ExtraState, Written};

use crate::loader::Target;
use crate::plain;
use crate::raw::{Address, View};
use crate::source::{Layout, value_error};
use crate::tensors::Copies;
use crate::wait::released;

/// One whole version of a model. It does not change while this, or a tensor
/// over it, is held.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Snapshot {
    held: Arc<weightsync::Snapshot>,
}

impl Snapshot {
    pub fn new(held: Arc<weightsync::Snapshot>) -> Self {
        Self { held }
    }

    pub fn held(&self) -> &weightsync::Snapshot {
        &self.held
    }
}

#[pymethods]
impl Snapshot {
    #[getter]
    fn model(&self) -> &str {
        self.held.model().as_str()
    }

    #[getter]
    fn version(&self) -> u64 {
        self.held.version().0
    }

    /// The run the version is of: its epoch, and its id in hexadecimal digits.
    #[getter]
    fn run(&self) -> (u64, String) {
        crate::session::run_of(self.held.run())
    }

    /// Names, dtypes and shapes of what travelled; a tied tensor is there once.
    #[getter]
    fn layout(&self) -> Layout {
        Layout(self.held.layout().clone())
    }

    /// `state_dict` or `tensordict`: the sender's format.
    #[getter]
    fn format(&self) -> &str {
        self.held.attributes().format().word()
    }

    /// The names that share the memory of another: alias, and which.
    #[getter]
    fn ties(&self) -> Vec<(String, String)> {
        self.held.attributes().ties().to_vec()
    }

    #[getter]
    fn buffers(&self) -> Vec<String> {
        self.held.attributes().buffers().to_vec()
    }

    /// `(name, dtype, shape, offset, bytes)` of every tensor, in order; where
    /// each lies in the [`view`](Self::view).
    fn places(&self) -> Vec<(&str, &str, Vec<u64>, u64, u64)> {
        let specs = self.held.layout().tensors().iter();
        let places = specs.map(|one| {
            let range = one.range;
            let shape = one.shape.clone();
            (
                one.name.as_str(),
                one.dtype.name(),
                shape,
                range.offset,
                range.len,
            )
        });
        places.collect()
    }

    /// The version's bytes as a buffer that can be written: what is written is
    /// this process's alone.
    ///
    /// What is written is dropped with the last view, and is then one of
    /// `take_written`.
    fn view(&self, py: Python<'_>) -> PyResult<View> {
        released(py, || self.held.private_with(note)).map(View::new)
    }

    /// Copies tensors, by their index in the layout, to addresses.
    fn copy_to(&self, py: Python<'_>, places: Vec<(usize, Address)>) -> PyResult<()> {
        let tensors = self.held.layout().len();
        if let Some((index, _)) = places.iter().find(|(index, _)| *index >= tensors) {
            return Err(PyValueError::new_err(format!(
                "tensor {index} was asked for, and there are {tensors}"
            )));
        }
        released(py, || {
            let views: Vec<_> = self.held.tensors().collect();
            for (index, address) in places {
                address.store(views[index].bytes());
            }
            Ok(())
        })
    }

    /// Loads it into a target: an object with `layout`, `shape` and `load`. What
    /// does not fit is named before the target is touched.
    fn load_into(&self, py: Python<'_>, target: Py<PyAny>) -> PyResult<()> {
        let mut target = Target::new(self.model().to_owned(), target);
        released(py, || self.held.load_into(&mut target))
    }

    /// Copies tensors to where others lie; False, and nothing is copied, if one of
    /// these is not what it was.
    fn copy_into(&self, py: Python<'_>, copies: &Copies) -> PyResult<bool> {
        let Some(places) = copies.places(py, self.held.layout())? else {
            return Ok(false);
        };
        self.copy_to(py, places)?;
        Ok(true)
    }

    /// The extra state of a module, by the name it travels under.
    fn extra_state<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let view = self.held.tensor(name);
        let view = view.map_err(|error| crate::errors::exception(py, error))?;
        let state = ExtraState::from_bytes(view.bytes()).map_err(value_error)?;
        plain::to_python(py, state.value())
    }

    /// The names of the tensors that are extra state.
    #[getter]
    fn extra_states(&self) -> Vec<String> {
        self.held.attributes().extra_state().to_vec()
    }

    /// The identity of the version's bytes, as this process sees them: one pass.
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        released(py, || Ok(self.held.digest().to_string()))
    }

    /// The digest that the sender made, if it has.
    #[getter]
    fn published_digest(&self) -> Option<String> {
        let digest = self.held.published_digest();
        digest.map(|digest| digest.to_string())
    }

    /// Compares the bytes with the sender's checksums; False if it made none.
    fn verify_checksums(&self, py: Python<'_>) -> PyResult<bool> {
        released(py, || self.held.verify_checksums())
    }

    /// Writes a safetensors file, whole or not at all; its digest.
    fn save_safetensors(&self, py: Python<'_>, path: std::path::PathBuf) -> PyResult<String> {
        released(py, || Ok(self.held.save_safetensors(path)?.to_string()))
    }

    /// The same version in this process's own memory: costs the sender nothing.
    fn to_owned_copy(&self, py: Python<'_>) -> PyResult<Self> {
        let copy = released(py, || Ok::<_, Error>(self.held.to_owned_copy()))?;
        Ok(Self::new(Arc::new(copy)))
    }

    fn __repr__(&self) -> String {
        let (model, version) = (self.held.model(), self.held.version());
        let (tensors, bytes) = (self.held.layout().len(), self.held.layout().payload_bytes());
        format!("<Snapshot {model} {version}: {tensors} tensors, {bytes} bytes>")
    }
}

/// What was written in place, and not said yet. Whoever finds it must not wait, so
/// it is put here instead of being said.
static WRITTEN: Mutex<Vec<Written>> = Mutex::new(Vec::new());

/// The most that is kept.
const MOST: usize = 64;

fn note(what: Written) {
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    if written.len() < MOST {
        written.push(what);
    }
}

/// Tensors that this process has written in versions that are gone by now: model,
/// version, names. What was written is lost.
#[pyfunction]
pub fn take_written() -> Vec<(String, u64, Vec<String>)> {
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    let written = written.drain(..);
    let written = written.map(|what| (what.model.to_string(), what.version.0, what.tensors));
    written.collect()
}

/// One whole version of each model of a worker, that belong together.
#[pyclass(frozen, module = "weightsync._native")]
pub struct SetSnapshot(pub weightsync::SetSnapshot);

#[pymethods]
impl SetSnapshot {
    /// Grows from one publication to the next.
    #[getter]
    fn sequence(&self) -> u64 {
        self.0.sequence()
    }

    /// Each model's weights, and whether this worker has not had them before.
    fn members(&self) -> Vec<(Snapshot, bool)> {
        let members = self.0.members().iter();
        let members = members.map(|one| {
            let snapshot = Snapshot::new(Arc::new(one.snapshot.clone()));
            (snapshot, one.changed)
        });
        members.collect()
    }

    fn __repr__(&self) -> String {
        let versions = self.0.versions().into_iter();
        let versions: Vec<_> = versions
            .map(|(model, version)| format!("{model} {version}"))
            .collect();
        format!("<SetSnapshot {}>", versions.join(", "))
    }
}
