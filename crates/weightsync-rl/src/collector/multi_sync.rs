use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use weightsync_engine::{
    Expect, InitInfo, Report, SendOptions, Sender, SenderSetup, Snapshot, Version, WaitFor,
    WeightExtractor, WorkerId, WorkerStatus,
    worker::{Event, Exit, Restart, Spawn, WorkerError, Workers},
};

use super::{
    Task,
    trajectories::Trajectories,
    wire::{self, Collect, Collected, Start},
};
use crate::{Error, env::EnvRng, frames::Frames};

/// The most frames in one batch: what a pipe's longest frame is good for.
const MAX_FRAMES_PER_BATCH: usize = 1 << 20;
/// Deaths in a row, without a batch delivered, after which a worker is given up.
const MAX_DEATHS: u32 = 3;
/// How long ended workers may take to leave.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// The settings of a [`MultiSync`] collector; see [`MultiSync::builder`].
#[derive(Debug)]
pub struct Builder {
    task: Task,
    workers: usize,
    envs_per_worker: usize,
    frames_per_batch: usize,
    seed: u64,
    deadline: Duration,
    spawn: Option<Spawn>,
}

impl Builder {
    /// Number of worker processes, `B` (1 by default).
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Environments in each worker, `P` (1 by default).
    pub fn envs_per_worker(mut self, envs: usize) -> Self {
        self.envs_per_worker = envs;
        self
    }

    /// Frames in one batch, `B × P × T`, from all workers together (1000 by
    /// default).
    pub fn frames_per_batch(mut self, frames: usize) -> Self {
        self.frames_per_batch = frames;
        self
    }

    /// Where all randomness of the workers comes from (0 by default). As long
    /// as none of them dies, the same seed and the same weights give the same
    /// frames.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// How long [`start`](Self::start), a batch or an update may take at most
    /// (30 s by default). What the clock cannot count to is no deadline.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How a worker process is started; by default this program is run again
    /// without arguments. Count, init bytes and the restart policy are set by
    /// the collector.
    pub fn spawn(mut self, spawn: Spawn) -> Self {
        self.spawn = Some(spawn);
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
    /// policy for the task, [`Error::Weights`] if they cannot be sent, and those
    /// of [`collect`](MultiSync::collect).
    pub fn start(self, weights: &impl WeightExtractor) -> Result<MultiSync, Error> {
        let steps = self.steps()?;
        let shape = [1, self.envs_per_worker, steps];
        // Every version has this layout, so one that arrives can be acted on:
        // a worker may say that it has it before it looks at it.
        self.task.check(&weights.layout()?)?;
        let setup = SenderSetup::new("policy", weights)?.send_timeout(Some(self.deadline));
        let mut seeds = Seeds(EnvRng::seed_from_u64(self.seed));
        let starts = (0..self.workers).map(|_| self.hello(&mut seeds, setup.init_info()));
        let starts = starts.collect::<Result<Vec<_>, _>>()?;
        let longest = wire::longest(self.envs_per_worker, steps, self.task.observation_len());
        let spawn = match self.spawn {
            Some(spawn) => spawn,
            None => Spawn::this_program()?,
        };
        let workers = spawn
            .count(self.workers)
            .init_each(move |worker| starts.get(worker).cloned().unwrap_or_default())
            .max_frame(longest as u32)
            // A process is started with the seed and the weights of its time,
            // and counted: by the collector alone.
            .restart(Restart::Never)
            .start()?;
        let sender = setup.connect(weights, Expect::Count(0), Some(self.deadline))?;
        let mut collector = MultiSync {
            task: self.task,
            shape,
            deadline: self.deadline,
            seeds,
            deaths: vec![0; workers.len()],
            vacant: vec![None; workers.len()],
            restarts: Vec::new(),
            trajectories: Trajectories::new(workers.len()),
            workers,
            sender,
            batch: 0,
        };
        // An empty batch is the rendez-vous: to deliver it, a worker must have
        // its first weights, and one that dies instead is noticed at once.
        collector.gather([1, self.envs_per_worker, 0])?;
        Ok(collector)
    }

    fn steps(&self) -> Result<usize, Error> {
        let (workers, envs) = (self.workers, self.envs_per_worker);
        let frames_per_batch = self.frames_per_batch;
        if frames_per_batch == 0 || frames_per_batch > MAX_FRAMES_PER_BATCH {
            return Err(Error::BatchSize {
                frames_per_batch,
                limit: MAX_FRAMES_PER_BATCH,
            });
        }
        match workers.checked_mul(envs) {
            Some(rows) if rows > 0 && frames_per_batch.is_multiple_of(rows) => {
                Ok(frames_per_batch / rows)
            }
            _ => Err(Error::UnevenBatch {
                frames_per_batch,
                workers,
                envs,
            }),
        }
    }

    fn hello(&self, seeds: &mut Seeds, weights: InitInfo) -> Result<Vec<u8>, Error> {
        wire::encode(&Start {
            task: self.task,
            envs: self.envs_per_worker as u32,
            seed: seeds.next(),
            weights,
        })
    }
}

/// A batch of frames, and what happened while it was collected.
#[derive(Debug)]
#[non_exhaustive]
pub struct Batch {
    /// `[B, P, T]` frames, in the order of the workers.
    pub frames: Frames,
    /// Workers that died since the batch before, each replaced by a process
    /// with the current weights.
    pub restarts: Vec<Restarted>,
}

/// A worker that died and was replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restarted {
    /// Which worker.
    pub worker: WorkerId,
    /// How its process ended.
    pub exit: Exit,
    /// The process that took its place.
    pub pid: u32,
}

/// A collector whose workers are processes that collect at the same time, each
/// its part of every batch, and wait for new weights in between.
///
/// **Guarantee.** A batch holds every worker's part, whole and in the order of
/// the workers, and every frame is stamped with the version of the weights that
/// chose its action: the one sent last. A worker that dies, also in the middle
/// of a batch, is replaced; its part is then collected again, so a batch never
/// holds half of one. No worker outlives the trainer.
#[derive(Debug)]
pub struct MultiSync {
    // Before the workers, so that they hear of its end while they live.
    sender: Sender,
    workers: Workers,
    task: Task,
    /// Of one worker's part, `[1, P, T]`.
    shape: [usize; 3],
    deadline: Duration,
    seeds: Seeds,
    /// Of each worker, in a row.
    deaths: Vec<u32>,
    /// How the last process ended of each worker that has no other yet.
    vacant: Vec<Option<Exit>>,
    /// Not told yet.
    restarts: Vec<Restarted>,
    trajectories: Trajectories,
    batch: u64,
}

impl MultiSync {
    /// Settings to start from, for one of the built-in tasks.
    pub fn builder(task: Task) -> Builder {
        Builder {
            task,
            workers: 1,
            envs_per_worker: 1,
            frames_per_batch: 1000,
            seed: 0,
            deadline: Duration::from_secs(30),
            spawn: None,
        }
    }

    /// Has all workers collect their parts of one batch, with the weights sent
    /// last.
    ///
    /// # Errors
    /// [`Error::CollectTimeout`] at the deadline, [`Error::KeepsDying`] about a
    /// worker that restarting does not help, [`Error::Workers`] if a process
    /// cannot be started. The next call begins a new batch, and starts a
    /// process for every worker that was left without one.
    pub fn collect(&mut self) -> Result<Batch, Error> {
        let frames = self.gather(self.shape)?;
        let restarts = std::mem::take(&mut self.restarts);
        Ok(Batch { frames, restarts })
    }

    /// Sends weights to all workers, through shared memory, and waits until
    /// each has them or has a line in the report that says why not.
    ///
    /// That a worker has *applied* a version means that it holds the version
    /// whole, in a layout that [`start`](Builder::start) has seen to be a policy
    /// for the task, and will choose no action of a later batch by an older one.
    /// A batch under way (one that was given up) ends with the version it began
    /// with, and its frames are dropped.
    ///
    /// A worker that has died has such a line at most; it is replaced by the
    /// next [`collect`](Self::collect), with these weights.
    ///
    /// # Errors
    /// [`Error::Weights`] if nothing could be sent; the old version serves on.
    pub fn update_policy_weights(
        &mut self,
        weights: &impl WeightExtractor,
    ) -> Result<Report, Error> {
        let sender = &mut self.sender;
        Ok(sender.send_with(
            weights,
            &SendOptions::new()
                .wait(WaitFor::Applied)
                .timeout(Some(self.deadline)),
        )?)
    }

    /// How long a batch or an update may take at most, from now on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// The version sent last.
    pub fn version(&self) -> Version {
        self.sender.version().expect("the only model")
    }

    /// Every connected worker with the version it has, as the sender sees them.
    pub fn worker_versions(&self) -> Vec<WorkerStatus> {
        self.sender.workers()
    }

    /// The process of a worker; `None` while it has none.
    pub fn pid(&self, worker: WorkerId) -> Option<u32> {
        self.workers.pid(worker.0 as usize)
    }

    /// The weights sent last, to save or to compare.
    ///
    /// # Errors
    /// [`Error::Weights`], in a forked child.
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        Ok(self.sender.snapshot()?)
    }

    /// Ends the workers and waits until they have left; dropping the collector
    /// does the same.
    pub fn shutdown(self) {
        let Self {
            sender, workers, ..
        } = self;
        drop(sender);
        workers.shutdown(Some(SHUTDOWN));
    }

    /// One part of `shape` from each worker.
    fn gather(&mut self, shape: [usize; 3]) -> Result<Frames, Error> {
        let begun = Instant::now();
        let deadline = begun.checked_add(self.deadline);
        self.batch += 1;
        let mut parts: Vec<Option<Frames>> = vec![None; self.workers.len()];
        for worker in 0..parts.len() {
            self.fill(worker)?;
            self.ask(worker, shape, deadline)?;
        }
        while parts.iter().any(Option::is_none) {
            let Some((worker, event)) = self.workers.recv_any(left(deadline)) else {
                let missing = (0..parts.len()).filter(|&i| parts[i].is_none());
                return Err(Error::CollectTimeout {
                    missing: missing.map(id).collect(),
                    waited: begun.elapsed(),
                });
            };
            match event {
                Event::Frame(bytes) => match self.read(&bytes, shape) {
                    Ok(Some(frames)) => {
                        self.deaths[worker] = 0;
                        parts[worker] = Some(frames);
                    }
                    // A part of a batch that was given up.
                    Ok(None) => self.trajectories.forget(worker),
                    // It talks nonsense: a fresh process may not. Its end is an
                    // event of its own.
                    Err(_) => self.workers.kill(worker)?,
                },
                Event::Exited(exit) => {
                    self.replace(worker, exit)?;
                    if parts[worker].is_none() {
                        self.ask(worker, shape, deadline)?;
                    }
                }
                _ => {}
            }
        }
        let mut parts: Vec<Frames> = parts.into_iter().flatten().collect();
        for (worker, part) in parts.iter_mut().enumerate() {
            self.trajectories.rename(worker, part);
        }
        Frames::stack(parts)
    }

    fn ask(
        &self,
        worker: usize,
        shape: [usize; 3],
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let request = wire::encode(&Collect {
            batch: self.batch,
            steps: shape[2] as u32,
            version: self.version().0,
        })?;
        match self.workers.send(worker, &request, left(deadline)) {
            // Its exit is on its way, for `fill` has come first, and it will be
            // asked again.
            Err(WorkerError::Gone { .. }) => Ok(()),
            other => Ok(other?),
        }
    }

    fn read(&self, bytes: &[u8], shape: [usize; 3]) -> Result<Option<Frames>, Error> {
        let collected: Collected = wire::decode(bytes)?;
        if collected.batch != self.batch {
            return Ok(None);
        }
        collected.into_frames(shape, self.task).map(Some)
    }

    fn replace(&mut self, worker: usize, exit: Exit) -> Result<(), Error> {
        self.deaths[worker] += 1;
        self.vacant[worker] = Some(exit.clone());
        if self.deaths[worker] > MAX_DEATHS {
            return Err(Error::KeepsDying {
                worker: id(worker),
                deaths: self.deaths[worker],
                exit: Box::new(exit),
            });
        }
        self.fill(worker)
    }

    /// Starts a process for a worker whose last one has been seen to end.
    fn fill(&mut self, worker: usize) -> Result<(), Error> {
        if self.vacant[worker].is_none() {
            return Ok(());
        }
        let start = wire::encode(&Start {
            task: self.task,
            envs: self.shape[1] as u32,
            seed: self.seeds.next(),
            weights: self.sender.init_info(),
        })?;
        let pid = self.workers.restart(worker, Some(start))?;
        self.trajectories.forget(worker);
        if let Some(exit) = self.vacant[worker].take() {
            let worker = id(worker);
            self.restarts.push(Restarted { worker, exit, pid });
        }
        Ok(())
    }
}

fn left(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

/// The number of the worker at an index; there are fewer than frames in a batch.
fn id(worker: usize) -> WorkerId {
    WorkerId(worker as u32)
}

/// One seed for every process that is started.
#[derive(Debug)]
struct Seeds(EnvRng);

impl Seeds {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }
}
