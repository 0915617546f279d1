use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::dtype::Dtype;
use crate::layout::tests::any_layout;
use crate::version::Epoch;

const RUN: Run = Run {
    epoch: Epoch(2),
    id: [0xcd; 16],
};

/// 100 bytes at 0, nothing at 128, 64 bytes at 128; 192 bytes in all.
fn layout() -> Layout {
    Layout::new(
        [("a", 100), ("b", 0), ("c", 64)]
            .map(|(name, bytes)| (name.to_owned(), Dtype::U8, vec![bytes])),
    )
    .unwrap()
}

fn part(writer: u32, ranges: &[(u64, u64)]) -> Part {
    Part {
        writer: WriterId(writer),
        ranges: ranges
            .iter()
            .map(|&(offset, len)| ByteRange { offset, len })
            .collect(),
    }
}

fn check(parts: &[Part]) -> Result<Manifest, Error> {
    Manifest::new(layout(), RUN, Version(5), None, parts.to_vec())
}

#[test]
fn parts_may_split_tensors_and_skip_or_take_padding() {
    for parts in [
        vec![part(0, &[(0, 192)])],
        vec![part(0, &[(0, 100), (128, 64)])],
        vec![part(1, &[(128, 64), (50, 78)]), part(0, &[(0, 50)])],
        vec![part(0, &[(0, 192)]), part(1, &[])],
        vec![part(7, &[(0, 110)]), part(3, &[(110, 82)])],
    ] {
        let manifest = check(&parts).unwrap();
        assert_eq!(manifest.parts(), parts);
    }
}

#[test]
fn parts_that_do_not_make_up_the_version_are_refused() {
    let outside = |offset, len| Error::RangeOutside {
        writer: WriterId(0),
        range: ByteRange { offset, len },
        bytes: 192,
    };
    let missing = |name: &str, offset, len| Error::PartsMissing {
        name: name.to_owned(),
        range: ByteRange { offset, len },
    };
    let overlap = |first, second, offset, len| Error::PartsOverlap {
        first: WriterId(first),
        second: WriterId(second),
        range: ByteRange { offset, len },
    };
    for (parts, expected) in [
        (vec![], missing("a", 0, 100)),
        (vec![part(0, &[(0, 192), (192, 1)])], outside(192, 1)),
        (vec![part(0, &[(0, 193)])], outside(0, 193)),
        (vec![part(0, &[(0, 192), (5, 0)])], outside(5, 0)),
        (vec![part(0, &[(u64::MAX, 2)])], outside(u64::MAX, 2)),
        (vec![part(0, &[(0, 99), (128, 64)])], missing("a", 99, 1)),
        (vec![part(0, &[(1, 191)])], missing("a", 0, 1)),
        (vec![part(0, &[(0, 10), (20, 172)])], missing("a", 10, 10)),
        (vec![part(0, &[(0, 130)])], missing("c", 130, 62)),
        (
            vec![part(0, &[(0, 101)]), part(1, &[(100, 92)])],
            overlap(0, 1, 100, 1),
        ),
        // Padding, too, has one writer at most.
        (
            vec![part(1, &[(0, 120)]), part(0, &[(110, 82)])],
            overlap(1, 0, 110, 10),
        ),
        (vec![part(0, &[(0, 192), (0, 192)])], overlap(0, 0, 0, 192)),
        (
            vec![part(4, &[(0, 100)]), part(4, &[(128, 64)])],
            Error::DuplicateWriter {
                writer: WriterId(4),
            },
        ),
    ] {
        assert_eq!(check(&parts), Err(expected), "{parts:?}");
    }
}

#[test]
fn version_zero_is_never_published() {
    let error = Manifest::single_writer(layout(), RUN, Version::NONE, None).unwrap_err();
    assert_eq!(error, Error::NoVersion);
}

#[test]
fn a_layout_without_bytes_needs_no_parts() {
    for tensors in [vec![], vec![("e".to_owned(), Dtype::F32, vec![0])]] {
        let layout = Layout::new(tensors).unwrap();
        let single = Manifest::single_writer(layout.clone(), RUN, Version(1), None).unwrap();
        assert_eq!(single.parts(), [part(0, &[])]);
        Manifest::new(layout, RUN, Version(1), None, vec![]).unwrap();
    }
}

#[test]
fn whole_tensors_join_into_ranges() {
    let of = |tensors: &[usize]| Part::of_tensors(WriterId(0), &layout(), tensors.iter().copied());
    assert_eq!(of(&[0, 1, 2]), Ok(part(0, &[(0, 192)])));
    assert_eq!(of(&[2, 0]), Ok(part(0, &[(128, 64), (0, 128)])));
    assert_eq!(of(&[1]), Ok(part(0, &[])));
    assert_eq!(of(&[0]).unwrap().bytes(), 128);
    assert_eq!(of(&[3]), Err(Error::NoSuchTensor { index: 3, len: 3 }));
}

#[test]
fn too_many_writers_are_refused() {
    let parts: Vec<_> = (0..=MAX_WRITERS as u32)
        .map(|writer| part(writer, &[]))
        .collect();
    assert!(matches!(check(&parts), Err(Error::TooLarge { .. })));
}

fn json() -> Value {
    let digest = Digest([0x5a; 16]);
    let parts = [part(0, &[(0, 128)]), part(1, &[(128, 64)])];
    serde_json::to_value(check(&parts).unwrap().with_digest(digest)).unwrap()
}

#[test]
fn json_is_fixed() {
    assert_eq!(
        json(),
        json!({
            "format": 1,
            "run": { "epoch": 2, "id": "cd".repeat(16) },
            "version": 5,
            "digest": "5a".repeat(16),
            "layout_id": layout().id().to_string(),
            "layout": [
                { "name": "a", "dtype": "U8", "shape": [100] },
                { "name": "b", "dtype": "U8", "shape": [0] },
                { "name": "c", "dtype": "U8", "shape": [64] },
            ],
            "parts": [
                { "writer": 0, "ranges": [{ "offset": 0, "len": 128 }] },
                { "writer": 1, "ranges": [{ "offset": 128, "len": 64 }] },
            ],
        })
    );
}

#[test]
fn fields_of_later_builds_are_skipped() {
    let mut with_more = json();
    with_more["comment"] = json!("from a later build");
    let manifest: Manifest = serde_json::from_value(with_more).unwrap();
    assert_eq!(serde_json::to_value(manifest).unwrap(), json());
}

#[test]
fn every_damaged_field_is_refused() {
    for (path, value, problem) in [
        ("/format", json!(2), "format 2"),
        ("/version", json!(0), "version 0"),
        ("/version", json!(-1), "invalid value"),
        ("/digest", json!("5a5a"), "32 hexadecimal digits"),
        ("/run/id", json!("zz".repeat(16)), "32 hexadecimal digits"),
        (
            "/layout_id",
            json!("00".repeat(32)),
            "its tensors make layout",
        ),
        ("/layout/0/name", json!("z"), "its tensors make layout"),
        ("/layout/0/name", json!("c"), "two tensors are named"),
        ("/layout/0/shape/0", json!(101), "its tensors make layout"),
        ("/layout/0/dtype", json!("U9"), "unknown dtype"),
        ("/parts/1/writer", json!(0), "more than one part"),
        ("/parts/1/ranges/0/offset", json!(127), "both write"),
        ("/parts/1/ranges/0/len", json!(63), "no part writes"),
        (
            "/parts/1/ranges/0/len",
            json!(u64::MAX),
            "leaves the 192 bytes",
        ),
        ("/parts/1/ranges", json!([]), "no part writes"),
    ] {
        let mut damaged = json();
        *damaged.pointer_mut(path).unwrap() = value;
        let error = serde_json::from_value::<Manifest>(damaged).unwrap_err();
        assert!(error.to_string().contains(problem), "{path}: {error}");
    }
}

proptest! {
    #[test]
    fn any_cut_of_the_bytes_is_accepted_and_round_trips(
        layout in any_layout(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        writers in 1u32..4,
    ) {
        let bytes = layout.bytes();
        let mut cuts: Vec<u64> = cuts
            .iter()
            .map(|cut| cut.index(bytes as usize + 1) as u64)
            .chain([0, bytes])
            .collect();
        cuts.sort();
        cuts.dedup();
        let mut parts: Vec<_> = (0..writers).map(|writer| part(writer, &[])).collect();
        for (at, cut) in cuts.windows(2).enumerate() {
            let range = ByteRange { offset: cut[0], len: cut[1] - cut[0] };
            parts[at % writers as usize].ranges.push(range);
        }
        let manifest = Manifest::new(layout, RUN, Version(9), None, parts).unwrap();
        let json = serde_json::to_vec(&manifest).unwrap();
        prop_assert_eq!(&serde_json::from_slice::<Manifest>(&json).unwrap(), &manifest);
        let binary = postcard::to_stdvec(&manifest).unwrap();
        prop_assert_eq!(&postcard::from_bytes::<Manifest>(&binary).unwrap(), &manifest);
    }

    /// The sweep agrees with counting the writers of each byte.
    #[test]
    fn parts_are_accepted_only_with_one_writer_per_byte(
        ranges in prop::collection::vec((0u64..220, 0u64..220), 0..5),
        tidy: bool,
    ) {
        // Random ranges rarely cover anything: half of the time, begin each where one ended.
        let mut end = 0;
        let ranges: Vec<_> = ranges
            .into_iter()
            .map(|(offset, len)| {
                let offset = if tidy { end } else { offset };
                end = offset + len;
                (offset, len)
            })
            .collect();
        let mut writers = [0; 192];
        let mut outside = false;
        for &(offset, len) in &ranges {
            outside |= len == 0 || offset + len > 192;
            for byte in offset..(offset + len).min(192) {
                writers[byte as usize] += 1;
            }
        }
        let layout = layout();
        let whole = layout
            .tensors()
            .iter()
            .all(|tensor| tensor.range.of(&writers.map(|count| count as u8))
                .unwrap().iter().all(|&count| count == 1));
        let once = writers.iter().all(|&count| count <= 1);
        let parts: Vec<_> = (0u32..).zip(&ranges).map(|(writer, &range)| part(writer, &[range])).collect();
        prop_assert_eq!(check(&parts).is_ok(), whole && once && !outside);
    }

    #[test]
    fn random_text_is_refused(text in ".{0,80}") {
        prop_assert!(serde_json::from_str::<Manifest>(&text).is_err());
    }
}
