//! Virtual time, and random choices.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// Microseconds since a schedule began.
pub(super) type Time = u64;

pub(super) const MS: Time = 1000;
pub(super) const SECOND: Time = 1000 * MS;

/// Future events in the order of their times; for equal times in the order in which they were
/// added.
#[derive(Debug)]
pub(super) struct Clock<E> {
    /// The real time at its beginning: some decisions take an `Instant`.
    began: Instant,
    now: Time,
    added: u64,
    due: BinaryHeap<Reverse<Due<E>>>,
}

#[derive(Debug)]
struct Due<E> {
    at: (Time, u64),
    event: E,
}

impl<E> Clock<E> {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            now: 0,
            added: 0,
            due: BinaryHeap::new(),
        }
    }

    pub(super) fn now(&self) -> Time {
        self.now
    }

    pub(super) fn instant(&self) -> Instant {
        self.began + Duration::from_micros(self.now)
    }

    /// Schedules an event.
    pub(super) fn after(&mut self, pause: Time, event: E) {
        self.added += 1;
        let at = (self.now + pause, self.added);
        self.due.push(Reverse(Due { at, event }));
    }

    /// The next event; moves the clock to its time.
    pub(super) fn next(&mut self) -> Option<E> {
        let Reverse(due) = self.due.pop()?;
        self.now = due.at.0;
        Some(due.event)
    }
}

impl<E> PartialEq for Due<E> {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl<E> Eq for Due<E> {}

impl<E> PartialOrd for Due<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Due<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

/// SplitMix64: good enough to choose victims and moments.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }

    /// True this many times in a hundred.
    pub(super) fn percent(&mut self, times: u64) -> bool {
        self.below(100) < times
    }

    /// From `least` to `most`; every order of magnitude is equally likely.
    pub(super) fn span(&mut self, least: Time, most: Time) -> Time {
        let share = self.below(1 << 20) as f64 / (1 << 20) as f64;
        let (least, most) = (least as f64, most as f64);
        (least * (most / least).powf(share)) as Time
    }
}
