use super::*;
use crate::copy::fence;
use crate::testing::{Arena, noise};

/// CRC-64/NVME bit by bit, from its definition.
fn reference(bytes: &[u8]) -> u64 {
    let polynomial = 0xad93_d235_94c9_3659_u64.reverse_bits();
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u64::from(byte), |crc, _| {
            if crc & 1 == 1 {
                (crc >> 1) ^ polynomial
            } else {
                crc >> 1
            }
        })
    })
}

fn check(path: CrcPath, streams: bool, dst_offset: usize, src_offset: usize, len: usize) {
    let source = noise(src_offset + len, 3);
    let source = &source[src_offset..];
    let mut arena = Arena::new(dst_offset, len);
    let mut crc = Crc64::new();
    // SAFETY: the arena has `len` bytes at its pointer, and so has the source.
    unsafe {
        copy_crc_unfenced(
            &mut crc.0,
            path,
            streams,
            arena.as_mut_ptr(),
            source.as_ptr(),
            len,
        )
    };
    fence();
    let case = format!("{path:?} streams {streams} {dst_offset} {src_offset} {len}");
    assert!(arena.bytes() == source, "{case}");
    assert!(arena.guards_intact(), "wrote outside: {case}");
    assert_eq!(crc.value(), crc64(source), "{case}");
}

#[test]
fn the_checksum_is_crc64_nvme() {
    for len in (0..300).chain([1000, 5000]) {
        let bytes = noise(len, 4);
        assert_eq!(crc64(&bytes), reference(&bytes), "{len} bytes");
    }
}

#[test]
fn every_path_checksums_what_stays_where_it_is() {
    for path in CrcPath::available() {
        for len in [0, 1, FOLD_FROM - 1, FOLD_FROM, FOLD_FROM + 1, 5000, 70_001] {
            for offset in [0, 1, 31] {
                let bytes = &noise(offset + 2 * len, 5)[offset..];
                let mut crc = Crc64::new();
                // In two parts: the second begins with a state.
                for part in [&bytes[..len], &bytes[len..]] {
                    update(&mut crc.0, path, part);
                }
                assert_eq!(crc.value(), reference(bytes), "{path:?} {len} at {offset}");
            }
        }
    }
}

#[test]
fn every_path_copies_and_checksums_every_short_length() {
    for path in CrcPath::available() {
        for streams in [false, true] {
            for len in 0..300 {
                for (dst_offset, src_offset) in [(0, 0), (1, 0), (0, 1), (17, 5), (63, 63)] {
                    check(path, streams, dst_offset, src_offset, len);
                }
            }
        }
    }
}

#[test]
fn every_path_checksums_around_group_and_block_edges() {
    for path in CrcPath::available() {
        for streams in [false, true] {
            for edge in [512, 2048, 2560, 4096, BLOCK, 3 * BLOCK] {
                for len in [edge - 1, edge, edge + 1, edge + 63, edge + 64, edge + 577] {
                    check(path, streams, 0, 0, len);
                    check(path, streams, 33, 7, len);
                }
            }
            for offset in 0..64 {
                check(
                    path,
                    streams,
                    offset,
                    (offset * 5 + 1) % 64,
                    FOLD_FROM + 63 + offset * 17,
                );
            }
            check(path, streams, 3, 1, (2 << 20) + 12_345);
        }
    }
}

#[test]
fn parts_combine_into_the_whole() {
    let bytes = noise(10_000, 5);
    for cut in [0, 1, 63, 64, 4096, 9_999, 10_000] {
        let (first, second) = bytes.split_at(cut);
        let combined = crc64_combine(crc64(first), crc64(second), second.len() as u64);
        assert_eq!(combined, crc64(&bytes), "cut at {cut}");
        let mut crc = Crc64::default();
        crc.update(first);
        crc.update(second);
        assert_eq!(crc.value(), crc64(&bytes), "cut at {cut}");
    }
}

#[test]
fn slices_are_checksummed_around_the_threshold() {
    for len in [
        0,
        16 << 10,
        crate::STREAM_THRESHOLD,
        crate::STREAM_THRESHOLD + 77,
    ] {
        let source = noise(len, 6);
        let mut copy = vec![0; len];
        assert_eq!(stream_copy_crc_slice(&mut copy, &source), crc64(&source));
        assert!(copy == source, "{len} bytes");
    }
}

#[test]
fn transfer_parts_are_copied_and_checksummed_each() {
    for total in [10_000, crate::STREAM_THRESHOLD + 999] {
        let source = noise(total, 7);
        let mut copy = vec![0; total];
        let copier = Copier::new(total);
        let mut whole = Crc64::new();
        for (index, part) in source.chunks(1000).enumerate() {
            let to = &mut copy[index * 1000..][..part.len()];
            // SAFETY: source and destination are `part.len()` bytes; the copier is dropped below.
            let crc = unsafe { copier.copy_crc(to.as_mut_ptr(), part.as_ptr(), part.len()) };
            assert_eq!(crc, crc64(part), "part {index} of {total} bytes");
            // SAFETY: likewise.
            unsafe { copier.copy_update(&mut whole, to.as_mut_ptr(), part.as_ptr(), part.len()) };
        }
        drop(copier);
        assert_eq!(whole.value(), crc64(&source), "{total} bytes");
        assert!(copy == source, "{total} bytes");
    }
}
