//! CRC-64/NVME of bytes in place, and of bytes while they are copied.

use core::mem::MaybeUninit;

use crc_fast::CrcAlgorithm::Crc64Nvme;

use crate::copy::{Copier, copy_unfenced};

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

/// The CRC-64/NVME of `bytes`; 0 for no bytes.
///
/// # Example
///
/// ```
/// // The check value of the CRC catalogue.
/// assert_eq!(weightsync_simd::crc64(b"123456789"), 0xae8b_1486_0a79_9888);
/// ```
pub fn crc64(bytes: &[u8]) -> u64 {
    let mut crc = Crc64::new();
    crc.update(bytes);
    crc.value()
}

/// The checksum of two byte strings laid end to end, from the checksum of each and the length in
/// bytes of the second.
///
/// # Example
///
/// ```
/// use weightsync_simd::{crc64, crc64_combine};
/// assert_eq!(crc64_combine(crc64(b"12345"), crc64(b"6789"), 4), crc64(b"123456789"));
/// ```
pub fn crc64_combine(first: u64, second: u64, second_len: u64) -> u64 {
    crc_fast::checksum_combine(Crc64Nvme, first, second, second_len)
}

/// A CRC-64/NVME in the making: feed it bytes in order.
///
/// # Example
///
/// ```
/// let mut crc = weightsync_simd::Crc64::new();
/// crc.update(b"12345");
/// crc.update(b"6789");
/// assert_eq!(crc.value(), weightsync_simd::crc64(b"123456789"));
/// ```
#[derive(Clone, Debug)]
pub struct Crc64(crc_fast::Digest);

impl Crc64 {
    /// The checksum of no bytes yet.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(Crc64Nvme))
    }

    /// Appends `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        update(&mut self.0, CrcPath::best(), bytes);
    }

    /// The checksum of everything fed so far; more may follow.
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Crc64 {
    fn default() -> Self {
        Self::new()
    }
}

/// Copies as [`stream_copy`](crate::stream_copy) does and returns the CRC-64/NVME of the bytes
/// written to `dst`, in one pass over memory.
///
/// Every byte of the source is read once, and both checksummed and stored from the register it was
/// read into. So the checksum is of what was stored, also when something outside the program writes
/// the source meanwhile, and it costs next to nothing where memory is the limit.
///
/// # Safety
///
/// As [`stream_copy`](crate::stream_copy).
///
/// # Example
///
/// ```
/// let source = vec![7_u8; 2 << 20];
/// let mut copy = vec![0_u8; 2 << 20];
/// // SAFETY: both pointers come from distinct vectors of that length.
/// let crc = unsafe {
///     weightsync_simd::stream_copy_crc(copy.as_mut_ptr(), source.as_ptr(), source.len())
/// };
/// assert_eq!(crc, weightsync_simd::crc64(&copy));
/// ```
pub unsafe fn stream_copy_crc(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    let copier = Copier::new(len);
    // SAFETY: same contract; the copier is dropped, and so fences, before this function returns.
    unsafe { copier.copy_crc(dst, src, len) }
}

/// Copies `src` into `dst` and returns the checksum of the bytes; the safe face of
/// [`stream_copy_crc`].
///
/// # Panics
///
/// If the lengths differ, as [`slice::copy_from_slice`] does.
pub fn stream_copy_crc_slice(dst: &mut [u8], src: &[u8]) -> u64 {
    assert_eq!(
        dst.len(),
        src.len(),
        "source and destination lengths differ"
    );
    // SAFETY: both slices are valid for `src.len()` bytes, checked equal above; `dst` is borrowed
    // exclusively, so they do not overlap and no other code uses `dst`.
    unsafe { stream_copy_crc(dst.as_mut_ptr(), src.as_ptr(), src.len()) }
}

impl Copier {
    /// Copies one part of `len` bytes and returns the CRC-64/NVME of the bytes stored; see
    /// [`stream_copy_crc`].
    ///
    /// # Safety
    ///
    /// As [`Copier::copy`].
    pub unsafe fn copy_crc(&self, dst: *mut u8, src: *const u8, len: usize) -> u64 {
        let mut crc = Crc64::new();
        // SAFETY: same contract.
        unsafe { self.copy_update(&mut crc, dst, src, len) };
        crc.value()
    }

    /// Copies one part of `len` bytes and appends the bytes stored to `crc`, for a checksum that
    /// spans several parts.
    ///
    /// # Safety
    ///
    /// As [`Copier::copy`].
    pub unsafe fn copy_update(&self, crc: &mut Crc64, dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: same contract; `best` is available, and the fence follows in `drop`.
        unsafe { copy_crc_unfenced(&mut crc.0, CrcPath::best(), self.streams, dst, src, len) };
    }
}

/// The instruction sets a checksummed copy can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CrcPath {
    /// Block by block through a buffer that stays in the cache.
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Pclmul,
    #[cfg(target_arch = "x86_64")]
    Vpclmul256,
    #[cfg(target_arch = "x86_64")]
    Vpclmul512,
}

impl CrcPath {
    /// Every path of this target, the fastest first.
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Vpclmul512,
        #[cfg(target_arch = "x86_64")]
        Self::Vpclmul256,
        #[cfg(target_arch = "x86_64")]
        Self::Pclmul,
        Self::Scalar,
    ];

    /// The fastest path this processor has.
    #[inline]
    fn best() -> Self {
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
            Self::Pclmul => std::arch::is_x86_feature_detected!("pclmulqdq"),
            #[cfg(target_arch = "x86_64")]
            Self::Vpclmul256 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("vpclmulqdq")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Vpclmul512 => {
                std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("vpclmulqdq")
            }
        }
    }
}

/// # Safety
///
/// As [`Copier::copy_update`], and the processor has `path`'s instructions.
unsafe fn copy_crc_unfenced(
    crc: &mut crc_fast::Digest,
    path: CrcPath,
    streams: bool,
    dst: *mut u8,
    src: *const u8,
    len: usize,
) {
    let done = match path {
        CrcPath::Scalar => 0,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: same contract.
        _ => unsafe { fold_lines(crc, path, streams, dst, src, len) },
    };
    // SAFETY: `done <= len`.
    let to = unsafe { dst.add(done) };
    // SAFETY: likewise for the source.
    let from = unsafe { src.add(done) };
    // SAFETY: `len - done` bytes are left in both ranges.
    unsafe { copy_crc_blocks(crc, streams, to, from, len - done) };
}

/// Copies and checksums from the start up to the last whole group of lines; returns how many bytes
/// that is.
///
/// # Safety
///
/// As [`copy_crc_unfenced`]; `path` is not `Scalar`.
#[cfg(target_arch = "x86_64")]
unsafe fn fold_lines(
    crc: &mut crc_fast::Digest,
    path: CrcPath,
    streams: bool,
    dst: *mut u8,
    src: *const u8,
    len: usize,
) -> usize {
    use x86::stores::{PLAIN, STREAMS};
    let group = match path {
        CrcPath::Vpclmul512 => x86::GROUP_512,
        CrcPath::Vpclmul256 => x86::GROUP_256,
        CrcPath::Pclmul | CrcPath::Scalar => x86::GROUP_128,
    };
    let head = dst.align_offset(64).min(len);
    let groups = (len - head) / group;
    if groups * group < FOLD_FROM {
        return 0;
    }
    // SAFETY: `head <= len`.
    unsafe { copy_crc_blocks(crc, false, dst, src, head) };
    // SAFETY: `head <= len`.
    let to = unsafe { dst.add(head) };
    // SAFETY: likewise for the source.
    let from = unsafe { src.add(head) };
    let mut remainder = [0; x86::GROUP_512];
    let remainder = &mut remainder[..group];
    let state = crc.get_state();
    match (path, streams) {
        // SAFETY: `groups` groups are left in both ranges, `to` is 64-byte aligned, and the caller
        // promises the path's instructions.
        (CrcPath::Vpclmul512, true) => unsafe {
            x86::fold_512::<true>(to, from, groups, state, remainder)
        },
        // SAFETY: likewise.
        (CrcPath::Vpclmul512, false) => unsafe {
            x86::fold_512::<false>(to, from, groups, state, remainder)
        },
        // SAFETY: likewise.
        (CrcPath::Vpclmul256, true) => unsafe {
            x86::fold_256::<{ STREAMS }>(to, from, groups, state, remainder)
        },
        // SAFETY: likewise.
        (CrcPath::Vpclmul256, false) => unsafe {
            x86::fold_256::<{ PLAIN }>(to, from, groups, state, remainder)
        },
        // SAFETY: likewise.
        (_, true) => unsafe { x86::fold_128::<true>(to, from, groups, state, remainder) },
        // SAFETY: likewise.
        (_, false) => unsafe { x86::fold_128::<false>(to, from, groups, state, remainder) },
    }
    // The remainder stands for everything before it, initial state included.
    *crc = crc_fast::Digest::new_with_init_state(Crc64Nvme, 0);
    crc.update(remainder);
    head + groups * group
}

/// Appends bytes that stay where they are. The library folds by 16 bytes, or by 64 where there is
/// AVX-512; where there is VPCLMULQDQ without it, 32 at a time are twice as fast.
fn update(crc: &mut crc_fast::Digest, path: CrcPath, bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if path == CrcPath::Vpclmul256 && bytes.len() >= FOLD_FROM {
        let groups = bytes.len() / x86::GROUP_256;
        let (folded, rest) = bytes.split_at(groups * x86::GROUP_256);
        let mut remainder = [0; x86::GROUP_256];
        let (nowhere, state) = (core::ptr::null_mut(), crc.get_state());
        // SAFETY: so many groups are readable, nothing is stored, and the path is available.
        unsafe {
            x86::fold_256::<{ x86::stores::NONE }>(
                nowhere,
                folded.as_ptr(),
                groups,
                state,
                &mut remainder,
            );
        }
        *crc = crc_fast::Digest::new_with_init_state(Crc64Nvme, 0);
        crc.update(&remainder);
        crc.update(rest);
        return;
    }
    let _ = path;
    crc.update(bytes);
}

/// Ranges shorter than this many bytes are not worth the fold's start and end.
#[cfg(any(target_arch = "x86_64", test))]
const FOLD_FROM: usize = 2048;

/// Bytes that are read, checksummed and stored together on the scalar path: a third of the smallest
/// first-level cache in use, so that a block is still there when it is stored.
const BLOCK: usize = 16 * 1024;

/// A block on its way, aligned so that no load of it crosses a line.
#[repr(align(64))]
struct Block([MaybeUninit<u8>; BLOCK]);

/// Copies and checksums through a buffer, so that what is checksummed is what is stored.
///
/// # Safety
///
/// As [`Copier::copy`].
unsafe fn copy_crc_blocks(
    crc: &mut crc_fast::Digest,
    streams: bool,
    dst: *mut u8,
    src: *const u8,
    len: usize,
) {
    use crate::copy::CopyPath;
    let path = if streams {
        CopyPath::best()
    } else {
        CopyPath::Scalar
    };
    let mut block = Block([MaybeUninit::uninit(); BLOCK]);
    let buffer = block.0.as_mut_ptr().cast::<u8>();
    let mut at = 0;
    while at < len {
        let part = BLOCK.min(len - at);
        // SAFETY: `at + part <= len`, inside the source range.
        let from = unsafe { src.add(at) };
        // SAFETY: likewise for the destination.
        let to = unsafe { dst.add(at) };
        // SAFETY: `part` bytes are readable at `from`, and the block holds that many.
        unsafe { core::ptr::copy_nonoverlapping(from, buffer, part) };
        // SAFETY: the copy above initialised `part` bytes of the block, which is ours alone.
        crc.update(unsafe { core::slice::from_raw_parts(buffer, part) });
        // SAFETY: the block holds `part` bytes, `to` has room for them, and the two are distinct.
        unsafe { copy_unfenced(path, to, buffer, part) };
        at += part;
    }
}
