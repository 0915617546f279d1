//! Messages from an agent to its sender.

mod wire;

use weightsync_core::digest::Digest;
use weightsync_core::{Epoch, Run, Version, WorkerId};

use super::*;

/// What an agent says to its sender, of itself and of the workers of its host.
///
/// `instance` is a number that each life of a worker has for itself, so that what is said of an
/// earlier one is not taken for what is said of the one that came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToRoot {
    /// The first words.
    Agent {
        /// Its name, for people to read; cut to [`MAX_TEXT`].
        name: String,
        /// Which host it is on: the same for every process of that host.
        host: [u8; 16],
        /// Its process.
        pid: u32,
        /// The port at which children can fetch from it, if they can.
        bulk: Option<u16>,
        /// The highest epoch it has seen.
        seen: Epoch,
        /// The whole versions it has, of `run`; at most [`MAX_HELD`].
        holds: Vec<Item>,
        /// The run it followed last.
        run: Option<Run>,
    },
    /// A worker wants to take part.
    Join {
        /// The question's number: the answer names it.
        ticket: u64,
        /// Who it is.
        worker: WorkerId,
        /// Which life of it.
        instance: u64,
        /// Its process, on its host.
        pid: u32,
        /// The models it wants, a bit each; all ones for every one there is. At least one.
        models: u64,
        /// Which versions it is to be given.
        delivery: Delivery,
        /// Where its weights live, for people to read; cut to [`MAX_DEVICE`].
        device: String,
        /// The highest epoch it has seen.
        seen: Epoch,
    },
    /// How far workers have come, of whom that has changed; at most [`MAX_PROGRESS`].
    Progress {
        /// The workers; see [`ToRoot::progress`].
        workers: Vec<WorkerProgress>,
    },
    /// A worker is no more.
    Gone {
        /// Who.
        worker: WorkerId,
        /// Which life of it.
        instance: u64,
        /// Whether it died; otherwise it left in order.
        died: bool,
    },
    /// A worker is there and can use nothing more.
    Unusable {
        /// Who.
        worker: WorkerId,
        /// Which life of it.
        instance: u64,
        /// Why; cut to [`MAX_TEXT`].
        reason: String,
    },
    /// A worker asks for a version.
    Ask {
        /// Who.
        worker: WorkerId,
        /// Which life of it.
        instance: u64,
        /// The question's number: the answer names it.
        question: u64,
        /// Which version.
        want: Want,
    },
    /// A worker does not wait for an answer any more.
    Withdraw {
        /// Who.
        worker: WorkerId,
        /// Which life of it.
        instance: u64,
    },
    /// Which versions the agent has come to have whole, and has no more.
    Holds {
        /// New ones; at most [`MAX_HELD`].
        have: Vec<Item>,
        /// Those given up; at most [`MAX_HELD`].
        dropped: Vec<Item>,
    },
    /// A transfer has ended.
    Received {
        /// Of which model.
        model: u8,
        /// The version.
        version: Version,
        /// Which agent it was fetched from; 0 for the sender itself.
        parent: u64,
        /// How much was fetched for it, in bytes.
        bytes: u64,
        /// How long its chunks took from their first byte to their last, in
        /// microseconds.
        micros: u64,
    },
    /// The parent does not answer.
    ParentLost {
        /// Which agent that was.
        parent: u64,
        /// Why it is taken for lost; cut to [`MAX_TEXT`].
        reason: String,
    },
    /// The parent does not have a version it was asked for.
    Missing {
        /// Of which model.
        model: u8,
        /// The version.
        version: Version,
    },
    /// It is there.
    Ping,
    /// It goes, in order.
    Goodbye,
    /// The answer to a [`FromRoot::Scrub`].
    Scrubbed {
        /// Of which model.
        model: u8,
        /// The version.
        version: Version,
        /// The digest of the bytes it has; `None` if it has not that version any more.
        digest: Option<Digest>,
    },
}

/// How far a worker has come. Sequences are those of [`FromRoot::Tell`] and [`FromRoot::Answer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerProgress {
    /// Who.
    pub worker: WorkerId,
    /// Which life of it.
    pub instance: u64,
    /// The newest sequence it has taken: its slots are pinned.
    pub taken: u64,
    /// The last question whose answer it needs no more.
    pub through: u64,
    /// The newest sequence it has loaded.
    pub loaded: u64,
    /// What it runs: no model twice.
    pub versions: Vec<Item>,
    /// The last sequence it refused, 0 for any, and why; cut to [`MAX_TEXT`].
    pub refused: Option<(u64, String)>,
}

impl WorkerProgress {
    /// The most bytes it takes on the wire.
    fn max_bytes(&self) -> usize {
        const NUMBER: usize = 10;
        let refused = self
            .refused
            .as_ref()
            .map_or(0, |(_, reason)| 2 * NUMBER + reason.len().min(MAX_TEXT));
        6 * NUMBER + self.versions.len() * (1 + NUMBER) + refused + 1
    }
}

impl ToRoot {
    /// [`ToRoot::Progress`] of any number of workers, in as many messages as it takes.
    pub fn progress(workers: Vec<WorkerProgress>) -> Vec<Self> {
        // What comes before the workers takes no more than this.
        const ROOM: usize = MAX_FRAME - 32;
        let mut messages = Vec::new();
        let mut batch = Vec::new();
        let mut bytes = 0;
        for worker in workers {
            let more = worker.max_bytes();
            if batch.len() == MAX_PROGRESS || bytes + more > ROOM {
                let workers = std::mem::take(&mut batch);
                messages.push(Self::Progress { workers });
                bytes = 0;
            }
            bytes += more;
            batch.push(worker);
        }
        if !batch.is_empty() {
            messages.push(Self::Progress { workers: batch });
        }
        messages
    }

    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Agent { bulk, holds, .. } => {
                require(*bulk != Some(0), "a port from 1", || "0".into())?;
                check_items("versions an agent has", holds, MAX_HELD)
            }
            Self::Join {
                models, delivery, ..
            } => {
                require(*models != 0, "at least one model", || "none".into())?;
                check_delivery(*delivery)
            }
            Self::Progress { workers } => {
                within("workers in one message", workers.len(), MAX_PROGRESS)?;
                workers
                    .iter()
                    .try_for_each(|worker| check_set(&worker.versions))
            }
            Self::Ask { want, .. } => check_want(*want),
            Self::Holds { have, dropped } => {
                check_items("versions an agent has", have, MAX_HELD)?;
                check_items("versions an agent has dropped", dropped, MAX_HELD)
            }
            &Self::Received { model, version, .. }
            | &Self::Missing { model, version }
            | &Self::Scrubbed { model, version, .. } => check_item(model, version),
            Self::Gone { .. }
            | Self::Unusable { .. }
            | Self::Withdraw { .. }
            | Self::ParentLost { .. }
            | Self::Ping
            | Self::Goodbye => Ok(()),
        }
    }
}
