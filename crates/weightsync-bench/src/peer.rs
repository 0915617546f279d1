//! Another project's implementation, measured round by round: a program that is
//! told over its standard input when to send.
//!
//! It is started with `--scheme S --bytes B --tensors T --workers N --deadline D`
//! and says `{"first_s": …}` when its workers have the first version. It answers
//! each line `round N` with `{"sends_s": [...], "memcpys_s": [...]}`, N times of
//! each in seconds, and leaves at `quit` or at the end of its input.

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// An answer is some kilobytes long; one of this size is none.
const LONGEST_ANSWER: usize = 1 << 20;

/// How much longer than its own deadline the program may take: it should be the
/// one that says why.
const GRACE: Duration = Duration::from_secs(10);

/// How many lines of its complaints are repeated.
const COMPLAINTS: usize = 6;

/// What is started, and how long it may take for an answer.
#[derive(Clone, Debug)]
pub struct Program {
    pub python: PathBuf,
    pub script: PathBuf,
    pub deadline: Duration,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Arrangement<'a> {
    pub scheme: &'a str,
    pub bytes: u64,
    pub tensors: u64,
    pub workers: usize,
}

/// The times of one request: as many sends as were asked for, and as many copies
/// of the same bytes with one thread.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    pub sends: Vec<Duration>,
    pub memcpys: Vec<Duration>,
}

/// The running program. Dropped, it is killed.
pub struct Peer {
    child: Child,
    requests: ChildStdin,
    answers: Lines,
    complaints: File,
    deadline: Duration,
    first: Duration,
}

impl Peer {
    /// Starts it and waits until its workers have the first version.
    pub fn start(program: &Program, what: &Arrangement<'_>) -> Result<Self, Box<dyn Error>> {
        // A file and not a pipe: the program goes on even if no process reads it.
        let complaints = File::from(rustix::fs::memfd_create("complaints", MemfdFlags::CLOEXEC)?);
        let mut child = Command::new(&program.python)
            .arg(&program.script)
            .args(["--scheme", what.scheme])
            .args(["--bytes", &what.bytes.to_string()])
            .args(["--tensors", &what.tensors.to_string()])
            .args(["--workers", &what.workers.to_string()])
            .args(["--deadline", &program.deadline.as_secs().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(complaints.try_clone()?)
            .spawn()
            .map_err(|error| format!("starting {}: {error}", program.python.display()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (requests, answers) = pipes.ok_or("a program started without its pipes")?;
        let mut peer = Self {
            child,
            requests,
            answers: Lines::new(answers),
            complaints,
            deadline: program.deadline + GRACE,
            first: Duration::ZERO,
        };
        peer.first = duration(peer.answer::<Ready>()?.first_s)?;
        Ok(peer)
    }

    /// How long the first version took: connect and the first send.
    pub fn first(&self) -> Duration {
        self.first
    }

    /// Has it send `sends` times.
    pub fn round(&mut self, sends: usize) -> Result<Round, Box<dyn Error>> {
        // Should it be gone, its complaints say more than the broken pipe.
        let _ = writeln!(self.requests, "round {sends}");
        let times: Times = self.answer()?;
        let round = Round {
            sends: durations(&times.sends_s)?,
            memcpys: durations(&times.memcpys_s)?,
        };
        match (round.sends.len(), round.memcpys.len()) {
            (got, copies) if got == sends && copies == sends => Ok(round),
            (got, copies) => {
                Err(format!("expected {sends} sends, got {got} and {copies} copies").into())
            }
        }
    }

    /// Lets it end, and its workers: all have closed their output when this
    /// returns without an error.
    pub fn quit(mut self) -> Result<(), Box<dyn Error>> {
        let _ = writeln!(self.requests, "quit");
        let ended = self.answers.next(Instant::now() + self.deadline)?;
        match ended {
            None => Ok(()),
            Some(line) => Err(format!("an answer without a request: {line}").into()),
        }
    }

    fn answer<T: DeserializeOwned>(&mut self) -> Result<T, Box<dyn Error>> {
        match self.answers.next(Instant::now() + self.deadline) {
            Ok(Some(line)) => serde_json::from_str(&line)
                .map_err(|error| format!("invalid answer: {error}: {line}").into()),
            Ok(None) => {
                let status = self.child.try_wait().ok().flatten();
                let status = status.map_or(String::new(), |status| format!(", {status}"));
                Err(format!("it ended{status}{}", self.complaints()).into())
            }
            Err(error) => Err(format!("{error}{}", self.complaints()).into()),
        }
    }

    /// The last lines of its standard error, each on a new line.
    fn complaints(&self) -> String {
        let mut bytes = vec![0; 4096];
        let length = self.complaints.metadata().map_or(0, |file| file.len());
        let from = length.saturating_sub(bytes.len() as u64);
        let read = self.complaints.read_at(&mut bytes, from).unwrap_or(0);
        let text = String::from_utf8_lossy(&bytes[..read]);
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(COMPLAINTS)..];
        last.iter().map(|line| format!("\n    {line}")).collect()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Its workers end when their pipes to it do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Deserialize)]
struct Ready {
    first_s: f64,
}

#[derive(Deserialize)]
struct Times {
    sends_s: Vec<f64>,
    memcpys_s: Vec<f64>,
}

fn durations(seconds: &[f64]) -> Result<Vec<Duration>, Box<dyn Error>> {
    seconds.iter().map(|seconds| duration(*seconds)).collect()
}

fn duration(seconds: f64) -> Result<Duration, Box<dyn Error>> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err(format!("{seconds} s cannot be the time of a send").into()),
    }
}

/// The lines of a pipe, each waited for until a deadline.
pub struct Lines {
    pipe: ChildStdout,
    /// What came after the last line that was handed out.
    rest: Vec<u8>,
}

impl Lines {
    pub fn new(pipe: ChildStdout) -> Self {
        Self {
            pipe,
            rest: Vec::new(),
        }
    }

    /// The next line, or `None` when every holder of the other end has closed it.
    pub fn next(&mut self, until: Instant) -> Result<Option<String>, Box<dyn Error>> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line[..end]).into_owned()));
            }
            if self.rest.len() > LONGEST_ANSWER {
                return Err(format!("an answer of more than {LONGEST_ANSWER} bytes").into());
            }
            self.wait(until)?;
            let mut bytes = [0; 1 << 16];
            match self.pipe.read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(read) => self.rest.extend_from_slice(&bytes[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Until there is something to read, or the end.
    fn wait(&self, until: Instant) -> Result<(), Box<dyn Error>> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left)?;
            let mut fds = [PollFd::new(&self.pipe, PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(0) if left.is_zero() => return Err("no answer within its time".into()),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that is a shell script.
    fn peer(script: &str, deadline: Duration) -> Result<Peer, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("peer.sh");
        std::fs::write(&path, script)?;
        let program = Program {
            python: "sh".into(),
            script: path,
            deadline,
        };
        let what = Arrangement {
            scheme: "shared-mem",
            bytes: 16,
            tensors: 1,
            workers: 1,
        };
        // The shell has read its script when it answers, or is gone.
        Peer::start(&program, &what)
    }

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn rounds_are_what_the_program_measured() {
        let script = "echo '{\"first_s\": 1.5}'\nread request\n\
                      echo '{\"sends_s\": [0.25, 0.5], \"memcpys_s\": [0.125, 1]}'\nread quit\n";
        let mut peer = peer(script, MINUTE).unwrap();
        assert_eq!(peer.first(), Duration::from_millis(1500));
        let ms = Duration::from_millis;
        let expected = Round {
            sends: vec![ms(250), ms(500)],
            memcpys: vec![ms(125), ms(1000)],
        };
        assert_eq!(peer.round(2).unwrap(), expected);
        peer.quit().unwrap();
    }

    #[test]
    fn invalid_answer_is_an_error_with_the_reason() {
        for (script, words) in [
            ("echo no torchrl >&2; exit 1", "no torchrl"),
            ("echo hello", "invalid answer"),
            ("echo '{\"first_s\": -1}'", "cannot be the time of a send"),
            ("echo '{\"first_s\": 1}'; echo gone >&2", "gone"),
            (
                "echo '{\"first_s\": 1}'; read r; echo '{\"sends_s\": [1], \"memcpys_s\": []}'",
                "expected 1 sends",
            ),
            (
                "echo '{\"first_s\": 1}'; read r; echo '{\"sends_s\": [0], \"memcpys_s\": [1]}'",
                "cannot be the time of a send",
            ),
        ] {
            let error = peer(script, MINUTE)
                .and_then(|mut peer| peer.round(1))
                .expect_err(script)
                .to_string();
            assert!(error.contains(words), "{script}: {error}");
        }
    }

    #[test]
    fn a_wait_for_an_answer_ends() {
        let (mut child, lines) = pipe("read forever");
        let mut lines = Lines::new(lines);
        let error = lines.next(Instant::now()).expect_err("nothing was said");
        assert!(error.to_string().contains("within its time"), "{error}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(lines.next(Instant::now() + MINUTE).unwrap(), None);
    }

    #[test]
    fn lines_come_one_by_one_and_not_without_bound() {
        let (mut child, lines) = pipe("printf 'one\\ntwo\\nrest'");
        let mut lines = Lines::new(lines);
        for expected in [Some("one"), Some("two"), None] {
            let line = lines.next(Instant::now() + MINUTE).unwrap();
            assert_eq!(line.as_deref(), expected);
        }
        child.wait().unwrap();

        let (mut child, lines) = pipe("while echo -n xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; do :; done");
        let error = Lines::new(lines)
            .next(Instant::now() + MINUTE)
            .expect_err("a line without an end");
        assert!(error.to_string().contains("more than"), "{error}");
        child.wait().unwrap();
    }

    fn pipe(script: &str) -> (Child, ChildStdout) {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        (child, stdout)
    }
}
