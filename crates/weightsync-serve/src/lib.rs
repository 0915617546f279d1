//! `weightsync` over HTTP.
//!
//! | to | see |
//! |---|---|
//! | have the sender call its workers, which fetch the published versions | [`Rpc`] |
//! | decide when a trainer and its explorers synchronise | [`synchronizer`] |
//! | write a worker in another language | `openapi.json`, as [`OPENAPI`] |
//!
//! Connections, certificates and tokens are those of [`weightsync_link`]. Of weightsync-net, this crate
//! uses the scheme `Distributed` alone: a synchronizer that serves sends with it to its explorers.
//!
//! Nothing here starts before it is used. A sender has one thread that serves and calls, from
//! `connect` to its end. A worker has one thread that serves the sender's calls. Both threads
//! are joined when their end is dropped. [`synchronizer`] has threads of its own: `docs/invariants.md`
//! lists them.
#![forbid(unsafe_code)]

mod http;
mod rpc;
pub mod synchronizer;

pub use rpc::Rpc;

/// The description of every route, as OpenAPI 3.1 in JSON.
pub const OPENAPI: &str = include_str!("../openapi.json");
