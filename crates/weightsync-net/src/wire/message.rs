//! The messages of an open link.
//!
//! | from | to | |
//! |---|---|---|
//! | an agent: the one process of a host that talks to the sender | the sender | [`ToRoot`] |
//! | the sender | an agent | [`FromRoot`] |
//! | a child | its parent, which has the version that the child wants | [`ToParent`] |
//! | a parent | its child | [`ToChild`], and blocks |
//! | a sender | a program that asks for the status or a scrub | [`Status`] |
//!
//! On the wire a message is a byte with the format's number, then postcard of types that belong
//! to this module alone. Every decoded message is checked: each number is in its range, and
//! each list and text is within the bound stated at its field. The encoder makes the same
//! checks, but cuts texts for people instead of refusing them.

mod bulk;
mod convert;
mod from_root;
mod model;
mod to_root;

use serde::{Deserialize, Serialize};
use weightsync_core::{Remedy, Version};

use self::convert::*;

pub use self::bulk::{BlockRange, ToChild, ToParent};
pub use self::from_root::{FromRoot, RefusalRemedy};
pub use self::model::{AssembledModel, ModelAssembler, model_messages};
pub use self::to_root::{ToRoot, WorkerProgress};
use super::frame::{self, Kind, MAX_FRAME, MAX_MODELS};
pub use crate::relay::Item;
/// Which versions a worker gets, and the set that it asks for: the same as for a local reader.
pub use weightsync_mem::{Delivery, Want};

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

/// The most bytes of one [`FromRoot::Part`].
pub const MAX_PART: usize = 512 << 10;

/// The longest encoded layout, in bytes.
pub const MAX_LAYOUT: u64 = 64 << 20;

/// The longest note of a model, in bytes.
pub const MAX_NOTE: u64 = 16 << 20;

/// The longest text of a [`Status`], in bytes: what fits a frame.
pub const MAX_JSON: usize = MAX_FRAME - 64;

/// The messages of one direction of a link.
pub trait Message: Sized {
    /// The kind of their frames.
    const KIND: Kind;

    /// The message as the payload of a frame.
    ///
    /// # Errors
    ///
    /// [`MessageError`] for one that the other end would refuse.
    fn encode(&self) -> Result<Vec<u8>, MessageError>;

    /// Reads the payload of a frame.
    ///
    /// # Errors
    ///
    /// [`MessageError`] for another format, and for anything out of its bounds.
    fn decode(payload: &[u8]) -> Result<Self, MessageError>;

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
/// [`Status`](super::hello::Role::Status) sends nothing, and gets this once the handshake is done.
/// A client of the role [`Scrub`](super::hello::Role::Scrub) gets it once all comparisons are done;
/// until then it gets an empty object every second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// At most [`MAX_JSON`] bytes.
    pub json: String,
}

impl Message for Status {
    const KIND: Kind = Kind::Control;

    fn encode(&self) -> Result<Vec<u8>, MessageError> {
        within("bytes of a status", self.json.len(), MAX_JSON)?;
        to_payload(&self.json.as_str())
    }

    fn decode(payload: &[u8]) -> Result<Self, MessageError> {
        let json: &str = from_payload(payload)?;
        within("bytes of a status", json.len(), MAX_JSON)?;
        Ok(Self { json: json.into() })
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

fn to_payload(wire: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    postcard::to_extend(wire, vec![FORMAT]).map_err(|error| MessageError::Malformed {
        bytes: 0,
        reason: error.to_string(),
    })
}

/// Decodes a payload; the caller checks its bounds afterwards. Allocations are bounded by the
/// payload's length, because each element takes at least a byte of it.
fn from_payload<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, MessageError> {
    let malformed = |reason| MessageError::Malformed {
        bytes: payload.len(),
        reason,
    };
    match payload.split_first() {
        None => Err(malformed("it is empty".into())),
        Some((&FORMAT, body)) => match postcard::take_from_bytes(body) {
            Ok((wire, [])) => Ok(wire),
            Ok((_, rest)) => Err(malformed(format!("{} bytes follow its end", rest.len()))),
            Err(error) => Err(malformed(error.to_string())),
        },
        Some((&got, _)) => Err(MessageError::Format { got }),
    }
}

/// At most `len` bytes of a text for people, cut between characters.
fn cut(words: &str, len: usize) -> &str {
    &words[..words.floor_char_boundary(len)]
}

fn text(words: &str, limit: usize) -> Result<String, MessageError> {
    within("bytes of a text", words.len(), limit)?;
    Ok(words.into())
}

fn within(what: &'static str, got: usize, limit: usize) -> Result<(), MessageError> {
    match got <= limit {
        true => Ok(()),
        false => Err(MessageError::TooLong {
            what,
            got: got as u64,
            limit: limit as u64,
        }),
    }
}

fn require(
    holds: bool,
    expected: &'static str,
    got: impl FnOnce() -> String,
) -> Result<(), MessageError> {
    match holds {
        true => Ok(()),
        false => Err(MessageError::OutOfRange {
            expected,
            got: got(),
        }),
    }
}

fn check_model(model: impl Into<usize>) -> Result<(), MessageError> {
    let model = model.into();
    require(model < MAX_MODELS.into(), "a model below 64", || {
        model.to_string()
    })
}

fn check_version(version: Version) -> Result<(), MessageError> {
    require(!version.is_none(), "a version from 1", || "0".into())
}

fn check_item(model: impl Into<usize>, version: Version) -> Result<(), MessageError> {
    check_model(model)?;
    check_version(version)
}

fn check_items(what: &'static str, items: &[Item], limit: usize) -> Result<(), MessageError> {
    within(what, items.len(), limit)?;
    let mut items = items.iter();
    items.try_for_each(|item| check_item(item.model, item.version))
}

/// A set: no model has two versions in it.
fn check_set(set: &[Item]) -> Result<(), MessageError> {
    check_items("models of a set", set, MAX_MODELS.into())?;
    let mut models = 0_u64;
    set.iter().try_for_each(|item| {
        let bit = 1 << item.model;
        let is_new = models & bit == 0;
        models |= bit;
        require(is_new, "each model once in a set", || {
            format!("model {} twice", item.model)
        })
    })
}

fn check_want(want: Want) -> Result<(), MessageError> {
    match want {
        Want::Newest => Ok(()),
        Want::AtLeast { model, version } | Want::Exactly { model, version } => {
            check_item(model, version)
        }
    }
}

fn check_delivery(delivery: Delivery) -> Result<(), MessageError> {
    match delivery {
        Delivery::Newest | Delivery::Asked => Ok(()),
        Delivery::Every { bound } => require(
            (1..=MAX_BOUND).contains(&bound),
            "a bound of 1 to 32",
            || bound.to_string(),
        ),
    }
}
