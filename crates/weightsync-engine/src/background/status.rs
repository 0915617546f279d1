//! Where a background receiver stands.

use std::fmt;

use weightsync_core::{ModelId, Run, Version};

use crate::error::Result;
use crate::receiver::Receiver;
use crate::report::only_version;

/// What a background receiver does.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackgroundState {
    /// The receiver waits for weights, or applies them.
    Following,
    /// The sender has died, and its successor is looked for. The models serve on. If a sender answers
    /// that cannot be followed, the [failure](BackgroundStatus::failure) says why. The log says why
    /// none is reached, if that is known.
    Searching,
    /// The sender has shut down. The models serve on. The successor of a sender with a run directory
    /// is looked for as [after a death](Self::Searching), and followed once it is there.
    Closed,
    /// The sender has died, and will not come back. The models serve on.
    Died {
        /// Its process, if it is known.
        pid: Option<u32>,
    },
    /// Receiving has failed; the sender was told, and sends nothing more to this
    /// end. The models serve on.
    Failed {
        /// Why.
        reason: String,
    },
}

impl fmt::Display for BackgroundState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Following => f.write_str("it follows its sender"),
            Self::Searching => f.write_str("the sender has died, and its successor is looked for"),
            Self::Closed => f.write_str("the sender has shut down"),
            Self::Died { pid: Some(pid) } => write!(f, "the sender (pid {pid}) has died"),
            Self::Died { pid: None } => f.write_str("the sender has died"),
            Self::Failed { reason } => write!(f, "receiving has failed: {reason}"),
        }
    }
}

/// Where a background receiver stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackgroundStatus {
    /// What the background receiver does.
    pub state: BackgroundState,
    /// The versions that this worker runs.
    pub versions: Vec<(ModelId, Version)>,
    /// The run of these versions.
    pub run: Run,
    /// The set that waits for a safe point; empty if there is none.
    pub staged: Vec<(ModelId, Version)>,
    /// Why the newest version could not be applied, or why a sender that answers cannot be followed.
    pub failure: Option<String>,
}

impl BackgroundStatus {
    pub(super) fn of(receiver: &Receiver) -> Self {
        Self {
            state: BackgroundState::Following,
            versions: receiver.versions().to_vec(),
            run: receiver.run(),
            staged: Vec::new(),
            failure: None,
        }
    }

    /// Takes over what the receiver says this worker runs.
    pub(crate) fn reflect(&mut self, receiver: &Receiver) {
        self.versions = receiver.versions().to_vec();
        self.run = receiver.run();
    }

    /// The version this worker runs; `Version::NONE` before the first.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`](crate::Error::SeveralModels).
    pub fn version(&self) -> Result<Version> {
        only_version(&self.versions)
    }
}
