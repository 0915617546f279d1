//! What a message on a link is. The messages themselves are of the service that sends them.
//!
//! On the wire a message is a byte with the format's number, then the postcard of its type: the
//! order of variants and fields is part of the format. Every decoded message is checked: each
//! number is in its range, and each list and text is within the bound stated at its field. The
//! encoder makes the same checks, but cuts texts for people instead of refusing them.

use serde::Serialize;
use serde::de::DeserializeOwned;
use weightsync_core::Remedy;

use crate::frame::{self, FrameKind};

/// The number of the messages' format, their first byte.
pub const FORMAT: u8 = 1;

/// The messages of one direction of a link. Their serde forms check nothing:
/// [`encode`](Self::encode) and [`decode`](Self::decode) do.
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

/// A message whose numbers, texts and lists have bounds.
pub trait Check {
    /// Checks every bound; `text` checks a text for people, which only its receiver refuses.
    ///
    /// # Errors
    ///
    /// [`MessageError`] for what is out of its bounds.
    fn check(&self, text: CheckText) -> Result<(), MessageError>;
}

/// Checks a text against the most bytes that it may have.
pub type CheckText = fn(&str, usize) -> Result<(), MessageError>;

/// Checks a text that arrived.
fn check_text(words: &str, limit: usize) -> Result<(), MessageError> {
    within("bytes of a text", words.len(), limit)
}

/// Checks the length of a text or a list.
///
/// # Errors
///
/// [`MessageError::TooLong`].
pub fn within(what: &'static str, got: usize, limit: usize) -> Result<(), MessageError> {
    match got <= limit {
        true => Ok(()),
        false => Err(MessageError::TooLong {
            what,
            got: got as u64,
            limit: limit as u64,
        }),
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
