//! `weightsync demo` as a user meets it: the real binary, its files, its exit
//! codes, and what is left after it is killed.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, ChildStdout, Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};

/// More than an unoptimised build on a busy machine needs.
fn longest() -> Duration {
    crate::patience::patience(30)
}

#[test]
fn demo_learns_and_writes_the_curve_and_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let taken = dir.path().join("weightsync-demo");
    let out = dir.path().join("weightsync-demo-2");
    fs::create_dir(&taken).unwrap();
    let demo = demo(
        &["--seed", "2", "--goal", "200", "--time-limit", "600"],
        None,
    )
    .current_dir(dir.path())
    .output();
    let Output {
        status,
        stdout,
        stderr,
    } = demo.unwrap();
    let (stdout, stderr) = (text(&stdout), text(&stderr));
    assert!(status.success(), "{status}\n{stdout}\n{stderr}");
    assert_eq!(stderr, "");
    for word in [
        "goal reached",
        "frames/s",
        "send → applied",
        "workers 2 2 2 2",
    ] {
        assert!(stdout.contains(word), "no {word:?} in\n{stdout}");
    }

    let svg = fs::read_to_string(out.join("learning.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("mean of the last 100 episodes"));

    let bytes = fs::read(out.join("policy.safetensors")).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let notes: HashMap<String, String> = metadata.metadata().clone().unwrap();
    let version = &notes["weightsync.version"];
    assert!(stdout.contains(&format!("policy.safetensors (version {version})")));
    assert!(metadata.tensors().contains_key("actor.2.weight"));
    assert_eq!(fs::read_dir(&out).unwrap().count(), 2, "no other file");
    assert_eq!(fs::read_dir(&taken).unwrap().count(), 0, "somebody else's");
}

#[test]
fn a_goal_missed_in_time_is_said_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("results");
    let demo = demo(&["--time-limit", "0"], Some(&out)).output().unwrap();
    assert_eq!(demo.status.code(), Some(1));
    assert!(text(&demo.stdout).contains("goal NOT reached"));
    assert!(!out.exists());
}

#[test]
fn demo_refuses_an_unwritable_folder_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for out in [&file, &file.join("results")] {
        let demo = demo(&["--time-limit", "600"], Some(out)).output().unwrap();
        assert_eq!(demo.status.code(), Some(1), "{}", out.display());
        assert_eq!(text(&demo.stdout), "", "before the training");
        let named = format!("{}: not a directory", file.display());
        let stderr = text(&demo.stderr);
        assert!(stderr.contains(&named), "{stderr}");
    }
}

#[test]
fn demo_says_task_algorithm_and_staleness() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("results");
    let args = "--env acrobot --algo dqn --async --workers 2".split(' ');
    let args: Vec<&str> = args.collect();
    let mut running = Running::start(&mut demo(&args, Some(&out)));
    let line = running.line_with("send → applied");
    for word in ["Acrobot-v1, DQN", "frames/s", "workers ", "staleness "] {
        assert!(line.contains(word), "no {word:?} in {line}");
    }
    running.signal(Signal::INT);
    assert_eq!(running.end(), Some(130));
}

#[test]
fn demo_trains_on_an_environment_of_gymnasium() {
    let dir = tempfile::tempdir().unwrap();
    let python = std::env::var("WEIGHTSYNC_GYM_PYTHON").unwrap_or_else(|_| "python3".into());
    let args = [
        "--env",
        "gym:CartPole-v1",
        "--python",
        &python,
        "--workers",
        "2",
    ];
    let mut running = Running::start(&mut demo(&args, Some(&dir.path().join("results"))));
    let line = running.line_with("send → applied");
    assert!(line.contains("CartPole-v1, PPO"), "{line}");
    running.signal(Signal::INT);
    assert_eq!(running.end(), Some(130));
}

#[test]
fn demo_refuses_in_a_line_what_cannot_be() {
    let cases = [
        ("--env pendulum --algo dqn", "use --algo ppo"),
        (
            "--env gym:CartPole-v1 --python /no/such/python",
            "`/no/such/python` cannot be run",
        ),
    ];
    for (args, expected) in cases {
        let args: Vec<&str> = args.split(' ').collect();
        let demo = demo(&args, None).output().unwrap();
        assert_eq!(demo.status.code(), Some(1), "{args:?}");
        assert_eq!(text(&demo.stdout), "", "before the training");
        let stderr = text(&demo.stderr);
        assert!(stderr.contains(expected), "{stderr}");
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    }
    let unknown = demo(&["--env", "cart"], None).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).contains("gym:ID"));
}

#[test]
fn a_worker_that_hangs_does_not_hold_ctrl_c() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("results");
    let mut running = Running::start(&mut demo(&["--workers", "2"], Some(&out)));
    running.line_with("send → applied");
    let workers = running.workers(2);
    kill_process(workers[1].0, Signal::STOP).unwrap();
    // The first batch without it is over: the next wait is for it, too.
    running.line_with("workers [1] delivered no frames");
    let begun = Instant::now();
    running.signal(Signal::INT);
    assert_eq!(running.end(), Some(130));
    assert!(begun.elapsed() < longest());
    assert!(!out.exists());
    all_end(&workers);
}

#[test]
fn ctrl_c_ends_it_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("results");
    let mut running = Running::start(&mut demo(&["--workers", "3"], Some(&out)));
    running.line_with("send → applied");
    let workers = running.workers(3);
    running.signal(Signal::INT);
    assert_eq!(running.end(), Some(130));
    assert!(!out.exists());
    all_end(&workers);
}

#[test]
fn demo_reports_a_killed_worker_and_trains_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut running = Running::start(&mut demo(&["--workers", "2"], Some(dir.path())));
    running.line_with("send → applied");
    let workers = running.workers(2);
    let victim = workers[0].0;
    kill_process(victim, Signal::KILL).unwrap();
    let report = running.line_with("took its place");
    assert!(report.contains("was killed (signal 9)"), "{report}");
    let named = format!("process {} ", victim.as_raw_nonzero());
    assert!(report.contains(&named), "{report}");

    // Both workers have the trainer's version again.
    let line = running.line_with("; workers ");
    let (_, versions) = line.split_once("version ").unwrap();
    let (trainer, workers) = versions.split_once("; workers ").unwrap();
    let workers: Vec<&str> = workers.split_whitespace().take(2).collect();
    assert_eq!(workers, [trainer, trainer], "{line}");
    running.signal(Signal::INT);
    assert_eq!(running.end(), Some(130));
}

#[test]
fn killing_the_demo_leaves_no_worker_and_no_folder() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("results").join("of today");
    let mut running = Running::start(&mut demo(&[], Some(&out)));
    running.line_with("send → applied");
    let workers = running.workers(4);
    running.signal(Signal::KILL);
    assert_eq!(running.end(), None, "no exit code after SIGKILL");
    all_end(&workers);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

fn demo(args: &[&str], out: Option<&Path>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightsync"));
    command.arg("demo").args(args);
    if let Some(out) = out {
        command.arg("--out").arg(out);
    }
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A demo whose output is read line by line.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command
            // It must not give up while it is tested.
            .args(["--time-limit", "600"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn line_with(&mut self, word: &str) -> String {
        let mut seen = String::new();
        let begun = Instant::now();
        loop {
            let mut line = String::new();
            let read = self.lines.read_line(&mut line).unwrap();
            if line.contains(word) {
                return line;
            }
            seen += &line;
            assert!(
                read > 0 && begun.elapsed() < longest(),
                "no {word:?} in\n{seen}"
            );
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its worker processes, with handles that outlast them.
    fn workers(&self, count: usize) -> Vec<(Pid, OwnedFd)> {
        let mut found = Vec::new();
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap() {
            let children = fs::read_to_string(task.unwrap().path().join("children")).unwrap();
            for pid in children.split_whitespace() {
                let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
                found.push((pid, pidfd_open(pid, PidfdFlags::empty()).unwrap()));
            }
        }
        assert_eq!(found.len(), count);
        found
    }

    /// Waits for its end and that of everyone who shares its output; the exit
    /// code, if it was not a signal that ended it.
    fn end(&mut self) -> Option<i32> {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After a failed assertion; otherwise it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn all_end(workers: &[(Pid, OwnedFd)]) {
    let patience = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    for (pid, handle) in workers {
        let mut ended = [PollFd::new(handle, PollFlags::IN)];
        let count = poll(&mut ended, Some(&patience)).unwrap();
        assert_eq!(count, 1, "{pid:?} lives");
    }
}
