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

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use weightsync_core::{Version, WorkerId};

use crate::protocol::{Live, MAX_RECORDS, MAX_SLOTS, SlotSet};
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
    /// Write this set record.
    Write { record: u8, set: SetRecord },
    /// Swap the lane's live word.
    Flip { key: Key, live: Live },
    /// Push on the lane's queue. There is room.
    Push { key: Key, live: Live },
    /// Clear the lane's live word.
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
    /// It gets what it asks for and nothing else.
    Asks,
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
    /// The steps put the lane there (or on its queue).
    Told,
    /// It will be told when there is such a version.
    Later,
    /// There is no such version for this reader; the newest there are.
    Unknown { known: Vec<Version> },
    /// The reader was not given this model.
    NotYours,
    /// There is no such lane.
    Gone,
}

/// What all workers are meant to run, and what their lanes say.
#[derive(Debug)]
pub(crate) struct Plan {
    models: Vec<Model>,
    history_limit: usize,
    /// The last sequence number given out.
    sequence: u64,
    /// What a worker runs for which nothing else is meant.
    default: ModelSet,
    /// Earlier defaults, newest first.
    history: VecDeque<ModelSet>,
    /// What only this worker is to run, for some of the models.
    overrides: BTreeMap<WorkerId, ModelSet>,
    /// The workers that are held, and what they are held at.
    held: BTreeMap<WorkerId, ModelSet>,
    /// What was last written into each record.
    records: [Option<SetRecord>; MAX_RECORDS],
    lanes: BTreeMap<Key, Lane>,
}

impl Plan {
    /// The plan of a segment with `models` models of `slots` slots each, that
    /// keeps `history` earlier sets besides the newest.
    pub(crate) fn new(models: usize, slots: u8, history: u8) -> Self;

    // --- publishing -----------------------------------------------------
    /// Finds a slot for the next version of `model`. `pinned`: every slot that a
    /// data pin or a pinned record ([`slots_of`](Self::slots_of)) holds.
    pub(crate) fn lend(&mut self, model: usize, pinned: SlotSet, max_slots: u8) -> Lend;
    /// Notes a new slot, and lends it.
    pub(crate) fn grown(&mut self, model: usize) -> u8;
    /// Takes a lent slot back unused.
    pub(crate) fn give_back(&mut self, model: usize, slot: u8);
    /// Publishes the versions written into lent slots, as one set.
    pub(crate) fn publish(
        &mut self,
        written: &[(usize, u8)],
        targets: &Targets,
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    ) -> Result<Published, Crowded>;
    /// The versions that [`publish`](Self::publish) will give, to write them
    /// into the commit records before.
    pub(crate) fn next_version(&self, model: usize) -> Version;
    /// Puts lanes that wait where they are meant to be, as far as there is room.
    pub(crate) fn deliver(&mut self, record_pins: SlotSet, steps: &mut Vec<Step>);
    /// Whether the publication still waits for room at this reader.
    pub(crate) fn waits(&self, key: Key, sequence: u64) -> bool;
    /// Drops a publication that waits for room at this reader. True if it did.
    pub(crate) fn give_up(&mut self, key: Key, sequence: u64) -> bool;

    // --- readers --------------------------------------------------------
    /// A reader joins; the steps put its lane where it is meant to be.
    pub(crate) fn join(
        &mut self,
        key: Key,
        models: Models,
        delivery: Delivery,
        record_pins: SlotSet,
        steps: &mut Vec<Step>,
    );
    /// A reader has left or died: its lane holds nothing any more.
    pub(crate) fn leave(&mut self, key: Key);
    /// What the reader's control page says: entries taken, and the newest
    /// sequence number taken. To be called before anything that looks for room.
    pub(crate) fn observe(&mut self, key: Key, head: u64, taken: u64);
    /// A reader asks.
    pub(crate) fn ask(&mut self, key: Key, want: Want, record_pins: SlotSet, steps: &mut Vec<Step>) -> Answer;
    /// Takes the lanes of readers that got what they asked for off it, so that
    /// its slots can come free. True if there was one. To be called when
    /// [`lend`](Self::lend) found no slot, before growing or waiting.
    pub(crate) fn clear_taken(&mut self, steps: &mut Vec<Step>) -> bool;

    // --- holding --------------------------------------------------------
    pub(crate) fn hold(&mut self, workers: &[WorkerId]);
    pub(crate) fn release(&mut self, workers: &[WorkerId], record_pins: SlotSet, steps: &mut Vec<Step>);
    pub(crate) fn is_held(&self, worker: WorkerId) -> bool;

    // --- looking --------------------------------------------------------
    /// Newest published version of a model.
    pub(crate) fn version(&self, model: usize) -> Version;
    pub(crate) fn slots(&self, model: usize) -> u8;
    /// Newest sent to all.
    pub(crate) fn default_set(&self) -> &ModelSet;
    /// What a worker is meant to run, connected or not.
    pub(crate) fn meant_for(&self, worker: WorkerId) -> ModelSet;
    /// The slot of exactly this version, if anything still refers to it.
    pub(crate) fn find(&self, model: usize, version: Version) -> Option<u8>;
    /// The version a slot was last published with.
    pub(crate) fn version_in(&self, model: usize, slot: u8) -> Version;
    /// The slots that a set of records refers to.
    pub(crate) fn slots_of(&self, records: SlotSet, model: usize) -> SlotSet;
}
