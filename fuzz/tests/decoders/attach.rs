//! What the two ends of shared memory say to each other over their Unix socket.

use weightsync_core::{Epoch, LayoutId, Run, Version, WorkerId};
use weightsync_fuzz::fuzz;
use weightsync_mem::wire::{FromReader, FromSender, MAX_PACKET};

#[test]
fn from_reader() {
    let hello = |layout| FromReader::Hello {
        secret: *b"0123456789abcdef",
        worker: WorkerId(3),
        seen: Epoch(2),
        layout,
    };
    let seeds = [
        hello(None),
        hello(Some(LayoutId([9; 32]))),
        FromReader::Refused {
            version: Version(42),
            reason: "the layout is another: ü".into(),
        },
    ];
    let seeds = seeds.iter().map(FromReader::encode);
    fuzz!("from_reader", seeds, |bytes: &[u8]| {
        if let Ok(message) = FromReader::decode(bytes) {
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
            slots: 3,
            slot_bytes: 1 << 30,
            layout_bytes: 4096,
        },
        FromSender::Denied {
            reason: "no such model".into(),
        },
        FromSender::Slot { index: 2 },
    ];
    let seeds = seeds.iter().map(FromSender::encode);
    fuzz!("from_sender", seeds, |bytes: &[u8]| {
        if let Ok(message) = FromSender::decode(bytes) {
            // Text that is not UTF-8 is mended and cut, so only the second form must be stable.
            let packet = message.encode();
            assert!(packet.len() <= MAX_PACKET);
            let again = FromSender::decode(&packet).expect("a message of its own making");
            assert_eq!(again.encode(), packet);
        }
    });
}
