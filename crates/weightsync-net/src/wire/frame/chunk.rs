//! The head of a chunk: which part of an image it is.

use weightsync_core::Version;

use super::*;

/// Which bytes come behind a chunk's frame.
///
/// | bytes | |
/// |---|---|
/// | 0 | model |
/// | 1..8 | zeros |
/// | 8..16 | version |
/// | 16..20 | index of the chunk: it begins at `index` × [`CHUNK`] of the image |
/// | 20..24 | bytes of the chunk |
/// | 24..32 | CRC-64/NVME of them |
/// | 32..40 | bytes of the whole image |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHead {
    /// The model's index, below [`MAX_MODELS`].
    pub model: u8,
    /// The version, from 1.
    pub version: Version,
    /// Which chunk of the image, from 0.
    pub index: u32,
    /// How many bytes follow: [`CHUNK`], or what is left of the image.
    pub bytes: u32,
    /// Their checksum.
    pub crc: u64,
    /// Bytes of the whole image.
    pub image_bytes: u64,
}

impl ChunkHead {
    /// Where the chunk begins in the image, in bytes.
    pub fn offset(&self) -> u64 {
        u64::from(self.index) * u64::from(CHUNK)
    }

    /// The whole frame: what to send before the chunk's bytes.
    pub fn frame(&self) -> [u8; HEADER_BYTES + CHUNK_HEAD_BYTES] {
        let mut payload = [0; CHUNK_HEAD_BYTES];
        payload[0] = self.model;
        payload[8..16].copy_from_slice(&self.version.0.to_le_bytes());
        payload[16..20].copy_from_slice(&self.index.to_le_bytes());
        payload[20..24].copy_from_slice(&self.bytes.to_le_bytes());
        payload[24..32].copy_from_slice(&self.crc.to_le_bytes());
        payload[32..].copy_from_slice(&self.image_bytes.to_le_bytes());
        let mut frame = [0; HEADER_BYTES + CHUNK_HEAD_BYTES];
        frame[..HEADER_BYTES].copy_from_slice(&header(Kind::Chunk, &payload));
        frame[HEADER_BYTES..].copy_from_slice(&payload);
        frame
    }

    /// Reads the payload of a chunk's frame.
    ///
    /// # Errors
    ///
    /// [`FrameError::Length`] if it is no head's, [`FrameError::Zeros`], and [`FrameError::Chunk`]
    /// for a model, a version or a place in the image that cannot be.
    pub fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let bytes: &[u8; CHUNK_HEAD_BYTES] = head_of(Kind::Chunk, payload)?;
        let word = |at| number(bytes, at);
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
            false => Err(FrameError::Chunk { head }),
        }
    }

    /// Whether these are the bytes that were sent.
    ///
    /// # Errors
    ///
    /// [`FrameError::Checksum`].
    pub fn check(&self, chunk: &[u8]) -> Result<(), FrameError> {
        match chunk.len() as u64 == u64::from(self.bytes) {
            true => self.check_crc(weightsync_simd::crc64(chunk)),
            false => Err(self.damaged()),
        }
    }

    /// The same, of a checksum that was made while the bytes were copied.
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
            what: "a chunk",
            bytes: self.bytes.into(),
        }
    }

    fn is_possible(&self) -> bool {
        let left = self.image_bytes.checked_sub(self.offset());
        let whole = left
            .is_some_and(|left| left > 0 && u64::from(self.bytes) == left.min(u64::from(CHUNK)));
        whole && self.model < MAX_MODELS && !self.version.is_none()
    }
}

/// How many chunks an image of this many bytes has.
///
/// # Errors
///
/// [`FrameError::Image`] if they are more than an index can name: the image is over 4 PiB.
pub fn chunks(image_bytes: u64) -> Result<u32, FrameError> {
    let chunks = image_bytes.div_ceil(CHUNK.into());
    u32::try_from(chunks).map_err(|_| FrameError::Image { bytes: image_bytes })
}
