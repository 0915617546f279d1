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
    /// # Errors
    ///
    /// Only of the operating system.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Report> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.flight.settle(self.level, until)
    }

    /// Whether there is nothing left to wait for.
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
    /// Lines that no wait changes any more.
    pub(crate) settled: Mutex<Vec<WorkerReport>>,
}

impl Flight {
    pub(crate) fn settle(&self, wait: WaitFor, until: Deadline) -> Result<Report> {
        let level = match wait {
            WaitFor::Sent => return Ok(self.report(wait, Vec::new())),
            WaitFor::Staged => Level::Staged,
            WaitFor::Applied => Level::Applied,
        };
        let mut lines = Vec::new();
        for one in &self.outstanding {
            lines.extend(one.settle(level, until)?);
        }
        // What a worker did before it died, say, stays its line.
        let mut settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|line| !settled.iter().any(|old| same(old, line)));
        let done = lines.iter().filter(|line| line.outcome.is_final(wait));
        let done: Vec<_> = done.cloned().collect();
        // A line of a lower level can still change at a higher one.
        let known = settled.iter().filter(|line| line.outcome.is_final(wait));
        lines.extend(known.cloned());
        if wait == WaitFor::Applied {
            settled.extend(done);
        }
        drop(settled);
        lines.sort_by_key(|line| line.worker);
        Ok(self.report(wait, lines))
    }

    pub(crate) fn is_settled(&self, wait: WaitFor) -> Result<bool> {
        let report = self.settle(wait, Some(Instant::now()))?;
        let mut lines = report.workers.iter();
        Ok(lines.all(|line| line.outcome.is_final(wait)))
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
