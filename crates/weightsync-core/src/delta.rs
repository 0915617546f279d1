//! Deltas: the changes between two versions of one image, and their encoding.
//!
//! A *change* is a place and a step. The step is the wrapping difference of two bit patterns,
//! so a delta is exact for every dtype and every pattern, and consecutive deltas add up. An
//! image is cut into *spans* of [`SPAN`] bytes. Each span is coded alone: a span can be
//! checked, passed on, skipped, or sent dense instead. Every span is read as elements of one
//! width: the width of the dtype that has most of its bytes (see [`BitPattern::of_span`]). Tensors
//! of another dtype in the span are coded just as exactly, but take more bytes.
//!
//! | codec | for | a change takes |
//! |---|---|---|
//! | [`Codec::Fast`] | quick links: near the speed of memory | 1.3 bytes at 1.1 % of bf16 |
//! | [`Codec::Gaps`] | in between, where much changed | 0.9 bytes at 10 % where that takes 1.8 |
//! | [`Codec::Thin`] | slow links and stores: coded in the classes of the old value's exponent | 0.9 bytes |
//!
//! `docs/deltas.md` specifies the formats. Every decoder accepts any bytes: malformed bytes
//! give a [`DeltaError`], never a panic and never more memory than a [`Scratch`]. A span to
//! which a delta was applied only in part must not be used: rebuild it from scratch.

mod apply;
mod bits;
mod encode;
mod fast;
mod fold;
mod pattern;
mod range;
mod thin;

#[cfg(test)]
mod tests;

pub use self::apply::{AppliedDelta, apply, apply_onto};
pub use self::encode::{Codec, Encoded, encode};
pub use self::fold::fold;
pub use self::pattern::BitPattern;

use weightsync_simd::{BLOCK, SLACK};

use crate::Remedy;

/// Bytes of an image that one coded delta covers; the last span of an image may be shorter.
pub const SPAN: u64 = 4 << 20;

/// The reason why bytes are not a valid delta.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// They end too early.
    #[error("the delta ends early, after {at} bytes")]
    Ends {
        /// How many there are.
        at: usize,
    },

    /// They go on behind the end.
    #[error("{extra} bytes follow the end of the delta")]
    Trailing {
        /// How many.
        extra: usize,
    },

    /// No codec begins like this.
    #[error("a delta cannot begin with byte {byte:#04x}")]
    Codec {
        /// The first byte.
        byte: u8,
    },

    /// The delta was made for elements of another width, as of another layout.
    #[error("the delta is of elements of {got} bytes, expected {expected}")]
    Width {
        /// The width by the layout, in bytes.
        expected: usize,
        /// The width the delta names.
        got: usize,
    },

    /// A change lies where there is no element.
    #[error("a change at element {got} of a block of {elements}")]
    Place {
        /// Elements of the block, or of the class.
        elements: usize,
        /// Where it lies.
        got: u64,
    },

    /// More changes than there are elements, or a step of nothing.
    #[error("{what}")]
    Malformed {
        /// What is wrong.
        what: &'static str,
    },

    /// The delta was made from other bytes than those it is put into.
    #[error("the delta does not fit the version it is applied to: {what}")]
    Base {
        /// What does not fit.
        what: &'static str,
    },

    /// A span is not what spans are.
    #[error("a span of {got} bytes, expected whole elements and at most {limit}")]
    Span {
        /// Most bytes of a span.
        limit: u64,
        /// The bytes given.
        got: u64,
    },
}

impl DeltaError {
    /// What to do: have the span come whole. Damage on the way shows in a checksum, so one end is
    /// wrong, or the version that it is put into is not the one it was made from.
    pub fn remedy(&self) -> Remedy {
        Remedy::Retry
    }
}

/// Working memory of the codecs, to be used again: it grows to what one span needs and no further.
#[derive(Debug, Default)]
pub struct Scratch {
    w1: BlockWork<u8>,
    w2: BlockWork<u16>,
    w4: BlockWork<u32>,
    w8: BlockWork<u64>,
    thin: thin::Lists,
}

impl Scratch {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Calls a function for the width of a pattern, with the working memory of that width.
macro_rules! by_width {
    ($pattern:expr, $scratch:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $pattern.width() {
            1 => $function::<u8>(&mut $scratch.w1, $($argument),*),
            2 => $function::<u16>(&mut $scratch.w2, $($argument),*),
            4 => $function::<u32>(&mut $scratch.w4, $($argument),*),
            _ => $function::<u64>(&mut $scratch.w8, $($argument),*),
        }
    };
}
use by_width;

/// The changes of one block, and of the one before it.
#[derive(Debug, Default)]
struct BlockWork<W> {
    now: BlockChanges<W>,
    before: BlockChanges<W>,
    /// What folding makes of two.
    sum: BlockChanges<W>,
    /// Zeros, and what both make of them.
    nothing: Vec<u8>,
    block: Vec<u8>,
}

/// The changes of one block, ascending.
#[derive(Debug, Default)]
struct BlockChanges<W> {
    /// How many there are.
    count: usize,
    places: Vec<u16>,
    steps: Vec<W>,
    /// The same places as bits, where they came or go as such.
    masks: Vec<u64>,
    /// What is written in a fixed number of bits.
    parts: Vec<u16>,
    /// Gaps, then what of them is written in unary, then which steps are far.
    highs: Vec<u16>,
}

impl<W: weightsync_simd::Word> BlockChanges<W> {
    /// Makes room for all the changes that a block can have.
    fn reserve(&mut self) {
        // The kernels store whole vectors, so they write up to `SLACK` elements behind the last
        // change.
        self.places.resize(BLOCK + SLACK, 0);
        self.steps.resize(BLOCK + SLACK, W::default());
        self.masks.resize(BLOCK / 64, 0);
        self.parts.resize(BLOCK, 0);
        self.highs.resize(BLOCK + SLACK, 0);
    }

    fn places(&self) -> &[u16] {
        &self.places[..self.count]
    }

    fn steps(&self) -> &[W] {
        &self.steps[..self.count]
    }

    /// Appends a change; there is room for as many as a block has elements.
    #[inline]
    fn push(&mut self, place: u16, step: W) {
        self.places[self.count] = place;
        self.steps[self.count] = step;
        self.count += 1;
    }
}

/// How long a span is in elements.
fn check_span(pattern: BitPattern, bytes: usize) -> Result<usize, DeltaError> {
    // The working memory has room for one span, and a span is read as whole elements.
    if bytes as u64 > SPAN || !bytes.is_multiple_of(pattern.width()) {
        return Err(DeltaError::Span {
            limit: SPAN,
            got: bytes as u64,
        });
    }
    Ok(bytes / pattern.width())
}
