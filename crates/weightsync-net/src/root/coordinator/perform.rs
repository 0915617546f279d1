//! The coordinator performs what its [plan](crate::root::plan) decides: every effect is here.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use tokio::time::Instant;
use weightsync_core::{WorkerId, WorkerRoute};
use weightsync_engine::log_limiter;
use weightsync_mem::{
    Error as Memory, ModelMask, NotifiedSet, RemoteReader, RemoteReaderOptions, Snapshot,
    WorkerInstance,
};

use super::{Coordinator, CoordinatorEvent};
use crate::agent::Item;
use crate::root::membership::MembershipWaiter;
use crate::root::plan::{Mailbox, RootEffect, RootInput};
use crate::root::scrub::OWN;
use crate::root::topology::AgentId;
use crate::scrub;
use crate::wire::message::{FromRoot, Want, Welcome, WorkerJoin, WorkerProgress};

impl Coordinator {
    /// Notes what has happened, and performs what follows from it.
    pub(super) fn step(&mut self, inputs: impl IntoIterator<Item = RootInput>) {
        let now = self.since.elapsed();
        let mut effects = self.plan.step(now, inputs);
        let mut more = Vec::new();
        // An effect may lead to an input, such as the content of a mailbox. The plan takes that
        // input before any other event, so it decides on what it has just seen.
        while !effects.is_empty() {
            for effect in effects {
                self.perform(effect, &mut more);
            }
            effects = self.plan.step(now, more.drain(..));
        }
    }

    /// Performs one effect. What follows from it at once is added to `more`.
    fn perform(&mut self, effect: RootEffect, more: &mut Vec<RootInput>) {
        match effect {
            RootEffect::Send(agent, message) => self.send(agent, &message),
            RootEffect::Welcome(agent) => self.welcome(agent),
            RootEffect::ExpectSign(agent) => {
                if let Some(one) = self.links.get(&agent) {
                    one.link.expect_sign();
                }
            }
            RootEffect::Warn(agent, cause) => self.warn(cause, agent, cause),
            RootEffect::Close {
                agent,
                name,
                reason,
                flush,
            } => self.close(agent, name.as_deref(), &reason, flush),
            RootEffect::NoteRate(rate) => self.settings.store.deltas().note_rate(rate),
            RootEffect::Admit(joiner) => more.extend(self.admit(joiner)),
            RootEffect::StartOver(worker) => self.start_over(worker),
            RootEffect::Progress(progress) => self.progress(progress),
            RootEffect::Unusable(worker, reason) => {
                self.at(worker, |reader| reader.refuse(None, reason));
            }
            RootEffect::Ask(agent, who, question, want) => {
                more.extend(self.ask(agent, who, question, want));
            }
            RootEffect::Withdraw(worker) => self.at(worker, RemoteReader::withdraw),
            RootEffect::Leave(worker, departure) => {
                // To drop the reader would report the worker as lost. `leave` says how it went.
                if let Some(reader) = self.readers.remove(&worker) {
                    reader.leave(departure);
                }
            }
            RootEffect::Read(workers) => more.push(self.read(workers)),
            RootEffect::FindDigests(items) => more.extend(self.find_digests(items)),
            RootEffect::Spoil(item) => self.settings.store.spoil(item),
            RootEffect::AnswerScrub {
                client,
                same,
                others,
            } => self.answer_scrub(client, same, others),
        }
    }

    /// Sends a message to an agent. If the agent does not keep up, the message is dropped and the
    /// link ends.
    fn send(&self, agent: AgentId, message: &FromRoot) {
        // The trainer's log names a refused worker too, at most once a minute.
        if let FromRoot::Denied { reason, .. } = message {
            log_limiter::refused(reason);
        }
        // The link may have ended earlier in this step.
        if let Some(one) = self.links.get(&agent) {
            one.link.send(message);
        }
    }

    /// Acts on a worker in the segment.
    fn at(&self, worker: WorkerId, act: impl FnOnce(&RemoteReader)) {
        if let Some(reader) = self.readers.get(&worker) {
            act(reader);
        }
    }

    /// A worker comes by another agent.
    fn start_over(&mut self, worker: WorkerId) {
        let agent = self.plan.membership.reached(worker).map(|(agent, _)| agent);
        self.at(worker, |reader| {
            if let Some(agent) = agent {
                reader.set_route(WorkerRoute::Agent(agent));
            }
            reader.start_over();
        });
    }

    /// The name of an agent's host.
    fn host_of(&self, agent: AgentId) -> String {
        let known = self.plan.agents.get(&agent);
        let known = known.and_then(|one| one.introduced.as_ref());
        known.map_or_else(String::new, |known| known.name.clone())
    }

    fn welcome(&self, agent: AgentId) {
        let welcome = self.settings.welcome.clone();
        if let Some(one) = self.links.get(&agent) {
            one.link
                .send(&FromRoot::Welcome(Welcome { agent, ..welcome }));
            // Layouts may have many MiB, so all agents share the encoded frames.
            one.link.send_frames(self.settings.descriptions.clone());
        }
    }

    fn close(&mut self, agent: AgentId, name: Option<&str>, reason: &str, flush: bool) {
        let Some(closed) = self.links.remove(&agent) else {
            return;
        };
        self.count.store(self.links.len(), Ordering::Relaxed);
        // The plan has finished its step, so these include the workers of the agent that is gone.
        // The status shows them as unreached until another agent brings them.
        for record in self.plan.membership.unreached() {
            self.at(record.worker, |reader| {
                reader.set_route(WorkerRoute::Unreached);
            });
        }
        if let Some(name) = name {
            tracing::info!("agent {agent} ({name}, {}) is gone: {reason}", closed.from);
        }
        if flush {
            // Finished tasks leave the set here, so that it does not grow with each refusal.
            while self.ending.try_join_next().is_some() {}
            // In a task of its own, because this task waits for no agent.
            self.ending.spawn(closed.link.finish());
        }
    }

    /// Logs an agent's misbehaviour, at most one line a minute for each cause.
    pub(super) fn warn(&mut self, cause: &str, agent: AgentId, reason: &str) {
        let Some(one) = self.links.get(&agent) else {
            return;
        };
        if let Some(held_back) = self.log_limiter.logs(cause, Instant::now().into_std()) {
            let text = format!("agent {agent} at {} is dropped: {reason}", one.from);
            log_limiter::warn(held_back, &text);
        }
    }

    /// Admits a worker, unless the segment refuses it or has another worker of this number.
    fn admit(&mut self, joiner: MembershipWaiter<WorkerJoin>) -> Option<RootInput> {
        let changes = self.changes.clone();
        // The segment calls this under its lock whenever the worker's mailbox may have changed.
        let ring = move |worker| changes.ring(worker);
        let asks = &joiner.asks;
        let options = RemoteReaderOptions {
            worker: asks.who.worker,
            pid: asks.pid,
            seen: asks.seen,
            models: ModelMask(asks.models),
            delivery: asks.delivery,
            device: asks.device.clone(),
            location: (self.host_of(joiner.agent), WorkerRoute::Agent(joiner.agent)),
        };
        match self.remote_readers.join(options, ring) {
            Ok(reader) => {
                self.readers.insert(joiner.who.worker, reader);
                Some(RootInput::Admitted(joiner))
            }
            Err(error) => {
                let reason = match error {
                    Memory::Denied { reason } => reason,
                    error => error.to_string(),
                };
                let ticket = joiner.asks.ticket;
                self.send(joiner.agent, &FromRoot::Denied { ticket, reason });
                None
            }
        }
    }

    fn progress(&self, progress: WorkerProgress) {
        self.at(progress.who.worker, |reader| {
            reader.progress(progress.taken, progress.through);
            // A worker that has loaded nothing yet names no version.
            if !progress.versions.is_empty() {
                let versions = progress.versions.iter();
                let versions = versions.map(|item| (item.model, item.version));
                reader.applied(progress.loaded, versions);
            }
            if let Some((sequence, reason)) = progress.refused {
                reader.refuse(Some(sequence), reason);
            }
        });
    }

    /// Asks for a version on a worker's behalf. Its mailbox may have the answer at once.
    fn ask(
        &self,
        agent: AgentId,
        who: WorkerInstance,
        question: u64,
        want: Want,
    ) -> Option<RootInput> {
        let worker = who.worker;
        let reader = self.readers.get(&worker)?;
        match reader.ask(question, want) {
            Ok(()) => return Some(self.read(BTreeSet::from([worker]))),
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
            // The worker asked for something that it may not have. It gets no more sets, and its
            // agent tells it why.
            Err(error) => {
                let reason = error.to_string();
                reader.refuse(None, reason.clone());
                self.send(agent, &FromRoot::TurnAway { who, reason });
            }
        }
        None
    }

    /// Reads the mailboxes of these workers.
    fn read(&self, workers: BTreeSet<WorkerId>) -> RootInput {
        let (sequence, all) = self.remote_readers.sent_to_all();
        let all = all.into_iter();
        let all = all.map(|(model, version)| Item { model, version });
        let mailboxes = workers.into_iter().filter_map(|worker| {
            let reader = self.readers.get(&worker)?;
            // An error here means that the sender itself is ending.
            let sets = reader.notifications().unwrap_or_default();
            let answer = reader.answered().unwrap_or_default();
            let mailbox = Mailbox {
                // Only the numbers go on. The snapshots, and their pins, end here: the mailbox
                // keeps the versions that it names.
                sets: sets.iter().map(set_of).collect(),
                answer: answer.map(|(question, answer)| (question, set_of(&answer))),
            };
            Some((worker, mailbox))
        });
        RootInput::Mailboxes {
            mailboxes: mailboxes.collect(),
            sent_to_all: (sequence, all.collect()),
        }
    }

    /// Computes the digests of versions as they are here; the first of them may be at hand. This
    /// pins their slots as a worker would, for about half the time of a memcpy.
    fn find_digests(&mut self, items: Vec<Item>) -> Vec<RootInput> {
        let (remote_readers, events) = (self.remote_readers.clone(), self.events.clone());
        let (threads, own) = (self.settings.threads.clone(), items.clone());
        let is_first = |one: &mut Snapshot| {
            let first = items.first();
            first.is_some_and(|item| (item.model, item.version) == (one.model(), one.version()))
        };
        // The version that was just published may be replaced before the thread starts, so its pin
        // goes along.
        let mut at_hand = self.at_hand.take_if(is_first);
        // On a thread of its own: a digest reads a whole version, and all agents wait for this
        // task.
        let work = move || {
            for item in own {
                let there = || {
                    let found = remote_readers.snapshot(item.model, item.version);
                    found.ok().flatten()
                };
                let snapshot = at_hand.take().or_else(there);
                let then = snapshot.as_ref().and_then(Snapshot::published_digest);
                let now = snapshot.and_then(|one| one.digest_unless(|| threads.is_stopped()));
                // A coordinator that has ended receives nothing.
                if events
                    .blocking_send(CoordinatorEvent::Found { item, now, then })
                    .is_err()
                {
                    return;
                }
            }
        };
        let Err(error) = self.settings.threads.spawn("scrub", work) else {
            return Vec::new();
        };
        tracing::warn!("versions are not compared, because no thread can be started: {error}");
        // Every question needs an answer. Otherwise a client would wait until its deadline.
        let unknown = |item| RootInput::Found {
            item,
            now: None,
            then: None,
        };
        items.into_iter().map(unknown).collect()
    }

    fn answer_scrub(&mut self, client: u64, same: usize, mut others: Vec<scrub::ScrubCheck>) {
        let Some(answer) = self.clients.remove(&client) else {
            return;
        };
        for own in others.iter_mut().filter(|one| one.agent == OWN) {
            let local = self.remote_readers.local();
            own.workers = local.iter().map(|one| one.worker.0).collect();
            own.address.clone_from(&self.settings.welcome.address);
            own.pid = std::process::id();
        }
        let scrub = scrub::Scrub {
            run: self.remote_readers.run().to_string(),
            models: self.settings.models.clone(),
            same,
            others,
            left_out: 0,
        };
        let json = serde_json::to_string(&scrub.shortened()).unwrap_or_default();
        // The client may have gone.
        let _ = answer.send(json);
    }
}

fn set_of(notified: &NotifiedSet) -> (u64, Vec<Item>) {
    let members = notified.members.iter();
    let items = members.map(|snapshot| Item {
        model: snapshot.model(),
        version: snapshot.version(),
    });
    (notified.sequence, items.collect())
}
