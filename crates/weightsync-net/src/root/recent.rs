//! The sets with which a new worker may begin: sets for all workers, of which its agent may
//! hold some when the worker joins.
//!
//! **Guarantee.** The input and the output are plain values. A worker is offered an older set
//! only under three conditions: the set was for every worker; the agent holds each of its
//! versions; and the worker's current set is the one for all workers.

use std::collections::{BTreeMap, VecDeque};

use weightsync_core::Version;

use crate::agent::Item;

/// How many sets are remembered. A relay whose first version takes longer than this many sends
/// offers its workers nothing older; they wait for a newer version.
const REMEMBERED: usize = 4096;

/// The last sets sent to all workers, each with a sequence number below that of any later set.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    sets: VecDeque<(u64, Vec<Item>)>,
}

impl Recent {
    /// Notes a set that was sent to all. No higher sequence number was given out so far.
    pub(crate) fn note(&mut self, sequence: u64, set: Vec<Item>) {
        // A repeated set would only push an older one out.
        if set.is_empty() || self.sets.back().is_some_and(|(_, last)| *last == set) {
            return;
        }
        if self.sets.len() == REMEMBERED {
            self.sets.pop_front();
        }
        self.sets.push_back((sequence, set));
    }

    /// The newest set before `meant` that a worker with the same models may begin with. `meant` has
    /// this sequence number, and `has` must hold for every version of the result.
    pub(crate) fn before(
        &self,
        (sequence, meant): (u64, &[Item]),
        has: impl Fn(&Item) -> bool,
    ) -> Option<(u64, Vec<Item>)> {
        let (_, newest) = self.sets.back()?;
        let models: BTreeMap<usize, Version> = meant
            .iter()
            .map(|item| (item.model, item.version))
            .collect();
        let of_it = |set: &[Item]| {
            let own = set.iter().filter(|item| models.contains_key(&item.model));
            own.copied().collect::<Vec<_>>()
        };
        // The worker is held, or was sent a set of its own. It waits for exactly that set.
        if of_it(newest) != meant {
            return None;
        }
        let mut older = self.sets.iter().rev().filter(|(at, _)| *at < sequence);
        // The whole set is at the agent, has each of the worker's models, and is not the set that
        // the worker gets anyway.
        let found = older.find(|(_, set)| {
            let own = || set.iter().filter(|item| models.contains_key(&item.model));
            own().all(&has) && own().count() == meant.len() && !own().eq(meant)
        });
        found.map(|(at, set)| (*at, of_it(set)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(versions: &[(usize, u64)]) -> Vec<Item> {
        let items = versions.iter().map(|(model, version)| Item {
            model: *model,
            version: Version(*version),
        });
        items.collect()
    }

    #[test]
    fn worker_starts_with_the_newest_set_of_its_agent() {
        let mut recent = Recent::default();
        recent.note(1, set(&[(0, 1)]));
        for version in 2..=6 {
            recent.note(version, set(&[(0, version), (1, version / 2)]));
        }
        let all = [(0, 1), (0, 2), (1, 1), (0, 4), (1, 2), (0, 5)];
        let first_three = [(0, 1), (0, 2), (1, 1)];
        let (newest, own) = (set(&[(0, 6), (1, 3)]), set(&[(0, 6)]));
        // (current set, its sequence number, the agent's versions, the set to begin with)
        let cases = [
            (&newest, 7, set(&all), Some((5, set(&[(0, 5), (1, 2)])))),
            (&newest, 5, set(&all), Some((4, set(&[(0, 4), (1, 2)])))),
            (
                &newest,
                7,
                set(&first_three),
                Some((2, set(&[(0, 2), (1, 1)]))),
            ),
            // Only the models that the worker takes.
            (&own, 7, set(&[(0, 1)]), Some((1, set(&[(0, 1)])))),
            // No set has one of its models.
            (&newest, 7, set(&[(0, 5)]), None),
            (&newest, 7, Vec::new(), None),
        ];
        for (meant, sequence, held, expected) in cases {
            let found = recent.before((sequence, meant), |item| held.contains(item));
            assert_eq!(found, expected, "{held:?}");
        }
        // The worker's set is not the one for all workers.
        let held = set(&[(0, 5), (0, 4)]);
        assert_eq!(recent.before((7, &held), |_| true), None);
    }

    #[test]
    fn recent_sets_are_bounded() {
        let mut recent = Recent::default();
        for version in 1..=REMEMBERED as u64 + 1 {
            recent.note(version, set(&[(0, version)]));
            recent.note(version, set(&[(0, version)]));
        }
        let newest = set(&[(0, REMEMBERED as u64 + 1)]);
        let begins = |version| {
            let held = set(&[(0, version)]);
            recent.before((u64::MAX, &newest), |item| held.contains(item))
        };
        assert!(begins(1).is_none());
        assert!(begins(2).is_some());
    }
}
