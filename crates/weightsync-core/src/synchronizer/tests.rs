use std::collections::{HashMap, HashSet, VecDeque};

use self::world::{Kind, Limits, World};
use super::*;

mod world;

const fn every(steps: u64) -> NonZero<u64> {
    NonZero::new(steps).unwrap()
}

/// More worlds than this are a number that grows without an end.
const MOST: usize = 3_000_000;

/// Explores every order of events. From each world that can be reached, everybody stops in the end,
/// without a further fault, and without a deadline where waits have none.
fn explore(limits: &Limits) -> usize {
    let first = World::new(limits);
    let mut numbers = HashMap::from([(first.clone(), 0_usize)]);
    let mut before: Vec<Vec<u32>> = vec![Vec::new()];
    let mut over = Vec::new();
    let mut queue = VecDeque::from([first]);
    let (mut at, mut synced) = (0, false);
    while let Some(world) = queue.pop_front() {
        synced |= world.synced;
        if world.is_over() {
            over.push(at);
        }
        for (kind, next) in world.successors(limits) {
            let known = numbers.len();
            let number = *numbers.entry(next.clone()).or_insert(known);
            if number == known {
                assert!(known < MOST, "one of the last worlds: {next:#?}");
                before.push(Vec::new());
                queue.push_back(next);
            }
            if kind == Kind::Normal {
                before[number].push(at as u32);
            }
        }
        at += 1;
    }
    assert!(synced, "nobody ever synchronised: {limits:?}");
    let mut ends: HashSet<usize> = over.iter().copied().collect();
    while let Some(end) = over.pop() {
        for &number in &before[end] {
            if ends.insert(number as usize) {
                over.push(number as usize);
            }
        }
    }
    let stuck = numbers.iter().filter(|(_, number)| !ends.contains(number));
    let stuck = stuck.min_by_key(|(_, number)| **number);
    assert!(stuck.is_none(), "{limits:?}: nobody can go on: {stuck:#?}");
    numbers.len()
}

const FIXED: Style = Style::Fixed {
    interval: every(1),
    offset: 0,
};
const FIXED_LATER: Style = Style::Fixed {
    interval: every(2),
    offset: 1,
};
const FIXED_SLOW: Style = Style::Fixed {
    interval: every(3),
    offset: 0,
};
const BY_TRAINER_SLOW: Style = Style::ByTrainer { interval: every(3) };
const BY_EXPLORER: Style = Style::ByExplorer { interval: every(1) };
const BY_TRAINER: Style = Style::ByTrainer { interval: every(1) };
const FULLY_ASYNC: Style = Style::FullyAsync {
    trainer: every(1),
    explorer: every(1),
};
const BOUNDED: Style = Style::Bounded {
    interval: every(1),
    lag: 1,
};

/// The styles of the trainer and of the first explorer, and how many steps it takes to see one of
/// their syncs.
const STYLES: [(Style, Style, u64); 14] = [
    (FIXED, FIXED, 1),
    (FIXED_LATER, FIXED_LATER, 3),
    (BY_EXPLORER, BY_EXPLORER, 1),
    (
        Style::ByExplorer { interval: every(2) },
        Style::ByExplorer { interval: every(2) },
        2,
    ),
    (BY_TRAINER, BY_TRAINER, 1),
    (FULLY_ASYNC, FULLY_ASYNC, 1),
    (BOUNDED, BOUNDED, 1),
    (FIXED, BY_EXPLORER, 1),
    (FIXED, BY_TRAINER, 1),
    (BY_EXPLORER, FIXED, 1),
    (BY_TRAINER, BY_EXPLORER, 1),
    (BOUNDED, FIXED, 1),
    // The explorer asks before the trainer is due.
    (FIXED_SLOW, BY_EXPLORER, 2),
    (BY_TRAINER_SLOW, BY_EXPLORER, 2),
];

#[test]
fn every_order_of_events_ends_with_all_stopped() {
    // Some seconds every day, and a minute otherwise.
    let full = std::env::var_os("WEIGHTSYNC_SOAK").is_some();
    let mut all = 0;
    for method in [Method::Direct, Method::Memory] {
        for (style, own_style, steps) in STYLES {
            for explorers in 1..=3 {
                let mixed = style != own_style;
                for deadlines in [false, true] {
                    if (deadlines || mixed) && explorers > 1 && !full {
                        continue;
                    }
                    let explored = match explorers {
                        3 => steps,
                        _ => steps.max(2),
                    };
                    let limits = Limits {
                        method,
                        style,
                        own_style,
                        explorers,
                        trained: explored.min(2),
                        explored,
                        // As many as fit into a test.
                        faults: match (explorers, steps, deadlines) {
                            (1, ..) => 2,
                            (2, ..) => 1,
                            (_, 1, false) if full && !mixed => 1,
                            _ => 0,
                        },
                        deadlines,
                    };
                    let states = explore(&limits);
                    println!(
                        "{method:?}, {style:?} and {own_style:?}, {explorers} explorers: {states} states"
                    );
                    all += states;
                }
            }
        }
    }
    println!("{all} states in all");
}

#[test]
fn method_is_chosen_before_the_first_trainer() {
    let mut sync = Synchronizer::new(Method::Memory, None, Epoch(0));
    assert!(sync.choose(Method::Direct));
    assert!(sync.choose(Method::Checkpoint));
    sync.step(
        SyncEvent::TrainerJoined(Party(1), Epoch(1), 0, FIXED),
        Moment(0),
    );
    assert!(!sync.choose(Method::Memory));
    assert!(sync.choose(Method::Checkpoint));
    let mut sync = Synchronizer::new(Method::Checkpoint, Some((Version(3), 30)), Epoch(0));
    assert!(!sync.choose(Method::Memory));
}

#[test]
fn explorer_with_a_number_that_nobody_gave_has_no_version() {
    let (mut sync, now) = (
        Synchronizer::new(Method::Memory, Some((Version(3), 7)), Epoch(0)),
        Moment(0),
    );
    for (party, claims, has) in [(1, 3, 3), (2, 4, 0), (3, u64::MAX, 0)] {
        let joined = SyncEvent::ExplorerJoined(Party(party), Version(claims), [0, 0], FIXED);
        sync.step(joined, now);
        assert_eq!(sync.version(Party(party)), Some(Version(has)));
        // Nor if it says so later.
        let loaded = SyncEvent::ExplorerLoaded(Party(1), Version(claims));
        sync.step(loaded, now);
        assert_eq!(sync.version(Party(1)), Some(Version(has)));
    }
    assert_eq!(sync.highest(), Version(3));
}
