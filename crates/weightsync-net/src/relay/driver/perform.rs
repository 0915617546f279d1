//! An agent performs what its [plan](crate::relay::plan) decides.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;
use weightsync_core::Version;
use weightsync_engine::log_limiter;
use weightsync_mem::{Error, Snapshot};

use super::{Driver, Event, Fetched, Fetching, MEASURE};
use crate::bulk::{Base, Delta, Fetch, Held, Parent, RING};
use crate::relay::plan::{Effect, Input, Item};
use crate::wire::frame::BLOCK;
use crate::wire::message::ToRoot;

impl Driver {
    /// Notes what has happened, and performs what follows from it.
    pub(super) fn step(&mut self, inputs: impl IntoIterator<Item = Input>) {
        let mut effects = self.plan.step(inputs);
        let mut more = Vec::new();
        while !effects.is_empty() {
            for effect in effects.drain(..) {
                if let Some(input) = self.perform(effect) {
                    more.push(input);
                }
            }
            if more.is_empty() {
                return;
            }
            effects = self.plan.step(more.drain(..));
        }
    }

    fn perform(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::Notify { who, sequence, set } => {
                if let Some(set) = self.snapshots(&set) {
                    self.relay.notify(who, sequence, &set);
                }
            }
            Effect::Answer {
                who,
                question,
                sequence,
                set,
            } => {
                if let Some(set) = self.snapshots(&set) {
                    self.is_answered(who, question);
                    self.relay.answer(who, question, sequence, &set);
                }
            }
            Effect::Fetch { item, sender } => return self.begin(item, sender),
            Effect::Stop { item } => {
                self.fetching.remove(&item);
            }
            Effect::Release { item } => {
                self.store.remove(item);
                self.coming.remove(&item);
                if self.whole.remove(&item).is_some() {
                    self.send(&ToRoot::Holds {
                        have: Vec::new(),
                        dropped: vec![item],
                    });
                }
            }
            Effect::Refuse { item } => self.store.refuse(item),
        }
        None
    }

    /// Begins a fetch; if it cannot, returns what happened instead.
    fn begin(&mut self, item: Item, sender: bool) -> Option<Input> {
        let root = Parent {
            agent: 0,
            address: self.root,
        };
        let parent = match sender {
            true => Some(root),
            false => self.parent,
        };
        let Some(parent) = parent else {
            return Some(Input::NoParent);
        };
        let is_new = !self.coming.contains_key(&item);
        if is_new {
            let slot = match self
                .relay
                .partial_slot(item.model, item.version, BLOCK as usize)
            {
                Ok(Some(slot)) => slot,
                Ok(None) => return Some(Input::NoRoom { item }),
                // This can never succeed, so the version counts as missing everywhere.
                Err(error @ Error::BadOption { .. }) => {
                    tracing::error!("{item:?} is not fetched: {error}");
                    let sender = true;
                    return Some(Input::NotThere { item, sender });
                }
                Err(error) => {
                    // This is tried again soon and often, so logging is limited.
                    if let Some(more) = self.log_limiter.logs("room", Instant::now().into_std()) {
                        log_limiter::warn(more, &format!("there is no room for {item:?}: {error}"));
                    }
                    return Some(Input::NoRoom { item });
                }
            };
            let coming = Arc::new(Held::coming(slot.clone()));
            self.coming.insert(item, (slot, coming));
        }
        let base = self.base_of(item);
        let (slot, coming) = self.coming.get(&item)?;
        if is_new {
            // Registered at once: a waiting child looks for the changes as soon as the version is
            // here.
            self.store.put(item, coming.clone());
        }
        self.fetches += 1;
        let number = self.fetches;
        let notify = notifier(&self.events);
        // Fetches under way have their connections already.
        let others = self.fetching.keys().filter(|one| **one != item).count();
        let fetch = Fetch::start(
            (item, parent),
            (&self.connections, others),
            (slot.clone(), coming.clone(), base),
            &self.store,
            &self.threads,
            move |end, came| {
                let fetched = Fetched {
                    number,
                    item,
                    parent: parent.agent,
                    end,
                    came,
                };
                notify(Event::Fetched(fetched));
            },
        );
        if self.fetching.is_empty() {
            self.measures = Instant::now() + MEASURE;
        }
        let fetching = Fetching {
            number,
            parent,
            instead: sender,
            fetch,
        };
        self.fetching.insert(item, fetching);
        None
    }

    /// The base for a version: the newest older one that is whole here. Its deltas are kept for the
    /// next version and, where there are relays below, for as long as those may want them.
    fn base_of(&self, item: Item) -> Option<Base> {
        let first = Item {
            version: Version::NONE,
            ..item
        };
        let (of, snapshot) = self.whole.range(first..item).next_back()?;
        let (slot, _) = self.coming.get(&item)?;
        let ring = self.store.deltas();
        let earlier = slot.base().and_then(|base| ring.step(*of, base));
        let known = ring.step(item, of.version);
        let recorded = known.unwrap_or_else(|| {
            let layout = snapshot.layout();
            let fresh = Arc::new(Delta::new(of.version, item.version, layout));
            let bound = match self.serves {
                Some(_) => layout.bytes() / RING,
                None => 0,
            };
            ring.put(item.model, fresh.clone(), bound);
            fresh
        });
        if recorded.is_spoiled() {
            // A delta did not fit, so the version is fetched whole.
            return None;
        }
        Some(Base {
            snapshot: snapshot.clone(),
            recorded,
            passes_on: self.serves.is_some(),
            earlier,
        })
    }

    /// Stops all fetches from the parent; those from the sender go on.
    pub(super) fn leave_parent(&mut self) {
        self.parent = None;
        self.fetching.retain(|_, one| one.instead);
    }

    fn snapshots(&self, set: &[Item]) -> Option<Vec<Snapshot>> {
        set.iter()
            .map(|item| self.whole.get(item).cloned())
            .collect()
    }
}

/// Sends the driver an event without blocking, from any thread, including the driver's own.
fn notifier(events: &mpsc::Sender<Event>) -> impl Fn(Event) + Send + Sync + 'static {
    let (events, runtime) = (events.clone(), Handle::current());
    move |event| {
        let events = events.clone();
        runtime.spawn(async move {
            // A driver that has ended receives nothing.
            let _ = events.send(event).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_thread_can_send_itself_events() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.build().unwrap();
        runtime.block_on(async {
            let (events, mut inbox) = mpsc::channel(1);
            let notify = notifier(&events);
            // More events than the channel has room for.
            notify(Event::Stop);
            notify(Event::Stop);
            assert!(matches!(inbox.recv().await, Some(Event::Stop)));
            assert!(matches!(inbox.recv().await, Some(Event::Stop)));
        });
    }
}
