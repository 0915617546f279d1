//! A state dict at the two ends of the journey: a source of weights, and a place
//! to load them.

use weightsync_core::Layout;

use super::{HeldTensor, StateDict, extra};
use crate::attributes::{Attributes, find_ties};
use crate::error::{Error, Result};
use crate::extract::{Extracted, TensorData, WeightExtractor};
use crate::load::{TensorView, WeightLoader};
use crate::plain::ExtraState;
use crate::strategy::Strategy;
use crate::tensors::OwnedTensor;

impl WeightExtractor for StateDict<'_> {
    fn layout(&self) -> Result<Layout> {
        let specs = self.entries.iter().map(|(name, entry)| {
            let (dtype, shape) = entry.kind();
            (name.clone(), dtype, shape.to_vec())
        });
        Ok(Layout::new(specs)?)
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        let lent = self.entries.iter().map(|(name, entry)| {
            let data = TensorData::InMemory(entry.data(name)?);
            Ok(Extracted { name, data })
        });
        take(&lent.collect::<Result<Vec<_>>>()?)
    }

    /// Lent tensors that are the same memory.
    fn ties(&self) -> Result<Vec<(String, String)>> {
        let mut ties = Vec::new();
        self.extract(&mut |tensors| {
            ties = find_ties(tensors);
            Ok(())
        })?;
        Ok(ties)
    }

    fn attributes(&self) -> Result<Attributes> {
        self.described_as(Strategy::StateDict)
    }
}

impl WeightLoader for StateDict<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightExtractor::layout(self)
    }

    fn shape(&mut self, layout: &Layout) -> Result<bool> {
        if !self.is_empty() {
            return Ok(false);
        }
        *self = Self::zeros(layout, &Attributes::default())?;
        Ok(true)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        // Everything that can fail comes before the first change.
        let mut extras = Vec::new();
        for view in tensors {
            let entry = &self.entries[self.find(view.name())?].1;
            // Extra state may have another length here: each model has its own room.
            if matches!(entry.held, HeldTensor::Extra { .. }) {
                let state = ExtraState::from_bytes(view.bytes());
                extras.push(state.map_err(|error| Error::load(view.name(), error))?);
            } else if entry.kind() != (view.dtype(), view.shape()) {
                let (dtype, shape) = entry.kind();
                let differs = format!(
                    "it is {} {:?} and the model has room for {dtype} {shape:?}",
                    view.dtype(),
                    view.shape()
                );
                return Err(Error::load(view.name(), differs));
            }
        }
        let mut extras = extras.into_iter();
        for view in tensors {
            let index = self.find(view.name())?;
            let held = &mut self.entries[index].1.held;
            match held {
                HeldTensor::Own(tensor) => tensor.bytes_mut().copy_from_slice(view.bytes()),
                // Lent memory is not written: the state dict has a copy from here on.
                HeldTensor::Lent(_) => {
                    let (shape, len) = (view.shape().to_vec(), view.bytes().len());
                    let mut tensor = OwnedTensor::zeros(view.dtype(), shape, len);
                    tensor.bytes_mut().copy_from_slice(view.bytes());
                    *held = HeldTensor::Own(tensor);
                }
                HeldTensor::Extra { .. } => {
                    *held = extras
                        .next()
                        .map_or_else(|| unreachable!("one was read for each above"), extra)
                }
            }
        }
        Ok(())
    }
}
