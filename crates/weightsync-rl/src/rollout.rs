//! Collecting in the caller's own thread: the inner loop of every collector.

mod task;

use rand::SeedableRng;
use serde::{Deserialize, Serialize};

use crate::{
    env::{BatchedEnv, Env, EnvRng, Envs, StoredAction},
    frames::{Episode, Frames},
    policy::{Choice, Policy},
};

pub(crate) use task::Driven;
pub use task::{TaskRollout, UnderWay};

/// Environments, their generators and the episodes under way.
///
/// ```
/// use weightsync_rl::{env::CartPole, policy::MlpPolicy, rollout::Rollout};
///
/// let (weight, bias) = ([0.0; 8], [0.0; 2]);
/// let policy = MlpPolicy::from_tensors(4, "actor", |name| match name {
///     "actor.0.weight" => Some(&weight),
///     "actor.0.bias" => Some(&bias),
///     _ => None,
/// })?;
/// let mut rollout = Rollout::<CartPole>::new(2, 1);
/// let frames = rollout.collect(&policy, 0, 100);
/// assert_eq!(frames.shape, [2, 100]);
/// # Ok::<(), weightsync_rl::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Rollout<E>(Stepping<BatchedEnv<E>>);

/// A rollout of environments of any kind.
#[derive(Clone, Debug)]
pub(crate) struct Stepping<B> {
    envs: B,
    /// Draws actions. One per environment, so that the number of environments
    /// does not change what one of them sees.
    rngs: Vec<EnvRng>,
    episodes: Vec<Episode>,
    trajectories: TrajectoryIds,
    options: RolloutOptions,
}

/// How actions are chosen from the distribution a policy gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exploration {
    /// Drawn from it.
    #[default]
    Random,
    /// The most likely one.
    Mode,
}

/// What a rollout does besides stepping environments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutOptions {
    /// Cuts an episode after so many frames, as truncated; 0 sets no limit.
    pub max_frames_per_traj: u32,
    /// Begins new episodes with every call, whatever is under way.
    pub reset_at_each_iter: bool,
    /// How actions are chosen.
    pub exploration: Exploration,
}

impl<E: Env> Rollout<E> {
    /// `envs` environments at the start of their episodes, all randomness
    /// derived from `seed`.
    pub fn new(envs: usize, seed: u64) -> Self {
        Self::with_options(envs, seed, RolloutOptions::default())
    }

    /// The same with options.
    pub fn with_options(envs: usize, seed: u64, options: RolloutOptions) -> Self {
        Self(Stepping::new(BatchedEnv::new(envs, seed), seed, options))
    }

    /// Takes `steps` steps in every environment, `[P, T]`, with actions chosen by
    /// `policy`, resetting where an episode ends, and stamps every frame with
    /// `version`.
    pub fn collect(
        &mut self,
        policy: &impl Policy<Action = E::Action>,
        version: u64,
        steps: usize,
    ) -> Frames {
        let Ok(frames) = self.0.collect(policy, version, steps);
        frames
    }

    /// The same with actions drawn evenly from all there are, and version 0.
    pub fn collect_random(&mut self, steps: usize) -> Frames {
        let Ok(frames) = self.0.collect_random(steps);
        frames
    }
}

impl<B: Envs> Stepping<B> {
    /// Takes over environments at the start of their episodes.
    pub fn new(envs: B, seed: u64, options: RolloutOptions) -> Self {
        // Actions and environments draw from generators of different seeds, so neither changes what
        // the other sees.
        let mut seeds = actions_rng(seed);
        let count = envs.len();
        Self {
            envs,
            // Forked in the order of the environments: the first ones draw alike, however many
            // there are.
            rngs: (0..count).map(|_| seeds.fork()).collect(),
            episodes: vec![Episode::default(); count],
            trajectories: TrajectoryIds::new(count),
            options,
        }
    }

    /// As [`Rollout::collect`].
    pub fn collect(
        &mut self,
        policy: &impl Policy<Action = B::Action>,
        version: u64,
        steps: usize,
    ) -> Result<Frames, B::Error> {
        // One allocation for all steps.
        let mut scratch = policy.scratch();
        match self.options.exploration {
            Exploration::Random => self.run(version, steps, |observation, rng| {
                policy.sample(observation, &mut scratch, rng)
            }),
            Exploration::Mode => self.run(version, steps, |observation, _| {
                policy.greedy(observation, &mut scratch)
            }),
        }
    }

    /// As [`Rollout::collect_random`].
    pub fn collect_random(&mut self, steps: usize) -> Result<Frames, B::Error> {
        let (actions, range) = (self.envs.actions(), self.envs.action_range());
        self.run(0, steps, |_, rng| B::Action::even(actions, range, rng))
    }

    fn run(
        &mut self,
        version: u64,
        steps: usize,
        mut choose: impl FnMut(&[f32], &mut EnvRng) -> Choice<B::Action>,
    ) -> Result<Frames, B::Error> {
        let (envs, len) = (self.envs.len(), self.envs.observation_len());
        // Allocated once. The loop below only writes into it.
        let mut frames = Frames::zeroed(envs, steps, len, B::Action::KIND);
        // A part without steps only says that the worker has its weights. It begins no episode.
        if self.options.reset_at_each_iter && steps > 0 {
            self.reset_all()?;
        }
        // Time outside, environments inside: episodes end, and get their ids, in the order of time.
        for t in 0..steps {
            for p in 0..envs {
                // Row-major `[P, T]`: an environment's steps lie next to each other.
                let i = p * steps + t;
                let at = i * len..(i + 1) * len;
                let observation = &mut frames.observations[at.clone()];
                // Each observation is written into its place in the batch, without a copy in
                // between.
                self.envs.observe_one(p, observation);
                let choice = choose(observation, &mut self.rngs[p]);
                // The generator is the environment's own.
                let mut transition = self.envs.step(p, choice.action)?;
                // Before any reset: the last frame of an episode leads to its final state.
                self.envs.observe_one(p, &mut frames.next_observations[at]);

                let episode = &mut self.episodes[p];
                episode.reward += transition.reward;
                episode.steps += 1;
                // The task's own limit may have truncated it already. A limit of 0 is never
                // reached, because a step was counted.
                transition.truncated |= episode.steps == self.options.max_frames_per_traj;

                choice.action.store(i, &mut frames.actions);
                frames.log_probs[i] = choice.log_prob;
                frames.rewards[i] = transition.reward;
                frames.terminated[i] = transition.terminated;
                frames.truncated[i] = transition.truncated;
                frames.policy_versions[i] = version;
                // Before the reset, which gives the environment a new id.
                frames.traj_ids[i] = self.trajectories.of(p);
                if transition.done() {
                    frames.episodes.push(*episode);
                    self.reset(p)?;
                }
            }
        }
        Ok(frames)
    }

    /// Begins new episodes in all environments.
    pub(crate) fn reset_all(&mut self) -> Result<(), B::Error> {
        (0..self.envs.len()).try_for_each(|env| self.reset(env))
    }

    /// Begins a new episode.
    fn reset(&mut self, env: usize) -> Result<(), B::Error> {
        self.envs.reset(env)?;
        self.episodes[env] = Episode::default();
        self.trajectories.start(env);
        Ok(())
    }
}

/// The generator of actions. Environments take theirs from `seed` itself.
fn actions_rng(seed: u64) -> EnvRng {
    // The golden ratio in 64 bits: any fixed number would do that makes the two seeds differ.
    EnvRng::seed_from_u64(seed ^ 0x9e37_79b9_7f4a_7c15)
}

/// The trajectories under way, numbered as TorchRL's collector does: the
/// environments begin with 0 to P − 1, and each reset takes the next id.
#[derive(Clone, Debug)]
struct TrajectoryIds {
    current: Vec<u64>,
    next: u64,
}

impl TrajectoryIds {
    fn new(envs: usize) -> Self {
        let next = envs as u64;
        Self {
            current: (0..next).collect(),
            next,
        }
    }

    fn of(&self, env: usize) -> u64 {
        self.current[env]
    }

    fn start(&mut self, env: usize) {
        self.current[env] = self.next;
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::{
        env::{CartPole, Pendulum},
        policy::{GaussianPolicy, MlpPolicy},
    };

    fn coin() -> MlpPolicy<'static> {
        MlpPolicy::from_tensors(4, "a", |name| match name {
            "a.0.weight" => Some(&[0.0; 8]),
            "a.0.bias" => Some(&[0.0; 2]),
            _ => None,
        })
        .unwrap()
    }

    #[test]
    fn frames_chain_within_an_episode() {
        let frames = Rollout::<CartPole>::new(2, 5).collect(&coin(), 9, 200);
        let row = |of: &[f32], i: usize| of[i * 4..i * 4 + 4].to_vec();
        for p in 0..2 {
            for i in p * 200..p * 200 + 199 {
                let (next, seen) = (
                    row(&frames.next_observations, i),
                    row(&frames.observations, i + 1),
                );
                if frames.done(i) {
                    assert_ne!(next, seen, "a new episode starts near zero");
                    assert!(seen.iter().all(|s| s.abs() <= 0.05));
                } else {
                    assert_eq!(next, seen);
                }
            }
        }
        let ends = (0..400).filter(|&i| frames.done(i)).count();
        assert_eq!(frames.episodes.len(), ends);
        assert!(ends > 4, "a coin does not balance a pole");
        assert!(frames.episodes.iter().all(|e| e.reward == e.steps as f32));
        assert_eq!(frames.policy_versions, vec![9; 400]);
    }

    #[derive(Deserialize)]
    struct Golden {
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        reset_at_each_iter: bool,
        batches: Vec<Recorded>,
    }

    #[derive(Deserialize)]
    struct Recorded {
        traj_ids: Vec<Vec<u64>>,
        done: Vec<Vec<bool>>,
    }

    #[test]
    fn trajectory_ids_are_those_of_torchrl() {
        let json = include_str!("../tests/data/trajectories.json");
        for case in serde_json::from_str::<Golden>(json).unwrap().cases {
            let mut ids = TrajectoryIds::new(3);
            for batch in case.batches {
                if case.reset_at_each_iter {
                    (0..3).for_each(|env| ids.start(env));
                }
                for t in 0..5 {
                    for env in 0..3 {
                        assert_eq!(ids.of(env), batch.traj_ids[env][t]);
                        if batch.done[env][t] {
                            ids.start(env);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn trajectory_ids_change_where_an_episode_ends() {
        let frames = Rollout::<CartPole>::new(2, 5).collect(&coin(), 9, 200);
        assert_eq!((frames.traj_ids[0], frames.traj_ids[200]), (0, 1));
        for i in (0..199).chain(200..399) {
            let changes = frames.traj_ids[i] != frames.traj_ids[i + 1];
            assert_eq!(changes, frames.done(i), "frame {i}");
        }
        let ids: std::collections::BTreeSet<u64> = frames.traj_ids.iter().copied().collect();
        let last_ends = frames.done(199) as usize + frames.done(399) as usize;
        assert_eq!(ids.len(), 2 + frames.episodes.len() - last_ends);
    }

    #[test]
    fn long_trajectories_are_truncated_at_the_limit() {
        let options = RolloutOptions {
            max_frames_per_traj: 7,
            ..RolloutOptions::default()
        };
        let mut rollout = Rollout::<CartPole>::with_options(2, 5, options);
        let frames = rollout.collect(&coin(), 1, 100);
        assert!(frames.episodes.iter().all(|episode| episode.steps == 7));
        for i in 0..200 {
            // No pole falls so early.
            let expected = (false, i % 100 % 7 == 6);
            assert_eq!((frames.terminated[i], frames.truncated[i]), expected);
        }
    }

    #[test]
    fn episodes_begin_with_every_iteration_if_asked() {
        let options = RolloutOptions {
            reset_at_each_iter: true,
            ..RolloutOptions::default()
        };
        let mut rollout = Rollout::<CartPole>::with_options(2, 5, options);
        assert!(rollout.collect(&coin(), 1, 0).is_empty(), "nothing begins");
        for first in [2, 4] {
            let frames = rollout.collect(&coin(), 1, 3);
            let (a, b) = (first, first + 1);
            assert_eq!(frames.traj_ids, [a, a, a, b, b, b]);
            assert!(frames.observations[..4].iter().all(|s| s.abs() <= 0.05));
            assert!(frames.episodes.is_empty());
        }
    }

    #[test]
    fn the_mode_is_the_likeliest_action() {
        let (weight, bias) = ([0.0; 8], [0.0, 0.1]);
        let leaning = MlpPolicy::from_tensors(4, "a", |name| match name {
            "a.0.weight" => Some(&weight),
            "a.0.bias" => Some(&bias),
            _ => None,
        })
        .unwrap();
        let options = RolloutOptions {
            exploration: Exploration::Mode,
            ..RolloutOptions::default()
        };
        let mut rollout = Rollout::<CartPole>::with_options(2, 5, options);
        let actions = rollout.collect(&leaning, 1, 50).actions;
        assert_eq!(actions.discrete(), Some(&[1; 100][..]));
        let drawn = Rollout::<CartPole>::new(2, 5).collect(&leaning, 1, 50);
        let drawn = drawn.actions.discrete().unwrap();
        assert!(drawn.contains(&0) && drawn.contains(&1));
    }

    #[test]
    fn random_actions_are_even_and_of_no_version() {
        let frames = Rollout::<CartPole>::new(2, 5).collect_random(500);
        let ones = frames.actions.discrete().unwrap().iter().sum::<u32>();
        assert!((430..570).contains(&ones), "{ones} of 1000");
        assert!(frames.log_probs.iter().all(|log| *log == 0.5_f32.ln()));
        assert_eq!(frames.policy_versions, vec![0; 1000]);
        let frames = Rollout::<Pendulum>::new(2, 5).collect_random(500);
        let (torques, 1) = frames.actions.continuous().unwrap() else {
            panic!("one quantity");
        };
        assert!(torques.iter().all(|torque| torque.abs() <= 2.0));
        assert!(torques.iter().sum::<f32>().abs() < 150.0);
        assert!(frames.log_probs.iter().all(|log| *log == -4.0_f32.ln()));
    }

    #[test]
    fn continuous_actions_are_stored_as_drawn() {
        let (weight, bias, log_std) = ([0.0; 3], [5.0], [0.0]);
        let policy = GaussianPolicy::<1>::from_tensors(3, "a", |name| match name {
            "a.0.weight" => Some(&weight),
            "a.0.bias" => Some(&bias),
            "a.log_std" => Some(&log_std),
            _ => None,
        })
        .unwrap();
        let frames = Rollout::<Pendulum>::new(2, 5).collect(&policy, 3, 300);
        let (torques, 1) = frames.actions.continuous().unwrap() else {
            panic!("one quantity");
        };
        let mean = torques.iter().sum::<f32>() / 600.0;
        assert!((mean - 5.0).abs() < 0.2, "not clipped: {mean}");
        for (torque, log_prob) in torques.iter().zip(&frames.log_probs) {
            let expected = -0.5 * (torque - 5.0).powi(2) - 0.918_938_5;
            assert!((log_prob - expected).abs() < 1e-4);
        }
        let ends: Vec<usize> = (0..600).filter(|&i| frames.truncated[i]).collect();
        assert_eq!(ends, [199, 499]);
        assert!(!frames.terminated.contains(&true));
    }

    #[test]
    fn frames_repeat_with_the_seed_for_any_batch_length() {
        let whole = Rollout::<CartPole>::new(1, 5).collect(&coin(), 0, 100);
        let mut rollout = Rollout::<CartPole>::new(1, 5);
        let mut pieces = rollout.collect(&coin(), 0, 30);
        pieces
            .observations
            .extend(rollout.collect(&coin(), 0, 70).observations);
        assert_eq!(whole.observations, pieces.observations);
        let other = Rollout::<CartPole>::new(1, 6).collect(&coin(), 0, 100);
        assert_ne!(whole.observations, other.observations);
    }
}
