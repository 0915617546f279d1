//! Decides which bytes are compared with the published ones, and keeps the results.
//!
//! **Guarantee.** The input and the output are plain values. Every [question](Scrubs::ask)
//! leads to one [`Checked`]: once both digests are there, or once it is known that one of them
//! will not come.

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::Version;
use weightsync_core::digest::Digest;

use super::topology::AgentId;
use crate::agent::Item;
use crate::scrub::ScrubCheck;

/// The sender's own memory, among the holders of a version.
pub(super) const OWN: AgentId = 0;

/// The comparisons that are under way.
#[derive(Debug, Default)]
pub(super) struct Scrubs {
    /// The published digests of versions that are compared or kept.
    expected: BTreeMap<Item, Digest>,
    /// For each model the newest version whose digest was computed when it was published.
    kept: BTreeMap<usize, Item>,
    /// Versions whose digest the sender is computing.
    finding: BTreeSet<Item>,
    /// Digests requested from agents, and their answers.
    asked: BTreeMap<(Item, AgentId), Option<Digest>>,
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checked {
    pub(super) item: Item,
    pub(super) agent: AgentId,
    pub(super) verdict: CopyVerdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyVerdict {
    Same,
    Differs {
        expected: Digest,
        got: Digest,
    },
    /// The sender's own bytes, which have no digest from when they were published.
    Unknown,
    /// One of the two ends no longer has the version.
    Replaced,
    /// The agent has gone.
    Gone,
}

/// The requests that follow from a question.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ScrubRequests {
    /// Which agents must report the digest of which version.
    pub(super) agents: Vec<(Item, AgentId)>,
    /// Versions whose digest the sender must compute.
    pub(super) own: Vec<Item>,
}

impl Scrubs {
    /// Starts these comparisons. An agent that was already asked is not asked again.
    pub(super) fn ask(
        &mut self,
        pairs: impl IntoIterator<Item = (Item, AgentId)>,
    ) -> ScrubRequests {
        let mut asks = ScrubRequests::default();
        for (item, agent) in pairs {
            if self.asked.contains_key(&(item, agent)) {
                continue;
            }
            self.asked.insert((item, agent), None);
            if agent != OWN {
                asks.agents.push((item, agent));
            }
            // The sender's own bytes are read again for each question about them: memory may have
            // been damaged since the last time.
            let wanted = agent == OWN || !self.expected.contains_key(&item);
            if wanted && self.finding.insert(item) {
                asks.own.push(item);
            }
        }
        asks
    }

    /// Keeps the digest of a version from its publication until the next such version; false if
    /// that is already done. Agents that have not answered for versions before the last kept one
    /// are no longer waited for.
    pub(super) fn keep(&mut self, item: Item) -> (bool, Vec<Checked>) {
        let mut late = Vec::new();
        if let Some(before) = self.kept.insert(item.model, item) {
            // Questions sort by model, then version, then agent. So this range has all older
            // versions of the model.
            let first = Item {
                version: Version::NONE,
                ..item
            };
            let asked = self.asked.range((first, OWN)..(before, OWN));
            late.extend(asked.map(|(one, _)| *one));
            self.forget(before);
        }
        let late = late.into_iter();
        let late = late.map(|(item, agent)| self.end(item, agent, CopyVerdict::Replaced));
        let late = late.collect();
        (self.finding.insert(item), late)
    }

    /// Whether this is the newest version of its model whose digest was computed at publication.
    pub(super) fn is_kept(&self, item: Item) -> bool {
        self.kept.get(&item.model) == Some(&item)
    }

    /// Handles an agent's digest; a digest that was not requested is ignored.
    pub(super) fn digest_received(
        &mut self,
        item: Item,
        agent: AgentId,
        digest: Option<Digest>,
    ) -> Option<Checked> {
        let known = self.asked.get_mut(&(item, agent))?;
        let verdict = match (self.expected.get(&item), digest) {
            (_, None) => CopyVerdict::Replaced,
            (Some(expected), Some(got)) => compare(*expected, got),
            // Compared once the sender's own digest is there.
            (None, got) => {
                *known = got;
                return None;
            }
        };
        Some(self.end(item, agent, verdict))
    }

    /// Handles the digests that the sender computed: of the bytes that it has now, and of the
    /// published ones if they were noted. `None` if it no longer has the version.
    pub(super) fn found(
        &mut self,
        item: Item,
        now: Option<Digest>,
        then: Option<Digest>,
    ) -> Vec<Checked> {
        self.finding.remove(&item);
        let then = self.expected.get(&item).copied().or(then);
        // Nothing was noted when a version without a scrub was published. The others are then
        // compared with the bytes that the sender has now (decision 12).
        if let Some(expected) = then.or(now) {
            self.expected.insert(item, expected);
        }
        let all = self.asked.range((item, OWN)..=(item, AgentId::MAX));
        let known = all.filter_map(|(&(_, agent), found)| {
            let verdict = match (then.or(now), *found) {
                (None, _) => CopyVerdict::Replaced,
                (Some(_), _) if agent == OWN => match (then, now) {
                    (Some(then), Some(now)) => compare(then, now),
                    (None, Some(_)) => CopyVerdict::Unknown,
                    (_, None) => CopyVerdict::Replaced,
                },
                (Some(expected), Some(got)) => compare(expected, got),
                // The agent has not answered yet.
                (Some(_), None) => return None,
            };
            Some((agent, verdict))
        });
        let known: Vec<_> = known.collect();
        let known = known.into_iter();
        let checked = known.map(|(agent, verdict)| self.end(item, agent, verdict));
        let checked = checked.collect();
        self.forget(item);
        checked
    }

    /// Handles the end of an agent.
    pub(super) fn gone(&mut self, agent: AgentId) -> Vec<Checked> {
        let asked = self.asked.keys().filter(|(_, of)| *of == agent);
        let items: Vec<Item> = asked.map(|(item, _)| *item).collect();
        let items = items.into_iter();
        items
            .map(|item| self.end(item, agent, CopyVerdict::Gone))
            .collect()
    }

    fn end(&mut self, item: Item, agent: AgentId, verdict: CopyVerdict) -> Checked {
        self.asked.remove(&(item, agent));
        self.forget(item);
        Checked {
            item,
            agent,
            verdict,
        }
    }

    /// Drops a digest that is neither compared nor kept; it can be computed again.
    fn forget(&mut self, item: Item) {
        let mut left = self.asked.range((item, OWN)..=(item, AgentId::MAX));
        if left.next().is_none() && self.kept.get(&item.model) != Some(&item) {
            self.expected.remove(&item);
        }
    }
}

fn compare(expected: Digest, got: Digest) -> CopyVerdict {
    match expected == got {
        true => CopyVerdict::Same,
        false => CopyVerdict::Differs { expected, got },
    }
}

/// A client that waits for a round of comparisons.
#[derive(Debug)]
pub(super) struct Round<A> {
    pub(super) waits: BTreeSet<(Item, AgentId)>,
    pub(super) answer: A,
    /// How many comparisons matched.
    pub(super) same: usize,
    /// The other results, for the answer.
    pub(super) others: Vec<ScrubCheck>,
}

impl<A> Round<A> {
    pub(super) fn new(waits: impl IntoIterator<Item = (Item, AgentId)>, answer: A) -> Self {
        Self {
            waits: waits.into_iter().collect(),
            answer,
            same: 0,
            others: Vec::new(),
        }
    }

    /// Notes a result that the client waited for.
    pub(super) fn note(&mut self, checked: &Checked, note: impl FnOnce() -> ScrubCheck) {
        if !self.waits.remove(&(checked.item, checked.agent)) {
            return;
        }
        match checked.verdict {
            CopyVerdict::Same => self.same += 1,
            // Nothing was noted when this version was published. So the sender's copy neither
            // matches nor differs.
            CopyVerdict::Unknown => {}
            _ => self.others.push(note()),
        }
    }
}

#[cfg(test)]
mod tests;
