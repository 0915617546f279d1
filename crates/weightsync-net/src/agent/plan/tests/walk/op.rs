//! One operation of a walk.

use proptest::prelude::*;

use super::{Delivery, MODELS, WORKERS};

#[derive(Clone, Debug)]
pub(super) enum Op {
    Join {
        worker: u32,
        delivery: Delivery,
    },
    Leave {
        worker: u32,
    },
    /// The sender publishes; bits say which models, and who is told.
    Publish {
        models: u32,
        workers: u32,
    },
    /// The link to the sender broke, and what it said last is said again.
    Again {
        worker: u32,
    },
    /// A worker asks, and is answered by the set so many before the newest.
    Answer {
        worker: u32,
        back: usize,
    },
    /// The worker does not wait for the answer.
    Withdraw {
        worker: u32,
    },
    Parent,
    Reassigned,
    /// How one of the fetches under way ends, if there are any.
    Ends {
        end: End,
        which: usize,
    },
    Room,
    Spoil {
        model: usize,
    },
    Want {
        model: usize,
        back: u64,
    },
    Unwant {
        which: usize,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    Whole,
    Broken,
    NotThere,
    NoRoom,
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let worker = || 0..WORKERS;
    let workers = || 0..1u32 << WORKERS;
    let delivery = prop_oneof![
        3 => Just(Delivery::Newest),
        2 => Just(Delivery::Every { bound: 3 }),
        1 => Just(Delivery::Asked),
    ];
    let end = prop_oneof![
        6 => Just(End::Whole),
        1 => Just(End::Broken),
        2 => Just(End::NotThere),
        1 => Just(End::NoRoom),
    ];
    prop_oneof![
        3 => (worker(), delivery).prop_map(|(worker, delivery)| Op::Join { worker, delivery }),
        1 => worker().prop_map(|worker| Op::Leave { worker }),
        8 => (1..1u32 << MODELS, workers())
            .prop_map(|(models, workers)| Op::Publish { models, workers }),
        1 => worker().prop_map(|worker| Op::Again { worker }),
        2 => (worker(), 0..4usize).prop_map(|(worker, back)| Op::Answer { worker, back }),
        1 => worker().prop_map(|worker| Op::Withdraw { worker }),
        2 => Just(Op::Parent),
        1 => Just(Op::Reassigned),
        10 => (end, 0..8usize).prop_map(|(end, which)| Op::Ends { end, which }),
        2 => Just(Op::Room),
        1 => (0..MODELS).prop_map(|model| Op::Spoil { model }),
        2 => (0..MODELS, 0..4u64).prop_map(|(model, back)| Op::Want { model, back }),
        2 => (0..8usize).prop_map(|which| Op::Unwant { which }),
    ]
}
