//! Readers outside this host, for which code in the sender's own process acts.
//!
//! **Guarantee.** The sender treats a remote reader like any other reader: it gives the reader
//! a mailbox, waits for it, holds it and names it in reports. [`RemoteReader::notifications`]
//! hands out the sets that the reader is to run. The sender itself pins each set for as long as
//! the caller holds it. The caller reports here what became of each set. A remote reader costs
//! the sender no descriptor, no mapping and no thread.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

use rustix::io::Errno;
use weightsync_core::{Epoch, Run, Version, WorkerId, WorkerRoute, WorkerStatus};

use crate::error::{Error, os};
use crate::plan::{Answer, Key};
use crate::protocol::order;
use crate::registry::{
    Departure, MAX_REMOTE_READERS, MailboxCall, ReaderEnd, RegisteredReader, RegistryState,
    SharedRegistry,
};
use crate::service::JoinRequest;
use crate::set::{ModelMask, ModelSet, SetEntry};
use crate::shared::{PrivatePages, ReaderExit};
use crate::snapshot::Snapshot;
use crate::sync::load_acquire;
use crate::wire::{Delivery, MAX_DEVICE, Want};
use crate::writer::SegmentWriter;

/// Adds remote readers to a sender. May outlive the sender; joins then fail.
#[derive(Clone, Debug)]
pub struct RemoteReaders {
    shared: Arc<SharedRegistry>,
}

/// How a remote reader joins.
#[derive(Clone, Debug)]
pub struct RemoteReaderOptions {
    /// The worker's number, unique among the sender's readers.
    pub worker: WorkerId,
    /// The worker's process, on its own host.
    pub pid: u32,
    /// The highest epoch that the worker has seen; a sender below it is refused.
    pub seen: Epoch,
    /// The wanted models; [`ModelMask::ALL`] for all.
    pub models: ModelMask,
    /// Which versions the worker gets.
    pub delivery: Delivery,
    /// Where the worker's weights live, for people to read.
    pub device: String,
    /// The name of the worker's host, and how versions reach it; for people to read.
    pub location: (String, WorkerRoute),
}

/// A set that a remote reader was notified of.
#[derive(Clone, Debug)]
pub struct NotifiedSet {
    /// Grows from one set to the next.
    pub sequence: u64,
    /// One whole version for each model of the set.
    pub members: Vec<Snapshot>,
}

/// A reader on another host. Dropping it counts it as [lost](Departure::Lost).
pub struct RemoteReader {
    shared: Arc<SharedRegistry>,
    key: Key,
    models: ModelMask,
    delivery: Delivery,
    /// How many entries of its queue were handed out.
    handed: AtomicU64,
}

impl RemoteReaders {
    /// For this sender.
    pub fn of(writer: &SegmentWriter) -> Self {
        Self {
            shared: writer.shared.clone(),
        }
    }

    /// The sender's run.
    pub fn run(&self) -> Run {
        self.shared.run
    }

    /// The newest version of a model that was published to any worker.
    ///
    /// # Panics
    ///
    /// If there is no such model, and in a forked child.
    pub fn version(&self, model: usize) -> Version {
        if let Err(error) = self.shared.header.map.usable() {
            panic!("{error}");
        }
        self.shared.state().plan.version(model)
    }

    /// The newest set that was sent to every worker, and the last sequence number that was
    /// given out so far.
    ///
    /// # Panics
    ///
    /// In a forked child.
    pub fn sent_to_all(&self) -> (u64, Vec<(usize, Version)>) {
        if let Err(error) = self.shared.header.map.usable() {
            panic!("{error}");
        }
        let state = self.shared.state();
        let set = state.plan.default_set().iter();
        let set = set.map(|(model, placed)| (model, placed.version));
        (state.plan.sequence(), set.collect())
    }

    /// Bytes of each version of a model.
    ///
    /// # Panics
    ///
    /// If there is no such model.
    pub fn bytes(&self, model: usize) -> u64 {
        self.shared.models[model].model.layout.bytes()
    }

    /// A version of a model, while some worker needs it or the sender keeps it; otherwise `None`.
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] after the end, [`Error::Forked`] in a forked child, and
    /// [`Error::BadOption`] if there is no such model.
    pub fn snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>, Error> {
        self.shared.check_model(model)?;
        let state = self.shared.open_state()?;
        // The lock is held until the pin is there: in between, the slot could be given out again.
        let Some(slot) = state.plan.find(model, version) else {
            return Ok(None);
        };
        let mut set = ModelSet::EMPTY;
        set.put(model, SetEntry { slot, version });
        self.shared.hold(&state, model, &set)
    }

    /// Notes that this process lacked the descriptors or the memory for a connection of a
    /// worker. [`SegmentWriter::wait_readers`] then reports that, and not a missing worker. Other
    /// errors are the worker's, and are not noted.
    pub fn note_failed_accept(&self, error: &std::io::Error) {
        // Descriptors and memory that this process lacks; anything else is the connection's own
        // fault.
        let is_own = |errno: &Errno| {
            let own = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
            own.contains(errno)
        };
        if let Some(errno) = Errno::from_io_error(error).filter(is_own) {
            *self.shared.failure() = Some(os("accepting a worker")(errno));
        }
    }

    /// The readers that are connected, and those that failed, died or were lost and are neither
    /// back nor forgotten, by worker.
    pub fn roster(&self) -> Vec<WorkerStatus> {
        self.shared.roster()
    }

    /// The readers of the sender's own host, by worker.
    pub fn local(&self) -> Vec<WorkerStatus> {
        let mut readers = self.shared.readers();
        if self.shared.header.map.usable().is_ok() {
            let state = self.shared.state();
            readers.retain(|reader| {
                let all = (reader.worker, 0)..=(reader.worker, u64::MAX);
                let mut of_it = state.readers.range(all);
                of_it.any(|(_, one)| one.socket().is_some() && !one.has_left())
            });
        }
        readers
    }

    /// Adds a remote reader. `call` is called with the worker's number whenever its mailbox may
    /// have changed. It runs under a lock, so it must neither wait nor call this module.
    ///
    /// # Errors
    ///
    /// [`Error::Denied`] with the reason, [`Error::SenderClosed`] after the end, [`Error::Forked`]
    /// in a forked child.
    pub fn join(
        &self,
        options: RemoteReaderOptions,
        call: impl Fn(WorkerId) + Send + Sync + 'static,
    ) -> Result<RemoteReader, Error> {
        let shared = &self.shared;
        shared.open()?;
        let RemoteReaderOptions {
            worker,
            pid,
            seen,
            models,
            delivery,
            mut device,
            location,
        } = options;
        // The label comes from another process, so it is bounded here, as the socket's messages
        // bound it for local readers.
        device.truncate(device.floor_char_boundary(MAX_DEVICE));
        let request = JoinRequest {
            worker,
            models,
            delivery,
            device,
            instance: 0,
        };
        // From the check of the number until the reader is added, the lock is held: of two
        // connections of one worker only one may get it.
        let mut state = self.admit(&request, seen)?;
        let models = models.and(ModelMask::first(shared.models.len()));
        state.joined += 1;
        let key = (worker, state.joined);
        // The pages are in private memory, but all other code uses them as if a process had mapped
        // them.
        let end = ReaderEnd::RemoteReader {
            pages: PrivatePages::new(),
            pid,
            call: MailboxCall(Arc::new(move |(worker, _)| call(worker))),
        };
        let mut reader = RegisteredReader::new(end, 0, models, delivery, request.device);
        reader.location = location;
        // Added before the pins are read, as in `welcome`: its mailbox is on its set when the
        // caller gets it.
        state.add(key, reader);
        let records = shared.observe(&mut state);
        shared.decide(&mut state, |plan, steps| {
            // An earlier remote reader of the same worker may have been notified before.
            plan.join((key, u64::MAX), models, delivery, records, steps);
        });
        drop(state);
        *shared.failure() = None;
        shared.bells.ring();
        Ok(RemoteReader {
            shared: shared.clone(),
            key,
            models,
            delivery,
            handed: AtomicU64::new(0),
        })
    }

    /// Admits a worker, if its number is free and there is room. Returns the lock under which this
    /// was decided.
    fn admit(
        &self,
        request: &JoinRequest,
        seen: Epoch,
    ) -> Result<MutexGuard<'_, RegistryState>, Error> {
        let shared = &self.shared;
        let denied = |reason| Error::Denied { reason };
        shared.admit(request, seen).map_err(denied)?;
        let mut state = shared.open_state()?;
        shared.vacate(&mut state, request.worker).map_err(denied)?;
        let (_, remote_readers) = state.counts();
        if remote_readers >= MAX_REMOTE_READERS {
            return Err(denied(format!(
                "{MAX_REMOTE_READERS} workers are connected from other hosts, which is the limit"
            )));
        }
        Ok(state)
    }
}

impl RemoteReader {
    /// The worker's number.
    pub fn worker(&self) -> WorkerId {
        self.key.0
    }

    /// The models that the worker gets.
    pub fn models(&self) -> ModelMask {
        self.models
    }

    /// Which versions the worker gets.
    pub fn delivery(&self) -> Delivery {
        self.delivery
    }

    /// The notifications that were not handed out before. For a worker that takes every version
    /// these are the new entries of its queue, in order. Otherwise it is the newest set, even if it
    /// was handed out before.
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] after the end, [`Error::Forked`] in a forked child, and those of an
    /// invalid record.
    pub fn notifications(&self) -> Result<Vec<NotifiedSet>, Error> {
        let state = self.shared.open_state()?;
        let Some(reader) = self.reader(&state) else {
            return Ok(Vec::new());
        };
        let mailbox = reader.mailbox();
        let mut all = Vec::new();
        match self.delivery {
            Delivery::Every { .. } => {
                // Every use of `handed` is under the lock, so no order is needed.
                let mut at = self.handed.load(Ordering::Relaxed);
                while let Some(live) = mailbox.queue.0.get(at) {
                    // Read from the plan: the lock is held, so the record is the one that the word
                    // names.
                    let set = state.plan.record(live.record).set;
                    all.push(self.hold(&state, live.sequence, &set)?);
                    at += 1;
                }
                // Only once all are held: after an error the caller gets the same entries again.
                self.handed.store(at, Ordering::Relaxed);
            }
            Delivery::Newest | Delivery::Asked => {
                if let Some(live) = mailbox.live.0.load() {
                    let set = state.plan.record(live.record).set;
                    all.push(self.hold(&state, live.sequence, &set)?);
                }
            }
        }
        Ok(all)
    }

    /// Notes how versions reach the worker now.
    pub fn set_route(&self, route: WorkerRoute) {
        let Ok(mut state) = self.shared.state_here() else {
            return;
        };
        if let Some(reader) = state.readers.get_mut(&self.key) {
            reader.location.1 = route;
        }
    }

    /// Hands out the queue from its beginning again, because another agent acts for the worker now.
    pub fn start_over(&self) {
        let Ok(state) = self.shared.state_here() else {
            return;
        };
        if let Some(reader) = self.reader(&state) {
            // What was handed out and not taken is in the hands of an agent that acts for the
            // worker no more.
            let head = reader.control().head.load();
            self.handed.store(head, Ordering::Relaxed);
        }
    }

    /// The answer to the worker's last question and the question's number, if there is an answer
    /// that was not taken.
    ///
    /// # Errors
    ///
    /// As [`notifications`](Self::notifications).
    pub fn answered(&self) -> Result<Option<(u64, NotifiedSet)>, Error> {
        let state = self.shared.open_state()?;
        let Some(reader) = self.reader(&state) else {
            return Ok(None);
        };
        let entry = &reader.mailbox().answer.0;
        // An answer stays in its place until the room is needed, also when the worker is through
        // with it.
        let question = load_acquire(&entry.question);
        let Some(live) = entry.live.load().filter(|_| question > reader.through()) else {
            return Ok(None);
        };
        let set = state.plan.record(live.record).set;
        Ok(Some((question, self.hold(&state, live.sequence, &set)?)))
    }

    /// Asks for a version on the worker's behalf: see [`answered`](Self::answered).
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`], [`Error::Protocol`] if the worker may not ask for it, and as
    /// [`notifications`](Self::notifications).
    pub fn ask(&self, question: u64, want: Want) -> Result<(), Error> {
        let mut state = self.shared.open_state()?;
        if state.asks(self.key).is_none() {
            return Ok(());
        }
        state.mark_changed(self.key);
        let records = self.shared.observe(&mut state);
        let answer = self.shared.decide(&mut state, |plan, steps| {
            plan.ask(self.key, question, want, records, steps)
        });
        drop(state);
        // A send does not wait for a worker that asks for a later version.
        self.wake_sender();
        match (answer, want) {
            (Answer::Notified | Answer::Later | Answer::Gone, _) => Ok(()),
            (
                Answer::Unknown { known },
                Want::AtLeast { model, version } | Want::Exactly { model, version },
            ) => Err(Error::NoSuchVersion {
                model,
                asked: version,
                known,
            }),
            (Answer::Unknown { .. } | Answer::NotAllowed, want) => Err(Error::Protocol {
                expected: "a question its models and its kind of delivery allow",
                got: format!("{want:?}"),
            }),
        }
    }

    /// Withdraws the worker's question.
    pub fn withdraw(&self) {
        if self.shared.header.map.usable().is_ok() {
            self.shared.state().plan.withdraw(self.key);
            // The sender may wait for the slot of an answer.
            self.wake_sender();
        }
    }

    /// Reports the worker's progress: the newest set that it has taken, and the last question whose
    /// answer it no longer needs. Earlier entries of its queue count as taken too. Numbers that go
    /// back are ignored.
    pub fn progress(&self, taken: u64, through: u64) {
        if self.shared.header.map.usable().is_err() {
            return;
        }
        let mut state = self.shared.state();
        let Some(reader) = self.reader(&state) else {
            return;
        };
        let control = reader.control();
        // The numbers come from another host, over links that replace each other. So a late one
        // must not put them back.
        control.taken.fetch_max(taken, Ordering::AcqRel);
        control.through.fetch_max(through, Ordering::AcqRel);
        self.advance(reader, taken);
        order();
        self.deliver(&mut state);
        state.mark_changed(self.key);
        drop(state);
        self.wake_sender();
    }

    /// Reports that the worker has loaded these versions: the set with this sequence number or, for
    /// 0, another set that it asked for.
    pub fn applied(&self, sequence: u64, versions: impl IntoIterator<Item = (usize, Version)>) {
        if self.shared.header.map.usable().is_err() {
            return;
        }
        let mut state = self.shared.state();
        let Some(reader) = self.reader(&state) else {
            return;
        };
        // The versions come from another process. Those of models that this reader does not take
        // are ignored.
        let mine = versions
            .into_iter()
            .filter(|(model, _)| self.models.contains(*model));
        reader.control().set_loaded(sequence, mine);
        state.mark_changed(self.key);
        drop(state);
        self.wake_sender();
    }

    /// Reports that the worker cannot use the set with this sequence number or, for `None`, any
    /// set.
    pub fn refuse(&self, sequence: Option<u64>, reason: String) {
        if self.shared.header.map.usable().is_err() {
            return;
        }
        let mut state = self.shared.state();
        match sequence {
            None => state.reject(self.key, reason),
            Some(sequence) => {
                if let Some(reader) = state.readers.get_mut(&self.key) {
                    reader.refused = Some((sequence, reason));
                    // The worker is through with a set that it refused, so the entry makes room.
                    self.advance(reader, sequence);
                }
                state.mark_changed(self.key);
            }
        }
        if state.plan.anything_waits() {
            self.shared.deliver(&mut state);
        }
        drop(state);
        self.shared.bells.ring();
    }

    /// Delivers sets that waited for the room that this reader has made: in its queue, or by a
    /// record.
    fn deliver(&self, state: &mut RegistryState) {
        let plan = &state.plan;
        if plan.anything_waits_for(self.key) || plan.lacks_records() {
            self.shared.deliver(state);
        }
    }

    /// Frees the entries of the queue up to this sequence number.
    fn advance(&self, reader: &RegisteredReader, sequence: u64) {
        let Delivery::Every { .. } = self.delivery else {
            return;
        };
        let (queue, head) = (&reader.mailbox().queue.0, &reader.control().head);
        let mut at = head.load();
        let handed = self.handed.load(Ordering::Relaxed);
        // Only entries that were handed out. A wrong number of another process must not free a set
        // that the worker never got.
        while at < handed && queue.get(at).is_some_and(|live| live.sequence <= sequence) {
            at += 1;
        }
        head.advance(at);
    }

    /// Removes the reader.
    pub fn leave(self, departure: Departure) {
        self.go(departure);
    }

    fn go(&self, departure: Departure) {
        if self.shared.header.map.usable().is_err() {
            return;
        }
        let mut state = self.shared.state();
        if let Some(reader) = self.reader(&state) {
            if departure == Departure::Left {
                // `bury` tells by this word how the reader departed.
                let left = &reader.control().left;
                left.store(ReaderExit::InOrder.word(), Ordering::Release);
            }
            state.bury(self.key, departure);
            if state.plan.anything_waits() {
                self.shared.deliver(&mut state);
            }
            drop(state);
            self.shared.bells.ring();
        }
    }

    fn reader<'a>(&self, state: &'a RegistryState) -> Option<&'a RegisteredReader> {
        state.readers.get(&self.key)
    }

    fn hold(
        &self,
        state: &RegistryState,
        sequence: u64,
        set: &ModelSet,
    ) -> Result<NotifiedSet, Error> {
        let set = set.only(self.models);
        let models = set.models();
        let held = models.iter().map(|model| {
            // The sender's own pin, which stands for the remote worker's: nobody else holds the
            // slot for it.
            let held = self.shared.hold(state, model, &set)?;
            held.ok_or(Error::SenderClosed)
        });
        Ok(NotifiedSet {
            sequence,
            members: held.collect::<Result<_, _>>()?,
        })
    }

    fn wake_sender(&self) {
        order();
        if self.shared.header().sender.0.sleeping() {
            self.shared.bells.ring();
        }
    }
}

impl Drop for RemoteReader {
    fn drop(&mut self) {
        // After `leave` the reader is no longer registered, and this does nothing.
        self.go(Departure::Lost);
    }
}

impl fmt::Debug for RemoteReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteReader")
            .field("worker", &self.key.0)
            .field("models", &self.models)
            .field("delivery", &self.delivery)
            .finish_non_exhaustive()
    }
}
