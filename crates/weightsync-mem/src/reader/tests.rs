//! Pages that a reader rejects, and the state that a stopped reader leaves behind.

mod pages;

use std::sync::atomic::AtomicU32;

use weightsync_core::{Dtype, Layout, Level, Outcome, Targets};

use super::*;
use crate::protocol::Live;
use crate::report::Publication;
use crate::wire::{SenderMessage, Want};
use crate::writer::{SegmentOptions, SegmentWriter};

fn soon() -> Deadline {
    Some(Instant::now() + Duration::from_secs(20))
}

fn pair(delivery: Delivery) -> (SegmentWriter, SegmentReader) {
    let (writer, address) = segment(1, 2);
    let reader = join(&address, 0, delivery);
    (writer, reader)
}

/// A segment of small models that grow to so many slots.
fn segment(models: usize, max_slots: u8) -> (SegmentWriter, String) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let address = format!("weightsync-test/reader/{}/{number}", std::process::id());
    let model = ModelDescription {
        layout: Layout::new([("w".to_owned(), Dtype::U8, vec![100])]).unwrap(),
        note: Vec::new(),
    };
    let run = Run {
        epoch: Epoch(1),
        id: [3; 16],
    };
    let options = SegmentOptions {
        slots: 2,
        max_slots,
        ..SegmentOptions::default()
    };
    let models = vec![model; models];
    let writer = SegmentWriter::create(&address, [9; 16], run, &models, options).unwrap();
    (writer, address)
}

fn join(address: &str, worker: u32, delivery: Delivery) -> SegmentReader {
    SegmentReader::attach(&options(address, worker, delivery), soon()).unwrap()
}

fn options(address: &str, worker: u32, delivery: Delivery) -> AttachOptions {
    AttachOptions {
        address: address.into(),
        secret: [9; 16],
        worker: WorkerId(worker),
        seen: Epoch(0),
        wait: WaitStyle::Sleep,
        models: None,
        delivery,
        device: String::new(),
        instance: 0,
        resume: crate::Resume::default(),
    }
}

fn publish(writer: &mut SegmentWriter) -> Publication {
    let staging = writer.stage(&[0], soon()).unwrap();
    staging.publish(&Targets::All).unwrap()
}

fn version(taken: &Taken) -> u64 {
    taken.members[0].snapshot.version().0
}

fn live(reader: &SegmentReader) -> Live {
    reader.book.mailbox().unwrap().live.0.load().unwrap()
}

/// The words of a set record of one model: what it is, its slots, its version.
const WORDS: [usize; 5] = [0, 1, 2, 3, 4];

#[test]
fn a_spoilt_set_record_is_not_believed() {
    let (mut writer, mut reader) = pair(Delivery::Newest);
    let spoil =
        |writer: &SegmentWriter, record, word| writer.shared.header().spoil_set(record, word);
    publish(&mut writer);
    let record = live(&reader).record;
    for word in WORDS {
        spoil(&writer, record, word);
        let error = reader.latest().map(drop).unwrap_err();
        assert!(matches!(error, Error::CorruptSet { .. }), "{word}: {error}");
        assert!(error.is_peer_fault());
        spoil(&writer, record, word);
        assert_eq!(version(&reader.latest().unwrap().unwrap()), 1);
    }
    // Passed over by `next`, and nothing stays pinned for it.
    publish(&mut writer);
    spoil(&writer, live(&reader).record, 4);
    assert!(matches!(reader.next(soon()), Err(Error::CorruptSet { .. })));
    assert!(matches!(reader.next(Some(Instant::now())), Ok(None)));
    publish(&mut writer);
    assert_eq!(version(&reader.next(soon()).unwrap().unwrap()), 3);
    publish(&mut writer);
}

#[test]
fn damaged_record_in_a_queue_loses_only_that_version() {
    let (mut writer, mut reader) = pair(Delivery::Every { bound: 3 });
    (0..3).for_each(|_| drop(publish(&mut writer)));
    let second = reader.book.mailbox().unwrap().queue.0.get(1).unwrap();
    writer.shared.header().spoil_set(second.record, 1);
    assert_eq!(version(&reader.next(soon()).unwrap().unwrap()), 1);
    assert!(matches!(reader.next(soon()), Err(Error::CorruptSet { .. })));
    assert_eq!(version(&reader.next(soon()).unwrap().unwrap()), 3);
}

#[test]
fn damage_is_a_report_line_and_never_counts_as_staged() {
    for delivery in [Delivery::Newest, Delivery::Every { bound: 2 }] {
        let (mut writer, mut reader) = pair(delivery);
        let waiter = writer.waiter();
        for damaged in ["set record", "commit record"] {
            let publication = publish(&mut writer);
            let mailbox = reader.book.mailbox().unwrap();
            let entry = mailbox.queue.0.get(reader.head).or(mailbox.live.0.load());
            let record = entry.unwrap().record;
            let version = publication.versions[0].1;
            let (slot, header) = (version.0 as u8 - 1, writer.shared.header());
            match damaged {
                "set record" => header.spoil_set(record, 4),
                _ => writer.shared.models[0].model.page().spoil_commit(slot, 2),
            }
            let error = reader.next(soon()).map(drop).unwrap_err();
            assert!(error.is_peer_fault(), "{error}");
            for level in [Level::Staged, Level::Applied] {
                let lines = waiter.settle(&publication, level, soon()).unwrap();
                let reason = error.to_string();
                assert!(reason.contains(damaged), "{reason}");
                assert_eq!(lines[0].outcome, Outcome::Refused { reason });
            }
        }
        let publication = publish(&mut writer);
        assert_eq!(version(&reader.next(soon()).unwrap().unwrap()), 3);
        let lines = waiter.settle(&publication, Level::Staged, soon()).unwrap();
        assert_eq!(lines[0].outcome, Outcome::Staged);
    }
}

#[test]
fn stopped_reader_pins_its_slots_until_it_dies() {
    let (mut writer, reader) = pair(Delivery::Newest);
    publish(&mut writer);
    let control = reader.book.control().unwrap();
    let mailbox = reader.book.mailbox().unwrap();
    assert!(control.records.pin(live(&reader), &mailbox.live.0));
    publish(&mut writer);
    let error = writer.stage(&[0], Some(Instant::now())).map(drop);
    let Err(Error::AllSlotsPinned { holders, .. }) = &error else {
        panic!("{error:?}")
    };
    assert_eq!(holders[0].versions, [Version(1)]);
    // The process ends: the sender sees only the hang-up.
    reader.book.socket().unwrap().shut_down();
    publish(&mut writer);
    assert!(writer.readers().is_empty());
}

#[test]
fn a_reader_that_dies_gives_its_queue_back() {
    let (mut writer, reader) = pair(Delivery::Every { bound: 1 });
    // The third waits for room in the queue.
    (0..3).for_each(|_| drop(publish(&mut writer)));
    assert_eq!(writer.slots(0), 3);
    let error = writer.stage(&[0], Some(Instant::now())).map(drop);
    let Err(Error::AllSlotsPinned { holders, .. }) = &error else {
        panic!("{error:?}")
    };
    assert_eq!(holders[0].versions, [1, 2].map(Version));
    reader.book.socket().unwrap().shut_down();
    (0..3).for_each(|_| drop(publish(&mut writer)));
    assert_eq!(writer.slots(0), 3);
}

#[test]
fn false_queue_head_harms_no_other_reader() {
    for lie in [u64::MAX, 1 << 40, 7, 0] {
        let (mut writer, mut reader) = pair(Delivery::Every { bound: 2 });
        publish(&mut writer);
        assert_eq!(version(&reader.next(soon()).unwrap().unwrap()), 1);
        reader.book.control().unwrap().head.advance(lie);
        (0..200).for_each(|_| {
            let _ = writer
                .stage(&[0], Some(Instant::now()))
                .map(|staging| staging.publish(&Targets::All).unwrap());
        });
        reader.book.socket().unwrap().shut_down();
        publish(&mut writer);
    }
}

#[test]
fn failed_reader_repeats_its_error() {
    let (mut writer, mut reader) = pair(Delivery::Newest);
    let waiter = writer.waiter();
    let (_, socket, _) = writer.shared.watched().remove(0);
    let strange = SenderMessage::Slot { model: 0, index: 2 }.encode();
    assert!(socket.send(&strange, &[]).unwrap());
    for _ in 0..3 {
        let error = reader.next(soon()).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        let error = reader.ask(Want::Newest).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
    let publication = publish(&mut writer);
    let lines = waiter.settle(&publication, Level::Applied, soon()).unwrap();
    let Outcome::Refused { reason } = &lines[0].outcome else {
        panic!("{lines:?}")
    };
    assert!(reason.contains("0 descriptors"), "{reason}");
    // The reader is notified of nothing more, and the sender's end is its end.
    let error = reader.next(soon()).unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error}");
    drop(writer);
    assert!(matches!(reader.next(soon()), Err(Error::SenderClosed)));
}

#[test]
fn errors_that_are_said_again_are_the_same() {
    let os = |source| Error::Os {
        action: "mapping shared memory",
        source,
    };
    for error in [
        os(std::io::Error::from_raw_os_error(libc::ENOMEM)),
        os(std::io::Error::other("no room")),
        unexpected("one slot", "2 descriptors".into()),
    ] {
        assert_eq!(error.again().to_string(), error.to_string());
        assert_eq!(format!("{:?}", error.again()), format!("{error:?}"));
    }
}

/// The function at the end may drop the reader, on the thread that the drop waits for.
#[test]
fn a_reader_may_be_dropped_by_what_its_end_calls() {
    let (writer, reader) = pair(Delivery::Newest);
    let end = reader.end();
    let (done, ends) = std::sync::mpsc::channel();
    end.then(move || {
        drop(reader);
        done.send(()).unwrap();
    });
    drop(writer);
    ends.recv_timeout(Duration::from_secs(20)).unwrap();
}
