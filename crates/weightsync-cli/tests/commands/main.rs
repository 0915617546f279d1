//! The commands that are there without any feature, as their users meet them.

mod bench;
mod demo;
mod diff;
#[path = "../../../weightsync-conformance/src/harness/patience.rs"]
mod patience;
mod store;
mod watch;
