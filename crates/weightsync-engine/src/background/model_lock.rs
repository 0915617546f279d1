//! The threads that use the models, and the set that waits until no thread does.
//!
//! The decisions work on plain values; only [`ModelPermit`]s wait.

use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::background::handoff::ReceiverHandoff;
use crate::error::{Error, Result};
use crate::set::SetSnapshot;
use crate::transport::deadline;

/// How long a thread lets a waiting version go first, at least. The time is short, because a thread
/// that holds a guard may be waiting for this thread.
const COURTESY: Duration = Duration::from_millis(10);

/// A version that has waited for so long waits for a guard that does not end soon: the others are
/// not held up for it any more.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a thread lets a version, or a writer, go first that has been waiting for so long. Guards
/// that overlap leave no gap otherwise, however long each of them is held.
fn courtesy(waited: Duration) -> Duration {
    match waited < PATIENCE {
        true => waited.max(COURTESY),
        false => COURTESY,
    }
}

/// Which threads use the models, and the set that waits to be loaded.
#[derive(Debug, Default)]
pub(super) struct ModelLock {
    staged: Option<SetSnapshot>,
    permits: Permits,
    /// Threads that wait for a permit.
    queue: usize,
}

/// The threads that have a permit.
#[derive(Debug, Default)]
struct Permits {
    /// Threads that read, each with its number of guards.
    shared: Vec<(ThreadId, usize)>,
    /// The thread that writes.
    alone: Option<ThreadId>,
    /// Since when a version waits until no thread has a permit.
    version: Option<Instant>,
    /// Since when each thread that is to write waits.
    writers: Vec<Instant>,
}

/// The access that a thread asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelAccess {
    Shared,
    Alone,
}

/// Whether a thread gets a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PermitAnswer {
    Now,
    /// Now, after the version or the writer that has been waiting for longer.
    AfterYou,
    /// Once another thread has left.
    Later,
    /// Never: the thread would wait for itself.
    Never,
}

impl ModelLock {
    pub(super) fn holds(&self, me: ThreadId) -> bool {
        self.permits.holds(me)
    }

    pub(super) fn has_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Stages a set for the next safe point; returns the set it replaces.
    pub(super) fn stage(&mut self, set: SetSnapshot) -> Option<SetSnapshot> {
        self.staged.replace(set)
    }

    /// Takes the set and the models, if no thread has a permit. Otherwise, if it asks since some
    /// time, the last thread to leave wakes the receiving thread.
    pub(super) fn take_staged(
        &mut self,
        me: ThreadId,
        ask: Option<Instant>,
    ) -> Option<SetSnapshot> {
        if !self.permits.is_empty() {
            // The first request counts: the longer a version has waited, the longer others let it
            // go first.
            self.permits.version = self.permits.version.or(ask);
            return None;
        }
        // In one step with the look: no other thread gets a permit before this one leaves.
        self.permits.version = None;
        self.permits.enter(ModelAccess::Alone, me);
        self.staged.take()
    }

    /// Whether no thread has a permit; otherwise the last thread to leave wakes the receiver.
    pub(super) fn asks_for_staged(&mut self, now: Instant) -> bool {
        // Also where no thread has a permit: another may take one before this one is alone.
        self.permits.version.get_or_insert(now);
        self.permits.is_empty()
    }

    pub(super) fn asks_no_more(&mut self) {
        self.permits.version = None;
    }

    pub(super) fn leave(&mut self, me: ThreadId) {
        self.permits.leave(me);
    }

    pub(super) fn into_staged(self) -> Option<SetSnapshot> {
        self.staged
    }
}

impl Permits {
    fn holds(&self, me: ThreadId) -> bool {
        self.alone == Some(me) || self.looks(me)
    }

    fn looks(&self, me: ThreadId) -> bool {
        self.shared.iter().any(|(one, _)| *one == me)
    }

    fn admits(&self, access: ModelAccess, me: ThreadId) -> PermitAnswer {
        let own = self.alone == Some(me);
        match access {
            // A thread waits for its own guards for ever.
            ModelAccess::Shared if own => PermitAnswer::Never,
            ModelAccess::Alone if own || self.looks(me) => PermitAnswer::Never,
            _ if self.alone.is_some() => PermitAnswer::Later,
            ModelAccess::Alone if !self.shared.is_empty() => PermitAnswer::Later,
            // A thread that reads already would wait for itself.
            ModelAccess::Shared if self.looks(me) => PermitAnswer::Now,
            _ if self.version.is_some() => PermitAnswer::AfterYou,
            // Readers only. A writer that waits is in this list itself, and would let itself go
            // first.
            ModelAccess::Shared if !self.writers.is_empty() => PermitAnswer::AfterYou,
            _ => PermitAnswer::Now,
        }
    }

    /// How long the version or the writer has waited that began first.
    fn waited(&self, now: Instant) -> Duration {
        let since = self.version.iter().chain(&self.writers).min();
        since.map_or(Duration::ZERO, |since| {
            now.saturating_duration_since(*since)
        })
    }

    fn wait_to_write(&mut self, since: Instant) {
        self.writers.push(since);
    }

    fn waits_no_more(&mut self, since: Instant) {
        // Any of equal times will do: only the earliest counts.
        if let Some(at) = self.writers.iter().position(|one| *one == since) {
            self.writers.swap_remove(at);
        }
    }

    fn enter(&mut self, access: ModelAccess, me: ThreadId) {
        match access {
            ModelAccess::Alone => self.alone = Some(me),
            ModelAccess::Shared => match self.shared.iter_mut().find(|(one, _)| *one == me) {
                Some((_, count)) => *count += 1,
                None => self.shared.push((me, 1)),
            },
        }
    }

    fn leave(&mut self, me: ThreadId) {
        if self.alone == Some(me) {
            self.alone = None;
        } else if let Some(at) = self.shared.iter().position(|(one, _)| *one == me) {
            self.shared[at].1 -= 1;
            if self.shared[at].1 == 0 {
                self.shared.swap_remove(at);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.alone.is_none() && self.shared.is_empty()
    }
}

/// A thread's permit to use the models; dropping it gives the permit back.
#[derive(Debug)]
pub(super) struct ModelPermit<'a> {
    handoff: &'a ReceiverHandoff<ModelLock>,
    me: ThreadId,
}

impl<'a> ModelPermit<'a> {
    /// Waits for a permit.
    ///
    /// # Errors
    ///
    /// [`Error::GuardHeld`], [`Error::GuardsInUse`] at the timeout, [`Error::Interrupted`].
    pub(super) fn take(
        handoff: &'a ReceiverHandoff<ModelLock>,
        access: ModelAccess,
        call: &'static str,
        timeout: Option<Duration>,
    ) -> Result<Self> {
        let me = come_in(handoff, access, call, timeout)?;
        Ok(Self { handoff, me })
    }
}

impl Drop for ModelPermit<'_> {
    fn drop(&mut self) {
        go_out(self.handoff, self.me);
    }
}

/// The permit of a thread that only reads, for callers that cannot borrow the handoff. The permit
/// belongs to the thread that took it, in whichever thread it is dropped.
#[derive(Debug)]
pub(super) struct OwnedPermit {
    /// A caller that stops the receiving thread does not wait for this.
    handoff: Weak<ReceiverHandoff<ModelLock>>,
    me: ThreadId,
}

impl OwnedPermit {
    /// Waits for a permit.
    pub(super) fn take(
        handoff: &Arc<ReceiverHandoff<ModelLock>>,
        call: &'static str,
    ) -> Result<Self> {
        let me = come_in(handoff, ModelAccess::Shared, call, None)?;
        Ok(Self {
            handoff: Arc::downgrade(handoff),
            me,
        })
    }

    /// Takes a permit if that needs no wait, not even for a lock.
    pub(super) fn try_take(
        handoff: &Arc<ReceiverHandoff<ModelLock>>,
        call: &'static str,
    ) -> Result<Option<Self>> {
        let me = std::thread::current().id();
        let Some(mut inner) = handoff.try_lock() else {
            return Ok(None);
        };
        match inner.shared.permits.admits(ModelAccess::Shared, me) {
            PermitAnswer::Now => {}
            PermitAnswer::Never => return Err(Error::GuardHeld { call }),
            PermitAnswer::Later | PermitAnswer::AfterYou => return Ok(None),
        }
        inner.shared.permits.enter(ModelAccess::Shared, me);
        Ok(Some(Self {
            handoff: Arc::downgrade(handoff),
            me,
        }))
    }
}

impl Drop for OwnedPermit {
    fn drop(&mut self) {
        if let Some(handoff) = self.handoff.upgrade() {
            go_out(&handoff, self.me);
        }
    }
}

/// Takes a permit for this thread.
// Longer than a screen: one loop under one lock, which only the wait gives up. The counts of those
// who wait change with it, and have to be put back on each way out.
fn come_in(
    handoff: &ReceiverHandoff<ModelLock>,
    access: ModelAccess,
    call: &'static str,
    timeout: Option<Duration>,
) -> Result<ThreadId> {
    let me = std::thread::current().id();
    let until = deadline(timeout);
    // Until when this thread lets others go first, and since when it waits to write.
    let (mut goes_at, mut writes_since) = (None, None);
    let mut inner = handoff.lock();
    let admitted = loop {
        let permits = &mut inner.shared.permits;
        let next = match permits.admits(access, me) {
            PermitAnswer::Now => break Ok(()),
            PermitAnswer::Never => break Err(Error::GuardHeld { call }),
            PermitAnswer::Later => {
                // Once: its place among those who wait counts from here.
                if access == ModelAccess::Alone && writes_since.is_none() {
                    let now = Instant::now();
                    writes_since = Some(now);
                    permits.wait_to_write(now);
                }
                until
            }
            PermitAnswer::AfterYou => {
                // From the first look: versions that come later do not make this thread wait
                // longer.
                let now = Instant::now();
                let at = *goes_at.get_or_insert_with(|| now + courtesy(permits.waited(now)));
                Some(until.map_or(at, |until| at.min(until)))
            }
        };
        let left = weightsync_mem::left(next);
        // Either the courtesy is over, and this thread goes in; or its timeout has come.
        if left == Some(Duration::ZERO) {
            break match permits.admits(access, me) {
                PermitAnswer::AfterYou => Ok(()),
                _ => Err(Error::GuardsInUse {
                    call,
                    waited: timeout.unwrap_or_default(),
                }),
            };
        }
        // `go_out` wakes threads only if one waits.
        inner.shared.queue += 1;
        let interrupted;
        (inner, interrupted) = match handoff.rest(inner, left) {
            Ok(inner) => (inner, None),
            Err(error) => (handoff.lock(), Some(error)),
        };
        inner.shared.queue -= 1;
        if let Some(error) = interrupted {
            break Err(error);
        }
    };
    if let Some(since) = writes_since {
        inner.shared.permits.waits_no_more(since);
        if admitted.is_err() {
            // Nobody lets this thread go first any more.
            handoff.changed.notify_all();
        }
    }
    admitted?;
    inner.shared.permits.enter(access, me);
    Ok(me)
}

/// Gives a thread's permit back, and wakes the threads that wait for that.
fn go_out(handoff: &ReceiverHandoff<ModelLock>, me: ThreadId) {
    // The lock may be held for ever there, and no thread waits.
    if !handoff.is_own() {
        return;
    }
    let mut inner = handoff.lock();
    let ModelLock { permits, queue, .. } = &mut inner.shared;
    permits.leave(me);
    let wanted = permits.version.is_some() && permits.is_empty();
    let queued = *queue > 0;
    drop(inner);
    // The staged version is loaded by the receiver's thread, which may be waiting for the sender.
    // Permits are waited for by threads of the worker alone.
    if wanted {
        handoff.notify(|_| ());
    } else if queued {
        handoff.update(|_| ());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn courtesy_lasts_as_long_as_a_version_has_waited() {
        for (waited, expected) in [
            (Duration::ZERO, COURTESY),
            (COURTESY / 2, COURTESY),
            (COURTESY * 5, COURTESY * 5),
            (PATIENCE - COURTESY, PATIENCE - COURTESY),
            (PATIENCE, COURTESY),
        ] {
            assert_eq!(courtesy(waited), expected, "{waited:?}");
        }
    }

    #[test]
    fn reader_goes_after_a_writer_that_waits() {
        let [reads, comes, writes] = std::array::from_fn(|_| {
            let thread = std::thread::spawn(|| std::thread::current().id());
            thread.join().unwrap()
        });
        let mut permits = Permits::default();
        permits.enter(ModelAccess::Shared, reads);
        assert_eq!(
            permits.admits(ModelAccess::Alone, writes),
            PermitAnswer::Later
        );
        let since = Instant::now();
        permits.wait_to_write(since);
        assert_eq!(
            permits.admits(ModelAccess::Shared, comes),
            PermitAnswer::AfterYou
        );
        // The writer waits for this one.
        assert_eq!(
            permits.admits(ModelAccess::Shared, reads),
            PermitAnswer::Now
        );
        assert_eq!(permits.waited(since + COURTESY), COURTESY);
        // A writer does not wait for itself.
        permits.leave(reads);
        assert_eq!(
            permits.admits(ModelAccess::Alone, writes),
            PermitAnswer::Now
        );
        permits.waits_no_more(since);
        assert_eq!(
            permits.admits(ModelAccess::Shared, comes),
            PermitAnswer::Now
        );
    }

    /// Explores every order in which three threads can ask, enter and leave: no thread has a permit
    /// while another one writes, and no thread waits for itself.
    #[test]
    fn writer_of_the_models_is_alone() {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                std::thread::spawn(|| std::thread::current().id())
                    .join()
                    .unwrap()
            })
            .collect();
        let mut seen = HashSet::new();
        let mut paths = vec![Vec::new()];
        while let Some(path) = paths.pop() {
            let permits = replay(&path, &threads);
            let mut state: Vec<_> = threads
                .iter()
                .map(|me| {
                    let count = permits.shared.iter().find(|(one, _)| one == me);
                    (
                        permits.alone == Some(*me),
                        count.map_or(0, |(_, count)| *count),
                    )
                })
                .collect();
            assert!(
                permits.alone.is_none() || permits.shared.is_empty(),
                "{path:?}: {permits:?}"
            );
            state.push((permits.version.is_some(), 0));
            if !seen.insert(state) || path.len() > 6 {
                continue;
            }
            for who in 0..3 {
                for what in [Step::Look, Step::Change, Step::Ask, Step::Leave] {
                    let mut longer = path.clone();
                    longer.push((who, what));
                    paths.push(longer);
                }
            }
        }
        assert!(seen.len() > 20, "{}", seen.len());
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Look,
        Change,
        Ask,
        Leave,
    }

    fn replay(path: &[(usize, Step)], threads: &[ThreadId]) -> Permits {
        let mut permits = Permits::default();
        for (who, what) in path {
            let me = threads[*who];
            let held = permits.holds(me);
            let changes = permits.alone == Some(me);
            let access = match what {
                Step::Look => ModelAccess::Shared,
                Step::Change => ModelAccess::Alone,
                Step::Ask => {
                    permits.version = (!permits.is_empty()).then(Instant::now);
                    continue;
                }
                Step::Leave => {
                    permits.leave(me);
                    continue;
                }
            };
            let admission = permits.admits(access, me);
            // A thread never waits for a guard of its own.
            let never = changes || held && access == ModelAccess::Alone;
            assert_eq!(admission == PermitAnswer::Never, never, "{path:?}");
            if held && !never {
                assert_eq!(admission, PermitAnswer::Now, "{path:?}");
            }
            if matches!(admission, PermitAnswer::Now | PermitAnswer::AfterYou) {
                permits.enter(access, me);
            }
        }
        permits
    }
}
