//! Versioned shared memory: one writer, many readers, and a swap that cannot
//! tear.
//!
//! A *segment* is the memory of one model: two or more *slots*, each with room
//! for one version, a header that only the sender writes, and one control page
//! per reader that only that reader writes.
//!
//! | step | here |
//! |---|---|
//! | write the next version into a free slot | [`Writer::loan`], [`Loan`] |
//! | make it live in one atomic step | [`Loan::publish`] |
//! | hold the live version | [`Reader::next`], [`Snapshot`] |
//! | the state machine under both | [`protocol`] |
//!
//! **What it guarantees.** A [`Snapshot`] is one whole version for as long as it
//! is held. A sender killed at any moment leaves the last whole version behind.
//! A reader that dies gives back what it held. Nothing is left in any file
//! system: the memory is anonymous, the socket's name lives as long as the
//! socket.
//!
//! Absent here: policy about when to send, formats of weights, async, serde.
//! This is one of the two crates with `unsafe` code.

pub mod protocol;
mod sync;

#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod fork;
#[cfg(not(loom))]
mod futex;
#[cfg(not(loom))]
mod loan;
#[cfg(not(loom))]
mod map;
#[cfg(not(loom))]
mod pins;
#[cfg(not(loom))]
mod reader;
#[cfg(not(loom))]
mod roster;
#[cfg(not(loom))]
mod service;
#[cfg(not(loom))]
mod set;
#[cfg(not(loom))]
mod shared;
#[cfg(not(loom))]
mod snapshot;
#[cfg(not(loom))]
mod socket;
#[cfg(not(loom))]
mod spans;
#[cfg(not(loom))]
mod wait;
#[cfg(not(loom))]
mod watch;
#[cfg(not(loom))]
pub mod wire;
#[cfg(not(loom))]
mod writer;

#[cfg(not(loom))]
pub use crate::{
    error::{Error, Holder},
    loan::{BoxedError, CopyOptions, Fill, Loan, Source},
    reader::{AttachOptions, Reader},
    snapshot::Snapshot,
    wait::{Deadline, WaitStyle},
    writer::{Outcome, ReaderOutcome, ReaderStatus, SegmentOptions, Writer},
};
