//! The portable loops, and what the others leave over.

use crate::delta::Word;

pub(super) fn pack(numbers: &[u16], bits: u32, out: &mut [u8]) {
    let mut writer = PackWriter::default();
    for &number in numbers {
        writer.put(u64::from(number), bits, out);
    }
}

/// Begins at bit `at`.
pub(super) fn unpack(bytes: &[u8], at: usize, bits: u32, numbers: &mut [u16]) {
    for (index, number) in numbers.iter_mut().enumerate() {
        let bit = at + index * bits as usize;
        *number = (word_at(bytes, bit / 8) >> (bit % 8) & ((1 << bits) - 1)) as u16;
    }
}

/// Eight bytes from here; zeros behind the end.
#[inline(always)]
pub(super) fn word_at(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
        Some(word) => u64::from_le_bytes(*word),
        None => {
            let rest = bytes.get(at..).unwrap_or_default();
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            u64::from_le_bytes(word)
        }
    }
}

/// Where the next bits go.
#[derive(Default)]
struct PackWriter {
    at: usize,
    word: u64,
    filled: u32,
}

impl PackWriter {
    /// Writes at most 56 bits.
    #[inline(always)]
    fn put(&mut self, bits: u64, count: u32, out: &mut [u8]) {
        self.word |= bits << self.filled;
        self.filled += count;
        out[self.at..self.at + 8].copy_from_slice(&self.word.to_le_bytes());
        self.at += (self.filled / 8) as usize;
        self.word >>= self.filled & !7;
        self.filled &= 7;
    }
}

pub(super) fn pack_unary(numbers: &[u16], out: &mut [u8]) -> usize {
    let (mut word, mut behind, mut at) = (0_u64, 64, 0);
    let mut next = 0;
    for &number in numbers {
        let one = next + usize::from(number);
        while one >= behind {
            out[at..at + 8].copy_from_slice(&word.to_le_bytes());
            (word, behind, at) = (0, behind + 64, at + 8);
        }
        word |= 1 << (one % 64);
        next = one + 1;
    }
    out[at..at + 8].copy_from_slice(&word.to_le_bytes());
    let bytes = next.div_ceil(8);
    assert!(out.len() >= bytes + super::PACK_SLACK, "too little room");
    bytes
}

#[inline(always)]
pub(super) fn unpack_unary(bytes: &[u8], from: usize, numbers: &mut [u16]) -> Option<usize> {
    let mut slots = numbers.iter_mut();
    let mut next = from;
    let Some(mut number) = slots.next() else {
        return Some(from);
    };
    // What lies before it in its byte is none of it.
    let mut before = u64::MAX << (from % 8);
    for at in (from / 8..bytes.len()).step_by(8) {
        let mut word = word_at(bytes, at) & before;
        before = u64::MAX;
        while word != 0 {
            let one = at * 8 + word.trailing_zeros() as usize;
            *number = (one - next).min(usize::from(u16::MAX)) as u16;
            next = one + 1;
            word &= word - 1;
            number = match slots.next() {
                Some(number) => number,
                None => return Some(next),
            };
        }
    }
    None
}

#[inline(always)]
pub(super) fn zigzag<W: Word>(steps: &[W], limit: u16, codes: &mut [u16]) -> usize {
    let mut zeros = 0_usize;
    for (part, codes) in steps.chunks(4096).zip(codes.chunks_mut(4096)) {
        let mut some = 0_u16;
        for (step, code) in part.iter().zip(codes) {
            let code_wide = step.zigzag();
            let fits = code_wide.widen() < u64::from(limit);
            *code = if fits { code_wide.widen() as u16 } else { 0 };
            some += u16::from(*code == 0);
        }
        zeros += usize::from(some);
    }
    zeros
}

#[inline(always)]
pub(super) fn unzigzag<W: Word>(codes: &[u16], steps: &mut [W]) {
    for (code, step) in codes.iter().zip(steps) {
        *step = W::unzigzag(*code);
    }
}

pub(super) fn add_up(
    (parts, highs): (&[u16], &[u16]),
    low: u32,
    from: u64,
    places: &mut [u16],
) -> u64 {
    let mut next = from;
    for ((part, high), place) in parts.iter().zip(highs).zip(places) {
        let gap = u64::from(*high) << low | u64::from(part & ((1 << low) - 1));
        next += gap + 1;
        *place = next.wrapping_sub(1) as u16;
    }
    next
}

/// The first of `numbers` has index `first`.
pub(super) fn find(
    numbers: &[u16],
    (mask, value): (u16, u16),
    first: usize,
    places: &mut [u16],
) -> usize {
    let is_one = |number: &u16| number & mask == value;
    let mut found = 0;
    for (part, index) in numbers.chunks(32).zip((first..).step_by(32)) {
        let some = part
            .iter()
            .fold(0, |some, one| some | u16::from(is_one(one)));
        if some == 0 {
            continue;
        }
        for (number, index) in part.iter().zip(index..) {
            // Written in any case, and kept if it is one: no branch.
            places[found] = index as u16;
            found += usize::from(is_one(number));
        }
    }
    found
}
