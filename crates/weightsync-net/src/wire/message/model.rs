//! A model's layout and note, in pieces.

use weightsync_link::message::{MessageError, within};

use super::check::check_model;
use super::from_root::FromRoot;
use super::{MAX_LAYOUT, MAX_NOTE, MAX_PART};

/// The messages that describe one of a sender's models: a [`FromRoot::Model`], then
/// [`FromRoot::Part`]s with the layout and, after it, the note. The parts are made one at a time.
///
/// # Errors
///
/// [`MessageError`] if the layout, the note or the index exceeds its limit.
pub fn model_messages<'a>(
    index: u8,
    layout: &'a [u8],
    note: &'a [u8],
) -> Result<impl Iterator<Item = FromRoot> + 'a, MessageError> {
    let (layout_bytes, note_bytes) = (layout.len() as u64, note.len() as u64);
    // Refuses here what an assembler would refuse at the other end.
    ModelAssembler::new(index, layout_bytes, note_bytes)?;
    let model = FromRoot::Model {
        index,
        layout_bytes,
        note_bytes,
    };
    let parts = layout.chunks(MAX_PART).chain(note.chunks(MAX_PART));
    let parts = parts.map(|part| FromRoot::Part { bytes: part.into() });
    Ok(std::iter::once(model).chain(parts))
}

/// Assembles a model's layout and note from parts.
///
/// **Guarantee.** Lengths are bounded before allocation. The memory in use is at most twice the
/// bytes that have arrived.
#[derive(Debug)]
pub struct ModelAssembler {
    index: u8,
    layout_bytes: usize,
    total: usize,
    came: Vec<u8>,
}

/// A model's complete layout and note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssembledModel {
    /// The model's index.
    pub index: u8,
    /// The encoded layout as it arrived.
    pub layout: Vec<u8>,
    /// The note as it arrived.
    pub note: Vec<u8>,
}

impl ModelAssembler {
    /// Begins with the fields of a [`FromRoot::Model`].
    ///
    /// # Errors
    ///
    /// [`MessageError::OutOfRange`] for the index; [`MessageError::TooLong`] above [`MAX_LAYOUT`]
    /// or [`MAX_NOTE`].
    pub fn new(index: u8, layout_bytes: u64, note_bytes: u64) -> Result<Self, MessageError> {
        check_model(index)?;
        let layout_bytes = bounded("bytes of a layout", layout_bytes, MAX_LAYOUT)?;
        let note_bytes = bounded("bytes of a note", note_bytes, MAX_NOTE)?;
        Ok(Self {
            index,
            layout_bytes,
            total: layout_bytes + note_bytes,
            came: Vec::new(),
        })
    }

    /// How many bytes are still missing.
    pub fn missing(&self) -> usize {
        self.total - self.came.len()
    }

    /// Takes the bytes of a [`FromRoot::Part`].
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLong`] if there are more than are missing; nothing is taken then.
    pub fn push(&mut self, part: &[u8]) -> Result<(), MessageError> {
        let missing = self.missing();
        within("bytes of a part", part.len(), missing)?;
        // At most twice what has come, and no more than is missing.
        if self.came.capacity() - self.came.len() < part.len() {
            let more = part.len().max(self.came.len()).min(missing);
            self.came.reserve_exact(more);
        }
        self.came.extend_from_slice(part);
        Ok(())
    }

    /// The model if it is complete; otherwise the assembler unchanged.
    ///
    /// # Errors
    ///
    /// The assembler itself, with [`missing`](Self::missing) above 0.
    pub fn finish(self) -> Result<AssembledModel, Self> {
        if self.missing() > 0 {
            return Err(self);
        }
        let mut layout = self.came;
        let note = layout.split_off(self.layout_bytes);
        Ok(AssembledModel {
            index: self.index,
            layout,
            note,
        })
    }
}

fn bounded(what: &'static str, got: u64, limit: u64) -> Result<usize, MessageError> {
    match usize::try_from(got) {
        Ok(len) if got <= limit => Ok(len),
        _ => Err(MessageError::TooLong { what, got, limit }),
    }
}
