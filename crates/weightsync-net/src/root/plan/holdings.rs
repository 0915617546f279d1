//! The versions that each agent reports to hold.

use std::collections::BTreeSet;

use crate::agent::Item;
use crate::wire::message::MAX_SLOTS;

/// The versions that one agent reports to hold.
#[derive(Debug)]
pub(crate) struct Holdings {
    models: usize,
    versions: BTreeSet<Item>,
}

impl Holdings {
    /// An agent that holds nothing of this many models.
    pub(crate) fn new(models: usize) -> Self {
        Self {
            models,
            versions: BTreeSet::new(),
        }
    }

    /// Notes versions that the agent gained and dropped. False if the report is impossible: the
    /// model does not exist, or the versions exceed all of the agent's slots.
    pub(crate) fn change(&mut self, have: Vec<Item>, dropped: Vec<Item>) -> bool {
        self.versions.extend(have);
        for item in dropped {
            self.versions.remove(&item);
        }
        // Items sort by model first, so the last one has the highest model.
        let known = |item: &Item| item.model < self.models;
        self.versions.len() <= self.models * usize::from(MAX_SLOTS)
            && self.versions.last().is_none_or(known)
    }

    pub(crate) fn has(&self, item: &Item) -> bool {
        self.versions.contains(item)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Item> {
        self.versions.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use weightsync_core::Version;

    use super::*;

    fn held(model: usize, versions: std::ops::RangeInclusive<u64>) -> Vec<Item> {
        let versions = versions.map(Version);
        versions.map(|version| Item { model, version }).collect()
    }

    #[test]
    fn an_agent_has_no_more_than_its_slots_take() {
        let most = u64::from(MAX_SLOTS);
        let mut holdings = Holdings::new(2);
        assert!(holdings.change(held(0, 1..=most), Vec::new()));
        assert!(holdings.change(held(1, 1..=most), Vec::new()));
        // Versions that were already reported do not count twice.
        assert!(holdings.change(held(1, 1..=most), Vec::new()));
        assert!(holdings.change(held(0, 100..=100), held(0, 1..=1)));
        assert_eq!(holdings.iter().count() as u64, 2 * most);
        assert!(!holdings.change(held(0, 101..=101), Vec::new()));
    }

    #[test]
    fn an_agent_has_no_version_of_a_model_that_is_none() {
        let mut holdings = Holdings::new(2);
        assert!(holdings.change(held(1, 1..=1), Vec::new()));
        assert!(!holdings.change(held(2, 1..=1), Vec::new()));
    }
}
