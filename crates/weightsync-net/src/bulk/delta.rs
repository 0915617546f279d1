//! What changed from one version to a later one: made here, or come from above, and
//! passed on.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use weightsync::Changes;
use weightsync_core::delta::{self, Codec, Encoded, Pattern, Scratch};
use weightsync_core::{Layout, Version};
use weightsync_mem::Snapshot;

use crate::relay::Item;
use crate::wire::frame::SPAN;

/// How fast the slowest link is by which something goes out, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
    Known(u64),
    /// Nothing has come by any: it is taken to be as fast as [`UNKNOWN`].
    Unknown,
    /// It does not matter for whether there is a delta, only for how it is made.
    Any(Option<u64>),
}

/// What a link is taken to be before anything has come by it, in bytes a second.
const UNKNOWN: u64 = 1 << 30;

/// Spans that are coded before it is decided whether a delta is worth its time: this
/// many, or all there are, evenly spread.
const SAMPLE: usize = 8;

/// The deltas that are kept take at most one part in so many of a model's bytes.
pub(crate) const RING: u64 = 2;

/// Threads that make a delta of few bytes.
const THREADS: u32 = 2;

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
    spoiled: AtomicBool,
}

/// What there is of a span.
pub(crate) enum Span {
    Coded(Coded),
    /// It is sent whole.
    Dense,
}

/// A delta of a span. No bytes: nothing changed.
#[derive(Clone)]
pub(crate) struct Coded {
    /// As it can be folded, if it was made here.
    bytes: Arc<[u8]>,
    /// The same in fewer bytes, to be sent.
    thin: Option<Arc<[u8]>>,
    crc: u64,
}

impl Coded {
    /// As it is sent.
    pub(crate) fn new(bytes: Vec<u8>, thin: Option<Vec<u8>>) -> Self {
        let thin = thin.filter(|thin| thin.len() < bytes.len());
        let crc = weightsync_simd::crc64(thin.as_deref().unwrap_or(&bytes));
        Self {
            bytes: bytes.into(),
            thin: thin.map(Into::into),
            crc,
        }
    }

    /// As it came.
    pub(crate) fn came(bytes: Vec<u8>, crc: u64) -> Self {
        Self {
            bytes: bytes.into(),
            thin: None,
            crc,
        }
    }

    /// What is sent of it.
    pub(crate) fn sent(&self) -> &[u8] {
        self.thin.as_deref().unwrap_or(&self.bytes)
    }

    /// The checksum of that.
    pub(crate) fn crc(&self) -> u64 {
        self.crc
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
            spoiled: AtomicBool::new(false),
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
            spoiled: AtomicBool::new(false),
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
            Span::Coded(coded) => {
                self.bytes
                    .fetch_add(coded.sent().len() as u64, Ordering::Relaxed);
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
        if self.is_spoiled() {
            return Some(&Span::Dense);
        }
        if let Some(known) = span.get() {
            return Some(known);
        }
        let mut parts = self.parts.iter();
        let mut folded = match parts.next()?.span(index, layout, scratch)? {
            Span::Coded(coded) => coded.bytes.to_vec(),
            Span::Dense => {
                self.note(index, Span::Dense);
                return span.get();
            }
        };
        for part in parts {
            let Span::Coded(next) = part.span(index, layout, scratch)? else {
                self.note(index, Span::Dense);
                return span.get();
            };
            let mut both = Vec::new();
            let start = index as u64 * SPAN;
            let pattern = Pattern::of_span(layout, start);
            let bytes = SPAN.min(layout.bytes() - start) as usize;
            match delta::fold(pattern, bytes, &folded, &next.bytes, &mut both, scratch) {
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
                Span::Coded(Coded::new(folded, None))
            } else {
                Span::Dense
            },
        );
        span.get()
    }

    /// What is known of a span by itself.
    pub(crate) fn known(&self, index: usize) -> Option<&Span> {
        let known = self.spans.get(index)?.get()?;
        Some(match self.is_spoiled() {
            true => &Span::Dense,
            false => known,
        })
    }

    /// Some of it is not what it should be: nothing of it is used or passed on any more.
    pub(crate) fn spoil(&self) {
        self.spoiled.store(true, Ordering::Release);
        self.gaps.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Acquire)
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

    /// Makes it from the two versions, as far as that is quicker than to send all of the
    /// newer. Each span is told of at once.
    pub(crate) fn make(
        &self,
        (old, new): (&Snapshot, &Snapshot),
        rate: Rate,
        told: impl Fn() + Sync,
        is_stopped: impl Fn() -> bool + Sync,
    ) {
        let count = self.spans.len();
        let some = count.min(SAMPLE);
        let sample = || (0..some).map(|one| one * count / some);
        let versions = Versions { old, new };
        let mut scratch = Scratch::new();
        let begun = Instant::now();
        let samples: Vec<_> = sample()
            .map(|index| (index, versions.encode(index, Codec::Fast, &mut scratch)))
            .collect();
        let took = begun.elapsed();
        let coded = samples
            .iter()
            .map(|(_, (_, bytes))| bytes.len() as u64)
            .sum();
        let whole = sample()
            .map(|index| versions.span(index).len() as u64)
            .sum();
        let (rate, any) = match rate {
            Rate::Known(rate) => (rate, false),
            Rate::Unknown => (UNKNOWN, false),
            Rate::Any(rate) => (rate.unwrap_or(UNKNOWN), true),
        };
        if !any && !pays(took, coded, whole, rate) {
            self.end();
            return told();
        }
        let mut best = (Codec::Fast, side_by_side(took, coded, rate));
        let mut chosen = None;
        // The next one takes longer, and fewer bytes.
        for (codec, threads) in [(Codec::Gaps, 1), (Codec::Thin, THREADS)] {
            if !waits_for_link(took, coded, rate) {
                break;
            }
            let begun = Instant::now();
            let made: Vec<_> = sample()
                .map(|index| versions.encode(index, codec, &mut scratch).1)
                .collect();
            let bytes = made.iter().map(|bytes| bytes.len() as u64).sum();
            let cost = side_by_side(begun.elapsed() / threads, bytes, rate);
            if cost < best.1 {
                best = (codec, cost);
                chosen = Some(made);
            }
        }
        let (codec, _) = best;
        let mut chosen = chosen.map(Vec::into_iter);
        for (index, (made, fast)) in samples {
            let other = chosen.as_mut().and_then(Iterator::next);
            let coded = match (codec, other) {
                (Codec::Gaps, Some(gaps)) => Coded::new(gaps, None),
                (_, thin) => Coded::new(fast, thin),
            };
            self.keep(index, &versions, made, coded);
        }
        told();
        let next = AtomicUsize::new(0);
        let work = |scratch: &mut Scratch| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count || is_stopped() {
                    return;
                }
                self.make_span(index, &versions, codec, scratch);
                told();
            }
        };
        std::thread::scope(|scope| {
            // Near the speed of memory one is as fast as several.
            let threads = if codec == Codec::Thin { THREADS } else { 1 };
            for _ in 1..threads {
                // Without it, it takes longer.
                let _ = std::thread::Builder::new()
                    .name("weightsync-delta".into())
                    .spawn_scoped(scope, || work(&mut Scratch::new()));
            }
            work(&mut scratch);
        });
        self.end();
        told();
    }

    fn make_span(
        &self,
        index: usize,
        versions: &Versions<'_>,
        codec: Codec,
        scratch: &mut Scratch,
    ) {
        if self.spans[index].get().is_some() {
            return;
        }
        // Thin ones cannot be folded.
        let (foldable, thin) = match codec {
            Codec::Thin => (Codec::Fast, true),
            other => (other, false),
        };
        let (made, bytes) = versions.encode(index, foldable, scratch);
        let thin = thin.then(|| versions.encode(index, Codec::Thin, scratch).1);
        self.keep(index, versions, made, Coded::new(bytes, thin));
    }

    /// Notes what was made of a span, if it is worth being sent.
    fn keep(&self, index: usize, versions: &Versions<'_>, made: Encoded, coded: Coded) {
        if !is_worth(coded.sent().len(), index, versions.new.layout()) {
            return self.note(index, Span::Dense);
        }
        self.elements.fetch_add(made.elements, Ordering::Relaxed);
        self.changes.fetch_add(made.changes, Ordering::Relaxed);
        self.note(index, Span::Coded(coded));
    }
}

/// The two versions that a delta is made from.
struct Versions<'a> {
    old: &'a Snapshot,
    new: &'a Snapshot,
}

impl Versions<'_> {
    /// Where a span lies.
    fn span(&self, index: usize) -> Range<usize> {
        let start = index * SPAN as usize;
        start..self.new.bytes().len().min(start + SPAN as usize)
    }

    fn encode(&self, index: usize, codec: Codec, scratch: &mut Scratch) -> (Encoded, Vec<u8>) {
        let span = self.span(index);
        let pattern = Pattern::of_span(self.new.layout(), span.start as u64);
        let (old, new) = (&self.old.bytes()[span.clone()], &self.new.bytes()[span]);
        let mut bytes = Vec::new();
        let made = delta::encode(pattern, codec, old, new, &mut bytes, scratch);
        let made = made.unwrap_or_else(|error| {
            unreachable!("both are versions of one layout: {error}");
        });
        (made, bytes)
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
    // So the newest delta, which is kept in any case, is within the bound too.
    (bytes as u64) < whole / RING
}

/// Whether it takes less time to code, send and apply a delta than to send the bytes
/// themselves. What `took` so long to code takes as long to apply, and over one host
/// nothing is done side by side.
fn pays(took: Duration, coded: u64, whole: u64, rate: u64) -> bool {
    2.0 * took.as_secs_f64() + seconds(coded, rate) < seconds(whole, rate)
}

/// Whether a delta takes so much longer on its way than to be made that one of fewer
/// bytes may be worth its time.
fn waits_for_link(took: Duration, coded: u64, rate: u64) -> bool {
    seconds(coded, rate) > 2.0 * took.as_secs_f64()
}

/// How long it takes where one part is made while another is on its way.
fn side_by_side(took: Duration, coded: u64, rate: u64) -> f64 {
    took.as_secs_f64().max(seconds(coded, rate))
}

fn seconds(bytes: u64, rate: u64) -> f64 {
    bytes as f64 / rate.max(1) as f64
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
