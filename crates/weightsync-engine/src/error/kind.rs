//! What an error is about, and what to do about it.

use weightsync_core::Remedy;
use weightsync_mem::Error as Memory;

use super::{Error, MemoryError};
use crate::mapping::MappingError;

/// What an [`Error`] is about. Python has an exception class for each.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A worker, the sender, a slot or a file was not ready by the deadline.
    Deadline,
    /// The other end died, refuses this one, or does not follow the protocol.
    Peer,
    /// The sender has shut down in order: the usual end of a worker's loop.
    SenderClosed,
    /// The weights do not fit the model.
    WrongWeights,
    /// A value of a type that cannot be used here.
    WrongType,
    /// The worker's model failed while it loaded.
    Load,
    /// There is no such model or version, or the call does not say which model.
    Model,
    /// A snapshot has no tensor of that name.
    MissingTensor,
    /// A send that cannot be made as it was asked for. Nothing was sent.
    Send,
    /// Not every worker has applied what was sent.
    NotApplied,
    /// A call that does not fit the state its end is in.
    Lifecycle,
    /// The scheme cannot do this.
    Unsupported,
    /// A setting, a scheme or an init info that cannot be used.
    Setting,
    /// Bytes that are not what was sent.
    Corrupt,
    /// The operating system refused something: a file, memory, an address.
    OperatingSystem,
    /// Anything else.
    Other,
}

impl Error {
    /// What the error is about.
    // Longer than a screen: a table that names each error once, under its kind.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::MissingWorkers { .. }
            | Self::NoInitialWeights { .. }
            | Self::NoSender { .. }
            | Self::AllSlotsPinned { .. }
            | Self::FileLocked { .. }
            | Self::GuardsInUse { .. }
            | Self::Memory(MemoryError(Memory::AllRecordsHeld { .. })) => ErrorKind::Deadline,
            Self::SenderDied { .. }
            | Self::Withdrawn { .. }
            | Self::ConflictingRun { .. }
            | Self::Denied { .. }
            | Self::Fenced { .. }
            | Self::Memory(MemoryError(Memory::GivenUp { .. } | Memory::Protocol { .. })) => {
                ErrorKind::Peer
            }
            Self::SenderClosed => ErrorKind::SenderClosed,
            Self::WrongWeights { .. }
            | Self::WrongModel { .. }
            | Self::Refused { .. }
            | Self::WrongDtype { .. }
            | Self::WrongLength { .. }
            | Self::Extract { .. }
            | Self::NoSuchTensor { .. }
            | Self::Attributes(_)
            | Self::Layout(_) => ErrorKind::WrongWeights,
            // A mapping that does not fit says which names do not.
            Self::Load { source, .. } if source.is::<MappingError>() => ErrorKind::WrongWeights,
            Self::Load { .. } | Self::NotWhole { .. } | Self::Panicked { .. } => ErrorKind::Load,
            Self::NoSuchModel { .. }
            | Self::SeveralModels { .. }
            | Self::MixedSenders { .. }
            | Self::OtherModel { .. }
            | Self::SameModelTwice { .. }
            | Self::EmptySet
            | Self::MissingModels { .. }
            | Self::NotRegistered { .. }
            | Self::NoLoader { .. }
            | Self::NoSuchVersion { .. }
            | Self::Path(_) => ErrorKind::Model,
            Self::WholeLoan { .. }
            | Self::SameWorkerTwice { .. }
            | Self::EmptyUpdate { .. }
            | Self::NothingToKeep { .. }
            | Self::SlotsExhausted { .. }
            | Self::Diverged { .. }
            | Self::VersionNotNewer { .. }
            | Self::SameVersionTwice { .. }
            | Self::SendPending { .. } => ErrorKind::Send,
            Self::NotApplied { .. } => ErrorKind::NotApplied,
            Self::WrongOrder { .. } | Self::GuardHeld { .. } | Self::Forked { .. } => {
                ErrorKind::Lifecycle
            }
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::UnknownScheme { .. }
            | Self::BadSetting { .. }
            | Self::BadInitInfo(_)
            | Self::Memory(MemoryError(Memory::BadOption { .. })) => ErrorKind::Setting,
            Self::WrongImage { .. }
            | Self::Memory(MemoryError(
                Memory::CorruptSet { .. }
                | Memory::CorruptCommit { .. }
                | Memory::ChecksumMismatch { .. },
            )) => ErrorKind::Corrupt,
            Self::File { .. }
            | Self::Os { .. }
            | Self::AddressInUse { .. }
            | Self::Memory(MemoryError(
                Memory::Os { .. } | Memory::NoMemory { .. } | Memory::TooManyFiles { .. },
            )) => ErrorKind::OperatingSystem,
            _ => ErrorKind::Other,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::MissingWorkers { .. }
            | Self::NotApplied { .. }
            | Self::NoInitialWeights { .. }
            | Self::NoSender { .. }
            | Self::SendPending { .. }
            | Self::NotWhole { .. }
            | Self::AllSlotsPinned { .. }
            | Self::FileLocked { .. }
            | Self::GuardsInUse { .. }
            | Self::Interrupted
            | Self::Memory(MemoryError(Memory::AllRecordsHeld { .. })) => Remedy::Retry,
            // The one that answered is not the one to listen to, or has no room
            // now: its successor may.
            Self::ConflictingRun { .. } | Self::Fenced { .. } | Self::Denied { .. } => {
                Remedy::Retry
            }
            // The next version is not damaged by this one.
            Self::Memory(MemoryError(Memory::CorruptSet { .. } | Memory::CorruptCommit { .. })) => {
                Remedy::Retry
            }
            // An end that has come to these keeps saying so.
            Self::SenderDied { .. }
            | Self::SenderClosed
            | Self::Withdrawn { .. }
            | Self::Forked { .. }
            | Self::Memory(MemoryError(
                Memory::Protocol { .. } | Memory::Os { .. } | Memory::GivenUp { .. },
            )) => Remedy::Reconnect,
            Self::Transport { remedy, .. } => *remedy,
            _ => Remedy::GiveUp,
        }
    }
}
