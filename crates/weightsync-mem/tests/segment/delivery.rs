//! Every version in order, and versions asked for.

use std::thread;
use std::time::{Duration, Instant};

use weightsync_core::{Version, WorkerId};
use weightsync_mem::{
    AttachOptions, Deadline, Delivery, Error, Level, Outcome, Reader, SegmentOptions, Targets, Want,
};

use crate::{
    address, answered, attach, check, nothing_new, only, outcomes, send, settle, slots, small,
    take, take_set, versions, within, workers,
};

fn soon() -> Deadline {
    Some(Instant::now() + Duration::from_millis(100))
}

fn joins(address: &str, worker: u32, delivery: Delivery) -> Reader {
    let options = AttachOptions {
        delivery,
        ..attach(address, worker)
    };
    Reader::attach(&options, within(20)).unwrap()
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
    // One that joins gets what is newest for it, and from there on every one.
    let mut late = joins(&address, 1, Delivery::Every { bound: 1 });
    assert_eq!(versions(&take_set(&mut late)), [(0, 3), (1, 4)]);
    assert!(nothing_new(&mut late));
    send(&mut writer, &[1], &Targets::All);
    assert_eq!(versions(&take_set(&mut late)), [(0, 3), (1, 5)]);
}

#[test]
fn what_a_queue_gave_is_held_as_long_as_it_is_kept_and_no_longer() {
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
        // What it takes next is live; what it took before is nobody's.
        assert_eq!(take(&mut every).version(), Version(version));
        send(&mut writer, &[0], &Targets::All);
    }
    assert_eq!(writer.slots(0), 2);
}

#[test]
fn a_full_queue_is_a_line_and_costs_the_others_nothing() {
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
    // What was given up does not come later, what is sent from now on does.
    assert_eq!(take(&mut every).version(), Version(1));
    assert_eq!(take(&mut every).version(), Version(2));
    assert!(nothing_new(&mut every));
    let publication = send(&mut writer, &[0], &Targets::All);
    assert_eq!(take(&mut every).version(), Version(5));
    take(&mut newest);
    assert_eq!(settle(&writer, &publication)[0].outcome, Outcome::Applied);
}

#[test]
fn a_worker_that_has_failed_for_good_stops_nobody() {
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
    let heard = |_: &[_], rejected: &[_]| rejected == [WorkerId(0)];
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
    // What it holds goes on counting, and nothing more comes to it.
    check(&held);
    assert!(nothing_new(&mut fails));
    drop(held);
    // What was in its queue is free as well: with one slot for what is live and
    // one to write there is room to hold as many as there are slots besides.
    let mut snapshots = Vec::new();
    for _ in 2..grown {
        snapshots.push(writer.snapshot(0).unwrap().unwrap());
        send(&mut writer, &[0], &Targets::All);
    }
    assert_eq!(writer.slots(0), grown);
    snapshots.iter().for_each(check);
}

#[test]
fn what_waits_for_room_comes_also_if_nobody_waits_for_the_outcome() {
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
fn a_reader_that_asks_gets_what_it_asks_for() {
    let address = address();
    let options = SegmentOptions {
        history: 2,
        ..slots(2, 2)
    };
    let mut writer = small(&address, 2, options);
    let mut asks = joins(&address, 0, Delivery::Asked);
    let mut newest = joins(&address, 1, Delivery::Newest);
    let exactly = |version| Want::Exactly {
        model: 0,
        version: Version(version),
    };
    // Nothing there yet: it comes when there is something.
    asks.ask(Want::Newest).unwrap();
    assert!(asks.answer(within(0)).unwrap().is_none());
    let publication = send(&mut writer, &[0, 1], &Targets::All);
    assert_eq!(versions(&answered(&mut asks)), [(0, 1), (1, 1)]);
    take_set(&mut newest);
    // The question may have come before the publication, or after: nobody waits
    // for one that asks.
    let applied = Outcome::Applied;
    assert_eq!(
        outcomes(&settle(&writer, &publication)),
        [(0, Outcome::Asks), (1, applied.clone())]
    );
    // What it does not ask for does not come, and nobody waits for it.
    for _ in 2..=4 {
        let publication = send(&mut writer, &[0, 1], &Targets::All);
        take_set(&mut newest);
        assert_eq!(
            outcomes(&settle(&writer, &publication)),
            [(0, Outcome::Asks), (1, applied.clone())]
        );
    }
    // There is no question that it could be the answer to.
    assert!(matches!(
        asks.answer(within(20)),
        Err(Error::BadOption { .. })
    ));
    assert!(matches!(
        asks.next(within(20)),
        Err(Error::BadOption { .. })
    ));
    for (want, version) in [
        (exactly(3), 3),
        (exactly(2), 2),
        (Want::Newest, 4),
        (exactly(4), 4),
        (exactly(2), 2),
    ] {
        asks.ask(want).unwrap();
        let taken = answered(&mut asks);
        // The set of that time: never the models of different ones.
        assert_eq!(versions(&taken), [(0, version), (1, version)]);
        assert_eq!(writer.readers()[0].applied[0], Version(version));
    }
    for missing in [1, 9] {
        asks.ask(exactly(missing)).unwrap();
        let error = asks.answer(within(20)).unwrap_err();
        let Error::NoSuchVersion {
            model: 0,
            asked,
            known,
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(*asked, Version(missing));
        assert_eq!(known[..], [4, 3, 2].map(Version));
        assert!(error.to_string().contains("v4, v3, v2"), "{error}");
    }
    // At least: at once where there is one, else as soon as there is.
    let least = |version| Want::AtLeast {
        model: 1,
        version: Version(version),
    };
    asks.ask(least(2)).unwrap();
    assert_eq!(versions(&answered(&mut asks)), [(0, 4), (1, 4)]);
    asks.ask(least(6)).unwrap();
    let waiting = thread::spawn(move || {
        let taken = answered(&mut asks);
        (asks, versions(&taken))
    });
    send(&mut writer, &[1], &Targets::All);
    send(&mut writer, &[1], &Targets::All);
    let (mut asks, got) = waiting.join().unwrap();
    assert_eq!(got, [(0, 4), (1, 6)]);
    send(&mut writer, &[0], &Targets::All);
    // A held worker has what it is held at, and nothing else.
    writer.hold(&[WorkerId(0)]).unwrap();
    send(&mut writer, &[0], &Targets::All);
    asks.ask(Want::Newest).unwrap();
    assert_eq!(versions(&answered(&mut asks)), [(0, 5), (1, 6)]);
    asks.ask(exactly(6)).unwrap();
    assert!(matches!(
        asks.answer(within(20)),
        Err(Error::NoSuchVersion { known, .. }) if known == [Version(5)]
    ));
}

#[test]
fn one_that_went_back_to_an_older_version_does_not_count_as_having_the_newer() {
    let address = address();
    let options = SegmentOptions {
        history: 2,
        ..slots(2, 2)
    };
    let mut writer = small(&address, 2, options);
    let mut reader = joins(&address, 0, Delivery::Newest);
    let back_to = |version| Want::Exactly {
        model: 0,
        version: Version(version),
    };
    for _ in 1..=2 {
        send(&mut writer, &[0, 1], &Targets::All);
        take_set(&mut reader);
    }
    let third = send(&mut writer, &[0], &Targets::All);
    let waiter = writer.waiter();
    let line = |publication, level| {
        let lines = waiter.settle(publication, level, within(20)).unwrap();
        (lines[0].outcome.clone(), lines[0].versions[0].0)
    };
    let late = |publication, level| {
        let lines = waiter.settle(publication, level, soon()).unwrap();
        assert_eq!(outcomes(&lines), [(0, Outcome::Late)]);
    };
    // Before it has taken the third, which still comes.
    reader.ask(back_to(2)).unwrap();
    let taken = answered(&mut reader);
    assert_eq!(versions(&taken), [(0, 2), (1, 2)]);
    late(&third, Level::Staged);
    reader.applied(&taken).unwrap();
    late(&third, Level::Applied);
    // What comes after that, whole, stands for it; and so does the same again.
    let fourth = send(&mut writer, &[0], &Targets::All);
    take_set(&mut reader);
    for publication in [&third, &fourth] {
        assert_eq!(line(publication, Level::Applied), (Outcome::Applied, 4));
    }
    reader.ask(back_to(3)).unwrap();
    assert_eq!(versions(&answered(&mut reader)), [(0, 3), (1, 2)]);
    assert_eq!(line(&third, Level::Applied), (Outcome::Applied, 3));
    for level in [Level::Staged, Level::Applied] {
        assert_eq!(line(&fourth, level), (Outcome::Asks, 3));
    }
    drop(reader);
    assert!(
        writer
            .wait_readers(within(20), |readers, _| readers.is_empty())
            .unwrap()
    );
    let lines = waiter.settle(&fourth, Level::Applied, within(20)).unwrap();
    assert_eq!(outcomes(&lines), [(0, Outcome::Left)]);
}

#[test]
fn an_answer_takes_nothing_from_what_is_meant_for_a_reader_of_the_newest() {
    let address = address();
    let options = SegmentOptions {
        history: 2,
        ..slots(2, 2)
    };
    let mut writer = small(&address, 1, options);
    let mut reader = joins(&address, 0, Delivery::Newest);
    let exactly = |version| Want::Exactly {
        model: 0,
        version: Version(version),
    };
    for _ in 1..=3 {
        send(&mut writer, &[0], &Targets::All);
    }
    take_set(&mut reader);
    let pushed = send(&mut writer, &[0], &Targets::All);
    reader.ask(exactly(3)).unwrap();
    let old = reader.answer(within(20)).unwrap().unwrap();
    assert_eq!((versions(&old), old.sequence), (vec![(0, 3)], 0));
    reader.applied(&old).unwrap();
    // It runs the older one, and that says nothing of what it was sent.
    assert_eq!(writer.readers()[0].applied, [Version(3)]);
    let now = Some(Instant::now());
    let lines = writer.waiter().settle(&pushed, Level::Staged, now).unwrap();
    assert_eq!(outcomes(&lines), [(0, Outcome::Late)]);
    // Nor does a refusal of it.
    reader.refuse(Some(old.sequence), "no").unwrap();
    drop(old);
    assert_eq!(versions(&take_set(&mut reader)), [(0, 4)]);
    assert_eq!(versions(&reader.latest().unwrap().unwrap()), [(0, 4)]);
    assert_eq!(outcomes(&settle(&writer, &pushed)), [(0, Outcome::Applied)]);
    assert!(nothing_new(&mut reader));

    // What was asked for and is what it is sent is not handed out twice.
    let pushed = send(&mut writer, &[0], &Targets::All);
    reader.ask(Want::Newest).unwrap();
    let newest = reader.answer(within(20)).unwrap().unwrap();
    assert_eq!(versions(&newest), [(0, 5)]);
    reader.applied(&newest).unwrap();
    assert!(nothing_new(&mut reader));
    assert_eq!(outcomes(&settle(&writer, &pushed)), [(0, Outcome::Applied)]);
    drop(newest);

    // Questions that nobody waits for any more are not answered to later ones.
    for (model, version) in [(0, Version(9)), (0, Version(8))] {
        reader.ask(Want::AtLeast { model, version }).unwrap();
        assert!(reader.answer(within(0)).unwrap().is_none());
    }
    reader.ask(exactly(1)).unwrap();
    reader.ask(exactly(4)).unwrap();
    for _ in 6..=9 {
        send(&mut writer, &[0], &Targets::All);
    }
    let answer = reader.answer(within(20));
    assert!(
        match &answer {
            Ok(Some(taken)) => versions(taken) == [(0, 4)],
            // It was asked for after the sends.
            Err(Error::NoSuchVersion { asked, .. }) => *asked == Version(4),
            _ => false,
        },
        "{answer:?}"
    );
    drop(answer);
    assert_eq!(versions(&take_set(&mut reader)), [(0, 9)]);
    // What it was answered is no reason to grow.
    for version in 0..20 {
        reader.ask(exactly(8 + version)).unwrap();
        let taken = reader.answer(within(20)).unwrap().unwrap();
        assert_eq!(versions(&taken), [(0, 8 + version)]);
        drop(taken);
        send(&mut writer, &[0], &Targets::All);
    }
    // The newest, two before it, one to write, and one more than was needed by
    // then.
    assert!(writer.slots(0) <= 5, "{} slots", writer.slots(0));
}

#[test]
fn a_question_that_is_withdrawn_is_answered_to_nobody() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut asks = joins(&address, 0, Delivery::Asked);
    let (model, version) = (0, Version(2));
    asks.ask(Want::AtLeast { model, version }).unwrap();
    asks.withdraw().unwrap();
    asks.withdraw().unwrap();
    assert!(matches!(
        asks.answer(within(20)),
        Err(Error::BadOption { .. })
    ));
    // The question and its end are heard in order, and before what is asked next.
    asks.ask(Want::Newest).unwrap();
    send(&mut writer, &[0], &Targets::All);
    assert_eq!(versions(&answered(&mut asks)), [(0, 1)]);
    let publication = send(&mut writer, &[0], &Targets::All);
    assert_eq!(
        outcomes(&settle(&writer, &publication)),
        [(0, Outcome::Asks)],
        "nobody waits for it"
    );
}

#[test]
fn asking_out_of_turn_is_refused() {
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    let mut every = joins(&address, 0, Delivery::Every { bound: 1 });
    assert!(matches!(
        every.ask(Want::Newest),
        Err(Error::BadOption { .. })
    ));
    let options = AttachOptions {
        models: Some(vec![1]),
        delivery: Delivery::Asked,
        ..attach(&address, 1)
    };
    let mut second = Reader::attach(&options, within(20)).unwrap();
    let other = Want::Exactly {
        model: 0,
        version: Version(1),
    };
    assert!(matches!(second.ask(other), Err(Error::BadOption { .. })));
    send(&mut writer, &[0, 1], &Targets::All);
    second.ask(Want::Newest).unwrap();
    assert_eq!(versions(&answered(&mut second)), [(1, 1)]);
    drop(writer);
    let error = (0..1000).find_map(|_| second.ask(Want::Newest).err());
    assert!(matches!(error, Some(Error::SenderClosed)), "{error:?}");
}

#[test]
fn what_was_asked_for_makes_room_once_it_is_not_held() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut asks = joins(&address, 0, Delivery::Asked);
    send(&mut writer, &[0], &Targets::All);
    asks.ask(Want::Newest).unwrap();
    let held = answered(&mut asks);
    assert_eq!(versions(&asks.latest().unwrap().unwrap()), [(0, 1)]);
    send(&mut writer, &[0], &Targets::All);
    // Held, it is as any other version that is held.
    let full = writer.stage(&[0], within(0)).map(drop).unwrap_err();
    assert!(matches!(full, Error::AllSlotsPinned { .. }), "{full}");
    check(&only(held));
    for _ in 0..3 {
        send(&mut writer, &[0], &Targets::All);
    }
    assert_eq!(writer.slots(0), 2);
    assert!(
        asks.latest().unwrap().is_none(),
        "the sender needed the room"
    );
    asks.ask(Want::Newest).unwrap();
    assert_eq!(versions(&answered(&mut asks)), [(0, 5)]);
}

#[test]
fn asking_for_version_0_costs_the_worker_nothing() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut asks = joins(&address, 0, Delivery::Asked);
    let (model, version) = (0, Version::NONE);
    let error = asks.ask(Want::Exactly { model, version }).unwrap_err();
    assert!(matches!(error, Error::BadOption { .. }), "{error}");
    // At least nothing is whatever is newest, as soon as there is something.
    asks.ask(Want::AtLeast { model, version }).unwrap();
    assert!(asks.answer(within(0)).unwrap().is_none());
    for version in 1..=2 {
        send(&mut writer, &[0], &Targets::All);
        assert_eq!(versions(&answered(&mut asks)), [(0, version)]);
        asks.ask(Want::Newest).unwrap();
        assert_eq!(versions(&answered(&mut asks)), [(0, version)]);
        asks.ask(Want::AtLeast {
            model,
            version: Version(version + 1),
        })
        .unwrap();
    }
    assert!(writer.take_rejected().is_empty());
}

#[test]
fn only_what_a_worker_has_is_said_to_be_applied() {
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    let options = AttachOptions {
        models: Some(vec![1]),
        ..attach(&address, 0)
    };
    let mut reader = Reader::attach(&options, within(20)).unwrap();
    send(&mut writer, &[0, 1], &Targets::All);
    let taken = reader.next(within(20)).unwrap().unwrap();
    for wrong in [0, 2, 63, 64, usize::MAX] {
        let versions = [1, wrong].map(|model| (model, Version(7)));
        let error = reader
            .applied_versions(taken.sequence, versions)
            .unwrap_err();
        assert!(matches!(error, Error::BadOption { .. }), "{error}");
    }
    assert_eq!(writer.readers()[0].applied, [Version::NONE; 2]);
    reader.applied(&taken).unwrap();
    let applied = [Version::NONE, Version(1)];
    assert_eq!(writer.readers()[0].applied, applied);
}

#[test]
fn lanes_without_a_record_get_one_once_there_is_one_and_nobody_waits_for_it() {
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

/// It takes nothing until that comes, and that may come only after the send.
#[test]
fn a_send_does_not_wait_for_one_that_waits_for_a_later_version() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 4));
    let mut reader = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    send(&mut writer, &[0], &Targets::All);
    let first = reader.next(within(20)).unwrap().unwrap();
    reader.applied(&first).unwrap();
    let want = Want::AtLeast {
        model: 0,
        version: Version(3),
    };
    reader.ask(want).unwrap();
    let asking = thread::spawn(move || {
        let third = reader.answer(within(20)).unwrap().unwrap();
        reader.applied(&third).unwrap();
        (reader, third.members[0].snapshot.version())
    });
    let second = send(&mut writer, &[0], &Targets::All);
    // As far as it waits for anything, it waits for ever.
    for level in [Level::Staged, Level::Applied] {
        let lines = writer.waiter().settle(&second, level, None).unwrap();
        assert_eq!(lines[0].outcome, Outcome::Asks);
        assert_eq!(lines[0].versions, [Version(1)]);
    }
    let third = send(&mut writer, &[0], &Targets::All);
    let lines = writer.waiter().settle(&third, Level::Applied, within(20));
    assert_eq!(lines.unwrap()[0].outcome, Outcome::Applied);
    let (_reader, version) = asking.join().unwrap();
    assert_eq!(version, Version(3));
}
