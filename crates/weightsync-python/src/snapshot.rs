//! Snapshots, bound to Python.

use std::sync::Arc;

use pyo3::prelude::*;
use weightsync_engine::{Error, ExtraState, Origin};

use crate::errors::{WrongWeightsError, forked};
use crate::loader::{Object, TargetArgument, set_of, targets_of};
use crate::mapping::Mapping;
use crate::plain;
use crate::raw::{RawAddress, View};
use crate::source::{Layout, wrong_weights};
use crate::tensors::Copies;
use crate::wait::released;

/// One whole version of a model. It does not change while this, or a tensor
/// over it, is held.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Snapshot {
    held: Arc<weightsync_engine::Snapshot>,
    /// A forked child does not have the memory, but for a copy's.
    origin: Origin,
}

impl Snapshot {
    pub fn new(held: Arc<weightsync_engine::Snapshot>) -> Self {
        let origin = Origin::here();
        Self { held, origin }
    }

    /// Makes a call that reads the version's bytes, without the interpreter's lock.
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&weightsync_engine::Snapshot) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let held = self.readable()?;
        released(py, || call(held))
    }

    /// The version, if this process can read its bytes.
    pub fn readable(&self) -> PyResult<&weightsync_engine::Snapshot> {
        // The version lies in this process's own memory, or this is the process that mapped the
        // slot.
        match self.held.is_owned() || self.origin.is_here() {
            true => Ok(&self.held),
            false => Err(forked()),
        }
    }

    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn copy(&self, py: Python<'_>, places: Vec<(usize, RawAddress)>) -> PyResult<()> {
        self.read(py, |held| {
            let views: Vec<_> = held.tensors().collect();
            for (index, address) in places {
                let bytes = views[index].bytes();
                // SAFETY: the Python files hand each address over with the index of a tensor of
                // its dtype and shape, and hold the object until this call from Python returns. A
                // version's bytes are mapped by this process alone, and are no object of Python's.
                if !unsafe { address.store(bytes) } {
                    // Tensors before this one have been overwritten: the model is not whole until
                    // it is loaded again.
                    return Err(Error::Load {
                        name: views[index].name().to_owned(),
                        source: "the tensor it goes to has no memory of its own".into(),
                    });
                }
            }
            Ok(())
        })
    }

    pub fn held(&self) -> &weightsync_engine::Snapshot {
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

    /// As [`layout`](Self::layout), with tied tensors under each of their names.
    #[getter]
    fn whole_layout(&self, py: Python<'_>) -> PyResult<Layout> {
        self.read(py, |held| {
            weightsync_engine::WeightExtractor::layout(held).map(Layout)
        })
    }

    /// The same version as a mapping makes it, in this process's own memory.
    fn mapped(&self, py: Python<'_>, mapping: &Mapping) -> PyResult<Self> {
        let made = self.read(py, |held| held.mapped(&mapping.0))?;
        Ok(Self::new(Arc::new(made)))
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
    /// What is written is dropped with the last view, with a warning unless it is `quiet`.
    #[pyo3(signature = (quiet = false))]
    fn view(&self, py: Python<'_>, quiet: bool) -> PyResult<View> {
        // The mapping is private to this process: writes of a worker reach no other process.
        released(py, || match quiet {
            true => self.held.private_with(|_| ()),
            false => self.held.private(),
        })
        .map(View::new)
    }

    /// Copies tensors, by their index in the layout, to addresses where there is
    /// room for so many bytes.
    fn copy_to(&self, py: Python<'_>, places: Vec<(usize, RawAddress, u64)>) -> PyResult<()> {
        // Addresses come from Python, so each length is checked before a byte is written.
        for (index, _, room) in &places {
            let range = self
                .held
                .layout()
                .tensors()
                .get(*index)
                .map(|one| one.range.len);
            if range != Some(*room) {
                return Err(WrongWeightsError::new_err(format!(
                    "tensor {index} was to be copied to {room} bytes, and has {range:?}"
                )));
            }
        }
        let places = places
            .into_iter()
            .map(|(index, address, _)| (index, address));
        self.copy(py, places.collect())
    }

    /// Loads it into a target: an object with `layout`, `shape` and `load`. What
    /// does not fit is named before the target is touched.
    fn load_into(&self, py: Python<'_>, target: Py<PyAny>) -> PyResult<()> {
        let mut target = Object::new(self.model().to_owned(), target);
        // The target's methods take the lock again for each call.
        self.read(py, |held| held.load_into(&mut target))
    }

    /// Copies tensors to where others lie; False, and nothing is copied, if one of
    /// these is not what it was.
    fn copy_into(&self, py: Python<'_>, copies: &Copies) -> PyResult<bool> {
        let Some(places) = copies.places(py, self.held.layout())? else {
            return Ok(false);
        };
        self.copy(py, places)?;
        Ok(true)
    }

    /// The extra state of a module, by the name it travels under.
    fn extra_state<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        // A copy of the bytes, because decoding makes Python objects and needs the lock.
        let bytes = self.read(py, |held| Ok(held.tensor(name)?.bytes().to_vec()))?;
        let state = ExtraState::from_bytes(&bytes).map_err(wrong_weights)?;
        plain::to_python(py, state.value())
    }

    /// The names of the tensors that are extra state.
    #[getter]
    fn extra_states(&self) -> Vec<String> {
        self.held.attributes().extra_state().to_vec()
    }

    /// The identity of the version's bytes, as this process sees them: one pass.
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        self.read(py, |held| Ok(held.digest().to_string()))
    }

    /// The digest that the sender made, if it has.
    #[getter]
    fn published_digest(&self) -> Option<String> {
        let digest = self.held.published_digest();
        digest.map(|digest| digest.to_string())
    }

    /// Compares the bytes with the sender's checksums; False if it made none.
    fn verify_checksums(&self, py: Python<'_>) -> PyResult<bool> {
        self.read(py, weightsync_engine::Snapshot::verify_checksums)
    }

    /// Writes a safetensors file, whole or not at all; its digest.
    fn save_safetensors(&self, py: Python<'_>, path: std::path::PathBuf) -> PyResult<String> {
        self.read(py, |held| Ok(held.save_safetensors(path)?.to_string()))
    }

    /// Whether it lies in a slot of shared memory, which the sender, or a relay, needs back.
    #[getter]
    fn holds_slot(&self) -> bool {
        self.held().holds_slot()
    }

    /// The same version in this process's own memory: costs the sender nothing.
    fn to_owned_copy(&self, py: Python<'_>) -> PyResult<Self> {
        let copy = self.read(py, |held| Ok(held.to_owned_copy()))?;
        Ok(Self::new(Arc::new(copy)))
    }

    fn __repr__(&self) -> String {
        let (model, version) = (self.held.model(), self.held.version());
        let (tensors, bytes) = (self.held.layout().len(), self.held.layout().payload_bytes());
        format!("<Snapshot {model} {version}: {tensors} tensors, {bytes} bytes>")
    }
}

/// One whole version of each model of a worker, that belong together.
#[pyclass(frozen, module = "weightsync._native")]
pub struct SetSnapshot(pub weightsync_engine::SetSnapshot);

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

    /// Loads all of them: no target is touched unless all fit.
    fn load_into(&self, py: Python<'_>, targets: Vec<(String, TargetArgument)>) -> PyResult<()> {
        let mut targets = targets_of(targets);
        // The set is loaded without the lock. Each model takes it for its own calls.
        released(py, || self.0.load_into(&mut set_of(&mut targets)))
    }

    fn __repr__(&self) -> String {
        let versions = self.0.versions().into_iter();
        let versions: Vec<_> = versions
            .map(|(model, version)| format!("{model} {version}"))
            .collect();
        format!("<SetSnapshot {}>", versions.join(", "))
    }
}
