use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module};

use crate::{Error, env::EnvRng, policy::normal};

/// A multi-layer perceptron with `tanh` between its layers, as
/// [`MlpPolicy`](crate::policy::MlpPolicy) evaluates it.
pub(crate) struct Mlp(Vec<Linear>);

impl Mlp {
    /// A network from `inputs` quantities over the `hidden` layers to `outputs`.
    /// Its variables are put into `vars` as `{prefix}.{layer}.weight`
    /// (`[outputs, inputs]`) and `{prefix}.{layer}.bias` (`[outputs]`): weights
    /// are orthogonal, those of the last layer of length `output_gain`, and
    /// biases zero.
    pub fn new(
        prefix: &str,
        inputs: usize,
        hidden: &[usize],
        (outputs, output_gain): (usize, f32),
        vars: &mut BTreeMap<String, Var>,
        rng: &mut EnvRng,
    ) -> Result<Self, Error> {
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
        Ok(Self(layers))
    }

    /// Outputs, `[N, outputs]`, for observations `[N, inputs]`.
    pub fn forward(&self, observations: &Tensor) -> Result<Tensor, Error> {
        let mut x = observations.clone();
        for (i, layer) in self.0.iter().enumerate() {
            if i > 0 {
                x = x.tanh()?;
            }
            x = layer.forward(&x)?;
        }
        Ok(x)
    }

    /// The number of quantities that it takes.
    pub fn inputs(&self) -> Result<usize, Error> {
        Ok(self.0[0].weight().dim(1)?)
    }
}

/// A random `[rows, columns]` matrix whose rows (or columns, if they are fewer)
/// are orthogonal and of length `gain` (Saxe et al., 2014).
fn orthogonal(rows: usize, columns: usize, gain: f32, rng: &mut EnvRng) -> Vec<f32> {
    let (count, len) = (rows.min(columns), rows.max(columns));
    let mut basis: Vec<Vec<f32>> = Vec::with_capacity(count);
    while basis.len() < count {
        let mut vector: Vec<f32> = (0..len).map(|_| normal(rng)).collect();
        // Gram-Schmidt: what lies along the earlier vectors is taken out.
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
            // With more rows than columns, the columns are orthogonal instead.
            let (i, j) = if rows <= columns { (r, c) } else { (c, r) };
            matrix[r * columns + c] = gain * basis[i][j];
        }
    }
    matrix
}
