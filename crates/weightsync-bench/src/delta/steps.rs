//! Synthetic steps of training: weights of N(0, 0.02), and normal updates scaled to a density.

use half::bf16;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand_distr::{Distribution, StandardNormal};

use super::pages::Pages;

const SPREAD: f32 = 0.02;

/// One version, the next, and the one after it, of weights kept in f32 and published in bf16.
pub struct Steps {
    master: Vec<f32>,
    /// Of standard deviation one, to be scaled.
    update: Vec<f32>,
    pub old: Pages,
    pub new: Pages,
    /// The version after `new`.
    pub newer: Pages,
}

impl Steps {
    pub fn new(elements: usize) -> Self {
        let (mut master, mut update) = (vec![0.0; elements], vec![0.0; elements]);
        std::thread::scope(|scope| {
            scope.spawn(|| fill(&mut master, 1, SPREAD));
            fill(&mut update, 2, 1.0);
        });
        let mut old = Pages::new(2 * elements);
        for (bytes, weight) in old.chunks_exact_mut(2).zip(&master) {
            bytes.copy_from_slice(&bf16::from_f32(*weight).to_le_bytes());
        }
        Self {
            master,
            update,
            old,
            new: Pages::new(2 * elements),
            newer: Pages::new(2 * elements),
        }
    }

    /// Makes the two versions after `old` so that about this share of the elements changes each
    /// time; returns the share.
    pub fn scale(&mut self, share: f64) -> f64 {
        let some = self.master.len().min(1 << 20);
        let (mut low, mut high) = (1e-12_f32, 1.0_f32);
        for _ in 0..40 {
            let middle = (low * high).sqrt();
            let changed =
                (0..some).filter(|&at| self.after(at, middle, 1) != self.after(at, 0.0, 1));
            match changed.count() as f64 / some as f64 > share {
                true => high = middle,
                false => low = middle,
            }
        }
        let elements = self.master.len();
        let (mut new, mut newer) = (
            std::mem::take(&mut self.new),
            std::mem::take(&mut self.newer),
        );
        let half = elements / 2;
        let (this, scale) = (&*self, (low * high).sqrt());
        let write = |first: usize, out: &mut [u8], steps: u32| {
            for (at, bytes) in (first..).zip(out.chunks_exact_mut(2)) {
                bytes.copy_from_slice(&this.after(at, scale, steps).to_le_bytes());
            }
        };
        for (out, steps) in [(&mut new, 1), (&mut newer, 2)] {
            let (left, right) = out.split_at_mut(2 * half);
            std::thread::scope(|scope| {
                scope.spawn(|| write(0, left, steps));
                write(half, right, steps);
            });
        }
        (self.new, self.newer) = (new, newer);
        let pairs = self.old.chunks_exact(2).zip(self.new.chunks_exact(2));
        pairs.filter(|(old, new)| old != new).count() as f64 / elements.max(1) as f64
    }

    /// An element after so many steps, in bf16; those of the second step are the first's, taken from
    /// the other end.
    fn after(&self, at: usize, scale: f32, steps: u32) -> bf16 {
        let mut weight = self.master[at] + scale * self.update[at];
        if steps > 1 {
            weight += scale * self.update[self.update.len() - 1 - at];
        }
        bf16::from_f32(weight)
    }
}

fn fill(values: &mut [f32], seed: u64, spread: f32) {
    let mut random = SmallRng::seed_from_u64(seed);
    for value in values {
        let normal: f32 = StandardNormal.sample(&mut random);
        *value = normal * spread;
    }
}
