//! Hosts whose links take longer for a version than until the next one.

use std::time::{Duration, Instant};

use super::messages::Content;
use super::stage::{Actor, GIGABIT, Stage, TRAINERS};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_slow_host_keeps_what_came_when_its_worker_dies", first),
    ("a_host_that_falls_behind_returns_to_deltas", behind),
    ("worker_before_its_relay_fetches_little_itself", early),
    ("worker_with_short_timeouts_fetches_once", impatient),
];

const MIB: u64 = 1 << 20;

/// A worker dies while the first version is on its way to its relay, and another follows,
/// while versions are published. What had come is kept: the other begins with that version, which is
/// no longer the newest.
fn first() {
    let bytes = 16 * MIB;
    let mut stage = Stage::new(2, bytes as usize);
    stage.start_relay(1);
    // A version takes seven seconds.
    stage.rate([1], 20_000_000);
    let first = stage.newest();
    stage.begin_worker(10, 1);
    for _ in 0..3 {
        stage.until_came(Actor::Relay(1), bytes / 4);
        stage.publish();
    }
    stage.kill(Actor::Worker(10));
    stage.publish();
    stage.begin_worker(11, 1);
    begins_with(&mut stage, 11, first, Actor::Relay(1), bytes);
}

/// Waits for a worker's first version, which is to be this one and to come once to `to`, and then for the
/// newest.
fn begins_with(stage: &mut Stage, worker: u32, first: u64, to: Actor, bytes: u64) {
    // Little comes of the next one until a busy machine has seen that the first is there.
    stage.rate([1], 10_000_000);
    stage.until_status("a version has come", |status| {
        status.relays.iter().any(|relay| !relay.holds.is_empty())
    });
    let came = stage.came_to(to);
    stage.note(&format!("{came} bytes came for a version of {bytes}"));
    assert!(came < bytes + bytes / 2, "{came} bytes of {bytes}");
    // Another would come before a worker that does not get to run has begun.
    stage.rate([1], 500_000);
    stage.until("it has some version", |stage| stage.seen(worker).is_some());
    stage.rate([1], GIGABIT);
    let seen = stage.seen(worker).map(|seen| seen.word);
    if seen != Some(first) {
        stage.fail(&format!("it began with {seen:?} instead of {first}"));
    }
    stage.until_all_newest();
}

/// A relay comes right after the worker of its host, or when half of a version has come.
fn early() {
    let bytes = 16 * MIB;
    for came in [0, bytes / 2] {
        let mut stage = Stage::new(2, bytes as usize);
        // A version takes seven seconds.
        stage.rate([1], 20_000_000);
        stage.begin_worker(10, 1);
        let worker = Actor::Worker(10);
        if came > 0 {
            stage.until_came(worker, came);
        }
        stage.start_relay(1);
        let joined = stage.came_to(worker);
        stage.until_all_newest();
        let after = stage.came_to(worker) - joined;
        stage.note(&format!(
            "{after} bytes came for a version of {bytes} once the relay was there"
        ));
        assert!(after < bytes + bytes / 4, "{after} bytes of {bytes}");
    }
}

/// A worker without a relay gives each `connect` a fraction of the time that a version takes, while
/// versions are published.
fn impatient() {
    let bytes = 16 * MIB;
    let mut stage = Stage::new(2, bytes as usize);
    // A version takes seven seconds.
    stage.rate([1], 20_000_000);
    let first = stage.newest();
    stage.begin_worker_with(10, 1, Duration::from_millis(1500));
    for _ in 0..3 {
        stage.until_came(Actor::Worker(10), bytes / 4);
        stage.publish();
    }
    begins_with(&mut stage, 10, first, Actor::Worker(10), bytes);
}

/// The last of a chain is cut off for some versions.
fn behind() {
    let bytes = 24 * MIB;
    let content = Content::Weights {
        percent: 1.0,
        single: false,
        deltas: true,
    };
    let mut stage = Stage::of(3, bytes as usize, content);
    stage.rate([TRAINERS], 100_000_000);
    stage.rate([1], GIGABIT);
    stage.rate([2], 20_000_000);
    // The first version takes the last ten seconds: by then it is known that it is slow.
    for host in [1, 2] {
        stage.start_relay(host);
        stage.start_workers(host, &[10 * host as u32]);
    }
    stage.send_everywhere();
    let changes = |stage: &mut Stage| {
        let before = stage.came_to(Actor::Relay(2));
        stage.send_everywhere();
        stage.came_to(Actor::Relay(2)) - before
    };
    let one = (0..3).map(|_| changes(&mut stage)).min().unwrap_or(bytes);
    stage.note(&format!("a version comes in {one} bytes"));
    assert!(one < bytes / 8, "{one}");
    let cut = stage.hosts.cut(2);
    cut.unwrap_or_else(|error| panic!("{error}"));
    for _ in 0..5 {
        let published = Instant::now();
        stage.publish();
        stage.until("the first has it", |stage| stage.has_newest(10));
        stage.listen(published + Duration::from_millis(300));
    }
    let before = stage.came_to(Actor::Relay(2));
    let restored = stage.hosts.restore(2);
    restored.unwrap_or_else(|error| panic!("{error}"));
    stage.until_all_newest();
    let came = stage.came_to(Actor::Relay(2)) - before;
    stage.note(&format!("{came} bytes came for five versions"));
    assert!(came < bytes / 2, "{came} bytes of {bytes}");
}
