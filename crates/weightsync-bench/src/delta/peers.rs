//! What others make of the same two versions: `bench/peers/delta.py`.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use serde::Deserialize;

use super::super::peer::Lines;
use super::Row;

/// The Python program, and how long it may take for one of the peers.
pub struct Peers {
    pub python: PathBuf,
    pub script: PathBuf,
    pub deadline: Duration,
}

/// What one of them makes of two versions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    peer: String,
    changes: u64,
    bytes: u64,
    encode_s: f64,
    decode_s: f64,
    memcpy_s: f64,
}

/// Up to this many changed elements of a hundred ours is to take fewer bytes than each of them.
const DENSEST: f64 = 33.5;

impl Peers {
    /// Measures every peer.
    pub fn measure(
        &self,
        old: &[u8],
        new: &[u8],
        width: usize,
    ) -> Result<Vec<Figures>, Box<dyn Error>> {
        // They are in memory, and are gone when both processes are.
        let (old, new) = (file("old", old)?, file("new", new)?);
        let mut child = Command::new(&self.python)
            .arg(&self.script)
            .args([path(&old), path(&new)])
            .args(["--width", &width.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("starting {}: {error}", self.python.display()))?;
        let output = child.stdout.take().ok_or("a program without its pipe")?;
        let (mut running, mut lines) = (Running(child), Lines::new(output));
        let mut told = Vec::new();
        while let Some(line) = lines.next(Instant::now() + self.deadline)? {
            told.push(figures(&line)?);
        }
        let status = running.0.wait()?;
        match status.success() && !told.is_empty() {
            true => Ok(told),
            false => Err(format!("{} ended with {status}", self.script.display()).into()),
        }
    }
}

impl Figures {
    /// The bytes of our thin codec over theirs, for as many changes; `percent` of the elements
    /// changed.
    pub fn row(
        &self,
        label: &str,
        percent: f64,
        changes: u64,
        bytes: u64,
    ) -> Result<Row, Box<dyn Error>> {
        let peer = &self.peer;
        if self.changes != changes {
            return Err(format!("{peer}: {} changes, ours {changes}", self.changes).into());
        }
        let each = |bytes: u64| bytes as f64 / changes.max(1) as f64;
        let ratio = bytes as f64 / self.bytes.max(1) as f64;
        let target = (percent <= DENSEST).then_some(1.0);
        Ok(Row {
            case: format!("{label}: thin, a change, against {peer}"),
            value: each(bytes),
            unit: "bytes",
            baseline: each(self.bytes),
            ratio,
            target,
            // As many bytes are not fewer.
            met: target.map(|target| ratio < target),
        })
    }

    /// How long the peers take, compared with a memcpy of their own.
    pub fn times(&self, label: &str) -> [Row; 2] {
        [("encode", self.encode_s), ("decode + apply", self.decode_s)].map(|(what, seconds)| Row {
            case: format!("{label}: {}, {what}", self.peer),
            value: seconds * 1e3,
            unit: "ms",
            baseline: self.memcpy_s * 1e3,
            ratio: seconds / self.memcpy_s,
            target: None,
            met: None,
        })
    }
}

fn figures(line: &str) -> Result<Figures, Box<dyn Error>> {
    let told: Figures =
        serde_json::from_str(line).map_err(|error| format!("invalid answer: {error}: {line}"))?;
    let times = [told.encode_s, told.decode_s, told.memcpy_s];
    match times.iter().all(|time| time.is_finite() && *time > 0.0) {
        true => Ok(told),
        false => Err(format!("invalid times: {line}").into()),
    }
}

/// A file that is nowhere but in memory.
fn file(name: &str, bytes: &[u8]) -> Result<File, Box<dyn Error>> {
    let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// Where another process finds it while we run.
fn path(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// A process that is killed when this value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLD: &str = r#"{"peer": "a", "changes": 2, "bytes": 8, "encode_s": 0.5, "decode_s": 0.25, "memcpy_s": 0.125}"#;

    /// Peers that are a shell script. Its arguments are those of the Python program.
    fn measured(script: &str) -> Result<Vec<Figures>, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("peers.sh");
        std::fs::write(&path, script)?;
        let peers = Peers {
            python: "sh".into(),
            script: path,
            deadline: Duration::from_secs(60),
        };
        peers.measure(b"old", b"newer", 2)
    }

    #[test]
    fn the_program_is_given_both_versions() {
        let script = format!(
            "[ \"$(cat \"$1\")\" = old ] && [ \"$(cat \"$2\")\" = newer ] &&\n\
             [ \"$3 $4\" = '--width 2' ] && echo '{TOLD}'"
        );
        let told = measured(&script).unwrap();
        assert_eq!((told.len(), &*told[0].peer, told[0].bytes), (1, "a", 8));
    }

    #[test]
    fn invalid_answer_is_an_error_with_the_reason() {
        let slow = TOLD.replace("0.25", "0");
        for (script, words) in [
            ("exit 1", "ended with"),
            ("exit 0", "ended with"),
            ("echo hello", "invalid answer"),
            (&format!("echo '{TOLD}'; exit 3"), "3"),
            (&format!("echo '{slow}'"), "invalid times"),
        ] {
            let error = measured(script).expect_err(script).to_string();
            assert!(error.contains(words), "{script}: {error}");
        }
    }

    #[test]
    fn delta_target_is_fewer_bytes_below_a_third_changed() {
        let theirs = figures(TOLD).unwrap();
        for (percent, bytes, met) in [
            (1.0, 2, Some(true)),
            (1.0, 8, Some(false)),
            (33.0, 7, Some(true)),
            (90.0, 9, None),
        ] {
            let row = theirs.row("x", percent, 2, bytes).unwrap();
            assert_eq!(row.met, met, "{percent} {bytes}");
            assert_eq!((row.value, row.baseline), (bytes as f64 / 2.0, 4.0));
        }
        assert!(theirs.row("x", 1.0, 3, 8).is_err(), "of other versions");
        let [encode, decode] = theirs.times("x");
        assert_eq!((encode.ratio, decode.ratio), (4.0, 2.0));
    }
}
