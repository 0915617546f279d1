use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, VarMap, ops::log_softmax};
use rand::SeedableRng;

use crate::{
    Error,
    env::EnvRng,
    policy::{GaussianPolicy, LOG_SQRT_TAU, MlpPolicy, normal},
};

/// A policy and a value network with `tanh` between their layers, held in one
/// `VarMap`.
///
/// The tensors are `actor.{layer}.weight` (`[outputs, inputs]`),
/// `actor.{layer}.bias` (`[outputs]`), and the same under `critic`; all `f32`.
/// [`MlpPolicy`] acts on the actor's tensors, or [`GaussianPolicy`], with
/// `actor.log_std` besides, where actions are continuous.
pub struct ActorCritic {
    var_map: VarMap,
    /// In the order of their names, which a `VarMap` does not keep: sums over
    /// all variables must not depend on the order of a hash map.
    vars: Vec<(String, Var)>,
    actor: Vec<Linear>,
    /// Logarithms of the deviations, where actions are continuous, `[N]`.
    log_std: Option<Var>,
    critic: Vec<Linear>,
}

/// A copy of a model's weights, to act on outside of candle.
#[derive(Clone, Debug)]
pub struct Weights {
    inputs: usize,
    tensors: BTreeMap<String, Vec<f32>>,
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
        let actor = layers(
            "actor",
            inputs,
            hidden,
            (outputs, 0.01),
            &mut vars,
            &mut rng,
        )?;
        let critic = layers("critic", inputs, hidden, (1, 1.0), &mut vars, &mut rng)?;
        let deviations = log_std
            .iter()
            .map(|var| ("actor.log_std".to_owned(), var.clone()));
        vars.extend(deviations);
        let var_map = VarMap::new();
        if let Ok(mut data) = var_map.data().lock() {
            data.extend(vars.iter().map(|(name, var)| (name.clone(), var.clone())));
        }
        Ok(Self {
            var_map,
            vars: vars.into_iter().collect(),
            actor,
            log_std,
            critic,
        })
    }

    /// The variables, as candle's tools take them.
    pub fn var_map(&self) -> &VarMap {
        &self.var_map
    }

    /// Every variable with its name, in the order of the names.
    pub fn vars(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// Logits of the actions, or means of their quantities, `[N, outputs]`, for
    /// observations `[N, inputs]`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the shapes do not fit.
    pub fn logits(&self, observations: &Tensor) -> Result<Tensor, Error> {
        forward(&self.actor, observations)
    }

    /// Values, `[N]`, for observations `[N, inputs]`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the shapes do not fit.
    pub fn values(&self, observations: &Tensor) -> Result<Tensor, Error> {
        Ok(forward(&self.critic, observations)?.squeeze(1)?)
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
        let away = (actions - outputs)?.broadcast_div(&log_std.exp()?)?;
        let height = (log_std + f64::from(LOG_SQRT_TAU))?;
        let chosen = (away.sqr()? * -0.5)?.broadcast_sub(&height)?.sum(1)?;
        let entropy = (height + 0.5)?.sum_all()?;
        Ok((chosen, entropy))
    }

    /// Copies the weights out.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor cannot be read.
    pub fn weights(&self) -> Result<Weights, Error> {
        let mut tensors = BTreeMap::new();
        for (name, var) in self.vars() {
            let data = var.as_tensor().flatten_all()?.to_vec1::<f32>()?;
            tensors.insert(name.to_owned(), data);
        }
        let inputs = self.actor[0].weight().dim(1)?;
        Ok(Weights { inputs, tensors })
    }
}

impl Weights {
    /// The actor on these weights.
    ///
    /// # Errors
    /// As [`MlpPolicy::from_tensors`].
    pub fn policy(&self) -> Result<MlpPolicy<'_>, Error> {
        MlpPolicy::from_tensors(self.inputs, "actor", |name| self.tensor(name))
    }

    /// The actor on these weights, where actions are continuous.
    ///
    /// # Errors
    /// As [`GaussianPolicy::from_tensors`].
    pub fn gaussian<const N: usize>(&self) -> Result<GaussianPolicy<'_, N>, Error> {
        GaussianPolicy::from_tensors(self.inputs, "actor", |name| self.tensor(name))
    }

    fn tensor(&self, name: &str) -> Option<&[f32]> {
        self.tensors.get(name).map(Vec::as_slice)
    }
}

fn forward(layers: &[Linear], observations: &Tensor) -> Result<Tensor, Error> {
    let mut x = observations.clone();
    for (i, layer) in layers.iter().enumerate() {
        if i > 0 {
            x = x.tanh()?;
        }
        x = layer.forward(&x)?;
    }
    Ok(x)
}

fn layers(
    prefix: &str,
    inputs: usize,
    hidden: &[usize],
    (outputs, output_gain): (usize, f32),
    vars: &mut BTreeMap<String, Var>,
    rng: &mut EnvRng,
) -> Result<Vec<Linear>, Error> {
    let mut width = inputs;
    let mut layers = Vec::new();
    for i in 0..=hidden.len() {
        let (next, gain) = match hidden.get(i) {
            Some(&next) => (next, std::f32::consts::SQRT_2),
            None => (outputs, output_gain),
        };
        let weight = orthogonal(next, width, gain, rng);
        let weight = Var::from_vec(weight, (next, width), &Device::Cpu)?;
        let bias = Var::zeros(next, DType::F32, &Device::Cpu)?;
        layers.push(Linear::new(
            weight.as_tensor().clone(),
            Some(bias.as_tensor().clone()),
        ));
        vars.insert(format!("{prefix}.{i}.weight"), weight);
        vars.insert(format!("{prefix}.{i}.bias"), bias);
        width = next;
    }
    Ok(layers)
}

/// A random `[rows, columns]` matrix whose rows (or columns, if they are fewer)
/// are orthogonal and of length `gain` (Saxe et al., 2014).
fn orthogonal(rows: usize, columns: usize, gain: f32, rng: &mut EnvRng) -> Vec<f32> {
    let (count, len) = (rows.min(columns), rows.max(columns));
    let mut basis: Vec<Vec<f32>> = Vec::with_capacity(count);
    while basis.len() < count {
        let mut vector: Vec<f32> = (0..len).map(|_| normal(rng)).collect();
        for other in &basis {
            let overlap: f32 = vector.iter().zip(other).map(|(a, b)| a * b).sum();
            for (a, b) in vector.iter_mut().zip(other) {
                *a -= overlap * b;
            }
        }
        let norm = vector.iter().map(|a| a * a).sum::<f32>().sqrt();
        // A draw inside the span of the others is as good as none.
        if norm > 1e-3 {
            vector.iter_mut().for_each(|a| *a /= norm);
            basis.push(vector);
        }
    }
    let mut matrix = vec![0.0; rows * columns];
    for r in 0..rows {
        for c in 0..columns {
            let (i, j) = if rows <= columns { (r, c) } else { (c, r) };
            matrix[r * columns + c] = gain * basis[i][j];
        }
    }
    matrix
}
