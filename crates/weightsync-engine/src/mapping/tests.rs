mod quantised;

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
