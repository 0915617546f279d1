//! One reader's mailbox: the sets that the reader was notified of, and those that wait for
//! room.

use std::collections::VecDeque;

use weightsync_core::{Version, WorkerId};

use super::desired::Desired;
use super::records::Records;
use super::{Disposition, PageChange};
use crate::protocol::{Live, SlotSet};
use crate::set::{ModelMask, ModelSet};
use crate::wire::{Delivery, Want};

/// One reader's mailbox.
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) joined: u64,
    pub(super) models: ModelMask,
    pub(super) delivery: Delivery,
    /// The record that its live word names.
    pub(super) live: Option<u8>,
    /// The records in its queue that the reader has not taken, oldest first.
    pub(super) queue: VecDeque<u8>,
    /// How many queue entries the reader has taken.
    pub(super) head: u64,
    /// The sets that wait for room in the mailbox, oldest first; at most one for a reader that
    /// wants only the newest.
    pub(super) waiting: VecDeque<WaitingSet>,
    /// The newest sequence number that the reader was notified of.
    pub(super) notified: u64,
    pub(super) asks: QuestionState,
    /// The reader is not notified of anything more.
    pub(super) shut: bool,
}

/// A reader's question, and its answer.
#[derive(Debug, Default)]
pub(super) struct QuestionState {
    /// The open question and its number, if no answer exists yet.
    pub(super) wanted: Option<(u64, Want)>,
    /// The question and its answer, which waits for a free record.
    pub(super) owed: Option<(u64, WaitingSet)>,
    /// The last answered question, and the record that holds the answer.
    pub(super) answer: Option<(u64, u8)>,
    /// The newest sequence number of an answer.
    pub(super) notified: u64,
    /// The last question whose answer the reader no longer needs.
    pub(super) through: u64,
}

#[derive(Debug)]
pub(super) struct WaitingSet {
    pub(super) sequence: u64,
    pub(super) set: ModelSet,
}

/// Collects the steps of one decision.
pub(super) struct Notifier<'a> {
    /// The sequence number of the publication, if the decision is one.
    pub(super) sequence: u64,
    /// Records that mailboxes or pins held before the first step, or that a step has written.
    pub(super) in_use: SlotSet,
    /// The record of the default set, once it exists.
    pub(super) default: Option<u8>,
    pub(super) steps: &'a mut Vec<PageChange>,
}

impl<'a> Notifier<'a> {
    pub(super) fn new(in_use: SlotSet, steps: &'a mut Vec<PageChange>) -> Self {
        Self {
            sequence: 0,
            in_use,
            default: None,
            steps,
        }
    }

    /// The sequence numbers of records that may already hold this set. A publication has new
    /// versions, so no earlier record can hold it.
    fn span(&self, sequence: u64) -> (u64, u64) {
        match sequence == self.sequence {
            true => (sequence, sequence),
            false => (1, sequence),
        }
    }
}

impl Mailbox {
    /// The records that the mailbox refers to.
    pub(super) fn records(&self) -> SlotSet {
        self.refers().fold(SlotSet::default(), SlotSet::with)
    }

    /// The same, each as often as the mailbox refers to it.
    pub(super) fn refers(&self) -> impl Iterator<Item = u8> {
        let answer = self.asks.answer.iter().map(|(_, record)| record);
        let records = self.queue.iter().chain(&self.live).chain(answer);
        records.copied()
    }

    /// Decides what a publication means for this reader.
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
        // A held reader gets nothing now, not even an answer: `release` makes up for both.
        if desired.held(worker).is_some() {
            return Disposition::Held;
        }
        let sequence = notifier.sequence;
        // The worker's own set replaces only the models that it was sent alone.
        let own = desired
            .own(worker)
            .map(|own| desired.default_set().with(own));
        let set = own.as_ref().unwrap_or(desired.default_set());
        let disposition = match (self.delivery, &own) {
            (Delivery::Asked, _) => Disposition::Asks,
            (_, None) => self.notify_default(worker, set, records, notifier),
            (_, Some(set)) => self.notify(worker, sequence, set, records, notifier),
        };
        // After the notification, so that the reader finds that the answer is also the newest set.
        if let Some(question) = self.take_wanted(set) {
            self.answer(worker, (question, sequence), set, records, notifier);
        }
        disposition
    }

    /// Takes the open question if this set answers it.
    pub(super) fn take_wanted(&mut self, set: &ModelSet) -> Option<u64> {
        let mine = self.models;
        let wanted = |(_, want): &mut (u64, Want)| satisfies(set, mine, *want);
        let (question, _) = self.asks.wanted.take_if(wanted)?;
        Some(question)
    }

    /// Answers a question, now or once a record is free.
    pub(super) fn answer(
        &mut self,
        worker: WorkerId,
        (question, sequence): (u64, u64),
        set: &ModelSet,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) {
        let span = notifier.span(sequence);
        // No record is free: the answer waits, and `deliver` places it. Models that this reader
        // does not take are dropped, because a waiting set keeps its slots.
        let Some(record) = records.provide(span, set, &mut notifier.in_use, notifier.steps) else {
            let set = set.only(self.models);
            self.asks.owed = Some((question, WaitingSet { sequence, set }));
            return;
        };
        self.asks.owed = None;
        records.refer(record);
        // The reader may have pinned the record of the earlier answer. The notifier keeps it
        // `in_use`, so this decision does not write it.
        let before = self.asks.answer.replace((question, record));
        records.release(before.map(|(_, record)| record));
        self.asks.notified = sequence;
        notifier.steps.push(PageChange::Answer {
            key: (worker, self.joined),
            live: Live { sequence, record },
            question,
        });
    }

    /// Notifies the reader of the default set. Nearly every mailbox goes to the same record, so the
    /// record is looked up only once.
    fn notify_default(
        &mut self,
        worker: WorkerId,
        set: &ModelSet,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) -> Disposition {
        let sequence = notifier.sequence;
        // The default set's record is written once. All mailboxes with room name it, whatever their
        // number.
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

    /// Notifies the reader of a set, now or once there is room.
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
            // As many sets may wait as fit in the queue.
            Delivery::Every { bound } if self.waiting.len() >= bound.into() => {
                return Disposition::Full;
            }
            Delivery::Every { .. } => {}
            // A reader of the newest set needs none that waited before.
            Delivery::Newest | Delivery::Asked => self.waiting.clear(),
        }
        let set = set.only(self.models);
        self.waiting.push_back(WaitingSet { sequence, set });
        Disposition::Waiting
    }

    pub(super) fn deliver(
        &mut self,
        worker: WorkerId,
        records: &mut Records,
        notifier: &mut Notifier<'_>,
    ) {
        // A set waits for queue space or for a record, and needs both.
        while self.has_queue_space()
            && let Some(WaitingSet { sequence, set }) = self.waiting.front()
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
        // If there is still no record, `answer` puts it back.
        if let Some((question, WaitingSet { sequence, set })) = self.asks.owed.take() {
            self.answer(worker, (question, sequence), &set, records, notifier);
        }
    }

    /// Whether a notification or an answer waits for room.
    pub(super) fn waits(&self) -> bool {
        self.asks.owed.is_some() || !self.waiting.is_empty()
    }

    /// The notifications and answers that wait for room.
    pub(super) fn waiting_sets(&self) -> impl Iterator<Item = &ModelSet> {
        let owed = self.asks.owed.iter().map(|(_, owed)| owed);
        self.waiting.iter().chain(owed).map(|waiting| &waiting.set)
    }

    pub(super) fn shut(&mut self, records: &mut Records) {
        // The records are free to be written from here on. That is why the caller must clear the
        // page's words before it releases the lock (`Removed`).
        records.release(self.refers());
        self.shut = true;
        self.live = None;
        self.queue.clear();
        self.waiting.clear();
        self.asks.wanted = None;
        self.asks.owed = None;
        self.asks.answer = None;
    }

    /// Whether the reader can be notified now without breaking the order.
    fn has_room(&self) -> bool {
        match self.delivery {
            // A set that waits must not be overtaken by a newer one.
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
        self.notified = live.sequence;
        records.refer(live.record);
        match self.delivery {
            Delivery::Every { .. } => {
                // Held without a pin: what lies between head and tail is the reader's.
                self.queue.push_back(live.record);
                notifier.steps.push(PageChange::Push { key, live });
            }
            Delivery::Newest | Delivery::Asked => {
                // A newer set replaces one that still waits.
                self.waiting
                    .retain(|waiting| waiting.sequence > live.sequence);
                // The reader may have pinned the record that the word leaves. The notifier keeps it
                // `in_use` until this decision ends, and the next one looks for pins first.
                records.release(self.live.replace(live.record));
                notifier.steps.push(PageChange::Flip { key, live });
            }
        }
    }

    /// The record of the last notification.
    fn newest_record(&self) -> Option<u8> {
        self.queue.back().copied().or(self.live)
    }
}

/// Whether a set, reduced to the reader's models, satisfies its question.
pub(super) fn satisfies(set: &ModelSet, mine: ModelMask, want: Want) -> bool {
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
