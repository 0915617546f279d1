//! What parties join with, and a trainer as its program has it.

use std::num::NonZero;
use std::time::{Duration, Instant};

use weightsync_core::synchronizer::{Method, Style};
use weightsync_engine::transport::{Deadline, deadline};
use weightsync_engine::{Error, InitInfo, Remedy, Result, Version};

use weightsync_mem::left;

use super::SyncError;
use super::lasting;
use super::link::{ServiceLink, Unanswered};
use super::membership::{PartyMembership, ms};
use super::wire::{
    Ended, Join, NeedAnswer, PROTOCOL, Reply, Request, RequestProblem, Role, TrainerAnswer, short,
};

/// What a party joins with.
#[derive(Clone, Debug)]
#[must_use]
pub struct PartyOptions {
    name: String,
    style: Option<Style>,
    method: Option<Method>,
    step: u64,
    pub(super) eval_interval: Option<NonZero<u64>>,
}

impl PartyOptions {
    /// A party of this name. Explorers have different names: one of the same name takes the place of
    /// the one before.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            style: None,
            method: None,
            step: 0,
            eval_interval: None,
        }
    }

    /// When it synchronises; the synchronizer's style by default.
    pub fn style(self, style: impl Into<Option<Style>>) -> Self {
        Self {
            style: style.into(),
            ..self
        }
    }

    /// How versions travel; the synchronizer's method by default. A trainer chooses it, once.
    pub fn method(self, method: impl Into<Option<Method>>) -> Self {
        Self {
            method: method.into(),
            ..self
        }
    }

    /// After how many steps an explorer [evaluates](super::Explorer::need_eval); never by default.
    pub fn eval_interval(self, steps: impl Into<Option<NonZero<u64>>>) -> Self {
        Self {
            eval_interval: steps.into(),
            ..self
        }
    }

    /// How many steps the party has made already.
    pub fn step(self, step: u64) -> Self {
        Self { step, ..self }
    }

    pub(super) fn join(self, role: Role, from: Option<InitInfo>) -> Join {
        Join {
            protocol: PROTOCOL,
            role,
            name: self.name,
            style: self.style,
            method: self.method,
            step: self.step,
            // A party that joins for the first time has no earlier sync, so its steps count from
            // here.
            synced: self.step,
            version: Version::NONE,
            version_step: 0,
            lineage: 0,
            worker: None,
            epoch: None,
            from,
        }
    }
}

/// A trainer: it asks whether it is to synchronise, and publishes what it is told to.
///
/// Dropping it tells the synchronizer that it has failed, unless it has [stopped](Self::leave) in order.
#[derive(Debug)]
pub struct Trainer {
    membership: PartyMembership,
    /// The highest number of its versions.
    highest: Version,
}

impl Trainer {
    pub(super) fn join(
        link: ServiceLink,
        options: PartyOptions,
        from: InitInfo,
        timeout: Option<Duration>,
    ) -> Result<Self> {
        // The versions of its store may be of a run that this synchronizer knows nothing of.
        let stored = lasting::newest_of(&from)?;
        let join = options.join(Role::Trainer, Some(from));
        // The trainer waits for a synchronizer that is not there yet, as parties and service may
        // start in any order.
        let membership = PartyMembership::join(link, join, deadline(timeout))?;
        let (joined, step) = (&membership.joined, membership.join.step);
        if joined.newest_step > step {
            tracing::warn!(
                name = membership.join.name,
                "the trainer begins at step {step}, and the newest version, {}, is of step {}: load it \
                 first, or explorers go back to weights without its training",
                joined.newest,
                joined.newest_step
            );
        }
        Ok(Self {
            highest: joined.highest.max(stored),
            membership,
        })
    }

    /// As [`Explorer::need_sync`](super::Explorer::need_sync).
    ///
    /// # Errors
    ///
    /// If another trainer has taken its place, or the synchronizer refuses it.
    pub fn need_sync(&mut self, step: Option<u64>) -> Result<NeedAnswer> {
        self.membership.need_sync(step)
    }

    /// Waits until it is to synchronise, or the timeout: for trainers that wait for samples.
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

    /// The number of the next version.
    pub fn next_version(&self) -> Version {
        self.highest.max(self.membership.joined.highest).next()
    }

    /// Publishes the first version with `publish`, which gives it this number: the weights with which the
    /// trainer begins, after the steps that it has joined with. Explorers can have them from here on; with
    /// [`Method::Direct`], from the first sync on.
    ///
    /// # Errors
    ///
    /// Those of `publish`. As [`need_sync`](Self::need_sync).
    pub fn first<T>(
        &mut self,
        timeout: Option<Duration>,
        publish: impl FnOnce(Version) -> Result<T>,
    ) -> Result<T> {
        let until = deadline(timeout);
        // The number is used up before it is announced: after an error it never names other
        // weights.
        let version = self.next_version();
        self.highest = version;
        // Announced first, because explorers can load the version before `publish` returns.
        self.announce(version, self.membership.join.step, until)?;
        let published = publish(version)?;
        // With `Direct` nothing was sent yet: the first sync meets explorers and sends it.
        if self.membership.joined.method != Method::Direct {
            let answer = self.published(version, self.membership.join.step, until)?;
            if !answer.is_synced() {
                let why = answer.reason.unwrap_or_else(|| answer.ended.word().into());
                return Err(SyncError::NotPublished { version, why }.into());
            }
        }
        Ok(published)
    }

    /// Publishes a version of the weights after a step with `publish`, which gives it this number, and
    /// waits until it can be had. With [`Method::Direct`] it first waits for explorers, and then until
    /// they have loaded it.
    ///
    /// A timeout is an answer, and so is a version that could not be published now: the caller tries
    /// again after its next step.
    ///
    /// # Errors
    ///
    /// Those of `publish` that no retry mends; the synchronizer is told. As [`need_sync`](Self::need_sync).
    pub fn sync(
        &mut self,
        step: u64,
        timeout: Option<Duration>,
        publish: impl FnOnce(Version, Deadline) -> Result<()>,
    ) -> Result<TrainerAnswer> {
        let begun = Instant::now();
        let mut answer = self.sync_until(step, timeout, publish)?;
        answer.took = begun.elapsed();
        Ok(answer)
    }

    fn sync_until(
        &mut self,
        step: u64,
        timeout: Option<Duration>,
        publish: impl FnOnce(Version, Deadline) -> Result<()>,
    ) -> Result<TrainerAnswer> {
        let until = deadline(timeout);
        let version = self.next_version();
        // Whatever becomes of it, another version has another number.
        self.highest = version;
        if self.membership.joined.method == Method::Direct {
            let request = Request::Meet {
                version,
                step,
                timeout_ms: ms(timeout),
            };
            // With `Direct` the trainer sends only once explorers are waiting. `Go` says so.
            match self.membership.ask(request, timeout, until) {
                Ok(Reply::Go {}) => {}
                // No explorer came in time, or the meeting ended in another way: nothing is sent.
                Ok(Reply::Trained(answer)) => return Ok(answer),
                Ok(_) => return Err(SyncError::Protocol.into()),
                // The service was away and knows nothing of the meeting. The caller tries again
                // with its next sync.
                Err(Unanswered::Away(why)) => return Ok(not_trained(version, step, why)),
                Err(lost) => {
                    // It may have been told to begin, and will not.
                    let reason = short(&lost.to_string());
                    let _ = self.membership.say(Request::Failed { reason });
                    return Err(lost.into());
                }
            }
        }
        // With `Direct` this says nothing: the meeting has named the version already.
        self.announce(version, step, until)?;
        if let Err(error) = publish(version, until) {
            let reason = short(&error.to_string());
            // Explorers or a meeting may wait for this version, so they are told.
            let _ = self.membership.say(Request::Failed {
                reason: reason.clone(),
            });
            // Only an error that a later attempt may not have becomes an answer.
            return match is_mended(&error) {
                true => Ok(TrainerAnswer {
                    ended: Ended::Failed,
                    ..not_trained(version, step, reason)
                }),
                false => Err(error),
            };
        }
        self.published(version, step, until)
    }

    /// Says that a version is about to be published. A synchronizer that is away is told later.
    fn announce(&mut self, version: Version, step: u64, until: Deadline) -> Result<()> {
        if self.membership.joined.method == Method::Direct {
            return Ok(());
        }
        let request = Request::Publishing { version, step };
        match self.membership.ask(request, left(until), until) {
            Ok(_) | Err(Unanswered::Away(_)) => Ok(()),
            Err(lost) => Err(lost.into()),
        }
    }

    /// Says that a version can be had, and waits until the synchronizer has it.
    fn published(&mut self, version: Version, step: u64, until: Deadline) -> Result<TrainerAnswer> {
        self.highest = self.highest.max(version);
        // What the trainer joins again with, if the service is away now.
        (
            self.membership.join.version,
            self.membership.join.version_step,
        ) = (version, step);
        // Asked again for as long as there is time: publishing twice changes nothing.
        loop {
            let timeout = left(until);
            let request = match self.membership.joined.method {
                Method::Direct => Request::Sent { version },
                Method::Memory | Method::Checkpoint => Request::Published {
                    version,
                    step,
                    timeout_ms: ms(timeout),
                },
            };
            let direct = matches!(request, Request::Sent { .. });
            match self.membership.ask(request, timeout, until) {
                Ok(Reply::Trained(answer)) => return Ok(answer),
                Ok(_) => return Err(SyncError::Protocol.into()),
                // A service that has just started knows of no meeting.
                Err(Unanswered::Away(why))
                    if direct || timeout.is_some_and(|left| left.is_zero()) =>
                {
                    return Ok(not_trained(version, step, why));
                }
                Err(Unanswered::Away(_)) => {}
                Err(lost) => {
                    let reason = short(&lost.to_string());
                    let _ = self.membership.say(Request::Failed { reason });
                    return Err(lost.into());
                }
            }
        }
    }

    /// How versions travel.
    pub fn method(&self) -> Method {
        self.membership.joined.method
    }

    /// The epoch of this trainer. One with a higher epoch takes its place.
    pub fn epoch(&self) -> u64 {
        self.membership.joined.epoch.0
    }

    /// Stops in order, or for a reason.
    pub fn leave(mut self, reason: Option<String>) {
        self.membership.leave(reason);
    }
}

/// Whether a caller that tries again after its next step may succeed.
pub(super) fn is_mended(error: &Error) -> bool {
    // `Reconnect` counts too: an explorer's fetcher joins again.
    let is_mended = matches!(error.remedy(), Remedy::Retry | Remedy::Reconnect);
    is_mended && !matches!(error, Error::Interrupted)
}

fn not_trained(version: Version, step: u64, why: String) -> TrainerAnswer {
    TrainerAnswer {
        ended: Ended::TimedOut,
        version,
        step,
        explorers: Vec::new(),
        reason: Some(why),
        took: Duration::ZERO,
    }
}

impl From<Unanswered> for Error {
    fn from(lost: Unanswered) -> Self {
        match lost {
            Unanswered::Away(why) => SyncError::Away { why }.into(),
            Unanswered::Untrusted(reason) => SyncError::Refused { reason }.into(),
            Unanswered::Told(RequestProblem::Replaced { reason }) => {
                SyncError::Replaced { reason }.into()
            }
            Unanswered::Told(problem) => SyncError::Refused {
                reason: problem.to_string(),
            }
            .into(),
            Unanswered::Engine(error) => error,
        }
    }
}
