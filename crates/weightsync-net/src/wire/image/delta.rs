//! The head of a delta: which changes to an image it carries.

use weightsync_core::Version;
use weightsync_link::frame::{DELTA_HEAD_BYTES, FrameError, FrameKind, HEADER_BYTES, header};

use super::{ImageError, MAX_MODELS, SPAN, head_of, number};

/// The head of a delta; the delta's bytes follow its frame.
///
/// | bytes | |
/// |---|---|
/// | 0 | model |
/// | 1..8 | zeros |
/// | 8..16 | version |
/// | 16..24 | the base: the older version that the delta is applied to |
/// | 24..28 | index of the span, which begins at `index` × [`SPAN`] of the image |
/// | 28..32 | bytes of the delta; 0 if the span is the same in both versions |
/// | 32..40 | CRC-64/NVME of these bytes |
/// | 40..48 | bytes of the whole image |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHead {
    /// The model's index, below [`MAX_MODELS`].
    pub model: u8,
    /// The version.
    pub version: Version,
    /// The older version that the delta is applied to, from 1.
    pub base: Version,
    /// The index of the span in the image, from 0.
    pub index: u32,
    /// How many bytes follow: fewer than the span has, or none.
    pub bytes: u32,
    /// The checksum of the delta.
    pub crc: u64,
    /// Bytes of the whole image.
    pub image_bytes: u64,
}

impl DeltaHead {
    /// The whole frame, which is sent before the delta's bytes.
    pub fn frame(&self) -> [u8; HEADER_BYTES + DELTA_HEAD_BYTES] {
        let mut payload = [0; DELTA_HEAD_BYTES];
        payload[0] = self.model;
        payload[8..16].copy_from_slice(&self.version.0.to_le_bytes());
        payload[16..24].copy_from_slice(&self.base.0.to_le_bytes());
        payload[24..28].copy_from_slice(&self.index.to_le_bytes());
        payload[28..32].copy_from_slice(&self.bytes.to_le_bytes());
        payload[32..40].copy_from_slice(&self.crc.to_le_bytes());
        payload[40..].copy_from_slice(&self.image_bytes.to_le_bytes());
        let mut frame = [0; HEADER_BYTES + DELTA_HEAD_BYTES];
        frame[..HEADER_BYTES].copy_from_slice(&header(FrameKind::Delta, &payload));
        frame[HEADER_BYTES..].copy_from_slice(&payload);
        frame
    }

    /// Reads the payload of a delta's frame.
    ///
    /// # Errors
    ///
    /// [`FrameError::Length`] if it has another length, [`FrameError::Zeros`], and
    /// [`ImageError::Delta`] for a model, version, base, index or length that is impossible.
    pub fn decode(payload: &[u8]) -> Result<Self, ImageError> {
        let bytes: &[u8; DELTA_HEAD_BYTES] = head_of(FrameKind::Delta, payload)?;
        let word = |at| number(bytes, at);
        // One word for two numbers of four bytes: the index, then the length.
        let place = word(24);
        let head = Self {
            model: bytes[0],
            version: Version(word(8)),
            base: Version(word(16)),
            index: place as u32,
            bytes: (place >> 32) as u32,
            crc: word(32),
            image_bytes: word(40),
        };
        match head.is_possible() {
            true => Ok(head),
            false => Err(ImageError::Delta { head }),
        }
    }

    /// Checks that these bytes arrived unchanged.
    ///
    /// # Errors
    ///
    /// [`FrameError::Checksum`].
    pub fn check(&self, delta: &[u8]) -> Result<(), FrameError> {
        let same = delta.len() as u64 == u64::from(self.bytes);
        match same && weightsync_simd::crc64(delta) == self.crc {
            true => Ok(()),
            false => Err(FrameError::Checksum {
                what: "a delta",
                bytes: self.bytes.into(),
            }),
        }
    }

    /// How many bytes of the image the span has.
    fn span(&self) -> Option<u64> {
        let left = self.image_bytes.checked_sub(u64::from(self.index) * SPAN)?;
        Some(left.min(SPAN)).filter(|left| *left > 0)
    }

    fn is_possible(&self) -> bool {
        // A delta as long as its span would go as blocks. The bound also limits what a receiver
        // allocates for it.
        let shorter = self.span().is_some_and(|span| u64::from(self.bytes) < span);
        let older = !self.base.is_none() && self.base < self.version;
        shorter && older && self.model < MAX_MODELS
    }
}
