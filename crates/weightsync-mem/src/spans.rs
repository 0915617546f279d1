//! Cuts an image into spans, for checksums and for several copying threads.

use std::ops::Range;

use weightsync_core::Layout;

/// How many bytes of an image one checksum covers; the last may cover fewer. Small enough to be
/// checksummed while it is in the cache, large enough that the table of checksums costs nearly
/// nothing.
pub const CHECKSUM_BLOCK: usize = 1 << 20;

/// A range of the image: a part of one large tensor, or several small ones with the padding between
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// The byte range in the image, within one block of a checksum.
    pub(crate) image: Range<usize>,
    /// The tensors in it; more than one only if it holds them whole.
    pub(crate) tensors: Range<usize>,
}

/// All spans of a layout, in order. Together they cover every tensor's bytes
/// exactly once.
#[derive(Debug)]
pub(crate) struct Spans {
    spans: Vec<Span>,
    joined: Vec<Span>,
}

/// The parts of a slot: the image, then the table of checksums. Cheap to compute, so a reader
/// compares a slot with it before it uses a size that a layout claims.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotShape {
    image_bytes: usize,
}

impl Spans {
    pub(crate) fn new(layout: &Layout) -> Self {
        let mut spans: Vec<Span> = Vec::new();
        let mut open: Option<Span> = None;
        for (index, tensor) in layout.tensors().iter().enumerate() {
            let (start, len) = (tensor.range.offset as usize, tensor.range.len as usize);
            let end = start + len;
            let block = start / CHECKSUM_BLOCK;
            // The tensor does not fit into what is left of its block: it is cut at each border.
            if end > (block + 1) * CHECKSUM_BLOCK {
                // What was collected comes before it, as spans are in order.
                spans.extend(open.take());
                let mut at = start;
                while at < end {
                    let to = end.min((at / CHECKSUM_BLOCK + 1) * CHECKSUM_BLOCK);
                    spans.push(Span {
                        image: at..to,
                        tensors: index..index + 1,
                    });
                    at = to;
                }
                continue;
            }
            match &mut open {
                // A small tensor joins those before it in the block, with the padding between them.
                Some(span) if span.image.start / CHECKSUM_BLOCK == block => {
                    span.image.end = end;
                    span.tensors.end = index + 1;
                }
                _ => {
                    let next = Span {
                        image: start..end,
                        tensors: index..index + 1,
                    };
                    spans.extend(open.replace(next));
                }
            }
        }
        spans.extend(open);
        Self {
            joined: joined(&spans),
            spans,
        }
    }

    pub(crate) fn all(&self) -> &[Span] {
        &self.spans
    }

    /// The spans with the parts of a tensor joined, up to a few megabytes: large enough to be
    /// copied at full speed, small enough to be divided among threads.
    pub(crate) fn joined(&self) -> &[Span] {
        &self.joined
    }
}

impl SlotShape {
    pub(crate) fn of(layout: &Layout) -> Self {
        Self {
            image_bytes: layout.bytes() as usize,
        }
    }

    /// How many checksums there are: one for each [`CHECKSUM_BLOCK`] bytes of the image,
    /// its padding of zeros included.
    pub(crate) fn blocks(&self) -> usize {
        self.image_bytes.div_ceil(CHECKSUM_BLOCK)
    }

    /// The offset of the table of checksums in the slot: right after the image, whose length is a
    /// multiple of 64.
    pub(crate) fn table_offset(&self) -> usize {
        self.image_bytes
    }

    pub(crate) fn table_bytes(&self) -> usize {
        8 * self.blocks()
    }

    /// Bytes of a slot's mapping, in whole pages.
    pub(crate) fn slot_bytes(&self) -> usize {
        // At least a page: a mapping cannot be empty.
        (self.table_offset() + self.table_bytes())
            .max(1)
            .next_multiple_of(4096)
    }
}

fn joined(spans: &[Span]) -> Vec<Span> {
    // Without a limit one large tensor would be one span, which a single thread would copy.
    const MOST: usize = 16 << 20;
    let mut joined: Vec<Span> = Vec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last)
                if last.tensors == span.tensors
                    && last.image.end == span.image.start
                    && last.image.len() + span.image.len() <= MOST =>
            {
                last.image.end = span.image.end;
            }
            _ => joined.push(span.clone()),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightsync_core::Dtype;

    fn layout(lens: &[u64]) -> Layout {
        let tensors = lens
            .iter()
            .enumerate()
            .map(|(i, len)| (format!("t{i}"), Dtype::U8, vec![*len]));
        Layout::new(tensors).unwrap()
    }

    #[test]
    fn spans_cover_each_tensor_once_and_stay_small() {
        let block = CHECKSUM_BLOCK as u64;
        for lens in [
            vec![1, 2, 3],
            vec![block, block + 1, 0, 5],
            vec![0],
            vec![3 * block + 17, 1, 1, block - 1, block],
            vec![1024; 3000],
        ] {
            let layout = layout(&lens);
            let spans = Spans::new(&layout);
            let mut covered = vec![0u64; lens.len()];
            let mut end = 0;
            for span in spans.all() {
                assert!(
                    span.image.start >= end && span.image.len() <= CHECKSUM_BLOCK,
                    "{span:?}"
                );
                let block = span.image.start / CHECKSUM_BLOCK;
                assert!(span.image.end <= (block + 1) * CHECKSUM_BLOCK, "{span:?}");
                end = span.image.end;
                for index in span.tensors.clone() {
                    let tensor = layout.tensors()[index].range;
                    let from = span.image.start.max(tensor.offset as usize);
                    let to = span.image.end.min((tensor.offset + tensor.len) as usize);
                    covered[index] += to.saturating_sub(from) as u64;
                }
            }
            assert_eq!(covered, lens);
            let shape = SlotShape::of(&layout);
            assert!(shape.slot_bytes() >= layout.bytes() as usize + 8 * shape.blocks());
            let bytes = |spans: &[Span]| spans.iter().map(|span| span.image.len()).sum::<usize>();
            assert_eq!(bytes(spans.joined()), bytes(spans.all()));
        }
    }
}
