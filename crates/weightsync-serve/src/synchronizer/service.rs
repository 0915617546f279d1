//! The service: one thread that takes an event in, decides, and does what was decided.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weightsync_core::synchronizer::{
    Departure, Effect, Event, Method, Moment, Need, Outcome, Party, State, Style, Synchronizer,
};
use weightsync_engine::{AnyScheme, Epoch, InitInfo, Origin, Result as EngineResult, Version};

use super::SyncError;
use super::events::{Events, What, since_1970};
use super::lasting::{Lasting, Record};
use super::memory::{Bridge, FromBridge, Held};
use super::settings::{fit, method_word, style_word};
use super::wire::{
    Ended, ExplorerLine, Join, Joined, MAX_NAME, NeedAnswer, PROTOCOL, Problem, Reply, Request,
    Role, SyncAnswer, TrainerAnswer,
};
use crate::rpc::wire::cut;

/// How many versions' steps, and how many replaced parties, are remembered.
const REMEMBERED: usize = 4096;

/// How many versions a status has.
const SHOWN: usize = 50;

/// What the service is told.
pub(super) enum Input {
    Join(Box<Join>, Answer<Joined>),
    /// A request of a party, with a number that no other request has.
    Ask(Party, u64, Request, Answer<Reply>),
    /// The caller of that request is gone.
    Withdrawn(Party, u64),
    /// A party's connection has ended.
    Gone(Party),
    FromBridge(Party, FromBridge),
    /// A look at everything, for people and programs.
    Look(Box<dyn FnOnce(Status) + Send>),
    Stop,
}

/// What takes an answer.
pub(super) type Answer<T> = Box<dyn FnOnce(Result<T, Problem>) + Send>;

/// What a service is made with.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) method: Option<Method>,
    pub(super) style: Style,
    /// By which explorers get what is held in memory.
    pub(super) scheme: AnyScheme,
    pub(super) history: u8,
    pub(super) lasting: Lasting,
    pub(super) max_parties: usize,
}

/// The thread of a service.
///
/// **Guarantee.** Dropping it answers everybody who waits, ends the thread, and joins it.
#[derive(Debug)]
pub(super) struct ServiceThread {
    inputs: mpsc::Sender<Input>,
    events: Events,
    held: Held,
    thread: Option<JoinHandle<()>>,
    owner: Origin,
}

impl ServiceThread {
    pub(super) fn start(options: Options) -> EngineResult<Self> {
        let (inputs, all) = mpsc::channel();
        let events = Events::default();
        let method = options.method.unwrap_or(Method::Memory);
        let found = options.lasting.find(method)?;
        let held = Held::new(options.scheme.clone(), options.history, found.saver);
        if !found.weights.is_empty() {
            held.publish(&found.weights)?;
        }
        let mut core = Synchronizer::new(method, found.newest, found.record.epoch);
        if options.method.is_some() || options.lasting.store.is_some() {
            core.fix_method();
        }
        let steps = found.record.steps.iter();
        let service = Service {
            core,
            since: Instant::now(),
            members: BTreeMap::new(),
            replaced: BTreeMap::new(),
            last: 0,
            number: 0,
            workers: BTreeMap::new(),
            steps: steps
                .map(|(version, step)| (Version(*version), *step))
                .chain(found.newest)
                .collect(),
            published: BTreeMap::new(),
            counts: Counts::default(),
            source: found.source,
            meeting: Vec::new(),
            bridge: None,
            retired: Vec::new(),
            held: held.clone(),
            record: found.record,
            inputs: inputs.clone(),
            events: events.clone(),
            options,
        };
        let thread = std::thread::Builder::new()
            .name("weightsync-sync".into())
            .spawn(move || service.run(&all));
        Ok(Self {
            inputs,
            events,
            held,
            thread: Some(thread.map_err(|source| SyncError::Start {
                what: "start a thread".into(),
                source,
            })?),
            owner: Origin::here(),
        })
    }

    pub(super) fn inputs(&self) -> mpsc::Sender<Input> {
        self.inputs.clone()
    }

    pub(super) fn events(&self) -> Events {
        self.events.clone()
    }

    pub(super) fn held(&self) -> Held {
        self.held.clone()
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
        let _ = self.inputs.send(Input::Stop);
        let _ = thread.join();
    }
}

/// Everything, for people and programs.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Status {
    pub(super) method: &'static str,
    pub(super) newest: Version,
    pub(super) newest_step: u64,
    pub(super) trainer: Option<TrainerStatus>,
    pub(super) explorers: Vec<ExplorerStatus>,
    /// The newest versions, the newest first.
    pub(super) versions: Vec<VersionStatus>,
    pub(super) counts: Counts,
}

/// A version that was published.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct VersionStatus {
    pub(super) version: Version,
    pub(super) step: u64,
    /// When, in milliseconds since 1970, if this service has seen it.
    pub(super) at_ms: Option<u64>,
    /// Whether it can be downloaded here.
    pub(super) held: bool,
}

/// How often what has happened.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(super) struct Counts {
    pub(super) requests: u64,
    pub(super) published: u64,
    pub(super) ended: BTreeMap<&'static str, u64>,
}

#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct TrainerStatus {
    pub(super) name: String,
    pub(super) style: &'static str,
    pub(super) state: State,
    pub(super) step: u64,
    pub(super) epoch: Epoch,
}

#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct ExplorerStatus {
    #[serde(flatten)]
    pub(super) line: ExplorerLine,
    pub(super) style: &'static str,
    pub(super) versions_behind: u64,
    pub(super) steps_behind: u64,
}

struct Service {
    options: Options,
    core: Synchronizer,
    since: Instant,
    members: BTreeMap<Party, Member>,
    /// Why parties are not members any more whose names others have.
    replaced: BTreeMap<Party, String>,
    /// The number of the last party.
    last: u64,
    /// The number of the last request.
    number: u64,
    /// The numbers of explorers where they receive versions, by name.
    workers: BTreeMap<String, u32>,
    /// The steps of which versions were made.
    steps: BTreeMap<Version, u64>,
    /// When the newest versions were published, in milliseconds since 1970.
    published: BTreeMap<Version, u64>,
    counts: Counts,
    /// Where versions of the methods can be had that do not go through here.
    source: Option<InitInfo>,
    /// The explorers of the meeting that is going on.
    meeting: Vec<Party>,
    bridge: Option<Bridge>,
    /// Those of earlier trainers, which are about to end.
    retired: Vec<Bridge>,
    held: Held,
    record: Record,
    inputs: mpsc::Sender<Input>,
    events: Events,
}

/// A party.
struct Member {
    name: String,
    role: Role,
    style: Style,
    waiting: Option<Waiting>,
    /// How its last sync ended, and why.
    ended: Option<Ended>,
    reason: Option<String>,
    /// The answer of a meeting that ended while the trainer was sending.
    met: Option<TrainerAnswer>,
}

/// A request that waits.
struct Waiting {
    number: u64,
    kind: Kind,
    answer: Answer<Reply>,
    /// If the service watches the time, and not the decision.
    until: Option<Moment>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Need,
    /// For a version, or for the end of the sync.
    Sync,
    Published(Version, u64),
    Meet(Version, u64),
}

impl Service {
    fn run(mut self, inputs: &mpsc::Receiver<Input>) {
        loop {
            let due = self.due();
            if due.is_some_and(|due| due <= self.now()) {
                self.tick();
                continue;
            }
            let input = match due {
                None => inputs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => {
                    let left = due.0.saturating_sub(self.now().0);
                    inputs.recv_timeout(Duration::from_micros(left))
                }
            };
            match input {
                Ok(Input::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Input::Join(join, answer)) => {
                    let joined = self.join(*join);
                    answer(joined);
                }
                Ok(Input::Ask(party, number, request, answer)) => {
                    self.number = number;
                    self.ask(party, request, answer);
                }
                Ok(Input::Withdrawn(party, number)) => self.withdraw(party, number),
                Ok(Input::Gone(party)) => self.leave(party, Some("its connection ended".into())),
                Ok(Input::FromBridge(party, said)) => self.bridged(party, said),
                Ok(Input::Look(look)) => look(self.status()),
            }
        }
        for (_, member) in std::mem::take(&mut self.members) {
            if let Some(waiting) = member.waiting {
                (waiting.answer)(Err(Problem::Unknown {}));
            }
        }
    }

    fn now(&self) -> Moment {
        Moment(self.since.elapsed().as_micros() as u64)
    }

    fn after(&self, timeout_ms: Option<u64>) -> Option<Moment> {
        timeout_ms.map(|ms| Moment(self.now().0.saturating_add(ms.saturating_mul(1000))))
    }

    /// When something is to be done without an input.
    fn due(&self) -> Option<Moment> {
        let waiting = self.members.values().filter_map(|one| one.waiting.as_ref());
        let own = waiting.filter_map(|waiting| waiting.until).min();
        own.into_iter().chain(self.core.deadline()).min()
    }

    fn tick(&mut self) {
        self.tell(Event::Ticked);
        let now = self.now();
        let is_late = |member: &Member| {
            let until = member.waiting.as_ref().and_then(|waiting| waiting.until);
            until.is_some_and(|until| until <= now)
        };
        let late = self.members.iter().filter(|(_, member)| is_late(member));
        for party in late.map(|(party, _)| *party).collect::<Vec<_>>() {
            let Some(waiting) = self.waiting(party, |_| true) else {
                continue;
            };
            let reply = match waiting.kind {
                Kind::Published(version, step) => {
                    let reason = "the synchronizer did not have it in time".to_owned();
                    Reply::Trained(self.trained(version, step, Ended::TimedOut, Some(reason)))
                }
                _ => Reply::Need(self.need(party)),
            };
            (waiting.answer)(Ok(reply));
        }
    }

    // Joining and leaving.

    fn join(&mut self, join: Join) -> Result<Joined, Problem> {
        let refused = |reason: String| Err(Problem::Refused { reason });
        if join.protocol != PROTOCOL {
            return refused(format!(
                "the synchronizer speaks protocol {PROTOCOL}, the {} {:?} speaks {}: install the same \
                 weightsync on both",
                join.role, join.name, join.protocol
            ));
        }
        if join.name.is_empty() || join.name.len() > MAX_NAME {
            return refused(format!(
                "the name of the {} has {} bytes: expected 1 to {MAX_NAME}",
                join.role,
                join.name.len()
            ));
        }
        let most = self.options.max_parties;
        if self.members.len() >= most {
            return refused(format!(
                "the synchronizer has {most} parties, as many as it may have: raise its max_parties"
            ));
        }
        let style = join.style.unwrap_or(self.options.style);
        self.check_styles(join.role, &join.name, style)?;
        if let Some(method) = join.method
            && !self.core.choose(method)
        {
            return refused(format!(
                "method={}: this synchronizer has a trainer with method={} already; give the same, or \
                 start another synchronizer",
                method_word(method),
                method_word(self.core.method())
            ));
        }
        match join.role {
            Role::Trainer => self.join_trainer(join, style),
            Role::Explorer => Ok(self.join_explorer(join, style)),
        }
    }

    fn check_styles(&self, role: Role, name: &str, style: Style) -> Result<(), Problem> {
        for member in self.members.values().filter(|one| one.role != role) {
            let (trainer, explorer) = match role {
                Role::Trainer => (style, member.style),
                Role::Explorer => (member.style, style),
            };
            if !fit(trainer, explorer) {
                let reason = format!(
                    "the {role} {name:?} has the style {}, and the {} {:?} has {}: each would wait for \
                     the other; give one of them another style",
                    style_word(style),
                    member.role,
                    member.name,
                    style_word(member.style)
                );
                return Err(Problem::Refused { reason });
            }
        }
        Ok(())
    }

    fn join_trainer(&mut self, join: Join, style: Style) -> Result<Joined, Problem> {
        let Some(from) = join.from else {
            let reason = "a trainer says where its versions can be had".into();
            return Err(Problem::Refused { reason });
        };
        let epoch = match join.epoch {
            Some(epoch) if epoch < self.core.epoch() => {
                let name = self.core.trainer().and_then(|one| self.members.get(&one));
                let reason = format!(
                    "the trainer {:?} of epoch {} is fenced off: {} has taken its place with epoch {}; \
                     end this process",
                    join.name,
                    epoch.0,
                    name.map_or("another trainer".into(), |other| format!(
                        "{:?}",
                        other.name
                    )),
                    self.core.epoch().0
                );
                return Err(Problem::Replaced { reason });
            }
            Some(epoch) => epoch,
            None => Epoch(self.core.epoch().0 + 1),
        };
        let party = self.enter(Role::Trainer, join.name, style);
        self.tell(Event::TrainerJoined(party, epoch, join.step, style));
        self.record.note(epoch, None);
        self.source = Some(from.clone());
        if self.core.method() == Method::Memory {
            self.retire_bridge();
            let inputs = self.inputs.clone();
            let tell = move |said| drop(inputs.send(Input::FromBridge(party, said)));
            self.bridge = Some(
                Bridge::start(from, self.held.clone(), tell).map_err(|error| Problem::Refused {
                    reason: format!("the synchronizer cannot start a thread: {error}"),
                })?,
            );
        }
        // One that was here before the synchronizer was.
        if join.version > self.core.highest() && self.core.method() == Method::Checkpoint {
            self.published(party, join.version, join.version_step);
        } else if join.version > self.core.highest() {
            self.remember(join.version, join.version_step);
        }
        Ok(self.joined(party, style, 0))
    }

    fn join_explorer(&mut self, join: Join, style: Style) -> Joined {
        let next = self.workers.len() as u32 + 1;
        let worker = *self.workers.entry(join.name.clone()).or_insert(next);
        let party = self.enter(Role::Explorer, join.name, style);
        self.tell(Event::ExplorerJoined(party, join.version, join.step, style));
        self.joined(party, style, worker)
    }

    /// Gives a party its number. One of its name and role is replaced.
    fn enter(&mut self, role: Role, name: String, style: Style) -> Party {
        let same = self.members.iter();
        let old = same.filter(|(_, one)| one.role == role && one.name == name);
        for old in old.map(|(party, _)| *party).collect::<Vec<_>>() {
            if role == Role::Explorer {
                let reason = format!("another explorer has joined with the name {name:?}");
                self.leave(old, Some(reason.clone()));
                self.replaced
                    .insert(old, reason + "; give each explorer a name of its own");
                if self.replaced.len() > REMEMBERED {
                    self.replaced.pop_first();
                }
            }
        }
        self.last += 1;
        let party = Party(self.last);
        self.events.note(What::Joined, role, &name, |event| {
            event.style = Some(style_word(style));
        });
        let member = Member {
            name,
            role,
            style,
            waiting: None,
            ended: None,
            reason: None,
            met: None,
        };
        self.members.insert(party, member);
        party
    }

    fn joined(&self, party: Party, style: Style, worker: u32) -> Joined {
        let (newest, newest_step) = self.core.newest();
        Joined {
            party: party.0,
            worker,
            method: self.core.method(),
            style,
            epoch: self.core.epoch(),
            highest: self.core.highest().max(self.held.newest()),
            newest,
            newest_step,
        }
    }

    /// A party is not there any more: in order, or for a reason.
    fn leave(&mut self, party: Party, reason: Option<String>) {
        let Some(member) = self.members.remove(&party) else {
            return;
        };
        let what = match reason {
            None => What::Stopped,
            Some(_) => What::Died,
        };
        self.events.note(what, member.role, &member.name, |event| {
            event.reason.clone_from(&reason);
        });
        if let Some(waiting) = member.waiting {
            (waiting.answer)(Err(Problem::Unknown {}));
        }
        match member.role {
            Role::Trainer => {
                self.retire_bridge();
                let how = match reason {
                    None => Departure::Stopped,
                    Some(_) => Departure::Died,
                };
                self.tell(Event::TrainerLeft(party, how));
            }
            Role::Explorer => self.tell(Event::ExplorerLeft(party)),
        }
    }

    /// Ends the bridge to a trainer, without a wait for its thread.
    fn retire_bridge(&mut self) {
        self.retired.retain(|bridge| !bridge.is_over());
        if let Some(bridge) = self.bridge.take() {
            bridge.stop();
            self.retired.push(bridge);
        }
    }

    // Requests.

    fn ask(&mut self, party: Party, request: Request, answer: Answer<Reply>) {
        let Some(member) = self.members.get_mut(&party) else {
            return answer(Err(match self.replaced.get(&party) {
                // It must not take the place back.
                Some(reason) => Problem::Replaced {
                    reason: reason.clone(),
                },
                None => Problem::Unknown {},
            }));
        };
        self.counts.requests += 1;
        // A party asks one thing at a time: the caller of the earlier one is gone.
        member.waiting = None;
        let role = member.role;
        let of = match &request {
            Request::Sync { .. } | Request::Loaded { .. } | Request::LoadFailed { .. } => {
                Some(Role::Explorer)
            }
            Request::Pause { .. } => Some(Role::Explorer),
            Request::Publishing { .. }
            | Request::Published { .. }
            | Request::Meet { .. }
            | Request::Sent { .. }
            | Request::Failed { .. } => Some(Role::Trainer),
            Request::Need { .. } | Request::WaitNeed { .. } | Request::Leave { .. } => None,
        };
        if let Some(of) = of.filter(|of| *of != role) {
            let reason = format!("this request is for a party that is {of}, and not for a {role}");
            return answer(Err(Problem::Refused { reason }));
        }
        match request {
            Request::Need { step } => {
                self.stepped(party, step);
                answer(Ok(Reply::Need(self.need(party))));
            }
            Request::WaitNeed { step, timeout_ms } => {
                self.stepped(party, step);
                let need = self.need(party);
                if need.need != Need::No {
                    return answer(Ok(Reply::Need(need)));
                }
                let until = self.after(timeout_ms);
                self.wait(party, Kind::Need, answer, until);
            }
            Request::Sync { step, timeout_ms } => {
                self.stepped(party, step);
                // It waits no longer for what it was told before.
                self.tell(Event::ExplorerCancelled(party));
                self.wait(party, Kind::Sync, answer, None);
                let until = self.after(timeout_ms);
                self.note(What::Asked, party, |_| {});
                self.tell(Event::ExplorerSyncs(party, until));
            }
            Request::Loaded { version } => {
                // The trainer has not said yet that it can be had.
                if version > self.core.highest()
                    && let Some(step) = self.steps.get(&version).copied()
                    && let Some(trainer) = self.core.trainer()
                {
                    self.published(trainer, version, step);
                }
                self.wait(party, Kind::Sync, answer, None);
                self.tell(Event::ExplorerLoaded(party, version));
                // It was too late for its sync, and runs the version all the same.
                self.answer_sync(party, Ended::Synced);
            }
            Request::LoadFailed { version, reason } => {
                self.set_reason(party, Some(cut(&reason)));
                self.wait(party, Kind::Sync, answer, None);
                self.tell(Event::ExplorerFailed(party, version));
                self.answer_sync(party, Ended::Failed);
            }
            Request::Pause { paused } => {
                self.tell(Event::ExplorerPaused(party, paused));
                answer(Ok(Reply::Done {}));
            }
            Request::Publishing { version, step } => {
                self.stepped(party, Some(step));
                self.remember(version, step);
                answer(Ok(Reply::Done {}));
            }
            Request::Published {
                version,
                step,
                timeout_ms,
            } => {
                self.stepped(party, Some(step));
                let until = self.after(timeout_ms);
                self.remember(version, step);
                let held = self.core.method() != Method::Memory || version <= self.held.newest();
                self.wait(party, Kind::Published(version, step), answer, until);
                if held {
                    self.published(party, version, step);
                }
            }
            Request::Meet {
                version,
                step,
                timeout_ms,
            } => {
                self.stepped(party, Some(step));
                self.remember(version, step);
                self.wait(party, Kind::Meet(version, step), answer, None);
                let until = self.after(timeout_ms);
                self.tell(Event::TrainerMeets(party, version, step, until));
            }
            Request::Sent { version } => self.sent(party, version, answer),
            Request::Failed { reason } => {
                self.set_reason(party, Some(cut(&reason)));
                self.note(What::Failed, party, |event| {
                    event.reason = Some(cut(&reason));
                });
                self.tell(Event::TrainerFailed(party));
                answer(Ok(Reply::Done {}));
            }
            Request::Leave { reason } => {
                self.leave(party, reason.map(|reason| cut(&reason)));
                answer(Ok(Reply::Done {}));
            }
        }
    }

    fn wait(&mut self, party: Party, kind: Kind, answer: Answer<Reply>, until: Option<Moment>) {
        if let Some(member) = self.members.get_mut(&party) {
            member.waiting = Some(Waiting {
                number: self.number,
                kind,
                answer,
                until,
            });
        }
    }

    /// The caller of a request that waits is gone.
    fn withdraw(&mut self, party: Party, number: u64) {
        let member = self.members.get_mut(&party);
        let waiting = member.and_then(|member| {
            let is_it = |waiting: &mut Waiting| waiting.number == number;
            member.waiting.take_if(is_it)
        });
        let Some(waiting) = waiting else {
            return;
        };
        match waiting.kind {
            Kind::Sync => self.tell(Event::ExplorerCancelled(party)),
            Kind::Meet(..) => self.tell(Event::TrainerFailed(party)),
            Kind::Need | Kind::Published(..) => {}
        }
    }

    fn stepped(&mut self, party: Party, step: Option<u64>) {
        let Some(step) = step else {
            return;
        };
        match self.members.get(&party).map(|member| member.role) {
            Some(Role::Trainer) => self.tell(Event::TrainerStepped(party, step)),
            Some(Role::Explorer) => self.tell(Event::ExplorerStepped(party, step)),
            None => {}
        }
    }

    /// A trainer has sent what the explorers of the meeting are to load.
    fn sent(&mut self, party: Party, version: Version, answer: Answer<Reply>) {
        let member = self.members.get_mut(&party);
        if let Some(met) = member.and_then(|member| member.met.take()) {
            return answer(Ok(Reply::Trained(met)));
        }
        let step = self.steps.get(&version).copied().unwrap_or_default();
        if self.core.state(party) != State::WaitingSync {
            let reason = "the synchronizer knows of no meeting: it was started again meanwhile";
            let answered = self.trained(version, step, Ended::Failed, Some(reason.into()));
            return answer(Ok(Reply::Trained(answered)));
        }
        self.wait(party, Kind::Meet(version, step), answer, None);
        for explorer in std::mem::take(&mut self.meeting) {
            self.fetch(explorer, version);
        }
    }

    fn fetch(&mut self, party: Party, version: Version) {
        let from = match self.core.method() {
            Method::Memory => self.held.info(),
            Method::Direct | Method::Checkpoint => self.source.clone(),
        };
        match (self.waiting(party, |kind| kind == Kind::Sync), from) {
            (Some(waiting), Some(from)) => {
                let from = Box::new(from);
                (waiting.answer)(Ok(Reply::Fetch { version, from }));
            }
            (waiting, _) => {
                if let Some(waiting) = waiting {
                    // It is answered by what follows.
                    self.wait(party, Kind::Sync, waiting.answer, None);
                    let reason = "nobody can say where the version can be had";
                    self.set_reason(party, Some(reason.into()));
                }
                self.tell(Event::ExplorerFailed(party, version));
            }
        }
    }

    /// A version of a trainer can be had.
    fn published(&mut self, party: Party, version: Version, step: u64) {
        if version > self.core.highest() {
            self.remember(version, step);
            self.tell(Event::TrainerPublished(party, version, step));
            self.note_published(party, version, step);
        }
        let is_done = |kind| matches!(kind, Kind::Published(known, _) if known <= version);
        if let Some(waiting) = self.waiting(party, is_done) {
            let answer = self.trained(version, step, Ended::Synced, None);
            (waiting.answer)(Ok(Reply::Trained(answer)));
        }
    }

    fn bridged(&mut self, party: Party, said: FromBridge) {
        if !self.members.contains_key(&party) {
            return;
        }
        match said {
            FromBridge::Has(version) => {
                if let Some(step) = self.steps.get(&version).copied() {
                    self.published(party, version, step);
                }
            }
            FromBridge::Failed(reason) => {
                self.set_reason(party, Some(cut(&reason)));
                self.note(What::Failed, party, |event| {
                    event.reason = Some(cut(&reason));
                });
                self.tell(Event::TrainerFailed(party));
                let is_publishing = |kind| matches!(kind, Kind::Published(..));
                if let Some(waiting) = self.waiting(party, is_publishing)
                    && let Kind::Published(version, step) = waiting.kind
                {
                    let answer = self.trained(version, step, Ended::Failed, Some(reason));
                    (waiting.answer)(Ok(Reply::Trained(answer)));
                }
            }
        }
    }

    // Decisions.

    fn tell(&mut self, event: Event) {
        let now = self.now();
        for effect in self.core.step(event, now) {
            self.perform(effect);
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Wake(party) => self.answer_need(party),
            Effect::Offered => {
                let explorers = self.members.iter();
                let explorers = explorers.filter(|(_, one)| one.role == Role::Explorer);
                for party in explorers.map(|(party, _)| *party).collect::<Vec<_>>() {
                    self.answer_need(party);
                }
            }
            Effect::Fetch(party, version) => self.fetch(party, version),
            Effect::Meet(party, _, explorers) => {
                self.meeting = explorers;
                if let Some(member) = self.members.get_mut(&party) {
                    member.met = None;
                }
                if let Some(waiting) = self.waiting(party, |kind| matches!(kind, Kind::Meet(..))) {
                    (waiting.answer)(Ok(Reply::Go {}));
                }
            }
            Effect::Synced(party, outcome) => {
                self.meeting.retain(|one| *one != party);
                self.ended(party, Ended::of(outcome));
            }
            Effect::Met(party, version, all) => self.met(party, version, &all),
            Effect::Refused(party) => self.refused(party),
        }
    }

    fn answer_need(&mut self, party: Party) {
        let need = self.need(party);
        if need.need != Need::No
            && let Some(waiting) = self.waiting(party, |kind| kind == Kind::Need)
        {
            (waiting.answer)(Ok(Reply::Need(need)));
        }
    }

    fn ended(&mut self, party: Party, ended: Ended) {
        if let Some(member) = self.members.get_mut(&party) {
            member.ended = Some(ended);
            if ended == Ended::Synced {
                member.reason = None;
            }
        }
        *self.counts.ended.entry(ended.word()).or_default() += 1;
        let version = self.core.version(party);
        self.note(What::Ended(ended), party, |event| event.version = version);
        self.answer_sync(party, ended);
    }

    fn answer_sync(&mut self, party: Party, ended: Ended) {
        let Some(waiting) = self.waiting(party, |kind| kind == Kind::Sync) else {
            return;
        };
        let version = self.core.version(party).unwrap_or(Version::NONE);
        let (versions_behind, steps_behind) = self.behind(version);
        let member = self.members.get(&party);
        let reason = member.and_then(|member| member.reason.clone());
        (waiting.answer)(Ok(Reply::Synced(SyncAnswer {
            ended,
            version,
            step: self.steps.get(&version).copied(),
            versions_behind,
            steps_behind,
            reason: reason.filter(|_| ended == Ended::Failed),
        })));
    }

    fn met(&mut self, party: Party, version: Version, all: &BTreeMap<Party, Outcome>) {
        self.meeting.clear();
        let synced = all.values().any(|one| matches!(one, Outcome::Synced(_)));
        let (ended, reason) = match all.values().next() {
            _ if synced => (Ended::Synced, None),
            None => (Ended::TimedOut, Some("no explorer came".to_owned())),
            Some(first) => (
                Ended::of(*first),
                Some("no explorer has loaded it".to_owned()),
            ),
        };
        let step = self.steps.get(&version).copied().unwrap_or_default();
        let mut answer = self.trained(version, step, ended, reason);
        let names: Vec<_> = all
            .keys()
            .filter_map(|one| self.members.get(one))
            .map(|member| member.name.clone())
            .collect();
        answer.explorers.retain(|line| names.contains(&line.name));
        if synced {
            self.note_published(party, version, step);
        }
        match self.waiting(party, |kind| matches!(kind, Kind::Meet(..))) {
            Some(waiting) => (waiting.answer)(Ok(Reply::Trained(answer))),
            None => {
                if let Some(member) = self.members.get_mut(&party) {
                    member.met = Some(answer);
                }
            }
        }
    }

    fn refused(&mut self, party: Party) {
        let replaced = self.core.trainer().is_some_and(|one| one != party);
        let is_trainer = self
            .members
            .get(&party)
            .is_some_and(|one| one.role == Role::Trainer);
        if !is_trainer {
            return;
        }
        let waiting = self.waiting(party, |_| true);
        let problem = match replaced {
            true => {
                let member = self.members.remove(&party);
                let name = member.map(|member| member.name).unwrap_or_default();
                let reason = format!(
                    "the trainer {name:?} is fenced off: another trainer has taken its place with epoch \
                     {}; end this process",
                    self.core.epoch().0
                );
                self.events.note(What::Died, Role::Trainer, &name, |event| {
                    event.reason = Some(reason.clone());
                });
                Problem::Replaced { reason }
            }
            false => Problem::Refused {
                reason: format!(
                    "expected a version above {}, and no meeting that goes on already",
                    self.core.highest()
                ),
            },
        };
        if let Some(waiting) = waiting {
            (waiting.answer)(Err(problem));
        }
    }

    // What parties are told.

    /// Takes a request that waits, if it is of such a kind.
    fn waiting(&mut self, party: Party, is: impl FnOnce(Kind) -> bool) -> Option<Waiting> {
        let member = self.members.get_mut(&party)?;
        member.waiting.take_if(|waiting| is(waiting.kind))
    }

    fn need(&self, party: Party) -> NeedAnswer {
        let is_trainer = self.core.trainer() == Some(party);
        let asking = if is_trainer {
            self.core.asking()
        } else {
            Vec::new()
        };
        let asking = asking.iter().filter_map(|one| self.members.get(one));
        NeedAnswer {
            need: match is_trainer {
                true => self.core.trainer_need(),
                false => self.core.explorer_need(party),
            },
            asked_by: asking.map(|member| member.name.clone()).collect(),
            newest: self.core.newest().0,
            connected: true,
        }
    }

    fn trained(
        &self,
        version: Version,
        step: u64,
        ended: Ended,
        reason: Option<String>,
    ) -> TrainerAnswer {
        TrainerAnswer {
            ended,
            version,
            step,
            explorers: self.lines().into_iter().map(|(_, line)| line).collect(),
            reason,
        }
    }

    fn lines(&self) -> Vec<(Party, ExplorerLine)> {
        let explorers = self.members.iter();
        let explorers = explorers.filter(|(_, one)| one.role == Role::Explorer);
        let line = |(party, member): (&Party, &Member)| {
            let line = ExplorerLine {
                name: member.name.clone(),
                state: self.core.state(*party),
                step: self.core.steps(*party).unwrap_or_default(),
                version: self.core.version(*party).unwrap_or(Version::NONE),
                ended: member.ended,
                reason: member.reason.clone(),
            };
            (*party, line)
        };
        explorers.map(line).collect()
    }

    fn status(&self) -> Status {
        let (newest, newest_step) = self.core.newest();
        let trainer = self.core.trainer().and_then(|party| {
            let member = self.members.get(&party)?;
            Some(TrainerStatus {
                name: member.name.clone(),
                style: style_word(member.style),
                state: self.core.state(party),
                step: self.core.steps(party).unwrap_or_default(),
                epoch: self.core.epoch(),
            })
        });
        let explorers = self.lines().into_iter().map(|(party, line)| {
            let (versions_behind, steps_behind) = self.behind(line.version);
            ExplorerStatus {
                line,
                style: self
                    .members
                    .get(&party)
                    .map_or("", |one| style_word(one.style)),
                versions_behind,
                steps_behind,
            }
        });
        let held = self.held.versions();
        let versions = self.steps.range(..=newest).rev().take(SHOWN);
        let versions = versions.map(|(version, step)| VersionStatus {
            version: *version,
            step: *step,
            at_ms: self.published.get(version).copied(),
            held: held.contains(version),
        });
        Status {
            method: method_word(self.core.method()),
            newest,
            newest_step,
            trainer,
            explorers: explorers.collect(),
            versions: versions.collect(),
            counts: self.counts.clone(),
        }
    }

    /// How many versions are newer than one, and how many steps the trainer has made since.
    fn behind(&self, version: Version) -> (u64, u64) {
        let newest = self.core.newest().0;
        let above = (
            std::ops::Bound::Excluded(version),
            std::ops::Bound::Included(newest),
        );
        let versions = match version < newest {
            true => self.steps.range(above).count() as u64,
            false => 0,
        };
        let trainer = self.core.trainer().and_then(|party| self.core.steps(party));
        let latest = trainer.unwrap_or_default().max(self.core.newest().1);
        let step = self.steps.get(&version).copied();
        (versions, step.map_or(0, |step| latest.saturating_sub(step)))
    }

    fn remember(&mut self, version: Version, step: u64) {
        self.steps.insert(version, step);
        while self.steps.len() > REMEMBERED {
            self.steps.pop_first();
        }
    }

    fn note_published(&mut self, party: Party, version: Version, step: u64) {
        self.counts.published += 1;
        self.record.note(self.core.epoch(), Some((version, step)));
        self.published.insert(version, since_1970());
        while self.published.len() > SHOWN {
            self.published.pop_first();
        }
        self.note(What::Published, party, |event| {
            (event.version, event.step) = (Some(version), Some(step));
        });
    }

    fn set_reason(&mut self, party: Party, reason: Option<String>) {
        if let Some(member) = self.members.get_mut(&party) {
            member.reason = reason;
        }
    }

    fn note(&self, what: What, party: Party, more: impl FnOnce(&mut super::events::Record)) {
        if let Some(member) = self.members.get(&party) {
            self.events.note(what, member.role, &member.name, more);
        }
    }
}
