use proptest::prelude::*;

use super::*;

fn any_plain() -> impl Strategy<Value = Plain> {
    let leaf = prop_oneof![
        Just(Plain::Null),
        any::<bool>().prop_map(Plain::from),
        any::<i64>().prop_map(Plain::from),
        any::<u64>().prop_map(Plain::from),
        any::<i32>().prop_map(|value| Plain::Float(f64::from(value) / 64.0)),
        ".{0,8}".prop_map(Plain::from),
    ];
    leaf.prop_recursive(5, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Plain::List),
            prop::collection::btree_map(".{0,4}", inner, 0..6).prop_map(Plain::Map),
        ]
    })
}

proptest! {
    #[test]
    fn comes_back_from_every_form(value in any_plain(), room in 0_usize..512) {
        let encoded = value.encode().unwrap();
        prop_assert_eq!(&Plain::decode(&encoded).unwrap(), &value);
        let json = serde_json::to_string(&value).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Plain>(&json).unwrap(), &value);
        let binary = postcard::to_stdvec(&value).unwrap();
        prop_assert_eq!(&postcard::from_bytes::<Plain>(&binary).unwrap(), &value);

        let state = ExtraState::new(value.clone()).unwrap();
        prop_assert_eq!(state.bytes().len(), state.capacity());
        prop_assert!(state.capacity().is_power_of_two() && state.capacity() >= 256);
        prop_assert!(state.capacity() >= 2 * (codec::HEADER + encoded.len()));
        prop_assert_eq!(&ExtraState::from_bytes(state.bytes()).unwrap(), &state);
        let fits = room >= codec::HEADER + encoded.len();
        prop_assert_eq!(ExtraState::with_capacity(value, room).is_ok(), fits);
    }
}

/// The bytes that other builds read and write.
#[test]
fn plain_encoding_matches_these_bytes() {
    let value = Plain::from_iter([
        (
            "list",
            [Plain::Null, true.into(), (-2).into()]
                .into_iter()
                .collect(),
        ),
        ("text", "é".into()),
        ("x", 1.5.into()),
        ("y", u64::MAX.into()),
    ]);
    let mut expected = b"\x08\x04\0\0\0\x04\0\0\0list\x07\x03\0\0\0\0\x02\x03".to_vec();
    expected.extend((-2_i64).to_le_bytes());
    expected.extend(b"\x04\0\0\0text\x06\x02\0\0\0\xc3\xa9\x01\0\0\0x\x05");
    expected.extend(1.5_f64.to_le_bytes());
    expected.extend(b"\x01\0\0\0y\x04\xff\xff\xff\xff\xff\xff\xff\xff");
    assert_eq!(value.encode().unwrap(), expected);
    let state = ExtraState::new(Plain::Bool(true)).unwrap();
    assert_eq!(state.bytes()[..10], [1, 0, 0, 0, 1, 0, 0, 0, 2, 0]);
    assert_eq!(state.capacity(), 256);
}

#[test]
fn floats_keep_every_bit_on_the_wire_and_in_json() {
    for bits in [
        f64::NAN.to_bits() | 7,
        f64::NEG_INFINITY.to_bits(),
        (-0.0_f64).to_bits(),
    ] {
        let value = Plain::Float(f64::from_bits(bits));
        let Plain::Float(back) = Plain::decode(&value.encode().unwrap()).unwrap() else {
            panic!("a float stays one");
        };
        assert_eq!(back.to_bits(), bits);
    }
    assert!(serde_json::to_string(&Plain::Float(f64::NAN)).is_err());
}

#[test]
fn depth_is_bounded_in_every_form() {
    let nested = |levels: usize| (1..levels).fold(Plain::Null, |inner, _| Plain::List(vec![inner]));
    let deepest = nested(MAX_DEPTH);
    assert_eq!(Plain::decode(&deepest.encode().unwrap()).unwrap(), deepest);
    let json = serde_json::to_string(&deepest).unwrap();
    assert_eq!(serde_json::from_str::<Plain>(&json).unwrap(), deepest);

    assert_eq!(nested(MAX_DEPTH + 1).encode(), Err(PlainError::TooDeep));
    let bytes = b"\x07\x01\0\0\0".repeat(100_000);
    assert_eq!(Plain::decode(&bytes), Err(PlainError::TooDeep));
    let json = format!("{}{}", "[".repeat(MAX_DEPTH + 1), "]".repeat(MAX_DEPTH + 1));
    assert!(serde_json::from_str::<Plain>(&json).is_err());
}

#[test]
fn other_bytes_are_refused_with_the_place() {
    let cases: [(&[u8], &str); 8] = [
        (b"", "ends too early"),
        (b"\x09", "unknown kind"),
        (b"\0\0", "after the value"),
        (b"\x03\0\0\0", "ends too early"),
        (b"\x04\x01\0\0\0\0\0\0\0", "larger form"),
        (b"\x06\xff\xff\xff\xff", "beyond the end"),
        (b"\x06\x01\0\0\0\xff", "not UTF-8"),
        (b"\x08\x02\0\0\0\x01\0\0\0b\0\x01\0\0\0a\0", "do not ascend"),
    ];
    for (bytes, problem) in cases {
        let error = Plain::decode(bytes).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    let state = ExtraState::new(Plain::Null).unwrap();
    for (at, problem) in [(0, "format 3"), (1, "not one"), (200, "not zero")] {
        let mut bytes = state.bytes().to_vec();
        bytes[at] ^= 2;
        let error = ExtraState::from_bytes(&bytes).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

#[test]
fn a_state_that_outgrows_its_room_stays_as_it_was() {
    let mut state = ExtraState::new("short".into()).unwrap();
    let before = state.clone();
    let error = state.set("x".repeat(300).into()).unwrap_err();
    assert_eq!(
        error,
        PlainError::Outgrown {
            needed: 8 + 5 + 300,
            capacity: 256
        }
    );
    assert!(error.to_string().contains("connect again"), "{error}");
    assert_eq!(state, before);
    state.set("x".repeat(200).into()).unwrap();
    assert_eq!(state.capacity(), 256);
    assert!(matches!(
        Plain::Text("x".repeat(MAX_BYTES + 1)).encode(),
        Err(PlainError::TooLarge { .. })
    ));
}
