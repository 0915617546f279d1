//! What is held: valid until it is released, and the same bytes at both ends.

use crate::Subject;
use crate::harness::command::{Answer, TrainerCommand, TrainerSetup, WorkerCommand};
use crate::harness::fault::Kind;
use crate::harness::script::{Script, TRAINER};

/// It stays as it is, without the sender and without the receiver.
pub(crate) fn a_snapshot_outlives_both_ends(subject: &Subject) {
    for killed in [true, false] {
        let lead = TrainerSetup {
            slots: (2, 8),
            checksums: true,
            ..TrainerSetup::words(1 << 12)
        };
        let (mut script, _) = Script::open(subject, lead, 1);
        script.deed(0, WorkerCommand::Hoard(9));
        script.deliver_word(2, &[0]);
        script.deliver_word(3, &[0]);
        let before = script.deed(0, WorkerCommand::Digests);
        match killed {
            true => script.kill(TRAINER),
            false => assert_eq!(script.act(TrainerCommand::Close), Answer::Done),
        }
        assert_eq!(script.deed(0, WorkerCommand::Leave), Answer::Done);
        let held = script.deed(0, WorkerCommand::Reread(5)).held();
        assert_eq!(
            held.iter().map(|seen| seen.one()).collect::<Vec<_>>(),
            [(1, 1), (2, 2), (3, 3)]
        );
        assert_eq!(script.deed(0, WorkerCommand::Digests), before);
        assert!(matches!(
            script.deed(0, WorkerCommand::Checksums),
            Answer::Checked(_)
        ));
        script.close();
    }
}

/// A worker finds the trainer's digest, and its own is the same; another
/// version's is another.
pub(crate) fn a_digest_is_the_same_at_both_ends(subject: &Subject) {
    let (mut script, _) = Script::open(subject, TrainerSetup::words(1 << 12), 2);
    let mut last = None;
    for word in 2..6 {
        script.deliver_word(word, &[0, 1]);
        let made = match script.act(TrainerCommand::Digest) {
            Answer::Fault(fault) if fault.kind == Kind::Unsupported => {
                println!(
                    "not offered: {}::snapshots::digest at the sender",
                    subject.scheme
                );
                return script.close();
            }
            answer => answer.digests().remove(0).0,
        };
        for worker in 0..2 {
            let (own, found) = script
                .deed(worker, WorkerCommand::Digests)
                .digests()
                .remove(0);
            assert_eq!(own, made);
            assert!(
                found.is_none_or(|found| found == made),
                "a digest of something else"
            );
        }
        assert_ne!(last.replace(made.clone()), Some(made));
    }
    script.close();
}

/// A worker that verifies finds them right, or is told that there are none.
pub(crate) fn checksums_hold_where_they_were_made(subject: &Subject) {
    for made in [true, false] {
        let lead = TrainerSetup {
            checksums: made,
            ..TrainerSetup::words(1 << 16)
        };
        let (mut script, _) = Script::open(subject, lead, 1);
        for word in 2..5 {
            script.deliver_word(word, &[0]);
            let Answer::Checked(checked) = script.deed(0, WorkerCommand::Checksums) else {
                panic!("they are right or there are none");
            };
            assert!(made || checked == [false], "nobody asked for any");
        }
        script.close();
    }
}
