use std::{marker::PhantomData, time::Duration};

use weightsync_engine::{Expect, SenderSetup, WeightExtractor, worker::Spawn};

use super::{
    Multi, Sync, Task,
    core::{Core, FrameTally, RolloutPlan, Seeds},
    crew::{Crew, Processes, ThreadCrew},
    kind::{CollectorKind, FirstCome, Gathered, Here, Many, Remote},
    schedule::Rules,
    wire,
};
use crate::{
    Error,
    env::Gym,
    frames::CatResults,
    rollout::{Exploration, RolloutOptions},
};

/// The most frames in one batch: what a pipe's longest frame is good for.
const MAX_FRAMES_PER_BATCH: usize = 1 << 20;

/// The settings of a collector; each kind has a `builder` to start from.
#[derive(Debug)]
pub struct CollectorBuilder<K = Gathered> {
    pub(super) task: Task,
    workers: usize,
    envs_per_worker: Option<usize>,
    frames_per_batch: usize,
    pub(super) seed: u64,
    deadline: Duration,
    timeout: Option<Duration>,
    place: WorkerKind,
    options: RolloutOptions,
    init_random_frames: usize,
    total_frames: Option<usize>,
    max_staleness: Option<u64>,
    cat_results: CatResults,
    kind: PhantomData<K>,
}

/// Where workers run.
#[derive(Debug)]
enum WorkerKind {
    /// In processes, by default this program run again.
    Processes(Option<Spawn>),
    Threads,
}

impl<K: CollectorKind> CollectorBuilder<K> {
    pub(super) fn new(task: Task) -> Self {
        // Python imports the environment's packages, which can take long.
        let python = match task {
            Task::Gym(_) => Gym::PATIENCE,
            _ => Duration::ZERO,
        };
        Self {
            task,
            workers: 1,
            envs_per_worker: None,
            frames_per_batch: 1000,
            seed: 0,
            deadline: Duration::from_secs(30) + python,
            timeout: None,
            place: WorkerKind::Processes(None),
            options: RolloutOptions::default(),
            init_random_frames: 0,
            total_frames: None,
            max_staleness: None,
            cat_results: CatResults::Stack,
            kind: PhantomData,
        }
    }

    /// Environments in each worker, `P`. By default there is one, and frames have
    /// [no dimension](crate::frames::Frames) for it.
    pub fn envs_per_worker(mut self, envs: usize) -> Self {
        self.envs_per_worker = Some(envs);
        self
    }

    /// Frames in one batch (1000 by default): `B × P × T` where a batch is from
    /// all `B` workers together, `P × T` where it is from one.
    pub fn frames_per_batch(mut self, frames: usize) -> Self {
        self.frames_per_batch = frames;
        self
    }

    /// Where all randomness of environments and policies comes from (0 by
    /// default). As long as no worker dies, the same seed and the same weights
    /// give each worker the same frames.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Cuts an episode after so many frames, as truncated; 0, the default, sets no
    /// limit beyond the task's own.
    pub fn max_frames_per_traj(mut self, frames: u32) -> Self {
        self.options.max_frames_per_traj = frames;
        self
    }

    /// Whether every batch begins with new episodes, whatever is under way (not
    /// by default).
    pub fn reset_at_each_iter(mut self, reset: bool) -> Self {
        self.options.reset_at_each_iter = reset;
        self
    }

    /// How actions are chosen from the distribution the policy gives them (drawn
    /// by default).
    pub fn exploration(mut self, exploration: Exploration) -> Self {
        self.options.exploration = exploration;
        self
    }

    /// The first so many frames, and the rest of the batch in which this number
    /// is reached, have actions drawn evenly from all there are (0 by default).
    /// Their version is 0.
    pub fn init_random_frames(mut self, frames: usize) -> Self {
        self.init_random_frames = frames;
        self
    }

    /// Iterating over the collector ends once so many frames have been handed
    /// out (never by default).
    pub fn total_frames(mut self, frames: usize) -> Self {
        self.total_frames = Some(frames);
        self
    }

    /// What is handed out, counted from none.
    pub(super) fn tally(&self) -> FrameTally {
        FrameTally {
            init_random_frames: self.init_random_frames,
            total_frames: self.total_frames,
            frames: 0,
        }
    }

    /// What each worker runs, if the frames of a batch can be shared out.
    pub(super) fn plan(&self) -> Result<RolloutPlan, Error> {
        let envs = self.envs_per_worker.unwrap_or(1);
        // Where a batch is one worker's, it is not divided among the workers.
        let workers = if K::ALL_WORKERS { self.workers } else { 1 };
        let frames_per_batch = self.frames_per_batch;
        if frames_per_batch == 0 || frames_per_batch > MAX_FRAMES_PER_BATCH {
            return Err(Error::BatchSize {
                frames_per_batch,
                limit: MAX_FRAMES_PER_BATCH,
            });
        }
        // Every environment of every worker takes equally many steps.
        match workers.checked_mul(envs) {
            Some(rows) if rows > 0 && frames_per_batch.is_multiple_of(rows) => Ok(RolloutPlan {
                task: self.task.clone(),
                envs,
                batched: self.envs_per_worker.is_some(),
                steps: frames_per_batch / rows,
                options: self.options,
                timeout: self.timeout,
            }),
            _ => Err(Error::UnevenBatch {
                frames_per_batch,
                workers,
                envs,
            }),
        }
    }
}

impl CollectorBuilder<Here> {
    /// Makes the environments and takes the first weights. These have to hold
    /// the layers of the policy under `actor`, as
    /// [`MlpPolicy::from_tensors`](crate::policy::MlpPolicy::from_tensors) reads
    /// them, and may hold more.
    ///
    /// # Errors
    /// [`Error::UnevenBatch`] and [`Error::BatchSize`] about the settings,
    /// [`Error::MissingTensor`] and [`Error::TensorLen`] if the weights hold no
    /// policy for the task, [`Error::Weights`] if they cannot be read,
    /// [`Error::Gym`] if an environment of Gymnasium cannot be made.
    pub fn start(self, weights: &impl WeightExtractor) -> Result<Sync, Error> {
        Sync::start(&self, weights)
    }
}

impl CollectorBuilder<Gathered> {
    /// How the parts of the workers become one batch (stacked by default).
    pub fn cat_results(mut self, how: CatResults) -> Self {
        self.cat_results = how;
        self
    }
}

impl<K: Many> CollectorBuilder<K> {
    /// Number of workers, `B` (1 by default).
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }
}

impl<K: Remote> CollectorBuilder<K> {
    /// How long [`start`](Self::start), a batch or an update may take at most
    /// (by default 30 s, and 90 s of a task of Gymnasium, whose Python may be slow to
    /// start). A deadline beyond the clock's range means none.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How long a worker may take for its part of a batch, or for a batch (no limit but
    /// the [deadline](Self::deadline) by default). One that takes longer is killed, and
    /// another takes its place, as if it had died. One that is started in the place of
    /// another has at least 30 s for its first part.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Workers are processes, started like this; by default this program is run
    /// again without arguments. Count, init bytes, the queue and the restart policy
    /// are set by the collector.
    pub fn spawn(mut self, spawn: Spawn) -> Self {
        self.place = WorkerKind::Processes(Some(spawn));
        self
    }

    /// Workers are threads of this process. They need no [`serve`](super::serve),
    /// but share the process's fate. One that panics is replaced, as is one that takes
    /// longer than the [timeout](Self::timeout); but a thread cannot be killed: what it
    /// does ends with its part.
    pub fn threads(mut self) -> Self {
        self.place = WorkerKind::Threads;
        self
    }

    /// Starts the workers and gives them their first weights. These have to
    /// hold the layers of the policy under `actor`, as
    /// [`MlpPolicy::from_tensors`](crate::policy::MlpPolicy::from_tensors)
    /// reads them, and may hold more.
    ///
    /// # Errors
    /// [`Error::UnevenBatch`] and [`Error::BatchSize`] about the settings,
    /// [`Error::MissingTensor`] and [`Error::TensorLen`] if the weights hold no
    /// policy for the task, [`Error::Weights`] if they cannot be sent,
    /// [`Error::Thread`] if a thread cannot be started, and those of
    /// [`next_batch`](Multi::next_batch).
    pub fn start(self, weights: &impl WeightExtractor) -> Result<Multi<K>, Error> {
        let plan = self.plan()?;
        if self.workers == 0 {
            return Err(Error::UnevenBatch {
                frames_per_batch: self.frames_per_batch,
                workers: 0,
                envs: plan.envs,
            });
        }
        // Every version has this layout, so one that arrives can be acted on:
        // a worker may say that it has it before it looks at it.
        self.task.check(&weights.layout()?)?;
        // A version for each worker that is in a part, the newest, and the one being written.
        let most = self.workers.saturating_add(2).clamp(4, 64) as u8;
        let setup = SenderSetup::new("policy", weights)?
            .slots(2, most)
            .send_timeout(Some(self.deadline));
        // No worker is waited for here: `Core::meet` does that, and replaces one that dies
        // meanwhile.
        let sender = setup.connect(weights, Expect::Count(0), Some(self.deadline))?;
        let mut seeds = Seeds::new(self.seed);
        let rules = Rules {
            max_staleness: self.max_staleness,
            init_random_frames: self.init_random_frames as u64,
            part: (plan.envs * plan.steps) as u64,
        };
        let tally = self.tally();
        // Seeds are drawn in the order of the workers, so a worker's seed does not depend on how
        // they start.
        let starts = (0..self.workers).map(|_| plan.start(seeds.next(), sender.init_info()));
        let starts = starts.collect();
        let crew: Box<dyn Crew> = match self.place {
            WorkerKind::Threads => Box::new(ThreadCrew::start(starts)?),
            WorkerKind::Processes(spawn) => {
                let spawn = match spawn {
                    Some(spawn) => spawn,
                    None => Spawn::this_program()?,
                };
                // The bound of a message is known from the task, so the pipe refuses anything
                // longer.
                let longest = wire::longest(plan.envs, plan.steps, &self.task);
                Box::new(Processes::start(spawn, &starts, longest)?)
            }
        };
        let core = Core::meet(
            sender,
            crew,
            self.workers,
            plan,
            seeds,
            self.deadline,
            rules,
        )?;
        Ok(Multi::new(core, self.cat_results, tally))
    }
}

impl<K: FirstCome> CollectorBuilder<K> {
    /// No frame is handed out whose action was chosen by weights more than so
    /// many versions older than the newest. A part of which this is true is
    /// dropped and [counted](super::Batch::dropped); its worker goes on with the
    /// newest weights. No limit by default.
    pub fn max_staleness(mut self, versions: u64) -> Self {
        self.max_staleness = Some(versions);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_leave_python_its_time_to_start() {
        let gym = r#"{
            "id": "Any-v0", "python": "python3", "observation_len": 1, "threshold": null,
            "actions": {"Discrete": 2}
        }"#;
        let gym = Task::Gym(serde_json::from_str(gym).unwrap());
        let builder = CollectorBuilder::<Gathered>::new(gym);
        assert!(builder.deadline > Gym::PATIENCE);
    }
}
