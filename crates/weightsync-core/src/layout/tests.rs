use proptest::prelude::*;

use super::*;

type Tensor = (String, Dtype, Vec<u64>);

fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> Tensor {
    (name.to_owned(), dtype, shape.to_vec())
}

fn layout(tensors: &[Tensor]) -> Layout {
    Layout::new(tensors.iter().cloned()).unwrap()
}

fn malformed(bytes: &[u8]) -> &'static str {
    match Layout::decode(bytes) {
        Err(Error::Malformed { problem, .. }) => problem,
        other => panic!("expected malformed bytes, got {other:?}"),
    }
}

#[test]
fn tensors_of_every_kind_are_placed() {
    let layout = layout(&[
        tensor("scalar", Dtype::F64, &[]),
        tensor("empty", Dtype::F32, &[3, 0]),
        tensor("nibbles", Dtype::F4, &[130]),
        tensor("fp8", Dtype::F8_E4M3, &[64]),
        tensor("end", Dtype::BOOL, &[1]),
    ]);
    let ranges: Vec<_> = layout
        .tensors()
        .iter()
        .map(|tensor| (tensor.range.offset, tensor.range.len))
        .collect();
    assert_eq!(ranges, [(0, 8), (64, 0), (64, 65), (192, 64), (256, 1)]);
    assert_eq!(layout.bytes(), 320);
    assert_eq!(layout.payload_bytes(), 138);
}

#[test]
fn every_dtype_is_placed_and_encoded() {
    let tensors: Vec<_> = Dtype::ALL
        .iter()
        .map(|&dtype| tensor(dtype.name(), dtype, &[2, 4]))
        .collect();
    let layout = layout(&tensors);
    for spec in layout.tensors() {
        assert_eq!(spec.range.len, u64::from(spec.dtype.bits()));
    }
    assert_eq!(Layout::decode(&layout.encode()), Ok(layout));
}

#[test]
fn no_tensors_are_a_layout_of_no_bytes() {
    let empty = layout(&[]);
    assert!(empty.is_empty());
    assert_eq!((empty.bytes(), empty.payload_bytes()), (0, 0));
    assert_eq!(empty.index_of(""), None);
    assert_eq!(Layout::decode(&empty.encode()), Ok(empty));
}

#[test]
fn layout_refuses_impossible_tensors_by_name() {
    let refused = |tensors: &[Tensor]| Layout::new(tensors.iter().cloned()).unwrap_err();
    assert_eq!(
        refused(&[tensor("a", Dtype::F32, &[1]), tensor("a", Dtype::I8, &[])]),
        Error::DuplicateName { name: "a".into() },
    );
    assert_eq!(
        refused(&[tensor("a", Dtype::F32, &[1]), tensor("", Dtype::F32, &[1])]),
        Error::EmptyName { index: 1 },
    );
    for shape in [&[1 << 40, 1 << 40][..], &[u64::MAX], &[1 << 49]] {
        let error = refused(&[tensor("big", Dtype::F32, shape)]);
        assert!(
            matches!(&error, Error::TensorTooLarge { name, .. } if name == "big"),
            "{error}"
        );
    }
    assert!(matches!(
        refused(&[tensor("half", Dtype::F4, &[3])]),
        Error::PartialByte { bits: 12, .. },
    ));
    assert!(matches!(
        refused(&[tensor("six", Dtype::F6_E2M3, &[2, 3])]),
        Error::PartialByte { bits: 36, .. },
    ));
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    let deep = [1; MAX_RANK + 1];
    for (tensors, limit) in [
        (vec![tensor(&long, Dtype::U8, &[])], MAX_NAME_BYTES as u64),
        (vec![tensor("deep", Dtype::U8, &deep)], MAX_RANK as u64),
        (
            vec![
                tensor("a", Dtype::U8, &[MAX_BYTES]),
                tensor("b", Dtype::U8, &[]),
            ],
            MAX_BYTES,
        ),
    ] {
        let error = refused(&tensors);
        assert!(matches!(error, Error::TooLarge { limit: got, .. } if got == limit));
    }
}

#[test]
fn the_largest_layout_is_accepted() {
    let name = "x".repeat(MAX_NAME_BYTES);
    let layout = layout(&[
        tensor(&name, Dtype::U8, &[1; MAX_RANK]),
        tensor("rest", Dtype::U8, &[MAX_BYTES - ALIGNMENT]),
        tensor("huge but empty", Dtype::U64, &[u64::MAX, u64::MAX, 0]),
    ]);
    assert_eq!(layout.bytes(), MAX_BYTES);
    assert_eq!(Layout::decode(&layout.encode()), Ok(layout));
}

/// The encoding and with it every layout id is fixed: stored manifests rely on it.
#[test]
fn the_encoding_never_changes() {
    let layout = layout(&[
        tensor("w", Dtype::BF16, &[300, 2]),
        tensor("b", Dtype::F32, &[]),
    ]);
    assert_eq!(
        layout.encode(),
        [
            b"WSLY\x01\x02".as_slice(),
            b"\x01w\x0e\x02\xac\x02\x02",
            b"\x01b\x11\x00"
        ]
        .concat(),
    );
    assert_eq!(
        layout.id().to_string(),
        blake3::hash(&layout.encode()).to_hex().as_str(),
    );
}

#[test]
fn hostile_encodings_are_refused() {
    assert_eq!(malformed(b""), "it ends too early");
    assert_eq!(malformed(b"WSLX\x01\x00"), "it does not begin with WSLY");
    assert_eq!(
        malformed(b"WSLY\x01\x00\x00"),
        "bytes after the last tensor"
    );
    assert_eq!(
        malformed(b"WSLY\x01\x80\x00"),
        "a number that is not in its shortest form"
    );
    assert_eq!(
        malformed(b"WSLY\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02"),
        "a number above 64 bits"
    );
    // Four million tensors in no bytes: refused before anything is reserved.
    assert_eq!(
        malformed(b"WSLY\x01\x80\x80\x80\x02"),
        "fewer bytes than that many tensors need"
    );
    assert_eq!(
        malformed(b"WSLY\x01\x01\x01\xff\x00\x00"),
        "a name that is not UTF-8"
    );
    assert_eq!(malformed(b"WSLY\x01\x01\x01a\xff\x00"), "an unknown dtype");
    assert_eq!(malformed(b"WSLY\x01\x01\x0fa\x00\x00"), "it ends too early");
    assert!(matches!(
        Layout::decode(b"WSLY\x02\x00"),
        Err(Error::UnknownFormat { got: 2, .. })
    ));
    for (bytes, what) in [
        (&b"WSLY\x01\x81\x80\x80\x02"[..], "tensors in a layout"),
        (b"WSLY\x01\x01\xff\xff\x7fa", "bytes in a tensor name"),
        (b"WSLY\x01\x01\x01a\x00\x41", "dimensions of a tensor"),
        (
            b"WSLY\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            "tensors in a layout",
        ),
    ] {
        let error = Layout::decode(bytes).unwrap_err();
        assert!(matches!(error, Error::TooLarge { what: got, .. } if got == what));
    }
    let twice = b"WSLY\x01\x02\x01a\x00\x00\x01a\x00\x00";
    assert_eq!(
        Layout::decode(twice),
        Err(Error::DuplicateName { name: "a".into() })
    );
}

#[test]
fn every_cut_of_an_encoding_is_refused() {
    let whole = layout(&[
        tensor("first", Dtype::BF16, &[300, 2]),
        tensor("second", Dtype::F32, &[1 << 20]),
    ])
    .encode();
    for end in 0..whole.len() {
        assert!(Layout::decode(&whole[..end]).is_err(), "cut at {end}");
    }
}

#[test]
fn layout_json_is_a_checked_list_of_tensors() {
    let layout = layout(&[tensor("w", Dtype::BF16, &[3, 2])]);
    let json = serde_json::to_string(&layout).unwrap();
    assert_eq!(json, r#"[{"name":"w","dtype":"BF16","shape":[3,2]}]"#);
    assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout);
    for bad in [
        r#"[{"name":"","dtype":"BF16","shape":[]}]"#,
        r#"[{"name":"w","dtype":"F9","shape":[]}]"#,
        r#"[{"name":"w","dtype":"F4","shape":[3]}]"#,
        r#"[{"name":"w","dtype":"F32","shape":[-1]}]"#,
        r#"[{"name":"w","dtype":"F32","shape":[1125899906842624,2]}]"#,
        r#"[{"name":"w","dtype":"U8","shape":[]},{"name":"w","dtype":"U8","shape":[]}]"#,
    ] {
        assert!(serde_json::from_str::<Layout>(bad).is_err(), "{bad}");
    }
}

#[test]
fn binary_serde_carries_the_encoding() {
    let layout = layout(&[tensor("w", Dtype::BF16, &[3, 2])]);
    let mut bytes = postcard::to_stdvec(&layout).unwrap();
    assert!(bytes.ends_with(&layout.encode()));
    assert_eq!(postcard::from_bytes::<Layout>(&bytes).unwrap(), layout);
    bytes.pop();
    assert!(postcard::from_bytes::<Layout>(&bytes).is_err());
    bytes.push(0x7f); // the last dimension
    let other: Layout = postcard::from_bytes(&bytes).unwrap();
    assert_eq!(other.tensors()[0].shape, [3, 127]);
}

#[test]
fn differences_are_listed_by_name() {
    let expected = layout(&[
        tensor("gone", Dtype::F32, &[1]),
        tensor("shape", Dtype::F32, &[2, 3]),
        tensor("dtype", Dtype::F32, &[4]),
        tensor("both", Dtype::F32, &[]),
    ]);
    let got = layout(&[
        tensor("shape", Dtype::F32, &[3, 2]),
        tensor("new", Dtype::F32, &[1]),
        tensor("dtype", Dtype::BF16, &[4]),
        tensor("both", Dtype::F16, &[1]),
    ]);
    let mismatch = Layout::compare(&expected, &got).unwrap_err();
    assert_eq!(mismatch.missing, ["gone"]);
    assert_eq!(mismatch.unknown, ["new"]);
    assert_eq!(
        mismatch.to_string(),
        "layouts differ: 1 missing: \"gone\"; 1 unknown: \"new\"; \
         2 with another shape: \"shape\" (expected [2, 3], got [3, 2]), \"both\" (expected [], got [1]); \
         2 with another dtype: \"dtype\" (expected F32, got BF16), \"both\" (expected F32, got F16)",
    );
    assert_eq!(Layout::compare(&expected, &expected.clone()), Ok(()));
}

#[test]
fn layout_diff_tells_order_from_names() {
    let [a, b, c] = ["a", "b", "c"].map(|name| tensor(name, Dtype::F32, &[1]));
    let expected = layout(&[a.clone(), b.clone(), c.clone()]);
    let mismatch = Layout::compare(&expected, &layout(&[a, c, b])).unwrap_err();
    assert_eq!(
        mismatch.to_string(),
        "layouts differ: in another order: tensor 1 should be \"b\", is \"c\"",
    );
    assert_eq!(
        Error::from(mismatch.clone()).to_string(),
        mismatch.to_string()
    );
}

#[test]
fn names_of_a_wrapped_module_say_what_to_pass() {
    let names = |names: &[&str]| {
        let tensors = names.iter().map(|name| tensor(name, Dtype::F32, &[1]));
        layout(&tensors.collect::<Vec<_>>())
    };
    let words = |expected: &[&str], got: &[&str]| {
        let mismatch = Layout::compare(&names(expected), &names(got)).unwrap_err();
        mismatch.to_string()
    };
    let bare = ["actor.weight", "actor.bias", "step"];
    for (wrapped, part, inside) in [
        (
            ["module.actor.weight", "module.actor.bias", "module.step"],
            "\"module\" (of DistributedDataParallel) in them",
            "pass the module inside (model.module)",
        ),
        (
            ["actor._orig_mod.weight", "actor._orig_mod.bias", "step"],
            "\"_orig_mod\" (of torch.compile) in them",
            "pass the module inside (model.actor._orig_mod)",
        ),
        (
            [
                "module._orig_mod.actor.weight",
                "module._orig_mod.actor.bias",
                "module._orig_mod.step",
            ],
            "\"module\" (of DistributedDataParallel) and \"_orig_mod\" (of torch.compile) in them",
            "pass the module inside (model.module._orig_mod)",
        ),
        // Each layer is wrapped: no module inside has all of them.
        (
            [
                "module.actor._orig_mod.weight",
                "module.actor._orig_mod.bias",
                "module.step",
            ],
            "\"module\" (of DistributedDataParallel) and \"_orig_mod\" (of torch.compile) in them",
            "module: rename by a mapping",
        ),
    ] {
        let got = words(&bare, &wrapped);
        assert!(
            got.contains(&format!("names got have {part}")) && got.contains(inside),
            "{got}"
        );
        let expected = words(&wrapped, &bare);
        assert!(
            expected.contains(&format!("names expected have {part}")) && expected.contains(inside),
            "{expected}"
        );
    }
    // Each side has a wrapper of its own, and a part that is the model's own counts for neither.
    let both = words(&["_orig_mod.module.a"], &["module.module.a"]);
    for side in ["expected have \"_orig_mod\" (of", "got have \"module\" (of"] {
        assert!(both.contains(side), "{both}");
    }
    let other = words(
        &bare,
        &["module.actor.weight", "module.actor.bias", "module.steps"],
    );
    assert!(!other.contains("wrapped"), "{other}");
}

#[test]
fn layout_diff_tells_a_float_dtype_from_others() {
    let of = |first, second| layout(&[tensor("a", first, &[1]), tensor("b", second, &[1])]);
    let wanted = |expected: &Layout, got: &Layout| {
        Layout::compare(expected, got).unwrap_err().wanted_float()
    };
    let worker = of(Dtype::BF16, Dtype::BF16);
    assert_eq!(
        wanted(&worker, &of(Dtype::F32, Dtype::F32)),
        Some(Dtype::BF16)
    );
    assert_eq!(wanted(&worker, &of(Dtype::F32, Dtype::I64)), None);
    assert_eq!(
        wanted(&of(Dtype::BF16, Dtype::F16), &of(Dtype::F32, Dtype::F32)),
        None
    );
    assert_eq!(
        wanted(&worker, &layout(&[tensor("a", Dtype::F32, &[1])])),
        None
    );
}

#[test]
fn long_lists_are_cut_with_a_count() {
    let expected: Vec<_> = (0..11)
        .map(|i| tensor(&format!("t{i}"), Dtype::U8, &[]))
        .collect();
    let mismatch = Layout::compare(&layout(&expected), &layout(&[])).unwrap_err();
    assert_eq!(mismatch.missing.len(), 11);
    assert_eq!(
        mismatch.to_string(),
        "layouts differ: 11 missing: \"t0\", \"t1\", \"t2\", \"t3\", \"t4\", \"t5\", \"t6\", \"t7\" … and 3 more",
    );
}

#[test]
fn ranges_never_overflow() {
    let range = ByteRange {
        offset: u64::MAX,
        len: 2,
    };
    assert_eq!(range.end(), u64::MAX);
    assert_eq!(range.indices(), None);
    assert_eq!(range.of(&[0; 8]), None);
    let range = ByteRange { offset: 2, len: 3 };
    assert_eq!(range.of(&[0, 1, 2, 3, 4, 5]), Some(&[2, 3, 4][..]));
    assert_eq!(range.of(&[0; 4]), None);
    let overlap = range.intersection(ByteRange { offset: 4, len: 9 });
    assert_eq!(overlap, Some(ByteRange { offset: 4, len: 1 }));
    assert_eq!(range.intersection(ByteRange { offset: 5, len: 9 }), None);
}

#[test]
fn a_hundred_thousand_tensors() {
    let layout = Layout::new((0..100_000).map(|i| {
        tensor(
            &format!("model.layers.{i}.mlp.weight"),
            Dtype::BF16,
            &[64, 8],
        )
    }))
    .unwrap();
    assert_eq!(layout.bytes(), 100_000 * 1024);
    assert_eq!(Layout::decode(&layout.encode()).as_ref(), Ok(&layout));
    for (index, tensor) in layout.tensors().iter().enumerate() {
        assert_eq!(layout.index_of(&tensor.name), Some(index));
    }
}

/// Layouts of up to 12 tensors over every dtype, with shapes that fill whole bytes.
pub(crate) fn any_layout() -> impl Strategy<Value = Layout> {
    let shape = prop::collection::vec(0u64..6, 0..4);
    let tensor = ("[a-c.]{1,5}", prop::sample::select(Dtype::ALL), shape);
    prop::collection::vec(tensor, 0..12).prop_map(|mut tensors| {
        for (position, (name, dtype, shape)) in tensors.iter_mut().enumerate() {
            name.push_str(&format!(".{position}"));
            if dtype.bytes().is_none() {
                shape.push(4);
            }
        }
        Layout::new(tensors).unwrap()
    })
}

proptest! {
    #[test]
    fn tensors_and_padding_tile_the_bytes(layout in any_layout()) {
        let mut ranges: Vec<_> = layout.tensors().iter().map(|tensor| tensor.range).collect();
        for range in &ranges {
            prop_assert_eq!(range.offset % ALIGNMENT, 0);
        }
        prop_assert_eq!(ranges.iter().map(|range| range.len).sum::<u64>(), layout.payload_bytes());
        ranges.extend(layout.padding());
        ranges.sort();
        let mut end = 0;
        for range in ranges {
            prop_assert_eq!(range.offset, end);
            end = range.end();
        }
        prop_assert_eq!(end, layout.bytes());
    }

    #[test]
    fn every_form_round_trips(layout in any_layout()) {
        let encoded = layout.encode();
        prop_assert_eq!(&Layout::decode(&encoded).unwrap(), &layout);
        let json = serde_json::to_string(&layout).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Layout>(&json).unwrap(), &layout);
        let binary = postcard::to_stdvec(&layout).unwrap();
        prop_assert_eq!(&postcard::from_bytes::<Layout>(&binary).unwrap(), &layout);
    }

    #[test]
    fn ids_are_equal_only_where_comparing_finds_nothing(a in any_layout(), b in any_layout()) {
        prop_assert_eq!(a.tensors() == b.tensors(), a.id() == b.id());
        match Layout::compare(&a, &b) {
            Ok(()) => prop_assert_eq!(a.tensors(), b.tensors()),
            Err(mismatch) => prop_assert_ne!(mismatch, LayoutMismatch::default()),
        }
    }

    #[test]
    fn random_bytes_are_refused_or_canonical(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let bytes = [b"WSLY\x01".as_slice(), &bytes].concat();
        if let Ok(layout) = Layout::decode(&bytes) {
            prop_assert_eq!(layout.encode(), bytes);
        }
    }

    #[test]
    fn changed_bytes_are_refused_or_canonical(
        layout in any_layout(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = layout.encode();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(layout) = Layout::decode(&bytes) {
            prop_assert_eq!(layout.encode(), bytes);
        }
    }
}
