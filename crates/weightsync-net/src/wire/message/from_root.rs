//! Messages from a sender to an agent.

mod wire;

use weightsync_core::{Epoch, Run, Version, WorkerId};

use super::*;

/// What a sender says to an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromRoot {
    /// The agent is in.
    Welcome {
        /// The run of the sender.
        run: Run,
        /// The agent's number in it, from 1.
        agent: u64,
        /// What the sender calls itself; 1 to [`MAX_ADDRESS`] bytes.
        address: String,
        /// How many models it has, 1 to [`MAX_MODELS`]; a [`FromRoot::Model`] follows for each.
        models: u8,
        /// How many slots each has to begin with, from 1.
        slots: u8,
        /// How many it may grow to, `slots` to [`MAX_SLOTS`].
        max_slots: u8,
        /// The sender's process.
        pid: u32,
    },
    /// One of the models. As many [`FromRoot::Part`]s follow as its layout and note take: see
    /// [`model_messages`] and [`ModelAssembler`].
    Model {
        /// Its index.
        index: u8,
        /// Bytes of the encoded layout; at most [`MAX_LAYOUT`].
        layout_bytes: u64,
        /// Bytes of the note behind it; at most [`MAX_NOTE`].
        note_bytes: u64,
    },
    /// A piece of the layout and note of the model named last.
    Part {
        /// 1 to [`MAX_PART`] bytes.
        bytes: Vec<u8>,
    },
    /// The agent is turned away; nothing follows.
    Refused {
        /// Why; cut to [`MAX_TEXT`].
        reason: String,
        /// What it is to make of that.
        remedy: RefusalRemedy,
    },
    /// The worker of this [`ToRoot::Join`] is in.
    Joined {
        /// The question's number.
        ticket: u64,
    },
    /// The worker of this [`ToRoot::Join`] is not let in.
    Denied {
        /// The question's number.
        ticket: u64,
        /// Why; cut to [`MAX_TEXT`].
        reason: String,
    },
    /// Workers of this host are to run a set.
    Tell {
        /// Counts what the sender tells.
        sequence: u64,
        /// The set: no model twice.
        set: Vec<Item>,
        /// Which workers; at most [`MAX_TOLD`].
        workers: Vec<WorkerId>,
    },
    /// The answer to a [`ToRoot::Ask`].
    Answer {
        /// Who asked.
        worker: WorkerId,
        /// The question's number.
        question: u64,
        /// Counts what the sender tells.
        sequence: u64,
        /// The set: no model twice.
        set: Vec<Item>,
    },
    /// The answer to a [`ToRoot::Ask`] that cannot be met.
    NoSuchVersion {
        /// Who asked.
        worker: WorkerId,
        /// The question's number.
        question: u64,
        /// The model asked about.
        model: u8,
        /// The version asked for; 0 if it was the newest.
        asked: Version,
        /// The newest versions that there are for this worker, newest first; at most
        /// [`MAX_KNOWN`].
        known: Vec<Version>,
    },
    /// A worker gets nothing more.
    TurnAway {
        /// Who.
        worker: WorkerId,
        /// Which life of it.
        instance: u64,
        /// Why; cut to [`MAX_TEXT`].
        reason: String,
    },
    /// From whom the agent is to fetch from now on.
    Parent {
        /// Which agent; 0 for the sender itself.
        agent: u64,
        /// Where it listens, as `host:port`, 1 to [`MAX_ADDRESS`] bytes; `None` for where the
        /// sender does.
        address: Option<String>,
    },
    /// It is there.
    Ping,
    /// It goes, in order.
    Goodbye,
    /// It is to make the digest of a version that it has: [`ToRoot::Scrubbed`].
    Scrub {
        /// Of which model.
        model: u8,
        /// The version.
        version: Version,
    },
    /// What it has of a version is not what was published: it is to make nothing from that, and
    /// to pass nothing of it on.
    Spoiled {
        /// Of which model.
        model: u8,
        /// The version.
        version: Version,
    },
}

/// What an agent that was turned away is to make of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// What the reason says.
    Other,
}

impl FromRoot {
    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Welcome {
                agent,
                address,
                models,
                slots,
                max_slots,
                ..
            } => {
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
            } => {
                check_model(*index)?;
                let model = [
                    ("bytes of a layout", *layout_bytes, MAX_LAYOUT),
                    ("bytes of a note", *note_bytes, MAX_NOTE),
                ];
                model
                    .into_iter()
                    .try_for_each(|(what, got, limit)| match got <= limit {
                        true => Ok(()),
                        false => Err(MessageError::TooLong { what, got, limit }),
                    })
            }
            Self::Part { bytes } => {
                require(!bytes.is_empty(), "at least one byte", || "none".into())?;
                within("bytes of a part", bytes.len(), MAX_PART)
            }
            Self::Tell { set, workers, .. } => {
                within("workers in one message", workers.len(), MAX_TOLD)?;
                check_set(set)
            }
            Self::Answer { set, .. } => check_set(set),
            Self::NoSuchVersion { model, known, .. } => {
                check_model(*model)?;
                within("versions that there are", known.len(), MAX_KNOWN)?;
                known.iter().try_for_each(|version| check_version(*version))
            }
            &Self::Scrub { model, version } | &Self::Spoiled { model, version } => {
                check_item(model, version)
            }
            Self::Parent { address, .. } => address.as_deref().map_or(Ok(()), check_address),
            Self::Refused { .. }
            | Self::Joined { .. }
            | Self::Denied { .. }
            | Self::TurnAway { .. }
            | Self::Ping
            | Self::Goodbye => Ok(()),
        }
    }
}

fn check_address(address: &str) -> Result<(), MessageError> {
    require(!address.is_empty(), "an address", || "none".into())?;
    within("bytes of an address", address.len(), MAX_ADDRESS)
}
