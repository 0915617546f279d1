//! Workers that die, and workers whose trainer dies.

use std::sync::mpsc::channel;
use std::thread;

use weightsync_engine::worker::WorkerError;

use crate::act::{GATE, Role};
use crate::stage::{Gate, Trainer, WHILE, ends, exit, frame, longest, spawn, watch};

pub fn killed_worker_event_has_its_signal_and_last_output() {
    let speak = Role::Speak("what I wanted to say".into());
    let workers = spawn(3, &speak).start().expect("workers start");
    for _ in 0..3 {
        assert_eq!(frame(&workers).1, b"spoken");
    }
    let pid = workers.pid(1).expect("it runs");
    workers.kill(1).expect("it can be killed");

    let (worker, exit) = exit(&workers);
    assert_eq!((worker, exit.pid), (1, pid));
    assert_eq!((exit.signal, exit.status), (Some(9), None));
    assert_eq!(exit.stderr_text(), "what I wanted to say\n");
    assert!(!exit.restarted);
    assert_eq!((workers.running(), workers.pid(1)), (2, None));

    match workers.send(1, b"?", Some(longest())) {
        Err(WorkerError::Gone {
            worker: 1,
            exit: Some(gone),
        }) => assert_eq!(*gone, exit),
        other => panic!("{other:?}"),
    }
    workers.kill(1).expect("killing it again is nothing");
    for worker in [0, 2] {
        workers
            .send(worker, b"you?", Some(longest()))
            .expect("the others go on");
        assert_eq!(frame(&workers), (worker, b"you?".to_vec()));
    }
}

pub fn a_panic_is_an_exit_with_its_text() {
    let workers = spawn(1, &Role::Panic("the reason".into()))
        .start()
        .expect("a worker starts");
    let (_, exit) = exit(&workers);
    assert_eq!((exit.status, exit.signal), (Some(101), None));
    assert!(exit.stderr_text().contains("the reason"), "{exit:?}");
    assert!(exit.to_string().contains("panicked"), "{exit}");
    // Nobody is left: this returns at once, without a timeout.
    assert_eq!(workers.recv_any(None), None);
}

pub fn everything_sent_comes_before_the_exit() {
    // More than the queue holds, so that the last of it is read after the death.
    let flood = Role::Flood {
        frames: 20,
        bytes: 4096,
    };
    let (done, heard) = channel();
    let workers = spawn(1, &flood)
        .queue_bytes(10_000)
        .on_stderr_line(move |_, line| {
            if line == "done" {
                done.send(()).unwrap_or_default();
            }
        })
        .start()
        .expect("a worker starts");
    let pidfd = watch(workers.pid(0).expect("it runs"));
    // It has written everything, and waits for us, when it is killed.
    heard.recv_timeout(longest()).expect("it is done");
    workers.kill(0).expect("it can be killed");
    assert!(ends(&pidfd, longest()));
    for number in 0..20_u32 {
        assert_eq!(frame(&workers).1[..4], number.to_le_bytes());
    }
    assert_eq!(exit(&workers).1.signal, Some(9));
    assert_eq!(workers.recv_any(None), None);
}

pub fn a_send_ends_when_the_worker_dies() {
    let gate = Gate::new();
    let workers = spawn(1, &Role::Deaf(gate.path().into()))
        .queue_bytes(1)
        .start()
        .expect("a worker starts");
    assert_eq!(frame(&workers).1, b"deaf");
    thread::scope(|scope| {
        // The second frame at the latest does not fit anywhere.
        let sending =
            scope.spawn(|| (0..2).try_for_each(|_| workers.send(0, &vec![0; 8 << 20], None)));
        // It is blocked once a frame of ours cannot be begun either.
        while !matches!(
            workers.send(0, b"x", Some(WHILE)),
            Err(WorkerError::SendTimeout { begun: false, .. })
        ) {}
        workers.kill(0).expect("it can be killed");
        match sending.join().expect("no panic") {
            Err(WorkerError::Gone { worker: 0, .. }) => {}
            other => panic!("{other:?}"),
        }
    });
}

pub fn what_a_worker_started_dies_with_it() {
    let workers = spawn(1, &Role::Parent).start().expect("a worker starts");
    let pid = frame(&workers)
        .1
        .try_into()
        .map(u32::from_le_bytes)
        .expect("a process id");
    let child = watch(pid);
    assert!(!ends(&child, WHILE));
    workers.kill(0).expect("it can be killed");
    exit(&workers);
    assert!(ends(&child, longest()));
}

pub fn workers_survive_the_thread_that_started_them() {
    let mut trainer = Trainer::start("deserting", &[]);
    let workers = trainer.workers();
    for worker in &workers {
        assert!(!ends(worker, WHILE));
    }
    trainer.finish();
    for worker in &workers {
        assert!(ends(worker, longest()));
    }
}

pub fn no_worker_survives_a_killed_trainer() {
    for role in [
        "idle",
        "spinning",
        "spinning without a signal",
        "stopped",
        "sending",
    ] {
        let mut trainer = Trainer::start(role, &[]);
        let workers = trainer.workers();
        assert_eq!(workers.len(), 2, "{role}");
        for worker in &workers {
            assert!(!ends(worker, WHILE / 3), "{role}: ended before its trainer");
        }
        trainer.kill();
        for worker in &workers {
            assert!(ends(worker, longest()), "{role}: a worker survived");
        }
    }
}

pub fn worker_ends_with_its_lifeline_held_elsewhere() {
    let mut trainer = Trainer::start("spinning without a signal", &[]);
    let workers = trainer.workers();
    // As a forked copy of the trainer would.
    let held = trainer.sockets();
    assert!(held.len() >= workers.len(), "one for each worker");
    trainer.kill();
    for worker in &workers {
        assert!(ends(worker, longest()));
    }
    drop(held);
}

pub fn no_worker_survives_an_aborted_trainer() {
    let mut trainer = Trainer::start("spinning", &[]);
    let workers = trainer.workers();
    trainer.abort();
    for worker in &workers {
        assert!(ends(worker, longest()));
    }
}

pub fn worker_ends_with_a_trainer_killed_before_attach() {
    let mut gate = Gate::new();
    let mut trainer = Trainer::start("behind", &[(GATE, gate.path())]);
    let workers = trainer.workers();
    trainer.kill();
    for worker in &workers {
        assert!(!ends(worker, WHILE), "it was to wait at the gate");
    }
    gate.open(workers.len());
    for worker in &workers {
        assert!(ends(worker, longest()));
    }
}
