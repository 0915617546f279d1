//! How long anything may take, how much is tried, and by which random choices: the
//! suite's, but for what is of hosts.

use std::time::Duration;

use weightsync_conformance::scale::rounds_of;
pub(crate) use weightsync_conformance::scale::{Dice, longest, seed, slowness};

/// Within this `send` names who is gone: a second, and what a busy machine adds.
pub(crate) fn second() -> Duration {
    Duration::from_millis(1500).mul_f64(slowness())
}

/// The part of the full count that is tried every day.
const DAILY: f64 = 0.1;

/// The first seed of what is tried every day: the same each time, so that a change
/// fails for what it changed.
const EVERY_DAY: u64 = 0x5eed;

/// The first seed of random schedules: the same every day, another when
/// `WEIGHTSYNC_SOAK` is set, or of an earlier run, if `WEIGHTSYNC_SOAK_SEED` says so.
pub(crate) fn schedule_seed() -> u64 {
    let is_set = |name| std::env::var(name).is_ok_and(|text| !text.is_empty());
    match is_set("WEIGHTSYNC_SOAK") || is_set("WEIGHTSYNC_SOAK_SEED") {
        true => seed(),
        false => EVERY_DAY,
    }
}

/// `full` rounds, scaled by `WEIGHTSYNC_SOAK`, but at least `least`.
pub(crate) fn rounds(full: u64, least: u64) -> u64 {
    rounds_of(full, DAILY, least)
}
