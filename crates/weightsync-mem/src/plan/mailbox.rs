//! One reader's mailbox: the sets that the reader was notified of, and those that wait for
//! room.

use std::collections::VecDeque;

use weightsync_core::{Version, WorkerId};

use super::desired::Desired;
use super::records::Records;
use super::{Disposition, Step};
use crate::protocol::{Live, SlotSet};
use crate::set::{ModelSet, Models};
use crate::wire::{Delivery, Want};

/// What one reader was told.
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) joined: u64,
    pub(super) models: Models,
    pub(super) delivery: Delivery,
    /// The record its live word names.
    pub(super) live: Option<u8>,
    /// The records in its queue that it has not taken, oldest first.
    pub(super) queue: VecDeque<u8>,
    /// How many entries it has taken.
    pub(super) head: u64,
    /// What it is to be told once there is room, oldest first; of readers that
    /// want the newest, at most one.
    pub(super) waiting: VecDeque<Waiting>,
    /// The newest sequence number it was told.
    pub(super) told: u64,
    pub(super) asks: Asks,
    /// Nothing more is told to it.
    pub(super) shut: bool,
}

/// What a reader asked for, and what it got.
#[derive(Debug, Default)]
pub(super) struct Asks {
    /// What it cannot have yet, by the number of its question.
    pub(super) wanted: Option<(u64, Want)>,
    /// What it is to be answered once there is room.
    pub(super) owed: Option<(u64, Waiting)>,
    /// What it was answered last: the question, and the record that says it.
    pub(super) answer: Option<(u64, u8)>,
    /// The newest sequence number it was answered with.
    pub(super) told: u64,
    /// The last question whose answer it needs no more.
    pub(super) through: u64,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) sequence: u64,
    pub(super) set: ModelSet,
}

/// Where the steps of one decision go.
pub(super) struct Notifier<'a> {
    /// Of the publication that is told, if it is one.
    pub(super) sequence: u64,
    /// Records that mailboxes or pins held before the first step, or that were
    /// written since.
    pub(super) in_use: SlotSet,
    /// The record of the default set, once there is one.
    pub(super) default: Option<u8>,
    pub(super) steps: &'a mut Vec<Step>,
}

impl<'a> Notifier<'a> {
    pub(super) fn new(in_use: SlotSet, steps: &'a mut Vec<Step>) -> Self {
        Self {
            sequence: 0,
            in_use,
            default: None,
            steps,
        }
    }

    /// The sequence numbers for which a record may have been written that says what
    /// this one does: a publication has new versions, which none says from before.
    fn span(&self, sequence: u64) -> (u64, u64) {
        match sequence == self.sequence {
            true => (sequence, sequence),
            false => (1, sequence),
        }
    }
}

impl Mailbox {
    /// The records it refers to.
    pub(super) fn records(&self) -> SlotSet {
        self.refers().fold(SlotSet::default(), SlotSet::with)
    }

    /// The same, one as often as it does.
    pub(super) fn refers(&self) -> impl Iterator<Item = u8> {
        let answer = self.asks.answer.iter().map(|(_, record)| record);
        let records = self.queue.iter().chain(&self.live).chain(answer);
        records.copied()
    }

    /// What a publication that concerns this reader is for it.
    pub(super) fn publish(
        &mut self,
        worker: WorkerId,
        desired: &Desired,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) -> Disposition {
        if self.shut {
            return Disposition::Shut;
        }
        if desired.held(worker).is_some() {
            return Disposition::Held;
        }
        let sequence = notifier.sequence;
        let own = desired
            .own(worker)
            .map(|own| desired.default_set().with(own));
        let set = own.as_ref().unwrap_or(desired.default_set());
        let disposition = match (self.delivery, &own) {
            (Delivery::Asked, _) => Disposition::Asks,
            (_, None) => self.notify_default(worker, set, records, notifier),
            (_, Some(set)) => self.notify(worker, sequence, set, records, notifier),
        };
        // After it, so that a reader that is answered finds that it is the newest.
        if let Some(question) = self.take_wanted(set) {
            self.answer(worker, (question, sequence), set, records, notifier);
        }
        disposition
    }

    /// The question that this set answers, if one is open.
    pub(super) fn take_wanted(&mut self, set: &ModelSet) -> Option<u64> {
        let mine = self.models;
        let wanted = |(_, want): &mut (u64, Want)| satisfies(set, mine, *want);
        let (question, _) = self.asks.wanted.take_if(wanted)?;
        Some(question)
    }

    /// Answers a question, now or once there is a record for it.
    pub(super) fn answer(
        &mut self,
        worker: WorkerId,
        (question, sequence): (u64, u64),
        set: &ModelSet,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) {
        let span = notifier.span(sequence);
        let Some(record) = records.provide(span, set, &mut notifier.in_use, notifier.steps) else {
            let set = set.only(self.models);
            self.asks.owed = Some((question, Waiting { sequence, set }));
            return;
        };
        self.asks.owed = None;
        records.refer(record);
        let before = self.asks.answer.replace((question, record));
        records.release(before.map(|(_, record)| record));
        self.asks.told = sequence;
        notifier.steps.push(Step::Answer {
            key: (worker, self.joined),
            live: Live { sequence, record },
            question,
        });
    }

    /// Tells the mailbox what goes to all. Nearly always every mailbox goes to the
    /// same record, which is then not looked for again.
    fn notify_default(
        &mut self,
        worker: WorkerId,
        set: &ModelSet,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) -> Disposition {
        let sequence = notifier.sequence;
        if let Some(record) = notifier.default
            && self.has_room()
        {
            self.put(worker, Live { sequence, record }, records, notifier);
            return Disposition::Notified;
        }
        let disposition = self.notify(worker, sequence, set, records, notifier);
        if disposition == Disposition::Notified {
            notifier.default = self.newest_record();
        }
        disposition
    }

    /// Tells the mailbox a set, now or once there is room.
    pub(super) fn notify(
        &mut self,
        worker: WorkerId,
        sequence: u64,
        set: &ModelSet,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) -> Disposition {
        let span = notifier.span(sequence);
        if self.has_room()
            && let Some(record) = records.provide(span, set, &mut notifier.in_use, notifier.steps)
        {
            self.put(worker, Live { sequence, record }, records, notifier);
            return Disposition::Notified;
        }
        match self.delivery {
            // As many again as its queue holds.
            Delivery::Every { bound } if self.waiting.len() >= bound.into() => {
                return Disposition::Full;
            }
            Delivery::Every { .. } => {}
            Delivery::Newest | Delivery::Asked => self.waiting.clear(),
        }
        let set = set.only(self.models);
        self.waiting.push_back(Waiting { sequence, set });
        Disposition::Waiting
    }

    pub(super) fn deliver(
        &mut self,
        worker: WorkerId,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) {
        while self.has_queue_space()
            && let Some(Waiting { sequence, set }) = self.waiting.front()
            && let span = notifier.span(*sequence)
            && let Some(record) = records.provide(span, set, &mut notifier.in_use, notifier.steps)
        {
            let live = Live {
                sequence: *sequence,
                record,
            };
            self.waiting.pop_front();
            self.put(worker, live, records, notifier);
        }
        if let Some((question, Waiting { sequence, set })) = self.asks.owed.take() {
            self.answer(worker, (question, sequence), &set, records, notifier);
        }
    }

    /// Whether it is to be told or answered something once there is room.
    pub(super) fn waits(&self) -> bool {
        self.asks.owed.is_some() || !self.waiting.is_empty()
    }

    /// What it is to be told or answered once there is room.
    pub(super) fn waiting_sets(&self) -> impl Iterator<Item = &ModelSet> {
        let owed = self.asks.owed.iter().map(|(_, owed)| owed);
        self.waiting.iter().chain(owed).map(|waiting| &waiting.set)
    }

    pub(super) fn shut(&mut self, records: &mut Records) {
        records.release(self.refers());
        self.shut = true;
        self.live = None;
        self.queue.clear();
        self.waiting.clear();
        self.asks.wanted = None;
        self.asks.owed = None;
        self.asks.answer = None;
    }

    /// Whether it can be told something at once, and in order.
    fn has_room(&self) -> bool {
        match self.delivery {
            Delivery::Every { .. } => self.waiting.is_empty() && self.has_queue_space(),
            Delivery::Newest | Delivery::Asked => true,
        }
    }

    pub(super) fn lacks_record(&self) -> bool {
        self.asks.owed.is_some() || !self.waiting.is_empty() && self.has_queue_space()
    }

    fn has_queue_space(&self) -> bool {
        match self.delivery {
            Delivery::Every { bound } => self.queue.len() < bound.into(),
            Delivery::Newest | Delivery::Asked => true,
        }
    }

    fn put(
        &mut self,
        worker: WorkerId,
        live: Live,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) {
        let key = (worker, self.joined);
        self.told = live.sequence;
        records.refer(live.record);
        match self.delivery {
            Delivery::Every { .. } => {
                self.queue.push_back(live.record);
                notifier.steps.push(Step::Push { key, live });
            }
            Delivery::Newest | Delivery::Asked => {
                // A newer set stands for one that still waits.
                self.waiting
                    .retain(|waiting| waiting.sequence > live.sequence);
                records.release(self.live.replace(live.record));
                notifier.steps.push(Step::Flip { key, live });
            }
        }
    }

    /// The record it was put on last.
    fn newest_record(&self) -> Option<u8> {
        self.queue.back().copied().or(self.live)
    }
}

/// Whether a set, as far as the reader is given it, is what it wants.
pub(super) fn satisfies(set: &ModelSet, mine: Models, want: Want) -> bool {
    let version = |model| {
        set.entry(model)
            .map_or(Version::NONE, |entry| entry.version)
    };
    match want {
        Want::Newest => !set.models().and(mine).is_empty(),
        Want::AtLeast {
            model,
            version: least,
        } => version(model) >= least,
        Want::Exactly {
            model,
            version: exact,
        } => version(model) == exact,
    }
}
