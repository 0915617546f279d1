//! Python objects that a worker loads versions into.

use std::sync::Arc;

use pyo3::prelude::*;
use weightsync_engine::{Error, Result, SetLoader, TensorView, WeightLoader};

use crate::errors::Raised;
use crate::mapping::MappedTarget;
use crate::raw::attached;
use crate::snapshot::Snapshot;
use crate::source::Layout;

/// A worker's model, behind three methods: `layout()`, `shape(layout)` and
/// `load(snapshot)`.
pub struct Object {
    id: String,
    object: Py<PyAny>,
}

/// The argument for a model to load into: a Python object, or one behind a mapping.
#[derive(FromPyObject)]
pub enum TargetArgument {
    Mapped(Py<MappedTarget>),
    Object(Py<PyAny>),
}

/// A model to load into, with its id.
pub enum Target {
    Object(Object),
    Mapped { id: String, of: Py<MappedTarget> },
}

impl Object {
    /// Names `object`, by the model it is for.
    pub fn new(id: String, object: Py<PyAny>) -> Self {
        Self { id, object }
    }

    fn call<T>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        // A thread of the library may load, which Python does not know. It keeps its thread state
        // from call to call.
        let done = attached(|py| call(self.object.bind(py)));
        let failed = |source| Error::Load {
            // A Python model loads as a whole, so the error cannot name a tensor. The exception
            // says more.
            name: format!("every tensor of {}", self.id),
            source,
        };
        match done {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => Err(failed(Raised::boxed(error))),
            None => Err(failed("the interpreter has ended".into())),
        }
    }
}

impl WeightLoader for Object {
    fn layout(&self) -> Result<weightsync_engine::Layout> {
        self.call(|object| {
            let layout = object.call_method0("layout")?;
            // The layout is the module's own class, so its value is taken without conversion.
            Ok(layout.cast::<Layout>()?.get().0.clone())
        })
    }

    fn shape(&mut self, layout: &weightsync_engine::Layout) -> Result<bool> {
        // The object may keep the layout, so it gets its own.
        let layout = layout.clone();
        self.call(|object| {
            let shaped = object.call_method1("shape", (Layout(layout),))?;
            shaped.extract()
        })
    }

    fn bind(&mut self, snapshot: &weightsync_engine::Snapshot) -> Result<bool> {
        // The object keeps a reference for as long as its tensors lie in the version.
        let snapshot = Snapshot::new(Arc::new(snapshot.clone()));
        self.call(|object| object.call_method1("load", (snapshot,)).map(|_| true))
    }

    fn load(&mut self, _: &[TensorView<'_>]) -> Result<()> {
        unreachable!("bind takes every snapshot")
    }
}

impl Target {
    pub fn new(id: String, given: TargetArgument) -> Self {
        match given {
            TargetArgument::Mapped(of) => Self::Mapped { id, of },
            TargetArgument::Object(object) => Self::Object(Object::new(id, object)),
        }
    }

    fn id(&self) -> &str {
        match self {
            Self::Object(object) => &object.id,
            Self::Mapped { id, .. } => id,
        }
    }

    fn with<T>(&mut self, call: impl FnOnce(&mut dyn WeightLoader) -> Result<T>) -> Result<T> {
        match self {
            Self::Object(object) => call(object),
            // Locked without the interpreter's lock: see `loader`.
            Self::Mapped { of, .. } => call(&mut *of.get().loader()),
        }
    }
}

impl WeightLoader for Target {
    fn layout(&self) -> Result<weightsync_engine::Layout> {
        match self {
            Self::Object(object) => object.layout(),
            Self::Mapped { of, .. } => of.get().loader().layout(),
        }
    }

    fn shape(&mut self, layout: &weightsync_engine::Layout) -> Result<bool> {
        self.with(|model| model.shape(layout))
    }

    fn bind(&mut self, snapshot: &weightsync_engine::Snapshot) -> Result<bool> {
        self.with(|model| model.bind(snapshot))
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        self.with(|model| model.load(tensors))
    }
}

/// All models of a worker, as one.
pub fn set_of(targets: &mut [Target]) -> SetLoader<'_> {
    let mut set = SetLoader::new();
    for target in targets {
        let id = target.id().to_owned();
        // A set, so that all models are checked before the first one changes.
        set = set.with(&id, target);
    }
    set
}

pub fn targets_of(targets: Vec<(String, TargetArgument)>) -> Vec<Target> {
    let targets = targets.into_iter();
    targets.map(|(id, given)| Target::new(id, given)).collect()
}
