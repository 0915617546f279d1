//! The vector loops of x86-64.

use core::arch::x86_64::*;

use super::{Word, scalar};

/// The portable loop, with an instruction for it.
#[target_feature(enable = "popcnt")]
pub(super) fn count_ones(words: &[u64]) -> usize {
    scalar::count_ones(words)
}

/// Brings the lines of these bytes, which begin with one, into the cache.
pub(super) fn prefetch_all(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        // SAFETY: SSE is part of x86-64, and a prefetch has no effect that can be seen.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
}

/// Brings the lines in which elements lie into the cache.
pub(super) fn prefetch(bytes: &[u8], places: &[u16], width: usize) {
    for &place in places {
        let at = usize::from(place) * width;
        if let Some(byte) = bytes.get(at) {
            // SAFETY: SSE is part of x86-64, and a prefetch has no effect that can be seen.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(core::ptr::from_ref(byte).cast()) };
        }
    }
}

/// Masks by 32-byte vectors; places and steps one by one.
///
/// # Safety
///
/// The processor has AVX2, BMI1, BMI2 and POPCNT; the lengths are those [`super::compare`] asks
/// for.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn compare_avx2<W: Word, const PLACES: bool>(
    old: &[u8],
    new: &[u8],
    masks: &mut [u64],
    places: &mut [u16],
    steps: &mut [W],
) -> usize {
    let group = 64 * W::BYTES;
    let whole = old.len() / group;
    let mut changes = 0;
    for (index, mask) in masks.iter_mut().enumerate().take(whole) {
        let (old, new) = (
            &old[index * group..][..group],
            &new[index * group..][..group],
        );
        // SAFETY: 64 elements are readable in both.
        *mask = unsafe { mask_avx2(old.as_ptr(), new.as_ptr(), W::BYTES) };
        if *mask != 0 {
            changes =
                scalar::extract::<W, PLACES>(old, new, *mask, index * 64, changes, places, steps);
        }
    }
    rest::<W, PLACES>(old, new, masks, places, steps, changes)
}

/// What is left behind the last whole group of 64 elements.
fn rest<W: Word, const PLACES: bool>(
    old: &[u8],
    new: &[u8],
    masks: &mut [u64],
    places: &mut [u16],
    steps: &mut [W],
    changes: usize,
) -> usize {
    let whole = old.len() / (64 * W::BYTES);
    let at = whole * 64 * W::BYTES;
    if at == old.len() {
        return changes;
    }
    let places = match PLACES {
        true => &mut places[changes..],
        false => places,
    };
    let (masks, steps) = (&mut masks[whole..], &mut steps[changes..]);
    let more = scalar::compare::<W, PLACES>(&old[at..], &new[at..], masks, places, steps);
    if PLACES {
        for place in &mut places[..more] {
            *place += (whole * 64) as u16;
        }
    }
    changes + more
}

/// Which of 64 elements differ.
///
/// # Safety
///
/// The processor has AVX2, and 64 elements of `width` bytes are readable at both.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn mask_avx2(old: *const u8, new: *const u8, width: usize) -> u64 {
    let equal = |vector: usize| {
        // SAFETY: the caller's: vectors are counted within the 64 elements.
        let old = unsafe { old.add(vector * 32) };
        // SAFETY: likewise.
        let new = unsafe { new.add(vector * 32) };
        // SAFETY: one vector is readable there; the load takes any alignment.
        let old = unsafe { _mm256_loadu_si256(old.cast()) };
        // SAFETY: likewise.
        let new = unsafe { _mm256_loadu_si256(new.cast()) };
        match width {
            1 => _mm256_cmpeq_epi8(old, new),
            2 => _mm256_cmpeq_epi16(old, new),
            4 => _mm256_cmpeq_epi32(old, new),
            _ => _mm256_cmpeq_epi64(old, new),
        }
    };
    let same = match width {
        1 => (0..2).fold(0, |same, half| {
            let bits = _mm256_movemask_epi8(equal(half)) as u32;
            same | u64::from(bits) << (32 * half)
        }),
        2 => (0..2).fold(0, |same, half| {
            let both = _mm256_packs_epi16(equal(2 * half), equal(2 * half + 1));
            let bits = _mm256_movemask_epi8(_mm256_permute4x64_epi64::<0b11_01_10_00>(both)) as u32;
            same | u64::from(bits) << (32 * half)
        }),
        4 => (0..8).fold(0, |same, eighth| {
            let bits = _mm256_movemask_ps(_mm256_castsi256_ps(equal(eighth))) as u32;
            same | u64::from(bits) << (8 * eighth)
        }),
        _ => (0..16).fold(0, |same, part| {
            let bits = _mm256_movemask_pd(_mm256_castsi256_pd(equal(part))) as u32;
            same | u64::from(bits) << (4 * part)
        }),
    };
    !same
}

/// Masks, places and steps by 64-byte vectors, without a branch.
///
/// # Safety
///
/// The processor has AVX-512 F, BW, VL and VBMI2 and what [`compare_avx2`] needs; the lengths are
/// those [`super::compare`] asks for.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn compare_avx512<W: Word, const PLACES: bool>(
    old: &[u8],
    new: &[u8],
    masks: &mut [u64],
    places: &mut [u16],
    steps: &mut [W],
) -> usize {
    // One function: the constants and the counts stay in registers from vector to vector, and each
    // width of an element needs its own instructions at the same two places of the loop.
    let vectors = W::BYTES;
    let lanes = 64 / W::BYTES;
    let whole = old.len() / (64 * W::BYTES);
    let mut changes = 0;
    // The numbers of the elements of a vector, in 16 bits each; of 64 one-byte elements the first
    // half.
    let mut numbers = iota();
    let half = _mm512_set1_epi16(32);
    let advance = _mm512_set1_epi16(lanes as i16);
    for (index, word) in masks.iter_mut().enumerate().take(whole) {
        let mut mask = 0;
        for vector in 0..vectors {
            let at = (index * vectors + vector) * 64;
            // SAFETY: `at` counts vectors within whole groups of 64 elements, in both images.
            let old = unsafe { old.as_ptr().add(at) };
            // SAFETY: likewise.
            let new = unsafe { new.as_ptr().add(at) };
            // SAFETY: one vector is readable there; the load takes any alignment.
            let old = unsafe { _mm512_loadu_si512(old.cast()) };
            // SAFETY: likewise.
            let new = unsafe { _mm512_loadu_si512(new.cast()) };
            let (differs, by) = match W::BYTES {
                1 => {
                    let differs = _mm512_cmpneq_epi8_mask(old, new);
                    let by = _mm512_sub_epi8(new, old);
                    (differs, _mm512_maskz_compress_epi8(differs, by))
                }
                2 => {
                    let differs = _mm512_cmpneq_epi16_mask(old, new);
                    let by = _mm512_sub_epi16(new, old);
                    let by = _mm512_maskz_compress_epi16(differs, by);
                    (u64::from(differs), by)
                }
                4 => {
                    let differs = _mm512_cmpneq_epi32_mask(old, new);
                    let by = _mm512_sub_epi32(new, old);
                    let by = _mm512_maskz_compress_epi32(differs, by);
                    (u64::from(differs), by)
                }
                _ => {
                    let differs = _mm512_cmpneq_epi64_mask(old, new);
                    let by = _mm512_sub_epi64(new, old);
                    let by = _mm512_maskz_compress_epi64(differs, by);
                    (u64::from(differs), by)
                }
            };
            // SAFETY: at most as many changes as elements came before, and there is room for `SLACK`
            // more, which is a vector of bytes.
            let step = unsafe { steps.as_mut_ptr().add(changes) };
            // SAFETY: so there is room for a vector.
            unsafe { _mm512_storeu_si512(step.cast(), by) };
            if PLACES {
                // SAFETY: as of the steps.
                let place = unsafe { places.as_mut_ptr().add(changes) };
                let low = _mm512_maskz_compress_epi16(differs as u32, numbers);
                // SAFETY: room for 64 places more, of which this is the half.
                unsafe { _mm512_storeu_si512(place.cast(), low) };
                if W::BYTES == 1 {
                    let numbers = _mm512_add_epi16(numbers, half);
                    let high = _mm512_maskz_compress_epi16((differs >> 32) as u32, numbers);
                    // SAFETY: at most 32 places came since.
                    let place = unsafe { place.add((differs as u32).count_ones() as usize) };
                    // SAFETY: so there is room for 32 more.
                    unsafe { _mm512_storeu_si512(place.cast(), high) };
                }
                numbers = _mm512_add_epi16(numbers, advance);
            }
            changes += differs.count_ones() as usize;
            mask |= differs << (vector * lanes % 64);
        }
        *word = mask;
    }
    rest::<W, PLACES>(old, new, masks, places, steps, changes)
}

/// 0, 1, 2 …
#[target_feature(enable = "avx512f")]
pub(crate) fn iota() -> __m512i {
    _mm512_set_epi16(
        31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9,
        8, 7, 6, 5, 4, 3, 2, 1, 0,
    )
}

/// Thirty-two bits at a time.
///
/// # Safety
///
/// The processor has the features; `places` has room for 64 for each word, and `SLACK` more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn ones_avx512(masks: &[u64], places: &mut [u16]) -> usize {
    let (mut numbers, half) = (iota(), _mm512_set1_epi16(32));
    let mut found = 0;
    for &mask in masks {
        for bits in [mask as u32, (mask >> 32) as u32] {
            let some = _mm512_maskz_compress_epi16(bits, numbers);
            // SAFETY: no more were found than bits seen, and there is room for a vector more.
            let place = unsafe { places.as_mut_ptr().add(found) };
            // SAFETY: so there is room for it.
            unsafe { _mm512_storeu_si512(place.cast(), some) };
            found += bits.count_ones() as usize;
            numbers = _mm512_add_epi16(numbers, half);
        }
    }
    found
}

/// Takes as many steps as `masks` has bits; returns how many.
///
/// # Safety
///
/// As [`compare_avx512`]; `bytes` hold 64 elements for every word of `masks`, and `steps` as many
/// as bits are set and `SLACK` more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn expand_avx512<W: Word>(bytes: &mut [u8], masks: &[u64], steps: &[W]) -> usize {
    let vectors = W::BYTES;
    let lanes = 64 / W::BYTES;
    let mut taken = 0;
    for (index, &word) in masks.iter().enumerate() {
        for vector in 0..vectors {
            let at = (index * vectors + vector) * 64;
            // SAFETY: the caller's: 64 elements for each word.
            let bytes = unsafe { bytes.as_mut_ptr().add(at) };
            // SAFETY: one vector is readable there; the load takes any alignment.
            let old = unsafe { _mm512_loadu_si512(bytes.cast()) };
            // SAFETY: no more steps were taken than bits were seen.
            let steps = unsafe { steps.as_ptr().add(taken) };
            // SAFETY: `SLACK` steps more are readable, which is a vector of bytes.
            let steps = unsafe { _mm512_loadu_si512(steps.cast()) };
            let mask = match W::BYTES {
                1 => word,
                _ => word >> (vector * lanes) & ((1 << (lanes % 64)) - 1),
            };
            let new = match W::BYTES {
                1 => _mm512_add_epi8(old, _mm512_maskz_expand_epi8(mask, steps)),
                2 => {
                    let by = _mm512_maskz_expand_epi16(mask as u32, steps);
                    _mm512_add_epi16(old, by)
                }
                4 => {
                    let by = _mm512_maskz_expand_epi32(mask as u16, steps);
                    _mm512_add_epi32(old, by)
                }
                _ => {
                    let by = _mm512_maskz_expand_epi64(mask as u8, steps);
                    _mm512_add_epi64(old, by)
                }
            };
            // SAFETY: the vector that was read.
            unsafe { _mm512_storeu_si512(bytes.cast(), new) };
            taken += mask.count_ones() as usize;
        }
    }
    taken
}
