//! An explorer, as its program has it.

use std::num::NonZero;
use std::time::{Duration, Instant};

use weightsync_core::synchronizer::Method;
use weightsync_engine::transport::{Deadline, deadline};
use weightsync_engine::{Error, InitInfo, Result, Version};

use weightsync_mem::left;

use super::SyncError;
use super::link::{ServiceLink, Unanswered};
use super::membership::{LOOK, PartyMembership, ms};
use super::party::{PartyOptions, is_mended};
use super::wire::{Ended, NeedAnswer, Reply, Request, Role, SyncAnswer, short};

/// An explorer: it asks whether it is to synchronise, and loads what it is told to.
///
/// Dropping it tells the synchronizer that it has failed, unless it has [left](Self::leave) in order.
#[derive(Debug)]
pub struct Explorer {
    membership: PartyMembership,
    eval_interval: Option<NonZero<u64>>,
}

/// What an explorer is to load.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Fetch {
    /// This version, or a newer one.
    pub version: Version,
    /// Where it can be had. It changes when the trainer or the synchronizer was started again.
    pub from: InitInfo,
    /// The number with which the explorer joins there.
    pub worker: u32,
    /// Until when. Loading later counts for the next sync.
    pub until: Deadline,
}

impl Explorer {
    pub(super) fn join(
        link: ServiceLink,
        options: PartyOptions,
        timeout: Option<Duration>,
    ) -> Result<Self> {
        let eval_interval = options.eval_interval;
        let join = options.join(Role::Explorer, None);
        let membership = PartyMembership::join(link, join, deadline(timeout))?;
        Ok(Self {
            membership,
            eval_interval,
        })
    }

    /// Whether it is to synchronise, after so many steps. Answers at once.
    ///
    /// # Errors
    ///
    /// If another explorer of its name has taken its place, or the synchronizer refuses it.
    pub fn need_sync(&mut self, step: Option<u64>) -> Result<NeedAnswer> {
        self.membership.need_sync(step)
    }

    /// Waits until it is to synchronise, or the timeout.
    ///
    /// # Errors
    ///
    /// As [`need_sync`](Self::need_sync).
    pub fn wait_need_sync(
        &mut self,
        step: Option<u64>,
        timeout: Option<Duration>,
    ) -> Result<NeedAnswer> {
        self.membership.wait_need_sync(step, timeout)
    }

    /// Waits for a version, and loads it with `load`, which verifies it and returns the version that
    /// the explorer runs then.
    ///
    /// A timeout is an answer, and so is a version that could not be loaded now: the caller tries again
    /// after its next step.
    ///
    /// # Errors
    ///
    /// Those of `load` that no retry mends; the synchronizer is told. As
    /// [`need_sync`](Self::need_sync).
    pub fn sync(
        &mut self,
        step: Option<u64>,
        timeout: Option<Duration>,
        load: impl FnMut(&Fetch) -> Result<Version>,
    ) -> Result<SyncAnswer> {
        let begun = Instant::now();
        let mut answer = self.sync_until(step, deadline(timeout), load)?;
        // The next sync of an explorer is counted from here, also after the service was started
        // again.
        if matches!(answer.ended, Ended::Synced | Ended::NothingNewer) {
            self.membership.join.synced = self.membership.join.step;
        }
        answer.took = begun.elapsed();
        Ok(answer)
    }

    fn sync_until(
        &mut self,
        step: Option<u64>,
        until: Deadline,
        mut load: impl FnMut(&Fetch) -> Result<Version>,
    ) -> Result<SyncAnswer> {
        // Asked again after the service was away, with the time that is left.
        loop {
            let timeout = left(until);
            let request = Request::Sync {
                step,
                timeout_ms: ms(timeout),
            };
            // One answer is either a version to load or the end of the sync.
            let (version, from) = match self.membership.ask(request, timeout, until) {
                Ok(Reply::Fetch { version, from }) => (version, *from),
                // The sync ended without a version to load: a timeout, or nothing newer.
                Ok(Reply::Synced(answer)) => return Ok(self.labelled(answer)),
                Ok(_) => return Err(SyncError::Protocol.into()),
                Err(Unanswered::Away(why)) => match timeout {
                    Some(left) if left.is_zero() => {
                        return Ok(self.not_synced(Ended::TimedOut, why));
                    }
                    _ => continue,
                },
                Err(lost) => {
                    // It may have been told to load a version, and will not.
                    let _ = self.membership.say(Request::Cancel {});
                    return Err(lost.into());
                }
            };
            let fetch = Fetch {
                version,
                from,
                worker: self.membership.joined.worker,
                until,
            };
            return match load(&fetch) {
                // The label changes only here: `load` has verified the version.
                Ok(version) => {
                    self.runs(version);
                    self.say_loaded()
                }
                Err(error) => self.say_load_failed(version, error),
            };
        }
    }

    /// The answer with the version that was loaded: a service that has lost its record does not know it.
    fn labelled(&self, mut answer: SyncAnswer) -> SyncAnswer {
        // The service's step belongs to another version.
        if answer.version != self.version() {
            (answer.version, answer.step) = (self.version(), None);
        }
        answer
    }

    fn not_synced(&self, ended: Ended, why: String) -> SyncAnswer {
        SyncAnswer {
            ended,
            version: self.version(),
            step: None,
            versions_behind: 0,
            steps_behind: 0,
            reason: Some(why),
            took: Duration::ZERO,
        }
    }

    /// Says that the explorer evaluates, and needs nothing meanwhile; or does so no longer.
    ///
    /// # Errors
    ///
    /// As [`need_sync`](Self::need_sync).
    pub fn pause(&mut self, paused: bool) -> Result<()> {
        let asked =
            self.membership
                .ask(Request::Pause { paused }, Some(LOOK), deadline(Some(LOOK)));
        match asked {
            Ok(_) | Err(Unanswered::Away(_)) => Ok(()),
            Err(lost) => Err(lost.into()),
        }
    }

    /// The address of the store that keeps the versions, for [`Store::open`](weightsync_store::Store::open):
    /// the synchronizer's, or with [`Method::Checkpoint`] the trainer's. `None` if there is none.
    ///
    /// # Errors
    ///
    /// If the synchronizer does not answer. As [`need_sync`](Self::need_sync).
    pub fn store(&mut self) -> Result<Option<String>> {
        let asked = self
            .membership
            .ask(Request::Store {}, Some(LOOK), deadline(Some(LOOK)));
        match asked? {
            Reply::Stored { store } => Ok(store),
            _ => Err(SyncError::Protocol.into()),
        }
    }

    /// Says that it runs a version that it was not told to load: an older one of the
    /// [store](Self::store), to evaluate it. The next sync has the newest again.
    ///
    /// # Errors
    ///
    /// As [`need_sync`](Self::need_sync).
    pub fn loaded(&mut self, version: Version) -> Result<SyncAnswer> {
        let begun = Instant::now();
        self.runs(version);
        let mut answer = self.say_loaded()?;
        // Only the newest version ends what is due. An older one is loaded to be evaluated.
        if answer.versions_behind == 0 {
            self.membership.join.synced = self.membership.join.step;
        }
        answer.took = begun.elapsed();
        Ok(answer)
    }

    fn runs(&mut self, version: Version) {
        // The two go together: a number means nothing in another lineage.
        self.membership.join.version = version;
        self.membership.join.lineage = self.membership.joined.lineage;
    }

    /// Says that a version could not be loaded.
    ///
    /// # Errors
    ///
    /// The error that it is told, if no retry mends it.
    fn say_load_failed(&mut self, version: Version, error: Error) -> Result<SyncAnswer> {
        let reason = error.to_string();
        let failed = Request::LoadFailed {
            version,
            reason: short(&reason),
        };
        let told = self.membership.say(failed);
        let is_mended = is_mended(&error);
        // If the service has ended the sync meanwhile, its answer stands.
        match told {
            Ok(Reply::Synced(answer)) if is_mended => Ok(self.labelled(answer)),
            Err(Unanswered::Away(_)) if is_mended => Ok(self.not_synced(Ended::Failed, reason)),
            _ => Err(error),
        }
    }

    fn say_loaded(&mut self) -> Result<SyncAnswer> {
        let version = self.version();
        match self.membership.say(Request::Loaded { version }) {
            Ok(Reply::Synced(answer)) => Ok(self.labelled(answer)),
            Ok(_) => Err(SyncError::Protocol.into()),
            // It runs the version, whatever became of the service.
            Err(Unanswered::Away(_)) => Ok(SyncAnswer {
                ended: Ended::Synced,
                version,
                step: None,
                versions_behind: 0,
                steps_behind: 0,
                reason: None,
                took: Duration::ZERO,
            }),
            Err(lost) => Err(lost.into()),
        }
    }

    /// Whether it is to evaluate after so many steps: see [`PartyOptions::eval_interval`].
    pub fn need_eval(&self, step: u64) -> bool {
        self.eval_interval
            .is_some_and(|interval| step > 0 && step.is_multiple_of(interval.get()))
    }

    /// The version that it has verified and loaded.
    pub fn version(&self) -> Version {
        self.membership.join.version
    }

    /// How versions travel.
    pub fn method(&self) -> Method {
        self.membership.joined.method
    }

    /// Its number where it receives versions.
    pub fn worker(&self) -> u32 {
        self.membership.joined.worker
    }

    /// Leaves in order, or for a reason.
    pub fn leave(mut self, reason: Option<String>) {
        self.membership.leave(reason);
    }
}
