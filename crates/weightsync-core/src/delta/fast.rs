//! The fast codec. Each block holds either the gaps between changed places or one bit per
//! element.

use std::iter;

use weightsync_simd::{
    PACK_BITS, PACK_SLACK, SLACK, Word, add_up, count_ones, find, pack, pack_unary, unpack,
    unpack_unary, unzigzag, zigzag,
};

use super::apply::Ahead;
use super::bits::{BitReader, BitWriter, MOST, bits_at};
use super::{BlockChanges, DeltaError};

/// The first byte of a fast delta; its two lowest bits are the width's logarithm.
pub(super) const TAG: u8 = 0x10;

/// How a block is written: the two lowest bits of its first byte.
const NOTHING: u8 = 0;
const GAPS: u8 = 1;
const BITMAP: u8 = 2;

/// From one change in this many elements on, changes touch most cache lines.
const DENSE: usize = 32;

/// How many changes are read at once.
const AT_ONCE: usize = 64;

/// The changes of a bitmap are read in at most this many parts, of at least [`AT_ONCE`] changes.
const PARTS: usize = 128;

/// How places are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaceForm {
    /// As bits, where more than one element in 24 changed.
    Quick,
    /// As bits, where more than every second element changed: bits take fewer bytes from there on.
    Few,
}

impl PlaceForm {
    /// Whether `count` changes among `elements` elements are written as bits.
    pub(super) fn as_bits(self, count: usize, elements: usize) -> bool {
        let sparse = match self {
            Self::Quick => 24,
            Self::Few => 2,
        };
        count * sparse > elements
    }
}

pub(super) fn begin<W: Word>(out: &mut Vec<u8>) {
    out.push(TAG | W::BYTES.trailing_zeros() as u8);
}

/// Appends one block, whose masks must be there if it is written as bits, else its places.
pub(super) fn write_block<W: Word>(
    changes: &mut BlockChanges<W>,
    elements: usize,
    as_bits: bool,
    out: &mut Vec<u8>,
) {
    match changes.count {
        0 => out.push(NOTHING),
        _ if as_bits => write_bitmap(changes, elements, out),
        _ => write_gaps(changes, elements, out),
    }
}

/// Reads one block from the start of `bytes`; returns how many bytes it took. A block that came as
/// a bitmap has its masks, and no places.
pub(super) fn read_block<W: Word>(
    bytes: &[u8],
    elements: usize,
    changes: &mut BlockChanges<W>,
    ahead: &mut Ahead<'_>,
) -> Result<(usize, Places), DeltaError> {
    let ends = DeltaError::Ends { at: bytes.len() };
    let (&head, rest) = bytes.split_first().ok_or(ends)?;
    changes.count = 0;
    // The six other bits of a block's first byte: how many bits of a step are written as they are.
    let parameter = u32::from(head >> 2);
    let (taken, places) = match head & 3 {
        // A parameter here would be a second form of the same block.
        NOTHING if parameter == 0 => {
            ahead.go(1, 1);
            (0, Places::None)
        }
        GAPS => (
            read_gaps(rest, elements, parameter, changes, ahead)?,
            Places::Listed,
        ),
        BITMAP => (
            read_bitmap(rest, elements, parameter, changes, ahead)?,
            Places::Masks,
        ),
        // No encoder writes such a block.
        _ => {
            return Err(DeltaError::Malformed {
                what: "a block of no known kind",
            });
        }
    };
    Ok((1 + taken, places))
}

/// Whether most lines of the block that begins `bytes` will be touched.
pub(super) fn is_dense(bytes: &[u8], elements: usize) -> bool {
    match *bytes {
        [head, ref rest @ ..] if head & 3 == GAPS => {
            let count = rest
                .first_chunk()
                .map_or(0, |count| u16::from_le_bytes(*count));
            usize::from(count) * DENSE > elements
        }
        [head, ..] => head & 3 == BITMAP,
        [] => false,
    }
}

/// Where the places of a block are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Places {
    None,
    /// In the list, ascending.
    Listed,
    /// In the list, in any order.
    Unordered,
    /// In the masks, and not in the list.
    Masks,
}

/// How a step is told: its sign, and how far it goes beyond one.
#[inline(always)]
pub(super) fn split<W: Word>(step: W) -> (u64, u64) {
    let bits = step.widen();
    // No step is 0, so its size is at least one, and only what is beyond that is written.
    let negative = bits >> (8 * W::BYTES - 1);
    let far = match negative {
        0 => bits,
        _ => W::default().minus(step).widen(),
    };
    (negative, far.wrapping_sub(1))
}

#[inline(always)]
pub(super) fn join<W: Word>(negative: u64, beyond: u64) -> W {
    let far = W::narrow(beyond).plus(W::narrow(1));
    let other = W::default().minus(far);
    if negative == 0 { far } else { other }
}

/// How many of a gap's bits are written as they are, for so many changes among so many elements: with
/// geometric gaps of that mean, the rest in unary takes least then (R. G. Gallager and D. C. Van
/// Voorhis, "Optimal source codes for geometrically distributed integer alphabets", 1975).
fn low_bits(count: usize, elements: usize) -> u32 {
    // The mean gap, times the logarithm of the golden ratio.
    let gap = elements as u64 * 123 / (256 * count.max(1) as u64);
    let bits = gap.max(1).next_power_of_two().ilog2();
    bits.min(PACK_BITS - 2)
}

/// How many of a step's lowest bits are written as they are: about as many as most have.
fn step_bits<W: Word>(steps: &[W]) -> u32 {
    // A sample is enough: a wrong guess costs a few bits, as longer steps have their own code.
    let some = &steps[..steps.len().min(64)];
    let lengths: u32 = some
        .iter()
        .map(|step| 64 - split(*step).1.leading_zeros())
        .sum();
    (lengths / some.len().max(1) as u32).min(MOST)
}

fn write_gaps<W: Word>(changes: &mut BlockChanges<W>, elements: usize, out: &mut Vec<u8>) {
    let count = changes.count;
    let (parts, highs) = (&mut changes.parts[..count], &mut changes.highs[..]);
    let (places, steps) = (&changes.places[..count], &changes.steps[..count]);
    // In this order, as docs/deltas.md has it: low bits with signs, the rest of the gaps in unary,
    // short parts of the steps, and what is above those.
    let low = low_bits(count, elements);
    let short = step_bits(steps);
    out.push(GAPS | (short as u8) << 2);
    // It fits: where more than every second element changed, the block is a bitmap.
    out.extend_from_slice(&(count as u16).to_le_bytes());

    let mask = (1 << low) - 1;
    // Where the one before is, as if another block came before this one.
    let before = iter::once(&u16::MAX).chain(places);
    for ((high, before), place) in highs.iter_mut().zip(before).zip(places) {
        *high = place.wrapping_sub(*before).wrapping_sub(1);
    }
    for ((part, high), &step) in parts.iter_mut().zip(&mut *highs).zip(steps) {
        let (negative, beyond) = split(step);
        let far = u16::from(beyond >> short != 0);
        // One packed number for each change: the low bits of its gap, the sign, and whether more
        // follows.
        *part = *high & mask | (negative as u16 | far << 1) << low;
        *high >>= low;
    }
    append(out, count * 2, |out| pack(parts, low + 2, out));
    // A one for each change, and zeros for what is above the low bits: all gaps together are no
    // longer than the block.
    let unary = count + (elements >> low);
    append(out, unary / 8 + 1, |out| pack_unary(&highs[..count], out));
    let bit = 1 << (low + 1);
    // What the list held is written, so it takes the numbers of the far steps now.
    let far = find(parts, bit, bit, highs);

    let mut writer = BitWriter::new(out, count);
    if short > 0 {
        for &step in steps {
            writer.put(split(step).1 & ((1 << short) - 1), short);
        }
    }
    // Far steps come last, so that those before have a fixed length and can be found by their
    // index.
    for &at in &highs[..far] {
        writer.put_gamma(split(steps[usize::from(at)]).1 >> short);
    }
    writer.finish();
}

/// Appends what a kernel writes, which is at most so many bytes.
fn append(out: &mut Vec<u8>, most: usize, write: impl FnOnce(&mut [u8]) -> usize) {
    let begin = out.len();
    out.resize(begin + most + PACK_SLACK, 0);
    let used = write(&mut out[begin..]);
    out.truncate(begin + used);
}

// Longer than a screen: it runs for each block of a delta, and reads the parts of a block in the
// order in which they lie there. Each part begins where the one before it has ended.
fn read_gaps<W: Word>(
    bytes: &[u8],
    elements: usize,
    short: u32,
    changes: &mut BlockChanges<W>,
    ahead: &mut Ahead<'_>,
) -> Result<usize, DeltaError> {
    let ends = || DeltaError::Ends { at: bytes.len() };
    let (count, rest) = bytes.split_first_chunk::<2>().ok_or_else(ends)?;
    let count = usize::from(u16::from_le_bytes(*count));
    // The lists have room for a block's elements and no more.
    if count == 0 || count > elements {
        return Err(DeltaError::Malformed {
            what: "a block with no change, or with more than it has elements",
        });
    }
    // The reader below takes at most this many bits at once.
    if short >= 8 * W::BYTES as u32 || short > MOST {
        return Err(DeltaError::Malformed {
            what: "steps of more bits than an element has",
        });
    }
    let low = low_bits(count, elements);
    let packed = (count * (low as usize + 2)).div_ceil(8);
    // Its length follows from the count, so what comes behind can be read at the same time.
    let (packed, rest) = rest.split_at_checked(packed).ok_or_else(ends)?;

    // Part by part, so that what is needed next comes from memory meanwhile.
    let (places, steps) = (&mut changes.places[..count], &mut changes.steps[..count]);
    let mut highs = [0; AT_ONCE];
    let (mut next, mut unary) = (0, 0);
    let all = count.div_ceil(AT_ONCE);
    let some = places.chunks_mut(AT_ONCE).zip(steps.chunks_mut(AT_ONCE));
    let some = some.zip(changes.parts[..count].chunks_mut(AT_ONCE));
    for (index, ((places, steps), parts)) in some.enumerate() {
        let highs = &mut highs[..places.len()];
        let begin = index * (AT_ONCE / 8) * (low as usize + 2);
        unpack(&packed[begin..], low + 2, parts);
        unary = unpack_unary(rest, unary, highs).ok_or_else(ends)?;
        next = add_up(parts, highs, low, next, places);
        for (step, &part) in steps.iter_mut().zip(&*parts) {
            // Its sign and a size of one; what is beyond that is added below.
            *step = join(u64::from(part >> low & 1), 0);
        }
        ahead.go(index + 1, all);
    }
    // They ascend: if the last one has its place, all have.
    if next > elements as u64 {
        let got = next - 1;
        return Err(DeltaError::Place { elements, got });
    }

    let unary = unary.div_ceil(8);
    let mut wide = BitReader::new(&rest[unary..]);
    let mut shorts = wide;
    // Two readers: the short parts come first, and the rest of the far ones lies behind all of
    // them.
    wide.seek(count * short as usize);
    if wide.is_past_the_end() {
        return Err(ends());
    }
    if short > 0 {
        for step in &mut changes.steps[..count] {
            *step = join(split(*step).0, shorts.take(short));
        }
    }
    let bit = 1 << (low + 1);
    let far = find(&changes.parts[..count], bit, bit, &mut changes.highs);
    for &at in &changes.highs[..far] {
        let step = &mut changes.steps[usize::from(at)];
        // Bits that the shift would push out, or more than a step has, are refused: a step has one
        // form.
        let above = wide.take_gamma().ok_or_else(ends)?;
        let (negative, beyond) = split(*step);
        let beyond = above << short | beyond;
        if above.leading_zeros() <= short || beyond >> (8 * W::BYTES - 1) != 0 {
            return Err(DeltaError::Malformed {
                what: "a step of more bits than an element has",
            });
        }
        *step = join(negative, beyond);
    }
    if wide.is_past_the_end() {
        return Err(ends());
    }
    // Only now: until here the lists are not known to be valid.
    changes.count = count;
    Ok(bytes.len() - rest.len() + unary + wide.bytes())
}

fn write_bitmap<W: Word>(changes: &mut BlockChanges<W>, elements: usize, out: &mut Vec<u8>) {
    let count = changes.count;
    let steps = &changes.steps[..count];
    // By how the steps are spread: some wide steps are cheaper written whole than by wider codes
    // for all.
    let bits = bitmap_bits(steps);
    out.push(BITMAP | (bits as u8) << 2);
    let begin = out.len();
    let masks = &changes.masks[..elements.div_ceil(64)];
    out.resize(begin + 8 * masks.len(), 0);
    for (word, mask) in out[begin..].as_chunks_mut::<8>().0.iter_mut().zip(masks) {
        *word = mask.to_le_bytes();
    }
    // Whole words were written, and the block may end within one.
    out.truncate(begin + elements.div_ceil(8));
    // Codes of fewer than 16 bits go through the vector kernels.
    if bits < PACK_BITS {
        let codes = &mut changes.parts[..count];
        let escaped = zigzag(steps, 1 << bits, codes);
        append(out, (count * bits as usize).div_ceil(8), |out| {
            pack(codes, bits, out)
        });
        if escaped > 0 {
            // The places of a bitmap are in its masks, so the list is free for this.
            let escaped = find(codes, u16::MAX, 0, &mut changes.places);
            let begin = out.len();
            out.resize(begin + escaped * W::BYTES, 0);
            let whole = out[begin..].chunks_exact_mut(W::BYTES);
            for (whole, &index) in whole.zip(&changes.places[..escaped]) {
                steps[usize::from(index)].write(whole);
            }
        }
    } else {
        let mut writer = BitWriter::new(out, count * bits as usize / 8);
        for &step in steps {
            let code = step.zigzag().widen();
            // 0 stands for a step that does not fit. Such steps follow whole, in order.
            writer.put(if code < 1 << bits { code } else { 0 }, bits);
        }
        writer.finish();
        for &step in steps {
            let code = step.zigzag().widen();
            if code >= 1 << bits || code == 0 {
                put_whole(step, out);
            }
        }
    }
}

fn put_whole<W: Word>(step: W, out: &mut Vec<u8>) {
    out.extend_from_slice(&step.widen().to_le_bytes()[..W::BYTES]);
}

/// How many bits a step takes in a bitmap's block: the fewest in all, by a sample.
fn bitmap_bits<W: Word>(steps: &[W]) -> u32 {
    let wide = 8 * W::BYTES as u32;
    let stride = (steps.len() / 256).max(1);
    let mut lengths = [0_u32; 65];
    let mut longer = 0;
    for step in steps.iter().step_by(stride) {
        lengths[64 - step.zigzag().widen().leading_zeros() as usize] += 1;
        longer += 1;
    }
    let some = longer;
    // Each step takes `bits`, and one that is longer takes a whole element as well.
    let costs = (1..wide.min(MOST)).map(|bits| {
        longer -= lengths[bits as usize];
        (some * bits + longer * wide, bits)
    });
    costs.min().map_or(1, |(_, bits)| bits)
}

// Longer than a screen: it runs for each block of a delta, and reads the parts of a block in the
// order in which they lie there. Narrow steps and wide ones have a loop each.
fn read_bitmap<W: Word>(
    bytes: &[u8],
    elements: usize,
    bits: u32,
    changes: &mut BlockChanges<W>,
    ahead: &mut Ahead<'_>,
) -> Result<usize, DeltaError> {
    let ends = || DeltaError::Ends { at: bytes.len() };
    let (map, rest) = bytes
        .split_at_checked(elements.div_ceil(8))
        .ok_or_else(ends)?;
    let (words, end) = map.as_chunks::<8>();
    let masks = &mut changes.masks[..elements.div_ceil(64)];
    for (mask, word) in masks.iter_mut().zip(words) {
        *mask = u64::from_le_bytes(*word);
    }
    if let (Some(mask), false) = (masks.last_mut(), end.is_empty()) {
        let mut word = [0; 8];
        word[..end.len()].copy_from_slice(end);
        *mask = u64::from_le_bytes(word);
    }
    // How many steps follow is said by the bits alone.
    let (count, last) = (count_ones(masks), masks.last().copied().unwrap_or_default());
    // Bits behind the last element would be counted as steps, and put nowhere.
    let behind = !elements.is_multiple_of(64) && last >> (elements % 64) != 0;
    if behind || bits == 0 || bits >= 8 * W::BYTES as u32 || bits > MOST {
        return Err(DeltaError::Malformed {
            what: "a bitmap with changes behind its last element, or with steps of no known width",
        });
    }
    let packed = (count * bits as usize).div_ceil(8);
    let (packed, mut escaped) = rest.split_at_checked(packed).ok_or_else(ends)?;
    let steps = &mut changes.steps[..count];
    if bits < PACK_BITS {
        let codes = &mut changes.parts[..count];
        // A part begins at a whole byte: 64 codes of any width are whole bytes.
        let at_once = (count / PARTS).next_multiple_of(AT_ONCE).max(AT_ONCE);
        let all = count.div_ceil(at_once);
        let some = codes.chunks_mut(at_once).zip(steps.chunks_mut(at_once));
        for (index, (codes, steps)) in some.enumerate() {
            let begin = index * (at_once / 8) * bits as usize;
            unpack(&packed[begin..], bits, codes);
            unzigzag(codes, steps);
            ahead.go(index + 1, all);
        }
        let escapes = find(codes, u16::MAX, 0, &mut changes.places);
        // The slice shrinks by what is taken; what is left of it belongs to the next block.
        let whole = escaped
            .split_off(..escapes * W::BYTES)
            .ok_or_else(ends)?
            .chunks_exact(W::BYTES);
        for (whole, &index) in whole.zip(&changes.places[..escapes]) {
            steps[usize::from(index)] = W::read(whole);
        }
    } else {
        let limit = (1_u64 << bits) - 1;
        let all = count.div_ceil(AT_ONCE);
        for (index, step) in steps.iter_mut().enumerate() {
            if index.is_multiple_of(AT_ONCE) {
                ahead.go(index / AT_ONCE + 1, all);
            }
            let code = bits_at(packed, index * bits as usize) & limit;
            let beyond = code.wrapping_sub(1);
            *step = match code {
                0 => W::read(escaped.split_off(..W::BYTES).ok_or_else(ends)?),
                _ => join(beyond & 1, beyond >> 1),
            };
        }
    }
    changes.count = count;
    debug_assert!(
        changes.steps.len() >= count + SLACK,
        "room for whole vectors"
    );
    Ok(bytes.len() - escaped.len())
}
