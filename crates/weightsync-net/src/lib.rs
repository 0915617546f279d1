//! Weights across machines: links, the [`Distributed`] scheme and relays.
//!
//! The trainer listens; workers dial in, whichever end starts the transfer. On each host a
//! relay fetches each version once and checks it block by block. The relay passes each block on
//! to the next host at once, and shares the version with the workers of its host through a
//! segment of shared memory. On a host without a relay, each worker fetches its own copy.
//!
//! | to | see |
//! |---|---|
//! | send to workers of other hosts | [`Distributed`] |
//! | decide who may connect, and where to listen | [`access`] |
//! | encrypt links | [`tls`] |
//! | collect frames on other hosts | [`collect`] |
//! | see the state of all hosts | [`status`] |
//! | compare the bytes that hosts hold with the published ones | [`scrub`] |
//! | encode handshakes, frames and messages | [`wire`] |
//!
//! `docs/protocol.md` specifies the bytes on the wire.
//!
//! Absent here: HTTP, policy about when to send.
#![forbid(unsafe_code)]

pub mod access;
#[doc(hidden)] // for the schemes of this workspace
pub mod address;
mod bulk;
pub mod collect;
mod error;
mod link;
pub mod reach;
mod receiver;
mod relay;
mod root;
mod scheme;
pub mod scrub;
#[cfg(test)]
mod simulation;
pub mod status;
pub mod tls;
pub mod wire;

pub use self::access::{Access, AccessError, Key, Token};
pub use self::error::{NetError, listen_error};
#[doc(hidden)] // for the schemes of this workspace
pub use self::link::admission;
pub use self::relay::{Relay, RelayEvent, RelayStop};
pub use self::scheme::{Deltas, Distributed, Share, Verify};
pub use weightsync_engine::log_limiter;
