//! Copy and checksum in the same registers.
//!
//! A CRC is the remainder of the message, read as a polynomial over GF(2), modulo P. Eight vectors
//! walk over the message side by side; at each step a 128-bit lane V, which stands `distance` bits
//! before the next data D it meets, is replaced by V * x^distance + D (mod P), a value of the same
//! remainder. What is left at the end is one group of bytes that has the checksum of all before it.
//! (V. Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ instruction",
//! Intel, 2009.) The lane is two 64-bit halves, so a step is two carry-less products:
//! V * x^distance = low * x^(distance + 64) + high * x^distance.

use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_cvtsi64_si128,
    _mm_loadu_si128, _mm_prefetch, _mm_set_epi64x, _mm_storeu_si128, _mm_stream_si128,
    _mm_xor_si128, _mm256_broadcastsi128_si256, _mm256_clmulepi64_epi128, _mm256_loadu_si256,
    _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256, _mm256_zextsi128_si256,
    _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_storeu_si512,
    _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm512_zextsi128_si512,
};

/// Vectors in flight: enough to hide the latency of a product.
const VECTORS: usize = 8;

/// Bytes a step of [`fold_512`] takes.
pub(super) const GROUP_512: usize = VECTORS * 64;

/// Bytes a step of [`fold_256`] takes.
pub(super) const GROUP_256: usize = VECTORS * 32;

/// Bytes a step of [`fold_128`] takes.
pub(super) const GROUP_128: usize = VECTORS * 16;

/// How far ahead of the loads the source is prefetched, in bytes; past the end it is harmless.
const AHEAD: usize = 4096;

/// Copies `groups` groups from `src` to `dst`, with non-temporal stores if `STREAMS`, and leaves in
/// `remainder` the bytes that, after a state of zero, have the checksum state that the copied bytes
/// have after `state`.
///
/// # Safety
///
/// `src` is readable and `dst`, 64-byte aligned, writable for `groups * GROUP_512` bytes, without
/// overlap; `groups` is at least 1; the processor has AVX-512F and VPCLMULQDQ.
///
/// # Panics
///
/// If `remainder` is not `GROUP_512` bytes.
#[target_feature(enable = "avx512f,vpclmulqdq")]
pub(super) unsafe fn fold_512<const STREAMS: bool>(
    dst: *mut u8,
    src: *const u8,
    groups: usize,
    state: u64,
    remainder: &mut [u8],
) {
    const FOLD: Fold = Fold::by_bytes(GROUP_512);
    let keys = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD.high as i64, FOLD.low as i64));
    let mut lanes = [_mm512_zextsi128_si512(_mm_cvtsi64_si128(0)); VECTORS];
    for group in 0..groups {
        for (index, lane) in lanes.iter_mut().enumerate() {
            let at = group * GROUP_512 + index * 64;
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(at + AHEAD).cast());
            // SAFETY: `at` counts vectors inside the groups.
            let from = unsafe { src.add(at) };
            // SAFETY: likewise for the destination.
            let to = unsafe { dst.add(at) }.cast::<__m512i>();
            // SAFETY: 64 readable bytes, any alignment.
            let data = unsafe { _mm512_loadu_si512(from.cast::<__m512i>()) };
            if STREAMS {
                // SAFETY: 64 writable bytes, aligned as `dst` is.
                unsafe { _mm512_stream_si512(to, data) };
            } else {
                // SAFETY: 64 writable bytes.
                unsafe { _mm512_storeu_si512(to, data) };
            }
            // The lanes start at zero, which folds to zero: the first group enters as it is.
            let low = _mm512_clmulepi64_epi128::<0x00>(*lane, keys);
            let high = _mm512_clmulepi64_epi128::<0x11>(*lane, keys);
            *lane = _mm512_ternarylogic_epi64::<XOR3>(low, high, data);
            if group == 0 && index == 0 {
                // The state so far is added to the first bytes, as every CRC does.
                let start = _mm512_zextsi128_si512(_mm_cvtsi64_si128(state as i64));
                *lane = _mm512_xor_si512(*lane, start);
            }
        }
    }
    for (bytes, lane) in remainder.as_chunks_mut::<64>().0.iter_mut().zip(lanes) {
        // SAFETY: the chunk is 64 writable bytes.
        unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast::<__m512i>(), lane) };
    }
}

/// What [`fold_256`] does with the bytes in addition to checksumming them.
pub(super) mod stores {
    /// Nothing: `dst` is not used.
    pub const NONE: u8 = 0;
    pub const PLAIN: u8 = 1;
    pub const STREAMS: u8 = 2;
}

/// [`fold_512`] with 32-byte vectors, which also can leave the copying out: `STORES` is one of
/// [`stores`].
///
/// # Safety
///
/// As [`fold_512`] with `GROUP_256`, `dst` only if it is stored to; the processor has AVX2 and
/// VPCLMULQDQ.
#[target_feature(enable = "avx2,vpclmulqdq")]
pub(super) unsafe fn fold_256<const STORES: u8>(
    dst: *mut u8,
    src: *const u8,
    groups: usize,
    state: u64,
    remainder: &mut [u8],
) {
    const FOLD: Fold = Fold::by_bytes(GROUP_256);
    let keys = _mm256_broadcastsi128_si256(_mm_set_epi64x(FOLD.high as i64, FOLD.low as i64));
    let mut lanes = [_mm256_zextsi128_si256(_mm_cvtsi64_si128(0)); VECTORS];
    for group in 0..groups {
        for (index, lane) in lanes.iter_mut().enumerate() {
            let at = group * GROUP_256 + index * 32;
            if index % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(at + AHEAD).cast());
            }
            // SAFETY: `at` counts vectors inside the groups.
            let from = unsafe { src.add(at) };
            // SAFETY: 32 readable bytes, any alignment.
            let data = unsafe { _mm256_loadu_si256(from.cast::<__m256i>()) };
            if STORES != stores::NONE {
                // SAFETY: as for the source.
                let to = unsafe { dst.add(at) }.cast::<__m256i>();
                if STORES == stores::STREAMS {
                    // SAFETY: 32 writable bytes, aligned as `dst` is.
                    unsafe { _mm256_stream_si256(to, data) };
                } else {
                    // SAFETY: 32 writable bytes.
                    unsafe { _mm256_storeu_si256(to, data) };
                }
            }
            let low = _mm256_clmulepi64_epi128::<0x00>(*lane, keys);
            let high = _mm256_clmulepi64_epi128::<0x11>(*lane, keys);
            *lane = _mm256_xor_si256(_mm256_xor_si256(low, high), data);
            if group == 0 && index == 0 {
                let start = _mm256_zextsi128_si256(_mm_cvtsi64_si128(state as i64));
                *lane = _mm256_xor_si256(*lane, start);
            }
        }
    }
    for (bytes, lane) in remainder.as_chunks_mut::<32>().0.iter_mut().zip(lanes) {
        // SAFETY: the chunk is 32 writable bytes.
        unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast::<__m256i>(), lane) };
    }
}

/// [`fold_512`] with 16-byte vectors.
///
/// # Safety
///
/// As [`fold_512`] with `GROUP_128`; the processor has PCLMULQDQ.
#[target_feature(enable = "pclmulqdq")]
pub(super) unsafe fn fold_128<const STREAMS: bool>(
    dst: *mut u8,
    src: *const u8,
    groups: usize,
    state: u64,
    remainder: &mut [u8],
) {
    const FOLD: Fold = Fold::by_bytes(GROUP_128);
    let keys = _mm_set_epi64x(FOLD.high as i64, FOLD.low as i64);
    let mut lanes = [_mm_cvtsi64_si128(0); VECTORS];
    for group in 0..groups {
        _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(group * GROUP_128 + AHEAD).cast());
        for (index, lane) in lanes.iter_mut().enumerate() {
            let at = group * GROUP_128 + index * 16;
            // SAFETY: `at` counts vectors inside the groups.
            let from = unsafe { src.add(at) };
            // SAFETY: likewise for the destination.
            let to = unsafe { dst.add(at) }.cast::<__m128i>();
            // SAFETY: 16 readable bytes, any alignment.
            let data = unsafe { _mm_loadu_si128(from.cast::<__m128i>()) };
            if STREAMS {
                // SAFETY: 16 writable bytes, aligned as `dst` is.
                unsafe { _mm_stream_si128(to, data) };
            } else {
                // SAFETY: 16 writable bytes.
                unsafe { _mm_storeu_si128(to, data) };
            }
            let low = _mm_clmulepi64_si128::<0x00>(*lane, keys);
            let high = _mm_clmulepi64_si128::<0x11>(*lane, keys);
            *lane = _mm_xor_si128(_mm_xor_si128(low, high), data);
            if group == 0 && index == 0 {
                *lane = _mm_xor_si128(*lane, _mm_cvtsi64_si128(state as i64));
            }
        }
    }
    for (bytes, lane) in remainder.as_chunks_mut::<16>().0.iter_mut().zip(lanes) {
        // SAFETY: the chunk is 16 writable bytes.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast::<__m128i>(), lane) };
    }
}

/// The truth table of a three-way exclusive or.
const XOR3: i32 = 0x96;

/// What the two halves of a lane are multiplied by to carry it over a distance.
struct Fold {
    low: u64,
    high: u64,
}

impl Fold {
    const fn by_bytes(bytes: usize) -> Self {
        let distance = 8 * bytes as u32;
        // The CRC is bit-reflected, and a product of two reflected 64-bit values lacks one factor x.
        Self {
            low: power_of_x(distance + 64 - 1),
            high: power_of_x(distance - 1),
        }
    }
}

/// x^`exponent` modulo the polynomial of CRC-64/NVME, bit-reflected.
const fn power_of_x(exponent: u32) -> u64 {
    const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659_u64.reverse_bits();
    let mut power: u64 = 1 << 63;
    let mut step = 0;
    while step < exponent {
        let carry = power & 1;
        power >>= 1;
        if carry == 1 {
            power ^= POLYNOMIAL;
        }
        step += 1;
    }
    power
}
