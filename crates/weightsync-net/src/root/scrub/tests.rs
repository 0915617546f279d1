use weightsync_core::Version;

use super::*;

fn item(version: u64) -> Item {
    Item {
        model: 0,
        version: Version(version),
    }
}

fn digest(byte: u8) -> Option<Digest> {
    Some(Digest([byte; 16]))
}

fn is(checked: impl IntoIterator<Item = Checked>) -> Vec<(u64, AgentId, CopyVerdict)> {
    let each = checked.into_iter();
    each.map(|one| (one.item.version.0, one.agent, one.verdict))
        .collect()
}

const DIFFERS: CopyVerdict = CopyVerdict::Differs {
    expected: Digest([7; 16]),
    got: Digest([8; 16]),
};

#[test]
fn scrub_reaches_one_verdict_in_either_order() {
    let mut scrubs = Scrubs::default();
    let asks = scrubs.ask([(item(1), OWN), (item(1), 3), (item(1), 4), (item(2), 3)]);
    assert_eq!(asks.agents, [(item(1), 3), (item(1), 4), (item(2), 3)]);
    assert_eq!(asks.own, [item(1), item(2)], "once each");
    // Asked by another meanwhile: it is under way.
    assert_eq!(scrubs.ask([(item(1), 3)]), ScrubRequests::default());

    assert_eq!(scrubs.digest_received(item(1), 3, digest(7)), None);
    let found = scrubs.found(item(1), digest(7), None);
    assert_eq!(
        is(found),
        [(1, OWN, CopyVerdict::Unknown), (1, 3, CopyVerdict::Same)]
    );
    assert_eq!(
        scrubs.digest_received(item(1), 3, digest(8)),
        None,
        "not asked"
    );
    assert_eq!(
        is(scrubs.digest_received(item(1), 4, digest(8))),
        [(1, 4, DIFFERS)]
    );
    // A digest that was dropped is computed again the next time.
    assert_eq!(scrubs.ask([(item(1), 4)]).own, [item(1)]);
}

#[test]
fn comparison_ends_when_one_end_drops_the_version() {
    let mut scrubs = Scrubs::default();
    scrubs.ask([(item(1), OWN), (item(1), 3), (item(2), 3), (item(2), 5)]);
    let found = scrubs.found(item(1), None, None);
    assert_eq!(
        is(found),
        [
            (1, OWN, CopyVerdict::Replaced),
            (1, 3, CopyVerdict::Replaced)
        ]
    );
    assert_eq!(scrubs.found(item(2), digest(7), None), []);
    assert_eq!(
        is(scrubs.digest_received(item(2), 3, None)),
        [(2, 3, CopyVerdict::Replaced)]
    );
    assert_eq!(is(scrubs.gone(5)), [(2, 5, CopyVerdict::Gone)]);
    assert_eq!(scrubs.gone(5), []);
    assert!(scrubs.expected.is_empty() && scrubs.asked.is_empty() && scrubs.finding.is_empty());
}

#[test]
fn scrub_compares_the_sender_with_its_publication() {
    let mut scrubs = Scrubs::default();
    scrubs.ask([(item(1), OWN), (item(1), 3), (item(1), 4)]);
    assert_eq!(scrubs.digest_received(item(1), 3, digest(7)), None);
    let found = scrubs.found(item(1), digest(8), digest(7));
    // Others are right although the sender is not.
    assert_eq!(is(found), [(1, OWN, DIFFERS), (1, 3, CopyVerdict::Same)]);
    assert_eq!(
        is(scrubs.digest_received(item(1), 4, digest(8))),
        [(1, 4, DIFFERS)]
    );
}

#[test]
fn scrub_result_is_kept_until_the_next() {
    let mut scrubs = Scrubs::default();
    assert_eq!(scrubs.keep(item(64)), (true, Vec::new()));
    assert!(!scrubs.keep(item(64)).0, "it is being found");
    assert_eq!(scrubs.ask([(item(64), 3)]).own, [], "so it is");
    assert_eq!(scrubs.digest_received(item(64), 3, digest(7)), None);
    let found = scrubs.found(item(64), digest(7), None);
    assert_eq!(is(found), [(64, 3, CopyVerdict::Same)]);
    // The sender has replaced it since.
    let asks = scrubs.ask([(item(64), 4), (item(64), OWN)]);
    assert_eq!((asks.agents.len(), asks.own), (1, vec![item(64)]));
    assert_eq!(
        is(scrubs.digest_received(item(64), 4, digest(8))),
        [(64, 4, DIFFERS)]
    );
    let found = scrubs.found(item(64), None, None);
    assert_eq!(is(found), [(64, OWN, CopyVerdict::Replaced)]);
    assert!(scrubs.keep(item(128)).0);
    assert_eq!(scrubs.ask([(item(64), 5)]).own, [item(64)]);
}

#[test]
fn scrub_stops_waiting_after_two_silent_rounds() {
    let mut scrubs = Scrubs::default();
    for version in [64, 128, 192, 256] {
        let (_, late) = scrubs.keep(item(version));
        let expected = match version {
            192 => vec![
                (64, 3, CopyVerdict::Replaced),
                (64, 4, CopyVerdict::Replaced),
            ],
            256 => vec![(128, 3, CopyVerdict::Replaced)],
            _ => Vec::new(),
        };
        assert_eq!(is(late), expected, "{version}");
        scrubs.ask([(item(version), 3)]);
        if version == 64 {
            scrubs.ask([(item(version), 4)]);
        }
        scrubs.found(item(version), digest(7), None);
    }
    assert_eq!(scrubs.asked.len(), 2);
    assert_eq!(
        scrubs.digest_received(item(64), 3, digest(8)),
        None,
        "too late"
    );
    assert_eq!(
        is(scrubs.digest_received(item(192), 3, digest(8))),
        [(192, 3, DIFFERS)]
    );
}

#[test]
fn scrub_answers_known_results_after_departures() {
    let mut scrubs = Scrubs::default();
    scrubs.ask([(item(1), 3)]);
    assert_eq!(scrubs.found(item(1), digest(7), None), []);
    assert_eq!(scrubs.ask([(item(1), OWN), (item(1), 3)]).own, [item(1)]);
    assert_eq!(is(scrubs.gone(3)), [(1, 3, CopyVerdict::Gone)]);
    let found = scrubs.found(item(1), digest(7), None);
    assert_eq!(is(found), [(1, OWN, CopyVerdict::Same)]);
}

#[test]
fn scrub_waiter_gets_exactly_what_it_waits_for() {
    let mut round = Round::new([(item(1), 3), (item(2), 3), (item(2), OWN)], ());
    let mut note = |version, agent, verdict| {
        let item = item(version);
        let checked = Checked {
            item,
            agent,
            verdict,
        };
        let tell = || ScrubCheck {
            agent,
            name: "host".into(),
            address: String::new(),
            pid: 1,
            model: 0,
            version,
            workers: Vec::new(),
            verdict: crate::scrub::Verdict::Gone,
        };
        round.note(&checked, tell);
        (round.waits.len(), round.same, round.others.len())
    };
    assert_eq!(note(1, 4, CopyVerdict::Same), (3, 0, 0), "another's");
    assert_eq!(note(1, 3, CopyVerdict::Same), (2, 1, 0));
    assert_eq!(note(1, 3, CopyVerdict::Same), (2, 1, 0), "it was noted");
    assert_eq!(note(2, 3, CopyVerdict::Gone), (1, 1, 1));
    assert_eq!(note(2, OWN, CopyVerdict::Unknown), (0, 1, 1));
}
