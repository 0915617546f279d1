//! A ring of frames in files, which a crash cannot tear.
//!
//! Before frames overwrite others, the header says which rows they claim; when
//! they are written, it says that they are committed. So a process that is
//! killed leaves whole frames up to the last commit. A power cut may lose any
//! write since the last sync. Therefore each frame has a checksum, and frames
//! that may have been lost are checked when the directory is opened: the first
//! damaged one cuts the tail, and what newer frames had begun to overwrite is
//! cut from the front.

use std::{ops::Range, path::Path, sync::Arc};

use crc_fast::CrcAlgorithm::Crc64Nvme;

use super::{
    Schema,
    ring::{MemoryRing, stretches},
};
use crate::Error;

mod files;
mod header;
#[cfg(test)]
mod tests;

use files::{DirectoryContents, FileKind};
pub(super) use files::{Files, schema_of};
use header::{HeaderSlots, HeaderWriter, RingHeader};

/// Bytes of frames that are checked at a time.
const CHECKED_AT_ONCE: usize = 1 << 20;

/// Columns with no more bytes per frame are in memory, too: a call of the system
/// for each frame would take many times as long as the copy.
const SMALL: usize = 16;

/// Frames in a directory that this value has locked.
pub(super) struct Disk {
    files: Arc<Files>,
    frame_bytes: Vec<usize>,
    capacity: usize,
    /// What is committed of small columns; the others have no bytes here.
    small: MemoryRing,
    /// What the header file says.
    header: RingHeader,
    writer: HeaderWriter,
}

impl Disk {
    /// Opens a directory and cuts what a crash has torn.
    pub fn open(dir: &Path, schema: &Schema, capacity: usize) -> Result<Self, Error> {
        let (files, found) = Files::open(dir, schema, capacity)?;
        let (writer, header) = match found {
            // A new buffer says that it is empty before its schema says that it exists.
            DirectoryContents::New => (HeaderWriter::new(), RingHeader::default()),
            DirectoryContents::Rows(_) => {
                HeaderWriter::read(&files.read_header()?, capacity as u64)
                    .ok_or_else(|| files.damaged_header("it has no whole entry"))?
            }
        };
        let frame_bytes = schema.all_frame_bytes().to_vec();
        let small = frame_bytes.iter();
        // Columns that are not small get no bytes in memory.
        let small: Vec<usize> = small.map(|&it| if it <= SMALL { it } else { 0 }).collect();
        let mut disk = Self {
            files: Arc::new(files),
            small: MemoryRing::new(&small, capacity)?,
            frame_bytes,
            capacity,
            header,
            writer,
        };
        match found {
            DirectoryContents::New => {
                // Synced before the schema is: the schema makes the directory a buffer.
                disk.say(header, HeaderSlots::Synced)?;
                disk.files.describe(schema, capacity)?;
            }
            DirectoryContents::Rows(rows) => {
                // What was lost is cut before anything is read.
                disk.recover(rows)?;
                disk.load_small()?;
            }
        }
        Ok(disk)
    }

    /// The frames that are whole.
    pub fn live(&self) -> Range<u64> {
        self.header.live()
    }

    /// The files, to sync them while others read and write.
    pub fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Writes frames into the rows of their ids, which follow all others. On an
    /// error they do not count, but those that they replace are gone.
    pub fn write(&mut self, ids: Range<u64>, columns: &[&[u8]], sums: &[u64]) -> Result<(), Error> {
        // The header first: from here on a crash leaves the overwritten rows marked as taken.
        self.claim(&ids)?;
        // The stamp binds a row to its id, so an older frame in the row is not taken for this one.
        let stamps = ids.clone().zip(sums).map(|(id, &sum)| stamp(id, sum));
        let stamps: Vec<u8> = stamps.flat_map(u64::to_le_bytes).collect();
        for stretch in stretches(ids.clone(), self.capacity) {
            let parts = (0..).map(FileKind::Column).zip(columns.iter().copied());
            let sizes = self.frame_bytes.iter().copied();
            let columns = parts.zip(sizes);
            for ((part, from), bytes) in columns.chain([((FileKind::Stamps, &stamps[..]), 8)]) {
                let offset = stretch.in_ring(bytes).start as u64;
                self.files
                    .write(part, offset, &from[stretch.in_list(bytes)])?;
            }
        }
        let committed = RingHeader {
            committed: ids.end,
            ..self.header
        };
        // A process that is killed here leaves the frames whole. After a power cut the checksums
        // decide.
        self.say(committed, HeaderSlots::Quick)?;
        // Readers get small columns from memory, so this comes when the frames count.
        self.small.write(ids, columns);
        Ok(())
    }

    /// Copies one column of some frames out.
    pub fn read(
        &self,
        column: usize,
        ids: impl IntoIterator<Item = u64, IntoIter: Clone>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let bytes = self.frame_bytes[column];
        // Small columns are all in memory.
        if bytes <= SMALL {
            self.small.read(column, ids, out);
            return Ok(());
        }
        self.read_part(FileKind::Column(column), bytes, ids, out)
    }

    /// Frames below this id were synced.
    pub fn flushed(&mut self, end: u64) -> Result<(), Error> {
        let flushed = RingHeader {
            // Frames that were written during the sync are not below `end`.
            flushed: end.max(self.header.flushed),
            // The header is synced anyway, so the reservation shrinks to what is claimed: an
            // opening then checks fewer rows.
            reserved: self.header.claimed,
            ..self.header
        };
        if flushed == self.header {
            return Ok(());
        }
        // If this fails, it may be on the disk all the same: reserve again.
        self.header.reserved = flushed.reserved;
        self.say(flushed, HeaderSlots::Synced)
    }

    /// Says which rows are about to be written.
    fn claim(&mut self, ids: &Range<u64>) -> Result<(), Error> {
        let RingHeader {
            committed, claimed, ..
        } = self.header;
        // A write that failed may have left whole frames with these ids.
        // Their stamps would match if these ids were used again and the new write were lost.
        self.wipe(committed..claimed)?;
        let capacity = self.capacity as u64;
        let mut claim = RingHeader {
            // The rows of these frames are about to be overwritten, so the frames are gone from
            // here on.
            oldest: self.header.oldest.max(ids.end.saturating_sub(capacity)),
            claimed: ids.end,
            ..self.header
        };
        // The last synced header allows these ids, so no sync is needed.
        if ids.end <= claim.reserved {
            return self.say(claim, HeaderSlots::Quick);
        }
        // A sync for each eighth of the ring costs next to nothing.
        claim.reserved = ids.end + capacity / 8;
        self.say(claim, HeaderSlots::Synced)
    }

    fn say(&mut self, header: RingHeader, slots: HeaderSlots) -> Result<(), Error> {
        let (offset, bytes) = self.writer.next(&header, slots);
        self.files.write(FileKind::Header, offset, &bytes)?;
        // A write alone may reach the disk late or never.
        if slots == HeaderSlots::Synced {
            self.files.sync(FileKind::Header)?;
        }
        // Only when it is written: after an error the old header still holds.
        self.header = header;
        Ok(())
    }

    /// Makes sure that no row is taken for a frame with one of these ids.
    fn wipe(&self, ids: Range<u64>) -> Result<(), Error> {
        if ids.is_empty() {
            return Ok(());
        }
        for stretch in stretches(ids, self.capacity) {
            let place = stretch.in_ring(8);
            let zeros = vec![0; place.len()];
            self.files
                // Zero is no stamp.
                .write(FileKind::Stamps, place.start as u64, &zeros)?;
        }
        // Before any row is written for these ids again.
        self.files.sync(FileKind::Stamps)
    }

    /// Cuts what was lost. All files together have `rows` whole rows.
    fn recover(&mut self, rows: usize) -> Result<(), Error> {
        let capacity = self.capacity as u64;
        let reserved = self.header.reserved;
        let mut live = self.header.live();
        // A file was cut, so rows from there on are zeros.
        if rows < self.capacity {
            live = outside(live, rows as u64, capacity);
        }
        // Newer frames may lie in the rows of older ones, if only in some columns.
        let flushed = self.header.flushed;
        // Ids below this may have been overwritten by frames that the header did not get to
        // mention.
        let reached = reserved.saturating_sub(capacity).min(live.end);
        // Damage at the front is of frames that newer ones have overwritten: what follows the last
        // damaged one is whole.
        if let Some((_, last)) = self.damaged(live.start..reached.min(flushed))? {
            live.start = last + 1;
        }
        // Where no flushed frame is left, the newest ones are worth most.
        if live.start >= flushed
            && let Some((_, last)) = self.damaged(live.start..reached)?
        {
            live.start = last + 1;
        }
        // Frames after the last flush may be lost one by one. The first that is damaged ends what
        // is kept.
        let tail = flushed.max(live.start)..live.end;
        if let Some((first, _)) = self.damaged(tail)? {
            live.end = first;
        }
        let cut = RingHeader {
            oldest: live.start,
            committed: live.end,
            claimed: live.end,
            flushed: flushed.min(live.end),
            reserved: live.end,
        };
        if cut == self.header {
            return Ok(());
        }
        // Rows above the cut may carry stamps of ids that will be used again.
        self.wipe(live.end..reserved.min(live.start + capacity))?;
        self.say(cut, HeaderSlots::Synced)
    }

    /// Reads the small columns into memory.
    fn load_small(&mut self) -> Result<(), Error> {
        let live = self.live();
        let frames = (live.end - live.start) as usize;
        let mut columns = vec![Vec::new(); self.frame_bytes.len()];
        for (column, &bytes) in self.frame_bytes.iter().enumerate() {
            if bytes <= SMALL {
                columns[column].resize(frames * bytes, 0);
                let out = &mut columns[column];
                self.read_part(FileKind::Column(column), bytes, live.clone(), out)?;
            }
        }
        let columns: Vec<&[u8]> = columns.iter().map(Vec::as_slice).collect();
        self.small.write(live, &columns);
        Ok(())
    }

    /// The first and the last of these frames whose checksum is wrong.
    fn damaged(&self, mut ids: Range<u64>) -> Result<Option<(u64, u64)>, Error> {
        let mut found: Option<(u64, u64)> = None;
        let frame: usize = self.frame_bytes.iter().sum();
        // In pieces, so that the memory does not depend on the size of the ring.
        let at_once = (CHECKED_AT_ONCE / frame).max(1) as u64;
        while !ids.is_empty() {
            let some = ids.start..ids.end.min(ids.start + at_once);
            ids.start = some.end;
            let frames = (some.end - some.start) as usize;
            let mut columns = Vec::with_capacity(self.frame_bytes.len());
            for (column, bytes) in self.frame_bytes.iter().enumerate() {
                let mut read = vec![0; frames * bytes];
                self.read_part(FileKind::Column(column), *bytes, some.clone(), &mut read)?;
                columns.push(read);
            }
            let mut stamps = vec![0; frames * 8];
            self.read_part(FileKind::Stamps, 8, some.clone(), &mut stamps)?;
            let columns: Vec<&[u8]> = columns.iter().map(Vec::as_slice).collect();
            let sums = sums(&columns, &self.frame_bytes, frames);
            let (stamps, _) = stamps.as_chunks::<8>();
            // A checksum that fits with another id's stamp is another frame.
            for ((id, sum), got) in some.zip(sums).zip(stamps) {
                if stamp(id, sum) != u64::from_le_bytes(*got) {
                    let first = found.map_or(id, |(first, _)| first);
                    found = Some((first, id));
                }
            }
        }
        Ok(found)
    }

    fn read_part(
        &self,
        part: FileKind,
        bytes: usize,
        ids: impl IntoIterator<Item = u64, IntoIter: Clone>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        for stretch in stretches(ids, self.capacity) {
            let offset = stretch.in_ring(bytes).start as u64;
            self.files
                .read(part, offset, &mut out[stretch.in_list(bytes)])?;
        }
        Ok(())
    }
}

/// A checksum of each frame over its columns, without its id.
pub(super) fn sums(columns: &[&[u8]], frame_bytes: &[usize], frames: usize) -> Vec<u64> {
    let mut parts = vec![&[][..]; columns.len()];
    let sum = |frame: usize| {
        for ((part, column), bytes) in parts.iter_mut().zip(columns).zip(frame_bytes) {
            *part = &column[frame * bytes..(frame + 1) * bytes];
        }
        crc64(&parts)
    };
    (0..frames).map(sum).collect()
}

/// What the row of a whole frame is stamped with. The id is part of it, so that
/// an older frame in the same row does not pass for a newer one; 0 is no stamp.
fn stamp(id: u64, sum: u64) -> u64 {
    // The mixer of SplitMix64: each id gives another number.
    let mut mixed = id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Zero is no stamp, so a sum that would be 0 becomes 1.
    (sum ^ mixed ^ (mixed >> 31)).max(1)
}

/// The CRC-64/NVME of parts laid end to end.
fn crc64(parts: &[&[u8]]) -> u64 {
    let mut digest = crc_fast::Digest::new(Crc64Nvme);
    for part in parts {
        digest.update(part);
    }
    digest.finalize()
}

/// The frames up to the first that lies in a row from `rows` on, where the
/// oldest ones that do are left out.
fn outside(live: Range<u64>, rows: u64, capacity: u64) -> Range<u64> {
    // The id of row 0 in the lap of the oldest frame.
    let lap = live.start / capacity * capacity;
    let start = match live.start - lap < rows {
        true => live.start,
        // The oldest frames lie in the part that was cut, up to the end of their lap.
        false => lap + capacity,
    };
    let start = start.min(live.end);
    // The first id of the remaining lap that lies in the cut part.
    let lost = start / capacity * capacity + rows;
    start..live.end.min(lost.max(start))
}
