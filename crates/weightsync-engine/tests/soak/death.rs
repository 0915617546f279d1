//! Who dies, or stands still, costs the others nothing.

use std::time::{Duration, Instant};

use crate::process::{Answer, Command, Fared};
use crate::scale::PATIENCE;
use crate::script::{MOMENT, Script, TRAINER};

fn send(word: u64) -> Command {
    Command::Send {
        word,
        deadline: PATIENCE,
    }
}

fn version(number: u64, word: u64) -> Answer {
    Answer::Version { number, word }
}

pub fn death_of_a_worker_with_every_slot_frees_the_send() {
    let mut script = Script::open("holder", 1 << 13, 2, 2);
    script.send(TRAINER, &send(2));
    script.send(1, &Command::Receive(None));
    script.send(2, &Command::Receive(None));
    script.answers([TRAINER, 1, 2]);
    // Worker 0 holds both slots, worker 1 nothing.
    assert_eq!(
        script.ask(1, &Command::Reread { times: 1 }),
        Answer::Held(vec![1, 2])
    );
    assert_eq!(script.ask(2, &Command::Keep(0)), Answer::Done);
    script.send(2, &Command::Receive(None));
    script.send(TRAINER, &send(3));
    script.until_it_sleeps(TRAINER);

    let begun = Instant::now();
    let [sent, received] = script.kill(1, [TRAINER, 2]);
    assert!(begun.elapsed() < MOMENT, "{:?}", begun.elapsed());
    assert_eq!(received, version(3, 3));
    let Answer::Sent { lines, .. } = sent else {
        panic!("{sent:?}");
    };
    assert_eq!(lines, [(0, Fared::Died), (1, Fared::Applied)]);
    script.close();
}

pub fn sleeping_readers_notice_trainer_death_at_once() {
    // Worker 0 yields before it sleeps, worker 1 sleeps at once.
    let mut script = Script::open("sleepers", 1 << 13, 2, 2);
    for life in 2..5 {
        let pid = script.pid(TRAINER);
        for worker in [1, 2] {
            script.send(worker, &Command::Receive(None));
            script.until_it_sleeps(worker);
        }
        let begun = Instant::now();
        let died = script.kill(TRAINER, [1, 2]);
        assert_eq!(died, [Answer::TrainerDied(pid), Answer::TrainerDied(pid)]);
        assert!(begun.elapsed() < MOMENT, "{:?}", begun.elapsed());

        // They wait for its successor, and hold what the dead one left.
        for worker in [1, 2] {
            script.send(worker, &Command::Receive(None));
        }
        script.raise(TRAINER);
        script.send(TRAINER, &script.lead(2));
        let [led, one, two] = script.answers([TRAINER, 1, 2]);
        assert_eq!(
            [led, one, two],
            [Answer::Done, version(1, 1), version(1, 1)]
        );
        let held = Answer::Held(vec![1; life]);
        for worker in [1, 2] {
            assert_eq!(script.ask(worker, &Command::Reread { times: 2 }), held);
        }
    }
    script.close();
}

pub fn forked_child_of_a_dead_worker_blocks_nobody() {
    let mut script = Script::open("forked", 1 << 13, 2, 2);
    // As the children have them that a process forked before it was killed.
    let mut kept = Vec::new();
    for _ in 0..2 {
        kept.extend(script.copies(TRAINER));
        let pid = script.pid(TRAINER);
        for worker in [1, 2] {
            script.send(worker, &Command::Receive(None));
            script.until_it_sleeps(worker);
        }
        let begun = Instant::now();
        let died = script.kill(TRAINER, [1, 2]);
        assert_eq!(died, [Answer::TrainerDied(pid), Answer::TrainerDied(pid)]);
        for worker in [1, 2] {
            script.send(worker, &Command::Receive(None));
        }
        script.raise(TRAINER);
        script.send(TRAINER, &script.lead(2));
        let led = script.answers([TRAINER, 1, 2]);
        assert_eq!(led, [Answer::Done, version(1, 1), version(1, 1)]);
        assert!(begun.elapsed() < MOMENT, "{:?}", begun.elapsed());
    }
    kept.extend(script.copies(1));
    script.send(TRAINER, &send(2));
    assert_eq!(script.ask(2, &Command::Receive(None)), version(2, 2));
    script.until_it_sleeps(TRAINER);
    let begun = Instant::now();
    let [sent] = script.kill(1, [TRAINER]);
    assert!(begun.elapsed() < MOMENT, "{:?}", begun.elapsed());
    let Answer::Sent { lines, .. } = sent else {
        panic!("{sent:?}");
    };
    assert_eq!(lines, [(0, Fared::Died), (1, Fared::Applied)]);
    assert!(!kept.is_empty());
    drop(kept);
    script.close();
}

pub fn stopped_worker_is_late_and_others_are_up_to_date() {
    let mut script = Script::open("stopped", 1 << 13, 3, 3);
    script.stop(1);
    let first = Duration::from_millis(400);
    for word in 2..5 {
        // It is late once; the sends after that do not wait for it.
        let deadline = if word == 2 { first } else { PATIENCE };
        script.send(2, &Command::Receive(None));
        script.send(3, &Command::Receive(None));
        script.send(TRAINER, &Command::Send { word, deadline });
        let [sent, one, two] = script.answers([TRAINER, 2, 3]);
        assert_eq!([one, two], [version(word, word), version(word, word)]);
        let Answer::Sent { lines, took } = sent else {
            panic!("{sent:?}");
        };
        assert_eq!(
            lines,
            [(0, Fared::Late), (1, Fared::Applied), (2, Fared::Applied)]
        );
        assert!(took < MOMENT && (word > 2 || took >= first), "{took:?}");
        for worker in [2, 3] {
            assert_eq!(script.ask(worker, &Command::Keep(0)), Answer::Done);
        }
    }
    script.wake(1);
    // What it held is whole, and what comes is the newest.
    assert_eq!(
        script.ask(1, &Command::Reread { times: 2 }),
        Answer::Held(vec![1])
    );
    assert_eq!(script.ask(1, &Command::Receive(None)), version(4, 4));
    for worker in [1, 2, 3] {
        script.send(worker, &Command::Receive(None));
    }
    script.send(TRAINER, &send(5));
    let [sent, ..] = script.answers([TRAINER, 1, 2, 3]);
    let Answer::Sent { lines, .. } = sent else {
        panic!("{sent:?}");
    };
    assert_eq!(
        lines,
        [
            (0, Fared::Applied),
            (1, Fared::Applied),
            (2, Fared::Applied)
        ]
    );
    script.close();
}

pub fn polling_readers_find_the_next_trainer() {
    let mut script = Script::open("polling", 1 << 13, 2, 2);
    let pid = script.pid(TRAINER);
    let poll = Command::Receive(Some(Duration::ZERO));
    script.kill(TRAINER, []);
    for worker in [1, 2] {
        assert_eq!(polled(&script, worker, &poll), Answer::TrainerDied(pid));
        assert_eq!(script.ask(worker, &poll), Answer::Nothing);
    }
    script.raise(TRAINER);
    script.send(TRAINER, &script.lead(0));
    assert_eq!(script.answer(TRAINER), Answer::Done);
    for worker in [1, 2] {
        assert_eq!(polled(&script, worker, &poll), version(1, 1));
    }
    script.close();
}

/// The first answer to a poll that is not that nothing came.
fn polled(script: &Script, worker: usize, poll: &Command) -> Answer {
    let begun = Instant::now();
    loop {
        let answer = script.ask(worker, poll);
        if answer != Answer::Nothing {
            return answer;
        }
        assert!(
            begun.elapsed() < PATIENCE,
            "process {worker} polled in vain"
        );
    }
}
