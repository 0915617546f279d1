//! Who dies, or stands still, costs the others nothing.

use std::time::{Duration, Instant};
use weightsync_engine::{Error, OutcomeKind, Version};

use crate::Subject;
use crate::harness::command::{
    Answer, Command, Join, LoadFault, Payload, SendSettings, Sent, Stage, Status, TrainerCommand,
    TrainerSetup, Wait, WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::{BRIEF, Dice, longest, prompt_limit, rounds, seed, short};
use crate::harness::script::{Script, TRAINER};
use crate::harness::shape::Shape;
use crate::scenarios::leaks::{bounded, resource_census};
use crate::scenarios::send::loading;

/// At any moment of it, while its trainer connects and later. It is not missed
/// for good: the next process of its number takes its place.
pub(crate) fn a_worker_killed_while_it_joins_is_replaced(subject: &Subject) {
    let (seed, count) = (seed(), rounds(2_500, 20));
    println!("{count} deaths, seed {seed}");
    let mut dice = Dice::new(seed);
    let mut script = Script::new(subject, 2);
    let mut before = None;
    for round in 0..count {
        let info = script.prepare(TrainerSetup::words(64));
        // Worker 1 dies in the rendez-vous, or as a late joiner.
        let late = round % 2 == 1;
        let expect = if late { vec![0] } else { vec![0, 1] };
        let deadline = longest();
        script.dispatch(
            TRAINER,
            &Command::Trainer(TrainerCommand::Connect { expect, deadline }),
        );
        let begun = Instant::now();
        assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
        let one_join = begun.elapsed();
        if late {
            assert_eq!(script.answer(TRAINER), Answer::Done);
            assert_eq!(script.take(0).one(), (1, 1));
        }
        script.tell_worker(1, WorkerCommand::Join(Box::new(Join::new(&info))));
        script.kill_at(2, moment(&mut dice, one_join));
        if late {
            script.deliver_word(2, &[0]);
        }
        script.raise(2);
        assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
        if !late {
            assert_eq!(script.answer(TRAINER), Answer::Done);
            assert_eq!(script.take(0).one(), (1, 1));
        }
        script.take(1);
        // Nothing of the dead one is in the way of the others.
        script.deliver_word(3, &[0, 1]);
        script.until_status(|workers| workers.len() == 2);
        for worker in 0..2 {
            script.deed(worker, WorkerCommand::Keep(0));
            assert_eq!(script.deed(worker, WorkerCommand::Leave), Answer::Done);
        }
        assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
        match before {
            // One of each kind has been there.
            None if round == 1 => before = Some(resource_census(&mut script, TRAINER)),
            None => {}
            Some(before) => bounded(&mut script, TRAINER, before),
        }
    }
    script.close();
}

/// At any moment of it: its workers are told so or find nobody, in time, and
/// can join another.
pub(crate) fn trainer_killed_in_connect_leaves_workers_usable(subject: &Subject) {
    let (seed, count) = (seed(), rounds(500, 10));
    println!("{count} deaths, seed {seed}");
    let mut dice = Dice::new(seed);
    let mut script = Script::new(subject, 2);
    let mut rendezvous = Duration::from_millis(5);
    let mut before = None;
    for round in 0..count {
        let info = script.prepare(TrainerSetup::words(64));
        let join = Join {
            deadline: BRIEF,
            ..Join::new(&info)
        };
        for worker in 0..2 {
            script.tell_worker(worker, WorkerCommand::Join(Box::new(join.clone())));
        }
        let connect = TrainerCommand::Connect {
            expect: vec![0, 1],
            deadline: longest(),
        };
        script.dispatch(TRAINER, &Command::Trainer(connect));
        script.kill_at(TRAINER, moment(&mut dice, rendezvous));
        for worker in 0..2 {
            let begun = Instant::now();
            match script.answer_of(worker) {
                Answer::Done => told_of_the_death(&mut script, worker),
                answer => {
                    let fault = answer.fault();
                    let over_links = !subject.can.outlives;
                    let in_words = match fault.kind {
                        Kind::SenderDied(_) | Kind::NoSender => true,
                        // A trainer that does not get to run may neither have published nor died by
                        // then, and nobody tells of the death of one that its versions outlive.
                        Kind::NoInitialWeights => true,
                        // The trainer of another test has its port by now.
                        _ => {
                            let words = ["refused the token", "secret is not its own"];
                            over_links && words.iter().any(|word| fault.text.contains(word))
                        }
                    };
                    assert!(in_words, "{}", fault.text);
                }
            }
            assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
        }
        script.raise(TRAINER);
        let info = script.prepare(TrainerSetup::words(64));
        let begun = Instant::now();
        script.gather(&info, &[0, 1]);
        rendezvous = begun.elapsed();
        for worker in 0..2 {
            assert_eq!(script.take(worker).one(), (1, 1));
        }
        script.deliver_word(2, &[0, 1]);
        for worker in 0..2 {
            script.deed(worker, WorkerCommand::Keep(0));
            assert_eq!(script.deed(worker, WorkerCommand::Leave), Answer::Done);
        }
        assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
        for worker in 1..3 {
            match before {
                None if round == 1 && worker == 2 => {
                    before = Some(resource_census(&mut script, worker))
                }
                None => {}
                Some(before) => bounded(&mut script, worker, before),
            }
        }
    }
    script.close();
}

/// A worker that has joined a trainer which is dead by now: the first version is
/// whole, and the death is told.
fn told_of_the_death(script: &mut Script<'_>, worker: u32) {
    let look = script.take_deed();
    let fault = match script.deed(worker, look.clone()) {
        Answer::Seen(seen) => {
            assert_eq!(seen.one(), (1, 1));
            script.deed(worker, look).fault()
        }
        answer => answer.fault(),
    };
    assert!(matches!(fault.kind, Kind::SenderDied(_)), "{}", fault.text);
}

/// A moment of something that takes about so long, or one shortly afterwards.
pub(crate) fn moment(dice: &mut Dice, whole: Duration) -> Duration {
    let nanos = whole.as_nanos() as u64;
    Duration::from_nanos(dice.below(nanos + nanos / 4 + 1))
}

/// Its death ends the wait, and is its line.
pub(crate) fn a_worker_killed_while_a_send_waits_is_a_line(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 3);
    for worker in [0, 2] {
        script.tell_worker(worker, WorkerCommand::Receive(None));
    }
    let pid = script.pid(2);
    script.dispatch(
        TRAINER,
        &Command::Trainer(TrainerCommand::Send(
            Payload::Word(2),
            SendSettings::default(),
        )),
    );
    for worker in [0, 2] {
        assert_eq!(script.answer_of(worker).seen().word(), 2);
    }
    script.until_it_sleeps(TRAINER);
    assert!(!script.has_said(TRAINER), "worker 1 is alive");
    let begun = Instant::now();
    script.kill(2);
    let sent = script.answer(TRAINER).sent();
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    assert_eq!(
        sent.outcomes(),
        [
            (0, OutcomeKind::Applied),
            (1, OutcomeKind::Died),
            (2, OutcomeKind::Applied)
        ]
    );
    assert!(
        !sent.all_applied && sent.text.contains("worker 1"),
        "{}",
        sent.text
    );
    assert!(
        sent.text.contains("died; its last version was v1"),
        "{}",
        sent.text
    );
    let line = sent.line(1);
    assert!(line.pid == 0 || line.pid == pid, "{line:?}");

    // The next process of its number is a worker like any other.
    script.deliver_word(3, &[0, 2]);
    script.raise(2);
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.take(1).one(), (3, 3));
    script.deliver_word(4, &[0, 1, 2]);
    script.close();
}

/// Its words are in every report until another has its number.
pub(crate) fn a_worker_that_fails_is_a_line_until_it_is_back(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 2);
    let why = "RuntimeError: CUDA error".to_owned();
    assert_eq!(
        script.deed(1, WorkerCommand::Fail(why.clone())),
        Answer::Done
    );
    // It says first that it can use nothing more, and then leaves. A report between the two
    // has its words, and calls it refused.
    script.until_status(|workers| workers.len() == 1);
    for word in 2..4 {
        let (sent, _) = script.deliver(Payload::Word(word), SendSettings::default(), &[0]);
        let line = sent.line(1);
        assert_eq!(
            (line.outcome, &line.reason),
            (OutcomeKind::Failed, &why),
            "{}",
            sent.text
        );
        assert!(!sent.all_applied, "{}", sent.text);
        let words = format!("failed: {why}; its last version was v1");
        assert!(sent.text.contains(&words), "{}", sent.text);
    }
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.take(1).one(), (3, 3));
    let (sent, _) = script.deliver(Payload::Word(4), SendSettings::default(), &[0, 1]);
    assert!(sent.all_applied || subject.pulls(), "{}", sent.text);
    script.close();
}

/// It is missing, also for sends that began after its death.
pub(crate) fn a_dead_worker_is_a_line_until_it_is_forgotten(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    script.kill(2);
    script.until_status(|workers| workers.len() == 1);
    for word in 2..5 {
        let (sent, _) = script.deliver(Payload::Word(word), SendSettings::default(), &[0]);
        let outcome = sent.line(1).outcome;
        assert!(
            matches!(outcome, OutcomeKind::Died | OutcomeKind::Lost),
            "{}",
            sent.text
        );
        assert!(!sent.all_applied, "{}", sent.text);
    }
    let sent = script.send(Payload::Word(5), SendSettings::wait(Wait::Sent));
    assert_eq!(sent.lines.len(), 1, "{}", sent.text);
    assert_eq!(script.take(0).word(), 5);
    assert_eq!(script.act(TrainerCommand::Forget(vec![1])), Answer::Done);
    let (sent, _) = script.deliver(Payload::Word(6), SendSettings::default(), &[0]);
    assert_eq!(sent.lines.len(), 1, "{}", sent.text);
    assert!(sent.all_applied || subject.pulls(), "{}", sent.text);
    script.close();
}

/// The sender knows them, and tells them to a process that has the init info.
pub(crate) fn status_has_last_outcomes_and_the_dead(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 2);
    script.deliver_word(2, &[0, 1]);
    let taken = match subject.pulls() {
        true => OutcomeKind::Asks,
        false => OutcomeKind::Applied,
    };
    // What a worker has loaded may still be on its way to the sender.
    script.until_status(|workers| workers.iter().all(|one| one.versions == [2]));
    for status in script.roster() {
        assert_eq!(
            (status.last, status.gone),
            (Some(taken), None),
            "{status:?}"
        );
    }
    // Another process asks.
    match info.status(longest()) {
        Ok(outside) => {
            let workers = outside.workers.iter().map(Status::of);
            let seen = workers.map(|one| (one.worker, one.versions, one.gone));
            let seen: Vec<_> = seen.collect();
            assert_eq!(seen, [(0, vec![2], None), (1, vec![2], None)]);
            assert_eq!(outside.models[0].version, Version(2));
        }
        Err(Error::Unsupported { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    script.kill(2);
    script.until_status(|workers| workers.len() == 1);
    let gone = |script: &mut Script<'_>| {
        let gone = script.roster().into_iter();
        let gone = gone.filter_map(|one| Some((one.worker, one.gone?)));
        gone.collect::<Vec<_>>()
    };
    for word in 3..5 {
        let known = gone(&mut script);
        assert!(
            matches!(known[..], [(1, OutcomeKind::Died | OutcomeKind::Lost)]),
            "{known:?}"
        );
        script.deliver_word(word, &[0]);
    }
    script.raise(2);
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    script.take(1);
    assert_eq!(gone(&mut script), []);
    script.kill(2);
    script.until_status(|workers| workers.len() == 1);
    assert_eq!(gone(&mut script).len(), 1);
    assert_eq!(script.act(TrainerCommand::Forget(vec![1])), Answer::Done);
    assert_eq!(gone(&mut script), []);
    script.close();
}

/// Nobody waits for it, and its number is free again.
pub(crate) fn a_worker_killed_while_idle_is_gone(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 2);
    for round in 0..3 {
        script.kill(2);
        script.until_status(|workers| workers.len() == 1);
        script.deliver_word(2 + 2 * round, &[0]);
        script.raise(2);
        assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
        assert_eq!(script.take(1).word(), 2 + 2 * round);
        script.deliver_word(3 + 2 * round, &[0, 1]);
    }
    script.close();
}

/// What it held is free with its death, and a send that waited for it goes on.
pub(crate) fn a_worker_killed_while_it_holds_everything_frees_it(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 2),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 2);
    // Worker 0 holds both places, if holding costs any; worker 1 nothing.
    script.deed(0, WorkerCommand::Hoard(9));
    script.deed(1, WorkerCommand::Hoard(0));
    script.deliver_word(2, &[0, 1]);
    script.tell_worker(1, WorkerCommand::Receive(None));
    script.dispatch(
        TRAINER,
        &Command::Trainer(TrainerCommand::Send(
            Payload::Word(3),
            SendSettings::default(),
        )),
    );
    script.until_it_sleeps(TRAINER);
    let begun = Instant::now();
    script.kill(1);
    let sent = script.answer(TRAINER).sent();
    // It may have been dead before the version was there to be missed.
    let mut outcomes = sent.outcomes();
    outcomes.retain(|line| *line != (0, OutcomeKind::Died));
    assert_eq!(outcomes, [(1, OutcomeKind::Applied)], "{}", sent.text);
    assert_eq!(script.answer_of(1).seen().word(), 3);
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    script.deliver_word(4, &[1]);
    script.close();
}

/// An error of a load is told at once, in the worker's words, and is over with
/// the next version that it can load.
pub(crate) fn a_worker_that_cannot_load_is_a_line(subject: &Subject) {
    let (mut script, _) = loading(subject, &[("policy", Shape::Words(64))], 2);
    let begun = Instant::now();
    for (word, before) in [(2, 1), (3, 1)] {
        script.tell_worker(
            0,
            WorkerCommand::Load {
                timeout: None,
                load_fault: Some(LoadFault::Once),
            },
        );
        script.tell_worker(
            1,
            WorkerCommand::Load {
                timeout: None,
                load_fault: None,
            },
        );
        let sent = script.send(Payload::Word(word), SendSettings::default());
        assert_eq!(
            sent.outcomes(),
            [(0, OutcomeKind::Refused), (1, OutcomeKind::Applied)],
            "{}",
            sent.text
        );
        assert!(
            sent.text.contains("to fail once") && sent.text.contains("went back"),
            "{}",
            sent.text
        );
        assert_eq!(sent.line(0).versions, [before]);
        let loaded = script.answer_of(0).loaded();
        assert_eq!(
            (loaded.word(), loaded.whole),
            (Some(before), true),
            "{loaded:?}"
        );
        assert_eq!(script.answer_of(1).loaded().word(), Some(word));
    }
    for worker in 0..2 {
        script.tell_worker(
            worker,
            WorkerCommand::Load {
                timeout: None,
                load_fault: None,
            },
        );
    }
    let sent = script.send(Payload::Word(4), SendSettings::default());
    script.assert_applied(&sent, &[0, 1]);
    for worker in 0..2 {
        assert_eq!(script.answer_of(worker).loaded().word(), Some(4));
    }
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    script.close();
}

/// It is alive and not dead, so it is late and nothing else.
pub(crate) fn stopped_worker_is_late_and_others_are_up_to_date(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 8),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 3);
    script.stop(1);
    let deadline = short();
    for word in 2..5 {
        let (sent, seen) =
            script.deliver(Payload::Word(word), SendSettings::within(deadline), &[1, 2]);
        let outcomes = sent.outcomes();
        assert_eq!(
            outcomes[1..],
            [(1, OutcomeKind::Applied), (2, OutcomeKind::Applied)]
        );
        // One that is far from its sender may be given up for its silence, as one whose
        // death nobody notices otherwise.
        let may_be_lost = !script.is_near() || !subject.can.death;
        let lost = may_be_lost && outcomes[0] == (0, OutcomeKind::Lost);
        assert!(
            lost || outcomes[0] == (0, OutcomeKind::Late),
            "{outcomes:?}"
        );
        assert!(
            (lost || sent.took >= deadline) && sent.took < prompt_limit(),
            "{:?}",
            sent.took
        );
        assert!(seen.iter().all(|seen| seen.word() == word), "{seen:?}");
    }
    script.wake(1);
    // What it held is whole, and what comes is the newest.
    assert_eq!(script.deed(0, WorkerCommand::Reread(3)).held()[0].word(), 1);
    assert_eq!(script.take(0).one(), (4, 4));
    script.deliver_after(4, 5, SendSettings::default(), &[0, 1, 2]);
    script.close();
}

/// Those after it pass it over until it moves, and have a line that says so.
pub(crate) fn a_stopped_worker_costs_one_send_its_deadline(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 8),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 2);
    script.stop(1);
    let short = short();
    let (sent, _) = script.deliver(Payload::Word(2), SendSettings::within(short), &[1]);
    // One that is far from its sender may be given up for its silence, as one whose death
    // nobody notices otherwise.
    let may_be_lost = !script.is_near() || !subject.can.death;
    let is = |sent: &Sent, outcome, passed| {
        let line = sent.line(0);
        let lost = may_be_lost && line.outcome == OutcomeKind::Lost;
        assert!(
            lost || (line.outcome, line.passed) == (outcome, passed),
            "{}",
            sent.text
        );
        assert_eq!(sent.line(1).outcome, OutcomeKind::Applied, "{}", sent.text);
        assert!(!sent.all_applied, "{}", sent.text);
        !lost
    };
    assert!(!is(&sent, OutcomeKind::Late, false) || sent.took >= short);
    let passing = SendSettings {
        wait_late: false,
        ..SendSettings::default()
    };
    let (mut last, mut queued) = (12, vec![2]);
    for word in 3..=last {
        let (sent, _) = script.deliver(Payload::Word(word), passing.clone(), &[1]);
        assert!(sent.took < prompt_limit(), "{:?}: {}", sent.took, sent.text);
        // One that gets every version has no room for all of these.
        if subject.can.every_version && sent.line(0).outcome == OutcomeKind::Full {
            continue;
        }
        let late = is(&sent, OutcomeKind::Late, true);
        assert!(
            !late || sent.text.contains("was not waited for"),
            "{}",
            sent.text
        );
        queued.push(word);
    }
    if !subject.can.every_version {
        last = 13;
        let insists = SendSettings::within(short);
        let (sent, _) = script.deliver(Payload::Word(last), insists, &[1]);
        let late = is(&sent, OutcomeKind::Late, false);
        assert!(!late || sent.took >= short, "{:?}", sent.took);
    }

    // It moves, and is a worker like any other.
    script.wake(1);
    if subject.can.every_version {
        if may_be_lost {
            // What it is given depends on whether it was.
            return script.close();
        }
        for word in queued {
            assert_eq!(script.take(0).word(), word);
        }
    } else {
        while script.take(0).word() < last {}
        script.until_status(|workers| workers.iter().all(|one| one.versions == [last]));
    }
    script.deliver_after(last, 14, passing, &[0, 1]);
    script.close();
}

/// Whatever it was doing, its workers have whole versions of it.
pub(crate) fn a_sender_killed_at_any_stage_leaves_whole_versions(subject: &Subject) {
    for stage in [Stage::Begun, Stage::Midway, Stage::Written, Stage::Live] {
        let (mut script, _) = Script::open(subject, TrainerSetup::words(1 << 12), 2);
        script.deliver_word(2, &[0, 1]);
        script.doom(TRAINER);
        script.dispatch(
            TRAINER,
            &Command::Trainer(TrainerCommand::Send(
                Payload::Dying(7, stage),
                SendSettings::wait(Wait::Sent),
            )),
        );
        script.until_dead(TRAINER);
        for worker in 0..2 {
            let mut live = stage == Stage::Live;
            let mut answer = script.deed(worker, WorkerCommand::Receive(None));
            if !subject.can.outlives {
                // It may have reached this worker, or died with its sender.
                live &= matches!(answer, Answer::Seen(_));
            }
            let newest = if live { (3, 7) } else { (2, 2) };
            if live {
                assert_eq!(answer.seen().one(), newest);
                answer = script.deed(worker, WorkerCommand::Receive(None));
            }
            let fault = answer.fault();
            assert!(
                matches!(fault.kind, Kind::SenderDied(_)),
                "{stage:?}: {}",
                fault.text
            );
            assert_eq!(
                script.deed(worker, WorkerCommand::Reread(3)).held()[0].one(),
                newest,
                "{stage:?}"
            );
            assert_eq!(script.newest(worker).one(), newest, "{stage:?}");
        }
        script.close();
    }
}

/// Also to those that wait without end, and those that look without waiting.
pub(crate) fn killed_sender_is_noticed_by_all_at_once(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 3);
    let pid = script.pid(TRAINER);
    for worker in 0..2 {
        script.tell_worker(worker, WorkerCommand::Receive(None));
        script.until_it_sleeps(worker as usize + 1);
    }
    let begun = Instant::now();
    script.kill(TRAINER);
    for worker in 0..2 {
        let fault = script.answer_of(worker).fault();
        assert!(
            matches!(fault.kind, Kind::SenderDied(died) if died.is_none_or(|died| died == pid)),
            "{fault:?}"
        );
    }
    let fault = loop {
        match script.deed(2, WorkerCommand::Receive(Some(Duration::ZERO))) {
            Answer::Nothing => assert!(begun.elapsed() < prompt_limit(), "it looks in vain"),
            answer => break answer.fault(),
        }
    };
    assert!(matches!(fault.kind, Kind::SenderDied(_)), "{}", fault.text);
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    // There is no run directory: nobody comes back, and that is said as well.
    let again = script.deed(0, WorkerCommand::Receive(None)).fault();
    assert!(matches!(again.kind, Kind::SenderDied(_)), "{}", again.text);
    script.close();
}
