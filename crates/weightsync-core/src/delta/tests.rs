use proptest::prelude::*;

use super::*;
use crate::digest::{Digest, Digester};
use crate::dtype::Dtype;
use crate::layout::Layout;

const PATTERNS: [Dtype; 9] = [
    Dtype::BF16,
    Dtype::F16,
    Dtype::F32,
    Dtype::F64,
    Dtype::F8_E4M3,
    Dtype::F8_E5M2,
    Dtype::BOOL,
    Dtype::I32,
    Dtype::U64,
];

/// What a step of training may do to the bits of an element.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Up or down by little, as small updates are.
    Near,
    /// To any other pattern.
    Any,
    /// To zero of either sign, infinity, or a NaN of any payload.
    Special,
}

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Weights whose exponents are spread as those of a normal distribution are, about.
fn weights(pattern: BitPattern, elements: usize, seed: u64) -> Vec<u8> {
    let (mut state, width) = (seed, pattern.width());
    let mut bytes = Vec::with_capacity(elements * width);
    for _ in 0..elements {
        let word = splitmix(&mut state);
        let down = u64::from((word | 1 << 20).trailing_zeros());
        let exponents = pattern.exponents(0);
        let middle = exponents.mask / 2;
        let rest = splitmix(&mut state) & !(exponents.mask << exponents.shift);
        let element = rest | middle.saturating_sub(down) << exponents.shift;
        bytes.extend_from_slice(&element.to_le_bytes()[..width]);
    }
    bytes
}

/// A later version: of 10,000 elements so many are changed.
fn trained(pattern: BitPattern, old: &[u8], kind: Kind, share: u64, seed: u64) -> Vec<u8> {
    let (mut state, width) = (seed ^ 0xabcd, pattern.width());
    let mut new = old.to_vec();
    for element in new.chunks_exact_mut(width) {
        if splitmix(&mut state) % 10_000 >= share {
            continue;
        }
        let mut whole = [0; 8];
        whole[..width].copy_from_slice(element);
        let was = u64::from_le_bytes(whole);
        let dice = splitmix(&mut state);
        let exponents = pattern.exponents(0);
        let high = exponents.mask << exponents.shift;
        let sign = 1 << (8 * width - 1);
        let is = match kind {
            Kind::Near => {
                let far = 1 + u64::from((dice >> 8 | 1 << 30).trailing_zeros()) / 3;
                if dice & 1 == 0 {
                    was.wrapping_add(far)
                } else {
                    was.wrapping_sub(far)
                }
            }
            Kind::Any => dice,
            Kind::Special => match dice % 5 {
                0 => 0,
                1 => sign,
                2 => high,
                3 => high | dice >> 16 & 0xff,
                _ => sign | high | 1,
            },
        };
        element.copy_from_slice(&is.to_le_bytes()[..width]);
    }
    new
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Near), Just(Kind::Any), Just(Kind::Special)]
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    proptest::sample::select(&PATTERNS[..])
}

/// Of 10,000.
fn shares() -> impl Strategy<Value = u64> {
    proptest::sample::select(&[0_u64, 2, 60, 110, 300, 1000, 3300, 9000, 10_000][..])
}

fn encoded(pattern: BitPattern, codec: Codec, old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut out = vec![7; 3];
    let mut scratch = Scratch::new();
    let made = encode(pattern, codec, old, new, &mut out, &mut scratch).expect("a span");
    assert_eq!(out[..3], [7; 3], "what was there stays");
    assert_eq!(made.bytes as usize, out.len() - 3);
    let pairs = old.chunks(pattern.width()).zip(new.chunks(pattern.width()));
    assert_eq!(
        made.changes as usize,
        pairs.filter(|(old, new)| old != new).count()
    );
    out.split_off(3)
}

fn digest(image: &[u8]) -> Digest {
    let mut digester = Digester::new(image.len() as u64);
    digester.tensor(0, image).expect("it is one part");
    digester.finish().expect("it is all of it")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_delta_makes_the_new_of_the_old(
        dtype in dtypes(),
        elements in prop_oneof![0_usize..300, 30_000_usize..80_000],
        (kind, share) in (kinds(), shares()),
        seed in 0_u64..1 << 32,
    ) {
        let pattern = BitPattern::of(dtype);
        let old = weights(pattern, elements, seed);
        let new = trained(pattern, &old, kind, share, seed);
        for &codec in Codec::ALL {
            let delta = encoded(pattern, codec, &old, &new);
            prop_assert_eq!(delta.is_empty(), old == new);
            let mut made = vec![0xa5; old.len()];
            let onto = apply_onto(pattern, &delta, &old, &mut made, &mut Scratch::new());
            prop_assert!(onto.is_ok() && made == new, "{codec:?} makes something else elsewhere");
            for first_line in [None, Some(0)] {
                let mut image = old.clone();
                let mut scratch = Scratch::new();
                let applied = apply(pattern, &delta, &mut image, first_line, &mut scratch);
                let applied = applied.expect("what was encoded");
                prop_assert!(image == new, "{codec:?} makes something else");
                if first_line.is_some() {
                    let kept = digest(&old).changed_by(applied.digest);
                    prop_assert_eq!(kept, digest(&new), "{:?}", codec);
                }
            }
        }
    }

    #[test]
    fn folded_deltas_do_what_each_does_in_turn(
        dtype in dtypes(),
        elements in prop_oneof![0_usize..300, 30_000_usize..70_000],
        (kinds, shares) in ([kinds(), kinds(), kinds()], [shares(), shares(), shares()]),
        back in any::<bool>(),
        seed in 0_u64..1 << 32,
    ) {
        let pattern = BitPattern::of(dtype);
        let mut scratch = Scratch::new();
        let mut versions = vec![weights(pattern, elements, seed)];
        for (step, (kind, share)) in kinds.into_iter().zip(shares).enumerate() {
            let last = versions.last().expect("there is one");
            versions.push(trained(pattern, last, kind, share, seed + step as u64));
        }
        if back {
            versions.push(versions[0].clone());
        }
        let mut folded = Vec::new();
        for pair in versions.windows(2) {
            let next = encoded(pattern, Codec::Fast, &pair[0], &pair[1]);
            let mut both = vec![7];
            let bytes = versions[0].len();
            let changes = fold(pattern, bytes, &folded, &next, &mut both, &mut scratch);
            let direct = encoded(pattern, Codec::Fast, &versions[0], &pair[1]);
            prop_assert!(both[1..] == direct, "a fold is what comparing would have given");
            // In whichever form the places are.
            let gaps = encoded(pattern, Codec::Gaps, &pair[0], &pair[1]);
            let mut same = Vec::new();
            fold(pattern, bytes, &folded, &gaps, &mut same, &mut scratch).expect("they follow");
            prop_assert!(same == direct);
            prop_assert_eq!(changes == Ok(0), both.len() == 1);
            folded = both.split_off(1);
        }
        let mut image = versions[0].clone();
        apply(pattern, &folded, &mut image, None, &mut scratch).expect("what was folded");
        prop_assert!(Some(&image) == versions.last());
    }

    #[test]
    fn any_bytes_are_refused_or_applied(
        dtype in dtypes(),
        elements in 0_usize..40_000,
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        codec in 0_u8..3,
        seed in 0_u64..1 << 32,
    ) {
        let pattern = BitPattern::of(dtype);
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = [*first, fast::TAG, thin::TAG][usize::from(codec)]
                | pattern.width().trailing_zeros() as u8;
        }
        let mut image = weights(pattern, elements, seed);
        let (mut scratch, mut out) = (Scratch::new(), Vec::new());
        let _ = apply(pattern, &bytes, &mut image, Some(3), &mut scratch);
        let _ = fold(pattern, image.len(), &bytes, &bytes, &mut out, &mut scratch);
    }

    #[test]
    fn what_was_damaged_is_refused_or_applied(
        dtype in dtypes(),
        (kind, share) in (kinds(), shares()),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        seed in 0_u64..1 << 32,
    ) {
        let pattern = BitPattern::of(dtype);
        let old = weights(pattern, 40_000, seed);
        let new = trained(pattern, &old, kind, share, seed);
        let mut scratch = Scratch::new();
        for &codec in Codec::ALL {
            let delta = encoded(pattern, codec, &old, &new);
            if delta.is_empty() {
                continue;
            }
            let mut flipped = delta.clone();
            for (index, byte) in &damage {
                flipped[index.index(delta.len())] ^= byte;
            }
            let cut = &delta[..1 + cut.index(delta.len()) % delta.len()];
            for bytes in [&flipped[..], cut, &[&delta[..], &[1]].concat()] {
                let mut image = old.clone();
                let done = apply(pattern, bytes, &mut image, Some(0), &mut scratch);
                prop_assert!(done.is_err() || bytes.len() <= delta.len());
                if let Ok(done) = done {
                    // The digest says of any bytes what they have done.
                    let kept = digest(&old).changed_by(done.digest);
                    prop_assert_eq!(kept, digest(&image));
                }
            }
        }
    }
}

#[test]
fn each_block_of_a_span_may_change_by_another_share() {
    const SHARES: [u64; 10] = [9000, 110, 0, 3300, 60, 0, 110, 9000, 110, 60];
    for dtype in [Dtype::BF16, Dtype::F32, Dtype::F8_E4M3] {
        let pattern = BitPattern::of(dtype);
        let bytes = BLOCK * pattern.width();
        let old = weights(pattern, BLOCK * SHARES.len() - 77, 1);
        let other = |old: &[u8], shares: &mut dyn Iterator<Item = u64>| {
            let blocks = old.chunks(bytes).zip(shares).zip(2..);
            let new = blocks.flat_map(|((block, share), seed)| {
                trained(pattern, block, Kind::Near, share, seed)
            });
            new.collect::<Vec<u8>>()
        };
        let new = other(&old, &mut SHARES.into_iter());
        let newer = other(&new, &mut SHARES.into_iter().rev());
        // The same memory for all of it, and for a shorter span with other changes behind it.
        let mut scratch = Scratch::new();
        for end in [old.len(), bytes + 300 * pattern.width(), old.len()] {
            let (old, new, newer) = (&old[..end], &new[..end], &newer[..end]);
            for &codec in Codec::ALL {
                let mut delta = Vec::new();
                encode(pattern, codec, old, new, &mut delta, &mut scratch).expect("a span");
                assert_eq!(
                    delta,
                    encoded(pattern, codec, old, new),
                    "{dtype:?} {codec:?}"
                );
                let mut image = vec![0xa5; end];
                let onto = apply_onto(pattern, &delta, old, &mut image, &mut scratch);
                assert!(onto.is_ok() && image == new, "{dtype:?} {codec:?}");
                for first_line in [None, Some(0)] {
                    let mut image = old.to_vec();
                    let done = apply(pattern, &delta, &mut image, first_line, &mut scratch);
                    assert!(done.is_ok() && image == new, "{dtype:?} {codec:?}");
                }
                if codec != Codec::Thin {
                    let next = encoded(pattern, codec, new, newer);
                    let mut both = Vec::new();
                    fold(pattern, end, &delta, &next, &mut both, &mut scratch)
                        .expect("they follow");
                    assert!(
                        both == encoded(pattern, Codec::Fast, old, newer),
                        "{dtype:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_cut_of_a_fast_delta_is_refused() {
    let pattern = BitPattern::of(Dtype::BF16);
    let old = weights(pattern, 70_000, 1);
    for share in [110, 3300] {
        let delta = encoded(
            pattern,
            Codec::Fast,
            &old,
            &trained(pattern, &old, Kind::Near, share, 2),
        );
        for cut in (1..delta.len()).step_by(7) {
            let mut scratch = Scratch::new();
            let cut = apply(pattern, &delta[..cut], &mut old.clone(), None, &mut scratch);
            assert!(cut.is_err());
        }
    }
}

#[test]
fn delta_size_is_close_to_its_information() {
    let pattern = BitPattern::of(Dtype::BF16);
    let old = weights(pattern, SPAN as usize / 2, 3);
    let new = trained(pattern, &old, Kind::Near, 110, 4);
    let changes = old
        .chunks(2)
        .zip(new.chunks(2))
        .filter(|(a, b)| a != b)
        .count() as f64;
    for (codec, most) in [(Codec::Fast, 1.4), (Codec::Gaps, 1.4), (Codec::Thin, 1.3)] {
        let each = encoded(pattern, codec, &old, &new).len() as f64 / changes;
        assert!(each < most, "{codec:?}: {each} bytes");
    }
}

#[test]
fn a_bomb_is_refused_before_anything_is_allocated() {
    let pattern = BitPattern::of(Dtype::BF16);
    let mut scratch = Scratch::new();
    // 2^35 - 1 changes in the first class.
    let bomb = [
        &[thin::TAG | 1, 0, 0][..],
        &[0xff, 0xff, 0xff, 0xff, 0x7f],
        &[0; 60],
    ]
    .concat();
    let refused = apply(pattern, &bomb, &mut [0; 4096], None, &mut scratch);
    assert!(
        matches!(refused, Err(DeltaError::Malformed { .. })),
        "{refused:?}"
    );
    // A number that does not end.
    let bomb = [&[thin::TAG | 1, 0, 0][..], &[0xff; 60]].concat();
    let refused = apply(pattern, &bomb, &mut [0; 4096], None, &mut scratch);
    assert!(
        matches!(refused, Err(DeltaError::Ends { .. })),
        "{refused:?}"
    );
    // 65,535 changes among 2,048 elements.
    let bomb = [&[fast::TAG | 1, 1][..], &[0xff; 60]].concat();
    let refused = apply(pattern, &bomb, &mut [0; 4096], None, &mut scratch);
    assert!(
        matches!(refused, Err(DeltaError::Malformed { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_delta_for_other_elements_is_refused() {
    let (of, other) = (BitPattern::of(Dtype::BF16), BitPattern::of(Dtype::F32));
    let delta = encoded(of, Codec::Fast, &[0; 64], &[1; 64]);
    let mut scratch = Scratch::new();
    let refused = apply(other, &delta, &mut [0; 64], None, &mut scratch);
    assert_eq!(
        refused,
        Err(DeltaError::Width {
            expected: 4,
            got: 2
        })
    );
}

#[test]
fn a_thin_delta_does_not_fit_another_base() {
    let pattern = BitPattern::of(Dtype::BF16);
    let mut scratch = Scratch::new();
    let ones: Vec<u8> = [0x3f80_u16; 100]
        .iter()
        .flat_map(|one| one.to_le_bytes())
        .collect();
    let delta = encoded(pattern, Codec::Thin, &ones, &[2; 200]);
    let mut zeros = [0; 200];
    let refused = apply(pattern, &delta, &mut zeros, None, &mut scratch);
    assert!(
        matches!(refused, Err(DeltaError::Base { .. })),
        "{refused:?}"
    );
}

#[test]
fn thin_delta_refuses_excess_inside_its_streams() {
    let pattern = BitPattern::of(Dtype::BF16);
    let (old, new) = ([1; 2000], [2; 2000]);
    let mut delta = encoded(pattern, Codec::Thin, &old, &new);
    // Behind the tag, the exponent and the changes of each class.
    let mut at = 3;
    for _ in 0..16 {
        at += 1 + delta[at..].iter().take_while(|byte| **byte >= 0x80).count();
    }
    let length = u32::from_le_bytes(delta[at..at + 4].try_into().unwrap());
    delta[at..at + 4].copy_from_slice(&(length + 1).to_le_bytes());
    delta.insert(at + 4 + length as usize, 7);
    let (mut image, mut scratch) = (old, Scratch::new());
    let refused = apply(pattern, &delta, &mut image, None, &mut scratch);
    assert_eq!(refused.err(), Some(DeltaError::Trailing { extra: 1 }));
}

#[test]
fn a_span_is_of_the_dtype_that_has_most_of_it() {
    let layout = Layout::new([
        ("a".to_owned(), Dtype::F32, vec![1 << 18]),
        ("b".to_owned(), Dtype::BF16, vec![3 << 20]),
        ("c".to_owned(), Dtype::F64, vec![1 << 10]),
    ])
    .expect("a layout");
    assert_eq!(BitPattern::of_span(&layout, 0), BitPattern::of(Dtype::BF16));
    assert_eq!(
        BitPattern::of_span(&layout, SPAN),
        BitPattern::of(Dtype::BF16)
    );
    let small = Layout::new([("a".to_owned(), Dtype::F32, vec![3])]).expect("a layout");
    assert_eq!(BitPattern::of_span(&small, 0), BitPattern::of(Dtype::F32));
    // Those that are read alike count together.
    let mixed = Layout::new([
        ("a".to_owned(), Dtype::BF16, vec![2 << 10]),
        ("b".to_owned(), Dtype::I32, vec![768]),
        ("c".to_owned(), Dtype::U32, vec![768]),
    ])
    .expect("a layout");
    assert_eq!(BitPattern::of_span(&mixed, 0), BitPattern::of(Dtype::U32));
    let none = Layout::new(Vec::<(String, Dtype, Vec<u64>)>::new()).expect("a layout");
    assert_eq!(BitPattern::of_span(&none, 0), BitPattern::of(Dtype::U8));
}
