//! The portable loops, and what the vector loops leave over.

use super::Word;

pub(super) fn compare<W: Word, const PLACES: bool>(
    old: &[u8],
    new: &[u8],
    masks: &mut [u64],
    places: &mut [u16],
    steps: &mut [W],
) -> usize {
    let (mut changes, mut first) = (0, 0);
    let groups = old.chunks(64 * W::BYTES).zip(new.chunks(64 * W::BYTES));
    for ((old, new), mask) in groups.zip(masks) {
        let pairs = old.chunks_exact(W::BYTES).zip(new.chunks_exact(W::BYTES));
        *mask = pairs.rev().fold(0, |mask, (old, new)| {
            mask << 1 | u64::from(W::read(old) != W::read(new))
        });
        changes = extract::<W, PLACES>(old, new, *mask, first, changes, places, steps);
        first += 64;
    }
    changes
}

/// Appends the changes of one word of the mask, whose first element is number `first`, to the
/// `changes` there are.
#[inline(always)]
pub(super) fn extract<W: Word, const PLACES: bool>(
    old: &[u8],
    new: &[u8],
    mut mask: u64,
    first: usize,
    mut changes: usize,
    places: &mut [u16],
    steps: &mut [W],
) -> usize {
    while mask != 0 {
        let place = mask.trailing_zeros() as usize;
        let at = place * W::BYTES;
        if PLACES {
            places[changes] = (first + place) as u16;
        }
        steps[changes] = W::read(&new[at..]).minus(W::read(&old[at..]));
        changes += 1;
        mask &= mask - 1;
    }
    changes
}

pub(super) fn expand<W: Word>(bytes: &mut [u8], masks: &[u64], steps: &[W]) -> usize {
    let mut taken = 0;
    for (elements, &mask) in bytes.chunks_mut(64 * W::BYTES).zip(masks) {
        let mut mask = mask;
        while mask != 0 {
            let element = &mut elements[mask.trailing_zeros() as usize * W::BYTES..];
            W::read(element).plus(steps[taken]).write(element);
            taken += 1;
            mask &= mask - 1;
        }
    }
    taken
}

#[inline(always)]
pub(super) fn count_ones(words: &[u64]) -> usize {
    let ones = words.iter().map(|word| word.count_ones() as usize);
    ones.sum()
}

pub(super) fn ones(masks: &[u64], places: &mut [u16]) -> usize {
    let mut found = 0;
    for (&mask, first) in masks.iter().zip((0..).step_by(64)) {
        let mut mask = mask;
        while mask != 0 {
            places[found] = (first + mask.trailing_zeros()) as u16;
            found += 1;
            mask &= mask - 1;
        }
    }
    found
}
