//! The workers of other hosts: admission, notifications and progress.

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::{Version, WorkerId, WorkerRoute};
use weightsync_engine::log_limiter;
use weightsync_mem::{
    Delivery, Departure, Error as Memory, Notified, RemoteReader, RemoteReaderOptions,
};

use super::Coordinator;
use crate::relay::Item;
use crate::root::membership::{JoinOutcome, LeaveOutcome, Process, Waiter};
use crate::root::topology::AgentId;
use crate::wire::message::{FromRoot, Want, WorkerProgress};

/// One worker on another host.
pub(super) struct Worker {
    pub(super) remote_reader: RemoteReader,
    /// The sequence of the last notification and the number of the last answered question.
    notified: u64,
    answered: u64,
    /// The set of the last notification, and the sequence number of the last older set that the
    /// worker may begin with.
    desired: Vec<Item>,
    begins: u64,
    /// The worker wants the newest version and has taken none yet.
    is_fresh: bool,
    pub(super) versions: BTreeMap<usize, Version>,
}

/// What a worker that asks for a membership wants.
#[derive(Debug)]
pub(super) struct Asks {
    /// The number of the request at the worker's agent.
    pub(super) ticket: u64,
    pub(super) options: RemoteReaderOptions,
}

impl Coordinator {
    /// A worker asks to join. It gets its earlier membership back if it only comes by another
    /// route. Otherwise it gets a new one, or waits until it is known whether its number is free.
    pub(super) fn join(&mut self, joiner: Waiter<Asks>) {
        let agent = joiner.agent;
        match self.membership.comes(agent, joiner.worker, joiner.instance) {
            JoinOutcome::Back(worker) => {
                worker.start_over(agent);
                self.joined(agent, joiner.asks.ticket, joiner.worker);
                self.is_there(agent);
            }
            JoinOutcome::New(old) => {
                // Another worker has this number now.
                if let Some(old) = old {
                    old.remote_reader.leave(Departure::Died);
                }
                self.admit(joiner);
            }
            JoinOutcome::Waits(by) => {
                if let Some(other) = self.agents.get(&by) {
                    other.link.expect_sign();
                }
                if let Some(earlier) = self.membership.wait(joiner) {
                    let reason = format!("another process asks to be worker {}", earlier.worker.0);
                    self.deny(earlier.agent, earlier.asks.ticket, reason);
                }
            }
            JoinOutcome::Two => self.admit(joiner),
        }
    }

    /// Admits a worker, unless the segment refuses it or has another worker of this number.
    fn admit(&mut self, joiner: Waiter<Asks>) {
        let Waiter {
            agent,
            worker,
            instance,
            asks: Asks {
                ticket,
                mut options,
            },
        } = joiner;
        let known = self.agents.get(&agent).and_then(|one| one.known.as_ref());
        let process = Process {
            host: known.map_or([0; 16], |known| known.process.host),
            pid: options.pid,
        };
        let host = known.map_or_else(String::new, |known| known.name.clone());
        options.location = (host, WorkerRoute::Agent(agent));
        let changes = self.changes.clone();
        let is_fresh = options.delivery == Delivery::Newest;
        match self
            .remote_readers
            .join(options, move |worker| changes.ring(worker))
        {
            Ok(remote_reader) => {
                let of = Worker {
                    remote_reader,
                    notified: 0,
                    answered: 0,
                    desired: Vec::new(),
                    begins: 0,
                    is_fresh,
                    versions: BTreeMap::new(),
                };
                self.membership.put(agent, (worker, instance), process, of);
                self.joined(agent, ticket, worker);
            }
            Err(error) => {
                let reason = match error {
                    Memory::Denied { reason } => reason,
                    error => error.to_string(),
                };
                self.deny(agent, ticket, reason);
            }
        }
    }

    fn deny(&mut self, agent: AgentId, ticket: u64, reason: String) {
        log_limiter::refused(&reason);
        self.send(agent, &FromRoot::Denied { ticket, reason });
    }

    fn joined(&mut self, agent: AgentId, ticket: u64, worker: WorkerId) {
        self.send(agent, &FromRoot::Joined { ticket });
        self.notify(BTreeSet::from([worker]));
    }

    /// An agent has sent something, so it is alive: requests that wait for its workers' memberships
    /// are denied.
    pub(super) fn is_there(&mut self, agent: AgentId) {
        for waiter in self.membership.in_vain(agent) {
            self.admit(waiter);
        }
    }

    /// Admits waiting workers whose number may be free now.
    pub(super) fn retry_waiting(&mut self) {
        for waiter in self.membership.may_come() {
            self.join(waiter);
        }
    }

    /// An agent reports that a worker has gone.
    pub(super) fn gone(&mut self, agent: AgentId, who: (WorkerId, u64), died: bool) {
        let (worker, instance) = who;
        let now = self.now();
        match self.membership.gone(agent, worker, instance, died, now) {
            LeaveOutcome::Over(worker) => worker.remote_reader.leave(match died {
                true => Departure::Died,
                false => Departure::Left,
            }),
            LeaveOutcome::Back(_) => self.is_back(worker),
            LeaveOutcome::Elsewhere => {}
        }
        self.retry_waiting();
    }

    /// A worker is reached again by the agent at which it has been all the time.
    pub(super) fn is_back(&mut self, worker: WorkerId) {
        if let Some((agent, one)) = self.membership.reached(worker) {
            one.start_over(agent);
        }
        self.notify(BTreeSet::from([worker]));
        if let Some(waiter) = self.membership.comes_again(worker) {
            self.join(waiter);
        }
    }

    pub(super) fn progress(&mut self, agent: AgentId, progress: WorkerProgress) {
        let Some(member) = self
            .membership
            .member_at(agent, progress.worker, progress.instance)
        else {
            return;
        };
        let WorkerProgress {
            taken,
            through,
            loaded,
            versions,
            refused,
            ..
        } = progress;
        member.remote_reader.progress(taken, through);
        if taken > 0 || !versions.is_empty() {
            member.is_fresh = false;
            self.fresh.remove(&(agent, progress.worker));
        }
        if !versions.is_empty() {
            let versions = versions.into_iter().map(|item| (item.model, item.version));
            let versions: Vec<_> = versions.collect();
            member.versions.extend(versions.iter().copied());
            member.remote_reader.applied(loaded, versions);
        }
        if let Some((sequence, reason)) = refused {
            member.remote_reader.refuse(Some(sequence), reason);
        }
    }

    pub(super) fn ask(&mut self, agent: AgentId, who: (WorkerId, u64), question: u64, want: Want) {
        let (worker, instance) = who;
        let Some(member) = self.membership.member_at(agent, worker, instance) else {
            return;
        };
        match member.remote_reader.ask(question, want) {
            Ok(()) => self.notify(BTreeSet::from([worker])),
            Err(Memory::NoSuchVersion {
                model,
                asked,
                known,
            }) => {
                let answer = FromRoot::NoSuchVersion {
                    worker,
                    question,
                    model: model as u8,
                    asked,
                    known,
                };
                self.send(agent, &answer);
            }
            Err(Memory::SenderClosed) => {}
            Err(error) => {
                let reason = error.to_string();
                member.remote_reader.refuse(None, reason.clone());
                let away = FromRoot::TurnAway {
                    worker,
                    instance,
                    reason,
                };
                self.send(agent, &away);
            }
        }
    }

    /// Notifies workers of new sets. Workers of one agent with the same set share a message.
    pub(super) fn notify(&mut self, workers: BTreeSet<WorkerId>) {
        // By sequence number first, so that each worker gets the older set before the newer one.
        let mut batches: BTreeMap<(AgentId, u64, Vec<Item>), Vec<WorkerId>> = BTreeMap::new();
        let (mut answers, mut fresh) = (Vec::new(), Vec::new());
        let (sequence, all) = self.remote_readers.sent_to_all();
        let all = all.into_iter();
        let all = all.map(|(model, version)| Item { model, version });
        self.recent.note(sequence, all.collect());
        for worker in workers {
            let Some((agent, member)) = self.membership.reached(worker) else {
                continue;
            };
            // An error here means that the sender itself is ending.
            for notified in member.remote_reader.notifications().unwrap_or_default() {
                if notified.sequence > member.notified {
                    member.notified = notified.sequence;
                    member.desired = items(&notified);
                    fresh.extend(member.is_fresh.then_some((agent, worker)));
                    let key = (agent, notified.sequence, member.desired.clone());
                    batches.entry(key).or_default().push(worker);
                }
            }
            if let Ok(Some((question, notified))) = member.remote_reader.answered()
                && question > member.answered
            {
                member.answered = question;
                let answer = FromRoot::Answer {
                    worker,
                    question,
                    sequence: notified.sequence,
                    set: items(&notified),
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
            self.send(agent, &notify);
        }
        for (agent, answer) in answers {
            self.send(agent, &answer);
        }
        for (agent, worker) in fresh {
            self.fresh.insert((agent, worker));
            self.begin_with_what_is_there((agent, worker));
        }
    }

    /// An agent has a new version: its workers that run nothing yet may begin with it.
    pub(super) fn begin_at(&mut self, agent: AgentId) {
        for worker in self.fresh_at(agent) {
            self.begin_with_what_is_there((agent, worker));
        }
    }

    /// Forgets the fresh workers of an agent that has gone; agent numbers are never used again.
    pub(super) fn forget_fresh(&mut self, agent: AgentId) {
        for worker in self.fresh_at(agent) {
            self.fresh.remove(&(agent, worker));
        }
    }

    fn fresh_at(&self, agent: AgentId) -> Vec<WorkerId> {
        let all = (agent, WorkerId(0))..=(agent, WorkerId(u32::MAX));
        let fresh = self.fresh.range(all);
        fresh.map(|(_, worker)| *worker).collect()
    }

    /// Offers a worker that runs nothing yet an older set that its agent already has, so that it
    /// need not wait for the newest.
    fn begin_with_what_is_there(&mut self, (agent, worker): (AgentId, WorkerId)) {
        let reached = self.membership.reached(worker);
        let found = reached.filter(|(by, member)| *by == agent && member.is_fresh);
        let Some((_, member)) = found else {
            // The worker has moved, or another one has its number.
            self.fresh.remove(&(agent, worker));
            return;
        };
        let known = self.agents.get(&agent).and_then(|one| one.known.as_ref());
        let Some(known) = known.filter(|known| known.holds.iter().next().is_some()) else {
            return;
        };
        let has = |item: &Item| known.holds.has(item);
        let older = self.recent.before((member.notified, &member.desired), has);
        if let Some((sequence, set)) = older.filter(|(at, _)| *at > member.begins) {
            member.begins = sequence;
            let workers = vec![worker];
            let notify = FromRoot::Notify {
                sequence,
                set,
                workers,
            };
            self.send(agent, &notify);
        }
    }
}

impl Worker {
    /// The worker comes by another route: it must be notified of everything again.
    fn start_over(&mut self, agent: AgentId) {
        self.remote_reader.set_route(WorkerRoute::Agent(agent));
        self.notified = 0;
        self.answered = 0;
        self.begins = 0;
        self.remote_reader.start_over();
    }
}

fn items(notified: &Notified) -> Vec<Item> {
    let members = notified.members.iter();
    members
        .map(|snapshot| Item {
            model: snapshot.model(),
            version: snapshot.version(),
        })
        .collect()
}
