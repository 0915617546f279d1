//! Casts between floating-point formats, and gathers from strided sources.
//!
//! Values are rounded once, to nearest, ties to even. Infinities stay, overflow becomes infinity,
//! subnormals are kept, and a NaN stays a NaN: quiet, with its sign and the upper bits of its
//! payload. That is bit for bit what the `half` crate does, with one exception: from `F64` to a
//! 16-bit format `half` 2.7 ignores the lower 32 bits, so it rounds values just beyond a tie the
//! wrong way. The processor's floating-point environment is taken to be the default one.
//!
//! All bytes are little-endian, at any alignment.

use half::{bf16, f16};

use crate::copy::stream_copy_slice;

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

/// A floating-point format of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Float {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16, the upper half of single precision.
    Bf16,
}

impl Float {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Float::F64 => 8,
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }
}

/// Casts the elements of `src` into `dst`, in one pass; large results go past the cache, as
/// [`stream_copy`](crate::stream_copy)'s do, and are fenced.
///
/// # Panics
///
/// If `src` is not a whole number of elements, or `dst` has not room for exactly that many.
///
/// # Example
///
/// ```
/// use weightsync_simd::{Float, cast};
///
/// let source: Vec<u8> = [1.0_f32, -2.5].iter().flat_map(|value| value.to_le_bytes()).collect();
/// let mut result = [0; 4];
/// cast(Float::Bf16, &mut result, Float::F32, &source);
/// assert_eq!(result, [0x80, 0x3f, 0x20, 0xc0]);
/// ```
pub fn cast(to: Float, dst: &mut [u8], from: Float, src: &[u8]) {
    cast_with(CastPath::best(), to, dst, from, src);
}

/// Casts elements that lie `stride` bytes apart: as many as `dst` has room for, the first of them at
/// byte `first` of `src`. A negative stride walks backwards, 0 repeats one element.
///
/// # Panics
///
/// If `dst` is not a whole number of elements, or an element lies outside `src`.
///
/// # Example
///
/// ```
/// use weightsync_simd::{Float, cast_strided};
///
/// // The second column of a matrix of 2 x 3, from the bottom up.
/// let matrix = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(f32::to_le_bytes).concat();
/// let mut column = [0; 16];
/// cast_strided(Float::F64, &mut column, Float::F32, &matrix, 16, -12);
/// assert_eq!(column, *[5.0_f64, 2.0].map(f64::to_le_bytes).as_flattened());
/// ```
pub fn cast_strided(
    to: Float,
    dst: &mut [u8],
    from: Float,
    src: &[u8],
    first: usize,
    stride: isize,
) {
    assert!(
        dst.len().is_multiple_of(to.bytes()),
        "not a whole number of elements"
    );
    if stride == from.bytes() as isize && first <= src.len() {
        let len = dst.len() / to.bytes() * from.bytes();
        return cast(to, dst, from, &src[first..first + len]);
    }
    check_walk(
        dst.len() / to.bytes(),
        from.bytes(),
        src.len(),
        first,
        stride,
    );
    // Gather some elements into a buffer that stays in the cache, then cast them together.
    let path = CastPath::best();
    let mut buffer = [0; GATHERED * 8];
    let mut at = first as isize;
    for part in dst.chunks_mut(GATHERED * to.bytes()) {
        let count = part.len() / to.bytes();
        let gathered = &mut buffer[..count * from.bytes()];
        gather(gathered, src, at as usize, stride, from.bytes());
        cast_with(path, to, part, from, gathered);
        // Past the last element this may leave the source; it is not used then.
        at = at.wrapping_add(stride.wrapping_mul(count as isize));
    }
}

/// Copies elements of `size` bytes that lie `stride` bytes apart: as many as `dst` has room for, the
/// first of them at byte `first` of `src`. A negative stride walks backwards, 0 repeats one element.
///
/// # Panics
///
/// If `size` is not 1, 2, 4 or 8, if `dst` is not a whole number of elements, or if an element lies
/// outside `src`.
///
/// # Example
///
/// ```
/// let mut every_other = [0; 3];
/// weightsync_simd::gather(&mut every_other, b"abcdef", 1, 2, 1);
/// assert_eq!(&every_other, b"bdf");
/// ```
pub fn gather(dst: &mut [u8], src: &[u8], first: usize, stride: isize, size: usize) {
    match size {
        1 => gather_sized::<1>(dst, src, first, stride),
        2 => gather_sized::<2>(dst, src, first, stride),
        4 => gather_sized::<4>(dst, src, first, stride),
        8 => gather_sized::<8>(dst, src, first, stride),
        _ => panic!("elements of {size} bytes, expected 1, 2, 4 or 8"),
    }
}

/// Elements gathered before they are cast together.
const GATHERED: usize = 64;

/// The instruction sets a cast can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CastPath {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl CastPath {
    /// Every path of this target, the fastest first.
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
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
            Self::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
        }
    }
}

/// `path` must be available.
fn cast_with(path: CastPath, to: Float, dst: &mut [u8], from: Float, src: &[u8]) {
    assert!(
        src.len().is_multiple_of(from.bytes()),
        "not a whole number of elements"
    );
    let count = src.len() / from.bytes();
    assert_eq!(
        dst.len(),
        count * to.bytes(),
        "source and destination lengths differ"
    );
    if from == to {
        return stream_copy_slice(dst, src);
    }
    let done = match path {
        CastPath::Scalar => 0,
        #[cfg(target_arch = "x86_64")]
        CastPath::Avx512 => {
            let streams =
                dst.len() >= crate::STREAM_THRESHOLD && dst.as_ptr().align_offset(64) == 0;
            // SAFETY: both slices hold `count` elements of their formats, checked above, and the
            // path was chosen because the processor has AVX-512F.
            unsafe { x86::cast(to, dst.as_mut_ptr(), from, src.as_ptr(), count, streams) }
        }
    };
    let (dst, src) = (&mut dst[done * to.bytes()..], &src[done * from.bytes()..]);
    match from {
        Float::F64 => cast_scalar_from::<f64, 8>(to, dst, src),
        Float::F32 => cast_scalar_from::<f32, 4>(to, dst, src),
        Float::F16 => cast_scalar_from::<f16, 2>(to, dst, src),
        Float::Bf16 => cast_scalar_from::<bf16, 2>(to, dst, src),
    }
}

fn cast_scalar_from<F: CastElement<N>, const N: usize>(to: Float, dst: &mut [u8], src: &[u8]) {
    match to {
        Float::F64 => cast_scalar::<F, f64, N, 8>(dst, src),
        Float::F32 => cast_scalar::<F, f32, N, 4>(dst, src),
        Float::F16 => cast_scalar::<F, f16, N, 2>(dst, src),
        Float::Bf16 => cast_scalar::<F, bf16, N, 2>(dst, src),
    }
}

fn cast_scalar<F: CastElement<N>, T: CastElement<M>, const N: usize, const M: usize>(
    dst: &mut [u8],
    src: &[u8],
) {
    let (dst, src) = (dst.as_chunks_mut::<M>().0, src.as_chunks::<N>().0);
    for (to, &from) in dst.iter_mut().zip(src) {
        *to = F::read(from).cast::<T, M>().write();
    }
}

/// One element, `N` bytes long. Every format but `F64` fits into `f32` exactly.
trait CastElement<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn write(self) -> [u8; N];
    fn cast<T: CastElement<M>, const M: usize>(self) -> T;
    fn from_f32(value: f32) -> Self;
    fn from_f64(value: f64) -> Self;
}

impl CastElement<8> for f64 {
    fn read(bytes: [u8; 8]) -> Self {
        f64::from_le_bytes(bytes)
    }

    fn write(self) -> [u8; 8] {
        self.to_le_bytes()
    }

    fn cast<T: CastElement<M>, const M: usize>(self) -> T {
        T::from_f64(self)
    }

    fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            let bits = value.to_bits();
            let sign = u64::from(bits >> 31) << 63;
            return f64::from_bits(sign | 0x7ff8 << 48 | u64::from(bits & 0x007f_ffff) << 29);
        }
        f64::from(value)
    }

    fn from_f64(value: f64) -> Self {
        value
    }
}

impl CastElement<4> for f32 {
    fn read(bytes: [u8; 4]) -> Self {
        f32::from_le_bytes(bytes)
    }

    fn write(self) -> [u8; 4] {
        self.to_le_bytes()
    }

    fn cast<T: CastElement<M>, const M: usize>(self) -> T {
        T::from_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        value
    }

    fn from_f64(value: f64) -> Self {
        // Rust leaves a cast NaN's bits open; here they are defined.
        if value.is_nan() {
            let bits = value.to_bits();
            let sign = (bits >> 63 << 31) as u32;
            return f32::from_bits(sign | 0x7fc0_0000 | (bits >> 29) as u32 & 0x003f_ffff);
        }
        value as f32
    }
}

macro_rules! sixteen_bit {
    ($format:ty) => {
        impl CastElement<2> for $format {
            fn read(bytes: [u8; 2]) -> Self {
                <$format>::from_le_bytes(bytes)
            }

            fn write(self) -> [u8; 2] {
                self.to_le_bytes()
            }

            fn cast<T: CastElement<M>, const M: usize>(self) -> T {
                T::from_f32(self.to_f32_const())
            }

            fn from_f32(value: f32) -> Self {
                <$format>::from_f32_const(value)
            }

            fn from_f64(value: f64) -> Self {
                <$format>::from_f32_const(round_to_odd(value))
            }
        }
    };
}

sixteen_bit!(f16);
sixteen_bit!(bf16);

/// The nearest `f32` towards zero, with its last bit set if it is not exact. Rounding that to a
/// shorter format is the same as rounding the value itself, because the last bit tells on which side
/// of a tie it lies (S. Boldo and G. Melquiond, "When double rounding is odd", 2005).
fn round_to_odd(value: f64) -> f32 {
    let nearest = <f32 as CastElement<4>>::from_f64(value);
    if value.is_nan() || f64::from(nearest) == value {
        return nearest;
    }
    let away = f64::from(nearest).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

/// Panics unless `count` elements of `size` bytes, from byte `first` and `stride` bytes apart, lie
/// inside `len` bytes.
fn check_walk(count: usize, size: usize, len: usize, first: usize, stride: isize) {
    if count == 0 {
        return;
    }
    let last = (count as i128 - 1) * stride as i128 + first as i128;
    let (low, high) = (last.min(first as i128), last.max(first as i128));
    assert!(
        low >= 0 && high + size as i128 <= len as i128,
        "{count} elements from byte {first}, {stride} bytes apart, leave a source of {len} bytes"
    );
}

fn gather_sized<const N: usize>(dst: &mut [u8], src: &[u8], first: usize, stride: isize) {
    let (elements, rest) = dst.as_chunks_mut::<N>();
    assert!(rest.is_empty(), "not a whole number of elements");
    check_walk(elements.len(), N, src.len(), first, stride);
    let mut from = src.as_ptr().wrapping_add(first);
    for element in elements {
        // SAFETY: `check_walk` found every element of the walk inside `src`.
        *element = unsafe { from.cast::<[u8; N]>().read() };
        from = from.wrapping_offset(stride);
    }
}
