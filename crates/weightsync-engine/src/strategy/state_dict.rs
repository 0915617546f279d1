//! A flat list of tensors by dotted name, with buffers and extra state.

mod sides;

use std::borrow::Cow;
use std::collections::HashMap;

use weightsync_core::{Dtype, Layout, TensorRef};
use zerocopy::IntoBytes;

use super::Strategy;
use crate::attributes::Attributes;
use crate::error::{Error, Result};
use crate::extract::{Extracted, WeightExtractor};
use crate::load::TensorView;
use crate::plain::{ExtraState, Plain, extra_state_name, is_extra_state};
use crate::tensors::{Element, OwnedTensor, Tensors, typed_copy};

/// What a tensor is to its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It is trained.
    #[default]
    Parameter,
    /// It belongs to the model and is not trained: a running mean, a mask.
    Buffer,
}

/// Tensors by dotted name, in the order in which they came: its own, or lent
/// from somewhere else. Next to them the extra state of modules.
///
/// What is lent is only read: loading into it makes it a tensor of its own.
///
/// ```
/// use weightsync::model::{Plain, StateDict};
///
/// let mut weights = StateDict::new();
/// weights.insert("norm.weight", [2], [1.0_f32, 1.0])?;
/// weights.insert("norm.mean", [2], [0.5_f32, 0.25])?;
/// weights.mark_buffer("norm.mean")?;
/// weights.insert_extra_state("norm", Plain::from_iter([("steps", Plain::from(12))]))?;
/// assert_eq!(weights.buffers().collect::<Vec<_>>(), ["norm.mean"]);
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StateDict<'a> {
    entries: Vec<(String, Entry<'a>)>,
    index: HashMap<String, usize>,
}

#[derive(Clone, Debug)]
struct Entry<'a> {
    role: Role,
    held: HeldTensor<'a>,
}

#[derive(Clone, Debug)]
enum HeldTensor<'a> {
    Own(OwnedTensor),
    Lent(TensorRef<'a>),
    Extra { state: ExtraState, shape: [u64; 1] },
}

impl<'a> StateDict<'a> {
    /// No tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Zeros of a layout: a worker's own copy to load into.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`] if the attributes name a buffer it lacks.
    pub fn zeros(layout: &Layout, attributes: &Attributes) -> Result<Self> {
        let mut zeros = Self::new();
        for spec in layout.tensors() {
            let held = if is_extra_state(&spec.name, spec.dtype, &spec.shape) {
                let state = ExtraState::with_capacity(Plain::Null, spec.range.len as usize);
                extra(state.map_err(|error| Error::load(&spec.name, error))?)
            } else {
                let (shape, len) = (spec.shape.clone(), spec.range.len as usize);
                HeldTensor::Own(OwnedTensor::zeros(spec.dtype, shape, len))
            };
            zeros.put(&spec.name, held);
        }
        zeros.mark_buffers(attributes)?;
        Ok(zeros)
    }

    /// Tensors that lie somewhere, such as in a snapshot; nothing is copied.
    ///
    /// # Errors
    ///
    /// [`Error::Load`] for extra state that is none, and [`Error::NoSuchTensor`]
    /// if the attributes name a buffer that is not there.
    pub fn from_views(
        views: impl IntoIterator<Item = TensorView<'a>>,
        attributes: &Attributes,
    ) -> Result<Self> {
        let mut lent = Self::new();
        for view in views {
            let (name, dtype, shape) = (view.name(), view.dtype(), view.shape());
            let held = if is_extra_state(name, dtype, shape) {
                let state = ExtraState::from_bytes(view.bytes());
                extra(state.map_err(|error| Error::load(name, error))?)
            } else {
                let tensor = TensorRef::new(dtype, shape, view.bytes());
                HeldTensor::Lent(tensor.map_err(|error| Error::load(name, error))?)
            };
            lent.put(name, held);
        }
        lent.mark_buffers(attributes)?;
        Ok(lent)
    }

    /// Adds a parameter of its own, or replaces the entry of that name in its
    /// place.
    ///
    /// # Errors
    ///
    /// [`Error::WrongLength`] if `data` has not as many elements as `shape`.
    pub fn insert<T: Element>(
        &mut self,
        name: &str,
        shape: impl Into<Vec<u64>>,
        data: impl AsRef<[T]>,
    ) -> Result<()> {
        self.insert_bytes(name, T::DTYPE, shape, data.as_ref().as_bytes())
    }

    /// The same for any dtype: contiguous, row-major, little-endian bytes.
    ///
    /// # Errors
    ///
    /// [`Error::WrongLength`]; [`Error::Extract`] for a name that is kept for
    /// extra state.
    pub fn insert_bytes(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        bytes: &[u8],
    ) -> Result<()> {
        let shape = shape.into();
        not_kept(name, dtype, &shape)?;
        let tensor = OwnedTensor::new(name, dtype, shape, bytes)?;
        self.put(name, HeldTensor::Own(tensor));
        Ok(())
    }

    /// Adds a parameter that lies somewhere else, at any strides.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`] for a name or shape that no layout can have;
    /// [`Error::Extract`] for a name that is kept for extra state.
    pub fn lend(&mut self, name: &str, tensor: TensorRef<'a>) -> Result<()> {
        not_kept(name, tensor.dtype(), tensor.shape())?;
        Layout::new([(name.to_owned(), tensor.dtype(), tensor.shape().to_vec())])?;
        self.put(name, HeldTensor::Lent(tensor));
        Ok(())
    }

    /// Says that a tensor is a buffer.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn mark_buffer(&mut self, name: &str) -> Result<()> {
        let index = self.find(name)?;
        self.entries[index].1.role = Role::Buffer;
        Ok(())
    }

    /// Adds the extra state of a module (the root's name is empty), or replaces
    /// it, with room for twice what it takes.
    ///
    /// # Errors
    ///
    /// [`Error::Extract`] if it is too deep or too large.
    pub fn insert_extra_state(&mut self, module: &str, state: Plain) -> Result<()> {
        let name = extra_state_name(module);
        let state = ExtraState::new(state).map_err(|error| Error::extract(&name, error))?;
        self.put(&name, extra(state));
        Ok(())
    }

    /// Changes the extra state of a module in the room that it has.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`] if it has none; [`PlainError::Outgrown`](crate::PlainError::Outgrown) as
    /// [`Error::Extract`].
    pub fn set_extra_state(&mut self, module: &str, value: Plain) -> Result<()> {
        let name = extra_state_name(module);
        let index = self.find(&name)?;
        match &mut self.entries[index].1.held {
            HeldTensor::Extra { state, .. } => state
                .set(value)
                .map_err(|error| Error::extract(&name, error)),
            _ => Err(self.unknown(&name)),
        }
    }

    /// Gives every extra state the room that it has in a layout, such as that of
    /// the sender: to be done with weights that are made again for each send.
    ///
    /// # Errors
    ///
    /// [`PlainError::Outgrown`](crate::PlainError::Outgrown) as [`Error::Extract`].
    pub fn fit_extra_states(&mut self, layout: &Layout) -> Result<()> {
        for (name, entry) in &mut self.entries {
            let HeldTensor::Extra { state, .. } = &entry.held else {
                continue;
            };
            let Some(spec) = layout
                .tensor(name)
                .filter(|spec| is_extra_state(name, spec.dtype, &spec.shape))
            else {
                continue;
            };
            // The sender's room is taken over: both layouts are then equal.
            if spec.range.len as usize != state.capacity() {
                let fitting =
                    ExtraState::with_capacity(state.value().clone(), spec.range.len as usize);
                entry.held = extra(fitting.map_err(|error| Error::extract(name, error))?);
            }
        }
        Ok(())
    }

    /// How many entries there are, extra states included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(name, _)| name.as_str())
    }

    /// What a tensor is to its model; `None` for extra state and unknown names.
    pub fn role(&self, name: &str) -> Option<Role> {
        let entry = &self.entries[*self.index.get(name)?].1;
        (!matches!(entry.held, HeldTensor::Extra { .. })).then_some(entry.role)
    }

    /// The names of the parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.names()
            .filter(|name| self.role(name) == Some(Role::Parameter))
    }

    /// The names of the buffers.
    pub fn buffers(&self) -> impl Iterator<Item = &str> {
        self.names()
            .filter(|name| self.role(name) == Some(Role::Buffer))
    }

    /// The extra state of a module; the root's name is empty.
    pub fn extra_state(&self, module: &str) -> Option<&Plain> {
        let index = *self.index.get(&extra_state_name(module))?;
        match &self.entries[index].1.held {
            HeldTensor::Extra { state, .. } => Some(state.value()),
            _ => None,
        }
    }

    /// One tensor where it lies; extra state as it travels.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorRef<'_>> {
        self.entries[self.find(name)?].1.data(name)
    }

    /// One tensor's elements, copied only if they do not lie side by side.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`], or [`Error::WrongDtype`] if they are no `T`.
    pub fn slice<T: Element>(&self, name: &str) -> Result<Cow<'_, [T]>> {
        let entry = &self.entries[self.find(name)?].1;
        let tensor = entry.data(name)?;
        // Bytes that lie in order are lent. A view with strides is copied.
        if let Some(bytes) = entry.bytes() {
            return typed_copy(name, tensor.dtype(), bytes);
        }
        let copy = copied(name, &tensor)?;
        Ok(Cow::Owned(
            typed_copy(name, copy.dtype, copy.bytes())?.into_owned(),
        ))
    }

    /// The same with every lent tensor copied.
    ///
    /// # Errors
    ///
    /// [`Error::Extract`] if a tensor is too large to be in memory.
    pub fn into_owned(self) -> Result<StateDict<'static>> {
        let entries = self.entries.into_iter().map(|(name, entry)| {
            let held = match entry.held {
                HeldTensor::Own(tensor) => HeldTensor::Own(tensor),
                HeldTensor::Extra { state, shape } => HeldTensor::Extra { state, shape },
                HeldTensor::Lent(tensor) => HeldTensor::Own(copied(&name, &tensor)?),
            };
            let role = entry.role;
            Ok((name, Entry { role, held }))
        });
        Ok(StateDict {
            entries: entries.collect::<Result<_>>()?,
            index: self.index,
        })
    }

    /// The same with what does not lie side by side copied, so that all of it
    /// can be looked at.
    pub(super) fn packed(&self) -> Result<StateDict<'_>> {
        // Loaders take contiguous tensors only.
        let mut packed = self.by_reference("");
        for (name, entry) in &mut packed.entries {
            if let HeldTensor::Lent(tensor) = &entry.held
                && tensor.contiguous_bytes().is_none()
            {
                entry.held = HeldTensor::Own(copied(name, tensor)?);
            }
        }
        Ok(packed)
    }

    /// Every tensor of [`packed`](Self::packed) ones.
    pub(super) fn views(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.entries.iter().filter_map(|(name, entry)| {
            let (dtype, shape) = entry.kind();
            Some(TensorView::new(name, dtype, shape, entry.bytes()?))
        })
    }

    /// What lies below a prefix, under what remains of its name.
    pub(super) fn by_reference(&self, prefix: &str) -> StateDict<'_> {
        let mut part = StateDict::new();
        for (name, entry) in &self.entries {
            let Some(name) = name.strip_prefix(prefix) else {
                continue;
            };
            let held = match &entry.held {
                HeldTensor::Extra { state, shape } => HeldTensor::Extra {
                    state: state.clone(),
                    shape: *shape,
                },
                HeldTensor::Lent(tensor) => HeldTensor::Lent(tensor.clone()),
                HeldTensor::Own(tensor) => {
                    match TensorRef::new(tensor.dtype, &tensor.shape, tensor.bytes()) {
                        Ok(tensor) => HeldTensor::Lent(tensor),
                        Err(_) => unreachable!("its length was checked when it was made"),
                    }
                }
            };
            let index = part.put(name, held);
            part.entries[index].1.role = entry.role;
        }
        part
    }

    /// Adds the entries of another under a prefix.
    pub(super) fn absorb(&mut self, prefix: &str, other: StateDict<'a>) {
        for (name, entry) in other.entries {
            let index = self.put(&format!("{prefix}.{name}"), entry.held);
            self.entries[index].1.role = entry.role;
        }
    }

    /// A copy of tensors on their way out.
    pub(super) fn copy_of(
        tensors: &[Extracted<'_>],
        attributes: &Attributes,
    ) -> Result<StateDict<'a>> {
        let mut copy = StateDict::new();
        for Extracted { name, data } in tensors {
            let (dtype, shape) = (data.dtype(), data.shape().to_vec());
            let spec = Layout::new([((*name).to_owned(), dtype, shape.clone())])?;
            let mut tensor = OwnedTensor::zeros(dtype, shape, spec.payload_bytes() as usize);
            let written = data.write_into(tensor.bytes_mut(), dtype);
            written.map_err(|source| Error::extract(name, source))?;
            let held = match is_extra_state(name, dtype, &tensor.shape) {
                false => HeldTensor::Own(tensor),
                true => {
                    let state = ExtraState::from_bytes(tensor.bytes());
                    extra(state.map_err(|error| Error::extract(name, error))?)
                }
            };
            copy.put(name, held);
        }
        copy.mark_buffers(attributes)?;
        Ok(copy)
    }

    /// What describes it, in one of the two forms.
    pub(super) fn described_as(&self, format: Strategy) -> Result<Attributes> {
        let extra_state = self.entries.iter();
        let extra_state =
            extra_state.filter(|(_, entry)| matches!(entry.held, HeldTensor::Extra { .. }));
        Ok(Attributes::new(format)
            .with_ties(self.ties()?)?
            .with_extra_state(extra_state.map(|(name, _)| name.clone()).collect())
            .with_buffers(self.buffers().map(str::to_owned).collect()))
    }

    fn mark_buffers(&mut self, attributes: &Attributes) -> Result<()> {
        let mut buffers = attributes.buffers().iter();
        buffers.try_for_each(|name| self.mark_buffer(name))
    }

    /// A new entry is a parameter; one that is replaced keeps its role.
    fn put(&mut self, name: &str, held: HeldTensor<'a>) -> usize {
        match self.index.get(name) {
            Some(&index) => {
                // Its role stays.
                self.entries[index].1.held = held;
                index
            }
            None => {
                let role = Role::Parameter;
                self.index.insert(name.to_owned(), self.entries.len());
                self.entries.push((name.to_owned(), Entry { role, held }));
                self.entries.len() - 1
            }
        }
    }

    fn find(&self, name: &str) -> Result<usize> {
        self.index
            .get(name)
            .copied()
            .ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> Error {
        Error::NoSuchTensor {
            name: name.to_owned(),
            known: self.names().map(str::to_owned).collect(),
        }
    }
}

impl Entry<'_> {
    fn kind(&self) -> (Dtype, &[u64]) {
        match &self.held {
            HeldTensor::Own(tensor) => (tensor.dtype, &tensor.shape),
            HeldTensor::Lent(tensor) => (tensor.dtype(), tensor.shape()),
            HeldTensor::Extra { shape, .. } => (Dtype::U8, shape),
        }
    }

    /// The elements, if they lie side by side.
    fn bytes(&self) -> Option<&[u8]> {
        match &self.held {
            HeldTensor::Own(tensor) => Some(tensor.bytes()),
            HeldTensor::Lent(tensor) => tensor.contiguous_bytes(),
            HeldTensor::Extra { state, .. } => Some(state.bytes()),
        }
    }

    fn data(&self, name: &str) -> Result<TensorRef<'_>> {
        if let HeldTensor::Lent(tensor) = &self.held {
            return Ok(tensor.clone());
        }
        let ((dtype, shape), bytes) = (self.kind(), self.bytes().unwrap_or_default());
        TensorRef::new(dtype, shape, bytes).map_err(|error| Error::extract(name, error))
    }
}

/// Parameters, in their order.
impl From<Tensors> for StateDict<'_> {
    fn from(tensors: Tensors) -> Self {
        let mut weights = Self::new();
        for (name, tensor) in tensors.into_parts() {
            weights.put(&name, HeldTensor::Own(tensor));
        }
        weights
    }
}

fn extra(state: ExtraState) -> HeldTensor<'static> {
    let shape = [state.capacity() as u64];
    HeldTensor::Extra { state, shape }
}

fn copied(name: &str, tensor: &TensorRef<'_>) -> Result<OwnedTensor> {
    let failed = |error| Error::extract(name, error);
    let len = tensor.bytes_as(tensor.dtype()).map_err(failed)?;
    let mut copy = OwnedTensor::zeros(tensor.dtype(), tensor.shape().to_vec(), len as usize);
    tensor
        .write_into(copy.bytes_mut(), tensor.dtype())
        .map_err(failed)?;
    Ok(copy)
}

/// One name is for extra state alone, so that a worker can tell.
fn not_kept(name: &str, dtype: Dtype, shape: &[u64]) -> Result<()> {
    match is_extra_state(name, dtype, shape) {
        true => Err(Error::extract(
            name,
            "the name is kept for extra state; insert it as such",
        )),
        false => Ok(()),
    }
}
