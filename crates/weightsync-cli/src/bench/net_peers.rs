//! What people use today to bring weights to other processes, over loopback, each
//! beside what `iperf3` makes of one stream.
//!
//! The programs are those of `bench/peers/net`. `iperf3` is run before a program is
//! started and after it has ended: some have threads that never rest.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::group::{self, Row};
use super::iperf;
use super::numbers::{Size, Times, ratio};
use super::peer::{Arrangement, Peer, Program};

/// How they are run.
#[derive(clap::Args)]
pub struct Args {
    /// The Python of an environment with python/requirements-net.txt
    #[arg(long)]
    python: PathBuf,
    /// The program that measures
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
    let program = Program {
        python: args.python.clone(),
        script: args.script.clone(),
        deadline: Duration::from_secs(args.deadline),
    };
    group::head(args.json);
    let mut failed = Vec::new();
    for case in CASES.map(|case| case.sized(args.bytes)) {
        let name = case.name();
        if !name.contains(&args.only) {
            continue;
        }
        match case.measure(&program) {
            Ok(figures) => {
                for row in case.rows(&figures) {
                    group::print(args.json, &row)?;
                }
            }
            Err(error) => {
                eprintln!("{name}: {error}");
                failed.push(name);
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("no figures for {}", failed.join("; ")).into())
}

/// As many tensors as each sends.
const TENSORS: u64 = 64;

/// Sends that are counted, and those before them that are not.
const SENDS: usize = 9;
const WARM: usize = 2;

/// Seconds that each run of `iperf3` takes.
const STREAM: u64 = 5;

/// Every way to send there is, to the numbers of workers it is meant for.
const CASES: [Case; 11] = [
    Case::new("gloo-send", 1),
    Case::new("gloo-broadcast", 4),
    Case::new("zmq-push", 1),
    Case::new("zmq-push", 4),
    Case::new("zmq-pub", 4),
    Case::new("mooncake", 1),
    Case::new("mooncake", 4),
    Case::new("nixl", 1),
    Case::new("nixl", 4),
    Case::new("ray", 1),
    Case::new("ray", 4),
];

#[derive(Clone, Copy)]
struct Case {
    scheme: &'static str,
    workers: usize,
    size: Size,
}

/// What a case came to.
struct Figures {
    first: Duration,
    sends: Times,
    /// What `iperf3` would have taken for the same bytes.
    streams: Times,
}

impl Case {
    const fn new(scheme: &'static str, workers: usize) -> Self {
        let size = Size(0);
        Self {
            scheme,
            workers,
            size,
        }
    }

    fn sized(self, size: Size) -> Self {
        Self { size, ..self }
    }

    fn name(&self) -> String {
        format!("{} {}, N = {}", self.scheme, self.size, self.workers)
    }

    fn measure(&self, program: &Program) -> Result<Figures, Box<dyn Error>> {
        let mut streams = Times::default();
        streams.push(self.stream()?);
        let mut peer = Peer::start(
            program,
            &Arrangement {
                scheme: self.scheme,
                bytes: self.size.0,
                tensors: TENSORS,
                workers: self.workers,
            },
        )?;
        peer.round(WARM)?;
        let mut sends = Times::default();
        for _ in 0..SENDS {
            peer.round(1)?
                .sends
                .into_iter()
                .for_each(|time| sends.push(time));
        }
        let first = peer.first();
        peer.quit()?;
        streams.push(self.stream()?);
        Ok(Figures {
            first,
            sends,
            streams,
        })
    }

    /// How long one stream takes for these bytes.
    fn stream(&self) -> Result<Duration, Box<dyn Error>> {
        let rate = iperf::stream(Path::new(iperf::PROGRAM), STREAM)?;
        Ok(Duration::try_from_secs_f64(self.size.0 as f64 / rate)?)
    }

    fn rows(&self, got: &Figures) -> [Row; 2] {
        let name = self.name();
        let stream = got.streams.median();
        [
            row(
                format!("{name}, against iperf3"),
                got.sends.median(),
                stream,
            ),
            row(format!("{name}, the first send"), got.first, stream),
        ]
    }
}

fn row(case: String, value: Duration, baseline: Duration) -> Row {
    Row {
        case,
        value: value.as_secs_f64() * 1e3,
        unit: "ms",
        baseline: baseline.as_secs_f64() * 1e3,
        ratio: ratio(value, baseline),
        target: None,
        met: None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;

    /// A scheme nobody measures, or one nobody has written, would go unnoticed.
    #[test]
    fn the_cases_are_the_schemes_of_the_program() {
        let script = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../bench/peers/net/__main__.py"
        );
        let text = fs::read_to_string(script).expect("the program");
        let theirs: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("    \"")?.split_once("\": (\"of_"))
            .map(|(scheme, _)| scheme)
            .collect();
        let ours: BTreeSet<&str> = CASES.iter().map(|case| case.scheme).collect();
        assert_eq!(theirs, ours);
        let names: BTreeSet<String> = CASES.iter().map(Case::name).collect();
        assert_eq!(names.len(), CASES.len());
    }

    #[test]
    fn a_row_says_how_the_times_compare() {
        let ms = Duration::from_millis;
        let got = row("a".into(), ms(500), ms(250));
        assert_eq!((got.value, got.baseline, got.ratio), (500.0, 250.0, 2.0));
        assert_eq!((got.unit, got.target, got.met), ("ms", None, None));
    }
}
