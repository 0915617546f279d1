//! Stores on disk: the group of `cargo xtask bench store`.
//!
//! The baselines are `dd` in the same rounds, with blocks of 8 MiB: from `/dev/zero` with `conv=fsync`
//! for what is saved, and to `/dev/null` for what is loaded. A cold load begins with no page of the
//! files in memory. What is loaded is digested, so every byte is touched.

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::fs::Advice;
use weightsync_cli::bench::numbers::Size;
use weightsync_engine::transport::Image;
use weightsync_engine::transport::ModelSpec;
use weightsync_engine::{Attributes, Dtype, Layout, ModelId, Run, Snapshot, Version};
use weightsync_store::{SaveOptions, SaveOutcome, Saver, Store, Which, Writer};

use super::group::{self, Row};

/// How the group is run.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Bytes of the model that is saved and loaded, in bf16
    #[arg(long, default_value = "4GiB")]
    size: Size,
    /// Bytes of the model whose deltas are folded
    #[arg(long, default_value = "1GiB")]
    folded: Size,
    /// Rounds; their median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Where the stores are made; the file system that is measured
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// The Python of an environment with safetensors and torch; without it there is no row for
    /// load_file
    #[arg(long)]
    python: Option<PathBuf>,
}

/// The share of the elements that a step changes.
const CHANGED: f64 = 0.011;

/// Deltas that are folded.
const DELTAS: usize = 32;

/// Measures every case, and prints the rows as they come.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let place = tempfile::Builder::new()
        .prefix(".bench-store-")
        .tempdir_in(&args.dir)?;
    group::head(args.json);
    let show = |row: Row| group::print(args.json, &row);
    let dir = place.path().join("store");
    saved(args, &dir, &show)?;
    loaded(args, &dir, &show)?;
    std::fs::remove_dir_all(&dir)?;
    folded(args, place.path(), &show)
}

type Show<'a> = dyn Fn(Row) -> Result<(), Box<dyn Error>> + 'a;

/// Saves a version and one after it in each round, into a new store. The last store stays, for the loads.
fn saved(args: &Args, dir: &Path, show: &Show) -> Result<(), Box<dyn Error>> {
    let model = Model::new(args.size.0)?;
    let first = model.version(1, &[])?;
    let second = model.version(2, &[2])?;
    let size = first.layout().bytes();
    let (mut stall, mut durable, mut step) = (Vec::new(), Vec::new(), Vec::new());
    let mut share = 0.0;
    for _ in 0..args.rounds {
        // The store of the round before takes no memory from dd.
        if dir.exists() {
            std::fs::remove_dir_all(dir)?;
        }
        let mut copy = vec![1_u8; size as usize];
        let copied = timed(|| copy.copy_from_slice(first.bytes()));
        drop(copy);
        let dd = dd_write(&dir.with_extension("dd"), size)?;
        let store = Store::open(&dir.display().to_string())?;
        let saver = Saver::start(Writer::claim(&store, SaveOptions::default())?)?;
        let begun = Instant::now();
        let saving = saver.save(vec![first.clone()]);
        stall.push((begun.elapsed(), copied));
        let whole = (end(&saving)?, begun.elapsed());
        durable.push((whole.1, dd));
        let begun = Instant::now();
        let (stored, _) = end(&saver.save(vec![second.clone()]))?;
        step.push((begun.elapsed(), whole.1));
        share = stored as f64 / whole.0.0 as f64;
    }
    let label = |what: &str| format!("{} bf16: {what}", args.size);
    show(row(label("save, the trainer's call"), &stall, Some(1.0)))?;
    show(row(label("save, until durable"), &durable, Some(1.0 / 0.9)))?;
    show(Row {
        case: label("one step, 1.1 % changed: bytes stored"),
        value: share * 100.0,
        unit: "% of a full version",
        baseline: 100.0,
        ratio: share,
        target: Some(0.01),
        met: Some(share <= 0.01),
    })?;
    let what = label("one step, 1.1 % changed: until durable");
    show(row(what, &step, Some(0.6)))
}

/// Loads a full version, in a process that holds no other weights.
fn loaded(args: &Args, dir: &Path, show: &Show) -> Result<(), Box<dyn Error>> {
    let store = Store::open(&dir.display().to_string())?;
    let load = || store.load(&Which::Exactly(Version(1).into()));
    let file = PathBuf::from(&store.versions()?.versions[0].models[0].directory);
    let file = file.join("model.safetensors");
    let (mut warm, mut cold) = (Vec::new(), Vec::new());
    let (mut mapped, mut copied) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        forget(&file)?;
        let dd = dd_read(&file)?;
        forget(&file)?;
        cold.push((timed(|| load().map(drop).is_ok()), dd));
        let dd = dd_read(&file)?;
        let took = timed(|| load().map(drop).is_ok());
        warm.push((took, dd));
        if let Some(interpreter) = &args.python {
            let [passed, cloned] = load_file(interpreter, &file)?;
            mapped.push((took, passed));
            copied.push((took, cloned));
        }
    }
    let label = |what: &str| format!("{} bf16: {what}", args.size);
    let target = Some(1.0 / 0.9);
    show(row(label("load, in the page cache"), &warm, target))?;
    show(row(label("load, cold"), &cold, target))?;
    if !mapped.is_empty() {
        let what = label("load, and load_file with a pass over it");
        show(row(what, &mapped, Some(1.0)))?;
        let what = label("load, and load_file with a copy of it");
        show(row(what, &copied, None))?;
    }
    Ok(())
}

fn folded(args: &Args, place: &Path, show: &Show) -> Result<(), Box<dyn Error>> {
    let model = Model::new(args.folded.0)?;
    let store = Store::open(&place.join("folded").display().to_string())?;
    let mut writer = Writer::claim(&store, SaveOptions::default())?;
    let steps: Vec<u64> = (2..=1 + DELTAS as u64).collect();
    for count in 0..=DELTAS {
        writer.save(&[model.version(1 + count as u64, &steps[..count])?])?;
    }
    let versions = store.versions()?.versions;
    let newest = versions.last().ok_or("nothing was saved")?;
    if newest.models[0].deltas != DELTAS {
        return Err(format!("{} deltas, expected {DELTAS}", newest.models[0].deltas).into());
    }
    let mut figures = Vec::new();
    for _ in 0..args.rounds {
        let load = |version: u64| -> Result<Duration, Box<dyn Error>> {
            forget_all(&place.join("folded"))?;
            let which = Which::Exactly(Version(version).into());
            let begun = Instant::now();
            drop(store.load(&which)?);
            Ok(begun.elapsed())
        };
        let whole = load(1)?;
        figures.push((load(1 + DELTAS as u64)?, whole));
    }
    let label = format!(
        "{} bf16: fold {DELTAS} deltas, cold, and a cold load",
        args.folded
    );
    show(row(label, &figures, Some(3.0)))
}

/// A model of bf16 tensors, and the versions that steps make of its first one.
struct Model {
    spec: ModelSpec,
}

impl Model {
    fn new(bytes: u64) -> Result<Self, Box<dyn Error>> {
        let tensors = 64;
        let each = bytes / 2 / tensors;
        let names = (0..tensors).map(|at| (format!("layers.{at}.weight"), Dtype::BF16, vec![each]));
        Ok(Self {
            spec: ModelSpec {
                id: ModelId::new("policy")?,
                layout: Layout::new(names)?,
                attributes: Attributes::default(),
            },
        })
    }

    /// A version: each step is a seed, and moves some elements by one unit in the last place.
    fn version(&self, number: u64, steps: &[u64]) -> Result<Snapshot, Box<dyn Error>> {
        let mut image = Image::zeros(&self.spec.layout);
        let mut rng = SmallRng::seed_from_u64(1);
        for word in image.bytes_mut().chunks_exact_mut(8) {
            // Exponents as those of small weights: N(0, 0.02) has some 17 classes.
            let bits: u64 = rng.random();
            let exponents = 0x3900_3900_3900_3900 + (bits & 0x0380_0380_0380_0380);
            word.copy_from_slice(&(exponents | (bits & 0x807f_807f_807f_807f)).to_le_bytes());
        }
        image.clear_padding();
        for step in steps {
            let mut rng = SmallRng::seed_from_u64(*step);
            let bytes = image.bytes_mut();
            let elements = bytes.len() / 2;
            let mut at = 0.0;
            loop {
                // The gaps between changes are geometric.
                let uniform: f64 = rng.random_range(f64::MIN_POSITIVE..1.0);
                at += (uniform.ln() / (1.0 - CHANGED).ln()).floor() + 1.0;
                let index = at as usize;
                if index >= elements {
                    break;
                }
                let place = &mut bytes[2 * index..][..2];
                let value = u16::from_le_bytes([place[0], place[1]]);
                place.copy_from_slice(&value.wrapping_add(1).to_le_bytes());
            }
            image.clear_padding();
        }
        let run = Run {
            epoch: weightsync_engine::Epoch(1),
            id: [1; 16],
        };
        Ok(Snapshot::received(&self.spec, run, Version(number), image)?)
    }
}

/// The bytes that a save wrote, and those of the model.
fn end(saving: &weightsync_store::Saving) -> Result<(u64, u64), Box<dyn Error>> {
    match saving.wait(None)? {
        Some(SaveOutcome::Durable(saved)) => Ok((saved.stored_bytes, saved.bytes)),
        other => Err(format!("it was not saved: {other:?}").into()),
    }
}

pub fn row(case: String, figures: &[(Duration, Duration)], target: Option<f64>) -> Row {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let millis = |of: fn(&(Duration, Duration)) -> Duration| {
        median(
            figures
                .iter()
                .map(|one| of(one).as_secs_f64() * 1e3)
                .collect(),
        )
    };
    let ratio =
        |(value, baseline): &(Duration, Duration)| value.as_secs_f64() / baseline.as_secs_f64();
    let ratio = median(figures.iter().map(ratio).collect());
    Row {
        case,
        value: millis(|one| one.0),
        unit: "ms",
        baseline: millis(|one| one.1),
        ratio,
        target,
        met: target.map(|target| ratio <= target),
    }
}

pub fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let begun = Instant::now();
    drop(work());
    begun.elapsed()
}

fn dd_write(path: &Path, bytes: u64) -> Result<Duration, Box<dyn Error>> {
    let count = bytes.div_ceil(8 << 20);
    let to = format!("of={}", path.display());
    let count = format!("count={count}");
    let took = dd(&["if=/dev/zero", &to, "bs=8M", &count, "conv=fsync"])?;
    std::fs::remove_file(path)?;
    Ok(took)
}

fn dd_read(path: &Path) -> Result<Duration, Box<dyn Error>> {
    dd(&[&format!("if={}", path.display()), "of=/dev/null", "bs=8M"])
}

fn dd(args: &[&str]) -> Result<Duration, Box<dyn Error>> {
    let mut command = Command::new("dd");
    command.args(args).stderr(Stdio::null());
    let begun = Instant::now();
    match command.status()?.success() {
        true => Ok(begun.elapsed()),
        false => Err(format!("dd {} failed", args.join(" ")).into()),
    }
}

/// The time of safetensors' own call, which maps the file, with a pass over what it gave; and with a
/// copy of it, as a model has that loads it.
fn load_file(python: &Path, file: &Path) -> Result<[Duration; 2], Box<dyn Error>> {
    let program = "import sys, time, torch\n\
                   from safetensors.torch import load_file\n\
                   torch.zeros(1).sum()\n\
                   begun = time.perf_counter()\n\
                   loaded = load_file(sys.argv[1])\n\
                   total = sum(one.view(torch.int64).sum() for one in loaded.values())\n\
                   print(time.perf_counter() - begun)\n\
                   del loaded\n\
                   begun = time.perf_counter()\n\
                   copied = {name: one.clone() for name, one in load_file(sys.argv[1]).items()}\n\
                   print(time.perf_counter() - begun)\n";
    let output = Command::new(python)
        .arg("-c")
        .arg(program)
        .arg(file)
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let seconds: Result<Vec<f64>, _> = text.lines().map(str::parse).collect();
    match seconds.as_deref() {
        Ok(&[passed, copied]) => Ok([passed, copied].map(Duration::from_secs_f64)),
        _ => {
            let errors = String::from_utf8_lossy(&output.stderr);
            Err(format!("load_file could not be measured: {errors}").into())
        }
    }
}

/// Drops a file's pages from memory.
fn forget(file: &Path) -> Result<(), Box<dyn Error>> {
    let file = File::open(file)?;
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

fn forget_all(dir: &Path) -> Result<(), Box<dyn Error>> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => forget_all(&entry.path())?,
            false => forget(&entry.path())?,
        }
    }
    Ok(())
}
