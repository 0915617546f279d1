//! The loops of x86-64: by parallel extract and deposit, and by vectors.

use core::arch::x86_64::*;

use super::scalar::{self, word_at};
use crate::delta::{Word, iota};

/// The lowest `bits` of each of four 16-bit numbers.
fn lanes(bits: u32) -> u64 {
    ((1_u64 << bits) - 1) * 0x0001_0001_0001_0001
}

/// Eight numbers are whole bytes, as many as each has bits.
#[target_feature(enable = "bmi1,bmi2,popcnt")]
pub(super) fn pack(numbers: &[u16], bits: u32, out: &mut [u8]) {
    let lanes = lanes(bits);
    let (eights, rest) = numbers.as_chunks::<8>();
    let mut at = 0;
    for eight in eights {
        let [low, high] = halves(eight).map(|four| u128::from(_pext_u64(four, lanes)));
        let packed = low | high << (4 * bits);
        out[at..at + 16].copy_from_slice(&packed.to_le_bytes());
        at += bits as usize;
    }
    scalar::pack(rest, bits, &mut out[at..]);
}

fn halves(eight: &[u16; 8]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h] = eight.map(u64::from);
    [
        a | b << 16 | c << 32 | d << 48,
        e | f << 16 | g << 32 | h << 48,
    ]
}

#[target_feature(enable = "bmi1,bmi2,popcnt")]
pub(super) fn unpack(bytes: &[u8], bits: u32, numbers: &mut [u16]) {
    let lanes = lanes(bits);
    let (eights, rest) = numbers.as_chunks_mut::<8>();
    let mut at = 0;
    for eight in eights {
        let [low, high] = match bits {
            ..=8 => {
                let word = word_at(bytes, at);
                [word, word >> (4 * bits)]
            }
            // Of an odd number of bits the other half begins within a byte.
            _ => {
                let half = 4 * bits as usize;
                [
                    word_at(bytes, at),
                    word_at(bytes, at + half / 8) >> (half % 8),
                ]
            }
        };
        // Also of 15 and 16 bits four are within a word: the other half of 15 begins at bit 4.
        for (four, word) in eight.as_chunks_mut::<4>().0.iter_mut().zip([low, high]) {
            let spread = _pdep_u64(word, lanes);
            *four = [
                spread as u16,
                (spread >> 16) as u16,
                (spread >> 32) as u16,
                (spread >> 48) as u16,
            ];
        }
        at += bits as usize;
    }
    scalar::unpack(bytes, at * 8, bits, rest);
}

/// The portable loop, with instructions for counting zeros.
#[target_feature(enable = "bmi1,bmi2,popcnt")]
pub(super) fn unpack_unary(bytes: &[u8], from: usize, numbers: &mut [u16]) -> Option<usize> {
    scalar::unpack_unary(bytes, from, numbers)
}

/// Numbers that are read at once, at most.
const AT_ONCE: usize = 64;

/// Thirty-two bits at a time: the places of ones among them, and then how far they lie from each other.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) fn unpack_unary_avx512(
    bytes: &[u8],
    mut from: usize,
    numbers: &mut [u16],
) -> Option<usize> {
    // The one before the first, then the others, and room for a vector.
    let mut ones = [0; 1 + AT_ONCE + 32];
    ones[0] = u16::MAX;
    'parts: for numbers in numbers.chunks_mut(AT_ONCE) {
        let (mut found, mut at) = (0, from);
        while found < numbers.len() {
            if at >= bytes.len() * 8 {
                return None;
            }
            if at - from > usize::from(u16::MAX) - 64 {
                // No encoder writes a run this long.
                from = scalar::unpack_unary(bytes, from, numbers)?;
                continue 'parts;
            }
            let word = (word_at(bytes, at / 8) >> (at % 8)) as u32;
            let indices = _mm512_add_epi16(iota(), _mm512_set1_epi16((at - from) as i16));
            let some = _mm512_maskz_compress_epi16(word, indices);
            let room = &mut ones[1 + found..][..32];
            // SAFETY: 32 numbers are a vector.
            unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), some) };
            found += word.count_ones() as usize;
            at += 32;
        }
        for (number, pair) in numbers.iter_mut().zip(ones.windows(2)) {
            *number = pair[1].wrapping_sub(pair[0]).wrapping_sub(1);
        }
        from += usize::from(ones[numbers.len()]) + 1;
    }
    Some(from)
}

/// Thirty-two gaps at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) fn add_up_avx512(
    (parts, highs): (&[u16], &[u16]),
    low: u32,
    from: u64,
    places: &mut [u16],
) -> u64 {
    let mask = _mm512_set1_epi16((1 << low) - 1);
    let shift = _mm_cvtsi32_si128(low as i32);
    let (one, last) = (_mm512_set1_epi16(1), _mm512_set1_epi16(31));
    let mut before = _mm512_set1_epi16((from as i16).wrapping_sub(1));
    let mut next = from;
    let (parts, parts_left) = parts.as_chunks::<32>();
    let (highs, highs_left) = highs.as_chunks::<32>();
    let (places, places_left) = places.as_chunks_mut::<32>();
    for ((part, high), place) in parts.iter().zip(highs).zip(places) {
        // SAFETY: 32 numbers are a vector; the load takes any alignment.
        let part = unsafe { _mm512_loadu_si512(part.as_ptr().cast()) };
        let part = _mm512_and_si512(part, mask);
        // SAFETY: likewise.
        let high = unsafe { _mm512_loadu_si512(high.as_ptr().cast()) };
        let gap = _mm512_or_si512(_mm512_sll_epi16(high, shift), part);
        let mut sum = _mm512_add_epi16(gap, one);
        sum = further::<1>(sum);
        sum = further::<2>(sum);
        sum = further::<4>(sum);
        sum = further::<8>(sum);
        sum = further::<16>(sum);
        sum = _mm512_add_epi16(sum, before);
        before = _mm512_permutexvar_epi16(last, sum);
        // SAFETY: 32 numbers are a vector.
        unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), sum) };
        // Whether all of it has gone beyond 16 bits.
        next += (total(high) << low) + total(part) + 32;
    }
    scalar::add_up((parts_left, highs_left), low, next, places_left)
}

/// Each number, and the one that is `BY` before it.
#[target_feature(enable = "avx512f,avx512bw")]
fn further<const BY: i16>(numbers: __m512i) -> __m512i {
    let from = _mm512_sub_epi16(iota(), _mm512_set1_epi16(BY));
    let moved = _mm512_maskz_permutexvar_epi16(u32::MAX << BY, from, numbers);
    _mm512_add_epi16(numbers, moved)
}

/// The sum of thirty-two numbers.
#[target_feature(enable = "avx512f,avx512bw")]
fn total(numbers: __m512i) -> u64 {
    let low = _mm512_and_si512(numbers, _mm512_set1_epi32(0xffff));
    let both = _mm512_add_epi32(low, _mm512_srli_epi32::<16>(numbers));
    _mm512_reduce_add_epi32(both) as u64
}

/// Thirty-two numbers at a time, without a branch.
///
/// # Safety
///
/// The processor has the features; `places` has room for all numbers and `SLACK` more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn find_avx512(numbers: &[u16], wanted: (u16, u16), places: &mut [u16]) -> usize {
    let (vectors, rest) = numbers.as_chunks::<32>();
    let mask = _mm512_set1_epi16(wanted.0 as i16);
    let value = _mm512_set1_epi16(wanted.1 as i16);
    let mut indices = iota();
    let advance = _mm512_set1_epi16(32);
    let mut found = 0;
    for vector in vectors {
        // SAFETY: the vector is 64 readable bytes; the load takes any alignment.
        let vector = unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) };
        let these = _mm512_cmpeq_epi16_mask(_mm512_and_si512(vector, mask), value);
        let some = _mm512_maskz_compress_epi16(these, indices);
        // SAFETY: no more were found than numbers seen, and there is room for a vector more.
        let place = unsafe { places.as_mut_ptr().add(found) };
        // SAFETY: so there is room for it.
        unsafe { _mm512_storeu_si512(place.cast(), some) };
        found += these.count_ones() as usize;
        indices = _mm512_add_epi16(indices, advance);
    }
    let first = vectors.len() * 32;
    found + scalar::find(rest, wanted, first, &mut places[found..])
}

macro_rules! wide {
    ($zigzag:ident, $unzigzag:ident, $features:literal) => {
        /// The portable loop, in vectors.
        #[target_feature(enable = $features)]
        pub(super) fn $zigzag<W: Word>(steps: &[W], limit: u16, codes: &mut [u16]) -> usize {
            scalar::zigzag(steps, limit, codes)
        }

        /// The portable loop, in vectors.
        #[target_feature(enable = $features)]
        pub(super) fn $unzigzag<W: Word>(codes: &[u16], steps: &mut [W]) {
            scalar::unzigzag(codes, steps);
        }
    };
}

wide!(
    zigzag_avx512,
    unzigzag_avx512,
    "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt"
);
wide!(zigzag_avx2, unzigzag_avx2, "avx2,bmi1,bmi2,popcnt");
