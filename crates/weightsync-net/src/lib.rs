//! Links between machines: who may connect, and every byte that travels.
//!
//! | to | see |
//! |---|---|
//! | know who may connect, and where one may listen | [`access`] |
//! | say hello, frame, and speak | [`wire`] |
//!
//! `docs/protocol.md` specifies what is on the wire.
#![forbid(unsafe_code)]

pub mod access;
pub mod wire;

pub use access::{Access, AccessError, Key, Token};
