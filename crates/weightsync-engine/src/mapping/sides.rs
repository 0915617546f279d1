//! The two sides of the journey at which a mapping can sit.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};

use weightsync_core::{Layout, TensorRef};
use weightsync_mem::threads::LockExt as _;

use super::plan::{MappingPlan, SourcePiece, TargetTensor};
use super::quantised::Scales;
use super::{Mapping, MappingError};
use crate::attributes::Attributes;
use crate::error::{Error, Result};
use crate::extract::{Extracted, TensorData, WeightExtractor};
use crate::load::{TensorView, WeightLoader};
use crate::snapshot::Snapshot;
use crate::tensors::OwnedTensor;
use crate::transport::Image;

/// A source seen through a mapping. What is only renamed or transposed is lent
/// where it lies; what is cast, fused, split or quantised goes straight into its
/// place.
#[derive(Debug)]
pub struct MappedExtractor<'a, E> {
    mapping: Cow<'a, Mapping>,
    source: E,
    /// That of the layout which was last seen.
    plan: Mutex<Option<Arc<MappingPlan>>>,
}

impl<'a, E: WeightExtractor> MappedExtractor<'a, E> {
    pub(super) fn new(mapping: Cow<'a, Mapping>, source: E) -> Self {
        Self {
            mapping,
            source,
            plan: Mutex::new(None),
        }
    }

    /// The source itself, without the mapping.
    pub fn source(&self) -> &E {
        &self.source
    }

    fn plan(
        &self,
        is_for: impl Fn(&Layout) -> bool,
        layout: impl FnOnce() -> Result<Layout>,
    ) -> Result<Arc<MappingPlan>> {
        // A plan is put there whole.
        let mut known = self.plan.locked();
        // A trainer sends the same layout again and again: the plan is made once.
        if let Some(plan) = known.as_ref().filter(|plan| is_for(&plan.source)) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(MappingPlan::new(self.mapping.rules(), &layout()?));
        plan.layout()
            .map_err(|error| Error::extract("the whole model", error))?;
        Ok(known.insert(plan).clone())
    }

    fn current(&self) -> Result<Arc<MappingPlan>> {
        let layout = self.source.layout()?;
        self.plan(|known| *known == layout, || Ok(layout.clone()))
    }
}

impl<E: WeightExtractor> WeightExtractor for MappedExtractor<'_, E> {
    fn layout(&self) -> Result<Layout> {
        let plan = self.current()?;
        plan.layout()
            .map_err(|error| Error::extract("the whole model", error))
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        self.source.extract(&mut |tensors| {
            let plan = self.plan(|known| is_of(known, tensors), || layout_of(tensors))?;
            lend(&plan, tensors, take)
        })
    }

    /// What is made of tied tensors in the same way is tied.
    fn ties(&self) -> Result<Vec<(String, String)>> {
        let ties = Attributes::default().with_ties(self.source.ties()?)?;
        if ties.ties().is_empty() {
            return Ok(Vec::new());
        }
        let plan = self.current()?;
        // Tied tensors count as one source.
        let mut roots: Vec<_> = (0..plan.source.len()).collect();
        for (alias, of) in ties.ties() {
            if let (Some(alias), Some(of)) = (plan.source.index_of(alias), plan.source.index_of(of))
            {
                roots[alias] = of;
            }
        }
        let mut first = HashMap::new();
        let mut tied = Vec::new();
        for target in &plan.targets {
            let (pieces, quantised) = match &target.quantised {
                Some(quantised) => (&quantised.from.pieces, Some(quantised.kind())),
                None => (&target.pieces, None),
            };
            let mut pieces = pieces.clone();
            pieces
                .iter_mut()
                .for_each(|piece| piece.source = roots[piece.source]);
            // Targets without elements are made of nothing, and so are not of one source.
            if pieces.is_empty() {
                continue;
            }
            // Targets that are made alike from tied sources are tied as well.
            let of = *first
                .entry((pieces, quantised, target.dtype, &target.shape))
                .or_insert(&target.name);
            if *of != target.name {
                tied.push((target.name.clone(), of.clone()));
            }
        }
        Ok(tied)
    }

    fn attributes(&self) -> Result<Attributes> {
        let own = self.source.attributes()?;
        let plan = self.current()?;
        let made_of = |names: &[String]| -> Vec<String> {
            let indices: std::collections::HashSet<_> = names
                .iter()
                .filter_map(|name| plan.source.index_of(name))
                .collect();
            // A target that is fused of a buffer and a parameter is no buffer.
            let all = |target: &&TargetTensor| {
                target.sources.iter().all(|source| indices.contains(source))
            };
            plan.targets
                .iter()
                .filter(all)
                .map(|target| target.name.clone())
                .collect()
        };
        let extra_state = made_of(own.extra_state());
        let buffers = made_of(own.buffers());
        Ok(Attributes::new(own.format())
            .with_ties(self.ties()?)?
            .with_extra_state(extra_state)
            .with_buffers(buffers))
    }
}

/// A worker's model seen through a mapping.
///
/// Its layout is that of the sender it was last shaped for, and empty before:
/// [`shape`](WeightLoader::shape) checks that the rules lead from there to the
/// model, and says what is missing if not.
#[derive(Debug)]
pub struct MappedLoader<'a, L> {
    mapping: Cow<'a, Mapping>,
    model: L,
    plan: Option<Arc<MappingPlan>>,
    /// Whether the model takes whole versions; and the memory of the last one
    /// that was made for it, if it is free again.
    binds: bool,
    spare: Option<Image>,
}

impl<'a, L: WeightLoader> MappedLoader<'a, L> {
    pub(super) fn new(mapping: Cow<'a, Mapping>, model: L) -> Self {
        Self {
            mapping,
            model,
            plan: None,
            binds: false,
            spare: None,
        }
    }

    /// For a model that takes whole versions by [`bind`](WeightLoader::bind):
    /// each version is made in memory of this process, by
    /// [`Snapshot::mapped`](crate::Snapshot::mapped), and handed over whole. What
    /// the model does not keep is used again for the next version.
    #[must_use]
    pub fn binding(mut self) -> Self {
        self.binds = true;
        self
    }

    fn plan_for(&mut self, sent: &Layout) -> Result<Arc<MappingPlan>> {
        let plan = Arc::new(MappingPlan::new(self.mapping.rules(), sent));
        let made = plan
            .layout()
            .map_err(|error| Error::load("the whole model", error))?;
        // A model without shapes takes those that the mapping makes. Any other is compared in full.
        if !self.model.shape(&made)? {
            let dry_run = self.mapping.dry_run(sent, &self.model.layout()?);
            if !dry_run.is_complete() {
                let incomplete = MappingError::Incomplete(Box::new(dry_run));
                return Err(Error::load("the whole model", incomplete));
            }
        }
        Ok(plan)
    }
}

impl<L: WeightLoader> WeightLoader for MappedLoader<'_, L> {
    fn layout(&self) -> Result<Layout> {
        match &self.plan {
            Some(plan) => Ok(plan.source.clone()),
            None => Ok(Layout::new([])?),
        }
    }

    fn shape(&mut self, layout: &Layout) -> Result<bool> {
        self.plan = Some(self.plan_for(layout)?);
        Ok(true)
    }

    fn bind(&mut self, snapshot: &Snapshot) -> Result<bool> {
        if !self.binds {
            return Ok(false);
        }
        // The version as the mapping makes it, in memory of this process: the model can serve from
        // that alone.
        let seen = MappedExtractor {
            mapping: Cow::Borrowed(&*self.mapping),
            source: snapshot,
            plan: Mutex::new(self.plan.clone()),
        };
        let made = snapshot.made_as(&seen, self.spare.take())?;
        let bound = self.model.bind(&made)?;
        // Free again, unless the model serves from it.
        self.spare = made.into_image();
        Ok(bound)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        // The plan of the last load usually fits. Tensors of another layout need a new one.
        let plan = match self.plan.take() {
            Some(plan) if is_of_views(&plan.source, tensors) => plan,
            _ => {
                let specs = tensors.iter();
                let specs =
                    specs.map(|one| (one.name().to_owned(), one.dtype(), one.shape().to_vec()));
                self.plan_for(&Layout::new(specs)?)?
            }
        };
        let plan = self.plan.insert(plan);
        let scales = plan.no_scales();
        // All of it before the model loads anything: what cannot be made changes no model.
        let made: Vec<Option<OwnedTensor>> = (plan.targets.iter())
            .map(|target| match unchanged(target, plan, tensors) {
                Some(_) => Ok(None),
                None => made(target, tensors, &scales).map(Some),
            })
            .collect::<Result<_>>()?;
        // What the mapping leaves as it is goes to the model without a copy.
        let views: Vec<_> = (plan.targets.iter().zip(&made))
            .filter_map(|(target, made)| match made {
                Some(tensor) => Some(TensorView::new(
                    &target.name,
                    target.dtype,
                    &target.shape,
                    tensor.bytes(),
                )),
                None => Some(unchanged(target, plan, tensors)?.renamed(&target.name)),
            })
            .collect();
        self.model.load(&views)
    }
}

/// Lends what the plan makes of tensors that are lent.
fn lend(
    plan: &MappingPlan,
    tensors: &[Extracted<'_>],
    take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>,
) -> Result<()> {
    type Read<'a> = Box<dyn Fn(&mut [u8]) -> io::Result<()> + Sync + 'a>;
    // One cell for each quantised tensor: its values and its scales meet there.
    let scales = plan.no_scales();
    // One call for each target. It is made when the target's place is there, straight into that
    // place.
    let reads: Vec<Read<'_>> = (plan.targets.iter())
        .map(|target| -> Read<'_> {
            if let Some(quantised) = &target.quantised {
                let data = |source: usize| Ok(tensors[source].data.clone());
                let scales = &scales;
                return Box::new(move |place| {
                    let written = quantised.write(place, &data, &scales[quantised.number]);
                    written.map_err(io::Error::other)
                });
            }
            Box::new(move |place| {
                let write = |piece: &SourcePiece, source: &TensorRef<'_>, place: &mut [u8]| {
                    target.write(place, piece, source)
                };
                let mut written = target.pieces.iter().map(|piece| {
                    let data = &tensors[piece.source].data;
                    in_memory(data, |source| write(piece, source, place))
                });
                written.try_for_each(|one| one).map_err(io::Error::other)
            })
        })
        .collect();
    let lent = plan.targets.iter().zip(&reads).map(|(target, read)| {
        let failed = |error| Error::extract(&target.name, error);
        // A whole tensor is lent as it lies, or as a view; anything else is made on request.
        let data = match target
            .whole()
            .map(|piece| (piece, &tensors[piece.source].data))
        {
            Some((_, data)) if target.as_it_is().is_some() && is_all(data, target) => data.clone(),
            Some((piece, TensorData::InMemory(source))) if source.dtype() == target.dtype => {
                TensorData::InMemory(piece.view(source).map_err(failed)?)
            }
            _ => TensorData::Read {
                dtype: target.dtype,
                shape: &target.shape,
                read,
            },
        };
        let name = target.name.as_str();
        Ok(Extracted { name, data })
    });
    take(&lent.collect::<Result<Vec<_>>>()?)
}

/// A tensor of its own for what is not there as it is.
fn made(
    target: &TargetTensor,
    tensors: &[TensorView<'_>],
    scales: &[Scales],
) -> Result<OwnedTensor> {
    let failed = |error| Error::load(&target.name, error);
    let spec = Layout::new([(target.name.clone(), target.dtype, target.shape.clone())])?;
    let len = spec.payload_bytes() as usize;
    let mut tensor = OwnedTensor::zeros(target.dtype, target.shape.clone(), len);
    let data = |source: usize| {
        let view = &tensors[source];
        TensorRef::new(view.dtype(), view.shape(), view.bytes())
    };
    if let Some(quantised) = &target.quantised {
        let read = |source| Ok(TensorData::InMemory(data(source)?));
        let scales = &scales[quantised.number];
        quantised
            .write(tensor.bytes_mut(), &read, scales)
            .map_err(failed)?;
    }
    for piece in &target.pieces {
        let source = data(piece.source).map_err(|error| failed(error.into()))?;
        target
            .write(tensor.bytes_mut(), piece, &source)
            .map_err(failed)?;
    }
    Ok(tensor)
}

/// The tensor that a target is, if it only has another name.
fn unchanged<'a>(
    target: &TargetTensor,
    plan: &MappingPlan,
    tensors: &[TensorView<'a>],
) -> Option<TensorView<'a>> {
    let source = target.as_it_is()?;
    let spec = &plan.source.tensors()[source];
    (spec.dtype == target.dtype && spec.shape == target.shape).then(|| tensors[source])
}

fn is_all(data: &TensorData<'_>, target: &TargetTensor) -> bool {
    data.dtype() == target.dtype && data.shape() == target.shape
}

/// Calls with a tensor in memory; one behind a read goes through a buffer.
fn in_memory<T>(
    data: &TensorData<'_>,
    call: impl FnOnce(&TensorRef<'_>) -> Result<T, weightsync_mem::BoxedError>,
) -> Result<T, weightsync_mem::BoxedError> {
    match data {
        TensorData::InMemory(tensor) => call(tensor),
        TensorData::Read { dtype, shape, read } => {
            let bits = dtype.bits_of(shape).ok_or("the tensor is too large")?;
            // A piece may need any part of the tensor, and a read gives it whole.
            let mut buffer = vec![0; (bits / 8) as usize];
            read(&mut buffer)?;
            call(&TensorRef::new(*dtype, shape, &buffer)?)
        }
    }
}

fn is_of(layout: &Layout, tensors: &[Extracted<'_>]) -> bool {
    let same = |(spec, one): (&weightsync_core::TensorSpec, &Extracted<'_>)| {
        spec.name == one.name && spec.dtype == one.data.dtype() && spec.shape == one.data.shape()
    };
    layout.len() == tensors.len() && layout.tensors().iter().zip(tensors).all(same)
}

fn layout_of(tensors: &[Extracted<'_>]) -> Result<Layout> {
    let specs = tensors.iter();
    let specs = specs.map(|one| {
        (
            one.name.to_owned(),
            one.data.dtype(),
            one.data.shape().to_vec(),
        )
    });
    Ok(Layout::new(specs)?)
}

fn is_of_views(layout: &Layout, tensors: &[TensorView<'_>]) -> bool {
    let same = |(spec, one): (&weightsync_core::TensorSpec, &TensorView<'_>)| {
        spec.name == one.name() && spec.dtype == one.dtype() && spec.shape == one.shape()
    };
    layout.len() == tensors.len() && layout.tensors().iter().zip(tensors).all(same)
}
