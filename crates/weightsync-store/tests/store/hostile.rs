//! Names that somebody else has chosen.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Barrier;

use weightsync_conformance::scale::longest;
use weightsync_core::Version;
use weightsync_engine::{
    AnyScheme, Expect, InitInfo, ReceiverSetup, Sender, SenderSetup, Snapshot,
};
use weightsync_store::{ModelVersion, SaveOptions, Store, StoreError, StoreScheme, Which, Writer};

use crate::weights::{MODEL, at, number, weights};

const ELEMENTS: usize = 64;

/// The directory of a version's weights.
const PLACE: &str = "00000000000000000001-00000000000000000001";

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

/// What others have put somewhere, and what lies there.
struct Foreign(std::path::PathBuf);

impl Foreign {
    const TEXT: &str = "all of the thesis";

    fn at(path: std::path::PathBuf) -> Self {
        fs::create_dir_all(path.parent().expect("a place")).expect("room");
        fs::write(&path, Self::TEXT).expect("room");
        Self(path)
    }

    fn check(&self) {
        let text = fs::read_to_string(&self.0);
        assert_eq!(text.ok().as_deref(), Some(Self::TEXT), "{:?}", self.0);
    }
}

fn sender(scheme: &str) -> (Sender, InitInfo) {
    let weights = weights(1, ELEMENTS);
    let setup = SenderSetup::new(MODEL, &weights).expect("plain tensors");
    let scheme: AnyScheme = scheme.parse().expect("a scheme");
    let setup = setup.scheme(scheme).expect("it can send weights");
    let info = setup.init_info();
    let sender = setup.connect(&weights, Expect::Count(0), Some(longest()));
    (sender.expect("a store"), info)
}

pub fn temporary_stores_are_known_by_more_than_their_names() {
    let dir = tempfile::tempdir().expect("a directory");
    let elsewhere = tempfile::tempdir().expect("a directory");
    let digits = |digit: &str| format!("temporary-{}", digit.repeat(32));
    let linked = Foreign::at(elsewhere.path().join("thesis.tex"));
    std::os::unix::fs::symlink(elsewhere.path(), dir.path().join(digits("c"))).expect("a link");
    let foreign = [
        "temporary-results/run1/a.csv".to_owned(),
        "temporary-notes.txt".to_owned(),
        format!("{}/thesis.tex", digits("a")),
        format!("{}/data/{PLACE}.old/thesis.tex", digits("b")),
        format!("{}/data/{PLACE}/thesis.tex", digits("1")),
        format!("{}/data/{PLACE}/policy/thesis.tex", digits("2")),
        format!("{}/data/{PLACE}/policy/mine/model.safetensors", digits("3")),
        format!("{}/ends/workers/mine/thesis.tex", digits("4")),
        format!("{}/ends/workers/1.0123456789abcdef/thesis.tex", digits("5")),
        format!("{}/leases/conditions-of-sale.txt", digits("6")),
        format!("{}/versions/.unfinished-thesis.tex", digits("7")),
        format!("{}.old/head.json", digits("d")),
        format!("{}.removed-old/head.json", digits("e")),
        digits("f"),
    ];
    let mut foreign: Vec<_> = foreign
        .iter()
        .map(|path| Foreign::at(dir.path().join(path)))
        .collect();
    foreign.push(linked);
    // What killed processes have left goes.
    let going = format!("{}.removed-12-0-0123456789abcdef", digits("0"));
    for left in [&digits("0"), &going] {
        let data = dir
            .path()
            .join(left)
            .join("data")
            .join(PLACE)
            .join("policy");
        fs::create_dir_all(&data).expect("room");
        for file in ["model.safetensors", ".unfinished-12-0-0123456789abcdef"] {
            fs::write(data.join(file), "weights").expect("room");
        }
    }
    let before = entries(dir.path());
    let (sender, _) = sender(&format!("store:{},temporary", dir.path().display()));
    sender.shutdown();
    for one in &foreign {
        one.check();
    }
    let gone: Vec<_> = before.difference(&entries(dir.path())).cloned().collect();
    assert_eq!(gone, [digits("0"), going]);
    assert_eq!(
        entries(dir.path()).len(),
        before.len() - 2,
        "its own is gone"
    );
}

/// Several processes may find the same remains of a killed one, and remove them at the same time.
pub fn sweep_calls_nothing_left_that_another_removes() {
    let dir = tempfile::tempdir().expect("a directory");
    let scheme = StoreScheme::new(&dir.path().display().to_string()).expect("an address");
    for round in 0..150 {
        let store = dir.path().join(format!(
            "temporary-{}.removed-12-{round}-0123456789abcdef",
            "0".repeat(32)
        ));
        let data = store.join("data").join(PLACE).join("policy");
        fs::create_dir_all(&data).expect("room");
        fs::create_dir_all(store.join("versions")).expect("room");
        for file in 0..20 {
            let name = format!(".unfinished-12-{file}-0123456789abcdef");
            fs::write(data.join(name), "weights").expect("room");
        }
        let start = Barrier::new(3);
        std::thread::scope(|scope| {
            let sweeps: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        scheme.sweep().expect("a directory")
                    })
                })
                .collect();
            for sweep in sweeps {
                let left = sweep.join().expect("no panic");
                assert_eq!(left, Vec::<String>::new(), "round {round}");
            }
        });
        assert_eq!(entries(dir.path()).len(), 0, "round {round}");
    }
}

pub fn worker_removes_no_store_because_its_init_info_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = dir.path().join("policy");
    let (sender, info) = sender(&format!("store:{},keep=all", store.display()));
    let text = serde_json::to_string(&info).expect("plain data");
    let text = text.replace("keep=all", "temporary");
    assert!(text.contains(",temporary"), "{text}");
    let info: InitInfo = serde_json::from_str(&text).expect("an init info");
    let mut worker = ReceiverSetup::new(info, 1)
        .connect(Some(longest()))
        .expect("a sender");
    let got = worker.recv_timeout(longest()).expect("a sender");
    assert_eq!(got.expect("a version").version(), Version(1));
    sender.shutdown();
    drop(worker);
    let store = Store::open(store.to_str().expect("a plain path")).expect("a path");
    store.load(&Which::Newest).expect("the version is there");
}

pub fn leases_of_others_are_left() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("store");
    let store = Store::open(root.to_str().expect("a plain path")).expect("a path");
    let mut options = SaveOptions::default();
    options.keep = "1".parse().expect("a rule");
    let mut writer = Writer::claim(&store, options).expect("a store");
    let mut save = |number| writer.save_weights(MODEL, &weights(number, ELEMENTS));
    save(1).expect("room");
    let inside = Foreign::at(root.join("leases/thesis.tex"));
    save(2).expect("room");
    inside.check();
    // A directory of the store that is a link is refused.
    let outside = Foreign::at(dir.path().join("outside/thesis.tex"));
    fs::remove_dir_all(root.join("leases")).expect("a directory");
    std::os::unix::fs::symlink(dir.path().join("outside"), root.join("leases")).expect("a link");
    let error = save(3).expect_err("leases is a link").to_string();
    assert!(error.contains("symbolic link"), "{error}");
    outside.check();
}

pub fn fifo_in_place_of_any_file_hangs_nobody() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("store");
    let path = root.to_str().expect("a plain path").to_owned();
    let files = |root: &Path| {
        let mut files = Vec::new();
        let mut dirs = vec![root.to_owned()];
        while let Some(dir) = dirs.pop() {
            for name in entries(&dir) {
                match dir.join(&name) {
                    path if path.is_dir() => dirs.push(path),
                    path => files.push(path),
                }
            }
        }
        files.sort();
        files
    };
    let scheme = format!("store:{path},keep=all");
    let (first, info) = sender(&scheme);
    let worker = ReceiverSetup::new(info.clone(), 1)
        .connect(Some(longest()))
        .expect("a sender");
    let all = files(&root);
    assert!(all.len() > 8, "{all:?}");
    first.shutdown();
    drop(worker);
    for file in all {
        // Some are gone with the processes.
        let kept = fs::read(&file).ok();
        let _ = fs::remove_file(&file);
        fs::create_dir_all(file.parent().expect("a directory")).expect("room");
        let made = std::process::Command::new("mkfifo").arg(&file).status();
        assert!(made.expect("mkfifo").success());
        let store = Store::open(&path).expect("a path");
        let _ = store.load(&Which::Newest);
        let _ = store.versions();
        let _ = store.scrub();
        let _ = Writer::claim(&store, SaveOptions::default())
            .and_then(|mut writer| writer.save_weights(MODEL, &weights(9, ELEMENTS)));
        let weights = weights(1, ELEMENTS);
        let setup = SenderSetup::new(MODEL, &weights).expect("plain tensors");
        let setup = setup.scheme(scheme.parse::<AnyScheme>().expect("a scheme"));
        let _ = setup.expect("it can send weights").connect(
            &weights,
            Expect::Count(0),
            Some(longest()),
        );
        let moment = std::time::Duration::from_millis(1);
        let _ = ReceiverSetup::new(info.clone(), 1).connect(Some(moment));
        let _ = fs::remove_file(&file);
        if let Some(bytes) = kept {
            fs::write(&file, bytes).expect("room");
        }
    }
}
