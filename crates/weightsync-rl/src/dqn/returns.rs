use crate::frames::Frames;

/// What each frame of a batch led to, some steps ahead.
pub(super) struct Returns {
    /// Discounted sums.
    pub rewards: Vec<f32>,
    /// What the last of these steps led to.
    pub next_observations: Vec<f32>,
    /// What the value of that counts: nothing, where the task ended.
    pub discounts: Vec<f32>,
}

impl Returns {
    /// Looks up to `steps` steps ahead, and no further than the episode and the
    /// batch go.
    pub fn of(frames: &Frames, discount: f32, steps: usize) -> Self {
        let (count, len) = (frames.len(), frames.observation_len);
        let mut returns = Self {
            rewards: frames.rewards.clone(),
            next_observations: Vec::with_capacity(count * len),
            discounts: vec![discount; count],
        };
        // Each frame looks ahead on its own, within its trajectory and batch.
        for first in 0..count {
            let mut last = first;
            // Frames of one trajectory follow each other, in a row of time.
            while last + 1 < count
                && last + 1 < first + steps
                && !frames.done(last)
                && frames.traj_ids[last + 1] == frames.traj_ids[first]
            {
                last += 1;
                returns.rewards[first] += returns.discounts[first] * frames.rewards[last];
                returns.discounts[first] *= discount;
            }
            // Nothing follows an end, so no value is added.
            if frames.terminated[last] {
                // What a limit cut off has a value, and what has ended none.
                returns.discounts[first] = 0.0;
            }
            let next = last * len..(last + 1) * len;
            let next = frames.next_observations.get(next);
            returns.next_observations.extend(next.unwrap_or_default());
        }
        returns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::ActionKind;

    #[test]
    fn returns_of_a_worked_example() {
        let mut frames = Frames::zeroed(1, 7, 1, ActionKind::Discrete);
        frames.rewards = vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
        frames.next_observations = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        // The first episode is cut, the second ends, and the third goes on.
        frames.truncated[1] = true;
        frames.terminated[4] = true;
        frames.traj_ids = vec![0, 0, 1, 1, 1, 2, 3];
        let one = Returns::of(&frames, 0.5, 1);
        assert_eq!(one.rewards, frames.rewards);
        assert_eq!(one.next_observations, frames.next_observations);
        assert_eq!(one.discounts, [0.5, 0.5, 0.5, 0.5, 0.0, 0.5, 0.5]);
        let two = Returns::of(&frames, 0.5, 2);
        assert_eq!(two.rewards, [2.0, 2.0, 8.0, 16.0, 16.0, 32.0, 64.0]);
        assert_eq!(two.next_observations, [2.0, 2.0, 4.0, 5.0, 5.0, 6.0, 7.0]);
        assert_eq!(two.discounts, [0.25, 0.5, 0.25, 0.0, 0.0, 0.5, 0.5]);
        let three = Returns::of(&frames, 0.5, 3);
        assert_eq!(three.rewards[2], 4.0 + 4.0 + 4.0);
        assert_eq!((three.next_observations[2], three.discounts[2]), (5.0, 0.0));
    }
}
