//! Deltas of all codecs: put into a span, and folded.

use std::sync::{Mutex, PoisonError};

use weightsync_core::Dtype;
use weightsync_core::delta::{BitPattern, Codec, Scratch, apply, apply_onto, encode, fold};
use weightsync_fuzz::fuzz;

/// Bytes of the span: not whole blocks, nor whole words of a mask.
const BYTES: usize = 200 * 8;

#[test]
fn delta_codecs() {
    for &codec in Codec::ALL {
        put(&format!("delta_{}", codec.as_str()), codec);
    }
}

/// The first byte of an input says of which elements the span is.
fn put(name: &str, codec: Codec) {
    let all: Vec<_> = Codec::ALL
        .iter()
        .flat_map(|codec| samples(*codec))
        .collect();
    let samples = samples(codec);
    // It grows to what a span needs, and no further: before anything is counted.
    let scratch = Mutex::new(Scratch::new());
    let put = |bytes: &[u8]| {
        let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = &mut *scratch;
        let Some((&kind, delta)) = bytes.split_first() else {
            return;
        };
        let pattern = BitPattern::of(PATTERNS[usize::from(kind) % PATTERNS.len()]);
        let old = older();
        let mut image = old.clone();
        let mut other = vec![0xa5; BYTES];
        let here = apply(pattern, delta, &mut image, Some(7), scratch);
        let there = apply_onto(pattern, delta, &old, &mut other, scratch);
        assert_eq!(here.is_ok(), there.is_ok());
        if here.is_ok() {
            assert_eq!(image, other, "in place or elsewhere");
        }
        let mut both = Vec::new();
        match fold(pattern, BYTES, delta, delta, &mut both, scratch) {
            Ok(_) => {
                // Twice the same steps.
                let mut twice = old;
                for _ in 0..2 {
                    apply(pattern, delta, &mut twice, None, scratch).expect("it folds");
                }
                let mut image = older();
                apply(pattern, &both, &mut image, None, scratch).expect("what was folded");
                assert_eq!(image, twice);
            }
            Err(_) => assert!(both.is_empty()),
        }
    };
    all.iter().for_each(|sample| put(sample));
    fuzz!(name, samples, put);
}

const PATTERNS: [Dtype; 4] = [Dtype::BF16, Dtype::F32, Dtype::U8, Dtype::F64];

fn older() -> Vec<u8> {
    (0..BYTES).map(|at| ((at * 37) >> 2) as u8).collect()
}

fn samples(codec: Codec) -> Vec<Vec<u8>> {
    let mut samples = Vec::new();
    for (kind, dtype) in PATTERNS.into_iter().enumerate() {
        for every in [3, 40, 700] {
            let old = older();
            let mut new = old.clone();
            for byte in new.iter_mut().step_by(every) {
                *byte = byte.wrapping_mul(5).wrapping_add(1);
            }
            let mut bytes = vec![kind as u8];
            let pattern = BitPattern::of(dtype);
            let scratch = &mut Scratch::new();
            encode(pattern, codec, &old, &new, &mut bytes, scratch).expect("a span");
            samples.push(bytes);
        }
    }
    samples
}
