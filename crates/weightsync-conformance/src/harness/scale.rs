//! How long anything may take, how much is tried, and by which random choices.

use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use super::patience::{patience, slowness};

/// Longer than anything takes: what says nothing for so long hangs.
pub fn longest() -> Duration {
    patience(10)
}

/// What is a moment for the machine: far below [`longest`], which is what a wait that nothing ended
/// would take.
pub fn prompt_limit() -> Duration {
    patience(2)
}

/// For a wait that is to end by its deadline.
pub const BRIEF: Duration = Duration::from_millis(150);

/// The part of the full counts that is tried every day.
const DAILY: f64 = 0.01;

/// Whether the schemes of this program are slow; see
/// [`Subjects::slow`](crate::Subjects::slow). The same in all its processes.
static SLOW: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_slow(slow: bool) {
    SLOW.store(slow, Ordering::Relaxed);
}

/// A deadline within which a send reaches workers that are not held up.
pub(crate) fn short() -> Duration {
    let factor = if SLOW.load(Ordering::Relaxed) {
        8.0
    } else {
        1.0
    };
    // A store of objects forgets a worker that has said nothing for ten seconds.
    Duration::from_millis(300)
        .mul_f64(factor * slowness())
        .min(Duration::from_secs(5))
}

/// `full` rounds scaled by `WEIGHTSYNC_SOAK`, but at least `least`.
pub fn rounds(full: u64, least: u64) -> u64 {
    /// What a slow scheme does of them, and at least.
    const SLOWER: (u64, u64) = (200, 6);
    let count = rounds_of(full, DAILY, least);
    match SLOW.load(Ordering::Relaxed) {
        true => (count / SLOWER.0).max(SLOWER.1).min(count),
        false => count,
    }
}

/// The same, where another part of the full count than the suite's is tried every
/// day.
///
/// # Panics
///
/// If `WEIGHTSYNC_SOAK` is neither a factor nor `full`.
pub fn rounds_of(full: u64, daily: f64, least: u64) -> u64 {
    let share = match env::var("WEIGHTSYNC_SOAK") {
        Err(_) => daily,
        Ok(text) if text.is_empty() => daily,
        Ok(text) if text == "full" => 1.0,
        Ok(text) => {
            let factor: f64 = text.parse().expect("WEIGHTSYNC_SOAK: a factor or `full`");
            daily * factor
        }
    };
    ((full as f64 * share) as u64).max(least)
}

/// The seed of this run's random choices: of an earlier run, if
/// `WEIGHTSYNC_SOAK_SEED` says so. Each test that uses it prints it.
pub fn seed() -> u64 {
    match env::var("WEIGHTSYNC_SOAK_SEED") {
        Ok(text) => text.parse().expect("WEIGHTSYNC_SOAK_SEED: a number"),
        Err(_) => {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            since.map_or(1, |since| since.as_nanos() as u64)
        }
    }
}

/// SplitMix64: plenty for choosing victims, moments and bytes.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Those of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.roll().to_le_bytes());
        words.take(len).collect()
    }
    /// One of these; there is at least one.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}
