//! The places of frames: a flat ring of rows, and columns of it in memory.
//!
//! A frame's id is its number in the order of writing, and never changes. It
//! lies in row `id % capacity`, so the frame that it overwrites is the oldest.

use std::{hint::black_box, io, ops::Range};

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

use crate::Error;

/// Frames that lie next to each other in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// The first row.
    pub row: usize,
    /// How many frames come before these in the list.
    pub at: usize,
    pub len: usize,
}

impl Stretch {
    /// Bytes of the ring's column, with this many bytes per frame.
    pub fn in_ring(self, bytes: usize) -> Range<usize> {
        self.row * bytes..(self.row + self.len) * bytes
    }

    /// Bytes of the list's column.
    pub fn in_list(self, bytes: usize) -> Range<usize> {
        self.at * bytes..(self.at + self.len) * bytes
    }
}

/// Cuts a list of ids into stretches, so that each is one copy.
pub(super) fn stretches(
    ids: impl IntoIterator<Item = u64, IntoIter: Clone>,
    capacity: usize,
) -> impl Iterator<Item = Stretch> + Clone {
    let mut rows = ids
        .into_iter()
        .map(move |id| (id % capacity as u64) as usize)
        .peekable();
    let mut at = 0;
    std::iter::from_fn(move || {
        let row = rows.next()?;
        let mut len = 1;
        // Rows that follow each other are one copy. The end of the ring ends a stretch, because the
        // next row is 0.
        while rows.next_if_eq(&(row + len)).is_some() {
            len += 1;
        }
        let stretch = Stretch { row, at, len };
        at += len;
        Some(stretch)
    })
}

/// The columns of a ring in this process's memory, each mapped on its own.
pub(super) struct MemoryRing {
    columns: Vec<MmapMut>,
    frame_bytes: Vec<usize>,
    capacity: usize,
}

impl MemoryRing {
    /// Room for `capacity` frames, whose bytes the caller has checked to be a
    /// number.
    ///
    /// # Errors
    /// [`Error::ReplaySettings`] where the system has no memory for them.
    pub fn new(frame_bytes: &[usize], capacity: usize) -> Result<Self, Error> {
        let columns = frame_bytes.iter().map(|bytes| zeroed(bytes * capacity));
        let columns = columns.collect::<Result<_, _>>();
        let bytes = frame_bytes.iter().sum::<usize>();
        Ok(Self {
            columns: columns.map_err(|reason| Error::ReplaySettings {
                reason: format!(
                    "there is no memory for {capacity} frames of {bytes} bytes ({reason}): keep \
                     fewer, or keep them in a directory"
                ),
            })?,
            frame_bytes: frame_bytes.to_vec(),
            capacity,
        })
    }

    /// Writes frames into the rows of their ids.
    pub fn write(&mut self, ids: Range<u64>, columns: &[&[u8]]) {
        // At most two stretches: the ids follow each other, and wrap at most once.
        for stretch in stretches(ids, self.capacity) {
            let sides = self.columns.iter_mut().zip(columns).zip(&self.frame_bytes);
            for ((to, from), &bytes) in sides {
                to[stretch.in_ring(bytes)].copy_from_slice(&from[stretch.in_list(bytes)]);
            }
        }
    }

    /// Copies one column of some frames out.
    pub fn read(
        &self,
        column: usize,
        ids: impl IntoIterator<Item = u64, IntoIter: Clone>,
        out: &mut [u8],
    ) {
        let (from, bytes) = (&self.columns[column], self.frame_bytes[column]);
        let stretches = stretches(ids, self.capacity);
        // Frames that were drawn are anywhere in memory. A copy waits for its first line, and
        // the next copy for it; the processor fetches lines that are only looked at all at once.
        let first_bytes = stretches.clone().map(|it| from[it.row * bytes]);
        black_box(first_bytes.fold(0, u8::wrapping_add));
        for stretch in stretches {
            out[stretch.in_list(bytes)].copy_from_slice(&from[stretch.in_ring(bytes)]);
        }
    }
}

/// Zeros, in huge pages where the kernel has some: frames that are drawn from all over the
/// memory would each need a small page's address looked up first.
fn zeroed(len: usize) -> io::Result<MmapMut> {
    // Anonymous memory costs nothing until it is written: a large buffer fills as frames come.
    let pages = MmapMut::map_anon(len)?;
    // A kernel without huge pages uses small ones.
    #[cfg(target_os = "linux")]
    let _ = pages.advise(Advice::HugePage);
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_join_rows_up_to_the_rings_end() {
        let cut = |ids: &[u64]| -> Vec<(usize, usize, usize)> {
            let found = stretches(ids.iter().copied(), 4);
            found.map(|it| (it.row, it.at, it.len)).collect()
        };
        assert_eq!(cut(&[]), []);
        assert_eq!(cut(&[5, 6, 7, 8, 9]), [(1, 0, 3), (0, 3, 2)]);
        assert_eq!(cut(&[2, 2, 0, 1]), [(2, 0, 1), (2, 1, 1), (0, 2, 2)]);
    }
}
