use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

/// Bytes that look random and differ from place to place.
fn noise(len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// The elements of a view one by one, in row-major order, by the definition of strides.
fn elements(shape: &[u64], strides: &[i64], offset: u64, size: usize, data: &[u8]) -> Vec<u8> {
    let count: u64 = shape.iter().product();
    let mut result = Vec::new();
    for number in 0..count {
        let mut rest = number;
        let mut at = offset as i64;
        for (&len, &stride) in shape.iter().zip(strides).rev() {
            at += (rest % len) as i64 * stride;
            rest /= len;
        }
        result.extend_from_slice(&data[at as usize * size..][..size]);
    }
    result
}

/// Extracts a view and compares it with its elements, cast as one contiguous tensor.
fn check(from: Dtype, to: Dtype, shape: &[u64], strides: &[i64], offset: u64, data: &[u8]) {
    let tensor = TensorRef::strided(from, shape, strides, offset, data).unwrap();
    let mut got = vec![0xee; tensor.bytes_as(to).unwrap() as usize];
    tensor.write_into(&mut got, to).unwrap();

    let size = from.bytes().unwrap() as usize;
    let contiguous = elements(shape, strides, offset, size, data);
    let mut expected = vec![0xdd; got.len()];
    TensorRef::new(from, shape, &contiguous)
        .unwrap()
        .write_into(&mut expected, to)
        .unwrap();
    assert!(
        got == expected,
        "{from} to {to}, {shape:?} {strides:?} {offset}"
    );
}

/// Row-major strides of a shape.
fn row_major(shape: &[u64]) -> Vec<i64> {
    (0..shape.len())
        .map(|index| shape[index + 1..].iter().product::<u64>() as i64)
        .collect()
}

#[test]
fn contiguous_tensors_of_every_dtype_are_copied() {
    for &dtype in Dtype::ALL {
        for shape in [&[][..], &[0], &[4], &[8, 0, 3], &[16, 3], &[1, 8, 1]] {
            let Some(bits) = dtype.bits_of(shape).filter(|bits| bits.is_multiple_of(8)) else {
                continue;
            };
            let data = noise(bits as usize / 8);
            let tensor = TensorRef::new(dtype, shape, &data).unwrap();
            assert!(tensor.is_contiguous());
            assert_eq!(tensor.bytes_as(dtype), Ok(data.len() as u64));
            let mut place = vec![0; data.len()];
            tensor.write_into(&mut place, dtype).unwrap();
            assert_eq!(place, data, "{dtype} {shape:?}");
        }
    }
}

#[test]
fn large_contiguous_tensors_are_copied_and_cast() {
    let values: Vec<f32> = (0..600_000).map(|at| (at as f32).sin() * 3.0e4).collect();
    let data: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let shape = [600, 1000];
    let tensor = TensorRef::new(Dtype::F32, &shape, &data).unwrap();
    let mut same = vec![0; data.len()];
    tensor.write_into(&mut same, Dtype::F32).unwrap();
    assert!(same == data);
    let mut halves = vec![0; data.len() / 2];
    tensor.write_into(&mut halves, Dtype::BF16).unwrap();
    assert!(
        halves
            .iter()
            .copied()
            .eq(values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()))
    );
    tensor.write_into(&mut halves, Dtype::F16).unwrap();
    assert!(
        halves
            .iter()
            .copied()
            .eq(values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()))
    );
}

/// Every order of three dimensions, around the sizes of tiles, forwards and backwards, in each cast.
#[test]
fn permuted_and_reversed_views_are_their_elements() {
    const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16];
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for base in [[3, 65, 33], [2, 64, 32], [1, 130, 7], [40, 1, 70]] {
        let data = noise(base.iter().product::<u64>() as usize * 8);
        let strides = row_major(&base);
        for order in orders {
            let shape = order.map(|index| base[index]);
            let permuted = order.map(|index| strides[index]);
            let backwards = permuted.map(|stride| -stride);
            let last = base.iter().product::<u64>() - 1;
            for dtype in [Dtype::U8, Dtype::I16, Dtype::U32, Dtype::C64] {
                check(dtype, dtype, &shape, &permuted, 0, &data);
                check(dtype, dtype, &shape, &backwards, last, &data);
            }
            for from in FLOATS {
                for to in FLOATS {
                    check(from, to, &shape, &permuted, 0, &data);
                }
            }
        }
    }
}

#[test]
fn views_that_walk_memory_in_order_are_recognised() {
    let data = noise(4 * (4 + 2 * 3 * 5));
    let cases: [(&[u64], &[i64], bool); 7] = [
        (&[2, 3, 5], &[15, 5, 1], true),
        (&[2, 1, 15], &[15, 99, 1], true),
        (&[], &[], true),
        (&[1], &[-7], true),
        (&[0, 9], &[1000, 1000], true),
        (&[3, 2], &[1, 3], false),
        (&[5], &[-1], false),
    ];
    for (shape, strides, contiguous) in cases {
        let tensor = TensorRef::strided(Dtype::F32, shape, strides, 4, &data).unwrap();
        assert_eq!(tensor.is_contiguous(), contiguous, "{shape:?} {strides:?}");
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, shape));
    }
}

#[test]
fn a_broadcast_element_is_repeated() {
    check(Dtype::F32, Dtype::BF16, &[70, 40], &[0, 0], 1, &noise(8));
    check(Dtype::F32, Dtype::F32, &[70, 40], &[0, 1], 0, &noise(160));
    check(Dtype::F32, Dtype::F32, &[70, 40], &[1, 0], 0, &noise(280));
}

#[test]
fn casts_between_other_dtypes_are_refused_by_name() {
    let data = noise(24);
    for &from in Dtype::ALL {
        let shape = [8 * 24 / u64::from(from.bits())];
        let tensor = TensorRef::new(from, &shape, &data).unwrap();
        for &to in Dtype::ALL {
            let allowed = from == to || (float(from).is_some() && float(to).is_some());
            let mut place = vec![0; 64];
            let refused = Err(ExtractError::UnsupportedCast { from, to });
            assert_eq!(
                tensor.write_into(&mut place, to) == refused,
                !allowed,
                "{from} to {to}"
            );
            assert_eq!(tensor.bytes_as(to).is_ok(), allowed, "{from} to {to}");
        }
    }
    let error = ExtractError::UnsupportedCast {
        from: Dtype::I64,
        to: Dtype::BF16,
    };
    assert!(error.to_string().starts_with("I64 cannot be cast to BF16"));
}

#[test]
fn extract_refuses_wrong_lengths_and_shapes() {
    let data = [0; 24];
    let refused = |result: Result<TensorRef<'_>, ExtractError>| result.unwrap_err();
    assert_eq!(
        refused(TensorRef::new(Dtype::F32, &[2, 4], &data)),
        ExtractError::DataLength {
            expected: 32,
            got: 24
        }
    );
    assert_eq!(
        refused(TensorRef::new(Dtype::F4, &[3], &data)),
        ExtractError::PartialByte {
            dtype: Dtype::F4,
            bits: 12
        }
    );
    assert_eq!(
        refused(TensorRef::strided(Dtype::F4, &[2], &[1], 0, &data)),
        ExtractError::SubByte { dtype: Dtype::F4 }
    );
    assert_eq!(
        refused(TensorRef::strided(Dtype::F32, &[2, 3], &[3], 0, &data)),
        ExtractError::StrideCount {
            expected: 2,
            got: 1
        }
    );
    for shape in [&[1 << 40, 1 << 40][..], &[1; MAX_RANK + 1]] {
        let too_large = ExtractError::TooLarge {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
        };
        assert_eq!(refused(TensorRef::new(Dtype::F32, shape, &data)), too_large);
    }
    let tensor = TensorRef::new(Dtype::F32, &[6], &data).unwrap();
    assert_eq!(
        tensor.write_into(&mut [0; 24], Dtype::BF16),
        Err(ExtractError::DestinationLength {
            expected: 12,
            got: 24
        })
    );
}

#[test]
fn views_that_leave_their_data_are_refused() {
    let data = [0; 24];
    let cases: [(&[u64], &[i64], u64); 10] = [
        (&[7], &[1], 0),
        (&[6], &[1], 1),
        (&[2], &[-1], 0),
        (&[6], &[-1], 4),
        (&[2, 2], &[3, 3], 0),
        (&[], &[], 6),
        (&[1], &[1], u64::MAX),
        (&[2], &[i64::MAX], 0),
        (&[2], &[i64::MIN], 0),
        (
            &[1 << 19, 1 << 19, 1 << 19],
            &[i64::MAX, i64::MAX, i64::MIN],
            3,
        ),
    ];
    for (shape, strides, offset) in cases {
        let refused = TensorRef::strided(Dtype::F32, shape, strides, offset, &data);
        let expected = ExtractError::OutOfBounds {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            offset,
            data: 24,
        };
        assert_eq!(refused.unwrap_err(), expected);
    }
}

proptest! {
    /// Any view is either refused, exactly when an element lies outside, or is its elements.
    #[test]
    fn any_view_is_its_elements_or_is_refused(
        dims in prop::collection::vec((0..9_u64, -20..20_i64), 0..5),
        offset in 0..600_u64,
        len in 0..6000_usize,
        dtypes in prop::sample::select(vec![
            (Dtype::U8, Dtype::U8), (Dtype::BF16, Dtype::BF16), (Dtype::F32, Dtype::BF16),
            (Dtype::BF16, Dtype::F64), (Dtype::F64, Dtype::F16), (Dtype::I64, Dtype::I64),
        ]),
    ) {
        let (from, to) = dtypes;
        let (shape, strides): (Vec<u64>, Vec<i64>) = dims.into_iter().unzip();
        let data = noise(len);
        let size = i128::from(from.bytes().unwrap());
        let reach = |sign: i64| -> i128 {
            let reaches = shape.iter().zip(&strides).filter(|&(_, &stride)| stride * sign > 0);
            reaches.map(|(&len, &stride)| (i128::from(len) - 1) * i128::from(stride)).sum()
        };
        let low = i128::from(offset) + reach(-1);
        let high = i128::from(offset) + reach(1);
        let inside = shape.contains(&0) || (low >= 0 && (high + 1) * size <= len as i128);
        let tensor = TensorRef::strided(from, &shape, &strides, offset, &data);
        prop_assert_eq!(tensor.is_ok(), inside);
        if inside {
            check(from, to, &shape, &strides, offset, &data);
        }
    }

    /// No shape and no strides, however wild, do more than be refused.
    #[test]
    fn wild_views_never_panic(
        shape in prop::collection::vec(any::<u64>(), 0..5),
        strides in prop::collection::vec(any::<i64>(), 0..5),
        offset: u64,
        dtype in prop::sample::select(Dtype::ALL),
    ) {
        let data = noise(64);
        for tensor in [
            TensorRef::new(dtype, &shape, &data),
            TensorRef::strided(dtype, &shape, &strides, offset, &data),
        ].into_iter().flatten() {
            if tensor.bytes_as(dtype).is_ok_and(|bytes| bytes <= 1 << 20) {
                let mut place = vec![0; tensor.bytes_as(dtype).unwrap() as usize];
                prop_assert_eq!(tensor.write_into(&mut place, dtype), Ok(()));
            }
        }
    }
}
