//! What changed from one version to a later one: made here, or come from above, and
//! passed on.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use weightsync::Changes;
use weightsync_core::delta::{self, Codec, Pattern, Scratch};
use weightsync_core::{Layout, Version};
use weightsync_mem::Snapshot;

use crate::relay::Item;
use crate::wire::frame::SPAN;

/// A link is taken to be this fast before anything has come by it, in bytes a second.
const UNKNOWN: u64 = 1 << 30;

/// Spans that are coded before it is decided whether a delta is worth its time: this
/// many, or all there are, evenly spread.
const SAMPLE: usize = 8;

/// The deltas that are kept take at most one part in so many of a model's bytes.
pub(crate) const RING: u64 = 4;

/// What changed from one version of a model to a later one, span by span, as far as it
/// is known.
pub(crate) struct Delta {
    base: Version,
    version: Version,
    spans: Box<[OnceLock<Span>]>,
    /// The deltas that this one does the work of, where it does; oldest first.
    parts: Vec<Arc<Delta>>,
    /// Bytes of the image.
    whole: u64,
    bytes: AtomicU64,
    /// Elements, and how many of them changed.
    elements: AtomicU64,
    changes: AtomicU64,
    /// Something of it is not known, and never will be: it is dense.
    gaps: AtomicBool,
}

/// What there is of a span.
pub(crate) enum Span {
    /// A delta of it, and its checksum. No bytes: nothing changed.
    Coded(Box<[u8]>, u64),
    /// It is sent whole.
    Dense,
}

impl Span {
    pub(crate) fn coded(bytes: Vec<u8>) -> Self {
        let crc = weightsync_simd::crc64(&bytes);
        Self::Coded(bytes.into_boxed_slice(), crc)
    }
}

impl Delta {
    /// One of which nothing is known yet.
    pub(crate) fn new(base: Version, version: Version, layout: &Layout) -> Self {
        let spans = layout.bytes().div_ceil(SPAN) as usize;
        Self {
            base,
            version,
            spans: (0..spans).map(|_| OnceLock::new()).collect(),
            parts: Vec::new(),
            whole: layout.bytes(),
            bytes: AtomicU64::new(0),
            elements: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            gaps: AtomicBool::new(false),
        }
    }

    /// One for several that follow each other, folded span by span when asked for.
    fn folded(parts: Vec<Arc<Self>>) -> Option<Self> {
        let (first, last) = (parts.first()?, parts.last()?);
        Some(Self {
            base: first.base,
            version: last.version,
            spans: first.spans.iter().map(|_| OnceLock::new()).collect(),
            whole: first.whole,
            parts,
            bytes: AtomicU64::new(0),
            elements: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            gaps: AtomicBool::new(false),
        })
    }

    pub(crate) fn base(&self) -> Version {
        self.base
    }

    /// Notes what is known of a span; what was known before stays.
    pub(crate) fn note(&self, index: usize, span: Span) {
        let Some(known) = self.spans.get(index) else {
            return;
        };
        match &span {
            Span::Coded(bytes, _) => {
                self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }
            Span::Dense => self.gaps.store(true, Ordering::Relaxed),
        }
        let _ = known.set(span);
    }

    /// What there is of a span; `None` while it is not known.
    pub(crate) fn span(
        &self,
        index: usize,
        layout: &Layout,
        scratch: &mut Scratch,
    ) -> Option<&Span> {
        let span = self.spans.get(index)?;
        if let Some(known) = span.get() {
            return Some(known);
        }
        let mut parts = self.parts.iter();
        let mut folded = match parts.next()?.span(index, layout, scratch)? {
            Span::Coded(bytes, _) => bytes.to_vec(),
            Span::Dense => {
                self.note(index, Span::Dense);
                return span.get();
            }
        };
        for part in parts {
            let Span::Coded(next, _) = part.span(index, layout, scratch)? else {
                self.note(index, Span::Dense);
                return span.get();
            };
            let mut both = Vec::new();
            let start = index as u64 * SPAN;
            let pattern = Pattern::of_span(layout, start);
            let bytes = SPAN.min(layout.bytes() - start) as usize;
            match delta::fold(pattern, bytes, &folded, next, &mut both, scratch) {
                Ok(_) => folded = both,
                Err(error) => {
                    tracing::error!(
                        "two deltas cannot be folded, so a span is sent whole: {error}"
                    );
                    self.note(index, Span::Dense);
                    return span.get();
                }
            }
        }
        let worth = is_worth(folded.len(), index, layout);
        self.note(
            index,
            if worth {
                Span::coded(folded)
            } else {
                Span::Dense
            },
        );
        span.get()
    }

    /// Whether a span of it is known, or can be found.
    pub(crate) fn is_known(&self, index: usize) -> bool {
        let known = |delta: &Self| {
            delta
                .spans
                .get(index)
                .is_some_and(|span| span.get().is_some())
        };
        known(self) || !self.parts.is_empty() && self.parts.iter().all(|part| known(part))
    }

    /// Nothing more will be known of it: what is not known is sent whole.
    pub(crate) fn end(&self) {
        for index in 0..self.spans.len() {
            if self.spans[index].get().is_none() {
                self.note(index, Span::Dense);
            }
        }
    }

    /// What has changed, once all of it is known and none of it is sent whole.
    pub(crate) fn changes(&self) -> Option<Changes> {
        let known = self.spans.iter().all(|span| span.get().is_some());
        if !known || self.gaps.load(Ordering::Relaxed) {
            return None;
        }
        let number = |of: &AtomicU64| of.load(Ordering::Relaxed);
        Some(Changes::new(
            number(&self.elements),
            number(&self.changes),
            self.bytes(),
            self.whole,
        ))
    }

    /// Bytes it takes, as far as it is known.
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Makes it from the two versions; `rate` is how fast the slowest link is by which
    /// it goes, in bytes a second, if that is known. Each span is told of at once.
    pub(crate) fn make(
        &self,
        (old, new): (&Snapshot, &Snapshot),
        rate: Option<u64>,
        told: impl Fn(),
        is_stopped: impl Fn() -> bool,
    ) {
        let layout = new.layout();
        let mut scratch = Scratch::new();
        let encode = |index: usize, scratch: &mut Scratch| {
            if self.spans[index].get().is_some() {
                return;
            }
            let start = index * SPAN as usize;
            let end = new.bytes().len().min(start + SPAN as usize);
            let pattern = Pattern::of_span(layout, start as u64);
            let (old, new) = (&old.bytes()[start..end], &new.bytes()[start..end]);
            let mut bytes = Vec::new();
            match delta::encode(pattern, Codec::Fast, old, new, &mut bytes, scratch) {
                Ok(made) if is_worth(bytes.len(), index, layout) => {
                    self.elements.fetch_add(made.elements, Ordering::Relaxed);
                    self.changes.fetch_add(made.changes, Ordering::Relaxed);
                    self.note(index, Span::coded(bytes));
                }
                Ok(_) => self.note(index, Span::Dense),
                Err(error) => {
                    tracing::error!("a delta cannot be made, so a span is sent whole: {error}");
                    self.note(index, Span::Dense);
                }
            }
        };
        let count = self.spans.len();
        let some = count.min(SAMPLE);
        let begun = Instant::now();
        for sample in 0..some {
            encode(sample * count / some, &mut scratch);
        }
        let share = some as f64 / count.max(1) as f64;
        let whole = (layout.bytes() as f64 * share) as u64;
        if pays(begun.elapsed(), self.bytes(), whole, rate) {
            told();
            for index in 0..count {
                if is_stopped() {
                    break;
                }
                encode(index, &mut scratch);
                told();
            }
        }
        self.end();
        told();
    }
}

impl fmt::Debug for Delta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delta")
            .field("base", &self.base)
            .field("version", &self.version)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// Whether so many bytes are better sent than the span itself.
fn is_worth(bytes: usize, index: usize, layout: &Layout) -> bool {
    let whole = SPAN.min(layout.bytes() - index as u64 * SPAN);
    (bytes as u64) < whole / 8 * 7
}

/// Whether it takes less time to code, send and apply a delta than to send the bytes
/// themselves. What `took` so long to code takes as long to apply, and over one host
/// nothing is done side by side.
fn pays(took: Duration, coded: u64, whole: u64, rate: Option<u64>) -> bool {
    let rate = rate.unwrap_or(UNKNOWN).max(1) as f64;
    let seconds = |bytes: u64| bytes as f64 / rate;
    2.0 * took.as_secs_f64() + seconds(coded) < seconds(whole)
}

/// The deltas of one process, within a bound.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    deltas: Mutex<VecDeque<(usize, Arc<Delta>)>>,
    /// A version is being published.
    announced: AtomicBool,
}

impl Ring {
    /// Whether something is about to be put here: whoever looks for it waits.
    pub(crate) fn announce(&self, announced: bool) {
        self.announced.store(announced, Ordering::Release);
    }

    pub(crate) fn is_announced(&self) -> bool {
        self.announced.load(Ordering::Acquire)
    }

    /// Lets go of what there is of a model: what comes next does not follow it.
    pub(crate) fn forget(&self, model: usize) {
        self.deltas().retain(|(of, _)| *of != model);
    }

    /// Keeps a delta of a model; the oldest go once all together take more bytes than
    /// `bound`, but never the newest of a model.
    pub(crate) fn put(&self, model: usize, delta: Arc<Delta>, bound: u64) {
        let mut deltas = self.deltas();
        deltas.push_back((model, delta));
        let mut bytes: u64 = deltas.iter().map(|(_, delta)| delta.bytes()).sum();
        while bytes > bound {
            let is_newest = |at: usize| !deltas.range(at + 1..).any(|(of, _)| *of == deltas[at].0);
            let Some(oldest) = (0..deltas.len()).find(|at| !is_newest(*at)) else {
                return;
            };
            let gone = deltas.remove(oldest);
            bytes -= gone.map_or(0, |(_, delta)| delta.bytes());
        }
    }

    /// The one delta that leads from `base` to a version.
    pub(crate) fn step(&self, item: Item, base: Version) -> Option<Arc<Delta>> {
        let deltas = self.deltas();
        let mut of = deltas.iter().filter(|(model, _)| *model == item.model);
        let found = of.find(|(_, delta)| delta.version == item.version && delta.base == base);
        found.map(|(_, delta)| delta.clone())
    }

    /// What leads from `base` to a version: one delta, or several that follow each
    /// other, which are kept as one from here on.
    pub(crate) fn find(&self, item: Item, base: Version) -> Option<Arc<Delta>> {
        let mut deltas = self.deltas();
        let of = deltas.iter().filter(|(model, _)| *model == item.model);
        let of: Vec<Arc<Delta>> = of.map(|(_, delta)| delta.clone()).collect();
        let is_direct = |delta: &&Arc<Delta>| delta.version == item.version && delta.base == base;
        if let Some(direct) = of.iter().find(is_direct) {
            return Some(direct.clone());
        }
        let mut parts = Vec::new();
        let mut at = item.version;
        while at > base {
            let steps = of.iter().filter(|delta| delta.parts.is_empty());
            let before = steps.filter(|delta| delta.version == at && delta.base >= base);
            let step = before.min_by_key(|delta| delta.base)?;
            if step.gaps.load(Ordering::Relaxed) {
                return None;
            }
            parts.push(step.clone());
            at = step.base;
        }
        parts.reverse();
        let folded = Arc::new(Delta::folded(parts)?);
        deltas.push_back((item.model, folded.clone()));
        Some(folded)
    }

    /// Whether the newest delta of a model is worth something.
    pub(crate) fn pays(&self, model: usize) -> bool {
        let deltas = self.deltas();
        let newest = deltas
            .iter()
            .rev()
            .find(|(of, delta)| *of == model && delta.parts.is_empty());
        newest.is_some_and(|(_, delta)| !delta.gaps.load(Ordering::Relaxed))
    }

    /// What has changed in a version since the one before it; `None` if that is not known,
    /// or some of it is sent whole.
    pub(crate) fn changes(&self, item: Item) -> Option<Changes> {
        let deltas = self.deltas();
        let mut of = deltas.iter().filter(|(model, delta)| {
            *model == item.model && delta.version == item.version && delta.parts.is_empty()
        });
        let (_, delta) = of.next_back()?;
        delta.changes()
    }

    fn deltas(&self) -> MutexGuard<'_, VecDeque<(usize, Arc<Delta>)>> {
        self.deltas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
