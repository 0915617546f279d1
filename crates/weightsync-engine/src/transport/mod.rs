//! How weights travel: what a scheme is, and the two ends it makes.
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
//! | say what became of it | [`ReceiverTransport::joined`], [`ReceiverTransport::applied`], [`ReceiverTransport::refuse`], [`Outstanding::settle`] |

mod copies;
mod endpoint;
mod image;
mod interrupter;
mod memory;
mod none;

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weightsync_core::{Layout, ModelId, Run, Version, WorkerId};

pub use self::endpoint::Endpoint;
pub use self::image::Image;
pub use self::interrupter::Interrupter;
pub(crate) use self::memory::Memory;
pub use self::memory::{Attached, Handoff, Segment};
pub use self::none::NoSync;
use crate::attributes::Attributes;
use crate::error::{Error, Result, UNNAMED};
use crate::report::{Changes, Outcome, WaitFor, WorkerReport, WorkerStatus};
use crate::set::SetSnapshot;
use crate::setup::DigestPolicy;
use crate::snapshot::Snapshot;

pub use crate::scheme::Registration;
/// Adds a [`Registration`]: `register! { Registration::new("name", parse) }`.
pub use inventory::submit as register;
pub use weightsync_mem::interrupt;
pub use weightsync_mem::{
    BoxedError, CopyOptions, Deadline, Fill, Lateness, Source, WaitStyle, raise_files,
};

/// The moment `timeout` from now; `None` is never, as is a moment beyond the clock's range.
pub(crate) fn deadline(timeout: Option<Duration>) -> Deadline {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// How long a worker on a network looks for a sender that is silent, and of whose end
/// nothing tells, before that counts as dead. One that is stopped by a debugger, or whose
/// machine is suspended, looks the same as one that has died and left a process that
/// keeps its port.
pub const SILENT_SENDER: Duration = Duration::from_secs(5 * 60);

/// A way for weights to travel, with its settings: it makes the two ends.
///
/// **Guarantee.** [`allocate_endpoint`](Self::allocate_endpoint) communicates nothing. What
/// an [`AnyScheme`](crate::AnyScheme) says of it, and the [`Endpoint`], are all
/// that reaches a worker.
pub trait Scheme: fmt::Debug + Send + Sync {
    /// The word by which it is chosen: lower case, digits and hyphens.
    fn name(&self) -> &str;

    /// Its settings that workers need too, as `(key, value)`; an empty value is
    /// a flag. They follow the word in an init info, as text: keys have no comma
    /// and no `=`, values no comma, neither has spaces around it, and no key
    /// comes twice.
    fn settings(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// When a worker gets its first weights: with the rendez-vous, unless the scheme
    /// says otherwise.
    fn first_weights(&self) -> FirstWeights {
        FirstWeights::AtConnect
    }

    /// Decides where workers will find the sender. With a run directory, the
    /// same place for every sender of that directory and these models.
    ///
    /// # Errors
    ///
    /// If the run directory cannot be used, or the scheme has no restarts.
    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint>;

    /// Nobody will [`open`](Self::open) this place: whatever keeps it, such as a socket
    /// whose address the init info names, is released.
    fn release_endpoint(&self, at: &Endpoint) {
        let _ = at;
    }

    /// Makes the trainer's end; from here on workers can join.
    ///
    /// # Errors
    ///
    /// If another sender lives there, or memory, sockets or threads are refused.
    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>>;

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

/// What a scheme can do. The conformance suite asks for what is stated, and
/// that the rest is refused with [`Error::Unsupported`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Weights arrive at all.
    pub weights: bool,
    /// A send reaches workers that have not asked for it.
    pub push: bool,
    /// Several models flip together.
    pub sets: bool,
    /// A send to some workers leaves the others as they are.
    pub subsets: bool,
    /// Workers can be held at a version.
    pub hold: bool,
    /// A worker can ask for the newest version, or for one it names.
    pub pull: bool,
    /// Every version reaches every worker, in order.
    pub every_version: bool,
    /// The trainer can write into the place the workers read.
    pub loan: bool,
    /// A restarted sender is found again.
    pub restarts: bool,
    /// The death of an end is told at once, and not by a timeout.
    pub death: bool,
    /// What was published reaches its workers also if the sender is killed right
    /// after.
    pub outlives: bool,
}

impl Capabilities {
    /// Nothing at all.
    pub const NONE: Self = Self {
        weights: false,
        push: false,
        sets: false,
        subsets: false,
        hold: false,
        pull: false,
        every_version: false,
        loan: false,
        restarts: false,
        death: false,
        outlives: false,
    };

    /// Everything there is, also what a later version of this crate adds: a scheme
    /// that begins with it says what it cannot do.
    pub const ALL: Self = Self {
        weights: true,
        push: true,
        sets: true,
        subsets: true,
        hold: true,
        pull: true,
        every_version: true,
        loan: true,
        restarts: true,
        death: true,
        outlives: true,
    };
}

/// What [`Scheme::open`] opens.
#[derive(Debug)]
#[non_exhaustive]
pub struct Opening<'a> {
    /// Where.
    pub at: &'a Endpoint,
    /// The run the sender belongs to.
    pub run: Run,
    /// The models of the set, in its order.
    pub models: &'a [ModelSpec],
    /// How much room, and how to wait.
    pub options: TransferOptions,
}

/// What every transport is told of room and waiting; one that has no slots
/// takes them as bounds of its own buffers.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TransferOptions {
    /// Versions of a model there is room for in any case.
    pub slots: u8,
    /// Versions there may be room for when workers hold so many.
    pub max_slots: u8,
    /// Older versions that are kept for workers that ask, and to go back to.
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
    /// What else a worker has to know of it: tied tensors, buffers, extra state.
    pub attributes: Attributes,
}

/// Who joins, and on what terms.
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
    /// Whether a sender that is there is heard out although the deadline has come: the
    /// caller only looks whether there is one, looks again if not, and ends by an
    /// [interrupt] what takes too long.
    pub hears_out: bool,
}

/// Which workers a publication is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Targets {
    /// All there are, and those that join later.
    #[default]
    All,
    /// These, and nobody else.
    Workers(Vec<WorkerId>),
}

/// How far [`Outstanding::settle`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The worker has the whole version and has checked it.
    Staged,
    /// The worker has loaded it.
    Applied,
}

/// Which version of a model a worker asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Which {
    /// The newest there is.
    Newest,
    /// This one or a newer one; waits until there is one.
    AtLeast(Version),
    /// This one, if it is still kept.
    Exactly(Version),
}

/// Who is there, and who was, for a sender that waits for workers.
#[derive(Clone, Debug, Default)]
pub struct Attendance {
    /// The workers connected at present, by number.
    pub workers: Vec<WorkerStatus>,
    /// Those that cannot use the models, of whom nobody has been told.
    pub rejected: Vec<WorkerId>,
    /// Those that have joined and are gone, in the order in which they joined, as far as
    /// that is remembered.
    pub gone: Vec<GoneWorker>,
    /// How many have joined so far.
    pub joined: u64,
}

/// A worker that was there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoneWorker {
    /// As it was last.
    pub status: WorkerStatus,
    /// How it went: [`Outcome::Left`], [`Outcome::Failed`], [`Outcome::Died`] or
    /// [`Outcome::Lost`].
    pub how: Outcome,
    /// Of all that joined it was this one, from 1.
    pub joined: u64,
}

/// The trainer's end.
///
/// **Guarantee.** A version becomes visible to a worker whole or not at all,
/// all models of a publication in one step, also if this process is killed at
/// any moment. Dropping it tells the workers and leaves nothing in the system.
pub trait SenderTransport: fmt::Debug + Send + Sync {
    /// Room for the next version of each of these models, in addition to everything
    /// that a worker may still read.
    ///
    /// # Errors
    ///
    /// At the deadline, naming who holds what is in the way.
    fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Box<dyn Staging + '_>>;

    /// The newest version of a model that was published.
    fn version(&self, model: usize) -> Version;

    /// The workers connected at present, by number.
    fn workers(&self) -> Vec<WorkerStatus>;

    /// Waits until `enough`, given who is there and who was, is content. False if the
    /// deadline came first.
    ///
    /// # Errors
    ///
    /// Only of the operating system.
    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool>;

    /// Forgets workers that failed, died or were lost: until they come and go again,
    /// no report has a line of them. A transport that has such lines only once has
    /// nothing to forget.
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

    /// The version of a model that was sent to all last, to read it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        let _ = model;
        Err(Error::Unsupported {
            what: "reading back what was sent",
            scheme: UNNAMED.into(),
        })
    }

    /// The one version of a model that all the targets have, or will have once
    /// they are not held: a partial update keeps the rest of it. What was sent to
    /// all last, unless the transport can send to some workers.
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
    /// Those of [`snapshot`](Self::snapshot); [`Error::NoSuchVersion`] from one
    /// that keeps several and can say which.
    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        let newest = self.snapshot(model)?;
        Ok(newest.filter(|newest| newest.version() == version))
    }

    /// Holds workers at the versions they have, or lets them go on.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn hold(&mut self, workers: &[WorkerId], hold: bool) -> Result<()> {
        let _ = (workers, hold);
        Err(Error::Unsupported {
            what: "holding workers at a version",
            scheme: UNNAMED.into(),
        })
    }
}

/// Room for the next version of some models, that nobody else can see. Dropped
/// without [`publish`](Self::publish), nothing has happened.
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

    /// Has the publication wait for workers that are late already as for all others.
    ///
    /// Without it, a worker that was late for an earlier publication
    /// ([`Outstanding::late`]) and has not moved since is passed over: it gets this one
    /// when it takes the newest, but nobody waits for that. [`Lateness`] decides it.
    fn wait_for_late(&mut self);

    /// Makes what was written the live versions of the targets: in one step for
    /// each worker, whatever the number of models.
    ///
    /// # Errors
    ///
    /// Then nothing was published.
    fn publish(self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>>;
}

/// A publication on its way to the workers. It can be waited for from any
/// thread.
pub trait Outstanding: fmt::Debug + Send + Sync {
    /// What was published: the version of each model, in the order staged.
    fn versions(&self) -> &[(usize, Version)];

    /// Waits until every worker it was for has reached `level`, will not reach
    /// it, or the deadline comes; one line for each. The lines of workers that are passed
    /// over say for how long they have been [late](WorkerReport::late).
    ///
    /// # Errors
    ///
    /// Only of the operating system: what goes wrong at a worker is its line.
    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>>;

    /// Whether [`settle`](Self::settle) would find nothing to wait for. Only
    /// looks: where some lines are made once only, or a wait does more than
    /// wait, this has to be another way of looking.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    fn is_settled(&self, level: Level) -> Result<bool> {
        let wait = match level {
            Level::Staged => WaitFor::Staged,
            Level::Applied => WaitFor::Applied,
        };
        let lines = self.settle(level, Some(Instant::now()))?;
        let mut lines = lines.iter();
        Ok(lines.all(|line| line.outcome.is_final(wait) || line.late.is_some()))
    }

    /// What has changed since the versions before, as far as it is sent so and known by
    /// now.
    fn changes(&self) -> Option<Changes> {
        None
    }

    /// The lines that publishing alone has decided, of workers that will not get
    /// this, or not now; for a send that waits for nobody.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    fn decided(&self) -> Result<Vec<WorkerReport>> {
        Ok(Vec::new())
    }

    /// The deadline of the send has come: workers that have not reached `level` are late.
    /// Later publications pass them over until they move; this one can be waited for
    /// again.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    fn late(&self, level: Level) -> Result<()>;

    /// Nobody waits for this any more: workers whose queue still has no room
    /// will not get this, and [`settle`](Self::settle) says so from here on.
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
/// **Guarantee.** What it hands over is whole and was checked, all models of a
/// publication together. Every wait ends by its deadline, by the sender's death,
/// or by its shutdown, which are told after everything that was sent. Dropping
/// it tells the sender.
pub trait ReceiverTransport: fmt::Debug + Send + Sync {
    /// The models this worker wanted, in the order it named them.
    fn models(&self) -> &[ModelSpec];

    /// The run of the sender.
    fn run(&self) -> Run;

    /// Waits for what this worker has not been handed yet; `None` if the
    /// deadline comes first.
    ///
    /// # Errors
    ///
    /// [`Error::SenderDied`], [`Error::SenderClosed`].
    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>>;

    /// The newest there is, without waiting, also if it was handed over before.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    fn latest(&mut self) -> Result<Option<SetSnapshot>>;

    /// Asks once for the set with a version of a model, by the model's place
    /// among [`models`](Self::models), and waits for it; `None` if the deadline
    /// comes first, and then nobody is asked any more.
    ///
    /// What comes is the answer to this question and no other, whatever is
    /// published meanwhile. It takes nothing from what [`next`](Self::next) hands
    /// over, but that what came in an answer is not handed over again while it is
    /// the newest.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`] if it is no longer kept, [`Error::Unsupported`],
    /// and those of [`next`](Self::next).
    fn pull(
        &mut self,
        model: usize,
        which: Which,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        let _ = (model, which, deadline);
        Err(Error::Unsupported {
            what: "asking for a version",
            scheme: UNNAMED.into(),
        })
    }

    /// What ends a wait in [`next`](Self::next) from another thread. Without it
    /// a worker has no [background receiver](crate::Receiver::in_background).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    fn interrupter(&self) -> Result<Interrupter> {
        Err(Error::Unsupported {
            what: "ending a wait from another thread",
            scheme: UNNAMED.into(),
        })
    }

    /// Tells the sender that this worker's own rendez-vous is over: its models fit.
    /// Called only where the [first weights](FirstWeights) come with the first send, as
    /// elsewhere it is over with the first version that is [applied](Self::applied); and
    /// then a sender that waits for workers is to count this one from here on.
    ///
    /// # Errors
    ///
    /// As [`applied`](Self::applied).
    fn joined(&mut self) -> Result<()> {
        Ok(())
    }

    /// Tells the sender that the worker runs this from here on.
    ///
    /// # Errors
    ///
    /// Only of the operating system; a sender that is gone needs no telling.
    fn applied(&mut self, set: &SetSnapshot) -> Result<()>;

    /// Tells the sender that the worker cannot use this, or, without a set,
    /// none of its models at all, and why.
    ///
    /// # Errors
    ///
    /// As [`applied`](Self::applied).
    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()>;
}
