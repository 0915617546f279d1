use std::collections::BTreeMap;

use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;
use rand::SeedableRng;

use crate::{
    Error,
    env::EnvRng,
    learn::{Mlp, Variables, WeightsCopy},
};

/// A network for the values of discrete actions, with `tanh` between its layers,
/// and the probability to explore, held in one `VarMap`.
///
/// The tensors are `actor.{layer}.weight` (`[outputs, inputs]`),
/// `actor.{layer}.bias` (`[outputs]`) and `actor.epsilon` (`[1]`), all `f32`.
/// [`MlpPolicy`](crate::policy::MlpPolicy) acts on them: the ε travels to the
/// workers with the weights that it belongs to.
pub struct QNetwork {
    variables: Variables,
    net: Mlp,
    hidden: Vec<usize>,
    actions: usize,
    epsilon: Var,
}

impl QNetwork {
    /// A network from `inputs` quantities over the `hidden` layers to the values
    /// of `actions`; orthogonal weights derived from `seed`, and an ε of 1.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor cannot be made.
    pub fn new(inputs: usize, hidden: &[usize], actions: usize, seed: u64) -> Result<Self, Error> {
        let mut rng = EnvRng::seed_from_u64(seed);
        let mut vars = BTreeMap::new();
        // A small last layer: nothing is known to be better than something else.
        let last = (actions, 0.01);
        let net = Mlp::new("actor", inputs, hidden, last, &mut vars, &mut rng)?;
        let epsilon = Var::from_vec(vec![1.0_f32], 1, &Device::Cpu)?;
        vars.insert("actor.epsilon".to_owned(), epsilon.clone());
        Ok(Self {
            variables: Variables::new(vars),
            net,
            hidden: hidden.to_vec(),
            actions,
            epsilon,
        })
    }

    /// The variables, as candle's tools take them, with the ε.
    pub fn var_map(&self) -> &VarMap {
        self.variables.var_map()
    }

    /// Every variable with its name, in the order of the names.
    pub fn vars(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.variables.iter()
    }

    /// The variables of the network alone.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Var> {
        let of_net = self.vars().filter(|(name, _)| *name != "actor.epsilon");
        of_net.map(|(_, var)| var)
    }

    /// Values of the actions, `[N, actions]`, for observations `[N, inputs]`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the shapes do not fit.
    pub fn values(&self, observations: &Tensor) -> Result<Tensor, Error> {
        self.net.forward(observations)
    }

    /// The number of quantities in an observation.
    pub(super) fn inputs(&self) -> Result<usize, Error> {
        self.net.inputs()
    }

    pub(super) fn set_epsilon(&self, epsilon: f32) -> Result<(), Error> {
        Ok(self.epsilon.set(&Tensor::new(&[epsilon], &Device::Cpu)?)?)
    }

    /// Another network of the same layers.
    pub(super) fn twin(&self) -> Result<Self, Error> {
        let (hidden, actions) = (&self.hidden, self.actions);
        // The seed does not matter: all layers are copied over.
        let twin = Self::new(self.inputs()?, hidden, actions, 0)?;
        twin.copy_from(self)?;
        Ok(twin)
    }

    /// Takes over the network of another one, which has the same layers.
    pub(super) fn copy_from(&self, other: &Self) -> Result<(), Error> {
        for (to, from) in self.layers().zip(other.layers()) {
            to.set(from.as_tensor())?;
        }
        Ok(())
    }

    /// Copies the weights out.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor cannot be read.
    pub fn weights(&self) -> Result<WeightsCopy, Error> {
        self.variables.weights(self.inputs()?)
    }
}
