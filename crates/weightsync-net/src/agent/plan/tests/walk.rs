//! Random ways through the plan, with a second bookkeeping next to it that says what
//! may be done and what must be.

mod op;

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use weightsync_core::WorkerId;

use super::*;

use self::op::{End, Op, op};

const WORKERS: u32 = 4;
const MODELS: usize = 2;

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_worker_ends_at_its_newest(ops in vec(op(), 1..90)) {
        let mut world = World::default();
        for op in &ops {
            world.take(op);
        }
        world.calm();
    }
}

/// The notifications that a worker must get, and those it got.
struct Known {
    who: WorkerInstance,
    delivery: Delivery,
    /// Sets that arrived since its last notification, oldest first, without given-up ones. For a
    /// worker that wants the newest, only the last one.
    open: Vec<(u64, Vec<Item>)>,
    /// All that came for it since it was told anything.
    since: Vec<(u64, Vec<Item>)>,
    came: u64,
    /// Its mailbox, and its last answer.
    told: (u64, Vec<Item>),
    answered: Vec<Item>,
    question: u64,
    answer: Option<(u64, u64, Vec<Item>)>,
}

#[derive(Default)]
struct World {
    plan: RelayPlan,
    workers: BTreeMap<u32, Known>,
    instances: u64,
    /// The sets that were published, by sequence number from 1.
    sets: Vec<Vec<Item>>,
    versions: [u64; MODELS],
    has_parent: bool,
    /// Each with whether it comes from the sender.
    fetching: BTreeMap<Item, bool>,
    /// The parent said that it does not have them.
    from_sender: BTreeSet<Item>,
    whole: BTreeSet<Item>,
    full: bool,
    /// Sets that began to arrive while one of their models had nothing whole.
    firsts: BTreeSet<Item>,
    /// The model that is spoiled just now.
    spoiled: Option<usize>,
    /// The versions that relays below want.
    wanted: Vec<Item>,
    /// Those of them that were refused: the relays will withdraw their requests.
    refused: Vec<Item>,
}

impl World {
    fn take(&mut self, op: &Op) {
        let mut inputs = Vec::new();
        match *op {
            Op::Join { worker, delivery } => {
                self.leave(worker, &mut inputs);
                self.instances += 1;
                let who = WorkerInstance {
                    worker: WorkerId(worker),
                    instance: self.instances,
                };
                self.workers.insert(worker, Known::new(who, delivery));
                inputs.push(PlanInput::Joined { who, delivery });
            }
            Op::Leave { worker } => self.leave(worker, &mut inputs),
            Op::Publish { models, workers } => {
                self.publish(models);
                for worker in (0..WORKERS).filter(|worker| workers & 1 << worker != 0) {
                    self.tell(worker, &mut inputs);
                }
            }
            Op::Again { worker } => self.tell(worker, &mut inputs),
            Op::Answer { worker, back } => self.answer(worker, back, &mut inputs),
            Op::Withdraw { worker } => {
                if let Some(known) = self.workers.get_mut(&worker) {
                    let (who, question) = (known.who, known.question);
                    known.answer = None;
                    inputs.push(PlanInput::Withdrawn { who, question });
                }
            }
            Op::Parent => {
                self.has_parent = true;
                inputs.push(PlanInput::Parent);
            }
            Op::Reassigned => {
                self.lose_parent();
                self.has_parent = true;
                inputs.extend([PlanInput::NoParent, PlanInput::Parent]);
            }
            Op::Ends { end, which } => self.end(end, which, &mut inputs),
            Op::Spoil { model } => {
                // A needed version may be released as well: it is fetched again.
                for known in self.workers.values_mut() {
                    known.told.1.retain(|item| item.model != model);
                    known.answered.retain(|item| item.model != model);
                }
                self.spoiled = Some(model);
                self.firsts.retain(|item| item.model != model);
                self.step(vec![PlanInput::Spoiled { model }]);
                self.spoiled = None;
            }
            Op::Room => {
                self.full = false;
                inputs.push(PlanInput::MayHaveRoom);
            }
            Op::Want { model, back } => {
                let version = Version(self.versions[model].saturating_sub(back).max(1));
                let item = Item { model, version };
                self.wanted.push(item);
                inputs.push(PlanInput::Wanted { item });
            }
            Op::Unwant { which } => {
                let item = match self.refused.pop() {
                    Some(item) => item,
                    None if which < self.wanted.len() => self.wanted.remove(which),
                    None => return,
                };
                inputs.push(PlanInput::Unwanted { item });
            }
        }
        self.step(inputs);
    }

    /// Nothing new happens, and every fetch succeeds.
    fn calm(&mut self) {
        self.has_parent = true;
        self.full = false;
        self.step(vec![PlanInput::Parent, PlanInput::MayHaveRoom]);
        let mut fetches = 0;
        while let Some((item, _)) = self.fetching.pop_first() {
            self.whole.insert(item);
            self.firsts.remove(&item);
            self.step(vec![PlanInput::Whole { item }]);
            fetches += 1;
            assert!(fetches < 2000, "it fetches without end");
        }
        for (worker, known) in &self.workers {
            assert!(known.open.is_empty(), "{worker} waits for {:?}", known.open);
            assert!(known.answer.is_none(), "{worker} was not answered");
        }
        assert!(!self.plan.is_pending());
        let missing = |item: &&Item| !self.whole.contains(*item);
        assert_eq!(self.wanted.iter().find(missing), None, "nobody fetches it");
    }

    fn publish(&mut self, models: u32) {
        for model in (0..MODELS).filter(|model| models & 1 << model != 0) {
            self.versions[model] += 1;
        }
        let versions = self.versions.iter().enumerate();
        let items = versions
            .filter(|(_, version)| **version > 0)
            .map(|(model, version)| Item {
                model,
                version: Version(*version),
            });
        self.sets.push(items.collect());
    }

    fn tell(&mut self, worker: u32, inputs: &mut Vec<PlanInput>) {
        let (Some(set), Some(known)) = (self.sets.last(), self.workers.get_mut(&worker)) else {
            return;
        };
        let sequence = self.sets.len() as u64;
        inputs.push(PlanInput::Notified {
            who: known.who,
            sequence,
            set: set.clone(),
        });
        if sequence <= known.came {
            return;
        }
        known.came = sequence;
        if !matches!(known.delivery, Delivery::Every { .. }) {
            known.open.clear();
        }
        known.open.push((sequence, set.clone()));
        known.since.push((sequence, set.clone()));
    }

    fn answer(&mut self, worker: u32, back: usize, inputs: &mut Vec<PlanInput>) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some(at) = self.sets.len().checked_sub(back + 1) else {
            return;
        };
        known.question += 1;
        let (question, sequence, set) = (known.question, at as u64 + 1, self.sets[at].clone());
        known.answer = Some((question, sequence, set.clone()));
        inputs.push(PlanInput::Answered {
            who: known.who,
            question,
            sequence,
            set,
        });
    }

    fn leave(&mut self, worker: u32, inputs: &mut Vec<PlanInput>) {
        if let Some(known) = self.workers.remove(&worker) {
            inputs.push(PlanInput::Left { who: known.who });
        }
    }

    fn lose_parent(&mut self) {
        self.has_parent = false;
        self.fetching.retain(|_, sender| *sender);
    }

    fn end(&mut self, end: End, which: usize, inputs: &mut Vec<PlanInput>) {
        let mut fetching = self.fetching.iter().cycle().take(which + 1);
        let Some((&item, &sender)) = fetching.nth(which) else {
            return;
        };
        self.fetching.remove(&item);
        match end {
            End::Whole => {
                self.firsts.remove(&item);
                self.whole.insert(item);
                inputs.push(PlanInput::Whole { item });
            }
            End::Broken => {
                self.lose_parent();
                self.from_sender.remove(&item);
                inputs.extend([PlanInput::Broken { item }, PlanInput::NoParent]);
            }
            End::NotThere => {
                inputs.push(PlanInput::NotThere { item, sender });
                if sender {
                    self.give_up(item);
                } else {
                    self.from_sender.insert(item);
                }
            }
            End::NoRoom => {
                self.firsts.remove(&item);
                self.full = true;
                inputs.push(PlanInput::NoRoom { item });
            }
        }
    }

    fn give_up(&mut self, item: Item) {
        self.firsts.clear();
        for known in self.workers.values_mut() {
            known.open.retain(|(_, set)| !set.contains(&item));
            known.answer.take_if(|(_, _, set)| set.contains(&item));
        }
        self.wanted.retain(|wanted| {
            let refused = *wanted == item;
            if refused {
                self.refused.push(item);
            }
            !refused
        });
    }

    fn step(&mut self, inputs: Vec<PlanInput>) {
        for effect in self.plan.step(inputs) {
            self.perform(effect);
        }
        self.check();
    }

    fn perform(&mut self, effect: PlanEffect) {
        match effect {
            PlanEffect::Notify { who, sequence, set } => {
                assert!(set.iter().all(|item| self.whole.contains(item)));
                let known = self.workers.get_mut(&who.worker.0).expect("who is told");
                assert_eq!(known.who, who);
                assert!(sequence > known.told.0, "sequence numbers only grow");
                assert!(known.since.contains(&(sequence, set.clone())));
                if let Delivery::Every { .. } = known.delivery {
                    assert_eq!(known.open.first(), Some(&(sequence, set.clone())));
                }
                known.open.retain(|(one, _)| *one > sequence);
                known.since.retain(|(one, _)| *one > sequence);
                known.told = (sequence, set);
            }
            PlanEffect::Answer {
                who,
                question,
                sequence,
                set,
            } => {
                assert!(set.iter().all(|item| self.whole.contains(item)));
                let known = self.workers.get_mut(&who.worker.0).expect("who asked");
                let expected = known.answer.take();
                assert_eq!(expected, Some((question, sequence, set.clone())));
                known.answered = set;
            }
            PlanEffect::Fetch { item, sender } => {
                assert!(
                    !self.whole.contains(&item) && self.is_next(&item),
                    "{item:?}"
                );
                assert!(!self.full && (sender || self.has_parent));
                assert_eq!(sender, self.from_sender.contains(&item));
                let before = self.fetching.insert(item, sender);
                assert_eq!(before, None, "{item:?} is on its way");
                let of_it = |other: &Item| other.model == item.model;
                let has_some = self.whole.iter().chain(&self.firsts).any(of_it);
                if !has_some && self.firsts_of_plan().contains(&item) {
                    self.firsts.insert(item);
                }
            }
            PlanEffect::Stop { item } => {
                let stopped = self.fetching.remove(&item);
                assert!(stopped.is_some(), "{item:?} is not on its way");
                assert!(!self.firsts.contains(&item), "{item:?} is not finished");
            }
            PlanEffect::Release { item } => {
                let spoiled = self.spoiled == Some(item.model);
                assert!(
                    spoiled || !self.needed().contains(&item),
                    "{item:?} is needed"
                );
                assert!(!self.fetching.contains_key(&item));
                assert!(!self.firsts.contains(&item), "{item:?} is not finished");
                self.whole.remove(&item);
                self.from_sender.remove(&item);
            }
            PlanEffect::Refuse { item } => {
                let asked = self.refused.contains(&item);
                assert!(asked && !self.wanted.contains(&item), "{item:?}");
            }
        }
    }

    fn check(&self) {
        let whole: BTreeSet<Item> = self.plan.whole().collect();
        assert_eq!(whole, self.whole);
        let fetching: BTreeSet<Item> = self.fetching.keys().copied().collect();
        assert_eq!(*self.plan.fetching(), fetching);
        assert_eq!(self.plan.waits_for_room(), self.full);
        for known in self.workers.values() {
            let (_, told) = &known.told;
            let mut mailboxes = told.iter().chain(&known.answered);
            assert!(
                mailboxes.all(|item| whole.contains(item)),
                "its mailbox is on it"
            );
            // A whole set is notified at once.
            let whole = |set: &[Item]| set.iter().all(|item| whole.contains(item));
            let due = known.open.first();
            assert!(!due.is_some_and(|(_, set)| whole(set)));
            assert!(known.answer.iter().all(|(_, _, set)| !whole(set)));
        }
        let mut needed = self.needed();
        let came = self.workers.values().flat_map(|known| &known.since);
        needed.extend(came.flat_map(|(_, set)| set));
        assert!(fetching.is_subset(&needed), "nobody needs it");
        self.check_fetches();
    }

    /// All that comes next is on its way, as far as it can be.
    fn check_fetches(&self) {
        let firsts = self.plan.firsts();
        assert!(firsts.len() <= MODELS);
        let first = |item: &Item| firsts.iter().flatten().any(|one| one == item);
        let all = self.firsts.iter().all(first);
        assert!(all, "{:?} of {firsts:?}", self.firsts);
        if self.full || !self.has_parent {
            return;
        }
        let missing = |set: &[Item]| -> Vec<Item> {
            let missing = set.iter().filter(|item| !self.whole.contains(*item));
            missing.copied().collect()
        };
        let all_comes = |set: &[Item]| {
            let missing = missing(set);
            missing.iter().all(|item| self.fetching.contains_key(item))
        };
        for set in firsts {
            assert!(all_comes(set), "{set:?} is not fetched");
        }
        // Sets that wait for their turn. A worker that takes every version never waits.
        let mut waiting: Vec<&[Item]> = firsts.iter().map(Vec::as_slice).collect();
        for known in self.workers.values() {
            if let Delivery::Every { .. } = known.delivery {
                let next = known.open.first();
                assert!(next.is_none_or(|(_, set)| all_comes(set)), "{next:?}");
            } else {
                // The newest, and at most one set before it.
                let pending = &self.plan.workers[&known.who].pending;
                assert!(pending.len() <= 2, "{pending:?}");
                let newest = known.open.last().map(|(_, set)| set);
                let last = pending.back().map(|tell| &tell.set);
                assert!(newest.is_none() || last == newest, "{pending:?}");
                waiting.extend(pending.front().map(|tell| &tell.set[..]));
            }
            waiting.extend(known.answer.iter().map(|(_, _, set)| &set[..]));
        }
        // Either all of a set comes, or all of a set with another version of a model of it.
        let (coming, later): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|set| all_comes(set));
        let turn: Vec<Item> = coming.into_iter().flat_map(missing).collect();
        let other = |item: &Item| {
            let mut turn = turn.iter();
            turn.any(|one| one.model == item.model && one != item)
        };
        for set in later {
            let waits = missing(set).iter().any(other);
            assert!(waits, "{set:?} is not fetched, and waits for nothing");
        }
        for item in missing(&self.wanted) {
            let mut older = self.fetching.keys();
            let comes = older.any(|one| one.model == item.model && one.version <= item.version);
            assert!(comes, "{item:?} is wanted");
        }
    }

    /// Whether a version may begin to come: it is finished in any case, some worker waits
    /// for it, or it is the oldest of its model that is wanted below.
    fn is_next(&self, item: &Item) -> bool {
        let mut firsts = self.plan.firsts().iter().flatten();
        let waits = |known: &Known| {
            let open = known.since.iter().map(|(_, set)| set);
            let answer = known.answer.iter().map(|(_, _, set)| set);
            open.chain(answer).any(|set| set.contains(item))
        };
        let wanted = self.wanted.iter();
        let mut older = wanted.filter(|one| one.model == item.model && !self.whole.contains(*one));
        firsts.any(|one| one == item)
            || self.workers.values().any(waits)
            || self.wanted.contains(item) && older.all(|one| one.version >= item.version)
    }

    fn firsts_of_plan(&self) -> BTreeSet<Item> {
        self.plan.firsts().iter().flatten().copied().collect()
    }

    fn needed(&self) -> BTreeSet<Item> {
        let mut needed: BTreeSet<Item> = self.wanted.iter().copied().collect();
        for known in self.workers.values() {
            needed.extend(known.open.iter().flat_map(|(_, set)| set));
            needed.extend(known.answer.iter().flat_map(|(_, _, set)| set));
            needed.extend(known.told.1.iter().chain(&known.answered));
        }
        needed.extend(self.firsts_of_plan());
        needed
    }
}

impl Known {
    fn new(who: WorkerInstance, delivery: Delivery) -> Self {
        Self {
            who,
            delivery,
            open: Vec::new(),
            since: Vec::new(),
            came: 0,
            told: (0, Vec::new()),
            answered: Vec::new(),
            question: 0,
            answer: None,
        }
    }
}
