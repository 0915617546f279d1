//! How the bytes of a span are read: the width of its elements, and the position of their
//! exponents.

use weightsync_simd::Exponents;

use crate::dtype::Dtype;
use crate::layout::Layout;

/// The width of a span's elements, and which of their bits are an exponent.
///
/// ```
/// use weightsync_core::{Dtype, delta::BitPattern};
///
/// let pattern = BitPattern::of(Dtype::BF16);
/// assert_eq!(pattern.width(), 2);
/// assert_eq!(pattern, BitPattern::of(Dtype::BF16));
/// assert_ne!(pattern, BitPattern::of(Dtype::F16));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BitPattern {
    /// Width in bytes: 1, 2, 4 or 8.
    width: u8,
    /// The lowest bit of the exponent.
    shift: u8,
    /// Bits of the exponent; 0 where there is none.
    exponent: u8,
}

impl BitPattern {
    /// The pattern of a dtype; those below eight bits are taken byte by byte.
    pub const fn of(dtype: Dtype) -> Self {
        let (width, shift, exponent) = match dtype {
            Dtype::BF16 => (2, 7, 8),
            Dtype::F16 => (2, 10, 5),
            Dtype::F32 | Dtype::C64 => (4, 23, 8),
            Dtype::F64 => (8, 52, 11),
            Dtype::F8_E5M2 | Dtype::F8_E5M2FNUZ => (1, 2, 5),
            Dtype::F8_E4M3 | Dtype::F8_E4M3FNUZ => (1, 3, 4),
            Dtype::I16 | Dtype::U16 => (2, 0, 0),
            Dtype::I32 | Dtype::U32 => (4, 0, 0),
            Dtype::I64 | Dtype::U64 => (8, 0, 0),
            Dtype::BOOL
            | Dtype::U8
            | Dtype::I8
            | Dtype::F8_E8M0
            | Dtype::F4
            | Dtype::F6_E2M3
            | Dtype::F6_E3M2 => (1, 0, 0),
        };
        Self {
            width,
            shift,
            exponent,
        }
    }

    /// The pattern in which the span that begins at byte `start` of a layout's image is coded: that
    /// of the dtype which has most bytes there. Both ends know the layout, so it does not travel.
    pub fn of_span(layout: &Layout, start: u64) -> Self {
        let end = layout.bytes().min(start.saturating_add(super::SPAN));
        let tensors = layout.tensors();
        // Tensors lie in order, so the first that reaches into the span is found by halving.
        let first = tensors.partition_point(|tensor| tensor.range.end() <= start);
        let mut bytes: Vec<(Self, u64)> = Vec::new();
        for tensor in tensors[first..].iter().take_while(|t| t.range.offset < end) {
            // Only what lies in this span; padding counts for no dtype.
            let here = tensor.range.end().min(end) - tensor.range.offset.max(start);
            let pattern = Self::of(tensor.dtype);
            match bytes.iter_mut().find(|(known, _)| *known == pattern) {
                Some((_, bytes)) => *bytes += here,
                None => bytes.push((pattern, here)),
            }
        }
        // Of equals the first: the order of the tensors decides, and nothing else.
        let most = bytes.iter().map(|(_, bytes)| *bytes).max();
        let of_most = bytes.iter().find(|(_, bytes)| Some(*bytes) == most);
        let pattern = of_most.map_or(Self::of(Dtype::U8), |(pattern, _)| *pattern);
        // A span is read as whole elements. Bytes always fit.
        match (end - start).is_multiple_of(u64::from(pattern.width)) {
            true => pattern,
            false => Self::of(Dtype::U8),
        }
    }

    /// The width of an element in bytes.
    pub const fn width(self) -> usize {
        self.width as usize
    }

    /// The exponent of an element, by its bits.
    #[inline(always)]
    pub(super) const fn exponent(self, bits: u64) -> u64 {
        bits >> self.shift & ((1 << self.exponent) - 1)
    }

    /// Classes below the exponent `top`.
    pub(super) const fn exponents(self, top: u64) -> Exponents {
        Exponents {
            shift: self.shift as u32,
            mask: self.top(),
            top,
        }
    }

    /// The highest exponent an element can have.
    pub(super) const fn top(self) -> u64 {
        (1 << self.exponent) - 1
    }
}
