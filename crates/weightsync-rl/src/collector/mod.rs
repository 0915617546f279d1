//! Collectors: environments and policies in workers, frames to the trainer,
//! weights to the workers.
//!
//! | kind | workers | a batch is |
//! |---|---|---|
//! | [`Sync`] | none: the caller's thread | collected when it is asked for |
//! | [`MultiSync`] | processes or threads | a part of every worker |
//! | [`MultiAsync`] | processes or threads | the part of whichever worker is first |
//! | [`Async`] | one process or thread | its next part |
//!
//! A collector is the trainer's end, [`serve`] that of a worker process. Both are
//! usually the same program, which asks [`weightsync_engine::worker::current`] first:
//!
//! ```no_run
//! use weightsync::{Tensors, worker};
//! use weightsync_rl::collector::{MultiSync, Task, self};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     if let Some(process) = worker::current()? {
//!         return Ok(collector::serve(&process)?);
//!     }
//!     let mut weights = Tensors::new();
//!     weights.insert("actor.0.weight", [2, 4], vec![0.0_f32; 8])?;
//!     weights.insert("actor.0.bias", [2], vec![0.0_f32; 2])?;
//!     let mut collector = MultiSync::builder(Task::CartPole)
//!         .workers(4)
//!         .frames_per_batch(512)
//!         .start(&weights)?;
//!     for _ in 0..100 {
//!         let batch = collector.next_batch()?;
//!         println!("{} frames of {}", batch.frames.len(), collector.version());
//!         weights.slice_mut::<f32>("actor.0.bias")?[0] += 0.01; // in practice, training
//!         println!("{}", collector.update_policy_weights(&weights)?);
//!     }
//!     Ok(()) // dropping the collector ends its workers
//! }
//! ```

mod builder;
mod core;
mod crew;
pub mod kind;
mod multi;
mod schedule;
mod serve;
mod sync;
mod task;
mod wire;

#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub use wire::fuzz;

use weightsync_engine::WorkerId;

use crate::frames::Frames;

pub use builder::CollectorBuilder;
pub use crew::WorkerEnding;
pub use multi::{Async, Multi, MultiAsync, MultiSync};
pub use serve::serve;
pub use sync::Sync;
pub use task::Task;

/// A batch of frames, and what happened while it was collected.
#[derive(Debug)]
#[non_exhaustive]
pub struct Batch {
    /// The frames, in the order of [`workers`](Self::workers).
    pub frames: Frames,
    /// Whose frames they are; empty for [`Sync`], which has no worker.
    pub workers: Vec<WorkerId>,
    /// Workers that failed since the batch before, each replaced by one with the
    /// current weights.
    pub restarts: Vec<Restarted>,
    /// Workers that were given up since the batch before, because they failed again
    /// and again. The others go on: of [`MultiAsync`] alone.
    pub abandoned: Vec<Abandoned>,
    /// Frames that were dropped since the batch before, for they were
    /// [too old](CollectorBuilder::max_staleness).
    pub dropped: usize,
}

/// A worker that failed and was replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restarted {
    /// Which worker.
    pub worker: WorkerId,
    /// How it ended.
    pub exit: WorkerEnding,
    /// The process in which another took its place.
    pub pid: u32,
}

/// A worker that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Abandoned {
    /// Which worker.
    pub worker: WorkerId,
    /// How often it ended in a row, without a part delivered.
    pub deaths: u32,
    /// How it ended last.
    pub exit: WorkerEnding,
}
