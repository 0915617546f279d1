//! A worker that feeds workers of its own: what it receives it passes on.

use std::fmt;
use std::time::{Duration, Instant};

use weightsync_core::{ModelId, Run, Version, WorkerId};

use crate::background::BackgroundStatus;
use crate::background::handoff::ReceiverHandoff;
use crate::background::thread::{Follower, Task, Work, can_follow};
use crate::error::{Error, Result};
use crate::extract::WeightExtractor;
use crate::init_info::InitInfo;
use crate::options::SendOptions;
use crate::receiver::{Receiver, ReceiverSetup};
use crate::report::{Report, WaitFor};
use crate::send_source::Set;
use crate::sender::Sender;
use crate::set::SetSnapshot;
use crate::setup::{Expect, SenderSetup};
use crate::transport::deadline;

/// A worker that feeds workers of its own, its *sub-workers*, and passes on to
/// them what it receives: in one pass, whole sets at a time.
///
/// **Guarantee.** The trainer is told that this worker has applied a version
/// once every sub-worker has. If one has not, the line in the trainer's report
/// says which and why; the others have it, and the next version is passed on
/// like any other. One that is late, and applies it after all, is not reported:
/// to the trainer this worker runs the version before until every sub-worker has
/// applied a later one.
///
/// **Version numbers are the trainer's.** A trainer that restarts counts from 1 again;
/// its versions then follow on the highest number the sub-workers have seen, so
/// that they need not know. [`Forwarded`] has both numbers.
///
/// The sub-workers are a run of their own, with the address and the secret of
/// their own [`InitInfo`]: they outlive the trainer, and find this worker again
/// when it has restarted, if it was [set up](CascadeSetup::configure) with a run
/// directory.
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

/// What was passed on.
#[derive(Clone, Debug)]
pub struct Forwarded {
    /// The version of each model that this worker received, by the trainer's
    /// numbers.
    pub versions: Vec<(ModelId, Version)>,
    /// What became of it at the sub-workers; of the models that were passed on,
    /// and by the numbers the sub-workers see.
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
        let first = receiver.begin()?.ok_or_else(|| Error::Unsupported {
            what: "weights to pass on",
            scheme: receiver.scheme().to_string(),
        })?;
        Ok(CascadeSetup {
            setup: SenderSetup::passing_on(receiver.models())?,
            receiver,
            first,
        })
    }

    /// Leaves, and says why: see [`Receiver::fail`]. Its sub-workers are told that it has
    /// shut down.
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

    /// Waits for what the trainer sends next, passes it on, and says what became
    /// of it, to the trainer too; `None` if `timeout` comes before anything did.
    ///
    /// A sub-worker that failed, died or was lost is named to the trainer with each
    /// version, until it is back or [forgotten](Self::forget).
    ///
    /// The timeout is for the wait alone. Passing on takes as long as it takes
    /// the sub-workers, and at most the deadline the sender was
    /// [set up](CascadeSetup::configure) with.
    ///
    /// # Errors
    ///
    /// Those of [`Receiver::recv`], and of [`Sender::send`]: then nothing was
    /// passed on, the trainer knows why, and the next version is tried again.
    /// After [`Error::Interrupted`] the next call goes on with what it was at; the
    /// sub-workers may have it already.
    pub fn forward(&mut self, timeout: Option<Duration>) -> Result<Option<Forwarded>> {
        let until = deadline(timeout);
        loop {
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            let Some(set) = self.receiver.next(left)? else {
                return Ok(None);
            };
            let forwarded = self.passing.pass_on(&mut self.receiver, set)?;
            if forwarded.is_some() {
                return Ok(forwarded);
            }
        }
    }

    /// As [`forward`](Self::forward), again and again, in a thread of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the transport cannot end a wait, or nothing
    /// comes by it without being asked for.
    pub fn in_background(self) -> Result<CascadeInBackground> {
        can_follow(&self.receiver)?;
        let Self { receiver, passing } = self;
        let shared = Shared {
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
    /// Leaves, and says why: see [`Receiver::fail`].
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

    /// What the sub-workers need to join. A sender that is configured further
    /// may have another.
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
        let numbers = first.versions();
        let mut options = SendOptions::new();
        options.numbers = numbers;
        match setup.connect_with(&set_of(&first, |_| true), options, expect, timeout) {
            Ok(sender) => {
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
/// Dropping it ends the thread, once what it is passing on has arrived or missed
/// its deadline, and tells trainer and sub-workers. In a forked child every call
/// is an error, and dropping it does nothing.
#[derive(Debug)]
pub struct CascadeInBackground {
    follower: Follower<Shared>,
}

impl CascadeInBackground {
    /// Ends the thread, and leaves: see [`Receiver::fail`].
    ///
    /// # Errors
    ///
    /// As [`stop`](Self::stop).
    pub fn fail(self, reason: &str) -> Result<()> {
        self.stop()?.fail(reason);
        Ok(())
    }

    /// Where it stands: what the trainer is doing, and what was passed on.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn status(&self) -> Result<BackgroundStatus> {
        Ok(self.follower.handoff()?.open().status.clone())
    }

    /// What was passed on last; `None` before the first after the initial
    /// weights.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn last(&self) -> Result<Option<Forwarded>> {
        Ok(self.follower.handoff()?.open().shared.last.clone())
    }

    /// Waits until what was passed on is as wished, and returns it; `None` if
    /// the timeout came first, or nothing will arrive any more: the trainer has
    /// shut down or died, and will not come back. One with a run directory is
    /// looked for as long as this lives, and without a timeout this waits as
    /// long.
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

/// What thread and worker both see.
#[derive(Debug, Default)]
struct Shared {
    last: Option<Forwarded>,
    /// The other half, while the thread does not use it.
    passing: Option<Passing>,
}

struct PassOn;

impl Task for PassOn {
    type Shared = Shared;

    fn work(&mut self, _: &ReceiverHandoff<Shared>, _: &mut Receiver) -> Result<Work> {
        Ok(Work::Nothing)
    }

    fn arrived(
        &mut self,
        handoff: &ReceiverHandoff<Shared>,
        receiver: &mut Receiver,
        set: SetSnapshot,
    ) -> Result<()> {
        let mut lent = Lent {
            handoff,
            passing: handoff.open().shared.passing.take(),
        };
        let Some(passing) = &mut lent.passing else {
            return Ok(());
        };
        let passed = passing.pass_on(receiver, set);
        drop(lent);
        handoff.note(|inner| {
            inner.status.reflect(receiver);
            inner.status.failure = match &passed {
                Ok(Some(forwarded)) => complaint(&forwarded.report),
                Ok(None) => None,
                Err(error) => Some(error.to_string()),
            };
            if let Ok(Some(forwarded)) = passed {
                inner.shared.last = Some(forwarded);
            }
        });
        Ok(())
    }
}

/// The half towards the sub-workers in the hands of the thread.
struct Lent<'a> {
    handoff: &'a ReceiverHandoff<Shared>,
    passing: Option<Passing>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let passing = self.passing.take();
        self.handoff.note(|inner| inner.shared.passing = passing);
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

/// What is added to the trainer's numbers, by model: nothing, before it has
/// restarted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Lift(Vec<(ModelId, u64)>);

impl Lift {
    /// For a run that begins when the sub-workers have these.
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
    /// Passes a set on, and tells the trainer what became of it. `None` if the
    /// sub-workers had it.
    fn pass_on(&mut self, receiver: &mut Receiver, set: SetSnapshot) -> Result<Option<Forwarded>> {
        let report = match self.send(&set) {
            Ok(Some(report)) => report,
            Ok(None) => {
                receiver.report_applied(&set)?;
                return Ok(None);
            }
            Err(Error::Interrupted) => {
                // The next call goes on with it.
                receiver.put_back(set);
                return Err(Error::Interrupted);
            }
            Err(error) => {
                receiver.refuse(Some(&set), &format!("it could not pass it on: {error}"))?;
                return Err(error);
            }
        };
        match complaint(&report) {
            None => receiver.report_applied(&set)?,
            Some(complaint) => receiver.refuse(Some(&set), &complaint)?,
        }
        Ok(Some(Forwarded {
            versions: set.versions(),
            report,
        }))
    }

    fn send(&mut self, set: &SetSnapshot) -> Result<Option<Report>> {
        let newest: Vec<_> = self.sender.newest().collect();
        let run = set.members().first().map(|member| member.snapshot.run());
        if let Some(run) = run.filter(|run| *run != self.run) {
            self.lift = Lift::above(newest.iter().cloned());
            self.run = run;
        }
        let numbers: Vec<_> = set
            .versions()
            .into_iter()
            .map(|(id, version)| (self.lift.number(&id, version), id))
            .filter(|(number, id)| {
                let mut newest = newest.iter();
                newest.any(|(model, version)| model == id && version < number)
            })
            .map(|(number, id)| (id, number))
            .collect();
        if numbers.is_empty() {
            return Ok(None);
        }
        // By what the sub-workers have, and not by what this worker was handed:
        // that may not have been passed on.
        let wanted = |model: &ModelId| numbers.iter().any(|(id, _)| id == model);
        let weights = set_of(set, wanted);
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

/// What the trainer is told of sub-workers that are not up to date.
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
