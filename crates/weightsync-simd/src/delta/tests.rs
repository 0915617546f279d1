use proptest::prelude::*;

use super::*;
use crate::testing::{Arena, noise};

/// A block and one that differs from it in some of its elements, by patterns of every kind.
fn pair<W: Word>(elements: usize, seed: u64, density: u64) -> (Vec<u8>, Vec<u8>) {
    let old = noise(elements * W::BYTES, seed);
    let other = noise(elements * W::BYTES, seed + 1);
    let dice = noise(elements * 8, seed + 2);
    let mut new = old.clone();
    for (index, dice) in dice.chunks_exact(8).enumerate() {
        if u64::from_le_bytes(dice.try_into().expect("eight bytes")) % 1000 < density {
            let at = index * W::BYTES..(index + 1) * W::BYTES;
            new[at.clone()].copy_from_slice(&other[at]);
        }
    }
    (old, new)
}

/// What `compare` has to find, said plainly.
fn plainly<W: Word>(old: &[u8], new: &[u8]) -> Vec<(u16, W)> {
    let pairs = old.chunks_exact(W::BYTES).zip(new.chunks_exact(W::BYTES));
    let steps = pairs.map(|(old, new)| W::read(new).minus(W::read(old)));
    steps
        .enumerate()
        .filter(|(_, step)| *step != W::default())
        .map(|(place, step)| (place as u16, step))
        .collect()
}

fn all_paths<W: Word>(elements: usize, offset: usize, seed: u64, density: u64) {
    let (old, new) = pair::<W>(elements, seed, density);
    let expected = plainly::<W>(&old, &new);
    for path in DeltaPath::available() {
        let mut masks = vec![u64::MAX; elements.div_ceil(64)];
        let mut places = vec![0; elements + SLACK];
        let mut steps = vec![W::default(); elements + SLACK];
        let changes =
            compare_with::<W, true>(path, &old, &new, &mut masks, &mut places, &mut steps);
        let found = places.iter().copied().zip(steps.iter().copied());
        let found: Vec<(u16, W)> = found.take(changes).collect();
        assert!(found == expected, "{path:?} finds something else");
        let set = |place: usize| masks[place / 64] >> (place % 64) & 1 == 1;
        let by_mask: Vec<u16> = (0..masks.len() * 64)
            .filter(|&place| set(place))
            .map(|place| place as u16)
            .collect();
        assert_eq!(by_mask, places[..changes], "{path:?}");
        let mut again = vec![0; masks.len() * 64 + SLACK];
        assert_eq!(ones_with(path, &masks, &mut again), changes);
        assert_eq!(again[..changes], places[..changes], "{path:?}");
        assert_eq!(count_ones(&masks), changes);

        // The same without the places.
        let mut other = vec![u64::MAX; elements.div_ceil(64)];
        let mut by = vec![W::default(); elements + SLACK];
        let dense = compare_with::<W, false>(path, &old, &new, &mut other, &mut [], &mut by);
        assert_eq!((dense, &other), (changes, &masks), "{path:?}");
        assert!(by[..changes] == steps[..changes], "{path:?}");

        let mut image = Arena::new(offset, old.len());
        image.bytes_mut().copy_from_slice(&old);
        prefetch::<W>(image.bytes(), &places[..changes]);
        assert_eq!(
            expand_with(path, image.bytes_mut(), &masks, &steps),
            changes
        );
        assert!(image.bytes() == new, "{path:?} makes something else");
        assert!(image.guards_intact(), "{path:?} writes next to its block");
    }
}

proptest! {
    #[test]
    fn every_path_finds_and_applies_the_same_changes(
        elements in 0_usize..700,
        offset in 0_usize..64,
        seed in 0_u64..1 << 32,
        density in prop_oneof![Just(0), Just(11), Just(100), Just(1000)],
    ) {
        all_paths::<u8>(elements, offset, seed, density);
        all_paths::<u16>(elements, offset, seed, density);
        all_paths::<u32>(elements, offset, seed, density);
        all_paths::<u64>(elements, offset, seed, density);
    }
}

#[test]
fn a_whole_block_has_its_last_place() {
    for density in [0, 11, 1000] {
        all_paths::<u8>(BLOCK, 0, 1, density);
        all_paths::<u16>(BLOCK, 1, 2, density);
        all_paths::<u32>(BLOCK, 2, 3, density);
        all_paths::<u64>(BLOCK, 3, 4, density);
    }
}

#[test]
fn bits_beyond_the_last_element_count_for_nothing() {
    for path in DeltaPath::available() {
        let mut bytes = vec![5_u8; 70];
        let steps = vec![1_u8; 70 + SLACK];
        assert_eq!(expand_with(path, &mut bytes, &[u64::MAX; 2], &steps), 70);
        assert_eq!(bytes, [6; 70]);
    }
}

#[test]
#[should_panic(expected = "too few steps")]
fn steps_that_do_not_suffice_are_refused() {
    expand(&mut [0_u8; 64], &[u64::MAX], &[1_u8; 64]);
}

#[test]
#[should_panic(expected = "too little room")]
fn outputs_without_slack_are_refused() {
    compare::<u16>(&[0; 4], &[1; 4], &mut [0], &mut [0; 2 + SLACK], &mut [0; 2]);
}
