//! Publications: room for the next versions, and sets that wait for room.

use std::collections::BTreeSet;

use weightsync_core::{Targets, Version, WorkerId};

use super::mailbox::Mailbox;
#[cfg(test)]
use super::mailbox::WaitingSet;
use super::{Key, Lend, ModelSlots, PageChange, Plan, PublicationPlan, SlotsExhausted};
use crate::protocol::{MAX_SLOTS, SlotSet};
use crate::set::{ModelSet, SetEntry};
use crate::wire::Delivery;

impl Plan {
    /// Finds a slot for the next version of `model`. `pinned` holds the slots of data pins and of
    /// pinned records ([`slots_of`](Self::slots_of)).
    pub(crate) fn lend(&mut self, model: usize, pinned: SlotSet, max_slots: u8) -> Lend {
        let needed = self.desired.slots(model).union(self.notified(model));
        // Sets that wait for room in a queue keep their slots, although no page names them yet.
        let waiting = self.waiting_mailboxes().flat_map(Mailbox::waiting_sets);
        let waiting = waiting.filter_map(|set| set.entry(model));
        let held = waiting.fold(needed, |all, entry| all.with(entry.slot));
        let ModelSlots { slots, lent, .. } = &mut self.models[model];
        if let Some(slot) = held.union(*lent).union(pinned).first_free(*slots) {
            *lent = lent.with(slot);
            return Lend::Slot(slot);
        }
        // A full queue is no reason to grow: a stopped worker would otherwise make every sender
        // grow to its limit. Slots that are kept for holds and history come on top of those that
        // readers may pin.
        // The newest version is one of the needed and is within `max_slots` already.
        let apart = needed.len().saturating_sub(1) + usize::from(max_slots);
        // What must exist at the same time: each needed version, each slot that is being written,
        // and the slot asked for.
        let needed = needed.union(*lent).len() + 1;
        let limit = apart.max(needed).min(MAX_SLOTS);
        match usize::from(*slots) < limit {
            true => Lend::Grow {
                needed: usize::from(*slots) < needed,
            },
            false => Lend::Wait,
        }
    }

    /// Notes a new slot; returns its number.
    pub(crate) fn grown(&mut self, model: usize) -> u8 {
        let slots = &mut self.models[model].slots;
        *slots += 1;
        *slots - 1
    }

    /// Marks a lent slot as holding a version that another process numbered. Until a reader is
    /// notified of it, only pins hold the slot.
    pub(crate) fn keep(&mut self, model: usize, slot: u8, version: Version) {
        let model = &mut self.models[model];
        model.lent = model.lent.without(slot);
        model.versions[usize::from(slot)] = version;
        // A relay may fetch an older version after a newer one; the newest one stays the newest.
        model.version = model.version.max(version);
    }

    /// Takes a lent slot back unused.
    pub(crate) fn give_back(&mut self, model: usize, slot: u8) {
        let lent = &mut self.models[model].lent;
        *lent = lent.without(slot);
    }

    /// The version that the next publication of `model` will have. Its commit record is written
    /// before the publication.
    pub(crate) fn next_version(&self, model: usize) -> Version {
        let model = &self.models[model];
        model.numbered.unwrap_or(model.version.next())
    }

    /// Sets the number of the next version of a model, until it is published or numbered again. If
    /// the number does not exceed the newest version, returns that one.
    pub(crate) fn number(&mut self, model: usize, number: Option<Version>) -> Result<(), Version> {
        let model = &mut self.models[model];
        if number.is_some_and(|number| number <= model.version) {
            return Err(model.version);
        }
        model.numbered = number;
        Ok(())
    }

    /// Publishes the versions written into lent slots, as one set. The slots are no longer lent,
    /// unless the publication is refused.
    // Longer than a screen: one decision under one lock, of which nothing may be done before the
    // only step that can refuse. It borrows most fields of the plan at once.
    pub(crate) fn publish(
        &mut self,
        written: &[(usize, u8)],
        targets: &Targets,
        record_pins: SlotSet,
        steps: &mut Vec<PageChange>,
    ) -> Result<PublicationPlan, SlotsExhausted> {
        let mut update = ModelSet::EMPTY;
        for &(model, slot) in written {
            // The number that the commit record of this slot has already.
            let version = self.next_version(model);
            update.put(model, SetEntry { slot, version });
        }
        // Only a model that cannot grow any more can be crowded.
        let full = |&(model, _): &(usize, u8)| usize::from(self.models[model].slots) == MAX_SLOTS;
        let may_crowd = written.iter().any(full);
        // The only step that can refuse, so it comes before everything that changes this plan.
        self.desired.publish(&update, targets, may_crowd)?;
        for (model, entry) in update.iter() {
            let of = &mut self.models[model];
            of.lent = of.lent.without(entry.slot);
            of.versions[usize::from(entry.slot)] = entry.version;
            of.version = entry.version;
            of.numbered = None;
        }
        self.sequence += 1;
        // One notifier for all readers: a record that one mailbox leaves is not written for the
        // next.
        let mut notifier = self.notifier(record_pins, steps);
        notifier.sequence = self.sequence;
        let mut dispositions = Vec::with_capacity(self.mailboxes.len());
        let mut absent = Vec::new();
        let (desired, records, waiting) = (&self.desired, &mut self.records, &mut self.waiting);
        let mut concern = |worker, mailbox: &mut Mailbox| {
            // A reader of other models has no news, and no line in the report.
            if !mailbox.models.and(update.models()).is_empty() {
                let disposition = mailbox.publish(worker, desired, records, &mut notifier);
                dispositions.push(((worker, mailbox.joined), disposition));
                note(waiting, worker, mailbox);
            }
        };
        match targets {
            Targets::All => {
                for (worker, mailbox) in &mut self.mailboxes {
                    concern(*worker, mailbox);
                }
            }
            Targets::Workers(workers) => {
                let mut workers = workers.clone();
                // A worker that is named twice is notified once, and has one line.
                workers.sort_unstable();
                workers.dedup();
                for worker in workers {
                    match self.mailboxes.get_mut(&worker) {
                        Some(mailbox) => concern(worker, mailbox),
                        // Its set is kept in `desired`: it gets this publication if it joins.
                        None => absent.push(worker),
                    }
                }
            }
        }
        Ok(PublicationPlan {
            sequence: self.sequence,
            versions: update
                .iter()
                .map(|(model, entry)| (model, entry.version))
                .collect(),
            dispositions,
            absent,
        })
    }

    /// Moves mailboxes that wait to the sets they should be on, as far as there is room.
    pub(crate) fn deliver(&mut self, record_pins: SlotSet, steps: &mut Vec<PageChange>) {
        if !self.anything_waits() {
            return;
        }
        let mut notifier = self.notifier(record_pins, steps);
        // `note` puts back the workers that still wait.
        for worker in std::mem::take(&mut self.waiting) {
            if let Some(mailbox) = self.mailboxes.get_mut(&worker) {
                mailbox.deliver(worker, &mut self.records, &mut notifier);
                note(&mut self.waiting, worker, mailbox);
            }
        }
    }

    /// Whether a record is free for a new set, given those that readers pin.
    pub(crate) fn has_record(&self, record_pins: SlotSet) -> bool {
        self.records.has_free(record_pins)
    }

    /// Whether a mailbox has room and waits only for a record.
    pub(crate) fn lacks_records(&self) -> bool {
        self.waiting_mailboxes().any(Mailbox::lacks_record)
    }

    /// Whether anything waits for room at any reader.
    pub(crate) fn anything_waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether anything waits for room at this reader.
    pub(crate) fn anything_waits_for(&self, key: Key) -> bool {
        self.mailbox(key)
            .is_some_and(|mailbox| !mailbox.waiting.is_empty())
    }

    /// Whether the publication still waits for room at this reader.
    #[cfg(test)]
    pub(crate) fn waits(&self, key: Key, sequence: u64) -> bool {
        let waits = |waiting: &WaitingSet, mailbox: &Mailbox| match mailbox.delivery {
            Delivery::Every { .. } => waiting.sequence == sequence,
            // A newer complete set replaces all before it.
            Delivery::Newest | Delivery::Asked => waiting.sequence >= sequence,
        };
        self.mailbox(key).is_some_and(|mailbox| {
            mailbox
                .waiting
                .iter()
                .any(|waiting| waits(waiting, mailbox))
        })
    }

    /// Drops a publication that waits for room in this reader's queue; true if it was dropped. A
    /// reader that wants only the newest keeps it, and gets it when there is room.
    pub(crate) fn give_up(&mut self, key: Key, sequence: u64) -> bool {
        let Some(mailbox) = self.mailbox_mut(key) else {
            return false;
        };
        let Delivery::Every { .. } = mailbox.delivery else {
            return false;
        };
        let before = mailbox.waiting.len();
        // A set that waits keeps its slots. From here on nothing keeps them for this reader.
        mailbox
            .waiting
            .retain(|waiting| waiting.sequence != sequence);
        let gave_up = mailbox.waiting.len() < before;
        self.note(key.0);
        gave_up
    }

    fn waiting_mailboxes(&self) -> impl Iterator<Item = &Mailbox> {
        let waiting = self.waiting.iter();
        waiting.filter_map(|worker| self.mailboxes.get(worker))
    }

    /// Updates whether this worker's mailbox waits for room.
    pub(super) fn note(&mut self, worker: WorkerId) {
        match self.mailboxes.get(&worker) {
            Some(mailbox) => note(&mut self.waiting, worker, mailbox),
            None => drop(self.waiting.remove(&worker)),
        }
    }
}

fn note(waiting: &mut BTreeSet<WorkerId>, worker: WorkerId, mailbox: &Mailbox) {
    match mailbox.waits() {
        true => waiting.insert(worker),
        false => waiting.remove(&worker),
    };
}
