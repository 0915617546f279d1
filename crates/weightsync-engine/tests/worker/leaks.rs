//! What is left of a group when it is gone: nothing.

use std::fs;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use weightsync_engine::worker::{Spawn, WorkerError};

use crate::act::Role;
use crate::stage::{Trainer, exit, frame, longest, spawn};

/// In a process of its own, where nothing else opens files or starts threads.
pub fn two_hundred_rounds_leave_nothing() {
    Trainer::start("leaking", &[]).finish();
}

/// The trainer of [`two_hundred_rounds_leave_nothing`].
pub fn rounds() {
    let before = open_files();
    for round in 0..200 {
        // Killed and ended in every way, also before they are ready.
        let group = spawn(2, &Role::Echo).grace(Duration::from_secs(10));
        let workers = group.start().expect("workers start");
        match round % 5 {
            0 => drop(workers),
            1 => {
                workers.kill(0).expect("it can be killed");
                assert_eq!(exit(&workers).1.signal, Some(9));
            }
            2 => {
                workers.send(1, b"x", Some(longest())).expect("it reads");
                assert_eq!(frame(&workers), (1, b"x".to_vec()));
                workers.restart(1, None).expect("it starts again");
            }
            3 => {
                workers.restart(0, None).expect("it starts again");
                workers.kill(1).expect("it can be killed");
                workers.shutdown(Some(Duration::ZERO));
            }
            _ => {
                let exits = workers.shutdown(Some(longest()));
                assert!(exits.iter().all(|exit| exit.is_success()), "{exits:?}");
            }
        }
    }
    let missing = Spawn::program("/nowhere/at/all").count(3).start();
    assert!(matches!(missing, Err(WorkerError::Spawn { worker: 0, .. })));

    assert_eq!(open_files(), before);
    let any = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    assert_eq!(
        waitid(WaitId::All, any).err(),
        Some(Errno::CHILD),
        "a child is left"
    );
    // A joined thread leaves the list a moment after the join.
    let deadline = Instant::now() + longest();
    while threads() > 1 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(threads(), 1);
}

fn open_files() -> usize {
    count("/proc/self/fd")
}

fn threads() -> usize {
    count("/proc/self/task")
}

fn count(dir: &str) -> usize {
    fs::read_dir(dir).expect("there is /proc").count()
}
