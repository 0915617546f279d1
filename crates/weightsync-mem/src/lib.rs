//! Versioned shared memory: one writer, many readers, and a swap that cannot tear.
//!
//! A *segment* is the memory of one or more models. It has these parts:
//!
//! * two or more *data slots* for each model, each with room for one version;
//! * a header that only the sender writes, with *set records* that say which versions go
//!   together;
//! * for each reader, a *mailbox* that only the sender writes: it names the set that this
//!   worker is to run;
//! * for each reader, a control page that only this reader writes: it says what the reader
//!   holds and how far it is.
//!
//! | step | here |
//! |---|---|
//! | write the next versions into free slots | [`SegmentWriter::stage`], [`StagingSlots`] |
//! | make them live, for all workers or some, in one atomic step each | [`StagingSlots::publish`], [`Targets`] |
//! | hold the live version | [`SegmentReader::next`], [`Taken`], [`Snapshot`], [`PrivateMapping`] |
//! | learn what each worker did with it | [`SegmentWriter::waiter`], [`Waiter::settle`] |
//! | the state machine under all of it | [`protocol`] |
//!
//! **Guarantees.** A [`Snapshot`] is one whole version for as long as it is held. A sender that
//! is killed at any moment leaves the last whole version behind. A reader that dies gives back
//! what it held. Nothing stays in any file system: the memory is anonymous, and the socket's
//! name lives as long as the socket.
//!
//! Sharing between processes needs Linux. On other systems, the modules in `portable` take the place
//! of those that call Linux: writers and readers of one process still share memory, so that a
//! worker can fetch versions over the network. `--cfg portable` has Linux run them too, for tests.
//!
//! Absent here: policy about when to send, formats of weights, async, serde. This is one of the
//! two crates with `unsafe` code.

// Loom explores the protocol and the sender's decisions; of these it leaves a part unused.
#![cfg_attr(loom, allow(dead_code))]

pub mod protocol;
mod sync;

#[cfg(not(loom))]
mod backoff;
#[cfg(not(loom))]
#[cfg_attr(any(not(target_os = "linux"), portable), path = "portable/bell.rs")]
mod bell;
#[cfg(not(loom))]
mod copy;
mod error;
#[cfg(not(loom))]
#[cfg_attr(any(not(target_os = "linux"), portable), path = "portable/file.rs")]
mod file;
#[cfg(not(loom))]
mod fork;
#[cfg(not(loom))]
#[cfg_attr(any(not(target_os = "linux"), portable), path = "portable/futex.rs")]
mod futex;
#[cfg(not(loom))]
mod grow;
#[cfg(not(loom))]
pub mod interrupt;
#[cfg(not(loom))]
mod late;
#[cfg_attr(loom, allow(dead_code))]
mod limits;
#[cfg(not(loom))]
mod mailboxes;
#[cfg(not(loom))]
mod map;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
#[cfg_attr(any(not(target_os = "linux"), portable), path = "portable/pagemap.rs")]
mod pagemap;
#[cfg(not(loom))]
mod partial_slot;
#[cfg(not(loom))]
mod pins;
mod plan;
#[cfg(not(loom))]
#[cfg_attr(any(not(target_os = "linux"), portable), path = "portable/populate.rs")]
mod populate;
#[cfg(not(loom))]
mod private;
#[cfg(not(loom))]
mod reader;
#[cfg(not(loom))]
mod registry;
#[cfg(not(loom))]
mod relay;
#[cfg(not(loom))]
mod remote_reader;
#[cfg(not(loom))]
mod report;
mod scan;
#[cfg(not(loom))]
mod service;
mod set;
#[cfg(not(loom))]
mod shared;
#[cfg(not(loom))]
mod slot;
#[cfg(not(loom))]
mod snapshot;
#[cfg(not(loom))]
#[cfg_attr(any(not(target_os = "linux"), portable), path = "portable/socket.rs")]
mod socket;
#[cfg(not(loom))]
mod spans;
#[cfg(not(loom))]
mod staging;
#[cfg(not(loom))]
#[cfg_attr(any(not(target_os = "linux"), portable), path = "portable/tcp.rs")]
mod tcp;
#[cfg(not(loom))]
pub mod threads;
#[cfg(not(loom))]
mod wait;
#[cfg(not(loom))]
mod watch;
pub mod wire;
#[cfg(not(loom))]
mod writer;

#[cfg(not(loom))]
pub use weightsync_simd::stream_copy_slice;

#[cfg(not(loom))]
pub use weightsync_core::{
    Attendance, GoneWorker, Level, Outcome, Targets, WorkerReport, WorkerStatus,
};

#[cfg(not(loom))]
pub use crate::{
    backoff::Backoff,
    copy::{BoxedError, CopyOptions, Fill, Source},
    error::{Error, Holder, RecordHolder},
    fork::Origin,
    late::Lateness,
    limits::raise_files,
    model::{MAX_NOTE_BYTES, ModelDescription},
    partial_slot::{BlockWrite, PartialSlot},
    private::PrivateMapping,
    reader::{AttachOptions, Resume, SegmentReader, Taken, TakenModel, ask_status, is_answered},
    registry::{Departure, StatusAnswer},
    relay::{RelaySegment, ReportedProgress, WorkerEvent, WorkerInstance},
    remote_reader::{NotifiedSet, RemoteReader, RemoteReaderOptions, RemoteReaders},
    report::{Publication, Waiter},
    shared::Ending,
    snapshot::Snapshot,
    socket::{Listener, check_sharing, is_served},
    spans::CHECKSUM_BLOCK,
    staging::StagingSlots,
    tcp::{HostAnswers, host_answers},
    wait::{Deadline, WaitStyle, left, passed},
    watch::{EndNotice, ReaderInterrupter},
    wire::{Delivery, ModelMask, Want},
    writer::{SegmentOptions, SegmentWriter},
};
