//! What is not sent is not seen.

use crate::process::{Answer, Command};
use crate::scale::longest;
use crate::script::{Script, TRAINER};

pub fn what_the_trainer_changes_in_place_is_never_seen() {
    let mut script = Script::open("isolation", 1 << 16, 3, 2);
    script.send(
        TRAINER,
        &Command::Send {
            word: 1000,
            deadline: longest(),
        },
    );
    let version = |number, word| Answer::Version { number, word };
    script.send(1, &Command::Receive(None));
    script.send(2, &Command::Receive(None));
    let [.., one, two] = script.answers([TRAINER, 1, 2]);
    assert_eq!([one, two], [version(2, 1000), version(2, 1000)]);

    // The trainer changes its tensors in place all the while; its workers look
    // at what they hold, and at the newest there is.
    script.send(TRAINER, &Command::Scribble);
    for worker in [1, 2] {
        assert_eq!(script.ask(worker, &Command::Latest), version(2, 1000));
        let held = Answer::Held(vec![1, 1000, 1000]);
        assert_eq!(script.ask(worker, &Command::Reread { times: 300 }), held);
        assert_eq!(script.ask(worker, &Command::Keep(0)), Answer::Done);
        assert_eq!(script.ask(worker, &Command::Latest), version(2, 1000));
    }
    let Answer::Scribbled(times) = script.ask(TRAINER, &Command::Keep(0)) else {
        panic!("the trainer was changing its tensors");
    };
    assert!(times > 0);

    // Killed in the middle of it, it has not sent it either.
    script.send(TRAINER, &Command::Scribble);
    script.kill(TRAINER, []);
    for worker in [1, 2] {
        assert_eq!(script.ask(worker, &Command::Latest), version(2, 1000));
        let held = Answer::Held(vec![1000, 1000]);
        assert_eq!(script.ask(worker, &Command::Reread { times: 30 }), held);
    }
    script.close();
}
