//! `weightsync` moves a model's weights from the trainer to every worker that
//! runs it: versioned, verified, never half-written, in time set by what changed
//! and not by how many workers listen.
//!
//! The journey of a weight, and where each step lives:
//!
//! | step | here |
//! |---|---|
//! | extract: read the trainer's tensors, cast and made contiguous in one pass | [`WeightExtractor`](model::WeightExtractor), for [`Tensors`], [`SafetensorsFile`] and candle's `VarMap` |
//! | transport and stage: into a free slot of shared memory | [`Sender::send`], [`Sender::loan`] |
//! | swap: one atomic step makes it the live version | inside both |
//! | load: a worker reads it in place, writes in it for itself alone, or loads it into its own model | [`Receiver::recv`], [`Snapshot::private`], [`Receiver::loading`], [`WeightLoader`](model::WeightLoader) |
//!
//! Around it: [`SenderSetup`] and [`ReceiverSetup`] prepare without
//! communicating, [`InitInfo`] is what a worker needs to join, `connect` on both
//! is the rendez-vous, and [`worker`] starts, watches and ends worker processes.
//!
//! Calls block, and every wait ends: by its deadline, by the other end's death,
//! or by shutdown. [`interruptible`] also lets the caller cancel a wait. The end stays usable, a
//! receive loses no version, and a send may have published. A failure of one worker is a line in
//! the [`Report`].
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
//! // A real worker is a process of its own.
//! let worker = std::thread::spawn(move || -> weightsync::Result<f32> {
//!     let mut receiver = ReceiverSetup::new(info, 0).connect(Some(Duration::from_secs(10)))?;
//!     loop {
//!         // The newest version. Versions replaced before this call are skipped.
//!         let weights = receiver.recv()?;
//!         if weights.version() == Version(2) {
//!             return Ok(weights.slice::<f32>("layer.weight")?[3]);
//!         }
//!     }
//! });
//!
//! let mut sender = setup.connect(&weights, Expect::Count(1), Some(Duration::from_secs(10)))?;
//! weights.slice_mut::<f32>("layer.weight")?[3] = 5.0;
//! let report = sender.send(&weights)?;
//! assert!(report.all_applied(), "{report}");
//! assert_eq!(worker.join().unwrap()?, 5.0);
//! # Ok::<(), weightsync::Error>(())
//! ```
//!
//! | feature | brings |
//! |---|---|
//! | `net` | the scheme `distributed`, for workers of other hosts |
//! | `rpc` | the scheme `rpc`, whose sender calls its workers over HTTP |
//! | `store` | the scheme `store`, and versions that last: [`store`] |
//! | `objects` | stores in S3, Google Cloud Storage and Azure |
//! | `synchronizer` | when a trainer and its explorers synchronise: [`synchronizer`] |
//! | `candle` | candle's `VarMap` as a source of weights and a place to load them |
//!
//! A worker knows every scheme that its program was built with: the init info names the one to
//! use.
#![forbid(unsafe_code)]

/// What can go wrong, and what to do about it.
pub use weightsync_engine::{Error, ErrorKind, Remedy, Result};

pub use weightsync_engine::{
    Dtype, Expect, InitInfo, ModelId, PendingSend, Pull, Receiver, ReceiverSetup, Report,
    SafetensorsFile, SendOptions, Sender, SenderSetup, Session, SetSnapshot, Snapshot, Tensors,
    Version, WaitFor, WorkerId, interruptible,
};

/// Receivers that load each version in a thread of their own.
pub mod background {
    pub use weightsync_engine::{
        Background, BackgroundState, BackgroundStatus, ModelGuard, ModelGuardMut, ModelHold,
        SafePoints, SnapshotsInBackground,
    };
}

/// A worker that passes on what it receives, as the sender of others.
pub mod cascade {
    pub use weightsync_engine::{Cascade, CascadeInBackground, CascadeSetup, Forwarded};
}

/// Names, dtypes, shapes and places of a model's tensors, and the digest of their bytes.
pub mod layout {
    pub use weightsync_engine::layout::*;
    pub use weightsync_engine::{
        Chunking, Chunks, Digest, LayoutId, LayoutMismatch, Manifest, TensorRef, TensorSpec,
        WeightChunk, chunk, manifest, names,
    };
}

/// Renaming, casting, transposing, fusing and splitting tensors on their way.
pub mod mapping {
    pub use weightsync_engine::mapping::*;
    pub use weightsync_engine::{
        DryRun, MappedExtractor, MappedLoader, Mapping, MappingError, TensorOutcome,
    };
}

/// Where weights come from and where they are loaded.
pub mod model {
    pub use weightsync_engine::plain;
    pub use weightsync_engine::{
        Attributes, AttributesError, Element, ExtraState, ExtractError, Extracted, Member, Members,
        Model, ModelPath, ModelPathError, ModelTree, Models, ModuleTree, PathPart, Plain,
        PlainError, PrivateView, Registered, Role, SendSource, Set, SetLoader, StateDict, Strategy,
        TensorData, TensorDict, TensorView, TiedOnce, UnknownStrategy, WeightExtractor,
        WeightLoader, Weights, Written, find_ties,
    };
}

/// The forms in which a receiver returns versions.
pub mod receiver {
    pub use weightsync_engine::{Joined, Receiving};
}

/// The outcome of a send at each worker.
pub mod report {
    pub use weightsync_engine::{
        Changes, Holder, LastOutcome, LastSend, ModelStatus, Outcome, RelayStatus, Report,
        SenderStatus, WorkerReport, WorkerRoute, WorkerStatus,
    };
}

/// The ways for weights to travel: as values, or by name.
pub mod scheme {
    pub use weightsync_engine::{AnyScheme, MultiProcess, NoSync, Queue, SharedMem, settings};
    #[cfg(feature = "net")]
    pub use weightsync_net::{Deltas, Distributed, Share, Verify};
    #[cfg(feature = "rpc")]
    pub use weightsync_serve::Rpc;
    #[cfg(feature = "store")]
    pub use weightsync_store::StoreScheme;
}

/// How a sender sends, and several senders as one.
pub mod sender {
    pub use weightsync_engine::{AsyncSendLimit, DigestPolicy, Loan, Senders};
}

/// Versions that last: saved, listed, named and loaded without a running trainer.
#[cfg(feature = "store")]
pub mod store {
    pub use weightsync_store::{
        Address, Damage, Keep, Loaded, LoadedModel, ModelVersion, SaveOptions, SaveOutcome, Saved,
        Saver, Saving, Store, StoreError, StoredModel, StoredVersion, Versions, Which, Writer,
    };
}

/// When a trainer and its explorers synchronise.
#[cfg(feature = "synchronizer")]
pub mod synchronizer {
    pub use weightsync_serve::synchronizer::*;
}

/// The traits and types to write a scheme of your own.
pub mod transport {
    pub use weightsync_engine::transport::*;
    pub use weightsync_engine::{Epoch, Origin, Run, WriterId};
}

/// Worker processes: started, watched and ended with their trainer.
pub use weightsync_engine::worker;

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

/// The README's example runs, too: a trainer and its worker processes.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
