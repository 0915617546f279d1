//! Versions of a model's weights that last: in a directory, or in an object store by the feature
//! `objects`.
//!
//! | step of the journey | here |
//! |---|---|
//! | encode: a full version, or the changes since the one before | `anchor`, `delta_file` |
//! | stage: files that nothing names yet | `storage` |
//! | swap: the head is replaced, which publishes the version | [`Writer`] |
//! | verify: every version that is loaded has the digest of its manifest | [`Store`] |
//!
//! [`Store`] reads versions, [`Writer`] saves them, [`Saver`] saves them while training goes on, and
//! [`StoreScheme`] is the scheme `store:PATH`, with no process between trainer and workers.
//! `docs/store.md` specifies the files.
//!
//! Absent here: sockets of its own, retries that hide an error, wall clocks that decide anything.
#![forbid(unsafe_code)]

mod address;
mod anchor;
mod catalog;
mod checkpoint;
mod delta_file;
mod error;
mod format;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod lease;
mod pieces;
mod progress;
mod retention;
mod saver;
mod scheme;
mod scrub;
mod storage;
mod store;
mod threads;
mod writer;

pub use self::address::Address;
pub use self::checkpoint::{Checkpoint, Pulled, PushOptions, Pushed};
pub use self::error::{DAMAGE_TARGET, Damage, Result, StoreError};
pub use self::pieces::{Comparison, StoredWeights};
pub use self::progress::Work;
pub use self::retention::Keep;
pub use self::saver::{SaveOutcome, Saver, Saving};
pub use self::scheme::{StoreScheme, status_of_store};
pub use self::scrub::Scrubbed;
pub use self::store::{
    Loaded, LoadedModel, ModelVersion, Store, StoredModel, StoredVersion, Versions, Which,
};
pub use self::writer::{SaveOptions, Saved, Writer};
