//! Reads one reader's page for the sender, and decides how much of it counts.
//!
//! **Guarantee.** Every record and every data slot that the reader may be reading counts as
//! held. Nothing else does, whatever the page says: the reader alone writes the page, and its
//! process may be broken or hostile. A claim in the page counts only if the reader's mailbox
//! has named that slot or record. A page that the page of a working reader can never equal is a
//! [`Breach`]: the sender rejects that reader, and from then on none of its record pins counts.
//!
//! **Why no working reader is in breach.** A reader pins the record that its mailbox's live
//! word or its answer names. It pins the data slots of that set, and gives the record back
//! before it looks for another. So it pins one record at most. The mailbox named each of its
//! data slots, in one of two ways. If it did so since the last look at the slots,
//! [`Claims::note_named`] was called. If it did so before, then at that look the mailbox or the
//! pinned record named the slot, or its data pin was already set. All of these stay claimed.
//!
//! As in [`protocol`](crate::protocol), the head and the record pins are read before the data
//! pins. Loom runs this code together with real readers (`protocol/loom_tests.rs`).

use std::fmt;

use crate::plan::{Key, Plan};
use crate::protocol::{PinWord, QueueHead, SlotSet};
use crate::set::{ModelMask, ModelSet};

/// The words of a reader's page that say what it holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a> {
    pub(crate) head: &'a QueueHead,
    pub(crate) records: &'a PinWord,
    /// By model.
    pub(crate) pins: &'a [PinWord],
}

/// What one reader may claim to hold.
#[derive(Debug)]
pub(crate) struct Claims {
    models: ModelMask,
    /// The records of its record word at the last reading, as far as they count.
    records: SlotSet,
    /// The records that its mailbox has named, and that it may have pinned since.
    named: SlotSet,
    /// For each model, the slots that its mailbox has named, and that it may have pinned since.
    slots: Vec<SlotSet>,
    breach: Option<Breach>,
}

/// A claim that no working reader's page makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Breach {
    /// The reader claims so many set records at once.
    Records(usize),
    /// The reader claims data slots of this model that its mailbox never named.
    Slots(usize),
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Records(count) => write!(
                f,
                "its control page says that it holds {count} set records, where a worker \
                 holds at most one"
            ),
            Self::Slots(model) => write!(
                f,
                "its control page says that it holds slots of model {model} that it was never given"
            ),
        }?;
        f.write_str("; other code in its process has overwritten that page: restart it")
    }
}

impl Claims {
    /// The claims of a reader of these models, before its first notification.
    pub(crate) fn new(models: ModelMask) -> Self {
        // Indexed by model, and no longer than the reader's last model: a sender may have 4096
        // readers.
        let rows = models.iter().last().map_or(0, |last| last + 1);
        Self {
            models,
            records: SlotSet::default(),
            named: SlotSet::default(),
            slots: vec![SlotSet::default(); rows],
            breach: None,
        }
    }

    /// Notes that the mailbox is about to name a record with this set.
    pub(crate) fn note_named(&mut self, record: u8, set: &ModelSet) {
        self.named = self.named.with(record);
        for model in set.models().and(self.models).iter() {
            if let Some(entry) = set.entry(model) {
                self.slots[model] = self.slots[model].with(entry.slot);
            }
        }
    }

    /// The records that the reader held at the last reading.
    pub(crate) fn records(&self) -> SlotSet {
        self.records
    }

    /// Those of these slots of a model that count as held.
    pub(crate) fn of(&self, model: usize, held: SlotSet) -> SlotSet {
        held.and(self.slots.get(model).copied().unwrap_or_default())
    }

    /// The first breach of the reader, if any.
    pub(crate) fn breach(&self) -> Option<Breach> {
        self.breach
    }

    /// Notes its record word. `named` are the records that its mailbox names now. A pin on a record
    /// that was never named does not count: the reader only announced it, and will find that the
    /// mailbox has moved on.
    pub(crate) fn observe(&mut self, held: SlotSet, named: SlotSet) -> SlotSet {
        // A working reader gives its record back before it announces another.
        if held.len() > 1 {
            self.breach.get_or_insert(Breach::Records(held.len()));
        }
        // A page in breach may claim all records, and nobody could be notified any more. Its data
        // pins still count, because its process may be reading those slots.
        self.records = match self.breach {
            None => held.and(self.named),
            Some(_) => SlotSet::default(),
        };
        // A record that is neither held nor named any more cannot be pinned later: the reader's
        // re-check finds that the mailbox has moved.
        self.named = self.records.union(named);
        self.records
    }

    /// Notes its data pins of a model, after its record word. `named` are the slots that its
    /// mailbox and its pinned record name now.
    pub(crate) fn pinned(&mut self, model: usize, held: SlotSet, named: SlotSet) -> SlotSet {
        let counted = self.of(model, held);
        // The mailbox never named these slots, so no working reader can have their numbers.
        if counted != held {
            self.breach.get_or_insert(Breach::Slots(model));
        }
        if self.models.contains(model) {
            // A slot that the reader has released, and that nothing names any more, is not claimed
            // from here on.
            self.slots[model] = counted.union(named);
        }
        counted
    }
}

/// Notes a reader's page in the plan; returns the records that it pins. The caller asks for the
/// data pins after this.
///
/// `through` is the last question whose answer the reader no longer needs. `None` for a reader
/// without a queue or questions: nothing that it does changes its mailbox.
pub(crate) fn observe(
    plan: &mut Plan,
    key: Key,
    words: Words<'_>,
    through: Option<u64>,
    claims: &mut Claims,
) -> SlotSet {
    // The head comes before the pins. If an entry was taken, its slots are in the data pins by now,
    // and those are read later. The entry then no longer counts as named.
    if let Some(through) = through {
        plan.observe(key, words.head.load(), through);
    }
    claims.observe(words.records.held(), plan.named_records(key))
}

/// The slots of a model that a reader holds by its data pins.
pub(crate) fn pinned(
    plan: &Plan,
    key: Key,
    words: Words<'_>,
    model: usize,
    claims: &mut Claims,
) -> SlotSet {
    let held = words.pins[model].held();
    // The records as of the last `observe`. The reader may have given one back since, and then its
    // slots are in the data pins read above or were released.
    let by_record = plan.slots_of(claims.records(), model);
    claims.pinned(model, held, plan.named_slots(key, model).union(by_record))
}
