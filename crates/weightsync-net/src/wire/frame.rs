//! Frames: where one message ends and the next begins, and whether it arrived as it was sent.
//!
//! ```text
//! u32 payload bytes | u8 kind | 3 zeros | u64 CRC-64/NVME of those 8 bytes and the payload | payload
//! ```
//!
//! Numbers are little-endian. A frame of kind [`Kind::Chunk`] has a [`ChunkHead`] as its
//! payload, and the chunk's bytes follow it. These bytes belong to no frame: so they can be
//! received straight into their final place, and they have a checksum of their own. A frame of
//! kind [`Kind::Delta`] has a [`DeltaHead`], and the bytes of a delta follow in the same way.
//!
//! The checksums guard against accidents. An attacker on the path can change a frame.

mod chunk;
mod decoder;
mod delta;

use weightsync_core::Remedy;
use weightsync_simd::Crc64;

pub use self::chunk::{ChunkHead, chunks};
pub use self::decoder::{Decoder, Frame};
pub use self::delta::DeltaHead;

/// Bytes of a [`Header`].
pub const HEADER_BYTES: usize = 16;

/// Bytes of a [`ChunkHead`].
pub const CHUNK_HEAD_BYTES: usize = 40;

/// Bytes of a [`DeltaHead`].
pub const DELTA_HEAD_BYTES: usize = 48;

/// Bytes of an image that one delta covers; of its last span, what is left.
pub const SPAN: u64 = weightsync_core::delta::SPAN;

/// Chunks of a span.
pub const SPAN_CHUNKS: usize = (SPAN / CHUNK as u64) as usize;

/// Bytes of every chunk of an image but its last, which may be shorter.
pub const CHUNK: u32 = 1 << 20;

/// The longest payload of a control frame, in bytes.
pub const MAX_FRAME: usize = 1 << 20;

/// The longest payload of a bulk frame, in bytes.
pub const MAX_BULK_FRAME: usize = 64 << 10;

/// The most models of one sender.
pub const MAX_MODELS: u8 = 64;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A message of a control or a status link.
    Control,
    /// A message of a bulk link.
    Bulk,
    /// The head of a chunk, of a bulk link.
    Chunk,
    /// The head of a delta, of a bulk link.
    Delta,
}

impl Kind {
    /// The byte it is on the wire.
    pub fn code(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Bulk => 2,
            Self::Chunk => 3,
            Self::Delta => 4,
        }
    }

    /// The kind of a byte on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::Control, Self::Bulk, Self::Chunk, Self::Delta]
            .into_iter()
            .find(|kind| kind.code() == code)
    }

    /// The longest payload of such a frame, in bytes.
    pub fn max_payload(self) -> usize {
        match self {
            Self::Control => MAX_FRAME,
            Self::Bulk => MAX_BULK_FRAME,
            Self::Chunk => CHUNK_HEAD_BYTES,
            Self::Delta => DELTA_HEAD_BYTES,
        }
    }

    /// The shortest payload of such a frame, in bytes.
    fn min_payload(self) -> usize {
        match self {
            Self::Control | Self::Bulk => 1,
            Self::Chunk => CHUNK_HEAD_BYTES,
            Self::Delta => DELTA_HEAD_BYTES,
        }
    }
}

/// What is before every payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is for.
    pub kind: Kind,
    /// Bytes of the payload: within the bounds of the kind.
    pub len: usize,
    crc: u64,
}

impl Header {
    /// Reads a header and bounds the length it states: what is to hold the payload is allocated
    /// after this.
    ///
    /// `allowed` are the kinds that make sense on this link and in this direction.
    ///
    /// # Errors
    ///
    /// [`FrameError::Kind`] for one that is not allowed, [`FrameError::Zeros`], and
    /// [`FrameError::Length`].
    pub fn decode(bytes: &[u8; HEADER_BYTES], allowed: &[Kind]) -> Result<Self, FrameError> {
        let [
            l0,
            l1,
            l2,
            l3,
            code,
            zeros @ ..,
            c0,
            c1,
            c2,
            c3,
            c4,
            c5,
            c6,
            c7,
        ] = *bytes;
        let kind = Kind::from_code(code)
            .filter(|kind| allowed.contains(kind))
            .ok_or(FrameError::Kind { got: code })?;
        if zeros != [0; 3] {
            return Err(FrameError::Zeros);
        }
        let (got, least, most) = (
            u32::from_le_bytes([l0, l1, l2, l3]),
            kind.min_payload(),
            kind.max_payload(),
        );
        let len = usize::try_from(got).unwrap_or(usize::MAX);
        if !(least..=most).contains(&len) {
            return Err(FrameError::Length {
                kind,
                got,
                least,
                most,
            });
        }
        let crc = u64::from_le_bytes([c0, c1, c2, c3, c4, c5, c6, c7]);
        Ok(Self { kind, len, crc })
    }

    /// Whether the payload is the one that was sent.
    ///
    /// # Errors
    ///
    /// [`FrameError::Checksum`], also if it has another length.
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        let first = first_half(self.kind, self.len as u32);
        match payload.len() == self.len && checksum(&first, payload) == self.crc {
            true => Ok(()),
            false => Err(FrameError::Checksum {
                what: "a frame",
                bytes: self.len as u64,
            }),
        }
    }
}

/// Puts a frame at the end of `out`.
///
/// # Errors
///
/// [`FrameError::Length`] if the payload is too long, or too short, for its kind.
pub fn encode(kind: Kind, payload: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
    let (least, most) = (kind.min_payload(), kind.max_payload());
    if !(least..=most).contains(&payload.len()) {
        return Err(FrameError::Length {
            kind,
            got: u32::try_from(payload.len()).unwrap_or(u32::MAX),
            least,
            most,
        });
    }
    out.reserve(HEADER_BYTES + payload.len());
    out.extend_from_slice(&header(kind, payload));
    out.extend_from_slice(payload);
    Ok(())
}

fn header(kind: Kind, payload: &[u8]) -> [u8; HEADER_BYTES] {
    // No payload is longer than its kind's bound, which is far below 4 GiB.
    let first = first_half(kind, payload.len() as u32);
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&first);
    bytes[8..].copy_from_slice(&checksum(&first, payload).to_le_bytes());
    bytes
}

fn first_half(kind: Kind, len: u32) -> [u8; 8] {
    let [l0, l1, l2, l3] = len.to_le_bytes();
    [l0, l1, l2, l3, kind.code(), 0, 0, 0]
}

fn checksum(first: &[u8; 8], payload: &[u8]) -> u64 {
    let mut crc = Crc64::new();
    crc.update(first);
    crc.update(payload);
    crc.value()
}

/// The payload of a frame of the kind whose payloads are all of `N` bytes, which begin with a
/// model and seven zeros.
fn head_of<const N: usize>(kind: Kind, payload: &[u8]) -> Result<&[u8; N], FrameError> {
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

/// The number at a place of a head.
fn number(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Why the bytes of a link are no frame. The link is of no use any more: connect again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A kind there is not, or not on this link.
    #[error("a frame of kind {got} is not valid on this link")]
    Kind {
        /// Its byte.
        got: u8,
    },
    /// Bytes that are to be zero are not.
    #[error("reserved bytes are not zero: the frame is damaged, or of a newer version")]
    Zeros,
    /// A length that the kind does not allow.
    #[error("a frame of {got} bytes, expected {least} to {most} ({kind:?})")]
    Length {
        /// The frame's kind.
        kind: Kind,
        /// The length it states, in bytes.
        got: u32,
        /// The shortest possible.
        least: usize,
        /// The longest possible.
        most: usize,
    },
    /// What came is not what was sent.
    #[error("the checksum of {what} of {bytes} bytes is wrong: the bytes were damaged in transit")]
    Checksum {
        /// A frame, or a chunk.
        what: &'static str,
        /// How long it is.
        bytes: u64,
    },
    /// A chunk that cannot be.
    #[error(
        "a chunk cannot be chunk {} of {} bytes of {} of model {}, whose image has {} bytes",
        head.index, head.bytes, head.version, head.model, head.image_bytes
    )]
    Chunk {
        /// What its head says.
        head: ChunkHead,
    },
    /// A delta that cannot be.
    #[error(
        "a delta cannot be {} bytes for span {} of {} of model {}, made from {}, whose image has {} bytes",
        head.bytes, head.index, head.version, head.model, head.base, head.image_bytes
    )]
    Delta {
        /// What its head says.
        head: DeltaHead,
    },
    /// An image with more chunks than can be counted.
    #[error("an image of {bytes} bytes has more chunks of 1 MiB than 32 bits can count")]
    Image {
        /// Its length.
        bytes: u64,
    },
}

impl FrameError {
    /// What to do: connect again, and go on with what is still missing.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Image { .. } => Remedy::GiveUp,
            _ => Remedy::Retry,
        }
    }
}
