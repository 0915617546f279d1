//! The pauses between attempts.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// The pauses between attempts that fail: each is about twice as long as the one before, and a random
/// part of each differs between processes. So ends that fail at one moment, because what they all
/// need has gone, do not all come back at one moment.
pub struct Backoff {
    builder: ExponentialBuilder,
    pauses: ExponentialBackoff,
    longest: Duration,
}

impl Backoff {
    /// The first pause is between a half of `first` and all of it; none is longer than `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        // The library's own seeds are the same in children that were forked from one process.
        let seed = RandomState::new().hash_one((std::process::id(), Instant::now()));
        Self::seeded(first, longest, seed)
    }

    /// As [`new`](Self::new), with the same pauses each time: for simulations.
    pub fn seeded(first: Duration, longest: Duration, seed: u64) -> Self {
        // The library adds up to as much again to each pause: a half is what is always waited.
        let builder = ExponentialBuilder::new()
            .with_min_delay(first / 2)
            .with_max_delay(longest / 2)
            .without_max_times()
            .with_jitter()
            .with_jitter_seed(seed);
        Self {
            builder,
            pauses: builder.build(),
            longest,
        }
    }

    /// How long to wait now: an attempt has failed.
    pub fn pause(&mut self) -> Duration {
        // There is no last one.
        self.pauses.next().unwrap_or(self.longest).min(self.longest)
    }

    /// An attempt has succeeded: the next pause is a first one.
    pub fn reset(&mut self) {
        self.pauses = self.builder.build();
    }
}

impl fmt::Debug for Backoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backoff")
            .field("longest", &self.longest)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_millis(320);

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new(FIRST, LONGEST);
        for doubled in [20, 40, 80, 160, 320, 320, 320] {
            let most = Duration::from_millis(doubled);
            let pause = backoff.pause();
            assert!((most / 2..=most).contains(&pause), "{pause:?} of {most:?}");
        }
        backoff.reset();
        assert!(backoff.pause() <= FIRST);
    }

    #[test]
    fn pauses_differ_between_ends_and_not_between_simulations() {
        let of = |mut backoff: Backoff| -> Vec<_> { (0..8).map(|_| backoff.pause()).collect() };
        let own = || of(Backoff::new(FIRST, LONGEST));
        assert_ne!(own(), own());
        let simulated = || of(Backoff::seeded(FIRST, LONGEST, 7));
        assert_eq!(simulated(), simulated());
    }
}
