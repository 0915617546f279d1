//! What the sender knows of its readers: who they are, what they hold, and what
//! is to be told of them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weightsync_core::{Run, Version, WorkerId};

use crate::error::{Error, Holder};
use crate::futex;
use crate::map::{Mapping, OwnedFile};
use crate::model::{Description, Model, ModelSpec};
use crate::pins::{Home, PinBook};
use crate::plan::{Key, Plan, Step};
use crate::protocol::{PinWord, SlotSet};
use crate::relay::Relayed;
use crate::service::is_gone;
use crate::set::{ModelSet, Models};
use crate::shared::{Control, Ending, HEADER_BYTES, Header, Lane, MODEL_PAGE_BYTES, Seat};
use crate::slot::Slot;
use crate::snapshot::Snapshot;
use crate::socket::Socket;
use crate::wait::{Deadline, Doorbell, WaitStyle, Watchers};
use crate::wire::{Delivery, FromSender};
use crate::writer::SegmentOptions;

/// The most readers of one segment. Each costs the sender two descriptors.
pub(crate) const MAX_READERS: usize = 4096;

/// The most readers that somebody in the sender's process acts for.
pub(crate) const MAX_GUESTS: usize = 1 << 16;

/// How many of those that went are remembered.
const MAX_GONE: usize = 1 << 16;

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

/// What changes, under one lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) plan: Plan,
    /// How many models there are.
    models: usize,
    pub(crate) readers: BTreeMap<Key, Reader>,
    /// How many readers have joined so far.
    pub(crate) joined: u64,
    /// The readers that went last; with those that nobody has been told of yet.
    gone: VecDeque<Gone>,
    /// How many of them nobody has been told of.
    untold: usize,
    rejected: Vec<Rejected>,
    /// The data slots of each model.
    pub(crate) slots: Vec<Vec<Arc<Slot>>>,
    /// Kept to be used again.
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) end: End,
    /// Chosen by the worker when it first joined.
    pub(crate) instance: u64,
    pub(crate) models: Models,
    pub(crate) delivery: Delivery,
    pub(crate) device: String,
    /// The set it cannot use, and why.
    pub(crate) refused: Option<(u64, String)>,
    /// Why it cannot use anything.
    pub(crate) unusable: Option<String>,
    /// Its going, or that it cannot use the models at all, has been told: there
    /// is no second line about it.
    pub(crate) told: bool,
    /// It broke the protocol and is not listened to any more.
    pub(crate) deaf: bool,
    /// It has closed its end and its lane is taken down.
    pub(crate) retired: bool,
    /// New slots it has not been handed, each a model and its slot's number: they
    /// go to it in order, as soon as they can.
    pub(crate) owed: VecDeque<(u8, u8)>,
    /// It has asked for something.
    pub(crate) asks: bool,
}

/// Where a reader's pages are, and how it is spoken to.
#[derive(Debug)]
pub(crate) enum End {
    /// It is a process of this host, which maps its pages.
    Process {
        socket: Arc<Socket>,
        control: Mapping,
        lane: Arc<Mapping>,
    },
    /// It is elsewhere, and somebody in this process acts for it.
    Guest {
        seat: Box<Seat>,
        pid: u32,
        call: Call,
    },
}

/// Tells whoever acts for a guest that its lane has moved. Called under the lock:
/// it neither waits nor calls back.
#[derive(Clone)]
pub(crate) struct Call(pub(crate) Arc<dyn Fn(Key) + Send + Sync>);

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}

/// What is known of a reader that is not there any more.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) key: Key,
    pub(crate) pid: u32,
    pub(crate) going: Going,
    pub(crate) applied: u64,
    pub(crate) models: Models,
    pub(crate) versions: Vec<Version>,
    pub(crate) told: bool,
}

/// How a reader went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Going {
    /// It closed its end in order.
    Left,
    /// Its process died.
    Died,
    /// It has not been heard of for too long: a link, or whoever acted for it, is
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

impl Reader {
    pub(crate) fn new(
        end: End,
        instance: u64,
        models: Models,
        delivery: Delivery,
        device: String,
    ) -> Self {
        Self {
            end,
            instance,
            models,
            delivery,
            device,
            refused: None,
            unusable: None,
            told: false,
            deaf: false,
            retired: false,
            owed: VecDeque::new(),
            asks: false,
        }
    }

    pub(crate) fn control(&self) -> &Control {
        match &self.end {
            End::Process { control, .. } => control.table(),
            End::Guest { seat, .. } => &seat.control,
        }
    }

    pub(crate) fn lane(&self) -> &Lane {
        match &self.end {
            End::Process { lane, .. } => lane.table(),
            End::Guest { seat, .. } => &seat.lane,
        }
    }

    /// Its process, wherever that is.
    pub(crate) fn pid(&self) -> u32 {
        match &self.end {
            End::Process { socket, .. } => socket.peer_pid(),
            End::Guest { pid, .. } => *pid,
        }
    }

    /// Its connection, if it is a process of this host.
    pub(crate) fn socket(&self) -> Option<&Arc<Socket>> {
        match &self.end {
            End::Process { socket, .. } => Some(socket),
            End::Guest { .. } => None,
        }
    }

    pub(crate) fn applied(&self) -> u64 {
        self.control().loaded.0.sequence.load(Ordering::Acquire)
    }

    pub(crate) fn taken(&self) -> u64 {
        self.control().holds.0.taken.load(Ordering::Acquire)
    }

    /// The last question whose answer it needs no more.
    pub(crate) fn through(&self) -> u64 {
        self.control().through.0.load(Ordering::Acquire)
    }

    pub(crate) fn has_left(&self) -> bool {
        self.control().left.0.load(Ordering::Acquire) != 0
    }

    /// The version it has loaded of a model.
    pub(crate) fn version(&self, model: usize) -> Version {
        let word = &self.control().loaded.0.versions[model];
        match self.models.contains(model) {
            true => Version(word.load(Ordering::Relaxed)),
            false => Version::NONE,
        }
    }

    /// The versions it has loaded, of the first `models` models.
    pub(crate) fn versions(&self, models: usize) -> Vec<Version> {
        (0..models).map(|model| self.version(model)).collect()
    }

    /// Takes its lane off everything.
    fn shut(&self) {
        match self.delivery {
            Delivery::Every { .. } => self.lane().queue.0.shut(),
            Delivery::Newest | Delivery::Asked => self.lane().live.0.clear(),
        }
        self.lane().answer.0.live.clear();
    }

    /// Wakes this reader, if it sleeps until it is answered.
    pub(crate) fn wake_for_answer(&self, key: Key) {
        if let End::Guest { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.0.sleeping() {
            futex::wake(&self.lane().answer.0.question);
        }
    }

    /// Wakes this reader, if it sleeps until it is told something.
    pub(crate) fn wake(&self, key: Key) {
        if let End::Guest { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.0.sleeping() {
            futex::wake(match self.delivery {
                Delivery::Every { .. } => self.lane().queue.0.tail_word(),
                Delivery::Newest | Delivery::Asked => self.lane().live.0.word(),
            });
        }
    }
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
        let state = State {
            plan: Plan::new(specs.len(), options.slots, options.history),
            models: specs.len(),
            readers: BTreeMap::new(),
            joined: 0,
            gone: VecDeque::new(),
            untold: 0,
            rejected: Vec::new(),
            slots,
            steps: Vec::new(),
        };
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
            state: Mutex::new(state),
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
        let rejected = std::mem::take(&mut self.state().rejected);
        rejected
            .into_iter()
            .map(|one| (one.key.0, one.reason))
            .collect()
    }

    pub(crate) fn rejected(&self) -> Vec<WorkerId> {
        self.state().rejected.iter().map(|one| one.key.0).collect()
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

impl State {
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

    /// Notes that a reader cannot use the models, once, and shuts its lane: a
    /// worker that has failed for good must not take slots from the others. What
    /// it pins goes on counting; pins that were looked for before are to be
    /// looked for again.
    pub(crate) fn reject(&mut self, key: Key, reason: String) {
        let Some(reader) = self.readers.get_mut(&key) else {
            return;
        };
        if reader.unusable.is_none() {
            self.plan.shut(key);
            reader.shut();
            reader.owed.clear();
        }
        let reason = reader.unusable.get_or_insert(reason).clone();
        if std::mem::replace(&mut reader.told, true) {
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
    pub(crate) fn tell_rejected(&mut self, wanted: impl Fn(WorkerId) -> bool) -> Vec<Rejected> {
        if self.rejected.is_empty() {
            return Vec::new();
        }
        let all = std::mem::take(&mut self.rejected);
        let (told, kept) = all.into_iter().partition(|one| wanted(one.key.0));
        self.rejected = kept;
        told
    }

    /// Removes a reader, and with it its pins. Called only once its process is
    /// known to be dead, or once it has closed its end with every snapshot gone.
    pub(crate) fn bury(&mut self, key: Key, unless_left: Going) {
        let Some(reader) = self.readers.remove(&key) else {
            return;
        };
        self.plan.leave(key);
        let versions = reader.versions(self.models);
        let applied = reader.applied();
        // Who leaves in order says so first, also one that gives up joining.
        let going = match reader.has_left() {
            true => Going::Left,
            false => unless_left,
        };
        let never_joined = going == Going::Left && applied == 0;
        let told = reader.told || never_joined;
        if self.gone.len() >= MAX_GONE
            && let Some(forgotten) = self.gone.pop_front()
        {
            self.untold -= usize::from(!forgotten.told);
        }
        self.untold += usize::from(!told);
        self.gone.push_back(Gone {
            key,
            pid: reader.pid(),
            going,
            applied,
            models: reader.models,
            versions,
            told,
        });
    }

    /// What is known of a reader that was there, and whether that was told before;
    /// nobody need be told again.
    pub(crate) fn tell_gone(&mut self, key: Key) -> Option<Gone> {
        let one = self.gone.iter_mut().rev().find(|one| one.key == key)?;
        let before = one.clone();
        if !std::mem::replace(&mut one.told, true) {
            self.untold -= 1;
        }
        Some(before)
    }

    /// Takes back that somebody was told that a reader has gone.
    pub(crate) fn untell(&mut self, key: Key) {
        if let Some(reader) = self.readers.get_mut(&key) {
            reader.told = false;
        } else if let Some(one) = self.gone.iter_mut().rev().find(|one| one.key == key)
            && std::mem::replace(&mut one.told, false)
        {
            self.untold += 1;
        }
    }

    /// Those that went and that nobody has been told of, of those `wanted`.
    pub(crate) fn tell_untold(&mut self, wanted: impl Fn(WorkerId) -> bool) -> Vec<Gone> {
        if self.untold == 0 {
            return Vec::new();
        }
        let mut told = Vec::new();
        for one in &mut self.gone {
            if !one.told && wanted(one.key.0) {
                one.told = true;
                self.untold -= 1;
                told.push(one.clone());
            }
        }
        told
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
