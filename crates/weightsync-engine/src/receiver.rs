//! The worker's end: set up, connect, receive.

mod inner;
mod receiving;
mod setup;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weightsync_core::{Layout, LayoutMismatch, ModelId, Run, Version, WorkerId};
use weightsync_mem::{Deadline, WaitStyle};

use self::inner::Search;
use crate::error::{Error, Result, misfit_text, place_of};
use crate::init_info::InitInfo;
use crate::report::only_version;
use crate::scheme::AnyScheme;
use crate::set::SetSnapshot;
use crate::snapshot::Snapshot;
use crate::transport::{Interrupter, ModelSpec, ReceiverTransport, VersionRequest, deadline};

pub use self::receiving::{Pull, Receiving};
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
/// let mut receiver = ReceiverSetup::new(info, 0).connect(Some(Duration::from_secs(30)))?;
/// loop {
///     let weights = receiver.recv()?;
///     println!("{} has {}", receiver.worker(), weights.version());
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ReceiverSetup {
    info: InitInfo,
    /// In place of the scheme that the init info names, or that scheme, once it was used. Clones
    /// share it: a scheme may keep what a failed `connect` has fetched.
    scheme: Arc<OnceLock<AnyScheme>>,
    worker: WorkerId,
    /// The ids of the models to receive; `None` is all of them.
    wanted: Option<Vec<String>>,
    /// The layouts it insists on; without an id, that of its only model.
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
    /// The set that the worker's models hold. Its slots stay pinned until the next set is loaded,
    /// so that a load that fails midway can be undone.
    current: Option<SetSnapshot>,
    /// Whether the worker's models hold one whole set.
    whole: bool,
    /// The versions that the worker runs, and their run below.
    applied: Vec<(ModelId, Version)>,
    run: Run,
    /// The sender is gone, and a call has returned that error.
    sender_lost: bool,
    /// The lost sender shut down in order.
    sender_closed: bool,
    /// The reason with which this end gave up on its sender, which sends nothing more.
    withdrawn: Option<String>,
    /// A run that claims the sender's epoch without being its successor, and was refused.
    conflicting: Option<Run>,
    /// The next wait may end early, because an interrupt came after the wait it was meant for.
    interrupted: bool,
}

/// The outcome of [`Receiver::follow`].
#[derive(Debug)]
pub(crate) enum Followed {
    Set(SetSnapshot),
    /// The wait was interrupted, or the sender's successor was joined.
    Interrupted,
    /// The sender is gone, and its successor is not there yet, or cannot be
    /// joined now.
    NoSender(Error),
}

impl Receiver {
    /// Waits for a version that this worker has not had yet. Only a version, the sender's death or
    /// shutdown, or an [`Interrupter`] ends the wait. Versions that were replaced meanwhile are
    /// skipped, unless the scheme delivers every version.
    ///
    /// The snapshot counts as loaded: the sender is told that this worker runs it from here on.
    ///
    /// # Errors
    ///
    /// [`Error::SenderDied`] or [`Error::SenderClosed`], after everything that
    /// was sent. If the trainer has a run directory, the next call waits for its
    /// successor. [`Error::Withdrawn`] once a background receiver, or a cascade,
    /// has [failed](crate::BackgroundState::Failed) with this.
    /// [`Error::Interrupted`] by an [`Interrupter`].
    /// [`Error::SeveralModels`] if this worker has several: see [`set`](Self::set).
    /// [`Error::Unsupported`] if nothing comes by the scheme without being asked for, once the
    /// initial weights were received: [`pull`](Self::pull) instead.
    pub fn recv(&mut self) -> Result<Snapshot> {
        self.one().recv()
    }

    /// As [`recv`](Self::recv), but returns `None` if nothing came within the timeout.
    ///
    /// # Errors
    ///
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Snapshot>> {
        self.one().recv_timeout(timeout)
    }

    /// As [`recv`](Self::recv), but returns `None` at once if nothing is there.
    ///
    /// # Errors
    ///
    /// As [`recv`](Self::recv).
    pub fn try_recv(&mut self) -> Result<Option<Snapshot>> {
        self.one().try_recv()
    }

    /// Returns the newest version at once, even if this worker has had it; `None` before a
    /// restarted sender's first, or while the memory of the newest is still on its way to this
    /// process. A scheme that delivers every version returns the last one that came. A scheme that
    /// only answers pulls returns the last answer, while it exists.
    ///
    /// A restarted sender is joined if it is there by now. Until then, the newest version is that of
    /// the sender before.
    ///
    /// # Errors
    ///
    /// [`Error::Withdrawn`], as of [`recv`](Self::recv), and those of the
    /// transport.
    pub fn latest(&mut self) -> Result<Option<Snapshot>> {
        self.one().latest()
    }

    /// Asks for a version instead of waiting for a send; returns `None` at the timeout of the
    /// pull. The snapshot counts as loaded. For the [set](Self::set) of several models, the answer
    /// is the set in which the model has the version asked for, whole as it was sent.
    ///
    /// A version that is sent meanwhile is left for the next receive, unless it is the answer.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`] if exactly that version is not kept any more,
    /// [`Error::NoSuchModel`], [`Error::SeveralModels`] if the pull has to name a model,
    /// [`Error::Unsupported`] if the scheme has no pull, and those of
    /// [`recv`](Self::recv).
    pub fn pull(&mut self, pull: Pull) -> Result<Option<Snapshot>> {
        self.one().pull(pull)
    }

    /// The version this worker runs; `Version::NONE` before the first.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`]: see [`versions`](Self::versions).
    pub fn version(&self) -> Result<Version> {
        self.one_model()?;
        only_version(&self.applied)
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

    /// Whether the worker's own models hold one whole version each. False only after a load failed
    /// midway and could not be undone.
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// Leaves because the worker has failed, with the reason. The sender's reports show the reason
    /// until a worker of this number is back, or is [forgotten](crate::Sender::forget).
    pub fn fail(mut self, reason: &str) {
        self.tell_failure(reason);
    }

    /// Tells the sender why this worker fails, unless the sender is gone or knows a reason already.
    fn tell_failure(&mut self, reason: &str) {
        // The sender shows the first reason it was given.
        if self.withdrawn.is_none()
            && !self.sender_lost
            && let Err(error) = self.refuse(None, reason)
        {
            // The sender sees the connection close, and reports that as a death.
            tracing::debug!(%error, "the sender was not told why this worker ends");
        }
    }

    /// This worker's number.
    pub fn worker(&self) -> WorkerId {
        self.setup.worker
    }

    /// The models that are received, with names, dtypes and shapes of their tensors. A worker whose
    /// model has no shapes yet can build it from them. Empty for a scheme that carries no weights.
    pub fn models(&self) -> &[ModelSpec] {
        self.transport.models()
    }

    /// How many bytes of weights this worker's process has moved since it joined its sender, as they
    /// were encoded: over a network, or out of a store. `None` if the weights come through memory that
    /// the sender, or a relay of this host, fills.
    pub fn travelled(&self) -> Option<u64> {
        self.transport.travelled()
    }

    /// A handle for other threads to end this receiver's waits, with [`Error::Interrupted`]. Each
    /// trainer that is joined after a restart has another one.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the transport has none.
    pub fn interrupter(&self) -> Result<Interrupter> {
        let interrupter = self.transport.interrupter();
        interrupter.map_err(|error| error.by(&self.scheme))
    }

    /// The next set that this worker has not had; `None` at the timeout, or with a scheme without
    /// weights. The set is not reported as applied.
    pub(crate) fn next(&mut self, timeout: Option<Duration>) -> Result<Option<SetSnapshot>> {
        if let Some(initial) = self.initial.take() {
            // Every version counts there, the initial one too.
            if self.scheme.capabilities().every_version {
                return Ok(Some(initial));
            }
            // An error of the sender is left for the next call to return.
            // Without a wait: what came since the join replaces the initial weights.
            let newer = self.transport.next(Some(Instant::now())).ok().flatten();
            return Ok(Some(newer.unwrap_or(initial)));
        }
        self.is_served()?;
        let can = self.scheme.capabilities();
        if can.weights && !can.push {
            return Err(self.without_push());
        }
        let deadline = deadline(timeout);
        // A lost sender has nothing more: its successor is joined first.
        if !self.find_sender(timeout.is_some(), deadline)? {
            return Ok(None);
        }
        self.next_of_transport(deadline)
    }

    /// The set that is live at this worker. The set is not reported as applied.
    fn newest(&mut self) -> Result<Option<SetSnapshot>> {
        self.is_served()?;
        // What follows is at least as new as the initial weights.
        self.initial = None;
        if self.sender_lost && self.restarts() {
            // Any other error of the successor is left for the next receive to return.
            if let Err(Error::Interrupted) = self.rejoin(Search::Until(Some(Instant::now()))) {
                return Err(Error::Interrupted);
            }
        }
        self.transport.latest()
    }

    pub(crate) fn without_push(&self) -> Error {
        Error::unsupported("versions that come without being asked for", &self.scheme)
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

    /// Joins the successor of a lost sender. False if there is none by the deadline.
    fn find_sender(&mut self, may_fail: bool, deadline: Deadline) -> Result<bool> {
        if !self.sender_lost || !self.setup.info.at.restarts() {
            return Ok(true);
        }
        // Without a deadline the search still ends: a trainer that never comes back is an error.
        match self.rejoin(Search::Until(deadline.or(Some(Instant::now() + REJOIN)))) {
            Ok(()) => Ok(true),
            Err(Error::NoSender { .. }) if may_fail => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn next_of_transport(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        self.waited(deadline, |transport| transport.next(deadline))
    }

    /// Waits for the transport, and tells its deadline from an interrupt.
    fn waited(
        &mut self,
        deadline: Deadline,
        mut wait: impl FnMut(&mut dyn ReceiverTransport) -> Result<Option<SetSnapshot>>,
    ) -> Result<Option<SetSnapshot>> {
        let mut came = wait(&mut *self.transport);
        // An interrupt that was meant for an earlier wait has ended this one: it begins again,
        // once.
        if matches!(came, Ok(None)) && std::mem::take(&mut self.interrupted) {
            came = wait(&mut *self.transport);
        }
        self.note_loss(came.as_ref().err());
        // A transport returns `None` for an interrupt, too. The clock tells the two apart.
        let is_early = deadline.is_none_or(|at| Instant::now() < at);
        match came? {
            None if is_early && self.scheme.capabilities().weights => Err(Error::Interrupted),
            came => Ok(came),
        }
    }

    /// Asks for the set with a version of a model, without saying that this
    /// worker runs it.
    fn ask(&mut self, pull: &Pull) -> Result<Option<SetSnapshot>> {
        // Refused before a sender is looked for.
        if !self.scheme.capabilities().pull {
            return Err(Error::unsupported("asking for a version", &self.scheme));
        }
        self.is_served()?;
        let deadline = deadline(pull.timeout);
        if !self.find_sender(pull.timeout.is_some(), deadline)? {
            return Ok(None);
        }
        let models = self.transport.models();
        let place = match (&pull.model, pull.which) {
            (Some(model), _) => place_of(model, models.iter().map(|spec| &spec.id))?,
            // The newest set is the same for every model.
            (None, VersionRequest::Newest) => 0,
            (None, _) => self.one_model().map(|_| 0)?,
        };
        let answer = self.waited(deadline, |transport| {
            transport.pull(place, pull.which, deadline)
        })?;
        // The next receive must not hand out an older set than this one.
        let initial = self.initial.take();
        self.initial = initial.filter(|initial| {
            let answer = answer.as_ref();
            answer.is_none_or(|answer| is_newer(initial, answer))
        });
        Ok(answer)
    }

    fn note_loss(&mut self, error: Option<&Error>) {
        // Noted with the first error, so that the next call looks for a successor.
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
            _ => Err(Error::SeveralModels { known: self.ids() }),
        }
    }

    fn not_whole(&self) -> Error {
        Error::NotWhole { models: self.ids() }
    }

    fn ids(&self) -> Vec<ModelId> {
        let models = self.transport.models().iter();
        models.map(|spec| spec.id.clone()).collect()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Otherwise the drop of the transport tells the sender that this worker left in order.
        if std::thread::panicking() {
            self.tell_failure("it panicked");
        }
    }
}

/// The run of a set.
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
