//! Packs small numbers into few bits: as they are, in unary, and steps as small numbers.
//!
//! Bits fill bytes from the lowest up. All numbers have 16 bits, which is enough for places
//! within a block and for most steps.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

use crate::delta::{BLOCK, DeltaPath, SLACK, Word};

/// How many bytes more than are written or read the kernels want to be there.
pub const PACK_SLACK: usize = 16;

/// Most bits of a packed number.
pub const PACK_BITS: u32 = 16;

/// Writes the lowest `bits` of each number, which have no others; returns how many bytes that takes.
///
/// # Panics
///
/// If `bits` is above [`PACK_BITS`], or `out` has not [`PACK_SLACK`] bytes more.
///
/// # Example
///
/// ```
/// use weightsync_simd::{PACK_SLACK, pack, unpack};
///
/// let mut bytes = [0; 2 + PACK_SLACK];
/// assert_eq!(pack(&[1, 2, 3], 5, &mut bytes), 2);
/// let mut numbers = [0; 3];
/// unpack(&bytes[..2], 5, &mut numbers);
/// assert_eq!(numbers, [1, 2, 3]);
/// ```
pub fn pack(numbers: &[u16], bits: u32, out: &mut [u8]) -> usize {
    pack_with(DeltaPath::best(), numbers, bits, out)
}

/// Reads numbers of so many bits each; behind the end of `bytes` there are zeros.
///
/// # Panics
///
/// If `bits` is above [`PACK_BITS`].
pub fn unpack(bytes: &[u8], bits: u32, numbers: &mut [u16]) {
    unpack_with(DeltaPath::best(), bytes, bits, numbers);
}

/// Writes each number as so many zeros and a one; returns how many bytes that takes.
///
/// # Panics
///
/// If `out` has not [`PACK_SLACK`] bytes more.
///
/// # Example
///
/// ```
/// use weightsync_simd::{PACK_SLACK, pack_unary, unpack_unary};
///
/// let mut bytes = [0; 2 + PACK_SLACK];
/// assert_eq!(pack_unary(&[3, 0, 5], &mut bytes), 2);
/// assert_eq!(bytes[..2], [0b0001_1000, 0b0000_0100]);
/// let mut numbers = [0; 3];
/// assert_eq!(unpack_unary(&bytes[..2], 0, &mut numbers), Some(11));
/// assert_eq!(numbers, [3, 0, 5]);
/// ```
pub fn pack_unary(numbers: &[u16], out: &mut [u8]) -> usize {
    scalar::pack_unary(numbers, out)
}

/// Reads numbers that [`pack_unary`] wrote, from bit `from` on; returns the bit behind them, or nothing
/// if the bytes do not suffice. A number beyond 65,535 is read as that.
pub fn unpack_unary(bytes: &[u8], from: usize, numbers: &mut [u16]) -> Option<usize> {
    unpack_unary_with(DeltaPath::best(), bytes, from, numbers)
}

/// Adds gaps up: each is the lowest `low` bits of its part, above those what is in `highs`, and one
/// more. Writes the sums less one, from `from` on, and returns the last sum; `places` are right if
/// that is at most 65,536.
///
/// # Panics
///
/// If the three are not equally long, or `low` is above 14.
///
/// # Example
///
/// ```
/// let mut places = [0; 3];
/// assert_eq!(weightsync_simd::add_up(&[1, 0, 3], &[0, 1, 0], 2, 10, &mut places), 21);
/// assert_eq!(places, [11, 16, 20]);
/// ```
pub fn add_up(parts: &[u16], highs: &[u16], low: u32, from: u64, places: &mut [u16]) -> u64 {
    add_up_with(DeltaPath::best(), (parts, highs), low, from, places)
}

/// Writes each step as a small number: 1, -1, 2, -2 … as 1, 2, 3, 4 …, and as 0 if that is not below
/// `limit`. Returns how many are 0.
///
/// # Panics
///
/// If there is not a code for each step.
///
/// # Example
///
/// ```
/// use weightsync_simd::{unzigzag, zigzag};
///
/// let (steps, mut codes) = ([1_u16, 0xffff, 2, 0x8000], [0; 4]);
/// assert_eq!(zigzag(&steps, 16, &mut codes), 1);
/// assert_eq!(codes, [1, 2, 3, 0]);
/// let mut again = [0_u16; 4];
/// unzigzag(&codes, &mut again);
/// assert_eq!(again, [1, 0xffff, 2, 0]);
/// ```
pub fn zigzag<W: Word>(steps: &[W], limit: u16, codes: &mut [u16]) -> usize {
    assert_eq!(steps.len(), codes.len(), "a code for each step");
    match DeltaPath::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions.
        DeltaPath::Avx512 => unsafe { x86::zigzag_avx512(steps, limit, codes) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: likewise.
        DeltaPath::Avx2 => unsafe { x86::zigzag_avx2(steps, limit, codes) },
        DeltaPath::Scalar => scalar::zigzag(steps, limit, codes),
    }
}

/// The way back from [`zigzag`]; 0 becomes no step.
///
/// # Panics
///
/// If there is not a step for each code.
pub fn unzigzag<W: Word>(codes: &[u16], steps: &mut [W]) {
    assert_eq!(steps.len(), codes.len(), "a step for each code");
    match DeltaPath::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions.
        DeltaPath::Avx512 => unsafe { x86::unzigzag_avx512(codes, steps) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: likewise.
        DeltaPath::Avx2 => unsafe { x86::unzigzag_avx2(codes, steps) },
        DeltaPath::Scalar => scalar::unzigzag(codes, steps),
    }
}

/// Finds which of at most 65,536 numbers have in the bits of `mask` those of `value`; returns how many,
/// and writes their indices.
///
/// # Panics
///
/// If there are more numbers, or `places` has not room for all of them and [`SLACK`](crate::SLACK)
/// more.
///
/// # Example
///
/// ```
/// use weightsync_simd::{SLACK, find};
///
/// let mut places = [0; 4 + SLACK];
/// assert_eq!(find(&[3, 0, 7, 2], 0b101, 0, &mut places), 2);
/// assert_eq!(places[..2], [1, 3]);
/// ```
pub fn find(numbers: &[u16], mask: u16, value: u16, places: &mut [u16]) -> usize {
    find_with(DeltaPath::best(), numbers, (mask, value), places)
}

/// `path` must be available.
fn unpack_unary_with(
    path: DeltaPath,
    bytes: &[u8],
    from: usize,
    numbers: &mut [u16],
) -> Option<usize> {
    match path {
        DeltaPath::Scalar => scalar::unpack_unary(bytes, from, numbers),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions.
        DeltaPath::Avx2 => unsafe { x86::unpack_unary(bytes, from, numbers) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: likewise.
        DeltaPath::Avx512 => unsafe { x86::unpack_unary_avx512(bytes, from, numbers) },
    }
}

/// `path` must be available.
fn add_up_with(
    path: DeltaPath,
    (parts, highs): (&[u16], &[u16]),
    low: u32,
    from: u64,
    places: &mut [u16],
) -> u64 {
    assert!(
        parts.len() == highs.len() && parts.len() == places.len(),
        "one of each"
    );
    // The fast codec has the sign and *far* above these bits, and a part has 16 in all.
    assert!(low <= 14, "at most 14 bits below");
    match path {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions.
        DeltaPath::Avx512 => unsafe { x86::add_up_avx512((parts, highs), low, from, places) },
        _ => scalar::add_up((parts, highs), low, from, places),
    }
}

/// `path` must be available.
fn find_with(path: DeltaPath, numbers: &[u16], wanted: (u16, u16), places: &mut [u16]) -> usize {
    assert!(numbers.len() <= BLOCK, "more than a block");
    assert!(places.len() >= numbers.len() + SLACK, "too little room");
    match path {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions; there is room.
        DeltaPath::Avx512 => unsafe { x86::find_avx512(numbers, wanted, places) },
        _ => scalar::find(numbers, wanted, 0, places),
    }
}

/// `path` must be available.
fn pack_with(path: DeltaPath, numbers: &[u16], bits: u32, out: &mut [u8]) -> usize {
    assert!(bits <= PACK_BITS, "at most 16 bits each");
    let bytes = (numbers.len() * bits as usize).div_ceil(8);
    assert!(out.len() >= bytes + PACK_SLACK, "too little room");
    match path {
        DeltaPath::Scalar => scalar::pack(numbers, bits, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: these paths were chosen because the processor has their instructions.
        DeltaPath::Avx2 | DeltaPath::Avx512 => unsafe { x86::pack(numbers, bits, out) },
    }
    bytes
}

/// `path` must be available.
fn unpack_with(path: DeltaPath, bytes: &[u8], bits: u32, numbers: &mut [u16]) {
    assert!(bits <= PACK_BITS, "at most 16 bits each");
    match path {
        DeltaPath::Scalar => scalar::unpack(bytes, 0, bits, numbers),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: these paths were chosen because the processor has their instructions.
        DeltaPath::Avx2 | DeltaPath::Avx512 => unsafe { x86::unpack(bytes, bits, numbers) },
    }
}
