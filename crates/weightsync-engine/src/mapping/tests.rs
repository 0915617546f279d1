use std::io;

use half::bf16;
use proptest::prelude::*;
use weightsync_core::TensorRef;

use super::*;
use crate::attributes::find_ties;
use crate::error::{Error, Result};
use crate::extract::{Extracted, TensorData};
use crate::strategy::{StateDict, Strategy};
use crate::tensors::Tensors;

fn tensors(specs: &[(&str, &[u64])]) -> Tensors {
    let mut tensors = Tensors::new();
    let mut next = 0.0_f32;
    for (name, shape) in specs {
        let data: Vec<f32> = (0..shape.iter().product::<u64>())
            .map(|_| {
                next += 1.0;
                next
            })
            .collect();
        tensors.insert(name, *shape, data).unwrap();
    }
    tensors
}

fn layout(model: &dyn WeightExtractor) -> Layout {
    model.layout().unwrap()
}

/// What comes out of the sender's side.
fn mapped(mapping: &Mapping, source: &dyn WeightExtractor) -> Tensors {
    let mapped = mapping.extract(source);
    let mut out = Tensors::zeros(&layout(&mapped));
    Strategy::StateDict
        .extract(&mapped)
        .unwrap()
        .apply_to(&mut out)
        .unwrap();
    out
}

/// What comes out of the worker's side.
fn loaded(mapping: &Mapping, source: &dyn WeightExtractor) -> Tensors {
    let mut out = Tensors::zeros(&mapping.layout(&layout(source)).unwrap());
    let weights = Strategy::StateDict.extract(source).unwrap();
    weights.apply_to(&mut mapping.load(&mut out)).unwrap();
    out
}

fn assert_same(left: &Tensors, right: &Tensors) {
    assert_eq!(layout(left), layout(right));
    for name in left.names() {
        assert_eq!(
            left.tensor(name).unwrap().bytes(),
            right.tensor(name).unwrap().bytes(),
            "{name}"
        );
    }
}

/// Lends everything behind reads, as a file does.
struct Behind<'a>(&'a Tensors);

impl WeightExtractor for Behind<'_> {
    fn layout(&self) -> Result<Layout> {
        Ok(layout(self.0))
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        let reads: Vec<_> = self
            .0
            .names()
            .map(|name| {
                let bytes = self.0.tensor(name).unwrap().bytes();
                move |place: &mut [u8]| -> io::Result<()> {
                    place.copy_from_slice(bytes);
                    Ok(())
                }
            })
            .collect();
        let lent = self.0.names().zip(&reads).map(|(name, read)| {
            let (dtype, shape) = (
                self.0.tensor(name).unwrap().dtype(),
                self.0.tensor(name).unwrap().shape(),
            );
            let data = TensorData::Read { dtype, shape, read };
            Extracted { name, data }
        });
        take(&lent.collect::<Vec<_>>())
    }
}

#[test]
fn patterns_match_whole_names() {
    let cases = [
        ("a.b", "a.b", Some("")),
        ("a.b", "a.bc", None),
        ("a.*", "a.b.c", Some("b.c")),
        ("a.*", "a.", None),
        ("*.c", "a.b.c", Some("a.b")),
        ("a.*.c", "a.c", None),
        ("a.*.c", "a.0.c", Some("0")),
        ("*", "anything", Some("anything")),
        ("ab*ba", "aba", None),
    ];
    for (pattern, name, star) in cases {
        let pattern: Pattern = pattern.parse().unwrap();
        assert_eq!(pattern.matches(name), star, "{pattern} {name}");
    }
    assert!("a*b*".parse::<Pattern>().is_err());
    assert!("".parse::<Pattern>().is_err());
}

#[test]
fn every_rule_does_the_same_on_either_side() {
    let source = tensors(&[
        ("layers.0.q", &[2, 3]),
        ("layers.0.k", &[1, 3]),
        ("layers.0.v", &[1, 3]),
        ("layers.1.v", &[2, 3]),
        ("layers.1.q", &[2, 3]),
        ("layers.1.k", &[2, 3]),
        ("norm.gamma", &[3]),
        ("optimizer.step", &[1]),
    ]);
    let mapping = Mapping::new()
        .rename("*.gamma", "*.weight")
        .and_then(|mapping| mapping.drop("optimizer.*"))
        .and_then(|mapping| {
            mapping.fuse(
                ["layers.*.q", "layers.*.k", "layers.*.v"],
                "blocks.*.qkv",
                0,
            )
        })
        .and_then(|mapping| mapping.transpose("blocks.*.qkv", [1, 0]))
        .and_then(|mapping| mapping.cast("norm.*", Dtype::BF16))
        .unwrap();
    let expected_names = ["blocks.0.qkv", "blocks.1.qkv", "norm.weight"];
    for out in [
        mapped(&mapping, &source),
        loaded(&mapping, &source),
        mapped(&mapping, &Behind(&source)),
    ] {
        assert_eq!(out.names().collect::<Vec<_>>(), expected_names);
        assert_eq!(out.tensor("blocks.1.qkv").unwrap().shape(), [3, 6]);
        assert_eq!(
            out.slice::<f32>("blocks.0.qkv").unwrap(),
            [
                1.0, 4.0, 7.0, 10.0, 2.0, 5.0, 8.0, 11.0, 3.0, 6.0, 9.0, 12.0
            ]
        );
        // q, k, v, though the source has v first.
        assert_eq!(
            out.slice::<f32>("blocks.1.qkv").unwrap()[..6],
            [19.0, 22.0, 25.0, 28.0, 13.0, 16.0]
        );
        assert_eq!(
            out.slice::<bf16>("norm.weight").unwrap(),
            [31.0, 32.0, 33.0].map(bf16::from_f32)
        );
    }
    let json = serde_json::to_string(&mapping).unwrap();
    assert_eq!(serde_json::from_str::<Mapping>(&json).unwrap(), mapping);
    let bad = r#"[{"rename":{"from":"a","to":"b.*"}}]"#;
    assert!(serde_json::from_str::<Mapping>(bad).is_err());
}

proptest! {
    /// Whatever is fused is split again into what it was, along any dimension and
    /// with transposes and casts in between.
    #[test]
    fn a_split_undoes_a_fuse(
        shape in prop::collection::vec(1_u64..4, 1..4),
        lens in prop::collection::vec(0_u64..4, 1..4),
        dim in 0_usize..3,
        turn in any::<bool>(),
        cast in any::<bool>(),
        behind in any::<bool>(),
    ) {
        let dim = dim % shape.len();
        let names: Vec<String> = (0..lens.len()).map(|i| format!("part{i}")).collect();
        let shapes: Vec<Vec<u64>> = lens.iter().map(|&len| {
            let mut shape = shape.clone();
            shape[dim] = len;
            shape
        }).collect();
        let specs: Vec<_> = names.iter().zip(&shapes).map(|(name, shape)| (name.as_str(), &shape[..])).collect();
        let source = tensors(&specs);
        let reverse: Vec<usize> = (0..shape.len()).rev().collect();
        let mut mapping = Mapping::new().fuse(names.iter().map(String::as_str), "whole", dim).unwrap();
        let mut along = dim;
        if cast {
            mapping = mapping.cast("*", Dtype::F64).unwrap();
        }
        if turn {
            mapping = mapping.transpose("whole", reverse.clone()).unwrap();
            along = shape.len() - 1 - dim;
        }
        // The whole holds the parts one behind the other, by whichever side.
        let whole = match behind {
            true => mapped(&mapping, &Behind(&source)),
            false => mapped(&mapping, &source),
        };
        assert_same(&whole, &loaded(&mapping, &source));

        let parts: Vec<_> = names.iter().map(String::as_str).zip(lens.iter().copied()).collect();
        let undo = |mapping: Mapping| {
            let mut mapping = mapping.split("whole", parts.clone(), along).unwrap();
            if turn {
                mapping = mapping.transpose("part*", reverse.clone()).unwrap();
            }
            mapping.cast("*", Dtype::F32).unwrap()
        };
        // In two steps, through a tensor that is whole, and in one, where nothing is.
        assert_same(&mapped(&undo(Mapping::new()), &whole), &source);
        assert_same(&mapped(&undo(mapping.clone()), &source), &source);
        assert_same(&loaded(&undo(mapping), &source), &source);
    }
}

#[test]
fn a_fuse_of_fuses_along_another_dimension_is_a_grid() {
    let source = tensors(&[
        ("a", &[1, 2]),
        ("b", &[1, 1]),
        ("c", &[2, 2]),
        ("d", &[2, 1]),
    ]);
    let mapping = Mapping::new()
        .fuse(["a", "b"], "top", 1)
        .and_then(|mapping| mapping.fuse(["c", "d"], "bottom", 1))
        .and_then(|mapping| mapping.fuse(["top", "bottom"], "all", 0))
        .and_then(|mapping| mapping.split("all", [("left", 1), ("right", 2)], 1))
        .unwrap();
    for out in [mapped(&mapping, &source), loaded(&mapping, &source)] {
        assert_eq!(out.slice::<f32>("left").unwrap(), [1.0, 4.0, 6.0]);
        assert_eq!(
            out.slice::<f32>("right").unwrap(),
            [2.0, 3.0, 5.0, 8.0, 7.0, 9.0]
        );
    }
}

#[test]
fn mapping_lends_tensors_it_does_not_change() {
    let source = tensors(&[("a", &[2, 3]), ("b", &[2, 3]), ("c", &[2])]);
    let mapping = Mapping::new()
        .rename("a", "x")
        .and_then(|mapping| mapping.transpose("b", [1, 0]))
        .and_then(|mapping| mapping.split("c", [("c.0", 1), ("c.1", 1)], 0))
        .unwrap();
    let at = |name: &str| source.tensor(name).unwrap().bytes().as_ptr().addr();
    let mapped = mapping.extract(&source);
    mapped
        .extract(&mut |tensors| {
            let places: Vec<_> = tensors
                .iter()
                .map(|tensor| match &tensor.data {
                    TensorData::InMemory(data) => (tensor.name, data.address()),
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!(
                places,
                [
                    ("x", at("a")),
                    ("b", at("b")),
                    ("c.0", at("c")),
                    ("c.1", at("c") + 4)
                ]
            );
            Ok(())
        })
        .unwrap();
}

#[test]
fn ties_and_labels_go_through_a_mapping() {
    let data = [0_u8; 32];
    let tensor = |shape| TensorRef::new(Dtype::F32, shape, &data).unwrap();
    let mut source = StateDict::new();
    for name in ["embed", "head", "bias"] {
        source.lend(name, tensor(&[2, 4])).unwrap();
    }
    source.insert("mean", [1], [1.0_f32]).unwrap();
    source.mark_buffer("mean").unwrap();
    source
        .insert_extra_state("", crate::plain::Plain::Null)
        .unwrap();
    let mapping = Mapping::new()
        .rename("*", "m.*")
        .and_then(|mapping| mapping.transpose("m.head", [1, 0]))
        .unwrap();
    let mapped = mapping.extract(&source);
    let attributes = mapped.attributes().unwrap();
    // The head is another tensor now.
    assert_eq!(
        attributes.ties(),
        [("m.bias".to_owned(), "m.embed".to_owned())]
    );
    assert_eq!(attributes.buffers(), ["m.mean"]);
    assert_eq!(attributes.extra_state(), ["m.__extra_state__"]);
    mapped
        .extract(&mut |tensors| {
            assert_eq!(find_ties(tensors), attributes.ties());
            Ok(())
        })
        .unwrap();
}

#[test]
fn changed_source_is_planned_again() {
    let mapping = Mapping::new().fuse(["a", "b"], "ab", 0).unwrap();
    let mut model = Tensors::new();
    let mut mapped = mapping.load(&mut model);
    let lens = [1, 3];
    for len in lens {
        let source = tensors(&[("a", &[len]), ("b", &[len])]);
        let weights = Strategy::StateDict.extract(&source).unwrap();
        let outcome = weights.apply_to(&mut mapped);
        // The model took the first shapes, and keeps them.
        assert_eq!(outcome.is_ok(), len == lens[0], "{outcome:?}");
    }
    assert_eq!(model.slice::<f32>("ab").unwrap(), [1.0, 2.0]);

    let lock = std::sync::Mutex::new(tensors(&[("a", &[1]), ("b", &[1])]));
    let mapped = mapping.extract(&lock);
    assert_eq!(layout(&mapped).tensors()[0].shape, [2]);
    *lock.lock().unwrap() = tensors(&[("b", &[2]), ("a", &[2])]);
    let weights = Strategy::StateDict.extract(&mapped).unwrap();
    assert_eq!(
        *weights.flat().slice::<f32>("ab").unwrap(),
        [3.0, 4.0, 1.0, 2.0]
    );
}

#[test]
fn the_dry_run_names_everything() {
    let source = tensors(&[
        ("a.q", &[2, 2]),
        ("a.k", &[2, 2]),
        ("old", &[1]),
        ("b", &[3]),
        ("same", &[1]),
    ]);
    let target = tensors(&[
        ("a.qk", &[4, 2]),
        ("c", &[4]),
        ("same", &[1]),
        ("new", &[1]),
    ]);
    let mapping = Mapping::new()
        .fuse(["a.q", "a.k"], "a.qk", 0)
        .and_then(|mapping| mapping.drop("old"))
        .and_then(|mapping| mapping.rename("b", "c"))
        .and_then(|mapping| mapping.cast("same", Dtype::F16))
        .and_then(|mapping| mapping.rename("typo.*", "x.*"))
        .unwrap();
    let run = mapping.dry_run(&layout(&source), &layout(&target));
    assert!(!run.is_complete());
    assert_eq!(
        run.to_string(),
        r#"  "a.q" -> a.qk (rule 1)
  "a.k" -> a.qk (rule 1)
  "old" is dropped (rule 2)
  "b" -> c (rule 3)
  "same" (rule 4)
! "new" of the target gets nothing
! "c" would be [3], the target has [4]
! "same" would be F16, the target has F32
? rule 5 (rename typo.* to x.*) matches nothing
not complete"#
    );
    let mut model = target;
    let weights = Strategy::StateDict.extract(&source).unwrap();
    let error = weights.apply_to(&mut mapping.load(&mut model)).unwrap_err();
    assert!(matches!(error, Error::Load { .. }));
    assert!(
        error
            .to_string()
            .contains("\"new\" of the target gets nothing"),
        "{error}"
    );

    let same = Mapping::new().dry_run(&layout(&source), &layout(&source));
    assert!(same.is_complete(), "{same}");
    let more = Mapping::new().dry_run(&layout(&source), &layout(&tensors(&[("b", &[3])])));
    assert_eq!(more.unmatched, ["a.q", "a.k", "old", "same"]);
}

#[test]
fn rules_that_do_not_fit_are_named_with_the_tensor() {
    let mut source = tensors(&[("m", &[2, 3]), ("n", &[2, 4]), ("bias", &[3])]);
    source.insert("ids", [2], [1_i64, 2]).unwrap();
    source
        .insert_bytes("packed", Dtype::F4, [2, 2], &[0; 2])
        .unwrap();
    let source = layout(&source);
    let new = Mapping::new;
    let cases = [
        (
            new().transpose("bias", [1, 0]),
            "rule 1: \"bias\" of [3] cannot",
        ),
        (new().transpose("packed", [1, 0]), "packed F4"),
        (
            new().cast("ids", Dtype::F16),
            "\"ids\" is I64 and cannot be cast to F16",
        ),
        (
            new().fuse(["m", "gone"], "x", 0),
            "\"x\" lacks the parts [\"gone\"]",
        ),
        (
            new().fuse(["m", "n"], "x", 0),
            "\"n\" (F32 [2, 4]) cannot follow \"m\" (F32 [2, 3])",
        ),
        (new().fuse(["m", "bias"], "x", 0), "cannot follow"),
        (new().fuse(["bias", "ids"], "x", 0), "cannot follow"),
        (
            new().fuse(["m"], "x", 2),
            "\"m\" of [2, 3] has no dimension 2",
        ),
        (
            new().split("m", [("x", 1), ("y", 3)], 1),
            "the parts of \"m\" are 4 long together, expected 3",
        ),
        (
            new().split("m", [("x", u64::MAX), ("y", 5)], 1),
            "are 18446744073709551615 long together",
        ),
        (new().split("bias", [("x", 3)], 1), "no dimension 1"),
        (new().split("packed", [("x", 2)], 0), "packed F4"),
        (
            new().rename("m", "n"),
            "several tensors (\"m\", \"n\") would be named \"n\"",
        ),
        (new().rename("m", &"x".repeat(5000)), "tensor name"),
    ];
    for (mapping, expected) in cases {
        let error = mapping.unwrap().layout(&source).unwrap_err();
        assert!(matches!(error, MappingError::DoesNotFit(_)));
        assert!(error.to_string().contains(expected), "{error}\n{expected}");
    }
    let refused = [
        new().rename("a", "b.*"),
        new().cast("*", Dtype::I8),
        new().transpose("a", [0, 2]),
        new().fuse([], "x", 0),
        new().fuse(["a.*", "b"], "x", 0),
        new().fuse(["a", "a"], "x", 0),
        new().split("a", [], 0),
        new().split("a", [("b.*", 1)], 0),
    ];
    for mapping in refused {
        let error = mapping.unwrap_err();
        assert!(matches!(error, MappingError::BadRule { .. }), "{error}");
    }
    // Under a star, what cannot be cast stays.
    let cast = new()
        .cast("*", Dtype::F16)
        .unwrap()
        .layout(&source)
        .unwrap();
    let dtypes: Vec<_> = cast.tensors().iter().map(|spec| spec.dtype).collect();
    assert_eq!(
        dtypes,
        [Dtype::F16, Dtype::F16, Dtype::F16, Dtype::I64, Dtype::F4]
    );
}

#[test]
fn odd_shapes_go_through() {
    let mut source = tensors(&[("empty", &[0, 3]), ("scalar", &[]), ("row", &[1, 3])]);
    source
        .insert_bytes("packed", Dtype::F4, [2, 2], &[1, 2])
        .unwrap();
    let mapping = Mapping::new()
        .fuse(["empty", "row"], "both", 0)
        .and_then(|mapping| mapping.transpose("scalar", []))
        .and_then(|mapping| mapping.rename("packed", "p"))
        .and_then(|mapping| mapping.cast("scalar", Dtype::F64))
        .unwrap();
    for out in [
        mapped(&mapping, &source),
        loaded(&mapping, &source),
        mapped(&mapping, &Behind(&source)),
    ] {
        assert_eq!(out.slice::<f32>("both").unwrap(), [2.0, 3.0, 4.0]);
        assert_eq!(out.slice::<f64>("scalar").unwrap(), [1.0]);
        assert_eq!(out.tensor("p").unwrap().bytes(), [1, 2]);
    }
    let apart = Mapping::new()
        .split("row", [("none", 0), ("all", 1)], 0)
        .unwrap();
    let out = mapped(&apart, &source);
    assert_eq!(out.tensor("none").unwrap().shape(), [0, 3]);
    assert_eq!(out.slice::<f32>("all").unwrap(), [2.0, 3.0, 4.0]);
}

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
