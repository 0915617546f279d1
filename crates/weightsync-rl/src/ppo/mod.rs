//! Proximal policy optimisation (Schulman et al., 2017) on candle.
//!
//! [`ActorCritic`] holds the networks in a `VarMap`; [`Ppo::update`] turns one
//! batch of frames into better weights: [`advantages`], then
//! epochs of shuffled minibatches on the clipped objective.

mod gae;
mod model;

use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use rand::{SeedableRng, seq::SliceRandom};

pub use gae::advantages;
pub use model::ActorCritic;

use crate::{
    Error,
    env::EnvRng,
    frames::{Actions, Frames},
    learn::{Learner, Optimizer, scalar},
};

/// The settings of PPO.
///
/// The defaults suit short episodes with a reward for every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PpoConfig {
    /// Step size of Adam.
    pub learning_rate: f64,
    /// Discount per step, γ.
    pub discount: f32,
    /// How far advantages look ahead, λ.
    pub trace: f32,
    /// How far the ratio of new to old probability may leave 1.
    pub clip: f64,
    /// Weight of the entropy bonus.
    pub entropy: f64,
    /// Passes over every batch, at most.
    pub epochs: usize,
    /// Frames in a minibatch.
    pub minibatch: usize,
    /// Largest norm of the gradient of all weights together.
    pub max_grad_norm: f64,
    /// Estimated KL divergence from the policy that collected the batch above
    /// which no further pass is made.
    pub target_kl: f64,
}

impl Default for PpoConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            discount: 0.98,
            trace: 0.8,
            clip: 0.2,
            entropy: 0.0,
            epochs: 10,
            minibatch: 256,
            max_grad_norm: 0.5,
            target_kl: 0.02,
        }
    }
}

/// What one [`Ppo::update`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct UpdateStats {
    /// Steps of the optimiser.
    pub steps: usize,
    /// Mean of the clipped objective's loss over those steps.
    pub policy_loss: f64,
    /// Mean of half the squared error of the values.
    pub value_loss: f64,
    /// Mean entropy of the policy, in nats.
    pub entropy: f64,
    /// Estimated KL divergence in the last pass, in nats.
    pub kl: f64,
}

/// Networks, optimiser and settings.
///
/// ```
/// use weightsync_rl::{
///     env::CartPole,
///     ppo::{ActorCritic, Ppo, PpoConfig},
///     rollout::Rollout,
/// };
///
/// let model = ActorCritic::new(4, &[16], 2, 1)?;
/// let mut ppo = Ppo::new(model, PpoConfig::default(), 1)?;
/// let mut rollout = Rollout::<CartPole>::new(1, 1);
/// let weights = ppo.model().weights()?;
/// let frames = rollout.collect(&weights.policy()?, 0, 128);
/// let stats = ppo.update(&frames)?;
/// assert!(stats.steps > 0);
/// # Ok::<(), weightsync_rl::Error>(())
/// ```
pub struct Ppo {
    model: ActorCritic,
    config: PpoConfig,
    optimizer: Optimizer,
    rng: EnvRng,
}

impl Ppo {
    /// Starts to train `model`; `seed` orders the minibatches.
    ///
    /// # Errors
    /// [`Error::Candle`] if the optimiser's moments cannot be allocated.
    pub fn new(model: ActorCritic, config: PpoConfig, seed: u64) -> Result<Self, Error> {
        let vars = model.vars().map(|(_, var)| var.clone()).collect();
        Ok(Self {
            optimizer: Optimizer::new(vars, config.learning_rate, config.max_grad_norm)?,
            rng: EnvRng::seed_from_u64(seed),
            model,
            config,
        })
    }

    /// The networks as they are now.
    pub fn model(&self) -> &ActorCritic {
        &self.model
    }

    /// Scales the learning rate to `fraction` of the configured one.
    pub fn anneal(&mut self, fraction: f64) {
        self.optimizer
            .set_learning_rate(self.config.learning_rate * fraction);
    }

    /// Trains on one batch of frames; afterwards the weights are newer than
    /// those the frames were collected with.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor operation fails, as it does when the
    /// observations' length or the kind of actions is not that of the model.
    pub fn update(&mut self, frames: &Frames) -> Result<UpdateStats, Error> {
        let batch = TensorBatch::new(&self.model, frames, &self.config)?;
        let mut order: Vec<u32> = (0..frames.len() as u32).collect();
        let mut stats = UpdateStats::default();
        for _ in 0..self.config.epochs {
            // Another order in each pass, so minibatches differ.
            order.shuffle(&mut self.rng);
            let (mut kl, mut parts) = (0.0, 0);
            for indices in order.chunks(self.config.minibatch.max(1)) {
                kl += self.step(&batch.select(indices)?, &mut stats)?;
                parts += 1;
            }
            stats.kl = kl / f64::from(parts.max(1));
            // The policy has moved so far that the batch no longer tells about it.
            if stats.kl > self.config.target_kl {
                break;
            }
        }
        let steps = stats.steps.max(1) as f64;
        stats.policy_loss /= steps;
        stats.value_loss /= steps;
        stats.entropy /= steps;
        Ok(stats)
    }

    /// One step on one minibatch; returns its KL estimate.
    fn step(&mut self, batch: &TensorBatch, stats: &mut UpdateStats) -> Result<f64, Error> {
        let (chosen, entropy) = self.model.evaluate(&batch.observations, &batch.actions)?;
        let log_ratio = (chosen - &batch.log_probs)?;
        let ratio = log_ratio.exp()?;
        let clipped = ratio.clamp(1.0 - self.config.clip, 1.0 + self.config.clip)?;
        // The worse of the two: a step gains nothing by leaving the range.
        let policy_loss = (&ratio * &batch.advantages)?
            .minimum(&(clipped * &batch.advantages)?)?
            .mean_all()?
            .neg()?;
        let error = (self.model.values(&batch.observations)? - &batch.returns)?;
        let value_loss = (error.sqr()?.mean_all()? * 0.5)?;
        let loss = ((&policy_loss + &value_loss)? - (&entropy * self.config.entropy)?)?;

        self.optimizer.step(&loss)?;

        stats.steps += 1;
        stats.policy_loss += scalar(&policy_loss)?;
        stats.value_loss += scalar(&value_loss)?;
        stats.entropy += scalar(&entropy)?;
        // (r − 1) − ln r: unbiased, never negative (Schulman, 2020).
        scalar(&((ratio - 1.0)? - log_ratio)?.mean_all()?)
    }
}

impl Learner for Ppo {
    fn learn(&mut self, frames: &Frames) -> Result<(), Error> {
        self.update(frames).map(drop)
    }

    fn var_map(&self) -> &VarMap {
        self.model.var_map()
    }
}

/// Frames as tensors, first dimension all frames or a selection of them.
struct TensorBatch {
    observations: Tensor,
    /// Discrete ones `[N, 1]`, as `gather` wants them; continuous ones with all
    /// their quantities.
    actions: Tensor,
    log_probs: Tensor,
    /// With mean 0 and deviation 1.
    advantages: Tensor,
    /// What the values should have been.
    returns: Tensor,
}

impl TensorBatch {
    fn new(model: &ActorCritic, frames: &Frames, config: &PpoConfig) -> Result<Self, Error> {
        let n = frames.len();
        let observed =
            |data: &[f32]| Tensor::from_slice(data, (n, frames.observation_len), &Device::Cpu);
        let vector = |data: &[f32]| Tensor::from_slice(data, n, &Device::Cpu);

        let observations = observed(&frames.observations)?;
        // The critic before any step of this batch: advantages are of the policy that collected it.
        let values = model.values(&observations)?.to_vec1::<f32>()?;
        let next_values = model.values(&observed(&frames.next_observations)?)?;
        let mut advantages = advantages(
            frames,
            &values,
            &next_values.to_vec1::<f32>()?,
            config.discount,
            config.trace,
        );
        // Before the advantages are standardised: values are learned in the units of the rewards.
        let returns: Vec<f32> = advantages.iter().zip(&values).map(|(a, v)| a + v).collect();
        gae::standardize(&mut advantages);
        Ok(Self {
            observations,
            actions: match &frames.actions {
                Actions::Discrete(actions) => Tensor::from_slice(actions, (n, 1), &Device::Cpu)?,
                Actions::Continuous { values, len } => {
                    Tensor::from_slice(values, (n, *len), &Device::Cpu)?
                }
            },
            log_probs: vector(&frames.log_probs)?,
            advantages: vector(&advantages)?,
            returns: vector(&returns)?,
        })
    }

    fn select(&self, indices: &[u32]) -> Result<Self, Error> {
        let indices = Tensor::from_slice(indices, indices.len(), &Device::Cpu)?;
        let pick = |tensor: &Tensor| tensor.index_select(&indices, 0);
        Ok(Self {
            observations: pick(&self.observations)?,
            actions: pick(&self.actions)?,
            log_probs: pick(&self.log_probs)?,
            advantages: pick(&self.advantages)?,
            returns: pick(&self.returns)?,
        })
    }
}

#[cfg(test)]
mod tests;
