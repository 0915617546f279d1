//! What the parties and the service say to each other, as JSON.
//!
//! A party joins with one request, whose answer is a stream that lives as long as the party does. Its
//! other requests are answered one at a time; some of them wait.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync_core::synchronizer::{Method, Need, State, Style, SyncOutcome};
use weightsync_engine::{Epoch, InitInfo, Version};

/// The version of this protocol.
pub(super) const PROTOCOL: u8 = 1;

/// The most bytes of a request, and of an answer: one to a trainer has a line for each explorer.
pub(super) const MAX_BODY: usize = 256 << 10;
pub(super) const MAX_ANSWER: usize = 4 << 20;

/// The most bytes of a party's name.
pub(super) const MAX_NAME: usize = 255;

/// What a party does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It publishes versions.
    Trainer,
    /// It loads them.
    Explorer,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trainer => "trainer",
            Self::Explorer => "explorer",
        })
    }
}

/// A party joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Join {
    pub(super) protocol: u8,
    pub(super) role: Role,
    pub(super) name: String,
    /// The service's, if it is not given.
    pub(super) style: Option<Style>,
    /// How the trainer's versions travel. The service's, if it is not given.
    pub(super) method: Option<Method>,
    /// How many steps it has made: in all, and for an explorer up to its last sync.
    pub(super) step: u64,
    pub(super) synced: u64,
    /// The version that it has, and for a trainer the step that made it.
    pub(super) version: Version,
    pub(super) version_step: u64,
    /// The lineage of that version, and the number where it receives versions, if it was here before.
    pub(super) lineage: u64,
    pub(super) worker: Option<u32>,
    /// The epoch of a trainer that was here before.
    pub(super) epoch: Option<Epoch>,
    /// Where the versions of a trainer can be had.
    pub(super) from: Option<InitInfo>,
}

/// The answer to a party that joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JoinAnswer {
    pub(super) party: u64,
    /// Versions of one lineage have numbers that no other version of it has.
    pub(super) lineage: u64,
    /// Its number where it receives versions.
    pub(super) worker: u32,
    pub(super) method: Method,
    pub(super) style: Style,
    /// Of a trainer.
    pub(super) epoch: Epoch,
    /// The highest number that a version has.
    pub(super) highest: Version,
    /// The newest version that can be had, and its step.
    pub(super) newest: Version,
    pub(super) newest_step: u64,
}

/// A request of a party.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Request {
    /// Whether it is to synchronise, after so many steps.
    Need { step: Option<u64> },
    /// The same, once it is.
    WaitNeed {
        step: Option<u64>,
        timeout_ms: Option<u64>,
    },
    /// An explorer waits for a version.
    Sync {
        step: Option<u64>,
        timeout_ms: Option<u64>,
    },
    /// It waits no longer.
    Cancel {},
    /// It has verified and loaded one.
    Loaded { version: Version },
    /// It could not.
    LoadFailed { version: Version, reason: String },
    /// It evaluates, or does so no longer.
    Pause { paused: bool },
    /// Where the store with the versions is.
    Store {},
    /// A trainer is about to publish a version. Explorers may load it before the trainer says more.
    Publishing { version: Version, step: u64 },
    /// It has published it.
    Published {
        version: Version,
        step: u64,
        timeout_ms: Option<u64>,
    },
    /// It waits for explorers, to send them one.
    Meet {
        version: Version,
        step: u64,
        timeout_ms: Option<u64>,
    },
    /// It has sent it.
    Sent { version: Version },
    /// It could not publish, or send.
    Failed { reason: String },
    /// The party ends: in order, or for a reason.
    Leave { reason: Option<String> },
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Need(NeedAnswer),
    /// The explorer is to load this version, or a newer one, from there.
    Fetch {
        version: Version,
        from: Box<InitInfo>,
    },
    Synced(SyncAnswer),
    /// The trainer is to send the version that it wants to.
    Go {},
    Trained(TrainerAnswer),
    /// The address of the store, if there is one.
    Stored {
        store: Option<String>,
    },
    Done {},
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub(super) enum RequestProblem {
    /// The service does not know the party, or its connection has ended: it joins again.
    #[error("the synchronizer does not know this party any more")]
    Unknown {},
    /// Another trainer, or a party of its name, has its place.
    #[error("{reason}")]
    Replaced { reason: String },
    /// The request cannot be done.
    #[error("{reason}")]
    Refused { reason: String },
}

/// Whether a party is to synchronise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NeedAnswer {
    /// Whether it is, or must before its next step.
    pub need: Need,
    /// The explorers that ask for a version, for a trainer.
    pub asked_by: Vec<String>,
    /// The newest version that can be had.
    pub newest: Version,
    /// Whether the trainer has stopped in order: nothing newer comes.
    pub trainer_stopped: bool,
    /// False if the synchronizer did not answer.
    pub connected: bool,
}

impl NeedAnswer {
    /// Whether the party is to synchronise, or must.
    pub fn is_needed(&self) -> bool {
        self.need != Need::No
    }
}

/// How a sync has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ended {
    /// The explorer has verified and loaded the version.
    Synced,
    /// It has the newest version, and the trainer has stopped.
    NothingNewer,
    /// The trainer has stopped, and nobody can send its newest version.
    OutOfReach,
    /// The version could not be published, sent or loaded.
    Failed,
    /// The call was ended.
    Cancelled,
    /// The time was over.
    TimedOut,
    /// The explorer left, or died.
    Left,
    /// The trainer failed, left or died.
    TrainerLeft,
}

impl Ended {
    pub(super) fn of(outcome: SyncOutcome) -> Self {
        match outcome {
            SyncOutcome::Synced(_) => Self::Synced,
            SyncOutcome::NothingNewer => Self::NothingNewer,
            SyncOutcome::OutOfReach => Self::OutOfReach,
            SyncOutcome::Failed => Self::Failed,
            SyncOutcome::Cancelled => Self::Cancelled,
            SyncOutcome::TimedOut => Self::TimedOut,
            SyncOutcome::Left => Self::Left,
            SyncOutcome::TrainerLeft => Self::TrainerLeft,
        }
    }

    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Synced => "synced",
            Self::NothingNewer => "nothing newer",
            Self::OutOfReach => "out of reach",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::TimedOut => "timed out",
            Self::Left => "left",
            Self::TrainerLeft => "the trainer left",
        }
    }
}

/// The answer to an explorer's sync.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SyncAnswer {
    /// How it ended.
    pub ended: Ended,
    /// The version that the explorer runs now: the one that it has verified and loaded.
    pub version: Version,
    /// The trainer's step that made that version, if it is known.
    pub step: Option<u64>,
    /// How many versions are newer.
    pub versions_behind: u64,
    /// How many steps the trainer has made since.
    pub steps_behind: u64,
    /// Why it failed.
    pub reason: Option<String>,
    /// How long the call took.
    #[serde(skip)]
    pub took: Duration,
}

impl SyncAnswer {
    /// Whether the explorer runs a version that it did not have before.
    pub fn is_synced(&self) -> bool {
        self.ended == Ended::Synced
    }
}

impl fmt::Display for SyncAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is_synced() {
            write!(f, "{}: still ", self.ended.word())?;
        }
        match self.version.is_none() {
            true => f.write_str("no version")?,
            false => write!(f, "{}", self.version)?,
        }
        write!(f, ", {:.3} ms", 1e3 * self.took.as_secs_f64())?;
        match self.steps_behind {
            0 => {}
            1 => f.write_str(", 1 step stale")?,
            steps => write!(f, ", {steps} steps stale")?,
        }
        match &self.reason {
            Some(reason) => write!(f, " ({reason})"),
            None => Ok(()),
        }
    }
}

/// An explorer, for a trainer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ExplorerLine {
    /// Its name.
    pub name: String,
    /// What it does.
    pub state: State,
    /// How many steps it has made.
    pub step: u64,
    /// The version that it has verified and loaded.
    pub version: Version,
    /// How its last sync ended.
    pub ended: Option<Ended>,
    /// Why that failed.
    pub reason: Option<String>,
}

/// The answer to a trainer's sync.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrainerAnswer {
    /// How it ended: `synced` if the version can be had, or at least one explorer has loaded it.
    pub ended: Ended,
    /// The version that was published or sent.
    pub version: Version,
    /// The step that made it.
    pub step: u64,
    /// The explorers: those to which it was sent, if it was sent, else all that are there.
    pub explorers: Vec<ExplorerLine>,
    /// Why it failed.
    pub reason: Option<String>,
    /// How long the call took.
    #[serde(skip)]
    pub took: Duration,
}

impl TrainerAnswer {
    /// Whether the version can be had, or at least one explorer has loaded it.
    pub fn is_synced(&self) -> bool {
        self.ended == Ended::Synced
    }
}

impl fmt::Display for TrainerAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of step {}: {}",
            self.version,
            self.step,
            self.ended.word()
        )?;
        if let Some(reason) = &self.reason {
            write!(f, " ({reason})")?;
        }
        for line in &self.explorers {
            write!(f, "; {} runs {}", line.name, line.version)?;
            if let Some(reason) = &line.reason {
                write!(f, " ({reason})")?;
            }
        }
        Ok(())
    }
}

/// A reason, cut to a length that many answers can have.
pub(super) fn short(reason: &str) -> String {
    // 400 bytes: an answer to a trainer has a line of each explorer.
    reason[..reason.floor_char_boundary(400)].to_owned()
}
