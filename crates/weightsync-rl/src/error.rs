use std::time::Duration;

use weightsync_engine::{WorkerId, worker::WorkerError};

use crate::collector::Ending;

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
    /// Frames are not shaped as asked for, or a field's length does not match.
    #[error("expected frames of shape {expected:?}, got {got:?}, or a field is cut")]
    FrameShape {
        /// The shape asked for.
        expected: Vec<usize>,
        /// The shape claimed.
        got: Vec<usize>,
    },
    /// Frames hold an action that the task does not have.
    #[error("action {action} of a task whose actions are 0 to {}", .actions.saturating_sub(1))]
    NoSuchAction {
        /// The action.
        action: u32,
        /// How many the task has.
        actions: u32,
    },
    /// The frames of a batch cannot be shared out evenly.
    #[error(
        "{frames_per_batch} frames per batch cannot be shared by {workers} workers with {envs} \
         environments each: make it a multiple of {}", .workers * .envs
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
        exit: Box<Ending>,
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
    /// A worker thread could not be started.
    #[error("starting a worker thread: {reason}")]
    Thread {
        /// Why.
        reason: std::io::Error,
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

fn numbers(workers: &[WorkerId]) -> Vec<u32> {
    workers.iter().map(|worker| worker.0).collect()
}
