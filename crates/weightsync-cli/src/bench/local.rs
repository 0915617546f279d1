//! A scheme of this machine: one trainer, worker processes.

use std::error::Error;
use std::ffi::OsString;
use std::fmt::Write;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use weightsync_engine::worker::Workers;
use weightsync_engine::{
    AnyScheme, Dtype, Expect, InitInfo, Layout, Members, MultiProcess, Queue, SendSource, Sender,
    SenderSetup, Tensors, WaitStyle, WeightExtractor,
};

use super::numbers::{Size, Times, ratio, some};
use super::reader::{self, ReaderTask};
use crate::output::print;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct LocalArgs {
    /// Bytes of the model, or of all models together
    #[arg(long, default_value = "1GiB")]
    pub size: Size,
    /// How many tensors of equal size make it up
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..))]
    pub tensors: u64,
    /// Models that the tensors are divided among; they are sent as one set
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub models: u64,
    /// Worker processes
    #[arg(long, default_value_t = 4, value_parser = some)]
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
    /// How many percent of the elements change before each send, by one unit in the last
    /// place; by 100 all become others. Nothing changes by default, and over a network all
    #[arg(long)]
    pub changed: Option<f64>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
    /// By what the worker processes are started, as [`reader::spawn`] takes it
    #[arg(skip)]
    pub program: Vec<OsString>,
}

impl LocalArgs {
    /// What a user gets who says nothing: 1 GiB to 4 workers.
    pub fn plain() -> Self {
        Self {
            size: Size(1 << 30),
            tensors: 128,
            models: 1,
            readers: 4,
            rounds: None,
            checksums: false,
            threads: 1,
            loan: false,
            sleep: false,
            changed: None,
            json: false,
            program: Vec::new(),
        }
    }
}

/// What is measured of the scheme with queues.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct QueueArgs {
    #[command(flatten)]
    pub(super) case: LocalArgs,
    /// Deliver every version in order, with at most so many waiting (1 to 32)
    #[arg(long)]
    every: Option<u8>,
    /// Copy each version into the worker's own memory
    #[arg(long)]
    own_copy: bool,
}

/// What is measured of the scheme of many hosts.
#[cfg(feature = "net")]
#[derive(clap::Args)]
pub(super) struct DistributedArgs {
    /// Settings, as in the scheme's text; by share=none each worker has a link of its
    /// own over loopback, else they share the trainer's memory
    #[arg(long, default_value = "")]
    settings: String,
    #[command(flatten)]
    case: LocalArgs,
}

#[cfg(feature = "net")]
impl DistributedArgs {
    /// What is sent: other bytes each time, unless something else is asked for.
    pub(super) fn case(&self) -> LocalArgs {
        let mut case = self.case.clone();
        // Over a network, a model without changes would hardly travel.
        case.changed.get_or_insert(100.0);
        case
    }

    /// The scheme that is asked for.
    pub(super) fn scheme(&self) -> Result<AnyScheme, weightsync_engine::Error> {
        let text = match self.settings.is_empty() {
            true => "distributed".to_owned(),
            false => format!("distributed:{}", self.settings),
        };
        text.parse::<AnyScheme>()
    }
}

impl QueueArgs {
    /// The scheme that is asked for; its settings are checked as a user's are.
    pub(super) fn scheme(&self) -> Result<AnyScheme, weightsync_engine::Error> {
        let queue = match self.every {
            Some(bound) => Queue::Every { bound },
            None => Queue::Newest,
        };
        let own_copy = self.own_copy;
        AnyScheme::new(MultiProcess { queue, own_copy })
            .to_string()
            .parse()
    }
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// The scheme, as its text.
    pub scheme: String,
    /// Bytes of the model, or of all models together.
    pub bytes: u64,
    /// Models of the set.
    pub models: u64,
    /// Tensors of all models.
    pub tensors: u64,
    /// Worker processes.
    pub readers: usize,
    /// Measured rounds.
    pub rounds: u32,
    /// One memcpy of the same bytes, one thread, median.
    pub memcpy_us: f64,
    /// From the call until the version is live on every worker: median, p99.
    pub applied_us: f64,
    /// Its 99th percentile.
    pub applied_p99_us: f64,
    /// From the moment it is live at the sender until every worker has said so.
    pub after_live_us: f64,
    /// `applied_us / memcpy_us`.
    pub ratio: f64,
    /// The first send, with `connect`: slots made and faulted in, workers joined.
    pub first_us: f64,
    /// Memory of all processes together (proportional set size and page tables),
    /// after the rounds.
    pub memory_bytes: u64,
    /// What of that is the trainer's own source.
    pub source_bytes: u64,
}

/// Measures and prints.
pub(super) fn run(scheme: &AnyScheme, args: &LocalArgs) -> Result<(), Box<dyn Error>> {
    let figures = measure(scheme, args)?;
    if args.json {
        return Ok(print(&(serde_json::to_string(&figures)? + "\n"))?);
    }
    Ok(print(&table(scheme, args, &figures))?)
}

/// The figures, for people to read.
fn table(scheme: &AnyScheme, args: &LocalArgs, figures: &Figures) -> String {
    let set = match args.models {
        1 => String::new(),
        models => format!(" of {models} models"),
    };
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{scheme}, {} in {} tensors{set}, {} worker processes, {} rounds\n",
        args.size, args.tensors, args.readers, figures.rounds
    );
    let _ = writeln!(
        text,
        "  {:<44}{:>12}",
        "one memcpy, same bytes, same rounds",
        ms(figures.memcpy_us)
    );
    let what = if args.loan {
        "last byte written to live on all"
    } else {
        "send to live on all"
    };
    let _ = writeln!(
        text,
        "  {:<44}{:>12}   {:.2} × memcpy",
        format!("{what}, median"),
        ms(figures.applied_us),
        figures.ratio
    );
    let _ = writeln!(
        text,
        "  {:<44}{:>12}",
        format!("{what}, p99"),
        ms(figures.applied_p99_us)
    );
    let _ = writeln!(
        text,
        "  {:<44}{:>12}",
        "of that, after the version was live",
        ms(figures.after_live_us)
    );
    let _ = writeln!(
        text,
        "  {:<44}{:>12}",
        "first send (connect, cold slots)",
        ms(figures.first_us)
    );
    let _ = writeln!(
        text,
        "  {:<44}{:>12}   {:.2} × model",
        "memory of all processes",
        format!("{} MiB", figures.memory_bytes >> 20),
        figures.memory_bytes as f64 / figures.bytes as f64
    );
    text
}

/// A time, in the unit that suits it.
fn ms(us: f64) -> String {
    if us < 1000.0 {
        format!("{us:.1} µs")
    } else {
        format!("{:.2} ms", us / 1000.0)
    }
}

/// Measures one arrangement.
pub fn measure(scheme: &AnyScheme, args: &LocalArgs) -> Result<Figures, Box<dyn Error>> {
    let mut running = RunningBench::start(scheme, args)?;
    let bytes = running.source.bytes();
    let mut baseline = Baseline::new(bytes as usize);
    let mut rounds = args.rounds.unwrap_or(0);
    // Copies and sends alternate, so both meet the machine in the same state.
    let (mut copies, mut sends, mut afters) =
        (Times::default(), Times::default(), Times::default());
    // The first rounds warm caches and fault in what is lazy.
    for _ in 0..3 {
        baseline.copy();
        running.send()?;
    }
    if rounds == 0 {
        // Two rounds tell how many fit two seconds. At least 9 are made.
        let (once, again) = (baseline.copy(), running.send()?.0);
        rounds = (2.0 / (once + again).as_secs_f64()).clamp(9.0, 20_000.0) as u32;
    }
    for _ in 0..rounds {
        copies.push(baseline.copy());
        let (took, after) = running.send()?;
        sends.push(took);
        afters.push(after);
    }
    // Its memory is not the library's, so it does not count below.
    drop(baseline);
    // While the workers still live.
    let memory_bytes = memory_of(&running.workers)?;
    let first = running.first;
    running.end();
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Ok(Figures {
        scheme: scheme.to_string(),
        bytes,
        models: args.models,
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

/// A connected sender with its workers and what it sends.
pub struct RunningBench {
    /// What is sent.
    pub source: BenchModels,
    changed: Option<f64>,
    sent: u64,
    /// How long `connect` took, with the first send and the workers' start.
    pub first: Duration,
    loan: bool,
    sender: Sender,
    workers: Workers,
}

impl RunningBench {
    /// Starts the workers and brings them the first version.
    pub fn start(scheme: &AnyScheme, args: &LocalArgs) -> Result<Self, Box<dyn Error>> {
        let source = BenchModels::checked(args)?;
        // The first figure includes starting the workers, as a user meets it.
        let began = Instant::now();
        let setup = source.arranged(scheme, args)?;
        // Before `connect`, which waits for them.
        let workers = start_workers(setup.init_info(), args)?;
        let expect = Expect::Count(args.readers);
        let sender = setup.connect(&source, expect, Some(PATIENCE))?;
        Ok(Self {
            first: began.elapsed(),
            source,
            changed: args.changed,
            sent: 0,
            loan: args.loan,
            sender,
            workers,
        })
    }

    /// The same, with something that has to be there before the workers, and can only
    /// come once the sender is.
    pub fn start_with<T>(
        scheme: &AnyScheme,
        args: &LocalArgs,
        beside: impl FnOnce(&InitInfo) -> Result<T, Box<dyn Error>>,
    ) -> Result<(Self, T), Box<dyn Error>> {
        let source = BenchModels::checked(args)?;
        let began = Instant::now();
        let setup = source.arranged(scheme, args)?;
        let info = setup.init_info();
        // No worker is waited for: some of what is measured needs the sender first.
        let mut sender = setup.connect(&source, Expect::Count(0), Some(PATIENCE))?;
        let beside = beside(&info)?;
        let workers = start_workers(info, args)?;
        sender.wait_for(&Expect::Count(args.readers), Some(PATIENCE))?;
        let running = Self {
            first: began.elapsed(),
            source,
            changed: args.changed,
            sent: 0,
            loan: args.loan,
            sender,
            workers,
        };
        Ok((running, beside))
    }

    /// One send: how long until the version was live everywhere, and how much of
    /// that came after it was live here.
    pub fn send(&mut self) -> Result<(Duration, Duration), Box<dyn Error>> {
        // Outside of the time that is measured.
        if let Some(percent) = self.changed {
            self.sent += 1;
            self.source.change(percent, self.sent)?;
        }
        let report = if self.loan {
            let mut loan = self.sender.loan()?;
            let (_, source) = &self.source.models[0];
            // By a loan the trainer writes into the slot, so the time begins with the last byte.
            for (place, name) in loan.tensors_mut().into_iter().zip(source.names()) {
                place.copy_from_slice(source.tensor(name)?.bytes());
            }
            loan.publish()?
        } else {
            self.sender.send(&self.source)?
        };
        // A send that some worker did not load would make a figure of something else.
        if !report.all_applied() {
            return Err(report.to_string().into());
        }
        let lines = report.workers.iter();
        let after = lines.map(|line| line.after).max().unwrap_or_default();
        // With a loan, the time of the copy is the trainer's own work.
        Ok((if self.loan { after } else { report.took }, after))
    }

    /// Closes the sender, which ends the workers.
    pub fn end(self) {
        drop(self.sender);
        // Workers that hang are ended, so that no process outlives the benchmark.
        self.workers.shutdown(Some(Duration::from_secs(20)));
    }
}

/// Longer than workers take to join.
const PATIENCE: Duration = Duration::from_secs(120);

fn start_workers(info: InitInfo, args: &LocalArgs) -> Result<Workers, Box<dyn Error>> {
    let workers = reader::spawn(&args.program)?
        .count(args.readers)
        .init_value(&ReaderTask {
            info,
            sleeps: args.sleep,
            receivers: 1,
        })?
        .start()?;
    Ok(workers)
}

/// What is sent: bfloat16 tensors of equal size, in one or more models.
pub struct BenchModels {
    models: Vec<(String, Tensors)>,
    bytes: u64,
}

impl BenchModels {
    /// Bytes that are neither zero nor all the same.
    pub fn new(args: &LocalArgs) -> Result<Self, Box<dyn Error>> {
        let (models, tensors) = (args.models, args.tensors);
        if tensors == 0 || args.size.0 < 2 * tensors {
            return Err(format!(
                "{} in {tensors} tensors: each takes at least one element of 2 bytes",
                args.size
            )
            .into());
        }
        if models == 0 || models > tensors {
            return Err(format!(
                "{tensors} tensors in {models} models: each model takes at least one"
            )
            .into());
        }
        // Rounded up, so the model has at least the bytes that were asked for.
        let elements = (args.size.0 / 2).div_ceil(tensors);
        let models = (0..models).map(|model| {
            // Divided evenly: the shares differ by one tensor at most.
            let share = model * tensors / models..(model + 1) * tensors / models;
            let layout = Layout::new(share.map(|index| {
                let name = format!("layers.{index}.weight");
                (name, Dtype::BF16, vec![elements])
            }))?;
            Ok((format!("model-{model}"), filled(&layout)?))
        });
        let models = models.collect::<Result<_, Box<dyn Error>>>()?;
        let bytes = elements * 2 * tensors;
        Ok(Self { models, bytes })
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// As the arrangement asks.
    fn checked(args: &LocalArgs) -> Result<Self, Box<dyn Error>> {
        if args.loan && args.models > 1 {
            return Err("a loan is of one model: leave out --loan or --models".into());
        }
        Self::new(args)
    }

    /// A sender of these models by this scheme, as it is asked for.
    fn arranged(
        &self,
        scheme: &AnyScheme,
        args: &LocalArgs,
    ) -> Result<SenderSetup, weightsync_engine::Error> {
        let wait = match args.sleep {
            true => WaitStyle::Sleep,
            false => WaitStyle::YieldThenSleep,
        };
        let setup = self.setup()?.scheme(scheme.clone())?;
        let setup = setup.checksums(args.checksums);
        Ok(setup.copy_threads(args.threads).wait_style(wait))
    }

    /// A sender of these models.
    pub fn setup(&self) -> Result<SenderSetup, weightsync_engine::Error> {
        let [(first, weights), others @ ..] = &self.models[..] else {
            return Err(weightsync_engine::Error::EmptySet);
        };
        let setup = SenderSetup::new(first, weights)?;
        others.iter().try_fold(setup, |setup, (model, weights)| {
            setup.add_model(model, weights)
        })
    }

    /// Changes so many percent of the elements, in every round others, by one unit in the
    /// last place; by 100 all become others, about which those before say nothing.
    pub fn change(&mut self, percent: f64, round: u64) -> Result<(), weightsync_engine::Error> {
        // A seed for each round: every run of the benchmark changes equal elements.
        let mut random = SmallRng::seed_from_u64(round);
        for (_, tensors) in &mut self.models {
            let names: Vec<String> = tensors.names().map(str::to_owned).collect();
            for name in names {
                let elements = tensors.slice_mut::<half::bf16>(&name)?;
                if percent >= 100.0 {
                    // One random number serves four elements, which makes the change quicker.
                    for some in elements.chunks_mut(4) {
                        let bits: u64 = random.random();
                        for (element, shift) in some.iter_mut().zip([0, 16, 32, 48]) {
                            *element = half::bf16::from_bits((bits >> shift) as u16);
                        }
                    }
                    continue;
                }
                // From one change to the next.
                // The gaps between changes are geometrically distributed, so the work grows with
                // the changes and not with the model.
                let all = (1.0 - percent / 100.0).ln();
                let mut at = 0;
                if percent <= 0.0 {
                    continue;
                }
                loop {
                    let dice: f64 = random.random();
                    at += ((1.0 - dice).ln() / all) as usize;
                    let Some(element) = elements.get_mut(at) else {
                        break;
                    };
                    let bits = element.to_bits();
                    // The lowest bit of the fraction is as good as a coin.
                    *element = half::bf16::from_bits(match dice.to_bits() & 1 {
                        0 => bits.wrapping_add(1),
                        _ => bits.wrapping_sub(1),
                    });
                    at += 1;
                }
            }
        }
        Ok(())
    }
}

impl SendSource for BenchModels {
    fn members(&self) -> Members<'_> {
        match &self.models[..] {
            [(_, one)] => Members::One(one),
            several => {
                let members = several.iter();
                Members::Set(
                    members
                        .map(|(id, one)| (id.as_str(), one as &dyn WeightExtractor))
                        .collect(),
                )
            }
        }
    }
}

/// Plain copies between two buffers of the model's size, both faulted in.
pub struct Baseline {
    from: Vec<u8>,
    to: Vec<u8>,
}

/// Small buffers come to lie side by side. At nearly the same place in their
/// pages they make a memcpy ten times as slow: the processor takes its reads for
/// reads of what it is just writing.
const APART: usize = 2048;

impl Baseline {
    /// Buffers of so many bytes.
    pub fn new(bytes: usize) -> Self {
        // Written here, so that the copy meets no page faults.
        Self {
            from: vec![1; bytes + APART],
            to: vec![2; bytes],
        }
    }

    /// One copy, by one thread, and how long it took.
    pub fn copy(&mut self) -> Duration {
        let bytes = self.to.len();
        let began = Instant::now();
        // Without `black_box` the compiler may leave out a copy that nobody reads.
        self.to
            .copy_from_slice(std::hint::black_box(&self.from[..bytes]));
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

/// The memory of this process and its workers, each shared page counted once, with
/// the page tables that map it.
fn memory_of(workers: &Workers) -> Result<u64, Box<dyn Error>> {
    let pids = (0..workers.len()).filter_map(|worker| workers.pid(worker));
    let mut total = 0;
    for pid in pids.chain([std::process::id()]) {
        // A shared page counts to each process by its part, so the sum has it once.
        for (file, name) in [("smaps_rollup", "Pss:"), ("status", "VmPTE:")] {
            let text = std::fs::read_to_string(format!("/proc/{pid}/{file}"))?;
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
            let kib = kib.ok_or_else(|| format!("no {name} line in {file}"))?;
            total += kib.trim().parse::<u64>()? << 10;
        }
    }
    Ok(total)
}
