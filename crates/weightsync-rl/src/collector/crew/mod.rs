//! The workers of a collector, as its trainer reaches them.

mod processes;
mod threads;

use std::{fmt, time::Duration};

use weightsync_engine::worker::Exit;

use super::wire::{Collect, Start};
use crate::{Error, frames::Frames};

pub(super) use processes::Processes;
pub(super) use threads::ThreadCrew;

/// How a worker ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkerEnding {
    /// It was a process.
    Process(Exit),
    /// It was a thread, which failed or panicked with these words.
    Thread(String),
    /// The trainer gave it up.
    GivenUp {
        /// What it had done wrong.
        reason: String,
        /// The end of its process, which was killed; `None` for a thread, which cannot
        /// be killed: it is left alone, and ends with the part it is at.
        exit: Option<Exit>,
    },
}

impl WorkerEnding {
    /// The end of its process, if it was one.
    pub fn process(&self) -> Option<&Exit> {
        match self {
            WorkerEnding::Process(exit) => Some(exit),
            WorkerEnding::Thread(_) => None,
            WorkerEnding::GivenUp { exit, .. } => exit.as_ref(),
        }
    }

    /// The same of a worker that was given up for a reason.
    pub(super) fn because(self, reason: String) -> Self {
        let exit = match self {
            WorkerEnding::Process(exit) => Some(exit),
            WorkerEnding::Thread(_) => None,
            WorkerEnding::GivenUp { exit, .. } => exit,
        };
        WorkerEnding::GivenUp { reason, exit }
    }
}

impl fmt::Display for WorkerEnding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WorkerEnding::Process(exit) => exit.fmt(f),
            WorkerEnding::Thread(words) => write!(f, "its thread ended: {words}"),
            WorkerEnding::GivenUp { reason, exit } => match exit {
                Some(exit) => write!(f, "{reason}: {exit}"),
                None => write!(f, "{reason}; its thread was left alone"),
            },
        }
    }
}

/// Something heard from a worker.
#[derive(Debug)]
pub(super) enum Heard {
    /// Frames, as yet unchecked, for the request `ticket`.
    Frames { ticket: u64, frames: Box<Frames> },
    /// Bytes that mean nothing, for this reason.
    Nonsense(String),
    /// It has ended. What is heard afterwards is from another in its place.
    Ended(WorkerEnding),
}

impl Heard {
    fn frames(ticket: u64, frames: Frames) -> Self {
        let frames = Box::new(frames);
        Heard::Frames { ticket, frames }
    }
}

/// A group of workers. Dropping it ends them.
pub(super) trait Crew: fmt::Debug + Send {
    /// Asks a worker for a part. That the worker has ended is no error: it is
    /// heard.
    fn ask(
        &mut self,
        worker: usize,
        request: &Collect,
        timeout: Option<Duration>,
    ) -> Result<(), Error>;

    /// What is heard next of any worker; `None` at the timeout, or if no worker
    /// is left to be heard.
    fn hear(&mut self, timeout: Option<Duration>) -> Option<(usize, Heard)>;

    /// Starts a worker in the place of one that has ended, and returns the id of
    /// its process.
    fn restart(&mut self, worker: usize, start: Start) -> Result<u32, Error>;

    /// Ends a worker, whatever it does; that it has ended is heard, and nothing of it
    /// afterwards. A thread that hangs cannot be ended: it is left alone.
    fn kill(&mut self, worker: usize) -> Result<(), Error>;

    /// The process a worker runs in; `None` while it does not run.
    fn pid(&self, worker: usize) -> Option<u32>;

    /// Ends the workers and waits until they have left.
    fn shutdown(&mut self);
}
