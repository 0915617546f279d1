//! A base for transports without a connection: the sender and its workers look at one place by
//! turns, such as a directory, an object store or a table.
//!
//! You write two things: how a publication gets into the place in one step ([`Publisher`]), and how
//! the sender finds the entries that workers make there ([`PolledPlace`]). [`PolledSender`] does the rest
//! of a [`SenderTransport`]: staging in memory, older versions, who joined and who went how, and one
//! report line for each worker. A worker's end is yours: it announces an [`AboutWorker`], and keeps
//! its [`WorkerWords`] up to date.

mod roster;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weightsync_core::{
    ModelId, Outcome, Run, SenderStatus, Version, WorkerId, WorkerReport, WorkerStatus,
};
use weightsync_mem::threads::{CondvarExt as _, LockExt as _};

use self::roster::PolledWorker;
pub use self::roster::Roster;
use super::{
    Attendance, CopyOptions, Deadline, Image, Interrupter, Level, ModelSpec, Outstanding,
    SenderTransport, Source, Staging, Targets, interrupt, left,
};
use crate::error::{Error, Result};
use crate::snapshot::Snapshot;

/// What is known of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It is alive.
    Here,
    /// It left in order.
    Left,
    /// It died, or is silent.
    Dead,
}

/// What a worker announces when it joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AboutWorker {
    /// Its number.
    pub worker: WorkerId,
    /// Its process.
    pub pid: u32,
    /// Where it runs its models.
    pub device: String,
    /// The run of the sender that it joined.
    pub run: Run,
    /// The models that it takes, by their places in the sender's set.
    pub wanted: Vec<usize>,
}

/// What a worker says about the versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerWords {
    /// The newest publication that it has whole, and has checked.
    pub staged: u64,
    /// The newest publication that it has loaded.
    pub applied: u64,
    /// The versions that it has loaded, in the order of what it wanted.
    pub versions: Vec<Version>,
    /// The last publication that it could not use, and why.
    pub refused: Option<(u64, String)>,
    /// What it waits for: a version of this model, or a later one.
    pub asks: Option<(ModelId, Version)>,
    /// Why it can use none of its models at all.
    pub rejected: Option<String>,
}

/// Where workers announce themselves, and say what they have.
pub trait PolledPlace: fmt::Debug + Send + Sync {
    /// The names of their entries.
    fn entries(&self) -> Vec<String>;

    /// The entry of this name; `None` while its worker is still making it, or if it is no worker's.
    fn open(&self, name: &str) -> Option<Box<dyn WorkerEntry>>;

    /// Removes the entry of a worker that has gone. Only a sender calls this.
    fn remove(&self, name: &str);

    /// What became of a worker that did not leave in order.
    fn lost(&self) -> Outcome {
        Outcome::Died
    }

    /// The pause between two looks, at first and at most.
    fn pauses(&self) -> (Duration, Duration);
}

/// A worker's entry.
pub trait WorkerEntry: fmt::Debug + Send + Sync {
    /// What the worker announced.
    fn about(&self) -> &AboutWorker;

    /// Whether it is there: it, and no other that has taken its name since.
    fn life(&self) -> Life;

    /// What it says now; `None` if that cannot be read.
    fn words(&self) -> Option<WorkerWords>;
}

/// What makes publications live.
pub trait Publisher: fmt::Debug + Send + Sync {
    /// The name of the scheme, for errors.
    fn scheme(&self) -> &str;

    /// Whether this process may publish: a forked child may not.
    ///
    /// # Errors
    ///
    /// Of the publisher's own; then nothing has begun.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The run of this sender.
    fn run(&self) -> Run;

    /// The newest version of a model, by its place in the set.
    fn version(&self, model: usize) -> Version;

    /// Makes these versions live in one step, each with its model's place in the set; returns the
    /// number of the publication, which grows. `before` is called as late as possible before that
    /// step. It returns the newest publication that a worker refused, or 0.
    ///
    /// # Errors
    ///
    /// Then nothing is live.
    fn publish(
        &mut self,
        versions: &[(usize, Snapshot)],
        before: &mut dyn FnMut() -> u64,
    ) -> Result<u64>;

    /// A version that this end does not keep; `None` if there is no such version.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`] from a place that keeps several versions.
    fn older(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        let _ = (model, version);
        Ok(None)
    }
}

/// Pauses that grow while nothing happens.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    last: Duration,
    next: Duration,
}

impl Pause {
    /// Of this length at first, and of that at most.
    pub fn new((first, last): (Duration, Duration)) -> Self {
        Self { last, next: first }
    }

    /// Sleeps, until the deadline at most. False if it has come.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`].
    pub fn until(&mut self, deadline: Deadline) -> Result<bool> {
        self.until_interrupted(deadline, &Interruption::default())
    }

    /// As [`until`](Self::until), and false at once if the wait is interrupted.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`].
    pub fn until_interrupted(&mut self, deadline: Deadline, by: &Interruption) -> Result<bool> {
        if left(deadline).is_some_and(|left| left.is_zero()) {
            // An interrupt is of this wait, though the deadline ends it.
            by.take();
            return Ok(false);
        }
        let over = Instant::now() + self.next;
        if by.sleep(deadline.map_or(over, |deadline| deadline.min(over)))? {
            return Ok(false);
        }
        self.next = self.last.min(self.next * 5 / 4);
        Ok(true)
    }
}

/// How other threads end the waits of a worker's end: its [`Interrupter`]s, and the wait itself.
#[derive(Clone, Debug, Default)]
pub struct Interruption(Arc<(Mutex<bool>, Condvar)>);

impl Interruption {
    /// What ends the wait, or the next one if there is none.
    pub fn interrupter(&self) -> Interrupter {
        let Self(place) = self.clone();
        Interrupter::new(move || {
            *place.0.locked() = true;
            place.1.notify_all();
        })
    }

    fn take(&self) -> bool {
        std::mem::take(&mut *self.0.0.locked())
    }

    /// Sleeps; true at once if it is interrupted.
    fn sleep(&self, until: Instant) -> Result<bool> {
        let (interrupted, changed) = &*self.0;
        loop {
            // Without the lock: the caller's check may interrupt this end itself.
            let slice = interrupt::at_most(left(Some(until)))?;
            let mut guard = interrupted.locked();
            if !*guard {
                guard = changed.wait_at_most(guard, slice);
            }
            if *guard || Instant::now() >= until {
                return Ok(std::mem::take(&mut *guard));
            }
        }
    }
}

/// The trainer's end over a [`Publisher`].
#[derive(Debug)]
pub struct PolledSender<P> {
    publisher: P,
    models: Vec<ModelSpec>,
    roster: Arc<Roster>,
    /// The newest version of each model and those kept before it, oldest first.
    kept: Vec<VecDeque<Snapshot>>,
    /// Memory of an older version of each model, to be written again.
    spare: Vec<Option<Image>>,
    history: usize,
}

impl<P: Publisher> PolledSender<P> {
    /// The end of a sender of these models that keeps so many older versions.
    pub fn new(publisher: P, models: Vec<ModelSpec>, roster: Arc<Roster>, history: u8) -> Self {
        Self {
            publisher,
            roster,
            kept: vec![VecDeque::new(); models.len()],
            spare: vec![None; models.len()],
            models,
            history: usize::from(history),
        }
    }

    fn keep(&mut self, model: usize, snapshot: Snapshot) {
        let kept = &mut self.kept[model];
        kept.push_back(snapshot);
        // One more than the history: the newest.
        while kept.len() > self.history + 1 {
            let old = kept.pop_front();
            // If nobody else has it.
            self.spare[model] = old.and_then(Snapshot::into_image);
        }
    }

    /// The versions that were written, each with its digest.
    fn snapshots(&self, members: Vec<StagedModel>) -> Result<Vec<(usize, Snapshot)>> {
        let mut published = Vec::new();
        for member in members {
            let spec = &self.models[member.model];
            let run = self.publisher.run();
            let snapshot = Snapshot::received(spec, run, member.version, member.image)?;
            // Made by the sender, before the bytes leave this process: workers compare what they
            // read with it.
            let digest = snapshot.digest();
            published.push((member.model, snapshot.with_digest(digest)));
        }
        Ok(published)
    }
}

impl<P: Publisher> SenderTransport for PolledSender<P> {
    fn stage(&mut self, models: &[usize], _: Deadline) -> Result<Box<dyn Staging + '_>> {
        self.publisher.check()?;
        // Before the weights are written, which may take long.
        let workers = self.roster.look();
        let mut members = Vec::new();
        for &model in models {
            // Memory of a version that nobody holds any more, if there is some: it is written in
            // full.
            let spare = self.spare[model].take();
            members.push(StagedModel {
                model,
                version: self.publisher.version(model).next(),
                image: spare.unwrap_or_else(|| Image::zeros(&self.models[model].layout)),
            });
        }
        Ok(Box::new(StagedSet {
            members,
            workers,
            sender: self,
            waits_for_late: false,
        }))
    }

    fn run(&self) -> Option<Run> {
        Some(self.publisher.run())
    }

    fn version(&self, model: usize) -> Version {
        self.publisher.version(model)
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        self.roster.present()
    }

    fn fill_status(&self, status: &mut SenderStatus) {
        status.workers = self.roster.status();
    }

    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool> {
        let mut pause = Pause::new(self.roster.place.pauses());
        loop {
            if enough(&self.roster.attendance()) {
                return Ok(true);
            }
            if !pause.until(deadline)? {
                return Ok(false);
            }
        }
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        self.roster.take_rejected()
    }

    fn forget(&mut self, workers: &[WorkerId]) -> Result<()> {
        self.roster.forget(workers);
        Ok(())
    }

    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        Ok(self.kept[model].back().cloned())
    }

    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        let mut kept = self.kept[model].iter();
        match kept.find(|one| one.version() == version) {
            Some(kept) => Ok(Some(kept.clone())),
            None => self.publisher.older(model, version),
        }
    }
}

/// Room for the next version of some models, in this process's own memory.
#[derive(Debug)]
struct StagedSet<'a, P> {
    sender: &'a mut PolledSender<P>,
    /// Those that were there when the send began: one that dies before it is live has a line all the
    /// same.
    workers: Vec<Arc<PolledWorker>>,
    members: Vec<StagedModel>,
    waits_for_late: bool,
}

#[derive(Debug)]
struct StagedModel {
    model: usize,
    version: Version,
    image: Image,
}

impl<P> StagedSet<'_, P> {
    fn member(&mut self, model: usize) -> &mut StagedModel {
        let mut members = self.members.iter_mut();
        let found = members.find(|member| member.model == model);
        found.unwrap_or_else(|| panic!("model {model} was not staged"))
    }
}

impl<P: Publisher> Staging for StagedSet<'_, P> {
    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        self.member(model).image.tensors_mut()
    }

    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        self.tensors_mut(model).swap_remove(index)
    }

    fn write(&mut self, model: usize, sources: &[Source<'_>], _: CopyOptions) -> Result<()> {
        self.member(model).image.write(sources)
    }

    fn number(&mut self, model: usize, version: Version) -> Result<()> {
        let newest = self.sender.version(model);
        if version <= newest {
            return Err(Error::VersionNotNewer {
                newest,
                got: version,
            });
        }
        self.member(model).version = version;
        Ok(())
    }

    fn wait_for_late(&mut self) {
        self.waits_for_late = true;
    }

    fn publish(self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>> {
        let Self {
            sender,
            members,
            mut workers,
            waits_for_late,
        } = *self;
        // Every worker reads the one place, so none can be left out.
        if *targets != Targets::All {
            let scheme = sender.publisher.scheme();
            return Err(Error::unsupported("a send to some workers", scheme));
        }
        let published = sender.snapshots(members)?;
        let roster = sender.roster.clone();
        // A worker that gets the publication has a line.
        let mut before = || {
            let mut joined = roster.look();
            // A worker that was known by the last look has its line already.
            joined.retain(|one| !workers.iter().any(|known| Arc::ptr_eq(known, one)));
            workers.append(&mut joined);
            let refused = workers.iter().filter_map(|worker| worker.look().1.refused);
            refused.map(|(sequence, _)| sequence).max().unwrap_or(0)
        };
        // This makes the versions live.
        let sequence = sender.publisher.publish(&published, &mut before)?;
        let versions = published.iter();
        let versions: Vec<_> = versions
            .map(|(model, snapshot)| (*model, snapshot.version()))
            .collect();
        let ids = published
            .iter()
            .map(|(_, snapshot)| snapshot.model().clone());
        let ids = ids.collect();
        // Only now: a publication that fails leaves what is kept as it was.
        for (model, snapshot) in published {
            sender.keep(model, snapshot);
        }
        // A worker that wants none of these models has no line.
        workers.retain(|worker| {
            let mut wanted = worker.about().wanted.iter();
            wanted.any(|model| versions.iter().any(|(sent, _)| sent == model))
        });
        Ok(Box::new(PolledPublication {
            ids,
            roster,
            sequence,
            workers,
            versions,
            at: Instant::now(),
            waits_for_late,
        }))
    }
}

#[derive(Debug)]
struct PolledPublication {
    roster: Arc<Roster>,
    sequence: u64,
    versions: Vec<(usize, Version)>,
    /// The models of these versions.
    ids: Vec<ModelId>,
    /// Those that were there, and want one of the models.
    workers: Vec<Arc<PolledWorker>>,
    at: Instant,
    waits_for_late: bool,
}

impl Outstanding for PolledPublication {
    fn versions(&self) -> &[(usize, Version)] {
        &self.versions
    }

    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>> {
        // One look first: a settled send never sleeps.
        let lines = self.workers.iter().map(|worker| self.line(worker, level));
        let mut lines: Vec<_> = lines.collect();
        // A worker that is late since an earlier send is not waited for.
        let awaited = |line: &WorkerReport| !line.outcome.is_final(level) && line.late.is_none();
        let mut pause = Pause::new(self.roster.place.pauses());
        while lines.iter().any(awaited) && pause.until(deadline)? {
            for (line, worker) in lines.iter_mut().zip(&self.workers) {
                // A final line stands, whatever becomes of the worker.
                if !line.outcome.is_final(level) {
                    *line = self.line(worker, level);
                }
            }
        }
        Ok(lines)
    }

    fn decided(&self) -> Result<Vec<WorkerReport>> {
        let gone = self.workers.iter();
        let gone = gone.filter(|worker| worker.look().0 != Life::Here);
        Ok(gone
            .map(|worker| self.line(worker, Level::Staged))
            .collect())
    }

    fn late(&self, level: Level) -> Result<()> {
        for worker in &self.workers {
            // What it has said by now is noted. It counts as late until it says something else.
            if !self.line(worker, level).outcome.is_final(level) {
                let (_, words) = worker.look();
                let mut late = worker.late.locked();
                late.note(self.sequence, self.at, words);
            }
        }
        Ok(())
    }
}

impl PolledPublication {
    /// Whether the worker waits for a later version than this one.
    fn is_below(&self, words: &WorkerWords) -> bool {
        words.asks.as_ref().is_some_and(|(model, version)| {
            let mut sent = self.versions.iter().zip(&self.ids);
            sent.any(|((_, sent), id)| id == model && sent < version)
        })
    }

    fn line(&self, worker: &PolledWorker, level: Level) -> WorkerReport {
        let (life, words) = worker.look();
        // The last refusal may be of a later publication. The worker has passed this one over, too.
        let refused = words.refused.as_ref();
        let refused = refused.filter(|(sequence, _)| *sequence >= self.sequence);
        // The furthest step counts: what was applied stays applied, whatever came later.
        let outcome = if words.applied >= self.sequence {
            Outcome::Applied
        } else if let Some(reason) = words.rejected.as_ref().or(refused.map(|(_, why)| why)) {
            let reason = reason.clone();
            match life {
                // A worker that can use nothing at all has failed once it is gone.
                Life::Left | Life::Dead if words.rejected.is_some() => Outcome::Failed { reason },
                _ => Outcome::Refused { reason },
            }
        } else if level == Level::Staged && words.staged >= self.sequence {
            Outcome::Staged
        } else {
            match life {
                Life::Left => Outcome::Left,
                Life::Dead => self.roster.place.lost(),
                // It may have staged this version before it began to ask for a later one.
                Life::Here if self.is_below(&words) => Outcome::Asks,
                Life::Here if words.staged >= self.sequence => Outcome::Staged,
                Life::Here => Outcome::Late,
            }
        };
        // Passed over if it was late before and has said nothing new since.
        let late = match outcome {
            Outcome::Late if !self.waits_for_late => {
                let late = worker.late.locked();
                late.since(self.sequence, || words.clone())
            }
            _ => None,
        };
        let about = worker.about();
        let mut sent = self.versions.iter();
        let runs = |model: &usize| about.version(&words, *model);
        WorkerReport {
            worker: about.worker,
            pid: about.pid,
            outcome,
            versions: sent.clone().map(|(model, _)| runs(model)).collect(),
            current: sent
                .all(|(model, version)| !about.wanted.contains(model) || runs(model) >= *version),
            after: self.at.elapsed(),
            late,
        }
    }
}

impl AboutWorker {
    /// The version that the worker has loaded of one of the sender's models.
    pub fn version(&self, words: &WorkerWords, model: usize) -> Version {
        let at = self.wanted.iter().position(|wanted| *wanted == model);
        let found = at.and_then(|at| words.versions.get(at));
        found.copied().unwrap_or(Version::NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupt_ends_this_wait_or_the_next_one() {
        let (hour, interruption) = (Duration::from_secs(3600), Interruption::default());
        let interrupter = interruption.interrupter();
        interrupter.interrupt();
        let mut pause = Pause::new((hour, hour));
        assert!(!pause.until_interrupted(None, &interruption).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| interrupter.interrupt());
            assert!(!pause.until_interrupted(None, &interruption).unwrap());
        });
        // None is left over.
        let mut pause = Pause::new((Duration::from_millis(1), hour));
        assert!(pause.until_interrupted(None, &interruption).unwrap());
    }
}
