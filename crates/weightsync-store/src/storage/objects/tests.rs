use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A process that beats often, and one that is patient for longer than a test takes.
const LIVELY: Beats = Beats {
    every: Duration::from_millis(5),
    silence: Duration::from_secs(600),
};

/// A process for which silence is soon death.
const HASTY: Beats = Beats {
    every: Duration::from_millis(5),
    silence: Duration::from_millis(50),
};

/// A store in memory of its own, as several processes see it.
fn store(name: &str, beats: Beats) -> Objects {
    let place = BucketPrefix::parse("memory", &format!("/{name}")).unwrap();
    Objects {
        // Another process has seen nothing yet.
        seen: Arc::default(),
        ..Objects::with_beats(place, beats)
    }
}

/// The name of a temporary store.
fn temporary(digit: &str) -> String {
    format!("temporary-{}", digit.repeat(32))
}

fn life(storage: &Objects, path: &str) -> Option<Life> {
    storage.peer(path).unwrap().map(|peer| peer.life())
}

#[test]
fn swap_succeeds_once_for_the_same_bytes() {
    let storage = store("swap", Beats::default());
    assert!(!storage.swap("a", Some(b"0"), b"1").unwrap());
    for old in [None, Some(&b"0"[..])] {
        let (won, start) = (AtomicUsize::new(0), Barrier::new(8));
        std::thread::scope(|scope| {
            for writer in 0..8 {
                let (storage, won, start) = (&storage, &won, &start);
                scope.spawn(move || {
                    start.wait();
                    let new = format!("new {writer}");
                    let swapped = storage.swap("a", old, new.as_bytes()).unwrap();
                    won.fetch_add(swapped.into(), Ordering::Relaxed);
                });
            }
        });
        assert_eq!(won.into_inner(), 1);
        storage.put("a", b"0").unwrap();
    }
}

#[test]
fn push_waits_until_a_silent_sender_is_dead() {
    let still = Beats {
        every: Duration::from_secs(600),
        ..LIVELY
    };
    let silent = store("pushed", still).announce("ends/sender.lock", b"");
    let hasty = crate::Store::on(Arc::new(store("pushed", HASTY)));
    hasty.refuse_living_sender().unwrap();
    drop(silent);
    let _lively = store("pushed", LIVELY).announce("ends/sender.lock", b"");
    let patient = crate::Store::on(Arc::new(store("pushed", LIVELY)));
    let error = patient.refuse_living_sender().unwrap_err();
    assert!(matches!(error, crate::StoreError::InUse { .. }), "{error}");
}

#[test]
fn names_are_those_directly_in_a_directory() {
    let storage = store("list", Beats::default());
    for path in ["a/b", "a/c/d", "a/c/e", "ab/f", "g"] {
        storage.put(path, b"").unwrap();
    }
    let list = |dir: &str| {
        let mut names = storage.list(dir).unwrap();
        names.sort();
        names.join(" ")
    };
    assert_eq!(list("a"), "b c");
    assert_eq!(list(""), "a ab g");
    assert_eq!(list("nothing"), "");
    storage.remove("a").unwrap();
    assert_eq!(list(""), "ab g");
    storage.remove("g").unwrap();
    storage.remove("nothing").unwrap();
    assert_eq!(list(""), "ab");
}

#[test]
fn paths_lead_nowhere_else() {
    let storage = store("paths", Beats::default());
    for path in ["../x", "a//b", "a/../b", "a\nb", "/a"] {
        let error = storage.put(path, b"").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{path}");
    }
}

#[test]
fn upload_appears_whole_or_not_at_all() {
    let storage = store("upload", Beats::default());
    // A part and a half, exactly two parts, and nothing.
    for bytes in [12 << 20, 16 << 20, 0] {
        let data: Vec<u8> = (0..bytes).map(|at: u32| (at / 3) as u8).collect();
        let mut upload = storage.upload("file").unwrap();
        for piece in data.chunks(3 << 20) {
            upload.write(piece).unwrap();
        }
        assert!(storage.open("file").unwrap().is_none());
        upload.finish().unwrap();
        let blob = storage.open("file").unwrap().unwrap();
        assert_eq!(blob.bytes(), u64::from(bytes));
        // Small reads and large ones.
        for piece in [data.len().clamp(1, 1000), 2 << 20] {
            for (index, want) in data.chunks(piece).enumerate().step_by(7) {
                let mut got = vec![0; want.len()];
                blob.read_at((index * piece) as u64, &mut got).unwrap();
                assert!(got == want, "{index} of {piece}");
            }
        }
        let end = blob.read_at(u64::from(bytes), &mut [0]).unwrap_err();
        assert_eq!(end.kind(), ErrorKind::UnexpectedEof);
        storage.remove("file").unwrap();
    }
    let mut upload = storage.upload("file").unwrap();
    upload.write(&vec![1; 20 << 20]).unwrap();
    drop(upload);
    assert!(storage.list("").unwrap().is_empty());
}

#[test]
fn blob_notices_that_another_took_its_place() {
    let storage = store("replaced", Beats::default());
    storage.put("file", &vec![1; 4 << 20]).unwrap();
    let blob = storage.open("file").unwrap().unwrap();
    let mut place = vec![0; 2 << 20];
    blob.read_at(0, &mut place).unwrap();
    storage.put("file", &vec![2; 4 << 20]).unwrap();
    for len in [2 << 20, 10] {
        let error = blob.read_at(1 << 20, &mut place[..len]).unwrap_err();
        assert!(error.to_string().contains("took its place"), "{error}");
    }
}

#[test]
fn presence_keeps_others_out_until_it_leaves() {
    let (own, other) = (store("keeps", LIVELY), store("keeps", LIVELY));
    let presence = own.announce("alive", b"first").unwrap();
    let peer = other.peer("alive").unwrap().unwrap();
    assert_eq!(peer.about(), b"first");
    let refused = other.announce("alive", b"second").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
    assert_eq!(peer.life(), Life::Here);
    drop(presence);
    assert_eq!(peer.life(), Life::Left);
    let second = other.announce("alive", b"second").unwrap();
    let peer = own.peer("alive").unwrap().unwrap();
    assert_eq!((peer.about(), peer.life()), (&b"second"[..], Life::Here));
    drop(second);
}

#[test]
fn presence_of_a_silent_process_is_dead() {
    let (own, other) = (store("silent", LIVELY), store("silent", HASTY));
    // A process that beats never again, as after SIGKILL.
    let still = Beats {
        every: Duration::from_secs(600),
        ..LIVELY
    };
    let silent = store("silent", still).announce("alive", b"first").unwrap();
    let peer = own.peer("alive").unwrap().unwrap();
    assert_eq!(peer.life(), Life::Here);
    // One that has not seen it for long takes its time, and then the place.
    let second = other.announce("alive", b"second").unwrap();
    assert_eq!(peer.life(), Life::Dead);
    // It does not disturb the one that took its place when it leaves after all.
    drop(silent);
    assert_eq!(life(&own, "alive"), Some(Life::Here));
    drop(second);
    let third = own.announce("alive", b"third").unwrap();
    assert_eq!(peer.life(), Life::Left);
    drop(third);
}

#[test]
fn peer_that_left_is_known_behind_its_successor() {
    let (own, other) = (store("successor", LIVELY), store("successor", LIVELY));
    let presence = own.announce("alive", b"first").unwrap();
    let peer = other.peer("alive").unwrap().unwrap();
    drop(presence);
    let _second = own.announce("alive", b"second").unwrap();
    assert_eq!(peer.life(), Life::Left);
}

#[test]
fn presence_comes_back_when_it_is_removed() {
    let (own, other) = (store("removed", LIVELY), store("removed", LIVELY));
    let presence = own.announce("alive", b"here").unwrap();
    other.remove("alive").unwrap();
    while life(&other, "alive").is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    drop(presence);
    assert_eq!(life(&other, "alive"), Some(Life::Left));
    other.remove("alive").unwrap();
    assert_eq!(life(&other, "alive"), None);
}

#[test]
fn store_is_vacated_only_if_nobody_is_there() {
    let (own, other) = (
        store(&temporary("a"), LIVELY),
        store(&temporary("a"), LIVELY),
    );
    let presence = own.announce("ends/sender", b"here").unwrap();
    let nobody = || life(&other, "ends/sender") != Some(Life::Here);
    own.put("head.json", b"").unwrap();
    assert!(!other.vacate(&nobody).unwrap());
    drop(presence);
    assert!(other.vacate(&nobody).unwrap());
    assert!(own.list("").unwrap().is_empty());
}

#[test]
fn announcement_waits_for_a_store_being_vacated() {
    let (own, other) = (
        store(&temporary("b"), LIVELY),
        store(&temporary("b"), LIVELY),
    );
    own.put("head.json", b"").unwrap();
    std::thread::scope(|scope| {
        let (looks, late) = (Cell::new(0), Cell::new(None));
        let vacated = own.vacate(&|| {
            looks.set(looks.get() + 1);
            // The second look is made while the store is being vacated.
            if looks.get() == 2 {
                late.set(Some(scope.spawn(|| {
                    let presence = other.announce("ends/sender", b"late").unwrap();
                    let there = other.read("head.json").unwrap();
                    (presence, there)
                })));
                while life(&own, "ends/sender").is_none() {
                    std::thread::yield_now();
                }
            }
            true
        });
        assert!(vacated.unwrap());
        let (presence, there) = late.take().unwrap().join().unwrap();
        assert_eq!(there, None);
        // What was removed with the rest comes back.
        while life(&own, "ends/sender") != Some(Life::Here) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        drop(presence);
    });
}
