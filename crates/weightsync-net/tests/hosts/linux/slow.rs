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
/// while versions are published.
fn first() {
    let bytes = 16 * MIB;
    let mut stage = Stage::new(2, bytes as usize);
    stage.start_relay(1);
    // A version takes seven seconds.
    stage.rate([1], 20_000_000);
    let before = stage.came_to(Actor::Relay(1));
    stage.begin_worker(10, 1);
    for _ in 0..3 {
        stage.until_came(Actor::Relay(1), bytes / 4);
        stage.publish();
    }
    stage.kill(Actor::Worker(10));
    stage.publish();
    stage.begin_worker(11, 1);
    stage.until("it has some version", |stage| stage.seen(11).is_some());
    let came = stage.came_to(Actor::Relay(1)) - before;
    stage.note(&format!("{came} bytes came for a version of {bytes}"));
    assert!(came < bytes + bytes / 4, "{came} bytes of {bytes}");
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
        let before = stage.came_to(worker);
        if came > 0 {
            stage.until_came(worker, came);
        }
        stage.start_relay(1);
        let joined = stage.came_to(worker);
        stage.until_all_newest();
        let (all, after) = {
            let now = stage.came_to(worker);
            (now - before, now - joined)
        };
        stage.note(&format!(
            "{all} bytes came for a version of {bytes}, {after} of them once the relay was there"
        ));
        assert!(all < came + bytes + bytes / 4, "{all} bytes of {bytes}");
        assert!(after < bytes + bytes / 8, "{after} bytes of {bytes}");
    }
}

/// A worker without a relay gives each `connect` a fraction of the time that a version takes, while
/// versions are published.
fn impatient() {
    let bytes = 16 * MIB;
    let mut stage = Stage::new(2, bytes as usize);
    // A version takes seven seconds.
    stage.rate([1], 20_000_000);
    stage.begin_worker_with(10, 1, Duration::from_millis(1500));
    let worker = Actor::Worker(10);
    let before = stage.came_to(worker);
    for _ in 0..3 {
        stage.until_came(worker, bytes / 4);
        stage.publish();
    }
    stage.until("it has some version", |stage| stage.seen(10).is_some());
    let came = stage.came_to(worker) - before;
    stage.note(&format!("{came} bytes came for a version of {bytes}"));
    assert!(came < bytes + bytes / 4, "{came} bytes of {bytes}");
    stage.until_all_newest();
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
