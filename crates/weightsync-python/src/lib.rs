//! The native half of the Python package `weightsync`: sessions, snapshots and
//! reports of the Rust library, as `weightsync._native`.
//!
//! What is Python's alone (modules, state dicts, TensorDicts, numpy) is in the
//! package's Python files; what they hand over is names, dtypes, shapes and
//! addresses. Every wait and every copy releases the interpreter's lock.
//!
//! Absent here: policy, retries, formats; `unsafe` outside `raw`.
#![deny(unsafe_code)]

mod background;
mod builtin;
mod cascade;
mod collect;
mod command;
mod engine_update;
mod errors;
mod frames;
mod loader;
mod log;
mod mapping;
mod options;
mod plain;
mod raw;
mod replay;
mod report;
mod session;
mod snapshot;
mod source;
mod store;
mod synchronizer;
mod tensors;
mod wait;

use pyo3::prelude::*;
// A program knows the schemes that are linked into it.
use weightsync_net as _;

/// The classes of `weightsync._native`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::background::{Background, Permit};
    #[pymodule_export]
    use crate::builtin::BuiltinEnvs;
    #[pymodule_export]
    use crate::cascade::Cascade;
    #[pymodule_export]
    use crate::collect::{TrainerLink, TrainerPort, WorkerPlace};
    #[pymodule_export]
    use crate::command::command;
    #[pymodule_export]
    use crate::engine_update::EngineUpdate;
    #[pymodule_export]
    use crate::frames::{Trajectories, runs};
    #[pymodule_export]
    use crate::mapping::{DryRun, MappedTarget, Mapping, TensorOutcome};
    #[pymodule_export]
    use crate::options::scheme_settings;
    #[pymodule_export]
    use crate::raw::{View, checksum};
    #[pymodule_export]
    use crate::replay::ReplayBuffer;
    #[pymodule_export]
    use crate::report::{PendingSend, Report, WorkerReport, WorkerStatus};
    #[pymodule_export]
    use crate::session::{InitInfo, Session};
    #[pymodule_export]
    use crate::snapshot::{SetSnapshot, Snapshot};
    #[pymodule_export]
    use crate::source::{Layout, TensorSource};
    #[pymodule_export]
    use crate::store::{Saver, Saving, Store, StoredModel, StoredVersion, Writer};
    #[pymodule_export]
    use crate::synchronizer::{SyncExplorer, SyncTrainer, Synchronizer};
    #[pymodule_export]
    use crate::tensors::{Copies, DictTensors};

    use pyo3::prelude::*;

    /// What is decided once for the whole module.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        // Before anything can log: messages of the first call are not lost.
        crate::log::begin();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
