//! How long anything may take, how much is tried, and by which random choices: the
//! suite's, but for what is of hosts.

use std::time::Duration;

use weightsync_conformance::scale::rounds_of;
pub(crate) use weightsync_conformance::scale::{Dice, PATIENCE, seed};

/// Within this `send` names who is gone: a second, and what a busy machine adds.
pub(crate) const SECOND: Duration = Duration::from_millis(1500);

/// The part of the full count that is tried every day.
const DAILY: f64 = 0.1;

/// `full` rounds, scaled by `WEIGHTSYNC_SOAK`, but at least `least`.
pub(crate) fn rounds(full: u64, least: u64) -> u64 {
    rounds_of(full, DAILY, least)
}
