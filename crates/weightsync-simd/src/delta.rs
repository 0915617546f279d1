//! Finds the changes between two images of the same elements, and applies them to a third.
//!
//! A *change* is a place and a step. The step is the wrapping difference of the two bit
//! patterns, taken as unsigned integers of the element's width. So a step is exact for every
//! pattern (negative zero, every NaN), needs no float, and steps of consecutive changes add up.
//!
//! A *block* is at most [`BLOCK`] elements, so that a place within one fits 16 bits.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::iota;

#[cfg(test)]
mod tests;

/// Elements that are compared, coded and applied together, at most: both versions of them stay in the
/// second-level cache, and a place within takes 16 bits.
pub const BLOCK: usize = 1 << 16;

/// How many more elements than there can be changes the outputs of [`compare`] must hold, and the
/// steps given to [`expand`] too: they are stored and loaded by whole vectors.
pub const SLACK: usize = 64;

/// An element's bit pattern: an unsigned integer of its width.
pub trait Word: sealed::Sealed + Copy + Default + Eq + Send + Sync + 'static {
    /// Its width.
    const BYTES: usize;

    /// The element that begins `bytes`, little-endian.
    ///
    /// # Panics
    ///
    /// If there are fewer bytes.
    fn read(bytes: &[u8]) -> Self;

    /// Puts it at the start of `bytes`.
    ///
    /// # Panics
    ///
    /// If there is no room for it.
    fn write(self, bytes: &mut [u8]);

    /// The sum, wrapping.
    #[must_use]
    fn plus(self, step: Self) -> Self;

    /// The difference, wrapping.
    #[must_use]
    fn minus(self, step: Self) -> Self;

    /// The same number in 64 bits.
    fn widen(self) -> u64;

    /// The lowest bits of a number.
    fn narrow(wide: u64) -> Self;

    /// As a signed step: 1, -1, 2, -2 … are 1, 2, 3, 4 …; 0 is 0, and so is the one that is furthest
    /// from it.
    #[must_use]
    fn zigzag(self) -> Self;

    /// The way back from [`zigzag`](Self::zigzag), for one that is below 65,536.
    fn unzigzag(code: u16) -> Self;
}

/// Finds the changes of one block: which elements differ (`masks`, one bit each, 64 to a word, the
/// lowest first), where those are (`places`, ascending) and by how much (`steps`). Returns how many
/// there are; what lies behind that many places and steps is undefined.
///
/// # Panics
///
/// If `old` and `new` are not equally long, not whole elements or more than a block, or if an
/// output is too short: `masks` for one bit per element, `places` and `steps` for all elements and
/// [`SLACK`] more.
///
/// # Example
///
/// ```
/// use weightsync_simd::{SLACK, compare};
///
/// let old: Vec<u8> = [7_u16, 8, 9].iter().flat_map(|word| word.to_le_bytes()).collect();
/// let new: Vec<u8> = [7_u16, 5, 9].iter().flat_map(|word| word.to_le_bytes()).collect();
/// let (mut masks, mut places, mut steps) = ([0], [0; 3 + SLACK], [0_u16; 3 + SLACK]);
/// assert_eq!(compare(&old, &new, &mut masks, &mut places, &mut steps), 1);
/// assert_eq!((masks[0], places[0], steps[0]), (0b010, 1, 5_u16.wrapping_sub(8)));
/// ```
pub fn compare<W: Word>(
    old: &[u8],
    new: &[u8],
    masks: &mut [u64],
    places: &mut [u16],
    steps: &mut [W],
) -> usize {
    compare_with::<W, true>(DeltaPath::best(), old, new, masks, places, steps)
}

/// [`compare`] without the places, which takes less time where many elements differ; [`ones`] finds
/// them in the masks.
///
/// # Panics
///
/// As [`compare`].
///
/// # Example
///
/// ```
/// use weightsync_simd::{SLACK, compare_dense};
///
/// let (mut masks, mut steps) = ([0], [0_u8; 3 + SLACK]);
/// assert_eq!(compare_dense(&[7, 8, 9], &[7, 5, 9], &mut masks, &mut steps), 1);
/// assert_eq!((masks[0], steps[0]), (0b010, 5_u8.wrapping_sub(8)));
/// ```
pub fn compare_dense<W: Word>(old: &[u8], new: &[u8], masks: &mut [u64], steps: &mut [W]) -> usize {
    compare_with::<W, false>(DeltaPath::best(), old, new, masks, &mut [], steps)
}

/// Finds which bits are set, of at most 65,536; returns how many, and writes their places.
///
/// # Panics
///
/// If there are more, or `places` has not room for all of them and [`SLACK`] more.
///
/// # Example
///
/// ```
/// use weightsync_simd::{SLACK, ones};
///
/// let mut places = [0; 128 + SLACK];
/// assert_eq!(ones(&[0b1001, 1 << 5], &mut places), 3);
/// assert_eq!(places[..3], [0, 3, 69]);
/// ```
pub fn ones(masks: &[u64], places: &mut [u16]) -> usize {
    ones_with(DeltaPath::best(), masks, places)
}

/// Adds to every element of a block whose bit is set in `masks` the next of `steps`, wrapping;
/// returns how many it has taken.
///
/// # Panics
///
/// If `bytes` are not whole elements or more than a block, if `masks` has not one word for every 64
/// elements begun, or if there are fewer steps than bits set and [`SLACK`] more. Bits beyond the
/// last element count for nothing.
///
/// # Example
///
/// ```
/// use weightsync_simd::{SLACK, expand};
///
/// let mut bytes = [10_u8, 20, 30];
/// let mut steps = [0_u8; 2 + SLACK];
/// steps[..2].copy_from_slice(&[1, 255]);
/// assert_eq!(expand(&mut bytes, &[0b101], &steps), 2);
/// assert_eq!(bytes, [11, 20, 29]);
/// ```
pub fn expand<W: Word>(bytes: &mut [u8], masks: &[u64], steps: &[W]) -> usize {
    expand_with(DeltaPath::best(), bytes, masks, steps)
}

/// How many bits are set.
///
/// # Example
///
/// ```
/// assert_eq!(weightsync_simd::count_ones(&[0b1001, 1 << 5]), 3);
/// ```
pub fn count_ones(words: &[u64]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if DeltaPath::best() != DeltaPath::Scalar {
        // SAFETY: these paths were chosen because the processor has the instruction.
        return unsafe { x86::count_ones(words) };
    }
    scalar::count_ones(words)
}

/// Has the processor fetch the lines of a block in which `places` lie into its second-level cache. Few
/// at a time: while more are on their way than it keeps track of, it does nothing else.
///
/// A hint: places beyond the block are passed over.
pub fn prefetch<W: Word>(bytes: &[u8], places: &[u16]) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch(bytes, places, W::BYTES);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, places);
}

/// Has the processor fetch the lines of these bytes, which begin with one, into its second-level
/// cache. Few at a time, as [`prefetch`].
pub fn prefetch_all(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch_all(bytes);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

mod sealed {
    /// What a [`Word`](super::Word) is, is decided here.
    pub trait Sealed {}
}

macro_rules! words {
    ($($type:ty),*) => {$(
        impl sealed::Sealed for $type {}

        impl Word for $type {
            const BYTES: usize = size_of::<$type>();

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$type>()];
                array.copy_from_slice(&bytes[..size_of::<$type>()]);
                Self::from_le_bytes(array)
            }

            #[inline(always)]
            fn write(self, bytes: &mut [u8]) {
                bytes[..size_of::<$type>()].copy_from_slice(&self.to_le_bytes());
            }

            #[inline(always)]
            fn plus(self, step: Self) -> Self {
                self.wrapping_add(step)
            }

            #[inline(always)]
            fn minus(self, step: Self) -> Self {
                self.wrapping_sub(step)
            }

            #[inline(always)]
            fn widen(self) -> u64 {
                u64::from(self)
            }

            #[inline(always)]
            fn narrow(wide: u64) -> Self {
                wide as Self
            }

            #[inline(always)]
            fn zigzag(self) -> Self {
                // All ones if it is negative.
                let negative = (0 as Self).wrapping_sub(self >> (Self::BITS - 1));
                let far = (self ^ negative).wrapping_sub(negative);
                let twice = far.wrapping_add(far);
                let code = twice.wrapping_sub(1).wrapping_sub(negative);
                if self == 0 { 0 } else { code }
            }

            #[inline(always)]
            fn unzigzag(code: u16) -> Self {
                let code = code as Self;
                let far = (code >> 1).wrapping_add(code & 1);
                let negative = (0 as Self).wrapping_sub(!code & 1);
                (far ^ negative).wrapping_sub(negative)
            }
        }
    )*};
}

words!(u8, u16, u32, u64);

/// The instruction sets the kernels can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeltaPath {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// With compress and expand of bytes and 16-bit words (VBMI2).
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl DeltaPath {
    /// Every path of this target, the fastest first.
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        Self::Scalar,
    ];

    /// The fastest path this processor has.
    #[inline]
    pub(crate) fn best() -> Self {
        Self::available().next().unwrap_or(Self::Scalar)
    }

    /// The paths this processor has, the fastest first.
    #[inline]
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|path| path.is_available())
    }

    /// Whether the processor has the instructions; detected once, then remembered.
    #[inline]
    fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("bmi1")
                    && std::arch::is_x86_feature_detected!("bmi2")
                    && std::arch::is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512vbmi2")
                    && Self::Avx2.is_available()
            }
        }
    }
}

/// `path` must be available.
fn compare_with<W: Word, const PLACES: bool>(
    path: DeltaPath,
    old: &[u8],
    new: &[u8],
    masks: &mut [u64],
    places: &mut [u16],
    steps: &mut [W],
) -> usize {
    assert_eq!(old.len(), new.len(), "the two images differ in length");
    let elements = elements::<W>(old, masks);
    let room = match PLACES {
        true => places.len().min(steps.len()),
        false => steps.len(),
    };
    assert!(room >= elements + SLACK, "too little room for the changes");
    match path {
        DeltaPath::Scalar => scalar::compare::<W, PLACES>(old, new, masks, places, steps),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions; the lengths are
        // checked above.
        DeltaPath::Avx2 => unsafe {
            x86::compare_avx2::<W, PLACES>(old, new, masks, places, steps)
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: likewise.
        DeltaPath::Avx512 => unsafe {
            x86::compare_avx512::<W, PLACES>(old, new, masks, places, steps)
        },
    }
}

/// `path` must be available.
fn ones_with(path: DeltaPath, masks: &[u64], places: &mut [u16]) -> usize {
    assert!(masks.len() <= BLOCK / 64, "more than a block");
    assert!(places.len() >= masks.len() * 64 + SLACK, "too little room");
    match path {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions; there is room.
        DeltaPath::Avx512 => unsafe { x86::ones_avx512(masks, places) },
        _ => scalar::ones(masks, places),
    }
}

/// `path` must be available.
fn expand_with<W: Word>(path: DeltaPath, bytes: &mut [u8], masks: &[u64], steps: &[W]) -> usize {
    let elements = elements::<W>(bytes, masks);
    let (whole, rest) = (elements / 64, elements % 64);
    let bits = count_ones(&masks[..whole]);
    let last = masks.get(whole).map_or(0, |mask| mask & ((1 << rest) - 1));
    let changes = bits + last.count_ones() as usize;
    assert!(steps.len() >= changes + SLACK, "too few steps");
    let taken = match path {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions; as many words of
        // `masks` as are taken were counted above, so the steps suffice.
        DeltaPath::Avx512 => unsafe { x86::expand_avx512(bytes, &masks[..whole], steps) },
        _ => scalar::expand(bytes, &masks[..whole], steps),
    };
    let tail = &mut bytes[whole * 64 * W::BYTES..];
    taken + scalar::expand(tail, &[last][..rest.min(1)], &steps[taken..])
}

/// How many elements a block has, once its lengths are checked.
fn elements<W: Word>(bytes: &[u8], masks: &[u64]) -> usize {
    let elements = bytes.len() / W::BYTES;
    assert_eq!(bytes.len(), elements * W::BYTES, "not whole elements");
    assert!(elements <= BLOCK, "more than a block");
    assert!(masks.len() >= elements.div_ceil(64), "too few masks");
    elements
}
