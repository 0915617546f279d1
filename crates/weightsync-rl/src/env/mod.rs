//! Environments: built-in control tasks with Gymnasium's dynamics.
//!
//! An [`Env`] is one task instance; a [`BatchedEnv`] steps several side by side
//! and starts a new episode wherever one ended. Randomness comes from the
//! [`EnvRng`] a caller passes in, so the same seed gives the same episodes. A [`Gym`]
//! is a task of Gymnasium itself, which Python steps.

mod acrobot;
mod action;
mod batch;
mod cartpole;
mod gym;
mod mountain_car;
mod pendulum;

pub use acrobot::Acrobot;
pub use action::Action;
pub(crate) use action::{StoredAction, check_policy};
pub use batch::BatchedEnv;
pub(crate) use batch::Envs;
pub use cartpole::CartPole;
pub use gym::Gym;
pub(crate) use gym::GymEnvs;
pub use mountain_car::MountainCar;
pub use pendulum::Pendulum;

/// The generator behind every random choice of this crate: fast, seedable, and
/// the same on every platform and in every release.
pub type EnvRng = rand::rngs::Xoshiro256PlusPlus;

/// What one step of an environment led to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transition {
    /// The reward of the step.
    pub reward: f32,
    /// The task ended (success or failure): nothing follows this state.
    pub terminated: bool,
    /// A limit on the number of steps cut the episode: the state has a future
    /// that will not be seen, so its value still counts.
    pub truncated: bool,
}

impl Transition {
    /// Whether the episode is over, for either reason.
    pub fn done(&self) -> bool {
        self.terminated || self.truncated
    }
}

/// A task with a fixed number of observed quantities, and of discrete actions or
/// of continuous quantities in an action.
///
/// ```
/// use rand::SeedableRng;
/// use weightsync_rl::env::{CartPole, Env, EnvRng};
///
/// let mut rng = EnvRng::seed_from_u64(1);
/// let mut env = CartPole::new(&mut rng);
/// let mut observation = [0.0; CartPole::OBSERVATION_LEN];
/// let mut steps = 0;
/// while !env.step(1).done() {
///     env.observe(&mut observation);
///     steps += 1;
/// }
/// assert!(steps < 20, "always pushing right lets the pole fall");
/// ```
pub trait Env {
    /// `u32` where actions are discrete, `[f32; N]` where they are continuous.
    type Action: Action;
    /// The name the task is registered under in Gymnasium.
    const NAME: &'static str;
    /// Number of `f32`s in one observation.
    const OBSERVATION_LEN: usize;
    /// Number of discrete actions, which are `0..ACTIONS`, or of quantities in a
    /// continuous one.
    const ACTIONS: usize;
    /// Least and greatest value of each quantity in a continuous action.
    const ACTION_RANGE: [f32; 2] = [-1.0, 1.0];

    /// An environment at the start of an episode.
    fn new(rng: &mut EnvRng) -> Self
    where
        Self: Sized;

    /// Starts a new episode.
    fn reset(&mut self, rng: &mut EnvRng);

    /// Writes the current observation into `out`, which has
    /// [`OBSERVATION_LEN`](Self::OBSERVATION_LEN) elements.
    fn observe(&self, out: &mut [f32]);

    /// Takes one step. A discrete action of [`ACTIONS`](Self::ACTIONS) or more
    /// counts as the last one; a continuous one is clipped to its
    /// [range](Self::ACTION_RANGE). After a step that is [`done`](Transition::done), call
    /// [`reset`](Self::reset) first.
    fn step(&mut self, action: Self::Action) -> Transition;
}

/// An environment at the start of an episode.
fn begun<E: Env + Default>(rng: &mut EnvRng) -> E {
    let mut env = E::default();
    env.reset(rng);
    env
}

#[cfg(test)]
mod tests;
