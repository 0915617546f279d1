//! The sender's end of a segment.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use weightsync_core::{Run, Version, WorkerId};

use crate::error::Error;
use crate::model::{MAX_NOTE_BYTES, ModelSpec};
use crate::plan::{Key, Lend, Targets};
use crate::protocol::{MAX_MODELS, MAX_SLOTS};
use crate::report::Waiter;
use crate::roster::{ReaderStatus, Shared};
use crate::service;
use crate::set::ModelSet;
use crate::shared::Ending;
use crate::slot::Slot;
use crate::snapshot::Snapshot;
use crate::socket::Listener;
use crate::staging::{Part, Staging};
use crate::wait::{Deadline, WaitStyle};

/// How a segment is made.
#[derive(Clone, Copy, Debug)]
pub struct SegmentOptions {
    /// Slots of each model made at the beginning: at least 2, one live and one
    /// to write.
    pub slots: u8,
    /// Slots a model may grow to when all are pinned; then the sender waits. Each
    /// version beyond one that is meant to be run or kept at once (for some
    /// workers, in queues, as history) has its slot beside them. At most
    /// [`MAX_SLOTS`].
    pub max_slots: u8,
    /// How many older versions of each model that were sent to all are kept, in
    /// the sets they were sent in, to be had by [`Writer::old_snapshot`] and by
    /// readers that ask.
    pub history: u8,
    /// How the sender waits for its readers.
    pub wait: WaitStyle,
}

impl Default for SegmentOptions {
    fn default() -> Self {
        Self {
            slots: 2,
            max_slots: 4,
            history: 0,
            wait: WaitStyle::default(),
        }
    }
}

/// The sender's end: it alone writes the segment.
///
/// **Guarantee.** A publication becomes visible to each reader whole or not at
/// all, with every model of it, also if this process is killed at any moment; a
/// slot that anybody holds is not written.
///
/// A thread of its own accepts readers and notices their deaths. Dropping the
/// writer tells the readers that it closed, ends the thread and every wait, and
/// frees the memory; snapshots that readers hold stay valid.
#[derive(Debug)]
pub struct Writer {
    pub(crate) shared: Arc<Shared>,
    service: Option<JoinHandle<()>>,
    models: Vec<ModelSpec>,
    /// By model, the newest published.
    pub(crate) versions: Vec<Version>,
    options: SegmentOptions,
}

impl Writer {
    /// Makes the segment, faults its slots in and begins to accept readers at
    /// the abstract socket name `address`.
    ///
    /// # Errors
    ///
    /// [`Error::AddressInUse`] if another sender lives there, [`Error::Os`] if
    /// memory or descriptors run out, [`Error::BadOption`].
    pub fn create(
        address: &str,
        secret: [u8; 16],
        run: Run,
        models: &[ModelSpec],
        options: SegmentOptions,
    ) -> Result<Self, Error> {
        check(models, &options)?;
        Self::create_on(Listener::at(address)?, secret, run, models, options)
    }

    /// As [`create`](Self::create), on a name that is listened on already.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create).
    pub fn create_on(
        listener: Listener,
        secret: [u8; 16],
        run: Run,
        models: &[ModelSpec],
        options: SegmentOptions,
    ) -> Result<Self, Error> {
        check(models, &options)?;
        let shared = Shared::new(run, models, secret, &options, None)?;
        let service = service::start(shared.clone(), listener)?;
        Ok(Self {
            shared,
            service: Some(service),
            models: models.to_vec(),
            versions: vec![Version::NONE; models.len()],
            options,
        })
    }

    /// The models, by index.
    pub fn models(&self) -> &[ModelSpec] {
        &self.models
    }

    /// The newest version of a model that was published, to whomever;
    /// `Version::NONE` before the first.
    ///
    /// # Panics
    ///
    /// If there is no such model.
    pub fn version(&self, model: usize) -> Version {
        self.versions[model]
    }

    /// How many slots a model has at present.
    ///
    /// # Panics
    ///
    /// If there is no such model, and in a forked child.
    pub fn slots(&self, model: usize) -> usize {
        if let Err(error) = self.shared.header.map.usable() {
            panic!("{error}");
        }
        self.shared.state().plan.slots(model).into()
    }

    /// Lends a free slot of each of these models, to write their next versions
    /// into.
    ///
    /// If every slot of one is pinned, it grows if the options allow or if what
    /// is meant to be run needs it, else this waits until one comes free.
    ///
    /// # Errors
    ///
    /// [`Error::AllSlotsPinned`] at the deadline, naming the holders;
    /// [`Error::BadOption`] for no model at all, a model that there is not, or one
    /// named twice.
    pub fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Staging<'_>, Error> {
        self.shared.header.map.usable()?;
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
            return Err(bad("models", "at least one model", "none".into()));
        }
        let max_slots = self.options.max_slots;
        // Its drop gives back what was lent.
        let mut staging = Staging::new(self, models.len());
        let (shared, parts) = staging.parts();
        lend(shared, models, parts, max_slots)?;
        if parts.len() == models.len() {
            return Ok(staging);
        }
        let since = Instant::now();
        shared.wait_until(deadline, || {
            lend(shared, models, parts, max_slots)?;
            Ok((parts.len() == models.len()).then_some(()))
        })?;
        let Some(&model) = models.get(parts.len()) else {
            return Ok(staging);
        };
        let slots = shared.state().plan.slots(model);
        Err(Error::AllSlotsPinned {
            model,
            slots,
            waited: since.elapsed(),
            holders: shared.holders(model),
        })
    }

    /// The readers connected at present, by worker.
    pub fn readers(&self) -> Vec<ReaderStatus> {
        self.shared.readers()
    }

    /// Waits until `enough`, given the readers present and those that cannot use
    /// the models, is content. False if the deadline came first.
    ///
    /// # Errors
    ///
    /// Only of the operating system.
    pub fn wait_readers(
        &self,
        deadline: Deadline,
        mut enough: impl FnMut(&[ReaderStatus], &[WorkerId]) -> bool,
    ) -> Result<bool, Error> {
        let shared = &self.shared;
        shared.header.map.usable()?;
        let met = shared.wait_until(deadline, || {
            Ok(enough(&shared.readers(), &shared.rejected()).then_some(()))
        })?;
        Ok(met.is_some())
    }

    /// Takes the readers that cannot use the models, with the reason; those not
    /// taken are lines of the next publication that is settled.
    pub fn take_rejected(&self) -> Vec<(WorkerId, String)> {
        self.shared.take_rejected()
    }

    /// Holds workers, connected or not, at what they are meant to run now:
    /// publications do not move them until they are released. One that joins
    /// again under its number is still held there.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn hold(&mut self, workers: &[WorkerId]) -> Result<(), Error> {
        self.shared.header.map.usable()?;
        self.shared.state().plan.hold(workers);
        Ok(())
    }

    /// Holds these workers no more: they get the newest that was meant for them
    /// at once.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn release(&mut self, workers: &[WorkerId]) -> Result<(), Error> {
        self.shared.header.map.usable()?;
        let mut state = self.shared.state();
        let records = self.shared.observe(&mut state);
        self.shared.decide(&mut state, |plan, steps| {
            plan.release(workers, records, steps);
        });
        Ok(())
    }

    /// The sender's own hold on the version of a model that was last sent to
    /// all; `None` before the first.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child, [`Error::BadOption`] if there is no
    /// such model.
    pub fn snapshot(&self, model: usize) -> Result<Option<Snapshot>, Error> {
        self.waiter().snapshot(model)
    }

    /// The sender's own hold on the one version of a model that all of
    /// `targets` are meant to run, or will be once they are not held; `None`
    /// before the first.
    ///
    /// For [`Targets::All`] these are the connected workers that have the model,
    /// and those to come.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] with their versions if they are not the same, and as
    /// [`snapshot`](Self::snapshot).
    pub fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>, Error> {
        self.check(model)?;
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
                [*state.plan.default_set()]
                    .into_iter()
                    .chain(sets)
                    .collect()
            }
        };
        let version = |set: &ModelSet| set.place(model).map_or(Version::NONE, |at| at.version);
        let mut versions: Vec<_> = sets.iter().map(version).collect();
        versions.sort();
        versions.dedup();
        match (sets.first(), versions.len()) {
            (Some(set), 1) => self.shared.hold(&state, model, set),
            (None, _) => Ok(None),
            _ => Err(Error::Diverged { model, versions }),
        }
    }

    /// The sender's own hold on an older version of a model, if it is kept (by
    /// the history, or because a worker is to run it).
    ///
    /// # Errors
    ///
    /// As [`snapshot`](Self::snapshot).
    pub fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>, Error> {
        self.check(model)?;
        let state = self.shared.state();
        let Some(slot) = state.plan.find(model, version) else {
            return Ok(None);
        };
        let mut set = ModelSet::EMPTY;
        set.put(model, crate::set::Placed { slot, version });
        self.shared.hold(&state, model, &set)
    }

    /// The versions of a model that there is an
    /// [`old_snapshot`](Self::old_snapshot) of, newest first.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] if there is no such model.
    pub fn kept(&self, model: usize) -> Result<Vec<Version>, Error> {
        self.check(model)?;
        Ok(self.shared.state().plan.kept(model))
    }

    /// What other threads wait with for the outcome of publications.
    pub fn waiter(&self) -> Waiter {
        Waiter::new(self.shared.clone())
    }

    fn check(&self, model: usize) -> Result<(), Error> {
        self.shared.check_model(model)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.shared.header.map.usable().is_err() {
            // A forked child's copy: the thread and the memory are the parent's.
            if let Some(service) = self.service.take() {
                std::mem::forget(service);
            }
            return;
        }
        self.shared.close(Ending::Closed);
        if let Some(service) = self.service.take() {
            // A panic there has been reported by the panic hook already.
            let _ = service.join();
        }
    }
}

/// Lends slots for the models that have none yet, in order, as far as it goes.
pub(crate) fn lend(
    shared: &Shared,
    models: &[usize],
    parts: &mut Vec<Part>,
    max_slots: u8,
) -> Result<(), Error> {
    let mut state = shared.state();
    // Heads and records before data pins, again after each change of a lane.
    let mut records = shared.observe(&mut state);
    while let Some(&model) = models.get(parts.len()) {
        let pinned = shared.pinned(&state, model, records);
        let mut decided = state.plan.lend(model, pinned, max_slots);
        if !matches!(decided, Lend::Slot(_))
            && shared.decide(&mut state, |plan, steps| plan.clear_taken(steps))
        {
            records = shared.observe(&mut state);
            let pinned = shared.pinned(&state, model, records);
            decided = state.plan.lend(model, pinned, max_slots);
        }
        let slot = match decided {
            Lend::Slot(slot) => slot,
            Lend::Grow => {
                // Faulting the pages in takes its time: readers may join
                // meanwhile. Nobody else lends or grows.
                drop(state);
                let bytes = shared.models[model].model.slot_bytes();
                let file = Slot::new(bytes)?;
                state = shared.state();
                let slot = shared.add_slot(&mut state, model, Arc::new(file));
                // After it: a reader that could not be handed the slot is told
                // nothing any more, so only its pins count from there on.
                records = shared.observe(&mut state);
                slot
            }
            Lend::Wait => {
                // Room in a queue gives slots back, later.
                shared.deliver(&mut state);
                return Ok(());
            }
        };
        let file = state.slots[model][usize::from(slot)].clone();
        parts.push(Part::new(model, slot, file));
    }
    Ok(())
}

pub(crate) fn check(models: &[ModelSpec], options: &SegmentOptions) -> Result<(), Error> {
    if !(1..=MAX_MODELS).contains(&models.len()) {
        let got = models.len().to_string();
        return Err(bad("models", "between 1 and 64 of them", got));
    }
    if let Some(long) = models
        .iter()
        .find(|model| model.note.len() > MAX_NOTE_BYTES)
    {
        let got = format!("{} bytes", long.note.len());
        return Err(bad("a model's note", "at most 16 MiB", got));
    }
    if !(2..=MAX_SLOTS as u8).contains(&options.slots) {
        return Err(bad("slots", "between 2 and 64", options.slots.to_string()));
    }
    if !(options.slots..=MAX_SLOTS as u8).contains(&options.max_slots) {
        let got = options.max_slots.to_string();
        return Err(bad("max_slots", "between slots and 64", got));
    }
    if options.history > MAX_SLOTS as u8 - 2 {
        let got = options.history.to_string();
        return Err(bad("history", "at most 62", got));
    }
    Ok(())
}

fn bad(option: &'static str, expected: &'static str, got: String) -> Error {
    Error::BadOption {
        option,
        expected,
        got,
    }
}
