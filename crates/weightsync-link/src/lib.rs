//! Links between machines: what any service needs to stay in touch with a peer.
//!
//! A link is a connection between two processes that have the same key. It is framed and bounded,
//! it is encrypted where it leaves the machine, and it ends when the peer is silent. The crate knows
//! no scheme: a service brings its messages, and decides what they mean.
//!
//! | to | see |
//! |---|---|
//! | decide who may connect, and where to listen | [`access`] |
//! | read the settings of a scheme that listens | [`reach`], [`address`] |
//! | encrypt links | [`tls`] |
//! | accept connections | [`listen`], [`admission`] |
//! | connect | [`dial`], [`blocking`] |
//! | read and write bytes | [`stream`] |
//! | send messages, and notice that a peer is gone | [`Link`], [`silence`] |
//! | encode handshakes, frames and messages | [`hello`], [`frame`], [`message`] |
//!
//! `docs/protocol.md` specifies the bytes on the wire.
//!
//! Absent here: messages of a scheme, HTTP, `unsafe` code.
#![forbid(unsafe_code)]

pub mod access;
pub mod address;
pub mod admission;
pub mod blocking;
pub mod frame;
pub mod hello;
mod link;
pub mod listen;
pub mod message;
pub mod reach;
mod secure;
pub mod silence;
pub mod stream;
pub mod tls;

pub use self::link::{
    ControlMessage, DialError, HANDSHAKE, Link, LinkEnd, STARVED, SUSPECT, dial, frames, refusal,
};
pub use self::secure::Credentials;
