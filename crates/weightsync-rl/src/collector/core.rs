//! What the collectors with workers share: the loop that performs what the
//! [schedule](super::schedule) decides.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng};
use weightsync_engine::transport::left;
use weightsync_engine::{InitInfo, Sender, Version, WorkerId};

use super::{
    Abandoned, Restarted, Task,
    crew::{Crew, Heard, WorkerEnding},
    schedule::{AHEAD, Goal, Rules, Schedule, ScheduleEffect, ScheduleEvent},
    wire::{Collect, Start},
};
use crate::{
    Error,
    env::EnvRng,
    frames::{Frames, Trajectories},
    rollout::RolloutOptions,
};

/// What a worker in the place of another has at least for its first part: it starts in that time.
const FIRST_PART: Duration = Duration::from_secs(30);

/// Workers, what is known of them, and what came from them.
#[derive(Debug)]
pub(super) struct Core {
    // Before the workers, so that they hear of its end while they live.
    pub sender: Sender,
    pub crew: Box<dyn Crew>,
    pub deadline: Duration,
    pub plan: RolloutPlan,
    schedule: Schedule,
    seeds: Seeds,
    workers: Vec<WorkerRecord>,
    trajectories: Trajectories,
    /// What was said while a worker's time was over, and is not understood yet.
    heard: VecDeque<(usize, Heard)>,
    // What the next batch tells.
    restarts: Vec<Restarted>,
    abandoned: Vec<Abandoned>,
    dropped: usize,
}

/// What each worker runs.
#[derive(Clone, Debug)]
pub(super) struct RolloutPlan {
    pub task: Task,
    pub envs: usize,
    /// Whether environments have a dimension of their own.
    pub batched: bool,
    /// Steps of every environment in one part.
    pub steps: usize,
    pub options: RolloutOptions,
    /// How long a worker may take for one part.
    pub timeout: Option<Duration>,
}

#[derive(Debug, Default)]
struct WorkerRecord {
    /// How the last one ended, while there is no other.
    ended: Option<WorkerEnding>,
    /// Why the trainer has ended it, until its end is heard.
    fault: Option<String>,
    /// Since when it owes a part.
    since: Option<Instant>,
    /// It was started in the place of another, and has delivered nothing yet.
    is_new: bool,
    /// Its part of the batch.
    part: Option<WorkerFrames>,
}

/// A worker's frames, and their place in what came from it.
#[derive(Debug)]
struct WorkerFrames {
    frames: Frames,
    place: u64,
}

/// The parts of a batch and what happened meanwhile.
pub(super) struct GatheredBatch {
    /// In the order of the workers; each is `[P, T]`, or `[T]`.
    pub parts: Vec<(WorkerId, Frames)>,
    pub restarts: Vec<Restarted>,
    pub abandoned: Vec<Abandoned>,
    /// Frames that were stale.
    pub dropped: usize,
}

impl RolloutPlan {
    /// What a worker is started with.
    pub fn start(&self, seed: u64, weights: InitInfo) -> Start {
        Start {
            task: self.task.clone(),
            envs: self.envs as u32,
            seed,
            options: self.options,
            weights,
        }
    }

    /// Shapes a worker's frames, `[P, T]`, as they are handed out.
    pub fn shape(&self, frames: &mut Frames) {
        if !self.batched {
            frames.shape = vec![frames.len()];
        }
    }

    fn steps(&self, goal: Goal) -> usize {
        match goal {
            Goal::Meet => 0,
            Goal::Everyone | Goal::Anyone => self.steps,
        }
    }
}

impl Core {
    /// Takes over workers that run, and waits until they have their first
    /// weights.
    pub fn meet(
        sender: Sender,
        crew: Box<dyn Crew>,
        workers: usize,
        plan: RolloutPlan,
        seeds: Seeds,
        deadline: Duration,
        rules: Rules,
    ) -> Result<Self, Error> {
        let mut core = Self {
            sender,
            crew,
            deadline,
            plan,
            schedule: Schedule::new(workers, rules),
            seeds,
            workers: (0..workers).map(|_| WorkerRecord::default()).collect(),
            trajectories: Trajectories::new(workers),
            heard: VecDeque::new(),
            restarts: Vec::new(),
            abandoned: Vec::new(),
            dropped: 0,
        };
        // Who died before the first batch is told with it.
        core.restarts = core.gather(Goal::Meet)?.restarts;
        Ok(core)
    }

    /// Ends the workers and waits until they have left.
    pub fn shutdown(self) {
        let Self {
            sender, mut crew, ..
        } = self;
        // The sender ends first. Workers that wait for a version then hear of the end and leave on
        // their own, before the crew ends them.
        drop(sender);
        crew.shutdown();
    }

    /// The version sent last.
    pub fn version(&self) -> Version {
        self.sender.version().expect("the only model")
    }

    /// Gathers a batch.
    pub fn gather(&mut self, goal: Goal) -> Result<GatheredBatch, Error> {
        let begun = Instant::now();
        let deadline = begun.checked_add(self.deadline);
        // The newest version when the batch begins. Versions that are sent meanwhile come with the
        // next batch.
        let version = self.version().0;
        let (mut event, mut part) = (ScheduleEvent::Begin { goal, version }, None);
        loop {
            // Decide, then do: the schedule is a pure function, and only this loop has clocks and
            // workers.
            let effects = self.schedule.step(event);
            if self.perform(effects, part, goal, deadline)? {
                return Ok(self.take());
            }
            // After the effects, because an effect may have asked a worker for a part.
            self.watch(goal);
            (event, part) = loop {
                // A worker whose time is over comes first: it is replaced, and the batch goes on.
                if let Some(worker) = self.overdue() {
                    break (ScheduleEvent::Failed { worker }, None);
                }
                let limit = self.next_limit();
                // Whichever comes first: the deadline of the batch, or the time of the worker that
                // is late next.
                let until = [deadline, limit].into_iter().flatten().min();
                if let Some((worker, heard)) = self.hear(left(until)) {
                    break self.understand(worker, heard, goal);
                }
                // The wait ended by the batch's deadline, or no worker is left to hear. Otherwise a
                // worker's time is over, which the next round notices.
                if until != limit || limit.is_none() {
                    return Err(Error::CollectTimeout {
                        missing: self.schedule.missing().map(id).collect(),
                        waited: begun.elapsed(),
                    });
                }
            };
        }
    }

    /// Has the clock run for every worker that owes a part.
    fn watch(&mut self, goal: Goal) {
        for (index, worker) in self.workers.iter_mut().enumerate() {
            // While workers start, only the batch's deadline counts.
            if goal == Goal::Meet || !self.schedule.owes(index) {
                worker.since = None;
            } else if worker.since.is_none() {
                // A worker that owes two parts has one clock: it starts again when a part arrives.
                worker.since = Some(Instant::now());
            }
        }
    }

    /// When the next worker's time is over.
    fn next_limit(&self) -> Option<Instant> {
        let workers = self.workers.iter();
        workers.filter_map(|worker| self.limit_of(worker)).min()
    }

    fn limit_of(&self, worker: &WorkerRecord) -> Option<Instant> {
        let timeout = self.plan.timeout?;
        let timeout = if worker.is_new {
            timeout.max(FIRST_PART)
        } else {
            timeout
        };
        // A limit beyond the clock's range is none.
        worker.since?.checked_add(timeout)
    }

    /// A worker whose time is over and that has said nothing. Its fault is noted.
    fn overdue(&mut self) -> Option<usize> {
        let now = Instant::now();
        let is_late = |core: &Self, worker: &usize| {
            core.limit_of(&core.workers[*worker])
                .is_some_and(|limit| limit <= now)
        };
        let all = 0..self.workers.len();
        // The common case costs no more than this look at the clocks.
        if !all.clone().any(|worker| is_late(self, &worker)) {
            return None;
        }
        // What was said in time counts, though the trainer comes late. No worker says more
        // than this unless it is at fault.
        for _ in 0..self.workers.len() * (AHEAD + 1) {
            let Some(heard) = self.crew.hear(Some(Duration::ZERO)) else {
                break;
            };
            self.heard.push_back(heard);
        }
        let is_silent =
            |core: &Self, worker: &usize| !core.heard.iter().any(|(heard, _)| heard == worker);
        let worker = all
            .clone()
            .find(|one| is_late(self, one) && is_silent(self, one))?;
        let state = &mut self.workers[worker];
        // Its clock stops, so that it is not found late again before its end is heard.
        state.since = None;
        let timeout = self.plan.timeout.unwrap_or_default();
        state.fault = Some(format!("it took more than {timeout:?} for one part"));
        Some(worker)
    }

    /// What is heard next.
    fn hear(&mut self, timeout: Option<Duration>) -> Option<(usize, Heard)> {
        self.heard.pop_front().or_else(|| self.crew.hear(timeout))
    }

    /// Asks a worker for a part. If that fails, the schedule learns it.
    ///
    /// # Errors
    ///
    /// Those of the worker's channel.
    fn ask(
        &mut self,
        worker: usize,
        request: &Collect,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let asked = self.crew.ask(worker, request, left(deadline));
        if asked.is_err() {
            self.not_asked(worker, request.ticket);
        }
        asked
    }

    /// Tells the schedule that a worker was not asked.
    fn not_asked(&mut self, worker: usize, ticket: u64) {
        self.schedule
            .step(ScheduleEvent::NotAsked { worker, ticket });
    }

    /// Goes on without a worker.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::forget`].
    fn abandon(&mut self, worker: usize, deaths: u32) -> Result<(), Error> {
        // Reports have no lines of it any more.
        self.sender.forget([id(worker)])?;
        let exit = self.workers[worker].ended.take();
        self.abandoned.push(Abandoned {
            worker: id(worker),
            deaths,
            // The schedule gives a worker up only after its end.
            exit: exit.expect("it has been heard to end"),
        });
        Ok(())
    }

    /// The error of a batch that needs a worker which cannot be kept alive.
    fn keeps_dying(&self, worker: usize, deaths: u32) -> Error {
        let exit = self.workers[worker].ended.clone();
        Error::KeepsDying {
            worker: id(worker),
            deaths,
            exit: Box::new(exit.expect("it has been heard to end")),
        }
    }

    /// Performs effects in their order, with the part that was just heard; true
    /// once the batch is whole.
    fn perform(
        &mut self,
        effects: Vec<ScheduleEffect>,
        mut part: Option<WorkerFrames>,
        goal: Goal,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        // Effects can cause effects: a started worker is asked at once.
        let mut effects = VecDeque::from(effects);
        // The first failure ends the performing. The schedule still has to learn which requests
        // were never made.
        let (mut whole, mut failed) = (false, None);
        while let Some(effect) = effects.pop_front() {
            match effect {
                ScheduleEffect::Deliver => whole = true,
                // At most one part was heard, so it belongs to this effect.
                ScheduleEffect::Keep { worker } => self.workers[worker].part = part.take(),
                ScheduleEffect::Discard { stale, .. } => {
                    let frames = part.take().map_or(0, |part| part.frames.len());
                    self.dropped += if stale { frames } else { 0 };
                }
                ScheduleEffect::Clear { worker } => self.workers[worker].part = None,
                // Without this the schedule would wait for a part that no worker was asked for.
                ScheduleEffect::Ask { worker, ticket, .. } if failed.is_some() => {
                    self.not_asked(worker, ticket);
                }
                _ if failed.is_some() => {}
                ScheduleEffect::Ask {
                    worker,
                    ticket,
                    version,
                    random,
                } => {
                    let request = Collect {
                        ticket,
                        steps: self.plan.steps(goal) as u32,
                        version,
                        random,
                    };
                    failed = self.ask(worker, &request, deadline).err();
                }
                ScheduleEffect::Start { worker } => match self.start(worker) {
                    Ok(()) => effects.extend(self.schedule.step(ScheduleEvent::Started { worker })),
                    Err(error) => failed = Some(error),
                },
                ScheduleEffect::Kill { worker } => failed = self.crew.kill(worker).err(),
                ScheduleEffect::Abandon { worker, deaths } => self.abandon(worker, deaths)?,
                ScheduleEffect::GiveUp { worker, deaths } => {
                    failed = Some(self.keeps_dying(worker, deaths));
                }
            }
        }
        // A whole batch is handed out even if a worker could not be started: that is tried again
        // with the next batch.
        match failed {
            // What fails once the batch is whole is tried again by the next.
            Some(error) if !whole => Err(error),
            _ => Ok(whole),
        }
    }

    /// What was heard, as the schedule takes it.
    fn understand(
        &mut self,
        worker: usize,
        heard: Heard,
        goal: Goal,
    ) -> (ScheduleEvent, Option<WorkerFrames>) {
        match heard {
            Heard::Frames { ticket, frames } => {
                let (task, envs) = (&self.plan.task, self.plan.envs);
                // The frames come from another process, so their shape and actions are checked
                // before anything indexes by them.
                if let Err(error) = task.check_part(&frames, envs, self.plan.steps(goal)) {
                    return (self.at_fault(worker, error.to_string()), None);
                }
                // It has delivered: its clock stops, and a worker that was new has shown that it
                // starts.
                let state = &mut self.workers[worker];
                (state.since, state.is_new) = (None, false);
                // Drawn evenly, an action is of no version and never stale.
                let versions = frames.policy_versions.iter().copied();
                let oldest = versions.filter(|version| *version > 0).min();
                let part = ScheduleEvent::Part {
                    worker,
                    ticket,
                    oldest: oldest.unwrap_or(u64::MAX),
                };
                // Counted for every part, also one that is discarded: the gap breaks its
                // trajectories.
                let place = self.trajectories.arrived(worker);
                let frames = *frames;
                (part, Some(WorkerFrames { frames, place }))
            }
            Heard::Nonsense(reason) => (self.at_fault(worker, reason), None),
            Heard::Ended(ending) => {
                let state = &mut self.workers[worker];
                // The exit of a killed process says only that it was killed. The fault says why.
                state.ended = Some(match state.fault.take() {
                    Some(fault) => ending.because(fault),
                    None => ending,
                });
                state.since = None;
                // What its successor sends does not continue its trajectories.
                self.trajectories.replaced(worker);
                (ScheduleEvent::Ended { worker }, None)
            }
        }
    }

    /// A worker sent what cannot be read.
    fn at_fault(&mut self, worker: usize, reason: String) -> ScheduleEvent {
        // Told when the end of the worker is heard.
        self.workers[worker].fault = Some(reason);
        ScheduleEvent::Failed { worker }
    }

    /// Starts a worker whose last one has been heard to end.
    fn start(&mut self, worker: usize) -> Result<(), Error> {
        // A seed of its own for each start: a replacement that dies from its first episode would
        // otherwise repeat it.
        let start = self.plan.start(self.seeds.next(), self.sender.init_info());
        let pid = self.crew.restart(worker, start)?;
        self.workers[worker].is_new = true;
        if let Some(exit) = self.workers[worker].ended.take() {
            let worker = id(worker);
            self.restarts.push(Restarted { worker, exit, pid });
        }
        Ok(())
    }

    /// The batch, which is whole.
    fn take(&mut self) -> GatheredBatch {
        let mut parts = Vec::new();
        // In the order of the workers, so equal seeds give equal batches.
        for (worker, state) in self.workers.iter_mut().enumerate() {
            if let Some(WorkerFrames { mut frames, place }) = state.part.take() {
                let steps = frames.steps();
                self.trajectories
                    .rename(worker, place, &mut frames.traj_ids, steps);
                self.plan.shape(&mut frames);
                parts.push((id(worker), frames));
            }
        }
        GatheredBatch {
            parts,
            restarts: std::mem::take(&mut self.restarts),
            abandoned: std::mem::take(&mut self.abandoned),
            dropped: std::mem::take(&mut self.dropped),
        }
    }
}

/// The number of the worker at an index.
fn id(worker: usize) -> WorkerId {
    WorkerId(worker as u32)
}

/// How many frames were handed out, and what that decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameTally {
    pub init_random_frames: usize,
    pub total_frames: Option<usize>,
    pub frames: usize,
}

impl FrameTally {
    pub fn is_full(&self) -> bool {
        self.total_frames.is_some_and(|total| self.frames >= total)
    }

    pub fn begins_random(&self) -> bool {
        self.frames < self.init_random_frames
    }
}

/// One seed for every worker that is started.
#[derive(Debug)]
pub(super) struct Seeds(EnvRng);

impl Seeds {
    pub fn new(seed: u64) -> Self {
        Self(EnvRng::seed_from_u64(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }
}
