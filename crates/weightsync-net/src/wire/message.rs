//! The messages of an open link.
//!
//! | from | to | |
//! |---|---|---|
//! | an agent: the one process of a host that talks to the sender | the sender | [`ToRoot`] |
//! | the sender | an agent | [`FromRoot`] |
//! | a child | its parent, which has the version that the child wants | [`ToParent`] |
//! | a parent | its child | [`ToChild`], and blocks |
//! | a sender | a program that asks for the status or a scrub | [`JsonReply`] |
//! | a worker of a collector | its trainer | [`ToTrainer`], and pieces |
//! | a trainer | a worker of its collector | [`ToWorker`], and pieces |
//!
//! [`Message`] says how they are encoded and checked.

mod bulk;
mod check;
mod collect;
mod fields;
mod from_root;
mod model;
mod to_root;

use serde::{Deserialize, Serialize};
use weightsync_link::frame::{FrameKind, MAX_FRAME};
use weightsync_link::message::{Check, CheckText, Message, MessageError, within};

pub use self::bulk::{BlockRange, ToChild, ToParent, WantedBlocks};
pub use self::collect::{ToTrainer, ToWorker};
pub use self::from_root::{FromRoot, RefusalRemedy, Welcome};
pub use self::model::{AssembledModel, ModelAssembler, model_messages};
pub use self::to_root::{ToRoot, WorkerJoin, WorkerProgress};
pub use crate::agent::Item;
/// Which versions a worker gets, and the set that it asks for: the same as for a local reader.
pub use weightsync_mem::{Delivery, Want, WorkerInstance};

/// The longest text, in bytes.
pub const MAX_TEXT: usize = 1 << 10;

/// The longest label of a device, in bytes.
pub const MAX_DEVICE: usize = 64;

/// The longest address, in bytes.
pub const MAX_ADDRESS: usize = 1024;

/// The most versions in one report of held or dropped versions.
pub const MAX_HELD: usize = 4096;

/// The most workers in one [`ToRoot::Progress`].
pub const MAX_PROGRESS: usize = 4096;

/// The most workers in one [`FromRoot::Notify`].
pub const MAX_NOTIFIED: usize = 65_536;

/// The most known versions named in a [`FromRoot::NoSuchVersion`].
pub const MAX_KNOWN: usize = 16;

/// The most versions in the queue of a worker that takes every version, as in shared memory.
pub const MAX_BOUND: u8 = 32;

/// The most slots of a model: a reader's pins are the bits of one word.
pub const MAX_SLOTS: u8 = 64;

/// The most ranges of one [`ToParent::Fetch`].
pub const MAX_RANGES: usize = 4096;

/// The bytes of the BLAKE3 digest of a block.
pub const DIGEST_BYTES: usize = 32;

/// The most digests of one [`ToChild::Digests`].
pub const MAX_DIGESTS: usize = 1024;

/// The most bytes of one [`FromRoot::Part`].
pub const MAX_PART: usize = 512 << 10;

/// The longest encoded layout, in bytes.
pub const MAX_LAYOUT: u64 = 64 << 20;

/// The longest note of a model, in bytes.
pub const MAX_NOTE: u64 = 16 << 20;

/// The longest text of a [`JsonReply`], in bytes: what fits a frame.
pub const MAX_JSON: usize = MAX_FRAME - 64;

/// The longest answer of a collector's worker, in bytes.
pub const MAX_SAID: usize = 64 << 10;

/// The status or the result of a scrub, as JSON. A client of the role
/// [`Status`](weightsync_link::hello::LinkRole::Status) sends nothing, and gets this once the handshake is
/// done. A client of the role [`Scrub`](weightsync_link::hello::LinkRole::Scrub) gets it once all comparisons
/// are done; until then it gets an empty object every second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JsonReply {
    /// At most [`MAX_JSON`] bytes.
    pub json: String,
}

impl Message for JsonReply {
    const KIND: FrameKind = FrameKind::Control;
}

impl Check for JsonReply {
    fn check(&self, _text: CheckText) -> Result<(), MessageError> {
        within("bytes of a status", self.json.len(), MAX_JSON)
    }
}
