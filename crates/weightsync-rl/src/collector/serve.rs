use std::time::Duration;

use weightsync_engine::{
    ReceiverSetup, SetSnapshot, Snapshot, SnapshotsInBackground, worker::WorkerProcess,
};

use super::{
    Task,
    wire::{self, Collect, Collected, Start},
};
use crate::{
    Error,
    env::{Acrobot, CartPole, Env, MountainCar},
    policy::MlpPolicy,
    rollout::Rollout,
};

/// How long a worker waits for the trainer to take it in.
const JOIN: Duration = Duration::from_secs(30);

/// The worker's end of a collector: collects what the trainer asks for until
/// the trainer closes the pipe.
///
/// A thread of its own receives weights whatever the environments are doing;
/// the safe point is the beginning of a batch, which pins the newest version
/// and reads it in place, in shared memory, until its last frame. So a version
/// is reported as applied when it is pinned: nothing is left to load, and that
/// its layout is a policy's was checked by the trainer before it sent anything.
///
/// # Errors
/// [`Error::Weights`] if the trainer cannot be joined or its model cannot be
/// read, [`Error::MissingTensor`] and [`Error::TensorLen`] if it is no policy
/// for the task, [`Error::Workers`] and [`Error::Message`] about the pipe. The
/// trainer sees the process end and, if the error is printed, why.
pub fn serve(process: &WorkerProcess) -> Result<(), Error> {
    let start: Start = wire::decode(process.init())?;
    match start.task {
        Task::CartPole => serve_task::<CartPole>(process, start),
        Task::MountainCar => serve_task::<MountainCar>(process, start),
        Task::Acrobot => serve_task::<Acrobot>(process, start),
    }
}

fn serve_task<E: Env>(process: &WorkerProcess, start: Start) -> Result<(), Error> {
    let setup = ReceiverSetup::new(start.weights, process.index() as u32);
    let live = setup.connect(Some(JOIN))?.snapshots_in_background()?;
    let mut rollout = Rollout::<E>::new(start.envs as usize, start.seed);
    while let Some(request) = process.recv(None)? {
        let request: Collect = wire::decode(&request)?;
        let weights = at_least(&live, request.version)?;
        let policy = policy(start.task, &weights)?;
        let frames = rollout.collect(&policy, weights.version().0, request.steps as usize);
        process.send(&wire::encode(&Collected::new(request.batch, frames))?)?;
    }
    Ok(())
}

/// The policy on a version's own bytes.
fn policy(task: Task, weights: &Snapshot) -> Result<MlpPolicy<'_>, Error> {
    let policy = MlpPolicy::from_tensors(task.observation_len(), "actor", |name| {
        weights.slice::<f32>(name).ok()
    })?;
    task.check_actions(policy.outputs())?;
    Ok(policy)
}

/// The newest version, as soon as it is the one asked for or newer: the trainer
/// may ask for it before it has arrived.
fn at_least(weights: &SnapshotsInBackground, version: u64) -> Result<Snapshot, Error> {
    let number = |set: &SetSnapshot| set.only().map_or(0, |policy| policy.version().0);
    match weights.wait(None, |set| number(set) >= version)? {
        Some(set) => Ok(set.only()?.clone()),
        None => Err(Error::NoSuchVersion {
            expected: version,
            got: weights.newest()?.as_ref().map_or(0, number),
            reason: weights.status()?.state.to_string(),
        }),
    }
}
