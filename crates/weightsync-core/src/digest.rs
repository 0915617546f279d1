//! The digest: one identity for the bytes of a version, wherever they are held.
//!
//! The digest is defined over the *image* of a version: every tensor at its offset in the
//! layout, with zeros in between. Each 64-byte line of the image is hashed with its index, and
//! the hashes are added. The image's length is hashed as one more line.
//! [`weightsync_simd::digest_lines`] has the hash and the reasons for it. So any thread can
//! take the tensors in any order, and a delta updates the digest by its changes. A digest tells
//! versions apart; it does not protect against forgery.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use weightsync_simd::{LINE_BYTES, digest_add, digest_lines};

use crate::hex;
use crate::layout::Layout;

#[cfg(test)]
mod tests;

/// The digest of one version's bytes.
///
/// Its serde form is also its form in messages of weightsync-net: golden files hold the bytes.
///
/// ```
/// use weightsync_core::{Dtype, Layout, digest::Digest};
///
/// let layout = Layout::new([
///     ("weight".to_owned(), Dtype::F32, vec![2, 3]),
///     ("bias".to_owned(), Dtype::F32, vec![3]),
/// ])?;
/// let mut image = vec![0; layout.bytes() as usize];
/// let digest = Digest::of(&layout, &image)?;
/// assert_eq!(digest.to_string().parse(), Ok(digest));
///
/// image[5] = 1;
/// assert_ne!(Digest::of(&layout, &image)?, digest);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(#[serde(with = "hex")] pub [u8; 16]);

impl Digest {
    /// The digest of `image`, in which `layout`'s tensors lie at their offsets.
    ///
    /// Bytes between tensors count as zero, as in every layout, and are not read.
    ///
    /// # Errors
    ///
    /// [`DigestError::ImageLength`] if the image has not the layout's length.
    pub fn of(layout: &Layout, image: &[u8]) -> Result<Self, DigestError> {
        let expected = layout.bytes();
        let wrong_length = DigestError::ImageLength {
            expected,
            got: image.len() as u64,
        };
        if image.len() as u64 != expected {
            return Err(wrong_length);
        }
        let mut digester = Digester::new(expected);
        for tensor in layout.tensors() {
            let bytes = tensor.range.of(image).ok_or(wrong_length.clone())?;
            // Padding is fed by no tensor. `tensor` counts the rest of each last line as zeros.
            digester.tensor(tensor.range.offset, bytes)?;
        }
        digester.finish()
    }

    /// The digest after a change of the image whose lines changed their sum by `delta`, as
    /// [`weightsync_simd::digest_line_delta`] gives it.
    ///
    /// ```
    /// use weightsync_core::digest::Digester;
    /// use weightsync_simd::digest_line_delta;
    ///
    /// let digest_of = |image: &[u8]| {
    ///     let mut digester = Digester::new(128);
    ///     digester.tensor(0, image)?;
    ///     digester.finish()
    /// };
    /// let old = digest_of(&[[1; 64], [2; 64]].concat())?;
    /// let new = digest_of(&[[1; 64], [3; 64]].concat())?;
    /// assert_eq!(old.changed_by(digest_line_delta(&[2; 64], &[3; 64], 1)), new);
    /// # Ok::<(), weightsync_core::digest::DigestError>(())
    /// ```
    pub fn changed_by(self, delta: [u64; 2]) -> Self {
        Self::from_sum(digest_add(self.sum(), delta))
    }

    fn from_sum([low, high]: [u64; 2]) -> Self {
        Self((u128::from(low) | u128::from(high) << 64).to_le_bytes())
    }

    fn sum(self) -> [u64; 2] {
        let whole = u128::from_le_bytes(self.0);
        [whole as u64, (whole >> 64) as u64]
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(&self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        hex::decode(text).map(Self).ok_or(DigestError::NotHex)
    }
}

/// Makes the digest of an image from its parts, in any order.
///
/// Several threads can each feed one of their own, all made for the same image, and
/// [`merge`](Self::merge) them.
///
/// ```
/// use weightsync_core::digest::Digester;
///
/// let (weight, bias) = ([1_u8; 100], [2_u8; 8]);
/// let mut one = Digester::new(192);
/// one.tensor(128, &bias)?;
/// let mut other = Digester::new(192);
/// other.tensor(0, &weight)?;
/// one.merge(&other)?;
/// let digest = one.finish()?;
/// assert_eq!(digest.to_string().len(), 32);
/// # Ok::<(), weightsync_core::digest::DigestError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Digester {
    bytes: u64,
    /// Lines fed so far.
    lines: u64,
    sum: [u64; 2],
}

impl Digester {
    /// A digester for an image of `layout_bytes` bytes, before any byte is fed.
    pub fn new(layout_bytes: u64) -> Self {
        Self {
            bytes: layout_bytes,
            lines: 0,
            sum: [0; 2],
        }
    }

    /// Feeds the bytes of a tensor, or of a part of one, that begin at `offset` of the image.
    ///
    /// Bytes up to the next multiple of 64 count as zero and as fed; so a tensor may be cut at
    /// multiples of 64 only, and every line must be fed exactly once.
    ///
    /// # Errors
    ///
    /// [`DigestError::Unaligned`] if `offset` is not a multiple of 64, [`DigestError::Outside`] if
    /// the bytes reach past the image.
    pub fn tensor(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DigestError> {
        // A line is hashed whole, with its number, so no two parts may share one.
        if !offset.is_multiple_of(LINE) {
            return Err(DigestError::Unaligned { offset });
        }
        let len = bytes.len() as u64;
        // Lines beyond the image would count for lines that were never fed.
        if offset.checked_add(len).is_none_or(|end| end > self.bytes) {
            return Err(DigestError::Outside {
                offset,
                len,
                image: self.bytes,
            });
        }
        self.sum = digest_add(self.sum, digest_lines(bytes, offset / LINE));
        // Only the number is kept: a line that is fed twice instead of another one is not noticed
        // here.
        self.lines += len.div_ceil(LINE);
        Ok(())
    }

    /// Takes in what another digester of the same image was fed.
    ///
    /// # Errors
    ///
    /// [`DigestError::ImageLength`] if the other one is for an image of another length.
    pub fn merge(&mut self, other: &Self) -> Result<(), DigestError> {
        if self.bytes != other.bytes {
            return Err(DigestError::ImageLength {
                expected: self.bytes,
                got: other.bytes,
            });
        }
        self.sum = digest_add(self.sum, other.sum);
        // A sum that saturates cannot equal the number of lines, so `finish` refuses it.
        self.lines = self.lines.saturating_add(other.lines);
        Ok(())
    }

    /// The digest.
    ///
    /// # Errors
    ///
    /// [`DigestError::Lines`] if more or fewer lines were fed than the image has.
    pub fn finish(self) -> Result<Digest, DigestError> {
        let expected = self.bytes.div_ceil(LINE);
        if self.lines != expected {
            return Err(DigestError::Lines {
                expected,
                got: self.lines,
            });
        }
        // The length is a line of its own, so that trailing zeros change the digest.
        let length = digest_lines(&self.bytes.to_le_bytes(), LENGTH_INDEX);
        Ok(Digest::from_sum(digest_add(self.sum, length)))
    }
}

/// Why there is no digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// The text of a digest is not what [`Digest`]'s `Display` writes.
    #[error("expected a digest of 32 hexadecimal digits")]
    NotHex,

    /// An image, or the image of a digester to be merged, is not as long as it should be.
    #[error("expected an image of {expected} bytes, got {got}")]
    ImageLength {
        /// The length by the layout, in bytes.
        expected: u64,
        /// The length found, in bytes.
        got: u64,
    },

    /// A part does not begin at a line.
    #[error("a part begins at byte {offset}, which is not a multiple of 64")]
    Unaligned {
        /// Where the part begins.
        offset: u64,
    },

    /// A part reaches past the image.
    #[error("{len} bytes from byte {offset} reach past the image of {image} bytes")]
    Outside {
        /// Where the part begins.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The image's length in bytes.
        image: u64,
    },

    /// Some lines were never fed, or some were fed twice.
    #[error("the image has {expected} lines of 64 bytes, {got} were fed; feed each tensor once")]
    Lines {
        /// Lines of the image.
        expected: u64,
        /// Lines that were fed.
        got: u64,
    },
}

const LINE: u64 = LINE_BYTES as u64;

/// The index under which the length is hashed, beyond that of any line.
const LENGTH_INDEX: u64 = (1 << 62) - 1;
