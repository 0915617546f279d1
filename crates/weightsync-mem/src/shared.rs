//! The layout of the shared pages: the sender's header, one page per model, one mailbox and one
//! control page per reader. All are tables of atomics without pointers.

use std::sync::atomic::{AtomicU64, Ordering};

use weightsync_core::record::{CommitRecord, RECORD_WORDS};
use weightsync_core::{Digest, Version};

use crate::error::Error;
use crate::map::Table;
use crate::protocol::{
    Live, LiveWord, MAX_MODELS, MAX_RECORDS, MAX_SLOTS, PinWord, QueueHead, RecordQueue, SleepWord,
};
use crate::set::{SET_WORDS, SetRecord};
use crate::sync::load_acquire;

/// A value alone on its pair of cache lines, so that one end's writes do not slow the other's.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct CachePadded<T>(pub(crate) T);

/// The sender's page: only the sender maps it writable; every reader reads it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct HeaderPage {
    /// The sender waits for readers, and wants them to ring.
    pub(crate) sender: CachePadded<SleepWord>,
    /// How the segment ended, as an [`Ending`]; 0 before the end.
    pub(crate) closed: CachePadded<AtomicU64>,
    /// Grows for as long as the process of a relay's segment gets to run.
    pub(crate) beats: CachePadded<AtomicU64>,
    sets: [CachePadded<[AtomicU64; SET_WORDS]>; MAX_RECORDS],
}

/// How a segment ended, unless its process died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The sender shut down in order.
    Closed,
    /// The relay of this segment reports that the sender died.
    Died,
    /// The relay of this segment has left; the sender may be there.
    Moved,
}

impl Ending {
    pub(crate) fn word(self) -> u64 {
        match self {
            Self::Closed => 1,
            Self::Died => 2,
            Self::Moved => 3,
        }
    }

    /// The ending of a word other than 0; [`Ending::Closed`] for an unknown one.
    pub(crate) fn of(word: u64) -> Option<Self> {
        match word {
            0 => None,
            2 => Some(Self::Died),
            3 => Some(Self::Moved),
            _ => Some(Self::Closed),
        }
    }
}

/// How a reader closed its end, as its control page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReaderExit {
    /// The reader leaves in order.
    InOrder,
    /// The reader can use nothing more; its reason is on the way over the socket.
    Failed,
}

impl ReaderExit {
    pub(crate) fn word(self) -> u64 {
        match self {
            Self::InOrder => 1,
            Self::Failed => 2,
        }
    }

    /// The exit of a word other than 0; a failure for an unknown one.
    pub(crate) fn of(word: u64) -> Option<Self> {
        match word {
            0 => None,
            1 => Some(Self::InOrder),
            _ => Some(Self::Failed),
        }
    }
}

// SAFETY: atomics only; `repr(C)`; alignment 128.
unsafe impl Table for HeaderPage {}

impl HeaderPage {
    /// Writes a set record that no mailbox and no pin holds.
    pub(crate) fn write_set(&self, record: u8, set: &SetRecord) {
        let (words, used) = set.encode();
        let cells = &self.sets[usize::from(record)].0;
        // Relaxed: the store that lets a mailbox name this record is a release.
        for (to, word) in cells.iter().zip(&words[..used]) {
            to.store(*word, Ordering::Relaxed);
        }
    }

    /// Reads and checks the set record of a pinned `live` word, or of an entry
    /// at the reader's head.
    pub(crate) fn read_set(&self, live: Live) -> Result<SetRecord, Error> {
        let cells = &self.sets[usize::from(live.record)].0;
        // Not checked yet, but it counts bits of one word, so it stays within the record. A wrong
        // one fails the checksum.
        let used = SetRecord::words_used(cells[1].load(Ordering::Relaxed));
        let mut words = [0; SET_WORDS];
        for (word, from) in words[..used].iter_mut().zip(cells) {
            *word = from.load(Ordering::Relaxed);
        }
        SetRecord::decode(&words, live.sequence).map_err(|fault| Error::CorruptSet {
            record: live.record,
            what: fault.what(),
        })
    }

    /// Flips a bit of a set record.
    #[cfg(test)]
    pub(crate) fn spoil_set(&self, record: u8, word: usize) {
        self.sets[usize::from(record)].0[word].fetch_xor(1 << 17, Ordering::Relaxed);
    }
}

/// One model's page: only the sender maps it writable; readers that take the model read it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ModelPage {
    commits: [CachePadded<Commit>; MAX_SLOTS],
}

/// One slot's commit record, and its digest, which is added later.
#[repr(C)]
#[derive(Debug)]
struct Commit {
    words: [AtomicU64; RECORD_WORDS],
    digest: [AtomicU64; 2],
    /// The version that the digest belongs to; 0 while there is none.
    digest_of: AtomicU64,
}

// SAFETY: atomics only; `repr(C)`; alignment 128.
unsafe impl Table for ModelPage {}

impl ModelPage {
    /// Writes the record of a slot that no reader holds.
    pub(crate) fn write_commit(&self, slot: u8, record: &CommitRecord) {
        let cells = &self.commits[usize::from(slot)].0;
        // The digest of the version before must not be taken for this one's.
        cells.digest_of.store(0, Ordering::Relaxed);
        for (to, word) in cells.words.iter().zip(record.encode()) {
            to.store(word, Ordering::Relaxed);
        }
    }

    /// Flips a bit of a record.
    #[cfg(test)]
    pub(crate) fn spoil_commit(&self, slot: u8, word: usize) {
        self.commits[usize::from(slot)].0.words[word].fetch_xor(1 << 17, Ordering::Relaxed);
    }

    /// Reads and checks the record of a pinned slot.
    pub(crate) fn read_commit(&self, slot: u8) -> Result<CommitRecord, Error> {
        let mut words = [0; RECORD_WORDS];
        for (word, from) in words
            .iter_mut()
            .zip(&self.commits[usize::from(slot)].0.words)
        {
            *word = from.load(Ordering::Relaxed);
        }
        CommitRecord::decode(&words).map_err(|fault| Error::CorruptCommit {
            slot,
            what: fault.what(),
        })
    }

    /// Adds the digest of the version in a slot the sender itself holds.
    pub(crate) fn write_digest(&self, slot: u8, version: Version, digest: Digest) {
        let cells = &self.commits[usize::from(slot)].0;
        let bytes = u128::from_le_bytes(digest.0);
        cells.digest[0].store(bytes as u64, Ordering::Relaxed);
        cells.digest[1].store((bytes >> 64) as u64, Ordering::Relaxed);
        // Last: a reader that finds the version here finds its digest too.
        cells.digest_of.store(version.0, Ordering::Release);
    }

    /// The digest of the version in a pinned slot, if the sender has computed it.
    pub(crate) fn read_digest(&self, slot: u8, version: Version) -> Option<Digest> {
        let cells = &self.commits[usize::from(slot)].0;
        // The sender makes digests after the send, if at all.
        if load_acquire(&cells.digest_of) != version.0 {
            return None;
        }
        let low = u128::from(cells.digest[0].load(Ordering::Relaxed));
        let high = u128::from(cells.digest[1].load(Ordering::Relaxed));
        Some(Digest((low | high << 64).to_le_bytes()))
    }
}

/// One reader's mailbox: only the sender maps it writable; that reader reads it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct MailboxPage {
    /// The word for readers that want the newest version.
    pub(crate) live: CachePadded<LiveWord>,
    /// The answer to a reader's question.
    pub(crate) answer: CachePadded<AnswerEntry>,
    /// The queue of readers that take every version.
    pub(crate) queue: CachePadded<RecordQueue>,
    /// Sets wait for room in the queue or for a record, and the sender wants to know when there is
    /// some.
    pub(crate) wants_room: CachePadded<SleepWord>,
}

/// The answer to a reader's question, separate from its notifications.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct AnswerEntry {
    pub(crate) live: LiveWord,
    /// The number of the question that this answers; written after it.
    pub(crate) question: AtomicU64,
}

// SAFETY: atomics only; `repr(C)`; alignment 128.
unsafe impl Table for MailboxPage {}

/// A reader's page: only that reader maps it writable. The words that the sender reads while it
/// waits lie together: for a reader of one model, in the first cache line.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) sleep: SleepWord,
    /// A [`ReaderExit`] once the reader has closed its end while snapshots of it live on. The
    /// sender no longer waits for it, but its data pins still count.
    pub(crate) left: AtomicU64,
    /// How many queue entries the reader has taken.
    pub(crate) head: QueueHead,
    /// The number of the last question whose answer the reader no longer needs: it has taken the
    /// answer, asked again, or given up.
    pub(crate) through: AtomicU64,
    /// The sequence number of the newest set that the worker has loaded; 0 before the
    /// first.
    pub(crate) loaded: AtomicU64,
    /// The sequence number of the newest set that the reader has taken and found valid; 0 before
    /// the first.
    pub(crate) taken: AtomicU64,
    /// The set records that the reader holds. The sender reads these and the head before the data
    /// pins.
    pub(crate) records: PinWord,
    /// The data slots that the reader holds, for each model.
    pub(crate) pins: [PinWord; MAX_MODELS],
    /// The version of each model that the worker has loaded; 0 before the first.
    pub(crate) versions: [AtomicU64; MAX_MODELS],
}

impl Control {
    /// Notes that the worker has loaded these versions: the set with this sequence number or, for
    /// 0, another set that it asked for. Older sets than the loaded one are ignored.
    pub(crate) fn set_loaded(
        &self,
        sequence: u64,
        versions: impl IntoIterator<Item = (usize, Version)>,
    ) {
        let before = self.loaded.load(Ordering::Relaxed);
        // A remote reader's numbers come over links that replace each other, so an older one may
        // come late.
        if sequence == 0 || sequence >= before {
            for (model, version) in versions {
                self.versions[model].store(version.0, Ordering::Relaxed);
            }
            // After the versions: a sender that sees this number sees them too.
            self.loaded.store(sequence.max(before), Ordering::Release);
        }
    }
}

// SAFETY: atomics only; `repr(C)`; alignment 128.
unsafe impl Table for Control {}

/// The pages of a remote reader: the same tables, in the sender's private memory.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PrivatePages {
    pub(crate) mailbox: MailboxPage,
    pub(crate) control: Control,
}

impl PrivatePages {
    pub(crate) fn new() -> Box<Self> {
        let pages = Box::<Self>::new_zeroed();
        // SAFETY: tables of atomics (`Table`), for which zero is a value: it is
        // what a fresh page of a memory file has.
        unsafe { pages.assume_init() }
    }
}

/// Lengths of the shared pages, in whole pages of 4 KiB.
pub(crate) const HEADER_BYTES: usize = size_of::<HeaderPage>().next_multiple_of(4096);
pub(crate) const MODEL_PAGE_BYTES: usize = size_of::<ModelPage>().next_multiple_of(4096);
pub(crate) const MAILBOX_BYTES: usize = size_of::<MailboxPage>().next_multiple_of(4096);
pub(crate) const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(4096);
