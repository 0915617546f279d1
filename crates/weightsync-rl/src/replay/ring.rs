//! The places of frames: a flat ring of rows, and columns of it in memory.
//!
//! A frame's id is its number in the order of writing, and never changes. It
//! lies in row `id % capacity`, so the frame that it overwrites is the oldest.

use std::ops::Range;

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
    ids: impl IntoIterator<Item = u64>,
    capacity: usize,
) -> impl Iterator<Item = Stretch> {
    let mut rows = ids
        .into_iter()
        .map(move |id| (id % capacity as u64) as usize)
        .peekable();
    let mut at = 0;
    std::iter::from_fn(move || {
        let row = rows.next()?;
        let mut len = 1;
        while rows.next_if_eq(&(row + len)).is_some() {
            len += 1;
        }
        let stretch = Stretch { row, at, len };
        at += len;
        Some(stretch)
    })
}

/// The columns of a ring in this process's memory, one allocation each.
pub(super) struct Memory {
    columns: Vec<Vec<u8>>,
    frame_bytes: Vec<usize>,
    capacity: usize,
}

impl Memory {
    /// Room for `capacity` frames, whose bytes the caller has checked to be a
    /// number.
    ///
    /// # Errors
    /// [`Error::ReplaySettings`] where the system has no memory for them.
    pub fn new(frame_bytes: &[usize], capacity: usize) -> Result<Self, Error> {
        let columns = frame_bytes.iter().map(|bytes| zeroed(bytes * capacity));
        let columns = columns.collect::<Option<_>>();
        let bytes = frame_bytes.iter().sum::<usize>();
        Ok(Self {
            columns: columns.ok_or_else(|| Error::ReplaySettings {
                reason: format!(
                    "there is no memory for {capacity} frames of {bytes} bytes: keep fewer, or \
                     keep them in a directory"
                ),
            })?,
            frame_bytes: frame_bytes.to_vec(),
            capacity,
        })
    }

    /// Writes frames into the rows of their ids.
    pub fn write(&mut self, ids: Range<u64>, columns: &[&[u8]]) {
        for stretch in stretches(ids, self.capacity) {
            let sides = self.columns.iter_mut().zip(columns).zip(&self.frame_bytes);
            for ((to, from), &bytes) in sides {
                to[stretch.in_ring(bytes)].copy_from_slice(&from[stretch.in_list(bytes)]);
            }
        }
    }

    /// Copies one column of some frames out.
    pub fn read(&self, column: usize, ids: impl IntoIterator<Item = u64>, out: &mut [u8]) {
        let (from, bytes) = (&self.columns[column], self.frame_bytes[column]);
        for stretch in stretches(ids, self.capacity) {
            out[stretch.in_list(bytes)].copy_from_slice(&from[stretch.in_ring(bytes)]);
        }
    }
}

/// Zeros; `None` where there is no memory. `vec!` alone would end the process.
fn zeroed(len: usize) -> Option<Vec<u8>> {
    let mut probe = Vec::<u8>::new();
    probe.try_reserve_exact(len).ok()?;
    drop(std::hint::black_box(probe));
    Some(vec![0; len])
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
