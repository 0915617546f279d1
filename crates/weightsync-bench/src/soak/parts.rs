//! The processes of a soak, which are this program: a trainer and workers. Each ends with its
//! standard input, and says at its end how many versions it sent or checked. A worker also says that it has
//! checked its first one.

use std::error::Error;
use std::io::Read;
use std::num::NonZero;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weightsync_engine::{
    AnyScheme, InitInfo, ReceiverSetup, SendOptions, SenderSetup, Snapshot, Tensors, WaitFor,
};
use weightsync_store::{Keep, SaveOptions, Saver, Store, Writer};

use crate::peer::Lines;

/// Elements of the large tensor: 4 MiB.
const ELEMENTS: u64 = 1 << 20;

/// As many stamps; a step changes one of them, and every element of that number modulo this.
const STAMPS: u64 = 128;

/// As many versions stay in the store.
const KEPT: NonZero<u64> = NonZero::new(3).unwrap();

/// Longer than anything here takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// One process of a soak.
#[derive(clap::Args)]
pub struct PartArgs {
    #[command(subcommand)]
    part: Part,
}

#[derive(clap::Subcommand)]
enum Part {
    /// Sends by every scheme, and saves
    Trainer {
        store: String,
        rate: u32,
        schemes: Vec<String>,
    },
    /// Checks every version that it gets
    Worker { info: String, number: u32 },
}

/// The first line of the trainer.
#[derive(Serialize, Deserialize)]
pub(super) struct TrainerSaid {
    pub(super) infos: Vec<String>,
    /// The address that a relay joins.
    pub(super) relayed: String,
}

/// Plays one part.
pub fn part(args: &PartArgs) -> Result<(), Box<dyn Error>> {
    let over = Arc::new(AtomicBool::new(false));
    let ends = over.clone();
    std::thread::Builder::new()
        .name("input".into())
        .spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            ends.store(true, Ordering::Relaxed);
        })?;
    let over = || over.load(Ordering::Relaxed);
    let done = match &args.part {
        Part::Trainer {
            store,
            rate,
            schemes,
        } => train(store, *rate, schemes, over)?,
        Part::Worker { info, number } => work(info, *number, over)?,
    };
    println!("{done}");
    Ok(())
}

fn train(
    store: &str,
    rate: u32,
    schemes: &[String],
    over: impl Fn() -> bool,
) -> Result<u64, Box<dyn Error>> {
    let mut stamps = vec![0_u32; STAMPS as usize];
    let mut body: Vec<u32> = (0..ELEMENTS).map(|at| element(at, &stamps)).collect();
    let weights = |stamps: &[u32], body: &[u32]| {
        let mut weights = Tensors::new();
        weights.insert("stamps", [STAMPS], stamps)?;
        weights.insert("body", [ELEMENTS], body)?;
        Ok::<_, weightsync_engine::Error>(weights)
    };
    let first = weights(&stamps, &body)?;
    let mut senders = Vec::new();
    let (mut infos, mut relayed) = (Vec::new(), String::new());
    for scheme in schemes {
        let setup = SenderSetup::new("policy", &first)?.scheme(scheme.parse::<AnyScheme>()?)?;
        let info = setup.init_info();
        if scheme.contains("share=relay") {
            relayed = info.endpoint().address().to_owned();
        }
        infos.push(serde_json::to_string(&info)?);
        senders.push(setup.open(&first, Some(LONG))?);
    }
    println!(
        "{}",
        serde_json::to_string(&TrainerSaid { infos, relayed })?
    );
    let mut options = SaveOptions::default();
    options.keep = Keep::Newest {
        count: KEPT,
        every: None,
    };
    let saver = Saver::start(Writer::claim(&Store::open(store)?, options)?)?;
    let send = SendOptions::new()
        .wait(WaitFor::Applied)
        .timeout(Some(LONG));
    let (mut sent, mut next) = (0, Instant::now());
    while !over() {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        next += Duration::from_secs(1) / rate.max(1);
        let at = sent % STAMPS;
        stamps[at as usize] = stamps[at as usize].wrapping_add(1);
        for element_at in (at..ELEMENTS).step_by(STAMPS as usize) {
            body[element_at as usize] = element(element_at, &stamps);
        }
        let weights = weights(&stamps, &body)?;
        for sender in &mut senders {
            sender.send_with(&weights, &send)?;
        }
        saver.save(vec![senders[0].snapshot()?]);
        sent += 1;
    }
    Ok(sent)
}

fn element(at: u64, stamps: &[u32]) -> u32 {
    (at as u32).wrapping_mul(0x9e37_79b1) ^ stamps[(at % STAMPS) as usize]
}

fn work(info: &str, number: u32, over: impl Fn() -> bool) -> Result<u64, Box<dyn Error>> {
    let mut receiver =
        ReceiverSetup::new(serde_json::from_str::<InitInfo>(info)?, number).connect(Some(LONG))?;
    let mut checked = 0;
    while !over() {
        match receiver.recv_timeout(Duration::from_millis(500)) {
            Ok(Some(snapshot)) => {
                check(&snapshot)?;
                if checked == 0 {
                    println!("checks");
                }
            }
            Ok(None) => continue,
            Err(error) if error.is_sender_closed() => break,
            Err(error) => return Err(error.into()),
        }
        checked += 1;
    }
    Ok(checked)
}

/// All elements are of one version.
fn check(snapshot: &Snapshot) -> Result<(), Box<dyn Error>> {
    let (stamps, body) = (
        snapshot.slice::<u32>("stamps")?,
        snapshot.slice::<u32>("body")?,
    );
    let wrong = |(at, is): (usize, &u32)| *is != element(at as u64, stamps);
    match body.iter().enumerate().position(wrong) {
        None => Ok(()),
        Some(at) => Err(format!("{} is torn: element {at}", snapshot.version()).into()),
    }
}

/// A process that was started. Dropped, it is killed.
pub(super) struct Process {
    process: Child,
    input: Option<ChildStdin>,
    output: Lines,
}

impl Process {
    pub(super) fn start(
        arguments: &[&str],
        environment: &[(&str, &Path)],
    ) -> Result<Self, Box<dyn Error>> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().ok_or("it has no output")?;
        Ok(Self {
            input: process.stdin.take(),
            output: Lines::new(output),
            process,
        })
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let line = self.output.next(Instant::now() + LONG)?;
        Ok(line.ok_or("a process ended as it began")?)
    }

    /// An error if it has ended.
    pub(super) fn is_well(&mut self, who: &str) -> Result<(), Box<dyn Error>> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("{who} ended: {status}").into()),
        }
    }

    pub(super) fn kill(&mut self) -> Result<(), Box<dyn Error>> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Ends it in order; the number that it said last.
    pub(super) fn end(&mut self) -> Result<u64, Box<dyn Error>> {
        self.input = None;
        let (until, mut last) = (Instant::now() + LONG, String::new());
        while let Some(line) = self.output.next(until)? {
            last = line;
        }
        // Its output has ended, so it is about to.
        let status = self.process.wait()?;
        match status.success() {
            true => Ok(last.trim().parse()?),
            false => Err(format!("a process ended: {status}").into()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
