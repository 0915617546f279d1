//! Copies a model's tensors into a slot, in one pass.

use std::ops::Range;
use std::sync::OnceLock;

use weightsync_core::{Layout, TensorSpec};
use weightsync_simd::{Copier, Crc64};

use crate::error::Error;
use crate::map::MemoryMap;
use crate::spans::{CHECKSUM_BLOCK, SlotShape, Span, Spans};
use crate::threads;

/// Where one tensor's bytes come from.
pub enum Source<'a> {
    /// Bytes in the layout's form: contiguous, same dtype.
    Bytes(&'a [u8]),
    /// A function that writes them (a cast, a gather, a read from a file) to their final place.
    Fill(&'a Fill<'a>),
}

/// Writes all of one tensor's bytes, or returns why it cannot.
pub type Fill<'a> = dyn Fn(&mut [u8]) -> Result<(), BoxedError> + Sync + 'a;

/// Any error of a source, passed on by a [`StagingSlots`](crate::StagingSlots).
pub type BoxedError = Box<dyn std::error::Error + Send + Sync>;

impl std::fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
            Self::Fill(_) => f.write_str("Fill"),
        }
    }
}

/// How [`StagingSlots::write`](crate::StagingSlots::write) copies.
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyOptions {
    /// The number of copying threads, including this one; 0 chooses as many as pay, from the bytes
    /// to copy and the processor's cores.
    pub threads: usize,
    /// Whether to make block checksums in the same pass.
    pub checksums: bool,
}

/// Writes every tensor of an image that begins at the start of `map`, and computes the checksums of
/// its blocks if wanted, in one pass over the sources.
///
/// # Safety
///
/// `map` must be writable and at least a slot of this layout long, and nobody else may read or
/// write it meanwhile.
///
/// # Errors
///
/// [`Error::Fill`] with the first failure of a [`Source::Fill`].
///
/// # Panics
///
/// If there is not one source per tensor, or one has another length than its tensor.
pub(crate) unsafe fn write_image(
    map: &MemoryMap,
    layout: &Layout,
    spans: &Spans,
    sources: &[Source<'_>],
    options: CopyOptions,
) -> Result<Vec<u64>, Error> {
    assert_eq!(sources.len(), layout.len(), "one source per tensor");
    assert!(
        layout.bytes() as usize <= map.len(),
        "a slot of the layout's"
    );
    // Without checksums, large tensors need not be cut into blocks.
    let (spans, blocks) = match options.checksums {
        true => (spans.all(), SlotShape::of(layout).blocks()),
        false => (spans.joined(), 0),
    };
    let mut sums = vec![0; blocks];
    let image = SlotImage {
        start: map.as_ptr(),
        layout,
        sources,
        bytes: layout.bytes() as usize,
    };
    let threads = match options.threads {
        0 => that_pay(image.bytes, sources),
        threads => threads,
    };
    if threads <= 1 {
        image.write(spans, (0, &mut sums))?;
        return Ok(sums);
    }
    let cuts = cut(spans, sources, CopyOptions { threads, ..options });
    image.write_on_threads(spans, &cuts, &mut sums)?;
    Ok(sums)
}

/// The least bytes for another thread: they take a few milliseconds, of which its start is 1 %.
const SHARE: usize = 64 << 20;

/// More threads would only wait for memory.
const MAX_THREADS: usize = 4;

/// How many threads to use by default: one thread cannot use the memory's full speed. A function
/// that fills a tensor may need what only the caller's thread has, so there is one thread then.
fn that_pay(bytes: usize, sources: &[Source<'_>]) -> usize {
    let most = (bytes / SHARE).min(MAX_THREADS);
    let fills = || sources.iter().any(|one| matches!(one, Source::Fill(_)));
    if most <= 1 || fills() {
        return 1;
    }
    most.min(cores())
}

/// How many cores this process may use. Cached, because asking takes longer than a small send.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Cuts the spans into one run per thread, with about the same number of bytes each. Tensors filled
/// by a function are never cut, and neither are checksummed blocks.
fn cut(spans: &[Span], sources: &[Source<'_>], options: CopyOptions) -> Vec<Range<usize>> {
    let CopyOptions { threads, checksums } = options;
    let total: usize = spans.iter().map(|span| span.image.len()).sum();
    // By bytes, because tensors differ much in size.
    let share = total.div_ceil(threads).max(1);
    let mut cuts = Vec::with_capacity(threads);
    let (mut start, mut bytes) = (0, 0);
    let block = |span: &Span| span.image.start / CHECKSUM_BLOCK;
    for (index, span) in spans.iter().enumerate() {
        bytes += span.image.len();
        let goes_on = spans.get(index + 1).is_some_and(|next| {
            let fills = matches!(sources[span.tensors.start], Source::Fill(_));
            // A function writes its tensor whole, so that one thread must have all of it. A
            // checksum is made by one thread, in order.
            next.tensors == span.tensors && fills || checksums && block(next) == block(span)
        });
        // The last run takes what is left.
        if bytes >= share && !goes_on && cuts.len() + 1 < threads {
            cuts.push(start..index + 1);
            (start, bytes) = (index + 1, 0);
        }
    }
    cuts.push(start..spans.len());
    cuts
}

/// The checksums of the blocks that one thread writes, in order.
struct Sums<'a> {
    /// The checksums to write, and the block of the first one; none if checksums are not wanted.
    sums: &'a mut [u64],
    first: usize,
    /// The open block, its checksum so far, and the bytes that it covers.
    open: Option<(usize, Crc64, usize)>,
    image_bytes: usize,
}

impl Sums<'_> {
    /// The checksum that a span's bytes go into, once earlier bytes are included.
    fn of(&mut self, span: &Range<usize>) -> Option<&mut Crc64> {
        if self.sums.is_empty() || span.is_empty() {
            return None;
        }
        let block = span.start / CHECKSUM_BLOCK;
        if self.open.as_ref().is_none_or(|(open, ..)| *open != block) {
            self.close();
            self.open = Some((block, Crc64::new(), block * CHECKSUM_BLOCK));
        }
        let (_, crc, at) = self.open.as_mut()?;
        // Padding belongs to the block. It is zero in every version, so it need not be read.
        zeros(crc, span.start - *at);
        *at = span.end;
        Some(crc)
    }

    /// Finishes the open block.
    fn close(&mut self) {
        if let Some((block, mut crc, at)) = self.open.take() {
            let end = self.image_bytes.min((block + 1) * CHECKSUM_BLOCK);
            zeros(&mut crc, end - at);
            self.sums[block - self.first] = crc.value();
        }
    }
}

/// Adds the padding between tensors.
fn zeros(crc: &mut Crc64, count: usize) {
    const ZEROS: [u8; 64] = [0; 64];
    for at in (0..count).step_by(ZEROS.len()) {
        crc.update(&ZEROS[..ZEROS.len().min(count - at)]);
    }
}

/// The slot being written, shared by the copying threads.
struct SlotImage<'a> {
    start: *mut u8,
    bytes: usize,
    layout: &'a Layout,
    sources: &'a [Source<'a>],
}

// SAFETY: each thread writes the spans it was given and no others (`cut`), and
// the slot outlives the scope in which they run.
unsafe impl Sync for SlotImage<'_> {}

impl SlotImage<'_> {
    /// Writes each run of spans on a thread, and the checksums of their blocks if there is room for
    /// them.
    ///
    /// # Errors
    ///
    /// [`Error::Fill`] as for one thread, and [`Error::Os`] if a thread cannot be started.
    fn write_on_threads(
        &self,
        spans: &[Span],
        cuts: &[Range<usize>],
        sums: &mut [u64],
    ) -> Result<(), Error> {
        // This thread copies the first run, and one more thread each of the others.
        let (first, others) = cuts
            .split_first()
            .map_or((0..0, &[][..]), |(a, b)| (a.clone(), b));
        let blocks = sums.len();
        std::thread::scope(|scope| {
            // The first block after a run of spans: no block belongs to two runs.
            let behind = |range: &Range<usize>| match spans.get(range.end) {
                Some(next) => (next.image.start / CHECKSUM_BLOCK).min(blocks),
                None => blocks,
            };
            // Each thread gets the part of the table that belongs to its blocks, so that none needs a
            // lock.
            let mut block = behind(&first);
            let (own, mut rest) = sums.split_at_mut(block);
            let mut threads = Vec::with_capacity(others.len());
            for range in others {
                let from = std::mem::replace(&mut block, behind(range));
                let (part, tail) = std::mem::take(&mut rest).split_at_mut(block - from);
                rest = tail;
                let spans = &spans[range.clone()];
                // On an error the scope still joins the threads that run. What they have written is
                // never published.
                let copy = move || self.write(spans, (from, part));
                threads.push(
                    threads::spawn_scoped(scope, "copy", copy).map_err(|source| Error::Os {
                        action: "starting a copying thread",
                        source,
                    })?,
                );
            }
            // All threads are joined, also after an error here: they write into the slot.
            let mut result = self.write(&spans[first], (0, own));
            for thread in threads {
                // Passes a fill function's panic on to the caller.
                let other = thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                result = result.and(other);
            }
            result
        })
    }

    /// Writes these spans and, if there is room for them, the checksums of their blocks, from block
    /// `first` on.
    fn write(&self, spans: &[Span], (first, sums): (usize, &mut [u64])) -> Result<(), Error> {
        let total = spans.iter().map(|span| span.image.len()).sum();
        // Dropping it orders the streaming stores before this thread is joined.
        let copier = Copier::new(total);
        let mut sums = Sums {
            sums,
            first,
            open: None,
            image_bytes: self.bytes,
        };
        for span in spans {
            let crc = sums.of(&span.image);
            match &self.sources[span.tensors.clone()] {
                // One tensor or a part of it: copied and summed while the bytes pass.
                [Source::Bytes(source)] => {
                    let tensor = &self.layout.tensors()[span.tensors.start];
                    check_length(source, tensor);
                    // The span may begin in the middle of its tensor.
                    let from = span.image.start - tensor.range.offset as usize;
                    let part = &source[from..from + span.image.len()];
                    let to = self.target(&span.image);
                    if let Some(crc) = crc {
                        // SAFETY: `place` checked the range; only this thread
                        // writes the span; the source cannot overlap a slot
                        // that nobody else maps writable.
                        unsafe { copier.copy_update(crc, to, part.as_ptr(), part.len()) };
                    } else {
                        // SAFETY: as above.
                        unsafe { copier.copy(to, part.as_ptr(), part.len()) };
                    }
                }
                _ => {
                    // Small tensors are summed together afterwards, while they are in the cache.
                    self.write_tensors(span, &copier)?;
                    if let Some(crc) = crc {
                        // SAFETY: this thread has just written the span, and
                        // nobody writes it while it is summed.
                        let bytes = unsafe {
                            std::slice::from_raw_parts(self.target(&span.image), span.image.len())
                        };
                        crc.update(bytes);
                    }
                }
            }
        }
        sums.close();
        Ok(())
    }

    /// Writes the whole tensors of a span. A tensor that a function fills is written at its first
    /// span.
    fn write_tensors(&self, span: &Span, copier: &Copier) -> Result<(), Error> {
        for index in span.tensors.clone() {
            let tensor = &self.layout.tensors()[index];
            let range = tensor.range;
            let start = range.offset as usize;
            // An earlier span of this run has had the tensor filled whole.
            if start < span.image.start {
                continue;
            }
            let len = range.len as usize;
            let to = self.target(&(start..start + len));
            match &self.sources[index] {
                Source::Bytes(source) => {
                    check_length(source, tensor);
                    // SAFETY: as in `write`.
                    unsafe { copier.copy(to, source.as_ptr(), len) }
                }
                Source::Fill(fill) => {
                    // SAFETY: `place` checked the range, and this thread alone
                    // was given the tensor's spans (`cut`).
                    let place = unsafe { std::slice::from_raw_parts_mut(to, len) };
                    let tensor = || tensor.name.clone();
                    fill(place).map_err(|source| Error::Fill {
                        tensor: tensor(),
                        source,
                    })?;
                }
            }
        }
        Ok(())
    }

    fn target(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.bytes);
        // SAFETY: the range lies in the image (asserted), and the image in the
        // slot's mapping.
        unsafe { self.start.add(range.start) }
    }
}

/// Checked here, where the source is read anyway: with many small tensors, a separate pass costs as
/// much as the copy.
fn check_length(source: &[u8], tensor: &TensorSpec) {
    assert_eq!(
        source.len() as u64,
        tensor.range.len,
        "length of {}",
        tensor.name
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_uses_more_threads_only_for_large_sizes() {
        let fill: &Fill<'_> = &|_| Ok(());
        let (plain, filled) = ([Source::Bytes(&[])], [Source::Fill(fill)]);
        for bytes in [0, SHARE, 2 * SHARE - 1] {
            assert_eq!(that_pay(bytes, &plain), 1);
        }
        assert_eq!(that_pay(2 * SHARE, &plain), cores().min(2));
        assert_eq!(that_pay(1 << 40, &plain), cores().min(MAX_THREADS));
        assert_eq!(that_pay(1 << 40, &filled), 1);
    }
}
