//! Rules that quantise.

use half::bf16;
use proptest::prelude::*;

use super::*;

/// A matrix quantised the slow way, block by block.
fn slowly(to: Quantisation, shape: &[u64], values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let [.., rows, columns] = *shape else {
        panic!("{shape:?}")
    };
    let [block_rows, block_columns] = to.block(rows, columns);
    let across = columns.div_ceil(block_columns);
    let per_matrix = (rows.div_ceil(block_rows) * across).max(u64::from(rows * columns == 0));
    let count = to.scales_shape(shape).unwrap().iter().product::<u64>() as usize;
    let block = |at: usize| {
        let at = at as u64;
        let (row, column) = (at / columns % rows, at % columns);
        let matrix = at / (rows * columns) * per_matrix;
        (matrix + row / block_rows * across + column / block_columns) as usize
    };
    let mut magnitudes = vec![0.0_f32; count];
    for (at, value) in values.iter().enumerate() {
        magnitudes[block(at)] = magnitudes[block(at)].max(value.abs());
    }
    let scales: Vec<_> = magnitudes.iter().map(|&one| to.scale_for(one)).collect();
    let mut bytes = vec![0; values.len()];
    for (at, value) in values.iter().enumerate() {
        to.quantise(&mut bytes[at..=at], &value.to_le_bytes(), scales[block(at)]);
    }
    (bytes, scales)
}

/// Numbers of many magnitudes.
fn noise(len: u64, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..len)
        .map(|_| next() * 10.0_f32.powi((next() * 6.0) as i32))
        .collect()
}

proptest! {
    /// Whatever the kind of source and the rules before it, on either side.
    #[test]
    fn quantising_is_what_it_is_block_by_block(
        shape in prop::collection::vec(0_u64..40, 2..=3),
        to in prop_oneof![
            Just(Quantisation::Fp8),
            Just(Quantisation::Int8),
            proptest::strategy::Strategy::prop_map(
                (1_u64..20, 1_u64..20),
                |(rows, columns)| Quantisation::Fp8Blocks { rows, columns },
            ),
        ],
        turn in any::<bool>(),
        half in any::<bool>(),
        cut in 0_u64..40,
        seed in any::<u64>(),
    ) {
        let dims = shape.len();
        let mut values = noise(shape.iter().product(), seed);
        let mut source = Tensors::new();
        // Two parts along the rows, or the same transposed.
        let [rows, columns] = [shape[dims - 2], shape[dims - 1]];
        let lens = [cut.min(rows), rows - cut.min(rows)];
        let stack = if dims == 3 { shape[0] } else { 1 };
        if half {
            values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
        }
        let mut order: Vec<usize> = (0..dims).collect();
        order.swap(dims - 2, dims - 1);
        for (name, start, len) in [("a", 0, lens[0]), ("b", lens[0], lens[1])] {
            let mut own = Vec::new();
            for matrix in 0..stack {
                let at = |row: u64, column: u64| {
                    values[((matrix * rows + start + row) * columns + column) as usize]
                };
                match turn {
                    false => own.extend((0..len * columns).map(|one| at(one / columns, one % columns))),
                    true => own.extend((0..len * columns).map(|one| at(one % len, one / len))),
                }
            }
            let mut own_shape = shape.clone();
            own_shape[dims - 2] = len;
            if turn {
                own_shape.swap(dims - 2, dims - 1);
            }
            match half {
                true => source.insert(name, own_shape, own.into_iter().map(bf16::from_f32).collect::<Vec<_>>()).unwrap(),
                false => source.insert(name, own_shape, own).unwrap(),
            }
        }
        let mut mapping = Mapping::new();
        if turn {
            mapping = mapping.transpose("*", order).unwrap();
        }
        let mapping = mapping
            .fuse(["a", "b"], "w", dims - 2)
            .and_then(|mapping| mapping.cast("*", Dtype::F64))
            .and_then(|mapping| mapping.quantise("*", to, Some("{}.s")))
            .and_then(|mapping| mapping.cast("*", Dtype::BF16))
            .and_then(|mapping| mapping.rename("w.s", "s"))
            .unwrap();
        let (bytes, scales) = slowly(to, &shape, &values);
        for out in [mapped(&mapping, &source), mapped(&mapping, &Behind(&source)), loaded(&mapping, &source)] {
            prop_assert_eq!(out.names().collect::<Vec<_>>(), ["w", "s"]);
            prop_assert_eq!(out.tensor("w").unwrap().dtype(), to.dtype());
            prop_assert_eq!(out.tensor("w").unwrap().bytes(), &bytes[..]);
            prop_assert_eq!(out.slice::<f32>("s").unwrap(), &scales[..]);
            // Scales without their values are the same.
            let alone = mapped(&mapping.clone().drop("w").unwrap(), &source);
            prop_assert_eq!(alone.slice::<f32>("s").unwrap(), &scales[..]);
        }
    }
}

#[test]
fn parts_of_a_split_are_quantised_apart() {
    let values = noise(6 * 10, 3);
    let mut source = Tensors::new();
    source.insert("w", [6, 10], values.clone()).unwrap();
    for (dim, lens) in [(0, [2, 4]), (1, [4, 6])] {
        let mapping = Mapping::new()
            .split("w", [("a", lens[0]), ("b", lens[1])], dim)
            .and_then(|mapping| mapping.quantise("*", Quantisation::Int8, None))
            .unwrap();
        let mut start = 0;
        for (name, len) in ["a", "b"].into_iter().zip(lens) {
            let inside = |at: &usize| {
                let at = [at / 10, at % 10][dim] as u64;
                start <= at && at < start + len
            };
            let part: Vec<_> = (0..60).filter(inside).map(|at| values[at]).collect();
            let mut shape = [6, 10];
            shape[dim] = len;
            let (bytes, scales) = slowly(Quantisation::Int8, &shape, &part);
            for out in [mapped(&mapping, &source), loaded(&mapping, &source)] {
                assert_eq!(out.tensor(name).unwrap().bytes(), bytes, "{name}");
                let own = out.slice::<f32>(&format!("{name}_scale")).unwrap();
                assert_eq!(own, scales, "{name}");
            }
            start += len;
        }
    }
}

#[test]
fn large_tensors_are_quantised_tile_by_tile() {
    let shape = [300, 1000];
    let values = noise(shape.iter().product(), 7);
    let mut source = Tensors::new();
    source.insert("w", shape, values.clone()).unwrap();
    for to in [
        Quantisation::Fp8,
        Quantisation::Int8,
        Quantisation::Fp8Blocks {
            rows: 128,
            columns: 128,
        },
        Quantisation::Fp8Blocks {
            rows: 1,
            columns: 999,
        },
        // As large as a block can be: larger than the matrix.
        Quantisation::Fp8Blocks {
            rows: 1024,
            columns: 1024,
        },
    ] {
        let mapping = Mapping::new().quantise("w", to, None).unwrap();
        let (bytes, scales) = slowly(to, &shape, &values);
        let out = mapped(&mapping, &source);
        let made = layout(&out);
        let [values, own_scales] = made.tensors() else {
            panic!()
        };
        assert_eq!(out.tensor(&values.name).unwrap().bytes(), bytes, "{to:?}");
        assert_eq!(
            out.slice::<f32>(&own_scales.name).unwrap(),
            scales,
            "{to:?}"
        );
    }
}

#[test]
fn quantising_nothing_ends() {
    let blocks = Quantisation::Fp8Blocks {
        rows: 128,
        columns: 128,
    };
    for shape in [&[1 << 62, 0][..], &[0, 1 << 62], &[0, 1 << 31, 1 << 31]] {
        for to in [blocks, Quantisation::Fp8] {
            let source = tensors(&[("w", shape)]);
            let mapping = Mapping::new().quantise("w", to, None).unwrap();
            for out in [mapped(&mapping, &source), loaded(&mapping, &source)] {
                assert!(out.tensor("w").unwrap().bytes().is_empty());
            }
        }
    }
}

#[test]
fn scales_are_named_and_listed() {
    let mut source = tensors(&[
        ("l.0.q_proj.weight", &[4, 6]),
        ("l.0.norm.weight", &[6]),
        ("e", &[2, 3]),
    ]);
    source.insert("ids", [2, 2], [1_i64; 4]).unwrap();
    let blocks = Quantisation::Fp8Blocks {
        rows: 3,
        columns: 4,
    };
    let mapping = Mapping::new()
        .quantise("l.*.weight", blocks, None)
        .and_then(|mapping| mapping.quantise("*", Quantisation::Int8, None))
        .unwrap();
    let made = mapping.layout(&layout(&source)).unwrap();
    let kinds: Vec<_> = made
        .tensors()
        .iter()
        .map(|one| (&*one.name, one.dtype, &*one.shape))
        .collect();
    assert_eq!(
        kinds,
        [
            ("l.0.q_proj.weight", Dtype::F8_E4M3, &[4, 6][..]),
            ("l.0.q_proj.weight_scale_inv", Dtype::F32, &[2, 2]),
            ("l.0.norm.weight", Dtype::F32, &[6]),
            ("e", Dtype::I8, &[2, 3]),
            ("e_scale", Dtype::F32, &[2, 1]),
            ("ids", Dtype::I64, &[2, 2]),
        ]
    );
    let run = mapping.dry_run(&layout(&source), &made);
    assert!(run.is_complete(), "{run}");
    assert!(
        run.to_string().contains(
            "\"l.0.q_proj.weight\" -> l.0.q_proj.weight, l.0.q_proj.weight_scale_inv (rule 1)"
        ),
        "{run}"
    );
    let rules: Vec<_> = mapping.rules().iter().map(ToString::to_string).collect();
    assert_eq!(
        rules,
        [
            "quantise l.*.weight to fp8 by blocks of 3 x 4, scales as {}_scale_inv",
            "quantise * to int8, scales as {}_scale"
        ]
    );
    let json = serde_json::to_string(&mapping).unwrap();
    assert_eq!(serde_json::from_str::<Mapping>(&json).unwrap(), mapping);
    let none = Mapping::new()
        .quantise("l.*.norm.weight", blocks, None)
        .unwrap();
    assert_eq!(none.dry_run(&layout(&source), &made).unused.len(), 1);
}

#[test]
fn rules_that_cannot_follow_a_quantisation_are_named() {
    let source = tensors(&[("a", &[2, 3]), ("b", &[2, 3]), ("bias", &[3])]);
    let source = layout(&source);
    let fp8 = || {
        Mapping::new()
            .quantise("a", Quantisation::Fp8, None)
            .unwrap()
    };
    let by =
        "is made by the quantising rule 1, and can then only be renamed or dropped: put rule 2";
    let cases = [
        (
            fp8().fuse(["a", "b"], "c", 0),
            format!("rule 2: \"a\" {by}"),
        ),
        (
            fp8().split("a", [("c", 1), ("d", 1)], 0),
            format!("\"a\" {by}"),
        ),
        (fp8().transpose("a", [1, 0]), format!("\"a\" {by}")),
        (
            fp8().cast("a_scale", Dtype::BF16),
            format!("\"a_scale\" {by}"),
        ),
        (
            fp8().quantise("a", Quantisation::Int8, None),
            format!("\"a\" {by}"),
        ),
        (
            fp8().quantise("bias", Quantisation::Int8, None),
            "rule 2: \"bias\" is F32 [3] and cannot be quantised: expected a floating-point matrix"
                .to_owned(),
        ),
        (
            fp8().rename("b", "a_scale"),
            "would be named \"a_scale\"".to_owned(),
        ),
    ];
    for (mapping, expected) in cases {
        let error = mapping.unwrap().layout(&source).unwrap_err();
        assert!(error.to_string().contains(&expected), "{error}\n{expected}");
    }
    let blocks = Quantisation::Fp8Blocks {
        rows: 0,
        columns: 1,
    };
    for (to, scale) in [
        (blocks, None),
        (Quantisation::Fp8, Some("scale")),
        (Quantisation::Fp8, Some("{}")),
        (Quantisation::Fp8, Some("{}.{}")),
    ] {
        let error = Mapping::new().quantise("a", to, scale).unwrap_err();
        assert!(matches!(error, MappingError::BadRule { .. }), "{error}");
    }
    for [rows, columns] in [[1, (1 << 20) + 1], [1025, 1024], [u64::MAX, u64::MAX]] {
        let blocks = Quantisation::Fp8Blocks { rows, columns };
        let error = Mapping::new().quantise("a", blocks, None).unwrap_err();
        let expected = "a block has at most 1048576 values: make it smaller, or leave";
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn quantised_ties_stay_ties() {
    let data = [0_u8; 32];
    let mut source = StateDict::new();
    for name in ["embed", "head"] {
        source
            .lend(name, TensorRef::new(Dtype::F32, &[2, 4], &data).unwrap())
            .unwrap();
    }
    let mapping = Mapping::new()
        .quantise("*", Quantisation::Int8, None)
        .unwrap();
    let ties = mapping.extract(&source).ties().unwrap();
    let tied = |alias: &str, of: &str| (alias.to_owned(), of.to_owned());
    assert_eq!(
        ties,
        [tied("head", "embed"), tied("head_scale", "embed_scale")]
    );
    let differ = mapping.rename("head", "x").unwrap();
    assert_eq!(differ.extract(&source).ties().unwrap().len(), 2);
    let one = Mapping::new()
        .quantise("head", Quantisation::Int8, None)
        .unwrap();
    assert!(one.extract(&source).ties().unwrap().is_empty());
}
