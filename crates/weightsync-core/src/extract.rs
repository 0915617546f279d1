//! Extraction: a trainer's tensor is cast and made contiguous in one pass, straight into its
//! final place.

use weightsync_simd::{Float, cast_strided, gather, stream_copy_slice};

use crate::dtype::Dtype;
use crate::layout::MAX_RANK;

#[cfg(test)]
mod tests;
mod view;

/// A checked view of a tensor in borrowed memory: every element lies inside `data`.
///
/// ```
/// use weightsync_core::{Dtype, extract::TensorRef};
///
/// // A matrix of 2 x 3 in F32, read transposed and stored as BF16.
/// let matrix = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(f32::to_le_bytes).concat();
/// let transposed = TensorRef::strided(Dtype::F32, &[3, 2], &[1, 3], 0, &matrix)?;
/// let mut place = [0; 12];
/// transposed.write_into(&mut place, Dtype::BF16)?;
/// assert_eq!(place[..4], [0x80, 0x3f, 0x80, 0x40]); // 1.0, 4.0
/// # Ok::<(), weightsync_core::extract::ExtractError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorRef<'a> {
    dtype: Dtype,
    shape: &'a [u64],
    data: &'a [u8],
    /// The byte of `data` where the first element begins.
    start: usize,
    elements: usize,
    /// The dimensions that matter, outermost first: longer than 1, neighbours joined where they
    /// walk through memory as one.
    dims: Vec<Dim>,
}

/// A dimension of a walk through memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dim {
    /// Length in elements.
    len: usize,
    /// Bytes from one element to the next.
    stride: isize,
}

impl<'a> TensorRef<'a> {
    /// A contiguous row-major tensor that is all of `data`.
    ///
    /// # Errors
    ///
    /// [`ExtractError::TooLarge`] or [`ExtractError::PartialByte`] if `shape` is no shape of
    /// `dtype`, [`ExtractError::DataLength`] if `data` is longer or shorter.
    pub fn new(dtype: Dtype, shape: &'a [u64], data: &'a [u8]) -> Result<Self, ExtractError> {
        let bits = bits_of(dtype, shape)?;
        // A packed tensor is copied as bytes, so it must end on one.
        if !bits.is_multiple_of(8) {
            return Err(ExtractError::PartialByte { dtype, bits });
        }
        if bits / 8 != data.len() as u64 {
            return Err(ExtractError::DataLength {
                expected: bits / 8,
                got: data.len() as u64,
            });
        }
        let too_large = || ExtractError::TooLarge {
            dtype,
            shape: shape.to_vec(),
        };
        let elements = usize::try_from(bits / u64::from(dtype.bits())).map_err(|_| too_large())?;
        Ok(Self {
            dtype,
            shape,
            data,
            start: 0,
            elements,
            dims: Vec::new(),
        })
    }

    /// A tensor whose element at index (i, j, …) begins `offset + i * strides[0] + j * strides[1] +
    /// …` elements into `data`. Strides may be negative or 0.
    ///
    /// # Errors
    ///
    /// [`ExtractError::TooLarge`] if `shape` is no shape of `dtype`, [`ExtractError::StrideCount`] if
    /// there is not one stride per dimension, [`ExtractError::SubByte`] if elements are smaller than
    /// a byte, and [`ExtractError::OutOfBounds`] if an element lies outside `data`.
    pub fn strided(
        dtype: Dtype,
        shape: &'a [u64],
        strides: &[i64],
        offset: u64,
        data: &'a [u8],
    ) -> Result<Self, ExtractError> {
        let bits = bits_of(dtype, shape)?;
        if strides.len() != shape.len() {
            return Err(ExtractError::StrideCount {
                expected: shape.len(),
                got: strides.len(),
            });
        }
        // Strides count whole elements, and those below a byte have no address.
        let size = dtype.bytes().ok_or(ExtractError::SubByte { dtype })?;
        // A tensor without elements lies nowhere, so its strides and offset are not checked.
        if bits == 0 {
            return Ok(Self {
                dtype,
                shape,
                data,
                start: 0,
                elements: 0,
                dims: Vec::new(),
            });
        }

        // The place of every element is checked here, once for the whole tensor.
        let placed = extent(shape, strides, offset, size, data.len())
            .and_then(|start| Some((start, joined(shape, strides, size)?)));
        let (start, (elements, mut dims)) = placed.ok_or_else(|| ExtractError::OutOfBounds {
            dtype,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            offset,
            data: data.len() as u64,
        })?;
        // One row of neighbouring elements is a contiguous tensor, for which there are quicker
        // ways.
        if let [Dim { stride, .. }] = dims[..]
            && stride == size as isize
        {
            dims.clear();
        }
        Ok(Self {
            dtype,
            shape,
            data,
            start,
            elements,
            dims,
        })
    }

    /// The type of an element, where it is now.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Length of each dimension in elements, outermost first.
    pub fn shape(&self) -> &'a [u64] {
        self.shape
    }

    /// Whether the elements lie side by side in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.dims.is_empty()
    }

    /// The elements as they lie, if they lie side by side in row-major order.
    pub fn contiguous_bytes(&self) -> Option<&'a [u8]> {
        // From the elements, which were counted when the shape was checked.
        let len = (self.elements as u64 * u64::from(self.dtype.bits()) / 8) as usize;
        self.data
            .get(self.start..)?
            .get(..len)
            .filter(|_| self.is_contiguous())
    }

    /// Bytes that the tensor takes as `dtype`, contiguous.
    ///
    /// # Errors
    ///
    /// [`ExtractError::UnsupportedCast`] if it cannot be made `dtype`, [`ExtractError::TooLarge`] if
    /// the result does not fit 64 bits.
    pub fn bytes_as(&self, dtype: Dtype) -> Result<u64, ExtractError> {
        Conversion::between(self.dtype, dtype)?;
        Ok(bits_of(dtype, self.shape)? / 8)
    }

    /// Writes the elements into `dst` as `dtype`, contiguous and row-major, in one pass.
    ///
    /// `F64`, `F32`, `F16` and `BF16` are cast into each other as [`weightsync_simd::cast`] does,
    /// rounding to nearest even; every dtype can be written as itself. Large contiguous results go
    /// past the cache.
    ///
    /// # Errors
    ///
    /// [`ExtractError::UnsupportedCast`] for any other pair of dtypes, and
    /// [`ExtractError::DestinationLength`] if `dst` is not exactly [`bytes_as`](Self::bytes_as) long.
    /// Nothing has been written then.
    pub fn write_into(&self, dst: &mut [u8], dtype: Dtype) -> Result<(), ExtractError> {
        // All that can be refused comes before the first byte is written.
        let conversion = Conversion::between(self.dtype, dtype)?;
        let expected = bits_of(dtype, self.shape)? / 8;
        if dst.len() as u64 != expected {
            return Err(ExtractError::DestinationLength {
                expected,
                got: dst.len() as u64,
            });
        }
        match (conversion, &self.dims[..]) {
            _ if self.elements == 0 => {}
            // A large result goes past the cache, which it would only fill.
            (Conversion::Copy { .. }, []) => {
                stream_copy_slice(dst, &self.data[self.start..][..dst.len()]);
            }
            (Conversion::Cast { from, .. }, []) => {
                conversion.walk(dst, self.data, self.start, from.bytes() as isize);
            }
            (_, dims) => write_strided(conversion, dst, self.data, self.start, dims),
        }
        Ok(())
    }
}

/// Why a tensor cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtractError {
    /// The shape has too many dimensions, or its size in bits does not fit 64 bits.
    #[error("a tensor of {dtype} {shape:?} is too large, or has more than {MAX_RANK} dimensions")]
    TooLarge {
        /// The dtype.
        dtype: Dtype,
        /// The shape.
        shape: Vec<u64>,
    },

    /// A tensor of a sub-byte dtype does not end on a byte.
    #[error("{bits} bits of {dtype} are not a whole number of bytes; pad the last dimension")]
    PartialByte {
        /// The dtype.
        dtype: Dtype,
        /// The tensor's size in bits.
        bits: u64,
    },

    /// The data of a contiguous tensor is longer or shorter than its shape says.
    #[error("the tensor's data should be {expected} bytes, got {got}")]
    DataLength {
        /// Bytes by dtype and shape.
        expected: u64,
        /// Bytes given.
        got: u64,
    },

    /// There is not one stride per dimension.
    #[error("a tensor of {expected} dimensions needs {expected} strides, got {got}")]
    StrideCount {
        /// Dimensions of the shape.
        expected: usize,
        /// Strides given.
        got: usize,
    },

    /// An element of a strided tensor lies outside its data.
    #[error(
        "a view of {dtype} {shape:?} with strides {strides:?} from element {offset} leaves its {data} bytes of data"
    )]
    OutOfBounds {
        /// The dtype.
        dtype: Dtype,
        /// The shape.
        shape: Vec<u64>,
        /// The strides, in elements.
        strides: Vec<i64>,
        /// Where the first element is, in elements.
        offset: u64,
        /// Length of the data in bytes.
        data: u64,
    },

    /// Elements smaller than a byte have no address of their own.
    #[error(
        "{dtype} is packed below a byte and cannot be strided; make the tensor contiguous first"
    )]
    SubByte {
        /// The dtype.
        dtype: Dtype,
    },

    /// There is no cast between the two dtypes.
    #[error("{from} cannot be cast to {to}; F64, F32, F16 and BF16 cast into each other")]
    UnsupportedCast {
        /// The dtype of the tensor.
        from: Dtype,
        /// The dtype asked for.
        to: Dtype,
    },

    /// A view that the tensor does not have.
    #[error(
        "a tensor of {shape:?} has no view of {view:?} over its dimensions {order:?} from {starts:?}"
    )]
    NoSuchView {
        /// Shape of the tensor.
        shape: Vec<u64>,
        /// The tensor's dimension behind each dimension of the view.
        order: Vec<usize>,
        /// The first element along each dimension of the tensor.
        starts: Vec<u64>,
        /// Shape of the view.
        view: Vec<u64>,
    },

    /// The place for the result is longer or shorter than the result.
    #[error("the result takes {expected} bytes, but its destination has {got}")]
    DestinationLength {
        /// Bytes of the result.
        expected: u64,
        /// Bytes of the place.
        got: u64,
    },
}

/// The conversion of each element.
#[derive(Clone, Copy, Debug)]
enum Conversion {
    Copy { size: usize },
    Cast { from: Float, to: Float },
}

impl Conversion {
    fn between(from: Dtype, to: Dtype) -> Result<Self, ExtractError> {
        if from == to {
            // Packed dtypes are copied as bytes; they are contiguous.
            return Ok(Self::Copy {
                size: from.bytes().unwrap_or(1) as usize,
            });
        }
        match (float(from), float(to)) {
            (Some(from), Some(to)) => Ok(Self::Cast { from, to }),
            _ => Err(ExtractError::UnsupportedCast { from, to }),
        }
    }

    /// Bytes of an element of the result.
    fn result_size(self) -> usize {
        match self {
            Self::Copy { size } => size,
            Self::Cast { to, .. } => to.bytes(),
        }
    }

    /// Fills `dst` with elements that lie `stride` bytes apart, the first at byte `first` of `src`.
    fn walk(self, dst: &mut [u8], src: &[u8], first: usize, stride: isize) {
        match self {
            Self::Copy { size } if stride == size as isize => {
                dst.copy_from_slice(&src[first..][..dst.len()]);
            }
            Self::Copy { size } => gather(dst, src, first, stride, size),
            Self::Cast { from, to } => cast_strided(to, dst, from, src, first, stride),
        }
    }
}

fn float(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::F64 => Some(Float::F64),
        Dtype::F32 => Some(Float::F32),
        Dtype::F16 => Some(Float::F16),
        Dtype::BF16 => Some(Float::Bf16),
        _ => None,
    }
}

fn bits_of(dtype: Dtype, shape: &[u64]) -> Result<u64, ExtractError> {
    let bits = if shape.len() <= MAX_RANK {
        dtype.bits_of(shape)
    } else {
        None
    };
    bits.ok_or_else(|| ExtractError::TooLarge {
        dtype,
        shape: shape.to_vec(),
    })
}

/// How many elements there are, and the dimensions by which they are visited: neighbours that make one
/// longer row are joined. `None` if they are more, or further apart, than memory can be.
fn joined(shape: &[u64], strides: &[i64], size: u32) -> Option<(usize, Vec<Dim>)> {
    let mut dims: Vec<Dim> = Vec::new();
    let mut elements = 1_usize;
    // A dimension of one element never moves, so its stride may be anything.
    for (&len, &stride) in shape.iter().zip(strides).filter(|&(&len, _)| len > 1) {
        // What lies inside the data is addressed by `usize` and `isize`; what repeats itself, by a
        // stride of 0, may be longer than memory.
        let len = usize::try_from(len).ok()?;
        elements = elements.checked_mul(len)?;
        let stride = (stride as isize).checked_mul(size as isize)?;
        // An outer dimension whose step is the whole of the inner one walks on where that ends.
        match dims.last_mut() {
            Some(outer) if stride.checked_mul(len as isize) == Some(outer.stride) => {
                *outer = Dim {
                    len: outer.len * len,
                    stride,
                };
            }
            _ => dims.push(Dim { len, stride }),
        }
    }
    Some((elements, dims))
}

/// The byte of the first element, if all elements of a view that has any lie inside `data` bytes.
fn extent(shape: &[u64], strides: &[i64], offset: u64, size: u32, data: usize) -> Option<usize> {
    // In 128 bits, which hold the reach of any dimension.
    let (mut low, mut high) = (i128::from(offset), i128::from(offset));
    for (&len, &stride) in shape.iter().zip(strides) {
        let reach = i128::from(len - 1).checked_mul(i128::from(stride))?;
        // A negative stride reaches below the first element, any other at or above it.
        let end = if reach < 0 { &mut low } else { &mut high };
        *end = end.checked_add(reach)?;
    }
    // The end of the highest element, not its beginning.
    let end = (high.checked_add(1)?).checked_mul(i128::from(size))?;
    if low < 0 || end > data as i128 {
        return None;
    }
    usize::try_from(offset.checked_mul(u64::from(size))?).ok()
}

/// Elements of a tile along the dimension that is dense in the destination.
const TILE_COLUMNS: usize = 64;

/// Bytes of a tile's column, along the dimension that is dense in the source: long, because each
/// column is likely to be on a page of its own, and short enough for a tile to fit the first-level
/// cache.
const TILE_COLUMN_BYTES: usize = 512;

/// Bytes from one column of a tile to the next, unlike a power of two, so that a row of the tile
/// spreads over the cache.
const TILE_PITCH: usize = TILE_COLUMN_BYTES + LINE;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Writes a view of one or more dimensions, innermost last, row by row of its result.
///
/// If the elements of a row are far apart, but those of some outer dimension share cache lines (a
/// transpose), the two dimensions are taken tile by tile: a tile is read, and cast, along the source's
/// lines into a buffer and written along the destination's, so every line is visited once, and lines that
/// a large stride maps to the same few sets of the cache do not have to stay there.
// Longer than a screen: the loops over tiles are hot, and each uses the sizes that all the lines
// before them work out.
fn write_strided(conversion: Conversion, dst: &mut [u8], src: &[u8], start: usize, dims: &[Dim]) {
    let to_size = conversion.result_size();
    let Some((&row, outer)) = dims.split_last() else {
        return;
    };
    let row_bytes = row.len * to_size;
    // The outer dimension whose neighbours share cache lines, if those of the row do not.
    let dense = outer
        .iter()
        .enumerate()
        .min_by_key(|(_, dim)| dim.stride.unsigned_abs())
        .filter(|(_, dim)| dim.stride.unsigned_abs() < row.stride.unsigned_abs().min(LINE))
        .map(|(index, _)| index);
    let Some(dense) = dense else {
        // No order of the source is better, so the result is written front to back.
        let mut rows = dst.chunks_exact_mut(row_bytes);
        for_each_index(outer, start, |first| {
            if let Some(result) = rows.next() {
                conversion.walk(result, src, first, row.stride);
            }
        });
        return;
    };

    let mut tile = [0; TILE_PITCH * TILE_COLUMNS];
    let dense_dim = outer[dense];
    // Bytes between results that are neighbours along each outer dimension.
    let pitches: Vec<usize> = (0..outer.len())
        .map(|index| {
            outer[index + 1..]
                .iter()
                .map(|dim| dim.len)
                .product::<usize>()
                * row_bytes
        })
        .collect();
    // The dimensions that are neither in the row nor along the tile's columns: a loop over tiles
    // for each of their indices.
    let others: Vec<(Dim, usize)> = (0..outer.len())
        .filter(|&index| index != dense)
        .map(|index| (outer[index], pitches[index]))
        .collect();
    // A tile holds results, which may be wider or narrower than the source's elements.
    let tile_rows = TILE_COLUMN_BYTES / to_size;
    for_each_place(&others, start, |first, place| {
        for top in (0..dense_dim.len).step_by(tile_rows) {
            let height = tile_rows.min(dense_dim.len - top);
            for left in (0..row.len).step_by(TILE_COLUMNS) {
                let width = TILE_COLUMNS.min(row.len - left);
                let corner = moved(moved(first, top, dense_dim.stride), left, row.stride);
                // In: column by column, along the source's lines, cast on the way.
                for (column, into) in tile.chunks_exact_mut(TILE_PITCH).take(width).enumerate() {
                    let into = &mut into[..height * to_size];
                    conversion.walk(
                        into,
                        src,
                        moved(corner, column, row.stride),
                        dense_dim.stride,
                    );
                }
                // Out: row by row, along the destination's lines.
                for line in 0..height {
                    let at = place + (top + line) * pitches[dense] + left * to_size;
                    let result = &mut dst[at..][..width * to_size];
                    gather(result, &tile, line * to_size, TILE_PITCH as isize, to_size);
                }
            }
        }
    });
}

/// Calls `each` with the byte of the source where every index of `dims` begins, in row-major order.
fn for_each_index(dims: &[Dim], start: usize, mut each: impl FnMut(usize)) {
    let with_places: Vec<(Dim, usize)> = dims.iter().map(|&dim| (dim, 0)).collect();
    for_each_place(&with_places, start, |first, _| each(first));
}

/// Calls `each` with the source's and the destination's byte of every index of `dims`, each given with
/// the bytes between neighbours in the destination, in row-major order.
fn for_each_place(dims: &[(Dim, usize)], start: usize, mut each: impl FnMut(usize, usize)) {
    let mut index = vec![0; dims.len()];
    let (mut first, mut place) = (start, 0);
    loop {
        each(first, place);
        // Count up as an odometer does, from the innermost dimension.
        let mut digit = dims.len();
        loop {
            let Some(inner) = digit.checked_sub(1) else {
                return;
            };
            digit = inner;
            let (dim, pitch) = dims[digit];
            index[digit] += 1;
            if index[digit] < dim.len {
                first = moved(first, 1, dim.stride);
                place += pitch;
                break;
            }
            // This dimension is through: back to its first element, and the next outer one counts
            // up.
            index[digit] = 0;
            first = moved(first, dim.len - 1, -dim.stride);
            place -= pitch * (dim.len - 1);
        }
    }
}

/// `at`, moved by some steps of `stride` bytes. All places of a checked view lie inside its data, so
/// nothing overflows; wrapping keeps a mistake from being more than a failed bounds check.
fn moved(at: usize, steps: usize, stride: isize) -> usize {
    at.wrapping_add_signed(stride.wrapping_mul(steps as isize))
}
