//! Memory as slots are: from the start of a page.

use std::ops::{Deref, DerefMut};

const PAGE: usize = 4096;

/// Bytes that begin with a page.
#[derive(Default)]
pub struct Pages {
    room: Vec<u8>,
    first: usize,
    bytes: usize,
}

impl Pages {
    /// So many, faulted in.
    pub fn new(bytes: usize) -> Self {
        let room = vec![1; bytes + PAGE];
        let first = room.as_ptr().align_offset(PAGE);
        Self { room, first, bytes }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.room[self.first..][..self.bytes]
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.first..][..self.bytes]
    }
}
