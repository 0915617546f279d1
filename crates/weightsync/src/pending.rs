//! A send whose workers are still on their way.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weightsync_core::{ModelId, Version};

use crate::error::Result;
use crate::report::{Report, WaitFor, WorkerReport};
use crate::transport::{Deadline, Level, Outstanding};

/// A send that has been published and may not have reached every worker yet;
/// see [`Sender::send_async`](crate::Sender::send_async).
///
/// The source has been read. Dropping this changes nothing for the workers;
/// only the report is lost.
#[derive(Clone, Debug)]
pub struct PendingSend {
    flight: Arc<Flight>,
    level: WaitFor,
}

impl PendingSend {
    pub(crate) fn new(flight: Arc<Flight>, level: WaitFor) -> Self {
        Self { flight, level }
    }

    /// Waits until every worker has the version as far as the send was to wait,
    /// or has a line that says why not; at most so long. Workers that have not
    /// got there by then are `Late` in the report, and can be waited for again.
    ///
    /// A worker that is to get every version, and whose queue has no room, is
    /// given up at the deadline of the send itself
    /// ([`SendOptions::deadline`](crate::SendOptions::deadline)), and not before:
    /// a shorter wait changes nothing for it.
    ///
    /// # Errors
    ///
    /// Only of the operating system.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Report> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.flight.settle(self.level, until)
    }

    /// Whether there is nothing left to wait for. Looking changes nothing for any
    /// worker, nor for a report.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn is_settled(&self) -> Result<bool> {
        self.flight.is_settled(self.level)
    }

    /// The versions that were published.
    pub fn versions(&self) -> &[(ModelId, Version)] {
        &self.flight.versions
    }

    /// The version of the model that was sent; of the first, if there were
    /// several.
    pub fn version(&self) -> Version {
        let first = self.flight.versions.first();
        first.map_or(Version::NONE, |(_, version)| *version)
    }
}

/// What was published by one call, and what has become of it so far.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) outstanding: Vec<Box<dyn Outstanding>>,
    pub(crate) versions: Vec<(ModelId, Version)>,
    pub(crate) bytes: u64,
    pub(crate) partial: Option<Vec<String>>,
    pub(crate) since: Instant,
    pub(crate) copied: Duration,
    /// Until when room in the queues of workers is waited for.
    pub(crate) deadline: Deadline,
    /// Lines that no wait changes any more.
    pub(crate) settled: Mutex<Vec<WorkerReport>>,
}

impl Flight {
    /// Waits once; nearly always nothing has to be kept for another wait.
    pub(crate) fn finish(self, wait: WaitFor, until: Deadline) -> Result<Report> {
        let Some(level) = level(wait) else {
            return self.settle(wait, until);
        };
        let mut lines = self.look(level, self.first(until))?;
        if !lines.iter().all(|line| line.outcome.is_final(wait)) && self.is_over() {
            self.settled().extend(finals(&lines));
            self.give_up()?;
            lines = self.lines(level, until)?;
        }
        lines.sort_by_key(|line| line.worker);
        Ok(Report {
            versions: self.versions,
            bytes: self.bytes,
            partial: self.partial,
            copied: self.copied,
            took: self.since.elapsed(),
            level: wait,
            workers: lines,
        })
    }

    /// Waits; it can be waited for again.
    pub(crate) fn settle(&self, wait: WaitFor, until: Deadline) -> Result<Report> {
        let Some(level) = level(wait) else {
            let mut lines = Vec::new();
            for one in &self.outstanding {
                lines.extend(one.decided()?);
            }
            return Ok(self.report(wait, lines));
        };
        let mut lines = self.lines(level, self.first(until))?;
        let done = |line: &WorkerReport| line.outcome.is_final(wait);
        if !lines.iter().all(done) && self.is_over() {
            self.give_up()?;
            lines = self.lines(level, until)?;
        }
        Ok(self.report(wait, lines))
    }

    pub(crate) fn is_settled(&self, wait: WaitFor) -> Result<bool> {
        let Some(level) = level(wait) else {
            return Ok(true);
        };
        if self.is_over() {
            self.give_up()?;
        }
        for one in &self.outstanding {
            if !one.is_settled(level)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The line of each worker at the deadline, or as soon as all are known.
    fn lines(&self, level: Level, until: Deadline) -> Result<Vec<WorkerReport>> {
        let mut lines = self.look(level, until)?;
        // What a worker did before it died, say, stays its line.
        let mut settled = self.settled();
        lines.retain(|line| !settled.iter().any(|old| same(old, line)));
        let done = finals(&lines);
        lines.extend(settled.iter().cloned());
        settled.extend(done);
        drop(settled);
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
    }

    /// The lines of one wait, by themselves.
    fn look(&self, level: Level, until: Deadline) -> Result<Vec<WorkerReport>> {
        let mut lines = Vec::new();
        for one in &self.outstanding {
            let more = one.settle(level, until)?;
            match lines.is_empty() {
                true => lines = more,
                false => lines.extend(more),
            }
        }
        Ok(lines)
    }

    fn settled(&self) -> MutexGuard<'_, Vec<WorkerReport>> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until when room is waited for, or less.
    fn first(&self, until: Deadline) -> Deadline {
        [until, self.deadline].into_iter().flatten().min()
    }

    /// Whether the send's own deadline has come.
    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|at| Instant::now() >= at)
    }

    fn give_up(&self) -> Result<()> {
        self.outstanding.iter().try_for_each(|one| one.give_up())
    }

    fn report(&self, level: WaitFor, workers: Vec<WorkerReport>) -> Report {
        Report {
            versions: self.versions.clone(),
            bytes: self.bytes,
            partial: self.partial.clone(),
            copied: self.copied,
            took: self.since.elapsed(),
            level,
            workers,
        }
    }
}

/// How far the transport is to wait, if at all.
fn level(wait: WaitFor) -> Option<Level> {
    match wait {
        WaitFor::Sent => None,
        WaitFor::Staged => Some(Level::Staged),
        WaitFor::Applied => Some(Level::Applied),
    }
}

/// The lines that no wait for more could change: others are made anew each time.
fn finals(lines: &[WorkerReport]) -> Vec<WorkerReport> {
    let lines = lines.iter();
    let done = lines.filter(|line| line.outcome.is_final(WaitFor::Applied));
    done.cloned().collect()
}

fn same(one: &WorkerReport, other: &WorkerReport) -> bool {
    one.worker == other.worker && one.pid == other.pid
}
