//! How much is tried, and by which random choices.

use std::env;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::patience::patience;

/// Longer than anything takes: what says nothing for so long hangs.
pub fn longest() -> Duration {
    patience(10)
}

/// The part of the full counts that is tried every day.
const DAILY: f64 = 0.01;

/// `full` is the number of checks asked for; scaled by `WEIGHTSYNC_SOAK`, but at
/// least `least`.
pub fn checks(full: u64, least: u64) -> u64 {
    let share = match env::var("WEIGHTSYNC_SOAK") {
        Err(_) => DAILY,
        Ok(text) if text == "full" => 1.0,
        Ok(text) => {
            let factor: f64 = text.parse().expect("WEIGHTSYNC_SOAK: a factor or `full`");
            DAILY * factor
        }
    };
    ((full as f64 * share) as u64).max(least)
}

/// The seed of this run's random choices.
pub fn seed() -> u64 {
    match env::var("WEIGHTSYNC_SOAK_SEED") {
        Ok(text) => text.parse().expect("WEIGHTSYNC_SOAK_SEED: a number"),
        Err(_) => {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            since.map_or(1, |since| since.as_nanos() as u64)
        }
    }
}

/// SplitMix64: plenty for choosing victims and moments.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }
}

/// The finaliser of SplitMix64: different numbers stay different.
pub fn mix(mut number: u64) -> u64 {
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
