//! When a trainer and its explorers synchronise: one decision at a time.
//!
//! [`Synchronizer::step`] takes an event and says what to do. It has no clock and no connections: the
//! caller tells it the time, gives every party that joins a number which nobody else ever has, and does
//! what the effects say. A party that comes back joins again, under another number, so that what its
//! past life still says is refused.
//!
//! | style | a trainer synchronises | an explorer synchronises |
//! |---|---|---|
//! | [`Fixed`](Style::Fixed) | every `interval` steps | `offset` steps later, every `interval` steps |
//! | [`ByExplorer`](Style::ByExplorer) | when an explorer asks | `interval` steps after its last sync |
//! | [`ByTrainer`](Style::ByTrainer) | every `interval` steps | when there is a version that it has not |
//! | [`FullyAsync`](Style::FullyAsync) | every `trainer` steps | every `explorer` steps, if there is a newer version |
//! | [`Bounded`](Style::Bounded) | every `interval` steps | when it is more than `lag` versions behind; it must |
//!
//! | method | trainer | explorer |
//! |---|---|---|
//! | [`Direct`](Method::Direct) | RUNNING → WAITING_SYNC → RUNNING | RUNNING → REQUIRE_SYNC → WAITING_SYNC → RUNNING |
//! | [`Memory`](Method::Memory), [`Checkpoint`](Method::Checkpoint) | RUNNING | RUNNING → REQUIRE_SYNC → RUNNING |
//!
//! A sync that fails, or comes to its deadline, changes no version: the explorer is RUNNING again, and
//! is told at its next step that it needs one.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;

use crate::version::Version;

#[cfg(test)]
mod tests;

/// A party in one of its lives. The caller counts them; no number is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Party(pub u64);

/// A moment, by the caller's clock, which never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// How versions travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Both sides meet, and the trainer sends to the explorers.
    Direct,
    /// Through the synchronizer, which keeps the newest versions.
    Memory,
    /// Through a store.
    Checkpoint,
}

/// When versions travel. Intervals are in steps of the party.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Style {
    /// At fixed steps.
    Fixed {
        /// Steps between two syncs, of trainer and explorers.
        interval: NonZero<u64>,
        /// By how many steps explorers are ahead.
        offset: u64,
    },
    /// When an explorer has run for a while.
    ByExplorer {
        /// After how many steps.
        interval: NonZero<u64>,
    },
    /// When the trainer has trained for a while.
    ByTrainer {
        /// After how many steps.
        interval: NonZero<u64>,
    },
    /// Each at its own pace; nobody waits.
    FullyAsync {
        /// Steps between two versions of the trainer.
        trainer: NonZero<u64>,
        /// Steps after which an explorer takes the newest.
        explorer: NonZero<u64>,
    },
    /// No explorer runs a version that is too old.
    Bounded {
        /// Steps between two versions of the trainer.
        interval: NonZero<u64>,
        /// How many versions an explorer may be behind the newest.
        lag: u64,
    },
}

/// What a party does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// It has stopped.
    Stopped,
    /// It trains or explores.
    Running,
    /// It wants another version.
    RequireSync,
    /// It waits for the other side, which it meets.
    WaitingSync,
}

/// Whether a party is to synchronise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// It goes on.
    No,
    /// It synchronises when it can.
    Yes,
    /// It does not go on before it has.
    Must,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A trainer is there, and takes the place of one before it.
    TrainerJoined(Party),
    /// A trainer has made its `step`th step.
    TrainerStepped(Party, u64),
    /// A trainer has published a version, made at a step. It can be fetched.
    TrainerPublished(Party, Version, u64),
    /// A trainer waits for explorers, to send them a version. Its step is the one it said last.
    TrainerMeets(Party, Version, Option<Moment>),
    /// A trainer has stopped, or died.
    TrainerLeft(Party),
    /// An explorer is there, and runs a version.
    ExplorerJoined(Party, Version),
    /// An explorer has made its `step`th step.
    ExplorerStepped(Party, u64),
    /// An explorer waits for a version, until a moment.
    ExplorerSyncs(Party, Option<Moment>),
    /// An explorer has verified and loaded a version.
    ExplorerLoaded(Party, Version),
    /// An explorer could not load the version it was to fetch, or to receive.
    ExplorerFailed(Party),
    /// An explorer has stopped, or died.
    ExplorerLeft(Party),
    /// Time has passed.
    Ticked,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Tell the trainer that it needs a sync, in case that it waits for one.
    Wake(Party),
    /// Tell an explorer to fetch a version.
    Fetch(Party, Version),
    /// Tell the trainer to send a version to these explorers, and the explorers to receive it.
    Meet(Party, Version, Vec<Party>),
    /// Answer a party that waits.
    Ended(Party, Outcome),
    /// Tell a party that it is nobody: another one has its place, or it was taken for dead.
    Refused(Party),
}

/// How a sync ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The explorer runs this version. For a trainer: those that it met with run it, but for these.
    Synced(Version, Vec<Party>),
    /// There is no newer version, and no trainer that would make one.
    NothingNewer,
    /// The version could not be loaded, or the other side left.
    Failed,
    /// It was too late.
    TimedOut,
}

/// The state of all parties.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Synchronizer {
    method: Method,
    style: Style,
    trainer: Option<Trainer>,
    explorers: BTreeMap<Party, Explorer>,
    /// The newest version that can be fetched.
    newest: Version,
    /// A trainer was there, and has left.
    left: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Trainer {
    party: Party,
    step: u64,
    /// The step of its last sync that succeeded.
    synced: Option<u64>,
    meeting: Option<Meeting>,
}

/// What a trainer waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Meeting {
    version: Version,
    until: Option<Moment>,
    /// Those to whom it sends, and which have not loaded yet; `None` until it begins.
    pending: Option<BTreeSet<Party>>,
    failed: BTreeSet<Party>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Explorer {
    state: State,
    step: u64,
    /// The step of its last sync that succeeded; where it joined, 0.
    synced: u64,
    /// The version that it has verified and loaded.
    version: Version,
    /// Its last sync failed: the next step tries again.
    retries: bool,
    /// Set while it waits.
    wait: Option<Wait>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Wait {
    until: Option<Moment>,
    /// What it was told to fetch, or receives.
    version: Option<Version>,
}

impl Synchronizer {
    /// Nobody is there yet. `newest` is the version that a store has, if any.
    pub fn new(method: Method, style: Style, newest: Version) -> Self {
        Self {
            method,
            style,
            trainer: None,
            explorers: BTreeMap::new(),
            newest,
            left: false,
        }
    }

    /// Takes an event in. The effects are in the order in which they are to be done.
    pub fn step(&mut self, event: Event, now: Moment) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Some(refused) = self.stranger(&event) {
            return vec![Effect::Refused(refused)];
        }
        let needed = self.trainer_need() != Need::No;
        match event {
            Event::TrainerJoined(party) => {
                if let Some(old) = self.trainer.take() {
                    self.end_meeting(&old, &mut effects);
                    effects.push(Effect::Refused(old.party));
                }
                self.left = false;
                self.trainer = Some(Trainer {
                    party,
                    step: 0,
                    synced: None,
                    meeting: None,
                });
            }
            Event::TrainerStepped(_, step) => {
                if let Some(trainer) = &mut self.trainer {
                    trainer.step = step;
                }
            }
            Event::TrainerPublished(_, version, step) => {
                self.newest = self.newest.max(version);
                if let Some(trainer) = &mut self.trainer {
                    trainer.step = step;
                    trainer.synced = Some(step);
                }
                self.hand_out(&mut effects);
            }
            Event::TrainerMeets(_, version, until) => {
                if let Some(trainer) = &mut self.trainer {
                    trainer.meeting = Some(Meeting {
                        version,
                        until,
                        pending: None,
                        failed: BTreeSet::new(),
                    });
                }
            }
            Event::TrainerLeft(_) => {
                if let Some(old) = self.trainer.take() {
                    self.end_meeting(&old, &mut effects);
                }
                self.left = true;
                self.end_hopeless(&mut effects);
            }
            Event::ExplorerJoined(party, version) => {
                let explorer = Explorer {
                    state: State::Running,
                    step: 0,
                    synced: 0,
                    version,
                    // It may have been away for long.
                    retries: version < self.newest,
                    wait: None,
                };
                self.explorers.insert(party, explorer);
            }
            Event::ExplorerStepped(party, step) => {
                if let Some(explorer) = self.explorers.get_mut(&party) {
                    explorer.step = step;
                }
                if self.explorer_need(party) != Need::No
                    && let Some(explorer) = self.explorers.get_mut(&party)
                    && explorer.state == State::Running
                {
                    explorer.state = State::RequireSync;
                }
            }
            Event::ExplorerSyncs(party, until) => {
                let state = match self.method {
                    Method::Direct => State::WaitingSync,
                    Method::Memory | Method::Checkpoint => State::RequireSync,
                };
                if let Some(explorer) = self.explorers.get_mut(&party) {
                    explorer.state = state;
                    let version = None;
                    explorer.wait = Some(Wait { until, version });
                }
                self.hand_out(&mut effects);
                if self.left {
                    self.end_hopeless(&mut effects);
                }
            }
            Event::ExplorerLoaded(party, version) => {
                if let Some(explorer) = self.explorers.get_mut(&party) {
                    // Whatever it was asked to do: this is what it runs.
                    explorer.version = version;
                    explorer.retries &= version < self.newest;
                    let awaited = explorer.wait.as_ref().and_then(|wait| wait.version);
                    if awaited == Some(version) {
                        explorer.end(true);
                        let outcome = Outcome::Synced(version, Vec::new());
                        effects.push(Effect::Ended(party, outcome));
                        self.met(party, true);
                    }
                }
            }
            Event::ExplorerFailed(party) => self.fail(party, Outcome::Failed, &mut effects),
            Event::ExplorerLeft(party) => {
                self.explorers.remove(&party);
                self.met(party, false);
            }
            Event::Ticked => self.end_late(now, &mut effects),
        }
        self.begin_meeting(&mut effects);
        self.end_met(&mut effects);
        if !needed && self.trainer_need() != Need::No {
            effects.extend(
                self.trainer
                    .iter()
                    .map(|trainer| Effect::Wake(trainer.party)),
            );
        }
        effects
    }

    /// The moment at which time has to be told: some party waits no longer than that.
    pub fn deadline(&self) -> Option<Moment> {
        let waits = self.explorers.values().filter_map(|one| one.wait.as_ref());
        let meeting = self.trainer.as_ref().and_then(|one| one.meeting.as_ref());
        let untils = waits.map(|wait| wait.until);
        untils
            .chain(meeting.map(|meeting| meeting.until))
            .flatten()
            .min()
    }

    /// Whether the trainer is to synchronise.
    pub fn trainer_need(&self) -> Need {
        let Some(trainer) = &self.trainer else {
            return Need::No;
        };
        let is_due = |interval: NonZero<u64>| {
            trainer.step > 0
                && trainer.step.is_multiple_of(interval.get())
                && trainer.synced != Some(trainer.step)
        };
        let needed = match self.style {
            Style::Fixed { interval, .. }
            | Style::ByTrainer { interval }
            | Style::Bounded { interval, .. } => is_due(interval),
            Style::FullyAsync { trainer, .. } => is_due(trainer),
            Style::ByExplorer { .. } => !self.asking().is_empty(),
        };
        if needed { Need::Yes } else { Need::No }
    }

    /// The explorers that wait for a version which is not there yet.
    pub fn asking(&self) -> Vec<Party> {
        let asking = self
            .explorers
            .iter()
            .filter(|(_, one)| one.wait.as_ref().is_some_and(|wait| wait.version.is_none()));
        asking.map(|(party, _)| *party).collect()
    }

    /// Whether an explorer is to synchronise before its next step.
    pub fn explorer_need(&self, party: Party) -> Need {
        let Some(explorer) = self.explorers.get(&party) else {
            return Need::No;
        };
        // What it could have now.
        let is_offered = match self.method {
            Method::Direct => self.is_awaited(),
            Method::Memory | Method::Checkpoint => self.newest > explorer.version,
        };
        let is_after = |interval: NonZero<u64>| explorer.step - explorer.synced >= interval.get();
        let needed = match self.style {
            Style::Bounded { lag, .. } => {
                if self.newest.0.saturating_sub(explorer.version.0) > lag {
                    return Need::Must;
                }
                self.method == Method::Direct && is_offered
            }
            Style::Fixed { interval, offset } => {
                explorer.step > offset
                    && (explorer.step - offset).is_multiple_of(interval.get())
                    && explorer.synced != explorer.step
            }
            Style::ByExplorer { interval } => is_after(interval),
            Style::ByTrainer { .. } => is_offered,
            Style::FullyAsync {
                explorer: interval, ..
            } => is_after(interval) && is_offered,
        };
        if needed || explorer.retries {
            Need::Yes
        } else {
            Need::No
        }
    }

    /// What a party does; [`Stopped`](State::Stopped) for one that is not there.
    pub fn state(&self, party: Party) -> State {
        if let Some(trainer) = self.trainer.as_ref().filter(|one| one.party == party) {
            return match trainer.meeting {
                Some(_) => State::WaitingSync,
                None => State::Running,
            };
        }
        let explorer = self.explorers.get(&party);
        explorer.map_or(State::Stopped, |explorer| explorer.state)
    }

    /// The version that an explorer has verified and loaded.
    pub fn version(&self, party: Party) -> Option<Version> {
        self.explorers.get(&party).map(|explorer| explorer.version)
    }

    /// The newest version that can be fetched.
    pub fn newest(&self) -> Version {
        self.newest
    }

    /// The party of an event that nobody knows.
    fn stranger(&self, event: &Event) -> Option<Party> {
        let (party, known) = match event {
            Event::TrainerJoined(_) | Event::ExplorerJoined(..) | Event::Ticked => return None,
            Event::TrainerStepped(party, _)
            | Event::TrainerPublished(party, ..)
            | Event::TrainerMeets(party, ..)
            | Event::TrainerLeft(party) => {
                let own = self.trainer.as_ref().map(|trainer| trainer.party);
                (*party, own == Some(*party))
            }
            Event::ExplorerStepped(party, _)
            | Event::ExplorerSyncs(party, _)
            | Event::ExplorerLoaded(party, _)
            | Event::ExplorerFailed(party)
            | Event::ExplorerLeft(party) => (*party, self.explorers.contains_key(party)),
        };
        (!known).then_some(party)
    }

    /// Whether the trainer waits for explorers that have not come yet.
    fn is_awaited(&self) -> bool {
        let meeting = self.trainer.as_ref().and_then(|one| one.meeting.as_ref());
        meeting.is_some_and(|meeting| meeting.pending.is_none())
    }

    /// Tells explorers that wait what there is to fetch.
    fn hand_out(&mut self, effects: &mut Vec<Effect>) {
        if self.method == Method::Direct {
            return;
        }
        for (party, explorer) in &mut self.explorers {
            if explorer.version < self.newest
                && let Some(wait) = &mut explorer.wait
                && wait.version.is_none()
            {
                wait.version = Some(self.newest);
                effects.push(Effect::Fetch(*party, self.newest));
            }
        }
    }

    /// Begins the meeting that the trainer waits for, if all are there: in the fixed style every
    /// explorer, else those that ask, one at least.
    fn begin_meeting(&mut self, effects: &mut Vec<Effect>) {
        let Some(trainer) = &mut self.trainer else {
            return;
        };
        let party = trainer.party;
        let Some(meeting) = trainer.meeting.as_mut().filter(|one| one.pending.is_none()) else {
            return;
        };
        let waits = |one: &Explorer| one.wait.as_ref().is_some_and(|wait| wait.version.is_none());
        let all = self.explorers.values().all(waits);
        let ready = match self.style {
            Style::Fixed { .. } => all,
            _ => self.explorers.values().any(waits) || self.explorers.is_empty(),
        };
        if !ready {
            return;
        }
        let mut invited = BTreeSet::new();
        for (party, explorer) in &mut self.explorers {
            if let Some(wait) = explorer.wait.as_mut().filter(|wait| wait.version.is_none()) {
                wait.version = Some(meeting.version);
                invited.insert(*party);
            }
        }
        if !invited.is_empty() {
            let invited = invited.iter().copied().collect();
            effects.push(Effect::Meet(party, meeting.version, invited));
        }
        meeting.pending = Some(invited);
    }

    /// Notes that an explorer has loaded what the trainer sends, or never will.
    fn met(&mut self, party: Party, loaded: bool) {
        let trainer = self.trainer.as_mut();
        if let Some(meeting) = trainer.and_then(|trainer| trainer.meeting.as_mut())
            && let Some(pending) = &mut meeting.pending
            && pending.remove(&party)
            && !loaded
        {
            meeting.failed.insert(party);
        }
    }

    /// Ends the meeting of which all have loaded, or failed.
    fn end_met(&mut self, effects: &mut Vec<Effect>) {
        let Some(trainer) = &mut self.trainer else {
            return;
        };
        let over = |meeting: &mut Meeting| {
            let pending = meeting.pending.as_ref();
            pending.is_some_and(BTreeSet::is_empty)
        };
        if let Some(meeting) = trainer.meeting.take_if(over) {
            trainer.synced = Some(trainer.step);
            self.newest = self.newest.max(meeting.version);
            let failed = meeting.failed.into_iter().collect();
            let outcome = Outcome::Synced(meeting.version, failed);
            effects.push(Effect::Ended(trainer.party, outcome));
        }
    }

    /// Ends the meeting of a trainer that goes: those that it sent to have nothing to wait for.
    fn end_meeting(&mut self, old: &Trainer, effects: &mut Vec<Effect>) {
        let pending = old.meeting.as_ref().and_then(|one| one.pending.clone());
        for party in pending.into_iter().flatten() {
            self.fail(party, Outcome::Failed, effects);
        }
    }

    /// Ends the waits of explorers that nobody would ever answer.
    fn end_hopeless(&mut self, effects: &mut Vec<Effect>) {
        for party in self.asking() {
            if let Some(explorer) = self.explorers.get_mut(&party) {
                explorer.end(false);
                // It is not the explorer's fault, and another try would come to the same.
                explorer.retries = false;
                effects.push(Effect::Ended(party, Outcome::NothingNewer));
            }
        }
    }

    /// Ends the waits whose time has come.
    fn end_late(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let is_late = |until: Option<Moment>| until.is_some_and(|until| until <= now);
        let late = self
            .explorers
            .iter()
            .filter(|(_, one)| one.wait.as_ref().is_some_and(|wait| is_late(wait.until)));
        for party in late.map(|(party, _)| *party).collect::<Vec<_>>() {
            self.fail(party, Outcome::TimedOut, effects);
        }
        if let Some(trainer) = &mut self.trainer
            && let Some(meeting) = trainer.meeting.take_if(|one| is_late(one.until))
        {
            let party = trainer.party;
            effects.push(Effect::Ended(party, Outcome::TimedOut));
            for explorer in meeting.pending.into_iter().flatten() {
                self.fail(explorer, Outcome::Failed, effects);
            }
        }
    }

    fn fail(&mut self, party: Party, outcome: Outcome, effects: &mut Vec<Effect>) {
        if let Some(explorer) = self.explorers.get_mut(&party)
            && explorer.wait.is_some()
        {
            explorer.end(false);
            effects.push(Effect::Ended(party, outcome));
        }
        self.met(party, false);
    }
}

impl Explorer {
    fn end(&mut self, synced: bool) {
        self.wait = None;
        self.state = State::Running;
        self.retries = !synced;
        if synced {
            self.synced = self.step;
        }
    }
}
