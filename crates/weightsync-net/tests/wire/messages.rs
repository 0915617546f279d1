//! Messages there and back, and what is refused in either direction.

use std::fmt::Debug;

use proptest::prelude::*;
use weightsync_core::{Epoch, Version, WorkerId};
use weightsync_link::frame::MAX_FRAME;
use weightsync_link::message::*;
use weightsync_net::wire::image::MAX_MODELS;
use weightsync_net::wire::message::*;

use crate::any;
use crate::samples::{self, RUN, item};

fn comes_back<M: Message + PartialEq + Debug>(message: &M) {
    let payload = message.encode().expect("it is within its bounds");
    assert_eq!(M::decode(&payload).as_ref(), Ok(message));
}

proptest! {
    #[test]
    fn any_message_comes_back(
        to_root in any::to_root(),
        from_root in any::from_root(),
        to_parent in any::to_parent(),
        to_child in any::to_child(),
        to_trainer in any::to_trainer(),
        to_worker in any::to_worker(),
        status in any::status(),
    ) {
        comes_back(&to_root);
        comes_back(&from_root);
        comes_back(&to_parent);
        comes_back(&to_child);
        comes_back(&to_trainer);
        comes_back(&to_worker);
        comes_back(&status);
    }
}

/// Refused when it is sent. What comes is held to the same: `decoding_refuses_messages_out_of_bounds`.
fn refused<M: Message>(message: &M) -> String {
    message
        .encode()
        .expect_err("it is out of its bounds")
        .to_string()
}

fn agent(bulk: Option<u16>, holds: Vec<Item>) -> ToRoot {
    ToRoot::Agent {
        name: "a".into(),
        host: [0; 16],
        pid: 1,
        bulk,
        seen: Epoch(0),
        holds,
        run: Some(RUN),
    }
}

fn who(worker: u32, instance: u64) -> WorkerInstance {
    let worker = WorkerId(worker);
    WorkerInstance { worker, instance }
}

fn join(models: u64, delivery: Delivery) -> ToRoot {
    ToRoot::Join(WorkerJoin {
        ticket: 1,
        who: who(0, 1),
        pid: 1,
        models,
        delivery,
        device: String::new(),
        seen: Epoch(0),
    })
}

fn fetch(ranges: &[(u32, u32)]) -> ToParent {
    let ranges = ranges.iter();
    ToParent::Fetch(WantedBlocks {
        run: RUN,
        agent: 1,
        model: 0,
        version: Version(1),
        base: None,
        ranges: ranges
            .map(|&(first, count)| BlockRange { first, count })
            .collect(),
    })
}

fn welcome(agent: u64, address: &str, models: u8, slots: u8, max_slots: u8) -> FromRoot {
    FromRoot::Welcome(Welcome {
        run: RUN,
        agent,
        address: address.into(),
        models,
        slots,
        max_slots,
        pid: 1,
        settings: String::new(),
    })
}

#[test]
fn encoding_refuses_messages_out_of_bounds() {
    let many = |count| vec![item(0, 1); count];
    let progress = |workers| ToRoot::Progress { workers };
    let worker = |versions| WorkerProgress {
        who: who(0, 0),
        taken: 0,
        through: 0,
        loaded: 0,
        versions,
        refused: None,
    };
    let ask = |want| ToRoot::Ask {
        who: who(0, 0),
        question: 0,
        want,
    };
    for (message, part) in [
        (agent(Some(0), vec![]), "a port from 1"),
        (agent(None, vec![item(64, 1)]), "a model below 64"),
        (agent(None, vec![item(0, 0)]), "a version from 1"),
        (agent(None, many(4097)), "4097 is over the limit of 4096"),
        (join(0, Delivery::Newest), "at least one model"),
        (join(1, Delivery::Every { bound: 0 }), "a bound of 1 to 32"),
        (join(1, Delivery::Every { bound: 33 }), "got 33"),
        (
            progress(vec![worker(many(65))]),
            "65 is over the limit of 64",
        ),
        (progress(vec![worker(many(2))]), "model 0 twice"),
        (progress(vec![worker(vec![]); 4097]), "limit of 4096"),
        (
            ask(Want::AtLeast {
                model: 64,
                version: Version(1),
            }),
            "a model below 64",
        ),
        (
            ask(Want::Exactly {
                model: 0,
                version: Version::NONE,
            }),
            "a version from 1",
        ),
        (
            ToRoot::Holds {
                have: vec![],
                dropped: many(4097),
            },
            "limit of 4096",
        ),
        (ToRoot::Missing { item: item(0, 0) }, "a version from 1"),
    ] {
        let words = refused(&message);
        assert!(words.contains(part), "{part} in {words}");
    }

    let tell = |set, workers| FromRoot::Notify {
        sequence: 1,
        set,
        workers,
    };
    let model = |index, layout_bytes, note_bytes| FromRoot::Model {
        index,
        layout_bytes,
        note_bytes,
    };
    let part = |len| FromRoot::Part {
        bytes: vec![0; len],
    };
    let no_such = |known| FromRoot::NoSuchVersion {
        worker: WorkerId(0),
        question: 1,
        model: 0,
        asked: Version::NONE,
        known,
    };
    let long = "x".repeat(1025);
    for (message, part) in [
        (welcome(0, "a", 1, 1, 1), "an agent from 1"),
        (welcome(1, "", 1, 1, 1), "an address"),
        (welcome(1, &long, 1, 1, 1), "1025 is over the limit of 1024"),
        (welcome(1, "a", 0, 1, 1), "1 to 64 models"),
        (welcome(1, "a", 65, 1, 1), "got 65"),
        (welcome(1, "a", 1, 0, 1), "0 slots"),
        (welcome(1, "a", 1, 3, 2), "3 slots, at most 2"),
        (welcome(1, "a", 1, 3, 65), "at most 65"),
        (model(64, 1, 1), "a model below 64"),
        (model(0, (64 << 20) + 1, 0), "bytes of a layout"),
        (model(0, 1, (16 << 20) + 1), "bytes of a note"),
        (part(0), "at least one byte"),
        (part((512 << 10) + 1), "limit of 524288"),
        (tell(many(2), vec![]), "model 0 twice"),
        (tell(vec![], vec![WorkerId(0); 65_537]), "limit of 65536"),
        (no_such(vec![Version(1); 17]), "17 is over the limit of 16"),
        (no_such(vec![Version::NONE]), "a version from 1"),
        (
            FromRoot::Parent {
                agent: 0,
                address: Some(String::new()),
            },
            "an address",
        ),
    ] {
        let words = refused(&message);
        assert!(words.contains(part), "{part} in {words}");
    }

    for ranges in [
        &[(0, 0)][..],
        &[(0, 2), (1, 1)],
        &[(5, 1), (0, 1)],
        &[(5, 1), (5, 1)],
        &[(u32::MAX, 1)],
        &[(1, u32::MAX)],
    ] {
        let words = refused(&fetch(ranges));
        assert!(words.contains("do not overlap"), "{words}");
    }
    comes_back(&fetch(&[(0, u32::MAX)]));
    let too_many: Vec<(u32, u32)> = (0..4097).map(|first| (2 * first, 1)).collect();
    assert!(refused(&fetch(&too_many)).contains("limit of 4096"));
    comes_back(&fetch(&too_many[..4096]));
    let json = "x".repeat(MAX_JSON + 1);
    assert!(refused(&JsonReply { json }).contains("bytes of a status"));
}

/// Numbers of a sample that cannot be, put into its encoding: the decoder checks without the
/// checksum.
#[test]
fn decoding_refuses_messages_out_of_bounds() {
    // (a message, where in its payload, what is put there)
    let to_root: [(ToRoot, usize, u8); 5] = [
        // Format, variant, model.
        (ToRoot::Missing { item: item(1, 1) }, 2, 64),
        (ToRoot::Missing { item: item(1, 1) }, 3, 0),
        // Format, variant, ticket, worker, instance, pid, models, delivery, bound.
        (join(1, Delivery::Newest), 6, 0),
        (join(1, Delivery::Every { bound: 1 }), 8, 33),
        (join(1, Delivery::Every { bound: 1 }), 8, 0),
    ];
    for (message, at, byte) in to_root {
        let mut payload = message.encode().unwrap();
        payload[at] = byte;
        let error = ToRoot::decode(&payload).unwrap_err();
        let is_out = matches!(error, MessageError::OutOfRange { .. });
        assert!(is_out, "{message:?} at {at}: {error}");
    }
    let tell = FromRoot::Notify {
        sequence: 1,
        set: vec![item(0, 1), item(1, 1)],
        workers: vec![],
    };
    let mut payload = tell.encode().unwrap();
    // Format, variant, sequence, length, model, version, model.
    payload[6] = 0;
    let words = FromRoot::decode(&payload).unwrap_err().to_string();
    assert!(words.contains("model 0 twice"), "{words}");

    // Format, variant, epoch, id, agent, model, version, length, first, count.
    let mut payload = fetch(&[(0, 1), (1, 1)]).encode().unwrap();
    payload[25] = 0;
    let words = ToParent::decode(&payload).unwrap_err().to_string();
    assert!(words.contains("do not overlap"), "{words}");
}

/// Lists that no sender of this crate would make.
#[test]
fn decoding_refuses_lists_that_are_too_long() {
    // Format, variant `Notify`, sequence, an empty set, 65,537 workers of number 0.
    let tell = [&[FORMAT, 6, 1, 0, 0x81, 0x80, 0x04][..], &[0; 65_537]].concat();
    // Format, variant `Part`, 524,289 bytes.
    let part = [&[FORMAT, 2, 0x81, 0x80, 0x20][..], &[0; 524_289]].concat();
    for payload in [tell, part] {
        let error = FromRoot::decode(&payload).unwrap_err();
        let is_too_long = matches!(error, MessageError::TooLong { .. });
        assert!(is_too_long, "{error}");
    }
    // Format, variant `Progress`, 4,097 workers.
    let progress = [&[FORMAT, 2, 0x81, 0x20][..], &[0; 7 * 4097]].concat();
    let words = ToRoot::decode(&progress).unwrap_err().to_string();
    assert!(words.contains("4097 is over the limit"), "{words}");
}

/// A text is cut by its field and refused by the check of its message. Each compiles without the
/// other.
#[test]
fn text_is_cut_when_sent_and_refused_if_too_long() {
    has_text(MAX_TEXT, |name| {
        let mut message = agent(None, vec![]);
        if let ToRoot::Agent { name: field, .. } = &mut message {
            *field = name;
        }
        message
    });
    has_text(MAX_DEVICE, |device| {
        let mut message = join(1, Delivery::Newest);
        if let ToRoot::Join(WorkerJoin { device: field, .. }) = &mut message {
            *field = device;
        }
        message
    });
    let (who, ticket) = (who(1, 1), 1);
    has_text(MAX_TEXT, |reason| ToRoot::Progress {
        workers: vec![WorkerProgress {
            who,
            taken: 1,
            through: 1,
            loaded: 1,
            versions: vec![],
            refused: Some((1, reason)),
        }],
    });
    has_text(MAX_TEXT, |reason| ToRoot::Unusable { who, reason });
    has_text(MAX_TEXT, |reason| ToRoot::ParentLost { parent: 1, reason });
    has_text(MAX_TEXT, |reason| FromRoot::Refused {
        reason,
        remedy: RefusalRemedy::Other,
    });
    has_text(MAX_TEXT, |reason| FromRoot::Denied { ticket, reason });
    has_text(MAX_TEXT, |reason| FromRoot::TurnAway { who, reason });
    has_text(MAX_TEXT, |reason| ToChild::Gone { reason });
    has_text(MAX_TEXT, |reason| ToWorker::End { reason });
    has_text(MAX_TEXT, |reason| ToWorker::Later { reason });
}

fn has_text<M: Message + PartialEq + Debug>(limit: usize, message: impl Fn(String) -> M) {
    let payload = message("€".repeat(limit)).encode().unwrap();
    let cut = message("€".repeat(limit / "€".len()));
    assert_eq!(M::decode(&payload), Ok(cut));

    let longest = message("x".repeat(limit));
    comes_back(&longest);
    // One byte more, which no sender of this crate would send.
    let mut payload = longest.encode().unwrap();
    let mut parts = payload.windows(limit);
    let at = parts.position(|part| part.iter().all(|byte| *byte == b'x'));
    let at = at.expect("the text as it is");
    payload.insert(at, b'x');
    // The length stands before the text, its low bits first.
    payload[at - if limit < 128 { 1 } else { 2 }] += 1;
    let words = M::decode(&payload).unwrap_err().to_string();
    let expected = format!(
        "bytes of a text: {} is over the limit of {limit}",
        limit + 1
    );
    assert_eq!(words, expected, "{longest:?}");
}

#[test]
fn the_longest_messages_fit_their_frames() {
    let versions = (1..=4096).map(|i| item(63, u64::MAX - i));
    let versions: Vec<Item> = versions.collect();
    let everything: [ToRoot; 2] = [
        agent(Some(u16::MAX), versions.clone()),
        ToRoot::Holds {
            have: versions.clone(),
            dropped: versions,
        },
    ];
    for message in everything {
        message.frame().unwrap();
    }
    let set = (0..MAX_MODELS).map(|model| item(model, u64::MAX)).collect();
    let tell = FromRoot::Notify {
        sequence: u64::MAX,
        set,
        workers: vec![WorkerId(u32::MAX); MAX_NOTIFIED],
    };
    tell.frame().unwrap();
    let bytes = vec![0xff; MAX_PART];
    FromRoot::Part { bytes }.frame().unwrap();
    let json = "x".repeat(MAX_JSON);
    assert!(JsonReply { json }.frame().unwrap().len() <= MAX_FRAME);
    let far = u32::MAX - 3 * 4096;
    let ranges: Vec<(u32, u32)> = (0..4096).map(|i| (far + 2 * i, 1)).collect();
    fetch(&ranges).frame().unwrap();
}

#[test]
fn progress_of_any_number_of_workers_fits() {
    let workers: Vec<WorkerProgress> = (0..10_000)
        .map(|number| WorkerProgress {
            who: who(u32::MAX - number, u64::MAX),
            taken: u64::MAX,
            through: u64::MAX,
            loaded: u64::MAX,
            // Some are long and some are short.
            versions: (0..number as u8 % 65)
                .map(|model| item(model, u64::MAX))
                .collect(),
            refused: (number % 3 == 0).then(|| (u64::MAX, "x".repeat(2000))),
        })
        .collect();
    let messages = ToRoot::progress(workers);
    let mut next = 0;
    for message in &messages {
        message.frame().unwrap();
        let ToRoot::Progress { workers } = message else {
            panic!("{message:?}")
        };
        for worker in workers {
            assert_eq!(worker.who.worker, WorkerId(u32::MAX - next));
            next += 1;
        }
    }
    assert_eq!(next, 10_000);
    // No more of them than it takes: each is longer than half a frame.
    assert!(messages.len() < 30, "{}", messages.len());
    assert_eq!(ToRoot::progress(Vec::new()), []);
    let small = ToRoot::progress(vec![
        match &samples::to_root()[5].1 {
            ToRoot::Progress { workers } => workers[1].clone(),
            other => panic!("{other:?}"),
        };
        MAX_PROGRESS + 1
    ]);
    assert_eq!(small.len(), 2);
}

#[test]
fn another_format_is_named() {
    let mut payload = ToRoot::Ping.encode().unwrap();
    payload[0] = 9;
    let words = ToRoot::decode(&payload).unwrap_err().to_string();
    assert!(
        words.contains("format 9") && words.contains("same weightsync"),
        "{words}"
    );
    let error = ToRoot::decode(&[]).unwrap_err();
    assert!(matches!(error, MessageError::Malformed { bytes: 0, .. }));
    let mut payload = ToRoot::Ping.encode().unwrap();
    payload.push(0);
    let words = ToRoot::decode(&payload).unwrap_err().to_string();
    assert!(words.contains("1 bytes follow its end"), "{words}");
}
