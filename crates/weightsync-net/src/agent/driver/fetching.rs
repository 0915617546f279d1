//! Versions arrive: where they are fetched from, how a fetch begins, and how it ends.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;
use weightsync_core::Version;
use weightsync_engine::log_limiter;
use weightsync_link::refusal;
use weightsync_mem::{Backoff, Error, PartialSlot, Snapshot};

use super::{Driver, DriverEvent};
use crate::agent::backoff;
use crate::agent::plan::{Item, PlanInput};
use crate::bulk::{
    BulkFetch, Delta, DeltaBase, FetchEnd, HeldVersion, MEASURABLE, Parent, RING, Transferred,
};
use crate::wire::image::BLOCK_BYTES;
use crate::wire::message::ToRoot;

/// How often the driver looks for room while there is none.
// Not every release of a slot is an event: a thread that serves or makes a digest may hold the
// slot.
const ROOM: Duration = Duration::from_millis(20);

/// How often the driver reports to the sender how much of an arriving version is here.
// On a slow link one version may take minutes. The sender has to learn of the slow link before
// that.
const MEASURE: Duration = Duration::from_secs(1);

/// The versions that are here or arriving, and where they are fetched from.
pub(super) struct Fetches {
    pub(super) parent: Option<Parent>,
    arriving: BTreeMap<Item, (Arc<PartialSlot>, Arc<HeldVersion>)>,
    pub(super) whole: BTreeMap<Item, Snapshot>,
    pub(super) under_way: BTreeMap<Item, Fetching>,
    /// The number of the last fetch.
    last: u64,
    /// When to look for room again, if there was none.
    pub(super) room: Instant,
    /// When to report to the sender how much has arrived.
    measures: Instant,
    /// The pauses after fetches that broke off; `None` after one that did not.
    backoff: Option<Backoff>,
    /// When to report to the sender that a parent is lost, which one, and the reason.
    pub(super) complaint: Option<(Instant, u64, String)>,
}

/// A fetch under way.
pub(super) struct Fetching {
    pub(super) number: u64,
    pub(super) parent: Parent,
    /// The fetch goes to the sender instead of the parent.
    pub(super) instead: bool,
    /// Dropping this stops the fetch.
    fetch: BulkFetch,
}

/// A fetch that has ended.
pub(crate) struct Fetched {
    pub(super) number: u64,
    pub(super) item: Item,
    /// The agent that it was fetched from.
    pub(super) parent: u64,
    pub(super) end: FetchEnd,
    pub(super) transferred: Transferred,
}

impl Fetches {
    pub(super) fn new() -> Self {
        Self {
            parent: None,
            arriving: BTreeMap::new(),
            whole: BTreeMap::new(),
            under_way: BTreeMap::new(),
            last: 0,
            room: Instant::now(),
            measures: Instant::now(),
            backoff: None,
            complaint: None,
        }
    }

    /// The versions of a set, if all are whole here.
    pub(super) fn snapshots(&self, set: &[Item]) -> Option<Vec<Snapshot>> {
        set.iter()
            .map(|item| self.whole.get(item).cloned())
            .collect()
    }

    /// Releases a version; true if it was whole.
    pub(super) fn release(&mut self, item: Item) -> bool {
        self.arriving.remove(&item);
        self.whole.remove(&item).is_some()
    }

    /// Stops all fetches from the parent; those from the sender in its place go on.
    fn leave_parent(&mut self) {
        self.parent = None;
        self.under_way.retain(|_, one| one.instead);
    }
}

impl Driver {
    /// Fetches from another parent from here on.
    pub(super) fn follow(&mut self, parent: Parent) {
        // Named once more while fetches from it go on: nothing changes.
        if self.fetches.parent == Some(parent) && !self.fetches.under_way.is_empty() {
            return;
        }
        // First these are marked, so that the next line does not stop them.
        let mut inputs = self.keep_fetches_from_sender(parent);
        self.fetches.leave_parent();
        self.fetches.parent = Some(parent);
        // A pending complaint is about an earlier parent, so the sender would ignore it; and the
        // next failure must be reported.
        self.fetches.complaint = None;
        // The loss makes the plan forget the fetches from the old parent. The new parent then
        // starts them again.
        inputs.extend([PlanInput::NoParent, PlanInput::Parent]);
        self.step(inputs);
    }

    /// Keeps the fetches from the sender that go on when it names another parent: those of sets to
    /// finish. The new parent may not have these versions, and the sender keeps them only while
    /// somebody fetches them.
    fn keep_fetches_from_sender(&mut self, next: Parent) -> Vec<PlanInput> {
        let plan = &self.plan;
        let under_way = self.fetches.under_way.iter_mut();
        let kept = under_way
            .filter(|(item, one)| one.parent.agent == 0 && next.agent != 0 && plan.is_first(item));
        let inputs = kept.map(|(item, one)| {
            one.instead = true;
            PlanInput::FromSender { item: *item }
        });
        inputs.collect()
    }

    /// Begins a fetch; if it cannot, returns what happened instead.
    pub(super) fn begin(&mut self, item: Item, sender: bool) -> Option<PlanInput> {
        let Some(parent) = self.parent_to_ask(sender) else {
            return Some(PlanInput::NoParent);
        };
        let is_new = !self.fetches.arriving.contains_key(&item);
        if is_new && let Err(instead) = self.make_room(item) {
            return Some(instead);
        }
        let base = self.base_of(item);
        let (slot, held) = self.fetches.arriving.get(&item).cloned()?;
        if is_new {
            // Registered at once, but after the base: a waiting child looks for the changes as soon
            // as the version is here.
            self.store.put(item, held.clone());
        }
        // The number tells this fetch from an earlier one of the version, whose end may still be on
        // its way.
        self.fetches.last += 1;
        let number = self.fetches.last;
        let notify = notifier(&self.events);
        let done = move |end, transferred| {
            let parent = parent.agent;
            notify(DriverEvent::Fetched(Fetched {
                number,
                item,
                parent,
                end,
                transferred,
            }));
        };
        // Fetches under way have their connections already.
        let others = self.fetches.under_way.keys();
        let others = others.filter(|one| **one != item).count();
        let fetch = BulkFetch::start(
            (item, parent),
            (&self.connections, others),
            (slot, held, base),
            &self.store,
            &self.threads,
            done,
        );
        // The first of several fetches sets the time, so that each report covers all of them.
        if self.fetches.under_way.is_empty() {
            self.fetches.measures = Instant::now() + MEASURE;
        }
        let fetching = Fetching {
            number,
            parent,
            instead: sender,
            fetch,
        };
        self.fetches.under_way.insert(item, fetching);
        None
    }

    /// Where to fetch from: the sender, or the parent if there is one.
    fn parent_to_ask(&self, sender: bool) -> Option<Parent> {
        let root = Parent {
            agent: 0,
            address: self.root,
        };
        match sender {
            true => Some(root),
            false => self.fetches.parent,
        }
    }

    /// Takes a slot for a version; if there is none, returns what happened instead.
    fn make_room(&mut self, item: Item) -> Result<(), PlanInput> {
        let slot = self
            .relay
            .partial_slot(item.model, item.version, BLOCK_BYTES as usize);
        let slot = match slot {
            Ok(Some(slot)) => slot,
            Ok(None) => return Err(PlanInput::NoRoom { item }),
            // This can never succeed, so the version counts as missing everywhere.
            Err(error @ Error::BadOption { .. }) => {
                tracing::error!("{item:?} is not fetched: {error}");
                let sender = true;
                return Err(PlanInput::NotThere { item, sender });
            }
            Err(error) => {
                // This is tried again soon and often, so logging is limited.
                if let Some(more) = self.log_limiter.logs("room", Instant::now().into_std()) {
                    log_limiter::warn(more, &format!("there is no room for {item:?}: {error}"));
                }
                return Err(PlanInput::NoRoom { item });
            }
        };
        let held = Arc::new(HeldVersion::arriving(slot.clone()));
        self.fetches.arriving.insert(item, (slot, held));
        Ok(())
    }

    /// The base for a version: the newest older one that is whole here. Its deltas are kept for the
    /// next version and, where there are relays below, for as long as those may want them.
    fn base_of(&self, item: Item) -> Option<DeltaBase> {
        let first = Item {
            version: Version::NONE,
            ..item
        };
        // Items sort by version within a model, so this is the newest older one.
        let (of, snapshot) = self.fetches.whole.range(first..item).next_back()?;
        let (slot, _) = self.fetches.arriving.get(&item)?;
        let ring = self.store.deltas();
        // With this delta a span can be changed in place, from what the free slot still holds.
        let earlier = slot.base().and_then(|base| ring.step(*of, base));
        let known = ring.step(item, of.version);
        let recorded = known.unwrap_or_else(|| {
            let layout = snapshot.layout();
            let fresh = Arc::new(Delta::new(of.version, item.version, layout));
            let bound = match self.serves {
                Some(_) => layout.bytes() / RING,
                // No host fetches here. The ring keeps the newest delta all the same, for changes
                // in place.
                None => 0,
            };
            ring.put(item.model, fresh.clone(), bound);
            fresh
        });
        if recorded.is_spoiled() {
            // A delta did not fit, so the version is fetched whole.
            return None;
        }
        Some(DeltaBase {
            snapshot: snapshot.clone(),
            recorded,
            passes_on: self.serves.is_some(),
            earlier,
        })
    }

    /// Handles the end of a fetch.
    pub(super) fn fetched(&mut self, fetched: Fetched) {
        let Fetched {
            number,
            item,
            parent,
            end,
            transferred,
        } = fetched;
        // Also for a fetch that was stopped: its bytes have travelled.
        self.send_received(item, parent, transferred);
        // A fetch that was stopped ends too, and another one may have its place by then.
        let Entry::Occupied(ended) = self.fetches.under_way.entry(item) else {
            return;
        };
        if ended.get().number != number {
            return;
        }
        let ended = ended.remove();
        match end {
            FetchEnd::Whole => self.commit(item),
            FetchEnd::NotThere => self.not_there(item, ended.parent),
            FetchEnd::Broken(error) => self.broke_off(item, &ended, &error),
            FetchEnd::Altered { block } => self.altered(item, ended.parent, block),
            FetchEnd::BaseMismatch(error) => self.drop_model(item.model, &error),
            // The missing blocks are fetched from the same parent.
            FetchEnd::Partly => self.step([PlanInput::Rest { item }]),
            FetchEnd::Stopped => self.step([PlanInput::Broken { item }]),
        }
    }

    /// Every block of a version is here: it can be read and reported.
    fn commit(&mut self, item: Item) {
        let Some((slot, _)) = self.fetches.arriving.get(&item).cloned() else {
            return;
        };
        match slot.commit() {
            Ok(snapshot) => {
                self.fetches.backoff = None;
                self.store.deltas().trim(item.model);
                // Before the plan's step, which may put mailboxes on this version at once.
                self.fetches.whole.insert(item, snapshot);
                let (have, dropped) = (vec![item], Vec::new());
                self.send(&ToRoot::Holds { have, dropped });
                self.step([PlanInput::Whole { item }]);
            }
            Err(error) => {
                if let Some(more) = self.log_limiter.logs("commit", Instant::now().into_std()) {
                    log_limiter::warn(more, &format!("{item:?} cannot be committed: {error}"));
                }
                // Workers wait for it, so it is fetched again after a while, into another slot: as
                // where there was no room, nothing of it is here.
                drop(slot);
                self.store.remove(item);
                self.fetches.release(item);
                self.fetches.room = Instant::now() + ROOM;
                self.step([PlanInput::NoRoom { item }]);
            }
        }
    }

    /// The source of a fetch does not have the version.
    fn not_there(&mut self, item: Item, parent: Parent) {
        let sender = parent.agent == 0;
        if !sender {
            self.send(&ToRoot::Missing { item });
        }
        self.step([PlanInput::NotThere { item, sender }]);
    }

    /// A connection broke. The parent is left, and reported as lost after a pause.
    fn broke_off(&mut self, item: Item, ended: &Fetching, error: &io::Error) {
        // This also waits when the sender was the source: the sender then names a parent again, and
        // the fetch goes on.
        let pause = match &mut self.fetches.backoff {
            Some(backoff) => backoff.pause(),
            none => {
                *none = Some(backoff());
                Duration::ZERO
            }
        };
        let at = ended.parent.address;
        // Until somebody changes an end, each attempt fails so.
        if let Some((reason, true)) = refusal(error) {
            let cause = format!("nothing can be fetched from {at}");
            if let Some(more) = self.log_limiter.logs(&cause, Instant::now().into_std()) {
                log_limiter::warn(more, &format!("{cause}: {reason}"));
            }
        } else {
            tracing::info!("fetching {item:?} from {at} broke off: {error}");
        }
        // The loss of the parent is worth reporting more than a failure of the sender, which the
        // sender knows of.
        if !ended.instead || self.fetches.complaint.is_none() {
            let complaint = (
                Instant::now() + pause,
                ended.parent.agent,
                error.to_string(),
            );
            self.fetches.complaint = Some(complaint);
        }
        // Its other fetches would most likely fail too. Each goes on with its next missing block
        // elsewhere.
        self.fetches.leave_parent();
        self.step([PlanInput::Broken { item }, PlanInput::NoParent]);
    }

    /// A relay sent a block other than the sender published it.
    fn altered(&mut self, item: Item, parent: Parent, block: usize) {
        tracing::warn!(
            "the relay at {} sent block {block} of {item:?} other than the sender published it: \
             nothing of the block was used, and another parent is asked for",
            parent.address
        );
        // The sender leaves the relay in place for others, and gives this agent another parent.
        self.send(&ToRoot::Altered {
            parent: parent.agent,
            item,
            block: block as u32,
        });
        self.fetches.leave_parent();
        self.step([PlanInput::Broken { item }, PlanInput::NoParent]);
    }

    /// When [`on_time`](Self::on_time) is due next.
    pub(super) fn fetches_due(&self) -> Option<Instant> {
        let Fetches {
            room,
            measures,
            under_way,
            complaint,
            ..
        } = &self.fetches;
        let room = self.plan.waits_for_room().then_some(*room);
        let measures = (!under_way.is_empty()).then_some(*measures);
        let complaint = complaint.as_ref().map(|(at, ..)| *at);
        [room, measures, complaint].into_iter().flatten().min()
    }

    /// Does what is due: reports a lost parent and how much has arrived, and looks for room.
    pub(super) fn on_time(&mut self) {
        let now = Instant::now();
        let complaint = self.fetches.complaint.take_if(|(at, ..)| now >= *at);
        if let Some((_, parent, reason)) = complaint {
            self.send(&ToRoot::ParentLost { parent, reason });
        }
        if now >= self.fetches.measures {
            self.fetches.measures = now + MEASURE;
            let under_way = self.fetches.under_way.iter();
            let transferred = under_way.map(|(item, one)| {
                let transferred = one.fetch.take_transferred(MEASURABLE);
                (*item, one.parent.agent, transferred)
            });
            for (item, parent, transferred) in transferred.collect::<Vec<_>>() {
                self.send_received(item, parent, transferred);
            }
        }
        if self.plan.waits_for_room() && now >= self.fetches.room {
            self.fetches.room = now + ROOM;
            self.step([PlanInput::MayHaveRoom]);
        }
    }
}

/// Sends the driver an event without blocking, from any thread, including the driver's own.
fn notifier(events: &mpsc::Sender<DriverEvent>) -> impl Fn(DriverEvent) + Send + Sync + 'static {
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
            notify(DriverEvent::Stop);
            notify(DriverEvent::Stop);
            assert!(matches!(inbox.recv().await, Some(DriverEvent::Stop)));
            assert!(matches!(inbox.recv().await, Some(DriverEvent::Stop)));
        });
    }
}
