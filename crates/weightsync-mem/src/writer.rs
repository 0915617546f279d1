//! The sender's end of a segment.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weightsync_core::{Attendance, Run, Targets, Version, WorkerId, WorkerStatus};

use crate::error::{Error, bad};
use crate::grow::{self, Shortage};
use crate::model::{MAX_NOTE_BYTES, ModelDescription};
use crate::plan::Key;
use crate::protocol::{MAX_BOUND, MAX_MODELS, MAX_RECORDS, MAX_SLOTS};
use crate::registry::{SharedRegistry, StatusAnswer};
use crate::report::Waiter;
use crate::service;
use crate::set::ModelSet;
use crate::shared::Ending;
use crate::snapshot::Snapshot;
use crate::socket::Listener;
use crate::staging::StagingSlots;
use crate::wait::{Deadline, WaitStyle, passed};

/// How a segment is made.
#[derive(Clone, Copy, Debug)]
pub struct SegmentOptions {
    /// Slots of each model: at least 2, one for the live version and one to write. For large models
    /// the first is made at once, and the others after the first send.
    pub slots: u8,
    /// The slots that a model may grow to when all are pinned; after that the sender waits. Each
    /// version besides the newest that workers need (for single workers, in queues, as history) has
    /// a slot on top of these. At most [`MAX_SLOTS`].
    pub max_slots: u8,
    /// How many older versions of each model are kept, of those sent to all, in the sets they were
    /// sent in. [`SegmentWriter::old_snapshot`] and readers' questions find them.
    pub history: u8,
    /// How many versions may wait in the queue of a reader that takes every version, at most
    /// [`MAX_BOUND`]. Each keeps its slot until it is taken. A reader with a larger bound is
    /// refused; with 0, every such reader is.
    pub max_queue: u8,
    /// How the sender waits for its readers.
    pub wait: WaitStyle,
    /// Called with the reason for each reader that is refused, on the segment's thread: for a log.
    pub refused: fn(&str),
}

impl Default for SegmentOptions {
    fn default() -> Self {
        Self {
            slots: 2,
            max_slots: 4,
            history: 0,
            max_queue: MAX_BOUND,
            wait: WaitStyle::default(),
            refused: |_| {},
        }
    }
}

/// The sender's end: only it writes the segment.
///
/// **Guarantee.** A publication becomes visible to each reader whole or not at all, with every
/// model of it, even if this process is killed at any moment. A slot that a reader holds is not
/// written.
///
/// One thread accepts readers and notices their deaths, another makes slots. Dropping the writer
/// tells the readers that it closed, ends the threads and every wait, and frees the memory.
/// Snapshots that readers hold stay valid.
#[derive(Debug)]
pub struct SegmentWriter {
    pub(crate) shared: Arc<SharedRegistry>,
    threads: Option<SegmentThreads>,
    models: Vec<ModelDescription>,
    /// By model, the newest published version.
    pub(crate) versions: Vec<Version>,
    options: SegmentOptions,
}

impl SegmentWriter {
    /// Makes the segment, faults its first slots in, and begins to accept readers at the abstract
    /// socket name `address`.
    ///
    /// # Errors
    ///
    /// [`Error::AddressInUse`] if another sender uses the name, [`Error::NoMemory`] if the slots
    /// exceed the memory that this process may have, [`Error::Os`] if memory or descriptors run
    /// out, [`Error::BadOption`].
    pub fn create(
        address: &str,
        secret: [u8; 16],
        run: Run,
        models: &[ModelDescription],
        options: SegmentOptions,
    ) -> Result<Self, Error> {
        check(models, &options)?;
        Self::create_on(Listener::at(address)?, secret, run, models, options)
    }

    /// Like [`create`](Self::create), with an existing listener.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create).
    pub fn create_on(
        listener: Listener,
        secret: [u8; 16],
        run: Run,
        models: &[ModelDescription],
        options: SegmentOptions,
    ) -> Result<Self, Error> {
        check(models, &options)?;
        let shared = SharedRegistry::new(run, models, secret, &options, None)?;
        let threads = SegmentThreads::start(&shared, listener)?;
        Ok(Self {
            shared,
            threads: Some(threads),
            models: models.to_vec(),
            versions: vec![Version::NONE; models.len()],
            options,
        })
    }

    /// The models, by index.
    pub fn models(&self) -> &[ModelDescription] {
        &self.models
    }

    /// The newest version of a model that was published to any worker;
    /// `Version::NONE` before the first.
    ///
    /// # Panics
    ///
    /// If there is no such model.
    pub fn version(&self, model: usize) -> Version {
        self.versions[model]
    }

    /// How many slots a model has now.
    ///
    /// # Panics
    ///
    /// If there is no such model, and in a forked child.
    pub fn slots(&self, model: usize) -> usize {
        // The lock may be held by a thread that a forked child does not have.
        if let Err(error) = self.shared.header.map.usable() {
            panic!("{error}");
        }
        self.shared.state().plan.slots(model).into()
    }

    /// Lends a free slot of each of these models, to write their next versions into.
    ///
    /// If every slot of a model is pinned, the model grows, if the options allow it or the workers'
    /// sets need it. Otherwise this waits until a slot comes free. It also waits for a free set
    /// record.
    ///
    /// # Errors
    ///
    /// [`Error::AllSlotsPinned`] or [`Error::AllRecordsHeld`] at the deadline, naming the holders;
    /// [`Error::BadOption`] for no model at all, an unknown model, or one named twice.
    pub fn stage(
        &mut self,
        models: &[usize],
        deadline: Deadline,
    ) -> Result<StagingSlots<'_>, Error> {
        self.shared.header.map.usable()?;
        self.check_models(models)?;
        let max_slots = self.options.max_slots;
        // Dropping it returns the lent slots.
        let mut staging = StagingSlots::new(self, models.len());
        let (shared, parts) = staging.parts();
        // Each look lends what it can. Slots that were lent stay in `parts` while this waits for
        // the others.
        let mut look = || grow::lend(shared, models, parts, max_slots, deadline);
        let Some(mut why) = look()? else {
            return Ok(staging);
        };
        let since = Instant::now();
        loop {
            let until = match why {
                // The thread that makes the slot ends this wait.
                Shortage::Making => None,
                // At that time another look requests a new slot.
                Shortage::Until(at) => Some(at),
                Shortage::Pinned | Shortage::Records if passed(deadline) => break,
                Shortage::Pinned | Shortage::Records => deadline,
            };
            // A look that finds the same shortage is no news. Another shortage may end at another
            // time.
            let changed = shared.wait_until(until, || {
                let short = look()?;
                Ok((short != Some(why)).then_some(short))
            })?;
            // Without a change, `until` has come: this look requests the slot, or finds the
            // deadline over.
            match changed.map_or_else(&mut look, Ok)? {
                Some(short) => why = short,
                None => return Ok(staging),
            }
        }
        let waited = since.elapsed();
        Err(no_room(shared, models.get(parts.len()).copied(), waited))
    }

    /// Checks that there are models to stage, which exist and are named once.
    fn check_models(&self, models: &[usize]) -> Result<(), Error> {
        for (at, model) in models.iter().enumerate() {
            if *model >= self.models.len() || models[..at].contains(model) {
                return Err(bad(
                    "models",
                    "different indices of models",
                    format!("{models:?}"),
                ));
            }
        }
        if models.is_empty() {
            return Err(bad("models", "at least one model", "none"));
        }
        Ok(())
    }

    /// Has programs of this user that ask for the status answered by `answer`, on the segment's
    /// thread. Only the first call counts.
    pub fn answer_status(&self, answer: StatusAnswer) {
        let _ = self.shared.status.set(answer);
    }

    /// The readers that are connected now, by worker.
    pub fn readers(&self) -> Vec<WorkerStatus> {
        self.shared.readers()
    }

    /// Waits until `enough` accepts the readers that are or were connected. False if the deadline
    /// comes first.
    ///
    /// # Errors
    ///
    /// Only those of the operating system: [`Error::TooManyFiles`] if readers that came could not
    /// be admitted.
    pub fn wait_readers(
        &self,
        deadline: Deadline,
        mut enough: impl FnMut(&Attendance) -> bool,
    ) -> Result<bool, Error> {
        let shared = &self.shared;
        shared.header.map.usable()?;
        // What was lacking earlier may be there now. If not, it is noted again within moments.
        if deadline.is_none_or(|at| at > Instant::now()) {
            shared.failure().take();
        }
        let met = shared.wait_until(deadline, || Ok(enough(&shared.attendance()).then_some(())))?;
        // Only now, after the workers have mapped the first slot: to make the second one takes a
        // core from them.
        shared.make_ahead(&mut shared.state());
        // Readers may have come without being admitted.
        if met.is_none()
            && let Some(error) = shared.failure().take()
        {
            return Err(error);
        }
        Ok(met.is_some())
    }

    /// Takes the readers that cannot use the models, with their reasons. The next publication's
    /// lines name those that were not taken.
    pub fn take_rejected(&self) -> Vec<(WorkerId, String)> {
        self.shared.take_rejected()
    }

    /// Forgets workers that failed, died or were lost: later publications have no line about them,
    /// until they come and depart again.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn forget(&mut self, workers: &[WorkerId]) -> Result<(), Error> {
        self.shared.header.map.usable()?;
        self.shared.state().forget(workers);
        Ok(())
    }

    /// Holds workers, connected or not, at the set that they should run now: publications do not
    /// move them until they are released. A held worker that joins again under its number is still
    /// held.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn hold(&mut self, workers: &[WorkerId]) -> Result<(), Error> {
        self.shared.header.map.usable()?;
        self.shared.state().plan.hold(workers);
        Ok(())
    }

    /// Ends the holds of these workers, which get their newest set at once.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn release(&mut self, workers: &[WorkerId]) -> Result<(), Error> {
        self.shared.header.map.usable()?;
        let mut state = self.shared.state();
        // The pins first: the releases may write records.
        let records = self.shared.observe(&mut state);
        self.shared.decide(&mut state, |plan, steps| {
            plan.release(workers, records, steps);
        });
        Ok(())
    }

    /// The sender's own pin on the version of a model that was last sent to all; `None` before the
    /// first.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child, [`Error::BadOption`] if there is no such model.
    pub fn snapshot(&self, model: usize) -> Result<Option<Snapshot>, Error> {
        self.waiter().snapshot(model)
    }

    /// The sender's own pin on the version of a model that all `targets` should run, or should run
    /// once they are not held; `None` before the first.
    ///
    /// For [`Targets::All`] these are the connected workers that take the model, and later ones.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] with their versions if these differ, and as
    /// [`snapshot`](Self::snapshot).
    pub fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>, Error> {
        self.check(model)?;
        // The lock is held until the pin is there, so the slot cannot be given out meanwhile.
        let state = self.shared.state();
        let sets: Vec<ModelSet> = match targets {
            Targets::Workers(workers) => {
                let workers = workers.iter();
                workers
                    .map(|worker| state.plan.if_released(*worker))
                    .collect()
            }
            Targets::All => {
                let with_model = |key: &&Key| {
                    let reader = state.readers.get(key);
                    reader.is_some_and(|one| one.models.contains(model) && !one.has_left())
                };
                let workers = state.readers.keys().filter(with_model);
                let sets = workers.map(|(worker, _)| state.plan.if_released(*worker));
                // A worker that joins later gets this set.
                [*state.plan.default_set()]
                    .into_iter()
                    .chain(sets)
                    .collect()
            }
        };
        let version = |set: &ModelSet| set.entry(model).map_or(Version::NONE, |at| at.version);
        let mut versions: Vec<_> = sets.iter().map(version).collect();
        versions.sort();
        versions.dedup();
        match (sets.first(), versions.len()) {
            (Some(set), 1) => self.shared.hold(&state, model, set),
            (None, _) => Ok(None),
            _ => Err(Error::Diverged { model, versions }),
        }
    }

    /// The sender's own pin on an older version of a model, if it is kept, by the history or
    /// because a worker should run it.
    ///
    /// # Errors
    ///
    /// As [`snapshot`](Self::snapshot).
    pub fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>, Error> {
        self.check(model)?;
        let state = self.shared.state();
        // Under the lock until the pin is there, as in `snapshot_for`.
        let Some(slot) = state.plan.find(model, version) else {
            return Ok(None);
        };
        let mut set = ModelSet::EMPTY;
        set.put(model, crate::set::SetEntry { slot, version });
        self.shared.hold(&state, model, &set)
    }

    /// The versions of a model that [`old_snapshot`](Self::old_snapshot) finds, newest first.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] if there is no such model.
    pub fn kept(&self, model: usize) -> Result<Vec<Version>, Error> {
        self.check(model)?;
        Ok(self.shared.state().plan.kept(model))
    }

    /// A handle with which other threads wait for the outcome of publications.
    pub fn waiter(&self) -> Waiter {
        Waiter::new(self.shared.clone())
    }

    fn check(&self, model: usize) -> Result<(), Error> {
        self.shared.check_model(model)
    }
}

impl Drop for SegmentWriter {
    fn drop(&mut self) {
        if self.shared.header.map.usable().is_err() {
            // In a forked child: the thread and the memory belong to the parent.
            std::mem::forget(self.threads.take());
            return;
        }
        self.shared.close(Ending::Closed);
        if let Some(threads) = self.threads.take() {
            threads.join();
        }
    }
}

/// The threads of a segment.
#[derive(Debug)]
pub(crate) struct SegmentThreads([JoinHandle<()>; 2]);

impl SegmentThreads {
    /// Starts the threads. They end when [`SharedRegistry::close`] is called.
    pub(crate) fn start(shared: &Arc<SharedRegistry>, listener: Listener) -> Result<Self, Error> {
        let slots = grow::start(shared.clone())?;
        match service::start(shared.clone(), listener) {
            Ok(service) => Ok(Self([service, slots])),
            Err(error) => {
                // The first thread waits for requests and must not outlive this error.
                shared.close(Ending::Closed);
                let _ = slots.join();
                Err(error)
            }
        }
    }

    pub(crate) fn join(self) {
        for thread in self.0 {
            // The panic hook has already reported a panic there.
            let _ = thread.join();
        }
    }
}

pub(crate) fn check(models: &[ModelDescription], options: &SegmentOptions) -> Result<(), Error> {
    if !(1..=MAX_MODELS).contains(&models.len()) {
        return Err(bad("models", "between 1 and 64 of them", models.len()));
    }
    if let Some(long) = models
        .iter()
        .find(|model| model.note.len() > MAX_NOTE_BYTES)
    {
        let got = format!("{} bytes", long.note.len());
        return Err(bad("a model's note", "at most 16 MiB", got));
    }
    if !(2..=MAX_SLOTS as u8).contains(&options.slots) {
        return Err(bad("slots", "between 2 and 64", options.slots));
    }
    if !(options.slots..=MAX_SLOTS as u8).contains(&options.max_slots) {
        return Err(bad("max_slots", "between slots and 64", options.max_slots));
    }
    if options.history > MAX_SLOTS as u8 - 2 {
        return Err(bad("history", "at most 62", options.history));
    }
    Ok(())
}

/// The error of a stage whose deadline has come: `model` has no slot, or no set record is free.
fn no_room(shared: &SharedRegistry, model: Option<usize>, waited: Duration) -> Error {
    // Every model has its slot, so a record is what is missing.
    let Some(model) = model else {
        return Error::AllRecordsHeld {
            records: MAX_RECORDS,
            waited,
            holders: shared.record_holders(),
        };
    };
    let slots = shared.state().plan.slots(model);
    Error::AllSlotsPinned {
        model,
        slots,
        waited,
        holders: shared.holders(model),
    }
}
