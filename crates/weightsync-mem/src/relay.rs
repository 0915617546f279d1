//! A segment that carries another sender's versions: the one copy of a host,
//! shared by all its workers.
//!
//! **Guarantee.** What its readers are told is what [`Relay::tell`] says and
//! nothing else: no decision about who runs what is made here. Towards readers it
//! is a segment like any other, with the same guarantees; they only learn whether
//! it was the sender that ended or the relay ([`Ending`]).
//!
//! Versions arrive in pieces, in any order and from several threads, in a
//! [`Room`]; whole, they are [committed](Room::commit), and can be told.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use weightsync_core::{Epoch, Run, Version, WorkerId};

use crate::error::Error;
use crate::map::Mapping;
use crate::model::ModelSpec;
use crate::plan::Key;
use crate::room::Room;
use crate::roster::{Going, Reader, ReaderStatus, Shared, State};
use crate::service;
use crate::set::{ModelSet, Models, Placed};
use crate::shared::Ending;
use crate::snapshot::Snapshot;
use crate::socket::{Listener, Socket};
use crate::wait::Deadline;
use crate::wire::{Delivery, FromSender, Want};
use crate::writer::{self, SegmentOptions};

/// How many workers may wait to be let in.
const MAX_TICKETS: usize = 4096;

/// A worker as its segment knows it: its number, and what it chose when it first
/// joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seated {
    /// Its number.
    pub worker: WorkerId,
    /// Its choice.
    pub instance: u64,
}

/// What a relay learns of its workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker wants to join: [`Relay::admit`] or [`Relay::deny`] it.
    Joins {
        /// Names it in the answer.
        ticket: u64,
        /// Who it is.
        who: Seated,
        /// Its process.
        pid: u32,
        /// The models it wants; [`Models::ALL`] for every one there is.
        models: Models,
        /// Which versions it is to be given.
        delivery: Delivery,
        /// Where its weights live.
        device: String,
        /// The highest epoch it has seen.
        seen: Epoch,
    },
    /// How far a worker is, because that has changed.
    Progress(Progress),
    /// A worker can use nothing that comes, and says why.
    Unusable {
        /// Who.
        who: Seated,
        /// Its words.
        reason: String,
    },
    /// A worker asks for a version: [`Relay::answer`] it, or say that there is
    /// [no such version](Relay::no_such_version).
    Asks {
        /// Who.
        who: Seated,
        /// The question's number.
        question: u64,
        /// Which version.
        want: Want,
    },
    /// A worker does not wait for its answer any more.
    Withdraws {
        /// Who.
        who: Seated,
    },
    /// A worker has closed its end, or died.
    Gone {
        /// Who.
        who: Seated,
        /// Whether it died.
        died: bool,
    },
}

/// How far a worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Who.
    pub who: Seated,
    /// The sequence number of the newest set it has taken; 0 before the first.
    pub taken: u64,
    /// The last question whose answer it needs no more.
    pub through: u64,
    /// The sequence number of the newest set it has loaded; 0 before the first.
    pub loaded: u64,
    /// The version of each model it has loaded.
    pub versions: Vec<(usize, Version)>,
    /// The last set it could not use, and why.
    pub refused: Option<(u64, String)>,
}

/// What a relay's segment has beside a sender's.
#[derive(Debug)]
pub(crate) struct Relayed {
    /// The sender's process, wherever that is.
    pub(crate) sender: u32,
    news: Mutex<News>,
}

#[derive(Debug, Default)]
struct News {
    events: VecDeque<Event>,
    tickets: BTreeMap<u64, Ticket>,
    last_ticket: u64,
    /// How far each reader was when that was last told.
    told: BTreeMap<Key, Told>,
}

#[derive(Debug)]
struct Told {
    progress: Progress,
    unusable: bool,
    gone: bool,
}

/// A worker that waits to be let in.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) newcomer: service::Newcomer,
    pub(crate) socket: Arc<Socket>,
    pub(crate) control: Mapping,
}

/// A relay's end of a segment of its own.
///
/// A thread of its own accepts readers and notices their deaths. Dropping it
/// tells them that the relay has left ([`Ending::Moved`]).
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    service: Mutex<Option<JoinHandle<()>>>,
    options: SegmentOptions,
    /// Who lends slots does so alone.
    lending: Mutex<()>,
}

impl Relay {
    /// Makes the segment, of the run and the models of the sender whose process
    /// is `sender`, and begins to hear readers.
    ///
    /// # Errors
    ///
    /// As [`Writer::create`](crate::Writer::create).
    pub fn create(
        listener: Listener,
        secret: [u8; 16],
        (run, sender): (Run, u32),
        models: &[ModelSpec],
        options: SegmentOptions,
    ) -> Result<Self, Error> {
        writer::check(models, &options)?;
        let relayed = Relayed {
            // 0 would say that there is none.
            sender: sender.max(1),
            news: Mutex::default(),
        };
        let shared = Shared::new(run, models, secret, &options, Some(relayed))?;
        let service = service::start(shared.clone(), listener)?;
        Ok(Self {
            shared,
            service: Mutex::new(Some(service)),
            options,
            lending: Mutex::default(),
        })
    }

    /// The run whose versions these are.
    pub fn run(&self) -> Run {
        self.shared.run
    }

    /// Waits until there is anything to tell of the workers; nothing if the
    /// deadline comes first. What changes between two calls adds up.
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] once the relay is closed, [`Error::Forked`] in a
    /// forked child, or of the operating system.
    pub fn wait(&self, deadline: Deadline) -> Result<Vec<Event>, Error> {
        let relayed = self.relayed();
        let events = self.shared.wait_until(deadline, || {
            // Who has left may have said why just before.
            let leaving = relayed.leaving(&self.shared.state());
            for key in leaving {
                self.shared.listen_to(key, false)?;
            }
            let state = self.shared.state();
            let events = relayed.look(&state);
            Ok((!events.is_empty()).then_some(events))
        })?;
        Ok(events.unwrap_or_default())
    }

    /// What there is to tell of the workers that was not told before, without
    /// waiting; also after the end.
    pub fn last_events(&self) -> Vec<Event> {
        match self.shared.header.map.usable() {
            Ok(()) => self.relayed().look(&self.shared.state()),
            Err(_) => Vec::new(),
        }
    }

    /// Tells everything again from here on, as if it had changed: for a sender
    /// that knows nothing of it. Workers that left are not told of again.
    pub fn tell_again(&self) {
        self.relayed().news().told.retain(|_, told| told.gone);
        self.shared.doorbell.ring();
    }

    /// Whether a worker still waits to be let in.
    pub fn waits(&self, ticket: u64) -> bool {
        let news = self.relayed().news();
        let ticket = news.tickets.get(&ticket);
        ticket.is_some_and(|ticket| !service::is_gone(&ticket.socket))
    }

    /// Lets a worker in. Its lane is empty until it is told something.
    ///
    /// # Errors
    ///
    /// [`Error::Denied`] with the reason if that was not possible, or the worker
    /// has given up meanwhile; it has been told.
    pub fn admit(&self, ticket: u64) -> Result<(), Error> {
        let gave_up = || Error::Denied {
            reason: "the worker has given up waiting".into(),
        };
        let ticket = self.relayed().news().tickets.remove(&ticket);
        let Ticket {
            newcomer,
            socket,
            control,
        } = ticket.ok_or_else(gave_up)?;
        if service::is_gone(&socket) {
            return Err(gave_up());
        }
        let welcomed = self.shared.welcome(newcomer, socket, control);
        // The service thread listens to it from now on.
        self.shared.owes.ring();
        welcomed.map_err(|(socket, reason)| {
            let denied = FromSender::Denied {
                reason: reason.clone(),
            };
            let _ = socket.send(&denied.encode(), &[]);
            Error::Denied { reason }
        })
    }

    /// Turns a worker that waits to be let in away.
    pub fn deny(&self, ticket: u64, reason: &str) {
        if let Some(ticket) = self.relayed().news().tickets.remove(&ticket) {
            let denied = FromSender::Denied {
                reason: reason.into(),
            };
            // One that does not read is not helped.
            let _ = ticket.socket.send(&denied.encode(), &[]);
        }
    }

    /// Says no more to a worker, and why.
    pub fn turn_away(&self, who: Seated, reason: &str) {
        let mut state = self.shared.state();
        if let Some(key) = find(&state, who) {
            state.turn_away(key, reason.into());
        }
    }

    /// Puts a worker's lane on a set: one snapshot for each model of it, of this
    /// segment. Sequence numbers only grow for a worker. False if it is not there.
    ///
    /// # Panics
    ///
    /// If a snapshot is of another segment.
    pub fn tell(&self, who: Seated, sequence: u64, set: &[Snapshot]) -> bool {
        let set = self.set_of(set);
        let mut state = self.shared.state();
        let Some(key) = find(&state, who) else {
            return false;
        };
        let records = self.shared.observe(&mut state);
        self.shared.decide(&mut state, |plan, steps| {
            plan.tell_one(key, sequence, &set, records, steps)
        })
    }

    /// Answers a worker's question. False if it is not there.
    ///
    /// # Panics
    ///
    /// If a snapshot is of another segment.
    pub fn answer(&self, who: Seated, question: u64, sequence: u64, set: &[Snapshot]) -> bool {
        let set = self.set_of(set);
        let mut state = self.shared.state();
        let Some(key) = find(&state, who) else {
            return false;
        };
        let records = self.shared.observe(&mut state);
        self.shared.decide(&mut state, |plan, steps| {
            plan.answer_one(key, (question, sequence), &set, records, steps)
        })
    }

    /// Answers a worker's question with what there is instead.
    pub fn no_such_version(
        &self,
        who: Seated,
        question: u64,
        (model, asked): (usize, Version),
        known: Vec<Version>,
    ) {
        let packet = FromSender::NoSuchVersion {
            question,
            model: model as u8,
            asked,
            known,
        };
        let state = self.shared.state();
        let reader = find(&state, who).and_then(|key| state.readers.get(&key));
        if let Some(socket) = reader.and_then(Reader::socket) {
            // One that does not read its answers waits until its own deadline.
            let _ = socket.send(&packet.encode(), &[]);
        }
    }

    /// Room for a version that arrives in pieces of so many bytes; `None` while
    /// every slot is in use.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] if there is no such model, [`Error::SenderClosed`]
    /// after the end, and of the operating system.
    pub fn room(
        &self,
        model: usize,
        version: Version,
        piece_bytes: usize,
    ) -> Result<Option<Arc<Room>>, Error> {
        self.shared.check_model(model)?;
        self.shared.open()?;
        let _alone = self.lending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut parts = Vec::new();
        writer::lend(&self.shared, &[model], &mut parts, self.options.max_slots)?;
        let Some(part) = parts.pop() else {
            return Ok(None);
        };
        let (slot, file) = part.into_place();
        let room = Room::new(
            self.shared.clone(),
            (model, version),
            (slot, file),
            piece_bytes,
        );
        Ok(Some(Arc::new(room)))
    }

    /// Nothing is known any more of what is in the slots of a model, from before: no
    /// [room](Room) there has a [base](Room::base) until another version was whole.
    pub fn forget_bases(&self, model: usize) {
        let state = self.shared.state();
        for slot in state.slots.get(model).into_iter().flatten() {
            slot.forget();
        }
    }

    /// The workers that are connected, by number.
    pub fn readers(&self) -> Vec<ReaderStatus> {
        self.shared.readers()
    }

    /// Ends the segment, and tells the workers how. Only the first call counts.
    pub fn close(&self, ending: Ending) {
        let mut service = self.service.lock().unwrap_or_else(PoisonError::into_inner);
        if self.shared.header.map.usable().is_err() {
            // A forked child's copy: the thread and the memory are the parent's.
            if let Some(service) = service.take() {
                std::mem::forget(service);
            }
            return;
        }
        let Some(service) = service.take() else {
            return;
        };
        // What was said before the end is heard: why a worker refused, say.
        for (key, ..) in self.shared.watched() {
            // A lack of memory here is no reason not to end.
            let _ = self.shared.listen_to(key, false);
        }
        self.shared.close(ending);
        for ticket in std::mem::take(&mut self.relayed().news().tickets).into_values() {
            ticket.socket.shut_down();
        }
        // A panic there has been reported by the panic hook already.
        let _ = service.join();
    }

    fn set_of(&self, set: &[Snapshot]) -> ModelSet {
        let mut all = ModelSet::EMPTY;
        for snapshot in set {
            let (book, slot) = snapshot.place();
            assert!(
                Arc::ptr_eq(book, &self.shared.own),
                "a snapshot of another segment"
            );
            let version = snapshot.version();
            all.put(snapshot.model(), Placed { slot, version });
        }
        all
    }

    fn relayed(&self) -> &Relayed {
        let relayed = self.shared.relayed.as_ref();
        relayed.unwrap_or_else(|| unreachable!("made with it"))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.close(Ending::Moved);
    }
}

impl Relayed {
    /// Keeps a worker waiting until it is admitted or denied; gives it back if too
    /// many wait.
    pub(crate) fn ask_in(&self, ticket: Ticket, seen: Epoch) -> Result<(), Ticket> {
        let mut news = self.news();
        // Those that have given up meanwhile make room.
        news.tickets.retain(|_, one| !service::is_gone(&one.socket));
        if news.tickets.len() >= MAX_TICKETS {
            return Err(ticket);
        }
        news.last_ticket += 1;
        let number = news.last_ticket;
        let newcomer = &ticket.newcomer;
        let event = Event::Joins {
            ticket: number,
            who: Seated {
                worker: newcomer.worker,
                instance: newcomer.instance,
            },
            pid: ticket.socket.peer_pid(),
            models: newcomer.models,
            delivery: newcomer.delivery,
            device: newcomer.device.clone(),
            seen,
        };
        news.events.push_back(event);
        news.tickets.insert(number, ticket);
        Ok(())
    }

    pub(crate) fn note_question(&self, reader: (Key, &Reader), question: u64, want: Want) {
        let who = who(reader);
        let asks = Event::Asks {
            who,
            question,
            want,
        };
        self.news().events.push_back(asks);
    }

    pub(crate) fn note_withdrawal(&self, reader: (Key, &Reader)) {
        let who = who(reader);
        self.news().events.push_back(Event::Withdraws { who });
    }

    /// A reader goes: how far it came is told before that.
    pub(crate) fn note_gone(&self, state: &State, key: Key, going: Going) {
        let mut news = self.news();
        let Some(reader) = state.readers.get(&key) else {
            return;
        };
        let mut events = std::mem::take(&mut news.events);
        let told = news.told.remove(&key);
        let was_gone = told.as_ref().is_some_and(|told| told.gone);
        news.note(&mut events, (key, reader), told);
        news.told.remove(&key);
        if !was_gone && !reader.has_left() {
            events.push_back(Event::Gone {
                who: who((key, reader)),
                died: going == Going::Died,
            });
        }
        news.events = events;
    }

    /// Readers that have left and of whom that has not been told.
    fn leaving(&self, state: &State) -> Vec<Key> {
        let news = self.news();
        let is_news = |(key, reader): &(&Key, &Reader)| {
            reader.has_left() && news.told.get(*key).is_none_or(|told| !told.gone)
        };
        let leaving = state.readers.iter().filter(is_news);
        leaving.map(|(key, _)| *key).collect()
    }

    fn look(&self, state: &State) -> Vec<Event> {
        let mut news = self.news();
        let mut events = std::mem::take(&mut news.events);
        for (key, reader) in &state.readers {
            let told = news.told.remove(key);
            news.note(&mut events, (*key, reader), told);
        }
        events.into()
    }

    fn news(&self) -> MutexGuard<'_, News> {
        // Whole events are pushed, so it holds after a panic.
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl News {
    /// Tells what has changed of a reader since `told`.
    fn note(
        &mut self,
        events: &mut VecDeque<Event>,
        (key, reader): (Key, &Reader),
        told: Option<Told>,
    ) {
        let who = who((key, reader));
        let progress = progress(who, reader);
        let unusable = reader.unusable.is_some();
        let gone = reader.has_left();
        let changed = |told: &Told| told.progress != progress;
        if told.as_ref().is_none_or(changed) {
            events.push_back(Event::Progress(progress.clone()));
        }
        let was = |what: fn(&Told) -> bool| told.as_ref().is_some_and(what);
        if let (Some(reason), false) = (&reader.unusable, was(|told| told.unusable)) {
            let reason = reason.clone();
            events.push_back(Event::Unusable { who, reason });
        }
        if gone && !was(|told| told.gone) {
            events.push_back(Event::Gone { who, died: false });
        }
        let now = Told {
            progress,
            unusable,
            gone,
        };
        self.told.insert(key, now);
    }
}

fn progress(who: Seated, reader: &Reader) -> Progress {
    // The sequence number first: it is stored last.
    let loaded = reader.applied();
    let control = reader.control();
    let versions = reader.models.iter().filter_map(|model| {
        let word = &control.loaded.0.versions[model];
        let version = Version(word.load(Ordering::Relaxed));
        (!version.is_none()).then_some((model, version))
    });
    Progress {
        who,
        taken: reader.taken(),
        through: reader.through(),
        loaded,
        versions: versions.collect(),
        refused: reader.refused.clone(),
    }
}

fn who((key, reader): (Key, &Reader)) -> Seated {
    Seated {
        worker: key.0,
        instance: reader.instance,
    }
}

/// The worker's newest reader, if that is this one and it has not left.
fn find(state: &State, who: Seated) -> Option<Key> {
    let all = (who.worker, 0)..=(who.worker, u64::MAX);
    let (key, reader) = state.readers.range(all).next_back()?;
    (reader.instance == who.instance && !reader.has_left()).then_some(*key)
}
