//! Nothing piles up. That nothing is left in the end is looked at after every
//! scenario.

use crate::Subject;
use crate::harness::command::{
    Answer, Command, Join, Payload, ResourceCensus, SendSettings, TrainerCommand, TrainerSetup,
    Wait, WorkerCommand,
};
use crate::harness::scale::{BRIEF, rounds};
use crate::harness::script::{Script, TRAINER};
use crate::harness::shape::Shape;

/// What a process has when it had twice the time to get more.
pub(crate) fn bounded(script: &mut Script<'_>, process: usize, before: ResourceCensus) {
    let mut now = before;
    // Threads that were joined take a moment to leave the list.
    for _ in 0..2_000 {
        script.dispatch(process, &Command::ResourceCensus);
        now = script.answer(process).resource_census();
        let more = now.descriptors > before.descriptors
            || now.threads > before.threads
            || now.shared_maps > before.shared_maps;
        if !more {
            return;
        }
    }
    panic!("process {process} had {before:?} and has {now:?}");
}

pub(crate) fn resource_census(script: &mut Script<'_>, process: usize) -> ResourceCensus {
    script.dispatch(process, &Command::ResourceCensus);
    script.answer(process).resource_census()
}

/// Connected, used in every way, and shut down, again and again in the same two
/// processes.
pub(crate) fn many_connections_leave_nothing(subject: &Subject) {
    let mut script = Script::new(subject, 1);
    let mut before = [
        resource_census(&mut script, TRAINER),
        resource_census(&mut script, 1),
    ];
    let count = rounds(1_000, 12);
    for round in 0..count {
        let lead = TrainerSetup {
            history: 2,
            slots: (2, 8),
            ..TrainerSetup::words(1 << 10)
        };
        let info = script.prepare(lead);
        script.gather(&info, &[0]);
        script.take(0);
        for word in 2..6 {
            script.deliver_word(word, &[0]);
        }
        if subject.can.subsets {
            script.deliver(Payload::Word(6), SendSettings::to(&[0]), &[0]);
        }
        if subject.can.hold {
            script.act(TrainerCommand::Hold(vec![0], true));
            script.send(Payload::Word(7), SendSettings::wait(Wait::Sent));
            script.act(TrainerCommand::Hold(vec![0], false));
            script.take(0);
        }
        script.deed(0, WorkerCommand::Keep(0));
        let sender_first = round % 2 == 0;
        if sender_first {
            assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
        }
        assert_eq!(script.deed(0, WorkerCommand::Leave), Answer::Done);
        assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
        if round == 0 {
            // What a process sets up once for good is there now.
            before = [
                resource_census(&mut script, TRAINER),
                resource_census(&mut script, 1),
            ];
        }
        bounded(&mut script, TRAINER, before[0]);
        bounded(&mut script, 1, before[1]);
    }
    println!("{count} rounds");
    script.close();
}

/// A sender that lives long sees many of them.
pub(crate) fn workers_that_come_and_go_leave_nothing(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(1 << 10), 2);
    let count = rounds(500, 10);
    let mut before = None;
    for round in 0..count {
        let killed = round % 2 == 0;
        match killed {
            true => script.kill(2),
            false => assert_eq!(script.deed(1, WorkerCommand::Leave), Answer::Done),
        }
        script.until_status(|workers| workers.len() == 1);
        if killed {
            script.raise(2);
        }
        assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
        script.take(1);
        script.deliver_word(2 + round, &[0, 1]);
        match before {
            // A second of each kind has been there.
            None if round >= 2 => before = Some(resource_census(&mut script, TRAINER)),
            None => {}
            Some(before) => bounded(&mut script, TRAINER, before),
        }
    }
    println!("{count} workers");
    script.close();
}

/// What did not come about leaves nothing either.
pub(crate) fn failed_connections_leave_nothing(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 2);
    assert_eq!(script.deed(1, WorkerCommand::Leave), Answer::Done);
    script.until_status(|workers| workers.len() == 1);
    let mut before = None;
    for _ in 0..rounds(300, 6) {
        let wrong = Join {
            insists: Some(Shape::Floats),
            ..Join::new(&info)
        };
        assert!(matches!(script.join(1, wrong), Answer::Fault(_)));
        // A sender that nobody joins, in the worker's process.
        let act = |script: &mut Script<'_>, act| {
            script.dispatch(2, &Command::Trainer(act));
            script.answer(2)
        };
        act(
            &mut script,
            TrainerCommand::Prepare(TrainerSetup::words(64)),
        );
        let connect = TrainerCommand::Connect {
            expect: vec![4],
            deadline: BRIEF,
        };
        assert!(matches!(act(&mut script, connect), Answer::Fault(_)));
        script.until_status(|workers| workers.len() == 1);
        let now = [
            resource_census(&mut script, TRAINER),
            resource_census(&mut script, 2),
        ];
        let [trainer, worker] = *before.get_or_insert(now);
        bounded(&mut script, TRAINER, trainer);
        bounded(&mut script, 2, worker);
    }
    script.close();
}
