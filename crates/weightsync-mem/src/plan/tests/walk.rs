//! Random ways through the plan, with the shared pages and the readers played
//! beside it, and a second bookkeeping in versions alone that says what every
//! reader must find.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

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
    /// It can use nothing.
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
    /// It goes on: data pins, and the record given back.
    Take {
        worker: u32,
    },
    /// It drops its snapshots.
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
    models: Models,
    delivery: Delivery,
    live: Option<Live>,
    queue: VecDeque<Live>,
    head: u64,
    /// The record it has pinned, and what it read there; and the question that
    /// it answers.
    pinned: Option<(Live, Versions, Option<u64>)>,
    /// The slots it holds, with the versions it found.
    snapshots: BTreeSet<(usize, u8, u64)>,
    /// What its lane is to show (or its queue to bring), oldest first. Several
    /// only in a queue.
    expected: VecDeque<Versions>,
    /// What of that waits for room, by sequence number.
    waiting: VecDeque<(u64, Versions)>,
    wanted: Option<(usize, u64)>,
    told: u64,
    shut: bool,
    /// Its last question, and the last whose answer it needs no more.
    question: u64,
    through: u64,
    /// What its place for answers shows, and must show.
    answer: Option<(u64, Live)>,
    answered: Option<Versions>,
    answer_told: u64,
}

struct World {
    plan: Plan,
    joined: u64,
    records: Vec<Option<SetRecord>>,
    /// What is written in each slot of each model.
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
            plan: Plan::new(MODELS, SLOTS, HISTORY),
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
                    .insert(key, Reader::new(Models(models), delivery));
                self.plan
                    .join((key, 0), Models(models), delivery, pins, &mut steps);
                let set = self.meant(worker);
                if delivery != Delivery::Asked {
                    self.expect(key, &set);
                }
            }
            Op::Leave { worker } => self.leave(worker),
            Op::Shut { worker } => self.shut(worker),
            Op::Send { models, workers } => self.send(Models(models), workers, &mut steps),
            Op::Pin { worker } => self.pin(worker),
            Op::Take { worker } => self.finish(worker),
            Op::Drop { worker } => {
                let of = self.readers.range_mut(all_of(worker));
                of.for_each(|(_, reader)| reader.snapshots.clear());
            }
            Op::Hold { workers } => {
                for worker in chosen(workers) {
                    let set = self.meant(worker);
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

    /// What the sender reads in the control pages.
    fn observe(&mut self) -> SlotSet {
        let mut pins = SlotSet::default();
        for (key, reader) in &self.readers {
            self.plan.observe(*key, reader.head, reader.through);
            if let Some((live, ..)) = &reader.pinned
                && !matches!(reader.delivery, Delivery::Every { .. })
            {
                pins = pins.with(live.record);
            }
        }
        pins
    }

    fn send(&mut self, models: Models, workers: Option<u32>, steps: &mut Vec<Step>) {
        let mut written = Vec::new();
        for model in models.iter() {
            match self.lend(model) {
                Some(slot) => written.push((model, slot)),
                None => {
                    for (model, slot) in written {
                        self.plan.give_back(model, slot);
                    }
                    return;
                }
            }
        }
        let pins = self.observe();
        let targets = match workers {
            None => Targets::All,
            Some(workers) => Targets::Workers(ids(workers)),
        };
        let published = self.plan.publish(&written, &targets, pins, steps).unwrap();
        let mut update = Versions::new();
        for (model, slot) in written {
            self.issued[model] += 1;
            self.written[model][usize::from(slot)] = self.issued[model];
            update.insert(model, self.issued[model]);
        }
        let versions = published.versions.iter();
        let versions: Versions = versions
            .map(|(model, version)| (*model, version.0))
            .collect();
        assert_eq!(versions, update);
        self.note(&update, workers);
        let mut concerned = 0;
        for key in self.readers.keys().copied().collect::<Vec<_>>() {
            let worker = key.0.0;
            let named = workers.is_none_or(|workers| workers & 1 << worker != 0);
            let wants = models.and(self.reader(key).models) != Models(0);
            if !named || !wants || self.key(worker) != Some(key) {
                let mut steps = steps.iter();
                assert!(
                    steps.all(|step| step_of(step) != Some(key)),
                    "{key:?} was not meant"
                );
                continue;
            }
            concerned += 1;
            let fate = published
                .fates
                .iter()
                .find(|(one, _)| *one == key)
                .unwrap()
                .1;
            let set = self.meant(worker);
            if self.reader(key).shut {
                assert_eq!(fate, Fate::Shut);
                continue;
            }
            if self.held.contains_key(&worker) {
                assert_eq!(fate, Fate::Held);
                continue;
            }
            let reader = self.reader(key);
            reader.meets(&set);
            match reader.delivery {
                Delivery::Newest => {
                    assert_eq!(fate, Fate::Told);
                    self.expect(key, &set);
                }
                Delivery::Asked => assert_eq!(fate, Fate::Asks),
                Delivery::Every { bound } => {
                    let waiting = reader.waiting.len();
                    let room = waiting == 0 && reader.queue.len() < bound.into();
                    let expected = match (room, waiting < bound.into()) {
                        (true, _) => Fate::Told,
                        (false, true) => Fate::Waiting,
                        (false, false) => Fate::Full,
                    };
                    assert_eq!(fate, expected);
                    let set = only(&set, reader.models);
                    if fate == Fate::Waiting {
                        reader.waiting.push_back((published.sequence, set.clone()));
                    }
                    if fate != Fate::Full {
                        reader.expected.push_back(set);
                    }
                }
            }
        }
        assert_eq!(published.fates.len(), concerned);
    }

    fn lend(&mut self, model: usize) -> Option<u8> {
        let mut decided = self.look_for_slot(model);
        if !matches!(decided, Lend::Slot(_)) {
            let mut steps = Vec::new();
            if self.plan.clear_taken(&mut steps) {
                self.carry_out(&steps);
                decided = self.look_for_slot(model);
            }
        }
        let needed = self.needed(model).len() + 1;
        self.most_needed[model] = self.most_needed[model].max(needed);
        let slot = match decided {
            Lend::Slot(slot) => slot,
            Lend::Grow => {
                self.written[model].push(0);
                self.plan.grown(model)
            }
            Lend::Wait => {
                let slots = self.written[model].len();
                assert!(
                    slots >= MAX_SLOTS.into() && slots >= needed,
                    "waits in vain"
                );
                return None;
            }
        };
        let old = self.written[model][usize::from(slot)];
        assert!(!self.referred(model).contains(&old), "lent while in use");
        Some(slot)
    }

    fn look_for_slot(&mut self, model: usize) -> Lend {
        let records = self.observe();
        let snapshots = self.readers.values().flat_map(|reader| &reader.snapshots);
        let pins = snapshots
            .filter(|(one, ..)| *one == model)
            .fold(SlotSet::default(), |all, (_, slot, _)| all.with(*slot));
        let pinned = pins.union(self.plan.slots_of(records, model));
        self.plan.lend(model, pinned, MAX_SLOTS)
    }

    fn pin(&mut self, worker: u32) {
        let Some(key) = self.key(worker) else { return };
        let reader = &self.readers[&key];
        let open = |(question, _): &&(u64, Live)| *question > reader.through;
        let (live, answers) = match (reader.delivery, reader.answer.iter().find(open)) {
            (Delivery::Every { .. }, _) => (reader.queue.front().copied(), None),
            (_, Some((question, live))) => (Some(*live), Some(*question)),
            (_, None) => (reader.live, None),
        };
        if let (Some(live), None) = (live, &reader.pinned) {
            let set = self.read(live);
            self.reader(key).pinned = Some((live, set, answers));
        }
    }

    fn finish(&mut self, worker: u32) {
        let Some(key) = self.key(worker) else { return };
        let Some((live, found, answers)) = self.reader(key).pinned.take() else {
            return;
        };
        let again = self.read(live);
        assert_eq!(again, found, "the record was written while it was pinned");
        let set = self.records[usize::from(live.record)].unwrap().set;
        let reader = self.readers.get_mut(&key).unwrap();
        if let Delivery::Every { .. } = reader.delivery {
            reader.queue.pop_front();
            reader.head += 1;
            assert_eq!(
                Some(only(&found, reader.models)),
                reader.expected.pop_front()
            );
        }
        reader.through = answers.map_or(reader.through, |one| one.max(reader.through));
        for (model, placed) in set.only(reader.models).iter() {
            let version = self.written[model][usize::from(placed.slot)];
            assert_eq!(version, placed.version.0, "the slot was written meanwhile");
            reader.snapshots.insert((model, placed.slot, version));
        }
    }

    fn release(&mut self, worker: u32) {
        let Some(was) = self.held.remove(&worker) else {
            return;
        };
        let set = self.meant(worker);
        let Some(key) = self.key(worker) else { return };
        let reader = self.reader(key);
        let mine = reader.models;
        if reader.shut || only(&was, mine) == only(&set, mine) {
            return;
        }
        reader.meets(&set);
        match reader.delivery {
            Delivery::Newest => self.expect(key, &set),
            Delivery::Asked => {}
            Delivery::Every { bound } => {
                let set = only(&set, mine);
                // What waits comes first, as far as there is room.
                let places = usize::from(bound) - reader.queue.len();
                let waiting = reader.waiting.len().saturating_sub(places);
                if places > reader.waiting.len() {
                    reader.expected.push_back(set);
                } else {
                    // The newest comes in any case.
                    if waiting == usize::from(bound) {
                        reader.waiting.pop_back();
                        reader.expected.pop_back();
                    }
                    let lane = &self.plan.lanes[&key.0];
                    let sequence = lane.waiting.back().unwrap().sequence;
                    let reader = self.reader(key);
                    reader.waiting.push_back((sequence, set.clone()));
                    reader.expected.push_back(set);
                }
            }
        }
    }

    fn ask(
        &mut self,
        worker: u32,
        kind: u8,
        model: usize,
        back: u64,
        pins: SlotSet,
        steps: &mut Vec<Step>,
    ) {
        let key = self.key(worker).unwrap_or((WorkerId(worker), 0));
        let exact = (self.issued[model] + 2).saturating_sub(back).max(1);
        let version = Version(exact);
        let want = match kind {
            0 => Want::Newest,
            1 => Want::AtLeast { model, version },
            _ => Want::Exactly { model, version },
        };
        let question = match self.readers.get_mut(&key) {
            Some(reader) => {
                reader.through = reader.question;
                reader.question += 1;
                reader.question
            }
            None => 1,
        };
        let answer = self.plan.ask(key, question, want, pins, steps);
        let Some(reader) = self.readers.get_mut(&key).filter(|reader| !reader.shut) else {
            assert_eq!(answer, Answer::Gone);
            return;
        };
        reader.wanted = None;
        let every = matches!(reader.delivery, Delivery::Every { .. });
        if every || kind > 0 && !reader.models.contains(model) {
            assert_eq!(answer, Answer::NotAllowed);
            return;
        }
        let mine = reader.models;
        let now = self.meant(worker);
        let earlier = match self.held.contains_key(&worker) {
            true => VecDeque::new(),
            false => self.history.clone(),
        };
        let version_of = |set: &Versions| set.get(&model).copied().unwrap_or(0);
        let found = match kind {
            0 => Some(&now).filter(|now| !only(now, mine).is_empty()),
            1 => Some(&now).filter(|now| version_of(now) >= exact),
            _ => std::iter::once(&now)
                .chain(&earlier)
                .find(|set| version_of(set) == exact),
        };
        match found {
            Some(set) => {
                assert_eq!(answer, Answer::Told);
                let set = only(set, mine);
                self.reader(key).answered = Some(set);
            }
            None if kind < 2 => {
                assert_eq!(answer, Answer::Later);
                let least = if kind == 0 { 0 } else { exact };
                self.reader(key).wanted = Some((model, least));
            }
            None => {
                let sets = std::iter::once(&now).chain(&earlier);
                let known: BTreeSet<_> = sets.map(version_of).filter(|&one| one > 0).collect();
                let known = known.into_iter().rev().map(Version).collect();
                assert_eq!(answer, Answer::Unknown { known });
            }
        }
    }

    /// Does what the steps say, as long as nothing in use is written. A reader may
    /// pin what its lane was on at any moment before it is taken off it, so that
    /// counts as in use to the last step.
    fn carry_out(&mut self, steps: &[Step]) {
        let lanes = self.readers.values();
        let told = lanes.flat_map(|reader| {
            let answer = reader.answer.iter().map(|(_, live)| live);
            reader.live.iter().chain(&reader.queue).chain(answer)
        });
        let told = told.fold(SlotSet::default(), |all, live| all.with(live.record));
        for step in steps {
            match *step {
                Step::Write { record } => {
                    assert!(!told.contains(record), "written where a pin may be");
                    for reader in self.readers.values() {
                        let pinned = reader.pinned.iter().map(|(live, ..)| live);
                        let answer = reader.answer.iter().map(|(_, live)| live);
                        let told = reader.live.iter().chain(&reader.queue);
                        let mut used = pinned.chain(answer).chain(told);
                        assert!(
                            used.all(|live| live.record != record),
                            "written while in use"
                        );
                    }
                    self.records[usize::from(record)] = Some(self.plan.record(record));
                }
                Step::Flip { key, live } => {
                    let reader = self.reader(key);
                    assert!(live.sequence > reader.told);
                    reader.told = live.sequence;
                    reader.live = Some(live);
                }
                Step::Push { key, live } => {
                    let reader = self.reader(key);
                    assert!(live.sequence > reader.told);
                    let Delivery::Every { bound } = reader.delivery else {
                        panic!("a push for a reader without a queue")
                    };
                    reader.told = live.sequence;
                    reader.queue.push_back(live);
                    assert!(reader.queue.len() <= bound.into());
                    let came = |(sequence, _): &mut (u64, Versions)| *sequence == live.sequence;
                    reader.waiting.pop_front_if(came);
                }
                Step::Answer {
                    key,
                    live,
                    question,
                } => {
                    let reader = self.reader(key);
                    assert!(live.sequence > reader.answer_told);
                    assert_eq!(question, reader.question, "it has asked anew");
                    reader.answer_told = live.sequence;
                    reader.answer = Some((question, live));
                }
                Step::Clear { key } => {
                    let reader = self.reader(key);
                    let (question, _) = reader.answer.take().unwrap();
                    assert!(question <= reader.through, "it needs it");
                    reader.answered = None;
                }
            }
        }
    }

    /// What each lane shows is what it must show.
    fn check(&mut self) {
        for (key, reader) in &self.readers {
            if self.key(key.0.0) != Some(*key) {
                continue;
            }
            let shown: Vec<_> = match reader.delivery {
                Delivery::Every { .. } => reader.queue.iter().collect(),
                Delivery::Newest | Delivery::Asked => reader.live.iter().collect(),
            };
            let shown = shown
                .iter()
                .map(|live| only(&self.read(**live), reader.models));
            let waiting = reader.waiting.iter().map(|(_, set)| set.clone());
            let shown: VecDeque<_> = shown.chain(waiting).collect();
            assert_eq!(shown, reader.expected, "{key:?}");
            let answer = reader.answer.map(|(_, live)| self.read(live));
            let answer = answer.map(|set| only(&set, reader.models));
            assert_eq!(answer, reader.answered, "{key:?}");
            let waits = |(sequence, _): &(u64, _)| self.plan.waits(*key, *sequence);
            assert!(reader.waiting.iter().all(waits));
        }
        for model in 0..MODELS {
            let slots = self.written[model].len();
            // One of them is the live one, another the one that is written.
            let apart = self.most_needed[model].saturating_sub(2);
            let bound = self.most_needed[model].max(apart + usize::from(MAX_SLOTS));
            assert!(slots <= bound, "{slots} slots, {bound} needed");
            assert_eq!(usize::from(self.plan.slots(model)), slots);
            assert_eq!(self.plan.version(model).0, self.issued[model]);
            // Every version that is meant for somebody is still there.
            for version in self.needed(model) {
                let slot = self.plan.find(model, Version(version)).unwrap();
                assert_eq!(self.written[model][usize::from(slot)], version);
            }
        }
        // A snapshot is one version for as long as it is held.
        for reader in self.readers.values() {
            for (model, slot, version) in &reader.snapshots {
                assert_eq!(self.written[*model][usize::from(*slot)], *version);
            }
        }
    }

    fn read(&self, live: Live) -> Versions {
        let record = self.records[usize::from(live.record)].unwrap();
        assert!(record.sequence <= live.sequence);
        let members = record.set.iter();
        members
            .map(|(model, placed)| (model, placed.version.0))
            .collect()
    }

    /// The versions of a model that sets and lanes need.
    fn needed(&self, model: usize) -> BTreeSet<u64> {
        let sets = std::iter::once(&self.default)
            .chain(&self.history)
            .chain(self.overrides.values())
            .chain(self.held.values());
        let mut needed: BTreeSet<_> = sets.filter_map(|set| set.get(&model).copied()).collect();
        for (key, reader) in &self.readers {
            if self.key(key.0.0) == Some(*key) && reader.models.contains(model) {
                let answer = reader.answer.iter().map(|(_, live)| live);
                let told = reader.live.iter().chain(&reader.queue).chain(answer);
                let told = told.filter_map(|live| self.read(*live).get(&model).copied());
                needed.extend(told);
            }
        }
        needed
    }

    /// The versions of a model that anything refers to.
    fn referred(&self, model: usize) -> BTreeSet<u64> {
        let mut all = self.needed(model);
        for reader in self.readers.values() {
            let mine = |set: &Versions| only(set, reader.models).get(&model).copied();
            all.extend(reader.waiting.iter().filter_map(|(_, set)| mine(set)));
            all.extend(reader.pinned.iter().filter_map(|(_, set, _)| mine(set)));
            let snapshots = reader.snapshots.iter();
            all.extend(snapshots.filter(|one| one.0 == model).map(|one| one.2));
        }
        all
    }

    fn note(&mut self, update: &Versions, workers: Option<u32>) {
        match workers {
            None => {
                if !self.default.is_empty() {
                    self.history.push_front(self.default.clone());
                }
                self.default.extend(update.clone());
                self.forget();
                for own in self.overrides.values_mut() {
                    own.retain(|model, _| !update.contains_key(model));
                }
            }
            Some(workers) => {
                for worker in chosen(workers) {
                    let own = self.overrides.entry(worker).or_default();
                    own.extend(update.clone());
                }
            }
        }
    }

    /// Of each model the newest older versions are kept, in the newest set that
    /// has them.
    fn forget(&mut self) {
        let mut kept = BTreeSet::new();
        for model in 0..MODELS {
            let now = self.default.get(&model);
            let sets = self.history.iter();
            let older = sets.filter_map(|set| set.get(&model));
            let older: BTreeSet<u64> = older.filter(|one| Some(*one) != now).copied().collect();
            for version in older.iter().rev().take(HISTORY.into()) {
                let mut sets = self.history.iter();
                kept.extend(sets.position(|set| set.get(&model) == Some(version)));
            }
        }
        let sets = std::mem::take(&mut self.history).into_iter().enumerate();
        let sets = sets.filter(|(at, _)| kept.contains(at));
        self.history = sets.map(|(_, set)| set).collect();
    }

    fn meant(&self, worker: u32) -> Versions {
        if let Some(set) = self.held.get(&worker) {
            return set.clone();
        }
        let mut set = self.default.clone();
        set.extend(self.overrides.get(&worker).cloned().unwrap_or_default());
        set
    }

    /// From now on the lane is to show this. A set without any of the reader's
    /// models is nothing to show.
    fn expect(&mut self, key: Key, set: &Versions) {
        let reader = self.reader(key);
        let set = only(set, reader.models);
        if !set.is_empty() {
            reader.expected = VecDeque::from([set]);
        }
    }

    /// The worker's reader that is still there.
    fn key(&self, worker: u32) -> Option<Key> {
        let mut of = self.readers.range(all_of(worker));
        of.next_back()
            .filter(|(_, reader)| reader.told != u64::MAX)
            .map(|(key, _)| *key)
    }

    fn reader(&mut self, key: Key) -> &mut Reader {
        self.readers.get_mut(&key).unwrap()
    }

    /// What it holds stays; an entry of its queue that it was about to take was
    /// taken back.
    fn shut(&mut self, worker: u32) {
        let Some(key) = self.key(worker) else { return };
        self.plan.shut(key);
        let reader = self.reader(key);
        reader.shut = true;
        reader.live = None;
        reader.queue.clear();
        reader.waiting.clear();
        reader.expected.clear();
        reader.wanted = None;
        reader.answer = None;
        reader.answered = None;
        if let Delivery::Every { .. } = reader.delivery {
            reader.pinned = None;
        }
    }

    /// Its snapshots stay; nothing more comes to it.
    fn leave(&mut self, worker: u32) {
        if let Some(key) = self.key(worker) {
            self.plan.leave(key);
            let reader = self.reader(key);
            let snapshots = std::mem::take(&mut reader.snapshots);
            *reader = Reader::new(Models(0), Delivery::Newest);
            reader.snapshots = snapshots;
            reader.told = u64::MAX;
        }
    }
}

impl Reader {
    fn new(models: Models, delivery: Delivery) -> Self {
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
            told: 0,
            shut: false,
            question: 0,
            through: 0,
            answer: None,
            answered: None,
            answer_told: 0,
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

fn step_of(step: &Step) -> Option<Key> {
    match step {
        Step::Write { .. } => None,
        Step::Flip { key, .. }
        | Step::Push { key, .. }
        | Step::Answer { key, .. }
        | Step::Clear { key } => Some(*key),
    }
}

fn only(set: &Versions, models: Models) -> Versions {
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
