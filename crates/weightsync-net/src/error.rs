//! Converts this crate's errors into those of the session above it.

use std::io;
use std::net::SocketAddr;

use weightsync_engine::{Error, Remedy};

/// What goes wrong in this crate and is nobody else's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// A listening address cannot be had.
    #[error(
        "cannot listen at {address}: {source}; choose an address of this machine, and a port that \
         this user may open"
    )]
    Listen {
        /// The address asked for.
        address: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// An address that workers of other hosts could use is not known.
    #[error(
        "other hosts cannot connect to {address}: name an address that they can reach with \
         `advertise=HOST:PORT`: {source}"
    )]
    Advertise {
        /// What is listened on.
        address: String,
        /// Why there is no way to others.
        source: std::io::Error,
    },
    /// A name is no address.
    #[error("{name:?} is not an address to listen at or connect to: {source}")]
    Resolve {
        /// The name, with its port.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// The sender, or what answers there, is not one to talk to.
    #[error("{address}: {source}")]
    Hello {
        /// Where.
        address: String,
        /// What is wrong.
        source: crate::wire::hello::HelloError,
    },
    /// The sender refused this host.
    #[error("the sender at {address} refused this host: {reason}")]
    Denied {
        /// Where.
        address: String,
        /// Its words.
        reason: String,
    },
    /// The sender sent an invalid message.
    #[error("invalid message from the sender at {address}: {reason}")]
    Broken {
        /// Where.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// A host has one relay of a sender.
    #[error("another relay of this host carries what the sender at {address} sends")]
    AnotherRelay {
        /// Where the sender is.
        address: String,
    },
    /// Something is there, and it does not answer what was asked.
    #[error(
        "{address} closed the link without an answer: it is a sender that is busy or about to end, \
         or the port of a relay"
    )]
    NoAnswer {
        /// Where.
        address: String,
    },
    /// A worker whose relay has gone cannot look for another way.
    #[error("no other route to the sender: {reason}")]
    NoWay {
        /// What is in the way.
        reason: String,
    },
    /// Nobody answers.
    #[error("no answer from {address}: {reason}")]
    Unreachable {
        /// Where.
        address: String,
        /// What the last attempt came to.
        reason: String,
    },
}

impl NetError {
    /// What to do about it.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Hello { source, .. } => source.remedy(),
            Self::NoAnswer { .. } | Self::Unreachable { .. } => Remedy::Retry,
            Self::Broken { .. } | Self::NoWay { .. } => Remedy::Reconnect,
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

/// An error that is the caller's to mend.
pub(crate) fn transport(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Transport {
        source: error.into(),
        remedy: Remedy::GiveUp,
    }
}
