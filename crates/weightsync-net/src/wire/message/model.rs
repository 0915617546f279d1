//! A model's layout and note, in pieces.

use super::*;

/// What a sender says of one of its models: a [`FromRoot::Model`], then the layout and behind it
/// the note, in [`FromRoot::Part`]s. They are made one at a time.
///
/// # Errors
///
/// [`MessageError`] if the layout or the note is longer than they may be, or the index too high.
pub fn model_messages<'a>(
    index: u8,
    layout: &'a [u8],
    note: &'a [u8],
) -> Result<impl Iterator<Item = FromRoot> + 'a, MessageError> {
    let (layout_bytes, note_bytes) = (layout.len() as u64, note.len() as u64);
    // So that what is sent is what an assembler takes.
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

/// The layout and note of a model, out of the parts that come.
///
/// **Guarantee.** The lengths are bounded before anything is allocated, and what is allocated is at
/// most twice what has come.
#[derive(Debug)]
pub struct ModelAssembler {
    index: u8,
    layout_bytes: usize,
    total: usize,
    came: Vec<u8>,
}

/// A model's layout and note, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssembledModel {
    /// The model's index.
    pub index: u8,
    /// The encoded layout, as it came.
    pub layout: Vec<u8>,
    /// The note, as it came.
    pub note: Vec<u8>,
}

impl ModelAssembler {
    /// Begins with what a [`FromRoot::Model`] says.
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

    /// How many bytes have not come yet.
    pub fn missing(&self) -> usize {
        self.total - self.came.len()
    }

    /// Takes the bytes of a [`FromRoot::Part`].
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLong`] if they are more than are missing; nothing is taken then.
    pub fn push(&mut self, part: &[u8]) -> Result<(), MessageError> {
        let missing = self.missing();
        within("bytes of a part", part.len(), missing)?;
        if self.came.capacity() - self.came.len() < part.len() {
            let more = part.len().max(self.came.len()).min(missing);
            self.came.reserve_exact(more);
        }
        self.came.extend_from_slice(part);
        Ok(())
    }

    /// The model, if all of it has come; otherwise the assembler as it was.
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
