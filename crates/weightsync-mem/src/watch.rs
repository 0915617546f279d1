//! The reader's watch: a thread that listens to the sender's socket, so that a
//! reader can sleep on the live word itself and still learn of a death.
//!
//! The thread maps new slots as they are handed out and notices the sender's
//! end. Everything else, and every decision, stays with the reader.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, unexpected};
use crate::map::Mapping;
use crate::pins::PinBook;
use crate::protocol::order;
use crate::socket::{Packet, Socket};
use crate::wait::{Deadline, Doorbell, poll};
use crate::wire::FromSender;

/// A slot's descriptor is sent before the slot is used, so it is only ever this
/// thread's turn that is waited for.
const SLOT_TIME: Duration = Duration::from_secs(5);

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
    slot_bytes: usize,
    slots: Mutex<Slots>,
    changed: Condvar,
    /// The sender has gone, or has broken the protocol.
    over: AtomicBool,
    /// The reader is asleep on the live word, or about to be.
    asleep: AtomicBool,
    stop: Doorbell,
}

#[derive(Debug)]
struct Slots {
    mapped: Vec<Arc<Mapping>>,
    fault: Option<Error>,
}

impl Watch {
    pub(crate) fn start(
        book: Arc<PinBook>,
        mapped: Vec<Arc<Mapping>>,
        slot_bytes: usize,
    ) -> Result<Self, Error> {
        let seen = Arc::new(Seen {
            book,
            slot_bytes,
            slots: Mutex::new(Slots {
                mapped,
                fault: None,
            }),
            changed: Condvar::new(),
            over: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            stop: Doorbell::new()?,
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

    /// The mapping of a slot that the live word names; `None` if the sender is
    /// gone and it never came.
    pub(crate) fn slot(&self, slot: u8) -> Result<Option<Arc<Mapping>>, Error> {
        let until = Instant::now() + SLOT_TIME;
        let mut slots = self.seen.slots();
        loop {
            if let Some(mapping) = slots.mapped.get(usize::from(slot)) {
                return Ok(Some(mapping.clone()));
            }
            if self.is_over() {
                return Ok(None);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let got = format!("none for slot {slot}");
                return Err(unexpected("the descriptor of every slot in use", got));
            }
            let waited = self.seen.changed.wait_timeout(slots, left);
            slots = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether nothing more will come from this sender.
    pub(crate) fn is_over(&self) -> bool {
        self.seen.over.load(Ordering::SeqCst)
    }

    /// What the sender did wrong, if it was that which ended it.
    pub(crate) fn take_fault(&self) -> Option<Error> {
        self.seen.slots().fault.take()
    }

    /// Sleeps until the live word is no longer `sequence`'s, the deadline
    /// comes, or the watch is over; may also wake for nothing.
    pub(crate) fn sleep(&self, still: impl Fn() -> bool, deadline: Deadline) -> Result<(), Error> {
        let book = &self.seen.book;
        let live = &book.header().live.0;
        let sleep = &book.control()?.sleep.0;
        let word = live.futex_value();
        self.seen.asleep.store(true, Ordering::SeqCst);
        sleep.announce();
        let result = if still() && !self.is_over() {
            live.futex_wait(word, deadline)
        } else {
            Ok(())
        };
        sleep.awake();
        self.seen.asleep.store(false, Ordering::SeqCst);
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
            self.slots().fault = Some(fault);
            false
        }) {}
        if self.stopped(Some(Instant::now())) {
            return;
        }
        self.over.store(true, Ordering::SeqCst);
        order();
        // Under the lock, so that nobody is between looking and waiting.
        drop(self.slots());
        self.changed.notify_all();
        // A reader that looked before `over` was set may fall asleep after the
        // wake-up: it is woken until it is seen awake.
        while self.asleep.load(Ordering::SeqCst) {
            self.book.header().live.0.futex_wake();
            if self.stopped(Some(Instant::now() + Duration::from_millis(1))) {
                return;
            }
        }
    }

    /// Waits for the sender's next words. False: there will be none.
    fn listen(&self, socket: &Socket) -> Result<bool, Error> {
        let stop = self.stop.as_fd();
        let [stopped, _, died] = match socket.peer_death() {
            Some(death) => poll([stop, socket.as_fd(), death], None)?,
            None => {
                let [stopped, spoke] = poll([stop, socket.as_fd()], None)?;
                [stopped, spoke, false]
            }
        };
        if stopped {
            return Ok(false);
        }
        loop {
            match socket.receive()? {
                Packet::Empty => return Ok(!died),
                Packet::HungUp => return Ok(false),
                Packet::Data(bytes, fds) => match FromSender::decode(&bytes)? {
                    FromSender::Slot { index } => self.add_slot(index, fds)?,
                    other => return Err(unexpected("a slot", format!("{other:?}"))),
                },
            }
        }
    }

    fn add_slot(&self, index: u8, fds: Vec<OwnedFd>) -> Result<(), Error> {
        let [fd] = <[OwnedFd; 1]>::try_from(fds)
            .map_err(|fds| unexpected("one slot", format!("{} descriptors", fds.len())))?;
        let mapping = Mapping::of_peer(fd.as_fd(), self.slot_bytes)?;
        let mut slots = self.slots();
        if usize::from(index) != slots.mapped.len() {
            let got = format!("slot {index} after {}", slots.mapped.len());
            return Err(unexpected("the next slot in order", got));
        }
        slots.mapped.push(Arc::new(mapping));
        drop(slots);
        self.changed.notify_all();
        Ok(())
    }

    fn stopped(&self, deadline: Deadline) -> bool {
        matches!(poll([self.stop.as_fd()], deadline), Ok([true]))
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        // Single pushes and assignments: they hold after a panic.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
