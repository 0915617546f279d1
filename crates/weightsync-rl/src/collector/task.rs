use std::fmt;

use serde::{Deserialize, Serialize};
use weightsync_engine::{Dtype, Layout, Snapshot};

use crate::{
    Error,
    env::{Acrobot, CartPole, Env, MountainCar},
    frames::Frames,
    policy::MlpPolicy,
    rollout::{Rollout, RolloutOptions},
};

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

/// Evaluates an expression in which a name stands for the task's environment.
macro_rules! with_env {
    ($task:expr, $env:ident => $body:expr) => {
        match $task {
            Task::CartPole => {
                type $env = CartPole;
                $body
            }
            Task::MountainCar => {
                type $env = MountainCar;
                $body
            }
            Task::Acrobot => {
                type $env = Acrobot;
                $body
            }
        }
    };
}

impl Task {
    /// The name the task is registered under in Gymnasium.
    pub fn name(self) -> &'static str {
        with_env!(self, E => E::NAME)
    }

    /// Number of `f32`s in one observation.
    pub fn observation_len(self) -> usize {
        with_env!(self, E => E::OBSERVATION_LEN)
    }

    /// Number of actions.
    pub fn actions(self) -> usize {
        with_env!(self, E => E::ACTIONS)
    }

    /// `envs` environments of the task, at the start of their episodes.
    pub(super) fn rollout(self, envs: usize, seed: u64, options: RolloutOptions) -> Box<dyn Roll> {
        with_env!(self, E => Box::new(Rollout::<E>::with_options(envs, seed, options)))
    }

    /// Whether a worker's frames are a part of `steps` steps in `envs`
    /// environments of the task.
    pub(super) fn check_part(
        self,
        frames: &Frames,
        envs: usize,
        steps: usize,
    ) -> Result<(), Error> {
        frames.check(&[envs, steps], self.observation_len())?;
        let actions = self.actions() as u32;
        match frames.actions.iter().find(|&&action| action >= actions) {
            None => Ok(()),
            Some(&action) => Err(Error::NoSuchAction { action, actions }),
        }
    }

    /// Whether weights of this layout hold a policy for the task.
    pub(super) fn check(self, layout: &Layout) -> Result<(), Error> {
        let outputs = MlpPolicy::width(self.observation_len(), "actor", |name| {
            let tensor = layout.tensor(name)?;
            (tensor.dtype == Dtype::F32).then_some(tensor.range.len as usize / 4)
        })?;
        check_outputs(outputs, self.actions())
    }
}

/// A rollout of any task, with the policy read from weights.
pub(super) trait Roll: fmt::Debug + Send {
    /// Takes `steps` steps in every environment; `[P, T]`. Without weights,
    /// actions are drawn evenly.
    fn part(&mut self, weights: Option<&Snapshot>, steps: usize) -> Result<Frames, Error>;
}

impl<E: Env + fmt::Debug + Send> Roll for Rollout<E> {
    fn part(&mut self, weights: Option<&Snapshot>, steps: usize) -> Result<Frames, Error> {
        let Some(weights) = weights else {
            return Ok(self.collect_random(steps));
        };
        // The version's own bytes: nothing is copied.
        let policy = MlpPolicy::from_tensors(E::OBSERVATION_LEN, "actor", |name| {
            weights.slice::<f32>(name).ok()
        })?;
        check_outputs(policy.outputs(), E::ACTIONS)?;
        Ok(self.collect(&policy, weights.version().0, steps))
    }
}

/// Whether a policy has as many outputs as its task has actions.
fn check_outputs(got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::TensorLen {
        name: "the actor's last bias".into(),
        expected,
        got,
    })
}
