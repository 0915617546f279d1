//! The two versions of a delta: coding their spans, and samples that tell which codec pays.

use std::ops::Range;
use std::time::{Duration, Instant};

use weightsync_core::delta;
use weightsync_core::delta::{BitPattern, Codec, Encoded, Scratch};
use weightsync_mem::Snapshot;

use super::{IN_PLACE, THREADS, TRIAL, TRIALS, seconds};
use crate::wire::image::SPAN;

/// The two versions that a delta is made from.
pub(super) struct VersionPair<'a> {
    pub(super) old: &'a Snapshot,
    pub(super) new: &'a Snapshot,
}

impl VersionPair<'_> {
    /// The byte range of a span.
    fn span(&self, index: usize) -> Range<usize> {
        let start = index * SPAN as usize;
        start..self.new.bytes().len().min(start + SPAN as usize)
    }

    /// Codes evenly spread sample parts.
    pub(super) fn sample(
        &self,
        (count, bytes): (u64, u64),
        codec: Codec,
        scratch: &mut Scratch,
    ) -> CodingSample {
        let begun = Instant::now();
        let all = self.new.bytes().len() as u64;
        let (mut coded, mut whole) = (0, 0);
        // Parts end on their multiples, so no sample crosses two spans.
        let parts = all.div_ceil(bytes);
        let count = count.min(parts);
        for one in 0..count {
            let start = one * parts / count * bytes;
            let part = start as usize..all.min(start + bytes) as usize;
            whole += part.len() as u64;
            coded += self.encode_part(part, codec, scratch).1.len() as u64;
        }
        let took = begun.elapsed();
        CodingSample { took, coded, whole }
    }

    /// The codec with the shortest time to make and send the delta.
    pub(super) fn cheapest(
        &self,
        rate: u64,
        is_stopped: &impl Fn() -> bool,
        scratch: &mut Scratch,
    ) -> Codec {
        let mut least: Option<(Codec, f64)> = None;
        for &codec in Codec::ALL {
            let sample = self.sample((TRIALS, TRIAL), codec, scratch);
            let cost = sample.side_by_side(rate);
            if least.is_none_or(|(_, least)| cost < least) {
                least = Some((codec, cost));
            }
            // The codecs come in the order of their cost. A link that does not wait for this one
            // gains nothing by the next.
            if is_stopped() || !sample.waits_for_link(rate) {
                break;
            }
        }
        least.map_or(Codec::Fast, |(codec, _)| codec)
    }

    pub(super) fn encode(
        &self,
        index: usize,
        codec: Codec,
        scratch: &mut Scratch,
    ) -> (Encoded, Vec<u8>) {
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
        let pattern = BitPattern::of_span(self.new.layout(), span);
        let (old, new) = (&self.old.bytes()[part.clone()], &self.new.bytes()[part]);
        let mut bytes = Vec::new();
        let made = delta::encode(pattern, codec, old, new, &mut bytes, scratch);
        let made = made.unwrap_or_else(|error| {
            unreachable!("both are versions of one layout: {error}");
        });
        (made, bytes)
    }
}

/// The cost of coding a sample of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CodingSample {
    pub(super) took: Duration,
    pub(super) coded: u64,
    pub(super) whole: u64,
}

impl CodingSample {
    /// Whether coding, sending and applying a delta is faster than sending all bytes. The factors
    /// were measured over loopback on two cores, where two coding threads compete with the one that
    /// applies. With few changes, applied in place, everything takes less time than one thread
    /// takes to code. Where the base is copied, it breaks even at twice that time. The delta must
    /// then win by a third: samples vary that much, and a wrong choice costs more than a right one
    /// gains.
    pub(super) fn pays(self, rate: u64) -> bool {
        let longer = match 2 * IN_PLACE * self.coded <= self.whole {
            true => 1.0,
            false => 3.0,
        };
        longer * self.took.as_secs_f64() + seconds(self.coded, rate) < seconds(self.whole, rate)
    }

    /// Whether the link is so much slower than the coder that a smaller delta may be worth its
    /// time.
    pub(super) fn waits_for_link(self, rate: u64) -> bool {
        seconds(self.coded, rate) > 2.0 * self.took.as_secs_f64()
    }

    /// The time if one part is made while another is sent.
    pub(super) fn side_by_side(self, rate: u64) -> f64 {
        let made = self.took.as_secs_f64() / f64::from(THREADS);
        made.max(seconds(self.coded, rate))
    }
}
