//! Workers that receive by a thread, and workers that pass on what they receive.

use std::time::Instant;
use weightsync_engine::OutcomeKind;

use crate::Subject;
use crate::harness::command::{
    Answer, Command, FollowerState, Join, Payload, ResourceCensus, SafePoints, SendSettings,
    TrainerCommand, TrainerSetup, Wait, WorkerCommand,
};
use crate::harness::scale::{BRIEF, longest, prompt_limit, rounds};
use crate::harness::script::{Script, TRAINER};
use crate::scenarios::leaks::{bounded, resource_census};

/// The wait that it meets, or else the next one; several add up to one.
pub(crate) fn an_interrupt_ends_a_wait_and_loses_nothing(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
    let begun = Instant::now();
    assert_eq!(script.deed(0, WorkerCommand::Interrupt(3)), Answer::Done);
    assert_eq!(
        script.deed(0, WorkerCommand::Receive(None)),
        Answer::Nothing
    );
    for _ in 0..3 {
        assert_eq!(
            script.deed(0, WorkerCommand::ReceiveInterrupted),
            Answer::Nothing
        );
    }
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());

    // Nothing is left of them.
    let begun = Instant::now();
    let look = WorkerCommand::Receive(Some(BRIEF));
    assert_eq!(script.deed(0, look.clone()), Answer::Nothing);
    assert!(begun.elapsed() >= BRIEF, "{:?}", begun.elapsed());

    assert_eq!(script.deed(0, WorkerCommand::Interrupt(1)), Answer::Done);
    script.send(Payload::Word(2), SendSettings::wait(Wait::Sent));
    let seen = loop {
        match script.deed(0, WorkerCommand::Receive(Some(longest()))) {
            Answer::Nothing => assert!(begun.elapsed() < prompt_limit(), "it is lost"),
            answer => break answer.seen(),
        }
    };
    assert_eq!(seen.one(), (2, 2));
    // The one that was kept may have met no wait yet.
    assert_eq!(script.deed(0, look), Answer::Nothing);
    script.deliver_word(3, &[0]);
    script.close();
}

/// A worker that never asks has what was sent, whole versions at a time.
pub(crate) fn a_thread_follows_what_is_sent(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 8),
        ..TrainerSetup::words(1 << 10)
    };
    let (mut script, _) = Script::open(subject, lead, 2);
    follow(&mut script, 0, SafePoints::Implied);
    assert_eq!(following(&mut script, 0), (1, 1));
    for word in 2..6 {
        script.tell_worker(1, WorkerCommand::Receive(None));
        let sent = script.send(Payload::Word(word), SendSettings::default());
        script.assert_applied(&sent, &[0, 1]);
        assert_eq!(script.answer_of(1).seen().word(), word);
        assert_eq!(following(&mut script, 0), (word, word));
    }

    // Its loop reads while the sender never pauses.
    let count = rounds(10_000, 100);
    let last = 5 + count;
    script.tell_worker(0, WorkerCommand::FollowUntil(last));
    let pulls = false;
    script.tell_worker(1, WorkerCommand::ReadUntil { word: last, pulls });
    script.send_fast(6, count);
    let checks = script.answer_of(0).count();
    script.answer_of(1).count();
    println!("{count} versions, {checks} checks");

    // It receives in its own calls again.
    assert_eq!(script.deed(0, WorkerCommand::Unfollow), Answer::Done);
    script.deliver_word(last + 1, &[0, 1]);
    script.close();
}

/// Until then a version is staged, and the sender knows that it is no more.
pub(crate) fn a_declared_safe_point_is_the_only_moment_of_change(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 8),
        ..TrainerSetup::words(64)
    };
    let (mut script, _) = Script::open(subject, lead, 1);
    follow(&mut script, 0, SafePoints::Declared);
    assert_eq!(script.deed(0, WorkerCommand::SafePoint), Answer::Nothing);
    for word in 2..5 {
        let staged = WorkerCommand::FollowTo {
            version: word,
            staged: true,
        };
        script.dispatch(
            TRAINER,
            &Command::Trainer(TrainerCommand::Send(
                Payload::Word(word),
                SendSettings::default(),
            )),
        );
        assert_eq!(script.deed(0, staged), Answer::Done);
        assert_eq!(following(&mut script, 0), (word - 1, word - 1));
        script.until_it_sleeps(TRAINER);
        assert!(!script.has_said(TRAINER), "it is not applied");
        let followed = script.deed(0, WorkerCommand::SafePoint).followed();
        assert_eq!(followed.one(), (word, word));
        let sent = script.answer(TRAINER).sent();
        script.assert_applied(&sent, &[0]);
        assert_eq!(script.deed(0, WorkerCommand::SafePoint), Answer::Nothing);
    }

    // What was taken and not applied is there when the thread has ended.
    let sent = script.send(Payload::Word(5), SendSettings::wait(Wait::Staged));
    assert_eq!(sent.outcomes(), [(0, OutcomeKind::Staged)], "{}", sent.text);
    assert_eq!(following(&mut script, 0), (4, 4));
    assert_eq!(script.deed(0, WorkerCommand::Unfollow), Answer::Done);
    assert_eq!(script.take(0).one(), (5, 5));
    script.deliver_word(6, &[0]);
    script.close();
}

/// By its worker, in the middle of a wait without end: with what it had given
/// back, or by leaving.
pub(crate) fn waiting_thread_ends_at_once_and_leaves_nothing(subject: &Subject) {
    let (mut script, info) = Script::open(subject, TrainerSetup::words(64), 1);
    let count = rounds(500, 10);
    let mut before: Option<[ResourceCensus; 2]> = None;
    let begun = Instant::now();
    for round in 0..count {
        follow(&mut script, 0, SafePoints::Implied);
        let sent = script.send(Payload::Word(2 + round), SendSettings::default());
        script.assert_applied(&sent, &[0]);
        let end = Instant::now();
        match round % 2 {
            0 => assert_eq!(script.deed(0, WorkerCommand::Unfollow), Answer::Done),
            _ => {
                assert_eq!(script.deed(0, WorkerCommand::Leave), Answer::Done);
                script.until_status(<[_]>::is_empty);
                assert_eq!(script.join(0, Join::new(&info)), Answer::Done);
                assert_eq!(script.take(0).word(), 2 + round);
            }
        }
        script.until_status(|workers| workers.len() == 1);
        assert!(end.elapsed() < prompt_limit(), "{:?}", end.elapsed());
        match before {
            None if round == 1 => {
                before = Some([
                    resource_census(&mut script, TRAINER),
                    resource_census(&mut script, 1),
                ]);
            }
            None => {}
            Some([trainer, worker]) => {
                bounded(&mut script, TRAINER, trainer);
                bounded(&mut script, 1, worker);
            }
        }
    }
    println!("{count} threads in {:?}", begun.elapsed());
    script.close();
}

/// By its death, or in order; the models serve on.
pub(crate) fn a_thread_knows_of_the_end_of_its_sender(subject: &Subject) {
    for killed in [true, false] {
        let (mut script, _) = Script::open(subject, TrainerSetup::words(64), 1);
        follow(&mut script, 0, SafePoints::Implied);
        let sent = script.send(Payload::Word(2), SendSettings::default());
        script.assert_applied(&sent, &[0]);
        script.tell_worker(0, WorkerCommand::FollowToTheEnd);
        let begun = Instant::now();
        let state = match killed {
            true => {
                script.kill(TRAINER);
                FollowerState::SenderDied
            }
            false => {
                assert_eq!(script.act(TrainerCommand::Close), Answer::Done);
                FollowerState::SenderClosed
            }
        };
        let followed = script.answer_of(0).followed();
        assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
        assert_eq!((followed.state, followed.one()), (state, (2, 2)));
        assert_eq!(script.deed(0, WorkerCommand::Unfollow), Answer::Done);
        script.close();
    }
}

/// Also where a sender may have a successor: a worker that only waits would else live on
/// for ever. If one comes all the same, it is followed.
pub(crate) fn background_thread_sees_shutdown_and_finds_the_next(subject: &Subject) {
    let (mut script, lead) = crate::scenarios::restart::open(subject, 2);
    for worker in 0..2 {
        follow(&mut script, worker, SafePoints::Implied);
    }
    for life in 0..3 {
        let killed = life == 1;
        match killed {
            true => script.kill(TRAINER),
            false => assert_eq!(script.act(TrainerCommand::Close), Answer::Done),
        }
        for worker in 0..2 {
            let followed = script
                .deed(worker, WorkerCommand::FollowToTheEnd)
                .followed();
            let expected = match killed {
                true => FollowerState::Searches,
                false => FollowerState::SenderClosed,
            };
            assert_eq!(followed.state, expected, "{followed:?}");
        }
        if killed {
            script.raise(TRAINER);
        }
        script.prepare(lead.clone());
        let connect = TrainerCommand::Connect {
            expect: vec![0, 1],
            deadline: longest(),
        };
        assert_eq!(script.act(connect), Answer::Done);
        let sent = script.send(Payload::Word(5 + life), SendSettings::default());
        script.assert_applied(&sent, &[0, 1]);
        for worker in 0..2 {
            assert_eq!(following(&mut script, worker), (2, 5 + life));
        }
    }
    script.close();
}

/// Two workers that pass on, one below the other, and two below both. The
/// trainer's number is everybody's, and it waits for the last of them.
pub(crate) fn a_cascade_of_two_levels_passes_on_and_acknowledges(subject: &Subject) {
    let mut script = family(subject);
    for word in 2..5 {
        send_down(&mut script, word);
        script.tell_worker(2, WorkerCommand::Receive(None));
        assert_eq!(script.answer_of(2).seen().one(), (word, word));
        for process in [TRAINER, 1, 2] {
            script.until_it_sleeps(process);
            assert!(!script.has_said(process), "worker 3 has not taken it");
        }
        script.tell_worker(3, WorkerCommand::Receive(None));
        assert_eq!(script.answer_of(3).seen().one(), (word, word));
        let lowest = script.answer_of(1).sent();
        assert_eq!(lowest.version(), word);
        script.assert_applied(&lowest, &[2, 3]);
        let passed = script.answer_of(0).sent();
        assert_eq!(passed.version(), word);
        script.assert_applied(&passed, &[1]);
        let sent = script.answer(TRAINER).sent();
        script.assert_applied(&sent, &[0]);
    }
    script.close();
}

/// In the reports of all above it, by name; the others have it, and what comes
/// next is passed on like any other.
pub(crate) fn a_cascade_tells_of_a_death_below_it(subject: &Subject) {
    let mut script = family(subject);
    send_down(&mut script, 2);
    script.tell_worker(2, WorkerCommand::Receive(None));
    assert_eq!(script.answer_of(2).seen().one(), (2, 2));
    script.until_it_sleeps(2);
    script.kill(4);
    let lowest = script.answer_of(1).sent();
    assert_eq!(
        lowest.outcomes(),
        [(2, OutcomeKind::Applied), (3, OutcomeKind::Died)]
    );
    let above = [script.answer_of(0).sent(), script.answer(TRAINER).sent()];
    for (sent, worker) in above.iter().zip([1, 0]) {
        assert_eq!(
            sent.outcomes(),
            [(worker, OutcomeKind::Refused)],
            "{}",
            sent.text
        );
        let reason = &sent.line(worker).reason;
        assert!(reason.contains("worker 3"), "{reason}");
    }

    // As long as it is missing; it costs the others nothing.
    for word in [3, 4] {
        send_down(&mut script, word);
        script.tell_worker(2, WorkerCommand::Receive(None));
        assert_eq!(script.answer_of(2).seen().one(), (word, word));
        let below = [script.answer_of(1).sent(), script.answer_of(0).sent()];
        let sent = script.answer(TRAINER).sent();
        script.assert_applied(&below[0], &[2]);
        if word == 3 {
            assert!(sent.line(0).reason.contains("worker 3"), "{}", sent.text);
            assert_eq!(script.deed(1, WorkerCommand::Forget(vec![3])), Answer::Done);
        } else {
            script.assert_applied(&below[1], &[1]);
            script.assert_applied(&sent, &[0]);
        }
    }
    script.close();
}

/// Neither of the two in the middle asks for anything; both threads end at once.
pub(crate) fn a_cascade_passes_on_by_threads(subject: &Subject) {
    let mut script = family(subject);
    for worker in 0..2 {
        assert_eq!(
            script.deed(worker, WorkerCommand::PassOnByThread),
            Answer::Done
        );
    }
    for word in 2..6 {
        for worker in [2, 3] {
            script.tell_worker(worker, WorkerCommand::Receive(None));
        }
        let sent = script.send(Payload::Word(word), SendSettings::default());
        script.assert_applied(&sent, &[0]);
        for worker in [2, 3] {
            assert_eq!(script.answer_of(worker).seen().one(), (word, word));
        }
    }
    let begun = Instant::now();
    for worker in 0..2 {
        assert_eq!(
            script.deed(worker, WorkerCommand::PassOnByHand),
            Answer::Done
        );
    }
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    send_down(&mut script, 6);
    for worker in [2, 3] {
        script.tell_worker(worker, WorkerCommand::Receive(None));
    }
    for worker in [2, 3] {
        assert_eq!(script.answer_of(worker).seen().one(), (6, 6));
    }
    for worker in 0..2 {
        assert!(script.answer_of(worker).sent().all_applied);
    }
    assert!(script.answer(TRAINER).sent().all_applied);
    script.close();
}

/// A trainer, worker 0 below it, worker 1 below that, and workers 2 and 3 below
/// that one, all of which have the first version.
fn family(subject: &Subject) -> Script<'_> {
    let mut script = Script::new(subject, 4);
    let info = script.prepare(TrainerSetup::words(64));
    let connect = TrainerCommand::Connect {
        expect: vec![0],
        deadline: longest(),
    };
    script.dispatch(TRAINER, &Command::Trainer(connect));
    let upper = script.head(0, &info);
    script.tell_worker(0, WorkerCommand::Feed(vec![1]));
    let lower = script.head(1, &upper);
    script.tell_worker(1, WorkerCommand::Feed(vec![2, 3]));
    assert_eq!(script.join(2, Join::new(&lower)), Answer::Done);
    for process in [TRAINER, 1, 2] {
        script.until_it_sleeps(process);
        assert!(!script.has_said(process), "worker 3 is missing");
    }
    assert_eq!(script.join(3, Join::new(&lower)), Answer::Done);
    for process in [2, 1, TRAINER] {
        assert_eq!(script.answer(process), Answer::Done);
    }
    for worker in [2, 3] {
        assert_eq!(script.take(worker).one(), (1, 1));
    }
    script
}

/// Begins a send, and has those in the middle pass it on.
fn send_down(script: &mut Script<'_>, word: u64) {
    let send = TrainerCommand::Send(Payload::Word(word), SendSettings::default());
    script.dispatch(TRAINER, &Command::Trainer(send));
    for worker in 0..2 {
        script.tell_worker(worker, WorkerCommand::PassOn);
    }
}

fn follow(script: &mut Script<'_>, worker: u32, when: SafePoints) {
    // What is held from before would be in the way of two slots.
    script.deed(worker, WorkerCommand::Keep(0));
    assert_eq!(
        script.deed(worker, WorkerCommand::Follow(when)),
        Answer::Done
    );
}

/// The version that a thread has loaded, and its number.
fn following(script: &mut Script<'_>, worker: u32) -> (u64, u64) {
    let followed = script.deed(worker, WorkerCommand::Following).followed();
    assert_eq!(followed.state, FollowerState::Follows);
    followed.one()
}
