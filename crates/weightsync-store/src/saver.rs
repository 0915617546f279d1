//! Saving while training goes on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weightsync_engine::transport::threads::{self, CondvarExt as _, LockExt as _};
use weightsync_engine::transport::{interrupt, left};
use weightsync_engine::{Origin, Snapshot};

use crate::error::{Result, StoreError};
use crate::writer::{Saved, Writer};

/// A thread that saves versions, so that the trainer does not wait.
///
/// **Guarantee.** [`save`](Self::save) returns at once: it takes snapshots, which nobody can change.
/// One version is being saved and at most one waits; a newer one takes the place of the one that waits,
/// which then ends as superseded. Dropping the saver saves what waits, and ends the thread.
#[derive(Debug)]
pub struct Saver {
    inbox: Arc<SaverInbox>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread. In a forked child the inbox's lock may be held for ever.
    owner: Origin,
}

/// The save of one version: how it ended, or that it goes on.
#[derive(Clone, Debug)]
pub struct Saving(Arc<SaveState>);

/// How a save ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SaveOutcome {
    /// The version is in the store, and stays there whatever dies.
    Durable(Saved),
    /// It is not, for this reason.
    Failed(Arc<StoreError>),
    /// A newer version was to be saved before this one's turn came.
    Superseded,
}

#[derive(Debug, Default)]
struct SaverInbox {
    state: Mutex<SaverState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SaverState {
    next: Option<(Vec<Snapshot>, Saving)>,
    stop: bool,
}

#[derive(Debug, Default)]
struct SaveState {
    outcome: Mutex<Option<SaveOutcome>>,
    ended: Condvar,
}

impl Saver {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// [`StoreError::Engine`] if there is no thread for it.
    pub fn start(mut writer: Writer) -> Result<Self> {
        let inbox = Arc::new(SaverInbox::default());
        let theirs = inbox.clone();
        let thread = threads::spawn("save", move || {
            while let Some((models, saving)) = theirs.take() {
                // A panic ends this save, and nobody waits for ever.
                let saved = catch_unwind(AssertUnwindSafe(|| {
                    // Copied first: a snapshot in shared memory takes one of the sender's slots.
                    let own: Vec<_> = models.iter().map(Snapshot::to_owned_copy).collect();
                    drop(models);
                    writer.save_new(own)
                }));
                saving.end(match saved.unwrap_or_else(|panic| Err(panicked(&*panic))) {
                    Ok(saved) => SaveOutcome::Durable(saved),
                    Err(error) => {
                        tracing::warn!("a version was not saved: {error}");
                        SaveOutcome::Failed(Arc::new(error))
                    }
                });
            }
        });
        let failed = |source| weightsync_engine::Error::Os {
            action: "starting the thread that saves versions",
            source,
        };
        Ok(Self {
            inbox,
            thread: Some(thread.map_err(failed)?),
            owner: Origin::here(),
        })
    }

    /// Saves versions of some models, after the one that is being saved. A version that the store has
    /// already is left out, and one that is lower than that fails.
    pub fn save(&self, models: Vec<Snapshot>) -> Saving {
        let saving = Saving(Arc::default());
        // A forked child has no thread that would save anything.
        if let Err(error) = self.owner.check() {
            let error = weightsync_engine::Error::from(error);
            saving.end(SaveOutcome::Failed(Arc::new(error.into())));
            return saving;
        }
        // The inbox has room for one: the newest matters.
        let before = self.inbox.lock().next.replace((models, saving.clone()));
        self.inbox.changed.notify_one();
        // Its snapshots are given back at once, without being saved.
        if let Some((_, before)) = before {
            before.end(SaveOutcome::Superseded);
        }
        saving
    }

    /// Ends without a wait: what is being saved, and what waits, goes on for as long as the process lives.
    pub fn abandon(mut self) {
        self.thread = None;
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The thread is the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        // What still waits is saved: `take` hands it out before it looks at this.
        self.inbox.lock().stop = true;
        self.inbox.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It has no panic to hand on: the thread's own report is on stderr.
            let _ = thread.join();
        }
    }
}

impl SaverInbox {
    fn lock(&self) -> MutexGuard<'_, SaverState> {
        self.state.locked()
    }

    /// The next version to save; `None` at the end.
    fn take(&self) -> Option<(Vec<Snapshot>, Saving)> {
        let mut state = self.lock();
        loop {
            if let Some(next) = state.next.take() {
                return Some(next);
            }
            if state.stop {
                return None;
            }
            state = self.changed.wait_at_most(state, None);
        }
    }
}

impl Saving {
    /// How it ended; `None` while it goes on.
    pub fn outcome(&self) -> Option<SaveOutcome> {
        self.0.lock().clone()
    }

    /// Waits for its end; `None` at the deadline.
    ///
    /// # Errors
    ///
    /// An interruption.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<SaveOutcome>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if let Some(outcome) = self.outcome() {
                return Ok(Some(outcome));
            }
            let left = left(deadline);
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            // With no lock held: the check may ask for the outcome.
            let part = interrupt::at_most(left).map_err(weightsync_engine::Error::from)?;
            let outcome = self.0.lock();
            if outcome.is_none() {
                let longest = part.unwrap_or(Duration::MAX);
                drop(self.0.ended.wait_timeout(outcome, longest));
            }
        }
    }

    fn end(&self, outcome: SaveOutcome) {
        *self.0.lock() = Some(outcome);
        self.0.ended.notify_all();
    }
}

impl SaveState {
    fn lock(&self) -> MutexGuard<'_, Option<SaveOutcome>> {
        self.outcome.locked()
    }
}

fn panicked(panic: &(dyn Any + Send)) -> StoreError {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied());
    let message = text.unwrap_or("no message").to_owned();
    let what = "saving a version";
    weightsync_engine::Error::Panicked { what, message }.into()
}
