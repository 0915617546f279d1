use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::{VarMap, ops::log_softmax};
use rand::SeedableRng;

use crate::{
    Error,
    env::EnvRng,
    learn::{Mlp, Variables, WeightsCopy},
    policy::LOG_SQRT_TAU,
};

/// A policy and a value network with `tanh` between their layers, held in one
/// `VarMap`.
///
/// The tensors are `actor.{layer}.weight` (`[outputs, inputs]`),
/// `actor.{layer}.bias` (`[outputs]`), and the same under `critic`; all `f32`.
/// [`MlpPolicy`](crate::policy::MlpPolicy) acts on the actor's tensors, or
/// [`GaussianPolicy`](crate::policy::GaussianPolicy), with `actor.log_std`
/// besides, where actions are continuous.
pub struct ActorCritic {
    variables: Variables,
    actor: Mlp,
    /// Logarithms of the deviations, where actions are continuous, `[N]`.
    log_std: Option<Var>,
    critic: Mlp,
}

impl ActorCritic {
    /// Networks from `inputs` quantities over the `hidden` layers to `actions`
    /// logits, and to one value; orthogonal weights derived from `seed`.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor cannot be made.
    pub fn new(inputs: usize, hidden: &[usize], actions: usize, seed: u64) -> Result<Self, Error> {
        Self::with(inputs, hidden, actions, None, seed)
    }

    /// The same for continuous actions of `quantities`: the actor's outputs are
    /// their means, and all deviations are 1 at first.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor cannot be made.
    pub fn gaussian(
        inputs: usize,
        hidden: &[usize],
        quantities: usize,
        seed: u64,
    ) -> Result<Self, Error> {
        let log_std = Var::zeros(quantities, DType::F32, &Device::Cpu)?;
        Self::with(inputs, hidden, quantities, Some(log_std), seed)
    }

    fn with(
        inputs: usize,
        hidden: &[usize],
        outputs: usize,
        log_std: Option<Var>,
        seed: u64,
    ) -> Result<Self, Error> {
        let mut rng = EnvRng::seed_from_u64(seed);
        let mut vars = BTreeMap::new();
        // A small last layer makes the first policy try everything.
        let last = (outputs, 0.01);
        let actor = Mlp::new("actor", inputs, hidden, last, &mut vars, &mut rng)?;
        let critic = Mlp::new("critic", inputs, hidden, (1, 1.0), &mut vars, &mut rng)?;
        let deviations = log_std
            .iter()
            .map(|var| ("actor.log_std".to_owned(), var.clone()));
        vars.extend(deviations);
        Ok(Self {
            variables: Variables::new(vars),
            actor,
            log_std,
            critic,
        })
    }

    /// The variables, as candle's tools take them.
    pub fn var_map(&self) -> &VarMap {
        self.variables.var_map()
    }

    /// Every variable with its name, in the order of the names.
    pub fn vars(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.variables.iter()
    }

    /// Logits of the actions, or means of their quantities, `[N, outputs]`, for
    /// observations `[N, inputs]`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the shapes do not fit.
    pub fn logits(&self, observations: &Tensor) -> Result<Tensor, Error> {
        self.actor.forward(observations)
    }

    /// Values, `[N]`, for observations `[N, inputs]`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the shapes do not fit.
    pub fn values(&self, observations: &Tensor) -> Result<Tensor, Error> {
        Ok(self.critic.forward(observations)?.squeeze(1)?)
    }

    /// Logarithms of the probabilities or densities of actions, `[N]`, and the mean
    /// entropy of their distributions, a scalar.
    pub(super) fn evaluate(
        &self,
        observations: &Tensor,
        actions: &Tensor,
    ) -> Result<(Tensor, Tensor), Error> {
        let outputs = self.logits(observations)?;
        let Some(log_std) = &self.log_std else {
            let log_probs = log_softmax(&outputs, D::Minus1)?;
            let chosen = log_probs.gather(actions, 1)?.squeeze(1)?;
            let entropy = (log_probs.exp()? * &log_probs)?
                .sum(D::Minus1)?
                .mean_all()?
                .neg()?;
            return Ok((chosen, entropy));
        };
        let log_std = log_std.as_tensor();
        // In deviations from the mean.
        let away = (actions - outputs)?.broadcast_div(&log_std.exp()?)?;
        let height = (log_std + f64::from(LOG_SQRT_TAU))?;
        let chosen = (away.sqr()? * -0.5)?.broadcast_sub(&height)?.sum(1)?;
        // The deviations do not depend on the observation, so the entropy needs no mean over the
        // batch.
        let entropy = (height + 0.5)?.sum_all()?;
        Ok((chosen, entropy))
    }

    /// Copies the weights out.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor cannot be read.
    pub fn weights(&self) -> Result<WeightsCopy, Error> {
        self.variables.weights(self.actor.inputs()?)
    }
}
