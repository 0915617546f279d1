//! The death of one process costs the others nothing.

use std::time::{Duration, Instant};

use crate::process::{Answer, Command, Fared};
use crate::scale::longest;
use crate::script::{Script, TRAINER, prompt_limit};

fn send(word: u64) -> Command {
    Command::Send {
        word,
        deadline: longest(),
    }
}

fn version(number: u64, word: u64) -> Answer {
    Answer::Version { number, word }
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
        assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    }
    kept.extend(script.copies(1));
    script.send(TRAINER, &send(2));
    assert_eq!(script.ask(2, &Command::Receive(None)), version(2, 2));
    script.until_it_sleeps(TRAINER);
    let begun = Instant::now();
    let [sent] = script.kill(1, [TRAINER]);
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
    let Answer::Sent { lines, .. } = sent else {
        panic!("{sent:?}");
    };
    assert_eq!(lines, [(0, Fared::Died), (1, Fared::Applied)]);
    assert!(!kept.is_empty());
    drop(kept);
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
            begun.elapsed() < longest(),
            "process {worker} polled in vain"
        );
    }
}
