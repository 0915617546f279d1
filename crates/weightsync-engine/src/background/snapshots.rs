//! The newest weights at hand, for workers that read them in place.

use std::time::Duration;

use crate::background::BackgroundStatus;
use crate::background::handoff::ReceiverHandoff;
use crate::background::thread::{Follower, RemainingWork, ThreadTask, can_follow};
use crate::error::Result;
use crate::receiver::Receiver;
use crate::set::SetSnapshot;

/// The newest weights, kept at hand by a thread; see
/// [`Receiver::snapshots_in_background`].
///
/// **Guarantee.** What is at hand is one whole set. The sender is told that this
/// worker runs it as soon as it is here, whether or not anybody looks, and the
/// one before is released: a worker that does something else for long holds up
/// no send, and at most one version of each model.
///
/// A sender with a run directory is found again when it has restarted. Dropping
/// this ends the thread, and tells the sender that the worker has left;
/// snapshots taken from it stay valid. In a forked child every call is an error,
/// and dropping it does nothing.
#[derive(Debug)]
pub struct SnapshotsInBackground {
    follower: Follower<Option<SetSnapshot>>,
}

impl SnapshotsInBackground {
    pub(super) fn start(mut receiver: Receiver) -> Result<Self> {
        can_follow(&receiver)?;
        let first = match receiver.begin()? {
            Some(first) => Some(first),
            // What was loaded into a model is at hand too.
            None => receiver.set().latest()?,
        };
        // Told before the thread starts: what is at hand counts as running.
        if let Some(first) = &first {
            receiver.report_applied(first)?;
        }
        Ok(Self {
            follower: Follower::start(receiver, first, KeepNewest)?,
        })
    }

    /// The newest weights, at once; `None` only with a scheme that carries
    /// nothing.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn newest(&self) -> Result<Option<SetSnapshot>> {
        Ok(self.follower.handoff()?.lock().shared.clone())
    }

    /// Waits until the newest weights are as wished, and returns them; `None` if
    /// the timeout came first, or nothing will arrive any more: the sender has
    /// shut down or died, and will not come back. One with a run directory is
    /// looked for as long as this lives, and without a timeout this waits as
    /// long.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        mut wanted: impl FnMut(&SetSnapshot) -> bool,
    ) -> Result<Option<SetSnapshot>> {
        let handoff = self.follower.handoff()?;
        handoff.wait(timeout, |inner| {
            let newest = inner.shared.as_ref();
            newest.filter(|set| wanted(set)).cloned()
        })
    }

    /// Where it stands: what the sender is doing, and what this worker runs.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn status(&self) -> Result<BackgroundStatus> {
        Ok(self.follower.handoff()?.lock().status.clone())
    }

    /// Ends the thread, and gives the receiver back.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn stop(self) -> Result<Receiver> {
        Ok(self.follower.stop()?.0)
    }
}

/// Puts what arrives into the handoff.
struct KeepNewest;

impl ThreadTask for KeepNewest {
    type Shared = Option<SetSnapshot>;

    fn work(
        &mut self,
        _: &ReceiverHandoff<Self::Shared>,
        _: &mut Receiver,
    ) -> Result<RemainingWork> {
        Ok(RemainingWork::Nothing)
    }

    fn arrived(
        &mut self,
        handoff: &ReceiverHandoff<Self::Shared>,
        receiver: &mut Receiver,
        set: SetSnapshot,
    ) -> Result<()> {
        receiver.note_applied(&set);
        // Before the sender is told: a thread that has its report finds the version here.
        let before = handoff.update(|inner| {
            inner.status.reflect(receiver);
            inner.shared.replace(set.clone())
        });
        // Released outside the lock.
        drop(before);
        receiver.tell_applied(&set)
    }
}
