//! What became of a send, worker by worker.

use std::fmt;
use std::time::Duration;

use weightsync_core::{ModelId, Outcome, Version, WaitFor, WorkerId, WorkerReport};

use crate::error::{Error, Result};

/// The result of one send: a line per worker. A failure of one worker shows only in its own line.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was published: the version of each model that was sent. A send of
    /// different weights to different workers has one entry for each of them,
    /// and none if there was no worker to send to.
    pub versions: Vec<(ModelId, Version)>,
    /// Bytes of the tensors that were sent.
    pub bytes: u64,
    /// The tensors that a partial update carried; none for a whole one. Of
    /// different weights to different workers, those that any of them carried.
    pub partial: Option<Vec<String>>,
    /// The changes since the versions before; `None` if no changes were encoded, because no host
    /// needs them.
    pub changes: Option<Changes>,
    /// From the call of `send` until the version was live: the wait for room
    /// and the pass over the source.
    pub copied: Duration,
    /// From the call of `send` until the last line was settled.
    pub took: Duration,
    /// How far the send waited.
    pub level: WaitFor,
    /// One line per worker, by worker number. A worker belongs to the sender from its join until it
    /// leaves in order or is [forgotten](crate::Sender::forget). A worker that left since the last
    /// report still has a line. A number has two lines if its process is gone since the last report
    /// and another process has taken the number.
    ///
    /// The report of a send that did not wait has only the lines that no wait would change: workers
    /// that will not get the version (`Full`, `Failed`, `Died`, `Lost`), or not now (`Held`,
    /// `Absent`).
    pub workers: Vec<WorkerReport>,
}

/// How much changed from one version to the next, and how many bytes the changes take on their way
/// to another host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changes {
    /// Elements of the versions. Padding counts too, in elements of the width around it.
    pub elements: u64,
    /// Elements whose bits differ from the version before.
    pub changed: u64,
    /// Bytes of the encoded changes, for each host that has the version before.
    pub bytes: u64,
    /// Bytes of the versions as a whole.
    pub whole: u64,
}

impl Changes {
    /// `changed` of `elements` changed. They take `bytes` on the way, in place of `whole` bytes.
    pub const fn new(elements: u64, changed: u64, bytes: u64, whole: u64) -> Self {
        Self {
            elements,
            changed,
            bytes,
            whole,
        }
    }

    /// The share of the elements that changed, from 0 to 1.
    pub fn share(&self) -> f64 {
        self.changed as f64 / self.elements.max(1) as f64
    }

    /// How many times smaller the changes are than the whole versions.
    pub fn ratio(&self) -> f64 {
        self.whole as f64 / self.bytes.max(1) as f64
    }
}

impl std::iter::Sum for Changes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            elements: sum.elements + one.elements,
            changed: sum.changed + one.changed,
            bytes: sum.bytes + one.bytes,
            whole: sum.whole + one.whole,
        })
    }
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.2} % changed, {} for {} ({:.0} : 1)",
            100.0 * self.share(),
            Bytes(self.bytes),
            Bytes(self.whole),
            self.ratio()
        )
    }
}

/// A number of bytes for people.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => write!(f, "{:.1} {name}", self.0 as f64 / unit as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl Report {
    /// The version of the model that was sent; the newest, if workers got different weights.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`].
    pub fn version(&self) -> Result<Version> {
        only_version(&self.versions)
    }

    /// Whether at least one worker has loaded the version, and so has every worker the send was
    /// for. These do not count: workers that left in order, held workers, and processes whose number
    /// another process has taken. A worker that takes only what it asks for counts as up to date if
    /// it runs the version of each model that it takes.
    ///
    /// A worker that failed, died or was lost counts, in this report and in all later ones, until it
    /// is back or [forgotten](crate::Sender::forget).
    pub fn all_applied(&self) -> bool {
        self.level == WaitFor::Applied && self.all_reached()
    }

    /// Whether every worker has got as far as the send waited, by the rules of
    /// [`all_applied`](Self::all_applied). A send that did not wait needs no worker.
    pub fn all_reached(&self) -> bool {
        let excused = |line: &WorkerReport| matches!(line.outcome, Outcome::Left | Outcome::Held);
        let mut lines = self.workers.iter();
        // Excused lines alone are no success: at least one worker has to have it.
        let nobody_waited_for = self.level == WaitFor::Sent;
        (nobody_waited_for || lines.clone().any(|line| self.reached(line)))
            && lines.all(|line| self.reached(line) || excused(line) || self.is_succeeded(line))
    }

    /// The report, if [all have applied](Self::all_applied) the version.
    ///
    /// # Errors
    ///
    /// [`Error::NotApplied`] with the report otherwise.
    pub fn ensure_applied(self) -> Result<Self> {
        match self.all_applied() {
            true => Ok(self),
            false => Err(Error::NotApplied {
                report: Box::new(self),
            }),
        }
    }

    /// The lines of workers that should have got as far as the send waited, and have not. Workers
    /// that take only what they ask for are left out.
    pub fn failed(&self) -> impl Iterator<Item = &WorkerReport> {
        self.workers
            .iter()
            .filter(|line| !self.reached(line) && !is_wished(line))
            .filter(|line| !self.is_succeeded(line))
    }

    /// One worker's line. If another process has taken the number, the line of that process.
    pub fn worker(&self, worker: impl Into<WorkerId>) -> Option<&WorkerReport> {
        let worker = worker.into();
        let of_it = |line: &&WorkerReport| line.worker == worker;
        // A worker that came back has two lines. That of the process that lives counts.
        let lines = self.workers.iter().filter(of_it);
        lines.min_by_key(|line| line.outcome.is_gone())
    }

    /// Whether another process has taken the number of one that has gone.
    fn is_succeeded(&self, line: &WorkerReport) -> bool {
        let successor =
            |other: &WorkerReport| other.worker == line.worker && !other.outcome.is_gone();
        line.outcome.is_gone() && self.workers.iter().any(successor)
    }

    fn reached(&self, line: &WorkerReport) -> bool {
        match line.outcome {
            Outcome::Applied => true,
            Outcome::Staged => self.level <= WaitFor::Staged,
            // A worker that takes only what it asks for has reached the send if it runs this
            // version or a later one.
            Outcome::Asks => line.current,
            _ => false,
        }
    }
}

/// Whether a worker that is not up to date is so because somebody wished it.
fn is_wished(line: &WorkerReport) -> bool {
    matches!(line.outcome, Outcome::Left | Outcome::Held | Outcome::Asks)
}

impl Report {
    /// Writes what was sent.
    fn write_versions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (model, version)) in self.versions.iter().enumerate() {
            let before = match index {
                0 => "",
                last if last + 1 == self.versions.len() => " and ",
                _ => ", ",
            };
            write!(f, "{before}{model} {version}")?;
        }
        if let Some(names) = &self.partial {
            let tensors = if names.len() == 1 {
                "tensor"
            } else {
                "tensors"
            };
            write!(f, " ({} {tensors} of it)", names.len())?;
        }
        Ok(())
    }

    /// Writes how far the send came, and how long it took.
    fn write_reach(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let several = self.versions.len() > 1;
        match (self.level, self.workers.len()) {
            (WaitFor::Sent, _) => {
                let is = if several { "are" } else { "is" };
                write!(
                    f,
                    " {is} live after {:.1?}; no worker was waited for",
                    self.copied
                )
            }
            (_, 0) => {
                let is = if several { "are" } else { "is" };
                write!(
                    f,
                    " {is} live after {:.1?}; there is no worker",
                    self.copied
                )
            }
            (level, all) => {
                let done = if level == WaitFor::Staged {
                    "staged"
                } else {
                    "applied"
                };
                let was = if several { "were" } else { "was" };
                // A process that went and its successor are one worker.
                let succeeded = self.workers.iter().filter(|line| self.is_succeeded(line));
                let all = all - succeeded.count();
                let reached = self.workers.iter().filter(|line| self.reached(line));
                write!(
                    f,
                    " {was} {done} by {} of {all} workers in {:.1?}",
                    reached.count(),
                    self.took
                )
            }
        }
    }
}

/// One sentence for the send, and one for each worker that is not up to date.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_versions(f)?;
        if self.versions.is_empty() {
            return f.write_str("nothing was sent: there is no worker");
        }
        self.write_reach(f)?;
        if let Some(changes) = &self.changes {
            write!(f, "; {changes}")?;
        }
        let rest = self.workers.iter().filter(|line| !self.reached(line));
        rest.into_iter().try_for_each(|line| {
            f.write_str("\n  ")?;
            write!(f, "{}", line.sentence(self.level))
        })
    }
}

/// The newest version of the only model among these; `Version::NONE` if there is none.
pub(crate) fn only_version(versions: &[(ModelId, Version)]) -> Result<Version> {
    // A send of different weights to different workers makes several versions of one model, in
    // ascending order.
    let Some((only, newest)) = versions.last() else {
        return Ok(Version::NONE);
    };
    match versions.iter().all(|(model, _)| model == only) {
        true => Ok(*newest),
        false => Err(Error::SeveralModels {
            known: versions.iter().map(|(model, _)| model.clone()).collect(),
        }),
    }
}

#[cfg(test)]
mod tests;
