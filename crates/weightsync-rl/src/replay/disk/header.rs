//! What a directory says about the frames in it.

use std::ops::Range;

use super::crc64;

/// Distance in bytes between two slots: no write to one can tear another.
const SLOT: usize = 4096;

/// What a header may say last, in 8 words: the mark, its number, the five
/// numbers below, the checksum.
const WORDS: usize = 8;

/// `wsreplay`, and the version of the format.
const MARK: u64 = u64::from_le_bytes(*b"wsrepla\x01");

/// Length in bytes of a header file: two slots that [`HeaderSlots::Quick`] writes in
/// turn, and two of [`HeaderSlots::Synced`].
pub(super) const HEADER_BYTES: usize = 4 * SLOT;

/// Which slots a header is written to.
///
/// Between two syncs the kernel may write pages in any order, and a power cut
/// may tear both quick slots. So a header that is to survive that has slots
/// which nothing is written to before the last sync has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderSlots {
    Quick,
    Synced,
}

/// What is in the ring, as of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RingHeader {
    /// The oldest frame that nothing has begun to overwrite.
    pub oldest: u64,
    /// Frames with lower ids are whole.
    pub committed: u64,
    /// Frames with lower ids may be half written.
    pub claimed: u64,
    /// Frames with lower ids were synced.
    pub flushed: u64,
    /// No row was written for this id or a higher one. Said and synced before
    /// a row is, so it holds after a power cut, too.
    pub reserved: u64,
}

impl RingHeader {
    /// The frames that are there if no write was lost.
    pub fn live(&self) -> Range<u64> {
        self.oldest..self.committed
    }

    /// Whether these numbers can be those of a ring of this capacity.
    fn is_possible(&self, capacity: u64) -> bool {
        // The claim may go beyond what is committed, and never by more than the ring has rows.
        self.oldest <= self.committed
            && self.flushed <= self.committed
            && self.committed <= self.claimed
            && self.claimed <= self.reserved
            && self.claimed - self.oldest <= capacity
    }
}

/// Where to write the next header, and its bytes.
pub(super) struct HeaderWriter {
    /// How many headers were written.
    number: u64,
    quick: usize,
    synced: usize,
}

impl HeaderWriter {
    /// Reads a header file: the newest header in it, if there is one.
    pub fn read(file: &[u8; HEADER_BYTES], capacity: u64) -> Option<(Self, RingHeader)> {
        // A torn slot fails its checksum and does not count.
        let slots = file.chunks_exact(SLOT).map(|slot| parse(slot, capacity));
        let slots: Vec<_> = slots.collect();
        let (number, header) = slots.iter().flatten().max_by_key(|(number, _)| *number)?;
        // Of a pair, the next one to write is the one that is older or torn.
        let next = |pair: usize| {
            let number = |slot: usize| slots[slot].map_or(0, |(number, _)| number);
            // Overwriting the older one leaves the newer one whole if this write is torn.
            pair + usize::from(number(pair) > number(pair + 1))
        };
        let writer = Self {
            number: *number,
            quick: next(0),
            synced: next(2),
        };
        Some((writer, *header))
    }

    /// The first header of a file.
    pub fn new() -> Self {
        Self {
            number: 0,
            quick: 0,
            synced: 2,
        }
    }

    /// The offset in bytes and the bytes that say `header`.
    pub fn next(&mut self, header: &RingHeader, slots: HeaderSlots) -> (u64, [u8; WORDS * 8]) {
        self.number += 1;
        let slot = match slots {
            HeaderSlots::Quick => &mut self.quick,
            HeaderSlots::Synced => &mut self.synced,
        };
        let offset = *slot * SLOT;
        // The two slots of a pair are neighbours, and the pair begins at an even number.
        *slot ^= 1;
        let words = [
            MARK,
            self.number,
            header.oldest,
            header.committed,
            header.claimed,
            header.flushed,
            header.reserved,
        ];
        let mut bytes = [0; WORDS * 8];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let (said, checksum) = bytes.split_at_mut((WORDS - 1) * 8);
        // Over everything before it, so a torn write of 64 bytes is found.
        checksum.copy_from_slice(&crc64(&[said]).to_le_bytes());
        (offset as u64, bytes)
    }
}

/// The number and header of a slot; none if it is torn or was never written.
fn parse(slot: &[u8], capacity: u64) -> Option<(u64, RingHeader)> {
    let (words, _) = slot.as_chunks::<8>();
    let words: [u64; WORDS] = std::array::from_fn(|index| u64::from_le_bytes(words[index]));
    let [
        mark,
        number,
        oldest,
        committed,
        claimed,
        flushed,
        reserved,
        checksum,
    ] = words;
    let said = &slot[..(WORDS - 1) * 8];
    let header = RingHeader {
        oldest,
        committed,
        claimed,
        flushed,
        reserved,
    };
    // The numbers are checked as well: a checksum only shows that the bytes are those that were
    // written.
    let is_whole = mark == MARK && checksum == crc64(&[said]) && header.is_possible(capacity);
    is_whole.then_some((number, header))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(committed: u64) -> RingHeader {
        RingHeader {
            oldest: committed / 2,
            committed,
            claimed: committed + 1,
            flushed: 1,
            reserved: committed + 9,
        }
    }

    #[test]
    fn newest_whole_header_is_read_whatever_is_torn() {
        let mut file = [0; HEADER_BYTES];
        assert!(HeaderWriter::read(&file, 100).is_none());
        let mut writer = HeaderWriter::new();
        let mut before = None;
        let kinds = [
            HeaderSlots::Synced,
            HeaderSlots::Quick,
            HeaderSlots::Quick,
            HeaderSlots::Quick,
        ];
        for (committed, slots) in (10..60).zip(kinds.into_iter().cycle()) {
            let now = header(committed);
            let (offset, bytes) = writer.next(&now, slots);
            let place = offset as usize..offset as usize + bytes.len();
            for torn in 1..bytes.len() {
                let mut file = file;
                file[place.start..place.start + torn].copy_from_slice(&bytes[..torn]);
                let read = HeaderWriter::read(&file, 100).map(|(_, header)| header);
                let is_whole = file[place.clone()] == bytes;
                assert_eq!(read, if is_whole { Some(now) } else { before });
            }
            file[place].copy_from_slice(&bytes);
            let (again, read) = HeaderWriter::read(&file, 100).unwrap();
            assert_eq!(read, now);
            assert_eq!(again.number, writer.number);
            assert_eq!((again.quick, again.synced), (writer.quick, writer.synced));
            before = Some(now);
        }
    }

    #[test]
    fn header_is_refused_with_numbers_that_cannot_be() {
        let good = header(20);
        let cases = [
            RingHeader { oldest: 21, ..good },
            RingHeader {
                flushed: 21,
                ..good
            },
            RingHeader {
                claimed: 19,
                ..good
            },
            RingHeader {
                reserved: 20,
                ..good
            },
        ];
        assert!(good.is_possible(11));
        assert!(!good.is_possible(10));
        assert!(cases.iter().all(|case| !case.is_possible(100)));
    }
}
