//! The service: one thread that takes an event in, decides, and does what was decided.

mod answers;
mod callers;
mod joining;
mod requests;
mod status;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weightsync_core::synchronizer::{Method, Moment, Party, Style, SyncEvent, Synchronizer};
use weightsync_engine::transport::random;
use weightsync_engine::{AnyScheme, InitInfo, Origin, Result as EngineResult, Version};
use weightsync_store::StoreScheme;

pub(super) use self::status::{Counts, ExplorerStatus, ServiceStatus};
use super::SyncError;
use super::events::Events;
use super::lasting::{Lasting, ServiceRecord, Shelf};
use super::memory::{Bridge, FromBridge, HeldVersions};
use super::wire::{
    Ended, ExplorerLine, Join, JoinAnswer, Reply, Request, RequestProblem, Role, TrainerAnswer,
};
use crate::http::ConnectionInfo;
use weightsync_mem::threads;

/// How many versions' steps, and how many replaced parties, are remembered.
const REMEMBERED: usize = 4096;

/// How many versions a status has.
pub(super) const SHOWN: usize = 50;

/// What the service is told.
pub(super) enum ServiceInput {
    Join(Box<Join>, Caller, Answer<JoinAnswer>),
    /// A request of a party, with a number that no other request has.
    Ask(Party, u64, Caller, Request, Answer<Reply>),
    /// The caller of that request is gone.
    Withdrawn(Party, u64),
    /// A party's connection has ended.
    Gone(Party),
    FromBridge(Party, FromBridge),
    /// A look at everything, for people and programs.
    Look(Box<dyn FnOnce(ServiceStatus) + Send>),
    Stop,
}

/// From where a request comes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Caller {
    /// From this program.
    Own,
    /// From a client of the server.
    Client(ConnectionInfo),
}

/// What takes an answer.
pub(super) type Answer<T> = Box<dyn FnOnce(Result<T, RequestProblem>) + Send>;

/// What a service is made with.
#[derive(Clone, Debug)]
pub(super) struct ServiceOptions {
    pub(super) method: Option<Method>,
    pub(super) style: Style,
    /// By which explorers get what is held in memory.
    pub(super) scheme: AnyScheme,
    pub(super) history: u8,
    pub(super) lasting: Lasting,
    pub(super) max_parties: usize,
}

impl ServiceOptions {
    /// How versions travel until a trainer chooses.
    pub(super) fn first_method(&self) -> Method {
        self.method.unwrap_or(Method::Memory)
    }
}

/// The thread of a service.
///
/// **Guarantee.** Dropping it answers everybody who waits, ends the thread, and joins it.
#[derive(Debug)]
pub(super) struct ServiceThread {
    inputs: mpsc::Sender<ServiceInput>,
    events: Events,
    held: HeldVersions,
    shelf: Option<Shelf>,
    thread: Option<JoinHandle<()>>,
    owner: Origin,
}

impl ServiceThread {
    pub(super) fn start(options: ServiceOptions) -> EngineResult<Self> {
        let (inputs, all) = mpsc::channel();
        let events = Events::default();
        let method = options.first_method();
        let found = options.lasting.find(method)?;
        let held = HeldVersions::new(options.scheme.clone(), options.history, found.saver);
        // A restarted service has the newest version of the store at once, also if no trainer ever
        // comes back.
        if !found.weights.is_empty() {
            held.publish(&found.weights, || true)?;
        }
        let core = core_of(&options, found.newest, &found.record);
        let steps = found.record.steps.iter();
        let known: BTreeMap<Version, u64> = steps
            .map(|(version, step)| (Version(*version), *step))
            .collect();
        let service = Service {
            core,
            since: Instant::now(),
            members: BTreeMap::new(),
            replaced: BTreeMap::new(),
            // No number of an earlier life: a party of it may still ask under its own.
            last: u64::from_le_bytes(random()?) >> 16,
            number: 0,
            workers: BTreeMap::new(),
            published: available(&known, found.newest),
            steps: known,
            counts: Counts::default(),
            source: found.source,
            is_own_source: true,
            store: found.shelf.as_ref().map(Shelf::address),
            meeting: Vec::new(),
            gone: BTreeMap::new(),
            bridge: None,
            failed: None,
            retired: Vec::new(),
            held: held.clone(),
            record: found.record,
            inputs: inputs.clone(),
            events: events.clone(),
            options,
        };
        let thread = threads::spawn("sync", move || service.run(&all));
        Ok(Self {
            inputs,
            events,
            held,
            shelf: found.shelf,
            thread: Some(thread.map_err(|source| SyncError::Start {
                what: "start a thread".into(),
                source,
            })?),
            owner: Origin::here(),
        })
    }

    /// Tells the thread to end.
    pub(super) fn stop(&self) {
        // The lock of the channel may be held for ever in a forked child.
        if self.owner.is_here() {
            let _ = self.inputs.send(ServiceInput::Stop);
        }
    }

    pub(super) fn inputs(&self) -> mpsc::Sender<ServiceInput> {
        self.inputs.clone()
    }

    pub(super) fn events(&self) -> Events {
        self.events.clone()
    }

    pub(super) fn held(&self) -> HeldVersions {
        self.held.clone()
    }

    pub(super) fn shelf(&self) -> Option<Shelf> {
        self.shelf.clone()
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if !self.owner.is_here() {
            // A forked child has no such thread.
            std::mem::forget(thread);
            return;
        }
        self.stop();
        let _ = thread.join();
    }
}

struct Service {
    options: ServiceOptions,
    core: Synchronizer,
    since: Instant,
    members: BTreeMap<Party, PartyRecord>,
    /// Why parties are not members any more whose names others have.
    replaced: BTreeMap<Party, String>,
    /// The number of the last party.
    last: u64,
    /// The number of the last request.
    number: u64,
    /// The numbers of explorers where they receive versions, by name.
    workers: BTreeMap<String, u32>,
    /// The steps that make versions, as trainers announce them.
    steps: BTreeMap<Version, u64>,
    /// The newest versions that can be had, in the order of their numbers.
    published: VecDeque<AvailableVersion>,
    counts: Counts,
    /// Where versions of the methods can be had that do not go through here, and whether this program
    /// said so itself.
    source: Option<InitInfo>,
    is_own_source: bool,
    /// The address of the own store.
    store: Option<String>,
    /// The explorers of the meeting that is going on.
    meeting: Vec<Party>,
    /// Those that have left during the meeting.
    gone: BTreeMap<Party, ExplorerLine>,
    bridge: Option<Bridge>,
    /// The version that it could not pass on last, and why, if no trainer waited for it.
    failed: Option<(Version, String)>,
    /// Those of earlier trainers, which are about to end.
    retired: Vec<Bridge>,
    held: HeldVersions,
    record: ServiceRecord,
    inputs: mpsc::Sender<ServiceInput>,
    events: Events,
}

/// A party.
struct PartyRecord {
    name: String,
    role: Role,
    style: Style,
    waiting: Option<WaitingRequest>,
    /// How its last sync ended, and why.
    ended: Option<Ended>,
    reason: Option<String>,
    /// The answer of a meeting that ended while the trainer was sending.
    met: Option<TrainerAnswer>,
}

/// What decides, with all that an earlier life of the service has left.
fn core_of(
    options: &ServiceOptions,
    newest: Option<(Version, Option<u64>)>,
    record: &ServiceRecord,
) -> Synchronizer {
    // A version of the store whose step is not on record counts as made at step 0.
    let with_step = newest.map(|(version, step)| (version, step.unwrap_or_default()));
    let mut core = Synchronizer::new(options.first_method(), with_step, record.epoch);
    // Numbers that an earlier life gave out are used up: other weights must never get one of
    // them.
    if let Some((version, _)) = record.steps.last_key_value() {
        core.saw(Version(*version));
    }
    core.saw(Version(record.highest));
    // With a store or a setting the method is the operator's choice, which no trainer changes.
    if options.method.is_some() || options.lasting.store.is_some() {
        core.fix_method();
    }
    core
}

/// The versions that can be had when a service starts.
fn available(
    known: &BTreeMap<Version, u64>,
    newest: Option<(Version, Option<u64>)>,
) -> VecDeque<AvailableVersion> {
    // Versions that the store has newer ones of come from the record. The newest comes from
    // the store.
    known
        .iter()
        .map(|(version, step)| (*version, Some(*step)))
        .filter(|(version, _)| newest.is_some_and(|(newest, _)| *version < newest))
        .chain(newest)
        .map(|(version, step)| AvailableVersion {
            version,
            step,
            at_ms: None,
        })
        .collect()
}

/// A version that can be had.
struct AvailableVersion {
    version: Version,
    /// The step that made it, if that is known.
    step: Option<u64>,
    /// When, in milliseconds since 1970, if it was in this life of the service.
    at_ms: Option<u64>,
}

/// A request that waits.
struct WaitingRequest {
    number: u64,
    kind: RequestKind,
    answer: Answer<Reply>,
    /// If the service watches the time, and not the decision.
    until: Option<Moment>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    Need,
    /// For a version, or for the end of the sync.
    Sync,
    Published(Version, u64),
    Meet(Version, u64),
}

impl Service {
    fn run(mut self, inputs: &mpsc::Receiver<ServiceInput>) {
        // The only loop of the service. Everything it does happens in this thread, so no state
        // needs a lock.
        loop {
            let due = self.due();
            // Time passes without inputs. What is due comes before the next input, however many of
            // them wait.
            if due.is_some_and(|due| due <= self.now()) {
                self.tick();
                continue;
            }
            // The service sleeps until an input comes or something is due. Nothing polls.
            let input = match due {
                None => inputs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => {
                    let left = due.0.saturating_sub(self.now().0);
                    inputs.recv_timeout(Duration::from_micros(left))
                }
            };
            match input {
                Ok(ServiceInput::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
                Ok(ServiceInput::Join(join, caller, answer)) => {
                    let joined = self.join(*join, caller);
                    // The caller may have gone meanwhile. Its answer then removes the party again.
                    answer(joined);
                }
                Ok(ServiceInput::Ask(party, number, caller, request, answer)) => {
                    // What begins to wait below is known by this number, if its caller disconnects.
                    self.number = number;
                    self.ask(party, caller, request, answer);
                    self.events.changed();
                }
                Ok(ServiceInput::Withdrawn(party, number)) => self.withdraw(party, number),
                Ok(ServiceInput::Gone(party)) => {
                    self.leave(party, Some("its connection ended".into()))
                }
                Ok(ServiceInput::FromBridge(party, said)) => self.bridged(party, said),
                Ok(ServiceInput::Look(look)) => look(self.status()),
            }
        }
        // Every request that still waits gets an answer, so no caller hangs.
        for (_, member) in std::mem::take(&mut self.members) {
            if let Some(waiting) = member.waiting {
                (waiting.answer)(Err(RequestProblem::Unknown {}));
            }
        }
    }

    /// The address of the store with the versions: with the method checkpoint the trainer's, and else the
    /// own one.
    fn store_address(&self) -> Option<String> {
        let source = self.source.as_ref().and_then(StoreScheme::address_of);
        source.map(str::to_owned).or_else(|| self.store.clone())
    }

    fn now(&self) -> Moment {
        // Microseconds since the service started. The core knows no other clock.
        Moment(self.since.elapsed().as_micros() as u64)
    }

    fn after(&self, timeout_ms: Option<u64>) -> Option<Moment> {
        // The timeout comes from outside, so the arithmetic saturates.
        timeout_ms.map(|ms| Moment(self.now().0.saturating_add(ms.saturating_mul(1000))))
    }

    /// When something is to be done without an input.
    fn due(&self) -> Option<Moment> {
        let waiting = self.members.values().filter_map(|one| one.waiting.as_ref());
        let own = waiting.filter_map(|waiting| waiting.until).min();
        own.into_iter().chain(self.core.deadline()).min()
    }

    fn tick(&mut self) {
        // Deadlines of syncs and meetings are the core's. Those of the other requests follow here.
        self.tell(SyncEvent::Ticked);
        let now = self.now();
        let is_late = |member: &PartyRecord| {
            let until = member.waiting.as_ref().and_then(|waiting| waiting.until);
            until.is_some_and(|until| until <= now)
        };
        let late = self.members.iter().filter(|(_, member)| is_late(member));
        for party in late.map(|(party, _)| *party).collect::<Vec<_>>() {
            let Some(waiting) = self.waiting(party, |_| true) else {
                continue;
            };
            let reply = match waiting.kind {
                RequestKind::Published(version, step) => {
                    let reason = "the synchronizer did not have it in time".to_owned();
                    Reply::Trained(self.trained(version, step, Ended::TimedOut, Some(reason)))
                }
                _ => Reply::Need(self.need(party)),
            };
            (waiting.answer)(Ok(reply));
        }
    }
}
