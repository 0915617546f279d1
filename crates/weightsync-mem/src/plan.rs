//! The sender's decisions: which set each worker is to run, which record names it, and what may
//! be written again.
//!
//! **Guarantee.** The input and the output are plain values; there is no shared memory and no
//! waiting here. [`Plan`] remembers what every worker should run and what every mailbox names.
//! Its methods return the [`PageChange`]s that bring the shared pages to that state. The caller
//! takes the steps in order, under the same lock.
//!
//! * A slot or record that anything refers to is never given out.
//! * Each step puts a mailbox on a whole set: all models of a publication or none.
//! * A worker that a publication does not name keeps its set. A worker that joins gets the
//!   newest set that is for it.
//! * A model gets no more slots than its options and the workers' sets ask for.

mod desired;
mod mailbox;
mod publishing;
mod readers;
mod records;

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::{Version, WorkerId};

use self::desired::Desired;
use self::mailbox::{Mailbox, Notifier};
use self::records::Records;
use crate::protocol::{Live, MAX_SLOTS, SlotSet};
use crate::set::{ModelSet, SetRecord};
use crate::wire::Delivery;

/// A reader: its worker, and its place in the order of joining. A worker that closed its end but
/// still holds snapshots stays in the registry next to its successor. The plan has one mailbox for
/// each worker, that of its newest reader.
pub(crate) type Key = (WorkerId, u64);

/// One change of the shared pages. The caller makes the changes in the given order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageChange {
    /// Write this set record with the content of [`Plan::record`].
    Write { record: u8 },
    /// Swap the mailbox's live word.
    Flip { key: Key, live: Live },
    /// Push onto the mailbox's queue, which has room.
    Push { key: Key, live: Live },
    /// Swap the mailbox's answer word, and name the question that it answers.
    Answer { key: Key, live: Live, question: u64 },
    /// Clear the mailbox's answer word.
    Clear { key: Key },
}

/// The effect of a publication on one connected reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disposition {
    /// A step puts its mailbox on the set.
    Notified,
    /// Its queue has no room, or no record is free. A later [`Plan::deliver`] notifies it, unless
    /// [`Plan::give_up`] comes first.
    Waiting,
    /// Its queue is full, and so is the list of publications that wait for it: the reader will not
    /// get this one.
    Full,
    /// The reader is held: it gets the newest set when it is released.
    Held,
    /// The reader gets only what it asks for. The publication may answer its question, but a send
    /// does not wait for that: the reader may have given up meanwhile.
    Asks,
    /// The reader can use nothing, so it gets nothing.
    Shut,
}

/// The plan has removed this mailbox. Its page still names records and slots, which may be written
/// again from now on. So `Reader::take_down` must clear the page before the lock is released.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the mailbox's words still name what may be written again: `Reader::take_down` clears them"]
pub(crate) struct Removed(());

/// A decided publication.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PublicationPlan {
    /// The sequence number. A mailbox that has taken this number or a later one has taken the
    /// publication.
    pub(crate) sequence: u64,
    /// The version of each model.
    pub(crate) versions: Vec<(usize, Version)>,
    /// The effect on each connected reader that the publication is for.
    pub(crate) dispositions: Vec<(Key, Disposition)>,
    /// Named workers that are not connected.
    pub(crate) absent: Vec<WorkerId>,
}

/// The publication is refused: it would leave no slot of this model for the next version. Nothing
/// has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotsExhausted {
    pub(crate) model: usize,
}

/// Where the next version of a model can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lend {
    /// In this slot, which is now lent.
    Slot(u8),
    /// In a new slot: make it, hand it out, call [`Plan::grown`], and ask again. If the slot is not
    /// `needed`, only pins are in the way, and they may soon be gone.
    Grow { needed: bool },
    /// Nowhere until a slot comes free.
    Wait,
}

/// The outcome of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The steps answer it, or the answer waits for a free record.
    Notified,
    /// The question is answered once there is such a version.
    Later,
    /// The reader has no such version; these exist.
    Unknown { known: Vec<Version> },
    /// The reader was not given this model, or takes every version, so that it has nothing to ask
    /// for.
    NotAllowed,
    /// The mailbox does not exist, or is shut.
    Gone,
}

/// What all workers should run, and what their mailboxes say.
#[derive(Debug)]
pub(crate) struct Plan {
    models: Vec<ModelSlots>,
    /// The last sequence number given out.
    sequence: u64,
    desired: Desired,
    records: Records,
    mailboxes: BTreeMap<WorkerId, Mailbox>,
    /// The workers whose mailboxes wait for room.
    waiting: BTreeSet<WorkerId>,
}

/// One model's slots.
#[derive(Debug)]
struct ModelSlots {
    slots: u8,
    /// Slots that are being written.
    lent: SlotSet,
    /// The version last published in each slot.
    versions: [Version; MAX_SLOTS],
    /// The newest version published.
    version: Version,
    /// The number for the next version, if it was set.
    numbered: Option<Version>,
}

impl Plan {
    /// The plan of a segment whose models have these numbers of slots. It keeps `history` earlier
    /// sets besides the newest.
    pub(crate) fn new(slots: impl IntoIterator<Item = usize>, history: u8) -> Self {
        let model = |slots| ModelSlots {
            // At most 64: the caller has checked the options.
            slots: slots as u8,
            lent: SlotSet::default(),
            numbered: None,
            versions: [Version::NONE; MAX_SLOTS],
            version: Version::NONE,
        };
        Self {
            models: slots.into_iter().map(model).collect(),
            // 0 is the state of a mailbox before its first set, so the first step is 1.
            sequence: 0,
            desired: Desired::new(history.into()),
            records: Records::new(),
            mailboxes: BTreeMap::new(),
            waiting: BTreeSet::new(),
        }
    }
}

#[cfg(loom)]
impl Plan {
    /// The same with few records.
    pub(crate) fn with_records(mut self, count: u8) -> Self {
        self.records.keep(count);
        self
    }
}

/// Holds.
impl Plan {
    /// Holds workers, connected or not, at the set that they should run now.
    pub(crate) fn hold(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            self.desired.hold(*worker);
        }
    }

    /// Ends the holds. Mailboxes that missed a publication go to the newest set at once.
    pub(crate) fn release(
        &mut self,
        workers: &[WorkerId],
        record_pins: SlotSet,
        steps: &mut Vec<PageChange>,
    ) {
        let mut notifier = self.notifier(record_pins, steps);
        for worker in workers {
            let Some(was) = self.desired.release(*worker) else {
                continue;
            };
            let Some(mailbox) = self
                .mailboxes
                .get_mut(worker)
                .filter(|mailbox| !mailbox.shut)
            else {
                continue;
            };
            let set = self.desired.for_worker(*worker);
            // Publications of other models meanwhile are no news for this reader.
            let news = set.only(mailbox.models) != was.only(mailbox.models);
            if !news {
                continue;
            }
            // The question is taken first, because `point` borrows the whole plan; it is answered
            // last, so that the reader finds that the answer is also its newest set.
            // A reader that only asks has no set in its mailbox: only its answer moves.
            let (pushed, question) = (
                mailbox.delivery != Delivery::Asked,
                mailbox.take_wanted(&set),
            );
            if pushed {
                self.point(*worker, &set, &mut notifier);
            }
            if let Some(question) = question {
                self.answer(*worker, question, &set, &mut notifier);
            }
        }
    }

    pub(crate) fn is_held(&self, worker: WorkerId) -> bool {
        self.desired.held(worker).is_some()
    }
}

/// Queries.
impl Plan {
    /// The newest version of a model that was published to any worker.
    pub(crate) fn version(&self, model: usize) -> Version {
        self.models[model].version
    }

    /// How many slots a model has.
    pub(crate) fn slots(&self, model: usize) -> u8 {
        self.models[model].slots
    }

    /// The last sequence number given out.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The newest set that was sent to all.
    pub(crate) fn default_set(&self) -> &ModelSet {
        self.desired.default_set()
    }

    /// The set that a worker, connected or not, should run once it is not held.
    pub(crate) fn if_released(&self, worker: WorkerId) -> ModelSet {
        self.desired.if_released(worker)
    }

    /// The slot of exactly this version, while anything refers to it.
    pub(crate) fn find(&self, model: usize, version: Version) -> Option<u8> {
        let notified = || {
            let slots = self.notified(model);
            slots
                .iter()
                .find(|&slot| self.version_in(model, slot) == version)
        };
        // A mailbox may still be on a version that its worker should no longer run.
        self.desired.find(model, version).or_else(notified)
    }

    /// The versions of a model that [`find`](Self::find) finds, newest first.
    pub(crate) fn kept(&self, model: usize) -> Vec<Version> {
        let slots = self.desired.slots(model).union(self.notified(model));
        let mut kept: Vec<_> = slots
            .iter()
            .map(|slot| self.version_in(model, slot))
            .collect();
        kept.sort_unstable_by(|a, b| b.cmp(a));
        kept
    }

    /// The content of a set record.
    pub(crate) fn record(&self, record: u8) -> SetRecord {
        self.records.record(record)
    }

    /// The set in a record.
    pub(crate) fn set(&self, record: u8) -> &ModelSet {
        self.records.set(record)
    }

    /// The version a slot was last published with.
    pub(crate) fn version_in(&self, model: usize, slot: u8) -> Version {
        self.models[model].versions[usize::from(slot)]
    }

    /// The slots of a model that these records refer to.
    pub(crate) fn slots_of(&self, records: SlotSet, model: usize) -> SlotSet {
        let sets = records.iter().map(|record| self.records.set(record));
        slots_in(sets, model)
    }

    /// The slots of a model that this reader's mailbox refers to, to name the holders of slots.
    pub(crate) fn mailbox_slots(&self, key: Key, model: usize) -> SlotSet {
        let mailbox = self
            .mailbox(key)
            .filter(|mailbox| mailbox.models.contains(model));
        let waiting = mailbox.map(|mailbox| slots_in(mailbox.waiting_sets(), model));
        let named = self.named_slots(key, model);
        named.union(waiting.unwrap_or_default())
    }

    /// The slots of a model that this reader's mailbox names in the shared pages.
    pub(crate) fn named_slots(&self, key: Key, model: usize) -> SlotSet {
        let mailbox = self
            .mailbox(key)
            .filter(|mailbox| mailbox.models.contains(model));
        let records = mailbox.map(Mailbox::records).unwrap_or_default();
        self.slots_of(records, model)
    }

    /// The records that this reader's mailbox names there.
    pub(crate) fn named_records(&self, key: Key) -> SlotSet {
        self.mailbox(key).map(Mailbox::records).unwrap_or_default()
    }

    /// The slots of a model that mailboxes refer to.
    fn notified(&self, model: usize) -> SlotSet {
        let mailboxes = self.mailboxes.values();
        let mailboxes = mailboxes.filter(|mailbox| mailbox.models.contains(model));
        let records = mailboxes.fold(SlotSet::default(), |all, mailbox| {
            all.union(mailbox.records())
        });
        self.slots_of(records, model)
    }

    fn mailbox(&self, (worker, joined): Key) -> Option<&Mailbox> {
        self.mailboxes
            .get(&worker)
            .filter(|mailbox| mailbox.joined == joined)
    }

    fn mailbox_mut(&mut self, (worker, joined): Key) -> Option<&mut Mailbox> {
        // A reader that closed its end keeps its place in the registry while its snapshots live. By
        // then the mailbox of that number may be its successor's.
        let mailbox = self.mailboxes.get_mut(&worker);
        mailbox.filter(|mailbox| mailbox.joined == joined)
    }

    /// Collects the steps of one decision; made before the first of them. The caller looked for
    /// pins while the mailboxes were on their current records. So a record that a mailbox leaves
    /// may be pinned by now, and stays in use until the decision ends.
    fn notifier<'a>(&self, record_pins: SlotSet, steps: &'a mut Vec<PageChange>) -> Notifier<'a> {
        Notifier::new(self.records.referenced().union(record_pins), steps)
    }

    /// Points one mailbox at a set, with a record newer than its last notification. If no more sets
    /// may wait, the set replaces the last one that waits. A reader of every version would
    /// otherwise stay behind the newest for good.
    fn point(&mut self, worker: WorkerId, set: &ModelSet, notifier: &mut Notifier<'_>) {
        let Some(mailbox) = self.mailboxes.get_mut(&worker) else {
            return;
        };
        // Sets that wait come first: a reader of every version gets them in order.
        mailbox.deliver(worker, &mut self.records, notifier);
        // The mailbox's numbers only grow, also past the sets that still wait.
        let after = mailbox
            .waiting
            .back()
            .map_or(mailbox.notified, |last| last.sequence);
        // A newer record of this set lends its number. Otherwise the set gets a new number, under
        // which the mailbox may still name an older record of the same set.
        let sequence = self.records.newer(after, set).unwrap_or_else(|| {
            self.sequence += 1;
            self.sequence
        });
        if mailbox.notify(worker, sequence, set, &mut self.records, notifier) == Disposition::Full {
            mailbox.waiting.pop_back();
            mailbox.notify(worker, sequence, set, &mut self.records, notifier);
        }
        self.note(worker);
    }

    /// Answers a question, with a record newer than the earlier answer.
    fn answer(
        &mut self,
        worker: WorkerId,
        question: u64,
        set: &ModelSet,
        notifier: &mut Notifier<'_>,
    ) {
        let Some(mailbox) = self.mailboxes.get_mut(&worker) else {
            return;
        };
        // The answer's word has numbers of its own, which only grow as well.
        let sequence = self
            .records
            .newer(mailbox.asks.notified, set)
            .unwrap_or_else(|| {
                self.sequence += 1;
                self.sequence
            });
        mailbox.answer(
            worker,
            (question, sequence),
            set,
            &mut self.records,
            notifier,
        );
        self.note(worker);
    }

    /// The counts must match the mailboxes.
    #[cfg(test)]
    pub(crate) fn check_counts(&self) {
        let mailboxes = self.mailboxes.values();
        let notified = mailboxes.fold(SlotSet::default(), |all, mailbox| {
            all.union(mailbox.records())
        });
        assert_eq!(self.records.referenced(), notified);
        let waiting = self.mailboxes.iter().filter(|(_, mailbox)| mailbox.waits());
        let waiting: BTreeSet<_> = waiting.map(|(worker, _)| *worker).collect();
        assert_eq!(self.waiting, waiting);
    }
}

fn slots_in<'a>(sets: impl Iterator<Item = &'a ModelSet>, model: usize) -> SlotSet {
    let entries = sets.filter_map(|set| set.entry(model));
    entries.fold(SlotSet::default(), |all, entry| all.with(entry.slot))
}

#[cfg(all(test, not(loom)))]
mod tests;
