//! The errors of this scheme that no other scheme has.

use std::net::SocketAddr;

use weightsync_engine::{Error, Remedy};
use weightsync_link::access::AccessError;

#[derive(Debug, thiserror::Error)]
pub(super) enum RpcError {
    #[error("{0}")]
    Access(#[from] AccessError),
    #[error("no free port was found at {host}: {source}")]
    NoPort {
        host: std::net::IpAddr,
        source: std::io::Error,
    },
    #[error(
        "the program at {addr} is not the sender of this init info: expected a proof made with its \
         secret, got {got}; its answer was ignored. Another program has \
         taken the address, or the sender's weightsync is older than the worker's: start the \
         sender again, or give this worker the init info of the one that runs"
    )]
    WrongSender { addr: SocketAddr, got: &'static str },
    #[error("starting the thread that serves failed: {0}")]
    Thread(std::io::Error),
}

impl From<RpcError> for Error {
    fn from(error: RpcError) -> Self {
        let remedy = match error {
            // The sender may come back to its address.
            RpcError::NoPort { .. } | RpcError::Thread(_) | RpcError::WrongSender { .. } => {
                Remedy::Retry
            }
            _ => Remedy::GiveUp,
        };
        Self::Transport {
            source: error.into(),
            remedy,
        }
    }
}
