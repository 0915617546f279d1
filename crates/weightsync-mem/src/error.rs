//! The errors of shared memory, and which end caused each.

use std::time::Duration;

use rustix::io::Errno;
use weightsync_core::{Epoch, Version, WorkerId};

use crate::limits;

/// A reader whose pins keep slots from being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The worker; `None` for the sender itself, for example while it makes a digest.
    pub worker: Option<WorkerId>,
    /// The holder's process.
    pub pid: u32,
    /// The versions it holds, oldest first.
    pub versions: Vec<Version>,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.worker {
            Some(worker) => write!(f, "{worker} (pid {})", self.pid)?,
            None => write!(f, "the sender itself (pid {})", self.pid)?,
        }
        write!(f, " holds {}", in_words(&self.versions))
    }
}

/// A reader that keeps set records from being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHolder {
    /// The worker.
    pub worker: WorkerId,
    /// The worker's process.
    pub pid: u32,
    /// How many records the reader holds, or has not taken yet.
    pub records: usize,
}

impl std::fmt::Display for RecordHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            worker,
            pid,
            records,
        } = self;
        write!(f, "{worker} (pid {pid}) holds {records}")
    }
}

fn in_words(versions: &[Version]) -> String {
    match versions {
        [] => "none".into(),
        versions => list(versions, ", "),
    }
}

fn size(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{} MiB", bytes.div_ceil(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// The control group's limit, or the machine.
struct Group(Option<u64>);

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(limit) => write!(f, "of the {} that a control group allows ", size(limit)),
            None => f.write_str("of the machine's memory "),
        }
    }
}

fn list(items: &[impl ToString], separator: &str) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    items.join(separator)
}

/// An error of either end of a segment. The engine wraps some of these in longer messages with a
/// remedy, so their text is brief here.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call to the operating system failed.
    #[error("{action} failed: {source}")]
    Os {
        /// The failed action, as a verb phrase.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// There is not enough memory for this process: the system would kill it.
    #[error(
        "{} of shared memory are needed, but {}{} are left: send fewer bytes (for example by a \
         cast), stop other programs there, or raise the limit",
        size(*wanted), Group(*limit), size(*left)
    )]
    NoMemory {
        /// Bytes of the slots.
        wanted: u64,
        /// Bytes that are left.
        left: u64,
        /// The limit of the control group with so little left; `None` for the machine.
        limit: Option<u64>,
    },
    /// This process has reached its limit of open files.
    #[error(
        "this process has reached its limit of open files{}: raise the hard limit (`ulimit -Hn`, \
         LimitNOFILE= of a service), or use fewer workers",
        limit.map_or(String::new(), |limit| format!(" ({limit})"))
    )]
    TooManyFiles {
        /// The limit, if the system tells it.
        limit: Option<u64>,
    },
    /// Another sender or another program uses the address.
    #[error("cannot listen at {address}: another sender or another program uses it")]
    AddressInUse {
        /// The address.
        address: String,
    },
    /// No sender answered at the address before the deadline.
    #[error("no sender answered at {address} within {waited:.1?}")]
    NoSender {
        /// The address.
        address: String,
        /// How long the reader tried.
        waited: Duration,
    },
    /// The sender refused this reader.
    #[error("the sender refused this worker: {reason}")]
    Denied {
        /// The sender's reason.
        reason: String,
    },
    /// The sender has dropped this reader: it gets nothing more, and may join again.
    #[error("the sender has dropped this worker: {reason}; connect again")]
    GivenUp {
        /// The sender's reason.
        reason: String,
    },
    /// A newer run has replaced the sender's run.
    #[error("the sender's run has {got}, but this worker has already seen {seen}")]
    Fenced {
        /// The highest epoch that the worker has seen.
        seen: Epoch,
        /// The sender's epoch.
        got: Epoch,
    },
    /// Every slot of a model is pinned and none came free before the deadline.
    #[error(
        "all {slots} slots of model {model} are pinned after {waited:.1?}: {}",
        list(holders, "; ")
    )]
    AllSlotsPinned {
        /// The model's index.
        model: usize,
        /// How many slots it has.
        slots: u8,
        /// How long the sender waited.
        waited: Duration,
        /// The holders of the slots.
        holders: Vec<Holder>,
    },
    /// Every set record is in use, and none came free before the deadline, so no reader could be
    /// notified.
    #[error(
        "all {records} set records are in use after {waited:.1?}: {}; let these workers receive \
         their queued versions, give them shorter queues, or restart them",
        list(holders, "; ")
    )]
    AllRecordsHeld {
        /// How many records there are.
        records: usize,
        /// How long the sender waited.
        waited: Duration,
        /// The holders of the records.
        holders: Vec<RecordHolder>,
    },
    /// The sender died; its last version stays readable.
    #[error("the sender (pid {pid}) died; the last whole version stays readable")]
    SenderDied {
        /// The sender's process.
        pid: u32,
    },
    /// The sender shut down in order.
    #[error("the sender shut down")]
    SenderClosed,
    /// The relay of this segment is gone; the sender may still be there.
    #[error("the relay of this host is gone; the last whole version stays readable; connect again")]
    RelayGone,
    /// This thread's [check](crate::interrupt::with) ended the wait.
    #[error("the call was interrupted while it waited")]
    Interrupted,
    /// A forked child used an end that its parent opened.
    #[error("this end was opened by process {owner}, and its forked child {child} cannot use it")]
    Forked {
        /// The process that opened the end.
        owner: u32,
        /// The process that made the call.
        child: u32,
    },
    /// The publication would leave no slot of a model for the next version: workers need too many
    /// versions.
    #[error(
        "publishing this version of model {model} would leave none of {slots} slots for the next"
    )]
    SlotsExhausted {
        /// The model's index.
        model: usize,
        /// How many slots the model has.
        slots: u8,
    },
    /// A version number that is not above the newest.
    #[error("{got} cannot follow {newest}: versions only grow within a run")]
    VersionNotNewer {
        /// The newest version.
        newest: Version,
        /// The number that was given.
        got: Version,
    },
    /// The named workers do not all have the same version.
    #[error("these workers do not have the same version of model {model}, but {}", in_words(.versions))]
    Diverged {
        /// The model's index.
        model: usize,
        /// The workers' versions, oldest first; `Version::NONE` where there is none.
        versions: Vec<Version>,
    },
    /// There is no such version, not yet or no longer.
    #[error(
        "there is no {asked} of model {model} for this worker; the newest there are: {}",
        in_words(known)
    )]
    NoSuchVersion {
        /// The model's index.
        model: usize,
        /// The version that was asked for.
        asked: Version,
        /// The newest versions that exist, newest first.
        known: Vec<Version>,
    },
    /// A set record is invalid.
    #[error("set record {record} is corrupt ({what}); the set is not used")]
    CorruptSet {
        /// The record.
        record: u8,
        /// Which check failed.
        what: &'static str,
    },
    /// The commit record of a slot is invalid.
    #[error("the commit record of slot {slot} is corrupt ({what}); the version is not used")]
    CorruptCommit {
        /// The slot.
        slot: u8,
        /// Which check failed.
        what: &'static str,
    },
    /// The bytes of a version differ from its checksums.
    #[error("block {block} of {version} does not match its checksum")]
    ChecksumMismatch {
        /// The version.
        version: Version,
        /// The index of the block, from 0.
        block: usize,
    },
    /// The peer broke the protocol.
    #[error("expected {expected} from the other end, got {got}")]
    Protocol {
        /// What the protocol allows here.
        expected: &'static str,
        /// What arrived.
        got: String,
    },
    /// Only Linux has what this needs.
    #[error(
        "{what} needs Linux: on this system, have each worker fetch over the network \
         (scheme distributed)"
    )]
    NeedsLinux {
        /// What was asked for, as a noun phrase.
        what: &'static str,
    },
    /// An option out of range.
    #[error("{option}: expected {expected}, got {got}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// The allowed range.
        expected: &'static str,
        /// The given value.
        got: String,
    },
    /// A tensor's bytes could not be read from the source; nothing was published.
    #[error("tensor {tensor:?} could not be extracted: {source}")]
    Fill {
        /// The tensor.
        tensor: String,
        /// The error of the tensor's source.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The sender's layout cannot be decoded.
    #[error("the sender's layout cannot be read: {0}")]
    Layout(#[from] weightsync_core::Error),
}

impl Error {
    /// Whether the peer misbehaved, as opposed to a condition of this machine or a mistake of the
    /// caller.
    pub fn is_peer_fault(&self) -> bool {
        matches!(
            self,
            Self::Protocol { .. }
                | Self::CorruptCommit { .. }
                | Self::CorruptSet { .. }
                | Self::ChecksumMismatch { .. }
                | Self::Layout(_)
        )
    }
}

impl Error {
    /// Whether too many descriptors of this user are in flight over sockets. The receiving ends
    /// must take them first; this end did nothing wrong.
    pub(crate) fn is_crowded_out(&self) -> bool {
        let crowded = Errno::TOOMANYREFS.raw_os_error();
        matches!(self, Self::Os { source, .. } if source.raw_os_error() == Some(crowded))
    }

    /// A copy of an error that ended something; every later call returns it too.
    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Os { action, source } => Self::Os {
                action,
                // `std::io::Error` cannot be cloned. The number, or the kind and the text, are what
                // callers look at.
                source: match source.raw_os_error() {
                    Some(number) => std::io::Error::from_raw_os_error(number),
                    None => std::io::Error::new(source.kind(), source.to_string()),
                },
            },
            Self::Protocol { expected, got } => unexpected(expected, got.clone()),
            Self::GivenUp { reason } => Self::GivenUp {
                reason: reason.clone(),
            },
            Self::TooManyFiles { limit } => Self::TooManyFiles { limit: *limit },
            Self::NoMemory {
                wanted,
                left,
                limit,
            } => Self::NoMemory {
                wanted: *wanted,
                left: *left,
                limit: *limit,
            },
            other => unexpected("words of the protocol", other.to_string()),
        }
    }
}

pub(crate) fn os(action: &'static str) -> impl FnOnce(Errno) -> Error {
    // A process at its limit of files can be helped, so this error is told apart wherever it comes
    // from.
    move |errno| match errno {
        Errno::MFILE => Error::TooManyFiles {
            limit: limits::files(),
        },
        _ => Error::Os {
            action,
            source: errno.into(),
        },
    }
}

/// The error for a peer that broke the protocol.
pub(crate) fn unexpected(expected: &'static str, got: String) -> Error {
    Error::Protocol { expected, got }
}

pub(crate) fn bad(option: &'static str, expected: &'static str, got: impl ToString) -> Error {
    Error::BadOption {
        option,
        expected,
        got: got.to_string(),
    }
}
