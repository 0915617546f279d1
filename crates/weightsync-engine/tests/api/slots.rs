//! Room for versions: who holds what, waiting and growing, and what to do about an error.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use weightsync_engine::worker::WorkerError;
use weightsync_engine::{
    AnyScheme, Epoch, Error, ErrorKind, Expect, Holder, ReceiverSetup, Remedy, SendOptions,
    SenderSetup, Set, SetSnapshot, Snapshot, Tensors, Version, WaitFor, WaitStyle, WorkerId,
};
use weightsync_mem::Error as MemoryError;

use crate::{BRIEF, pair_by, send_to, soon, weights};

#[test]
fn when_every_slot_is_pinned_the_holder_is_named() {
    let setup = SenderSetup::new("policy", &weights()).unwrap().slots(2, 2);
    let (mut sender, mut receiver) = pair_by(setup, &weights());
    let first = receiver.latest().unwrap().unwrap();
    let second = send_to(&mut sender, &weights(), &mut receiver);
    let since = Instant::now();
    let error = sender
        .send_with(
            &weights(),
            &SendOptions::new()
                .wait(WaitFor::Applied)
                .timeout(Some(BRIEF)),
        )
        .unwrap_err();
    assert!(since.elapsed() >= BRIEF);
    assert_eq!(error.remedy(), Remedy::Retry);
    let Error::AllSlotsPinned {
        model,
        slots,
        waited: _,
        holders,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(model.as_str(), "policy");
    assert_eq!(*slots, 2, "{error}");
    let holder = Holder {
        worker: Some(WorkerId(0)),
        pid: std::process::id(),
        versions: vec![Version(1), Version(2)],
    };
    assert_eq!(*holders, [holder]);
    assert!(
        error.to_string().contains(&format!(
            "worker 0 (pid {}) holds v1, v2",
            std::process::id()
        )),
        "{error}"
    );
    assert_eq!(
        (
            sender.version().unwrap(),
            first.slice::<i64>("step").unwrap()
        ),
        (Version(2), &[41][..])
    );

    drop(first);
    assert_eq!(
        send_to(&mut sender, &weights(), &mut receiver).version(),
        Version(3)
    );
    drop(second);
}

#[test]
fn a_worker_with_copies_of_its_own_keeps_no_slot() {
    for scheme in ["multi-process:every=1,own-copy", "multi-process:own-copy"] {
        let setup = SenderSetup::new("policy", &weights()).unwrap().slots(2, 2);
        let setup = setup.scheme(scheme.parse::<AnyScheme>().unwrap()).unwrap();
        let (mut sender, mut receiver) = pair_by(setup, &weights());
        let first = receiver.latest().unwrap().unwrap();
        let sent = SendOptions::new().wait(WaitFor::Sent).timeout(Some(BRIEF));
        // The second version is to be taken, and the third needs the first's slot.
        for _ in 2..=3 {
            sender.send_with(&weights(), &sent).expect(scheme);
        }
        let latest = match scheme.contains("every") {
            true => 1,
            false => 3,
        };
        let again = receiver.set().latest().unwrap().unwrap();
        let member = &again.members()[0];
        assert_eq!(member.snapshot.version(), Version(latest), "{scheme}");
        assert_eq!(member.changed, latest > 1, "{scheme}");
        assert_eq!(first.slice::<i64>("step").unwrap(), [41]);
    }
}

/// The elements of a tensor lie where its image does.
fn place(snapshot: &Snapshot) -> *const f32 {
    snapshot.slice::<f32>("layer.weight").unwrap().as_ptr()
}

#[test]
fn a_copy_that_is_there_is_not_made_again() {
    for scheme in ["multi-process:every=1,own-copy", "multi-process:own-copy"] {
        let actor = weights();
        let set = || Set::new().with("actor", &actor).with("critic", &actor);
        let setup = SenderSetup::new("actor", &actor).unwrap();
        let setup = setup.add_model("critic", &actor).unwrap();
        let setup = setup.scheme(scheme.parse::<AnyScheme>().unwrap()).unwrap();
        let joining = ReceiverSetup::new(setup.init_info(), 0);
        let joining = thread::spawn(move || joining.connect(Some(soon())).unwrap());
        let mut sender = setup
            .connect(&set(), Expect::Count(1), Some(soon()))
            .unwrap();
        let mut receiver = joining.join().unwrap();
        let first = receiver.set().recv_timeout(soon()).unwrap().unwrap();
        let again = receiver.set().latest().unwrap().unwrap();
        let sent = SendOptions::new().wait(WaitFor::Sent).model("critic");
        sender.send_with(&actor, &sent).unwrap();
        let second = receiver.set().recv_timeout(soon()).unwrap().unwrap();
        for id in ["actor", "critic"] {
            let place = |set: &SetSnapshot| place(set.model(id).unwrap());
            assert_eq!(place(&first), place(&again), "{scheme} {id}");
            let same = place(&first) == place(&second);
            assert_eq!(same, id == "actor", "{scheme} {id}");
        }
        let versions = second.versions().into_iter().map(|(_, version)| version);
        assert_eq!(versions.collect::<Vec<_>>(), [Version(1), Version(2)]);
    }
}

#[test]
fn dropped_copy_memory_is_reused_and_held_is_not() {
    for scheme in ["multi-process:every=1,own-copy", "multi-process:own-copy"] {
        let setup = SenderSetup::new("policy", &weights()).unwrap();
        let setup = setup.scheme(scheme.parse::<AnyScheme>().unwrap()).unwrap();
        let (mut sender, mut receiver) = pair_by(setup, &weights());
        let mut next = |step: i64| {
            let mut weights = weights();
            weights.slice_mut::<i64>("step").unwrap()[0] = step;
            send_to(&mut sender, &weights, &mut receiver)
        };
        let step = |snapshot: &Snapshot| snapshot.slice::<i64>("step").unwrap()[0];
        // As a worker does it: the last one goes once the next is there.
        let mut current = next(0);
        let mut places = Vec::new();
        for sent in 1..6 {
            current = next(sent);
            assert_eq!(step(&current), sent, "{scheme}");
            places.push(place(&current));
        }
        assert_eq!(places[0], places[2], "{scheme}");
        assert_eq!(places[1], places[3], "{scheme}");
        assert_ne!(places[0], places[1], "{scheme}");
        // Held ones, by whichever handle, are left alone.
        let held: Vec<_> = (6..12).map(|sent| next(sent).clone()).collect();
        for (sent, snapshot) in (6..).zip(&held) {
            assert_eq!(step(snapshot), sent, "{scheme}");
        }
        assert_eq!(step(&current), 5, "{scheme}");
    }
}

#[test]
fn wrong_weights_do_not_wait_for_a_slot() {
    let mut wrong = weights();
    wrong.insert("layer.extra", [1], [0.0_f32]).unwrap();
    let mut longer = weights();
    longer.insert("layer.bias", [8], [0.0_f32; 8]).unwrap();
    let setup = SenderSetup::new("policy", &weights()).unwrap().slots(2, 2);
    let (mut sender, mut receiver) = pair_by(setup, &weights());
    let _first = receiver.latest().unwrap().unwrap();
    let _second = send_to(&mut sender, &weights(), &mut receiver);
    for wrong in [&wrong, &longer] {
        // A wait for a slot would end by its deadline, with another error.
        let error = sender
            .send_with(
                wrong,
                &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
            )
            .unwrap_err();
        assert!(matches!(error, Error::WrongWeights { .. }), "{error}");
    }
}

#[test]
fn the_senders_own_hold_is_named_as_such() {
    let setup = SenderSetup::new("policy", &weights()).unwrap().slots(2, 2);
    let (mut sender, mut receiver) = pair_by(setup, &weights());
    let _own = sender.snapshot().unwrap();
    send_to(&mut sender, &weights(), &mut receiver);
    let error = sender
        .send_with(
            &weights(),
            &SendOptions::new().wait(WaitFor::Sent).timeout(Some(BRIEF)),
        )
        .unwrap_err();
    assert!(error.to_string().contains("the sender itself"), "{error}");
}

#[test]
fn a_send_waits_until_a_snapshot_is_dropped() {
    for style in [WaitStyle::Sleep, WaitStyle::YieldThenSleep] {
        let setup = SenderSetup::new("policy", &weights())
            .unwrap()
            .slots(2, 2)
            .wait_style(style);
        let (mut sender, mut receiver) = pair_by(setup, &weights());
        let first = receiver.latest().unwrap().unwrap();
        let second = send_to(&mut sender, &weights(), &mut receiver);
        let report = thread::scope(|scope| {
            let sending = scope.spawn(|| {
                sender.send_with(
                    &weights(),
                    &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
                )
            });
            drop(first);
            sending.join().unwrap().unwrap()
        });
        assert_eq!(report.version().unwrap(), Version(3));
        assert_eq!(second.version(), Version(2));
    }
}

#[test]
fn a_segment_grows_to_its_bound_and_then_waits() {
    let setup = SenderSetup::new("policy", &weights()).unwrap().slots(2, 5);
    let (mut sender, mut receiver) = pair_by(setup, &weights());
    let mut held = vec![receiver.latest().unwrap().unwrap()];
    for step in 2..=5 {
        let mut next = weights();
        next.slice_mut::<i64>("step").unwrap()[0] = step;
        held.push(send_to(&mut sender, &next, &mut receiver));
    }
    let steps: Vec<_> = held
        .iter()
        .map(|one| one.slice::<i64>("step").unwrap()[0])
        .collect();
    assert_eq!(steps, [41, 2, 3, 4, 5]);
    let error = sender
        .send_with(
            &weights(),
            &SendOptions::new().wait(WaitFor::Sent).timeout(Some(BRIEF)),
        )
        .unwrap_err();
    assert!(
        matches!(error, Error::AllSlotsPinned { slots: 5, .. }),
        "{error}"
    );
}

#[test]
fn numbers_of_slots_out_of_range_are_refused() {
    for (slots, max_slots) in [(1, 2), (0, 0), (3, 2), (2, 65), (65, 65)] {
        let setup = SenderSetup::new("policy", &weights())
            .unwrap()
            .slots(slots, max_slots);
        let error = setup
            .connect(
                &weights(),
                weightsync_engine::Expect::Count(0),
                Some(soon()),
            )
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setting, "{error}");
        assert_eq!(error.remedy(), Remedy::GiveUp);
    }
}

#[test]
fn a_deadline_too_long_for_the_clock_is_none() {
    let setup = SenderSetup::new("policy", &weights())
        .unwrap()
        .send_timeout(Some(Duration::MAX));
    let info = setup.init_info();
    let worker = thread::spawn(move || {
        let mut receiver = weightsync_engine::ReceiverSetup::new(info, 0)
            .connect(Some(Duration::MAX))
            .unwrap();
        receiver.recv_timeout(Duration::MAX).unwrap().unwrap();
        receiver
    });
    let mut sender = setup
        .connect(
            &weights(),
            weightsync_engine::Expect::Count(1),
            Some(Duration::MAX),
        )
        .unwrap();
    let mut receiver = worker.join().unwrap();
    assert_eq!(
        send_to(&mut sender, &weights(), &mut receiver).version(),
        Version(2)
    );
    sender.loan().unwrap();
}

#[test]
fn too_many_versions_are_refused_by_model_name() {
    let setup = SenderSetup::new("policy", &weights()).unwrap().slots(2, 2);
    let mut sender = setup
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    let error = (0..64).find_map(|worker| {
        let options = SendOptions::new().workers([worker]);
        sender.send_with(&weights(), &options).err()
    });
    let error = error.expect("64 versions in addition to that for all");
    assert!(
        matches!(&error, Error::SlotsExhausted { model, slots: 64 } if model.as_str() == "policy"),
        "{error}"
    );
    // What the words say helps.
    sender.send(&weights()).unwrap();
    let options = SendOptions::new().workers([63]);
    sender.send_with(&weights(), &options).unwrap();
}

/// Room is not waited for in vain.
#[test]
fn wrong_model_of_a_set_is_found_before_staging() {
    let source = weights();
    let setup = SenderSetup::new("actor", &source).unwrap();
    let setup = setup.add_model("critic", &source).unwrap().slots(2, 2);
    let both = Set::new().with("actor", &source).with("critic", &source);
    let mut sender = setup
        .connect(&both, Expect::Count(0), Some(soon()))
        .unwrap();
    let mut receiver = ReceiverSetup::new(sender.init_info(), 0)
        .connect(Some(soon()))
        .unwrap();
    let _first = receiver.set().recv_timeout(soon()).unwrap().unwrap();
    let brief = SendOptions::new().wait(WaitFor::Sent).timeout(Some(BRIEF));
    sender.send_with(&both, &brief).unwrap();
    let _second = receiver.set().recv_timeout(soon()).unwrap().unwrap();
    let error = sender.send_with(&both, &brief).unwrap_err();
    assert!(matches!(error, Error::AllSlotsPinned { .. }), "{error}");
    let mut other = Tensors::new();
    other.insert("other", [1], [0_u8]).unwrap();
    let wrong = Set::new().with("actor", &source).with("critic", &other);
    let error = sender.send_with(&wrong, &brief).unwrap_err();
    assert!(
        matches!(&error, Error::WrongWeights { model, .. } if model.as_str() == "critic"),
        "{error}"
    );
}

#[test]
fn every_error_says_what_to_do_about_it() {
    let os = || io::Error::from(io::ErrorKind::OutOfMemory);
    let cases = [
        (
            MemoryError::NoSender {
                address: "x".into(),
                waited: BRIEF,
            },
            Remedy::Retry,
        ),
        (MemoryError::SenderDied { pid: 1 }, Remedy::Reconnect),
        (MemoryError::SenderClosed, Remedy::Reconnect),
        (
            MemoryError::Forked { owner: 1, child: 2 },
            Remedy::Reconnect,
        ),
        (
            MemoryError::AddressInUse {
                address: "x".into(),
            },
            Remedy::GiveUp,
        ),
        (
            MemoryError::Denied {
                reason: "no".into(),
            },
            Remedy::Retry,
        ),
        (
            MemoryError::Fenced {
                seen: Epoch(2),
                got: Epoch(1),
            },
            Remedy::Retry,
        ),
        (
            MemoryError::Os {
                action: "mapping",
                source: os(),
            },
            Remedy::Reconnect,
        ),
        (
            MemoryError::Protocol {
                expected: "a welcome",
                got: "nothing".into(),
            },
            Remedy::Reconnect,
        ),
        (
            MemoryError::CorruptSet {
                record: 1,
                what: "its checksum",
            },
            Remedy::Retry,
        ),
        (
            MemoryError::CorruptCommit {
                slot: 1,
                what: "its checksum",
            },
            Remedy::Retry,
        ),
        (
            MemoryError::ChecksumMismatch {
                version: Version(1),
                block: 0,
            },
            Remedy::GiveUp,
        ),
    ];
    for (error, remedy) in cases {
        assert_eq!(Error::from(error).remedy(), remedy);
    }
    assert_eq!(Error::BadInitInfo("x".into()).remedy(), Remedy::GiveUp);
    let withdrawn = Error::Withdrawn { reason: "x".into() };
    assert_eq!(withdrawn.remedy(), Remedy::Reconnect);
    assert_eq!(Error::Worker(WorkerError::Closed).remedy(), Remedy::GiveUp);
}
