//! The speed of quantising `F32` on one core, and of a copy of the same bytes.
//!
//!     cargo run --release -p weightsync-simd --example quantise

use std::hint::black_box;
use std::time::{Duration, Instant};

use weightsync_simd::{amax, quantise_e4m3, quantise_i8};

/// Bytes of the source, and of the parts that share a scale: a row of a block of 128 x 128.
const SOURCE: usize = 256 << 20;
const PART: usize = 128 * 4;
/// Bytes of such a block.
const BLOCK: usize = 128 * PART;

fn main() {
    let source: Vec<u8> = (0..SOURCE / 4)
        .flat_map(|at| ((at % 1999) as f32 / 100.0 - 9.0).to_le_bytes())
        .collect();
    let mut values = vec![0_u8; SOURCE / 4];
    let mut copy = vec![0_u8; SOURCE];
    report("copy", || {
        copy.copy_from_slice(black_box(&source));
        black_box(&mut copy);
    });
    report("largest magnitude", || {
        black_box(amax(black_box(&source)));
    });
    for (name, quantise) in [
        ("fp8", quantise_e4m3 as fn(&mut [u8], &[u8], f32)),
        ("int8", quantise_i8),
    ] {
        report(&format!("{name}, scale known"), || {
            quantise(black_box(&mut values), black_box(&source), 0.02);
        });
        report(&format!("{name}, a scale for each block"), || {
            for (to, from) in values.chunks_mut(BLOCK / 4).zip(source.chunks(BLOCK)) {
                let parts = from.chunks(PART).map(amax);
                let scale = parts.fold(0.0, f32::max) / 448.0;
                for (to, from) in to.chunks_mut(PART / 4).zip(from.chunks(PART)) {
                    quantise(to, from, scale);
                }
            }
        });
    }
}

/// The best of five.
fn report(name: &str, mut run: impl FnMut()) {
    run();
    let took = (0..5).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed()
    });
    let best = took.min().unwrap_or(Duration::MAX).as_secs_f64();
    println!(
        "{name}: {:.2} GB/s of the source",
        SOURCE as f64 / best / 1e9
    );
}
