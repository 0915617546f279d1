//! Killed processes: each is named within a second, everybody else is up to date, and
//! who is started again catches up automatically.

use std::collections::BTreeSet;

use weightsync_core::WorkerRoute;

use super::scale::second;
use super::stage::{Actor, Stage, chain};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_worker_is_killed_while_a_send_waits_for_it", worker),
    ("a_worker_is_killed_while_it_fetches", fetching_worker),
    ("the_first_relay_is_killed_during_a_transfer", || relay(1)),
    ("a_relay_in_the_middle_is_killed_during_a_transfer", || {
        relay(2)
    }),
    ("the_last_relay_is_killed_during_a_transfer", || relay(3)),
    ("relays_are_killed_between_sends", idle_relays),
    ("the_trainer_is_killed_between_sends", idle_trainer),
    ("the_trainer_is_killed_during_a_transfer", busy_trainer),
];

const MIB: usize = 1 << 20;

/// Bits a second: slow enough to be in the middle of something.
const SLOW: u64 = 200_000_000;

fn worker() {
    let mut stage = Stage::new(3, MIB);
    stage.start_relay(1);
    stage.start_workers(1, &[10, 11]);
    stage.start_workers(2, &[20]);
    // The worker is stopped; its relay answers for it.
    stage.pause(Actor::Worker(11));
    let word = stage.begin_send();
    stage.until("the others have it", |stage| {
        stage.has_newest(10) && stage.has_newest(20)
    });
    assert!(!stage.is_over(word), "nobody has said that 11 has it");
    let killed = stage.kill(Actor::Worker(11));
    let (at, sent) = stage.report_at(word);
    stage.note(&format!("named {:?} after its death", at - killed));
    assert!(at - killed < second(), "{sent:?}");
    assert_eq!(sent.outcome(11), "Died", "{sent:?}");
    assert_eq!(sent.failed(), [11], "{sent:?}");
    stage.start_workers(1, &[11]);
    stage.send_everywhere();
}

fn fetching_worker() {
    let mut stage = Stage::new(3, 32 * MIB);
    stage.start_workers(1, &[10]);
    stage.start_workers(2, &[20]);
    stage.rate(0..3, SLOW);
    let word = stage.begin_send();
    stage.until_came(Actor::Worker(20), 4 * MIB as u64);
    let killed = stage.kill(Actor::Worker(20));
    let (_, sent) = stage.report_at(word);
    assert_eq!(sent.outcome(20), "Died", "{sent:?}");
    assert_eq!(sent.failed(), [20], "{sent:?}");
    let line = sent.workers.iter().find(|line| line.worker == 20);
    let line = line.expect("a line").clone();
    // Nothing of it lives when it is known: `after` is since the version went live.
    stage.note(&format!("known {:?} after the version", line.after));
    assert!(line.after < killed.elapsed() + second(), "{sent:?}");
    stage.start_workers(2, &[20]);
    stage.send_everywhere();
}

/// A trainer, and three hosts with a relay and two workers each.
fn fleet(bytes: usize) -> Stage {
    let mut stage = Stage::new(4, bytes);
    for host in 1..4 {
        stage.start_relay(host);
        let first = 10 * host as u32;
        stage.start_workers(host, &[first, first + 1]);
    }
    stage
}

fn relay(host: usize) {
    let bytes = 64 * MIB;
    let mut stage = fleet(bytes);
    stage.rate(0..4, SLOW);
    let word = stage.begin_send();
    stage.until_came(Actor::Relay(host), bytes as u64 / 4);
    stage.kill(Actor::Relay(host));
    // The relay's workers find another route, or the report names them; it names no others.
    let sent = stage.report(word);
    stage.note(&format!("took {:?}, not at {:?}", sent.took, sent.failed()));
    for line in &sent.workers {
        let is_its = line.worker as usize / 10 == host;
        assert!(line.outcome == "Applied" || is_its, "{sent:?}");
        if line.outcome != "Applied" {
            assert_eq!(line.outcome, "Lost", "{sent:?}");
        }
    }
    stage.until_all_newest();
    // A host behind it went on where it was.
    let status = stage.status();
    for relay in &status.relays {
        let whole = 2 * bytes as u64;
        let mut workers = status.workers_by(WorkerRoute::Agent(relay.agent));
        let is_alone = workers.any(|worker| worker.pid == relay.pid);
        assert!(
            is_alone || relay.received < whole + whole / 8,
            "{status:#?}"
        );
    }
    came_back(&mut stage, host);
}

/// A relay that was killed is started again, and serves workers that come.
fn came_back(stage: &mut Stage, host: usize) {
    stage.start_relay(host);
    let pid = stage.pid(Actor::Relay(host));
    stage.until_status("the relay is one of them", |status| {
        status.relays.iter().any(|relay| relay.pid == pid)
    });
    let workers = [10 * host as u32, 10 * host as u32 + 1];
    for worker in workers {
        stage.kill(Actor::Worker(worker));
    }
    stage.start_workers(host, &workers);
    // A relay avoids a parent from which a fetch failed, for half a minute; then there is a chain
    // again.
    let status = stage.until_status(
        "its workers are at the relay, and there is a chain",
        |status| {
            let relay = status.relays.iter().find(|relay| relay.pid == pid);
            let parents: BTreeSet<u64> = status.relays.iter().map(|one| one.parent).collect();
            relay.is_some_and(|relay| {
                status.workers_by(WorkerRoute::Agent(relay.agent)).count() == 2
            }) && parents.len() == status.relays.len()
        },
    );
    assert_eq!(chain(&status).len(), 3);
    stage.send_everywhere();
}

fn idle_relays() {
    let mut stage = fleet(MIB);
    for host in [2, 1, 3] {
        let killed = stage.kill(Actor::Relay(host));
        let sent = stage.send();
        stage.note(&format!(
            "after {:?}: {:?}, not at {:?}",
            killed.elapsed(),
            sent.took,
            sent.failed()
        ));
        for line in &sent.workers {
            let is_its = line.worker as usize / 10 == host;
            assert!(line.outcome == "Applied" || is_its, "{sent:?}");
            assert!(line.after < second(), "{sent:?}");
        }
        stage.until_all_newest();
        came_back(&mut stage, host);
    }
}

fn idle_trainer() {
    let mut stage = fleet(MIB);
    stage.start_workers(3, &[32]);
    stage.send_everywhere();
    for _ in 0..2 {
        succeed(&mut stage);
    }
}

fn busy_trainer() {
    let bytes = 32 * MIB;
    let mut stage = fleet(bytes);
    stage.rate(0..4, SLOW);
    stage.begin_send();
    stage.until_came(Actor::Relay(1), bytes as u64 / 4);
    succeed(&mut stage);
}

/// The trainer is killed, everybody hears of it, and finds its successor.
fn succeed(stage: &mut Stage) {
    let workers: Vec<Actor> = stage.workers().map(Actor::Worker).collect();
    let before: Vec<usize> = workers.iter().map(|who| stage.noticed_gone(*who)).collect();
    let killed = stage.kill(Actor::Trainer);
    stage.until("everybody knows that the trainer is gone", |stage| {
        let mut now = workers.iter().zip(&before);
        now.all(|(who, before)| stage.noticed_gone(*who) > *before)
    });
    stage.note(&format!("known everywhere after {:?}", killed.elapsed()));
    stage.start_trainer();
    stage.until_all_newest();
    stage.note(&format!("at its successor after {:?}", killed.elapsed()));
    stage.send_everywhere();
}
