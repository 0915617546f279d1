//! The versions that can be served: whole ones, and those that are still arriving.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use weightsync_core::{Layout, Version};
use weightsync_mem::{PartialSlot, Snapshot};

use super::PATIENCE;
use super::delta::Ring;
use crate::relay::Item;
use crate::wire::frame::CHUNK;

// The checksums of a sender's copy pass are those of chunks.
const _: () = assert!(CHUNK as usize == weightsync_mem::CHECKSUM_BLOCK);

/// For so long a sender keeps a version for one whose connection has broken.
const COMES_AGAIN: Duration = Duration::from_secs(3);

/// A version that can be served, as far as it is there.
#[derive(Debug)]
pub(crate) struct Held {
    source: Source,
    /// Of each chunk, once it is known.
    sums: Box<[OnceLock<u64>]>,
    /// It is not to be served any more.
    revoked: AtomicBool,
    /// The connections by which it goes out now, by number.
    outgoing: Mutex<(u64, HashMap<u64, TcpStream>)>,
}

/// That a version goes out by a connection.
#[derive(Debug)]
pub(super) struct OutgoingGuard<'a> {
    held: &'a Held,
    number: u64,
}

impl Drop for OutgoingGuard<'_> {
    fn drop(&mut self) {
        self.held.outgoing().1.remove(&self.number);
    }
}

#[derive(Debug)]
enum Source {
    Whole(Snapshot),
    Coming(Arc<PartialSlot>),
}

/// What a look for a chunk finds.
pub(crate) enum Look<'a> {
    /// The chunk, and its checksum.
    Ready(&'a [u8], u64),
    NotYet,
    /// It will not come.
    Gone,
}

impl Held {
    /// A whole version.
    pub(crate) fn whole(snapshot: Snapshot) -> Self {
        let chunks = snapshot.layout().bytes().div_ceil(CHUNK.into()) as usize;
        let sums = snapshot.block_sums().unwrap_or_else(|error| {
            tracing::error!("{error}; they are computed again");
            None
        });
        let held = Self::with(Source::Whole(snapshot), chunks);
        for (index, sum) in sums.into_iter().flatten().enumerate() {
            held.note_sum(index, sum);
        }
        held
    }

    /// One that is coming.
    pub(crate) fn coming(room: Arc<PartialSlot>) -> Self {
        let chunks = room.pieces();
        Self::with(Source::Coming(room), chunks)
    }

    fn with(source: Source, chunks: usize) -> Self {
        Self {
            source,
            sums: (0..chunks).map(|_| OnceLock::new()).collect(),
            revoked: AtomicBool::new(false),
            outgoing: Mutex::default(),
        }
    }

    /// From here on until that is dropped it goes out by this connection; `None` if it
    /// is not to be served any more.
    pub(super) fn goes_by(&self, socket: &TcpStream) -> io::Result<Option<OutgoingGuard<'_>>> {
        let socket = socket.try_clone()?;
        let mut outgoing = self.outgoing();
        if self.is_revoked() {
            return Ok(None);
        }
        let (last, sockets) = &mut *outgoing;
        *last += 1;
        sockets.insert(*last, socket);
        Ok(Some(OutgoingGuard {
            held: self,
            number: *last,
        }))
    }

    /// It is not served any more, not even to the end of a chunk: who does not read
    /// would else hold it for as long.
    fn cut_off(&self) {
        let outgoing = self.outgoing();
        self.revoked.store(true, Ordering::Release);
        for socket in outgoing.1.values() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn outgoing(&self) -> MutexGuard<'_, (u64, HashMap<u64, TcpStream>)> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many chunks there are.
    pub(crate) fn chunks(&self) -> usize {
        self.sums.len()
    }

    /// Bytes of the whole image.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.layout().bytes()
    }

    pub(crate) fn layout(&self) -> &Layout {
        match &self.source {
            Source::Whole(snapshot) => snapshot.layout(),
            Source::Coming(room) => room.layout(),
        }
    }

    /// Whether it was whole from the start: what is asked for is there then, and what
    /// changed is made next to it.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.source, Source::Whole(_))
    }

    /// Whether a chunk is there.
    pub(super) fn has(&self, index: usize) -> bool {
        match &self.source {
            Source::Whole(_) => true,
            Source::Coming(room) => room.read(index).is_some(),
        }
    }

    /// Notes the checksum of a chunk that came with it.
    pub(crate) fn note_sum(&self, index: usize, crc: u64) {
        if let Some(sum) = self.sums.get(index) {
            let _ = sum.set(crc);
        }
    }

    /// Whether it is not to be served any more.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    fn look(&self, index: usize) -> Look<'_> {
        if self.is_revoked() {
            return Look::Gone;
        }
        let bytes = match &self.source {
            Source::Whole(snapshot) => {
                let start = index * CHUNK as usize;
                let end = (start + CHUNK as usize).min(snapshot.bytes().len());
                snapshot.bytes().get(start..end)
            }
            Source::Coming(room) => room.read(index),
        };
        match (bytes, self.sums.get(index)) {
            (Some(bytes), Some(sum)) => {
                Look::Ready(bytes, *sum.get_or_init(|| weightsync_simd::crc64(bytes)))
            }
            _ => Look::NotYet,
        }
    }
}

/// Which of the versions of a model that a sender is serving it serves no more, once
/// another is about to follow `newest`.
///
/// Of old ones it keeps the oldest: a slow relay below finishes what it has begun, and
/// no more slots than one wait for it. Those that are `state` anyway, because they are
/// still meant for somebody, cost no slot: they are never given up.
pub(crate) fn replaced(
    served: impl IntoIterator<Item = Item>,
    model: usize,
    newest: Version,
    is_retained: impl Fn(Item) -> bool,
) -> Vec<Item> {
    let served = served.into_iter();
    let old =
        served.filter(|item| item.model == model && item.version < newest && !is_retained(*item));
    let old: BTreeSet<Item> = old.collect();
    old.into_iter().skip(1).collect()
}

/// What one process can serve to relays below it.
pub(crate) struct Store {
    /// Those of a relay, kept until they are removed.
    held: Mutex<StoreState>,
    changed: Condvar,
    /// Finds whole versions of a sender.
    find: Option<Find>,
    /// What changed between versions.
    deltas: Ring,
}

/// Finds a version, and pins it.
pub(crate) type Find = Box<dyn Fn(Item) -> Option<Snapshot> + Send + Sync>;

#[derive(Debug, Default)]
struct StoreState {
    held: BTreeMap<Item, Arc<Held>>,
    /// Those that somebody is being served, to find their checksums again.
    served: HashMap<Item, Weak<Held>>,
    refused: Vec<(Item, Instant)>,
    /// Of each model the version of which somebody was served a part when its connection
    /// broke, and since when it waits for that one to come again.
    broken_off: BTreeMap<usize, (Item, Arc<Held>, Instant)>,
    closed: bool,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("held", &self.state().held.keys())
            .finish_non_exhaustive()
    }
}

impl Store {
    /// A relay's: empty.
    pub(crate) fn of_relay() -> Self {
        Self::with(None)
    }

    /// A sender's.
    pub(crate) fn of_sender(find: Find) -> Self {
        Self::with(Some(find))
    }

    fn with(find: Option<Find>) -> Self {
        Self {
            held: Mutex::default(),
            changed: Condvar::new(),
            find,
            deltas: Ring::default(),
        }
    }

    /// What changed between versions.
    pub(crate) fn deltas(&self) -> &Ring {
        &self.deltas
    }

    /// Whether nothing is served any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// What there is of a version.
    pub(crate) fn get(&self, item: Item) -> Option<Arc<Held>> {
        let mut state = self.state();
        if state.closed {
            return None;
        }
        let known = state.held.get(&item).cloned();
        let known = known.or_else(|| state.served.get(&item)?.upgrade());
        let usable = known.filter(|held| !held.is_revoked());
        if usable.is_some() {
            return usable;
        }
        if self.deltas.is_spoiled(item) {
            return None;
        }
        let held = Arc::new(Held::whole(self.find.as_ref()?(item)?));
        state.served.retain(|_, held| held.strong_count() > 0);
        state.served.insert(item, Arc::downgrade(&held));
        Some(held)
    }

    /// Whether it is known what becomes of this version here.
    pub(crate) fn is_sender(&self) -> bool {
        self.find.is_some()
    }

    /// From here on this is what there is of a version.
    pub(crate) fn put(&self, item: Item, held: Arc<Held>) {
        self.state().held.insert(item, held);
        self.changed.notify_all();
    }

    /// Serves a version no more; who is served it now is told so.
    pub(crate) fn remove(&self, item: Item) {
        if let Some(held) = self.state().held.remove(&item) {
            held.revoked.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }

    /// Serves the versions of a model no more that [are replaced](replaced), now that
    /// another is about to follow `newest`. A child that is served them now loses its
    /// connection, and asks for what it is to have by then.
    pub(crate) fn keep_oldest(&self, model: usize, newest: Version) {
        let Some(find) = &self.find else {
            return;
        };
        let mut state = self.state();
        let waits = state.broken_off.get(&model).map(|(item, ..)| *item);
        let all = state.served.iter();
        let all: BTreeMap<Item, Arc<Held>> = all
            .filter_map(|(item, held)| Some((*item, held.upgrade()?)))
            .collect();
        // What is kept only for one that may come again.
        let is_left = |item: &Item| waits == Some(*item) && Arc::strong_count(&all[item]) == 2;
        let is_kept = |item| find(item).is_some();
        let served = all.keys().copied().filter(|item| !is_left(item));
        let is_old = |item: Item| item.model == model && item.version < newest && !is_kept(item);
        let is_served = served.clone().any(is_old);
        let replaced = replaced(served, model, newest, is_kept);
        let is_late = |since: Instant| since.elapsed() >= COMES_AGAIN;
        let over = |(item, _, since): &mut (Item, Arc<Held>, Instant)| {
            is_late(*since) || replaced.contains(item) || is_left(item) && is_served
        };
        if let Entry::Occupied(mut waits) = state.broken_off.entry(model)
            && over(waits.get_mut())
        {
            waits.remove();
        }
        for item in &replaced {
            all[item].cut_off();
        }
        drop(state);
        if !replaced.is_empty() {
            self.changed.notify_all();
        }
    }

    /// A connection has broken by which somebody was served this: as long as nobody else
    /// is served an old one, it is kept for a moment, for that one to come again. Of two
    /// such versions the older is kept.
    pub(super) fn broke_off(&self, item: Item, held: Arc<Held>) {
        let mut state = self.state();
        if !self.is_sender() || state.closed || held.is_revoked() {
            return;
        }
        let waits = state.broken_off.get(&item.model);
        let is_older = |(of, _, since): &(Item, Arc<Held>, Instant)| {
            of.version < item.version && since.elapsed() < COMES_AGAIN
        };
        if !waits.is_some_and(is_older) {
            let now = Instant::now();
            state.broken_off.insert(item.model, (item, held, now));
        }
    }

    /// What there is of a version is not what was published: nobody gets it from here any more.
    pub(crate) fn spoil(&self, item: Item) {
        self.deltas.spoil(item);
        let mut state = self.state();
        state.broken_off.remove(&item.model);
        if let Some(held) = state.served.remove(&item).and_then(|held| held.upgrade()) {
            held.cut_off();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A version that was waited for will not come.
    pub(crate) fn refuse(&self, item: Item) {
        self.refuse_at(item, Instant::now());
    }

    fn refuse_at(&self, item: Item, now: Instant) {
        let mut state = self.state();
        // Who waits for its turn hears of it only then, and waits no longer than that.
        state
            .refused
            .retain(|(of, at)| *of != item && now.duration_since(*at) < PATIENCE);
        state.refused.push((item, now));
        drop(state);
        self.changed.notify_all();
    }

    /// Whether it was refused since.
    pub(crate) fn is_refused(&self, item: Item, since: Instant) -> bool {
        let state = self.state();
        state.closed
            || state
                .refused
                .iter()
                .any(|(refused, at)| *refused == item && *at >= since)
    }

    /// Something of some version has come.
    pub(crate) fn notify(&self) {
        // Under the lock: who has just looked waits by now.
        drop(self.state());
        self.changed.notify_all();
    }

    /// Waits until something is so that [is told](Self::notify) of here, or this is
    /// closed; no longer than that.
    pub(crate) fn wait_until(&self, is_so: impl Fn() -> bool, patience: Duration) {
        let waits = |state: &mut StoreState| !state.closed && !is_so();
        let waited = self
            .changed
            .wait_timeout_while(self.state(), patience, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits a moment for a version to be known here.
    pub(crate) fn wait_for(&self, item: Item, pause: Duration) {
        let state = self.state();
        if state.closed || state.held.contains_key(&item) {
            return;
        }
        let waited = self.changed.wait_timeout(state, pause);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Looks for a chunk, and waits a moment for it if it is not there yet.
    pub(crate) fn chunk<'a>(&self, held: &'a Held, index: usize, pause: Duration) -> Look<'a> {
        if let look @ (Look::Ready(..) | Look::Gone) = held.look(index) {
            return look;
        }
        let state = self.state();
        if state.closed {
            return Look::Gone;
        }
        if let look @ (Look::Ready(..) | Look::Gone) = held.look(index) {
            return look;
        }
        let waited = self.changed.wait_timeout(state, pause);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        held.look(index)
    }

    /// Serves nothing any more; every wait here ends.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        for held in state.held.values() {
            held.revoked.store(true, Ordering::Release);
        }
        for held in state.served.values().filter_map(Weak::upgrade) {
            held.revoked.store(true, Ordering::Release);
        }
        state.held.clear();
        state.broken_off.clear();
        drop(state);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, StoreState> {
        // Single insertions and removals: it holds after a panic.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn store_wait_ends_on_arrival_and_on_shutdown() {
        const LONG: Duration = Duration::from_secs(60);
        let since = Instant::now();
        let (looked, look) = mpsc::channel();
        let (store, done) = (Store::of_relay(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (store, done) = (&store, &done);
            let wait = |patience| {
                let looked = looked.clone();
                let is_so = move || {
                    let _ = looked.send(());
                    done.load(Ordering::Acquire)
                };
                scope.spawn(move || store.wait_until(is_so, patience))
            };
            let waits = wait(LONG);
            look.recv().unwrap();
            store.notify();
            look.recv().unwrap();
            assert!(!waits.is_finished(), "it is not so yet");
            done.store(true, Ordering::Release);
            store.notify();
            waits.join().unwrap();
            done.store(false, Ordering::Release);
            wait(Duration::ZERO).join().unwrap();
            let waits = wait(LONG);
            store.close();
            waits.join().unwrap();
        });
        assert!(since.elapsed() < LONG);
    }

    #[test]
    fn refusal_is_kept_while_a_waiter_exists() {
        let (store, since) = (Store::of_relay(), Instant::now());
        let [first, second] = [1, 2].map(|version| Item {
            model: 0,
            version: Version(version),
        });
        store.refuse_at(first, since);
        store.refuse_at(second, since + PATIENCE / 2);
        assert!(store.is_refused(first, since));
        // Of one the last counts, which is the only one that is remembered.
        store.refuse_at(first, since + PATIENCE / 2);
        assert!(store.is_refused(first, since + PATIENCE / 2));
        store.refuse_at(second, since + 2 * PATIENCE);
        assert!(!store.is_refused(first, since));
        assert_eq!(store.state().refused.len(), 1);
    }

    #[test]
    fn store_serves_the_oldest_and_the_kept_versions() {
        let items = |model, versions: &[u64]| {
            let items = versions.iter().map(|version| Item {
                model,
                version: Version(*version),
            });
            items.collect::<Vec<_>>()
        };
        // (served, kept anyway, served no more) before what follows version 9
        let cases: [(&[u64], &[u64], &[u64]); 6] = [
            (&[], &[], &[]),
            (&[9], &[], &[]),
            (&[7, 9], &[], &[]),
            (&[8, 5, 9, 7], &[], &[7, 8]),
            (&[5, 7, 8], &[7], &[8]),
            (&[5, 7, 8], &[5], &[8]),
        ];
        for (served, state, expected) in cases {
            let mut all = items(1, served);
            all.extend(items(0, served));
            let state = items(1, state);
            let found = replaced(all, 1, Version(9), |item| state.contains(&item));
            assert_eq!(found, items(1, expected), "{served:?}, {state:?} kept");
        }
    }
}
