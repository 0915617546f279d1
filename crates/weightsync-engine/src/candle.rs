//! candle models: a `VarMap` is a source of weights and a place to load them.

use std::collections::HashMap;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor, Var};
use candle_nn::VarMap;
use weightsync_core::{Dtype, Layout, TensorRef};
use weightsync_mem::BoxedError;
use weightsync_mem::threads::LockExt as _;
use zerocopy::IntoBytes;

use crate::attributes::find_ties;
use crate::error::{Error, Result};
use crate::extract::{Extracted, TensorData, WeightExtractor};
use crate::load::{TensorView, WeightLoader};

/// The variables by name, as candle keeps them: in no order. Here they come
/// sorted by name. They must be on the CPU.
impl WeightExtractor for VarMap {
    fn layout(&self) -> Result<Layout> {
        layout_of(&sorted(self))
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        let vars = sorted(self);
        // All locks are held until the tensors are read, so that the version is of one moment.
        let guards: Vec<_> = vars
            .iter()
            .map(|(_, var)| var.storage_and_layout())
            .collect();
        let mut shapes = Vec::with_capacity(vars.len());
        for (_, layout) in &guards {
            shapes.push(
                layout
                    .dims()
                    .iter()
                    .map(|&len| len as u64)
                    .collect::<Vec<_>>(),
            );
        }
        let mut lent = Vec::with_capacity(vars.len());
        for (((name, var), (storage, layout)), shape) in vars.iter().zip(&guards).zip(&shapes) {
            let failed = |source: BoxedError| Error::extract(name, source);
            let bytes = match &**storage {
                Storage::Cpu(storage) => bytes_of(storage),
                _ => None,
            };
            let bytes = bytes.ok_or_else(|| {
                let place = format!("{:?} {:?}", var.device().location(), var.dtype());
                failed(format!("it is {place}; only plain dtypes on the CPU can be read").into())
            })?;
            let strides: Vec<_> = layout
                .stride()
                .iter()
                .map(|&stride| stride as i64)
                .collect();
            let dtype = dtype_of(name, var.dtype())?;
            let tensor =
                TensorRef::strided(dtype, shape, &strides, layout.start_offset() as u64, bytes);
            let tensor = tensor.map_err(|source| failed(source.into()))?;
            lent.push(Extracted {
                name,
                data: TensorData::InMemory(tensor),
            });
        }
        take(&lent)
    }

    /// Variables that share their memory.
    fn ties(&self) -> Result<Vec<(String, String)>> {
        let mut ties = Vec::new();
        self.extract(&mut |tensors| {
            ties = find_ties(tensors);
            Ok(())
        })?;
        Ok(ties)
    }
}

impl WeightLoader for VarMap {
    fn layout(&self) -> Result<Layout> {
        layout_of(&sorted(self))
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        let vars: HashMap<_, _> = sorted(self).into_iter().collect();
        // Everything that can fail comes before the first variable changes.
        let mut loaded = Vec::with_capacity(tensors.len());
        for view in tensors {
            let failed = |source: BoxedError| Error::load(view.name(), source);
            let var = vars
                .get(view.name())
                .ok_or_else(|| failed("no such variable".into()))?;
            let shape: Vec<_> = view.shape().iter().map(|&len| len as usize).collect();
            let tensor = Tensor::from_raw_buffer(view.bytes(), var.dtype(), &shape, &Device::Cpu)
                .and_then(|tensor| tensor.to_device(var.device()))
                .map_err(|source| failed(source.into()))?;
            loaded.push((view.name(), var, tensor));
        }
        for (name, var, tensor) in loaded {
            var.set(&tensor)
                .map_err(|source| Error::load(name, source))?;
        }
        Ok(())
    }
}

fn sorted(map: &VarMap) -> Vec<(String, Var)> {
    let data = map.data().locked();
    let mut vars: Vec<_> = data
        .iter()
        .map(|(name, var)| (name.clone(), var.clone()))
        .collect();
    // A map has no order, and layouts must have the same order each time.
    vars.sort_by(|(a, _), (b, _)| a.cmp(b));
    vars
}

fn layout_of(vars: &[(String, Var)]) -> Result<Layout> {
    let tensors = vars.iter().map(|(name, var)| {
        let shape = var.dims().iter().map(|&len| len as u64).collect();
        Ok((name.clone(), dtype_of(name, var.dtype())?, shape))
    });
    Ok(Layout::new(tensors.collect::<Result<Vec<_>>>()?)?)
}

/// Candle keeps 8-bit and smaller floats as types whose bytes cannot be read,
/// and its list of dtypes may grow: those are refused by name.
fn dtype_of(name: &str, dtype: DType) -> Result<Dtype> {
    Ok(match dtype {
        DType::U8 => Dtype::U8,
        DType::U32 => Dtype::U32,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        other => {
            let source = format!("candle keeps {other:?} where its bytes cannot be read");
            return Err(Error::extract(name, source));
        }
    })
}

/// The elements' bytes; `None` for dtypes whose storage has no plain bytes.
fn bytes_of(storage: &CpuStorage) -> Option<&[u8]> {
    Some(match storage {
        CpuStorage::U8(values) => values,
        CpuStorage::U32(values) => values.as_bytes(),
        CpuStorage::I16(values) => values.as_bytes(),
        CpuStorage::I32(values) => values.as_bytes(),
        CpuStorage::I64(values) => values.as_bytes(),
        CpuStorage::BF16(values) => values.as_bytes(),
        CpuStorage::F16(values) => values.as_bytes(),
        CpuStorage::F32(values) => values.as_bytes(),
        CpuStorage::F64(values) => values.as_bytes(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_share_their_memory_are_tied() {
        let map = VarMap::new();
        let var = |value: f32| Var::new(&[value, value], &Device::Cpu).unwrap();
        let embed = var(1.0);
        for (name, var) in [
            ("embed", embed.clone()),
            ("head", embed),
            ("other", var(1.0)),
        ] {
            map.data().lock().unwrap().insert(name.to_owned(), var);
        }
        let ties = WeightExtractor::ties(&map).unwrap();
        assert_eq!(ties, [("head".to_owned(), "embed".to_owned())]);
    }
}
