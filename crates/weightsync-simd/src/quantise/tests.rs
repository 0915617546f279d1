use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

/// The value of an E4M3 number, by the definition of the format.
fn value(number: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(number >> 3 & 15), f64::from(number & 7));
    let sign = if number < 128 { 1.0 } else { -1.0 };
    match (exponent, number & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * mantissa / 8.0 * 2.0_f64.powi(-6),
        _ => sign * (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
    }
}

/// The nearest E4M3 number, by a search of all that there are.
fn nearest(wanted: f32) -> u8 {
    if wanted.is_nan() {
        return 0x7f;
    }
    let sign = if wanted.is_sign_negative() { 128 } else { 0 };
    let wanted = f64::from(wanted.abs()).min(448.0);
    // Of two that are as near, the even one.
    let key = |number: &u8| ((value(*number) - wanted).abs(), number & 1);
    let all = (0..0x7f).min_by(|a, b| key(a).partial_cmp(&key(b)).expect("numbers"));
    all.expect("some") | sign
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Quantises on every path and compares with the slow references.
fn check(values: &[f32], scale: f32) {
    let src = bytes(values);
    for path in QuantisePath::available() {
        let (mut fp8, mut int8) = (vec![0; values.len()], vec![0; values.len()]);
        e4m3_with(path, &mut fp8, &src, scale);
        i8_with(path, &mut int8, &src, scale);
        for (at, &one) in values.iter().enumerate() {
            let one = one / scale;
            assert_eq!(fp8[at], nearest(one), "{path:?} {one:e} as E4M3");
            let integer = one.round_ties_even() as i8;
            assert_eq!(int8[at].cast_signed(), integer, "{path:?} {one:e} as I8");
        }
        let largest = values.iter().fold(0.0_f32, |largest, one| {
            if one.is_nan() || largest.is_nan() {
                f32::NAN
            } else {
                largest.max(one.abs())
            }
        });
        let got = amax_with(path, &src);
        assert!(
            got == largest || got.is_nan() && largest.is_nan(),
            "{path:?} {got} {largest}"
        );
    }
}

#[test]
fn all_sixteen_bit_values_round_to_the_nearest() {
    let bf16s: Vec<_> = (0..=u16::MAX)
        .map(|bits| bf16::from_bits(bits).to_f32_const())
        .collect();
    let f16s: Vec<_> = (0..=u16::MAX)
        .map(|bits| f16::from_bits(bits).to_f32_const())
        .collect();
    for scale in [1.0, 0.037] {
        check(&bf16s, scale);
        check(&f16s, scale);
    }
}

#[test]
fn all_ties_and_their_neighbours_round_to_the_nearest() {
    let mut values = Vec::new();
    for number in 0..0x7e_u8 {
        let tie = ((value(number) + value(number + 1)) / 2.0) as f32;
        for one in [tie.next_down(), tie, tie.next_up(), value(number) as f32] {
            values.extend([one, -one]);
        }
    }
    values.extend((-1030..1030).flat_map(|eighths| {
        let one = eighths as f32 / 8.0;
        [one.next_down(), one, one.next_up()]
    }));
    check(&values, 1.0);
}

#[test]
fn lengths_that_no_vector_divides_are_whole() {
    let values: Vec<f32> = (0..70).map(|at| (at as f32 - 30.0) * 1.37).collect();
    for len in 0..values.len() {
        check(&values[..len], 1.0);
    }
}

proptest! {
    /// Any bits, by any scale.
    #[test]
    fn any_bits_round_to_the_nearest(bits in prop::collection::vec(any::<u32>(), 0..200), scale in any::<u32>()) {
        let values: Vec<_> = bits.into_iter().map(f32::from_bits).collect();
        check(&values, f32::from_bits(scale));
    }
}
