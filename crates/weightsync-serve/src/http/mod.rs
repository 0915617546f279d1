//! HTTP for both ends: one thread, bounded connections, one shared secret.

mod bearer;
mod body;
mod client;
pub(crate) mod range;
mod server;
mod thread;

pub(crate) use self::bearer::{Bearer, ProofKey};
pub(crate) use self::body::{LinesBody, problem, read};
pub(crate) use self::client::{Ask, Client, Encryption, Fault, HttpReply, Lines, Reachability, To};
pub(crate) use self::server::{ConnectionInfo, Limits, Server};
pub(crate) use self::thread::{HttpThread, Stopping};
