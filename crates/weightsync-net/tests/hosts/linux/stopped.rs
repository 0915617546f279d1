//! Relays that are stopped, not dead.

use weightsync_core::WorkerRoute;

use super::stage::{Actor, Stage};

pub(crate) const TESTS: &[(&str, fn())] =
    &[("workers_of_a_stopped_relay_go_round_it_and_return", stopped)];

const MIB: usize = 1 << 20;

/// The first of two relays is stopped until its workers, and one that joins meanwhile, have got
/// versions without it.
fn stopped() {
    let mut stage = Stage::new(3, MIB);
    for host in [1, 2] {
        stage.start_relay(host);
        let first = 10 * host as u32;
        stage.start_workers(host, &[first, first + 1]);
    }
    let relay = Actor::Relay(1);
    let pid = stage.pid(relay);
    stage.send_everywhere();
    stage.pause(relay);
    stage.publish();
    stage.until_all_newest();
    stage.start_workers(1, &[12]);
    stage.publish();
    stage.until_all_newest();
    stage.resume(relay);
    stage.until_status("its workers are at the relay", |status| {
        let relay = status.relays.iter().find(|one| one.pid == pid);
        status.relays.len() == 2
            && relay.is_some_and(|relay| {
                status.workers_by(WorkerRoute::Agent(relay.agent)).count() == 3
            })
    });
    stage.send_everywhere();
    stage.until("it says that it was stopped", |stage| {
        let mut said = stage.warnings(relay);
        said.any(|line| line.contains("this process was stopped"))
    });
    let mut said = stage.warnings(relay);
    let wrong = said.find(|line| line.contains("nothing arrived"));
    assert_eq!(wrong, None);
}
