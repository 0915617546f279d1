//! Receiving: what comes, what does not, and when a wait ends.

use std::time::{Duration, Instant};
use weightsync_engine::OutcomeKind;

use crate::Subject;
use crate::harness::command::{
    Answer, Command, Join, Payload, SendSettings, TrainerCommand, TrainerSetup, Wait, Want,
    WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::{BRIEF, longest, prompt_limit};
use crate::harness::script::{Script, TRAINER};
use crate::harness::shape::Shape;
use crate::scenarios::send::loading;

/// The end of a timeout is no failure, however often.
pub(crate) fn a_timeout_is_nothing_and_no_error(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    for timeout in [Duration::ZERO, Duration::from_micros(1), BRIEF] {
        for _ in 0..3 {
            assert_eq!(
                script.deed(0, WorkerCommand::Receive(Some(timeout))),
                Answer::Nothing
            );
        }
    }
    // A timeout beyond the clock's reach is none.
    script.tell_worker(0, WorkerCommand::Receive(Some(Duration::MAX)));
    script.until_it_sleeps(1);
    assert!(!script.has_said(1));
    script.act(TrainerCommand::Close);
    let fault = script.answer_of(0).fault();
    assert_eq!(fault.kind, Kind::SenderClosed, "{}", fault.text);
    script.close();
}

/// Or with a version, or a death.
pub(crate) fn a_wait_without_end_ends_with_a_shutdown(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    for worker in 0..2 {
        script.tell_worker(worker, WorkerCommand::Receive(None));
        script.until_it_sleeps(worker as usize + 1);
        assert!(!script.has_said(worker as usize + 1));
    }
    let begun = Instant::now();
    script.act(TrainerCommand::Close);
    for worker in 0..2 {
        let fault = script.answer_of(worker).fault();
        assert_eq!(fault.kind, Kind::SenderClosed, "{}", fault.text);
    }
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    script.close();
}

/// Looking does not use anything up.
pub(crate) fn the_newest_is_there_at_once_and_again(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    for _ in 0..3 {
        assert_eq!(script.newest(0).one(), (1, 1));
    }
    script.deliver_word(2, &[0]);
    for _ in 0..3 {
        assert_eq!(script.newest(0).one(), (2, 2));
    }
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(Some(Duration::ZERO))),
        Answer::Nothing
    );
    script.close();
}

/// A worker that was busy gets the newest, and each of those passed over is
/// settled with it.
pub(crate) fn newest_wins_and_older_ones_are_passed_over(subject: &Subject) {
    let lead = TrainerSetup {
        pending: 8,
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 2);
    for word in 2..7 {
        script
            .act(TrainerCommand::SendAsync(
                Payload::Word(word),
                SendSettings::default(),
            ))
            .began();
    }
    for worker in 0..2 {
        script.take_until(worker, &script.take_deed(), 1, 6);
        script.assert_nothing_new(worker, 6);
    }
    for place in 0..5 {
        let sent = script.act(TrainerCommand::Await(place, None)).sent();
        script.assert_applied(&sent, &[0, 1]);
    }
    script.close();
}

/// In the order of the sends, whatever the pace of the worker.
pub(crate) fn every_version_comes_in_order(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    let mut next = [2_u64; 2];
    for word in 2..40 {
        let sent = script.send(Payload::Word(word), SendSettings::wait(Wait::Sent));
        assert!(sent.lines.is_empty());
        // The second worker is always one behind.
        for (worker, next) in (0..).zip(&mut next) {
            if *next + u64::from(worker) <= word {
                let seen = script.deed(worker, WorkerCommand::Receive(None)).seen();
                assert_eq!(seen.one(), (*next, *next));
                script.deed(worker, WorkerCommand::Keep(0));
                *next += 1;
            }
        }
    }
    assert_eq!(
        script.deed(1, WorkerCommand::Receive(None)).seen().word(),
        39
    );
    script.close();
}

/// A queue has its bound. The version that does not fit by the deadline is said
/// to be lost for that worker, and for nobody else.
pub(crate) fn full_queue_is_a_report_line_and_delays_no_other(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    let mut word = 1;
    let full = loop {
        word += 1;
        assert!(word < 80, "a queue without a bound");
        script.tell_worker(1, WorkerCommand::Receive(None));
        let sent = script.send(Payload::Word(word), SendSettings::within(BRIEF));
        assert_eq!(sent.line(1).outcome, OutcomeKind::Applied, "{}", sent.text);
        assert_eq!(script.answer_of(1).seen().one(), (word, word));
        script.deed(1, WorkerCommand::Keep(0));
        match sent.line(0).outcome {
            OutcomeKind::Late => {}
            OutcomeKind::Full => break sent,
            _ => panic!("{}", sent.text),
        }
    };
    assert!(
        full.text.contains("worker 0") && full.text.contains("queue was full"),
        "{}",
        full.text
    );
    println!("full with {} waiting", word - 2);
    // What is in the queue comes in order, the one that did not fit is missing,
    // and what comes afterwards is there.
    for expected in 2..word {
        assert_eq!(
            script.deed(0, WorkerCommand::Receive(None)).seen().one(),
            (expected, expected)
        );
        script.deed(0, WorkerCommand::Keep(0));
    }
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(Some(BRIEF))),
        Answer::Nothing
    );
    script.deliver_word(word + 1, &[0, 1]);

    // A send that can wait longer is delivered as soon as there is room.
    for more in 0..word - 2 {
        let how = SendSettings {
            workers: Some(vec![0]),
            ..SendSettings::wait(Wait::Sent)
        };
        script.send(Payload::Word(100 + more), how);
    }
    let waits = SendSettings {
        workers: Some(vec![0]),
        ..SendSettings::wait(Wait::Staged)
    };
    script.dispatch(
        TRAINER,
        &Command::Trainer(TrainerCommand::Send(Payload::Word(99), waits)),
    );
    script.until_it_sleeps(TRAINER);
    assert!(!script.has_said(TRAINER), "the queue is full");
    for more in 0..word - 2 {
        assert_eq!(
            script.deed(0, WorkerCommand::Receive(None)).seen().word(),
            100 + more
        );
        script.deed(0, WorkerCommand::Keep(0));
    }
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(None)).seen().word(),
        99
    );
    let sent = script.answer(TRAINER).sent();
    assert!(
        matches!(
            sent.line(0).outcome,
            OutcomeKind::Staged | OutcomeKind::Applied
        ),
        "{}",
        sent.text
    );
    script.close();
}

/// Also by a send that waits for nobody.
pub(crate) fn full_queue_is_reported_without_a_wait(subject: &Subject) {
    // Room for what is in the queue and what waits for it.
    let lead = TrainerSetup {
        slots: (2, 16),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 1);
    let mut word = 1;
    let lost = loop {
        word += 1;
        assert!(word < 160, "a queue without a bound");
        let sent = script.send(Payload::Word(word), SendSettings::wait(Wait::Sent));
        if !sent.lines.is_empty() {
            break sent;
        }
    };
    assert_eq!(lost.outcomes(), [(0, OutcomeKind::Full)], "{}", lost.text);
    assert!(lost.text.contains("will not get it"), "{}", lost.text);
    // Nothing else was lost.
    for expected in 2..word {
        assert_eq!(
            script.deed(0, WorkerCommand::Receive(None)).seen().one(),
            (expected, expected)
        );
        script.deed(0, WorkerCommand::Keep(0));
    }
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(Some(BRIEF))),
        Answer::Nothing
    );
    script.deliver_word(word + 1, &[0]);
    script.close();
}

/// The newest, exactly one, or one at least.
pub(crate) fn a_worker_asks_for_the_newest_or_one_it_names(subject: &Subject) {
    let lead = TrainerSetup {
        history: 3,
        slots: (2, 8),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 1);
    for word in 2..5 {
        script.send(Payload::Word(word), SendSettings::wait(Wait::Sent));
    }
    let mut pull = |want| {
        script
            .deed(0, WorkerCommand::Pull(want, Some(longest())))
            .seen()
            .one()
    };
    // Also where a newer one has come that was not looked at yet.
    for _ in 0..20 {
        assert_eq!(pull(Want::Exactly(2)), (2, 2));
        assert_eq!(pull(Want::Exactly(3)), (3, 3));
        assert_eq!(pull(Want::Newest), (4, 4));
    }
    assert_eq!(
        pull(Want::Newest),
        (4, 4),
        "asked for again, it comes again"
    );
    assert_eq!(pull(Want::AtLeast(3)), (4, 4));
    assert_eq!(pull(Want::AtLeast(4)), (4, 4));
    assert_eq!(pull(Want::Exactly(1)), (1, 1));
    let runs = script.deed(0, WorkerCommand::Runs);
    assert!(
        matches!(&runs, Answer::Runs { versions, .. } if versions[0].1 == 1),
        "{runs:?}"
    );
    // The sender comes to know what it runs.
    script.assert_status(|status| status[0].versions == [1]);
    script.close();
}

/// With what there is instead.
pub(crate) fn a_version_that_is_not_kept_is_said_to_be_so(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    for word in 2..8 {
        script.deliver_word(word, &[0]);
        script.deed(0, WorkerCommand::Keep(0));
    }
    for gone in [1, 2, 99] {
        let fault = script
            .deed(0, WorkerCommand::Pull(Want::Exactly(gone), Some(longest())))
            .fault();
        assert_eq!(fault.kind, Kind::NoSuchVersion, "{}", fault.text);
        assert!(
            fault.text.contains(&format!("v{gone} ")) && fault.text.contains("v7"),
            "{}",
            fault.text
        );
    }
    assert_eq!(
        script
            .deed(0, WorkerCommand::Pull(Want::Newest, Some(longest())))
            .seen()
            .one(),
        (7, 7)
    );
    script.deliver_word(8, &[0]);
    script.close();
}

/// One that there is not yet comes when there is, or not by the timeout.
pub(crate) fn a_worker_waits_for_a_version_to_come(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    assert_eq!(
        script.deed(0, WorkerCommand::Pull(Want::AtLeast(3), Some(BRIEF))),
        Answer::Nothing
    );
    script.tell_worker(0, WorkerCommand::Pull(Want::AtLeast(3), None));
    script.until_it_sleeps(1);
    // A send that waits for its workers does not wait for one that waits for more.
    let sent = script.send(Payload::Word(2), SendSettings::default());
    assert_eq!(sent.outcomes(), [(0, OutcomeKind::Asks)], "{}", sent.text);
    script.until_it_sleeps(1);
    assert!(!script.has_said(1), "the second is not the third");
    script.send(Payload::Word(3), SendSettings::wait(Wait::Sent));
    assert_eq!(script.answer_of(0).seen().one(), (3, 3));

    script.tell_worker(0, WorkerCommand::Pull(Want::AtLeast(9), None));
    script.until_it_sleeps(1);
    script.act(TrainerCommand::Close);
    let fault = script.answer_of(0).fault();
    assert_eq!(fault.kind, Kind::SenderClosed, "{}", fault.text);
    script.close();
}

/// The worker knows the version already, and asks for a later one only then.
pub(crate) fn a_worker_that_passed_over_a_version_is_not_waited_for(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    script.act(TrainerCommand::SendAsync(
        Payload::Word(2),
        SendSettings::default(),
    ));
    assert_eq!(
        script.deed(0, WorkerCommand::Pull(Want::AtLeast(3), Some(BRIEF))),
        Answer::Nothing
    );
    script.tell_worker(0, WorkerCommand::Pull(Want::AtLeast(3), None));
    let sent = script.act(TrainerCommand::Await(0, None)).sent();
    assert_eq!(sent.outcomes(), [(0, OutcomeKind::Asks)], "{}", sent.text);
    script.send(Payload::Word(3), SendSettings::wait(Wait::Sent));
    assert_eq!(script.answer_of(0).seen().one(), (3, 3));
    script.close();
}

/// What is sent is no answer, and what is asked for takes nothing from what was
/// sent: the next receive never goes back.
pub(crate) fn an_answer_takes_nothing_from_what_is_sent(subject: &Subject) {
    let lead = TrainerSetup {
        history: 3,
        slots: (2, 8),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 1);
    for word in 2..5 {
        script.send(Payload::Word(word), SendSettings::wait(Wait::Sent));
    }
    let pull = |want| WorkerCommand::Pull(want, Some(longest()));
    assert_eq!(script.deed(0, pull(Want::Exactly(2))).seen().one(), (2, 2));
    assert_eq!(script.until_newest(0, 4).one(), (4, 4));
    assert_eq!(script.deed(0, pull(Want::Exactly(3))).seen().one(), (3, 3));
    script.assert_nothing_new(0, 4);

    // Sent, then asked for, then received; and what was had is had.
    script.send(Payload::Word(5), SendSettings::wait(Wait::Sent));
    assert_eq!(script.deed(0, pull(Want::Exactly(3))).seen().one(), (3, 3));
    let runs = script
        .deed(0, WorkerCommand::Receive(Some(longest())))
        .seen();
    assert_eq!(runs.one(), (5, 5));
    script.dispatch(
        TRAINER,
        &Command::Trainer(TrainerCommand::Send(
            Payload::Word(6),
            SendSettings::default(),
        )),
    );
    let newest = script.deed(0, pull(Want::AtLeast(6))).seen();
    assert_eq!(newest.one(), (6, 6));
    let sent = script.answer(TRAINER).sent();
    script.assert_applied(&sent, &[0]);
    script.assert_nothing_new(0, 6);

    // A question ends by its timeout, whatever is sent meanwhile; its answer is
    // nobody's.
    script.tell_worker(0, WorkerCommand::Pull(Want::AtLeast(100_000), Some(BRIEF)));
    let mut word = 6;
    while !script.has_said(1) {
        word += 1;
        assert!(word < 50_000, "the question has a timeout");
        script.send(Payload::Word(word), SendSettings::wait(Wait::Sent));
    }
    assert_eq!(script.answer_of(0), Answer::Nothing);
    script.take_until(0, &WorkerCommand::Receive(Some(longest())), 6, word);
    let gone = script.deed(0, pull(Want::Exactly(2))).fault();
    assert_eq!(gone.kind, Kind::NoSuchVersion, "{}", gone.text);
    let before = script.deed(0, pull(Want::Exactly(word - 2))).seen();
    assert_eq!(before.one(), (word - 2, word - 2));
    script.assert_nothing_new(0, word);
    script.deliver_word(word + 1, &[0]);
    script.close();
}

/// A model that is made when the weights come.
pub(crate) fn a_model_without_shapes_takes_the_senders(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    let lazy = Join {
        own: vec![("policy".into(), None)],
        ..Join::new(&info)
    };
    let shaped = Join {
        own: vec![("policy".into(), Some(Shape::Words(64)))],
        ..Join::new(&info)
    };
    script.gather_by(vec![(0, lazy), (1, shaped)]);
    for worker in 0..2 {
        script.tell_worker(
            worker,
            WorkerCommand::Load {
                timeout: None,
                load_fault: None,
            },
        );
    }
    let sent = script.send(Payload::Word(2), SendSettings::default());
    script.assert_applied(&sent, &[0, 1]);
    for worker in 0..2 {
        let loaded = script.answer_of(worker).loaded();
        assert_eq!((loaded.word(), loaded.versions), (Some(2), Some(vec![2])));
    }
    script.close();
}

/// Not twice, not by two ways, and not again when nothing has come.
pub(crate) fn a_version_is_loaded_once(subject: &Subject) {
    let (mut script, _) = loading(subject, &[("policy", Shape::Words(64))], 2);
    for word in 2..6 {
        for worker in 0..2 {
            let deed = WorkerCommand::Load {
                timeout: None,
                load_fault: None,
            };
            script.tell_worker(worker, deed);
        }
        let sent = script.send(Payload::Word(word), SendSettings::default());
        script.assert_applied(&sent, &[0, 1]);
        for worker in 0..2 {
            let loaded = script.answer_of(worker).loaded();
            assert_eq!((loaded.word(), loaded.loads), (Some(word), 1));
            let again = WorkerCommand::Load {
                timeout: Some(Duration::ZERO),
                load_fault: None,
            };
            assert_eq!(script.deed(worker, again), Answer::Nothing);
        }
    }
    script.close();
}

/// One init info does for every worker, also for several in one process.
pub(crate) fn several_workers_live_in_one_process(subject: &Subject) {
    let mut script = Script::new(subject, 1);
    let info = script.prepare(TrainerSetup::words(64));
    let connect = TrainerCommand::Connect {
        expect: vec![3, 1_000_000, 8],
        deadline: longest(),
    };
    script.dispatch(TRAINER, &Command::Trainer(connect));
    let workers = [3, 8, 1_000_000];
    let dispatch = |script: &mut Script<'_>, worker, deed| {
        script.dispatch(1, &Command::Worker(worker, deed));
        script.answer(1)
    };
    for worker in workers {
        assert_eq!(
            dispatch(
                &mut script,
                worker,
                WorkerCommand::Join(Box::new(Join::new(&info)))
            ),
            Answer::Done
        );
    }
    assert_eq!(script.answer(TRAINER), Answer::Done);
    let take = script.take_deed();
    for worker in workers {
        assert_eq!(dispatch(&mut script, worker, take.clone()).seen().word(), 1);
    }
    script.send(Payload::Word(2), SendSettings::wait(Wait::Sent));
    for worker in workers {
        assert_eq!(dispatch(&mut script, worker, take.clone()).seen().word(), 2);
    }
    assert_eq!(dispatch(&mut script, 8, WorkerCommand::Leave), Answer::Done);
    script.until_status(|workers| workers.len() == 2);
    script.send(Payload::Word(3), SendSettings::wait(Wait::Sent));
    for worker in [3, 1_000_000] {
        assert_eq!(dispatch(&mut script, worker, take.clone()).seen().word(), 3);
    }
    script.close();
}
