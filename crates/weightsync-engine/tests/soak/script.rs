//! A test as a script: processes, what they are told, and what they answer.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use tempfile::TempDir;
use weightsync_engine::worker::{Event, Spawn, Workers};
use weightsync_engine::{InitInfo, Tensors};

use crate::Role;
use crate::leaks::{self, Census, TOKEN};
use crate::patience::patience;
use crate::process::{Answer, Command, Lead};
use crate::scale::longest;

/// The process that leads, in every script.
pub const TRAINER: usize = 0;

/// The processes of one script. Dropping it ends them.
pub struct Script {
    workers: Workers,
    census: Census,
    dir: TempDir,
    lead: Lead,
    dead: Vec<usize>,
}

impl Script {
    /// Starts a trainer of `words` words and `slots` slots, and `workers`
    /// workers that have joined it as 0, 1, … and hold its first version. The
    /// worker numbered n is process n + 1.
    pub fn open(name: &str, words: u64, slots: u8, workers: u32) -> Self {
        let script = Self::start(name, words, slots, 1 + workers as usize);
        script.send(TRAINER, &script.lead(workers));
        (0..workers).for_each(|worker| script.join(worker));
        // The trainer is done once the last of them is there.
        for _ in 0..=workers {
            assert_eq!(script.any().1, Answer::Done);
        }
        for process in 1..=workers as usize {
            let first = Answer::Version { number: 1, word: 1 };
            assert_eq!(script.ask(process, &Command::Receive(None)), first);
        }
        script
    }

    /// Starts so many processes, and tells them nothing yet.
    pub fn start(name: &str, words: u64, slots: u8, processes: usize) -> Self {
        let token = format!("{name}-{}", std::process::id());
        let census = Census::take(&token);
        let dir = tempfile::tempdir().expect("a temporary directory");
        let lead = Lead {
            model: token.clone(),
            run_dir: dir.path().join("run"),
            words,
            slots,
        };
        let group = Spawn::this_program()
            .expect("this program has a path")
            .count(processes)
            .init_value(&Role::Process)
            .expect("a role has a postcard form")
            .env(TOKEN, token)
            .grace(longest());
        Self {
            workers: group.start().expect("the processes start"),
            census,
            dir,
            lead,
            dead: Vec::new(),
        }
    }

    /// The command that makes a process the trainer of this script.
    pub fn lead(&self, workers: u32) -> Command {
        Command::Lead {
            setup: self.lead.clone(),
            workers,
        }
    }

    /// How a process leads workers of its own.
    pub fn sub(&self) -> Lead {
        Lead {
            run_dir: self.dir.path().join("sub"),
            ..self.lead.clone()
        }
    }

    /// Tells a process something without waiting for its answer.
    pub fn send(&self, process: usize, command: &Command) {
        let frame = postcard::to_stdvec(command).expect("a command has a postcard form");
        self.workers
            .send(process, &frame, Some(longest()))
            .expect("it listens");
    }

    /// The answer of one process; no other may have anything to say before.
    pub fn answer(&self, process: usize) -> Answer {
        let (from, answer) = self.any();
        assert_eq!(from, process, "it said {answer:?}");
        answer
    }

    /// The answers of all these processes, in their order.
    pub fn answers<const N: usize>(&self, processes: [usize; N]) -> [Answer; N] {
        let mut answers = [const { None }; N];
        for _ in processes {
            let (from, answer) = self.any();
            let place = processes.iter().position(|process| *process == from);
            answers[place.expect("a process that was asked")] = Some(answer);
        }
        answers.map(|answer| answer.expect("each answers once"))
    }

    /// The next answer, from any process.
    pub fn any(&self) -> (usize, Answer) {
        match self.workers.recv_any(Some(longest())) {
            Some((from, Event::Frame(frame))) => {
                (from, postcard::from_bytes(&frame).expect("an answer"))
            }
            Some((from, Event::Exited(exit))) => panic!("process {from}: {exit}"),
            other => panic!("{other:?}; {:#?}", self.doings()),
        }
    }

    /// Tells a process something and waits for its answer.
    pub fn ask(&self, process: usize, command: &Command) -> Answer {
        self.send(process, command);
        self.answer(process)
    }

    pub fn pid(&self, process: usize) -> u32 {
        self.workers.pid(process).expect("it runs")
    }

    /// Copies of every descriptor a process has.
    pub fn copies(&self, process: usize) -> Vec<OwnedFd> {
        let pid = self.pid(process);
        let process = Pid::from_raw(pid as i32).expect("it runs");
        let process = pidfd_open(process, PidfdFlags::empty()).expect("it runs");
        let numbers = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
        let numbers = numbers.map(|entry| {
            let name = entry.expect("a descriptor").file_name();
            name.to_string_lossy().parse().expect("a number")
        });
        let copies = numbers.map(|number: i32| {
            let copy = pidfd_getfd(&process, number, PidfdGetfdFlags::empty());
            copy.expect("it stands still")
        });
        copies.collect()
    }

    /// Kills a process, and waits until it is dead; meanwhile these others answer.
    pub fn kill<const N: usize>(&mut self, process: usize, others: [usize; N]) -> [Answer; N] {
        self.workers.kill(process).expect("it is there");
        self.dead.push(process);
        let (mut answers, mut dead) = ([const { None }; N], false);
        while !dead || answers.contains(&None) {
            match self.workers.recv_any(Some(longest())) {
                Some((from, Event::Exited(exit))) if from == process => {
                    assert_eq!(exit.signal, Some(Signal::KILL.as_raw()), "{exit}");
                    dead = true;
                }
                Some((from, Event::Frame(frame))) if others.contains(&from) => {
                    let place = others.iter().position(|other| *other == from);
                    let answer = postcard::from_bytes(&frame).expect("an answer");
                    answers[place.expect("just found")] = Some(answer);
                }
                other => panic!("{other:?}; {:#?}", self.doings()),
            }
        }
        answers.map(|answer| answer.expect("all have answered"))
    }

    /// A fresh process in the place of a dead one.
    pub fn raise(&mut self, process: usize) {
        self.workers.restart(process, None).expect("it starts");
        self.dead.retain(|dead| *dead != process);
    }

    /// Waits until a process sleeps in the kernel.
    pub fn until_it_sleeps(&self, process: usize) {
        self.until_state(process, 'S');
    }

    /// Tells worker number `worker` to join the trainer.
    fn join(&self, worker: u32) {
        let command = Command::Join {
            info: self.info(),
            worker,
            sleeps: worker % 2 == 1,
        };
        self.send(worker as usize + 1, &command);
    }

    /// Ends everything in order; nothing may be left.
    pub fn close(self) {
        let Self {
            workers,
            census,
            dir,
            lead,
            dead,
        } = self;
        for (process, exit) in workers.shutdown(Some(longest())).into_iter().enumerate() {
            assert!(
                exit.is_success() || dead.contains(&process),
                "process {process} {exit}\n{}",
                exit.stderr_text()
            );
        }
        drop(workers);
        census.assert_nothing_left();
        leaks::assert_tidy(&lead.run_dir);
        let sub = dir.path().join("sub");
        if sub.exists() {
            leaks::assert_tidy(&sub);
        }
        drop(dir);
    }

    /// What every process is doing.
    fn doings(&self) -> Vec<String> {
        let pids = (0..self.workers.len()).filter_map(|process| self.workers.pid(process));
        pids.map(leaks::describe).collect()
    }

    /// What the workers of this script need to join.
    pub fn info(&self) -> InitInfo {
        info_of(&self.lead)
    }

    fn until_state(&self, process: usize, wanted: char) {
        let stat = PathBuf::from(format!("/proc/{}/stat", self.pid(process)));
        let deadline = Instant::now() + longest();
        loop {
            let line = std::fs::read_to_string(&stat).expect("it runs");
            let state = line
                .rsplit(") ")
                .next()
                .and_then(|rest| rest.chars().next());
            if state == Some(wanted) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{}",
                leaks::describe(self.pid(process))
            );
            std::thread::yield_now();
        }
    }
}

/// What the workers of a process that leads need to join.
pub fn info_of(lead: &Lead) -> InitInfo {
    let setup = lead.setup(&Tensors::new());
    setup.expect("the run directory is there").init_info()
}

/// What is a moment for a machine, however busy: far below every deadline.
pub fn prompt_limit() -> Duration {
    patience(1)
}
