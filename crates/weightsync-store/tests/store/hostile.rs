//! Names that somebody else has chosen.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use weightsync_core::Version;
use weightsync_engine::Snapshot;
use weightsync_store::{ModelVersion, SaveOptions, Store, StoreError, Which, Writer};

use crate::weights::{MODEL, at, number, weights};

const ELEMENTS: usize = 64;

fn entries(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).expect("a directory");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    names
        .map(|name| name.to_string_lossy().into_owned())
        .collect()
}

pub fn models_stay_inside_the_store() {
    let outside = tempfile::tempdir().expect("a directory");
    let dir = outside.path().join("store");
    let store = Store::open(dir.to_str().expect("a plain path")).expect("a path");
    let mut writer = Writer::claim(&store, SaveOptions::default()).expect("a store");
    let long = "x".repeat(255);
    let names = [
        "../x",
        "../../x",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "a\\b",
        "Policy",
        "policy",
        "POLICY",
        "poli cy",
        "Größe",
        "模型",
        "🦀",
        "con",
        "weights.delta",
        &long,
        &long[1..],
    ];
    let run = writer.run();
    let saving: Vec<_> = (1..)
        .zip(names)
        .map(|(number, name)| {
            let weights = weights(number, ELEMENTS);
            Snapshot::of(name, &weights, run, Version(number)).expect("a model may have this name")
        })
        .collect();
    writer.save(&saving).expect("each has a place");
    let loaded = store.load(&Which::Newest).expect("a version");
    for saved in &saving {
        let mut members = loaded.set.members().iter();
        let found = members.find(|one| one.snapshot.model() == saved.model());
        let found = &found.expect("every model").snapshot;
        assert_eq!(number(found), Ok(saved.version().0), "{}", saved.model());
    }
    let known = ["data", "head.json", "leases", "lock", "specs", "versions"];
    assert_eq!(entries(&dir), known.map(str::to_owned).into());
    assert_eq!(entries(outside.path()), ["store".to_owned()].into());
    let data = entries(&dir.join("data"));
    let data = dir.join("data").join(data.first().expect("one version"));
    let dirs: BTreeSet<_> = entries(&data)
        .iter()
        .map(|name| name.to_lowercase())
        .collect();
    assert_eq!(
        dirs.len(),
        names.len(),
        "one directory each, whatever the case: {dirs:?}"
    );
}

pub fn addresses_are_refused_or_used_as_they_are() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().to_str().expect("a plain path");
    for bad in ["", "a\0b", "a\nb", "\u{7f}", "ftp://host/x", "file://"] {
        let error = Store::open(bad).expect_err(bad);
        assert!(matches!(error, StoreError::Address { .. }), "{error}");
    }
    for good in ["Größe 模型", "a/../b", "-rf", "x,y=z"] {
        let path = format!("{root}/{good}");
        let store = Store::open(&path).expect(good);
        let mut writer = Writer::claim(&store, SaveOptions::default()).expect(good);
        writer
            .save_weights(MODEL, &weights(3, ELEMENTS))
            .expect(good);
        assert!(Path::new(&path).join("head.json").is_file(), "{good}");
        store.load(&Which::Newest).expect(good);
    }
    // Too long for any file system, and for a part of a path: both say so.
    for long in ["x/".repeat(32 << 10), "x".repeat(64 << 10)] {
        let store = Store::open(&format!("{root}/{long}")).expect("a path");
        let error = Writer::claim(&store, SaveOptions::default()).expect_err("it is too long");
        assert!(
            error.to_string().contains("too long"),
            "{}",
            error.to_string().len()
        );
        let error = store.load(&Which::Newest).expect_err("nothing is there");
        assert!(error.to_string().contains("too long"));
    }
}

pub fn version_names_stay_names() {
    let outside = tempfile::tempdir().expect("a directory");
    let dir = outside.path().join("store");
    let store = Store::open(dir.to_str().expect("a plain path")).expect("a path");
    let mut writer = Writer::claim(&store, SaveOptions::default()).expect("a store");
    writer
        .save_weights(MODEL, &weights(1, ELEMENTS))
        .expect("room");
    let long = "x".repeat(101);
    for bad in [
        "../x",
        "/etc/passwd",
        "",
        ".",
        "..",
        ".x",
        "a b",
        "a/b",
        "é",
        "a\0",
        &long,
    ] {
        let error = store.set_name(bad, &at(Version(1))).expect_err(bad);
        assert!(matches!(error, StoreError::Name { .. }), "{error}");
        let error = store.load(&Which::Named(bad.into())).expect_err(bad);
        assert!(matches!(error, StoreError::NoSuchName { .. }), "{error}");
    }
    store
        .set_name(&long[1..], &at(Version(1)))
        .expect("as long as it may be");
    let unknown = ModelVersion {
        model: None,
        version: Version(9),
    };
    let error = store
        .set_name("best", &unknown)
        .expect_err("there is no version 9");
    assert!(matches!(error, StoreError::NoSuchVersion { .. }), "{error}");
    assert_eq!(entries(outside.path()), ["store".to_owned()].into());
}

pub fn saves_are_of_each_model_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path().to_str().expect("a plain path")).expect("a path");
    let mut writer = Writer::claim(&store, SaveOptions::default()).expect("a store");
    let snapshot = |version| {
        let weights = weights(version, ELEMENTS);
        Snapshot::of(MODEL, &weights, writer.run(), Version(version)).expect("plain tensors")
    };
    let (first, second) = (snapshot(1), snapshot(2));
    for wrong in [vec![], vec![first.clone(), second]] {
        let error = writer.save(&wrong).expect_err("it is no version");
        assert!(matches!(error, StoreError::ModelsOnce { .. }), "{error}");
    }
    writer.save(&[first]).expect("room");
    store.load(&Which::Newest).expect("the store is as it was");
}
