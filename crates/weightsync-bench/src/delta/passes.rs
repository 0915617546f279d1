//! The passes over two versions, timed in turns.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use weightsync_core::delta::{
    BitPattern, Codec, DeltaError, SPAN, Scratch, apply, apply_onto, encode, fold,
};
use weightsync_engine::Dtype;
use weightsync_simd::{BLOCK, SLACK, compare, compare_dense, digest_lines};

use super::pages::Pages;
use super::steps::Steps;

pub const SPAN_BYTES: usize = SPAN as usize;

/// Elements compared at once, as the codecs do.
const AT_ONCE: usize = BLOCK;

/// Where more than one element in so many changed, the fast codec writes places as bits.
const QUICK: usize = 24;

/// One pass: the median of its times, and of its times over the memcpy of their rounds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    pub seconds: f64,
    pub ratio: f64,
}

/// What was measured at one density.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// The median time of a memcpy, in seconds.
    pub memcpy: f64,
    pub compare: Pass,
    pub fast: Pass,
    /// Bytes a change.
    pub fast_bytes: f64,
    pub fast_apply: Pass,
    /// Applied while the old version is copied.
    pub fast_onto: Pass,
    pub fold: Pass,
    pub folded_apply: Pass,
    /// What keeping the digest up adds to applying.
    pub kept_up: Pass,
    pub digest: Pass,
    pub thin: Pass,
    pub thin_2: Pass,
    pub thin_bytes: f64,
    pub thin_apply: Pass,
    pub thin_apply_2: Pass,
}

/// One delta for each span of an image.
pub type Deltas = Vec<Vec<u8>>;

/// Memory for all passes, faulted in.
pub struct Passes {
    image: Pages,
    masks: Vec<u64>,
    places: Vec<u16>,
    steps: Vec<u16>,
    scratch: [Scratch; 2],
}

/// The times of each pass, by round.
#[derive(Default)]
pub struct Times(Vec<(f64, f64)>);

impl Times {
    pub fn push(&mut self, since: Instant, memcpy: f64) {
        let seconds = since.elapsed().as_secs_f64();
        self.0.push((seconds, seconds / memcpy));
    }

    pub fn median(&self) -> Pass {
        let middle = |values: Vec<f64>| {
            let mut values = values;
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or_default()
        };
        Pass {
            seconds: middle(self.0.iter().map(|(seconds, _)| *seconds).collect()),
            ratio: middle(self.0.iter().map(|(_, ratio)| *ratio).collect()),
        }
    }
}

impl Passes {
    pub fn new(bytes: usize) -> Self {
        Self {
            image: Pages::new(bytes),
            masks: vec![0; AT_ONCE / 64],
            places: vec![0; AT_ONCE + SLACK],
            steps: vec![0; AT_ONCE + SLACK],
            scratch: Default::default(),
        }
    }

    /// Measures every pass; those of the thin codec once only unless `thin` says otherwise.
    pub fn measure(
        &mut self,
        versions: &Steps,
        rounds: usize,
        thin_rounds: bool,
    ) -> Result<Figures, Box<dyn Error>> {
        let (old, new, newer) = (&versions.old, &versions.new, &versions.newer);
        let spans = old.len().div_ceil(SPAN_BYTES);
        let empty = || vec![Vec::new(); spans];
        let patterns = &vec![BF16; spans][..];
        let (mut fast, mut second, mut folded, mut thin) = (empty(), empty(), empty(), empty());
        code(
            patterns,
            Codec::Fast,
            new,
            newer,
            &mut second,
            &mut self.scratch[..1],
        )?;
        let mut times: [Times; 13] = Default::default();
        let mut figures = Figures::default();
        // The first round warms caches and faults memory in.
        for round in 0..rounds + 1 {
            if round == 1 {
                times = Default::default();
            }
            let [
                memcpy_t,
                compare_t,
                fast_t,
                apply_t,
                fold_t,
                folded_t,
                kept_t,
                digest_t,
                thin_t,
                thin2_t,
                thin_apply_t,
                thin_apply2_t,
                onto_t,
            ] = &mut times;
            let begun = Instant::now();
            self.image.copy_from_slice(black_box(old));
            let memcpy = begun.elapsed().as_secs_f64();
            memcpy_t.0.push((memcpy, 1.0));

            let begun = Instant::now();
            black_box(self.compare(old, new));
            compare_t.push(begun, memcpy);

            let begun = Instant::now();
            let scratch = &mut self.scratch[..1];
            let changes = code(patterns, Codec::Fast, old, new, &mut fast, scratch)?;
            fast_t.push(begun, memcpy);
            figures.fast_bytes = each(&fast, changes);

            let begun = Instant::now();
            put(
                patterns,
                &fast,
                &mut self.image,
                false,
                &mut self.scratch[..1],
            )?;
            apply_t.push(begun, memcpy);
            let alone = begun.elapsed().as_secs_f64();
            check(&self.image, new)?;

            self.image.copy_from_slice(old);
            let begun = Instant::now();
            put(
                patterns,
                &fast,
                &mut self.image,
                true,
                &mut self.scratch[..1],
            )?;
            let more = (begun.elapsed().as_secs_f64() - alone).max(0.0);
            kept_t.0.push((more, more / memcpy));

            let begun = Instant::now();
            let parts = fast.iter().zip(&second).zip(old.chunks(SPAN_BYTES));
            for (((first, second), span), out) in parts.zip(&mut folded) {
                out.clear();
                fold(BF16, span.len(), first, second, out, &mut self.scratch[0])?;
            }
            fold_t.push(begun, memcpy);

            let begun = Instant::now();
            let spans = fast.iter().zip(old.chunks(SPAN_BYTES));
            for ((delta, span), image) in spans.zip(self.image.chunks_mut(SPAN_BYTES)) {
                apply_onto(BF16, delta, span, image, &mut self.scratch[0])?;
            }
            onto_t.push(begun, memcpy);
            check(&self.image, new)?;

            self.image.copy_from_slice(old);
            let begun = Instant::now();
            put(
                patterns,
                &folded,
                &mut self.image,
                false,
                &mut self.scratch[..1],
            )?;
            folded_t.push(begun, memcpy);
            check(&self.image, newer)?;

            let begun = Instant::now();
            black_box(digest_lines(black_box(old), 0));
            digest_t.push(begun, memcpy);

            if round > 1 && !thin_rounds {
                continue;
            }
            for (threads, times, applied) in
                [(1, thin_t, thin_apply_t), (2, thin2_t, thin_apply2_t)]
            {
                let begun = Instant::now();
                code(
                    patterns,
                    Codec::Thin,
                    old,
                    new,
                    &mut thin,
                    &mut self.scratch[..threads],
                )?;
                times.push(begun, memcpy);
                self.image.copy_from_slice(old);
                let begun = Instant::now();
                let scratch = &mut self.scratch[..threads];
                put(patterns, &thin, &mut self.image, false, scratch)?;
                applied.push(begun, memcpy);
                check(&self.image, new)?;
            }
            figures.thin_bytes = each(&thin, changes);
        }
        let [
            memcpy,
            compare,
            fast,
            fast_apply,
            fold,
            folded_apply,
            kept_up,
            digest,
            thin,
            thin_2,
            thin_apply,
            thin_apply_2,
            fast_onto,
        ] = times.map(|times| times.median());
        Ok(Figures {
            memcpy: memcpy.seconds,
            compare,
            fast,
            fast_apply,
            fast_onto,
            fold,
            folded_apply,
            kept_up,
            digest,
            thin,
            thin_2,
            thin_apply,
            thin_apply_2,
            ..figures
        })
    }

    fn compare(&mut self, old: &[u8], new: &[u8]) -> usize {
        let blocks = old.chunks(2 * AT_ONCE).zip(new.chunks(2 * AT_ONCE));
        let (masks, places, steps) = (&mut self.masks, &mut self.places, &mut self.steps);
        // As the fast codec does it: without a list of places where it would not write one.
        let mut as_bits = false;
        blocks
            .map(|(old, new)| {
                let changes = match as_bits {
                    true => compare_dense::<u16>(old, new, masks, steps),
                    false => compare::<u16>(old, new, masks, places, steps),
                };
                as_bits = changes * QUICK > AT_ONCE;
                changes
            })
            .sum()
    }
}

pub const BF16: BitPattern = BitPattern::of(Dtype::BF16);

fn each(deltas: &Deltas, changes: u64) -> f64 {
    let bytes: usize = deltas.iter().map(Vec::len).sum();
    bytes as f64 / changes.max(1) as f64
}

pub fn check(image: &[u8], expected: &[u8]) -> Result<(), Box<dyn Error>> {
    match image == expected {
        true => Ok(()),
        false => Err("applying a delta has not made the version it leads to".into()),
    }
}

/// Codes every span by its pattern, by a thread for each scratch; returns how many changes there are.
pub fn code(
    patterns: &[BitPattern],
    codec: Codec,
    old: &[u8],
    new: &[u8],
    out: &mut Deltas,
    scratch: &mut [Scratch],
) -> Result<u64, DeltaError> {
    let share = out.len().div_ceil(scratch.len());
    let part = share * SPAN_BYTES;
    let work = |patterns: &[BitPattern], old: &[u8], new: &[u8], out: &mut [_], scratch: &mut _| {
        let spans = old.chunks(SPAN_BYTES).zip(new.chunks(SPAN_BYTES));
        let spans = spans.zip(out).zip(patterns);
        let changes = spans.map(|(((old, new), out), &pattern)| {
            Vec::clear(out);
            Ok(encode(pattern, codec, old, new, out, scratch)?.changes)
        });
        changes.sum::<Result<u64, DeltaError>>()
    };
    let parts = old.chunks(part).zip(new.chunks(part));
    let parts = parts.zip(out.chunks_mut(share)).zip(patterns.chunks(share));
    std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .zip(scratch)
            .map(|((((old, new), out), patterns), scratch)| {
                scope.spawn(move || work(patterns, old, new, out, scratch))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum()
    })
}

/// Puts the delta of every span into it, by a thread for each scratch.
pub fn put(
    patterns: &[BitPattern],
    deltas: &Deltas,
    image: &mut [u8],
    digest: bool,
    scratch: &mut [Scratch],
) -> Result<(), DeltaError> {
    let share = deltas.len().div_ceil(scratch.len());
    let parts = deltas
        .chunks(share)
        .zip(image.chunks_mut(share * SPAN_BYTES))
        .zip(patterns.chunks(share));
    std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .zip(scratch)
            .map(|(((deltas, image), patterns), scratch)| {
                scope.spawn(move || {
                    let spans = deltas.iter().zip(image.chunks_mut(SPAN_BYTES));
                    for ((delta, span), &pattern) in spans.zip(patterns) {
                        apply(pattern, delta, span, digest.then_some(0), scratch)?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("no panic"))
    })
}
