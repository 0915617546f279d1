//! The reader's watch: a thread that listens to the sender's socket, so that a reader can sleep
//! on its mailbox and still learn that the sender died.
//!
//! The thread maps new slots as they are handed out, keeps the sender's answer to a question,
//! notices the sender's end, and sweeps slots that were written privately. The reader does
//! everything else and makes every decision.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, unexpected};
use crate::futex;
use crate::interrupt;
use crate::model::Model;
use crate::pins::{Pin, PinBook};
use crate::private::{Sweeps, SweepsOf};
use crate::protocol::{MAX_SLOTS, order};
use crate::slot::Slot;
use crate::socket::{Packet, Socket};
use crate::wait::{Deadline, Doorbell, passed, poll};
use crate::wire::FromSender;

/// How often a reader that waits for a slot looks whether it is interrupted.
const SLOT_PAUSE: Duration = Duration::from_millis(10);

/// A model and one of its slots.
pub(crate) type PinnedSlot = (Arc<Model>, Arc<Slot>);

/// What a reader finds of the slots it has pinned.
pub(crate) enum Slots {
    Mapped(Vec<PinnedSlot>),
    /// One has not come by the deadline, or before an interrupt.
    Later,
    /// This thread's check ended the wait for one.
    Interrupted,
    /// The sender is gone, and one never came.
    Over,
}

/// The thread, joined when dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    seen: Arc<Seen>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread has seen.
#[derive(Debug)]
pub(crate) struct Seen {
    book: Arc<PinBook>,
    /// The reader sleeps on its queue's tail, not on its live word.
    queued: bool,
    known: Mutex<Known>,
    changed: Condvar,
    /// The sender has gone, or the watch cannot go on.
    over: AtomicBool,
    /// The reader is asleep on its mailbox, or about to be.
    asleep: AtomicBool,
    /// The question whose answer the reader waits for; 0 if it waits for news.
    asking: AtomicU64,
    /// The reader's wait is to end although nothing has come.
    interrupted: AtomicBool,
    /// Has the thread see to it that an interrupted reader wakes, and sweep.
    call: Arc<Doorbell>,
    /// Slots that it is to sweep.
    sweeps: Arc<Sweeps>,
    stop: Doorbell,
    /// What is called once nothing more will come.
    end: Mutex<Option<OnEnd>>,
}

/// Called once.
struct OnEnd(Box<dyn FnOnce() + Send>);

impl fmt::Debug for OnEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnEnd")
    }
}

/// Has something done once nothing more will come from a segment.
#[derive(Clone, Debug)]
pub struct End {
    seen: Weak<Seen>,
}

impl End {
    /// Has `call` called at the end, by the thread that watches the segment, which
    /// must not be kept; at once if it has ended. What was asked for before is not
    /// called. If the reader is dropped before the end, nothing is.
    pub fn then(&self, call: impl FnOnce() + Send + 'static) {
        let Some(seen) = self.seen.upgrade() else {
            return;
        };
        let mut end = seen.end.lock().unwrap_or_else(PoisonError::into_inner);
        *end = Some(OnEnd(Box::new(call)));
        drop(end);
        if seen.over.load(Ordering::SeqCst) {
            seen.notify_end();
        }
    }
}

/// Ends a reader's wait from another thread.
///
/// **Guarantee.** After [`interrupt`](Self::interrupt) the [`Reader::next`] that
/// waits, or else the next one that would, returns nothing at once, as if its
/// deadline had come. Several interrupts before that add up to one. It may
/// outlive its reader, and then does nothing.
///
/// [`Reader::next`]: crate::Reader::next
#[derive(Clone, Debug)]
pub struct Interrupter {
    seen: Weak<Seen>,
}

impl Interrupter {
    /// Ends the wait.
    pub fn interrupt(&self) {
        let Some(seen) = self.seen.upgrade() else {
            return;
        };
        // In a forked child it is the parent's reader that would wake.
        if seen.book.header.usable().is_err() {
            return;
        }
        seen.interrupted.store(true, Ordering::SeqCst);
        if !seen.asleep.load(Ordering::SeqCst) {
            return;
        }
        if let Ok(word) = seen.word() {
            futex::wake(word);
        }
        // It may have been about to fall asleep.
        seen.call.ring();
    }
}

#[derive(Debug)]
struct Known {
    /// By model; `None` for those this reader has not asked for.
    models: Vec<Option<Mapped>>,
    /// The sender has no such version, and what it has instead; by the number
    /// of the question.
    answer: Option<(u64, Error)>,
    /// What the watch cannot go on after: from then on no new slot is mapped.
    fault: Option<Error>,
}

/// A model and its slots, as far as they have come.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) model: Arc<Model>,
    pub(crate) slots: Vec<Arc<Slot>>,
}

impl Watch {
    pub(crate) fn start(
        book: Arc<PinBook>,
        models: Vec<Option<Mapped>>,
        queued: bool,
    ) -> Result<Self, Error> {
        let call = Arc::new(Doorbell::new()?);
        let sweeps = Arc::new(Sweeps::new(call.clone()));
        let _ = book.sweeps.set(SweepsOf(Arc::downgrade(&sweeps)));
        let seen = Arc::new(Seen {
            book,
            queued,
            known: Mutex::new(Known {
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
        });
        let thread = std::thread::Builder::new()
            .name("weightsync-watch".into())
            .spawn({
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

    /// The models of what is pinned with the mappings of their slots. A new slot
    /// is nearly always there before what is in it, and comes later where the
    /// kernel had no room for one more descriptor on its way.
    pub(crate) fn slots(&self, pins: &[Pin], deadline: Deadline) -> Result<Slots, Error> {
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
                if self.is_over() {
                    return Ok(Slots::Over);
                }
                if passed(deadline) || self.take_interrupt() {
                    self.seen.book.wake_sender();
                    return Ok(Slots::Later);
                }
                if !waits {
                    // Others may wait for what was given back on the way here.
                    self.seen.book.wake_sender();
                    waits = true;
                }
                if interrupt::is_due() {
                    // Asked without the lock; then it is looked at again.
                    drop(known);
                    if interrupt::ask().is_err() {
                        self.seen.book.wake_sender();
                        return Ok(Slots::Interrupted);
                    }
                    known = self.seen.known();
                    continue;
                }
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                let pause = left.map_or(SLOT_PAUSE, |left| left.min(SLOT_PAUSE));
                let waited = self.seen.changed.wait_timeout(known, pause);
                known = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Ok(Slots::Mapped(pinned))
    }

    /// Whether the sender has said that it does not have what this question asks
    /// for.
    pub(crate) fn has_answer(&self, question: u64) -> bool {
        self.seen.has_answer(question)
    }

    /// The sender's answer to this question that it has no such version.
    pub(crate) fn take_answer(&self, question: u64) -> Option<Error> {
        let mut known = self.seen.known();
        let (_, answer) = known.answer.take_if(|(to, _)| *to == question)?;
        Some(answer)
    }

    /// What has something done at the end.
    pub(crate) fn end(&self) -> End {
        End {
            seen: Arc::downgrade(&self.seen),
        }
    }

    /// What ends the reader's waits.
    pub(crate) fn interrupter(&self) -> Interrupter {
        Interrupter {
            seen: Arc::downgrade(&self.seen),
        }
    }

    /// Whether a wait is to end although nothing has come.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.seen.interrupted.load(Ordering::SeqCst)
    }

    /// Whether this wait is to end; the next one is not.
    pub(crate) fn take_interrupt(&self) -> bool {
        self.seen.interrupted.swap(false, Ordering::SeqCst)
    }

    /// Whether nothing more will come from this sender.
    pub(crate) fn is_over(&self) -> bool {
        self.seen.over.load(Ordering::SeqCst)
    }

    /// What went wrong, at the sender or here, if it was that which ended it.
    pub(crate) fn fault(&self) -> Option<Error> {
        self.seen.known().fault.as_ref().map(Error::again)
    }

    /// Sleeps until the mailbox has moved, or this question (0: none) has its
    /// answer; until the watch is over, it is interrupted, or the deadline comes;
    /// may also wake for nothing. It does not sleep unless `still`.
    pub(crate) fn sleep(
        &self,
        question: u64,
        still: impl Fn() -> bool,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let seen = &self.seen;
        seen.asking.store(question, Ordering::SeqCst);
        let word = seen.word()?;
        let sleep = &seen.book.control()?.sleep;
        let value = futex::value(word);
        seen.asleep.store(true, Ordering::SeqCst);
        sleep.announce();
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
            // The thread is the parent's and does not exist in a forked child.
            std::mem::forget(thread);
            return;
        }
        self.seen.stop.ring();
        if thread.thread().id() == std::thread::current().id() {
            // What it called has dropped the reader: it ends when that returns.
            return;
        }
        // A panic there has been reported by the panic hook.
        let _ = thread.join();
    }
}

impl Seen {
    fn watch(&self) {
        let Ok(socket) = self.book.socket() else {
            return;
        };
        while self.listen(socket).unwrap_or_else(|fault| {
            // The sender lives, and need not wait for this reader.
            let _ = self.book.refuse(0, &fault.to_string());
            self.known().fault = Some(fault);
            false
        }) {}
        self.sweeps.end();
        if self.stopped(Some(Instant::now())) {
            return;
        }
        self.over.store(true, Ordering::SeqCst);
        order();
        // Under the lock, so that nobody is between looking and waiting.
        drop(self.known());
        self.changed.notify_all();
        self.rouse(|| true);
        self.notify_end();
    }

    fn notify_end(&self) {
        let end = self
            .end
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(OnEnd(call)) = end {
            call();
        }
    }

    /// Wakes the reader. One that looked before there was anything to see may
    /// fall asleep after the wake-up: it is woken until it is seen awake, or has
    /// found what it is woken for.
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

    /// The word the reader sleeps on.
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

    /// Waits for the sender's next words. False: there will be none.
    fn listen(&self, socket: &Socket) -> Result<bool, Error> {
        let (stop, call) = (self.stop.as_fd(), self.call.as_fd());
        let [stopped, called, _, died] = match socket.peer_death() {
            Some(death) => poll([stop, call, socket.as_fd(), death], None)?,
            None => {
                let [stopped, called, spoke] = poll([stop, call, socket.as_fd()], None)?;
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
                Packet::Data(bytes, fds) => match FromSender::decode(&bytes)? {
                    FromSender::Slot { model, index } => self.add_slot(model, index, fds)?,
                    FromSender::NoSuchVersion {
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
                    FromSender::Denied { reason } => return Err(Error::GivenUp { reason }),
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

    fn known(&self) -> MutexGuard<'_, Known> {
        // Single pushes and assignments: they hold after a panic.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
