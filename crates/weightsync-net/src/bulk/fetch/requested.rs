//! Which blocks a child has requested over a connection.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::wire::message::BlockRange;

/// What was requested over a connection, and which blocks of it have arrived.
pub(super) struct Requested<'a> {
    ranges: &'a [BlockRange],
    arrived: BTreeSet<usize>,
    /// A block that came had to wait for its digest.
    pub(super) digest_was_late: bool,
}

impl<'a> Requested<'a> {
    pub(super) fn new(ranges: &'a [BlockRange]) -> Self {
        Self {
            ranges,
            arrived: BTreeSet::new(),
            digest_was_late: false,
        }
    }

    pub(super) fn awaits(&self, index: usize) -> bool {
        has(self.ranges, index) && !self.arrived.contains(&index)
    }

    /// Notes that blocks arrive; false if the parent may not send them.
    ///
    /// A block that may come cannot always be taken: a fetch that was stopped while it had data to
    /// read may have taken it after the request. That fetch keeps the block or releases it, and it
    /// is skipped here. The parent did nothing wrong.
    pub(super) fn arrive(&mut self, blocks: Range<usize>) -> bool {
        let may_come = blocks.clone().all(|index| self.awaits(index));
        self.arrived.extend(blocks);
        may_come
    }
}

/// Whether ascending ranges contain an index.
fn has(ranges: &[BlockRange], index: usize) -> bool {
    // A range has at least one block, so the subtraction cannot wrap.
    let last = |range: &BlockRange| (range.first + (range.count - 1)) as usize;
    let at = ranges.partition_point(|range| last(range) < index);
    ranges
        .get(at)
        .is_some_and(|range| range.first as usize <= index)
}

/// Ascending indices as ranges.
pub(super) fn ranges(indices: &[usize]) -> Vec<BlockRange> {
    let mut ranges: Vec<BlockRange> = Vec::new();
    for &index in indices {
        match ranges.last_mut() {
            Some(last) if last.end() == Some(index as u32) => last.count += 1,
            _ => ranges.push(BlockRange {
                first: index as u32,
                count: 1,
            }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_become_ranges() {
        let range = |first, count| BlockRange { first, count };
        assert_eq!(ranges(&[]), []);
        assert_eq!(ranges(&[3]), [range(3, 1)]);
        assert_eq!(
            ranges(&[0, 1, 2, 5, 7, 8]),
            [range(0, 3), range(5, 1), range(7, 2)]
        );
        let some = ranges(&[0, 1, 2, 5, 7, 8]);
        let found: Vec<usize> = (0..11).filter(|index| has(&some, *index)).collect();
        assert_eq!(found, [0, 1, 2, 5, 7, 8]);
    }
}
