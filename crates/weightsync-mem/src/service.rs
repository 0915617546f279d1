//! The sender's service thread: it accepts readers and notices their deaths, so that a send
//! never waits for either.

#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use weightsync_core::{Epoch, Version, WorkerId};

use crate::error::{Error, unexpected};
use crate::map::{MemoryMap, OwnedFile};
use crate::plan::{Answer, Key};
use crate::registry::{
    Departure, MAX_READERS, ReaderEnd, RegisteredReader, RegistryState, SharedRegistry,
};
use crate::relay::Ticket;
use crate::set::ModelMask;
use crate::shared::{CONTROL_BYTES, MAILBOX_BYTES};
use crate::socket::{HANG_UP, Listener, Socket};
use crate::threads;
use crate::wait::{poll, poll_slice};
use crate::wire::{Delivery, Packet, ReaderMessage, SenderMessage, Want};

/// The most connections without a hello, and how long one may last.
const MAX_STRANGERS: usize = 64;
const STRANGER_TIME: Duration = Duration::from_secs(2);
/// How many packets of one reader are handled before it is another reader's turn.
const MAX_TURN: usize = 16;

/// How many messages of a reader that is gone are read at most: more than a socket holds.
const MAX_UNREAD: usize = 4096;
/// How often slots are offered again that could not be sent.
const OWING_TIME: Duration = Duration::from_millis(20);
/// How often a relay shows its readers that it gets to run.
const BEAT: Duration = Duration::from_millis(500);

/// Starts the thread. It ends when [`SharedRegistry::close`] is called.
pub(crate) fn start(
    shared: Arc<SharedRegistry>,
    listener: Listener,
) -> Result<JoinHandle<()>, Error> {
    // Only a relay beats: its workers fetch for themselves while it is silent.
    let service = SegmentService {
        listener,
        strangers: Vec::new(),
        owes: false,
        beat: shared.relayed.is_some().then(Instant::now),
        shared,
    };
    threads::spawn("mem", move || service.run()).map_err(|source| Error::Os {
        action: "starting the segment's service thread",
        source,
    })
}

/// Shuts down strangers' connections, so that copies of their descriptors end too.
impl Drop for SegmentService {
    fn drop(&mut self) {
        for stranger in &self.strangers {
            stranger.socket.shut_down();
        }
    }
}

struct SegmentService {
    shared: Arc<SharedRegistry>,
    listener: Listener,
    strangers: Vec<Stranger>,
    /// Some reader still waits for slots.
    owes: bool,
    /// When a relay shows that it gets to run; `None` for a sender, whose readers wait for it.
    beat: Option<Instant>,
}

/// A connection that has sent no hello yet.
struct Stranger {
    socket: Socket,
    until: Instant,
}

impl SegmentService {
    fn run(mut self) {
        loop {
            match self.select() {
                Ok(false) => return,
                Ok(true) => {}
                // Out of descriptors or memory: connected readers are still served. The pause keeps
                // a lasting condition from spinning.
                // Kept for `wait_readers`, which would otherwise report a missing worker and not
                // the cause.
                Err(error) => {
                    *self.shared.failure() = Some(error);
                    let pause = Some(Instant::now() + Duration::from_millis(50));
                    if let Ok([true]) = poll([self.shared.stop.as_fd()], pause) {
                        return;
                    }
                }
            }
        }
    }

    /// Waits for the next events and handles them. False if the sender closes.
    // Longer than a screen: the poll's results are taken one by one in the order in which the list
    // is filled, so the list and all that takes from it stay in one place.
    fn select(&mut self) -> Result<bool, Error> {
        if self.beat.is_some_and(|at| Instant::now() >= at) {
            // Readers only look whether the number changes, so it orders nothing.
            self.shared.header().beats.0.fetch_add(1, Ordering::Relaxed);
            self.beat = Some(Instant::now() + BEAT);
        }
        let readers = self.shared.watched();
        let listens = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let ends = |fd| PollFd::from_borrowed_fd(fd, HANG_UP);
        // The results below are taken one by one in the order of this list.
        let mut polled = vec![
            listens(self.shared.stop.as_fd()),
            listens(self.shared.owes.as_fd()),
            listens(self.listener.as_fd()),
        ];
        polled.extend(
            self.strangers
                .iter()
                .map(|stranger| listens(stranger.socket.as_fd())),
        );
        // The messages of a deaf reader stay unread. A poll for them would return at once, again
        // and again.
        for (_, socket, deaf) in &readers {
            polled.push(if *deaf {
                ends(socket.as_fd())
            } else {
                listens(socket.as_fd())
            });
            // The process is watched as well: a forked child that holds a copy of the socket keeps
            // the connection open after the worker's death.
            polled.extend(socket.peer_death().map(listens));
        }
        // Without strangers, owed slots and a beat, the thread sleeps until an event.
        let strangers = self.strangers.iter().map(|stranger| stranger.until);
        let retry = self.owes.then(|| Instant::now() + OWING_TIME);
        let deadline = strangers.chain(retry).chain(self.beat).min();
        poll_slice(&mut polled, deadline)?;
        let mut ready = polled.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        if next() {
            return Ok(false);
        }
        if next() {
            // Silenced before the slots are offered: a ring that comes meanwhile ends the next
            // poll.
            self.shared.owes.silence();
            self.owes = true;
        }
        let knocked = next();
        let spoke: Vec<bool> = self.strangers.iter().map(|_| next()).collect();
        // Deaths before arrivals, so that a restarted worker finds its number free.
        let mut result = Ok(());
        for (key, socket, _) in &readers {
            let spoke = next();
            let died = socket.peer_death().is_some() && next();
            if spoke || died {
                // One reader's problem must not keep the others from being served.
                result = result.and(self.shared.listen_to(*key, died));
            }
        }
        let now = Instant::now();
        // A slot that a full socket kept back may go out now. This comes after the deaths, so that
        // none is sent to a reader that is gone.
        if self.owes {
            self.owes = self.shared.hand_slots(&mut self.shared.state());
        }
        let strangers = std::mem::take(&mut self.strangers);
        for (stranger, spoke) in strangers.into_iter().zip(spoke) {
            if spoke {
                // A stranger that woke the thread without a hello is dropped; it may connect again.
                drop(self.shared.meet(stranger.socket));
            } else if stranger.until > now {
                self.strangers.push(stranger);
            }
        }
        // Last: a restarted worker is let in after its predecessor was removed above.
        if knocked {
            result = result.and(self.let_in(now));
        }
        result.map(|()| true)
    }

    fn let_in(&mut self, now: Instant) -> Result<(), Error> {
        // Bounded, so that newcomers cannot take up all of this thread's time.
        for _ in 0..MAX_STRANGERS {
            match self.listener.accept() {
                Ok(None) => return Ok(()),
                Ok(Some(socket)) => {
                    // The hello is here already.
                    let Some(socket) = self.shared.meet(socket) else {
                        continue;
                    };
                    // The oldest stranger makes room: silent connections must not keep honest ones
                    // out.
                    if self.strangers.len() == MAX_STRANGERS {
                        self.strangers.remove(0);
                    }
                    self.strangers.push(Stranger {
                        socket,
                        until: now + STRANGER_TIME,
                    });
                }
                // Another user's connection is dropped, at no further cost.
                Err(error) if error.is_peer_fault() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl SharedRegistry {
    /// Handles a reader's messages, and removes the reader once its end is gone.
    pub(crate) fn listen_to(&self, key: Key, died: bool) -> Result<(), Error> {
        // The lock is released again: the question whether the peer is gone is a system call.
        let socket = |state: &RegistryState| state.readers.get(&key)?.socket().cloned();
        let Some(socket) = socket(&self.state()) else {
            return Ok(());
        };
        // Asked before the messages are read: those that the reader sent before its end are in the
        // socket by now.
        let gone = died || is_gone(&socket);
        let mut state = self.state();
        // Messages sent before a death count too, for example why the reader refused.
        let mut result = Ok(());
        // The lock is held meanwhile, and a reader that is there may send without end.
        // One that is gone has sent what it has, unless a forked child of it goes on.
        let most = if gone { MAX_UNREAD } else { MAX_TURN };
        for _ in 0..most {
            // A fault below makes the reader deaf, and so ends this loop.
            if state.readers.get(&key).is_none_or(|reader| reader.deaf) {
                break;
            }
            let fault = match socket.receive() {
                Ok(Packet::Empty) => break,
                // No bytes mean the end of the stream or an empty packet.
                Ok(Packet::HungUp) if is_gone(&socket) => break,
                Ok(Packet::HungUp) => Some("it sent an empty packet".into()),
                Ok(Packet::Data(bytes, _)) => match ReaderMessage::decode(&bytes) {
                    Ok(message) => self.on_message(&mut state, key, message),
                    Err(error) => Some(error.to_string()),
                },
                // Out of memory or descriptors: the reader lives and its pins count; the caller
                // pauses.
                Err(error) => {
                    result = Err(error);
                    break;
                }
            };
            // The reader is a line of the next report, and the others go on.
            if let Some(fault) = fault {
                state.condemn(key, fault);
            }
        }
        // A reader that goes now is handled next time. A sender that closes has shut the
        // connections down itself, so their hang-up shows no death.
        if gone && !self.is_closed() {
            self.bury(&mut state, key);
        }
        self.pass_on(&mut state);
        result
    }

    /// Handles one message of a reader. An error text if the message breaks the protocol.
    fn on_message(
        &self,
        state: &mut RegistryState,
        key: Key,
        message: ReaderMessage,
    ) -> Option<String> {
        let reader = state.readers.get_mut(&key)?;
        match message {
            ReaderMessage::Refused {
                // 0 stands for every set: the worker can use none.
                sequence: 0,
                reason,
            } => state.reject(key, reason),
            ReaderMessage::Refused { sequence, reason } => {
                reader.refused = Some((sequence, reason));
            }
            // The reader has given back an entry, a record or the place of its answer.
            ReaderMessage::Room => self.deliver(state),
            ReaderMessage::Withdraw => {
                // In a relay's segment the sender decides about questions: the relay passes
                // them on.
                match (&self.relayed, state.readers.get(&key)) {
                    (Some(relayed), Some(reader)) => relayed.note_withdrawal((key, reader)),
                    _ => state.plan.withdraw(key),
                }
            }
            ReaderMessage::Ask { question, want } => {
                // From now on the page is also read for the last question that the reader
                // is through with.
                reader.asks = true;
                match &self.relayed {
                    Some(relayed) => relayed.note_question((key, reader), question, want),
                    None => return self.answer(state, key, question, want),
                }
            }
            ReaderMessage::Hello { .. } => return Some("it said hello twice".into()),
            ReaderMessage::Status => {
                return Some("it asked for the status after its hello".into());
            }
        }
        None
    }

    /// Removes a reader whose process is gone, and notifies a relay.
    fn bury(&self, state: &mut RegistryState, key: Key) {
        if let Some(relayed) = &self.relayed {
            // First, because the event repeats the last progress in the reader's page.
            relayed.note_gone(state, key, Departure::Died);
        }
        state.bury(key, Departure::Died);
    }

    /// Delivers what the slots and records of a departed or rejected reader make room for, and has
    /// every waiting thread look again.
    fn pass_on(&self, state: &mut RegistryState) {
        // What the reader held may be the record or the queue entry that others wait for.
        if state.plan.anything_waits() {
            self.deliver(state);
        }
        self.bells.ring();
    }

    /// Handles the hello of a connection; returns the connection if there is none yet.
    fn meet(&self, socket: Socket) -> Option<Socket> {
        // A worker that learned of the end looks for the next sender, so this one must not admit it
        // again.
        if self.is_closed() {
            return None;
        }
        // The descriptors close when `fds` is dropped, whatever the answer is.
        let (bytes, fds) = match socket.receive() {
            Ok(Packet::Data(bytes, fds)) => (bytes, fds),
            Ok(Packet::Empty) => return Some(socket),
            Ok(Packet::HungUp) => return None,
            // A worker connects again.
            Err(error) => {
                if !error.is_peer_fault() {
                    *self.failure() = Some(error);
                }
                return None;
            }
        };
        let hello = ReaderMessage::decode(&bytes);
        match hello {
            Ok(ReaderMessage::Hello {
                secret,
                worker,
                seen,
                models,
                delivery,
                device,
                instance,
            }) => {
                if !same_secret(&secret, &self.secret) {
                    // A connection without the secret gets no answer.
                    return None;
                }
                // A relay that was stopped finds the hellos of workers that have gone elsewhere. To
                // ask its sender for them would take their memberships from there.
                if is_gone(&socket) {
                    return None;
                }
                let request = JoinRequest {
                    worker,
                    models,
                    delivery,
                    device,
                    instance,
                };
                self.consider(request, seen, socket, fds);
            }
            Ok(ReaderMessage::Status) => self.tell_status(&socket),
            Ok(_) => deny(&socket, "expected a hello first".into()),
            Err(error) => deny(&socket, error.to_string()),
        }
        None
    }

    /// Lets a worker join that has shown the secret, or refuses it with the reason.
    fn consider(&self, request: JoinRequest, seen: Epoch, socket: Socket, fds: Vec<OwnedFd>) {
        let admitted = self.admit(&request, seen);
        // Admission may come much later; the number is then checked again.
        let admitted = admitted.and_then(|()| self.vacate(&mut self.state(), request.worker));
        match admitted.and_then(|()| take_control(fds)) {
            Ok(control) => {
                let socket = Arc::new(socket);
                if let Err((socket, reason)) = self.let_join(request, seen, socket, control) {
                    self.refuse(&socket, reason);
                }
            }
            Err(reason) => self.refuse(&socket, reason),
        }
    }

    /// Answers a program that asks for the status.
    fn tell_status(&self, socket: &Socket) {
        let Some(answer) = self.status.get() else {
            return deny(socket, "this sender tells no status here".into());
        };
        let text = answer(self.roster());
        // The text of many workers does not fit into a packet, so it travels as a file. A mapping
        // cannot be empty.
        let told = OwnedFile::new("weightsync-status", text.len().max(1)).and_then(|file| {
            file.fill(&text);
            let packet = SenderMessage::Status {
                bytes: text.len() as u64,
            };
            socket.send(&packet.encode(), &[file.fd.as_fd()])
        });
        if let Err(error) = told {
            deny(socket, error.to_string());
        }
    }

    /// Refuses a worker that has shown the secret, and logs it.
    fn refuse(&self, socket: &Socket, reason: String) {
        (self.refused)(&reason);
        deny(socket, reason);
    }

    /// Answers a reader's question. An error text if the question breaks the protocol.
    fn answer(
        &self,
        state: &mut RegistryState,
        key: Key,
        question: u64,
        want: Want,
    ) -> Option<String> {
        // The pins first: an answer may write a record, and then none that a reader holds.
        let records = self.observe(state);
        let answer = self.decide(state, |plan, steps| {
            plan.ask(key, question, want, records, steps)
        });
        let (model, asked) = match want {
            Want::Newest => (0, Version::NONE),
            Want::AtLeast { model, version } | Want::Exactly { model, version } => (model, version),
        };
        match answer {
            Answer::Notified | Answer::Later | Answer::Gone => None,
            Answer::Unknown { known } => {
                let packet = SenderMessage::NoSuchVersion {
                    question,
                    model: model as u8,
                    asked,
                    known,
                };
                let socket = state.readers.get(&key)?.socket()?;
                match socket.send(&packet.encode(), &[]) {
                    // The answer would be lost, and the worker would wait for it until its own
                    // deadline.
                    Ok(false) if !is_gone(socket) => {
                        Some("it asks but does not read the answers".into())
                    }
                    Ok(_) => None,
                    Err(error) => Some(error.to_string()),
                }
            }
            Answer::NotAllowed => Some(format!(
                "it asked for {want:?}, which its models and its kind of delivery do not allow"
            )),
        }
    }

    /// Admits a reader at once or, in a relay's segment, once the sender has agreed.
    fn let_join(
        &self,
        request: JoinRequest,
        seen: Epoch,
        socket: Arc<Socket>,
        control: MemoryMap,
    ) -> Result<(), (Arc<Socket>, String)> {
        let Some(relayed) = &self.relayed else {
            return self.welcome(request, socket, control);
        };
        // Sent first, because the answer may follow at once.
        // The worker then gives the relay more time than a sender has to answer.
        let _ = socket.send(&SenderMessage::Wait.encode(), &[]);
        let ticket = Ticket {
            request,
            socket,
            control,
        };
        let asked = relayed.ask_in(ticket, seen);
        // The relay's own thread sleeps until there is an event.
        self.bells.ring();
        asked.map_err(|ticket| (ticket.socket, "too many workers are waiting to join".into()))
    }

    /// Checks whether a reader may join, except for conditions that depend on other readers.
    pub(crate) fn admit(&self, request: &JoinRequest, seen: Epoch) -> Result<(), String> {
        // This sender is the older one: a successor has fenced it off. Its versions must reach no
        // worker that has seen the successor.
        if seen > self.run.epoch {
            return Err(format!(
                "this run has {}, but the worker has seen {seen}: a newer trainer has taken over",
                self.run.epoch
            ));
        }
        let there_are = ModelMask::first(self.models.len());
        let wanted = request.models;
        if wanted != ModelMask::ALL && (wanted.is_empty() || wanted.and(there_are) != wanted) {
            return Err(format!(
                "the worker asks for models {wanted:?}, but there are {there_are:?}"
            ));
        }
        // Each version in a queue keeps a slot, so the sender limits what a worker may ask for.
        if let Delivery::Every { bound } = request.delivery
            && bound > self.max_queue
        {
            return Err(match self.max_queue {
                0 => "the worker asks for every version, but this sender keeps no queues".into(),
                most => format!(
                    "the worker asks for a queue of {bound} versions, but this sender allows {most}"
                ),
            });
        }
        Ok(())
    }

    /// Frees a worker's number for a newcomer, or says who has it. A reader that is gone is
    /// removed, and one that has left keeps only its pins.
    ///
    /// The caller holds the lock until the newcomer is added: two newcomers at the same time could
    /// otherwise both get the number.
    pub(crate) fn vacate(&self, state: &mut RegistryState, worker: WorkerId) -> Result<(), String> {
        // All readers of the number: one that left may still hold snapshots next to its successor.
        let before = state.readers.range((worker, 0)..=(worker, u64::MAX));
        for key in before.map(|(key, _)| *key).collect::<Vec<_>>() {
            let Some(old) = state.readers.get(&key) else {
                continue;
            };
            let pid = old.pid();
            // The service thread may not have come to this death yet. A restarted worker must not
            // be refused for that.
            if old.socket().is_some_and(|socket| is_gone(socket)) {
                self.bury(state, key);
                self.pass_on(state);
            } else if !state.retire(key) {
                return Err(format!(
                    "{worker} is already connected (pid {pid}); give this one another number"
                ));
            }
        }
        Ok(())
    }

    /// Adds a reader, if its number is free and there is room. From here on its pins count, and its
    /// mailbox names the set that it should run.
    pub(crate) fn welcome(
        &self,
        request: JoinRequest,
        socket: Arc<Socket>,
        control: MemoryMap,
    ) -> Result<(), (Arc<Socket>, String)> {
        // Made before the lock is taken, because it allocates memory.
        let mailbox = match OwnedFile::new("weightsync-mailbox", MAILBOX_BYTES) {
            Ok(mailbox) => mailbox,
            Err(error) => return Err((socket, self.note_failure(error))),
        };
        let mut state = self.state();
        if self.is_closed() {
            // The hang-up tells the worker to look for the next sender.
            return Ok(());
        }
        // Again, now under the lock under which the reader is added. Another newcomer of the number
        // may have come since.
        if let Err(reason) = self.make_place(&mut state, request.worker) {
            return Err((socket, reason));
        }
        // Each reader's key is new, so what is left of an earlier reader of the number is never
        // confused with this one.
        let models = request.models.and(ModelMask::first(self.models.len()));
        state.joined += 1;
        let key = (request.worker, state.joined);
        let end = ReaderEnd::Process {
            socket: socket.clone(),
            control,
            mailbox: mailbox.map.clone(),
        };
        let reader = RegisteredReader::new(
            end,
            request.instance,
            models,
            request.delivery,
            request.device,
        );
        // Added and answered under one lock. The reader may pin as soon as it has its mailbox, and
        // the scan for pins takes the same lock. The mailbox is on its set before that, so the
        // reader's first look finds it.
        state.add(key, reader);
        let records = self.observe(&mut state);
        self.decide(&mut state, |plan, steps| {
            // A new mailbox has no earlier numbers.
            plan.join((key, 0), models, request.delivery, records, steps);
        });
        if let Err(error) = self.hand_out(&state, &socket, models, &mailbox) {
            let undone = self.undo_welcome(&mut state, key, error);
            return undone.map_err(|reason| (socket, reason));
        }
        drop(state);
        // What was lacking for an earlier reader is there again.
        *self.failure() = None;
        self.bells.ring();
        Ok(())
    }

    /// Notes what the operating system refused, for the sender's next wait; returns it as a reason.
    fn note_failure(&self, error: Error) -> String {
        let reason = error.to_string();
        *self.failure() = Some(error);
        reason
    }

    /// Frees a worker's number, and checks that there is room for one more reader of this host.
    fn make_place(&self, state: &mut RegistryState, worker: WorkerId) -> Result<(), String> {
        self.vacate(state, worker)?;
        match state.counts().0 < MAX_READERS {
            true => Ok(()),
            false => Err(format!(
                "{MAX_READERS} workers of this host are connected, which is the limit"
            )),
        }
    }

    /// Removes a reader whose pages could not be sent. An error is the reason to refuse it with;
    /// without one the worker tries again.
    fn undo_welcome(
        &self,
        state: &mut RegistryState,
        key: Key,
        error: Error,
    ) -> Result<(), String> {
        let is_crowded_out = error.is_crowded_out();
        if let Some(relayed) = &self.relayed
            && is_crowded_out
        {
            // The relay is told below that the worker is in, and tells the sender.
            relayed.note_gone(state, key, Departure::Left);
            self.bells.ring();
        }
        // The reader lacks some of its pages, so it cannot hold anything yet.
        state.remove(key);
        match is_crowded_out {
            // After the hang-up the worker tries again.
            true => Ok(()),
            false => Err(self.note_failure(error)),
        }
    }

    /// Sends the pages: one packet for everything that all readers share, and one for each model.
    /// The packets are few and small, so the buffer of a new connection has room for them.
    fn hand_out(
        &self,
        state: &RegistryState,
        socket: &Socket,
        models: ModelMask,
        mailbox: &OwnedFile,
    ) -> Result<(), Error> {
        let send = |packet: SenderMessage, fds: &[BorrowedFd<'_>]| match socket
            .send(&packet.encode(), fds)?
        {
            true => Ok(()),
            false => Err(unexpected("a worker that reads", "a full socket".into())),
        };
        let welcome = SenderMessage::Welcome {
            run: self.run,
            count: self.models.len() as u8,
            models,
            relayed: self.relayed.as_ref().map_or(0, |relayed| relayed.sender),
        };
        // This process's own descriptor of the bell ends with this call. The kernel goes on
        // watching the bell for as long as the reader has it.
        let bell = self.bells.for_reader()?;
        let fds = [self.header.fd.as_fd(), mailbox.fd.as_fd(), bell.as_fd()];
        send(welcome, &fds)?;
        for model in models.iter() {
            let served = &self.models[model];
            // The lock is held since the reader was added: a slot made later is owed to it
            // (`add_slot`), and none comes twice.
            let slots = &state.slots[model];
            let packet = SenderMessage::Model {
                index: model as u8,
                slots: slots.len() as u8,
                slot_bytes: served.model.slot_bytes() as u64,
                layout_bytes: served.description.layout_bytes,
                note_bytes: served.description.note_bytes,
            };
            let mut fds = vec![served.description.file.fd.as_fd(), served.page.fd.as_fd()];
            fds.extend(slots.iter().map(|slot| slot.fd.as_fd()));
            send(packet, &fds)?;
        }
        Ok(())
    }
}

/// A request to join.
#[derive(Debug)]
pub(crate) struct JoinRequest {
    pub(crate) worker: WorkerId,
    pub(crate) models: ModelMask,
    pub(crate) delivery: Delivery,
    pub(crate) device: String,
    pub(crate) instance: u64,
}

/// Tells a reader why it gets nothing.
pub(crate) fn deny(socket: &Socket, reason: String) {
    // If the reader does not read, it does not learn of this.
    let _ = socket.send(&SenderMessage::Denied { reason }.encode(), &[]);
}

/// The reader's control page, from the descriptors of its hello.
fn take_control(fds: Vec<OwnedFd>) -> Result<MemoryMap, String> {
    let [control] = <[OwnedFd; 1]>::try_from(fds)
        .map_err(|fds| format!("expected one control page, got {}", fds.len()))?;
    MemoryMap::of_peer(control.as_fd(), CONTROL_BYTES).map_err(|error| error.to_string())
}

/// Whether the process or the end of a connection is gone.
pub(crate) fn is_gone(socket: &Socket) -> bool {
    let now = Some(Instant::now());
    // A connection may be closed while the process lives, and a process may be dead while a child
    // keeps the connection. Either is the end.
    let mut end = [PollFd::from_borrowed_fd(socket.as_fd(), HANG_UP)];
    let hung_up = poll_slice(&mut end, now).is_ok() && !end[0].revents().is_empty();
    hung_up || socket.is_peer_dead()
}

/// Compares in a time that does not reveal where the first difference is.
fn same_secret(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |seen, (a, b)| seen | (a ^ b)) == 0
}
