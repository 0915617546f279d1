//! A group at work: frames, limits, restarts, shutdown.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use weightsync_engine::interruptible;
use weightsync_engine::worker::{Event, PipeFault, Restart, Spawn, WorkerError};

use crate::act::{ROGUE, Role};
use crate::stage::{Gate, WHILE, ends, exit, frame, longest, spawn, watch};

pub fn frames_go_both_ways_whole_and_in_order() {
    let workers = spawn(3, &Role::Echo).start().expect("workers start");
    assert_eq!((workers.len(), workers.running()), (3, 3));
    // Empty, small, and far larger than a socket's buffer.
    for len in [0, 1, 5, 4096, 300_000, 5 << 20] {
        for worker in 0..3 {
            let sent: Vec<u8> = (0..len).map(|i| (i * 31 + worker) as u8).collect();
            workers
                .send(worker, &sent, Some(longest()))
                .expect("it reads");
            assert_eq!(frame(&workers), (worker, sent));
        }
    }
    for number in 0..1000_u32 {
        workers
            .send(2, &number.to_le_bytes(), Some(longest()))
            .expect("it reads");
    }
    for number in 0..1000_u32 {
        assert_eq!(frame(&workers), (2, number.to_le_bytes().to_vec()));
    }
    assert_eq!(workers.recv_any(Some(Duration::ZERO)), None);
}

pub fn every_worker_gets_its_own_init() {
    // Larger than the pipe: it is sent while the worker starts.
    let init = |worker: usize| {
        let text = worker.to_string().repeat(3 << 20);
        postcard::to_stdvec(&Role::Speak(text)).expect("a role has a postcard form")
    };
    let workers = Spawn::this_program()
        .expect("this program has a path")
        .count(2)
        .init_each(init)
        .start()
        .expect("workers start");
    let speakers: BTreeSet<usize> = (0..2).map(|_| frame(&workers).0).collect();
    assert_eq!(speakers, BTreeSet::from([0, 1]));
    for (worker, exit) in workers.shutdown(Some(longest())).iter().enumerate() {
        assert!(exit.is_success());
        assert_eq!(
            exit.stderr_tail.len(),
            weightsync_engine::worker::STDERR_TAIL
        );
        let digit = b'0' + worker as u8;
        assert!(
            exit.stderr_tail
                .iter()
                .all(|&byte| byte == digit || byte == b'\n')
        );
    }
}

pub fn worker_has_its_own_process_group_and_stdin() {
    let facts = facts();
    assert_eq!(facts[0], "1 of 2");
    assert_eq!(facts[1], "leads its group: true");
    assert_eq!(facts[2], "bytes on standard input: 0");
    assert_eq!(
        facts[3], "sockets: 1",
        "the pipe and nothing of the trainer's"
    );
    let own = std::env::current_exe().expect("this program has a path");
    let own = own.file_name().expect("it has a name").to_string_lossy();
    assert_eq!(
        facts[7],
        format!("name: {}", own.chars().take(15).collect::<String>())
    );
    assert_eq!(facts[8], "killed with its trainer: true");
}

pub fn the_pipe_is_taken_once_and_not_by_children() {
    let facts = facts();
    assert!(facts[5].contains("already taken"), "{}", facts[5]);
    assert_eq!(facts[6], "a child is a worker: Ok(false)");
}

/// What the second of two workers says about itself.
fn facts() -> Vec<String> {
    let workers = spawn(2, &Role::Describe).start().expect("workers start");
    for _ in 0..2 {
        if let (1, facts) = frame(&workers) {
            let facts = String::from_utf8(facts).expect("text");
            return facts.lines().map(str::to_owned).collect();
        }
    }
    panic!("worker 1 did not describe itself");
}

pub fn a_frame_too_long_is_refused_on_both_ends() {
    let workers = spawn(2, &Role::Describe)
        .max_frame(4096)
        .start()
        .expect("workers start");
    match workers.send(0, &[0; 4097], Some(longest())) {
        Err(WorkerError::FrameTooLong {
            len: 4097,
            max: 4096,
        }) => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        workers.restart(0, Some(vec![0; 4097])),
        Err(WorkerError::FrameTooLong { .. })
    ));
    let (worker, facts) = frame(&workers);
    assert!(String::from_utf8_lossy(&facts).contains("too long: true"));
    frame(&workers);
    // Nothing of the refused frames went into the pipe.
    workers
        .send(worker, &[7; 4096], Some(longest()))
        .expect("a frame of the full length");
    assert_eq!(frame(&workers), (worker, vec![7; 4096]));

    let too_long = spawn(1, &Role::Echo)
        .max_frame(4096)
        .init(vec![0; 4097])
        .start();
    assert!(matches!(too_long, Err(WorkerError::FrameTooLong { .. })));
}

pub fn worker_that_breaks_the_protocol_is_killed() {
    let faults = [
        (
            "length",
            PipeFault::FrameTooLong {
                len: u32::MAX as usize,
                max: 64 << 20,
            },
        ),
        ("kind", PipeFault::UnknownKind { kind: 77 }),
        ("turn", PipeFault::OutOfTurn { kind: 2 }),
    ];
    for (rogue, fault) in faults {
        let workers = spawn(1, &Role::Echo)
            .env(ROGUE, rogue)
            .start()
            .expect("a worker starts");
        let (_, exit) = exit(&workers);
        assert_eq!((exit.fault, exit.signal), (Some(fault), Some(9)), "{rogue}");
    }
}

pub fn a_worker_that_sends_too_fast_waits() {
    const FRAMES: u32 = 100;
    let flood = Role::Flood {
        frames: FRAMES,
        bytes: 1 << 16,
    };
    let (lines, heard) = channel();
    let workers = spawn(1, &flood)
        .queue_bytes(1 << 18)
        .on_stderr_line(move |_, line| lines.send(line.to_owned()).unwrap_or_default())
        .start()
        .expect("a worker starts");
    // It goes on until everything is full; the kernel's share of it is below 1 MiB.
    let mut sent = 0;
    while let Ok(line) = heard.recv_timeout(if sent < 4 { longest() } else { WHILE }) {
        assert_eq!(line, sent.to_string());
        sent += 1;
    }
    assert!(
        (4..20).contains(&sent),
        "{sent} frames were taken while nobody read"
    );
    for number in 0..FRAMES {
        let (_, frame) = frame(&workers);
        assert_eq!(frame[..4], number.to_le_bytes());
        assert_eq!(frame.len(), 1 << 16);
    }
    expect_line(&heard, "done");
}

pub fn send_to_a_stalled_worker_ends_at_its_deadline() {
    let mut gate = Gate::new();
    let workers = spawn(1, &Role::Deaf(gate.path().into()))
        .queue_bytes(1)
        .start()
        .expect("a worker starts");
    assert_eq!(frame(&workers).1, b"deaf");

    // One frame is read ahead, whatever its length; the next is begun and does not fit.
    let long = |byte| vec![byte; 2 << 20];
    workers
        .send(0, &long(1), Some(longest()))
        .expect("it is read ahead");
    let started = Instant::now();
    match workers.send(0, &long(2), Some(WHILE)) {
        Err(WorkerError::SendTimeout {
            worker: 0,
            waited: WHILE,
            begun: true,
        }) => {}
        other => panic!("{other:?}"),
    }
    assert!(started.elapsed() >= WHILE);
    match workers.send(0, &long(3), Some(WHILE)) {
        Err(WorkerError::SendTimeout {
            worker: 0,
            begun: false,
            ..
        }) => {}
        other => panic!("{other:?}"),
    }

    gate.open(1);
    workers
        .send(0, &long(4), Some(longest()))
        .expect("it reads now");
    for byte in [1, 2, 4] {
        assert_eq!(
            frame(&workers),
            (0, long(byte)),
            "whole, and nothing of the third"
        );
    }
}

pub fn an_interrupted_call_ends_and_the_pipe_stays_whole() {
    let mut gate = Gate::new();
    let workers = spawn(1, &Role::Deaf(gate.path().into()))
        .queue_bytes(1)
        .start()
        .expect("a worker starts");
    assert_eq!(frame(&workers).1, b"deaf");
    let started = Instant::now();
    assert_eq!(interruptible(|| true, || workers.recv_any(None)), None);
    let long = |byte| vec![byte; 2 << 20];
    workers
        .send(0, &long(1), Some(longest()))
        .expect("it is read ahead");
    for (byte, expected) in [(2, true), (3, false)] {
        match interruptible(|| true, || workers.send(0, &long(byte), None)) {
            Err(WorkerError::Interrupted { begun }) if begun == expected => {}
            other => panic!("{other:?}"),
        }
    }
    gate.open(1);
    workers
        .send(0, &long(4), Some(longest()))
        .expect("it reads now");
    for byte in [1, 2, 4] {
        assert_eq!(frame(&workers), (0, long(byte)));
    }
    // A worker that ignores the end is killed at once.
    let workers = spawn(1, &Role::SpinWithoutSignal)
        .grace(longest())
        .start()
        .expect("a worker starts");
    frame(&workers);
    let exits = interruptible(|| true, || workers.shutdown(Some(longest())));
    assert_eq!(exits[0].signal, Some(9));
    assert!(started.elapsed() < longest());
}

pub fn an_interrupted_worker_sends_whole_frames() {
    let (lines, heard) = channel();
    let workers = spawn(1, &Role::Impatient { bytes: 1 << 20 })
        .queue_bytes(1)
        .on_stderr_line(move |_, line| lines.send(line.to_owned()).unwrap_or_default())
        .start()
        .expect("a worker starts");
    expect_line(&heard, "interrupted");
    let mut whole = 0_u32;
    let count = loop {
        let (_, frame) = frame(&workers);
        let number = frame[..4].try_into().map(u32::from_le_bytes);
        let number = number.expect("four bytes");
        if frame.len() == 4 {
            break number;
        }
        assert_eq!((number, frame.len()), (whole, 1 << 20));
        assert!(frame[4..].iter().all(|byte| *byte == whole as u8));
        whole += 1;
    };
    assert!(count > 0 && count == whole, "{count} of {whole}");
}

pub fn a_restart_follows_the_end_of_the_process_before() {
    let workers = spawn(2, &Role::Speak("first".into()))
        .start()
        .expect("workers start");
    frame(&workers);
    frame(&workers);
    let old = workers.pid(0).expect("it runs");

    let init = postcard::to_stdvec(&Role::Speak("second".into())).expect("a postcard form");
    let new = workers.restart(0, Some(init)).expect("it starts again");
    assert_ne!(new, old);
    assert_eq!(workers.pid(0), Some(new));
    let (worker, killed) = exit(&workers);
    assert_eq!((worker, killed.pid, killed.signal), (0, old, Some(9)));
    assert!(killed.restarted);
    assert_eq!(frame(&workers), (0, b"spoken".to_vec()));

    // A dead one comes back with the same init bytes as before.
    workers.kill(0).expect("it can be killed");
    let (_, killed) = exit(&workers);
    assert_eq!((killed.pid, killed.restarted), (new, false));
    assert_eq!(killed.stderr_text(), "second\n");
    workers.restart(0, None).expect("it starts again");
    assert_eq!(frame(&workers), (0, b"spoken".to_vec()));
    let exits = workers.shutdown(Some(longest()));
    assert_eq!(exits[0].stderr_text(), "second\n");
    assert_eq!(exits[1].stderr_text(), "first\n");
}

pub fn the_restart_policy_counts() {
    let workers = spawn(1, &Role::Exit(3))
        .restart(Restart::UpTo(2))
        .start()
        .expect("it starts");
    for restarted in [true, true, false] {
        let (_, exit) = exit(&workers);
        assert_eq!((exit.status, exit.restarted), (Some(3), restarted));
    }
    assert_eq!(workers.recv_any(None), None);

    // Neither a success nor a kill on request is a reason.
    let workers = spawn(1, &Role::Exit(0))
        .restart(Restart::UpTo(2))
        .start()
        .expect("it starts");
    assert!(!exit(&workers).1.restarted);
    let workers = spawn(1, &Role::Echo)
        .restart(Restart::UpTo(2))
        .start()
        .expect("it starts");
    workers.kill(0).expect("it can be killed");
    assert!(!exit(&workers).1.restarted);
}

pub fn worker_that_keeps_dying_waits_for_its_end_event() {
    let (lines, heard) = channel();
    let workers = spawn(1, &Role::Panic("again".into()))
        .restart(Restart::UpTo(1000))
        .on_stderr_line(move |_, line| {
            if line.contains("again") {
                lines.send(line.to_owned()).unwrap_or_default();
            }
        })
        .start()
        .expect("it starts");
    let starts = || heard.recv_timeout(longest()).expect("it dies once more");
    // The second one's end is not even looked at before the first one's was received.
    starts();
    starts();
    assert!(heard.recv_timeout(WHILE).is_err(), "a third was started");
    for _ in 0..3 {
        assert!(exit(&workers).1.restarted);
        starts();
        assert!(heard.recv_timeout(WHILE / 3).is_err(), "one too many");
    }
    // A caller that asks for it is not held up, neither by a restart nor by a kill.
    workers.restart(0, None).expect("it starts again");
    starts();
    workers.kill(0).expect("it can be killed");
    while workers.running() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let exits = workers.shutdown(Some(longest()));
    assert_eq!(exits.len(), 1);
}

pub fn last_send_arrives_after_a_full_queue() {
    let workers = spawn(1, &Role::Hoard)
        .queue_bytes(1)
        .grace(longest())
        .start()
        .expect("a worker starts");
    assert_eq!(frame(&workers).1, b"ready");
    // One of them is read ahead; the others are in the socket when it hangs up.
    for number in 0..10 {
        workers
            .send(0, &[number], Some(longest()))
            .expect("they fit");
    }
    let exits = workers.shutdown(Some(longest()));
    assert_eq!(exits[0].stderr_text(), "10\n");
}

pub fn lines_of_standard_error_come_as_they_are_written() {
    let (lines, heard) = channel();
    let workers = spawn(2, &Role::Speak("one\ntwo".into()))
        .on_stderr_line(move |worker, line| {
            lines.send((worker, line.to_owned())).unwrap_or_default()
        })
        .start()
        .expect("workers start");
    let mut seen: Vec<_> = (0..4)
        .map(|_| heard.recv_timeout(longest()).expect("a line"))
        .collect();
    seen.sort_by_key(|(worker, _)| *worker);
    let expected = [(0, "one"), (0, "two"), (1, "one"), (1, "two")];
    assert_eq!(
        seen,
        expected.map(|(worker, line)| (worker, line.to_owned()))
    );
    drop(workers);
    assert!(
        heard.recv().is_err(),
        "the callback is dropped with the group"
    );
}

pub fn shutdown_is_idempotent() {
    let workers = spawn(3, &Role::LastWords).start().expect("workers start");
    let watched: Vec<OwnedFd> = (0..3)
        .map(|i| watch(workers.pid(i).expect("it runs")))
        .collect();
    for _ in 0..3 {
        assert_eq!(frame(&workers).1, b"first");
    }
    workers.kill(0).expect("it can be killed");
    let exits = workers.shutdown(Some(longest()));
    assert!(
        watched.iter().all(|worker| ends(worker, Duration::ZERO)),
        "all are gone by now"
    );
    assert_eq!(exits.len(), 3);
    assert_eq!(exits[0].signal, Some(9));
    for exit in &exits[1..] {
        assert!(exit.is_success(), "{exit}");
        assert_eq!(exit.stderr_text(), "Err(Closed)\n");
    }
    assert_eq!(workers.running(), 0);
    assert_eq!(workers.shutdown(Some(longest())), exits);
    assert!(matches!(
        workers.send(1, b"", Some(longest())),
        Err(WorkerError::ShutDown)
    ));
    assert!(matches!(
        workers.restart(1, None),
        Err(WorkerError::ShutDown)
    ));
}

pub fn sends_before_shutdown_can_still_be_received() {
    let (lines, heard) = channel();
    let workers = spawn(
        2,
        &Role::Flood {
            frames: 3,
            bytes: 100,
        },
    )
    .on_stderr_line(move |_, line| lines.send(line.to_owned()).unwrap_or_default())
    .start()
    .expect("workers start");
    expect_line(&heard, "done");
    expect_line(&heard, "done");
    let exits = workers.shutdown(Some(longest()));
    let mut next = [0_u32; 2];
    while let Some((worker, event)) = workers.recv_any(None) {
        match event {
            Event::Frame(frame) => {
                assert_eq!(frame[..4], next[worker].to_le_bytes());
                next[worker] += 1;
            }
            Event::Exited(exit) => assert_eq!((next[worker], &exit), (3, &exits[worker])),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(next, [3, 3]);
}

pub fn a_worker_that_ignores_the_end_is_killed() {
    // By its own lifeline, after its grace.
    let workers = spawn(1, &Role::SpinWithoutSignal)
        .grace(Duration::from_millis(20))
        .start()
        .expect("a worker starts");
    frame(&workers);
    assert_eq!(workers.shutdown(Some(longest()))[0].signal, Some(9));

    // By the trainer, where it has none: this program has never heard of us.
    let workers = Spawn::program("sleep")
        .args(["1000"])
        .start()
        .expect("sleep is there");
    let sleep = watch(workers.pid(0).expect("it runs"));
    assert_eq!(workers.shutdown(Some(Duration::ZERO))[0].signal, Some(9));
    assert!(ends(&sleep, Duration::ZERO));
}

pub fn a_program_that_cannot_be_started_is_an_error() {
    match Spawn::program("/nowhere/at/all").count(2).start() {
        Err(WorkerError::Spawn {
            worker: 0,
            program,
            source,
        }) => {
            assert_eq!(program, "/nowhere/at/all");
            assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
        }
        other => panic!("{other:?}"),
    }
}

pub fn worker_cannot_start_workers_before_it_is_set_up() {
    let workers = spawn(1, &Role::Echo)
        .env(ROGUE, "forgetful")
        .start()
        .expect("it starts");
    let (_, exit) = exit(&workers);
    assert_eq!(exit.status, Some(33), "{}", exit.stderr_text());
}

pub fn launcher_works_if_it_leaves_stdin_alone() {
    let own = std::env::current_exe().expect("this program has a path");
    let launch = |script: &str| {
        Spawn::program("sh")
            .args(["-c".as_ref(), script.as_ref(), own.as_os_str()])
            .init_value(&Role::Echo)
            .expect("a role has a postcard form")
            .start()
            .expect("there is a shell")
    };
    // The shell waits for the worker, so it is not the worker.
    let workers = launch("\"$0\"; exit $?");
    workers
        .send(0, b"through", Some(longest()))
        .expect("it reads");
    assert_eq!(frame(&workers), (0, b"through".to_vec()));
    assert!(workers.shutdown(Some(longest()))[0].is_success());

    let workers = launch("exec \"$0\" < /dev/null");
    let (_, exit) = exit(&workers);
    assert_eq!(exit.status, Some(4));
    assert!(
        exit.stderr_text()
            .contains("standard input is not its pipe"),
        "{exit:?}"
    );
}

pub fn a_call_for_no_worker_is_an_error() {
    let workers = spawn(1, &Role::Echo).start().expect("a worker starts");
    let missing = |result: Result<(), WorkerError>| {
        matches!(
            result,
            Err(WorkerError::NoSuchWorker {
                worker: 1,
                count: 1
            })
        )
    };
    assert!(missing(workers.send(1, b"", None)));
    assert!(missing(workers.kill(1)));
    assert!(missing(workers.restart(1, None).map(drop)));
    assert_eq!(workers.pid(1), None);

    let none = spawn(0, &Role::Echo).start().expect("no worker is fine");
    assert!(none.is_empty());
    assert_eq!(none.recv_any(None), None);
    assert_eq!(none.shutdown(Some(longest())), []);
}

fn expect_line(heard: &Receiver<String>, expected: &str) {
    let deadline = Instant::now() + longest();
    while let Ok(line) = heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        if line == expected {
            return;
        }
    }
    panic!("the line {expected:?} did not come");
}
