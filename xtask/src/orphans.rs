//! Processes that outlive the test that started them: each is ended, and the run lists it.
//!
//! xtask adopts what its steps leave behind (it is their *subreaper*). A process is ended only where
//! its environment has the mark of this step and that of a test, so nothing that another program
//! started, or a compiler, is touched.
//! Tests kill processes on purpose and look at what the children of these do, so a process that was
//! adopted lives on while its test runs. Ctrl-C ends the run once nothing of the step is left.

use std::fmt;
use std::fs;
use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register_conditional_default, register_usize};

/// Marks what a step starts. Its value differs between steps.
const MARK: &str = "WEIGHTSYNC_TEST_STEP";

/// Names the test in the environment of what nextest starts; one of each attempt to run a test.
const ATTEMPT: &str = "NEXTEST_ATTEMPT_ID";

/// What a report calls a test of nextest.
const TEST: &str = "NEXTEST_TEST_NAME";

/// Names the test in the environment of what Python's tests start.
const PYTHON_TEST: &str = "WEIGHTSYNC_TEST";

/// How often a running step is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// How long a process may take to end once its step has.
const ENDING: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 20_000 });

/// How long a step may take to end after Ctrl-C, before it is told again, and after that.
const STOPPING: Duration = Duration::from_secs(5);

/// What Ctrl-C and SIGTERM do.
static STOP: LazyLock<Stop> = LazyLock::new(Stop::new);

/// The signal that has come, or 0. Where no step is watched, a signal ends this process at once.
struct Stop {
    signal: Arc<AtomicUsize>,
    at_once: Arc<AtomicBool>,
}

impl Stop {
    fn new() -> Self {
        let stop = Self {
            signal: Arc::default(),
            at_once: Arc::new(AtomicBool::new(true)),
        };
        let ignored = ignored_signals();
        for signal in [SIGINT, SIGTERM] {
            // A shell has what it runs in the background ignore Ctrl-C.
            if ignored >> (signal - 1) & 1 == 1 {
                continue;
            }
            let (come, at_once) = (stop.signal.clone(), stop.at_once.clone());
            let registered = register_conditional_default(signal, at_once)
                .and_then(|_| register_usize(signal, come, signal as usize));
            if let Err(error) = registered {
                eprintln!("warning: Ctrl-C leaves processes of tests behind: {error}");
            }
        }
        stop
    }

    fn signal(&self) -> Option<usize> {
        Some(self.signal.load(Ordering::SeqCst)).filter(|signal| *signal > 0)
    }
}

fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Looks after what one step starts.
pub struct Watch {
    mark: String,
    ended: Mutex<Vec<String>>,
}

impl Watch {
    /// Marks the step, which has not been started.
    pub fn begin(command: &mut Command) -> Self {
        static STEPS: AtomicUsize = AtomicUsize::new(0);
        STOP.at_once.store(false, Ordering::SeqCst);
        let own = rustix::process::getpid();
        // Only Linux has it. Without it a step leaves behind what it always did.
        #[cfg(target_os = "linux")]
        if let Err(error) = rustix::process::set_child_subreaper(Some(own)) {
            eprintln!("warning: what tests leave behind is not found: {error}");
        }
        let number = STEPS.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{number}", own.as_raw_nonzero());
        command.env(MARK, &mark);
        Self {
            mark,
            ended: Mutex::default(),
        }
    }

    /// Waits for the step. What a test leaves behind is ended meanwhile.
    pub fn until_it_ends(&self, step: &mut Child) -> io::Result<ExitStatus> {
        let root = step.id();
        std::thread::scope(|scope| {
            let (stop, stopped) = channel::<()>();
            scope.spawn(move || {
                let mut asked = None;
                while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    self.sweep(Some(root));
                    if let Some(signal) = STOP.signal() {
                        stop_step(root, signal, &mut asked);
                    }
                }
            });
            let status = step.wait();
            drop(stop);
            status
        })
    }

    /// Ends what is left once the step has ended, and says what was ended. Ends this process where a
    /// signal asked for it.
    pub fn end(self) -> Vec<String> {
        // What serves a process, as multiprocessing's helpers do, ends a moment after it.
        let until = Instant::now() + ENDING;
        while self.has_left() && Instant::now() < until {
            std::thread::sleep(LOOK / 10);
        }
        // The children of a process that is ended are adopted in turn.
        while self.sweep(None) > 0 {}
        STOP.at_once.store(true, Ordering::SeqCst);
        if let Some(signal) = STOP.signal() {
            // As a shell says that a signal ended a command.
            std::process::exit(128 + signal as i32);
        }
        self.ended
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a process of this step is there. Those that have ended are reaped.
    fn has_left(&self) -> bool {
        let own = std::process::id();
        let adopted = |process: &Process| process.parent == own;
        let mut left = false;
        for process in processes().into_iter().filter(adopted) {
            match process.zombie {
                true => process.reap(WaitOptions::NOHANG),
                false => left |= self.started(&process),
            }
        }
        left
    }

    /// Whether a test of this step has started it; or the step itself, which a signal has ended.
    fn started(&self, process: &Process) -> bool {
        let of_step = process.variable(MARK) == Some(&self.mark);
        of_step && (process.is_of_a_test() || STOP.signal().is_some())
    }

    /// Ends the adopted processes whose test has ended, and returns their number. `step` is the
    /// command that runs, which is this process's own child; without one, every test has ended.
    fn sweep(&self, step: Option<u32>) -> usize {
        let own = std::process::id();
        let all = processes();
        let mut ended = 0;
        for process in &all {
            if process.parent != own || Some(process.pid) == step {
                continue;
            }
            if process.zombie {
                process.reap(WaitOptions::NOHANG);
            } else if self.started(process) && (step.is_none() || !process.test_runs(&all)) {
                ended += 1;
                let line = process.to_string();
                eprintln!("── a test left a process behind, which is ended: {line}");
                process.end();
                let mut lines = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push(line);
            }
        }
        ended
    }
}

/// Has a step end. A terminal's Ctrl-C has told it already; another signal came to this process alone.
fn stop_step(step: u32, signal: usize, asked: &mut Option<(Instant, usize)>) {
    let (since, times) =
        asked.get_or_insert((Instant::now(), usize::from(signal == SIGINT as usize)));
    let step = pid(step).filter(|_| since.elapsed() >= STOPPING * *times as u32);
    if let Some(step) = step {
        let how = match *times {
            0 | 1 => Signal::INT,
            _ => Signal::KILL,
        };
        *times += 1;
        // It may have ended meanwhile.
        let _ = kill_process(step, how);
    }
}

/// A process of this machine.
#[derive(Debug)]
struct Process {
    pid: u32,
    parent: u32,
    zombie: bool,
    /// `NAME=value`, as it was started with. Empty for processes of other users.
    environment: Vec<String>,
}

impl Process {
    fn read(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name before it may have any characters.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let zombie = fields.next()? == "Z";
        let parent = fields.next()?.parse().ok()?;
        let environment = words(pid, "environ");
        Some(Self {
            pid,
            parent,
            zombie,
            environment,
        })
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.environment
            .iter()
            .find_map(|one| one.strip_prefix(name)?.strip_prefix('='))
    }

    fn is_of_a_test(&self) -> bool {
        [ATTEMPT, PYTHON_TEST]
            .iter()
            .any(|name| self.variable(name).is_some())
    }

    /// Whether the test that started it runs: a process of the same attempt is a child of nextest.
    /// Python's tests have no attempt. pytest ends what each leaves behind (python/tests/conftest.py),
    /// and what it misses is ended with the step.
    fn test_runs(&self, all: &[Process]) -> bool {
        let Some(attempt) = self.variable(ATTEMPT) else {
            return true;
        };
        let of_attempt = |one: &&Process| one.variable(ATTEMPT) == Some(attempt);
        all.iter().filter(of_attempt).any(|one| {
            let parent = all.iter().find(|other| other.pid == one.parent);
            // nextest itself is of no attempt, and neither is this process.
            parent.is_some_and(|parent| {
                parent.variable(ATTEMPT).is_none() && parent.pid != std::process::id()
            })
        })
    }

    fn end(&self) {
        if let Some(pid) = self.id() {
            // It may have ended meanwhile.
            let _ = kill_process(pid, Signal::KILL);
            self.reap(WaitOptions::empty());
        }
    }

    fn reap(&self, how: WaitOptions) {
        if let Some(pid) = self.id() {
            let _ = waitpid(Some(pid), how);
        }
    }

    fn id(&self) -> Option<Pid> {
        pid(self.pid)
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let command = words(self.pid, "cmdline").join(" ");
        let shown: String = command.chars().take(120).collect();
        write!(f, "process {} ({shown})", self.pid)?;
        match self.variable(TEST) {
            Some(test) => write!(f, " of {test}"),
            None => Ok(()),
        }
    }
}

fn pid(number: u32) -> Option<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw)
}

/// The words of a file of a process that ends each with a zero byte.
fn words(pid: u32, file: &str) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    bytes
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty())
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fn processes() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Process::read(entry.file_name().to_str()?.parse().ok()?))
        .collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Stdio;

    use super::*;
    use crate::step;

    /// Runs a shell as a step, and returns what it left behind.
    fn left_by(script: &str) -> Vec<String> {
        let mut shell = Command::new("sh");
        // This test is one of nextest's, too.
        shell.args(["-c", script]).env_remove(ATTEMPT);
        shell.env(PYTHON_TEST, "a test");
        let (outcome, ended) = step::run_tests("shell", &mut shell);
        outcome.expect("the shell ends well");
        ended
    }

    #[test]
    fn process_that_outlives_its_step_is_ended_and_named() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let path = file.path().display();
        // In a session of its own, as a daemon.
        let ended = left_by(&format!(
            "setsid sleep 86399 & echo $! > {path}; sleep 86398 & disown 2>/dev/null; true"
        ));
        assert_eq!(ended.len(), 2, "{ended:?}");
        assert!(
            ended.iter().any(|line| line.contains("sleep 86399")),
            "{ended:?}"
        );
        let pid = fs::read_to_string(path.to_string()).expect("a number");
        assert!(Process::read(pid.trim().parse().expect("a number")).is_none());
    }

    #[test]
    fn process_of_a_test_that_runs_is_left_alone_until_the_test_ends() {
        // The outer shell stands for nextest, and the inner ones for tests: the first ends and
        // leaves a process, the second does so and goes on until the first one's is gone.
        let file = tempfile::tempdir().expect("a folder");
        let folder = file.path().display();
        let ended = left_by(&format!(
            "cd {folder}
             {ATTEMPT}=one sh -c 'sleep 86397 & echo $! > one'
             {ATTEMPT}=two sh -c '
                 sh -c \"sleep 86396 & echo \\$! > two\"
                 while kill -0 $(cat one) 2>/dev/null; do sleep 0.01; done
                 kill -0 $(cat two) && touch lived'"
        ));
        assert_eq!(ended.len(), 2, "{ended:?}");
        assert!(file.path().join("lived").exists(), "{ended:?}");
    }

    #[test]
    fn run_that_is_terminated_leaves_nothing_behind() {
        /// How long the inner run's processes sleep, which tells them from others.
        const INNER: &str = "WEIGHTSYNC_INNER_RUN";
        if let Ok(long) = std::env::var(INNER) {
            left_by(&format!("setsid sleep {long} & exec sleep {long}"));
            panic!("the signal ends this process");
        }
        let long = (90_000 + std::process::id()).to_string();
        let sleeping = || {
            let all = processes().into_iter();
            all.filter(|one| words(one.pid, "cmdline").contains(&long))
                .collect::<Vec<_>>()
        };
        let test = "orphans::tests::run_that_is_terminated_leaves_nothing_behind";
        let program = std::env::current_exe().expect("this program");
        let mut inner = Command::new(program);
        let inner = inner.args(["--exact", test]).env(INNER, &long);
        let mut inner = inner.stdout(Stdio::null()).spawn().expect("this program");
        while sleeping().len() < 2 && inner.try_wait().expect("its state").is_none() {
            std::thread::sleep(LOOK / 10);
        }
        let number = pid(inner.id()).expect("its number");
        kill_process(number, Signal::TERM).expect("it is not reaped");
        let ended = inner.wait().expect("its end");
        let left = sleeping();
        left.iter().for_each(Process::end);
        assert_eq!(ended.code(), Some(128 + SIGTERM));
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn process_without_the_mark_is_left_alone() {
        let mut sleep = Command::new("setsid");
        let mut other = sleep.args(["sleep", "86395"]).spawn().expect("sleep");
        let ended = left_by("true");
        assert_eq!(ended, Vec::<String>::new());
        assert_eq!(other.try_wait().expect("its state"), None);
        other.kill().expect("killed");
        other.wait().expect("ended");
    }
}
