//! How versions come to many hosts when nothing goes wrong, and to who comes late.

use weightsync_core::{SenderStatus, WorkerRoute};

use super::messages::Content;
use super::stage::{Actor, GIGABIT, Stage, chain};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("versions_go_down_a_chain_of_relays_once", relays),
    ("by_an_arity_of_two_hosts_stand_in_a_tree", tree),
    ("workers_without_a_relay_fetch_for_themselves", alone),
    ("a_late_worker_gets_the_newest", late),
    ("what_changed_goes_down_a_chain_of_relays", changes),
    ("relay_makes_two_slots_or_one_if_they_are_large", slots),
];

const MIB: usize = 1 << 20;

fn relays() {
    const SENDS: u64 = 5;
    let bytes = 8 * MIB;
    let mut stage = Stage::new(5, bytes);
    stage.rate(0..5, GIGABIT);
    for host in 1..5 {
        stage.start_relay(host);
        let first = 10 * host as u32;
        stage.start_workers(host, &[first, first + 1]);
    }
    for _ in 0..SENDS {
        let sent = stage.send_everywhere();
        stage.note(&format!("version {} in {:?}", sent.version, sent.took));
    }
    // The host's first version, and the sends.
    let once = (SENDS + 1) * bytes as u64;
    let status = stage.until_status("everything is counted", |status| {
        status.served >= once && status.relays.iter().all(|one| one.received >= once)
    });
    let chain = chain(&status);
    assert_eq!(chain.len(), 4, "{status:#?}");
    // Four hosts cost the sender what one does, and eight workers what four do.
    let about = once..once + once / 10;
    assert!(about.contains(&status.served), "{status:#?}");
    for relay in &chain {
        assert!(about.contains(&relay.received), "{status:#?}");
        assert_eq!(
            status.workers_by(WorkerRoute::Agent(relay.agent)).count(),
            2,
            "{status:#?}"
        );
    }
    // Its relay has fetched what this one reads.
    assert_eq!(stage.seen(10).expect("it has a version").travelled, None);
    let (served, name) = (status.served, &chain[3].address);
    stage.note(&format!("served {served} bytes of {once}; {name} is last"));
}

/// A slot costs the memory of a model.
fn slots() {
    for (bytes, first) in [(MIB, 2), (32 * MIB, 1)] {
        let mut stage = Stage::new(2, bytes);
        stage.start_relay(1);
        let relay = Actor::Relay(1);
        assert_eq!(stage.slots(relay), first, "of {bytes} bytes, at first");
        stage.start_workers(1, &[10]);
        // The next one is made while nobody waits for it.
        stage.until("the relay has two slots", |stage| stage.slots(relay) >= 2);
        stage.send_everywhere();
        assert_eq!(stage.slots(relay), 2, "of {bytes} bytes");
    }
}

fn changes() {
    const SENDS: u64 = 6;
    let bytes = 16 * MIB;
    let mut stage = Stage::of(6, bytes, Content::Words { every: 100 });
    stage.rate(0..6, GIGABIT);
    for host in 1..5 {
        stage.start_relay(host);
        let first = 10 * host as u32;
        stage.start_workers(host, &[first, first + 1]);
    }
    stage.send_everywhere();
    // The first two versions may go out whole, because hosts join meanwhile.
    let begun = stage.until_status("the first are counted", |status| {
        status.relays.iter().all(|one| one.received >= bytes as u64)
    });
    for _ in 0..SENDS {
        let sent = stage.send_everywhere();
        stage.note(&format!("version {} in {:?}", sent.version, sent.took));
    }
    // One element of eight bytes in a hundred takes any other value.
    let once = SENDS * bytes as u64 / 100;
    let relayed = |status: &SenderStatus| -> Vec<u64> {
        let of = |agent| {
            let mut relays = begun.relays.iter();
            let before = relays.find(|one| one.agent == agent);
            before.map_or(0, |one| one.received)
        };
        let all = chain(status).into_iter();
        all.map(|one| one.received - of(one.agent)).collect()
    };
    let status = stage.until_status("everything is counted", |status| {
        relayed(status).iter().all(|bytes| *bytes >= once)
    });
    let about = once..once + once / 2;
    for came in relayed(&status) {
        assert!(about.contains(&came), "{came} of {about:?}: {status:#?}");
    }
    let served = status.served - begun.served;
    assert!(
        about.contains(&served),
        "{served} of {about:?}: {status:#?}"
    );
    let model = &status.models[0];
    let share = model.changed.expect("it is sent as what changed");
    assert!((0.009..0.012).contains(&share), "{model:?}");
    // A host without a version gets all of it.
    stage.start_relay(5);
    stage.start_workers(5, &[50]);
    stage.until_all_newest();
    stage.send_everywhere();
}

fn tree() {
    const SENDS: u64 = 3;
    let bytes = 2 * MIB;
    let mut stage = Stage::tree(7, bytes, 2);
    // Links that are as fast as memory are as fast as the machine has time for each, and
    // the slower ones go last.
    stage.rate(0..7, GIGABIT);
    for host in 1..7 {
        stage.start_relay(host);
        stage.start_workers(host, &[host as u32]);
    }
    for _ in 0..SENDS {
        stage.send_everywhere();
    }
    // The two that fetch from the sender, and those below.
    let once = (SENDS + 1) * bytes as u64;
    let status = stage.until_status("everything is counted", |status| {
        status.served >= 2 * once && status.relays.iter().all(|one| one.received >= once)
    });
    let about = 2 * once..2 * once + once / 5;
    assert!(about.contains(&status.served), "{status:#?}");
    let mut parents: Vec<u64> = status.relays.iter().map(|one| one.parent).collect();
    parents.sort_unstable();
    let agents: Vec<u64> = status.relays.iter().map(|one| one.agent).collect();
    assert_eq!(agents.len(), 6, "{status:#?}");
    // Each has two below it, and the sender too.
    let below = |agent: u64| parents.iter().filter(|one| **one == agent).count();
    assert_eq!(below(0), 2, "{status:#?}");
    let full = agents.iter().filter(|agent| below(**agent) == 2).count();
    assert_eq!(full, 2, "{status:#?}");
}

fn alone() {
    let bytes = 2 * MIB;
    let mut stage = Stage::new(4, bytes);
    for host in 1..4 {
        stage.start_workers(host, &[host as u32]);
    }
    // Next to each other, each for itself.
    stage.start_workers(3, &[4]);
    for _ in 0..5 {
        let sent = stage.send_everywhere();
        stage.note(&format!("version {} in {:?}", sent.version, sent.took));
    }
    // Each fetches from the trainer: what stops a worker stops nobody else.
    let status = stage.status();
    assert!(
        status.relays.iter().all(|one| one.parent == 0),
        "{status:#?}"
    );
    let pids: Vec<u32> = status.relays.iter().map(|one| one.pid).collect();
    for worker in 1..=4 {
        assert!(
            pids.contains(&stage.pid(Actor::Worker(worker))),
            "{status:#?}"
        );
        // The host's first version, and the sends.
        let all = 6 * bytes as u64;
        let travelled = stage.seen(worker).and_then(|seen| seen.travelled);
        assert!(
            travelled.is_some_and(|bytes| (all..all + all / 10).contains(&bytes)),
            "{travelled:?} of {all}"
        );
    }
    assert!(
        status.workers_by(WorkerRoute::Memory).next().is_none(),
        "{status:#?}"
    );
}

fn late() {
    let mut stage = Stage::new(3, MIB);
    stage.start_relay(1);
    stage.start_workers(1, &[1]);
    for _ in 0..50 {
        stage.send_everywhere();
    }
    // Next to a relay, and where nobody was.
    stage.begin_worker(2, 1);
    stage.begin_worker(3, 2);
    let took = stage.until("the late ones have the newest", |stage| {
        stage.has_newest(2) && stage.has_newest(3)
    });
    stage.note(&format!("after 50 versions the newest came in {took:?}"));
    stage.send_everywhere();
}
