//! Casts with AVX-512, sixteen elements at a time, by way of sixteen `f32`.

use core::arch::x86_64::{
    __m256i, __m512, __m512d, __m512i, _CMP_NEQ_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _MM_FROUND_TO_ZERO, _MM_HINT_T0, _mm_prefetch, _mm256_castpd_ps, _mm256_castps_pd,
    _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256, _mm512_add_epi32,
    _mm512_and_si512, _mm512_castpd_ps, _mm512_castpd_si512, _mm512_castps_pd, _mm512_castps_si512,
    _mm512_castps256_ps512, _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cmp_pd_mask,
    _mm512_cmpgt_epu32_mask, _mm512_cvt_roundpd_ps, _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32,
    _mm512_cvtpd_ps, _mm512_cvtph_ps, _mm512_cvtps_pd, _mm512_cvtps_ph, _mm512_extractf64x4_pd,
    _mm512_insertf64x4, _mm512_loadu_pd, _mm512_loadu_ps, _mm512_mask_mov_epi32,
    _mm512_mask_or_epi32, _mm512_or_si512, _mm512_set1_epi32, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_si512, _mm512_stream_si512,
};

use super::Float;
use crate::copy::fence;

/// How far ahead of the loads the source is prefetched, in bytes; past the end it is harmless. One
/// page, because the hardware's own prefetcher stops at a page's end.
const AHEAD: usize = 4096;

/// Elements of a step.
const STEP: usize = 16;

/// Casts as many of `count` elements as are whole steps, and returns how many those are.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `count` elements of their formats, without overlap; with
/// `streams`, `dst` is 64-byte aligned; the processor has AVX-512F.
pub(super) unsafe fn cast(
    to: Float,
    dst: *mut u8,
    from: Float,
    src: *const u8,
    count: usize,
    streams: bool,
) -> usize {
    let steps = count / STEP;
    macro_rules! run {
        ($($from:ident => $($to:ident)+;)+) => {
            match (from, to, streams) {
                $($(
                    // SAFETY: the caller's promise, for the whole steps among `count` elements.
                    (Float::$from, Float::$to, true) => unsafe {
                        run::<{ Float::$from as u8 }, { Float::$to as u8 }, true>(dst, src, steps)
                    },
                    // SAFETY: likewise.
                    (Float::$from, Float::$to, false) => unsafe {
                        run::<{ Float::$from as u8 }, { Float::$to as u8 }, false>(dst, src, steps)
                    },
                )+)+
                // The same format is a copy, made elsewhere.
                _ => return 0,
            }
        };
    }
    run! {
        F64 => F32 F16 Bf16;
        F32 => F64 F16 Bf16;
        F16 => F64 F32 Bf16;
        Bf16 => F64 F32 F16;
    }
    if streams {
        fence();
    }
    steps * STEP
}

const F64: u8 = Float::F64 as u8;
const F32: u8 = Float::F32 as u8;
const F16: u8 = Float::F16 as u8;

/// # Safety
///
/// As [`cast`], for `steps` steps of elements of the formats `FROM` and `TO`.
#[target_feature(enable = "avx512f")]
unsafe fn run<const FROM: u8, const TO: u8, const STREAMS: bool>(
    dst: *mut u8,
    src: *const u8,
    steps: usize,
) {
    for step in 0..steps {
        _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(step * STEP * width(FROM) + AHEAD).cast());
        // SAFETY: the step lies inside the `steps` steps of the source.
        let from = unsafe { src.add(step * STEP * width(FROM)) };
        // SAFETY: likewise for the destination.
        let to = unsafe { dst.add(step * STEP * width(TO)) };
        // SAFETY: a step of `FROM` is readable there.
        let values = unsafe { load::<FROM, TO>(from) };
        // SAFETY: a step of `TO` is writable there, aligned to a line or half of one if streaming.
        unsafe { store::<TO, STREAMS>(to, values) };
    }
}

const fn width(format: u8) -> usize {
    match format {
        F64 => 8,
        F32 => 4,
        _ => 2,
    }
}

/// Loads a step of `FROM`, as `f32` that round to `TO` as the values themselves do.
///
/// # Safety
///
/// A step of `FROM` is readable at `from`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load<const FROM: u8, const TO: u8>(from: *const u8) -> __m512 {
    match FROM {
        F64 => {
            // SAFETY: the first 64 of 128 bytes.
            let low = unsafe { _mm512_loadu_pd(from.cast::<f64>()) };
            // SAFETY: inside the 128 bytes.
            let from = unsafe { from.add(64) };
            // SAFETY: the last 64 of 128 bytes.
            let high = unsafe { _mm512_loadu_pd(from.cast::<f64>()) };
            if TO == F32 {
                nearest(low, high)
            } else {
                odd(low, high)
            }
        }
        // SAFETY: 64 bytes.
        F32 => unsafe { _mm512_loadu_ps(from.cast::<f32>()) },
        _ => {
            // SAFETY: 32 bytes.
            let halves = unsafe { _mm256_loadu_si256(from.cast::<__m256i>()) };
            if FROM == F16 {
                _mm512_cvtph_ps(halves)
            } else {
                widen_bf16(halves)
            }
        }
    }
}

/// Stores sixteen values as `TO`.
///
/// # Safety
///
/// A step of `TO` is writable at `to`, which is aligned to its size, or to 64 bytes if that is less,
/// if `STREAMS`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const TO: u8, const STREAMS: bool>(to: *mut u8, values: __m512) {
    match TO {
        F64 => {
            let low = _mm512_castpd_si512(_mm512_cvtps_pd(_mm512_castps512_ps256(values)));
            let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(values));
            let high = _mm512_castpd_si512(_mm512_cvtps_pd(_mm256_castpd_ps(upper)));
            // SAFETY: the first 64 of 128 bytes.
            unsafe { put_512::<STREAMS>(to, low) };
            // SAFETY: inside the 128 bytes.
            let to = unsafe { to.add(64) };
            // SAFETY: the last 64 of 128 bytes.
            unsafe { put_512::<STREAMS>(to, high) };
        }
        F32 => {
            let bits = _mm512_castps_si512(values);
            // SAFETY: 64 bytes.
            unsafe { put_512::<STREAMS>(to, bits) };
        }
        F16 => {
            let halves =
                _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values);
            // SAFETY: 32 bytes.
            unsafe { put_256::<STREAMS>(to, halves) };
        }
        _ => {
            let halves = narrow_bf16(values);
            // SAFETY: 32 bytes.
            unsafe { put_256::<STREAMS>(to, halves) };
        }
    }
}

/// # Safety
///
/// 64 bytes are writable at `to`, which is aligned to 64 if `STREAMS`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put_512<const STREAMS: bool>(to: *mut u8, bytes: __m512i) {
    if STREAMS {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_si512(to.cast::<__m512i>(), bytes) };
    } else {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast::<__m512i>(), bytes) };
    }
}

/// # Safety
///
/// 32 bytes are writable at `to`, which is aligned to 32 if `STREAMS`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put_256<const STREAMS: bool>(to: *mut u8, bytes: __m256i) {
    if STREAMS {
        // SAFETY: the caller's promise.
        unsafe { _mm256_stream_si256(to.cast::<__m256i>(), bytes) };
    } else {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast::<__m256i>(), bytes) };
    }
}

/// Rounds to nearest.
#[inline]
#[target_feature(enable = "avx512f")]
fn nearest(low: __m512d, high: __m512d) -> __m512 {
    let low = _mm512_castps_pd(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)));
    let high = _mm256_castps_pd(_mm512_cvtpd_ps(high));
    _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, high))
}

/// Rounds to odd; see the scalar twin.
#[inline]
#[target_feature(enable = "avx512f")]
fn odd(low: __m512d, high: __m512d) -> __m512 {
    const TRUNCATE: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    let cut_low = _mm512_cvt_roundpd_ps::<TRUNCATE>(low);
    let cut_high = _mm512_cvt_roundpd_ps::<TRUNCATE>(high);
    // Ordered: a NaN counts as exact.
    let inexact_low = _mm512_cmp_pd_mask::<_CMP_NEQ_OQ>(_mm512_cvtps_pd(cut_low), low);
    let inexact_high = _mm512_cmp_pd_mask::<_CMP_NEQ_OQ>(_mm512_cvtps_pd(cut_high), high);
    let low = _mm512_castps_pd(_mm512_castps256_ps512(cut_low));
    let cut = _mm512_insertf64x4::<1>(low, _mm256_castps_pd(cut_high));
    let cut = _mm512_castpd_si512(cut);
    let inexact = u16::from(inexact_low) | u16::from(inexact_high) << 8;
    _mm512_castsi512_ps(_mm512_mask_or_epi32(
        cut,
        inexact,
        cut,
        _mm512_set1_epi32(1),
    ))
}

/// The upper halves of `f32`, with quiet NaNs.
#[inline]
#[target_feature(enable = "avx512f")]
fn widen_bf16(halves: __m256i) -> __m512 {
    let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves));
    let quiet = _mm512_set1_epi32(QUIET);
    _mm512_castsi512_ps(_mm512_mask_or_epi32(wide, nans(wide), wide, quiet))
}

/// Rounds to nearest even by adding just under half of the last place, and the last bit kept.
#[inline]
#[target_feature(enable = "avx512f")]
fn narrow_bf16(values: __m512) -> __m256i {
    let bits = _mm512_castps_si512(values);
    let kept = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), kept);
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(QUIET));
    let chosen = _mm512_mask_mov_epi32(rounded, nans(bits), quiet);
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(chosen))
}

/// The bit that makes a NaN of `f32` quiet.
const QUIET: i32 = 0x0040_0000;

/// Which of sixteen `f32` are NaN, by their bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn nans(bits: __m512i) -> u16 {
    let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff_ffff));
    _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32(0x7f80_0000))
}
