//! What a worker loads into: an object of Python's.

use std::sync::Arc;

use pyo3::prelude::*;
use weightsync::{Error, Result, SetLoader, TensorView, WeightLoader};

use crate::errors::Raised;
use crate::raw::attached;
use crate::snapshot::Snapshot;
use crate::source::Layout;

/// A worker's model, behind three methods: `layout()`, `shape(layout)` and
/// `load(snapshot)`.
pub struct Target {
    id: String,
    object: Py<PyAny>,
}

impl Target {
    /// Names `object`, by the model it is for.
    pub fn new(id: String, object: Py<PyAny>) -> Self {
        Self { id, object }
    }

    fn call<T>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        let done = attached(|py| call(self.object.bind(py)));
        let failed = |source| Error::Load {
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

impl WeightLoader for Target {
    fn layout(&self) -> Result<weightsync::Layout> {
        self.call(|object| {
            let layout = object.call_method0("layout")?;
            Ok(layout.cast::<Layout>()?.get().0.clone())
        })
    }

    fn shape(&mut self, layout: &weightsync::Layout) -> Result<bool> {
        let layout = layout.clone();
        self.call(|object| {
            let shaped = object.call_method1("shape", (Layout(layout),))?;
            shaped.extract()
        })
    }

    fn bind(&mut self, snapshot: &weightsync::Snapshot) -> Result<bool> {
        let snapshot = Snapshot::new(Arc::new(snapshot.clone()));
        self.call(|object| object.call_method1("load", (snapshot,)).map(|_| true))
    }

    fn load(&mut self, _: &[TensorView<'_>]) -> Result<()> {
        unreachable!("bind takes every snapshot")
    }
}

/// All models of a worker, as one.
pub fn set_of(targets: &mut [Target]) -> SetLoader<'_> {
    let mut set = SetLoader::new();
    for target in targets {
        let id = target.id.clone();
        set = set.with(&id, target);
    }
    set
}
