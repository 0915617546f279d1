//! Frames and blocks, out of pieces of any size.

use proptest::collection::vec;
use proptest::prelude::*;
use weightsync_core::Version;
use weightsync_link::frame::*;
use weightsync_net::wire::image::*;

use crate::samples;

const BULK: &[FrameKind] = &[FrameKind::Bulk, FrameKind::Block];

proptest! {
    #[test]
    fn frames_round_trip_in_pieces_of_any_size(
        payloads in vec(vec(any::<u8>(), 1..300), 1..10),
        piece in 1_usize..400,
    ) {
        let mut stream = Vec::new();
        for payload in &payloads {
            encode(FrameKind::Bulk, payload, &mut stream).unwrap();
        }
        let mut decoder = Decoder::new(BULK);
        let mut came = Vec::new();
        for mut input in stream.chunks(piece) {
            while let Some(frame) = decoder.next(&mut input).unwrap() {
                came.push(frame.payload.to_vec());
            }
            prop_assert!(input.is_empty());
        }
        prop_assert!(came == payloads && decoder.is_between_frames());
    }

    #[test]
    fn any_block_head_comes_back(
        (model, version, crc) in (0_u8..64, 1..=u64::MAX, any::<u64>()),
        (index, image_bytes) in (any::<u32>(), any::<u64>()),
    ) {
        let version = Version(version);
        let mut head = BlockHead { model, version, index, bytes: 1, crc, image_bytes };
        // An image that has this block.
        let least = head.offset() + 1;
        head.image_bytes = least + image_bytes % (u64::MAX - least);
        let left = head.image_bytes - head.offset();
        head.bytes = left.min(BLOCK_BYTES.into()) as u32;
        let frame = head.frame();
        prop_assert_eq!(BlockHead::decode(&frame[HEADER_BYTES..]), Ok(head));
    }

    #[test]
    fn an_image_has_the_blocks_that_its_heads_may_name(image_bytes in 1_u64..(40 << 20)) {
        let count = blocks(image_bytes).unwrap();
        let mut sum = 0;
        for index in 0..=count {
            let left = image_bytes.saturating_sub(u64::from(index) * u64::from(BLOCK_BYTES));
            let bytes = left.min(BLOCK_BYTES.into()) as u32;
            let head = BlockHead { index, bytes, image_bytes, ..samples::block() };
            let decoded = BlockHead::decode(&head.frame()[HEADER_BYTES..]);
            prop_assert_eq!(decoded.is_ok(), index < count);
            sum += u64::from(bytes);
        }
        prop_assert_eq!(sum, image_bytes);
    }
}

#[test]
fn decoder_leaves_block_bytes_to_the_caller() {
    let head = samples::block();
    let mut stream = head.frame().to_vec();
    stream.extend_from_slice(samples::BLOCK_DATA);
    encode(FrameKind::Bulk, b"next", &mut stream).unwrap();

    let mut decoder = Decoder::new(BULK);
    let mut input = &stream[..];
    let frame = decoder.next(&mut input).unwrap().unwrap();
    assert_eq!(frame.kind, FrameKind::Block);
    let head = BlockHead::decode(frame.payload).unwrap();
    let data = input.split_off(..head.bytes as usize).unwrap();
    head.check(data).unwrap();
    let next = decoder.next(&mut input).unwrap().unwrap();
    assert_eq!((next.kind, next.payload), (FrameKind::Bulk, &b"next"[..]));
}

#[test]
fn a_damaged_block_is_noticed() {
    let head = samples::block();
    let data = samples::BLOCK_DATA;
    head.check(data).unwrap();
    head.check_crc(weightsync_simd::crc64(data)).unwrap();
    for bit in 0..8 * data.len() {
        let mut wrong = data.to_vec();
        wrong[bit / 8] ^= 1 << (bit % 8);
        let error = head.check(&wrong).unwrap_err();
        assert!(matches!(error, FrameError::Checksum { bytes: 7, .. }));
    }
    assert!(head.check(&data[1..]).is_err());
    assert!(head.check(&[data, b"x"].concat()).is_err());
}

#[test]
fn deltas_that_cannot_be_are_refused() {
    let head = samples::delta();
    let (version, base) = (Version::NONE, Version::NONE);
    for wrong in [
        DeltaHead { model: 64, ..head },
        DeltaHead { version, ..head },
        DeltaHead { base, ..head },
        DeltaHead {
            base: head.version,
            ..head
        },
        DeltaHead {
            base: Version(43),
            ..head
        },
        // As many bytes as the span has are sent as they are.
        DeltaHead { bytes: 64, ..head },
        DeltaHead {
            bytes: u32::MAX,
            ..head
        },
        DeltaHead { index: 2, ..head },
        DeltaHead {
            index: u32::MAX,
            ..head
        },
        DeltaHead {
            image_bytes: 0,
            ..head
        },
    ] {
        let decoded = DeltaHead::decode(&wrong.frame()[HEADER_BYTES..]);
        assert_eq!(decoded, Err(ImageError::Delta { head: wrong }));
    }
    let frame = head.frame();
    for at in 1..8 {
        let mut payload = frame[HEADER_BYTES..].to_vec();
        payload[at] = 1;
        assert_eq!(DeltaHead::decode(&payload), Err(FrameError::Zeros.into()));
    }
    assert!(DeltaHead::decode(&frame[HEADER_BYTES..][1..]).is_err());
    for bit in 0..8 * samples::DELTA_DATA.len() {
        let mut data = samples::DELTA_DATA.to_vec();
        data[bit / 8] ^= 1 << (bit % 8);
        let error = head.check(&data).unwrap_err();
        assert!(matches!(error, FrameError::Checksum { bytes: 7, .. }));
    }
    assert!(head.check(&samples::DELTA_DATA[1..]).is_err());
}

#[test]
fn impossible_block_heads_are_refused() {
    let head = samples::block();
    let version = Version::NONE;
    for wrong in [
        BlockHead { model: 64, ..head },
        BlockHead { version, ..head },
        BlockHead { bytes: 0, ..head },
        BlockHead { bytes: 8, ..head },
        BlockHead { index: 2, ..head },
        BlockHead { index: 0, ..head },
        BlockHead {
            image_bytes: 0,
            ..head
        },
        BlockHead {
            index: u32::MAX,
            bytes: BLOCK_BYTES,
            ..head
        },
        BlockHead {
            index: 0,
            bytes: BLOCK_BYTES + 1,
            image_bytes: u64::MAX,
            ..head
        },
    ] {
        let decoded = BlockHead::decode(&wrong.frame()[HEADER_BYTES..]);
        assert_eq!(decoded, Err(ImageError::Block { head: wrong }));
    }
    let frame = head.frame();
    for at in 1..8 {
        let mut payload = frame[HEADER_BYTES..].to_vec();
        payload[at] = 1;
        assert_eq!(BlockHead::decode(&payload), Err(FrameError::Zeros.into()));
    }
    assert!(BlockHead::decode(&frame[HEADER_BYTES..][1..]).is_err());
    assert_eq!(blocks(0), Ok(0));
    assert_eq!(blocks(u64::from(u32::MAX) << 20), Ok(u32::MAX));
    assert!(blocks((u64::from(u32::MAX) << 20) + 1).is_err());
}

#[test]
fn lengths_are_within_the_bounds_of_the_kind() {
    let header = |kind: FrameKind, len: u32| {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        bytes[4] = kind.code();
        FrameHeader::decode(
            &bytes,
            &[
                FrameKind::Control,
                FrameKind::Bulk,
                FrameKind::Block,
                FrameKind::Delta,
                FrameKind::Piece,
            ],
        )
    };
    for (kind, least, most) in [
        (FrameKind::Control, 1, 1 << 20),
        (FrameKind::Bulk, 1, 64 << 10),
        (FrameKind::Block, 40, 40),
        (FrameKind::Delta, 48, 48),
        (FrameKind::Piece, 1, 256 << 10),
    ] {
        for len in [least, most] {
            assert_eq!(header(kind, len).unwrap().len, len as usize);
        }
        for got in [least - 1, most + 1, u32::MAX] {
            let expected = FrameError::Length {
                kind,
                got,
                least: least as usize,
                most: most as usize,
            };
            assert_eq!(header(kind, got), Err(expected));
        }
        let too_long = vec![0; most as usize + 1];
        let mut out = Vec::new();
        assert!(encode(kind, &too_long, &mut out).is_err() && out.is_empty());
        assert!(encode(kind, &[], &mut out).is_err() && out.is_empty());
    }
}

#[test]
fn decoder_accepts_only_kinds_of_its_link() {
    let mut frame = Vec::new();
    encode(FrameKind::Control, b"hello", &mut frame).unwrap();
    let mut decoder = Decoder::new(BULK);
    for _ in 0..3 {
        let error = decoder.next(&mut &frame[..]).unwrap_err();
        assert_eq!(error, FrameError::Kind { got: 1 }, "and it stays so");
    }
    for got in [0, 4, 255] {
        let mut unknown = frame.clone();
        unknown[4] = got;
        let mut decoder = Decoder::new(&[FrameKind::Control]);
        let error = decoder.next(&mut &unknown[..]).unwrap_err();
        assert_eq!(error, FrameError::Kind { got });
    }
}

#[test]
fn a_decoder_holds_what_came_and_no_more() {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    header[4] = FrameKind::Control.code();
    // A length that is stated, and then hardly anything.
    let claimed = allocation_counter::measure(|| {
        let mut decoder = Decoder::new(&[FrameKind::Control]);
        assert!(decoder.next(&mut &header[..]).unwrap().is_none());
        for _ in 0..100 {
            assert!(decoder.next(&mut &[7_u8; 10][..]).unwrap().is_none());
        }
        assert!(!decoder.is_between_frames());
    });
    assert!(claimed.bytes_max < 4000, "{claimed:?}");

    // A length that is too long.
    header[2] = 0x10;
    header[0] = 1;
    let refused = allocation_counter::measure(|| {
        let mut decoder = Decoder::new(&[FrameKind::Control]);
        assert!(decoder.next(&mut &header[..]).is_err());
    });
    assert!(refused.bytes_max < 1000, "{refused:?}");

    // After a long one the room is given back.
    let mut stream = Vec::new();
    encode(FrameKind::Control, &vec![1; MAX_FRAME], &mut stream).unwrap();
    encode(FrameKind::Control, b"short", &mut stream).unwrap();
    let mut decoder = Decoder::new(&[FrameKind::Control]);
    let kept = allocation_counter::measure(|| {
        let mut input = &stream[..];
        while decoder.next(&mut input).unwrap().is_some() {}
    });
    assert!(kept.bytes_current < 8 << 10, "{kept:?}");
    assert!(kept.bytes_max <= (1 << 20) + (8 << 10), "{kept:?}");
}
