//! The sender's decisions about other hosts: which agent fetches from which, which workers are
//! members, what each of them is told, and which copies are compared.
//!
//! **Guarantee.** The input and the output are plain values; times count from any one moment.
//! [`RootPlan`] takes events ([`RootInput`]) and returns what is to be done ([`RootEffect`]), in
//! order. It owns the parts that decide: [`Topology`], [`Membership`], [`Recent`] and [`Scrubs`].
//! Its only act is to log.

mod agents;
mod holdings;
mod scrubbing;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use weightsync_core::digest::Digest;
use weightsync_core::{Run, WorkerId};
use weightsync_mem::{Departure, WorkerInstance};

pub(crate) use self::agents::AgentRecord;
pub(crate) use self::workers::{Mailbox, WorkerRecord};
use super::membership::{HostProcess, LinkLoss, Membership, MembershipWaiter};
use super::recent::Recent;
use super::scrub::{Round, Scrubs};
use super::topology::{AgentId, LeftParent, Topology};
use crate::agent::Item;
use crate::scrub;
use crate::wire::message::{FromRoot, ToRoot, Want, WorkerJoin, WorkerProgress};

/// What has happened.
#[derive(Debug)]
pub(crate) enum RootInput {
    /// An agent has connected. Its number was never used before.
    Connected { agent: AgentId, from: SocketAddr },
    /// An agent has sent a message.
    Message { agent: AgentId, message: ToRoot },
    /// An agent's link has ended.
    Ended {
        agent: AgentId,
        how: LinkLoss,
        reason: String,
    },
    /// The segment has admitted a worker.
    Admitted(MembershipWaiter<WorkerJoin>),
    /// The mailboxes of these workers may have changed.
    Changed(BTreeSet<WorkerId>),
    /// The content of mailboxes, and the newest set that was sent to all workers with the last
    /// sequence number that was given out.
    Mailboxes {
        sent_to_all: (u64, Vec<Item>),
        mailboxes: Vec<(WorkerId, Mailbox)>,
    },
    /// Time has passed: see [`RootPlan::due`].
    Time,
    /// A client wants all copies compared. These versions are here.
    Scrub { client: u64, own: Vec<Item> },
    /// A client no longer waits.
    ScrubEnds { client: u64 },
    /// A version was published that agents will be compared with.
    Keep(Item),
    /// The sender's digests of a version: of its bytes now, and of the published ones if they were
    /// noted.
    Found {
        item: Item,
        now: Option<Digest>,
        then: Option<Digest>,
    },
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum RootEffect {
    /// Send an agent a message.
    Send(AgentId, FromRoot),
    /// Accept an agent: send it the welcome and the models.
    Welcome(AgentId),
    /// Learn of the next sign of life of an agent.
    ExpectSign(AgentId),
    /// Warn that an agent breaks the protocol, and how.
    Warn(AgentId, &'static str),
    /// Close an agent's link; with `flush`, once everything was sent.
    Close {
        agent: AgentId,
        /// The agent's name, if it has introduced itself.
        name: Option<String>,
        reason: String,
        flush: bool,
    },
    /// Note the speed of the slowest link, in bytes a second.
    NoteRate(u64),
    /// Ask the segment to admit a worker: [`RootInput::Admitted`] follows, or a denial is sent.
    Admit(MembershipWaiter<WorkerJoin>),
    /// Hand out a worker's queue from its beginning again.
    StartOver(WorkerId),
    /// Report a worker's progress to the segment.
    Progress(WorkerProgress),
    /// Report that a worker can use no more sets, with the reason.
    Unusable(WorkerId, String),
    /// Ask the segment for a version on a worker's behalf, by a numbered question.
    Ask(AgentId, WorkerInstance, u64, Want),
    /// Withdraw a worker's question.
    Withdraw(WorkerId),
    /// Remove a worker from the segment.
    Leave(WorkerId, Departure),
    /// Read the mailboxes of these workers: [`RootInput::Mailboxes`] follows.
    Read(BTreeSet<WorkerId>),
    /// Compute the digests of versions as they are here: [`RootInput::Found`] follows for each.
    FindDigests(Vec<Item>),
    /// Stop serving a version, whose bytes here differ from the published ones.
    Spoil(Item),
    /// Answer a client: how many copies match, and the others. Of the sender's own copies only the
    /// version and the verdict are filled in.
    AnswerScrub {
        client: u64,
        same: usize,
        others: Vec<scrub::ScrubCheck>,
    },
}

/// What the sender knows of other hosts, and what it must do next.
#[derive(Debug)]
pub(crate) struct RootPlan {
    run: Run,
    /// The names of the models.
    models: Vec<String>,
    pub(crate) agents: BTreeMap<AgentId, AgentRecord>,
    pub(crate) topology: Topology,
    pub(crate) membership: Membership<WorkerRecord, WorkerJoin>,
    recent: Recent,
    /// Workers that want the newest version and have taken none yet, by agent.
    fresh: BTreeSet<(AgentId, WorkerId)>,
    scrubs: Scrubs,
    /// Clients that wait for comparisons.
    rounds: Vec<Round<u64>>,
    /// The time of this step.
    now: Duration,
    /// What this step has decided so far.
    effects: Vec<RootEffect>,
}

impl RootPlan {
    /// The plan of a sender that no agent has reached yet.
    pub(crate) fn new(run: Run, models: Vec<String>, arity: usize) -> Self {
        Self {
            run,
            models,
            agents: BTreeMap::new(),
            topology: Topology::new(arity),
            membership: Membership::new(),
            recent: Recent::default(),
            fresh: BTreeSet::new(),
            scrubs: Scrubs::default(),
            rounds: Vec::new(),
            now: Duration::ZERO,
            effects: Vec::new(),
        }
    }

    /// Notes what has happened; returns what to do.
    pub(crate) fn step(
        &mut self,
        now: Duration,
        inputs: impl IntoIterator<Item = RootInput>,
    ) -> Vec<RootEffect> {
        self.now = now;
        for input in inputs {
            self.note(input);
        }
        std::mem::take(&mut self.effects)
    }

    /// When [`RootInput::Time`] is due next.
    pub(crate) fn due(&self) -> Option<Duration> {
        let due = [self.membership.due(), self.topology.due()];
        due.into_iter().flatten().min()
    }

    fn note(&mut self, input: RootInput) {
        match input {
            RootInput::Connected { agent, from } => {
                self.agents.insert(agent, AgentRecord::new(from));
            }
            RootInput::Message { agent, message } => self.on_message(agent, message),
            RootInput::Ended { agent, how, reason } => self.remove_agent(agent, how, reason, false),
            RootInput::Admitted(joiner) => self.admitted(joiner),
            RootInput::Changed(workers) => self.read(workers),
            RootInput::Mailboxes {
                sent_to_all: (sequence, set),
                mailboxes,
            } => {
                // First the newest set: `notify` may look for an older one for a worker that has
                // just joined.
                self.recent.note(sequence, set);
                self.notify(mailboxes);
            }
            RootInput::Time => {
                for (one, departure) in self.membership.expire(self.now) {
                    self.leave(one.worker, departure);
                }
                let assigned = self.topology.retry_avoided(self.now);
                self.assign(assigned);
            }
            RootInput::Scrub { client, own } => self.scrub(client, own),
            RootInput::ScrubEnds { client } => self.rounds.retain(|one| one.answer != client),
            RootInput::Keep(item) => self.keep(item),
            RootInput::Found { item, now, then } => {
                let checked = self.scrubs.found(item, now, then);
                self.checked(&checked);
            }
        }
    }

    /// Handles an agent's message. One arm for each message, so that the whole vocabulary of an
    /// agent is seen at once; what an arm decides stands elsewhere.
    // Longer than a screen: a table with one short arm for each message.
    fn on_message(&mut self, agent: AgentId, message: ToRoot) {
        // A message may still be in the queue when its agent is removed.
        let Some(known) = self.agents.get_mut(&agent) else {
            return;
        };
        // The first message, and no other, is the introduction. Before it the agent has no host and
        // no process, so it can act for no worker.
        if known.introduced.is_none() != matches!(message, ToRoot::Agent { .. }) {
            self.drop_agent(agent, "its first message is invalid");
            return;
        }
        match message {
            ToRoot::Agent {
                name,
                host,
                pid,
                bulk,
                seen,
                holds,
                run,
            } => {
                // Versions of another run have other bytes, whatever their numbers.
                let holds = if run == Some(self.run) { holds } else { vec![] };
                self.introduce(agent, (name, HostProcess { host, pid }), bulk, seen, holds);
            }
            ToRoot::Join(asks) => self.join(MembershipWaiter {
                agent,
                who: asks.who,
                asks,
            }),
            ToRoot::Progress { workers } => {
                for progress in workers {
                    self.progress(agent, progress);
                }
            }
            ToRoot::Gone { who, died } => self.gone(agent, who, died),
            ToRoot::Unusable { who, reason } => {
                // An agent that no longer reaches the worker reports something old. What the worker
                // does elsewhere counts.
                if self.reaches(agent, who) {
                    let effect = RootEffect::Unusable(who.worker, reason);
                    self.effects.push(effect);
                }
            }
            ToRoot::Ask {
                who,
                question,
                want,
            } => {
                if self.reaches(agent, who) {
                    let effect = RootEffect::Ask(agent, who, question, want);
                    self.effects.push(effect);
                }
            }
            ToRoot::Withdraw { who } => {
                if self.reaches(agent, who) {
                    self.effects.push(RootEffect::Withdraw(who.worker));
                }
            }
            ToRoot::Holds { have, dropped } => self.note_holdings(agent, have, dropped),
            ToRoot::Received {
                parent,
                bytes,
                micros,
                ..
            } => self.note_received((parent, agent), bytes, Duration::from_micros(micros)),
            ToRoot::ParentLost { parent, .. } => {
                let failed = LeftParent::Failed { now: self.now };
                let assigned = self.topology.leave_parent(agent, parent, failed);
                self.assign(assigned);
            }
            ToRoot::Altered {
                parent,
                item,
                block,
            } => self.altered(agent, parent, item, block),
            // The agent asks the sender itself next.
            ToRoot::Missing { .. } => {}
            // The link passes a ping on only while a sign of life is awaited.
            ToRoot::Ping => self.deny_waiting(agent),
            // The end of its link, which follows, counts as leaving in order.
            ToRoot::Goodbye => known.leaves = true,
            ToRoot::Scrubbed { item, digest } => {
                let checked = self.scrubs.digest_received(item, agent, digest);
                self.checked(checked.as_slice());
            }
        }
    }

    fn send(&mut self, agent: AgentId, message: FromRoot) {
        self.effects.push(RootEffect::Send(agent, message));
    }
}
