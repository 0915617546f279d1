//! The shared-memory scheme: one trainer, worker processes with snapshots.

use std::error::Error;
use std::time::{Duration, Instant};

use serde::Serialize;
use weightsync::worker::{Spawn, Workers};
use weightsync::{Dtype, Expect, Layout, Sender, SenderSetup, Tensors, WaitStyle};

use super::numbers::{Size, Times, ratio};
use super::reader::Task;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Bytes of the model
    #[arg(long, default_value = "1GiB")]
    pub size: Size,
    /// How many tensors of equal size make it up
    #[arg(long, default_value_t = 128)]
    pub tensors: u64,
    /// Worker processes
    #[arg(long, default_value_t = 4)]
    pub readers: usize,
    /// Measured rounds; as many as fit two seconds by default
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Make a checksum of every chunk in the copy pass
    #[arg(long)]
    pub checksums: bool,
    /// Threads that copy
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Write into the slot directly and time from the last byte
    #[arg(long)]
    pub loan: bool,
    /// Let both ends sleep in the kernel at once instead of yielding first
    #[arg(long)]
    pub sleep: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    pub scheme: &'static str,
    pub bytes: u64,
    pub tensors: u64,
    pub readers: usize,
    pub rounds: u32,
    /// One memcpy of the same bytes, one thread, median.
    pub memcpy_us: f64,
    /// From the call until the version is live on every worker: median, p99.
    pub applied_us: f64,
    pub applied_p99_us: f64,
    /// From the moment it is live at the sender until every worker has said so.
    pub after_live_us: f64,
    /// `applied_us / memcpy_us`.
    pub ratio: f64,
    /// The first send, with `connect`: slots made and faulted in, workers joined.
    pub first_us: f64,
    /// Memory of all processes together (proportional set size), after the
    /// rounds, and how much of it is the trainer's own source.
    pub memory_bytes: u64,
    pub source_bytes: u64,
}

/// Measures and prints.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let figures = measure(args)?;
    if args.json {
        println!("{}", serde_json::to_string(&figures)?);
        return Ok(());
    }
    let ms = |us: f64| {
        if us < 1000.0 {
            format!("{us:.1} µs")
        } else {
            format!("{:.2} ms", us / 1000.0)
        }
    };
    println!(
        "shared-mem, {} in {} tensors, {} worker processes, {} rounds\n",
        args.size, args.tensors, args.readers, figures.rounds
    );
    println!(
        "  {:<44}{:>12}",
        "one memcpy, same bytes, same rounds",
        ms(figures.memcpy_us)
    );
    let what = if args.loan {
        "last byte written to live on all"
    } else {
        "send to live on all"
    };
    println!(
        "  {:<44}{:>12}   {:.2} × memcpy",
        format!("{what}, median"),
        ms(figures.applied_us),
        figures.ratio
    );
    println!(
        "  {:<44}{:>12}",
        format!("{what}, p99"),
        ms(figures.applied_p99_us)
    );
    println!(
        "  {:<44}{:>12}",
        "of that, after the version was live",
        ms(figures.after_live_us)
    );
    println!(
        "  {:<44}{:>12}",
        "first send (connect, cold slots)",
        ms(figures.first_us)
    );
    println!(
        "  {:<44}{:>12}   {:.2} × model",
        "memory of all processes",
        format!("{} MiB", figures.memory_bytes >> 20),
        figures.memory_bytes as f64 / figures.bytes as f64
    );
    Ok(())
}

/// Measures one arrangement.
pub fn measure(args: &Args) -> Result<Figures, Box<dyn Error>> {
    if args.tensors == 0 || args.size.0 < 2 * args.tensors {
        return Err(format!(
            "{} in {} tensors: each takes at least one element of 2 bytes",
            args.size, args.tensors
        )
        .into());
    }
    let layout = layout(args)?;
    let source = filled(&layout)?;
    let bytes = layout.payload_bytes();
    let began = Instant::now();
    let (mut sender, workers) = connect(args, &source)?;
    let first = began.elapsed();

    let mut baseline = Baseline::new(bytes as usize);
    let mut rounds = args.rounds.unwrap_or(0);
    let (mut copies, mut sends, mut afters) =
        (Times::default(), Times::default(), Times::default());
    // The first rounds warm caches and fault in what is lazy.
    for _ in 0..3 {
        baseline.copy();
        one_send(args, &mut sender, &source)?;
    }
    if rounds == 0 {
        let (once, again) = (baseline.copy(), one_send(args, &mut sender, &source)?.0);
        rounds = (2.0 / (once + again).as_secs_f64()).clamp(9.0, 20_000.0) as u32;
    }
    for _ in 0..rounds {
        copies.push(baseline.copy());
        let (took, after) = one_send(args, &mut sender, &source)?;
        sends.push(took);
        afters.push(after);
    }
    drop(baseline);
    let memory_bytes = memory_of(&workers)?;
    drop(sender);
    workers.shutdown(Duration::from_secs(20));
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Ok(Figures {
        scheme: "shared-mem",
        bytes,
        tensors: args.tensors,
        readers: args.readers,
        rounds,
        memcpy_us: us(copies.median()),
        applied_us: us(sends.median()),
        applied_p99_us: us(sends.percentile(99)),
        after_live_us: us(afters.median()),
        ratio: ratio(sends.median(), copies.median()),
        first_us: us(first),
        memory_bytes,
        source_bytes: bytes,
    })
}

/// The model: bfloat16 tensors of equal size.
pub fn layout(args: &Args) -> Result<Layout, Box<dyn Error>> {
    let elements = (args.size.0 / 2).div_ceil(args.tensors);
    Ok(Layout::new((0..args.tensors).map(|index| {
        let name = format!("layers.{index}.weight");
        (name, Dtype::BF16, vec![elements])
    }))?)
}

/// Starts the workers and brings them the first version.
pub fn connect(args: &Args, source: &Tensors) -> Result<(Sender, Workers), Box<dyn Error>> {
    let wait = if args.sleep {
        WaitStyle::Sleep
    } else {
        WaitStyle::YieldThenSleep
    };
    let setup = SenderSetup::new("bench", source)?
        .checksums(args.checksums)
        .copy_threads(args.threads)
        .wait_style(wait);
    let workers = Spawn::this_program()?
        .args(["bench", "reader"])
        .count(args.readers)
        .init_value(&Task {
            info: setup.init_info(),
            sleeps: args.sleep,
        })?
        .start()?;
    let sender = setup.connect(
        source,
        Expect::Count(args.readers),
        Duration::from_secs(120),
    )?;
    Ok((sender, workers))
}

/// One send: how long until the version was live everywhere, and how much of
/// that came after it was live here.
pub fn one_send(
    args: &Args,
    sender: &mut Sender,
    source: &Tensors,
) -> Result<(Duration, Duration), Box<dyn Error>> {
    let report = if args.loan {
        let mut loan = sender.loan()?;
        for (place, name) in loan.tensors_mut().into_iter().zip(source.names()) {
            place.copy_from_slice(source.tensor(name)?.bytes());
        }
        loan.publish()?
    } else {
        sender.send(source)?
    };
    if !report.all_applied() {
        return Err(report.to_string().into());
    }
    let after = report
        .workers
        .iter()
        .map(|line| line.after)
        .max()
        .unwrap_or_default();
    Ok((if args.loan { after } else { report.took }, after))
}

/// Plain copies between two buffers of the model's size, both faulted in.
pub struct Baseline {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Baseline {
    pub fn new(bytes: usize) -> Self {
        Self {
            from: vec![1; bytes],
            to: vec![2; bytes],
        }
    }

    pub fn copy(&mut self) -> Duration {
        let began = Instant::now();
        self.to.copy_from_slice(std::hint::black_box(&self.from));
        std::hint::black_box(&self.to);
        began.elapsed()
    }
}

/// Bytes that are neither zero nor all the same.
fn filled(layout: &Layout) -> Result<Tensors, Box<dyn Error>> {
    let mut tensors = Tensors::zeros(layout);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for spec in layout.tensors() {
        for element in tensors.slice_mut::<half::bf16>(&spec.name)? {
            state = state
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            *element = half::bf16::from_bits((state >> 48) as u16);
        }
    }
    Ok(tensors)
}

/// The memory of this process and its workers, each shared page counted once.
fn memory_of(workers: &Workers) -> Result<u64, Box<dyn Error>> {
    let pids = (0..workers.len()).filter_map(|worker| workers.pid(worker));
    let mut total = 0;
    for pid in pids.chain([std::process::id()]) {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let kib = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
        let kib = kib.and_then(|rest| {
            rest.trim()
                .trim_end_matches(" kB")
                .trim()
                .parse::<u64>()
                .ok()
        });
        total += kib.ok_or("no Pss line in smaps_rollup")? << 10;
    }
    Ok(total)
}
