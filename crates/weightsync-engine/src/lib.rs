//! The engine behind the crate `weightsync`: senders, receivers, schemes and worker processes.
//!
//! Programs depend on `weightsync`, which brings the parts of this crate that are for them. This
//! crate also has what the schemes of this workspace are written with.
//!
//! Absent here: async runtimes, `unsafe` code, terminal output, anything of
//! reinforcement learning.
#![forbid(unsafe_code)]

mod attributes;
mod background;
#[cfg(feature = "candle")]
mod candle;
mod cascade;
mod digest;
mod error;
mod extract;
#[doc(hidden)] // For the other crates of the workspace.
pub mod files;
mod init_info;
mod load;
mod load_set;
#[doc(hidden)] // For the schemes of this workspace.
pub mod log_limiter;
pub mod mapping;
mod models;
mod options;
mod path;
mod pending;
pub mod plain;
mod publish;
mod receiver;
mod report;
mod run_dir;
mod safetensors_file;
#[doc(hidden)] // For the store.
pub mod safetensors_format;
mod scheme;
mod send_history;
mod send_source;
mod sender;
mod senders;
mod session;
mod set;
mod setup;
mod shared;
mod snapshot;
mod strategy;
mod tensors;
pub mod transport;
pub mod worker;

pub use crate::run_dir::status_of_run_dir;
pub use crate::{
    attributes::{Attributes, AttributesError, TiedOnce, find_ties},
    background::{
        Background, BackgroundState, BackgroundStatus, ModelGuard, ModelGuardMut, ModelHold,
        SafePoints, SnapshotsInBackground,
    },
    cascade::{Cascade, CascadeInBackground, CascadeSetup, Forwarded},
    error::{Error, ErrorKind, MemoryError, Result},
    extract::{Extracted, TensorData, WeightExtractor},
    init_info::InitInfo,
    load::{TensorView, WeightLoader},
    load_set::SetLoader,
    mapping::{DryRun, MappedExtractor, MappedLoader, Mapping, MappingError, TensorOutcome},
    models::{Model, ModelTree, Models, ModuleTree},
    options::SendOptions,
    path::{ModelPath, ModelPathError, PathPart},
    pending::PendingSend,
    plain::{ExtraState, Plain, PlainError},
    receiver::{Joined, Pull, Receiver, ReceiverSetup, Receiving},
    report::{Changes, Report},
    safetensors_file::SafetensorsFile,
    scheme::{AnyScheme, MultiProcess, Queue, SharedMem, settings},
    send_source::{Members, Registered, SendSource, Set},
    sender::{Loan, Sender},
    senders::Senders,
    session::Session,
    set::{Member, SetSnapshot},
    setup::{AsyncSendLimit, DigestPolicy, Expect, SenderSetup},
    snapshot::{PrivateView, Snapshot, Written},
    strategy::{Role, StateDict, Strategy, TensorDict, UnknownStrategy, Weights},
    tensors::{Element, Tensors},
    transport::{Capabilities, NoSync},
};

pub use weightsync_core::{
    Chunking, Chunks, Digest, Dtype, Epoch, LastOutcome, LastSend, Layout, LayoutId,
    LayoutMismatch, Manifest, ModelId, ModelStatus, Outcome, OutcomeKind, RelayStatus, Remedy, Run,
    SenderStatus, TensorRef, TensorSpec, Version, WaitFor, WeightChunk, WorkerId, WorkerReport,
    WorkerRoute, WorkerStatus, WriterId, chunk, extract::ExtractError, layout, manifest, names,
};
#[doc(hidden)] // For schemes on shared memory.
pub use weightsync_mem::interrupt::with as interruptible;
pub use weightsync_mem::{Holder, Origin, WaitStyle};
