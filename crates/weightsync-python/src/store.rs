//! Stores, bound to Python.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_engine::{Error, ModelId, Version};
use weightsync_store::{
    Damage, LoadedModel, ModelVersion, SaveOptions, SaveOutcome, Saved, StoreError, Which,
};

use crate::errors::{LifecycleError, SettingError, ended};
use crate::options::{Number, Seconds, timeout_of};
use crate::report::versions_of;
use crate::snapshot::{SetSnapshot, Snapshot};
use crate::source::TensorSource;
use crate::wait::{Turns, released};

/// Versions of models in a directory.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Store(weightsync_store::Store);

/// What was asked for: a model, exactly a version, at least a version, a name.
type Asked = (
    Option<String>,
    Option<Number>,
    Option<Number>,
    Option<String>,
);

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, address: &str) -> PyResult<Self> {
        // Opening may read an object store, so the lock is released.
        released(py, || Ok(Self(weightsync_store::Store::open(address)?)))
    }

    /// Every version, oldest first, and what is damaged: a file, and what is wrong.
    fn versions(&self, py: Python<'_>) -> PyResult<(Vec<StoredVersion>, Vec<Damaged>)> {
        let found = released(py, || Ok(self.0.versions()?))?;
        let versions = found.versions.into_iter();
        let versions = versions.map(|version| StoredVersion::of(py, version));
        let damage = found.damage.into_iter().map(parts);
        Ok((versions.collect::<PyResult<_>>()?, damage.collect()))
    }

    /// Loads a version of one model, and waits for it; None at the deadline.
    fn load_one(
        &self,
        py: Python<'_>,
        asked: Asked,
        model: Option<String>,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<Snapshot>> {
        let (timeout, which, model) = (timeout_of(timeout), which(asked)?, model_of(model)?);
        // The wait ends with a signal's exception like any other.
        let loaded = released(py, || {
            Ok(self.0.wait_one(&which, model.as_ref(), timeout)?)
        })?;
        Ok(loaded.map(one))
    }

    /// The same at once, with the files that were saved with the weights: their names and bytes.
    fn load_with_files(
        &self,
        py: Python<'_>,
        asked: Asked,
        model: Option<String>,
    ) -> PyResult<(Snapshot, Vec<NamedFile>)> {
        let (which, model) = (which(asked)?, model_of(model)?);
        let loaded = released(py, || Ok(self.0.load_with_files(&which, model.as_ref())?))?;
        Ok((one(loaded.0), named(loaded.1)))
    }

    /// Loads a version, and waits for it; None at the deadline.
    fn load(
        &self,
        py: Python<'_>,
        asked: Asked,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<SetSnapshot>> {
        let timeout = timeout_of(timeout);
        let which = which(asked)?;
        let loaded = released(py, || Ok(self.0.wait(&which, timeout)?))?;
        Ok(loaded.map(|loaded| SetSnapshot(loaded.set)))
    }

    /// The files that were saved with the weights of a version: their names and bytes.
    fn files(
        &self,
        py: Python<'_>,
        asked: Asked,
        model: Option<String>,
    ) -> PyResult<Vec<NamedFile>> {
        let (which, model) = (which(asked)?, model_of(model)?);
        let files = released(py, || Ok(self.0.files(&which, model.as_ref())?))?;
        Ok(named(files))
    }

    /// Writes a version out as a checkpoint directory, and returns its number.
    fn pull(
        &self,
        py: Python<'_>,
        asked: Asked,
        model: Option<String>,
        out: PathBuf,
    ) -> PyResult<u64> {
        let (which, model) = (which(asked)?, model_of(model)?);
        let pulled = released(py, || Ok(self.0.pull(&which, model.as_ref(), &out)?))?;
        Ok(pulled.version.0)
    }

    /// Loads the newest version, unless the one that is held is at most `lag` versions behind.
    fn load_unless_within(
        &self,
        py: Python<'_>,
        model: Option<String>,
        held: Number,
        lag: u64,
    ) -> PyResult<Option<Snapshot>> {
        let held = version_of(model, held)?;
        let loaded = released(py, || Ok(self.0.load_unless_within(&held, lag)?))?;
        Ok(loaded.map(one))
    }

    /// The names, and the versions of the models that each stands for.
    fn names(&self, py: Python<'_>) -> PyResult<BTreeMap<String, BTreeMap<String, u64>>> {
        let names = released(py, || Ok(self.0.names()?))?;
        let named = names.into_iter();
        Ok(named
            .map(|(name, versions)| (name, versions_of(&versions)))
            .collect())
    }

    fn set_name(
        &self,
        py: Python<'_>,
        name: &str,
        model: Option<String>,
        version: Number,
    ) -> PyResult<()> {
        let version = version_of(model, version)?;
        released(py, || Ok(self.0.set_name(name, &version)?))
    }

    fn remove_name(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        released(py, || Ok(self.0.remove_name(name)?))
    }

    /// Where it is.
    fn address(&self) -> String {
        self.0.address()
    }

    /// Whether a writer takes these options.
    #[staticmethod]
    fn check(py: Python<'_>, options: Options) -> PyResult<()> {
        let options = options.chosen(py)?;
        released(py, || Ok(options.check()?))
    }

    /// Takes the store over as its writer.
    fn writer(&self, py: Python<'_>, options: Options) -> PyResult<Writer> {
        let options = options.chosen(py)?;
        // From the claim on, an earlier writer of the store is fenced off.
        let writer = released(py, || {
            Ok(weightsync_store::Writer::claim(&self.0, options)?)
        })?;
        Ok(Writer(Turns::new(Some(writer), |writer, _| {
            drop(writer.take())
        })))
    }

    fn __repr__(&self) -> String {
        format!("<{:?}>", self.0)
    }
}

/// How a writer saves: `keep`, bytes in a file, files next to the weights, deltas.
#[derive(FromPyObject)]
pub struct Options {
    #[pyo3(item)]
    keep: String,
    #[pyo3(item)]
    shard_bytes: u64,
    #[pyo3(item)]
    files: Vec<(String, Vec<u8>)>,
    #[pyo3(item)]
    deltas: bool,
}

impl Options {
    fn chosen(self, py: Python<'_>) -> PyResult<SaveOptions> {
        let mut options = SaveOptions::default();
        let keep: Result<_, StoreError> = self.keep.parse();
        options.keep = released(py, || Ok(keep?))?;
        options.shard_bytes = self.shard_bytes;
        options.files = self.files;
        options.deltas = self.deltas;
        Ok(options)
    }
}

/// The process that may save versions.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Writer(Turns<Option<weightsync_store::Writer>>);

#[pymethods]
impl Writer {
    /// Reads the newest version, which the next one is compared with.
    fn read_base(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, "read_base", |writer| Ok(writer.read_base()?))
    }

    /// The newest version of a model that the store has.
    fn version(&self, py: Python<'_>, model: &str) -> PyResult<u64> {
        let id = ModelId::new(model);
        let id = id.map_err(|error| SettingError::new_err(error.to_string()))?;
        self.with(py, "version", |writer| Ok(writer.version(&id).0))
    }

    /// Saves the next version of some models: their names, weights and numbers.
    fn save(
        &self,
        py: Python<'_>,
        models: Vec<(String, PyRef<'_, TensorSource>, Option<Number>)>,
    ) -> PyResult<SavedVersion> {
        let models = models.iter().map(|(name, source, number)| {
            let number = number.as_ref().map(|number| Version(number.0));
            (name.as_str(), &**source, number)
        });
        let models: Vec<_> = models.collect();
        self.with(py, "save", |writer| {
            let models = models.iter().map(|(name, source, number)| {
                let id = ModelId::new(name)?;
                let version = number.unwrap_or_else(|| writer.version(&id).next());
                // A copy of the weights as they are now, with the number that the save gives them.
                weightsync_engine::Snapshot::of(name, *source, writer.run(), version)
            });
            let models = models.collect::<Result<Vec<_>, Error>>()?;
            Ok(saved(&writer.save(&models)?))
        })
    }

    /// Saves a version of another sender, or of another store, as the next one of a model.
    fn save_snapshot(
        &self,
        py: Python<'_>,
        name: &str,
        snapshot: PyRef<'_, Snapshot>,
        number: Option<Number>,
    ) -> PyResult<SavedVersion> {
        let held = snapshot.readable()?;
        self.with(py, "save", |writer| {
            let version = match number {
                Some(number) => Version(number.0),
                None => writer.version(&ModelId::new(name)?).next(),
            };
            let copy = weightsync_engine::Snapshot::of(name, held, writer.run(), version)?;
            Ok(saved(&writer.save(&[copy])?))
        })
    }

    /// A thread that saves with this writer, which is of no other use then.
    fn saver(&self, py: Python<'_>) -> PyResult<Saver> {
        // The writer moves to the saver's thread. Later calls on this object find none.
        let saver = self.0.with(py, "connect", |writer| match writer.take() {
            Some(writer) => Ok(Some(weightsync_store::Saver::start(writer)?)),
            None => Ok(None),
        })?;
        let saver = saver.ok_or_else(ended)?;
        Ok(Saver(Mutex::new(Some(Arc::new(saver)))))
    }

    /// Ends the writer.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.0.end(py, None)
    }
}

impl Writer {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        call: impl FnOnce(&mut weightsync_store::Writer) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let done = self
            .0
            .with(py, name, |writer| writer.as_mut().map(call).transpose())?;
        done.ok_or_else(ended)
    }
}

/// Saves versions while training goes on.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Saver(Mutex<Option<Arc<weightsync_store::Saver>>>);

#[pymethods]
impl Saver {
    /// Saves versions of some models after the one that is being saved.
    fn save(&self, models: Vec<PyRef<'_, Snapshot>>) -> PyResult<Saving> {
        // A reference of its own: `close` in another thread takes the saver while this call uses
        // it.
        let saver = self.0.locked().clone();
        let saver = saver.ok_or_else(|| LifecycleError::new_err("this saver was closed"))?;
        let models = models.iter().map(|one| one.held().clone());
        Ok(Saving(saver.save(models.collect())))
    }

    /// Saves what waits, and ends the thread; or, without the wait, leaves that to the thread.
    fn close(&self, py: Python<'_>, waits: bool) {
        let saver = self.0.locked().take();
        // Ending the thread waits for saves, which take as long as the store does.
        py.detach(|| match saver {
            Some(saver) if !waits => {
                // Another thread that saves at this moment ends it.
                if let Some(saver) = Arc::into_inner(saver) {
                    saver.abandon();
                }
            }
            saver => drop(saver),
        });
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        let saver = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(saver) = saver.take() {
            // It saves what waits, which takes long: other threads of Python go on meanwhile.
            // After the interpreter's end the closure is dropped unused, and the saver with it.
            Python::try_attach(|py| py.detach(|| drop(saver)));
        }
    }
}

/// The save of one version.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Saving(weightsync_store::Saving);

#[pymethods]
impl Saving {
    /// Waits for the end: `durable`, `failed` or `superseded`, and what was saved or why not; None at the
    /// deadline.
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<Ended>> {
        let timeout = timeout_of(timeout);
        // Only the wait ends at the timeout. The save goes on.
        let outcome = released(py, || Ok(self.0.wait(timeout)?))?;
        Ok(outcome.map(|outcome| match outcome {
            SaveOutcome::Durable(version) => ("durable", Some(saved(&version)), None),
            SaveOutcome::Failed(error) => ("failed", None, Some(error.to_string())),
            _ => ("superseded", None, None),
        }))
    }
}

/// A file next to the weights: its name and bytes.
type NamedFile = (String, Cow<'static, [u8]>);

fn named(files: Vec<(String, Vec<u8>)>) -> Vec<NamedFile> {
    let files = files.into_iter();
    files.map(|(name, bytes)| (name, bytes.into())).collect()
}

fn one(loaded: LoadedModel) -> Snapshot {
    Snapshot::new(Arc::new(loaded.snapshot))
}

/// A damaged file, and what is wrong with it.
type Damaged = (String, String);

/// How a save ended, what was saved, and why it failed.
type Ended = (&'static str, Option<SavedVersion>, Option<String>);

/// A saved version: its number in the store, bytes written, bytes of the weights, the models'
/// versions, and which share of the elements changed.
type SavedVersion = (u64, u64, u64, BTreeMap<String, u64>, Option<f64>);

fn saved(saved: &Saved) -> SavedVersion {
    let versions = versions_of(&saved.versions);
    (
        saved.sequence,
        saved.stored_bytes,
        saved.bytes,
        versions,
        saved.changes,
    )
}

/// A version of a store.
#[pyclass(frozen, get_all, module = "weightsync")]
pub struct StoredVersion {
    sequence: u64,
    run: (u64, String),
    writer: String,
    saved_at: f64,
    names: Vec<String>,
    models: Vec<Py<StoredModel>>,
}

impl StoredVersion {
    fn of(py: Python<'_>, version: weightsync_store::StoredVersion) -> PyResult<Self> {
        let models = version.models.into_iter().map(|one| {
            let model = StoredModel {
                model: one.model.to_string(),
                version: one.version.0,
                digest: one.digest.to_string(),
                changed: one.changed,
                changes: one.changes,
                stored_bytes: one.stored_bytes,
                deltas: one.deltas,
                directory: one.directory,
            };
            Py::new(py, model)
        });
        Ok(Self {
            sequence: version.sequence,
            run: crate::session::run_of(version.run),
            writer: version.writer,
            saved_at: version.at.as_secs_f64(),
            names: version.names,
            models: models.collect::<PyResult<_>>()?,
        })
    }
}

#[pymethods]
impl StoredVersion {
    /// The version of the only model.
    #[getter]
    fn version(&self) -> PyResult<u64> {
        match &self.models[..] {
            [one] => Ok(one.get().version),
            _ => Err(crate::errors::ModelError::new_err(
                "this version has several models: use models",
            )),
        }
    }

    fn __repr__(&self) -> String {
        let models = self.models.iter().map(|one| one.get());
        let models = models.map(|one| format!("{} v{}", one.model, one.version));
        let models: Vec<_> = models.collect();
        format!("<StoredVersion {}: {}>", self.sequence, models.join(", "))
    }
}

/// One model of a version of a store.
#[pyclass(frozen, get_all, module = "weightsync")]
pub struct StoredModel {
    model: String,
    version: u64,
    digest: String,
    changed: bool,
    changes: Option<f64>,
    stored_bytes: u64,
    deltas: usize,
    directory: String,
}

fn parts(damage: Damage) -> Damaged {
    (damage.file, damage.what)
}

fn version_of(model: Option<String>, version: Number) -> PyResult<ModelVersion> {
    let (model, version) = (model_of(model)?, Version(version.0));
    Ok(ModelVersion { model, version })
}

fn model_of(model: Option<String>) -> PyResult<Option<ModelId>> {
    let model = model.map(ModelId::new).transpose();
    model.map_err(|error| SettingError::new_err(error.to_string()))
}

fn which((model, exactly, at_least, name): Asked) -> PyResult<Which> {
    Ok(match (exactly, at_least, name) {
        (None, None, None) => Which::Newest,
        (Some(version), None, None) => Which::Exactly(version_of(model, version)?),
        (None, Some(version), None) => Which::AtLeast(version_of(model, version)?),
        (None, None, Some(name)) => Which::Named(name),
        _ => {
            return Err(SettingError::new_err(
                "a load is of one version: give version, at_least or named, or none of them",
            ));
        }
    })
}
