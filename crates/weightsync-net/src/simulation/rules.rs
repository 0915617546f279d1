//! The rules that must hold during a simulation and at its end.
//!
//! * A worker is notified only of sets that are whole at its agent, and the sequence numbers
//!   never go back at one agent. A worker that takes every version gets all that its queue
//!   took, in order.
//! * **Two in a row.** A publication is *due* for a worker that wants the newest under two
//!   conditions. First, nothing else happened from [`CALM`] before it until the next
//!   publication: no fault, no arrival, no departure, no new parent. Second, the next
//!   publication came no earlier than the time for all of this on the slowest link of the
//!   worker's path from the sender: the bytes of three whole sets, a block more for each agent
//!   on the path, two seconds, and the time to find out that a parent on it cannot be reached.
//!   Three sets, because each agent may first finish a version that was replaced. Of two due
//!   publications in a row, the worker must get one.
//! * **Nobody starves**, however fast sets are published. From each publication on, a worker
//!   that wants the newest gets a set, if nothing else happens from [`CALM`] before it until
//!   then. It gets the set in twice the time of the rule above, and as long again for each
//!   further child of the sender: of replaced versions the sender serves only the oldest, so
//!   its children take turns. If others take every version, the limit is three times that, as
//!   their old versions take their share of a slow link.
//! * At the end every living worker is at its newest set.
//! * The sender itself serves no more than its publications, to as many agents as were its
//!   children (the arity, while nothing breaks). In addition it may serve two whole sets for
//!   each time that an agent became its child, versions that no parent had, old versions for
//!   workers that take every one, and a block for each fetch that broke off.
//! * Agents with slow links that fetch anything stand behind those with fast links.

use std::collections::BTreeMap;

use weightsync_mem::{Delivery, WorkerInstance};

use super::World;
use super::bulk::{BLOCK_BYTES, STALLED};
use super::clock::{MS, SECOND, Time};
use super::network::{Node, taken};
use super::{Event, Worker};
use crate::agent::Item;
use crate::root::topology::AgentId;

/// Longer than any effect lasts after its cause is over.
const CALM: Time = 40 * SECOND;

#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) instances: u64,
    /// When anything happened except publications and transfers.
    disturbed: Vec<Time>,
    publications: Vec<Publication>,
    /// The notifications of each life of a worker.
    pub(super) notified: BTreeMap<WorkerInstance, Vec<u64>>,
    /// The times of these notifications.
    pub(super) notified_at: BTreeMap<WorkerInstance, Vec<Time>>,
    /// How many bytes the sender may serve, given what has happened.
    allowed: u64,
    pub(super) served: u64,
    /// The blocks served, by version and receiver.
    blocks: BTreeMap<(Item, Node), u64>,
}

#[derive(Debug)]
struct Publication {
    at: Time,
    sequence: u64,
    /// A worker may go without a notification for this many times as long.
    patience: u64,
    /// How long a version may take to each worker that wants the newest.
    needs: BTreeMap<WorkerInstance, Time>,
}

/// Counts of everything that happened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) events: u64,
    pub(super) publications: u64,
    pub(super) fetches: u64,
    pub(super) broken: u64,
    pub(super) not_there: u64,
    pub(super) instead: u64,
    pub(super) notified: u64,
    pub(super) died: usize,
    pub(super) lost: usize,
    /// Workers that were not admitted.
    pub(super) denied: u64,
    /// Pairs of publications that were due.
    pub(super) pairs: u64,
    /// Periods in which some worker had to be notified.
    pub(super) stretches: u64,
    pub(super) blocks: u64,
    pub(super) ordered: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.publications += other.publications;
        self.fetches += other.fetches;
        self.broken += other.broken;
        self.not_there += other.not_there;
        self.instead += other.instead;
        self.notified += other.notified;
        self.died += other.died;
        self.lost += other.lost;
        self.denied += other.denied;
        self.pairs += other.pairs;
        self.stretches += other.stretches;
        self.blocks += other.blocks;
        self.ordered += other.ordered;
    }
}

impl World {
    /// Something unusual has happened.
    pub(super) fn disturb(&mut self) {
        self.facts.disturbed.push(self.clock.now());
    }

    /// Versions of this many bytes are published.
    pub(super) fn note_publication(&mut self, bytes: u64) {
        self.counts.publications += 1;
        let mut needs = BTreeMap::new();
        let membership: Vec<_> = self
            .sender
            .plan
            .membership
            .iter()
            .map(|one| one.2)
            .collect();
        let agents: Vec<AgentId> = membership.into_iter().flatten().collect();
        for agent in agents {
            let need = self.time_for(agent);
            let node = self.sender.nodes[&agent];
            for (who, delivery) in self.workers_of(node) {
                if delivery == Delivery::Newest {
                    needs.insert(who, need);
                }
            }
        }
        let arity = self.options.arity as u64;
        let children = self.children(0);
        self.facts.publications.push(Publication {
            at: self.clock.now(),
            sequence: self.sender.sequence,
            patience: (1 + children) * if self.options.every { 3 } else { 1 },
            needs,
        });
        let calm = !self.options.faults && !self.options.apart;
        if calm && self.hosts.iter().skip(1).all(|host| host.serves) {
            assert!(children <= arity, "{children} children of the sender");
        }
        self.facts.allowed += children.max(arity) * bytes;
    }

    /// How many agents fetch from an agent.
    fn children(&self, parent: AgentId) -> u64 {
        let parents = self.sender.plan.topology.parents();
        parents.filter(|(_, of)| *of == Some(parent)).count() as u64
    }

    /// How long a publication may take to an agent's workers.
    pub(super) fn time_for(&self, agent: AgentId) -> Time {
        let path = self.sender.path(agent);
        let node = |agent: AgentId| self.sender.nodes[&agent];
        let share =
            |agent: AgentId, node: Node| self.network.rate(node) / self.children(agent).max(1);
        let rates = path.iter().map(|agent| share(*agent, node(*agent)));
        let slowest = rates.chain([share(0, 0)]).min().unwrap_or(1);
        let set: u64 = self.sender.sizes.iter().sum();
        let bytes = 3 * set + path.len() as u64 * BLOCK_BYTES;
        // Tried again now and then, and silent: so long it takes to find out, once the
        // version under way is not replaced any more.
        let mut before = 0;
        let mut silent = 0;
        for one in path.into_iter().map(node) {
            silent += u64::from(!self.network.is_good(before, one));
            before = one;
        }
        taken(bytes, slowest) + 2 * SECOND + 2 * silent * STALLED
    }

    /// An agent has been assigned this parent.
    pub(super) fn note_assigned(&mut self, parent: AgentId) {
        self.disturb();
        if parent == 0 {
            self.facts.allowed += 2 * self.sender.sizes.iter().sum::<u64>();
        }
    }

    pub(super) fn note_served(&mut self, (item, to): (Item, Node), bytes: u64, instead: bool) {
        *self.facts.blocks.entry((item, to)).or_default() += 1;
        self.facts.served += bytes;
        self.counts.blocks += 1;
        if instead {
            self.counts.instead += 1;
            self.facts.allowed += bytes;
        }
    }

    /// A worker's mailbox is put on a set.
    pub(super) fn notified(&mut self, node: Node, who: WorkerInstance, sequence: u64) {
        let by = (node, self.agent_of(node).life);
        let Some(worker) = self.hosts[node].worker(who) else {
            return;
        };
        let Worker {
            notified,
            told_by,
            delivery,
            ..
        } = worker;
        // If another agent is behind, the worker ignores what it says.
        let before = std::mem::replace(told_by, by);
        if *delivery == Delivery::Newest && before == by {
            assert!(
                sequence >= *notified,
                "{who:?} goes back from {notified} to {sequence}"
            );
        }
        let before = std::mem::replace(notified, sequence.max(*notified));
        if sequence <= before {
            return;
        }
        if *delivery != Delivery::Newest
            && self.sender.plan.membership.reached(who.worker).is_some()
            && let Some(remote_reader) = self.sender.readers.get(&who.worker)
        {
            let between = before + 1..sequence;
            let skipped: Vec<_> = remote_reader
                .desired
                .iter()
                .filter(|one| between.contains(one))
                .collect();
            assert!(
                skipped.is_empty(),
                "{who:?} was told {before}, then {sequence}, not {skipped:?}"
            );
        }
        self.counts.notified += 1;
        self.facts.notified.entry(who).or_default().push(sequence);
        let now = self.clock.now();
        self.facts.notified_at.entry(who).or_default().push(now);
        let pause = self.dice.span(MS, 50 * MS);
        self.clock.after(pause, Event::Taken { node, who });
    }

    /// Checks the end, when nothing happens any more.
    pub(super) fn check_end(&mut self) {
        let left: Vec<_> = self.transfers.iter().collect();
        assert!(left.is_empty(), "transfers are left over: {left:?}");
        self.check_newest();
        self.check_pairs();
        self.check_progress();
        self.check_order();
        let broken = self.counts.broken * BLOCK_BYTES;
        let (served, allowed) = (self.facts.served, self.facts.allowed + broken);
        let blocks = &self.facts.blocks;
        assert!(
            served <= allowed,
            "the sender served {served} bytes, not {allowed}: {blocks:?}"
        );
    }

    fn check_newest(&mut self) {
        for (node, host) in self.hosts.iter().enumerate().skip(1) {
            for worker in &host.workers {
                let (who, notified) = (worker.who, worker.notified);
                assert!(worker.alive, "{who:?} of {node} is dead");
                let delivery = worker.delivery;
                let reached = self.sender.plan.membership.reached(who.worker);
                assert!(reached.is_some(), "the sender reaches {who:?} of {node}");
                let newest = self.sender.readers[&who.worker].desired.last().copied();
                assert_eq!(Some(notified), newest, "{who:?} of {node} ({delivery:?})");
                if delivery == Delivery::Newest {
                    assert_eq!(notified, self.sender.sequence, "{who:?} of {node}");
                }
            }
        }
    }

    fn is_calm(&self, from: Time, to: Time) -> bool {
        let mut disturbed = self.facts.disturbed.iter();
        !disturbed.any(|at| from <= *at && *at <= to)
    }

    fn check_progress(&mut self) {
        for publication in &self.facts.publications {
            let from = publication.at;
            for (who, need) in &publication.needs {
                let until = from + publication.patience * need;
                if !self.is_calm(from.saturating_sub(CALM), until) {
                    continue;
                }
                self.counts.stretches += 1;
                let notified = self.facts.notified_at.get(who).into_iter().flatten();
                let notified: Vec<_> = notified.collect();
                let any = notified.iter().any(|at| (from..=until).contains(*at));
                assert!(
                    any,
                    "{who:?} was told nothing from {from} to {until}: {notified:?}"
                );
            }
        }
    }

    fn check_pairs(&mut self) {
        for three in self.facts.publications.windows(3) {
            let [first, second, third] = three else {
                continue;
            };
            if !self.is_calm(first.at.saturating_sub(CALM), third.at) {
                continue;
            }
            for (who, need) in &first.needs {
                let due = second.at - first.at >= *need;
                let due_next = second
                    .needs
                    .get(who)
                    .is_some_and(|need| third.at - second.at >= *need);
                if !due || !due_next {
                    continue;
                }
                self.counts.pairs += 1;
                let notified = &self.facts.notified[who];
                let either =
                    notified.contains(&first.sequence) || notified.contains(&second.sequence);
                assert!(
                    either,
                    "{who:?} missed {} and the next: {notified:?}",
                    first.sequence
                );
            }
        }
    }

    fn check_order(&mut self) {
        let order: Vec<(AgentId, Node)> = self
            .sender
            .plan
            .topology
            .order()
            .map(|agent| (agent, self.sender.nodes[&agent]))
            .collect();
        let rate = |node: Node| self.network.rate(node);
        // An agent without workers fetches nothing unless an agent below wants it.
        let fetches = |node: Node| !self.hosts[node].workers.is_empty();
        let slow = |(_, node): &(AgentId, Node)| rate(*node) < 1_000_000 && fetches(*node);
        if let Some(first) = order.iter().position(slow) {
            let mut behind = order[first..].iter();
            let fast = behind.find(|(_, node)| rate(*node) > 1_000_000 && fetches(*node));
            let rates: Vec<_> = order.iter().map(|(_, node)| rate(*node)).collect();
            assert_eq!(fast, None, "behind a slow one, of {rates:?}");
            self.counts.ordered += 1;
        }
    }
}
