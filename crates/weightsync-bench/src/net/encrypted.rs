//! Encrypted sends over loopback, compared with plain ones and with OpenSSL, in the same run.

use std::error::Error;
use std::io::Read;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use weightsync_link::access::TLS_LOOPBACK_VARIABLE;
use weightsync_link::tls::{CertificateRequest, TLS_VARIABLE, make};

use super::ours::{Route, measure};
use super::{Row, row};
use crate::iperf::free_port;
use crate::numbers::{Size, Times};
use crate::running::Running;

/// Times that each is measured.
const ROUNDS: usize = 3;

/// Sends of a round that are counted.
const SENDS: usize = 5;

/// Seconds that OpenSSL works for.
const STREAM: u64 = 4;

/// Bytes of the file that OpenSSL sends, once for each connection.
const FILE: u64 = 64 << 20;

/// Of OpenSSL's rate.
const SHARE: f64 = 0.8;

/// Longer than one measurement takes.
const GRACE: Duration = Duration::from_secs(300);

const PROGRAM: &str = "openssl";

const SUITE: &str = "TLS_AES_128_GCM_SHA256";

/// How the sends of one process are measured.
#[derive(clap::Args)]
pub struct SendsArgs {
    bytes: Size,
}

/// Measures sends with the certificates that the environment names, if it does; prints their median
/// in seconds.
pub fn sends(args: &SendsArgs) -> Result<(), Box<dyn Error>> {
    let ours = measure(Route::Link, 1, args.bytes, SENDS)?;
    println!("{}", ours.sends.median().as_secs_f64());
    Ok(())
}

pub(super) fn name(size: Size) -> String {
    format!("distributed {size} over TCP, encrypted, N = 1")
}

pub(super) fn rows(size: Size) -> Result<Vec<Row>, Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let pki = dir.path().join("pki");
    make(&CertificateRequest {
        out: pki.clone(),
        hosts: vec![Ipv4Addr::LOCALHOST.to_string()],
        days: 2,
    })?;
    let mut times: [Times; 4] = Default::default();
    for _ in 0..ROUNDS {
        let measured = [
            of_process(size, None)?,
            of_process(size, Some(&pki))?,
            served(size, dir.path(), &pki.join("trainer.pem"))?,
            in_memory(size)?,
        ];
        times
            .iter_mut()
            .zip(measured)
            .for_each(|(all, one)| all.push(one));
    }
    let [plain, encrypted, served, in_memory] = times.map(|all| all.median());
    let name = name(size);
    let against =
        |what: &str, baseline, target| row(format!("{name}, {what}"), encrypted, baseline, target);
    Ok(vec![
        against("over plain", plain, None),
        against("against openssl s_time", served, Some(1.0 / SHARE)),
        against(
            "against openssl speed aes-128-gcm",
            in_memory,
            Some(1.0 / SHARE),
        ),
    ])
}

/// The median of sends in a process with this environment.
fn of_process(size: Size, pki: Option<&Path>) -> Result<Duration, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["sends", &size.0.to_string()]);
    if let Some(pki) = pki {
        command
            .env(TLS_VARIABLE, pki)
            .env(TLS_LOOPBACK_VARIABLE, "1");
    }
    let text = said(&mut command)?;
    Ok(Duration::try_from_secs_f64(text.trim().parse()?)?)
}

/// How long OpenSSL's server takes to send as many bytes to OpenSSL's client.
fn served(size: Size, dir: &Path, certificate: &Path) -> Result<Duration, Box<dyn Error>> {
    let file = std::fs::File::create(dir.join("file"))?;
    std::io::copy(&mut std::io::repeat(7).take(FILE), &mut &file)?;
    let address = format!("{}:{}", Ipv4Addr::LOCALHOST, free_port()?);
    let mut server = Running::start(
        openssl()
            .current_dir(dir)
            .args(["s_server", "-WWW", "-tls1_3", "-ciphersuites", SUITE])
            .args(["-accept", &address, "-cert"])
            .arg(certificate)
            .arg("-key")
            .arg(certificate),
    )?;
    server.wait_for("ACCEPT", Instant::now() + GRACE)?;
    let seconds = STREAM.to_string();
    let report = said(openssl().args([
        "s_time",
        "-new",
        "-www",
        "/file",
        "-ciphersuites",
        SUITE,
        "-time",
        &seconds,
        "-connect",
        &address,
    ]))?;
    drop(server);
    // `39 connections in 5 real seconds, 67108909 bytes read per connection`: the seconds are whole, so
    // those that it was told are taken. What its last connection took longer is to its favour.
    let line = report.lines().find(|line| line.contains("real seconds"));
    let line = line.ok_or_else(|| format!("{PROGRAM} s_time said {report:?}"))?;
    let mut numbers = line
        .split_whitespace()
        .filter_map(|word| word.parse::<f64>().ok());
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(count), Some(_), Some(bytes)) if count > 0.0 => {
            let rate = count * bytes / STREAM as f64;
            Ok(Duration::try_from_secs_f64(size.0 as f64 / rate)?)
        }
        _ => Err(format!("{PROGRAM} s_time said {line:?}").into()),
    }
}

/// How long OpenSSL takes to encrypt as many bytes that a cache holds, on one core.
fn in_memory(size: Size) -> Result<Duration, Box<dyn Error>> {
    let seconds = STREAM.to_string();
    let report = said(openssl().args([
        "speed",
        "-mr",
        "-elapsed",
        "-evp",
        "aes-128-gcm",
        "-bytes",
        "16384",
        "-seconds",
        &seconds,
    ]))?;
    // `+F:22:AES-128-GCM:4185774000.00`
    let line = report.lines().find(|line| line.starts_with("+F:"));
    let rate = line.and_then(|line| line.rsplit(':').next()?.parse::<f64>().ok());
    let rate = rate.filter(|rate| *rate > 0.0);
    let rate = rate.ok_or_else(|| format!("{PROGRAM} speed said {report:?}"))?;
    Ok(Duration::try_from_secs_f64(size.0 as f64 / rate)?)
}

fn openssl() -> Command {
    let mut command = Command::new(PROGRAM);
    // It tells its progress there.
    command.stderr(Stdio::null());
    command
}

/// What a program says until its end.
fn said(command: &mut Command) -> Result<String, Box<dyn Error>> {
    Running::start(command)?.rest(Instant::now() + GRACE)
}
