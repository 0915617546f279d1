//! What samplers draw, with fixed seeds.

use std::collections::BTreeMap;

use proptest::{collection, prelude::*};
use weightsync_engine::Dtype;

use super::*;
use crate::replay::Column;

const CAPACITY: usize = 8;

fn schema() -> Schema {
    Schema::new([
        Column::new("reward", Dtype::F32, []),
        Column::new("trajectory", Dtype::I64, []),
    ])
    .unwrap()
}

fn draws(sampler: impl Into<Sampler>) -> Draws {
    Draws::new(&sampler.into(), 5, &schema(), CAPACITY).unwrap()
}

/// Whether each count is what its probability makes likely: within five
/// standard deviations.
fn assert_likely<K: Ord + std::fmt::Debug>(
    counts: &BTreeMap<K, usize>,
    expected: impl IntoIterator<Item = (K, f64)>,
) {
    let total: usize = counts.values().sum();
    let mut seen = 0;
    for (key, probability) in expected {
        let count = counts.get(&key).copied().unwrap_or(0);
        let mean = total as f64 * probability;
        let deviation = (mean * (1.0 - probability)).sqrt();
        let off = (count as f64 - mean).abs();
        assert!(off <= 5.0 * deviation, "{key:?}: {count}, mean {mean}");
        seen += count;
    }
    assert_eq!(seen, total, "no other is drawn: {counts:?}");
}

fn count<K: Ord>(drawn: impl IntoIterator<Item = K>) -> BTreeMap<K, usize> {
    let mut counts = BTreeMap::new();
    for key in drawn {
        *counts.entry(key).or_insert(0) += 1;
    }
    counts
}

#[test]
fn uniform_sampler_draws_each_frame_alike() {
    for live in [0..1, 0..8, 13..20] {
        let drawn = draws(Sampler::Uniform).draw(20_000, &live).unwrap();
        let probability = 1.0 / (live.end - live.start) as f64;
        let expected = live.map(|id| (id, probability));
        assert_likely(&count(drawn.ids), expected);
        assert_eq!((drawn.weights, drawn.mask), (None, None));
    }
}

#[test]
fn sampler_repeats_with_its_seed_alone() {
    let draw = |seed| {
        let mut draws = Draws::new(&Sampler::Uniform, seed, &schema(), CAPACITY).unwrap();
        draws.draw(50, &(0..8)).unwrap().ids
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}

#[test]
fn every_sampler_refuses_an_empty_ring() {
    let samplers = [
        Sampler::Uniform,
        Sampler::WithoutReplacement,
        Prioritised::new(1.0, 1.0).into(),
        Slices::of("trajectory").slice_len(1).into(),
    ];
    for sampler in samplers {
        let refused = draws(sampler).draw(1, &(3..3));
        assert!(matches!(refused, Err(Error::NothingToSample { .. })));
    }
}

#[test]
fn epoch_draws_each_frame_once_whatever_the_sample() {
    for n in [1, 3, 8] {
        let mut draws = draws(Sampler::WithoutReplacement);
        draws.append(0..8, None);
        let mut orders = Vec::new();
        for _ in 0..3 {
            let mut drawn = Vec::new();
            while drawn.len() < 24 {
                drawn.extend(draws.draw(n, &(0..8)).unwrap().ids);
            }
            for epoch in drawn.chunks(8) {
                let counts = count(epoch.iter().copied());
                assert_eq!(counts, (0..8).map(|id| (id, 1)).collect());
            }
            orders.push(drawn);
        }
        assert_ne!(orders[0], orders[1], "each epoch is shuffled");
    }
}

#[test]
fn epoch_takes_in_new_frames_and_skips_old_ones() {
    let mut draws = draws(Sampler::WithoutReplacement);
    draws.append(0..8, None);
    let first = draws.draw(5, &(0..8)).unwrap().ids;
    draws.evict(0..3);
    draws.append(8..11, None);
    let left = 11 - first.len() - (0..3).filter(|id| !first.contains(id)).count();
    let rest = draws.draw(left, &(3..11)).unwrap().ids;
    let drawn = count(first.into_iter().chain(rest));
    assert!((3..11).all(|id| drawn[&id] == 1), "{drawn:?}");
    // A long time without a sample.
    for start in (11..10_000).step_by(4) {
        draws.append(start..start + 4, None);
    }
    let live = 9999 - 4..10_003;
    let ids = draws.draw(8, &live).unwrap().ids;
    assert_eq!(count(ids), live.map(|id| (id, 1)).collect());
}

#[test]
fn prioritised_sampler_draws_by_the_papers_formula() {
    let priorities = [1.0_f32, 2.0, 0.5, 4.0, 0.0];
    let cases = [
        (0.0, 0.5, 1e-8),
        (0.6, 0.0, 0.1),
        (1.0, 0.4, 1e-3),
        (2.0, 1.0, 0.0),
    ];
    for (alpha, beta, eps) in cases {
        let mut draws = draws(Prioritised::new(alpha, beta).eps(eps));
        let live = 6..11; // Over the ring's end.
        draws.append(live.clone(), None);
        let ids: Vec<u64> = live.clone().collect();
        let update = draws.priorities().unwrap();
        update.update(&live, &ids, &priorities).unwrap();
        let drawn = draws.draw(30_000, &live).unwrap();
        let shares = priorities.map(|p| (f64::from(p) + eps).powf(alpha));
        let total: f64 = shares.iter().sum();
        let expected = live.clone().zip(shares.map(|share| share / total));
        let expected: BTreeMap<u64, f64> = expected.collect();
        assert_likely(&count(drawn.ids.iter().copied()), expected.clone());
        let weight = |id: &u64| (5.0 * expected[id]).powf(-beta);
        let drawable = expected.keys().filter(|id| expected[id] > 0.0);
        let largest = drawable.map(weight).fold(0.0, f64::max);
        for (id, got) in drawn.ids.iter().zip(drawn.weights.unwrap()) {
            let off = f64::from(got) - weight(id) / largest;
            assert!(off.abs() < 1e-6, "{alpha} {beta} {eps}: frame {id}");
        }
    }
}

proptest! {
    /// Whatever came and went before.
    #[test]
    fn weights_are_relative_to_the_least_of_the_buffer(
        beta in 0.0..2.0_f64,
        batches in collection::vec((1..=4_u64, any::<u64>(), 0.0..9.0_f32), 1..20),
    ) {
        let (alpha, eps) = (0.7, 1e-3);
        let mut draws = draws(Prioritised::new(alpha, beta).eps(eps));
        let mut shares = BTreeMap::new();
        let (mut live, mut largest) = (0..0, 1.0_f32);
        for (frames, which, priority) in batches {
            let share = |priority: f32| (f64::from(priority) + eps).powf(alpha);
            let new = live.end..live.end + frames;
            let start = new.end.saturating_sub(CAPACITY as u64).max(live.start);
            if start > live.start {
                draws.evict(live.start..start);
            }
            draws.append(new.clone(), None);
            live = start..new.end;
            shares.extend(new.map(|id| (id, share(largest))));
            shares.retain(|id, _| live.contains(id));
            let id = live.start + which % (live.end - live.start);
            draws.priorities().unwrap().update(&live, &[id], &[priority]).unwrap();
            shares.insert(id, share(priority));
            largest = largest.max(priority);

            let weights: Vec<f64> = shares.values().map(|p| p.powf(-beta)).collect();
            let most = weights.iter().copied().fold(0.0, f64::max);
            let drawn = draws.draw(5, &live).unwrap();
            for (id, got) in drawn.ids.iter().zip(drawn.weights.unwrap()) {
                let expected = weights[(id - live.start) as usize] / most;
                prop_assert!((f64::from(got) - expected).abs() < 1e-6, "{} {}", got, expected);
            }
        }
    }
}

#[test]
fn new_frames_get_the_largest_priority_seen() {
    let mut draws = draws(Prioritised::new(1.0, 1.0).eps(0.0));
    draws.append(0..2, None);
    let update = draws.priorities().unwrap();
    update.update(&(0..2), &[0, 0], &[9.0, 3.0]).unwrap();
    draws.append(2..4, None);
    let ids = draws.draw(20_000, &(0..4)).unwrap().ids;
    let expected = [3.0, 1.0, 9.0, 9.0].map(|share| share / 22.0);
    assert_likely(&count(ids), (0..4).zip(expected));
}

#[test]
fn priorities_of_overwritten_frames_are_ignored() {
    let mut draws = draws(Prioritised::new(1.0, 1.0));
    draws.append(0..8, None);
    draws.evict(0..2);
    draws.append(8..10, None);
    let update = draws.priorities().unwrap();
    let live = 2..10;
    update.update(&live, &[0, 1, 10], &[1e9, 1e9, 1e9]).unwrap();
    let ids = draws.draw(20_000, &live).unwrap().ids;
    assert_likely(&count(ids), live.map(|id| (id, 1.0 / 8.0)));
}

#[test]
fn bad_priorities_change_nothing() {
    let mut draws = draws(Prioritised::new(2.0, 1.0).eps(0.0));
    draws.append(0..2, None);
    let update = draws.priorities().unwrap();
    for bad in [-1.0, f32::NAN, f32::INFINITY] {
        let refused = update.update(&(0..2), &[0, 1], &[5.0, bad]);
        assert!(matches!(refused, Err(Error::Priority { .. })), "{bad}");
    }
    let refused = update.update(&(0..2), &[0, 1], &[5.0]);
    assert!(matches!(refused, Err(Error::PriorityCount { .. })));
    let ids = draws.draw(20_000, &(0..2)).unwrap().ids;
    assert_likely(&count(ids), [(0, 0.5), (1, 0.5)]);

    let update = draws.priorities().unwrap();
    update.update(&(0..2), &[0, 1], &[0.0, 0.0]).unwrap();
    let refused = draws.draw(1, &(0..2));
    assert!(matches!(refused, Err(Error::NothingToSample { .. })));
}

#[test]
fn settings_of_samplers_are_checked_when_building() {
    let cases: [(Sampler, &str); 9] = [
        (Prioritised::new(-1.0, 0.0).into(), "`alpha` is -1"),
        (Prioritised::new(1.0, f64::NAN).into(), "`beta` is NaN"),
        (Prioritised::new(1.0, 0.0).eps(-0.1).into(), "`eps` is -0.1"),
        (Prioritised::new(9e9, 0.0).eps(1.0).into(), "priorities"),
        (Slices::of("other").slice_len(1).into(), "no column `other`"),
        (Slices::of("reward").slice_len(1).into(), "cannot number"),
        (Slices::of("trajectory").into(), "set `num_slices` or"),
        (Slices::of("trajectory").slice_len(0).into(), "at least 1"),
        (Slices::of("trajectory").num_slices(0).into(), "at least 1"),
    ];
    for (sampler, expected) in cases {
        let refused = Draws::new(&sampler, 0, &schema(), CAPACITY).err();
        let message = refused.expect(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
    let mut uniform = draws(Sampler::Uniform);
    assert!(matches!(uniform.priorities(), Err(Error::NoPriorities)));
}

fn numbers(numbers: &[i64]) -> Vec<u8> {
    numbers.iter().flat_map(|it| it.to_le_bytes()).collect()
}

#[test]
fn slices_are_drawn_alike_by_trajectory_and_start() {
    let mut draws = draws(Slices::of("trajectory").slice_len(2));
    // Trajectory -3 is too short, 7 has 3 steps, 9 has 4.
    draws.append(0..5, Some(&numbers(&[7, 7, 9, 9, -3])));
    draws.append(5..8, Some(&numbers(&[7, 9, 9])));
    let drawn = draws.draw(40_000, &(0..8)).unwrap();
    assert_eq!(drawn.mask, None);
    let (slices, _) = drawn.ids.as_chunks::<2>();
    let sevens = [[0, 1], [1, 5]].map(|slice| (slice, 1.0 / 4.0));
    let nines = [[2, 3], [3, 6], [6, 7]].map(|slice| (slice, 1.0 / 6.0));
    let expected = sevens.into_iter().chain(nines);
    assert_likely(&count(slices.iter().copied()), expected);
}

#[test]
fn short_slices_are_padded_with_a_mask() {
    let mut draws = draws(Slices::of("trajectory").num_slices(4).strict_len(false));
    draws.append(0..4, Some(&numbers(&[1, 2, 1, 1])));
    let mut slices = Vec::new();
    for _ in 0..200 {
        let drawn = draws.draw(12, &(0..4)).unwrap();
        let mask = drawn.mask.unwrap();
        let whole = drawn.ids.chunks(3).zip(mask.chunks(3));
        slices.extend(whole.map(|(ids, mask)| (ids.to_vec(), mask.to_vec())));
    }
    let expected = [
        ((vec![0, 2, 3], vec![true; 3]), 0.5),
        ((vec![1, 1, 1], vec![true, false, false]), 0.5),
    ];
    assert_likely(&count(slices), expected);
}

#[test]
fn slice_counts_are_checked_against_the_sample() {
    let of = || Slices::of("trajectory");
    let cases = [
        (of().slice_len(3), 12, true),
        (of().slice_len(3), 13, false),
        (of().num_slices(3), 12, true),
        (of().num_slices(3), 2, false),
        (of().num_slices(3).slice_len(4), 12, true),
        (of().num_slices(4).slice_len(4), 12, false),
        (of().slice_len(3), 0, false),
    ];
    for (settings, n, fits) in cases {
        let mut draws = draws(settings.clone());
        draws.append(0..8, Some(&numbers(&[1; 8])));
        let drawn = draws.draw(n, &(0..8));
        match drawn {
            Ok(drawn) => assert!(fits && drawn.ids.len() == n, "{settings:?}"),
            Err(error) => assert!(
                !fits && matches!(error, Error::SliceCount { .. }),
                "{settings:?}: {error}"
            ),
        }
    }
}
