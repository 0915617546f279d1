//! Limits strangers: how many may connect at once, and how many of those that fail get an
//! answer.
//!
//! Many processes may share an address. So a fault of one of them does not keep the others out.
//!
//! The input and the output are plain values; the caller brings the time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How many connections may be authenticating at once.
const STRANGERS: usize = 256;

/// How many of them may come from one address.
const OF_ONE: usize = 64;

/// How many failures of one address are answered in a [`WINDOW`].
const ANSWERS: u32 = 20;

/// How long answers count.
const WINDOW: Duration = Duration::from_secs(10);

/// How many addresses have a count of their own; all others share one.
const ADDRESSES: usize = 1024;

/// The connections that have not authenticated, oldest first.
#[derive(Debug)]
pub(crate) struct Strangers<T> {
    all: VecDeque<(IpAddr, T)>,
}

impl<T> Strangers<T> {
    pub(crate) fn new() -> Self {
        Self {
            all: VecDeque::new(),
        }
    }

    /// Forgets connections for which this does not hold.
    pub(crate) fn retain(&mut self, of: impl Fn(&T) -> bool) {
        self.all.retain(|(_, one)| of(one));
    }

    /// Adds a connection. If there are too many, returns the one to drop: the oldest of the same
    /// address, or else the oldest of the address that has the most. An honest client authenticates
    /// quickly, so it is not the oldest for long.
    pub(crate) fn come(&mut self, from: IpAddr, stranger: T) -> Option<T> {
        let gone = self.full(from).and_then(|address| {
            let oldest = self.all.iter().position(|(of, _)| *of == address)?;
            self.all.remove(oldest)
        });
        self.all.push_back((from, stranger));
        gone.map(|(_, one)| one)
    }

    /// The address that must give up a connection before another from here is admitted, if any.
    fn full(&self, from: IpAddr) -> Option<IpAddr> {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for (of, _) in &self.all {
            *counts.entry(*of).or_default() += 1;
        }
        if counts.get(&from).is_some_and(|count| *count >= OF_ONE) {
            return Some(from);
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        let most = most.filter(|_| self.all.len() >= STRANGERS);
        most.map(|(address, _)| address)
    }
}

/// How many failures were answered lately, by address.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    given: HashMap<IpAddr, Given>,
    /// The shared count of all addresses without one of their own.
    others: Option<Given>,
}

#[derive(Debug, Clone, Copy)]
struct Given {
    since: Instant,
    count: u32,
}

impl Answers {
    /// Whether a failure from this address gets an answer. Otherwise the connection is closed
    /// without one.
    pub(crate) fn gives(&mut self, from: IpAddr, now: Instant) -> bool {
        self.given
            .retain(|_, given| now.duration_since(given.since) < WINDOW);
        let fresh = Given {
            since: now,
            count: 0,
        };
        let known = self.given.len() < ADDRESSES || self.given.contains_key(&from);
        let given = match known {
            true => self.given.entry(from).or_insert(fresh),
            false => self.others.get_or_insert(fresh),
        };
        if now.duration_since(given.since) >= WINDOW {
            *given = fresh;
        }
        let gives = given.count < ANSWERS;
        given.count += u32::from(gives);
        gives
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u16) -> IpAddr {
        let [high, low] = last.to_be_bytes();
        IpAddr::from([10, 0, high, low])
    }

    #[test]
    fn strangers_of_one_address_evict_each_other() {
        let mut strangers = Strangers::new();
        assert_eq!(strangers.come(address(2), 1000), None);
        for number in 0..3 * OF_ONE {
            let gone = strangers.come(address(1), number);
            assert_eq!(gone, number.checked_sub(OF_ONE));
        }
        strangers.retain(|one| *one == 1000);
        assert_eq!(strangers.come(address(1), 0), None);
        assert_eq!(strangers.all.len(), 2);
    }

    #[test]
    fn strangers_are_evicted_from_the_busiest_address() {
        let mut strangers = Strangers::new();
        for number in 0..10 {
            assert_eq!(strangers.come(address(1), number), None);
        }
        for number in 10..STRANGERS {
            assert_eq!(strangers.come(address(number as u16), number), None);
        }
        for number in 0..9 {
            assert_eq!(
                strangers.come(address(2000 + number as u16), 2000),
                Some(number)
            );
        }
        assert_eq!(strangers.all.len(), STRANGERS);
    }

    #[test]
    fn gate_stops_answers_only_to_frequent_failures() {
        let (mut answers, start) = (Answers::default(), Instant::now());
        for _ in 0..ANSWERS {
            assert!(answers.gives(address(1), start));
        }
        assert!(!answers.gives(address(1), start));
        assert!(answers.gives(address(2), start));
        assert!(answers.gives(address(1), start + WINDOW));
    }

    #[test]
    fn gate_bounds_the_addresses_it_remembers() {
        let (mut answers, start) = (Answers::default(), Instant::now());
        for last in 0..10_000 {
            let _ = answers.gives(address(last), start);
        }
        assert_eq!(answers.given.len(), ADDRESSES);
        assert!(!answers.gives(address(20_000), start));
        assert!(answers.gives(address(3), start));
        assert!(answers.gives(address(20_000), start + WINDOW));
    }
}
