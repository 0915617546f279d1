//! What deltas cost: the group of `cargo xtask bench delta`.
//!
//! Every figure is compared with one `memcpy` of the model's bytes in the same round. All is
//! done in memory of this process; what it comes to from publish to live is in the group `net`.
//!
//! Next to synthetic steps of every density stand pairs of versions that real models were published
//! in, which `bench/delta` makes, and for both what others need for the same changes.

mod pages;
mod passes;
mod peers;
mod real;
mod steps;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use weightsync_core::delta::{Codec, Scratch};

use super::group::{self, Row};
use super::numbers::Size;
use passes::{Deltas, Figures, Passes};
use peers::Peers;
use steps::Steps;

/// How the group is run.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Only densities and pairs whose name contains this, such as "1.1 %" or "MiniLM"
    #[arg(long, default_value = "")]
    only: String,
    /// Bytes of the model, in bf16
    #[arg(long, default_value = "1GiB")]
    size: Size,
    /// Rounds; their median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// A folder of `bench/delta`'s: its pairs of versions as well
    #[arg(long)]
    real: Option<PathBuf>,
    /// The Python of an environment with python/requirements-test.txt; without it there
    /// are our own figures alone
    #[arg(long)]
    python: Option<PathBuf>,
    /// The program that measures the others
    #[arg(long, default_value = "bench/peers/delta.py")]
    script: PathBuf,
    /// Seconds that it may take for one of them
    #[arg(long, default_value_t = 600)]
    deadline: u64,
}

/// What is held against a target at a density.
#[derive(Clone, Copy, Default)]
struct Targets {
    percent: f64,
    fast: Option<f64>,
    fast_bytes: Option<f64>,
    thin: Option<f64>,
    thin_bytes: Option<f64>,
    thin_apply: Option<f64>,
    apply: Option<f64>,
    kept_up: Option<f64>,
}

const DENSITIES: [Targets; 7] = [
    Targets {
        percent: 0.02,
        fast: Some(1.35),
        apply: Some(0.05),
        ..NONE
    },
    Targets {
        percent: 0.6,
        fast: Some(1.35),
        fast_bytes: Some(1.45),
        thin_bytes: Some(0.96),
        apply: Some(0.35),
        ..NONE
    },
    Targets {
        percent: 1.1,
        fast: Some(1.35),
        fast_bytes: Some(1.32),
        thin: Some(8.0),
        thin_bytes: Some(0.90),
        thin_apply: Some(7.0),
        apply: Some(0.6),
        kept_up: Some(0.5),
    },
    Targets {
        percent: 3.0,
        fast: Some(1.7),
        apply: Some(0.9),
        ..NONE
    },
    Targets {
        percent: 10.0,
        fast: Some(2.0),
        thin_bytes: Some(0.68),
        apply: Some(1.0),
        ..NONE
    },
    Targets {
        percent: 33.0,
        fast: Some(2.0),
        ..NONE
    },
    Targets {
        percent: 90.0,
        ..NONE
    },
];

const NONE: Targets = Targets {
    percent: 0.0,
    fast: None,
    fast_bytes: None,
    thin: None,
    thin_bytes: None,
    thin_apply: None,
    apply: None,
    kept_up: None,
};

/// Of synthetic steps the others are given at most so many bytes: more would change nothing but
/// their times.
const PART: usize = 256 << 20;

/// Measures every density and every pair, and prints the rows as they come. Where the others fail,
/// the reason goes to standard error, and all else is measured.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let peers = args.python.as_ref().map(|python| Peers {
        python: python.clone(),
        script: args.script.clone(),
        deadline: Duration::from_secs(args.deadline),
    });
    let mut failed = Vec::new();
    let mut show = |name: &str, rows: Result<Vec<Row>, Box<dyn Error>>| match rows {
        Ok(rows) => rows.iter().try_for_each(|row| group::print(args.json, row)),
        Err(error) => {
            eprintln!("{name}: {error}");
            failed.push(name.to_owned());
            Ok(())
        }
    };
    group::head(args.json);
    synthetic(args, peers.as_ref(), &mut show)?;
    if let Some(folder) = &args.real {
        trained(folder, args, peers.as_ref(), &mut show)?;
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("no figures of others for {}", failed.join("; ")).into()),
    }
}

/// Prints rows, or tells why there are none.
type Show<'a> =
    dyn FnMut(&str, Result<Vec<Row>, Box<dyn Error>>) -> Result<(), Box<dyn Error>> + 'a;

fn synthetic(
    args: &Args,
    peers: Option<&Peers>,
    show: &mut Show<'_>,
) -> Result<(), Box<dyn Error>> {
    let name = |targets: &Targets| format!("{} %", targets.percent);
    let wanted = |targets: &Targets| name(targets).contains(&args.only);
    if !DENSITIES.iter().any(wanted) {
        return Ok(());
    }
    let mut steps = Steps::new(args.size.0 as usize / 2);
    let mut passes = Passes::new(args.size.0 as usize);
    let mut digested = false;
    for targets in DENSITIES.into_iter().filter(wanted) {
        let changed = steps.scale(targets.percent / 100.0);
        let label = format!(
            "{} changed ({:.2} measured)",
            name(&targets),
            changed * 100.0
        );
        let figures = passes.measure(&steps, args.rounds, targets.percent < 20.0)?;
        if !digested {
            let row = timed(
                "digest, full",
                &figures.digest,
                figures.memcpy,
                Some(1.0 / 1.5),
            );
            show(&label, Ok(vec![row]))?;
            digested = true;
        }
        show(&label, Ok(rows(&label, &figures, targets)))?;
        if let Some(peers) = peers {
            show(&label, compared(&label, targets.percent, &steps, peers))?;
        }
    }
    Ok(())
}

/// The pairs of a folder.
fn trained(
    folder: &Path,
    args: &Args,
    peers: Option<&Peers>,
    show: &mut Show<'_>,
) -> Result<(), Box<dyn Error>> {
    for place in real::places(folder)? {
        if !place.case.contains(&args.only) {
            continue;
        }
        let pair = place.read(folder)?;
        let figures = pair.measure(args.rounds)?;
        let label = figures.label(&pair);
        show(&label, Ok(figures.rows(&pair)))?;
        if let Some(peers) = peers {
            show(&label, figures.compared(&pair, peers))?;
        }
    }
    Ok(())
}

/// The others, given a part of a synthetic step.
fn compared(
    label: &str,
    percent: f64,
    steps: &Steps,
    peers: &Peers,
) -> Result<Vec<Row>, Box<dyn Error>> {
    let part = steps.old.len().min(PART);
    let (old, new) = (&steps.old[..part], &steps.new[..part]);
    let mut deltas: Deltas = vec![Vec::new(); part.div_ceil(passes::SPAN_BYTES)];
    let patterns = vec![passes::BF16; deltas.len()];
    let scratch = &mut [Scratch::new()];
    let changes = passes::code(&patterns, Codec::Thin, old, new, &mut deltas, scratch)?;
    let bytes = deltas.iter().map(|delta| delta.len() as u64).sum();
    let theirs = peers.measure(old, new, passes::BF16.width())?;
    let mut rows = Vec::new();
    for theirs in &theirs {
        rows.push(theirs.row(label, percent, changes, bytes)?);
    }
    rows.extend(theirs.iter().flat_map(|theirs| theirs.times(label)));
    Ok(rows)
}

fn rows(label: &str, got: &Figures, targets: Targets) -> Vec<Row> {
    let timed = |what: &str, seconds: &passes::Pass, target| {
        timed(&format!("{label}: {what}"), seconds, got.memcpy, target)
    };
    let width = passes::BF16.width();
    let mut rows = vec![
        timed("compare", &got.compare, Some(1.0)),
        timed("fast, compare + encode", &got.fast, targets.fast),
        bytes(label, "fast", width, got.fast_bytes, targets.fast_bytes),
        timed("fast, decode + apply", &got.fast_apply, targets.apply),
        timed(
            "fast, apply while the old version is copied",
            &got.fast_onto,
            None,
        ),
        timed("fast, two steps folded, apply", &got.folded_apply, None),
        timed("fold two fast deltas", &got.fold, None),
        timed("digest kept up by it", &got.kept_up, targets.kept_up),
    ];
    rows.push(timed("thin, compare + encode", &got.thin, targets.thin));
    rows.push(bytes(
        label,
        "thin",
        width,
        got.thin_bytes,
        targets.thin_bytes,
    ));
    rows.push(timed(
        "thin, decode + apply",
        &got.thin_apply,
        targets.thin_apply,
    ));
    let half = |target: Option<f64>| target.map(|target| target / 2.0);
    let two = timed(
        "thin, compare + encode, 2 threads",
        &got.thin_2,
        half(targets.thin),
    );
    rows.push(two);
    let what = "thin, decode + apply, 2 threads";
    rows.push(timed(what, &got.thin_apply_2, half(targets.thin_apply)));
    rows.retain(|row| row.value > 0.0);
    rows
}

/// A time, as a multiple of a memcpy of the same round.
fn timed(case: &str, pass: &passes::Pass, memcpy: f64, target: Option<f64>) -> Row {
    Row {
        case: case.to_owned(),
        value: pass.seconds * 1e3,
        unit: "ms",
        baseline: memcpy * 1e3,
        ratio: pass.ratio,
        target,
        met: target.map(|target| pass.ratio <= target),
    }
}

/// The bytes that a change takes, compared with a place of four bytes plus a value.
fn bytes(label: &str, codec: &str, width: usize, each: f64, target: Option<f64>) -> Row {
    let plain = (4 + width) as f64;
    Row {
        case: format!("{label}: {codec}, a change"),
        value: each,
        unit: "bytes",
        baseline: plain,
        ratio: each / plain,
        target,
        met: target.map(|target| each <= target),
    }
}
