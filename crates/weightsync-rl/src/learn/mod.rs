//! What the learners share: networks, their variables, and a step of the
//! optimiser.

mod mlp;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use candle_core::{Tensor, Var, backprop::GradStore};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW, VarMap};

use crate::{
    Error,
    frames::Frames,
    policy::{GaussianPolicy, MlpPolicy},
};

pub(crate) use mlp::Mlp;

/// Something that makes better weights of frames.
pub trait Learner {
    /// Trains on a batch of frames.
    ///
    /// # Errors
    /// As [`Ppo::update`](crate::ppo::Ppo::update) and
    /// [`Dqn::update`](crate::dqn::Dqn::update).
    fn learn(&mut self, frames: &Frames) -> Result<(), Error>;

    /// The variables as they are now, to send to workers.
    fn var_map(&self) -> &VarMap;
}

/// Keeps candle's matrix products, in the whole process, to the thread that
/// asks for them. Minibatches of small networks gain nothing from more threads,
/// and workers on the same machine have a use for the other cores.
pub fn keep_to_one_thread() {
    gemm::set_threading_threshold(usize::MAX);
}

/// A copy of a model's weights, to act on outside of candle.
#[derive(Clone, Debug)]
pub struct WeightsCopy {
    inputs: usize,
    tensors: BTreeMap<String, Vec<f32>>,
}

impl WeightsCopy {
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

/// The variables of a model, in the order of their names, which a `VarMap` does
/// not keep: sums over all variables must not depend on the order of a hash map.
pub(crate) struct Variables {
    var_map: VarMap,
    vars: Vec<(String, Var)>,
}

impl Variables {
    pub fn new(vars: BTreeMap<String, Var>) -> Self {
        let var_map = VarMap::new();
        // The map is new, so its lock is not poisoned.
        if let Ok(mut data) = var_map.data().lock() {
            data.extend(vars.iter().map(|(name, var)| (name.clone(), var.clone())));
        }
        Self {
            var_map,
            vars: vars.into_iter().collect(),
        }
    }

    pub fn var_map(&self) -> &VarMap {
        &self.var_map
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// Copies of all, for a policy that takes `inputs` quantities.
    pub fn weights(&self, inputs: usize) -> Result<WeightsCopy, Error> {
        let mut tensors = BTreeMap::new();
        for (name, var) in self.iter() {
            let data = var.as_tensor().flatten_all()?.to_vec1::<f32>()?;
            tensors.insert(name.to_owned(), data);
        }
        Ok(WeightsCopy { inputs, tensors })
    }
}

/// Adam, on gradients whose norm is limited.
pub(crate) struct Optimizer {
    adam: AdamW,
    vars: Vec<Var>,
    max_norm: f64,
}

impl Optimizer {
    /// Trains `vars`; `max_norm` is the largest norm of the gradient of all
    /// together.
    pub fn new(vars: Vec<Var>, learning_rate: f64, max_norm: f64) -> Result<Self, Error> {
        let params = ParamsAdamW {
            lr: learning_rate,
            eps: 1e-5,
            weight_decay: 0.0,
            ..ParamsAdamW::default()
        };
        Ok(Self {
            adam: AdamW::new(vars.clone(), params)?,
            vars,
            max_norm,
        })
    }

    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.adam.set_learning_rate(learning_rate);
    }

    /// One step down the gradient of `loss`.
    pub fn step(&mut self, loss: &Tensor) -> Result<(), Error> {
        let mut gradients = loss.backward()?;
        self.clip(&mut gradients)?;
        Ok(self.adam.step(&gradients)?)
    }

    fn clip(&self, gradients: &mut GradStore) -> Result<(), Error> {
        // One norm for all variables, so their gradients keep their proportions.
        let mut squares = 0.0;
        for var in &self.vars {
            if let Some(gradient) = gradients.get(var) {
                squares += scalar(&gradient.sqr()?.sum_all()?)?;
            }
        }
        // Without a gradient this is infinite, and nothing is scaled.
        let scale = self.max_norm / squares.sqrt();
        if scale < 1.0 {
            for var in &self.vars {
                if let Some(gradient) = gradients.remove(var) {
                    gradients.insert(var, (gradient * scale)?);
                }
            }
        }
        Ok(())
    }
}

pub(crate) fn scalar(tensor: &Tensor) -> Result<f64, Error> {
    Ok(f64::from(tensor.to_scalar::<f32>()?))
}
