//! What deltas cost: the group of `cargo xtask bench delta`.
//!
//! Every figure is beside one `memcpy` of the model's bytes in the same round. All is done in memory
//! of this process; what it comes to from publish to live is in the group `net`.

mod passes;
mod steps;

use std::error::Error;

use super::group::{self, Row};
use super::numbers::Size;
use passes::{Figures, Passes};
use steps::Steps;

/// How the group is run.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Only densities whose name contains this, such as "1.1 %"
    #[arg(long, default_value = "")]
    only: String,
    /// Bytes of the model, in bf16
    #[arg(long, default_value = "1GiB")]
    size: Size,
    /// Rounds of which the median is taken
    #[arg(long, default_value_t = 5)]
    rounds: usize,
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

/// Measures every density and prints its rows as they come.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    group::head(args.json);
    let mut steps = Steps::new(args.size.0 as usize / 2);
    let mut passes = Passes::new(args.size.0 as usize);
    let mut digested = false;
    for targets in DENSITIES {
        let name = format!("{} %", targets.percent);
        if !name.contains(&args.only) {
            continue;
        }
        let changed = steps.scale(targets.percent / 100.0);
        let label = format!("{name} changed ({:.2} measured)", changed * 100.0);
        let figures = passes.measure(&steps, args.rounds, targets.percent < 20.0)?;
        if !digested {
            let row = timed(
                "digest, full",
                &figures.digest,
                figures.memcpy,
                Some(1.0 / 1.5),
            );
            group::print(args.json, &row)?;
            digested = true;
        }
        for row in rows(&label, &figures, targets) {
            group::print(args.json, &row)?;
        }
    }
    Ok(())
}

fn rows(label: &str, got: &Figures, targets: Targets) -> Vec<Row> {
    let timed = |what: &str, seconds: &passes::Pass, target| {
        timed(&format!("{label}: {what}"), seconds, got.memcpy, target)
    };
    let mut rows = vec![
        timed("compare", &got.compare, Some(1.0)),
        timed("fast, compare + encode", &got.fast, targets.fast),
        bytes(label, "fast", got.fast_bytes, targets.fast_bytes),
        timed("fast, decode + apply", &got.fast_apply, targets.apply),
        timed("fast, two steps folded, apply", &got.folded_apply, None),
        timed("fold two fast deltas", &got.fold, None),
        timed("digest kept up by it", &got.kept_up, targets.kept_up),
    ];
    rows.push(timed("thin, compare + encode", &got.thin, targets.thin));
    rows.push(bytes(label, "thin", got.thin_bytes, targets.thin_bytes));
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

/// How many bytes a change takes, beside the four that a place and a value would.
fn bytes(label: &str, codec: &str, each: f64, target: Option<f64>) -> Row {
    Row {
        case: format!("{label}: {codec}, a change"),
        value: each,
        unit: "bytes",
        baseline: 6.0,
        ratio: each / 6.0,
        target,
        met: target.map(|target| each <= target),
    }
}
