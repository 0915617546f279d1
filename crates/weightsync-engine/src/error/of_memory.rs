//! What shared memory says, in this crate's words.

use weightsync_core::ModelId;
use weightsync_mem::Error as Memory;

use super::{Error, MemoryError};

impl From<Memory> for Error {
    fn from(error: Memory) -> Self {
        match error {
            // It came from a source and only passed through the memory.
            Memory::Fill {
                tensor: name,
                source,
            } => Self::Extract { name, source },
            Memory::SenderDied { pid } => Self::SenderDied {
                // 0 stands for a process that is not known.
                pid: (pid != 0).then_some(pid),
            },
            Memory::SenderClosed => Self::SenderClosed,
            Memory::Interrupted => Self::Interrupted,
            Memory::NoSender { address, waited } => Self::NoSender {
                address,
                waited,
                last: None,
            },
            Memory::Denied { reason } => Self::Denied { reason },
            Memory::Fenced { seen, got } => Self::Fenced { seen, got },
            Memory::AddressInUse { address } => Self::AddressInUse { address },
            Memory::Forked { owner, child } => Self::Forked { owner, child },
            Memory::VersionNotNewer { newest, got } => Self::VersionNotNewer { newest, got },
            error => Self::Memory(MemoryError(error)),
        }
    }
}

impl Error {
    /// The error of a segment, with a model's name in place of its number.
    pub(crate) fn of_memory(error: Memory, id: impl Fn(usize) -> Option<ModelId>) -> Self {
        match error {
            Memory::AllSlotsPinned {
                model,
                slots,
                waited,
                holders,
            } if let Some(model) = id(model) => Self::AllSlotsPinned {
                model,
                slots,
                waited,
                holders,
            },
            Memory::SlotsExhausted { model, slots } if let Some(model) = id(model) => {
                Self::SlotsExhausted { model, slots }
            }
            Memory::Diverged { model, versions } if let Some(model) = id(model) => {
                Self::Diverged { model, versions }
            }
            Memory::NoSuchVersion {
                model,
                asked,
                known,
            } if let Some(model) = id(model) => Self::NoSuchVersion {
                model,
                asked,
                known,
            },
            error => error.into(),
        }
    }
}
