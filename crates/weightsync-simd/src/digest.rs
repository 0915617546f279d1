//! The digest of a model's bytes: a sum of position-keyed hashes, one per 64-byte line.
//!
//! # Construction
//!
//! A line is four blocks of 16 bytes. Block number n of the image (four times the line's index, plus
//! its place in the line) goes through four rounds of AES with public round keys K0 to K4, and the
//! results of all blocks are added as two 64-bit words, each modulo 2^64:
//!
//! ```text
//! T  = (n * A mod 2^64, n * B mod 2^64)        the tweak; T' is T with its halves exchanged
//! s  = block ^ K0 ^ T
//! s  = round(s) ^ K1
//! s  = round(s) ^ K2 ^ T'
//! s  = round(s) ^ K3
//! s  = round(s) ^ K4                           what block n adds to the sum
//! ```
//!
//! `round` is SubBytes, ShiftRows and MixColumns. The keys are the first 640 bits of the fraction of
//! pi, A is 2^64 over the golden ratio and B a word of the fraction of e, both odd.
//!
//! # Why this one
//!
//! - For each n the map is a permutation of the block: a change within one block changes the sum,
//!   always.
//! - Four rounds of AES with random round keys map a given difference to a given difference with
//!   probability at most 1.881 * 2^-114 (L. Keliher and J. Sui, "Exact maximum expected differential
//!   and linear probability for two-round Advanced Encryption Standard", IET Information Security,
//!   2007), the property K. Minematsu and Y. Tsunoo build hashes on ("Provably secure MACs from
//!   differentially-uniform permutations and AES-based implementations", FSE 2006). Fixed keys make
//!   that a heuristic; the tests look at what it promises.
//! - The tweak enters twice, as in KIASU (J. Jean, I. Nikolić, T. Peyrin, "Tweaks and keys for block
//!   ciphers: the TWEAKEY framework", ASIACRYPT 2014). Entering once, at the start, it would cancel
//!   when one block is another moved and changed by the difference of their tweaks.
//! - A sum has no order: lines can be taken by any thread at any time, and a changed line replaced by
//!   subtracting its old hash and adding the new one.
//!
//! The digest identifies bytes; it does not authenticate them. Everything in it is public, so
//! an attacker can make two images of the same digest.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

/// Bytes of a line, the unit of the digest.
pub const LINE_BYTES: usize = 64;

/// The digest sum of `bytes`, whose first byte begins line number `first_line` of the image.
///
/// The sums of the parts of an image, cut at multiples of [`LINE_BYTES`], add up to the sum of the
/// whole (see [`digest_add`]). A last line that is not full counts as if filled up with zeros, so the
/// length has to be told apart by other means. Indices wrap at 2^62 lines.
///
/// # Example
///
/// ```
/// use weightsync_simd::{digest_add, digest_lines};
///
/// let image: Vec<u8> = (0..=255).collect();
/// let parts = digest_add(digest_lines(&image[128..], 2), digest_lines(&image[..128], 0));
/// assert_eq!(parts, digest_lines(&image, 0));
/// ```
pub fn digest_lines(bytes: &[u8], first_line: u64) -> [u64; 2] {
    sum_with(DigestPath::best(), bytes, first_line)
}

/// The digest sum of some lines of `bytes`: those numbered `which` from its first, which is line
/// `first_line` of the image. A line named twice counts twice.
///
/// # Panics
///
/// If a line named begins behind the end of `bytes`.
///
/// # Example
///
/// ```
/// use weightsync_simd::{digest_add, digest_lines, digest_lines_at};
///
/// let image: Vec<u8> = (0..=255).collect();
/// let parts = digest_add(digest_lines(&image[64..128], 1), digest_lines(&image[192..], 3));
/// assert_eq!(digest_lines_at(&image, &[1, 3], 0), parts);
/// ```
pub fn digest_lines_at(bytes: &[u8], which: &[u16], first_line: u64) -> [u64; 2] {
    sum_at_with(DigestPath::best(), bytes, which, first_line)
}

/// What to add to an image's sum when `old` becomes `new`, both beginning at line `first_line`.
///
/// # Example
///
/// ```
/// use weightsync_simd::{digest_add, digest_line_delta, digest_lines};
///
/// let mut image = vec![1_u8; 640];
/// let before = digest_lines(&image, 0);
/// let delta = digest_line_delta(&image[128..192], &[9; 64], 2);
/// image[128..192].fill(9);
/// assert_eq!(digest_add(before, delta), digest_lines(&image, 0));
/// ```
pub fn digest_line_delta(old: &[u8], new: &[u8], first_line: u64) -> [u64; 2] {
    let [old_low, old_high] = digest_lines(old, first_line);
    let [new_low, new_high] = digest_lines(new, first_line);
    [
        new_low.wrapping_sub(old_low),
        new_high.wrapping_sub(old_high),
    ]
}

/// Adds two digest sums, word by word modulo 2^64.
pub const fn digest_add(left: [u64; 2], right: [u64; 2]) -> [u64; 2] {
    [
        left[0].wrapping_add(right[0]),
        left[1].wrapping_add(right[1]),
    ]
}

type Line = [u8; LINE_BYTES];

/// Blocks of a line.
const BLOCKS: u64 = 4;

/// The round keys, as little-endian words: the fraction of pi.
const KEYS: [[u64; 2]; 5] = [
    [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344],
    [0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89],
    [0x4528_21e6_38d0_1377, 0xbe54_66cf_34e9_0c6c],
    [0xc0ac_29b7_c97c_50dd, 0x3f84_d5b5_b547_0917],
    [0x9216_d5d9_8979_fb1b, 0xd131_0ba6_98df_b5ac],
];

/// The tweak's multipliers A and B.
const STRIDES: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf71_5880_9cf4_f3c7];

/// The instruction sets the digest can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DigestPath {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    AesNi,
    #[cfg(target_arch = "x86_64")]
    Vaes512,
}

impl DigestPath {
    /// Every path of this target, the fastest first.
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Vaes512,
        #[cfg(target_arch = "x86_64")]
        Self::AesNi,
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
            Self::AesNi => std::arch::is_x86_feature_detected!("aes"),
            #[cfg(target_arch = "x86_64")]
            Self::Vaes512 => {
                std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("vaes")
            }
        }
    }
}

/// `path` must be available.
fn sum_at_with(path: DigestPath, bytes: &[u8], which: &[u16], first_line: u64) -> [u64; 2] {
    let (lines, rest) = bytes.as_chunks::<LINE_BYTES>();
    // Only the last of the bytes may be less than a line.
    if !rest.is_empty() {
        let one = |line: &u16| {
            let line = usize::from(*line);
            let behind = bytes.len().min((line + 1) * LINE_BYTES);
            let bytes = &bytes[line * LINE_BYTES..behind];
            sum_with(path, bytes, first_line.wrapping_add(line as u64))
        };
        return which.iter().map(one).fold([0; 2], digest_add);
    }
    match path {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has AVX-512F and VAES.
        DigestPath::Vaes512 => unsafe { x86::sum_at_512(lines, which, first_line) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has AES-NI.
        DigestPath::AesNi => unsafe { x86::sum_at_128(lines, which, first_line) },
        DigestPath::Scalar => {
            let one = |line: &u16| {
                let index = first_line.wrapping_add(u64::from(*line));
                scalar::sum(&[lines[usize::from(*line)]], index)
            };
            which.iter().map(one).fold([0; 2], digest_add)
        }
    }
}

/// `path` must be available.
fn sum_with(path: DigestPath, bytes: &[u8], first_line: u64) -> [u64; 2] {
    let sum: fn(&[Line], u64) -> [u64; 2] = match path {
        DigestPath::Scalar => scalar::sum,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has AES-NI.
        DigestPath::AesNi => |lines, first_line| unsafe { x86::sum_128(lines, first_line) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has AVX-512F and VAES.
        DigestPath::Vaes512 => |lines, first_line| unsafe { x86::sum_512(lines, first_line) },
    };
    let (lines, rest) = bytes.as_chunks::<LINE_BYTES>();
    let total = sum(lines, first_line);
    if rest.is_empty() {
        return total;
    }
    let mut last = [0; LINE_BYTES];
    last[..rest.len()].copy_from_slice(rest);
    digest_add(
        total,
        sum(&[last], first_line.wrapping_add(lines.len() as u64)),
    )
}
