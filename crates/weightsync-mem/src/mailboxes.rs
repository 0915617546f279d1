//! Connects the plan and the shared pages, under the lock: reads the readers' pages into the plan,
//! and writes the plan's decisions into their mailboxes.

use std::sync::atomic::Ordering;

use crate::plan::{Key, PageChange, Plan};
use crate::protocol::{SlotSet, order};
use crate::registry::{RegistryState, SharedRegistry};
use crate::scan::{self, Breach};
use crate::wire::Delivery;

impl SharedRegistry {
    /// Reads the readers' pages into the plan; returns the records that some reader pins. The
    /// caller asks for data pins after this.
    pub(crate) fn observe(&self, state: &mut RegistryState) -> SlotSet {
        let mut records = SlotSet::default();
        let mut breaches = Vec::new();
        let mut retired = Vec::new();
        state.follow(|plan, key, reader| {
            // A reader that has closed its end leaves the plan here, before records are counted:
            // its mailbox must keep none.
            if !reader.retired && reader.retire(plan, key) {
                retired.push(key);
            }
            // The plan follows a head or an answer only where there is a queue or were questions.
            let moves = reader.delivery != Delivery::Newest || reader.asks;
            let through = moves.then(|| reader.through());
            let (words, claims) = reader.scanned();
            // Breaches are acted on after the loop, which borrows the readers.
            records = records.union(scan::observe(plan, key, words, through, claims));
            breaches.extend(reader.take_breach().map(|breach| (key, breach)));
        });
        for key in retired {
            state.miss_retired(key);
        }
        self.condemn(state, breaches);
        records
    }

    /// The slots of a model that some end holds, given the records that [`observe`](Self::observe)
    /// found pinned before.
    pub(crate) fn pinned(
        &self,
        state: &mut RegistryState,
        model: usize,
        records: SlotSet,
    ) -> SlotSet {
        // The sender's own snapshots, which also hold what remote readers fetch.
        let mut held = self.own.held(model);
        let mut breaches = Vec::new();
        state.follow(|plan, key, reader| {
            // A remote reader pins nothing: the sender holds the versions for it.
            if reader.socket().is_some() {
                let (words, claims) = reader.scanned();
                held = held.union(scan::pinned(plan, key, words, model, claims));
                breaches.extend(reader.take_breach().map(|breach| (key, breach)));
            }
        });
        self.condemn(state, breaches);
        held.union(state.plan.slots_of(records, model))
    }

    /// Rejects readers whose pages make impossible claims.
    fn condemn(&self, state: &mut RegistryState, breaches: Vec<(Key, Breach)>) {
        for (key, breach) in breaches {
            state.condemn(key, breach.to_string());
            // The threads that wait for them look again.
            self.bells.ring();
        }
    }

    /// Writes the plan's decision into the shared pages, and asks readers with full queues to
    /// report when there is room.
    pub(crate) fn decide<T>(
        &self,
        state: &mut RegistryState,
        decision: impl FnOnce(&mut Plan, &mut Vec<PageChange>) -> T,
    ) -> T {
        let decided = self.perform(state, decision);
        if state.plan.anything_waits() {
            // Asked before the second look, because that look may already free a record.
            let lacking = state.plan.lacks_records();
            if self.ask_for_room(state) || lacking {
                // A reader that made room before it was asked does not report that.
                let mut records = self.observe(state);
                if lacking && self.perform(state, Plan::clear_taken) {
                    // A reader may have pinned an answer's record before the word was cleared.
                    records = self.observe(state);
                }
                // The decision itself may have freed records as well.
                self.perform(state, |plan, steps| plan.deliver(records, steps));
            }
        }
        decided
    }

    /// True if a reader was asked that had not been asked before. Taking a set frees a record, so
    /// if records are missing all readers are asked. Remote readers are not asked: their relay
    /// reports here anyway.
    fn ask_for_room(&self, state: &RegistryState) -> bool {
        let mut asked = false;
        let lacking = state.plan.lacks_records();
        for (key, reader) in state.processes() {
            // While this word is set, the reader sends a packet whenever it gives an entry, a
            // record or an answer back.
            let wants = &reader.mailbox().wants_room.0;
            if !wants.sleeping() && (lacking || state.plan.anything_waits_for(key)) {
                wants.announce();
                asked = true;
            }
        }
        asked
    }

    /// Performs the decided steps on the shared pages, then wakes the readers concerned.
    fn perform<T>(
        &self,
        state: &mut RegistryState,
        decision: impl FnOnce(&mut Plan, &mut Vec<PageChange>) -> T,
    ) -> T {
        // The buffer is taken out, because the decision borrows the plan from the same state.
        let mut steps = std::mem::take(&mut state.steps);
        let decided = decision(&mut state.plan, &mut steps);
        for step in &steps {
            self.write_step(state, step);
        }
        // One fence for all mailboxes, before asking which readers sleep and before looking at
        // pins. All mailboxes are written first: a reader that is woken may take the processor.
        order();
        for step in &steps {
            wake(state, step);
        }
        steps.clear();
        state.steps = steps;
        decided
    }

    /// Writes one decided step into the shared pages.
    fn write_step(&self, state: &mut RegistryState, step: &PageChange) {
        match step {
            PageChange::Write { record } => {
                // The plan gave the record out as free, so no reader reads it while it is
                // written. The step that names it comes later in this list.
                let set = state.plan.record(*record);
                self.header().write_set(*record, &set);
            }
            PageChange::Flip { key, live } => {
                // Noted under the lock that each scan takes. The reader may pin these slots as
                // soon as the word names them, and a pin that was not noted is a breach.
                if let Some(reader) = state.readers.get_mut(key) {
                    reader
                        .claims
                        .note_named(live.record, state.plan.set(live.record));
                    reader.mailbox().live.0.swap_in(*live);
                }
            }
            PageChange::Push { key, live } => {
                if let Some(reader) = state.readers.get_mut(key)
                    && let Delivery::Every { bound } = reader.delivery
                {
                    reader
                        .claims
                        .note_named(live.record, state.plan.set(live.record));
                    // Not before the head that the plan has seen, so what has room in the plan
                    // has room here.
                    let head = reader.control().head.load();
                    // Fails only if the reader has moved its head back, which harms no other
                    // reader.
                    reader.mailbox().queue.0.push(head, bound, *live);
                }
            }
            PageChange::Clear { key } => {
                if let Some(reader) = state.readers.get(key) {
                    // The reader is through with this answer. The fence in `clear` lets the
                    // next look find a pin that it announced before.
                    reader.mailbox().answer.0.live.clear();
                }
            }
            PageChange::Answer {
                key,
                live,
                question,
            } => {
                if let Some(reader) = state.readers.get_mut(key) {
                    reader
                        .claims
                        .note_named(live.record, state.plan.set(live.record));
                    let answer = &reader.mailbox().answer.0;
                    // The word before the number: a reader that finds the number of its
                    // question also finds the answer.
                    answer.live.swap_in(*live);
                    answer.question.store(*question, Ordering::Release);
                }
            }
        }
    }

    /// Moves mailboxes that wait to their sets, as far as there is room by now.
    pub(crate) fn deliver(&self, state: &mut RegistryState) {
        let records = self.observe(state);
        self.decide(state, |plan, steps| plan.deliver(records, steps));
        // Any reader may free a record, so all of them stay asked.
        if state.plan.lacks_records() {
            return;
        }
        for (key, reader) in state.processes() {
            let wants = &reader.mailbox().wants_room.0;
            if wants.sleeping() && !state.plan.anything_waits_for(key) {
                // From here on the reader saves the packet for each set that it takes.
                wants.awake();
            }
        }
    }
}

/// Wakes the reader that a step concerns, if it sleeps.
fn wake(state: &RegistryState, step: &PageChange) {
    match step {
        PageChange::Flip { key, .. } | PageChange::Push { key, .. } => {
            // A system call for each reader that sleeps, and none for the others.
            if let Some(reader) = state.readers.get(key) {
                reader.wake(*key);
            }
        }
        PageChange::Answer { key, .. } => {
            if let Some(reader) = state.readers.get(key) {
                reader.wake_for_answer(*key);
            }
        }
        PageChange::Write { .. } | PageChange::Clear { .. } => {}
    }
}
