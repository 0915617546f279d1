//! Commit records: words in shared memory.

use weightsync_core::{CommitRecord, Epoch, LayoutId, RECORD_WORDS, RecordFault, Run, Version};
use weightsync_fuzz::fuzz;

const BYTES: usize = RECORD_WORDS * 8;

#[test]
fn commit_record() {
    fuzz!("commit_record", samples(), |bytes: &[u8]| {
        let mut record = [0; BYTES];
        let len = bytes.len().min(BYTES);
        record[..len].copy_from_slice(&bytes[..len]);
        let _ = decodes_to_itself(&record);

        // The checksum stops nearly every change; what it guards must bear any value too.
        let checksum = weightsync_simd::crc64(&record[..BYTES - 8]);
        record[BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
        assert_ne!(decodes_to_itself(&record), Err(RecordFault::Checksum));
    });
}

fn decodes_to_itself(bytes: &[u8; BYTES]) -> Result<CommitRecord, RecordFault> {
    let mut words = [0; RECORD_WORDS];
    for (word, part) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*part);
    }
    let decoded = CommitRecord::decode(&words);
    if let Ok(record) = &decoded {
        assert_eq!(record.encode(), words, "a record has one encoding");
        assert_ne!(record.version, Version(0), "version 0 is never published");
    }
    decoded
}

fn samples() -> impl Iterator<Item = Vec<u8>> {
    let record = CommitRecord {
        run: Run {
            epoch: Epoch(7),
            id: *b"0123456789abcdef",
        },
        version: Version(42),
        layout: LayoutId([9; 32]),
        bytes: 1 << 30,
        checksum_block: 1 << 20,
        checksum_table: 0xdead_beef,
    };
    let bare = CommitRecord {
        bytes: 0,
        checksum_block: 0,
        checksum_table: 0,
        ..record
    };
    [record, bare].into_iter().map(|record| {
        record
            .encode()
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    })
}
