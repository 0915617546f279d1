//! The errors of synchronizers.

use weightsync_engine::{Error, ErrorKind, Remedy, Version};
use weightsync_link::access::AccessError;

/// What parties of a synchronizer are told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyncError {
    /// The synchronizer does not answer.
    #[error("the synchronizer is away: {why}; start it, or check its address")]
    Away {
        /// What was tried last.
        why: String,
    },
    /// Another party has this one's place.
    #[error("{reason}")]
    Replaced {
        /// Which.
        reason: String,
    },
    /// The synchronizer refuses a request.
    #[error("the synchronizer refuses it: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// It answered something else than what was asked.
    #[error(
        "the synchronizer's answer does not fit the request: install the same weightsync on both ends"
    )]
    Protocol,
    /// A version did not come in time.
    #[error("{version} did not come in time; sync again after the next step")]
    TooLate {
        /// Which.
        version: Version,
    },
    /// The synchronizer does not have a version that was published.
    #[error("the synchronizer does not have {version}: {why}")]
    NotPublished {
        /// Which.
        version: Version,
        /// Why not.
        why: String,
    },
    /// The address may not be used.
    #[error("{0}")]
    Access(#[from] AccessError),
    /// The service could not be started.
    #[error("the synchronizer cannot {what}: {source}")]
    Start {
        /// What it was about to do.
        what: String,
        /// Why not.
        source: std::io::Error,
    },
}

impl SyncError {
    /// What the error is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Away { .. } | Self::Replaced { .. } | Self::Refused { .. } | Self::Protocol => {
                ErrorKind::Peer
            }
            Self::TooLate { .. } => ErrorKind::Deadline,
            Self::NotPublished { .. } => ErrorKind::Send,
            Self::Access(_) => ErrorKind::Setting,
            Self::Start { .. } => ErrorKind::OperatingSystem,
        }
    }
}

impl From<SyncError> for Error {
    fn from(error: SyncError) -> Self {
        let remedy = match error {
            SyncError::Away { .. } | SyncError::TooLate { .. } | SyncError::Start { .. } => {
                Remedy::Retry
            }
            SyncError::NotPublished { .. } => Remedy::Retry,
            SyncError::Replaced { .. }
            | SyncError::Refused { .. }
            | SyncError::Protocol
            | SyncError::Access(_) => Remedy::GiveUp,
        };
        Self::Transport {
            source: error.into(),
            remedy,
        }
    }
}
