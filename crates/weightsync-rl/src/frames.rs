//! What a collector delivers: steps of environments, with time last.

use crate::Error;

/// Steps of `B` workers with `P` environments each over `T` steps.
///
/// Every field holds `B × P × T` entries in row-major order (time runs
/// fastest), observations times [`observation_len`](Self::observation_len).
/// This is the documents' `[B, P, T]`, `cat_results = "stack"`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Frames {
    /// `[B, P, T]`.
    pub shape: [usize; 3],
    /// Number of `f32`s in one observation.
    pub observation_len: usize,
    /// What the policy saw, `[B, P, T, observation_len]`.
    pub observations: Vec<f32>,
    /// What the step led to, before any reset, `[B, P, T, observation_len]`.
    pub next_observations: Vec<f32>,
    /// What the policy did.
    pub actions: Vec<u32>,
    /// Natural logarithm of the probability the policy gave to the action.
    pub log_probs: Vec<f32>,
    /// What the step earned.
    pub rewards: Vec<f32>,
    /// Whether the task ended with this step.
    pub terminated: Vec<bool>,
    /// Whether a limit cut the episode after this step.
    pub truncated: Vec<bool>,
    /// Version of the weights that chose the action.
    pub policy_versions: Vec<u64>,
    /// The trajectory of each frame. Frames of one id follow each other in time
    /// without a gap; a collector gives no id twice, whichever of its workers
    /// and batches the frames are from.
    pub traj_ids: Vec<u64>,
    /// Episodes that ended in these frames, worker by worker, in the order of
    /// their last steps.
    pub episodes: Vec<Episode>,
}

/// An episode that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Episode {
    /// Sum of its rewards, undiscounted.
    pub reward: f32,
    /// Number of its steps.
    pub steps: u32,
}

impl Frames {
    /// Room for one worker's frames, all zero: shape `[1, envs, steps]`.
    pub(crate) fn zeroed(envs: usize, steps: usize, observation_len: usize) -> Self {
        let len = envs * steps;
        Self {
            shape: [1, envs, steps],
            observation_len,
            observations: vec![0.0; len * observation_len],
            next_observations: vec![0.0; len * observation_len],
            actions: vec![0; len],
            log_probs: vec![0.0; len],
            rewards: vec![0.0; len],
            terminated: vec![false; len],
            truncated: vec![false; len],
            policy_versions: vec![0; len],
            traj_ids: vec![0; len],
            episodes: Vec::new(),
        }
    }

    /// Number of frames, `B × P × T`.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no frame.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Length of the last dimension, time.
    pub fn steps(&self) -> usize {
        self.shape[2]
    }

    /// Whether the episode of frame `index` ended with it, for either reason.
    pub fn done(&self, index: usize) -> bool {
        self.terminated[index] || self.truncated[index]
    }

    /// Puts the frames of several workers, each `[1, P, T]`, behind each other.
    ///
    /// # Errors
    /// [`Error::FrameShape`] if one is not shaped like the first.
    pub fn stack(parts: Vec<Frames>) -> Result<Frames, Error> {
        let mut parts = parts.into_iter();
        let Some(mut all) = parts.next() else {
            return Ok(Frames::default());
        };
        for part in parts {
            let [_, envs, steps] = all.shape;
            part.check([1, envs, steps], all.observation_len)?;
            all.shape[0] += 1;
            all.observations.extend(part.observations);
            all.next_observations.extend(part.next_observations);
            all.actions.extend(part.actions);
            all.log_probs.extend(part.log_probs);
            all.rewards.extend(part.rewards);
            all.terminated.extend(part.terminated);
            all.truncated.extend(part.truncated);
            all.policy_versions.extend(part.policy_versions);
            all.traj_ids.extend(part.traj_ids);
            all.episodes.extend(part.episodes);
        }
        Ok(all)
    }

    /// Checks frames that came from outside against what was asked for.
    pub(crate) fn check(&self, shape: [usize; 3], observation_len: usize) -> Result<(), Error> {
        let len: usize = shape.iter().product();
        let fits = self.shape == shape
            && self.observation_len == observation_len
            && self.observations.len() == len * observation_len
            && self.next_observations.len() == len * observation_len
            && self.actions.len() == len
            && self.log_probs.len() == len
            && self.rewards.len() == len
            && self.terminated.len() == len
            && self.truncated.len() == len
            && self.policy_versions.len() == len
            && self.traj_ids.len() == len
            && self.episodes.len() <= len;
        if fits {
            Ok(())
        } else {
            Err(Error::FrameShape {
                expected: shape,
                got: self.shape,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacked_frames_keep_worker_order_and_check_shapes() {
        let mut parts = vec![Frames::zeroed(2, 3, 4), Frames::zeroed(2, 3, 4)];
        parts[1].actions.fill(7);
        let all = Frames::stack(parts.clone()).unwrap();
        assert_eq!(all.shape, [2, 2, 3]);
        assert_eq!(all.actions[..6], [0; 6]);
        assert_eq!(all.actions[6..], [7; 6]);
        all.check([2, 2, 3], 4).unwrap();

        parts[1] = Frames::zeroed(2, 4, 4);
        assert!(Frames::stack(parts.clone()).is_err());
        parts[1] = Frames::zeroed(2, 3, 4);
        parts[1].rewards.pop();
        assert!(Frames::stack(parts).is_err(), "one field too short");
    }
}
