//! Sampling by priorities.

use std::ops::Range;

use rand::RngExt;

use super::{Drawn, Prioritised};
use crate::{Error, env::EnvRng, replay::ring::stretches};

/// The priorities of the frames in the ring.
pub(in crate::replay) struct Priorities {
    settings: Prioritised,
    /// The largest priority seen, and what it weighs in the tree.
    largest: f32,
    largest_share: f64,
    /// `(priority + eps) ^ alpha` of each row, 0 where no frame is.
    tree: SumTree,
    capacity: usize,
}

impl Priorities {
    pub fn new(settings: &Prioritised, capacity: usize) -> Result<Self, Error> {
        let values = [
            ("alpha", settings.alpha),
            ("beta", settings.beta),
            ("eps", settings.eps),
        ];
        for (name, value) in values {
            check_setting(name, value)?;
        }
        let mut priorities = Self {
            settings: settings.clone(),
            largest: 1.0,
            largest_share: 0.0,
            tree: SumTree::new(capacity),
            capacity,
        };
        priorities.largest_share = priorities.share(1.0)?;
        Ok(priorities)
    }

    pub fn evict(&mut self, ids: Range<u64>) {
        // A row without a frame weighs nothing, so no draw finds it.
        self.fill(ids, 0.0);
    }

    pub fn append(&mut self, ids: Range<u64>) {
        // Each new frame is likely to be drawn at least once soon: nothing is known of its error
        // yet.
        self.fill(ids, self.largest_share);
    }

    /// Gives frames other priorities; ids that are not in `live` are ignored.
    /// On an error nothing has changed.
    pub fn update(&mut self, live: &Range<u64>, ids: &[u64], values: &[f32]) -> Result<(), Error> {
        if ids.len() != values.len() {
            return Err(Error::PriorityCount {
                ids: ids.len(),
                values: values.len(),
            });
        }
        // All values are checked before the first is set, so an error changes nothing.
        for &value in values {
            self.share(value)?;
        }
        for (&id, &value) in ids.iter().zip(values) {
            if live.contains(&id) {
                let share = self.share(value)?;
                self.tree.set((id % self.capacity as u64) as usize, share);
                // Never lowered: new frames keep the largest priority that was ever seen.
                if value > self.largest {
                    (self.largest, self.largest_share) = (value, share);
                }
            }
        }
        Ok(())
    }

    pub fn set_beta(&mut self, beta: f64) -> Result<(), Error> {
        check_setting("beta", beta)?;
        self.settings.beta = beta;
        Ok(())
    }

    pub fn draw(&self, n: usize, live: &Range<u64>, rng: &mut EnvRng) -> Result<Drawn, Error> {
        let total = self.tree.total();
        if total <= 0.0 {
            return Err(Error::NothingToSample {
                reason: "every frame has priority 0: set `eps` above 0".to_owned(),
            });
        }
        let mut ids = Vec::with_capacity(n);
        let mut shares = Vec::with_capacity(n);
        let capacity = self.capacity as u64;
        for _ in 0..n {
            // A point of the whole mass belongs to a frame with the probability of its share.
            let (row, share) = self.tree.find(rng.random::<f64>() * total);
            // The id of the live frame in this row.
            let ahead = (row as u64 + capacity - live.start % capacity) % capacity;
            ids.push(live.start + ahead);
            shares.push(share);
        }
        // The frame with the least probability has the largest weight. Both are multiples
        // of the same (N / Σ p) ^ -beta, which cancels out.
        let least = self.tree.least();
        let weight = |share: f64| (share / least).powf(-self.settings.beta) as f32;
        Ok(Drawn {
            ids,
            weights: Some(shares.into_iter().map(weight).collect()),
            mask: None,
        })
    }

    /// `(priority + eps) ^ alpha`, if a ring full of it has a finite sum.
    fn share(&self, priority: f32) -> Result<f64, Error> {
        let share = (f64::from(priority) + self.settings.eps).powf(self.settings.alpha);
        // The sum over a full ring must stay finite, because the tree holds it.
        let full = share * self.capacity as f64;
        if priority >= 0.0 && full.is_finite() {
            Ok(share)
        } else {
            Err(Error::Priority { got: priority })
        }
    }

    fn fill(&mut self, ids: Range<u64>, share: f64) {
        for stretch in stretches(ids, self.capacity) {
            self.tree.fill(stretch.in_ring(1), share);
        }
    }
}

fn check_setting(name: &str, value: f64) -> Result<(), Error> {
    if value >= 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(Error::ReplaySettings {
            reason: format!("`{name}` is {value}: expected a number of at least 0"),
        })
    }
}

/// Children of a node: their sums fill a cache line.
const FAN: usize = 8;

/// Sums over each [`FAN`] shares of a list, sums of these, and so on; and the least
/// share above 0 of each node. Each sum is made from its parts, never by adding a
/// difference, so none drifts.
struct SumTree {
    /// The shares first and their total, alone, last. All but that are padded
    /// with zeros to whole nodes.
    sums: Vec<Vec<f64>>,
    /// The same for least shares, infinite where no share is above 0. The first level
    /// is empty: it would be that of the sums.
    least: Vec<Vec<f64>>,
}

impl SumTree {
    fn new(len: usize) -> Self {
        let mut lens = Vec::new();
        let mut nodes = len;
        while lens.is_empty() || nodes > 1 {
            nodes = nodes.div_ceil(FAN);
            lens.push(nodes * FAN);
        }
        lens.push(1);
        let sums = lens.iter().map(|len| vec![0.0; *len]).collect();
        lens[0] = 0;
        let least = lens.iter().map(|len| vec![f64::INFINITY; *len]).collect();
        Self { sums, least }
    }

    fn total(&self) -> f64 {
        self.sums[self.sums.len() - 1][0]
    }

    fn least(&self) -> f64 {
        self.least[self.least.len() - 1][0]
    }

    fn set(&mut self, leaf: usize, share: f64) {
        self.fill(leaf..leaf + 1, share);
    }

    /// Sets a range that is not empty.
    fn fill(&mut self, leaves: Range<usize>, share: f64) {
        let (mut first, mut last) = (leaves.start, leaves.end - 1);
        // The leaves first, and then each level above from the one below.
        self.sums[0][first..=last].fill(share);
        for level in 1..self.sums.len() {
            let (sums_below, sums) = self.sums.split_at_mut(level);
            let (least_below, least) = self.least.split_at_mut(level);
            let (sums_below, least_below) = (&sums_below[level - 1], &least_below[level - 1]);
            // The same range, one level up: only its nodes have changed.
            (first, last) = (first / FAN, last / FAN);
            for node in first..=last {
                let children = node * FAN..(node + 1) * FAN;
                let shares = &sums_below[children.clone()];
                sums[0][node] = shares.iter().sum();
                let smallest = |of: &mut dyn Iterator<Item = f64>| of.fold(f64::INFINITY, f64::min);
                least[0][node] = match least_below.get(children) {
                    Some(least) => smallest(&mut least.iter().copied()),
                    // The level above the leaves has no list of least shares below it. Zeros are
                    // rows without a frame.
                    None => smallest(&mut shares.iter().copied().filter(|share| *share > 0.0)),
                };
            }
        }
    }

    /// The leaf at which the running sum passes `mass`, and its share, which is
    /// above 0 as long as the total is.
    fn find(&self, mut mass: f64) -> (usize, f64) {
        let (mut node, mut found) = (0, 0.0);
        // From the children of the root down to the leaves. The root has only the total.
        for level in self.sums.iter().rev().skip(1) {
            let first = node * FAN;
            // Rounding may leave a mass that no child has: the last one counts.
            for (child, &share) in (first..).zip(&level[first..][..FAN]) {
                if share > 0.0 {
                    (node, found) = (child, share);
                    // The mass falls into this child, and is looked for below it.
                    if mass < share {
                        break;
                    }
                    mass -= share;
                }
            }
        }
        (node, found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*};

    use super::*;

    #[test]
    fn tree_finds_leaves_by_running_sums() {
        for len in [1, 2, 7, 8, 9, 64, 65, 600] {
            let mut tree = SumTree::new(len);
            for leaf in 0..len {
                tree.set(leaf, (leaf % 3) as f64);
            }
            let shares: Vec<f64> = (0..len).map(|leaf| (leaf % 3) as f64).collect();
            assert_eq!(tree.total(), shares.iter().sum::<f64>());
            let mut mass = 0.5;
            let expected = shares
                .iter()
                .enumerate()
                .flat_map(|(leaf, share)| vec![leaf; *share as usize]);
            for leaf in expected {
                assert_eq!(tree.find(mass), (leaf, shares[leaf]), "{len} {mass}");
                mass += 1.0;
            }
        }
    }

    #[test]
    fn tree_finds_a_positive_leaf_at_its_end() {
        let mut tree = SumTree::new(6);
        tree.fill(0..4, 0.1);
        assert_eq!(tree.find(tree.total() * 2.0), (3, 0.1));
        tree.fill(0..6, 0.0);
        assert_eq!(tree.total(), 0.0);
    }

    proptest! {
        #[test]
        fn tree_matches_sums_and_minima_of_a_list(
            len in 1..700_usize,
            fills in collection::vec((any::<u16>(), any::<u16>(), 0..5_u8), 1..30),
        ) {
            let (mut tree, mut list) = (SumTree::new(len), vec![0.0; len]);
            for (first, last, share) in fills {
                let (a, b) = (usize::from(first) % len, usize::from(last) % len);
                let leaves = a.min(b)..a.max(b) + 1;
                // Sums of these are exact.
                tree.fill(leaves.clone(), f64::from(share));
                list[leaves].fill(f64::from(share));
                prop_assert_eq!(tree.total(), list.iter().sum::<f64>());
                let least = list.iter().copied().filter(|share| *share > 0.0);
                prop_assert_eq!(tree.least(), least.fold(f64::INFINITY, f64::min));
            }
        }
    }
}
