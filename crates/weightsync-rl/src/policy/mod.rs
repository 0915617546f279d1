//! Acting: a small network evaluated straight from borrowed weights.
//!
//! A worker runs its policy one observation at a time, where a tensor library
//! spends more on bookkeeping than on arithmetic. [`MlpPolicy`] holds nothing
//! but slices, so it can read the weights out of a pinned snapshot in shared
//! memory: no copy is made between the trainer's send and the worker's action.

mod gaussian;

use rand::RngExt;

use crate::{Error, env::EnvRng};

pub use gaussian::GaussianPolicy;
#[cfg(feature = "candle")]
pub(crate) use gaussian::{LOG_SQRT_TAU, normal};

/// One fully connected layer, `y = W x + b`, on borrowed weights.
#[derive(Clone, Copy, Debug)]
struct Layer<'w> {
    /// Row-major, `[outputs, inputs]`.
    weight: &'w [f32],
    bias: &'w [f32],
    inputs: usize,
}

/// A multi-layer perceptron with `tanh` between its layers, whose outputs are
/// the logits of a categorical distribution over actions; or, where the weights
/// say with which probability to explore, the actions' values.
///
/// ```
/// use weightsync_rl::policy::{MlpPolicy, Policy};
///
/// let (weight, bias) = ([1.0, 0.0, 0.0, 1.0], [0.0, 0.5]);
/// let policy = MlpPolicy::from_tensors(2, "actor", |name| match name {
///     "actor.0.weight" => Some(&weight),
///     "actor.0.bias" => Some(&bias),
///     _ => None,
/// })?;
/// let mut scratch = policy.scratch();
/// assert_eq!(policy.logits(&[0.25, 0.25], &mut scratch), [0.25, 0.75]);
/// # Ok::<(), weightsync_rl::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MlpPolicy<'w> {
    layers: Vec<Layer<'w>>,
    /// Outputs are values: the action of the greatest is taken, or, with this
    /// probability, one drawn evenly from all there are.
    epsilon: Option<f32>,
}

/// Room for the activations of one forward pass; reuse it between passes.
#[derive(Clone, Debug)]
pub struct Activations {
    input: Vec<f32>,
    output: Vec<f32>,
}

/// An action drawn from a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice<A = u32> {
    /// The action: a discrete one is in `0..ACTIONS`.
    pub action: A,
    /// Natural logarithm of the probability it had, or of the density.
    pub log_prob: f32,
}

/// Something that chooses an action for an observation.
pub trait Policy {
    /// `u32`, or `[f32; N]`.
    type Action;

    /// Room for the forward passes of this policy.
    fn scratch(&self) -> Activations;

    /// Draws an action for one observation.
    fn sample(
        &self,
        observation: &[f32],
        scratch: &mut Activations,
        rng: &mut EnvRng,
    ) -> Choice<Self::Action>;

    /// The most likely action for one observation.
    fn greedy(&self, observation: &[f32], scratch: &mut Activations) -> Choice<Self::Action>;
}

impl<'w> MlpPolicy<'w> {
    /// The layers `{prefix}.0`, `{prefix}.1`, … as far as `tensor` knows them:
    /// each has a `.weight` of shape `[outputs, inputs]` and a `.bias` of shape
    /// `[outputs]`; the first one takes `inputs` quantities. With a tensor
    /// `{prefix}.epsilon` of one element, the policy is ε-greedy.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] without a first layer or without the bias of a
    /// layer, [`Error::TensorLen`] where a length does not fit the layer before,
    /// [`Error::NoProbability`] if the ε is none.
    pub fn from_tensors(
        inputs: usize,
        prefix: &str,
        tensor: impl Fn(&str) -> Option<&'w [f32]>,
    ) -> Result<Self, Error> {
        let mut layers = Vec::new();
        walk(
            inputs,
            prefix,
            &tensor,
            |slice| slice.len(),
            |weight, bias, inputs| {
                layers.push(Layer {
                    weight,
                    bias,
                    inputs,
                });
            },
        )?;
        let name = epsilon_of(prefix);
        // ε travels with the weights, so it is checked like any input.
        let epsilon = match tensor(&name) {
            None => None,
            Some(&[epsilon]) if (0.0..=1.0).contains(&epsilon) => Some(epsilon),
            Some(&[got]) => return Err(Error::NoProbability { name, got }),
            Some(several) => {
                check_len(&name, several.len(), 1)?;
                None
            }
        };
        Ok(Self { layers, epsilon })
    }

    /// The number of outputs of the policy that [`from_tensors`](Self::from_tensors)
    /// would make of tensors with as many elements as `len` says.
    pub(crate) fn width(
        inputs: usize,
        prefix: &str,
        len: impl Fn(&str) -> Option<usize>,
    ) -> Result<usize, Error> {
        let name = epsilon_of(prefix);
        check_len(&name, len(&name).unwrap_or(1), 1)?;
        walk(inputs, prefix, len, |len| len, |_, _, _| {})
    }

    /// Number of logits or values, that is of actions.
    pub fn outputs(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.bias.len())
    }

    /// The logits for one observation, whose sum of exponentials is not 1, or
    /// the values of the actions.
    pub fn logits<'s>(&self, observation: &[f32], scratch: &'s mut Activations) -> &'s [f32] {
        for (i, layer) in self.layers.iter().enumerate() {
            let input = if i == 0 {
                // The first layer reads the observation where it lies.
                observation
            } else {
                &scratch.input[..layer.inputs]
            };
            layer.forward(input, &mut scratch.output);
            // The last layer has no `tanh`: its outputs are logits or values.
            if i + 1 < self.layers.len() {
                for y in &mut scratch.output[..layer.bias.len()] {
                    *y = tanh(*y);
                }
                // The two buffers change roles, so no layer allocates.
                std::mem::swap(&mut scratch.input, &mut scratch.output);
            }
        }
        &scratch.output[..self.outputs()]
    }
}

impl Policy for MlpPolicy<'_> {
    type Action = u32;

    fn scratch(&self) -> Activations {
        let widest = self.layers.iter().map(|layer| layer.bias.len()).max();
        let buffer = vec![0.0; widest.unwrap_or(0)];
        Activations {
            input: buffer.clone(),
            output: buffer,
        }
    }

    fn sample(&self, observation: &[f32], scratch: &mut Activations, rng: &mut EnvRng) -> Choice {
        let outputs = self.logits(observation, scratch);
        let Some(epsilon) = self.epsilon else {
            // One number decides: inverse transform sampling.
            return draw(outputs, rng.random());
        };
        let action = match rng.random::<f32>() < epsilon {
            true => rng.random_range(0..outputs.len()),
            false => greatest(outputs),
        };
        epsilon_greedy(action, outputs, epsilon)
    }

    fn greedy(&self, observation: &[f32], scratch: &mut Activations) -> Choice {
        let outputs = self.logits(observation, scratch);
        let best = greatest(outputs);
        match self.epsilon {
            Some(epsilon) => epsilon_greedy(best, outputs, epsilon),
            None => Choice {
                action: best as u32,
                log_prob: outputs[best] - log_sum_exp(outputs),
            },
        }
    }
}

/// The name of the tensor that makes a policy ε-greedy.
fn epsilon_of(prefix: &str) -> String {
    format!("{prefix}.epsilon")
}

/// The first of the greatest outputs.
fn greatest(outputs: &[f32]) -> usize {
    let mut best = 0;
    for (i, output) in outputs.iter().enumerate() {
        if *output > outputs[best] {
            best = i;
        }
    }
    best
}

/// An action with the probability that it had.
fn epsilon_greedy(action: usize, values: &[f32], epsilon: f32) -> Choice {
    let even = epsilon / values.len() as f32;
    // The greatest action is also drawn by chance, with the even share.
    let probability = match action == greatest(values) {
        true => 1.0 - epsilon + even,
        false => even,
    };
    Choice {
        action: action as u32,
        log_prob: probability.ln(),
    }
}

/// Whether a tensor of a policy has as many elements as its task needs.
pub(crate) fn check_len(name: &str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::TensorLen {
        name: name.into(),
        expected,
        got,
    })
}

/// Goes through the layers `{prefix}.0`, `{prefix}.1`, … as far as `tensor` knows
/// them, hands weight, bias and number of inputs of each to `layer`, and returns
/// how many outputs the last one has.
fn walk<T: Copy>(
    inputs: usize,
    prefix: &str,
    tensor: impl Fn(&str) -> Option<T>,
    len: impl Fn(T) -> usize,
    mut layer: impl FnMut(T, T, usize),
) -> Result<usize, Error> {
    let mut width = inputs;
    for index in 0.. {
        let name = format!("{prefix}.{index}.weight");
        let Some(weight) = tensor(&name) else {
            if index == 0 {
                return Err(Error::MissingTensor { name });
            }
            break;
        };
        let bias_name = format!("{prefix}.{index}.bias");
        let bias = tensor(&bias_name).ok_or(Error::MissingTensor { name: bias_name })?;
        let outputs = len(bias);
        // Not a product of numbers from outside that could overflow.
        if width == 0 || outputs == 0 || outputs.checked_mul(width) != Some(len(weight)) {
            return Err(Error::TensorLen {
                name,
                expected: outputs.saturating_mul(width),
                got: len(weight),
            });
        }
        layer(weight, bias, width);
        width = outputs;
    }
    Ok(width)
}

impl Layer<'_> {
    fn forward(&self, input: &[f32], output: &mut [f32]) {
        // Each row of the weights is one output.
        let rows = self.weight.chunks_exact(self.inputs);
        for ((y, row), bias) in output.iter_mut().zip(rows).zip(self.bias) {
            *y = bias + dot(row, input);
        }
    }
}

/// Sixteen partial sums, so that the compiler may use vectors: it must not
/// reorder the additions of a single one.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    // By halves, which are vectors too; one after the other would take longer than the products.
    let eight: [f32; 8] = std::array::from_fn(|i| sums[i] + sums[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3]) + rest
}

/// The hyperbolic tangent as a quotient of two polynomials, right to 1e-6 (the
/// coefficients are those of the library Eigen). Without a branch, the compiler
/// may use vectors; the system's function takes most of a forward pass.
fn tanh(x: f32) -> f32 {
    const ODD: [f32; 7] = [
        -2.760_768_5e-16,
        2.000_188e-13,
        -8.604_672e-11,
        5.122_297e-8,
        1.485_722_4e-5,
        6.372_619_3e-4,
        4.893_525_4e-3,
    ];
    const EVEN: [f32; 4] = [1.198_258_4e-6, 1.185_347e-4, 2.268_434_6e-3, 4.893_525e-3];
    // Beyond, it is ±1 to the last bit.
    let x = x.clamp(-9.0, 9.0);
    let square = x * x;
    let at = |coefficients: &[f32]| coefficients.iter().fold(0.0, |sum, c| sum * square + c);
    x * at(&ODD) / at(&EVEN)
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Without the maximum, `exp` of a large logit would be infinite.
    max + logits.iter().map(|l| (l - max).exp()).sum::<f32>().ln()
}

/// The action whose share of `[0, 1)` contains `uniform`.
fn draw(logits: &[f32], uniform: f32) -> Choice {
    let total = log_sum_exp(logits);
    let mut left = uniform;
    // The shares add up to one but for rounding: the last action takes what is left over.
    let mut action = logits.len() - 1;
    for (i, logit) in logits.iter().enumerate() {
        left -= (logit - total).exp();
        if left < 0.0 {
            action = i;
            break;
        }
    }
    Choice {
        action: action as u32,
        log_prob: logits[action] - total,
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn a_tensor_that_is_missing_or_does_not_fit_is_named() {
        let (weight, bias) = ([0.0; 6], [0.0; 2]);
        let refused = |names: &'static [&'static str], inputs| {
            MlpPolicy::from_tensors(inputs, "actor", |name| {
                names.contains(&name).then(|| {
                    if name.ends_with("weight") {
                        &weight[..]
                    } else {
                        &bias[..]
                    }
                })
            })
            .unwrap_err()
            .to_string()
        };
        assert!(refused(&[], 3).contains("actor.0.weight"));
        assert!(refused(&["actor.0.weight"], 3).contains("actor.0.bias"));
        let both: &[&str] = &["actor.0.weight", "actor.0.bias"];
        assert!(refused(both, 4).contains("8"), "2 × 4 elements expected");
        // A second layer over two inputs would need four weights, not six.
        assert!(
            refused(
                &[
                    "actor.0.weight",
                    "actor.0.bias",
                    "actor.1.weight",
                    "actor.1.bias"
                ],
                3
            )
            .contains("actor.1.weight")
        );
    }

    #[test]
    fn actions_are_drawn_with_their_probabilities() {
        let bias = [0.0_f32, 2.0_f32.ln(), 5.0_f32.ln()];
        let weight = [0.0; 3];
        let policy = MlpPolicy::from_tensors(1, "p", |name| match name {
            "p.0.weight" => Some(&weight[..]),
            "p.0.bias" => Some(&bias[..]),
            _ => None,
        })
        .unwrap();
        let mut rng = EnvRng::seed_from_u64(1);
        let mut scratch = policy.scratch();
        let mut counts = [0_u32; 3];
        for _ in 0..16_000 {
            let choice = policy.sample(&[1.0], &mut scratch, &mut rng);
            counts[choice.action as usize] += 1;
            let expected = [0.125_f32, 0.25, 0.625][choice.action as usize];
            assert!((choice.log_prob.exp() - expected).abs() < 1e-6);
        }
        for (count, expected) in counts.iter().zip([2000.0, 4000.0, 10_000.0]) {
            let error = (f64::from(*count) - expected).abs();
            assert!(error < 5.0 * f64::sqrt(expected), "{counts:?}");
        }
        assert_eq!(policy.greedy(&[1.0], &mut scratch).action, 2);
    }

    #[test]
    fn values_are_explored_as_often_as_epsilon_says() {
        let (weight, bias) = ([0.0; 3], [0.5, 2.0, 1.0]);
        let policy = |epsilon: &'static [f32]| {
            MlpPolicy::from_tensors(1, "p", |name| match name {
                "p.0.weight" => Some(&weight[..]),
                "p.0.bias" => Some(&bias[..]),
                "p.epsilon" => Some(epsilon),
                _ => None,
            })
        };
        let explorer = policy(&[0.3]).unwrap();
        let mut rng = EnvRng::seed_from_u64(1);
        let mut scratch = explorer.scratch();
        let mut counts = [0_u32; 3];
        for _ in 0..10_000 {
            let choice = explorer.sample(&[1.0], &mut scratch, &mut rng);
            counts[choice.action as usize] += 1;
            let expected = [0.1_f32, 0.8, 0.1][choice.action as usize];
            assert!((choice.log_prob.exp() - expected).abs() < 1e-6);
        }
        for (count, expected) in counts.iter().zip([1000.0, 8000.0, 1000.0]) {
            let error = (f64::from(*count) - expected).abs();
            assert!(error < 5.0 * f64::sqrt(expected), "{counts:?}");
        }
        let certain = policy(&[0.0])
            .unwrap()
            .sample(&[1.0], &mut scratch, &mut rng);
        assert_eq!((certain.action, certain.log_prob), (1, 0.0));
        let refused = |epsilon| policy(epsilon).unwrap_err().to_string();
        assert!(refused(&[1.5]).contains("p.epsilon"));
        assert!(refused(&[f32::NAN]).contains("p.epsilon"));
        assert!(refused(&[]).contains("p.epsilon"));
    }

    #[test]
    fn tanh_is_that_of_the_system() {
        for i in -24_000..=24_000 {
            let x = i as f32 * 5e-4;
            let error = (tanh(x) - x.tanh()).abs();
            assert!(error <= 1e-6, "{error} at {x}");
        }
        assert_eq!(tanh(f32::INFINITY), tanh(9.0));
        assert!((tanh(f32::NEG_INFINITY) + 1.0).abs() <= 1e-6);
        assert!(tanh(f32::NAN).is_nan());
        assert_eq!(tanh(0.0), 0.0);
    }

    #[test]
    fn extreme_logits_stay_finite_and_in_range() {
        for uniform in [0.0, 0.5, 1.0 - f32::EPSILON] {
            let choice = draw(&[-1e4, 1e4], uniform);
            assert_eq!(choice.action, 1);
            assert_eq!(choice.log_prob, 0.0);
        }
        assert!(draw(&[f32::NAN, f32::NAN], 0.3).action < 2);
    }
}
