//! Counting changes and their steps, in memory that does not grow with them.

use super::ulps::UlpStep;

/// The changes of a tensor, or of all.
///
/// Steps are counted in classes: below [`EXACT`] each alone, above in [`EXACT`] / 2 classes to a
/// power of two, so that what is said of one is at most one part in 1,024 too small.
#[derive(Default)]
pub struct Tally {
    counts: Vec<u64>,
    powers: Vec<u64>,
    summary: Summary,
}

/// What is said of the changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    pub changed: u64,
    /// The smallest step than which at least half of all are not larger; `None` without any.
    pub median_ulps: Option<u64>,
    pub largest_ulps: Option<u64>,
    pub to_nan: u64,
    pub from_nan: u64,
    pub between_nans: u64,
}

/// So many changes have a step from `from` to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Power {
    pub from: u64,
    pub to: u64,
    pub count: u64,
}

const EXACT: u64 = 2048;

impl Tally {
    #[inline]
    pub fn add(&mut self, step: UlpStep) {
        let summary = &mut self.summary;
        summary.changed += 1;
        // Each change counts once: as a step, or as one of the kinds that have none.
        match step {
            UlpStep::By(step) => {
                summary.largest_ulps = summary.largest_ulps.max(Some(step));
                add_at(&mut self.counts, class(step), 1);
                add_at(&mut self.powers, power(step), 1);
            }
            UlpStep::ToNan => summary.to_nan += 1,
            UlpStep::FromNan => summary.from_nan += 1,
            UlpStep::BetweenNans => summary.between_nans += 1,
            UlpStep::Unknown => {}
        }
    }

    /// Adds everything of another one.
    pub fn merge(&mut self, other: &Self) {
        let (own, more) = (&mut self.summary, &other.summary);
        own.changed += more.changed;
        own.largest_ulps = own.largest_ulps.max(more.largest_ulps);
        own.to_nan += more.to_nan;
        own.from_nan += more.from_nan;
        own.between_nans += more.between_nans;
        for (own, more) in [
            (&mut self.counts, &other.counts),
            (&mut self.powers, &other.powers),
        ] {
            for (at, &count) in more.iter().enumerate().filter(|(_, count)| **count > 0) {
                add_at(own, at, count);
            }
        }
    }

    /// Starts again from zero, in the same memory.
    pub fn clear(&mut self) {
        self.counts.clear();
        self.powers.clear();
        self.summary = Summary::default();
    }

    pub fn summary(&self) -> Summary {
        // Half of all, rounded up: the smallest step at which this many are reached is the median.
        let half = self.counts.iter().sum::<u64>().div_ceil(2);
        let mut below = 0;
        let at = self.counts.iter().position(|count| {
            below += count;
            half > 0 && below >= half
        });
        Summary {
            median_ulps: at.map(smallest),
            ..self.summary
        }
    }

    /// The steps by powers of two: 1, 2, 3 to 4, 5 to 8 and so on up to the largest.
    pub fn powers(&self) -> Vec<Power> {
        let bounds = |at: usize| match at {
            0 => (0, 1),
            at => (
                1 << (at - 1),
                // The last class reaches to the end of the numbers.
                1_u64.checked_shl(at as u32).unwrap_or(u64::MAX),
            ),
        };
        let all = self.powers.iter().enumerate();
        all.map(|(at, &count)| {
            let (below, to) = bounds(at);
            let from = below + 1;
            Power { from, to, count }
        })
        .collect()
    }
}

impl Summary {
    /// Changes in which a NaN takes part.
    pub fn nans(&self) -> u64 {
        self.to_nan + self.from_nan + self.between_nans
    }
}

fn add_at(counts: &mut Vec<u64>, at: usize, count: u64) {
    if counts.len() <= at {
        counts.resize(at + 1, 0);
    }
    counts[at] += count;
}

/// The class of a step.
fn class(step: u64) -> usize {
    // How many of the lowest bits do not count.
    let dropped = (step / EXACT).checked_ilog2().map_or(0, |log| log + 1);
    ((step >> dropped) + u64::from(dropped) * (EXACT / 2)) as usize
}

/// The smallest step of a class.
fn smallest(class: usize) -> u64 {
    let class = class as u64;
    // The inverse of `class`.
    let dropped = (class / (EXACT / 2)).saturating_sub(1);
    (class - dropped * (EXACT / 2)) << dropped
}

/// The power of two that is not below a step.
fn power(step: u64) -> usize {
    (u64::BITS - step.saturating_sub(1).leading_zeros()) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(steps: &[u64]) -> Tally {
        let mut tally = Tally::default();
        steps.iter().for_each(|&step| tally.add(UlpStep::By(step)));
        tally
    }

    #[test]
    fn classes_are_in_order_and_narrow() {
        let mut steps: Vec<u64> = (0..20_000).collect();
        for power in 12..64 {
            let power = 1_u64 << power;
            steps.extend([power - 1, power, power + 1, power + power / 3]);
        }
        steps.push(u64::MAX);
        steps.sort_unstable();
        let mut before = 0;
        for step in steps {
            let (class, least) = (class(step), smallest(class(step)));
            assert!(class >= before, "{step}");
            assert!(least <= step && step - least <= step / 1024, "{step}");
            assert!(step >= EXACT || least == step, "{step}");
            before = class;
        }
    }

    #[test]
    fn medians_are_of_the_steps() {
        for (steps, median, largest) in [
            (&[][..], None, None),
            (&[7], Some(7), Some(7)),
            (&[9, 1], Some(1), Some(9)),
            (&[1, 1, 1, 2, 500], Some(1), Some(500)),
            (&[3, 2, 1 << 40], Some(3), Some(1 << 40)),
            (&[u64::MAX], Some(0xffe0 << 48), Some(u64::MAX)),
        ] {
            let got = tally(steps).summary();
            assert_eq!((got.median_ulps, got.largest_ulps), (median, largest));
            let mut sum = tally(&steps[..steps.len() / 2]);
            sum.merge(&tally(&steps[steps.len() / 2..]));
            assert_eq!(sum.summary(), got, "{steps:?}, in two");
            assert_eq!(sum.powers(), tally(steps).powers());
            sum.clear();
            assert_eq!(sum.summary(), Summary::default());
        }
    }

    #[test]
    fn powers_hold_every_step_once() {
        let powers = tally(&[1, 1, 2, 3, 4, 5, 8, 9, u64::MAX]).powers();
        let seen: Vec<_> = powers.iter().filter(|power| power.count > 0).collect();
        let got: Vec<_> = seen.iter().map(|at| (at.from, at.to, at.count)).collect();
        let largest = ((1 << 63) + 1, u64::MAX, 1);
        let few = [(1, 1, 2), (2, 2, 1), (3, 4, 2), (5, 8, 2), (9, 16, 1)];
        assert_eq!(got, [&few[..], &[largest]].concat());
    }

    #[test]
    fn nans_are_counted_apart() {
        let mut tally = Tally::default();
        for step in [
            UlpStep::ToNan,
            UlpStep::ToNan,
            UlpStep::FromNan,
            UlpStep::BetweenNans,
            UlpStep::Unknown,
        ] {
            tally.add(step);
        }
        let got = tally.summary();
        assert_eq!((got.changed, got.nans(), got.to_nan), (5, 4, 2));
        assert_eq!((got.median_ulps, got.largest_ulps), (None, None));
    }
}
