//! Several models that flip together.

use crate::Subject;
use crate::harness::command::{
    Answer, Command, Join, LoadFault, Loaded, Payload, Publish, SendSettings, Sent, Stage,
    TrainerCommand, TrainerSetup, Wait, Want, WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::{Dice, longest, rounds, seed};
use crate::harness::script::{Script, TRAINER};
use crate::harness::shape::Shape;
use crate::harness::worker::own;
use weightsync_engine::OutcomeKind;

const MODELS: [(&str, Shape); 2] = [
    ("actor", Shape::Words(1 << 10)),
    ("critic", Shape::Words(512)),
];

/// Both models as this number.
fn both(word: u64) -> Payload {
    Payload::Set(vec![("actor".into(), word), ("critic".into(), word)])
}

/// What a worker sees is one set, at any speed.
pub(crate) fn a_set_flips_as_one_on_every_worker(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 8),
        ..TrainerSetup::pair(1 << 12)
    };
    let (mut script, _) = Script::open(subject, lead, 3);
    let (sent, seen) = script.deliver(both(2), SendSettings::default(), &[0, 1, 2]);
    script.assert_applied(&sent, &[0, 1, 2]);
    assert_eq!(
        sent.versions,
        [("actor".to_owned(), 2), ("critic".to_owned(), 2)]
    );
    assert!(
        sent.text.starts_with("actor v2 and critic v2 were applied"),
        "{}",
        sent.text
    );
    for seen in seen {
        assert_eq!((seen.word(), seen.versions()), (2, vec![2, 2]));
        assert!(seen.members.iter().all(|member| member.changed), "{seen:?}");
    }
    let count = rounds(50_000, 500);
    for worker in 0..3 {
        script.deed(worker, WorkerCommand::Keep(0));
        script.tell_worker(
            worker,
            WorkerCommand::ReadUntil {
                word: 2 + count,
                pulls: subject.pulls(),
            },
        );
    }
    script.send_fast(3, count);
    let checks: u64 = (0..3).map(|worker| script.answer_of(worker).count()).sum();
    println!("{count} sets, {checks} checks");
    script.close();
}

/// Killed anywhere, it leaves each worker with one whole set, and the next sender
/// goes on.
pub(crate) fn sender_killed_at_any_stage_leaves_one_whole_set(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let lead = TrainerSetup {
        run_dir: Some(script.run_dir()),
        slots: (2, 8),
        ..TrainerSetup::pair(1 << 12)
    };
    let info = script.prepare(lead.clone());
    script.gather(&info, &[0, 1]);
    let mut epoch = 0;
    for stage in [Stage::Begun, Stage::Midway, Stage::Written, Stage::Live] {
        for worker in 0..2 {
            let seen = script.take(worker);
            assert_eq!(seen.word(), 1);
            assert!(seen.run.epoch.0 > epoch, "{seen:?} after epoch {epoch}");
            if worker == 1 {
                epoch = seen.run.epoch.0;
            }
        }
        let words = vec![("actor".into(), 7), ("critic".into(), 7)];
        let how = SendSettings::wait(Wait::Sent);
        script.doom(TRAINER);
        script.dispatch(
            TRAINER,
            &Command::Trainer(TrainerCommand::Send(Payload::DyingSet(words, stage), how)),
        );
        script.until_dead(TRAINER);
        for worker in 0..2 {
            let mut live = stage == Stage::Live;
            let mut answer = script.deed(worker, WorkerCommand::Receive(None));
            if !subject.can.outlives {
                // It may have reached this worker, or died with its sender.
                live &= matches!(answer, Answer::Seen(_));
            }
            if live {
                assert_eq!(answer.seen().word(), 7, "{stage:?}");
                answer = script.deed(worker, WorkerCommand::Receive(None));
            }
            let fault = answer.fault();
            assert!(
                matches!(fault.kind, Kind::SenderDied(_)),
                "{stage:?}: {}",
                fault.text
            );
            let newest = script.newest(worker);
            assert_eq!(newest.word(), if live { 7 } else { 1 }, "{stage:?}");
            script.deed(worker, WorkerCommand::Keep(0));
            script.tell_worker(worker, WorkerCommand::Receive(None));
        }
        script.raise(TRAINER);
        assert_eq!(
            script.prepare(lead.clone()),
            info,
            "found at the same place"
        );
        let connect = TrainerCommand::Connect {
            expect: vec![0, 1],
            deadline: longest(),
        };
        assert_eq!(script.act(connect), Answer::Done);
        for worker in 0..2 {
            assert_eq!(script.answer_of(worker).seen().word(), 1);
        }
        script.send(both(1), SendSettings::wait(Wait::Sent));
    }
    script.close();
}

/// Death comes from within, at full speed, microseconds after a publication.
pub(crate) fn a_sender_killed_at_random_moments_leaves_one_set(subject: &Subject) {
    let seed = seed();
    let mut dice = Dice::new(seed);
    let lives = rounds(1_000, 12);
    let mut script = Script::new(subject, 2);
    let lead = TrainerSetup {
        run_dir: Some(script.run_dir()),
        slots: (2, 8),
        ..TrainerSetup::pair(1 << 12)
    };
    let info = script.prepare(lead.clone());
    script.gather(&info, &[0, 1]);
    for worker in 0..2 {
        script.take(worker);
    }
    let mut seen_last = 0;
    for life in 1..=lives {
        // No two lives send the same numbers.
        let from = life * 1_000_000;
        let fuse = Some((dice.below(12), dice.below(300)));
        let publish = Publish {
            from,
            count: 100_000,
            fast: !subject.can.every_version,
            fuse,
        };
        script.doom(TRAINER);
        for worker in 0..2 {
            // Its end is the trainer's death.
            script.tell_worker(
                worker,
                WorkerCommand::ReadUntil {
                    word: u64::MAX,
                    pulls: false,
                },
            );
        }
        script.dispatch(TRAINER, &Command::Trainer(TrainerCommand::Publish(publish)));
        script.until_dead(TRAINER);
        for worker in 0..2 {
            let fault = script.answer_of(worker).fault();
            assert!(
                matches!(fault.kind, Kind::SenderDied(_)),
                "seed {seed}: {}",
                fault.text
            );
            let newest = script.newest(worker);
            // One set, of this life or what the connect of it brought.
            let word = newest.word();
            assert!(
                word == 1 || (from..from + 100_000).contains(&word),
                "seed {seed}: {newest:?}"
            );
            seen_last += u64::from(word > 1);
            script.deed(worker, WorkerCommand::Keep(0));
            script.tell_worker(worker, WorkerCommand::Receive(None));
        }
        script.raise(TRAINER);
        script.prepare(lead.clone());
        let connect = TrainerCommand::Connect {
            expect: vec![0, 1],
            deadline: longest(),
        };
        assert_eq!(script.act(connect), Answer::Done);
        for worker in 0..2 {
            assert_eq!(script.answer_of(worker).seen().word(), 1, "seed {seed}");
            script.deed(worker, WorkerCommand::Keep(0));
        }
    }
    println!("seed {seed}: {lives} lives, {seen_last} last sets");
    script.close();
}

/// All models have the new versions afterwards, or none has.
pub(crate) fn a_load_that_fails_midway_goes_back(subject: &Subject) {
    let mut script = loading(subject, 2);
    let (sent, loaded) = load(&mut script, 2, Some(LoadFault::Once));
    assert_eq!(
        loaded.word(),
        Some(1),
        "the second model failed, and the first went back too: {loaded:?}"
    );
    assert!(loaded.whole && loaded.versions.is_none(), "{loaded:?}");
    assert_eq!(loaded.runs, [1, 1]);
    let fault = loaded.fault.expect("the load failed");
    assert_eq!(fault.kind, Kind::Load, "{}", fault.text);
    let line = sent.line(0);
    assert!(
        line.reason.contains("to fail once") && line.reason.contains("went back"),
        "{}",
        sent.text
    );
    assert_eq!(line.versions, [1, 1], "{}", sent.text);
    assert_eq!(sent.line(1).versions, [2, 2], "{}", sent.text);

    let (sent, loaded) = load(&mut script, 3, None);
    assert!(sent.all_applied, "{}", sent.text);
    assert_eq!((loaded.word(), loaded.whole), (Some(3), true));
    script.close();
}

/// Where the way back fails too, the worker says that it has no model, until it
/// has one.
pub(crate) fn a_load_that_cannot_go_back_does_not_serve(subject: &Subject) {
    let mut script = loading(subject, 2);
    let (sent, loaded) = load(&mut script, 2, Some(LoadFault::Always));
    assert!(!loaded.whole, "{loaded:?}");
    assert!(
        sent.line(0).reason.contains("do not serve"),
        "{}",
        sent.text
    );
    let fault = match script.deed(
        0,
        WorkerCommand::Load {
            timeout: Some(std::time::Duration::ZERO),
            load_fault: None,
        },
    ) {
        Answer::Fault(fault) => fault,
        Answer::Loaded(Loaded {
            fault: Some(fault), ..
        }) => fault,
        other => panic!("it is not whole: {other:?}"),
    };
    assert_eq!(fault.kind, Kind::NotWhole, "{}", fault.text);

    // One model alone: the other one is still half loaded, so both come.
    tell_to_load(&mut script, 0, None);
    tell_to_load(&mut script, 1, None);
    let how = SendSettings {
        model: Some("actor".into()),
        ..SendSettings::default()
    };
    let sent = script.send(Payload::Word(3), how);
    assert!(sent.all_applied, "{}", sent.text);
    for worker in 0..2 {
        let loaded = script.answer_of(worker).loaded();
        assert_eq!(
            loaded.words,
            [vec![Some(3); 3], vec![Some(2); 3]],
            "{loaded:?}"
        );
        assert!(loaded.whole);
    }
    script.close();
}

/// It was half way, and is none the wiser: it gets a whole set.
pub(crate) fn worker_killed_midway_loads_one_set_on_return(subject: &Subject) {
    let mut script = loading(subject, 2);
    script.doom(1);
    tell_to_load(&mut script, 0, Some(LoadFault::Death));
    tell_to_load(&mut script, 1, None);
    let sent = script.send(both(2), SendSettings::default());
    script.until_dead(1);
    assert_eq!(sent.line(0).outcome, OutcomeKind::Died, "{}", sent.text);
    assert_eq!(
        sent.line(0).versions,
        [1, 1],
        "what it had loaded: {}",
        sent.text
    );
    assert_eq!(script.answer_of(1).loaded().word(), Some(2));
    script.raise(1);
    let info = script.info();
    let join = Join {
        own: own(&models()),
        ..Join::new(&info)
    };
    assert_eq!(script.join(0, join), Answer::Done);
    assert_eq!(script.newest(0).word(), 2);
    script.deed(0, WorkerCommand::Keep(0));
    let (sent, loaded) = load(&mut script, 3, None);
    assert!(
        sent.all_applied && loaded.word() == Some(3),
        "{}",
        sent.text
    );
    script.close();
}

/// Before the first member is sent.
pub(crate) fn a_bad_member_is_refused_before_anything_is_sent(subject: &Subject) {
    let mut script = Script::new(subject, 1);
    let info = script.prepare(TrainerSetup::pair(64));
    script.gather(&info, &[0]);
    if subject.can.push {
        script.take(0);
    }
    let set = |members: &[(&str, u64)]| {
        Payload::Set(
            members
                .iter()
                .map(|(id, word)| ((*id).into(), *word))
                .collect(),
        )
    };
    for (what, kind, word) in [
        (
            set(&[("actor", 2), ("critik", 2)]),
            Kind::NoSuchModel,
            "critik",
        ),
        (set(&[]), Kind::EmptySet, "model"),
        (Payload::Word(2), Kind::SeveralModels, "actor, critic"),
    ] {
        let fault = script
            .act(TrainerCommand::Send(what, SendSettings::default()))
            .fault();
        assert_eq!(fault.kind, kind, "{}", fault.text);
        assert!(fault.text.contains(word), "{}", fault.text);
    }
    // The second one's shape is found to be wrong before the first one goes.
    let fault = script
        .act(TrainerCommand::Send(
            Payload::Mixed(2),
            SendSettings::default(),
        ))
        .fault();
    assert_eq!(fault.kind, Kind::WrongWeights, "{}", fault.text);
    assert!(fault.text.contains("critic"), "{}", fault.text);
    let sent = script.send(both(3), SendSettings::wait(Wait::Sent));
    assert_eq!(
        sent.versions,
        [("actor".to_owned(), 2), ("critic".to_owned(), 2)],
        "no number was used up"
    );
    if subject.can.push {
        assert_eq!(script.take(0).word(), 3);
    }
    script.close();

    // Neither does a sender connect without the first weights of each.
    let mut script = Script::new(subject, 0);
    script.prepare(TrainerSetup::pair(64));
    let connect = TrainerCommand::ConnectWith(set(&[("actor", 1)]));
    let fault = script.act(connect).fault();
    assert_eq!(fault.kind, Kind::MissingModels, "{}", fault.text);
    assert!(fault.text.contains("critic"), "{}", fault.text);
    script.close();
}

/// What was sent alone is in addition to what the others were.
pub(crate) fn members_can_be_sent_alone_between_sets(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::pair(64), 2);
    let alone = |model: &str| SendSettings {
        model: Some(model.into()),
        ..SendSettings::default()
    };
    let steps = [
        (
            both(2),
            SendSettings::default(),
            [2, 2],
            [2, 2],
            [true, true],
        ),
        (
            Payload::Word(3),
            alone("critic"),
            [2, 3],
            [2, 3],
            [false, true],
        ),
        (
            Payload::Word(4),
            alone("critic"),
            [2, 4],
            [2, 4],
            [false, true],
        ),
        (
            Payload::Word(5),
            alone("actor"),
            [5, 4],
            [3, 4],
            [true, false],
        ),
        (
            both(6),
            SendSettings::default(),
            [6, 6],
            [4, 5],
            [true, true],
        ),
    ];
    for (what, how, words, versions, changed) in steps {
        let (sent, seen) = script.deliver(what, how, &[0, 1]);
        script.assert_applied(&sent, &[0, 1]);
        for seen in seen {
            assert_eq!(
                (seen.words(), seen.versions()),
                (words.to_vec(), versions.to_vec())
            );
            let says: Vec<_> = seen.members.iter().map(|member| member.changed).collect();
            assert_eq!(says, changed);
        }
    }
    script.deed(1, WorkerCommand::Leave);
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.take(1).words(), [6, 6]);
    script.close();
}

/// It is not woken by, and not counted for, models that it does not run.
pub(crate) fn a_worker_can_take_some_of_the_models(subject: &Subject) {
    let mut script = Script::new(subject, 3);
    let info = script.prepare(TrainerSetup::pair(64));
    let some = |models: &[&str]| {
        let models = models.iter().map(|id| (*id).to_owned()).collect();
        Join {
            models: Some(models),
            ..Join::new(&info)
        }
    };
    let joins = vec![
        (0, Join::new(&info)),
        (1, some(&["critic"])),
        (2, some(&["critic", "actor"])),
    ];
    script.gather_by(joins);
    let ids = |seen: &crate::harness::shape::Seen| -> Vec<String> {
        seen.members
            .iter()
            .map(|member| member.id.clone())
            .collect()
    };
    assert_eq!(ids(&script.take(0)), ["actor", "critic"]);
    assert_eq!(ids(&script.take(1)), ["critic"]);
    assert_eq!(
        ids(&script.take(2)),
        ["critic", "actor"],
        "in the order it named them"
    );

    let (_, seen) = script.deliver(both(2), SendSettings::default(), &[0, 1, 2]);
    assert!(seen.iter().all(|seen| seen.word() == 2), "{seen:?}");
    let actor = SendSettings {
        model: Some("actor".into()),
        ..SendSettings::default()
    };
    let (sent, seen) = script.deliver(Payload::Word(3), actor, &[0, 2]);
    script.assert_applied(&sent, &[0, 2]);
    assert_eq!((seen[0].words(), seen[1].words()), (vec![3, 2], vec![2, 3]));
    script.assert_nothing_new(1, 2);

    let fault = script.join(1, some(&["critik"])).fault();
    assert_eq!(fault.kind, Kind::NoSuchModel, "{}", fault.text);
    script.close();
}

/// The set of that time, all of it, also into models of its own.
pub(crate) fn a_worker_asks_for_a_set(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let lead = TrainerSetup {
        history: 3,
        slots: (2, 8),
        ..TrainerSetup::of(&MODELS)
    };
    let info = script.prepare(lead);
    let loads = Join {
        own: own(&models()),
        ..Join::new(&info)
    };
    script.gather_by(vec![(0, Join::new(&info)), (1, loads)]);
    let alone = SendSettings {
        model: Some("critic".into()),
        ..SendSettings::wait(Wait::Sent)
    };
    script.send(both(2), SendSettings::wait(Wait::Sent));
    script.send(both(3), SendSettings::wait(Wait::Sent));
    script.send(Payload::Word(4), alone);
    // By the version of the first model; the newest set with it.
    for (want, words, versions) in [
        (Want::Exactly(2), [2, 2], [2, 2]),
        (Want::Newest, [3, 4], [3, 4]),
        (Want::Exactly(3), [3, 4], [3, 4]),
        (Want::Exactly(1), [1, 1], [1, 1]),
        (Want::AtLeast(2), [3, 4], [3, 4]),
    ] {
        let seen = script
            .deed(0, WorkerCommand::Pull(want, Some(longest())))
            .seen();
        assert_eq!(
            (seen.words(), seen.versions()),
            (words.to_vec(), versions.to_vec()),
            "{want:?}"
        );
        let into = WorkerCommand::PullInto {
            want,
            load_fault: None,
        };
        let loaded = script.deed(1, into).loaded();
        let held = words.map(|word| vec![Some(word); 3]);
        assert_eq!((&loaded.words[..], loaded.whole), (&held[..], true));
        assert_eq!(
            (loaded.versions, loaded.runs),
            (Some(versions.to_vec()), versions.to_vec())
        );
        script.assert_status(|all| all.iter().all(|status| status.versions == versions));
    }
    // A load that fails midway goes back.
    let loaded = script.deed(
        1,
        WorkerCommand::PullInto {
            want: Want::Exactly(2),
            load_fault: Some(LoadFault::Once),
        },
    );
    let loaded = loaded.loaded();
    assert_eq!(
        loaded.words,
        [vec![Some(3); 3], vec![Some(4); 3]],
        "{loaded:?}"
    );
    assert!(loaded.whole && loaded.versions.is_none(), "{loaded:?}");
    assert_eq!(loaded.runs, [3, 4]);
    script.close();
}

/// Two workers that load both models, and have the first set.
fn loading(subject: &Subject, workers: u32) -> Script<'_> {
    let (script, _) = super::send::loading(subject, &MODELS, workers);
    script
}

fn models() -> Vec<(String, Shape)> {
    MODELS.map(|(id, shape)| (id.to_owned(), shape)).to_vec()
}

/// Sends both models, and has two workers load them: the first with a mishap.
fn load(script: &mut Script<'_>, word: u64, load_fault: Option<LoadFault>) -> (Sent, Loaded) {
    tell_to_load(script, 0, load_fault);
    tell_to_load(script, 1, None);
    let sent = script.send(both(word), SendSettings::default());
    let loaded = script.answer_of(0).loaded();
    assert_eq!(script.answer_of(1).loaded().word(), Some(word));
    (sent, loaded)
}

fn tell_to_load(script: &mut Script<'_>, worker: u32, load_fault: Option<LoadFault>) {
    let timeout = None;
    script.tell_worker(
        worker,
        WorkerCommand::Load {
            timeout,
            load_fault,
        },
    );
}
