//! The pure part of weightsync: what a model's weights look like and which state of them is meant.
//!
//! Everything here is a value and a decision about values.
#![forbid(unsafe_code)]

pub mod chunk;
pub mod digest;
pub mod dtype;
pub mod error;
mod hex;
pub mod ids;
mod index;
pub mod layout;
pub mod names;
pub mod record;
pub mod version;

pub use chunk::{Chunking, Chunks, Placement, WeightChunk};
pub use digest::{Digest, DigestError, Digester};
pub use dtype::Dtype;
pub use error::{Error, Remedy, Result};
pub use ids::{ModelId, WorkerId, WriterId};
pub use layout::{ByteRange, Layout, LayoutId, LayoutMismatch, TensorSpec};
pub use names::{Node, Tree};
pub use record::{CommitRecord, RECORD_WORDS, RecordFault};
pub use version::{Epoch, Run, Version};
