//! Comparing what everybody holds with what was published.

use tokio::sync::oneshot;
use weightsync_core::digest::Digest;

use super::{Event, Hub};
use crate::relay::Item;
use crate::root::scrub::{Asks, Checked, OWN, Published, Round, Verdict};
use crate::root::topology::AgentId;
use crate::scrub;
use crate::wire::message::FromRoot;

/// Each version whose number is a multiple of this is an anchor: whoever comes to have it is
/// compared with what was published.
pub(super) const ANCHOR: u64 = 64;

/// The most bytes of a host's name in an answer.
const NAME: usize = 64;

impl Hub {
    /// Has all that is held compared, for who asks.
    pub(super) fn scrub(&mut self, answer: oneshot::Sender<String>) {
        let own = (0..self.settings.models.len()).map(|model| Item {
            model,
            version: self.guests.version(model),
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
        // It may be that there is nothing.
        self.checked(&[]);
    }

    /// An agent has come to have versions.
    pub(super) fn came(&mut self, agent: AgentId, have: &[Item]) {
        if !self.settings.anchors {
            return;
        }
        let anchors = have
            .iter()
            .filter(|item| item.version.0.is_multiple_of(ANCHOR));
        let asks = self.scrubs.ask(anchors.map(|item| (*item, agent)));
        self.perform(asks);
    }

    /// An agent says what it has.
    pub(super) fn scrubbed(&mut self, agent: AgentId, item: Item, digest: Option<Digest>) {
        let checked = self.scrubs.said(item, agent, digest);
        self.checked(&checked);
    }

    /// It is known what was published.
    pub(super) fn published(&mut self, item: Item, published: Option<Published>) {
        let checked = self.scrubs.published(item, published);
        self.checked(&checked);
    }

    fn perform(&mut self, asks: Asks) {
        for (item, agent) in asks.agents {
            let scrub = FromRoot::Scrub {
                model: item.model as u8,
                version: item.version,
            };
            self.say(agent, &scrub);
        }
        if asks.own.is_empty() {
            return;
        }
        let (guests, events) = (self.guests.clone(), self.events.clone());
        let (threads, own) = (self.settings.threads.clone(), asks.own.clone());
        let work = move || {
            for item in own {
                let found = guests.snapshot(item.model, item.version).ok().flatten();
                let published = found.and_then(|snapshot| {
                    // The trainer is not to wait for its slot.
                    let newer = || guests.version(item.model) > item.version;
                    let now = snapshot.digest_unless(|| threads.is_stopped() || newer())?;
                    let then = snapshot.published_digest();
                    Some(Published { now, then })
                });
                let found = Event::Published { item, published };
                // A hub that has ended hears nothing.
                if events.blocking_send(found).is_err() {
                    return;
                }
            }
        };
        if let Err(error) = self.settings.threads.spawn("weightsync-scrub", work) {
            tracing::warn!("versions are not compared, as no thread can be started: {error}");
            for item in asks.own {
                self.published(item, None);
            }
        }
    }

    /// Acts on what comparisons have come to, and tells who waits for that.
    pub(super) fn checked(&mut self, checked: &[Checked]) {
        for one in checked {
            if let Verdict::Differs { expected, got } = one.verdict {
                self.spoiled(one, expected, got);
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
                true => self.tell_round(round),
                // Who has gone needs no answer.
                false if round.answer.is_closed() => {}
                false => self.rounds.push(round),
            }
        }
    }

    fn tell_round(&self, round: Round<oneshot::Sender<String>>) {
        let scrub = scrub::Scrub {
            run: self.guests.run().to_string(),
            models: self.settings.models.clone(),
            same: round.same,
            others: round.others,
            left_out: 0,
        };
        let json = serde_json::to_string(&scrub.shortened()).unwrap_or_default();
        // Who asked may have gone.
        let _ = round.answer.send(json);
    }

    /// What is there of a version is not what was published.
    fn spoiled(&mut self, checked: &Checked, expected: Digest, got: Digest) {
        let Checked { item, agent, .. } = *checked;
        let model = &self.settings.models[item.model];
        let who = match self.agents.get(&agent) {
            Some(one) => format!("agent {agent} at {}", one.from),
            None => "this sender".into(),
        };
        tracing::error!(
            "what {who} has of {} of {model} is not what was published: its digest is {got}, and \
             {expected} belongs there; the next version goes there whole",
            item.version
        );
        match agent {
            OWN => self.settings.store.deltas().spoil(item),
            agent => self.say(
                agent,
                &FromRoot::Spoiled {
                    model: item.model as u8,
                    version: item.version,
                },
            ),
        }
    }

    /// A comparison as it is told of.
    fn check(&self, checked: &Checked) -> scrub::Check {
        let Checked {
            item,
            agent,
            verdict,
        } = *checked;
        let one = self.agents.get(&agent);
        let known = one.and_then(|one| one.known.as_ref());
        let workers: Vec<u32> = match agent {
            OWN => self.guests.local().iter().map(|one| one.worker.0).collect(),
            agent => {
                let seats = self.seats.iter().filter(|(_, _, by, _)| *by == Some(agent));
                seats.map(|(worker, ..)| worker.0).collect()
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
                Verdict::Same | Verdict::Gone => scrub::Verdict::Gone,
            },
        }
    }
}
