//! One reader's lane: what it was told, and what waits until it can be.

use std::collections::VecDeque;

use weightsync_core::{Version, WorkerId};

use super::meant::Meant;
use super::records::Records;
use super::{Fate, Step};
use crate::protocol::{Live, SlotSet};
use crate::set::{ModelSet, Models};
use crate::wire::{Delivery, Want};

/// What one reader was told.
#[derive(Debug)]
pub(super) struct Lane {
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
    /// What it asked for and cannot have yet.
    pub(super) wanted: Option<Want>,
    /// The last answer to a question, by its sequence number.
    pub(super) answer: Option<(u64, ModelSet)>,
    /// The newest sequence number it was told.
    pub(super) told: u64,
    /// The newest sequence number it has taken.
    pub(super) taken: u64,
    /// Nothing more is told to it.
    pub(super) shut: bool,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) sequence: u64,
    pub(super) set: ModelSet,
}

/// Where the steps of one decision go.
pub(super) struct Teller<'a> {
    /// Of the publication that is told, if it is one.
    pub(super) sequence: u64,
    /// Records that lanes or pins held before the first step, or that were
    /// written since.
    pub(super) in_use: SlotSet,
    /// The record of the default set, once there is one.
    pub(super) default: Option<u8>,
    pub(super) steps: &'a mut Vec<Step>,
}

impl<'a> Teller<'a> {
    pub(super) fn new(in_use: SlotSet, steps: &'a mut Vec<Step>) -> Self {
        Self {
            sequence: 0,
            in_use,
            default: None,
            steps,
        }
    }
}

impl Lane {
    /// The records it refers to.
    pub(super) fn records(&self) -> SlotSet {
        let records = self.queue.iter().chain(&self.live);
        records.fold(SlotSet::default(), |all, record| all.with(*record))
    }

    /// What a publication that concerns this reader is for it.
    pub(super) fn publish(
        &mut self,
        worker: WorkerId,
        meant: &Meant,
        records: &mut Records,
        teller: &mut Teller<'_>,
    ) -> Fate {
        if self.shut {
            return Fate::Shut;
        }
        if meant.held(worker).is_some() {
            return Fate::Held;
        }
        let fate = self.move_to(worker, meant, records, teller);
        match self.delivery {
            Delivery::Asked => Fate::Asks,
            Delivery::Newest | Delivery::Every { .. } => fate,
        }
    }

    /// Tells it what it is meant to run now, if it is for that.
    fn move_to(
        &mut self,
        worker: WorkerId,
        meant: &Meant,
        records: &mut Records,
        teller: &mut Teller<'_>,
    ) -> Fate {
        let sequence = teller.sequence;
        // Nearly always every lane goes to the same record, which is then not
        // looked for again.
        let Some(own) = meant.own(worker) else {
            let set = meant.default_set();
            if !self.is_for(set) {
                return Fate::Asks;
            }
            if let Some(record) = teller.default
                && self.has_room()
            {
                self.put(worker, Live { sequence, record }, teller);
                return Fate::Told;
            }
            let fate = self.tell(worker, sequence, set, records, teller);
            teller.default = match fate {
                Fate::Told => self.newest_record(),
                _ => teller.default,
            };
            return fate;
        };
        let set = meant.default_set().with(own);
        match self.is_for(&set) {
            true => self.tell(worker, sequence, &set, records, teller),
            false => Fate::Asks,
        }
    }

    /// Whether a publication of this set goes to the lane without being asked
    /// for, or answers what was asked for.
    fn is_for(&mut self, set: &ModelSet) -> bool {
        self.delivery != Delivery::Asked || self.take_wanted(set)
    }

    pub(super) fn take_wanted(&mut self, set: &ModelSet) -> bool {
        let mine = self.models;
        let wanted = |want: &mut Want| satisfies(set, mine, *want);
        self.wanted.take_if(wanted).is_some()
    }

    /// Tells the lane a set, now or once there is room.
    pub(super) fn tell(
        &mut self,
        worker: WorkerId,
        sequence: u64,
        set: &ModelSet,
        records: &mut Records,
        teller: &mut Teller<'_>,
    ) -> Fate {
        if self.has_room()
            && let Some(record) = records.provide(sequence, set, &mut teller.in_use, teller.steps)
        {
            self.put(worker, Live { sequence, record }, teller);
            return Fate::Told;
        }
        match self.delivery {
            // As many again as its queue holds.
            Delivery::Every { bound } if self.waiting.len() >= bound.into() => return Fate::Full,
            Delivery::Every { .. } => {}
            Delivery::Newest | Delivery::Asked => self.waiting.clear(),
        }
        let set = set.only(self.models);
        self.waiting.push_back(Waiting { sequence, set });
        Fate::Waiting
    }

    pub(super) fn deliver(
        &mut self,
        worker: WorkerId,
        records: &mut Records,
        teller: &mut Teller<'_>,
    ) {
        while self.has_place()
            && let Some(Waiting { sequence, set }) = self.waiting.front()
            && let Some(record) = records.provide(*sequence, set, &mut teller.in_use, teller.steps)
        {
            let live = Live {
                sequence: *sequence,
                record,
            };
            self.waiting.pop_front();
            self.put(worker, live, teller);
        }
    }

    pub(super) fn shut(&mut self) {
        self.shut = true;
        self.live = None;
        self.queue.clear();
        self.waiting.clear();
        self.wanted = None;
    }

    /// Whether it can be told something at once, and in order.
    fn has_room(&self) -> bool {
        match self.delivery {
            Delivery::Every { .. } => self.waiting.is_empty() && self.has_place(),
            Delivery::Newest | Delivery::Asked => true,
        }
    }

    pub(super) fn lacks_record(&self) -> bool {
        !self.waiting.is_empty() && self.has_place()
    }

    fn has_place(&self) -> bool {
        match self.delivery {
            Delivery::Every { bound } => self.queue.len() < bound.into(),
            Delivery::Newest | Delivery::Asked => true,
        }
    }

    fn put(&mut self, worker: WorkerId, live: Live, teller: &mut Teller<'_>) {
        let key = (worker, self.joined);
        self.told = live.sequence;
        match self.delivery {
            Delivery::Every { .. } => {
                self.queue.push_back(live.record);
                teller.steps.push(Step::Push { key, live });
            }
            Delivery::Newest | Delivery::Asked => {
                // A newer set stands for one that still waits.
                self.waiting
                    .retain(|waiting| waiting.sequence > live.sequence);
                self.live = Some(live.record);
                teller.steps.push(Step::Flip { key, live });
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
        set.place(model)
            .map_or(Version::NONE, |placed| placed.version)
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
