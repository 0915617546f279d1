//! A trainer, a worker that passes on what it receives, and the two it feeds:
//! the death of one costs the others nothing.

use crate::process::{Answer, Command, Fared};
use crate::scale::longest;
use crate::script::{Script, TRAINER, info_of};

/// The worker in the middle, and those it feeds.
const MIDDLE: usize = 1;
const LEAVES: [usize; 2] = [2, 3];

const ALL: [usize; 4] = [TRAINER, MIDDLE, 2, 3];

pub fn leaf_death_is_a_line_of_the_trainer_report() {
    let mut script = open("cascade-leaf");
    // The other one never looks.
    script.send(LEAVES[1], &Command::Receive(None));
    script.send(TRAINER, &send(2));
    assert_eq!(script.answer(LEAVES[1]), version(2, 2));
    let [sent] = script.kill(LEAVES[0], [TRAINER]);
    let lines = lines(sent);
    let [(0, Fared::Refused(reason))] = &lines[..] else {
        panic!("{lines:?}");
    };
    for words in ["1 of its 2 workers", "worker 0", "died"] {
        assert!(reason.contains(words), "{words:?}: {reason}");
    }

    // The other one goes on, and the dead one is missed until it is back.
    script.send(LEAVES[1], &Command::Receive(None));
    script.send(TRAINER, &send(3));
    let [received, sent] = script.answers([LEAVES[1], TRAINER]);
    assert_eq!(received, version(3, 3));
    let missed = self::lines(sent);
    let [(0, Fared::Refused(reason))] = &missed[..] else {
        panic!("{missed:?}");
    };
    assert!(reason.contains("died"), "{reason}");
    script.raise(LEAVES[0]);
    assert_eq!(script.ask(LEAVES[0], &join(&script, 0)), Answer::Done);
    let receive = Command::Receive(None);
    assert_eq!(script.ask(LEAVES[0], &receive), version(3, 3));
    receive_all(&script, &LEAVES, 4, 4);
    script.close();
}

pub fn leaves_find_the_next_one_in_the_middle() {
    let mut script = open("cascade-middle");
    receive_all(&script, &LEAVES, 2, 2);
    let pid = script.pid(MIDDLE);
    for leaf in LEAVES {
        script.send(leaf, &Command::Receive(None));
    }
    let died = script.kill(MIDDLE, LEAVES);
    assert_eq!(died, [Answer::TrainerDied(pid), Answer::TrainerDied(pid)]);

    // The trainer goes on without it, whether it has seen it die by then or not.
    let lines = lines(script.ask(TRAINER, &send(3)));
    assert!(
        lines.iter().all(|line| *line == (0, Fared::Died)),
        "{lines:?}"
    );
    for leaf in LEAVES {
        assert_eq!(
            script.ask(leaf, &Command::Reread { times: 1 }),
            Answer::Held(vec![1, 2])
        );
        script.send(leaf, &Command::Keep(0));
        assert_eq!(script.answer(leaf), Answer::Done);
        script.send(leaf, &Command::Receive(None));
    }
    script.raise(MIDDLE);
    script.send(MIDDLE, &pass(&script));
    let [middle, one, two] = script.answers([MIDDLE, LEAVES[0], LEAVES[1]]);
    // By the trainer's number.
    assert_eq!([one, two], [version(3, 3), version(3, 3)]);
    assert_eq!(middle, Answer::Done);
    receive_all(&script, &LEAVES, 4, 4);
    script.close();
}

pub fn a_restarted_trainer_is_followed_by_all() {
    let mut script = open("cascade-trainer");
    receive_all(&script, &LEAVES, 2, 2);
    receive_all(&script, &LEAVES, 3, 3);
    for leaf in LEAVES {
        script.send(leaf, &Command::Receive(None));
    }
    script.kill(TRAINER, []);
    script.raise(TRAINER);
    script.send(TRAINER, &script.lead(1));
    let [led, one, two] = script.answers([TRAINER, LEAVES[0], LEAVES[1]]);
    // The new trainer's first version follows on the old one's last.
    assert_eq!([one, two], [version(4, 1), version(4, 1)]);
    assert_eq!(led, Answer::Done);
    receive_all(&script, &LEAVES, 7, 5);
    script.close();
}

/// A trainer, the one in the middle, and two leaves that hold the first version.
fn open(name: &str) -> Script {
    let script = Script::start(name, 1 << 13, 6, 4);
    script.send(TRAINER, &script.lead(1));
    script.send(MIDDLE, &pass(&script));
    for (leaf, worker) in LEAVES.into_iter().zip(0..) {
        script.send(leaf, &join(&script, worker));
    }
    assert_eq!(script.answers(ALL), [const { Answer::Done }; 4]);
    for leaf in LEAVES {
        assert_eq!(script.ask(leaf, &Command::Receive(None)), version(1, 1));
    }
    script
}

/// Has the trainer send a word; all of these leaves get it.
fn receive_all(script: &Script, leaves: &[usize], word: u64, number: u64) {
    for leaf in leaves {
        script.send(*leaf, &Command::Receive(None));
    }
    script.send(TRAINER, &send(word));
    for _ in 0..=leaves.len() {
        match script.any() {
            (TRAINER, sent) => assert_eq!(lines(sent), [(0, Fared::Applied)]),
            (_, received) => assert_eq!(received, version(number, word)),
        }
    }
}

fn pass(script: &Script) -> Command {
    Command::Pass {
        info: script.info(),
        worker: 0,
        sub: script.sub(),
        workers: 2,
    }
}

fn join(script: &Script, worker: u32) -> Command {
    Command::Join {
        info: info_of(&script.sub()),
        worker,
        sleeps: worker % 2 == 1,
    }
}

fn send(word: u64) -> Command {
    Command::Send {
        word,
        deadline: longest(),
    }
}

fn version(number: u64, word: u64) -> Answer {
    Answer::Version { number, word }
}

fn lines(answer: Answer) -> Vec<(u32, Fared)> {
    match answer {
        Answer::Sent { lines, .. } => lines,
        other => panic!("{other:?}"),
    }
}
