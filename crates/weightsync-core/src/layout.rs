//! The layout: a model's tensors, their order, and the place of each in a version's bytes.

mod codec;
mod mismatch;
mod serde_impl;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::mismatch::{DtypeDifference, LayoutMismatch, OrderDifference, ShapeDifference};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::hex;
use crate::index::NameIndex;

/// Every tensor begins at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 64;
/// The most tensors of one layout.
pub const MAX_TENSORS: usize = 4 << 20;
/// The most dimensions of one tensor.
pub const MAX_RANK: usize = 64;
/// The longest tensor name, in bytes.
pub const MAX_NAME_BYTES: usize = 4096;
/// The most bytes of one layout, padding included: 1 PiB.
pub const MAX_BYTES: u64 = 1 << 50;
/// The longest encoding of a layout, in bytes; no layout that can be built has a longer one.
pub const MAX_ENCODED_BYTES: usize = 256 << 20;

/// The ordered tensors of a model: name, dtype, shape and byte range of each.
///
/// The byte ranges follow from the rest: tensors lie in order, each at the next multiple of
/// [`ALIGNMENT`], and the bytes between them are zero. Two layouts are equal exactly if their
/// [`id`](Layout::id)s are. A clone shares its parent's memory.
///
/// ```
/// use weightsync_core::{Dtype, Layout};
///
/// let layout = Layout::new([
///     ("actor.0.weight".to_owned(), Dtype::BF16, vec![8, 4]),
///     ("actor.0.bias".to_owned(), Dtype::F32, vec![8]),
/// ])?;
/// assert_eq!(layout.tensors()[1].range.offset, 64);
/// assert_eq!(layout.bytes(), 128);
/// assert_eq!(layout.payload_bytes(), 64 + 32);
/// assert_eq!(layout.index_of("actor.0.bias"), Some(1));
/// assert_eq!(Layout::decode(&layout.encode())?, layout);
/// # Ok::<(), weightsync_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Layout(Arc<LayoutInner>);

struct LayoutInner {
    tensors: Vec<TensorSpec>,
    names: NameIndex,
    bytes: u64,
    payload_bytes: u64,
    id: LayoutId,
}

/// One tensor of a [`Layout`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TensorSpec {
    /// The dotted name, unique in its layout.
    pub name: String,
    /// The type of one element.
    pub dtype: Dtype,
    /// Length of each dimension in elements, outermost first; empty for a 0-d tensor.
    pub shape: Vec<u64>,
    /// Where its elements lie, row-major, counted from the start of the version's bytes.
    pub range: ByteRange,
}

/// A run of bytes: `len` of them from `offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ByteRange {
    /// The first byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}

/// The identity of a [`Layout`]: BLAKE3 of its [encoding](Layout::encode).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayoutId(#[serde(with = "hex")] pub [u8; 32]);

impl Layout {
    /// Lays out tensors, given as name, dtype and shape, in the order given.
    ///
    /// A layout without tensors has 0 bytes.
    ///
    /// # Errors
    /// [`Error::EmptyName`], [`Error::DuplicateName`], [`Error::TensorTooLarge`],
    /// [`Error::PartialByte`] (a sub-byte dtype that does not fill whole bytes), and
    /// [`Error::TooLarge`] above any of the bounds of this module.
    pub fn new(
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<u64>)>,
    ) -> Result<Self, Error> {
        let tensors = tensors.into_iter();
        let mut builder = LayoutBuilder::with_capacity(tensors.size_hint().0);
        for (name, dtype, shape) in tensors {
            builder.push(name, dtype, shape)?;
        }
        builder.finish()
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.0.tensors
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.0.tensors.len()
    }

    /// Whether there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.0.tensors.is_empty()
    }

    /// The position of a tensor in [`tensors`](Layout::tensors), found in constant time.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.0.names.find(name, |at| &self.0.tensors[at].name)
    }

    /// The tensor of a name, found in constant time.
    pub fn tensor(&self, name: &str) -> Option<&TensorSpec> {
        self.index_of(name).map(|index| &self.0.tensors[index])
    }

    /// Bytes of one version, padding included: a multiple of [`ALIGNMENT`].
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Bytes of all tensors, without padding.
    pub fn payload_bytes(&self) -> u64 {
        self.0.payload_bytes
    }

    /// The identity of this layout.
    pub fn id(&self) -> LayoutId {
        self.0.id
    }

    /// The gaps between and after the tensors, in order; they hold zeros in every version.
    ///
    /// ```
    /// use weightsync_core::{ByteRange, Dtype, Layout};
    ///
    /// let layout = Layout::new([("step".to_owned(), Dtype::I64, vec![])])?;
    /// assert_eq!(layout.padding().collect::<Vec<_>>(), [ByteRange { offset: 8, len: 56 }]);
    /// # Ok::<(), weightsync_core::Error>(())
    /// ```
    pub fn padding(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.0.tensors.iter().filter_map(|tensor| {
            let offset = tensor.range.end();
            let len = offset.next_multiple_of(ALIGNMENT) - offset;
            (len > 0).then_some(ByteRange { offset, len })
        })
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        // Clones share memory. Other equal layouts have one encoding, and so one id.
        Arc::ptr_eq(&self.0, &other.0) || self.id() == other.id()
    }
}

impl Eq for Layout {}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layout")
            .field("id", &self.id())
            .field("tensors", &self.len())
            .field("bytes", &self.bytes())
            .finish()
    }
}

impl ByteRange {
    /// The byte after the last one; stays at `u64::MAX` where that would overflow.
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Whether the range is empty.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The overlap of both ranges, if any.
    pub fn intersection(self, other: ByteRange) -> Option<ByteRange> {
        let offset = self.offset.max(other.offset);
        let end = self.end().min(other.end());
        (offset < end).then(|| ByteRange {
            offset,
            len: end - offset,
        })
    }

    /// These bytes of a buffer, or `None` if it is too short.
    pub fn of(self, bytes: &[u8]) -> Option<&[u8]> {
        bytes.get(self.indices()?)
    }

    /// These bytes of a buffer, or `None` if it is too short.
    pub fn of_mut(self, bytes: &mut [u8]) -> Option<&mut [u8]> {
        bytes.get_mut(self.indices()?)
    }

    /// The range as indices of a slice, or `None` if it cannot be addressed.
    pub fn indices(self) -> Option<Range<usize>> {
        let start = usize::try_from(self.offset).ok()?;
        let end = usize::try_from(self.offset.checked_add(self.len)?).ok()?;
        Some(start..end)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.offset, self.end())
    }
}

impl fmt::Display for LayoutId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for LayoutId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayoutId({self})")
    }
}

/// Checks and places one tensor after the other; every way to a layout ends here.
#[derive(Default)]
struct LayoutBuilder {
    tensors: Vec<TensorSpec>,
    bytes: u64,
    payload_bytes: u64,
}

impl LayoutBuilder {
    /// A builder with room for `count` tensors, as far as the caller can know.
    fn with_capacity(count: usize) -> Self {
        LayoutBuilder {
            tensors: Vec::with_capacity(count.min(MAX_TENSORS)),
            ..LayoutBuilder::default()
        }
    }

    fn push(&mut self, name: String, dtype: Dtype, shape: Vec<u64>) -> Result<(), Error> {
        let index = self.tensors.len();
        // Checked one by one: what comes may be from outside, and without end.
        within("tensors in a layout", index + 1, MAX_TENSORS)?;
        within("bytes in a tensor name", name.len(), MAX_NAME_BYTES)?;
        within("dimensions of a tensor", shape.len(), MAX_RANK)?;
        if name.is_empty() {
            return Err(Error::EmptyName { index });
        }
        let len = match tensor_bytes(dtype, &shape) {
            Ok(len) => len,
            Err(bits) => return Err(size_error(name, dtype, shape, bits)),
        };
        let offset = self.bytes;
        // Both are at most MAX_BYTES, far from overflow.
        self.bytes = (offset + len).next_multiple_of(ALIGNMENT);
        if self.bytes > MAX_BYTES {
            return Err(Error::TooLarge {
                what: "bytes of a layout",
                got: self.bytes,
                limit: MAX_BYTES,
            });
        }
        self.payload_bytes += len;
        self.tensors.push(TensorSpec {
            name,
            dtype,
            shape,
            range: ByteRange { offset, len },
        });
        Ok(())
    }

    fn finish(self) -> Result<Layout, Error> {
        let tensors = &self.tensors;
        // At the end, when the number of names is known: the table never grows.
        let mut names = NameIndex::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            if !names.insert(index, |at| &tensors[at].name) {
                return Err(Error::DuplicateName {
                    name: tensor.name.clone(),
                });
            }
        }
        let encoded = codec::encode(&self.tensors);
        within(
            "bytes in an encoded layout",
            encoded.len(),
            MAX_ENCODED_BYTES,
        )?;
        // The encoding is canonical, so its hash stands for the layout.
        let id = LayoutId(*blake3::hash(&encoded).as_bytes());
        Ok(Layout(Arc::new(LayoutInner {
            tensors: self.tensors,
            names,
            bytes: self.bytes,
            payload_bytes: self.payload_bytes,
            id,
        })))
    }
}

/// Size of a tensor in bytes; else its size in bits if that is not whole bytes, or `None` if it is
/// larger than any layout.
pub(crate) fn tensor_bytes(dtype: Dtype, shape: &[u64]) -> Result<u64, Option<u64>> {
    // In bits first: elements of some dtypes are smaller than a byte.
    let bits = dtype.bits_of(shape).ok_or(None)?;
    if bits / 8 > MAX_BYTES {
        Err(None)
    } else if !bits.is_multiple_of(8) {
        Err(Some(bits))
    } else {
        Ok(bits / 8)
    }
}

/// The error for what [`tensor_bytes`] refused.
pub(crate) fn size_error(name: String, dtype: Dtype, shape: Vec<u64>, bits: Option<u64>) -> Error {
    match bits {
        Some(bits) => Error::PartialByte {
            name,
            dtype,
            shape,
            bits,
        },
        None => Error::TensorTooLarge { name, dtype, shape },
    }
}

pub(crate) fn within(what: &'static str, got: usize, limit: usize) -> Result<(), Error> {
    if got > limit {
        return Err(Error::TooLarge {
            what,
            got: got as u64,
            limit: limit as u64,
        });
    }
    Ok(())
}
