//! [`FromRoot`] on the wire.

use serde::{Deserialize, Serialize};
use weightsync_core::{Epoch, Version, WorkerId};

use super::*;

/// The wire form. The order of the variants is part of the format.
#[derive(Serialize, Deserialize)]
enum Wire<'a> {
    Welcome {
        run: WireRun,
        agent: u64,
        address: &'a str,
        models: u8,
        slots: u8,
        max_slots: u8,
        pid: u32,
    },
    Model {
        index: u8,
        layout_bytes: u64,
        note_bytes: u64,
    },
    Part {
        bytes: &'a [u8],
    },
    Refused {
        reason: &'a str,
        remedy: WireRemedy,
    },
    Joined {
        ticket: u64,
    },
    Denied {
        ticket: u64,
        reason: &'a str,
    },
    Notify {
        sequence: u64,
        set: Vec<WireItem>,
        workers: Vec<u32>,
    },
    Answer {
        worker: u32,
        question: u64,
        sequence: u64,
        set: Vec<WireItem>,
    },
    NoSuchVersion {
        worker: u32,
        question: u64,
        model: u8,
        asked: u64,
        known: Vec<u64>,
    },
    TurnAway {
        worker: u32,
        instance: u64,
        reason: &'a str,
    },
    Parent {
        agent: u64,
        #[serde(borrow)]
        address: Option<&'a str>,
    },
    Ping,
    Goodbye,
    Scrub {
        model: u8,
        version: u64,
    },
    Spoiled {
        model: u8,
        version: u64,
    },
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum WireRemedy {
    Gone,
    Fenced { seen: u64, got: u64 },
    Other,
}

impl Message for FromRoot {
    const KIND: Kind = Kind::Control;

    fn encode(&self) -> Result<Vec<u8>, MessageError> {
        self.check()?;
        to_payload(&self.to_wire())
    }

    fn decode(payload: &[u8]) -> Result<Self, MessageError> {
        let message = Self::from_wire(from_payload(payload)?)?;
        message.check()?;
        Ok(message)
    }
}

impl FromRoot {
    fn to_wire(&self) -> Wire<'_> {
        match *self {
            Self::Welcome {
                run,
                agent,
                ref address,
                models,
                slots,
                max_slots,
                pid,
            } => Wire::Welcome {
                run: run_to_wire(run),
                agent,
                address,
                models,
                slots,
                max_slots,
                pid,
            },
            Self::Model {
                index,
                layout_bytes,
                note_bytes,
            } => Wire::Model {
                index,
                layout_bytes,
                note_bytes,
            },
            Self::Part { ref bytes } => Wire::Part { bytes },
            Self::Refused { ref reason, remedy } => Wire::Refused {
                reason: cut(reason, MAX_TEXT),
                remedy: remedy.into(),
            },
            Self::Joined { ticket } => Wire::Joined { ticket },
            Self::Denied { ticket, ref reason } => Wire::Denied {
                ticket,
                reason: cut(reason, MAX_TEXT),
            },
            Self::Notify {
                sequence,
                ref set,
                ref workers,
            } => Wire::Notify {
                sequence,
                set: items_to_wire(set),
                workers: workers.iter().map(|worker| worker.0).collect(),
            },
            Self::Answer {
                worker,
                question,
                sequence,
                ref set,
            } => Wire::Answer {
                worker: worker.0,
                question,
                sequence,
                set: items_to_wire(set),
            },
            Self::NoSuchVersion {
                worker,
                question,
                model,
                asked,
                ref known,
            } => Wire::NoSuchVersion {
                worker: worker.0,
                question,
                model,
                asked: asked.0,
                known: known.iter().map(|version| version.0).collect(),
            },
            Self::TurnAway {
                worker,
                instance,
                ref reason,
            } => Wire::TurnAway {
                worker: worker.0,
                instance,
                reason: cut(reason, MAX_TEXT),
            },
            Self::Parent { agent, ref address } => Wire::Parent {
                agent,
                address: address.as_deref(),
            },
            Self::Ping => Wire::Ping,
            Self::Goodbye => Wire::Goodbye,
            Self::Scrub { model, version } => Wire::Scrub {
                model,
                version: version.0,
            },
            Self::Spoiled { model, version } => Wire::Spoiled {
                model,
                version: version.0,
            },
        }
    }

    fn from_wire(wire: Wire<'_>) -> Result<Self, MessageError> {
        Ok(match wire {
            Wire::Welcome {
                run,
                agent,
                address,
                models,
                slots,
                max_slots,
                pid,
            } => Self::Welcome {
                run: run_from_wire(run),
                agent,
                address: text(address, MAX_ADDRESS)?,
                models,
                slots,
                max_slots,
                pid,
            },
            Wire::Model {
                index,
                layout_bytes,
                note_bytes,
            } => Self::Model {
                index,
                layout_bytes,
                note_bytes,
            },
            Wire::Part { bytes } => Self::Part {
                bytes: bytes.into(),
            },
            Wire::Refused { reason, remedy } => Self::Refused {
                reason: text(reason, MAX_TEXT)?,
                remedy: remedy.into(),
            },
            Wire::Joined { ticket } => Self::Joined { ticket },
            Wire::Denied { ticket, reason } => Self::Denied {
                ticket,
                reason: text(reason, MAX_TEXT)?,
            },
            Wire::Notify {
                sequence,
                set,
                workers,
            } => Self::Notify {
                sequence,
                set: items_from_wire(set),
                workers: workers.into_iter().map(WorkerId).collect(),
            },
            Wire::Answer {
                worker,
                question,
                sequence,
                set,
            } => Self::Answer {
                worker: WorkerId(worker),
                question,
                sequence,
                set: items_from_wire(set),
            },
            Wire::NoSuchVersion {
                worker,
                question,
                model,
                asked,
                known,
            } => Self::NoSuchVersion {
                worker: WorkerId(worker),
                question,
                model,
                asked: Version(asked),
                known: known.into_iter().map(Version).collect(),
            },
            Wire::TurnAway {
                worker,
                instance,
                reason,
            } => Self::TurnAway {
                worker: WorkerId(worker),
                instance,
                reason: text(reason, MAX_TEXT)?,
            },
            Wire::Parent { agent, address } => Self::Parent {
                agent,
                address: address
                    .map(|address| text(address, MAX_ADDRESS))
                    .transpose()?,
            },
            Wire::Ping => Self::Ping,
            Wire::Goodbye => Self::Goodbye,
            Wire::Scrub { model, version } => Self::Scrub {
                model,
                version: Version(version),
            },
            Wire::Spoiled { model, version } => Self::Spoiled {
                model,
                version: Version(version),
            },
        })
    }
}

impl From<RefusalRemedy> for WireRemedy {
    fn from(remedy: RefusalRemedy) -> Self {
        match remedy {
            RefusalRemedy::Gone => Self::Gone,
            RefusalRemedy::Fenced { seen, got } => Self::Fenced {
                seen: seen.0,
                got: got.0,
            },
            RefusalRemedy::Other => Self::Other,
        }
    }
}

impl From<WireRemedy> for RefusalRemedy {
    fn from(remedy: WireRemedy) -> Self {
        match remedy {
            WireRemedy::Gone => Self::Gone,
            WireRemedy::Fenced { seen, got } => Self::Fenced {
                seen: Epoch(seen),
                got: Epoch(got),
            },
            WireRemedy::Other => Self::Other,
        }
    }
}
