//! Layouts and notes, taken apart and put together.

use proptest::prelude::*;
use weightsync_link::message::MessageError;
use weightsync_net::wire::message::{
    FromRoot, MAX_LAYOUT, MAX_NOTE, MAX_PART, ModelAssembler, model_messages,
};

use crate::any;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_model_comes_back((layout_len, note_len) in any::model_lengths(), index in 0_u8..64) {
        let layout: Vec<u8> = (0..layout_len).map(|i| i as u8).collect();
        let note: Vec<u8> = (0..note_len).map(|i| !(i as u8)).collect();
        let mut messages = model_messages(index, &layout, &note).unwrap();
        let Some(FromRoot::Model { index, layout_bytes, note_bytes }) = messages.next() else {
            panic!("the lengths come first");
        };
        let mut model = ModelAssembler::new(index, layout_bytes, note_bytes).unwrap();
        for message in messages {
            let FromRoot::Part { bytes } = message else { panic!("{message:?}") };
            prop_assert!((1..=MAX_PART).contains(&bytes.len()));
            model = model.finish().expect_err("a part is missing");
            model.push(&bytes).unwrap();
        }
        let model = model.finish().expect("all parts came");
        prop_assert_eq!(model.index, index);
        prop_assert!(model.layout == layout && model.note == note);
    }
}

#[test]
fn more_than_was_announced_is_refused() {
    let mut model = ModelAssembler::new(0, 3, 2).unwrap();
    model.push(b"1234").unwrap();
    assert_eq!(model.missing(), 1);
    let error = model.push(b"56").unwrap_err();
    assert!(matches!(
        error,
        MessageError::TooLong {
            got: 2,
            limit: 1,
            ..
        }
    ));
    model.push(b"5").unwrap();
    let model = model.finish().unwrap();
    assert_eq!(
        (&model.layout[..], &model.note[..]),
        (&b"123"[..], &b"45"[..])
    );
    assert!(ModelAssembler::new(63, 0, 0).unwrap().finish().is_ok());
}

#[test]
fn lengths_are_bounded_before_anything_is_allocated() {
    let refused = allocation_counter::measure(|| {
        for (index, layout, note) in [
            (64, 1, 1),
            (0, MAX_LAYOUT + 1, 1),
            (0, 1, MAX_NOTE + 1),
            (0, u64::MAX, u64::MAX),
        ] {
            assert!(ModelAssembler::new(index, layout, note).is_err());
        }
    });
    assert!(refused.bytes_max < 1 << 10, "{refused:?}");
    let accepted = allocation_counter::measure(|| {
        let mut model = ModelAssembler::new(0, MAX_LAYOUT, MAX_NOTE).unwrap();
        model.push(&[1; 1000]).unwrap();
        model.push(&[2; 1]).unwrap();
    });
    assert!(accepted.bytes_max < 4000, "{accepted:?}");
}
