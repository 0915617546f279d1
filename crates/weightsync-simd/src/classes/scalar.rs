//! The portable loops, and what the vector loops leave over.

use super::{CLASSES, Exponents};
use crate::delta::Word;

#[inline(always)]
pub(super) fn classes<W: Word>(bytes: &[u8], exponents: Exponents, out: &mut [u8]) {
    let Exponents { shift, mask, top } = exponents;
    for (element, class) in bytes.chunks_exact(W::BYTES).zip(out) {
        let exponent = W::read(element).widen() >> shift & mask;
        *class = top.saturating_sub(exponent).min(CLASSES as u64 - 1) as u8;
    }
}

/// The first of `classes` is that of element number `first`.
pub(super) fn rank(
    classes: &[u8],
    first: usize,
    places: &[u16],
    totals: &mut [u32; CLASSES],
    ranks: &mut [u32],
) {
    let mut done = 0;
    for (number, &class) in (first..).zip(classes) {
        let total = &mut totals[usize::from(class)];
        if places
            .get(done)
            .is_some_and(|place| usize::from(*place) == number)
        {
            ranks[done] = *total;
            done += 1;
        }
        *total += 1;
    }
    assert_eq!(done, places.len(), "the places do not ascend in the block");
}

pub(super) fn select(
    classes: &[u8],
    first: usize,
    ranks: &[&[u32]; CLASSES],
    totals: &mut [u32; CLASSES],
    taken: &mut [usize; CLASSES],
    places: &mut [u16],
) -> usize {
    let mut found = 0;
    for (number, &class) in (first..).zip(classes) {
        let class = usize::from(class);
        if ranks[class].get(taken[class]) == Some(&totals[class]) {
            places[found] = number as u16;
            found += 1;
            taken[class] += 1;
        }
        totals[class] += 1;
    }
    found
}
