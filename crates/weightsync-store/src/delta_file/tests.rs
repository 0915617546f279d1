use proptest::prelude::*;
use weightsync_core::Dtype;

use super::*;

fn layout(bytes: u64) -> Layout {
    Layout::new([("weight".to_owned(), Dtype::U8, vec![bytes])]).unwrap()
}

fn apply_all(layout: &Layout, file: &[u8], image: &mut [u8]) -> Result<(), String> {
    let header = DeltaIndex::header_bytes(layout).min(file.len());
    let index = DeltaIndex::read(layout, &file[..header], file.len() as u64)?;
    let mut scratch = Scratch::new();
    for (span, place) in image.chunks_mut(SPAN as usize).enumerate() {
        let (at, len) = index.part(span);
        let part = &file[at as usize..][..len];
        let applied = index.apply(layout, span, part, place, &mut scratch);
        applied.map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[test]
fn delta_file_brings_the_newer_version() {
    let layout = layout(3 * SPAN + 640);
    let old: Vec<u8> = (0..layout.bytes()).map(|at| (at % 251) as u8).collect();
    let mut new = old.clone();
    new[7] ^= 1; // a change in the first span
    let last = 3 * SPAN as usize;
    for byte in &mut new[last..] {
        *byte = byte.wrapping_mul(73).wrapping_add(5); // everything in the last
    }
    let made = make(&layout, Codec::Thin, &old, &new, u64::MAX).unwrap();
    let mut image = old.clone();
    apply_all(&layout, &made.bytes, &mut image).unwrap();
    assert!(image == new);
    assert!(made.bytes.len() < 2000, "{}", made.bytes.len());
    assert_eq!(made.elements, layout.bytes());
    let changed = old.iter().zip(&new).filter(|(old, new)| old != new).count();
    assert_eq!(made.changed, changed as u64);
    assert_eq!(make(&layout, Codec::Thin, &old, &new, 100), None);
}

#[test]
fn delta_file_of_nothing_is_a_header() {
    let layout = layout(SPAN);
    let image = vec![3; SPAN as usize];
    let made = make(&layout, Codec::Thin, &image, &image, u64::MAX).unwrap();
    assert_eq!(made.bytes.len(), DeltaIndex::header_bytes(&layout));
    let empty = Layout::new([]).unwrap();
    let made = make(&empty, Codec::Thin, &[], &[], u64::MAX).unwrap();
    assert!(apply_all(&empty, &made.bytes, &mut []).is_ok());
}

proptest! {
    #[test]
    fn delta_file_survives_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let layout = layout(640);
        let _ = apply_all(&layout, &bytes, &mut [0; 640]);
        let mut likely = make(&layout, Codec::Thin, &[0; 640], &[1; 640], u64::MAX).unwrap().bytes;
        for (at, byte) in bytes.iter().enumerate() {
            if at < likely.len() && byte & 7 == 0 {
                likely[at] ^= byte >> 3;
            }
        }
        let _ = apply_all(&layout, &likely, &mut [0; 640]);
    }
}
