//! What each worker should run, connected or not.

use std::collections::{BTreeMap, VecDeque};

use weightsync::transport::Targets;
use weightsync::{Version, WorkerId};

use super::Numbered;

/// A version of each of some models, that are live together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Set<V> {
    /// By the model's place in the sender's set.
    places: BTreeMap<usize, V>,
}

impl<V: Clone + Numbered> Set<V> {
    pub(crate) fn empty() -> Self {
        Self {
            places: BTreeMap::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(crate) fn put(&mut self, model: usize, version: V) {
        self.places.insert(model, version);
    }

    pub(crate) fn of(&self, model: usize) -> Option<&V> {
        self.places.get(&model)
    }

    /// The number of a model's version; [`Version::NONE`] without one.
    pub(crate) fn version(&self, model: usize) -> Version {
        self.of(model).map_or(Version::NONE, Numbered::number)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &V)> {
        self.places.iter().map(|(model, version)| (*model, version))
    }

    /// The part of it that is of these models.
    pub(crate) fn only(&self, models: &[usize]) -> Self {
        let some = self
            .iter()
            .filter(|(model, _)| models.contains(model))
            .map(|(model, version)| (model, version.clone()));
        Self {
            places: some.collect(),
        }
    }

    /// This, with the versions of another in the places of its own.
    pub(crate) fn with(&self, other: &Self) -> Self {
        let mut all = self.clone();
        all.lay(other);
        all
    }

    /// Whether both have the same versions.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let numbers = |set: &Self| -> Vec<_> {
            let each = set.iter();
            each.map(|(model, version)| (model, version.number()))
                .collect()
        };
        numbers(self) == numbers(other)
    }

    fn lay(&mut self, other: &Self) {
        for (model, version) in other.iter() {
            self.put(model, version.clone());
        }
    }

    fn remove(&mut self, other: &Self) {
        self.places
            .retain(|model, _| !other.places.contains_key(model));
    }
}

/// What was sent to whom, as far as it still counts.
#[derive(Clone, Debug)]
pub(super) struct Desired<V> {
    /// What a worker runs for which nothing else is meant.
    default: Set<V>,
    /// Earlier defaults, newest first.
    history: VecDeque<Set<V>>,
    history_limit: usize,
    /// What only this worker is to run, for some of the models.
    overrides: BTreeMap<WorkerId, Set<V>>,
    /// The workers that are held, and what they are held at.
    held: BTreeMap<WorkerId, Set<V>>,
}

impl<V: Clone + Numbered> Desired<V> {
    pub(super) fn new(history_limit: usize) -> Self {
        Self {
            default: Set::empty(),
            history: VecDeque::new(),
            history_limit,
            overrides: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    /// What was sent to all last.
    pub(super) fn default_set(&self) -> &Set<V> {
        &self.default
    }

    pub(super) fn is_held(&self, worker: WorkerId) -> bool {
        self.held.contains_key(&worker)
    }

    /// What the worker is to run now.
    pub(super) fn for_worker(&self, worker: WorkerId) -> Set<V> {
        match self.held.get(&worker) {
            Some(set) => set.clone(),
            None => self.if_released(worker),
        }
    }

    /// What the worker is to run once it is not held.
    pub(super) fn if_released(&self, worker: WorkerId) -> Set<V> {
        match self.overrides.get(&worker) {
            Some(own) => self.default.with(own),
            None => self.default.clone(),
        }
    }

    /// The sets that a worker may ask for, newest first. A held worker has one.
    pub(super) fn askable(&self, worker: WorkerId) -> impl Iterator<Item = Set<V>> {
        let earlier = match self.is_held(worker) {
            true => 0,
            false => self.history.len(),
        };
        let now = std::iter::once(self.for_worker(worker));
        now.chain(self.history.iter().take(earlier).cloned())
    }

    /// Notes a publication. What goes to all replaces what was meant for single
    /// workers.
    pub(super) fn publish(&mut self, update: &Set<V>, targets: &Targets) {
        match targets {
            Targets::All => {
                if self.history_limit > 0 && !self.default.is_empty() {
                    self.history.push_front(self.default.clone());
                }
                self.default.lay(update);
                self.forget();
                self.overrides.retain(|_, own| {
                    own.remove(update);
                    !own.is_empty()
                });
            }
            Targets::Workers(workers) => {
                for worker in workers {
                    let own = self.overrides.entry(*worker).or_insert_with(Set::empty);
                    own.lay(update);
                }
            }
        }
    }

    /// Holds a worker at what it should run now.
    pub(super) fn hold(&mut self, worker: WorkerId) {
        let set = self.for_worker(worker);
        self.held.entry(worker).or_insert(set);
    }

    /// Holds it no more, and says what it was held at.
    pub(super) fn release(&mut self, worker: WorkerId) -> Option<Set<V>> {
        self.held.remove(&worker)
    }

    /// Exactly this version, if it is kept.
    pub(super) fn find(&self, model: usize, version: Version) -> Option<&V> {
        let mut kept = self.sets().filter_map(|set| set.of(model));
        kept.find(|one| one.number() == version)
    }

    /// All that is meant for somebody, or kept.
    pub(super) fn sets(&self) -> impl Iterator<Item = &Set<V>> {
        std::iter::once(&self.default)
            .chain(&self.history)
            .chain(self.overrides.values())
            .chain(self.held.values())
    }

    /// Keeps the earlier sets by which some model has one of its newest older
    /// versions: a model that is sent often takes none from one that is not.
    fn forget(&mut self) {
        let default = self.default.iter();
        let mut newest: BTreeMap<usize, (Version, usize)> = default
            .map(|(model, version)| (model, (version.number(), 0)))
            .collect();
        let limit = self.history_limit;
        self.history.retain(|set| {
            let mut has_one = false;
            for (model, version) in set.iter() {
                let (last, kept) = newest.entry(model).or_insert((Version::NONE, 0));
                if version.number() != *last {
                    *last = version.number();
                    *kept += 1;
                    has_one |= *kept <= limit;
                }
            }
            has_one
        });
    }
}
