//! Parties that join and leave.

use std::collections::BTreeSet;

use weightsync_core::synchronizer::{Method, Party, PartyDeparture, Style, SyncEvent};
use weightsync_engine::Version;
use weightsync_engine::transport::random;

use super::super::events::EventKind;
use super::super::memory::{Bridge, FromBridge};
use super::super::settings::{fit, method_word, style_word};
use super::super::wire::{
    ExplorerLine, Join, JoinAnswer, MAX_NAME, PROTOCOL, RequestProblem, Role,
};
use super::{Caller, PartyRecord, REMEMBERED, Service, ServiceInput};

/// The highest number that an explorer may come back with.
const MOST_WORKERS: u32 = 1 << 30;

impl Service {
    pub(super) fn join(
        &mut self,
        join: Join,
        caller: Caller,
    ) -> Result<JoinAnswer, RequestProblem> {
        let refused = |reason: String| Err(RequestProblem::Refused { reason });
        if join.protocol != PROTOCOL {
            return refused(format!(
                "the synchronizer speaks protocol {PROTOCOL}, the {} {:?} speaks {}: install the same \
                 weightsync on both",
                join.role, join.name, join.protocol
            ));
        }
        caller.may_be(join.role)?;
        if join.name.is_empty() || join.name.len() > MAX_NAME {
            return refused(format!(
                "the name of the {} has {} bytes: expected 1 to {MAX_NAME}",
                join.role,
                join.name.len()
            ));
        }
        let most = self.options.max_parties;
        // A trainer always finds a place, and so does a party that comes back.
        let is_back = |member: &PartyRecord| member.role == join.role && member.name == join.name;
        let is_new = join.role == Role::Explorer && !self.members.values().any(is_back);
        if is_new && self.members.len() >= most {
            return refused(format!(
                "the synchronizer has {most} parties, as many as it may have: raise its max_parties"
            ));
        }
        let style = join.style.unwrap_or(self.options.style);
        // Two styles that would each wait for the other never synchronise, so the second one is
        // refused.
        self.check_styles(join.role, &join.name, style)?;
        if let Some(method) = join.method
            && !self.core.accepts(method)
        {
            return refused(format!(
                "method={}: this synchronizer has a trainer with method={} already; give the same, or \
                 start another synchronizer",
                method_word(method),
                method_word(self.core.method())
            ));
        }
        match join.role {
            Role::Trainer => self.join_trainer(join, caller, style),
            Role::Explorer => self.join_explorer(join, style),
        }
    }

    pub(super) fn check_styles(
        &self,
        role: Role,
        name: &str,
        style: Style,
    ) -> Result<(), RequestProblem> {
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
                return Err(RequestProblem::Refused { reason });
            }
        }
        Ok(())
    }

    pub(super) fn join_trainer(
        &mut self,
        join: Join,
        caller: Caller,
        style: Style,
    ) -> Result<JoinAnswer, RequestProblem> {
        let Some(from) = join.from.clone() else {
            let reason = "a trainer says where its versions can be had".into();
            return Err(RequestProblem::Refused { reason });
        };
        // All checks come before the first change, so a refused trainer changes nothing.
        let epoch = self.epoch_of(&join)?;
        self.check_version(join.version)?;
        let method = join.method.unwrap_or(self.core.method());
        self.check_source(caller, &join.name, method, &from)?;
        let party = self.enter(Role::Trainer, join.name, style)?;
        self.core.choose(method);
        // From here on an older trainer is refused.
        self.tell(SyncEvent::TrainerJoined(party, epoch, join.step, style));
        self.record.stopped = false;
        // Written at once: after a restart an older trainer is still fenced off.
        self.record.note(epoch, None);
        self.source = Some(from);
        self.is_own_source = matches!(caller, Caller::Own);
        self.failed = None;
        // What another trainer has announced and not published is not this one's.
        let newest = self.core.newest().0;
        self.steps.retain(|version, _| *version <= newest);
        // With `memory` the service receives from the trainer. The bridge joins it in a thread, so
        // this loop goes on.
        if self.core.method() == Method::Memory {
            self.start_bridge(party);
        }
        // One that was here before the synchronizer was.
        if join.version > self.core.newest().0 && self.core.method() == Method::Checkpoint {
            self.published(party, join.version, join.version_step);
        } else if join.version > self.core.newest().0 {
            self.remember(join.version, join.version_step);
        }
        Ok(self.joined(party, style, 0))
    }

    /// Receives from the trainer, in a thread. Without one its versions fail, and it is told.
    pub(super) fn start_bridge(&mut self, party: Party) {
        // At most one bridge is current. A retired one passes nothing on any more.
        self.retire_bridge();
        let Some(from) = self.source.clone() else {
            return;
        };
        let inputs = self.inputs.clone();
        let tell = move |said| drop(inputs.send(ServiceInput::FromBridge(party, said)));
        match Bridge::start(from, self.is_own_source, self.held.clone(), tell) {
            Ok(bridge) => self.bridge = Some(bridge),
            Err(error) => {
                let reason = format!("the synchronizer cannot start a thread: {error}");
                self.bridged(party, FromBridge::Failed(None, reason));
            }
        }
    }

    pub(super) fn join_explorer(
        &mut self,
        join: Join,
        style: Style,
    ) -> Result<JoinAnswer, RequestProblem> {
        // The number lasts longer than the membership: where versions are received, the explorer
        // keeps its place.
        let worker = self.worker_of(&join);
        // Of another lineage its number says nothing.
        let version = match join.lineage == self.record.lineage {
            true => join.version,
            false => Version::NONE,
        };
        let party = self.enter(Role::Explorer, join.name, style)?;
        let steps = [join.step, join.synced];
        self.tell(SyncEvent::ExplorerJoined(party, version, steps, style));
        // It was here before this life of the service was. Others may wait for the trainer of a new run.
        if self.record.stopped && !version.is_none() {
            self.core.remember_stopped(party);
        }
        Ok(self.joined(party, style, worker))
    }

    /// The number by which an explorer receives versions: the one that it has, if no other has it.
    fn worker_of(&mut self, join: &Join) -> u32 {
        if let Some(known) = self.workers.get(&join.name) {
            return *known;
        }
        // Names that no party has are forgotten, some at a time.
        if self.workers.len() >= 2 * self.options.max_parties {
            let there: BTreeSet<_> = self.members.values().map(|one| &one.name).collect();
            self.workers.retain(|name, _| there.contains(name));
        }
        let is_free = |number: &u32| {
            *number <= MOST_WORKERS && !self.workers.values().any(|other| other == number)
        };
        let next = || self.workers.values().max().map_or(1, |most| most + 1);
        let number = join.worker.filter(is_free).unwrap_or_else(next);
        self.workers.insert(join.name.clone(), number);
        number
    }

    /// Gives a party its number. One of its name and role is replaced.
    fn enter(&mut self, role: Role, name: String, style: Style) -> Result<Party, RequestProblem> {
        // A party knows its own number, and must not know the next one's: who knows it can speak for it.
        let apart = random().map_err(|error| RequestProblem::Refused {
            reason: format!("the synchronizer cannot give a number: {error}"),
        })?;
        self.last += 1 + u64::from(u32::from_le_bytes(apart));
        let same = self.members.iter();
        let old = same.filter(|(_, one)| one.role == role && one.name == name);
        // An old trainer stays here until `TrainerJoined`: the core then refuses it, and it is told
        // why.
        for old in old.map(|(party, _)| *party).collect::<Vec<_>>() {
            if role == Role::Explorer {
                let reason = format!("another explorer has joined with the name {name:?}");
                let told = format!("{reason}; give each explorer a name of its own");
                // Said at once where it waits: one that knows no reason would join again.
                if let Some(waiting) = self.waiting(old, |_| true) {
                    (waiting.answer)(Err(RequestProblem::Replaced {
                        reason: told.clone(),
                    }));
                }
                self.leave(old, Some(reason));
                self.replaced.insert(old, told);
                if self.replaced.len() > REMEMBERED {
                    self.replaced.pop_first();
                }
            }
        }
        let party = Party(self.last);
        self.events.note(EventKind::Joined, role, &name, |event| {
            event.style = Some(style_word(style));
        });
        let member = PartyRecord {
            name,
            role,
            style,
            waiting: None,
            ended: None,
            reason: None,
            met: None,
        };
        self.members.insert(party, member);
        Ok(party)
    }

    pub(super) fn joined(&self, party: Party, style: Style, worker: u32) -> JoinAnswer {
        let (newest, newest_step) = self.core.newest();
        JoinAnswer {
            party: party.0,
            lineage: self.record.lineage,
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
    pub(super) fn leave(&mut self, party: Party, reason: Option<String>) {
        let line = self.line(party);
        self.note_saves();
        let Some(member) = self.members.remove(&party) else {
            return;
        };
        let what = match reason {
            None => EventKind::Stopped,
            Some(_) => EventKind::Died,
        };
        self.events.note(what, member.role, &member.name, |event| {
            event.reason.clone_from(&reason);
        });
        // Its connection has ended or it was replaced, so it is to join again.
        if let Some(waiting) = member.waiting {
            (waiting.answer)(Err(RequestProblem::Unknown {}));
        }
        match member.role {
            Role::Trainer => {
                // The bridge has no trainer to receive from. What it has passed on stays held.
                self.retire_bridge();
                let how = match reason {
                    None => PartyDeparture::Stopped,
                    Some(_) => PartyDeparture::Died,
                };
                self.tell(SyncEvent::TrainerLeft(party, how));
                // A restarted service reads this: explorers that were here then learn that nothing
                // newer comes.
                if how == PartyDeparture::Stopped {
                    self.record.set_stopped(true);
                    self.say_stopped();
                }
            }
            Role::Explorer => {
                // The trainer that sends to it is told what became of it.
                if let Some(line) = line.filter(|_| self.core.is_sending()) {
                    self.gone.insert(party, ExplorerLine { reason, ..line });
                }
                self.tell(SyncEvent::ExplorerLeft(party));
            }
        }
    }

    /// Ends the bridge to a trainer, without a wait for its thread.
    pub(super) fn retire_bridge(&mut self) {
        // Threads that have ended are dropped here, which joins them without a wait.
        self.retired.retain(|bridge| !bridge.is_over());
        if let Some(bridge) = self.bridge.take() {
            bridge.stop();
            self.retired.push(bridge);
        }
    }
}
