use std::{convert::Infallible, io, path::PathBuf, time::Duration};

use weightsync_engine::{WorkerId, worker::WorkerError};

use crate::collector::{Task, WorkerEnding};

/// Why collecting or training failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A policy was built from weights that lack one of its tensors.
    #[error("the weights have no tensor `{name}`, which the policy needs")]
    MissingTensor {
        /// The tensor looked for.
        name: String,
    },
    /// A tensor of a policy has another number of elements than its neighbours
    /// imply.
    #[error("tensor `{name}` has {got} elements, the policy needs {expected}")]
    TensorLen {
        /// The tensor.
        name: String,
        /// Elements needed.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// A tensor of a policy that is to be a probability is none.
    #[error("tensor `{name}` is {got}: expected a probability, from 0 to 1")]
    NoProbability {
        /// The tensor.
        name: String,
        /// Its element.
        got: f32,
    },
    /// Frames are not shaped as asked for, or a field's length does not match.
    #[error("expected frames of shape {expected:?}, got {got:?}, or a field is cut")]
    FrameShape {
        /// The shape asked for.
        expected: Vec<usize>,
        /// The shape claimed.
        got: Vec<usize>,
    },
    /// There is no built-in task of that name.
    #[error("there is no built-in task {name:?}: expected one of {}", task_names())]
    NoSuchTask {
        /// The name.
        name: String,
    },
    /// Frames hold an action that the task does not have.
    #[error("action {action} of a task whose actions are 0 to {}", .actions.saturating_sub(1))]
    NoSuchAction {
        /// The action.
        action: i64,
        /// How many the task has.
        actions: u32,
    },
    /// A number in the frames is none, or an action or a reward is infinite: the policy's
    /// weights or its task are at fault. A policy that learns from such frames is lost.
    #[error(
        "{column} is {got} in environment {env} at step {step} of the batch: check what the \
         environment and the policy return"
    )]
    NotFinite {
        /// Which part of the frame.
        column: &'static str,
        /// The worker's environment.
        env: usize,
        /// The step of its part.
        step: usize,
        /// What was found.
        got: f32,
    },
    /// DQN was given frames of a task with continuous actions.
    #[error("DQN chooses among discrete actions, and these frames have continuous ones: use PPO")]
    ContinuousActions,
    /// The frames of a batch cannot be shared out evenly.
    #[error(
        "{frames_per_batch} frames per batch cannot be shared by {workers} workers with {envs} \
         environments each: {}", fitting(*.workers, *.envs)
    )]
    UnevenBatch {
        /// Frames asked for.
        frames_per_batch: usize,
        /// Workers of the collector.
        workers: usize,
        /// Environments of each worker.
        envs: usize,
    },
    /// The collector's settings leave nothing to collect, or more than fits.
    #[error("a batch of {frames_per_batch} frames is not between 1 and {limit}")]
    BatchSize {
        /// Frames asked for.
        frames_per_batch: usize,
        /// The most that one batch may have.
        limit: usize,
    },
    /// A message of a worker or of the trainer cannot be read. In a trainer
    /// this ends that worker's process, and another takes its place.
    #[error("a message of {len} bytes is none of protocol {expected}: {reason}")]
    Message {
        /// Its length in bytes.
        len: usize,
        /// The protocol version spoken here.
        expected: u8,
        /// What is wrong with it.
        reason: String,
    },
    /// A worker died again and again without delivering a batch: its program or
    /// its surroundings are at fault, not chance.
    #[error("{worker} died {deaths} times in a row, the last time so: {exit}")]
    KeepsDying {
        /// The worker.
        worker: WorkerId,
        /// How often in a row.
        deaths: u32,
        /// Its last end.
        exit: Box<WorkerEnding>,
    },
    /// Some workers did not deliver in time.
    #[error("workers {:?} delivered no frames within {waited:.1?}", numbers(.missing))]
    CollectTimeout {
        /// The workers waited for.
        missing: Vec<WorkerId>,
        /// How long.
        waited: Duration,
    },
    /// The trainer asked for frames by newer weights than will come: the
    /// receiver of this worker has ended.
    #[error("waited for version {expected} of the weights, but only {got} came: {reason}")]
    NoSuchVersion {
        /// The version asked for.
        expected: u64,
        /// The newest one received.
        got: u64,
        /// Why no other will come.
        reason: String,
    },
    /// A setting of a replay buffer, or its schema, cannot be.
    #[error("this replay buffer cannot be: {reason}")]
    ReplaySettings {
        /// What is wrong, and what is expected.
        reason: String,
    },
    /// A batch has another number of dimensions than the replay buffer takes.
    #[error(
        "expected a batch with ndim = {expected}, time last, got shape {got:?}: reshape it, or build \
         the buffer with ndim = {}", .got.len()
    )]
    BatchShape {
        /// Dimensions expected.
        expected: usize,
        /// The batch's shape.
        got: Vec<usize>,
    },
    /// Frames have another number of columns than the replay buffer.
    #[error("expected the bytes of {expected} columns, in the schema's order, got {got}")]
    ColumnCount {
        /// Columns of the schema.
        expected: usize,
        /// Columns handed over.
        got: usize,
    },
    /// The bytes of a column are not those of so many frames.
    #[error("column `{column}`: expected {expected} bytes for {frames} frames, got {got}")]
    ColumnLen {
        /// The column.
        column: String,
        /// Frames handed over, or asked for.
        frames: usize,
        /// Bytes of these frames.
        expected: usize,
        /// Bytes handed over.
        got: usize,
    },
    /// A batch would overwrite itself.
    #[error(
        "a batch of {frames} frames does not fit into a replay buffer of {capacity}: extend it by \
         smaller batches"
    )]
    BatchTooLong {
        /// Frames of the batch.
        frames: usize,
        /// Frames that fit.
        capacity: usize,
    },
    /// A replay buffer has no frame that its sampler could draw.
    #[error("the replay buffer has nothing to sample: {reason}")]
    NothingToSample {
        /// Why not.
        reason: String,
    },
    /// The frames of a sample are not so many slices.
    #[error(
        "a sample of {frames} frames is not a whole number of slices with num_slices = \
         {num_slices:?} and slice_len = {slice_len:?}"
    )]
    SliceCount {
        /// Frames asked for.
        frames: usize,
        /// Slices, if set.
        num_slices: Option<usize>,
        /// Steps of a slice, if set.
        slice_len: Option<usize>,
    },
    /// A frame is not in the replay buffer: it was overwritten, or is yet to be
    /// written.
    #[error("frame {id} is not in the replay buffer, which has frames {oldest} to {next} now")]
    FrameGone {
        /// The frame asked for.
        id: u64,
        /// The oldest frame that is there.
        oldest: u64,
        /// The id of the next frame to be written.
        next: u64,
    },
    /// Each frame needs one priority.
    #[error("expected a priority for each of {ids} frames, got {values}")]
    PriorityCount {
        /// Frames handed over.
        ids: usize,
        /// Priorities handed over.
        values: usize,
    },
    /// A priority is negative, not a number, or so large that sums overflow.
    #[error("expected priorities of at least 0 whose sum is finite, got {got}")]
    Priority {
        /// The priority.
        got: f32,
    },
    /// Priorities were given to a replay buffer whose sampler has none.
    #[error("this replay buffer has no priorities: build it with a prioritised sampler")]
    NoPriorities,
    /// A directory has a replay buffer with other columns or another capacity.
    #[error(
        "the replay buffer in {} has {got}, expected {expected}: open it is, or use another \
         directory", .path.display()
    )]
    OtherReplayBuffer {
        /// The directory.
        path: PathBuf,
        /// What the builder says.
        expected: String,
        /// What the directory has.
        got: String,
    },
    /// A directory's replay buffer is open elsewhere, in this process or another.
    #[error(
        "the replay buffer in {} is open already: close it there first, or use another directory",
        .path.display()
    )]
    ReplayBufferInUse {
        /// The directory.
        path: PathBuf,
    },
    /// A file of a replay buffer is not what this library writes.
    #[error(
        "{} is damaged: {reason}. Its replay buffer cannot be opened: remove the directory",
        .path.display()
    )]
    ReplayBufferDamaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of a replay buffer cannot be read or written. After a failed
    /// write the frames that it was to replace are gone, and the buffer may be
    /// used on.
    #[error("cannot {attempt} {}: {source}", .path.display())]
    ReplayBufferFile {
        /// What was attempted.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// An environment of Gymnasium cannot be had, or has failed.
    #[error("environment `{id}` of Gymnasium: {reason}")]
    Gym {
        /// Its name.
        id: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A worker thread could not be started.
    #[error("starting a worker thread: {reason}")]
    Thread {
        /// Why.
        reason: io::Error,
    },
    /// The worker processes.
    #[error(transparent)]
    Workers(#[from] WorkerError),
    /// The weights on their way.
    #[error(transparent)]
    Weights(#[from] weightsync_engine::Error),
    /// The tensor library refused an operation.
    #[cfg(feature = "candle")]
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

fn numbers(workers: &[WorkerId]) -> Vec<u32> {
    workers.iter().map(|worker| worker.0).collect()
}

fn task_names() -> String {
    Task::BUILT_IN.each_ref().map(Task::name).join(", ")
}

/// What to do about a batch that cannot be shared out.
fn fitting(workers: usize, envs: usize) -> String {
    match workers.saturating_mul(envs) {
        0 => "have at least one of both".into(),
        rows => format!("make it a multiple of {rows}"),
    }
}
