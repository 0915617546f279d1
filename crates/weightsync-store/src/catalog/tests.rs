use std::collections::BTreeSet;

use proptest::prelude::*;
use weightsync_core::{Digest, ModelId};

use super::*;
use crate::format::{Anchor, By, Hash, Stored, Value, seal};
use crate::storage::Directory;
use crate::storage::faulty::{Faulty, InjectedFault};

fn place(epoch: u64, sequence: u64) -> VersionKey {
    VersionKey {
        epoch: Epoch(epoch),
        sequence,
    }
}

/// Puts the manifest of a version there, which has the number of its place.
fn put(storage: &dyn Storage, place: VersionKey, previous: Option<VersionKey>) {
    let manifest = StoreManifest {
        place,
        previous,
        run: Run {
            epoch: place.epoch,
            id: [1; 16],
        },
        by: By {
            host: "trainer".into(),
            pid: 1,
        },
        at: 0,
        names: [("best".into(), place)].into(),
        models: vec![Stored {
            model: ModelId::new("policy").unwrap(),
            version: Version(place.sequence),
            digest: Digest([0; 16]),
            spec: Hash::of(b"spec"),
            changed: true,
            changes: None,
            anchor: Anchor {
                at: place,
                files: Vec::new(),
            },
            deltas: Vec::new(),
        }],
    };
    storage.put(&place.manifest(), &seal(&manifest)).unwrap();
}

/// The versions that are found, and the head that a writer writes of them.
fn next(storage: &dyn Storage) -> (Vec<VersionKey>, Head) {
    let catalog = Catalog::read(storage).unwrap();
    let head = catalog.next_head(storage, [2; 16], None).unwrap();
    assert_eq!(Value::check(&head), Ok(()), "{head:?}");
    let has: Vec<_> = catalog.listed.iter().filter(|it| head.has(**it)).collect();
    assert_eq!(has, catalog.places.iter().collect::<Vec<_>>());
    (catalog.places, head)
}

/// A writer that was replaced has left the number of a version that its successor saved.
#[test]
fn left_manifest_is_no_version_after_damage() {
    let dir = tempfile::tempdir().unwrap();
    let storage = Directory::new(dir.path());
    put(&storage, place(1, 5), None);
    put(&storage, place(1, 6), Some(place(1, 5)));
    storage.put(&place(2, 6).manifest(), b"spoilt").unwrap();
    put(&storage, place(3, 7), Some(place(2, 6)));
    let (places, head) = next(&storage);
    assert_eq!(places, [place(1, 5), place(2, 6), place(3, 7)]);
    assert_eq!(head.versions.values().collect::<Vec<_>>(), [&Version(7)]);
}

#[test]
fn head_that_changes_at_each_look_is_read_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let directory = Directory::new(dir.path());
    put(&directory, place(1, 1), None);
    let (places, mut head) = next(&directory);
    head.count = 2;
    directory.put(HEAD, &seal(&head)).unwrap();
    let storage = Faulty::new(directory, InjectedFault::Moving);
    let catalog = Catalog::read(&storage).unwrap();
    assert_eq!(catalog.places, places);
    let [damage] = &catalog.damage[..] else {
        panic!("{:?}", catalog.damage);
    };
    assert!(damage.what.contains("1 of 2 manifests"), "{damage}");
    // Of each look but the last: the head, the list, and the head again.
    assert_eq!(storage.mend(), 4 * 3 + 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_manifests_make_a_head_that_can_be_read(
        places in prop::collection::btree_set((1_u64..5, 1_u64..8), 0..12),
        kinds in prop::collection::vec(0_u8..4, 12),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let storage = Directory::new(dir.path());
        let places: BTreeSet<_> = places.into_iter().map(|(epoch, n)| place(epoch, n)).collect();
        for (at, kind) in places.iter().zip(kinds) {
            let before = places.range(..*at).rev();
            match kind {
                0 => storage.put(&at.manifest(), b"spoilt").unwrap(),
                1 => put(&storage, *at, None),
                2 => put(&storage, *at, before.copied().next()),
                _ => put(&storage, *at, before.copied().nth(1)),
            }
        }
        next(&storage);
    }
}
