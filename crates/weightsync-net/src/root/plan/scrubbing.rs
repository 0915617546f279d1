//! Compares the bytes that agents hold with the published ones.

use weightsync_core::digest::Digest;

use super::{AgentRecord, RootEffect, RootPlan};
use crate::agent::Item;
use crate::root::scrub::{Checked, CopyVerdict, OWN, Round, ScrubRequests};
use crate::root::topology::AgentId;
use crate::scrub;
use crate::wire::message::FromRoot;

/// The most bytes of a host's name in an answer.
const NAME: usize = 64;

impl RootPlan {
    /// Starts comparing every version that an agent holds, for this client.
    pub(super) fn scrub(&mut self, client: u64, own: Vec<Item>) {
        let mut pairs: Vec<(Item, AgentId)> = own.into_iter().map(|item| (item, OWN)).collect();
        for (agent, one) in &self.agents {
            pairs.extend(one.held().map(|item| (item, *agent)));
        }
        // Before the questions. A copy that is being compared already is not asked about again, and
        // both clients wait for the one result.
        self.rounds.push(Round::new(pairs.iter().copied(), client));
        self.compare(pairs);
        // There may be nothing to compare.
        self.checked(&[]);
    }

    /// An agent has gained versions: those that are kept for comparison are compared.
    pub(super) fn compare_kept(&mut self, agent: AgentId, have: &[Item]) {
        let kept = have.iter().filter(|item| self.scrubs.is_kept(**item));
        let kept: Vec<_> = kept.map(|item| (*item, agent)).collect();
        self.compare(kept);
    }

    /// Keeps a published version, for comparison with each host that gets it.
    pub(super) fn keep(&mut self, item: Item) {
        let (is_new, late) = self.scrubs.keep(item);
        self.checked(&late);
        if is_new {
            self.effects.push(RootEffect::FindDigests(vec![item]));
        }
        // Agents that had the version before this event was handled.
        let has = |(_, one): &(&AgentId, &AgentRecord)| one.held().any(|held| held == item);
        let quick = self.agents.iter().filter(has);
        let quick: Vec<_> = quick.map(|(agent, _)| (item, *agent)).collect();
        self.compare(quick);
    }

    /// Starts these comparisons.
    fn compare(&mut self, pairs: impl IntoIterator<Item = (Item, AgentId)>) {
        let ScrubRequests { agents, own } = self.scrubs.ask(pairs);
        for (item, agent) in agents {
            self.send(agent, FromRoot::Scrub { item });
        }
        if !own.is_empty() {
            self.effects.push(RootEffect::FindDigests(own));
        }
    }

    /// Acts on the results of comparisons, and answers clients whose round is complete.
    pub(super) fn checked(&mut self, checked: &[Checked]) {
        for one in checked {
            let Checked { item, agent, .. } = *one;
            match one.verdict {
                CopyVerdict::Differs { expected, got } => {
                    self.spoiled((item, agent), expected, got)
                }
                CopyVerdict::Replaced | CopyVerdict::Gone => {
                    tracing::debug!("agent {agent}'s copy of {item:?} is not compared");
                }
                CopyVerdict::Same | CopyVerdict::Unknown => {}
            }
        }
        // Taken out, because an entry of an answer is made from the whole plan.
        let mut rounds = std::mem::take(&mut self.rounds);
        for round in &mut rounds {
            for one in checked {
                round.note(one, || self.check(one));
            }
        }
        for round in rounds {
            match round.waits.is_empty() {
                true => self.effects.push(RootEffect::AnswerScrub {
                    client: round.answer,
                    same: round.same,
                    others: round.others,
                }),
                false => self.rounds.push(round),
            }
        }
    }

    /// Handles a version whose bytes differ from the published ones.
    fn spoiled(&mut self, (item, agent): (Item, AgentId), expected: Digest, got: Digest) {
        let who = match self.agents.get(&agent) {
            Some(one) => format!("agent {agent} at {}", one.from),
            None => "this sender".into(),
        };
        tracing::error!(
            "{who} has a damaged copy of {} of {}: digest {got}, expected {expected}; the next \
             version goes there whole",
            item.version,
            self.models[item.model],
        );
        if agent == OWN {
            self.effects.push(RootEffect::Spoil(item));
            return;
        }
        self.send(agent, FromRoot::Spoiled { item });
        // The sender's own bytes may be the wrong ones, so compare those too.
        self.compare([(item, OWN)]);
    }

    /// A result, for the answer.
    fn check(&self, checked: &Checked) -> scrub::ScrubCheck {
        let Checked {
            item,
            agent,
            verdict,
        } = *checked;
        let one = self.agents.get(&agent);
        let known = one.and_then(|one| one.introduced.as_ref());
        let name = known.map_or("", |known| &known.name);
        let members = self.membership.iter();
        let workers = members.filter(|(_, _, by, _)| *by == Some(agent));
        scrub::ScrubCheck {
            agent,
            name: name[..name.floor_char_boundary(NAME)].into(),
            address: one.map_or_else(String::new, |one| one.from.ip().to_string()),
            pid: known.map_or(0, |known| known.process.pid),
            model: item.model as u8,
            version: item.version.0,
            workers: workers.map(|(worker, ..)| worker.0).collect(),
            verdict: match verdict {
                CopyVerdict::Differs { expected, got } => scrub::Verdict::Differs {
                    expected: expected.to_string(),
                    got: got.to_string(),
                },
                CopyVerdict::Replaced => scrub::Verdict::Replaced,
                CopyVerdict::Same | CopyVerdict::Unknown | CopyVerdict::Gone => {
                    scrub::Verdict::Gone
                }
            },
        }
    }
}
