//! A worker as its sender sees it, and what becomes of a version there.
//!
//! Every transport, report, status and page uses these values and their words.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strum::{Display, EnumDiscriminants, EnumIter, EnumString, IntoEnumIterator, IntoStaticStr};

use crate::ids::WorkerId;
use crate::version::Version;

/// How far a send waits. Each level includes the one before.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Display,
    EnumIter,
    EnumString,
    IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
pub enum WaitFor {
    /// The version is live: a worker that looks finds it.
    Sent,
    /// Every worker has the whole version in addition to the one it runs, and has
    /// checked it.
    Staged,
    /// Every worker has loaded it, or has a line in the report that says why
    /// not.
    #[default]
    Applied,
}

impl WaitFor {
    /// What a worker must have done. A send that waits for no worker asks nothing of it.
    pub const fn level(self) -> Option<Level> {
        match self {
            Self::Sent => None,
            Self::Staged => Some(Level::Staged),
            Self::Applied => Some(Level::Applied),
        }
    }

    /// Its word: `sent`, `staged` or `applied`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// How far a version must have come at a worker to count as done there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The worker has the whole version and has checked it.
    Staged,
    /// The worker has loaded it.
    Applied,
}

/// Which workers a publication is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Targets {
    /// All there are, and those that join later.
    #[default]
    All,
    /// Only these workers, connected or not.
    Workers(Vec<WorkerId>),
}

/// What became of a version at one worker. Its serde form has the word as `outcome`, and the
/// worker's words as `reason`.
#[derive(Clone, Debug, PartialEq, Eq, EnumDiscriminants, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[strum_discriminants(
    name(OutcomeKind),
    doc = "An [`Outcome`] without its reason.",
    derive(EnumIter, EnumString, IntoStaticStr, Serialize, Deserialize),
    strum(serialize_all = "snake_case"),
    serde(rename_all = "snake_case")
)]
pub enum Outcome {
    /// The worker has loaded it (or a newer one), and runs no older version of any of its models.
    Applied,
    /// The worker has it in addition to the one it runs, and has checked it.
    Staged,
    /// The worker cannot use it, and says why and what it does now.
    Refused {
        /// The worker's words.
        reason: String,
    },
    /// The worker's process died.
    Died,
    /// The worker closed its end in order.
    Left,
    /// The worker ended and said why: an error, or that it can use nothing more.
    Failed {
        /// The worker's words.
        reason: String,
    },
    /// The worker has been silent for too long: its link is silent, or the relay of its host is
    /// gone. It gets the newest version when it is back.
    Lost,
    /// The deadline came first; or it did for an earlier send, and the worker has not
    /// moved since ([`WorkerReport::late`]).
    Late,
    /// The worker is held at the version it has. It gets the newest one when it is released.
    Held,
    /// The worker is to get every version, and its queue had no room for this
    /// one by the deadline, or as many as may wait for room did so already: it
    /// will not get it.
    Full,
    /// The worker takes only what it asks for, so the send did not wait for it; or it has since
    /// asked for an older version, or waits for a version to come.
    Asks,
    /// No such worker is connected. If it joins, it gets this version.
    Absent,
}

impl OutcomeKind {
    /// Its word.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl Outcome {
    /// The words of all outcomes.
    pub fn words() -> impl Iterator<Item = &'static str> {
        OutcomeKind::iter().map(OutcomeKind::as_str)
    }

    /// Which one it is, without the reason.
    pub fn kind(&self) -> OutcomeKind {
        self.into()
    }

    /// Its word, without the reason.
    pub fn as_str(&self) -> &'static str {
        self.kind().as_str()
    }

    /// The outcome of a word, with the worker's reason where it has one; `None` for another word.
    pub fn of(word: &str, reason: impl Into<String>) -> Option<Self> {
        let reason = reason.into();
        Some(match word.parse().ok()? {
            OutcomeKind::Applied => Self::Applied,
            OutcomeKind::Staged => Self::Staged,
            OutcomeKind::Refused => Self::Refused { reason },
            OutcomeKind::Died => Self::Died,
            OutcomeKind::Left => Self::Left,
            OutcomeKind::Failed => Self::Failed { reason },
            OutcomeKind::Lost => Self::Lost,
            OutcomeKind::Late => Self::Late,
            OutcomeKind::Held => Self::Held,
            OutcomeKind::Full => Self::Full,
            OutcomeKind::Asks => Self::Asks,
            OutcomeKind::Absent => Self::Absent,
        })
    }

    /// The worker's words, of one that refused or failed.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Refused { reason } | Self::Failed { reason } => Some(reason),
            Self::Applied
            | Self::Staged
            | Self::Died
            | Self::Left
            | Self::Lost
            | Self::Late
            | Self::Held
            | Self::Full
            | Self::Asks
            | Self::Absent => None,
        }
    }

    /// Whether the worker's process is no longer connected.
    pub fn is_gone(&self) -> bool {
        matches!(
            self,
            Self::Died | Self::Left | Self::Failed { .. } | Self::Lost
        )
    }

    /// Whether waiting longer can change it.
    pub fn is_final(&self, level: Level) -> bool {
        match self {
            // It may load the version a moment later.
            Self::Late => false,
            // A wait for `Applied` goes on: the worker has yet to load it.
            Self::Staged => level == Level::Staged,
            Self::Applied
            | Self::Refused { .. }
            | Self::Died
            | Self::Left
            | Self::Failed { .. }
            | Self::Lost
            | Self::Held
            | Self::Full
            | Self::Asks
            | Self::Absent => true,
        }
    }
}

/// One worker's line in the report of a send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerReport {
    /// Which worker.
    pub worker: WorkerId,
    /// Its process; 0 if it is not known.
    pub pid: u32,
    /// What became of the version there.
    pub outcome: Outcome,
    /// The version it has loaded of each model that was sent, in the order of
    /// the set; `Version::NONE` before its first. There is one entry for each
    /// model, also where the send gave different weights to different workers.
    pub versions: Vec<Version>,
    /// Whether that is what was sent, or newer, of each model that it takes.
    pub current: bool,
    /// How long after the version went live the sender learned of it.
    pub after: Duration,
    /// Of a worker that was late for an earlier send and has not moved since: how long
    /// ago the version went live that it was late for. The send did not wait for it.
    pub late: Option<Duration>,
}

/// A worker as the sender sees it, for reports, programs and pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorkerStatus {
    /// Which worker.
    pub worker: WorkerId,
    /// Its process, on its host; 0 if it is not known.
    pub pid: u32,
    /// The name of its host; empty for the sender's own host.
    pub host: String,
    /// Where it runs its models: a label such as `cpu` or `cuda:0`.
    pub device: String,
    /// How versions reach it.
    pub route: WorkerRoute,
    /// Whether it is held at the versions it has.
    pub held: bool,
    /// The newest version it has loaded of each model, in the set's order;
    /// `Version::NONE` before the first, and for models it did not want.
    pub versions: Vec<Version>,
    /// What became of the last send that was for it.
    pub last: Option<LastOutcome>,
    /// How it went: [`Outcome::Failed`], [`Outcome::Died`] or [`Outcome::Lost`]. `None` while it is
    /// connected. A worker that went stays in the status until it is back or forgotten.
    pub gone: Option<Outcome>,
}

/// How versions reach a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerRoute {
    /// It reads the memory that the sender writes.
    #[default]
    Memory,
    /// It reads the memory of an agent, which this number names among the sender's agents.
    Agent(u64),
    /// No agent reaches it at present.
    Unreached,
    /// It fetches versions over HTTP.
    Http,
    /// It reads a store.
    Store,
}

/// What became of the last send at one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastOutcome {
    /// What became of it.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// How long after the version went live the sender learned of it.
    #[serde(rename = "after_seconds", with = "crate::status::seconds")]
    pub after: Duration,
    /// How long ago the report of that send was made.
    #[serde(rename = "ago_seconds", with = "crate::status::seconds")]
    pub ago: Duration,
}

impl WorkerStatus {
    /// A worker that has nothing yet, as a transport of one's own makes it.
    pub fn new(worker: WorkerId, pid: u32, models: usize) -> Self {
        Self {
            worker,
            pid,
            host: String::new(),
            device: "cpu".into(),
            route: WorkerRoute::Memory,
            held: false,
            versions: vec![Version::NONE; models],
            last: None,
            gone: None,
        }
    }

    /// Whether it has loaded anything.
    pub fn is_ready(&self) -> bool {
        self.versions.iter().any(|version| !version.is_none())
    }
}

/// The workers that are connected, and those that have left, for a sender that waits for workers.
#[derive(Clone, Debug, Default)]
pub struct Attendance {
    /// The workers connected at present, by number.
    pub workers: Vec<WorkerStatus>,
    /// The workers that cannot use the models, until the caller has taken their refusals.
    pub rejected: Vec<WorkerId>,
    /// Workers that joined and are gone, in the order in which they joined. Only the last ones are
    /// remembered.
    pub gone: Vec<GoneWorker>,
    /// How many workers have joined so far.
    pub joined: u64,
}

/// A worker that has joined and gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoneWorker {
    /// Its last known status.
    pub status: WorkerStatus,
    /// How the worker went: [`Outcome::Left`], [`Outcome::Failed`], [`Outcome::Died`] or
    /// [`Outcome::Lost`].
    pub how: Outcome,
    /// The worker's position among all that joined, from 1.
    pub joined: u64,
}

/// As in the report of a send that waited until the version was applied.
impl fmt::Display for WorkerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, WaitFor::Applied)
    }
}

/// A queue that was full for less time was full at publication, and the send did not wait for room.
const AT_ONCE: Duration = Duration::from_millis(1);

impl WorkerReport {
    /// Its sentence in the report of a send that waited so far.
    pub fn sentence(&self, level: WaitFor) -> impl fmt::Display {
        fmt::from_fn(move |f| self.write(f, level))
    }

    // Longer than a screen: a table with one sentence for each outcome.
    fn write(&self, f: &mut fmt::Formatter<'_>, level: WaitFor) -> fmt::Result {
        write!(f, "{}", self.worker)?;
        // 0: the process is not known, as of a worker that never joined.
        if self.pid != 0 {
            write!(f, " (pid {})", self.pid)?;
        }
        let version = VersionList(&self.versions);
        let none_yet = self.versions.iter().all(|version| version.is_none());
        let still = |f: &mut fmt::Formatter<'_>| match none_yet {
            true => write!(f, "; it has no version yet"),
            false => write!(f, "; it goes on with {version}"),
        };
        let last = |f: &mut fmt::Formatter<'_>| match none_yet {
            true => write!(f, "; it had no version yet"),
            false => write!(f, "; its last version was {version}"),
        };
        match &self.outcome {
            Outcome::Applied => write!(f, " applied it after {:.1?}", self.after),
            Outcome::Staged => {
                write!(f, " had staged but not applied it after {:.1?}", self.after)?;
                still(f)
            }
            Outcome::Refused { reason } => {
                write!(f, " refused it: {reason}")?;
                still(f)
            }
            Outcome::Failed { reason } => {
                write!(f, " failed: {reason}")?;
                last(f)
            }
            Outcome::Died => {
                f.write_str(" died")?;
                last(f)
            }
            Outcome::Left => write!(f, " left in order"),
            Outcome::Lost => {
                write!(
                    f,
                    " cannot be reached; it gets the newest version when it is back"
                )?;
                still(f)
            }
            // Late for an earlier send: this one passed the worker over, so its own time says
            // nothing.
            Outcome::Late if let Some(late) = self.late => {
                write!(f, " has been late for {late:.1?} and was not waited for")?;
                still(f)
            }
            Outcome::Late => {
                let done = match level {
                    WaitFor::Staged => "staged",
                    WaitFor::Sent | WaitFor::Applied => "applied",
                };
                write!(f, " had not {done} it after {:.1?}", self.after)?;
                still(f)
            }
            Outcome::Held if none_yet => write!(f, " is held, and has no version yet"),
            Outcome::Held => write!(f, " is held at {version}"),
            Outcome::Full => {
                f.write_str(" will not get it: its queue was full")?;
                // The time counts only where the send has waited for room.
                if level > WaitFor::Sent && self.after >= AT_ONCE {
                    write!(f, " for {:.1?}", self.after)?;
                }
                still(f)
            }
            Outcome::Asks if none_yet => write!(f, " takes what it asks for, and has nothing yet"),
            Outcome::Asks => write!(f, " takes what it asks for, and runs {version}"),
            Outcome::Absent => write!(f, " is not connected; it gets this version if it joins"),
        }
    }
}

/// Some versions: `v3`, or `v3, v1`, without those of models that it has none of.
struct VersionList<'a>(&'a [Version]);

impl fmt::Display for VersionList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let some = self.0.iter().filter(|version| !version.is_none());
        for (index, version) in some.enumerate() {
            let before = if index == 0 { "" } else { ", " };
            write!(f, "{before}{version}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_back() {
        let words: Vec<_> = Outcome::words().collect();
        assert_eq!(words.len(), 12);
        for word in words {
            let outcome = Outcome::of(word, "why").unwrap();
            assert_eq!(outcome.as_str(), word);
            let has_reason = matches!(word, "refused" | "failed");
            assert_eq!(outcome.reason(), has_reason.then_some("why"));
            let kind: OutcomeKind = serde_json::from_str(&format!("{word:?}")).unwrap();
            assert_eq!(kind, outcome.kind());
        }
        assert_eq!(Outcome::of("gone", ""), None);
        for level in WaitFor::iter() {
            assert_eq!(level.as_str().parse(), Ok(level));
        }
    }
}
