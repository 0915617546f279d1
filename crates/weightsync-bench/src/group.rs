//! The project's own cases with their targets: `cargo xtask bench mem`.

use std::error::Error;
use std::time::Duration;

use serde::Serialize;
use weightsync_cli::output;
use weightsync_engine::{AnyScheme, MultiProcess, Queue, SharedMem};

use super::local::{self, Figures};
use super::numbers::{Size, Times};
use super::{overhead, set};
use crate::bars::{self, Bar};

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

/// One row of `docs/performance-rows.md`.
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
    /// The first send, in milliseconds.
    First,
    /// All processes' memory over source and slots.
    Memory,
}

struct Case {
    name: String,
    scheme: AnyScheme,
    args: local::LocalArgs,
    figures: Vec<(Figure, Option<f64>)>,
}

/// Runs every case and prints its rows as they come.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mut flat = [
        ("send 1 GiB bf16, N =", "send 1 GiB", Vec::new()),
        (
            "multi-process 1 GiB, N =",
            "multi-process 1 GiB",
            Vec::new(),
        ),
    ];
    let mut many: Vec<(u64, Figures)> = Vec::new();
    head(args.json);
    let mut drawn = Vec::new();
    for case in cases()
        .into_iter()
        .filter(|case| case.name.contains(&args.only))
    {
        let figures = local::measure(&case.scheme, &case.args)?;
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
        if case.name.starts_with("send 100 MB in") {
            many.push((case.args.tensors, figures));
        } else if let Some((_, _, of)) = flat
            .iter_mut()
            .find(|(prefix, _, _)| case.name.starts_with(prefix))
        {
            of.push((case.args.readers, figures));
        }
    }
    for (_, what, of) in &flat {
        if let [first, .., last] = &of[..] {
            let case = format!(
                "{what}, N = {} over N = {}, each by its memcpy",
                last.0, first.0
            );
            print(args.json, &Row::compared(case, &last.1, &first.1, 1.1))?;
        }
    }
    if let [one, .., all] = &many[..] {
        let case = format!("100 MB in {} tensors over one, each by its memcpy", all.0);
        print(args.json, &Row::compared(case, &all.1, &one.1, 2.0))?;
    }
    for comparison in comparisons() {
        if comparison.name.contains(&args.only) {
            print(args.json, &comparison.measure()?)?;
        }
    }
    if args.plot {
        let svg = bars::bars(
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
    let mut cases = shared_mem();
    cases.extend(multi_process());
    cases
}

fn gib() -> local::LocalArgs {
    local::LocalArgs {
        rounds: Some(15),
        ..local::LocalArgs::plain()
    }
}

fn small() -> local::LocalArgs {
    local::LocalArgs {
        size: Size(16 << 10),
        tensors: 4,
        rounds: Some(20_000),
        ..local::LocalArgs::plain()
    }
}

fn shared_mem() -> Vec<Case> {
    let (gib, small) = (gib(), small());
    let scheme = AnyScheme::new(SharedMem::default());
    let mut cases = Vec::new();
    for readers in [1, 2, 4, 8] {
        cases.push(Case {
            name: format!("send 1 GiB bf16, N = {readers}"),
            scheme: scheme.clone(),
            args: local::LocalArgs {
                readers,
                ..gib.clone()
            },
            figures: vec![(Figure::Ratio, Some(0.80))],
        });
    }
    for readers in [1, 8] {
        cases.push(Case {
            name: format!("send 1 GiB bf16 with CRC-64, 2 threads, N = {readers}"),
            scheme: scheme.clone(),
            args: local::LocalArgs {
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
        scheme: scheme.clone(),
        args: local::LocalArgs {
            threads: 2,
            ..gib.clone()
        },
        figures: vec![(Figure::Ratio, None)],
    });
    cases.push(Case {
        name: "first send 1 GiB: connect, cold slots, N = 4".into(),
        scheme: scheme.clone(),
        args: local::LocalArgs {
            rounds: Some(3),
            ..gib.clone()
        },
        // Where the kernel gives shared memory huge pages.
        figures: vec![(Figure::First, Some(350.0))],
    });
    for (size, rounds) in [(16 << 10, 20_000), (16 << 20, 301), (1 << 30, 15)] {
        for readers in [1, 4, 8] {
            cases.push(Case {
                name: format!("loan {}, last byte to applied, N = {readers}", Size(size)),
                scheme: scheme.clone(),
                args: local::LocalArgs {
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
        (4, false, 6.0, 15.0),
        (1, true, 75.0, 120.0),
        (4, true, 75.0, 120.0),
    ] {
        let style = if sleep { "sleep" } else { "yield then sleep" };
        cases.push(Case {
            name: format!("send 16 KiB, {style}, N = {readers}"),
            scheme: scheme.clone(),
            args: local::LocalArgs {
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
            scheme: scheme.clone(),
            args: local::LocalArgs {
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
            scheme: scheme.clone(),
            args: local::LocalArgs {
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

fn multi_process() -> Vec<Case> {
    let snapshots = AnyScheme::new(MultiProcess::default());
    let every = AnyScheme::new(MultiProcess {
        queue: Queue::Every { bound: 4 },
        own_copy: false,
    });
    let own_copy = AnyScheme::new(MultiProcess {
        own_copy: true,
        ..MultiProcess::default()
    });
    let mut cases = Vec::new();
    for (words, scheme, target) in [
        ("", &snapshots, Some(1.4)),
        (", every=4", &every, Some(1.4)),
        (", own copies", &own_copy, None),
    ] {
        for readers in [1, 2, 4] {
            cases.push(Case {
                name: format!("multi-process 1 GiB{words}, N = {readers}"),
                scheme: scheme.clone(),
                args: local::LocalArgs { readers, ..gib() },
                figures: vec![(Figure::Ratio, target)],
            });
        }
    }
    for (words, scheme) in [
        ("", snapshots),
        (", every=4", every),
        (", own copies", own_copy),
    ] {
        for readers in [1, 4] {
            cases.push(Case {
                name: format!("multi-process 16 KiB{words}, N = {readers}"),
                scheme: scheme.clone(),
                args: local::LocalArgs { readers, ..small() },
                figures: vec![(Figure::AppliedMedian, None), (Figure::AppliedP99, None)],
            });
        }
    }
    cases
}

/// A measurement that is compared with something other than memcpy.
struct Comparison {
    name: String,
    what: Workload,
    target: Option<f64>,
}

enum Workload {
    /// A set of 8 models, compared with one model of the same bytes.
    Set { size: u64, turns: u32, batch: u32 },
    /// Simulated workers, compared with one.
    Simulated { workers: usize },
    /// Real receivers, so many in each of some processes, compared with one.
    Crowd { processes: usize, receivers: u32 },
}

fn comparisons() -> Vec<Comparison> {
    let set = |size, turns, batch, target| Comparison {
        name: format!("a set of 8 models, {}, N = 4, over one model", Size(size)),
        what: Workload::Set { size, turns, batch },
        target,
    };
    vec![
        set(512 << 20, 31, 1, Some(1.1)),
        set(16 << 10, 51, 100, None),
        Comparison {
            name: "send 16 KiB, reports of 1000 simulated workers".into(),
            what: Workload::Simulated { workers: 1000 },
            target: Some(5.0),
        },
        Comparison {
            name: format!(
                "send 16 KiB, 1000 receivers in 4 processes, ulimit -n {}",
                overhead::FILES
            ),
            what: Workload::Crowd {
                processes: 4,
                receivers: 250,
            },
            target: None,
        },
    ]
}

impl Comparison {
    /// Measures both; a set is judged by the ratio, the others by their time.
    fn measure(self) -> Result<Row, Box<dyn Error>> {
        let (times, baseline, by_ratio) = match self.what {
            Workload::Set { size, turns, batch } => {
                let args = local::LocalArgs {
                    size: Size(size),
                    ..local::LocalArgs::plain()
                };
                let pair = set::compare_with_one(&args, 8, turns, batch)?;
                (pair.set, pair.one, true)
            }
            Workload::Simulated { workers } => {
                let pair = overhead::simulated(&small(), workers, 501)?;
                (pair.many, pair.one, false)
            }
            Workload::Crowd {
                processes,
                receivers,
            } => {
                let crowd = |readers, receivers| {
                    let args = local::LocalArgs { readers, ..small() };
                    overhead::crowd(&args, receivers, 101)
                };
                (crowd(processes, receivers)?, crowd(1, 1)?, false)
            }
        };
        let mut row = compared(self.name, &times, &baseline, by_ratio, self.target);
        // A crowd without one of its workers is an error.
        if let Workload::Crowd { .. } = self.what {
            row.met = Some(true);
        }
        Ok(row)
    }
}

/// The row of medians, in milliseconds.
fn compared(
    case: String,
    times: &Times,
    baseline: &Times,
    by_ratio: bool,
    target: Option<f64>,
) -> Row {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (value, baseline) = (ms(times.median()), ms(baseline.median()));
    let ratio = value / baseline;
    let judged = if by_ratio { ratio } else { value };
    Row {
        case,
        value,
        unit: "ms",
        baseline,
        ratio,
        target,
        met: target.map(|target| judged <= target),
    }
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
            got.first_us / 1e3,
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
        // Rows report a standard output that cannot be written.
        let _ = output::print(&format!(
            "{:<58}{:>12}  {:>10}  {:>7}  {:>7}\n",
            "case", "value", "baseline", "ratio", "target"
        ));
    }
}

/// Prints a row of the table, or its line of JSON.
pub fn print(json: bool, row: &Row) -> Result<(), Box<dyn Error>> {
    if json {
        output::print(&format!("{}\n", serde_json::to_string(row)?))?;
        return Ok(());
    }
    let target = match (row.target, row.met) {
        (Some(target), met) => {
            // 2.4 times faster is a ratio of 0.41666….
            let target = (target * 1e3).round() / 1e3;
            let met = if met == Some(true) { "met" } else { "MISSED" };
            format!("≤ {target} {met}")
        }
        (None, Some(true)) => "works".into(),
        _ => String::new(),
    };
    let line = format!(
        "{:<58}{:>12}  {:>10}  {:>7.2}  {target}\n",
        row.case,
        format!("{:.2} {}", row.value, row.unit),
        format!("{:.2}", row.baseline),
        row.ratio
    );
    Ok(output::print(&line)?)
}
