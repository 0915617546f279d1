//! `weightsync` over HTTP.
//!
//! | to | see |
//! |---|---|
//! | have the sender call its workers, which fetch what was published | [`Rpc`] |
//! | write a worker in another language | `openapi.json`, as [`OPENAPI`] |
//!
//! Nothing here starts before it is used: a sender has one thread that serves and
//! calls, from its `connect` to its end, and a worker one that serves the sender's
//! calls. Both are joined when their end is dropped.
#![forbid(unsafe_code)]

mod http;
mod rpc;

pub use rpc::Rpc;

/// The description of every route, as OpenAPI 3.1 in JSON.
pub const OPENAPI: &str = include_str!("../openapi.json");
