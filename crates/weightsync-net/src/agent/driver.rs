//! The driver of an agent: `event → plan → effects`.
//!
//! One task owns everything here. It takes one event after the other, and tells the
//! [plan](super::plan) what happened. [`perform`] has every effect that the plan decides on.
//!
//! | concept | file |
//! |---|---|
//! | workers join, ask and leave | [`joining`] |
//! | versions arrive | [`fetching`] |
//! | relays below are served | [`serving`] |
//! | the sender is told | [`reporting`] |
//! | the sender's messages | [`messages`] |
//! | the sender is found again | [`reconnect`] |

mod fetching;
mod joining;
mod messages;
mod perform;
mod reconnect;
mod reporting;
mod scrub;
mod serving;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use weightsync_core::Run;
use weightsync_core::digest::Digest;
use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_link::{Credentials, Link, LinkEnd, STARVED};
use weightsync_mem::protocol::MAX_SLOTS;
use weightsync_mem::threads;
use weightsync_mem::{self as mem, Ending, Listener, RelaySegment, SegmentOptions, WaitStyle};

use self::fetching::{Fetched, Fetches};
use self::joining::Members;
use super::join::JoinedAgent;
use super::plan::{Item, RelayPlan};
use super::{AgentOptions, StartError};
use crate::bulk::{BlockStore, Connections, ServeEvent, Threads};
use crate::scheme::Distributed;
use crate::wire::message::{FromRoot, ToRoot};

/// How often the driver runs at the least, so that it notices a standstill of its process.
const RUNS: Duration = Duration::from_secs(1);

/// How long an agent goes on delivering what it was sent after its sender has shut down.
const LINGER: Duration = Duration::from_secs(5);

/// What a driver reacts to.
pub(crate) enum DriverEvent {
    /// A message of the sender, or the end of a link to it.
    Root {
        number: u64,
        what: Result<FromRoot, LinkEnd>,
    },
    /// Events of this host's workers.
    Local(Vec<mem::WorkerEvent>),
    /// A fetch has ended.
    Fetched(Fetched),
    /// Something was served to a relay below.
    Served(ServeEvent),
    /// The digest of a version was computed, or that was given up.
    Scrubbed { item: Item, digest: Option<Digest> },
    /// The agent is to leave.
    Stop,
}

pub(crate) struct Driver {
    options: AgentOptions,
    credentials: Credentials,
    run: Run,
    /// This agent's number.
    agent: u64,
    root: SocketAddr,
    /// The link to the sender and its number; none while the link is broken.
    link: Option<(u64, Link<ToRoot>)>,
    links: u64,
    /// The link on which the sender was silent, until the sender knows the workers on the new one.
    before: Option<(u64, Link<ToRoot>)>,
    events: mpsc::Sender<DriverEvent>,
    relay: Arc<RelaySegment>,
    /// The thread that watches the workers of this host.
    watch: Option<std::thread::JoinHandle<()>>,
    plan: RelayPlan,
    members: Members,
    fetches: Fetches,
    /// The versions whose digests are wanted; the first is being computed.
    scrubs: VecDeque<Item>,
    log_limiter: LogLimiter,
    store: Arc<BlockStore>,
    threads: Arc<Threads>,
    connections: Arc<Connections>,
    /// Where it serves relays below, if it does.
    serves: Option<SocketAddr>,
    /// How many bytes of versions have been fetched.
    travelled: Arc<AtomicU64>,
    /// The sender has said goodbye. The agent ends once nothing is pending, or at this time.
    closes: Option<Instant>,
}

impl Driver {
    /// Makes the segment, and the threads around it.
    pub(super) fn start(
        options: &AgentOptions,
        credentials: Credentials,
        joined: JoinedAgent,
        listener: Listener,
        events: mpsc::Sender<DriverEvent>,
    ) -> Result<Self, StartError> {
        let JoinedAgent {
            link,
            root,
            welcome,
            models,
            bulk,
        } = joined;
        let (run, agent) = (welcome.run, welcome.agent);
        let scheme = Distributed::told_by_sender(&welcome.settings)
            .map_err(|error| StartError::Broken(error.to_string()))?;
        let (sender, segment) = ((run, welcome.pid), segment(welcome.slots));
        let relay = RelaySegment::create(listener, options.secret, sender, &models, segment)
            .map_err(StartError::Memory)?;
        let relay = Arc::new(relay);
        let watch = watch(&relay, &events).map_err(StartError::os("starting the relay's watch"))?;
        let connections = Connections::new(
            credentials.clone(),
            (run, agent),
            options.connections.unwrap_or(scheme.connections),
            scheme.verifies().then_some(root),
        );
        let mut driver = Self {
            options: options.clone(),
            credentials,
            run,
            agent,
            root,
            link: Some((0, link)),
            links: 0,
            before: None,
            events,
            relay,
            watch: Some(watch),
            plan: RelayPlan::new(),
            members: Members::default(),
            fetches: Fetches::new(),
            scrubs: VecDeque::new(),
            log_limiter: LogLimiter::default(),
            store: Arc::new(BlockStore::of_relay()),
            threads: Arc::default(),
            connections: Arc::new(connections),
            serves: None,
            travelled: Arc::default(),
            closes: None,
        };
        if let Some(bulk) = bulk {
            driver.serve(bulk, models.len());
        }
        Ok(driver)
    }

    pub(super) fn serves(&self) -> Option<SocketAddr> {
        self.serves
    }

    pub(super) fn travelled(&self) -> Arc<AtomicU64> {
        self.travelled.clone()
    }

    /// Runs until the sender ends or the agent is to leave.
    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<DriverEvent>) -> Ending {
        let ending = loop {
            if let Some(closes) = self.closes
                && (!self.plan.is_pending() || Instant::now() >= closes)
            {
                break Ending::Closed;
            }
            let since = Instant::now();
            let due = [self.fetches_due(), self.closes];
            let due = due.into_iter().flatten().fold(since + RUNS, Instant::min);
            let event = tokio::select! {
                event = inbox.recv() => Some(event.unwrap_or(DriverEvent::Stop)),
                () = tokio::time::sleep_until(due) => None,
            };
            warn_of_a_standstill(since.elapsed());
            match event {
                None => self.on_time(),
                Some(DriverEvent::Stop) => break Ending::Moved,
                // Events of an earlier link.
                Some(DriverEvent::Root { number, .. }) if !self.is_current(number) => {}
                Some(DriverEvent::Root { what: Err(end), .. }) => {
                    // Without a link, messages are dropped. The next link begins with a report of
                    // everything.
                    let link = self.link.take();
                    // A sender that gets to run again would take a closed link for the death of
                    // this process.
                    if matches!(end, LinkEnd::Silent(_)) {
                        self.before = link;
                    }
                    if let Some(ending) = self.reconnect(&end, &mut inbox).await {
                        break ending;
                    }
                }
                Some(event) => self.handle(event),
            }
        };
        self.end(ending, inbox).await
    }

    /// Handles an event that does not end the link.
    fn handle(&mut self, event: DriverEvent) {
        match event {
            DriverEvent::Root {
                what: Ok(message), ..
            } => self.on_message(message),
            DriverEvent::Local(events) => self.on_local(events),
            DriverEvent::Fetched(fetched) => self.fetched(fetched),
            DriverEvent::Served(served) => self.served(served),
            DriverEvent::Scrubbed { item, digest } => self.scrubbed(item, digest),
            DriverEvent::Root { what: Err(_), .. } | DriverEvent::Stop => {}
        }
    }

    fn is_current(&self, number: u64) -> bool {
        self.link.as_ref().is_some_and(|(own, _)| *own == number)
    }

    async fn end(mut self, ending: Ending, mut inbox: mpsc::Receiver<DriverEvent>) -> Ending {
        // The workers hear of the end first, and look for another route while the rest ends.
        self.relay.close(ending);
        // Three kinds of waits end here: those for blocks, those of fetches, and those in sockets.
        self.store.close();
        self.fetches.under_way.clear();
        self.threads.stop();
        let (watch, threads) = (self.watch.take(), self.threads.clone());
        // On another thread, because a join blocks and this task still has to empty the inbox.
        let mut joined = tokio::task::spawn_blocking(move || {
            if let Some(watch) = watch {
                // The panic hook has already reported a panic there.
                let _ = watch.join();
            }
            threads.join();
        });
        // Empties the inbox until the threads have ended: a thread that waits for room in it could
        // not end. The sender still gets the last events of workers.
        loop {
            tokio::select! {
                biased;
                Some(event) = inbox.recv() => {
                    if let DriverEvent::Local(events) = event {
                        self.on_local(events);
                    }
                }
                _ = &mut joined => break,
            }
        }
        while let Ok(event) = inbox.try_recv() {
            if let DriverEvent::Local(events) = event {
                self.on_local(events);
            }
        }
        // What happened since the watching thread ended.
        let last = self.relay.last_events();
        self.on_local(last);
        for (_, link) in [self.link.take(), self.before.take()].into_iter().flatten() {
            // The sender must not take the end of the link for the death of this process.
            link.send(&ToRoot::Goodbye);
            link.finish().await;
        }
        ending
    }
}

/// The settings of a relay's segment.
fn segment(slots: u8) -> SegmentOptions {
    SegmentOptions {
        // One slot for the live version and one for the next. A slow relay below gets a slot of its
        // own once there is one.
        slots: slots.max(2),
        // A worker that holds many versions must not hold up other hosts, so the relay grows
        // instead, which costs memory only here.
        max_slots: MAX_SLOTS as u8,
        history: 0,
        wait: WaitStyle::Sleep,
        refused: log_limiter::refused,
        // The trainer decides who may join, and with what queue.
        ..SegmentOptions::default()
    }
}

/// Says that this process did not get to run while it waited, for at most [`RUNS`] by its own will.
fn warn_of_a_standstill(waited: Duration) {
    if waited >= STARVED {
        tracing::warn!(
            "this process was stopped, or did not get to run, for {waited:.1?}; what waited for it \
             may have gone elsewhere until it is back"
        );
    }
}

/// Watches the workers of this host.
fn watch(
    relay: &Arc<RelaySegment>,
    events: &mpsc::Sender<DriverEvent>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let (relay, events) = (relay.clone(), events.clone());
    threads::spawn("local", move || {
        // Ends when the segment is closed.
        while let Ok(local) = relay.wait(None) {
            if !local.is_empty() && events.blocking_send(DriverEvent::Local(local)).is_err() {
                return;
            }
        }
    })
}

#[cfg(test)]
mod tests;
