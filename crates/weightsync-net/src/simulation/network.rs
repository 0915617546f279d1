//! The network between processes: the speed of each end, and whether anything gets through.

use std::collections::BTreeMap;

use super::clock::{SECOND, Time};
use crate::bulk::Gauge;
use crate::root::topology::AgentId;

/// A machine's number; 0 is the sender's.
pub(super) type Node = usize;

/// The health of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Health {
    Good,
    /// Nothing gets through, and no end is told.
    Silent,
    /// Connections are refused; earlier ones have ended, and both ends know.
    Cut,
}

#[derive(Debug)]
pub(super) struct Network {
    ends: Vec<End>,
    /// Routes between two machines with a health of their own.
    between: BTreeMap<(Node, Node), (Health, Time)>,
    /// The throughput of each life of a machine's agent from each parent.
    gauges: BTreeMap<((Node, u64), AgentId), Gauge>,
    /// The latency of every route, in one direction.
    pub(super) latency: Time,
}

#[derive(Clone, Debug)]
struct End {
    /// Bytes a second, in each direction.
    rate: u64,
    /// When everything queued on it has been sent.
    free: Time,
    /// The receiver of what was queued last.
    last: Node,
    /// When each block under way to it arrives.
    coming: Vec<Time>,
    health: (Health, Time),
}

impl Network {
    pub(super) fn new(rates: &[u64], latency: Time) -> Self {
        let end = |rate: &u64| End {
            rate: *rate,
            free: 0,
            last: 0,
            coming: Vec::new(),
            health: (Health::Good, 0),
        };
        Self {
            ends: rates.iter().map(end).collect(),
            between: BTreeMap::new(),
            gauges: BTreeMap::new(),
            latency,
        }
    }

    pub(super) fn rate(&self, node: Node) -> u64 {
        self.ends[node].rate
    }

    /// The throughput of a child from its parent.
    pub(super) fn gauge(&mut self, child: (Node, u64), parent: AgentId) -> &mut Gauge {
        self.gauges.entry((child, parent)).or_default()
    }

    /// The health between two machines, and since when.
    pub(super) fn health(&self, one: Node, other: Node) -> (Health, Time) {
        let between = self.between.get(&pair(one, other)).copied();
        let all = [
            self.ends[one].health,
            self.ends[other].health,
            between.unwrap_or((Health::Good, 0)),
        ];
        let worst = all.into_iter().map(|(health, _)| health).max();
        let worst = worst.unwrap_or(Health::Good);
        let since = all.into_iter().filter(|(health, _)| *health == worst);
        (worst, since.map(|(_, since)| since).min().unwrap_or(0))
    }

    pub(super) fn is_good(&self, one: Node, other: Node) -> bool {
        self.health(one, other).0 == Health::Good
    }

    /// Sets the health of a machine's link.
    pub(super) fn set(&mut self, node: Node, health: Health, now: Time) {
        self.ends[node].health = (health, now);
    }

    /// Sets the health between two machines.
    pub(super) fn set_between(&mut self, one: Node, other: Node, health: Health, now: Time) {
        self.between.insert(pair(one, other), (health, now));
    }

    /// Everything is well again, except perhaps between two machines.
    pub(super) fn heal(&mut self, apart: bool, now: Time) {
        if !apart {
            self.between.clear();
        }
        for end in &mut self.ends {
            end.health = (Health::Good, now);
        }
    }

    /// Sends bytes from one machine to another, behind everything queued at either end.
    pub(super) fn send(&mut self, from: Node, to: Node, bytes: u64, now: Time) -> Arrival {
        let slower = self.rate(from).min(self.rate(to));
        // A slow receiver takes only its share.
        let out = taken(bytes, self.rate(from));
        let end = &mut self.ends[from];
        let begun = end.free.max(now);
        end.free = begun + out;
        let last = std::mem::replace(&mut end.last, to);
        let end = &mut self.ends[to];
        end.coming.retain(|comes| *comes > now);
        let first = end.coming.iter().fold(begun, |one, other| one.max(*other));
        let comes = first + taken(bytes, end.rate);
        end.coming.push(comes);
        let whole = first + taken(bytes, slower);
        // Bytes queued behind another receiver's arrive slowly; behind the same receiver's, late.
        let waits = if last == to { 0 } else { begun - now };
        Arrival {
            comes,
            whole,
            busy: whole - first + waits,
        }
    }

    /// Removes an arrival that is under way, so that nothing waits for it.
    pub(super) fn take_back(&mut self, to: Node, arrival: Arrival) {
        let coming = &mut self.ends[to].coming;
        if let Some(at) = coming.iter().position(|comes| *comes == arrival.comes) {
            coming.swap_remove(at);
        }
    }
}

/// When queued bytes arrive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// When the receiver's link is free again.
    comes: Time,
    /// When all bytes have arrived.
    pub(super) whole: Time,
    /// How long the transfer appears to take.
    pub(super) busy: Time,
}

/// How long this many bytes take.
pub(super) fn taken(bytes: u64, rate: u64) -> Time {
    (bytes * SECOND).div_ceil(rate)
}

fn pair(one: Node, other: Node) -> (Node, Node) {
    (one.min(other), one.max(other))
}
