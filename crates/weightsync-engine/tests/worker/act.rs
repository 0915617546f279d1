//! What this binary does when it is run as a worker or as a trainer.

use std::io::{BufRead, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, hint, process, thread};

use rustix::process::{
    Signal, getpgrp, getpid, kill_process, parent_process_death_signal,
    set_parent_process_death_signal,
};
use serde::{Deserialize, Serialize};
use weightsync_engine::interruptible;
use weightsync_engine::worker::{self, Event, Spawn, WorkerError, WorkerProcess, Workers};

use crate::leaks;
use crate::stage::{Gate, longest, spawn};

/// Makes a trainer of a process; its value says what its workers do. These get the value "none".
pub const TRAINER: &str = "WORKER_TEST_TRAINER";
/// A gate to wait at before a worker attaches.
pub const GATE: &str = "WORKER_TEST_GATE";
/// Makes a worker misbehave instead of attaching.
pub const ROGUE: &str = "WORKER_TEST_ROGUE";
/// Makes a child of a worker say what it takes itself for.
const GRANDCHILD: &str = "WORKER_TEST_GRANDCHILD";

/// What a worker does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Role {
    /// Sends back what it receives, until the end.
    Echo,
    /// Sends its index, waits for the end, ignores it and computes on.
    Spin,
    /// Spins, without the kernel's death signal: the lifeline alone ends it.
    SpinWithoutSignal,
    /// Sends its index and stops itself: its lifeline thread stands still too.
    Stop,
    /// Sends so many frames of so many bytes, each beginning with its number, writing the number
    /// to standard error first; then echoes.
    Flood { frames: u32, bytes: usize },
    /// Sends numbered frames of so many bytes until a send is interrupted, says so on standard
    /// error, and sends how many there are.
    Impatient { bytes: usize },
    /// Writes to standard error, sends one frame, and echoes.
    Speak(String),
    /// Echoes, but only after the gate opened.
    Deaf(PathBuf),
    /// Receives nothing before the trainer closed the pipe, then writes to standard error how many
    /// frames were left.
    Hoard,
    /// Panics with this text.
    Panic(String),
    /// Ends with this status.
    Exit(i32),
    /// Sends what a process can know about itself, then echoes.
    Describe,
    /// Starts a child that sleeps, sends its process id, and waits for it.
    Parent,
    /// Sends a last frame after the trainer closed the pipe, if it can, and says how that went.
    LastWords,
}

/// Plays the part this process was started for; `false` if it is the test runner.
pub fn perform() -> bool {
    match env::var(ROGUE).as_deref() {
        Ok("forgetful") => return forget_to_attach(),
        Ok(rogue) => return misbehave(rogue),
        Err(_) => {}
    }
    if let Some(gate) = env::var_os(GATE)
        && env::var_os(TRAINER).is_some_and(|role| role == "none")
    {
        Gate::pass(Path::new(&gate));
        // Whatever it is told, it never ends on its own.
        let _worker = worker::current();
        spin();
    }
    if env::var_os(GRANDCHILD).is_some() {
        print!("{:?}", worker::current().map(|worker| worker.is_some()));
        return true;
    }
    match worker::current() {
        Ok(None) => {}
        Ok(Some(worker)) => {
            // A closed pipe is the usual end of a play.
            let _ = play(&worker);
            return true;
        }
        Err(error) => {
            eprintln!("{error}");
            process::exit(4);
        }
    }
    match env::var(TRAINER) {
        Ok(role) => train(&role),
        Err(_) => return false,
    }
    true
}

fn play(worker: &WorkerProcess) -> Result<(), WorkerError> {
    match worker.init_value()? {
        Role::Echo => {}
        Role::Spin => {
            worker.send(&index(worker))?;
            spin();
        }
        Role::SpinWithoutSignal => {
            set_parent_process_death_signal(None).expect("it can be switched off");
            worker.send(&index(worker))?;
            spin();
        }
        Role::Stop => {
            worker.send(&index(worker))?;
            kill_process(getpid(), Signal::STOP).expect("it can stop itself");
        }
        Role::Flood { frames, bytes } => {
            for number in 0..frames {
                eprintln!("{number}");
                let mut frame = vec![number as u8; bytes];
                frame[..4].copy_from_slice(&number.to_le_bytes());
                worker.send(&frame)?;
            }
            eprintln!("done");
        }
        Role::Impatient { bytes } => {
            let mut number = 0_u32;
            let ended = loop {
                let mut frame = vec![number as u8; bytes];
                frame[..4].copy_from_slice(&number.to_le_bytes());
                match interruptible(|| true, || worker.send(&frame)) {
                    Ok(()) => number += 1,
                    Err(ended) => break ended,
                }
            };
            // What was begun counts as sent.
            match ended {
                WorkerError::Interrupted { begun } => number += u32::from(begun),
                ended => return Err(ended),
            }
            let nothing = interruptible(|| true, || worker.recv(None));
            assert!(
                matches!(nothing, Err(WorkerError::Interrupted { .. })),
                "{nothing:?}"
            );
            eprintln!("interrupted");
            worker.send(&number.to_le_bytes())?;
        }
        Role::Speak(text) => {
            eprintln!("{text}");
            worker.send(b"spoken")?;
        }
        Role::Deaf(gate) => {
            worker.send(b"deaf")?;
            Gate::pass(&gate);
        }
        Role::Hoard => {
            worker.send(b"ready")?;
            while !worker.is_closed() {
                thread::yield_now();
            }
            let mut left = 0;
            while worker.recv(None)?.is_some() {
                left += 1;
            }
            eprintln!("{left}");
        }
        Role::Panic(text) => panic!("{text}"),
        Role::Exit(status) => process::exit(status),
        Role::Describe => worker.send(describe(worker).as_bytes())?,
        Role::Parent => {
            let mut child = Command::new("sleep")
                .arg("1000")
                .spawn()
                .expect("sleep is there");
            let sent = worker.send(&child.id().to_le_bytes());
            child.wait().expect("it is our child");
            sent?;
        }
        Role::LastWords => {
            worker.send(b"first")?;
            assert_eq!(worker.recv(None)?, None);
            assert!(worker.is_closed());
            eprintln!("{:?}", worker.send(b"last"));
        }
    }
    while let Some(frame) = worker.recv(None)? {
        worker.send(&frame)?;
    }
    Ok(())
}

fn index(worker: &WorkerProcess) -> Vec<u8> {
    vec![worker.index() as u8]
}

fn spin() -> ! {
    loop {
        hint::spin_loop();
    }
}

/// Facts a test compares, one a line.
fn describe(worker: &WorkerProcess) -> String {
    let mut stdin = Vec::new();
    std::io::stdin()
        .read_to_end(&mut stdin)
        .expect("standard input can be read");
    let grandchild = Command::new("/proc/self/exe")
        .env(GRANDCHILD, "1")
        .output()
        .expect("this program can be run again");
    let sockets = fs::read_dir("/proc/self/fd")
        .expect("there is /proc")
        .flatten();
    let sockets = sockets
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter(|target| target.to_string_lossy().starts_with("socket:"));
    [
        format!("{} of {}", worker.index(), worker.count()),
        format!("leads its group: {}", getpgrp() == getpid()),
        format!("bytes on standard input: {}", stdin.len()),
        format!("sockets: {}", sockets.count()),
        format!(
            "too long: {}",
            worker.send(&vec![0; worker.max_frame() + 1]).is_err()
        ),
        format!(
            "a second time: {:?}",
            worker::current().err().map(|error| error.to_string())
        ),
        format!(
            "a child is a worker: {}",
            String::from_utf8_lossy(&grandchild.stdout)
        ),
        format!(
            "name: {}",
            fs::read_to_string("/proc/self/comm")
                .unwrap_or_default()
                .trim()
        ),
        format!(
            "killed with its trainer: {}",
            parent_process_death_signal() == Ok(Some(Signal::KILL))
        ),
    ]
    .join("\n")
}

/// Breaks the rules of the pipe, which is standard input here.
fn misbehave(rogue: &str) -> bool {
    let bytes: &[u8] = match rogue {
        "length" => &[0xff, 0xff, 0xff, 0xff, 3],
        "kind" => &[0, 0, 0, 0, 77],
        "turn" => &[0, 0, 0, 0, 2],
        "close" => &[],
        rogue => panic!("unknown rogue {rogue}"),
    };
    rustix::io::write(std::io::stdin().as_fd(), bytes).expect("the pipe takes it");
    thread::park();
    true
}

/// Does what a trainer does without having asked whether it is one.
fn forget_to_attach() -> bool {
    match spawn(1, &Role::Echo).start() {
        Err(WorkerError::NotTaken) => process::exit(33),
        other => panic!("{other:?}"),
    }
}

fn train(role: &str) {
    match role {
        "idle" => hold(spawn(2, &Role::Echo), false),
        "spinning" => hold(spawn(2, &Role::Spin), true),
        "spinning without a signal" => hold(spawn(2, &Role::SpinWithoutSignal), true),
        "stopped" => hold(spawn(2, &Role::Stop), true),
        // Nobody reads after the first frames: both are stuck in a full pipe soon.
        "sending" => hold(
            spawn(
                2,
                &Role::Flood {
                    frames: 10_000,
                    bytes: 1 << 16,
                },
            ),
            true,
        ),
        "behind" => hold(Spawn::this_program().expect("a path").count(2), false),
        "deserting" => desert(),
        "leaking" => leaks::rounds(),
        role => panic!("unknown role {role}"),
    }
}

/// Starts workers, waits until each has sent a frame where they do, prints their process ids, and
/// lives until told otherwise.
fn hold(spawn: Spawn, wait: bool) {
    let workers = spawn.env(TRAINER, "none").start().expect("workers start");
    let mut silent: Vec<usize> = if wait {
        (0..workers.len()).collect()
    } else {
        vec![]
    };
    while !silent.is_empty() {
        match workers.recv_any(Some(longest())) {
            Some((worker, Event::Frame(_))) => silent.retain(|&other| other != worker),
            other => panic!("{other:?}"),
        }
    }
    print_pids(&workers);
    obey();
}

/// Starts workers on a thread that ends.
fn desert() {
    let workers = thread::spawn(|| spawn(2, &Role::Echo).start().expect("workers start"))
        .join()
        .expect("the thread ends");
    print_pids(&workers);
    obey();
    for worker in 0..2 {
        workers
            .send(worker, b"still there?", Some(longest()))
            .expect("it is there");
        assert!(matches!(
            workers.recv_any(Some(longest())),
            Some((_, Event::Frame(_)))
        ));
    }
    assert!(
        workers
            .shutdown(Some(longest()))
            .iter()
            .all(|exit| exit.is_success())
    );
}

fn print_pids(workers: &Workers) {
    let pids = (0..workers.len()).map(|worker| workers.pid(worker).expect("it runs").to_string());
    println!("{}", pids.collect::<Vec<_>>().join(" "));
    std::io::stdout().flush().expect("somebody reads");
}

/// Waits for the word to abort, or for the end of standard input.
fn obey() {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .expect("a line of text");
    if line.trim() == "abort" {
        process::abort();
    }
}
