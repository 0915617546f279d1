//! Which set record holds which set, and which records are free.

use crate::protocol::{MAX_RECORDS, SlotSet};
use crate::set::{ModelSet, SetRecord};

use super::PageChange;

/// What was last written into each record. A record that nothing refers to keeps its content until
/// it is written again.
#[derive(Debug)]
pub(super) struct Records {
    /// How many records there are.
    count: u8,
    /// The sequence number of each record; 0 if it was never written.
    sequences: [u64; MAX_RECORDS],
    sets: [ModelSet; MAX_RECORDS],
    /// How often mailboxes refer to each record.
    referenced: [u32; MAX_RECORDS],
}

impl Records {
    pub(super) fn new() -> Self {
        Self {
            count: MAX_RECORDS as u8,
            sequences: [0; MAX_RECORDS],
            sets: [ModelSet::EMPTY; MAX_RECORDS],
            referenced: [0; MAX_RECORDS],
        }
    }

    /// Few records, so that loom can explore every way to use them again.
    #[cfg(loom)]
    pub(super) fn keep(&mut self, count: u8) {
        self.count = count;
    }

    /// Whether a record is free to be written, given those that readers pin.
    pub(super) fn has_free(&self, pins: SlotSet) -> bool {
        self.referenced()
            .union(pins)
            .first_free(self.count)
            .is_some()
    }

    /// Counts a mailbox's reference to a record.
    pub(super) fn refer(&mut self, record: u8) {
        self.referenced[usize::from(record)] += 1;
    }

    /// Removes a mailbox's references to these records.
    pub(super) fn release(&mut self, records: impl IntoIterator<Item = u8>) {
        for record in records {
            self.referenced[usize::from(record)] -= 1;
        }
    }

    /// The records that mailboxes refer to.
    pub(super) fn referenced(&self) -> SlotSet {
        let referenced =
            (0..MAX_RECORDS as u8).filter(|record| self.referenced[usize::from(*record)] > 0);
        referenced.fold(SlotSet::default(), SlotSet::with)
    }

    pub(super) fn set(&self, record: u8) -> &ModelSet {
        &self.sets[usize::from(record)]
    }

    pub(super) fn record(&self, record: u8) -> SetRecord {
        SetRecord {
            sequence: self.sequences[usize::from(record)],
            set: *self.set(record),
        }
    }

    /// A record that holds `set`, written for a sequence number from `since` to this one. If there
    /// is none, writes a record that nothing refers to and that is not `in_use`. `None` if there is
    /// none either. The record is in use from now on.
    pub(super) fn provide(
        &mut self,
        (since, sequence): (u64, u64),
        set: &ModelSet,
        in_use: &mut SlotSet,
        steps: &mut Vec<PageChange>,
    ) -> Option<u8> {
        // Mailboxes that name equal sets share a record, so a send to all costs one record. An
        // unused record that still holds the set serves too, without a write.
        let written = (0..MAX_RECORDS as u8).find(|&record| {
            let written = self.sequences[usize::from(record)];
            (since..=sequence).contains(&written) && self.set(record) == set
        });
        let record = match written {
            Some(record) => record,
            None => {
                // No mailbox refers to it, no reader pins it, and no step of this decision has
                // written it.
                let record = in_use.first_free(self.count)?;
                self.sequences[usize::from(record)] = sequence;
                self.sets[usize::from(record)] = *set;
                steps.push(PageChange::Write { record });
                record
            }
        };
        // A mailbox is about to name it. So no later step of this decision may write it.
        *in_use = in_use.with(record);
        Some(record)
    }

    /// The sequence number of a record that holds `set` and is newer than `referenced`.
    pub(super) fn newer(&self, referenced: u64, set: &ModelSet) -> Option<u64> {
        let records = self.sequences.iter().zip(&self.sets);
        let found = records.filter(|(sequence, other)| **sequence > referenced && *other == set);
        found.map(|(sequence, _)| *sequence).max()
    }
}
