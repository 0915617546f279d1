//! What the tests stand on: waiting for processes with deadlines, gates, trainers to be killed.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tempfile::TempDir;
use weightsync_engine::worker::{Event, Exit, Spawn, Workers};

use crate::act::{Role, TRAINER};
use crate::patience::patience;

/// Longer than anything takes on a busy machine.
pub fn longest() -> Duration {
    patience(10)
}

/// How long something is watched that must not happen.
pub const WHILE: Duration = Duration::from_millis(150);

/// A group of workers that play `role`.
pub fn spawn(count: usize, role: &Role) -> Spawn {
    Spawn::this_program()
        .expect("this program has a path")
        .count(count)
        .init_value(role)
        .expect("a role has a postcard form")
}

/// The next event, which must come, as a frame.
pub fn frame(workers: &Workers) -> (usize, Vec<u8>) {
    match workers.recv_any(Some(longest())) {
        Some((worker, Event::Frame(frame))) => (worker, frame),
        other => panic!("a frame was expected, not {other:?}"),
    }
}

/// The next event, which must come, as an exit.
pub fn exit(workers: &Workers) -> (usize, Exit) {
    match workers.recv_any(Some(longest())) {
        Some((worker, Event::Exited(exit))) => (worker, exit),
        other => panic!("an exit was expected, not {other:?}"),
    }
}

/// Something to watch a process of any parent by.
pub fn watch(pid: u32) -> OwnedFd {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pidfd_open(pid.expect("a process id"), PidfdFlags::empty()).expect("the process is there")
}

/// Whether the process ends within `timeout`.
pub fn ends(pidfd: &OwnedFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).expect("a short time");
    let ready = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&timeout));
    ready.expect("a pidfd can be polled") == 1
}

/// A fifo at which another process waits until it is opened.
pub struct Gate {
    _dir: TempDir,
    path: PathBuf,
    end: File,
}

impl Gate {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("gate");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a fifo");
        // For reading too, so that opening it does not wait for the other side.
        let end = OpenOptions::new().read(true).write(true).open(&path);
        Self {
            _dir: dir,
            path,
            end: end.expect("the fifo opens"),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets `processes` of those who wait through.
    pub fn open(&mut self, processes: usize) {
        self.end
            .write_all(&vec![1; processes])
            .expect("the fifo takes it");
    }

    /// Waits at the gate at `path`.
    pub fn pass(path: &Path) {
        let mut fifo = File::open(path).expect("the gate is there");
        fifo.read_exact(&mut [0]).expect("the gate opens");
    }
}

/// A trainer in a process of its own, to be killed.
pub struct Trainer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Trainer {
    /// Starts a trainer whose workers play `role`, with `envs` for itself and them.
    pub fn start(role: &str, envs: &[(&str, &Path)]) -> Self {
        let mut child = Command::new("/proc/self/exe")
            .env(TRAINER, role)
            .envs(envs.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be run again");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Self {
            child,
            stdin,
            stdout,
        }
    }

    /// The next line it prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line of text");
        line.trim().to_owned()
    }

    /// Its workers, watched. It prints their process ids once they do what they are to do.
    pub fn workers(&mut self) -> Vec<OwnedFd> {
        let line = self.line();
        let pids = line
            .split_whitespace()
            .map(|pid| pid.parse().expect("a process id"));
        pids.map(watch).collect()
    }

    /// Copies of all its sockets.
    pub fn sockets(&self) -> Vec<OwnedFd> {
        let pid = self.child.id();
        let trainer = watch(pid);
        let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("there is /proc");
        files
            .flatten()
            .filter(|file| {
                let target = fs::read_link(file.path()).unwrap_or_default();
                target.to_string_lossy().starts_with("socket:")
            })
            .map(|file| {
                let number = file
                    .file_name()
                    .to_string_lossy()
                    .parse()
                    .expect("a number");
                pidfd_getfd(&trainer, number, PidfdGetfdFlags::empty()).expect("it is our child's")
            })
            .collect()
    }

    /// Ends it, without a chance to clean up.
    pub fn kill(mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it can be reaped");
    }

    /// Tells it to abort.
    pub fn abort(mut self) {
        self.stdin.write_all(b"abort\n").expect("it reads");
        let status = self.child.wait().expect("it can be reaped");
        assert!(!status.success());
    }

    /// Waits for its own end, which must be a success.
    pub fn finish(mut self) {
        drop(self.stdin);
        let status = self.child.wait().expect("it can be reaped");
        assert!(status.success(), "the trainer failed: {status}");
    }
}
