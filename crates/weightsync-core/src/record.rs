//! The commit record: it makes the bytes of a slot a version.
//!
//! A reader trusts a slot only after its record decodes: the checksum is right, and the run,
//! layout and lengths are those of the reader's segment. In shared memory no bytes travel, so
//! readers verify only the record there. The bytes have checksums of their own if the caller
//! asked the sender for them.

use crate::{LayoutId, Run, Version};

/// How many little-endian 64-bit words a record takes.
pub const RECORD_WORDS: usize = 13;

const MAGIC: u64 = u64::from_le_bytes(*b"wsCMT\x01\0\0");

/// The record that a sender writes next to a finished version, before the version becomes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitRecord {
    /// The run the version belongs to.
    pub run: Run,
    /// The version's number in that run.
    pub version: Version,
    /// The layout the bytes follow.
    pub layout: LayoutId,
    /// Length of the image, in bytes.
    pub bytes: u64,
    /// Bytes covered by each chunk checksum; 0 if none were made.
    pub checksum_block: u64,
    /// CRC-64/NVME over the table of chunk checksums; 0 if none were made.
    pub checksum_table: u64,
}

/// The reason why a reader rejected a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordFault {
    /// The record does not begin like a record of this protocol version.
    Magic,
    /// Its checksum does not hold.
    Checksum,
    /// Its checksum holds, but it names version 0, which is never published.
    Version,
}

impl RecordFault {
    /// The fault in words.
    pub fn what(self) -> &'static str {
        match self {
            Self::Magic => "not a record of this protocol version",
            Self::Checksum => "its checksum is wrong",
            Self::Version => "it names version 0",
        }
    }
}

impl CommitRecord {
    /// The record as words, checksum last.
    pub fn encode(&self) -> [u64; RECORD_WORDS] {
        let mut words = [0; RECORD_WORDS];
        // The magic has the format's number in it, so a record of another version is no record.
        words[0] = MAGIC;
        words[1] = self.run.epoch.0;
        let id = u128::from_le_bytes(self.run.id);
        words[2] = id as u64;
        words[3] = (id >> 64) as u64;
        words[4] = self.version.0;
        for (word, part) in words[5..9].iter_mut().zip(self.layout.0.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*part);
        }
        words[9] = self.bytes;
        words[10] = self.checksum_block;
        words[11] = self.checksum_table;
        words[12] = checksum(&words);
        words
    }

    /// Reads a record back, checking it.
    ///
    /// # Errors
    ///
    /// The first check that failed.
    pub fn decode(words: &[u64; RECORD_WORDS]) -> Result<Self, RecordFault> {
        // A page of zeros, as before a slot's first version, ends here.
        if words[0] != MAGIC {
            return Err(RecordFault::Magic);
        }
        if words[12] != checksum(words) {
            return Err(RecordFault::Checksum);
        }
        if words[4] == 0 {
            return Err(RecordFault::Version);
        }
        let mut layout = [0; 32];
        for (part, word) in layout.as_chunks_mut::<8>().0.iter_mut().zip(&words[5..9]) {
            *part = word.to_le_bytes();
        }
        let id = u128::from(words[2]) | u128::from(words[3]) << 64;
        Ok(Self {
            run: Run {
                epoch: crate::Epoch(words[1]),
                id: id.to_le_bytes(),
            },
            version: Version(words[4]),
            layout: LayoutId(layout),
            bytes: words[9],
            checksum_block: words[10],
            checksum_table: words[11],
        })
    }
}

/// CRC-64/NVME of all words but the last.
fn checksum(words: &[u64; RECORD_WORDS]) -> u64 {
    let mut bytes = [0; (RECORD_WORDS - 1) * 8];
    for (part, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *part = word.to_le_bytes();
    }
    weightsync_simd::crc64(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> CommitRecord {
        CommitRecord {
            run: Run {
                epoch: crate::Epoch(7),
                id: *b"0123456789abcdef",
            },
            version: Version(42),
            layout: LayoutId([9; 32]),
            bytes: 1 << 30,
            checksum_block: 1 << 20,
            checksum_table: 0xdead_beef,
        }
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        assert_eq!(CommitRecord::decode(&record().encode()), Ok(record()));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let words = record().encode();
        for bit in 0..RECORD_WORDS * 64 {
            let mut wrong = words;
            wrong[bit / 64] ^= 1 << (bit % 64);
            assert!(CommitRecord::decode(&wrong).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn zeros_and_version_zero_are_refused() {
        assert_eq!(
            CommitRecord::decode(&[0; RECORD_WORDS]),
            Err(RecordFault::Magic)
        );
        let never = CommitRecord {
            version: Version(0),
            ..record()
        };
        assert_eq!(
            CommitRecord::decode(&never.encode()),
            Err(RecordFault::Version)
        );
    }
}
