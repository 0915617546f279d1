//! The workers of this host: how they join and leave, and what they ask for.
//!
//! A broken link loses the questions that it carried, so the agent asks them again on the next
//! link.

use std::collections::BTreeMap;

use weightsync_core::WorkerId;
use weightsync_mem::{self as mem, WorkerInstance};

use super::Driver;
use crate::agent::plan::PlanInput;
use crate::wire::message::{ToRoot, Want, WorkerJoin};

/// The workers of this host.
#[derive(Default)]
pub(super) struct Members {
    workers: BTreeMap<WorkerId, LocalWorker>,
    /// Workers that wait for the sender to admit them, by ticket; each with the ticket that the
    /// segment gave it.
    joining: BTreeMap<u64, WorkerJoin>,
    /// Workers announced again to a sender that may know them, by ticket.
    rejoining: BTreeMap<u64, WorkerInstance>,
    /// The last ticket.
    tickets: u64,
}

/// A worker that the sender has admitted.
struct LocalWorker {
    who: WorkerInstance,
    join: WorkerJoin,
    /// The worker's question until it is answered.
    asks: Option<WorkerQuestion>,
}

/// A worker's question.
#[derive(Clone, Copy, Debug)]
struct WorkerQuestion {
    number: u64,
    want: Want,
}

impl Members {
    /// The admitted life of a worker.
    pub(super) fn instance(&self, worker: WorkerId) -> Option<WorkerInstance> {
        self.workers.get(&worker).map(|one| one.who)
    }

    /// The worker that waits for the answer to this question.
    pub(super) fn asker(&self, worker: WorkerId, number: u64) -> Option<WorkerInstance> {
        let worker = self.workers.get(&worker)?;
        let open = worker.asks.is_some_and(|open| open.number == number);
        open.then_some(worker.who)
    }

    /// A worker has been answered, up to this question.
    pub(super) fn close_question(&mut self, who: WorkerInstance, through: u64) {
        if let Some(worker) = self.worker(who) {
            worker.asks.take_if(|open| open.number <= through);
        }
    }

    /// Whether the sender knows all workers on the new link.
    pub(super) fn all_rejoined(&self) -> bool {
        self.rejoining.is_empty()
    }

    /// The admitted worker of this instance.
    fn worker(&mut self, who: WorkerInstance) -> Option<&mut LocalWorker> {
        let worker = self.workers.get_mut(&who.worker);
        worker.filter(|one| one.who == who)
    }

    fn next_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }
}

impl Driver {
    /// Handles events of this host's workers.
    pub(super) fn on_local(&mut self, events: Vec<mem::WorkerEvent>) {
        let mut progress = Vec::new();
        let mut inputs = Vec::new();
        for event in events {
            match event {
                mem::WorkerEvent::Joins {
                    ticket,
                    who,
                    pid,
                    models,
                    delivery,
                    device,
                    seen,
                } => self.ask_in(WorkerJoin {
                    ticket,
                    who,
                    pid,
                    models: models.0,
                    delivery,
                    device,
                    seen,
                }),
                mem::WorkerEvent::Progress(one) => {
                    self.members.close_question(one.who, one.through);
                    progress.push(one);
                }
                mem::WorkerEvent::Unusable { who, reason } => {
                    self.send(&ToRoot::Unusable { who, reason });
                }
                mem::WorkerEvent::Asks {
                    who,
                    question,
                    want,
                } => self.asks(who, question, want),
                mem::WorkerEvent::Withdraws { who } => inputs.extend(self.withdraws(who)),
                mem::WorkerEvent::Gone { who, died } => {
                    // Progress is reported before a departure, as the sender forgets the worker
                    // then.
                    self.send_progress(std::mem::take(&mut progress));
                    // Another life of the worker may have the number by now.
                    if self.members.worker(who).is_some() {
                        self.members.workers.remove(&who.worker);
                    }
                    self.send(&ToRoot::Gone { who, died });
                    inputs.push(PlanInput::Left { who });
                }
            }
        }
        self.send_progress(progress);
        // A slot that workers released may be room for the next version.
        inputs.push(PlanInput::MayHaveRoom);
        self.step(inputs);
    }

    /// Asks the sender to admit a worker.
    fn ask_in(&mut self, join: WorkerJoin) {
        for gave_up in self.take_those_who_gave_up() {
            // The number may already belong to the same worker again, or to another one.
            if gave_up != join.who {
                let (who, died) = (gave_up, false);
                self.send(&ToRoot::Gone { who, died });
            }
        }
        // The driver numbers requests itself: a worker that is announced again has no ticket of the
        // segment any more.
        let ticket = self.members.next_ticket();
        self.send_join(ticket, &join);
        self.members.joining.insert(ticket, join);
    }

    fn send_join(&mut self, ticket: u64, join: &WorkerJoin) {
        let join = join.clone();
        self.send(&ToRoot::Join(WorkerJoin { ticket, ..join }));
    }

    /// Workers that no longer wait for admission: they died or found another route.
    fn take_those_who_gave_up(&mut self) -> Vec<WorkerInstance> {
        let relay = &self.relay;
        let joining = &mut self.members.joining;
        let gave_up = joining.extract_if(.., |_, one| !relay.waits(one.ticket));
        gave_up.map(|(_, one)| one.who).collect()
    }

    /// The sender has accepted a worker: admits it.
    pub(super) fn joined(&mut self, ticket: u64) {
        if let Some(who) = self.members.rejoining.remove(&ticket) {
            // The sender knows the worker again, but has none of its questions.
            if let Some(open) = self.members.worker(who).and_then(|worker| worker.asks) {
                self.ask(who, open);
            }
            self.end_link_before();
        }
        let Some(join) = self.members.joining.remove(&ticket) else {
            return;
        };
        let (who, delivery) = (join.who, join.delivery);
        // The worker has given up or died meanwhile, so the sender must forget it.
        if self.relay.admit(join.ticket).is_err() {
            let died = false;
            self.send(&ToRoot::Gone { who, died });
            return;
        }
        let worker = LocalWorker {
            who,
            join,
            asks: None,
        };
        self.members.workers.insert(who.worker, worker);
        self.step([PlanInput::Joined { who, delivery }]);
    }

    /// The sender does not accept a worker.
    pub(super) fn denied(&mut self, ticket: u64, reason: &str) {
        if let Some(join) = self.members.joining.remove(&ticket) {
            self.relay.deny(join.ticket, reason);
        } else if let Some(who) = self.members.rejoining.remove(&ticket) {
            // The sender does not take this worker back, so it gets nothing more.
            self.relay.turn_away(who, reason);
            self.end_link_before();
        }
    }

    /// Tells the sender on a new link which workers are here.
    pub(super) fn join_again(&mut self) {
        // Their answers would have come on the link that has ended.
        self.members.rejoining.clear();
        let workers = self.members.workers.values();
        let workers: Vec<_> = workers.map(|worker| worker.join.clone()).collect();
        for join in workers {
            let ticket = self.members.next_ticket();
            self.members.rejoining.insert(ticket, join.who);
            self.send_join(ticket, &join);
        }
        // The sender has not heard of these workers on this link, and some may have joined by
        // another route.
        self.take_those_who_gave_up();
        for (ticket, join) in self.members.joining.clone() {
            self.send_join(ticket, &join);
        }
        // The sender also needs to know how far each of them is.
        self.relay.report_again();
        // Without workers there is nothing to wait for.
        self.end_link_before();
    }

    /// A worker asks; the question replaces its earlier one.
    fn asks(&mut self, who: WorkerInstance, number: u64, want: Want) {
        let question = WorkerQuestion { number, want };
        if let Some(worker) = self.members.worker(who) {
            worker.asks = Some(question);
        }
        self.ask(who, question);
    }

    /// A worker withdraws its question; nothing is fetched for it any more.
    fn withdraws(&mut self, who: WorkerInstance) -> Option<PlanInput> {
        let worker = self.members.worker(who);
        let open = worker.and_then(|worker| worker.asks.take());
        self.send(&ToRoot::Withdraw { who });
        let question = open?.number;
        Some(PlanInput::Withdrawn { who, question })
    }

    fn ask(&mut self, who: WorkerInstance, WorkerQuestion { number, want }: WorkerQuestion) {
        self.send(&ToRoot::Ask {
            who,
            question: number,
            want,
        });
    }
}
