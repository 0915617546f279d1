//! From the trainer's tensors to a version that can go live: extract, compare,
//! write in one pass.

use weightsync_core::{Dtype, Layout, ModelId, TensorSpec};

use crate::attributes::{Attributes, TiedOnce};
use crate::error::{Error, Result};
use crate::extract::{CrateOnly, Extracted, TensorData, WeightExtractor};
use crate::snapshot::Snapshot;
use crate::transport::Source;

/// One model as the sender was set up for it.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    pub(crate) id: ModelId,
    /// The tensors as the trainer has them, tied ones once.
    pub(crate) source: Layout,
    /// The tensors as they travel: the same, cast.
    pub(crate) layout: Layout,
    pub(crate) attributes: Attributes,
}

impl Prepared {
    /// A model as its source has it.
    pub(crate) fn new(id: ModelId, source: &dyn WeightExtractor) -> Result<Self> {
        let attributes = source.attributes()?;
        let layout = attributes.sent_layout(&source.layout()?)?;
        Ok(Self {
            id,
            source: layout.clone(),
            layout,
            attributes,
        })
    }
}

/// Takes the sources of a whole version, one per tensor in layout order.
pub(crate) type Take<'a> = dyn FnMut(&[Source<'_>]) -> Result<()> + 'a;

/// Hands `take` the sources of a model's next version, once, after they were
/// compared with what the model was set up with: wrong weights are refused
/// before there is any room for them.
pub(crate) fn whole(
    prepared: &Prepared,
    weights: &dyn WeightExtractor,
    take: &mut Take<'_>,
) -> Result<()> {
    // A source that is known to have the layout: nothing is compared tensor by tensor.
    if let Some(sources) = known_bytes(prepared, weights) {
        return take(&sources);
    }
    once(prepared, weights, &mut |tensors| {
        // The usual source lies as it travels, in order: one copy for each tensor.
        if let Some(sources) = as_they_lie(prepared, tensors) {
            return take(&sources);
        }
        let ordered = in_order(prepared, tensors)?;
        let ordered: Vec<_> = ordered.into_iter().map(NextTensor::New).collect();
        converted(prepared, &ordered, take)
    })
}

/// As [`whole`], for a source that has only some of the tensors: the others are
/// those of `base`. Returns the names of those it has.
pub(crate) fn partial(
    prepared: &Prepared,
    weights: &dyn WeightExtractor,
    base: &Snapshot,
    take: &mut Take<'_>,
) -> Result<Vec<String>> {
    let mut carried = Vec::new();
    once(prepared, weights, &mut |tensors| {
        // Every tensor is that of the base at first; those that came replace it.
        let kept =
            (0..prepared.layout.len()).map(|index| NextTensor::Base(base.tensor_bytes(index)));
        let mut ordered: Vec<_> = kept.collect();
        for tensor in tensors {
            let (dtype, shape) = (tensor.data.dtype(), tensor.data.shape());
            let index = place(prepared, tensor.name, dtype, shape)?;
            ordered[index] = NextTensor::New(&tensor.data);
        }
        if tensors.is_empty() {
            return Err(Error::EmptyUpdate {
                model: prepared.id.clone(),
            });
        }
        carried = tensors.iter().map(|one| one.name.to_owned()).collect();
        converted(prepared, &ordered, take)
    })?;
    Ok(carried)
}

/// Compares a source with what the model was set up with, by what it says of
/// itself: nothing is read.
pub(crate) fn check(
    prepared: &Prepared,
    weights: &dyn WeightExtractor,
    partial: bool,
) -> Result<()> {
    if !partial && known_bytes(prepared, weights).is_some() {
        return Ok(());
    }
    // By what the source says of itself. The bytes are not touched.
    let got = TiedOnce::new(weights, &prepared.attributes).layout()?;
    if !partial {
        return compare(prepared, &got);
    }
    for spec in got.tensors() {
        place(prepared, &spec.name, spec.dtype, &spec.shape)?;
    }
    match got.is_empty() {
        true => Err(Error::EmptyUpdate {
            model: prepared.id.clone(),
        }),
        false => Ok(()),
    }
}

/// One tensor of the next version.
#[derive(Clone, Copy)]
enum NextTensor<'a, 'b> {
    /// From the source.
    New(&'a TensorData<'b>),
    /// As the version before has it.
    Base(&'a [u8]),
}

/// Lends the tensors of a source that keeps its guarantee: exactly once, tied
/// ones under one name.
fn once(
    prepared: &Prepared,
    weights: &dyn WeightExtractor,
    take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>,
) -> Result<()> {
    let lent_wrongly = |how_often: &str| {
        Error::extract(
            &format!("every tensor of {}", prepared.id),
            format!(
                "its extractor lent the tensors {how_often}: it must call `take` once, and pass on what that returns"
            ),
        )
    };
    let (mut times, mut taken) = (0, false);
    TiedOnce::new(weights, &prepared.attributes).extract(&mut |tensors| {
        // A second call would write a version twice.
        times += 1;
        if times > 1 {
            return Err(lent_wrongly("more than once"));
        }
        take(tensors)?;
        taken = true;
        Ok(())
    })?;
    // Only now is it known that the source has nothing to object.
    match taken {
        true => Ok(()),
        false => Err(lent_wrongly("not at all")),
    }
}

/// The sources of weights that know without looking that they have the layout
/// the model was set up with, where nothing is to be cast.
fn known_bytes<'a>(
    prepared: &Prepared,
    weights: &'a dyn WeightExtractor,
) -> Option<Vec<Source<'a>>> {
    let tensors = weights.plain_bytes(&prepared.layout, CrateOnly(()))?;
    Some(tensors.into_iter().map(Source::Bytes).collect())
}

/// The sources of tensors that need no more than a copy: in order, of the dtype
/// they travel in, contiguous.
fn as_they_lie<'a>(prepared: &Prepared, tensors: &'a [Extracted<'_>]) -> Option<Vec<Source<'a>>> {
    let specs = prepared.layout.tensors();
    if tensors.len() != specs.len() {
        return None;
    }
    let mut sources = Vec::with_capacity(tensors.len());
    for (got, spec) in tensors.iter().zip(specs) {
        if got.name != spec.name || got.data.shape() != spec.shape {
            return None;
        }
        let bytes = as_it_lies(&got.data, spec.dtype)?;
        // The copy relies on it.
        if bytes.len() as u64 != spec.range.len {
            return None;
        }
        sources.push(Source::Bytes(bytes));
    }
    Some(sources)
}

/// Hands over tensors of which some are to be cast, do not lie side by side in
/// memory, or stay as they were.
fn converted(
    prepared: &Prepared,
    ordered: &[NextTensor<'_, '_>],
    take: &mut Take<'_>,
) -> Result<()> {
    // Every closure is made before the first is lent: the sources borrow them.
    let specs = prepared.layout.tensors();
    let pairs = ordered.iter().zip(specs);
    let fills = pairs.map(|(part, spec)| {
        move |place: &mut [u8]| match part {
            NextTensor::New(data) => data.write_into(place, spec.dtype),
            NextTensor::Base(bytes) => {
                place.copy_from_slice(bytes);
                Ok(())
            }
        }
    });
    let fills: Vec<_> = fills.collect();
    // Only what must be converted goes through a call for each tensor. The rest is a plain copy.
    let parts = ordered.iter().zip(&fills).zip(specs);
    let sources = parts.map(|((part, fill), spec)| match part {
        NextTensor::Base(bytes) => Source::Bytes(bytes),
        NextTensor::New(data) => match as_it_lies(data, spec.dtype) {
            Some(bytes) => Source::Bytes(bytes),
            None => Source::Fill(fill),
        },
    });
    take(&sources.collect::<Vec<_>>())
}

/// The tensors in the order of the layout, if they are those the model was set
/// up with, or those of a version of it that comes back.
fn in_order<'a, 'b>(
    prepared: &Prepared,
    tensors: &'a [Extracted<'b>],
) -> Result<Vec<&'a TensorData<'b>>> {
    let is = |expected: &Layout| {
        let mut pairs = tensors.iter().zip(expected.tensors());
        tensors.len() == expected.len() && pairs.all(|(got, spec)| is_as_expected(got, spec))
    };
    if is(&prepared.source) || is(&prepared.layout) {
        return Ok(tensors.iter().map(|tensor| &tensor.data).collect());
    }
    // Another order is fine; anything else is named in full.
    let specs = tensors.iter().map(|tensor| {
        (
            tensor.name.to_owned(),
            tensor.data.dtype(),
            tensor.data.shape().to_vec(),
        )
    });
    let got = Layout::new(specs)?;
    compare(prepared, &got)?;
    let place = |name: &str| got.index_of(name).map(|index| &tensors[index].data);
    let expected = prepared.source.tensors().iter();
    Ok(expected.filter_map(|spec| place(&spec.name)).collect())
}

/// Compares all tensors, in any order, with those the model was set up with.
pub(crate) fn compare(prepared: &Prepared, got: &Layout) -> Result<()> {
    let differs = |expected| match Layout::compare(expected, got) {
        Err(mismatch) if !mismatch.is_order_alone() => Some(mismatch),
        _ => None,
    };
    match differs(&prepared.source) {
        Some(mismatch) if differs(&prepared.layout).is_some() => Err(Error::WrongWeights {
            model: prepared.id.clone(),
            mismatch: Box::new(mismatch),
        }),
        _ => Ok(()),
    }
}

/// The place of one tensor of a partial update, found to be of its dtype and
/// shape.
fn place(prepared: &Prepared, name: &str, dtype: Dtype, shape: &[u64]) -> Result<usize> {
    let index = prepared.source.index_of(name);
    let index = index.ok_or_else(|| Error::no_such_tensor(name, &prepared.source))?;
    let sent = &prepared.layout.tensors()[index];
    let source = &prepared.source.tensors()[index];
    // It may have the dtype in which it travels, or that of the trainer's model.
    let expected = if dtype == sent.dtype { sent } else { source };
    if dtype != expected.dtype || shape != expected.shape {
        return Err(wrong(prepared, &all_but(prepared, name, dtype, shape)?));
    }
    Ok(index)
}

/// The layout the model would have with one tensor as it came.
fn all_but(prepared: &Prepared, other: &str, dtype: Dtype, shape: &[u64]) -> Result<Layout> {
    let tensors = prepared.source.tensors().iter().map(|spec| {
        if spec.name == other {
            (spec.name.clone(), dtype, shape.to_vec())
        } else {
            (spec.name.clone(), spec.dtype, spec.shape.clone())
        }
    });
    Ok(Layout::new(tensors)?)
}

fn wrong(prepared: &Prepared, got: &Layout) -> Error {
    let model = prepared.id.clone();
    match Layout::compare(&prepared.source, got) {
        Err(mismatch) => Error::WrongWeights {
            model,
            mismatch: Box::new(mismatch),
        },
        // The caller has found that the layouts differ.
        Ok(()) => Error::EmptyUpdate { model },
    }
}

fn is_as_expected(got: &Extracted<'_>, expected: &TensorSpec) -> bool {
    got.name == expected.name
        && got.data.dtype() == expected.dtype
        && got.data.shape() == expected.shape
}

/// The bytes, if they need no more than a copy.
fn as_it_lies<'a>(data: &'a TensorData<'_>, dtype: Dtype) -> Option<&'a [u8]> {
    match data {
        TensorData::InMemory(tensor) if tensor.dtype() == dtype => tensor.contiguous_bytes(),
        _ => None,
    }
}
