//! The workers of other hosts: admission, notifications and progress.

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::{Version, WorkerId};
use weightsync_mem::{Delivery, Departure, WorkerInstance};

use super::{RootEffect, RootPlan};
use crate::agent::Item;
use crate::root::membership::{HostProcess, JoinOutcome, LeaveOutcome, MembershipWaiter};
use crate::root::topology::AgentId;
use crate::wire::message::{FromRoot, WorkerJoin, WorkerProgress};

/// One worker on another host, as the sender knows it.
#[derive(Debug)]
pub(crate) struct WorkerRecord {
    pub(crate) worker: WorkerId,
    /// The sequence of the last notification and the number of the last answered question.
    notified: u64,
    answered: u64,
    /// The set of the last notification, and the sequence number of the last older set that the
    /// worker may begin with.
    desired: Vec<Item>,
    begins: u64,
    /// The worker wants the newest version and has taken none yet.
    is_fresh: bool,
    /// The version of each model that the worker runs.
    pub(crate) versions: BTreeMap<usize, Version>,
}

/// What a worker's mailbox holds.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// The sets that were not handed out before, and for most workers the newest one, each with
    /// its sequence number.
    pub(crate) sets: Vec<(u64, Vec<Item>)>,
    /// The last answered question, and the answer.
    pub(crate) answer: Option<(u64, (u64, Vec<Item>))>,
}

impl RootPlan {
    /// A worker asks to join. It gets its earlier membership back if it only comes by another
    /// route. Otherwise it gets a new one, or waits until it is known whether its number is free.
    pub(super) fn join(&mut self, joiner: MembershipWaiter<WorkerJoin>) {
        let (agent, worker) = (joiner.agent, joiner.who.worker);
        match self.membership.join(agent, joiner.who) {
            JoinOutcome::Back(record) => {
                // The new agent has told the worker nothing yet.
                record.start_over();
                self.effects.push(RootEffect::StartOver(worker));
                self.joined(agent, joiner.asks.ticket, worker);
                // The worker has just shown that it lives, so another process that waits for its
                // number waits in vain.
                self.deny_waiting(agent);
            }
            JoinOutcome::New(old) => {
                // Another worker has this number now.
                if old.is_some() {
                    // No agent has reached the earlier one since its agent went, so it counts as
                    // dead.
                    self.leave(worker, Departure::Died);
                }
                self.effects.push(RootEffect::Admit(joiner));
            }
            JoinOutcome::Waits(by) => {
                // If that agent gives a sign of life, the earlier worker is still there. If its
                // link ends instead, the number is free.
                self.effects.push(RootEffect::ExpectSign(by));
                if let Some(earlier) = self.membership.wait(joiner) {
                    let ticket = earlier.asks.ticket;
                    let reason = format!("another process asks to be worker {}", worker.0);
                    self.send(earlier.agent, FromRoot::Denied { ticket, reason });
                }
            }
            // The segment denies it, with the reason.
            JoinOutcome::Two => self.effects.push(RootEffect::Admit(joiner)),
        }
    }

    /// The segment has admitted a worker: it becomes a member.
    pub(super) fn admitted(&mut self, joiner: MembershipWaiter<WorkerJoin>) {
        let MembershipWaiter { agent, who, asks } = joiner;
        let known = self.agents.get(&agent);
        let known = known.and_then(|one| one.introduced.as_ref());
        // A worker that is its own agent has its agent's process. Then the end of the link most
        // likely means the death of the worker.
        let process = HostProcess {
            host: known.map_or([0; 16], |known| known.process.host),
            pid: asks.pid,
        };
        let record = WorkerRecord {
            worker: who.worker,
            notified: 0,
            answered: 0,
            desired: Vec::new(),
            begins: 0,
            is_fresh: asks.delivery == Delivery::Newest,
            versions: BTreeMap::new(),
        };
        self.membership.put(agent, who, process, record);
        self.joined(agent, asks.ticket, who.worker);
    }

    fn joined(&mut self, agent: AgentId, ticket: u64, worker: WorkerId) {
        // In this order: an agent ignores sets for a worker that it has not admitted.
        self.send(agent, FromRoot::Joined { ticket });
        self.read(BTreeSet::from([worker]));
    }

    /// An agent has sent something, so it is alive. Requests that wait for the memberships of its
    /// workers are in vain: the segment denies them.
    pub(super) fn deny_waiting(&mut self, agent: AgentId) {
        let waiting = self.membership.take_in_vain(agent).into_iter();
        self.effects.extend(waiting.map(RootEffect::Admit));
    }

    /// Admits waiting workers whose number may be free now.
    pub(super) fn retry_waiting(&mut self) {
        for waiter in self.membership.take_retriable() {
            self.join(waiter);
        }
    }

    /// An agent reports that a worker has gone.
    pub(super) fn gone(&mut self, agent: AgentId, who: WorkerInstance, died: bool) {
        let worker = who.worker;
        match self.membership.gone(agent, who, died, self.now) {
            LeaveOutcome::Over(_) => {
                let departure = match died {
                    true => Departure::Died,
                    false => Departure::Left,
                };
                self.leave(worker, departure);
            }
            LeaveOutcome::Back(_) => self.reach_again(worker),
            LeaveOutcome::Elsewhere => {}
        }
        self.retry_waiting();
    }

    /// A worker's membership has ended.
    pub(super) fn leave(&mut self, worker: WorkerId, departure: Departure) {
        self.effects.push(RootEffect::Leave(worker, departure));
    }

    /// A worker is reached again by the agent at which it has been all the time.
    pub(super) fn reach_again(&mut self, worker: WorkerId) {
        if let Some((_, record)) = self.membership.reached(worker) {
            record.start_over();
            self.effects.push(RootEffect::StartOver(worker));
        }
        self.read(BTreeSet::from([worker]));
        // The request waited for the other agent. Now it may have to wait for this one.
        if let Some(waiter) = self.membership.take_waiting_for(worker) {
            self.join(waiter);
        }
    }

    /// Whether this agent reaches this life of a worker.
    pub(super) fn reaches(&mut self, agent: AgentId, who: WorkerInstance) -> bool {
        self.membership.member_at(agent, who).is_some()
    }

    pub(super) fn progress(&mut self, agent: AgentId, progress: WorkerProgress) {
        let worker = progress.who.worker;
        let Some(member) = self.membership.member_at(agent, progress.who) else {
            return;
        };
        let runs = progress.versions.iter();
        member
            .versions
            .extend(runs.map(|item| (item.model, item.version)));
        // The worker runs something now, so an older set would be a step back.
        if progress.taken > 0 || !progress.versions.is_empty() {
            member.is_fresh = false;
            self.fresh.remove(&(agent, worker));
        }
        self.effects.push(RootEffect::Progress(progress));
    }

    /// Reads the mailboxes of those of these workers that an agent reaches. If there are none, this
    /// still notes the newest set: workers that join later may begin with it.
    pub(super) fn read(&mut self, mut workers: BTreeSet<WorkerId>) {
        workers.retain(|worker| self.membership.reached(*worker).is_some());
        self.effects.push(RootEffect::Read(workers));
    }

    /// Notifies workers of new sets. Workers of one agent with the same set share a message.
    pub(super) fn notify(&mut self, mailboxes: Vec<(WorkerId, Mailbox)>) {
        // By sequence number first, so that each worker gets the older set before the newer one.
        let mut batches: BTreeMap<(AgentId, u64, Vec<Item>), Vec<WorkerId>> = BTreeMap::new();
        let (mut answers, mut fresh) = (Vec::new(), Vec::new());
        for (worker, Mailbox { sets, answer }) in mailboxes {
            let Some((agent, member)) = self.membership.reached(worker) else {
                continue;
            };
            for (sequence, set) in sets {
                // A mailbox shows its newest set at every look. Each set goes to the agent once.
                if sequence > member.notified {
                    member.notified = sequence;
                    member.desired.clone_from(&set);
                    fresh.extend(member.is_fresh.then_some((agent, worker)));
                    let batch = batches.entry((agent, sequence, set)).or_default();
                    batch.push(worker);
                }
            }
            // An answer, too, stays in the mailbox until the worker has taken it.
            if let Some((question, (sequence, set))) = answer
                && question > member.answered
            {
                member.answered = question;
                let answer = FromRoot::Answer {
                    worker,
                    question,
                    sequence,
                    set,
                };
                answers.push((agent, answer));
            }
        }
        for ((agent, sequence, set), workers) in batches {
            let notify = FromRoot::Notify {
                sequence,
                set,
                workers,
            };
            self.send(agent, notify);
        }
        for (agent, answer) in answers {
            self.send(agent, answer);
        }
        // After the newest set: a relay takes a set as an older one to begin with only if it knows
        // of a newer one.
        for one in fresh {
            self.fresh.insert(one);
            self.begin_with_what_is_there(one);
        }
    }

    /// The workers of an agent that want the newest version and have taken none yet.
    pub(super) fn fresh_at(&self, agent: AgentId) -> Vec<WorkerId> {
        let all = (agent, WorkerId(0))..=(agent, WorkerId(u32::MAX));
        let fresh = self.fresh.range(all);
        fresh.map(|(_, worker)| *worker).collect()
    }

    /// Offers a worker that runs nothing yet an older set that its agent already has, so that it
    /// need not wait for the newest.
    pub(super) fn begin_with_what_is_there(&mut self, (agent, worker): (AgentId, WorkerId)) {
        let reached = self.membership.reached(worker);
        let found = reached.filter(|(by, member)| *by == agent && member.is_fresh);
        let Some((_, member)) = found else {
            // The worker has moved, or another one has its number.
            self.fresh.remove(&(agent, worker));
            return;
        };
        let known = self.agents.get(&agent);
        let Some(known) = known.and_then(|one| one.introduced.as_ref()) else {
            return;
        };
        // With thousands of workers, the search below must not run for nothing.
        if known.holds.iter().next().is_none() {
            return;
        }
        let has = |item: &Item| known.holds.has(item);
        let older = self.recent.before((member.notified, &member.desired), has);
        // An older set is offered once. After it only a set between it and the newest is worth a
        // message.
        if let Some((sequence, set)) = older.filter(|(at, _)| *at > member.begins) {
            member.begins = sequence;
            let workers = vec![worker];
            let notify = FromRoot::Notify {
                sequence,
                set,
                workers,
            };
            self.send(agent, notify);
        }
    }
}

impl WorkerRecord {
    /// The worker comes by another route: it must be notified of everything again.
    fn start_over(&mut self) {
        self.notified = 0;
        self.answered = 0;
        self.begins = 0;
    }
}
