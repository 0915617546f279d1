//! The streaming loops of x86-64.

use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
    _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

use super::LINE;

/// A copy of at least this many lines is made as two halves, side by side.
///
/// One thread is held back by how many lines the hardware's prefetcher keeps on their way, and it
/// keeps some for each stream it sees: two streams copy 1 GiB in about 0.87 of the time of one
/// (Zen 5). More streams, or software prefetch of one, gain nothing.
const TWO_STREAMS: usize = (512 << 10) / LINE;

/// Lines copied of one half before the other's turn: enough to keep each half's stores together.
/// With 512-bit vectors two do (Zen 5); with narrower ones eight take some 5 % less than two
/// (Zen 3), and turns of a page, or four streams of a source that is not aligned, more again.
const TURN: usize = 8;
const WIDE_TURN: usize = 2;

/// Makes every earlier non-temporal store visible before any later store.
#[inline]
pub(super) fn fence() {
    // SAFETY: `sfence` is part of SSE, which every x86-64 processor has.
    unsafe { _mm_sfence() };
}

macro_rules! stream {
    ($name:ident, $few:ident, $feature:literal, $turn:expr, $vector:ty, $load:ident, $store:ident) => {
        /// Copies `lines` lines with non-temporal stores.
        ///
        /// # Safety
        ///
        /// `src` is readable and `dst` writable for `lines` lines, without overlap; `dst` is
        /// aligned to a line unless `lines` is 0; the processor has the feature in the name.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $name(dst: *mut u8, src: *const u8, lines: usize) {
            let turns = if lines >= TWO_STREAMS {
                lines / (2 * $turn)
            } else {
                0
            };
            for turn in 0..turns {
                for line in [turn * $turn, (turns + turn) * $turn] {
                    // SAFETY: `turns * 2 * $turn <= lines`, so every turn lies inside.
                    unsafe { $few(dst, src, line, line + $turn) };
                }
            }
            // SAFETY: what the turns have left, up to the end.
            unsafe { $few(dst, src, 2 * turns * $turn, lines) };
        }

        /// Copies the lines `from..to`, in order.
        ///
        /// # Safety
        ///
        /// As above, with `to` lines.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $few(dst: *mut u8, src: *const u8, from: usize, to: usize) {
            for line in from..to {
                for part in 0..LINE / size_of::<$vector>() {
                    let at = line * LINE + part * size_of::<$vector>();
                    // SAFETY: `at` counts vectors inside the lines.
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
    few_sse2,
    "sse2",
    TURN,
    __m128i,
    _mm_loadu_si128,
    _mm_stream_si128
);
stream!(
    stream_avx2,
    few_avx2,
    "avx2",
    TURN,
    __m256i,
    _mm256_loadu_si256,
    _mm256_stream_si256
);
stream!(
    stream_avx512,
    few_avx512,
    "avx512f",
    WIDE_TURN,
    __m512i,
    _mm512_loadu_si512,
    _mm512_stream_si512
);
