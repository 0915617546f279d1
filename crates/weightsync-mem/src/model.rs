//! A model of the segment: what it looks like, and where its pages are mapped.

use std::sync::{Arc, OnceLock};

use weightsync_core::Layout;

use crate::error::{Error, unexpected};
use crate::map::{Mapping, OwnedFile};
use crate::shared::ModelPage;
use crate::spans::{SlotShape, Spans};

/// The longest encoded layout, in bytes.
const MAX_LAYOUT_BYTES: u64 = 1 << 30;

/// The longest note of a model, in bytes.
pub const MAX_NOTE_BYTES: usize = 16 << 20;

/// One model of a segment, as its sender describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// The layout every version of it follows.
    pub layout: Layout,
    /// Handed to every reader as it is, at most [`MAX_NOTE_BYTES`]: what a
    /// reader must know in addition to the layout. This crate does not look into it.
    pub note: Vec<u8>,
}

/// A model as one end has it.
#[derive(Debug)]
pub(crate) struct Model {
    /// Its place among the models of the segment.
    pub(crate) index: usize,
    pub(crate) layout: Layout,
    spans: OnceLock<Spans>,
    pub(crate) page: Arc<Mapping>,
}

impl Model {
    pub(crate) fn new(index: usize, layout: &Layout, page: Arc<Mapping>) -> Self {
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

    /// How its image is cut: only who writes one asks.
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

/// The file in which a model's description travels: the layout, then the note.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) file: OwnedFile,
    pub(crate) layout_bytes: u64,
    pub(crate) note_bytes: u64,
}

impl Description {
    pub(crate) fn new(spec: &ModelSpec) -> Result<Self, Error> {
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

    /// Reads a peer's description. Both lengths are the peer's words.
    pub(crate) fn read(
        fd: std::os::fd::BorrowedFd<'_>,
        layout_bytes: u64,
        note_bytes: u64,
    ) -> Result<ModelSpec, Error> {
        if layout_bytes > MAX_LAYOUT_BYTES || note_bytes > MAX_NOTE_BYTES as u64 {
            return Err(unexpected(
                "a layout of at most 1 GiB and a note of at most 16 MiB",
                format!("{layout_bytes} and {note_bytes} bytes"),
            ));
        }
        let len = (layout_bytes + note_bytes) as usize;
        let mut bytes = Mapping::of_peer(fd, len.max(1))?.copy_out(len);
        let note = bytes.split_off(layout_bytes as usize);
        let layout = Layout::decode(&bytes)?;
        Ok(ModelSpec { layout, note })
    }
}
