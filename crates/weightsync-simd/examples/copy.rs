//! Times the copies against `memcpy`: alternating rounds, medians, `r` = time over one `memcpy` of
//! the same bytes in the same round.
//!
//! `cargo run --release -p weightsync-simd --example copy [MiB] [rounds]`

use std::hint::black_box;
use std::time::{Duration, Instant};

use weightsync_simd::{crc64, digest_lines, stream_copy_crc_slice, stream_copy_slice};

type Case = (&'static str, fn(&mut [u8], &[u8]));

const CASES: [Case; 5] = [
    ("memcpy", |dst, src| dst.copy_from_slice(src)),
    ("stream_copy", stream_copy_slice),
    ("stream_copy_crc", |dst, src| {
        black_box(stream_copy_crc_slice(dst, src));
    }),
    ("crc64 alone", |_, src| {
        black_box(crc64(src));
    }),
    ("digest_lines alone", |_, src| {
        black_box(digest_lines(src, 0));
    }),
];

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|argument| argument.parse::<usize>());
    let mebibytes = arguments.next().and_then(Result::ok).unwrap_or(1024);
    let rounds = arguments.next().and_then(Result::ok).unwrap_or(5).max(1);
    let source: Vec<u8> = (0..mebibytes << 17)
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let mut copy = vec![1_u8; source.len()];

    let mut times = vec![[Duration::ZERO; CASES.len()]; rounds];
    for (_, run) in CASES {
        run(&mut copy, &source);
    }
    for round in &mut times {
        for ((_, run), time) in CASES.iter().zip(round) {
            let start = Instant::now();
            run(&mut copy, black_box(&source));
            *time = start.elapsed();
        }
    }

    println!("{mebibytes} MiB, {rounds} rounds");
    for (case, (name, _)) in CASES.iter().enumerate() {
        let seconds = median(times.iter().map(|round| round[case].as_secs_f64()));
        let ratio = median(
            times
                .iter()
                .map(|round| round[case].as_secs_f64() / round[0].as_secs_f64()),
        );
        println!(
            "{name:20} {:6.1} GB/s   r = {ratio:.2}",
            source.len() as f64 / seconds / 1e9
        );
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
