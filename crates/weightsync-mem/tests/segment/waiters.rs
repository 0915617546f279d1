//! Many threads that wait at once, and the ends of their waits.

use std::thread;

use weightsync_core::WorkerId;
use weightsync_mem::{Error, Level, Outcome, SegmentReader, Targets};

use crate::{
    address, attach, check, only, outcomes, send, settle, slots, small, take, take_set, within,
    workers,
};

#[test]
fn many_wait_at_once_and_each_hears_its_own() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut readers: Vec<_> = (0..6)
        .map(|worker| SegmentReader::attach(&attach(&address, worker), within(20)).unwrap())
        .collect();
    let waiter = writer.waiter();
    // Two threads for each of six publications, one reader each.
    let waiting: Vec<_> = (0..6)
        .map(|worker| (worker, send(&mut writer, &[0], &workers(&[worker]))))
        .flat_map(|one| [one.clone(), one])
        .map(|(worker, publication)| {
            let waiter = waiter.clone();
            thread::spawn(move || {
                let lines = waiter.settle(&publication, Level::Applied, within(20));
                assert_eq!(outcomes(&lines.unwrap()), [(worker, Outcome::Applied)]);
            })
        })
        .collect();
    let joins = thread::spawn(move || {
        let seventh = |readers: &[_]| readers.len() == 7;
        assert!(
            writer
                .wait_readers(within(20), |there| seventh(&there.workers))
                .unwrap()
        );
        writer
    });
    // In another order than they began to wait.
    for reader in readers.iter_mut().rev() {
        take(reader);
    }
    for thread in waiting {
        thread.join().unwrap();
    }
    let seventh = SegmentReader::attach(&attach(&address, 6), within(20)).unwrap();
    let writer = joins.join().unwrap();
    drop((seventh, writer));
}

#[test]
fn a_slot_is_waited_for_while_others_wait_for_readers() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let waiter = writer.waiter();
    send(&mut writer, &[0], &Targets::All);
    let held = take(&mut reader);
    let second = send(&mut writer, &[0], &Targets::All);
    let settles = thread::spawn(move || waiter.settle(&second, Level::Applied, within(20)));
    let stages = thread::spawn(move || {
        let third = send(&mut writer, &[0], &Targets::All);
        (writer, third)
    });
    check(&held);
    drop(held);
    let (writer, third) = stages.join().unwrap();
    take(&mut reader);
    let lines = settles.join().unwrap().unwrap();
    assert_eq!(outcomes(&lines), [(0, Outcome::Applied)]);
    assert_eq!(outcomes(&settle(&writer, &third)), [(0, Outcome::Applied)]);
}

#[test]
fn waits_end_when_the_sender_closes() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let publication = send(&mut writer, &[0], &Targets::All);
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let (waiter, publication) = (writer.waiter(), publication.clone());
            thread::spawn(move || waiter.settle(&publication, Level::Applied, None))
        })
        .collect();
    let waiter = writer.waiter();
    drop(writer);
    for thread in waiting {
        let error = thread.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::SenderClosed), "{error}");
    }
    let after = waiter.settle(&publication, Level::Staged, None);
    assert!(matches!(after, Err(Error::SenderClosed)));
    // The last version stays readable.
    check(&only(take_set(&mut reader)));
}

#[test]
fn a_waiter_that_outlives_its_sender_says_so() {
    let mut writer = small(&address(), 1, slots(2, 2));
    let publication = send(&mut writer, &[0], &Targets::All);
    let waiter = writer.waiter();
    let held = waiter.snapshot(0).unwrap().unwrap();
    drop(writer);
    let closed = |error| matches!(error, Some(Error::SenderClosed));
    assert!(closed(waiter.snapshot(0).err()));
    let settled = waiter.settle(&publication, Level::Applied, within(20));
    assert!(closed(settled.err()));
    check(&held);
}

#[test]
fn departing_reader_ends_every_wait_for_it() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 2));
    let mut stays = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let mut goes = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    send(&mut writer, &[0], &Targets::All);
    take(&mut stays);
    take(&mut goes);
    let publications: Vec<_> = (0..3)
        .map(|_| send(&mut writer, &[0], &Targets::All))
        .collect();
    let waiting: Vec<_> = publications
        .into_iter()
        .map(|publication| {
            let waiter = writer.waiter();
            thread::spawn(move || waiter.settle(&publication, Level::Applied, within(20)))
        })
        .collect();
    take(&mut stays);
    drop(goes);
    for thread in waiting {
        let lines = thread.join().unwrap().unwrap();
        assert_eq!(
            outcomes(&lines),
            [(0, Outcome::Applied), (1, Outcome::Left)]
        );
    }
    // From then on it is none, but if it is named.
    let publication = send(&mut writer, &[0], &Targets::All);
    take(&mut stays);
    assert_eq!(
        outcomes(&settle(&writer, &publication)),
        [(0, Outcome::Applied)]
    );
    let publication = send(&mut writer, &[0], &workers(&[1]));
    assert_eq!(
        outcomes(&settle(&writer, &publication)),
        [(1, Outcome::Absent)]
    );
    assert_eq!(writer.readers()[0].worker, WorkerId(0));
}

#[test]
fn departure_is_reported_by_the_next_report_while_a_snapshot_lives_on() {
    let address = address();
    let mut writer = small(&address, 1, slots(2, 3));
    let mut first = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    send(&mut writer, &[0], &Targets::All);
    let lives_on = only(take_set(&mut first));
    drop(first);
    while !writer.readers().is_empty() {
        thread::yield_now();
    }
    let mut second = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    let publication = send(&mut writer, &[0], &Targets::All);
    take(&mut second);
    assert_eq!(
        outcomes(&settle(&writer, &publication)),
        [(1, Outcome::Applied), (1, Outcome::Left)]
    );
    // The first reader is removed only now, and has no second line.
    drop(lives_on);
    drop(second);
    while !writer.readers().is_empty() {
        thread::yield_now();
    }
    let third = send(&mut writer, &[0], &Targets::All);
    assert_eq!(outcomes(&settle(&writer, &third)), [(1, Outcome::Left)]);
}
