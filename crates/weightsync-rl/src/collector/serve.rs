use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use weightsync::{Receiver, ReceiverSetup, Snapshot, worker::WorkerProcess};

use super::{
    Task,
    wire::{self, Collect, Collected, Start},
};
use crate::{
    Error,
    env::{CartPole, Env, MountainCar},
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
    }
}

fn serve_task<E: Env>(process: &WorkerProcess, start: Start) -> Result<(), Error> {
    let setup = ReceiverSetup::new(start.weights, process.index() as u32);
    let live = Live::receive(setup.connect(JOIN)?)?;
    let mut rollout = Rollout::<E>::new(start.envs as usize, start.seed);
    while let Some(request) = process.recv(None)? {
        let request: Collect = wire::decode(&request)?;
        let weights = live.at_least(request.version)?;
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

/// The newest version, kept up to date by a thread.
struct Live {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    newest: Option<Snapshot>,
    /// Why nothing more will come.
    ended: Option<String>,
}

impl Live {
    fn receive(mut receiver: Receiver) -> Result<Arc<Self>, Error> {
        let live = Arc::new(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let shared = Arc::clone(&live);
        // It ends with the trainer's sender, or with this process.
        thread::Builder::new()
            .name("weights".into())
            .spawn(move || {
                loop {
                    let received = receiver.receive(None);
                    let mut state = shared.lock();
                    match received {
                        Ok(Some(snapshot)) => state.newest = Some(snapshot),
                        Ok(None) => {}
                        Err(error) => state.ended = Some(error.to_string()),
                    }
                    shared.changed.notify_all();
                    if state.ended.is_some() {
                        return;
                    }
                }
            })
            .map_err(Error::Thread)?;
        Ok(live)
    }

    /// The newest version, as soon as it is `version` or newer: the sender may
    /// learn that it was received a moment before this thread does.
    fn at_least(&self, version: u64) -> Result<Snapshot, Error> {
        let mut state = self.lock();
        loop {
            match (&state.newest, &state.ended) {
                (Some(newest), _) if newest.version().0 >= version => return Ok(newest.clone()),
                (newest, Some(reason)) => {
                    return Err(Error::NoSuchVersion {
                        expected: version,
                        got: newest.as_ref().map_or(0, |newest| newest.version().0),
                        reason: reason.clone(),
                    });
                }
                _ => {}
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
