//! All that changes, under one lock: the plan, the readers that are present, those that left,
//! and those that can use nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use weightsync_core::{Outcome, WorkerId, WorkerStatus};

use super::RegisteredReader;
use crate::grow::Growth;
use crate::plan::{Key, PageChange, Plan};
use crate::service::deny;
use crate::set::ModelMask;
use crate::slot::Slot;
use crate::wire::Delivery;

/// How many departed readers are remembered.
const MAX_GONE: usize = 1 << 16;

/// The state that the lock guards.
#[derive(Debug)]
pub(crate) struct RegistryState {
    pub(crate) plan: Plan,
    /// How many models there are.
    models: usize,
    pub(crate) readers: BTreeMap<Key, RegisteredReader>,
    /// Readers whose pages hold facts that are not stored here as well.
    followed: BTreeSet<Key>,
    /// How many readers are processes of this host.
    processes: usize,
    /// For each thread that waits for remote readers, those that have changed.
    changed: BTreeMap<u64, BTreeSet<Key>>,
    /// The number given to the last such thread.
    last_listener: u64,
    /// How many readers have joined so far.
    pub(crate) joined: u64,
    /// The readers that departed last, and those that no report has named yet.
    gone: VecDeque<GoneReader>,
    /// How many of them no report has named yet.
    unreported: usize,
    /// Readers that had loaded a version and then failed, died or were lost, by worker. Every
    /// publication for such a worker has a line about it, until the worker is back or forgotten.
    missing: BTreeMap<WorkerId, GoneReader>,
    rejected: Vec<Rejected>,
    /// The data slots of each model.
    pub(crate) slots: Vec<Vec<Arc<Slot>>>,
    /// The state of each model's growth.
    pub(crate) growth: Vec<Growth>,
    /// A buffer for steps, kept to be used again.
    pub(crate) steps: Vec<PageChange>,
}

/// A record of a reader that has departed.
#[derive(Clone, Debug)]
pub(crate) struct GoneReader {
    pub(crate) key: Key,
    /// Its last status.
    pub(crate) status: WorkerStatus,
    pub(crate) departure: Departure,
    /// Why the reader could use nothing more, if it said so. It then counts as failed, however it
    /// departed.
    pub(crate) reason: Option<String>,
    pub(crate) applied: u64,
    pub(crate) models: ModelMask,
    pub(crate) reported: bool,
}

impl GoneReader {
    /// What its line says.
    pub(crate) fn outcome(&self) -> Outcome {
        self.departure.outcome(self.reason.clone())
    }

    /// Whether the reader closed its end without giving a reason.
    pub(crate) fn is_in_order(&self) -> bool {
        self.departure == Departure::Left && self.reason.is_none()
    }
}

/// How a reader departed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// The reader closed its end in order.
    Left,
    /// The reader's process died.
    Died,
    /// The reader was silent for too long: its link, or the relay that acted for it, is gone. It
    /// may come back.
    Lost,
}

impl Departure {
    /// What its line says; `reason` is why it could use nothing more, if it said so.
    pub(crate) fn outcome(self, reason: Option<String>) -> Outcome {
        match (self, reason) {
            (_, Some(reason)) => Outcome::Failed { reason },
            (Self::Left, None) => Outcome::Left,
            (Self::Died, None) => Outcome::Died,
            (Self::Lost, None) => Outcome::Lost,
        }
    }
}

/// A reader that cannot use the models, whatever the version.
#[derive(Clone, Debug)]
pub(crate) struct Rejected {
    pub(crate) key: Key,
    pub(crate) pid: u32,
    pub(crate) reason: String,
}

impl GoneReader {
    /// The record of a departing reader. `unless_left` applies unless the reader closed its end.
    fn new(key: Key, reader: &RegisteredReader, unless_left: Departure, models: usize) -> Self {
        let applied = reader.applied();
        let reason = reader.unusable.clone();
        let departure = match reader.has_left() {
            true => Departure::Left,
            false => unless_left,
        };
        // A worker that gives up joining also says that it leaves.
        // No report needs a line about it.
        let never_joined = departure == Departure::Left && applied == 0 && reason.is_none();
        Self {
            key,
            status: reader.status(key.0, models),
            departure,
            reason,
            applied,
            models: reader.models,
            reported: reader.reported || never_joined,
        }
    }
}

impl RegistryState {
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

    /// Adds a reader.
    pub(crate) fn add(&mut self, key: Key, reader: RegisteredReader) {
        // A remote reader that takes only the newest set changes nothing in its page that the plan
        // must read. There may be 65,536 of them, so scans leave them out.
        let process = reader.socket().is_some();
        self.processes += usize::from(process);
        if process || reader.delivery != Delivery::Newest {
            self.followed.insert(key);
        }
        self.readers.insert(key, reader);
    }

    /// Removes a reader; its pins no longer count.
    pub(crate) fn remove(&mut self, key: Key) -> Option<RegisteredReader> {
        let reader = self.readers.remove(&key)?;
        self.processes -= usize::from(reader.socket().is_some());
        self.followed.remove(&key);
        // Its process may still map the mailbox after this end has dropped it.
        if let Some(mailbox) = self.plan.leave(key) {
            reader.take_down(mailbox);
        }
        Some(reader)
    }

    /// Notes that a reader asks questions, and may ask more.
    pub(crate) fn asks(&mut self, key: Key) -> Option<&RegisteredReader> {
        let reader = self.readers.get_mut(&key)?;
        reader.asks = true;
        // The plan must learn from the page when the reader is through with an answer.
        self.followed.insert(key);
        Some(reader)
    }

    /// How many readers are processes of this host, and how many are remote readers.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.processes, self.readers.len() - self.processes)
    }

    /// Calls `look` for each reader whose pages must be read, with the plan. A remote reader that
    /// takes only the newest pins nothing, so it is left out: there may be very many.
    pub(crate) fn follow(&mut self, mut look: impl FnMut(&mut Plan, Key, &mut RegisteredReader)) {
        for key in &self.followed {
            if let Some(reader) = self.readers.get_mut(key) {
                look(&mut self.plan, *key, reader);
            }
        }
    }

    /// The readers that are processes of this host.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (Key, &RegisteredReader)> {
        let followed = self.followed.iter();
        let readers = followed.filter_map(|key| Some((*key, self.readers.get(key)?)));
        readers.filter(|(_, reader)| reader.socket().is_some())
    }

    /// Starts noting which remote readers [change](Self::mark_changed), for one waiting thread.
    pub(crate) fn listen(&mut self) -> u64 {
        self.last_listener += 1;
        self.changed.insert(self.last_listener, BTreeSet::new());
        self.last_listener
    }

    /// The remote readers that have changed since the last call.
    pub(crate) fn take_changed(&mut self, listener: u64) -> BTreeSet<Key> {
        let changed = self.changed.get_mut(&listener);
        changed.map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn stop_listening(&mut self, listener: u64) {
        self.changed.remove(&listener);
    }

    /// Notes that a remote reader has changed.
    pub(crate) fn mark_changed(&mut self, key: Key) {
        // Each waiting thread has its own list, so that none takes what another has not seen.
        for changed in self.changed.values_mut() {
            changed.insert(key);
        }
    }

    /// Rejected readers that no report has named yet.
    pub(super) fn rejected(&self) -> &[Rejected] {
        &self.rejected
    }

    /// Rejects a reader on the sender's behalf, and tells the reader; otherwise it would wait for
    /// ever.
    pub(crate) fn turn_away(&mut self, key: Key, reason: String) {
        if let Some(socket) = self.readers.get(&key).and_then(RegisteredReader::socket) {
            deny(socket, reason.clone());
        }
        self.reject(key, reason);
    }

    /// Rejects a reader that breaks the protocol, and ignores its messages from now on. It lives
    /// and may hold snapshots, so its pins still count.
    pub(crate) fn condemn(&mut self, key: Key, fault: String) {
        if let Some(reader) = self.readers.get_mut(&key) {
            reader.deaf = true;
        }
        self.turn_away(key, fault);
    }

    /// Notes once that a reader cannot use the models, and shuts its mailbox: a worker that has
    /// failed for good must not take slots from the others. Its pins still count, and the caller
    /// must look for pins again.
    pub(crate) fn reject(&mut self, key: Key, reason: String) {
        // First, because a send that waits for a remote reader looks only at those that changed.
        self.mark_changed(key);
        let Some(reader) = self.readers.get_mut(&key) else {
            return;
        };
        // Only once: a reader that is rejected again has no mailbox left.
        if reader.unusable.is_none() {
            if let Some(mailbox) = self.plan.shut(key) {
                reader.take_down(mailbox);
            }
            reader.owed.clear();
        }
        let reason = reader.unusable.get_or_insert(reason).clone();
        // A reader that left has its line already, or was rejected before.
        if std::mem::replace(&mut reader.reported, true) {
            return;
        }
        let one = Rejected {
            key,
            pid: reader.pid(),
            reason,
        };
        // If nobody asks for rejections, the oldest is forgotten.
        if self.rejected.len() >= MAX_GONE {
            self.rejected.remove(0);
        }
        self.rejected.push(one);
    }

    /// The rejections of `wanted` workers that no report has named yet; they now count as reported.
    pub(crate) fn report_rejected(&mut self, wanted: impl Fn(WorkerId) -> bool) -> Vec<Rejected> {
        if self.rejected.is_empty() {
            return Vec::new();
        }
        // A send to some workers leaves the rejections of the others for the next report.
        let all = std::mem::take(&mut self.rejected);
        let (reported, kept) = all.into_iter().partition(|one| wanted(one.key.0));
        self.rejected = kept;
        reported
    }

    /// Removes a reader and its pins. Called only once its process is known to be dead, or once it
    /// has closed its end and all its snapshots are gone.
    pub(crate) fn bury(&mut self, key: Key, unless_left: Departure) {
        // Both the service thread and a newcomer of the same number may bury a reader. The first
        // does it.
        let Some(reader) = self.remove(key) else {
            return;
        };
        self.mark_changed(key);
        let gone = GoneReader::new(key, &reader, unless_left, self.models);
        // A retired reader was counted when it closed its end (`miss_retired`).
        if !reader.retired {
            self.miss(&gone);
        }
        if self.gone.len() >= MAX_GONE
            && let Some(forgotten) = self.gone.pop_front()
        {
            // A departure that no report has named by now is lost, or the list would grow without
            // end.
            self.unreported -= usize::from(!forgotten.reported);
        }
        self.unreported += usize::from(!gone.reported);
        self.gone.push_back(gone);
    }

    /// Removes a reader that has closed its end from the plan, and notes its departure. Returns
    /// whether it has left.
    pub(crate) fn retire(&mut self, key: Key) -> bool {
        let Some(reader) = self.readers.get_mut(&key) else {
            return true;
        };
        let before = reader.retired;
        let has_left = reader.retire(&mut self.plan, key);
        // Noted once, although several scans may find that the reader has left.
        if has_left && !before {
            self.miss_retired(key);
        }
        has_left
    }

    /// Counts a reader as missing if it has closed its end, not in order, while some of its
    /// snapshots live on. It gets no more publications, and reports have a line about it.
    pub(crate) fn miss_retired(&mut self, key: Key) {
        if let Some(reader) = self.readers.get(&key) {
            let gone = GoneReader::new(key, reader, Departure::Left, self.models);
            self.miss(&gone);
        }
    }

    /// Counts a departed reader as missing, unless it left in order, never loaded anything, or has
    /// a successor. A reader that leaves in order also ends the line about its predecessor. If a
    /// successor ends before it has loaded anything, it is missing in place of its predecessor.
    fn miss(&mut self, gone: &GoneReader) {
        // The successor stands for the worker: its line says how the worker is.
        if self.is_back(gone) {
            return;
        }
        let worker = gone.key.0;
        let had_none = !gone.status.is_ready();
        // A worker belongs to the sender once it has loaded a version. One that never did counts
        // only in the place of a predecessor that is missing.
        if had_none && (gone.is_in_order() || !self.missing.contains_key(&worker)) {
            return;
        }
        // The worker has come back and left in order, so nothing is missing any more.
        if gone.is_in_order() {
            self.missing.remove(&worker);
            return;
        }
        if self.missing.len() >= MAX_GONE {
            self.missing.pop_first();
        }
        self.missing.insert(worker, gone.clone());
    }

    /// Whether a later reader has the number of a departed one.
    fn is_back(&self, gone: &GoneReader) -> bool {
        let (worker, joined) = gone.key;
        // Keys grow with each join, so a later reader of the number has a greater one.
        let later = (worker, joined + 1)..=(worker, u64::MAX);
        self.readers.range(later).next().is_some()
    }

    /// Removes these workers from the missing ones, until they come and depart again.
    pub(crate) fn forget(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            self.missing.remove(worker);
        }
    }

    /// Readers that failed, died or were lost, and are not back.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &GoneReader> {
        self.missing.values().filter(|gone| !self.is_back(gone))
    }

    /// Departed readers that are still remembered, the last of each number, in the order in which
    /// they joined.
    pub(crate) fn gone(&self) -> Vec<GoneReader> {
        // A reader that closed its end stays among the readers while its snapshots live, and has
        // departed all the same.
        let closed = self.readers.iter().filter(|(_, reader)| reader.has_left());
        let closed =
            closed.map(|(key, reader)| GoneReader::new(*key, reader, Departure::Left, self.models));
        let mut all: Vec<_> = self.gone.iter().cloned().chain(closed).collect();
        all.sort_by_key(|gone| gone.key.1);
        all
    }

    /// The record of a departed reader, and whether it was reported before; it counts as reported
    /// from now on.
    pub(crate) fn report_gone(&mut self, key: Key) -> Option<GoneReader> {
        let one = self.gone.iter_mut().rev().find(|one| one.key == key)?;
        let before = one.clone();
        if !std::mem::replace(&mut one.reported, true) {
            self.unreported -= 1;
        }
        Some(before)
    }

    /// Marks a departed reader as not reported again.
    pub(crate) fn unreport(&mut self, key: Key) {
        // The reader may have been buried since its line was made.
        if let Some(reader) = self.readers.get_mut(&key) {
            reader.reported = false;
        } else if let Some(one) = self.gone.iter_mut().rev().find(|one| one.key == key)
            && std::mem::replace(&mut one.reported, false)
        {
            self.unreported += 1;
        }
    }

    /// Departed readers of `wanted` workers that no report has named yet; they now count as
    /// reported. A reader that has closed its end while some of its snapshots live on has departed
    /// too.
    pub(crate) fn report_unreported(
        &mut self,
        wanted: impl Fn(WorkerId) -> bool,
    ) -> Vec<GoneReader> {
        let mut reported = Vec::new();
        // Nearly every send finds nothing here, and the list may be long.
        if self.unreported > 0 {
            for one in &mut self.gone {
                if !one.reported && wanted(one.key.0) {
                    one.reported = true;
                    self.unreported -= 1;
                    reported.push(one.clone());
                }
            }
        }
        for (key, reader) in &mut self.readers {
            if !reader.reported && wanted(key.0) && reader.has_left() {
                reported.push(GoneReader::new(*key, reader, Departure::Left, self.models));
                reader.reported = true;
            }
        }
        reported
    }
}
