//! Nothing of a connection outlives it.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::Instant;

use weightsync_engine::{DigestPolicy, Expect, SendOptions, SenderSetup};

use crate::{BRIEF, pair_by, send_to, soon, weights};

/// Set in a process that runs one test alone.
const ALONE: &str = "WEIGHTSYNC_TEST_ALONE";

/// Runs a test in a process of its own, where descriptors and threads are its
/// alone: nextest gives every test one.
fn alone(name: &str, test: fn()) {
    if std::env::var_os(ALONE).is_some() || std::env::var_os("NEXTEST").is_some() {
        return test();
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&run.stderr)
    );
}

/// Descriptors by what they are, threads by name, and mappings of shared memory.
fn held() -> BTreeMap<String, usize> {
    let mut held = BTreeMap::new();
    let mut count = |what: String| *held.entry(what).or_default() += 1;
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        // The descriptor that lists them is gone by the time it is looked at.
        let Ok(target) = fs::read_link(entry.unwrap().path()) else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        count(format!(
            "fd {}",
            target.split_once('[').map_or(&*target, |(kind, _)| kind)
        ));
    }
    for entry in fs::read_dir("/proc/self/task").unwrap() {
        if let Ok(name) = fs::read_to_string(entry.unwrap().path().join("comm")) {
            count(format!("thread {}", name.trim()));
        }
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("weightsync"))
        .for_each(|_| count("mapping".into()));
    held
}

/// A thread that was joined may be listed a moment longer.
fn assert_nothing_left(before: &BTreeMap<String, usize>) {
    let until = Instant::now() + soon();
    while held() != *before {
        assert!(
            Instant::now() < until,
            "before {before:#?}, after {:#?}",
            held()
        );
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn connection_leaves_no_descriptor_thread_or_mapping() {
    alone(
        "leaks::connection_leaves_no_descriptor_thread_or_mapping",
        || {
            let before = held();
            for round in 0..20 {
                let setup = SenderSetup::new("policy", &weights()).unwrap();
                let setup = setup
                    .slots(2, 4)
                    .digest(DigestPolicy::Background)
                    .copy_threads(2);
                let (mut sender, mut receiver) = pair_by(setup, &weights());
                let first = receiver.latest().unwrap().unwrap();
                let second = send_to(&mut sender, &weights(), &mut receiver);
                let third = send_to(&mut sender, &weights(), &mut receiver);
                let views = [&first, &second, &third, &first].map(|one| one.private().unwrap());
                assert!(
                    held().values().sum::<usize>() > before.values().sum(),
                    "it is counted"
                );
                // In any order.
                match round % 3 {
                    0 => drop((sender, receiver, views, first, second, third)),
                    1 => drop((third, receiver, second, views, sender, first)),
                    _ => drop((receiver, first, second, third, sender, views)),
                }
            }
            assert_nothing_left(&before);
        },
    );
}

/// The handle of an asynchronous send keeps what is known of it, and no more.
#[test]
fn the_handle_of_a_send_keeps_nothing_of_a_connection() {
    let name = "leaks::the_handle_of_a_send_keeps_nothing_of_a_connection";
    alone(name, || {
        let before = held();
        let setup = SenderSetup::new("policy", &weights()).unwrap();
        let (mut sender, mut receiver) = pair_by(setup, &weights());
        let options = SendOptions::new();
        let settled = sender.send_async(&weights(), &options).unwrap();
        receiver.recv_timeout(soon()).unwrap().unwrap();
        let pending = sender.send_async(&weights(), &options).unwrap();
        drop((sender, receiver));
        assert_nothing_left(&before);
        assert!(settled.wait(None).unwrap().all_applied());
        pending.wait(None).unwrap_err();
    });
}

#[test]
fn a_connect_that_fails_leaves_nothing() {
    alone("leaks::a_connect_that_fails_leaves_nothing", || {
        let before = held();
        for _ in 0..5 {
            let setup = SenderSetup::new("policy", &weights()).unwrap();
            setup
                .connect(&weights(), Expect::Count(1), Some(BRIEF))
                .unwrap_err();
        }
        assert_nothing_left(&before);
    });
}
