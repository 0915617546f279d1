//! The threads that use the models, and the set that waits until no thread does.
//!
//! The decisions work on plain values; only [`Permit`]s wait.

use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::background::handoff::ReceiverHandoff;
use crate::error::{Error, Result};
use crate::set::SetSnapshot;

/// How long a thread lets a waiting version go first. The time is short, because a thread that holds
/// a guard may be waiting for this thread.
const COURTESY: Duration = Duration::from_millis(10);

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
    /// A version waits until no thread has a permit.
    wanted: bool,
}

/// The access that a thread asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Shared,
    Alone,
}

/// Whether a thread gets a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Now,
    /// Now, after the version that has been waiting for longer.
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

    /// Takes the set and the models, if no thread has a permit. Otherwise, if `ask` is
    /// set, the last thread to leave wakes the receiving thread.
    pub(super) fn take_staged(&mut self, me: ThreadId, ask: bool) -> Option<SetSnapshot> {
        if !self.permits.is_empty() {
            self.permits.wanted |= ask;
            return None;
        }
        self.permits.wanted = false;
        self.permits.enter(Access::Alone, me);
        self.staged.take()
    }

    /// Whether no thread has a permit; otherwise the last thread to leave wakes the receiver.
    pub(super) fn asks_for_staged(&mut self) -> bool {
        self.permits.wanted = !self.permits.is_empty();
        !self.permits.wanted
    }

    pub(super) fn asks_no_more(&mut self) {
        self.permits.wanted = false;
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

    fn admits(&self, access: Access, me: ThreadId) -> Admission {
        let own = self.alone == Some(me);
        match access {
            Access::Shared if own => Admission::Never,
            Access::Alone if own || self.looks(me) => Admission::Never,
            _ if self.alone.is_some() => Admission::Later,
            Access::Alone if !self.shared.is_empty() => Admission::Later,
            // A thread that reads already would wait for itself.
            Access::Shared if self.looks(me) => Admission::Now,
            _ if self.wanted => Admission::AfterYou,
            _ => Admission::Now,
        }
    }

    fn enter(&mut self, access: Access, me: ThreadId) {
        match access {
            Access::Alone => self.alone = Some(me),
            Access::Shared => match self.shared.iter_mut().find(|(one, _)| *one == me) {
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
pub(super) struct Permit<'a> {
    handoff: &'a ReceiverHandoff<ModelLock>,
    me: ThreadId,
}

impl<'a> Permit<'a> {
    /// Waits for a permit.
    ///
    /// # Errors
    ///
    /// [`Error::GuardHeld`], [`Error::Interrupted`].
    pub(super) fn take(
        handoff: &'a ReceiverHandoff<ModelLock>,
        access: Access,
        call: &'static str,
    ) -> Result<Self> {
        let me = come_in(handoff, access, call)?;
        Ok(Self { handoff, me })
    }
}

impl Drop for Permit<'_> {
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
        let me = come_in(handoff, Access::Shared, call)?;
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
        match inner.shared.permits.admits(Access::Shared, me) {
            Admission::Now => {}
            Admission::Never => return Err(Error::GuardHeld { call }),
            Admission::Later | Admission::AfterYou => return Ok(None),
        }
        inner.shared.permits.enter(Access::Shared, me);
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
fn come_in(
    handoff: &ReceiverHandoff<ModelLock>,
    access: Access,
    call: &'static str,
) -> Result<ThreadId> {
    let me = std::thread::current().id();
    let mut until = None;
    let mut inner = handoff.lock();
    loop {
        let left = match inner.shared.permits.admits(access, me) {
            Admission::Now => break,
            Admission::Never => return Err(Error::GuardHeld { call }),
            Admission::Later => None,
            Admission::AfterYou => {
                let until = *until.get_or_insert_with(|| Instant::now() + COURTESY);
                match until.saturating_duration_since(Instant::now()) {
                    Duration::ZERO => break,
                    left => Some(left),
                }
            }
        };
        inner.shared.queue += 1;
        inner = match handoff.rest(inner, left) {
            Ok(inner) => inner,
            Err(interrupted) => {
                handoff.lock().shared.queue -= 1;
                return Err(interrupted);
            }
        };
        inner.shared.queue -= 1;
    }
    inner.shared.permits.enter(access, me);
    Ok(me)
}

/// Gives a thread's permit back, and wakes the threads that wait for that.
fn go_out(handoff: &ReceiverHandoff<ModelLock>, me: ThreadId) {
    if !handoff.is_own() {
        return;
    }
    let mut inner = handoff.lock();
    let ModelLock { permits, queue, .. } = &mut inner.shared;
    permits.leave(me);
    let wanted = permits.wanted && permits.is_empty();
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
            state.push((permits.wanted, 0));
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
                Step::Look => Access::Shared,
                Step::Change => Access::Alone,
                Step::Ask => {
                    permits.wanted = !permits.is_empty();
                    continue;
                }
                Step::Leave => {
                    permits.leave(me);
                    continue;
                }
            };
            let admission = permits.admits(access, me);
            // A thread never waits for a guard of its own.
            let never = changes || held && access == Access::Alone;
            assert_eq!(admission == Admission::Never, never, "{path:?}");
            if held && !never {
                assert_eq!(admission, Admission::Now, "{path:?}");
            }
            if matches!(admission, Admission::Now | Admission::AfterYou) {
                permits.enter(access, me);
            }
        }
        permits
    }
}
