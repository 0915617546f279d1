//! A segment that carries another sender's versions: the one copy of a host, which all its
//! workers share.
//!
//! **Guarantee.** The readers get exactly the sets that [`RelaySegment::notify`] names. This module
//! makes no decision about who runs what. For its readers the segment is like any other, with
//! the same guarantees. At its end they also learn whether the sender ended or the relay
//! ([`Ending`]).
//!
//! Versions arrive in pieces, in any order and from several threads, in a [`PartialSlot`]. A
//! whole version is [committed](PartialSlot::commit); only then can a set name it.

mod events;

use std::sync::{Arc, Mutex};

use weightsync_core::{Run, Version, WorkerStatus};

use crate::error::Error;
use crate::grow;
use crate::model::ModelDescription;
use crate::partial_slot::PartialSlot;
use crate::plan::Key;
use crate::registry::{RegisteredReader, RegistryState, SharedRegistry};
use crate::service;
use crate::set::{ModelSet, SetEntry};
use crate::shared::Ending;
use crate::snapshot::Snapshot;
use crate::socket::Listener;
use crate::threads::LockExt as _;
use crate::wait::Deadline;
use crate::wire::SenderMessage;
use crate::writer::{self, SegmentOptions, SegmentThreads};

pub(crate) use self::events::{Relayed, Ticket};
pub use self::events::{ReportedProgress, WorkerEvent, WorkerInstance};

/// A relay's end of a segment of its own.
///
/// A thread of its own accepts readers and notices their deaths. Dropping it
/// tells them that the relay has left ([`Ending::Moved`]).
#[derive(Debug)]
pub struct RelaySegment {
    shared: Arc<SharedRegistry>,
    threads: Mutex<Option<SegmentThreads>>,
    options: SegmentOptions,
    /// Held while a slot is lent, so that only one thread lends at a time.
    lending: Mutex<()>,
}

impl RelaySegment {
    /// Makes the segment for a sender's run and models, and begins to accept readers. `sender` is
    /// that sender's process.
    ///
    /// # Errors
    ///
    /// As [`SegmentWriter::create`](crate::SegmentWriter::create).
    pub fn create(
        listener: Listener,
        secret: [u8; 16],
        (run, sender): (Run, u32),
        models: &[ModelDescription],
        options: SegmentOptions,
    ) -> Result<Self, Error> {
        writer::check(models, &options)?;
        // 0 would mean that there is no process.
        let relayed = Relayed::new(sender.max(1));
        let shared = SharedRegistry::new(run, models, secret, &options, Some(relayed))?;
        // Workers can connect from here on. Each waits until the sender has admitted it.
        let threads = SegmentThreads::start(&shared, listener)?;
        Ok(Self {
            shared,
            threads: Mutex::new(Some(threads)),
            options,
            lending: Mutex::default(),
        })
    }

    /// The run of the versions that it carries.
    pub fn run(&self) -> Run {
        self.shared.run
    }

    /// Waits for events of the workers; none if the deadline comes first. Changes between two calls
    /// add up.
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] once the relay is closed, [`Error::Forked`] in a forked child, or
    /// those of the operating system.
    pub fn wait(&self, deadline: Deadline) -> Result<Vec<WorkerEvent>, Error> {
        let relayed = self.relayed();
        let events = self.shared.wait_until(deadline, || {
            // A worker that has left may have said why just before.
            let leaving = relayed.leaving(&self.shared.state());
            for key in leaving {
                self.shared.listen_to(key, false)?;
            }
            let state = self.shared.state();
            // A look takes in what has changed since the last one, so nothing is told twice.
            let events = relayed.look(&state);
            Ok((!events.is_empty()).then_some(events))
        })?;
        Ok(events.unwrap_or_default())
    }

    /// The events that were not reported before, without waiting; also after the end.
    pub fn last_events(&self) -> Vec<WorkerEvent> {
        match self.shared.header.map.usable() {
            Ok(()) => self.relayed().look(&self.shared.state()),
            Err(_) => Vec::new(),
        }
    }

    /// Reports everything again, as if it had changed, for a sender that does not know it.
    /// Departures are not repeated.
    pub fn report_again(&self) {
        if self.shared.header.map.usable().is_err() {
            return;
        }
        self.relayed().report_again();
        self.shared.bells.ring();
    }

    /// Whether a worker still waits for admission.
    pub fn waits(&self, ticket: u64) -> bool {
        self.shared.header.map.usable().is_ok() && self.relayed().waits(ticket)
    }

    /// Admits a worker. Its mailbox is empty until it is notified.
    ///
    /// # Errors
    ///
    /// [`Error::Denied`] with the reason if that is not possible, which the worker also gets, or if
    /// the worker has given up meanwhile. [`Error::Forked`] in a forked child.
    pub fn admit(&self, ticket: u64) -> Result<(), Error> {
        let gave_up = || Error::Denied {
            reason: "the worker has given up waiting".into(),
        };
        self.shared.header.map.usable()?;
        // Taken out of the queue, so that a ticket is answered once.
        let ticket = self.relayed().take(ticket);
        let Ticket {
            request,
            socket,
            control,
        } = ticket.ok_or_else(gave_up)?;
        // The worker may have found another way to the sender. It must not be admitted here as
        // well.
        if service::is_gone(&socket) {
            return Err(gave_up());
        }
        let welcomed = self.shared.welcome(request, socket, control);
        // The service thread listens to the reader from now on.
        self.shared.owes.ring();
        welcomed.map_err(|(socket, reason)| {
            service::deny(&socket, reason.clone());
            Error::Denied { reason }
        })
    }

    /// Refuses a worker that waits for admission.
    pub fn deny(&self, ticket: u64, reason: &str) {
        if self.shared.header.map.usable().is_err() {
            return;
        }
        if let Some(ticket) = self.relayed().take(ticket) {
            service::deny(&ticket.socket, reason.into());
        }
    }

    /// Turns a worker away, with the reason: it gets nothing more.
    pub fn turn_away(&self, who: WorkerInstance, reason: &str) {
        let Ok(mut state) = self.shared.state_here() else {
            return;
        };
        if let Some(key) = find(&state, who) {
            state.turn_away(key, reason.into());
        }
    }

    /// Puts a worker's mailbox on a set: one snapshot of this segment for each model. The sequence
    /// numbers of a worker only grow. False if the worker is not connected.
    ///
    /// # Panics
    ///
    /// If a snapshot belongs to another segment.
    pub fn notify(&self, who: WorkerInstance, sequence: u64, set: &[Snapshot]) -> bool {
        // The caller's snapshots hold the slots until the mailbox does.
        let set = self.set_of(set);
        let Ok(mut state) = self.shared.state_here() else {
            return false;
        };
        let Some(key) = find(&state, who) else {
            return false;
        };
        // The pins first: the step may write a record.
        let records = self.shared.observe(&mut state);
        self.shared.decide(&mut state, |plan, steps| {
            plan.notify_one(key, sequence, &set, records, steps)
        })
    }

    /// Answers a worker's question. False if the worker is not connected.
    ///
    /// # Panics
    ///
    /// If a snapshot belongs to another segment.
    pub fn answer(
        &self,
        who: WorkerInstance,
        question: u64,
        sequence: u64,
        set: &[Snapshot],
    ) -> bool {
        let set = self.set_of(set);
        let Ok(mut state) = self.shared.state_here() else {
            return false;
        };
        let Some(key) = find(&state, who) else {
            return false;
        };
        let records = self.shared.observe(&mut state);
        self.shared.decide(&mut state, |plan, steps| {
            plan.answer_one(key, (question, sequence), &set, records, steps)
        })
    }

    /// Answers a worker's question with the versions that exist instead.
    pub fn no_such_version(
        &self,
        who: WorkerInstance,
        question: u64,
        (model, asked): (usize, Version),
        known: Vec<Version>,
    ) {
        let packet = SenderMessage::NoSuchVersion {
            question,
            model: model as u8,
            asked,
            known,
        };
        let Ok(state) = self.shared.state_here() else {
            return;
        };
        let reader = find(&state, who).and_then(|key| state.readers.get(&key));
        if let Some(socket) = reader.and_then(RegisteredReader::socket) {
            // A worker that does not read its answers waits until its own deadline.
            let _ = socket.send(&packet.encode(), &[]);
        }
    }

    /// A slot for a version that arrives in pieces of this many bytes; `None` while every slot is
    /// in use.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] if there is no such model, [`Error::SenderClosed`] after the end, and
    /// those of the operating system.
    pub fn partial_slot(
        &self,
        model: usize,
        version: Version,
        piece_bytes: usize,
    ) -> Result<Option<Arc<PartialSlot>>, Error> {
        self.shared.check_model(model)?;
        // `close` takes this lock too: the slots stay until the loan is made.
        let _alone = self.lending.locked();
        self.shared.open()?;
        let mut parts = Vec::new();
        grow::lend(
            &self.shared,
            &[model],
            &mut parts,
            self.options.max_slots,
            None,
        )?;
        // What is missing does not matter here. The relay's one thread of decisions must answer
        // others, so it looks again later and does not wait.
        let Some(part) = parts.pop() else {
            return Ok(None);
        };
        let (slot, file) = part.into_slot();
        let partial = PartialSlot::new(
            self.shared.clone(),
            (model, version),
            (slot, file),
            piece_bytes,
        );
        Ok(Some(Arc::new(partial)))
    }

    /// Forgets which versions the slots of a model hold. Until another version is whole, no
    /// [`PartialSlot`] of it has a [base](PartialSlot::base).
    pub fn forget_bases(&self, model: usize) {
        let Ok(state) = self.shared.state_here() else {
            return;
        };
        for slot in state.slots.get(model).into_iter().flatten() {
            // A slot that is being written forgets as well, so its commit notes no version.
            slot.forget();
        }
    }

    /// The workers that are connected, by number.
    pub fn readers(&self) -> Vec<WorkerStatus> {
        self.shared.readers()
    }

    /// Ends the segment, and tells the workers how. Only the first call counts.
    pub fn close(&self, ending: Ending) {
        // Held to the end: a second caller returns only once the threads are gone.
        let mut threads = self.threads.locked();
        if self.shared.header.map.usable().is_err() {
            // In a forked child: the thread and the memory belong to the parent.
            std::mem::forget(threads.take());
            return;
        }
        let Some(threads) = threads.take() else {
            return;
        };
        // Handles messages sent before the end, for example why a worker refused.
        for (key, ..) in self.shared.watched() {
            // A lack of memory here must not prevent the end.
            let _ = self.shared.listen_to(key, false);
        }
        let alone = self.lending.locked();
        self.shared.close(ending);
        drop(alone);
        for ticket in self.relayed().take_all() {
            // These workers wait for an answer that will not come. The hang-up tells them.
            ticket.socket.shut_down();
        }
        threads.join();
    }

    #[cfg(test)]
    pub(crate) fn locked_for_a_test(&self) -> std::sync::MutexGuard<'_, RegistryState> {
        self.shared.state()
    }

    fn set_of(&self, set: &[Snapshot]) -> ModelSet {
        let mut all = ModelSet::EMPTY;
        for snapshot in set {
            let (book, slot) = snapshot.pinned_slot();
            assert!(
                Arc::ptr_eq(book, &self.shared.own),
                "a snapshot of another segment"
            );
            let version = snapshot.version();
            all.put(snapshot.model(), SetEntry { slot, version });
        }
        all
    }

    fn relayed(&self) -> &Relayed {
        let relayed = self.shared.relayed.as_ref();
        relayed.unwrap_or_else(|| unreachable!("made with it"))
    }
}

impl Drop for RelaySegment {
    fn drop(&mut self) {
        self.close(Ending::Moved);
    }
}

/// The worker's newest reader, if it is this one and has not left.
fn find(state: &RegistryState, who: WorkerInstance) -> Option<Key> {
    let all = (who.worker, 0)..=(who.worker, u64::MAX);
    // An earlier life of the worker may still hold snapshots; it gets nothing more.
    let (key, reader) = state.readers.range(all).next_back()?;
    (reader.instance == who.instance && !reader.has_left()).then_some(*key)
}
