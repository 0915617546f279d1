//! What the sender knows of its readers: who they are, what they hold, and what
//! is to be told of them.

mod reader;
mod state;

use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weightsync_core::{Run, Version, WorkerId};

pub use self::state::Going;
pub(crate) use self::{
    reader::{Call, End, Reader},
    state::{Gone, State},
};
use crate::error::{Error, Holder};
use crate::map::OwnedFile;
use crate::model::{Description, Model, ModelSpec};
use crate::pins::{Home, PinBook};
use crate::plan::{Key, Plan};
use crate::protocol::{PinWord, SlotSet};
use crate::relay::Relayed;
use crate::service::is_gone;
use crate::set::{ModelSet, Models};
use crate::shared::{Ending, HEADER_BYTES, Header, MODEL_PAGE_BYTES};
use crate::slot::Slot;
use crate::snapshot::Snapshot;
use crate::socket::Socket;
use crate::wait::{Deadline, Doorbell, WaitStyle, Watchers};
use crate::wire::FromSender;
use crate::writer::SegmentOptions;

/// The most readers of one segment. Each costs the sender two descriptors.
pub(crate) const MAX_READERS: usize = 4096;

/// The most readers that somebody in the sender's process acts for.
pub(crate) const MAX_GUESTS: usize = 1 << 16;

/// What the sender, its service thread and those who wait for readers share.
pub(crate) struct Shared {
    pub(crate) run: Run,
    pub(crate) header: OwnedFile,
    pub(crate) doorbell: Arc<Doorbell>,
    pub(crate) own: Arc<PinBook>,
    pub(crate) models: Vec<Served>,
    pub(crate) secret: [u8; 16],
    pub(crate) stop: Doorbell,
    /// Rings when a reader is owed slots.
    pub(crate) owes: Doorbell,
    pub(crate) wait: WaitStyle,
    pub(crate) watchers: Watchers,
    state: Mutex<State>,
    /// What a relay is to be told of its own readers; `None` of a sender.
    pub(crate) relayed: Option<Relayed>,
}

/// A model as the sender has it.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) model: Arc<Model>,
    pub(crate) page: OwnedFile,
    pub(crate) description: Description,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("Shared")
            .field("run", &self.run)
            .field("models", &self.models.len())
            .field("readers", &self.readers())
            .finish_non_exhaustive()
    }
}

/// A reader as the sender sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReaderStatus {
    /// Which worker.
    pub worker: WorkerId,
    /// Its process.
    pub pid: u32,
    /// Where its weights live, in its own words.
    pub device: String,
    /// Whether it is held at what it has.
    pub held: bool,
    /// The sequence number of the newest set it has taken; 0 before the first.
    pub taken: u64,
    /// The version of each model it has loaded; `Version::NONE` before the
    /// first, and for the models it did not ask for.
    pub applied: Vec<Version>,
}

impl Shared {
    pub(crate) fn new(
        run: Run,
        specs: &[ModelSpec],
        secret: [u8; 16],
        options: &SegmentOptions,
        relayed: Option<Relayed>,
    ) -> Result<Arc<Self>, Error> {
        let header = OwnedFile::new("weightsync-header", HEADER_BYTES)?;
        let mut models = Vec::with_capacity(specs.len());
        let mut slots = Vec::with_capacity(specs.len());
        for (index, spec) in specs.iter().enumerate() {
            let page = OwnedFile::new("weightsync-commits", MODEL_PAGE_BYTES)?;
            let model = Model::new(index, &spec.layout, page.map.clone());
            slots.push(make_slots(options.slots, model.slot_bytes())?);
            models.push(Served {
                model: Arc::new(model),
                page,
                description: Description::new(spec)?,
            });
        }
        let doorbell = Arc::new(Doorbell::new()?);
        // The sender's own pins: in its private memory, by the same protocol.
        let words = Box::new(std::array::from_fn(|_| PinWord::new()));
        let own = PinBook::new(
            Home::Sender(words),
            header.map.clone(),
            doorbell.clone(),
            Models::first(specs.len()),
        );
        let plan = Plan::new(specs.len(), options.slots, options.history);
        Ok(Arc::new(Self {
            run,
            header,
            doorbell,
            own: Arc::new(own),
            models,
            secret,
            stop: Doorbell::new()?,
            owes: Doorbell::new()?,
            wait: options.wait,
            watchers: Watchers::default(),
            state: Mutex::new(State::new(plan, slots)),
            relayed,
        }))
    }

    pub(crate) fn header(&self) -> &Header {
        self.header.map.table()
    }

    /// The pages are this process's to use, and the sender has not closed.
    pub(crate) fn open(&self) -> Result<(), Error> {
        self.header.map.usable()?;
        match self.is_closed() {
            true => Err(Error::SenderClosed),
            false => Ok(()),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.header().closed.0.load(Ordering::Acquire) != 0
    }

    /// Looks again and again until something is found, the deadline comes or the
    /// sender closes. Readers ring the doorbell only while somebody sleeps here.
    pub(crate) fn wait_until<T>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        let found = self.wait.brief(deadline, || look().transpose());
        if let Some(found) = found {
            return found.map(Some);
        }
        let sleep = &self.header().sender.0;
        self.watchers.wait(sleep, &self.doorbell, deadline, || {
            self.open()?;
            look()
        })
    }

    /// Hands a new slot of a model to every reader of it, before any set can name
    /// it.
    pub(crate) fn add_slot(&self, state: &mut State, model: usize, file: Arc<Slot>) -> u8 {
        let index = state.plan.grown(model);
        state.slots[model].push(file);
        for reader in state.readers.values_mut() {
            let takes_slots = reader.socket().is_some() && reader.unusable.is_none();
            if takes_slots && reader.models.contains(model) && !reader.has_left() {
                reader.owed.push_back((model as u8, index));
            }
        }
        if self.hand_slots(state) {
            self.owes.ring();
        }
        index
    }

    /// Hands readers the slots they are owed, as far as it goes. True if it has
    /// to be tried again: a reader that stands still has a full socket, and the
    /// kernel bounds how many descriptors are on their way. One that has left
    /// takes none any more: those on their way would count against the others.
    pub(crate) fn hand_slots(&self, state: &mut State) -> bool {
        let mut again = false;
        let mut without = Vec::new();
        for (key, reader) in &mut state.readers {
            if !reader.owed.is_empty() && reader.has_left() {
                reader.owed.clear();
            }
            let Some(socket) = reader.socket().cloned() else {
                continue;
            };
            while let Some(&(model, index)) = reader.owed.front() {
                let packet = FromSender::Slot { model, index }.encode();
                let file = &state.slots[usize::from(model)][usize::from(index)];
                match socket.send(&packet, &[file.fd.as_fd()]) {
                    Ok(true) => {
                        reader.owed.pop_front();
                    }
                    // It is buried when its hang-up is heard.
                    Ok(false) if is_gone(&socket) => reader.owed.clear(),
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
            state.turn_away(key, why);
        }
        again
    }

    /// Whether this process can read a model, and there is one.
    pub(crate) fn check_model(&self, model: usize) -> Result<(), Error> {
        self.header.map.usable()?;
        if model < self.models.len() {
            return Ok(());
        }
        Err(Error::BadOption {
            option: "model",
            expected: "the index of a model",
            got: model.to_string(),
        })
    }

    /// The sender's own hold on one model's version of a set, unless it has
    /// closed: then there are no slots any more.
    pub(crate) fn hold(
        &self,
        state: &State,
        model: usize,
        set: &ModelSet,
    ) -> Result<Option<Snapshot>, Error> {
        // Asked under the lock, as the slots go under it.
        self.open()?;
        let set = set.only(Models::of(&[model]));
        // Pinned under the lock: whoever looks for a free slot does so under it.
        let Some(pin) = self.own.pin(&set).pop() else {
            return Ok(None);
        };
        let slot = state.slots[model][usize::from(pin.slot)].clone();
        let model = self.models[model].model.clone();
        Snapshot::new(pin, slot, model, self.run).map(Some)
    }

    /// Who holds slots of a model, with the versions in them.
    pub(crate) fn holders(&self, model: usize) -> Vec<Holder> {
        let mut state = self.state();
        let _ = self.observe(&mut state);
        let versions = |held: SlotSet| {
            let versions = held.iter().map(|slot| state.plan.version_in(model, slot));
            let mut versions: Vec<_> = versions.filter(|version| !version.is_none()).collect();
            versions.sort();
            versions
        };
        // What all are meant to run is nobody's fault.
        let newest = state.plan.default_set().place(model);
        let readers = state.readers.iter().map(|(key, reader)| {
            let queued = state.plan.lane_slots(*key, model);
            let queued = newest.map_or(queued, |newest| queued.without(newest.slot));
            let control = reader.control();
            let records = control.holds.0.records.held();
            let pinned = state.plan.slots_of(records, model);
            let pinned = pinned.union(control.holds.0.pins[model].held());
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

    pub(crate) fn readers(&self) -> Vec<ReaderStatus> {
        // In a forked child the control pages are not mapped, and the lock may
        // be held by a thread that does not exist there.
        if self.header.map.usable().is_err() {
            return Vec::new();
        }
        let state = self.state();
        let present = state
            .readers
            .iter()
            .filter(|(_, reader)| !reader.has_left());
        let lines = present.map(|((worker, _), reader)| ReaderStatus {
            worker: *worker,
            pid: reader.pid(),
            device: reader.device.clone(),
            held: state.plan.is_held(*worker),
            taken: reader.taken(),
            applied: reader.versions(self.models.len()),
        });
        lines.collect()
    }

    pub(crate) fn take_rejected(&self) -> Vec<(WorkerId, String)> {
        let rejected = self.state().tell_rejected(|_| true);
        rejected
            .into_iter()
            .map(|one| (one.key.0, one.reason))
            .collect()
    }

    pub(crate) fn rejected(&self) -> Vec<WorkerId> {
        self.state()
            .rejected()
            .iter()
            .map(|one| one.key.0)
            .collect()
    }

    /// Tells everybody that this sender closes, and ends the service thread and
    /// every wait.
    ///
    /// The connections are shut down rather than left to be closed: a forked
    /// child of this process may keep its copies of them open.
    pub(crate) fn close(&self, ending: Ending) {
        self.header()
            .closed
            .0
            .store(ending.word(), Ordering::Release);
        let mut state = self.state();
        for reader in state.readers.values_mut() {
            if let Some(socket) = reader.socket() {
                socket.shut_down();
            }
            reader.owed.clear();
        }
        // A waiter may outlive the sender; the memory of the weights need not.
        state.slots.clear();
        drop(state);
        self.stop.ring();
        self.doorbell.ring();
    }

    /// The connections to watch; of deaf ones only the end.
    pub(crate) fn watched(&self) -> Vec<(Key, Arc<Socket>, bool)> {
        let state = self.state();
        let readers = state.readers.iter();
        readers
            .filter_map(|(key, reader)| Some((*key, reader.socket()?.clone(), reader.deaf)))
            .collect()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes the first slots of a model. Large ones side by side: the kernel clears
/// their pages one by one, which takes ten times as long as a copy.
fn make_slots(count: u8, bytes: usize) -> Result<Vec<Arc<Slot>>, Error> {
    const LARGE: usize = 16 << 20;
    let make = || Slot::new(bytes).map(Arc::new);
    if bytes < LARGE {
        return (0..count).map(|_| make()).collect();
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(make)).collect();
        let made = threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        made.collect()
    })
}
