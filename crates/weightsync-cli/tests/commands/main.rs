//! The commands that are there without any feature, as their users meet them.

mod bench;
mod demo;
mod diff;
mod store;
mod watch;
