//! Makes a version from its base and the deltas that a parent sent.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use weightsync_core::Version;
use weightsync_core::delta::{Codec, DeltaError, Pattern, Scratch, apply, apply_onto, encode};
use weightsync_mem::{BlockWrite, Snapshot};

use super::super::delta::{Coded, Delta, Span};
use super::super::serve::invalid;
use super::requested::Requested;
use super::{Shared, read_exact, skip};
use crate::bulk::delta::IN_PLACE;
use crate::link::stream::Stream;
use crate::wire::frame::{DELTA_HEAD_BYTES, DeltaHead, FrameError, HEADER_BYTES, SPAN_BLOCKS};

/// An older version that is whole here, which deltas are applied to.
#[derive(Clone, Debug)]
pub(crate) struct Base {
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

impl Shared {
    /// Reads one delta, and makes its span from it.
    pub(super) fn make(
        &self,
        socket: &mut Stream,
        head: &DeltaHead,
        requested: &mut Requested<'_>,
        scratch: &mut Scratch,
    ) -> io::Result<()> {
        let wrong = || invalid(FrameError::Delta { head: *head });
        let base = self.base.as_ref().ok_or_else(wrong)?;
        let of_this = usize::from(head.model) == self.item.model
            && head.version == self.item.version
            && head.base == base.snapshot.version()
            && head.image_bytes == self.slot.layout().bytes();
        let first = head.index as usize * SPAN_BLOCKS;
        let blocks = first..self.slot.pieces().min(first + SPAN_BLOCKS);
        if !of_this || !requested.arrive(blocks.clone()) {
            return Err(wrong());
        }
        let Some(mut piece) = self.slot.take_all(blocks) else {
            return skip(socket, head.bytes);
        };

        // The head was checked: a delta is smaller than its span, so this allocation is bounded.
        let mut bytes = vec![0; head.bytes as usize];
        read_exact(socket, &mut bytes)?;
        head.check(&bytes).map_err(invalid)?;
        let came = (HEADER_BYTES + DELTA_HEAD_BYTES + bytes.len()) as u64;
        self.coded.fetch_add(came, Ordering::Relaxed);

        let (index, piece_len) = (head.index as usize, piece.len());
        let coded = Coded::new(bytes, head.crc);
        let record = || {
            if base.passes_on || are_few([&coded], piece_len) {
                base.recorded.note(index, Span::Coded(coded.clone()));
                self.store.notify();
            }
        };
        // Wakes relays below now: they need not wait until the delta is applied here. A delta that
        // may be a lie is passed on only after its span was compared.
        let verifies = self.verifies();
        if !verifies {
            record();
        }
        let made = self.put(&mut piece, base, index, &coded, scratch);
        let Err(source) = made else {
            if verifies {
                self.verify(first, &piece, requested)?;
                record();
            }
            if base.passes_on && coded.is_thin() {
                self.keep_foldable(&piece, base, index, scratch);
            }
            piece.keep();
            return Ok(());
        };
        match source {
            // The delta is intact and only does not fit the base here; relays below may still use
            // it.
            // Where relays are not trusted the base was compared: it is the delta that is wrong.
            DeltaError::Base { .. } if !verifies => {
                self.base_mismatch.store(true, Ordering::Release)
            }
            // The delta is invalid, whichever end caused that.
            _ => base.recorded.spoil(),
        }
        Err(invalid(InvalidDelta {
            index,
            base: head.base,
            version: head.version,
            source,
        }))
    }

    /// Keeps a span's changes in a form that can be folded, for relays below that are several
    /// versions behind. A thin delta cannot be converted later, because that needs the base.
    fn keep_foldable(&self, piece: &BlockWrite, base: &Base, index: usize, scratch: &mut Scratch) {
        let layout = self.slot.layout();
        let range = piece.range();
        let pattern = Pattern::of_span(layout, range.start as u64);
        let old = &base.snapshot.bytes()[range];
        let mut bytes = Vec::new();
        match encode(pattern, Codec::Fast, old, piece, &mut bytes, scratch) {
            Ok(_) => base.recorded.note_foldable(index, bytes, layout),
            Err(error) => unreachable!("both are versions of one layout: {error}"),
        }
    }

    /// Writes a span from its delta and an older version.
    fn put(
        &self,
        piece: &mut BlockWrite,
        base: &Base,
        index: usize,
        coded: &Coded,
        scratch: &mut Scratch,
    ) -> Result<(), DeltaError> {
        let range = piece.range();
        let pattern = Pattern::of_span(self.slot.layout(), range.start as u64);
        let Some(first) = self.earlier_delta(piece, base, index, coded) else {
            let old = &base.snapshot.bytes()[range];
            return apply_onto(pattern, coded.sent(), old, piece, scratch).map(drop);
        };
        [first, coded]
            .into_iter()
            .try_for_each(|delta| apply(pattern, delta.sent(), piece, None, scratch).map(drop))
    }

    /// The delta from the bytes already in the slot to the base, if it and the new one are small
    /// enough to apply both in place.
    fn earlier_delta<'a>(
        &self,
        piece: &BlockWrite,
        base: &'a Base,
        index: usize,
        coded: &Coded,
    ) -> Option<&'a Coded> {
        let earlier = base.earlier.as_ref()?;
        if piece.base() != Some(earlier.base()) {
            return None;
        }
        let Some(Span::Coded(first)) = earlier.known(index) else {
            return None;
        };
        are_few([first, coded], piece.len()).then_some(first)
    }
}

/// Whether applying these deltas to a span of this size takes no longer than copying it.
fn are_few<const N: usize>(deltas: [&Coded; N], span: usize) -> bool {
    let bytes: usize = deltas.iter().map(|one| one.sent().len()).sum();
    let few = match deltas.iter().any(|one| one.is_thin()) {
        true => IN_PLACE_THIN,
        false => IN_PLACE,
    };
    bytes as u64 * few <= span as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A delta that begins with this codec's tag.
    fn coded(tag: u8, bytes: usize) -> Coded {
        Coded::new([vec![tag], vec![0; bytes - 1]].concat(), 0)
    }

    #[test]
    fn thin_deltas_are_few_where_they_take_less() {
        const FAST: u8 = 0x11;
        const THIN: u8 = 0x21;
        let span = 4 << 20;
        // (codecs, bytes of each, few)
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
            let few = are_few([&coded(first, one), &coded(second, two)], span);
            assert_eq!(few, expected, "{first:#x} {one}, {second:#x} {two}");
        }
    }
}
