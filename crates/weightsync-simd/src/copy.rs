//! Copying with non-temporal stores.
//!
//! A plain store to a line that is not in the cache first reads that line from memory. A
//! full-line non-temporal store does not. So a copy moves two bytes over the memory bus for
//! each byte copied instead of three, and leaves the reader's working set in the cache. If
//! everything fits the cache, the plain copy is faster, by three times at 16 KiB, and its
//! reader finds the bytes in the cache. So the size of the whole transfer decides, not the size
//! of one part.
//!
//! Measured on a Zen 5 server, over one `memcpy` of the same gibibyte (`examples/copy.rs` repeats
//! it): lines in order 0.70 to 0.79, whatever the prefetch; `rep movsb` the same; two to sixteen
//! pages interleaved, as glibc does it, 0.97 to 1.05. So: lines in order. Warm buffers of 1 MiB are
//! copied by plain stores at 55 GB/s and by these at 43, of 16 MiB at 30 and 43.

use core::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

/// Transfers of fewer bytes than this use plain stores; 1 MiB.
pub const STREAM_THRESHOLD: usize = 1 << 20;

/// Copies `len` bytes from `src` to `dst`, with non-temporal stores from [`STREAM_THRESHOLD`]
/// upward.
///
/// A later release store of the calling thread publishes what was copied: non-temporal stores are
/// weakly ordered, and this function fences them before it returns. Any alignment of either pointer
/// is fine. For a transfer made of many parts see [`Copier`].
///
/// # Safety
///
/// - `src` is valid for reads and `dst` for writes of `len` bytes, and the two do not overlap;
/// - no reference to the destination bytes is in use meanwhile.
///
/// The source is only ever read through the raw pointer. If something outside the program's memory
/// model (another process, a device, an interpreter's native code) writes it meanwhile, each byte
/// copied is one its place held at some time during the call, and nothing more is promised.
///
/// # Example
///
/// ```
/// let source = vec![7_u8; 2 << 20];
/// let mut copy = vec![0_u8; 2 << 20];
/// // SAFETY: both pointers come from distinct vectors of that length.
/// unsafe { weightsync_simd::stream_copy(copy.as_mut_ptr(), source.as_ptr(), source.len()) };
/// assert_eq!(copy, source);
/// ```
#[inline]
pub unsafe fn stream_copy(dst: *mut u8, src: *const u8, len: usize) {
    let copier = Copier::new(len);
    // SAFETY: same contract; the copier is dropped, and so fences, before this function returns.
    unsafe { copier.copy(dst, src, len) };
}

/// Copies `src` into `dst`; the safe face of [`stream_copy`].
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
    // exclusively, so they do not overlap and no other code uses `dst`.
    unsafe { stream_copy(dst.as_mut_ptr(), src.as_ptr(), src.len()) };
}

/// Copies the parts of one transfer, and fences them once, when dropped.
///
/// Whether stores go past the cache is decided by the size of the whole transfer: a gigabyte made of
/// kilobyte tensors streams, sixteen kilobytes do not. A copier stays on the thread that made it,
/// because a fence orders the stores of its own thread only.
///
/// # Example
///
/// ```
/// use weightsync_simd::Copier;
///
/// let parts = [vec![1_u8; 1000], vec![2_u8; 3000]];
/// let mut slot = vec![0_u8; 4000];
/// let copier = Copier::new(slot.len());
/// let mut to = slot.as_mut_ptr();
/// for part in &parts {
///     // SAFETY: the parts are 4000 bytes together, as long as the slot; the copier is dropped
///     // before the slot is read.
///     unsafe { copier.copy(to, part.as_ptr(), part.len()) };
///     // SAFETY: likewise.
///     to = unsafe { to.add(part.len()) };
/// }
/// drop(copier);
/// assert_eq!(slot[999..1001], [1, 2]);
/// ```
#[derive(Debug)]
pub struct Copier {
    pub(crate) streams: bool,
    /// Not `Send`: the fence in `drop` must run on the thread that stored.
    thread: PhantomData<*const ()>,
}

impl Copier {
    /// A copier for a transfer of `total` bytes in all its parts.
    #[inline]
    pub fn new(total: usize) -> Self {
        Self {
            streams: total >= STREAM_THRESHOLD,
            thread: PhantomData,
        }
    }

    /// Copies one part of `len` bytes.
    ///
    /// # Safety
    ///
    /// As [`stream_copy`]; and the copier is dropped before any other thread or process is told
    /// that the bytes are there.
    #[inline]
    pub unsafe fn copy(&self, dst: *mut u8, src: *const u8, len: usize) {
        let path = if self.streams {
            CopyPath::best()
        } else {
            CopyPath::Scalar
        };
        // SAFETY: same contract; `best` is available, and the fence follows in `drop`.
        unsafe { copy_unfenced(path, dst, src, len) };
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.streams {
            fence();
        }
    }
}

/// The instruction sets a streaming copy can use. `Scalar` is the plain copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyPath {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Sse2,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl CopyPath {
    /// Every path of this target, the fastest first.
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::Sse2,
        Self::Scalar,
    ];

    /// The fastest path this processor has.
    #[inline]
    pub(crate) fn best() -> Self {
        Self::available().next().unwrap_or(Self::Scalar)
    }

    /// The paths this processor has, the fastest first.
    #[inline]
    fn available() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|path| path.is_available())
    }

    /// Whether the processor has the instructions; detected once, then remembered.
    #[inline]
    fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Sse2 => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
        }
    }
}

/// The store unit: one cache line, in bytes.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies `len` bytes over `path`, whatever the size, without a fence.
///
/// # Safety
///
/// As [`Copier::copy`], and the processor has `path`'s instructions.
#[inline]
pub(crate) unsafe fn copy_unfenced(path: CopyPath, dst: *mut u8, src: *const u8, len: usize) {
    match path {
        // SAFETY: the caller promises valid, non-overlapping ranges of `len` bytes.
        CopyPath::Scalar => unsafe { core::ptr::copy_nonoverlapping(src, dst, len) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: same contract.
        _ => unsafe { stream_lines(path, dst, src, len) },
    }
}

/// Makes every earlier non-temporal store of this thread visible before any later store of it.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    x86::fence();
}

/// Streams the whole lines of `dst`; its ragged head and tail go through the cache.
///
/// # Safety
///
/// As [`copy_unfenced`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream_lines(path: CopyPath, dst: *mut u8, src: *const u8, len: usize) {
    let head = dst.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    let body = lines * LINE;
    // SAFETY: `head <= len`, inside both ranges.
    unsafe { core::ptr::copy_nonoverlapping(src, dst, head) };
    // SAFETY: `head <= len` keeps the pointer inside, or one past, the destination.
    let to = unsafe { dst.add(head) };
    // SAFETY: likewise for the source.
    let from = unsafe { src.add(head) };
    match path {
        CopyPath::Scalar => unreachable!("the plain copy has no lines"),
        // SAFETY: `lines` lines are left in both ranges, and `to` is aligned if there are any.
        CopyPath::Sse2 => unsafe { x86::stream_sse2(to, from, lines) },
        // SAFETY: likewise; the caller promises AVX2.
        CopyPath::Avx2 => unsafe { x86::stream_avx2(to, from, lines) },
        // SAFETY: likewise; the caller promises AVX-512F.
        CopyPath::Avx512 => unsafe { x86::stream_avx512(to, from, lines) },
    }
    // SAFETY: `head + body <= len`.
    let to = unsafe { to.add(body) };
    // SAFETY: likewise for the source.
    let from = unsafe { from.add(body) };
    // SAFETY: exactly this many bytes are left in both ranges.
    unsafe { core::ptr::copy_nonoverlapping(from, to, len - head - body) };
}
