use super::*;
use crate::testing::{Arena, noise};

/// Copies over `path` inside guarded buffers and checks the bytes and what surrounds them.
fn check(path: CopyPath, dst_offset: usize, src_offset: usize, len: usize) {
    let source = noise(src_offset + len, 1);
    let mut arena = Arena::new(dst_offset, len);
    // SAFETY: the arena has `len` bytes at its pointer, the source `len` after its offset.
    unsafe { copy_unfenced(path, arena.as_mut_ptr(), source[src_offset..].as_ptr(), len) };
    fence();
    assert!(
        arena.bytes() == &source[src_offset..],
        "{path:?} {dst_offset} {src_offset} {len}"
    );
    assert!(
        arena.guards_intact(),
        "{path:?} wrote outside: {dst_offset} {src_offset} {len}"
    );
}

#[test]
fn every_path_copies_short_lengths_at_any_alignment() {
    for path in CopyPath::available() {
        for len in 0..300 {
            for dst_offset in [0, 1, 16, 33, 63] {
                for src_offset in [0, 1, 40] {
                    check(path, dst_offset, src_offset, len);
                }
            }
        }
        for offset in 0..64 {
            check(path, offset, 0, 1000);
            check(path, 0, offset, 1000);
        }
    }
}

#[test]
fn every_path_copies_large_ranges() {
    for path in CopyPath::available() {
        for len in [
            (512 << 10) - 1,
            (512 << 10) + 64,
            (512 << 10) + 3 * 64 + 63,
            STREAM_THRESHOLD - 1,
            STREAM_THRESHOLD,
            (3 << 20) + 17,
        ] {
            check(path, 5, 11, len);
            check(path, 0, 0, len);
        }
    }
}

#[test]
fn slices_are_copied_below_and_above_the_threshold() {
    for len in [
        0,
        1,
        16 << 10,
        STREAM_THRESHOLD - 1,
        STREAM_THRESHOLD,
        STREAM_THRESHOLD + 1,
    ] {
        let source = noise(len, 2);
        let mut copy = vec![0; len];
        stream_copy_slice(&mut copy, &source);
        assert!(copy == source, "{len} bytes");
    }
}

#[test]
#[should_panic(expected = "lengths differ")]
fn slices_of_different_lengths_are_refused() {
    stream_copy_slice(&mut [0; 3], &[0; 4]);
}

#[test]
fn transfer_size_decides_how_parts_are_stored() {
    assert!(!Copier::new(STREAM_THRESHOLD - 1).streams);
    assert!(Copier::new(STREAM_THRESHOLD).streams);
}

#[test]
fn release_store_publishes_the_whole_copy() {
    use std::sync::atomic::{AtomicPtr, Ordering};
    let len = 2 << 20;
    for round in 0..4 {
        let source = noise(len, round);
        let published = AtomicPtr::new(core::ptr::null_mut());
        let mut copy = vec![0_u8; len];
        let to = copy.as_mut_ptr() as usize;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: `copy` outlives the scope and is read only after the store below.
                unsafe { stream_copy(to as *mut u8, source.as_ptr(), len) };
                published.store(to as *mut u8, Ordering::Release);
            });
            while published.load(Ordering::Acquire).is_null() {
                std::hint::spin_loop();
            }
            let seen = published.load(Ordering::Acquire);
            // SAFETY: the writer is done, as its release store says.
            let seen = unsafe { core::slice::from_raw_parts(seen, len) };
            // The last bytes first: they are the ones a missing fence would leave behind.
            assert!(seen[len - 4096..] == source[len - 4096..], "round {round}");
            assert!(seen == source, "round {round}");
        });
    }
}
