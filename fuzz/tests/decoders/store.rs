//! What lies in a store: the head, manifests, and files with changes.

use std::sync::{Mutex, PoisonError};

use weightsync_fuzz::fuzz;
use weightsync_store::fuzz;

#[test]
fn store_files() {
    for valid in fuzz::valid() {
        assert_eq!(fuzz::files(&valid), 1);
    }
    fuzz!("store_files", fuzz::valid(), |bytes: &[u8]| {
        fuzz::files(bytes);
    });
}

/// The checksum stops nearly every change; what it guards must bear anything, too.
#[test]
fn store_values() {
    for valid in fuzz::valid_values() {
        assert_eq!(fuzz::values(&valid), 1);
    }
    fuzz!("store_values", fuzz::valid_values(), |bytes: &[u8]| {
        fuzz::values(bytes);
    });
}

#[test]
fn store_words() {
    let valid = fuzz::valid_words().map(<[u8]>::to_vec);
    for valid in &valid {
        assert!(fuzz::words(valid) > 0, "{}", String::from_utf8_lossy(valid));
    }
    fuzz!("store_words", valid, |bytes: &[u8]| {
        fuzz::words(bytes);
    });
}

#[test]
fn store_delta() {
    let valid = fuzz::valid_deltas();
    // Grown before anything is counted.
    let scratch = Mutex::new(fuzz::scratch());
    let read = |bytes: &[u8]| {
        let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
        fuzz::delta(bytes, &mut scratch)
    };
    assert!(valid.iter().all(|valid| read(valid)));
    fuzz!("store_delta", valid, |bytes: &[u8]| {
        read(bytes);
    });
}
