//! The sender's decisions: who is to run what, which record says so, and what
//! may be written again.
//!
//! **Guarantee.** Plain values in, plain values out: no shared memory and no
//! waiting here. [`Plan`] remembers what every worker is meant to run and what
//! every lane was last told; its methods answer with the [`Step`]s that make the
//! shared pages say the same, to be taken in order and under the same lock.
//!
//! * A slot or record that anything refers to is never given out.
//! * Each step puts a lane on a whole set: all models of a publication or none.
//! * A worker that is not named keeps what it has, and one that joins gets the
//!   newest set meant for it.
//! * A model gets no more slots than its options and what is meant to be run ask
//!   for.

mod lane;
mod meant;
mod records;

use std::collections::{BTreeMap, VecDeque};

use weightsync_core::{Version, WorkerId};

use self::lane::{Asks, Lane, Teller, satisfies};
use self::meant::Meant;
use self::records::Records;
use crate::protocol::{Live, MAX_SLOTS, SlotSet};
use crate::set::{ModelSet, Models, Placed, SetRecord};
use crate::wire::{Delivery, MAX_KNOWN, Want};

/// Which reader: the worker, and the how-manieth to join. A worker that closed
/// its end but still holds snapshots stays in the roster beside its successor;
/// here there is one lane per worker, its newest reader's.
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
    /// Swap the lane's live word.
    Flip { key: Key, live: Live },
    /// Push on the lane's queue. There is room.
    Push { key: Key, live: Live },
    /// Swap the lane's word for answers, and say which question it answers.
    Answer { key: Key, live: Live, question: u64 },
    /// Clear the lane's word for answers.
    Clear { key: Key },
}

/// What a publication is for one connected reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// A step puts its lane there.
    Told,
    /// Its queue has no room, or no record is free: a later [`Plan::deliver`]
    /// puts it there, unless [`Plan::give_up`] comes first.
    Waiting,
    /// Its queue has no room, and as many publications wait already: it will
    /// not get this one by itself.
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

/// A decided publication.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published {
    /// Its sequence number: a lane that has taken this or a later one has taken it.
    pub(crate) sequence: u64,
    /// The version each model got.
    pub(crate) versions: Vec<(usize, Version)>,
    /// What it is for each connected reader that it is for.
    pub(crate) fates: Vec<(Key, Fate)>,
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
    /// In a new slot: make one, hand it out, then call [`Plan::grown`].
    Grow,
    /// Nowhere until a slot comes free.
    Wait,
}

/// What becomes of an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The steps answer it, or there is no record for the answer yet.
    Told,
    /// It will be answered when there is such a version.
    Later,
    /// There is no such version for this reader; the newest there are.
    Unknown { known: Vec<Version> },
    /// The reader was not given this model, or takes every version and so has
    /// nothing to ask for.
    NotAllowed,
    /// There is no such lane, or it is shut.
    Gone,
}

/// What all workers are meant to run, and what their lanes say.
#[derive(Debug)]
pub(crate) struct Plan {
    models: Vec<Model>,
    /// The last sequence number given out.
    sequence: u64,
    meant: Meant,
    records: Records,
    lanes: BTreeMap<WorkerId, Lane>,
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
    /// The plan of a segment with `models` models of `slots` slots each, that
    /// keeps `history` earlier sets besides the newest.
    pub(crate) fn new(models: usize, slots: u8, history: u8) -> Self {
        let model = |_| Model {
            slots,
            lent: SlotSet::default(),
            numbered: None,
            versions: [Version::NONE; MAX_SLOTS],
            version: Version::NONE,
        };
        Self {
            models: (0..models).map(model).collect(),
            sequence: 0,
            meant: Meant::new(history.into()),
            records: Records::new(),
            lanes: BTreeMap::new(),
        }
    }
}

/// Publishing.
impl Plan {
    /// Finds a slot for the next version of `model`. `pinned` is what data pins
    /// hold, and what pinned records do ([`slots_of`](Self::slots_of)).
    pub(crate) fn lend(&mut self, model: usize, pinned: SlotSet, max_slots: u8) -> Lend {
        let needed = self.meant.slots(model).union(self.told(model));
        let waiting = self.lanes.values().flat_map(Lane::kept_waiting);
        let waiting = waiting.filter_map(|set| set.place(model));
        let held = waiting.fold(needed, |all, placed| all.with(placed.slot));
        let Model { slots, lent, .. } = &mut self.models[model];
        if let Some(slot) = held.union(*lent).union(pinned).first_free(*slots) {
            *lent = lent.with(slot);
            return Lend::Slot(slot);
        }
        // What waits for room in a queue is no reason to grow: else a worker
        // that stands still would make every sender grow to the end.
        // What is kept apart has its room beside what readers may pin.
        let apart = needed.len().saturating_sub(1) + usize::from(max_slots);
        let limit = apart.max(needed.union(*lent).len() + 1).min(MAX_SLOTS);
        match usize::from(*slots) < limit {
            true => Lend::Grow,
            false => Lend::Wait,
        }
    }

    /// Notes a new slot, and lends it.
    pub(crate) fn grown(&mut self, model: usize) -> u8 {
        let Model { slots, lent, .. } = &mut self.models[model];
        let slot = *slots;
        *slots += 1;
        *lent = lent.with(slot);
        slot
    }

    /// A lent slot has a version that was numbered elsewhere, and is lent no more.
    /// Only pins hold it until somebody is told.
    pub(crate) fn keep(&mut self, model: usize, slot: u8, version: Version) {
        let model = &mut self.models[model];
        model.lent = model.lent.without(slot);
        model.versions[usize::from(slot)] = version;
        model.version = model.version.max(version);
    }

    /// Takes a lent slot back unused.
    pub(crate) fn give_back(&mut self, model: usize, slot: u8) {
        let lent = &mut self.models[model].lent;
        *lent = lent.without(slot);
    }

    /// The version that the next publication of `model` will be: its commit
    /// record is written before.
    pub(crate) fn next_version(&self, model: usize) -> Version {
        let model = &self.models[model];
        model.numbered.unwrap_or(model.version.next())
    }

    /// Numbers the next version of a model, until it is published or numbered
    /// again. The newest version there is, if the number is not above it.
    pub(crate) fn number(&mut self, model: usize, number: Option<Version>) -> Result<(), Version> {
        let model = &mut self.models[model];
        if number.is_some_and(|number| number <= model.version) {
            return Err(model.version);
        }
        model.numbered = number;
        Ok(())
    }

    /// Publishes the versions written into lent slots, as one set. The slots are
    /// lent no more, unless it is refused.
    pub(crate) fn publish(
        &mut self,
        written: &[(usize, u8)],
        targets: &Targets,
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    ) -> Result<Published, Crowded> {
        let mut update = ModelSet::EMPTY;
        for &(model, slot) in written {
            let version = self.next_version(model);
            update.put(model, Placed { slot, version });
        }
        let full = |&(model, _): &(usize, u8)| usize::from(self.models[model].slots) == MAX_SLOTS;
        let may_crowd = written.iter().any(full);
        self.meant.publish(&update, targets, may_crowd)?;
        for (model, placed) in update.iter() {
            let of = &mut self.models[model];
            of.lent = of.lent.without(placed.slot);
            of.versions[usize::from(placed.slot)] = placed.version;
            of.version = placed.version;
            of.numbered = None;
        }
        self.sequence += 1;
        let mut teller = self.teller(record_pins, steps);
        teller.sequence = self.sequence;
        let mut fates = Vec::with_capacity(self.lanes.len());
        let mut absent = Vec::new();
        let (meant, records) = (&self.meant, &mut self.records);
        let mut concern = |worker, lane: &mut Lane| {
            if !lane.models.and(update.models()).is_empty() {
                let fate = lane.publish(worker, meant, records, &mut teller);
                fates.push(((worker, lane.joined), fate));
            }
        };
        match targets {
            Targets::All => {
                for (worker, lane) in &mut self.lanes {
                    concern(*worker, lane);
                }
            }
            Targets::Workers(workers) => {
                let mut workers = workers.clone();
                workers.sort_unstable();
                workers.dedup();
                for worker in workers {
                    match self.lanes.get_mut(&worker) {
                        Some(lane) => concern(worker, lane),
                        None => absent.push(worker),
                    }
                }
            }
        }
        Ok(Published {
            sequence: self.sequence,
            versions: update
                .iter()
                .map(|(model, placed)| (model, placed.version))
                .collect(),
            fates,
            absent,
        })
    }

    /// Puts lanes that wait where they are meant to be, as far as there is room.
    pub(crate) fn deliver(&mut self, record_pins: SlotSet, steps: &mut Vec<Step>) {
        if !self.anything_waits() {
            return;
        }
        let mut teller = self.teller(record_pins, steps);
        for (worker, lane) in &mut self.lanes {
            lane.deliver(*worker, &mut self.records, &mut teller);
        }
    }

    /// Whether a lane waits that has room, but there was no record for it.
    pub(crate) fn lacks_records(&self) -> bool {
        self.lanes.values().any(Lane::lacks_record)
    }

    /// Whether anything waits for room anywhere.
    pub(crate) fn anything_waits(&self) -> bool {
        let mut lanes = self.lanes.values();
        lanes.any(|lane| lane.kept_waiting().next().is_some())
    }

    /// Whether anything waits for room at this reader.
    pub(crate) fn anything_waits_for(&self, key: Key) -> bool {
        self.lane(key).is_some_and(|lane| !lane.waiting.is_empty())
    }

    /// Whether the publication still waits for room at this reader.
    #[cfg(test)]
    pub(crate) fn waits(&self, key: Key, sequence: u64) -> bool {
        let waits = |waiting: &lane::Waiting, lane: &Lane| match lane.delivery {
            Delivery::Every { .. } => waiting.sequence == sequence,
            // A newer one, whole, stands for all before it.
            Delivery::Newest | Delivery::Asked => waiting.sequence >= sequence,
        };
        self.lane(key)
            .is_some_and(|lane| lane.waiting.iter().any(|waiting| waits(waiting, lane)))
    }

    /// Drops a publication that waits for room in this reader's queue. The
    /// newest of a reader that wants only that is not dropped: it comes when
    /// there is room. True if it was dropped.
    pub(crate) fn give_up(&mut self, key: Key, sequence: u64) -> bool {
        let Some(lane) = self.lane_mut(key) else {
            return false;
        };
        let Delivery::Every { .. } = lane.delivery else {
            return false;
        };
        let before = lane.waiting.len();
        lane.waiting.retain(|waiting| waiting.sequence != sequence);
        lane.waiting.len() < before
    }
}

/// Readers.
impl Plan {
    /// A reader joins, in place of an earlier one of its worker; the steps put
    /// its lane where it is meant to be.
    ///
    /// `had` is no less than the newest sequence number it was handed before, in
    /// another lane of this run, if there was one: what it is told comes after that.
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
        self.lanes.insert(worker, lane);
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
        true
    }

    /// A reader has left or died: its lane holds nothing any more.
    pub(crate) fn leave(&mut self, key: Key) {
        if self.lane(key).is_some() {
            self.lanes.remove(&key.0);
        }
    }

    /// A reader can use nothing: its lane refers to nothing any more, and nothing
    /// more is told to it. The caller shuts its lane in the shared pages, and
    /// looks for pins after that.
    pub(crate) fn shut(&mut self, key: Key) {
        if let Some(lane) = self.lane_mut(key) {
            lane.shut();
        }
    }

    /// What the reader's control page says: how many entries it has taken, and
    /// the last question whose answer it needs no more. Read before its pins,
    /// and before anything here that looks for room.
    pub(crate) fn observe(&mut self, key: Key, head: u64, through: u64) {
        let Some(lane) = self.lane_mut(key) else {
            return;
        };
        // A head that goes back, or beyond the tail, is the reader's lie.
        let gone = head.saturating_sub(lane.head);
        let gone = gone.min(lane.queue.len() as u64);
        lane.queue.drain(..gone as usize);
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
        let mine = lane.models;
        let allowed = match want {
            Want::Newest => true,
            Want::AtLeast { model, .. } | Want::Exactly { model, .. } => mine.contains(model),
        };
        if !allowed || matches!(lane.delivery, Delivery::Every { .. }) {
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
            if asks.answer.take_if(over).is_some() {
                let key = (*worker, lane.joined);
                steps.push(Step::Clear { key });
            }
        }
        steps.len() > before
    }
}

/// Holding.
impl Plan {
    /// Holds workers, connected or not, at what they are meant to run now.
    pub(crate) fn hold(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            self.meant.hold(*worker);
        }
    }

    /// Holds them no more. The lanes for which something was published meanwhile
    /// go to the newest at once.
    pub(crate) fn release(
        &mut self,
        workers: &[WorkerId],
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    ) {
        let mut teller = self.teller(record_pins, steps);
        for worker in workers {
            let Some(was) = self.meant.release(*worker) else {
                continue;
            };
            let Some(lane) = self.lanes.get_mut(worker).filter(|lane| !lane.shut) else {
                continue;
            };
            let set = self.meant.for_worker(*worker);
            let news = set.only(lane.models) != was.only(lane.models);
            if !news {
                continue;
            }
            let (pushed, question) = (lane.delivery != Delivery::Asked, lane.take_wanted(&set));
            if pushed {
                self.point(*worker, &set, &mut teller);
            }
            if let Some(question) = question {
                self.answer(*worker, question, &set, &mut teller);
            }
        }
    }

    pub(crate) fn is_held(&self, worker: WorkerId) -> bool {
        self.meant.held(worker).is_some()
    }
}

/// Looking.
impl Plan {
    /// The newest version published of a model, to whomever.
    pub(crate) fn version(&self, model: usize) -> Version {
        self.models[model].version
    }

    /// How many slots a model has.
    pub(crate) fn slots(&self, model: usize) -> u8 {
        self.models[model].slots
    }

    /// The newest that was sent to all.
    pub(crate) fn default_set(&self) -> &ModelSet {
        self.meant.default_set()
    }

    /// What a worker is meant to run once it is not held, connected or not.
    pub(crate) fn if_released(&self, worker: WorkerId) -> ModelSet {
        self.meant.if_released(worker)
    }

    /// The slot of exactly this version, while anything refers to it.
    pub(crate) fn find(&self, model: usize, version: Version) -> Option<u8> {
        let told = || {
            let slots = self.told(model);
            slots
                .iter()
                .find(|&slot| self.version_in(model, slot) == version)
        };
        self.meant.find(model, version).or_else(told)
    }

    /// The versions of a model that [`find`](Self::find) finds, newest first.
    pub(crate) fn kept(&self, model: usize) -> Vec<Version> {
        let slots = self.meant.slots(model).union(self.told(model));
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

    /// The version a slot was last published with.
    pub(crate) fn version_in(&self, model: usize, slot: u8) -> Version {
        self.models[model].versions[usize::from(slot)]
    }

    /// The slots of a model that these records refer to.
    pub(crate) fn slots_of(&self, records: SlotSet, model: usize) -> SlotSet {
        let sets = records.iter().map(|record| self.records.set(record));
        slots_in(sets, model)
    }

    /// The slots of a model that this reader's lane refers to, for saying who
    /// holds what.
    pub(crate) fn lane_slots(&self, key: Key, model: usize) -> SlotSet {
        self.lane(key)
            .filter(|lane| lane.models.contains(model))
            .map_or(SlotSet::default(), |lane| {
                self.slots_of(lane.records(), model)
                    .union(slots_in(lane.kept_waiting(), model))
            })
    }

    /// The slots of a model that lanes refer to.
    fn told(&self, model: usize) -> SlotSet {
        let lanes = self.lanes.values();
        let lanes = lanes.filter(|lane| lane.models.contains(model));
        let records = lanes.fold(SlotSet::default(), |all, lane| all.union(lane.records()));
        self.slots_of(records, model)
    }

    fn records_told(&self) -> SlotSet {
        let lanes = self.lanes.values().map(Lane::records);
        lanes.fold(SlotSet::default(), SlotSet::union)
    }

    fn lane(&self, (worker, joined): Key) -> Option<&Lane> {
        self.lanes.get(&worker).filter(|lane| lane.joined == joined)
    }

    fn lane_mut(&mut self, (worker, joined): Key) -> Option<&mut Lane> {
        let lane = self.lanes.get_mut(&worker);
        lane.filter(|lane| lane.joined == joined)
    }

    /// Where the steps of one decision go. Made before the first of them: the
    /// pins were looked for while the lanes were where they are now, so a record
    /// that a lane is taken off may be pinned by now, and stays in use to the end
    /// of the decision.
    fn teller<'a>(&self, record_pins: SlotSet, steps: &'a mut Vec<Step>) -> Teller<'a> {
        Teller::new(self.records_told().union(record_pins), steps)
    }

    /// Points one lane at a set, by a record that is newer than what it was told.
    /// Where no more may wait, it takes the place of the last that does: a reader
    /// of every version would else stay behind the newest for good.
    fn point(&mut self, worker: WorkerId, set: &ModelSet, teller: &mut Teller<'_>) {
        let Some(lane) = self.lanes.get_mut(&worker) else {
            return;
        };
        lane.deliver(worker, &mut self.records, teller);
        let after = lane.waiting.back().map_or(lane.told, |last| last.sequence);
        let sequence = self.records.newer(after, set).unwrap_or_else(|| {
            self.sequence += 1;
            self.sequence
        });
        if lane.tell(worker, sequence, set, &mut self.records, teller) == Fate::Full {
            lane.waiting.pop_back();
            lane.tell(worker, sequence, set, &mut self.records, teller);
        }
    }

    /// Answers a question, by a record that is newer than the answer before.
    fn answer(&mut self, worker: WorkerId, question: u64, set: &ModelSet, teller: &mut Teller<'_>) {
        let Some(lane) = self.lanes.get_mut(&worker) else {
            return;
        };
        let sequence = self.records.newer(lane.asks.told, set).unwrap_or_else(|| {
            self.sequence += 1;
            self.sequence
        });
        lane.answer(worker, (question, sequence), set, &mut self.records, teller);
    }
}

fn slots_in<'a>(sets: impl Iterator<Item = &'a ModelSet>, model: usize) -> SlotSet {
    let places = sets.filter_map(|set| set.place(model));
    places.fold(SlotSet::default(), |all, placed| all.with(placed.slot))
}

/// The lane of a reader that is still told sets, and is the one that is meant.
fn open_lane(lanes: &mut BTreeMap<WorkerId, Lane>, (worker, joined): Key) -> Option<&mut Lane> {
    let lane = lanes.get_mut(&worker);
    lane.filter(|lane| lane.joined == joined && !lane.shut)
}

#[cfg(test)]
mod tests;
