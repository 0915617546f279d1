//! Which bytes are compared with what was published, and what that comes to.
//!
//! **Guarantee.** Plain values in, plain values out. Whatever is [asked for](Scrubs::ask) comes
//! to one [`Checked`]: once both digests are there, or it is known that one will not be.

use std::collections::{BTreeMap, BTreeSet};

use weightsync_core::digest::Digest;

use super::topology::AgentId;
use crate::relay::Item;
use crate::scrub::Check;

/// The sender's own memory, among those that have a version.
pub(super) const OWN: AgentId = 0;

/// What is being compared.
#[derive(Debug, Default)]
pub(super) struct Scrubs {
    /// Of each version, what was published; `None` while that is being found.
    published: BTreeMap<Item, Option<Published>>,
    /// Who has been asked for which, and what it has said.
    asked: BTreeMap<(Item, AgentId), Option<Has>>,
}

/// What there is of a version at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Has {
    Bytes(Digest),
    /// It is not there any more.
    Nothing,
}

/// What the sender's memory says of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Published {
    /// The digest of the bytes that are there now.
    pub(super) now: Digest,
    /// That which was made when it was published, if it was.
    pub(super) then: Option<Digest>,
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
    /// Has all of these compared. Whoever is asked already is not asked again.
    pub(super) fn ask(&mut self, pairs: impl IntoIterator<Item = (Item, AgentId)>) -> Asks {
        let mut asks = Asks::default();
        for (item, agent) in pairs {
            if self.asked.contains_key(&(item, agent)) {
                continue;
            }
            // The sender has said it by what it finds.
            let said = (agent == OWN).then_some(Has::Nothing);
            self.asked.insert((item, agent), said);
            if agent != OWN {
                asks.agents.push((item, agent));
            }
            self.published.entry(item).or_insert_with(|| {
                asks.own.push(item);
                None
            });
        }
        asks
    }

    /// An agent says what it has; without being asked, that is nothing.
    pub(super) fn said(
        &mut self,
        item: Item,
        agent: AgentId,
        digest: Option<Digest>,
    ) -> Vec<Checked> {
        let Some(said) = self.asked.get_mut(&(item, agent)) else {
            return Vec::new();
        };
        *said = Some(digest.map_or(Has::Nothing, Has::Bytes));
        match self.published.get(&item) {
            Some(Some(published)) => {
                let published = Some(*published);
                self.settle(item, published)
            }
            _ => Vec::new(),
        }
    }

    /// The sender has found what was published; `None`: it has it no more.
    pub(super) fn published(&mut self, item: Item, published: Option<Published>) -> Vec<Checked> {
        if !self.published.contains_key(&item) {
            return Vec::new();
        }
        self.published.insert(item, published);
        self.settle(item, published)
    }

    /// An agent is gone.
    pub(super) fn gone(&mut self, agent: AgentId) -> Vec<Checked> {
        let asked = self.asked.keys().filter(|(_, of)| *of == agent);
        let items: Vec<Item> = asked.map(|(item, _)| *item).collect();
        let verdict = Verdict::Gone;
        let checked = items.into_iter().map(|item| {
            self.asked.remove(&(item, agent));
            self.forget(item);
            Checked {
                item,
                agent,
                verdict,
            }
        });
        checked.collect()
    }

    /// Compares what is there of a version with what was published, of which nothing is there
    /// if it is `None`.
    fn settle(&mut self, item: Item, published: Option<Published>) -> Vec<Checked> {
        let all = (item, OWN)..=(item, AgentId::MAX);
        let known = self.asked.range(all).filter_map(|(&(item, agent), said)| {
            let verdict = match (published, *said) {
                (None, _) => Verdict::Replaced,
                (Some(Published { now, then }), _) if agent == OWN => {
                    compare(then.unwrap_or(now), now)
                }
                (Some(_), None) => return None,
                (Some(_), Some(Has::Nothing)) => Verdict::Replaced,
                (Some(Published { now, then }), Some(Has::Bytes(got))) => {
                    compare(then.unwrap_or(now), got)
                }
            };
            Some(Checked {
                item,
                agent,
                verdict,
            })
        });
        let known: Vec<Checked> = known.collect();
        for one in &known {
            self.asked.remove(&(one.item, one.agent));
        }
        self.forget(item);
        known
    }

    /// What nobody is compared with any more is found anew the next time.
    fn forget(&mut self, item: Item) {
        let mut left = self.asked.range((item, OWN)..=(item, AgentId::MAX));
        if left.next().is_none() {
            self.published.remove(&item);
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
    pub(super) fn note(&mut self, checked: &Checked, tell: impl FnOnce() -> Check) {
        if !self.waits.remove(&(checked.item, checked.agent)) {
            return;
        }
        match checked.verdict {
            Verdict::Same => self.same += 1,
            _ => self.others.push(tell()),
        }
    }
}

#[cfg(test)]
mod tests;
