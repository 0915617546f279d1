//! Events of a relay's workers, until the relay takes them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use weightsync_core::{Epoch, Version, WorkerId};

use crate::map::MemoryMap;
use crate::plan::Key;
use crate::registry::{Departure, RegisteredReader, RegistryState};
use crate::service;
use crate::set::ModelMask;
use crate::socket::Socket;
use crate::threads::LockExt as _;
use crate::wire::{Delivery, Want};

/// How many workers may wait for admission.
const MAX_TICKETS: usize = 4096;

/// One life of a worker: its number, and a number that it chose when it first joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerInstance {
    /// The worker's number.
    pub worker: WorkerId,
    /// The number that it chose.
    pub instance: u64,
}

/// An event of a relay's workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    /// A worker wants to join: [`RelaySegment::admit`](super::RelaySegment::admit) or
    /// [`RelaySegment::deny`](super::RelaySegment::deny) it.
    Joins {
        /// Names the worker in the reply.
        ticket: u64,
        /// The worker.
        who: WorkerInstance,
        /// The worker's process.
        pid: u32,
        /// The models that the worker wants; [`ModelMask::ALL`] for all.
        models: ModelMask,
        /// Which versions the worker gets.
        delivery: Delivery,
        /// Where the worker's weights live.
        device: String,
        /// The highest epoch that the worker has seen.
        seen: Epoch,
    },
    /// A worker's progress has changed.
    Progress(ReportedProgress),
    /// A worker can use no version, and says why.
    Unusable {
        /// The worker.
        who: WorkerInstance,
        /// The worker's reason.
        reason: String,
    },
    /// A worker asks for a version: [`RelaySegment::answer`](super::RelaySegment::answer) the
    /// question, or report that there is [no such version](super::RelaySegment::no_such_version).
    Asks {
        /// The worker.
        who: WorkerInstance,
        /// The number of the question.
        question: u64,
        /// The set that the worker wants.
        want: Want,
    },
    /// A worker no longer waits for its answer.
    Withdraws {
        /// The worker.
        who: WorkerInstance,
    },
    /// A worker has closed its end, or died.
    Gone {
        /// The worker.
        who: WorkerInstance,
        /// Whether it died; otherwise it left in order.
        died: bool,
    },
}

/// The progress of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedProgress {
    /// The worker.
    pub who: WorkerInstance,
    /// The sequence number of the newest set that the worker has taken; 0 before the first.
    pub taken: u64,
    /// The last question whose answer the worker no longer needs.
    pub through: u64,
    /// The sequence number of the newest set that the worker has loaded; 0 before the first.
    pub loaded: u64,
    /// The version of each model that the worker has loaded.
    pub versions: Vec<(usize, Version)>,
    /// The last set that the worker refused, and why.
    pub refused: Option<(u64, String)>,
}

/// The part of a relay's segment that a sender's has not.
#[derive(Debug)]
pub(crate) struct Relayed {
    /// The sender's process, on whichever host.
    pub(crate) sender: u32,
    queue: Mutex<EventQueue>,
}

#[derive(Debug, Default)]
struct EventQueue {
    events: VecDeque<WorkerEvent>,
    /// The last message of each reader about questions. A later question replaces an earlier one of
    /// the same reader, so one place for each reader is enough.
    questions: BTreeMap<WorkerInstance, QuestionMessage>,
    tickets: BTreeMap<u64, Ticket>,
    last_ticket: u64,
    /// The progress of each reader when it was last reported.
    reported: BTreeMap<Key, LastReported>,
}

#[derive(Debug)]
struct LastReported {
    progress: ReportedProgress,
    unusable: bool,
    gone: bool,
}

/// A reader's message about questions.
#[derive(Debug)]
enum QuestionMessage {
    Asks(u64, Want),
    Withdraws,
}

/// A worker that waits for admission.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) request: service::JoinRequest,
    pub(crate) socket: Arc<Socket>,
    pub(crate) control: MemoryMap,
}

impl Relayed {
    pub(crate) fn new(sender: u32) -> Self {
        let queue = Mutex::default();
        Self { sender, queue }
    }

    /// Takes a waiting worker from the queue.
    pub(super) fn take(&self, ticket: u64) -> Option<Ticket> {
        self.queue().tickets.remove(&ticket)
    }

    /// Takes all waiting workers.
    pub(super) fn take_all(&self) -> impl Iterator<Item = Ticket> {
        std::mem::take(&mut self.queue().tickets).into_values()
    }

    /// Whether a worker still waits.
    pub(super) fn waits(&self, ticket: u64) -> bool {
        let queue = self.queue();
        let ticket = queue.tickets.get(&ticket);
        ticket.is_some_and(|ticket| !service::is_gone(&ticket.socket))
    }

    /// Reports everything again, except departures.
    pub(super) fn report_again(&self) {
        // A departure that was told twice could end the next life of that worker at the sender.
        self.queue().reported.retain(|_, reported| reported.gone);
    }

    /// Queues a worker until it is admitted or denied; returns it if too many wait.
    pub(crate) fn ask_in(&self, ticket: Ticket, seen: Epoch) -> Result<(), Ticket> {
        let mut queue = self.queue();
        // Workers that have given up meanwhile make room; nobody needs to hear of them.
        let before = queue.tickets.len();
        queue
            .tickets
            .retain(|_, one| !service::is_gone(&one.socket));
        if queue.tickets.len() < before {
            let EventQueue {
                events, tickets, ..
            } = &mut *queue;
            // The relay would ask its sender to admit workers that wait no longer.
            events.retain(|event| match event {
                WorkerEvent::Joins { ticket, .. } => tickets.contains_key(ticket),
                _ => true,
            });
        }
        if queue.tickets.len() >= MAX_TICKETS {
            return Err(ticket);
        }
        queue.last_ticket += 1;
        let number = queue.last_ticket;
        let request = &ticket.request;
        let event = WorkerEvent::Joins {
            ticket: number,
            who: WorkerInstance {
                worker: request.worker,
                instance: request.instance,
            },
            pid: ticket.socket.peer_pid(),
            models: request.models,
            delivery: request.delivery,
            device: request.device.clone(),
            seen,
        };
        queue.events.push_back(event);
        queue.tickets.insert(number, ticket);
        Ok(())
    }

    pub(crate) fn note_question(
        &self,
        reader: (Key, &RegisteredReader),
        question: u64,
        want: Want,
    ) {
        let questions = QuestionMessage::Asks(question, want);
        self.queue().questions.insert(who(reader), questions);
    }

    pub(crate) fn note_withdrawal(&self, reader: (Key, &RegisteredReader)) {
        self.queue()
            .questions
            .insert(who(reader), QuestionMessage::Withdraws);
    }

    /// Notes a reader's departure, after its last progress.
    pub(crate) fn note_gone(&self, state: &RegistryState, key: Key, going: Departure) {
        let mut queue = self.queue();
        let Some(reader) = state.readers.get(&key) else {
            return;
        };
        // Taken out, because `note` borrows the queue as well.
        let mut events = std::mem::take(&mut queue.events);
        let reported = queue.reported.remove(&key);
        let was_gone = reported.as_ref().is_some_and(|reported| reported.gone);
        // The reader no longer waits for an answer.
        queue.questions.remove(&who((key, reader)));
        // The last progress comes before the departure: the sender forgets the worker with that.
        queue.note(&mut events, (key, reader), reported);
        // The key never comes again.
        queue.reported.remove(&key);
        if !was_gone && !reader.has_left() {
            events.push_back(WorkerEvent::Gone {
                who: who((key, reader)),
                died: going == Departure::Died,
            });
        }
        queue.events = events;
    }

    /// Readers that have left and whose departure was not reported.
    pub(super) fn leaving(&self, state: &RegistryState) -> Vec<Key> {
        let queue = self.queue();
        let is_news = |(key, reader): &(&Key, &RegisteredReader)| {
            reader.has_left()
                && queue
                    .reported
                    .get(*key)
                    .is_none_or(|reported| !reported.gone)
        };
        let leaving = state.readers.iter().filter(is_news);
        leaving.map(|(key, _)| *key).collect()
    }

    pub(crate) fn look(&self, state: &RegistryState) -> Vec<WorkerEvent> {
        let mut queue = self.queue();
        let mut events = std::mem::take(&mut queue.events);
        // A question that was asked and withdrawn between two looks is told as withdrawn only.
        let questions = std::mem::take(&mut queue.questions).into_iter();
        events.extend(questions.map(|(who, questions)| match questions {
            QuestionMessage::Asks(question, want) => WorkerEvent::Asks {
                who,
                question,
                want,
            },
            QuestionMessage::Withdraws => WorkerEvent::Withdraws { who },
        }));
        for (key, reader) in &state.readers {
            let reported = queue.reported.remove(key);
            queue.note(&mut events, (*key, reader), reported);
        }
        // If a worker left and joined again with the same number, the departure comes first.
        let joins = |event: &WorkerEvent| matches!(event, WorkerEvent::Joins { .. });
        events.make_contiguous().sort_by_key(joins);
        events.into()
    }

    fn queue(&self) -> MutexGuard<'_, EventQueue> {
        // Events are pushed whole, so the queue is valid after a panic.
        self.queue.locked()
    }
}

impl EventQueue {
    /// Reports the changes of a reader since `reported`.
    fn note(
        &mut self,
        events: &mut VecDeque<WorkerEvent>,
        (key, reader): (Key, &RegisteredReader),
        reported: Option<LastReported>,
    ) {
        let who = who((key, reader));
        let progress = progress(who, reader);
        let unusable = reader.unusable.is_some();
        let gone = reader.has_left();
        let changed = |reported: &LastReported| reported.progress != progress;
        if reported.as_ref().is_none_or(changed) {
            events.push_back(WorkerEvent::Progress(progress.clone()));
        }
        let was = |what: fn(&LastReported) -> bool| reported.as_ref().is_some_and(what);
        if let (Some(reason), false) = (&reader.unusable, was(|reported| reported.unusable)) {
            let reason = reason.clone();
            events.push_back(WorkerEvent::Unusable { who, reason });
        }
        if gone && !was(|reported| reported.gone) {
            events.push_back(WorkerEvent::Gone { who, died: false });
        }
        let now = LastReported {
            progress,
            unusable,
            gone,
        };
        self.reported.insert(key, now);
    }
}

fn progress(who: WorkerInstance, reader: &RegisteredReader) -> ReportedProgress {
    // The sequence number first, because the reader stores it last.
    let loaded = reader.applied();
    let control = reader.control();
    let versions = reader.models.iter().filter_map(|model| {
        let word = &control.versions[model];
        let version = Version(word.load(Ordering::Relaxed));
        (!version.is_none()).then_some((model, version))
    });
    ReportedProgress {
        who,
        taken: reader.taken(),
        through: reader.through(),
        loaded,
        versions: versions.collect(),
        refused: reader.refused.clone(),
    }
}

fn who((key, reader): (Key, &RegisteredReader)) -> WorkerInstance {
    WorkerInstance {
        worker: key.0,
        instance: reader.instance,
    }
}
