//! Links with certificates: the same versions, and nothing plain.

use super::stage::{Actor, Stage, TRAINERS};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("versions_go_down_a_chain_of_encrypted_links", chain),
    ("new_certificates_are_used_by_the_next_link", renewed),
    ("relay_with_a_workers_certificate_is_passed_over", posing),
];

const MIB: usize = 1 << 20;

fn chain() {
    let mut stage = Stage::encrypted(4, 8 * MIB);
    for host in 1..3 {
        stage.start_relay(host);
        stage.start_workers(host, &[10 * host as u32]);
    }
    // Without a relay it fetches for itself; on the trainer's host nothing travels.
    stage.start_workers(3, &[30]);
    stage.start_workers(TRAINERS, &[40]);
    for _ in 0..4 {
        stage.send_everywhere();
    }
    stage.kill(Actor::Relay(1));
    stage.start_relay(1);
    // The relay's worker may be looking for another route.
    stage.send();
    stage.until_all_newest();
    stage.send_everywhere();
    let status = stage.until_status("it is known", |status| status.relays.len() >= 3);
    assert!(status.served > 0);
}

/// They are of another authority. A link that is there stays.
fn renewed() {
    let mut stage = Stage::encrypted(3, MIB);
    stage.start_relay(1);
    stage.start_workers(1, &[10]);
    stage.send_everywhere();
    stage.make_certificates();
    stage.send_everywhere();
    stage.start_relay(2);
    stage.start_workers(2, &[20]);
    stage.send_everywhere();
}

/// The trainer takes it for an agent, and names it as a parent. Both ends of that link say why there
/// is none.
fn posing() {
    let mut stage = Stage::encrypted(3, MIB);
    stage.start_posing_relay(1);
    stage.start_relay(2);
    stage.start_workers(2, &[20]);
    for _ in 0..2 {
        stage.send_everywhere();
    }
    let warned = |who| stage.warnings(who).collect::<Vec<_>>();
    let (child, parent) = (warned(Actor::Relay(2)), warned(Actor::Relay(1)));
    assert!(
        child.iter().any(|line| line.contains("is of no relay")),
        "{child:#?}"
    );
    assert!(
        parent.iter().any(|line| line.contains("part")),
        "{parent:#?}"
    );
}
