use rand::RngExt;

use super::{Activations, Choice, MlpPolicy, Policy, check_len};
use crate::{Error, env::EnvRng};

/// A normal distribution over actions of `N` quantities that do not depend on
/// each other: the outputs of a multi-layer perceptron are their means, and their
/// deviations are the same for every observation.
///
/// Actions are not clipped, and their densities are those of what was drawn.
///
/// ```
/// use weightsync_rl::policy::{GaussianPolicy, Policy};
///
/// let (weight, bias, log_std) = ([1.0, 2.0], [0.5], [0.0]);
/// let policy = GaussianPolicy::<1>::from_tensors(2, "actor", |name| match name {
///     "actor.0.weight" => Some(&weight),
///     "actor.0.bias" => Some(&bias),
///     "actor.log_std" => Some(&log_std),
///     _ => None,
/// })?;
/// let mean = policy.greedy(&[0.25, 0.5], &mut policy.scratch());
/// assert_eq!(mean.action, [1.75]);
/// # Ok::<(), weightsync_rl::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GaussianPolicy<'w, const N: usize> {
    mean: MlpPolicy<'w>,
    /// Natural logarithms of the deviations.
    log_std: &'w [f32],
}

impl<'w, const N: usize> GaussianPolicy<'w, N> {
    /// The layers of the means as [`MlpPolicy::from_tensors`] reads them, and
    /// `{prefix}.log_std` of shape `[N]`, the natural logarithms of the
    /// deviations.
    ///
    /// # Errors
    /// As [`MlpPolicy::from_tensors`], and if there are not `N` means and
    /// deviations.
    pub fn from_tensors(
        inputs: usize,
        prefix: &str,
        tensor: impl Fn(&str) -> Option<&'w [f32]>,
    ) -> Result<Self, Error> {
        let mean = MlpPolicy::from_tensors(inputs, prefix, &tensor)?;
        check_len("the actor's last bias", mean.outputs(), N)?;
        let name = format!("{prefix}.log_std");
        let Some(log_std) = tensor(&name) else {
            return Err(Error::MissingTensor { name });
        };
        check_len(&name, log_std.len(), N)?;
        Ok(Self { mean, log_std })
    }

    /// The action so many deviations from the mean.
    fn at(
        &self,
        observation: &[f32],
        scratch: &mut Activations,
        away: [f32; N],
    ) -> Choice<[f32; N]> {
        let mut action = [0.0; N];
        action.copy_from_slice(self.mean.logits(observation, scratch));
        let mut log_prob = 0.0;
        // The quantities do not depend on each other, so their log densities add up.
        for i in 0..N {
            action[i] += self.log_std[i].exp() * away[i];
            log_prob -= 0.5 * away[i] * away[i] + self.log_std[i] + LOG_SQRT_TAU;
        }
        Choice { action, log_prob }
    }
}

/// Natural logarithm of √(2π).
pub(crate) const LOG_SQRT_TAU: f32 = 0.918_938_5;

impl<const N: usize> Policy for GaussianPolicy<'_, N> {
    type Action = [f32; N];

    fn scratch(&self) -> Activations {
        self.mean.scratch()
    }

    fn sample(
        &self,
        observation: &[f32],
        scratch: &mut Activations,
        rng: &mut EnvRng,
    ) -> Choice<[f32; N]> {
        self.at(observation, scratch, std::array::from_fn(|_| normal(rng)))
    }

    fn greedy(&self, observation: &[f32], scratch: &mut Activations) -> Choice<[f32; N]> {
        self.at(observation, scratch, [0.0; N])
    }
}

/// A normal deviate, by Box and Muller.
pub(crate) fn normal(rng: &mut EnvRng) -> f32 {
    let (u, v): (f32, f32) = (rng.random(), rng.random());
    // 1 − u lies in (0, 1], where the logarithm is finite.
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn policy<'w>(weight: &'w [f32], bias: &'w [f32], log_std: &'w [f32]) -> GaussianPolicy<'w, 2> {
        GaussianPolicy::from_tensors(1, "p", |name| match name {
            "p.0.weight" => Some(weight),
            "p.0.bias" => Some(bias),
            "p.log_std" => Some(log_std),
            _ => None,
        })
        .unwrap()
    }

    #[test]
    fn actions_have_the_mean_and_deviation_asked_for() {
        let log_std = [0.5_f32.ln(), 2.0_f32.ln()];
        let policy = policy(&[1.0, 0.0], &[0.0, -3.0], &log_std);
        let mut rng = EnvRng::seed_from_u64(3);
        let mut scratch = policy.scratch();
        let count = 20_000;
        let drawn: Vec<[f32; 2]> = (0..count)
            .map(|_| policy.sample(&[4.0], &mut scratch, &mut rng).action)
            .collect();
        for (i, (mean, deviation)) in [(4.0, 0.5), (-3.0, 2.0)].into_iter().enumerate() {
            let n = f64::from(count);
            let values = drawn.iter().map(|action| f64::from(action[i]));
            let average = values.clone().sum::<f64>() / n;
            let variance = values.map(|v| (v - average).powi(2)).sum::<f64>() / n;
            assert!((average - mean).abs() < 5.0 * deviation / n.sqrt());
            assert!((variance.sqrt() / deviation - 1.0).abs() < 0.03);
        }
    }

    #[test]
    fn densities_are_those_of_the_normal_distribution() {
        let log_std = [0.5_f32.ln(), 2.0_f32.ln()];
        let policy = policy(&[1.0, 0.0], &[0.0, -3.0], &log_std);
        let mut scratch = policy.scratch();
        let mode = policy.greedy(&[4.0], &mut scratch);
        assert_eq!(mode.action, [4.0, -3.0]);
        // 1 / (2π × 0.5 × 2).
        assert!((mode.log_prob + std::f32::consts::TAU.ln()).abs() < 1e-6);
        let away = policy.at(&[4.0], &mut scratch, [1.0, -2.0]);
        assert_eq!(away.action, [4.5, -7.0]);
        assert!((mode.log_prob - away.log_prob - 2.5).abs() < 1e-6);
    }

    #[test]
    fn a_policy_without_its_deviations_is_refused() {
        let (weight, bias) = ([0.0; 2], [0.0; 2]);
        let refused = |log_std: Option<&'static [f32]>| {
            let policy = GaussianPolicy::<2>::from_tensors(1, "p", |name| match name {
                "p.0.weight" => Some(&weight[..]),
                "p.0.bias" => Some(&bias[..]),
                "p.log_std" => log_std,
                _ => None,
            });
            policy.unwrap_err().to_string()
        };
        assert!(refused(None).contains("p.log_std"));
        assert!(refused(Some(&[0.0])).contains("p.log_std"));
    }
}
