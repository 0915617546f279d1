//! A send whose workers are still on their way.

use std::sync::{Arc, Mutex, PoisonError};
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
    pub(crate) fn settle(&self, wait: WaitFor, until: Deadline) -> Result<Report> {
        let level = match wait {
            WaitFor::Sent => {
                let mut lines = Vec::new();
                for one in &self.outstanding {
                    lines.extend(one.decided()?);
                }
                return Ok(self.report(wait, lines));
            }
            WaitFor::Staged => Level::Staged,
            WaitFor::Applied => Level::Applied,
        };
        let first = [until, self.deadline].into_iter().flatten().min();
        let mut lines = self.lines(level, first)?;
        let done = |line: &WorkerReport| line.outcome.is_final(wait);
        if !lines.iter().all(done) && self.is_over() {
            self.give_up()?;
            lines = self.lines(level, until)?;
        }
        Ok(self.report(wait, lines))
    }

    pub(crate) fn is_settled(&self, wait: WaitFor) -> Result<bool> {
        let level = match wait {
            WaitFor::Sent => return Ok(true),
            WaitFor::Staged => Level::Staged,
            WaitFor::Applied => Level::Applied,
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
        let mut lines = Vec::new();
        for one in &self.outstanding {
            lines.extend(one.settle(level, until)?);
        }
        // What a worker did before it died, say, stays its line.
        let mut settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|line| !settled.iter().any(|old| same(old, line)));
        // A line that a wait for more could change is made anew each time.
        let done = lines.iter();
        let done = done.filter(|line| line.outcome.is_final(WaitFor::Applied));
        let done: Vec<_> = done.cloned().collect();
        lines.extend(settled.iter().cloned());
        settled.extend(done);
        drop(settled);
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
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

fn same(one: &WorkerReport, other: &WorkerReport) -> bool {
    one.worker == other.worker && one.pid == other.pid
}
