//! What lies in the shared pages: the sender's header and each reader's
//! control page. Both are tables of atomics; there is no pointer in them.

use std::sync::atomic::{AtomicU64, Ordering};

use weightsync_core::record::{CommitRecord, RECORD_WORDS};
use weightsync_core::{Digest, Version};

use crate::error::Error;
use crate::map::Table;
use crate::protocol::{LiveWord, MAX_SLOTS, PinWord, SleepWord};

/// Alone on its cache line pair, so that one end's writes do not slow the
/// other's.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Line<T>(pub(crate) T);

/// The sender's page: it alone maps it writable.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) live: Line<LiveWord>,
    /// The sender waits for readers and wants its doorbell rung.
    pub(crate) sender: Line<SleepWord>,
    /// 1 once the sender has shut down in order.
    pub(crate) closed: Line<AtomicU64>,
    records: [Line<Record>; MAX_SLOTS],
}

/// One slot's commit record, and its digest, which comes later.
#[repr(C)]
#[derive(Debug)]
struct Record {
    words: [AtomicU64; RECORD_WORDS],
    digest: [AtomicU64; 2],
    /// The version the digest is of, 0 while there is none.
    digest_of: AtomicU64,
}

// SAFETY: atomics only; `repr(C)`; alignment 128.
unsafe impl Table for Header {}

impl Header {
    /// Writes the record of a slot that no reader holds.
    pub(crate) fn write_record(&self, slot: u8, record: &CommitRecord) {
        let place = &self.records[usize::from(slot)].0;
        place.digest_of.store(0, Ordering::Relaxed);
        for (to, word) in place.words.iter().zip(record.encode()) {
            to.store(word, Ordering::Relaxed);
        }
    }

    /// Flips a bit of a record.
    #[cfg(test)]
    pub(crate) fn spoil_record(&self, slot: u8, word: usize) {
        self.records[usize::from(slot)].0.words[word].fetch_xor(1 << 17, Ordering::Relaxed);
    }

    /// Reads and checks the record of a pinned slot.
    pub(crate) fn read_record(&self, slot: u8) -> Result<CommitRecord, Error> {
        let mut words = [0; RECORD_WORDS];
        for (word, from) in words
            .iter_mut()
            .zip(&self.records[usize::from(slot)].0.words)
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
        let place = &self.records[usize::from(slot)].0;
        let bytes = u128::from_le_bytes(digest.0);
        place.digest[0].store(bytes as u64, Ordering::Relaxed);
        place.digest[1].store((bytes >> 64) as u64, Ordering::Relaxed);
        place.digest_of.store(version.0, Ordering::Release);
    }

    /// The digest of the version in a pinned slot, if the sender has made it.
    pub(crate) fn read_digest(&self, slot: u8, version: Version) -> Option<Digest> {
        let place = &self.records[usize::from(slot)].0;
        if place.digest_of.load(Ordering::Acquire) != version.0 {
            return None;
        }
        let low = u128::from(place.digest[0].load(Ordering::Relaxed));
        let high = u128::from(place.digest[1].load(Ordering::Relaxed));
        Some(Digest((low | high << 64).to_le_bytes()))
    }
}

/// A reader's page: that reader alone maps it writable.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) pins: Line<PinWord>,
    pub(crate) sleep: Line<SleepWord>,
    /// The newest version the worker has loaded; 0 before the first.
    pub(crate) applied: Line<AtomicU64>,
    /// 1 once the reader has closed its end while snapshots of it live on: it
    /// is not waited for any more, its pins still count.
    pub(crate) left: Line<AtomicU64>,
}

// SAFETY: atomics only; `repr(C)`; alignment 128.
unsafe impl Table for Control {}

/// Lengths of the shared pages, in whole pages of 4 KiB.
pub(crate) const HEADER_BYTES: usize = size_of::<Header>().next_multiple_of(4096);
pub(crate) const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(4096);
