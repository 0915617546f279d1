//! The sender's coordinator: it knows the agents of other hosts and their workers, and sends
//! each what its workers are to run.
//!
//! One task owns all of this state. It takes one event after the other and never waits for an
//! agent.

mod holdings;
pub(super) mod scrubbing;
mod status;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use weightsync_core::digest::Digest;
use weightsync_core::{WorkerId, WorkerRoute};
use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_engine::transport::SendHistory;
use weightsync_mem::{Models, RemoteReaderOptions, RemoteReaders, Snapshot};

use self::holdings::Holdings;
use self::workers::{Asks, Worker};
use super::membership::{AgentDeparture, LinkLoss, Membership, Process, Waiter};
use super::recent::Recent;
use super::scrub::{Round, Scrubs};
use super::topology::{AgentId, Assigned, Endpoint, LeftParent, Topology};
use crate::bulk::{Store, Threads};
use crate::link::stream::AsyncStream;
use crate::link::{Link, LinkEnd};
use crate::relay::Item;
use crate::wire::message::{FromRoot, RefusalRemedy, ToRoot};

/// How long a sender that shuts down goes on serving the versions that it has announced.
const LINGER: Duration = Duration::from_secs(5);

/// The reason for closing the link of an agent that claims more versions than its slots can hold.
const TOO_MUCH: &str = "it claims more versions than can exist";

/// What a coordinator reacts to.
pub(crate) enum Event {
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
pub(crate) struct Changes {
    workers: Mutex<BTreeSet<WorkerId>>,
    bell: Notify,
}

impl Changes {
    /// Marks a worker as one that may need a notification.
    pub(crate) fn ring(&self, worker: WorkerId) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.insert(worker);
        drop(workers);
        self.bell.notify_one();
    }

    fn take(&self) -> BTreeSet<WorkerId> {
        std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a coordinator works with; constant for its whole life.
pub(crate) struct Settings {
    /// The sender's name for itself.
    pub(crate) address: String,
    /// What the sender notes of its sends, for the status.
    pub(crate) history: Arc<SendHistory>,
    pub(crate) models: Vec<String>,
    pub(crate) slots: u8,
    pub(crate) max_slots: u8,
    pub(crate) arity: usize,
    /// Whether agents compare what relays send with the sender's digests.
    pub(crate) verify: bool,
    /// The models as frames, the same for every agent.
    pub(crate) descriptions: Arc<[u8]>,
    /// Bytes that this process has sent to children.
    pub(crate) served: Arc<AtomicU64>,
    /// The versions that this process serves.
    pub(crate) store: Arc<Store>,
    /// The threads that serve them.
    pub(crate) threads: Arc<Threads>,
}

pub(crate) struct Coordinator {
    settings: Settings,
    remote_readers: RemoteReaders,
    changes: Arc<Changes>,
    events: mpsc::Sender<Event>,
    topology: Topology,
    /// How many agents there are, for the listener.
    count: Arc<AtomicUsize>,
    agents: BTreeMap<AgentId, Agent>,
    last_agent: AgentId,
    /// Links of refused agents, until the reason has been sent.
    ending: JoinSet<()>,
    log_limiter: LogLimiter,
    scrubs: Scrubs,
    /// Clients that wait for comparisons.
    rounds: Vec<Round<oneshot::Sender<String>>>,
    membership: Membership<Worker, Asks>,
    recent: Recent,
    /// Workers that want the newest version and have taken none yet, by agent.
    fresh: BTreeSet<(AgentId, WorkerId)>,
    since: Instant,
}

/// One host's agent.
struct Agent {
    link: Link<FromRoot>,
    from: SocketAddr,
    /// The agent's first message, once it has arrived.
    known: Option<Known>,
    /// The agent has said goodbye.
    leaves: bool,
    received: u64,
    /// The agents that got other bytes from this one than were published.
    altered_for: BTreeSet<AgentId>,
}

struct Known {
    name: String,
    process: Process,
    holds: Holdings,
}

impl Coordinator {
    pub(crate) fn new(
        settings: Settings,
        remote_readers: RemoteReaders,
        changes: Arc<Changes>,
        events: mpsc::Sender<Event>,
        count: Arc<AtomicUsize>,
    ) -> Self {
        Self {
            topology: Topology::new(settings.arity),
            settings,
            remote_readers,
            changes,
            events,
            count,
            agents: BTreeMap::new(),
            last_agent: 0,
            ending: JoinSet::new(),
            log_limiter: LogLimiter::default(),
            scrubs: Scrubs::default(),
            rounds: Vec::new(),
            membership: Membership::new(),
            recent: Recent::default(),
            fresh: BTreeSet::new(),
            since: Instant::now(),
        }
    }

    /// Handles events until the sender shuts down, and then until every agent has the versions that
    /// were announced to it, but not for long.
    pub(crate) async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        let mut stops: Option<Instant> = None;
        let changes = self.changes.clone();
        loop {
            if stops.is_some() && self.agents.is_empty() {
                return;
            }
            let due = [self.membership.due(), self.topology.due()]
                .into_iter()
                .flatten();
            let due = due.map(|due| self.since + due).chain(stops).min();
            tokio::select! {
                event = events.recv() => match event {
                    Some(Event::Stop) => {
                        stops = Some(Instant::now() + LINGER);
                        // Sets published before this event are sent before it is handled.
                        self.notify(changes.take());
                        for agent in self.agents.values() {
                            agent.link.send(&FromRoot::Goodbye);
                        }
                    }
                    // The sender has said goodbye to everybody. A new client sees a closed link,
                    // and looks for the successor.
                    Some(Event::Connected { .. }) if stops.is_some() => {}
                    Some(event) => self.handle(event),
                    None => return,
                },
                () = changes.bell.notified() => self.notify(changes.take()),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    let now = Instant::now();
                    if stops.is_some_and(|at| now >= at) {
                        return;
                    }
                    for (worker, departure) in self.membership.late(self.now()) {
                        worker.remote_reader.leave(departure);
                    }
                    let assigned = self.topology.again(self.now());
                    self.assign(&assigned);
                }
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Connected { socket, from } => {
                self.last_agent += 1;
                let agent = self.last_agent;
                let on_event = move |what| Event::Message { agent, what };
                let link = Link::start(socket, &self.events, on_event);
                let known = Agent {
                    link,
                    from,
                    known: None,
                    leaves: false,
                    received: 0,
                    altered_for: BTreeSet::new(),
                };
                self.agents.insert(agent, known);
                self.count.store(self.agents.len(), Ordering::Relaxed);
            }
            Event::Message { agent, what } => match what {
                Ok(message) => self.on_message(agent, message),
                Err(end) => self.ended(agent, &end),
            },
            Event::Status(answer) => {
                // The client may have gone.
                let _ = answer.send(self.status());
            }
            Event::Scrub(answer) => self.scrub(answer),
            Event::Found { item, now, then } => self.found(item, now, then),
            Event::Keep(snapshot) => self.keep(snapshot),
            Event::Stop => {}
        }
    }

    fn on_message(&mut self, agent: AgentId, message: ToRoot) {
        let Some(known) = self.agents.get_mut(&agent) else {
            return;
        };
        if known.known.is_none() != matches!(message, ToRoot::Agent { .. }) {
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
                let own = self.remote_readers.run();
                if seen > own.epoch {
                    let (seen, got) = (seen, own.epoch);
                    let refused = FromRoot::Refused {
                        reason: format!("this sender has {got}, but {seen} was seen before"),
                        remedy: RefusalRemedy::Fenced { seen, got },
                    };
                    self.turn_away(agent, &refused);
                    return;
                }
                let endpoint = bulk.map(|port| Endpoint {
                    address: SocketAddr::new(known.from.ip(), port),
                    host,
                });
                let mut held = Holdings::new(self.settings.models.len());
                if run == Some(own) && !held.change(holds, Vec::new()) {
                    self.drop_agent(agent, TOO_MUCH);
                    return;
                }
                known.known = Some(Known {
                    name,
                    process: Process { host, pid },
                    holds: held,
                });
                let welcome = FromRoot::Welcome {
                    run: own,
                    agent,
                    address: self.settings.address.clone(),
                    models: self.settings.models.len() as u8,
                    slots: self.settings.slots,
                    max_slots: self.settings.max_slots,
                    pid: std::process::id(),
                    verify: self.settings.verify,
                };
                known.link.send(&welcome);
                known.link.send_frames(self.settings.descriptions.clone());
                let assigned = self.topology.join(agent, endpoint);
                self.assign(&assigned);
            }
            ToRoot::Join {
                ticket,
                worker,
                instance,
                pid,
                models,
                delivery,
                device,
                seen,
            } => self.join(Waiter {
                agent,
                worker,
                instance,
                asks: Asks {
                    ticket,
                    options: RemoteReaderOptions {
                        worker,
                        pid,
                        seen,
                        models: Models(models),
                        delivery,
                        device,
                        location: Default::default(),
                    },
                },
            }),
            ToRoot::Progress { workers } => {
                for progress in workers {
                    self.progress(agent, progress);
                }
            }
            ToRoot::Gone {
                worker,
                instance,
                died,
            } => self.gone(agent, (worker, instance), died),
            ToRoot::Unusable {
                worker,
                instance,
                reason,
            } => {
                if let Some(admit) = self.membership.member_at(agent, worker, instance) {
                    admit.remote_reader.refuse(None, reason);
                }
            }
            ToRoot::Ask {
                worker,
                instance,
                question,
                want,
            } => self.ask(agent, (worker, instance), question, want),
            ToRoot::Withdraw { worker, instance } => {
                if let Some(admit) = self.membership.member_at(agent, worker, instance) {
                    admit.remote_reader.withdraw();
                }
            }
            ToRoot::Holds { have, dropped } => {
                if let Some(known) = &mut known.known
                    && !known.holds.change(have.clone(), dropped)
                {
                    self.drop_agent(agent, TOO_MUCH);
                    return;
                }
                self.note_held_by(agent, &have);
                if !have.is_empty() {
                    self.begin_at(agent);
                }
            }
            ToRoot::Received {
                parent,
                bytes,
                micros,
                ..
            } => {
                known.received = known.received.saturating_add(bytes);
                let busy = Duration::from_micros(micros);
                let assigned = self.topology.measured(parent, agent, bytes, busy);
                let rate = self.topology.slowest().unwrap_or(0.0);
                self.settings.store.deltas().note_rate(rate as u64);
                self.assign(&assigned);
            }
            ToRoot::ParentLost { parent, .. } => {
                let why = LeftParent::Failed { now: self.now() };
                let assigned = self.topology.lost(agent, parent, why);
                self.assign(&assigned);
            }
            ToRoot::Altered {
                parent,
                model,
                version,
                block,
            } => {
                let model = model.into();
                self.altered(agent, parent, Item { model, version }, block);
            }
            // The agent asks the sender itself next.
            ToRoot::Missing { .. } => {}
            ToRoot::Ping => self.is_there(agent),
            ToRoot::Goodbye => known.leaves = true,
            ToRoot::Scrubbed {
                model,
                version,
                digest,
            } => {
                let item = Item {
                    model: model.into(),
                    version,
                };
                self.scrubbed(agent, item, digest);
            }
        }
    }

    /// Names a relay that sent other bytes than were published, and passes it over. The word of
    /// the agent that got them moves this agent alone: one that lies could take honest relays from
    /// the others otherwise. Of a relay that is not its parent it can say nothing.
    fn altered(&mut self, agent: AgentId, parent: AgentId, item: Item, block: u32) {
        let assigned = self.topology.lost(agent, parent, LeftParent::Altered);
        self.assign(&assigned);
        let is_its_parent = parent != 0 && !assigned.is_empty();
        let Some(relay) = self.agents.get_mut(&parent).filter(|_| is_its_parent) else {
            return;
        };
        relay.altered_for.insert(agent);
        let name = |agent| {
            let one: Option<&Agent> = self.agents.get(&agent);
            let name = one.and_then(|one| Some((&one.known.as_ref()?.name, one.from.ip())));
            name.map_or_else(
                || format!("agent {agent}"),
                |(name, at)| format!("{name} ({at}, agent {agent})"),
            )
        };
        tracing::warn!(
            "the relay {} sent block {block} of {} {} other than it was published, says {}, which \
             does not fetch from it any more: find out who runs that relay",
            name(parent),
            self.settings.models.get(item.model).map_or("", |name| name),
            item.version,
            name(agent),
        );
    }

    fn assign(&mut self, assigned: &[Assigned]) {
        for one in assigned {
            let parent = FromRoot::Parent {
                agent: one.parent,
                address: one.address.map(|address| address.to_string()),
            };
            self.send(one.agent, &parent);
        }
    }

    /// Sends a message to an agent. If the agent does not keep up, the message is dropped and the
    /// link ends.
    fn send(&self, agent: AgentId, message: &FromRoot) {
        if let Some(known) = self.agents.get(&agent) {
            known.link.send(message);
        }
    }

    /// Refuses an agent, and closes its link once the reason has been sent.
    fn turn_away(&mut self, agent: AgentId, why: &FromRoot) {
        self.send(agent, why);
        if let Some(gone) = self.part(agent, LinkLoss::Silent, "it was refused") {
            while self.ending.try_join_next().is_some() {}
            self.ending.spawn(gone.link.finish());
        }
    }

    fn drop_agent(&mut self, agent: AgentId, why: &'static str) {
        self.warn(why, agent, why);
        self.part(agent, LinkLoss::Silent, why);
    }

    /// An agent's link has ended.
    fn ended(&mut self, agent: AgentId, end: &LinkEnd) {
        let why = end.to_string();
        if let Some(cause) = end.misbehaviour() {
            self.warn(cause, agent, &why);
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
            LinkEnd::Failed(_) => LinkLoss::Cut,
            _ => LinkLoss::Silent,
        };
        self.part(agent, how, &why);
    }

    /// The time since the coordinator began.
    fn now(&self) -> Duration {
        self.since.elapsed()
    }

    /// Logs an agent's misbehaviour, at most one line a minute for each cause.
    fn warn(&mut self, cause: &str, agent: AgentId, why: &str) {
        let Some(one) = self.agents.get(&agent) else {
            return;
        };
        if let Some(held_back) = self.log_limiter.logs(cause, Instant::now().into_std()) {
            let text = format!("agent {agent} at {} is dropped: {why}", one.from);
            log_limiter::warn(held_back, &text);
        }
    }

    /// Removes an agent that has gone.
    fn part(&mut self, agent: AgentId, how: LinkLoss, why: &str) -> Option<Agent> {
        // Checked first, while the agent's name is still known.
        let checked = self.scrubs.gone(agent);
        self.checked(&checked);
        let gone = self.agents.remove(&agent)?;
        self.count.store(self.agents.len(), Ordering::Relaxed);
        self.forget_fresh(agent);
        let how = if gone.leaves { LinkLoss::Left } else { how };
        let process = gone.known.as_ref().map(|known| known.process);
        let AgentDeparture { over, back } = self.membership.part(agent, process, how, self.now());
        for (worker, departure) in over {
            worker.remote_reader.leave(departure);
        }
        for worker in self.membership.unreached() {
            worker.remote_reader.set_route(WorkerRoute::Unreached);
        }
        if let Some(known) = &gone.known {
            tracing::info!(
                "agent {agent} ({}, {}) is gone: {why}",
                known.name,
                gone.from
            );
            let assigned = self.topology.leave(agent);
            self.assign(&assigned);
        }
        for worker in back {
            self.is_back(worker);
        }
        self.retry_waiting();
        Some(gone)
    }
}

#[cfg(test)]
mod tests;
