//! Trajectory ids that no two workers share.

use crate::frames::Frames;

/// Renames the trajectories of all workers into one growing count, in the order
/// in which they come: batch, worker, then time and environment of the first
/// frame.
#[derive(Debug)]
pub(super) struct Trajectories {
    next: u64,
    workers: Vec<Worker>,
}

#[derive(Clone, Debug, Default)]
struct Worker {
    /// Counts how often its trajectories were cut.
    stretch: u64,
    /// The stretch of the part renamed last, and the trajectories it ended with.
    last: (u64, Vec<UnderWay>),
}

/// The trajectory of an environment's last frame.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    /// As its worker numbers it.
    local: u64,
    id: u64,
}

impl Trajectories {
    pub fn new(workers: usize) -> Self {
        Self {
            next: 0,
            workers: vec![Worker::default(); workers],
        }
    }

    /// The stretch that frames which come from a worker now belong to.
    pub fn stretch(&self, worker: usize) -> u64 {
        self.workers[worker].stretch
    }

    /// Cuts the trajectories of a worker: what comes from it now does not follow
    /// what came before, for a part between is lost or the worker is another.
    pub fn cut(&mut self, worker: usize) {
        self.workers[worker].stretch += 1;
    }

    /// Renames the trajectories of a worker's part, `[P, T]`.
    pub fn rename(&mut self, worker: usize, stretch: u64, part: &mut Frames) {
        let steps = part.steps();
        if steps == 0 {
            return;
        }
        let (last, under_way) = std::mem::take(&mut self.workers[worker].last);
        let known = under_way.into_iter().filter(|_| last == stretch);
        let mut current: Vec<Option<UnderWay>> = known.map(Some).collect();
        current.resize(part.traj_ids.len() / steps, None);
        for t in 0..steps {
            for (env, current) in current.iter_mut().enumerate() {
                let name = &mut part.traj_ids[env * steps + t];
                let known = current.filter(|under_way| under_way.local == *name);
                let under_way = known.unwrap_or_else(|| {
                    let id = self.next;
                    self.next += 1;
                    UnderWay { local: *name, id }
                });
                *name = under_way.id;
                *current = Some(under_way);
            }
        }
        self.workers[worker].last = (stretch, current.into_iter().flatten().collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::ActionKind;

    fn part(ids: [[u64; 3]; 2]) -> Frames {
        let mut frames = Frames::zeroed(2, 3, 1, ActionKind::Discrete);
        frames.traj_ids = ids.concat();
        frames
    }

    #[test]
    fn trajectories_are_renamed_in_order_of_appearance() {
        let mut trajectories = Trajectories::new(2);
        let mut rename = |worker, ids| {
            let mut part = part(ids);
            trajectories.rename(worker, 0, &mut part);
            part.traj_ids
        };
        assert_eq!(rename(0, [[0, 2, 2], [1, 1, 3]]), [0, 2, 2, 1, 1, 3]);
        assert_eq!(rename(1, [[0, 0, 0], [1, 2, 2]]), [4, 4, 4, 5, 6, 6]);
        // They go on in the next batch; 4 began and ended between two frames.
        assert_eq!(rename(0, [[2, 5, 5], [6, 6, 6]]), [2, 8, 8, 7, 7, 7]);
        assert_eq!(rename(1, [[0, 0, 3], [2, 2, 2]]), [4, 4, 9, 6, 6, 6]);
    }

    #[test]
    fn a_trajectory_is_cut_where_frames_are_lost() {
        let mut trajectories = Trajectories::new(1);
        for expected in [0, 2] {
            let mut part = part([[0, 0, 0], [1, 1, 1]]);
            let stretch = trajectories.stretch(0);
            trajectories.rename(0, stretch, &mut part);
            let (a, b) = (expected, expected + 1);
            assert_eq!(part.traj_ids, [a, a, a, b, b, b]);
            trajectories.cut(0);
        }
    }
}
