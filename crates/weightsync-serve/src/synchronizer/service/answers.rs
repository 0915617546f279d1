//! What was decided, and what parties are told.

use std::collections::BTreeMap;
use std::time::Duration;

use weightsync_core::synchronizer::{Need, Party, SyncEffect, SyncEvent, SyncOutcome};
use weightsync_engine::Version;

use super::super::events::{EventKind, EventRecord, since_1970};
use super::super::wire::{
    Ended, ExplorerLine, NeedAnswer, Reply, RequestProblem, Role, SyncAnswer, TrainerAnswer,
};
use super::{AvailableVersion, REMEMBERED, RequestKind, Service, WaitingRequest};

/// The most explorers that an answer to a trainer has.
const LINES: usize = 1000;

impl Service {
    pub(super) fn tell(&mut self, event: SyncEvent) {
        let now = self.now();
        // The core is pure: it returns effects, and this performs them.
        for effect in self.core.step(event, now) {
            self.perform(effect);
        }
    }

    pub(super) fn perform(&mut self, effect: SyncEffect) {
        match effect {
            SyncEffect::Wake(party) => self.answer_need(party),
            // Explorers that wait for a need may have one now.
            SyncEffect::Offered => {
                let explorers = self.members.iter();
                let explorers = explorers.filter(|(_, one)| one.role == Role::Explorer);
                for party in explorers.map(|(party, _)| *party).collect::<Vec<_>>() {
                    self.answer_need(party);
                }
            }
            SyncEffect::Fetch(party, version) => self.fetch(party, version),
            SyncEffect::Meet(party, _, explorers) => {
                // They are told to fetch only when the trainer says that it has sent.
                self.meeting = explorers;
                // Of a meeting whose trainer has left, too.
                self.gone.clear();
                if let Some(member) = self.members.get_mut(&party) {
                    member.met = None;
                }
                self.answer_meet(party, Reply::Go {});
            }
            SyncEffect::Synced(party, outcome) => {
                // An explorer that has ended its sync is not told to fetch any more.
                self.meeting.retain(|one| *one != party);
                self.ended(party, Ended::of(outcome));
            }
            SyncEffect::Met(party, version, all) => self.met(party, version, &all),
            SyncEffect::Refused(party) => self.refused(party),
        }
    }

    pub(super) fn answer_need(&mut self, party: Party) {
        // The request stays where it is until there is something to say.
        let need = self.waiting_need(party);
        if (need.need != Need::No || need.trainer_stopped)
            && let Some(waiting) = self.waiting(party, |kind| kind == RequestKind::Need)
        {
            (waiting.answer)(Ok(Reply::Need(need)));
        }
    }

    pub(super) fn answer_meet(&mut self, party: Party, reply: Reply) {
        if let Some(waiting) = self.waiting(party, |kind| matches!(kind, RequestKind::Meet(..))) {
            (waiting.answer)(Ok(reply));
        }
    }

    pub(super) fn ended(&mut self, party: Party, ended: Ended) {
        if let Some(member) = self.members.get_mut(&party) {
            member.ended = Some(ended);
            if ended == Ended::Synced {
                // The reason of an earlier failure is over.
                member.reason = None;
            }
        }
        *self.counts.ended.entry(ended.word()).or_default() += 1;
        let version = self.core.version(party);
        self.note(EventKind::Ended(ended), party, |event| {
            event.version = version
        });
        self.answer_sync(party, ended);
    }

    pub(super) fn answer_sync(&mut self, party: Party, ended: Ended) {
        let Some(waiting) = self.waiting(party, |kind| kind == RequestKind::Sync) else {
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
            // The caller measures how long its own call took.
            took: Duration::ZERO,
        })));
    }

    pub(super) fn met(
        &mut self,
        party: Party,
        version: Version,
        all: &BTreeMap<Party, SyncOutcome>,
    ) {
        self.meeting.clear();
        // Lines of explorers that left during the meeting, which have no record any more.
        let mut gone = std::mem::take(&mut self.gone);
        let synced = all
            .values()
            .any(|one| matches!(one, SyncOutcome::Synced(_)));
        let late = all.values().any(|one| *one == SyncOutcome::TimedOut);
        // One explorer with the version is enough. The lines say how it went for the others.
        let (ended, reason) = match (all.is_empty(), late) {
            _ if synced => (Ended::Synced, None),
            (true, _) => (Ended::TimedOut, Some("no explorer came")),
            (_, true) => (Ended::TimedOut, Some("no explorer has loaded it in time")),
            _ => (Ended::Failed, Some("no explorer has loaded it")),
        };
        let lines = all.iter().take(LINES).filter_map(|(party, outcome)| {
            let line = self.line(*party).or_else(|| gone.remove(party))?;
            let ended = Some(Ended::of(*outcome));
            Some(ExplorerLine { ended, ..line })
        });
        let explorers = lines.collect();
        let step = self.steps.get(&version).copied().unwrap_or_default();
        let answer = TrainerAnswer {
            explorers,
            ..self.trained(version, step, ended, reason.map(str::to_owned))
        };
        if synced {
            self.note_published(party, version, step);
        }
        match self.waiting(party, |kind| matches!(kind, RequestKind::Meet(..))) {
            Some(waiting) => (waiting.answer)(Ok(Reply::Trained(answer))),
            // The trainer is still sending, and no request of it waits. Its next one takes the
            // answer.
            None => {
                if let Some(member) = self.members.get_mut(&party) {
                    member.met = Some(answer);
                }
            }
        }
    }

    pub(super) fn refused(&mut self, party: Party) {
        // The core refuses a trainer in two cases: another one has its place, or the version or the
        // meeting does not fit.
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
                // The old trainer's next request finds no record. It then joins again with its
                // epoch, which is refused.
                let member = self.members.remove(&party);
                let name = member.map(|member| member.name).unwrap_or_default();
                let reason = format!(
                    "the trainer {name:?} is fenced off: another trainer has taken its place with epoch \
                     {}; end this process",
                    self.core.epoch().0
                );
                self.events
                    .note(EventKind::Died, Role::Trainer, &name, |event| {
                        event.reason = Some(reason.clone());
                    });
                RequestProblem::Replaced { reason }
            }
            false => RequestProblem::Refused {
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

    /// Takes a request that waits, if it is of such a kind.
    pub(super) fn waiting(
        &mut self,
        party: Party,
        is: impl FnOnce(RequestKind) -> bool,
    ) -> Option<WaitingRequest> {
        let member = self.members.get_mut(&party)?;
        member.waiting.take_if(|waiting| is(waiting.kind))
    }

    /// Tells explorers that wait for a need that nothing newer comes.
    pub(super) fn say_stopped(&mut self) {
        for party in self.members.keys().copied().collect::<Vec<_>>() {
            self.answer_need(party);
        }
    }

    /// The need of a party that waits, and makes no steps.
    pub(super) fn waiting_need(&self, party: Party) -> NeedAnswer {
        let answer = self.need(party);
        match self.core.trainer() == Some(party) {
            // A waiting trainer makes no steps, so an explorer that asks counts for it in every
            // style.
            true => NeedAnswer {
                need: self.core.waiting_trainer_need(),
                ..answer
            },
            false => answer,
        }
    }

    pub(super) fn need(&self, party: Party) -> NeedAnswer {
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
            asked_by: asking
                // Bounds the answer, as thousands of explorers may ask.
                .take(LINES)
                .map(|member| member.name.clone())
                .collect(),
            newest: self.core.newest().0,
            trainer_stopped: self.core.is_stopped(party),
            connected: true,
        }
    }

    pub(super) fn trained(
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
            explorers: {
                let lines = self.lines().into_iter().take(LINES);
                lines.map(|(_, line)| line).collect()
            },
            reason,
            took: Duration::ZERO,
        }
    }

    pub(super) fn remember(&mut self, version: Version, step: u64) {
        self.steps.insert(version, step);
        while self.steps.len() > REMEMBERED {
            self.steps.pop_first();
        }
    }

    pub(super) fn note_published(&mut self, party: Party, version: Version, step: u64) {
        self.note_saves();
        self.counts.published += 1;
        self.record.note(self.core.epoch(), Some((version, step)));
        self.published.push_back(AvailableVersion {
            version,
            step: Some(step),
            at_ms: Some(since_1970()),
        });
        if self.published.len() > REMEMBERED {
            self.published.pop_front();
        }
        self.note(EventKind::Published, party, |event| {
            (event.version, event.step) = (Some(version), Some(step));
        });
    }

    pub(super) fn set_reason(&mut self, party: Party, reason: Option<String>) {
        if let Some(member) = self.members.get_mut(&party) {
            member.reason = reason;
        }
    }

    pub(super) fn note(&self, what: EventKind, party: Party, more: impl FnOnce(&mut EventRecord)) {
        if let Some(member) = self.members.get(&party) {
            self.events.note(what, member.role, &member.name, more);
        }
    }
}
