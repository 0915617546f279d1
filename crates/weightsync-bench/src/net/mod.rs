//! Versions over loopback, compared with one `iperf3` stream, and with what
//! people use today to bring weights to other processes.
//!
//! Their programs are those of `bench/peers/net`. `iperf3` is run before a case is
//! started and after it has ended, and our own sends are measured on both sides of a
//! peer's: some have threads that never rest.

mod encrypted;
mod ours;
mod peers;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use self::encrypted::{SendsArgs, sends};
use super::group::{self, Row};
use super::iperf;
use super::numbers::{Size, Times, ratio};
use super::peer::Program;

/// How they are run.
#[derive(clap::Args)]
pub struct Args {
    /// The Python of an environment with python/requirements-net.txt; without it there
    /// are our own cases alone
    #[arg(long)]
    python: Option<PathBuf>,
    /// The program that measures the others
    #[arg(long, default_value = "bench/peers/net")]
    script: PathBuf,
    /// Seconds that it may take for an answer
    #[arg(long, default_value_t = 120)]
    deadline: u64,
    /// What is sent
    #[arg(long, default_value = "1GiB")]
    bytes: Size,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,
}

/// Runs every case and prints its rows as they come. A case that fails has no rows,
/// its reason goes to standard error, and the others are run.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    group::head(args.json);
    let mut failed = Vec::new();
    let mut done = |name: String, rows: Result<Vec<Row>, Box<dyn Error>>| match rows {
        Ok(rows) => rows.iter().try_for_each(|row| group::print(args.json, row)),
        Err(error) => {
            eprintln!("{name}: {error}");
            failed.push(name);
            Ok(())
        }
    };
    let mut flat = ours::Flat::default();
    for case in ours::CASES.map(|case| case.sized(args.bytes)) {
        if case.name().contains(&args.only) {
            done(case.name(), case.rows(&mut flat))?;
        }
    }
    let encrypted = encrypted::name(args.bytes);
    if encrypted.contains(&args.only) {
        done(encrypted, encrypted::rows(args.bytes))?;
    }
    if let Some(python) = &args.python {
        let program = Program {
            python: python.clone(),
            script: args.script.clone(),
            deadline: Duration::from_secs(args.deadline),
        };
        for case in peers::CASES.map(|case| case.sized(args.bytes)) {
            if case.name().contains(&args.only) {
                done(case.name(), case.rows(&program))?;
            }
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("no figures for {}", failed.join("; ")).into()),
    }
}

/// As many tensors as everybody sends.
const TENSORS: u64 = 64;

/// Sends before those that are counted.
const WARM: usize = 2;

/// Seconds that each run of `iperf3` takes.
const STREAM: u64 = 5;

/// How long one stream takes for these bytes.
fn stream(size: Size) -> Result<Duration, Box<dyn Error>> {
    let rate = iperf::stream(Path::new(iperf::PROGRAM), STREAM)?;
    Ok(Duration::try_from_secs_f64(size.0 as f64 / rate)?)
}

fn row(case: String, value: Duration, baseline: Duration, target: Option<f64>) -> Row {
    let ratio = ratio(value, baseline);
    Row {
        case,
        value: value.as_secs_f64() * 1e3,
        unit: "ms",
        baseline: baseline.as_secs_f64() * 1e3,
        ratio,
        target,
        met: target.map(|target| ratio <= target),
    }
}

/// The median of what was measured at several times.
fn median(of: impl IntoIterator<Item = Times>) -> Duration {
    let mut all = Times::default();
    of.into_iter().for_each(|times| all.extend(&times));
    all.median()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_how_the_times_compare() {
        let ms = Duration::from_millis;
        let got = row("a".into(), ms(500), ms(250), None);
        assert_eq!((got.value, got.baseline, got.ratio), (500.0, 250.0, 2.0));
        assert_eq!((got.unit, got.target, got.met), ("ms", None, None));
        assert_eq!(row("b".into(), ms(2), ms(2), Some(1.0)).met, Some(true));
        assert_eq!(row("c".into(), ms(3), ms(2), Some(1.0)).met, Some(false));
    }
}
