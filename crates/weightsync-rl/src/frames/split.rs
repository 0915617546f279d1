use std::ops::Range;

use super::Frames;

/// Trajectories of different lengths, padded.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SplitFrames {
    /// One row for each of `N` trajectories, `[N, T]`, where `T` is the length of
    /// the longest. What is behind the end of a shorter one is zero.
    pub frames: Frames,
    /// Which frames are no padding, `[N, T]`.
    pub mask: Vec<bool>,
}

/// Gives each trajectory of a batch a row of its own, in the order in which they
/// begin in the batch. One that goes on in another batch is split there too.
///
/// ```
/// use weightsync::Tensors;
/// use weightsync_rl::{collector::{Sync, Task}, frames::split_trajectories};
///
/// let mut weights = Tensors::new();
/// weights.insert("actor.0.weight", [2, 4], vec![0.0_f32; 8])?;
/// weights.insert("actor.0.bias", [2], vec![0.0_f32; 2])?;
/// let mut collector = Sync::builder(Task::CartPole)
///     .frames_per_batch(50)
///     .max_frames_per_traj(8)
///     .start(&weights)?;
/// let split = split_trajectories(&collector.next_batch()?.frames);
/// assert_eq!(split.frames.shape, [7, 8]);
/// assert_eq!(split.mask.iter().filter(|valid| **valid).count(), 50);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn split_trajectories(frames: &Frames) -> SplitFrames {
    // A run is a piece of a trajectory within one row.
    let runs = runs(&frames.traj_ids, frames.steps());
    let longest = runs.iter().map(Range::len).max().unwrap_or(0);
    let kind = frames.actions.kind();
    // One row of zeros, as long as any padding.
    let padding = Frames::zeroed(1, longest, frames.observation_len, kind);
    let mut split = Frames::zeroed(0, 0, frames.observation_len, kind);
    let mut mask = Vec::with_capacity(runs.len() * longest);
    for run in &runs {
        split.extend(frames, run.clone());
        split.extend(&padding, run.len()..longest);
        mask.extend((0..longest).map(|t| t < run.len()));
    }
    split.shape = vec![runs.len(), longest];
    split.episodes.clone_from(&frames.episodes);
    SplitFrames {
        frames: split,
        mask,
    }
}

/// The frames of each trajectory in rows of `steps` ids: neighbours in a row with
/// one id, in the order of the rows and of time.
///
/// ```
/// use weightsync_rl::frames::runs;
///
/// assert_eq!(runs(&[0, 0, 1, 1, 1, 0], 3), [0..2, 2..3, 3..5, 5..6]);
/// ```
pub fn runs(ids: &[u64], steps: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for i in 0..ids.len() {
        match runs.last_mut() {
            // A new row begins where the step is 0: its first frame does not continue the row
            // before.
            Some(run) if i % steps != 0 && ids[i] == ids[i - 1] => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::frames::ActionKind;

    #[derive(Deserialize)]
    struct Golden {
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        batches: Vec<Recorded>,
    }

    #[derive(Deserialize)]
    struct Recorded {
        traj_ids: Vec<Vec<u64>>,
        split: Vec<Vec<u64>>,
        mask: Vec<Vec<bool>>,
    }

    #[test]
    fn batches_are_split_as_torchrl_splits_them() {
        let json = include_str!("../../tests/data/trajectories.json");
        let golden: Golden = serde_json::from_str(json).unwrap();
        for batch in golden.cases.iter().flat_map(|case| &case.batches) {
            let mut frames = Frames::zeroed(3, 5, 1, ActionKind::Discrete);
            frames.traj_ids = batch.traj_ids.concat();
            let split = split_trajectories(&frames);
            assert_eq!(
                split.frames.shape,
                [batch.split.len(), batch.split[0].len()]
            );
            assert_eq!(split.frames.traj_ids, batch.split.concat());
            assert_eq!(split.mask, batch.mask.concat());
        }
    }

    #[test]
    fn trajectories_are_padded_to_the_longest() {
        let mut frames = Frames::zeroed(2, 4, 1, ActionKind::Discrete);
        frames.traj_ids = vec![7, 7, 7, 9, 8, 10, 10, 11];
        frames.rewards = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        frames.observations = frames.rewards.clone();
        frames.terminated[2] = true;
        let split = split_trajectories(&frames);
        assert_eq!(split.frames.shape, [5, 3]);
        let rows: Vec<&[f32]> = split.frames.rewards.chunks(3).collect();
        let expected: [[f32; 3]; 5] = [
            [1.0, 2.0, 3.0],
            [4.0, 0.0, 0.0],
            [5.0, 0.0, 0.0],
            [6.0, 7.0, 0.0],
            [8.0, 0.0, 0.0],
        ];
        assert_eq!(rows, expected);
        assert_eq!(split.frames.observations, split.frames.rewards);
        let mask: Vec<bool> = expected
            .concat()
            .iter()
            .map(|reward| *reward > 0.0)
            .collect();
        assert_eq!(split.mask, mask);
        assert_eq!(
            split.frames.terminated.iter().filter(|end| **end).count(),
            1
        );
        split
            .frames
            .check(&[5, 3], 1, ActionKind::Discrete)
            .unwrap();
    }

    #[test]
    fn no_frames_are_no_trajectories() {
        let split = split_trajectories(&Frames::zeroed(2, 0, 4, ActionKind::Discrete));
        assert_eq!((split.frames.shape, split.mask), (vec![0, 0], vec![]));
    }
}
