//! The last step of the journey: handing tensors to the worker's model.

use std::borrow::Cow;

use weightsync_core::{Dtype, Layout};

use crate::error::Result;
use crate::snapshot::Snapshot;
use crate::tensors::{Element, typed_copy};

/// Something that weights can be loaded into: the worker's model.
///
/// [`Receiver::loading`](crate::Receiver::loading) calls it. What is
/// handed over has been compared with [`layout`](Self::layout), so names, dtypes
/// and shapes fit; the sender is told that a version is applied only once
/// `bind` or `load` has returned.
pub trait WeightLoader {
    /// Names, dtypes and shapes the model has room for.
    ///
    /// # Errors
    ///
    /// If the model cannot be asked.
    fn layout(&self) -> Result<Layout>;

    /// Takes the sender's names, dtypes and shapes, if the model has none of its
    /// own yet: true if it did. A model that has them says false and is left
    /// alone; its [`layout`](Self::layout) is then compared.
    ///
    /// # Errors
    ///
    /// If it cannot have this layout; the model should then be as before.
    fn shape(&mut self, _layout: &Layout) -> Result<bool> {
        Ok(false)
    }

    /// Takes the version itself, and serves from it: true if it did, and then
    /// [`load`](Self::load) is not called. It keeps a clone, or a
    /// [private view](Snapshot::private), for as long as it serves from it.
    ///
    /// What is handed over has been compared as for `load`. Its
    /// [attributes](Snapshot::attributes) say which tensors are tied, and which
    /// are buffers. A load of several models that fails goes back to the version
    /// before by handing that over once more.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load); then that is not called.
    fn bind(&mut self, _snapshot: &Snapshot) -> Result<bool> {
        Ok(false)
    }

    /// Takes over the elements of every tensor.
    ///
    /// # Errors
    ///
    /// If it cannot; the model should then be as before. The worker goes on
    /// with the version it had, and the sender's report carries the words.
    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()>;
}

/// One tensor to look at: contiguous and row-major.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: &'a [u64],
    bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    pub(crate) fn new(name: &'a str, dtype: Dtype, shape: &'a [u64], bytes: &'a [u8]) -> Self {
        Self {
            name,
            dtype,
            shape,
            bytes,
        }
    }

    /// The same tensor under another name.
    pub(crate) fn renamed(self, name: &'a str) -> Self {
        Self { name, ..self }
    }

    /// Its dotted name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The type of an element.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Length of each dimension in elements, outermost first.
    pub fn shape(&self) -> &'a [u64] {
        self.shape
    }

    /// Its elements as little-endian bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Its elements; borrowed, because every source here aligns them.
    ///
    /// # Errors
    ///
    /// [`Error::WrongDtype`](crate::Error::WrongDtype) if they are no `T`.
    pub fn elements<T: Element>(&self) -> Result<Cow<'a, [T]>> {
        typed_copy(self.name, self.dtype, self.bytes)
    }
}
