use std::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use weightsync_engine::transport::threads::LockExt as _;
use weightsync_engine::{
    BackgroundState, ReceiverSetup, SetSnapshot, Snapshot, SnapshotsInBackground, interruptible,
    worker::{WorkerError, WorkerProcess},
};

use super::wire::{self, Collect, Collected, Start};
use crate::{Error, frames::Frames};

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
/// for the task, [`Error::NotFinite`] if it leads to frames that no policy can learn
/// from, [`Error::Gym`] about an environment of Gymnasium, [`Error::Workers`] and
/// [`Error::Message`] about the pipe. The
/// trainer sees the process end and, if the error is printed, why.
pub fn serve(process: &WorkerProcess) -> Result<(), Error> {
    let start: Start = wire::decode(process.init())?;
    work(process, start, &LiveWeights::default())
}

/// The weights that a worker receives. The trainer may take them from a worker that
/// it gives up and cannot kill, so that another can join under its number.
#[derive(Debug, Default)]
pub(super) struct LiveWeights {
    weights: Mutex<Option<SnapshotsInBackground>>,
    given_up: AtomicBool,
}

impl LiveWeights {
    /// How long the worker may keep the trainer from taking the weights.
    const TURN: Duration = Duration::from_millis(100);

    /// Ends the receiver, and with it every wait of the worker.
    pub fn give_up(&self) {
        // The flag comes first: a worker that ends its wait because the receiver is gone finds the
        // reason.
        self.given_up.store(true, Ordering::SeqCst);
        // The lock is free again before the receiver drops, which can take a moment.
        let weights = self.lock().take();
        drop(weights);
    }

    /// Whether the worker is to end, whatever it has been asked for.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst)
    }

    /// The newest version, as soon as it is the one asked for or newer: the trainer
    /// may ask for it before it has arrived.
    fn at_least(&self, version: u64) -> Result<Snapshot, Error> {
        let number = |set: &SetSnapshot| set.only().map_or(0, |policy| policy.version().0);
        let none_comes = |got, reason| Error::NoSuchVersion {
            expected: version,
            got,
            reason,
        };
        while !self.is_given_up() {
            // Held for one turn at most, because the trainer takes the weights under this lock.
            let held = self.lock();
            let Some(weights) = held.as_ref() else {
                break;
            };
            if let Some(set) = weights.wait(Some(Self::TURN), |set| number(set) >= version)? {
                return Ok(set.only()?.clone());
            }
            // The receiver follows no trainer any more: no later version can come.
            let state = weights.status()?.state;
            if state != BackgroundState::Following {
                let newest = weights.newest()?.as_ref().map_or(0, number);
                return Err(none_comes(newest, state.to_string()));
            }
        }
        Err(none_comes(0, "the trainer has given this worker up".into()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<SnapshotsInBackground>> {
        // What is in it is whole at any time.
        self.weights.locked()
    }
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
pub(super) fn work(port: &impl Port, start: Start, live: &LiveWeights) -> Result<(), Error> {
    let setup = ReceiverSetup::new(start.weights, port.index() as u32);
    // A trainer that does not get to run is waited for. A process ends with its trainer.
    let receiver = interruptible(|| live.is_given_up(), || setup.connect(None))?;
    *live.lock() = Some(receiver.snapshots_in_background()?);
    // It may have been given up before there was a receiver to take, and another worker may wait for
    // its number.
    if live.is_given_up() {
        live.give_up();
        return Ok(());
    }
    let envs = start.envs as usize;
    let mut rollout = start.task.rollout(envs, start.seed, start.options)?;
    // One part at a time. The next request may wait in the pipe already.
    while let Some(request) = port.request()? {
        let weights = match request.random {
            true => None,
            // Pins the version for the whole part: all of its frames have one version.
            false => Some(live.at_least(request.version)?),
        };
        let frames = rollout.part(weights.as_ref(), request.steps as usize)?;
        // Before the pipe, which may be full for long: a pinned version takes a slot.
        drop(weights);
        port.deliver(request.ticket, frames)?;
    }
    Ok(())
}
