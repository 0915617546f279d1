//! The simulated sender: its publications, its agents and workers, and its messages. It decides
//! as the coordinator does, with the same [`Topology`] and [`Membership`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use weightsync_core::{Epoch, Run, Version, WorkerId};
use weightsync_mem::Departure;

use super::agent::{Parent, ROOT};
use super::clock::{MS, SECOND, Time};
use super::network::Node;
use super::{Event, World};
use crate::relay::Item;
use crate::root::membership::{
    AgentDeparture, JoinOutcome, LeaveOutcome, LinkLoss, Membership, Process, Waiter,
};
use crate::root::recent::Recent;
use crate::root::topology::{AgentId, Assigned, Endpoint, LeftParent, Topology};
use crate::wire::message::{Delivery, FromRoot, ToRoot};

pub(super) const RUN: Run = Run {
    epoch: Epoch(1),
    id: [0; 16],
};

pub(super) struct Sender {
    /// Bytes of a version of each model.
    pub(super) sizes: Vec<u64>,
    pub(super) versions: Vec<u64>,
    pub(super) sequence: u64,
    pub(super) topology: Topology,
    pub(super) membership: Membership<RemoteReader, Asks>,
    recent: Recent,
    pub(super) agents: BTreeMap<AgentId, Known>,
    pub(super) last_agent: AgentId,
    /// When avoided parents are assigned again next, if that is scheduled.
    again: Option<Duration>,
}

/// An agent, as the sender knows it.
pub(super) struct Known {
    pub(super) node: Node,
    process: Option<Process>,
    leaves: bool,
    /// The versions that the agent reports to hold.
    holds: BTreeSet<Item>,
}

/// What a worker that asks for a membership wants.
#[derive(Debug)]
pub(super) struct Asks {
    ticket: u64,
    pid: u32,
    delivery: Delivery,
}

type Notified = (u64, Vec<Item>);

/// The sender's record of a worker elsewhere, like its mailbox in shared memory.
pub(super) struct RemoteReader {
    delivery: Delivery,
    /// For a worker that takes every version the sets that it has not taken; for others the newest.
    queue: VecDeque<Notified>,
    /// How much of the queue was handed out.
    handed: usize,
    /// The sets that wait for room in the queue.
    waiting: VecDeque<Notified>,
    notified: u64,
    /// The sequence number of the last older set that the worker may begin with, and whether it has
    /// taken nothing yet.
    begins: u64,
    is_fresh: bool,
    /// Everything put in its queue since it has this membership.
    pub(super) desired: Vec<u64>,
}

impl Sender {
    pub(super) fn new(sizes: Vec<u64>, arity: usize) -> Self {
        Self {
            versions: vec![0; sizes.len()],
            sizes,
            sequence: 0,
            topology: Topology::new(arity),
            membership: Membership::new(),
            recent: Recent::default(),
            agents: BTreeMap::new(),
            last_agent: 0,
            again: None,
        }
    }

    /// The newest set.
    pub(super) fn set(&self) -> Vec<Item> {
        let versions = self.versions.iter().enumerate();
        versions
            .filter(|(_, version)| **version > 0)
            .map(|(model, version)| Item {
                model,
                version: Version(*version),
            })
            .collect()
    }

    /// Whether the sender has a version, served or not.
    pub(super) fn keeps(&self, item: Item) -> bool {
        let kept = |remote_reader: &RemoteReader| {
            let mut sets = remote_reader.queue.iter().chain(&remote_reader.waiting);
            sets.any(|(_, set)| set.contains(&item))
        };
        self.versions[item.model] == item.version.0
            || self
                .membership
                .iter()
                .any(|(_, _, _, remote_reader)| kept(remote_reader))
    }

    /// The agents above one, from the first below the sender down to itself.
    pub(super) fn path(&self, agent: AgentId) -> Vec<AgentId> {
        let parents: BTreeMap<_, _> = self.topology.parents().collect();
        let mut path = vec![agent];
        let mut at = agent;
        while let Some(Some(parent)) = parents.get(&at).filter(|parent| **parent != Some(0)) {
            path.push(*parent);
            at = *parent;
            assert!(path.len() <= parents.len(), "a circle at {agent}");
        }
        path.reverse();
        path
    }
}

impl RemoteReader {
    fn new(delivery: Delivery) -> Self {
        Self {
            delivery,
            queue: VecDeque::new(),
            handed: 0,
            waiting: VecDeque::new(),
            notified: 0,
            begins: 0,
            is_fresh: delivery == Delivery::Newest,
            desired: Vec::new(),
        }
    }

    /// The worker is reached by another route.
    fn start_over(&mut self) {
        self.notified = 0;
        self.begins = 0;
        self.handed = 0;
    }

    fn publish(&mut self, notified: Notified) {
        let sequence = notified.0;
        let Delivery::Every { bound } = self.delivery else {
            self.queue = VecDeque::from([notified]);
            self.desired = vec![sequence];
            return;
        };
        let bound = usize::from(bound);
        if self.waiting.is_empty() && self.queue.len() < bound {
            self.queue.push_back(notified);
        } else if self.waiting.len() < bound {
            self.waiting.push_back(notified);
        } else {
            // The worker does not get this set, and the report says so.
            return;
        }
        self.desired.push(sequence);
    }

    /// The worker's new sets; for one that wants the newest, the newest.
    fn new_sets(&mut self) -> Vec<Notified> {
        let from = match self.delivery {
            Delivery::Every { .. } => self.handed,
            _ => 0,
        };
        self.handed = self.queue.len();
        self.queue.range(from..).cloned().collect()
    }

    fn progress(&mut self, taken: u64) {
        self.is_fresh &= taken == 0;
        let Delivery::Every { bound } = self.delivery else {
            return;
        };
        while self.handed > 0 && self.queue.front().is_some_and(|(at, _)| *at <= taken) {
            self.queue.pop_front();
            self.handed -= 1;
        }
        while self.queue.len() < bound.into()
            && let Some(notified) = self.waiting.pop_front()
        {
            self.queue.push_back(notified);
        }
    }
}

impl World {
    /// New versions of some models, a bit each, for every worker.
    pub(super) fn publish(&mut self, models: u64) {
        let models = (0..self.sender.sizes.len()).filter(|model| models & 1 << model != 0);
        let models: Vec<usize> = models.collect();
        for model in &models {
            self.keep_oldest(*model);
        }
        let bytes = models.iter().map(|model| self.sender.sizes[*model]).sum();
        for model in models {
            self.sender.versions[model] += 1;
        }
        self.sender.sequence += 1;
        self.note_publication(bytes);
        let notified = (self.sender.sequence, self.sender.set());
        let workers: BTreeSet<WorkerId> =
            self.sender.membership.iter().map(|admit| admit.0).collect();
        for (_, remote_reader) in self.sender.membership.iter_mut() {
            remote_reader.publish(notified.clone());
        }
        self.notify(workers);
    }

    pub(super) fn on_agent_message(&mut self, agent: AgentId, message: ToRoot) {
        let Some(known) = self.sender.agents.get_mut(&agent) else {
            return;
        };
        match message {
            ToRoot::Agent {
                host,
                pid,
                bulk,
                holds,
                ..
            } => {
                known.holds = holds.into_iter().collect();
                known.process = Some(Process { host, pid });
                let bulk = bulk.map(|port| Endpoint {
                    address: address(known.node, port),
                    host,
                });
                self.send_to(agent, welcome(agent));
                let assigned = self.sender.topology.join(agent, bulk);
                self.assign(&assigned);
            }
            ToRoot::Join {
                ticket,
                worker,
                instance,
                pid,
                delivery,
                ..
            } => self.join(Waiter {
                agent,
                worker,
                instance,
                asks: Asks {
                    ticket,
                    pid,
                    delivery,
                },
            }),
            ToRoot::Progress { workers } => {
                for one in workers {
                    let of = self
                        .sender
                        .membership
                        .member_at(agent, one.worker, one.instance);
                    if let Some(remote_reader) = of {
                        remote_reader.progress(one.taken);
                        self.notify(BTreeSet::from([one.worker]));
                    }
                }
            }
            ToRoot::Gone {
                worker,
                instance,
                died,
            } => {
                let now = Duration::from_micros(self.clock.now());
                let gone = self
                    .sender
                    .membership
                    .gone(agent, worker, instance, died, now);
                if let LeaveOutcome::Back(_) = gone {
                    self.is_back(worker);
                }
                self.late_when_due(now);
                self.retry_waiting();
            }
            ToRoot::Holds { have, dropped } => {
                known.holds.retain(|item| !dropped.contains(item));
                known.holds.extend(&have);
                if !have.is_empty() {
                    let membership = self.sender.membership.iter();
                    let here = membership.filter(|admit| admit.2 == Some(agent));
                    let here: Vec<WorkerId> = here.map(|admit| admit.0).collect();
                    self.begin_with_what_is_there(here);
                }
            }
            ToRoot::ParentLost { parent, .. } => {
                let now = Duration::from_micros(self.clock.now());
                let assigned = self
                    .sender
                    .topology
                    .lost(agent, parent, LeftParent::Failed { now });
                self.assign(&assigned);
                self.give_again_when_due();
            }
            ToRoot::Received {
                parent,
                bytes,
                micros,
                ..
            } => {
                let busy = Duration::from_micros(micros);
                let assigned = self.sender.topology.measured(parent, agent, bytes, busy);
                self.assign(&assigned);
            }
            ToRoot::Goodbye => known.leaves = true,
            _ => {}
        }
    }

    /// A worker asks to join.
    fn join(&mut self, joiner: Waiter<Asks>) {
        let agent = joiner.agent;
        match self
            .sender
            .membership
            .comes(agent, joiner.worker, joiner.instance)
        {
            JoinOutcome::Back(remote_reader) => {
                remote_reader.start_over();
                self.joined(agent, joiner.asks.ticket, joiner.worker);
                self.is_there(agent);
            }
            JoinOutcome::New(_) => self.admit(joiner),
            JoinOutcome::Waits(by) => {
                self.expect_sign(by);
                if let Some(earlier) = self.sender.membership.wait(joiner) {
                    self.deny(earlier);
                }
            }
            JoinOutcome::Two => self.deny(joiner),
        }
    }

    fn admit(&mut self, joiner: Waiter<Asks>) {
        let Waiter {
            agent,
            worker,
            instance,
            asks,
        } = joiner;
        let mut remote_reader = RemoteReader::new(asks.delivery);
        if self.sender.sequence > 0 {
            remote_reader.publish((self.sender.sequence, self.sender.set()));
        }
        let host = self.sender.agents[&agent].process.map(|one| one.host);
        let process = Process {
            host: host.unwrap_or_default(),
            pid: asks.pid,
        };
        let membership = &mut self.sender.membership;
        membership.put(agent, (worker, instance), process, remote_reader);
        self.joined(agent, asks.ticket, worker);
    }

    fn joined(&mut self, agent: AgentId, ticket: u64, worker: WorkerId) {
        self.send_to(agent, FromRoot::Joined { ticket });
        self.notify(BTreeSet::from([worker]));
    }

    fn deny(&mut self, joiner: Waiter<Asks>) {
        self.counts.denied += 1;
        let denied = FromRoot::Denied {
            ticket: joiner.asks.ticket,
            reason: "already connected".into(),
        };
        self.send_to(joiner.agent, denied);
    }

    /// An agent is alive.
    pub(super) fn is_there(&mut self, agent: AgentId) {
        for waiter in self.sender.membership.in_vain(agent) {
            self.deny(waiter);
        }
    }

    /// Admits waiting workers whose number may be free.
    fn retry_waiting(&mut self) {
        for waiter in self.sender.membership.may_come() {
            self.join(waiter);
        }
    }

    /// A worker is reached again by the agent at which it has been all the time.
    fn is_back(&mut self, worker: WorkerId) {
        if let Some((_, remote_reader)) = self.sender.membership.reached(worker) {
            remote_reader.start_over();
        }
        self.notify(BTreeSet::from([worker]));
        if let Some(waiter) = self.sender.membership.comes_again(worker) {
            self.join(waiter);
        }
    }

    fn notify(&mut self, workers: BTreeSet<WorkerId>) {
        let (sequence, set) = (self.sender.sequence, self.sender.set());
        self.sender.recent.note(sequence, set);
        let mut tells: BTreeMap<(AgentId, u64), (Vec<Item>, Vec<WorkerId>)> = BTreeMap::new();
        for &worker in &workers {
            let Some((agent, remote_reader)) = self.sender.membership.reached(worker) else {
                continue;
            };
            for (sequence, set) in remote_reader.new_sets() {
                if sequence > remote_reader.notified {
                    remote_reader.notified = sequence;
                    let (_, to) = tells.entry((agent, sequence)).or_insert((set, Vec::new()));
                    to.push(worker);
                }
            }
        }
        for ((agent, sequence), (set, workers)) in tells {
            let notify = FromRoot::Notify {
                sequence,
                set,
                workers,
            };
            self.send_to(agent, notify);
        }
        self.begin_with_what_is_there(workers);
    }

    /// Offers workers that run nothing yet an older set that their agent has.
    fn begin_with_what_is_there(&mut self, workers: impl IntoIterator<Item = WorkerId>) {
        for worker in workers {
            let Some((agent, remote_reader)) = self.sender.membership.reached(worker) else {
                continue;
            };
            let Some((_, set)) = remote_reader
                .queue
                .back()
                .filter(|_| remote_reader.is_fresh)
            else {
                continue;
            };
            let holds = &self.sender.agents[&agent].holds;
            let desired = (remote_reader.notified, &set[..]);
            let older = self
                .sender
                .recent
                .before(desired, |item| holds.contains(item));
            if let Some((sequence, set)) = older.filter(|(at, _)| *at > remote_reader.begins) {
                remote_reader.begins = sequence;
                let workers = vec![worker];
                let notify = FromRoot::Notify {
                    sequence,
                    set,
                    workers,
                };
                self.send_to(agent, notify);
            }
        }
    }

    pub(super) fn assign(&mut self, assigned: &[Assigned]) {
        for one in assigned {
            self.note_assigned(one);
            let parent = FromRoot::Parent {
                agent: one.parent,
                address: one.address.map(|address| address.to_string()),
            };
            self.send_to(one.agent, parent);
        }
    }

    /// The link to an agent has ended.
    pub(super) fn part(&mut self, agent: AgentId, how: LinkLoss) {
        let Some(gone) = self.sender.agents.remove(&agent) else {
            return;
        };
        let how = if gone.leaves { LinkLoss::Left } else { how };
        let now = Duration::from_micros(self.clock.now());
        let AgentDeparture { over, back } =
            self.sender.membership.part(agent, gone.process, how, now);
        let died = over.iter().filter(|(_, going)| *going == Departure::Died);
        self.counts.died += died.count();
        self.late_when_due(now);
        let assigned = self.sender.topology.leave(agent);
        self.assign(&assigned);
        for worker in back {
            self.is_back(worker);
        }
        self.retry_waiting();
    }

    /// Gives up workers that were not reached in time.
    pub(super) fn late(&mut self) {
        let now = Duration::from_micros(self.clock.now());
        self.counts.lost += self.sender.membership.late(now).len();
        // The rest is due later.
        self.late_when_due(now);
    }

    fn late_when_due(&mut self, now: Duration) {
        if let Some(due) = self.sender.membership.due() {
            let pause = due.saturating_sub(now).as_micros() as Time;
            self.clock.after(pause.max(MS), Event::Late);
        }
    }

    /// Allows avoided parents again.
    pub(super) fn again(&mut self) {
        let now = Duration::from_micros(self.clock.now());
        let assigned = self.sender.topology.again(now);
        self.assign(&assigned);
        self.give_again_when_due();
    }

    fn give_again_when_due(&mut self) {
        let due = self.sender.topology.due();
        if let Some(due) = due.filter(|due| self.sender.again != Some(*due)) {
            self.sender.again = Some(due);
            let pause = due.as_micros() as Time - self.clock.now();
            self.clock.after(pause, Event::Again);
        }
    }

    /// An agent has connected.
    pub(super) fn connected(&mut self, node: Node) -> AgentId {
        self.sender.last_agent += 1;
        let known = Known {
            node,
            process: None,
            leaves: false,
            holds: BTreeSet::new(),
        };
        self.sender.agents.insert(self.sender.last_agent, known);
        self.sender.last_agent
    }

    /// When the next version may follow so that all agents get this one over the longest path.
    /// Includes what an agent on the path may have to finish first.
    pub(super) fn time_for_all(&self) -> Time {
        let agents = self.sender.topology.parents().map(|(agent, _)| agent);
        let agents: Vec<AgentId> = agents.collect();
        let needs = agents.into_iter().map(|agent| self.time_for(agent));
        needs.max().unwrap_or(SECOND)
    }
}

/// Where a machine's agent listens; its life is the port.
pub(super) fn address(node: Node, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, node as u8], port))
}

fn welcome(agent: AgentId) -> FromRoot {
    FromRoot::Welcome {
        run: RUN,
        agent,
        address: String::new(),
        models: 1,
        slots: 2,
        max_slots: 8,
        pid: 1,
        verify: false,
    }
}

/// The parent named in an assignment.
pub(super) fn parent(agent: AgentId, address: Option<SocketAddr>) -> Parent {
    match address {
        None => ROOT,
        Some(SocketAddr::V4(address)) => Parent {
            agent,
            node: address.ip().octets()[3].into(),
            life: address.port().into(),
        },
        Some(SocketAddr::V6(address)) => panic!("nobody is at {address}"),
    }
}
