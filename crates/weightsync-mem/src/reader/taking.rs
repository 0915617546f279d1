//! Turns the entry in a mailbox into snapshots: pins the slots, waits for them, and checks
//! them.

use super::{SegmentReader, Taken, TakenModel};
use crate::error::Error;
use crate::pins::PinnedSet;
use crate::snapshot::Snapshot;
use crate::wait::Deadline;
use crate::watch::{FoundSlots, PinnedSlot};
use crate::wire::Delivery;

impl SegmentReader {
    /// Takes the set that a look has found, or the one that has replaced it by now.
    pub(super) fn take(
        &mut self,
        sequence: u64,
        deadline: Deadline,
    ) -> Result<Option<Taken>, Error> {
        match self.delivery {
            Delivery::Every { .. } => {
                // The entry is passed in any case: the head in the page moves past a damaged one,
                // too.
                let hold = self.book.take_queued(self.head);
                self.head += 1;
                // The entry may have been taken back after the look, or the set was handed out at
                // another segment and only the news of that was lost.
                let had = |hold: &PinnedSet| hold.sequence <= self.sequence;
                if let Some(hold) = hold?.filter(|hold| !had(hold)) {
                    self.unmapped = Some(hold);
                    return self.take_unmapped(deadline);
                }
                // The sender must learn that it is taken, or sends would wait for it.
                self.book.set_taken(self.sequence)?;
                // Had before: the next one counts. Otherwise the queue was shut, and a later call
                // says why.
                match sequence <= self.sequence {
                    true => self.next(deadline),
                    false => Ok(None),
                }
            }
            Delivery::Newest | Delivery::Asked => {
                // A corrupt set is passed over as well.
                let before = std::mem::replace(&mut self.sequence, sequence);
                let Some(hold) = self.book.take_live()? else {
                    return Ok(None);
                };
                let taken = self.hand_out(hold, deadline);
                if matches!(taken, Ok(None) | Err(Error::Interrupted)) {
                    // Its slots are still on their way, so the next call takes the set again.
                    self.sequence = before;
                }
                taken
            }
        }
    }

    /// Hands out the set that was taken from the queue, once its slots are here.
    pub(super) fn take_unmapped(&mut self, deadline: Deadline) -> Result<Option<Taken>, Error> {
        match self.unmapped.take() {
            Some(hold) => self.hand_out(hold, deadline),
            None => Ok(None),
        }
    }

    /// Makes snapshots of the pinned slots, and tells the sender that the set is taken or damaged.
    /// An answer other than the newest set is not reported.
    ///
    /// `None` if one of its slots does not arrive in time, and [`Error::Interrupted`] if the wait
    /// is interrupted; the set then counts as not taken.
    pub(super) fn hand_out(
        &mut self,
        hold: PinnedSet,
        deadline: Deadline,
    ) -> Result<Option<Taken>, Error> {
        let sequence = hold.sequence;
        let damaged = |error: &Error| {
            if sequence > 0 {
                self.book.refuse_damage(sequence, error);
            }
        };
        let pinned = match self
            .watch
            .slots(&hold.pins, deadline)
            .inspect_err(damaged)?
        {
            FoundSlots::Mapped(pinned) => pinned,
            FoundSlots::Over => return Err(self.why_over()),
            // The entry has left the queue, so the reader itself must keep the set.
            later @ (FoundSlots::Later | FoundSlots::Interrupted) => {
                if let Delivery::Every { .. } = self.delivery {
                    self.unmapped = Some(hold);
                }
                return match later {
                    FoundSlots::Interrupted => Err(Error::Interrupted),
                    _ => Ok(None),
                };
            }
        };
        // The sender hears of damage at once: its send waits for this reader.
        let taken = self.checked(hold, pinned).inspect_err(damaged);
        // A damaged set is passed over.
        self.sequence = self.sequence.max(sequence);
        let taken = taken?;
        if sequence > 0 {
            // Only now, after every commit record was checked: a send that waits for `Staged`
            // believes this.
            self.book.set_taken(sequence)?;
        }
        for member in &taken.members {
            self.versions[member.model] = member.snapshot.version();
        }
        Ok(Some(taken))
    }

    fn checked(&self, hold: PinnedSet, pinned: Vec<PinnedSlot>) -> Result<Taken, Error> {
        let mut members = Vec::with_capacity(pinned.len());
        for (pin, (pages, slot)) in hold.pins.into_iter().zip(pinned) {
            let (model, version) = (pin.model, pin.version);
            members.push(TakenModel {
                model,
                changed: self.versions[model] != version,
                snapshot: Snapshot::new(pin, slot, pages, self.run)?,
            });
        }
        Ok(Taken {
            sequence: hold.sequence,
            members,
        })
    }
}
