//! The driver of an agent: it performs the decisions of its [plan](super::plan).

mod asks;
mod convert;
mod fetched;
mod messages;
mod perform;
mod reconnect;
mod scrub;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use weightsync_core::digest::Digest;
use weightsync_core::{Run, WorkerId};
use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_mem::protocol::MAX_SLOTS;
use weightsync_mem::{
    self as mem, Delivery, Ending, Listener, PartialSlot, Relay, SegmentOptions, Snapshot,
    WaitStyle, WorkerInstance,
};

use self::asks::Question;
use self::convert::join_message;
use super::join::Joined;
use super::plan::{Input, Item, Plan};
use super::{AgentOptions, StartError};
use crate::bulk::{
    Connections, Fetch, FetchEnd, Held, MEASURABLE, Parent, Served, Serving, Store, Threads,
    Transferred,
};
use crate::link::Credentials;
use crate::link::listen::accept_all;
use crate::link::{Link, LinkEnd, STARVED};
use crate::wire::hello::Role;
use crate::wire::message::{FromRoot, ToRoot, WorkerProgress};

/// How often the driver looks for room while there is none.
const ROOM: Duration = Duration::from_millis(20);

/// How often the driver reports to the sender how much of an arriving version is here.
const MEASURE: Duration = Duration::from_secs(1);

/// How often the driver runs at the least, so that it notices a standstill of its process.
const RUNS: Duration = Duration::from_secs(1);

/// How long an agent goes on delivering what it was sent after its sender has shut down.
const LINGER: Duration = Duration::from_secs(5);

/// What a driver reacts to.
pub(crate) enum Event {
    /// A message of the sender, or the end of a link to it.
    Root {
        number: u64,
        what: Result<FromRoot, LinkEnd>,
    },
    /// Events of this host's workers.
    Near(Vec<mem::Event>),
    /// A fetch has ended.
    Fetched(Fetched),
    /// Something was served to a relay below.
    Served(Served),
    /// The digest of a version was computed, or that was given up.
    Scrubbed { item: Item, digest: Option<Digest> },
    /// The agent is to leave.
    Stop,
}

/// A fetch that has ended.
pub(crate) struct Fetched {
    number: u64,
    item: Item,
    /// The agent that it was fetched from.
    parent: u64,
    end: FetchEnd,
    came: Transferred,
}

pub(crate) struct Driver {
    options: AgentOptions,
    credentials: Credentials,
    run: Run,
    agent: u64,
    root: SocketAddr,
    /// The link to the sender and its number; none while the link is broken.
    link: Option<(u64, Link<ToRoot>)>,
    links: u64,
    events: mpsc::Sender<Event>,
    relay: Arc<Relay>,
    near: Option<std::thread::JoinHandle<()>>,
    plan: Plan,
    parent: Option<Parent>,
    coming: BTreeMap<Item, (Arc<PartialSlot>, Arc<Held>)>,
    whole: BTreeMap<Item, Snapshot>,
    fetching: BTreeMap<Item, Fetching>,
    fetches: u64,
    /// The versions whose digests are wanted; the first is being computed.
    scrubs: VecDeque<Item>,
    /// When to look for room again, if there was none.
    room: Instant,
    /// When to report to the sender how much has arrived.
    measures: Instant,
    /// How many fetches in a row broke off.
    failures: u32,
    /// When to report to the sender that a parent is lost.
    complain: Option<(Instant, u64, String)>,
    log_limiter: LogLimiter,
    workers: BTreeMap<WorkerId, Worker>,
    joining: BTreeMap<u64, Joining>,
    /// Workers announced again to a sender that may know them, by ticket.
    rejoining: BTreeMap<u64, WorkerInstance>,
    /// The link on which the sender was silent, until the sender knows the workers on the new one.
    before: Option<(u64, Link<ToRoot>)>,
    tickets: u64,
    store: Arc<Store>,
    threads: Arc<Threads>,
    connections: Arc<Connections>,
    bulk: Option<u16>,
    serves: Option<SocketAddr>,
    /// How many bytes of versions have been fetched.
    travelled: Arc<AtomicU64>,
    /// The sender has said goodbye. The agent ends once nothing is pending, or at this time.
    closes: Option<Instant>,
}

struct Worker {
    who: WorkerInstance,
    joining: Joining,
    /// The worker's question until it is answered.
    asks: Option<Question>,
}

/// A fetch under way.
struct Fetching {
    number: u64,
    parent: Parent,
    /// The fetch goes to the sender instead of the parent.
    instead: bool,
    /// Dropping this stops the fetch.
    fetch: Fetch,
}

/// What a worker stated when it joined.
#[derive(Clone)]
struct Joining {
    who: WorkerInstance,
    pid: u32,
    models: u64,
    delivery: Delivery,
    device: String,
    seen: weightsync_core::Epoch,
    /// The number that the segment gives it until it is admitted.
    ticket: u64,
}

impl Driver {
    /// Makes the segment, and the threads around it.
    pub(super) fn start(
        options: &AgentOptions,
        credentials: Credentials,
        joined: Joined,
        listener: Listener,
        events: mpsc::Sender<Event>,
    ) -> Result<Self, StartError> {
        let Joined {
            link,
            root,
            run,
            agent,
            slots,
            pid,
            verify,
            models,
            bulk,
            ..
        } = joined;
        let segment = SegmentOptions {
            // One slot for the live version and one for the next. A slow relay below gets a slot of
            // its own once there is one.
            slots: slots.max(2),
            // A worker that holds many versions must not hold up other hosts, so the relay grows
            // instead, which costs memory only here.
            max_slots: MAX_SLOTS as u8,
            history: 0,
            wait: WaitStyle::Sleep,
            refused: log_limiter::refused,
            // The trainer decides who may join, and with what queue.
            ..SegmentOptions::default()
        };
        let relay = Relay::create(listener, options.secret, (run, pid), &models, segment)
            .map_err(StartError::Memory)?;
        let relay = Arc::new(relay);
        let near = watch(&relay, &events).map_err(StartError::os("starting the relay's watch"))?;
        let store = Arc::new(Store::of_relay());
        let threads = Arc::new(Threads::default());
        let serves = bulk.as_ref().and_then(|bulk| bulk.local_addr().ok());
        if let Some(bulk) = bulk {
            let told = events.clone();
            let tell = move |served| {
                let _ = told.blocking_send(Event::Served(served));
            };
            let serving = Serving::new((run, models.len()), store.clone(), threads.clone(), tell);
            let take = move |socket, _from, role| {
                if role == Role::Bulk {
                    tokio::spawn(serving.clone().child(socket));
                }
            };
            tokio::spawn(accept_all(
                bulk,
                credentials.clone(),
                || false,
                |_| {},
                take,
            ));
        }
        let connections = Connections::new(
            credentials.clone(),
            (run, agent),
            options.connections,
            verify.then_some(root),
        );
        Ok(Self {
            options: options.clone(),
            credentials,
            run,
            agent,
            root,
            link: Some((0, link)),
            links: 0,
            events,
            relay,
            near: Some(near),
            plan: Plan::new(),
            parent: None,
            coming: BTreeMap::new(),
            whole: BTreeMap::new(),
            fetching: BTreeMap::new(),
            fetches: 0,
            scrubs: VecDeque::new(),
            room: Instant::now(),
            measures: Instant::now(),
            failures: 0,
            complain: None,
            log_limiter: LogLimiter::default(),
            workers: BTreeMap::new(),
            joining: BTreeMap::new(),
            rejoining: BTreeMap::new(),
            before: None,
            tickets: 0,
            store,
            threads,
            connections: Arc::new(connections),
            bulk: serves.map(|serves| serves.port()),
            serves,
            travelled: Arc::default(),
            closes: None,
        })
    }

    pub(super) fn serves(&self) -> Option<SocketAddr> {
        self.serves
    }

    pub(super) fn travelled(&self) -> Arc<AtomicU64> {
        self.travelled.clone()
    }

    /// Runs until the sender ends or the agent is to leave.
    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Event>) -> Ending {
        let ending = loop {
            if let Some(closes) = self.closes
                && (!self.plan.is_pending() || Instant::now() >= closes)
            {
                break Ending::Closed;
            }
            let room = self.plan.waits_for_room().then_some(self.room);
            let complain = self.complain.as_ref().map(|(at, ..)| *at);
            let measures = (!self.fetching.is_empty()).then_some(self.measures);
            let due = [room, complain, measures, self.closes];
            let since = Instant::now();
            let due = due.into_iter().flatten().fold(since + RUNS, Instant::min);
            let event = tokio::select! {
                event = inbox.recv() => Some(event.unwrap_or(Event::Stop)),
                () = tokio::time::sleep_until(due) => None,
            };
            tell_of_a_standstill(since.elapsed());
            let Some(event) = event else {
                self.timers();
                continue;
            };
            match event {
                Event::Stop => break Ending::Moved,
                Event::Root { number, what } => {
                    if self
                        .link
                        .as_ref()
                        .is_none_or(|(current, _)| *current != number)
                    {
                        continue;
                    }
                    match what {
                        Ok(message) => self.on_message(message),
                        Err(end) => {
                            let link = self.link.take();
                            // A sender that gets to run again would take a closed link for the
                            // death of this process.
                            if matches!(end, LinkEnd::Silent(_)) {
                                self.before = link;
                            }
                            if let Some(ending) = self.reconnect(&end, &mut inbox).await {
                                break ending;
                            }
                        }
                    }
                }
                Event::Near(events) => self.on_local(events),
                Event::Fetched(fetched) => self.fetched(fetched),
                Event::Served(served) => self.served(served),
                Event::Scrubbed { item, digest } => self.scrubbed(item, digest),
            }
        };
        self.end(ending, inbox).await
    }

    async fn end(mut self, ending: Ending, mut inbox: mpsc::Receiver<Event>) -> Ending {
        self.relay.close(ending);
        self.store.close();
        self.fetching.clear();
        self.threads.stop();
        let (near, threads) = (self.near.take(), self.threads.clone());
        let mut joined = tokio::task::spawn_blocking(move || {
            if let Some(near) = near {
                // The panic hook has already reported a panic there.
                let _ = near.join();
            }
            threads.join();
        });
        // Empties the inbox until the threads have ended: a thread that waits for room in it could
        // not end. The sender still gets the last events of workers.
        loop {
            tokio::select! {
                biased;
                Some(event) = inbox.recv() => {
                    if let Event::Near(events) = event {
                        self.on_local(events);
                    }
                }
                _ = &mut joined => break,
            }
        }
        while let Ok(event) = inbox.try_recv() {
            if let Event::Near(events) = event {
                self.on_local(events);
            }
        }
        let last = self.relay.last_events();
        self.on_local(last);
        for (_, link) in [self.link.take(), self.before.take()].into_iter().flatten() {
            link.send(&ToRoot::Goodbye);
            link.finish().await;
        }
        ending
    }

    fn timers(&mut self) {
        let now = Instant::now();
        if let Some((_, parent, reason)) = self.complain.take_if(|(at, ..)| now >= *at) {
            self.send(&ToRoot::ParentLost { parent, reason });
        }
        if now >= self.measures {
            self.measures = now + MEASURE;
            let fetching = self.fetching.iter();
            let came = fetching.map(|(item, one)| {
                (
                    *item,
                    one.parent.agent,
                    one.fetch.take_transferred(MEASURABLE),
                )
            });
            for (item, parent, came) in came.collect::<Vec<_>>() {
                self.send_received(item, parent, came);
            }
        }
        if self.plan.waits_for_room() && now >= self.room {
            self.room = now + ROOM;
            self.step([Input::MayHaveRoom]);
        }
    }

    fn on_local(&mut self, events: Vec<mem::Event>) {
        let mut progress = Vec::new();
        let mut inputs = Vec::new();
        for event in events {
            match event {
                mem::Event::Joins {
                    ticket,
                    who,
                    pid,
                    models,
                    delivery,
                    device,
                    seen,
                } => {
                    let joining = Joining {
                        who,
                        pid,
                        models: models.0,
                        delivery,
                        device,
                        seen,
                        ticket,
                    };
                    self.ask_in(joining);
                }
                mem::Event::Progress(one) => {
                    self.is_answered(one.who, one.through);
                    progress.push(one);
                }
                mem::Event::Unusable { who, reason } => self.send(&ToRoot::Unusable {
                    worker: who.worker,
                    instance: who.instance,
                    reason,
                }),
                mem::Event::Asks {
                    who,
                    question,
                    want,
                } => self.asks(who, question, want),
                mem::Event::Withdraws { who } => inputs.extend(self.withdraws(who)),
                mem::Event::Gone { who, died } => {
                    // Progress is reported before a departure, as the sender forgets the worker
                    // then.
                    self.send_progress(std::mem::take(&mut progress));
                    if self.worker(who).is_some() {
                        self.workers.remove(&who.worker);
                    }
                    self.send(&ToRoot::Gone {
                        worker: who.worker,
                        instance: who.instance,
                        died,
                    });
                    inputs.push(Input::Left { who });
                }
            }
        }
        self.send_progress(progress);
        // A slot that workers released may be room for the next version.
        inputs.push(Input::MayHaveRoom);
        self.step(inputs);
    }

    /// An admitted worker of this instance.
    fn worker(&mut self, who: WorkerInstance) -> Option<&mut Worker> {
        let worker = self.workers.get_mut(&who.worker);
        worker.filter(|one| one.who == who)
    }

    /// Asks the sender to admit a worker.
    fn ask_in(&mut self, joining: Joining) {
        for gave_up in self.take_those_who_gave_up() {
            // The number may already belong to the same worker again, or to another one.
            if gave_up != joining.who {
                self.send(&ToRoot::Gone {
                    worker: gave_up.worker,
                    instance: gave_up.instance,
                    died: false,
                });
            }
        }
        self.tickets += 1;
        let ticket = self.tickets;
        self.send(&join_message(ticket, &joining));
        self.joining.insert(ticket, joining);
    }

    /// Workers that no longer wait for admission: they died or found another route.
    fn take_those_who_gave_up(&mut self) -> Vec<WorkerInstance> {
        let relay = &self.relay;
        let gave_up = self
            .joining
            .extract_if(.., |_, one| !relay.waits(one.ticket));
        gave_up.map(|(_, one)| one.who).collect()
    }

    fn send_progress(&mut self, progress: Vec<mem::Progress>) {
        if progress.is_empty() {
            return;
        }
        let all = progress.into_iter().map(|one| WorkerProgress {
            worker: one.who.worker,
            instance: one.who.instance,
            taken: one.taken,
            through: one.through,
            loaded: one.loaded,
            versions: one
                .versions
                .into_iter()
                .map(|(model, version)| Item { model, version })
                .collect(),
            refused: one.refused,
        });
        for message in ToRoot::progress(all.collect()) {
            self.send(&message);
        }
    }

    fn served(&mut self, served: Served) {
        match served {
            Served::Wanted { item } => self.step([Input::Wanted { item }]),
            Served::Unwanted { item } => self.step([Input::Unwanted { item }]),
            Served::Sent { .. } => {}
        }
    }

    fn send(&mut self, message: &ToRoot) {
        if let Some((_, link)) = &self.link
            && !link.send(message)
        {
            tracing::warn!("the sender does not keep up");
        }
    }
}

/// Says that this process did not get to run while it waited, for at most [`RUNS`] by its own will.
fn tell_of_a_standstill(waited: Duration) {
    if waited >= STARVED {
        tracing::warn!(
            "this process was stopped, or did not get to run, for {waited:.1?}; what waited for it \
             may have gone elsewhere until it is back"
        );
    }
}

/// Watches the workers of this host.
fn watch(
    relay: &Arc<Relay>,
    events: &mpsc::Sender<Event>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let (relay, events) = (relay.clone(), events.clone());
    std::thread::Builder::new()
        .name("weightsync-near".into())
        .spawn(move || {
            // Ends when the segment is closed.
            while let Ok(near) = relay.wait(None) {
                if !near.is_empty() && events.blocking_send(Event::Near(near)).is_err() {
                    return;
                }
            }
        })
}

#[cfg(test)]
mod tests;
