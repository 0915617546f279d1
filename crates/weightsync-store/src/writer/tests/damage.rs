//! Writers that find damage, and files of others.

use super::*;
use crate::format::DELTA;
use crate::progress::Work;

#[test]
fn number_of_a_damaged_version_is_used_up() {
    for spoils in [true, false] {
        let dir = memory();
        let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
        let mut trainer = Trainer::new(storage, Keep::All);
        trainer.claim().unwrap();
        trainer.save(&["policy"]).unwrap();
        trainer.save(&["policy"]).unwrap();
        let newest = trainer.writer.as_ref().unwrap().head.newest().unwrap();
        let path = dir.path().join(newest.manifest());
        match spoils {
            true => std::fs::write(path, b"spoilt").unwrap(),
            false => std::fs::remove_file(path).unwrap(),
        }
        for _ in 0..2 {
            trainer.claim().unwrap();
            trainer.save(&["policy"]).unwrap();
        }
        assert_eq!(versions(&trainer.store), [1, 3, 4]);
    }
}

#[test]
fn mistyped_model_is_named_next_to_damage() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut trainer = Trainer::new(storage, Keep::All);
    trainer.claim().unwrap();
    trainer.save(&["policy", "critic"]).unwrap();
    trainer.save(&["policy"]).unwrap();
    let newest = trainer.writer.as_ref().unwrap().head.newest().unwrap();
    std::fs::write(dir.path().join(newest.manifest()), b"spoilt").unwrap();
    let model = ModelId::new("polcy").unwrap();
    let error = trainer.store.load_one(&Which::Newest, Some(&model));
    let error = error.unwrap_err();
    assert!(error.damage().is_some(), "{error}");
    for word in [&newest.manifest(), "\"polcy\"", "critic, policy"] {
        assert!(error.to_string().contains(word), "no {word} in: {error}");
    }
}

#[test]
fn missing_manifest_is_named_until_a_claim() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut trainer = Trainer::new(storage, Keep::All);
    trainer.claim().unwrap();
    for _ in 0..3 {
        trainer.save(&["policy"]).unwrap();
    }
    assert_eq!(trainer.store.versions().unwrap().damage, []);
    let manifests = trainer.store.storage().list(VERSIONS).unwrap();
    let first = manifests.iter().min().unwrap();
    std::fs::remove_file(dir.path().join(VERSIONS).join(first)).unwrap();
    for found in [2, 3] {
        if found == 3 {
            trainer.save(&["policy"]).unwrap();
        }
        let expected = format!("{found} of {} manifests", found + 1);
        let found = trainer.store.versions().unwrap();
        let [Damage { file, what, .. }] = &found.damage[..] else {
            panic!("{:?}", found.damage);
        };
        assert!(file.ends_with(VERSIONS), "{file}");
        assert!(what.contains(&expected), "{what}");
    }
    trainer.claim().unwrap();
    assert_eq!(trainer.store.versions().unwrap().damage, []);
}

#[test]
fn names_stay_when_the_head_is_damaged() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut trainer = Trainer::new(storage, "1".parse().unwrap());
    trainer.claim().unwrap();
    trainer.save(&["policy"]).unwrap();
    let first = ModelVersion::from(Version(1));
    trainer.store.set_name("best", &first).unwrap();
    trainer.save(&["policy"]).unwrap();
    std::fs::write(dir.path().join(HEAD), b"spoilt").unwrap();
    let best = || trainer.store.load(&Which::Named("best".into())).unwrap();
    assert_eq!(best().set.only().unwrap().version(), Version(1));
    let mut writer = Writer::claim(&trainer.store, SaveOptions::default()).unwrap();
    writer.save_weights("policy", &weights(7)).unwrap();
    assert_eq!(best().set.only().unwrap().version(), Version(1));
}

#[test]
fn files_of_the_newest_version_stay_or_are_replaced() {
    let dir = memory();
    let store = Store::open(dir.path().to_str().unwrap()).unwrap();
    let claim = |config: Option<&[u8]>| {
        let config = config.map(|bytes| ("config.json".to_owned(), bytes.to_vec()));
        let options = SaveOptions {
            files: config.into_iter().collect(),
            ..SaveOptions::default()
        };
        let mut writer = Writer::claim(&store, options).unwrap();
        writer.read_base().unwrap();
        writer
    };
    let check = |expected: &[u8], deltas| {
        let files = store.files(&Which::Newest, None).unwrap();
        assert_eq!(files, [("config.json".to_owned(), expected.to_vec())]);
        let newest = store.newest_versions(1).unwrap();
        assert_eq!(newest.versions[0].models[0].deltas, deltas);
    };
    claim(Some(b"1")).save_weights("m", &weights(1)).unwrap();
    check(b"1", 0);
    // A writer that names none keeps them, also in a full version.
    let mut writer = claim(None);
    writer.save_weights("m", &weights(2)).unwrap();
    check(b"1", 1);
    writer.save_whole_next();
    writer.save_weights("m", &weights(3)).unwrap();
    check(b"1", 0);
    claim(Some(b"1")).save_weights("m", &weights(4)).unwrap();
    check(b"1", 1);
    // Changes would be read with the files of before.
    claim(Some(b"2")).save_weights("m", &weights(5)).unwrap();
    check(b"2", 0);
    // Those that are damaged stop no trainer: the ones before are there.
    let config = || {
        let newest = store.newest_versions(1).unwrap().versions.remove(0);
        std::path::Path::new(&newest.models[0].directory).join("config.json")
    };
    std::fs::write(config(), b"3").unwrap();
    let mut writer = claim(None);
    writer.save_whole_next();
    writer.save_weights("m", &weights(6)).unwrap();
    check(b"1", 0);
    // Nor do those that cannot be read: a link to itself.
    let unread = |path: &std::path::Path| {
        std::fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink(path, path).unwrap();
    };
    unread(&config());
    writer.save_whole_next();
    writer.save_weights("m", &weights(7)).unwrap();
    check(b"1", 0);
    // Without others the save fails, as they may be whole.
    for place in store.storage().list(DATA).unwrap() {
        let config = dir.path().join(DATA).join(place).join("m/config.json");
        if config.is_file() {
            unread(&config);
        }
    }
    writer.save_whole_next();
    let error = writer.save_weights("m", &weights(8)).unwrap_err();
    assert!(matches!(error, StoreError::File { .. }), "{error}");
    std::fs::remove_file(config()).unwrap();
    std::fs::write(config(), b"1").unwrap();
    writer.save_weights("m", &weights(9)).unwrap();
    check(b"1", 0);
}

#[test]
fn dropped_version_stays_dropped_after_damage() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut trainer = Trainer::new(storage.clone(), "1".parse().unwrap());
    trainer.claim().unwrap();
    trainer.save(&["policy"]).unwrap();
    let newest = |trainer: &Trainer| trainer.writer.as_ref().unwrap().head.newest().unwrap();
    let first = dir.path().join(newest(&trainer).manifest());
    let manifest = std::fs::read(&first).unwrap();
    trainer.save(&["policy"]).unwrap();
    // As if the writer had died before it removed the manifest.
    std::fs::write(&first, manifest).unwrap();
    std::fs::remove_file(dir.path().join(newest(&trainer).manifest())).unwrap();
    trainer.claim().unwrap();
    assert!(versions(&trainer.store).is_empty());
    trainer.save(&["policy"]).unwrap();
    assert_eq!(versions(&trainer.store), [3]);
    assert!(!first.exists());
    trainer.save(&["policy"]).unwrap();
    assert_eq!(
        trainer.writer.as_ref().unwrap().head.dropped.len(),
        1,
        "what is gone is listed no more"
    );
}

#[test]
fn missing_head_is_written_again() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut old = Trainer::new(storage.clone(), Keep::All);
    old.claim().unwrap();
    for count in 1..4 {
        old.save(&["policy"]).unwrap();
        std::fs::remove_file(dir.path().join(HEAD)).unwrap();
        old.save(&["policy"]).unwrap();
        assert_eq!(versions(&old.store).len(), 2 * count);
    }
    // Not by a writer that was replaced.
    let mut new = Trainer::new(storage.clone(), Keep::All);
    new.claim().unwrap();
    std::fs::remove_file(dir.path().join(HEAD)).unwrap();
    let begun = VersionKey {
        epoch: new.writer.as_ref().unwrap().run().epoch,
        sequence: 7,
    };
    let model = ModelId::new("policy").unwrap();
    storage.put(&begun.file(&model, DELTA), b"begun").unwrap();
    let error = old.save(&["policy"]).unwrap_err();
    assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
    new.save(&["policy"]).unwrap();
    assert_eq!(versions(&new.store).len(), 7);
}

#[test]
fn claim_leaves_to_a_save_what_it_cannot_remove() {
    for call in 0.. {
        let dir = memory();
        let storage = Faulty::new(Directory::new(dir.path()), InjectedFault::Refused);
        let mut trainer = Trainer::new(Arc::new(storage.clone()), Keep::All);
        trainer.claim().unwrap();
        trainer.save(&["policy"]).unwrap();
        let begun = VersionKey {
            epoch: trainer.writer.as_ref().unwrap().run().epoch,
            sequence: 7,
        };
        let model = ModelId::new("policy").unwrap();
        storage.put(&begun.file(&model, DELTA), b"begun").unwrap();
        storage.fail_at(call);
        let claimed = trainer.claim();
        let calls = storage.mend();
        if claimed.is_ok() {
            trainer.save(&["policy"]).unwrap();
            trainer.check_tidy();
        }
        if call >= calls {
            assert!(call > 8, "{call} calls are too few for a claim");
            return;
        }
    }
}

#[test]
fn delta_is_not_put_onto_what_is_gone() {
    for spoils in [0, 1, 2] {
        let dir = memory();
        let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
        let mut trainer = Trainer::new(storage.clone(), Keep::All);
        trainer.claim().unwrap();
        trainer.save(&["policy"]).unwrap();
        trainer.save(&["policy"]).unwrap();
        let place = trainer.writer.as_ref().unwrap().head.newest().unwrap();
        let manifest = catalog::manifest(&*storage, place).unwrap().unwrap();
        let paths: Vec<_> = manifest.models[0].files().map(|file| file.0).collect();
        assert_eq!(paths.len(), 2, "an anchor and a delta");
        let path = |at: usize| dir.path().join(&paths[at]);
        match spoils {
            0 | 1 => std::fs::remove_file(path(spoils)).unwrap(),
            _ => std::fs::write(path(0), b"cut").unwrap(),
        }
        trainer.save(&["policy"]).unwrap();
        let loaded = trainer.store.load(&Which::Newest).unwrap();
        assert_eq!(
            (
                number(&loaded.set.members()[0].snapshot),
                loaded.damage.len()
            ),
            (3, 0)
        );
    }
}

#[test]
fn claim_leaves_directories_of_others_alone() {
    let dir = memory();
    let store = Store::open(dir.path().to_str().unwrap()).unwrap();
    let put = |path: &str| {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, b"").unwrap();
        path
    };
    let unfinished = |dir: &str| {
        let unique = weightsync_engine::files::unique();
        put(&format!("{dir}.unfinished-{unique}"))
    };
    // Where no store has directories, it is not descended.
    let foreign = [
        unfinished("photos/"),
        unfinished("versions/photos/"),
        unfinished("ends/workers/3.0123456789abcdef/a/"),
        put("versions/.unfinished-album"),
    ];
    let own = [
        unfinished(""),
        unfinished("versions/"),
        unfinished("ends/workers/3.0123456789abcdef/"),
        unfinished("ends/workers/4.0123456789abcdef/"),
    ];
    Writer::claim(&store, SaveOptions::default()).unwrap();
    assert!(foreign.iter().all(|foreign| foreign.exists()));
    for own in own {
        assert!(!own.exists(), "{}", own.display());
    }
    // Nor does the directory of a worker that was killed stay, as there is no file in it.
    assert!(!dir.path().join("ends/workers/4.0123456789abcdef").exists());
}

#[test]
fn damaged_newest_version_is_read_once() {
    use std::sync::atomic::{AtomicUsize, Ordering};

    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut trainer = Trainer::new(storage, Keep::All);
    trainer.claim().unwrap();
    trainer.save(&["policy"]).unwrap();
    trainer.writer.as_mut().unwrap().save_whole_next();
    trainer.save(&["policy"]).unwrap();
    let newest = trainer.store.versions().unwrap().versions.remove(1);
    let file = std::path::Path::new(&newest.models[0].directory).join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = reads.clone();
    let store = trainer.store.with_progress(move |work| {
        let begins = matches!(work, Work::Reads(_));
        counted.fetch_add(usize::from(begins), Ordering::SeqCst);
        Ok(())
    });
    let loaded = store.load(&Which::Newest).unwrap();
    assert_eq!(number(&loaded.set.members()[0].snapshot), 1);
    assert_eq!(loaded.damage.len(), 1);
    assert_eq!(
        reads.load(Ordering::SeqCst),
        2,
        "the damaged one and the one before"
    );
}
