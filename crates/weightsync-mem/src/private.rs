//! A private view of a version: its writes are visible to no other process.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use weightsync_core::Layout;

use crate::map::MemoryMap;
use crate::snapshot::Snapshot;
use crate::threads::LockExt as _;
use crate::wait::Doorbell;

/// Up to this size, the thread that drops the last view sweeps the slot itself: that costs less
/// than waking another thread.
const AT_ONCE: usize = 1 << 20;

/// A snapshot that may be written in place: what is not written is read where
/// it lies, what is written is copied, a page at a time, for this process alone.
///
/// **Guarantee.** Nothing that is written through it reaches the sender, another
/// process, a [`Snapshot`], or a later version; it is dropped with the last view
/// of the version here. Until then all views of it here share what was written.
/// A view holds its version as a snapshot does, for as long as it lives, also
/// after reader and sender have gone. In a forked child the memory is not mapped.
///
/// The first view in a slot maps it (some 50 ms for 512 MiB); after that no view
/// of it costs a page fault, but for what is written. When the last view of a
/// large version goes, the reader's watch finds what was written, and the slot is
/// given back after that, a few milliseconds later.
#[derive(Debug)]
pub struct PrivateMapping {
    snapshot: Snapshot,
    map: Arc<MemoryMap>,
}

impl PrivateMapping {
    pub(crate) fn new(snapshot: Snapshot, map: Arc<MemoryMap>) -> Self {
        Self { snapshot, map }
    }

    /// The image's first byte: aligned to a page, readable and writable for [`len`](Self::len)
    /// bytes while this lives.
    ///
    /// # Panics
    ///
    /// In a forked child, where the memory is not mapped.
    pub fn as_ptr(&self) -> *mut u8 {
        if let Err(error) = self.map.usable() {
            panic!("{error}");
        }
        self.map.as_ptr()
    }

    /// Bytes of the image, with padding.
    pub fn len(&self) -> usize {
        self.layout().bytes() as usize
    }

    /// Whether the image has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Names, dtypes, shapes and offsets of the tensors.
    pub fn layout(&self) -> &Layout {
        self.snapshot.layout()
    }

    /// The version as it was sent.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }
}

impl Drop for PrivateMapping {
    fn drop(&mut self) {
        // In a forked child nothing is mapped, and the lock may never be released.
        if self.map.usable().is_err() || !self.snapshot.slot().take_back() {
            return;
        }
        // The clone keeps the slot pinned until it is swept. Otherwise pages that are copies of
        // this version would hide the next version in the slot.
        let due = match self.map.len() <= AT_ONCE {
            true => Some(self.snapshot.clone()),
            false => self.snapshot.sweeps().put(self.snapshot.clone()),
        };
        if let Some(snapshot) = due {
            snapshot.slot().sweep(&snapshot);
        }
    }
}

/// Versions without a view whose slots are to be swept by a thread that has time. They stay pinned
/// until then.
#[derive(Debug)]
pub(crate) struct Sweeps {
    /// `None` once the thread has ended.
    due: Mutex<Option<Vec<Snapshot>>>,
    call: Arc<Doorbell>,
}

impl Sweeps {
    /// Sweeps for the thread that listens to this bell.
    pub(crate) fn new(call: Arc<Doorbell>) -> Self {
        Self {
            due: Mutex::new(Some(Vec::new())),
            call,
        }
    }

    /// Sweeps everything that is due.
    pub(crate) fn work(&self) {
        let due = self.due().as_mut().map(std::mem::take);
        sweep(due.unwrap_or_default());
    }

    /// Sweeps everything that is due, and accepts nothing more.
    pub(crate) fn end(&self) {
        // From here on `put` gives every version back to the thread that drops the view.
        let due = self.due().take();
        sweep(due.unwrap_or_default());
    }

    fn due(&self) -> MutexGuard<'_, Option<Vec<Snapshot>>> {
        // Each change is one push or take, so the list is valid after a panic.
        self.due.locked()
    }
}

fn sweep(due: Vec<Snapshot>) {
    for snapshot in due {
        snapshot.slot().sweep(&snapshot);
    }
}

/// The sweeps of a reader, which may have gone; or of none.
#[derive(Clone, Debug, Default)]
pub(crate) struct SweepsOf(pub(crate) Weak<Sweeps>);

impl SweepsOf {
    /// Hands a version over to be swept; returns it if no thread will do that.
    fn put(&self, snapshot: Snapshot) -> Option<Snapshot> {
        let Some(sweeps) = self.0.upgrade() else {
            return Some(snapshot);
        };
        match &mut *sweeps.due() {
            Some(due) => due.push(snapshot),
            None => return Some(snapshot),
        }
        sweeps.call.ring();
        None
    }
}
