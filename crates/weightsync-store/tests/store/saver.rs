//! Saving while training goes on.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use weightsync_conformance::scale::longest;
use weightsync_core::Version;
use weightsync_engine::Snapshot;
use weightsync_store::{SaveOptions, SaveOutcome, Saver, Saving, Store, StoreError, Which, Writer};

use crate::weights::{MODEL, of, weights};

const ELEMENTS: usize = 1024;

fn open(dir: &Path) -> (Store, Writer) {
    let store = Store::open(dir.to_str().expect("a plain path")).expect("a path");
    let writer = Writer::claim(&store, SaveOptions::default()).expect("a store");
    (store, writer)
}

fn snapshot(writer: &Writer, number: u64) -> Snapshot {
    let weights = weights(number, ELEMENTS);
    Snapshot::of(MODEL, &weights, writer.run(), Version(number)).expect("plain tensors")
}

fn end(saving: &Saving) -> SaveOutcome {
    let ended = saving.wait(Some(longest())).expect("nothing interrupts it");
    ended.expect("every save ends")
}

/// Holds the lock of the store, so that no save ends meanwhile.
fn hold(dir: &Path) -> fs::File {
    let lock = fs::File::options()
        .write(true)
        .open(dir.join("lock"))
        .expect("a store");
    lock.lock().expect("a file system with locks");
    lock
}

pub fn saves_end_as_they_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let (store, writer) = open(dir.path());
    let snapshots: Vec<_> = (1..=5).map(|number| snapshot(&writer, number)).collect();
    let saver = Saver::start(writer).expect("a thread");
    let held = hold(dir.path());
    let savings: Vec<_> = snapshots
        .into_iter()
        .map(|one| saver.save(vec![one]))
        .collect();
    let newest = &savings[4];
    assert!(newest.outcome().is_none());
    assert!(
        newest
            .wait(Some(Duration::ZERO))
            .expect("nothing interrupts it")
            .is_none()
    );
    drop(held);
    assert!(matches!(end(newest), SaveOutcome::Durable(_)));
    // The first may have been begun before the second came. All others were passed over.
    for saving in &savings[1..4] {
        assert!(matches!(end(saving), SaveOutcome::Superseded), "{saving:?}");
    }
    let first = matches!(end(&savings[0]), SaveOutcome::Durable(_));
    let there = store.versions().expect("a store").versions.len();
    assert_eq!(there, 1 + usize::from(first));
    assert_eq!(
        of(&store.load(&Which::Newest).expect("a version")),
        Ok((Version(5), 5))
    );
}

pub fn saves_fail_with_the_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let (store, writer) = open(dir.path());
    let snapshots: Vec<_> = (1..=4).map(|number| snapshot(&writer, number)).collect();
    let saver = Saver::start(writer).expect("a thread");
    let [first, second, third, fourth] = &snapshots[..] else {
        panic!("four")
    };
    // The second time it is there already.
    for written in [true, false] {
        let saved = end(&saver.save(vec![second.clone()]));
        let SaveOutcome::Durable(saved) = saved else {
            panic!("{saved:?}")
        };
        assert_eq!(saved.stored_bytes > 0, written);
    }
    // It comes after a later one.
    let failed = end(&saver.save(vec![first.clone()]));
    let SaveOutcome::Failed(error) = failed else {
        panic!("{failed:?}")
    };
    assert!(
        matches!(*error, StoreError::VersionNotNewer { .. }),
        "{error}"
    );
    // Another writer.
    let rival = Writer::claim(&store, SaveOptions::default()).expect("a store");
    let failed = end(&saver.save(vec![third.clone()]));
    let SaveOutcome::Failed(error) = failed else {
        panic!("{failed:?}")
    };
    assert!(matches!(*error, StoreError::Fenced { .. }), "{error}");
    drop(saver);
    // A store that was removed stays so.
    let saver = Saver::start(rival).expect("a thread");
    fs::remove_dir_all(dir.path()).expect("a directory");
    let failed = end(&saver.save(vec![fourth.clone()]));
    let SaveOutcome::Failed(error) = failed else {
        panic!("{failed:?}")
    };
    assert!(error.to_string().contains("head.json"), "{error}");
    assert!(!dir.path().exists());
}

pub fn drop_saves_what_waits() {
    let dir = tempfile::tempdir().expect("a directory");
    let (store, writer) = open(dir.path());
    let snapshots: Vec<_> = (1..=2).map(|number| snapshot(&writer, number)).collect();
    let saver = Saver::start(writer).expect("a thread");
    let held = hold(dir.path());
    let savings: Vec<_> = snapshots
        .into_iter()
        .map(|one| saver.save(vec![one]))
        .collect();
    let dropping = thread::spawn(move || drop(saver));
    drop(held);
    dropping.join().expect("it ends");
    let last = savings[1].outcome().expect("dropping waits for it");
    assert!(matches!(last, SaveOutcome::Durable(_)), "{last:?}");
    assert_eq!(
        of(&store.load(&Which::Newest).expect("a version")),
        Ok((Version(2), 2))
    );
}

pub fn two_threads_see_the_same_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let (_, writer) = open(dir.path());
    let only = snapshot(&writer, 1);
    let saver = Saver::start(writer).expect("a thread");
    let held = hold(dir.path());
    let saving = saver.save(vec![only]);
    thread::scope(|scope| {
        let waiting = [(); 2].map(|()| scope.spawn(|| end(&saving)));
        drop(held);
        for waiting in waiting {
            let ended = waiting.join().expect("it ends");
            assert!(matches!(ended, SaveOutcome::Durable(_)), "{ended:?}");
        }
    });
}
