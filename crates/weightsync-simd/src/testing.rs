//! Shared by the kernels' tests: seeded noise, and a destination that notices stray writes.

/// `len` bytes of splitmix64 noise from `seed`.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(Noise(seed)) {
        *chunk = word.to_le_bytes();
    }
    bytes.truncate(len);
    bytes
}

/// An endless stream of 64-bit noise.
pub(crate) struct Noise(pub(crate) u64);

impl Iterator for Noise {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(word ^ (word >> 31))
    }
}

/// Writable bytes at a chosen offset from a 64-byte boundary, between two guards.
pub(crate) struct Arena {
    buffer: Vec<u8>,
    start: usize,
    len: usize,
}

const GUARD: usize = 128;
const PATTERN: u8 = 0xa5;

impl Arena {
    pub(crate) fn new(offset: usize, len: usize) -> Self {
        let buffer = vec![PATTERN; 64 + 2 * GUARD + offset + len];
        let start = buffer.as_ptr().align_offset(64) + GUARD + offset;
        Self { buffer, start, len }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes_mut().as_mut_ptr()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..][..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..][..self.len]
    }

    /// Whether the bytes before and after are as they were.
    pub(crate) fn guards_intact(&self) -> bool {
        let (before, rest) = self.buffer.split_at(self.start);
        before
            .iter()
            .chain(&rest[self.len..])
            .all(|&byte| byte == PATTERN)
    }
}
