use std::time::Duration;

use weightsync_engine::worker::{Event, Restart, Spawn, WorkerError, Workers};

use super::{Crew, Heard, WorkerEnding};
use crate::{
    Error,
    collector::{
        schedule::AHEAD,
        wire::{self, Collect, Collected, Start},
    },
};

/// How long ended workers may take to leave.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// Workers that are processes of their own.
#[derive(Debug)]
pub(in crate::collector) struct Processes(Workers);

impl Processes {
    /// Starts one process for each of `starts`, whose messages are of `longest`
    /// bytes at most.
    pub fn start(spawn: Spawn, starts: &[Start], longest: usize) -> Result<Self, Error> {
        // Encoded before any process starts, so a description that cannot be encoded starts none.
        let inits = starts.iter().map(wire::encode);
        let inits = inits.collect::<Result<Vec<_>, _>>()?;
        let workers = spawn
            .count(inits.len())
            .init_each(move |worker| inits.get(worker).cloned().unwrap_or_default())
            .max_frame(longest as u32)
            // What a worker has finished is read at once, also while the trainer trains: so it
            // is known to be finished once the worker's time is over.
            .queue_bytes(AHEAD * longest)
            // A process is started with the seed and the weights of its time,
            // and counted: by the collector alone.
            .restart(Restart::Never)
            .start()?;
        Ok(Self(workers))
    }
}

impl Crew for Processes {
    fn ask(
        &mut self,
        worker: usize,
        request: &Collect,
        timeout: Option<Duration>,
    ) -> Result<(), Error> {
        match self.0.send(worker, &wire::encode(request)?, timeout) {
            // Its exit is on its way, for a dead worker is asked for nothing
            // once that has been heard.
            Err(WorkerError::Gone { .. }) => Ok(()),
            other => Ok(other?),
        }
    }

    fn hear(&mut self, timeout: Option<Duration>) -> Option<(usize, Heard)> {
        let (worker, event) = self.0.recv_any(timeout)?;
        let heard = match event {
            // The bytes come from another process. What cannot be read is its fault, and no error
            // of the trainer.
            Event::Frame(bytes) => match wire::decode::<Collected>(&bytes) {
                Ok(collected) => {
                    let (ticket, frames) = collected.into_frames();
                    Heard::frames(ticket, frames)
                }
                Err(error) => Heard::Nonsense(error.to_string()),
            },
            Event::Exited(exit) => Heard::Ended(WorkerEnding::Process(exit)),
            // No other event is expected of a worker that the collector restarts itself.
            other => Heard::Nonsense(format!("it says {other:?}")),
        };
        Some((worker, heard))
    }

    fn restart(&mut self, worker: usize, start: Start) -> Result<u32, Error> {
        Ok(self.0.restart(worker, Some(wire::encode(&start)?))?)
    }

    fn kill(&mut self, worker: usize) -> Result<(), Error> {
        Ok(self.0.kill(worker)?)
    }

    fn pid(&self, worker: usize) -> Option<u32> {
        self.0.pid(worker)
    }

    fn shutdown(&mut self) {
        self.0.shutdown(Some(SHUTDOWN));
    }
}
