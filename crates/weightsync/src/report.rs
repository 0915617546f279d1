//! What became of a send, worker by worker.

use std::fmt;
use std::time::Duration;

use weightsync_core::{ModelId, Version, WorkerId};
use weightsync_mem::{Outcome, ReaderOutcome};

/// The result of one send: a line per worker. A failure of one worker is its
/// line and nobody else's.
#[derive(Clone, Debug)]
pub struct Report {
    /// The model that was sent.
    pub model: ModelId,
    /// The version that was published.
    pub version: Version,
    /// Bytes of the version's tensors.
    pub bytes: u64,
    /// From the call of `send` until the version was live: the wait for a free
    /// slot and the pass over the source.
    pub copied: Duration,
    /// From the call of `send` until the last line was settled.
    pub took: Duration,
    /// One line per worker, by worker number. Empty if the send did not wait.
    pub workers: Vec<WorkerReport>,
}

/// One worker's line.
#[derive(Clone, Debug)]
pub struct WorkerReport {
    /// Which worker.
    pub worker: WorkerId,
    /// Its process.
    pub pid: u32,
    /// What became of the version there.
    pub outcome: Outcome,
    /// The version it has loaded; `Version::NONE` before its first.
    pub version: Version,
    /// How long after the version went live the sender learned of it.
    pub after: Duration,
}

impl Report {
    /// Whether every worker has loaded the version. One that left in order does
    /// not count: it no longer is a worker.
    pub fn all_applied(&self) -> bool {
        self.failed().next().is_none()
    }

    /// The lines of workers that should have loaded it and have not.
    pub fn failed(&self) -> impl Iterator<Item = &WorkerReport> {
        let expected = |line: &&WorkerReport| line.outcome != Outcome::Left;
        self.not_applied().filter(expected)
    }

    fn not_applied(&self) -> impl Iterator<Item = &WorkerReport> {
        self.workers
            .iter()
            .filter(|line| line.outcome != Outcome::Applied)
    }
}

impl From<ReaderOutcome> for WorkerReport {
    fn from(line: ReaderOutcome) -> Self {
        let ReaderOutcome {
            worker,
            pid,
            outcome,
            applied,
            after,
        } = line;
        Self {
            worker,
            pid,
            outcome,
            version: applied,
            after,
        }
    }
}

/// One sentence for the whole, one for each worker that has not applied it.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let applied = self.workers.len() - self.not_applied().count();
        write!(f, "{} {} ", self.model, self.version)?;
        match self.workers.len() {
            0 => write!(
                f,
                "is live after {:.1?}; no worker was waited for",
                self.copied
            )?,
            all => write!(
                f,
                "was applied by {applied} of {all} workers in {:.1?}",
                self.took
            )?,
        }
        self.not_applied()
            .try_for_each(|line| write!(f, "\n  {line}"))
    }
}

impl fmt::Display for WorkerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {}) ", self.worker, self.pid)?;
        let still = |f: &mut fmt::Formatter<'_>| match self.version.is_none() {
            true => write!(f, "; it has no version yet"),
            false => write!(f, "; it goes on with {}", self.version),
        };
        match &self.outcome {
            Outcome::Applied => write!(f, "applied it after {:.1?}", self.after),
            Outcome::Refused { reason } => {
                write!(f, "refused it: {reason}")?;
                still(f)
            }
            Outcome::Died if self.version.is_none() => write!(f, "died; it had no version yet"),
            Outcome::Died => write!(f, "died; its last version was {}", self.version),
            Outcome::Left => write!(f, "left in order"),
            Outcome::Late => {
                write!(f, "had not applied it after {:.1?}", self.after)?;
                still(f)
            }
        }
    }
}
