//! Rules between two forms of a model, and what they would do.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use weightsync_engine::MappedLoader;
use weightsync_engine::mapping::{Quantisation, Rule};
use weightsync_engine::transport::threads::LockExt as _;

use crate::errors::SettingError;
use crate::loader::Object;
use crate::source::{Layout, dtype_of};

/// Rules that make one form of a model into another. Each call returns a mapping
/// with one rule more.
#[pyclass(frozen, eq, module = "weightsync._native")]
#[derive(Clone, PartialEq)]
pub struct Mapping(pub weightsync_engine::Mapping);

#[pymethods]
impl Mapping {
    #[new]
    fn new() -> Self {
        Self(weightsync_engine::Mapping::new())
    }

    /// Reads what `to_json` wrote.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        serde_json::from_str(text).map(Self).map_err(setting)
    }

    /// The rules as text.
    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).map_err(setting)
    }

    fn rename(&self, old: &str, new: &str) -> PyResult<Self> {
        self.and(|rules| rules.rename(old, new))
    }

    /// The dtype as safetensors spells it.
    fn cast(&self, tensors: &str, dtype: &str) -> PyResult<Self> {
        let dtype = dtype_of(tensors, dtype)?;
        self.and(|rules| rules.cast(tensors, dtype))
    }

    fn transpose(&self, tensors: &str, order: Vec<usize>) -> PyResult<Self> {
        self.and(|rules| rules.transpose(tensors, order))
    }

    fn fuse(&self, parts: Vec<String>, into: &str, dim: usize) -> PyResult<Self> {
        self.and(|rules| rules.fuse(parts.iter().map(String::as_str), into, dim))
    }

    fn split(&self, tensor: &str, into: Vec<(String, u64)>, dim: usize) -> PyResult<Self> {
        let parts = into.iter().map(|(name, len)| (name.as_str(), *len));
        self.and(|rules| rules.split(tensor, parts, dim))
    }

    fn drop(&self, tensors: &str) -> PyResult<Self> {
        self.and(|rules| rules.drop(tensors))
    }

    /// `to` is `"fp8"` or `"int8"`; `{}` in `scale` stands for the tensor's name.
    #[pyo3(signature = (tensors, to, block=None, scale=None))]
    fn quantise(
        &self,
        tensors: &str,
        to: &str,
        block: Option<(u64, u64)>,
        scale: Option<&str>,
    ) -> PyResult<Self> {
        let to = match (to, block) {
            ("fp8", None) => Quantisation::Fp8,
            ("fp8", Some((rows, columns))) => Quantisation::Fp8Blocks { rows, columns },
            ("int8", None) => Quantisation::Int8,
            ("int8", Some(_)) => {
                return Err(setting(
                    "int8 has a scale for each row: leave block out, or quantise to \"fp8\"",
                ));
            }
            _ => {
                let expected = "expected \"fp8\" or \"int8\"";
                return Err(setting(format!("cannot quantise to {to:?}: {expected}")));
            }
        };
        self.and(|rules| rules.quantise(tensors, to, scale))
    }

    /// The rules in words, in order.
    #[getter]
    fn rules(&self) -> Vec<String> {
        self.0.rules().iter().map(ToString::to_string).collect()
    }

    /// Whether a rule quantises.
    #[getter]
    fn quantises(&self) -> bool {
        let mut rules = self.0.rules().iter();
        rules.any(|rule| matches!(rule, Rule::Quantise { .. }))
    }

    /// What would happen to each tensor of `source`, and what would be missing or
    /// left over in `target`.
    fn dry_run(&self, source: &Layout, target: &Layout) -> DryRun {
        DryRun(self.0.dry_run(&source.0, &target.0))
    }

    fn __reduce__<'py>(slf: Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        let read = slf.get_type().getattr("from_json")?;
        Ok((read, (slf.get().to_json()?,)))
    }

    fn __repr__(&self) -> String {
        format!("<Mapping: {}>", self.rules().join("; "))
    }
}

impl Mapping {
    fn and(
        &self,
        rule: impl FnOnce(
            weightsync_engine::Mapping,
        )
            -> Result<weightsync_engine::Mapping, weightsync_engine::MappingError>,
    ) -> PyResult<Self> {
        rule(self.0.clone()).map(Self).map_err(setting)
    }
}

fn setting(error: impl ToString) -> PyErr {
    SettingError::new_err(error.to_string())
}

/// What a mapping would do. The lists are complete.
#[pyclass(frozen, eq, module = "weightsync._native")]
#[derive(PartialEq)]
pub struct DryRun(weightsync_engine::DryRun);

#[pymethods]
impl DryRun {
    /// What happens to each tensor of the source, in its order.
    #[getter]
    fn tensors(&self) -> Vec<TensorOutcome> {
        self.0.tensors.iter().cloned().map(TensorOutcome).collect()
    }

    /// What would be made and has no place in the target.
    #[getter]
    fn unmatched(&self) -> Vec<String> {
        self.0.unmatched.clone()
    }

    /// What the target has room for and would not get.
    #[getter]
    fn missing(&self) -> Vec<String> {
        self.0.missing.clone()
    }

    /// `(name, expected, got)` of what would have another shape than the target's.
    #[getter]
    fn shapes(&self) -> Vec<(String, Vec<u64>, Vec<u64>)> {
        let shapes = self.0.shapes.iter().cloned();
        shapes
            .map(|one| (one.name, one.expected, one.got))
            .collect()
    }

    /// `(name, expected, got)` of what would have another dtype than the target's,
    /// as safetensors spells them.
    #[getter]
    fn dtypes(&self) -> Vec<(String, &'static str, &'static str)> {
        let dtypes = self.0.dtypes.iter();
        dtypes
            .map(|one| (one.name.clone(), one.expected.name(), one.got.name()))
            .collect()
    }

    /// Rules that do not fit the tensors they match, in words.
    #[getter]
    fn problems(&self) -> Vec<String> {
        self.0.problems.iter().map(ToString::to_string).collect()
    }

    /// Rules that match no tensor: their numbers, from 1, and words.
    #[getter]
    fn unused(&self) -> Vec<(usize, String)> {
        self.0.unused.clone()
    }

    /// Whether each tensor that is made has its place, and each place its tensor.
    #[getter]
    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let (count, complete) = (self.0.tensors.len(), self.0.is_complete());
        let word = if complete { "complete" } else { "not complete" };
        format!("<DryRun of {count} tensors: {word}>")
    }
}

/// What happens to one tensor of the source.
#[pyclass(frozen, eq, module = "weightsync._native")]
#[derive(Clone, PartialEq)]
pub struct TensorOutcome(weightsync_engine::TensorOutcome);

#[pymethods]
impl TensorOutcome {
    /// The tensor.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// What it would be, or be a part of; nothing if it is dropped.
    #[getter]
    fn becomes(&self) -> Vec<String> {
        self.0.becomes.clone()
    }

    /// The rules that would be applied to it, counted from 1.
    #[getter]
    fn rules(&self) -> Vec<usize> {
        self.0.rules.clone()
    }

    fn __repr__(&self) -> String {
        format!("<TensorOutcome {}>", self.0.to_string().trim_start())
    }
}

/// A worker's model seen through a mapping: what the library loads into.
#[pyclass(frozen, module = "weightsync._native")]
pub struct MappedTarget(Mutex<MappedLoader<'static, Object>>);

#[pymethods]
impl MappedTarget {
    /// `target` has `layout`, `shape` and `load`, and is that of the model `id`.
    #[new]
    fn new(mapping: &Mapping, id: String, target: Py<PyAny>) -> Self {
        let loader = mapping.0.clone().into_loader(Object::new(id, target));
        Self(Mutex::new(loader.binding()))
    }
}

impl MappedTarget {
    /// One load at a time. Never to be asked for with the interpreter's lock, which
    /// the model behind it takes.
    pub fn loader(&self) -> MutexGuard<'_, MappedLoader<'static, Object>> {
        // A load that failed leaves a loader that can load again.
        self.0.locked()
    }
}
