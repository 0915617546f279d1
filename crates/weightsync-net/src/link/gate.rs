//! Who may knock: how many strangers at once, and how often after a failure.
//!
//! Plain values in, plain values out; the caller brings the time.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Failed handshakes of one address in a [`WINDOW`] before it is turned away unheard.
const FAILURES: u32 = 20;

/// How long failures count.
const WINDOW: Duration = Duration::from_secs(10);

/// Addresses that are remembered; beyond that all others share one count.
const ADDRESSES: usize = 1024;

/// What is remembered of those who failed.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    failures: HashMap<IpAddr, Failures>,
    /// Of all addresses that are not remembered one by one.
    others: Option<Failures>,
}

#[derive(Debug, Clone, Copy)]
struct Failures {
    since: Instant,
    count: u32,
}

impl Gate {
    /// Whether a connection from there is listened to.
    pub(crate) fn lets_in(&self, from: IpAddr, now: Instant) -> bool {
        let failures = self.failures.get(&from).or(self.others.as_ref());
        failures.is_none_or(|failures| {
            failures.count < FAILURES || now.duration_since(failures.since) >= WINDOW
        })
    }

    /// A handshake from there has failed.
    pub(crate) fn failed(&mut self, from: IpAddr, now: Instant) {
        self.failures
            .retain(|_, failures| now.duration_since(failures.since) < WINDOW);
        let fresh = Failures {
            since: now,
            count: 0,
        };
        let known = self.failures.len() < ADDRESSES || self.failures.contains_key(&from);
        let failures = match known {
            true => self.failures.entry(from).or_insert(fresh),
            false => self.others.get_or_insert(fresh),
        };
        if now.duration_since(failures.since) >= WINDOW {
            *failures = fresh;
        }
        failures.count += 1;
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
    fn who_fails_often_is_turned_away_for_a_while_and_nobody_else_is() {
        let (mut gate, start) = (Gate::default(), Instant::now());
        for _ in 0..FAILURES {
            assert!(gate.lets_in(address(1), start));
            gate.failed(address(1), start);
        }
        assert!(!gate.lets_in(address(1), start));
        assert!(gate.lets_in(address(2), start));
        assert!(gate.lets_in(address(1), start + WINDOW));
        gate.failed(address(1), start + WINDOW);
        assert!(gate.lets_in(address(1), start + WINDOW));
    }

    #[test]
    fn thousands_of_addresses_are_not_remembered_one_by_one() {
        let (mut gate, start) = (Gate::default(), Instant::now());
        for last in 0..10_000 {
            gate.failed(address(last), start);
        }
        assert_eq!(gate.failures.len(), ADDRESSES);
        assert!(!gate.lets_in(address(20_000), start));
        assert!(gate.lets_in(address(3), start));
        assert!(gate.lets_in(address(20_000), start + WINDOW));
    }
}
