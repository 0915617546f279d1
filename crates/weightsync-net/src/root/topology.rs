//! Who fetches from whom.
//!
//! **Guarantee.** Plain values in, plain values out. Agents stand in an order; the
//! first `arity` of them fetch from the sender, the others from agents before them:
//! by arity 1 a chain. There is never a circle, and one whose parent is gone is given
//! another at once. An agent that does not serve (a worker's own) fetches from the
//! sender, beside the others, and has nobody below it.
//!
//! A slow link slows down everybody behind it, so agents whose link has been
//! measured as much slower than that of others go to the end, where nobody is
//! behind them. What comes through a slow one says nothing of the one behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// An agent's number; 0 is the sender.
pub(crate) type AgentId = u64;

/// A link is slow if another is more than so many times as fast.
const SLOW: f64 = 4.0;

/// A measurement of fewer bytes says little of a link.
const MEASURABLE: u64 = 1 << 20;

/// How fast a link looks after a measurement: so much of it is the newest.
const FRESH: f64 = 0.5;

/// For how long an agent is not given a parent again that it could not fetch from; twice
/// as long each time that it cannot soon after it was given it again.
const AVOIDED: Duration = Duration::from_secs(30);

/// No longer than this.
const MOST_AVOIDED: Duration = Duration::from_secs(960);

/// The agents, in order.
#[derive(Debug)]
pub(crate) struct Topology {
    /// How many fetch from each.
    arity: usize,
    order: Vec<AgentId>,
    agents: BTreeMap<AgentId, Agent>,
}

#[derive(Debug)]
struct Agent {
    /// Where it serves, if it does.
    address: Option<SocketAddr>,
    /// Bytes a second by which it could take what was there for it, and from whom it
    /// did so last.
    speed: Option<(f64, AgentId)>,
    /// Whom it was last told to fetch from.
    parent: Option<AgentId>,
    /// Whom it could not fetch from.
    failed: BTreeMap<AgentId, Failed>,
}

/// That one could not fetch from another.
#[derive(Clone, Copy, Debug)]
struct Failed {
    /// Whether it is not given it.
    avoided: bool,
    /// Until when that was to be so, which is so long.
    until: Duration,
    pause: Duration,
}

impl Agent {
    fn avoids(&self, parent: AgentId) -> bool {
        self.failed.get(&parent).is_some_and(|one| one.avoided)
    }

    fn avoid(&mut self, parent: AgentId, now: Duration) {
        let before = self.failed.get(&parent);
        // What was well for as long as it was avoided before is well.
        let before = before.filter(|one| now < one.until + one.pause);
        let pause = before.map_or(AVOIDED, |one| (2 * one.pause).min(MOST_AVOIDED));
        let failed = Failed {
            avoided: true,
            until: now + pause,
            pause,
        };
        self.failed.insert(parent, failed);
    }

    fn is_slow(&self, fastest: f64) -> bool {
        self.speed.is_some_and(|(speed, _)| speed * SLOW < fastest)
    }
}

/// An agent is to fetch from another from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Assigned {
    pub(crate) agent: AgentId,
    pub(crate) parent: AgentId,
    /// Where; `None` for the sender.
    pub(crate) address: Option<SocketAddr>,
}

impl Topology {
    /// Without agents.
    pub(crate) fn new(arity: usize) -> Self {
        Self {
            arity: arity.max(1),
            order: Vec::new(),
            agents: BTreeMap::new(),
        }
    }

    /// An agent has come; it goes to the end.
    pub(crate) fn join(&mut self, agent: AgentId, address: Option<SocketAddr>) -> Vec<Assigned> {
        let fresh = Agent {
            address,
            speed: None,
            parent: None,
            failed: BTreeMap::new(),
        };
        self.agents.insert(agent, fresh);
        self.order.push(agent);
        // Not behind those that are known to be slow.
        self.sort();
        self.assign()
    }

    /// An agent is gone.
    pub(crate) fn leave(&mut self, agent: AgentId) -> Vec<Assigned> {
        self.agents.remove(&agent);
        for other in self.agents.values_mut() {
            other.failed.remove(&agent);
        }
        if let Some(at) = self.order.iter().position(|one| *one == agent) {
            match self.arity {
                // Everybody but the next keeps its parent.
                1 => drop(self.order.remove(at)),
                // Else that is so if the last takes the place.
                _ => drop(self.order.swap_remove(at)),
            }
        }
        self.assign()
    }

    /// An agent could not fetch from its parent, which is there: it is given
    /// another, and that one not [for a while](Self::again). One that could not fetch
    /// from the sender, be it in the parent's stead, waits to be told from whom to go on.
    pub(crate) fn lost(&mut self, agent: AgentId, parent: AgentId, now: Duration) -> Vec<Assigned> {
        if let Some(one) = self.agents.get_mut(&agent)
            && (one.parent == Some(parent) || parent == 0)
        {
            // Asked for again, even if it is the same.
            one.parent = None;
            if parent != 0 {
                one.avoid(parent, now);
            }
        }
        self.assign()
    }

    /// When a parent that could not be fetched from may be given again next.
    pub(crate) fn due(&self) -> Option<Duration> {
        let failed = self.agents.values().flat_map(|one| one.failed.values());
        let avoided = failed.filter(|one| one.avoided);
        avoided.map(|one| one.until).min()
    }

    /// Gives parents again that were avoided for long enough.
    pub(crate) fn again(&mut self, now: Duration) -> Vec<Assigned> {
        for one in self.agents.values_mut() {
            for failed in one.failed.values_mut() {
                failed.avoided &= now < failed.until;
            }
        }
        self.assign()
    }

    /// So much went from a parent to an agent, while there was something for it.
    pub(crate) fn measured(
        &mut self,
        parent: AgentId,
        agent: AgentId,
        bytes: u64,
        busy: Duration,
    ) -> Vec<Assigned> {
        let seconds = busy.as_secs_f64();
        let slow = self.fastest().is_some_and(|fastest| {
            let parent = self.agents.get(&parent);
            parent.is_some_and(|parent| parent.is_slow(fastest))
        });
        if bytes < MEASURABLE || seconds <= 0.0 || slow {
            return Vec::new();
        }
        let Some(one) = self.agents.get_mut(&agent) else {
            return Vec::new();
        };
        let measured = bytes as f64 / seconds;
        let speed = match one.speed {
            // Of the times that bytes take, not of the speeds: a link that has become
            // a thousand times as slow looks half as fast by those.
            Some((before, by)) if by == parent => 1.0 / ((1.0 - FRESH) / before + FRESH / measured),
            // What came through another says nothing of this one: that may have been
            // slow, and not known to be.
            _ => measured,
        };
        one.speed = Some((speed, parent));
        self.sort();
        self.assign()
    }

    /// The agents in order, each with its parent.
    pub(crate) fn parents(&self) -> impl Iterator<Item = (AgentId, Option<AgentId>)> {
        let order = self.order.iter();
        order.map(|agent| (*agent, self.agents.get(agent).and_then(|one| one.parent)))
    }

    /// How fast the link to an agent was measured to be, in bytes a second.
    pub(crate) fn speed(&self, agent: AgentId) -> Option<f64> {
        self.agents.get(&agent)?.speed.map(|(speed, _)| speed)
    }

    fn fastest(&self) -> Option<f64> {
        let speeds = self.agents.values().filter_map(|one| one.speed);
        speeds.map(|(speed, _)| speed).reduce(f64::max)
    }

    /// Puts the slow ones at the end, slowest last; the others stay as they are.
    fn sort(&mut self) {
        let Some(fastest) = self.fastest() else {
            return;
        };
        let slow = self.agents.iter().filter(|(_, one)| one.is_slow(fastest));
        let slow: BTreeSet<AgentId> = slow.map(|(agent, _)| *agent).collect();
        for agent in &slow {
            // Measured through one that has turned out to be slow: it is to be
            // measured anew, before that one.
            if let Some(one) = self.agents.get_mut(agent) {
                one.speed.take_if(|(_, by)| slow.contains(by));
            }
        }
        let slow = |agent: &AgentId| {
            let (speed, _) = self.agents.get(agent)?.speed?;
            slow.contains(agent).then_some(speed)
        };
        let mut slowest: Vec<(AgentId, f64)> = Vec::new();
        let mut order = Vec::with_capacity(self.order.len());
        for agent in &self.order {
            match slow(agent) {
                Some(speed) => slowest.push((*agent, speed)),
                None => order.push(*agent),
            }
        }
        slowest.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        order.extend(slowest.into_iter().map(|(agent, _)| agent));
        self.order = order;
    }

    /// Gives everybody the parent of its place; tells of those that change.
    fn assign(&mut self) -> Vec<Assigned> {
        let mut assigned = Vec::new();
        // Who serves, in order, with how many it has below it.
        let mut serving: Vec<(AgentId, usize)> = vec![(0, 0)];
        for agent in self.order.clone() {
            let Some(one) = self.agents.get(&agent) else {
                continue;
            };
            let serves = one.address.is_some();
            // The first with room: by arity 1 the one before.
            let fits = |(parent, below): &&mut (AgentId, usize)| {
                *below < self.arity && !one.avoids(*parent)
            };
            let parent = match serving.iter_mut().find(fits) {
                Some((parent, below)) if serves => {
                    *below += 1;
                    *parent
                }
                // Nobody else is left; or it passes nothing on, and would only take
                // the place of one that does.
                _ => 0,
            };
            if serves {
                serving.push((agent, 0));
            }
            let address = self.agents.get(&parent).and_then(|parent| parent.address);
            if let Some(one) = self.agents.get_mut(&agent)
                && one.parent != Some(parent)
            {
                one.parent = Some(parent);
                assigned.push(Assigned {
                    agent,
                    parent,
                    address,
                });
            }
        }
        assigned
    }
}

#[cfg(test)]
mod tests;
