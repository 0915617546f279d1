//! A pinned, read-only view of one whole version.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use weightsync_core::digest::Digester;
use weightsync_core::record::CommitRecord;
use weightsync_core::{Digest, Layout, Run, Version};

use crate::error::Error;
use crate::model::SegmentModel;
use crate::pins::{Pin, PinBook, PinOwner};
use crate::private::{PrivateMapping, SweepsOf};
use crate::slot::{Slot, Written};
use crate::spans::CHECKSUM_BLOCK;

/// One whole version, for as long as it is held.
///
/// **Guarantee.** The bytes do not change while a snapshot (or a clone of it)
/// lives, whatever the sender does, and also after the sender's death. Holding
/// one costs the segment one slot.
///
/// Cloning is cheap and shares the hold. The last clone to go gives the slot
/// back. A process that forks does not pass its snapshots on: in the child the
/// memory is not mapped.
#[derive(Clone, Debug)]
pub struct Snapshot {
    slot: Arc<Slot>,
    record: CommitRecord,
    model: Arc<SegmentModel>,
    pin: Arc<Pin>,
}

impl Snapshot {
    /// Checks the commit record of a slot just pinned.
    pub(crate) fn new(
        pin: Pin,
        slot: Arc<Slot>,
        model: Arc<SegmentModel>,
        run: Run,
    ) -> Result<Self, Error> {
        let number = pin.slot;
        // The slot is pinned, so neither its record nor its bytes change from here on. An early
        // return drops the pin.
        let record = model.page().read_commit(number)?;
        let corrupt = |what| Err(Error::CorruptCommit { slot: number, what });
        if record.run != run {
            return corrupt("it belongs to another run");
        }
        // A set record and a commit record that disagree: the bytes may be of either version.
        if record.version != pin.version {
            return corrupt("it is not of the version that the set names");
        }
        if record.layout != model.layout.id() {
            return corrupt("it names another layout");
        }
        // `bytes` trusts this length, so it is compared with what the mapping was sized by.
        if record.bytes != model.layout.bytes() {
            return corrupt("its length is not the layout's");
        }
        if record.checksum_block != 0 && record.checksum_block != CHECKSUM_BLOCK as u64 {
            return corrupt("its checksum blocks have an unknown size");
        }
        Ok(Self {
            slot,
            record,
            model,
            pin: Arc::new(pin),
        })
    }

    /// The version's number in its run.
    pub fn version(&self) -> Version {
        self.record.version
    }

    /// The run the version belongs to.
    pub fn run(&self) -> Run {
        self.record.run
    }

    /// The index of its model in the segment.
    pub fn model(&self) -> usize {
        self.model.index
    }

    /// Names, dtypes, shapes and offsets of the tensors.
    pub fn layout(&self) -> &Layout {
        &self.model.layout
    }

    /// All tensors at their offsets in the layout, with padding.
    ///
    /// # Panics
    ///
    /// In a forked child, where the memory is not mapped.
    pub fn bytes(&self) -> &[u8] {
        self.check_process();
        let len = self.record.bytes as usize;
        debug_assert!(len <= self.slot.map.len());
        // SAFETY: the slot is pinned for as long as `self` lives, so the sender
        // does not write it (`protocol`), the mapping lives as long as `self`
        // and covers the image (the segment's slot size is checked at attach,
        // the record's length in `new`).
        unsafe { std::slice::from_raw_parts(self.slot.map.as_ptr(), len) }
    }

    /// One tensor's bytes, by its index in the layout: contiguous, row-major,
    /// little-endian.
    ///
    /// # Panics
    ///
    /// If the layout has no such index.
    pub fn tensor_bytes(&self, index: usize) -> &[u8] {
        let range = self.model.layout.tensors()[index].range;
        &self.bytes()[range.offset as usize..][..range.len as usize]
    }

    /// The same bytes, mapped so that this process alone can write them in place; see
    /// [`PrivateMapping`].
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the memory cannot be mapped, [`Error::Forked`] in a forked child.
    pub fn private(&self) -> Result<PrivateMapping, Error> {
        self.lend(None)
    }

    /// The same. If the bytes of some tensors have changed when the version's last view is dropped,
    /// `written` is called with their indices. If a version has several views, the function of the
    /// newest is called.
    ///
    /// The thread that drops the last view calls it, or the one that watches the sender, so it must
    /// not block.
    ///
    /// # Errors
    ///
    /// As [`private`](Self::private).
    pub fn private_with(
        &self,
        written: impl FnOnce(&[usize]) + Send + 'static,
    ) -> Result<PrivateMapping, Error> {
        self.lend(Some(Box::new(written)))
    }

    fn lend(&self, written: Option<Written>) -> Result<PrivateMapping, Error> {
        let map = self.slot.lend(self, written)?;
        Ok(PrivateMapping::new(self.clone(), map))
    }

    /// The digest that the sender has made of this version, if any.
    pub fn published_digest(&self) -> Option<Digest> {
        self.check_process();
        let page = self.model.page();
        page.read_digest(self.pin.slot, self.version())
    }

    /// Computes the digest of the bytes as this process sees them, in one pass.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.model.layout, self.bytes())
            .expect("a snapshot's bytes are its layout's image")
    }

    /// Like [`Snapshot::digest`], but asks `give_up` after each tensor and after every few
    /// megabytes of a large one.
    pub fn digest_unless(&self, give_up: impl Fn() -> bool) -> Option<Digest> {
        const PART: usize = 4 << 20;
        // In parts, because a large tensor takes seconds, and the caller may have to end.
        let mut digester = Digester::new(self.record.bytes);
        for (index, tensor) in self.model.layout.tensors().iter().enumerate() {
            for (part, bytes) in self.tensor_bytes(index).chunks(PART).enumerate() {
                let offset = tensor.range.offset + (part * PART) as u64;
                digester
                    .tensor(offset, bytes)
                    .expect("tensors lie in the image, aligned");
                if give_up() {
                    return None;
                }
            }
        }
        Some(digester.finish().expect("every part was fed once"))
    }

    /// Compares the bytes with the block checksums that the sender made in its copy pass. False if
    /// it made none.
    ///
    /// # Errors
    ///
    /// [`Error::ChecksumMismatch`] names the first block that differs; [`Error::CorruptCommit`]
    /// means that the checksums themselves are damaged.
    pub fn verify_checksums(&self) -> Result<bool, Error> {
        let Some(sums) = self.sums()? else {
            return Ok(false);
        };
        for (block, (bytes, sum)) in self.bytes().chunks(CHECKSUM_BLOCK).zip(sums).enumerate() {
            if weightsync_simd::crc64(bytes) != u64::from_le_bytes(*sum) {
                return Err(Error::ChecksumMismatch {
                    version: self.version(),
                    block,
                });
            }
        }
        Ok(true)
    }

    /// The CRC-64/NVME of every [`CHECKSUM_BLOCK`] bytes of the image, which the sender made in its
    /// copy pass. `None` if it made none.
    ///
    /// # Errors
    ///
    /// [`Error::CorruptCommit`] if the checksums are damaged.
    pub fn block_sums(&self) -> Result<Option<Vec<u64>>, Error> {
        let sums = self.sums()?;
        let words = |sums: &[[u8; 8]]| sums.iter().map(|sum| u64::from_le_bytes(*sum)).collect();
        Ok(sums.map(words))
    }

    /// The checksums, once they have been checked themselves.
    fn sums(&self) -> Result<Option<&[[u8; 8]]>, Error> {
        if self.record.checksum_block == 0 {
            return Ok(None);
        }
        let shape = self.model.shape();
        self.check_process();
        // SAFETY: the table lies behind the image in the same slot, whose size
        // covers both (checked at attach).
        let start = unsafe { self.slot.map.as_ptr().add(shape.table_offset()) };
        // SAFETY: as in `bytes`.
        let table = unsafe { std::slice::from_raw_parts(start, shape.table_bytes()) };
        // Checked first: a damaged table would blame blocks that are whole.
        if weightsync_simd::crc64(table) != self.record.checksum_table {
            let slot = self.pin.slot;
            return Err(Error::CorruptCommit {
                slot,
                what: "its checksum table is wrong",
            });
        }
        Ok(Some(table.as_chunks::<8>().0))
    }

    /// The segment's pins, and the number of the slot.
    pub(crate) fn pinned_slot(&self) -> (&Arc<PinBook>, u8) {
        (&self.pin.book, self.pin.slot)
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.slot
    }

    /// The list of slots that are swept once they have no view.
    pub(crate) fn sweeps(&self) -> SweepsOf {
        self.pin.book.sweeps.get().cloned().unwrap_or_default()
    }

    /// A panic with the reason is better than a fault without one.
    fn check_process(&self) {
        if let Err(error) = self.slot.map.usable() {
            panic!("{error}");
        }
    }

    /// Stores a digest next to the version, for readers to find. False unless the sender itself
    /// took this snapshot: no other process writes the model's page, not even a forked child of the
    /// sender.
    pub fn publish_digest(&self, digest: Digest) -> bool {
        // A reader maps the model's page read-only: its store would be a fault.
        let own =
            matches!(self.pin.book.owner, PinOwner::Sender(_)) && self.slot.map.usable().is_ok();
        if own {
            let page = self.model.page();
            page.write_digest(self.pin.slot, self.version(), digest);
        }
        own
    }
}
