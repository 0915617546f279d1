//! Several models, and who gets which versions of them.

use std::thread;

use weightsync_core::{Version, WorkerId};
use weightsync_mem::{
    AttachOptions, Error, Level, Outcome, SegmentOptions, SegmentReader, Targets,
};

use crate::{
    address, attach, changed, check, nothing_new, only, outcomes, send, settle, slots, small, take,
    take_set, versions, within, workers,
};

fn joins(address: &str, worker: u32, models: &[usize]) -> SegmentReader {
    let options = AttachOptions {
        models: Some(models.to_vec()),
        ..attach(address, worker)
    };
    SegmentReader::attach(&options, within(20)).unwrap()
}

#[test]
fn each_reader_gets_its_models_together() {
    let address = address();
    let mut writer = small(&address, 3, slots(2, 2));
    let mut all = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let mut middle = joins(&address, 1, &[1]);
    let mut outer = joins(&address, 2, &[2, 0]);
    let names = |reader: &SegmentReader| reader.models().iter().map(|(model, _)| *model).collect();
    let seen: Vec<Vec<usize>> = [&all, &middle, &outer].map(names).to_vec();
    assert_eq!(seen, [vec![0, 1, 2], vec![1], vec![0, 2]]);
    for (index, spec) in outer.models() {
        assert_eq!(*spec, writer.models()[*index], "the note travels too");
    }

    let publication = send(&mut writer, &[2, 0, 1], &Targets::All);
    let first = take_set(&mut all);
    assert_eq!(first.sequence, publication.sequence);
    assert_eq!(versions(&first), [(0, 1), (1, 1), (2, 1)]);
    assert_eq!(changed(&first), [0, 1, 2]);
    assert_eq!(versions(&take_set(&mut middle)), [(1, 1)]);
    assert_eq!(versions(&take_set(&mut outer)), [(0, 1), (2, 1)]);
    assert_eq!(settle(&writer, &publication).len(), 3);

    // A publication of other models does not move a reader, and does not wait for it.
    let publication = send(&mut writer, &[1], &Targets::All);
    let second = take_set(&mut all);
    assert_eq!(versions(&second), [(0, 1), (1, 2), (2, 1)]);
    assert_eq!(changed(&second), [1]);
    assert_eq!(versions(&take_set(&mut middle)), [(1, 2)]);
    assert!(nothing_new(&mut outer));
    let lines = settle(&writer, &publication);
    let applied = Outcome::Applied;
    assert_eq!(outcomes(&lines), [(0, applied.clone()), (1, applied)]);
    assert_eq!(lines[0].versions, [1, 2, 1].map(Version));
    assert_eq!(lines[1].versions, [0, 2, 0].map(Version));
    for member in first.members.iter().chain(&second.members) {
        check(&member.snapshot);
    }

    // A reader that joins late gets the whole set at once.
    let mut late = joins(&address, 3, &[0, 1]);
    let taken = take_set(&mut late);
    assert_eq!(versions(&taken), [(0, 1), (1, 2)]);
    assert_eq!(changed(&taken), [0, 1]);
}

#[test]
fn a_set_is_never_split() {
    let address = address();
    let mut writer = small(&address, 4, slots(2, 4));
    let readers: Vec<_> = (0..3)
        .map(|worker| {
            let mut reader = SegmentReader::attach(&attach(&address, worker), within(20)).unwrap();
            thread::spawn(move || {
                loop {
                    let versions = versions(&take_set(&mut reader));
                    let first = versions[0].1;
                    assert_eq!(versions, [0, 1, 2, 3].map(|model| (model, first)));
                    if first == 300 {
                        return;
                    }
                }
            })
        })
        .collect();
    for _ in 0..300 {
        send(&mut writer, &[0, 1, 2, 3], &Targets::All);
    }
    for reader in readers {
        reader.join().unwrap();
    }
}

#[test]
fn unwanted_model_costs_readers_nothing() {
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    let mut reader = joins(&address, 0, &[0]);
    send(&mut writer, &[0], &Targets::All);
    take(&mut reader);
    for _ in 0..10 {
        let publication = send(&mut writer, &[1], &Targets::All);
        assert_eq!(settle(&writer, &publication), []);
    }
    assert!(nothing_new(&mut reader));
    assert_eq!((writer.slots(0), writer.slots(1)), (2, 2));
    assert_eq!(writer.version(1), Version(10));
}

#[test]
fn set_for_some_workers_changes_no_other() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut readers: Vec<_> = (0..3).map(|worker| joins(&address, worker, &[0])).collect();
    send(&mut writer, &[0], &Targets::All);
    let held: Vec<_> = readers.iter_mut().map(take).collect();
    let publication = send(&mut writer, &[0], &workers(&[1, 7]));
    assert_eq!(take(&mut readers[1]).version(), Version(2));
    assert!(nothing_new(&mut readers[0]) && nothing_new(&mut readers[2]));
    let lines = settle(&writer, &publication);
    assert_eq!(
        outcomes(&lines),
        [(1, Outcome::Applied), (7, Outcome::Absent)]
    );
    held.iter().for_each(check);

    // The workers' versions are known, and the newest for all stays the same.
    assert_eq!(writer.snapshot(0).unwrap().unwrap().version(), Version(1));
    let version = |targets| {
        let own = writer.snapshot_for(0, &targets).unwrap().unwrap();
        check(&own);
        own.version().0
    };
    assert_eq!(version(workers(&[1])), 2);
    assert_eq!(version(workers(&[7])), 2);
    assert_eq!(version(workers(&[0, 2])), 1);
    for targets in [workers(&[0, 1]), Targets::All] {
        let error = writer.snapshot_for(0, &targets).unwrap_err();
        let Error::Diverged { versions, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(versions, [Version(1), Version(2)]);
    }
    // A worker that joins under a number that was sent to gets that set.
    readers.remove(1);
    let mut again = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    let mut absent = SegmentReader::attach(&attach(&address, 7), within(20)).unwrap();
    assert_eq!(take(&mut again).version(), Version(2));
    assert_eq!(take(&mut absent).version(), Version(2));
    // A set for all workers replaces it.
    send(&mut writer, &[0], &Targets::All);
    for reader in readers.iter_mut().chain([&mut again, &mut absent]) {
        assert_eq!(take(reader).version(), Version(3));
    }
    let own = writer.snapshot_for(0, &Targets::All).unwrap().unwrap();
    assert_eq!(own.version(), Version(3));
}

#[test]
fn every_worker_can_have_weights_of_its_own() {
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    let mut readers: Vec<_> = (0..10)
        .map(|worker| joins(&address, worker, &[0, 1]))
        .collect();
    for round in 0..3 {
        for worker in 0..10 {
            send(&mut writer, &[0, 1], &workers(&[worker]));
        }
        for (worker, reader) in readers.iter_mut().enumerate() {
            let version = round * 10 + worker as u64 + 1;
            assert_eq!(versions(&take_set(reader)), [(0, version), (1, version)]);
        }
    }
    // As many slots as there are versions in use, and one to write; those only
    // pinned would not have counted.
    assert_eq!((writer.slots(0), writer.slots(1)), (11, 11));
    send(&mut writer, &[0], &Targets::All);
    for (worker, reader) in readers.iter_mut().enumerate() {
        let own = 20 + worker as u64 + 1;
        assert_eq!(versions(&take_set(reader)), [(0, 31), (1, own)]);
    }
}

#[test]
fn more_versions_than_slots_can_be_are_refused() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 62), within(20)).unwrap();
    for worker in 0..63 {
        send(&mut writer, &[0], &workers(&[worker]));
    }
    assert_eq!(take(&mut reader).version(), Version(63));
    let staging = writer.stage(&[0], within(20)).unwrap();
    let error = staging.publish(&workers(&[63])).unwrap_err();
    assert!(
        matches!(
            error,
            Error::SlotsExhausted {
                model: 0,
                slots: 64
            }
        ),
        "{error}"
    );
    assert!(nothing_new(&mut reader));
    assert_eq!(writer.version(0), Version(63), "nothing has happened");
    send(&mut writer, &[0], &Targets::All);
    assert_eq!(take(&mut reader).version(), Version(64));
    send(&mut writer, &[0], &workers(&[63]));
}

#[test]
fn a_held_worker_stays_where_it_is() {
    let address = address();
    let mut writer = small(&address, 2, slots(2, 2));
    let mut held = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let mut free = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    send(&mut writer, &[0, 1], &Targets::All);
    take_set(&mut held);
    take_set(&mut free);
    writer.hold(&[WorkerId(0)]).unwrap();
    let status: Vec<_> = writer.readers().iter().map(|reader| reader.held).collect();
    assert_eq!(status, [true, false]);
    for version in 2..=5 {
        let publication = send(&mut writer, &[0], &Targets::All);
        assert_eq!(versions(&take_set(&mut free)), [(0, version), (1, 1)]);
        let lines = settle(&writer, &publication);
        assert_eq!(
            outcomes(&lines),
            [(0, Outcome::Held), (1, Outcome::Applied)]
        );
        assert_eq!(lines[0].versions[0], Version(1));
    }
    // Also what names it, and what it finds when it comes again.
    let publication = send(&mut writer, &[1], &workers(&[0]));
    assert_eq!(
        outcomes(&settle(&writer, &publication)),
        [(0, Outcome::Held)]
    );
    assert!(nothing_new(&mut held));
    let before = held.latest().unwrap().unwrap();
    assert_eq!(versions(&before), [(0, 1), (1, 1)]);
    drop((before, held));
    let mut held = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    assert_eq!(versions(&take_set(&mut held)), [(0, 1), (1, 1)]);
    // Released, it gets what was meant for it meanwhile, once.
    writer.release(&[WorkerId(0)]).unwrap();
    let taken = take_set(&mut held);
    assert_eq!(versions(&taken), [(0, 5), (1, 2)]);
    assert!(nothing_new(&mut held));
    send(&mut writer, &[0], &Targets::All);
    assert_eq!(versions(&take_set(&mut held)), [(0, 6), (1, 2)]);
    assert_eq!(versions(&take_set(&mut free)), [(0, 6), (1, 1)]);
}

#[test]
fn old_versions_are_kept_as_far_as_the_history_goes() {
    let address = address();
    let options = SegmentOptions {
        history: 3,
        ..slots(2, 2)
    };
    let mut writer = small(&address, 1, options);
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    for version in 1..=8 {
        send(&mut writer, &[0], &Targets::All);
        assert_eq!(take(&mut reader).version(), Version(version));
    }
    let kept = |writer: &crate::SegmentWriter| {
        let versions = (0..=14).filter(|version| {
            let old = writer.old_snapshot(0, Version(*version)).unwrap();
            old.inspect(check).is_some()
        });
        let versions: Vec<_> = versions.collect();
        let said = writer.kept(0).unwrap();
        assert!(
            said.iter()
                .rev()
                .map(|version| version.0)
                .eq(versions.clone())
        );
        versions
    };
    assert_eq!(kept(&writer), [5, 6, 7, 8]);
    assert_eq!(writer.slots(0), 5, "those kept, and one to write");
    // A version at which some worker is held exists as well.
    writer.hold(&[WorkerId(0)]).unwrap();
    for _ in 0..5 {
        send(&mut writer, &[0], &Targets::All);
    }
    assert_eq!(kept(&writer), [8, 10, 11, 12, 13]);
    let old = writer.old_snapshot(0, Version(8)).unwrap().unwrap();
    assert_eq!(old.version(), Version(8));
    // The version that the worker will have is the one for all.
    for targets in [workers(&[0]), Targets::All] {
        let own = writer.snapshot_for(0, &targets).unwrap().unwrap();
        assert_eq!(own.version(), Version(13));
    }
}

#[test]
fn frequent_model_keeps_the_history_of_a_rare_one() {
    let address = address();
    let options = SegmentOptions {
        history: 2,
        ..slots(2, 2)
    };
    let mut writer = small(&address, 2, options);
    send(&mut writer, &[0, 1], &Targets::All);
    send(&mut writer, &[1], &Targets::All);
    for _ in 0..5 {
        send(&mut writer, &[0], &Targets::All);
    }
    let kept = |model| {
        let versions = (1..=6).filter(|version| {
            let old = writer.old_snapshot(model, Version(*version)).unwrap();
            old.inspect(check).is_some()
        });
        versions.collect::<Vec<_>>()
    };
    assert_eq!(kept(1), [1, 2]);
    // The first is of the set by which the other model's first is kept.
    assert_eq!(kept(0), [1, 4, 5, 6]);
}

#[test]
fn staged_is_less_than_applied() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut quick = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let mut slow = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    let publication = send(&mut writer, &[0], &Targets::All);
    take(&mut quick);
    let staged = slow.next(within(20)).unwrap().unwrap();
    let waiter = writer.waiter();
    let lines = |level| waiter.settle(&publication, level, within(0)).unwrap();
    assert_eq!(
        outcomes(&lines(Level::Staged)),
        [(0, Outcome::Applied), (1, Outcome::Staged)]
    );
    assert_eq!(
        outcomes(&lines(Level::Applied)),
        [(0, Outcome::Applied), (1, Outcome::Late)]
    );
    slow.applied(&staged).unwrap();
    assert_eq!(
        outcomes(&lines(Level::Applied)),
        [(0, Outcome::Applied), (1, Outcome::Applied)]
    );
    check(&only(staged));
}
