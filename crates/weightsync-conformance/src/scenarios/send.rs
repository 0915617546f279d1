//! A send: whole versions, only what was sent, and a report that is true.

use crate::Subject;
use crate::harness::command::{
    Answer, Command, Join, LoadFault, Payload, SendSettings, TrainerCommand, TrainerSetup, Wait,
    WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::{BRIEF, rounds};
use crate::harness::script::{Script, TRAINER};
use crate::harness::shape::Shape;
use crate::harness::worker::own;
use weightsync_engine::OutcomeKind;

/// A reader next to a sender that never pauses sees one version at a time.
pub(crate) fn whole_versions_only_at_full_speed(subject: &Subject) {
    full_speed(subject, 1 << 13, rounds(100_000, 1_000));
}

/// The same with versions that take long to write and to read.
pub(crate) fn whole_versions_only_of_megabytes(subject: &Subject) {
    full_speed(subject, 1 << 19, rounds(2_000, 40));
}

fn full_speed(subject: &Subject, words: u64, count: u64) {
    // Each reader keeps one version for a while, and reads another.
    let lead = TrainerSetup {
        slots: (2, 8),
        ..TrainerSetup::words(words)
    };
    let (mut script, _) = Script::open(subject, lead, 3);
    let last = 1 + count;
    let pulls = subject.pulls();
    for worker in 0..3 {
        // What is held from the beginning would be in the way of two slots.
        script.deed(worker, WorkerCommand::Keep(0));
        script.tell_worker(worker, WorkerCommand::ReadUntil { word: last, pulls });
    }
    script.send_fast(2, count);
    let mut checks = 0;
    for worker in 0..3 {
        let checked = script.answer_of(worker).count();
        assert!(
            !subject.can.every_version || checked == count,
            "{checked} of {count}"
        );
        checks += checked;
    }
    println!("{count} versions, {checks} checks");
    script.close();
}

/// The trainer's memory is read during a send and at no other time.
pub(crate) fn unsent_changes_are_not_seen(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(1 << 12), 2);
    script.deliver_word(1000, &[0, 1]);
    // The trainer changes its tensors in place all the while; its workers look
    // at what they hold, and at the newest there is.
    script.dispatch(TRAINER, &Command::Trainer(TrainerCommand::Scribble));
    for worker in 0..2 {
        let held = script.deed(worker, WorkerCommand::Reread(100)).held();
        assert_eq!(held.last().map(|seen| seen.word()), Some(1000));
        for _ in 0..20 {
            assert_eq!(script.newest(worker).one(), (2, 1000));
        }
    }
    script.dispatch(TRAINER, &Command::GoOn);
    assert!(script.answer(TRAINER).count() > 0);
    script.deliver_word(3, &[0, 1]);
    script.close();
}

/// Each worker has a line, and the whole is text that a person can read.
pub(crate) fn the_report_is_a_sentence_for_each_worker(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    let (sent, _) = script.deliver(Payload::Word(2), SendSettings::default(), &[0, 1]);
    assert!(sent.all_applied, "{}", sent.text);
    assert!(
        sent.text.contains("policy v2") && sent.text.contains("2 of 2 workers"),
        "{}",
        sent.text
    );
    assert_eq!(
        (sent.versions, sent.bytes),
        (vec![("policy".into(), 2)], 64 * 8)
    );
    for (worker, line) in sent.lines.iter().enumerate() {
        assert_eq!(
            (line.worker, line.versions.as_slice()),
            (worker as u32, &[2][..])
        );
        assert!(
            line.pid == 0 || line.pid == script.pid(worker + 1),
            "{line:?}"
        );
    }

    // One of them does not look.
    script.tell_worker(1, WorkerCommand::Receive(None));
    // The other answers within that, also on a busy machine.
    let sent = script.send(Payload::Word(3), SendSettings::within(10 * BRIEF));
    assert_eq!(
        sent.outcomes(),
        [(0, OutcomeKind::Late), (1, OutcomeKind::Applied)]
    );
    assert!(
        !sent.all_applied && sent.text.contains("1 of 2 workers"),
        "{}",
        sent.text
    );
    assert!(
        sent.text.contains("worker 0") && sent.text.contains("goes on with v2"),
        "{}",
        sent.text
    );
    assert_eq!(sent.line(0).versions, [2], "what it has, not what was sent");
    assert_eq!(script.answer_of(1).seen().word(), 3);
    script.close();
}

/// Sent, staged and applied are three different moments.
pub(crate) fn send_waits_for_the_level_asked_for(subject: &Subject) {
    let (mut script, _) = loading(subject, &[("policy", Shape::Words(64))], 1);
    let sent = script.send(Payload::Word(2), SendSettings::wait(Wait::Sent));
    assert!(sent.lines.is_empty() && !sent.all_applied, "{}", sent.text);

    // The worker has it, and has not loaded it.
    script.tell_worker(
        0,
        WorkerCommand::Load {
            timeout: None,
            load_fault: Some(LoadFault::Pause),
        },
    );
    assert_eq!(script.answer_of(0), Answer::Loading);
    let latest = match subject.can.every_version {
        // What it is loading is in its queue's way.
        true => 2,
        false => {
            script.dispatch(1, &Command::GoOn);
            assert_eq!(script.answer_of(0).loaded().word(), Some(2));
            script.tell_worker(
                0,
                WorkerCommand::Load {
                    timeout: None,
                    load_fault: Some(LoadFault::Pause),
                },
            );
            let staged = script.send(Payload::Word(3), SendSettings::wait(Wait::Staged));
            assert_eq!(
                staged.outcomes(),
                [(0, OutcomeKind::Staged)],
                "{}",
                staged.text
            );
            assert_eq!(script.answer_of(0), Answer::Loading);
            3
        }
    };
    assert_eq!(script.status()[0].versions, [latest - 1]);
    script.dispatch(1, &Command::GoOn);
    assert_eq!(script.answer_of(0).loaded().word(), Some(latest));
    script.tell_worker(
        0,
        WorkerCommand::Load {
            timeout: None,
            load_fault: None,
        },
    );
    let applied = script.send(Payload::Word(9), SendSettings::default());
    assert_eq!(
        applied.outcomes(),
        [(0, OutcomeKind::Applied)],
        "{}",
        applied.text
    );
    assert_eq!(script.answer_of(0).loaded().word(), Some(9));
    script.close();
}

/// A worker reports a version only after it has loaded it.
pub(crate) fn labels_are_true_while_a_load_is_under_way(subject: &Subject) {
    let (mut script, _) = loading(subject, &[("policy", Shape::Words(64))], 1);
    script.tell_worker(
        0,
        WorkerCommand::Load {
            timeout: None,
            load_fault: Some(LoadFault::Pause),
        },
    );
    let sent = script.send(Payload::Word(2), SendSettings::within(BRIEF));
    assert!(
        matches!(
            sent.line(0).outcome,
            OutcomeKind::Late | OutcomeKind::Staged
        ),
        "{}",
        sent.text
    );
    assert_eq!(sent.line(0).versions, [1]);
    assert_eq!(script.answer_of(0), Answer::Loading);
    assert_eq!(script.status()[0].versions, [1]);
    script.dispatch(1, &Command::GoOn);
    let loaded = script.answer_of(0).loaded();
    assert_eq!((loaded.word(), loaded.runs), (Some(2), vec![2]));
    // The sender learns of it a moment later, if they are apart.
    script.assert_status(|status| status[0].versions == [2]);
    script.close();
}

/// A number that does not grow is refused, and nothing happens.
pub(crate) fn version_numbers_may_be_given_and_only_grow(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    let numbered = |version| SendSettings {
        version: Some(version),
        ..SendSettings::default()
    };
    let (sent, seen) = script.deliver(Payload::Word(10), numbered(10), &[0]);
    assert_eq!((sent.version(), seen[0].one()), (10, (10, 10)));
    let (sent, seen) = script.deliver(Payload::Word(11), SendSettings::default(), &[0]);
    assert_eq!((sent.version(), seen[0].one()), (11, (11, 11)));
    for old in [11, 5, 0] {
        let fault = script
            .act(TrainerCommand::Send(Payload::Word(12), numbered(old)))
            .fault();
        assert_eq!(fault.kind, Kind::VersionNotNewer, "{}", fault.text);
    }
    assert_eq!(script.newest(0).one(), (11, 11));
    script.deliver_word(13, &[0]);
    // The highest number of all is the last one: no other weights come under it.
    script.deliver(Payload::Word(14), numbered(u64::MAX), &[0]);
    let fault = script
        .act(TrainerCommand::Send(
            Payload::Word(15),
            SendSettings::default(),
        ))
        .fault();
    assert_eq!(fault.kind, Kind::VersionNotNewer, "{}", fault.text);
    assert_eq!(script.newest(0).one(), (u64::MAX, 14));
    script.close();
}

/// What does not fit is named in full before anything is published.
pub(crate) fn wrong_weights_are_named_and_the_old_version_serves(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    for shape in [Shape::Words(65), Shape::Dtypes, Shape::Floats] {
        let fault = script
            .act(TrainerCommand::Send(
                Payload::Wrong(shape),
                SendSettings::default(),
            ))
            .fault();
        assert_eq!(fault.kind, Kind::WrongWeights, "{}", fault.text);
        assert!(
            fault.text.contains("policy") && fault.text.contains("weight"),
            "{}",
            fault.text
        );
    }
    assert_eq!(script.newest(0).one(), (1, 1));
    let (sent, seen) = script.deliver(Payload::Word(2), SendSettings::default(), &[0]);
    assert_eq!(
        (sent.version(), seen[0].one()),
        (2, (2, 2)),
        "no number was used up"
    );
    script.close();
}

/// Half a copy is nothing.
pub(crate) fn a_source_that_fails_midway_changes_nothing(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(1 << 12), 1);
    for _ in 0..5 {
        let fault = script
            .act(TrainerCommand::Send(
                Payload::Failing(7),
                SendSettings::default(),
            ))
            .fault();
        assert_eq!(fault.kind, Kind::Extract, "{}", fault.text);
        assert!(
            fault.text.contains("b.weight") && fault.text.contains("broken"),
            "{}",
            fault.text
        );
        assert_eq!(script.newest(0).one(), (1, 1));
        script.deed(0, WorkerCommand::Keep(1));
    }
    let (sent, seen) = script.deliver(Payload::Word(2), SendSettings::default(), &[0]);
    assert_eq!((sent.version(), seen[0].one()), (2, (2, 2)));
    script.close();
}

/// A partial update names what it carries; the rest stays.
pub(crate) fn partial_send_leaves_other_tensors_unchanged(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    let partial = SendSettings {
        partial: true,
        ..SendSettings::default()
    };
    let part = |words: &[(&str, u64)]| {
        Payload::Part(
            words
                .iter()
                .map(|(name, word)| ((*name).into(), *word))
                .collect(),
        )
    };
    let (sent, seen) = script.deliver(part(&[("b.bias", 5)]), partial.clone(), &[0]);
    assert_eq!(sent.partial, Some(vec!["b.bias".to_owned()]));
    assert!(sent.text.contains("1 tensor"), "{}", sent.text);
    assert_eq!(seen[0].members[0].words, [1, 1, 5]);
    let (_, seen) = script.deliver(
        part(&[("b.bias", 6), ("a.weight", 7)]),
        partial.clone(),
        &[0],
    );
    assert_eq!(seen[0].members[0].words, [7, 1, 6]);

    for (what, how, kind, word) in [
        (
            part(&[("a.wait", 1)]),
            &partial,
            Kind::NoSuchTensor,
            "a.wait",
        ),
        (part(&[]), &partial, Kind::EmptyUpdate, "policy"),
        // Not said to be a part, it is a model with tensors missing.
        (
            part(&[("b.bias", 8)]),
            &SendSettings::default(),
            Kind::WrongWeights,
            "a.weight",
        ),
    ] {
        let fault = script.act(TrainerCommand::Send(what, how.clone())).fault();
        assert_eq!(fault.kind, kind, "{}", fault.text);
        assert!(fault.text.contains(word), "{}", fault.text);
    }
    assert_eq!(script.newest(0).members[0].words, [7, 1, 6]);
    script.deliver_word(9, &[0]);
    script.close();
}

/// A source that the sender keeps is read when it is told to send.
pub(crate) fn registered_models_are_sent_by_name(subject: &Subject) {
    let lead = TrainerSetup {
        register: true,
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 1);
    let (_, seen) = script.deliver(Payload::Registered(4), SendSettings::default(), &[0]);
    assert_eq!(seen[0].word(), 4);
    script.act(TrainerCommand::Change(5));
    assert_eq!(script.newest(0).word(), 4);
    let by_name = SendSettings {
        model: Some("policy".into()),
        ..SendSettings::default()
    };
    let (_, seen) = script.deliver(Payload::Registered(6), by_name, &[0]);
    assert_eq!(seen[0].word(), 6);
    script.close();

    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    let fault = script
        .act(TrainerCommand::Send(
            Payload::Registered(4),
            SendSettings::default(),
        ))
        .fault();
    assert_eq!(fault.kind, Kind::NotRegistered, "{}", fault.text);
    script.close();
}

/// The model's own extraction can be the only pass over memory.
pub(crate) fn the_trainer_writes_into_the_place_the_workers_read(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(1 << 10), 2);
    for word in 2..8 {
        let (sent, seen) = script.deliver(Payload::Loan(word), SendSettings::default(), &[0, 1]);
        script.assert_applied(&sent, &[0, 1]);
        assert!(
            seen.iter().all(|seen| seen.one() == (word, word)),
            "{seen:?}"
        );
        for worker in 0..2 {
            script.deed(worker, WorkerCommand::Keep(1));
        }
    }
    script.close();
}

/// Versions that are held cost room. When there is none a send fails by its
/// deadline and names who holds it, and goes through as soon as it is released.
pub(crate) fn worker_that_keeps_pins_delays_until_the_deadline(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 2),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 1);
    script.deed(0, WorkerCommand::Hoard(100));
    let brief = SendSettings {
        wait: Wait::Sent,
        ..SendSettings::within(BRIEF)
    };
    let mut words = vec![1];
    let fault = loop {
        let word = words.len() as u64 + 1;
        if word > 40 {
            // Holding costs the sender nothing here.
            break None;
        }
        match script.act(TrainerCommand::Send(Payload::Word(word), brief.clone())) {
            Answer::Fault(fault) => break Some(fault),
            answer => drop(answer.sent()),
        }
        words.push(script.take(0).word());
    };
    let held = script.deed(0, WorkerCommand::Reread(3)).held();
    assert_eq!(
        held.iter().map(|seen| seen.word()).collect::<Vec<_>>(),
        words
    );
    let Some(fault) = fault else {
        println!("{} versions were held and nothing stood still", words.len());
        return script.close();
    };
    assert!(
        fault.retry && fault.text.contains("worker 0"),
        "{}",
        fault.text
    );

    // A send that can wait goes through as soon as one is released.
    script.dispatch(
        TRAINER,
        &Command::Trainer(TrainerCommand::Send(
            Payload::Word(99),
            SendSettings::wait(Wait::Sent),
        )),
    );
    script.until_it_sleeps(TRAINER);
    assert!(!script.has_said(TRAINER), "nothing was released yet");
    script.deed(0, WorkerCommand::Keep(1));
    let sent = script.answer(TRAINER).sent();
    assert_eq!(
        sent.version(),
        words.len() as u64 + 1,
        "the one that failed has no number"
    );
    assert_eq!(script.take(0).word(), 99);
    script.close();
}

/// Workers that load into models of their own, and have the first version.
pub(crate) fn loading<'a>(
    subject: &'a Subject,
    models: &[(&str, Shape)],
    workers: u32,
) -> (Script<'a>, weightsync_engine::InitInfo) {
    let lead = TrainerSetup::of(models);
    let mut script = Script::new(subject, workers as usize);
    let info = script.prepare(lead.clone());
    let join = Join {
        own: own(&lead.models),
        ..Join::new(&info)
    };
    script.gather_by((0..workers).map(|worker| (worker, join.clone())).collect());
    (script, info)
}
