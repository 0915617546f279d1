//! Receiving without the worker's loop having to ask: a thread of its own takes
//! what is sent, and the models change at safe points only.

mod guards;
pub(crate) mod handoff;
mod hold;
mod model_lock;
mod snapshots;
mod status;
pub(crate) mod thread;

use std::fmt;
use std::sync::{Arc, RwLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use weightsync_core::{ModelId, Version};

use self::handoff::ReceiverHandoff;
use self::hold::{ApplyStart, HeldModels, Hold, KeepModels, enter};
use self::model_lock::{ModelAccess, ModelLock, ModelPermit, OwnedPermit};
use self::thread::{Follower, can_follow};
use crate::error::{Error, Result};
use crate::load::WeightLoader;
use crate::load_set::SetLoader;
use crate::receiver::Receiver;
use crate::transport::deadline;

pub use self::guards::{ModelGuard, ModelGuardMut, ModelHold};
pub use self::snapshots::SnapshotsInBackground;
pub use self::status::{BackgroundState, BackgroundStatus};

/// When the models of a [`Background`] may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SafePoints {
    /// Whenever no guard of the models is held: the worker need not do anything.
    #[default]
    Implied,
    /// Inside [`Background::safe_point`] and [`Background::wait`] only.
    Declared,
}

impl Receiver {
    /// Starts a thread that receives, and that owns the worker's model. The worker's loop never
    /// asks for weights: it [reads](Background::read) the model, which changes only at [safe
    /// points](SafePoints), whole versions at a time.
    ///
    /// This loads the model before it returns, whatever the model held, and a model without shapes
    /// takes the sender's. If the receiver has joined a restarted sender that has no version yet,
    /// [`read`](Background::read) returns [`Error::NotWhole`] until there is one.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use weightsync::{Expect, ReceiverSetup, SenderSetup};
    /// use weightsync::background::SafePoints;
    /// use weightsync::{Tensors, Version};
    /// # let mut weights = Tensors::new();
    /// # weights.insert("bias", [2], [0.0_f32, 1.0])?;
    /// # let setup = SenderSetup::new("policy", &weights)?;
    /// # let info = setup.init_info();
    /// # let own = weights.clone();
    /// # let worker = std::thread::spawn(move || -> weightsync::Result<()> {
    /// let receiver = ReceiverSetup::new(info, 0).connect(Some(Duration::from_secs(10)))?;
    /// let policy = receiver.in_background(own, SafePoints::Implied)?;
    /// loop {
    ///     let policy = policy.read()?; // it does not change until this is dropped
    ///     let bias = policy.slice::<f32>("bias")?;
    ///     if policy.version()? == Version(2) {
    ///         break assert_eq!(bias, [3.0, 4.0]);
    ///     }
    /// }
    /// # Ok(()) });
    /// # let mut sender = setup.connect(&weights, Expect::Count(1), Some(Duration::from_secs(10)))?;
    /// # weights.insert("bias", [2], [3.0_f32, 4.0])?;
    /// # assert!(sender.send(&weights)?.all_applied());
    /// # worker.join().unwrap()?;
    /// # Ok::<(), weightsync::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`loading`](Self::loading), [`Error::SeveralModels`],
    /// and [`Error::Unsupported`] if the transport cannot end a wait, or nothing
    /// comes by it without being asked for.
    pub fn in_background<M>(self, model: M, when: SafePoints) -> Result<Background<M>>
    where
        M: WeightLoader + Send + Sync + 'static,
    {
        let id = self.one_model()?;
        self.set_in_background(model, move |model| SetLoader::new().with(&id, model), when)
    }

    /// As [`in_background`](Self::in_background), for several models behind one
    /// lock: either all of them have the new versions, or none has. The models
    /// are a value of any type; `loaders` says which of it is loaded with what.
    ///
    /// ```no_run
    /// # fn worker(receiver: weightsync::Receiver) -> weightsync::Result<()> {
    /// use weightsync::background::SafePoints;
    /// use weightsync::model::SetLoader;
    /// use weightsync::Tensors;
    ///
    /// #[derive(Default)]
    /// struct Agent {
    ///     actor: Tensors,
    ///     critic: Tensors,
    /// }
    ///
    /// let agent = receiver.set_in_background(
    ///     Agent::default(),
    ///     |agent| {
    ///         let models = SetLoader::new().with("actor", &mut agent.actor);
    ///         models.with("critic", &mut agent.critic)
    ///     },
    ///     SafePoints::Implied,
    /// )?;
    /// let agent = agent.read()?; // both of one set, until this is dropped
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`in_background`](Self::in_background), and those of
    /// [`loading_set`](Self::loading_set).
    pub fn set_in_background<M, F>(
        mut self,
        mut models: M,
        loaders: F,
        when: SafePoints,
    ) -> Result<Background<M>>
    where
        M: Send + Sync + 'static,
        F: for<'a> Fn(&'a mut M) -> SetLoader<'a> + Send + Sync + 'static,
    {
        // Refused before the models are touched.
        can_follow(&self)?;
        self.begin_into(&mut loaders(&mut models))?;
        let hold = Arc::new(Hold {
            held: RwLock::new(HeldModels {
                models,
                versions: self.versions().to_vec(),
                run: self.run(),
                whole: self.is_whole(),
            }),
            loaders: Box::new(loaders),
        });
        let task = KeepModels {
            hold: hold.clone(),
            when,
            every: self.scheme().capabilities().every_version,
        };
        Ok(Background {
            follower: Follower::start(self, ModelLock::default(), task)?,
            hold,
            when,
        })
    }

    /// Hands the receiving to a thread of its own that keeps the newest weights
    /// at hand as snapshots, for a worker that reads them in place: see
    /// [`SnapshotsInBackground`].
    ///
    /// # Errors
    ///
    /// Those of [`latest`](Self::latest), and [`Error::Unsupported`] as of
    /// [`in_background`](Self::in_background).
    pub fn snapshots_in_background(self) -> Result<SnapshotsInBackground> {
        SnapshotsInBackground::start(self)
    }
}

/// A worker's models, kept up to date by a thread; see
/// [`Receiver::in_background`].
///
/// **Guarantee.** While a guard of the models is held they do not change, and
/// they are one whole set. The sender is told that this worker runs a version
/// once all of it is loaded. A load that fails, or panics, puts back what the
/// models had; the sender's report says so, and the next version is tried again.
///
/// A busy worker delays no other: the thread takes what is sent, and with [`SafePoints::Implied`]
/// applies it. A version that is replaced before its safe point is released, unless the scheme
/// delivers every version. In shared memory the thread holds the loaded version, to go back to, and
/// the waiting one: two slots of each model at most.
///
/// A sender with a run directory is found again when it has restarted; what
/// became of the sender is in the [`status`](Self::status). Dropping this ends
/// the thread, and tells the sender that the worker has left. In a forked child
/// every call is an error, and dropping it does nothing.
///
/// A loader may need a lock of the worker, such as an interpreter's. A thread that holds this lock
/// and waits for the loader would wait for ever, so it must release the lock around every call that
/// waits ([`read`](Self::read), [`write`](Self::write), [`hold`](Self::hold), [`wait`](Self::wait),
/// [`safe_point`](Self::safe_point), [`stop`](Self::stop)) and around dropping this.
/// [`try_hold`](Self::try_hold), [`status`](Self::status) and dropping a guard wait for nothing
/// that a loader does.
pub struct Background<M: Send + Sync + 'static> {
    follower: Follower<ModelLock>,
    hold: Arc<Hold<M>>,
    when: SafePoints,
}

impl<M: Send + Sync + 'static> Background<M> {
    /// The models, which do not change while the guard is held; any number of
    /// threads may hold one. Waits only while the models are being changed, and if a
    /// version or a writer waits for other guards: as long as that one has waited, and
    /// 10 ms at least.
    ///
    /// # Errors
    ///
    /// [`Error::NotWhole`] after a load failed midway and the way back failed
    /// too, or a thread panicked while it [wrote](Self::write), until a version
    /// has been loaded; [`Error::GuardHeld`] if this thread holds the guard of
    /// [`write`](Self::write).
    pub fn read(&self) -> Result<ModelGuard<'_, M>> {
        let handoff = self.follower.handoff()?;
        // The permit decides who is with the models. The lock behind it is then free.
        let permit = ModelPermit::take(handoff, ModelAccess::Shared, "Background::read", None)?;
        match self.hold.held.read() {
            Ok(held) if held.whole => Ok(ModelGuard {
                held,
                _permit: permit,
            }),
            _ => Err(self.not_whole()),
        }
    }

    /// Keeps the models as they are until what this returns is dropped, for
    /// callers that own them and cannot borrow them from here: a module
    /// of another language, between the begin and the end of a call of it. Waits as
    /// [`read`](Self::read) does, asleep.
    ///
    /// It counts for the thread that took it, which may take more, and may be
    /// dropped in any other. Stopping or dropping this does not wait for it.
    ///
    /// A loader's lock that this thread holds must be released around this call (see
    /// [`Background`]), unless [`try_hold`](Self::try_hold) has done.
    ///
    /// Taking and dropping one costs some 0.1 µs if nobody is in the way.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn hold(&self) -> Result<ModelHold> {
        let handoff = self.follower.handoff()?;
        self.whole(OwnedPermit::take(handoff, "Background::hold")?)
    }

    /// The same if it need not wait for anybody, and for no lock; `None` if it
    /// would have to.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn try_hold(&self) -> Result<Option<ModelHold>> {
        let handoff = self.follower.handoff()?;
        let permit = OwnedPermit::try_take(handoff, "Background::try_hold")?;
        permit.map(|permit| self.whole(permit)).transpose()
    }

    /// A thread with a permit finds no thread writing.
    fn whole(&self, permit: OwnedPermit) -> Result<ModelHold> {
        let whole = self.hold.held.read().is_ok_and(|held| held.whole);
        match whole {
            true => Ok(ModelHold { _permit: permit }),
            false => Err(self.not_whole()),
        }
    }

    /// The models, to be changed by the worker itself (its buffers, say): what
    /// it changes lasts until the next version that has it. Waits for the guards
    /// of other threads.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); [`Error::GuardHeld`] if this thread holds a
    /// guard.
    pub fn write(&self) -> Result<ModelGuardMut<'_, M>> {
        let handoff = self.follower.handoff()?;
        let permit = ModelPermit::take(handoff, ModelAccess::Alone, "Background::write", None)?;
        match self.hold.held.write() {
            Ok(held) if held.whole => Ok(ModelGuardMut {
                held,
                _permit: permit,
            }),
            _ => Err(self.not_whole()),
        }
    }

    /// Calls a function while this thread alone is with the models, as in a load. If it succeeds, nothing
    /// is applied from here on: the models have another receiver, and this one is to be stopped. If it
    /// fails, the models get the version again that this worker runs.
    ///
    /// # Errors
    ///
    /// [`Error::GuardHeld`] if this thread holds a guard, [`Error::GuardsInUse`] if others still do at
    /// the timeout, and [`Error::Interrupted`]. Then the function was not called.
    pub fn hand_over<T, E>(
        &self,
        timeout: Option<Duration>,
        call: impl FnOnce() -> std::result::Result<T, E>,
    ) -> Result<std::result::Result<T, E>> {
        let handoff = self.follower.handoff()?;
        let _permit = ModelPermit::take(
            handoff,
            ModelAccess::Alone,
            "Background::hand_over",
            timeout,
        )?;
        let done = call();
        // Before the permit is given back: no set is applied between the call and the end of the
        // thread.
        if done.is_ok() {
            handoff.notify(|inner| inner.stop = true);
            return Ok(done);
        }
        // The call may have changed the models: they are loaded whole.
        self.hold.lose_whole();
        if let Err(error) = handoff.borrow(|receiver| self.hold.load_again(handoff, receiver)) {
            tracing::warn!(%error, "the models did not get their version again");
        }
        Ok(done)
    }

    /// Lets the models change, here and now, in this thread; says which versions
    /// they have if they did. Does not wait for anybody: while another thread
    /// holds a guard, it is no safe point, and nothing happens.
    ///
    /// # Errors
    ///
    /// [`Error::GuardHeld`] if this thread holds a guard, and the loader's: then the models have
    /// what they had, and the sender knows. After an error of the transport they have the version,
    /// and the sender may not know.
    pub fn safe_point(&self) -> Result<Option<Vec<(ModelId, Version)>>> {
        let handoff = self.follower.handoff()?;
        let me = std::thread::current().id();
        // Without the receiver: where nothing is staged, a safe point interrupts nothing.
        {
            let inner = handoff.lock();
            if inner.shared.holds(me) {
                return Err(Error::GuardHeld {
                    call: "Background::safe_point",
                });
            }
            if !inner.shared.has_staged() {
                return Ok(None);
            }
        }
        self.apply_staged(handoff, me)
    }

    /// Applies what is staged, unless somebody else is with the models.
    fn apply_staged(
        &self,
        handoff: &ReceiverHandoff<ModelLock>,
        me: ThreadId,
    ) -> Result<Option<Vec<(ModelId, Version)>>> {
        // The receiving thread brings the receiver here, so one of the two threads loads at a time.
        handoff.borrow(|receiver| match enter(handoff, me, false) {
            ApplyStart::Applying(set) => {
                let versions = set.versions();
                self.hold.apply(handoff, me, receiver, set)?;
                Ok(Some(versions))
            }
            ApplyStart::Nothing | ApplyStart::Taken => Ok(None),
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

    /// Waits until the status is as wished; false if the timeout came first, or
    /// nothing will arrive any more: the sender has shut down or died, and will
    /// not come back.
    ///
    /// This is a safe point: with [`SafePoints::Declared`] too, what arrives
    /// meanwhile is applied, in this thread, unless the status is as wished
    /// already. A load that fails is in the status, and the wait goes on.
    ///
    /// The successor of a sender with a run directory is looked for as long as this
    /// lives. Without a timeout this waits as long after a death: ask for
    /// [`BackgroundState::Searching`] as well to learn of it. After an orderly shutdown
    /// it returns false ([`BackgroundState::Closed`]), and with a timeout it waits for the
    /// successor.
    ///
    /// `enough` is called with the status locked: it must not call this, nor wait
    /// for anybody.
    ///
    /// # Errors
    ///
    /// [`Error::GuardHeld`] if this thread holds a guard: the models could not
    /// change before it is dropped.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        mut enough: impl FnMut(&BackgroundStatus) -> bool,
    ) -> Result<bool> {
        let handoff = self.follower.handoff()?;
        let me = std::thread::current().id();
        if handoff.lock().shared.holds(me) {
            return Err(Error::GuardHeld {
                call: "Background::wait",
            });
        }
        let until = deadline(timeout);
        let declared = self.when == SafePoints::Declared;
        // Whether this wait has asked other threads to let the staged set go first.
        let mut asked = false;
        let found = loop {
            let left = weightsync_mem::left(until);
            let found = handoff.wait(left, |inner| match enough(&inner.status) {
                true => Some(RoundEnd::Enough),
                // After a hand-over nothing is applied here.
                false if declared && !inner.stop && inner.shared.has_staged() => {
                    asked = true;
                    inner
                        .shared
                        .asks_for_staged(Instant::now())
                        .then_some(RoundEnd::Staged)
                }
                false => None,
            });
            if !matches!(found, Ok(Some(RoundEnd::Staged))) {
                break found;
            }
            match self.apply_staged(handoff, me) {
                Ok(_) => {}
                Err(Error::Interrupted) => break Err(Error::Interrupted),
                // The status has the failure. The next version may load.
                Err(error) => tracing::warn!(%error, "not applied"),
            }
        };
        if asked {
            // Others who wait ask again.
            handoff.update(|inner| inner.shared.asks_no_more());
        }
        Ok(found?.is_some())
    }

    /// Ends the thread, and gives receiver and models back. What was taken and
    /// not applied is what the receiver hands out next.
    ///
    /// # Errors
    ///
    /// In a forked child; [`Error::Interrupted`] while the thread is loading: it
    /// ends when it has done so, and releases receiver and models; [`Error::NotWhole`], as of
    /// [`read`](Self::read).
    pub fn stop(self) -> Result<(Receiver, M)> {
        let not_whole = self.not_whole();
        let Self { follower, hold, .. } = self;
        let (mut receiver, model_lock) = follower.stop()?;
        if let Some(set) = model_lock.into_staged() {
            receiver.put_back(set);
        }
        // The thread had the only other reference, and has dropped its task.
        let hold = Arc::into_inner(hold).map(|hold| hold.held.into_inner());
        match hold {
            Some(Ok(held)) if held.whole => Ok((receiver, held.models)),
            _ => Err(not_whole),
        }
    }

    /// Ends the thread, and leaves: the worker has failed, and says why. See
    /// [`Receiver::fail`].
    ///
    /// # Errors
    ///
    /// In a forked child; [`Error::Interrupted`], as of [`stop`](Self::stop).
    pub fn fail(self, reason: &str) -> Result<()> {
        if self.follower.is_here() {
            // The receiving thread cannot wait for itself: it gives the reason when it ends.
            self.fail_at_end(reason);
            return Ok(());
        }
        let (receiver, _) = self.follower.stop()?;
        receiver.fail(reason);
        Ok(())
    }

    /// The worker has failed, and says why once this is dropped.
    pub fn fail_at_end(&self, reason: &str) {
        if let Ok(handoff) = self.follower.handoff() {
            handoff.update(|inner| inner.why = Some(reason.to_owned()));
        }
    }

    fn not_whole(&self) -> Error {
        let inner = self.follower.handoff().map(|handoff| handoff.lock());
        let versions = inner.map(|inner| inner.status.versions.clone());
        let models = versions.unwrap_or_default().into_iter();
        Error::NotWhole {
            models: models.map(|(model, _)| model).collect(),
        }
    }
}

impl<M: Send + Sync + 'static> fmt::Debug for Background<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.status();
        f.debug_struct("Background")
            .field("status", &status.ok())
            .finish_non_exhaustive()
    }
}

/// What ends one round of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoundEnd {
    /// The status is as wished.
    Enough,
    /// Something can be applied now.
    Staged,
}
