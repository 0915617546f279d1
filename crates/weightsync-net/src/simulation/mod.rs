//! A sender, its agents and their workers, in virtual time.
//!
//! These parts are real: the decisions (the agent's [`RelayPlan`](crate::agent::plan::RelayPlan)
//! and the sender's [`RootPlan`](crate::root::plan::RootPlan)) and the messages of control links.
//! These parts are simulated: the code around the decisions in an agent's driver; the sender's
//! mailboxes and queues; machines with one agent and up to three workers each; links with a rate
//! and a latency that are cut, fall silent, and come back; and transfers in blocks that are passed
//! on as they arrive.
//!
//! These parts are absent: TCP (a block takes its bytes at the slower end's rate; a machine's
//! link sends and receives in order; a slow receiver holds up nobody else); several connections
//! of one fetch; the machine itself (memory, slots, threads, clocks that differ); handshakes
//! and their limits; wrong bytes; questions of workers; a sender that dies; and several agents
//! on one machine.

mod agent;
mod bulk;
mod clock;
mod control;
mod ends;
mod network;
mod perform;
mod rules;
mod schedule;
mod sender;

use std::collections::BTreeMap;

use weightsync_mem::{Delivery, WorkerInstance};

use self::agent::Agent;
use self::bulk::Transfer;
use self::clock::{Clock, Dice, Time};
use self::control::{Control, Envelope};
use self::network::{Health, Network, Node};
use self::rules::{Counts, Facts};
use self::schedule::{Op, Options};
use self::sender::Sender;
use crate::root::membership::LinkLoss;
use crate::root::topology::AgentId;

/// A future event.
#[derive(Debug)]
enum Event {
    /// An agent tries to reach the sender.
    Dial { node: Node, life: u64 },
    /// A message arrives.
    Delivered { link: AgentId, envelope: Envelope },
    /// Messages that were held up arrive.
    Flush { link: AgentId },
    /// An end learns that a link has ended.
    LinkEnded { link: AgentId, at_root: bool },
    /// The sender waits for a sign of life on a link.
    Sign { link: AgentId },
    /// An end finds a link silent.
    Suspect {
        link: AgentId,
        since: Time,
        at_root: bool,
    },
    /// What the sender's plan has put off is due.
    RootTime,
    /// A fetch reaches its parent.
    Asked { number: u64 },
    /// The first byte of a block has arrived.
    Begins { number: u64 },
    /// A block has arrived.
    Block { number: u64 },
    /// A child learns that its parent does not have the version.
    NotThere { number: u64 },
    /// A child's connection has ended.
    Broken { number: u64 },
    /// A child finds that its connection is silent.
    Doubt { number: u64, since: Time },
    /// A parent learns that a child has hung up.
    HungUp { number: u64 },
    /// A parent has asked above for long enough.
    Patience { number: u64 },
    /// It is time to report a lost parent.
    Complain { node: Node, life: u64, number: u64 },
    /// There may be room.
    Room { node: Node, life: u64 },
    /// A worker attaches to its machine's agent.
    Attach {
        node: Node,
        who: WorkerInstance,
        delivery: Delivery,
    },
    /// A worker has taken its notification.
    Taken { node: Node, who: WorkerInstance },
    /// An operation of the schedule.
    Op(Op),
}

/// One machine.
struct Host {
    agent: Option<Agent>,
    /// How many agents the machine has had.
    lives: u64,
    /// Whether other machines can reach its agent.
    serves: bool,
    /// Whether its agent is the process of its only worker.
    own: bool,
    workers: Vec<Worker>,
}

struct Worker {
    who: WorkerInstance,
    delivery: Delivery,
    alive: bool,
    notified: u64,
    /// The machine and life of the agent that notified it last.
    told_by: (Node, u64),
    taken: u64,
}

impl Host {
    fn worker(&mut self, who: WorkerInstance) -> Option<&mut Worker> {
        let mut all = self.workers.iter_mut();
        all.find(|worker| worker.who == who && worker.alive)
    }

    fn taken(&mut self, who: WorkerInstance) -> u64 {
        self.worker(who).map_or(0, |worker| worker.taken)
    }
}

struct World {
    options: Options,
    clock: Clock<Event>,
    dice: Dice,
    network: Network,
    sender: Sender,
    /// By node; the sender's has no agent.
    hosts: Vec<Host>,
    controls: BTreeMap<AgentId, Control>,
    transfers: BTreeMap<u64, Transfer>,
    last_transfer: u64,
    facts: Facts,
    counts: Counts,
}

impl World {
    fn handle(&mut self, event: Event) {
        match event {
            Event::Dial { node, life } => self.dial(node, life),
            Event::Delivered { link, envelope } => self.delivered(link, envelope),
            Event::Flush { link } => self.flush(link),
            Event::LinkEnded { link, at_root } => self.link_ended(link, at_root, LinkLoss::HungUp),
            Event::Sign { link } => self.sign(link),
            Event::Suspect {
                link,
                since,
                at_root,
            } => self.suspect(link, since, at_root),
            Event::RootTime => self.root_time(),
            Event::Asked { number } => self.asked(number),
            Event::Begins { number } => self.begins(number),
            Event::Block { number } => self.block(number),
            Event::NotThere { number } => self.not_there(number),
            Event::Broken { number } => self.broken(number),
            Event::Doubt { number, since } => self.doubt(number, since),
            Event::HungUp { number } => self.hung_up(number),
            Event::Patience { number } => self.patience(number),
            Event::Complain { node, life, number } => self.complain(node, life, number),
            Event::Room { node, life } => {
                if self.agent(node, life).is_some() {
                    self.step(node, vec![crate::agent::plan::PlanInput::MayHaveRoom]);
                }
            }
            Event::Attach {
                node,
                who,
                delivery,
            } => {
                if self.hosts[node].worker(who).is_some() {
                    self.ask_in(node, who, delivery);
                }
            }
            Event::Taken { node, who } => self.taken(node, who),
            Event::Op(op) => self.operate(op),
        }
    }

    fn workers_of(&self, node: Node) -> Vec<(WorkerInstance, Delivery)> {
        let alive = self.hosts[node].workers.iter().filter(|one| one.alive);
        alive.map(|one| (one.who, one.delivery)).collect()
    }

    fn taken(&mut self, node: Node, who: WorkerInstance) {
        let Some(worker) = self.hosts[node].worker(who) else {
            return;
        };
        worker.taken = worker.notified;
        if self.hosts[node].agent.is_some() {
            self.send_progress(node, who);
            self.step(node, vec![crate::agent::plan::PlanInput::MayHaveRoom]);
        }
    }

    /// A worker of a machine starts (again).
    fn start_worker(&mut self, node: Node, index: usize) {
        self.facts.instances += 1;
        let instance = self.facts.instances;
        let host = &mut self.hosts[node];
        let worker = &mut host.workers[index];
        worker.alive = true;
        worker.who.instance = instance;
        worker.notified = 0;
        worker.taken = 0;
        let (who, delivery) = (worker.who, worker.delivery);
        match host.agent {
            Some(_) => self.ask_in(node, who, delivery),
            None => self.start_agent(node),
        }
    }

    fn end_worker(&mut self, node: Node, index: usize, died: bool) {
        let worker = &mut self.hosts[node].workers[index];
        if !std::mem::take(&mut worker.alive) {
            return;
        }
        let who = worker.who;
        self.disturb();
        match self.hosts[node].own {
            true => self.end_agent(node, !died),
            false => self.worker_left(node, who, died),
        }
    }

    /// An agent dies, or leaves in order.
    fn end_agent(&mut self, node: Node, in_order: bool) {
        let Some(life) = self.hosts[node].agent.as_ref().map(|one| one.life) else {
            return;
        };
        if in_order {
            self.send(node, crate::wire::message::ToRoot::Goodbye);
        }
        self.disturb();
        self.transfers_end(node, life);
        let agent = self.hosts[node].agent.take();
        if let Some(link) = agent.and_then(|agent| agent.link) {
            self.close_link(link, false);
        }
        if self.hosts[node].own {
            self.hosts[node].workers[0].alive = false;
        }
    }

    /// A machine falls silent, and everything on it dies.
    fn vanish(&mut self, node: Node) {
        self.set_health(node, Health::Silent);
        self.end_agent(node, false);
        for worker in &mut self.hosts[node].workers {
            worker.alive = false;
        }
    }

    /// A worker of a machine that has vanished starts on another.
    fn move_worker(&mut self, from: Node, index: usize, to: Node) {
        let host = &mut self.hosts[from];
        let dead = host.workers.get(index).is_some_and(|one| !one.alive);
        if !dead || from == to || self.hosts[to].own {
            return;
        }
        let host = &mut self.hosts[from];
        // The worker that starts there is not the agent's process.
        host.own = false;
        let worker = host.workers.remove(index);
        self.hosts[to].workers.push(worker);
        self.disturb();
        self.start_worker(to, self.hosts[to].workers.len() - 1);
    }

    /// Sets the health of a machine's link.
    fn set_health(&mut self, node: Node, health: Health) {
        self.network.set(node, health, self.clock.now());
        self.disturb();
        self.links_change(|one| one == node);
        self.transfers_change(|one, other| one == node || other == node);
    }

    /// Sets the health between two machines.
    fn set_health_between(&mut self, one: Node, other: Node, health: Health) {
        let now = self.clock.now();
        self.network.set_between(one, other, health, now);
        self.disturb();
        self.transfers_change(|a, b| (a, b) == (one, other) || (b, a) == (one, other));
    }

    /// Everything is well again, and every worker that should live does.
    fn heal(&mut self) {
        self.network.heal(self.options.apart, self.clock.now());
        self.disturb();
        self.links_change(|_| true);
        self.transfers_change(|_, _| true);
        for node in 1..self.hosts.len() {
            for index in 0..self.hosts[node].workers.len() {
                if !self.hosts[node].workers[index].alive {
                    self.start_worker(node, index);
                }
            }
            if self.hosts[node].agent.is_none() {
                self.start_agent(node);
            }
        }
    }
}

mod tests;
