//! Bytes that a host holds differ from the published ones.

use super::messages::Content;
use super::stage::{Actor, Stage};

pub(crate) const TESTS: &[(&str, fn())] =
    &[("relay_without_a_delta_base_fetches_the_whole", unfit)];

const MIB: usize = 1 << 20;

/// A relay's bytes are damaged; the next delta does not fit them, which the relay notices.
fn unfit() {
    let content = Content::Weights {
        percent: 10.0,
        single: false,
        deltas: true,
    };
    let mut stage = Stage::of(2, MIB, content);
    // So slow that the smallest deltas pay: the thin ones.
    stage.rate([1], 4_000_000);
    stage.start_relay(1);
    stage.start_workers(1, &[1]);
    for _ in 0..4 {
        stage.send_everywhere();
    }
    assert_eq!(stage.errors(Actor::Relay(1)).next(), None);
    stage.damage(Actor::Relay(1));
    let sent = stage.send_everywhere();
    // Its line and the report come by different pipes.
    stage.until("the relay says that its base was damaged", |stage| {
        let mut errors = stage.errors(Actor::Relay(1));
        errors.any(|line| line.contains("cannot be applied here"))
    });
    // This version came whole, and later ones come as deltas again.
    for version in [sent.version, sent.version + 2] {
        let scrub = stage.scrub();
        assert!(
            scrub.same > 0 && scrub.others.is_empty(),
            "{version}: {scrub:?}"
        );
        for _ in 0..2 {
            stage.send_everywhere();
        }
    }
    let status = stage.status();
    let bytes = status.models[0].delta_bytes;
    assert!(
        bytes.is_some_and(|bytes| bytes < MIB as u64 / 8),
        "{status:#?}"
    );
    assert_eq!(stage.errors(Actor::Relay(1)).count(), 1);
}
