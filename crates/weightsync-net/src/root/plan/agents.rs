//! Agents: how they introduce themselves, which parent each gets, and how they leave.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use weightsync_core::Epoch;

use super::holdings::Holdings;
use super::{RootEffect, RootPlan};
use crate::agent::Item;
use crate::root::membership::{AgentDeparture, HostProcess, LinkLoss};
use crate::root::topology::{AgentEndpoint, AgentId, Assigned, LeftParent};
use crate::wire::message::{FromRoot, RefusalRemedy};

/// The reason for closing the link of an agent that claims more versions than its slots can hold.
const TOO_MUCH: &str = "it claims more versions than can exist";

/// One host's agent, as the sender knows it.
#[derive(Debug)]
pub(crate) struct AgentRecord {
    pub(crate) from: SocketAddr,
    /// What its first message said, once that has arrived.
    pub(crate) introduced: Option<Introduced>,
    /// The agent has said goodbye.
    pub(super) leaves: bool,
    /// Bytes that it has fetched.
    pub(crate) received: u64,
    /// The agents that got other bytes from this one than were published.
    pub(crate) altered_for: BTreeSet<AgentId>,
}

/// An agent that has introduced itself.
#[derive(Debug)]
pub(crate) struct Introduced {
    pub(crate) name: String,
    pub(crate) process: HostProcess,
    pub(crate) holds: Holdings,
}

impl AgentRecord {
    pub(super) fn new(from: SocketAddr) -> Self {
        Self {
            from,
            introduced: None,
            leaves: false,
            received: 0,
            altered_for: BTreeSet::new(),
        }
    }

    /// The versions that it reports to hold.
    pub(super) fn held(&self) -> impl Iterator<Item = Item> {
        let introduced = self.introduced.iter();
        introduced.flat_map(|one| one.holds.iter())
    }
}

impl RootPlan {
    /// An agent introduces itself: it gets the welcome and a parent, unless it is refused.
    pub(super) fn introduce(
        &mut self,
        agent: AgentId,
        (name, process): (String, HostProcess),
        bulk: Option<u16>,
        seen: Epoch,
        holds: Vec<Item>,
    ) {
        let got = self.run.epoch;
        // Its workers have seen a newer sender. This one was replaced, and must not get them back.
        if seen > got {
            let refused = FromRoot::Refused {
                reason: format!("this sender has {got}, but {seen} was seen before"),
                remedy: RefusalRemedy::Fenced { seen, got },
            };
            self.send(agent, refused);
            // With `flush`: the refusal has to arrive before the link closes.
            self.remove_agent(agent, LinkLoss::Silent, "it was refused".into(), true);
            return;
        }
        let mut held = Holdings::new(self.models.len());
        if !held.change(holds, Vec::new()) {
            self.drop_agent(agent, TOO_MUCH);
            return;
        }
        let Some(known) = self.agents.get_mut(&agent) else {
            return;
        };
        // The agent names only its port. The address is the one that this end sees: no agent can
        // send the others to an address of its choice.
        let endpoint = bulk.map(|port| AgentEndpoint {
            address: SocketAddr::new(known.from.ip(), port),
            host: process.host,
        });
        known.introduced = Some(Introduced {
            name,
            process,
            holds: held,
        });
        // Before the parent, because an agent that joins takes nothing but the welcome and the
        // models.
        self.effects.push(RootEffect::Welcome(agent));
        let assigned = self.topology.join(agent, endpoint);
        self.assign(assigned);
    }

    /// An agent has gained and dropped versions. What it gained may be due for a comparison, and
    /// its workers that run nothing yet may begin with it.
    pub(super) fn note_holdings(&mut self, agent: AgentId, have: Vec<Item>, dropped: Vec<Item>) {
        let known = self.agents.get_mut(&agent);
        if let Some(known) = known.and_then(|one| one.introduced.as_mut())
            && !known.holds.change(have.clone(), dropped)
        {
            self.drop_agent(agent, TOO_MUCH);
            return;
        }
        self.compare_kept(agent, &have);
        if !have.is_empty() {
            for worker in self.fresh_at(agent) {
                self.begin_with_what_is_there((agent, worker));
            }
        }
    }

    /// An agent has fetched from its parent. The speed may give agents other parents.
    pub(super) fn note_received(
        &mut self,
        (parent, agent): (AgentId, AgentId),
        bytes: u64,
        busy: Duration,
    ) {
        if let Some(known) = self.agents.get_mut(&agent) {
            // The agent reports these numbers, so they may be anything.
            known.received = known.received.saturating_add(bytes);
        }
        let assigned = self.topology.measured(parent, agent, bytes, busy);
        // Relays pass on what they get, so one codec serves all hosts behind them. The slowest link
        // decides which one.
        let rate = self.topology.slowest().unwrap_or(0.0);
        self.effects.push(RootEffect::NoteRate(rate as u64));
        self.assign(assigned);
    }

    /// An agent got other bytes from a relay than were published: it fetches there no more, and the
    /// relay is named. Only the agent that reports this gets another parent: otherwise an agent
    /// that lies could take honest relays from the others. An agent can accuse only its own parent.
    pub(super) fn altered(&mut self, agent: AgentId, parent: AgentId, item: Item, block: u32) {
        let assigned = self
            .topology
            .leave_parent(agent, parent, LeftParent::Altered);
        // A new assignment follows only if the agent had this parent. So an accusation of another
        // relay has no effect.
        let is_its_parent = parent != 0 && !assigned.is_empty();
        self.assign(assigned);
        let Some(relay) = self.agents.get_mut(&parent).filter(|_| is_its_parent) else {
            return;
        };
        relay.altered_for.insert(agent);
        let name = |agent| {
            let one: Option<&AgentRecord> = self.agents.get(&agent);
            let name = one.and_then(|one| Some((&one.introduced.as_ref()?.name, one.from.ip())));
            name.map_or_else(
                || format!("agent {agent}"),
                |(name, at)| format!("{name} ({at}, agent {agent})"),
            )
        };
        tracing::warn!(
            "the relay {} sent block {block} of {} {} other than it was published, says {}, which \
             does not fetch from it any more: find out who runs that relay",
            name(parent),
            self.models.get(item.model).map_or("", |name| name),
            item.version,
            name(agent),
        );
    }

    /// Tells agents their new parents.
    pub(super) fn assign(&mut self, assigned: Vec<Assigned>) {
        for one in assigned {
            let parent = FromRoot::Parent {
                agent: one.parent,
                address: one.address.map(|address| address.to_string()),
            };
            self.send(one.agent, parent);
        }
    }

    /// Removes an agent that breaks the protocol.
    pub(super) fn drop_agent(&mut self, agent: AgentId, cause: &'static str) {
        self.effects.push(RootEffect::Warn(agent, cause));
        self.remove_agent(agent, LinkLoss::Silent, cause.into(), false);
    }

    /// Removes an agent: its children get other parents, and its workers are given up, reached
    /// again at an earlier agent, or have some time to return.
    pub(super) fn remove_agent(
        &mut self,
        agent: AgentId,
        how: LinkLoss,
        reason: String,
        flush: bool,
    ) {
        // First, while the agent's name is still known.
        let checked = self.scrubs.gone(agent);
        self.checked(&checked);
        // This end may have closed the link already, and the end of the link is an event too.
        let Some(gone) = self.agents.remove(&agent) else {
            return;
        };
        // Agent numbers are never used again, so nothing may be left under this one.
        for worker in self.fresh_at(agent) {
            self.fresh.remove(&(agent, worker));
        }
        // After a goodbye it does not matter how the connection ended.
        let how = if gone.leaves { LinkLoss::Left } else { how };
        let introduced = gone.introduced.map(|one| (one.name, one.process));
        let (name, process) = introduced.unzip();
        self.effects.push(RootEffect::Close {
            agent,
            name,
            reason,
            flush,
        });
        let AgentDeparture { over, back } =
            self.membership.remove_agent(agent, process, how, self.now);
        for (one, departure) in over {
            self.leave(one.worker, departure);
        }
        let assigned = self.topology.leave(agent);
        self.assign(assigned);
        for worker in back {
            self.reach_again(worker);
        }
        self.retry_waiting();
    }
}
