//! Sends to some workers, and weights of their own for each.

use crate::Subject;
use crate::harness::command::{
    Answer, Join, Payload, SendSettings, TrainerCommand, TrainerSetup, WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::script::Script;
use weightsync_engine::OutcomeKind;

/// Neither the other workers nor the trainer's own weights are touched.
pub(crate) fn send_to_one_worker_changes_only_that_worker(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(1 << 10), 2);
    for word in 10..14 {
        let (sent, seen) = script.deliver(Payload::Other(word), SendSettings::to(&[0]), &[0]);
        assert_eq!(seen[0].word(), word);
        script.assert_applied(&sent, &[0]);
        assert_eq!(script.newest(1).one(), (1, 1));
        script.assert_nothing_new(1, 1);
        assert_eq!(
            script.act(TrainerCommand::Source).source(),
            [vec![Some(1); 3]]
        );
    }
    let held = script.deed(1, WorkerCommand::Reread(2)).held();
    assert!(held.iter().all(|seen| seen.word() == 1), "{held:?}");
    script.close();
}

/// One call, one report; workers that are given the same share a version.
pub(crate) fn each_worker_can_have_weights_of_its_own(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 3);
    let each = Payload::Each(vec![(0, 5), (1, 6), (2, 5)]);
    let (sent, seen) = script.deliver(each, SendSettings::default(), &[0, 1, 2]);
    script.assert_applied(&sent, &[0, 1, 2]);
    let words: Vec<_> = seen.iter().map(|seen| seen.one()).collect();
    assert_eq!([words[0], words[2]], [(2, 5); 2]);
    assert_eq!(words[1], (3, 6));
    let versions: Vec<_> = sent.versions.iter().map(|(_, version)| *version).collect();
    assert_eq!(versions, [2, 3], "one for each distinct source");
    if subject.can.push {
        assert_eq!(sent.line(1).versions.last(), Some(&3), "{}", sent.text);
    }
    script.close();
}

/// One version for each distinct device.
pub(crate) fn each_device_can_have_weights_of_its_own(subject: &Subject) {
    let mut script = Script::new(subject, 3);
    let info = script.prepare(TrainerSetup::words(64));
    let devices = ["cuda:0", "cpu", "cuda:0"];
    let joins = devices.iter().zip(0..).map(|(device, worker)| {
        (
            worker,
            Join {
                device: Some((*device).to_owned()),
                ..Join::new(&info)
            },
        )
    });
    script.gather_by(joins.collect());
    for worker in 0..3 {
        script.take(worker);
    }
    let known: Vec<_> = script
        .status()
        .into_iter()
        .map(|status| status.device)
        .collect();
    assert_eq!(known, devices);
    let by_device = Payload::Devices(vec![("cuda:0".into(), 7), ("cpu".into(), 8)]);
    let (sent, seen) = script.deliver(by_device, SendSettings::default(), &[0, 1, 2]);
    assert_eq!(
        seen.iter().map(|seen| seen.word()).collect::<Vec<_>>(),
        [7, 8, 7]
    );
    assert_eq!(sent.versions.len(), 2, "{}", sent.text);
    script.close();
}

/// What was for some is over when something is for all.
pub(crate) fn a_send_to_all_ends_what_was_sent_to_some(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 3);
    script.deliver(Payload::Word(5), SendSettings::to(&[1, 2]), &[1, 2]);
    script.deliver_word(6, &[0, 1, 2]);
    for worker in 0..3 {
        assert_eq!(script.newest(worker).one(), (3, 6));
    }
    script.deliver(Payload::Word(7), SendSettings::to(&[0]), &[0]);
    // A worker that joins again gets what was for all, or what was for it.
    for worker in [0, 2] {
        script.deed(worker, WorkerCommand::Leave);
        assert_eq!(script.join(worker, Join::new(&info)), Answer::Done);
    }
    assert_eq!(script.take(0).one(), (4, 7));
    assert_eq!(script.take(2).one(), (3, 6));
    script.close();
}

/// Its line says so, and it is not lost.
pub(crate) fn absent_worker_gets_its_own_weights_on_join(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    script.gather(&info, &[0]);
    script.take(0);
    let (sent, seen) = script.deliver(Payload::Word(4), SendSettings::to(&[0, 1]), &[0]);
    assert_eq!(seen[0].word(), 4);
    let there = if subject.pulls() {
        OutcomeKind::Asks
    } else {
        OutcomeKind::Applied
    };
    let outcomes = [(0, there), (1, OutcomeKind::Absent)];
    assert_eq!(sent.outcomes(), outcomes, "{}", sent.text);
    assert!(
        !sent.all_applied && sent.text.contains("worker 1 is not connected"),
        "{}",
        sent.text
    );
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    assert_eq!(script.take(1).one(), (2, 4));
    script.close();
}

/// The rest of a partial update is what its targets have, and is refused where
/// they have different things.
pub(crate) fn a_part_is_of_what_the_targets_have(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 2);
    script.deliver(Payload::Word(5), SendSettings::to(&[1]), &[1]);
    let part = Payload::Part(vec![("b.bias".into(), 9)]);
    let to_one = SendSettings {
        partial: true,
        ..SendSettings::to(&[1])
    };
    let (_, seen) = script.deliver(part.clone(), to_one, &[1]);
    assert_eq!(seen[0].members[0].words, [5, 5, 9]);
    assert_eq!(script.newest(0).word(), 1);
    let to_both = SendSettings {
        partial: true,
        ..SendSettings::to(&[0, 1])
    };
    let to_all = SendSettings {
        partial: true,
        ..SendSettings::default()
    };
    for how in [to_both, to_all.clone()] {
        let fault = script.act(TrainerCommand::Send(part.clone(), how)).fault();
        assert_ne!(fault.kind, Kind::WrongWeights, "{}", fault.text);
        assert!(fault.text.contains("policy, but v1, v3"), "{}", fault.text);
    }
    assert_eq!(script.newest(1).members[0].words, [5, 5, 9]);
    script.deliver_word(6, &[0, 1]);
    let (_, seen) = script.deliver(part, to_all, &[0, 1]);
    for seen in seen {
        assert_eq!(seen.members[0].words, [6, 6, 9]);
    }
    script.close();
}
