//! A trainer that publishes as fast as it can, in both ways there are.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weightsync_engine::worker::{Event, Spawn, WorkerError, WorkerProcess, Workers};
use weightsync_engine::{
    Expect, InitInfo, Outcome, Report, SendOptions, Sender, SenderSetup, Tensors, WaitFor,
};

use crate::fuse::{BURNT, Fuse, Lit};
use crate::pattern::{self, Pattern};
use crate::scale::{Dice, longest};
use crate::{Role, leaks, reader};

type Failure = Box<dyn std::error::Error>;

/// How a trainer behaves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub model: String,
    pub run_dir: Option<PathBuf>,
    pub bytes: usize,
    pub slots: u8,
    pub max_slots: u8,
    pub fuse: Option<Fuse>,
    /// Names this life: no two trainers publish the same bytes.
    pub seed: u64,
    /// Workers of its own, which it kills and starts again.
    pub workers: Option<OwnWorkers>,
}

/// The workers a trainer starts itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OwnWorkers {
    pub count: u32,
    /// How many of them hold snapshots.
    pub holders: u32,
    /// Checks in the life of one, at most.
    pub life: u64,
    /// A random one is killed about as often.
    pub kill_every: Duration,
}

/// What trainers and readers report to the test.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Progress {
    /// A trainer has published so many more versions.
    Published { versions: u64 },
    /// A reader has checked so many more versions, and so many of them again
    /// after it had held them for a while.
    Checked {
        reader: u32,
        checks: u64,
        again: u64,
    },
    /// A reader has died and another was started in its place.
    Restarted,
}

impl Progress {
    pub fn send(self, worker: &WorkerProcess) -> Result<(), Failure> {
        match worker.send(&postcard::to_stdvec(&self)?) {
            // The test ends and does not listen any more.
            Err(WorkerError::Closed) => Ok(()),
            sent => Ok(sent?),
        }
    }
}

impl Plan {
    /// The first phase, with tensors of any size where only the init info is
    /// wanted.
    pub fn setup(&self, weights: &Tensors) -> weightsync_engine::Result<SenderSetup> {
        let setup = SenderSetup::new(&self.model, weights)?
            .slots(self.slots, self.max_slots)
            .send_timeout(Some(longest()));
        match &self.run_dir {
            Some(dir) => setup.run_dir(dir),
            None => Ok(setup),
        }
    }
}

/// Publishes until the pipe is closed.
pub fn train(worker: WorkerProcess, plan: Plan) -> Result<(), Failure> {
    let worker = Arc::new(worker);
    let mut weights = pattern::zeros(plan.bytes);
    let setup = plan.setup(&weights)?;
    let own = match &plan.workers {
        Some(own) => Some(Crew::start(&worker, own, &setup.init_info(), plan.seed)?),
        None => None,
    };
    Pattern::new(plan.seed, 1).fill(&mut weights)?;
    let expected = Expect::Count(plan.workers.as_ref().map_or(0, |own| own.count as usize));
    let mut sender = setup.connect(&weights, expected, Some(longest()))?;
    let fuse = Lit::new(plan.fuse);
    let (mut versions, mut reported) = (1, Instant::now());
    while !worker.is_closed() {
        let version = sender.version().unwrap().next().0;
        let pattern = Pattern::new(plan.seed, version);
        // Mostly it laps its readers; now and then it waits for them.
        let wait = match version % 16 {
            0 => WaitFor::Applied,
            _ => WaitFor::Sent,
        };
        let report = if version.is_multiple_of(3) {
            pattern.fill(&mut weights)?;
            let report = sender.send_with(
                &weights,
                &SendOptions::new().wait(wait).timeout(Some(longest())),
            )?;
            // Not sent, so never seen.
            Pattern::new(!plan.seed, version).fill(&mut weights)?;
            report
        } else {
            let mut loan = sender.loan()?;
            pattern.fill_loan(&mut loan, || fuse.midway(version))?;
            loan.publish_with(&SendOptions::new().wait(wait).timeout(Some(longest())))?
        };
        fuse.done(version);
        judge(&report)?;
        versions += 1;
        if reported.elapsed() > Duration::from_millis(20) {
            leaks::bounded_descriptors(ceiling(&plan, &sender))?;
            Progress::Published {
                versions: std::mem::take(&mut versions),
            }
            .send(&worker)?;
            reported = Instant::now();
        }
    }
    drop(sender);
    own.map_or(Ok(()), Crew::end)
}

/// Death is the only excuse for not having applied a version.
fn judge(report: &Report) -> Result<(), Failure> {
    let excused = |outcome: &Outcome| matches!(outcome, Outcome::Died | Outcome::Left);
    match report.failed().find(|line| !excused(&line.outcome)) {
        Some(_) => Err(report.to_string().into()),
        None => Ok(()),
    }
}

/// Descriptors a trainer needs at most, however many readers have come and gone:
/// per slot, per reader (its socket and process, those of its pipe), and its own.
fn ceiling(plan: &Plan, sender: &Sender) -> usize {
    let connected = sender.workers().len();
    32 + 2 * usize::from(plan.max_slots) + 4 * connected.max(8)
}

/// A trainer's own workers, and the thread that kills and restarts them.
struct Crew {
    workers: Arc<Workers>,
    /// The one that was killed last.
    victim: Arc<AtomicU32>,
    thread: thread::JoinHandle<Result<(), String>>,
}

impl Crew {
    fn start(
        trainer: &Arc<WorkerProcess>,
        own: &OwnWorkers,
        info: &InitInfo,
        seed: u64,
    ) -> Result<Self, Failure> {
        let mut roles = Roles {
            own: own.clone(),
            info: info.clone(),
            dice: Dice::new(seed),
        };
        let first: Vec<_> = (0..own.count).map(|index| roles.next(index)).collect();
        let workers = Spawn::this_program()?
            .count(own.count as usize)
            .init_each(move |index| first[index].clone())
            .grace(longest())
            .start()?;
        let workers = Arc::new(workers);
        let (theirs, trainer) = (workers.clone(), trainer.clone());
        let victim = Arc::new(AtomicU32::new(0));
        let last = victim.clone();
        let thread = thread::spawn(move || {
            let done = watch(&trainer, &theirs, roles, &last);
            if let Err(error) = &done {
                // The trainer may be in the middle of anything: its end tells.
                eprintln!("{error}");
                std::process::exit(3);
            }
            done
        });
        Ok(Self {
            workers,
            victim,
            thread,
        })
    }

    fn end(self) -> Result<(), Failure> {
        for exit in self.workers.shutdown(Some(longest())) {
            // It may have been killed just before the end.
            let killed = self.victim.load(Ordering::SeqCst) == exit.pid;
            if !exit.is_success() && !killed && !exit.stderr_text().contains(BURNT) {
                return Err(format!("at the end: {exit}").into());
            }
        }
        match self.thread.join() {
            Ok(done) => Ok(done?),
            Err(_) => Err("the thread that watches the workers panicked".into()),
        }
    }
}

/// Makes the roles of a crew, each with moments of its own.
struct Roles {
    own: OwnWorkers,
    info: InitInfo,
    dice: Dice,
}

impl Roles {
    fn next(&mut self, index: u32) -> Vec<u8> {
        let role = Role::Reader(reader::Plan {
            info: self.info.clone(),
            worker: index,
            outlives: false,
            sleeps: index % 2 == 1,
            holds: index < self.own.holders,
            fuse: Fuse::random(&mut self.dice, self.own.life),
            seed: self.dice.roll(),
        });
        postcard::to_stdvec(&role).unwrap_or_default()
    }
}

/// Passes on what the workers report, kills some, and replaces the dead.
fn watch(
    trainer: &WorkerProcess,
    workers: &Workers,
    mut roles: Roles,
    last: &AtomicU32,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let mut victim = None;
    let span = roles.own.kill_every.as_micros() as u64;
    let mut kill_at = Instant::now() + roles.own.kill_every;
    loop {
        let left = kill_at.saturating_duration_since(Instant::now());
        match workers.recv_any(Some(left)) {
            Some((_, Event::Frame(frame))) => {
                if trainer.send(&frame).is_err() {
                    return Ok(()); // the test ends
                }
            }
            Some((index, Event::Exited(exit))) => {
                if trainer.is_closed() {
                    continue;
                }
                let killed = victim.take_if(|victim| *victim == exit.pid).is_some();
                if !killed && !exit.stderr_text().contains(BURNT) {
                    return Err(format!("worker {index}: {exit}"));
                }
                if workers
                    .restart(index, Some(roles.next(index as u32)))
                    .is_err()
                {
                    return Ok(()); // shut down meanwhile
                }
                Progress::Restarted
                    .send(trainer)
                    .map_err(|error| text(&error))?;
            }
            Some(_) => {}
            None if trainer.is_closed() && workers.running() == 0 => return Ok(()),
            None => {
                if Instant::now() < kill_at {
                    continue;
                }
                kill_at = Instant::now() + Duration::from_micros(1 + roles.dice.below(2 * span));
                let index = roles.dice.below(u64::from(roles.own.count)) as usize;
                if victim.is_none() && !trainer.is_closed() {
                    victim = workers.pid(index);
                    last.store(victim.unwrap_or_default(), Ordering::SeqCst);
                    workers.kill(index).map_err(|error| text(&error))?;
                }
            }
        }
    }
}
