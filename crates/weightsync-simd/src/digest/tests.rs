use super::*;
use crate::testing::{Noise, noise};

/// Cipher round 1 of the example of FIPS 197, appendix B: start of round, after MixColumns.
#[test]
fn the_scalar_round_is_that_of_aes() {
    let start = 0x193d_e3be_a0f4_e22b_9ac6_8d2a_e9f8_4808_u128.swap_bytes();
    let mixed = 0x0466_81e5_e0cb_199a_48f8_d37a_2806_264c_u128.swap_bytes();
    assert_eq!(scalar::round(start), mixed);
}

#[test]
fn every_path_gives_the_same_sum() {
    let bytes = noise(5000, 1);
    for path in DigestPath::available() {
        for len in (0..300).chain([1023, 1024, 4999]) {
            for offset in [0, 1, 8, 63] {
                let len = len.min(bytes.len() - offset);
                let bytes = &bytes[offset..][..len];
                for first_line in [0, 1, 12_345, u64::MAX / 8, u64::MAX] {
                    assert_eq!(
                        sum_with(path, bytes, first_line),
                        sum_with(DigestPath::Scalar, bytes, first_line),
                        "{path:?} {len} {offset} {first_line}"
                    );
                }
            }
        }
    }
}

#[test]
fn some_lines_give_the_sum_of_each() {
    let bytes = noise(64 * 40 + 17, 7);
    for whole in [64 * 40, bytes.len()] {
        let bytes = &bytes[..whole];
        let last = (whole.div_ceil(64) - 1) as u16;
        let which = [0, 3, 4, 17, 17, last];
        let each = which.iter().map(|&line| {
            let at = usize::from(line) * 64;
            sum_with(
                DigestPath::Scalar,
                &bytes[at..whole.min(at + 64)],
                9 + u64::from(line),
            )
        });
        let expected = each.fold([0; 2], digest_add);
        for path in DigestPath::available() {
            assert_eq!(sum_at_with(path, bytes, &which, 9), expected, "{path:?}");
        }
    }
}

/// The digest is an identity that outlives a build: these never change.
#[test]
fn known_answers() {
    let counted: Vec<u8> = (0..1000).map(|index| index as u8).collect();
    for path in DigestPath::available() {
        assert_eq!(sum_with(path, &[], 5), [0, 0]);
        assert_eq!(sum_with(path, &[0; 64], 0), KNOWN[0]);
        assert_eq!(sum_with(path, &[0; 64], 1), KNOWN[1]);
        assert_eq!(sum_with(path, &counted, 0), KNOWN[2]);
        assert_eq!(sum_with(path, &counted, 1 << 40), KNOWN[3]);
    }
}

/// Made by an implementation written apart from this one, from the definition.
const KNOWN: [[u64; 2]; 4] = [
    [0x410e_3a2f_cafe_5865, 0x4396_6707_bed1_98c6],
    [0x5cf6_9890_8467_d456, 0x89da_e574_bb5a_4ef5],
    [0x1c0b_07b6_eb61_05ab, 0xc3d7_c3c0_8456_b673],
    [0xe326_8932_117d_3bec, 0x4bcf_24a7_5640_b009],
];

#[test]
fn a_last_line_counts_as_filled_with_zeros() {
    let mut bytes = noise(200, 2);
    let short = digest_lines(&bytes, 9);
    bytes.resize(256, 0);
    assert_eq!(digest_lines(&bytes, 9), short);
}

#[test]
fn parts_add_up_and_deltas_replace() {
    let old = noise(64 * 100, 3);
    let mut new = old.clone();
    for at in [0, 64 * 7 + 3, 64 * 99 + 63] {
        new[at] ^= 0x10;
    }
    for cut in [0, 64, 64 * 50, 64 * 100] {
        let parts = digest_add(
            digest_lines(&old[..cut], 77),
            digest_lines(&old[cut..], 77 + cut as u64 / 64),
        );
        assert_eq!(parts, digest_lines(&old, 77));
    }
    let line = |bytes: &[u8], index: usize| bytes[index * 64..][..64].to_vec();
    let updated = [0, 7, 99]
        .iter()
        .fold(digest_lines(&old, 0), |sum, &index| {
            digest_add(
                sum,
                digest_line_delta(&line(&old, index), &line(&new, index), index as u64),
            )
        });
    assert_eq!(updated, digest_lines(&new, 0));
}

/// Flipping any bit of a line flips each output bit about half of the time.
#[test]
fn every_flipped_bit_changes_about_half_of_the_output() {
    let mut total = 0;
    let mut per_bit = [0_u32; 128];
    let mut trials = 0;
    for (round, base) in [vec![0; 64], vec![0xff; 64], noise(64, 4), noise(64, 5)]
        .iter()
        .enumerate()
    {
        let before = digest_lines(base, round as u64);
        for bit in 0..512 {
            let mut flipped = base.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let after = digest_lines(&flipped, round as u64);
            let changed = [before[0] ^ after[0], before[1] ^ after[1]];
            let ones = changed[0].count_ones() + changed[1].count_ones();
            assert!(
                (30..=98).contains(&ones),
                "bit {bit} of base {round} changed {ones} bits"
            );
            for (index, count) in per_bit.iter_mut().enumerate() {
                *count += (changed[index / 64] >> (index % 64)) as u32 & 1;
            }
            total += ones;
            trials += 1;
        }
    }
    let mean = f64::from(total) / f64::from(trials);
    assert!((63.0..65.0).contains(&mean), "mean {mean}");
    for (index, count) in per_bit.iter().enumerate() {
        // 2048 trials: 1024 expected, a standard deviation of 23.
        assert!(
            (880..1168).contains(count),
            "output bit {index} changed {count} times of 2048"
        );
    }
}

/// The index is hashed as well as the bytes: moving a line by any power of two moves half the bits.
#[test]
fn index_bit_changes_half_of_the_digest() {
    let mut total = 0;
    for base in [[0; 64], [0x3f; 64]] {
        for index in [0, 1, 1000, (1 << 44) - 1] {
            for bit in 0..44 {
                let before = digest_lines(&base, index);
                let after = digest_lines(&base, index ^ (1 << bit));
                let ones =
                    (before[0] ^ after[0]).count_ones() + (before[1] ^ after[1]).count_ones();
                assert!(
                    (32..=96).contains(&ones),
                    "index {index} bit {bit} changed {ones} bits"
                );
                total += ones;
            }
        }
    }
    let mean = f64::from(total) / f64::from(2 * 4 * 44);
    assert!((62.5..65.5).contains(&mean), "mean {mean}");
}

/// Rearranged content, which a plain sum of hashes would not notice.
#[test]
fn moved_content_is_another_image() {
    let image = noise(64 * 64, 6);
    let whole = digest_lines(&image, 0);
    let differs = |other: &[u8], what: &str| assert_ne!(digest_lines(other, 0), whole, "{what}");

    for unit in [1, 2, 4, 16, 64, 1024] {
        for distance in [1, 2, 3] {
            let mut swapped = image.clone();
            let (left, right) = swapped.split_at_mut(distance * unit);
            left[..unit].swap_with_slice(&mut right[..unit]);
            differs(
                &swapped,
                &format!("swapped units of {unit} at distance {distance}"),
            );
        }
        let mut rotated = image.clone();
        rotated.rotate_left(unit);
        differs(&rotated, &format!("rotated by {unit}"));
    }
    let mut reversed = image.clone();
    reversed.reverse();
    differs(&reversed, "reversed");
}

/// What a tweak that enters only once would allow: two blocks change places, each changed by the
/// difference of their tweaks.
#[test]
fn digest_changes_when_blocks_swap_tweaks() {
    let blocks: Vec<u128> = noise(1024, 7)
        .as_chunks::<16>()
        .0
        .iter()
        .map(|&block| u128::from_le_bytes(block))
        .collect();
    let bytes = |blocks: &[u128]| {
        blocks
            .iter()
            .flat_map(|block| block.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let tweak = |number: usize| {
        let [low, high] = STRIDES.map(|stride| stride.wrapping_mul(number as u64));
        u128::from(low) | u128::from(high) << 64
    };
    let before = digest_lines(&bytes(&blocks), 0);
    for (left, right) in [(0, 1), (4, 5), (3, 60), (17, 33)] {
        let difference = tweak(left) ^ tweak(right);
        let mut moved = blocks.clone();
        moved[left] = blocks[right] ^ difference;
        moved[right] = blocks[left] ^ difference;
        assert_ne!(
            digest_lines(&bytes(&moved), 0),
            before,
            "blocks {left} and {right}"
        );
    }
}

/// A million lines with hardly any content, at many indices: all sums differ, and so does every
/// 64-bit half.
#[test]
fn structured_lines_do_not_collide() {
    let mut sums = Vec::with_capacity(1_000_000);
    let mut add = |line: &[u8], index| sums.push(digest_lines(line, index));
    // Zeros everywhere: 300,000 indices.
    for index in 0..300_000 {
        add(&[0; 64], index);
    }
    // A 16-bit counter in one place, zeros elsewhere: 32 places, 10,000 values from 1.
    for place in 0..32 {
        for value in 1..=10_000_u16 {
            let mut line = [0; 64];
            line[2 * place..][..2].copy_from_slice(&value.to_le_bytes());
            add(&line, 0);
        }
    }
    // Two single bits: 512 over 2, at index 7.
    for first in 0..512 {
        for second in first + 1..512 {
            let mut line = [0; 64];
            line[first / 8] |= 1 << (first % 8);
            line[second / 8] |= 1 << (second % 8);
            add(&line, 1_000_000 + 7);
        }
    }
    // One byte throughout, at 1,000 indices.
    for value in 1..=255 {
        for index in 0..1_000 {
            add(&[value; 64], index << 20);
        }
    }
    assert!(sums.len() > 1_000_000);
    for half in 0..2 {
        let mut words: Vec<u64> = sums.iter().map(|sum| sum[half]).collect();
        words.sort_unstable();
        assert!(
            words.is_sorted_by(|left, right| left < right),
            "two equal words in half {half}"
        );
    }
}

/// Sums of many random lines look random: every bit of a thousand sums is set about half the time.
#[test]
fn sums_are_not_biased() {
    let mut per_bit = [0_u32; 128];
    for seed in 0..1000 {
        let bytes: Vec<u8> = Noise(seed)
            .take(64)
            .flat_map(|word| [word as u8 & 1; 8])
            .collect();
        let sum = digest_lines(&bytes, seed);
        for (index, count) in per_bit.iter_mut().enumerate() {
            *count += (sum[index / 64] >> (index % 64)) as u32 & 1;
        }
    }
    for (index, count) in per_bit.iter().enumerate() {
        // 500 expected, a standard deviation of 16.
        assert!(
            (400..600).contains(count),
            "bit {index} is set in {count} of 1000 sums"
        );
    }
}
