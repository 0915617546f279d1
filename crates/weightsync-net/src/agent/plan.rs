//! A relay's decisions: which version to fetch next, which fetch to stop, and which worker gets
//! which set.
//!
//! **Guarantee.** The input and the output are plain values. [`RelayPlan`] takes events
//! ([`PlanInput`]) and returns what is to be done ([`PlanEffect`]), in order.
//!
//! * A worker is notified of a set only when every version of the set is whole here.
//! * **The first set is finished.** If a set began to arrive while one of its models had no
//!   whole version here, the relay fetches it to the end. It does so also when newer sets are
//!   published, and when the worker of the set has left. So a relay whose transfers take longer
//!   than a worker waits has a version in the time of one transfer. There is at most one such
//!   set for each model.
//! * A worker that wants the newest set skips sets that were replaced meanwhile, but never two
//!   in a row: then the transfer under way is finished first. So a slow link does not starve
//!   its workers.
//! * The relay fetches one version of a model at a time for its workers, first one that has
//!   begun to arrive, whichever worker it was for. Two in parallel would each take twice as
//!   long. Only workers that take every version do not wait for others.
//! * All versions of the next set are requested at once, in parallel: the parent keeps a
//!   requested version until it was sent, and a set is useless while one version is missing.
//!   The relay also requests, for each model, the oldest version that relays below want, since
//!   that makes the first of them whole.
//! * A version is released once no worker has or awaits it and no relay below wants it.

mod worker;

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::Version;
use weightsync_mem::{Delivery, WorkerInstance};

use self::worker::{Notification, WorkerPlan};

/// The most fetches at once: a set of as many models as there may be.
const SIDE_BY_SIDE: usize = 64;

/// One version of one model.
///
/// Its serde form is also its form in messages: golden files hold the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Item {
    /// The model's index in the sender's set.
    pub model: usize,
    /// The version.
    pub version: Version,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanInput {
    /// A worker was admitted.
    Joined {
        who: WorkerInstance,
        delivery: Delivery,
    },
    /// A worker has left.
    Left { who: WorkerInstance },
    /// The sender notified a worker of a set.
    Notified {
        who: WorkerInstance,
        sequence: u64,
        set: Vec<Item>,
    },
    /// The sender answered a worker's question.
    Answered {
        who: WorkerInstance,
        question: u64,
        sequence: u64,
        set: Vec<Item>,
    },
    /// A worker no longer waits for the answers up to this question.
    Withdrawn { who: WorkerInstance, question: u64 },
    /// There is a parent to fetch from (again).
    Parent,
    /// The parent is gone or silent.
    NoParent,
    /// A fetched version is whole.
    Whole { item: Item },
    /// A fetch has ended in order, and a part is missing that another one was to bring.
    Rest { item: Item },
    /// A fetch broke off.
    Broken { item: Item },
    /// The parent does not have the version; with `sender`, the sender itself does not have it.
    NotThere { item: Item, sender: bool },
    /// The version is fetched from the sender itself, which is no longer the parent.
    FromSender { item: Item },
    /// There may be room for a version now.
    MayHaveRoom,
    /// There was no room to fetch the version into.
    NoRoom { item: Item },
    /// The bytes of a model here differ from the published ones.
    Spoiled { model: usize },
    /// A relay below wants a version.
    Wanted { item: Item },
    /// A relay below no longer wants a version.
    Unwanted { item: Item },
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanEffect {
    /// Put a worker's mailbox on a set; every version of the set is whole.
    Notify {
        who: WorkerInstance,
        sequence: u64,
        set: Vec<Item>,
    },
    /// Answer a worker's question.
    Answer {
        who: WorkerInstance,
        question: u64,
        sequence: u64,
        set: Vec<Item>,
    },
    /// Fetch a version from the parent or, with `sender`, from the sender itself. Blocks that are
    /// already here are kept.
    Fetch { item: Item, sender: bool },
    /// Stop a fetch; its blocks are kept until the version is released.
    Stop { item: Item },
    /// Release a version, whole or not: nothing needs it any more.
    Release { item: Item },
    /// Tell relays below that nobody has a version that they want.
    Refuse { item: Item },
}

/// What a relay has, and what it must do next.
#[derive(Debug, Default)]
pub struct RelayPlan {
    workers: BTreeMap<WorkerInstance, WorkerPlan>,
    items: BTreeMap<Item, ItemState>,
    /// What relays below want, and how many of them want it.
    wanted: BTreeMap<Item, u32>,
    /// Versions that were refused, and how many relays below have not withdrawn their request yet.
    refused: BTreeMap<Item, u32>,
    fetching: BTreeSet<Item>,
    /// Sets to finish in any case: each began to arrive while one of its models had nothing whole
    /// here.
    firsts: Vec<Vec<Item>>,
    has_parent: bool,
    /// No room was found; nothing is fetched until there may be some.
    full: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemState {
    /// A part of the version may be here.
    Begun,
    Whole,
    /// The parent does not have the version, so it is fetched from the sender.
    FromSender,
}

impl RelayPlan {
    /// The plan of a relay to which nothing has happened yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes what has happened; returns what to do.
    pub fn step(&mut self, inputs: impl IntoIterator<Item = PlanInput>) -> Vec<PlanEffect> {
        let mut effects = Vec::new();
        for input in inputs {
            self.note(input, &mut effects);
        }
        // In this order: a delivery moves mailboxes off versions, their release makes room, and a
        // fetch takes it.
        self.deliver(&mut effects);
        self.release(&mut effects);
        self.fetch(&mut effects);
        effects
    }

    fn note(&mut self, input: PlanInput, effects: &mut Vec<PlanEffect>) {
        match input {
            PlanInput::Joined { who, delivery } => {
                self.workers.insert(who, WorkerPlan::new(delivery));
            }
            PlanInput::Left { who } => {
                self.workers.remove(&who);
            }
            PlanInput::Notified { who, sequence, set } => {
                effects.extend(self.notified(who, Notification { sequence, set }));
            }
            PlanInput::Answered {
                who,
                question,
                sequence,
                set,
            } => {
                // An answer may cross the message that withdraws its question.
                if let Some(worker) = self.workers.get_mut(&who)
                    && question > worker.withdrawn
                {
                    worker.answer = Some((question, Notification { sequence, set }));
                }
            }
            PlanInput::Withdrawn { who, question } => {
                if let Some(worker) = self.workers.get_mut(&who) {
                    worker.withdrawn = question.max(worker.withdrawn);
                    worker.answer.take_if(|(of, _)| *of <= question);
                }
            }
            PlanInput::Parent => self.has_parent = true,
            PlanInput::NoParent => self.lose_parent(),
            PlanInput::Whole { item } => self.finish(item),
            // `fetch`, at the end of this step, asks for what is missing.
            PlanInput::Rest { item } => {
                self.fetching.remove(&item);
            }
            PlanInput::Broken { item } => self.break_off(item),
            PlanInput::NotThere { item, sender } => self.not_there(item, sender, effects),
            PlanInput::FromSender { item } => {
                if self.fetching.contains(&item) {
                    self.items.insert(item, ItemState::FromSender);
                }
            }
            PlanInput::MayHaveRoom => self.full = false,
            PlanInput::NoRoom { item } => self.wait_for_room(item),
            PlanInput::Spoiled { model } => self.drop_model(model, effects),
            PlanInput::Wanted { item } => *self.wanted.entry(item).or_default() += 1,
            PlanInput::Unwanted { item } => self.unwant(item),
        }
    }

    /// The sender notified a worker of a set. A worker that runs nothing yet may get an older one
    /// at once.
    fn notified(&mut self, who: WorkerInstance, next: Notification) -> Option<PlanEffect> {
        let (items, firsts) = (&self.items, &self.firsts);
        let worker = self.workers.get_mut(&who)?;
        // Such a worker must not wait for a transfer while a set that it may run is here.
        if worker.may_begin_with(&next) && is_whole(items, &next.set) {
            return Some(worker.put_on(who, next));
        }
        worker.enqueue(next, |front| {
            let is_first = firsts.contains(&front.set);
            (is_first, is_first || is_begun(items, &front.set))
        });
        None
    }

    fn lose_parent(&mut self) {
        self.has_parent = false;
        let items = &self.items;
        let from_sender = |item: &Item| items.get(item) == Some(&ItemState::FromSender);
        // These go on: they come from the sender itself.
        self.fetching.retain(from_sender);
    }

    /// A version is whole: it may be the last one of a set that is finished in any case.
    fn finish(&mut self, item: Item) {
        self.items.insert(item, ItemState::Whole);
        self.fetching.remove(&item);
        let items = &self.items;
        self.firsts.retain(|set| !is_whole(items, set));
    }

    fn break_off(&mut self, item: Item) {
        self.fetching.remove(&item);
        // A failed fetch from the sender is not tried again at once, because it could fail again
        // without end. It waits for a parent, and asks that parent first.
        if let Some(state @ ItemState::FromSender) = self.items.get_mut(&item) {
            *state = ItemState::Begun;
        }
    }

    fn not_there(&mut self, item: Item, sender: bool, effects: &mut Vec<PlanEffect>) {
        self.fetching.remove(&item);
        match sender {
            true => self.give_up(item, effects),
            // A relay may have dropped what the sender still has.
            false => {
                self.items.insert(item, ItemState::FromSender);
            }
        }
    }

    fn wait_for_room(&mut self, item: Item) {
        self.fetching.remove(&item);
        self.full = true;
        // Nothing of the version has begun to arrive.
        if self.items.get(&item) == Some(&ItemState::Begun) {
            self.items.remove(&item);
            self.drop_firsts(|one| *one == item);
        }
    }

    fn unwant(&mut self, item: Item) {
        // Until all who were refused have withdrawn, a withdrawal belongs to the refused request
        // and not to a newer one.
        let counts = match self.refused.contains_key(&item) {
            true => &mut self.refused,
            false => &mut self.wanted,
        };
        if let Some(count) = counts.get_mut(&item) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&item);
            }
        }
    }

    /// The versions that are whole here.
    pub fn whole(&self) -> impl Iterator<Item = Item> {
        let whole = self.items.iter();
        whole
            .filter(|(_, state)| **state == ItemState::Whole)
            .map(|(item, _)| *item)
    }

    /// Whether a version belongs to a set that is finished in any case.
    pub(crate) fn is_first(&self, item: &Item) -> bool {
        self.firsts.iter().flatten().any(|first| first == item)
    }

    /// The sets that are finished in any case.
    #[cfg(test)]
    pub(crate) fn firsts(&self) -> &[Vec<Item>] {
        &self.firsts
    }

    /// The versions that are being fetched.
    #[cfg(test)]
    pub(crate) fn fetching(&self) -> &BTreeSet<Item> {
        &self.fetching
    }

    /// Whether some worker still waits for a notification.
    pub fn is_pending(&self) -> bool {
        let mut workers = self.workers.values();
        workers.any(|worker| !worker.pending.is_empty() || worker.answer.is_some())
    }

    /// Whether a version is to be fetched and there is no room for it.
    pub fn waits_for_room(&self) -> bool {
        self.full
    }

    fn is_whole(&self, item: &Item) -> bool {
        self.items.get(item) == Some(&ItemState::Whole)
    }

    /// Notifies workers of the sets that are whole by now.
    fn deliver(&mut self, effects: &mut Vec<PlanEffect>) {
        let items = &self.items;
        let whole = |next: &Notification| is_whole(items, &next.set);
        for (who, worker) in &mut self.workers {
            // The newest whole set replaces those before it, unless the worker takes every set.
            let newest = !matches!(worker.delivery, Delivery::Every { .. });
            if newest && let Some(at) = worker.pending.iter().rposition(whole) {
                worker.pending.drain(..at);
            }
            while let Some(next) = worker.pending.pop_front_if(|next| whole(next)) {
                // One replacement is allowed again.
                worker.missed = false;
                effects.push(worker.put_on(*who, next));
            }
            // A question and its answer stand apart from the mailbox: an answer may be an older
            // version.
            let answer = worker.answer.take_if(|(_, next)| whole(next));
            if let Some((question, next)) = answer {
                worker.answered.clone_from(&next.set);
                effects.push(PlanEffect::Answer {
                    who: *who,
                    question,
                    sequence: next.sequence,
                    set: next.set,
                });
            }
        }
    }

    /// Releases versions that nothing needs.
    fn release(&mut self, effects: &mut Vec<PlanEffect>) {
        let needed = self.needed();
        let mut newest: BTreeMap<usize, Version> = BTreeMap::new();
        for item in self.whole() {
            let newest = newest.entry(item.model).or_insert(item.version);
            *newest = item.version.max(*newest);
        }
        // Stops come before releases, because a fetch under way holds its slot.
        self.fetching.retain(|item| {
            let keep = needed.contains(item);
            if !keep {
                effects.push(PlanEffect::Stop { item: *item });
            }
            keep
        });
        self.items.retain(|item, state| {
            // The newest whole version stays, for relays below and for workers that join later.
            let kept = *state == ItemState::Whole && newest.get(&item.model) == Some(&item.version);
            let keep = kept || needed.contains(item);
            if !keep {
                effects.push(PlanEffect::Release { item: *item });
            }
            keep
        });
    }

    /// Starts the fetches that come next and are not under way.
    fn fetch(&mut self, effects: &mut Vec<PlanEffect>) {
        if self.full {
            return;
        }
        let sets: Vec<Vec<Item>> = self.sets().into_iter().map(<[Item]>::to_vec).collect();
        for item in self.next(&sets) {
            if self.fetching.len() >= SIDE_BY_SIDE {
                break;
            }
            let sender = self.items.get(&item) == Some(&ItemState::FromSender);
            // The sender can be reached without a parent, too.
            if (sender || self.has_parent) && self.fetching.insert(item) {
                self.items.entry(item).or_insert(ItemState::Begun);
                effects.push(PlanEffect::Fetch { item, sender });
            }
        }
        // After the fetches have begun: only a set that really arrives is finished in any case.
        self.note_firsts(sets);
    }

    /// Notes the sets that arrive at a relay while it has nothing whole of one of their models.
    fn note_firsts(&mut self, sets: Vec<Vec<Item>>) {
        let firsts = self.firsts.iter().flatten().copied();
        let known = self.whole().chain(firsts).map(|item| item.model);
        let mut known: BTreeSet<usize> = known.collect();
        for set in sets {
            let is_first =
                |item: &Item| self.fetching.contains(item) && !known.contains(&item.model);
            if set.iter().any(is_first) {
                // These models have such a set now, so a later set is not a second one.
                known.extend(set.iter().map(|item| item.model));
                self.firsts.push(set);
            }
        }
    }

    /// The versions to fetch next. First these sets, which workers here wait for. Then, of each
    /// model, the oldest version that relays below want, unless an older one is being fetched
    /// anyway: a later fetch would find that it was replaced above. Newer ones wait, because their
    /// bytes would hold up the others.
    fn next(&self, sets: &[Vec<Item>]) -> Vec<Item> {
        let here = sets.iter().flatten();
        let mut next: Vec<Item> = here.filter(|item| !self.is_whole(item)).copied().collect();
        let mut below = self
            .wanted
            .keys()
            .filter(|item| !self.is_whole(item))
            .peekable();
        // The keys ascend, so the first one of a model is its oldest version.
        while let Some(oldest) = below.next() {
            let older = |one: &Item| one.model == oldest.model && one.version < oldest.version;
            if !next.iter().any(older) {
                next.push(*oldest);
            }
            while below.next_if(|item| item.model == oldest.model).is_some() {}
        }
        next
    }

    /// The sets to fetch now for workers here: the sets that are finished in any case, and the
    /// first set that each worker waits for. A set waits while another version of one of its models
    /// is to come first.
    fn sets(&self) -> Vec<&[Item]> {
        let (mut sets, mut others) = (Vec::new(), Vec::new());
        for worker in self.workers.values() {
            others.extend(worker.answer.iter().map(|(_, next)| next));
            match worker.delivery {
                // Such a worker skips nothing, so its sets wait for no other.
                Delivery::Every { .. } => sets.extend(worker.pending.front()),
                Delivery::Newest | Delivery::Asked => others.extend(worker.pending.front()),
            }
        }
        // Sets that have begun come first, because a part of their bytes is here already.
        others.sort_by_key(|next| (!is_begun(&self.items, &next.set), next.sequence));
        let missing = |set: &[Item]| -> Vec<Item> {
            let missing = set.iter().filter(|item| !self.is_whole(item));
            missing.copied().collect()
        };
        let firsts = self.firsts.iter().flat_map(|set| missing(set));
        let mut coming: BTreeMap<usize, Version> =
            firsts.map(|item| (item.model, item.version)).collect();
        for next in others {
            let missing = missing(&next.set);
            let comes = |item: &Item| coming.get(&item.model).copied();
            let comes_other = |item| comes(item).is_some_and(|comes| comes != item.version);
            // Two versions of one model at a time would take twice as long each, so one of the two
            // waits.
            if !missing.iter().any(comes_other) {
                coming.extend(missing.iter().map(|item| (item.model, item.version)));
                sets.push(next);
            }
        }
        sets.sort_by_key(|next| next.sequence);
        let firsts = self.firsts.iter().map(Vec::as_slice);
        let sets = sets.into_iter().map(|next| &next.set[..]);
        firsts.chain(sets).collect()
    }

    /// Versions that must not be released.
    fn needed(&self) -> BTreeSet<Item> {
        let workers = self.workers.values();
        let items = workers.flat_map(|worker| {
            let answer = worker.answer.iter().map(|(_, next)| next);
            let tells = answer.chain(&worker.pending);
            let coming = tells.flat_map(|next| &next.set);
            coming.chain(&worker.notified).chain(&worker.answered)
        });
        let firsts = self.firsts.iter().flatten();
        items
            .chain(self.wanted.keys())
            .chain(firsts)
            .copied()
            .collect()
    }

    /// Releases every version of a model, because later ones may be made from a wrong one. Workers
    /// wait for further notifications until a version is fetched again. Mailboxes stay on the sets
    /// that they name.
    fn drop_model(&mut self, model: usize, effects: &mut Vec<PlanEffect>) {
        for item in self.items.extract_if(.., |item, _| item.model == model) {
            let (item, _) = item;
            if self.fetching.remove(&item) {
                effects.push(PlanEffect::Stop { item });
            }
            effects.push(PlanEffect::Release { item });
        }
        self.drop_firsts(|item| item.model == model);
        // Otherwise `needed` would go on naming versions that are gone.
        for worker in self.workers.values_mut() {
            worker.notified.retain(|item| item.model != model);
            worker.answered.retain(|item| item.model != model);
        }
    }

    /// Drops sets to finish if these versions are gone and nothing else of the set has begun to
    /// arrive.
    fn drop_firsts(&mut self, of: impl Fn(&Item) -> bool) {
        let items = &self.items;
        self.firsts
            .retain(|set| !set.iter().any(&of) || is_begun(items, set));
    }

    /// Gives up a version that nobody has any more: workers that wait for it wait for its
    /// successor.
    fn give_up(&mut self, item: Item, effects: &mut Vec<PlanEffect>) {
        self.firsts.retain(|set| !set.contains(&item));
        for worker in self.workers.values_mut() {
            worker.pending.retain(|next| !next.set.contains(&item));
            worker.answer.take_if(|(_, next)| next.set.contains(&item));
        }
        if let Some(count) = self.wanted.remove(&item) {
            // Each of these children still withdraws its request. A withdrawal must not count for a
            // newer request.
            *self.refused.entry(item).or_default() += count;
            effects.push(PlanEffect::Refuse { item });
        }
    }
}

fn is_whole(items: &BTreeMap<Item, ItemState>, set: &[Item]) -> bool {
    let mut set = set.iter();
    set.all(|item| items.get(item) == Some(&ItemState::Whole))
}

/// Whether a part of a set has arrived or is arriving.
fn is_begun(items: &BTreeMap<Item, ItemState>, set: &[Item]) -> bool {
    let begun = |item| {
        matches!(
            items.get(item),
            Some(ItemState::Begun | ItemState::FromSender)
        )
    };
    set.iter().any(begun)
}

#[cfg(test)]
mod tests;
