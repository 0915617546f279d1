use std::{marker::PhantomData, time::Duration};

use weightsync_engine::{
    Report, SendOptions, Snapshot, Version, WaitFor, WeightExtractor, WorkerId, WorkerStatus,
};

use super::{
    Batch, CollectorBuilder, Task,
    core::{Core, FrameTally},
    kind::{FirstServed, Gathered, OneWorker, Remote, goal},
    schedule::Goal,
};
use crate::{
    Error,
    frames::{CatResults, Frames},
};

/// A collector whose workers collect at the same time, each its part of every
/// batch, and wait for new weights in between.
///
/// **Guarantee.** A batch holds every worker's part, whole and in the order of
/// the workers, and every frame is stamped with the version of the weights that
/// chose its action: the one sent last. A worker that dies, also in the middle
/// of a batch, is replaced; its part is then collected again, so a batch never
/// holds half of one. No worker outlives the trainer.
pub type MultiSync = Multi<Gathered>;

/// A collector whose workers go on while the trainer trains: a batch is the part
/// of whichever worker is first.
///
/// **Guarantee.** A batch is one worker's part, whole, in the order in which the
/// parts came. Its actions were chosen by the weights that were newest when the
/// worker began it; [`max_staleness`](CollectorBuilder::max_staleness) limits how old
/// they are when it is handed out. A worker begins its next part at once; one
/// finished part of each waits, and while the next is finished too, the worker
/// pauses. A worker that dies is replaced. No worker outlives the trainer.
///
/// ```
/// use weightsync::Tensors;
/// use weightsync_rl::collector::{MultiAsync, Task};
///
/// let mut weights = Tensors::new();
/// weights.insert("actor.0.weight", [2, 4], vec![0.0_f32; 8])?;
/// weights.insert("actor.0.bias", [2], vec![0.0_f32; 2])?;
/// let mut collector = MultiAsync::builder(Task::CartPole)
///     .workers(2)
///     .frames_per_batch(100)
///     .total_frames(500)
///     .max_staleness(2)
///     .threads()
///     .start(&weights)?;
/// while let Some(batch) = collector.next() {
///     let batch = batch?;
///     println!("{} frames of {:?}", batch.frames.len(), batch.workers);
///     weights.slice_mut::<f32>("actor.0.bias")?[0] += 0.01; // in practice, training
///     collector.update_policy_weights(&weights)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type MultiAsync = Multi<FirstServed>;

/// A [`MultiAsync`] with one worker: collecting overlaps with training.
pub type Async = Multi<OneWorker>;

/// A collector with workers; see [`MultiSync`], [`MultiAsync`] and [`Async`].
///
/// As an iterator it yields [batches](Self::next_batch) until
/// [`total_frames`](CollectorBuilder::total_frames) have been handed out. One that failed
/// is an error, after which the next is tried.
#[derive(Debug)]
pub struct Multi<K> {
    core: Core,
    cat_results: CatResults,
    tally: FrameTally,
    kind: PhantomData<K>,
}

impl<K: Remote> Multi<K> {
    /// Settings to start from, for a task.
    pub fn builder(task: Task) -> CollectorBuilder<K> {
        CollectorBuilder::new(task)
    }

    pub(super) fn new(core: Core, cat_results: CatResults, tally: FrameTally) -> Self {
        Self {
            core,
            cat_results,
            tally,
            kind: PhantomData,
        }
    }

    /// The next batch: of all workers, or of the first that has one, by kind.
    ///
    /// # Errors
    /// [`Error::CollectTimeout`] at the deadline, [`Error::KeepsDying`] about a
    /// worker that restarting does not help, [`Error::Workers`] and
    /// [`Error::Thread`] if a worker cannot be started. The next call begins a
    /// new batch, and starts a worker wherever one is missing.
    pub fn next_batch(&mut self) -> Result<Batch, Error> {
        // Restarts and dropped frames of a failed batch stay in `core`, and are told with the next
        // one.
        let gathered = self.core.gather(goal::<K>())?;
        let (workers, mut parts): (Vec<_>, Vec<_>) = gathered.parts.into_iter().unzip();
        let frames = match goal::<K>() {
            // The schedule delivers after one part, so there is exactly one.
            Goal::Anyone => parts.pop().unwrap_or_default(),
            _ => Frames::cat(parts, self.cat_results)?,
        };
        // Only frames that were handed out count towards `total_frames`.
        self.tally.frames += frames.len();
        Ok(Batch {
            frames,
            workers,
            restarts: gathered.restarts,
            abandoned: gathered.abandoned,
            dropped: gathered.dropped,
        })
    }

    /// Sends weights to all workers, through shared memory, and waits until
    /// each has them or has a line in the report that says why not.
    ///
    /// That a worker has *applied* a version means that it holds the version
    /// whole, in a layout that [`start`](CollectorBuilder::start) has seen to be a policy
    /// for the task, and will begin no part by an older one. A part under way
    /// ends with the version it began with.
    ///
    /// A worker that has died has such a line at most; it is replaced by the
    /// next [`next_batch`](Self::next_batch), with these weights.
    ///
    /// # Errors
    /// [`Error::Weights`] if nothing could be sent; the old version serves on.
    pub fn update_policy_weights(
        &mut self,
        weights: &impl WeightExtractor,
    ) -> Result<Report, Error> {
        let options = SendOptions::new()
            // Applied, so that the next batch begins with these weights at every worker.
            .wait(WaitFor::Applied)
            .timeout(Some(self.core.deadline));
        Ok(self.core.sender.send_with(weights, &options)?)
    }

    /// How long a batch or an update may take at most, from now on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.core.deadline = deadline;
    }

    /// The version sent last.
    pub fn version(&self) -> Version {
        self.core.version()
    }

    /// Every connected worker with the version it has, as the sender sees them.
    pub fn worker_versions(&self) -> Vec<WorkerStatus> {
        self.core.sender.workers()
    }

    /// The process a worker runs in; `None` while it does not run.
    pub fn pid(&self, worker: WorkerId) -> Option<u32> {
        self.core.crew.pid(worker.0 as usize)
    }

    /// The weights sent last, to save or to compare.
    ///
    /// # Errors
    /// [`Error::Weights`], in a forked child.
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        Ok(self.core.sender.snapshot()?)
    }

    /// Ends the workers and waits until they have left; dropping the collector
    /// does the same.
    pub fn shutdown(self) {
        self.core.shutdown();
    }
}

impl<K: Remote> Iterator for Multi<K> {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        // `next_batch` itself has no limit: a caller may go on after the iterator has ended.
        (!self.tally.is_full()).then(|| self.next_batch())
    }
}
