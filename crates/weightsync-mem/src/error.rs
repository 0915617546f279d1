//! The errors of shared memory, and whose fault each is.

use std::time::Duration;

use rustix::io::Errno;
use weightsync_core::{Epoch, Version, WorkerId};

use crate::limits;

/// One reader that keeps a slot from being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The worker, or `None` for the sender itself (a digest being made, say).
    pub worker: Option<WorkerId>,
    /// Its process.
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

/// One reader that keeps set records from being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHolder {
    /// The worker.
    pub worker: WorkerId,
    /// Its process.
    pub pid: u32,
    /// How many records it holds, or has before it.
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
    if versions.is_empty() {
        return "none".into();
    }
    let versions: Vec<_> = versions.iter().map(ToString::to_string).collect();
    versions.join(", ")
}

fn size(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{} MiB", bytes.div_ceil(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Whose limit it is.
struct Group(Option<u64>);

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(limit) => write!(f, "of the {} that a control group allows ", size(limit)),
            None => f.write_str("of the machine's memory "),
        }
    }
}

fn list(holders: &[impl ToString]) -> String {
    let lines: Vec<_> = holders.iter().map(ToString::to_string).collect();
    lines.join("; ")
}

/// An error of either end of a segment. What a program above says in sentences of its own, with
/// what to do about it, is brief here.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call to the operating system failed.
    #[error("{action} failed: {source}")]
    Os {
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// There is not so much memory for this process: it would be killed.
    #[error(
        "{} of shared memory are needed, but {}{} are left: send fewer bytes (for example by a \
         cast), stop other programs there, or raise the limit",
        size(*wanted), Group(*limit), size(*left)
    )]
    NoMemory {
        /// Bytes that the slots take.
        wanted: u64,
        /// Bytes that are left.
        left: u64,
        /// The limit of the control group that has so few left; `None` if that is
        /// the machine.
        limit: Option<u64>,
    },
    /// This process has as many files open as it may.
    #[error(
        "this process has reached its limit of open files ({}): raise the hard limit (`ulimit \
         -Hn`, LimitNOFILE= of a service), or use fewer workers",
        limit.map_or("no limit".into(), |limit| limit.to_string())
    )]
    TooManyFiles {
        /// The limit.
        limit: Option<u64>,
    },
    /// The address is taken: by another sender, or by another program.
    #[error("cannot listen at {address}: another sender or another program uses it")]
    AddressInUse {
        /// The address asked for.
        address: String,
    },
    /// Nobody answered at the address before the deadline.
    #[error("no sender answered at {address} within {waited:.1?}")]
    NoSender {
        /// The address tried.
        address: String,
        /// How long it was tried.
        waited: Duration,
    },
    /// The sender turned this reader away.
    #[error("the sender refused this worker: {reason}")]
    Denied {
        /// The sender's words.
        reason: String,
    },
    /// The sender has given this reader up: it is sent nothing more, and may join
    /// again.
    #[error("the sender has dropped this worker: {reason}; connect again")]
    GivenUp {
        /// The sender's words.
        reason: String,
    },
    /// The sender belongs to a run that a newer one has replaced.
    #[error("the sender's run has {got}, but this worker has already seen {seen}")]
    Fenced {
        /// The highest epoch seen before.
        seen: Epoch,
        /// The epoch of the sender that answered.
        got: Epoch,
    },
    /// Every slot of a model is pinned and none came free before the deadline.
    #[error(
        "all {slots} slots of model {model} are pinned after {waited:.1?}: {}",
        list(holders)
    )]
    AllSlotsPinned {
        /// The model's index.
        model: usize,
        /// How many slots it has.
        slots: u8,
        /// How long the sender waited.
        waited: Duration,
        /// Who holds them.
        holders: Vec<Holder>,
    },
    /// Every set record is in use and none came free before the deadline: nothing could
    /// be told to any reader.
    #[error(
        "all {records} set records are in use after {waited:.1?}: {}; let these workers receive \
         their queued versions, give them shorter queues, or restart them",
        list(holders)
    )]
    AllRecordsHeld {
        /// How many there are.
        records: usize,
        /// How long the sender waited.
        waited: Duration,
        /// Who holds them.
        holders: Vec<RecordHolder>,
    },
    /// The sender died; what it published last stays readable.
    #[error("the sender (pid {pid}) died; the last whole version stays readable")]
    SenderDied {
        /// Its process.
        pid: u32,
    },
    /// The sender shut down in order.
    #[error("the sender shut down")]
    SenderClosed,
    /// The relay whose segment this was is gone; the sender may be there.
    #[error("the relay of this host is gone; the last whole version stays readable; connect again")]
    RelayGone,
    /// This thread's [check](crate::interrupt::with) ended the wait.
    #[error("the call was interrupted while it waited")]
    Interrupted,
    /// A process that forked tried to use an end its parent opened.
    #[error("this end was opened by process {owner}, and its forked child {child} cannot use it")]
    Forked {
        /// The process that opened the end.
        owner: u32,
        /// The process that made the call.
        child: u32,
    },
    /// So many versions of a model are to be run or kept that none could be
    /// written any more.
    #[error(
        "publishing this version of model {model} would leave none of {slots} slots for the next"
    )]
    SlotsExhausted {
        /// The model's index.
        model: usize,
        /// How many slots it has.
        slots: u8,
    },
    /// A version number that does not grow.
    #[error("{got} cannot follow {newest}: versions only grow within a run")]
    VersionNotNewer {
        /// The newest version.
        newest: Version,
        /// The one offered.
        got: Version,
    },
    /// The workers named do not all have the same version.
    #[error("these workers do not have the same version of model {model}, but {}", in_words(.versions))]
    Diverged {
        /// The model's index.
        model: usize,
        /// What they have, oldest first; `Version::NONE` where there is none.
        versions: Vec<Version>,
    },
    /// The version asked for is not there (any more, or yet).
    #[error(
        "there is no {asked} of model {model} for this worker; the newest there are: {}",
        in_words(known)
    )]
    NoSuchVersion {
        /// The model's index.
        model: usize,
        /// The version asked for.
        asked: Version,
        /// The newest there are, newest first.
        known: Vec<Version>,
    },
    /// A set record does not hold together.
    #[error("set record {record} is corrupt ({what}); the set is not used")]
    CorruptSet {
        /// The record.
        record: u8,
        /// Which check failed.
        what: &'static str,
    },
    /// The commit record of a slot does not hold together.
    #[error("the commit record of slot {slot} is corrupt ({what}); the version is not used")]
    CorruptCommit {
        /// The slot.
        slot: u8,
        /// Which check failed.
        what: &'static str,
    },
    /// A version whose bytes differ from its checksums.
    #[error("block {block} of {version} does not match its checksum")]
    ChecksumMismatch {
        /// The version.
        version: Version,
        /// The block, counted in checksum blocks from 0.
        block: usize,
    },
    /// The other end broke the protocol.
    #[error("expected {expected} from the other end, got {got}")]
    Protocol {
        /// What the protocol allows here.
        expected: &'static str,
        /// What came.
        got: String,
    },
    /// An option out of range.
    #[error("{option}: expected {expected}, got {got}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// The allowed range.
        expected: &'static str,
        /// What was given.
        got: String,
    },
    /// A tensor's bytes could not be had from the source; nothing was published.
    #[error("tensor {tensor:?} could not be extracted: {source}")]
    Fill {
        /// The tensor.
        tensor: String,
        /// What its source said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The layout that travelled could not be read.
    #[error("the sender's layout cannot be read: {0}")]
    Layout(#[from] weightsync_core::Error),
}

impl Error {
    /// Whether this is the other end's misbehaviour rather than a condition of
    /// this machine or a mistake of the caller.
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
    /// Too many descriptors of this user are on their way through sockets: for
    /// the other ends to take, and not a failing of this one.
    pub(crate) fn is_crowded_out(&self) -> bool {
        let crowded = Errno::TOOMANYREFS.raw_os_error();
        matches!(self, Self::Os { source, .. } if source.raw_os_error() == Some(crowded))
    }

    /// The same once more, of an error that ended something and is what every
    /// later call says too.
    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Os { action, source } => Self::Os {
                action,
                source: match source.raw_os_error() {
                    Some(number) => std::io::Error::from_raw_os_error(number),
                    None => std::io::Error::new(source.kind(), source.to_string()),
                },
            },
            Self::Protocol { expected, got } => unexpected(expected, got.clone()),
            Self::GivenUp { reason } => Self::GivenUp {
                reason: reason.clone(),
            },
            other => unexpected("words of the protocol", other.to_string()),
        }
    }
}

pub(crate) fn os(action: &'static str) -> impl FnOnce(Errno) -> Error {
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

/// The other end broke the protocol.
pub(crate) fn unexpected(expected: &'static str, got: String) -> Error {
    Error::Protocol { expected, got }
}
