//! Compares the bytes that agents hold with the published ones.

use tokio::sync::oneshot;
use weightsync_core::digest::Digest;
use weightsync_mem::Snapshot;

use super::{Coordinator, Event};
use crate::relay::Item;
use crate::root::scrub::{Asks, Checked, OWN, Round, Verdict};
use crate::root::topology::AgentId;
use crate::scrub;
use crate::wire::message::FromRoot;

/// One version in this many is scrubbed automatically: each host that gets it is compared with the
/// published bytes.
pub(in crate::root) const SCRUBBED: u64 = 64;

/// The most bytes of a host's name in an answer.
const NAME: usize = 64;

impl Coordinator {
    /// Starts comparing every version that an agent holds, for this client.
    pub(super) fn scrub(&mut self, answer: oneshot::Sender<String>) {
        let own = (0..self.settings.models.len()).map(|model| Item {
            model,
            version: self.remote_readers.version(model),
        });
        let own = own.filter(|item| !item.version.is_none());
        let mut pairs: Vec<(Item, AgentId)> = own.map(|item| (item, OWN)).collect();
        for (agent, one) in &self.agents {
            let held = one.known.iter().flat_map(|known| known.holds.iter());
            pairs.extend(held.map(|item| (item, *agent)));
        }
        self.rounds.push(Round::new(pairs.iter().copied(), answer));
        let asks = self.scrubs.ask(pairs);
        self.perform(asks);
        // There may be nothing to compare.
        self.checked(&[]);
    }

    /// An agent has gained versions.
    pub(super) fn note_held_by(&mut self, agent: AgentId, have: &[Item]) {
        let kept = have.iter().filter(|item| self.scrubs.is_kept(**item));
        let kept: Vec<Item> = kept.copied().collect();
        let asks = self.scrubs.ask(kept.into_iter().map(|item| (item, agent)));
        self.perform(asks);
    }

    /// Keeps a published version, for comparison with each host that gets it.
    pub(super) fn keep(&mut self, snapshot: Snapshot) {
        let item = Item {
            model: snapshot.model(),
            version: snapshot.version(),
        };
        let (is_new, late) = self.scrubs.keep(item);
        self.checked(&late);
        if is_new {
            self.find(vec![item], Some(snapshot));
        }
        // Agents that had the version before this event was handled.
        let quick = self.agents.iter().filter(|(_, one)| {
            let mut known = one.known.iter();
            known.any(|known| known.holds.iter().any(|held| held == item))
        });
        let asks = self.scrubs.ask(quick.map(|(agent, _)| (item, *agent)));
        self.perform(asks);
    }

    /// Handles an agent's digest.
    pub(super) fn scrubbed(&mut self, agent: AgentId, item: Item, digest: Option<Digest>) {
        let checked = self.scrubs.digest_received(item, agent, digest);
        self.checked(checked.as_slice());
    }

    /// Handles the sender's own digests of a version: of its bytes now, and of the published ones.
    pub(super) fn found(&mut self, item: Item, now: Option<Digest>, then: Option<Digest>) {
        let checked = self.scrubs.found(item, now, then);
        self.checked(&checked);
    }

    fn perform(&mut self, asks: Asks) {
        for (item, agent) in asks.agents {
            let scrub = FromRoot::Scrub {
                model: item.model as u8,
                version: item.version,
            };
            self.send(agent, &scrub);
        }
        if !asks.own.is_empty() {
            self.find(asks.own, None);
        }
    }

    /// Computes the digests of versions as they are here; the first of them may be at hand. This
    /// pins their slots as a worker would, for about half the time of a memcpy.
    fn find(&mut self, items: Vec<Item>, first: Option<Snapshot>) {
        let (remote_readers, events) = (self.remote_readers.clone(), self.events.clone());
        let (threads, own) = (self.settings.threads.clone(), items.clone());
        let work = move || {
            let mut at_hand = first;
            for item in own {
                let there = || {
                    remote_readers
                        .snapshot(item.model, item.version)
                        .ok()
                        .flatten()
                };
                let snapshot = at_hand.take().or_else(there);
                let then = snapshot.as_ref().and_then(Snapshot::published_digest);
                let now = snapshot.and_then(|one| one.digest_unless(|| threads.is_stopped()));
                // A coordinator that has ended receives nothing.
                if events
                    .blocking_send(Event::Found { item, now, then })
                    .is_err()
                {
                    return;
                }
            }
        };
        if let Err(error) = self.settings.threads.spawn("weightsync-scrub", work) {
            tracing::warn!("versions are not compared, because no thread can be started: {error}");
            for item in items {
                self.found(item, None, None);
            }
        }
    }

    /// Acts on the results of comparisons, and answers clients whose round is complete.
    pub(super) fn checked(&mut self, checked: &[Checked]) {
        for one in checked {
            let Checked { item, agent, .. } = *one;
            match one.verdict {
                Verdict::Differs { expected, got } => self.spoiled(one, expected, got),
                Verdict::Replaced | Verdict::Gone => {
                    tracing::debug!("agent {agent}'s copy of {item:?} is not compared");
                }
                Verdict::Same | Verdict::Unknown => {}
            }
        }
        let mut rounds = std::mem::take(&mut self.rounds);
        for round in &mut rounds {
            for one in checked {
                round.note(one, || self.check(one));
            }
        }
        for round in rounds {
            match round.waits.is_empty() {
                true => self.answer_round(round),
                // A client that has gone needs no answer.
                false if round.answer.is_closed() => {}
                false => self.rounds.push(round),
            }
        }
    }

    fn answer_round(&self, round: Round<oneshot::Sender<String>>) {
        let scrub = scrub::Scrub {
            run: self.remote_readers.run().to_string(),
            models: self.settings.models.clone(),
            same: round.same,
            others: round.others,
            left_out: 0,
        };
        let json = serde_json::to_string(&scrub.shortened()).unwrap_or_default();
        // The client may have gone.
        let _ = round.answer.send(json);
    }

    /// Handles a version whose bytes differ from the published ones.
    fn spoiled(&mut self, checked: &Checked, expected: Digest, got: Digest) {
        let Checked { item, agent, .. } = *checked;
        let model = &self.settings.models[item.model];
        let who = match self.agents.get(&agent) {
            Some(one) => format!("agent {agent} at {}", one.from),
            None => "this sender".into(),
        };
        tracing::error!(
            "{who} has a damaged copy of {} of {model}: digest {got}, expected {expected}; the \
             next version goes there whole",
            item.version
        );
        if agent == OWN {
            self.settings.store.spoil(item);
            return;
        }
        let spoiled = FromRoot::Spoiled {
            model: item.model as u8,
            version: item.version,
        };
        self.send(agent, &spoiled);
        // The sender's own bytes may be the wrong ones, so compare those too.
        let asks = self.scrubs.ask([(item, OWN)]);
        self.perform(asks);
    }

    /// A result, for the answer.
    fn check(&self, checked: &Checked) -> scrub::Check {
        let Checked {
            item,
            agent,
            verdict,
        } = *checked;
        let one = self.agents.get(&agent);
        let known = one.and_then(|one| one.known.as_ref());
        let workers: Vec<u32> = match agent {
            OWN => self
                .remote_readers
                .local()
                .iter()
                .map(|one| one.worker.0)
                .collect(),
            agent => {
                let membership = self
                    .membership
                    .iter()
                    .filter(|(_, _, by, _)| *by == Some(agent));
                membership.map(|(worker, ..)| worker.0).collect()
            }
        };
        let name = known.map_or("", |known| &known.name);
        scrub::Check {
            agent,
            name: name[..name.floor_char_boundary(NAME)].into(),
            address: match one {
                Some(one) => one.from.ip().to_string(),
                None => self.settings.address.clone(),
            },
            pid: match known {
                Some(known) => known.process.pid,
                None => std::process::id(),
            },
            model: item.model as u8,
            version: item.version.0,
            workers,
            verdict: match verdict {
                Verdict::Differs { expected, got } => scrub::Verdict::Differs {
                    expected: expected.to_string(),
                    got: got.to_string(),
                },
                Verdict::Replaced => scrub::Verdict::Replaced,
                Verdict::Same | Verdict::Unknown | Verdict::Gone => scrub::Verdict::Gone,
            },
        }
    }
}
