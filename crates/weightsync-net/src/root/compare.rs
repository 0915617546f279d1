//! Compares each published version with the one before it, for agents that hold that one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;
use weightsync_engine::transport::{
    CopyOptions, Deadline, Level, Outstanding, Source, Staging, Targets,
};
use weightsync_engine::{Changes, Result, Version, WorkerReport};
use weightsync_mem::{RemoteReaders, Snapshot};

use super::coordinator::CoordinatorEvent;
use crate::agent::Item;
use crate::bulk::{BlockStore, Delta, RING, Rate, Threads};
use crate::scheme::Deltas;

/// One version in this many is scrubbed automatically: each host that gets it is compared with the
/// published bytes.
const SCRUBBED: u64 = 64;

/// Where a sender makes its deltas and keeps them.
#[derive(Clone, Debug)]
pub(super) struct Comparing {
    pub(super) events: mpsc::Sender<CoordinatorEvent>,
    pub(super) remote_readers: RemoteReaders,
    pub(super) store: Arc<BlockStore>,
    pub(super) threads: Arc<Threads>,
    pub(super) deltas: Deltas,
    /// For each model, how many versions were published since the last scrubbed one.
    pub(super) unscrubbed: Arc<[AtomicU64]>,
}

/// Versions that are being published and will be compared with those before them.
#[derive(Debug)]
pub(super) struct Compared<'a> {
    pub(super) inner: Box<dyn Staging + 'a>,
    /// The version before, for each model that has one.
    pub(super) bases: Vec<Snapshot>,
    pub(super) comparing: Comparing,
}

impl Staging for Compared<'_> {
    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        self.inner.tensors_mut(model)
    }

    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        self.inner.tensor_mut(model, index)
    }

    fn write(&mut self, model: usize, sources: &[Source<'_>], options: CopyOptions) -> Result<()> {
        self.inner.write(model, sources, options)
    }

    fn number(&mut self, model: usize, version: Version) -> Result<()> {
        self.inner.number(model, version)
    }

    fn wait_for_late(&mut self) {
        self.inner.wait_for_late();
    }

    fn publish(self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>> {
        let Self {
            inner,
            bases,
            comparing,
        } = *self;
        // From here on, a child that asks for the version waits until it is known whether there is
        // a delta.
        let announced = Announced::new(&comparing.store);
        // An error drops `announced`, and the children that wait go on.
        let published = inner.publish(targets)?;
        let mut made = Vec::new();
        for base in bases {
            let mut versions = published.versions().iter();
            let own = versions.find(|(model, _)| *model == base.model());
            if let Some((model, version)) = own.copied() {
                made.extend(comparing.start(base, Item { model, version }));
            }
        }
        // By now each delta is in the ring, or it is known that there is none.
        drop(announced);
        Ok(Box::new(ComparedPublication {
            inner: published,
            made,
        }))
    }
}

impl Comparing {
    /// The version that the next one is compared with, if it is still here.
    pub(super) fn base(&self, model: usize, version: Version) -> Option<Snapshot> {
        let spoiled = self.store.deltas().is_spoiled(Item { model, version });
        if version.is_none() || spoiled || self.deltas == Deltas::Never {
            return None;
        }
        self.remote_readers.snapshot(model, version).ok().flatten()
    }

    /// Starts a thread that compares a version with the one before it.
    fn start(&self, base: Snapshot, item: Item) -> Option<Arc<Delta>> {
        let found = self.remote_readers.snapshot(item.model, item.version);
        // Already replaced, or no worker is to run it.
        let Some(new) = found.ok().flatten() else {
            // A later delta cannot follow on a version that is not here, so the chain of deltas
            // breaks.
            self.store.deltas().forget(item.model);
            return None;
        };
        // Counted here: version numbers may be the trainer's own, and might never hit a multiple.
        let since = &self.unscrubbed[item.model];
        let due = since.fetch_add(1, Ordering::Relaxed) + 1 >= SCRUBBED;
        // If the coordinator is busy, the next version is kept instead.
        if due
            && self
                .events
                .try_send(CoordinatorEvent::Keep(new.clone()))
                .is_ok()
        {
            since.store(0, Ordering::Relaxed);
        }
        let layout = new.layout();
        let delta = Arc::new(Delta::new(base.version(), item.version, layout));
        let ring = self.store.deltas();
        // Before the thread starts: from here on a child finds the delta, and waits for its spans.
        ring.put(item.model, delta.clone(), layout.bytes() / RING);
        if delta.is_spoiled() {
            // The base was found to be wrong while the new version was written.
            return None;
        }
        let rate = match (self.deltas, ring.rate()) {
            (Deltas::Always, known) => Rate::Any(known),
            (_, Some(known)) => Rate::Known(known),
            (_, None) => Rate::Unknown,
        };
        let (store, threads, own) = (self.store.clone(), self.threads.clone(), delta.clone());
        // The thread owns both pins. They end with it, also if it panics or cannot start.
        let pair = ComparedPair {
            base,
            new,
            _release: ReleaseGuard(own.clone(), store.clone()),
        };
        let work = move || {
            let changed = || store.notify();
            let versions = (&pair.base, &pair.new);
            let ring = store.deltas();
            ring.make(item.model, &own, versions, rate, changed, || {
                threads.is_stopped()
            });
            drop(pair);
        };
        if let Err(error) = self.threads.spawn("delta", work) {
            tracing::warn!("{item:?} is sent whole, because no thread can be started: {error}");
            // Children that wait for a span get it as blocks.
            delta.end();
        }
        Some(delta)
    }
}

/// Two versions being compared. Dropping the pair marks them as released, in every case.
struct ComparedPair {
    base: Snapshot,
    new: Snapshot,
    // Last: fields are dropped in order. So both pins are gone when waiting threads hear of it.
    _release: ReleaseGuard,
}

struct ReleaseGuard(Arc<Delta>, Arc<BlockStore>);

impl Drop for ReleaseGuard {
    fn drop(&mut self) {
        self.0.release();
        self.1.notify();
    }
}

/// A publication, and its changes.
#[derive(Debug)]
struct ComparedPublication {
    inner: Box<dyn Outstanding>,
    made: Vec<Arc<Delta>>,
}

impl Outstanding for ComparedPublication {
    fn versions(&self) -> &[(usize, Version)] {
        self.inner.versions()
    }

    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>> {
        self.inner.settle(level, deadline)
    }

    fn is_settled(&self, level: Level) -> Result<bool> {
        self.inner.is_settled(level)
    }

    fn changes(&self) -> Option<Changes> {
        // The changes of all models or none: a part could be misread as all.
        let all = self.made.len() == self.inner.versions().len();
        all.then(|| self.made.iter().map(|delta| delta.changes()).sum())?
    }

    fn decided(&self) -> Result<Vec<WorkerReport>> {
        self.inner.decided()
    }

    fn late(&self, level: Level) -> Result<()> {
        self.inner.late(level)
    }

    fn give_up(&self) -> Result<()> {
        self.inner.give_up()
    }
}

/// Marks a version as being published while its changes are not known yet.
struct Announced<'a>(&'a BlockStore);

impl<'a> Announced<'a> {
    fn new(store: &'a BlockStore) -> Self {
        store.deltas().announce(true);
        Self(store)
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.0.deltas().announce(false);
        self.0.notify();
    }
}

#[cfg(test)]
mod tests;
