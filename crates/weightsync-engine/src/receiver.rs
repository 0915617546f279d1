//! The worker's end: set up, connect, receive.

mod inner;
mod setup;

use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Layout, LayoutMismatch, ModelId, Run, Version, WorkerId};
use weightsync_mem::{Deadline, Error as Memory, WaitStyle};

use self::inner::Search;
use crate::error::{Error, Remedy, Result, misfit_text};
use crate::init_info::InitInfo;
use crate::load::WeightLoader;
use crate::load_set::SetLoader;
use crate::scheme::AnyScheme;
use crate::set::SetSnapshot;
use crate::snapshot::Snapshot;
use crate::transport::{FirstWeights, Interrupter, Joining, ModelSpec, Pull, ReceiverTransport};

pub use self::setup::Joined;

/// How long a receive without a timeout searches for a restarted trainer before it fails.
const REJOIN: Duration = Duration::from_secs(60);

/// A receiver that is set up: its settings are known, and nothing was communicated yet.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use weightsync::{InitInfo, ReceiverSetup};
///
/// let info: InitInfo = serde_json::from_str(&std::env::var("POLICY_INFO")?)?;
/// let mut receiver = ReceiverSetup::new(info, 0).connect(Duration::from_secs(30))?;
/// while let Some(weights) = receiver.receive(None)? {
///     println!("{} has {}", receiver.worker(), weights.version());
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ReceiverSetup {
    info: InitInfo,
    /// In place of the scheme that the init info names.
    scheme: Option<AnyScheme>,
    worker: WorkerId,
    /// The models it wants, by id; all of them unless it says which.
    wanted: Option<Vec<String>>,
    /// The layouts it insists on; without an id, that of the first model it
    /// wants.
    own: Vec<(Option<String>, Layout)>,
    device: String,
    wait: WaitStyle,
}

/// A worker's end of connected models.
///
/// Dropping it tells the sender that this worker has left in order, or, while the
/// thread panics, that it has [failed](Self::fail); snapshots taken from it stay valid.
#[derive(Debug)]
pub struct Receiver {
    transport: Box<dyn ReceiverTransport>,
    scheme: AnyScheme,
    setup: ReceiverSetup,
    /// The weights that came with `connect`, until the first receive.
    initial: Option<SetSnapshot>,
    /// What was loaded into the worker's models last: held until the next is
    /// loaded, to go back to if that fails midway.
    current: Option<SetSnapshot>,
    /// Whether the worker's models hold one whole set.
    whole: bool,
    /// What the worker runs, and the run it is of.
    applied: Vec<(ModelId, Version)>,
    run: Run,
    /// The sender is gone, and that has been said.
    sender_lost: bool,
    /// It said so itself.
    sender_closed: bool,
    /// What a sender that is still there was told when it was refused for good:
    /// it sends nothing more.
    withdrawn: Option<String>,
    /// A run of the sender's epoch that is not its successor, and was told so.
    conflicting: Option<Run>,
    /// A wait may end early once, for an interrupt that came too late.
    interrupted: bool,
    /// The layout of a model that never comes.
    nothing: Layout,
}

/// What [`Receiver::follow`] comes back with.
#[derive(Debug)]
pub(crate) enum Followed {
    Set(SetSnapshot),
    /// The wait was ended, or its sender's successor was joined.
    Interrupted,
    /// The sender is gone, and its successor is not there yet, or cannot be
    /// joined now.
    NoSender(Error),
}

impl Receiver {
    /// Waits for a version that this worker has not had yet; returns `None` at the timeout. Without
    /// a timeout, only a version, the sender's death or shutdown, or an [`Interrupter`] ends the
    /// wait. Versions that were replaced meanwhile are skipped, unless the scheme delivers every
    /// version.
    ///
    /// The snapshot counts as loaded: the sender is told that this worker runs
    /// it from here on.
    ///
    /// # Errors
    ///
    /// [`Error::SenderDied`] or [`Error::SenderClosed`], after everything that
    /// was sent. If the trainer has a run directory, the next call waits for its
    /// successor. [`Error::Withdrawn`] once a background receiver, or a cascade,
    /// has [failed](crate::BackgroundState::Failed) with this.
    /// [`Error::SeveralModels`] if this worker has several: see
    /// [`receive_set`](Self::receive_set). [`Error::Unsupported`] if nothing
    /// comes by the scheme without being asked for, once the initial weights were
    /// received: [`pull`](Self::pull) instead.
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Option<Snapshot>> {
        self.one_model()?;
        let Some(set) = self.receive_set(timeout)? else {
            return Ok(None);
        };
        Ok(Some(set.only()?.clone()))
    }

    /// As [`receive`](Self::receive), for all models of this worker: what was
    /// sent together comes together, in addition to what the others were at that time.
    ///
    /// # Errors
    ///
    /// As [`receive`](Self::receive).
    pub fn receive_set(&mut self, timeout: Option<Duration>) -> Result<Option<SetSnapshot>> {
        let Some(set) = self.next(timeout)? else {
            return Ok(None);
        };
        self.report_applied(&set)?;
        Ok(Some(set))
    }

    /// As [`receive`](Self::receive), but loads the version into the worker's
    /// own model. The sender is told that the version is applied only once it is
    /// loaded.
    ///
    /// # Errors
    ///
    /// [`Error::WrongModel`] or the loader's error; then the sender's report
    /// carries the words, and this worker has the version it had: it was loaded
    /// again. If that failed too, the model is not whole: this says
    /// [`Error::NotWhole`] until a version has been loaded.
    pub fn receive_into(
        &mut self,
        model: &mut dyn WeightLoader,
        timeout: Option<Duration>,
    ) -> Result<Option<Version>> {
        let id = self.one_model()?;
        let mut models = SetLoader::new().with(&id, model);
        let versions = self.receive_set_into(&mut models, timeout)?;
        Ok(versions.and_then(|versions| versions.first().map(|(_, version)| *version)))
    }

    /// As [`receive_into`](Self::receive_into), for all models of this worker:
    /// either all of them have the new versions afterwards, or none has.
    ///
    /// They are the same models each time: one whose version did not change since
    /// the last load is not loaded again. To load all of them, also into others,
    /// there is [`pull_set_into`](Self::pull_set_into).
    ///
    /// # Errors
    ///
    /// As [`receive_into`](Self::receive_into), and [`Error::NoSuchModel`] if
    /// there is no loader for a model this worker receives.
    pub fn receive_set_into(
        &mut self,
        models: &mut SetLoader<'_>,
        timeout: Option<Duration>,
    ) -> Result<Option<Vec<(ModelId, Version)>>> {
        let set = self.next(timeout)?;
        let held = self.held();
        self.load_what_came(set, models, held.as_ref())
    }

    /// Returns the newest version at once, even if this worker has had it; `None` before a
    /// restarted sender's first. A scheme that delivers every version returns the last one that
    /// came. A scheme that only answers pulls returns the last answer, while it exists.
    ///
    /// A sender that restarted is joined if it is there by now; until it is, the
    /// newest is that of the one before.
    ///
    /// # Errors
    ///
    /// [`Error::Withdrawn`], as of [`receive`](Self::receive), and those of the
    /// transport.
    pub fn latest(&mut self) -> Result<Option<Snapshot>> {
        self.one_model()?;
        let Some(set) = self.latest_set()? else {
            return Ok(None);
        };
        Ok(Some(set.only()?.clone()))
    }

    /// As [`latest`](Self::latest), for all models of this worker.
    ///
    /// # Errors
    ///
    /// As [`latest`](Self::latest).
    pub fn latest_set(&mut self) -> Result<Option<SetSnapshot>> {
        self.is_served()?;
        self.initial = None;
        if self.sender_lost && self.restarts() {
            // Why a successor cannot be joined is the next receive's to say.
            if let Err(Error::Interrupted) = self.rejoin(Search::Until(Some(Instant::now()))) {
                return Err(Error::Interrupted);
            }
        }
        let Some(set) = self.transport.latest()? else {
            return Ok(None);
        };
        self.report_applied(&set)?;
        Ok(Some(set))
    }

    /// Asks for a version instead of waiting for a send; returns `None` at the timeout. The
    /// snapshot counts as loaded.
    ///
    /// What is sent meanwhile is no answer, and is there for the next receive,
    /// unless it is what was asked for.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`] if exactly that version is not kept any more,
    /// [`Error::Unsupported`] if the scheme has no pull, and those of
    /// [`receive`](Self::receive).
    pub fn pull(&mut self, pull: Pull, timeout: Option<Duration>) -> Result<Option<Snapshot>> {
        let id = self.one_model()?;
        let Some(set) = self.pull_set(&id, pull, timeout)? else {
            return Ok(None);
        };
        Ok(Some(set.only()?.clone()))
    }

    /// As [`pull`](Self::pull), for all models of this worker: the set in which
    /// this one of them has the version asked for, whole as it was sent. For the
    /// newest it is the same whichever is named.
    ///
    /// # Errors
    ///
    /// As [`pull`](Self::pull), and [`Error::NoSuchModel`].
    pub fn pull_set(
        &mut self,
        model: &str,
        pull: Pull,
        timeout: Option<Duration>,
    ) -> Result<Option<SetSnapshot>> {
        let Some(set) = self.ask(model, pull, timeout)? else {
            return Ok(None);
        };
        self.report_applied(&set)?;
        Ok(Some(set))
    }

    /// As [`pull`](Self::pull), but loads the version into the worker's own
    /// model, also if it has that version.
    ///
    /// # Errors
    ///
    /// As [`pull`](Self::pull) and [`receive_into`](Self::receive_into).
    pub fn pull_into(
        &mut self,
        model: &mut dyn WeightLoader,
        pull: Pull,
        timeout: Option<Duration>,
    ) -> Result<Option<Version>> {
        let id = self.one_model()?;
        let mut models = SetLoader::new().with(&id, model);
        let versions = self.pull_set_into(&mut models, &id, pull, timeout)?;
        Ok(versions.and_then(|versions| versions.first().map(|(_, version)| *version)))
    }

    /// As [`pull_into`](Self::pull_into), for all models of this worker, as
    /// [`pull_set`](Self::pull_set) gives them: either all of them have these
    /// versions afterwards, or none has.
    ///
    /// # Errors
    ///
    /// As [`pull_set`](Self::pull_set) and
    /// [`receive_set_into`](Self::receive_set_into).
    pub fn pull_set_into(
        &mut self,
        models: &mut SetLoader<'_>,
        model: &str,
        pull: Pull,
        timeout: Option<Duration>,
    ) -> Result<Option<Vec<(ModelId, Version)>>> {
        let set = self.ask(model, pull, timeout)?;
        self.load_what_came(set, models, None)
    }

    /// The version this worker runs, of its first model; `Version::NONE` before
    /// the first.
    pub fn version(&self) -> Version {
        let first = self.applied.first();
        first.map_or(Version::NONE, |(_, version)| *version)
    }

    /// The version of each model that this worker runs; empty before the first.
    pub fn versions(&self) -> &[(ModelId, Version)] {
        &self.applied
    }

    /// The run of these versions; before the first, the run of the sender. A
    /// restarted trainer's run shows here once a version of it is loaded.
    pub fn run(&self) -> Run {
        self.run
    }

    /// Whether the worker's own models hold one whole version each. Not so only
    /// after a load failed midway and the way back failed too.
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// Leaves because the worker has failed, with the reason. The sender's reports show the reason
    /// until a worker of this number is back, or is [forgotten](crate::Sender::forget).
    pub fn fail(mut self, reason: &str) {
        self.tell_failure(reason);
    }

    /// A sender that is gone, or was told before that this worker can use nothing more,
    /// need not be told.
    fn tell_failure(&mut self, reason: &str) {
        if self.withdrawn.is_none()
            && !self.sender_lost
            && let Err(error) = self.refuse(None, reason)
        {
            // It finds the connection closed, and calls that a death.
            tracing::debug!(%error, "the sender was not told why this worker ends");
        }
    }

    /// This worker's number.
    pub fn worker(&self) -> WorkerId {
        self.setup.worker
    }

    /// The model that is received; the first, if there are several.
    pub fn model(&self) -> &ModelId {
        let first = self.transport.models().first();
        first.map_or(self.setup.info.model(), |spec| &spec.id)
    }

    /// The models that are received, with their tensors: a worker whose model
    /// has no shapes yet makes it by these. Empty for a scheme that carries
    /// nothing.
    pub fn models(&self) -> &[ModelSpec] {
        self.transport.models()
    }

    /// Names, dtypes and shapes of the model; of the first, if there are
    /// several. No tensors for a scheme that carries nothing.
    pub fn layout(&self) -> &Layout {
        let first = self.transport.models().first();
        first.map_or(&self.nothing, |spec| &spec.layout)
    }

    /// What ends this receiver's waits from another thread: a receive then
    /// returns nothing, as if its timeout had come. After a restarted trainer was
    /// joined it is another one.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the transport has none.
    pub fn interrupter(&self) -> Result<Interrupter> {
        let interrupter = self.transport.interrupter();
        interrupter.map_err(|error| error.by(&self.scheme))
    }

    /// As [`receive_set`](Self::receive_set), without saying that this worker
    /// runs what came.
    pub(crate) fn next(&mut self, timeout: Option<Duration>) -> Result<Option<SetSnapshot>> {
        if let Some(initial) = self.initial.take() {
            if self.scheme.capabilities().every_version {
                return Ok(Some(initial));
            }
            // Whatever is wrong with the sender is the next call's to say.
            let newer = self.transport.next(Some(Instant::now())).ok().flatten();
            return Ok(Some(newer.unwrap_or(initial)));
        }
        self.is_served()?;
        let can = self.scheme.capabilities();
        if can.weights && !can.push {
            return Err(Error::Unsupported {
                what: "versions that come without being asked for",
                scheme: self.scheme.to_string(),
            });
        }
        // A timeout too long for the clock is no timeout.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if !self.find_sender(timeout.is_some(), deadline)? {
            return Ok(None);
        }
        self.next_of_transport(deadline)
    }

    /// Whether the sender still has anything for this end.
    fn is_served(&self) -> Result<()> {
        match &self.withdrawn {
            None => Ok(()),
            Some(reason) => Err(Error::Withdrawn {
                reason: reason.clone(),
            }),
        }
    }

    /// Joins the next sender, where the one before is gone. False if there is
    /// none by the deadline.
    fn find_sender(&mut self, may_fail: bool, deadline: Deadline) -> Result<bool> {
        if !self.sender_lost || !self.setup.info.at.restarts() {
            return Ok(true);
        }
        match self.rejoin(Search::Until(deadline.or(Some(Instant::now() + REJOIN)))) {
            Ok(()) => Ok(true),
            Err(Error::NoSender { .. }) if may_fail => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn next_of_transport(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        let mut next = self.transport.next(deadline);
        if matches!(next, Ok(None)) && std::mem::take(&mut self.interrupted) {
            next = self.transport.next(deadline);
        }
        self.note_loss(next.as_ref().err());
        next
    }

    /// Asks for the set with a version of a model, without saying that this
    /// worker runs it.
    fn ask(
        &mut self,
        model: &str,
        pull: Pull,
        timeout: Option<Duration>,
    ) -> Result<Option<SetSnapshot>> {
        if !self.scheme.capabilities().pull {
            return Err(Error::Unsupported {
                what: "asking for a version",
                scheme: self.scheme.to_string(),
            });
        }
        self.is_served()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if !self.find_sender(timeout.is_some(), deadline)? {
            return Ok(None);
        }
        let mut models = self.transport.models().iter();
        let place = models.position(|spec| spec.id.as_str() == model);
        let place = place.ok_or_else(|| Error::NoSuchModel {
            model: model.into(),
            known: self
                .transport
                .models()
                .iter()
                .map(|spec| spec.id.clone())
                .collect(),
        })?;
        let mut answer = self.transport.pull(place, pull, deadline);
        if matches!(answer, Ok(None)) && std::mem::take(&mut self.interrupted) {
            answer = self.transport.pull(place, pull, deadline);
        }
        self.note_loss(answer.as_ref().err());
        let answer = answer?;
        // The next receive hands out what is newer than this.
        let initial = self.initial.take();
        self.initial = initial.filter(|initial| {
            let answer = answer.as_ref();
            answer.is_none_or(|answer| is_newer(initial, answer))
        });
        Ok(answer)
    }

    /// Loads a set, if one came, but for what the models hold of it.
    fn load_what_came(
        &mut self,
        set: Option<SetSnapshot>,
        models: &mut SetLoader<'_>,
        held: Option<&SetSnapshot>,
    ) -> Result<Option<Vec<(ModelId, Version)>>> {
        let Some(set) = set else {
            // A loop that goes on after a timeout would go on with half a model.
            return match self.whole {
                true => Ok(None),
                false => Err(self.not_whole()),
            };
        };
        let versions = set.versions();
        self.load_and_report(set, models, held)?;
        Ok(Some(versions))
    }

    fn note_loss(&mut self, error: Option<&Error>) {
        if let Some(Error::SenderClosed | Error::SenderDied { .. }) = error {
            self.sender_lost = true;
            self.sender_closed = matches!(error, Some(Error::SenderClosed));
        }
    }

    /// The only model of this worker.
    pub(crate) fn one_model(&self) -> Result<String> {
        match self.transport.models() {
            [one] => Ok(one.id.as_str().to_owned()),
            [] => self.setup.only_model(),
            several => Err(Error::SeveralModels {
                known: several.iter().map(|spec| spec.id.clone()).collect(),
            }),
        }
    }

    fn not_whole(&self) -> Error {
        Error::NotWhole {
            models: self.models().iter().map(|spec| spec.id.clone()).collect(),
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.tell_failure("it panicked");
        }
    }
}

/// The run that a set is of.
fn run_of(set: &SetSnapshot) -> Option<Run> {
    let first = set.members().first();
    first.map(|member| member.snapshot.run())
}

/// Whether a set has something newer than another one.
fn is_newer(set: &SetSnapshot, than: &SetSnapshot) -> bool {
    let mut members = set.members().iter().map(|member| &member.snapshot);
    members.any(|snapshot| match than.model(snapshot.model().as_str()) {
        Ok(other) => snapshot.run() == other.run() && snapshot.version() > other.version(),
        Err(_) => true,
    })
}

/// Tells the sender that a model does not fit, and makes the error of it.
fn refused(
    transport: &mut dyn ReceiverTransport,
    model: ModelId,
    mismatch: LayoutMismatch,
) -> Result<Error> {
    transport.refuse(None, &misfit_text(&mismatch))?;
    Ok(Error::WrongModel {
        model,
        mismatch: Box::new(mismatch),
    })
}

/// Whether the sender's tensors are the worker's, in any order.
pub(crate) fn fits(own: &Layout, senders: &Layout) -> Result<(), LayoutMismatch> {
    match Layout::compare(own, senders) {
        Err(mismatch) if !mismatch.is_order_alone() => Err(mismatch),
        _ => Ok(()),
    }
}
