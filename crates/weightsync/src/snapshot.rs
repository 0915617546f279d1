//! What a worker holds: one whole version.

use std::path::Path;

use weightsync_core::{Digest, Layout, ModelId, Run, Version};

use crate::error::{Error, Result};
use crate::load::TensorView;
use crate::safetensors_file;
use crate::tensors::{Element, typed};

/// One whole version of a model, read in place.
///
/// **Guarantee.** It does not change while it (or a clone) is held, whatever
/// the sender does and also after its death. Holding one costs the sender one
/// slot; a worker that wants its own copy loads it and lets go.
#[derive(Clone, Debug)]
pub struct Snapshot {
    model: ModelId,
    held: weightsync_mem::Snapshot,
}

impl Snapshot {
    pub(crate) fn new(model: ModelId, held: weightsync_mem::Snapshot) -> Self {
        Self { model, held }
    }

    /// The model it is of.
    pub fn model(&self) -> &ModelId {
        &self.model
    }

    /// Its number in the run.
    pub fn version(&self) -> Version {
        self.held.version()
    }

    /// The run it belongs to.
    pub fn run(&self) -> Run {
        self.held.run()
    }

    /// Names, dtypes and shapes.
    pub fn layout(&self) -> &Layout {
        self.held.layout()
    }

    /// One tensor.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let index = self
            .layout()
            .index_of(name)
            .ok_or_else(|| Error::NoSuchTensor {
                name: name.into(),
                known: self
                    .layout()
                    .tensors()
                    .iter()
                    .map(|tensor| tensor.name.clone())
                    .collect(),
            })?;
        Ok(self.view(index))
    }

    /// One tensor's elements, in place.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`], or [`Error::WrongDtype`] if they are no `T`.
    pub fn slice<T: Element>(&self, name: &str) -> Result<&[T]> {
        let view = self.tensor(name)?;
        typed(name, view.dtype(), view.bytes())
    }

    /// Every tensor, in layout order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        (0..self.layout().len()).map(|index| self.view(index))
    }

    /// The digest of the bytes as this process sees them: one pass over them.
    pub fn digest(&self) -> Digest {
        self.held.digest()
    }

    /// The digest as the sender saw them, if it has made it (see
    /// [`SenderSetup::digest`](crate::SenderSetup::digest)).
    pub fn published_digest(&self) -> Option<Digest> {
        self.held.published_digest()
    }

    /// Compares the bytes with the checksums the sender made while it copied.
    /// False if it was not asked to make any.
    ///
    /// # Errors
    ///
    /// Naming the first chunk that differs.
    pub fn verify_checksums(&self) -> Result<bool> {
        Ok(self.held.verify_checksums()?)
    }

    /// Writes the version as a safetensors file, whole or not at all, with its
    /// model, version and digest in the file's metadata. Returns the digest.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn save_safetensors(&self, path: impl AsRef<Path>) -> Result<Digest> {
        safetensors_file::save(self, path.as_ref())
    }

    fn view(&self, index: usize) -> TensorView<'_> {
        let tensor = &self.layout().tensors()[index];
        TensorView::new(
            &tensor.name,
            tensor.dtype,
            &tensor.shape,
            self.held.tensor_bytes(index),
        )
    }
}
