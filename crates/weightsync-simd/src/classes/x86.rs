//! The vector loops of x86-64: a mask of each class for every 64 elements.

use core::arch::x86_64::*;

use super::{CLASSES, Exponents, scalar};
use crate::delta::Word;

/// The classes of 64 elements.
type Group = [u8; 64];

/// The portable loop, for vectors of 32 bytes.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn classes_avx2<W: Word>(bytes: &[u8], exponents: Exponents, out: &mut [u8]) {
    scalar::classes::<W>(bytes, exponents, out);
}

/// The portable loop, for vectors of 64 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) fn classes_avx512<W: Word>(bytes: &[u8], exponents: Exponents, out: &mut [u8]) {
    if W::BYTES != 2 {
        return scalar::classes::<W>(bytes, exponents, out);
    }
    let shift = _mm_cvtsi32_si128(exponents.shift as i32);
    let mask = _mm512_set1_epi16(exponents.mask as i16);
    let top = _mm512_set1_epi16(exponents.top.min(0xffff) as i16);
    let last = _mm512_set1_epi16(CLASSES as i16 - 1);
    let (vectors, _) = bytes.as_chunks::<64>();
    let (classes, _) = out.as_chunks_mut::<32>();
    for (vector, classes) in vectors.iter().zip(classes) {
        // SAFETY: the vector is 64 readable bytes; the load takes any alignment.
        let words = unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) };
        let exponents = _mm512_and_si512(_mm512_srl_epi16(words, shift), mask);
        let below = _mm512_min_epu16(_mm512_subs_epu16(top, exponents), last);
        let bytes = _mm512_cvtepi16_epi8(below);
        // SAFETY: the classes are 32 writable bytes.
        unsafe { _mm256_storeu_si256(classes.as_mut_ptr().cast(), bytes) };
    }
    let done = bytes.len() / 64 * 32;
    scalar::classes::<W>(&bytes[done * 2..], exponents, &mut out[done..]);
}

macro_rules! by_masks {
    ($rank:ident, $select:ident, $features:literal, $mask:ident) => {
        /// Ranks the places within whole groups; returns how many those are.
        #[target_feature(enable = $features)]
        pub(super) fn $rank(
            classes: &[u8],
            places: &[u16],
            totals: &mut [u32; CLASSES],
            ranks: &mut [u32],
        ) -> usize {
            let mut done = 0;
            for (index, group) in classes.as_chunks::<64>().0.iter().enumerate() {
                while let Some(&place) = places.get(done) {
                    if usize::from(place) / 64 != index {
                        break;
                    }
                    let within = usize::from(place) % 64;
                    let class = group[within];
                    let before = $mask(group, class) & ((1 << within) - 1);
                    ranks[done] = totals[usize::from(class)] + before.count_ones();
                    done += 1;
                }
                for (class, total) in totals.iter_mut().enumerate() {
                    *total += $mask(group, class as u8).count_ones();
                }
            }
            done
        }

        /// Finds what is selected within whole groups.
        #[target_feature(enable = $features)]
        pub(super) fn $select(
            classes: &[u8],
            ranks: &[&[u32]; CLASSES],
            totals: &mut [u32; CLASSES],
            taken: &mut [usize; CLASSES],
            places: &mut [u16],
        ) -> usize {
            let next = |class: usize, taken: usize| ranks[class].get(taken).copied();
            let mut wanted: [u32; CLASSES] =
                core::array::from_fn(|class| next(class, taken[class]).unwrap_or(u32::MAX));
            let mut found = 0;
            for (index, group) in classes.as_chunks::<64>().0.iter().enumerate() {
                for class in 0..CLASSES {
                    let mask = $mask(group, class as u8);
                    let behind = totals[class] + mask.count_ones();
                    while wanted[class] < behind {
                        let bit = _pdep_u64(1 << (wanted[class] - totals[class]), mask);
                        places[found] = (index * 64) as u16 + bit.trailing_zeros() as u16;
                        found += 1;
                        taken[class] += 1;
                        wanted[class] = next(class, taken[class]).unwrap_or(u32::MAX);
                    }
                    totals[class] = behind;
                }
            }
            found
        }
    };
}

by_masks!(
    rank_avx512,
    select_avx512,
    "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt",
    mask_avx512
);
by_masks!(rank_avx2, select_avx2, "avx2,bmi1,bmi2,popcnt", mask_avx2);

/// Which of 64 elements are of a class.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn mask_avx512(group: &Group, class: u8) -> u64 {
    // SAFETY: the group is 64 readable bytes; the load takes any alignment.
    let group = unsafe { _mm512_loadu_si512(group.as_ptr().cast()) };
    _mm512_cmpeq_epi8_mask(group, _mm512_set1_epi8(class as i8))
}

/// [`mask_avx512`] in two halves.
#[inline]
#[target_feature(enable = "avx2")]
fn mask_avx2(group: &Group, class: u8) -> u64 {
    let class = _mm256_set1_epi8(class as i8);
    let (halves, _) = group.as_chunks::<32>();
    let mut mask = 0;
    for (half, bytes) in halves.iter().enumerate() {
        // SAFETY: the half is 32 readable bytes; the load takes any alignment.
        let bytes = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        let same = _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, class)) as u32;
        mask |= u64::from(same) << (32 * half);
    }
    mask
}
