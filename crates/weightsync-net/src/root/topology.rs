//! Decides which agent fetches from which.
//!
//! **Guarantee.** The input and the output are plain values. Agents stand in an order. The
//! first `arity` of them fetch from the sender, the others from agents before them; with arity
//! 1 they form a chain. There is never a circle. An agent whose parent is gone gets another
//! parent at once. An agent that does not serve (a worker's own) fetches from the sender, next
//! to the others, and has no children.
//!
//! The cost of an event does not grow with the number of agents, unless the event moves others:
//! an agent that joins, leaves or changes its speed so that another agent gets a new parent.
//!
//! A slow link slows down everybody behind it. So an agent whose link is measured as much
//! slower than the others goes to the end, where nobody is behind it. A measurement behind a
//! slow agent says nothing about the agent itself. So an agent that looks no faster than its
//! slow parent is put first once; then the sender measures it. It is put first again if it
//! later looks much slower behind another parent.
//!
//! A busy machine makes a fast link look slow for a moment. So the order heeds a higher mean at
//! once, and a lower speed once transfers were that slow for a second in all. Otherwise the agents
//! would change places all the time, and an agent whose fetch takes long would get another parent
//! before it ends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use crate::bulk::Transferred;

/// An agent's number; 0 is the sender.
pub(crate) type AgentId = u64;

/// A link is slow if another one is more than this many times as fast.
const SLOW: f64 = 4.0;

/// Below this many bytes a second (270 Mbit/s), moving an agent is a fair price for knowing whether
/// its parent slows it down.
const MAY_BE_HELD_UP: f64 = 33_554_432.0;

/// The weight of the newest measurement in the estimate of a link's speed.
const FRESH: f64 = 0.5;

/// How long transfers must be slower than before until the order of the agents heeds it. A link
/// that delays a version by less is no reason to move an agent.
const LASTS: Duration = Duration::from_secs(1);

/// How long an agent does not get a parent back after a fetch from it failed. The time doubles if
/// the parent fails again soon after it was given back.
const AVOIDED: Duration = Duration::from_secs(30);

/// The longest such time.
const MOST_AVOIDED: Duration = Duration::from_secs(960);

/// The agents, in order.
#[derive(Debug)]
pub(crate) struct Topology {
    /// How many agents fetch from each.
    arity: usize,
    /// The agents that serve.
    order: Vec<AgentId>,
    agents: BTreeMap<AgentId, AgentNode>,
    /// The settled speeds of the agents in the order.
    speeds: BTreeSet<Rank>,
    /// The mean speeds of the other agents.
    other_speeds: BTreeSet<Rank>,
    /// Until when an agent does not get a parent: (until, agent, parent).
    avoided: BTreeSet<(Duration, AgentId, AgentId)>,
    /// The agent on trial: it stands first until the sender has measured it.
    tried: Option<AgentId>,
}

/// A speed and its agent. The bits of a float that is not negative sort like the float.
type Rank = (u64, AgentId);

/// Where an agent serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AgentEndpoint {
    /// As the sender sees it.
    pub(crate) address: SocketAddr,
    /// The same for every process of one host.
    pub(crate) host: [u8; 16],
}

impl AgentEndpoint {
    /// Whether another host can reach this address. A loopback address means the machine that uses
    /// it.
    fn is_found_by(&self, host: [u8; 16]) -> bool {
        !self.address.ip().is_loopback() || self.host == host
    }
}

#[derive(Debug)]
struct AgentNode {
    /// Where the agent serves, if it does.
    endpoint: Option<AgentEndpoint>,
    speed: Option<Speed>,
    /// The parent that was last announced to the agent.
    parent: Option<AgentId>,
    /// Whether the agent was measured while it fetched from the sender itself.
    by_sender: bool,
    /// The parents from which a fetch of this agent failed.
    failed: BTreeMap<AgentId, Failed>,
}

/// An agent's speed while data for it was ready.
#[derive(Clone, Copy, Debug)]
struct Speed {
    /// The mean of the last measurements through one parent.
    mean: Measured,
    /// The speed that the order goes by.
    settled: Measured,
    /// While the mean is lower than `settled`: the highest measurement, and how long the transfers
    /// took in all.
    lower: Option<(Measured, Duration)>,
}

/// A speed in bytes a second, and the parent through which it was measured.
type Measured = (f64, AgentId);

impl Speed {
    /// The speed after a transfer that took `busy`.
    fn next(before: Option<Self>, measured: Measured, busy: Duration) -> Self {
        let Some(before) = before else {
            return Self {
                mean: measured,
                settled: measured,
                lower: None,
            };
        };
        let mean = match before.mean {
            // The mean of times, not of speeds: with speeds, a link that became a thousand times
            // slower would still look half as fast.
            (mean, by) if by == measured.1 => 1.0 / ((1.0 - FRESH) / mean + FRESH / measured.0),
            // A measurement through another parent says nothing about this one: the other may have
            // been slow without being known to be.
            _ => measured.0,
        };
        let mean = (mean, measured.1);
        let (highest, took) = before.lower.unwrap_or((measured, Duration::ZERO));
        let highest = match highest.0 > measured.0 {
            true => highest,
            false => measured,
        };
        let lesser = |speed: Measured| match speed.0 < before.settled.0 {
            true => speed,
            false => before.settled,
        };
        let (settled, lower) = match took + busy {
            // One high measurement may be of bytes that had waited in buffers: the mean counts.
            _ if mean.0 >= before.settled.0 => (mean, None),
            // This transfer alone took long enough.
            _ if busy >= LASTS => (lesser(measured), None),
            took if took >= LASTS => (lesser(highest), None),
            took => (before.settled, Some((highest, took))),
        };
        Self {
            mean,
            settled,
            lower,
        }
    }
}

/// The record of a parent from which a fetch failed.
#[derive(Clone, Copy, Debug)]
struct Failed {
    /// Whether the agent may not get this parent now.
    avoided: bool,
    /// The end of that time, [`Duration::MAX`] for never, and its length.
    until: Duration,
    pause: Duration,
}

impl AgentNode {
    fn avoids(&self, parent: AgentId) -> bool {
        self.failed.get(&parent).is_some_and(|one| one.avoided)
    }

    /// Avoids a parent; returns until when, if not for good.
    fn avoid(&mut self, parent: AgentId, why: LeftParent) -> Option<Duration> {
        let before = self.failed.get(&parent).copied();
        let for_good = before.is_some_and(|one| one.until == Duration::MAX);
        let now = match why {
            // A parent that is avoided for good stays avoided, also if an ordinary failure follows.
            LeftParent::Failed { now } if !for_good => now,
            _ => {
                let failed = Failed {
                    avoided: true,
                    until: Duration::MAX,
                    pause: Duration::ZERO,
                };
                self.failed.insert(parent, failed);
                return None;
            }
        };
        // A parent that worked for as long as it was avoided before is trusted again.
        // `until` is a real time here: `Duration::MAX` was handled above, and the sum cannot
        // overflow.
        let before = before.filter(|one| now < one.until + one.pause);
        let pause = before.map_or(AVOIDED, |one| (2 * one.pause).min(MOST_AVOIDED));
        let failed = Failed {
            avoided: true,
            until: now + pause,
            pause,
        };
        self.failed.insert(parent, failed);
        Some(failed.until)
    }

    fn is_slow(&self, fastest: f64) -> bool {
        self.settled()
            .is_some_and(|(speed, _)| speed * SLOW < fastest)
    }

    fn settled(&self) -> Option<Measured> {
        self.speed.map(|speed| speed.settled)
    }
}

/// Why an agent fetches from a parent no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftParent {
    /// A fetch failed. The agent avoids this parent [for a while](Topology::retry_avoided).
    Failed { now: Duration },
    /// The parent sent other bytes than were published. The agent never gets it again.
    Altered,
}

/// The new parent of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Assigned {
    pub(crate) agent: AgentId,
    pub(crate) parent: AgentId,
    /// The parent's address; `None` for the sender.
    pub(crate) address: Option<SocketAddr>,
}

impl Topology {
    /// A topology without agents.
    pub(crate) fn new(arity: usize) -> Self {
        Self {
            arity: arity.max(1),
            order: Vec::new(),
            agents: BTreeMap::new(),
            speeds: BTreeSet::new(),
            other_speeds: BTreeSet::new(),
            avoided: BTreeSet::new(),
            tried: None,
        }
    }

    /// Adds an agent at the end of the order.
    pub(crate) fn join(
        &mut self,
        agent: AgentId,
        endpoint: Option<AgentEndpoint>,
    ) -> Vec<Assigned> {
        let fresh = AgentNode {
            endpoint,
            speed: None,
            parent: None,
            by_sender: false,
            failed: BTreeMap::new(),
        };
        self.agents.insert(agent, fresh);
        if endpoint.is_none() {
            return self.give_sender(agent);
        }
        self.order.push(agent);
        // Agents that are known to be slow stay behind the new one.
        self.sort();
        self.assign()
    }

    /// Announces the sender as the parent of an agent that does not serve, unless that was done.
    /// Such an agent has no place in the order, so nobody moves.
    fn give_sender(&mut self, agent: AgentId) -> Vec<Assigned> {
        let one = self.agents.get_mut(&agent);
        let unannounced = one.filter(|one| one.parent != Some(0));
        let assigned = unannounced.map(|one| {
            one.parent = Some(0);
            Assigned {
                agent,
                parent: 0,
                address: None,
            }
        });
        assigned.into_iter().collect()
    }

    /// Removes an agent.
    pub(crate) fn leave(&mut self, agent: AgentId) -> Vec<Assigned> {
        let gone = self.agents.remove(&agent);
        self.tried.take_if(|tried| *tried == agent);
        if let Some(speed) = gone.as_ref().and_then(|gone| gone.speed) {
            self.other_speeds.remove(&(speed.mean.0.to_bits(), agent));
        }
        let Some(gone) = gone.filter(|gone| gone.endpoint.is_some()) else {
            return Vec::new();
        };
        // What it returns does not matter here: an agent that goes always changes the order.
        self.rank(agent, gone.settled(), None);
        // Agent numbers are never used again, so nothing may be left under this one.
        for (parent, failed) in gone.failed {
            self.avoided.remove(&(failed.until, agent, parent));
        }
        // Speeds that were measured through this agent are doubtful from here on, and the order has
        // to be made again.
        let mut measured_by_it = false;
        for (number, other) in &mut self.agents {
            measured_by_it |= other.settled().is_some_and(|(_, by)| by == agent);
            if let Some(failed) = other.failed.remove(&agent) {
                self.avoided.remove(&(failed.until, *number, agent));
            }
        }
        if let Some(at) = self.order.iter().position(|one| *one == agent) {
            match self.arity {
                // A chain keeps its order, so that only the next agent gets another parent.
                1 => drop(self.order.remove(at)),
                // With more children each, fewest agents move if the last one takes the free place.
                _ => drop(self.order.swap_remove(at)),
            }
        }
        // With more than one child each, the last agent took the free place, and slow agents stand
        // last: so sort again.
        if measured_by_it || self.arity > 1 {
            self.sort();
        }
        self.assign()
    }

    /// Reassigns an agent that fetches from a live parent no more. If the parent was the sender,
    /// even in the parent's place, the agent waits for the next assignment.
    pub(crate) fn leave_parent(
        &mut self,
        agent: AgentId,
        parent: AgentId,
        why: LeftParent,
    ) -> Vec<Assigned> {
        if let Some(one) = self.agents.get_mut(&agent)
            && (one.parent == Some(parent) || parent == 0)
        {
            // The agent expects an answer, so the parent is announced even if it stays the same.
            one.parent = None;
            if one.endpoint.is_none() {
                return self.give_sender(agent);
            }
            // The sender is never avoided: an agent that has no other parent fetches from it.
            if parent != 0 {
                let before = one.failed.get(&parent).map(|failed| failed.until);
                let until = one.avoid(parent, why);
                if let Some(before) = before {
                    self.avoided.remove(&(before, agent, parent));
                }
                if let Some(until) = until {
                    self.avoided.insert((until, agent, parent));
                }
            }
            return self.assign();
        }
        Vec::new()
    }

    /// When an avoided parent may be assigned again next.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.avoided.first().map(|(until, ..)| *until)
    }

    /// Allows parents again that were avoided for long enough.
    pub(crate) fn retry_avoided(&mut self, now: Duration) -> Vec<Assigned> {
        let mut any = false;
        while let Some(&(until, agent, parent)) = self.avoided.first()
            && now >= until
        {
            self.avoided.pop_first();
            let one = self.agents.get_mut(&agent);
            // The record stays: it tells whether this parent fails again soon.
            if let Some(failed) = one.and_then(|one| one.failed.get_mut(&parent)) {
                failed.avoided = false;
                any = true;
            }
        }
        match any {
            true => self.assign(),
            false => Vec::new(),
        }
    }

    /// Notes how many bytes a parent sent to an agent, and in what time.
    pub(crate) fn measured(
        &mut self,
        parent: AgentId,
        agent: AgentId,
        bytes: u64,
        busy: Duration,
    ) -> Vec<Assigned> {
        let slow = self.fastest().is_some_and(|fastest| {
            let parent = self.agents.get(&parent);
            parent.is_some_and(|parent| parent.is_slow(fastest))
        });
        // There is no rate for a few bytes or for deltas, which say nothing about a link.
        let rate = Transferred { bytes, busy }.rate();
        // Behind a slow parent an agent looks as slow as its parent, whatever its own link is.
        let Some(one) = self.agents.get_mut(&agent) else {
            return Vec::new();
        };
        // One that is faster than it is known to be is measured again elsewhere: it may have been
        // stopped for a moment. Much faster, or two slow agents would change places by turns.
        let is_faster = |rate: f64| one.settled().is_some_and(|(speed, _)| rate > 2.0 * speed);
        let Some(measured) = rate.filter(|rate| !slow || is_faster(*rate)) else {
            return Vec::new();
        };
        let mut trial_ends = false;
        let speed = Speed::next(one.speed, (measured, parent), busy);
        let before = one.speed.replace(speed);
        match before.map(|before| before.settled) {
            _ if parent == 0 => {
                one.by_sender = true;
                trial_ends = self.tried.take_if(|tried| *tried == agent).is_some();
            }
            // The sender measured this agent as much faster than its parent does. The parent may be
            // slow without being known to be, so the agent may have another trial.
            Some((before, 0)) if speed.settled.0 * SLOW < before => one.by_sender = false,
            _ => {}
        }
        // An agent without children has no place in the order. Its speed counts only for the choice
        // of a codec.
        if one.endpoint.is_none() {
            if let Some(before) = before {
                self.other_speeds.remove(&(before.mean.0.to_bits(), agent));
            }
            self.other_speeds.insert((speed.mean.0.to_bits(), agent));
            return Vec::new();
        }
        let before = before.map(|before| before.settled);
        let moves = self.rank(agent, before, Some(speed.settled));
        let held_up = self.may_be_held_up(agent);
        // A slow agent must not stay first, where its trial put it.
        if !moves && !held_up && !trial_ends {
            return Vec::new();
        }
        if held_up {
            self.put_first(agent);
        }
        self.sort();
        self.assign()
    }

    /// Whether an agent may be faster than its measurements: all of them came through parents as
    /// slow as itself. One such agent after the other gets a trial.
    fn may_be_held_up(&self, agent: AgentId) -> bool {
        let unknown = |one: &&AgentNode| !one.by_sender && self.tried.is_none();
        let Some(one) = self.agents.get(&agent).filter(unknown) else {
            return false;
        };
        let Some((speed, by)) = one.settled().filter(|(speed, _)| *speed < MAY_BE_HELD_UP) else {
            return false;
        };
        // An agent much faster than its parent would have shown it.
        let as_slow = |parent: f64| parent <= speed * SLOW;
        let by = self.agents.get(&by).and_then(AgentNode::settled);
        by.is_some_and(|(parent, _)| as_slow(parent))
    }

    fn put_first(&mut self, agent: AgentId) {
        self.tried = Some(agent);
        if let Some(at) = self.order.iter().position(|one| *one == agent) {
            self.order[..=at].rotate_right(1);
        }
    }

    /// The slowest known link of all fetches, in bytes a second.
    pub(crate) fn slowest(&self) -> Option<f64> {
        let firsts = [&self.speeds, &self.other_speeds].map(|speeds| speeds.first());
        let slowest = firsts.into_iter().flatten().min();
        slowest.map(|(speed, _)| f64::from_bits(*speed))
    }

    /// The agents that serve, in order, then the others; each with its parent.
    pub(crate) fn parents(&self) -> impl Iterator<Item = (AgentId, Option<AgentId>)> {
        let order = self.order.iter();
        let serve = order.filter_map(|agent| self.agents.get_key_value(agent));
        let others = self.agents.iter().filter(|(_, one)| one.endpoint.is_none());
        serve.chain(others).map(|(agent, one)| (*agent, one.parent))
    }

    /// The agents that serve, in order.
    #[cfg(test)]
    pub(crate) fn order(&self) -> impl Iterator<Item = AgentId> {
        self.order.iter().copied()
    }

    /// Whether other agents may fetch from this one.
    pub(crate) fn serves(&self, agent: AgentId) -> bool {
        let one = self.agents.get(&agent);
        one.is_some_and(|one| one.endpoint.is_some())
    }

    /// The measured speed of the link to an agent, in bytes a second.
    pub(crate) fn speed(&self, agent: AgentId) -> Option<f64> {
        self.agents.get(&agent)?.speed.map(|speed| speed.mean.0)
    }

    fn fastest(&self) -> Option<f64> {
        self.speeds.last().map(|(speed, _)| f64::from_bits(*speed))
    }

    /// Updates the rank of an agent that serves. Returns whether agents have to move.
    fn rank(&mut self, agent: AgentId, before: Option<Measured>, after: Option<Measured>) -> bool {
        // Below this limit a link is slow.
        let limit = |own: &Self| own.fastest().unwrap_or(0.0) / SLOW;
        let old = limit(self);
        let [before, after] = [before, after].map(|speed| speed.map(|(speed, _)| speed));
        if let Some(speed) = before {
            self.speeds.remove(&(speed.to_bits(), agent));
        }
        let others = |speeds: &BTreeSet<Rank>, one: f64, other: f64| {
            let (low, high) = (one.min(other).to_bits(), one.max(other).to_bits());
            speeds
                .range((low, 0)..=(high, AgentId::MAX))
                .next()
                .is_some()
        };
        if let Some(speed) = after {
            self.speeds.insert((speed.to_bits(), agent));
        }
        let new = limit(self);
        let slow = |speed: Option<f64>, limit| speed.filter(|speed| *speed < limit);
        let moves = match (slow(before, old), slow(after, new)) {
            (None, None) => false,
            // Slow agents are sorted among themselves, so look whether this one has moved.
            (Some(before), Some(after)) => {
                // Its own entry lies in the range, so it is left out while the others are looked
                // at.
                self.speeds.remove(&(after.to_bits(), agent));
                let passes = others(&self.speeds, before, after);
                self.speeds.insert((after.to_bits(), agent));
                passes
            }
            _ => true,
        };
        // A new limit moves the agents whose speeds lie between it and the old one.
        moves || old != new && others(&self.speeds, old, new)
    }

    /// Puts the slow agents at the end, the slowest last; the others keep their order.
    fn sort(&mut self) {
        let Some(fastest) = self.fastest() else {
            return;
        };
        let slow = self.speeds.range(..((fastest / SLOW).to_bits(), 0));
        let slow: BTreeSet<AgentId> = slow.map(|(_, agent)| *agent).collect();
        if slow.is_empty() {
            return;
        }
        // Agents whose measurements came through a slow parent or one that has gone. They stand
        // before the slow ones, so that they are measured again.
        let doubtful =
            |by: AgentId| slow.contains(&by) || by != 0 && !self.agents.contains_key(&by);
        let by = |agent: &AgentId| Some(self.agents.get(agent)?.settled()?.1);
        let doubtful = slow.iter().filter(|agent| by(agent).is_some_and(doubtful));
        for agent in doubtful.copied().collect::<Vec<_>>() {
            // Without a speed an agent does not count as slow.
            let one = self.agents.get_mut(&agent);
            if let Some(speed) = one.and_then(|one| one.speed.take()) {
                self.speeds.remove(&(speed.settled.0.to_bits(), agent));
            }
        }
        let slow = |agent: &AgentId| {
            let (speed, _) = self.agents.get(agent)?.settled()?;
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

    /// Gives every agent the parent of its place; returns the changes.
    fn assign(&mut self) -> Vec<Assigned> {
        let mut assigned = Vec::new();
        // The agents that serve, in order, each with its number of children and its address.
        let mut serving: Vec<(AgentId, usize, Option<AgentEndpoint>)> = vec![(0, 0, None)];
        // How many of the first agents have no room for a child.
        let mut full = 0;
        for agent in &self.order {
            let Some(one) = self.agents.get_mut(agent) else {
                continue;
            };
            let Some(own) = one.endpoint else { continue };
            // Skipped for good: with thousands of agents the search for a parent must stay short.
            while serving
                .get(full)
                .is_some_and(|(_, below, _)| *below >= self.arity)
            {
                full += 1;
            }
            // The first parent with room; in a chain that is the agent before.
            let fits =
                |(parent, below, endpoint): &&mut (AgentId, usize, Option<AgentEndpoint>)| {
                    *below < self.arity
                        && !one.avoids(*parent)
                        && endpoint.is_none_or(|endpoint| endpoint.is_found_by(own.host))
                };
            let (parent, endpoint) = match serving[full..].iter_mut().find(fits) {
                Some((parent, below, endpoint)) => {
                    *below += 1;
                    (*parent, *endpoint)
                }
                // No parent is left but the sender.
                None => (0, None),
            };
            serving.push((*agent, 0, one.endpoint));
            if one.parent != Some(parent) {
                one.parent = Some(parent);
                assigned.push(Assigned {
                    agent: *agent,
                    parent,
                    address: endpoint.map(|endpoint| endpoint.address),
                });
            }
        }
        // An agent on trial may turn out to be slow, and slow agents stand last. There the sender
        // never measures it, and no other agent would get its trial.
        let agents = &self.agents;
        let is_first = |agent: &AgentId| agents.get(agent).is_some_and(|one| one.parent == Some(0));
        self.tried.take_if(|tried| !is_first(tried));
        assigned
    }
}

#[cfg(test)]
mod tests;
