//! How far it is from one bit pattern to another, in units in the last place (ULPs).
//!
//! The patterns of a dtype's numbers are put on a line, in the order of their values, each in a
//! place of its own: so a change never has a step of 0, and from 0.0 to -0.0 it is 1. A NaN has no
//! place on the line. The line of integers is that of their values.

use weightsync_engine::Dtype;

/// The line of a dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Bytes of a number: 1, 2, 4 or 8.
    pub width: usize,
    pub unit: Unit,
    order: BitOrder,
}

/// What is compared one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    Element,
    /// The real and the imaginary part of a complex number, each compared alone.
    Part,
    /// Bytes in which numbers of fewer bits are packed.
    Byte,
}

/// From one pattern to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UlpStep {
    /// So many places further, in either direction.
    By(u64),
    ToNan,
    FromNan,
    /// From one NaN to one of other bits.
    BetweenNans,
    /// The bits are no number.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BitOrder {
    /// A sign and a magnitude; one above `top` is a NaN.
    Float { top: u64 },
    /// The same, but what would be a negative zero is the only NaN.
    OneZero,
    /// Two's complement.
    Signed,
    /// A value above `top` is a NaN.
    Unsigned { top: u64 },
    /// Bytes that are no numbers.
    Packed,
}

impl Scale {
    pub fn of(dtype: Dtype) -> Self {
        let order = match dtype {
            // The magnitude of infinity, where there is one.
            Dtype::F8_E5M2 => BitOrder::Float { top: 0x7c },
            Dtype::F16 => BitOrder::Float { top: 0x7c00 },
            Dtype::BF16 => BitOrder::Float { top: 0x7f80 },
            Dtype::F32 | Dtype::C64 => BitOrder::Float { top: 0x7f80_0000 },
            Dtype::F64 => BitOrder::Float {
                top: 0x7ff0_0000_0000_0000,
            },
            Dtype::F8_E4M3 => BitOrder::Float { top: 0x7e },
            Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ => BitOrder::OneZero,
            // An exponent and nothing else: the next one is twice as much.
            Dtype::F8_E8M0 => BitOrder::Unsigned { top: 0xfe },
            Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => BitOrder::Signed,
            Dtype::BOOL | Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => {
                BitOrder::Unsigned { top: u64::MAX }
            }
            _ => BitOrder::Packed,
        };
        let (width, unit) = match (dtype, order) {
            // A complex number has no order, so its parts are compared.
            (Dtype::C64, _) => (4, Unit::Part),
            (_, BitOrder::Packed) => (1, Unit::Byte),
            _ => (dtype.bits() as usize / 8, Unit::Element),
        };
        Self { width, unit, order }
    }

    /// The step between two patterns that differ.
    #[inline]
    pub fn step(self, old: u64, new: u64) -> UlpStep {
        // Packed numbers share bytes, so a byte is no number.
        if self.order == BitOrder::Packed {
            return UlpStep::Unknown;
        }
        match (self.place(old), self.place(new)) {
            (Some(old), Some(new)) => UlpStep::By(old.abs_diff(new)),
            (Some(_), None) => UlpStep::ToNan,
            (None, Some(_)) => UlpStep::FromNan,
            (None, None) => UlpStep::BetweenNans,
        }
    }

    /// The place on the line, unless it is a NaN.
    #[inline]
    fn place(self, bits: u64) -> Option<u64> {
        // The sign bit is also the middle of the line.
        let sign = 1 << (8 * self.width - 1);
        let (negative, magnitude) = (bits & sign != 0, bits & !sign);
        match self.order {
            BitOrder::Float { top } if magnitude > top => None,
            // Below the middle, mirrored: the largest magnitude is farthest down. -0.0 gets a place
            // of its own next to 0.0.
            BitOrder::Float { .. } if negative => Some(sign - 1 - magnitude),
            BitOrder::OneZero if bits == sign => None,
            BitOrder::OneZero if negative => Some(sign - magnitude),
            BitOrder::Float { .. } | BitOrder::OneZero => Some(sign + magnitude),
            // Flipping the sign bit puts two's complement in the order of the values.
            BitOrder::Signed => Some(bits ^ sign),
            BitOrder::Unsigned { top } => (bits <= top).then_some(bits),
            BitOrder::Packed => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn steps_are_counted_on_the_line() {
        use UlpStep::{BetweenNans, By, FromNan, ToNan, Unknown};
        let bf = |value: f32| u64::from(bf16::from_f32(value).to_bits());
        let half = |value: f32| u64::from(f16::from_f32(value).to_bits());
        let float = |value: f32| u64::from(value.to_bits());
        for (dtype, old, new, expected) in [
            (Dtype::BF16, bf(1.0), bf(1.0) + 1, By(1)),
            // Across a power of two.
            (Dtype::BF16, bf(2.0), bf(2.0) - 1, By(1)),
            (Dtype::BF16, bf(0.0), bf(-0.0), By(1)),
            // The smallest numbers of either sign, and both zeros between them.
            (Dtype::BF16, 0x8001, 0x0001, By(3)),
            (Dtype::BF16, bf(1.0), bf(-1.0), By(2 * 0x3f80 + 1)),
            // From the largest number to infinity.
            (Dtype::BF16, 0x7f7f, 0x7f80, By(1)),
            (Dtype::BF16, bf(1.0), 0x7fc0, ToNan),
            (Dtype::BF16, 0xff81, bf(1.0), FromNan),
            (Dtype::BF16, 0x7fc0, 0xffc1, BetweenNans),
            (Dtype::F16, half(1.0), half(2.0), By(0x400)),
            (Dtype::F16, 0x7c00, 0x7c01, ToNan),
            (Dtype::F32, float(-0.0), float(0.0), By(1)),
            (Dtype::F32, 0xff80_0000, 0x7f80_0000, By(0xff00_0001)),
            (Dtype::C64, float(1.0), float(1.0) + 7, By(7)),
            (Dtype::F64, 1_f64.to_bits(), 2_f64.to_bits(), By(1 << 52)),
            (Dtype::F64, u64::MAX, 0, FromNan),
            (Dtype::F8_E5M2, 0x7b, 0x7c, By(1)),
            (Dtype::F8_E5M2, 0x7c, 0x7d, ToNan),
            (Dtype::F8_E4M3, 0x7e, 0x7f, ToNan),
            (Dtype::F8_E4M3, 0x80, 0x00, By(1)),
            (Dtype::F8_E4M3FNUZ, 0x81, 0x00, By(1)),
            (Dtype::F8_E5M2FNUZ, 0x80, 0x00, FromNan),
            (Dtype::F8_E5M2FNUZ, 0x00, 0x7f, By(127)),
            (Dtype::F8_E8M0, 0x7f, 0x81, By(2)),
            (Dtype::F8_E8M0, 0xfe, 0xff, ToNan),
            (Dtype::I8, 0xff, 0x01, By(2)),
            (Dtype::I32, 0x8000_0000, 0x7fff_ffff, By(u32::MAX.into())),
            (Dtype::I64, 1 << 63, (1 << 63) - 1, By(u64::MAX)),
            (Dtype::U8, 0xff, 0x01, By(254)),
            (Dtype::U64, 0, u64::MAX, By(u64::MAX)),
            (Dtype::BOOL, 0, 1, By(1)),
            (Dtype::F4, 0x12, 0x13, Unknown),
        ] {
            let got = Scale::of(dtype).step(old, new);
            assert_eq!(got, expected, "{dtype} {old:#x} → {new:#x}");
            let back = match expected {
                ToNan => FromNan,
                FromNan => ToNan,
                same => same,
            };
            assert_eq!(Scale::of(dtype).step(new, old), back, "{dtype}, back");
        }
    }

    #[test]
    fn ulp_positions_are_distinct_and_ordered_by_value() {
        let narrow = Dtype::ALL.iter().filter(|dtype| dtype.bits() <= 16);
        for &dtype in narrow {
            let scale = Scale::of(dtype);
            let mut taken = std::collections::HashSet::new();
            let mut numbers: Vec<(u64, f64)> = Vec::new();
            for bits in 0..1_u64 << (8 * scale.width) {
                let Some(place) = scale.place(bits) else {
                    continue;
                };
                assert!(taken.insert(place), "{dtype} {bits:#x}");
                let value = match dtype {
                    Dtype::BF16 => bf16::from_bits(bits as u16).to_f64(),
                    Dtype::F16 => f16::from_bits(bits as u16).to_f64(),
                    Dtype::I8 => f64::from(bits as u8 as i8),
                    Dtype::I16 => f64::from(bits as u16 as i16),
                    Dtype::U8 | Dtype::U16 => bits as f64,
                    _ => continue,
                };
                assert!(!value.is_nan(), "{dtype} {bits:#x}");
                numbers.push((place, value));
            }
            numbers.sort_by_key(|&(place, _)| place);
            for pair in numbers.windows(2) {
                assert!(pair[0].1 <= pair[1].1, "{dtype} {pair:?}");
            }
            // Every pattern that has no place is a NaN.
            let floats = match dtype {
                Dtype::BF16 => 2 * 0x7f81,
                Dtype::F16 => 2 * 0x7c01,
                _ => numbers.len(),
            };
            assert_eq!(numbers.len(), floats, "{dtype}");
        }
    }
}
