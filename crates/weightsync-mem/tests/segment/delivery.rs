//! Every version in order.

use std::thread;
use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, Attendance, Deadline, Delivery, Error, Level, ModelMask, Outcome,
    RemoteReaderOptions, RemoteReaders, SegmentOptions, SegmentReader, Targets, Want,
};

use crate::{
    address, answered, attach, check, nothing_new, outcomes, send, settle, slots, small, take,
    take_set, versions, within, workers,
};

pub fn soon() -> Deadline {
    Some(Instant::now() + Duration::from_millis(100))
}

pub fn joins(address: &str, worker: u32, delivery: Delivery) -> SegmentReader {
    let options = AttachOptions {
        delivery,
        ..attach(address, worker)
    };
    SegmentReader::attach(&options, within(20)).unwrap()
}

#[test]
fn every_version_comes_in_order() {
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    let mut every = joins(&address, 0, Delivery::Every { bound: 5 });
    assert!(every.latest().unwrap().is_none() && nothing_new(&mut every));
    for _ in 0..3 {
        send(&mut writer, &[0, 1], &Targets::All);
    }
    send(&mut writer, &[1], &Targets::All);
    let last = send(&mut writer, &[0], &workers(&[0]));
    let expected = [(1, 1), (2, 2), (3, 3), (3, 4), (4, 4)];
    for (first, second) in expected {
        let taken = take_set(&mut every);
        assert_eq!(versions(&taken), [(0, first), (1, second)]);
    }
    assert!(every.latest().unwrap().is_none(), "it is the caller's");
    assert!(nothing_new(&mut every));
    assert_eq!(outcomes(&settle(&writer, &last)), [(0, Outcome::Applied)]);
    // A late reader gets its newest set, and every one from there on.
    let mut late = joins(&address, 1, Delivery::Every { bound: 1 });
    assert_eq!(versions(&take_set(&mut late)), [(0, 3), (1, 4)]);
    assert!(nothing_new(&mut late));
    send(&mut writer, &[1], &Targets::All);
    assert_eq!(versions(&take_set(&mut late)), [(0, 3), (1, 5)]);
}

#[test]
fn queued_version_is_pinned_only_while_kept() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut every = joins(&address, 0, Delivery::Every { bound: 1 });
    send(&mut writer, &[0], &Targets::All);
    let kept = take(&mut every);
    send(&mut writer, &[0], &Targets::All);
    let full = writer.stage(&[0], within(0)).map(drop).unwrap_err();
    assert!(matches!(full, Error::AllSlotsPinned { .. }), "{full}");
    check(&kept);
    drop(kept);
    for version in 2..=4 {
        // The next version that it takes is live; earlier ones are released.
        assert_eq!(take(&mut every).version(), Version(version));
        send(&mut writer, &[0], &Targets::All);
    }
    assert_eq!(writer.slots(0), 2);
}

#[test]
fn full_queue_is_a_report_line_and_delays_no_other() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut every = joins(&address, 0, Delivery::Every { bound: 2 });
    let mut newest = joins(&address, 1, Delivery::Newest);
    let waiter = writer.waiter();
    for version in 1..=4 {
        let publication = send(&mut writer, &[0], &Targets::All);
        assert_eq!(take(&mut newest).version(), Version(version));
        let lines = waiter.settle(&publication, Level::Applied, soon()).unwrap();
        assert_eq!(
            outcomes(&lines),
            [(0, Outcome::Late), (1, Outcome::Applied)]
        );
        assert!(!waiter.is_settled(&publication, Level::Applied).unwrap());
        waiter.give_up(&publication).unwrap();
        let lines = waiter.settle(&publication, Level::Applied, soon()).unwrap();
        let slow = match version {
            ..=2 => Outcome::Late,
            _ => Outcome::Full,
        };
        let full = slow == Outcome::Full;
        assert_eq!(
            waiter.is_settled(&publication, Level::Applied).unwrap(),
            full
        );
        assert_eq!(outcomes(&lines), [(0, slow), (1, Outcome::Applied)]);
    }
    // A given-up version does not come later; later sends do.
    assert_eq!(take(&mut every).version(), Version(1));
    assert_eq!(take(&mut every).version(), Version(2));
    assert!(nothing_new(&mut every));
    let publication = send(&mut writer, &[0], &Targets::All);
    assert_eq!(take(&mut every).version(), Version(5));
    take(&mut newest);
    assert_eq!(settle(&writer, &publication)[0].outcome, Outcome::Applied);
}

#[test]
fn failed_worker_stops_no_other() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 3));
    let mut fails = joins(&address, 0, Delivery::Every { bound: 2 });
    let mut newest = joins(&address, 1, Delivery::Newest);
    send(&mut writer, &[0], &Targets::All);
    let held = take(&mut fails);
    // Two in its queue, and two that wait for room in it.
    for _ in 2..=5 {
        send(&mut writer, &[0], &Targets::All);
    }
    assert_eq!(take(&mut newest).version(), Version(5));
    let grown = writer.slots(0);
    fails.refuse(None, "no such layer").unwrap();
    let heard = |there: &Attendance| there.rejected == [WorkerId(0)];
    assert!(writer.wait_readers(within(20), heard).unwrap());
    for version in 6..=40 {
        let publication = send(&mut writer, &[0], &Targets::All);
        assert_eq!(take(&mut newest).version(), Version(version));
        let reason = "no such layer".into();
        assert_eq!(
            outcomes(&settle(&writer, &publication)),
            [(0, Outcome::Refused { reason }), (1, Outcome::Applied)]
        );
    }
    assert_eq!(writer.slots(0), grown, "its queue takes no more");
    // Its pins still count, and it gets nothing more.
    check(&held);
    assert!(nothing_new(&mut fails));
    drop(held);
    // Its queue is free as well. With one slot for the live version and one to write, all other
    // slots can be held.
    let mut snapshots = Vec::new();
    for _ in 2..grown {
        snapshots.push(writer.snapshot(0).unwrap().unwrap());
        send(&mut writer, &[0], &Targets::All);
    }
    assert_eq!(writer.slots(0), grown);
    snapshots.iter().for_each(check);
}

#[test]
fn queued_send_completes_without_a_waiter() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 8));
    let mut every = joins(&address, 0, Delivery::Every { bound: 2 });
    for round in 0..10 {
        // As many again as there is room for may wait.
        for _ in 0..4 {
            send(&mut writer, &[0], &Targets::All);
        }
        for version in 1..=4 {
            assert_eq!(take(&mut every).version(), Version(4 * round + version));
        }
    }
    assert!(nothing_new(&mut every));
}

#[test]
fn looking_gives_nothing_up_and_tells_nothing() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 8));
    let waiter = writer.waiter();
    let mut every = joins(&address, 0, Delivery::Every { bound: 1 });
    let newest = joins(&address, 1, Delivery::Newest);
    let first = send(&mut writer, &[0], &Targets::All);
    let second = send(&mut writer, &[0], &workers(&[0]));
    // As many wait as may: this one is lost, and says so without a wait.
    let third = send(&mut writer, &[0], &workers(&[0, 5]));
    assert_eq!(outcomes(&waiter.decided(&second).unwrap()), []);
    let lost = waiter.decided(&third).unwrap();
    assert_eq!(outcomes(&lost), [(0, Outcome::Full), (5, Outcome::Absent)]);
    drop(newest);
    let mut looks = 0;
    while !writer.readers().iter().all(|one| one.worker == WorkerId(0)) || looks < 3 {
        assert!(!waiter.is_settled(&first, Level::Staged).unwrap());
        assert!(!waiter.is_settled(&second, Level::Applied).unwrap());
        assert!(waiter.is_settled(&third, Level::Applied).unwrap());
        looks += 1;
    }
    assert_eq!(take(&mut every).version(), Version(1));
    assert_eq!(take(&mut every).version(), Version(2));
    assert!(waiter.is_settled(&first, Level::Applied).unwrap());
    assert_eq!(
        outcomes(&settle(&writer, &first)),
        [(0, Outcome::Applied), (1, Outcome::Left)]
    );
    assert_eq!(outcomes(&settle(&writer, &second)), [(0, Outcome::Applied)]);
}

#[test]
fn a_sender_that_waits_fills_the_queue_as_it_empties() {
    const LAST: u64 = 50;
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut every = joins(&address, 0, Delivery::Every { bound: 1 });
    let worker = thread::spawn(move || {
        for version in 1..=LAST {
            assert_eq!(take(&mut every).version(), Version(version));
        }
        every
    });
    let mut publications = Vec::new();
    for at in 0..LAST {
        publications.push(send(&mut writer, &[0], &Targets::All));
        // Staging alone must make room as well as waiting for the outcome does.
        if at % 7 == 6 {
            for publication in publications.drain(..) {
                let lines = settle(&writer, &publication);
                assert!(
                    matches!(lines[0].outcome, Outcome::Applied | Outcome::Full),
                    "{lines:?}"
                );
            }
        } else {
            let lines = settle(&writer, &publications[publications.len() - 1]);
            assert_eq!(lines[0].outcome, Outcome::Applied);
        }
    }
    drop(worker.join().unwrap());
    // The last taken by the reader, one queued for it, and one to write.
    assert!(writer.slots(0) <= 4, "{} slots", writer.slots(0));
}

#[test]
fn outcome_is_applied_only_for_loaded_versions() {
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    let options = AttachOptions {
        models: Some(vec![1]),
        ..attach(&address, 0)
    };
    let mut reader = SegmentReader::attach(&options, within(20)).unwrap();
    send(&mut writer, &[0, 1], &Targets::All);
    let taken = reader.next(within(20)).unwrap().unwrap();
    for wrong in [0, 2, 63, 64, usize::MAX] {
        let versions = [1, wrong].map(|model| (model, Version(7)));
        let error = reader
            .applied_versions(taken.sequence, versions)
            .unwrap_err();
        assert!(matches!(error, Error::BadOption { .. }), "{error}");
    }
    assert_eq!(writer.readers()[0].versions, [Version::NONE; 2]);
    reader.applied(&taken).unwrap();
    let applied = [Version::NONE, Version(1)];
    assert_eq!(writer.readers()[0].versions, applied);
}

#[test]
fn mailboxes_without_a_record_get_the_next_free_one() {
    const READERS: u32 = 66;
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    // No two of 72 workers with the same set: 8 versions of one model, 9 of the
    // other. 64 records are there for them.
    let group = |of: &dyn Fn(u32) -> bool| {
        let named: Vec<_> = (0..72).filter(|worker| of(*worker)).collect();
        workers(&named)
    };
    for a in 0..8 {
        send(&mut writer, &[0], &group(&|worker| worker / 9 == a));
    }
    for b in 0..9 {
        send(&mut writer, &[1], &group(&|worker| worker % 9 == b));
    }
    let mut readers: Vec<_> = (0..READERS - 2)
        .map(|worker| joins(&address, worker, Delivery::Asked))
        .collect();
    for reader in &mut readers {
        reader.ask(Want::Newest).unwrap();
    }
    let mut late: Vec<_> = (READERS - 2..READERS)
        .map(|worker| joins(&address, worker, Delivery::Newest))
        .collect();
    let own = |worker: u32| {
        let (a, b) = (u64::from(worker / 9) + 1, u64::from(worker % 9) + 1);
        [(0, a), (1, b)]
    };
    // As others take what they asked for, and go.
    for (worker, reader) in (0..).zip(&mut readers) {
        assert_eq!(versions(&answered(reader)), own(worker));
    }
    for (worker, reader) in (READERS - 2..).zip(&mut late) {
        assert_eq!(versions(&take_set(reader)), own(worker));
    }
}

#[test]
fn the_sender_says_how_long_a_queue_may_be() {
    let every = |bound| Delivery::Every { bound };
    let newest = Delivery::Newest;
    for (max_queue, delivery, denied) in [
        (4, every(4), None),
        (4, every(5), Some("allows 4")),
        (0, every(1), Some("keeps no queues")),
        (0, newest, None),
    ] {
        let address = address();
        let options = SegmentOptions {
            max_queue,
            ..slots(2, 2)
        };
        let writer = small(&address, 1, options);
        let here = AttachOptions {
            delivery,
            ..attach(&address, 0)
        };
        let remote_reader = RemoteReaderOptions {
            worker: WorkerId(1),
            pid: 1,
            seen: Epoch(0),
            models: ModelMask::ALL,
            delivery,
            device: String::new(),
            location: Default::default(),
        };
        let joined = [
            SegmentReader::attach(&here, within(20)).map(drop),
            RemoteReaders::of(&writer)
                .join(remote_reader, |_| ())
                .map(drop),
        ];
        for joined in joined {
            match (joined, denied) {
                (Ok(()), None) => {}
                (Err(Error::Denied { reason }), Some(words)) if reason.contains(words) => {}
                other => panic!("{max_queue}, {delivery:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_late_reader_is_passed_over_until_it_moves() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 16));
    let mut slow = joins(&address, 0, Delivery::Newest);
    let remote_reader = crate::remote_readers::join(&writer, 1, Delivery::Newest);
    let mut every = joins(&address, 2, Delivery::Every { bound: 8 });
    let waiter = writer.waiter();
    let first = send(&mut writer, &[0], &Targets::All);
    // The worker takes the first version, and is late for it all the same.
    assert_eq!(take(&mut slow).version(), Version(1));
    let first_too = send(&mut writer, &[0], &Targets::All);
    waiter.late(&first_too, Level::Applied).unwrap();
    let next = send(&mut writer, &[0], &Targets::All);
    // Without a deadline: it would wait without end.
    let lines = waiter.settle(&next, Level::Applied, None).unwrap();
    let all_late = [0, 1, 2].map(|worker| (worker, Outcome::Late));
    assert_eq!(outcomes(&lines), all_late);
    assert!(lines.iter().all(|line| line.late.is_some()), "{lines:?}");
    assert!(waiter.is_settled(&next, Level::Applied).unwrap());
    // The caller can wait for that publication, and for earlier ones.
    for earlier in [&first, &first_too] {
        assert!(!waiter.is_settled(earlier, Level::Applied).unwrap());
    }
    let lines = waiter.settle(&first_too, Level::Applied, soon()).unwrap();
    assert_eq!(outcomes(&lines), all_late);
    assert!(lines.iter().all(|line| line.late.is_none()), "{lines:?}");

    // A publication that insists waits for all of them.
    let mut staging = writer.stage(&[0], within(20)).unwrap();
    staging.wait_for_late();
    let insists = staging.publish(&Targets::All).unwrap();
    let lines = waiter.settle(&insists, Level::Applied, soon()).unwrap();
    assert!(lines.iter().all(|line| line.late.is_none()), "{lines:?}");

    // Each that moves is waited for again.
    let next = send(&mut writer, &[0], &Targets::All);
    let waits = thread::spawn({
        let waiter = writer.waiter();
        move || waiter.settle(&next, Level::Applied, None)
    });
    assert!(waits.join().unwrap().is_ok());
    assert_eq!(take(&mut every).version(), Version(1));
    let waited = |lines: &[weightsync_mem::WorkerReport]| {
        let waited = lines.iter().filter(|line| line.late.is_none());
        waited.map(|line| line.worker.0).collect::<Vec<_>>()
    };
    let next = send(&mut writer, &[0], &Targets::All);
    let lines = waiter.settle(&next, Level::Applied, soon()).unwrap();
    assert_eq!(waited(&lines), [2]);
    assert_eq!(take(&mut slow).version(), Version(6));
    crate::remote_readers::load(&remote_reader);
    let next = send(&mut writer, &[0], &Targets::All);
    let lines = waiter.settle(&next, Level::Applied, soon()).unwrap();
    assert_eq!(waited(&lines), [0, 1, 2]);
}
