//! `weightsync demo`: a policy learns to balance a pole in worker processes
//! that get every update of its weights through shared memory.

mod curve;
mod folder;
mod progress;

use std::{
    error::Error,
    path::PathBuf,
    time::{Duration, Instant},
};

use weightsync_engine::worker::{self, Spawn};
use weightsync_rl::{
    self as rl,
    collector::{self, MultiSync, Task},
    frames::Frames,
    ppo::{self, ActorCritic, Ppo, PpoConfig},
};

use crate::signals::Signals;
use crate::{FAILURE, SUCCESS};
use curve::Curve;
use folder::Place;
use progress::{Progress, Status};

const TASK: Task = Task::CartPole;
/// The mean return of the last episodes that ends the demo.
const GOAL: f64 = 475.0;
const HIDDEN: [usize; 2] = [64, 64];
/// Environments of all workers together, as far as they can be shared evenly.
const ENVIRONMENTS: usize = 8;
const FRAMES_PER_BATCH: usize = 512;
/// How long a batch or an update may take before the demo looks up: a worker
/// that hangs holds neither Ctrl-C nor the time limit for longer.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long the workers may take to start.
const START: Duration = Duration::from_secs(10);

/// What `demo` is asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Worker processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// Where all randomness comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for learning.svg and policy.safetensors [default: a new weightsync-demo]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Give up after so many seconds
    #[arg(long, default_value_t = 60)]
    time_limit: u64,
}

/// Runs the demo, or, in a process that it started, one of its workers.
///
/// The exit code is 0 if the goal was reached, 1 if it was not reached in time,
/// and 128 plus its number after a signal.
pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    if let Some(process) = worker::current()? {
        collector::serve(&process)?;
        return Ok(SUCCESS);
    }
    let signals = Signals::watch()?;
    let place = Place::check(args.out.as_deref())?;
    let mut progress = Progress::new(GOAL, usize::from(args.workers));
    let mut training = Training::start(args)?;
    let limit = Duration::from_secs(args.time_limit);
    loop {
        let left = limit.saturating_sub(training.begun.elapsed());
        training.collector.set_deadline(left.min(PATIENCE));
        let frames = training.collect(&mut progress)?;
        if training.curve.mean().is_some_and(|mean| mean >= GOAL) {
            progress.finish();
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
        if let Some(frames) = frames {
            training.learn(&frames, &mut progress)?;
        }
    }
}

/// A run under way.
struct Training {
    begun: Instant,
    seed: u64,
    ppo: Ppo,
    collector: MultiSync,
    curve: Curve,
    /// Of every update, from the call of send until the last worker had it.
    latencies: Vec<Duration>,
    restarts: usize,
}

impl Training {
    fn start(args: &Args) -> Result<Self, Box<dyn Error>> {
        // Minibatches are too small to share among threads, and the workers
        // need the other cores.
        ppo::keep_to_one_thread();
        let begun = Instant::now();
        let inputs = TASK.observation_len();
        let model = ActorCritic::new(inputs, &HIDDEN, TASK.actions(), args.seed)?;
        let ppo = Ppo::new(model, PpoConfig::default(), args.seed)?;

        let workers = usize::from(args.workers);
        let envs = ENVIRONMENTS.div_ceil(workers);
        let rows = workers * envs;
        let collector = MultiSync::builder(TASK)
            .workers(workers)
            .envs_per_worker(envs)
            .frames_per_batch(FRAMES_PER_BATCH / rows * rows)
            .seed(args.seed)
            .deadline(START)
            .spawn(Spawn::this_program()?.args(["demo"]))
            .start(ppo.model().var_map())?;
        Ok(Self {
            begun,
            seed: args.seed,
            ppo,
            collector,
            curve: Curve::default(),
            latencies: Vec::new(),
            restarts: 0,
        })
    }

    /// Has the workers collect one batch with the weights they have; `None` if
    /// that takes too long. They can be asked again.
    fn collect(&mut self, progress: &mut Progress) -> Result<Option<Frames>, Box<dyn Error>> {
        let batch = match self.collector.next_batch() {
            Ok(batch) => batch,
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
        self.curve.add(&batch.frames);
        Ok(Some(batch.frames))
    }

    /// Makes better weights of the frames, and sends them to the workers.
    fn learn(&mut self, frames: &Frames, progress: &mut Progress) -> Result<(), Box<dyn Error>> {
        self.ppo.update(frames)?;
        let weights = self.ppo.model().var_map();
        let report = self.collector.update_policy_weights(weights)?;
        self.latencies.push(report.took);
        progress.show(&Status {
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
        });
        Ok(())
    }

    fn summary(&self, reached: bool, progress: &mut Progress) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let mean = self.curve.mean().unwrap_or(0.0);
        let (frames, seed) = (self.curve.frames(), self.seed);
        let verdict = if reached { "reached" } else { "NOT reached" };
        progress.say(&format!(
            "goal {verdict}: mean return {mean:.1} over the last {} episodes (goal {GOAL}) \
             after {seconds:.1} s, seed {seed}",
            self.curve.window(),
        ));
        progress.say(&format!(
            "{frames} frames ({:.0} a second), {} updates of the weights, {} workers replaced",
            frames as f64 / seconds,
            self.latencies.len(),
            self.restarts,
        ));
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
    fn save(self, place: Place, progress: &mut Progress) -> Result<(), Box<dyn Error>> {
        let title = format!("{}, seed {}", TASK.name(), self.seed);
        let svg = self.curve.svg(&title, GOAL)?;
        let folder = place.create()?;
        folder.write("learning.svg", svg.as_bytes())?;
        let policy = folder.path("policy.safetensors");
        self.collector.snapshot()?.save_safetensors(&policy)?;
        let version = self.collector.version().0;
        progress.say(&format!("wrote {}", folder.path("learning.svg").display()));
        progress.say(&format!("wrote {} (version {version})", policy.display()));
        folder.keep();
        Ok(())
    }
}
