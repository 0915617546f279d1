//! Where the thread that receives and the worker's own threads hand the receiver over.
//!
//! The receiver is here while no thread uses it. The receiving thread takes it to wait for
//! weights; a thread of the worker that needs it interrupts that wait, and takes it next.

use std::sync::{Condvar, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use weightsync_mem::threads::{CondvarExt as _, LockExt as _};
use weightsync_mem::{Origin, interrupt};

use super::status::{BackgroundState, BackgroundStatus};
use crate::error::Result;
use crate::receiver::Receiver;
use crate::transport::{Interrupter, deadline};

/// Where the thread and the worker's threads meet.
#[derive(Debug)]
pub(crate) struct ReceiverHandoff<B> {
    pub(super) inner: Mutex<HandoffState<B>>,
    pub(super) changed: Condvar,
    /// The process that opened it. In a forked child there is no thread, and the
    /// lock may be held for ever.
    pub(super) owner: Origin,
}

/// What the threads share, under the lock.
#[derive(Debug)]
pub(crate) struct HandoffState<B> {
    pub(crate) shared: B,
    pub(crate) status: BackgroundStatus,
    /// The receiver, while nobody uses it.
    pub(super) receiver: Option<Box<Receiver>>,
    pub(super) interrupter: Interrupter,
    /// Threads of the worker that wait for the receiver.
    pub(super) borrowers: usize,
    /// Counts what the thread has to look at.
    pub(super) news: u64,
    pub(super) stop: bool,
    /// Why the worker has failed, if the thread is to tell it at its end.
    pub(super) why: Option<String>,
    /// The thread has ended, or there never was one: nothing arrives any more.
    pub(super) ended: bool,
    /// The thread no longer uses this.
    pub(super) gone: bool,
}

impl<B> HandoffState<B> {
    /// The sender has shut down, and nothing of it is left to be loaded.
    fn is_closed(&self) -> bool {
        self.status.state == BackgroundState::Closed && self.status.staged.is_empty()
    }
}

impl<B> ReceiverHandoff<B> {
    /// Whether this process opened it.
    pub(crate) fn is_own(&self) -> bool {
        self.owner.is_here()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, HandoffState<B>> {
        // Changed in single steps, so it holds after a panic.
        self.inner.locked()
    }

    /// The same, if nobody is at it just now.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, HandoffState<B>>> {
        match self.inner.try_lock() {
            Ok(inner) => Some(inner),
            Err(TryLockError::Poisoned(inner)) => Some(inner.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether the thread is to end, or to release the receiver.
    pub(super) fn is_wanted(&self) -> bool {
        let inner = self.lock();
        inner.stop || inner.borrowers > 0
    }

    /// Changes something that the thread has to look at, and has it look.
    pub(crate) fn notify<T>(&self, change: impl FnOnce(&mut HandoffState<B>) -> T) -> T {
        let mut inner = self.lock();
        let result = change(&mut inner);
        inner.news += 1;
        // The thread may be waiting in the transport, which only the interrupter ends. If another
        // thread has the receiver, the interrupt ends a later wait early, which costs one look.
        let waiting = inner.receiver.is_none().then(|| inner.interrupter.clone());
        drop(inner);
        self.changed.notify_all();
        if let Some(waiting) = waiting {
            waiting.interrupt();
        }
        result
    }

    /// Changes something that only threads of the worker wait for.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut HandoffState<B>) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `look` finds something, or the deadline comes, or nothing
    /// will change any more; without a deadline also until the sender has shut down: its
    /// successor may never come.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`](crate::Error::Interrupted).
    pub(crate) fn wait<T>(
        &self,
        timeout: Option<Duration>,
        mut look: impl FnMut(&mut HandoffState<B>) -> Option<T>,
    ) -> Result<Option<T>> {
        let until = deadline(timeout);
        let mut inner = self.lock();
        loop {
            let found = look(&mut inner);
            // After a hand-over nothing arrives here.
            let is_over = inner.ended || inner.stop || until.is_none() && inner.is_closed();
            if found.is_some() || is_over {
                return Ok(found);
            }
            inner = match weightsync_mem::left(until) {
                Some(Duration::ZERO) => return Ok(None),
                left => self.rest(inner, left)?,
            };
        }
    }

    /// Uses the receiver from a thread of the worker.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`](crate::Error::Interrupted), and those of `with`.
    pub(crate) fn borrow<T>(&self, with: impl FnOnce(&mut Receiver) -> Result<T>) -> Result<T> {
        // Counted first: from here on the thread brings the receiver back, and does not take it
        // again.
        self.notify(|inner| inner.borrowers += 1);
        let receiver = self.until_lent();
        // The thread goes on if this was the last that wanted it.
        self.update(|inner| inner.borrowers -= 1);
        let receiver = receiver?;
        let mut lent = LentReceiver {
            handoff: self,
            receiver: Some(receiver),
        };
        lent.receiver
            .as_mut()
            .map(|receiver| with(receiver))
            .unwrap_or_else(|| unreachable!("it was inserted just now"))
    }

    fn until_lent(&self) -> Result<Box<Receiver>> {
        let mut inner = self.lock();
        loop {
            match inner.receiver.take() {
                Some(receiver) => return Ok(receiver),
                None => inner = self.rest(inner, None)?,
            }
        }
    }

    pub(super) fn until_gone(&self) -> Result<()> {
        let mut inner = self.lock();
        while !inner.gone {
            inner = self.rest(inner, None)?;
        }
        Ok(())
    }

    /// At the end of the thread: tells why the worker has failed, if it has.
    pub(super) fn fail(&self) {
        // Only with a reason. Otherwise the drop of the receiver tells the sender that it left in
        // order.
        let mut inner = self.lock();
        let why = inner.why.take();
        let receiver = why.as_ref().and_then(|_| inner.receiver.take());
        drop(inner);
        if let (Some(why), Some(receiver)) = (why, receiver) {
            receiver.fail(&why);
        }
    }

    /// Takes the receiver for the thread, once no other thread wants it; `None`
    /// when it is to end. The number is what the thread has seen of the news.
    pub(super) fn check_out(&self) -> Option<(Box<Receiver>, u64)> {
        let mut inner = self.lock();
        loop {
            if inner.stop {
                return None;
            }
            // A borrower goes first. It has interrupted this thread, which would otherwise take the
            // receiver back at once.
            if inner.borrowers == 0
                && let Some(receiver) = inner.receiver.take()
            {
                return Some((receiver, inner.news));
            }
            // Nobody interrupts this thread.
            inner = self.rest(inner, None).ok()?;
        }
    }

    /// Brings the receiver back, and says what state that leaves.
    pub(super) fn check_in(
        &self,
        receiver: Box<Receiver>,
        state: Option<BackgroundState>,
        ended: bool,
    ) {
        // After a restarted sender was joined it is another one.
        let interrupter = receiver.interrupter();
        // In one step: a thread that finds the receiver here finds the status of what it did.
        self.update(|inner| {
            if let Ok(interrupter) = interrupter {
                inner.interrupter = interrupter;
            }
            if let Some(state) = state {
                inner.status.state = state;
            }
            inner.status.reflect(&receiver);
            inner.receiver = Some(receiver);
            inner.ended |= ended;
        });
    }

    /// Waits at most so long for news beyond those seen.
    pub(super) fn rest_until_news(&self, seen: u64, at_most: Option<Duration>) {
        let until = deadline(at_most);
        let mut inner = self.lock();
        // News since the thread took the receiver are not slept through: it compares with what it
        // saw.
        while inner.news == seen {
            inner = match weightsync_mem::left(until) {
                Some(Duration::ZERO) => return,
                left => match self.rest(inner, left) {
                    Ok(inner) => inner,
                    Err(_) => return,
                },
            };
        }
    }

    /// Waits until something changes, at most so long; the caller looks again.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`](crate::Error::Interrupted).
    pub(crate) fn rest<'a>(
        &'a self,
        inner: MutexGuard<'a, HandoffState<B>>,
        left: Option<Duration>,
    ) -> Result<MutexGuard<'a, HandoffState<B>>> {
        // Only a thread of the worker may have a check for interruptions here.
        if interrupt::is_due() {
            // Asked without the lock: the check may need this lock.
            drop(inner);
            interrupt::ask()?;
            return Ok(self.lock());
        }
        Ok(self.changed.wait_at_most(inner, interrupt::slice(left)))
    }
}

/// The receiver in the hands of a thread of the worker; it comes back to the
/// handoff also if that panics.
struct LentReceiver<'a, B> {
    handoff: &'a ReceiverHandoff<B>,
    receiver: Option<Box<Receiver>>,
}

impl<B> Drop for LentReceiver<'_, B> {
    fn drop(&mut self) {
        // The receiver was not in the handoff meanwhile, so no other one is overwritten.
        let receiver = self.receiver.take();
        self.handoff.update(|inner| inner.receiver = receiver);
    }
}
