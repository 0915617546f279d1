//! The thin codec: changes coded in the classes of the old value's exponent.
//!
//! Within a class, a change is coded as its step and as the number of unchanged elements of the
//! class before it. Both numbers are split: the lowest bits are stored as they are. The rest is
//! stored in unary, each bit by a model of its own ([`super::range`]) that learns its
//! frequency.

use weightsync_simd::{CLASSES, Exponents, Word, classes, compare, rank, select};

use super::apply::SpanTarget;
use super::bits::{BitReader, BitWriter, MOST};
use super::fast::{Places, join, split};
use super::range::{Bit, RangeDecoder, RangeEncoder};
use super::{BLOCK, BitPattern, BlockWork, DeltaError};

/// The first byte of a thin delta; its two lowest bits are the width's logarithm.
pub(super) const TAG: u8 = 0x20;

/// The changes of a span, by class.
#[derive(Debug, Default)]
pub(super) struct Lists {
    ranks: [Vec<u32>; CLASSES],
    steps: [Vec<u64>; CLASSES],
    /// The classes of a block's elements.
    classes: Vec<u8>,
    /// The ranks of a block's changes.
    block: Vec<u32>,
    /// Bits as they are.
    plain: Vec<u8>,
}

impl Lists {
    /// Clears the lists for a span of this many elements. Each class may have had its most changes in
    /// another span, so the capacity of all classes together is limited to one span's needs.
    fn clear(&mut self, elements: usize) {
        self.ranks.iter_mut().for_each(Vec::clear);
        self.steps.iter_mut().for_each(Vec::clear);
        let room: usize = self.ranks.iter().map(Vec::capacity).sum();
        // A vector that grows doubles its capacity.
        if room > 2 * elements.max(BLOCK) {
            self.ranks = Default::default();
            self.steps = Default::default();
        }
        self.classes.resize(BLOCK, 0);
        self.block.resize(BLOCK, 0);
    }
}

/// Appends the changes between two versions of a span; returns how many there are.
pub(super) fn encode<W: Word>(
    work: &mut BlockWork<W>,
    lists: &mut Lists,
    pattern: BitPattern,
    old: &[u8],
    new: &[u8],
    out: &mut Vec<u8>,
) -> usize {
    work.now.reserve();
    // What an earlier span left must not be taken for this one's.
    lists.clear(old.len() / W::BYTES);
    // Classes come from the old values, which the decoder has as well.
    let exponents = exponents::<W>(pattern, old);
    let mut totals = [0; CLASSES];
    let mut count = 0;
    let block = BLOCK * W::BYTES;
    for (old, new) in old.chunks(block).zip(new.chunks(block)) {
        let now = &mut work.now;
        let (masks, places, steps) = (&mut now.masks, &mut now.places, &mut now.steps);
        now.count = compare(old, new, masks, places, steps);
        let of_each = &mut lists.classes[..old.len() / W::BYTES];
        classes::<W>(old, exponents, of_each);
        let ranks = &mut lists.block[..now.count];
        // A rank is an element's number among all of its class in the span, so the totals go on
        // from block to block.
        rank(of_each, now.places(), &mut totals, ranks);
        for ((&place, &step), &rank) in now.places().iter().zip(now.steps()).zip(ranks.iter()) {
            // A class is always below this; the remainder spares a check of the bounds.
            let class = usize::from(of_each[usize::from(place)]) % CLASSES;
            lists.ranks[class].push(rank);
            lists.steps[class].push(step.widen());
        }
        count += now.count;
    }
    write::<W>(lists, exponents.top, (count, old.len() / W::BYTES), out);
    count
}

/// The highest exponent that more than a few of the elements have.
fn exponents<W: Word>(pattern: BitPattern, old: &[u8]) -> Exponents {
    let mut found = [0_u32; 2048];
    // About 2048 elements are looked at: the top only has to be about right, as it travels with the
    // delta.
    let stride = (old.len() / W::BYTES / 2048).max(1);
    let some = old.chunks_exact(W::BYTES).step_by(stride);
    let few = some.len() as u32 / 256;
    for element in some {
        found[pattern.exponent(W::read(element).widen()) as usize & 2047] += 1;
    }
    let mut above = 0;
    let top = found.iter().rposition(|count| {
        above += count;
        above > few
    });
    pattern.exponents(top.unwrap_or(0) as u64)
}

fn write<W: Word>(
    lists: &mut Lists,
    top: u64,
    (count, elements): (usize, usize),
    out: &mut Vec<u8>,
) {
    out.push(TAG | W::BYTES.trailing_zeros() as u8);
    out.extend_from_slice(&(top as u16).to_le_bytes());
    for ranks in &lists.ranks {
        // All counts come first, so that a reader knows before it allocates how many changes there
        // are.
        put_number(ranks.len() as u64, out);
    }
    // The start of the plain bits is known once the other bits are written.
    let length_at = out.len();
    out.extend_from_slice(&[0; 4]);
    let begin = out.len();
    lists.plain.clear();
    let mut plain = BitWriter::new(&mut lists.plain, count * 2);
    let mut coder = RangeEncoder::new(out);
    for (ranks, steps) in lists.ranks.iter().zip(&lists.steps) {
        // Each class learns for itself: small weights change far more often than large ones.
        let mut gaps = Split::new(mean(count, elements));
        let mut sizes = Split::new(0);
        let mut next = 0;
        for (&rank, &step) in ranks.iter().zip(steps) {
            gaps.put(u64::from(rank - next), &mut coder, &mut plain);
            // Two changes never have one rank, so the gap counts from behind the last.
            next = rank + 1;
            let (negative, beyond) = split(W::narrow(step));
            plain.put(negative, 1);
            sizes.put(beyond, &mut coder, &mut plain);
        }
    }
    coder.finish(begin);
    plain.finish();
    let length = (out.len() - begin) as u32;
    out[length_at..begin].copy_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&lists.plain);
}

/// The mean gap between `count` changes among `elements` elements.
fn mean(count: usize, elements: usize) -> u64 {
    (elements / count.max(1)) as u64
}

/// Applies a thin delta to the older version of its span; returns how many bytes were read.
pub(super) fn apply<W: Word>(
    work: &mut BlockWork<W>,
    lists: &mut Lists,
    pattern: BitPattern,
    delta: &[u8],
    target: &mut SpanTarget<'_>,
) -> Result<usize, DeltaError> {
    let elements = target.image.len() / W::BYTES;
    work.now.reserve();
    lists.clear(elements);
    // The whole delta is decoded before the first element changes.
    let (top, taken) = read::<W>(lists, elements, delta)?;
    // The top comes from outside, and the classes are computed from it.
    if top > pattern.top() {
        return Err(DeltaError::Malformed {
            what: "an exponent that no element has",
        });
    }
    let exponents = pattern.exponents(top);
    let ranks: [&[u32]; CLASSES] = core::array::from_fn(|class| &lists.ranks[class][..]);
    let (mut totals, mut found) = ([0; CLASSES], [0; CLASSES]);
    let (block, len) = (BLOCK * W::BYTES, target.image.len());
    let mut put = [0; CLASSES];
    for begin in (0..len).step_by(block) {
        let here = begin..len.min(begin + block);
        // Block by block: the old values are needed for the classes, and are changed right after.
        target.seed(here.clone());
        let old = &target.image[here.clone()];
        let of_each = &mut lists.classes[..old.len() / W::BYTES];
        classes::<W>(old, exponents, of_each);
        let now = &mut work.now;
        let places = &mut now.places;
        now.count = select(of_each, &ranks, &mut totals, &mut found, places);
        for (place, step) in now.places[..now.count].iter().zip(&mut now.steps) {
            let class = usize::from(of_each[usize::from(*place)]) % CLASSES;
            // Changes of a class are found in ascending order, which is that of its steps.
            *step = W::narrow(lists.steps[class][put[class]]);
            put[class] += 1;
        }
        target.put(here, Places::Unordered, now);
    }
    let all = ranks
        .iter()
        .zip(found)
        .all(|(ranks, found)| ranks.len() == found);
    match all {
        true => Ok(taken),
        // The base is not the one that the delta was made from, and the span is changed in part.
        false => Err(DeltaError::Base {
            what: "fewer elements of a class than changes in it",
        }),
    }
}

fn read<W: Word>(
    lists: &mut Lists,
    elements: usize,
    delta: &[u8],
) -> Result<(u64, usize), DeltaError> {
    let ends = || DeltaError::Ends { at: delta.len() };
    let mut rest = delta;
    let top = rest.split_off(..2).ok_or_else(ends)?;
    let top = u64::from(u16::from_le_bytes([top[0], top[1]]));
    let counts = take_counts(&mut rest, elements)?.ok_or_else(ends)?;
    let count = counts.iter().sum();
    let length = rest.split_off(..4).ok_or_else(ends)?;
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
    let coded = rest.split_off(..length).ok_or_else(ends)?;
    let mut plain = BitReader::new(rest);
    let mut coder = RangeDecoder::new(coded);
    for ((ranks, steps), of_class) in lists.ranks.iter_mut().zip(&mut lists.steps).zip(counts) {
        let mut gaps = Split::new(mean(count, elements));
        let mut sizes = Split::new(0);
        let mut next = 0_u64;
        ranks.reserve(of_class);
        steps.reserve(of_class);
        for _ in 0..of_class {
            let gap = gaps.take(&mut coder, &mut plain).ok_or_else(ends)?;
            next = next.saturating_add(gap);
            // No class has more elements than the span.
            if next >= elements as u64 {
                let got = next;
                return Err(DeltaError::Place { elements, got });
            }
            let negative = plain.take(1);
            let beyond = sizes.take(&mut coder, &mut plain).ok_or_else(ends)?;
            if beyond >> (8 * W::BYTES - 1) != 0 {
                return Err(DeltaError::Malformed {
                    what: "a step of more bits than an element has",
                });
            }
            ranks.push(next as u32);
            steps.push(join::<W>(negative, beyond).widen());
            next += 1;
        }
        // Bits behind the end read as zeros, so it is enough to look once for each class.
        if plain.is_past_the_end() {
            return Err(ends());
        }
    }
    match coder.unread() {
        0 => Ok((top, delta.len() - rest.len() + plain.bytes())),
        extra => Err(DeltaError::Trailing { extra }),
    }
}

/// How many changes each class has: `None` where the delta ends before they do. Nothing is reserved
/// yet, because the counts are claims.
fn take_counts(rest: &mut &[u8], elements: usize) -> Result<Option<[usize; CLASSES]>, DeltaError> {
    let mut counts = [0; CLASSES];
    let mut left = elements;
    for each in &mut counts {
        let Some(count) = take_number(rest) else {
            return Ok(None);
        };
        left = left.checked_sub(count).ok_or(DeltaError::Malformed {
            what: "more changes than there are elements",
        })?;
        *each = count;
    }
    Ok(Some(counts))
}

/// A coder for numbers that are mostly about as large as the numbers before them.
struct Split {
    /// 32 times the mean.
    mean: u64,
    /// Whether the number goes on, by how often it has.
    goes_on: [Bit; STAGES],
}

/// How many times are told apart.
const STAGES: usize = 4;

/// A number that goes on so often is written by its length instead.
const LONG: u64 = 24;

impl Split {
    fn new(mean: u64) -> Self {
        Self {
            mean: mean * 32,
            goes_on: [Bit::default(); STAGES],
        }
    }

    /// How many low bits are written plain. About every second number needs more bits than these.
    #[inline(always)]
    fn low(&self) -> u32 {
        (self.mean * 22 / 1024).max(1).ilog2().min(MOST - 8)
    }

    #[inline(always)]
    fn learn(&mut self, number: u64) {
        // A single outlier does not spoil the mean for long.
        let number = number.min((self.mean >> 2) + 32).min(1 << 50);
        self.mean = self.mean - (self.mean >> 5) + number;
    }

    #[inline(always)]
    fn put(&mut self, number: u64, coder: &mut RangeEncoder<'_>, plain: &mut BitWriter<'_>) {
        let low = self.low();
        // So many ones, each by a model that has learned how often numbers go on.
        let times = number >> low;
        for stage in 0..times.min(LONG) as usize {
            coder.put(&mut self.goes_on[stage.min(STAGES - 1)], true);
        }
        // A very long number would take a one for each of its times.
        if times < LONG {
            coder.put(&mut self.goes_on[(times as usize).min(STAGES - 1)], false);
        } else {
            plain.put_gamma(times - LONG + 1);
        }
        plain.put(number & ((1 << low) - 1), low);
        self.learn(number);
    }

    #[inline(always)]
    fn take(&mut self, coder: &mut RangeDecoder<'_>, plain: &mut BitReader<'_>) -> Option<u64> {
        let low = self.low();
        let mut times = 0_u64;
        // As `put` writes it, with the same models in the same order.
        while times < LONG && coder.take(&mut self.goes_on[(times as usize).min(STAGES - 1)]) {
            times += 1;
        }
        if times == LONG {
            times = (plain.take_gamma()? - 1).checked_add(LONG)?;
        }
        // The number comes from outside: one that does not fit 64 bits is refused.
        let number = times.checked_shl(low).filter(|high| high >> low == times)?;
        let number = number | plain.take(low);
        self.learn(number);
        Some(number)
    }
}

/// Appends a number, seven bits to a byte, the lowest first.
fn put_number(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// The number at the start of `bytes`, of at most five bytes.
fn take_number(bytes: &mut &[u8]) -> Option<usize> {
    let mut number = 0;
    // Five bytes hold 35 bits, more than any count of a span.
    for shift in (0..35).step_by(7) {
        let byte = *bytes.split_off_first()?;
        number |= usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}
