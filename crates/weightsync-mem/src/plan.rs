//! The sender's decisions: which set each worker is to run, which record names it, and what may
//! be written again.
//!
//! **Guarantee.** The input and the output are plain values; there is no shared memory and no
//! waiting here. [`Plan`] remembers what every worker should run and what every mailbox names.
//! Its methods return the [`Step`]s that bring the shared pages to that state. The caller takes
//! the steps in order, under the same lock.
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

/// Which reader: the worker, and the how-manieth to join. A worker that closed
/// its end but still holds snapshots stays in the registry next to its successor;
/// here there is one mailbox per worker, its newest reader's.
pub(crate) type Key = (WorkerId, u64);

/// To whom a publication goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// Every worker, also those that join later.
    All,
    /// These workers and no other, connected or not.
    Workers(Vec<WorkerId>),
}

/// One change to the shared pages. They are taken in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Write this set record with what [`Plan::record`] says.
    Write { record: u8 },
    /// Swap the mailbox's live word.
    Flip { key: Key, live: Live },
    /// Push on the mailbox's queue. There is room.
    Push { key: Key, live: Live },
    /// Swap the mailbox's word for answers, and say which question it answers.
    Answer { key: Key, live: Live, question: u64 },
    /// Clear the mailbox's word for answers.
    Clear { key: Key },
}

/// What a publication is for one connected reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disposition {
    /// A step puts its mailbox there.
    Notified,
    /// Its queue has no room, or no record is free: a later [`Plan::deliver`]
    /// puts it there, unless [`Plan::give_up`] comes first.
    Waiting,
    /// Its queue has no room, and as many publications wait already: it will
    /// not get this one automatically.
    Full,
    /// It is held: it gets the newest when it is released.
    Held,
    /// It gets what it asks for and nothing else. This may be the answer to an
    /// open question, but nobody waits for that: the one who asked may have given
    /// up meanwhile.
    Asks,
    /// It can use nothing, so it gets nothing.
    Shut,
}

/// The plan keeps this mailbox no more. The words of the mailbox's page still name records and
/// slots, which may be written again from now on, so the page has to follow before the
/// lock is released: `Reader::take_down` sees to it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the mailbox's words still name what may be written again: `Reader::take_down` clears them"]
pub(crate) struct Removed(());

/// A decided publication.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published {
    /// Its sequence number: a mailbox that has taken this or a later one has taken it.
    pub(crate) sequence: u64,
    /// The version each model got.
    pub(crate) versions: Vec<(usize, Version)>,
    /// What it is for each connected reader that it is for.
    pub(crate) dispositions: Vec<(Key, Disposition)>,
    /// Workers that were named but are not connected.
    pub(crate) absent: Vec<WorkerId>,
}

/// Why a publication is refused: after it, no slot of this model would be left
/// to write the next version into. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Crowded {
    pub(crate) model: usize,
}

/// Where the next version of a model can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lend {
    /// In this slot, which is lent now.
    Slot(u8),
    /// In a new slot: make one, hand it out, call [`Plan::grown`], and ask again.
    /// Unless it is `needed`, only pins are in the way, and may soon be gone.
    Grow { needed: bool },
    /// Nowhere until a slot comes free.
    Wait,
}

/// What becomes of an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The steps answer it, or there is no record for the answer yet.
    Notified,
    /// It will be answered when there is such a version.
    Later,
    /// There is no such version for this reader; the newest there are.
    Unknown { known: Vec<Version> },
    /// The reader was not given this model, or takes every version and so has
    /// nothing to ask for.
    NotAllowed,
    /// There is no such mailbox, or it is shut.
    Gone,
}

/// What all workers should run, and what their mailboxes say.
#[derive(Debug)]
pub(crate) struct Plan {
    models: Vec<Model>,
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
struct Model {
    slots: u8,
    /// Being written.
    lent: SlotSet,
    /// What each slot was last published with.
    versions: [Version; MAX_SLOTS],
    /// The newest version published.
    version: Version,
    /// The number its next version is to have, if that was said.
    numbered: Option<Version>,
}

impl Plan {
    /// The plan of a segment with a model for each of these numbers of slots, that
    /// keeps `history` earlier sets besides the newest.
    pub(crate) fn new(slots: impl IntoIterator<Item = usize>, history: u8) -> Self {
        let model = |slots| Model {
            slots: slots as u8,
            lent: SlotSet::default(),
            numbered: None,
            versions: [Version::NONE; MAX_SLOTS],
            version: Version::NONE,
        };
        Self {
            models: slots.into_iter().map(model).collect(),
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
    /// The same with so few records.
    pub(crate) fn with_records(mut self, count: u8) -> Self {
        self.records.keep(count);
        self
    }
}

/// Holding.
impl Plan {
    /// Holds workers, connected or not, at what they should run now.
    pub(crate) fn hold(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            self.desired.hold(*worker);
        }
    }

    /// Holds them no more. The mailboxes for which something was published meanwhile
    /// go to the newest at once.
    pub(crate) fn release(
        &mut self,
        workers: &[WorkerId],
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
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
            let news = set.only(mailbox.models) != was.only(mailbox.models);
            if !news {
                continue;
            }
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

/// Looking.
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

    /// The newest that was sent to all.
    pub(crate) fn default_set(&self) -> &ModelSet {
        self.desired.default_set()
    }

    /// What a worker should run once it is not held, connected or not.
    pub(crate) fn if_released(&self, worker: WorkerId) -> ModelSet {
        self.desired.if_released(worker)
    }

    /// The slot of exactly this version, while anything refers to it.
    pub(crate) fn find(&self, model: usize, version: Version) -> Option<u8> {
        let told = || {
            let slots = self.told(model);
            slots
                .iter()
                .find(|&slot| self.version_in(model, slot) == version)
        };
        self.desired.find(model, version).or_else(told)
    }

    /// The versions of a model that [`find`](Self::find) finds, newest first.
    pub(crate) fn kept(&self, model: usize) -> Vec<Version> {
        let slots = self.desired.slots(model).union(self.told(model));
        let mut kept: Vec<_> = slots
            .iter()
            .map(|slot| self.version_in(model, slot))
            .collect();
        kept.sort_unstable_by(|a, b| b.cmp(a));
        kept
    }

    /// What a set record is to say.
    pub(crate) fn record(&self, record: u8) -> SetRecord {
        self.records.record(record)
    }

    /// The set that it says.
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

    /// The slots of a model that this reader's mailbox refers to, for saying who
    /// holds what.
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
    fn told(&self, model: usize) -> SlotSet {
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
        let mailbox = self.mailboxes.get_mut(&worker);
        mailbox.filter(|mailbox| mailbox.joined == joined)
    }

    /// Where the steps of one decision go. Made before the first of them: the
    /// pins were looked for while the mailboxes were where they are now, so a record
    /// that a mailbox is taken off may be pinned by now, and stays in use to the end
    /// of the decision.
    fn notifier<'a>(&self, record_pins: SlotSet, steps: &'a mut Vec<Step>) -> Notifier<'a> {
        Notifier::new(self.records.referenced().union(record_pins), steps)
    }

    /// Points one mailbox at a set, by a record that is newer than what it was told.
    /// Where no more may wait, it takes the place of the last that does: a reader
    /// of every version would else stay behind the newest for good.
    fn point(&mut self, worker: WorkerId, set: &ModelSet, notifier: &mut Notifier<'_>) {
        let Some(mailbox) = self.mailboxes.get_mut(&worker) else {
            return;
        };
        mailbox.deliver(worker, &mut self.records, notifier);
        let after = mailbox
            .waiting
            .back()
            .map_or(mailbox.told, |last| last.sequence);
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

    /// Answers a question, by a record that is newer than the answer before.
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
        let sequence = self
            .records
            .newer(mailbox.asks.told, set)
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

    /// What is counted is what the mailboxes say.
    #[cfg(test)]
    pub(crate) fn check_counts(&self) {
        let mailboxes = self.mailboxes.values();
        let told = mailboxes.fold(SlotSet::default(), |all, mailbox| {
            all.union(mailbox.records())
        });
        assert_eq!(self.records.referenced(), told);
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
