//! Readers: they join, leave, get sets of their own, and ask for versions.

use std::collections::{BTreeMap, VecDeque};

use weightsync_core::WorkerId;

use super::mailbox::{Mailbox, QuestionState, satisfies};
use super::{Answer, Key, PageChange, Plan, Removed};
use crate::protocol::SlotSet;
use crate::set::{ModelMask, ModelSet};
use crate::wire::{Delivery, MAX_KNOWN, Want};

impl Plan {
    /// Adds a reader; the steps put its mailbox on the set that the worker should run.
    ///
    /// `had` is the newest sequence number of the reader's earlier mailbox in this run, or a higher
    /// number. Later notifications have higher ones.
    ///
    /// # Panics
    ///
    /// If the worker has a mailbox. The earlier reader [leaves](Self::leave) first, so that the
    /// caller clears its page.
    pub(crate) fn join(
        &mut self,
        ((worker, joined), had): (Key, u64),
        models: ModelMask,
        delivery: Delivery,
        record_pins: SlotSet,
        steps: &mut Vec<PageChange>,
    ) {
        let mut notifier = self.notifier(record_pins, steps);
        let mailbox = Mailbox {
            joined,
            models,
            delivery,
            live: None,
            queue: VecDeque::new(),
            head: 0,
            waiting: VecDeque::new(),
            // Not above the last number given out: the next notifications would otherwise be below
            // it.
            notified: had.min(self.sequence),
            asks: QuestionState::default(),
            shut: false,
        };
        let before = self.mailboxes.insert(worker, mailbox);
        assert!(before.is_none(), "{worker} has a mailbox already");
        self.note(worker);
        let set = self.desired.for_worker(worker);
        // In a relay's segment this set stays empty. There the sender of the versions decides, and
        // the relay calls `notify_one`.
        if delivery != Delivery::Asked && !set.models().and(models).is_empty() {
            self.point(worker, &set, &mut notifier);
        }
    }

    /// Puts a mailbox on a set that another process decided, with that process's sequence number.
    /// False if the mailbox does not exist or is shut.
    pub(crate) fn notify_one(
        &mut self,
        key: Key,
        sequence: u64,
        set: &ModelSet,
        record_pins: SlotSet,
        steps: &mut Vec<PageChange>,
    ) -> bool {
        let mut notifier = self.notifier(record_pins, steps);
        let Some(mailbox) = open_mailbox(&mut self.mailboxes, key) else {
            return false;
        };
        mailbox.notify(key.0, sequence, set, &mut self.records, &mut notifier);
        self.note(key.0);
        true
    }

    /// Answers a question with a set that another process decided, like
    /// [`notify_one`](Self::notify_one).
    pub(crate) fn answer_one(
        &mut self,
        key: Key,
        (question, sequence): (u64, u64),
        set: &ModelSet,
        record_pins: SlotSet,
        steps: &mut Vec<PageChange>,
    ) -> bool {
        let mut notifier = self.notifier(record_pins, steps);
        let Some(mailbox) = open_mailbox(&mut self.mailboxes, key) else {
            return false;
        };
        let question = (question, sequence);
        mailbox.answer(key.0, question, set, &mut self.records, &mut notifier);
        self.note(key.0);
        true
    }

    /// Removes a reader that has left or died: its mailbox refers to nothing any more. `None` if it
    /// had none.
    #[must_use = "the words of a mailbox that was removed have to be cleared"]
    pub(crate) fn leave(&mut self, key: Key) -> Option<Removed> {
        // Not the mailbox of a successor that has the same worker's number.
        self.mailbox(key)?;
        let gone = self.mailboxes.remove(&key.0)?;
        self.records.release(gone.refers());
        self.note(key.0);
        Some(Removed(()))
    }

    /// Shuts the mailbox of a reader that can use nothing: it refers to nothing, and gets no more
    /// notifications. The caller looks for pins after it has cleared the page.
    #[must_use = "the words of a mailbox that was shut have to be cleared"]
    pub(crate) fn shut(&mut self, key: Key) -> Option<Removed> {
        let mailbox = open_mailbox(&mut self.mailboxes, key)?;
        mailbox.shut(&mut self.records);
        self.note(key.0);
        Some(Removed(()))
    }

    /// Notes what the reader's control page says: how many entries it has taken, and the last
    /// question whose answer it no longer needs. The caller reads this before the pins, and before
    /// any search for room.
    pub(crate) fn observe(&mut self, key: Key, head: u64, through: u64) {
        let mailbox = self.mailboxes.get_mut(&key.0);
        let Some(mailbox) = mailbox.filter(|mailbox| mailbox.joined == key.1) else {
            return;
        };
        // A head that goes back, or beyond the tail, is false: the reader is broken.
        let gone = head.saturating_sub(mailbox.head);
        let gone = gone.min(mailbox.queue.len() as u64);
        // The reader takes the oldest entries first. From here on its data pins hold their slots.
        self.records.release(mailbox.queue.drain(..gone as usize));
        mailbox.head += gone;
        mailbox.asks.through = mailbox.asks.through.max(through);
    }

    /// Handles a reader's question. The answer has a place of its own, so it never delays a
    /// notification; a question has at most one answer.
    pub(crate) fn ask(
        &mut self,
        key: Key,
        question: u64,
        want: Want,
        record_pins: SlotSet,
        steps: &mut Vec<PageChange>,
    ) -> Answer {
        let Some(mailbox) = self.mailbox_mut(key).filter(|mailbox| !mailbox.shut) else {
            return Answer::Gone;
        };
        // A reader has one question: the new one replaces the old one, whatever became of that.
        mailbox.asks.wanted = None;
        mailbox.asks.owed = None;
        let (mine, delivery) = (mailbox.models, mailbox.delivery);
        self.note(key.0);
        let allowed = match want {
            Want::Newest => true,
            Want::AtLeast { model, .. } | Want::Exactly { model, .. } => mine.contains(model),
        };
        if !allowed || matches!(delivery, Delivery::Every { .. }) {
            return Answer::NotAllowed;
        }
        let sets = || self.desired.askable(key.0);
        // Only the set that the worker should run now can answer the first two. An older set of the
        // history would put the worker back.
        let set = match want {
            Want::Newest | Want::AtLeast { .. } => {
                sets().take(1).find(|set| satisfies(set, mine, want))
            }
            Want::Exactly { .. } => sets().find(|set| satisfies(set, mine, want)),
        };
        match (set, want) {
            (Some(set), _) => {
                let mut notifier = self.notifier(record_pins, steps);
                self.answer(key.0, question, &set, &mut notifier);
                Answer::Notified
            }
            (None, Want::Exactly { model, .. }) => {
                // The error at the worker names what it could have asked for. It travels in one
                // packet, so the list is cut.
                let mut known: Vec<_> = sets()
                    .filter_map(|set| set.entry(model))
                    .map(|entry| entry.version)
                    .collect();
                known.sort_unstable_by(|a, b| b.cmp(a));
                known.dedup();
                known.truncate(MAX_KNOWN);
                Answer::Unknown { known }
            }
            (None, _) => {
                // A later publication, or the end of a hold, answers it (`take_wanted`).
                if let Some(mailbox) = self.mailbox_mut(key) {
                    mailbox.asks.wanted = Some((question, want));
                }
                Answer::Later
            }
        }
    }

    /// Whether a reader waits for a version that does not exist yet, given the last question whose
    /// answer it no longer needs.
    pub(crate) fn awaits(&self, key: Key, through: u64) -> bool {
        let wanted = self.mailbox(key).and_then(|mailbox| mailbox.asks.wanted);
        wanted.is_some_and(|(question, _)| question > through)
    }

    /// Withdraws a reader's open question.
    pub(crate) fn withdraw(&mut self, key: Key) {
        if let Some(mailbox) = self.mailbox_mut(key) {
            mailbox.asks.wanted = None;
            mailbox.asks.owed = None;
            self.note(key.0);
        }
    }

    /// Removes answers that their readers no longer need, so that slots and records come free; true
    /// if there was one. Used when [`lend`](Self::lend) finds no slot, before growing or waiting,
    /// and when no record is free.
    pub(crate) fn clear_taken(&mut self, steps: &mut Vec<PageChange>) -> bool {
        let before = steps.len();
        for (worker, mailbox) in &mut self.mailboxes {
            let asks = &mut mailbox.asks;
            let over = |(question, _): &mut (u64, u8)| *question <= asks.through;
            // The word in the page is cleared by the step below; until then a reader may still pin
            // the record, so the caller looks for pins again.
            if let Some((_, record)) = asks.answer.take_if(over) {
                self.records.release([record]);
                let key = (*worker, mailbox.joined);
                steps.push(PageChange::Clear { key });
            }
        }
        steps.len() > before
    }
}

/// The mailbox of this reader, if it is open.
fn open_mailbox(
    mailboxes: &mut BTreeMap<WorkerId, Mailbox>,
    (worker, joined): Key,
) -> Option<&mut Mailbox> {
    let mailbox = mailboxes.get_mut(&worker);
    mailbox.filter(|mailbox| mailbox.joined == joined && !mailbox.shut)
}
