//! Links that are cut, silent or slow.

use std::time::{Duration, Instant};

use weightsync_conformance::hosts::{Hosts, HostsError};
use weightsync_conformance::scale::patience;

use super::scale::{second, slowness};
use super::stage::{Actor, GIGABIT, Stage, at_agents};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_link_is_cut_and_restored", || broken(Hosts::cut, false)),
    ("a_link_is_silent_and_restored", || {
        broken(Hosts::silence, false)
    }),
    ("a_link_is_cut_during_a_transfer", || {
        broken(Hosts::cut, true)
    }),
    ("a_link_is_silent_during_a_transfer", || {
        broken(Hosts::silence, true)
    }),
    (
        "worker_restarted_elsewhere_replaces_its_old_host",
        elsewhere,
    ),
    ("lost_worker_has_a_line_until_back_or_forgotten", lost),
    ("a_question_outlives_the_link_it_was_asked_by", asked),
    ("a_slow_link_neither_slows_others_nor_starves", slow),
];

const MIB: usize = 1 << 20;

/// How long a link is broken.
const BROKEN: Duration = Duration::from_secs(3);

/// Hosts with a relay and two workers each, and one with a worker alone; the
/// middle relay's host and the latter are cut off.
fn broken(fault: fn(&Hosts, usize) -> Result<(), HostsError>, busy: bool) {
    let bytes = if busy { 32 * MIB } else { MIB };
    let mut stage = Stage::new(5, bytes);
    for host in 1..4 {
        stage.start_relay(host);
        let first = 10 * host as u32;
        stage.start_workers(host, &[first, first + 1]);
    }
    stage.start_workers(4, &[40]);
    if busy {
        stage.rate(0..5, 200_000_000);
    }
    for (host, gone) in [(2, vec![20, 21]), (4, vec![40])] {
        let (since, at, sent) = loop {
            let word = busy.then(|| {
                let word = stage.begin_send();
                let who = Actor::Worker(10 * host as u32);
                stage.until_came(who, bytes as u64 / 8);
                word
            });
            fault(&stage.hosts, host).unwrap_or_else(|error| panic!("{error}"));
            let since = Instant::now();
            stage.note(&format!("host {host} is cut off"));
            let word = word.unwrap_or_else(|| stage.begin_send());
            let (at, sent) = stage.report_at(word);
            if !busy || !sent.failed().is_empty() {
                break (since, at, sent);
            }
            // This process was starved, and the transfer had ended by then.
            stage.note("that was after the transfer");
            let restored = stage.hosts.restore(host);
            restored.unwrap_or_else(|error| panic!("{error}"));
            stage.until_all_newest();
        };
        stage.note(&format!("the send took {:?}", sent.took));
        assert_eq!(sent.failed(), gone, "{sent:?}");
        for worker in gone {
            assert_eq!(sent.outcome(worker), "Lost", "{sent:?}");
            let line = sent.workers.iter().find(|line| line.worker == worker);
            let after = line.map_or(sent.took, |line| line.after);
            // From the version on; the fault came later where it is busy.
            let named = at - (sent.took - after);
            let late = named.saturating_duration_since(since);
            stage.note(&format!("worker {worker} is named {late:?} after that"));
            assert!(late < second(), "{late:?}: {sent:?}");
        }
        stage.listen(since + BROKEN);
        let restored = stage.hosts.restore(host);
        restored.unwrap_or_else(|error| panic!("{error}"));
        // Without anybody doing anything.
        stage.until_all_newest();
        stage.note(&format!(
            "it has the newest {:?} after that",
            since.elapsed()
        ));
        stage.until_status("everybody is reached", |status| at_agents(status) == 7);
        stage.send_everywhere();
    }
}

/// A host falls silent, and its worker is started on another one at once.
fn elsewhere() {
    let mut stage = Stage::new(3, MIB);
    for host in [1, 2] {
        stage.start_relay(host);
        stage.start_workers(host, &[10 * host as u32]);
    }
    let silenced = stage.hosts.silence(1);
    silenced.unwrap_or_else(|error| panic!("{error}"));
    let since = Instant::now();
    stage.kill(Actor::Relay(1));
    stage.kill(Actor::Worker(10));
    // A refused connection fails at once.
    stage.start_workers(2, &[10]);
    stage.note(&format!("it is back after {:?}", since.elapsed()));
    let sent = stage.send();
    assert_eq!(sent.outcome(10), "Applied", "{sent:?}");
}

/// A host is cut off, and its worker is killed meanwhile.
fn lost() {
    let mut stage = Stage::new(3, MIB);
    for host in [1, 2] {
        stage.start_relay(host);
        stage.start_workers(host, &[10 * host as u32]);
    }
    for is_killed in [false, true] {
        let cut = stage.hosts.cut(1);
        cut.unwrap_or_else(|error| panic!("{error}"));
        for _ in 0..3 {
            let sent = stage.send();
            let of_both = (sent.outcome(10), sent.outcome(20));
            assert_eq!(of_both, ("Lost", "Applied"), "{sent:?}");
        }
        if is_killed {
            stage.kill(Actor::Worker(10));
            assert_eq!(stage.send().failed(), [10]);
        }
        let restored = stage.hosts.restore(1);
        restored.unwrap_or_else(|error| panic!("{error}"));
        if is_killed {
            stage.until_status("its relay is back", |status| status.relays.len() == 2);
            for _ in 0..2 {
                let sent = stage.send();
                assert_eq!(sent.failed(), [10], "{sent:?}");
            }
            stage.start_workers(1, &[10]);
        }
        stage.until_all_newest();
        let sent = stage.send_everywhere();
        assert_eq!(sent.workers.len(), 2, "{sent:?}");
    }
    let cut = stage.hosts.cut(1);
    cut.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(stage.send().outcome(10), "Lost");
    stage.forget(10);
    let sent = stage.send();
    assert_eq!(sent.outcome(10), "no line", "{sent:?}");
    let restored = stage.hosts.restore(1);
    restored.unwrap_or_else(|error| panic!("{error}"));
    stage.until_all_newest();
    stage.send_everywhere();
}

/// Workers that wait for the next version are cut off, behind a relay and alone;
/// that comes meanwhile.
fn asked() {
    let mut stage = Stage::pulled(3, MIB);
    stage.start_relay(1);
    stage.start_workers(1, &[10]);
    stage.start_workers(2, &[20]);
    for versions in 0..3 {
        for host in [1, 2] {
            let cut = stage.hosts.cut(host);
            cut.unwrap_or_else(|error| panic!("{error}"));
        }
        let since = Instant::now();
        for _ in 0..versions {
            stage.publish();
        }
        stage.listen(since + BROKEN);
        for host in [1, 2] {
            let restored = stage.hosts.restore(host);
            restored.unwrap_or_else(|error| panic!("{error}"));
        }
        if versions == 0 {
            stage.until_status("everybody is reached", |status| at_agents(status) == 2);
            stage.publish();
        }
        stage.until_all_newest();
        stage.publish();
        stage.until_all_newest();
    }
}

/// The first of a chain gets a link of a thousandth of the others'.
fn slow() {
    // Less says little of a link.
    let bytes = MIB;
    let mut stage = Stage::new(5, bytes);
    stage.rate(0..5, GIGABIT);
    for host in 1..5 {
        stage.start_relay(host);
        stage.start_workers(host, &[host as u32]);
    }
    for _ in 0..3 {
        stage.send_everywhere();
    }
    // A busy machine may have made the sender order them by other speeds.
    let first = stage.status().relays[0].address.clone();
    let slow = (1..5)
        .find(|host| stage.hosts.address(*host).to_string() == first)
        .unwrap_or_else(|| panic!("no host has the address {first}"));
    let slow_worker = slow as u32;
    let fast: Vec<u32> = (1..5).filter(|worker| *worker != slow_worker).collect();
    stage.rate([slow], 1_000_000);
    // The loss is noticed after some seconds, as long as a version takes.
    let begun = Instant::now();
    stage.publish();
    // A host that does not get to run may be missing for a moment.
    stage.until_status("the slow one is at the end", |status| {
        let last = status.relays.last();
        status.relays.len() == 4 && last.is_some_and(|last| last.address == first)
    });
    stage.note(&format!("it is last after {:?}", begun.elapsed()));
    stage.until_all_newest();
    // From here on the others do not wait for it, and it gets what it can.
    let (mut of_slow, mut took) = (0, Vec::new());
    let before = stage.seen(slow_worker);
    while of_slow < 2 {
        let seen = stage.seen(slow_worker);
        let published = Instant::now();
        stage.publish();
        stage.until("the fast ones have it", |stage| {
            fast.iter().all(|worker| stage.has_newest(*worker))
        });
        took.push(published.elapsed());
        // Ten a second at most, so that it misses many.
        stage.listen(published + Duration::from_millis(100));
        of_slow += u64::from(stage.seen(slow_worker) != seen);
        if begun.elapsed() > patience(20) {
            let seen = stage.seen(slow_worker);
            let status = stage.status();
            stage.fail(&format!("starved: {before:?}, {seen:?}; {status:#?}"));
        }
    }
    stage.note(&format!(
        "{} versions at the fast ones, in {took:?}; {of_slow} at the slow one",
        took.len()
    ));
    // One of its versions takes ten seconds, which all of theirs would take if they waited for it.
    // The pauses of a busy machine are few among many.
    let long = took
        .iter()
        .filter(|one| **one > Duration::from_secs(2).mul_f64(slowness()));
    assert!(
        long.count() * 10 <= took.len() && took.len() > 20,
        "{took:?}"
    );
    stage.until_all_newest();
}
