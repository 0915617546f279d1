//! A simulated agent performs the decisions of its plan, and reports the outcome.

use super::agent::{Parent, ROOT, backoff};
use super::clock::{MS, Time};
use super::network::Node;
use super::{Event, World};
use crate::agent::Item;
use crate::agent::plan::{PlanEffect, PlanInput};
use crate::bulk::Transferred;
use crate::wire::message::ToRoot;

/// How a fetch has ended for its child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FetchEnd {
    Whole { came: Transferred },
    NotThere,
    Broken,
}

impl World {
    pub(super) fn step(&mut self, node: Node, inputs: Vec<PlanInput>) {
        let mut effects = self.agent_of(node).plan.step(inputs);
        let mut more = Vec::new();
        while !effects.is_empty() {
            for effect in effects.drain(..) {
                more.extend(self.perform(node, effect));
            }
            if more.is_empty() {
                return;
            }
            effects = self.agent_of(node).plan.step(more.drain(..));
        }
    }

    fn perform(&mut self, node: Node, effect: PlanEffect) -> Option<PlanInput> {
        match effect {
            PlanEffect::Notify { who, sequence, set } => {
                let agent = self.agent_of(node);
                let whole = set.iter().all(|item| agent.whole.contains(item));
                assert!(whole, "{who:?} is told {set:?}, which is not whole");
                self.notified(node, who, sequence);
            }
            // No worker asks questions here.
            PlanEffect::Answer { .. } => {}
            PlanEffect::Fetch { item, sender } => return self.begin(node, item, sender),
            PlanEffect::Stop { item } => {
                assert!(self.agent_of(node).fetching.contains_key(&item));
                self.stop_fetch(node, item);
            }
            PlanEffect::Release { item } => {
                let agent = self.agent_of(node);
                agent.coming.remove(&item);
                if agent.whole.remove(&item) {
                    self.send_holds(node, Vec::new(), vec![item]);
                }
                self.revoke(node, item);
            }
            PlanEffect::Refuse { item } => self.refuse(node, item),
        }
        None
    }

    fn begin(&mut self, node: Node, item: Item, sender: bool) -> Option<PlanInput> {
        let no_room = self.dice.percent(self.options.no_room);
        let agent = self.agent_of(node);
        let parent = match sender {
            true => Some(ROOT),
            false => agent.parent,
        };
        let Some(parent) = parent else {
            return Some(PlanInput::NoParent);
        };
        let life = agent.life;
        if no_room && !agent.coming.contains_key(&item) {
            self.clock.after(20 * MS, Event::Room { node, life });
            return Some(PlanInput::NoRoom { item });
        }
        let known = agent.coming.contains_key(&item);
        agent.coming.entry(item).or_insert(0);
        self.start_fetch((node, life), item, parent, sender);
        if !known {
            // A child that waits for the version learns that it is arriving.
            self.pass_on(node, item);
        }
        None
    }

    /// A fetch has ended.
    pub(super) fn fetched(&mut self, node: Node, item: Item, parent: Parent, end: FetchEnd) {
        let agent = self.agent_of(node);
        let fetching = agent.fetching.remove(&item);
        match end {
            FetchEnd::Whole { came } => {
                agent.backoff = None;
                agent.whole.insert(item);
                self.send(
                    node,
                    ToRoot::Received {
                        item,
                        parent: parent.agent,
                        bytes: came.bytes,
                        micros: came.busy.as_micros() as Time,
                    },
                );
                self.send_holds(node, vec![item], Vec::new());
                self.step(node, vec![PlanInput::Whole { item }]);
            }
            FetchEnd::NotThere => {
                let sender = parent.agent == 0;
                self.step(node, vec![PlanInput::NotThere { item, sender }]);
            }
            FetchEnd::Broken => {
                let pause = match &mut agent.backoff {
                    Some(backoff) => backoff.pause().as_micros() as Time,
                    none => {
                        *none = Some(backoff(node, agent.life));
                        0
                    }
                };
                let instead = fetching.is_some_and(|one| one.instead);
                if !instead || agent.complain.is_none() {
                    agent.complaints += 1;
                    agent.complain = Some(parent.agent);
                }
                let (life, number) = (agent.life, agent.complaints);
                self.clock
                    .after(pause, Event::Complain { node, life, number });
                self.disturb();
                self.counts.broken += self.leave_parent(node);
                self.step(node, vec![PlanInput::Broken { item }, PlanInput::NoParent]);
            }
        }
    }

    fn send_holds(&mut self, node: Node, have: Vec<Item>, dropped: Vec<Item>) {
        self.send(node, ToRoot::Holds { have, dropped });
    }

    /// Stops all fetches from the parent; returns how many.
    pub(super) fn leave_parent(&mut self, node: Node) -> u64 {
        let agent = self.agent_of(node);
        agent.parent = None;
        let fetching = agent.fetching.iter();
        let ended = fetching.filter(|(_, one)| !one.instead);
        let ended: Vec<Item> = ended.map(|(item, _)| *item).collect();
        for item in &ended {
            self.stop_fetch(node, *item);
        }
        ended.len() as u64
    }

    /// It is time to report a lost parent.
    pub(super) fn complain(&mut self, node: Node, life: u64, number: u64) {
        let Some(agent) = self.agent(node, life) else {
            return;
        };
        // Without a link, the report follows once there is one.
        if agent.complaints != number || agent.link.is_none() {
            return;
        }
        if let Some(parent) = agent.complain.take() {
            let reason = String::new();
            self.send(node, ToRoot::ParentLost { parent, reason });
        }
    }
}
