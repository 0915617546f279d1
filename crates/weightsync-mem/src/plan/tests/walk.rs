//! Random ways through the plan, with the shared pages and the readers played
//! next to it, and a second bookkeeping in versions alone that says what every
//! reader must find.

mod desired;
mod pages;
mod readers;
mod sending;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::scan::Claims;

const MODELS: usize = 3;
const WORKERS: u32 = 5;
const SLOTS: u8 = 2;
const MAX_SLOTS: u8 = 3;
const HISTORY: u8 = 2;

/// For some models, the version.
type Versions = BTreeMap<usize, u64>;

#[derive(Clone, Debug)]
enum Op {
    Join {
        worker: u32,
        models: u64,
        delivery: Delivery,
    },
    Leave {
        worker: u32,
    },
    /// The reader can use nothing.
    Shut {
        worker: u32,
    },
    Send {
        models: u64,
        /// Bits; `None`: all.
        workers: Option<u32>,
    },
    /// A reader pins a record and reads it.
    Pin {
        worker: u32,
    },
    /// The reader goes on: it pins the data, and gives the record back.
    Take {
        worker: u32,
    },
    /// The reader drops its snapshots.
    Drop {
        worker: u32,
    },
    Hold {
        workers: u32,
    },
    Release {
        workers: u32,
    },
    Ask {
        worker: u32,
        /// 0: the newest; 1: at least; 2: exactly.
        kind: u8,
        model: usize,
        /// How many versions back.
        back: u64,
    },
    Deliver,
    GiveUp {
        worker: u32,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let worker = || 0..WORKERS;
    let workers = || 0..1u32 << WORKERS;
    let models = || 1..1u64 << MODELS;
    let delivery = prop_oneof![
        3 => Just(Delivery::Newest),
        2 => (1..=3u8).prop_map(|bound| Delivery::Every { bound }),
        1 => Just(Delivery::Asked),
    ];
    prop_oneof![
        3 => (worker(), models(), delivery)
            .prop_map(|(worker, models, delivery)| Op::Join { worker, models, delivery }),
        1 => worker().prop_map(|worker| Op::Leave { worker }),
        1 => worker().prop_map(|worker| Op::Shut { worker }),
        6 => (models(), proptest::option::of(workers()))
            .prop_map(|(models, workers)| Op::Send { models, workers }),
        4 => worker().prop_map(|worker| Op::Pin { worker }),
        4 => worker().prop_map(|worker| Op::Take { worker }),
        2 => worker().prop_map(|worker| Op::Drop { worker }),
        1 => workers().prop_map(|workers| Op::Hold { workers }),
        1 => workers().prop_map(|workers| Op::Release { workers }),
        3 => (worker(), 0..3u8, 0..MODELS, 0..5u64)
            .prop_map(|(worker, kind, model, back)| Op::Ask { worker, kind, model, back }),
        2 => Just(Op::Deliver),
        1 => worker().prop_map(|worker| Op::GiveUp { worker }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn every_reader_finds_what_is_meant_for_it(ops in vec(op(), 1..80)) {
        let mut world = World::new();
        for op in &ops {
            world.take(op);
            world.check();
        }
    }
}

/// A reader, and what it must find.
struct Reader {
    models: ModelMask,
    delivery: Delivery,
    live: Option<Live>,
    queue: VecDeque<Live>,
    head: u64,
    /// The record it has pinned, and what it read there; and the question that
    /// it answers.
    pinned: Option<(Live, Versions, Option<u64>)>,
    /// The slots it holds, with the versions it found.
    snapshots: BTreeSet<(usize, u8, u64)>,
    /// The sets that its mailbox must show or its queue must bring, oldest first; several only in a
    /// queue.
    expected: VecDeque<Versions>,
    /// Those of them that wait for room, by sequence number.
    waiting: VecDeque<(u64, Versions)>,
    wanted: Option<(usize, u64)>,
    notified: u64,
    shut: bool,
    /// The reader's last question, and the last whose answer it no longer needs.
    question: u64,
    through: u64,
    /// The answer that is shown, and the one that must be.
    answer: Option<(u64, Live)>,
    answered: Option<Versions>,
    answer_notified: u64,
    /// The claims that the sender accepts: all, because the reader keeps to the rules.
    claims: Claims,
}

struct World {
    plan: Plan,
    joined: u64,
    records: Vec<Option<SetRecord>>,
    /// The versions written in each slot of each model.
    written: Vec<Vec<u64>>,
    readers: BTreeMap<Key, Reader>,
    default: Versions,
    history: VecDeque<Versions>,
    overrides: BTreeMap<u32, Versions>,
    held: BTreeMap<u32, Versions>,
    issued: [u64; MODELS],
    most_needed: [usize; MODELS],
}

impl World {
    fn new() -> Self {
        Self {
            plan: Plan::new([SLOTS.into(); MODELS], HISTORY),
            joined: 0,
            records: vec![None; MAX_RECORDS],
            written: vec![vec![0; SLOTS.into()]; MODELS],
            readers: BTreeMap::new(),
            default: Versions::new(),
            history: VecDeque::new(),
            overrides: BTreeMap::new(),
            held: BTreeMap::new(),
            issued: [0; MODELS],
            most_needed: [0; MODELS],
        }
    }

    fn take(&mut self, op: &Op) {
        let mut steps = Vec::new();
        let pins = self.observe();
        match *op {
            Op::Join {
                worker,
                models,
                delivery,
            } => {
                self.leave(worker);
                self.joined += 1;
                let key = (WorkerId(worker), self.joined);
                self.readers
                    .insert(key, Reader::new(ModelMask(models), delivery));
                self.plan
                    .join((key, 0), ModelMask(models), delivery, pins, &mut steps);
                let set = self.desired(worker);
                if delivery != Delivery::Asked {
                    self.expect(key, &set);
                }
            }
            Op::Leave { worker } => self.leave(worker),
            Op::Shut { worker } => self.shut(worker),
            Op::Send { models, workers } => self.send(ModelMask(models), workers, &mut steps),
            Op::Pin { worker } => self.pin(worker),
            Op::Take { worker } => self.finish(worker),
            Op::Drop { worker } => {
                let of = self.readers.range_mut(all_of(worker));
                of.for_each(|(_, reader)| reader.snapshots.clear());
            }
            Op::Hold { workers } => {
                for worker in chosen(workers) {
                    let set = self.desired(worker);
                    self.held.entry(worker).or_insert(set);
                }
                self.plan.hold(&ids(workers));
            }
            Op::Release { workers } => {
                self.plan.release(&ids(workers), pins, &mut steps);
                for worker in chosen(workers) {
                    self.release(worker);
                }
            }
            Op::Ask {
                worker,
                kind,
                model,
                back,
            } => self.ask(worker, kind, model, back, pins, &mut steps),
            Op::Deliver => self.plan.deliver(pins, &mut steps),
            Op::GiveUp { worker } => {
                if let Some(key) = self.key(worker)
                    && let Some((sequence, set)) = self.reader(key).waiting.pop_front()
                {
                    self.plan.give_up(key, sequence);
                    assert!(!self.plan.waits(key, sequence));
                    let expected = &mut self.reader(key).expected;
                    let at = expected.iter().position(|one| *one == set).unwrap();
                    expected.remove(at);
                }
            }
        }
        self.carry_out(&steps);
    }

    /// Reads the control pages as the sender does.
    fn observe(&mut self) -> SlotSet {
        let mut pins = SlotSet::default();
        for (key, reader) in &mut self.readers {
            self.plan.observe(*key, reader.head, reader.through);
            let queued = matches!(reader.delivery, Delivery::Every { .. });
            let pinned = reader.pinned.iter().filter(|_| !queued);
            let held = pinned.fold(SlotSet::default(), |all, (live, ..)| all.with(live.record));
            let named = self.plan.named_records(*key);
            assert_eq!(reader.claims.observe(held, named), held, "{key:?}");
            pins = pins.union(held);
        }
        pins
    }

    /// The worker's reader that is still there.
    fn key(&self, worker: u32) -> Option<Key> {
        let mut of = self.readers.range(all_of(worker));
        of.next_back()
            .filter(|(_, reader)| reader.notified != u64::MAX)
            .map(|(key, _)| *key)
    }

    fn reader(&mut self, key: Key) -> &mut Reader {
        self.readers.get_mut(&key).unwrap()
    }
}

impl Reader {
    fn new(models: ModelMask, delivery: Delivery) -> Self {
        Self {
            models,
            delivery,
            live: None,
            queue: VecDeque::new(),
            head: 0,
            pinned: None,
            snapshots: BTreeSet::new(),
            expected: VecDeque::new(),
            waiting: VecDeque::new(),
            wanted: None,
            notified: 0,
            shut: false,
            question: 0,
            through: 0,
            answer: None,
            answered: None,
            answer_notified: 0,
            claims: Claims::new(models),
        }
    }

    /// Whether this set is what it wants; then that is what it is answered.
    fn meets(&mut self, set: &Versions) -> bool {
        let mine = only(set, self.models);
        let met = self.wanted.take_if(|(model, least)| {
            mine.get(model).is_some_and(|version| version >= least)
                || *least == 0 && !mine.is_empty()
        });
        if met.is_some() {
            self.answered = Some(mine);
        }
        met.is_some()
    }
}

fn step_of(step: &PageChange) -> Option<Key> {
    match step {
        PageChange::Write { .. } => None,
        PageChange::Flip { key, .. }
        | PageChange::Push { key, .. }
        | PageChange::Answer { key, .. }
        | PageChange::Clear { key } => Some(*key),
    }
}

fn only(set: &Versions, models: ModelMask) -> Versions {
    let mine = set.iter().filter(|(model, _)| models.contains(**model));
    mine.map(|(model, version)| (*model, *version)).collect()
}

fn all_of(worker: u32) -> std::ops::RangeInclusive<Key> {
    (WorkerId(worker), 0)..=(WorkerId(worker), u64::MAX)
}

fn chosen(workers: u32) -> impl Iterator<Item = u32> {
    (0..WORKERS).filter(move |worker| workers & 1 << worker != 0)
}

fn ids(workers: u32) -> Vec<WorkerId> {
    chosen(workers).map(WorkerId).collect()
}
