//! Handles the sender's messages to an agent.

use tokio::time::Instant;
use weightsync_core::WorkerId;

use super::{Driver, LINGER};
use crate::agent::plan::{Item, PlanInput};
use crate::bulk::Parent;
use crate::wire::message::{FromRoot, ToRoot};

impl Driver {
    /// Handles a message. One arm for each, so that the whole vocabulary of a sender is seen at
    /// once; what an arm does stands elsewhere.
    pub(super) fn on_message(&mut self, message: FromRoot) {
        match message {
            FromRoot::Joined { ticket } => self.joined(ticket),
            FromRoot::Denied { ticket, reason } => self.denied(ticket, &reason),
            FromRoot::Notify {
                sequence,
                set,
                workers,
            } => self.notify(sequence, &set, workers),
            FromRoot::Answer {
                worker,
                question,
                sequence,
                set,
            } => self.answered((worker, question), sequence, set),
            FromRoot::NoSuchVersion {
                worker,
                question,
                model,
                asked,
                known,
            } => {
                if let Some(who) = self.members.asker(worker, question) {
                    self.members.close_question(who, question);
                    let asked = (usize::from(model), asked);
                    self.relay.no_such_version(who, question, asked, known);
                }
            }
            FromRoot::TurnAway { who, reason } => self.relay.turn_away(who, &reason),
            FromRoot::Parent { agent, address } => match self.parent(agent, address.as_deref()) {
                Ok(parent) => self.follow(parent),
                // The sender then names another parent.
                Err(reason) => self.send(&ToRoot::ParentLost {
                    parent: agent,
                    reason,
                }),
            },
            FromRoot::Scrub { item } => self.scrub(item),
            FromRoot::Spoiled { item } => {
                let reason = format!("the digest of {} is another", item.version);
                self.drop_model(item.model, &reason);
            }
            FromRoot::Goodbye => self.closes = Some(Instant::now() + LINGER),
            // These belong to the join.
            FromRoot::Welcome(_)
            | FromRoot::Model { .. }
            | FromRoot::Part { .. }
            | FromRoot::Refused { .. }
            | FromRoot::Ping => {}
        }
    }

    /// Has these workers run a set.
    fn notify(&mut self, sequence: u64, set: &[Item], workers: Vec<WorkerId>) {
        // The message may cross the report that a worker has gone.
        let known = workers.into_iter();
        let known = known.filter_map(|worker| self.members.instance(worker));
        let notified = known.map(|who| PlanInput::Notified {
            who,
            sequence,
            set: set.to_vec(),
        });
        let notified: Vec<_> = notified.collect();
        self.step(notified);
    }

    /// Takes the sender's answer to a worker's question.
    fn answered(&mut self, (worker, question): (WorkerId, u64), sequence: u64, set: Vec<Item>) {
        // A question that was sent twice is answered twice.
        if let Some(who) = self.members.asker(worker, question) {
            self.step([PlanInput::Answered {
                who,
                question,
                sequence,
                set,
            }]);
        }
    }

    /// The parent that the sender has named, if this agent may fetch there.
    fn parent(&self, agent: u64, address: Option<&str>) -> Result<Parent, String> {
        let address = match address {
            None => self.root,
            Some(address) => {
                let parsed = address.parse();
                parsed.map_err(|_| "its address cannot be read".to_owned())?
            }
        };
        // The secret belongs to the sender, so it goes only to addresses that the settings allow.
        let may_dial = self.options.access.may_dial_with_secret(address);
        may_dial.map_err(|error| error.to_string())?;
        Ok(Parent { agent, address })
    }
}
