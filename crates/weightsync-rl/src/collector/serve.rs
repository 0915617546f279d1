use std::time::Duration;

use weightsync_engine::{
    ReceiverSetup, SetSnapshot, Snapshot, SnapshotsInBackground,
    worker::{WorkerError, WorkerProcess},
};

use super::wire::{self, Collect, Collected, Start};
use crate::{Error, frames::Frames};

/// How long a worker waits for the trainer to take it in.
const JOIN: Duration = Duration::from_secs(30);

/// The worker's end of a collector: collects what the trainer asks for until
/// the trainer closes the pipe.
///
/// A thread of its own receives weights whatever the environments are doing;
/// the safe point is the beginning of a part of a batch, which pins the newest
/// version and reads it in place, in shared memory, until its last frame. So a
/// version is reported as applied when it is pinned: nothing is left to load,
/// and that its layout is a policy's was checked by the trainer before it sent
/// anything.
///
/// # Errors
/// [`Error::Weights`] if the trainer cannot be joined or its model cannot be
/// read, [`Error::MissingTensor`] and [`Error::TensorLen`] if it is no policy
/// for the task, [`Error::Gym`] about an environment of Gymnasium, [`Error::Workers`] and [`Error::Message`] about the pipe. The
/// trainer sees the process end and, if the error is printed, why.
pub fn serve(process: &WorkerProcess) -> Result<(), Error> {
    let start: Start = wire::decode(process.init())?;
    work(process, start)
}

/// A worker's way to and from its trainer.
pub(super) trait Port {
    /// The worker's number.
    fn index(&self) -> usize;
    /// The next request; `None` once the trainer wants no more.
    fn request(&self) -> Result<Option<Collect>, Error>;
    /// Hands over the frames that the request `ticket` asked for.
    fn deliver(&self, ticket: u64, frames: Frames) -> Result<(), Error>;
}

impl Port for WorkerProcess {
    fn index(&self) -> usize {
        WorkerProcess::index(self)
    }

    fn request(&self) -> Result<Option<Collect>, Error> {
        match self.recv(None)? {
            // What was asked before the trainer left is of no use any more.
            Some(bytes) if !self.is_closed() => Ok(Some(wire::decode(&bytes)?)),
            _ => Ok(None),
        }
    }

    fn deliver(&self, ticket: u64, frames: Frames) -> Result<(), Error> {
        match self.send(&wire::encode(&Collected::new(ticket, frames))?) {
            // Its next request is that there is none.
            Err(WorkerError::Closed) => Ok(()),
            other => Ok(other?),
        }
    }
}

/// Collects what is asked for through `port` until nothing more is.
pub(super) fn work(port: &impl Port, start: Start) -> Result<(), Error> {
    let setup = ReceiverSetup::new(start.weights, port.index() as u32);
    let live = setup.connect(Some(JOIN))?.snapshots_in_background()?;
    let envs = start.envs as usize;
    let mut rollout = start.task.rollout(envs, start.seed, start.options)?;
    while let Some(request) = port.request()? {
        let weights = match request.random {
            true => None,
            false => Some(at_least(&live, request.version)?),
        };
        let frames = rollout.part(weights.as_ref(), request.steps as usize)?;
        // Before the pipe, which may be full for long: a pinned version takes a slot.
        drop(weights);
        port.deliver(request.ticket, frames)?;
    }
    Ok(())
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
