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
//! On the wire a message is a byte with the format's number, then the postcard of its type: the
//! order of variants and fields is part of the format. Every decoded message is checked: each
//! number is in its range, and each list and text is within the bound stated at its field. The
//! encoder makes the same checks, but cuts texts for people instead of refusing them.

mod bulk;
mod check;
mod collect;
mod fields;
mod from_root;
mod model;
mod to_root;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use weightsync_core::Remedy;

use self::check::{Check, CheckText, check_text, within};

pub use self::bulk::{BlockRange, ToChild, ToParent, WantedBlocks};
pub use self::collect::{ToTrainer, ToWorker};
pub use self::from_root::{FromRoot, RefusalRemedy, Welcome};
pub use self::model::{AssembledModel, ModelAssembler, model_messages};
pub use self::to_root::{ToRoot, WorkerJoin, WorkerProgress};
use super::frame::{self, FrameKind, MAX_FRAME, MAX_MODELS};
pub use crate::relay::Item;
/// Which versions a worker gets, and the set that it asks for: the same as for a local reader.
pub use weightsync_mem::{Delivery, Want, WorkerInstance};

/// The number of the messages' format, their first byte.
pub const FORMAT: u8 = 1;

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

/// The messages of one direction of a link. Their serde forms check nothing:
/// [`encode`](Self::encode) and [`decode`](Self::decode) do. The trait is sealed: `Check`,
/// which it needs, is private.
pub trait Message: Serialize + DeserializeOwned + Check {
    /// The kind of their frames.
    const KIND: FrameKind;

    /// The message as the payload of a frame.
    ///
    /// # Errors
    ///
    /// [`MessageError`] for one that the other end would refuse.
    fn encode(&self) -> Result<Vec<u8>, MessageError> {
        // Serializing cuts the texts.
        self.check(|_, _| Ok(()))?;
        postcard::to_extend(self, vec![FORMAT]).map_err(|error| MessageError::Malformed {
            bytes: 0,
            reason: error.to_string(),
        })
    }

    /// Reads the payload of a frame.
    ///
    /// # Errors
    ///
    /// [`MessageError`] for another format, and for anything out of its bounds.
    fn decode(payload: &[u8]) -> Result<Self, MessageError> {
        let message: Self = parse(payload)?;
        message.check(check_text)?;
        Ok(message)
    }

    /// The message as a whole frame.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    fn frame(&self) -> Result<Vec<u8>, MessageError> {
        let mut bytes = Vec::new();
        let payload = self.encode()?;
        frame::encode(Self::KIND, &payload, &mut bytes).map_err(|_| MessageError::TooLong {
            what: "bytes of a message",
            got: payload.len() as u64,
            limit: Self::KIND.max_payload() as u64,
        })?;
        Ok(bytes)
    }
}

/// The status or the result of a scrub, as JSON. A client of the role
/// [`Status`](super::hello::LinkRole::Status) sends nothing, and gets this once the handshake is
/// done. A client of the role [`Scrub`](super::hello::LinkRole::Scrub) gets it once all comparisons
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

/// Why bytes are no valid message, or a message cannot be sent. If a peer sent them, it misbehaves,
/// and the link must be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// A format that this version does not read.
    #[error(
        "a message of format {got}, expected {FORMAT}; install the same weightsync on \
         both ends"
    )]
    Format {
        /// The first byte.
        got: u8,
    },
    /// Bytes that are no valid message of this link.
    #[error("invalid message of {bytes} bytes: {reason}")]
    Malformed {
        /// The length of the payload.
        bytes: usize,
        /// What is wrong.
        reason: String,
    },
    /// A text or list that is too long.
    #[error("{what}: {got} is over the limit of {limit}")]
    TooLong {
        /// The text or list.
        what: &'static str,
        /// Its length.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// A number out of its range.
    #[error("expected {expected}, got {got}")]
    OutOfRange {
        /// The accepted range.
        expected: &'static str,
        /// The number.
        got: String,
    },
}

impl MessageError {
    /// What to do: nothing automatic. A frame's checksum detects damage in transit, so one of the
    /// two ends is wrong or has another version.
    pub fn remedy(&self) -> Remedy {
        Remedy::GiveUp
    }
}

/// Decodes a payload; the caller checks its bounds afterwards. Allocations are bounded by the
/// payload's length, because each element takes at least a byte of it.
fn parse<T: DeserializeOwned>(payload: &[u8]) -> Result<T, MessageError> {
    let malformed = |reason| MessageError::Malformed {
        bytes: payload.len(),
        reason,
    };
    match payload.split_first() {
        None => Err(malformed("it is empty".into())),
        // The format comes first, because the rest of another one could be read as anything.
        Some((&FORMAT, body)) => match postcard::take_from_bytes(body) {
            Ok((message, [])) => Ok(message),
            Ok((_, rest)) => Err(malformed(format!("{} bytes follow its end", rest.len()))),
            Err(error) => Err(malformed(error.to_string())),
        },
        Some((&got, _)) => Err(MessageError::Format { got }),
    }
}
