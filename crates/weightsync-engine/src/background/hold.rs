//! The models, and how they are changed: by one thread at a time, whole or not at
//! all.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, RwLock};
use std::thread::ThreadId;
use std::time::Instant;

use weightsync_core::{ModelId, Run, Version};
use weightsync_mem::threads::RwLockExt as _;

use super::SafePoints;
use super::handoff::ReceiverHandoff;
use super::model_lock::ModelLock;
use super::thread::{RemainingWork, ThreadTask, message_of};
use crate::error::{Error, Result};
use crate::load_set::SetLoader;
use crate::receiver::Receiver;
use crate::set::SetSnapshot;

/// The models, and how they are loaded.
pub(super) struct Hold<M> {
    pub(super) held: RwLock<HeldModels<M>>,
    pub(super) loaders: Box<Loaders<M>>,
}

pub(super) type Loaders<M> = dyn for<'a> Fn(&'a mut M) -> SetLoader<'a> + Send + Sync;

/// The models with what they have.
pub(super) struct HeldModels<M> {
    pub(super) models: M,
    pub(super) versions: Vec<(ModelId, Version)>,
    pub(super) run: Run,
    pub(super) whole: bool,
}

impl<M> Hold<M> {
    /// Loads a set on behalf of a thread that has the models alone, and releases
    /// them.
    pub(super) fn apply(
        &self,
        handoff: &ReceiverHandoff<ModelLock>,
        me: ThreadId,
        receiver: &mut Receiver,
        set: SetSnapshot,
    ) -> Result<()> {
        let done = self.load(receiver, &set);
        // Before the handoff is locked: the text of a loader's error may need a lock of the
        // loader's, which a thread that waits for the handoff may have.
        let failure = done.as_ref().err().map(ToString::to_string);
        // In one step: the next thread with a permit finds the status of the models it sees.
        handoff.update(|inner| {
            inner.shared.leave(me);
            inner.status.failure = failure;
            inner.status.reflect(receiver);
        });
        done?;
        tell_applied(handoff, receiver, &set)
    }

    /// Marks the models as changed in part.
    pub(super) fn lose_whole(&self) {
        let mut held = self.held.writing();
        held.whole = false;
    }

    /// Loads the set that the worker runs into models that are not whole.
    pub(super) fn load_again(
        &self,
        handoff: &ReceiverHandoff<ModelLock>,
        receiver: &mut Receiver,
    ) -> Result<()> {
        let Some(set) = receiver.held() else {
            return Ok(());
        };
        let done = self.load(receiver, &set);
        handoff.update(|inner| inner.status.reflect(receiver));
        done?;
        tell_applied(handoff, receiver, &set)
    }

    fn load(&self, receiver: &mut Receiver, set: &SetSnapshot) -> Result<()> {
        // A loader's panic is caught below. Only a thread in `Background::write` poisons this lock.
        let mut held = self.held.write().unwrap_or_else(|poisoned| {
            self.held.clear_poison();
            let mut held = poisoned.into_inner();
            // A thread panicked while writing.
            held.whole = false;
            held
        });
        if !held.whole {
            // Everything is loaded again.
            receiver.lose_whole();
        }
        // Caught under the lock: a panic of the worker's own loader neither poisons the lock nor
        // ends the receiving thread.
        let loaded = catch_unwind(AssertUnwindSafe(|| {
            let mut models = (self.loaders)(&mut held.models);
            let has = receiver.held();
            receiver.load(set, &mut models, has.as_ref())
        }));
        let loaded = loaded.unwrap_or_else(|panic| {
            let error = Error::Panicked {
                what: "the loader of this worker's models",
                message: message_of(&*panic),
            };
            // The models may be half written. The way back may panic as well.
            let reason = error.to_string();
            let back = catch_unwind(AssertUnwindSafe(|| {
                let mut models = (self.loaders)(&mut held.models);
                receiver.go_back(set, &mut models, &reason)
            }));
            back.unwrap_or_else(|_| {
                receiver.lose_whole();
                receiver.refuse_half_loaded(set, &reason)
            })?;
            Err(error)
        });
        // Guards read these while other threads use the receiver.
        held.whole = receiver.is_whole();
        held.versions = receiver.versions().to_vec();
        held.run = receiver.run();
        loaded
    }
}

/// Keeps models up to date.
pub(super) struct KeepModels<M> {
    pub(super) hold: Arc<Hold<M>>,
    pub(super) when: SafePoints,
    /// Whether every version is to be applied.
    pub(super) every: bool,
}

impl<M: Send + Sync + 'static> ThreadTask for KeepModels<M> {
    type Shared = ModelLock;

    fn work(
        &mut self,
        handoff: &ReceiverHandoff<ModelLock>,
        receiver: &mut Receiver,
    ) -> Result<RemainingWork> {
        let me = std::thread::current().id();
        let waits = match self.when {
            // The worker applies it at its next safe point, in a thread of its own.
            SafePoints::Declared => handoff.lock().shared.has_staged(),
            SafePoints::Implied => match enter(handoff, me, true) {
                ApplyStart::Nothing => false,
                ApplyStart::Taken => true,
                ApplyStart::Applying(set) => {
                    // The failure is in the status. The sender knows it, if it can be reached.
                    if let Err(error) = self.hold.apply(handoff, me, receiver, set) {
                        tracing::warn!(worker = %receiver.worker(), %error, "not applied, or not reported");
                    }
                    false
                }
            },
        };
        // Where every version counts, none may be taken while one waits: it would replace that one.
        Ok(match (waits, self.every) {
            (false, _) => RemainingWork::Nothing,
            (true, false) => RemainingWork::Replaceable,
            (true, true) => RemainingWork::Full,
        })
    }

    fn arrived(
        &mut self,
        handoff: &ReceiverHandoff<ModelLock>,
        _: &mut Receiver,
        set: SetSnapshot,
    ) -> Result<()> {
        let replaced = handoff.update(|inner| {
            inner.status.staged = set.versions();
            inner.shared.stage(set)
        });
        // Outside the lock: what was replaced gives its slots back.
        drop(replaced);
        Ok(())
    }
}

/// Tells the sender what was applied. It is called last: a thread that has the sender's report then
/// finds the version in the status.
fn tell_applied(
    handoff: &ReceiverHandoff<ModelLock>,
    receiver: &mut Receiver,
    set: &SetSnapshot,
) -> Result<()> {
    let told = receiver.tell_applied(set);
    if let Err(error) = &told {
        handoff.update(|inner| inner.status.failure = Some(error.to_string()));
    }
    told
}

/// How a thread that wants to apply what is staged finds the models.
pub(super) enum ApplyStart {
    Nothing,
    /// Somebody holds a guard.
    Taken,
    /// It has the models alone, and must release them.
    Applying(SetSnapshot),
}

/// Comes in to apply what is staged, if nobody else is there; otherwise asks to
/// be told, if it is to.
pub(super) fn enter(handoff: &ReceiverHandoff<ModelLock>, me: ThreadId, ask: bool) -> ApplyStart {
    handoff.update(|inner| {
        // After the end nothing is applied: the models may have another receiver.
        if inner.stop || !inner.shared.has_staged() {
            return ApplyStart::Nothing;
        }
        match inner.shared.take_staged(me, ask.then(Instant::now)) {
            None => ApplyStart::Taken,
            Some(set) => {
                inner.status.staged.clear();
                ApplyStart::Applying(set)
            }
        }
    })
}
