//! A synchronizer in a process of its own, with its parties: the group of `cargo xtask bench sync`.
//!
//! Explorers that load weights are processes. They read a version in place, so loading is joining its
//! memory, unless a row says that they copy it. The baseline is a memcpy of as many bytes in the same
//! rounds, into memory that is there.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use weightsync_cli::bench::numbers::Size;
use weightsync_engine::{SendOptions, Sender, SenderSetup, Tensors, Version, WaitFor};
use weightsync_net::Distributed;
use weightsync_serve::synchronizer::{Fetcher, PartyOptions, StyleWords, Synchronizer, Trainer};

use super::group::{self, Row};
use super::iperf;
use super::store::{row, timed};

/// How the group is run.
#[derive(clap::Args)]
pub struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Bytes of the model
    #[arg(long, default_value = "1GiB")]
    size: Size,
    /// Explorers that load it
    #[arg(long, default_value_t = 4)]
    explorers: usize,
    /// Rounds; their median counts
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Signals; each gives a latency
    #[arg(long, default_value_t = 2000)]
    signals: usize,
    /// Explorers that only ask
    #[arg(long, default_value_t = 1000)]
    crowd: usize,
    /// Seconds for which they ask, once a second each
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// An explorer as a process: it syncs at each line of its input.
#[derive(clap::Args)]
pub struct ExplorerArgs {
    address: String,
    name: String,
    /// Copy each version into memory of its own
    #[arg(long)]
    copy: bool,
}

/// Longer than anything here takes.
const LONG: Option<Duration> = Some(Duration::from_secs(120));

/// Seconds that `iperf3` sends for.
const STREAM: u64 = 3;

/// Measures every case, and prints the rows as they come.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    group::head(args.json);
    let show = |row: Row| group::print(args.json, &row);
    versions(args, &show)?;
    signals(args, &show)?;
    crowd(args, &show)
}

type Show<'a> = dyn Fn(Row) -> Result<(), Box<dyn Error>> + 'a;

/// Versions on their way to explorers, and to an HTTP client.
fn versions(args: &Args, show: &Show) -> Result<(), Box<dyn Error>> {
    let served = Served::start(&[])?;
    let sync = Synchronizer::connect(&served.address, None)?;
    let mut training = Training::join(&sync, args.size.0, "fixed")?;
    let start = |name: &str, copy| Exploring::start(&served.address, name, copy);
    let start_all = |name: &str, copy| -> Result<Vec<_>, Box<dyn Error>> {
        let names = (0..args.explorers).map(|number| format!("{name}{number}"));
        names.map(|name| Ok(start(&name, copy)?.0)).collect()
    };
    let mut explorers = start_all("e", false)?;
    let (mut requested, mut lived, mut fetched) = (Vec::new(), Vec::new(), Vec::new());
    let mut cold = [Vec::new(), Vec::new()];
    let mut copy = vec![1.0_f32; (args.size.0 / 4) as usize];
    for _ in 0..args.rounds {
        let source = training.weights.slice::<f32>("weight")?;
        let copied = timed(|| copy.copy_from_slice(source));
        // A newer version is there already, and all ask for it at once.
        training.publish()?;
        let begun = now();
        explorers.iter_mut().try_for_each(Exploring::ask)?;
        requested.push((last(&mut explorers)?.saturating_sub(begun), copied));
        // They wait for one, and the trainer makes it.
        explorers.iter_mut().try_for_each(Exploring::ask)?;
        training.await_asking(explorers.len())?;
        let begun = now();
        training.publish()?;
        lived.push((last(&mut explorers)?.saturating_sub(begun), copied));
        // A process that has just joined, and has nothing mapped.
        for (copies, taken) in cold.iter_mut().enumerate() {
            taken.push((start("new", copies == 1)?.1, copied));
        }
    }
    drop(explorers);
    let mut explorers = start_all("c", true)?;
    let mut copied_too = Vec::new();
    for _ in 0..args.rounds {
        let source = training.weights.slice::<f32>("weight")?;
        let copied = timed(|| copy.copy_from_slice(source));
        training.publish()?;
        let begun = now();
        explorers.iter_mut().try_for_each(Exploring::ask)?;
        copied_too.push((last(&mut explorers)?.saturating_sub(begun), copied));
    }
    let label = |what: &str| {
        format!(
            "memory, {}, {} explorers: {what}",
            args.size, args.explorers
        )
    };
    let what = label("request to the new version running");
    show(row(what, &requested, Some(1.3)))?;
    let what = label("trainer's sync to live on all that wait");
    show(row(what, &lived, None))?;
    let what = label("request to all of them having a copy");
    show(row(what, &copied_too, None))?;
    drop(explorers);
    for (taken, how) in cold.iter().zip(["", ", with a copy"]) {
        let what = format!(
            "memory, {}: the first sync of a new process{how}",
            args.size
        );
        show(row(what, taken, None))?;
    }
    let bytes = args.size.0;
    for _ in 0..args.rounds.min(5) {
        let rate = iperf::stream(Path::new(iperf::PROGRAM), STREAM)?;
        let took = download(&served.address)?;
        fetched.push((took, Duration::from_secs_f64(bytes as f64 / rate)));
    }
    let what = format!(
        "HTTP download of {}, over iperf3's time for as many bytes",
        args.size
    );
    show(row(what, &fetched, Some(1.0 / 0.8)))?;
    Ok(())
}

/// How long it takes until a trainer that waits knows that an explorer asks.
fn signals(args: &Args, show: &Show) -> Result<(), Box<dyn Error>> {
    let served = Served::start(&[])?;
    let sync = Synchronizer::connect(&served.address, None)?;
    let mut training = Training::join(&sync, 4096, "explorer_driven")?;
    let options = PartyOptions::new("e0").style(style("explorer_driven")?);
    let mut explorer = sync.explorer(options, LONG)?;
    let mut fetcher = Fetcher::default();
    let mut load = |fetch: &weightsync_serve::synchronizer::Fetch| {
        let set = fetcher.fetch(fetch)?;
        Ok(set.members()[0].snapshot.version())
    };
    explorer.sync(None, LONG, &mut load)?;
    let mut taken = Vec::with_capacity(args.signals);
    std::thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let asking = scope.spawn(move || {
            let mut step = 0;
            while asked.recv().is_ok() {
                step += 1;
                let _ = tell.send(Instant::now());
                if explorer.sync(Some(step), LONG, &mut load).is_err() {
                    break;
                }
            }
        });
        for _ in 0..args.signals {
            ask.send(())?;
            let need = training.trainer.wait_need_sync(None, LONG)?;
            let woken = Instant::now();
            taken.push(woken.saturating_duration_since(told.recv()?));
            assert!(need.is_needed(), "the wait ended without a request");
            training.publish()?;
        }
        drop(ask);
        asking.join().map_err(|_| "an explorer panicked")?;
        Ok(())
    })?;
    taken.sort_unstable();
    let at = |share: f64| taken[((taken.len() - 1) as f64 * share) as usize];
    for (name, share, target) in [("p50", 0.5, 1.0), ("p99", 0.99, 5.0)] {
        let millis = at(share).as_secs_f64() * 1e3;
        show(absolute(
            format!("an explorer asks, a waiting trainer knows: {name}"),
            millis,
            "ms",
            target,
        ))?;
    }
    Ok(())
}

/// Many explorers that each make a step a second.
fn crowd(args: &Args, show: &Show) -> Result<(), Box<dyn Error>> {
    let served = Served::start(&[])?;
    let sync = Synchronizer::connect(&served.address, None)?;
    let _training = Training::join(&sync, 4096, "fixed")?;
    let mut explorers = (0..args.crowd)
        .map(|number| {
            let options = PartyOptions::new(&format!("e{number}")).style(style("bounded")?);
            Ok(sync.explorer(options, LONG)?)
        })
        .collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let before = served.cpu()?;
    let begun = Instant::now();
    let mut taken = Vec::new();
    for step in 1..=args.seconds {
        let second = Instant::now();
        let many = explorers.len() as u32;
        for (number, explorer) in explorers.iter_mut().enumerate() {
            let due = Duration::from_secs(1) * number as u32 / many;
            std::thread::sleep(due.saturating_sub(second.elapsed()));
            let asked = Instant::now();
            explorer.need_sync(Some(step))?;
            taken.push(asked.elapsed());
        }
        std::thread::sleep(Duration::from_secs(1).saturating_sub(second.elapsed()));
    }
    let cores = (served.cpu()? - before).as_secs_f64() / begun.elapsed().as_secs_f64();
    taken.sort_unstable();
    let p99 = taken[(taken.len() - 1) * 99 / 100].as_secs_f64() * 1e3;
    let label = |what: &str| format!("{} explorers, a step a second each: {what}", args.crowd);
    show(absolute(
        label("cores of the synchronizer"),
        cores,
        "cores",
        1.0,
    ))?;
    show(absolute(
        label("its memory"),
        served.memory()?,
        "MiB",
        256.0,
    ))?;
    show(absolute(label("decisions, p99"), p99, "ms", 10.0))
}

fn absolute(case: String, value: f64, unit: &'static str, target: f64) -> Row {
    Row {
        case,
        value,
        unit,
        baseline: 1.0,
        ratio: value,
        target: Some(target),
        met: Some(value <= target),
    }
}

fn style(word: &str) -> Result<weightsync_serve::synchronizer::Style, Box<dyn Error>> {
    Ok(word.parse::<StyleWords>()?.style()?)
}

/// A clock that all processes share.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// `weightsync serve` as a process.
struct Served {
    process: Child,
    address: String,
}

impl Served {
    fn start(arguments: &[&str]) -> Result<Self, Box<dyn Error>> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["serve", "--address", "127.0.0.1:0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let output = process.stdout.as_mut().ok_or("it has no output")?;
        BufReader::new(output).read_line(&mut line)?;
        let address = line.split(' ').nth(4).ok_or("it said no address")?;
        let address = address.trim_end_matches(';').to_owned();
        Ok(Self { process, address })
    }

    /// The processor time that it has taken.
    fn cpu(&self) -> Result<Duration, Box<dyn Error>> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        let (_, fields) = stat.rsplit_once(')').ok_or("no such process")?;
        let mut fields = fields.split_whitespace().skip(11);
        let mut ticks = || fields.next().and_then(|field| field.parse::<u64>().ok());
        let ticks = ticks().unwrap_or_default() + ticks().unwrap_or_default();
        Ok(Duration::from_secs_f64(
            ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
        ))
    }

    /// Its resident memory, in MiB.
    fn memory(&self) -> Result<f64, Box<dyn Error>> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        Ok(kib.ok_or("no VmRSS")? / 1024.0)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Training {
    trainer: Trainer,
    sender: Sender,
    weights: Tensors,
    step: u64,
}

impl Training {
    fn join(sync: &Synchronizer, bytes: u64, word: &str) -> Result<Self, Box<dyn Error>> {
        let mut weights = Tensors::new();
        let elements = bytes / 4;
        weights.insert("weight", [elements], vec![1.0_f32; elements as usize])?;
        let setup = SenderSetup::new("policy", &weights)?.scheme(Distributed::new())?;
        let options = PartyOptions::new("trainer").style(style(word)?);
        let mut trainer = sync.trainer(options, setup.init_info(), LONG)?;
        let sender = trainer.first(LONG, |first| setup.open_at(&weights, first, LONG))?;
        Ok(Self {
            trainer,
            sender,
            weights,
            step: 0,
        })
    }

    fn publish(&mut self) -> Result<(), Box<dyn Error>> {
        self.step += 1;
        let (sender, weights) = (&mut self.sender, &self.weights);
        let answer = self.trainer.sync(self.step, LONG, |version, _| {
            let options = SendOptions::new().version(version).wait(WaitFor::Sent);
            sender.send_with(weights, &options).map(drop)
        })?;
        match answer.is_synced() {
            true => Ok(()),
            false => Err(answer.to_string().into()),
        }
    }

    /// Waits until so many explorers ask.
    fn await_asking(&mut self, many: usize) -> Result<(), Box<dyn Error>> {
        while self.trainer.need_sync(None)?.asked_by.len() < many {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

struct Exploring {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Exploring {
    /// Starts it; with how long its first sync took.
    fn start(address: &str, name: &str, copy: bool) -> Result<(Self, Duration), Box<dyn Error>> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["explorer", address, name])
            .args(copy.then_some("--copy"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut exploring = Self {
            input: process.stdin.take().ok_or("it has no input")?,
            output: BufReader::new(process.stdout.take().ok_or("it has no output")?),
            process,
        };
        let (begun, ran) = exploring.times()?;
        Ok((exploring, ran.saturating_sub(begun)))
    }

    fn ask(&mut self) -> Result<(), Box<dyn Error>> {
        Ok(self.input.write_all(b"sync\n")?)
    }

    /// When it ran the new version.
    fn answer(&mut self) -> Result<Duration, Box<dyn Error>> {
        Ok(self.times()?.1)
    }

    /// When its sync began, and when it ran the new version.
    fn times(&mut self) -> Result<(Duration, Duration), Box<dyn Error>> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let nanos: Result<Vec<u64>, _> = line.split_whitespace().map(str::parse).collect();
        match nanos.as_deref() {
            Ok([begun, ran]) => Ok((Duration::from_nanos(*begun), Duration::from_nanos(*ran))),
            _ => Err(format!("an explorer said {line:?}").into()),
        }
    }
}

impl Drop for Exploring {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// When the last of them ran the new version.
fn last(explorers: &mut [Exploring]) -> Result<Duration, Box<dyn Error>> {
    let answers = explorers.iter_mut().map(Exploring::answer);
    let answers = answers.collect::<Result<Vec<_>, _>>()?;
    Ok(answers.into_iter().max().unwrap_or_default())
}

/// The process of an explorer.
pub fn explore(args: &ExplorerArgs) -> Result<(), Box<dyn Error>> {
    let sync = Synchronizer::connect(&args.address, None)?;
    let options = PartyOptions::new(&args.name).style(style("explorer_driven")?);
    let mut explorer = sync.explorer(options, LONG)?;
    let mut fetcher = Fetcher::default();
    let mut held = None;
    let mut own = Vec::new();
    let mut step = 0;
    let mut input = std::io::stdin().lines();
    loop {
        let begun = now();
        let answer = explorer.sync(Some(step), LONG, |fetch| {
            let set = fetcher.fetch(fetch)?;
            let snapshot = &set.members()[0].snapshot;
            let version = snapshot.version();
            if args.copy {
                own.resize(snapshot.bytes().len(), 0);
                own.copy_from_slice(snapshot.bytes());
            }
            held = Some(snapshot.clone());
            Ok(version)
        })?;
        let ran = now();
        if held.as_ref().map(|held| held.version()) != Some(Version(answer.version.0)) {
            return Err(answer.to_string().into());
        }
        println!("{} {}", begun.as_nanos(), ran.as_nanos());
        step += 1;
        if input.next().is_none() {
            return Ok(());
        }
    }
}

/// Reads the newest version over HTTP, as a client that throws it away.
fn download(address: &str) -> Result<Duration, Box<dyn Error>> {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(address)?;
    write!(
        stream,
        "GET /v1/versions/latest/policy.safetensors HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut buffer = vec![0; 1 << 20];
    let mut all = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            read => all += read,
        }
    }
    match all > 1 << 20 {
        true => Ok(begun.elapsed()),
        false => Err(String::from_utf8_lossy(&buffer[..all]).into()),
    }
}
