//! The project's own cases with their targets: `cargo xtask bench mem`.

use std::error::Error;

use serde::Serialize;

use super::numbers::Size;
use super::shared_mem::{self, Figures};
use crate::plot::{self, Bar};

/// How the group is run.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Also draw the multiples of memcpy, into bench-mem.svg
    #[arg(long)]
    plot: bool,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,
}

/// One row of `docs/performance.md`.
#[derive(Serialize)]
pub struct Row {
    pub case: String,
    pub value: f64,
    pub unit: &'static str,
    pub baseline: f64,
    pub ratio: f64,
    pub target: Option<f64>,
    pub met: Option<bool>,
}

impl Row {
    /// How much longer one run's sends took than another's, each measured by the
    /// memcpy of its own rounds.
    fn compared(case: String, got: &Figures, other: &Figures, target: f64) -> Self {
        let ratio = got.ratio / other.ratio;
        Self {
            case,
            value: got.ratio,
            unit: "×",
            baseline: other.ratio,
            ratio,
            target: Some(target),
            met: Some(ratio <= target),
        }
    }
}

/// Which figure of a run a case is about.
#[derive(Clone, Copy)]
enum Figure {
    /// Send to applied as a multiple of memcpy.
    Ratio,
    AppliedMedian,
    AppliedP99,
    /// The first send.
    First,
    /// All processes' memory over source and slots.
    Memory,
}

struct Case {
    name: String,
    args: shared_mem::Args,
    figures: Vec<(Figure, Option<f64>)>,
}

/// Runs every case and prints its rows as they come.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mut flat: Vec<(usize, Figures)> = Vec::new();
    let mut many: Vec<(u64, Figures)> = Vec::new();
    head(args.json);
    let mut drawn = Vec::new();
    for case in cases()
        .into_iter()
        .filter(|case| case.name.contains(&args.only))
    {
        let figures = shared_mem::measure(&case.args)?;
        for (figure, target) in &case.figures {
            let row = row(&case.name, *figure, &figures, *target);
            print(args.json, &row)?;
            if let Figure::Ratio = figure {
                drawn.push(Bar {
                    label: row.case,
                    value: row.ratio,
                    target: row.target,
                });
            }
        }
        if case.name.starts_with("send 1 GiB bf16, N =") {
            flat.push((case.args.readers, figures));
        } else if case.name.starts_with("send 100 MB in") {
            many.push((case.args.tensors, figures));
        }
    }
    if let [first, .., last] = &flat[..] {
        let case = format!(
            "send 1 GiB, N = {} over N = {}, each by its memcpy",
            last.0, first.0
        );
        print(args.json, &Row::compared(case, &last.1, &first.1, 1.1))?;
    }
    if let [one, .., all] = &many[..] {
        let case = format!("100 MB in {} tensors over one, each by its memcpy", all.0);
        print(args.json, &Row::compared(case, &all.1, &one.1, 2.0))?;
    }
    if args.plot {
        let svg = plot::bars(
            "send to live on every worker, in memcpys of the same bytes",
            "×",
            &drawn,
        )?;
        std::fs::write("bench-mem.svg", svg)?;
        eprintln!("wrote bench-mem.svg");
    }
    Ok(())
}

fn cases() -> Vec<Case> {
    let gib = shared_mem::Args {
        size: Size(1 << 30),
        tensors: 128,
        readers: 4,
        rounds: Some(15),
        checksums: false,
        threads: 1,
        loan: false,
        sleep: false,
        json: false,
    };
    let small = shared_mem::Args {
        size: Size(16 << 10),
        tensors: 4,
        rounds: Some(20_000),
        ..gib.clone()
    };
    let mut cases = Vec::new();
    for readers in [1, 2, 4, 8] {
        cases.push(Case {
            name: format!("send 1 GiB bf16, N = {readers}"),
            args: shared_mem::Args {
                readers,
                ..gib.clone()
            },
            figures: vec![(Figure::Ratio, Some(0.80))],
        });
    }
    for readers in [1, 8] {
        cases.push(Case {
            name: format!("send 1 GiB bf16 with CRC-64, 2 threads, N = {readers}"),
            args: shared_mem::Args {
                readers,
                checksums: true,
                threads: 2,
                ..gib.clone()
            },
            figures: vec![(Figure::Ratio, Some(1.05))],
        });
    }
    cases.push(Case {
        name: "send 1 GiB bf16, 2 threads, N = 4".into(),
        args: shared_mem::Args {
            threads: 2,
            ..gib.clone()
        },
        figures: vec![(Figure::Ratio, None)],
    });
    cases.push(Case {
        name: "first send 1 GiB: connect, cold slots, N = 4".into(),
        args: shared_mem::Args {
            rounds: Some(3),
            ..gib.clone()
        },
        figures: vec![(Figure::First, None)],
    });
    for (size, rounds) in [(16 << 10, 20_000), (16 << 20, 301), (1 << 30, 15)] {
        for readers in [1, 4, 8] {
            cases.push(Case {
                name: format!("loan {}, last byte to applied, N = {readers}", Size(size)),
                args: shared_mem::Args {
                    size: Size(size),
                    tensors: 4,
                    loan: true,
                    rounds: Some(rounds),
                    readers,
                    ..gib.clone()
                },
                figures: vec![(Figure::AppliedMedian, Some(100.0))],
            });
        }
    }
    for (readers, sleep, median, p99) in [
        (1, false, 2.0, 5.0),
        (4, false, 8.0, 15.0),
        (1, true, 75.0, 120.0),
        (4, true, 75.0, 120.0),
    ] {
        let style = if sleep { "sleep" } else { "yield then sleep" };
        cases.push(Case {
            name: format!("send 16 KiB, {style}, N = {readers}"),
            args: shared_mem::Args {
                readers,
                sleep,
                ..small.clone()
            },
            figures: vec![
                (Figure::AppliedMedian, Some(median)),
                (Figure::AppliedP99, Some(p99)),
            ],
        });
    }
    for tensors in [1, 100_000] {
        cases.push(Case {
            name: format!("send 100 MB in {tensors} tensors, N = 1"),
            args: shared_mem::Args {
                size: Size(102_400_000),
                tensors,
                readers: 1,
                rounds: Some(31),
                ..gib.clone()
            },
            figures: vec![(Figure::Ratio, None)],
        });
    }
    for readers in [1, 4, 8] {
        cases.push(Case {
            name: format!("memory at 4 GiB, N = {readers}"),
            args: shared_mem::Args {
                size: Size(4 << 30),
                readers,
                rounds: Some(1),
                ..gib.clone()
            },
            figures: vec![(Figure::Memory, Some(1.05))],
        });
    }
    cases
}

fn row(case: &str, figure: Figure, got: &Figures, target: Option<f64>) -> Row {
    let (name, value, unit, baseline, judged) = match figure {
        Figure::Ratio => (
            "",
            got.applied_us / 1e3,
            "ms",
            got.memcpy_us / 1e3,
            got.ratio,
        ),
        Figure::AppliedMedian => (", p50", got.applied_us, "µs", got.memcpy_us, got.applied_us),
        Figure::AppliedP99 => (
            ", p99",
            got.applied_p99_us,
            "µs",
            got.memcpy_us,
            got.applied_p99_us,
        ),
        Figure::First => (
            "",
            got.first_us / 1e3,
            "ms",
            got.memcpy_us / 1e3,
            got.first_us / got.memcpy_us,
        ),
        Figure::Memory => {
            let needed = (got.source_bytes + 2 * got.bytes) as f64;
            let used = got.memory_bytes as f64;
            (
                "",
                used / f64::from(1 << 20),
                "MiB",
                needed / f64::from(1 << 20),
                used / needed,
            )
        }
    };
    Row {
        case: format!("{case}{name}"),
        value,
        unit,
        baseline,
        ratio: value / baseline,
        target,
        met: target.map(|target| judged <= target),
    }
}

/// Prints what the columns of the table are.
pub fn head(json: bool) {
    if !json {
        println!(
            "{:<58}{:>12}  {:>10}  {:>7}  {:>7}",
            "case", "value", "baseline", "ratio", "target"
        );
    }
}

/// Prints a row of the table, or its line of JSON.
pub fn print(json: bool, row: &Row) -> Result<(), Box<dyn Error>> {
    if json {
        println!("{}", serde_json::to_string(row)?);
        return Ok(());
    }
    let target = match (row.target, row.met) {
        (Some(target), met) => {
            // 2.4 times faster is a ratio of 0.41666….
            let target = (target * 1e3).round() / 1e3;
            let met = if met == Some(true) { "met" } else { "MISSED" };
            format!("≤ {target} {met}")
        }
        _ => String::new(),
    };
    println!(
        "{:<58}{:>12}  {:>10}  {:>7.2}  {target}",
        row.case,
        format!("{:.2} {}", row.value, row.unit),
        format!("{:.2}", row.baseline),
        row.ratio
    );
    Ok(())
}
