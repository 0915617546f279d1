/// Gives the trajectories of all workers of a collector one growing count, in the
/// order in which they come: batch, worker, then time and environment of the first
/// frame.
///
/// Workers number their trajectories on their own, each from 0. Of each part that
/// comes from a worker, [`arrived`](Self::arrived) gives the place in that worker's
/// row of parts. [`rename`](Self::rename) goes on with a worker's trajectories where
/// one part follows the other; where a part between them was not handed out, or
/// another worker has taken the place, they get other ids.
///
/// ```
/// use weightsync_rl::frames::Trajectories;
///
/// let mut trajectories = Trajectories::new(2);
/// // Two environments, three steps each, of worker 1.
/// let (part, mut ids) = (trajectories.arrived(1), [0, 2, 2, 1, 1, 1]);
/// trajectories.rename(1, part, &mut ids, 3);
/// assert_eq!(ids, [0, 2, 2, 1, 1, 1]);
/// // Worker 0 counts from 0, too.
/// let (part, mut ids) = (trajectories.arrived(0), [0, 0, 0, 1, 1, 1]);
/// trajectories.rename(0, part, &mut ids, 3);
/// assert_eq!(ids, [3, 3, 3, 4, 4, 4]);
/// ```
#[derive(Clone, Debug)]
pub struct Trajectories {
    next: u64,
    workers: Vec<WorkerTrajectories>,
}

#[derive(Clone, Debug, Default)]
struct WorkerTrajectories {
    /// The place of the next part that comes.
    next_part: u64,
    /// The place of the part that would follow the one renamed last, and the
    /// trajectories that it would go on with, by environment.
    known: (u64, Vec<OpenTrajectory>),
}

/// The trajectory of an environment's last frame.
#[derive(Clone, Copy, Debug)]
struct OpenTrajectory {
    /// As its worker numbers it.
    local: u64,
    id: u64,
}

impl Trajectories {
    /// Of so many workers, before any has begun a trajectory.
    pub fn new(workers: usize) -> Self {
        Self {
            next: 0,
            workers: vec![WorkerTrajectories::default(); workers],
        }
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// The id that the next trajectory gets.
    pub fn next_id(&self) -> u64 {
        self.next
    }

    /// Has all trajectories get ids from this one on, also those that are under way.
    pub fn go_on_from(&mut self, next: u64) {
        self.next = next;
        for worker in &mut self.workers {
            // The next frame of each then begins a new id.
            worker.known.1.clear();
        }
    }

    /// Takes note that a part has come from a worker, and returns its place.
    ///
    /// # Panics
    /// As all methods, if there is no such worker.
    pub fn arrived(&mut self, worker: usize) -> u64 {
        let worker = &mut self.workers[worker];
        // Places count what arrives, also parts that are never handed out: a gap then shows.
        worker.next_part += 1;
        worker.next_part - 1
    }

    /// Takes note that another has taken a worker's place: its parts do not follow
    /// those that have come.
    pub fn replaced(&mut self, worker: usize) {
        // A gap, as a lost part would leave.
        self.workers[worker].next_part += 1;
    }

    /// Renames the trajectories of a part, `[P, T]`, of which `T` is `steps`. The
    /// parts of a worker come in the order of their places.
    pub fn rename(&mut self, worker: usize, part: u64, ids: &mut [u64], steps: usize) {
        if steps == 0 {
            return;
        }
        // Taken out, and put back at the end with what this part leads to.
        let (expected, under_way) = std::mem::take(&mut self.workers[worker].known);
        // The part does not follow the one that was renamed last, so nothing is continued.
        let known = under_way.into_iter().filter(|_| expected == part);
        let mut current: Vec<Option<OpenTrajectory>> = known.map(Some).collect();
        current.resize(ids.len() / steps, None);
        // Time before environment: new ids follow the order in which trajectories begin.
        for t in 0..steps {
            for (env, current) in current.iter_mut().enumerate() {
                let name = &mut ids[env * steps + t];
                // The worker's own id shows whether the trajectory goes on.
                let known = current.filter(|under_way| under_way.local == *name);
                let under_way = known.unwrap_or_else(|| {
                    let id = self.next;
                    self.next += 1;
                    OpenTrajectory { local: *name, id }
                });
                *name = under_way.id;
                *current = Some(under_way);
            }
        }
        self.workers[worker].known = (part + 1, current.into_iter().flatten().collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renamed(trajectories: &mut Trajectories, worker: usize, ids: [[u64; 3]; 2]) -> Vec<u64> {
        let mut ids = ids.concat();
        let part = trajectories.arrived(worker);
        trajectories.rename(worker, part, &mut ids, 3);
        ids
    }

    #[test]
    fn trajectories_are_renamed_in_order_of_appearance() {
        let mut trajectories = Trajectories::new(2);
        let mut rename = |worker, ids| renamed(&mut trajectories, worker, ids);
        assert_eq!(rename(0, [[0, 2, 2], [1, 1, 3]]), [0, 2, 2, 1, 1, 3]);
        assert_eq!(rename(1, [[0, 0, 0], [1, 2, 2]]), [4, 4, 4, 5, 6, 6]);
        // They go on in the next batch; 4 began and ended between two frames.
        assert_eq!(rename(0, [[2, 5, 5], [6, 6, 6]]), [2, 8, 8, 7, 7, 7]);
        assert_eq!(rename(1, [[0, 0, 3], [2, 2, 2]]), [4, 4, 9, 6, 6, 6]);
    }

    #[test]
    fn trajectories_are_cut_where_frames_are_lost() {
        let losses: [fn(&mut Trajectories); 3] = [
            |trajectories| {
                // A part that is not handed out.
                trajectories.arrived(0);
            },
            |trajectories| trajectories.replaced(0),
            |trajectories| trajectories.go_on_from(trajectories.next_id()),
        ];
        for lose in losses {
            let mut trajectories = Trajectories::new(1);
            let part = [[0, 0, 0], [1, 1, 1]];
            assert_eq!(renamed(&mut trajectories, 0, part), [0, 0, 0, 1, 1, 1]);
            lose(&mut trajectories);
            assert_eq!(renamed(&mut trajectories, 0, part), [2, 2, 2, 3, 3, 3]);
            assert_eq!(renamed(&mut trajectories, 0, part), [2, 2, 2, 3, 3, 3]);
        }
    }

    #[test]
    fn parts_of_the_one_before_keep_their_trajectories() {
        let mut trajectories = Trajectories::new(1);
        let (first, second) = (trajectories.arrived(0), trajectories.arrived(0));
        // It is replaced before the trainer takes what it had delivered.
        trajectories.replaced(0);
        let of_the_next = trajectories.arrived(0);
        let mut rename = |part| {
            let mut ids = [0; 3];
            trajectories.rename(0, part, &mut ids, 3);
            ids
        };
        assert_eq!(rename(first), [0; 3]);
        assert_eq!(rename(second), [0; 3]);
        assert_eq!(rename(of_the_next), [1; 3]);
    }
}
