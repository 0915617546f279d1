//! What can go wrong here and nowhere else.

use std::net::SocketAddr;

use weightsync::{Error, MemoryError, Remedy};
use weightsync_net::AccessError;

#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("{0}")]
    Access(#[from] AccessError),
    #[error(
        "{addr} is taken: another sender of this run directory lives there, or another \
         program listens; end it first, or use another run directory or listen=HOST:PORT"
    )]
    Taken { addr: SocketAddr },
    #[error("listening at {addr} failed: {source}")]
    Listen {
        addr: SocketAddr,
        source: std::io::Error,
    },
    #[error("no free port was found at {host}: {source}")]
    NoPort {
        host: std::net::IpAddr,
        source: std::io::Error,
    },
    #[error("starting the thread that serves failed: {0}")]
    Thread(std::io::Error),
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Self {
        let remedy = match trouble {
            Trouble::NoPort { .. } | Trouble::Thread(_) => Remedy::Retry,
            _ => Remedy::GiveUp,
        };
        Self::Transport {
            source: trouble.into(),
            remedy,
        }
    }
}

/// The process that an end belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner(u32);

impl Owner {
    pub(super) fn this() -> Self {
        Self(std::process::id())
    }

    /// Whether this is that process, and no child that it forked: a child has no
    /// thread that serves, and whoever held a lock at that moment never lets go of it.
    pub(super) fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// # Errors
    ///
    /// In a forked child.
    pub(super) fn check(self) -> weightsync::Result<()> {
        match std::process::id() {
            child if child != self.0 => Err(MemoryError::Forked {
                owner: self.0,
                child,
            }
            .into()),
            _ => Ok(()),
        }
    }
}
