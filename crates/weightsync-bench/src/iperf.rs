//! What one TCP stream over loopback does on this machine, by `iperf3`.
//!
//! The same as `iperf3 -s -1` and `iperf3 -c 127.0.0.1 -l 1M -t 5` by hand, but on
//! a free port. It sends one buffer over and over, so its bytes come from a cache.

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::running::Running;

/// What is looked for on `PATH`.
pub const PROGRAM: &str = "iperf3";

/// How much longer than it was told to send it may take.
const GRACE: Duration = Duration::from_secs(20);

/// Bytes per second that one stream brings to the other end, over so many seconds.
pub fn stream(program: &Path, seconds: u64) -> Result<f64, Box<dyn Error>> {
    let until = Instant::now() + Duration::from_secs(seconds) + GRACE;
    let port = free_port()?.to_string();
    let here = Ipv4Addr::LOCALHOST.to_string();

    let mut server = Running::start(
        // Its output goes to a pipe, and it is waited for.
        Command::new(program).args(["-s", "-1", "--forceflush", "-B", &here, "-p", &port]),
    )?;
    server.wait_for("Server listening", until)?;
    let mut client = Running::start(
        Command::new(program)
            .args(["-c", &here, "-p", &port, "-l", "1M", "-J"])
            .args(["-t", &seconds.to_string()]),
    )?;
    bytes_per_second(&client.rest(until)?)
}

/// The other end's figure in the client's report.
fn bytes_per_second(report: &str) -> Result<f64, Box<dyn Error>> {
    let report: Report = serde_json::from_str(report)
        .map_err(|error| format!("{PROGRAM} printed no report: {error}: {report:.200}"))?;
    if let Some(error) = report.error {
        return Err(format!("{PROGRAM}: {error}").into());
    }
    let received = report.end.and_then(|end| end.sum_received);
    match received.map(|received| received.bits_per_second / 8.0) {
        Some(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        got => Err(format!("{PROGRAM} has received nothing: {got:?} bytes per second").into()),
    }
}

#[derive(Deserialize)]
struct Report {
    error: Option<String>,
    end: Option<End>,
}

#[derive(Deserialize)]
struct End {
    sum_received: Option<Sum>,
}

#[derive(Deserialize)]
struct Sum {
    bits_per_second: f64,
}

/// A free port. Another process may take it meanwhile; then the server says so.
pub fn free_port() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// An `iperf3` whose server listens and whose client says this.
    fn stand_in(says: &str) -> Result<f64, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("iperf3");
        let script = format!(
            "#!/bin/sh\ncase $1 in -s) echo; echo 'Server listening on 1'; exec sleep 60;; esac\n\
             echo '{says}'\n"
        );
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        stream(&path, 5)
    }

    #[test]
    fn the_rate_is_that_of_the_other_end() {
        let report = r#"{"end": {"sum_sent": {"bits_per_second": 16},
            "sum_received": {"bits_per_second": 8e9, "bytes": 1}}}"#;
        assert_eq!(stand_in(report).unwrap(), 1e9);
    }

    #[test]
    fn iperf_without_a_rate_is_an_error_with_the_reason() {
        for (says, words) in [
            (
                r#"{"end": {}, "error": "unable to connect"}"#,
                "unable to connect",
            ),
            (r#"{"end": {}}"#, "received nothing"),
            (
                r#"{"end": {"sum_received": {"bits_per_second": 0}}}"#,
                "received nothing",
            ),
            ("iperf3: error", "no report"),
        ] {
            let error = stand_in(says).expect_err(says).to_string();
            assert!(error.contains(words), "{says}: {error}");
        }
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let error = stream(Path::new("/nonexistent/iperf3"), 5)
            .expect_err("no such program")
            .to_string();
        assert!(error.contains("fix: apt install iperf3"), "{error}");
    }

    #[test]
    fn a_server_that_ends_is_an_error() {
        let error = stream(Path::new("true"), 5)
            .expect_err("no server")
            .to_string();
        assert!(error.contains("ended before"), "{error}");
    }
}
