//! Weights across machines: the [`Distributed`] scheme and relays.
//!
//! The trainer listens; workers dial in, whichever end starts the transfer. On each host a
//! relay fetches each version once and checks it block by block. The relay passes each block on
//! to the next host at once, and shares the version with the workers of its host through a
//! segment of shared memory. On a host without a relay, each worker fetches its own copy.
//!
//! | to | see |
//! |---|---|
//! | send to workers of other hosts | [`Distributed`] |
//! | collect frames on other hosts | [`collect`] |
//! | see the state of all hosts | [`status`] |
//! | compare the bytes that hosts hold with the published ones | [`scrub`] |
//! | encode blocks, deltas and messages | [`wire`] |
//!
//! Links, certificates and tokens are those of [`weightsync_link`]. `docs/protocol.md` specifies the
//! bytes on the wire.
//!
//! Absent here: HTTP, policy about when to send.
#![forbid(unsafe_code)]

mod agent;
mod bulk;
pub mod collect;
mod error;
mod receiver;
mod root;
mod scheme;
pub mod scrub;
#[cfg(test)]
mod simulation;
pub mod status;
pub mod wire;

pub use self::agent::{Relay, RelayEvent, RelayStop};
pub use self::error::NetError;
pub use self::scheme::{Deltas, Distributed, Share, Verify};
