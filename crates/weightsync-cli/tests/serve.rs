//! `weightsync serve` and `weightsync config`, as processes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightsync"));
    command.args(arguments);
    for (name, _) in std::env::vars() {
        if name.starts_with("WEIGHTSYNC_") {
            command.env_remove(name);
        }
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

struct Served {
    process: Child,
    at: String,
}

impl Served {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        let at = line
            .split(' ')
            .nth(4)
            .unwrap_or_default()
            .trim_end_matches(';')
            .to_owned();
        Self { process, at }
    }

    fn get(&self, path: &str, headers: &str) -> String {
        let mut stream = TcpStream::connect(&self.at).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(600)))
            .unwrap();
        let at = &self.at;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n{headers}\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn serve_answers_until_a_signal_ends_it() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut served = Served::start(&mut command(&["serve", "--address", "127.0.0.1:0"]));
        let status = served.get("/v1/status", "");
        assert!(status.starts_with("HTTP/1.1 200"), "{status}");
        assert!(served.get("/", "").contains("<!doctype html>"));
        kill_process(Pid::from_child(&served.process), signal).unwrap();
        let ended = served.process.wait().unwrap();
        assert_eq!(ended.code(), Some(128 + signal.as_raw()));
    }
}

#[test]
fn settings_come_from_flags_variables_and_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    std::fs::write(
        &file,
        "address = \"127.0.0.1:0\"\nmethod = \"memory\"\nhistory = 2\n",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    let served = Served::start(&mut command(&["serve", "--config", file]));
    assert!(
        served
            .get("/v1/status", "")
            .contains("\"method\":\"memory\"")
    );
    let variable = &mut command(&["serve", "--config", file]);
    let served = Served::start(variable.env("WEIGHTSYNC_SERVE_METHOD", "checkpoint"));
    assert!(
        served
            .get("/v1/status", "")
            .contains("\"method\":\"checkpoint\"")
    );
    let flag = &mut command(&["serve", "--config", file, "--method", "nccl"]);
    let served = Served::start(flag.env("WEIGHTSYNC_SERVE_METHOD", "checkpoint"));
    assert!(served.get("/v1/status", "").contains("\"method\":\"nccl\""));
}

#[test]
fn token_admits_requests() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "kq0UfKOLPCkF2Q==ZmFzZQ").unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&file, private).unwrap();
    let token = ["--token-file", file.to_str().unwrap()];
    let printed = run(&["serve", "--print-authorization", token[0], token[1]]);
    assert!(printed.status.success());
    let value = text(&printed.stdout).trim().to_owned();
    let arguments = ["serve", "--address", "127.0.0.1:0", token[0], token[1]];
    let served = Served::start(&mut command(&arguments));
    assert!(served.get("/v1/status", "").starts_with("HTTP/1.1 401"));
    let wrong = "Authorization: Bearer none\r\n";
    assert!(served.get("/v1/status", wrong).starts_with("HTTP/1.1 401"));
    // A probe has no token, and learns that the service is there.
    let health = served.get("/healthz", "");
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    assert!(health.ends_with("\r\n\r\n"), "{health}");
    let right = format!("Authorization: {value}\r\n");
    assert!(served.get("/v1/status", &right).starts_with("HTTP/1.1 200"));
    // An address of other machines needs a token, and permission for plain text.
    let refused = run(&["serve", "--address", "0.0.0.0:0"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("token"),
        "{}",
        text(&refused.stderr)
    );
}

/// A synchronizer whose certificates hold for so many days.
fn with_certificates(dir: &Path, days: &str, stderr: Stdio) -> Served {
    let pki = dir.join("pki");
    let pki = pki.to_str().unwrap();
    let made = ["--out", pki, "--hosts", "127.0.0.1", "--days", days];
    let made = run(&[&["certs", "new"][..], &made].concat());
    assert!(made.status.success(), "{}", text(&made.stderr));
    let arguments = ["serve", "--address", "127.0.0.1:0", "--tls", pki];
    Served::start(command(&arguments).stderr(stderr))
}

#[test]
fn certificate_is_warned_of_a_week_before_its_end() {
    for (days, expires) in [("6", true), ("8", false)] {
        let dir = tempfile::tempdir().unwrap();
        let mut served = with_certificates(dir.path(), days, Stdio::piped());
        let mut stderr = BufReader::new(served.process.stderr.take().unwrap());
        let mut said = String::new();
        if expires {
            stderr.read_line(&mut said).unwrap();
            let words = "expires in 143 hours: make a new one";
            assert!(said.contains(words), "{said}");
        } else {
            assert!(served.get("/healthz", "").starts_with("HTTP/1.1 200"));
            drop(served);
            stderr.read_to_string(&mut said).unwrap();
            assert_eq!(said, "");
        }
    }
}

#[test]
fn serve_goes_on_where_nobody_reads_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut served = with_certificates(dir.path(), "1", writer.into());
    for _ in 0..3 {
        assert!(served.get("/healthz", "").starts_with("HTTP/1.1 200"));
    }
    assert!(served.process.try_wait().unwrap().is_none());
}

#[test]
fn config_checks_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "interval = 4\n").unwrap();
    let checked = run(&["config", "check", path]);
    assert!(checked.status.success());
    assert!(text(&checked.stdout).starts_with("interval = 4\n# address = "));
    std::fs::write(&file, "intervl = 4\n").unwrap();
    let refused = run(&["config", "check", path]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("did you mean interval?"));
    let missing = run(&["config", "check", "/nonexistent"]);
    assert!(text(&missing.stderr).contains("cannot be read"));
}

#[test]
fn config_translates_trinitys_block() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trinity.yaml");
    std::fs::write(
        &file,
        "synchronizer:\n  sync_method: memory\n  sync_interval: 4\n",
    )
    .unwrap();
    let translated = run(&["config", "from-trinity", file.to_str().unwrap()]);
    assert!(translated.status.success());
    let toml = dir.path().join("run.toml");
    std::fs::write(&toml, &translated.stdout).unwrap();
    assert!(
        run(&["config", "check", toml.to_str().unwrap()])
            .status
            .success()
    );
}
