//! Sends that return before their workers have them.

use std::time::Duration;
use weightsync_engine::OutcomeKind;

use crate::Subject;
use crate::harness::command::{
    Answer, Command, LoadFault, Payload, SendSettings, TrainerCommand, TrainerSetup, WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::BRIEF;
use crate::harness::script::{Script, TRAINER};
use crate::harness::shape::Shape;
use crate::scenarios::send::loading;

/// The trainer may change its tensors while the workers still wait.
pub(crate) fn a_send_returns_once_its_source_was_read(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(1 << 12), 2);
    let begun = script
        .act(TrainerCommand::SendAsync(
            Payload::Word(2),
            SendSettings::default(),
        ))
        .began();
    assert_eq!(begun, [("policy".to_owned(), 2)]);
    script.act(TrainerCommand::Change(99));
    let early = script
        .act(TrainerCommand::Await(0, Some(Duration::ZERO)))
        .sent();
    assert_eq!(
        early.outcomes(),
        [(0, OutcomeKind::Late), (1, OutcomeKind::Late)]
    );
    for worker in 0..2 {
        assert_eq!(
            script
                .deed(worker, WorkerCommand::Receive(None))
                .seen()
                .one(),
            (2, 2)
        );
    }
    for _ in 0..2 {
        let sent = script.act(TrainerCommand::Await(0, None)).sent();
        script.assert_applied(&sent, &[0, 1]);
        assert_eq!(
            (sent.version(), sent.all_applied),
            (2, true),
            "{}",
            sent.text
        );
    }
    script.close();
}

/// Unless the trainer was set up to have several on their way.
pub(crate) fn a_second_send_is_refused_while_one_is_pending(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    script
        .act(TrainerCommand::SendAsync(
            Payload::Word(2),
            SendSettings::default(),
        ))
        .began();
    let fault = script
        .act(TrainerCommand::SendAsync(
            Payload::Word(3),
            SendSettings::default(),
        ))
        .fault();
    assert_eq!(fault.kind, Kind::SendPending, "{}", fault.text);
    assert!(fault.retry && fault.text.contains("v2"), "{}", fault.text);
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(None)).seen().one(),
        (2, 2)
    );
    script.act(TrainerCommand::Await(0, None));
    let begun = script
        .act(TrainerCommand::SendAsync(
            Payload::Word(3),
            SendSettings::default(),
        ))
        .began();
    assert_eq!(begun[0].1, 3, "the one that was refused has no number");
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(None)).seen().one(),
        (3, 3)
    );
    script.close();
}

/// One more waits for the oldest, and no longer than its deadline.
pub(crate) fn pending_sends_queue_up_to_their_bound(subject: &Subject) {
    let lead = TrainerSetup {
        pending: 2,
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 1);
    script
        .act(TrainerCommand::SendAsync(
            Payload::Word(2),
            SendSettings::default(),
        ))
        .began();
    script
        .act(TrainerCommand::SendAsync(
            Payload::Word(3),
            SendSettings::default(),
        ))
        .began();
    let fault = script
        .act(TrainerCommand::SendAsync(
            Payload::Word(4),
            SendSettings::within(BRIEF),
        ))
        .fault();
    assert_eq!(fault.kind, Kind::SendPending, "{}", fault.text);

    script.dispatch(
        TRAINER,
        &Command::Trainer(TrainerCommand::SendAsync(
            Payload::Word(4),
            SendSettings::default(),
        )),
    );
    script.until_it_sleeps(TRAINER);
    assert!(!script.has_said(TRAINER), "two are on their way");
    let mut words = Vec::new();
    while words.last() != Some(&4) {
        words.push(script.deed(0, WorkerCommand::Receive(None)).seen().word());
    }
    match subject.can.every_version {
        true => assert_eq!(words, [2, 3, 4]),
        false => assert!(words.is_sorted(), "{words:?}"),
    }
    assert_eq!(script.answer(TRAINER).began()[0].1, 4);
    for (place, version) in [(0, 2), (1, 3), (2, 4)] {
        let sent = script.act(TrainerCommand::Await(place, None)).sent();
        assert_eq!(
            (sent.version(), sent.outcomes()),
            (version, vec![(0, OutcomeKind::Applied)]),
            "{}",
            sent.text
        );
    }
    script.close();
}

/// Neither a look, nor a short wait, nor the next send: where every version is to
/// arrive, the one that waits for room arrives.
pub(crate) fn pending_send_ends_only_at_its_own_deadline(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    let mut word = 1;
    loop {
        word += 1;
        assert!(word < 80, "a queue without a bound");
        let sent = script.send(Payload::Word(word), SendSettings::within(BRIEF));
        match sent.line(0).outcome {
            OutcomeKind::Late => {}
            OutcomeKind::Full => break,
            _ => panic!("{}", sent.text),
        }
    }
    // It ends by its own deadline, however long it is waited for.
    script
        .act(TrainerCommand::SendAsync(
            Payload::Word(98),
            SendSettings::within(BRIEF),
        ))
        .began();
    for timeout in [None, Some(Duration::ZERO)] {
        let sent = script.act(TrainerCommand::Await(0, timeout)).sent();
        assert_eq!(sent.outcomes(), [(0, OutcomeKind::Full)], "{}", sent.text);
    }
    script
        .act(TrainerCommand::SendAsync(
            Payload::Word(99),
            SendSettings::default(),
        ))
        .began();
    for _ in 0..3 {
        let fault = script
            .act(TrainerCommand::SendAsync(
                Payload::Word(100),
                SendSettings::default(),
            ))
            .fault();
        assert_eq!(fault.kind, Kind::SendPending, "{}", fault.text);
        let sent = script
            .act(TrainerCommand::Await(1, Some(Duration::ZERO)))
            .sent();
        assert_eq!(sent.outcomes(), [(0, OutcomeKind::Late)], "{}", sent.text);
    }
    for expected in (2..word).chain([99]) {
        assert_eq!(
            script.deed(0, WorkerCommand::Receive(None)).seen().word(),
            expected
        );
        script.deed(0, WorkerCommand::Keep(0));
    }
    let sent = script.act(TrainerCommand::Await(1, None)).sent();
    assert_eq!(
        sent.outcomes(),
        [(0, OutcomeKind::Applied)],
        "{}",
        sent.text
    );
    script.close();
}

/// A late one of an older version satisfies nobody who waits for a newer one.
pub(crate) fn an_acknowledgement_is_of_its_version(subject: &Subject) {
    let (mut script, _) = loading(subject, &[("policy", Shape::Words(64))], 1);
    script.tell_worker(
        0,
        WorkerCommand::Load {
            timeout: None,
            load_fault: Some(LoadFault::Pause),
        },
    );
    let second = script.send(Payload::Word(2), SendSettings::within(BRIEF));
    assert_ne!(
        second.line(0).outcome,
        OutcomeKind::Applied,
        "{}",
        second.text
    );
    assert_eq!(script.answer_of(0), Answer::Loading);
    script
        .act(TrainerCommand::SendAsync(
            Payload::Word(3),
            SendSettings::default(),
        ))
        .began();
    // Only now is the second version loaded.
    script.dispatch(1, &Command::GoOn);
    assert_eq!(script.answer_of(0).loaded().runs, [2]);
    script.until_status(|workers| workers[0].versions == [2]);
    let third = script.act(TrainerCommand::Await(0, Some(BRIEF))).sent();
    assert_eq!(
        (third.version(), third.outcomes()),
        (3, vec![(0, OutcomeKind::Late)]),
        "{}",
        third.text
    );
    assert_eq!(third.line(0).versions, [2]);
    let loaded = script
        .deed(
            0,
            WorkerCommand::Load {
                timeout: None,
                load_fault: None,
            },
        )
        .loaded();
    assert_eq!((loaded.word(), loaded.runs), (Some(3), vec![3]));
    let third = script.act(TrainerCommand::Await(0, None)).sent();
    assert_eq!(
        third.outcomes(),
        [(0, OutcomeKind::Applied)],
        "{}",
        third.text
    );
    script.close();
}
