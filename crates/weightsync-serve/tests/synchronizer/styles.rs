//! A trainer with a slow and a fast explorer, by each method, in each style.

use std::sync::mpsc;
use std::time::Duration;

use weightsync_serve::synchronizer::{
    Ended, Fetch, Method, PartyOptions, Style, StyleWords, SynchronizerOptions, method,
};

use crate::world::{Exploring, Training, Way, World, long, style};

/// A trainer makes its steps of the samples of a slow and a fast explorer.
fn slow_and_fast(way: Way, of: Method, scheme: &str, style: Style) {
    let options = SynchronizerOptions::new().method(of).style(style);
    let world = World::new(way, options);
    let (samples, made) = mpsc::channel();
    std::thread::scope(|scope| {
        let sync = &world.sync;
        let training = Training::join(sync, PartyOptions::new("trainer"), scheme, 0);
        let trainer = scope.spawn(move || training.run(8, &made));
        let explorer = |name: &'static str, each: u64| {
            let samples = samples.clone();
            scope.spawn(move || {
                let exploring = Exploring::join(sync, PartyOptions::new(name));
                exploring.run(12, Duration::from_millis(each), &samples)
            })
        };
        let (slow, fast) = (explorer("slow", 25), explorer("fast", 5));
        let all = [slow.join().unwrap(), fast.join().unwrap()];
        for answers in &all {
            // With the direct method the trainer may have stopped before the slow one came.
            let synced = answers.iter().any(|one| one.is_synced());
            assert!(synced || of == Method::Direct, "{answers:?}");
        }
        let mut answers = all.iter().flatten();
        assert!(answers.any(|one| one.is_synced()), "{all:?}");
        for answers in all {
            for answer in answers {
                let fine = matches!(
                    answer.ended,
                    Ended::Synced | Ended::NothingNewer | Ended::OutOfReach | Ended::TrainerLeft
                );
                assert!(fine, "{answer}");
            }
        }
        assert_eq!(trainer.join().unwrap(), 8);
    });
}

fn all_styles() -> Vec<Style> {
    let bounded: StyleWords = "bounded".parse().unwrap();
    let fixed: StyleWords = "fixed".parse().unwrap();
    vec![
        style("fixed", 1),
        fixed.interval(2).offset(1).style().unwrap(),
        style("dynamic_by_explorer", 2),
        style("dynamic_by_trainer", 2),
        style("fully_async", 1),
        bounded.lag(2).style().unwrap(),
    ]
}

#[test]
fn memory_serves_slow_and_fast_explorers() {
    for style in all_styles() {
        slow_and_fast(Way::InProgram, Method::Memory, "shared-mem", style);
    }
}

#[test]
fn memory_serves_explorers_over_http() {
    for style in all_styles() {
        slow_and_fast(Way::OverHttp, Method::Memory, "distributed", style);
    }
}

#[test]
fn direct_serves_slow_and_fast_explorers() {
    for style in all_styles() {
        slow_and_fast(Way::InProgram, Method::Direct, "shared-mem", style);
    }
}

#[test]
fn direct_serves_explorers_over_http() {
    for style in all_styles() {
        slow_and_fast(Way::OverHttp, Method::Direct, "distributed", style);
    }
}

#[test]
fn checkpoint_serves_slow_and_fast_explorers() {
    for style in all_styles() {
        let dir = tempfile::tempdir().unwrap();
        let scheme = format!("store:{}", dir.path().display());
        slow_and_fast(Way::OverHttp, Method::Checkpoint, &scheme, style);
    }
}

#[test]
fn newest_is_pulled_only_if_it_is_newer() {
    // (own, newest) of upstream's test: (none, none), (none, 3), (2, 4), (3, 3).
    let options = || SynchronizerOptions::new().style(style("fully_async", 1));
    let soon = Some(Duration::from_millis(50));
    let world = World::new(Way::InProgram, options());
    let mut explorer = Exploring::join(&world.sync, PartyOptions::new("e0"));
    let answer = explorer.sync(soon);
    assert_eq!((answer.ended, answer.version.0), (Ended::TimedOut, 0));
    let mut training = Training::join(&world.sync, PartyOptions::new("trainer"), "shared-mem", 0);
    for step in 1..=2 {
        training.step = step;
        assert!(training.sync(long()).is_synced());
    }
    let answer = explorer.sync(long());
    assert_eq!((answer.ended, answer.version.0), (Ended::Synced, 3));
    let answer = explorer.sync(soon);
    assert_eq!((answer.ended, answer.version.0), (Ended::TimedOut, 3));
    training.step = 3;
    assert!(training.sync(long()).is_synced());
    let answer = explorer.sync(long());
    assert_eq!((answer.ended, answer.version.0), (Ended::Synced, 4));
    training.trainer.leave(None);
    let answer = explorer.sync(long());
    assert_eq!((answer.ended, answer.version.0), (Ended::NothingNewer, 4));
}

#[test]
fn synchronizer_outlives_the_trainer() {
    for way in [Way::InProgram, Way::OverHttp] {
        let world = World::new(way, SynchronizerOptions::new());
        let scheme = match way {
            Way::InProgram => "shared-mem",
            Way::OverHttp => "distributed",
        };
        let mut training = Training::join(&world.sync, PartyOptions::new("trainer"), scheme, 0);
        training.step = 1;
        assert!(training.sync(long()).is_synced());
        training.trainer.leave(None);
        drop(training.sender);
        // Its memory is gone, and the synchronizer has the version.
        let mut explorer = Exploring::join(&world.sync, PartyOptions::new("late"));
        let answer = explorer.sync(long());
        assert!(answer.is_synced(), "{answer}");
        assert_eq!((explorer.runs, answer.steps_behind), (Some(1), 0));
    }
}

#[test]
fn words_choose_the_method() {
    let world = World::new(Way::InProgram, SynchronizerOptions::new());
    let options = PartyOptions::new("trainer").method(method("online").unwrap());
    let training = Training::join(&world.sync, options, "shared-mem", 0);
    assert_eq!(training.trainer.method(), Method::Direct);
    let options = PartyOptions::new("other").method(Method::Memory);
    let refused = world
        .sync
        .explorer(options, long())
        .unwrap_err()
        .to_string();
    assert!(refused.contains("method=memory"), "{refused}");
}

#[test]
fn explorer_that_dies_in_a_meeting_is_named() {
    for way in [Way::InProgram, Way::OverHttp] {
        let options = SynchronizerOptions::new().method(Method::Direct);
        let world = World::new(way, options);
        let scheme = match way {
            Way::InProgram => "shared-mem",
            Way::OverHttp => "distributed",
        };
        std::thread::scope(|scope| {
            let sync = &world.sync;
            let mut training = Training::join(sync, PartyOptions::new("trainer"), scheme, 0);
            let mut lives = Exploring::join(sync, PartyOptions::new("lives"));
            let mut dies = sync.explorer(PartyOptions::new("dies"), long()).unwrap();
            (lives.step, training.step) = (1, 1);
            let living = scope.spawn(move || lives.sync(long()));
            let dying = scope.spawn(move || {
                let died = |_: &Fetch| panic!("as a test has it");
                dies.sync(Some(1), long(), died)
            });
            let answer = training.sync(long());
            assert!(dying.join().is_err());
            assert!(living.join().unwrap().is_synced());
            assert!(answer.is_synced(), "{answer}");
            let mut lines: Vec<_> = answer.explorers.iter().collect();
            lines.sort_by(|a, b| a.name.cmp(&b.name));
            let ended: Vec<_> = lines
                .iter()
                .map(|line| (&line.name[..], line.ended))
                .collect();
            let expected = [("dies", Some(Ended::Left)), ("lives", Some(Ended::Synced))];
            assert_eq!(ended, expected, "{answer}");
            assert!(lines[0].reason.is_some(), "{answer}");
        });
    }
}
