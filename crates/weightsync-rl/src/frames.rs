//! What a collector delivers: steps of environments, with time last.

mod split;
mod trajectories;

use std::ops::Range;

use crate::Error;

pub use split::{SplitFrames, runs, split_trajectories};
pub use trajectories::Trajectories;

/// Steps of environments.
///
/// Every field holds the entries of a batch of [`shape`](Self::shape) in
/// row-major order, observations times [`observation_len`](Self::observation_len).
/// The last dimension is time:
///
/// | | [`Sync`], [`MultiAsync`], [`Async`] | [`MultiSync`]: [`Stack`] | [`First`] | [`Last`] |
/// |---|---|---|---|---|
/// | a single environment in each worker | `[T]` | `[B, T]` | `[B × T]` | `[B × T]` |
/// | `P` environments in each | `[P, T]` | `[B, P, T]` | `[B × P, T]` | `[P, B × T]` |
///
/// [`Sync`]: crate::collector::Sync
/// [`MultiAsync`]: crate::collector::MultiAsync
/// [`Async`]: crate::collector::Async
/// [`MultiSync`]: crate::collector::MultiSync
/// [`Stack`]: CatResults::Stack
/// [`First`]: CatResults::First
/// [`Last`]: CatResults::Last
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Frames {
    /// The batch's dimensions, time last.
    pub shape: Vec<usize>,
    /// Number of `f32`s in one observation.
    pub observation_len: usize,
    /// What the policy saw, `[..shape, observation_len]`.
    pub observations: Vec<f32>,
    /// What the step led to, before any reset, `[..shape, observation_len]`.
    pub next_observations: Vec<f32>,
    /// What the policy did.
    pub actions: Actions,
    /// Natural logarithm of the probability the policy gave to the action, or of
    /// the density.
    pub log_probs: Vec<f32>,
    /// What the step earned.
    pub rewards: Vec<f32>,
    /// Whether the task ended with this step.
    pub terminated: Vec<bool>,
    /// Whether a limit cut the episode after this step.
    pub truncated: Vec<bool>,
    /// Version of the weights that chose the action; 0 where none did, for the
    /// action was drawn evenly from all there are.
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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Episode {
    /// Sum of its rewards, undiscounted.
    pub reward: f32,
    /// Number of its steps.
    pub steps: u32,
}

/// The actions of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Actions {
    /// A number of each frame.
    Discrete(Vec<u32>),
    /// Quantities of each frame, as they were drawn: tasks clip them.
    Continuous {
        /// `[..shape, len]`.
        values: Vec<f32>,
        /// Number of quantities in one action.
        len: usize,
    },
}

/// What a batch's actions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ActionKind {
    Discrete,
    Continuous(usize),
}

impl Actions {
    /// The actions, if they are discrete.
    pub fn discrete(&self) -> Option<&[u32]> {
        match self {
            Actions::Discrete(actions) => Some(actions),
            Actions::Continuous { .. } => None,
        }
    }

    /// The actions, `[..shape, len]`, and the number of quantities in one, if they
    /// are continuous.
    pub fn continuous(&self) -> Option<(&[f32], usize)> {
        match self {
            Actions::Discrete(_) => None,
            Actions::Continuous { values, len } => Some((values, *len)),
        }
    }

    pub(crate) fn zeroed(kind: ActionKind, frames: usize) -> Self {
        match kind {
            ActionKind::Discrete => Actions::Discrete(vec![0; frames]),
            ActionKind::Continuous(len) => Actions::Continuous {
                values: vec![0.0; frames * len],
                len,
            },
        }
    }

    pub(crate) fn kind(&self) -> ActionKind {
        match self {
            Actions::Discrete(_) => ActionKind::Discrete,
            Actions::Continuous { len, .. } => ActionKind::Continuous(*len),
        }
    }

    /// Whether there is one for each of so many frames.
    fn are(&self, frames: usize) -> bool {
        match self {
            Actions::Discrete(actions) => actions.len() == frames,
            // The number of quantities comes from a worker, so the product may overflow.
            Actions::Continuous { values, len } => frames.checked_mul(*len) == Some(values.len()),
        }
    }

    /// Appends those of some frames, which are of the same kind.
    fn extend(&mut self, other: &Actions, frames: Range<usize>) {
        match (self, other) {
            (Actions::Discrete(all), Actions::Discrete(other)) => {
                all.extend_from_slice(&other[frames]);
            }
            (Actions::Continuous { values, len }, Actions::Continuous { values: other, .. }) => {
                // All actions of a batch have one length.
                values.extend_from_slice(&other[frames.start * *len..frames.end * *len]);
            }
            // Batches of one task have one kind. `cat` has checked it.
            (all, other) => debug_assert_eq!(all.kind(), other.kind()),
        }
    }
}

impl Default for Actions {
    fn default() -> Self {
        Actions::Discrete(Vec::new())
    }
}

/// How the frames of several workers become one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CatResults {
    /// In a dimension of their own, the first: the documents' `"stack"`.
    #[default]
    Stack,
    /// Along the first dimension each has, which is time for single
    /// environments: the documents' `0`.
    First,
    /// Along time: the documents' `-1`.
    Last,
}

impl Frames {
    /// Room for the frames of some environments, all zero: shape `[envs, steps]`.
    pub(crate) fn zeroed(
        envs: usize,
        steps: usize,
        observation_len: usize,
        actions: ActionKind,
    ) -> Self {
        let len = envs * steps;
        Self {
            shape: vec![envs, steps],
            observation_len,
            observations: vec![0.0; len * observation_len],
            next_observations: vec![0.0; len * observation_len],
            actions: Actions::zeroed(actions, len),
            log_probs: vec![0.0; len],
            rewards: vec![0.0; len],
            terminated: vec![false; len],
            truncated: vec![false; len],
            policy_versions: vec![0; len],
            traj_ids: vec![0; len],
            episodes: Vec::new(),
        }
    }

    /// Number of frames: the product of the shape.
    pub fn len(&self) -> usize {
        self.policy_versions.len()
    }

    /// Whether there is no frame.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Length of the last dimension, time.
    pub fn steps(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Whether the episode of frame `index` ended with it, for either reason.
    pub fn done(&self, index: usize) -> bool {
        self.terminated[index] || self.truncated[index]
    }

    /// Refuses numbers that are none, and infinite actions and rewards: a policy that
    /// learns from them is lost. Observations may be infinite, as their space may be.
    ///
    /// # Errors
    /// [`Error::NotFinite`] about the first such number, in order of time. What
    /// led to it comes before what it led to.
    pub(crate) fn check_numbers(&self) -> Result<(), Error> {
        let steps = self.steps();
        let (actions, action_len) = self.actions.continuous().unwrap_or_default();
        let len = self.observation_len;
        // With the largest number that there may be; no comparison is true of NaN.
        let columns = [
            ("observation", &self.observations[..], len, f32::INFINITY),
            ("action", actions, action_len, f32::MAX),
            ("log_prob", &self.log_probs, 1, f32::INFINITY),
            (
                "next.observation",
                &self.next_observations,
                len,
                f32::INFINITY,
            ),
            ("next.reward", &self.rewards, 1, f32::MAX),
        ];
        // Most frames are in order, which a plain pass over each column shows.
        if columns
            .iter()
            .all(|(_, values, _, most)| values.iter().all(|value| value.abs() <= *most))
        {
            return Ok(());
        }
        // Only after the pass above has found something: this one keeps places, and is slower.
        let wrong =
            columns
                .iter()
                .enumerate()
                .filter_map(|(order, (column, values, len, most))| {
                    let values = values.iter().enumerate();
                    let places = values
                        .filter(|(_, value)| value.is_nan() || value.abs() > *most)
                        // Row-major again: time is the remainder, the environment the quotient.
                        .map(|(at, value)| (at / len % steps, order, at / len / steps, value));
                    // The earliest step. Within it, the first environment.
                    let (step, order, env, got) = places.min_by_key(|place| (place.0, place.2))?;
                    Some((
                        (step, order),
                        Error::NotFinite {
                            column,
                            env,
                            step,
                            got: *got,
                        },
                    ))
                });
        // The earliest step of all columns. Within it, the column that comes first in a step,
        // because it led to the others.
        match wrong.min_by_key(|(place, _)| *place) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// Puts the frames of several workers, each of the same shape, together.
    ///
    /// # Errors
    /// [`Error::FrameShape`] if one is not shaped like the first.
    pub fn cat(parts: Vec<Frames>, how: CatResults) -> Result<Frames, Error> {
        let count = parts.len();
        let Some(first) = parts.first() else {
            return Ok(Frames::default());
        };
        // All columns are copied by the first one's shape.
        for part in &parts {
            part.check(&first.shape, first.observation_len, first.actions.kind())?;
        }
        let mut shape = first.shape.clone();
        let (len, steps) = (first.len(), first.steps());
        // Only the shape differs between the ways, but for the order of rows with `Last`.
        match (how, shape.as_mut_slice()) {
            (CatResults::First, [first, ..]) => *first *= count,
            (CatResults::Last, [.., last]) => *last *= count,
            (CatResults::Stack, _) | (_, []) => shape.insert(0, count),
        }
        // Rows of time stay whole: one worker after the other, or in turns.
        let in_turns = how == CatResults::Last && len > steps;
        let mut all = if in_turns {
            let mut all = Frames::zeroed(0, 0, first.observation_len, first.actions.kind());
            for row in (0..len).step_by(steps) {
                parts
                    .iter()
                    .for_each(|part| all.extend(part, row..row + steps));
            }
            let episodes = parts.iter().flat_map(|part| &part.episodes);
            all.episodes = episodes.copied().collect();
            all
        } else {
            let mut parts = parts.into_iter();
            let mut all = parts.next().unwrap_or_default();
            for part in parts {
                all.extend(&part, 0..len);
                all.episodes.extend(part.episodes);
            }
            all
        };
        all.shape = shape;
        Ok(all)
    }

    /// Appends some of the other's frames, but not its episodes.
    pub(crate) fn extend(&mut self, other: &Frames, range: Range<usize>) {
        let seen = range.start * other.observation_len..range.end * other.observation_len;
        let (at, r) = (seen, range);
        self.observations
            .extend_from_slice(&other.observations[at.clone()]);
        self.next_observations
            .extend_from_slice(&other.next_observations[at]);
        self.actions.extend(&other.actions, r.clone());
        self.log_probs
            .extend_from_slice(&other.log_probs[r.clone()]);
        self.rewards.extend_from_slice(&other.rewards[r.clone()]);
        self.terminated
            .extend_from_slice(&other.terminated[r.clone()]);
        self.truncated
            .extend_from_slice(&other.truncated[r.clone()]);
        self.policy_versions
            .extend_from_slice(&other.policy_versions[r.clone()]);
        self.traj_ids.extend_from_slice(&other.traj_ids[r]);
    }

    /// Checks frames that came from outside against what was asked for.
    pub(crate) fn check(
        &self,
        shape: &[usize],
        observation_len: usize,
        actions: ActionKind,
    ) -> Result<(), Error> {
        // The product is of the shape that was asked for, and not of the frames' own.
        let len: usize = shape.iter().product();
        let fits = self.shape == shape
            && self.observation_len == observation_len
            && self.observations.len() == len * observation_len
            && self.next_observations.len() == len * observation_len
            && self.actions.kind() == actions
            && self.actions.are(len)
            && self.log_probs.len() == len
            && self.rewards.len() == len
            && self.terminated.len() == len
            && self.truncated.len() == len
            && self.policy_versions.len() == len
            && self.traj_ids.len() == len
            // An episode ends with a frame, so there are at most as many.
            && self.episodes.len() <= len;
        if fits {
            Ok(())
        } else {
            Err(Error::FrameShape {
                expected: shape.to_vec(),
                got: self.shape.clone(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeroed(envs: usize, steps: usize, observation_len: usize) -> Frames {
        Frames::zeroed(envs, steps, observation_len, ActionKind::Discrete)
    }

    /// Two workers' frames, `[2, 3]` each, whose actions tell where they are.
    fn parts() -> Vec<Frames> {
        let mut parts = vec![zeroed(2, 3, 4), zeroed(2, 3, 4)];
        parts[0].actions = Actions::Discrete(vec![0, 1, 2, 10, 11, 12]);
        parts[1].actions = Actions::Discrete(vec![100, 101, 102, 110, 111, 112]);
        parts
    }

    #[test]
    fn frames_of_workers_are_put_together_in_three_ways() {
        let cat = |how| {
            let all = Frames::cat(parts(), how).unwrap();
            all.check(&all.shape, 4, ActionKind::Discrete).unwrap();
            (all.shape, all.actions.discrete().unwrap().to_vec())
        };
        let in_order = vec![0, 1, 2, 10, 11, 12, 100, 101, 102, 110, 111, 112];
        assert_eq!(cat(CatResults::Stack), (vec![2, 2, 3], in_order.clone()));
        assert_eq!(cat(CatResults::First), (vec![4, 3], in_order));
        let in_turns = vec![0, 1, 2, 100, 101, 102, 10, 11, 12, 110, 111, 112];
        assert_eq!(cat(CatResults::Last), (vec![2, 6], in_turns));
    }

    #[test]
    fn continuous_actions_are_put_together_like_others() {
        let mut parts = vec![Frames::zeroed(2, 1, 1, ActionKind::Continuous(2)); 2];
        for (i, part) in parts.iter_mut().enumerate() {
            let first = i as f32 * 10.0;
            part.actions = Actions::Continuous {
                values: vec![first, first + 1.0, first + 2.0, first + 3.0],
                len: 2,
            };
        }
        let all = Frames::cat(parts, CatResults::Last).unwrap();
        let values = [0.0, 1.0, 10.0, 11.0, 2.0, 3.0, 12.0, 13.0];
        assert_eq!(all.shape, [2, 2]);
        assert_eq!(all.actions.continuous(), Some((&values[..], 2)));
    }

    #[test]
    fn numbers_that_are_none_are_named_where_they_began() {
        let frames = Frames::zeroed(2, 3, 4, ActionKind::Continuous(2));
        frames.check_numbers().unwrap();
        type Place = fn(&mut Frames) -> &mut f32;
        let cases: [(&str, Place, usize, usize); 5] = [
            (
                "observation",
                |frames| &mut frames.observations[4 * 5 + 3],
                1,
                2,
            ),
            (
                "next.observation",
                |frames| &mut frames.next_observations[4],
                0,
                1,
            ),
            ("log_prob", |frames| &mut frames.log_probs[3], 1, 0),
            ("next.reward", |frames| &mut frames.rewards[4], 1, 1),
            (
                "action",
                |frames| match &mut frames.actions {
                    Actions::Continuous { values, .. } => &mut values[2 * 2 + 1],
                    Actions::Discrete(_) => panic!("continuous"),
                },
                0,
                2,
            ),
        ];
        for (expected, place, at_env, at_step) in cases {
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut frames = frames.clone();
                *place(&mut frames) = wrong;
                if wrong.is_infinite() && !["action", "next.reward"].contains(&expected) {
                    frames.check_numbers().unwrap();
                    continue;
                }
                match frames.check_numbers() {
                    Err(Error::NotFinite {
                        column,
                        env,
                        step,
                        got,
                    }) => {
                        assert_eq!((column, env, step), (expected, at_env, at_step));
                        assert_eq!(got.to_bits(), wrong.to_bits());
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        // The action came before what it led to, and the step before the next.
        let mut frames = frames;
        frames.observations.fill(f32::NAN);
        frames.observations[..4].fill(0.0);
        frames.observations[12..16].fill(0.0);
        frames.next_observations.fill(f32::NAN);
        frames.log_probs[3] = f32::NAN;
        match frames.check_numbers() {
            Err(Error::NotFinite {
                column, env, step, ..
            }) => {
                assert_eq!((column, env, step), ("log_prob", 1, 0));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn frames_that_do_not_match_are_not_put_together() {
        let refused = |other: Frames| {
            let parts = vec![zeroed(2, 3, 4), other];
            Frames::cat(parts, CatResults::Stack).is_err()
        };
        assert!(refused(zeroed(2, 4, 4)));
        assert!(refused(zeroed(2, 3, 5)));
        let mut cut = zeroed(2, 3, 4);
        cut.rewards.pop();
        assert!(refused(cut), "one field too short");
        assert!(refused(Frames::zeroed(2, 3, 4, ActionKind::Continuous(1))));
    }
}
