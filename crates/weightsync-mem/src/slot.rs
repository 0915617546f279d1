//! A slot at one end. The slot's memory file is mapped shared, and also privately once a caller
//! wants a view that it can write.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

use weightsync_core::Version;

use crate::error::Error;
use crate::map::{MemoryMap, OwnedFile};
use crate::pagemap::PageMap;
use crate::snapshot::Snapshot;
use crate::threads::LockExt as _;

/// Receives the indices of the written tensors.
pub(crate) type Written = Box<dyn FnOnce(&[usize]) + Send>;

/// A slot's memory.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) fd: OwnedFd,
    pub(crate) map: Arc<MemoryMap>,
    private: Mutex<Private>,
    note: Mutex<Note>,
}

/// The version that is whole in this slot, if it arrived in pieces; none otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Note {
    pub(crate) version: Version,
    /// How often the noted version turned out to be wrong.
    forgotten: u64,
}

/// The private mapping.
///
/// **Invariant.** Whenever the first view takes it, every page of it is the file's: nothing that
/// was written through it is left.
#[derive(Default)]
struct Private {
    /// Made once, and used for every version in this slot.
    map: Option<Arc<MemoryMap>>,
    /// Kept open too, because opening it takes longer than scanning a small mapping.
    pages: Option<PageMap>,
    views: usize,
    /// Views have ended since it was last swept.
    used: bool,
    written: Option<Written>,
}

impl Slot {
    /// A sender's slot; stops like [`OwnedFile::new_unless`].
    pub(crate) fn new(bytes: usize, stop: &AtomicBool) -> Result<Self, Error> {
        let OwnedFile { fd, map } = OwnedFile::new_unless("weightsync-slot", bytes, stop)?;
        Ok(Self::with(fd, map))
    }

    /// A reader's slot, as [`MemoryMap::of_peer`]. The file stays open for the private mapping,
    /// which few readers need.
    pub(crate) fn of_peer(fd: OwnedFd, bytes: usize) -> Result<Self, Error> {
        let map = MemoryMap::of_peer(fd.as_fd(), bytes)?;
        Ok(Self::with(fd, Arc::new(map)))
    }

    fn with(fd: OwnedFd, map: Arc<MemoryMap>) -> Self {
        Self {
            fd,
            map,
            private: Mutex::default(),
            note: Mutex::default(),
        }
    }

    /// The slot may be written from now on; returns the version noted until now.
    pub(crate) fn let_go(&self) -> Note {
        let mut note = self.noted();
        let before = *note;
        note.version = Version::NONE;
        before
    }

    /// Notes a version that is whole here, unless notes were forgotten since it was begun.
    pub(crate) fn note(&self, version: Version, since: Note) {
        let mut note = self.noted();
        if note.forgotten == since.forgotten {
            note.version = version;
        }
    }

    /// Forgets which version is here, or arrives here now.
    pub(crate) fn forget(&self) {
        let mut note = self.noted();
        note.version = Version::NONE;
        note.forgotten += 1;
    }

    fn noted(&self) -> MutexGuard<'_, Note> {
        // Both numbers are set together, so the note is valid after a panic.
        self.note.locked()
    }

    /// Lends the private mapping to one more view of a version that the caller has pinned. The
    /// first view finds none of what earlier ones wrote.
    pub(crate) fn lend(
        &self,
        snapshot: &Snapshot,
        written: Option<Written>,
    ) -> Result<Arc<MemoryMap>, Error> {
        self.map.usable()?;
        let mut private = self.private();
        // Views that have ended may not be swept yet. What they wrote must not show in a new first
        // view.
        let swept = private.sweep(snapshot);
        let map = match &private.map {
            Some(map) => map.clone(),
            None => {
                let map = Arc::new(MemoryMap::private(self.fd.as_fd(), self.map.len())?);
                // Without it, the whole mapping counts as written at each sweep.
                private.pages = PageMap::open().ok();
                private.map.insert(map).clone()
            }
        };
        private.views += 1;
        // The views of one version share what is written, so one function is told.
        private.written = written.or(private.written.take());
        // The function runs without the lock: it may use the version.
        drop(private);
        swept.notify();
        Ok(map)
    }

    /// Returns it from one view. True if that was the last: it must then be swept before the
    /// version's pin is removed.
    pub(crate) fn take_back(&self) -> bool {
        let mut private = self.private();
        private.views -= 1;
        // Also if other views are left: the last of them does not know what this one wrote.
        private.used = true;
        private.views == 0
    }

    /// Drops everything written through the private mapping, unless a new view has it or it is
    /// swept already.
    pub(crate) fn sweep(&self, snapshot: &Snapshot) {
        let swept = self.private().sweep(snapshot);
        swept.notify();
    }

    fn private(&self) -> MutexGuard<'_, Private> {
        // A panic can leave it unswept; `used` then still says so.
        self.private.locked()
    }
}

/// The function to tell which tensors were written, once no lock is held.
#[must_use]
struct Swept(Option<(Written, Vec<usize>)>);

impl Swept {
    fn notify(self) {
        if let Some((written, tensors)) = self.0 {
            // The panic hook reports a panic. This thread has other work, and may be in a drop.
            let _ = catch_unwind(AssertUnwindSafe(|| written(&tensors)));
        }
    }
}

impl Private {
    fn sweep(&mut self, snapshot: &Snapshot) -> Swept {
        // A new view has had the mapping swept already (`lend`), and may have written since.
        if self.views > 0 || !self.used {
            return Swept(None);
        }
        let tensors = match &self.map {
            None => Vec::new(),
            Some(map) => {
                // If the kernel does not tell, everything counts as written.
                let len = map.len();
                let pages = self.pages.as_ref().and_then(|pages| pages.copied(map).ok());
                let pages = pages.unwrap_or_else(|| std::iter::once(0..len).collect());
                // Before the pages are restored, because that drops what was written.
                let tensors = changed(map, snapshot, &pages);
                if !pages.iter().all(|pages| map.restore(pages).is_ok()) {
                    // The memory may be locked. The next view gets a new mapping.
                    self.map = None;
                }
                tensors
            }
        };
        // Last: after a panic above it says that the mapping is still to be swept.
        self.used = false;
        let written = self.written.take().filter(|_| !tensors.is_empty());
        Swept(written.map(|written| (written, tensors)))
    }
}

/// The tensors that differ, on pages that are no longer the file's. A page can hold several tensors
/// of which one was written, so bytes are compared.
fn changed(map: &MemoryMap, snapshot: &Snapshot, pages: &[Range<usize>]) -> Vec<usize> {
    let image = snapshot.bytes();
    let tensors = snapshot.layout().tensors();
    let end = |index: usize| (tensors[index].range.offset + tensors[index].range.len) as usize;
    let mut changed = Vec::new();
    let mut next = 0;
    for pages in pages {
        // Both lists ascend.
        // Tensors that end before these pages end before all later ones, too.
        while next < tensors.len() && end(next) <= pages.start {
            next += 1;
        }
        let mut index = next;
        while index < tensors.len() && (tensors[index].range.offset as usize) < pages.end {
            let start = pages.start.max(tensors[index].range.offset as usize);
            // The part of the tensor on these pages; the `max` keeps an empty tensor's range valid.
            let part = start..pages.end.min(end(index)).max(start);
            if changed.last() != Some(&index) && map.differs(part.start, &image[part]) {
                changed.push(index);
            }
            index += 1;
        }
    }
    changed
}

impl std::fmt::Debug for Private {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Private")
            .field("map", &self.map)
            .field("views", &self.views)
            .field("used", &self.used)
            .finish_non_exhaustive()
    }
}
