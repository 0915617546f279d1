use std::fmt;

use serde::{Deserialize, Serialize};
use weightsync_engine::{Dtype, Layout, Snapshot};

use crate::{
    Error,
    env::{
        Acrobot, BatchedEnv, CartPole, Env, Envs, Gym, GymEnvs, MountainCar, Pendulum,
        StoredAction, check_policy,
    },
    frames::{ActionKind, Frames},
    rollout::{Driven, Rollout, RolloutOptions, Stepping},
};

/// A task, as a worker is told which one to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Task {
    /// [`CartPole`].
    CartPole,
    /// [`MountainCar`].
    MountainCar,
    /// [`Acrobot`].
    Acrobot,
    /// [`Pendulum`].
    Pendulum,
    /// A task of Gymnasium.
    Gym(Gym),
}

/// Evaluates an expression in which a name stands for the environment of a built-in
/// task, or another one about a task of Gymnasium.
macro_rules! with_env {
    ($task:expr, $env:ident => $body:expr, $gym:ident => $of_gym:expr) => {
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
            Task::Pendulum => {
                type $env = Pendulum;
                $body
            }
            Task::Gym($gym) => $of_gym,
        }
    };
}

impl Task {
    /// The tasks that are built in.
    pub const BUILT_IN: [Task; 4] = [
        Task::CartPole,
        Task::MountainCar,
        Task::Acrobot,
        Task::Pendulum,
    ];

    /// The built-in task that is registered under a name in Gymnasium.
    ///
    /// # Errors
    /// [`Error::NoSuchTask`] with the names that there are.
    pub fn named(name: &str) -> Result<Self, Error> {
        let found = Self::BUILT_IN.into_iter().find(|task| task.name() == name);
        found.ok_or_else(|| Error::NoSuchTask { name: name.into() })
    }

    /// The name the task is registered under in Gymnasium.
    pub fn name(&self) -> &str {
        with_env!(self, E => E::NAME, gym => gym.id())
    }

    /// Number of `f32`s in one observation.
    pub fn observation_len(&self) -> usize {
        with_env!(self, E => E::OBSERVATION_LEN, gym => gym.observation_len())
    }

    /// Number of discrete actions, or of quantities in a continuous one.
    pub fn actions(&self) -> usize {
        with_env!(self, E => E::ACTIONS, gym => gym.actions())
    }

    /// Whether actions are continuous.
    pub fn is_continuous(&self) -> bool {
        self.action_kind() != ActionKind::Discrete
    }

    /// Least and greatest value of each quantity in a continuous action.
    pub fn action_range(&self) -> [f32; 2] {
        with_env!(self, E => E::ACTION_RANGE, gym => gym.action_range())
    }

    pub(super) fn action_kind(&self) -> ActionKind {
        with_env!(self, E => <E as Env>::Action::KIND, gym => gym.action_kind())
    }

    /// `envs` environments of the task, at the start of their episodes.
    ///
    /// # Errors
    /// [`Error::Gym`] if Gymnasium's cannot be made.
    pub(super) fn rollout(
        &self,
        envs: usize,
        seed: u64,
        options: RolloutOptions,
    ) -> Result<Box<dyn Roll>, Error> {
        Ok(with_env!(
            self,
            E => boxed(BatchedEnv::<E>::new(envs, seed), seed, options),
            gym => return of_gym(gym, envs, seed, options)
        ))
    }

    /// The same of a built-in task, for a caller with rules of its own.
    pub(crate) fn driven(&self, envs: usize, seed: u64) -> Option<Box<dyn Driven>> {
        Some(with_env!(self, E => Box::new(Rollout::<E>::new(envs, seed)), _gym => return None))
    }

    /// Whether a worker's frames are a part of `steps` steps in `envs`
    /// environments of the task.
    pub(super) fn check_part(
        &self,
        frames: &Frames,
        envs: usize,
        steps: usize,
    ) -> Result<(), Error> {
        frames.check(&[envs, steps], self.observation_len(), self.action_kind())?;
        let discrete = frames.actions.discrete().unwrap_or_default();
        self.check_actions(discrete.iter().map(|&action| i64::from(action)))
    }

    /// Whether the task has these discrete actions.
    ///
    /// # Errors
    /// [`Error::NoSuchAction`] with the first one that it does not have.
    pub fn check_actions(&self, mut discrete: impl Iterator<Item = i64>) -> Result<(), Error> {
        // The number of actions fits: it comes from the task, and not from the frames.
        let actions = self.actions() as u32;
        match discrete.find(|action| !(0..i64::from(actions)).contains(action)) {
            None => Ok(()),
            Some(action) => Err(Error::NoSuchAction { action, actions }),
        }
    }

    /// Whether weights of this layout hold a policy for the task.
    pub(super) fn check(&self, layout: &Layout) -> Result<(), Error> {
        let len = |name: &str| {
            let tensor = layout.tensor(name)?;
            // `f32` has 4 bytes. Another dtype counts as missing.
            (tensor.dtype == Dtype::F32).then_some(tensor.range.len as usize / 4)
        };
        let (inputs, outputs) = (self.observation_len(), self.actions());
        check_policy(self.action_kind(), inputs, outputs, "actor", len)
    }
}

fn boxed<B>(envs: B, seed: u64, options: RolloutOptions) -> Box<dyn Roll>
where
    B: Envs + fmt::Debug + Send + 'static,
    Error: From<B::Error>,
{
    Box::new(Stepping::new(envs, seed, options))
}

/// Environments of Gymnasium, by the number of quantities in an action.
fn of_gym(
    gym: &Gym,
    envs: usize,
    seed: u64,
    options: RolloutOptions,
) -> Result<Box<dyn Roll>, Error> {
    macro_rules! started {
        ($action:ty) => {{
            let envs = GymEnvs::<$action>::start(gym.clone(), envs, seed)?;
            boxed(envs, seed, options)
        }};
    }
    Ok(match gym.action_kind() {
        ActionKind::Discrete => started!(u32),
        ActionKind::Continuous(1) => started!([f32; 1]),
        ActionKind::Continuous(2) => started!([f32; 2]),
        ActionKind::Continuous(3) => started!([f32; 3]),
        ActionKind::Continuous(4) => started!([f32; 4]),
        ActionKind::Continuous(5) => started!([f32; 5]),
        ActionKind::Continuous(6) => started!([f32; 6]),
        ActionKind::Continuous(7) => started!([f32; 7]),
        // The last arm has the largest number. `Gym` refuses tasks with more.
        ActionKind::Continuous(_) => started!([f32; Gym::MAX_QUANTITIES]),
    })
}

/// A rollout of any task, with the policy read from weights.
pub(super) trait Roll: fmt::Debug + Send {
    /// Takes `steps` steps in every environment; `[P, T]`. Without weights,
    /// actions are drawn evenly.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] and [`Error::TensorLen`] if the weights hold no policy
    /// for the task; [`Error::NotFinite`], after which new episodes begin.
    fn part(&mut self, weights: Option<&Snapshot>, steps: usize) -> Result<Frames, Error>;
}

impl<B> Roll for Stepping<B>
where
    B: Envs + fmt::Debug + Send,
    Error: From<B::Error>,
{
    fn part(&mut self, weights: Option<&Snapshot>, steps: usize) -> Result<Frames, Error> {
        let frames = match weights {
            None => self.collect_random(steps)?,
            Some(weights) => {
                // The version's own bytes: nothing is copied.
                let tensor = |name: &str| weights.slice::<f32>(name).ok();
                self.collect_with(&tensor, weights.version().0, steps)?
            }
        };
        // Checked before they leave the worker, so the error names the place, and a bad policy does
        // not reach the trainer's data.
        let checked = frames.check_numbers();
        if checked.is_err() {
            // Nothing good comes of these episodes.
            self.reset_all()?;
        }
        checked.map(|()| frames)
    }
}
