//! Collectors: environments and policies in worker processes, frames to the
//! trainer, weights to the workers.
//!
//! [`MultiSync`] is the trainer's end, [`serve`] the worker's. Both ends are
//! usually the same program, which asks [`weightsync_engine::worker::current`] first:
//!
//! ```no_run
//! use weightsync::{Tensors, worker};
//! use weightsync_rl::collector::{self, MultiSync, Task};
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
//!         let batch = collector.collect()?;
//!         println!("{} frames of {}", batch.frames.len(), collector.version());
//!         weights.slice_mut::<f32>("actor.0.bias")?[0] += 0.01; // in practice, training
//!         println!("{}", collector.update_policy_weights(&weights)?);
//!     }
//!     Ok(()) // dropping the collector ends its workers
//! }
//! ```

mod multi_sync;
mod serve;
mod trajectories;
mod wire;

#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub use wire::fuzz;

use serde::{Deserialize, Serialize};

use weightsync_engine::{Dtype, Layout};

use crate::{
    Error,
    env::{Acrobot, CartPole, Env, MountainCar},
    policy::MlpPolicy,
};

pub use multi_sync::{Batch, Builder, MultiSync, Restarted};
pub use serve::serve;

/// The built-in tasks, as a worker is told which one to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Task {
    /// [`CartPole`].
    CartPole,
    /// [`MountainCar`].
    MountainCar,
    /// [`Acrobot`].
    Acrobot,
}

impl Task {
    /// The name the task is registered under in Gymnasium.
    pub fn name(self) -> &'static str {
        match self {
            Task::CartPole => CartPole::NAME,
            Task::MountainCar => MountainCar::NAME,
            Task::Acrobot => Acrobot::NAME,
        }
    }

    /// Number of `f32`s in one observation.
    pub fn observation_len(self) -> usize {
        match self {
            Task::CartPole => CartPole::OBSERVATION_LEN,
            Task::MountainCar => MountainCar::OBSERVATION_LEN,
            Task::Acrobot => Acrobot::OBSERVATION_LEN,
        }
    }

    /// Number of actions.
    pub fn actions(self) -> usize {
        match self {
            Task::CartPole => CartPole::ACTIONS,
            Task::MountainCar => MountainCar::ACTIONS,
            Task::Acrobot => Acrobot::ACTIONS,
        }
    }

    /// Whether weights of this layout hold a policy for the task.
    fn check(self, layout: &Layout) -> Result<(), Error> {
        let actions = MlpPolicy::width(self.observation_len(), "actor", |name| {
            let tensor = layout.tensor(name)?;
            (tensor.dtype == Dtype::F32).then_some(tensor.range.len as usize / 4)
        })?;
        self.check_actions(actions)
    }

    /// Whether a policy with so many outputs is one for the task.
    fn check_actions(self, outputs: usize) -> Result<(), Error> {
        if outputs == self.actions() {
            return Ok(());
        }
        Err(Error::TensorLen {
            name: "the actor's last bias".into(),
            expected: self.actions(),
            got: outputs,
        })
    }
}
