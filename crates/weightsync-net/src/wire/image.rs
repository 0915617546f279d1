//! How an image travels: in blocks, or as deltas, each behind a head that says which part it is.

mod block;
mod delta;

use weightsync_core::Remedy;
use weightsync_link::frame::{FrameError, FrameKind};

pub use self::block::{BlockHead, blocks};
pub use self::delta::DeltaHead;

/// Bytes of an image that one delta covers; the last span may be shorter.
pub const SPAN: u64 = weightsync_core::delta::SPAN;

/// Blocks in a span.
pub const SPAN_BLOCKS: usize = (SPAN / BLOCK_BYTES as u64) as usize;

/// Bytes of every block of an image except the last, which may be shorter.
pub const BLOCK_BYTES: u32 = 1 << 20;

/// The most models of one sender.
pub const MAX_MODELS: u8 = 64;

/// The payload of a kind whose payloads have exactly `N` bytes, and begin with a model and seven
/// zeros.
fn head_of<const N: usize>(kind: FrameKind, payload: &[u8]) -> Result<&[u8; N], FrameError> {
    let bytes: &[u8; N] = payload.try_into().map_err(|_| FrameError::Length {
        kind,
        got: u32::try_from(payload.len()).unwrap_or(u32::MAX),
        least: N,
        most: N,
    })?;
    match bytes[1..8] == [0; 7] {
        true => Ok(bytes),
        false => Err(FrameError::Zeros),
    }
}

/// Reads a number of a head.
fn number(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Why a head is not valid, or an image cannot travel. The link must be closed: connect again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The frame of the head is not valid.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A block's head with impossible fields.
    #[error(
        "invalid head of a block: block {} with {} bytes, of {} of model {}, an image of {} bytes",
        head.index, head.bytes, head.version, head.model, head.image_bytes
    )]
    Block {
        /// The head.
        head: BlockHead,
    },
    /// A delta's head with impossible fields.
    #[error(
        "invalid head of a delta: span {} with {} bytes, from {} to {} of model {}, an image of {} bytes",
        head.index, head.bytes, head.base, head.version, head.model, head.image_bytes
    )]
    Delta {
        /// The head.
        head: DeltaHead,
    },
    /// An image with too many blocks.
    #[error("an image of {bytes} bytes has more blocks of 1 MiB than 32 bits can count")]
    TooLarge {
        /// Its length.
        bytes: u64,
    },
}

impl ImageError {
    /// What to do: connect again, and request what is still missing.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::TooLarge { .. } => Remedy::GiveUp,
            Self::Frame(error) => error.remedy(),
            Self::Block { .. } | Self::Delta { .. } => Remedy::Retry,
        }
    }
}
