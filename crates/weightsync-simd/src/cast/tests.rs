use proptest::prelude::*;

use super::*;
use crate::STREAM_THRESHOLD;
use crate::testing::{Arena, Noise, noise};

const FLOATS: [Float; 4] = [Float::F64, Float::F32, Float::F16, Float::Bf16];

fn cast_bytes(path: CastPath, to: Float, from: Float, src: &[u8]) -> Vec<u8> {
    let mut dst = vec![0; src.len() / from.bytes() * to.bytes()];
    cast_with(path, to, &mut dst, from, src);
    dst
}

/// Casts on every path and checks each element against `expected`.
fn check<T: Copy, R: PartialEq + std::fmt::Debug>(
    (from, to): (Float, Float),
    values: &[T],
    bytes: impl Fn(T) -> Vec<u8>,
    expected: impl Fn(T) -> R,
    result: impl Fn(&[u8]) -> R,
) {
    let src: Vec<u8> = values.iter().flat_map(|&value| bytes(value)).collect();
    for path in CastPath::available() {
        let dst = cast_bytes(path, to, from, &src);
        for (index, (&value, got)) in values.iter().zip(dst.chunks(to.bytes())).enumerate() {
            assert_eq!(
                result(got),
                expected(value),
                "{path:?} {from:?} to {to:?}, value {index}"
            );
        }
    }
}

fn u16_of(bytes: &[u8]) -> u16 {
    u16::from_le_bytes(bytes.try_into().unwrap())
}

fn u32_of(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().unwrap())
}

fn u64_of(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

#[test]
fn all_sixteen_bit_values_widen_as_in_half() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let le = |bits: u16| bits.to_le_bytes().to_vec();
    let f16 = |bits| f16::from_bits(bits);
    let bf16 = |bits| bf16::from_bits(bits);
    check(
        (Float::F16, Float::F32),
        &all,
        le,
        |b| f16(b).to_f32_const().to_bits(),
        u32_of,
    );
    check(
        (Float::F16, Float::F64),
        &all,
        le,
        |b| f16(b).to_f64_const().to_bits(),
        u64_of,
    );
    check(
        (Float::Bf16, Float::F32),
        &all,
        le,
        |b| bf16(b).to_f32_const().to_bits(),
        u32_of,
    );
    check(
        (Float::Bf16, Float::F64),
        &all,
        le,
        |b| bf16(b).to_f64_const().to_bits(),
        u64_of,
    );
}

#[test]
fn all_sixteen_bit_values_cross_over_as_in_half() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let le = |bits: u16| bits.to_le_bytes().to_vec();
    let to_bf16 = |bits| bf16::from_f32_const(f16::from_bits(bits).to_f32_const()).to_bits();
    let to_f16 = |bits| f16::from_f32_const(bf16::from_bits(bits).to_f32_const()).to_bits();
    check((Float::F16, Float::Bf16), &all, le, to_bf16, u16_of);
    check((Float::Bf16, Float::F16), &all, le, to_f16, u16_of);
}

/// Every sign and exponent, with the mantissas around every place where rounding turns.
fn telling_f32() -> Vec<f32> {
    let mut values = Vec::new();
    let mut noise = Noise(9).map(|word| word as u32 & 0x007f_ffff);
    for upper in 0..512_u32 {
        let turns = (0..24).flat_map(|bit| {
            let at = 1_u32 << bit;
            [
                at - 1,
                at,
                at + 1,
                3 * at - 1,
                3 * at,
                3 * at + 1,
                0x007f_ffff & !at,
            ]
        });
        for mantissa in turns.chain(noise.by_ref().take(24)) {
            values.push(f32::from_bits(upper << 23 | mantissa & 0x007f_ffff));
        }
    }
    values
}

#[test]
fn single_precision_casts_as_in_half() {
    let values = telling_f32();
    let le = |value: f32| value.to_le_bytes().to_vec();
    let widened = |value: f32| {
        let bits = u64::from(value.to_bits());
        if value.is_nan() {
            bits >> 31 << 63 | 0x7ff8 << 48 | (bits & 0x7f_ffff) << 29
        } else {
            f64::from(value).to_bits()
        }
    };
    check(
        (Float::F32, Float::Bf16),
        &values,
        le,
        |v| bf16::from_f32_const(v).to_bits(),
        u16_of,
    );
    check(
        (Float::F32, Float::F16),
        &values,
        le,
        |v| f16::from_f32_const(v).to_bits(),
        u16_of,
    );
    check((Float::F32, Float::F64), &values, le, widened, u64_of);
}

/// The values of [`telling_f32`], and their neighbours by a bit that only double precision has.
fn telling_f64() -> Vec<f64> {
    telling_f32()
        .into_iter()
        .step_by(3)
        .filter(|value| !value.is_nan())
        .flat_map(|value| {
            let bits = f64::from(value).to_bits();
            [
                bits,
                bits.wrapping_add(1),
                bits.saturating_sub(1),
                bits | 1 << 28,
                bits | 3 << 27,
            ]
        })
        .map(f64::from_bits)
        .chain([
            f64::MAX,
            f64::MIN_POSITIVE,
            -f64::MAX,
            f64::INFINITY,
            -0.0,
            5e-324,
            65520.0,
        ])
        .collect()
}

#[test]
fn double_precision_rounds_once() {
    let values = telling_f64();
    let le = |value: f64| value.to_le_bytes().to_vec();
    let single = |value: f64| {
        let bits = value.to_bits();
        if value.is_nan() {
            (bits >> 63 << 31) as u32 | 0x7fc0_0000 | (bits >> 29) as u32 & 0x3f_ffff
        } else {
            (value as f32).to_bits()
        }
    };
    check((Float::F64, Float::F32), &values, le, single, u32_of);

    // Nearest by search among all values of the format, in exact arithmetic of doubles.
    let f16_values: Vec<f64> = (0..=0x7c00)
        .map(|b| f16::from_bits(b).to_f64_const())
        .collect();
    let bf16_values: Vec<f64> = (0..=0x7f80)
        .map(|b| bf16::from_bits(b).to_f64_const())
        .collect();
    let values: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    check(
        (Float::F64, Float::F16),
        &values,
        le,
        |v| nearest(&f16_values, v),
        u16_of,
    );
    check(
        (Float::F64, Float::Bf16),
        &values,
        le,
        |v| nearest(&bf16_values, v),
        u16_of,
    );
}

/// The bits of the value nearest to `value` among `values`, ascending from 0 to infinity, where the
/// index is the bits; ties go to the even index.
fn nearest(values: &[f64], value: f64) -> u16 {
    let magnitude = value.abs();
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let above = values.partition_point(|&candidate| candidate < magnitude);
    if above == 0 || values[above] == magnitude {
        return sign | above as u16;
    }
    let below = values[above - 1];
    // What infinity stands for in rounding: the next value, had the exponent one more.
    let next = if values[above].is_finite() {
        values[above]
    } else {
        2.0 * below - values[above - 2]
    };
    // The sum is exact: both are multiples of a small power of two. So is its half.
    let middle = (below + next) / 2.0;
    let up = magnitude > middle || magnitude == middle && above.is_multiple_of(2);
    sign | (above - usize::from(!up)) as u16
}

#[test]
fn nans_stay_quiet_nans_with_sign_and_upper_payload() {
    for path in CastPath::available() {
        for (sign, payload) in [(0, 1), (1, 1 << 28), (0, 5 << 45), (1, (1 << 52) - 1)] {
            let nan = f64::from_bits(sign << 63 | 0x7ff << 52 | payload);
            let src = [nan.to_le_bytes(); 17].concat();
            for to in [Float::F32, Float::F16, Float::Bf16] {
                let (exponent, mantissa) = match to {
                    Float::F32 => (0x7f80_0000, 23),
                    Float::F16 => (0x7c00, 10),
                    _ => (0x7f80, 7),
                };
                let expected = sign << (8 * to.bytes() - 1)
                    | exponent
                    | 1 << (mantissa - 1)
                    | payload >> (52 - mantissa);
                for got in cast_bytes(path, to, Float::F64, &src).chunks(to.bytes()) {
                    let mut bits = [0; 8];
                    bits[..got.len()].copy_from_slice(got);
                    assert_eq!(
                        u64::from_le_bytes(bits),
                        expected,
                        "{path:?} {payload:x} to {to:?}"
                    );
                }
            }
        }
    }
}

/// Every pair of formats, every short length, every alignment, plain and streaming.
#[test]
fn paths_agree_at_every_length_and_alignment() {
    let check = |to: Float, from: Float, count: usize, dst_offset: usize, src_offset: usize| {
        let source = noise(src_offset + count * from.bytes(), 8);
        let source = &source[src_offset..];
        let expected = cast_bytes(CastPath::Scalar, to, from, source);
        for path in CastPath::available() {
            let mut arena = Arena::new(dst_offset, expected.len());
            cast_with(path, to, arena.bytes_mut(), from, source);
            let case = format!("{path:?} {from:?} to {to:?} {count} {dst_offset} {src_offset}");
            assert!(arena.bytes() == expected, "{case}");
            assert!(arena.guards_intact(), "wrote outside: {case}");
        }
    };
    for to in FLOATS {
        for from in FLOATS {
            for count in (0..300).step_by(if to == from { 7 } else { 1 }) {
                check(to, from, count, count % 64, (count * 7) % 64);
            }
            check(to, from, STREAM_THRESHOLD / to.bytes() + 5, 0, 3);
            check(to, from, STREAM_THRESHOLD / to.bytes() + 5, 2, 0);
        }
    }
}

proptest! {
    #[test]
    fn strided_casts_are_casts_of_the_elements_one_by_one(
        to in 0..4_usize, from in 0..4_usize,
        count in 0..200_usize, stride in -40..40_isize, slack in 0..9_usize, seed: u64,
    ) {
        let (to, from) = (FLOATS[to], FLOATS[from]);
        let reach = count.saturating_sub(1) * stride.unsigned_abs();
        let src = noise(reach + from.bytes() + 2 * slack, seed);
        let first = slack + if stride < 0 { reach } else { 0 };
        let mut dst = vec![0; count * to.bytes()];
        cast_strided(to, &mut dst, from, &src, first, stride);
        let mut gathered = vec![0; count * from.bytes()];
        gather(&mut gathered, &src, first, stride, from.bytes());
        for index in 0..count {
            let at = (first as isize + index as isize * stride) as usize;
            let element = &src[at..][..from.bytes()];
            prop_assert_eq!(&gathered[index * from.bytes()..][..from.bytes()], element);
            let expected = cast_bytes(CastPath::Scalar, to, from, element);
            prop_assert_eq!(&dst[index * to.bytes()..][..to.bytes()], &expected[..]);
        }
    }

    #[test]
    fn a_walk_that_leaves_the_source_is_refused(
        count in 1..20_usize, stride in -20..20_isize, first in 0..40_usize, len in 0..200_usize,
    ) {
        let last = first as isize + (count as isize - 1) * stride;
        let inside = last >= 0 && last.max(first as isize) + 4 <= len as isize;
        let src = vec![0; len];
        let walked = std::panic::catch_unwind(|| {
            gather(&mut vec![0; count * 4], &src, first, stride, 4);
        });
        prop_assert_eq!(walked.is_ok(), inside);
        let cast = std::panic::catch_unwind(|| {
            cast_strided(Float::F64, &mut vec![0; count * 8], Float::F32, &src, first, stride);
        });
        prop_assert_eq!(cast.is_ok(), inside);
    }
}
