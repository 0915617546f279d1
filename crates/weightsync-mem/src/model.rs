//! A model of the segment: its description, and the mappings of its pages.

use std::sync::{Arc, OnceLock};

use weightsync_core::Layout;

use crate::error::{Error, unexpected};
use crate::map::{MemoryMap, OwnedFile};
use crate::shared::ModelPage;
use crate::spans::{SlotShape, Spans};

/// The longest encoded layout, in bytes.
const MAX_LAYOUT_BYTES: u64 = 1 << 30;

/// The longest note of a model, in bytes.
pub const MAX_NOTE_BYTES: usize = 16 << 20;

/// One model of a segment, as described by its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDescription {
    /// The layout of all its versions.
    pub layout: Layout,
    /// Facts that a reader needs in addition to the layout, passed on unchanged; at most
    /// [`MAX_NOTE_BYTES`]. This crate does not read it.
    pub note: Vec<u8>,
}

/// A model at one end.
#[derive(Debug)]
pub(crate) struct SegmentModel {
    /// Its index in the segment.
    pub(crate) index: usize,
    pub(crate) layout: Layout,
    spans: OnceLock<Spans>,
    pub(crate) page: Arc<MemoryMap>,
}

impl SegmentModel {
    pub(crate) fn new(index: usize, layout: &Layout, page: Arc<MemoryMap>) -> Self {
        Self {
            index,
            layout: layout.clone(),
            spans: OnceLock::new(),
            page,
        }
    }

    pub(crate) fn page(&self) -> &ModelPage {
        self.page.table()
    }

    /// The spans of its image, which only an end that writes one needs.
    pub(crate) fn spans(&self) -> &Spans {
        self.spans.get_or_init(|| Spans::new(&self.layout))
    }

    pub(crate) fn shape(&self) -> SlotShape {
        SlotShape::of(&self.layout)
    }

    pub(crate) fn slot_bytes(&self) -> usize {
        self.shape().slot_bytes()
    }
}

/// The file that carries a model's description: the layout, then the note.
#[derive(Debug)]
pub(crate) struct DescriptionFile {
    pub(crate) file: OwnedFile,
    pub(crate) layout_bytes: u64,
    pub(crate) note_bytes: u64,
}

impl DescriptionFile {
    pub(crate) fn new(spec: &ModelDescription) -> Result<Self, Error> {
        let mut bytes = spec.layout.encode();
        let layout_bytes = bytes.len() as u64;
        bytes.extend_from_slice(&spec.note);
        let file = OwnedFile::new("weightsync-model", bytes.len().max(1))?;
        file.fill(&bytes);
        Ok(Self {
            file,
            layout_bytes,
            note_bytes: spec.note.len() as u64,
        })
    }

    /// Reads a peer's description. The peer states both lengths.
    pub(crate) fn read(
        fd: std::os::fd::BorrowedFd<'_>,
        layout_bytes: u64,
        note_bytes: u64,
    ) -> Result<ModelDescription, Error> {
        // Both lengths come from outside, so they are bounded before anything is allocated.
        if layout_bytes > MAX_LAYOUT_BYTES || note_bytes > MAX_NOTE_BYTES as u64 {
            return Err(unexpected(
                "a layout of at most 1 GiB and a note of at most 16 MiB",
                format!("{layout_bytes} and {note_bytes} bytes"),
            ));
        }
        let len = (layout_bytes + note_bytes) as usize;
        // A copy: the sender's own mapping can still write the file while this end parses it.
        let mut bytes = MemoryMap::of_peer(fd, len.max(1))?.copy_out(len);
        let note = bytes.split_off(layout_bytes as usize);
        let layout = Layout::decode(&bytes)?;
        Ok(ModelDescription { layout, note })
    }
}
