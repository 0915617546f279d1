//! The kernels of weightsync: copy, checksum, digest, cast and changes.
//!
//! Everything here is a pure function over bytes: no allocation, no formats, no policy. Each kernel
//! has a portable scalar twin, and the widest path the processor offers is chosen at run time; all
//! paths give the same bytes, which the tests check path against path. Linux on x86-64 has the fast
//! paths (SSE2, AVX2, AVX-512, AES-NI, VAES, PCLMULQDQ); every other target runs the scalar twins.
//!
//! | kernel | entry points |
//! |---|---|
//! | copy past the cache | [`stream_copy`], [`stream_copy_slice`], [`Copier`] |
//! | copy and checksum in one pass | [`stream_copy_crc`], [`stream_copy_crc_slice`] |
//! | checksum (CRC-64/NVME) | [`crc64`], [`Crc64`], [`crc64_combine`] |
//! | digest of lines | [`digest_lines`], [`digest_lines_at`], [`digest_line_delta`], [`digest_add`] |
//! | what changed, and putting it in | [`compare`], [`compare_dense`], [`ones`], [`expand`], [`count_ones`], [`prefetch`], [`prefetch_all`] |
//! | classes of exponents | [`classes`], [`rank`], [`select`] |
//! | small numbers in few bits | [`pack`], [`unpack`], [`pack_unary`], [`unpack_unary`], [`zigzag`], [`unzigzag`], [`add_up`], [`find`] |
//! | casts and gathers | [`cast`], [`cast_strided`], [`gather`] |
//! | eight bits and a scale | [`amax`], [`quantise_e4m3`], [`quantise_i8`] |

mod cast;
mod classes;
mod copy;
mod crc;
mod delta;
mod digest;
mod pack;
mod quantise;

#[cfg(test)]
mod testing;

pub use cast::{Float, cast, cast_strided, gather};
pub use classes::{CLASSES, Exponents, classes, rank, select};
pub use copy::{Copier, STREAM_THRESHOLD, stream_copy, stream_copy_slice};
pub use crc::{Crc64, crc64, crc64_combine, stream_copy_crc, stream_copy_crc_slice};
pub use delta::{
    BLOCK, SLACK, Word, compare, compare_dense, count_ones, expand, ones, prefetch, prefetch_all,
};
pub use digest::{LINE_BYTES, digest_add, digest_line_delta, digest_lines, digest_lines_at};
pub use pack::{
    PACK_BITS, PACK_SLACK, add_up, find, pack, pack_unary, unpack, unpack_unary, unzigzag, zigzag,
};
pub use quantise::{amax, quantise_e4m3, quantise_i8};
