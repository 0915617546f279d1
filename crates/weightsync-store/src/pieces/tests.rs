//! Versions of several pieces, full ones and some that are made of changes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use weightsync_engine::{Snapshot, Tensors};

use super::*;
use crate::format::DATA;
use crate::progress::Work;
use crate::store::ModelVersion;
use crate::writer::{SaveOptions, Writer};

/// Three pieces of floats, and small tensors around them: their order in a file is another one.
fn weights(version: u64) -> Tensors {
    const FLOATS: usize = 3 * SPAN as usize / 4 - 1000;
    let mut values: Vec<f32> = (0..FLOATS).map(|at| at as f32).collect();
    for (at, value) in values.iter_mut().step_by(1000).enumerate() {
        *value = (at as u64 * version) as f32;
    }
    let mut weights = Tensors::new();
    weights
        .insert("small", [3], vec![version as u8; 3])
        .unwrap();
    weights.insert("none", [0], Vec::<f32>::new()).unwrap();
    weights.insert("large", [FLOATS as u64], values).unwrap();
    weights.insert("a", [5], vec![version as u16; 5]).unwrap();
    weights
}

/// A store with so many versions, and its writer.
fn store(dir: &Path, count: u64, keep: &str) -> (Store, Writer) {
    let store = Store::open(dir.to_str().unwrap()).unwrap();
    let options = SaveOptions {
        keep: keep.parse().unwrap(),
        ..SaveOptions::default()
    };
    let mut writer = Writer::claim(&store, options).unwrap();
    for version in 1..=count {
        writer.save_weights("policy", &weights(version)).unwrap();
    }
    (store, writer)
}

fn of(version: u64) -> Which {
    Which::Exactly(ModelVersion::from(Version(version)))
}

/// All pieces, one after the other.
fn whole(weights: &StoredWeights) -> Result<Vec<u8>> {
    let pieces = delta_file::spans(&weights.spec().layout);
    let pieces = (0..pieces).map(|piece| weights.piece(piece));
    Ok(pieces.collect::<Result<Vec<_>>>()?.concat())
}

#[test]
fn pieces_are_those_of_the_loaded_version() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _writer) = store(dir.path(), 3, "all");
    let listed = store.versions().unwrap().versions;
    let deltas: Vec<_> = listed
        .iter()
        .map(|version| version.models[0].deltas)
        .collect();
    assert_eq!(deltas, [0, 1, 2]);
    for version in 1..=3 {
        let loaded = store.load(&of(version)).unwrap();
        let loaded: &Snapshot = loaded.set.only().unwrap();
        let weights = store.weights(&of(version)).unwrap().remove(0);
        assert_eq!(weights.version(), loaded.version());
        assert_eq!(weights.run(), loaded.run());
        assert_eq!(weights.spec().layout, *loaded.layout());
        assert!(whole(&weights).unwrap() == loaded.bytes());
    }
}

#[test]
fn piece_reads_no_more_than_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _writer) = store(dir.path(), 1, "all");
    let moved = Arc::new(AtomicU64::new(0));
    let count = moved.clone();
    let store = store.with_progress(move |work| {
        if let Work::Moved(bytes) = work {
            count.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(())
    });
    let weights = store.weights(&of(1)).unwrap().remove(0);
    let read = || moved.swap(0, Ordering::Relaxed);
    // The headers of the files.
    assert!(read() < 4096);
    weights.compare().unwrap();
    assert_eq!(read(), weights.spec().layout.payload_bytes());
    for _ in 0..2 {
        assert_eq!(weights.piece(1).unwrap().len() as u64, StoredWeights::PIECE);
        assert_eq!(read(), StoredWeights::PIECE);
    }
}

#[test]
fn damage_is_found_before_the_first_piece_and_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _writer) = store(dir.path(), 2, "all");
    let file = |name: &str| {
        let found = walk(&dir.path().join(DATA));
        let found = found.into_iter().find(|path| path.ends_with(name));
        found.unwrap_or_else(|| panic!("no {name}"))
    };
    let flip = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    let anchor = file("model.safetensors");
    let weights = store.weights(&of(1)).unwrap().remove(0);
    flip(&anchor);
    let error = weights.piece(0).unwrap_err();
    let damage = error.damage().unwrap_or_else(|| panic!("{error}"));
    assert!(damage.file.ends_with("model.safetensors"), "{error}");
    flip(&anchor);
    assert!(whole(&weights).is_ok());
    flip(&anchor);
    let error = whole(&weights).unwrap_err();
    assert!(error.to_string().contains("have changed"), "{error}");
}

#[test]
fn files_stay_while_their_pieces_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let (store, mut writer) = store(dir.path(), 1, "1");
    let read = store.weights(&of(1)).unwrap().remove(0);
    let loaded = store.load(&of(1)).unwrap();
    for version in 2..5 {
        writer.save_weights("policy", &weights(version)).unwrap();
    }
    assert!(whole(&read).unwrap() == loaded.set.only().unwrap().bytes());
}

/// The files below a directory.
fn walk(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap();
    let each = entries.flat_map(|entry| {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => walk(&path),
            false => vec![path],
        }
    });
    each.collect()
}
