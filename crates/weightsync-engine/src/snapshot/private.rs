//! A version that the worker may write in, without anybody else seeing it.

use std::fmt;
use std::sync::atomic::AtomicU64;

use weightsync_core::{Layout, ModelId, Version};

use super::{Snapshot, SnapshotMemory};
use crate::error::Result;

/// Memory with a whole version in it, that may be written in place: what models
/// that take addresses (torch's, say) are bound to.
///
/// **Guarantee.** What is written reaches neither the sender nor another process
/// nor a [`Snapshot`] nor a later version: it is dropped with the last view of
/// the version in this worker. Until then the version is held, as by a snapshot.
/// In a forked child the memory is not mapped.
///
/// Of a version in shared memory nothing is copied but the pages that are
/// written, and all views of it here share those; the first views, one in each
/// slot, take tens of milliseconds for 512 MiB to map it. Of any other version
/// (of a worker that keeps copies of its own, say) this is a copy, made in fresh
/// memory: one that is loaded into memory that is there already costs less.
#[derive(Debug)]
pub struct PrivateView {
    snapshot: Snapshot,
    place: ViewMemory,
}

#[derive(Debug)]
enum ViewMemory {
    Slot(weightsync_mem::PrivateMapping),
    Copy(Vec<AtomicLine>),
}

/// Atomics, because they may be written through a shared reference; as wide as
/// the image's alignment.
#[repr(C, align(64))]
struct AtomicLine([AtomicU64; 8]);

/// Tensors of a version that a worker has written in place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// The model.
    pub model: ModelId,
    /// The version.
    pub version: Version,
    /// The tensors that differ from what was sent, in layout order.
    pub tensors: Vec<String>,
}

impl Snapshot {
    /// The version where it may be written in place; see [`PrivateView`]. When it
    /// is dropped, a warning names the tensors that were.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use weightsync::{Expect, ReceiverSetup, SenderSetup, Tensors};
    /// # let mut weights = Tensors::new();
    /// # weights.insert("bias", [2], [0.0_f32, 1.0])?;
    /// # let setup = SenderSetup::new("policy", &weights)?;
    /// # let info = setup.init_info();
    /// # let worker = std::thread::spawn(move || -> weightsync::Result<weightsync::Receiver> {
    /// # let mut receiver = ReceiverSetup::new(info, 0).connect(Some(Duration::from_secs(10)))?;
    /// let snapshot = receiver.recv()?;
    /// let view = snapshot.private()?;
    /// let bias = view.layout().tensor("bias").unwrap().range;
    /// let place = view.as_ptr().wrapping_add(bias.offset as usize);
    /// // ... which is for a tensor that keeps the view as long as it lives.
    /// # assert!(!place.is_null());
    /// # drop(view);
    /// # // Who has left is not counted.
    /// # Ok(receiver) });
    /// # let sender = setup.connect(&weights, Expect::Count(1), Some(Duration::from_secs(10)))?;
    /// # worker.join().unwrap()?;
    /// # drop(sender);
    /// # Ok::<(), weightsync::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Memory`](crate::Error::Memory) if it cannot be mapped, or in a
    /// forked child.
    pub fn private(&self) -> Result<PrivateView> {
        self.private_with(|written| tracing::warn!("{written}"))
    }

    /// The same, with something else in place of the warning. Of several views of
    /// a version in shared memory it is the newest one's that is called, once the
    /// last has gone, and if any tensor has other bytes then. Of a copy nothing is
    /// known.
    ///
    /// It is called by the thread that drops the view, or soon after by the thread that
    /// watches the sender: it must not wait for anybody.
    ///
    /// # Errors
    ///
    /// As [`private`](Self::private).
    pub fn private_with(
        &self,
        written: impl FnOnce(Written) + Send + 'static,
    ) -> Result<PrivateView> {
        let place = match &self.held {
            SnapshotMemory::Slot(slot) => {
                // Clones: the callback may run after this snapshot is dropped.
                let (model, layout) = (self.model.clone(), slot.layout().clone());
                let version = self.version();
                let view = slot.private_with(move |tensors| {
                    let name = |index: &usize| layout.tensors()[*index].name.clone();
                    written(Written {
                        model,
                        version,
                        tensors: tensors.iter().map(name).collect(),
                    });
                });
                ViewMemory::Slot(view?)
            }
            SnapshotMemory::Own(own) => ViewMemory::Copy(lines(own.image.bytes())),
        };
        Ok(PrivateView {
            snapshot: self.clone(),
            place,
        })
    }
}

impl PrivateView {
    /// The image's first byte: to be read and written for [`len`](Self::len) bytes
    /// while this lives; a tensor's place in it is its
    /// [`range`](crate::TensorSpec::range) in the layout. Aligned to 64 bytes, as
    /// every tensor then is.
    ///
    /// # Panics
    ///
    /// In a forked child, if the version is in shared memory.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.place {
            ViewMemory::Slot(view) => view.as_ptr(),
            ViewMemory::Copy(lines) => lines.as_ptr().cast::<u8>().cast_mut(),
        }
    }

    /// Bytes of the image, padding included.
    pub fn len(&self) -> usize {
        self.layout().bytes() as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether nothing was copied: it shares the memory that the sender wrote.
    pub fn is_shared(&self) -> bool {
        matches!(self.place, ViewMemory::Slot(_))
    }

    /// Names, dtypes, shapes and places of the tensors that travel; see
    /// [`Snapshot::layout`].
    pub fn layout(&self) -> &Layout {
        self.snapshot.layout()
    }

    /// The version as it was sent.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let Self {
            model,
            version,
            tensors,
        } = self;
        let names = tensors[..tensors.len().min(SHOWN)].join(", ");
        write!(
            f,
            "this worker has written in place what was sent to it: {names}"
        )?;
        if let Some(more @ 1..) = tensors.len().checked_sub(SHOWN) {
            write!(f, " and {more} more")?;
        }
        write!(
            f,
            " of {model} {version}; no other worker saw it, and it is lost with that version. Copy \
             what the worker changes into its own memory"
        )
    }
}

impl fmt::Debug for AtomicLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

/// A copy. The image is a whole number of lines.
fn lines(image: &[u8]) -> Vec<AtomicLine> {
    let (lines, rest) = image.as_chunks::<64>();
    debug_assert!(rest.is_empty(), "{} bytes too many", rest.len());
    let line = |line: &[u8; 64]| {
        let words = line.as_chunks::<8>().0;
        AtomicLine(std::array::from_fn(|at| {
            AtomicU64::new(u64::from_ne_bytes(words[at]))
        }))
    };
    lines.iter().map(line).collect()
}
