//! The loops of x86-64: four numbers at a time by parallel extract and deposit.

use core::arch::x86_64::{
    _mm512_add_epi16, _mm512_loadu_si512, _mm512_maskz_compress_epi16, _mm512_set_epi16,
    _mm512_set1_epi16, _mm512_storeu_si512, _mm512_testn_epi16_mask, _pdep_u64, _pext_u64,
};

use super::scalar::{self, Writer, word_at};
use crate::delta::Word;

/// The lowest `bits` of each of four 16-bit numbers.
fn lanes(bits: u32) -> u64 {
    ((1_u64 << bits) - 1) * 0x0001_0001_0001_0001
}

#[target_feature(enable = "bmi1,bmi2,popcnt")]
pub(super) fn pack(numbers: &[u16], bits: u32, out: &mut [u8]) {
    let mut writer = Writer::default();
    let lanes = lanes(bits);
    let (fours, rest) = numbers.as_chunks::<4>();
    for &[a, b, c, d] in fours {
        let four = u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48;
        let packed = _pext_u64(four, lanes);
        if bits <= 14 {
            writer.put(packed, 4 * bits, out);
        } else {
            let half = (1 << (2 * bits)) - 1;
            writer.put(packed & half, 2 * bits, out);
            writer.put(packed >> (2 * bits), 2 * bits, out);
        }
    }
    for &number in rest {
        writer.put(u64::from(number), bits, out);
    }
}

#[target_feature(enable = "bmi1,bmi2,popcnt")]
pub(super) fn unpack(bytes: &[u8], bits: u32, numbers: &mut [u16]) {
    // Of more than 14 bits, four do not come in one word at every place.
    if bits > 14 {
        return scalar::unpack(bytes, 0, bits, numbers);
    }
    let lanes = lanes(bits);
    let (fours, rest) = numbers.as_chunks_mut::<4>();
    let mut bit = 0;
    for four in fours {
        let word = word_at(bytes, bit / 8) >> (bit % 8);
        let spread = _pdep_u64(word, lanes);
        *four = [
            spread as u16,
            (spread >> 16) as u16,
            (spread >> 32) as u16,
            (spread >> 48) as u16,
        ];
        bit += 4 * bits as usize;
    }
    scalar::unpack(bytes, bit, bits, rest);
}

/// The portable loop, with instructions for counting zeros.
#[target_feature(enable = "bmi1,bmi2,popcnt")]
pub(super) fn unpack_unary(bytes: &[u8], numbers: &mut [u16]) -> Option<usize> {
    scalar::unpack_unary(bytes, numbers)
}

/// Thirty-two numbers at a time, without a branch.
///
/// # Safety
///
/// The processor has the features; `places` has room for all numbers and `SLACK` more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn zeros_avx512(numbers: &[u16], places: &mut [u16]) -> usize {
    let (vectors, rest) = numbers.as_chunks::<32>();
    let mut indices = _mm512_set_epi16(
        31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9,
        8, 7, 6, 5, 4, 3, 2, 1, 0,
    );
    let advance = _mm512_set1_epi16(32);
    let mut found = 0;
    for vector in vectors {
        // SAFETY: the vector is 64 readable bytes; the load takes any alignment.
        let vector = unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) };
        let zero = _mm512_testn_epi16_mask(vector, vector);
        let some = _mm512_maskz_compress_epi16(zero, indices);
        // SAFETY: no more were found than numbers seen, and there is room for a vector more.
        let place = unsafe { places.as_mut_ptr().add(found) };
        // SAFETY: so there is room for it.
        unsafe { _mm512_storeu_si512(place.cast(), some) };
        found += zero.count_ones() as usize;
        indices = _mm512_add_epi16(indices, advance);
    }
    let first = vectors.len() * 32;
    found + scalar::zeros(rest, first, &mut places[found..])
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
