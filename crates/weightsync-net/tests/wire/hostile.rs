//! Bytes that were cut, damaged or made up are refused, without harm and without large allocations.

use std::fmt::Debug;

use proptest::prelude::*;
use weightsync_link::frame::*;
use weightsync_link::message::*;
use weightsync_net::wire::image::*;
use weightsync_net::wire::message::*;

use crate::golden::{all, frames};
use crate::samples;

const ALL: &[FrameKind] = &[
    FrameKind::Control,
    FrameKind::Bulk,
    FrameKind::Block,
    FrameKind::Delta,
    FrameKind::Piece,
];

/// Every golden file that begins with a whole frame.
fn golden_frames() -> impl Iterator<Item = (String, Vec<u8>)> {
    let framed = |name: &String| !name.starts_with("hello/") && name != "frame/header";
    all().into_iter().filter(move |(name, _)| framed(name))
}

#[test]
fn frame_rejects_every_cut_and_flipped_bit() {
    for (name, mut bytes) in golden_frames() {
        if name == "frame/chunk" {
            bytes.truncate(HEADER_BYTES + BLOCK_HEAD_BYTES);
        }
        if name == "frame/delta" {
            bytes.truncate(HEADER_BYTES + DELTA_HEAD_BYTES);
        }
        for len in 0..bytes.len() {
            let mut decoder = Decoder::new(ALL);
            let frame = decoder.next(&mut &bytes[..len]);
            assert_eq!(frame, Ok(None), "{name} cut after {len}");
            assert_eq!(decoder.is_between_frames(), len == 0, "{name}");
        }
        for bit in 0..8 * bytes.len() {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let mut decoder = Decoder::new(ALL);
            let frame = decoder.next(&mut &wrong[..]);
            // A length that grew leaves it waiting for the rest.
            let grew = bit < 32 && wrong[bit / 8] > bytes[bit / 8];
            assert!(
                frame.is_err() || grew && frame == Ok(None),
                "{name}, bit {bit}: {frame:?}"
            );
        }
    }
}

/// As if the checksum had been mended by who did the damage.
fn bears_damage<M: Message + PartialEq + Debug>(samples: &[(&'static str, M)]) {
    for (name, frame) in frames(samples) {
        let payload = &frame[HEADER_BYTES..];
        for len in 0..payload.len() {
            let cut = M::decode(&payload[..len]);
            assert!(cut.is_err(), "{name} cut after {len}: {cut:?}");
        }
        for bit in 0..8 * payload.len() {
            let mut wrong = payload.to_vec();
            wrong[bit / 8] ^= 1 << (bit % 8);
            if let Ok(message) = M::decode(&wrong) {
                let again = message.encode().expect("what was accepted can be sent");
                assert_eq!(M::decode(&again), Ok(message), "{name}, bit {bit}");
            }
        }
    }
}

#[test]
fn payload_decoder_survives_damage_past_the_checksum() {
    bears_damage(&samples::to_root());
    bears_damage(&samples::from_root());
    bears_damage(&samples::to_parent());
    bears_damage(&samples::to_child());
    bears_damage(&samples::to_trainer());
    bears_damage(&samples::to_worker());
    bears_damage(&[("status", samples::status())]);
    let frame = samples::block().frame();
    for bit in 0..8 * BLOCK_HEAD_BYTES {
        let mut payload = frame[HEADER_BYTES..].to_vec();
        payload[bit / 8] ^= 1 << (bit % 8);
        if let Ok(head) = BlockHead::decode(&payload) {
            assert_eq!(head.frame()[HEADER_BYTES..], payload);
        }
    }
    let frame = samples::delta().frame();
    for bit in 0..8 * DELTA_HEAD_BYTES {
        let mut payload = frame[HEADER_BYTES..].to_vec();
        payload[bit / 8] ^= 1 << (bit % 8);
        if let Ok(head) = DeltaHead::decode(&payload) {
            assert_eq!(head.frame()[HEADER_BYTES..], payload);
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
        let mut decoder = Decoder::new(ALL);
        let mut input = &bytes[..];
        while let Ok(Some(_)) = decoder.next(&mut input) {}
        let payload = [&[FORMAT], &bytes[..]].concat();
        let _ = ToRoot::decode(&payload);
        let _ = FromRoot::decode(&payload);
        let _ = ToParent::decode(&payload);
        let _ = ToChild::decode(&payload);
        let _ = ToTrainer::decode(&payload);
        let _ = ToWorker::decode(&payload);
        let _ = JsonReply::decode(&payload);
        let _ = BlockHead::decode(&bytes);
    }
}

/// Lengths of the most that a varint can say, in front of nothing.
#[test]
fn huge_lengths_are_refused_before_allocation() {
    const HUGE: [u8; 9] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    let huge = |before: &[u8]| [&[FORMAT], before, &HUGE].concat();
    let host = [0; 16];
    // The bytes before the length: the variant, and the fields before it.
    let to_root = [
        huge(&[0]),
        huge(&[&[0, 0][..], &host, &[0, 0, 0]].concat()),
        huge(&[1, 0, 0, 0, 0, 1, 0]),
        huge(&[2]),
        huge(&[2, 1, 0, 0, 0, 0, 0, 0]),
        huge(&[4, 0, 0]),
        huge(&[7]),
        huge(&[7, 0]),
        huge(&[9, 0]),
    ];
    let from_root = [
        huge(&[&[0, 0][..], &host, &[1]].concat()),
        huge(&[2]),
        huge(&[3]),
        huge(&[5, 0]),
        huge(&[6, 0]),
        huge(&[6, 0, 0]),
        huge(&[7, 0, 0, 0]),
        huge(&[8, 0, 0, 0, 0]),
        huge(&[9, 0, 0]),
        huge(&[10, 0, 1]),
    ];
    let used = allocation_counter::measure(|| {
        for payload in &to_root {
            assert!(ToRoot::decode(payload).is_err());
        }
        for payload in &from_root {
            assert!(FromRoot::decode(payload).is_err());
        }
        let fetch = huge(&[&[0, 0][..], &host, &[0, 0, 1]].concat());
        assert!(ToParent::decode(&fetch).is_err());
        assert!(ToChild::decode(&huge(&[2])).is_err());
        assert!(ToChild::decode(&huge(&[3])).is_err());
        assert!(ToTrainer::decode(&huge(&[1])).is_err());
        assert!(ToWorker::decode(&huge(&[1])).is_err());
        assert!(ToWorker::decode(&huge(&[3])).is_err());
        assert!(ToWorker::decode(&huge(&[4])).is_err());
        assert!(JsonReply::decode(&huge(&[])).is_err());
    });
    assert!(used.bytes_max < 4 << 10, "{used:?}");
}

/// The most that a frame's worth of bytes makes of itself.
#[test]
fn decoded_frame_size_is_bounded() {
    // Format, `Notify`, sequence, an empty set, then as many workers as a frame has bytes.
    let mut payload = vec![FORMAT, 6, 1, 0, 0xf0, 0xff, 0x3f];
    payload.resize(MAX_FRAME, 0);
    let used = allocation_counter::measure(|| {
        assert!(FromRoot::decode(&payload).is_err());
    });
    assert!(used.bytes_max <= 16 * MAX_FRAME as u64, "{used:?}");
    // Format, `Progress`, as many workers as fit, nine bytes each.
    let mut payload = vec![FORMAT, 2, 0xff, 0xff, 0x06];
    payload.resize(MAX_FRAME, 0);
    let used = allocation_counter::measure(|| {
        assert!(ToRoot::decode(&payload).is_err());
    });
    assert!(used.bytes_max <= 32 * MAX_FRAME as u64, "{used:?}");
}
