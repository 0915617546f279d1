use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::layout::tests::any_layout;

fn layout(tensors: &[(&str, u64)]) -> Layout {
    Layout::new(
        tensors
            .iter()
            .map(|&(name, bytes)| (name.to_owned(), Dtype::U8, vec![bytes])),
    )
    .unwrap()
}

fn names(chunks: Chunks) -> Vec<Vec<String>> {
    chunks.map(|chunk| chunk.names).collect()
}

#[test]
fn modules_are_names_without_their_last_two_parts() {
    for (name, module) in [
        ("layers.0.attn.q.weight", Some("layers.0.attn")),
        ("a.b.c", Some("a")),
        ("lm_head.weight", None),
        ("scale", None),
        (".a.b", None),
        ("", None),
    ] {
        assert_eq!(module_of(name), module, "{name:?}");
    }
}

#[test]
fn modules_come_together_where_they_first_appear() {
    let layout = layout(&[
        ("embed.weight", 8),
        ("l.0.q.weight", 8),
        ("l.1.q.weight", 8),
        ("l.0.k.weight", 8),
        ("head.weight", 8),
    ]);
    let chunks: Vec<_> = layout.chunks(Chunking::per_module()).collect();
    let modules: Vec<_> = chunks.iter().map(WeightChunk::module_name).collect();
    assert_eq!(modules, [None, Some("l.0"), Some("l.1")]);
    assert_eq!(chunks[0].names(), ["embed.weight", "head.weight"]);
    assert_eq!(chunks[1].names(), ["l.0.q.weight", "l.0.k.weight"]);
    assert!(!chunks[1].is_packed());
    assert_eq!(chunks[1].span(), None);
    assert_eq!(
        chunks[2].span(),
        Some(ByteRange {
            offset: 128,
            len: 8
        })
    );
}

#[test]
fn a_budget_closes_chunks_but_never_splits_modules() {
    let layout = layout(&[
        ("a.x.w", 30),
        ("a.x.b", 10),
        ("b.x.w", 60),
        ("c.x.w", 1),
        ("d.x.w", 500),
        ("d.x.b", 500),
        ("e.x.w", 1),
    ]);
    let sizes = |budget| {
        let chunks = layout.chunks(Chunking::per_module().with_budget(budget));
        chunks.map(|chunk| chunk.total_bytes()).collect::<Vec<_>>()
    };
    assert_eq!(sizes(100), [100, 1, 1000, 1]);
    assert_eq!(sizes(99), [40, 61, 1000, 1]);
    assert_eq!(sizes(1001), [101, 1001]);
    assert_eq!(sizes(0), [40, 60, 1, 1000, 1]);
    assert_eq!(sizes(u64::MAX), [1102]);
}

#[test]
fn without_modules_tensors_are_the_units() {
    let layout = layout(&[("a.x.w", 30), ("a.x.b", 10), ("b.x.w", 60)]);
    assert_eq!(names(layout.chunks(Chunking::per_tensor())).len(), 3);
    let chunks: Vec<_> = layout
        .chunks(Chunking::per_tensor().with_budget(70))
        .collect();
    assert_eq!(chunks[0].names(), ["a.x.w", "a.x.b"]);
    assert_eq!(chunks[1].names(), ["b.x.w"]);
    assert!(chunks.iter().all(|chunk| chunk.module_name().is_none()));
    assert_eq!(chunks[0].span(), Some(ByteRange { offset: 0, len: 74 }));
}

#[test]
fn empty_tensors_and_layouts_need_no_special_care() {
    assert_eq!(
        layout(&[])
            .chunks(Chunking::per_module().with_budget(1))
            .len(),
        0
    );
    let layout = layout(&[("a.x.w", 0), ("b.x.w", 0), ("c.x.w", 5), ("d.x.w", 0)]);
    let all = [["a.x.w", "b.x.w", "c.x.w", "d.x.w"]];
    assert_eq!(
        names(layout.chunks(Chunking::per_module().with_budget(5))),
        all
    );
}

#[test]
fn dtypes_may_differ_within_a_chunk() {
    let layout = Layout::new([
        ("m.w.q".to_owned(), Dtype::F8_E4M3, vec![16]),
        ("m.w.scale".to_owned(), Dtype::F32, vec![]),
    ])
    .unwrap();
    let chunk = layout.chunks(Chunking::per_module()).next().unwrap();
    assert_eq!(chunk.dtypes(), [Dtype::F8_E4M3, Dtype::F32]);
    assert_eq!(chunk.shapes(), [vec![16], vec![]]);
    assert_eq!(chunk.total_bytes(), 20);
    let names = chunk.names().to_vec();
    let offsets = chunk.map(|tensor| tensor.range.offset);
    assert_eq!(offsets.tensors(), [0, 64]);
    assert_eq!(offsets.names(), names);
}

#[test]
fn columns_are_checked() {
    let new = |names: &[&str], dtypes: &[Dtype], shapes: &[&[u64]], tensors: &[()]| {
        WeightChunk::new(
            names.iter().map(|&name| name.to_owned()).collect(),
            dtypes.to_vec(),
            shapes.iter().map(|&shape| shape.to_vec()).collect(),
            tensors.to_vec(),
        )
    };
    let f32 = [Dtype::F32; 2];
    assert_eq!(
        new(&["a", "b"], &f32, &[&[2], &[]], &[(); 2])
            .unwrap()
            .total_bytes(),
        12
    );
    for (names, dtypes, shapes, tensors) in [(1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (2, 2, 2, 1)]
    {
        let got = new(
            &["a", "b"][..names],
            &f32[..dtypes],
            &[&[2][..], &[]][..shapes],
            &[(); 2][..tensors],
        );
        let expected = Error::ChunkColumns {
            names,
            dtypes,
            shapes,
            tensors,
        };
        assert_eq!(got, Err(expected));
    }
    assert!(matches!(
        new(&["a", "a"], &f32, &[&[], &[]], &[(); 2]),
        Err(Error::DuplicateName { .. })
    ));
    assert!(matches!(
        new(&["a"], &[Dtype::F4], &[&[1]], &[()]),
        Err(Error::PartialByte { .. })
    ));
    assert!(matches!(
        new(&["a"], &[Dtype::U8], &[&[1 << 51]], &[()]),
        Err(Error::TensorTooLarge { .. })
    ));
    assert!(matches!(
        new(&["a", "b"], &[Dtype::U8; 2], &[&[1 << 50], &[1]], &[(); 2]),
        Err(Error::TooLarge { .. })
    ));
}

proptest! {
    #[test]
    fn chunks_hold_every_tensor_once_within_budget(
        layout in any_layout(),
        by_module: bool,
        budget in prop::option::of(0u64..400),
    ) {
        let chunks = layout.chunks(Chunking { by_module, budget });
        let announced = chunks.len();
        let chunks: Vec<_> = chunks.collect();
        prop_assert_eq!(chunks.len(), announced);

        let mut seen = HashSet::new();
        let mut travelled = HashSet::new();
        let mut before: Option<(usize, u64)> = None;
        for chunk in &chunks {
            let mut units: Vec<(String, u64)> = Vec::new();
            for (at, &Placement { index, range }) in chunk.tensors().iter().enumerate() {
                let spec = &layout.tensors()[index];
                prop_assert!(seen.insert(index), "tensor {} travels twice", index);
                prop_assert_eq!(&chunk.names()[at], &spec.name);
                prop_assert_eq!(chunk.dtypes()[at], spec.dtype);
                prop_assert_eq!(&chunk.shapes()[at], &spec.shape);
                prop_assert_eq!(range, spec.range);
                let unit = match by_module {
                    true => module_of(&spec.name).unwrap_or_default(),
                    false => &spec.name,
                };
                match units.last_mut() {
                    Some((name, bytes)) if name == unit => *bytes += range.len,
                    _ => units.push((unit.to_owned(), range.len)),
                }
            }
            let bytes = units.iter().map(|(_, bytes)| bytes).sum();
            prop_assert_eq!(chunk.total_bytes(), bytes);
            let full = units.iter().filter(|(_, bytes)| *bytes > 0).count();
            match budget {
                None => prop_assert_eq!(units.len(), 1),
                Some(budget) => prop_assert!(full <= 1 || bytes <= budget),
            }

            let first = chunk.tensors()[0].index;
            if let Some((first_before, bytes_before)) = before {
                prop_assert!(first_before < first, "chunks are out of order");
                if let Some(budget) = budget {
                    prop_assert!(bytes_before > 0, "closed while empty");
                    prop_assert!(bytes_before + units[0].1 > budget, "closed too early");
                }
            }
            before = Some((first, bytes));
            for (unit, _) in units {
                prop_assert!(travelled.insert(unit), "a module is split");
            }
        }
        prop_assert_eq!(seen.len(), layout.len());
    }
}
