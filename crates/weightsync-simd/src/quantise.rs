//! Eight-bit values of `F32`, divided by a scale.
//!
//! Each kernel is one loop without branches, which the compiler turns into vector instructions: once
//! for every processor of the target, and on x86-64 once more for AVX2. Sources are little-endian
//! `f32` at any alignment.

#[cfg(test)]
mod tests;

/// The largest magnitude among the elements of `src`, or 0 if there are none. One NaN makes it a NaN.
///
/// # Panics
///
/// If `src` is not a whole number of elements.
///
/// # Example
///
/// ```
/// let source = [1.0_f32, -2.5, 0.0].map(f32::to_le_bytes).concat();
/// assert_eq!(weightsync_simd::amax(&source), 2.5);
/// ```
pub fn amax(src: &[u8]) -> f32 {
    amax_with(QuantisePath::best(), src)
}

/// Writes each element of `src`, divided by `scale`, as FP8 E4M3 (the kind that has no infinities):
/// kept within -448 and 448, rounded to nearest, ties to even. A NaN becomes `0x7f`.
///
/// # Panics
///
/// If `dst` has not one byte for each element of `src`.
///
/// # Example
///
/// ```
/// let source = [2.0_f32, -1.0, 1e9].map(f32::to_le_bytes).concat();
/// let mut values = [0; 3];
/// weightsync_simd::quantise_e4m3(&mut values, &source, 2.0);
/// assert_eq!(values, [0x38, 0xb0, 0x7e]); // 1, -0.5, 448
/// ```
pub fn quantise_e4m3(dst: &mut [u8], src: &[u8], scale: f32) {
    e4m3_with(QuantisePath::best(), dst, src, scale);
}

/// Writes each element of `src`, divided by `scale`, as a signed byte: kept within -128 and 127,
/// rounded to nearest, ties to even. A NaN becomes 0.
///
/// # Panics
///
/// If `dst` has not one byte for each element of `src`.
///
/// # Example
///
/// ```
/// let source = [5.0_f32, -3.0, 1e9].map(f32::to_le_bytes).concat();
/// let mut values = [0; 3];
/// weightsync_simd::quantise_i8(&mut values, &source, 2.0);
/// assert_eq!(values.map(u8::cast_signed), [2, -2, 127]);
/// ```
pub fn quantise_i8(dst: &mut [u8], src: &[u8], scale: f32) {
    i8_with(QuantisePath::best(), dst, src, scale);
}

/// The instruction sets that the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuantisePath {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl QuantisePath {
    /// Every path of this target, the fastest first.
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        Self::Scalar,
    ];

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
            Self::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
        }
    }
}

/// `path` must be available.
fn amax_with(path: QuantisePath, src: &[u8]) -> f32 {
    let (src, rest) = src.as_chunks();
    assert!(rest.is_empty(), "not a whole number of elements");
    match path {
        QuantisePath::Scalar => amax_loop(src),
        // SAFETY: the path was chosen because the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        QuantisePath::Avx2 => unsafe { avx2::amax(src) },
    }
}

/// `path` must be available.
fn e4m3_with(path: QuantisePath, dst: &mut [u8], src: &[u8], scale: f32) {
    let src = elements(dst, src);
    match path {
        QuantisePath::Scalar => e4m3_loop(dst, src, scale),
        // SAFETY: the path was chosen because the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        QuantisePath::Avx2 => unsafe { avx2::e4m3(dst, src, scale) },
    }
}

/// `path` must be available.
fn i8_with(path: QuantisePath, dst: &mut [u8], src: &[u8], scale: f32) {
    let src = elements(dst, src);
    match path {
        QuantisePath::Scalar => i8_loop(dst, src, scale),
        // SAFETY: the path was chosen because the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        QuantisePath::Avx2 => unsafe { avx2::i8(dst, src, scale) },
    }
}

/// The elements of `src`, as many as `dst` has bytes.
fn elements<'a>(dst: &[u8], src: &'a [u8]) -> &'a [[u8; 4]] {
    let (src, rest) = src.as_chunks();
    assert!(rest.is_empty(), "not a whole number of elements");
    assert_eq!(
        dst.len(),
        src.len(),
        "source and destination lengths differ"
    );
    src
}

#[inline(always)]
fn amax_loop(src: &[[u8; 4]]) -> f32 {
    // Without their sign, floats are in the order of their bits, and NaNs come last.
    let magnitudes = src
        .iter()
        .map(|&bytes| i32::from_le_bytes(bytes) & i32::MAX);
    f32::from_bits(magnitudes.fold(0, i32::max).cast_unsigned())
}

#[inline(always)]
fn e4m3_loop(dst: &mut [u8], src: &[[u8; 4]], scale: f32) {
    for (to, &from) in dst.iter_mut().zip(src) {
        *to = e4m3(f32::from_le_bytes(from) / scale);
    }
}

#[inline(always)]
fn i8_loop(dst: &mut [u8], src: &[[u8; 4]], scale: f32) {
    for (to, &from) in dst.iter_mut().zip(src) {
        *to = i8(f32::from_le_bytes(from) / scale);
    }
}

#[inline(always)]
fn e4m3(value: f32) -> u8 {
    /// 448, infinity, and the smallest E4M3 number that is not subnormal (2⁻⁶).
    const LARGEST: i32 = 0x43e0_0000;
    const INFINITY: i32 = 0x7f80_0000;
    const NORMAL: i32 = 0x3c80_0000;
    /// The unit in the last place of 2¹⁴ as an `f32` is the smallest subnormal of E4M3, 2⁻⁹.
    const SUBNORMALS: f32 = 16384.0;
    /// From the exponent of an `f32` to that of E4M3.
    const EXPONENT: i32 = (127 - 7) << 23;

    let bits = value.to_bits().cast_signed();
    let magnitude = bits & i32::MAX;
    let kept = magnitude.min(LARGEST);
    // The addition rounds; what it leaves in the lower bits counts units of 2⁻⁹.
    let sum = f32::from_bits(kept.cast_unsigned()) + SUBNORMALS;
    let small = sum.to_bits().cast_signed() - SUBNORMALS.to_bits().cast_signed();
    // Half a unit less a bit, and that bit if the number before the tie is odd.
    let odd = (kept >> 20) & 1;
    let large = (kept - EXPONENT + 0x7_ffff + odd) >> 20;
    let rounded = if kept < NORMAL { small } else { large };
    let number = rounded | ((bits >> 24) & 0x80);
    (if magnitude > INFINITY { 0x7f } else { number }) as u8
}

#[inline(always)]
fn i8(value: f32) -> u8 {
    /// The unit in the last place is 1, here and 2²² to either side: an addition rounds to integers.
    const INTEGERS: f32 = 12_582_912.0;
    let sum = value.clamp(-128.0, 127.0) + INTEGERS;
    let number = sum.to_bits() as u8;
    if value.is_nan() { 0 } else { number }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    #[target_feature(enable = "avx2")]
    pub(super) fn amax(src: &[[u8; 4]]) -> f32 {
        super::amax_loop(src)
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn e4m3(dst: &mut [u8], src: &[[u8; 4]], scale: f32) {
        super::e4m3_loop(dst, src, scale);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn i8(dst: &mut [u8], src: &[[u8; 4]], scale: f32) {
        super::i8_loop(dst, src, scale);
    }
}
