//! What the two ends of shared memory say to each other over their Unix socket.

use weightsync_core::{Epoch, Run, Version, WorkerId};
use weightsync_fuzz::fuzz;
use weightsync_mem::wire::{
    Delivery, FromReader, FromSender, MAX_DEVICE, MAX_KNOWN, MAX_PACKET, Models, Want,
};

#[test]
fn from_reader() {
    let hello = |models, delivery| FromReader::Hello {
        secret: *b"0123456789abcdef",
        worker: WorkerId(3),
        seen: Epoch(2),
        models,
        delivery,
        device: "cuda:0".into(),
        instance: 77,
    };
    let (model, version) = (1, Version(42));
    let seeds = [
        hello(Models::ALL, Delivery::Newest),
        hello(Models(0b101), Delivery::Every { bound: 8 }),
        hello(Models(2), Delivery::Asked),
        FromReader::Refused {
            sequence: 42,
            reason: "the layout is another: ü".into(),
        },
        FromReader::Room,
        FromReader::Withdraw,
        FromReader::Ask {
            question: 1,
            want: Want::Newest,
        },
        FromReader::Ask {
            question: 2,
            want: Want::AtLeast { model, version },
        },
        FromReader::Ask {
            question: 3,
            want: Want::Exactly { model, version },
        },
    ];
    let seeds = seeds.iter().map(FromReader::encode);
    fuzz!("from_reader", seeds, |bytes: &[u8]| {
        if let Ok(message) = FromReader::decode(bytes) {
            if let FromReader::Hello { models, device, .. } = &message {
                assert!(!models.is_empty() && device.len() <= MAX_DEVICE);
            }
            // Text that is not UTF-8 is mended and cut, so only the second form must be stable.
            let packet = message.encode();
            assert!(packet.len() <= MAX_PACKET);
            let again = FromReader::decode(&packet).expect("a message of its own making");
            assert_eq!(again.encode(), packet);
        }
    });
}

#[test]
fn from_sender() {
    let run = Run {
        epoch: Epoch(7),
        id: [1; 16],
    };
    let seeds = [
        FromSender::Welcome {
            run,
            count: 3,
            models: Models(0b101),
            relayed: 0,
        },
        FromSender::Model {
            index: 2,
            slots: 3,
            slot_bytes: 1 << 30,
            layout_bytes: 4096,
            note_bytes: 100,
        },
        FromSender::Denied {
            reason: "no such model".into(),
        },
        FromSender::Slot { model: 2, index: 2 },
        FromSender::NoSuchVersion {
            question: 3,
            model: 2,
            asked: Version(9),
            known: vec![Version(4), Version(3)],
        },
    ];
    let seeds = seeds.iter().map(FromSender::encode);
    fuzz!("from_sender", seeds, |bytes: &[u8]| {
        if let Ok(message) = FromSender::decode(bytes) {
            if let FromSender::NoSuchVersion { known, .. } = &message {
                assert!(known.len() <= MAX_KNOWN);
            }
            // Text that is not UTF-8 is mended and cut, so only the second form must be stable.
            let packet = message.encode();
            assert!(packet.len() <= MAX_PACKET);
            let again = FromSender::decode(&packet).expect("a message of its own making");
            assert_eq!(again.encode(), packet);
        }
    });
}
