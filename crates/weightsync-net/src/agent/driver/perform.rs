//! An agent performs what its [plan](crate::agent::plan) decides: every effect of the plan is here.

use super::Driver;
use crate::agent::plan::{PlanEffect, PlanInput};
use crate::wire::message::ToRoot;

impl Driver {
    /// Notes what has happened, and performs what follows from it.
    pub(super) fn step(&mut self, inputs: impl IntoIterator<Item = PlanInput>) {
        let mut effects = self.plan.step(inputs);
        while !effects.is_empty() {
            let performed = effects.into_iter();
            let more: Vec<_> = performed.filter_map(|one| self.perform(one)).collect();
            if more.is_empty() {
                return;
            }
            effects = self.plan.step(more);
        }
    }

    /// Performs one effect; returns what happened if it could not be performed.
    fn perform(&mut self, effect: PlanEffect) -> Option<PlanInput> {
        match effect {
            PlanEffect::Notify { who, sequence, set } => {
                // Only whole versions can be named in a mailbox.
                if let Some(set) = self.fetches.snapshots(&set) {
                    self.relay.notify(who, sequence, &set);
                }
            }
            PlanEffect::Answer {
                who,
                question,
                sequence,
                set,
            } => {
                if let Some(set) = self.fetches.snapshots(&set) {
                    self.members.close_question(who, question);
                    self.relay.answer(who, question, sequence, &set);
                }
            }
            PlanEffect::Fetch { item, sender } => return self.begin(item, sender),
            // A fetch that is dropped closes its connections. Its blocks stay in the slot.
            PlanEffect::Stop { item } => drop(self.fetches.under_way.remove(&item)),
            PlanEffect::Release { item } => {
                // Threads that serve the version hold its slot, too. They stop, so that the slot
                // becomes free.
                self.store.remove(item);
                if self.fetches.release(item) {
                    let (have, dropped) = (Vec::new(), vec![item]);
                    self.send(&ToRoot::Holds { have, dropped });
                }
            }
            PlanEffect::Refuse { item } => self.store.refuse(item),
        }
        None
    }
}
