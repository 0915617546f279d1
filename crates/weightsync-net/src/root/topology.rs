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

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use crate::bulk::Came;

/// An agent's number; 0 is the sender.
pub(crate) type AgentId = u64;

/// A link is slow if another is more than so many times as fast.
const SLOW: f64 = 4.0;

/// Below so many bytes a second (270 Mbit/s) it is worth an agent's move to find out
/// whether its parent holds it up.
const MAY_BE_HELD_UP: f64 = 33_554_432.0;

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
    /// Those that serve.
    order: Vec<AgentId>,
    agents: BTreeMap<AgentId, Agent>,
    /// How fast each of those in order is, as far as it is known.
    speeds: BTreeSet<Rank>,
    /// How fast each of the others is.
    beside: BTreeSet<Rank>,
    /// Until when whom is not given which parent.
    avoided: BTreeSet<(Duration, AgentId, AgentId)>,
    /// The agent that was put first, until the sender has found out how fast it is.
    tried: Option<AgentId>,
}

/// A speed and whose it is: a float that is not negative stands where its bits do.
type Rank = (u64, AgentId);

/// Where an agent serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// As the sender sees it.
    pub(crate) address: SocketAddr,
    /// The same for every process of one host.
    pub(crate) host: [u8; 16],
}

impl Endpoint {
    /// Whether that is where another host finds it: an address of the loopback is of
    /// whichever host asks there.
    fn is_found_by(&self, host: [u8; 16]) -> bool {
        !self.address.ip().is_loopback() || self.host == host
    }
}

#[derive(Debug)]
struct Agent {
    /// Where it serves, if it does.
    endpoint: Option<Endpoint>,
    /// Bytes a second by which it could take what was there for it, and from whom it
    /// did so last.
    speed: Option<(f64, AgentId)>,
    /// Whom it was last told to fetch from.
    parent: Option<AgentId>,
    /// Whether anything has come to it from the sender itself that says how fast it is.
    by_sender: bool,
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

    /// Until when.
    fn avoid(&mut self, parent: AgentId, now: Duration) -> Duration {
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
        failed.until
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
            speeds: BTreeSet::new(),
            beside: BTreeSet::new(),
            avoided: BTreeSet::new(),
            tried: None,
        }
    }

    /// An agent has come; it goes to the end.
    pub(crate) fn join(&mut self, agent: AgentId, endpoint: Option<Endpoint>) -> Vec<Assigned> {
        let fresh = Agent {
            endpoint,
            speed: None,
            parent: None,
            by_sender: false,
            failed: BTreeMap::new(),
        };
        self.agents.insert(agent, fresh);
        if endpoint.is_none() {
            return self.beside(agent);
        }
        self.order.push(agent);
        // Not behind those that are known to be slow.
        self.sort();
        self.assign()
    }

    /// One that does not serve, and is not told, is to fetch from the sender: together with the
    /// others, where it takes nobody's place.
    fn beside(&mut self, agent: AgentId) -> Vec<Assigned> {
        let one = self.agents.get_mut(&agent);
        let unannounced = one.filter(|one| one.parent != Some(0));
        let told = unannounced.map(|one| {
            one.parent = Some(0);
            Assigned {
                agent,
                parent: 0,
                address: None,
            }
        });
        told.into_iter().collect()
    }

    /// An agent is gone.
    pub(crate) fn leave(&mut self, agent: AgentId) -> Vec<Assigned> {
        let gone = self.agents.remove(&agent);
        self.tried.take_if(|tried| *tried == agent);
        if let Some((speed, _)) = gone.as_ref().and_then(|gone| gone.speed) {
            self.beside.remove(&(speed.to_bits(), agent));
        }
        let Some(gone) = gone.filter(|gone| gone.endpoint.is_some()) else {
            return Vec::new();
        };
        self.rank(agent, gone.speed, None);
        for (parent, failed) in gone.failed {
            self.avoided.remove(&(failed.until, agent, parent));
        }
        let mut measured_by_it = false;
        for (number, other) in &mut self.agents {
            measured_by_it |= other.speed.is_some_and(|(_, by)| by == agent);
            if let Some(failed) = other.failed.remove(&agent) {
                self.avoided.remove(&(failed.until, *number, agent));
            }
        }
        if let Some(at) = self.order.iter().position(|one| *one == agent) {
            match self.arity {
                // Everybody but the next keeps its parent.
                1 => drop(self.order.remove(at)),
                // Else that is so if the last takes the place.
                _ => drop(self.order.swap_remove(at)),
            }
        }
        // With more than one child each, the last agent has taken the free place, and the last
        // are the slow ones.
        if measured_by_it || self.arity > 1 {
            self.sort();
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
            if one.endpoint.is_none() {
                return self.beside(agent);
            }
            if parent != 0 {
                let before = one.failed.get(&parent).map(|failed| failed.until);
                let until = one.avoid(parent, now);
                if let Some(before) = before {
                    self.avoided.remove(&(before, agent, parent));
                }
                self.avoided.insert((until, agent, parent));
            }
            return self.assign();
        }
        Vec::new()
    }

    /// When a parent that could not be fetched from may be given again next.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.avoided.first().map(|(until, ..)| *until)
    }

    /// Gives parents again that were avoided for long enough.
    pub(crate) fn again(&mut self, now: Duration) -> Vec<Assigned> {
        let mut any = false;
        while let Some(&(until, agent, parent)) = self.avoided.first()
            && now >= until
        {
            self.avoided.pop_first();
            let one = self.agents.get_mut(&agent);
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

    /// So much went from a parent to an agent, while there was something for it.
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
        let rate = Came { bytes, busy }.rate();
        let Some(measured) = rate.filter(|_| !slow) else {
            return Vec::new();
        };
        let Some(one) = self.agents.get_mut(&agent) else {
            return Vec::new();
        };
        let speed = match one.speed {
            // Of the times that bytes take, not of the speeds: a link that has become
            // a thousand times as slow looks half as fast by those.
            Some((before, by)) if by == parent => 1.0 / ((1.0 - FRESH) / before + FRESH / measured),
            // What came through another says nothing of this one: that may have been
            // slow, and not known to be.
            _ => measured,
        };
        let mut trial_ends = false;
        match one.speed {
            _ if parent == 0 => {
                one.by_sender = true;
                trial_ends = self.tried.take_if(|tried| *tried == agent).is_some();
            }
            // The sender found it much faster than it looks behind this parent, which may not
            // be known to be slow: it may have another trial.
            Some((before, 0)) if measured * SLOW < before => one.by_sender = false,
            _ => {}
        }
        let now = Some((speed, parent));
        let before = std::mem::replace(&mut one.speed, now);
        if one.endpoint.is_none() {
            if let Some((before, _)) = before {
                self.beside.remove(&(before.to_bits(), agent));
            }
            self.beside.insert((speed.to_bits(), agent));
            return Vec::new();
        }
        let moves = self.rank(agent, before, now);
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

    /// Whether an agent may be faster than it looks: all that came to it came through one
    /// that is as slow. One after the other is found out about.
    fn may_be_held_up(&self, agent: AgentId) -> bool {
        let unknown = |one: &&Agent| !one.by_sender && self.tried.is_none();
        let Some(one) = self.agents.get(&agent).filter(unknown) else {
            return false;
        };
        let Some((speed, by)) = one.speed.filter(|(speed, _)| *speed < MAY_BE_HELD_UP) else {
            return false;
        };
        // One that is much faster would have shown that it is not.
        let as_slow = |parent: f64| parent <= speed * SLOW;
        self.speed(by).is_some_and(as_slow)
    }

    fn put_first(&mut self, agent: AgentId) {
        self.tried = Some(agent);
        if let Some(at) = self.order.iter().position(|one| *one == agent) {
            self.order[..=at].rotate_right(1);
        }
    }

    /// The slowest link by which anybody fetches, in bytes a second, as far as they are
    /// known.
    pub(crate) fn slowest(&self) -> Option<f64> {
        let firsts = [&self.speeds, &self.beside].map(|speeds| speeds.first());
        let slowest = firsts.into_iter().flatten().min();
        slowest.map(|(speed, _)| f64::from_bits(*speed))
    }

    /// The agents that serve, in order, then those that do not; each with its parent.
    pub(crate) fn parents(&self) -> impl Iterator<Item = (AgentId, Option<AgentId>)> {
        let order = self.order.iter();
        let serve = order.filter_map(|agent| self.agents.get_key_value(agent));
        let beside = self.agents.iter().filter(|(_, one)| one.endpoint.is_none());
        serve.chain(beside).map(|(agent, one)| (*agent, one.parent))
    }

    /// The agents that serve, in order.
    #[cfg(test)]
    pub(crate) fn order(&self) -> impl Iterator<Item = AgentId> {
        self.order.iter().copied()
    }

    /// Whether others may fetch from an agent.
    pub(crate) fn serves(&self, agent: AgentId) -> bool {
        let one = self.agents.get(&agent);
        one.is_some_and(|one| one.endpoint.is_some())
    }

    /// How fast the link to an agent was measured to be, in bytes a second.
    pub(crate) fn speed(&self, agent: AgentId) -> Option<f64> {
        self.agents.get(&agent)?.speed.map(|(speed, _)| speed)
    }

    fn fastest(&self) -> Option<f64> {
        self.speeds.last().map(|(speed, _)| f64::from_bits(*speed))
    }

    /// One that serves has another speed. Whether that is to move somebody.
    fn rank(
        &mut self,
        agent: AgentId,
        before: Option<(f64, AgentId)>,
        after: Option<(f64, AgentId)>,
    ) -> bool {
        // Below it a link is slow.
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
            // Among those that are slow it stands where it stood, or not.
            (Some(before), Some(after)) => {
                self.speeds.remove(&(after.to_bits(), agent));
                let passes = others(&self.speeds, before, after);
                self.speeds.insert((after.to_bits(), agent));
                passes
            }
            _ => true,
        };
        moves || old != new && others(&self.speeds, old, new)
    }

    /// Puts the slow ones at the end, slowest last; the others stay as they are.
    fn sort(&mut self) {
        let Some(fastest) = self.fastest() else {
            return;
        };
        let slow = self.speeds.range(..((fastest / SLOW).to_bits(), 0));
        let slow: BTreeSet<AgentId> = slow.map(|(_, agent)| *agent).collect();
        if slow.is_empty() {
            return;
        }
        // Measured through one that has turned out to be slow, or is gone, and nobody can
        // tell: to be measured again, before those that are slow.
        let doubtful =
            |by: AgentId| slow.contains(&by) || by != 0 && !self.agents.contains_key(&by);
        let by = |agent: &AgentId| self.agents.get(agent)?.speed.map(|(_, by)| by);
        let doubtful = slow.iter().filter(|agent| by(agent).is_some_and(doubtful));
        for agent in doubtful.copied().collect::<Vec<_>>() {
            let one = self.agents.get_mut(&agent);
            if let Some((speed, _)) = one.and_then(|one| one.speed.take()) {
                self.speeds.remove(&(speed.to_bits(), agent));
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
        // Who serves, in order, with how many it has below it and where it is.
        let mut serving: Vec<(AgentId, usize, Option<Endpoint>)> = vec![(0, 0, None)];
        // How many of the first have no room.
        let mut full = 0;
        for agent in &self.order {
            let Some(one) = self.agents.get_mut(agent) else {
                continue;
            };
            let Some(own) = one.endpoint else { continue };
            while serving
                .get(full)
                .is_some_and(|(_, below, _)| *below >= self.arity)
            {
                full += 1;
            }
            // The first with room: by arity 1 the one before.
            let fits = |(parent, below, endpoint): &&mut (AgentId, usize, Option<Endpoint>)| {
                *below < self.arity
                    && !one.avoids(*parent)
                    && endpoint.is_none_or(|endpoint| endpoint.is_found_by(own.host))
            };
            let (parent, endpoint) = match serving[full..].iter_mut().find(fits) {
                Some((parent, below, endpoint)) => {
                    *below += 1;
                    (*parent, *endpoint)
                }
                // Nobody else is left.
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
        // An agent on trial may turn out to be one of the slow ones, which stand at the end.
        // There the sender never measures it, and no other agent would have its trial.
        let agents = &self.agents;
        let is_first = |agent: &AgentId| agents.get(agent).is_some_and(|one| one.parent == Some(0));
        self.tried.take_if(|tried| !is_first(tried));
        assigned
    }
}

#[cfg(test)]
mod tests;
