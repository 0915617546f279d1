//! A send whose workers are still on their way.

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use weightsync_core::{ModelId, Outcome, Version, WaitFor, WorkerReport};
use weightsync_mem::threads::LockExt as _;

use crate::error::{Error, Result};
use crate::report::{Changes, Report, only_version};
use crate::send_history::SendHistory;
use crate::transport::{Deadline, Level, Outstanding};

/// A send that has been published and may not have reached every worker yet;
/// see [`Sender::send_async`](crate::Sender::send_async).
///
/// The source has been read. Dropping this value loses the report, and changes nothing for the
/// workers. The report of a settled send stays available after the sender has shut down.
#[derive(Clone, Debug)]
pub struct PendingSend(Arc<Handle>);

impl PendingSend {
    pub(crate) fn new(in_flight: InFlight, level: WaitFor) -> Self {
        Self(Arc::new(Handle {
            versions: in_flight.versions.clone(),
            level,
            state: Mutex::new(PendingState {
                in_flight: Some(Arc::new(in_flight)),
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

    /// Waits until every worker has the version as far as the send was to wait, or has a line that
    /// says why not. Workers that are not that far at the timeout are `Late` in the report, and
    /// another call can wait for them again.
    ///
    /// A worker that gets every version may have a full queue. The send then gives the worker up at
    /// [the send's own timeout](crate::SendOptions::timeout), and a shorter wait does not change
    /// that. The next send gives up a worker that is late already.
    ///
    /// Workers that were late for an earlier send and have not moved since are passed over, unless
    /// [`SendOptions::wait_late`](crate::SendOptions::wait_late) says otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] if the sender shut down before every worker had its line, and errors
    /// of the operating system.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Report> {
        let until = crate::transport::deadline(timeout);
        self.0.wait(until)
    }

    /// Whether there is nothing left to wait for. The call changes neither a worker nor a report.
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

    /// The version of the model that was sent.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`].
    pub fn version(&self) -> Result<Version> {
        only_version(&self.0.versions)
    }
}

/// What the clones of a [`PendingSend`] share, and the sender knows of.
#[derive(Debug)]
pub(crate) struct Handle {
    versions: Vec<(ModelId, Version)>,
    level: WaitFor,
    state: Mutex<PendingState>,
}

#[derive(Debug)]
struct PendingState {
    /// None once the sender has shut down: it holds what is the sender's.
    in_flight: Option<Arc<InFlight>>,
    /// The last report that left nothing to wait for.
    settled: Option<Report>,
}

impl Handle {
    fn wait(&self, until: Deadline) -> Result<Report> {
        // The lock is not held for the wait: clones may look meanwhile, and the sender may shut
        // down.
        let in_flight = self.state().in_flight.clone();
        let report = in_flight.map(|in_flight| in_flight.settle(self.level, until));
        let mut state = self.state();
        let report = match report {
            Some(report) if state.in_flight.is_some() => report?,
            // The sender may have shut down during the wait, which looks like the death of every
            // worker. Only an earlier report is true then.
            _ => return state.settled.clone().ok_or(Error::SenderClosed),
        };
        // A report that no wait changes outlives the sender.
        // A send that waits for no worker has only lines that no wait changes.
        let level = self.level.level().unwrap_or(Level::Staged);
        let mut lines = report.workers.iter();
        if lines.all(|line| line.outcome.is_final(level)) {
            state.settled = Some(report.clone());
        }
        Ok(report)
    }

    fn is_settled(&self) -> Result<bool> {
        let in_flight = self.state().in_flight.clone();
        let settled = in_flight.map(|in_flight| in_flight.is_settled(self.level));
        let state = self.state();
        match settled {
            Some(settled) if state.in_flight.is_some() => settled,
            _ if state.settled.is_some() => Ok(true),
            _ => Err(Error::SenderClosed),
        }
    }

    /// Whether the next send need not wait for this one. If so, late workers with full queues are
    /// given up: a version that waits for room there would take the room of the next one.
    pub(crate) fn makes_way(&self) -> Result<bool> {
        let settled = self.is_settled()?;
        let in_flight = self.state().in_flight.clone().filter(|_| settled);
        in_flight.map_or(Ok(()), |in_flight| in_flight.give_up())?;
        Ok(settled)
    }

    /// Keeps the last report before the sender shuts down.
    pub(crate) fn close(&self) {
        // A last look, without a wait.
        // This fails in a forked child, which knows nothing of the workers.
        let _ = self.wait(Some(Instant::now()));
        self.state().in_flight = None;
    }

    fn state(&self) -> MutexGuard<'_, PendingState> {
        self.state.locked()
    }
}

/// A published send, and the outcome so far.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) outstanding: Vec<Box<dyn Outstanding>>,
    pub(crate) versions: Vec<(ModelId, Version)>,
    pub(crate) bytes: u64,
    pub(crate) partial: Option<Vec<String>>,
    pub(crate) since: Instant,
    pub(crate) copied: Duration,
    /// When the send stops waiting for room in the queues of workers.
    pub(crate) deadline: Deadline,
    /// Lines that no further wait changes.
    pub(crate) settled: Mutex<Vec<WorkerReport>>,
    pub(crate) history: Arc<SendHistory>,
}

impl InFlight {
    /// Notes for the status that the versions are live.
    pub(crate) fn noted(self) -> Self {
        self.history
            .published(&self.versions, self.bytes, self.copied);
        self
    }

    /// Waits once. The usual send is settled then, and keeps no lines for another wait.
    pub(crate) fn finish(self, wait: WaitFor, until: Deadline) -> Result<Report> {
        let Some(level) = wait.level() else {
            return self.settle(wait, until);
        };
        // The first look waits as long as the send may wait for room in queues.
        let mut lines = self.look(level, self.first(until))?;
        if !lines.iter().all(|line| line.outcome.is_final(level)) {
            // These lines stand, whatever the worker does during the second look.
            self.settled().extend(finals(&lines));
            // The send's own time is over: later sends do not wait for these workers until they
            // move.
            if self.is_over() {
                self.late(level)?;
            }
            // No caller can wait for this send again.
            self.give_up()?;
            // The second look has what giving up has decided.
            lines = self.lines(level, until)?;
        }
        // Publications of one send may list their workers in any order.
        lines.sort_by_key(|line| line.worker);
        let report = Report {
            versions: self.versions,
            bytes: self.bytes,
            partial: self.partial,
            changes: changes(&self.outstanding),
            copied: self.copied,
            took: self.since.elapsed(),
            level: wait,
            workers: lines,
        };
        self.history.reported(&report);
        Ok(report)
    }

    /// Waits; it can be waited for again.
    pub(crate) fn settle(&self, wait: WaitFor, until: Deadline) -> Result<Report> {
        let Some(level) = wait.level() else {
            let mut lines = Vec::new();
            for one in &self.outstanding {
                lines.extend(one.decided()?);
            }
            return Ok(self.report(wait, lines));
        };
        let mut lines = self.lines(level, self.first(until))?;
        let done = |line: &WorkerReport| line.outcome.is_final(level);
        // As in `finish`, but the caller may wait again.
        if !lines.iter().all(done) && self.is_over() {
            self.late(level)?;
            self.give_up()?;
            lines = self.lines(level, until)?;
        }
        Ok(self.report(wait, lines))
    }

    pub(crate) fn is_settled(&self, wait: WaitFor) -> Result<bool> {
        let Some(level) = wait.level() else {
            return Ok(true);
        };
        // Here, because no other call may come: a program may only ask whether the send is settled.
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
        // A line that was final stays, whatever the worker did afterwards: it may have died since.
        let mut settled = self.settled();
        // A worker that has gone may have a successor in the same process.
        let stands = |old: &WorkerReport, line: &WorkerReport| {
            same(old, line) && (!old.outcome.is_gone() || line.outcome.is_gone())
        };
        // A line that stands replaces what the last look found.
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
            // The usual send is one publication: its lines are taken as they are.
            match lines.is_empty() {
                true => lines = more,
                false => lines.extend(more),
            }
        }
        Ok(lines)
    }

    fn settled(&self) -> MutexGuard<'_, Vec<WorkerReport>> {
        self.settled.locked()
    }

    /// Until when room is waited for, or less.
    fn first(&self, until: Deadline) -> Deadline {
        [until, self.deadline].into_iter().flatten().min()
    }

    /// Whether the send's own deadline has come.
    fn is_over(&self) -> bool {
        weightsync_mem::passed(self.deadline)
    }

    fn late(&self, level: Level) -> Result<()> {
        self.outstanding.iter().try_for_each(|one| one.late(level))
    }

    fn give_up(&self) -> Result<()> {
        self.outstanding.iter().try_for_each(|one| one.give_up())
    }

    fn report(&self, level: WaitFor, workers: Vec<WorkerReport>) -> Report {
        let report = Report {
            versions: self.versions.clone(),
            bytes: self.bytes,
            partial: self.partial.clone(),
            changes: changes(&self.outstanding),
            copied: self.copied,
            took: self.since.elapsed(),
            level,
            workers,
        };
        self.history.reported(&report);
        report
    }
}

/// The changes of all publications of a send, if each knows its own.
fn changes(outstanding: &[Box<dyn Outstanding>]) -> Option<Changes> {
    let each = outstanding.iter().map(|one| one.changes());
    each.sum::<Option<Changes>>()
        .filter(|changes| changes.whole > 0)
}

/// The lines that no further wait could change. The line of a worker that only takes what it asks
/// for is not among them: by the next wait it may have asked for this version.
fn finals(lines: &[WorkerReport]) -> Vec<WorkerReport> {
    let keeps = |line: &&WorkerReport| {
        line.outcome.is_final(Level::Applied) && line.outcome != Outcome::Asks
    };
    lines.iter().filter(keeps).cloned().collect()
}

fn same(one: &WorkerReport, other: &WorkerReport) -> bool {
    one.worker == other.worker && one.pid == other.pid
}
