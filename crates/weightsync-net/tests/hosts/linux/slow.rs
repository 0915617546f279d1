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

/// Bits a second of a link on which 16 MiB take seven seconds.
const SLOW: u64 = 20_000_000;

/// The same of one on which next to nothing comes.
const CRAWL: u64 = 500_000;

/// Weights of which little changes: what comes of a later version does not hide what came twice.
const CHANGES: Content = Content::Weights {
    percent: 1.0,
    single: false,
    deltas: true,
};

/// A worker dies while the first version is on its way to its relay, and another follows,
/// while versions are published. What had come is kept.
fn first() {
    let bytes = 16 * MIB;
    let mut stage = Stage::of(2, bytes as usize, CHANGES);
    stage.start_relay(1);
    stage.rate([1], SLOW);
    stage.begin_worker(10, 1);
    for _ in 0..3 {
        publish_on_the_way(&mut stage, Actor::Relay(1), bytes);
    }
    stage.kill(Actor::Worker(10));
    stage.publish();
    stage.begin_worker(11, 1);
    came_once(&mut stage, Actor::Relay(1), bytes);
}

/// Publishes a version after another quarter of the first one has come, which stays on its way.
fn publish_on_the_way(stage: &mut Stage, to: Actor, bytes: u64) {
    stage.until_came(to, bytes / 4);
    // A busy machine makes a version for longer than the rest of the first one takes.
    stage.rate([1], CRAWL);
    stage.publish();
    stage.rate([1], SLOW);
}

/// Waits for the newest version, and checks that the first one, of so many bytes, has come once, with what
/// changed in those after it.
fn came_once(stage: &mut Stage, to: Actor, bytes: u64) {
    stage.rate([1], GIGABIT);
    stage.until_all_newest();
    let came = stage.came_to(to);
    stage.note(&format!(
        "{came} bytes came in all for a version of {bytes}"
    ));
    assert!(came < bytes + bytes / 2, "{came} bytes of {bytes}");
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
    let mut stage = Stage::of(2, bytes as usize, CHANGES);
    stage.rate([1], SLOW);
    stage.begin_worker_with(10, 1, Duration::from_millis(1500));
    for _ in 0..3 {
        publish_on_the_way(&mut stage, Actor::Worker(10), bytes);
    }
    came_once(&mut stage, Actor::Worker(10), bytes);
}

/// The last of a chain is cut off for some versions.
fn behind() {
    let bytes = 24 * MIB;
    let mut stage = Stage::of(3, bytes as usize, CHANGES);
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
