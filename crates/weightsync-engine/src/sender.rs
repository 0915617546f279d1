//! The trainer's end: send, report, lend a slot.

mod groups;
mod loan;
mod publishing;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use weightsync_core::{
    Layout, ModelId, Outcome, Run, SenderStatus, Version, WorkerId, WorkerReport, WorkerStatus,
};
use weightsync_mem::Origin;

pub use self::loan::Loan;
use crate::error::{Error, Result, place_of};
use crate::init_info::InitInfo;
use crate::options::SendOptions;
use crate::pending::{Handle, PendingSend};
use crate::report::Report;
use crate::scheme::AnyScheme;
use crate::send_history::SendHistory;
use crate::send_source::{Members, SendSource};
use crate::setup::{Expect, SenderSetup};
use crate::transport::{
    Attendance, Capabilities, Deadline, FirstWeights, SenderTransport, deadline,
};

/// The trainer's end of connected models.
///
/// Dropping the sender shuts it down: workers are notified and keep what they hold, and nothing is
/// left in the system.
#[derive(Debug)]
pub struct Sender {
    setup: SenderSetup,
    transport: Box<dyn SenderTransport>,
    run: Run,
    /// Asynchronous sends that may not be settled yet, oldest first.
    in_flight: Vec<PendingSend>,
    /// Every asynchronous send that the caller still holds, oldest first.
    handles: Vec<Weak<Handle>>,
    /// How many workers had joined by the end of the last wait for workers. A worker that joined
    /// later counts for the next wait even if it has left in order.
    counted: u64,
    history: Arc<SendHistory>,
    owner: Origin,
}

impl Sender {
    pub(crate) fn new(
        setup: SenderSetup,
        transport: Box<dyn SenderTransport>,
        run: Run,
        history: Arc<SendHistory>,
    ) -> Self {
        Self {
            setup,
            transport,
            run,
            history,
            in_flight: Vec::new(),
            handles: Vec::new(),
            counted: 0,
            owner: Origin::here(),
        }
    }

    /// Publishes the weights as the next version and waits until every worker
    /// has loaded it, or has a line in the report that says why not.
    ///
    /// Sends one model's weights, a [`Set`](crate::Set) of several models, or the
    /// [`Registered`](crate::Registered) sources. The sources are read during the call and at no
    /// other time.
    ///
    /// # Errors
    ///
    /// [`Error::WrongWeights`] names every tensor that differs from the setup, before the send
    /// waits for a slot. [`Error::AllSlotsPinned`] names the workers that hold every slot. After
    /// these errors, and errors of a source, nothing was published, and the old versions stay live.
    ///
    /// The operating system may refuse the wait for the workers. Then the new version is live, as
    /// [`version`](Self::version) says, and its outcome is unknown.
    pub fn send(&mut self, weights: &(impl SendSource + ?Sized)) -> Result<Report> {
        self.send_with(weights, &SendOptions::new())
    }

    /// As [`send`](Self::send), with options: for some workers, for a part, or with another wait.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), and [`Error::Unsupported`] for what the scheme
    /// cannot do.
    pub fn send_with(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        options: &SendOptions,
    ) -> Result<Report> {
        let (since, until) = self.times(options);
        let in_flight = self.publish(weights.members(), options, since, until)?;
        // Later than asked by the time in which the source wrote its tensors.
        let until = in_flight.deadline;
        in_flight.finish(options.wait, until)
    }

    /// Publishes the weights and returns as soon as they have been read. The trainer may change
    /// them, and wait for the workers later. The timeout of the options limits the waits for
    /// earlier sends, for a free slot, and for room in full queues of workers.
    ///
    /// # Errors
    ///
    /// As [`send_with`](Self::send_with); [`Error::SendPending`] while as many
    /// sends are on their way as [`SenderSetup::async_send_limit`] allows.
    pub fn send_async(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        options: &SendOptions,
    ) -> Result<PendingSend> {
        let (since, until) = self.times(options);
        // Before the source is read: an earlier send may have to settle first.
        self.make_way(until)?;
        let in_flight = self.publish(weights.members(), options, since, until)?;
        let pending = PendingSend::new(in_flight, options.wait);
        self.in_flight.push(pending.clone());
        self.handles.push(pending.downgrade());
        Ok(pending)
    }

    /// The version that was published last.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`]: see [`version_of`](Self::version_of).
    pub fn version(&self) -> Result<Version> {
        self.setup.only_model()?;
        Ok(self.transport.version(0))
    }

    /// The version of a model that was published last.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchModel`].
    pub fn version_of(&self, model: &str) -> Result<Version> {
        Ok(self.transport.version(self.index_of(model)?))
    }

    /// Every model with the version published last.
    pub(crate) fn newest(&self) -> impl Iterator<Item = (ModelId, Version)> {
        let models = self.setup.models.iter().enumerate();
        models.map(|(index, model)| (model.prepared.id.clone(), self.transport.version(index)))
    }

    /// The run this sender belongs to.
    pub fn run(&self) -> Run {
        self.run
    }

    /// The models, in the set's order.
    pub fn models(&self) -> impl ExactSizeIterator<Item = &ModelId> {
        self.setup.models.iter().map(|model| &model.prepared.id)
    }

    /// The tensors as workers see them.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`].
    pub fn layout(&self) -> Result<&Layout> {
        self.setup.layout()
    }

    /// What further workers need to join.
    pub fn init_info(&self) -> InitInfo {
        self.setup.init_info()
    }

    /// Every connected worker with the versions it has loaded.
    pub fn workers(&self) -> Vec<WorkerStatus> {
        self.transport.workers()
    }

    /// What the sender knows of itself and its workers now: versions, the outcome of the last send at
    /// each worker, and the workers that failed, died or were lost and are neither back nor
    /// [forgotten](Self::forget). `weightsync status` shows the same. It is empty in a forked child.
    pub fn status(&self) -> SenderStatus {
        // There a thread that does not exist may hold a lock.
        if !self.owner.is_here() {
            return SenderStatus::default();
        }
        self.history
            .status(|status| self.transport.fill_status(status))
    }

    /// Waits until these workers have joined and loaded a version, as
    /// [`connect`](SenderSetup::connect) does; for workers that join later. Where the [first
    /// weights](crate::transport::FirstWeights) come with the first send, the workers only have to
    /// join. A worker that joined since the last wait for workers, and has left in order since,
    /// counts.
    ///
    /// # Errors
    ///
    /// [`Error::MissingWorkers`] at the timeout, [`Error::Refused`] as soon as one
    /// of them says that a model does not fit its own.
    pub fn wait_for(&mut self, expect: &Expect, timeout: Option<Duration>) -> Result<()> {
        self.wait_until(expect, Instant::now(), deadline(timeout))
    }

    /// Compares weights with what was set up, and sends nothing.
    pub(crate) fn check(&self, weights: Members<'_>) -> Result<()> {
        self.setup.check(weights)
    }

    pub(crate) fn wait_until(
        &mut self,
        expect: &Expect,
        since: Instant,
        until: Deadline,
    ) -> Result<()> {
        // Where the first weights come with the first send, a worker counts as soon as it is there.
        let first = self.setup.scheme.scheme().first_weights();
        let counts =
            |worker: &WorkerStatus| worker.is_ready() || first == FirstWeights::AtFirstSend;
        let before = self.counted;
        let mut all = before;
        if expect.len() > 0 {
            tracing::info!("{} waits for {} workers", self.setup.name(), expect.len());
        }
        // The workers at the moment when enough had joined: one that leaves right after counts.
        let mut joined: Vec<WorkerId> = Vec::new();
        let mut gone = Vec::new();
        let there = self.transport.wait_workers(until, &mut |there| {
            // Workers that left in order before this wait began belong to an earlier wait.
            all = there.joined;
            let ready = ready_workers(there, before, counts);
            // Only those that are new since the last look are logged.
            let known = std::mem::replace(&mut joined, ready.into_iter().collect());
            log_joined(&there.workers, &known, &joined, expect);
            gone = not_back(there, expect);
            let mut rejected = there.rejected.iter();
            // A worker that can use none of the models will not come: waiting on would be in vain.
            let hopeless = rejected.any(|worker| expect.includes(*worker));
            hopeless || expect.met_by(&joined)
        })?;
        // A scheme without workers misses none.
        let model = self.setup.name();
        if expect.met_by(&joined) || (there && !self.has_workers()) {
            tracing::debug!(%model, run = %self.run, workers = expect.len(), "connected");
            // Only after success: a wait that failed uses no worker up.
            self.counted = all;
            return Ok(());
        }
        // A refusal by a worker that was not expected is no error of this wait.
        let mut refusals = self.transport.take_rejected();
        refusals.retain(|(worker, _)| expect.includes(*worker));
        if !refusals.is_empty() {
            return Err(Error::Refused { model, refusals });
        }
        // Nothing is undone: a caller that keeps the sender may wait again.
        Err(Error::MissingWorkers {
            model,
            expected: expect.len(),
            missing: expect.missing(&joined),
            joined,
            gone,
            waited: since.elapsed(),
        })
    }

    /// Forgets workers that failed, died or were lost, and will not come back under their numbers:
    /// later reports have no lines of them. A worker may still join under such a number.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn forget(&mut self, workers: impl IntoIterator<Item = impl Into<WorkerId>>) -> Result<()> {
        let workers: Vec<_> = workers.into_iter().map(Into::into).collect();
        self.transport.forget(&workers)
    }

    /// Holds workers at the versions they have: sends pass them over, with a report line that says
    /// so, until they are [released](Self::release). The hold is on the number: a worker that comes
    /// back under it gets the held version.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    pub fn hold(&mut self, workers: impl IntoIterator<Item = impl Into<WorkerId>>) -> Result<()> {
        self.set_held(workers, true)
    }

    /// Releases held workers; each gets the newest version meant for it at once.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    pub fn release(
        &mut self,
        workers: impl IntoIterator<Item = impl Into<WorkerId>>,
    ) -> Result<()> {
        self.set_held(workers, false)
    }

    fn set_held(
        &mut self,
        workers: impl IntoIterator<Item = impl Into<WorkerId>>,
        held: bool,
    ) -> Result<()> {
        self.need("holding workers at a version", |can| can.hold)?;
        let workers: Vec<_> = workers.into_iter().map(Into::into).collect();
        self.transport.hold(&workers, held)
    }

    /// Shuts down: what dropping it does, by name.
    pub fn shutdown(self) {}

    /// Whether the scheme has workers to wait for.
    fn has_workers(&self) -> bool {
        self.setup.scheme.capabilities().weights
    }

    fn index_of(&self, model: &str) -> Result<usize> {
        place_of(
            model,
            self.setup.models.iter().map(|model| &model.prepared.id),
        )
    }

    fn times(&self, options: &SendOptions) -> (Instant, Deadline) {
        let since = Instant::now();
        let timeout = options.timeout.unwrap_or(self.setup.send_timeout);
        (since, deadline(timeout))
    }

    fn need(&self, what: &'static str, can: impl FnOnce(&Capabilities) -> bool) -> Result<()> {
        need(&self.setup.scheme, what, can)
    }
}

/// Each handle of an asynchronous send keeps its last report, and nothing of the sender.
impl Drop for Sender {
    fn drop(&mut self) {
        // In a forked child, a lock of a handle may belong to a thread that does not exist there.
        if !self.owner.is_here() {
            return;
        }
        // A caller may keep a handle longer than the sender. It keeps the last report, and drops
        // what is the sender's.
        for one in self.handles.iter().filter_map(Weak::upgrade) {
            one.close();
        }
    }
}

/// The workers that are ready, by number: those that are there, and those that have left in order
/// and came after the first `before` that joined.
fn ready_workers(
    there: &Attendance,
    before: u64,
    counts: impl Fn(&WorkerStatus) -> bool,
) -> BTreeSet<WorkerId> {
    let here = there.workers.iter().filter(|worker| counts(worker));
    // A worker may load the first version and leave in order while others still join: it
    // counts.
    let left = there
        .gone
        .iter()
        .filter(|gone| gone.joined > before && gone.how == Outcome::Left && counts(&gone.status));
    let left = left.map(|gone| &gone.status);
    here.chain(left).map(|worker| worker.worker).collect()
}

/// For each expected number, the last worker that went without leaving in order and is not back.
fn not_back(there: &Attendance, expect: &Expect) -> Vec<WorkerReport> {
    // Of a number that went several times, the last.
    let last = there.gone.iter().map(|gone| (gone.status.worker, gone));
    let last: BTreeMap<_, _> = last.collect();
    // A worker that came back is missing no more.
    let is_back = |worker: &WorkerId| there.workers.iter().any(|one| one.worker == *worker);
    let gone = last.into_iter().filter(|(worker, gone)| {
        gone.how != Outcome::Left && expect.includes(*worker) && !is_back(worker)
    });
    let lines = gone.map(|(worker, gone)| WorkerReport {
        worker,
        pid: gone.status.pid,
        outcome: gone.how.clone(),
        versions: gone.status.versions.clone(),
        current: false,
        after: Duration::ZERO,
        late: None,
    });
    lines.collect()
}

/// Refuses what the scheme cannot do.
fn need(
    scheme: &AnyScheme,
    what: &'static str,
    can: impl FnOnce(&Capabilities) -> bool,
) -> Result<()> {
    if can(&scheme.capabilities()) {
        return Ok(());
    }
    Err(Error::unsupported(what, scheme))
}

/// Logs the workers that have joined since the last call.
fn log_joined(workers: &[WorkerStatus], before: &[WorkerId], now: &[WorkerId], expect: &Expect) {
    let new = workers
        .iter()
        .filter(|one| now.contains(&one.worker) && !before.contains(&one.worker));
    for (at, one) in new.enumerate() {
        let (worker, pid) = (one.worker, one.pid);
        let (there, expected) = (before.len() + at + 1, expect.len());
        tracing::info!("{worker} (pid {pid}) has joined: {there} of {expected} workers are there");
    }
}
