//! Makes the spans of a version from the deltas that a parent sends.
//!
//! Of each delta, in this order:
//!
//! 1. It is read whole, and compared with the checksum in its head.
//! 2. It is recorded: relays below get it from there. They need not wait for the next step, unless
//!    parents are not trusted.
//! 3. It is applied: onto the [base](DeltaBase), or onto the bytes that the slot still holds from an
//!    earlier version. The second way saves a copy of the span.
//! 4. If parents are not trusted, the span is compared with the sender's digests, and only then is
//!    the delta recorded.
//! 5. The span counts as arrived. Until then, an error leaves the slot as if nothing had come.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use weightsync_core::Version;
use weightsync_core::delta::{BitPattern, Codec, DeltaError, Scratch, apply, apply_onto, encode};
use weightsync_link::frame::{DELTA_HEAD_BYTES, HEADER_BYTES};
use weightsync_link::stream::Stream;
use weightsync_mem::{BlockWrite, Snapshot};

use super::super::delta::{Coded, Delta, SpanCoding};
use super::super::serve::invalid;
use super::requested::Requested;
use super::{FetchTask, read_exact, skip};
use crate::bulk::delta::IN_PLACE;
use crate::wire::image::{DeltaHead, ImageError, SPAN_BLOCKS};

/// An older version that is whole here, which deltas are applied to.
#[derive(Clone, Debug)]
pub(crate) struct DeltaBase {
    pub(crate) snapshot: Snapshot,
    /// Keeps the deltas that arrive, for the next version and for relays below.
    pub(crate) recorded: Arc<Delta>,
    /// Whether there are relays below. Without them only small deltas are worth keeping.
    pub(crate) passes_on: bool,
    /// The delta to `base` from the older version that the free slot still holds, if it is known.
    pub(crate) earlier: Option<Arc<Delta>>,
}

/// The same limit as [`IN_PLACE`] if one delta is thin. Reading a thin delta takes so long that
/// saving one copy pays less often.
const IN_PLACE_THIN: u64 = 512;

/// A delta arrived as it was sent, and cannot be applied.
#[derive(Debug, thiserror::Error)]
#[error("the delta of span {index} from {base} to {version} cannot be applied here: {source}")]
struct InvalidDelta {
    index: usize,
    base: Version,
    version: Version,
    source: DeltaError,
}

impl FetchTask {
    /// Receives one delta whose head has arrived, and makes its span from it.
    pub(super) fn receive_delta(
        &self,
        socket: &mut Stream,
        head: &DeltaHead,
        requested: &mut Requested<'_>,
        scratch: &mut Scratch,
    ) -> io::Result<()> {
        let wrong = || invalid(ImageError::Delta { head: *head });
        let base = self.base.as_ref().ok_or_else(wrong)?;
        let index = head.index as usize;
        let first = index * SPAN_BLOCKS;
        let blocks = first..self.slot.pieces().min(first + SPAN_BLOCKS);
        if !self.is_of_this(head, base) || !requested.arrive(blocks.clone()) {
            return Err(wrong());
        }
        // Another fetch has taken a part of the span. The delta still has to be read off the
        // connection.
        let Some(mut span) = self.slot.take_all(blocks) else {
            return skip(socket, head.bytes);
        };
        let coded = self.read_delta(socket, head)?;
        let verifies = self.verifies();
        if !verifies {
            self.record(base, index, &coded, &span);
        }
        let applied = self.apply(&mut span, base, index, &coded, scratch);
        applied.map_err(|source| self.invalid_delta(head, base, source))?;
        if verifies {
            // The delta may be a lie, which must not be passed on.
            self.verify(first, &span, requested)?;
            self.record(base, index, &coded, &span);
        }
        if base.passes_on && coded.is_thin() {
            self.keep_foldable(&span, base, index, scratch);
        }
        span.keep();
        Ok(())
    }

    /// Whether a delta leads from this base to the version that is fetched.
    fn is_of_this(&self, head: &DeltaHead, base: &DeltaBase) -> bool {
        usize::from(head.model) == self.item.model
            && head.version == self.item.version
            && head.base == base.snapshot.version()
            && head.image_bytes == self.slot.layout().bytes()
    }

    /// Reads a delta and checks it.
    fn read_delta(&self, socket: &mut Stream, head: &DeltaHead) -> io::Result<Coded> {
        // The head was checked: a delta is smaller than its span, so this allocation is bounded.
        let mut bytes = vec![0; head.bytes as usize];
        read_exact(socket, &mut bytes)?;
        head.check(&bytes).map_err(invalid)?;
        let read = (HEADER_BYTES + DELTA_HEAD_BYTES + bytes.len()) as u64;
        self.coded.fetch_add(read, Ordering::Relaxed);
        Ok(Coded::new(bytes, head.crc))
    }

    /// Keeps a delta for relays below, which are notified, and for the next version. Without relays
    /// below it is kept only if the next version can use it in place.
    fn record(&self, base: &DeltaBase, index: usize, coded: &Coded, span: &BlockWrite) {
        if base.passes_on || is_in_place_cheaper([coded], span.len()) {
            base.recorded.note(index, SpanCoding::Coded(coded.clone()));
            self.store.notify();
        }
    }

    /// Writes a span from its delta and an older version.
    fn apply(
        &self,
        span: &mut BlockWrite,
        base: &DeltaBase,
        index: usize,
        coded: &Coded,
        scratch: &mut Scratch,
    ) -> Result<(), DeltaError> {
        let range = span.range();
        let pattern = BitPattern::of_span(self.slot.layout(), range.start as u64);
        let Some(earlier) = earlier_delta(span, base, index, coded) else {
            let old = &base.snapshot.bytes()[range];
            return apply_onto(pattern, coded.sent(), old, span, scratch).map(drop);
        };
        // First from the slot's old bytes to the base, then on to the new version.
        for delta in [earlier, coded] {
            apply(pattern, delta.sent(), span, None, scratch)?;
        }
        Ok(())
    }

    /// A delta that arrived as it was sent cannot be applied: notes which end is wrong.
    fn invalid_delta(&self, head: &DeltaHead, base: &DeltaBase, source: DeltaError) -> io::Error {
        match source {
            // The base here is damaged; relays below may still use the delta. Where parents are not
            // trusted, the base was compared, so it is the delta that is wrong.
            DeltaError::Base { .. } if !self.verifies() => {
                self.base_mismatch.store(true, Ordering::Release);
            }
            // The delta is invalid, whichever end caused that.
            _ => base.recorded.spoil(),
        }
        invalid(InvalidDelta {
            index: head.index as usize,
            base: head.base,
            version: head.version,
            source,
        })
    }

    /// Keeps a span's changes in a form that can be folded, for relays below that are several
    /// versions behind. A thin delta cannot be converted later, because that needs the base.
    fn keep_foldable(
        &self,
        span: &BlockWrite,
        base: &DeltaBase,
        index: usize,
        scratch: &mut Scratch,
    ) {
        let layout = self.slot.layout();
        let range = span.range();
        let pattern = BitPattern::of_span(layout, range.start as u64);
        let old = &base.snapshot.bytes()[range];
        let mut bytes = Vec::new();
        match encode(pattern, Codec::Fast, old, span, &mut bytes, scratch) {
            Ok(_) => base.recorded.note_foldable(index, bytes, layout),
            Err(error) => unreachable!("both are versions of one layout: {error}"),
        }
    }
}

/// The delta from the bytes already in the slot to the base, if applying it and the new one in place
/// is cheaper than copying the span.
fn earlier_delta<'a>(
    span: &BlockWrite,
    base: &'a DeltaBase,
    index: usize,
    coded: &Coded,
) -> Option<&'a Coded> {
    let earlier = base.earlier.as_ref()?;
    // The slot has that version's bytes only as long as nothing was written into the span.
    if span.base() != Some(earlier.base()) {
        return None;
    }
    let Some(SpanCoding::Coded(first)) = earlier.known(index) else {
        return None;
    };
    is_in_place_cheaper([first, coded], span.len()).then_some(first)
}

/// Whether applying these deltas to a span of this size takes no longer than copying it.
fn is_in_place_cheaper<const N: usize>(deltas: [&Coded; N], span: usize) -> bool {
    let bytes: usize = deltas.iter().map(|one| one.sent().len()).sum();
    let limit = match deltas.iter().any(|one| one.is_thin()) {
        true => IN_PLACE_THIN,
        false => IN_PLACE,
    };
    bytes as u64 * limit <= span as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A delta that begins with this codec's tag.
    fn coded(tag: u8, bytes: usize) -> Coded {
        Coded::new([vec![tag], vec![0; bytes - 1]].concat(), 0)
    }

    #[test]
    fn thin_deltas_must_be_smaller_to_apply_in_place() {
        const FAST: u8 = 0x11;
        const THIN: u8 = 0x21;
        let span = 4 << 20;
        // (codecs, bytes of each, cheaper than a copy)
        let cases = [
            ((FAST, FAST), (32 << 10, 32 << 10), true),
            ((FAST, FAST), (32 << 10, (32 << 10) + 1), false),
            ((THIN, FAST), (1, 8191), true),
            ((THIN, FAST), (1, 8192), false),
            ((FAST, THIN), (8191, 1), true),
            ((FAST, THIN), (8192, 1), false),
            ((THIN, THIN), (4096, 4096), true),
            ((THIN, THIN), (4096, 4097), false),
        ];
        for ((first, second), (one, two), expected) in cases {
            let cheaper = is_in_place_cheaper([&coded(first, one), &coded(second, two)], span);
            assert_eq!(cheaper, expected, "{first:#x} {one}, {second:#x} {two}");
        }
    }
}
