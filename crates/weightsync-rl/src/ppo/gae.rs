use crate::frames::Frames;

/// Generalised advantage estimates (Schulman et al., 2016), one for each frame.
///
/// `values` and `next_values` are the critic's values of the observations and
/// next observations. A terminated episode has no future; a truncated one has,
/// and so has the last frame of a trajectory in a row of time: there the next
/// value stands for it.
///
/// # Panics
/// If `values` or `next_values` has not one entry per frame.
pub fn advantages(
    frames: &Frames,
    values: &[f32],
    next_values: &[f32],
    discount: f32,
    trace: f32,
) -> Vec<f32> {
    let steps = frames.steps().max(1);
    let mut advantages = vec![0.0; frames.len()];
    for start in (0..frames.len()).step_by(steps) {
        let mut ahead = 0.0;
        // Backwards, because each estimate builds on the next one.
        for i in (start..start + steps).rev() {
            let future = if frames.terminated[i] {
                0.0
            } else {
                next_values[i]
            };
            let surprise = frames.rewards[i] + discount * future - values[i];
            // A row may hold pieces of several workers.
            let follows = i + 1 < start + steps && frames.traj_ids[i] == frames.traj_ids[i + 1];
            // Nothing of another episode or trajectory flows back.
            if frames.done(i) || !follows {
                ahead = 0.0;
            }
            ahead = surprise + discount * trace * ahead;
            advantages[i] = ahead;
        }
    }
    advantages
}

/// Shifts and scales to mean 0 and standard deviation 1.
pub(super) fn standardize(values: &mut [f32]) {
    let n = values.len().max(1) as f32;
    let mean = values.iter().sum::<f32>() / n;
    let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / n;
    // The small number keeps equal advantages from a division by zero.
    let scale = 1.0 / (variance.sqrt() + 1e-8);
    for value in values {
        *value = (*value - mean) * scale;
    }
}
