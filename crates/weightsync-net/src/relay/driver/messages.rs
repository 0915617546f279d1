//! Handles the sender's messages to an agent.

use tokio::time::Instant;
use weightsync_mem::WorkerInstance;

use super::{Driver, LINGER, Worker};
use crate::bulk::Parent;
use crate::relay::plan::{Input, Item};
use crate::wire::message::{FromRoot, ToRoot};

impl Driver {
    pub(super) fn on_message(&mut self, message: FromRoot) {
        match message {
            FromRoot::Joined { ticket } => self.admit(ticket),
            FromRoot::Denied { ticket, reason } => {
                if let Some(joining) = self.joining.remove(&ticket) {
                    self.relay.deny(joining.ticket, &reason);
                } else if let Some(who) = self.rejoining.remove(&ticket) {
                    self.relay.turn_away(who, &reason);
                    self.end_link_before();
                }
            }
            FromRoot::Notify {
                sequence,
                set,
                workers,
            } => {
                let known = workers.iter().filter_map(|worker| self.workers.get(worker));
                let inputs = known.map(|worker| Input::Notified {
                    who: worker.who,
                    sequence,
                    set: set.clone(),
                });
                let inputs: Vec<_> = inputs.collect();
                self.step(inputs);
            }
            FromRoot::Answer {
                worker,
                question,
                sequence,
                set,
            } => {
                let who = self.workers.get(&worker).map(|worker| worker.who);
                // A question that was sent twice is answered twice.
                if let Some(who) = who.filter(|who| self.waits_for(*who, question)) {
                    let answered = Input::Answered {
                        who,
                        question,
                        sequence,
                        set,
                    };
                    self.step([answered]);
                }
            }
            FromRoot::NoSuchVersion {
                worker,
                question,
                model,
                asked,
                known,
            } => {
                let who = self.workers.get(&worker).map(|worker| worker.who);
                if let Some(who) = who.filter(|who| self.waits_for(*who, question)) {
                    self.is_answered(who, question);
                    let asked = (usize::from(model), asked);
                    self.relay.no_such_version(who, question, asked, known);
                }
            }
            FromRoot::TurnAway {
                worker,
                instance,
                reason,
            } => self
                .relay
                .turn_away(WorkerInstance { worker, instance }, &reason),
            FromRoot::Parent { agent, address } => {
                let address = match address {
                    None => Some(self.root),
                    Some(address) => address.parse().ok(),
                };
                let parent = match address {
                    None => Err("its address cannot be read".into()),
                    // The secret belongs to the sender, so it goes only to addresses that the
                    // settings allow.
                    Some(address) => match self.options.access.may_dial_with_secret(address) {
                        Ok(()) => Ok(Parent { agent, address }),
                        Err(error) => Err(error.to_string()),
                    },
                };
                match parent {
                    Ok(parent) => self.follow(parent),
                    Err(reason) => self.send(&ToRoot::ParentLost {
                        parent: agent,
                        reason,
                    }),
                }
            }
            FromRoot::Scrub { model, version } => self.scrub(Item {
                model: model.into(),
                version,
            }),
            FromRoot::Spoiled { model, version } => {
                let why = format!("the digest of {version} is another");
                self.start_anew(model.into(), &why);
            }
            FromRoot::Goodbye => self.closes = Some(Instant::now() + LINGER),
            // These belong to the join.
            FromRoot::Welcome { .. }
            | FromRoot::Model { .. }
            | FromRoot::Part { .. }
            | FromRoot::Refused { .. }
            | FromRoot::Ping => {}
        }
    }

    /// Admits a worker that the sender has accepted.
    fn admit(&mut self, ticket: u64) {
        if let Some(who) = self.rejoining.remove(&ticket) {
            self.ask_again(who);
            self.end_link_before();
        }
        let Some(joining) = self.joining.remove(&ticket) else {
            return;
        };
        let who = joining.who;
        if self.relay.admit(joining.ticket).is_err() {
            self.send(&ToRoot::Gone {
                worker: who.worker,
                instance: who.instance,
                died: false,
            });
            return;
        }
        let delivery = joining.delivery;
        let worker = Worker {
            who,
            joining,
            asks: None,
        };
        self.workers.insert(who.worker, worker);
        self.step([Input::Joined { who, delivery }]);
    }

    /// The fetches that go on at the sender when it names another parent: those of sets to finish.
    /// The new parent may not have these versions, and the sender keeps them only while somebody
    /// fetches them.
    fn goes_on_at_the_sender(&mut self, next: Parent) -> Vec<Input> {
        let plan = &self.plan;
        let fetching = self
            .fetching
            .iter_mut()
            .filter(|(item, one)| one.parent.agent == 0 && next.agent != 0 && plan.is_first(item));
        let inputs = fetching.map(|(item, one)| {
            one.instead = true;
            Input::FromSender { item: *item }
        });
        inputs.collect()
    }

    /// Fetches from another parent from here on.
    fn follow(&mut self, parent: Parent) {
        if self.parent == Some(parent) && !self.fetching.is_empty() {
            return;
        }
        let mut inputs = self.goes_on_at_the_sender(parent);
        self.leave_parent();
        self.parent = Some(parent);
        // A pending complaint is about an earlier parent, so the sender would ignore it; and the
        // next failure must be reported.
        self.complain = None;
        inputs.extend([Input::NoParent, Input::Parent]);
        self.step(inputs);
    }
}
