//! Messages from an agent to its sender.

use serde::{Deserialize, Serialize};
use weightsync_core::digest::Digest;
use weightsync_core::{Epoch, Run};
use weightsync_link::ControlMessage;
use weightsync_link::frame::{FrameKind, MAX_FRAME};
use weightsync_link::message::{Check, CheckText, Message, MessageError, within};
use weightsync_mem::{Delivery, Want, WorkerInstance};

use super::check::{check_delivery, check_item, check_items, check_set, check_want, require};
use super::{MAX_DEVICE, MAX_HELD, MAX_PROGRESS, MAX_TEXT, fields};
use crate::agent::Item;

/// A message from an agent to its sender, about itself and the workers of its host. The order of
/// variants and fields is part of the format.
///
/// Each life of a worker has its own instance, so that a late message about an earlier life is
/// not taken for one about its successor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToRoot {
    /// The first message.
    Agent {
        /// The agent's name, for people to read; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        name: String,
        /// The id of the host: the same for every process of it.
        host: [u8; 16],
        /// The agent's process.
        pid: u32,
        /// The port at which children can fetch from it, if they can.
        bulk: Option<u16>,
        /// The highest epoch that the agent has seen.
        seen: Epoch,
        /// The whole versions of `run` that the agent has; at most [`MAX_HELD`].
        holds: Vec<Item>,
        /// The run that the agent followed last.
        run: Option<Run>,
    },
    /// A worker asks to be admitted.
    Join(WorkerJoin),
    /// The progress of workers for which it has changed; at most [`MAX_PROGRESS`].
    Progress {
        /// The workers; see [`ToRoot::progress`].
        workers: Vec<WorkerProgress>,
    },
    /// A worker has gone.
    Gone {
        /// The worker.
        #[serde(with = "fields::WireInstance")]
        who: WorkerInstance,
        /// Whether the worker died; otherwise it left in order.
        died: bool,
    },
    /// A worker is alive, but can use no more versions.
    Unusable {
        /// The worker.
        #[serde(with = "fields::WireInstance")]
        who: WorkerInstance,
        /// The reason; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        reason: String,
    },
    /// A worker asks for a version.
    Ask {
        /// The worker.
        #[serde(with = "fields::WireInstance")]
        who: WorkerInstance,
        /// Numbers the question: the answer names it.
        question: u64,
        /// The version that the worker wants.
        #[serde(with = "fields::WireWant")]
        want: Want,
    },
    /// A worker no longer waits for an answer.
    Withdraw {
        /// The worker.
        #[serde(with = "fields::WireInstance")]
        who: WorkerInstance,
    },
    /// Whole versions that the agent has gained and dropped.
    Holds {
        /// New ones; at most [`MAX_HELD`].
        have: Vec<Item>,
        /// Dropped versions; at most [`MAX_HELD`].
        dropped: Vec<Item>,
    },
    /// A transfer has ended.
    Received {
        /// The version.
        item: Item,
        /// The agent it was fetched from; 0 for the sender itself.
        parent: u64,
        /// How many bytes were fetched.
        bytes: u64,
        /// How long the blocks took from their first byte to their last, in microseconds.
        micros: u64,
    },
    /// The agent has lost its parent.
    ParentLost {
        /// The number of the parent.
        parent: u64,
        /// The reason; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        reason: String,
    },
    /// The parent does not have the version that was requested.
    Missing {
        /// The version.
        item: Item,
    },
    /// A sign of life.
    Ping,
    /// The agent leaves in order.
    Goodbye,
    /// The answer to a [`FromRoot::Scrub`](super::FromRoot::Scrub).
    Scrubbed {
        /// The version.
        item: Item,
        /// The digest of the agent's bytes; `None` if it no longer has the version.
        digest: Option<Digest>,
    },
    /// A parent sent other bytes than the sender published.
    Altered {
        /// The number of the parent.
        parent: u64,
        /// The version.
        item: Item,
        /// The first block that is not the published one.
        block: u32,
    },
}

/// A worker's request for admission. The order of fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerJoin {
    /// Numbers the request: the reply names it.
    pub ticket: u64,
    /// The worker.
    #[serde(with = "fields::WireInstance")]
    pub who: WorkerInstance,
    /// The worker's process, on its host.
    pub pid: u32,
    /// The models that the worker takes, a bit each, at least one; all ones for all models.
    pub models: u64,
    /// Which versions the worker gets.
    #[serde(with = "fields::WireDelivery")]
    pub delivery: Delivery,
    /// Where the worker's weights live, for people to read; cut to [`MAX_DEVICE`].
    #[serde(serialize_with = "fields::device")]
    pub device: String,
    /// The highest epoch that the worker has seen.
    pub seen: Epoch,
}

/// The progress of one worker. Sequences are those of [`FromRoot::Notify`](super::FromRoot::Notify) and
/// [`FromRoot::Answer`](super::FromRoot::Answer). The order of fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerProgress {
    /// The worker.
    #[serde(with = "fields::WireInstance")]
    pub who: WorkerInstance,
    /// The newest sequence that the worker has taken: its slots are pinned.
    pub taken: u64,
    /// The last question whose answer the worker no longer needs.
    pub through: u64,
    /// The newest sequence that the worker has loaded.
    pub loaded: u64,
    /// The set that the worker runs: no model twice.
    pub versions: Vec<Item>,
    /// The last refused sequence, 0 for all, and the reason; cut to [`MAX_TEXT`].
    #[serde(serialize_with = "fields::refused")]
    pub refused: Option<(u64, String)>,
}

impl WorkerProgress {
    /// The most bytes of this on the wire.
    fn max_bytes(&self) -> usize {
        // The most bytes that a number of 64 bits takes in postcard.
        const NUMBER: usize = 10;
        let refused = self
            .refused
            .as_ref()
            .map_or(0, |(_, reason)| 2 * NUMBER + reason.len().min(MAX_TEXT));
        // Worker, instance, three sequences and the count of versions; then each version with its
        // model.
        6 * NUMBER + self.versions.len() * (1 + NUMBER) + refused + 1
    }
}

impl ToRoot {
    /// The progress of any number of workers, in as few [`ToRoot::Progress`] messages as possible.
    pub fn progress(workers: Vec<WorkerProgress>) -> Vec<Self> {
        // The bytes before the workers fit in the rest.
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
}

impl Message for ToRoot {
    const KIND: FrameKind = FrameKind::Control;
}

impl ControlMessage for ToRoot {
    fn ping() -> Self {
        Self::Ping
    }

    fn is_ping(&self) -> bool {
        matches!(self, Self::Ping)
    }
}

impl Check for ToRoot {
    fn check(&self, text: CheckText) -> Result<(), MessageError> {
        match self {
            Self::Agent {
                name, bulk, holds, ..
            } => {
                text(name, MAX_TEXT)?;
                require(*bulk != Some(0), "a port from 1", || "0".into())?;
                check_items("versions an agent has", holds, MAX_HELD)
            }
            Self::Join(join) => {
                text(&join.device, MAX_DEVICE)?;
                require(join.models != 0, "at least one model", || "none".into())?;
                check_delivery(join.delivery)
            }
            Self::Progress { workers } => {
                within("workers in one message", workers.len(), MAX_PROGRESS)?;
                workers.iter().try_for_each(|worker| {
                    let refused = worker.refused.as_ref();
                    refused.map_or(Ok(()), |(_, reason)| text(reason, MAX_TEXT))?;
                    check_set(&worker.versions)
                })
            }
            Self::Ask { want, .. } => check_want(*want),
            Self::Holds { have, dropped } => {
                check_items("versions an agent has", have, MAX_HELD)?;
                check_items("versions an agent has dropped", dropped, MAX_HELD)
            }
            Self::Received { item, .. }
            | Self::Missing { item }
            | Self::Altered { item, .. }
            | Self::Scrubbed { item, .. } => check_item(item.model, item.version),
            Self::Unusable { reason, .. } | Self::ParentLost { reason, .. } => {
                text(reason, MAX_TEXT)
            }
            Self::Gone { .. } | Self::Withdraw { .. } | Self::Ping | Self::Goodbye => Ok(()),
        }
    }
}
