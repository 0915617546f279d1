//! Messages from a sender to an agent.

use serde::{Deserialize, Serialize};
use weightsync_core::{Epoch, Run, Version, WorkerId};
use weightsync_link::ControlMessage;
use weightsync_link::frame::FrameKind;
use weightsync_link::message::{Check, CheckText, Message, MessageError, within};
use weightsync_mem::WorkerInstance;

use super::super::image::MAX_MODELS;
use super::check::{check_item, check_model, check_set, check_version, require};
use super::model::ModelAssembler;
use super::{MAX_ADDRESS, MAX_KNOWN, MAX_NOTIFIED, MAX_PART, MAX_SLOTS, MAX_TEXT, fields};
use crate::agent::Item;

/// A message from a sender to an agent. The order of variants and fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromRoot {
    /// The sender accepts the agent.
    Welcome(Welcome),
    /// One model. The [`FromRoot::Part`]s with its layout and note follow: see [`model_messages`](super::model_messages)
    /// and [`ModelAssembler`].
    Model {
        /// The model's index.
        index: u8,
        /// Bytes of the encoded layout; at most [`MAX_LAYOUT`](super::MAX_LAYOUT).
        layout_bytes: u64,
        /// Bytes of the note, which follows the layout; at most [`MAX_NOTE`](super::MAX_NOTE).
        note_bytes: u64,
    },
    /// A part of the layout and note of the last [`FromRoot::Model`].
    Part {
        /// 1 to [`MAX_PART`] bytes.
        #[serde(with = "fields::bytes")]
        bytes: Vec<u8>,
    },
    /// The sender refuses the agent; nothing follows.
    Refused {
        /// The reason; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        reason: String,
        /// What the agent should do.
        remedy: RefusalRemedy,
    },
    /// The sender admits the worker of this [`ToRoot::Join`](super::ToRoot::Join).
    Joined {
        /// The ticket of the `Join`.
        ticket: u64,
    },
    /// The sender does not admit the worker of this [`ToRoot::Join`](super::ToRoot::Join).
    Denied {
        /// The ticket of the `Join`.
        ticket: u64,
        /// The reason; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        reason: String,
    },
    /// Notifies workers of this host of the set that they are to run.
    Notify {
        /// Numbers all notifications and answers of the sender.
        sequence: u64,
        /// The set: no model twice.
        set: Vec<Item>,
        /// The workers; at most [`MAX_NOTIFIED`].
        workers: Vec<WorkerId>,
    },
    /// The answer to a [`ToRoot::Ask`](super::ToRoot::Ask).
    Answer {
        /// The worker that asked.
        worker: WorkerId,
        /// The question's number.
        question: u64,
        /// Numbers all notifications and answers of the sender.
        sequence: u64,
        /// The set: no model twice.
        set: Vec<Item>,
    },
    /// There is no version that answers a [`ToRoot::Ask`](super::ToRoot::Ask).
    NoSuchVersion {
        /// The worker that asked.
        worker: WorkerId,
        /// The question's number.
        question: u64,
        /// The model that was asked about.
        model: u8,
        /// The version that was asked for; 0 for the newest.
        asked: Version,
        /// The newest versions that exist for this worker, newest first; at most [`MAX_KNOWN`].
        known: Vec<Version>,
    },
    /// The sender has turned a worker away: it gets no more sets.
    TurnAway {
        /// The worker.
        #[serde(with = "fields::WireInstance")]
        who: WorkerInstance,
        /// The reason; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        reason: String,
    },
    /// Assigns the agent a parent to fetch from.
    Parent {
        /// The parent's number; 0 for the sender itself.
        agent: u64,
        /// The parent's bulk listener as `host:port`, 1 to [`MAX_ADDRESS`] bytes; `None` for the
        /// sender's address.
        address: Option<String>,
    },
    /// A sign of life.
    Ping,
    /// The sender shuts down.
    Goodbye,
    /// Asks for the digest of a version that the agent holds: [`ToRoot::Scrubbed`](super::ToRoot::Scrubbed).
    Scrub {
        /// The version.
        item: Item,
    },
    /// The agent's bytes of a version differ from the published ones: it must not use them as a
    /// base or pass them on.
    Spoiled {
        /// The version.
        item: Item,
    },
}

/// What a sender tells an agent that it accepts. The order of fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The run of the sender.
    pub run: Run,
    /// The agent's number in this run, from 1.
    pub agent: u64,
    /// The sender's name for itself; 1 to [`MAX_ADDRESS`] bytes.
    pub address: String,
    /// How many models the sender has, 1 to [`MAX_MODELS`]; a [`FromRoot::Model`] follows for
    /// each.
    pub models: u8,
    /// How many slots each model has at first, from 1.
    pub slots: u8,
    /// How many slots a model may grow to, `slots` to [`MAX_SLOTS`].
    pub max_slots: u8,
    /// The sender's process.
    pub pid: u32,
    /// The settings of the sender's scheme, as in its text: `verify=blake3,deltas=always`. An agent
    /// keeps to them; at most [`MAX_TEXT`] bytes.
    pub settings: String,
}

/// What a refused agent should do. The order of variants and fields is part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalRemedy {
    /// The sender has shut down, or is about to.
    Gone,
    /// A newer sender has taken over.
    Fenced {
        /// The highest epoch the agent has seen.
        seen: Epoch,
        /// The epoch of this sender.
        got: Epoch,
    },
    /// See the reason.
    Other,
}

impl Message for FromRoot {
    const KIND: FrameKind = FrameKind::Control;
}

impl ControlMessage for FromRoot {
    fn ping() -> Self {
        Self::Ping
    }

    fn is_ping(&self) -> bool {
        matches!(self, Self::Ping)
    }
}

impl Check for FromRoot {
    fn check(&self, text: CheckText) -> Result<(), MessageError> {
        match self {
            Self::Welcome(Welcome {
                agent,
                address,
                models,
                slots,
                max_slots,
                settings,
                ..
            }) => {
                text(settings, MAX_TEXT)?;
                require(*agent != 0, "an agent from 1", || "0".into())?;
                check_address(address)?;
                require((1..=MAX_MODELS).contains(models), "1 to 64 models", || {
                    models.to_string()
                })?;
                let possible = 1 <= *slots && slots <= max_slots && *max_slots <= MAX_SLOTS;
                require(possible, "1 to 64 slots, and no fewer at most", || {
                    format!("{slots} slots, at most {max_slots}")
                })
            }
            Self::Model {
                index,
                layout_bytes,
                note_bytes,
            } => ModelAssembler::new(*index, *layout_bytes, *note_bytes).map(drop),
            Self::Part { bytes } => {
                require(!bytes.is_empty(), "at least one byte", || "none".into())?;
                within("bytes of a part", bytes.len(), MAX_PART)
            }
            Self::Notify { set, workers, .. } => {
                within("workers in one message", workers.len(), MAX_NOTIFIED)?;
                check_set(set)
            }
            Self::Answer { set, .. } => check_set(set),
            Self::NoSuchVersion { model, known, .. } => {
                check_model(*model)?;
                within("versions that there are", known.len(), MAX_KNOWN)?;
                known.iter().try_for_each(|version| check_version(*version))
            }
            Self::Scrub { item } | Self::Spoiled { item } => check_item(item.model, item.version),
            Self::Parent { address, .. } => address.as_deref().map_or(Ok(()), check_address),
            Self::Refused { reason, .. }
            | Self::Denied { reason, .. }
            | Self::TurnAway { reason, .. } => text(reason, MAX_TEXT),
            Self::Joined { .. } | Self::Ping | Self::Goodbye => Ok(()),
        }
    }
}

fn check_address(address: &str) -> Result<(), MessageError> {
    require(!address.is_empty(), "an address", || "none".into())?;
    within("bytes of an address", address.len(), MAX_ADDRESS)
}
