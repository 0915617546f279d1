//! Copying with non-temporal stores.
//!
//! A plain store to a line that is not in the cache first reads that line from memory. A full-line
//! non-temporal store does not, so a copy moves two bytes over the memory bus for each byte copied
//! instead of three, and it leaves the reader's working set in the cache alone.

/// Copies shorter than this many bytes are plain: they fit the cache, where their reader wants
/// them, and a non-temporal store would push them out to memory.
pub const STREAM_THRESHOLD: usize = 256 * 1024;

/// Copies `len` bytes from `src` to `dst` with non-temporal stores.
///
/// Everything stored is visible to whoever observes a later release store of the calling thread:
/// non-temporal stores are weakly ordered, and this function fences them before it returns.
///
/// Copies below [`STREAM_THRESHOLD`] are plain copies. Any alignment of either pointer is fine.
///
/// # Safety
///
/// - `src` is valid for reads and `dst` for writes of `len` bytes, and the two do not overlap;
/// - no reference to the destination bytes is alive in this process.
///
/// The source is only ever read through the raw pointer, each byte once. If something outside the
/// program's memory model (another process, a device, an interpreter's native code) writes it
/// meanwhile, each byte copied is one the location held at some time during the call, and nothing
/// more is promised.
///
/// # Example
///
/// ```
/// let source = vec![7_u8; 1 << 20];
/// let mut copy = vec![0_u8; 1 << 20];
/// // SAFETY: both pointers come from distinct vectors of that length.
/// unsafe { weightsync_simd::stream_copy(copy.as_mut_ptr(), source.as_ptr(), source.len()) };
/// assert_eq!(copy, source);
/// ```
#[inline]
pub unsafe fn stream_copy(dst: *mut u8, src: *const u8, len: usize) {
    if len < STREAM_THRESHOLD {
        // SAFETY: the caller promises valid, non-overlapping ranges of `len` bytes.
        unsafe { core::ptr::copy_nonoverlapping(src, dst, len) };
    } else {
        // SAFETY: same contract as this function; `Path::best` returns only available paths.
        unsafe { stream_with(Path::best(), dst, src, len) };
    }
}

/// Copies `src` into `dst` with non-temporal stores; see [`stream_copy`].
///
/// # Panics
///
/// If the lengths differ, as [`slice::copy_from_slice`] does.
///
/// # Example
///
/// ```
/// let source = vec![1_u8; 300_000];
/// let mut copy = vec![0_u8; 300_000];
/// weightsync_simd::stream_copy_slice(&mut copy, &source);
/// assert_eq!(copy, source);
/// ```
pub fn stream_copy_slice(dst: &mut [u8], src: &[u8]) {
    assert_eq!(
        dst.len(),
        src.len(),
        "source and destination lengths differ"
    );
    // SAFETY: both slices are valid for `src.len()` bytes, checked equal above; `dst` is borrowed
    // exclusively, so they do not overlap and no other reference to it is alive.
    unsafe { stream_copy(dst.as_mut_ptr(), src.as_ptr(), src.len()) };
}

/// The instruction sets a streaming copy can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Sse2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Path {
    /// The fastest path this processor has.
    #[inline]
    pub(crate) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                Self::Avx512
            } else {
                Self::Sse2
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            Self::Scalar
        }
    }
}

/// Streams `len` bytes over `path`, whatever the size, and fences.
///
/// # Safety
///
/// As [`stream_copy`], and the processor has `path`'s instructions.
pub(crate) unsafe fn stream_with(path: Path, dst: *mut u8, src: *const u8, len: usize) {
    if matches!(path, Path::Scalar) {
        // SAFETY: the caller promises valid, non-overlapping ranges of `len` bytes.
        return unsafe { core::ptr::copy_nonoverlapping(src, dst, len) };
    }
    #[cfg(target_arch = "x86_64")]
    {
        // Lines are 64 bytes; the ragged head and tail go through the cache.
        let head = dst.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let tail = len - head - lines * LINE;
        // SAFETY: `head <= len`, inside both ranges.
        unsafe { core::ptr::copy_nonoverlapping(src, dst, head) };
        // SAFETY: `head <= len` keeps the pointer inside (or one past) the destination.
        let to = unsafe { dst.add(head) };
        // SAFETY: likewise for the source.
        let from = unsafe { src.add(head) };
        match path {
            Path::Scalar => {}
            // SAFETY: `to` is 64-byte aligned (or `lines` is 0), and both have `lines` lines left.
            Path::Sse2 => unsafe { x86::stream_lines_sse2(to, from, lines) },
            // SAFETY: likewise; the caller promises AVX-512F.
            Path::Avx512 => unsafe { x86::stream_lines_avx512(to, from, lines) },
        }
        // SAFETY: `head + lines * LINE + tail == len`.
        let to = unsafe { to.add(lines * LINE) };
        // SAFETY: likewise for the source.
        let from = unsafe { from.add(lines * LINE) };
        // SAFETY: `tail` bytes are left in both ranges.
        unsafe { core::ptr::copy_nonoverlapping(from, to, tail) };
        x86::fence();
    }
}

#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::{
        __m128i, __m512i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    use super::LINE;

    /// Makes every earlier non-temporal store visible before any later store.
    #[inline]
    pub(super) fn fence() {
        // SAFETY: `sfence` is part of SSE, which every x86-64 processor has.
        unsafe { _mm_sfence() };
    }

    /// # Safety
    ///
    /// `src` is readable and `dst`, 64-byte aligned, writable for `lines` lines; no overlap.
    pub(super) unsafe fn stream_lines_sse2(dst: *mut u8, src: *const u8, lines: usize) {
        for at in 0..lines * (LINE / 16) {
            // SAFETY: `at` counts 16-byte blocks of the `lines` lines.
            let from = unsafe { src.cast::<__m128i>().add(at) };
            // SAFETY: likewise for the destination.
            let to = unsafe { dst.cast::<__m128i>().add(at) };
            // SAFETY: 16 readable bytes, any alignment.
            let block = unsafe { _mm_loadu_si128(from) };
            // SAFETY: 16 writable bytes, 16-byte aligned.
            unsafe { _mm_stream_si128(to, block) };
        }
    }

    /// # Safety
    ///
    /// As [`stream_lines_sse2`], and the processor has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn stream_lines_avx512(dst: *mut u8, src: *const u8, lines: usize) {
        for at in 0..lines {
            // SAFETY: `at` counts the `lines` lines.
            let from = unsafe { src.cast::<__m512i>().add(at) };
            // SAFETY: likewise for the destination.
            let to = unsafe { dst.cast::<__m512i>().add(at) };
            // SAFETY: 64 readable bytes, any alignment.
            let line = unsafe { _mm512_loadu_si512(from) };
            // SAFETY: 64 writable bytes, 64-byte aligned.
            unsafe { _mm512_stream_si512(to, line) };
        }
    }
}
