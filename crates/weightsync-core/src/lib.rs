//! The pure part of weightsync: the layout of a model's weights, versions, and their identity.
//!
//! Everything here is a value, or a decision about values. This crate has no input and output,
//! no clock, no thread and no unsafe code. Input from outside becomes a checked type once, or a
//! typed [`Error`].
//!
//! | to | see |
//! |---|---|
//! | describe a model's tensors and the place of their bytes | [`layout`], [`dtype`] |
//! | name models, workers, versions and runs | [`ids`], [`version`] |
//! | convert between dotted and nested names | [`names`] |
//! | decide which tensors travel together | [`chunk`] |
//! | read a trainer's tensors: cast, contiguous, in one pass | [`extract`] |
//! | quantise: eight-bit values and their scales | [`quantise`] |
//! | encode the changes between two versions, and apply them to the older one | [`delta`] |
//! | identify a version's bytes | [`digest`] |
//! | describe a version and who writes it | [`manifest`] |
//! | mark a version in shared memory as whole | [`record`] |
//! | decide each step of an engine's update | [`engine_update`] |
//! | decide when a trainer and its explorers synchronise | [`synchronizer`] |
//! | say what became of a version at a worker | [`worker`] |
#![forbid(unsafe_code)]

pub mod chunk;
pub mod delta;
pub mod digest;
pub mod dtype;
pub mod engine_update;
pub mod error;
pub mod extract;
mod hex;
pub mod ids;
mod index;
pub mod layout;
pub mod manifest;
pub mod names;
pub mod quantise;
pub mod record;
pub mod status;
pub mod synchronizer;
pub mod version;
pub mod worker;

pub use chunk::{Chunking, Chunks, Placement, WeightChunk};
pub use digest::{Digest, DigestError, Digester};
pub use dtype::Dtype;
pub use error::{Error, Remedy, Result};
pub use extract::{ExtractError, TensorRef};
pub use ids::{ModelId, WorkerId, WriterId};
pub use layout::{ByteRange, Layout, LayoutId, LayoutMismatch, TensorSpec};
pub use manifest::{Manifest, Part};
pub use names::{Node, Tree};
pub use record::{CommitRecord, RECORD_WORDS, RecordFault};
pub use status::{LastSend, ModelStatus, Omitted, RelayStatus, SenderStatus};
pub use version::{Epoch, Run, Version};
pub use worker::{
    Attendance, GoneWorker, LastOutcome, Level, Outcome, OutcomeKind, Targets, WaitFor,
    WorkerReport, WorkerRoute, WorkerStatus,
};
