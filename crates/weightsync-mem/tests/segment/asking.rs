//! Versions asked for.

use std::thread;
use std::time::Instant;

use weightsync_core::{Version, WorkerId};
use weightsync_mem::{
    AttachOptions, Delivery, Error, Level, Outcome, SegmentOptions, SegmentReader, Targets, Want,
};

use crate::delivery::{joins, soon};
use crate::{
    address, answered, attach, check, nothing_new, only, outcomes, send, settle, slots, small,
    take_set, versions, within,
};

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
    // A version that the reader does not ask for does not come, and no send waits for it.
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
        assert_eq!(writer.readers()[0].versions[0], Version(version));
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
fn worker_on_an_older_version_does_not_count_as_newer() {
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
    // A later complete set replaces it, and so does the same version again.
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
            .wait_readers(within(20), |there| there.workers.is_empty())
            .unwrap()
    );
    let lines = waiter.settle(&fourth, Level::Applied, within(20)).unwrap();
    assert_eq!(outcomes(&lines), [(0, Outcome::Left)]);
}

#[test]
fn pull_answer_leaves_the_newest_for_receive() {
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
    // The reader runs the older version, which says nothing about what it was sent.
    assert_eq!(writer.readers()[0].versions, [Version(3)]);
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

    // An answer that is also a notification is not handed out twice.
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
            // The question came after the sends.
            Err(Error::NoSuchVersion { asked, .. }) => *asked == Version(4),
            _ => false,
        },
        "{answer:?}"
    );
    drop(answer);
    assert_eq!(versions(&take_set(&mut reader)), [(0, 9)]);
    // An answered set is no reason to grow.
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
fn withdrawn_question_gets_no_answer() {
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
    let mut second = SegmentReader::attach(&options, within(20)).unwrap();
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
fn answered_set_makes_room_once_released() {
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

/// The reader takes nothing until that version comes, and it may come only after the send.
#[test]
fn send_ignores_a_pull_that_waits_for_a_later_version() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 4));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
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
