//! Writers and readers that are killed at random moments.

use std::collections::BTreeMap;
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
    let mut writer = match plan.claim() {
        Ok(writer) => writer,
        Err(error) if is_fenced(&*error) => return Ok(()),
        Err(error) => return Err(error),
    };
    let policy = ModelId::new(MODEL)?;
    for number in plan.from.. {
        match writer.save_weights(MODEL, &weights(number, ELEMENTS)) {
            Ok(_) => {}
            Err(StoreError::Fenced { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let durable = Durable(writer.version(&policy).0, number);
        worker.send(&serde_json::to_vec(&durable)?)?;
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
        loop {
            match workers.recv_any(Some(longest())) {
                Some((_, Event::Frame(frame))) => self.note(&frame),
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

pub fn killed_writers_lose_nothing() {
    kill("all", scale::rounds_of(250, 0.05, 12));
}

pub fn killed_writers_lose_nothing_that_is_kept() {
    kill("3", scale::rounds_of(250, 0.05, 13));
}
