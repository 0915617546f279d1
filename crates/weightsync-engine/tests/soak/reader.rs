//! A worker that takes one version after the other and checks every byte.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weightsync_engine::worker::WorkerProcess;
use weightsync_engine::{
    InitInfo, Receiver, ReceiverSetup, Remedy, Run, Snapshot, Version, WaitStyle,
};

use crate::fuse::{Fuse, Lit};
use crate::leaks;
use crate::pattern::Pattern;
use crate::scale::{Dice, longest};
use crate::trainer::Progress;

/// How long one look for the next trainer takes. In between, the worker looks
/// whether its own end has come.
const LOOK: Duration = Duration::from_millis(250);

/// How a reader behaves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub info: InitInfo,
    pub worker: u32,
    /// Whether trainers follow each other, or the first one's end is the end.
    pub outlives: bool,
    /// Sleep at once while waiting.
    pub sleeps: bool,
    /// Hold some snapshots across versions and trainers.
    pub holds: bool,
    pub fuse: Option<Fuse>,
    pub seed: u64,
}

/// Reads until the trainer ends in order, or the pipe is closed.
pub fn read(worker: &WorkerProcess, plan: Plan) -> Result<(), Box<dyn std::error::Error>> {
    let Some(mut receiver) = connect(worker, &plan)? else {
        return Ok(());
    };
    let fuse = Lit::new(plan.fuse);
    let mut checker = Checker::new(&plan);
    let mut tally = Tally::new(plan.worker);
    let mut alone = None;
    let mut fds = None;
    loop {
        // Next to a living trainer nothing but a version or its end may end the
        // wait: a wake-up that is lost hangs, and is found.
        let received = match alone {
            None => receiver.recv().map(Some),
            Some(_) => receiver.recv_timeout(LOOK),
        };
        match received {
            Ok(Some(snapshot)) => {
                if alone.take().is_some() || fds.is_none() {
                    leaks::same_descriptors(&mut fds, checker.held.is_some())?;
                }
                tally.again +=
                    checker.check(&receiver, snapshot, || fuse.midway(tally.total + 1))?;
                tally.count(worker)?;
                fuse.done(tally.total);
            }
            Ok(None) => {
                let since: Instant = *alone.get_or_insert_with(Instant::now);
                if since.elapsed() > longest() {
                    return Err("no trainer came back".into());
                }
            }
            Err(
                weightsync_engine::Error::SenderDied { .. }
                | weightsync_engine::Error::SenderClosed,
            ) => {
                // What it held is whole, whatever the trainer was doing.
                tally.again += checker.check_held(false)?;
                if !plan.outlives {
                    return tally.send(worker);
                }
                alone.get_or_insert_with(Instant::now);
            }
            Err(error) => return Err(error.into()),
        }
        if worker.is_closed() && alone.is_some() {
            return Ok(());
        }
    }
}

/// Joins the trainer that is there, or the next one; `None` if the pipe is
/// closed first: a reader that is started just before the end finds no trainer.
fn connect(
    worker: &WorkerProcess,
    plan: &Plan,
) -> Result<Option<Receiver>, Box<dyn std::error::Error>> {
    let style = if plan.sleeps {
        WaitStyle::Sleep
    } else {
        WaitStyle::YieldThenSleep
    };
    let setup = ReceiverSetup::new(plan.info.clone(), plan.worker).wait_style(style);
    let since = Instant::now();
    loop {
        // The trainer may die while this connects, and the next one come.
        match setup.clone().connect(Some(8 * LOOK)) {
            Ok(receiver) => return Ok(Some(receiver)),
            Err(error) if error.remedy() == Remedy::GiveUp => return Err(error.into()),
            Err(error) if since.elapsed() > longest() => return Err(error.into()),
            Err(_) if worker.is_closed() => return Ok(None),
            Err(_) => {}
        }
    }
}

/// Checks bytes and labels.
struct Checker {
    holds: bool,
    dice: Dice,
    seen: Option<(Run, u64, Version)>,
    held: Option<(Snapshot, Pattern)>,
    /// How many more versions it is held for.
    left: u64,
}

impl Checker {
    fn new(plan: &Plan) -> Self {
        Self {
            holds: plan.holds,
            dice: Dice::new(plan.seed),
            seen: None,
            held: None,
            left: 0,
        }
    }

    /// Checks a version just received; returns how many were checked again.
    fn check(
        &mut self,
        receiver: &Receiver,
        snapshot: Snapshot,
        midway: impl FnOnce(),
    ) -> Result<u64, Box<dyn std::error::Error>> {
        let (run, version) = (snapshot.run(), snapshot.version());
        let seed = Pattern::seed_of(&snapshot)?;
        match self.seen.replace((run, seed, version)) {
            Some((run_before, seed_before, before)) if run_before == run => {
                if version <= before {
                    return Err(format!("{version} came after {before} of {run}").into());
                }
                if seed != seed_before {
                    return Err(format!("{version} of {run} is of another life").into());
                }
            }
            Some((run_before, ..)) if !run.fences(&run_before) => {
                return Err(format!("{run} came after {run_before}").into());
            }
            _ => {}
        }
        if receiver.run() != run || receiver.version().unwrap() != version {
            return Err(format!("{version} of {run} is not what the receiver reports").into());
        }
        let pattern = Pattern::new(seed, version.0);
        midway();
        pattern.check(&snapshot)?;
        let again = self.check_held(true)?;
        if self.holds && self.held.is_none() && self.dice.below(4) == 0 {
            self.held = Some((snapshot, pattern));
            self.left = 1 + self.dice.below(8);
        }
        Ok(again)
    }

    /// Checks the snapshot that is held once more, and lets it go when its time
    /// has come.
    fn check_held(&mut self, release: bool) -> Result<u64, Box<dyn std::error::Error>> {
        let Some((snapshot, pattern)) = &self.held else {
            return Ok(0);
        };
        if release && self.left > 1 {
            self.left -= 1;
            return Ok(0);
        }
        pattern.check(snapshot)?;
        if release {
            self.held = None;
        }
        Ok(1)
    }
}

/// What has been done, reported now and then.
struct Tally {
    reader: u32,
    total: u64,
    checks: u64,
    again: u64,
    reported: Instant,
}

impl Tally {
    fn new(reader: u32) -> Self {
        Self {
            reader,
            total: 0,
            checks: 0,
            again: 0,
            reported: Instant::now(),
        }
    }

    fn count(&mut self, worker: &WorkerProcess) -> Result<(), Box<dyn std::error::Error>> {
        self.total += 1;
        self.checks += 1;
        // Soon, because what is not reported when the process is killed is lost.
        if self.checks >= 200 || self.reported.elapsed() > Duration::from_millis(10) {
            self.send(worker)?;
        }
        Ok(())
    }

    fn send(&mut self, worker: &WorkerProcess) -> Result<(), Box<dyn std::error::Error>> {
        let progress = Progress::Checked {
            reader: self.reader,
            checks: std::mem::take(&mut self.checks),
            again: std::mem::take(&mut self.again),
        };
        self.reported = Instant::now();
        progress.send(worker)
    }
}
