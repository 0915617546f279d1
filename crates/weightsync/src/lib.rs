//! `weightsync` moves a model's weights from the trainer to every worker that
//! runs it: versioned, verified, never half-written, in time set by what changed
//! and not by how many workers listen.
//!
//! The journey of a weight, and where each step lives:
//!
//! | step | here |
//! |---|---|
//! | extract: read the trainer's tensors, cast and made contiguous in one pass | [`WeightExtractor`], for [`Tensors`], [`SafetensorsFile`] and candle's `VarMap` |
//! | transport and stage: into a free slot of shared memory | [`Sender::send`], [`Sender::loan`] |
//! | swap: one atomic step makes it the live version | inside both |
//! | load: a worker reads it in place, writes in it for itself alone, or loads it into its own model | [`Receiver::receive`], [`Snapshot::private`], [`Receiver::receive_into`], [`WeightLoader`] |
//!
//! Around it: [`SenderSetup`] and [`ReceiverSetup`] prepare without
//! communicating, [`InitInfo`] is what a worker needs to join, `connect` on both
//! is the rendez-vous, and [`worker`] starts, watches and ends worker processes.
//!
//! Calls block, and every wait ends: by its deadline, by the other end's death,
//! or by shutdown. [`interruptible`] has them end when the caller says so, too: an
//! end is of use after that, a receive has lost nothing, and a send that had
//! published has published. A failure of one worker is a line in the [`Report`].
//!
//! ```
//! use std::time::Duration;
//! use weightsync::{Expect, ReceiverSetup, SenderSetup, Tensors, Version};
//!
//! let mut weights = Tensors::new();
//! weights.insert("layer.weight", [2, 2], vec![1.0_f32, 2.0, 3.0, 4.0])?;
//! let setup = SenderSetup::new("policy", &weights)?;
//! let info = setup.init_info();
//!
//! // In truth a process of its own.
//! let worker = std::thread::spawn(move || -> weightsync::Result<f32> {
//!     let mut receiver = ReceiverSetup::new(info, 0).connect(Duration::from_secs(10))?;
//!     loop {
//!         // The newest version: one replaced before it was looked at is passed over.
//!         let weights = receiver.receive(None)?.expect("no timeout was given");
//!         if weights.version() == Version(2) {
//!             return Ok(weights.slice::<f32>("layer.weight")?[3]);
//!         }
//!     }
//! });
//!
//! let mut sender = setup.connect(&weights, Expect::Count(1), Duration::from_secs(10))?;
//! weights.slice_mut::<f32>("layer.weight")?[3] = 5.0;
//! let report = sender.send(&weights)?;
//! assert!(report.all_applied(), "{report}");
//! assert_eq!(worker.join().unwrap()?, 5.0);
//! # Ok::<(), weightsync::Error>(())
//! ```
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
mod init_info;
mod load;
mod load_set;
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
mod scheme;
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

pub use crate::{
    attributes::{Attributes, AttributesError, TiedOnce, find_ties},
    background::{
        Background, BackgroundState, BackgroundStatus, ModelGuard, ModelGuardMut, ModelHold,
        SafePoints, SnapshotsInBackground,
    },
    cascade::{Cascade, CascadeInBackground, CascadeSetup, Forwarded},
    error::{Error, Remedy, Result},
    extract::{Extracted, TensorData, WeightExtractor},
    init_info::InitInfo,
    load::{TensorView, WeightLoader},
    load_set::SetLoader,
    mapping::{DryRun, Fate, MappedExtractor, MappedLoader, Mapping, MappingError},
    models::{Model, ModelTree, Models, ModuleTree},
    options::SendOptions,
    path::{ModelPath, ModelPathError, PathPart},
    pending::PendingSend,
    plain::{ExtraState, Plain, PlainError},
    receiver::{Joined, Receiver, ReceiverSetup},
    report::{Changes, Outcome, Report, WaitFor, WorkerReport, WorkerStatus},
    safetensors_file::SafetensorsFile,
    scheme::{AnyScheme, MultiProcess, Queue, Schemes, SharedMem},
    send_source::{Members, Registered, SendSource, Set},
    sender::{Loan, Sender},
    senders::Senders,
    session::Session,
    set::{Member, SetSnapshot},
    setup::{AsyncSendLimit, DigestPolicy, Expect, SenderSetup},
    snapshot::{PrivateView, Snapshot, Written},
    strategy::{Role, StateDict, Strategy, TensorDict, UnknownStrategy, Weights},
    tensors::{Element, Tensors},
    transport::{Capabilities, NoSync, Pull},
};

pub use weightsync_core::{
    Chunking, Chunks, Digest, Dtype, Epoch, Layout, LayoutId, LayoutMismatch, Manifest, ModelId,
    Run, TensorRef, TensorSpec, Version, WeightChunk, WorkerId, WriterId, chunk,
    extract::ExtractError, layout, manifest, names,
};
pub use weightsync_mem::interrupt::with as interruptible;
pub use weightsync_mem::{Error as MemoryError, Holder, Origin, WaitStyle};

/// The examples run as they are.
#[cfg(doctest)]
#[doc = "```standalone_crate"]
#[doc = include_str!("../examples/quickstart.rs")]
#[doc = "```"]
#[doc = "```standalone_crate"]
#[doc = include_str!("../examples/safetensors_file.rs")]
#[doc = "```"]
#[cfg_attr(feature = "candle", doc = "```standalone_crate")]
#[cfg_attr(feature = "candle", doc = include_str!("../examples/candle_varmap.rs"))]
#[cfg_attr(feature = "candle", doc = "```")]
mod examples {}

/// And so does what the README shows: a trainer and its worker processes.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
