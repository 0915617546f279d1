//! The changes from one version to a later one: made here or received from above, and passed
//! on.

mod ring;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use weightsync_core::delta::{self, Codec, Encoded, Pattern, Scratch};
use weightsync_core::{Layout, Version};
use weightsync_engine::Changes;
use weightsync_mem::Snapshot;

pub(crate) use self::ring::Ring;
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

/// Before it is decided whether a delta is worth its time, parts of so many bytes are coded:
/// the fast codec takes them for themselves anyway.
const GLANCE: u64 = 128 << 10;

/// The most of them; and one for so many times their bytes, but at least two.
const GLANCES: u64 = 16;
const GLANCES_OF: u64 = 256;

/// Before it is decided by which codec, so many parts of so many bytes are coded by each.
const TRIALS: u64 = 8;
const TRIAL: u64 = 1 << 20;

/// Where two deltas of a span take at most one part in so many of its bytes, they are put into what
/// the free slot holds: to copy the span takes longer.
pub(crate) const IN_PLACE: u64 = 64;

/// The deltas that are kept take at most one part in so many of a model's bytes.
pub(crate) const RING: u64 = 2;

/// Threads that make a delta: also near the speed of memory two are faster than one.
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
    /// Bytes of it that are sent, and bytes of memory it takes.
    bytes: AtomicU64,
    held: AtomicU64,
    /// Elements, and how many of them changed.
    elements: AtomicU64,
    changes: AtomicU64,
    /// Some of it is not known, and never will be.
    given_up: AtomicBool,
    /// Only one thread folds it.
    folding: Mutex<()>,
    spoiled: AtomicBool,
    /// No more of it is made.
    stopped: AtomicBool,
    /// The thread that makes it has released the two versions.
    released: AtomicBool,
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
    sent: Arc<[u8]>,
    crc: u64,
    /// Of a thin one the same in more bytes, as it can be folded; `None` where that is not
    /// kept. Not known before the span has been made.
    foldable: OnceLock<Option<Arc<[u8]>>>,
}

/// What is folded of a delta of a span.
enum Foldable<'a> {
    Ready(&'a [u8]),
    NotYet,
    /// It is thin, and nothing else is kept of it.
    Nothing,
}

impl Coded {
    /// One that is sent as it can be folded, or as it came.
    pub(crate) fn new(bytes: Vec<u8>, crc: u64) -> Self {
        Self {
            sent: bytes.into(),
            crc,
            foldable: OnceLock::new(),
        }
    }

    /// One that is sent in the fewer bytes of the two, and can be folded if both together
    /// are fewer than `most`.
    fn made(foldable: Vec<u8>, thin: Option<Vec<u8>>, most: u64) -> Self {
        let (sent, foldable) = match thin.filter(|thin| thin.len() < foldable.len()) {
            Some(thin) => (thin, Some(foldable)),
            None => (foldable, None),
        };
        let crc = weightsync_simd::crc64(&sent);
        let made = Self::new(sent, crc);
        made.keep_foldable(foldable, most);
        made
    }

    /// Keeps how it can be folded, if both together are fewer bytes than `most`; how many
    /// bytes that takes.
    fn keep_foldable(&self, foldable: Option<Vec<u8>>, most: u64) -> u64 {
        let few = |bytes: &Vec<u8>| ((self.sent.len() + bytes.len()) as u64) < most;
        let kept = foldable.filter(few);
        let bytes = kept.as_ref().map_or(0, Vec::len) as u64;
        match self.foldable.set(kept.map(Into::into)) {
            Ok(()) => bytes,
            Err(_) => 0,
        }
    }

    pub(crate) fn is_thin(&self) -> bool {
        Codec::of(&self.sent) == Some(Codec::Thin)
    }

    /// What is sent of it.
    pub(crate) fn sent(&self) -> &[u8] {
        &self.sent
    }

    /// The checksum of that.
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

    /// What is noted of a span: one that is not of fewer bytes than `most` is sent whole.
    fn if_fewer(self, most: u64) -> Span {
        match (self.sent.len() as u64) < most {
            true => Span::Coded(self),
            false => Span::Dense,
        }
    }

    /// Bytes of memory it takes.
    fn held(&self) -> u64 {
        let other = self.foldable.get().and_then(Option::as_ref);
        (self.sent.len() + other.map_or(0, |bytes| bytes.len())) as u64
    }
}

impl Delta {
    /// One of which nothing is known yet.
    pub(crate) fn new(base: Version, version: Version, layout: &Layout) -> Self {
        Self::of_bytes(base, version, layout.bytes())
    }

    fn of_bytes(base: Version, version: Version, whole: u64) -> Self {
        let spans = whole.div_ceil(SPAN) as usize;
        let spans: Box<[OnceLock<Span>]> = (0..spans).map(|_| OnceLock::new()).collect();
        Self {
            base,
            version,
            whole,
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

    /// One for several that follow each other, folded span by span when asked for.
    fn folded(parts: Vec<Arc<Self>>) -> Option<Self> {
        let (first, last) = (parts.first()?, parts.last()?);
        let folded = Self::of_bytes(first.base, last.version, first.whole);
        Some(Self { parts, ..folded })
    }

    pub(crate) fn base(&self) -> Version {
        self.base
    }

    /// Notes what is known of a span; what was known before stays.
    pub(crate) fn note(&self, index: usize, span: Span) {
        let known = self.spans.get(index);
        let Some(known) = known.filter(|known| known.get().is_none()) else {
            return;
        };
        let (bytes, held) = match &span {
            Span::Coded(coded) => (coded.sent().len() as u64, coded.held()),
            Span::Dense => (self.span_bytes(index), 0),
        };
        // Counted before anybody can see it.
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.held.fetch_add(held, Ordering::Relaxed);
        if known.set(span).is_err() {
            // Another thread was quicker.
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.held.fetch_sub(held, Ordering::Relaxed);
        }
    }

    /// Keeps of a span that was noted thin how it can be folded.
    pub(crate) fn note_foldable(&self, index: usize, bytes: Vec<u8>, layout: &Layout) {
        if let Some(Span::Coded(coded)) = self.noted(index) {
            let more = coded.keep_foldable(Some(bytes), most(index, layout));
            self.held.fetch_add(more, Ordering::Relaxed);
        }
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
        if self.parts.is_empty() {
            return None;
        }
        // It holds nothing: a panic leaves nothing half done.
        let alone = self.folding.lock();
        let _alone = alone.unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = span.get() {
            return Some(known);
        }
        let mut folded: Option<Vec<u8>> = None;
        for part in &self.parts {
            let next = match part.span(index, layout, scratch)? {
                Span::Coded(coded) => coded.foldable(),
                Span::Dense => Foldable::Nothing,
            };
            let next = match next {
                Foldable::Ready(next) => next,
                Foldable::NotYet => return None,
                Foldable::Nothing => {
                    self.note(index, Span::Dense);
                    return span.get();
                }
            };
            let Some(before) = &folded else {
                folded = Some(next.to_vec());
                continue;
            };
            let mut both = Vec::new();
            let start = index as u64 * SPAN;
            let pattern = Pattern::of_span(layout, start);
            let bytes = SPAN.min(layout.bytes() - start) as usize;
            if let Err(error) = delta::fold(pattern, bytes, before, next, &mut both, scratch) {
                tracing::debug!("two deltas cannot be folded, so a span is sent whole: {error}");
                self.note(index, Span::Dense);
                return span.get();
            }
            folded = Some(both);
        }
        let most = most(index, layout);
        let coded = Coded::made(folded?, None, most);
        self.note(index, coded.if_fewer(most));
        span.get()
    }

    /// What is known of a span alone.
    pub(crate) fn known(&self, index: usize) -> Option<&Span> {
        let known = self.noted(index)?;
        Some(match self.is_spoiled() {
            true => &Span::Dense,
            false => known,
        })
    }

    /// Some of it is not what it should be: nothing of it is used or passed on any more.
    pub(crate) fn spoil(&self) {
        self.spoiled.store(true, Ordering::Release);
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Acquire)
    }

    /// Whether a span of it is known, or can be found.
    pub(crate) fn is_known(&self, index: usize) -> bool {
        let can_be_folded = |part: &Arc<Self>| match part.noted(index) {
            None => false,
            Some(Span::Dense) => true,
            Some(Span::Coded(coded)) => !matches!(coded.foldable(), Foldable::NotYet),
        };
        let is_noted = self.noted(index).is_some();
        is_noted || self.is_folded() && self.parts.iter().all(can_be_folded)
    }

    fn noted(&self, index: usize) -> Option<&Span> {
        self.spans.get(index)?.get()
    }

    /// Nothing more will be known of it: what is not known is sent whole.
    pub(crate) fn end(&self) {
        for index in 0..self.spans.len() {
            if self.spans[index].get().is_none() {
                self.given_up.store(true, Ordering::Relaxed);
                self.note(index, Span::Dense);
            }
        }
    }

    /// What has changed, once all of it is known.
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

    /// Whether some of it will never be known.
    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Whether it does the work of several.
    pub(crate) fn is_folded(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Bytes of a span of the image.
    fn span_bytes(&self, index: usize) -> u64 {
        SPAN.min(self.whole - index as u64 * SPAN)
    }

    /// Bytes that are sent of it, as far as it is known: of what is dense all.
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory it takes, as far as it is known.
    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// The two versions are not kept for it any more.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// No more of it is made.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Makes it from the two versions, as far as that is quicker than to send all of the
    /// newer. Each span is told of at once.
    pub(crate) fn make(
        &self,
        (old, new): (&Snapshot, &Snapshot),
        rate: Rate,
        changed: impl Fn() + Sync,
        is_stopped: impl Fn() -> bool + Sync,
    ) {
        let count = self.spans.len();
        // Also by a panic: a child that waits for a span gets it whole.
        let _ended = Ended(self, &changed);
        let versions = Versions { old, new };
        let mut scratch = Scratch::new();
        let is_stopped = || self.is_stopped() || is_stopped();
        let (rate, any) = match rate {
            Rate::Known(rate) => (rate, false),
            Rate::Unknown => (UNKNOWN, false),
            Rate::Any(rate) => (rate.unwrap_or(UNKNOWN), true),
        };
        // Its working memory is there then.
        versions.sample((1, GLANCE), Codec::Fast, &mut scratch);
        let glances = (self.whole / (GLANCE * GLANCES_OF)).clamp(2, GLANCES);
        let glance = versions.sample((glances, GLANCE), Codec::Fast, &mut scratch);
        if is_stopped() || !any && !glance.pays(rate) {
            return;
        }
        let codec = match glance.waits_for_link(rate) {
            true => versions.cheapest(rate, &is_stopped, &mut scratch),
            false => Codec::Fast,
        };
        let next = AtomicUsize::new(0);
        let work = |scratch: &mut Scratch| {
            loop {
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
                // Without it, it takes longer.
                let _ = std::thread::Builder::new()
                    .name("weightsync-delta".into())
                    .spawn_scoped(scope, || work(&mut Scratch::new()));
            }
            work(&mut scratch);
        });
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
        self.keep(index, versions, made, bytes, thin);
    }

    /// Notes what was made of a span, if it is worth being sent.
    fn keep(
        &self,
        index: usize,
        versions: &Versions<'_>,
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

/// That no more of a delta is made, and this is told.
struct Ended<'a, T: Fn()>(&'a Delta, &'a T);

impl<T: Fn()> Drop for Ended<'_, T> {
    fn drop(&mut self) {
        self.0.end();
        (self.1)();
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

    /// Codes parts of so many bytes, evenly spread.
    fn sample(&self, (count, bytes): (u64, u64), codec: Codec, scratch: &mut Scratch) -> Sample {
        let begun = Instant::now();
        let all = self.new.bytes().len() as u64;
        let (mut coded, mut whole) = (0, 0);
        // Spans are of whole parts.
        let parts = all.div_ceil(bytes);
        let count = count.min(parts);
        for one in 0..count {
            let start = one * parts / count * bytes;
            let part = start as usize..all.min(start + bytes) as usize;
            whole += part.len() as u64;
            coded += self.encode_part(part, codec, scratch).1.len() as u64;
        }
        let took = begun.elapsed();
        Sample { took, coded, whole }
    }

    /// The codec by which it takes least to make and to send it.
    fn cheapest(&self, rate: u64, is_stopped: &impl Fn() -> bool, scratch: &mut Scratch) -> Codec {
        let mut least: Option<(Codec, f64)> = None;
        // Each takes longer than the one before it, and fewer bytes.
        for codec in [Codec::Fast, Codec::Gaps, Codec::Thin] {
            let sample = self.sample((TRIALS, TRIAL), codec, scratch);
            let cost = sample.side_by_side(rate);
            if least.is_none_or(|(_, least)| cost < least) {
                least = Some((codec, cost));
            }
            if is_stopped() || !sample.waits_for_link(rate) {
                break;
            }
        }
        least.map_or(Codec::Fast, |(codec, _)| codec)
    }

    fn encode(&self, index: usize, codec: Codec, scratch: &mut Scratch) -> (Encoded, Vec<u8>) {
        self.encode_part(self.span(index), codec, scratch)
    }

    /// Codes a part of a span.
    fn encode_part(
        &self,
        part: Range<usize>,
        codec: Codec,
        scratch: &mut Scratch,
    ) -> (Encoded, Vec<u8>) {
        let span = part.start as u64 / SPAN * SPAN;
        let pattern = Pattern::of_span(self.new.layout(), span);
        let (old, new) = (&self.old.bytes()[part.clone()], &self.new.bytes()[part]);
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

/// A delta of a span is worth being sent if its bytes are fewer. So the newest delta, which
/// is kept in any case, is within the bound.
fn most(index: usize, layout: &Layout) -> u64 {
    SPAN.min(layout.bytes() - index as u64 * SPAN) / RING
}

/// What coding some of an image takes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    took: Duration,
    coded: u64,
    whole: u64,
}

impl Sample {
    /// Whether it takes less time to code, send and apply a delta than to send the bytes
    /// themselves. Two threads code, one of them next to another that applies: over loopback,
    /// on two cores, all of it together takes less than one thread codes in where what changed
    /// is so little that it is put into an older version, and breaks even at twice that where
    /// the base is copied. There it has to gain a third: a sample varies by as much, and to be
    /// wrong costs more than what could be gained.
    fn pays(self, rate: u64) -> bool {
        let longer = match 2 * IN_PLACE * self.coded <= self.whole {
            true => 1.0,
            false => 3.0,
        };
        longer * self.took.as_secs_f64() + seconds(self.coded, rate) < seconds(self.whole, rate)
    }

    /// Whether a delta takes so much longer on its way than to be made that one of fewer
    /// bytes may be worth its time.
    fn waits_for_link(self, rate: u64) -> bool {
        seconds(self.coded, rate) > 2.0 * self.took.as_secs_f64()
    }

    /// How long it takes where one part is made while another is on its way.
    fn side_by_side(self, rate: u64) -> f64 {
        let made = self.took.as_secs_f64() / f64::from(THREADS);
        made.max(seconds(self.coded, rate))
    }
}

fn seconds(bytes: u64, rate: u64) -> f64 {
    bytes as f64 / rate.max(1) as f64
}

#[cfg(test)]
mod tests;
