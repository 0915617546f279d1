//! Damage to commit records in shared memory, by somebody who writes where the
//! sender does: the memory files themselves are sealed against everybody else.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use weightsync_conformance::Record;
use weightsync_core::record::{CommitRecord, RECORD_WORDS};

/// Flips a bit of a version's commit record in this process's memory, of another
/// word for each version; what its error has to name.
pub fn spoil(record: &Record) -> io::Result<String> {
    let memory = File::options()
        .read(true)
        .write(true)
        .open("/proc/self/mem")?;
    let word = record.version.0 % RECORD_WORDS as u64;
    for (start, end) in commit_pages()? {
        for at in (start..end).step_by(128) {
            let mut bytes = [0; RECORD_WORDS * 8];
            memory.read_exact_at(&mut bytes, at)?;
            let words = bytes.as_chunks::<8>().0;
            let words = std::array::from_fn(|word| u64::from_le_bytes(words[word]));
            let found = CommitRecord::decode(&words);
            if found.is_ok_and(|found| found.version == record.version) {
                let flipped = bytes[word as usize * 8 + 1] ^ 0x20;
                memory.write_all_at(&[flipped], at + word * 8 + 1)?;
                return Ok("commit record".into());
            }
        }
    }
    Err(io::Error::other("no commit record of that version"))
}

/// Where this process has its own pages of commit records.
fn commit_pages() -> io::Result<Vec<(u64, u64)>> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let own = maps
        .lines()
        .filter(|line| line.contains(" rw-s ") && line.contains("/memfd:weightsync-commits"));
    let ranges = own.filter_map(|line| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).ok());
        Some((start?, end?))
    });
    Ok(ranges.collect())
}
