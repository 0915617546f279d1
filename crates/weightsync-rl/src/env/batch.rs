use std::convert::Infallible;

use rand::SeedableRng;

use super::{Action, Env, EnvRng, Transition};

/// Environments of one task that a rollout steps, each on its own.
pub(crate) trait Envs {
    type Action: Action;
    /// Why one cannot be stepped or reset.
    type Error;

    /// Number of environments, `P`.
    fn len(&self) -> usize;
    /// Number of `f32`s in one observation.
    fn observation_len(&self) -> usize;
    /// As [`Env::ACTIONS`].
    fn actions(&self) -> usize;
    /// As [`Env::ACTION_RANGE`].
    fn action_range(&self) -> [f32; 2];
    /// Writes the observation of the environment `index` into `out`.
    fn observe_one(&self, index: usize, out: &mut [f32]);
    /// As [`Env::step`].
    fn step(&mut self, index: usize, action: Self::Action) -> Result<Transition, Self::Error>;
    /// As [`Env::reset`].
    fn reset(&mut self, index: usize) -> Result<(), Self::Error>;
}

/// `P` environments stepped side by side, each with a generator of its own, so
/// that what one does never depends on when another's episode ends.
///
/// ```
/// use weightsync_rl::env::{BatchedEnv, CartPole};
///
/// let mut env = BatchedEnv::<CartPole>::new(3, 42);
/// let mut observations = vec![0.0; 3 * 4];
/// env.observe(&mut observations);
/// let first = env.step(0, 1);
/// assert_eq!(first.reward, 1.0);
/// ```
#[derive(Clone, Debug)]
pub struct BatchedEnv<E> {
    envs: Vec<(E, EnvRng)>,
}

impl<E: Env> BatchedEnv<E> {
    /// `count` environments, each at the start of an episode; the `i`-th one's
    /// generator is derived from `seed` and `i`.
    pub fn new(count: usize, seed: u64) -> Self {
        let mut seeds = EnvRng::seed_from_u64(seed);
        let envs = (0..count)
            .map(|_| {
                // In the order of the environments, so the first ones draw alike whatever the
                // count.
                let mut rng = seeds.fork();
                (E::new(&mut rng), rng)
            })
            .collect();
        Self { envs }
    }

    /// Number of environments, `P`.
    pub fn len(&self) -> usize {
        self.envs.len()
    }

    /// Whether there is no environment at all.
    pub fn is_empty(&self) -> bool {
        self.envs.is_empty()
    }

    /// Writes every observation into `out`, shaped `[P, OBSERVATION_LEN]`.
    pub fn observe(&self, out: &mut [f32]) {
        for ((env, _), row) in self
            .envs
            .iter()
            .zip(out.chunks_exact_mut(E::OBSERVATION_LEN))
        {
            env.observe(row);
        }
    }

    /// Writes the observation of the environment `index` into `out`.
    pub fn observe_one(&self, index: usize, out: &mut [f32]) {
        self.envs[index].0.observe(out);
    }

    /// Steps the environment `index`. Where this ends the episode, the final
    /// state stays observable until [`reset`](Self::reset).
    pub fn step(&mut self, index: usize, action: E::Action) -> Transition {
        self.envs[index].0.step(action)
    }

    /// Starts a new episode in the environment `index`.
    pub fn reset(&mut self, index: usize) {
        let (env, rng) = &mut self.envs[index];
        env.reset(rng);
    }

    /// The same with a generator of this seed, from here on.
    pub fn reset_with(&mut self, index: usize, seed: u64) {
        self.envs[index].1 = EnvRng::seed_from_u64(seed);
        self.reset(index);
    }
}

impl<E: Env> Envs for BatchedEnv<E> {
    type Action = E::Action;
    type Error = Infallible;

    fn len(&self) -> usize {
        self.len()
    }

    fn observation_len(&self) -> usize {
        E::OBSERVATION_LEN
    }

    fn actions(&self) -> usize {
        E::ACTIONS
    }

    fn action_range(&self) -> [f32; 2] {
        E::ACTION_RANGE
    }

    fn observe_one(&self, index: usize, out: &mut [f32]) {
        self.observe_one(index, out);
    }

    fn step(&mut self, index: usize, action: E::Action) -> Result<Transition, Infallible> {
        Ok(self.step(index, action))
    }

    fn reset(&mut self, index: usize) -> Result<(), Infallible> {
        self.reset(index);
        Ok(())
    }
}
