//! [`ToRoot`] on the wire.

use serde::{Deserialize, Serialize};
use weightsync_core::{Epoch, Version, WorkerId};

use super::*;

/// The wire form. The order of the variants is part of the format.
#[derive(Serialize, Deserialize)]
enum Wire<'a> {
    Agent {
        name: &'a str,
        host: [u8; 16],
        pid: u32,
        bulk: Option<u16>,
        seen: u64,
        holds: Vec<WireItem>,
        run: Option<WireRun>,
    },
    Join {
        ticket: u64,
        worker: u32,
        instance: u64,
        pid: u32,
        models: u64,
        delivery: WireDelivery,
        device: &'a str,
        seen: u64,
    },
    Progress {
        #[serde(borrow)]
        workers: Vec<WireProgress<'a>>,
    },
    Gone {
        worker: u32,
        instance: u64,
        died: bool,
    },
    Unusable {
        worker: u32,
        instance: u64,
        reason: &'a str,
    },
    Ask {
        worker: u32,
        instance: u64,
        question: u64,
        want: WireWant,
    },
    Withdraw {
        worker: u32,
        instance: u64,
    },
    Holds {
        have: Vec<WireItem>,
        dropped: Vec<WireItem>,
    },
    Received {
        model: u8,
        version: u64,
        parent: u64,
        bytes: u64,
        micros: u64,
    },
    ParentLost {
        parent: u64,
        reason: &'a str,
    },
    Missing {
        model: u8,
        version: u64,
    },
    Ping,
    Goodbye,
    Scrubbed {
        model: u8,
        version: u64,
        digest: Option<[u8; 16]>,
    },
}

#[derive(Serialize, Deserialize)]
struct WireProgress<'a> {
    worker: u32,
    instance: u64,
    taken: u64,
    through: u64,
    loaded: u64,
    versions: Vec<WireItem>,
    #[serde(borrow)]
    refused: Option<(u64, &'a str)>,
}

impl Message for ToRoot {
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

impl ToRoot {
    fn to_wire(&self) -> Wire<'_> {
        match *self {
            Self::Agent {
                ref name,
                host,
                pid,
                bulk,
                seen,
                ref holds,
                run,
            } => Wire::Agent {
                name: cut(name, MAX_TEXT),
                host,
                pid,
                bulk,
                seen: seen.0,
                holds: items_to_wire(holds),
                run: run.map(run_to_wire),
            },
            Self::Join {
                ticket,
                worker,
                instance,
                pid,
                models,
                delivery,
                ref device,
                seen,
            } => Wire::Join {
                ticket,
                worker: worker.0,
                instance,
                pid,
                models,
                delivery: delivery.into(),
                device: cut(device, MAX_DEVICE),
                seen: seen.0,
            },
            Self::Progress { ref workers } => Wire::Progress {
                workers: workers.iter().map(WorkerProgress::to_wire).collect(),
            },
            Self::Gone {
                worker,
                instance,
                died,
            } => Wire::Gone {
                worker: worker.0,
                instance,
                died,
            },
            Self::Unusable {
                worker,
                instance,
                ref reason,
            } => Wire::Unusable {
                worker: worker.0,
                instance,
                reason: cut(reason, MAX_TEXT),
            },
            Self::Ask {
                worker,
                instance,
                question,
                want,
            } => Wire::Ask {
                worker: worker.0,
                instance,
                question,
                want: want.into(),
            },
            Self::Withdraw { worker, instance } => Wire::Withdraw {
                worker: worker.0,
                instance,
            },
            Self::Holds {
                ref have,
                ref dropped,
            } => Wire::Holds {
                have: items_to_wire(have),
                dropped: items_to_wire(dropped),
            },
            Self::Received {
                model,
                version,
                parent,
                bytes,
                micros,
            } => Wire::Received {
                model,
                version: version.0,
                parent,
                bytes,
                micros,
            },
            Self::ParentLost { parent, ref reason } => Wire::ParentLost {
                parent,
                reason: cut(reason, MAX_TEXT),
            },
            Self::Missing { model, version } => Wire::Missing {
                model,
                version: version.0,
            },
            Self::Ping => Wire::Ping,
            Self::Goodbye => Wire::Goodbye,
            Self::Scrubbed {
                model,
                version,
                digest,
            } => Wire::Scrubbed {
                model,
                version: version.0,
                digest: digest.map(|digest| digest.0),
            },
        }
    }

    fn from_wire(wire: Wire<'_>) -> Result<Self, MessageError> {
        Ok(match wire {
            Wire::Agent {
                name,
                host,
                pid,
                bulk,
                seen,
                holds,
                run,
            } => Self::Agent {
                name: text(name, MAX_TEXT)?,
                host,
                pid,
                bulk,
                seen: Epoch(seen),
                holds: items_from_wire(holds),
                run: run.map(run_from_wire),
            },
            Wire::Join {
                ticket,
                worker,
                instance,
                pid,
                models,
                delivery,
                device,
                seen,
            } => Self::Join {
                ticket,
                worker: WorkerId(worker),
                instance,
                pid,
                models,
                delivery: delivery.into(),
                device: text(device, MAX_DEVICE)?,
                seen: Epoch(seen),
            },
            Wire::Progress { workers } => Self::Progress {
                workers: workers
                    .into_iter()
                    .map(WorkerProgress::from_wire)
                    .collect::<Result<_, _>>()?,
            },
            Wire::Gone {
                worker,
                instance,
                died,
            } => Self::Gone {
                worker: WorkerId(worker),
                instance,
                died,
            },
            Wire::Unusable {
                worker,
                instance,
                reason,
            } => Self::Unusable {
                worker: WorkerId(worker),
                instance,
                reason: text(reason, MAX_TEXT)?,
            },
            Wire::Ask {
                worker,
                instance,
                question,
                want,
            } => Self::Ask {
                worker: WorkerId(worker),
                instance,
                question,
                want: want.into(),
            },
            Wire::Withdraw { worker, instance } => Self::Withdraw {
                worker: WorkerId(worker),
                instance,
            },
            Wire::Holds { have, dropped } => Self::Holds {
                have: items_from_wire(have),
                dropped: items_from_wire(dropped),
            },
            Wire::Received {
                model,
                version,
                parent,
                bytes,
                micros,
            } => Self::Received {
                model,
                version: Version(version),
                parent,
                bytes,
                micros,
            },
            Wire::ParentLost { parent, reason } => Self::ParentLost {
                parent,
                reason: text(reason, MAX_TEXT)?,
            },
            Wire::Missing { model, version } => Self::Missing {
                model,
                version: Version(version),
            },
            Wire::Ping => Self::Ping,
            Wire::Goodbye => Self::Goodbye,
            Wire::Scrubbed {
                model,
                version,
                digest,
            } => Self::Scrubbed {
                model,
                version: Version(version),
                digest: digest.map(Digest),
            },
        })
    }
}

impl WorkerProgress {
    fn to_wire(&self) -> WireProgress<'_> {
        let refused = self.refused.as_ref();
        WireProgress {
            worker: self.worker.0,
            instance: self.instance,
            taken: self.taken,
            through: self.through,
            loaded: self.loaded,
            versions: items_to_wire(&self.versions),
            refused: refused.map(|(sequence, reason)| (*sequence, cut(reason, MAX_TEXT))),
        }
    }

    fn from_wire(wire: WireProgress<'_>) -> Result<Self, MessageError> {
        let refused = wire
            .refused
            .map(|(sequence, reason)| Ok((sequence, text(reason, MAX_TEXT)?)))
            .transpose()?;
        Ok(Self {
            worker: WorkerId(wire.worker),
            instance: wire.instance,
            taken: wire.taken,
            through: wire.through,
            loaded: wire.loaded,
            versions: items_from_wire(wire.versions),
            refused,
        })
    }
}
