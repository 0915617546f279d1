//! Folds several consecutive deltas into one.

use weightsync_simd::{Word, compare};

use super::apply::{Ahead, check_width, put};
use super::fast::{self, PlaceForm, Places};
use super::{
    BLOCK, BitPattern, BlockChanges, BlockWork, DeltaError, Scratch, by_width, check_span,
};

/// Lists are merged if at most one element in this many changed. At about that density, merging takes
/// as long as putting both lists into a block.
const FEW: usize = 96;

/// Appends to `out` one fast delta with the effect of `first` and then `second` on a span of `bytes`
/// bytes. Steps at the same place are added, and left out if they cancel. Both inputs are fast deltas
/// or empty. To fold more, fold the result again.
///
/// # Errors
///
/// [`DeltaError`], if one of the two is not a fast delta for such a span; `out` is as it was then.
///
/// # Example
///
/// ```
/// use weightsync_core::Dtype;
/// use weightsync_core::delta::{BitPattern, Codec, Scratch, apply, encode, fold};
///
/// let (pattern, mut scratch) = (BitPattern::of(Dtype::F32), Scratch::new());
/// let [one, two, three] = [[1_u8; 64], [2; 64], [3; 64]];
/// let (mut first, mut second, mut both) = (Vec::new(), Vec::new(), Vec::new());
/// encode(pattern, Codec::Fast, &one, &two, &mut first, &mut scratch)?;
/// encode(pattern, Codec::Fast, &two, &three, &mut second, &mut scratch)?;
/// fold(pattern, 64, &first, &second, &mut both, &mut scratch)?;
///
/// let mut image = one;
/// apply(pattern, &both, &mut image, None, &mut scratch)?;
/// assert_eq!(image, three);
/// # Ok::<(), weightsync_core::delta::DeltaError>(())
/// ```
pub fn fold(
    pattern: BitPattern,
    bytes: usize,
    first: &[u8],
    second: &[u8],
    out: &mut Vec<u8>,
    scratch: &mut Scratch,
) -> Result<u64, DeltaError> {
    let elements = check_span(pattern, bytes)?;
    for delta in [first, second] {
        let Some(&tag) = delta.first() else { continue };
        check_width(tag, pattern)?;
        // A thin delta says where its changes are only to those who have the old values.
        if tag & !3 != fast::TAG {
            return Err(DeltaError::Codec { byte: tag });
        }
    }
    let begin = out.len();
    let folded = by_width!(pattern, scratch, fold_as(elements, first, second, out));
    // A delta that changes nothing is empty, without the codec's byte.
    // After an error nothing half written is left, either.
    if !matches!(folded, Ok(1..)) {
        out.truncate(begin);
    }
    folded
}

fn fold_as<W: Word>(
    work: &mut BlockWork<W>,
    elements: usize,
    first: &[u8],
    second: &[u8],
    out: &mut Vec<u8>,
) -> Result<u64, DeltaError> {
    let BlockWork {
        now,
        before,
        sum,
        nothing,
        block,
    } = work;
    for changes in [&mut *now, &mut *before, &mut *sum] {
        changes.reserve();
    }
    // `None` for an empty delta: it has no blocks to read.
    let (mut first, mut second) = (first.get(1..), second.get(1..));
    let mut changes = 0;
    fast::begin::<W>(out);
    for begin in (0..elements).step_by(BLOCK) {
        let elements = BLOCK.min(elements - begin);
        let places = [
            next(&mut first, elements, before)?,
            next(&mut second, elements, now)?,
        ];
        let is_list = |places: &Places| matches!(places, Places::None | Places::Listed);
        // A bitmap has no list, and many changes merge more slowly than a block is filled.
        let few = (before.count + now.count) * FEW <= elements;
        if few && places.iter().all(is_list) {
            merge(before, now, sum);
            fast::write_block(sum, elements, false, out);
        } else {
            // Both deltas applied to zeros.
            let bytes = elements * W::BYTES;
            nothing.resize(bytes.max(nothing.len()), 0);
            block.clear();
            block.resize(bytes, 0);
            // Steps add up: what both make of zeros is the sum, and a change that was undone is
            // zero again.
            put(block, places[0], before);
            put(block, places[1], now);
            let (masks, at, steps) = (&mut sum.masks, &mut sum.places, &mut sum.steps);
            sum.count = compare(&nothing[..bytes], block, masks, at, steps);
            let as_bits = PlaceForm::Quick.as_bits(sum.count, elements);
            fast::write_block(sum, elements, as_bits, out);
        }
        changes += sum.count as u64;
    }
    // Both deltas must end with their last block.
    for rest in [first, second].into_iter().flatten() {
        if !rest.is_empty() {
            return Err(DeltaError::Trailing { extra: rest.len() });
        }
    }
    Ok(changes)
}

/// The next block of a delta; of no delta, no change.
fn next<W: Word>(
    delta: &mut Option<&[u8]>,
    elements: usize,
    changes: &mut BlockChanges<W>,
) -> Result<Places, DeltaError> {
    changes.count = 0;
    let Some(bytes) = delta else {
        return Ok(Places::None);
    };
    let (taken, places) = fast::read_block(bytes, elements, changes, &mut Ahead::nothing())?;
    *bytes = &bytes[taken..];
    Ok(places)
}

/// Merges two lists, without the changes that cancel.
fn merge<W: Word>(first: &BlockChanges<W>, second: &BlockChanges<W>, sum: &mut BlockChanges<W>) {
    sum.count = 0;
    let mut one = first.places().iter().zip(first.steps()).peekable();
    let mut two = second.places().iter().zip(second.steps()).peekable();
    loop {
        let place = match (one.peek(), two.peek()) {
            (Some((one, _)), Some((two, _))) => **one.min(two),
            (Some((place, _)), None) | (None, Some((place, _))) => **place,
            (None, None) => return,
        };
        let mut step = W::default();
        for side in [&mut one, &mut two] {
            if let Some((_, more)) = side.next_if(|(at, _)| **at == place) {
                step = step.plus(*more);
            }
        }
        // A step of nothing is no change, and a delta must not have one.
        if step != W::default() {
            sum.push(place, step);
        }
    }
}
