//! The sender's knowledge of its readers: who they are, what they hold, and what the next report
//! says about them.

mod reader;
mod state;

use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};

use weightsync_core::{Attendance, GoneWorker, Run, WorkerId, WorkerStatus};

pub use self::state::Departure;
pub(crate) use self::{
    reader::{MailboxCall, ReaderEnd, RegisteredReader},
    state::{GoneReader, RegistryState},
};
use crate::error::{Error, Holder, RecordHolder, bad};
use crate::grow;
use crate::map::OwnedFile;
use crate::model::{DescriptionFile, ModelDescription, SegmentModel};
use crate::pins::{PinBook, PinOwner};
use crate::plan::{Key, Plan};
use crate::protocol::{PinWord, SlotSet};
use crate::relay::Relayed;
use crate::service::is_gone;
use crate::set::{ModelMask, ModelSet};
use crate::shared::{Ending, HEADER_BYTES, HeaderPage, MODEL_PAGE_BYTES};
use crate::slot::Slot;
use crate::snapshot::Snapshot;
use crate::socket::Socket;
use crate::sync::load_acquire;
use crate::threads::LockExt as _;
use crate::wait::{Deadline, Doorbell, Doorbells, WaitStyle, Watchers};
use crate::wire::SenderMessage;
use crate::writer::SegmentOptions;

/// The most readers of one segment. Each costs the sender two descriptors.
pub(crate) const MAX_READERS: usize = 4096;

/// The most readers that a thread of the sender's process acts for.
pub(crate) const MAX_REMOTE_READERS: usize = 1 << 16;

/// The state that the sender, its service thread and threads that wait for readers share.
pub(crate) struct SharedRegistry {
    pub(crate) run: Run,
    pub(crate) header: OwnedFile,
    pub(crate) bells: Doorbells,
    pub(crate) own: Arc<PinBook>,
    pub(crate) models: Vec<ServedModel>,
    pub(crate) secret: [u8; 16],
    pub(crate) stop: Doorbell,
    /// Rings when a reader is owed slots.
    pub(crate) owes: Doorbell,
    pub(crate) wait: WaitStyle,
    /// Logs why a reader was refused.
    pub(crate) refused: fn(&str),
    /// Makes the answer for programs that ask for the status.
    pub(crate) status: OnceLock<StatusAnswer>,
    /// How many versions may wait in a reader's queue.
    pub(crate) max_queue: u8,
    pub(crate) watchers: Watchers,
    /// The slots that each model soon needs.
    pub(crate) slots: u8,
    /// Wakes the thread that makes slots, or ends it when the sender closes.
    pub(crate) asked: Condvar,
    /// Why a reader could not join, if none has joined since.
    failure: Mutex<Option<Error>>,
    /// Slots that are being made are no longer needed.
    pub(crate) ends: AtomicBool,
    state: Mutex<RegistryState>,
    /// The events of a relay's readers; `None` for a sender.
    pub(crate) relayed: Option<Relayed>,
}

/// Makes the answer for a program that asks for the status, from the readers that are connected or
/// missing.
pub type StatusAnswer = Box<dyn Fn(Vec<WorkerStatus>) -> Vec<u8> + Send + Sync>;

/// A model as the sender has it.
#[derive(Debug)]
pub(crate) struct ServedModel {
    pub(crate) model: Arc<SegmentModel>,
    pub(crate) page: OwnedFile,
    pub(crate) description: DescriptionFile,
}

impl fmt::Debug for SharedRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("SharedRegistry")
            .field("run", &self.run)
            .field("models", &self.models.len())
            .field("readers", &self.readers())
            .finish_non_exhaustive()
    }
}

impl SharedRegistry {
    pub(crate) fn new(
        run: Run,
        specs: &[ModelDescription],
        secret: [u8; 16],
        options: &SegmentOptions,
        relayed: Option<Relayed>,
    ) -> Result<Arc<Self>, Error> {
        // Refused before anything is allocated: the kernel would kill the process without a word.
        grow::check_room(specs, options.slots)?;
        let header = OwnedFile::new("weightsync-header", HEADER_BYTES)?;
        let mut models = Vec::with_capacity(specs.len());
        let (mut slots, mut growth) = (Vec::with_capacity(specs.len()), Vec::new());
        for (index, spec) in specs.iter().enumerate() {
            let page = OwnedFile::new("weightsync-commits", MODEL_PAGE_BYTES)?;
            let model = SegmentModel::new(index, &spec.layout, page.map.clone());
            // Faulted in here, so that running out of memory is an error of this call.
            let (made, grows) = grow::first_slots(options.slots, model.slot_bytes())?;
            slots.push(made);
            growth.push(grows);
            models.push(ServedModel {
                model: Arc::new(model),
                page,
                description: DescriptionFile::new(spec)?,
            });
        }
        let bells = Doorbells::new()?;
        // The sender's own pins: in its private memory, by the same protocol.
        let words = Box::new(std::array::from_fn(|_| PinWord::new()));
        let own = PinBook::new(
            PinOwner::Sender(words),
            header.map.clone(),
            bells.own().clone(),
            ModelMask::first(specs.len()),
        );
        let made = slots.iter().map(Vec::len);
        let plan = Plan::new(made, options.history);
        Ok(Arc::new(Self {
            run,
            header,
            bells,
            own: Arc::new(own),
            models,
            secret,
            stop: Doorbell::new()?,
            owes: Doorbell::new()?,
            wait: options.wait,
            refused: options.refused,
            status: OnceLock::new(),
            max_queue: options.max_queue,
            watchers: Watchers::default(),
            slots: options.slots,
            asked: Condvar::new(),
            failure: Mutex::default(),
            ends: AtomicBool::new(false),
            state: Mutex::new(RegistryState::new(plan, slots, growth)),
            relayed,
        }))
    }

    pub(crate) fn header(&self) -> &HeaderPage {
        self.header.map.table()
    }

    /// Checks that this process may use the pages, and that the sender has not closed.
    pub(crate) fn open(&self) -> Result<(), Error> {
        self.header.map.usable()?;
        match self.is_closed() {
            true => Err(Error::SenderClosed),
            false => Ok(()),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        load_acquire(&self.header().closed.0) != 0
    }

    /// Looks until something is found, the deadline comes, or the sender closes. Readers ring only
    /// while a thread sleeps here.
    pub(crate) fn wait_until<T>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        self.header.map.usable()?;
        // Short waits announce nothing, so that readers save the system call of a ring.
        let found = self.wait.brief(deadline, || look().transpose());
        if let Some(found) = found {
            return found.map(Some);
        }
        let sleep = &self.header().sender.0;
        self.watchers.wait(sleep, &self.bells, deadline, || {
            // The sender may close while this thread waits, from any thread.
            self.open()?;
            look()
        })
    }

    /// Hands a new slot of a model to every reader of it, before any set can name the slot.
    pub(crate) fn add_slot(&self, state: &mut RegistryState, model: usize, file: Arc<Slot>) {
        let index = state.plan.grown(model);
        state.slots[model].push(file);
        for reader in state.readers.values_mut() {
            let takes_slots = reader.socket().is_some() && reader.unusable.is_none();
            if takes_slots && reader.models.contains(model) && !reader.has_left() {
                reader.owed.push_back((model as u8, index));
            }
        }
        // The service thread goes on with it. This thread must not wait for a reader that does not
        // read.
        if self.hand_slots(state) {
            self.owes.ring();
        }
    }

    /// Hands readers the slots that they are owed, as far as possible; true if it must be tried
    /// again. A stopped reader has a full socket, and the kernel limits descriptors in flight. A
    /// reader that has left gets none, because descriptors in flight to it would count against the
    /// others.
    pub(crate) fn hand_slots(&self, state: &mut RegistryState) -> bool {
        let mut again = false;
        let mut without = Vec::new();
        for (key, reader) in &mut state.readers {
            if !reader.owed.is_empty() && reader.has_left() {
                reader.owed.clear();
            }
            let Some(socket) = reader.socket().cloned() else {
                continue;
            };
            // In order: a reader takes a slot that is not the next of its model for a breach.
            while let Some(&(model, index)) = reader.owed.front() {
                let packet = SenderMessage::Slot { model, index }.encode();
                let file = &state.slots[usize::from(model)][usize::from(index)];
                match socket.send(&packet, &[file.fd.as_fd()]) {
                    Ok(true) => {
                        reader.owed.pop_front();
                    }
                    // The reader is removed when its hang-up is noticed.
                    Ok(false) if is_gone(&socket) => reader.owed.clear(),
                    // Without this slot, no set that names it is of use to the reader.
                    Err(error) if !error.is_crowded_out() => {
                        let why = format!(
                            "it could not be handed slot {index} of model {model}: {error}"
                        );
                        without.push((*key, why));
                        break;
                    }
                    _ => {
                        again = true;
                        break;
                    }
                }
            }
        }
        for (key, why) in without {
            // Here and not in the loop, which borrows the readers.
            state.turn_away(key, why);
        }
        again
    }

    /// Checks that a model exists and this process can read it.
    pub(crate) fn check_model(&self, model: usize) -> Result<(), Error> {
        self.header.map.usable()?;
        if model < self.models.len() {
            return Ok(());
        }
        Err(bad("model", "the index of a model", model))
    }

    /// The sender's own pin on one model's version of a set. An error if the sender has closed:
    /// there are no slots then.
    pub(crate) fn hold(
        &self,
        state: &RegistryState,
        model: usize,
        set: &ModelSet,
    ) -> Result<Option<Snapshot>, Error> {
        // Checked under the lock, because closing drops the slots under it.
        self.open()?;
        let set = set.only(ModelMask::of(&[model]));
        // Pinned under the lock, because the search for a free slot takes that lock too.
        let Some(pin) = self.own.pin(&set).pop() else {
            return Ok(None);
        };
        let slot = state.slots[model][usize::from(pin.slot)].clone();
        let model = self.models[model].model.clone();
        Snapshot::new(pin, slot, model, self.run).map(Some)
    }

    /// The holders of a model's slots, with the versions in them.
    pub(crate) fn holders(&self, model: usize) -> Vec<Holder> {
        // For an error message, after the wait for a slot was in vain.
        let mut state = self.state();
        let _ = self.observe(&mut state);
        let versions = |held: SlotSet| {
            let versions = held.iter().map(|slot| state.plan.version_in(model, slot));
            let mut versions: Vec<_> = versions.filter(|version| !version.is_none()).collect();
            versions.sort();
            versions
        };
        // The set for all workers is not counted against any reader.
        let newest = state.plan.default_set().entry(model);
        let readers = state.readers.iter().map(|(key, reader)| {
            // What the mailbox keeps for the reader counts like what the reader pins: both keep
            // slots.
            let queued = state.plan.mailbox_slots(*key, model);
            let queued = newest.map_or(queued, |newest| queued.without(newest.slot));
            let pinned = reader.control().pins[model].held();
            let pinned = reader.claims.of(model, pinned);
            let by_record = state.plan.slots_of(reader.claims.records(), model);
            let pinned = pinned.union(by_record);
            Holder {
                worker: Some(key.0),
                pid: reader.pid(),
                versions: versions(pinned.union(queued)),
            }
        });
        let own = Holder {
            worker: None,
            pid: std::process::id(),
            versions: versions(self.own.held(model)),
        };
        let holders = readers.chain([own]);
        holders
            .filter(|holder| !holder.versions.is_empty())
            .collect()
    }

    /// The holders of set records, and how many each has.
    pub(crate) fn record_holders(&self) -> Vec<RecordHolder> {
        let mut state = self.state();
        let _ = self.observe(&mut state);
        let holders = state.readers.iter().map(|(key, reader)| {
            let named = state.plan.named_records(*key);
            let named = named.union(reader.claims.records());
            // The set for all workers is not counted against any reader.
            let newest = state.plan.default_set();
            let held = named.iter().filter(|one| state.plan.set(*one) != newest);
            RecordHolder {
                worker: key.0,
                pid: reader.pid(),
                records: held.count(),
            }
        });
        holders.filter(|holder| holder.records > 0).collect()
    }

    pub(crate) fn readers(&self) -> Vec<WorkerStatus> {
        // In a forked child the control pages are not mapped, and the lock may
        // be held by a thread that does not exist there.
        if self.header.map.usable().is_err() {
            return Vec::new();
        }
        self.present(&self.state())
    }

    fn present(&self, state: &RegistryState) -> Vec<WorkerStatus> {
        let present = state
            .readers
            .iter()
            .filter(|(_, reader)| !reader.has_left());
        let lines = present.map(|((worker, _), reader)| {
            let mut status = reader.status(*worker, self.models.len());
            status.held = state.plan.is_held(*worker);
            status
        });
        lines.collect()
    }

    /// The readers that are connected, and those that failed, died or were lost and are neither
    /// back nor forgotten, by worker.
    pub(crate) fn roster(&self) -> Vec<WorkerStatus> {
        if self.header.map.usable().is_err() {
            return Vec::new();
        }
        let state = self.state();
        let mut all = self.present(&state);
        let missing = state.missing().map(|gone| {
            let mut status = gone.status.clone();
            status.held = state.plan.is_held(status.worker);
            status.gone = Some(gone.outcome());
            status
        });
        all.extend(missing);
        all.sort_by_key(|status| status.worker);
        all
    }

    /// The readers that are connected, and those that were, at one moment.
    pub(crate) fn attendance(&self) -> Attendance {
        if self.header.map.usable().is_err() {
            return Attendance::default();
        }
        let state = self.state();
        let gone = state.gone().into_iter().map(|gone| GoneWorker {
            how: gone.outcome(),
            joined: gone.key.1,
            status: gone.status,
        });
        Attendance {
            workers: self.present(&state),
            rejected: state.rejected().iter().map(|one| one.key.0).collect(),
            gone: gone.collect(),
            joined: state.joined,
        }
    }

    pub(crate) fn take_rejected(&self) -> Vec<(WorkerId, String)> {
        let rejected = self.state().report_rejected(|_| true);
        rejected
            .into_iter()
            .map(|one| (one.key.0, one.reason))
            .collect()
    }

    /// Tells all readers that this sender closes, and ends the service thread and every wait.
    ///
    /// The connections are shut down, not only closed: a forked child of this process may keep its
    /// copies of them open.
    pub(crate) fn close(&self, ending: Ending) {
        // The word comes before the hang-ups. A reader that finds its connection closed looks here
        // whether the sender shut down or died.
        self.header()
            .closed
            .0
            .store(ending.word(), Ordering::Release);
        let mut state = self.state();
        for reader in state.readers.values_mut() {
            if let Some(socket) = reader.socket() {
                socket.shut_down();
            }
            // The service thread must not offer slots that are dropped below.
            reader.owed.clear();
        }
        // A waiting thread may outlive the sender, but need not keep the memory of the weights.
        state.slots.clear();
        drop(state);
        // In this order these end the slot that is being made, the thread that makes slots, the
        // service thread, and every wait.
        self.ends.store(true, Ordering::Relaxed);
        self.asked.notify_all();
        self.stop.ring();
        self.bells.ring();
    }

    /// The connections to watch. For readers that broke the protocol only the end matters.
    pub(crate) fn watched(&self) -> Vec<(Key, Arc<Socket>, bool)> {
        let state = self.state();
        let readers = state.readers.iter();
        readers
            .filter_map(|(key, reader)| Some((*key, reader.socket()?.clone(), reader.deaf)))
            .collect()
    }

    /// Locks the state, unless this process is a forked child: there a thread that does not exist
    /// may hold the lock.
    pub(crate) fn state_here(&self) -> Result<MutexGuard<'_, RegistryState>, Error> {
        self.header.map.usable()?;
        Ok(self.state())
    }

    /// The same for a sender that has not closed: slots stay while the lock is held.
    pub(crate) fn open_state(&self) -> Result<MutexGuard<'_, RegistryState>, Error> {
        let state = self.state_here()?;
        self.open()?;
        Ok(state)
    }

    pub(crate) fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.locked()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, RegistryState> {
        // Every change of the state is complete before anything can panic.
        self.state.locked()
    }
}
