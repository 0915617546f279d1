//! All that changes, under one lock: the plan, the readers that are present, those that left,
//! and those that can use nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use weightsync_core::{Version, WorkerId};

use super::Reader;
use crate::grow::Growth;
use crate::plan::{Key, Plan, Step};
use crate::set::Models;
use crate::slot::Slot;
use crate::wire::{Delivery, FromSender};

/// How many of those that went are remembered.
const MAX_GONE: usize = 1 << 16;

/// What changes, under one lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) plan: Plan,
    /// How many models there are.
    models: usize,
    pub(crate) readers: BTreeMap<Key, Reader>,
    /// Those whose pages say something that is not said here as well.
    followed: BTreeSet<Key>,
    /// How many of them are processes of this host.
    processes: usize,
    /// For each that waits for remote readers, those of which something has become known.
    changed: BTreeMap<u64, BTreeSet<Key>>,
    /// The last number of one that waits.
    last_listener: u64,
    /// How many readers have joined so far.
    pub(crate) joined: u64,
    /// The readers that went last; with those that nobody has been told of yet.
    gone: VecDeque<Gone>,
    /// How many of them nobody has been told of.
    unreported: usize,
    /// Those that had loaded something and failed, died or were lost, by number, until a
    /// reader of that number is back, or it is forgotten: each is a line of every
    /// publication for it.
    missing: BTreeMap<WorkerId, Gone>,
    rejected: Vec<Rejected>,
    /// The data slots of each model.
    pub(crate) slots: Vec<Vec<Arc<Slot>>>,
    /// How each model comes to more of them.
    pub(crate) growth: Vec<Growth>,
    /// Kept to be used again.
    pub(crate) steps: Vec<Step>,
}

/// What is known of a reader that is not there any more.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) key: Key,
    pub(crate) pid: u32,
    pub(crate) departure: Departure,
    /// Why it could use nothing more, if it said so: then it failed, however it went.
    pub(crate) reason: Option<String>,
    pub(crate) applied: u64,
    pub(crate) models: Models,
    pub(crate) versions: Vec<Version>,
    pub(crate) reported: bool,
}

impl Gone {
    /// Whether it closed its end and had no reason to give.
    pub(crate) fn is_in_order(&self) -> bool {
        self.departure == Departure::Left && self.reason.is_none()
    }
}

/// How a reader went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// It closed its end in order.
    Left,
    /// Its process died.
    Died,
    /// It has been silent for too long: a link, or the relay that acted for it, is
    /// gone. It may come back.
    Lost,
}

/// A reader that cannot use the models, whatever the version.
#[derive(Clone, Debug)]
pub(crate) struct Rejected {
    pub(crate) key: Key,
    pub(crate) pid: u32,
    pub(crate) reason: String,
}

impl Gone {
    /// What is known of a reader that goes; in which way, unless it has closed its end.
    fn new(key: Key, reader: &Reader, unless_left: Departure, models: usize) -> Self {
        let applied = reader.applied();
        let reason = reader.unusable.clone();
        let departure = match reader.has_left() {
            true => Departure::Left,
            false => unless_left,
        };
        // One that gives up joining says that it leaves, too.
        let never_joined = departure == Departure::Left && applied == 0 && reason.is_none();
        Self {
            key,
            pid: reader.pid(),
            departure,
            reason,
            applied,
            models: reader.models,
            versions: reader.versions(models),
            reported: reader.reported || never_joined,
        }
    }
}

impl State {
    pub(super) fn new(plan: Plan, slots: Vec<Vec<Arc<Slot>>>, growth: Vec<Growth>) -> Self {
        Self {
            plan,
            models: slots.len(),
            readers: BTreeMap::new(),
            followed: BTreeSet::new(),
            processes: 0,
            changed: BTreeMap::new(),
            last_listener: 0,
            joined: 0,
            gone: VecDeque::new(),
            unreported: 0,
            missing: BTreeMap::new(),
            rejected: Vec::new(),
            slots,
            growth,
            steps: Vec::new(),
        }
    }

    /// A reader is there from now on.
    pub(crate) fn add(&mut self, key: Key, reader: Reader) {
        let process = reader.socket().is_some();
        self.processes += usize::from(process);
        if process || reader.delivery != Delivery::Newest {
            self.followed.insert(key);
        }
        self.readers.insert(key, reader);
    }

    /// A reader is there no more, and its pins count no more.
    pub(crate) fn remove(&mut self, key: Key) -> Option<Reader> {
        let reader = self.readers.remove(&key)?;
        self.processes -= usize::from(reader.socket().is_some());
        self.followed.remove(&key);
        if let Some(mailbox) = self.plan.leave(key) {
            reader.take_down(mailbox);
        }
        Some(reader)
    }

    /// A reader asks for something, and will again.
    pub(crate) fn asks(&mut self, key: Key) -> Option<&Reader> {
        let reader = self.readers.get_mut(&key)?;
        reader.asks = true;
        self.followed.insert(key);
        Some(reader)
    }

    /// How many readers are processes of this host, and how many are remote readers.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.processes, self.readers.len() - self.processes)
    }

    /// Each reader whose pages are to be looked at, with the plan that is to know. A
    /// remote reader that only takes the newest pins nothing and is not among them: there may
    /// be very many.
    pub(crate) fn follow(&mut self, mut look: impl FnMut(&mut Plan, Key, &mut Reader)) {
        for key in &self.followed {
            if let Some(reader) = self.readers.get_mut(key) {
                look(&mut self.plan, *key, reader);
            }
        }
    }

    /// The readers that are processes of this host.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (Key, &Reader)> {
        let followed = self.followed.iter();
        let readers = followed.filter_map(|key| Some((*key, self.readers.get(key)?)));
        readers.filter(|(_, reader)| reader.socket().is_some())
    }

    /// From here on it is [noted](Self::mark_changed) of which remote readers something becomes known.
    pub(crate) fn listen(&mut self) -> u64 {
        self.last_listener += 1;
        self.changed.insert(self.last_listener, BTreeSet::new());
        self.last_listener
    }

    /// Of which something has become known since.
    pub(crate) fn take_changed(&mut self, listener: u64) -> BTreeSet<Key> {
        let changed = self.changed.get_mut(&listener);
        changed.map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn stop_listening(&mut self, listener: u64) {
        self.changed.remove(&listener);
    }

    /// Something has become known of a remote reader.
    pub(crate) fn mark_changed(&mut self, key: Key) {
        for changed in self.changed.values_mut() {
            changed.insert(key);
        }
    }

    /// Who can use nothing, of those that nobody has been told of.
    pub(super) fn rejected(&self) -> &[Rejected] {
        &self.rejected
    }

    /// Rejects a reader that has not said itself that it can go no further, and
    /// tells it so: it would wait for ever.
    pub(crate) fn turn_away(&mut self, key: Key, reason: String) {
        if let Some(socket) = self.readers.get(&key).and_then(Reader::socket) {
            let denied = FromSender::Denied {
                reason: reason.clone(),
            };
            // One that does not read is not helped.
            let _ = socket.send(&denied.encode(), &[]);
        }
        self.reject(key, reason);
    }

    /// Turns away a reader that breaks the protocol: nothing more is heard of it. But it
    /// lives, and may hold snapshots: its pins go on counting.
    pub(crate) fn condemn(&mut self, key: Key, fault: String) {
        if let Some(reader) = self.readers.get_mut(&key) {
            reader.deaf = true;
        }
        self.turn_away(key, fault);
    }

    /// Notes that a reader cannot use the models, once, and shuts its mailbox: a
    /// worker that has failed for good must not take slots from the others. What
    /// it pins goes on counting; pins that were looked for before are to be
    /// looked for again.
    pub(crate) fn reject(&mut self, key: Key, reason: String) {
        self.mark_changed(key);
        let Some(reader) = self.readers.get_mut(&key) else {
            return;
        };
        if reader.unusable.is_none() {
            if let Some(mailbox) = self.plan.shut(key) {
                reader.take_down(mailbox);
            }
            reader.owed.clear();
        }
        let reason = reader.unusable.get_or_insert(reason).clone();
        if std::mem::replace(&mut reader.reported, true) {
            return;
        }
        let one = Rejected {
            key,
            pid: reader.pid(),
            reason,
        };
        // A sender that never asks forgets the oldest.
        if self.rejected.len() >= MAX_GONE {
            self.rejected.remove(0);
        }
        self.rejected.push(one);
    }

    /// The rejections that nobody has been told of, of those `wanted`.
    pub(crate) fn report_rejected(&mut self, wanted: impl Fn(WorkerId) -> bool) -> Vec<Rejected> {
        if self.rejected.is_empty() {
            return Vec::new();
        }
        let all = std::mem::take(&mut self.rejected);
        let (reported, kept) = all.into_iter().partition(|one| wanted(one.key.0));
        self.rejected = kept;
        reported
    }

    /// Removes a reader, and with it its pins. Called only once its process is
    /// known to be dead, or once it has closed its end with every snapshot gone.
    pub(crate) fn bury(&mut self, key: Key, unless_left: Departure) {
        let Some(reader) = self.remove(key) else {
            return;
        };
        self.mark_changed(key);
        let gone = Gone::new(key, &reader, unless_left, self.models);
        if !reader.retired {
            self.miss(&gone);
        }
        if self.gone.len() >= MAX_GONE
            && let Some(forgotten) = self.gone.pop_front()
        {
            self.unreported -= usize::from(!forgotten.reported);
        }
        self.unreported += usize::from(!gone.reported);
        self.gone.push_back(gone);
    }

    /// Takes a reader out of the plan once it has closed its end, and notes that it went.
    /// Whether it has left.
    pub(crate) fn retire(&mut self, key: Key) -> bool {
        let Some(reader) = self.readers.get_mut(&key) else {
            return true;
        };
        let before = reader.retired;
        let has_left = reader.retire(&mut self.plan, key);
        if has_left && !before {
            self.miss_retired(key);
        }
        has_left
    }

    /// Notes a reader that has closed its end while snapshots of it live on, if it did
    /// not leave in order: nothing is published to it any more, and that is a line.
    pub(crate) fn miss_retired(&mut self, key: Key) {
        if let Some(reader) = self.readers.get(&key) {
            let gone = Gone::new(key, reader, Departure::Left, self.models);
            self.miss(&gone);
        }
    }

    /// Misses one that went, unless it left in order, never had anything, or another has
    /// its number. One that left in order is the last of its number. If one is missed and
    /// its successor ends before it had anything, the successor is missed in its place.
    fn miss(&mut self, gone: &Gone) {
        if self.is_back(gone) {
            return;
        }
        let worker = gone.key.0;
        let had_none = gone.versions.iter().all(|version| version.is_none());
        if had_none && (gone.is_in_order() || !self.missing.contains_key(&worker)) {
            return;
        }
        if gone.is_in_order() {
            self.missing.remove(&worker);
            return;
        }
        if self.missing.len() >= MAX_GONE {
            self.missing.pop_first();
        }
        self.missing.insert(worker, gone.clone());
    }

    /// Whether a reader that joined later has the number of one that is gone.
    fn is_back(&self, gone: &Gone) -> bool {
        let (worker, joined) = gone.key;
        let later = (worker, joined + 1)..=(worker, u64::MAX);
        self.readers.range(later).next().is_some()
    }

    /// Misses these no more, until they come and go again.
    pub(crate) fn forget(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            self.missing.remove(worker);
        }
    }

    /// Those that failed, died or were lost and are not back.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &Gone> {
        self.missing.values().filter(|gone| !self.is_back(gone))
    }

    /// Those that have joined and are gone, the last of each number, in the order in which
    /// they joined: as far as that is remembered.
    pub(crate) fn gone(&self) -> Vec<Gone> {
        let closed = self.readers.iter().filter(|(_, reader)| reader.has_left());
        let closed =
            closed.map(|(key, reader)| Gone::new(*key, reader, Departure::Left, self.models));
        let mut all: Vec<_> = self.gone.iter().cloned().chain(closed).collect();
        all.sort_by_key(|gone| gone.key.1);
        all
    }

    /// What is known of a reader that was there, and whether that was told before;
    /// nobody need be told again.
    pub(crate) fn report_gone(&mut self, key: Key) -> Option<Gone> {
        let one = self.gone.iter_mut().rev().find(|one| one.key == key)?;
        let before = one.clone();
        if !std::mem::replace(&mut one.reported, true) {
            self.unreported -= 1;
        }
        Some(before)
    }

    /// Takes back that somebody was told that a reader has gone.
    pub(crate) fn unreport(&mut self, key: Key) {
        if let Some(reader) = self.readers.get_mut(&key) {
            reader.reported = false;
        } else if let Some(one) = self.gone.iter_mut().rev().find(|one| one.key == key)
            && std::mem::replace(&mut one.reported, false)
        {
            self.unreported += 1;
        }
    }

    /// Those that went and that nobody has been told of, of those `wanted`.
    pub(crate) fn report_unreported(&mut self, wanted: impl Fn(WorkerId) -> bool) -> Vec<Gone> {
        if self.unreported == 0 {
            return Vec::new();
        }
        let mut reported = Vec::new();
        for one in &mut self.gone {
            if !one.reported && wanted(one.key.0) {
                one.reported = true;
                self.unreported -= 1;
                reported.push(one.clone());
            }
        }
        reported
    }
}
