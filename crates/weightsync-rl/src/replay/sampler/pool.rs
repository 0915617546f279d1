//! Sampling without replacement.

use std::ops::Range;

use rand::RngExt;

use crate::env::EnvRng;

/// The frames that an epoch has left, in no order: a frame is drawn by a random
/// place. That is as good as a shuffled list, and takes in new frames.
pub(super) struct Pool {
    /// Some may have been overwritten since.
    left: Vec<u64>,
    capacity: usize,
}

impl Pool {
    pub fn new(capacity: usize) -> Self {
        Self {
            left: Vec::new(),
            capacity,
        }
    }

    pub fn append(&mut self, ids: Range<u64>) {
        let oldest = ids.end.saturating_sub(self.capacity as u64);
        self.left.extend(ids);
        // Where nobody samples, the list must not grow for ever.
        if self.left.len() > 2 * self.capacity {
            self.left.retain(|id| *id >= oldest);
        }
    }

    pub fn draw(&mut self, n: usize, live: &Range<u64>, rng: &mut EnvRng) -> Vec<u64> {
        let mut ids = Vec::with_capacity(n);
        while ids.len() < n {
            // The epoch is over: all frames that are there now make the next one.
            if self.left.is_empty() {
                self.left.extend(live.clone());
            }
            let place = rng.random_range(0..self.left.len());
            let id = self.left.swap_remove(place);
            // A frame that was overwritten since is skipped. It was not drawn, so the loop goes on.
            if live.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }
}
