//! Either end comes back without the other, and without a step by hand.

use std::time::Duration;

use crate::Subject;
use crate::harness::command::{
    Answer, Command, Join, Payload, SendSettings, TrainerCommand, TrainerSetup, Wait, Want,
    WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::{BRIEF, Dice, longest, rounds, seed};
use crate::harness::script::{Script, TRAINER};
use crate::scenarios::death::moment;

/// A trainer with a run directory, and so many workers that hold its first
/// version.
pub(super) fn open(subject: &Subject, workers: u32) -> (Script<'_>, TrainerSetup) {
    let mut script = Script::new(subject, workers as usize);
    let lead = TrainerSetup {
        run_dir: Some(script.run_dir()),
        slots: (2, 8),
        ..TrainerSetup::words(64)
    };
    let info = script.prepare(lead.clone());
    script.gather(&info, &(0..workers).collect::<Vec<_>>());
    for worker in 0..workers {
        assert_eq!(script.take(worker).word(), 1);
    }
    (script, lead)
}

fn connect(expect: &[u32]) -> TrainerCommand {
    TrainerCommand::Connect {
        expect: expect.to_vec(),
        deadline: longest(),
    }
}

/// After a death and after an end in order. Its versions count again, in a run of
/// a higher epoch.
pub(crate) fn workers_find_the_next_sender_automatically(subject: &Subject) {
    let (mut script, lead) = open(subject, 2);
    let info = script.info();
    let mut epoch = script.newest(0).run.epoch;
    for life in 0..4 {
        script.deliver_word(2, &[0, 1]);
        let killed = life % 2 == 0;
        for worker in 0..2 {
            script.tell_worker(worker, WorkerCommand::Receive(None));
            script.until_it_sleeps(worker as usize + 1);
        }
        match killed {
            true => script.kill(TRAINER),
            false => assert_eq!(script.act(TrainerCommand::Close), Answer::Done),
        }
        for worker in 0..2 {
            let fault = script.answer_of(worker).fault();
            let is_told = matches!(fault.kind, Kind::SenderDied(_));
            assert!(
                is_told == killed && (killed || fault.kind == Kind::SenderClosed),
                "{}",
                fault.text
            );
            // Nobody is there yet; that is no error, and what it holds is whole.
            assert_eq!(
                script.deed(worker, WorkerCommand::Receive(Some(BRIEF))),
                Answer::Nothing
            );
            assert_eq!(
                script.deed(worker, WorkerCommand::Reread(2)).held()[0].one(),
                (2, 2)
            );
            script.tell_worker(worker, WorkerCommand::Receive(None));
        }
        if killed {
            script.raise(TRAINER);
        }
        assert_eq!(
            script.prepare(lead.clone()),
            info,
            "it is found at the same place"
        );
        assert_eq!(script.act(connect(&[0, 1])), Answer::Done);
        for worker in 0..2 {
            let seen = script.answer_of(worker).seen();
            assert_eq!(seen.one(), (1, 1));
            assert!(seen.run.epoch > epoch, "{:?} after {epoch}", seen.run);
            if worker == 1 {
                epoch = seen.run.epoch;
            }
        }
    }
    script.close();
}

/// Whether they were still joining the one that died, or had joined it.
pub(crate) fn a_trainer_killed_while_it_connects_is_replaced(subject: &Subject) {
    let (seed, count) = (seed(), rounds(500, 10));
    println!("{count} deaths, seed {seed}");
    let mut dice = Dice::new(seed);
    let mut script = Script::new(subject, 2);
    let lead = TrainerSetup {
        run_dir: Some(script.run_dir()),
        ..TrainerSetup::words(64)
    };
    for _ in 0..count {
        let info = script.prepare(lead.clone());
        for worker in 0..2 {
            script.tell_worker(worker, WorkerCommand::Join(Box::new(Join::new(&info))));
        }
        script.dispatch(TRAINER, &Command::Trainer(connect(&[0, 1])));
        script.kill_at(TRAINER, moment(&mut dice, Duration::from_millis(3)));
        script.raise(TRAINER);
        assert_eq!(script.prepare(lead.clone()), info);
        assert_eq!(
            script.act(TrainerCommand::ConnectWith(Payload::Word(7))),
            Answer::Done
        );
        for worker in 0..2 {
            // A worker without a version of the dead sender waits for one of the next.
            assert_eq!(script.answer_of(worker), Answer::Done);
            let look = script.take_deed();
            let seen = loop {
                match script.deed(worker, look.clone()) {
                    Answer::Seen(seen) if seen.one() == (1, 1) => {} // of the dead one
                    Answer::Seen(seen) => break seen,
                    answer => assert!(matches!(answer.fault().kind, Kind::SenderDied(_))),
                }
            };
            assert_eq!(seen.one(), (1, 7));
        }
        script.until_status(|workers| workers.len() == 2);
        script.deliver_word(8, &[0, 1]);
        for worker in 0..2 {
            script.deed(worker, WorkerCommand::Keep(0));
            assert_eq!(script.deed(worker, WorkerCommand::Leave), Answer::Done);
        }
        assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
    }
    script.close();
}

/// A question finds it as a receive does, and so does a look at the newest.
pub(crate) fn a_worker_that_asks_finds_the_next_sender(subject: &Subject) {
    let (mut script, lead) = open(subject, 1);
    let mut epoch = script.newest(0).run.epoch;
    let pull = |timeout| WorkerCommand::Pull(Want::Newest, timeout);
    for killed in [true, false] {
        match killed {
            true => script.kill(TRAINER),
            false => assert_eq!(script.act(TrainerCommand::Close), Answer::Done),
        }
        let fault = script.deed(0, pull(None)).fault();
        let is_told = match killed {
            true => matches!(fault.kind, Kind::SenderDied(_)),
            false => fault.kind == Kind::SenderClosed,
        };
        assert!(is_told, "{}", fault.text);
        assert_eq!(script.deed(0, pull(Some(BRIEF))), Answer::Nothing);
        script.tell_worker(0, pull(None));
        if killed {
            script.raise(TRAINER);
        }
        script.prepare(lead.clone());
        assert_eq!(script.act(connect(&[0])), Answer::Done);
        let seen = script.answer_of(0).seen();
        assert_eq!(seen.one(), (1, 1));
        assert!(seen.run.epoch > epoch, "{:?} after {epoch}", seen.run);
        epoch = seen.run.epoch;
        script.send(Payload::Word(2), SendSettings::wait(Wait::Sent));
        assert_eq!(script.deed(0, pull(None)).seen().one(), (2, 2));
    }
    script.close();
}

/// Until it is there, the newest is what its predecessor sent.
pub(crate) fn a_look_at_the_newest_finds_the_next_sender(subject: &Subject) {
    let (mut script, lead) = open(subject, 1);
    let epoch = script.newest(0).run.epoch;
    script.deliver_word(2, &[0]);
    assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
    let fault = script.deed(0, WorkerCommand::Receive(None)).fault();
    assert_eq!(fault.kind, Kind::SenderClosed, "{}", fault.text);
    let before = script.newest(0);
    assert_eq!((before.one(), before.run.epoch), ((2, 2), epoch));
    script.prepare(lead);
    assert_eq!(script.act(connect(&[])), Answer::Done);
    let after = script.until_newest(0, 1);
    assert_eq!(after.one(), (1, 1));
    assert!(after.run.epoch > epoch, "{:?} after {epoch}", after.run);
    script.until_status(|workers| workers.len() == 1 && workers[0].versions == [1]);
    script.deliver_word(2, &[0]);
    script.close();
}

/// A second one is told so, and nobody notices it.
pub(crate) fn a_living_sender_keeps_its_place(subject: &Subject) {
    // The second process is a trainer too.
    let mut script = Script::new(subject, 2);
    let lead = TrainerSetup {
        run_dir: Some(script.run_dir()),
        ..TrainerSetup::words(64)
    };
    let info = script.prepare(lead.clone());
    script.gather(&info, &[0]);
    script.take(0);
    let second = |script: &mut Script<'_>, act| {
        script.dispatch(2, &Command::Trainer(act));
        script.answer(2)
    };
    assert_eq!(
        second(&mut script, TrainerCommand::Prepare(lead.clone())).info(),
        info
    );
    let fault = second(&mut script, connect(&[])).fault();
    assert_ne!(fault.kind, Kind::Unsupported, "{}", fault.text);
    script.deliver_word(2, &[0]);

    // Once it is gone the place is free.
    assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
    let fault = script.deed(0, script.take_deed()).fault();
    assert_eq!(fault.kind, Kind::SenderClosed, "{}", fault.text);
    assert_eq!(second(&mut script, connect(&[])), Answer::Done);
    if subject.can.push {
        assert_eq!(
            script.deed(0, WorkerCommand::Receive(None)).seen().one(),
            (1, 1)
        );
    }
    script.close();
}

/// A worker that has seen a run refuses earlier runs, whatever they offer, and
/// another one of the same epoch.
pub(crate) fn a_worker_does_not_go_back_to_an_earlier_epoch(subject: &Subject) {
    let (mut script, lead) = open(subject, 1);
    // The second life is the one that is seen.
    let over = |script: &mut Script<'_>| {
        let fault = script.deed(0, script.take_deed()).fault();
        assert!(
            matches!(fault.kind, Kind::SenderDied(_) | Kind::SenderClosed),
            "{}",
            fault.text
        );
    };
    assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
    over(&mut script);
    script.prepare(lead.clone());
    assert_eq!(script.act(connect(&[])), Answer::Done);
    let epoch = script.take(0).run.epoch;
    script.kill(TRAINER);
    over(&mut script);
    // Somebody puts the counter back: the next sender has an epoch that is gone.
    let counter = script.run_dir().join("epoch");
    std::fs::write(counter, format!("{}\n", epoch.0 - 2)).expect("the run directory is ours");
    script.raise(TRAINER);
    script.prepare(lead.clone());
    assert_eq!(script.act(connect(&[])), Answer::Done);
    script.send(Payload::Word(66), SendSettings::wait(Wait::Sent));
    let look = match subject.pulls() {
        true => WorkerCommand::Pull(Want::Newest, Some(BRIEF)),
        false => WorkerCommand::Receive(Some(BRIEF)),
    };
    let look_again = look.clone();
    match script.deed(0, look) {
        Answer::Nothing => {}
        Answer::Fault(fault) => assert!(fault.retry, "{}", fault.text),
        other => panic!("of an epoch that was seen before: {other:?}"),
    }
    assert_eq!(
        script.deed(0, WorkerCommand::Reread(2)).held()[0].one(),
        (1, 1)
    );
    // The one after that is higher, and is believed.
    assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
    // Epochs only grow where nobody meddles: it takes as many lives to get there.
    let seen = loop {
        script.prepare(lead.clone());
        assert_eq!(script.act(connect(&[])), Answer::Done);
        match script.deed(0, look_again.clone()) {
            Answer::Seen(seen) => break seen,
            _ => assert_eq!(script.act(TrainerCommand::Close), Answer::Done),
        }
    };
    assert_eq!(seen.one(), (1, 1));
    assert!(seen.run.epoch > epoch, "{seen:?}");
    script.close();
}

/// It is a worker like any other, under the number it had.
pub(crate) fn a_worker_that_comes_back_has_the_newest(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 2);
    for round in 0..3 {
        let word = 2 + 2 * round;
        script.deliver_word(word, &[0, 1]);
        script.kill(1);
        script.send(Payload::Word(word + 1), SendSettings::wait(Wait::Sent));
        script.raise(1);
        assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
        let take = script.take_deed();
        // The one that joins may be given first what is nearer.
        for (worker, had) in [(0, word - 1), (1, word)] {
            script.take_until(worker, &take, had, word + 1);
        }
        let workers = script.status();
        assert_eq!(workers.len(), 2, "{workers:?}");
    }
    // One that goes and comes back between two sends has a line for its end at
    // most, and that is no failure of the send.
    script.kill(1);
    script.raise(1);
    assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
    script.take(0);
    let (sent, _) = script.deliver(Payload::Word(9), SendSettings::default(), &[0, 1]);
    assert!(sent.all_applied || subject.pulls(), "{}", sent.text);
    script.close();
}

/// A machine that was switched off and on.
pub(crate) fn both_ends_can_start_again_in_either_order(subject: &Subject) {
    for worker_first in [true, false] {
        let (mut script, lead) = open(subject, 1);
        let info = script.info();
        let epoch = script.newest(0).run.epoch;
        script.kill(TRAINER);
        script.kill(1);
        script.raise(1);
        script.raise(TRAINER);
        let join = WorkerCommand::Join(Box::new(Join::new(&info)));
        if worker_first {
            script.tell_worker(0, join.clone());
            script.until_it_sleeps(1);
        }
        assert_eq!(script.prepare(lead), info);
        script.dispatch(TRAINER, &Command::Trainer(connect(&[0])));
        if !worker_first {
            script.tell_worker(0, join);
        }
        assert_eq!(script.answer_of(0), Answer::Done);
        assert_eq!(script.answer(TRAINER), Answer::Done);
        let seen = script.take(0);
        assert_eq!(seen.one(), (1, 1));
        assert!(seen.run.epoch > epoch, "{seen:?}");
        script.deliver_word(2, &[0]);
        script.close();
    }
}
