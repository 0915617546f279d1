//! A worker that passes on what it receives, to workers of its own.

use std::fmt;
use std::time::Duration;

use weightsync_core::{ModelId, Run, Version, WaitFor, WorkerId};

use crate::background::BackgroundStatus;
use crate::background::handoff::ReceiverHandoff;
use crate::background::thread::{Follower, RemainingWork, ThreadTask, can_follow};
use crate::error::{Error, Result};
use crate::extract::WeightExtractor;
use crate::init_info::InitInfo;
use crate::options::SendOptions;
use crate::receiver::{Receiver, ReceiverSetup};
use crate::report::Report;
use crate::send_source::Set;
use crate::sender::Sender;
use crate::set::SetSnapshot;
use crate::setup::{Expect, SenderSetup};
use crate::transport::deadline;

/// A worker that passes the sets it receives on to workers of its own, its *sub-workers*. Each set
/// is passed on whole, in one pass.
///
/// **Guarantee.** The trainer is told that this worker has applied a version once every sub-worker
/// has. If a sub-worker has not, this worker's line in the trainer's report names it with the
/// reason; the other sub-workers have the version, and the next one is passed on as usual. A
/// sub-worker that applies a version late is not reported again: for the trainer, this worker runs
/// the version before until every sub-worker has applied a later one.
///
/// **Version numbers are the trainer's.** A restarted trainer counts from 1 again. Its versions then
/// continue the numbers that the sub-workers have seen. [`Forwarded`] has both numbers.
///
/// The sub-workers have a run and an [`InitInfo`] of their own, with its own address and secret.
/// They outlive the trainer. They find this worker again after its restart if it was
/// [set up](CascadeSetup::configure) with a run directory.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use weightsync::cascade::Cascade;
/// use weightsync::{Expect, InitInfo, ReceiverSetup};
///
/// let info: InitInfo = serde_json::from_str(&std::env::var("POLICY_INFO")?)?;
/// let minute = Some(Duration::from_secs(60));
/// let setup = Cascade::join(ReceiverSetup::new(info, 0), minute)?;
/// let for_sub_workers = setup.init_info(); // hand this to them
/// let mut cascade = setup.connect(Expect::Count(2), minute)?;
/// while let Some(forwarded) = cascade.forward(None)? {
///     println!("{}", forwarded.report);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Cascade {
    receiver: Receiver,
    passing: Passing,
}

/// A worker that has joined, and will feed workers of its own; see
/// [`Cascade::join`].
#[derive(Debug)]
pub struct CascadeSetup {
    receiver: Receiver,
    first: SetSnapshot,
    setup: SenderSetup,
}

/// A set that was passed on.
#[derive(Clone, Debug)]
pub struct Forwarded {
    /// The version of each model that this worker received, by the trainer's
    /// numbers.
    pub versions: Vec<(ModelId, Version)>,
    /// The outcome at the sub-workers, for the models that were passed on and with the numbers that
    /// the sub-workers see.
    pub report: Report,
}

impl Cascade {
    /// Joins the trainer, and takes its initial weights without saying yet that
    /// this worker runs them. Nothing is decided about sub-workers.
    ///
    /// # Errors
    ///
    /// As [`ReceiverSetup::connect`]; [`Error::Unsupported`] with a scheme that
    /// carries nothing.
    pub fn join(setup: ReceiverSetup, timeout: Option<Duration>) -> Result<CascadeSetup> {
        let mut receiver = setup.take_first(timeout)?;
        let first = receiver
            .begin()?
            .ok_or_else(|| Error::unsupported("weights to pass on", receiver.scheme()))?;
        Ok(CascadeSetup {
            setup: SenderSetup::passing_on(receiver.models())?,
            receiver,
            first,
        })
    }

    /// Leaves with a reason: see [`Receiver::fail`]. The sub-workers are told of a shutdown.
    pub fn fail(self, reason: &str) {
        self.receiver.fail(reason);
    }

    /// Forgets sub-workers that will not come back: see [`Sender::forget`].
    ///
    /// # Errors
    ///
    /// As [`Sender::forget`].
    pub fn forget(&mut self, workers: impl IntoIterator<Item = impl Into<WorkerId>>) -> Result<()> {
        self.passing.sender.forget(workers)
    }

    /// Waits for the trainer's next send, passes it on, and reports the outcome to the caller and to
    /// the trainer. Returns `None` at the timeout.
    ///
    /// A sub-worker that failed, died or was lost is named to the trainer with each
    /// version, until it is back or [forgotten](Self::forget).
    ///
    /// The timeout is for the wait alone. Passing on takes as long as the
    /// sub-workers take, and at most the timeout that the sender was
    /// [set up](CascadeSetup::configure) with.
    ///
    /// # Errors
    ///
    /// Those of [`Receiver::recv`], and of [`Sender::send`]: then nothing was
    /// passed on, the trainer knows why, and the next version is tried again.
    /// After [`Error::Interrupted`] the next call continues with the same set, which the sub-workers
    /// may have already.
    pub fn forward(&mut self, timeout: Option<Duration>) -> Result<Option<Forwarded>> {
        let until = deadline(timeout);
        loop {
            let left = weightsync_mem::left(until);
            let Some(set) = self.receiver.next(left)? else {
                return Ok(None);
            };
            // The sub-workers may have this set already. Then the wait goes on.
            let (forwarded, complaint) = self.passing.pass_on(&mut self.receiver, &set)?;
            answer(&mut self.receiver, &set, complaint.as_deref())?;
            if forwarded.is_some() {
                return Ok(forwarded);
            }
        }
    }

    /// Calls [`forward`](Self::forward) again and again, in a thread of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the transport cannot end a wait, or nothing
    /// comes by it without being asked for.
    pub fn in_background(self) -> Result<CascadeInBackground> {
        can_follow(&self.receiver)?;
        let Self { receiver, passing } = self;
        let shared = ForwardState {
            last: None,
            passing: Some(passing),
        };
        Ok(CascadeInBackground {
            follower: Follower::start(receiver, shared, PassOn)?,
        })
    }

    /// The end towards the trainer.
    pub fn receiver(&self) -> &Receiver {
        &self.receiver
    }

    /// The end towards the sub-workers: to see them, hold them, or read what
    /// they were sent.
    pub fn sender(&mut self) -> &mut Sender {
        &mut self.passing.sender
    }
}

impl CascadeSetup {
    /// Leaves with a reason: see [`Receiver::fail`].
    pub fn fail(self, reason: &str) {
        self.receiver.fail(reason);
    }

    /// Sets the sender up for the sub-workers: another scheme, a run directory,
    /// a cast, a deadline, and so on.
    ///
    /// # Errors
    ///
    /// Those of the calls made.
    pub fn configure(
        mut self,
        configure: impl FnOnce(SenderSetup) -> Result<SenderSetup>,
    ) -> Result<Self> {
        self.setup = configure(self.setup)?;
        Ok(self)
    }

    /// The init info of the sub-workers. Configuring the sender further may change it.
    pub fn init_info(&self) -> InitInfo {
        self.setup.init_info()
    }

    /// The rendez-vous with the sub-workers: they get the initial weights, and
    /// only then the trainer counts this worker.
    ///
    /// # Errors
    ///
    /// As [`SenderSetup::connect`]; the trainer is told.
    pub fn connect(self, expect: Expect, timeout: Option<Duration>) -> Result<Cascade> {
        let Self {
            mut receiver,
            first,
            setup,
        } = self;
        // The sub-workers see the trainer's numbers from the first version on.
        let numbers = first.versions();
        let mut options = SendOptions::new();
        options.numbers = numbers;
        match setup.connect_with(&set_of(&first, |_| true), options, expect, timeout) {
            Ok(sender) => {
                // Only now: this worker counts for the trainer once its own workers are there.
                receiver.report_applied(&first)?;
                Ok(Cascade {
                    passing: Passing {
                        sender,
                        run: receiver.run(),
                        lift: Lift::default(),
                    },
                    receiver,
                })
            }
            Err(error) => {
                receiver.refuse(None, &format!("its own workers: {error}"))?;
                Err(error)
            }
        }
    }
}

/// A cascade with a thread of its own; see [`Cascade::in_background`].
///
/// Dropping this value ends the thread, and tells trainer and sub-workers. A set that the thread is
/// passing on arrives first, or misses its deadline. In a forked child every call is an error, and
/// dropping does nothing.
#[derive(Debug)]
pub struct CascadeInBackground {
    follower: Follower<ForwardState>,
}

impl CascadeInBackground {
    /// Ends the thread, and leaves with a reason: see [`Receiver::fail`].
    ///
    /// # Errors
    ///
    /// As [`stop`](Self::stop).
    pub fn fail(self, reason: &str) -> Result<()> {
        self.stop()?.fail(reason);
        Ok(())
    }

    /// The state of the trainer, and the versions that were passed on.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn status(&self) -> Result<BackgroundStatus> {
        Ok(self.follower.handoff()?.lock().status.clone())
    }

    /// The set that was passed on last; `None` before the first one after the initial weights.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn last(&self) -> Result<Option<Forwarded>> {
        Ok(self.follower.handoff()?.lock().shared.last.clone())
    }

    /// Waits until the condition holds for the last set that was passed on, and returns that set.
    /// `None` at the timeout, or once the trainer has shut down or died and will not come back. The
    /// successor of a trainer with a run directory is looked for without an end, so a call without
    /// a timeout waits without an end, too.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        mut wanted: impl FnMut(&Forwarded) -> bool,
    ) -> Result<Option<Forwarded>> {
        let handoff = self.follower.handoff()?;
        handoff.wait(timeout, |inner| {
            let last = inner.shared.last.as_ref();
            last.filter(|last| wanted(last)).cloned()
        })
    }

    /// Ends the thread, and gives the cascade back.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn stop(self) -> Result<Cascade> {
        let (receiver, shared) = self.follower.stop()?;
        let passing = shared
            .passing
            .unwrap_or_else(|| unreachable!("the thread brings it back, also if it panics"));
        Ok(Cascade { receiver, passing })
    }
}

/// The state that thread and worker share.
#[derive(Debug, Default)]
struct ForwardState {
    last: Option<Forwarded>,
    /// The other half, while the thread does not use it.
    passing: Option<Passing>,
}

struct PassOn;

impl ThreadTask for PassOn {
    type Shared = ForwardState;

    fn work(
        &mut self,
        _: &ReceiverHandoff<ForwardState>,
        _: &mut Receiver,
    ) -> Result<RemainingWork> {
        Ok(RemainingWork::Nothing)
    }

    fn arrived(
        &mut self,
        handoff: &ReceiverHandoff<ForwardState>,
        receiver: &mut Receiver,
        set: SetSnapshot,
    ) -> Result<()> {
        // Its drop brings the half back, also after a panic.
        let mut lent = LentPassing {
            handoff,
            passing: handoff.lock().shared.passing.take(),
        };
        let Some(passing) = &mut lent.passing else {
            return Ok(());
        };
        // Outside the lock: sub-workers may take long.
        let passed = passing.pass_on(receiver, &set);
        drop(lent);
        let answered = passed.and_then(|(forwarded, complaint)| {
            // Before the trainer is told: a thread that has its report finds the version here.
            handoff.update(|inner| {
                inner.status.reflect(receiver);
                inner.status.failure.clone_from(&complaint);
                if forwarded.is_some() {
                    inner.shared.last = forwarded;
                }
            });
            answer(receiver, &set, complaint.as_deref())
        });
        // The trainer knows why, if it can be reached. The next set is passed on as usual.
        if let Err(error) = answered {
            handoff.update(|inner| inner.status.failure = Some(error.to_string()));
        }
        Ok(())
    }
}

/// The half towards the sub-workers in the hands of the thread.
struct LentPassing<'a> {
    handoff: &'a ReceiverHandoff<ForwardState>,
    passing: Option<Passing>,
}

impl Drop for LentPassing<'_> {
    fn drop(&mut self) {
        let passing = self.passing.take();
        self.handoff.update(|inner| inner.shared.passing = passing);
    }
}

/// The half towards the sub-workers.
#[derive(Debug)]
struct Passing {
    sender: Sender,
    /// The trainer's run, and what is added to its numbers.
    run: Run,
    lift: Lift,
}

/// The offset added to the trainer's version numbers, by model: 0 until the trainer restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Lift(Vec<(ModelId, u64)>);

impl Lift {
    /// The offset for a run that begins when the sub-workers have these versions.
    fn above(newest: impl IntoIterator<Item = (ModelId, Version)>) -> Self {
        Self(
            newest
                .into_iter()
                .map(|(id, version)| (id, version.0))
                .collect(),
        )
    }

    fn number(&self, model: &ModelId, version: Version) -> Version {
        let mut lifts = self.0.iter();
        let lift = lifts
            .find(|(id, _)| id == model)
            .map_or(0, |(_, lift)| *lift);
        Version(version.0.saturating_add(lift))
    }
}

impl Passing {
    /// Passes a set on, unless the sub-workers have it. Returns what the trainer gets as an
    /// answer, and tells it of an error.
    fn pass_on(
        &mut self,
        receiver: &mut Receiver,
        set: &SetSnapshot,
    ) -> Result<(Option<Forwarded>, Option<String>)> {
        match self.send(set) {
            Ok(report) => {
                let complaint = report.as_ref().and_then(complaint);
                // A sub-worker that does not have the set keeps this worker at the version before.
                if complaint.is_none() {
                    receiver.note_applied(set);
                }
                let forwarded = report.map(|report| Forwarded {
                    versions: set.versions(),
                    report,
                });
                Ok((forwarded, complaint))
            }
            Err(Error::Interrupted) => {
                // The next call continues with this set.
                receiver.put_back(set.clone());
                Err(Error::Interrupted)
            }
            Err(error) => {
                // The trainer's report has the reason on this worker's line.
                receiver.refuse(Some(set), &format!("it could not pass it on: {error}"))?;
                Err(error)
            }
        }
    }

    fn send(&mut self, set: &SetSnapshot) -> Result<Option<Report>> {
        // What the sub-workers were sent, by their own numbers.
        let newest: Vec<_> = self.sender.newest().collect();
        let run = set.members().first().map(|member| member.snapshot.run());
        // Another run: the trainer has restarted and counts from 1 again, but numbers only grow for
        // the sub-workers.
        if let Some(run) = run.filter(|run| *run != self.run) {
            // Numbers go on above the highest that the sub-workers were sent.
            self.lift = Lift::above(newest.iter().cloned());
            self.run = run;
        }
        let numbers: Vec<_> = set
            .versions()
            .into_iter()
            .map(|(id, version)| (self.lift.number(&id, version), id))
            // A model whose version did not change is not sent again.
            .filter(|(number, id)| {
                let mut newest = newest.iter();
                newest.any(|(model, version)| model == id && version < number)
            })
            .map(|(number, id)| (id, number))
            .collect();
        if numbers.is_empty() {
            return Ok(None);
        }
        // Counted from the sub-workers' versions: this worker may have received versions that it
        // could not pass on.
        let wanted = |model: &ModelId| numbers.iter().any(|(id, _)| id == model);
        let weights = set_of(set, wanted);
        // The trainer is told only what all sub-workers run, so this waits for them.
        let mut options = SendOptions::new().wait(WaitFor::Applied);
        options.numbers = numbers.clone();
        self.sender.send_with(&weights, &options).map(Some)
    }
}

/// The members of a set, to be sent.
fn set_of(set: &SetSnapshot, wanted: impl Fn(&ModelId) -> bool) -> Set<'_> {
    let members = set.members().iter().map(|member| &member.snapshot);
    members
        .filter(|snapshot| wanted(snapshot.model()))
        .fold(Set::new(), |set, snapshot| {
            set.with(snapshot.model().as_str(), snapshot as &dyn WeightExtractor)
        })
}

/// Tells the trainer that the sub-workers have a set, or why they do not have it.
fn answer(receiver: &mut Receiver, set: &SetSnapshot, complaint: Option<&str>) -> Result<()> {
    match complaint {
        None => receiver.tell_applied(set),
        Some(complaint) => receiver.refuse(Some(set), complaint),
    }
}

/// The reason that the trainer gets for sub-workers that are not up to date.
fn complaint(report: &Report) -> Option<String> {
    let failed: Vec<_> = report.failed().map(ToString::to_string).collect();
    match failed.len() {
        0 => None,
        count => Some(format!(
            "{count} of its {} workers did not apply it: {}",
            report.workers.len(),
            failed.join("; ")
        )),
    }
}

impl fmt::Display for Forwarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("passed on ")?;
        for (index, (model, version)) in self.versions.iter().enumerate() {
            let before = if index == 0 { "" } else { ", " };
            write!(f, "{before}{model} {version}")?;
        }
        write!(f, ": {}", self.report)
    }
}
