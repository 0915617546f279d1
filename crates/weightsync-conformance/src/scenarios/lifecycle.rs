//! Setting up, connecting, ending.

use std::thread;
use std::time::{Duration, Instant};

use weightsync_engine::{
    AnyScheme, Error, Expect, InitInfo, OutcomeKind, ReceiverSetup, SendOptions, SenderSetup,
    Session,
};

use crate::Subject;
use crate::harness::command::ResourceCensus;
use crate::harness::command::{
    Answer, Command, Join, Payload, SendSettings, TrainerCommand, TrainerSetup, Wait, WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::resource_census;
use crate::harness::scale::{BRIEF, longest, prompt_limit};
use crate::harness::script::{Script, TRAINER};
use crate::harness::shape::Shape;

const WORDS: Shape = Shape::Words(64);

/// Neither end opens anything before it connects, but for a socket whose address
/// the init info is to name.
pub(crate) fn setting_up_communicates_nothing(subject: &Subject) {
    let scheme: AnyScheme = subject.scheme.parse().expect("it was parsed before");
    let before = resource_census::take();
    let setup = SenderSetup::new("actor", &WORDS.make(1)).expect("a model");
    let setup = setup.add_model("critic", &WORDS.make(1)).expect("another");
    let setup = setup.scheme(scheme).expect("a place");
    let setup = setup.slots(2, 4).history(1).checksums(true);
    let info = setup.init_info();
    let receiving: Vec<_> = (0..3)
        .map(|worker| ReceiverSetup::new(info.clone(), worker))
        .collect();
    let now = resource_census::take();
    let named = now.descriptors - before.descriptors;
    let most = usize::from(!subject.can.outlives);
    assert!(named <= most, "{named} descriptors more");
    let descriptors = before.descriptors + named;
    assert_eq!(
        now,
        ResourceCensus {
            descriptors,
            ..before
        }
    );
    let value = serde_json::to_value(&info).expect("an init info has a JSON form");
    let address = value["at"]["address"]
        .as_str()
        .expect("an address")
        .to_owned();
    assert_eq!(resource_census::listening(&[address]), [""; 0]);
    drop((setup, receiving));
    assert_eq!(resource_census::take(), before);

    // A session that is shut down before it connects releases it at once.
    let mut session = Session::of(info);
    for _ in 0..2 {
        session
            .init_on_sender("policy", &WORDS.make(1))
            .expect("nothing is there yet");
        session.shutdown();
        assert_eq!(resource_census::take(), before);
    }
}

/// A scheme that carries nothing goes through the same calls, and waits for
/// nobody.
pub(crate) fn a_program_runs_unchanged_without_synchronisation(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    // The worker comes first, and the trainer expects one more than there is.
    assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
    let connect = TrainerCommand::Connect {
        expect: vec![0, 1, 7],
        deadline: longest(),
    };
    assert_eq!(script.act(connect), Answer::Done);
    for word in 2..5 {
        let sent = script.send(Payload::Word(word), SendSettings::default());
        assert_eq!((sent.version(), sent.outcomes()), (word, Vec::new()));
        // A wait without end would never return, and is refused.
        let refused = script.deed(0, WorkerCommand::Receive(None)).fault();
        assert_eq!(refused.kind, Kind::Unsupported, "{}", refused.text);
        for timeout in [Some(longest()), Some(Duration::ZERO)] {
            assert_eq!(
                script.deed(0, WorkerCommand::Receive(timeout)),
                Answer::Nothing
            );
        }
        assert_eq!(script.deed(0, WorkerCommand::Latest), Answer::Nothing);
    }
    let fault = script
        .act(TrainerCommand::Send(
            Payload::Wrong(Shape::Floats),
            SendSettings::default(),
        ))
        .fault();
    assert_eq!(fault.kind, Kind::WrongWeights, "{}", fault.text);
    script.close();
}

/// The end that comes first waits, and both return with the first version loaded.
pub(crate) fn connect_is_a_rendezvous_in_either_order(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    let connect = TrainerCommand::Connect {
        expect: vec![0, 1],
        deadline: longest(),
    };
    script.dispatch(TRAINER, &Command::Trainer(connect.clone()));
    script.until_it_sleeps(TRAINER);
    assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
    script.until_it_sleeps(TRAINER);
    assert!(!script.has_said(TRAINER), "one worker is missing");
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.answer(TRAINER), Answer::Done);
    for worker in 0..2 {
        assert_eq!(script.take(worker).one(), (1, 1));
    }
    script.close();

    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    for worker in 0..2 {
        script.tell_worker(worker, WorkerCommand::Join(Box::new(Join::new(&info))));
    }
    for worker in 0..2 {
        script.until_it_sleeps(worker as usize + 1);
        assert!(
            !script.has_said(worker as usize + 1),
            "there is no trainer yet"
        );
    }
    assert_eq!(script.act(connect), Answer::Done);
    for worker in 0..2 {
        assert_eq!(script.answer_of(worker), Answer::Done);
        assert_eq!(script.take(worker).one(), (1, 1));
    }
    script.close();
}

/// By their numbers, as soon as the deadline has come.
pub(crate) fn missing_workers_are_named(subject: &Subject) {
    let mut script = Script::new(subject, 1);
    let info = script.prepare(TrainerSetup::words(64));
    script.tell_worker(0, WorkerCommand::Join(Box::new(Join::new(&info))));
    // Long enough for the one that is there, on any machine but a hanging one.
    let connect = TrainerCommand::Connect {
        expect: vec![0, 5, 6],
        deadline: Duration::from_secs(3),
    };
    let fault = script.act(connect).fault();
    let missing = Kind::MissingWorkers {
        joined: vec![0],
        missing: vec![5, 6],
    };
    assert_eq!(fault.kind, missing, "{}", fault.text);
    assert!(
        fault.retry && fault.text.contains("worker 5, worker 6"),
        "{}",
        fault.text
    );
    assert_eq!(script.answer_of(0), Answer::Done);

    // Who has joined stays, and the next connect goes on waiting.
    let again = |expect: &[u32]| TrainerCommand::Connect {
        expect: expect.to_vec(),
        deadline: longest(),
    };
    script.dispatch(TRAINER, &Command::Trainer(again(&[0])));
    assert_eq!(script.answer(TRAINER), Answer::Done);
    assert_eq!(script.take(0).one(), (1, 1));
    script.deliver_word(2, &[0]);
    script.close();
}

/// It has been there, and did what was expected of it.
pub(crate) fn a_worker_that_joins_and_leaves_at_once_counts(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    let connect = TrainerCommand::Connect {
        expect: vec![0, 1],
        deadline: longest(),
    };
    script.dispatch(TRAINER, &Command::Trainer(connect));
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.deed(1, WorkerCommand::Leave), Answer::Done);
    assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
    assert_eq!(script.answer(TRAINER), Answer::Done);
    assert_eq!(script.take(0).one(), (1, 1));
    script.deliver_word(2, &[0]);
    script.close();
}

/// It says which of the missing were there, and what became of them.
pub(crate) fn a_worker_that_joined_and_died_is_named(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    let connect = TrainerCommand::Connect {
        expect: vec![0, 1],
        deadline: Duration::from_secs(3),
    };
    script.dispatch(TRAINER, &Command::Trainer(connect));
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    script.kill(2);
    let fault = script.answer(TRAINER).fault();
    let missing = Kind::MissingWorkers {
        joined: vec![],
        missing: vec![0, 1],
    };
    assert_eq!(fault.kind, missing, "{}", fault.text);
    // The sender may have heard that it died before it heard that it had loaded v1.
    let phrases = ["worker 1 (pid ", " died; it"];
    let lost = " cannot be reached";
    let is_named = fault.text.contains(phrases[0])
        && (fault.text.contains(phrases[1]) || fault.text.contains(lost));
    assert!(is_named, "{}", fault.text);
    script.close();
}

/// Workers may join at any time.
pub(crate) fn a_late_joiner_gets_the_newest_version(subject: &Subject) {
    let (mut script, info) = {
        let mut script = Script::new(subject, 2);
        let info = script.prepare(TrainerSetup::words(64));
        script.gather(&info, &[0]);
        assert_eq!(script.take(0).word(), 1);
        (script, info)
    };
    script.deliver_word(2, &[0]);
    script.deliver_word(3, &[0]);
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.take(1).one(), (3, 3));
    script.deliver_word(4, &[0, 1]);
    script.close();
}

/// A worker without a trainer says so, in time.
pub(crate) fn connecting_to_nobody_ends_by_its_deadline(subject: &Subject) {
    let mut script = Script::new(subject, 1);
    let info = script.prepare(TrainerSetup::words(64));
    let begun = Instant::now();
    let fault = script
        .join(
            0,
            Join {
                deadline: BRIEF,
                ..Join::new(&info)
            },
        )
        .fault();
    assert_eq!(fault.kind, Kind::NoSender, "{}", fault.text);
    assert!(
        fault.retry && begun.elapsed() < prompt_limit(),
        "{:?}",
        begun.elapsed()
    );
    script.close();
}

/// Both ends learn at once what does not fit.
pub(crate) fn a_worker_of_another_model_is_refused_by_name(subject: &Subject) {
    let mut script = Script::new(subject, 1);
    let info = script.prepare(TrainerSetup::words(64));
    let connect = TrainerCommand::Connect {
        expect: vec![0],
        deadline: longest(),
    };
    script.dispatch(TRAINER, &Command::Trainer(connect));
    let insists = Join {
        insists: Some(Shape::Words(65)),
        ..Join::new(&info)
    };
    let begun = Instant::now();
    let worker = script.join(0, insists).fault();
    assert_eq!(worker.kind, Kind::WrongModel, "{}", worker.text);
    let trainer = script.answer(TRAINER).fault();
    assert_eq!(trainer.kind, Kind::Refused(vec![0]), "{}", trainer.text);
    for fault in [worker, trainer] {
        assert!(fault.text.contains("b.weight"), "{}", fault.text);
    }
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    script.close();
}

/// A worker that nobody waits for can be wrong for itself.
pub(crate) fn late_worker_of_another_model_delays_no_other(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    script.gather(&info, &[0]);
    script.take(0);
    let fault = script
        .join(
            1,
            Join {
                insists: Some(Shape::Floats),
                ..Join::new(&info)
            },
        )
        .fault();
    assert_eq!(fault.kind, Kind::WrongModel, "{}", fault.text);
    script.until_status(|workers| workers.len() == 1);
    script.deliver_word(2, &[0]);
    assert_eq!(
        script.join(
            1,
            Join {
                insists: Some(WORDS),
                ..Join::new(&info)
            }
        ),
        Answer::Done
    );
    assert_eq!(script.take(1).one(), (2, 2));
    script.close();
}

/// Workers hear of an end in order after everything that was sent; a second
/// shutdown is none.
pub(crate) fn shutdown_is_announced_and_happens_once(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 1);
    script.send(Payload::Word(2), SendSettings::wait(Wait::Sent));
    assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
    assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
    if subject.can.push {
        assert_eq!(
            script.deed(0, WorkerCommand::Receive(None)).seen().one(),
            (2, 2)
        );
    }
    let fault = script.deed(0, script.take_deed()).fault();
    assert_eq!(fault.kind, Kind::SenderClosed, "{}", fault.text);
    let held = script.deed(0, WorkerCommand::Reread(2)).held();
    assert_eq!(
        held[0].word(),
        if subject.can.push { 2 } else { 1 },
        "what it holds stays"
    );
    let fault = script
        .join(
            0,
            Join {
                deadline: BRIEF,
                ..Join::new(&info)
            },
        )
        .fault();
    // Where the run leaves its end to be read, a late worker is told so at once.
    let is_told = matches!(fault.kind, Kind::NoSender | Kind::SenderClosed);
    assert!(is_told, "{}", fault.text);
    script.close();
}

/// It was a worker and is none any more.
pub(crate) fn a_worker_that_leaves_is_no_failure(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 2);
    assert_eq!(script.deed(1, WorkerCommand::Leave), Answer::Done);
    script.until_status(|workers| workers.len() == 1);
    script.deliver_word(2, &[0]);
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.take(1).one(), (2, 2));
    // What went before was told once.
    script.deliver_word(9, &[0, 1]);

    if subject.can.push {
        // It leaves while it is waited for.
        script.tell_worker(0, WorkerCommand::Receive(None));
        script.dispatch(
            TRAINER,
            &Command::Trainer(TrainerCommand::Send(
                Payload::Word(3),
                SendSettings::default(),
            )),
        );
        assert_eq!(script.answer_of(0).seen().word(), 3);
        script.until_it_sleeps(TRAINER);
        assert_eq!(script.deed(1, WorkerCommand::Leave), Answer::Done);
        let sent = script.answer(TRAINER).sent();
        assert_eq!(
            sent.outcomes(),
            [(0, OutcomeKind::Applied), (1, OutcomeKind::Left)]
        );
        assert!(sent.all_applied, "{}", sent.text);
    }
    script.close();
}

/// It is a plain value, and can be used any number of times.
pub(crate) fn init_info_crosses_text_and_bytes(subject: &Subject) {
    let mut script = Script::new(subject, 3);
    let info = script.prepare(TrainerSetup::words(64));
    let text = serde_json::to_string(&info).expect("it has a JSON form");
    let bytes = postcard::to_stdvec(&info).expect("it has a postcard form");
    let from_text: InitInfo = serde_json::from_str(&text).expect("what was just written");
    let from_bytes: InitInfo = postcard::from_bytes(&bytes).expect("what was just written");
    assert_eq!([&from_text, &from_bytes], [&info, &info]);
    assert_eq!(
        (info.scheme(), info.models()[0].as_str()),
        (subject.scheme.as_str(), "policy")
    );
    script.gather_by(vec![
        (0, Join::new(&info)),
        (1, Join::new(&from_text)),
        (2, Join::new(&from_bytes)),
    ]);
    for worker in 0..3 {
        assert_eq!(script.take(worker).one(), (1, 1));
    }
    script.close();
}

/// It can be handed over before and after a sender was set up, and set up again
/// after both.
pub(crate) fn a_session_is_a_value_before_and_after_init(subject: &Subject) {
    let scheme: AnyScheme = subject.scheme.parse().expect("it was parsed before");
    let passed = |session: &Session| -> Session {
        let text = serde_json::to_string(session).expect("a session has a JSON form");
        let again: Session = serde_json::from_str(&text).expect("what was just written");
        let bytes = postcard::to_stdvec(session).expect("a session has a postcard form");
        let same: Session = postcard::from_bytes(&bytes).expect("what was just written");
        for read in [&again, &same] {
            assert_eq!(
                (read.scheme(), read.init_info()),
                (session.scheme(), session.init_info())
            );
        }
        again
    };
    let worker_of = |session: &Session, round: u64| {
        let mut worker = match round {
            // What it was made of says as much.
            1 => Session::of(session.init_info().expect("a sender was set up").clone()),
            _ => passed(session),
        };
        worker.init_on_receiver(0).expect("a sender was set up");
        worker
    };
    let mut trainer = passed(&Session::new(scheme));
    for round in 1..4 {
        trainer
            .init_on_sender("policy", &WORDS.make(0))
            .expect("a model");
        // A second time with the same name starts over.
        trainer
            .init_on_sender("policy", &WORDS.make(0))
            .expect("a model");
        let mut worker = worker_of(&trainer, round);
        let seen = thread::scope(|scope| {
            let end = scope.spawn(|| {
                worker
                    .connect_receiver(Some(longest()))
                    .expect("the trainer connects");
                let receiver = worker.receiver().expect("it is connected");
                let seen = match subject.pulls() {
                    true => {
                        receiver.pull(weightsync_engine::Pull::newest().timeout(Some(longest())))
                    }
                    false => receiver.recv_timeout(longest()),
                };
                let seen = seen.expect("the trainer lives").expect("the first version");
                crate::harness::shape::Model::of(&seen, true).expect("one version")
            });
            trainer
                .connect_sender(&WORDS.make(round), Expect::Count(1), Some(longest()))
                .expect("a worker comes");
            end.join().expect("it has not panicked")
        });
        worker.shutdown();
        worker.shutdown();
        assert_eq!((seen.version, seen.word()), (1, round));
        trainer.shutdown();
        trainer.shutdown();
    }
}

/// Nothing changes by it.
pub(crate) fn a_call_out_of_order_says_what_to_do(subject: &Subject) {
    let scheme: AnyScheme = subject.scheme.parse().expect("it was parsed before");
    let weights = WORDS.make(1);
    let options = SendOptions::new();
    let wrong = |call: &str, fix: &str, error: Error| {
        let text = error.to_string();
        assert!(matches!(error, Error::WrongOrder { .. }), "{call}: {text}");
        assert!(text.contains(call) && text.contains(fix), "{call}: {text}");
    };
    let unlinked = |session: &mut Session, fix: &str| {
        wrong(
            "send",
            fix,
            session.send(&weights, &options).expect_err("not connected"),
        );
        wrong(
            "receive",
            "",
            session.receiver().expect_err("not connected"),
        );
        wrong(
            "connect_receiver",
            "",
            session
                .connect_receiver(Some(longest()))
                .expect_err("no receiver"),
        );
    };
    let mut session = Session::new(scheme);
    unlinked(&mut session, "init_on_sender");
    wrong(
        "init_on_receiver",
        "init_on_sender",
        session.init_on_receiver(0).expect_err("no sender is known"),
    );
    let early = session.connect_sender(&weights, Expect::Count(0), Some(longest()));
    wrong(
        "connect_sender",
        "init_on_sender",
        early.expect_err("not prepared"),
    );

    session.init_on_sender("policy", &weights).expect("a model");
    unlinked(&mut session, "connect");
    session
        .connect_sender(&weights, Expect::Count(0), Some(longest()))
        .expect("nobody is expected");
    wrong(
        "init_on_sender",
        "",
        session
            .init_on_sender("policy", &weights)
            .expect_err("it is connected"),
    );
    wrong(
        "init_on_receiver",
        "",
        session.init_on_receiver(0).expect_err("it is a sender"),
    );
    wrong(
        "receive",
        "",
        session.receiver().expect_err("it is a sender"),
    );
    let again = session.connect_sender(&weights, Expect::Count(0), Some(longest()));
    wrong("connect_sender", "", again.expect_err("it is connected"));
    // It is none the worse for it.
    assert_eq!(
        session
            .send(&weights, &options)
            .expect("it is connected")
            .version()
            .expect("one model"),
        weightsync_engine::Version(2)
    );
    session.shutdown();
    wrong(
        "send",
        "again",
        session
            .send(&weights, &options)
            .expect_err("it is shut down"),
    );
}
