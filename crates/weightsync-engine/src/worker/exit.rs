//! How a worker process ended, and what it last said.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::error::PipeFault;

/// How many bytes of a worker's standard error are kept: the last ones.
pub const STDERR_TAIL: usize = 64 * 1024;

/// The longest line handed to a line callback; longer ones come in pieces.
const MAX_LINE: usize = 8 * 1024;

/// How a worker process ended.
///
/// Both `status` and `signal` are `None` when the operating system could not tell, which happens
/// where the program has SIGCHLD set to be ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exit {
    /// The process id it had.
    pub pid: u32,
    /// Its exit status, when it ended without a signal. 101 is a panic.
    pub status: Option<i32>,
    /// The signal that ended it, if one did. 9 is SIGKILL.
    pub signal: Option<i32>,
    /// What it did wrong on its pipe, for which it was killed, if anything.
    pub fault: Option<PipeFault>,
    /// The last [`STDERR_TAIL`] bytes of its standard error.
    pub stderr_tail: Vec<u8>,
    /// Whether the restart policy has started a process in its place.
    pub restarted: bool,
}

impl Exit {
    /// An exit whose cause is `status`, where it is known.
    pub(super) fn new(pid: u32, status: Option<ExitStatus>, stderr_tail: Vec<u8>) -> Self {
        Self {
            pid,
            status: status.and_then(|status| status.code()),
            signal: status.and_then(|status| status.signal()),
            fault: None,
            stderr_tail,
            restarted: false,
        }
    }

    /// Whether the process ended with status 0.
    pub fn is_success(&self) -> bool {
        self.status == Some(0)
    }

    /// The end of its standard error as text; bytes that are not UTF-8 are replaced.
    pub fn stderr_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr_tail)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.status, self.signal) {
            (Some(101), _) => write!(f, "process {} panicked (exit status 101)", self.pid)?,
            (Some(status), _) => write!(f, "process {} ended with status {status}", self.pid)?,
            (None, Some(9)) => write!(f, "process {} was killed (signal 9)", self.pid)?,
            (None, Some(signal)) => write!(f, "process {} died of signal {signal}", self.pid)?,
            (None, None) => write!(f, "process {} ended for an unknown reason", self.pid)?,
        }
        if let Some(fault) = &self.fault {
            write!(f, "; {fault}")?;
        }
        if let Some(line) = self
            .stderr_text()
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())
        {
            write!(f, "; its last output: {}", line.trim())?;
        }
        Ok(())
    }
}

/// Keeps the end of a worker's standard error and cuts it into lines.
#[derive(Debug, Default)]
pub(super) struct StderrTail {
    tail: VecDeque<u8>,
    line: Vec<u8>,
}

impl StderrTail {
    /// Takes in what was read, and calls `on_line` for every line it completes.
    pub(super) fn push(&mut self, bytes: &[u8], on_line: Option<&mut dyn FnMut(&str)>) {
        // One read may be longer than all that is kept.
        let kept = &bytes[bytes.len().saturating_sub(STDERR_TAIL)..];
        let excess = (self.tail.len() + kept.len()).saturating_sub(STDERR_TAIL);
        self.tail.drain(..excess);
        self.tail.extend(kept);

        let Some(on_line) = on_line else { return };
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            // Memory stays bounded for a worker that writes without line feeds.
            for part in piece.chunks(MAX_LINE) {
                if self.line.len() + part.len() > MAX_LINE {
                    self.flush(on_line);
                }
                self.line.extend_from_slice(part);
            }
            if piece.ends_with(b"\n") {
                self.flush(on_line);
            }
        }
    }

    /// The end of the stream: hands out the last line, if it had no line feed, and the tail.
    pub(super) fn finish(mut self, on_line: Option<&mut dyn FnMut(&str)>) -> Vec<u8> {
        if let Some(on_line) = on_line
            && !self.line.is_empty()
        {
            self.flush(on_line);
        }
        self.tail.into()
    }

    fn flush(&mut self, on_line: &mut dyn FnMut(&str)) {
        let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        on_line(&String::from_utf8_lossy(line));
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> (Vec<String>, Vec<u8>) {
        let mut seen = Vec::new();
        let mut stderr = StderrTail::default();
        let mut on_line = |line: &str| seen.push(line.to_owned());
        for piece in pieces {
            stderr.push(piece, Some(&mut on_line));
        }
        let tail = stderr.finish(Some(&mut on_line));
        (seen, tail)
    }

    #[test]
    fn lines_are_put_together_again() {
        let (seen, tail) = lines(&[b"one\ntw", b"o\n\nlast \xff"]);
        assert_eq!(seen, ["one", "two", "", "last \u{fffd}"]);
        assert_eq!(tail, b"one\ntwo\n\nlast \xff");
    }

    #[test]
    fn stderr_tail_keeps_the_end_and_cuts_long_lines() {
        let long = vec![b'x'; STDERR_TAIL + 1000];
        let (seen, tail) = lines(&[&long, b"y\n"]);
        assert_eq!(tail.len(), STDERR_TAIL);
        assert!(tail.ends_with(b"xy\n"));
        assert!(seen.iter().all(|line| line.len() <= MAX_LINE));
        assert_eq!(seen.concat().len(), long.len() + 1);
    }

    #[test]
    fn an_exit_names_its_cause() {
        let mut exit = Exit::new(
            7,
            Some(ExitStatus::from_raw(9)),
            b"a\nlast words\n\n".to_vec(),
        );
        assert_eq!(exit.signal, Some(9));
        assert!(!exit.is_success());
        exit.fault = Some(PipeFault::UnknownKind { kind: 9 });
        let text = exit.to_string();
        for part in ["7", "killed (signal 9)", "kind 9", "last words"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(Exit::new(7, Some(ExitStatus::from_raw(0)), vec![]).is_success());
        assert_eq!(
            Exit::new(7, Some(ExitStatus::from_raw(101 << 8)), vec![]).status,
            Some(101)
        );
    }
}
