//! What the two ends of shared memory say to each other over their Unix socket.

use weightsync_core::{Epoch, Run, Version, WorkerId};
use weightsync_fuzz::fuzz;
use weightsync_mem::wire::{
    Delivery, MAX_DEVICE, MAX_KNOWN, MAX_PACKET, ModelMask, ReaderMessage, SenderMessage, Want,
};

#[test]
fn from_reader() {
    let hello = |models, delivery| ReaderMessage::Hello {
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
        hello(ModelMask::ALL, Delivery::Newest),
        hello(ModelMask(0b101), Delivery::Every { bound: 8 }),
        hello(ModelMask(2), Delivery::Asked),
        ReaderMessage::Refused {
            sequence: 42,
            reason: "the layout is another: ü".into(),
        },
        ReaderMessage::Room,
        ReaderMessage::Withdraw,
        ReaderMessage::Ask {
            question: 1,
            want: Want::Newest,
        },
        ReaderMessage::Ask {
            question: 2,
            want: Want::AtLeast { model, version },
        },
        ReaderMessage::Ask {
            question: 3,
            want: Want::Exactly { model, version },
        },
    ];
    let seeds = seeds.iter().map(ReaderMessage::encode);
    fuzz!("from_reader", seeds, |bytes: &[u8]| {
        if let Ok(message) = ReaderMessage::decode(bytes) {
            if let ReaderMessage::Hello { models, device, .. } = &message {
                assert!(!models.is_empty() && device.len() <= MAX_DEVICE);
            }
            // Text that is not UTF-8 is mended and cut, so only the second form must be stable.
            let packet = message.encode();
            assert!(packet.len() <= MAX_PACKET);
            let again = ReaderMessage::decode(&packet).expect("a message of its own making");
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
        SenderMessage::Welcome {
            run,
            count: 3,
            models: ModelMask(0b101),
            relayed: 0,
        },
        SenderMessage::Model {
            index: 2,
            slots: 3,
            slot_bytes: 1 << 30,
            layout_bytes: 4096,
            note_bytes: 100,
        },
        SenderMessage::Denied {
            reason: "no such model".into(),
        },
        SenderMessage::Slot { model: 2, index: 2 },
        SenderMessage::NoSuchVersion {
            question: 3,
            model: 2,
            asked: Version(9),
            known: vec![Version(4), Version(3)],
        },
    ];
    let seeds = seeds.iter().map(SenderMessage::encode);
    fuzz!("from_sender", seeds, |bytes: &[u8]| {
        if let Ok(message) = SenderMessage::decode(bytes) {
            if let SenderMessage::NoSuchVersion { known, .. } = &message {
                assert!(known.len() <= MAX_KNOWN);
            }
            // Text that is not UTF-8 is mended and cut, so only the second form must be stable.
            let packet = message.encode();
            assert!(packet.len() <= MAX_PACKET);
            let again = SenderMessage::decode(&packet).expect("a message of its own making");
            assert_eq!(again.encode(), packet);
        }
    });
}
