//! A simulated agent: its state, and how it handles messages, as in the driver.

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::WorkerId;
use weightsync_mem::{Backoff, Delivery, WorkerInstance};

use super::clock::MS;
use super::network::Node;
use super::{Event, World, sender};
use crate::agent::Item;
use crate::agent::plan::{PlanInput, RelayPlan};
use crate::root::topology::AgentId;
use crate::wire::message::{FromRoot, ToRoot, WorkerJoin, WorkerProgress};

/// One agent's process.
pub(super) struct Agent {
    /// The number of this agent of its machine, from 1.
    pub(super) life: u64,
    pub(super) plan: RelayPlan,
    /// Whether others can fetch from it.
    serves: bool,
    /// Whether it is the process of its only worker.
    pub(super) own: bool,
    pub(super) link: Option<AgentId>,
    /// The pauses between attempts to reach the sender.
    pub(super) dials: Backoff,
    pub(super) parent: Option<Parent>,
    /// Blocks that have arrived, from the first on.
    pub(super) coming: BTreeMap<Item, u32>,
    pub(super) whole: BTreeSet<Item>,
    /// The transfers under way.
    pub(super) fetching: BTreeMap<Item, Fetching>,
    pub(super) backoff: Option<Backoff>,
    /// The lost parent to report when it is time, and how many there have been.
    pub(super) complain: Option<AgentId>,
    pub(super) complaints: u64,
    workers: BTreeMap<WorkerId, (WorkerInstance, Delivery)>,
    /// Workers that wait for the sender's reply, by ticket.
    joining: BTreeMap<u64, (WorkerInstance, Delivery)>,
    tickets: u64,
}

/// A transfer under way, as its agent knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetching {
    pub(super) number: u64,
    /// The fetch goes to the sender instead of the parent.
    pub(super) instead: bool,
}

/// The source of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parent {
    pub(super) agent: AgentId,
    pub(super) node: Node,
    pub(super) life: u64,
}

pub(super) const ROOT: Parent = Parent {
    agent: 0,
    node: 0,
    life: 0,
};

/// The driver's pauses, each time the same.
pub(super) fn backoff(node: Node, life: u64) -> Backoff {
    let (first, longest) = crate::agent::PAUSES;
    Backoff::seeded(first, longest, node as u64 ^ life << 32)
}

impl World {
    /// This life of a machine's agent.
    pub(super) fn agent(&mut self, node: Node, life: u64) -> Option<&mut Agent> {
        self.hosts[node]
            .agent
            .as_mut()
            .filter(|agent| agent.life == life)
    }

    /// The machine's agent, which exists.
    pub(super) fn agent_of(&mut self, node: Node) -> &mut Agent {
        self.hosts[node].agent.as_mut().expect("an agent is there")
    }

    /// An agent starts, and the workers of the machine join it.
    pub(super) fn start_agent(&mut self, node: Node) {
        let host = &mut self.hosts[node];
        host.lives += 1;
        let (life, serves, own) = (host.lives, host.serves, host.own);
        host.agent = Some(Agent {
            life,
            plan: RelayPlan::new(),
            serves,
            own,
            link: None,
            dials: backoff(node, life),
            parent: None,
            coming: BTreeMap::new(),
            whole: BTreeSet::new(),
            fetching: BTreeMap::new(),
            backoff: None,
            complain: None,
            complaints: 0,
            workers: BTreeMap::new(),
            joining: BTreeMap::new(),
            tickets: 0,
        });
        for (who, delivery) in self.workers_of(node) {
            self.ask_in(node, who, delivery);
        }
        self.disturb();
        self.clock
            .after(self.network.latency, Event::Dial { node, life });
    }

    /// The agent has reached the sender.
    pub(super) fn linked(&mut self, node: Node, link: AgentId) {
        let agent = self.agent_of(node);
        agent.link = Some(link);
        agent.dials.reset();
        let (life, serves, own) = (agent.life, agent.serves, agent.own);
        let holds = agent.whole.iter().copied().collect();
        // The agent of a single worker has that worker's process.
        let pid = if own { 1000 + life as u32 } else { 1 };
        self.send(
            node,
            ToRoot::Agent {
                name: String::new(),
                host: [node as u8; 16],
                pid,
                bulk: serves.then_some(life as u16),
                seen: weightsync_core::Epoch(1),
                holds,
                run: Some(sender::RUN),
            },
        );
    }

    /// A worker attaches.
    pub(super) fn ask_in(&mut self, node: Node, who: WorkerInstance, delivery: Delivery) {
        let Some(agent) = self.hosts[node].agent.as_mut() else {
            return;
        };
        agent.tickets += 1;
        let ticket = agent.tickets;
        agent.joining.insert(ticket, (who, delivery));
        // Before the welcome, the worker is announced with the others.
        if agent.link.is_some() {
            self.send_join(node, ticket, who, delivery);
        }
    }

    fn send_join(&mut self, node: Node, ticket: u64, who: WorkerInstance, delivery: Delivery) {
        let agent = self.agent_of(node);
        let pid = match agent.own {
            true => 1000 + agent.life as u32,
            false => 2000 + who.instance as u32,
        };
        self.send(
            node,
            ToRoot::Join(WorkerJoin {
                ticket,
                who,
                pid,
                models: u64::MAX,
                delivery,
                device: String::new(),
                seen: weightsync_core::Epoch(1),
            }),
        );
    }

    /// Handles a message of the sender.
    pub(super) fn on_root_message(&mut self, node: Node, message: FromRoot) {
        let agent = self.agent_of(node);
        match message {
            FromRoot::Welcome(_) => self.come_back(node),
            FromRoot::Joined { ticket } => {
                if let Some((who, delivery)) = agent.joining.remove(&ticket)
                    && agent.workers.insert(who.worker, (who, delivery)).is_none()
                {
                    self.disturb();
                    self.step(node, vec![PlanInput::Joined { who, delivery }]);
                }
            }
            FromRoot::Denied { ticket, .. } => {
                if let Some((who, delivery)) = agent.joining.remove(&ticket) {
                    let again = Event::Attach {
                        node,
                        who,
                        delivery,
                    };
                    self.clock.after(200 * MS, again);
                }
            }
            FromRoot::Notify {
                sequence,
                set,
                workers,
            } => {
                let known = workers.iter().filter_map(|one| agent.workers.get(one));
                let inputs = known.map(|(who, _)| PlanInput::Notified {
                    who: *who,
                    sequence,
                    set: set.clone(),
                });
                let inputs = inputs.collect();
                self.step(node, inputs);
            }
            FromRoot::Parent { agent, address } => {
                let address = address.map(|one| one.parse().expect("an address"));
                self.follow(node, sender::parent(agent, address));
            }
            _ => {}
        }
    }

    /// Tells the sender again which workers are here, and how far they are.
    fn come_back(&mut self, node: Node) {
        let agent = self.agent_of(node);
        let known: Vec<_> = agent.workers.values().copied().collect();
        for (who, delivery) in known {
            let agent = self.agent_of(node);
            agent.tickets += 1;
            let ticket = agent.tickets;
            agent.joining.insert(ticket, (who, delivery));
        }
        let joining = self.agent_of(node).joining.clone();
        for (ticket, (who, delivery)) in joining {
            self.send_join(node, ticket, who, delivery);
        }
        for (who, _) in self.workers_of(node) {
            self.send_progress(node, who);
        }
        let agent = self.agent_of(node);
        if agent.complain.is_some() {
            let (life, number) = (agent.life, agent.complaints);
            self.clock.after(0, Event::Complain { node, life, number });
        }
    }

    pub(super) fn send_progress(&mut self, node: Node, who: WorkerInstance) {
        let taken = self.hosts[node].taken(who);
        let progress = WorkerProgress {
            who,
            taken,
            through: 0,
            loaded: taken,
            versions: Vec::new(),
            refused: None,
        };
        let workers = vec![progress];
        self.send(node, ToRoot::Progress { workers });
    }

    /// A worker has gone.
    pub(super) fn worker_left(&mut self, node: Node, who: WorkerInstance, died: bool) {
        let Some(agent) = self.hosts[node].agent.as_mut() else {
            return;
        };
        agent.joining.retain(|_, (one, _)| *one != who);
        let known = agent.workers.get(&who.worker);
        if known.is_some_and(|(one, _)| *one == who) {
            agent.workers.remove(&who.worker);
        }
        self.send(node, ToRoot::Gone { who, died });
        self.step(node, vec![PlanInput::Left { who }, PlanInput::MayHaveRoom]);
    }

    fn follow(&mut self, node: Node, parent: Parent) {
        let agent = self.agent_of(node);
        if agent.parent == Some(parent) && !agent.fetching.is_empty() {
            return;
        }
        let mut inputs = Vec::new();
        if agent.parent == Some(ROOT) {
            // The fetches of sets to finish go on at the sender.
            let plan = &agent.plan;
            let fetching = agent.fetching.iter_mut();
            let firsts = fetching.filter(|(item, one)| !one.instead && plan.is_first(item));
            let firsts: Vec<(Item, u64)> = firsts
                .map(|(item, one)| {
                    one.instead = true;
                    (*item, one.number)
                })
                .collect();
            for (item, number) in firsts {
                inputs.push(PlanInput::FromSender { item });
                if let Some(transfer) = self.transfers.get_mut(&number) {
                    transfer.instead = true;
                }
            }
        }
        self.leave_parent(node);
        let agent = self.agent_of(node);
        agent.parent = Some(parent);
        agent.complain = None;
        inputs.extend([PlanInput::NoParent, PlanInput::Parent]);
        self.step(node, inputs);
    }
}
