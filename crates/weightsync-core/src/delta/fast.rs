//! The fast codec: block by block, either gaps between places or one bit for each element.

use weightsync_simd::{SLACK, Word};

use super::bits::{BitReader, BitWriter, MOST, bits_at};
use super::{Changes, DeltaError};

/// What a fast delta begins with; the two lowest bits are the width's logarithm.
pub(super) const TAG: u8 = 0x10;

/// How a block is written: the two lowest bits of its first byte.
const NOTHING: u8 = 0;
const GAPS: u8 = 1;
const BITMAP: u8 = 2;

/// Blocks of which more than one element in so many changed are written as bitmaps.
const SPARSE: usize = 24;

pub(super) fn begin<W: Word>(out: &mut Vec<u8>) {
    out.push(TAG | W::BYTES.trailing_zeros() as u8);
}

/// Appends one block; the masks must be those of its places.
pub(super) fn write_block<W: Word>(changes: &Changes<W>, elements: usize, out: &mut Vec<u8>) {
    match changes.count {
        0 => out.push(NOTHING),
        count if count * SPARSE <= elements => write_gaps(changes, elements, out),
        _ => write_bitmap(changes, elements, out),
    }
}

/// Reads one block from the start of `bytes`; returns how many bytes it took. A block that came as
/// a bitmap has its masks, and no places.
pub(super) fn read_block<W: Word>(
    bytes: &[u8],
    elements: usize,
    changes: &mut Changes<W>,
) -> Result<(usize, Places), DeltaError> {
    let ends = DeltaError::Ends { at: bytes.len() };
    let (&head, rest) = bytes.split_first().ok_or(ends)?;
    changes.count = 0;
    let parameter = u32::from(head >> 2);
    let (taken, places) = match head & 3 {
        NOTHING if parameter == 0 => (0, Places::None),
        GAPS => (read_gaps(rest, elements, parameter, changes)?, Places::Listed),
        BITMAP => (read_bitmap(rest, elements, parameter, changes)?, Places::Masks),
        _ => {
            return Err(DeltaError::Malformed {
                what: "a block of no known kind",
            });
        }
    };
    Ok((1 + taken, places))
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

/// How many of a gap's bits are written as they are, for so many changes among so many elements:
/// what is above them is then about one more bit.
pub(super) fn low_bits(count: usize, elements: usize) -> u32 {
    // The mean gap, times ln 2.
    let gap = elements as u64 * 177 / (256 * count.max(1) as u64);
    gap.max(1).ilog2()
}

/// How many of a step's lowest bits are written as they are: about as many as most have.
fn step_bits<W: Word>(steps: &[W]) -> u32 {
    let some = &steps[..steps.len().min(64)];
    let lengths: u32 = some
        .iter()
        .map(|step| 64 - split(*step).1.leading_zeros())
        .sum();
    (lengths / some.len().max(1) as u32).min(36)
}

fn write_gaps<W: Word>(changes: &Changes<W>, elements: usize, out: &mut Vec<u8>) {
    let (count, places, steps) = (changes.count, changes.places(), changes.steps());
    let low = low_bits(count, elements);
    let short = step_bits(steps);
    out.push(GAPS | (short as u8) << 2);
    out.extend_from_slice(&(count as u16).to_le_bytes());
    // Each change: a fixed part, and of its gap at most so many zeros and a one.
    let fixed = low + 2 + short;
    let bits = count * (fixed as usize + 1) + (elements >> low);
    let mut writer = BitWriter::new(out, bits / 8);
    let mut far = 0;
    let mut next = 0;
    for (&place, &step) in places.iter().zip(steps) {
        let gap = u64::from(place) - next;
        next = u64::from(place) + 1;
        let (negative, beyond) = split(step);
        let more = u64::from(beyond >> short != 0);
        far += more;
        let lowest = gap & ((1 << low) - 1);
        let shortest = beyond & ((1 << short) - 1);
        let part = lowest | negative << low | more << (low + 1) | shortest << (low + 2);
        writer.put(part, fixed);
    }
    next = 0;
    for &place in places {
        let gap = u64::from(place) - next;
        next = u64::from(place) + 1;
        writer.put_unary(gap >> low);
    }
    if far > 0 {
        for &step in steps {
            let above = split(step).1 >> short;
            if above != 0 {
                writer.put_gamma(above);
            }
        }
    }
    writer.finish();
}

fn read_gaps<W: Word>(
    bytes: &[u8],
    elements: usize,
    short: u32,
    changes: &mut Changes<W>,
) -> Result<usize, DeltaError> {
    let ends = DeltaError::Ends { at: bytes.len() };
    let (count, bytes) = bytes.split_first_chunk::<2>().ok_or(ends.clone())?;
    let count = usize::from(u16::from_le_bytes(*count));
    if count == 0 || count > elements {
        return Err(DeltaError::Malformed {
            what: "a block with no change, or with more than it has elements",
        });
    }
    let low = low_bits(count, elements);
    let fixed = low + 2 + short;
    if fixed > MOST || short >= 8 * W::BYTES as u32 {
        return Err(DeltaError::Malformed {
            what: "steps of more bits than an element has",
        });
    }
    let mut ones = BitReader::new(bytes);
    ones.seek(count * fixed as usize);
    if (count * fixed as usize).div_ceil(8) > bytes.len() {
        return Err(ends);
    }
    let (places, steps) = (&mut changes.places[..count], &mut changes.steps[..count]);
    let (low_mask, short_mask) = ((1_u64 << low) - 1, (1_u64 << short) - 1);
    let mut next = 0_u64;
    let mut far = 0_u64;
    for (index, (place, step)) in places.iter_mut().zip(steps.iter_mut()).enumerate() {
        let part = bits_at(bytes, index * fixed as usize);
        let high = ones.take_unary().ok_or(ends.clone())?;
        next += high << low | part & low_mask;
        *place = next as u16;
        next += 1;
        *step = join(part >> low & 1, part >> (low + 2) & short_mask);
        far += part >> (low + 1) & 1;
    }
    // They ascend: if the last one has its place, all have.
    if next > elements as u64 {
        let got = next - 1;
        return Err(DeltaError::Place { elements, got });
    }
    if far > 0 {
        for (index, step) in steps.iter_mut().enumerate() {
            let part = bits_at(bytes, index * fixed as usize);
            if part >> (low + 1) & 1 == 0 {
                continue;
            }
            let above = ones.take_gamma().ok_or(ends.clone())?;
            let beyond = above << short | part >> (low + 2) & short_mask;
            if above.leading_zeros() <= short || beyond >> (8 * W::BYTES - 1) != 0 {
                return Err(DeltaError::Malformed {
                    what: "a step of more bits than an element has",
                });
            }
            *step = join(part >> low & 1, beyond);
        }
    }
    if ones.is_past_the_end() {
        return Err(ends);
    }
    changes.count = count;
    Ok(2 + ones.bytes())
}

/// A step as a number above zero, small where the step is.
#[inline(always)]
fn zigzag<W: Word>(step: W) -> u64 {
    let (negative, beyond) = split(step);
    // At most twice the largest step, which 64 bits may not hold: such a one is escaped.
    (beyond << 1 | negative).wrapping_add(1)
}

fn write_bitmap<W: Word>(changes: &Changes<W>, elements: usize, out: &mut Vec<u8>) {
    let steps = changes.steps();
    let wide = 8 * W::BYTES as u32;
    let bits = bitmap_bits(steps);
    out.push(BITMAP | (bits as u8) << 2);
    for mask in &changes.masks[..elements.div_ceil(64)] {
        out.extend_from_slice(&mask.to_le_bytes());
    }
    out.truncate(out.len() - (elements.div_ceil(64) * 8 - elements.div_ceil(8)));
    let mut writer = BitWriter::new(out, changes.count * bits as usize / 8);
    let limit = 1_u64 << bits;
    let mut escaped = 0;
    for &step in steps {
        let zigzag = zigzag(step);
        let fits = bits < wide && zigzag < limit && zigzag != 0;
        escaped += usize::from(!fits);
        writer.put(if fits { zigzag } else { 0 }, bits);
    }
    writer.finish();
    if escaped > 0 {
        out.reserve(escaped * W::BYTES);
        for &step in steps {
            let zigzag = zigzag(step);
            if zigzag >= limit || zigzag == 0 {
                out.extend_from_slice(&step.widen().to_le_bytes()[..W::BYTES]);
            }
        }
    }
}

/// How many bits a step takes in a bitmap's block: the fewest in all, by a sample.
fn bitmap_bits<W: Word>(steps: &[W]) -> u32 {
    let wide = 8 * W::BYTES as u32;
    let stride = (steps.len() / 256).max(1);
    let mut lengths = [0_u32; 65];
    let mut some = 0;
    for step in steps.iter().step_by(stride) {
        lengths[64 - zigzag(*step).leading_zeros() as usize] += 1;
        some += 1;
    }
    let mut best = (u32::MAX, 0);
    let mut longer = some;
    for bits in 1..wide.min(MOST) {
        longer -= lengths[bits as usize];
        let cost = some * bits + longer * wide;
        best = best.min((cost, bits));
    }
    best.1
}

fn read_bitmap<W: Word>(
    bytes: &[u8],
    elements: usize,
    bits: u32,
    changes: &mut Changes<W>,
) -> Result<usize, DeltaError> {
    let ends = DeltaError::Ends { at: bytes.len() };
    let map = bytes.get(..elements.div_ceil(8)).ok_or(ends.clone())?;
    let (mut count, mut last) = (0, 0);
    for (mask, part) in changes.masks.iter_mut().zip(map.chunks(8)) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        *mask = u64::from_le_bytes(word);
        count += mask.count_ones() as usize;
        last = *mask;
    }
    let behind = elements % 64 != 0 && last >> (elements % 64) != 0;
    if behind || bits == 0 || bits >= 8 * W::BYTES as u32 || bits > MOST {
        return Err(DeltaError::Malformed {
            what: "a bitmap with changes behind its last element, or with steps of no known width",
        });
    }
    let rest = &bytes[map.len()..];
    let packed = (count * bits as usize).div_ceil(8);
    let mut escaped = rest.get(packed..).ok_or(ends.clone())?;
    let limit = (1_u64 << bits) - 1;
    let mut escapes = 0;
    for (index, step) in changes.steps[..count].iter_mut().enumerate() {
        let zigzag = bits_at(rest, index * bits as usize) & limit;
        escapes += usize::from(zigzag == 0);
        let less = zigzag.wrapping_sub(1);
        *step = match zigzag {
            0 => W::default(),
            _ => join(less & 1, less >> 1),
        };
    }
    if escapes > 0 {
        for step in changes.steps[..count].iter_mut() {
            if *step == W::default() {
                let whole = escaped.split_off(..W::BYTES).ok_or(ends.clone())?;
                *step = W::read(whole);
            }
        }
    }
    changes.count = count;
    debug_assert!(changes.steps.len() >= count + SLACK, "room for whole vectors");
    Ok(bytes.len() - escaped.len())
}
