use proptest::prelude::*;

use super::*;
use crate::testing::{Noise, noise};

const BF16: Exponents = Exponents {
    shift: 7,
    mask: 255,
    top: 123,
};

#[test]
fn the_class_is_how_far_the_exponent_is_below_the_top() {
    let exponents = [123, 124, 255, 122, 109, 108, 107, 0];
    let words: Vec<u8> = exponents
        .iter()
        .flat_map(|exponent: &u16| (exponent << 7 | 0x8055).to_le_bytes())
        .collect();
    let mut out = [99; 8];
    classes::<u16>(&words, BF16, &mut out);
    assert_eq!(out, [0, 0, 0, 1, 14, 15, 15, 15]);
}

fn every_path_classes<W: Word>(elements: usize, seed: u64, exponents: Exponents) {
    let bytes = noise(elements * W::BYTES, seed);
    let mut expected = vec![0; elements];
    scalar::classes::<W>(&bytes, exponents, &mut expected);
    for path in DeltaPath::available() {
        let mut out = vec![99; elements];
        classes_with::<W>(path, &bytes, exponents, &mut out);
        assert_eq!(out, expected, "{path:?}");
    }
}

proptest! {
    #[test]
    fn every_path_gives_the_same_classes(
        elements in 0_usize..300,
        seed in 0_u64..1 << 32,
        top in prop_oneof![Just(0_u64), Just(17), Just(123), Just(255), Just(2047)],
    ) {
        let exponents = |shift, mask| Exponents { shift, mask, top };
        every_path_classes::<u8>(elements, seed, exponents(3, 15));
        every_path_classes::<u16>(elements, seed, exponents(7, 255));
        every_path_classes::<u16>(elements, seed, exponents(0, 0));
        every_path_classes::<u32>(elements, seed, exponents(23, 255));
        every_path_classes::<u64>(elements, seed, exponents(52, 2047));
    }

    #[test]
    fn ranks_lead_back_to_their_places(
        lengths in proptest::collection::vec(0_usize..400, 1..4),
        seed in 0_u64..1 << 32,
        kinds in 1_u64..=16,
        every in 1_u64..80,
    ) {
        let mut dice = Noise(seed);
        let mut roll = |of: u64| dice.next().expect("endless") % of;
        let blocks: Vec<(Vec<u8>, Vec<u16>)> = lengths
            .iter()
            .map(|&length| {
                let classes = (0..length).map(|_| roll(kinds) as u8).collect();
                let places = (0..length as u16).filter(|_| roll(every) == 0).collect();
                (classes, places)
            })
            .collect();
        for path in DeltaPath::available() {
            let mut lists = vec![Vec::new(); CLASSES];
            let mut totals = [0; CLASSES];
            for (classes, places) in &blocks {
                let mut ranks = vec![0; places.len()];
                rank_with(path, classes, places, &mut totals, &mut ranks);
                for (&place, &rank) in places.iter().zip(&ranks) {
                    lists[usize::from(classes[usize::from(place)])].push(rank);
                }
            }
            let all: u32 = totals.iter().sum();
            prop_assert_eq!(all as usize, lengths.iter().sum::<usize>());
            let ranks: [&[u32]; CLASSES] = core::array::from_fn(|class| &lists[class][..]);
            let (mut again, mut taken) = ([0; CLASSES], [0; CLASSES]);
            for (classes, places) in &blocks {
                let mut found = vec![0; classes.len()];
                let (totals, taken) = (&mut again, &mut taken);
                let count = select_with(path, classes, &ranks, totals, taken, &mut found);
                found.truncate(count);
                found.sort_unstable();
                prop_assert_eq!(&found, places, "{:?}", path);
            }
            prop_assert_eq!(totals, again);
        }
    }
}

#[test]
#[should_panic(expected = "do not ascend")]
fn places_behind_the_block_are_refused() {
    rank(&[0; 70], &[71], &mut [0; CLASSES], &mut [0]);
}
