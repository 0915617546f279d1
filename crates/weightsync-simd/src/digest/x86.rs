//! The digest with AES-NI, a block at a time, and with VAES, a line at a time.

use core::arch::x86_64::{
    __m128i, __m512i, _MM_HINT_T0, _MM_PERM_BADC, _mm_add_epi64, _mm_aesenc_si128, _mm_loadu_si128,
    _mm_prefetch, _mm_set_epi64x, _mm_setzero_si128, _mm_shuffle_epi32, _mm_storeu_si128,
    _mm_xor_si128, _mm512_add_epi64, _mm512_aesenc_epi128, _mm512_broadcast_i32x4,
    _mm512_loadu_si512, _mm512_set_epi64, _mm512_setzero_si512, _mm512_shuffle_epi32,
    _mm512_storeu_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
};

use super::{BLOCKS, KEYS, Line, STRIDES, digest_add};

/// How far ahead of the loads the lines are prefetched, in bytes; past the end it is harmless. One
/// page, because the hardware's own prefetcher stops at a page's end.
const AHEAD: usize = 4096;

/// The sum of `lines`; the first has index `first_line`.
#[target_feature(enable = "aes")]
pub(super) fn sum_128(lines: &[Line], first_line: u64) -> [u64; 2] {
    let keys = KEYS.map(|[low, high]| _mm_set_epi64x(high as i64, low as i64));
    let [low, high] = tweak(first_line.wrapping_mul(BLOCKS));
    let mut tweak = _mm_set_epi64x(high as i64, low as i64);
    let stride = _mm_set_epi64x(STRIDES[1] as i64, STRIDES[0] as i64);
    // One sum per block of a line, so that additions do not wait for each other.
    let mut sums = [_mm_setzero_si128(); BLOCKS as usize];
    for line in lines {
        for (block, sum) in line.as_chunks::<16>().0.iter().zip(&mut sums) {
            // SAFETY: the block is 16 readable bytes; the load takes any alignment.
            let data = unsafe { _mm_loadu_si128(block.as_ptr().cast::<__m128i>()) };
            let exchanged = _mm_shuffle_epi32::<_MM_PERM_BADC>(tweak);
            let mut state = _mm_xor_si128(data, _mm_xor_si128(keys[0], tweak));
            state = _mm_aesenc_si128(state, keys[1]);
            state = _mm_aesenc_si128(state, _mm_xor_si128(keys[2], exchanged));
            state = _mm_aesenc_si128(state, keys[3]);
            state = _mm_aesenc_si128(state, keys[4]);
            *sum = _mm_add_epi64(*sum, state);
            tweak = _mm_add_epi64(tweak, stride);
        }
    }
    let mut words = [[0; 2]; BLOCKS as usize];
    for (word, sum) in words.iter_mut().zip(sums) {
        // SAFETY: the two words are 16 writable bytes.
        unsafe { _mm_storeu_si128(word.as_mut_ptr().cast::<__m128i>(), sum) };
    }
    words.into_iter().fold([0; 2], digest_add)
}

/// [`sum_128`], four blocks to a vector.
#[target_feature(enable = "avx512f,vaes")]
pub(super) fn sum_512(lines: &[Line], first_line: u64) -> [u64; 2] {
    let keys =
        KEYS.map(|[low, high]| _mm512_broadcast_i32x4(_mm_set_epi64x(high as i64, low as i64)));
    let number = first_line.wrapping_mul(BLOCKS);
    let mut tweak = vector([0, 1, 2, 3].map(|block| tweak(number.wrapping_add(block))));
    let stride = vector([STRIDES.map(|stride| stride.wrapping_mul(BLOCKS)); BLOCKS as usize]);
    let mut sum = _mm512_setzero_si512();
    for line in lines {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
        // SAFETY: the line is 64 readable bytes; the load takes any alignment.
        let data = unsafe { _mm512_loadu_si512(line.as_ptr().cast::<__m512i>()) };
        let exchanged = _mm512_shuffle_epi32::<_MM_PERM_BADC>(tweak);
        let mut state = _mm512_ternarylogic_epi64::<XOR3>(data, keys[0], tweak);
        state = _mm512_aesenc_epi128(state, keys[1]);
        state = _mm512_aesenc_epi128(state, _mm512_xor_si512(keys[2], exchanged));
        state = _mm512_aesenc_epi128(state, keys[3]);
        state = _mm512_aesenc_epi128(state, keys[4]);
        sum = _mm512_add_epi64(sum, state);
        tweak = _mm512_add_epi64(tweak, stride);
    }
    let mut words = [[0; 2]; BLOCKS as usize];
    // SAFETY: the eight words are 64 writable bytes.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast::<__m512i>(), sum) };
    words.into_iter().fold([0; 2], digest_add)
}

/// The sum of the lines numbered `which`; the first of `lines` has index `first_line`.
#[target_feature(enable = "aes")]
pub(super) fn sum_at_128(lines: &[Line], which: &[u16], first_line: u64) -> [u64; 2] {
    which.iter().fold([0; 2], |sum, &line| {
        let index = first_line.wrapping_add(u64::from(line));
        let line = core::slice::from_ref(&lines[usize::from(line)]);
        digest_add(sum, sum_128(line, index))
    })
}

/// [`sum_at_128`], four blocks to a vector.
#[target_feature(enable = "avx512f,vaes")]
pub(super) fn sum_at_512(lines: &[Line], which: &[u16], first_line: u64) -> [u64; 2] {
    let keys =
        KEYS.map(|[low, high]| _mm512_broadcast_i32x4(_mm_set_epi64x(high as i64, low as i64)));
    let blocks = vector([0, 1, 2, 3].map(tweak));
    let mut sum = _mm512_setzero_si512();
    for &line in which {
        let index = first_line.wrapping_add(u64::from(line));
        let [low, high] = tweak(index.wrapping_mul(BLOCKS));
        let first = _mm512_broadcast_i32x4(_mm_set_epi64x(high as i64, low as i64));
        let tweak = _mm512_add_epi64(first, blocks);
        // SAFETY: the line is 64 readable bytes; the load takes any alignment.
        let data = unsafe { _mm512_loadu_si512(lines[usize::from(line)].as_ptr().cast()) };
        let exchanged = _mm512_shuffle_epi32::<_MM_PERM_BADC>(tweak);
        let mut state = _mm512_ternarylogic_epi64::<XOR3>(data, keys[0], tweak);
        state = _mm512_aesenc_epi128(state, keys[1]);
        state = _mm512_aesenc_epi128(state, _mm512_xor_si512(keys[2], exchanged));
        state = _mm512_aesenc_epi128(state, keys[3]);
        state = _mm512_aesenc_epi128(state, keys[4]);
        sum = _mm512_add_epi64(sum, state);
    }
    let mut words = [[0; 2]; BLOCKS as usize];
    // SAFETY: the eight words are 64 writable bytes.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast::<__m512i>(), sum) };
    words.into_iter().fold([0; 2], digest_add)
}

/// The truth table of a three-way exclusive or.
const XOR3: i32 = 0x96;

/// The tweak of block `number`.
fn tweak(number: u64) -> [u64; 2] {
    STRIDES.map(|stride| number.wrapping_mul(stride))
}

#[target_feature(enable = "avx512f")]
fn vector(blocks: [[u64; 2]; 4]) -> __m512i {
    let [a, b, c, d] = blocks.map(|words| words.map(|word| word as i64));
    _mm512_set_epi64(d[1], d[0], c[1], c[0], b[1], b[0], a[1], a[0])
}
