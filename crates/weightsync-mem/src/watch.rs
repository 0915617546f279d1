//! The reader's watch: a thread that listens to the sender's socket, so that a reader can sleep
//! on its mailbox and still learn that the sender died.
//!
//! The thread maps new slots as they are handed out, keeps the sender's answer to a question,
//! notices the sender's end, and sweeps slots that were written privately. The reader does
//! everything else and makes every decision.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, unexpected};
use crate::futex;
use crate::interrupt;
use crate::model::SegmentModel;
use crate::pins::{Pin, PinBook};
use crate::private::{Sweeps, SweepsOf};
use crate::protocol::{MAX_SLOTS, order};
use crate::slot::Slot;
use crate::socket::Socket;
use crate::threads::{self, CondvarExt as _, LockExt as _};
use crate::wait::{Deadline, Doorbell, left, passed, poll};
use crate::wire::{Packet, SenderMessage};

/// How often a reader that waits for a slot checks whether it is interrupted.
const SLOT_PAUSE: Duration = Duration::from_millis(10);

/// How often a reader looks whether its relay gets to run.
const LOOK: Duration = Duration::from_secs(1);

/// A relay that did not get to run between so many looks in a row is silent: for five seconds. Looks
/// count, and no clock: this end's own standstill is not silence of the other.
const SILENT: u32 = 5;

/// A model and one of its slots.
pub(crate) type PinnedSlot = (Arc<SegmentModel>, Arc<Slot>);

/// The result of looking for the slots of pins.
pub(crate) enum FoundSlots {
    Mapped(Vec<PinnedSlot>),
    /// A slot has not arrived by the deadline, or before an interrupt.
    Later,
    /// The thread's interrupt check ended the wait.
    Interrupted,
    /// The sender is gone, and a slot never arrived.
    Over,
}

/// The thread, joined when dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    seen: Arc<WatchState>,
    thread: Option<JoinHandle<()>>,
}

/// The state that the thread and its reader share.
#[derive(Debug)]
pub(crate) struct WatchState {
    book: Arc<PinBook>,
    /// The reader sleeps on its queue's tail, not on its live word.
    queued: bool,
    known: Mutex<KnownSlots>,
    changed: Condvar,
    /// The sender has gone, or the watch cannot go on.
    over: AtomicBool,
    /// The reader is asleep on its mailbox, or about to be.
    asleep: AtomicBool,
    /// The question whose answer the reader waits for; 0 if it waits for notifications.
    asking: AtomicU64,
    /// The reader's wait must end without a result.
    interrupted: AtomicBool,
    /// Wakes this thread, to wake an interrupted reader or to sweep.
    call: Arc<Doorbell>,
    /// Slots to sweep.
    sweeps: Arc<Sweeps>,
    stop: Doorbell,
    /// The function to call once nothing more will come.
    end: Mutex<Option<Callback<dyn FnOnce() + Send>>>,
    /// The segment is a relay's.
    relayed: bool,
    /// The function to call while the relay is silent.
    silence: Mutex<Option<Callback<dyn FnMut() + Send>>>,
}

/// A function that the thread calls.
struct Callback<F: ?Sized>(Box<F>);

impl<F: ?Sized> fmt::Debug for Callback<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Callback")
    }
}

/// A relay's signs of life.
#[derive(Debug, Default)]
struct Signs {
    beats: u64,
    /// How many looks in a row have found none.
    without: u32,
}

impl Signs {
    /// Takes in what a look found. True at every fifth in a row that found nothing new.
    fn look(&mut self, beats: u64) -> bool {
        let is_new = std::mem::replace(&mut self.beats, beats) != beats;
        self.without = if is_new { 0 } else { self.without + 1 };
        self.without > 0 && self.without.is_multiple_of(SILENT)
    }
}

/// Runs a function once nothing more will come from a segment, or while its relay is silent.
#[derive(Clone, Debug)]
pub struct EndNotice {
    seen: Weak<WatchState>,
}

impl EndNotice {
    /// Has the watching thread run `call` at the end; if the segment has ended, `call` runs at
    /// once. `call` must be quick. It replaces an earlier function. If the reader is dropped before
    /// the end, nothing runs.
    pub fn then(&self, call: impl FnOnce() + Send + 'static) {
        let Some(seen) = self.seen.upgrade() else {
            return;
        };
        // The function is there before this looks whether all is over. The watching thread sets
        // `over` first and takes the function afterwards. So one of the two calls it, and only one.
        let mut end = seen.end.locked();
        *end = Some(Callback(Box::new(call)));
        drop(end);
        if seen.over.load(Ordering::SeqCst) {
            seen.notify_end();
        }
    }

    /// Has the watching thread run `call` once the segment's relay has been silent for five seconds,
    /// and again after each five seconds more: its process is stopped, or does not get to run.
    /// `call` must be quick. It replaces an earlier function.
    pub fn while_silent(&self, call: impl FnMut() + Send + 'static) {
        if let Some(seen) = self.seen.upgrade() {
            *seen.on_silence() = Some(Callback(Box::new(call)));
        }
    }
}

/// Ends a reader's wait from another thread.
///
/// **Guarantee.** After [`interrupt`](Self::interrupt) the [`SegmentReader::next`] that waits, or
/// else the next one that would wait, returns nothing at once, as at its deadline. Several
/// interrupts before that add up to one. An interrupter may outlive its reader; it then does
/// nothing.
///
/// [`SegmentReader::next`]: crate::SegmentReader::next
#[derive(Clone, Debug)]
pub struct ReaderInterrupter {
    seen: Weak<WatchState>,
}

impl ReaderInterrupter {
    /// Ends the wait.
    pub fn interrupt(&self) {
        let Some(seen) = self.seen.upgrade() else {
            return;
        };
        // In a forked child this would wake the parent's reader.
        if seen.book.header.usable().is_err() {
            return;
        }
        // Stored before this asks who sleeps. The reader says that it sleeps before it looks at
        // this flag: one of the two sees the other.
        seen.interrupted.store(true, Ordering::SeqCst);
        if !seen.asleep.load(Ordering::SeqCst) {
            return;
        }
        if let Ok(word) = seen.word() {
            futex::wake(word);
        }
        // The reader may be about to fall asleep, so the thread wakes it until it is awake.
        seen.call.ring();
    }
}

#[derive(Debug)]
struct KnownSlots {
    /// By model; `None` for models that this reader does not take.
    models: Vec<Option<Mapped>>,
    /// The sender's reply that there is no such version, with the versions that exist, by the
    /// number of the question.
    answer: Option<(u64, Error)>,
    /// The error that stopped the watch; no new slot is mapped after it.
    fault: Option<Error>,
}

/// A model and the slots that have arrived.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) model: Arc<SegmentModel>,
    pub(crate) slots: Vec<Arc<Slot>>,
}

impl Watch {
    pub(crate) fn start(
        book: Arc<PinBook>,
        models: Vec<Option<Mapped>>,
        (queued, relayed): (bool, bool),
    ) -> Result<Self, Error> {
        let call = Arc::new(Doorbell::new()?);
        let sweeps = Arc::new(Sweeps::new(call.clone()));
        // Weak: snapshots, which hold the book, may outlive the reader and its thread.
        let _ = book.sweeps.set(SweepsOf(Arc::downgrade(&sweeps)));
        let seen = Arc::new(WatchState {
            book,
            queued,
            known: Mutex::new(KnownSlots {
                models,
                answer: None,
                fault: None,
            }),
            changed: Condvar::new(),
            over: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            asking: AtomicU64::new(0),
            interrupted: AtomicBool::new(false),
            call,
            sweeps,
            stop: Doorbell::new()?,
            end: Mutex::new(None),
            relayed,
            silence: Mutex::new(None),
        });
        let thread = threads::spawn("watch", {
            let seen = seen.clone();
            move || seen.watch()
        })
        .map_err(|source| Error::Os {
            action: "starting a reader's watch",
            source,
        })?;
        Ok(Self {
            seen,
            thread: Some(thread),
        })
    }

    /// The models and mapped slots of these pins. A new slot nearly always arrives before a set
    /// that names it. It comes later if the kernel had no room for another descriptor in flight.
    pub(crate) fn slots(&self, pins: &[Pin], deadline: Deadline) -> Result<FoundSlots, Error> {
        // The thread adds slots and tells of the end under this lock, so neither falls between look
        // and wait.
        let mut known = self.seen.known();
        let mut pinned = Vec::with_capacity(pins.len());
        let mut waits = false;
        for &Pin { model, slot, .. } in pins {
            loop {
                let mapped = known.models.get(model).and_then(Option::as_ref);
                let mapped =
                    mapped.ok_or_else(|| unexpected("a model asked for", model.to_string()))?;
                if let Some(slot) = mapped.slots.get(usize::from(slot)) {
                    pinned.push((mapped.model.clone(), slot.clone()));
                    break;
                }
                // Only after the slots: those that arrived before the end still count.
                if self.is_over() {
                    return Ok(FoundSlots::Over);
                }
                if passed(deadline) || self.take_interrupt() {
                    self.seen.book.wake_sender();
                    return Ok(FoundSlots::Later);
                }
                if !waits {
                    // The sender may wait for slots and records that were freed on the way here.
                    self.seen.book.wake_sender();
                    waits = true;
                }
                if interrupt::is_due() {
                    // The check runs without the lock; the loop then looks again.
                    drop(known);
                    if interrupt::ask().is_err() {
                        self.seen.book.wake_sender();
                        return Ok(FoundSlots::Interrupted);
                    }
                    known = self.seen.known();
                    continue;
                }
                let pause = left(deadline).map_or(SLOT_PAUSE, |left| left.min(SLOT_PAUSE));
                // A condition cannot wait for an interrupt too, so the wait is cut into short
                // pauses.
                known = self.seen.changed.wait_at_most(known, pause);
            }
        }
        Ok(FoundSlots::Mapped(pinned))
    }

    /// Whether the sender has replied that there is no version for this question.
    pub(crate) fn has_answer(&self, question: u64) -> bool {
        self.seen.has_answer(question)
    }

    /// Takes the sender's reply that there is no version for this question.
    pub(crate) fn take_answer(&self, question: u64) -> Option<Error> {
        let mut known = self.seen.known();
        let (_, answer) = known.answer.take_if(|(to, _)| *to == question)?;
        Some(answer)
    }

    /// The handle that runs a function at the end.
    pub(crate) fn end(&self) -> EndNotice {
        EndNotice {
            seen: Arc::downgrade(&self.seen),
        }
    }

    /// The handle that ends the reader's waits.
    pub(crate) fn interrupter(&self) -> ReaderInterrupter {
        ReaderInterrupter {
            seen: Arc::downgrade(&self.seen),
        }
    }

    /// Whether a wait must end without a result.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.seen.interrupted.load(Ordering::SeqCst)
    }

    /// Takes an interrupt: whether this wait must end. The next one need not.
    pub(crate) fn take_interrupt(&self) -> bool {
        self.seen.interrupted.swap(false, Ordering::SeqCst)
    }

    /// Whether nothing more will come from this sender.
    pub(crate) fn is_over(&self) -> bool {
        self.seen.over.load(Ordering::SeqCst)
    }

    /// The fault that ended the watch, at the sender or here, if one did.
    pub(crate) fn fault(&self) -> Option<Error> {
        self.seen.known().fault.as_ref().map(Error::again)
    }

    /// Sleeps until the mailbox has changed, this question (0 for none) has its reply, the watch is
    /// over, an interrupt arrives, or the deadline comes. May also wake without a reason. Sleeps
    /// only while `still` holds.
    pub(crate) fn sleep(
        &self,
        question: u64,
        still: impl Fn() -> bool,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let seen = &self.seen;
        // First, because the thread that wakes this reader chooses the word by this number.
        seen.asking.store(question, Ordering::SeqCst);
        let word = seen.word()?;
        let sleep = &seen.book.control()?.sleep;
        // The value comes before the last look. If the word changes after that look, the kernel
        // finds another value and does not sleep.
        let value = futex::value(word);
        // Two announcements: this one for the threads of this process, the next one for the sender.
        seen.asleep.store(true, Ordering::SeqCst);
        sleep.announce();
        // None of these changes the word. A thread that sets one after this look finds the reader
        // asleep, and wakes it.
        let quiet = || !self.is_over() && !self.is_interrupted() && !self.has_answer(question);
        let result = if still() && quiet() {
            futex::wait(word, value, deadline)
        } else {
            Ok(())
        };
        sleep.awake();
        seen.asleep.store(false, Ordering::SeqCst);
        result
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.seen.book.header.usable().is_err() {
            // In a forked child the thread does not exist: it belongs to the parent.
            std::mem::forget(thread);
            return;
        }
        self.seen.stop.ring();
        if thread.thread().id() == std::thread::current().id() {
            // The called function has dropped the reader: the thread ends when it returns.
            return;
        }
        // The panic hook has already reported a panic there.
        let _ = thread.join();
    }
}

impl WatchState {
    fn watch(&self) {
        let Ok(socket) = self.book.socket() else {
            return;
        };
        let mut look = self.relayed.then(|| Instant::now() + LOOK);
        let mut signs = Signs::default();
        while self.listen(socket, look).unwrap_or_else(|fault| {
            // The sender lives, and should not wait for this reader.
            let _ = self.book.refuse(0, &fault.to_string());
            self.known().fault = Some(fault);
            false
        }) {
            if passed(look) {
                look = Some(Instant::now() + LOOK);
                let beats = self.book.header().beats.0.load(Ordering::Relaxed);
                if signs.look(beats)
                    && let Some(Callback(call)) = &mut *self.on_silence()
                {
                    call();
                }
            }
        }
        self.sweeps.end();
        if self.stopped(Some(Instant::now())) {
            return;
        }
        self.over.store(true, Ordering::SeqCst);
        order();
        // Under the lock, so that no thread is between looking and waiting.
        drop(self.known());
        self.changed.notify_all();
        self.rouse(|| true);
        self.notify_end();
    }

    fn notify_end(&self) {
        let end = self.end.locked().take();
        if let Some(Callback(call)) = end {
            call();
        }
    }

    fn on_silence(&self) -> MutexGuard<'_, Option<Callback<dyn FnMut() + Send>>> {
        self.silence.locked()
    }

    /// Wakes the reader. A reader that looked too early may fall asleep after a wake-up, so this
    /// repeats until the reader is awake or has found what it waits for.
    fn rouse(&self, unseen: impl Fn() -> bool) {
        while self.asleep.load(Ordering::SeqCst) && unseen() {
            if let Ok(word) = self.word() {
                futex::wake(word);
            }
            if self.stopped(Some(Instant::now() + Duration::from_millis(1))) {
                return;
            }
        }
    }

    /// The word that the reader sleeps on.
    fn word(&self) -> Result<&AtomicU64, Error> {
        let mailbox = self.book.mailbox()?;
        Ok(match (self.asking.load(Ordering::SeqCst), self.queued) {
            (1.., _) => &mailbox.answer.0.question,
            (0, true) => mailbox.queue.0.tail_word(),
            (0, false) => mailbox.live.0.word(),
        })
    }

    fn has_answer(&self, question: u64) -> bool {
        let known = self.known();
        known.answer.as_ref().is_some_and(|(to, _)| *to == question)
    }

    /// Waits for the sender's next message, until the deadline. False if there will be none.
    fn listen(&self, socket: &Socket, deadline: Deadline) -> Result<bool, Error> {
        let (stop, call) = (self.stop.as_fd(), self.call.as_fd());
        let [stopped, called, _, died] = match socket.peer_death() {
            Some(death) => poll([stop, call, socket.as_fd(), death], deadline)?,
            None => {
                let [stopped, called, spoke] = poll([stop, call, socket.as_fd()], deadline)?;
                [stopped, called, spoke, false]
            }
        };
        if stopped {
            return Ok(false);
        }
        if called {
            self.call.silence();
            self.rouse(|| self.interrupted.load(Ordering::SeqCst));
            self.sweeps.work();
        }
        loop {
            match socket.receive()? {
                Packet::Empty => return Ok(!died),
                Packet::HungUp => return Ok(false),
                Packet::Data(bytes, fds) => match SenderMessage::decode(&bytes)? {
                    SenderMessage::Slot { model, index } => self.add_slot(model, index, fds)?,
                    SenderMessage::NoSuchVersion {
                        question,
                        model,
                        asked,
                        known,
                    } => {
                        let answer = Error::NoSuchVersion {
                            model: usize::from(model),
                            asked,
                            known,
                        };
                        self.known().answer = Some((question, answer));
                        self.rouse(|| {
                            let asking = self.asking.load(Ordering::SeqCst);
                            self.has_answer(asking)
                        });
                    }
                    SenderMessage::Denied { reason } => return Err(Error::GivenUp { reason }),
                    other => return Err(unexpected("a slot", format!("{other:?}"))),
                },
            }
        }
    }

    fn add_slot(&self, model: u8, index: u8, fds: Vec<OwnedFd>) -> Result<(), Error> {
        let [fd] = <[OwnedFd; 1]>::try_from(fds)
            .map_err(|fds| unexpected("one slot", format!("{} descriptors", fds.len())))?;
        let wrong = |got: String| unexpected("the next slot of a model asked for", got);
        let bytes = {
            let known = self.known();
            let mapped = known
                .models
                .get(usize::from(model))
                .and_then(Option::as_ref);
            let mapped = mapped.ok_or_else(|| wrong(format!("one of model {model}")))?;
            if usize::from(index) != mapped.slots.len() || mapped.slots.len() >= MAX_SLOTS {
                let got = format!("slot {index} after {}", mapped.slots.len());
                return Err(wrong(got));
            }
            mapped.model.slot_bytes()
        };
        let slot = Arc::new(Slot::of_peer(fd, bytes)?);
        if let Some(Some(mapped)) = self.known().models.get_mut(usize::from(model)) {
            mapped.slots.push(slot);
        }
        self.changed.notify_all();
        Ok(())
    }

    fn stopped(&self, deadline: Deadline) -> bool {
        matches!(poll([self.stop.as_fd()], deadline), Ok([true]))
    }

    fn known(&self) -> MutexGuard<'_, KnownSlots> {
        // Each change is one push or assignment, so the state is valid after a panic.
        self.known.locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relay_is_silent_at_each_fifth_look_without_a_sign() {
        let mut signs = Signs::default();
        let mut looks = |beats, count| {
            let found = (0..count).filter(|_| signs.look(beats));
            found.count()
        };
        assert_eq!(looks(7, 5), 0, "the first was new");
        assert_eq!(looks(8, 5), 0, "so was this");
        assert_eq!([looks(8, 1), looks(8, 4), looks(8, 1)], [1, 0, 1]);
        assert_eq!(looks(9, 1), 0);
    }
}
