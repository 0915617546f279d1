//! Errors as processes tell them: what kind, and the words.

use serde::{Deserialize, Serialize};
use weightsync_engine::{Error, Remedy};

/// An error of a call in another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) text: String,
    /// Whether the same call may succeed later.
    pub(crate) retry: bool,
}

/// What kind it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    AddressInUse,
    BadInitInfo,
    EmptySet,
    EmptyUpdate,
    Extract,
    Load,
    MissingModels,
    MissingWorkers { joined: Vec<u32>, missing: Vec<u32> },
    NoInitialWeights,
    NoLoader,
    NoSender,
    NoSuchModel,
    NoSuchTensor,
    NoSuchVersion,
    NotRegistered,
    NotWhole,
    NothingToKeep,
    Refused(Vec<u32>),
    SendPending,
    SenderClosed,
    SenderDied(Option<u32>),
    SeveralModels,
    UnknownScheme,
    Unsupported,
    VersionNotNewer,
    WrongModel,
    WrongOrder,
    WrongWeights,
    Other,
}

impl Kind {
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::AddressInUse { .. } => Self::AddressInUse,
            Error::BadInitInfo(_) => Self::BadInitInfo,
            Error::EmptySet => Self::EmptySet,
            Error::EmptyUpdate { .. } => Self::EmptyUpdate,
            Error::Extract { .. } => Self::Extract,
            Error::Load { .. } => Self::Load,
            Error::MissingModels { .. } => Self::MissingModels,
            Error::MissingWorkers {
                joined, missing, ..
            } => Self::MissingWorkers {
                joined: joined.iter().map(|worker| worker.0).collect(),
                missing: missing.iter().map(|worker| worker.0).collect(),
            },
            Error::NoInitialWeights { .. } => Self::NoInitialWeights,
            Error::NoLoader { .. } => Self::NoLoader,
            Error::NoSender { .. } => Self::NoSender,
            Error::NoSuchModel { .. } => Self::NoSuchModel,
            Error::NoSuchTensor { .. } => Self::NoSuchTensor,
            Error::NoSuchVersion { .. } => Self::NoSuchVersion,
            Error::NotRegistered { .. } => Self::NotRegistered,
            Error::NotWhole { .. } => Self::NotWhole,
            Error::NothingToKeep { .. } => Self::NothingToKeep,
            Error::Refused { refusals, .. } => {
                Self::Refused(refusals.iter().map(|(worker, _)| worker.0).collect())
            }
            Error::SendPending { .. } => Self::SendPending,
            Error::SenderClosed => Self::SenderClosed,
            Error::SenderDied { pid } => Self::SenderDied(*pid),
            Error::SeveralModels { .. } => Self::SeveralModels,
            Error::UnknownScheme { .. } => Self::UnknownScheme,
            Error::Unsupported { .. } => Self::Unsupported,
            Error::VersionNotNewer { .. } => Self::VersionNotNewer,
            Error::WrongModel { .. } => Self::WrongModel,
            Error::WrongOrder { .. } => Self::WrongOrder,
            Error::WrongWeights { .. } => Self::WrongWeights,
            _ => Self::Other,
        }
    }
}

impl From<&Error> for Fault {
    fn from(error: &Error) -> Self {
        Self {
            kind: Kind::of(error),
            text: error.to_string(),
            retry: error.remedy() == Remedy::Retry,
        }
    }
}
