//! The set that each worker should run, whether the worker is connected or not.

use std::collections::{BTreeMap, VecDeque};

use weightsync_core::{Version, WorkerId};

use super::{Crowded, Targets};
use crate::protocol::{MAX_MODELS, MAX_SLOTS, SlotSet};
use crate::set::ModelSet;

/// What was sent to whom, as far as it still counts.
#[derive(Clone, Debug)]
pub(super) struct Desired {
    /// What a worker runs for which nothing else is meant.
    default: ModelSet,
    /// Earlier defaults, newest first.
    history: VecDeque<ModelSet>,
    history_limit: usize,
    /// What only this worker is to run, for some of the models.
    overrides: BTreeMap<WorkerId, ModelSet>,
    /// The workers that are held, and what they are held at.
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

    /// What only this worker is to run, if there is anything.
    pub(super) fn own(&self, worker: WorkerId) -> Option<&ModelSet> {
        self.overrides.get(&worker)
    }

    /// What a held worker is held at.
    pub(super) fn held(&self, worker: WorkerId) -> Option<&ModelSet> {
        self.held.get(&worker)
    }

    /// What the worker is to run now.
    pub(super) fn for_worker(&self, worker: WorkerId) -> ModelSet {
        match self.held(worker) {
            Some(set) => *set,
            None => self.if_released(worker),
        }
    }

    /// What the worker is to run once it is not held.
    pub(super) fn if_released(&self, worker: WorkerId) -> ModelSet {
        match self.own(worker) {
            Some(own) => self.default.with(own),
            None => self.default,
        }
    }

    /// The sets that a worker may ask for, newest first. A held worker has one.
    pub(super) fn askable(&self, worker: WorkerId) -> impl Iterator<Item = ModelSet> {
        let earlier = match self.held(worker) {
            Some(_) => 0,
            None => self.history.len(),
        };
        let now = std::iter::once(self.for_worker(worker));
        now.chain(self.history.iter().take(earlier).copied())
    }

    /// Notes a publication. What goes to all replaces what was meant for single
    /// workers.
    ///
    /// It is refused, and nothing has changed, if for one of its models every
    /// slot there can be would then be meant for somebody. Earlier sets are
    /// forgotten before it comes to that. `may_crowd`: one of its models has all
    /// the slots it can have, so that it could come to that at all.
    pub(super) fn publish(
        &mut self,
        update: &ModelSet,
        targets: &Targets,
        may_crowd: bool,
    ) -> Result<(), Crowded> {
        if !may_crowd {
            self.apply(update, targets);
            return Ok(());
        }
        let mut next = self.clone();
        next.apply(update, targets);
        let crowded = |next: &Self| {
            let mut models = update.models().iter();
            models.find(|&model| next.slots(model).len() >= MAX_SLOTS)
        };
        while let Some(model) = crowded(&next) {
            if next.history.pop_back().is_none() {
                return Err(Crowded { model });
            }
        }
        *self = next;
        Ok(())
    }

    /// Holds a worker at what it should run now.
    pub(super) fn hold(&mut self, worker: WorkerId) {
        let set = self.for_worker(worker);
        self.held.entry(worker).or_insert(set);
    }

    /// Holds it no more, and says what it was held at.
    pub(super) fn release(&mut self, worker: WorkerId) -> Option<ModelSet> {
        self.held.remove(&worker)
    }

    /// Every slot of a model that is meant for somebody, or kept.
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
                if self.history_limit > 0 && !self.default.is_empty() {
                    self.history.push_front(self.default);
                }
                self.default.lay(update);
                self.forget();
                self.overrides.retain(|_, own| {
                    own.remove(update.models());
                    !own.is_empty()
                });
            }
            Targets::Workers(workers) => {
                for worker in workers {
                    let own = self.overrides.entry(*worker).or_insert(ModelSet::EMPTY);
                    own.lay(update);
                }
            }
        }
    }

    /// Keeps the earlier sets by which some model has one of its newest older
    /// versions: a model that is sent often takes none from one that is not.
    fn forget(&mut self) {
        let mut newest = [(Version::NONE, 0); MAX_MODELS];
        for (model, entry) in self.default.iter() {
            newest[model] = (entry.version, 0);
        }
        let limit = self.history_limit;
        self.history.retain(|set| {
            let mut has_one = false;
            for (model, entry) in set.iter() {
                let (last, kept) = &mut newest[model];
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
