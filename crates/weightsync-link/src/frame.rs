//! Frames: where one message ends and the next begins, and whether it arrived as it was sent.
//!
//! ```text
//! u32 payload bytes | u8 kind | 3 zeros | u64 CRC-64/NVME of those 8 bytes and the payload | payload
//! ```
//!
//! Numbers are little-endian. A frame of kind [`FrameKind::Block`] has the head of a block as its
//! payload, and the block's bytes follow it. These bytes belong to no frame: so they can be
//! received straight into their final place, and they have a checksum of their own. A frame of
//! kind [`FrameKind::Delta`] has the head of a delta, and its bytes follow in the same way.
//! Frames of kind [`FrameKind::Piece`] carry consecutive bytes of what the message before them
//! announced.
//!
//! The checksums guard against accidents. An attacker on the path can change a frame.

mod decoder;

use weightsync_core::Remedy;
use weightsync_simd::Crc64;

pub use self::decoder::{Decoder, Frame};

/// Bytes of a [`FrameHeader`].
pub const HEADER_BYTES: usize = 16;

/// The payload of a [`FrameKind::Block`], in bytes.
pub const BLOCK_HEAD_BYTES: usize = 40;

/// The payload of a [`FrameKind::Delta`], in bytes.
pub const DELTA_HEAD_BYTES: usize = 48;

/// The longest payload of a control frame, in bytes.
pub const MAX_FRAME: usize = 1 << 20;

/// The longest payload of a bulk frame, in bytes.
pub const MAX_BULK_FRAME: usize = 64 << 10;

/// The longest payload of a [`FrameKind::Piece`], in bytes. It stays in a core's cache while it is
/// checked and written.
pub const MAX_PIECE: usize = 256 << 10;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// A message of a control, status, scrub or collector link.
    Control,
    /// A message of a bulk link.
    Bulk,
    /// The head of a block, on a bulk link.
    Block,
    /// The head of a delta, on a bulk link.
    Delta,
    /// Bytes that a message announced, on a collector link.
    Piece,
}

impl FrameKind {
    /// The kind's byte on the wire.
    pub fn code(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Bulk => 2,
            Self::Block => 3,
            Self::Delta => 4,
            Self::Piece => 5,
        }
    }

    /// The kind of a byte on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        use FrameKind::*;
        [Control, Bulk, Block, Delta, Piece]
            .into_iter()
            .find(|kind| kind.code() == code)
    }

    /// The longest payload of such a frame, in bytes.
    pub fn max_payload(self) -> usize {
        match self {
            Self::Control => MAX_FRAME,
            Self::Bulk => MAX_BULK_FRAME,
            Self::Block => BLOCK_HEAD_BYTES,
            Self::Delta => DELTA_HEAD_BYTES,
            Self::Piece => MAX_PIECE,
        }
    }

    /// The shortest payload of such a frame, in bytes.
    fn min_payload(self) -> usize {
        match self {
            Self::Control | Self::Bulk | Self::Piece => 1,
            Self::Block => BLOCK_HEAD_BYTES,
            Self::Delta => DELTA_HEAD_BYTES,
        }
    }
}

/// The bytes before every payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The kind of the frame.
    pub kind: FrameKind,
    /// The length of the payload, within the bounds of the kind.
    pub len: usize,
    crc: u64,
}

impl FrameHeader {
    /// Reads a header and bounds the length it states. The caller allocates room for the payload
    /// only after this.
    ///
    /// `allowed` are the kinds that are valid on this link in this direction.
    ///
    /// # Errors
    ///
    /// [`FrameError::Kind`] for a kind that is not allowed, [`FrameError::Zeros`], and
    /// [`FrameError::Length`].
    pub fn decode(bytes: &[u8; HEADER_BYTES], allowed: &[FrameKind]) -> Result<Self, FrameError> {
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
        let kind = FrameKind::from_code(code)
            .filter(|kind| allowed.contains(kind))
            .ok_or(FrameError::Kind { got: code })?;
        // Reserved: a later version may give them a meaning that this one would miss.
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

    /// Checks that the payload arrived unchanged.
    ///
    /// # Errors
    ///
    /// [`FrameError::Checksum`], also for another length.
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        // Kind, length and zeros give the bytes that came, so the checksum covers the header, too.
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

/// Appends a frame to `out`.
///
/// # Errors
///
/// [`FrameError::Length`] if the payload is too long or too short for its kind.
pub fn encode(kind: FrameKind, payload: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
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

/// The header of a payload that is within the bounds of its kind.
pub fn header(kind: FrameKind, payload: &[u8]) -> [u8; HEADER_BYTES] {
    // The bound of each kind is far below 4 GiB, so the length fits.
    let first = first_half(kind, payload.len() as u32);
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&first);
    bytes[8..].copy_from_slice(&checksum(&first, payload).to_le_bytes());
    bytes
}

fn first_half(kind: FrameKind, len: u32) -> [u8; 8] {
    let [l0, l1, l2, l3] = len.to_le_bytes();
    [l0, l1, l2, l3, kind.code(), 0, 0, 0]
}

fn checksum(first: &[u8; 8], payload: &[u8]) -> u64 {
    let mut crc = Crc64::new();
    crc.update(first);
    crc.update(payload);
    crc.value()
}

/// Why bytes are no valid frame. The link must be closed: connect again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A kind that does not exist, or is not valid on this link.
    #[error("a frame of kind {got} is not valid on this link")]
    Kind {
        /// The kind's byte.
        got: u8,
    },
    /// Reserved bytes are not zero.
    #[error("reserved bytes are not zero: the frame is damaged, or of a newer version")]
    Zeros,
    /// A length that the kind does not allow.
    #[error("a frame of {got} bytes, expected {least} to {most} ({kind:?})")]
    Length {
        /// The frame's kind.
        kind: FrameKind,
        /// The stated length, in bytes.
        got: u32,
        /// The least bytes of this kind.
        least: usize,
        /// The most bytes of this kind.
        most: usize,
    },
    /// The bytes were damaged in transit.
    #[error("the checksum of {what} of {bytes} bytes is wrong: the bytes were damaged in transit")]
    Checksum {
        /// A frame, or a block.
        what: &'static str,
        /// Its length.
        bytes: u64,
    },
}

impl FrameError {
    /// What to do: connect again, and request what is still missing.
    pub fn remedy(&self) -> Remedy {
        Remedy::Retry
    }
}
