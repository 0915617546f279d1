//! TorchRL's schemes for one machine compared with ours: the same bytes, a source that
//! shares nothing with what the workers read, rounds that alternate.
//!
//! A send is timed from its call until it has returned, at both: then every
//! worker has the version. The source is written again before each send, outside
//! the timed part. Small models are sent several times in a row at each turn, so
//! that what is compared is not how long a core takes to wake up. Our workers
//! take snapshots without a copy; TorchRL's end up with the weights in their
//! model's parameters. What it costs ours to have a copy each is measured too, in
//! rounds of its own.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use weightsync_engine::{AnyScheme, MultiProcess, SharedMem};

use super::group::{self, Row};
use super::local::{self, Baseline};
use super::numbers::{Size, Times, ratio};
use super::peer::{Arrangement, Peer, Program};

/// How the comparison is run.
#[derive(clap::Args)]
pub struct Args {
    /// The Python of an environment with python/requirements-test.txt
    #[arg(long)]
    python: PathBuf,
    /// The program that measures TorchRL
    #[arg(long, default_value = "bench/peers/torchrl_local.py")]
    script: PathBuf,
    /// Seconds that TorchRL may take for an answer
    #[arg(long, default_value_t = 120)]
    deadline: u64,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,
}

/// Runs every case and prints its rows as they come. A case whose peer fails has
/// no rows, its reason goes to standard error, and the others are run.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let program = Program {
        python: args.python.clone(),
        script: args.script.clone(),
        deadline: Duration::from_secs(args.deadline),
    };
    group::head(args.json);
    let mut failed = Vec::new();
    let mut flat = Flat::default();
    for case in cases().filter(|case| case.name().contains(&args.only)) {
        match case.measure(&program) {
            Ok(figures) => {
                for row in case
                    .rows(&figures)
                    .into_iter()
                    .chain(flat.row(&case, &figures))
                {
                    group::print(args.json, &row)?;
                }
            }
            Err(error) => {
                eprintln!("{}: {error}", case.name());
                failed.push(case.name());
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("no figures for {}", failed.join("; ")).into())
}

/// A scheme that both have under one name.
struct Scheme {
    name: &'static str,
    ours: fn() -> AnyScheme,
    /// Ours with a copy for each worker, where it has that.
    own_copies: Option<fn() -> AnyScheme>,
}

const SHARED_MEM: &str = "shared-mem";
const MULTI_PROCESS: &str = "multi-process";

const SCHEMES: [Scheme; 2] = [
    Scheme {
        name: SHARED_MEM,
        ours: || SharedMem::default().into(),
        own_copies: None,
    },
    Scheme {
        name: MULTI_PROCESS,
        ours: || MultiProcess::default().into(),
        own_copies: Some(|| {
            AnyScheme::new(MultiProcess {
                own_copy: true,
                ..MultiProcess::default()
            })
        }),
    },
];

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The sizes, how often each is sent in a row, and how many turns there are.
const SIZES: [(u64, usize, usize); 6] = [
    (16 * KIB, 20, 15),
    (MIB, 5, 21),
    (16 * MIB, 1, 51),
    (128 * MIB, 1, 25),
    (512 * MIB, 1, 15),
    (1024 * MIB, 1, 9),
];

/// From this size on a send is judged by memcpy: below it, by the time it takes
/// to reach another process.
const BULK: u64 = 16 * MIB;

/// Turns that are not counted.
const WARM: usize = 2;

/// How much longer than with one worker a send to several may take.
const FLAT: f64 = 1.1;

struct Case {
    scheme: &'static Scheme,
    size: u64,
    batch: usize,
    turns: usize,
    workers: usize,
}

/// What a case came to.
struct Figures {
    ours: Ours,
    own_copies: Option<Ours>,
    theirs: Times,
    their_memcpy: Times,
    their_first: Duration,
}

struct Ours {
    sends: Times,
    memcpy: Times,
    first: Duration,
}

fn cases() -> impl Iterator<Item = Case> {
    let case = |scheme, (size, batch, turns), workers| Case {
        scheme,
        size,
        batch,
        turns,
        workers,
    };
    SCHEMES.iter().flat_map(move |scheme| {
        SIZES.into_iter().flat_map(move |size| {
            [1, 2, 4]
                .into_iter()
                .map(move |workers| case(scheme, size, workers))
        })
    })
}

impl Case {
    fn name(&self) -> String {
        let (scheme, size) = (self.scheme.name, Size(self.size));
        format!("{scheme} {size}, N = {}", self.workers)
    }

    /// As many tensors as both send.
    fn tensors(&self) -> u64 {
        if self.size < MIB { 4 } else { 64 }
    }

    fn measure(&self, program: &Program) -> Result<Figures, Box<dyn Error>> {
        let mut peer = Peer::start(
            program,
            &Arrangement {
                scheme: self.scheme.name,
                bytes: self.size,
                tensors: self.tensors(),
                workers: self.workers,
            },
        )?;
        let mut ours = Running::start(self, (self.scheme.ours)())?;
        // What is lazy is faulted in, and caches are warm.
        for _ in 0..WARM {
            ours.turn(self.batch)?;
            peer.round(self.batch)?;
        }
        let (mut theirs, mut their_memcpy) = (Times::default(), Times::default());
        ours.forget();
        for _ in 0..self.turns {
            ours.turn(self.batch)?;
            let round = peer.round(self.batch)?;
            round.sends.into_iter().for_each(|time| theirs.push(time));
            round
                .memcpys
                .into_iter()
                .for_each(|time| their_memcpy.push(time));
        }
        let their_first = peer.first();
        peer.quit()?;
        let ours = ours.end();
        // Measured alone: copies for every worker leave less room for a peer.
        let own_copies = self.scheme.own_copies.map(|scheme| self.alone(scheme()));
        Ok(Figures {
            ours,
            own_copies: own_copies.transpose()?,
            theirs,
            their_memcpy,
            their_first,
        })
    }

    fn alone(&self, scheme: AnyScheme) -> Result<Ours, Box<dyn Error>> {
        let mut running = Running::start(self, scheme)?;
        for _ in 0..WARM {
            running.turn(self.batch)?;
        }
        running.forget();
        for _ in 0..self.turns {
            running.turn(self.batch)?;
        }
        Ok(running.end())
    }

    fn rows(&self, got: &Figures) -> Vec<Row> {
        let name = self.name();
        let theirs = got.theirs.median();
        let (sends, memcpy) = (got.ours.sends.median(), got.ours.memcpy.median());
        let mut rows = vec![
            row(
                format!("{name}, against TorchRL's"),
                self.size,
                sends,
                theirs,
                against_target(self.scheme.name, self.size, self.workers),
            ),
            row(
                format!("{name}, against memcpy"),
                self.size,
                sends,
                memcpy,
                memcpy_target(self.scheme.name, self.size),
            ),
        ];
        if self.size == 1024 * MIB && self.workers == 4 {
            let case = format!("{name}, the first send against TorchRL's");
            let (ours, theirs) = (got.ours.first, got.their_first);
            let target = (self.scheme.name == SHARED_MEM).then_some(0.7);
            rows.push(row(case, self.size, ours, theirs, target));
        }
        if let Some(own) = &got.own_copies {
            let case = format!("{name}, own copies, against memcpy");
            let (sends, memcpy) = (own.sends.median(), own.memcpy.median());
            rows.push(row(case, self.size, sends, memcpy, None));
        }
        let case = format!("{name}, TorchRL's against memcpy");
        rows.push(row(
            case,
            self.size,
            theirs,
            got.their_memcpy.median(),
            None,
        ));
        rows
    }
}

/// At most this many times what TorchRL takes.
fn against_target(scheme: &str, size: u64, workers: usize) -> Option<f64> {
    match (scheme, size, workers) {
        (SHARED_MEM, size, _) if size == 16 * KIB => Some(1.0 / 10.0),
        (SHARED_MEM, size, 4) if size == 512 * MIB => Some(1.0 / 2.4),
        (SHARED_MEM, _, _) => Some(1.0),
        (MULTI_PROCESS, _, 4) => Some(1.0 / 4.0),
        _ => None,
    }
}

/// At most this many memcpys. Shared memory has its own rows in the group `mem`.
fn memcpy_target(scheme: &str, size: u64) -> Option<f64> {
    (scheme == MULTI_PROCESS && size >= BULK).then_some(1.4)
}

fn row(case: String, size: u64, value: Duration, baseline: Duration, target: Option<f64>) -> Row {
    let (factor, unit) = match size < BULK {
        true => (1e6, "µs"),
        false => (1e3, "ms"),
    };
    let ratio = ratio(value, baseline);
    Row {
        case,
        value: value.as_secs_f64() * factor,
        unit,
        baseline: baseline.as_secs_f64() * factor,
        ratio,
        target,
        met: target.map(|target| ratio <= target),
    }
}

/// Remembers what one worker took, to say how much longer four did.
#[derive(Default)]
struct Flat {
    one: Option<(&'static str, u64, f64)>,
}

impl Flat {
    /// The row that compares, when this case completes a pair.
    fn row(&mut self, case: &Case, got: &Figures) -> Option<Row> {
        let value = ratio(got.ours.sends.median(), got.ours.memcpy.median());
        let (scheme, size) = (case.scheme.name, case.size);
        if case.workers == 1 {
            self.one = Some((scheme, size, value));
        }
        let (one_scheme, one_size, one) = self.one?;
        if case.workers != 4 || size < BULK || (one_scheme, one_size) != (scheme, size) {
            return None;
        }
        let ratio = value / one;
        Some(Row {
            case: format!("{scheme} {}, N = 4 over N = 1, by memcpy", Size(size)),
            value,
            unit: "×",
            baseline: one,
            ratio,
            target: Some(FLAT),
            met: Some(ratio <= FLAT),
        })
    }
}

/// Our end of a case.
struct Running {
    local: local::RunningBench,
    baseline: Baseline,
    done: u32,
    got: Ours,
}

impl Running {
    fn start(case: &Case, scheme: AnyScheme) -> Result<Self, Box<dyn Error>> {
        let args = local::LocalArgs {
            size: Size(case.size),
            tensors: case.tensors(),
            readers: case.workers,
            ..local::LocalArgs::plain()
        };
        let local = local::RunningBench::start(&scheme, &args)?;
        Ok(Self {
            got: Ours {
                sends: Times::default(),
                memcpy: Times::default(),
                first: local.first,
            },
            local,
            baseline: Baseline::new(usize::try_from(case.size)?),
            done: 0,
        })
    }

    fn turn(&mut self, sends: usize) -> Result<(), Box<dyn Error>> {
        for _ in 0..sends {
            self.done += 1;
            // Whole numbers up to 256 are exact in bfloat16, and neighbours differ.
            self.local.source.change(100.0, self.done as u64)?;
            let (took, _) = self.local.send()?;
            self.got.sends.push(took);
        }
        for _ in 0..sends {
            self.got.memcpy.push(self.baseline.copy());
        }
        Ok(())
    }

    /// Leaves out what was measured so far.
    fn forget(&mut self) {
        self.got.sends = Times::default();
        self.got.memcpy = Times::default();
    }

    fn end(self) -> Ours {
        self.local.end();
        self.got
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_the_target_the_comparison_is_about() {
        for (scheme, size, workers, against, memcpy) in [
            (SHARED_MEM, 16 * KIB, 1, Some(0.1), None),
            (SHARED_MEM, 16 * KIB, 4, Some(0.1), None),
            (SHARED_MEM, MIB, 4, Some(1.0), None),
            (SHARED_MEM, 512 * MIB, 2, Some(1.0), None),
            (SHARED_MEM, 512 * MIB, 4, Some(1.0 / 2.4), None),
            (SHARED_MEM, 1024 * MIB, 4, Some(1.0), None),
            (MULTI_PROCESS, 16 * KIB, 4, Some(0.25), None),
            (MULTI_PROCESS, MIB, 1, None, None),
            (MULTI_PROCESS, 512 * MIB, 2, None, Some(1.4)),
            (MULTI_PROCESS, 512 * MIB, 4, Some(0.25), Some(1.4)),
        ] {
            let case = format!("{scheme} {size} {workers}");
            assert_eq!(against_target(scheme, size, workers), against, "{case}");
            assert_eq!(memcpy_target(scheme, size), memcpy, "{case}");
        }
        assert_eq!(cases().count(), 2 * 6 * 3);
    }

    #[test]
    fn a_row_says_how_the_times_compare() {
        let ms = Duration::from_millis;
        let faster = row("a".into(), BULK, ms(20), ms(80), Some(0.25));
        assert_eq!(
            (faster.value, faster.unit, faster.baseline),
            (20.0, "ms", 80.0)
        );
        assert_eq!((faster.ratio, faster.met), (0.25, Some(true)));
        let slower = row(
            "b".into(),
            MIB,
            Duration::from_micros(500),
            ms(1),
            Some(0.25),
        );
        assert_eq!(
            (slower.value, slower.unit, slower.baseline),
            (500.0, "µs", 1000.0)
        );
        assert_eq!(slower.met, Some(false));
        assert_eq!(row("c".into(), BULK, ms(1), ms(1), None).met, None);
    }

    #[test]
    fn flatness_compares_rows_of_one_size_and_scheme() {
        let figures = |sends: u64| {
            let mut ours = Ours {
                sends: Times::default(),
                memcpy: Times::default(),
                first: Duration::ZERO,
            };
            ours.sends.push(Duration::from_millis(sends));
            ours.memcpy.push(Duration::from_millis(100));
            Figures {
                ours,
                own_copies: None,
                theirs: Times::default(),
                their_memcpy: Times::default(),
                their_first: Duration::ZERO,
            }
        };
        let case = |size, workers| Case {
            scheme: &SCHEMES[0],
            size,
            batch: 1,
            turns: 1,
            workers,
        };
        let mut flat = Flat::default();
        assert!(flat.row(&case(BULK, 4), &figures(100)).is_none());
        assert!(flat.row(&case(BULK, 1), &figures(100)).is_none());
        assert!(flat.row(&case(BULK, 2), &figures(120)).is_none());
        let row = flat.row(&case(BULK, 4), &figures(120)).expect("a pair");
        assert_eq!((row.value, row.baseline, row.met), (1.2, 1.0, Some(false)));
        assert!(flat.row(&case(512 * MIB, 4), &figures(100)).is_none());
    }
}
