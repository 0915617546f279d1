//! The head of a block: which part of an image it is.

use weightsync_core::Version;
use weightsync_link::frame::{BLOCK_HEAD_BYTES, FrameError, FrameKind, HEADER_BYTES, header};

use super::{BLOCK_BYTES, ImageError, MAX_MODELS, head_of, number};

/// The head of a block; the block's bytes follow its frame.
///
/// | bytes | |
/// |---|---|
/// | 0 | model |
/// | 1..8 | zeros |
/// | 8..16 | version |
/// | 16..20 | index of the block, which begins at `index` × [`BLOCK_BYTES`] of the image |
/// | 20..24 | bytes of the block |
/// | 24..32 | CRC-64/NVME of these bytes |
/// | 32..40 | bytes of the whole image |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHead {
    /// The model's index, below [`MAX_MODELS`].
    pub model: u8,
    /// The version, from 1.
    pub version: Version,
    /// The index of the block in the image, from 0.
    pub index: u32,
    /// How many bytes follow: [`BLOCK_BYTES`], or the rest of the image.
    pub bytes: u32,
    /// The checksum of the block.
    pub crc: u64,
    /// Bytes of the whole image.
    pub image_bytes: u64,
}

impl BlockHead {
    /// Where the block begins in the image, in bytes.
    pub fn offset(&self) -> u64 {
        u64::from(self.index) * u64::from(BLOCK_BYTES)
    }

    /// The whole frame, which is sent before the block's bytes.
    pub fn frame(&self) -> [u8; HEADER_BYTES + BLOCK_HEAD_BYTES] {
        let mut payload = [0; BLOCK_HEAD_BYTES];
        payload[0] = self.model;
        payload[8..16].copy_from_slice(&self.version.0.to_le_bytes());
        payload[16..20].copy_from_slice(&self.index.to_le_bytes());
        payload[20..24].copy_from_slice(&self.bytes.to_le_bytes());
        payload[24..32].copy_from_slice(&self.crc.to_le_bytes());
        payload[32..].copy_from_slice(&self.image_bytes.to_le_bytes());
        let mut frame = [0; HEADER_BYTES + BLOCK_HEAD_BYTES];
        frame[..HEADER_BYTES].copy_from_slice(&header(FrameKind::Block, &payload));
        frame[HEADER_BYTES..].copy_from_slice(&payload);
        frame
    }

    /// Reads the payload of a block's frame.
    ///
    /// # Errors
    ///
    /// [`FrameError::Length`] if it has another length, [`FrameError::Zeros`], and
    /// [`ImageError::Block`] for a model, version, index or length that is impossible.
    pub fn decode(payload: &[u8]) -> Result<Self, ImageError> {
        let bytes: &[u8; BLOCK_HEAD_BYTES] = head_of(FrameKind::Block, payload)?;
        let word = |at| number(bytes, at);
        // One word for two numbers of four bytes: the index, then the length.
        let place = word(16);
        let head = Self {
            model: bytes[0],
            version: Version(word(8)),
            index: place as u32,
            bytes: (place >> 32) as u32,
            crc: word(24),
            image_bytes: word(32),
        };
        match head.is_possible() {
            true => Ok(head),
            false => Err(ImageError::Block { head }),
        }
    }

    /// Checks that these bytes arrived unchanged.
    ///
    /// # Errors
    ///
    /// [`FrameError::Checksum`].
    pub fn check(&self, block: &[u8]) -> Result<(), FrameError> {
        match block.len() as u64 == u64::from(self.bytes) {
            true => self.check_crc(weightsync_simd::crc64(block)),
            false => Err(self.damaged()),
        }
    }

    /// The same, from a checksum that was computed while the bytes were copied.
    ///
    /// # Errors
    ///
    /// [`FrameError::Checksum`].
    pub fn check_crc(&self, crc: u64) -> Result<(), FrameError> {
        match crc == self.crc {
            true => Ok(()),
            false => Err(self.damaged()),
        }
    }

    fn damaged(&self) -> FrameError {
        FrameError::Checksum {
            what: "a block",
            bytes: self.bytes.into(),
        }
    }

    fn is_possible(&self) -> bool {
        let left = self.image_bytes.checked_sub(self.offset());
        let whole = left.is_some_and(|left| {
            left > 0 && u64::from(self.bytes) == left.min(u64::from(BLOCK_BYTES))
        });
        whole && self.model < MAX_MODELS && !self.version.is_none()
    }
}

/// How many blocks an image of this many bytes has.
///
/// # Errors
///
/// [`ImageError::TooLarge`] if the image is over 4 PiB, so that an index does not fit 32 bits.
pub fn blocks(image_bytes: u64) -> Result<u32, ImageError> {
    let blocks = image_bytes.div_ceil(BLOCK_BYTES.into());
    u32::try_from(blocks).map_err(|_| ImageError::TooLarge { bytes: image_bytes })
}
