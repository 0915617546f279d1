//! A file with the changes of one model between two versions.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `wsdelta1` |
//! | 8 | bytes of the model's image |
//! | 8 for each span | bytes of the span's part (32 bits), its kind (32 bits) |
//! | the rest | the parts, one after the other |
//!
//! Integers are little-endian. A span is [`SPAN`] bytes of the image; the last one may be shorter. Its
//! kind is 0 (nothing changed, no bytes), 1 (a delta as `docs/deltas.md` has it) or 2 (all bytes of the
//! newer version).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use weightsync_core::Layout;
use weightsync_core::delta::{BitPattern, Codec, DeltaError, SPAN, Scratch, apply, encode};
use weightsync_engine::transport::threads::LockExt as _;

use crate::threads;

const MAGIC: &[u8; 8] = b"wsdelta1";
const SAME: u32 = 0;
const CHANGES: u32 = 1;
const WHOLE: u32 = 2;

/// The changes of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EncodedChanges {
    /// The bytes of the file.
    pub(crate) bytes: Vec<u8>,
    /// Elements of the model.
    pub(crate) elements: u64,
    /// How many of them changed.
    pub(crate) changed: u64,
}

/// Compares two images. `None` if the file would have more than `limit` bytes.
pub(crate) fn make(
    layout: &Layout,
    codec: Codec,
    old: &[u8],
    new: &[u8],
    limit: u64,
) -> Option<EncodedChanges> {
    let spans = spans(layout);
    let header = (MAGIC.len() + 8 + 8 * spans) as u64;
    // The header counts, too: the limit is for the whole file.
    let total = AtomicU64::new(header);
    let (elements, changed) = (AtomicU64::new(0), AtomicU64::new(0));
    let parts: Vec<_> = (0..spans).map(|_| Mutex::new((SAME, Vec::new()))).collect();
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    threads::run(spans, || {
        let mut scratch = Scratch::new();
        loop {
            // Relaxed: each index is taken once, and the end of the scope orders the rest.
            let index = next.fetch_add(1, Ordering::Relaxed);
            // Changes that take too many bytes are given up as soon as that shows.
            if index >= spans || total.load(Ordering::Relaxed) > limit {
                return;
            }
            let range = range_of(layout, index);
            let (old, new) = (&old[range.clone()], &new[range.clone()]);
            let pattern = BitPattern::of_span(layout, range.start as u64);
            let mut part = Vec::new();
            let Ok(made) = encode(pattern, codec, old, new, &mut part, &mut scratch) else {
                return failed.store(true, Ordering::Relaxed);
            };
            let kind = match part.len() {
                0 => SAME,
                // Changes that are as long as the span itself are no gain.
                len if len >= new.len() => WHOLE,
                _ => CHANGES,
            };
            if kind == WHOLE {
                part = new.to_vec();
            }
            elements.fetch_add(made.elements, Ordering::Relaxed);
            changed.fetch_add(made.changes, Ordering::Relaxed);
            total.fetch_add(part.len() as u64, Ordering::Relaxed);
            *parts[index].locked() = (kind, part);
        }
    });
    let total = total.into_inner();
    if total > limit || failed.into_inner() {
        return None;
    }
    let parts = parts.into_iter();
    let parts = parts.map(|part| part.into_inner().unwrap_or_else(PoisonError::into_inner));
    Some(EncodedChanges {
        bytes: file_of(layout, parts.collect(), total),
        elements: elements.into_inner(),
        changed: changed.into_inner(),
    })
}

/// The bytes of a file with these parts, `total` bytes in all.
fn file_of(layout: &Layout, parts: Vec<(u32, Vec<u8>)>, total: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(total as usize);
    // All lengths come first: a reader of one span seeks to its part.
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&layout.bytes().to_le_bytes());
    for (kind, part) in &parts {
        bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&kind.to_le_bytes());
    }
    for (_, part) in parts {
        bytes.extend_from_slice(&part);
    }
    bytes
}

/// Where the parts of a file lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeltaIndex {
    /// For each span its kind, where its part begins in the file, and its length.
    parts: Vec<(u32, u64, usize)>,
}

impl DeltaIndex {
    /// Bytes before the first part.
    pub(crate) fn header_bytes(layout: &Layout) -> usize {
        MAGIC.len() + 8 + 8 * spans(layout)
    }

    /// Reads the header of a file of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub(crate) fn read(layout: &Layout, header: &[u8], bytes: u64) -> Result<Self, String> {
        let image = layout.bytes();
        let rest = header.strip_prefix(MAGIC);
        let rest = rest.ok_or("it does not begin like a file of changes")?;
        let (len, rest) = rest.split_first_chunk().ok_or("it is cut short")?;
        // Changes of another model would fold onto bytes that they were not made of.
        let got = u64::from_le_bytes(*len);
        if got != image {
            return Err(format!(
                "it is for a model of {got} bytes, expected {image}"
            ));
        }
        let (entries, tail) = rest.as_chunks::<8>();
        let spans = spans(layout);
        if entries.len() != spans || !tail.is_empty() {
            return Err(format!("it has {} spans, expected {spans}", entries.len()));
        }
        let mut at = header.len() as u64;
        let mut parts = Vec::with_capacity(spans);
        for (index, [a, b, c, d, kind @ ..]) in entries.iter().enumerate() {
            let len = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
            let kind = u32::from_le_bytes(*kind);
            let span = range_of(layout, index).len();
            // A span's kind and its length have to agree: they come from a file.
            let right = match kind {
                SAME => len == 0,
                CHANGES => (1..span).contains(&len),
                WHOLE => len == span,
                _ => false,
            };
            if !right {
                return Err(format!("span {index} has kind {kind} and {len} bytes"));
            }
            parts.push((kind, at, len));
            at += len as u64;
        }
        // The parts fill the file to its end, so a cut is seen before anything is read.
        match at == bytes {
            true => Ok(Self { parts }),
            false => Err(format!("it has {bytes} bytes, expected {at}")),
        }
    }

    /// Where the part of a span lies in the file: its offset and length.
    pub(crate) fn part(&self, span: usize) -> (u64, usize) {
        let (_, at, len) = self.parts[span];
        (at, len)
    }

    /// Brings a span to the newer version. After an error the span must not be used.
    ///
    /// # Errors
    ///
    /// What is wrong with the part.
    pub(crate) fn apply(
        &self,
        layout: &Layout,
        span: usize,
        part: &[u8],
        image: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), DeltaError> {
        match self.parts[span].0 {
            SAME => {}
            WHOLE => image.copy_from_slice(part),
            _ => {
                let pattern = BitPattern::of_span(layout, range_of(layout, span).start as u64);
                apply(pattern, part, image, None, scratch)?;
            }
        }
        Ok(())
    }
}

/// Spans of a model.
pub(crate) fn spans(layout: &Layout) -> usize {
    layout.bytes().div_ceil(SPAN) as usize
}

/// The bytes of a span.
pub(crate) fn range_of(layout: &Layout, span: usize) -> std::ops::Range<usize> {
    let start = span as u64 * SPAN;
    start as usize..layout.bytes().min(start + SPAN) as usize
}

#[cfg(test)]
mod tests;
