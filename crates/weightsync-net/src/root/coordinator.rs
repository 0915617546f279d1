//! The sender's coordinator: `event → plan → effects`.
//!
//! One task owns the links to agents, the remote readers of their workers, and the
//! [plan](super::plan) that decides. It takes one event after the other and never waits for an
//! agent. [`perform`] has every effect.

mod perform;
mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use weightsync_core::WorkerId;
use weightsync_core::digest::Digest;
use weightsync_engine::log_limiter::LogLimiter;
use weightsync_engine::transport::SendHistory;
use weightsync_link::stream::AsyncStream;
use weightsync_link::{Link, LinkEnd};
use weightsync_mem::threads::LockExt as _;
use weightsync_mem::{RemoteReader, RemoteReaders, Snapshot};

use super::membership::LinkLoss;
use super::plan::{RootInput, RootPlan};
use super::topology::AgentId;
use crate::agent::Item;
use crate::bulk::{BlockStore, Threads};
use crate::wire::message::{FromRoot, ToRoot, Welcome};

/// How long a sender that shuts down goes on serving the versions that it has announced.
// An agent ends its link once it has what was announced to it. So only a host behind a slow link
// uses all of this time.
const LINGER: Duration = Duration::from_secs(5);

/// What a coordinator reacts to.
pub(crate) enum CoordinatorEvent {
    /// An agent has connected.
    Connected {
        socket: AsyncStream,
        from: SocketAddr,
    },
    /// A message of an agent, or the end of its link.
    Message {
        agent: AgentId,
        what: Result<ToRoot, LinkEnd>,
    },
    /// A status query.
    Status(oneshot::Sender<String>),
    /// A request to compare all versions with the published ones.
    Scrub(oneshot::Sender<String>),
    /// The digest of a version's bytes at the sender, and the published one if it was noted; `None`
    /// if the sender no longer has the version.
    Found {
        item: Item,
        now: Option<Digest>,
        then: Option<Digest>,
    },
    /// A version was published that agents will be compared with.
    Keep(Snapshot),
    /// The sender shuts down.
    Stop,
}

/// Workers that may need a notification.
#[derive(Debug, Default)]
pub(crate) struct ChangedWorkers {
    // A set: however many sends come between two looks of the coordinator, a worker has one entry.
    workers: Mutex<BTreeSet<WorkerId>>,
    // `Notify` keeps one permit, so a ring while the coordinator is busy is not lost.
    bell: Notify,
}

impl ChangedWorkers {
    /// Marks a worker as one that may need a notification.
    pub(crate) fn ring(&self, worker: WorkerId) {
        // The sender's threads ring under the segment's lock, so this must not wait for the
        // coordinator.
        let mut workers = self.workers.locked();
        workers.insert(worker);
        drop(workers);
        // After the insertion: the coordinator that this wakes must find the worker.
        self.bell.notify_one();
    }

    fn take(&self) -> BTreeSet<WorkerId> {
        std::mem::take(&mut *self.workers.locked())
    }
}

/// What a coordinator works with; constant for its whole life.
pub(crate) struct CoordinatorSettings {
    /// What each agent is told first, but for its number.
    pub(crate) welcome: Welcome,
    /// What the sender notes of its sends, for the status.
    pub(crate) history: Arc<SendHistory>,
    /// The names of the models.
    pub(crate) models: Vec<String>,
    pub(crate) arity: usize,
    /// The models as frames, the same for every agent.
    pub(crate) descriptions: Arc<[u8]>,
    /// Bytes that this process has sent to children.
    pub(crate) served: Arc<AtomicU64>,
    /// The versions that this process serves.
    pub(crate) store: Arc<BlockStore>,
    /// The threads that serve them.
    pub(crate) threads: Arc<Threads>,
}

pub(crate) struct Coordinator {
    settings: CoordinatorSettings,
    remote_readers: RemoteReaders,
    changes: Arc<ChangedWorkers>,
    events: mpsc::Sender<CoordinatorEvent>,
    /// How many agents there are, for the listener.
    count: Arc<AtomicUsize>,
    plan: RootPlan,
    links: BTreeMap<AgentId, AgentLink>,
    /// The segment's end of each member.
    readers: BTreeMap<WorkerId, RemoteReader>,
    last_agent: AgentId,
    /// Links of refused agents, until the reason has been sent.
    ending: JoinSet<()>,
    log_limiter: LogLimiter,
    /// Clients that wait for a comparison of all copies.
    clients: BTreeMap<u64, oneshot::Sender<String>>,
    last_client: u64,
    /// A version that was published just now, and is about to be compared.
    at_hand: Option<Snapshot>,
    since: Instant,
}

/// The link to an agent, and where it comes from.
struct AgentLink {
    link: Link<FromRoot>,
    from: SocketAddr,
}

impl Coordinator {
    pub(crate) fn new(
        settings: CoordinatorSettings,
        remote_readers: RemoteReaders,
        changes: Arc<ChangedWorkers>,
        events: mpsc::Sender<CoordinatorEvent>,
        count: Arc<AtomicUsize>,
    ) -> Self {
        let (run, models) = (settings.welcome.run, settings.models.clone());
        Self {
            plan: RootPlan::new(run, models, settings.arity),
            settings,
            remote_readers,
            changes,
            events,
            count,
            links: BTreeMap::new(),
            readers: BTreeMap::new(),
            last_agent: 0,
            ending: JoinSet::new(),
            log_limiter: LogLimiter::default(),
            clients: BTreeMap::new(),
            last_client: 0,
            at_hand: None,
            since: Instant::now(),
        }
    }

    /// Handles events until the sender shuts down, and then until every agent has the versions that
    /// were announced to it, but not for long.
    pub(crate) async fn run(mut self, mut events: mpsc::Receiver<CoordinatorEvent>) {
        let mut stops: Option<Instant> = None;
        // A handle of its own, because the branches below borrow all of `self`.
        let changes = self.changes.clone();
        loop {
            // Every link has ended: no agent is left to serve.
            if stops.is_some() && self.links.is_empty() {
                return;
            }
            let due = self.plan.due().map(|due| self.since + due);
            let due = due.into_iter().chain(stops).min();
            // Tokio takes the ready branches in random order. So a flood of messages delays neither
            // the mailboxes nor the deadlines for long.
            tokio::select! {
                event = events.recv() => match event {
                    Some(CoordinatorEvent::Stop) => {
                        stops = Some(Instant::now() + LINGER);
                        // Sets published before this event are sent before it is handled.
                        self.step([RootInput::Changed(changes.take())]);
                        // After the last notifications. A link keeps the order, so an agent hears
                        // of the last set before it hears of the end.
                        for agent in self.links.values() {
                            agent.link.send(&FromRoot::Goodbye);
                        }
                    }
                    // The sender has said goodbye to everybody. A new client sees a closed link,
                    // and looks for the successor.
                    Some(CoordinatorEvent::Connected { .. }) if stops.is_some() => {}
                    Some(event) => self.handle(event),
                    None => return,
                },
                () = changes.bell.notified() => self.step([RootInput::Changed(changes.take())]),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    let now = Instant::now();
                    // Agents that are not done by now lose their links when this task ends.
                    if stops.is_some_and(|at| now >= at) {
                        return;
                    }
                    self.step([RootInput::Time]);
                }
            }
        }
    }

    fn handle(&mut self, event: CoordinatorEvent) {
        match event {
            CoordinatorEvent::Connected { socket, from } => {
                // A number is never used again, so a late event of an old link cannot reach a new
                // agent.
                self.last_agent += 1;
                let agent = self.last_agent;
                let on_event = move |what| CoordinatorEvent::Message { agent, what };
                let link = Link::start(socket, &self.events, on_event);
                self.links.insert(agent, AgentLink { link, from });
                // The listener turns agents away by this count, and a send looks whether there are
                // agents at all.
                self.count.store(self.links.len(), Ordering::Relaxed);
                self.step([RootInput::Connected { agent, from }]);
            }
            CoordinatorEvent::Message { agent, what } => match what {
                Ok(message) => self.step([RootInput::Message { agent, message }]),
                Err(end) => self.ended(agent, &end),
            },
            CoordinatorEvent::Status(answer) => {
                // The client may have gone.
                let _ = answer.send(self.status());
            }
            CoordinatorEvent::Scrub(answer) => self.scrub(answer),
            CoordinatorEvent::Found { item, now, then } => {
                self.step([RootInput::Found { item, now, then }])
            }
            CoordinatorEvent::Keep(snapshot) => {
                let item = Item {
                    model: snapshot.model(),
                    version: snapshot.version(),
                };
                self.at_hand = Some(snapshot);
                self.step([RootInput::Keep(item)]);
                self.at_hand = None;
            }
            // `run` handles it.
            CoordinatorEvent::Stop => {}
        }
    }

    /// An agent's link has ended.
    fn ended(&mut self, agent: AgentId, end: &LinkEnd) {
        let reason = end.to_string();
        // Before the plan removes the agent: the warning takes the address from its link.
        if let Some(cause) = end.misbehaviour() {
            self.warn(cause, agent, &reason);
        }
        let how = match end {
            LinkEnd::HungUp => LinkLoss::HungUp,
            // A killed process resets its connections: the first kind of error answers data that it
            // had not read, and the others answer later writes.
            LinkEnd::Failed(error)
                if matches!(
                    error.kind(),
                    ErrorKind::ConnectionReset
                        | ErrorKind::BrokenPipe
                        | ErrorKind::ConnectionAborted
                ) =>
            {
                LinkLoss::HungUp
            }
            // Other errors come from the network between the two hosts. The process may well live.
            LinkEnd::Failed(_) => LinkLoss::Cut,
            // This end gave the link up, so it does not know whether the process lives.
            LinkEnd::Silent(_)
            | LinkEnd::Stuck
            | LinkEnd::Behind
            | LinkEnd::Frame(_)
            | LinkEnd::Message(_) => LinkLoss::Silent,
        };
        self.step([RootInput::Ended { agent, how, reason }]);
    }

    /// Has every copy compared for a client.
    fn scrub(&mut self, answer: oneshot::Sender<String>) {
        // No event says that a client has hung up. Clients that left before their answer are
        // removed here.
        let gone = self.clients.extract_if(.., |_, one| one.is_closed());
        let gone: Vec<_> = gone.map(|(client, _)| client).collect();
        self.step(
            gone.into_iter()
                .map(|client| RootInput::ScrubEnds { client }),
        );
        let own = (0..self.settings.models.len()).map(|model| Item {
            model,
            version: self.remote_readers.version(model),
        });
        let own = own.filter(|item| !item.version.is_none()).collect();
        self.last_client += 1;
        let client = self.last_client;
        self.clients.insert(client, answer);
        self.step([RootInput::Scrub { client, own }]);
    }
}

#[cfg(test)]
mod tests;
