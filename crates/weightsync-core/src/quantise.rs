//! Quantisation: eight-bit values of a matrix, and the scales by which they are multiplied to get
//! the matrix back.

use serde::{Deserialize, Serialize};
use weightsync_simd::{amax, quantise_e4m3, quantise_i8};

use crate::dtype::Dtype;

/// How a matrix is quantised.
///
/// Each value is `w / scale` as `F32`, kept within the range of the new dtype and rounded to nearest,
/// ties to even. A scale is the largest magnitude of the values that share it, divided by
/// [`divisor`](Self::divisor); where that is 0 it is [`f32::EPSILON`], as compressed-tensors has it,
/// and the values are 0. A NaN among the values makes their scale NaN and all of them NaN (0 in
/// `I8`); an infinity makes their scale infinite, itself NaN, and the finite values 0. That is what
/// the same operations do in torch.
///
/// ```
/// use weightsync_core::quantise::Quantisation;
///
/// let source = [1.0_f32, -2.0, 0.5].map(f32::to_le_bytes).concat();
/// let scale = Quantisation::Fp8.scale_of(&source);
/// assert_eq!(scale, 2.0 / 448.0);
/// let mut values = [0; 3];
/// Quantisation::Fp8.quantise(&mut values, &source, scale);
/// assert_eq!(values, [0x76, 0xfe, 0x6e]); // 224, -448, 112
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Quantisation {
    /// `F8_E4M3` with one scale for each matrix: `[1]`.
    Fp8,
    /// `F8_E4M3` with one scale for each block of the matrix: `[rows / block rows, columns / block
    /// columns]`, both rounded up. Blocks at the edges may be smaller.
    Fp8Blocks {
        /// Rows of a block, at least 1.
        rows: u64,
        /// Columns of a block, at least 1.
        columns: u64,
    },
    /// `I8` with one scale for each row, which is an output channel: `[rows, 1]`.
    Int8,
}

impl Quantisation {
    /// The dtype of the values.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Fp8 | Self::Fp8Blocks { .. } => Dtype::F8_E4M3,
            Self::Int8 => Dtype::I8,
        }
    }

    /// What the largest magnitude is divided by: 448 for `F8_E4M3`, and 127.5 for `I8`, whose values
    /// reach from -128 to 127.
    pub const fn divisor(self) -> f32 {
        match self {
            Self::Fp8 | Self::Fp8Blocks { .. } => 448.0,
            Self::Int8 => 127.5,
        }
    }

    /// Rows and columns of the values that share a scale, in a matrix of `rows` and `columns`; at
    /// least 1 of each.
    pub fn block(self, rows: u64, columns: u64) -> [u64; 2] {
        let block = match self {
            Self::Fp8 => [rows, columns],
            Self::Fp8Blocks { rows, columns } => [rows, columns],
            Self::Int8 => [1, columns],
        };
        block.map(|len| len.max(1))
    }

    /// The shape of the scales of a tensor, or `None` if it is neither a matrix nor a stack of
    /// matrices. Each matrix of a stack has its own: a stack of three has `[3]` scales by
    /// [`Fp8`](Self::Fp8).
    pub fn scales_shape(self, shape: &[u64]) -> Option<Vec<u64>> {
        let (stack, rows, columns) = match *shape {
            [rows, columns] => (None, rows, columns),
            [stack, rows, columns] => (Some(stack), rows, columns),
            _ => return None,
        };
        let [block_rows, block_columns] = self.block(rows, columns);
        let mut scales: Vec<u64> = stack.into_iter().collect();
        match self {
            // One scale for each matrix: the stack's dimension alone is the shape.
            Self::Fp8 if stack.is_some() => {}
            Self::Fp8 => scales.push(1),
            Self::Fp8Blocks { .. } => {
                scales.extend([rows.div_ceil(block_rows), columns.div_ceil(block_columns)])
            }
            Self::Int8 => scales.extend([rows, 1]),
        }
        Some(scales)
    }

    /// The scale for a largest magnitude.
    pub fn scale_for(self, magnitude: f32) -> f32 {
        match magnitude / self.divisor() {
            // The largest magnitude is 0, or too small for a scale. Division by 0 would give NaN or
            // an infinity.
            0.0 => f32::EPSILON,
            scale => scale,
        }
    }

    /// The scale of `F32` values that lie together.
    ///
    /// # Panics
    ///
    /// If `source` is not a whole number of elements.
    pub fn scale_of(self, source: &[u8]) -> f32 {
        self.scale_for(magnitude(source))
    }

    /// Writes `F32` values that share a scale.
    ///
    /// # Panics
    ///
    /// If `place` has not one byte for each element of `source`.
    pub fn quantise(self, place: &mut [u8], source: &[u8], scale: f32) {
        match self {
            Self::Fp8 | Self::Fp8Blocks { .. } => quantise_e4m3(place, source, scale),
            Self::Int8 => quantise_i8(place, source, scale),
        }
    }
}

/// The largest magnitude of `F32` values, 0 if there are none, or NaN.
///
/// # Panics
///
/// If `source` is not a whole number of elements.
pub fn magnitude(source: &[u8]) -> f32 {
    amax(source)
}

/// The larger of two magnitudes; a NaN is larger than any number.
pub fn larger(left: f32, right: f32) -> f32 {
    if left.is_nan() || left > right {
        left
    } else {
        right
    }
}
