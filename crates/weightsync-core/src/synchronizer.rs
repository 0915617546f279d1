//! When a trainer and its explorers synchronise: one decision at a time.
//!
//! [`Synchronizer::step`] takes an event and says what to do. It has no clock and no connections: the
//! caller tells it the time, gives every party that joins a number which nobody else ever has, and does
//! what the effects say. A party that comes back joins again, under another number, so that what its
//! past life still says is refused. The caller says first that the past life has left.
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
//! A sync that fails, or comes to its deadline, changes no version, and the party needs one at its next
//! step again: its state is then REQUIRE_SYNC. A version counts from the moment at which it can be had:
//! with [`Direct`](Method::Direct), when the first explorer has loaded it.
//!
//! Each party has its own style: a trainer may publish at fixed steps for explorers that decide for
//! themselves.
//!
//! The unit is a set of models that change together; a [`Version`] here is that of the set.

use std::collections::BTreeMap;
use std::num::NonZero;

use crate::version::{Epoch, Version};

mod event;
mod meeting;
#[cfg(test)]
mod tests;

pub use self::event::{
    Method, Moment, Need, Party, PartyDeparture, State, Style, SyncEffect, SyncEvent, SyncOutcome,
};

/// The state of all parties.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Synchronizer {
    method: Method,
    /// Whether it may still be another one.
    free: bool,
    trainer: Option<TrainerState>,
    /// The highest epoch of a trainer.
    epoch: Epoch,
    /// The trainer has stopped in order.
    stopped: bool,
    explorers: BTreeMap<Party, ExplorerState>,
    /// The newest version that can be had, and the step that made it.
    newest: (Version, u64),
    /// The highest number that a trainer gave a version, whatever became of that.
    highest: Version,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TrainerState {
    party: Party,
    style: Style,
    step: u64,
    /// The step of the weights that were synchronised last.
    synced: u64,
    /// Its last sync failed.
    failed: bool,
    meeting: Option<Meeting>,
}

/// What a trainer waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Meeting {
    version: Version,
    step: u64,
    until: Option<Moment>,
    /// Those to whom it sends, and what came of it; `None` until it begins.
    invited: Option<BTreeMap<Party, Option<SyncOutcome>>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ExplorerState {
    style: Style,
    step: u64,
    /// The step of its last sync.
    synced: u64,
    /// The version that it has verified and loaded.
    version: Version,
    paused: bool,
    /// Its trainer had stopped before this life of the synchronizer.
    stopped: bool,
    /// Set while it waits.
    wait: Option<Wait>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Wait {
    until: Option<Moment>,
    /// What it was told to fetch, or receives.
    told: Option<Version>,
}

impl Synchronizer {
    /// Nobody is there yet. A store may have a version, and the step that made it; trainers of
    /// earlier lives of the synchronizer had epochs up to this one.
    pub fn new(method: Method, newest: Option<(Version, u64)>, epoch: Epoch) -> Self {
        let newest = newest.unwrap_or((Version::NONE, 0));
        Self {
            method,
            // A store that has versions fixes how versions travel.
            free: newest.0.is_none(),
            trainer: None,
            epoch,
            stopped: false,
            explorers: BTreeMap::new(),
            newest,
            // Numbers go on above the stored version, so no number stands for two versions.
            highest: newest.0,
        }
    }

    /// How versions travel.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Sets how versions travel, until a trainer has been there, there is a version, or it was
    /// [fixed](Self::fix_method). False if it is too late for another method.
    pub fn choose(&mut self, method: Method) -> bool {
        // From then on there are versions, or a trainer that makes some, by this method.
        if self.free {
            self.method = method;
        }
        self.method == method
    }

    /// Whether versions travel so, or still may.
    pub fn accepts(&self, method: Method) -> bool {
        self.free || self.method == method
    }

    /// Keeps to the method.
    pub fn fix_method(&mut self) {
        self.free = false;
    }

    /// Notes that a version has this number: the next one has a higher one.
    pub fn saw(&mut self, version: Version) {
        self.highest = self.highest.max(version);
    }

    /// Whether the trainer of a party has stopped in order, and no other has come since.
    pub fn is_stopped(&self, party: Party) -> bool {
        let explorer = self.explorers.get(&party);
        self.stopped || explorer.is_some_and(|explorer| explorer.stopped)
    }

    /// Notes that an explorer's trainer had stopped in order in an earlier life of the synchronizer.
    pub fn remember_stopped(&mut self, party: Party) {
        // A trainer that is there now makes new versions, whatever an earlier one did.
        let is_alone = self.trainer.is_none();
        if let Some(explorer) = self.explorers.get_mut(&party) {
            explorer.stopped = is_alone;
        }
    }

    /// Takes an event in. The effects are in the order in which they are to be done.
    pub fn step(&mut self, event: SyncEvent, now: Moment) -> Vec<SyncEffect> {
        let mut effects = Vec::new();
        // What parties may be waiting to know. They are told only of a change, below.
        let before = (
            self.waiting_trainer_need(),
            self.newest.0,
            self.is_awaited(),
        );
        if let Err(party) = self.take(event, now, &mut effects) {
            // A refused event has changed nothing, so nothing else follows from it.
            return vec![SyncEffect::Refused(party)];
        }
        // In this order. A meeting that begins with nobody invited ends in the same step, and its
        // trainer gets its answer.
        self.hand_out(&mut effects);
        self.begin_meeting(&mut effects);
        self.end_meeting(&mut effects);
        // Something to fetch, or a trainer that waits for explorers.
        if self.newest.0 > before.1 || self.is_awaited() && !before.2 {
            effects.push(SyncEffect::Offered);
        }
        // A trainer that waits for samples asks once, and is told when the answer changes.
        if before.0 == Need::No && self.waiting_trainer_need() != Need::No {
            effects.extend(
                self.trainer
                    .iter()
                    .map(|trainer| SyncEffect::Wake(trainer.party)),
            );
        }
        effects
    }

    /// The moment at which the caller has to say that time has passed.
    pub fn deadline(&self) -> Option<Moment> {
        // The earliest of all deadlines: the caller needs one timer, however many parties wait.
        let waits = self.explorers.values().filter_map(|one| one.wait.as_ref());
        let untils = waits.map(|wait| wait.until);
        let meeting = self.meeting().map(|meeting| meeting.until);
        untils.chain(meeting).flatten().min()
    }

    /// Whether the trainer is to synchronise.
    pub fn trainer_need(&self) -> Need {
        let Some(trainer) = &self.trainer else {
            return Need::No;
        };
        if self.method == Method::Direct && self.explorers.values().all(|one| one.paused) {
            return Need::No; // nobody to meet
        }
        // Whole intervals are counted, so a trainer that skips the step itself is due at the next
        // one.
        let is_due = |interval: NonZero<u64>| trainer.step / interval > trainer.synced / interval;
        let due = match trainer.style {
            Style::Fixed { interval, .. }
            | Style::ByTrainer { interval }
            | Style::Bounded { interval, .. } => is_due(interval),
            Style::FullyAsync { trainer, .. } => is_due(trainer),
            Style::ByExplorer { .. } => !self.asking().is_empty(),
        };
        // One that was left out of a meeting would wait for the next one that is due.
        let behind = self.asking().iter().any(|party| self.is_behind(*party));
        match due || behind {
            true => Need::Yes,
            false => Need::No,
        }
    }

    /// Whether the trainer is to synchronise if it waits and makes no steps, for samples say. Then an
    /// explorer that asks counts in every style: each would wait for the other.
    pub fn waiting_trainer_need(&self) -> Need {
        match self.trainer_need() {
            Need::No if self.trainer.is_some() && !self.asking().is_empty() => Need::Yes,
            need => need,
        }
    }

    /// The explorers that wait and have not been told of a version.
    pub fn asking(&self) -> Vec<Party> {
        let asking = self.explorers.iter().filter(|(_, one)| one.is_asking());
        asking.map(|(party, _)| *party).collect()
    }

    /// Whether an explorer is to synchronise before its next step.
    pub fn explorer_need(&self, party: Party) -> Need {
        let Some(explorer) = self.explorers.get(&party).filter(|one| !one.paused) else {
            return Need::No;
        };
        let newest = self.newest.0;
        // It has never had a version, and there is one.
        // Without weights it cannot make a step, whatever its style says.
        if explorer.version.is_none() && !newest.is_none() {
            return Need::Must;
        }
        // A version that it can fetch, or a trainer that is about to send one.
        let is_offered = self.is_behind(party) || self.is_awaited();
        let since = explorer.step.saturating_sub(explorer.synced);
        let needed = match explorer.style {
            Style::Bounded { lag, .. } => {
                // The bound holds before the next step: with this lag the explorer may not go on.
                if newest.0.saturating_sub(explorer.version.0) > lag {
                    return Need::Must;
                }
                self.is_awaited()
            }
            Style::Fixed { interval, offset } => {
                // Steps up to the offset belong to no interval: the explorer is ahead of its
                // trainer by so many.
                let count = |step: u64| step.saturating_sub(offset) / interval;
                count(explorer.step) > count(explorer.synced)
            }
            Style::ByExplorer { interval } => since >= interval.get(),
            Style::ByTrainer { .. } => is_offered,
            Style::FullyAsync { explorer, .. } => since >= explorer.get() && is_offered,
        };
        if needed { Need::Yes } else { Need::No }
    }

    /// What a party does; [`Stopped`](State::Stopped) for one that is not there.
    pub fn state(&self, party: Party) -> State {
        if let Some(trainer) = self.trainer.as_ref().filter(|one| one.party == party) {
            return match (&trainer.meeting, trainer.failed) {
                (Some(_), _) => State::WaitingSync,
                (None, true) => State::RequireSync,
                (None, false) => State::Running,
            };
        }
        match (self.explorers.get(&party), self.method) {
            (None, _) => State::Stopped,
            (Some(ExplorerState { wait: Some(_), .. }), Method::Direct) => State::WaitingSync,
            (Some(ExplorerState { wait: Some(_), .. }), _) => State::RequireSync,
            _ if self.explorer_need(party) != Need::No => State::RequireSync,
            _ => State::Running,
        }
    }

    /// The version that an explorer has verified and loaded.
    pub fn version(&self, party: Party) -> Option<Version> {
        self.explorers.get(&party).map(|explorer| explorer.version)
    }

    /// How many steps a party has made.
    pub fn steps(&self, party: Party) -> Option<u64> {
        let trainer = self.trainer.as_ref().filter(|one| one.party == party);
        let steps = trainer.map(|trainer| trainer.step);
        steps.or_else(|| self.explorers.get(&party).map(|explorer| explorer.step))
    }

    /// The trainer, if one is there.
    pub fn trainer(&self) -> Option<Party> {
        self.trainer.as_ref().map(|trainer| trainer.party)
    }

    /// The highest epoch of a trainer.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The newest version that can be had, and the trainer's step that made it.
    pub fn newest(&self) -> (Version, u64) {
        self.newest
    }

    /// The highest number that a version has: the next one has a higher one.
    pub fn highest(&self) -> Version {
        self.highest
    }

    /// Whether the trainer sends a version to explorers.
    pub fn is_sending(&self) -> bool {
        self.meeting()
            .is_some_and(|meeting| meeting.invited.is_some())
    }

    fn meeting(&self) -> Option<&Meeting> {
        self.trainer.as_ref()?.meeting.as_ref()
    }

    /// Whether the trainer waits for explorers that have not come yet.
    fn is_awaited(&self) -> bool {
        self.meeting()
            .is_some_and(|meeting| meeting.invited.is_none())
    }

    fn is_behind(&self, party: Party) -> bool {
        self.version(party)
            .is_some_and(|version| version < self.newest.0)
    }

    /// Notes what happened. The party is one that is not known, or may not say this.
    // Longer than a screen: one list with an arm for each event, so that the arms can be read next
    // to those of the specification's table.
    fn take(
        &mut self,
        event: SyncEvent,
        now: Moment,
        effects: &mut Vec<SyncEffect>,
    ) -> Result<(), Party> {
        match event {
            SyncEvent::TrainerJoined(party, epoch, step, style) => {
                // An older trainer that was started again, or was cut off: the newer one has fenced
                // it off.
                if epoch < self.epoch {
                    return Err(party);
                }
                // Explorers that waited for what the old trainer sends get an answer.
                if let Some(old) = self.leave(effects) {
                    effects.push(SyncEffect::Refused(old));
                }
                // Its versions will travel by this method from here on. Explorers that were told of
                // a stop may expect versions again.
                (self.epoch, self.stopped, self.free) = (epoch, false, false);
                for explorer in self.explorers.values_mut() {
                    explorer.stopped = false;
                }
                self.trainer = Some(TrainerState {
                    party,
                    style,
                    step,
                    // One that went back to an earlier step is not due later for that.
                    synced: self.newest.1.min(step),
                    failed: false,
                    meeting: None,
                });
            }
            SyncEvent::TrainerStepped(party, step) => {
                let trainer = self.known(party)?;
                // A late message must not put it back.
                trainer.step = trainer.step.max(step);
            }
            SyncEvent::TrainerPublished(party, version, step) => {
                // With `Direct` a version can be had only once an explorer has loaded it, so
                // nothing is published.
                let new = version > self.newest.0 && self.method != Method::Direct;
                let trainer = self.known(party)?;
                // An older number would lead explorers back.
                if !new {
                    return Err(party);
                }
                (trainer.synced, trainer.failed) = (step, false);
                self.newest = (version, step);
                self.saw(version);
            }
            SyncEvent::TrainerMeets(party, version, step, until) => {
                // It may meet again for a version that came to nobody.
                let new = version >= self.highest && version > self.newest.0;
                let new = new && self.method == Method::Direct;
                let trainer = self.known(party)?;
                // One meeting at a time: its version is what all who wait are sent.
                if !new || trainer.meeting.is_some() {
                    return Err(party);
                }
                trainer.meeting = Some(Meeting {
                    version,
                    step,
                    until,
                    invited: None,
                });
                // The number is taken from here on, even if nobody loads the version.
                self.highest = version;
            }
            SyncEvent::TrainerFailed(party) => {
                // Also without a meeting. If an explorer has loaded the version all the same,
                // `abandon` takes it back.
                self.known(party)?.failed = true;
                self.abandon(SyncOutcome::TrainerLeft, effects);
            }
            SyncEvent::TrainerLeft(party, how) => {
                self.known(party)?;
                self.leave(effects);
                // After a death, explorers go on waiting: the trainer may be started again.
                self.stopped = how == PartyDeparture::Stopped;
            }
            SyncEvent::ExplorerJoined(party, version, [step, synced], style) => {
                let explorer = ExplorerState {
                    style,
                    step,
                    // A sync after the last step cannot be: the numbers come from outside.
                    synced: synced.min(step),
                    // A number from another life of the synchronizer may say nothing here.
                    version: self.given(version),
                    paused: false,
                    stopped: false,
                    wait: None,
                };
                self.explorers.insert(party, explorer);
            }
            SyncEvent::ExplorerStepped(party, step) => {
                let explorer = self.explorers.get_mut(&party).ok_or(party)?;
                explorer.step = explorer.step.max(step);
            }
            SyncEvent::ExplorerSyncs(party, until) => {
                let explorer = self.explorers.get_mut(&party).ok_or(party)?;
                // What it was told stays. It may be fetching that, or be in a meeting.
                let told = explorer.wait.take().and_then(|wait| wait.told);
                explorer.wait = Some(Wait { until, told });
            }
            SyncEvent::ExplorerCancelled(party) => {
                self.explorers.get(&party).ok_or(party)?;
                self.end(party, SyncOutcome::Cancelled, effects);
            }
            SyncEvent::ExplorerLoaded(party, version) => {
                let given = self.given(version);
                let explorer = self.explorers.get_mut(&party).ok_or(party)?;
                // Whatever it was told: this is what it runs.
                explorer.version = given;
                let told = explorer.wait.as_ref().and_then(|wait| wait.told);
                if let Some(meeting) = self.meeting()
                    && meeting.version == version
                    && meeting
                        .invited
                        .as_ref()
                        .is_some_and(|all| all.contains_key(&party))
                {
                    // With `Direct`, this is the moment at which the version exists for others.
                    self.newest = (version, meeting.step);
                }
                // Also if it was too late for its wait: it would ask for what nobody is about to make.
                if version >= self.newest.0
                    && let Some(explorer) = self.explorers.get_mut(&party)
                {
                    explorer.synced = explorer.step;
                }
                // An older version than it was told of does not end its wait.
                if told.is_some_and(|told| version >= told) {
                    self.end(party, SyncOutcome::Synced(version), effects);
                }
            }
            SyncEvent::ExplorerFailed(party, version) => {
                let explorer = self.explorers.get(&party).ok_or(party)?;
                // The failure of an earlier fetch says nothing about this one.
                if explorer.wait.as_ref().and_then(|wait| wait.told) == Some(version) {
                    self.end(party, SyncOutcome::Failed, effects);
                }
            }
            SyncEvent::ExplorerPaused(party, paused) => {
                self.explorers.get_mut(&party).ok_or(party)?.paused = paused;
            }
            SyncEvent::ExplorerLeft(party) => {
                self.explorers.remove(&party).ok_or(party)?;
                // Its trainer may be in a meeting with it, and must not wait for it.
                self.note(party, SyncOutcome::Left);
            }
            SyncEvent::Ticked => {
                let is_late = |until: Option<Moment>| until.is_some_and(|until| until <= now);
                let late = self
                    .explorers
                    .iter()
                    .filter(|(_, one)| one.wait.as_ref().is_some_and(|wait| is_late(wait.until)));
                // Collected first, because ending a wait changes the table.
                for party in late.map(|(party, _)| *party).collect::<Vec<_>>() {
                    self.end(party, SyncOutcome::TimedOut, effects);
                }
                if self.meeting().is_some_and(|meeting| is_late(meeting.until)) {
                    self.abandon(SyncOutcome::TimedOut, effects);
                }
            }
        }
        Ok(())
    }

    /// What an explorer says it has. A number that no trainer gave is no version.
    fn given(&self, version: Version) -> Version {
        match version <= self.highest {
            true => version,
            false => Version::NONE,
        }
    }

    /// The trainer, if this is its party.
    fn known(&mut self, party: Party) -> Result<&mut TrainerState, Party> {
        let trainer = self.trainer.as_mut();
        trainer
            .filter(|trainer| trainer.party == party)
            .ok_or(party)
    }

    /// Takes the trainer away, and ends what it sends.
    fn leave(&mut self, effects: &mut Vec<SyncEffect>) -> Option<Party> {
        if let Some(meeting) = self.trainer.as_mut().and_then(|one| one.meeting.take()) {
            self.end_all(&meeting, SyncOutcome::TrainerLeft, effects);
        }
        self.trainer.take().map(|trainer| trainer.party)
    }

    /// Ends the wait of an explorer.
    fn end(&mut self, party: Party, outcome: SyncOutcome, effects: &mut Vec<SyncEffect>) {
        if let Some(explorer) = self.explorers.get_mut(&party)
            && explorer.wait.take().is_some()
        {
            // A sync that failed leaves the explorer in need of one at its next step.
            if matches!(outcome, SyncOutcome::Synced(_) | SyncOutcome::NothingNewer) {
                explorer.synced = explorer.step;
            }
            effects.push(SyncEffect::Synced(party, outcome));
        }
        // Also if it did not wait: a meeting may have invited it before.
        self.note(party, outcome);
    }

    /// Notes what became of an explorer that the trainer sends to.
    fn note(&mut self, party: Party, outcome: SyncOutcome) {
        let meeting = self.trainer.as_mut().and_then(|one| one.meeting.as_mut());
        let invited = meeting.and_then(|meeting| meeting.invited.as_mut());
        if let Some(own) = invited.and_then(|invited| invited.get_mut(&party)) {
            // The first outcome stays: one that loaded and then left has loaded.
            own.get_or_insert(outcome);
        }
    }

    /// Tells explorers that ask what there is to fetch, or that nothing will come.
    fn hand_out(&mut self, effects: &mut Vec<SyncEffect>) {
        // Those that were told of a version before are fetching it, and are told nothing new.
        for party in self.asking() {
            let behind = self.is_behind(party);
            // With `Direct` there is nothing to fetch: the explorer waits for a meeting.
            if behind && self.method != Method::Direct {
                let newest = self.newest.0;
                let explorer = self.explorers.get_mut(&party);
                if let Some(wait) = explorer.and_then(|explorer| explorer.wait.as_mut()) {
                    wait.told = Some(newest);
                    effects.push(SyncEffect::Fetch(party, newest));
                }
            } else if self.is_stopped(party) {
                // No version will come any more, so a wait without a deadline would never end.
                let outcome = match behind {
                    true => SyncOutcome::OutOfReach,
                    false => SyncOutcome::NothingNewer,
                };
                self.end(party, outcome, effects);
            }
        }
    }
}

impl ExplorerState {
    fn is_asking(&self) -> bool {
        self.wait.as_ref().is_some_and(|wait| wait.told.is_none())
    }
}
