//! A process that does what it is told, one command at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use weightsync_engine::AnyScheme;
use weightsync_engine::worker::WorkerProcess;

use super::command::{Answer, Command};
use super::fault::Fault;
use super::resource_census;
use super::trainer::Trainer;
use super::worker::Worker;
use crate::Subjects;

/// Why a command had no answer of its own: an error of the library, which is one,
/// or a broken promise.
#[derive(Debug)]
pub(crate) enum Stop {
    Fault(Box<weightsync_engine::Error>),
    Broken(String),
}

impl From<weightsync_engine::Error> for Stop {
    fn from(error: weightsync_engine::Error) -> Self {
        Self::Fault(Box::new(error))
    }
}

impl From<String> for Stop {
    fn from(text: String) -> Self {
        Self::Broken(text)
    }
}

impl From<&str> for Stop {
    fn from(text: &str) -> Self {
        Self::Broken(text.into())
    }
}

/// The pipe of a process.
pub(crate) struct CommandPipe<'a> {
    process: &'a WorkerProcess,
}

impl CommandPipe<'_> {
    /// An answer before the last.
    pub(crate) fn send(&self, answer: &Answer) -> Result<(), String> {
        let frame = postcard::to_stdvec(answer).map_err(|error| error.to_string())?;
        self.process.send(&frame).map_err(|error| error.to_string())
    }

    /// Waits for the next command, whatever it is.
    pub(crate) fn wait_for_next(&self) -> Result<(), String> {
        self.process
            .recv(None)
            .map(drop)
            .map_err(|error| error.to_string())
    }

    /// Whether the next command is there, or the end.
    pub(crate) fn has_next(&self) -> Result<bool, String> {
        if self.process.is_closed() {
            return Ok(true);
        }
        let next = self.process.recv(Some(Duration::ZERO));
        next.map(|frame| frame.is_some())
            .map_err(|error| error.to_string())
    }
}

/// Obeys until the pipe is closed.
pub(crate) fn obey(
    process: &WorkerProcess,
    subjects: &Subjects,
) -> Result<(), Box<dyn std::error::Error>> {
    let scheme: String = process.init_value()?;
    let pipe = CommandPipe { process };
    let scheme: AnyScheme = scheme.parse()?;
    let mut trainer = Trainer::new(scheme.clone(), subjects.corrupt.clone());
    let mut workers: BTreeMap<u32, Worker> = BTreeMap::new();
    while let Some(frame) = process.recv(None)? {
        pipe.send(&Answer::Received)?;
        let answer = match postcard::from_bytes(&frame)? {
            Command::Trainer(act) => trainer.act(act, &pipe),
            Command::Worker(number, deed) => {
                let worker = workers
                    .entry(number)
                    .or_insert_with(|| Worker::new(number, scheme.clone()));
                worker.act(deed, &pipe)
            }
            Command::GoOn => Ok(Answer::Done),
            Command::ResourceCensus => Ok(Answer::ResourceCensus(resource_census::take())),
        };
        let answer = answer.unwrap_or_else(|stop| match stop {
            Stop::Fault(error) => Answer::Fault(Fault::from(&*error)),
            Stop::Broken(text) => Answer::Broken(text),
        });
        pipe.send(&answer)?;
    }
    Ok(())
}

/// Ends this process here and now, as if somebody had killed it.
pub(crate) fn die() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    unreachable!("the signal is delivered before the call returns")
}
