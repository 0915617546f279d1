use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use weightsync_engine::Tensors;
use weightsync_engine::files::unique;

use super::*;
use crate::format::{DATA, LEASES, VERSIONS};
use crate::lease;
use crate::storage::faulty::{Faulty, InjectedFault};
use crate::storage::{Directory, Storage};
use crate::store::{ModelVersion, Which};

mod damage;

/// Elements of a model: enough for one change to be worth a delta.
const ELEMENTS: usize = 2048;

/// Weights that no other number has.
fn weights(number: u64) -> Tensors {
    let mut values: Vec<f32> = (0..ELEMENTS).map(|at| at as f32).collect();
    values[number as usize % ELEMENTS] = -1.0 - number as f32;
    let mut weights = Tensors::new();
    weights.insert("layer", [ELEMENTS as u64], values).unwrap();
    weights
}

/// The number of these weights.
fn number(snapshot: &Snapshot) -> u64 {
    let values: &[f32] = snapshot.slice("layer").unwrap();
    let changed: Vec<_> = (0..ELEMENTS)
        .filter(|at| values[*at] != *at as f32)
        .collect();
    let [changed] = changed[..] else {
        panic!("{} elements are not as they were saved", changed.len());
    };
    (-values[changed] - 1.0) as u64
}

/// A directory in memory where there is one: thousands of files are synced here.
fn memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

fn which(model: &str, version: Version) -> Which {
    Which::Exactly(ModelVersion {
        model: Some(ModelId::new(model).unwrap()),
        version,
    })
}

/// A trainer, and what it was told of its saves.
struct Trainer {
    store: Store,
    keep: Keep,
    writer: Option<Writer>,
    /// Every number that was ever to be saved, by model and version.
    tried: BTreeMap<(&'static str, Version), Vec<u64>>,
    /// The versions whose save came back, and the numbers of their weights.
    saved: Vec<(&'static str, Version, u64)>,
    named: BTreeMap<&'static str, u64>,
    count: u64,
}

impl Trainer {
    fn new(storage: Arc<dyn Storage>, keep: Keep) -> Self {
        Self {
            store: Store::on(storage),
            keep,
            writer: None,
            tried: BTreeMap::new(),
            saved: Vec::new(),
            named: BTreeMap::new(),
            count: 0,
        }
    }

    fn claim(&mut self) -> Result<()> {
        // A claim that fails may have taken the store from the writer before.
        self.writer = None;
        let options = SaveOptions {
            keep: self.keep,
            ..SaveOptions::default()
        };
        self.writer = Some(Writer::claim(&self.store, options)?);
        Ok(())
    }

    fn save(&mut self, models: &[&'static str]) -> Result<Saved> {
        let Some(writer) = &mut self.writer else {
            panic!("it was not claimed");
        };
        let mut saving = Vec::new();
        let mut numbers = Vec::new();
        for model in models {
            self.count += 1;
            let version = writer.version(&ModelId::new(model).unwrap()).next();
            let run = writer.run();
            saving.push(Snapshot::of(model, &weights(self.count), run, version).unwrap());
            self.tried
                .entry((model, version))
                .or_default()
                .push(self.count);
            numbers.push((*model, version, self.count));
        }
        let saved = writer.save(&saving)?;
        self.saved.extend(numbers);
        Ok(saved)
    }

    fn name(&mut self, name: &'static str) -> Result<()> {
        let (model, version, number) = *self.saved.last().unwrap();
        let version = ModelVersion {
            model: Some(ModelId::new(model).unwrap()),
            version,
        };
        self.store.set_name(name, &version)?;
        self.named.insert(name, number);
        Ok(())
    }

    /// What a trainer does; errors and panics are passed over.
    fn life(&mut self) {
        for step in 0..9 {
            let work = catch_unwind(AssertUnwindSafe(|| match step {
                1.. if self.writer.is_none() => self.claim(),
                0 => self.claim(),
                2 if !self.saved.is_empty() => self.name("best"),
                4 => self.save(&["policy", "critic"]).map(drop),
                6 => self.store.load(&Which::Newest).map(drop),
                _ => self.save(&["policy"]).map(drop),
            }));
            if let Ok(Err(error)) = work {
                let text = error.to_string();
                assert!(text.contains("fails"), "step {step}: {text}");
            }
        }
    }

    /// Every version that the store shows is one that was to be saved, whole, and the only one of its
    /// number; what was saved is there as far as it is kept.
    fn check(&self) {
        let all = self.store.versions().unwrap();
        assert_eq!(all.damage, []);
        let mut there = BTreeMap::new();
        let mut newest = BTreeMap::new();
        for version in &all.versions {
            for stored in &version.models {
                let model = match stored.model.as_str() {
                    "policy" => "policy",
                    _ => "critic",
                };
                let grown = newest.insert(model, stored.version);
                assert!(grown <= Some(stored.version), "{model} went back");
                let loaded = self.store.load(&which(model, stored.version)).unwrap();
                let members = loaded.set.members().iter();
                let mut members = members.filter(|one| one.snapshot.model() == &stored.model);
                let snapshot = &members.next().unwrap().snapshot;
                assert_eq!(snapshot.digest(), stored.digest);
                let number = number(snapshot);
                assert!(self.tried[&(model, stored.version)].contains(&number));
                let other = there.insert((model, stored.version), number);
                assert!(other.is_none_or(|other| other == number && !stored.changed));
            }
        }
        let kept = match self.keep {
            Keep::All => usize::MAX,
            Keep::Newest { count, .. } => count.get() as usize,
        };
        for model in ["policy", "critic"] {
            let of_model = self.saved.iter().filter(|one| one.0 == model);
            let newer = |version| {
                all.versions.iter().rev().take_while(move |one| {
                    let mut models = one.models.iter();
                    models.any(|one| one.model.as_str() == model && one.version > version)
                })
            };
            for &(_, version, number) in of_model {
                match there.get(&(model, version)) {
                    Some(got) => assert_eq!(*got, number, "{version} of {model} is another"),
                    None => assert!(
                        newer(version).count() >= kept,
                        "{version} of {model} is lost"
                    ),
                }
            }
        }
        for (name, number) in &self.named {
            let loaded = self.store.load(&Which::Named((*name).into())).unwrap();
            let mut members = loaded.set.members().iter();
            let found = members.any(|one| self::number(&one.snapshot) == *number);
            assert!(found, "{name} is another version");
        }
    }

    /// Nothing is there but what the versions of the store are made of.
    fn check_tidy(&self) {
        let storage = self.store.storage();
        let (mut manifests, mut data) = (BTreeSet::new(), BTreeSet::new());
        let catalog = Catalog::read(storage).unwrap();
        for place in &catalog.places {
            manifests.insert(place.to_string() + ".json");
            let manifest = catalog::manifest(storage, *place).unwrap().unwrap();
            data.extend(manifest.needs().map(|place| place.to_string()));
        }
        let list = |dir| {
            storage
                .list(dir)
                .unwrap()
                .into_iter()
                .collect::<BTreeSet<_>>()
        };
        assert_eq!(list(VERSIONS), manifests);
        assert_eq!(list(DATA), data);
        assert_eq!(list(LEASES), BTreeSet::new());
        assert_eq!(unfinished(std::path::Path::new(&storage.name(""))), 0);
    }
}

/// Unfinished files.
fn unfinished(dir: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(dir).unwrap();
    let count = entries.map(|entry| {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => unfinished(&entry.path()),
            false => usize::from(entry.file_name().to_string_lossy().starts_with(".unf")),
        }
    });
    count.sum()
}

/// A life in which each call fails in turn; then all is well again.
fn fail_everywhere(fault: InjectedFault, keep: &str) {
    for call in 0.. {
        let dir = memory();
        let storage = Faulty::new(Directory::new(dir.path()), fault);
        let keep = keep.parse().unwrap();
        let mut trainer = Trainer::new(Arc::new(storage.clone()), keep);
        trainer.claim().unwrap();
        for models in [&["policy", "critic"][..], &["policy"], &["policy"]] {
            trainer.save(models).unwrap();
        }
        storage.fail_at(call);
        trainer.life();
        let calls = storage.mend();
        trainer.check();
        // The same writer goes on, and then another.
        if trainer.writer.is_none() {
            trainer.claim().unwrap();
        }
        trainer.save(&["policy"]).unwrap();
        trainer.check();
        trainer.claim().unwrap();
        trainer.save(&["critic"]).unwrap();
        trainer.check();
        trainer.check_tidy();
        if call >= calls {
            assert!(call > 50, "{call} calls are too few for what is done");
            return;
        }
    }
}

#[test]
fn writer_survives_refused_calls() {
    fail_everywhere(InjectedFault::Refused, "2");
}

#[test]
fn writer_that_keeps_all_survives_refused_calls() {
    fail_everywhere(InjectedFault::Refused, "all");
}

#[test]
fn writer_survives_lost_answers() {
    fail_everywhere(InjectedFault::Lost, "2");
}

#[test]
fn writer_that_keeps_all_survives_lost_answers() {
    fail_everywhere(InjectedFault::Lost, "all");
}

#[test]
fn writer_survives_outages() {
    fail_everywhere(InjectedFault::Outage, "2");
}

#[test]
fn writer_that_keeps_all_survives_outages() {
    fail_everywhere(InjectedFault::Outage, "all");
}

#[test]
fn writer_survives_panics() {
    fail_everywhere(InjectedFault::Panic, "2");
}

/// What a claim, a save and a load ask of the storage, in a store of so many versions.
fn calls(versions: u64) -> [u64; 4] {
    let dir = memory();
    let storage = Faulty::new(Directory::new(dir.path()), InjectedFault::Refused);
    let mut trainer = Trainer::new(Arc::new(storage.clone()), Keep::All);
    trainer.claim().unwrap();
    for _ in 0..versions {
        trainer.save(&["policy"]).unwrap();
        trainer.writer.as_mut().unwrap().save_whole_next();
    }
    let count = |run: &mut dyn FnMut()| {
        storage.fail_at(u64::MAX);
        run();
        storage.mend()
    };
    [
        count(&mut || trainer.claim().unwrap()),
        count(&mut || drop(trainer.save(&["policy"]).unwrap())),
        count(&mut || drop(trainer.store.load(&Which::Newest).unwrap())),
        count(&mut || {
            let newest = trainer.saved.last().unwrap().1;
            let held = ModelVersion::from(newest);
            assert!(
                trainer
                    .store
                    .load_unless_within(&held, 0)
                    .unwrap()
                    .is_none()
            );
        }),
    ]
}

#[test]
fn calls_are_as_many_in_a_store_of_any_size() {
    assert_eq!(calls(3), calls(40));
}

#[test]
fn failed_saves_leave_nothing_in_the_head() {
    let dir = memory();
    let storage = Faulty::new(Directory::new(dir.path()), InjectedFault::Refused);
    let mut trainer = Trainer::new(Arc::new(storage.clone()), Keep::All);
    trainer.claim().unwrap();
    for _ in 0..20 {
        trainer.save(&["policy"]).unwrap();
        // In the weights, which is where a disk gets full.
        storage.fail_at(4);
        trainer.save(&["policy"]).unwrap_err();
        storage.mend();
    }
    trainer.save(&["policy"]).unwrap();
    let writer = trainer.writer.as_ref().unwrap();
    assert_eq!(writer.head.runs[0].failed, BTreeSet::new());
    assert!(writer.removed.is_empty());
    // Neither do runs that published nothing.
    for _ in 0..20 {
        trainer.claim().unwrap();
    }
    assert!(trainer.writer.as_ref().unwrap().head.runs.len() <= 3);
}

#[test]
fn leased_data_stay_until_the_lease_ends() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut trainer = Trainer::new(storage.clone(), "1".parse().unwrap());
    trainer.claim().unwrap();
    trainer.save(&["policy"]).unwrap();
    trainer.save(&["policy"]).unwrap();
    let place = trainer.writer.as_ref().unwrap().head.newest().unwrap();
    let lease = lease::Lease::take(&storage, place).unwrap();
    let manifest = catalog::manifest(&*storage, place).unwrap().unwrap();
    let stored = &manifest.models[0];
    assert_eq!(stored.deltas.len(), 1, "it needs two places");
    trainer.writer.as_mut().unwrap().save_whole_next();
    for claims in [false, false, true, false] {
        if claims {
            trainer.claim().unwrap();
        }
        trainer.save(&["policy"]).unwrap();
        let loaded = trainer
            .store
            .load_model(&manifest, stored, None, None)
            .unwrap();
        assert_eq!(number(&loaded), 2);
    }
    drop(lease);
    trainer.claim().unwrap();
    trainer.save(&["policy"]).unwrap();
    assert!(
        trainer
            .store
            .load_model(&manifest, stored, None, None)
            .is_err()
    );
    trainer.check();
    trainer.check_tidy();
}

#[test]
fn dead_lease_that_stays_is_no_error() {
    let dir = memory();
    let storage = Faulty::new(Directory::new(dir.path()), InjectedFault::Refused);
    let lease = format!("{LEASES}/{}{}", lease::NOTHING, unique());
    storage.put(&lease, b"").unwrap();
    // After the list and the look.
    storage.fail_at(2);
    assert_eq!(lease::leased(&storage).unwrap(), []);
    assert_eq!(storage.mend(), 3);
    assert_eq!(storage.list(LEASES).unwrap().len(), 1);
}

#[test]
fn stale_writer_takes_no_damaged_head() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut old = Trainer::new(storage.clone(), Keep::All);
    old.claim().unwrap();
    old.save(&["policy"]).unwrap();
    let mut new = Trainer::new(storage, Keep::All);
    new.claim().unwrap();
    new.save(&["policy"]).unwrap();
    std::fs::write(dir.path().join(HEAD), b"spoilt").unwrap();
    let error = old.save(&["policy"]).unwrap_err();
    assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
    new.save(&["policy"]).unwrap();
    let all = new.store.versions().unwrap();
    assert_eq!((all.versions.len(), all.damage), (3, vec![]));
}

#[test]
fn fenced_save_counts_if_it_was_published() {
    let dir = memory();
    let faulty = Faulty::new(Directory::new(dir.path()), InjectedFault::Outage);
    let mut old = Trainer::new(Arc::new(faulty.clone()), Keep::All);
    old.claim().unwrap();
    old.save(&["policy"]).unwrap();
    for call in 0.. {
        // It hears nothing after some call, and another writer goes on.
        faulty.fail_at(call);
        let heard = old.save(&["policy"]);
        faulty.mend();
        let mut new = Trainer::new(Arc::new(Directory::new(dir.path())), Keep::All);
        new.claim().unwrap();
        new.writer.as_mut().unwrap().read_base().unwrap();
        new.count = 1000 * (call + 1);
        new.save(&["policy"]).unwrap();
        let error = old.save(&["policy"]).unwrap_err();
        assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
        let all = new.store.versions().unwrap();
        assert_eq!(all.damage, []);
        for version in all.versions {
            let version = version.models[0].version;
            new.store.load(&which("policy", version)).unwrap();
        }
        if heard.is_ok() {
            return;
        }
        old.claim().unwrap();
    }
}

/// The answer of a save gets lost, a successor saves the changes since, and then the head is damaged,
/// before each call in turn.
#[test]
fn fenced_writer_removes_nothing_when_the_head_is_damaged() {
    let mut lost = 0;
    for call in 0..40 {
        let dir = memory();
        let faulty = Faulty::new(Directory::new(dir.path()), InjectedFault::Lost);
        let mut old = Trainer::new(Arc::new(faulty.clone()), Keep::All);
        old.claim().unwrap();
        old.save(&["policy"]).unwrap();
        let mut new = Trainer::new(Arc::new(Directory::new(dir.path())), Keep::All);
        new.count = 1000;
        let head = dir.path().join(HEAD);
        faulty.meanwhile(call + 1, move || {
            new.claim().unwrap();
            new.writer.as_mut().unwrap().read_base().unwrap();
            new.save(&["policy"]).unwrap();
            std::fs::write(head, b"spoilt").unwrap();
        });
        faulty.fail_at(call);
        let saved = old.save(&["policy"]);
        faulty.mend();
        let store = Store::on(Arc::new(Directory::new(dir.path())));
        let all = store.versions().unwrap();
        lost += u64::from(saved.is_err() && all.versions.len() == 3);
        for version in &all.versions {
            let which = which("policy", version.models[0].version);
            let loaded = store.load(&which);
            loaded.unwrap_or_else(|error| panic!("call {call}: {error}"));
        }
    }
    assert!(
        lost > 0,
        "the answer that gets lost is that of no publication"
    );
}

/// A successor claims the store and publishes before each call of a claim and two saves in turn.
#[test]
fn overtaken_writer_removes_nothing_of_its_successor() {
    for keep in ["1", "2", "all"] {
        for call in 0.. {
            let dir = memory();
            let faulty = Faulty::new(Directory::new(dir.path()), InjectedFault::Refused);
            let keep: Keep = keep.parse().unwrap();
            let mut first = Trainer::new(Arc::new(Directory::new(dir.path())), keep);
            first.claim().unwrap();
            for _ in 0..3 {
                first.save(&["policy", "critic"]).unwrap();
            }
            let new = Arc::new(std::sync::Mutex::new(Trainer::new(
                Arc::new(Directory::new(dir.path())),
                keep,
            )));
            let successor = new.clone();
            faulty.meanwhile(call, move || {
                let mut new = successor.lock().unwrap();
                new.count = 1000;
                new.claim().unwrap();
                new.writer.as_mut().unwrap().read_base().unwrap();
                for _ in 0..2 {
                    new.save(&["policy"]).unwrap();
                }
            });
            let mut old = Trainer::new(Arc::new(faulty.clone()), keep);
            old.count = 100;
            let worked = old
                .claim()
                .and_then(|()| old.save(&["policy"]))
                .and_then(|_| old.save(&["critic"]));
            if faulty.mend() <= call {
                assert!(call > 20, "{call} calls are too few for what is done");
                worked.unwrap();
                break;
            }
            let mut new = new.lock().unwrap();
            let all = new.store.versions().unwrap();
            assert_eq!(all.damage, [], "call {call}");
            for version in &all.versions {
                for stored in &version.models {
                    let which = which(stored.model.as_str(), stored.version);
                    let loaded = new.store.load(&which);
                    loaded.unwrap_or_else(|error| panic!("call {call}: {error}"));
                }
            }
            let last = new.saved.last().map(|(_, version, _)| *version);
            if worked.is_err() {
                let newest = all.versions.last().map(|one| one.models[1].version);
                assert_eq!(newest, last, "call {call}");
                new.save(&["policy"]).unwrap();
            }
        }
    }
}

/// The head is replaced long after the writer has heard that it cannot be: before any call of the next
/// save.
#[test]
fn late_replacement_makes_no_second_newest() {
    let mut late = 0;
    for failing in 0..20 {
        for landing in 0..20 {
            let dir = memory();
            let faulty = Faulty::new(Directory::new(dir.path()), InjectedFault::Late);
            let mut trainer = Trainer::new(Arc::new(faulty.clone()), "2".parse().unwrap());
            trainer.claim().unwrap();
            trainer.save(&["policy", "critic"]).unwrap();
            faulty.fail_at(failing);
            let _ = trainer.save(&["policy", "critic"]);
            if !faulty.land_at(landing) {
                break;
            }
            trainer.save(&["policy"]).unwrap();
            faulty.mend();
            trainer.check();
            if faulty.landed() {
                // It was a version for a moment, so it stays one, and the next goes on from it.
                late += 1;
                let all = trainer.store.versions().unwrap().versions;
                let critic = all.iter().map(|one| one.models[0].version);
                assert_eq!(critic.collect::<Vec<_>>(), [Version(2), Version(2)]);
            }
            trainer.save(&["policy"]).unwrap();
            trainer.check();
            trainer.claim().unwrap();
            trainer.save(&["critic"]).unwrap();
            trainer.check();
            trainer.check_tidy();
        }
    }
    assert!(late > 0);
}

#[test]
fn lost_answer_is_settled_before_the_next_save() {
    let dir = memory();
    let faulty = Faulty::new(Directory::new(dir.path()), InjectedFault::Outage);
    let mut trainer = Trainer::new(Arc::new(faulty.clone()), "2".parse().unwrap());
    trainer.claim().unwrap();
    trainer.save(&["policy", "critic"]).unwrap();
    let mut published = 0;
    for call in 0..40 {
        faulty.fail_at(call);
        let lost = trainer.save(&["policy", "critic"]).is_err();
        faulty.mend();
        let there = trainer.store.versions().unwrap().versions;
        let newest = there.last().unwrap().models[0].version;
        trainer.save(&["policy"]).unwrap();
        // The critic is as the lost save left it, if that was published.
        let there = trainer.store.versions().unwrap().versions;
        let critic = &there.last().unwrap().models[0];
        assert_eq!(critic.model.as_str(), "critic");
        assert_eq!(critic.version, newest, "call {call}");
        published += u64::from(lost && there.len() == 2);
        trainer.check();
    }
    assert!(published > 0);
}

#[test]
fn time_of_a_manifest_may_be_anything() {
    let dir = memory();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(dir.path()));
    let mut trainer = Trainer::new(storage.clone(), "2".parse().unwrap());
    trainer.claim().unwrap();
    for at in [u64::MAX, 0, 1, u64::MAX - 1] {
        trainer.save(&["policy"]).unwrap();
        let place = trainer.writer.as_ref().unwrap().head.newest().unwrap();
        let mut manifest = catalog::manifest(&*storage, place).unwrap().unwrap();
        manifest.at = at;
        storage.put(&place.manifest(), &seal(&manifest)).unwrap();
        trainer.claim().unwrap();
        trainer.check();
        let newest = trainer.store.versions().unwrap().versions.pop().unwrap();
        assert_eq!(newest.at.as_millis(), u128::from(at));
    }
    trainer.save(&["policy"]).unwrap();
    trainer.check();
    trainer.check_tidy();
}

#[test]
fn saver_goes_on_after_a_panic() {
    let dir = memory();
    let storage = Faulty::new(Directory::new(dir.path()), InjectedFault::Panic);
    let store = Store::on(Arc::new(storage.clone()));
    let writer = Writer::claim(&store, SaveOptions::default()).unwrap();
    let run = writer.run();
    let saver = crate::Saver::start(writer).unwrap();
    let save = |number| {
        let version = Version(number);
        let snapshot = Snapshot::of("policy", &weights(number), run, version).unwrap();
        let saving = saver.save(vec![snapshot]);
        saving.wait(None).unwrap().unwrap()
    };
    for call in 0.. {
        storage.fail_at(call);
        let failed = save(2 * call + 1);
        storage.mend();
        let crate::SaveOutcome::Failed(error) = failed else {
            assert!(call > 5, "{call} calls are too few for a save");
            return;
        };
        let text = error.to_string();
        assert!(text.contains(&format!("call {call} panics")), "{text}");
        let saved = save(2 * call + 2);
        assert!(matches!(saved, crate::SaveOutcome::Durable(_)), "{saved:?}");
        let loaded = store.load(&Which::Newest).unwrap();
        assert_eq!(number(loaded.set.only().unwrap()), 2 * call + 2);
    }
}

fn versions(store: &Store) -> Vec<u64> {
    let all = store.versions().unwrap().versions;
    all.iter().map(|one| one.models[0].version.0).collect()
}
