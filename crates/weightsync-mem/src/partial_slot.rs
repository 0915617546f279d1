//! A slot for one version that arrives in pieces.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use weightsync_core::record::CommitRecord;
use weightsync_core::{Layout, Version};

use crate::error::Error;
use crate::registry::SharedRegistry;
use crate::set::{ModelSet, SetEntry};
use crate::slot::{Note, Slot};
use crate::snapshot::Snapshot;

/// Missing, and nothing was written in its place.
const MISSING: u8 = 0;
const TAKEN: u8 = 1;
const KEPT: u8 = 2;
/// Missing, and its place may hold a part of it.
const SPOILED: u8 = 3;

/// A slot into which a version arrives in pieces, from any number of threads.
///
/// **Guarantee.** No worker sees any of it before it is [committed](Self::commit), which requires
/// that every piece is kept. A kept piece can be [read](Self::read) at once, and does not change
/// while this lives. If it is dropped before the commit, everything stays as it was.
///
/// The slot may hold an older version from before: a piece that was not written yet has the bytes
/// of [that version](BlockWrite::base).
pub struct PartialSlot {
    shared: Arc<SharedRegistry>,
    model: usize,
    version: Version,
    slot: u8,
    file: Arc<Slot>,
    piece_bytes: usize,
    /// What the slot held when it was lent.
    before: Note,
    /// The state of each piece: missing, taken to be written, or kept.
    pieces: Vec<AtomicU8>,
    /// How many pieces are not kept.
    missing: AtomicUsize,
    committed: OnceLock<Snapshot>,
}

/// One piece of a [`PartialSlot`], or several consecutive ones, for the thread that took it to
/// write. Dropped without [`keep`](Self::keep), the piece is missing again.
#[derive(Debug)]
pub struct BlockWrite {
    partial_slot: Arc<PartialSlot>,
    indices: Range<usize>,
    kept: bool,
    /// When the piece was taken, nothing had been written in it since the slot was lent.
    untouched: bool,
    written: bool,
}

impl PartialSlot {
    /// A version that arrives in a lent slot.
    ///
    /// # Panics
    ///
    /// If pieces have no bytes.
    pub(crate) fn new(
        shared: Arc<SharedRegistry>,
        (model, version): (usize, Version),
        (slot, file): (u8, Arc<Slot>),
        piece_bytes: usize,
    ) -> Self {
        let bytes = shared.models[model].model.layout.bytes() as usize;
        let count = bytes.div_ceil(piece_bytes);
        Self {
            shared,
            model,
            version,
            slot,
            piece_bytes,
            // From here on the slot's bytes may change, so the note of what it holds is taken.
            before: file.let_go(),
            pieces: (0..count).map(|_| AtomicU8::new(MISSING)).collect(),
            missing: AtomicUsize::new(count),
            file,
            committed: OnceLock::new(),
        }
    }

    /// The model's index in the segment.
    pub fn model(&self) -> usize {
        self.model
    }

    /// The version that arrives here.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Names, dtypes, shapes and offsets of the tensors.
    pub fn layout(&self) -> &Layout {
        &self.shared.models[self.model].model.layout
    }

    /// The older version that the slot held when it was lent, if it held one.
    pub fn base(&self) -> Option<Version> {
        let base = self.before.version;
        (!base.is_none()).then_some(base)
    }

    /// How many pieces there are.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// The pieces that are neither taken nor kept, lowest first.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        let states = self.pieces.iter().enumerate();
        states
            .filter(|(_, state)| matches!(state.load(Ordering::Acquire), MISSING | SPOILED))
            .map(|(index, _)| index)
    }

    /// How many pieces are kept.
    pub fn kept(&self) -> usize {
        self.pieces.len() - self.missing.load(Ordering::Acquire)
    }

    /// Whether every piece is kept.
    pub fn is_whole(&self) -> bool {
        self.missing.load(Ordering::Acquire) == 0
    }

    /// The byte range of a piece in the image.
    ///
    /// # Panics
    ///
    /// If there is no such piece.
    pub fn range(&self, index: usize) -> Range<usize> {
        assert!(
            index < self.pieces.len(),
            "piece {index} of {}",
            self.pieces.len()
        );
        let start = index * self.piece_bytes;
        start..(start + self.piece_bytes).min(self.layout().bytes() as usize)
    }

    /// Takes a missing piece to write it; `None` if it is not missing or does not exist.
    pub fn take(self: &Arc<Self>, index: usize) -> Option<BlockWrite> {
        self.take_all(index..index.checked_add(1)?)
    }

    /// Takes consecutive pieces to write them as one; `None` if one of them is not missing or does
    /// not exist.
    pub fn take_all(self: &Arc<Self>, indices: Range<usize>) -> Option<BlockWrite> {
        let states = self.pieces.get(indices.clone())?;
        if states.is_empty() {
            return None;
        }
        // If a later piece is not free, dropping this gives the earlier ones back.
        let mut taken = BlockWrite {
            partial_slot: self.clone(),
            indices: indices.start..indices.start,
            kept: false,
            untouched: true,
            written: false,
        };
        for state in states {
            let take = |was| {
                // Acquire: what another thread wrote here before it gave the piece back is visible
                // to this one.
                let order = (Ordering::Acquire, Ordering::Relaxed);
                state.compare_exchange(was, TAKEN, order.0, order.1).is_ok()
            };
            if !take(MISSING) {
                if !take(SPOILED) {
                    // Nothing was written in the pieces taken before, so they are missing again.
                    return None;
                }
                // One spoiled piece is enough: the bytes are not the base's any more.
                taken.untouched = false;
            }
            taken.indices.end += 1;
        }
        Some(taken)
    }

    /// The bytes of a piece, if it is kept.
    pub fn read(&self, index: usize) -> Option<&[u8]> {
        if self.pieces.get(index)?.load(Ordering::Acquire) != KEPT {
            return None;
        }
        let range = self.range(index);
        let start = self.at(&range);
        // SAFETY: the range lies in the mapping (`at`), which lives as long as
        // `self`. A kept piece is not written again: nobody can take it, and the
        // slot is lent to `self`, or pinned by the snapshot in `committed`,
        // for as long as `self` lives.
        Some(unsafe { std::slice::from_raw_parts(start, range.len()) })
    }

    /// Makes this a version of the segment, which workers can be notified of. A second call returns
    /// the same version.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] if a piece is missing, [`Error::SenderClosed`] after the end,
    /// [`Error::Forked`] in a forked child.
    pub fn commit(&self) -> Result<Snapshot, Error> {
        // Several threads may see that the last piece has come.
        if let Some(committed) = self.committed.get() {
            return Ok(committed.clone());
        }
        if !self.is_whole() {
            return Err(Error::BadOption {
                option: "a version to commit",
                expected: "whole",
                got: format!("{} of {} pieces", self.kept(), self.pieces()),
            });
        }
        let shared = &self.shared;
        shared.open()?;
        let mut state = shared.state();
        // Another thread may have committed it meanwhile.
        if let Some(committed) = self.committed.get() {
            return Ok(committed.clone());
        }
        let model = &shared.models[self.model].model;
        let record = CommitRecord {
            run: shared.run,
            version: self.version,
            layout: model.layout.id(),
            bytes: model.layout.bytes(),
            checksum_block: 0,
            checksum_table: 0,
        };
        // Still lent, so no reader looks at the record while it is written.
        model.page().write_commit(self.slot, &record);
        let mut set = ModelSet::EMPTY;
        let (slot, version) = (self.slot, self.version);
        set.put(self.model, SetEntry { slot, version });
        // Pinned before the loan ends. Until a mailbox names the version, this pin alone keeps the
        // slot.
        let held = shared.hold(&state, self.model, &set)?;
        let held = held.ok_or(Error::SenderClosed)?;
        state.plan.keep(self.model, slot, version);
        shared.make_ahead(&mut state);
        // The next version in this slot can then be made from these bytes, by a delta.
        self.file.note(version, self.before);
        // Under the lock, so that no thread commits it a second time.
        let committed = self.committed.get_or_init(|| held).clone();
        drop(state);
        Ok(committed)
    }

    fn at(&self, range: &Range<usize>) -> *mut u8 {
        let map = &self.file.map;
        // A panic with the reason is better than a fault without one.
        if let Err(error) = map.usable() {
            panic!("{error}");
        }
        assert!(range.start <= range.end && range.end <= map.len());
        // SAFETY: the range lies in the mapping (asserted).
        unsafe { map.as_ptr().add(range.start) }
    }
}

impl Drop for PartialSlot {
    fn drop(&mut self) {
        // In a forked child the lock may be held by a thread that is not there.
        if self.committed.get().is_none() && self.shared.header.map.usable().is_ok() {
            let mut states = self.pieces.iter();
            // Nothing was written, so the slot still holds the version from before.
            if states.all(|state| state.load(Ordering::Acquire) == MISSING) {
                self.file.note(self.before.version, self.before);
            }
            self.shared.state().plan.give_back(self.model, self.slot);
        }
    }
}

impl fmt::Debug for PartialSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartialSlot")
            .field("model", &self.model)
            .field("version", &self.version)
            .field("kept", &self.kept())
            .field("pieces", &self.pieces())
            .finish_non_exhaustive()
    }
}

impl BlockWrite {
    /// The indices of the pieces.
    pub fn indices(&self) -> Range<usize> {
        self.indices.clone()
    }

    /// The older version whose bytes are still here, if nothing was written since the slot was
    /// lent.
    pub fn base(&self) -> Option<Version> {
        let is_there = self.untouched && !self.written;
        self.partial_slot.base().filter(|_| is_there)
    }

    /// Marks the pieces as written and checked: from here on they can be read.
    pub fn keep(mut self) {
        self.kept = true;
        // The pieces before the count: a thread that finds none missing can read each.
        for state in &self.partial_slot.pieces[self.indices.clone()] {
            state.store(KEPT, Ordering::Release);
        }
        let count = self.indices.len();
        self.partial_slot.missing.fetch_sub(count, Ordering::AcqRel);
    }

    /// The byte range in the image.
    pub fn range(&self) -> Range<usize> {
        // At least one piece is taken, and the last one of an image may be shorter.
        let (first, last) = (self.indices.start, self.indices.end - 1);
        self.partial_slot.range(first).start..self.partial_slot.range(last).end
    }
}

impl Deref for BlockWrite {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let range = self.range();
        let start = self.partial_slot.at(&range);
        // SAFETY: the range lies in the mapping; its pieces are taken by this value
        // alone (`PartialSlot::take_all`), pieces do not overlap, and the slot is lent to the
        // `PartialSlot`, so that no reader reads it.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }
}

impl DerefMut for BlockWrite {
    fn deref_mut(&mut self) -> &mut [u8] {
        // Before any byte changes: a caller that panics or gives up leaves the piece spoiled.
        self.written = true;
        let range = self.range();
        let start = self.partial_slot.at(&range);
        // SAFETY: as in `deref`; a relay's own mapping is writable, and `&mut
        // self` is the only way to these pieces.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

impl Drop for BlockWrite {
    fn drop(&mut self) {
        if !self.kept {
            // A spoiled piece is fetched again, but no delta is applied to what is in it.
            let left = match self.untouched && !self.written {
                true => MISSING,
                false => SPOILED,
            };
            for state in &self.partial_slot.pieces[self.indices.clone()] {
                state.store(left, Ordering::Release);
            }
        }
    }
}
