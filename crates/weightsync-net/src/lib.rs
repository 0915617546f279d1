//! Weights across machines: links, the [`Distributed`] scheme and relays.
//!
//! The trainer listens; workers dial in, whichever end starts the transfer. On each host a
//! relay fetches each version once, checks it chunk by chunk, passes it on to the next
//! host at once, and shares it with the workers of its host through a segment of
//! shared memory. Where there is no relay, each worker fetches for itself.
//!
//! | to | see |
//! |---|---|
//! | send to workers of other hosts | [`Distributed`] |
//! | know who may connect, and where one may listen | [`access`] |
//! | see how things are | [`status`] |
//! | have what is held compared with what was published | [`scrub`] |
//! | say hello, frame, and speak | [`wire`] |
//!
//! `docs/protocol.md` specifies what is on the wire.
//!
//! Absent here: HTTP, policy about when to send.
#![forbid(unsafe_code)]

pub mod access;
#[doc(hidden)] // for the schemes of this workspace
pub mod address;
mod bulk;
mod error;
mod link;
mod receiver;
mod relay;
mod root;
mod scheme;
pub mod scrub;
#[cfg(test)]
mod simulation;
pub mod status;
pub mod wire;

pub use self::access::{Access, AccessError, Key, Token};
pub use self::error::NetError;
pub use self::relay::{Relay, RelayEvent, RelayStop};
pub use self::scheme::{Deltas, Distributed, Share};
