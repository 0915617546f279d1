//! Collectors, environments, and a small PPO and DQN on top of `weightsync`.
//!
//! The journey of a frame: an [environment](mod@env) is stepped by a
//! [policy](policy::MlpPolicy) in a [rollout](rollout::Rollout), inside a
//! worker of a [collector], which hands [`Frames`](frames::Frames) to
//! the trainer; `ppo` or `dqn` (feature `candle`) turns them into better weights,
//! and these go back to the workers through `weightsync`. A
//! [replay buffer](mod@replay) keeps frames to learn from them again.
//!
//! Absent here: shared memory, wire formats of weights, sockets between hosts. Weights travel
//! by `weightsync`'s sessions, frames by its worker processes' pipes.
#![forbid(unsafe_code)]

pub mod collector;
#[cfg(feature = "candle")]
pub mod dqn;
pub mod env;
mod error;
pub mod frames;
#[cfg(feature = "candle")]
pub mod learn;
pub mod policy;
#[cfg(feature = "candle")]
pub mod ppo;
pub mod replay;
pub mod rollout;

pub use error::Error;
