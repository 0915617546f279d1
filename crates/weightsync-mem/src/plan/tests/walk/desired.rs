//! The second bookkeeping: which versions are meant for whom, and which are needed.

use super::*;

impl World {
    /// The versions of a model that sets and mailboxes need.
    pub(super) fn needed(&self, model: usize) -> BTreeSet<u64> {
        let sets = std::iter::once(&self.default)
            .chain(&self.history)
            .chain(self.overrides.values())
            .chain(self.held.values());
        let mut needed: BTreeSet<_> = sets.filter_map(|set| set.get(&model).copied()).collect();
        for (key, reader) in &self.readers {
            if self.key(key.0.0) == Some(*key) && reader.models.contains(model) {
                let answer = reader.answer.iter().map(|(_, live)| live);
                let notified = reader.live.iter().chain(&reader.queue).chain(answer);
                let notified = notified.filter_map(|live| self.read(*live).get(&model).copied());
                needed.extend(notified);
            }
        }
        needed
    }

    /// The versions of a model that anything refers to.
    pub(super) fn referred(&self, model: usize) -> BTreeSet<u64> {
        let mut all = self.needed(model);
        for reader in self.readers.values() {
            let mine = |set: &Versions| only(set, reader.models).get(&model).copied();
            all.extend(reader.waiting.iter().filter_map(|(_, set)| mine(set)));
            all.extend(reader.pinned.iter().filter_map(|(_, set, _)| mine(set)));
            let snapshots = reader.snapshots.iter();
            all.extend(snapshots.filter(|one| one.0 == model).map(|one| one.2));
        }
        all
    }

    pub(super) fn note(&mut self, update: &Versions, workers: Option<u32>) {
        match workers {
            None => {
                if !self.default.is_empty() {
                    self.history.push_front(self.default.clone());
                }
                self.default.extend(update.clone());
                self.forget();
                for own in self.overrides.values_mut() {
                    own.retain(|model, _| !update.contains_key(model));
                }
            }
            Some(workers) => {
                for worker in chosen(workers) {
                    let own = self.overrides.entry(worker).or_default();
                    own.extend(update.clone());
                }
            }
        }
    }

    /// For each model the newest older versions are kept, in the newest sets that have them.
    fn forget(&mut self) {
        let mut kept = BTreeSet::new();
        for model in 0..MODELS {
            let now = self.default.get(&model);
            let sets = self.history.iter();
            let older = sets.filter_map(|set| set.get(&model));
            let older: BTreeSet<u64> = older.filter(|one| Some(*one) != now).copied().collect();
            for version in older.iter().rev().take(HISTORY.into()) {
                let mut sets = self.history.iter();
                kept.extend(sets.position(|set| set.get(&model) == Some(version)));
            }
        }
        let sets = std::mem::take(&mut self.history).into_iter().enumerate();
        let sets = sets.filter(|(at, _)| kept.contains(at));
        self.history = sets.map(|(_, set)| set).collect();
    }

    pub(super) fn desired(&self, worker: u32) -> Versions {
        if let Some(set) = self.held.get(&worker) {
            return set.clone();
        }
        let mut set = self.default.clone();
        set.extend(self.overrides.get(&worker).cloned().unwrap_or_default());
        set
    }

    /// From now on the mailbox is to show this. A set without any of the reader's
    /// models is nothing to show.
    pub(super) fn expect(&mut self, key: Key, set: &Versions) {
        let reader = self.reader(key);
        let set = only(set, reader.models);
        if !set.is_empty() {
            reader.expected = VecDeque::from([set]);
        }
    }
}
