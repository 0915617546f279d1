//! Converts this crate's errors into those of the session above it.

use std::io;

use weightsync_engine::{Error, Remedy};
use weightsync_link::hello::HelloError;

/// Errors that only this crate has.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// The peer at the address failed the handshake.
    #[error("{address}: {source}")]
    Hello {
        /// The address.
        address: String,
        /// The cause.
        source: HelloError,
    },
    /// The sender refused this host.
    #[error("the sender at {address} refused this host: {reason}")]
    Denied {
        /// The sender's address.
        address: String,
        /// The sender's reason.
        reason: String,
    },
    /// The trainer did not let this worker of a collector in.
    #[error("the trainer at {address} did not let this worker in: {reason}")]
    NotAdmitted {
        /// The trainer's address.
        address: String,
        /// The trainer's reason.
        reason: String,
    },
    /// The sender sent an invalid message.
    #[error("invalid message from the sender at {address}: {reason}")]
    Broken {
        /// The sender's address.
        address: String,
        /// What is invalid.
        reason: String,
    },
    /// Another relay already serves this host: a host has one relay of each sender.
    #[error(
        "another relay of this host already serves the sender at {address}: stop one of the two"
    )]
    AnotherRelay {
        /// The sender's address.
        address: String,
    },
    /// A program accepted the connection and gave no answer.
    #[error(
        "{address} closed the link without an answer: it is a sender that is busy or about to end, \
         or the port of a relay"
    )]
    NoAnswer {
        /// The address.
        address: String,
    },
    /// The sender has no port at which it could be asked: it is of another scheme.
    #[error("the sender cannot be asked over the network: {instead}")]
    NotAsked {
        /// Its scheme, and what to ask in place of it.
        instead: String,
    },
    /// The worker's relay has gone, and there is no other route.
    #[error(
        "this worker's relay is gone, and there is no other route to the sender ({reason}): start \
         a relay on this host again, or connect again from the init info"
    )]
    NoRoute {
        /// What prevents it.
        reason: String,
    },
    /// Nothing answers at the address.
    #[error(
        "no answer from {address}: {reason}; check that the sender runs there, and that a firewall \
         lets this port through"
    )]
    Unreachable {
        /// The address.
        address: String,
        /// The error of the last attempt.
        reason: String,
    },
}

impl NetError {
    /// What to do.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Hello { source, .. } => source.remedy(),
            Self::NoAnswer { .. } | Self::Unreachable { .. } => Remedy::Retry,
            Self::Broken { .. } | Self::NoRoute { .. } => Remedy::Reconnect,
            _ => Remedy::GiveUp,
        }
    }
}

impl From<NetError> for Error {
    fn from(error: NetError) -> Self {
        Self::Transport {
            remedy: error.remedy(),
            source: error.into(),
        }
    }
}

/// An error that the caller has to fix.
pub(crate) fn transport(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Transport {
        source: error.into(),
        remedy: Remedy::GiveUp,
    }
}

pub(crate) fn os(action: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Os { action, source }
}
