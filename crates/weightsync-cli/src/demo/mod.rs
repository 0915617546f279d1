//! `weightsync demo`: a policy learns to balance a pole, or another task, in worker
//! processes that get every update of its weights through shared memory.

mod curve;
mod folder;
mod job;
mod progress;
mod workers;

use std::{
    error::Error,
    path::PathBuf,
    time::{Duration, Instant},
};

use weightsync_engine::worker::{self, Spawn};
use weightsync_rl::{
    self as rl,
    collector::{self, MultiAsync, MultiSync},
    frames::Frames,
    learn::{self, Learner},
};

use crate::signals::Signals;
use crate::{FAILURE, SUCCESS};
use curve::Curve;
use folder::FolderChoice;
use job::{Algorithm, Environment, Job};
use progress::{ProgressDisplay, TrainingStatus};
use workers::DemoWorkers;

/// Environments of all workers together, as far as they can be shared evenly.
const ENVIRONMENTS: usize = 8;
/// With `--async` no frame is learned from whose weights are older than so many
/// versions: PPO corrects for a little age.
const MAX_STALENESS: u64 = 4;
/// How long a batch or an update may take before the demo looks up: a worker
/// that hangs holds neither Ctrl-C nor the time limit for longer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What `demo` is asked for.
#[derive(clap::Args)]
pub struct DemoArgs {
    /// cartpole, pendulum, mountain-car, acrobot, or gym:ID, an environment of Gymnasium that Python
    /// steps
    #[arg(long, default_value = "cartpole", value_parser = Environment::parse)]
    env: Environment,
    /// How it is trained [default: ppo, of mountain-car dqn]
    #[arg(long)]
    algo: Option<Algorithm>,
    /// Workers go on collecting while the trainer trains
    #[arg(long = "async")]
    asynchronous: bool,
    /// Mean return of 100 episodes that ends it [default: 475 of cartpole, -100 of acrobot, -110 of
    /// mountain-car, -250 of pendulum, Gymnasium's own of others]
    #[arg(long, allow_negative_numbers = true)]
    goal: Option<f64>,
    /// The program that runs Python with Gymnasium, for gym:ID
    #[arg(long, default_value = "python3")]
    python: String,
    /// Worker processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// Where all randomness comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for learning.svg and policy.safetensors [default: a new weightsync-demo]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Give up after so many seconds; mountain-car takes 150 000 to 350 000 frames, for which a debug
    /// build may need more [default: 60 for cartpole, 300 for others]
    #[arg(long)]
    time_limit: Option<u64>,
}

/// Runs the demo, or, in a process that it started, one of its workers.
///
/// The exit code is 0 if the goal was reached, 1 if it was not reached in time,
/// and 128 plus its number after a signal.
pub fn run(args: &DemoArgs) -> Result<u8, Box<dyn Error>> {
    // A worker process runs this command too, and has nothing to do with the rest.
    if let Some(process) = worker::current()? {
        collector::serve(&process)?;
        return Ok(SUCCESS);
    }
    // From here on a signal ends the demo between two batches.
    let signals = Signals::watch()?;
    // A folder that cannot be written is told before the training, not after it.
    let place = FolderChoice::check(args.out.as_deref())?;
    let job = Job::new(args.env.clone(), &args.python, args.algo, args.goal)?;
    let goal = job.goal;
    let limit = Duration::from_secs(args.time_limit.unwrap_or(job.time_limit));
    let mut progress = ProgressDisplay::new(&job, usize::from(args.workers));
    let mut training = Training::start(args, job)?;
    loop {
        // Short waits, so a worker that hangs does not keep the loop from looking at signals and
        // the time.
        let left = limit.saturating_sub(training.begun.elapsed());
        training.collector.set_deadline(left.min(PATIENCE));
        let frames = training.collect(&mut progress)?;
        // Checked before learning: the policy that reached the goal is the one that is saved.
        if training.curve.mean().is_some_and(|mean| mean >= goal) {
            progress.finish();
            // Before the files are written, which may fail.
            training.summary(true, &mut progress);
            training.save(place, &mut progress)?;
            return Ok(SUCCESS);
        }
        if let Some(signal) = signals.caught() {
            training.collector.shutdown();
            progress.finish();
            progress.say("interrupted: the workers have ended, nothing was written");
            return Ok(128 + signal);
        }
        if training.begun.elapsed() >= limit {
            progress.finish();
            training.summary(false, &mut progress);
            return Ok(FAILURE);
        }
        // Without frames, because the batch took too long, the loop only looks again.
        if let Some(frames) = frames {
            training.learn(&frames, &mut progress)?;
        }
    }
}

/// A run under way.
struct Training {
    begun: Instant,
    job: Job,
    seed: u64,
    learner: Box<dyn Learner>,
    collector: DemoWorkers,
    curve: Curve,
    /// Of every update, from the call of send until the last worker had it.
    latencies: Vec<Duration>,
    restarts: usize,
    /// Frames that were too old.
    dropped: usize,
}

impl Training {
    fn start(args: &DemoArgs, job: Job) -> Result<Self, Box<dyn Error>> {
        // Minibatches are too small to share among threads, and the workers
        // need the other cores.
        learn::keep_to_one_thread();
        let begun = Instant::now();
        let learner = job.learner(args.seed)?;
        let workers = usize::from(args.workers);
        let envs = ENVIRONMENTS.div_ceil(workers);
        let weights = learner.var_map();
        // As many frames in each batch as fit, and at least one step of each environment.
        let frames = |rows: usize| (job.frames_per_batch / rows).max(1) * rows;
        let spawn = Spawn::this_program()?.args(["demo"]);
        let collector = if args.asynchronous {
            let builder = MultiAsync::builder(job.task.clone())
                .workers(workers)
                .envs_per_worker(envs)
                .frames_per_batch(frames(envs))
                .seed(args.seed)
                .spawn(spawn);
            DemoWorkers::Async(match job.algorithm {
                // DQN learns from frames of any age, so it needs no limit.
                Algorithm::Ppo => builder.max_staleness(MAX_STALENESS).start(weights)?,
                Algorithm::Dqn => builder.start(weights)?,
            })
        } else {
            let builder = MultiSync::builder(job.task.clone())
                .workers(workers)
                .envs_per_worker(envs)
                .frames_per_batch(frames(workers * envs))
                .seed(args.seed)
                .spawn(spawn);
            DemoWorkers::Sync(builder.start(weights)?)
        };
        Ok(Self {
            begun,
            job,
            seed: args.seed,
            learner,
            collector,
            curve: Curve::default(),
            latencies: Vec::new(),
            restarts: 0,
            dropped: 0,
        })
    }

    /// Has the workers collect one batch with the weights they have; `None` if
    /// that takes too long. They can be asked again.
    fn collect(
        &mut self,
        progress: &mut ProgressDisplay,
    ) -> Result<Option<Frames>, Box<dyn Error>> {
        let batch = match self.collector.next_batch() {
            Ok(batch) => batch,
            // The workers go on, and the next call takes what they have.
            Err(error @ rl::Error::CollectTimeout { .. }) => {
                progress.say(&error.to_string());
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        for restarted in &batch.restarts {
            self.restarts += 1;
            progress.say(&format!(
                "{}: {}; process {} took its place, with version {} of the weights",
                restarted.worker,
                restarted.exit,
                restarted.pid,
                self.collector.version().0,
            ));
        }
        self.dropped += batch.dropped;
        self.curve.add(&batch.frames);
        Ok(Some(batch.frames))
    }

    /// Makes better weights of the frames, and sends them to the workers.
    fn learn(
        &mut self,
        frames: &Frames,
        progress: &mut ProgressDisplay,
    ) -> Result<(), Box<dyn Error>> {
        // Before the update, whose version is newer than all frames.
        let age = self.collector.version().0 - oldest(frames, self.collector.version().0);
        self.learner.learn(frames)?;
        let weights = self.learner.var_map();
        let report = self.collector.update_policy_weights(weights)?;
        self.latencies.push(report.took);
        progress.show(&TrainingStatus {
            elapsed: self.begun.elapsed(),
            frames: self.curve.frames(),
            mean_return: self.curve.mean(),
            version: report.version().expect("one model").0,
            workers: self
                .collector
                .worker_versions()
                .iter()
                .map(|worker| (worker.worker.0, worker.versions[0].0))
                .collect(),
            latency: report.took,
            staleness: matches!(self.collector, DemoWorkers::Async(_)).then_some(age),
        });
        Ok(())
    }

    fn summary(&self, reached: bool, progress: &mut ProgressDisplay) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let mean = self.curve.mean().unwrap_or(0.0);
        let (frames, seed, goal) = (self.curve.frames(), self.seed, self.job.goal);
        let verdict = if reached { "reached" } else { "NOT reached" };
        progress.say(&format!(
            "goal {verdict}: mean return {mean:.1} over the last {} episodes (goal {goal}) \
             after {seconds:.1} s, seed {seed}",
            self.curve.window(),
        ));
        progress.say(&format!(
            "{frames} frames ({:.0} a second), {} updates of the weights, {} workers replaced",
            frames as f64 / seconds,
            self.latencies.len(),
            self.restarts,
        ));
        if self.dropped > 0 {
            progress.say(&format!(
                "{} frames were older than {MAX_STALENESS} versions, and dropped",
                self.dropped
            ));
        }
        let mut latencies = self.latencies.clone();
        latencies.sort();
        if let (Some(median), Some(worst)) = (latencies.get(latencies.len() / 2), latencies.last())
        {
            progress.say(&format!(
                "send → applied on all workers: median {}, worst {}",
                progress::micros(*median),
                progress::micros(*worst),
            ));
        }
    }

    /// Writes what the demo leaves: the curve, and the policy that reached the
    /// goal, which is the version the workers have now.
    fn save(
        self,
        place: FolderChoice,
        progress: &mut ProgressDisplay,
    ) -> Result<(), Box<dyn Error>> {
        let (name, algorithm) = (self.job.task.name(), self.job.algorithm.name());
        let title = format!("{name}, {algorithm}, seed {}", self.seed);
        let svg = self.curve.svg(&title, self.job.goal)?;
        // The first file system change of the demo.
        let folder = place.create()?;
        folder.write("learning.svg", svg.as_bytes())?;
        // The workers' version, read from the memory that they read.
        let policy = folder.path("policy.safetensors");
        self.collector.snapshot()?.save_safetensors(&policy)?;
        let version = self.collector.version().0;
        progress.say(&format!("wrote {}", folder.path("learning.svg").display()));
        progress.say(&format!("wrote {} (version {version})", policy.display()));
        // Only with both files in it the folder stays.
        folder.keep();
        Ok(())
    }
}

/// The oldest version that chose an action of some frames, or the newest where
/// none did.
fn oldest(frames: &Frames, newest: u64) -> u64 {
    // Version 0 stands for actions that no weights chose.
    let versions = frames.policy_versions.iter().copied();
    versions
        .filter(|version| *version > 0)
        .min()
        .unwrap_or(newest)
}
