//! The streaming loops of x86-64.

use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence,
    _mm_stream_si128, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
    _mm512_stream_si512,
};

use super::LINE;

/// How far ahead of the loads the source is prefetched, in bytes: one page, because the hardware's
/// own prefetcher stops at a page's end.
const AHEAD: usize = 4096;

/// Makes every earlier non-temporal store visible before any later store.
#[inline]
pub(super) fn fence() {
    // SAFETY: `sfence` is part of SSE, which every x86-64 processor has.
    unsafe { _mm_sfence() };
}

macro_rules! stream {
    ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
        /// Copies `lines` lines with non-temporal stores, in order.
        ///
        /// # Safety
        ///
        /// `src` is readable and `dst` writable for `lines` lines, without overlap; `dst` is
        /// aligned to a line unless `lines` is 0; the processor has the feature in the name.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $name(dst: *mut u8, src: *const u8, lines: usize) {
            for line in 0..lines {
                // A prefetch past the end is harmless: it never faults.
                _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(line * LINE + AHEAD).cast());
                for part in 0..LINE / size_of::<$vector>() {
                    let at = line * LINE + part * size_of::<$vector>();
                    // SAFETY: `at` counts vectors inside the `lines` lines.
                    let from = unsafe { src.add(at) };
                    // SAFETY: likewise for the destination.
                    let to = unsafe { dst.add(at) };
                    // SAFETY: one vector is readable there; the load takes any alignment.
                    let vector = unsafe { $load(from.cast::<$vector>()) };
                    // SAFETY: one vector is writable there, and `dst` is aligned to a line.
                    unsafe { $store(to.cast::<$vector>(), vector) };
                }
            }
        }
    };
}

stream!(
    stream_sse2,
    "sse2",
    __m128i,
    _mm_loadu_si128,
    _mm_stream_si128
);
stream!(
    stream_avx2,
    "avx2",
    __m256i,
    _mm256_loadu_si256,
    _mm256_stream_si256
);
stream!(
    stream_avx512,
    "avx512f",
    __m512i,
    _mm512_loadu_si512,
    _mm512_stream_si512
);
