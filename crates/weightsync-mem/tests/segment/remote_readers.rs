//! Readers of other hosts, for whom somebody in the sender's process acts.

use std::thread;
use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Version, WorkerId};
use weightsync_mem::{
    Delivery, Departure, Level, ModelMask, Outcome, RemoteReader, RemoteReaderOptions,
    RemoteReaders, SegmentWriter, Targets, Want,
};

use crate::{address, outcomes, send, settle, slots, small, within, workers};

pub fn join(writer: &SegmentWriter, worker: u32, delivery: Delivery) -> RemoteReader {
    let options = RemoteReaderOptions {
        worker: WorkerId(worker),
        pid: 1,
        seen: Epoch(0),
        models: ModelMask::ALL,
        delivery,
        device: String::new(),
        location: Default::default(),
    };
    RemoteReaders::of(writer).join(options, |_| ()).unwrap()
}

/// Reports the last notification as taken and loaded.
pub fn load(remote_reader: &RemoteReader) {
    let told = remote_reader.notifications().unwrap();
    let last = told.last().unwrap();
    let versions = last.members.iter().map(|one| (one.model(), one.version()));
    remote_reader.progress(last.sequence, 0);
    remote_reader.applied(last.sequence, versions);
}

#[test]
fn any_word_of_a_guest_wakes_its_wait() {
    let mut writer = small(&address(), 1, slots(2, 2));
    let remote_readers: Vec<_> = (0..4)
        .map(|worker| join(&writer, worker, Delivery::Newest))
        .collect();
    let publication = send(&mut writer, &[0], &Targets::All);
    let waiter = writer.waiter();
    let waits = thread::spawn(move || waiter.settle(&publication, Level::Applied, within(20)));
    let [loads, refuses, unusable, leaves] = <[RemoteReader; 4]>::try_from(remote_readers).unwrap();
    load(&loads);
    let sequence = refuses.notifications().unwrap()[0].sequence;
    refuses.refuse(Some(sequence), "not this".into());
    unusable.refuse(None, "nothing".into());
    leaves.leave(weightsync_mem::Departure::Lost);
    let refused = |reason: &str| Outcome::Refused {
        reason: reason.into(),
    };
    let expected = [
        (0, Outcome::Applied),
        (1, refused("not this")),
        (2, refused("nothing")),
        (3, Outcome::Lost),
    ];
    assert_eq!(outcomes(&waits.join().unwrap().unwrap()), expected);
    // The next publication remembers the outcomes in between. A reader that was lost before it had
    // anything has one line.
    let publication = send(&mut writer, &[0], &Targets::All);
    load(&loads);
    load(&refuses);
    let lines = settle(&writer, &publication);
    assert_eq!(lines[0].outcome, Outcome::Applied);
    assert_eq!(lines[1].outcome, Outcome::Applied);
}

/// The wait may sleep when the guest asks for a later version.
#[test]
fn question_of_a_guest_ends_the_wait_for_it() {
    let mut writer = small(&address(), 1, slots(2, 2));
    let guest = join(&writer, 0, Delivery::Newest);
    for question in 1..=20 {
        let publication = send(&mut writer, &[0], &Targets::All);
        let waiter = writer.waiter();
        let begun = Instant::now();
        let waits = thread::spawn(move || waiter.settle(&publication, Level::Applied, within(20)));
        if question % 2 == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        // Each send is the next version.
        let asks = Want::AtLeast {
            model: 0,
            version: Version(question + 1),
        };
        guest.ask(question, asks).unwrap();
        let lines = waits.join().unwrap().unwrap();
        assert_eq!(outcomes(&lines), [(0, Outcome::Asks)]);
        assert!(
            begun.elapsed() < crate::patience::patience(5),
            "nothing ended the wait"
        );
    }
}

/// Readers that had a version; one that leaves in order has a single line.
#[test]
fn departed_guest_has_a_line_until_back_or_forgotten() {
    let mut writer = small(&address(), 1, slots(2, 2));
    let remote_readers = [0, 1, 2, 3].map(|worker| join(&writer, worker, Delivery::Newest));
    let [left, died, lost, fails] = remote_readers;
    send(&mut writer, &[0], &Targets::All);
    for remote_reader in [&left, &died, &lost, &fails] {
        load(remote_reader);
    }
    left.leave(Departure::Left);
    died.leave(Departure::Died);
    lost.leave(Departure::Lost);
    fails.refuse(None, "CUDA error".into());
    fails.leave(Departure::Left);
    let reason = || "CUDA error".to_owned();
    let gone = |first: Option<Outcome>| {
        let failed = Outcome::Failed { reason: reason() };
        let others = [(1, Outcome::Died), (2, Outcome::Lost), (3, failed)];
        let first = first.map(|outcome| (0, outcome));
        first.into_iter().chain(others).collect::<Vec<_>>()
    };
    for first in [Some(Outcome::Left), None, None] {
        let publication = send(&mut writer, &[0], &Targets::All);
        assert_eq!(outcomes(&settle(&writer, &publication)), gone(first));
    }
    let publication = send(&mut writer, &[0], &workers(&[2]));
    let expected = [(2, Outcome::Lost)];
    assert_eq!(
        outcomes(&writer.waiter().decided(&publication).unwrap()),
        expected
    );
    assert_eq!(outcomes(&settle(&writer, &publication)), expected);

    let back = join(&writer, 2, Delivery::Newest);
    writer.forget(&[WorkerId(1), WorkerId(3)]).unwrap();
    let publication = send(&mut writer, &[0], &Targets::All);
    load(&back);
    let lines = settle(&writer, &publication);
    assert_eq!(outcomes(&lines), [(2, Outcome::Applied)]);
}
