//! CRC-64/NVME: of bytes at hand, and of bytes on their way.

use core::mem::MaybeUninit;

use crc_fast::CrcAlgorithm::Crc64Nvme;

use crate::copy;

/// The CRC-64/NVME of `bytes`; 0 for no bytes.
///
/// # Example
///
/// ```
/// // The check value of the CRC catalogue.
/// assert_eq!(weightsync_simd::crc64(b"123456789"), 0xae8b_1486_0a79_9888);
/// ```
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
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
        self.0.update(bytes);
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
/// The checksum is of what was stored, also when something outside the program writes the source
/// meanwhile: each block is read once into the cache, and both checksummed and stored from there.
///
/// # Safety
///
/// As [`stream_copy`](crate::stream_copy).
///
/// # Example
///
/// ```
/// let source = vec![7_u8; 1 << 20];
/// let mut copy = vec![0_u8; 1 << 20];
/// // SAFETY: both pointers come from distinct vectors of that length.
/// let crc = unsafe {
///     weightsync_simd::stream_copy_crc(copy.as_mut_ptr(), source.as_ptr(), source.len())
/// };
/// assert_eq!(crc, weightsync_simd::crc64(&copy));
/// ```
pub unsafe fn stream_copy_crc(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    let path = if len < copy::STREAM_THRESHOLD {
        copy::Path::Scalar
    } else {
        copy::Path::best()
    };
    // SAFETY: same contract; `path` is available.
    unsafe { copy_crc_with(path, dst, src, len) }
}

/// Copies `src` into `dst` and returns the checksum of the bytes; see [`stream_copy_crc`].
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
    // exclusively, so they do not overlap and no other reference to it is alive.
    unsafe { stream_copy_crc(dst.as_mut_ptr(), src.as_ptr(), src.len()) }
}

/// Bytes that are read, checksummed and stored together: a third of the smallest first-level cache
/// in use, so that a block is still there when it is stored.
const BLOCK: usize = 16 * 1024;

/// A block on its way, aligned so that no load of it crosses a line.
#[repr(align(64))]
struct Block([MaybeUninit<u8>; BLOCK]);

/// # Safety
///
/// As [`copy::stream_with`].
unsafe fn copy_crc_with(path: copy::Path, dst: *mut u8, src: *const u8, len: usize) -> u64 {
    let mut crc = Crc64::new();
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
        unsafe { copy::stream_with(path, to, buffer, part) };
        at += part;
    }
    crc.value()
}
