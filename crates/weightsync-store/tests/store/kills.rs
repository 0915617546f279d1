//! Writers and readers that are killed at random moments.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync_conformance::scale::{self, Dice, longest};
use weightsync_core::{ModelId, Version};
use weightsync_engine::worker::{Event, Spawn, WorkerProcess, Workers};
use weightsync_store::{SaveOptions, Store, StoreError, Which, Writer};

use crate::Role;
use crate::weights::{MODEL, exactly, of, weights};

type Failure = Box<dyn std::error::Error>;

/// Elements of a version: some are being written most of the time.
const ELEMENTS: usize = 64 << 10;

/// How a writer saves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub dir: String,
    pub keep: String,
    /// The numbers of its weights count up from here.
    pub from: u64,
    pub deltas: bool,
    /// Whether the store is claimed for each version, as by `push`.
    pub pushes: bool,
}

impl Plan {
    fn claim(&self) -> Result<Writer, Failure> {
        let mut options = SaveOptions::default();
        options.keep = self.keep.parse()?;
        options.deltas = self.deltas;
        options.shard_bytes = 300_000;
        let mut writer = Writer::claim(&Store::open(&self.dir)?, options)?;
        writer.read_base()?;
        Ok(writer)
    }
}

/// A version is durable: its number in the model, and that of its weights.
#[derive(Debug, Serialize, Deserialize)]
struct Durable(u64, u64);

/// Saves versions until it is killed or fenced off.
pub fn write(worker: &WorkerProcess, plan: &Plan) -> Result<(), Failure> {
    let policy = ModelId::new(MODEL)?;
    let mut writer = None;
    let (mut dice, mut overtaken) = (Dice::new(plan.from), 0);
    for number in plan.from.. {
        let claimed = writer.take().map_or_else(|| plan.claim(), Ok);
        let saved = claimed.and_then(|mut writer| {
            writer.save_weights(MODEL, &weights(number, ELEMENTS))?;
            Ok(writer)
        });
        let saved = match saved {
            Ok(saved) => saved,
            Err(error) if is_fenced(&*error) && plan.pushes => {
                // Claims are shorter than saves: pushes that come again at once end one another.
                overtaken += 1;
                thread::sleep(Duration::from_millis(dice.below(20 * overtaken)));
                continue;
            }
            Err(error) if is_fenced(&*error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let durable = Durable(saved.version(&policy).0, number);
        worker.send(&serde_json::to_vec(&durable)?)?;
        overtaken = 0;
        writer = (!plan.pushes).then_some(saved);
    }
    Ok(())
}

fn is_fenced(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(StoreError::Fenced { .. }))
}

/// Loads the newest version until it is told to end, and says how many it has loaded.
pub fn read(worker: &WorkerProcess, dir: &str) -> Result<(), Failure> {
    let store = Store::open(dir)?;
    let (mut loads, mut last) = (0_u64, Version::NONE);
    while worker.recv(Some(Duration::ZERO))?.is_none() && !worker.is_closed() {
        let loaded = match store.load(&Which::Newest) {
            Err(StoreError::Empty { damage, .. }) if damage.is_empty() => continue,
            loaded => loaded?,
        };
        let (version, _) = of(&loaded)?;
        if !loaded.damage.is_empty() || version < last {
            return Err(format!("{version} after {last}: {:?}", loaded.damage).into());
        }
        (loads, last) = (loads + 1, version);
    }
    Ok(worker.send(&loads.to_le_bytes())?)
}

fn start(role: &Role) -> Workers {
    let spawn = Spawn::this_program().expect("this program");
    let spawn = spawn.init_value(role).expect("plain data");
    spawn.start().expect("a process")
}

/// A store, and what its writers said.
struct Stage {
    store: Store,
    keep: Option<u64>,
    durable: BTreeMap<Version, u64>,
}

impl Stage {
    /// Takes what a process has said, until it has ended.
    fn hear(&mut self, workers: &Workers) {
        Self::hear_with(workers, |frame| self.note(frame));
    }

    fn hear_with(workers: &Workers, mut note: impl FnMut(&[u8])) {
        loop {
            match workers.recv_any(Some(longest())) {
                Some((_, Event::Frame(frame))) => note(&frame),
                Some((_, Event::Exited(exit))) => {
                    let killed = exit.to_string().contains("signal 9");
                    assert!(
                        exit.is_success() || killed,
                        "{exit}: {}",
                        exit.stderr_text()
                    );
                    return;
                }
                other => panic!("a process that was killed says {other:?}"),
            }
        }
    }

    fn note(&mut self, frame: &[u8]) {
        let Durable(version, number) = serde_json::from_slice(frame).expect("a version");
        let other = self.durable.insert(Version(version), number);
        assert_eq!(other, None, "two writers saved version {version}");
    }

    /// The newest version is there and whole, and so are those before it as far as they are kept.
    fn check(&self, depth: usize) {
        let all = self.store.versions().expect("a store that can be read");
        assert_eq!(all.damage, []);
        let there: Vec<_> = all
            .versions
            .iter()
            .map(|one| one.models[0].version)
            .collect();
        assert!(there.is_sorted_by(|a, b| a < b), "{there:?}");
        for (version, number) in self.durable.iter().rev().take(depth) {
            let newer = there.iter().filter(|other| *other > version).count() as u64;
            match there.contains(version) {
                true => {
                    let loaded = self
                        .store
                        .load(&exactly(*version))
                        .expect("a whole version");
                    assert_eq!(of(&loaded), Ok((*version, *number)));
                }
                false => assert!(
                    self.keep.is_some_and(|keep| newer >= keep),
                    "{version} is lost: there is {there:?}"
                ),
            }
        }
    }
}

fn kill(keep: &str, rounds: u64) {
    let seed = scale::seed();
    let dir = tempfile::tempdir().expect("a directory");
    let address = dir.path().join("store").display().to_string();
    let mut dice = Dice::new(seed);
    let mut stage = Stage {
        store: Store::open(&address).expect("a path"),
        keep: keep.parse().ok(),
        durable: BTreeMap::new(),
    };
    let mut reader = start(&Role::Reader(address.clone()));
    let mut readers = 1;
    let mut plan = Plan {
        dir: address,
        keep: keep.to_owned(),
        from: 0,
        deltas: true,
        pushes: false,
    };
    for round in 0..rounds {
        plan.from += 1_000_000;
        plan.deltas = dice.below(4) > 0;
        let writer = start(&Role::Writer(plan.clone()));
        if dice.below(8) > 0 {
            // It may be killed while it claims; most are killed while they save.
            match writer.recv_any(Some(longest())) {
                Some((_, Event::Frame(frame))) => stage.note(&frame),
                other => panic!("the writer of round {round} saved nothing: {other:?}"),
            }
        }
        // A second one claims while the first saves.
        plan.from += 1_000_000;
        let rival = (dice.below(3) == 0).then(|| start(&Role::Writer(plan.clone())));
        thread::sleep(Duration::from_micros(dice.below(30_000)));
        let both = [Some(writer), rival];
        for one in both.iter().flatten() {
            one.kill(0).expect("it was not killed yet");
            stage.hear(one);
            thread::sleep(Duration::from_micros(dice.below(10_000)));
        }
        if dice.below(10) == 0 {
            reader.kill(0).expect("it was not killed yet");
            let said = reader.recv_any(Some(longest()));
            let Some((_, Event::Exited(exit))) = said else {
                panic!("the reader said {said:?}");
            };
            assert!(
                exit.to_string().contains("signal 9"),
                "{exit}: {}",
                exit.stderr_text()
            );
            reader = start(&Role::Reader(plan.dir.clone()));
            readers += 1;
        }
        stage.check(if round % 50 == 0 { usize::MAX } else { 20 });
    }
    reader
        .send(0, b"end", Some(longest()))
        .expect("a reader that lives");
    let loads = match reader.recv_any(Some(longest())) {
        Some((_, Event::Frame(frame))) => u64::from_le_bytes(frame.try_into().expect("8")),
        other => panic!("the reader said {other:?}"),
    };
    stage.check(usize::MAX);
    // The next writer tidies up.
    let mut last = plan.claim().expect("a store");
    last.save_weights(MODEL, &weights(1, ELEMENTS))
        .expect("room");
    let there = stage.store.versions().expect("a store").versions.len();
    let count = |name: &str| {
        dir.path()
            .join("store")
            .join(name)
            .read_dir()
            .expect("it")
            .count()
    };
    assert_eq!((count("versions"), count("leases")), (there, 0));
    match stage.keep {
        None => assert_eq!(count("data"), there),
        Some(keep) => assert!(count("data") as u64 <= keep + 33, "{}", count("data")),
    }
    println!(
        "keep={keep}, seed {seed}: {rounds} kills of writers, {} durable versions, {readers} readers, \
         {loads} loads of the last one: 0 unreadable stores, 0 lost versions",
        stage.durable.len()
    );
}

/// So many processes push at once, and are killed after some pushes.
fn push_at_once(processes: u64, pushes: u64) {
    let seed = scale::seed();
    let dir = tempfile::tempdir().expect("a directory");
    let address = dir.path().join("store").display().to_string();
    let stage = Mutex::new(Stage {
        store: Store::open(&address).expect("a path"),
        keep: None,
        durable: BTreeMap::new(),
    });
    let done = || lock(&stage).durable.len() as u64 >= pushes;
    let lives = AtomicU64::new(0);
    thread::scope(|scope| {
        for process in 0..processes {
            let (stage, lives, done, address) = (&stage, &lives, &done, &address);
            scope.spawn(move || {
                let mut dice = Dice::new(seed + process);
                while !done() {
                    let plan = Plan {
                        dir: address.clone(),
                        keep: "all".into(),
                        from: 1_000_000 * lives.fetch_add(1, Ordering::SeqCst),
                        deltas: dice.below(2) > 0,
                        pushes: true,
                    };
                    let pusher = start(&Role::Writer(plan));
                    for _ in 0..dice.below(20) {
                        match pusher.recv_any(Some(longest())) {
                            Some((_, Event::Frame(frame))) => lock(stage).note(&frame),
                            // The others may be faster all the time.
                            None => break,
                            other => panic!("a pusher says {other:?}"),
                        }
                    }
                    thread::sleep(Duration::from_micros(dice.below(10_000)));
                    pusher.kill(0).expect("it was not killed yet");
                    Stage::hear_with(&pusher, |frame| lock(stage).note(frame));
                }
            });
        }
    });
    let stage = lock(&stage);
    stage.check(usize::MAX);
    let found = stage.store.scrub().expect("a store");
    assert_eq!(found.damage, []);
    assert_eq!(found.sound, found.versions);
    println!(
        "seed {seed}: {processes} processes pushed {} versions in {} lives: 0 lost",
        stage.durable.len(),
        lives.into_inner()
    );
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn two_that_push_at_once_lose_nothing() {
    push_at_once(2, scale::rounds_of(1000, 0.03, 20));
}

pub fn four_that_push_at_once_lose_nothing() {
    // Most of what four write is overtaken, so that each version takes long.
    push_at_once(4, scale::rounds_of(1000, 0.01, 8));
}

pub fn killed_writers_lose_nothing() {
    kill("all", scale::rounds_of(250, 0.05, 12));
}

pub fn killed_writers_lose_nothing_that_is_kept() {
    kill("3", scale::rounds_of(250, 0.05, 13));
}
