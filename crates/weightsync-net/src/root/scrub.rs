//! Decides which bytes are compared with the published ones, and keeps the results.
//!
//! **Guarantee.** The input and the output are plain values. Every [question](Scrubs::ask)
//! leads to one [`Checked`]: once both digests are there, or once it is known that one of them
//! will not come.

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::Version;
use weightsync_core::digest::Digest;

use super::topology::AgentId;
use crate::relay::Item;
use crate::scrub::Check;

/// The sender's own memory, among those that have a version.
pub(super) const OWN: AgentId = 0;

/// What is being compared.
#[derive(Debug, Default)]
pub(super) struct Scrubs {
    /// The digests of what was published, of versions that somebody is compared with, and
    /// of those that are kept.
    expected: BTreeMap<Item, Digest>,
    /// Of each model the newest whose digest was made as soon as it was published.
    kept: BTreeMap<usize, Item>,
    /// Versions whose digest the sender is making.
    finding: BTreeSet<Item>,
    /// Who has been asked for which, and what it has said.
    asked: BTreeMap<(Item, AgentId), Option<Digest>>,
}

/// What a comparison has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checked {
    pub(super) item: Item,
    pub(super) agent: AgentId,
    pub(super) verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Same,
    Differs {
        expected: Digest,
        got: Digest,
    },
    /// It is the sender's, and nothing was noted of it when it was published.
    Unknown,
    /// One end has it no more.
    Replaced,
    /// The agent is gone.
    Gone,
}

/// What follows from what is asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Asks {
    /// Who is to be asked for what it has.
    pub(super) agents: Vec<(Item, AgentId)>,
    /// Versions whose digest the sender is to make.
    pub(super) own: Vec<Item>,
}

impl Scrubs {
    /// Has all of these compared. A host that is already asked is not asked again.
    pub(super) fn ask(&mut self, pairs: impl IntoIterator<Item = (Item, AgentId)>) -> Asks {
        let mut asks = Asks::default();
        for (item, agent) in pairs {
            if self.asked.contains_key(&(item, agent)) {
                continue;
            }
            self.asked.insert((item, agent), None);
            if agent != OWN {
                asks.agents.push((item, agent));
            }
            let wanted = agent == OWN || !self.expected.contains_key(&item);
            if wanted && self.finding.insert(item) {
                asks.own.push(item);
            }
        }
        asks
    }

    /// A version is published whose digest is made at once, and kept until the next of them;
    /// false if that is so already. Nobody is waited for any more who has not said by now what
    /// it has of one before the last of these.
    pub(super) fn keep(&mut self, item: Item) -> (bool, Vec<Checked>) {
        let mut late = Vec::new();
        if let Some(before) = self.kept.insert(item.model, item) {
            let first = Item {
                version: Version::NONE,
                ..item
            };
            let asked = self.asked.range((first, OWN)..(before, OWN));
            late.extend(asked.map(|(one, _)| *one));
            self.forget(before);
        }
        let late = late.into_iter();
        let late = late.map(|(item, agent)| self.end(item, agent, Verdict::Replaced));
        let late = late.collect();
        (self.finding.insert(item), late)
    }

    /// Whether this is the newest of its model whose digest was made at once.
    pub(super) fn is_kept(&self, item: Item) -> bool {
        self.kept.get(&item.model) == Some(&item)
    }

    /// An agent says what it has; without being asked, that is nothing.
    pub(super) fn digest_received(
        &mut self,
        item: Item,
        agent: AgentId,
        digest: Option<Digest>,
    ) -> Option<Checked> {
        let known = self.asked.get_mut(&(item, agent))?;
        let verdict = match (self.expected.get(&item), digest) {
            (_, None) => Verdict::Replaced,
            (Some(expected), Some(got)) => compare(*expected, got),
            (None, got) => {
                *known = got;
                return None;
            }
        };
        Some(self.end(item, agent, verdict))
    }

    /// The sender has made the digest of the bytes that are there now, and knows that of what
    /// was published, if it was made then; `None`: it has it no more.
    pub(super) fn found(
        &mut self,
        item: Item,
        now: Option<Digest>,
        then: Option<Digest>,
    ) -> Vec<Checked> {
        self.finding.remove(&item);
        let then = self.expected.get(&item).copied().or(then);
        if let Some(expected) = then.or(now) {
            self.expected.insert(item, expected);
        }
        let all = self.asked.range((item, OWN)..=(item, AgentId::MAX));
        let known = all.filter_map(|(&(_, agent), found)| {
            let verdict = match (then.or(now), *found) {
                (None, _) => Verdict::Replaced,
                (Some(_), _) if agent == OWN => match (then, now) {
                    (Some(then), Some(now)) => compare(then, now),
                    (None, Some(_)) => Verdict::Unknown,
                    (_, None) => Verdict::Replaced,
                },
                (Some(expected), Some(got)) => compare(expected, got),
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

    /// An agent is gone.
    pub(super) fn gone(&mut self, agent: AgentId) -> Vec<Checked> {
        let asked = self.asked.keys().filter(|(_, of)| *of == agent);
        let items: Vec<Item> = asked.map(|(item, _)| *item).collect();
        let items = items.into_iter();
        items
            .map(|item| self.end(item, agent, Verdict::Gone))
            .collect()
    }

    fn end(&mut self, item: Item, agent: AgentId, verdict: Verdict) -> Checked {
        self.asked.remove(&(item, agent));
        self.forget(item);
        Checked {
            item,
            agent,
            verdict,
        }
    }

    /// What nobody is compared with any more, and is not kept, is found again the next time.
    fn forget(&mut self, item: Item) {
        let mut left = self.asked.range((item, OWN)..=(item, AgentId::MAX));
        if left.next().is_none() && self.kept.get(&item.model) != Some(&item) {
            self.expected.remove(&item);
        }
    }
}

fn compare(expected: Digest, got: Digest) -> Verdict {
    match expected == got {
        true => Verdict::Same,
        false => Verdict::Differs { expected, got },
    }
}

/// Somebody who waits until all of this has been compared.
#[derive(Debug)]
pub(super) struct Round<A> {
    pub(super) waits: BTreeSet<(Item, AgentId)>,
    pub(super) answer: A,
    /// How many are the same.
    pub(super) same: usize,
    /// The others, as they are told of.
    pub(super) others: Vec<Check>,
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

    /// Notes what it waited for.
    pub(super) fn note(&mut self, checked: &Checked, note: impl FnOnce() -> Check) {
        if !self.waits.remove(&(checked.item, checked.agent)) {
            return;
        }
        match checked.verdict {
            Verdict::Same => self.same += 1,
            Verdict::Unknown => {}
            _ => self.others.push(note()),
        }
    }
}

#[cfg(test)]
mod tests;
