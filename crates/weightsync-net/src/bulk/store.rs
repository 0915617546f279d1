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
use weightsync_mem::threads::{CondvarExt as _, LockExt as _};
use weightsync_mem::{PartialSlot, Snapshot};

use super::PATIENCE;
use super::delta::DeltaRing;
use crate::agent::Item;
use crate::wire::image::BLOCK_BYTES;
use crate::wire::message::DIGEST_BYTES;

// [`HeldVersion::whole`] reuses the checksums of the sender's copy pass, so their blocks must have
// the size of these blocks.
const _: () = assert!(BLOCK_BYTES as usize == weightsync_mem::CHECKSUM_BLOCK);

/// How long a sender keeps a version for a child whose connection broke.
const COMES_AGAIN: Duration = Duration::from_secs(3);

/// A version that can be served: whole, or the blocks that have arrived so far.
#[derive(Debug)]
pub(crate) struct HeldVersion {
    source: VersionBytes,
    /// The checksum of each block, once it is known.
    // Set once and then read without a lock, by all threads that serve the version.
    sums: Box<[OnceLock<u64>]>,
    /// The BLAKE3 digest of each block as the sender published it, once it is known.
    digests: Box<[OnceLock<[u8; DIGEST_BYTES]>]>,
    /// The version is no longer served.
    revoked: AtomicBool,
    /// The connections that send this version now, by number.
    // Its lock also orders `register` and `cut_off`.
    outgoing: Mutex<(u64, HashMap<u64, TcpStream>)>,
}

/// Registers a connection as sending a version, until this value is dropped.
#[derive(Debug)]
pub(super) struct OutgoingGuard<'a> {
    held: &'a HeldVersion,
    number: u64,
}

impl Drop for OutgoingGuard<'_> {
    fn drop(&mut self) {
        self.held.outgoing().1.remove(&self.number);
    }
}

#[derive(Debug)]
enum VersionBytes {
    Whole(Snapshot),
    Arriving(Arc<PartialSlot>),
}

/// The state of a block of a version.
pub(crate) enum BlockState<'a> {
    /// The block and its checksum.
    Ready(&'a [u8], u64),
    NotYet,
    /// The block will not arrive.
    Gone,
}

impl HeldVersion {
    /// Holds a whole version.
    pub(crate) fn whole(snapshot: Snapshot) -> Self {
        let blocks = snapshot.layout().bytes().div_ceil(BLOCK_BYTES.into()) as usize;
        let sums = snapshot.block_sums().unwrap_or_else(|error| {
            tracing::error!("{error}; they are computed again");
            None
        });
        let held = Self::with(VersionBytes::Whole(snapshot), blocks);
        for (index, sum) in sums.into_iter().flatten().enumerate() {
            held.note_sum(index, sum);
        }
        held
    }

    /// Holds a version that is still arriving.
    pub(crate) fn arriving(slot: Arc<PartialSlot>) -> Self {
        let blocks = slot.pieces();
        Self::with(VersionBytes::Arriving(slot), blocks)
    }

    fn with(source: VersionBytes, blocks: usize) -> Self {
        Self {
            source,
            sums: (0..blocks).map(|_| OnceLock::new()).collect(),
            digests: (0..blocks).map(|_| OnceLock::new()).collect(),
            revoked: AtomicBool::new(false),
            outgoing: Mutex::default(),
        }
    }

    /// Registers a connection as sending this version until the result is dropped; `None` if the
    /// version is no longer served.
    pub(super) fn register(&self, socket: &TcpStream) -> io::Result<Option<OutgoingGuard<'_>>> {
        let socket = socket.try_clone()?;
        // Under this lock: either the check below sees the revocation, or `cut_off` finds the
        // socket.
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

    /// Stops serving the version at once, even within a block. Otherwise a child that stops reading
    /// would hold the slot for as long as its connection lives.
    fn cut_off(&self) {
        let outgoing = self.outgoing();
        self.revoked.store(true, Ordering::Release);
        for socket in outgoing.1.values() {
            // A thread that is in the middle of a write fails at once, and releases the version.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn outgoing(&self) -> MutexGuard<'_, (u64, HashMap<u64, TcpStream>)> {
        self.outgoing.locked()
    }

    /// How many blocks the image has.
    pub(crate) fn blocks(&self) -> usize {
        self.sums.len()
    }

    /// Bytes of the whole image.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.layout().bytes()
    }

    pub(crate) fn layout(&self) -> &Layout {
        match &self.source {
            VersionBytes::Whole(snapshot) => snapshot.layout(),
            VersionBytes::Arriving(slot) => slot.layout(),
        }
    }

    /// Whether the version was whole from the start. Then every block can be sent at once, and this
    /// process computes the deltas itself.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.source, VersionBytes::Whole(_))
    }

    /// Whether a block has arrived.
    pub(super) fn has(&self, index: usize) -> bool {
        match &self.source {
            VersionBytes::Whole(_) => true,
            VersionBytes::Arriving(slot) => slot.read(index).is_some(),
        }
    }

    /// Notes the checksum that came with a block.
    pub(crate) fn note_sum(&self, index: usize, crc: u64) {
        if let Some(sum) = self.sums.get(index) {
            let _ = sum.set(crc);
        }
    }

    /// The digest of a block, if it is known.
    pub(super) fn digest(&self, index: usize) -> Option<&[u8; DIGEST_BYTES]> {
        self.digests.get(index)?.get()
    }

    /// Notes the sender's digest of a block; false if there is no such block, or its digest is known to be
    /// another.
    pub(super) fn note_digest(&self, index: usize, digest: [u8; DIGEST_BYTES]) -> bool {
        let place = self.digests.get(index);
        place.is_some_and(|place| *place.get_or_init(|| digest) == digest)
    }

    /// The digest of a block that is here, made now if it is not known.
    pub(super) fn make_digest(&self, index: usize) -> Option<&[u8; DIGEST_BYTES]> {
        let bytes = self.bytes(index)?;
        let place = self.digests.get(index)?;
        Some(place.get_or_init(|| *blake3::hash(bytes).as_bytes()))
    }

    /// Whether the version is no longer served.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// A block that is here.
    fn bytes(&self, index: usize) -> Option<&[u8]> {
        match &self.source {
            VersionBytes::Whole(snapshot) => {
                let start = index * BLOCK_BYTES as usize;
                let end = (start + BLOCK_BYTES as usize).min(snapshot.bytes().len());
                snapshot.bytes().get(start..end)
            }
            VersionBytes::Arriving(slot) => slot.read(index),
        }
    }

    /// The state of a block now.
    fn state(&self, index: usize) -> BlockState<'_> {
        if self.is_revoked() {
            return BlockState::Gone;
        }
        match (self.bytes(index), self.sums.get(index)) {
            (Some(bytes), Some(sum)) => {
                // Of several threads that need the sum at once, one computes it, and the others
                // wait for it.
                BlockState::Ready(bytes, *sum.get_or_init(|| weightsync_simd::crc64(bytes)))
            }
            _ => BlockState::NotYet,
        }
    }
}

/// Which versions of a model a sender stops serving when another version is about to follow
/// `newest`.
///
/// The oldest of the old versions stays: a slow relay below can finish it, and only one slot is
/// taken by slow relays. Versions that `is_retained` names stay too. They are still some worker's
/// next version, so serving them costs no slot.
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
    // The first of the sorted items is the oldest version.
    old.into_iter().skip(1).collect()
}

/// What one process can serve to relays below it.
pub(crate) struct BlockStore {
    /// The versions of a relay, until they are removed.
    held: Mutex<StoreState>,
    // For new versions, blocks and deltas alike. The waits are few, and each looks for its own.
    changed: Condvar,
    /// Finds a sender's whole versions.
    find: Option<Find>,
    /// What changed between versions.
    deltas: DeltaRing,
    /// How many calls of [`wait_until`](Self::wait_until) have begun.
    #[cfg(test)]
    pub(super) waits: std::sync::atomic::AtomicUsize,
}

/// Finds a version, and pins it.
pub(crate) type Find = Box<dyn Fn(Item) -> Option<Snapshot> + Send + Sync>;

#[derive(Debug, Default)]
struct StoreState {
    held: BTreeMap<Item, Arc<HeldVersion>>,
    /// The versions that are being served, so that their checksums are computed once.
    // Weak, so that a version that nobody fetches any more keeps no slot.
    served: HashMap<Item, Weak<HeldVersion>>,
    refused: Vec<(Item, Instant)>,
    /// For each model, a version whose transfer broke off, and since when it is kept for the child
    /// to come back.
    broken_off: BTreeMap<usize, (Item, Arc<HeldVersion>, Instant)>,
    closed: bool,
}

impl fmt::Debug for BlockStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockStore")
            .field("held", &self.state().held.keys())
            .finish_non_exhaustive()
    }
}

impl BlockStore {
    /// The store of a relay: empty at first.
    pub(crate) fn of_relay() -> Self {
        Self::with(None)
    }

    /// The store of a sender.
    pub(crate) fn of_sender(find: Find) -> Self {
        Self::with(Some(find))
    }

    fn with(find: Option<Find>) -> Self {
        Self {
            held: Mutex::default(),
            changed: Condvar::new(),
            find,
            deltas: DeltaRing::default(),
            #[cfg(test)]
            waits: Default::default(),
        }
    }

    /// What changed between versions.
    pub(crate) fn deltas(&self) -> &DeltaRing {
        &self.deltas
    }

    /// Whether the store serves nothing any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// A version, if it is here, even in part.
    pub(crate) fn get(&self, item: Item) -> Option<Arc<HeldVersion>> {
        let mut state = self.state();
        if state.closed {
            return None;
        }
        let known = state.held.get(&item).cloned();
        let known = known.or_else(|| state.served.get(&item)?.upgrade());
        // A revoked version may be found again: a worker may have come to need it since.
        let usable = known.filter(|held| !held.is_revoked());
        if usable.is_some() {
            return usable;
        }
        if self.deltas.is_spoiled(item) {
            return None;
        }
        // Under the lock, so that two children of one version share what is computed for it.
        let held = Arc::new(HeldVersion::whole(self.find.as_ref()?(item)?));
        state.served.retain(|_, held| held.strong_count() > 0);
        state.served.insert(item, Arc::downgrade(&held));
        Some(held)
    }

    /// Whether this is a sender's store. A sender knows at once whether a version will come.
    pub(crate) fn is_sender(&self) -> bool {
        self.find.is_some()
    }

    /// Registers a version, or replaces what was registered for it.
    pub(crate) fn put(&self, item: Item, held: Arc<HeldVersion>) {
        self.state().held.insert(item, held);
        self.changed.notify_all();
    }

    /// Stops serving a version; threads that serve it now notice.
    pub(crate) fn remove(&self, item: Item) {
        if let Some(held) = self.state().held.remove(&item) {
            held.revoked.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }

    /// Stops serving the versions of a model that are [`replaced`] when another follows
    /// `newest`. Children that fetch them lose their connection. They ask again, for the versions
    /// that they are to run by then.
    pub(crate) fn keep_oldest(&self, model: usize, newest: Version) {
        let Some(find) = &self.find else {
            return;
        };
        let mut state = self.state();
        let waits = state.broken_off.get(&model).map(|(item, ..)| *item);
        let all = state.served.iter();
        let all: BTreeMap<Item, Arc<HeldVersion>> = all
            .filter_map(|(item, held)| Some((*item, held.upgrade()?)))
            .collect();
        // A version that is kept only for a child that may come back.
        // Of the two owners one is `broken_off`, and the other is `all`.
        let is_left = |item: &Item| waits == Some(*item) && Arc::strong_count(&all[item]) == 2;
        let is_kept = |item| find(item).is_some();
        let served = all.keys().copied().filter(|item| !is_left(item));
        let is_old = |item: Item| item.model == model && item.version < newest && !is_kept(item);
        let is_served = served.clone().any(is_old);
        let replaced = replaced(served, model, newest, is_kept);
        let is_late = |since: Instant| since.elapsed() >= COMES_AGAIN;
        let over = |(item, _, since): &mut (Item, Arc<HeldVersion>, Instant)| {
            is_late(*since) || replaced.contains(item) || is_left(item) && is_served
        };
        // Replaced, too late, or not the one old version that is kept anyway.
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

    /// Notes that a connection broke while it sent this version. The sender keeps the version for a
    /// moment, unless it serves another old one, so that the child can come back and resume. Of two
    /// such versions it keeps the older, because the slower child needs it.
    pub(super) fn broke_off(&self, item: Item, held: Arc<HeldVersion>) {
        let mut state = self.state();
        if !self.is_sender() || state.closed || held.is_revoked() {
            return;
        }
        let waits = state.broken_off.get(&item.model);
        let is_older = |(of, _, since): &(Item, Arc<HeldVersion>, Instant)| {
            of.version < item.version && since.elapsed() < COMES_AGAIN
        };
        if !waits.is_some_and(is_older) {
            let now = Instant::now();
            state.broken_off.insert(item.model, (item, held, now));
        }
    }

    /// Stops serving a version that differs from the published one.
    pub(crate) fn spoil(&self, item: Item) {
        // Before the version is taken out: `get` must not find it once more.
        self.deltas.spoil(item);
        let mut state = self.state();
        state.broken_off.remove(&item.model);
        if let Some(held) = state.served.remove(&item).and_then(|held| held.upgrade()) {
            held.cut_off();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Tells waiting fetches that a version will not come.
    pub(crate) fn refuse(&self, item: Item) {
        self.refuse_at(item, Instant::now());
    }

    fn refuse_at(&self, item: Item, now: Instant) {
        let mut state = self.state();
        // Fetches that wait for their turn read this list only when their turn comes. None waits
        // longer than `PATIENCE`.
        state
            .refused
            .retain(|(of, at)| *of != item && now.duration_since(*at) < PATIENCE);
        state.refused.push((item, now));
        drop(state);
        self.changed.notify_all();
    }

    /// Whether the version was refused since then, or the store is closed.
    pub(crate) fn is_refused(&self, item: Item, since: Instant) -> bool {
        let state = self.state();
        state.closed
            || state
                .refused
                .iter()
                .any(|(refused, at)| *refused == item && *at >= since)
    }

    /// Wakes all waits here: a block or a delta has arrived.
    pub(crate) fn notify(&self) {
        // Taking the lock closes a race: a thread that has just found nothing is waiting by now.
        drop(self.state());
        self.changed.notify_all();
    }

    /// Waits until `condition` holds, the store is closed, or `patience` is over. `condition` is
    /// checked after each [`notify`](Self::notify).
    pub(crate) fn wait_until(&self, condition: impl Fn() -> bool, patience: Duration) {
        #[cfg(test)]
        self.waits.fetch_add(1, Ordering::Release);
        // Checked under the lock that `notify` takes, so no change is missed between the check and
        // the wait.
        let waits = |state: &mut StoreState| !state.closed && !condition();
        let waited = self
            .changed
            .wait_timeout_while(self.state(), patience, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits up to `pause` until a version is registered.
    pub(crate) fn wait_for(&self, item: Item, pause: Duration) {
        let state = self.state();
        if state.closed || state.held.contains_key(&item) {
            return;
        }
        drop(self.changed.wait_at_most(state, pause));
    }

    /// The state of a block; waits up to `pause` if it has not arrived.
    pub(crate) fn block<'a>(
        &self,
        held: &'a HeldVersion,
        index: usize,
        pause: Duration,
    ) -> BlockState<'a> {
        // Most blocks are here, and need no lock.
        if let known @ (BlockState::Ready(..) | BlockState::Gone) = held.state(index) {
            return known;
        }
        let state = self.state();
        if state.closed {
            return BlockState::Gone;
        }
        // The block may have arrived before the lock was taken.
        if let known @ (BlockState::Ready(..) | BlockState::Gone) = held.state(index) {
            return known;
        }
        drop(self.changed.wait_at_most(state, pause));
        held.state(index)
    }

    /// Stops serving everything, and ends every wait here.
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
        // Each change is one insertion or removal, so the state is valid after a panic.
        self.held.locked()
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
        let (store, done) = (BlockStore::of_relay(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (store, done) = (&store, &done);
            let wait = |patience| {
                let looked = looked.clone();
                let is_done = move || {
                    let _ = looked.send(());
                    done.load(Ordering::Acquire)
                };
                scope.spawn(move || store.wait_until(is_done, patience))
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
        let (store, since) = (BlockStore::of_relay(), Instant::now());
        let [first, second] = [1, 2].map(|version| Item {
            model: 0,
            version: Version(version),
        });
        store.refuse_at(first, since);
        store.refuse_at(second, since + PATIENCE / 2);
        assert!(store.is_refused(first, since));
        // Only the last refusal of a version is remembered, so it counts.
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
