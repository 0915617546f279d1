//! The update of one engine, as a state machine: pause, start, update, finish, resume.
//!
//! **An engine resumes only on weights that are known to be whole**, old or new. The machine
//! decides which call comes next; the caller makes that call and reports what became of it.
//!
//! | the call | done: next | failed: next |
//! |---|---|---|
//! | pause | start | resume on the old weights: the engine may be half paused, and nothing was started |
//! | start | update | weights whole: resume on them; unknown: restore |
//! | update | update, once for each chunk, then finish | the same; new weights before the last chunk count as unknown |
//! | finish | resume on the new weights | the same |
//! | restore | resume on the old weights | the engine has all of the new weights: resume on them; else over: held |
//! | resume | over: updated or kept old, as the weights are | over: not resumed; held if the weights are unknown, unless pause failed |
//!
//! An engine that dies is dead, in every state. No call is made twice but for update.
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZeroU32;

use crate::error::{Error, Result};

/// The update of one engine around one sync: how far it is, and what the engine holds.
///
/// ```
/// use std::num::NonZeroU32;
/// use weightsync_core::engine_update::{EngineCall, EngineEvent, EngineUpdate, EngineWeights, UpdateOutcome};
///
/// let update = EngineUpdate::new(NonZeroU32::MIN);
/// let (update, call) = update.step(EngineEvent::Begin)?;
/// assert_eq!(call, Some(EngineCall::Pause));
/// let (update, call) = update.step(EngineEvent::Done)?;
/// assert_eq!(call, Some(EngineCall::Start));
/// let reason = "connection reset".to_owned();
/// let (update, call) = update.step(EngineEvent::Failed { reason, weights: EngineWeights::Unknown })?;
/// assert_eq!(call, Some(EngineCall::Restore));
/// let (update, call) = update.step(EngineEvent::Done)?;
/// assert_eq!(call, Some(EngineCall::Resume));
/// let (update, call) = update.step(EngineEvent::Done)?;
/// assert_eq!(call, None);
/// assert_eq!(update.outcome(), Some(UpdateOutcome::KeptOld));
/// assert_eq!(update.reason(), Some("start failed: connection reset"));
/// # Ok::<(), weightsync_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EngineUpdate {
    updates: NonZeroU32,
    state: UpdateState,
    weights: EngineWeights,
    reason: Option<String>,
}

/// An event that the caller reports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EngineEvent {
    /// The sync begins.
    Begin,
    /// The engine has done the call.
    Done,
    /// The engine refused the call, could not do it, or did not answer.
    Failed {
        /// Why.
        reason: String,
        /// What the engine is known to hold now.
        weights: EngineWeights,
    },
    /// The engine is gone. This is taken in every state, also when the update is over.
    Died {
        /// How it is known, or why.
        reason: String,
    },
}

/// The weights that an engine is known to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineWeights {
    /// All of the old weights: the engine could generate with them at once.
    Old,
    /// All of the new weights: the engine could generate with them at once.
    New,
    /// Nobody knows that they are whole.
    Unknown,
}

/// A call for the caller to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineCall {
    /// Stop generating.
    Pause,
    /// Prepare for new weights.
    Start,
    /// Take the next chunk of the new weights.
    Update,
    /// The new weights are complete: make them usable.
    Finish,
    /// Generate again.
    Resume,
    /// Bring all of the old weights back.
    Restore,
}

/// How an update ended. [`EngineUpdate::weights`] and [`EngineUpdate::reason`] belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UpdateOutcome {
    /// The engine generates with the new weights.
    Updated,
    /// The engine generates with the old weights.
    KeptOld,
    /// The engine has whole weights, old or new, and its resume failed. Unless only the answer
    /// was lost, it is paused; resuming it is safe at any time.
    NotResumed,
    /// The engine stays paused, because nobody knows that its weights are whole. It needs whole
    /// weights before it may resume.
    Held,
    /// The engine is gone.
    Dead,
}

/// What has happened so far. Each state but the first and the last four has one call under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UpdateState {
    /// The engine generates with the old weights, and the update has not begun.
    Running,
    /// Pause is under way.
    Pausing,
    /// The engine is paused; start is under way.
    Paused,
    /// The engine has started; an update is under way.
    Started {
        /// Updates that are done.
        done: u32,
    },
    /// All updates are done; finish is under way.
    Updated,
    /// The engine has finished; resume is under way.
    Finished,
    /// Pause failed; resume is under way.
    PauseFailed,
    /// A later call failed and the engine holds whole weights; resume is under way.
    UpdateFailed,
    /// A later call failed and the engine's weights are unknown; restore is under way.
    Restoring {
        /// All update calls were made.
        all_sent: bool,
    },
    /// The old weights are back; resume is under way.
    Restored,
    /// The engine generates again. The update is over, as in the states below.
    Resumed,
    /// As [`UpdateOutcome::NotResumed`].
    NotResumed,
    /// As [`UpdateOutcome::Held`].
    Held,
    /// As [`UpdateOutcome::Dead`].
    Dead,
}

impl EngineUpdate {
    /// The update of an engine that generates with the old weights, by `updates` update calls.
    pub fn new(updates: NonZeroU32) -> Self {
        Self {
            updates,
            state: UpdateState::Running,
            weights: EngineWeights::Old,
            reason: None,
        }
    }

    /// The update after `event`, and the next call to make: none once the update is over.
    ///
    /// An event that does not fit is an [`Error::WrongEvent`], and the update is as before.
    pub fn step(&self, event: EngineEvent) -> Result<(Self, Option<EngineCall>)> {
        let next = match &event {
            EngineEvent::Begin => self.after_begin(),
            EngineEvent::Done => self.after_success(),
            EngineEvent::Failed { reason, weights } => self.after_failure(reason, *weights),
            EngineEvent::Died { reason } => Some(self.after_death(reason)),
        };
        let next = next.ok_or_else(|| self.wrong(&event))?;
        let call = next.state.call();
        Ok((next, call))
    }

    /// What has happened so far.
    pub fn state(&self) -> UpdateState {
        self.state
    }

    /// How the update ended; `None` until it is over.
    pub fn outcome(&self) -> Option<UpdateOutcome> {
        Some(match (self.state, self.weights) {
            (UpdateState::Resumed, EngineWeights::New) => UpdateOutcome::Updated,
            (UpdateState::Resumed, _) => UpdateOutcome::KeptOld,
            (UpdateState::NotResumed, _) => UpdateOutcome::NotResumed,
            (UpdateState::Held, _) => UpdateOutcome::Held,
            (UpdateState::Dead, _) => UpdateOutcome::Dead,
            _ => return None,
        })
    }

    /// What the engine is known to hold, as of the last event.
    ///
    /// Unknown from the moment the engine has started until it has finished, or a failure says
    /// otherwise; unknown of a dead engine.
    pub fn weights(&self) -> EngineWeights {
        self.weights
    }

    /// Each failure so far, in order; `None` if there was none.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    fn after_begin(&self) -> Option<Self> {
        (self.state == UpdateState::Running)
            .then(|| self.at(UpdateState::Pausing, EngineWeights::Old))
    }

    fn after_success(&self) -> Option<Self> {
        let (state, weights) = match self.state {
            UpdateState::Pausing => (UpdateState::Paused, EngineWeights::Old),
            // From here on the engine may hold parts of both versions.
            UpdateState::Paused => (UpdateState::Started { done: 0 }, EngineWeights::Unknown),
            UpdateState::Started { done } if self.is_last(done) => {
                (UpdateState::Updated, EngineWeights::Unknown)
            }
            UpdateState::Started { done } => (
                UpdateState::Started { done: done + 1 },
                EngineWeights::Unknown,
            ),
            // Only finish makes the new weights usable, so only now they are known to be whole.
            UpdateState::Updated => (UpdateState::Finished, EngineWeights::New),
            UpdateState::Restoring { .. } => (UpdateState::Restored, EngineWeights::Old),
            // Resume changes no weights: they are what they were before it.
            UpdateState::Finished
            | UpdateState::PauseFailed
            | UpdateState::UpdateFailed
            | UpdateState::Restored => (UpdateState::Resumed, self.weights),
            UpdateState::Running
            | UpdateState::Resumed
            | UpdateState::NotResumed
            | UpdateState::Held
            | UpdateState::Dead => {
                return None;
            }
        };
        Some(self.at(state, weights))
    }

    fn after_failure(&self, reason: &str, reported: EngineWeights) -> Option<Self> {
        let call = self.state.call()?;
        let (state, weights) = match (self.state, reported) {
            // No call that changes weights was made.
            (UpdateState::Pausing, _) => (UpdateState::PauseFailed, EngineWeights::Old),
            // Nothing was started, so the weights are old whatever the engine reports.
            (UpdateState::PauseFailed, _) => (UpdateState::NotResumed, EngineWeights::Old),
            // The rest of the new weights was never sent.
            (UpdateState::Started { done }, EngineWeights::New) if !self.is_last(done) => (
                UpdateState::Restoring { all_sent: false },
                EngineWeights::Unknown,
            ),
            (
                UpdateState::Paused | UpdateState::Started { .. } | UpdateState::Updated,
                EngineWeights::Unknown,
            ) => (self.restoring(), EngineWeights::Unknown),
            // The engine says that its weights are whole, so nothing has to be brought back.
            (UpdateState::Paused | UpdateState::Started { .. } | UpdateState::Updated, whole) => {
                (UpdateState::UpdateFailed, whole)
            }
            // It need not go back: the update was done, and only its answer was lost.
            (UpdateState::Restoring { all_sent: true }, EngineWeights::New) => {
                (UpdateState::UpdateFailed, EngineWeights::New)
            }
            // An engine that could not go back is not trusted with what else it says it holds.
            (UpdateState::Restoring { .. }, _) => (UpdateState::Held, EngineWeights::Unknown),
            (
                UpdateState::Finished | UpdateState::UpdateFailed | UpdateState::Restored,
                EngineWeights::Unknown,
            ) => (UpdateState::Held, EngineWeights::Unknown),
            // Paused with whole weights: resuming it later is safe.
            (UpdateState::Finished | UpdateState::UpdateFailed | UpdateState::Restored, whole) => {
                (UpdateState::NotResumed, whole)
            }
            (
                UpdateState::Running
                | UpdateState::Resumed
                | UpdateState::NotResumed
                | UpdateState::Held
                | UpdateState::Dead,
                _,
            ) => return None,
        };
        Some(Self {
            reason: self.and(&format!("{call} failed"), reason),
            ..self.at(state, weights)
        })
    }

    /// The first report of a death stays.
    fn after_death(&self, reason: &str) -> Self {
        // A second report, such as a lost connection after a seen exit, only follows from the
        // first.
        if self.state == UpdateState::Dead {
            return self.clone();
        }
        Self {
            reason: self.and("the engine died", reason),
            ..self.at(UpdateState::Dead, EngineWeights::Unknown)
        }
    }

    /// The state in which the call under way has failed and restore is next.
    fn restoring(&self) -> UpdateState {
        let all_sent = match self.state {
            UpdateState::Started { done } => self.is_last(done),
            // Finish failed: all chunks are at the engine, so it may hold the whole new version.
            UpdateState::Updated => true,
            _ => false,
        };
        UpdateState::Restoring { all_sent }
    }

    fn is_last(&self, done: u32) -> bool {
        // `done` does not count the update that is under way.
        done + 1 >= self.updates.get()
    }

    fn at(&self, state: UpdateState, weights: EngineWeights) -> Self {
        Self {
            state,
            weights,
            ..self.clone()
        }
    }

    fn and(&self, what: &str, reason: &str) -> Option<String> {
        Some(match &self.reason {
            Some(before) => format!("{before}; {what}: {reason}"),
            None => format!("{what}: {reason}"),
        })
    }

    fn wrong(&self, event: &EngineEvent) -> Error {
        let fix = match (self.state, self.state.call()) {
            (UpdateState::Running, _) => "the update has not begun; report begin first".to_owned(),
            (_, Some(call)) => {
                format!("make the {call} call, then report done, failed or died")
            }
            (_, None) => "the update is over; make a new one for the next sync".to_owned(),
        };
        Error::WrongEvent {
            event: event.word(),
            state: self.state,
            fix,
        }
    }
}

impl UpdateState {
    /// The call that is under way.
    fn call(self) -> Option<EngineCall> {
        match self {
            Self::Pausing => Some(EngineCall::Pause),
            Self::Paused => Some(EngineCall::Start),
            Self::Started { .. } => Some(EngineCall::Update),
            Self::Updated => Some(EngineCall::Finish),
            Self::Finished | Self::PauseFailed | Self::UpdateFailed | Self::Restored => {
                Some(EngineCall::Resume)
            }
            Self::Restoring { .. } => Some(EngineCall::Restore),
            Self::Running | Self::Resumed | Self::NotResumed | Self::Held | Self::Dead => None,
        }
    }
}

impl EngineEvent {
    fn word(&self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Done => "done",
            Self::Failed { .. } => "failed",
            Self::Died { .. } => "died",
        }
    }
}

impl fmt::Display for UpdateState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Started { .. } => "started",
            Self::Updated => "updated",
            Self::Finished => "finished",
            Self::PauseFailed => "pause failed",
            Self::UpdateFailed => "update failed",
            Self::Restoring { .. } => "restoring",
            Self::Restored => "restored",
            Self::Resumed => "resumed",
            Self::NotResumed => "not resumed",
            Self::Held => "held",
            Self::Dead => "dead",
        })
    }
}

impl fmt::Display for EngineCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pause => "pause",
            Self::Start => "start",
            Self::Update => "update",
            Self::Finish => "finish",
            Self::Resume => "resume",
            Self::Restore => "restore",
        })
    }
}

impl fmt::Display for UpdateOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Updated => "updated",
            Self::KeptOld => "kept old",
            Self::NotResumed => "not resumed",
            Self::Held => "held",
            Self::Dead => "dead",
        })
    }
}

impl fmt::Display for EngineWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Old => "old",
            Self::New => "new",
            Self::Unknown => "unknown",
        })
    }
}
