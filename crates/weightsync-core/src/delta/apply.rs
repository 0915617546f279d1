//! Applies a delta to an older version of its span.

use std::ops::Range;

use weightsync_simd::{
    LINE_BYTES, Word, digest_add, digest_lines, digest_lines_at, expand, prefetch, prefetch_all,
};

use super::fast::{self, Places};
use super::{
    BLOCK, BitPattern, BlockChanges, BlockWork, DeltaError, Scratch, by_width, check_span, thin,
};

/// The result of applying a delta.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedDelta {
    /// How many elements were changed.
    pub changes: u64,
    /// The amount to add to the sum of the image's digest, if it was asked for; see
    /// [`Digest::changed_by`](crate::digest::Digest::changed_by).
    pub digest: [u64; 2],
}

/// Applies one delta to `image`, the older version of its span. An empty delta changes nothing.
///
/// With `first_line`, the number of the span's first 64-byte line in the whole image, the result has
/// the change of the digest, too. That is cheaper than a new digest while few lines are touched.
///
/// # Errors
///
/// [`DeltaError`], if these are not the bytes of a delta for such a span. The span may then be
/// changed in part: rebuild it from scratch.
pub fn apply(
    pattern: BitPattern,
    delta: &[u8],
    image: &mut [u8],
    first_line: Option<u64>,
    scratch: &mut Scratch,
) -> Result<AppliedDelta, DeltaError> {
    put_all(
        pattern,
        delta,
        SpanTarget::new(image, None, first_line),
        scratch,
    )
}

/// Writes the newer version of a span to `image`, from the older version in `base` and the delta
/// between the two, in one pass. The old bytes of `image` are not read.
///
/// # Errors
///
/// As [`apply`]; and [`DeltaError::Span`] if the two are not equally long.
///
/// # Example
///
/// ```
/// use weightsync_core::Dtype;
/// use weightsync_core::delta::{BitPattern, Codec, Scratch, apply_onto, encode};
///
/// let (old, new) = ([1_u8; 256], [[1; 100], [3; 100]].concat());
/// let new = [&new[..], &[1; 56]].concat();
/// let (pattern, mut scratch, mut delta) = (BitPattern::of(Dtype::F32), Scratch::new(), Vec::new());
/// encode(pattern, Codec::Fast, &old, &new, &mut delta, &mut scratch)?;
/// let mut image = [0; 256];
/// apply_onto(pattern, &delta, &old, &mut image, &mut scratch)?;
/// assert_eq!(image[..], new);
/// # Ok::<(), weightsync_core::delta::DeltaError>(())
/// ```
pub fn apply_onto(
    pattern: BitPattern,
    delta: &[u8],
    base: &[u8],
    image: &mut [u8],
    scratch: &mut Scratch,
) -> Result<AppliedDelta, DeltaError> {
    // Both are the same span, of the older and of the newer version.
    if base.len() != image.len() {
        return Err(DeltaError::Span {
            limit: base.len() as u64,
            got: image.len() as u64,
        });
    }
    put_all(
        pattern,
        delta,
        SpanTarget::new(image, Some(base), None),
        scratch,
    )
}

fn put_all(
    pattern: BitPattern,
    delta: &[u8],
    mut target: SpanTarget<'_>,
    scratch: &mut Scratch,
) -> Result<AppliedDelta, DeltaError> {
    check_span(pattern, target.image.len())?;
    // An empty delta: nothing changed, but a base that is elsewhere still has to come here.
    let Some(&tag) = delta.first() else {
        target.seed(0..target.image.len());
        return Ok(AppliedDelta::default());
    };
    // Both ends find the width by the layout. Another one in the delta means another layout.
    check_width(tag, pattern)?;
    // The two lowest bits of the first byte are the width, the others the codec.
    let taken = match tag & !3 {
        fast::TAG => by_width!(pattern, scratch, apply_fast(&delta[1..], &mut target)),
        thin::TAG => {
            let lists = &mut scratch.thin;
            let (delta, target) = (&delta[1..], &mut target);
            match pattern.width() {
                1 => thin::apply(&mut scratch.w1, lists, pattern, delta, target),
                2 => thin::apply(&mut scratch.w2, lists, pattern, delta, target),
                4 => thin::apply(&mut scratch.w4, lists, pattern, delta, target),
                _ => thin::apply(&mut scratch.w8, lists, pattern, delta, target),
            }
        }
        _ => return Err(DeltaError::Codec { byte: tag }),
    }?;
    // A delta says nowhere how long it is: it must end where its last block does.
    match delta.len() - 1 - taken {
        0 => Ok(target.applied),
        extra => Err(DeltaError::Trailing { extra }),
    }
}

/// Checks that a delta is for elements of this width.
pub(super) fn check_width(tag: u8, pattern: BitPattern) -> Result<(), DeltaError> {
    let (expected, got) = (pattern.width(), 1 << (tag & 3));
    match expected == got {
        true => Ok(()),
        false => Err(DeltaError::Width { expected, got }),
    }
}

/// Applies a delta block by block. While the delta of a block is read, lines are fetched from
/// memory: with a base, all lines of the base's block; without one, all lines of the image's block
/// if it touches most of them, else those that the block before it touches.
fn apply_fast<W: Word>(
    work: &mut BlockWork<W>,
    delta: &[u8],
    target: &mut SpanTarget<'_>,
) -> Result<usize, DeltaError> {
    work.now.reserve();
    work.before.reserve();
    let (block, len) = (BLOCK * W::BYTES, target.image.len());
    let mut at = 0;
    let mut waiting = None;
    for begin in (0..len).step_by(block) {
        let here = begin..len.min(begin + block);
        let elements = here.len() / W::BYTES;
        let delta = delta.get(at..).unwrap_or_default();
        // With a base each line is copied, so all of them are needed.
        let whole = target.base.is_some() || fast::is_dense(delta, elements);
        let mut ahead = match (&waiting, whole) {
            (_, true) => Ahead::all(&target.base.unwrap_or(target.image)[here.clone()]),
            // Only a list says which lines the block before will touch.
            (Some((before, Places::Listed)), false) => {
                Ahead::places::<W>(&target.image[Range::clone(before)], work.before.places())
            }
            _ => Ahead::nothing(),
        };
        let (taken, places) = fast::read_block(delta, elements, &mut work.now, &mut ahead)?;
        at += taken;
        if let Some((here, places)) = waiting.take() {
            target.put(here, places, &work.before);
        }
        if whole {
            // The lines that were fetched meanwhile are in the cache now, so the block is copied
            // and changed in one pass.
            target.seed(here.clone());
            target.put(here, places, &work.now);
        } else {
            // Put once the next block has been read: its lines can come from memory meanwhile.
            waiting = Some((here, places));
            std::mem::swap(&mut work.now, &mut work.before);
        }
    }
    // Nothing is read after the last block, so it is put here.
    if let Some((here, places)) = waiting {
        target.put(here, places, &work.before);
    }
    Ok(at)
}

/// Lines to fetch from memory while something else is done. A few are fetched at a time, because
/// lines that are asked for all at once keep everything else waiting.
pub(super) struct Ahead<'a> {
    block: &'a [u8],
    /// Where lines are needed, if not everywhere, and how they are asked for.
    places: Option<(&'a [u16], Prefetch)>,
    /// How many of the places, or of all lines, were asked for.
    done: usize,
}

type Prefetch = fn(&[u8], &[u16]);

impl<'a> Ahead<'a> {
    pub(super) fn nothing() -> Self {
        Self::all(&[])
    }

    fn all(block: &'a [u8]) -> Self {
        Self {
            block,
            places: None,
            done: 0,
        }
    }

    fn places<W: Word>(block: &'a [u8], places: &'a [u16]) -> Self {
        Self {
            block,
            places: Some((places, prefetch::<W>)),
            done: 0,
        }
    }

    /// Goes on, once so many parts of all are done.
    pub(super) fn go(&mut self, parts: usize, all: usize) {
        let of = match self.places {
            Some((places, _)) => places.len(),
            None => self.block.len() / LINE_BYTES,
        };
        // In proportion to what was read, so that the last lines are asked for with the last part.
        let done = of * parts / all;
        let these = std::mem::replace(&mut self.done, done)..done;
        match self.places {
            Some((places, prefetch)) => prefetch(self.block, &places[these]),
            None => prefetch_all(&self.block[these.start * LINE_BYTES..these.end * LINE_BYTES]),
        }
    }
}

/// A span that changes are put into.
pub(super) struct SpanTarget<'a> {
    pub(super) image: &'a mut [u8],
    /// What it is made from, if that is elsewhere.
    base: Option<&'a [u8]>,
    first_line: Option<u64>,
    /// The lines of a block that are touched.
    lines: Vec<u16>,
    applied: AppliedDelta,
}

impl<'a> SpanTarget<'a> {
    fn new(image: &'a mut [u8], base: Option<&'a [u8]>, first_line: Option<u64>) -> Self {
        Self {
            image,
            base,
            first_line,
            lines: Vec::new(),
            applied: AppliedDelta::default(),
        }
    }

    /// Brings the older version of these bytes here, if it is elsewhere.
    pub(super) fn seed(&mut self, here: Range<usize>) {
        // Without a base the image holds the older version itself.
        if let Some(base) = self.base {
            self.image[here.clone()].copy_from_slice(&base[here]);
        }
    }

    /// Puts the changes of a block into it.
    pub(super) fn put<W: Word>(
        &mut self,
        here: Range<usize>,
        places: Places,
        changes: &BlockChanges<W>,
    ) {
        if places == Places::None {
            return;
        }
        self.applied.changes += changes.count as u64;
        // The digest is a sum over lines: the old lines are taken out of it, and the new ones put
        // in.
        let before = self.digest_of::<W>(&here, places, changes);
        put(&mut self.image[here.clone()], places, changes);
        if let Some([low, high]) = before {
            let minus = [low.wrapping_neg(), high.wrapping_neg()];
            self.applied.digest = digest_add(self.applied.digest, minus);
            let after = self.digest_of_same(&here, places);
            self.applied.digest = digest_add(self.applied.digest, after);
        }
    }

    /// The digest of the lines that will change; of all if the changes are many.
    fn digest_of<W: Word>(
        &mut self,
        here: &Range<usize>,
        places: Places,
        changes: &BlockChanges<W>,
    ) -> Option<[u64; 2]> {
        self.first_line?;
        if places == Places::Listed {
            self.lines.clear();
            // Places ascend, so changes of one line follow each other.
            self.lines.resize(changes.count, 0);
            let mut count = 0;
            let mut last = u16::MAX;
            for &place in changes.places() {
                let line = (usize::from(place) * W::BYTES / LINE_BYTES) as u16;
                // Always written, and kept only if it differs from the last line: no branch.
                count += usize::from(line != last);
                self.lines[count - 1] = line;
                last = line;
            }
            self.lines.truncate(count);
        }
        Some(self.digest_of_same(here, places))
    }

    fn digest_of_same(&self, here: &Range<usize>, places: Places) -> [u64; 2] {
        let block = &self.image[here.clone()];
        let first = self.first_line.unwrap_or_default() + (here.start / LINE_BYTES) as u64;
        match places {
            // A bitmap touches nearly every line, and places of a thin delta are in no order. Then
            // all of the block is summed.
            Places::Listed => digest_lines_at(block, &self.lines, first),
            _ => digest_lines(block, first),
        }
    }
}

/// Puts changes into their block.
pub(super) fn put<W: Word>(block: &mut [u8], places: Places, changes: &BlockChanges<W>) {
    match places {
        Places::None => {}
        Places::Masks => {
            expand(block, &changes.masks, &changes.steps);
        }
        Places::Listed | Places::Unordered => scatter(block, changes.places(), changes.steps()),
    }
}

fn scatter<W: Word>(block: &mut [u8], places: &[u16], steps: &[W]) {
    for (&place, &step) in places.iter().zip(steps) {
        // Steps are differences that wrap, so adding one restores the new bits exactly.
        let element = &mut block[usize::from(place) * W::BYTES..];
        W::read(element).plus(step).write(element);
    }
}
