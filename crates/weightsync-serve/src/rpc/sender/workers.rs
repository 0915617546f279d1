//! The workers of a sender, and the connections by which each is reached.
//!
//! **Guarantee.** In the sender's segment every worker is a [remote
//! reader](weightsync_mem::RemoteReader). The segment decides which set the worker should run,
//! and records what became of it. This table adds what HTTP needs: the connection that reaches
//! the worker, the last call, and the version that the worker fetches.
//!
//! * A worker has at most one remote reader. A process that registers again keeps its own.
//! * A worker is called by its newest connection. When that connection ends, an older open
//!   connection replaces it.
//! * A connection has a name that only its worker is told. All workers have the same bearer, so the
//!   name alone says which worker sends a message.
//! * A sequence above the last that the sender has given out is refused, and the message changes
//!   nothing. Other numbers that a worker sends are reduced to what was published to it.

mod versions;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::watch;
use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_engine::transport::{Attendance, Deadline, ModelSpec, SendHistory};
use weightsync_engine::{
    Epoch, ModelId, Result, Run, SenderStatus, Version, WorkerId, WorkerRoute,
};
use weightsync_link::access::Access;
use weightsync_mem::passed;
use weightsync_mem::threads::LockExt as _;
use weightsync_mem::{
    Delivery, Departure, ModelMask, NotifiedSet, RemoteReader, RemoteReaderOptions, RemoteReaders,
    Snapshot, Want,
};

pub(super) use self::versions::ServingVersion;
use crate::http::{Bearer, ProofKey};
use crate::rpc::wait_on;
use crate::rpc::wire::{Applied, Digits, url};

/// One registration of a worker. A worker that registers again gets another one.
pub(super) type ConnectionId = u64;

/// A worker's registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerRegistration {
    pub(super) worker: WorkerId,
    pub(super) pid: u32,
    /// The address at which the sender calls the worker. Another process of the same number, in
    /// another container for example, has another address.
    pub(super) addr: SocketAddr,
    pub(super) device: String,
    /// The models that the worker takes.
    pub(super) wanted: ModelMask,
    /// The worker announces when its rendez-vous is over.
    pub(super) announces: bool,
}

impl WorkerRegistration {
    /// Whether both are the same receiver of the same process.
    fn is_same(&self, other: &Self) -> bool {
        // The device is left out: it is a label for people.
        (self.pid, self.addr, self.wanted) == (other.pid, other.addr, other.wanted)
    }
}

/// The outcome of a question.
#[derive(Debug)]
pub(super) enum QuestionAnswer {
    /// The sequence is 0 for a set other than the newest.
    Set {
        sequence: u64,
        members: Vec<Snapshot>,
    },
    /// The worker has no such version; these exist, newest first.
    Unknown { known: Vec<Version> },
    /// No answer yet: the question waits under this number.
    Later(u64),
    /// The worker has asked for another set since.
    Replaced,
    /// The worker has gone, or cannot use anything, or does not take that model.
    Gone,
}

/// Why a worker's message does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Uncounted {
    /// The connection has ended, or is of another sender.
    #[error("this sender no longer has this worker: register again")]
    Gone,
    /// No call has this sequence.
    #[error(
        "the sequence {got} is above {reached}, the last that this sender has given out: report the \
         sequence of the call or the answer; the message changes nothing"
    )]
    Ahead { got: u64, reached: u64 },
}

#[derive(Debug)]
struct RegisteredWorker {
    registration: WorkerRegistration,
    reader: RemoteReader,
    /// Wakes the tasks that call the worker and those that wait with its questions.
    changes: Arc<watch::Sender<()>>,
    /// The worker's own rendez-vous is over.
    joined: bool,
    /// The newest sequence that the worker has fetched and checked.
    staged: u64,
    /// The newest sequence that the worker has refused.
    refused: u64,
    /// The worker can use nothing at all.
    rejected: bool,
    /// The number of the worker's last question.
    asked: u64,
}

impl RegisteredWorker {
    /// The newest set that the worker should have.
    fn newest(&self) -> Option<NotifiedSet> {
        // An error means that the sender ends.
        let newest = self.reader.notifications().ok()?.pop()?;
        // A set without members asks the worker to run nothing, so there is nothing to call it
        // with.
        (!newest.members.is_empty()).then_some(newest)
    }

    fn sequence(&self) -> u64 {
        self.newest().map_or(0, |newest| newest.sequence)
    }

    /// A worker cannot have a set with which it was not called.
    fn at_most_notified(&self, sequence: u64) -> u64 {
        // The worker's number comes from outside. Without the minimum a worker could report a set
        // that was published to others only.
        sequence.min(self.sequence())
    }
}

#[derive(Debug)]
struct WorkerConnection {
    worker: WorkerId,
    name: Digits,
    /// The sequence that the worker was called with last.
    called: u64,
    /// The versions of the last call that the worker has not fetched yet.
    calling: Vec<Snapshot>,
    /// The worker has begun to fetch those versions.
    has_begun: bool,
    /// The worker was silent for so long that a sender that ends does not wait for it. The
    /// worker may be stopped: it is late, and not dead.
    silent: bool,
    /// How many signs of life came over this connection.
    signs: u64,
}

#[derive(Debug, Default)]
struct WorkerTable {
    workers: BTreeMap<WorkerId, RegisteredWorker>,
    connections: BTreeMap<ConnectionId, WorkerConnection>,
    // Numbers only grow, so a worker's highest number is its newest connection.
    last: ConnectionId,
    /// Versions whose bytes are on their way to a worker, with the number of answers.
    serving: BTreeMap<(ConnectionId, usize, Version), usize>,
}

impl WorkerTable {
    /// The newest connection of a worker.
    fn current(&self, worker: WorkerId) -> Option<ConnectionId> {
        let mut connections = self.connections.iter().rev();
        let newest = connections.find(|(_, connection)| connection.worker == worker);
        newest.map(|(id, _)| *id)
    }

    fn worker(&mut self, id: ConnectionId) -> Option<&mut RegisteredWorker> {
        let connection = self.connections.get(&id)?;
        self.workers.get_mut(&connection.worker)
    }

    /// The connection of another worker that has the number of one that registers.
    fn holder(&self, registration: &WorkerRegistration) -> Option<ConnectionId> {
        let holder = &self.workers.get(&registration.worker)?.registration;
        let is_other = (holder.pid, holder.addr) != (registration.pid, registration.addr);
        is_other
            .then(|| self.current(registration.worker))
            .flatten()
    }

    /// Forgets a worker and its connections.
    fn remove(&mut self, worker: WorkerId, departure: Departure) {
        // The connections go first: their tasks find their number gone and end without a departure
        // of their own.
        self.connections.retain(|_, one| one.worker != worker);
        if let Some(gone) = self.workers.remove(&worker) {
            gone.reader.leave(departure);
            // The tasks of the old registration wait on this channel. They wake, see that their
            // connection is gone, and end.
            gone.changes.send_replace(());
        }
    }
}

/// The state that the trainer's thread and the serving thread share.
#[derive(Debug)]
pub(super) struct SharedSender {
    table: Mutex<WorkerTable>,
    /// A worker has staged or refused something, or has gone.
    changed: Condvar,
    remote_readers: RemoteReaders,
    models: Vec<ModelSpec>,
    /// The models' descriptions as JSON, each made at its first request.
    described: Vec<OnceLock<Bytes>>,
    pub(super) run: Run,
    pub(super) url: String,
    pub(super) access: Access,
    /// Admits the sender's calls to workers.
    pub(super) bearer: Bearer,
    /// Proves to workers that this is their sender.
    pub(super) proof: ProofKey,
    log_limiter: Mutex<LogLimiter>,
    history: Arc<SendHistory>,
}

impl SharedSender {
    /// The sender's status.
    pub(super) fn status(&self) -> SenderStatus {
        let roster = |status: &mut SenderStatus| status.workers = self.remote_readers.roster();
        self.history.status(roster)
    }

    /// Logs why workers cannot be called back, once a minute: they try again and again.
    pub(super) fn complain(&self, why: &str) {
        let mut limiter = self.log_limiter.locked();
        if let Some(held_back) = limiter.logs("callback", Instant::now()) {
            log_limiter::warn(held_back, why);
        }
    }

    pub(super) fn new(
        models: Vec<ModelSpec>,
        remote_readers: RemoteReaders,
        (found, secret): (SocketAddr, &[u8; 16]),
        access: Access,
        history: Arc<SendHistory>,
    ) -> Self {
        Self {
            history,
            table: Mutex::default(),
            log_limiter: Mutex::default(),
            changed: Condvar::new(),
            run: remote_readers.run(),
            remote_readers,
            described: models.iter().map(|_| OnceLock::new()).collect(),
            models,
            url: url(found, access.tls.as_ref()),
            access,
            bearer: Bearer::to_worker(secret),
            proof: ProofKey::new(secret),
        }
    }

    fn table(&self) -> MutexGuard<'_, WorkerTable> {
        self.table.locked()
    }
}

/// Registrations and departures.
impl SharedSender {
    /// Notes that this process lacked a descriptor for a connection with a worker.
    pub(super) fn note_failed_accept(&self, error: &io::Error) {
        self.remote_readers.note_failed_accept(error);
    }

    /// The connection of another worker that has the number of one that registers.
    pub(super) fn holder(&self, registration: &WorkerRegistration) -> Option<ConnectionId> {
        self.table().holder(registration)
    }

    /// Joins a remote reader for a worker.
    ///
    /// # Errors
    ///
    /// As [`RemoteReaders::join`].
    fn join_segment(
        &self,
        registration: &WorkerRegistration,
    ) -> Result<RegisteredWorker, weightsync_mem::Error> {
        let changes = Arc::new(watch::Sender::new(()));
        let theirs = changes.clone();
        let options = RemoteReaderOptions {
            worker: registration.worker,
            pid: registration.pid,
            // `check` has compared the epochs already.
            seen: Epoch(0),
            models: registration.wanted,
            delivery: Delivery::Newest,
            device: registration.device.clone(),
            location: (registration.addr.ip().to_string(), WorkerRoute::Http),
        };
        // The segment calls this under its own lock. Marking a channel as changed neither waits
        // nor calls the segment.
        let call = move |_| theirs.send_replace(());
        Ok(RegisteredWorker {
            reader: self.remote_readers.join(options, call)?,
            registration: registration.clone(),
            changes,
            joined: !registration.announces,
            staged: 0,
            refused: 0,
            rejected: false,
            asked: 0,
        })
    }

    /// Admits a worker, whose connection gets this name, and gives up `holder`. Refuses the worker if
    /// another connection than `holder` has its number. Returns the new connection and the sequence of the
    /// worker's first call.
    ///
    /// # Errors
    ///
    /// As [`RemoteReaders::join`].
    pub(super) fn admit(
        &self,
        registration: &WorkerRegistration,
        name: Digits,
        holder: Option<ConnectionId>,
    ) -> Result<Option<(ConnectionId, u64)>, weightsync_mem::Error> {
        // One lock from the check to the insertion: two workers with one number cannot both get in.
        let mut table = self.table();
        // Another connection has taken the number since the caller looked. The caller looks again.
        if table.holder(registration) != holder {
            return Ok(None);
        }
        let known = table.workers.get_mut(&registration.worker);
        if let Some(worker) = known.filter(|worker| worker.registration.is_same(registration)) {
            // A worker that registers again does not announce. It stays joined if it had joined
            // before.
            worker.joined |= !registration.announces;
        } else {
            // A different receiver takes the number. The remote reader before it goes, with the
            // pins that it holds.
            table.remove(registration.worker, Departure::Died);
            let worker = self.join_segment(registration)?;
            table.workers.insert(registration.worker, worker);
        }
        // The connection is new also for a known worker. It becomes the current one, because its
        // number is the highest.
        table.last += 1;
        let id = table.last;
        let connection = WorkerConnection {
            worker: registration.worker,
            name,
            // No call has been made on this connection, so the newest set is called again. A worker
            // that has it answers at once.
            called: 0,
            calling: Vec::new(),
            has_begun: false,
            silent: false,
            signs: 0,
        };
        table.connections.insert(id, connection);
        // The worker waits for this sequence in its `connect`. With 0 it does not wait for weights.
        let sequence = table.worker(id).map_or(0, |worker| worker.sequence());
        Ok(Some((id, sequence)))
    }

    /// A connection has ended. The worker goes with its last one.
    pub(super) fn end(&self, id: ConnectionId, departure: Departure) {
        let mut table = self.table();
        // A newer registration may have removed the connection already. The worker is then not this
        // connection's to report.
        let Some(WorkerConnection { worker, .. }) = table.connections.remove(&id) else {
            return;
        };
        match table.current(worker) {
            // No other connection reaches the worker: a send that waits for it gets its departure.
            None => table.remove(worker, departure),
            Some(other) => {
                // The remaining connection calls the worker again.
                if let Some(connection) = table.connections.get_mut(&other) {
                    connection.called = 0;
                }
                if let Some(worker) = table.workers.get(&worker) {
                    worker.changes.send_replace(());
                }
            }
        }
        drop(table);
        // A sender that ends may wait for the worker that has just gone.
        self.changed.notify_all();
    }

    pub(super) fn is_here(&self, id: ConnectionId) -> bool {
        self.table().connections.contains_key(&id)
    }

    pub(super) fn registration(&self, id: ConnectionId) -> Option<WorkerRegistration> {
        let mut table = self.table();
        table.worker(id).map(|worker| worker.registration.clone())
    }

    /// Notes whether a connection was silent lately; true if that has changed.
    pub(super) fn note_silence(&self, id: ConnectionId, silent: bool) -> bool {
        let mut table = self.table();
        let Some(connection) = table.connections.get_mut(&id) else {
            return false;
        };
        // Only a real sign counts. `may_come` compares two readings of the counter to see whether
        // the worker lives.
        connection.signs += u64::from(!silent);
        let is_news = std::mem::replace(&mut connection.silent, silent) != silent;
        drop(table);
        if is_news {
            self.changed.notify_all();
        }
        is_news
    }

    pub(super) fn is_silent(&self, id: ConnectionId) -> bool {
        let table = self.table();
        table.connections.get(&id).is_some_and(|one| one.silent)
    }

    /// The number of signs of life on a connection; `None` if it has ended or is silent.
    pub(super) fn signs(&self, id: ConnectionId) -> Option<u64> {
        let table = self.table();
        // A silent connection gives no reading: its holder loses the number at once.
        let connection = table.connections.get(&id).filter(|one| !one.silent);
        connection.map(|one| one.signs)
    }

    /// Wakes a task that acts for a worker.
    pub(super) fn changes(&self, id: ConnectionId) -> Option<watch::Receiver<()>> {
        let mut table = self.table();
        table.worker(id).map(|worker| worker.changes.subscribe())
    }

    /// Leaves out the workers that are still joining. They are called meanwhile, and a worker
    /// that has loaded a version counts.
    pub(super) fn joined_only(&self, there: &Attendance) -> Attendance {
        let table = self.table();
        let mut there = there.clone();
        there.workers.retain(|status| {
            let worker = table.workers.get(&status.worker);
            worker.is_none_or(|worker| worker.joined)
                || status.versions.iter().any(|version| !version.is_none())
        });
        there
    }
}

/// Calls to workers, and their reports.
impl SharedSender {
    /// The next call to a worker, if there is a newer set for it. The set is held until
    /// [`called`](Self::called).
    pub(super) fn next_call(&self, id: ConnectionId) -> Option<NotifiedSet> {
        let mut table = self.table();
        // A worker that has rejected everything is not called again.
        let worker = table.worker(id).filter(|worker| !worker.rejected)?;
        let (number, newest) = (worker.registration.worker, worker.newest()?);
        // Only the newest connection calls. An older one stays as a reserve until it ends.
        if table.current(number) != Some(id) {
            return None;
        }
        let connection = table.connections.get_mut(&id)?;
        if newest.sequence <= connection.called {
            return None;
        }
        // Noted before the call goes out: a newer set that appears meanwhile has a higher sequence
        // and is called next.
        connection.called = newest.sequence;
        // The table holds the members too, because the caller drops its copy as soon as the call is
        // described.
        connection.calling.clone_from(&newest.members);
        connection.has_begun = false;
        Some(newest)
    }

    /// A call is over. The worker is called again if the call did not come through.
    pub(super) fn called(&self, id: ConnectionId, came_through: bool) {
        let mut table = self.table();
        // What the worker has staged it keeps. Only what lies above is called again.
        let staged = table.worker(id).map_or(0, |worker| worker.staged);
        if let Some(connection) = table.connections.get_mut(&id) {
            // A worker that still fetches holds its version by the answer that carries the bytes.
            connection.calling.clear();
            connection.has_begun = false;
            if !came_through {
                connection.called = connection.called.min(staged);
            }
        }
    }

    /// Whether a newer set exists for a worker that has not begun to fetch the set of its call:
    /// the worker may be stopped.
    pub(super) fn is_overtaken(&self, id: ConnectionId, sequence: u64) -> bool {
        let mut table = self.table();
        let newer = table.worker(id).map_or(0, |worker| worker.sequence()) > sequence;
        // A fetch that has begun is finished, so that a slow worker gets a version at all under
        // frequent sends.
        newer && table.connections.get(&id).is_some_and(|one| !one.has_begun)
    }

    pub(super) fn has_begun(&self, id: ConnectionId) -> bool {
        let table = self.table();
        table.connections.get(&id).is_some_and(|one| one.has_begun)
    }

    /// Handles a worker's message on this connection, if it names no sequence or one that was
    /// given out.
    fn update(
        &self,
        id: ConnectionId,
        sequence: Option<u64>,
        what: impl FnOnce(&mut RegisteredWorker),
    ) -> Result<(), Uncounted> {
        let mut table = self.table();
        let worker = table.worker(id).ok_or(Uncounted::Gone)?;
        if let Some(got) = sequence {
            // A number that the sender never gave out is a fault of the worker's program, so the
            // worker is told, and nothing changes.
            let (reached, _) = self.remote_readers.sent_to_all();
            if got > reached {
                return Err(Uncounted::Ahead { got, reached });
            }
        }
        what(worker);
        // The waiter takes the table's lock first, so it is released before the wake.
        drop(table);
        self.changed.notify_all();
        Ok(())
    }

    /// A worker's own rendez-vous is over.
    pub(super) fn joined(&self, id: ConnectionId) -> Result<(), Uncounted> {
        self.update(id, None, |worker| {
            worker.joined = true;
            // Wakes the trainer, which may wait for that.
            worker.reader.progress(0, 0);
        })
    }

    /// A worker has fetched and checked all of it.
    pub(super) fn staged(&self, id: ConnectionId, sequence: u64) -> Result<(), Uncounted> {
        self.update(id, Some(sequence), |worker| {
            let sequence = worker.at_most_notified(sequence);
            worker.staged = worker.staged.max(sequence);
            worker.reader.progress(sequence, 0);
        })
    }

    /// A worker runs these versions from here on.
    pub(super) fn applied(&self, id: ConnectionId, applied: &Applied) -> Result<(), Uncounted> {
        // A worker cannot run a model or a version that does not exist. The other entries of its
        // report count.
        let versions = applied.versions.iter().filter(|runs| {
            runs.model < self.models.len()
                && runs.version <= self.remote_readers.version(runs.model)
        });
        let versions: Vec<_> = versions.map(|runs| (runs.model, runs.version)).collect();
        self.update(id, Some(applied.sequence), |worker| {
            let sequence = worker.at_most_notified(applied.sequence);
            // A worker that runs a set has staged it, also if the line that said so was lost.
            worker.staged = worker.staged.max(sequence);
            worker.reader.progress(sequence, 0);
            worker.reader.applied(sequence, versions);
        })
    }

    /// A worker cannot use the set of this sequence.
    pub(super) fn refused(
        &self,
        id: ConnectionId,
        sequence: u64,
        reason: String,
    ) -> Result<(), Uncounted> {
        self.update(id, Some(sequence), |worker| {
            // A late refusal of an older set must not replace the reason of a newer one.
            if sequence >= worker.refused {
                worker.refused = sequence;
                worker.reader.refuse(Some(sequence), reason);
            }
        })
    }

    /// A worker can use nothing at all.
    pub(super) fn rejected(&self, id: ConnectionId, reason: String) -> Result<(), Uncounted> {
        self.update(id, None, |worker| {
            worker.rejected = true;
            worker.reader.refuse(None, reason);
        })
    }

    /// Waits until every worker that is not silent has staged its set, or cannot.
    pub(super) fn wait_until_handed_over(&self, until: Deadline) {
        let mut table = self.table();
        loop {
            let mut waiting = table.workers.values().filter(|worker| {
                let connection = table.current(worker.registration.worker);
                let connection = connection.and_then(|id| table.connections.get(&id));
                // A worker without a connection, or with a silent one, may be stopped. It would use
                // up the whole wait.
                let is_heard = connection.is_some_and(|connection| !connection.silent);
                is_heard
                    && !worker.rejected
                    // Either outcome is final for this set.
                    && worker.staged.max(worker.refused) < worker.sequence()
            });
            if waiting.next().is_none() || passed(until) {
                return;
            }
            drop(waiting);
            match wait_on(&self.changed, &self.table, table, until) {
                Ok(locked) => table = locked,
                // The caller's interrupt, such as Ctrl-C in Python, ends the wait early.
                Err(_) => return,
            }
        }
    }
}

/// Questions.
impl SharedSender {
    /// A worker asks for a set. Its earlier question gets no answer any more.
    pub(super) fn ask(&self, id: ConnectionId, want: Want) -> QuestionAnswer {
        let mut table = self.table();
        let Some(worker) = table.worker(id).filter(|worker| !worker.rejected) else {
            return QuestionAnswer::Gone;
        };
        // One question at a time, as in the segment. The number tells an older waiting request that
        // its question was replaced.
        worker.asked += 1;
        match worker.reader.ask(worker.asked, want) {
            Ok(()) => QuestionAnswer::Later(worker.asked),
            Err(weightsync_mem::Error::NoSuchVersion { known, .. }) => {
                QuestionAnswer::Unknown { known }
            }
            // The segment has ended, or the worker may not ask this.
            Err(_) => QuestionAnswer::Gone,
        }
    }

    /// The answer to a question, if it is there.
    pub(super) fn answer(&self, id: ConnectionId, question: u64) -> QuestionAnswer {
        let mut table = self.table();
        let Some(worker) = table.worker(id).filter(|worker| !worker.rejected) else {
            return QuestionAnswer::Gone;
        };
        // A later request of the worker, perhaps over another connection, asks for something else.
        if worker.asked != question {
            return QuestionAnswer::Replaced;
        }
        let members = match worker.reader.answered() {
            Ok(Some((to, answer))) if to == question => answer.members,
            // The segment has answered another question, or none yet.
            Ok(_) => return QuestionAnswer::Later(question),
            Err(_) => return QuestionAnswer::Gone,
        };
        // The segment keeps an answer until this is reported, and has one place for it.
        worker.reader.progress(0, question);
        let versions = |members: &[Snapshot]| -> Vec<_> {
            let versions = members.iter();
            versions.map(|one| (one.model(), one.version())).collect()
        };
        // An answer that happens to be the newest set carries that set's sequence. The worker then
        // does not get it a second time as a call.
        let newest = worker.newest();
        let newest = newest.filter(|newest| versions(&newest.members) == versions(&members));
        QuestionAnswer::Set {
            sequence: newest.map_or(0, |newest| newest.sequence),
            members,
        }
    }

    /// A worker no longer waits for the answer to a question.
    pub(super) fn withdraw(&self, id: ConnectionId, question: u64) {
        let mut table = self.table();
        // A question that was replaced belongs to another request, which still waits.
        let worker = table.worker(id).filter(|one| one.asked == question);
        if let Some(worker) = worker {
            worker.reader.withdraw();
            // If the answer came at the same time, it is dropped, so that its slot becomes free.
            worker.reader.progress(0, question);
        }
    }
}

/// Descriptions and names.
impl SharedSender {
    /// The description of a model that workers get.
    pub(super) fn described(&self, model: usize) -> Option<Bytes> {
        let spec = self.models.get(model)?;
        let described = self.described[model].get_or_init(|| {
            let text = serde_json::to_vec(spec);
            text.unwrap_or_else(|_| unreachable!("a model's description has text keys"))
                .into()
        });
        Some(described.clone())
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &ModelId> {
        self.models.iter().map(|model| &model.id)
    }

    /// The connection of a name, if it has not ended. The time tells nothing of other names.
    pub(super) fn named(&self, name: &str) -> Option<ConnectionId> {
        // `Digits` compare in constant time: a wrong name learns nothing from the time of its
        // refusal.
        let name = Digits::try_from(name.to_owned()).ok()?;
        let table = self.table();
        let mut connections = table.connections.iter();
        connections
            .find(|(_, connection)| connection.name == name)
            .map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests;
