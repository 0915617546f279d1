//! Deep Q-learning (Mnih et al., 2015) on candle: double (van Hasselt et al.,
//! 2016), with a target network and a replay buffer.
//!
//! [`QNetwork`] holds the network in a `VarMap`; [`Dqn::update`] keeps a batch of
//! frames in its [replay buffer](mod@crate::replay), and takes steps on samples of
//! all that it kept. Workers explore as `actor.epsilon` says, one of the weights.

mod model;
mod returns;

use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use weightsync_engine::Dtype;
use zerocopy::IntoBytes;

pub use model::QNetwork;
use returns::Returns;

use crate::{
    Error,
    collector::Task,
    frames::Frames,
    learn::{Learner, Optimizer, scalar},
    replay::{Column, ReplayBuffer, Sampler, Schema},
};

/// The settings of DQN.
#[derive(Clone, Debug, PartialEq)]
pub struct DqnConfig {
    /// Step size of Adam.
    pub learning_rate: f64,
    /// Discount per step, γ.
    pub discount: f32,
    /// Rewards that are summed before the value of what follows counts, as far as
    /// they are in one batch.
    pub lookahead: usize,
    /// Frames that the replay buffer has room for.
    pub capacity: usize,
    /// How frames are drawn from it: [`Sampler::Uniform`], or
    /// [`Sampler::Prioritised`], whose priorities are the errors of the values.
    pub sampler: Sampler,
    /// Frames to be kept before the first step.
    pub warm_up: usize,
    /// Frames collected for each step of the optimiser.
    pub frames_per_step: usize,
    /// Frames in a minibatch.
    pub minibatch: usize,
    /// Steps between two copies of the network to the target network.
    pub target_every: usize,
    /// How often workers explore.
    pub epsilon: Epsilon,
    /// Largest norm of the gradient of all weights together.
    pub max_grad_norm: f64,
}

impl Default for DqnConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            discount: 0.99,
            lookahead: 5,
            capacity: 100_000,
            sampler: Sampler::Uniform,
            warm_up: 1000,
            frames_per_step: 4,
            minibatch: 64,
            target_every: 200,
            epsilon: Epsilon::default(),
            max_grad_norm: 10.0,
        }
    }
}

impl DqnConfig {
    /// Settings that suit a task: the defaults, where no better ones are known.
    pub fn for_task(task: &Task) -> Self {
        let config = Self::default();
        match task.name() {
            // Every reward is −1: to look ahead tells little, and misleads while workers explore.
            "Acrobot-v1" => Self {
                lookahead: 1,
                frames_per_step: 2,
                target_every: 250,
                capacity: 50_000,
                epsilon: Epsilon {
                    frames: 20_000,
                    ..config.epsilon
                },
                ..config
            },
            // Of frames that a worse policy collected, a look further ahead misleads a good one.
            "CartPole-v1" => Self {
                lookahead: 3,
                ..config
            },
            "MountainCar-v0" => Self {
                epsilon: Epsilon {
                    frames: 30_000,
                    ..config.epsilon
                },
                ..config
            },
            _ => config,
        }
    }

    /// Whether training ever begins.
    fn check(&self) -> Result<(), Error> {
        let (capacity, warm_up) = (self.capacity, self.warm_up);
        if capacity >= warm_up {
            return Ok(());
        }
        Err(Error::ReplaySettings {
            reason: format!(
                "it has capacity = {capacity} frames, and DQN's first step comes after warm_up = \
                 {warm_up}: set capacity to at least {warm_up}"
            ),
        })
    }
}

/// The probability that a worker takes any action, instead of the one whose
/// value is greatest. It falls evenly with the frames collected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epsilon {
    /// What it is at first.
    pub first: f32,
    /// What it is in the end.
    pub last: f32,
    /// Frames on the way from the one to the other.
    pub frames: usize,
}

impl Default for Epsilon {
    fn default() -> Self {
        Self {
            first: 1.0,
            last: 0.02,
            frames: 15_000,
        }
    }
}

impl Epsilon {
    /// What it is after so many frames.
    ///
    /// ```
    /// let epsilon = weightsync_rl::dqn::Epsilon { first: 1.0, last: 0.5, frames: 100 };
    /// assert_eq!([0, 50, 100, 200].map(|frames| epsilon.after(frames)), [1.0, 0.75, 0.5, 0.5]);
    /// ```
    pub fn after(&self, frames: usize) -> f32 {
        if frames >= self.frames {
            return self.last;
        }
        self.first + (self.last - self.first) * (frames as f32 / self.frames as f32)
    }
}

/// What one [`Dqn::update`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct UpdateStats {
    /// Steps of the optimiser.
    pub steps: usize,
    /// Mean loss over those steps.
    pub loss: f64,
    /// Mean value of the actions in the samples.
    pub value: f64,
    /// The ε from now on.
    pub epsilon: f32,
}

/// Networks, replay buffer, optimiser and settings.
///
/// ```
/// use weightsync_rl::{
///     dqn::{Dqn, DqnConfig, QNetwork},
///     env::CartPole,
///     rollout::Rollout,
/// };
///
/// let config = DqnConfig { warm_up: 100, ..DqnConfig::default() };
/// let mut dqn = Dqn::new(QNetwork::new(4, &[16], 2, 1)?, config, 1)?;
/// let mut rollout = Rollout::<CartPole>::new(1, 1);
/// let weights = dqn.model().weights()?;
/// let frames = rollout.collect(&weights.policy()?, 0, 128);
/// let stats = dqn.update(&frames)?;
/// assert!(stats.steps > 0 && stats.epsilon < 1.0);
/// # Ok::<(), weightsync_rl::Error>(())
/// ```
pub struct Dqn {
    model: QNetwork,
    target: QNetwork,
    config: DqnConfig,
    optimizer: Optimizer,
    replay: ReplayBuffer,
    observation_len: usize,
    /// Frames collected.
    frames: usize,
    /// Frames since the last step.
    owed: usize,
    /// Steps of the optimiser.
    steps: usize,
}

impl Dqn {
    /// Starts to train `model`; `seed` draws the samples.
    ///
    /// # Errors
    /// [`Error::ReplaySettings`] if the replay buffer cannot be, or has less room than
    /// the warm-up takes, or [`Error::Candle`] if a tensor cannot be made.
    pub fn new(model: QNetwork, config: DqnConfig, seed: u64) -> Result<Self, Error> {
        config.check()?;
        let observation_len = model.inputs()?;
        let observation = [observation_len as u64];
        let schema = Schema::new([
            Column::new("observation", Dtype::F32, observation),
            Column::new("next_observation", Dtype::F32, observation),
            Column::new("action", Dtype::U32, []),
            Column::new("reward", Dtype::F32, []),
            Column::new("discount", Dtype::F32, []),
        ])?;
        let replay = ReplayBuffer::builder(schema)
            .capacity(config.capacity)
            .sampler(config.sampler.clone())
            .seed(seed)
            .in_memory()?;
        // Without ε: it is a setting of the workers, and has no gradient.
        let vars = model.layers().cloned().collect();
        let optimizer = Optimizer::new(vars, config.learning_rate, config.max_grad_norm)?;
        model.set_epsilon(config.epsilon.after(0))?;
        Ok(Self {
            target: model.twin()?,
            model,
            config,
            optimizer,
            replay,
            observation_len,
            frames: 0,
            owed: 0,
            steps: 0,
        })
    }

    /// The network as it is now, with the ε of now.
    pub fn model(&self) -> &QNetwork {
        &self.model
    }

    /// Keeps a batch of frames, and takes as many steps as it is due.
    ///
    /// # Errors
    /// [`Error::ContinuousActions`] if the frames have such,
    /// [`Error::ColumnLen`] or [`Error::BatchTooLong`] if the replay buffer does not
    /// take them, [`Error::Candle`] if a tensor operation fails, as it does when
    /// an action is none of the model's.
    pub fn update(&mut self, frames: &Frames) -> Result<UpdateStats, Error> {
        // Kept first: the steps below may draw from these frames.
        self.keep(frames)?;
        self.frames += frames.len();
        let epsilon = self.config.epsilon.after(self.frames);
        self.model.set_epsilon(epsilon)?;
        let mut stats = UpdateStats {
            epsilon,
            ..UpdateStats::default()
        };
        if self.replay.len() < self.config.warm_up.max(1) {
            return Ok(stats);
        }
        // Frames of the warm-up earn no steps.
        self.owed += frames.len();
        let every = self.config.frames_per_step.max(1);
        while self.owed >= every {
            self.owed -= every;
            self.step(&mut stats)?;
        }
        let steps = stats.steps.max(1) as f64;
        stats.loss /= steps;
        stats.value /= steps;
        Ok(stats)
    }

    fn keep(&self, frames: &Frames) -> Result<(), Error> {
        let actions = frames.actions.discrete();
        let actions = actions.ok_or(Error::ContinuousActions)?;
        // What is ahead of a frame is computed once, and not at each draw.
        let ahead = Returns::of(frames, self.config.discount, self.config.lookahead);
        let columns = [
            frames.observations.as_bytes(),
            ahead.next_observations.as_bytes(),
            actions.as_bytes(),
            ahead.rewards.as_bytes(),
            ahead.discounts.as_bytes(),
        ];
        self.replay.extend(&[frames.len()], &columns)?;
        Ok(())
    }

    /// One step on one minibatch.
    fn step(&mut self, stats: &mut UpdateStats) -> Result<(), Error> {
        // At the first step too, so the target begins as the network.
        if self.steps.is_multiple_of(self.config.target_every.max(1)) {
            self.target.copy_from(&self.model)?;
        }
        let sample = self.sample()?;
        // Double Q-learning: the network chooses the action, and the target values it. One network
        // for both would overestimate.
        let best = self
            .model
            .values(&sample.next_observations)?
            .argmax_keepdim(1)?;
        let next = self.target.values(&sample.next_observations)?;
        let next = next.gather(&best, 1)?.squeeze(1)?;
        // The target is a constant for the gradient.
        let expected = (&sample.rewards + next * &sample.discounts)?.detach();
        let values = self.model.values(&sample.observations)?;
        let chosen = values.gather(&sample.actions, 1)?.squeeze(1)?;

        // Huber's loss: half the square of an error of up to 1, and linear beyond.
        let error = (&chosen - expected)?.abs()?;
        let inner = error.clamp(0.0, 1.0)?;
        let losses = ((inner.sqr()? * 0.5)? + (&error - &inner)?)?;
        let loss = match &sample.weights {
            None => losses.mean_all()?,
            // Frames that are drawn more often count less.
            Some(weights) => (losses * weights)?.mean_all()?,
        };
        self.optimizer.step(&loss)?;
        // Only a prioritised sampler has weights, and takes priorities.
        if sample.weights.is_some() {
            let errors = error.to_vec1::<f32>()?;
            self.replay.update_priorities(&sample.ids, &errors)?;
        }
        self.steps += 1;
        stats.steps += 1;
        stats.loss += scalar(&loss)?;
        stats.value += scalar(&chosen.mean_all()?)?;
        Ok(())
    }

    fn sample(&self) -> Result<Minibatch, Error> {
        let (n, len) = (self.config.minibatch.max(1), self.observation_len);
        let mut observations = vec![0.0_f32; n * len];
        let mut next_observations = vec![0.0_f32; n * len];
        let mut actions = vec![0_u32; n];
        let mut rewards = vec![0.0_f32; n];
        let mut discounts = vec![0.0_f32; n];
        let drawn = self.replay.sample_into(
            n,
            &mut [
                observations.as_mut_bytes(),
                next_observations.as_mut_bytes(),
                actions.as_mut_bytes(),
                rewards.as_mut_bytes(),
                discounts.as_mut_bytes(),
            ],
        )?;
        let cpu = &Device::Cpu;
        let weights = drawn
            .weights
            .map(|weights| Tensor::from_vec(weights, n, cpu));
        Ok(Minibatch {
            ids: drawn.ids,
            observations: Tensor::from_vec(observations, (n, len), cpu)?,
            next_observations: Tensor::from_vec(next_observations, (n, len), cpu)?,
            actions: Tensor::from_vec(actions, (n, 1), cpu)?,
            rewards: Tensor::from_vec(rewards, n, cpu)?,
            discounts: Tensor::from_vec(discounts, n, cpu)?,
            weights: weights.transpose()?,
        })
    }
}

impl Learner for Dqn {
    fn learn(&mut self, frames: &Frames) -> Result<(), Error> {
        self.update(frames).map(drop)
    }

    fn var_map(&self) -> &VarMap {
        self.model.var_map()
    }
}

/// A minibatch as tensors.
struct Minibatch {
    ids: Vec<u64>,
    observations: Tensor,
    next_observations: Tensor,
    /// `[N, 1]`, as `gather` wants them.
    actions: Tensor,
    rewards: Tensor,
    /// What the value of the next observation counts.
    discounts: Tensor,
    /// Importance weights, where frames are drawn by priority.
    weights: Option<Tensor>,
}

#[cfg(test)]
mod tests;
