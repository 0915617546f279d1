//! How weights travel: schemes, and the two ends that each makes.
//!
//! **Writing one of your own** takes a [`Scheme`] (a small factory) and the two
//! ends it makes, a [`SenderTransport`] with its [`Staging`], and a
//! [`ReceiverTransport`]. Everything around them is this crate's: comparing
//! layouts, casts, partial updates, deadlines, reports, sets, loading with its
//! way back. `weightsync-conformance` runs its suite against any scheme, and
//! `docs/write-your-own-transport.md` walks through one.
//!
//! | step of the journey | here |
//! |---|---|
//! | stage | [`SenderTransport::stage`]: room next to the live versions |
//! | transport | [`Staging::write`], or the trainer writes into [`Staging::tensors_mut`] |
//! | swap | [`Staging::publish`]: one atomic step for each worker |
//! | verify, hand over | [`ReceiverTransport::next`] |
//! | report | [`ReceiverTransport::joined`], [`ReceiverTransport::applied`], [`ReceiverTransport::refuse`], [`Outstanding::settle`] |

mod capabilities;
mod copies;
mod endpoint;
mod image;
mod interrupter;
mod memory;
mod none;
pub mod polled;
mod random;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
pub use weightsync_core::{Attendance, GoneWorker, Level, Targets};
use weightsync_core::{
    Layout, ModelId, Run, SenderStatus, Version, WorkerId, WorkerReport, WorkerStatus,
};

pub use self::capabilities::Capabilities;
pub use self::endpoint::Endpoint;
pub use self::image::Image;
pub use self::interrupter::Interrupter;
pub(crate) use self::memory::LocalMemory;
pub use self::memory::{Attached, Handoff, Segment};
pub use self::none::NoSync;
pub use self::random::random;
use crate::attributes::Attributes;
use crate::error::{Error, Result, UNNAMED};
use crate::log_limiter;
use crate::report::Changes;
use crate::set::SetSnapshot;
use crate::setup::DigestPolicy;
use crate::snapshot::Snapshot;

pub use crate::scheme::Registration;
pub use crate::send_history::SendHistory;
/// Adds a [`Registration`]: `register! { Registration::new("name", parse) }`.
pub use inventory::submit as register;
pub use weightsync_mem::{
    Backoff, BoxedError, CopyOptions, Deadline, Fill, Lateness, Source, WaitStyle, interrupt, left,
    passed, raise_files, threads,
};

/// The moment `timeout` from now; `None` is never, as is a moment beyond the clock's range.
pub fn deadline(timeout: Option<Duration>) -> Deadline {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// How long a worker on a network looks for a silent sender before that sender counts as dead. A
/// sender that a debugger has stopped, or whose machine is suspended, cannot be told from a dead
/// sender whose port another process keeps open.
pub const SILENT_SENDER: Duration = Duration::from_secs(5 * 60);

/// A way for weights to travel, with its settings. It makes the two ends.
///
/// **Guarantee.** [`allocate_endpoint`](Self::allocate_endpoint) communicates nothing. Only the text
/// of the [`AnyScheme`](crate::AnyScheme) and the [`Endpoint`] reach a worker.
pub trait Scheme: fmt::Debug + Send + Sync {
    /// The name that chooses the scheme: lower case, digits and hyphens.
    fn name(&self) -> &str;

    /// The settings that workers need too, as `(key, value)`; an empty value is a flag. An init info
    /// holds them as text after the name. So keys have no comma and no `=`, values have no comma,
    /// neither has spaces around it, and each key comes once.
    fn settings(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// The capabilities of the scheme.
    fn capabilities(&self) -> Capabilities;

    /// When a worker gets its first weights: with the rendez-vous, unless the scheme
    /// says otherwise.
    fn first_weights(&self) -> FirstWeights {
        FirstWeights::AtConnect
    }

    /// Decides where workers will find the sender. With a run directory, the address is the same for
    /// every sender of that directory and these models.
    ///
    /// # Errors
    ///
    /// If the run directory cannot be used, or the scheme has no restarts.
    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint>;

    /// Releases an endpoint that no sender will [`open`](Self::open), and what reserves it, such as a
    /// socket with the address in the init info.
    fn release_endpoint(&self, at: &Endpoint) {
        let _ = at;
    }

    /// Makes the trainer's end; from here on workers can join.
    ///
    /// # Errors
    ///
    /// If another sender lives there, or memory, sockets or threads are refused.
    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>>;

    /// Asks the sender at the endpoint for its status, from another process. Each wait takes at most
    /// `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`]; [`Error::NoSender`] if nobody is there.
    fn ask_status(&self, at: &Endpoint, timeout: Duration) -> Result<SenderStatus> {
        let _ = (at, timeout);
        Err(Error::unsupported(
            "being asked for its status",
            self.name(),
        ))
    }

    /// Makes a worker's end: joins the sender at the endpoint, waiting for it
    /// until the deadline if it is not there yet.
    ///
    /// # Errors
    ///
    /// [`Error::NoSender`] at the deadline, and the sender's refusal.
    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>>;
}

/// When a worker gets its first weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstWeights {
    /// With the rendez-vous: both ends return from `connect` with them.
    #[default]
    AtConnect,
    /// With the first send. The rendez-vous moves none: a sender's `connect` compares
    /// the weights it is given, sends none of them and waits until the workers are
    /// there; a worker's returns with nothing, and its models stay as they are until
    /// the first send.
    AtFirstSend,
}

/// The argument of [`Scheme::open`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Opening<'a> {
    /// The sender's endpoint.
    pub at: &'a Endpoint,
    /// The run the sender belongs to.
    pub run: Run,
    /// The models of the set, in its order.
    pub models: &'a [ModelSpec],
    /// How much room, and how to wait.
    pub options: TransferOptions,
    /// What the sender notes of its sends, for a transport that answers programs which ask for the
    /// [status](SenderTransport::fill_status).
    pub history: &'a Arc<SendHistory>,
}

/// Logs that a worker finds the end of its run, and waits for another one of the same init info.
pub fn waits_for_a_restart(address: &str, ended: &str) {
    log_limiter::warn_rarely(&format!(
        "{address}: {ended}; this worker waits for a trainer that starts again with the same init info"
    ));
}

/// The limits of memory and waiting for a transport. A transport without slots takes them as bounds
/// of its own buffers.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TransferOptions {
    /// The number of versions of each model that always have room.
    pub slots: u8,
    /// The most versions of each model that may have room, if workers hold that many.
    pub max_slots: u8,
    /// The number of older versions to keep, for workers that ask and for going back.
    pub history: u8,
    /// How an end waits.
    pub wait: WaitStyle,
    /// When the digest of a version is made.
    pub digest: DigestPolicy,
}

impl Default for TransferOptions {
    fn default() -> Self {
        let weightsync_mem::SegmentOptions {
            slots,
            max_slots,
            history,
            wait,
            ..
        } = weightsync_mem::SegmentOptions::default();
        Self {
            slots,
            max_slots,
            history,
            wait,
            digest: DigestPolicy::default(),
        }
    }
}

/// One model as it travels. A transport hands it to workers in any serde format;
/// reading it back goes through all checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Its name.
    pub id: ModelId,
    /// Its tensors.
    pub layout: Layout,
    /// Its attributes: tied tensors, buffers, extra state.
    pub attributes: Attributes,
}

/// The worker that joins, and its terms.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Joining {
    /// The worker's number.
    pub worker: WorkerId,
    /// The highest epoch it has seen: a sender below it must be refused.
    pub seen: weightsync_core::Epoch,
    /// The models of the set, as the init info names them, in its order.
    pub models: Vec<ModelId>,
    /// Which of them this worker wants.
    pub wanted: Vec<usize>,
    /// Where the worker runs its models: a label such as `cpu` or `cuda:0`.
    pub device: String,
    /// How it waits.
    pub wait: WaitStyle,
    /// Whether this is one of several attempts by the caller. An attempt lets a sender that answers
    /// finish, although the deadline has come; an [interrupt] ends an attempt that takes too long.
    pub single_attempt: bool,
}

/// Which version of a model a worker asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VersionRequest {
    /// The newest there is.
    Newest,
    /// This one or a newer one; waits until there is one.
    AtLeast(Version),
    /// This one, if it is still kept.
    Exactly(Version),
}

/// The trainer's end.
///
/// **Guarantee.** A version becomes visible to a worker whole or not at all, and all models of a
/// publication in one step, even if this process is killed at any moment. Dropping this end tells
/// the workers and leaves nothing in the system.
pub trait SenderTransport: fmt::Debug + Send + Sync {
    /// Room for the next version of each of these models, in addition to everything
    /// that a worker may still read.
    ///
    /// # Errors
    ///
    /// At the deadline, naming the workers that hold the room.
    fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Box<dyn Staging + '_>>;

    /// The run of this end, if the place that the weights go through counts the runs. Otherwise it is
    /// the run that [`Scheme::open`] was given.
    fn run(&self) -> Option<Run> {
        None
    }

    /// The newest version of a model that was published.
    fn version(&self, model: usize) -> Version;

    /// The workers connected at present, by number.
    fn workers(&self) -> Vec<WorkerStatus>;

    /// Puts what this end knows into the sender's status: at least the workers.
    fn fill_status(&self, status: &mut SenderStatus) {
        status.workers = self.workers();
    }

    /// Waits until `enough` returns true for the current attendance. False at the deadline.
    ///
    /// # Errors
    ///
    /// Only of the operating system.
    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool>;

    /// Forgets workers that failed, died or were lost: later reports have no line of them until they
    /// come back. A transport that reports each loss once has nothing to forget.
    ///
    /// # Errors
    ///
    /// In a forked child.
    fn forget(&mut self, workers: &[WorkerId]) -> Result<()> {
        let _ = workers;
        Ok(())
    }

    /// Takes the workers that cannot use the models, with the reason.
    fn take_rejected(&mut self) -> Vec<(WorkerId, String)>;

    /// A snapshot of the version that was last sent to all workers.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        let _ = model;
        // A transport does not know its scheme's text: the sender puts the text in.
        Err(Error::unsupported("reading back what was sent", UNNAMED))
    }

    /// The version of a model that all targets have, or will have once they are released. A partial
    /// update keeps the rest of it. For a transport that cannot send to some workers, this is the
    /// version sent last.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], or one that names the versions if they differ.
    fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>> {
        let _ = targets;
        self.snapshot(model)
    }

    /// An older version of a model, if it is still kept.
    ///
    /// # Errors
    ///
    /// Those of [`snapshot`](Self::snapshot); [`Error::NoSuchVersion`] from a transport that keeps
    /// several versions and can name them.
    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        let newest = self.snapshot(model)?;
        Ok(newest.filter(|newest| newest.version() == version))
    }

    /// Holds workers at the versions they have, or releases them.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn hold(&mut self, workers: &[WorkerId], hold: bool) -> Result<()> {
        let _ = (workers, hold);
        Err(Error::unsupported("holding workers at a version", UNNAMED))
    }
}

/// Room for the next version of some models, which no worker can see. Dropping it without
/// [`publish`](Self::publish) changes nothing.
pub trait Staging: fmt::Debug {
    /// Every tensor's place, in layout order: contiguous, row-major,
    /// little-endian. They hold bytes of some older version at first.
    ///
    /// # Panics
    ///
    /// If the model is not one of those staged.
    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]>;

    /// One tensor's place, by its index in the layout.
    ///
    /// # Panics
    ///
    /// If the model is not one of those staged, or has no such tensor.
    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8];

    /// Writes every tensor of a model, in layout order, in one pass over the
    /// source. There is one source per tensor, of its length.
    ///
    /// # Errors
    ///
    /// The first failure of a source; the room can be written again.
    fn write(&mut self, model: usize, sources: &[Source<'_>], options: CopyOptions) -> Result<()>;

    /// Numbers the next version of a model; without it, it is one above the
    /// highest number so far.
    ///
    /// # Errors
    ///
    /// If the number does not grow.
    fn number(&mut self, model: usize, version: Version) -> Result<()>;

    /// Makes the publication wait for workers that are late already, as for all others.
    ///
    /// Without it, a worker that was late for an earlier publication
    /// ([`Outstanding::late`]) and has not moved since is passed over: the worker gets this
    /// publication when it takes the newest, but no send waits for that. [`Lateness`] decides it.
    fn wait_for_late(&mut self);

    /// Makes the staged versions live for the targets: for each worker in one step, whatever the
    /// number of models.
    ///
    /// # Errors
    ///
    /// Then nothing was published.
    fn publish(self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>>;
}

/// A publication on its way to the workers. Any thread can wait for it.
pub trait Outstanding: fmt::Debug + Send + Sync {
    /// The published version of each model, in the order staged.
    fn versions(&self) -> &[(usize, Version)];

    /// Waits until every target has reached `level` or will not reach it, or until the deadline.
    /// Returns one line for each target. The lines of workers that are passed over say for how long
    /// they have been [late](WorkerReport::late).
    ///
    /// # Errors
    ///
    /// Only of the operating system: a failure of a worker is the worker's line.
    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>>;

    /// Whether [`settle`](Self::settle) would find nothing to wait for. The call must have no side
    /// effects: a transport whose `settle` uses up lines, or does more than wait, overrides this.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    fn is_settled(&self, level: Level) -> Result<bool> {
        // With a deadline that has come, `settle` looks once and does not wait.
        let lines = self.settle(level, Some(Instant::now()))?;
        let mut lines = lines.iter();
        // A worker that is passed over does not become final by waiting, so it counts as settled.
        Ok(lines.all(|line| line.outcome.is_final(level) || line.late.is_some()))
    }

    /// The changes since the versions before, if changes are encoded and known by now.
    fn changes(&self) -> Option<Changes> {
        None
    }

    /// The lines that are final without a wait: of workers that will not get this version, or not
    /// now. For a send that does not wait.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    fn decided(&self) -> Result<Vec<WorkerReport>> {
        Ok(Vec::new())
    }

    /// Marks workers that have not reached `level` as late, at the deadline of the send. Later
    /// publications pass them over until they move. This one can still be waited for.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    fn late(&self, level: Level) -> Result<()>;

    /// Ends the wait for room: workers whose queue has none will not get this publication, and
    /// [`settle`](Self::settle) says so from here on.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    fn give_up(&self) -> Result<()> {
        Ok(())
    }
}

/// A worker's end.
///
/// **Guarantee.** Every set that this end hands over is whole and was checked, with all models of a
/// publication together. Every wait ends by its deadline, or by the sender's death or shutdown,
/// which come after everything that was sent. Dropping this end tells the sender.
pub trait ReceiverTransport: fmt::Debug + Send + Sync {
    /// The models this worker wanted, in the order it named them.
    fn models(&self) -> &[ModelSpec];

    /// The run of the sender.
    fn run(&self) -> Run;

    /// Waits for a set that this worker has not been handed yet; `None` at the deadline.
    ///
    /// # Errors
    ///
    /// [`Error::SenderDied`], [`Error::SenderClosed`].
    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>>;

    /// The newest set, without waiting, even if it was handed over before.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    fn latest(&mut self) -> Result<Option<SetSnapshot>>;

    /// How many bytes of weights this end has moved since it joined, as they were encoded: over a
    /// network, or out of a store. `None` if it moves none, but reads memory that another process
    /// fills.
    fn travelled(&self) -> Option<u64> {
        None
    }

    /// Asks once for the set with a version of a model, by the model's place among
    /// [`models`](Self::models), and waits for the answer. `None` at the deadline; the question is
    /// withdrawn then.
    ///
    /// The result answers this question, whatever is published meanwhile. [`next`](Self::next) still
    /// hands over every other set. It does not hand over the answer again while the answer is the
    /// newest set.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`] if it is no longer kept, [`Error::Unsupported`],
    /// and those of [`next`](Self::next).
    fn pull(
        &mut self,
        model: usize,
        which: VersionRequest,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        let _ = (model, which, deadline);
        Err(Error::unsupported("asking for a version", UNNAMED))
    }

    /// A handle for other threads to end a wait in [`next`](Self::next). A transport without one has
    /// no [background receiver](crate::Receiver::in_background).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn interrupter(&self) -> Result<Interrupter> {
        Err(Error::unsupported(
            "ending a wait from another thread",
            UNNAMED,
        ))
    }

    /// Tells the sender that this worker has joined and that its models fit. A sender that waits for
    /// workers counts this one from here on. Called only if the [first weights](FirstWeights) come
    /// with the first send. Otherwise the first version that is [applied](Self::applied) says so.
    ///
    /// # Errors
    ///
    /// As [`applied`](Self::applied).
    fn joined(&mut self) -> Result<()> {
        Ok(())
    }

    /// Tells the sender that the worker runs this set from here on.
    ///
    /// # Errors
    ///
    /// Only of the operating system; a sender that is gone is no error.
    fn applied(&mut self, set: &SetSnapshot) -> Result<()>;

    /// Tells the sender why the worker cannot use a set, or, without a set, any version of its
    /// models.
    ///
    /// # Errors
    ///
    /// As [`applied`](Self::applied).
    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()>;
}
