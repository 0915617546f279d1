//! Parties and services that come back.

use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use weightsync::Version;
use weightsync_serve::synchronizer::{
    Ended, Fetch, Fetcher, Method, PartyOptions, Synchronizer, SynchronizerOptions,
};
use weightsync_store::{ModelVersion, Store, Which};

use crate::http::get;
use crate::world::{Exploring, Training, long, style};

fn options() -> SynchronizerOptions {
    SynchronizerOptions::new().style(style("fully_async", 1))
}

/// A service that keeps what it has to know in a directory.
fn lasting(dir: &Path, method: Method) -> SynchronizerOptions {
    options()
        .method(method)
        .store(dir.join("store").display().to_string())
        .run_dir(dir.join("run"))
}

/// How a trainer's versions reach that service, or its store.
fn scheme(dir: &Path, method: Method) -> String {
    match method {
        Method::Checkpoint => format!("store:{}", dir.join("store").display()),
        _ => "distributed".into(),
    }
}

fn connect(served: &Synchronizer) -> Synchronizer {
    Synchronizer::connect(&served.address().unwrap().to_string(), None).unwrap()
}

fn trainer(name: &str) -> PartyOptions {
    PartyOptions::new(name)
}

#[test]
fn parties_join_a_service_that_restarts() {
    let served = Synchronizer::serve(options(), "127.0.0.1:0").unwrap();
    let at = served.address().unwrap().to_string();
    let sync = connect(&served);
    let mut training = Training::join(&sync, trainer("trainer"), "distributed", 0);
    let mut explorer = Exploring::join(&sync, PartyOptions::new("e0"));
    assert_eq!(explorer.sync(long()).version.0, 1);
    training.step = 1;
    assert!(training.sync(long()).is_synced());
    drop(served);
    // Without it nobody is held up, and a timeout is an answer.
    let need = explorer.explorer.need_sync(Some(1)).unwrap();
    assert!(!need.is_needed() && !need.connected);
    let answer = explorer.sync(Some(Duration::from_millis(10)));
    assert_eq!((answer.ended, answer.version.0), (Ended::TimedOut, 1));
    let _served = Synchronizer::serve(options(), &at).unwrap();
    // It knew of no version. The trainer joins again with its newest.
    assert!(training.trainer.need_sync(Some(1)).unwrap().connected);
    assert_eq!(explorer.sync(long()).version.0, 2);
    assert_eq!(explorer.runs, Some(1));
    training.step = 2;
    let answer = training.sync(long());
    assert_eq!(answer.version.0, 3, "{answer}");
    assert_eq!(explorer.sync(long()).version.0, 3);
}

#[test]
fn due_sync_outlives_a_restart_of_the_service() {
    let dir = tempfile::tempdir().unwrap();
    let options = || {
        let options = SynchronizerOptions::new().style(style("fixed", 4));
        options.run_dir(dir.path().join("run"))
    };
    let served = Synchronizer::serve(options(), "127.0.0.1:0").unwrap();
    let at = served.address().unwrap().to_string();
    let sync = connect(&served);
    let mut training = Training::join(&sync, trainer("trainer"), "distributed", 0);
    let mut exploring = Exploring::join(&sync, PartyOptions::new("e0"));
    assert!(exploring.sync(long()).is_synced());
    exploring.step = 4;
    let answer = exploring.sync(Some(Duration::from_millis(10)));
    assert_eq!(answer.ended, Ended::TimedOut);
    drop(served);
    let _served = Synchronizer::serve(options(), &at).unwrap();
    // It joins again after its fifth step, and what was due at the fourth is due.
    let need = exploring.explorer.need_sync(Some(5)).unwrap();
    assert!(need.connected && need.is_needed());
    training.step = 4;
    assert!(training.sync(long()).is_synced());
    assert!(exploring.sync(long()).is_synced());
    assert!(!exploring.explorer.need_sync(Some(6)).unwrap().is_needed());
}

#[test]
fn stop_of_the_trainer_outlives_the_service() {
    let dir = tempfile::tempdir().unwrap();
    let options = || lasting(dir.path(), Method::Memory);
    let served = Synchronizer::serve(options(), "127.0.0.1:0").unwrap();
    let at = served.address().unwrap().to_string();
    let sync = connect(&served);
    let training = Training::join(&sync, trainer("trainer"), "distributed", 1);
    let mut exploring = Exploring::join(&sync, PartyOptions::new("e0"));
    assert!(exploring.sync(long()).is_synced());
    training.trainer.leave(None);
    drop(served);
    let _served = Synchronizer::serve(options(), &at).unwrap();
    // One that was here knows that the run goes on, and that nothing comes.
    assert_eq!(exploring.sync(long()).ended, Ended::NothingNewer);
    // A new one may be of a run whose trainer is still to come.
    let mut new = Exploring::join(&sync, PartyOptions::new("new"));
    assert!(new.sync(long()).is_synced());
    new.step = 1;
    let answer = new.sync(Some(Duration::from_millis(20)));
    assert_eq!(answer.ended, Ended::TimedOut);
    assert!(!new.explorer.need_sync(Some(2)).unwrap().trainer_stopped);
}

#[test]
fn step_that_nobody_knows_is_no_step() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store").display().to_string();
    let options = || options().method(Method::Memory).store(store.clone());
    let served = Synchronizer::serve(options(), "127.0.0.1:0").unwrap();
    let at = served.address().unwrap();
    let mut training = Training::join(&connect(&served), trainer("trainer"), "distributed", 40);
    training.step = 50;
    assert!(training.sync(long()).is_synced());
    let newest = ModelVersion {
        model: None,
        version: Version(2),
    };
    let stored = Store::open(&store).unwrap();
    stored
        .wait(&Which::AtLeast(newest), long())
        .unwrap()
        .unwrap();
    let saved = "weightsync_saves_total{ended=\"durable\"}";
    assert!(get(at, "/metrics", "").text().contains(saved));
    training.trainer.leave(None);
    drop(served);
    // Without a run directory it knows the version, and not the step.
    let served = Synchronizer::serve(options(), "127.0.0.1:0").unwrap();
    let mut explorer = connect(&served)
        .explorer(PartyOptions::new("late"), long())
        .unwrap();
    let mut fetcher = Fetcher::default();
    let load = |fetch: &Fetch| Ok(fetcher.fetch(fetch)?.members()[0].snapshot.version());
    let answer = explorer.sync(None, long(), load).unwrap();
    assert_eq!((answer.version, answer.step), (Version(2), None));
    assert_eq!(answer.steps_behind, 0);
}

#[test]
fn explorer_waits_through_a_restart() {
    let served = Synchronizer::serve(options(), "127.0.0.1:0").unwrap();
    let at = served.address().unwrap().to_string();
    let sync = connect(&served);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut explorer = Exploring::join(&sync, PartyOptions::new("e0"));
            explorer.sync(long())
        });
        std::thread::sleep(Duration::from_millis(50));
        drop(served);
        let served = Synchronizer::serve(options(), &at).unwrap();
        let training = Training::join(&sync, trainer("trainer"), "distributed", 5);
        let answer = waiting.join().unwrap();
        assert_eq!((answer.version.0, answer.step), (1, Some(5)));
        training.trainer.leave(None);
        drop(served);
    });
}

#[test]
fn service_begins_with_the_newest_of_its_store() {
    let dir = tempfile::tempdir().unwrap();
    for method in [Method::Memory, Method::Checkpoint] {
        let dir = dir.path().join(format!("{method:?}"));
        let served = Synchronizer::serve(lasting(&dir, method), "127.0.0.1:0").unwrap();
        let sync = connect(&served);
        let scheme = scheme(&dir, method);
        let mut training = Training::join(&sync, trainer("trainer"), &scheme, 0);
        for step in [3, 7] {
            training.step = step;
            assert!(training.sync(long()).is_synced());
        }
        // The trainer, its memory and the service are gone.
        drop(training);
        drop(sync);
        drop(served);
        let served = Synchronizer::serve(lasting(&dir, method), "127.0.0.1:0").unwrap();
        let sync = connect(&served);
        let mut explorer = Exploring::join(&sync, PartyOptions::new("late"));
        let answer = explorer.sync(long());
        assert_eq!((answer.version.0, explorer.runs), (3, Some(7)), "{answer}");
        // A restarted trainer continues the numbers.
        let training = Training::join(&sync, trainer("again"), &scheme, 7);
        assert_eq!(training.trainer.next_version().0, 5);
        assert_eq!(explorer.sync(long()).version.0, 4);
        training.trainer.leave(None);
    }
}

#[test]
fn explorer_runs_an_older_version_of_the_store() {
    let dir = tempfile::tempdir().unwrap();
    for method in [Method::Memory, Method::Checkpoint] {
        let dir = dir.path().join(format!("{method:?}"));
        let served = Synchronizer::serve(lasting(&dir, method), "127.0.0.1:0").unwrap();
        let sync = connect(&served);
        let scheme = scheme(&dir, method);
        let mut training = Training::join(&sync, trainer("trainer"), &scheme, 0);
        let mut explorer = Exploring::join(&sync, PartyOptions::new("e0"));
        let store = Store::open(&explorer.explorer.store().unwrap().unwrap()).unwrap();
        let of = |number| ModelVersion {
            model: None,
            version: Version(number),
        };
        for (step, number) in [(3, 2), (7, 3)] {
            training.step = step;
            assert!(training.sync(long()).is_synced());
            // The service saves while it goes on, and passes over what is not the newest any more.
            let saved = store.wait(&Which::AtLeast(of(number)), long()).unwrap();
            assert!(saved.is_some());
        }
        assert_eq!(explorer.sync(long()).version.0, 3);
        let older = store.load(&Which::Exactly(of(2))).unwrap().set;
        let version = older.members()[0].snapshot.version();
        let answer = explorer.explorer.loaded(version).unwrap();
        assert_eq!((answer.version.0, answer.step), (2, Some(3)), "{answer}");
        assert_eq!((answer.versions_behind, answer.steps_behind), (1, 4));
        // The next sync has the newest again.
        assert!(explorer.explorer.need_sync(Some(1)).unwrap().is_needed());
        assert_eq!(explorer.sync(long()).version.0, 3);
        training.trainer.leave(None);
    }
    // Nothing keeps the versions.
    let sync = Synchronizer::local(options()).unwrap();
    let interval = NonZero::new(5);
    let options = PartyOptions::new("e0").eval_interval(interval);
    let mut explorer = Exploring::join(&sync, options).explorer;
    assert_eq!(explorer.store().unwrap(), None);
    let due: Vec<_> = (0..12).filter(|step| explorer.need_eval(*step)).collect();
    assert_eq!(due, [5, 10]);
}

#[test]
fn version_that_is_only_in_the_store_is_served() {
    let dir = tempfile::tempdir().unwrap();
    for method in [Method::Memory, Method::Checkpoint] {
        let dir = dir.path().join(format!("{method:?}"));
        let served = Synchronizer::serve(lasting(&dir, method), "127.0.0.1:0").unwrap();
        let at = served.address().unwrap();
        let sync = connect(&served);
        let scheme = scheme(&dir, method);
        let mut training = Training::join(&sync, trainer("trainer"), &scheme, 10);
        for step in [11, 12, 13] {
            // Each is saved before the next.
            let store = weightsync::store::Store::open(&dir.join("store").display().to_string());
            let newest = training.trainer.next_version().0 - 1;
            let which = weightsync::store::Which::AtLeast(weightsync::Version(newest).into());
            store.unwrap().wait(&which, long()).unwrap().unwrap();
            training.step = step;
            assert!(training.sync(long()).is_synced());
        }
        for (version, step) in [("1", 10.0), ("2", 11.0), ("latest", 13.0)] {
            let file = get(
                at,
                &format!("/v1/versions/{version}/policy.safetensors"),
                "",
            );
            assert_eq!(file.status, 200, "{method:?}, {version}: {}", file.head);
            let last = file.body.last_chunk::<4>().unwrap();
            assert_eq!(f32::from_le_bytes(*last), step);
        }
        let missing = get(at, "/v1/versions/77/policy.safetensors", "");
        assert_eq!(missing.status, 404);
        // The page links those that it can be asked for.
        let status = get(at, "/v1/status", "").json();
        let held = status["versions"].as_array().unwrap().iter();
        let held: Vec<_> = held.map(|one| (&one["version"], &one["held"])).collect();
        let all = [4, 3, 2, 1].map(Value::from);
        let all: Vec<_> = all
            .iter()
            .map(|version| (version, &Value::Bool(true)))
            .collect();
        assert_eq!(held, all, "{method:?}");
    }
}

#[test]
fn old_trainer_stays_fenced_off_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let served = Synchronizer::serve(lasting(dir.path(), Method::Memory), "127.0.0.1:0").unwrap();
    let at = served.address().unwrap().to_string();
    let sync = connect(&served);
    let mut old = Training::join(&sync, trainer("old"), "distributed", 0);
    let mut new = Training::join(&sync, trainer("new"), "distributed", 0);
    drop(served);
    let _served = Synchronizer::serve(lasting(dir.path(), Method::Memory), &at).unwrap();
    let refused = old.trainer.need_sync(Some(1)).unwrap_err().to_string();
    assert!(refused.contains("fenced off"), "{refused}");
    new.step = 1;
    assert!(new.sync(long()).is_synced());
    assert!(old.trainer.need_sync(Some(2)).is_err());
}

#[test]
fn explorer_that_comes_back_takes_its_place() {
    let served = Synchronizer::serve(options(), "127.0.0.1:0").unwrap();
    let sync = connect(&served);
    let mut training = Training::join(&sync, trainer("trainer"), "distributed", 0);
    for _ in 0..3 {
        let mut explorer = Exploring::join(&sync, PartyOptions::new("e0"));
        assert!(explorer.sync(long()).is_synced());
        training.step += 1;
        let answer = training.sync(long());
        assert_eq!(answer.explorers.len(), 1, "{answer}");
        // Dropped without a word, as one that is killed.
    }
    training.trainer.leave(None);
}
