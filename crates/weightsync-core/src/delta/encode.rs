//! Compares two versions of a span, and encodes the changes.

use serde::Serialize;
use strum::{IntoStaticStr, VariantArray};
use weightsync_simd::{Word, compare, compare_dense, ones};

use super::fast::PlaceForm;
use super::{BLOCK, BitPattern, BlockWork, DeltaError, Scratch, by_width, check_span, fast, thin};

/// How a delta is written down.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, IntoStaticStr, VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// Near the speed of memory.
    Fast,
    /// The same form, and places as gaps also where more than a few elements changed: fewer bytes
    /// there, and slower.
    Gaps,
    /// In few bytes: it needs the old values to be read.
    Thin,
}

impl Codec {
    /// All of them. Each takes longer than the one before it, and makes fewer bytes.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// Its word: `fast`, `gaps` or `thin`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The codec of the deltas that are kept to be [folded](super::fold) where those of this one are
    /// sent: itself, if they can be folded.
    pub fn foldable(self) -> Self {
        match self {
            Self::Fast | Self::Gaps => self,
            Self::Thin => Self::Fast,
        }
    }

    /// By which codec a delta was made, as far as its first byte says so: [`Codec::Fast`] and
    /// [`Codec::Gaps`] are read alike.
    ///
    /// # Example
    ///
    /// ```
    /// use weightsync_core::Dtype;
    /// use weightsync_core::delta::{BitPattern, Codec, Scratch, encode};
    ///
    /// let (pattern, mut scratch, mut delta) = (BitPattern::of(Dtype::U8), Scratch::new(), Vec::new());
    /// encode(pattern, Codec::Thin, &[0; 64], &[1; 64], &mut delta, &mut scratch)?;
    /// assert_eq!((Codec::of(&delta), Codec::of(&[])), (Some(Codec::Thin), None));
    /// # Ok::<(), weightsync_core::delta::DeltaError>(())
    /// ```
    pub fn of(delta: &[u8]) -> Option<Self> {
        match delta.first()? & !3 {
            fast::TAG => Some(Self::Fast),
            thin::TAG => Some(Self::Thin),
            _ => None,
        }
    }
}

/// What encoding has made of a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Elements of the span.
    pub elements: u64,
    /// How many of them changed.
    pub changes: u64,
    /// Bytes that were appended; none if nothing changed.
    pub bytes: u64,
}

/// Compares two versions of a span in one pass, and appends what changed to `out`: nothing if
/// nothing has.
///
/// # Errors
///
/// [`DeltaError::Span`] if the two are not of one length, longer than [`super::SPAN`] or not of whole
/// elements.
///
/// # Example
///
/// ```
/// use weightsync_core::Dtype;
/// use weightsync_core::delta::{BitPattern, Codec, Scratch, apply, encode};
///
/// let (old, new) = ([0_u8; 1024], { let mut new = [0; 1024]; new[500] = 1; new });
/// let (pattern, mut scratch, mut delta) = (BitPattern::of(Dtype::BF16), Scratch::new(), Vec::new());
/// let made = encode(pattern, Codec::Fast, &old, &new, &mut delta, &mut scratch)?;
/// assert_eq!((made.changes, made.elements), (1, 512));
///
/// let mut image = old;
/// apply(pattern, &delta, &mut image, None, &mut scratch)?;
/// assert_eq!(image, new);
/// # Ok::<(), weightsync_core::delta::DeltaError>(())
/// ```
pub fn encode(
    pattern: BitPattern,
    codec: Codec,
    old: &[u8],
    new: &[u8],
    out: &mut Vec<u8>,
    scratch: &mut Scratch,
) -> Result<Encoded, DeltaError> {
    let elements = check_span(pattern, new.len())?;
    check_span(pattern, old.len())?;
    // Two versions of one layout have spans of one length.
    if old.len() != new.len() {
        return Err(DeltaError::Span {
            limit: new.len() as u64,
            got: old.len() as u64,
        });
    }
    let begin = out.len();
    let changes = match codec {
        Codec::Fast => by_width!(pattern, scratch, fast(old, new, PlaceForm::Quick, out)),
        Codec::Gaps => by_width!(pattern, scratch, fast(old, new, PlaceForm::Few, out)),
        Codec::Thin => {
            let lists = &mut scratch.thin;
            match pattern.width() {
                1 => thin::encode(&mut scratch.w1, lists, pattern, old, new, out),
                2 => thin::encode(&mut scratch.w2, lists, pattern, old, new, out),
                4 => thin::encode(&mut scratch.w4, lists, pattern, old, new, out),
                _ => thin::encode(&mut scratch.w8, lists, pattern, old, new, out),
            }
        }
    };
    // Only the codec's first byte, or blocks without a change, were written.
    if changes == 0 {
        out.truncate(begin);
    }
    Ok(Encoded {
        elements: elements as u64,
        changes: changes as u64,
        bytes: (out.len() - begin) as u64,
    })
}

fn fast<W: Word>(
    work: &mut BlockWork<W>,
    old: &[u8],
    new: &[u8],
    places: PlaceForm,
    out: &mut Vec<u8>,
) -> usize {
    work.now.reserve();
    fast::begin::<W>(out);
    let block = BLOCK * W::BYTES;
    let mut all = 0;
    // Whether the block before was written as bits: then so is this one, in all likelihood.
    let mut as_bits = false;
    for (old, new) in old.chunks(block).zip(new.chunks(block)) {
        let now = &mut work.now;
        let (elements, masks) = (new.len() / W::BYTES, &mut now.masks);
        // A wrong guess costs time and never bytes: the form below follows from the count.
        now.count = match as_bits {
            true => compare_dense(old, new, masks, &mut now.steps),
            false => compare(old, new, masks, &mut now.places, &mut now.steps),
        };
        all += now.count;
        let listed = !as_bits;
        as_bits = places.as_bits(now.count, elements);
        // Guessed wrong: the places were not found, and this block needs them.
        if !as_bits && !listed {
            ones(&masks[..elements.div_ceil(64)], &mut now.places);
        }
        fast::write_block(now, elements, as_bits, out);
    }
    all
}
