//! Several writers, and what else changes a store while a writer saves.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use weightsync_conformance::scale;
use weightsync_core::{ModelId, Version};
use weightsync_store::{SaveOptions, Store, StoreError, Which, Writer};

use crate::weights::{MODEL, at, exactly, of, weights};

const ELEMENTS: usize = 2048;

fn claim(store: &Store, keep: &str) -> Writer {
    let mut options = SaveOptions::default();
    options.keep = keep.parse().expect("a rule");
    Writer::claim(store, options).expect("a store that nobody keeps others from")
}

pub fn newest_claim_alone_saves() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path().to_str().expect("a plain path")).expect("a path");
    let policy = ModelId::new(MODEL).expect("a name");
    let newest = AtomicU64::new(0);
    let numbers = AtomicU64::new(0);
    let saved = Mutex::new(Vec::new());
    let lives = scale::rounds(600, 12);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..lives {
                    let mut writer = claim(&store, "all");
                    newest.fetch_max(writer.run().epoch.0, Ordering::SeqCst);
                    loop {
                        let number = numbers.fetch_add(1, Ordering::SeqCst);
                        let before = newest.load(Ordering::SeqCst);
                        let done = writer.save_weights(MODEL, &weights(number, ELEMENTS));
                        match done {
                            Ok(_) => {
                                assert!(writer.run().epoch.0 >= before, "an old writer has saved");
                                let version = writer.version(&policy);
                                let mut saved =
                                    saved.lock().unwrap_or_else(PoisonError::into_inner);
                                saved.push((version, number));
                                if number.is_multiple_of(4) {
                                    break;
                                }
                            }
                            Err(StoreError::Fenced { own, by, .. }) => {
                                assert!(by.epoch > own.epoch);
                                break;
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            });
        }
    });
    let saved = saved.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (version, number) in saved {
        let loaded = store
            .load(&exactly(version))
            .expect("a version that was saved");
        assert_eq!(of(&loaded), Ok((version, number)));
    }
    assert_eq!(store.versions().expect("a store").damage, []);
}

pub fn names_hold_versions_while_others_go() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path().to_str().expect("a plain path")).expect("a path");
    let mut writer = claim(&store, "1");
    writer
        .save_weights(MODEL, &weights(1, ELEMENTS))
        .expect("room");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 2..2 + scale::rounds(3000, 60) {
                writer
                    .save_weights(MODEL, &weights(number, ELEMENTS))
                    .expect("names are no reason");
            }
            done.store(true, Ordering::SeqCst);
        });
        for name in ["best", "last.good"].iter().cycle() {
            let newest = store.load(&Which::Newest).expect("a version");
            let (version, number) = of(&newest).expect("whole");
            match store.set_name(name, &at(version)) {
                Ok(()) => {}
                // It was removed meanwhile, as nothing held it yet.
                Err(StoreError::NoSuchVersion { .. }) => continue,
                Err(error) => panic!("{error}"),
            }
            thread::yield_now();
            let named = store
                .load(&Which::Named((*name).into()))
                .expect("a named version");
            assert_eq!(of(&named), Ok((version, number)));
            if done.load(Ordering::SeqCst) {
                break;
            }
        }
    });
    let names = store.names().expect("a store");
    for (name, models) in names {
        let named = store.load(&Which::Named(name)).expect("a named version");
        assert_eq!(named.set.members()[0].snapshot.version(), models[0].1);
    }
}

pub fn readers_see_no_half_removed_version() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path().to_str().expect("a plain path")).expect("a path");
    let mut writer = claim(&store, "1");
    writer
        .save_weights(MODEL, &weights(1, ELEMENTS))
        .expect("room");
    let newest = AtomicU64::new(1);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                let found = store.scrub().expect("a store");
                assert!(
                    found.versions > 0 && found.sound == found.versions,
                    "{found:?}"
                );
                assert_eq!(found.damage, []);
            }
        });
        scope.spawn(|| {
            for number in 2..2 + scale::rounds(5000, 100) {
                let saved = writer.save_weights(MODEL, &weights(number, ELEMENTS));
                newest.store(saved.expect("room").versions[0].1.0, Ordering::SeqCst);
            }
            done.store(true, Ordering::SeqCst);
        });
        for by_number in [false, true] {
            let (store, newest, done) = (&store, &newest, &done);
            scope.spawn(move || {
                while !done.load(Ordering::SeqCst) {
                    let version = Version(newest.load(Ordering::SeqCst));
                    let which = match by_number {
                        true => exactly(version),
                        false => Which::Newest,
                    };
                    match store.load(&which) {
                        Ok(loaded) => {
                            assert_eq!(loaded.damage, []);
                            let (version, number) = of(&loaded).expect("whole");
                            assert_eq!(version.0, number);
                        }
                        Err(StoreError::NoSuchVersion { .. }) if by_number => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
}
