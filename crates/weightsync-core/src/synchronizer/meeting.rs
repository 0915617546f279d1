//! A trainer and explorers that meet, for a version that goes to them directly.

use std::collections::BTreeMap;

use super::{ExplorerState, Meeting, Style, SyncEffect, SyncOutcome, Synchronizer};

impl Synchronizer {
    /// Ends the meeting as it stands, and answers the trainer.
    pub(super) fn abandon(&mut self, outcome: SyncOutcome, effects: &mut Vec<SyncEffect>) {
        // Taken first: ending the waits below must not find the meeting open.
        let Some(meeting) = self.trainer.as_mut().and_then(|one| one.meeting.take()) else {
            return;
        };
        self.end_all(&meeting, outcome, effects);
        self.answer(meeting, outcome, effects);
    }

    /// Ends the waits of those that have not loaded what a meeting sends them.
    pub(super) fn end_all(
        &mut self,
        meeting: &Meeting,
        outcome: SyncOutcome,
        effects: &mut Vec<SyncEffect>,
    ) {
        for (party, own) in meeting.invited.iter().flatten() {
            // Those with an outcome were answered when it came.
            if own.is_none() {
                self.end(*party, outcome, effects);
            }
        }
    }

    /// Answers the trainer. Those without an outcome have this one.
    fn answer(&mut self, meeting: Meeting, outcome: SyncOutcome, effects: &mut Vec<SyncEffect>) {
        let Some(trainer) = &mut self.trainer else {
            return;
        };
        let all = meeting.invited.into_iter().flatten();
        let all: BTreeMap<_, _> = all
            .map(|(party, own)| (party, own.unwrap_or(outcome)))
            .collect();
        let loaded = all
            .values()
            .any(|one| matches!(one, SyncOutcome::Synced(_)));
        // One explorer is enough: the version exists, and the others may get it later.
        if loaded {
            trainer.synced = meeting.step;
        }
        trainer.failed = !loaded;
        effects.push(SyncEffect::Met(trainer.party, meeting.version, all));
    }

    /// Begins the meeting that the trainer waits for. If its style is fixed, all explorers of that style
    /// come, unless one that was left out of an earlier one asks. In the style driven by explorers those
    /// that ask come, if any does still; in the others, the first.
    pub(super) fn begin_meeting(&mut self, effects: &mut Vec<SyncEffect>) {
        if !self.is_awaited() {
            return;
        }
        let asking = self.asking();
        // An explorer that was left out of a meeting waits for the next. If the others come much
        // later, it would wait as long.
        let left_out = asking.iter().any(|party| self.is_behind(*party));
        // One that evaluates comes to no meeting, so nobody waits for it.
        let there = || self.explorers.values().filter(|one| !one.paused);
        let is_fixed = |style: Style| matches!(style, Style::Fixed { .. });
        // With nobody there to wait for, the meeting begins and ends at once.
        let some = !asking.is_empty() || there().next().is_none();
        let ready = |style| match style {
            Style::Fixed { .. } => {
                let mut fixed = there().filter(|one| is_fixed(one.style));
                left_out || some && fixed.all(ExplorerState::is_asking)
            }
            // An explorer has asked for this meeting. If it is gone by now, the trainer need not
            // wait for another.
            Style::ByExplorer { .. } => true,
            _ => some,
        };
        let is_ready = self.trainer.as_ref().is_some_and(|one| ready(one.style));
        let Some(trainer) = self.trainer.as_mut().filter(|_| is_ready) else {
            return;
        };
        let party = trainer.party;
        let Some(meeting) = &mut trainer.meeting else {
            return;
        };
        for party in &asking {
            let explorer = self.explorers.get_mut(party);
            if let Some(wait) = explorer.and_then(|explorer| explorer.wait.as_mut()) {
                // From here on they wait for this version, and are no longer among those that ask.
                wait.told = Some(meeting.version);
            }
        }
        meeting.invited = Some(asking.iter().map(|party| (*party, None)).collect());
        // Without explorers there is nothing to send, and `end_meeting` answers the trainer.
        if !asking.is_empty() {
            effects.push(SyncEffect::Meet(party, meeting.version, asking));
        }
    }

    /// Ends the meeting of which all have loaded, or failed.
    pub(super) fn end_meeting(&mut self, effects: &mut Vec<SyncEffect>) {
        let over = |meeting: &mut Meeting| {
            let invited = meeting.invited.as_ref();
            invited.is_some_and(|all| all.values().all(Option::is_some))
        };
        let trainer = self.trainer.as_mut();
        if let Some(meeting) = trainer.and_then(|trainer| trainer.meeting.take_if(over)) {
            // All have an outcome, so the one given here is used for none.
            self.answer(meeting, SyncOutcome::TrainerLeft, effects);
        }
    }
}
