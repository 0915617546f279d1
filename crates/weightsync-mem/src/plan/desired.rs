//! The set that each worker should run, whether the worker is connected or not.

use std::collections::{BTreeMap, VecDeque};

use weightsync_core::{Targets, Version, WorkerId};

use super::SlotsExhausted;
use crate::protocol::{MAX_MODELS, MAX_SLOTS, SlotSet};
use crate::set::ModelSet;

/// The sets that were sent and still count.
#[derive(Clone, Debug)]
pub(super) struct Desired {
    /// The set of every worker without an override.
    default: ModelSet,
    /// Earlier defaults, newest first.
    history: VecDeque<ModelSet>,
    history_limit: usize,
    /// For single workers, their own set of some models.
    overrides: BTreeMap<WorkerId, ModelSet>,
    /// The held workers, and the sets that they are held at.
    held: BTreeMap<WorkerId, ModelSet>,
}

impl Desired {
    pub(super) fn new(history_limit: usize) -> Self {
        Self {
            default: ModelSet::EMPTY,
            history: VecDeque::new(),
            history_limit,
            overrides: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    pub(super) fn default_set(&self) -> &ModelSet {
        &self.default
    }

    /// The set that only this worker should run, if there is one.
    pub(super) fn own(&self, worker: WorkerId) -> Option<&ModelSet> {
        self.overrides.get(&worker)
    }

    /// The set that a held worker is held at.
    pub(super) fn held(&self, worker: WorkerId) -> Option<&ModelSet> {
        self.held.get(&worker)
    }

    /// The set that the worker should run now.
    pub(super) fn for_worker(&self, worker: WorkerId) -> ModelSet {
        match self.held(worker) {
            Some(set) => *set,
            None => self.if_released(worker),
        }
    }

    /// The set that the worker should run once it is not held.
    pub(super) fn if_released(&self, worker: WorkerId) -> ModelSet {
        match self.own(worker) {
            Some(own) => self.default.with(own),
            None => self.default,
        }
    }

    /// The sets that a worker may ask for, newest first. A held worker has only one.
    pub(super) fn askable(&self, worker: WorkerId) -> impl Iterator<Item = ModelSet> {
        let earlier = match self.held(worker) {
            Some(_) => 0,
            None => self.history.len(),
        };
        let now = std::iter::once(self.for_worker(worker));
        now.chain(self.history.iter().take(earlier).copied())
    }

    /// Notes a publication. A set for all workers replaces the overrides of single workers.
    ///
    /// The publication is refused, and nothing changes, if some worker would then need every slot
    /// that one of its models can have. Earlier sets are forgotten first. `may_crowd` says that one
    /// of the models already has all its slots; otherwise this cannot happen.
    pub(super) fn publish(
        &mut self,
        update: &ModelSet,
        targets: &Targets,
        may_crowd: bool,
    ) -> Result<(), SlotsExhausted> {
        if !may_crowd {
            self.apply(update, targets);
            return Ok(());
        }
        // Tried on a copy, because a refusal must change nothing.
        let mut next = self.clone();
        next.apply(update, targets);
        let crowded = |next: &Self| {
            let mut models = update.models().iter();
            // With every slot kept for somebody, the next version would have none, for ever.
            models.find(|&model| next.slots(model).len() >= MAX_SLOTS)
        };
        while let Some(model) = crowded(&next) {
            // Only the history gives way, the oldest set first. The sets that workers should run
            // stay.
            if next.history.pop_back().is_none() {
                return Err(SlotsExhausted { model });
            }
        }
        *self = next;
        Ok(())
    }

    /// Holds a worker at the set that it should run now.
    pub(super) fn hold(&mut self, worker: WorkerId) {
        let set = self.for_worker(worker);
        // A worker that is held already stays at the set of its first hold.
        self.held.entry(worker).or_insert(set);
    }

    /// Ends a worker's hold; returns the set that it was held at.
    pub(super) fn release(&mut self, worker: WorkerId) -> Option<ModelSet> {
        self.held.remove(&worker)
    }

    /// The slots of a model that some worker needs or the history keeps.
    pub(super) fn slots(&self, model: usize) -> SlotSet {
        let slots = self.sets().filter_map(|set| set.entry(model));
        slots.fold(SlotSet::default(), |all, entry| all.with(entry.slot))
    }

    /// The slot of exactly this version.
    pub(super) fn find(&self, model: usize, version: Version) -> Option<u8> {
        let mut entries = self.sets().filter_map(|set| set.entry(model));
        let found = entries.find(|entry| entry.version == version);
        found.map(|entry| entry.slot)
    }

    fn apply(&mut self, update: &ModelSet, targets: &Targets) {
        match targets {
            Targets::All => {
                // The set before the first publication is no set that a worker could ask for.
                if self.history_limit > 0 && !self.default.is_empty() {
                    self.history.push_front(self.default);
                }
                // Models that were not sent keep their versions.
                self.default.lay(update);
                self.forget();
                // What single workers were sent of these models ends here: they follow the others
                // again.
                self.overrides.retain(|_, own| {
                    own.remove(update.models());
                    !own.is_empty()
                });
            }
            Targets::Workers(workers) => {
                for worker in workers {
                    // Of models that are not in its own set, the worker goes on following the
                    // default.
                    let own = self.overrides.entry(*worker).or_insert(ModelSet::EMPTY);
                    own.lay(update);
                }
            }
        }
    }

    /// Drops earlier sets, except those with one of the newest older versions of some model. So a
    /// model that is sent often does not push out a model that is not.
    fn forget(&mut self) {
        let mut newest = [(Version::NONE, 0); MAX_MODELS];
        for (model, entry) in self.default.iter() {
            // The current version is no older version, so it counts for nothing below.
            newest[model] = (entry.version, 0);
        }
        let limit = self.history_limit;
        self.history.retain(|set| {
            let mut has_one = false;
            for (model, entry) in set.iter() {
                let (last, kept) = &mut newest[model];
                // Sets that repeat a model's version count once for that model.
                if entry.version != *last {
                    *last = entry.version;
                    *kept += 1;
                    has_one |= *kept <= limit;
                }
            }
            has_one
        });
    }

    fn sets(&self) -> impl Iterator<Item = &ModelSet> {
        std::iter::once(&self.default)
            .chain(&self.history)
            .chain(self.overrides.values())
            .chain(self.held.values())
    }
}
