//! Classes of elements by their exponent: counts how many elements of a class come before a
//! place, and finds the place of a count.
//!
//! Small weights change far more often than large ones. So changes take few bits if their
//! places are counted within each class. Both ends know the old values, and so the classes.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

use crate::delta::{BLOCK, DeltaPath, Word};

/// How many classes there are.
pub const CLASSES: usize = 16;

/// Where the exponent of an element lies, and which exponent is the first class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exponents {
    /// The lowest bit of the exponent.
    pub shift: u32,
    /// Its bits, once shifted down.
    pub mask: u64,
    /// The exponent of class 0; the ones above it are in that class too. Each one below is a class
    /// of its own, and the last class has all that are left.
    pub top: u64,
}

/// The class of each element of a block.
///
/// # Panics
///
/// If `bytes` are not whole elements or more than a block, or `out` is not one byte for each.
pub fn classes<W: Word>(bytes: &[u8], exponents: Exponents, out: &mut [u8]) {
    classes_with::<W>(DeltaPath::best(), bytes, exponents, out);
}

/// Says of each of the ascending `places` of a block how many elements of its own class come before
/// it, those in `totals` included; `totals` go on to the end of the block.
///
/// # Panics
///
/// If a class is not below [`CLASSES`], there are more than [`BLOCK`], `ranks` is shorter than
/// `places`, or the places do not ascend within the block.
pub fn rank(classes: &[u8], places: &[u16], totals: &mut [u32; CLASSES], ranks: &mut [u32]) {
    rank_with(DeltaPath::best(), classes, places, totals, ranks);
}

/// The way back from [`rank`]: finds the places in a block of the elements that have the next of
/// `ranks` in their class, `taken` of which were found before; ranks ascend. Returns how many places
/// it has written, in no particular order, those of one class ascending.
///
/// # Panics
///
/// If a class is not below [`CLASSES`], there are more than [`BLOCK`], or `places` is shorter than
/// `classes`.
pub fn select(
    classes: &[u8],
    ranks: &[&[u32]; CLASSES],
    totals: &mut [u32; CLASSES],
    taken: &mut [usize; CLASSES],
    places: &mut [u16],
) -> usize {
    select_with(DeltaPath::best(), classes, ranks, totals, taken, places)
}

/// `path` must be available.
fn classes_with<W: Word>(path: DeltaPath, bytes: &[u8], exponents: Exponents, out: &mut [u8]) {
    assert_eq!(
        bytes.len(),
        out.len() * W::BYTES,
        "one class for each element"
    );
    assert!(out.len() <= BLOCK, "more than a block");
    match path {
        DeltaPath::Scalar => scalar::classes::<W>(bytes, exponents, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions.
        DeltaPath::Avx2 => unsafe { x86::classes_avx2::<W>(bytes, exponents, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: likewise.
        DeltaPath::Avx512 => unsafe { x86::classes_avx512::<W>(bytes, exponents, out) },
    }
}

/// `path` must be available.
fn rank_with(
    path: DeltaPath,
    classes: &[u8],
    places: &[u16],
    totals: &mut [u32; CLASSES],
    ranks: &mut [u32],
) {
    assert!(classes.len() <= BLOCK, "more than a block");
    assert!(ranks.len() >= places.len(), "a rank for each place");
    let done = match path {
        DeltaPath::Scalar => 0,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the path was chosen because the processor has its instructions.
        DeltaPath::Avx2 => unsafe { x86::rank_avx2(classes, places, totals, ranks) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: likewise.
        DeltaPath::Avx512 => unsafe { x86::rank_avx512(classes, places, totals, ranks) },
    };
    let first = match path {
        DeltaPath::Scalar => 0,
        #[cfg(target_arch = "x86_64")]
        _ => classes.len() / 64 * 64,
    };
    let (places, ranks) = (&places[done..], &mut ranks[done..]);
    scalar::rank(&classes[first..], first, places, totals, ranks);
}

/// `path` must be available.
fn select_with(
    path: DeltaPath,
    classes: &[u8],
    ranks: &[&[u32]; CLASSES],
    totals: &mut [u32; CLASSES],
    taken: &mut [usize; CLASSES],
    places: &mut [u16],
) -> usize {
    assert!(classes.len() <= BLOCK, "more than a block");
    assert!(places.len() >= classes.len(), "room for each place");
    let (first, found) = match path {
        DeltaPath::Scalar => (0, 0),
        #[cfg(target_arch = "x86_64")]
        DeltaPath::Avx2 => {
            // SAFETY: the path was chosen because the processor has its instructions.
            let found = unsafe { x86::select_avx2(classes, ranks, totals, taken, places) };
            (classes.len() / 64 * 64, found)
        }
        #[cfg(target_arch = "x86_64")]
        DeltaPath::Avx512 => {
            // SAFETY: likewise.
            let found = unsafe { x86::select_avx512(classes, ranks, totals, taken, places) };
            (classes.len() / 64 * 64, found)
        }
    };
    let places = &mut places[found..];
    found + scalar::select(&classes[first..], first, ranks, totals, taken, places)
}
