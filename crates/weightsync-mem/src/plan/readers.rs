//! Readers: who joins and goes, what is told to one alone, and what each asks.

use std::collections::{BTreeMap, VecDeque};

use weightsync_core::WorkerId;

use super::lane::{Asks, Lane, satisfies};
use super::{Answer, Key, Plan, Removed, Step};
use crate::protocol::SlotSet;
use crate::set::{ModelSet, Models};
use crate::wire::{Delivery, MAX_KNOWN, Want};

impl Plan {
    /// A reader joins; the steps put its lane where it is meant to be.
    ///
    /// `had` is no less than the newest sequence number it was handed before, in
    /// another lane of this run, if there was one: what it is told comes after that.
    ///
    /// # Panics
    ///
    /// If its worker has a lane. That one [leaves](Self::leave) first, so that
    /// the caller takes its words down.
    pub(crate) fn join(
        &mut self,
        ((worker, joined), had): (Key, u64),
        models: Models,
        delivery: Delivery,
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    ) {
        let mut teller = self.teller(record_pins, steps);
        let lane = Lane {
            joined,
            models,
            delivery,
            live: None,
            queue: VecDeque::new(),
            head: 0,
            waiting: VecDeque::new(),
            told: had.min(self.sequence),
            asks: Asks::default(),
            shut: false,
        };
        let before = self.lanes.insert(worker, lane);
        assert!(before.is_none(), "{worker} has a lane already");
        self.note(worker);
        let set = self.meant.for_worker(worker);
        if delivery != Delivery::Asked && !set.models().and(models).is_empty() {
            self.point(worker, &set, &mut teller);
        }
    }

    /// Puts a lane on a set that was decided elsewhere, under the sequence number
    /// that it has there. False if there is no such lane, or it is shut.
    pub(crate) fn tell_one(
        &mut self,
        key: Key,
        sequence: u64,
        set: &ModelSet,
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    ) -> bool {
        let mut teller = self.teller(record_pins, steps);
        let Some(lane) = open_lane(&mut self.lanes, key) else {
            return false;
        };
        lane.tell(key.0, sequence, set, &mut self.records, &mut teller);
        self.note(key.0);
        true
    }

    /// Answers a question with a set that was decided elsewhere, as
    /// [`tell_one`](Self::tell_one).
    pub(crate) fn answer_one(
        &mut self,
        key: Key,
        (question, sequence): (u64, u64),
        set: &ModelSet,
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    ) -> bool {
        let mut teller = self.teller(record_pins, steps);
        let Some(lane) = open_lane(&mut self.lanes, key) else {
            return false;
        };
        let question = (question, sequence);
        lane.answer(key.0, question, set, &mut self.records, &mut teller);
        self.note(key.0);
        true
    }

    /// A reader has left or died: its lane holds nothing any more. `None` if it had
    /// none.
    #[must_use = "the words of a lane that was removed have to be cleared"]
    pub(crate) fn leave(&mut self, key: Key) -> Option<Removed> {
        self.lane(key)?;
        let gone = self.lanes.remove(&key.0)?;
        self.records.release(gone.refers());
        self.note(key.0);
        Some(Removed(()))
    }

    /// A reader can use nothing: its lane refers to nothing any more, and nothing
    /// more is told to it. Pins are looked for after its page was taken down.
    #[must_use = "the words of a lane that was shut have to be cleared"]
    pub(crate) fn shut(&mut self, key: Key) -> Option<Removed> {
        let lane = open_lane(&mut self.lanes, key)?;
        lane.shut(&mut self.records);
        self.note(key.0);
        Some(Removed(()))
    }

    /// What the reader's control page says: how many entries it has taken, and
    /// the last question whose answer it needs no more. Read before its pins,
    /// and before anything here that looks for room.
    pub(crate) fn observe(&mut self, key: Key, head: u64, through: u64) {
        let lane = self.lanes.get_mut(&key.0);
        let Some(lane) = lane.filter(|lane| lane.joined == key.1) else {
            return;
        };
        // A head that goes back, or beyond the tail, is the reader's lie.
        let gone = head.saturating_sub(lane.head);
        let gone = gone.min(lane.queue.len() as u64);
        self.records.release(lane.queue.drain(..gone as usize));
        lane.head += gone;
        lane.asks.through = lane.asks.through.max(through);
    }

    /// A reader asks. The answer takes nothing from what is meant for it: it has
    /// a place of its own, and a question has one answer at most.
    pub(crate) fn ask(
        &mut self,
        key: Key,
        question: u64,
        want: Want,
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    ) -> Answer {
        let Some(lane) = self.lane_mut(key).filter(|lane| !lane.shut) else {
            return Answer::Gone;
        };
        lane.asks.wanted = None;
        lane.asks.owed = None;
        let (mine, delivery) = (lane.models, lane.delivery);
        self.note(key.0);
        let allowed = match want {
            Want::Newest => true,
            Want::AtLeast { model, .. } | Want::Exactly { model, .. } => mine.contains(model),
        };
        if !allowed || matches!(delivery, Delivery::Every { .. }) {
            return Answer::NotAllowed;
        }
        let sets = || self.meant.askable(key.0);
        let set = match want {
            Want::Newest | Want::AtLeast { .. } => {
                sets().take(1).find(|set| satisfies(set, mine, want))
            }
            Want::Exactly { .. } => sets().find(|set| satisfies(set, mine, want)),
        };
        match (set, want) {
            (Some(set), _) => {
                let mut teller = self.teller(record_pins, steps);
                self.answer(key.0, question, &set, &mut teller);
                Answer::Told
            }
            (None, Want::Exactly { model, .. }) => {
                let mut known: Vec<_> = sets()
                    .filter_map(|set| set.place(model))
                    .map(|placed| placed.version)
                    .collect();
                known.sort_unstable_by(|a, b| b.cmp(a));
                known.dedup();
                known.truncate(MAX_KNOWN);
                Answer::Unknown { known }
            }
            (None, _) => {
                if let Some(lane) = self.lane_mut(key) {
                    lane.asks.wanted = Some((question, want));
                }
                Answer::Later
            }
        }
    }

    /// Whether a reader waits for what there is not yet, given the last question
    /// whose answer it needs no more.
    pub(crate) fn awaits(&self, key: Key, through: u64) -> bool {
        let wanted = self.lane(key).and_then(|lane| lane.asks.wanted);
        wanted.is_some_and(|(question, _)| question > through)
    }

    /// A reader does not wait for an answer any more.
    pub(crate) fn withdraw(&mut self, key: Key) {
        if let Some(lane) = self.lane_mut(key) {
            lane.asks.wanted = None;
            lane.asks.owed = None;
            self.note(key.0);
        }
    }

    /// Takes back answers that are needed no more, so that their slots, or their
    /// records, can come free. True if there was one. For when
    /// [`lend`](Self::lend) finds no slot, before growing or waiting, and when
    /// there is no record.
    pub(crate) fn clear_taken(&mut self, steps: &mut Vec<Step>) -> bool {
        let before = steps.len();
        for (worker, lane) in &mut self.lanes {
            let asks = &mut lane.asks;
            let over = |(question, _): &mut (u64, u8)| *question <= asks.through;
            if let Some((_, record)) = asks.answer.take_if(over) {
                self.records.release([record]);
                let key = (*worker, lane.joined);
                steps.push(Step::Clear { key });
            }
        }
        steps.len() > before
    }
}

/// The lane of a reader that is still told sets, and is the one that is meant.
fn open_lane(lanes: &mut BTreeMap<WorkerId, Lane>, (worker, joined): Key) -> Option<&mut Lane> {
    let lane = lanes.get_mut(&worker);
    lane.filter(|lane| lane.joined == joined && !lane.shut)
}
