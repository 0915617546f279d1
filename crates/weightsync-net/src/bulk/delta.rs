//! The changes from one version to a later one: made here or received from above, and passed
//! on.

mod ring;
mod versions;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use weightsync_core::delta::{self, BitPattern, Codec, Encoded, Scratch};
use weightsync_core::{Layout, Version};
use weightsync_engine::Changes;
use weightsync_mem::Snapshot;
use weightsync_mem::threads::{self, LockExt as _};

pub(crate) use self::ring::DeltaRing;
use self::versions::VersionPair;
use crate::wire::image::SPAN;

/// The speed of the slowest link that something is sent over, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
    Known(u64),
    /// Not measured yet: [`UNKNOWN`] is assumed.
    Unknown,
    /// A delta is made in any case; the speed only decides by which codec.
    Any(Option<u64>),
}

/// The speed that is assumed for a link before anything was received over it, in bytes a second.
const UNKNOWN: u64 = 1 << 30;

/// Before deciding whether a delta pays, sample parts of this size are coded. The fast codec codes
/// in parts of this size anyway, so a sample costs no more than real work.
const GLANCE: u64 = 128 << 10;

/// At most so many samples are coded: one for each `GLANCES_OF` times their bytes, but at least
/// two.
const GLANCES: u64 = 16;
const GLANCES_OF: u64 = 256;

/// Before deciding on a codec, each codec codes this many parts of this many bytes.
const TRIALS: u64 = 8;
const TRIAL: u64 = 1 << 20;

/// If two deltas together take at most one part in this many of a span's bytes, they are applied to
/// the bytes already in the free slot. Copying the span from its base would take longer.
pub(crate) const IN_PLACE: u64 = 64;

/// Retained deltas take at most one part in this many of a model's bytes.
pub(crate) const RING: u64 = 2;

/// Threads that make a delta. Two are faster than one even close to the speed of memory.
const THREADS: u32 = 2;

/// What changed from one version of a model to a later one, span by span.
pub(crate) struct Delta {
    base: Version,
    version: Version,
    spans: Box<[OnceLock<SpanCoding>]>,
    /// The consecutive deltas that this one is folded from, oldest first; empty if it is not
    /// folded.
    parts: Vec<Arc<Delta>>,
    /// Bytes of the image.
    whole: u64,
    /// Bytes to send, and bytes of memory in use.
    bytes: AtomicU64,
    held: AtomicU64,
    /// How many elements were compared, and how many of them changed.
    elements: AtomicU64,
    changes: AtomicU64,
    /// Some spans are not known and never will be.
    given_up: AtomicBool,
    /// Held while a span is folded, so that two threads do not fold the same span.
    folding: Mutex<()>,
    spoiled: AtomicBool,
    /// No more spans are made.
    stopped: AtomicBool,
    /// The thread that makes the delta has released both versions.
    released: AtomicBool,
}

/// What is known of a span.
pub(crate) enum SpanCoding {
    Coded(Coded),
    /// The span is sent as blocks.
    Dense,
}

/// The delta of one span; no bytes if nothing changed.
#[derive(Clone)]
pub(crate) struct Coded {
    sent: Arc<[u8]>,
    crc: u64,
    /// For a thin delta, the same changes in a codec that can be folded, which takes more bytes;
    /// `None` if that is not kept. Unset until the span has been made.
    foldable: OnceLock<Option<Arc<[u8]>>>,
}

/// The form of a span's delta that can be folded.
enum Foldable<'a> {
    Ready(&'a [u8]),
    NotYet,
    /// The delta is thin, and no other form is kept.
    Nothing,
}

impl Coded {
    /// A delta that is sent as it is.
    pub(crate) fn new(bytes: Vec<u8>, crc: u64) -> Self {
        Self {
            sent: bytes.into(),
            crc,
            foldable: OnceLock::new(),
        }
    }

    /// Chooses the smaller form to send, and keeps the foldable one too if both together are
    /// smaller than `most`.
    fn made(foldable: Vec<u8>, thin: Option<Vec<u8>>, most: u64) -> Self {
        // A thin delta that is not smaller would only take longer to read.
        let (sent, foldable) = match thin.filter(|thin| thin.len() < foldable.len()) {
            Some(thin) => (thin, Some(foldable)),
            None => (foldable, None),
        };
        let crc = weightsync_simd::crc64(&sent);
        let made = Self::new(sent, crc);
        made.keep_foldable(foldable, most);
        made
    }

    /// Keeps the foldable form if both forms together are smaller than `most`. Returns the bytes
    /// that this takes.
    fn keep_foldable(&self, foldable: Option<Vec<u8>>, most: u64) -> u64 {
        let few = |bytes: &Vec<u8>| ((self.sent.len() + bytes.len()) as u64) < most;
        let kept = foldable.filter(few);
        let bytes = kept.as_ref().map_or(0, Vec::len) as u64;
        // Only the first call keeps anything, and only that counts.
        match self.foldable.set(kept.map(Into::into)) {
            Ok(()) => bytes,
            Err(_) => 0,
        }
    }

    pub(crate) fn is_thin(&self) -> bool {
        Codec::of(&self.sent).is_some_and(|codec| codec != codec.foldable())
    }

    /// The bytes to send.
    pub(crate) fn sent(&self) -> &[u8] {
        &self.sent
    }

    /// The checksum of the bytes to send.
    pub(crate) fn crc(&self) -> u64 {
        self.crc
    }

    fn foldable(&self) -> Foldable<'_> {
        match self.foldable.get() {
            _ if !self.is_thin() => Foldable::Ready(&self.sent),
            None => Foldable::NotYet,
            Some(None) => Foldable::Nothing,
            Some(Some(bytes)) => Foldable::Ready(bytes),
        }
    }

    /// This delta if it is smaller than `most`; otherwise the span is sent as blocks.
    fn if_fewer(self, most: u64) -> SpanCoding {
        match (self.sent.len() as u64) < most {
            true => SpanCoding::Coded(self),
            false => SpanCoding::Dense,
        }
    }

    /// Bytes of memory in use.
    fn held(&self) -> u64 {
        let other = self.foldable.get().and_then(Option::as_ref);
        (self.sent.len() + other.map_or(0, |bytes| bytes.len())) as u64
    }
}

impl Delta {
    /// A delta with no span known yet.
    pub(crate) fn new(base: Version, version: Version, layout: &Layout) -> Self {
        Self::of_bytes(base, version, layout.bytes())
    }

    fn of_bytes(base: Version, version: Version, whole: u64) -> Self {
        let spans = whole.div_ceil(SPAN) as usize;
        let spans: Box<[OnceLock<SpanCoding>]> = (0..spans).map(|_| OnceLock::new()).collect();
        Self {
            base,
            version,
            whole,
            // The table of spans takes memory before any span is known.
            held: AtomicU64::new(size_of_val(&*spans) as u64),
            spans,
            parts: Vec::new(),
            bytes: AtomicU64::new(0),
            elements: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
            folding: Mutex::default(),
            spoiled: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            released: AtomicBool::new(false),
        }
    }

    /// A delta that folds several consecutive ones, each span when it is first asked for.
    fn folded(parts: Vec<Arc<Self>>) -> Option<Self> {
        let (first, last) = (parts.first()?, parts.last()?);
        let folded = Self::of_bytes(first.base, last.version, first.whole);
        Some(Self { parts, ..folded })
    }

    pub(crate) fn base(&self) -> Version {
        self.base
    }

    /// Notes what is known of a span; an earlier note stays.
    pub(crate) fn note(&self, index: usize, span: SpanCoding) {
        let known = self.spans.get(index);
        let Some(known) = known.filter(|known| known.get().is_none()) else {
            return;
        };
        let (bytes, held) = match &span {
            SpanCoding::Coded(coded) => (coded.sent().len() as u64, coded.held()),
            SpanCoding::Dense => (self.span_bytes(index), 0),
        };
        // Counted before another thread can see the span.
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.held.fetch_add(held, Ordering::Relaxed);
        if known.set(span).is_err() {
            // Another thread noted the span first.
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.held.fetch_sub(held, Ordering::Relaxed);
        }
    }

    /// Keeps the foldable form of a span that was noted as thin.
    pub(crate) fn note_foldable(&self, index: usize, bytes: Vec<u8>, layout: &Layout) {
        if let Some(SpanCoding::Coded(coded)) = self.noted(index) {
            let more = coded.keep_foldable(Some(bytes), most(index, layout));
            self.held.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// What is known of a span, folded now if necessary; `None` while it is not known.
    pub(crate) fn span(
        &self,
        index: usize,
        layout: &Layout,
        scratch: &mut Scratch,
    ) -> Option<&SpanCoding> {
        let span = self.spans.get(index)?;
        if self.is_spoiled() {
            return Some(&SpanCoding::Dense);
        }
        if let Some(known) = span.get() {
            return Some(known);
        }
        if self.parts.is_empty() {
            return None;
        }
        let _alone = self.folding.locked();
        // Another thread may have folded the span while this one waited for the lock.
        if let Some(known) = span.get() {
            return Some(known);
        }
        let mut folded: Option<Vec<u8>> = None;
        for part in &self.parts {
            // A part whose span is not made yet ends this: the caller asks again later.
            let next = match part.span(index, layout, scratch)? {
                SpanCoding::Coded(coded) => coded.foldable(),
                SpanCoding::Dense => Foldable::Nothing,
            };
            let next = match next {
                Foldable::Ready(next) => next,
                Foldable::NotYet => return None,
                // With one step of the chain missing, the span can only go whole.
                Foldable::Nothing => {
                    self.note(index, SpanCoding::Dense);
                    return span.get();
                }
            };
            let Some(before) = &folded else {
                folded = Some(next.to_vec());
                continue;
            };
            let mut both = Vec::new();
            let start = index as u64 * SPAN;
            let pattern = BitPattern::of_span(layout, start);
            let bytes = SPAN.min(layout.bytes() - start) as usize;
            if let Err(error) = delta::fold(pattern, bytes, before, next, &mut both, scratch) {
                tracing::debug!("two deltas cannot be folded, so a span is sent whole: {error}");
                self.note(index, SpanCoding::Dense);
                return span.get();
            }
            folded = Some(both);
        }
        let most = most(index, layout);
        let coded = Coded::made(folded?, None, most);
        self.note(index, coded.if_fewer(most));
        span.get()
    }

    /// What is known of a span, without folding.
    pub(crate) fn known(&self, index: usize) -> Option<&SpanCoding> {
        let known = self.noted(index)?;
        Some(match self.is_spoiled() {
            true => &SpanCoding::Dense,
            false => known,
        })
    }

    /// Marks the delta as wrong: nothing of it is used or passed on any more.
    pub(crate) fn spoil(&self) {
        self.spoiled.store(true, Ordering::Release);
        // Its size means nothing now, so neither `pays` nor `changes` may use it.
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Acquire)
    }

    /// Whether a span is known or can be folded.
    pub(crate) fn is_known(&self, index: usize) -> bool {
        let can_be_folded = |part: &Arc<Self>| match part.noted(index) {
            None => false,
            Some(SpanCoding::Dense) => true,
            Some(SpanCoding::Coded(coded)) => !matches!(coded.foldable(), Foldable::NotYet),
        };
        let is_noted = self.noted(index).is_some();
        is_noted || self.is_folded() && self.parts.iter().all(can_be_folded)
    }

    fn noted(&self, index: usize) -> Option<&SpanCoding> {
        self.spans.get(index)?.get()
    }

    /// Ends the delta: spans that are unknown now are sent as blocks.
    pub(crate) fn end(&self) {
        for index in 0..self.spans.len() {
            if self.spans[index].get().is_none() {
                // The span was never compared, so nobody may count it as changed.
                self.given_up.store(true, Ordering::Relaxed);
                self.note(index, SpanCoding::Dense);
            }
        }
    }

    /// What changed, once every span is known.
    pub(crate) fn changes(&self) -> Option<Changes> {
        let known = self.spans.iter().all(|span| span.get().is_some());
        if !known || self.is_given_up() {
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

    /// Whether some spans will never be known.
    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Whether this delta is folded from several.
    pub(crate) fn is_folded(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Bytes of a span of the image.
    fn span_bytes(&self, index: usize) -> u64 {
        SPAN.min(self.whole - index as u64 * SPAN)
    }

    /// Bytes to send for all known spans. A dense span counts in full.
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory in use for all known spans.
    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Releases the two versions that the delta is made from.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Stops making spans.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Makes the delta from its two versions, unless sending the whole newer version is faster.
    /// Calls `changed` after each span, so that children get it at once.
    pub(crate) fn make(
        &self,
        (old, new): (&Snapshot, &Snapshot),
        rate: Rate,
        changed: impl Fn() + Sync,
        is_stopped: impl Fn() -> bool + Sync,
    ) {
        let count = self.spans.len();
        // Also after a panic: a child that waits for a span must get it as blocks.
        let _ended = EndOnDrop(self, &changed);
        let versions = VersionPair { old, new };
        let mut scratch = Scratch::new();
        let is_stopped = || self.is_stopped() || is_stopped();
        let (rate, any) = match rate {
            Rate::Known(rate) => (rate, false),
            Rate::Unknown => (UNKNOWN, false),
            Rate::Any(rate) => (rate.unwrap_or(UNKNOWN), true),
        };
        // A first run that is not measured: it allocates the working memory.
        versions.sample((1, GLANCE), Codec::Fast, &mut scratch);
        let glances = (self.whole / (GLANCE * GLANCES_OF)).clamp(2, GLANCES);
        let glance = versions.sample((glances, GLANCE), Codec::Fast, &mut scratch);
        // `_ended` marks every span as dense then, so that no child waits for a delta.
        if is_stopped() || !any && !glance.pays(rate) {
            return;
        }
        // Where the link is what everything waits for, a slower codec with fewer bytes may pay.
        let codec = match glance.waits_for_link(rate) {
            true => versions.cheapest(rate, &is_stopped, &mut scratch),
            false => Codec::Fast,
        };
        // In order, because children request the spans in order.
        let next = AtomicUsize::new(0);
        let work = |scratch: &mut Scratch| {
            loop {
                // Both threads take the next span from one counter.
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count || is_stopped() {
                    return;
                }
                self.make_span(index, &versions, codec, scratch);
                changed();
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..THREADS {
                // If the thread cannot start, this one does all the work.
                let _ = threads::spawn_scoped(scope, "delta", || work(&mut Scratch::new()));
            }
            work(&mut scratch);
        });
    }

    fn make_span(
        &self,
        index: usize,
        versions: &VersionPair<'_>,
        codec: Codec,
        scratch: &mut Scratch,
    ) {
        if self.spans[index].get().is_some() {
            return;
        }
        let foldable = codec.foldable();
        let (made, bytes) = versions.encode(index, foldable, scratch);
        let thin = (codec != foldable).then(|| versions.encode(index, codec, scratch).1);
        self.keep(index, versions, made, bytes, thin);
    }

    /// Notes the delta of a span, if it is worth sending.
    fn keep(
        &self,
        index: usize,
        versions: &VersionPair<'_>,
        made: Encoded,
        foldable: Vec<u8>,
        thin: Option<Vec<u8>>,
    ) {
        let most = most(index, versions.new.layout());
        self.elements.fetch_add(made.elements, Ordering::Relaxed);
        self.changes.fetch_add(made.changes, Ordering::Relaxed);
        let coded = Coded::made(foldable, thin, most);
        self.note(index, coded.if_fewer(most));
    }
}

/// Ends a delta when dropped, and notifies waiting children.
struct EndOnDrop<'a, T: Fn()>(&'a Delta, &'a T);

impl<T: Fn()> Drop for EndOnDrop<'_, T> {
    fn drop(&mut self) {
        self.0.end();
        (self.1)();
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

/// A span's delta is worth sending only below this size. So the newest delta, which is always kept,
/// stays within the ring's bound.
fn most(index: usize, layout: &Layout) -> u64 {
    SPAN.min(layout.bytes() - index as u64 * SPAN) / RING
}

fn seconds(bytes: u64, rate: u64) -> f64 {
    bytes as f64 / rate.max(1) as f64
}

#[cfg(test)]
mod tests;
