//! Holding workers at a version, and going back to one.

use crate::Subject;
use crate::harness::command::{
    Answer, Join, Payload, SendSettings, TrainerCommand, TrainerSetup, WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::BRIEF;
use crate::harness::script::Script;
use weightsync_engine::OutcomeKind;

/// Sends pass it over and say so, and it goes to the newest when it is released.
pub(crate) fn a_held_worker_stays_and_is_released_to_the_newest(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    script.deliver_word(2, &[0, 1]);
    assert_eq!(
        script.act(TrainerCommand::Hold(vec![0], true)),
        Answer::Done
    );
    assert_eq!(
        script
            .status()
            .iter()
            .map(|status| status.held)
            .collect::<Vec<_>>(),
        [true, false]
    );
    for word in 3..6 {
        let (sent, seen) = script.deliver(Payload::Word(word), SendSettings::default(), &[1]);
        assert_eq!(seen[0].word(), word);
        assert_eq!(
            sent.outcomes(),
            [(0, OutcomeKind::Held), (1, OutcomeKind::Applied)]
        );
        assert!(
            sent.all_applied && sent.text.contains("is held at v2"),
            "{}",
            sent.text
        );
    }
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(Some(BRIEF))),
        Answer::Nothing
    );
    assert_eq!(script.newest(0).one(), (2, 2));

    // Twice is once.
    script.act(TrainerCommand::Hold(vec![0], true));
    script.tell_worker(0, WorkerCommand::Receive(None));
    script.until_it_sleeps(1);
    assert!(!script.has_said(1));
    assert_eq!(
        script.act(TrainerCommand::Hold(vec![0], false)),
        Answer::Done
    );
    assert_eq!(script.answer_of(0).seen().one(), (5, 5));
    script.deliver_word(6, &[0, 1]);
    // Releasing a worker that is not held, or not there, does nothing.
    assert_eq!(
        script.act(TrainerCommand::Hold(vec![0, 77], false)),
        Answer::Done
    );
    script.deliver_word(7, &[0, 1]);
    script.close();
}

/// A partial update goes on from what all have, and a held worker has it when it
/// is released.
pub(crate) fn a_part_passes_a_held_worker_over(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    script.act(TrainerCommand::Hold(vec![0], true));
    script.deliver(Payload::Word(5), SendSettings::default(), &[1]);
    let partial = SendSettings {
        partial: true,
        ..SendSettings::default()
    };
    let part = Payload::Part(vec![("b.bias".into(), 9)]);
    let (sent, seen) = script.deliver(part, partial, &[1]);
    assert_eq!(sent.line(0).outcome, OutcomeKind::Held, "{}", sent.text);
    assert_eq!(seen[0].members[0].words, [5, 5, 9]);
    assert_eq!(script.newest(0).word(), 1);
    script.act(TrainerCommand::Hold(vec![0], false));
    let seen = script.deed(0, WorkerCommand::Receive(None)).seen();
    assert_eq!(seen.members[0].words, [5, 5, 9]);
    script.close();
}

/// It is the number that is held.
pub(crate) fn a_held_worker_that_comes_back_is_still_held(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 2);
    script.deliver_word(2, &[0, 1]);
    script.act(TrainerCommand::Hold(vec![0], true));
    script.deliver(Payload::Word(3), SendSettings::to(&[1]), &[1]);
    let (sent, _) = script.deliver(Payload::Word(4), SendSettings::default(), &[1]);
    assert_eq!(sent.line(0).outcome, OutcomeKind::Held, "{}", sent.text);
    script.kill(1);
    script.raise(1);
    assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
    assert_eq!(script.take(0).one(), (2, 2), "what it had");
    assert!(script.status()[0].held);
    script.act(TrainerCommand::Hold(vec![0], false));
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(None)).seen().one(),
        (4, 4)
    );
    script.close();
}

/// Going back is going on: with a higher number and the same bytes.
pub(crate) fn rollback_is_a_new_version_with_the_old_digest(subject: &Subject) {
    let lead = TrainerSetup {
        history: 4,
        slots: (2, 8),
        ..TrainerSetup::words(1 << 10)
    };
    let (mut script, _) = Script::open(subject, lead, 2);
    let digest = |script: &mut Script<'_>| {
        script
            .deed(0, WorkerCommand::Digests)
            .digests()
            .last()
            .expect("it holds one")
            .0
            .clone()
    };
    let mut digests = vec![digest(&mut script)];
    for word in 2..5 {
        script.deliver_word(word, &[0, 1]);
        digests.push(digest(&mut script));
    }
    let old = TrainerCommand::Look {
        model: None,
        version: Some(2),
    };
    match script.act(old) {
        Answer::Fault(fault) if fault.kind == Kind::Unsupported => {
            println!("not offered: {}::hold::history", subject.scheme);
            return script.close();
        }
        answer => assert_eq!(answer.seen().one(), (2, 2)),
    }
    for (back, now) in [(2, 5), (1, 6), (3, 7)] {
        let (sent, seen) = script.deliver(Payload::Old(back), SendSettings::default(), &[0, 1]);
        assert_eq!(sent.version(), now);
        assert!(
            seen.iter().all(|seen| seen.one() == (now, back)),
            "{seen:?}"
        );
        assert_eq!(digest(&mut script), digests[back as usize - 1]);
    }
    let fault = script
        .act(TrainerCommand::Look {
            model: None,
            version: Some(99),
        })
        .fault();
    assert_eq!(fault.kind, Kind::NoSuchVersion, "{}", fault.text);
    script.deliver_word(8, &[0, 1]);
    script.close();
}
