//! Every way through an update: on its states alone, and with an engine that may keep, tear or
//! replace its weights at any call.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::*;

const MOST_UPDATES: u32 = 4;
const WHOLE: [EngineWeights; 2] = [EngineWeights::Old, EngineWeights::New];

fn new(updates: u32) -> EngineUpdate {
    EngineUpdate::new(NonZeroU32::new(updates).unwrap())
}

fn failed(weights: EngineWeights) -> EngineEvent {
    let reason = "r".to_owned();
    EngineEvent::Failed { reason, weights }
}

fn died() -> EngineEvent {
    let reason = "killed".to_owned();
    EngineEvent::Died { reason }
}

/// An update and how often each call was made on the way there.
type Node = (EngineUpdate, Vec<(EngineCall, u32)>);

#[test]
fn every_state_takes_every_event_to_an_end() {
    for updates in 1..=MOST_UPDATES {
        let mut seen: HashSet<Node> = HashSet::new();
        let mut open: Vec<Node> = vec![(new(updates), Vec::new())];
        let mut outcomes = BTreeSet::new();
        while let Some(node) = open.pop() {
            if !seen.insert(node.clone()) {
                continue;
            }
            let (update, calls) = node;
            outcomes.extend(update.outcome().map(|outcome| outcome.to_string()));
            check_labels(&update);
            let mut taken = Vec::new();
            for event in [
                EngineEvent::Begin,
                EngineEvent::Done,
                failed(EngineWeights::Old),
                failed(EngineWeights::New),
                failed(EngineWeights::Unknown),
                died(),
            ] {
                let Ok((next, call)) = update.step(event.clone()) else {
                    continue;
                };
                taken.push(event.word());
                let calls = check_step(updates, &update, &next, call, &calls);
                if let EngineEvent::Died { .. } = event {
                    assert_eq!(next.state(), UpdateState::Dead);
                }
                open.push((next, calls));
            }
            let expected: &[&str] = match (update.state(), update.outcome()) {
                (UpdateState::Running, _) => &["begin", "died"],
                (_, None) => &["done", "failed", "failed", "failed", "died"],
                (_, Some(_)) => &["died"],
            };
            assert_eq!(taken, expected, "{update:?}");
        }
        let expected = ["dead", "held", "kept old", "not resumed", "updated"];
        assert!(outcomes.iter().eq(expected), "{outcomes:?}");
        let states: HashSet<_> = seen.iter().map(|(update, _)| update.state()).collect();
        let distinct: HashSet<_> = seen.iter().map(|(update, _)| update).collect();
        println!(
            "{updates} update calls: {} states, {} with weights and reasons, {} with calls made",
            states.len(),
            distinct.len(),
            seen.len()
        );
    }
}

/// What must hold of one step; the calls made so far, with this one.
fn check_step(
    updates: u32,
    update: &EngineUpdate,
    next: &EngineUpdate,
    call: Option<EngineCall>,
    calls: &[(EngineCall, u32)],
) -> Vec<(EngineCall, u32)> {
    // A step makes one more call or ends the update, and the number of calls is bounded: every
    // path ends.
    assert_ne!(call.is_some(), next.outcome().is_some(), "{next:?}");
    if update.outcome().is_some() {
        assert_eq!(
            (next.state(), call),
            (UpdateState::Dead, None),
            "{update:?}"
        );
    }
    let mut counts: HashMap<EngineCall, u32> = calls.iter().copied().collect();
    if let Some(call) = call {
        let count = counts.entry(call).or_default();
        *count += 1;
        let most = if call == EngineCall::Update {
            updates
        } else {
            1
        };
        assert!(*count <= most, "{call} made {count} times: {next:?}");
        if call == EngineCall::Resume {
            assert!(WHOLE.contains(&next.weights()), "{next:?}");
        }
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(call, _)| *call as u8);
    counts
}

fn check_labels(update: &EngineUpdate) {
    let weights = update.weights();
    match update.outcome() {
        None => return,
        Some(UpdateOutcome::Updated) => return assert_eq!(weights, EngineWeights::New),
        Some(UpdateOutcome::KeptOld) => assert_eq!(weights, EngineWeights::Old),
        Some(UpdateOutcome::NotResumed) => assert!(WHOLE.contains(&weights)),
        Some(UpdateOutcome::Held | UpdateOutcome::Dead) => {
            assert_eq!(weights, EngineWeights::Unknown)
        }
    }
    assert!(update.reason().is_some(), "{update:?}");
}

/// An engine, played: what each chunk of its weights is.
#[derive(Clone)]
struct Engine(Vec<Chunk>);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Chunk {
    Old,
    New,
    Torn,
}

impl Engine {
    fn weights(&self) -> EngineWeights {
        let all = |kind| self.0.iter().all(|chunk| *chunk == kind);
        match (all(Chunk::Old), all(Chunk::New)) {
            (true, _) => EngineWeights::Old,
            (_, true) => EngineWeights::New,
            _ => EngineWeights::Unknown,
        }
    }

    /// The engine after the whole of `call`, of which it is the `nth`.
    fn after(&self, call: EngineCall, nth: usize) -> Self {
        let mut chunks = self.0.clone();
        match call {
            // The worst case: an engine that takes its layers apart first.
            EngineCall::Start => chunks.fill(Chunk::Torn),
            EngineCall::Update => chunks[nth] = Chunk::New,
            EngineCall::Restore => chunks.fill(Chunk::Old),
            EngineCall::Pause | EngineCall::Finish | EngineCall::Resume => {}
        }
        Self(chunks)
    }

    /// What a failed `call` may leave.
    fn after_failing(&self, call: EngineCall, nth: usize) -> Vec<Self> {
        let mut left = vec![self.clone(), self.after(call, nth)];
        let torn = match call {
            EngineCall::Pause | EngineCall::Resume => return left,
            EngineCall::Update => nth,
            EngineCall::Start | EngineCall::Finish | EngineCall::Restore => 0,
        };
        left.push(self.clone());
        left[2].0[torn] = Chunk::Torn;
        left
    }
}

#[test]
fn engine_resumes_on_whole_weights_alone() {
    for updates in 1..=MOST_UPDATES {
        let engine = Engine(vec![Chunk::Old; updates as usize]);
        let (update, call) = new(updates).step(EngineEvent::Begin).unwrap();
        let mut ends = HashSet::new();
        play(&update, call, &engine, 0, &mut ends);
        assert_eq!(ends.len(), 4, "{ends:?}");
    }
}

/// Plays on, whatever the engine does at `call`; `done` updates are behind it.
fn play(
    update: &EngineUpdate,
    call: Option<EngineCall>,
    engine: &Engine,
    done: usize,
    ends: &mut HashSet<UpdateOutcome>,
) {
    if let Some(outcome) = update.outcome() {
        ends.insert(outcome);
        if outcome != UpdateOutcome::Held {
            assert_eq!(
                update.weights(),
                engine.weights(),
                "{update:?} {:?}",
                engine.0
            );
        }
        return;
    }
    let call = call.unwrap();
    if call == EngineCall::Resume {
        assert_ne!(
            engine.weights(),
            EngineWeights::Unknown,
            "{update:?} {:?}",
            engine.0
        );
        assert_eq!(
            update.weights(),
            engine.weights(),
            "{update:?} {:?}",
            engine.0
        );
    }
    let (next, then) = update.step(EngineEvent::Done).unwrap();
    let count = done + usize::from(call == EngineCall::Update);
    play(&next, then, &engine.after(call, done), count, ends);
    for left in engine.after_failing(call, done) {
        let mut reports = vec![left.weights(), EngineWeights::Unknown];
        if call == EngineCall::Update && done + 1 < engine.0.len() {
            // From a caller that speaks of its chunk alone.
            reports.push(EngineWeights::New);
        }
        if update.state() == (UpdateState::Restoring { all_sent: false }) {
            // From an engine that was never sent all of the new weights.
            reports.push(EngineWeights::New);
        }
        for report in reports {
            let (next, then) = update.step(failed(report)).unwrap();
            play(&next, then, &left, done, ends);
        }
    }
}

/// The events after begin, the calls that they lead to, and the end.
type Case = (
    Vec<EngineEvent>,
    &'static str,
    UpdateOutcome,
    EngineWeights,
    Option<&'static str>,
);

#[test]
fn failures_end_as_the_table_says() {
    use EngineWeights::{New, Old, Unknown};
    let done = |count| vec![EngineEvent::Done; count];
    let with = |count, rest: &[EngineEvent]| [done(count), rest.to_vec()].concat();
    let cases: [Case; 15] = [
        (
            done(6),
            "pause start update update finish resume",
            UpdateOutcome::Updated,
            New,
            None,
        ),
        (
            vec![failed(Unknown), EngineEvent::Done],
            "pause resume",
            UpdateOutcome::KeptOld,
            Old,
            Some("pause failed: r"),
        ),
        (
            vec![failed(Unknown), failed(Unknown)],
            "pause resume",
            UpdateOutcome::NotResumed,
            Old,
            Some("pause failed: r; resume failed: r"),
        ),
        (
            with(1, &[failed(Old), EngineEvent::Done]),
            "pause start resume",
            UpdateOutcome::KeptOld,
            Old,
            Some("start failed: r"),
        ),
        (
            with(2, &[failed(Unknown), EngineEvent::Done, EngineEvent::Done]),
            "pause start update restore resume",
            UpdateOutcome::KeptOld,
            Old,
            Some("update failed: r"),
        ),
        (
            with(2, &[failed(New), failed(Old)]),
            "pause start update restore",
            UpdateOutcome::Held,
            Unknown,
            Some("update failed: r; restore failed: r"),
        ),
        (
            with(1, &[failed(Unknown), failed(New)]),
            "pause start restore",
            UpdateOutcome::Held,
            Unknown,
            Some("start failed: r; restore failed: r"),
        ),
        (
            with(3, &[failed(Unknown), failed(New), EngineEvent::Done]),
            "pause start update update restore resume",
            UpdateOutcome::Updated,
            New,
            Some("update failed: r; restore failed: r"),
        ),
        (
            with(3, &[failed(New), EngineEvent::Done]),
            "pause start update update resume",
            UpdateOutcome::Updated,
            New,
            Some("update failed: r"),
        ),
        (
            with(4, &[failed(New), EngineEvent::Done]),
            "pause start update update finish resume",
            UpdateOutcome::Updated,
            New,
            Some("finish failed: r"),
        ),
        (
            with(4, &[failed(Unknown), EngineEvent::Done, failed(Old)]),
            "pause start update update finish restore resume",
            UpdateOutcome::NotResumed,
            Old,
            Some("finish failed: r; resume failed: r"),
        ),
        (
            with(5, &[failed(New)]),
            "pause start update update finish resume",
            UpdateOutcome::NotResumed,
            New,
            Some("resume failed: r"),
        ),
        (
            with(5, &[failed(Unknown)]),
            "pause start update update finish resume",
            UpdateOutcome::Held,
            Unknown,
            Some("resume failed: r"),
        ),
        (
            with(3, &[died(), died()]),
            "pause start update update",
            UpdateOutcome::Dead,
            Unknown,
            Some("the engine died: killed"),
        ),
        (
            with(2, &[failed(Unknown), failed(Unknown), died()]),
            "pause start update restore",
            UpdateOutcome::Dead,
            Unknown,
            Some("update failed: r; restore failed: r; the engine died: killed"),
        ),
    ];
    for (events, calls, outcome, weights, reason) in cases {
        let (mut update, call) = new(2).step(EngineEvent::Begin).unwrap();
        let mut made = vec![call.unwrap().to_string()];
        for event in events {
            let (next, call) = update.step(event).unwrap();
            made.extend(call.map(|call| call.to_string()));
            update = next;
        }
        assert_eq!(made.join(" "), calls);
        let end = (update.outcome(), update.weights(), update.reason());
        assert_eq!(end, (Some(outcome), weights, reason), "{calls}");
    }
}

#[test]
fn event_out_of_order_says_what_to_do() {
    let before = new(1);
    let (pausing, _) = before.step(EngineEvent::Begin).unwrap();
    let (dead, _) = before.step(died()).unwrap();
    for (update, event, words) in [
        (
            before,
            EngineEvent::Done,
            "done does not fit an engine update in the state \"running\": the update has not begun; report begin first",
        ),
        (
            pausing,
            EngineEvent::Begin,
            "begin does not fit an engine update in the state \"pausing\": make the pause call, then report done, failed or died",
        ),
        (
            dead,
            failed(EngineWeights::Old),
            "failed does not fit an engine update in the state \"dead\": the update is over; make a new one for the next sync",
        ),
    ] {
        assert_eq!(update.step(event).unwrap_err().to_string(), words);
    }
}
