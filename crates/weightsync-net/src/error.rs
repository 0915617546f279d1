//! Converts this crate's errors into those of the session above it.

use std::io;
use std::net::SocketAddr;

use weightsync_engine::{Error, Remedy};

/// Errors that only this crate has.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// The sender cannot listen at the address.
    #[error(
        "cannot listen at {address}: {source}; choose an address of this machine, and a port that \
         this user may open"
    )]
    Listen {
        /// The configured address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The sender does not know an address at which other hosts reach it.
    #[error(
        "other hosts cannot connect to {address}: name an address that they can reach with \
         `advertise=HOST:PORT`: {source}"
    )]
    Advertise {
        /// The listening address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A name that does not resolve to an address.
    #[error("{name:?} is not an address to listen at or connect to: {source}")]
    Resolve {
        /// The name, with its port.
        name: String,
        /// The resolver's error.
        source: std::io::Error,
    },
    /// The peer at the address failed the handshake.
    #[error("{address}: {source}")]
    Hello {
        /// The address.
        address: String,
        /// The cause.
        source: crate::wire::hello::HelloError,
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

/// Why nothing can listen at an address.
#[doc(hidden)]
pub fn listen_error(address: SocketAddr, source: io::Error) -> Error {
    let address = address.to_string();
    match source.kind() {
        io::ErrorKind::AddrInUse => Error::AddressInUse { address },
        _ => NetError::Listen { address, source }.into(),
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
