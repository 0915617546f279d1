//! Every message there and back, and what is refused.

use super::*;

fn readers() -> Vec<ReaderMessage> {
    let hello = |models, delivery, device: &str| ReaderMessage::Hello {
        secret: *b"sixteen bytes ok",
        worker: WorkerId(3),
        seen: Epoch(9),
        models,
        delivery,
        device: device.into(),
        instance: 77,
    };
    let (model, version) = (63, Version(1 << 40));
    let asks = [
        Want::Newest,
        Want::AtLeast { model, version },
        Want::Exactly { model, version },
    ];
    let asks = asks.map(|want| ReaderMessage::Ask {
        question: 1 << 50,
        want,
    });
    let mut messages = vec![
        hello(ModelMask::ALL, Delivery::Newest, ""),
        hello(ModelMask(5), Delivery::Every { bound: MAX_BOUND }, "cuda:0"),
        hello(ModelMask(1 << 63), Delivery::Asked, "größer"),
        ReaderMessage::Refused {
            sequence: 4,
            reason: "wrong shape: größer".into(),
        },
    ];
    messages.extend([ReaderMessage::Room, ReaderMessage::Withdraw]);
    messages.extend(asks);
    messages
}

fn senders() -> Vec<SenderMessage> {
    let no_such = |known| SenderMessage::NoSuchVersion {
        question: 1 << 50,
        model: 63,
        asked: Version(7),
        known,
    };
    let run = Run {
        epoch: Epoch(2),
        id: [5; 16],
    };
    vec![
        SenderMessage::Welcome {
            run,
            count: 64,
            models: ModelMask::ALL,
            relayed: 0,
        },
        SenderMessage::Welcome {
            run,
            count: 3,
            models: ModelMask(0b101),
            relayed: 0,
        },
        SenderMessage::Model {
            index: 63,
            slots: 64,
            slot_bytes: 1 << 40,
            layout_bytes: 77,
            note_bytes: 0,
        },
        SenderMessage::Denied {
            reason: String::new(),
        },
        SenderMessage::Slot {
            model: 63,
            index: 63,
        },
        no_such(Vec::new()),
        no_such((1..=MAX_KNOWN as u64).map(Version).collect()),
    ]
}

#[test]
fn messages_come_back_as_they_were() {
    for message in readers() {
        assert_eq!(ReaderMessage::decode(&message.encode()).unwrap(), message);
    }
    for message in senders() {
        assert_eq!(SenderMessage::decode(&message.encode()).unwrap(), message);
    }
}

#[test]
fn cut_and_lengthened_packets_are_refused() {
    for packet in readers().iter().map(ReaderMessage::encode) {
        for len in 0..packet.len() {
            assert!(
                ReaderMessage::decode(&packet[..len]).is_err(),
                "{len} of {}",
                packet.len()
            );
        }
        assert!(ReaderMessage::decode(&[&packet[..], b"x"].concat()).is_err());
    }
    for packet in senders().iter().map(SenderMessage::encode) {
        for len in 0..packet.len() {
            assert!(
                SenderMessage::decode(&packet[..len]).is_err(),
                "{len} of {}",
                packet.len()
            );
        }
        assert!(SenderMessage::decode(&[&packet[..], b"x"].concat()).is_err());
    }
}

#[test]
fn long_texts_are_cut_at_a_character() {
    let reason = "ö".repeat(2 * MAX_TEXT);
    let packet = SenderMessage::Denied { reason }.encode();
    assert!(packet.len() <= MAX_PACKET);
    let SenderMessage::Denied { reason } = SenderMessage::decode(&packet).unwrap() else {
        panic!("another message came back")
    };
    assert_eq!(reason, "ö".repeat(MAX_TEXT / 2));
}

#[test]
fn numbers_out_of_range_are_refused() {
    let hello = |models, delivery| {
        ReaderMessage::Hello {
            secret: [0; 16],
            worker: WorkerId(0),
            seen: Epoch(0),
            models,
            delivery,
            device: String::new(),
            instance: 77,
        }
        .encode()
    };
    let ask = |want| ReaderMessage::Ask { question: 1, want }.encode();
    let beyond = MAX_BOUND + 1;
    for packet in [
        hello(ModelMask(0), Delivery::Newest),
        hello(ModelMask::ALL, Delivery::Every { bound: 0 }),
        hello(ModelMask::ALL, Delivery::Every { bound: beyond }),
        ask(Want::AtLeast {
            model: 64,
            version: Version(1),
        }),
        ask(Want::Exactly {
            model: 256,
            version: Version(1),
        }),
        ask(Want::Exactly {
            model: 0,
            version: Version::NONE,
        }),
    ] {
        assert!(ReaderMessage::decode(&packet).is_err(), "{packet:?}");
    }
    let welcome = |count, models| {
        SenderMessage::Welcome {
            run: Run {
                epoch: Epoch(0),
                id: [0; 16],
            },
            count,
            models,
            relayed: 0,
        }
        .encode()
    };
    let model = |index, slots| {
        SenderMessage::Model {
            index,
            slots,
            slot_bytes: 0,
            layout_bytes: 0,
            note_bytes: 0,
        }
        .encode()
    };
    let slot = |model, index| SenderMessage::Slot { model, index }.encode();
    for packet in [
        welcome(0, ModelMask(1)),
        welcome(65, ModelMask(1)),
        welcome(3, ModelMask(0b1000)),
        welcome(3, ModelMask(0)),
        model(64, 1),
        model(0, 0),
        model(0, 65),
        slot(64, 0),
        slot(0, 64),
    ] {
        assert!(SenderMessage::decode(&packet).is_err(), "{packet:?}");
    }
}

#[test]
fn long_lists_and_labels_are_cut() {
    let known = (1..100).map(Version).collect();
    let (model, asked) = (0, Version(1));
    let packet = SenderMessage::NoSuchVersion {
        question: 1,
        model,
        asked,
        known,
    }
    .encode();
    let SenderMessage::NoSuchVersion { known, .. } = SenderMessage::decode(&packet).unwrap() else {
        panic!("another message came back")
    };
    assert_eq!(known, (1..=16).map(Version).collect::<Vec<_>>());
    let mut packet = ReaderMessage::Hello {
        secret: [0; 16],
        worker: WorkerId(0),
        seen: Epoch(0),
        models: ModelMask::ALL,
        delivery: Delivery::Newest,
        device: "x".repeat(100),
        instance: 77,
    }
    .encode();
    // Bytes that are no characters grow when they are mended.
    let len = packet.len();
    packet[len - 64..].fill(0xff);
    let ReaderMessage::Hello { device, .. } = ReaderMessage::decode(&packet).unwrap() else {
        panic!("another message came back")
    };
    assert!(device.len() <= MAX_DEVICE && device.starts_with(char::REPLACEMENT_CHARACTER));
}

#[test]
fn another_protocol_version_is_named() {
    let mut packet = SenderMessage::Slot { model: 0, index: 0 }.encode();
    packet[4] = 9;
    let error = SenderMessage::decode(&packet).unwrap_err().to_string();
    assert!(
        error.contains("version 9") && error.contains("same weightsync"),
        "{error}"
    );
}
