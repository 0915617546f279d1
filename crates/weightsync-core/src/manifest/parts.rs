//! Checks whether the parts of a manifest make up a version: everything is written, nothing
//! twice.

use std::collections::HashSet;

use super::{MAX_RANGES, MAX_WRITERS, Part};
use crate::error::Error;
use crate::ids::WriterId;
use crate::layout::{self, ByteRange, Layout};

/// Checks the parts against the layout, in time `n log n` of the number of ranges.
pub(super) fn check(layout: &Layout, parts: &[Part]) -> Result<(), Error> {
    layout::within("writers of a version", parts.len(), MAX_WRITERS)?;
    // The sum is bounded too: what follows allocates and sorts all ranges together.
    let count = parts.iter().map(|part| part.ranges.len()).sum();
    layout::within("ranges in a manifest", count, MAX_RANGES)?;
    let mut writers = HashSet::with_capacity(parts.len());
    for &Part { writer, .. } in parts {
        if !writers.insert(writer) {
            return Err(Error::DuplicateWriter { writer });
        }
    }
    let mut ranges = Vec::with_capacity(count);
    for part in parts {
        for &range in &part.ranges {
            check_within(layout, part.writer, range)?;
            ranges.push((range, part.writer));
        }
    }
    // From here on every range ends within the layout, so no sum overflows.
    // By offset, so that overlaps and gaps show between neighbours.
    ranges.sort_unstable();
    // Overlaps before gaps: the walk over the gaps relies on ranges that do not overlap.
    check_disjoint(&ranges)?;
    check_cover(layout, &ranges)
}

/// The bytes of a tensor and of the padding that follows it.
pub(super) fn padded(layout: &Layout, index: usize) -> Result<ByteRange, Error> {
    let tensor = layout.tensors().get(index).ok_or(Error::NoSuchTensor {
        index,
        len: layout.len(),
    })?;
    Ok(ByteRange {
        offset: tensor.range.offset,
        len: tensor.range.len.next_multiple_of(layout::ALIGNMENT),
    })
}

fn check_within(layout: &Layout, writer: WriterId, range: ByteRange) -> Result<(), Error> {
    let end = range.offset.checked_add(range.len);
    if range.is_empty() || end.is_none_or(|end| end > layout.bytes()) {
        return Err(Error::RangeOutside {
            writer,
            range,
            bytes: layout.bytes(),
        });
    }
    Ok(())
}

fn check_disjoint(sorted: &[(ByteRange, WriterId)]) -> Result<(), Error> {
    for pair in sorted.windows(2) {
        let [(range, first), (next, second)] = [pair[0], pair[1]];
        if let Some(range) = range.intersection(next) {
            return Err(Error::PartsOverlap {
                first,
                second,
                range,
            });
        }
    }
    Ok(())
}

/// Walks tensors and ranges side by side; both are sorted and neither overlaps itself.
fn check_cover(layout: &Layout, sorted: &[(ByteRange, WriterId)]) -> Result<(), Error> {
    let mut ranges = sorted.iter().map(|&(range, _)| range).peekable();
    for tensor in layout.tensors() {
        let mut written_to = tensor.range.offset;
        while written_to < tensor.range.end() {
            // Ranges that end here cover earlier tensors or padding only. The others may reach over
            // several tensors.
            while ranges.next_if(|range| range.end() <= written_to).is_some() {}
            // The next part begins at or before `written_to`, or leaves a gap.
            let next = ranges.peek().copied();
            let gap_end = match next {
                Some(range) if range.offset <= written_to => {
                    written_to = range.end();
                    continue;
                }
                Some(range) => range.offset.min(tensor.range.end()),
                None => tensor.range.end(),
            };
            return Err(Error::PartsMissing {
                name: tensor.name.clone(),
                range: ByteRange {
                    offset: written_to,
                    len: gap_end - written_to,
                },
            });
        }
    }
    Ok(())
}
