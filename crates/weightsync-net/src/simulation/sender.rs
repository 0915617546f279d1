//! The simulated sender: its publications, its mailboxes, and its messages. Its decisions are
//! those of the real [`RootPlan`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use weightsync_core::{Epoch, Run, Version, WorkerId};
use weightsync_mem::Departure;

use super::agent::{Parent, ROOT};
use super::clock::{MS, SECOND, Time};
use super::network::Node;
use super::{Event, World};
use crate::agent::Item;
use crate::root::membership::MembershipWaiter;
use crate::root::plan::{Mailbox, RootEffect, RootInput, RootPlan};
use crate::root::topology::AgentId;
use crate::wire::message::{Delivery, FromRoot, Welcome, WorkerJoin};

pub(super) const RUN: Run = Run {
    epoch: Epoch(1),
    id: [0; 16],
};

pub(super) struct Sender {
    /// Bytes of a version of each model.
    pub(super) sizes: Vec<u64>,
    pub(super) versions: Vec<u64>,
    pub(super) sequence: u64,
    pub(super) plan: RootPlan,
    /// The mailbox of each member.
    pub(super) readers: BTreeMap<WorkerId, RemoteReader>,
    /// The machine of each agent.
    pub(super) nodes: BTreeMap<AgentId, Node>,
    last_agent: AgentId,
    /// When the plan's next time is, if that is scheduled.
    due: Option<Duration>,
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
    /// Everything put in its queue since it has this membership.
    pub(super) desired: Vec<u64>,
}

impl Sender {
    pub(super) fn new(sizes: Vec<u64>, arity: usize) -> Self {
        Self {
            versions: vec![0; sizes.len()],
            plan: RootPlan::new(RUN, vec![String::new(); sizes.len()], arity),
            sizes,
            sequence: 0,
            readers: BTreeMap::new(),
            nodes: BTreeMap::new(),
            last_agent: 0,
            due: None,
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
        self.versions[item.model] == item.version.0 || self.readers.values().any(kept)
    }

    /// The agents above one, from the first below the sender down to itself.
    pub(super) fn path(&self, agent: AgentId) -> Vec<AgentId> {
        let parents: BTreeMap<_, _> = self.plan.topology.parents().collect();
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
            desired: Vec::new(),
        }
    }

    /// The worker is reached by another route.
    fn start_over(&mut self) {
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
        for reader in self.sender.readers.values_mut() {
            reader.publish(notified.clone());
        }
        let workers = self.sender.readers.keys().copied().collect();
        self.step_root(RootInput::Changed(workers));
    }

    /// The sender notes what has happened, and performs what follows from it.
    pub(super) fn step_root(&mut self, input: RootInput) {
        let now = Duration::from_micros(self.clock.now());
        let mut effects = self.sender.plan.step(now, [input]);
        let mut more = Vec::new();
        while !effects.is_empty() {
            for effect in effects {
                more.extend(self.perform_root(effect));
            }
            effects = self.sender.plan.step(now, more.drain(..));
        }
        let due = self.sender.plan.due();
        if let Some(due) = due.filter(|due| self.sender.due != Some(*due)) {
            self.sender.due = Some(due);
            let pause = due.saturating_sub(now).as_micros() as Time;
            self.clock.after(pause.max(MS), Event::RootTime);
        }
    }

    /// It is time for what the plan has put off.
    pub(super) fn root_time(&mut self) {
        let now = Duration::from_micros(self.clock.now());
        self.sender.due.take_if(|due| *due <= now);
        self.step_root(RootInput::Time);
    }

    fn perform_root(&mut self, effect: RootEffect) -> Option<RootInput> {
        match effect {
            RootEffect::Send(agent, message) => {
                if let FromRoot::Denied { .. } = message {
                    self.counts.denied += 1;
                }
                if let FromRoot::Parent { agent: parent, .. } = message {
                    self.note_assigned(parent);
                }
                self.send_to(agent, message);
            }
            RootEffect::Welcome(agent) => self.send_to(agent, welcome(agent)),
            RootEffect::ExpectSign(agent) => self.expect_sign(agent),
            RootEffect::Close { agent, .. } => {
                self.sender.nodes.remove(&agent);
            }
            RootEffect::Admit(joiner) => return self.admit(joiner),
            RootEffect::StartOver(worker) => self.reader(worker).start_over(),
            RootEffect::Progress(progress) => {
                let worker = progress.who.worker;
                self.reader(worker).progress(progress.taken);
                return Some(RootInput::Changed(BTreeSet::from([worker])));
            }
            RootEffect::Leave(worker, departure) => {
                self.sender.readers.remove(&worker).expect("it is a member");
                match departure {
                    Departure::Died => self.counts.died += 1,
                    Departure::Lost => self.counts.lost += 1,
                    Departure::Left => {}
                }
            }
            RootEffect::Read(workers) => return Some(self.read(workers)),
            // Links have a known speed, and versions are what was published.
            RootEffect::NoteRate(_) | RootEffect::FindDigests(_) => {}
            // Agents keep to the protocol, no worker asks questions, and nobody asks for a scrub.
            RootEffect::Warn(..)
            | RootEffect::Unusable(..)
            | RootEffect::Ask(..)
            | RootEffect::Withdraw(_)
            | RootEffect::Spoil(_)
            | RootEffect::AnswerScrub { .. } => panic!("{effect:?}"),
        }
        None
    }

    fn reader(&mut self, worker: WorkerId) -> &mut RemoteReader {
        let reader = self.sender.readers.get_mut(&worker);
        reader.expect("it is a member")
    }

    /// The segment admits a worker, unless it has one of this number.
    fn admit(&mut self, joiner: MembershipWaiter<WorkerJoin>) -> Option<RootInput> {
        if self.sender.readers.contains_key(&joiner.who.worker) {
            let denied = FromRoot::Denied {
                ticket: joiner.asks.ticket,
                reason: "already connected".into(),
            };
            return self.perform_root(RootEffect::Send(joiner.agent, denied));
        }
        let mut reader = RemoteReader::new(joiner.asks.delivery);
        if self.sender.sequence > 0 {
            reader.publish((self.sender.sequence, self.sender.set()));
        }
        self.sender.readers.insert(joiner.who.worker, reader);
        Some(RootInput::Admitted(joiner))
    }

    fn read(&mut self, workers: BTreeSet<WorkerId>) -> RootInput {
        let mailboxes = workers.into_iter().map(|worker| {
            let mailbox = Mailbox {
                sets: self.reader(worker).new_sets(),
                answer: None,
            };
            (worker, mailbox)
        });
        RootInput::Mailboxes {
            mailboxes: mailboxes.collect(),
            sent_to_all: (self.sender.sequence, self.sender.set()),
        }
    }

    /// An agent has connected.
    pub(super) fn connected(&mut self, node: Node) -> AgentId {
        self.sender.last_agent += 1;
        let agent = self.sender.last_agent;
        self.sender.nodes.insert(agent, node);
        let from = address(node, 0);
        self.step_root(RootInput::Connected { agent, from });
        agent
    }

    /// When the next version may follow so that all agents get this one over the longest path.
    /// Includes what an agent on the path may have to finish first.
    pub(super) fn time_for_all(&self) -> Time {
        let agents = self.sender.plan.topology.parents().map(|(agent, _)| agent);
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
    FromRoot::Welcome(Welcome {
        run: RUN,
        agent,
        address: String::new(),
        models: 1,
        slots: 2,
        max_slots: 8,
        pid: 1,
        settings: String::new(),
    })
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
