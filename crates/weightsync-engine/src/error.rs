//! What can go wrong, and what to do about it.

mod kind;
mod make;
mod of_memory;
mod text;

pub use self::kind::ErrorKind;
pub(crate) use self::make::place_of;
pub(crate) use self::text::misfit_text;

use std::path::PathBuf;
use std::time::Duration;

use weightsync_core::{
    Dtype, Epoch, LayoutMismatch, ModelId, Remedy, Run, Version, WorkerId, WorkerReport,
};
use weightsync_mem::Holder;

use self::text::{
    expected_among, gone_text, last_text, list, missing_text, names, pid_text, refusals_text,
    sent_text, some_names, versions_text,
};
use crate::attributes::AttributesError;
use crate::path::ModelPathError;
use crate::report::Report;
use crate::scheme::AnyScheme;
use crate::worker::WorkerError;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of the public API.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The weights offered are not those the model was set up with. Nothing
    /// was sent; every worker goes on with the version it had.
    #[error("these are not the weights of model {model}: {mismatch}")]
    WrongWeights {
        /// The model.
        model: ModelId,
        /// Missing, unknown and differing tensors by name.
        mismatch: Box<LayoutMismatch>,
    },
    /// The sender's model is not the one this worker has room for.
    #[error("the sender's {model} does not fit this worker's model: {}", misfit_text(.mismatch))]
    WrongModel {
        /// The model.
        model: ModelId,
        /// Missing, unknown and differing tensors by name.
        mismatch: Box<LayoutMismatch>,
    },
    /// A worker cannot use the model; it said so while connecting.
    #[error("{model} was refused by {}", refusals_text(.refusals))]
    Refused {
        /// The model.
        model: ModelId,
        /// Which workers, and why; at least one.
        refusals: Vec<(WorkerId, String)>,
    },
    /// Not every worker has applied what was sent.
    #[error("{report}")]
    NotApplied {
        /// What became of the send.
        report: Box<Report>,
    },
    /// Not every expected worker had joined and loaded the initial weights by the deadline. Workers
    /// that had joined stay connected if the sender stays open.
    #[error(
        "only {} of {expected} workers joined {model} within {waited:.1?}{}{}: \
         did the others start, and do they call connect with this init info, and then receive?",
        expected_among(.expected, .joined, .missing), missing_text(.missing), gone_text(.gone)
    )]
    MissingWorkers {
        /// The model.
        model: ModelId,
        /// How many were expected.
        expected: usize,
        /// The workers that joined.
        joined: Vec<WorkerId>,
        /// The workers that are missing, if they were expected by number.
        missing: Vec<WorkerId>,
        /// Workers that joined, went without leaving in order, and are not back.
        gone: Vec<WorkerReport>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The sender is there, but had not published its first version by the
    /// deadline.
    #[error(
        "the sender of {model} had no weights yet after {waited:.1?}: have the trainer call connect \
         or send, or wait longer"
    )]
    NoInitialWeights {
        /// The model.
        model: ModelId,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The sender died; what it published last stays readable.
    #[error(
        "the sender{} died; the last whole version stays readable; start the trainer again: with a \
         run directory this worker finds it, without one give the worker its new init info",
        pid_text(.pid)
    )]
    SenderDied {
        /// Its process, if it is known.
        pid: Option<u32>,
    },
    /// The sender shut down in order.
    #[error("the sender shut down")]
    SenderClosed,
    /// No sender answered at the address before the deadline.
    #[error(
        "no sender answered at {address} within {waited:.1?}{}: is the trainer running, \
         has it called connect, and does the init info belong to this run?",
        last_text(.last)
    )]
    NoSender {
        /// The address tried.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// How the last attempt ended, if that is known.
        last: Option<String>,
    },
    /// The sender turned this worker away.
    #[error("the sender refused this worker: {reason}")]
    Denied {
        /// The sender's words.
        reason: String,
    },
    /// The sender belongs to a run that a newer one has replaced.
    #[error(
        "the sender's run has {got}, but this worker has already seen {seen}: \
         a newer trainer has replaced this one"
    )]
    Fenced {
        /// The highest epoch seen before.
        seen: Epoch,
        /// The epoch of the sender that answered.
        got: Epoch,
    },
    /// The address is taken: by another sender, or by another program.
    #[error(
        "cannot listen at {address}: another sender or another program uses it; stop that process, \
         or give this sender its own port, name or run directory"
    )]
    AddressInUse {
        /// The address asked for.
        address: String,
    },
    /// A process that forked tried to use an end its parent opened.
    #[error(
        "this end was opened by process {owner} and cannot be used in its forked child {child}: \
         open another end in the child from the init info"
    )]
    Forked {
        /// The process that opened the end.
        owner: u32,
        /// The process that made the call.
        child: u32,
    },
    /// No such model.
    #[error("there is no model {model:?}; there is {}", names(.known))]
    NoSuchModel {
        /// The name asked for.
        model: String,
        /// The models there are.
        known: Vec<ModelId>,
    },
    /// The call is about one model, and there are several.
    #[error("there are several models ({}): say which, or send or receive a set", names(.known))]
    SeveralModels {
        /// The models there are.
        known: Vec<ModelId>,
    },
    /// A set whose models are fed by several senders: nothing could flip it in
    /// one step, so nothing was sent.
    #[error(
        "{} are fed by several senders and cannot change together: set them up as one sender's \
         models, or send them one by one",
        .models.join(", ")
    )]
    MixedSenders {
        /// The models of the set.
        models: Vec<String>,
    },
    /// The options of a send name one model, but its source is another.
    #[error("the send names {named:?}, but its source is {}", .got.join(", "))]
    OtherModel {
        /// The model the options name.
        named: String,
        /// The models that are sent.
        got: Vec<String>,
    },
    /// A loan holds bytes of an older version where nothing was written, so it cannot be a part of
    /// a version.
    #[error("the loan of {model} is a whole version: write all of it, or send the part")]
    WholeLoan {
        /// The model.
        model: ModelId,
    },
    /// One worker was given weights twice in one call.
    #[error("{worker} is named twice: give it one source")]
    SameWorkerTwice {
        /// The worker.
        worker: WorkerId,
    },
    /// A model was named or set up a second time.
    #[error("{model} is named twice; each model of a set has its own name, and is named once")]
    SameModelTwice {
        /// The model.
        model: ModelId,
    },
    /// A set without models.
    #[error("the set is empty: name at least one model")]
    EmptySet,
    /// The first weights of some models are missing.
    #[error("connect needs the first weights of every model; {} is missing", names(.missing))]
    MissingModels {
        /// The models without.
        missing: Vec<ModelId>,
    },
    /// The registered weights of a model were asked for, and there are none.
    #[error("no source of {model} was registered; register one at setup, or pass the weights")]
    NotRegistered {
        /// The model.
        model: ModelId,
    },
    /// A model came for which the worker has nothing to load it into.
    #[error(
        "there is no loader for {model}; there is one for {}: add it, or take only some models",
        if .known.is_empty() { "nothing".into() } else { .known.join(", ") }
    )]
    NoLoader {
        /// The model.
        model: String,
        /// The models that can be loaded.
        known: Vec<String>,
    },
    /// A load failed midway, and so did the way back.
    #[error(
        "{} is half loaded and must not be used; receive until a version has been loaded whole",
        names(.models)
    )]
    NotWhole {
        /// The models of this worker.
        models: Vec<ModelId>,
    },
    /// This end has reported a failure to its sender, which sends it nothing more.
    #[error(
        "this worker told its sender that it failed, and receives nothing more ({reason}): connect \
         again from the init info"
    )]
    Withdrawn {
        /// What the sender was told.
        reason: String,
    },
    /// A thread that holds a guard of a model asked for something that has to
    /// wait until it is dropped.
    #[error("{call} waits for this thread's own guard of the model: drop the guard first")]
    GuardHeld {
        /// The call.
        call: &'static str,
    },
    /// Other threads held guards of the models until the deadline.
    #[error(
        "{call}: other threads still held guards of the models after {waited:.1?}: a forward, or a \
         block that keeps the models unchanged, has not ended; try again"
    )]
    GuardsInUse {
        /// The call.
        call: &'static str,
        /// How long they were waited for.
        waited: Duration,
    },
    /// Code that was called back panicked; the panic ended there.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// Which.
        what: &'static str,
        /// What the panic said.
        message: String,
    },
    /// A partial update without a single tensor.
    #[error("the partial update of {model} carries no tensor")]
    EmptyUpdate {
        /// The model.
        model: ModelId,
    },
    /// A partial update of a model that was never sent whole.
    #[error(
        "{model} was never sent to all of these workers, so nothing of it can be kept: send it whole"
    )]
    NothingToKeep {
        /// The model.
        model: ModelId,
    },
    /// The version asked for is not kept any more, or does not exist yet.
    #[error(
        "{asked} of {model} is not kept, but {}: ask for one of these, or have the sender keep a \
         history",
        versions_text(.known)
    )]
    NoSuchVersion {
        /// The model.
        model: ModelId,
        /// What was asked for.
        asked: Version,
        /// Some versions that are kept, the newest first.
        known: Vec<Version>,
    },
    /// Every slot of a model is pinned and none came free before the deadline.
    #[error(
        "all {slots} slots of {model} are pinned after {waited:.1?}: {}; drop those snapshots, \
         give the sender more slots, or let it grow",
        list(.holders, "; ")
    )]
    AllSlotsPinned {
        /// The model.
        model: ModelId,
        /// How many slots it has.
        slots: u8,
        /// How long the sender waited.
        waited: Duration,
        /// Who holds them.
        holders: Vec<Holder>,
    },
    /// Workers and the history would need every slot of a model, so that no later version could be
    /// written. Nothing was sent.
    #[error(
        "publishing this version of {model} would leave no slot for the next: \
         all {slots} would be in use by workers with versions of their own, held workers \
         or the history; send to all, release workers, or keep fewer old versions"
    )]
    SlotsExhausted {
        /// The model.
        model: ModelId,
        /// How many slots it has.
        slots: u8,
    },
    /// The workers of a partial update do not all have the same version, so
    /// there is no one version to keep the rest of. Nothing was sent.
    #[error(
        "these workers do not have the same version of {model}, but {}: send it whole, or to \
         workers that have the same",
        list(.versions, ", ")
    )]
    Diverged {
        /// The model.
        model: ModelId,
        /// What they have, oldest first; `Version::NONE` where there is none.
        versions: Vec<Version>,
    },
    /// A version number that does not grow.
    #[error("{got} cannot follow {newest}: versions only grow within a run")]
    VersionNotNewer {
        /// The newest version.
        newest: Version,
        /// The one offered.
        got: Version,
    },
    /// One version number for several sources, each of which becomes a version of its own. Nothing
    /// was sent.
    #[error(
        "expected no version number for {sources} sources, got {version}: each source becomes a \
         version of its own, so give a number with one source only"
    )]
    SameVersionTwice {
        /// The number.
        version: Version,
        /// How many sources there are.
        sources: usize,
    },
    /// An earlier asynchronous send has not reached every worker yet.
    #[error(
        "an earlier send ({}) is still on its way to some workers, expected at most {allowed} such \
         sends: wait for it, or raise the async_send_limit of the sender's setup",
        sent_text(.versions)
    )]
    SendPending {
        /// What the oldest such send published.
        versions: Vec<(ModelId, Version)>,
        /// How many sends may be on their way at once.
        allowed: usize,
    },
    /// Another trainer claims the epoch of the run that this worker knows, so the worker cannot
    /// tell which of the two is newer.
    #[error(
        "the sender's {got} has the epoch of {knew}, which this worker has seen: start a trainer \
         of a higher epoch"
    )]
    ConflictingRun {
        /// The run the worker knows.
        knew: Run,
        /// The one that answered.
        got: Run,
    },
    /// The scheme cannot do this.
    #[error("{scheme} cannot do this: {what}; choose a scheme that can")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// The scheme.
        scheme: String,
    },
    /// No scheme of that name.
    #[error(
        "there is no scheme {got:?} here: expected one of {}{}",
        .known.join(", "),
        meant(got, known)
    )]
    UnknownScheme {
        /// What was asked for.
        got: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// A setting of a scheme that it does not have, or a value it cannot have.
    #[error("{setting:?}: expected {expected}, got {got:?}")]
    BadSetting {
        /// The setting.
        setting: String,
        /// What is possible.
        expected: String,
        /// What came.
        got: String,
    },
    /// A version's bytes that are not as many as its layout has.
    #[error("expected a version of {expected} bytes, got {got}")]
    WrongImage {
        /// Bytes of the layout.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// A call that does not fit the state its session is in.
    #[error("{call} cannot be called {state}: {fix}")]
    WrongOrder {
        /// The call.
        call: &'static str,
        /// The session's state, as words that follow the call.
        state: &'static str,
        /// What to do.
        fix: &'static str,
    },
    /// An error of a transport that is not this crate's.
    #[error("{source}")]
    Transport {
        /// What it says.
        source: Box<dyn std::error::Error + Send + Sync>,
        /// What it says to do about it.
        remedy: Remedy,
    },
    /// No such tensor.
    #[error("the model has no tensor {name:?}; it has {}", some_names(.known))]
    NoSuchTensor {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// A tensor was asked for as another type than it has.
    #[error("tensor {name:?} is {got}, not {expected}")]
    WrongDtype {
        /// The tensor.
        name: String,
        /// The type asked for.
        expected: Dtype,
        /// The type it has.
        got: Dtype,
    },
    /// A tensor's data has another length than its dtype and shape say.
    #[error("tensor {name:?} of {dtype} {shape:?} takes {expected} bytes, but {got} were given")]
    WrongLength {
        /// The tensor.
        name: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// What the shape takes.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// A tensor cannot be extracted.
    #[error("tensor {name:?} cannot be extracted: {source}")]
    Extract {
        /// The tensor.
        name: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Weights could not be loaded into the worker's model. The worker goes on
    /// with the version it had, and the sender is told.
    #[error("tensor {name:?} cannot be loaded: {source}")]
    Load {
        /// The tensor.
        name: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file could not be used.
    #[error("{action} {path}: {source}", path = .path.display())]
    File {
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Another process holds a file of the run directory, and did not release
    /// it by the deadline.
    #[error(
        "{path} was still locked by another process after {waited:.1?}: one that starts or connects \
         in this run directory holds it for a moment; try again, and if it lasts, end that process",
        path = .path.display()
    )]
    FileLocked {
        /// The file.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// An init info that was not made by `init_info`.
    #[error("this init info cannot be used: {0}")]
    BadInitInfo(String),
    /// The operating system refused something.
    #[error("{action} failed: {source}")]
    Os {
        /// What was tried.
        action: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// A path that leads to no model.
    #[error(transparent)]
    Path(#[from] ModelPathError),
    /// What describes a model in addition to its layout does not hold together.
    #[error(transparent)]
    Attributes(#[from] AttributesError),
    /// A layout or a name is not a valid one.
    #[error(transparent)]
    Layout(#[from] weightsync_core::Error),
    /// A failure in shared memory without a variant of its own; see [`kind`](Self::kind).
    #[error(transparent)]
    Memory(MemoryError),
    /// Worker processes.
    #[error(transparent)]
    Worker(WorkerError),
    /// The [check](crate::interruptible) of the calling thread ended its wait.
    #[error("the call was interrupted while it waited")]
    Interrupted,
}

/// A failure in shared memory; [`Error::kind`] and [`Error::remedy`] say what to make of it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct MemoryError(pub(crate) weightsync_mem::Error);

impl MemoryError {
    /// The relay of this host is gone, and the sender may be there.
    #[doc(hidden)]
    pub fn is_relay_gone(&self) -> bool {
        matches!(self.0, weightsync_mem::Error::RelayGone)
    }
}

impl From<WorkerError> for Error {
    fn from(error: WorkerError) -> Self {
        match error {
            WorkerError::Interrupted { begun: false } => Self::Interrupted,
            error => Self::Worker(error),
        }
    }
}

/// In place of a scheme's text, where a transport does not know it.
pub(crate) const UNNAMED: &str = "this transport";

/// The scheme that a word may stand for.
fn meant(got: &str, known: &[String]) -> String {
    let got = got.to_lowercase().replace('_', "-");
    if matches!(&*got, "nccl" | "gloo" | "mpi" | "process-group") {
        return "; a process group of torch is no scheme, but has ends of its own (weightsync.process_group)"
            .into();
    }
    let is_like = |name: &&String| {
        let start = name.len().min(got.len()).min(4);
        start >= 3 && name.get(..start) == got.get(..start)
    };
    let like = known.iter().find(is_like);
    like.map_or_else(String::new, |name| format!("; {name:?} is like it"))
}

impl Error {
    /// The error with the scheme's text, where its transport did not know it.
    pub(crate) fn by(self, scheme: &AnyScheme) -> Self {
        match self {
            Self::Unsupported { what, scheme: text } if text == UNNAMED => {
                Self::unsupported(what, scheme)
            }
            error => error,
        }
    }

    /// Whether the sender has shut down in order: the usual end of a worker's
    /// loop.
    pub fn is_sender_closed(&self) -> bool {
        matches!(self, Self::SenderClosed)
    }
}
