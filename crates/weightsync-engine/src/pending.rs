//! A send whose workers are still on their way.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use weightsync_core::{ModelId, Version};

use crate::error::{Error, Result};
use crate::report::{Changes, Outcome, Report, WaitFor, WorkerReport};
use crate::transport::{Deadline, Level, Outstanding};

/// A send that has been published and may not have reached every worker yet;
/// see [`Sender::send_async`](crate::Sender::send_async).
///
/// The source has been read. Dropping this changes nothing for the workers;
/// only the report is lost. It may be kept after the sender has shut down: the
/// report of a send that was settled by then stays.
#[derive(Clone, Debug)]
pub struct PendingSend(Arc<Handle>);

impl PendingSend {
    pub(crate) fn new(flight: Flight, level: WaitFor) -> Self {
        Self(Arc::new(Handle {
            versions: flight.versions.clone(),
            level,
            state: Mutex::new(State {
                flight: Some(Arc::new(flight)),
                settled: None,
            }),
        }))
    }

    pub(crate) fn makes_way(&self) -> Result<bool> {
        self.0.makes_way()
    }

    pub(crate) fn downgrade(&self) -> Weak<Handle> {
        Arc::downgrade(&self.0)
    }

    /// Waits until every worker has the version as far as the send was to wait,
    /// or has a line that says why not; at most so long. Workers that have not
    /// got there by then are `Late` in the report, and can be waited for again.
    ///
    /// A worker that is to get every version, and whose queue has no room, is
    /// given up at the deadline of the send itself
    /// ([`SendOptions::deadline`](crate::SendOptions::deadline)), and not before:
    /// a shorter wait changes nothing for it. Only if it is late already, the next
    /// send gives it up.
    ///
    /// Workers that were late for an earlier send and have not moved since are passed
    /// over, unless [`SendOptions::wait_late`](crate::SendOptions::wait_late) says
    /// otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] if the sender has shut down before there was nothing
    /// left to wait for; others only of the operating system.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Report> {
        let until = crate::transport::deadline(timeout);
        self.0.wait(until)
    }

    /// Whether there is nothing left to wait for. Looking changes nothing for any
    /// worker, nor for a report.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn is_settled(&self) -> Result<bool> {
        self.0.is_settled()
    }

    /// The versions that were published.
    pub fn versions(&self) -> &[(ModelId, Version)] {
        &self.0.versions
    }

    /// The version of the model that was sent; of the first, if there were
    /// several.
    pub fn version(&self) -> Version {
        let first = self.0.versions.first();
        first.map_or(Version::NONE, |(_, version)| *version)
    }
}

/// What the clones of a [`PendingSend`] share, and the sender knows of.
#[derive(Debug)]
pub(crate) struct Handle {
    versions: Vec<(ModelId, Version)>,
    level: WaitFor,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None once the sender has shut down: it holds what is the sender's.
    flight: Option<Arc<Flight>>,
    /// The last report that left nothing to wait for.
    settled: Option<Report>,
}

impl Handle {
    fn wait(&self, until: Deadline) -> Result<Report> {
        let flight = self.state().flight.clone();
        let report = flight.map(|flight| flight.settle(self.level, until));
        let mut state = self.state();
        let report = match report {
            Some(report) if state.flight.is_some() => report?,
            // What came of a wait meanwhile may be the sender's own end: its
            // hanging up is no worker's death.
            _ => return state.settled.clone().ok_or(Error::SenderClosed),
        };
        let mut lines = report.workers.iter();
        if lines.all(|line| line.outcome.is_final(self.level)) {
            state.settled = Some(report.clone());
        }
        Ok(report)
    }

    fn is_settled(&self) -> Result<bool> {
        let flight = self.state().flight.clone();
        let settled = flight.map(|flight| flight.is_settled(self.level));
        let state = self.state();
        match settled {
            Some(settled) if state.flight.is_some() => settled,
            _ if state.settled.is_some() => Ok(true),
            _ => Err(Error::SenderClosed),
        }
    }

    /// Whether the next send need not wait for this one. Workers that are late are passed
    /// over by it, and what still waits for room at them is given up: it would keep the
    /// room of what is sent next.
    pub(crate) fn makes_way(&self) -> Result<bool> {
        let settled = self.is_settled()?;
        let flight = self.state().flight.clone().filter(|_| settled);
        flight.map_or(Ok(()), |flight| flight.give_up())?;
        Ok(settled)
    }

    /// The sender shuts down: looks for the last time.
    pub(crate) fn close(&self) {
        // Where it fails, as in a forked child, nothing is known.
        let _ = self.wait(Some(Instant::now()));
        self.state().flight = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        if !lines.iter().all(|line| line.outcome.is_final(wait)) {
            self.settled().extend(finals(&lines));
            if self.is_over() {
                self.late(level)?;
            }
            // Nobody can wait for it again.
            self.give_up()?;
            lines = self.lines(level, until)?;
        }
        lines.sort_by_key(|line| line.worker);
        Ok(Report {
            versions: self.versions,
            bytes: self.bytes,
            partial: self.partial,
            changes: changes(&self.outstanding),
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
            self.late(level)?;
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
            self.late(level)?;
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
        // One that has gone may have a successor in the same process.
        let stands = |old: &WorkerReport, line: &WorkerReport| {
            same(old, line) && (!old.outcome.is_gone() || line.outcome.is_gone())
        };
        lines.retain(|line| !settled.iter().any(|old| stands(old, line)));
        let done = finals(&lines);
        lines.extend(settled.iter().cloned());
        settled.extend(done);
        drop(settled);
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
    }

    /// The lines of one wait alone.
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

    fn late(&self, level: Level) -> Result<()> {
        self.outstanding.iter().try_for_each(|one| one.late(level))
    }

    fn give_up(&self) -> Result<()> {
        self.outstanding.iter().try_for_each(|one| one.give_up())
    }

    fn report(&self, level: WaitFor, workers: Vec<WorkerReport>) -> Report {
        Report {
            versions: self.versions.clone(),
            bytes: self.bytes,
            partial: self.partial.clone(),
            changes: changes(&self.outstanding),
            copied: self.copied,
            took: self.since.elapsed(),
            level,
            workers,
        }
    }
}

/// What has changed by all publications of a send, if that is known of each.
fn changes(outstanding: &[Box<dyn Outstanding>]) -> Option<Changes> {
    let each = outstanding.iter().map(|one| one.changes());
    each.sum::<Option<Changes>>()
        .filter(|changes| changes.whole > 0)
}

/// How far the transport is to wait, if at all.
fn level(wait: WaitFor) -> Option<Level> {
    match wait {
        WaitFor::Sent => None,
        WaitFor::Staged => Some(Level::Staged),
        WaitFor::Applied => Some(Level::Applied),
    }
}

/// The lines that no wait for more could change: others are made again each time.
/// So is that of a worker that asks: it may have asked for this one by then, or
/// ask no more.
fn finals(lines: &[WorkerReport]) -> Vec<WorkerReport> {
    let keeps = |line: &&WorkerReport| {
        line.outcome.is_final(WaitFor::Applied) && line.outcome != Outcome::Asks
    };
    lines.iter().filter(keeps).cloned().collect()
}

fn same(one: &WorkerReport, other: &WorkerReport) -> bool {
    one.worker == other.worker && one.pid == other.pid
}
