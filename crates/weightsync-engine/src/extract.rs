//! The first step of the journey: reading the trainer's tensors.

use std::fmt;

use weightsync_core::{Dtype, Layout, TensorRef};

use crate::attributes::Attributes;
use crate::error::{Error, Result};
use crate::strategy::Strategy;

/// Something that has weights: the trainer's model, its own tensors, a file.
///
/// **Guarantee an implementation gives.** During [`extract`](Self::extract) every
/// tensor is lent exactly once and does not change; after it returns, the
/// source is not looked at again until the next send.
pub trait WeightExtractor {
    /// Names, dtypes and shapes as the source has them now.
    ///
    /// # Errors
    ///
    /// If the source cannot be read, or has names or shapes no layout can have.
    fn layout(&self) -> Result<Layout>;

    /// Every tensor's bytes as they lie, in order, if the source knows without
    /// looking that it has exactly this layout: with very many tensors, looking
    /// at each of them costs more than copying it.
    ///
    /// For the sources of this crate: nobody else can name what it takes, so
    /// nobody else can answer for tensors that are then not compared.
    #[doc(hidden)]
    fn plain_bytes(&self, _: &Layout, _: CrateOnly) -> Option<Vec<&[u8]>> {
        None
    }

    /// Lends every tensor, in the order of [`layout`](Self::layout), for the
    /// time of one call of `take`.
    ///
    /// # Errors
    ///
    /// Those of the source, and those of `take`.
    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()>;

    /// Which tensors are one: pairs of an alias and the tensor that it is. Such
    /// a pair needs to be sent only once. None, unless the source knows better;
    /// [`find_ties`](crate::find_ties) finds those that share memory.
    ///
    /// # Errors
    ///
    /// If the source cannot be asked.
    fn ties(&self) -> Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }

    /// What describes the weights in addition to their layout.
    ///
    /// # Errors
    ///
    /// If the source cannot be asked, or says what cannot be.
    fn attributes(&self) -> Result<Attributes> {
        Attributes::new(Strategy::StateDict).with_ties(self.ties()?)
    }
}

/// Keeps [`WeightExtractor::plain_bytes`] to this crate, which does not export
/// it.
#[derive(Debug)]
pub struct CrateOnly(pub(crate) ());

/// One tensor on its way out.
#[derive(Clone, Debug)]
pub struct Extracted<'a> {
    /// Its dotted name.
    pub name: &'a str,
    /// Its elements.
    pub data: TensorData<'a>,
}

/// Where a tensor's elements are.
#[derive(Clone)]
#[non_exhaustive]
pub enum TensorData<'a> {
    /// In memory, at any strides.
    InMemory(TensorRef<'a>),
    /// Behind a read that puts them where they go, contiguous and row-major.
    Read {
        /// The type of an element.
        dtype: Dtype,
        /// Length of each dimension in elements.
        shape: &'a [u64],
        /// Fills a buffer of exactly the tensor's length.
        read: &'a (dyn Fn(&mut [u8]) -> std::io::Result<()> + Sync),
    },
}

impl TensorData<'_> {
    /// The type of an element.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::InMemory(tensor) => tensor.dtype(),
            Self::Read { dtype, .. } => *dtype,
        }
    }

    /// Length of each dimension in elements, outermost first.
    pub fn shape(&self) -> &[u64] {
        match self {
            Self::InMemory(tensor) => tensor.shape(),
            Self::Read { shape, .. } => shape,
        }
    }

    /// Writes the elements into `place` as `dtype`, in one pass. A read that is
    /// also cast goes through a buffer of the tensor's size.
    pub(crate) fn write_into(
        &self,
        place: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), weightsync_mem::BoxedError> {
        match self {
            Self::InMemory(tensor) => Ok(tensor.write_into(place, dtype)?),
            Self::Read {
                dtype: own, read, ..
            } if *own == dtype => Ok(read(place)?),
            Self::Read {
                dtype: own,
                shape,
                read,
            } => {
                // A read knows one dtype, so the tensor is read as it is and cast from there.
                // Counted in bits, because packed elements have less than a byte.
                let elements = place.len() as u64 * 8 / u64::from(dtype.bits());
                let mut buffer = vec![0; (elements * u64::from(own.bits()) / 8) as usize];
                read(&mut buffer)?;
                Ok(TensorRef::new(*own, shape, &buffer)?.write_into(place, dtype)?)
            }
        }
    }
}

impl fmt::Debug for TensorData<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::InMemory(_) => "InMemory",
            Self::Read { .. } => "Read",
        };
        write!(f, "{kind}({} {:?})", self.dtype(), self.shape())
    }
}

/// A target dtype for a source layout: every floating-point tensor becomes
/// `float`, all others stay.
///
/// # Errors
///
/// If the resulting layout is impossible.
pub(crate) fn cast_layout(source: &Layout, float: Option<Dtype>) -> Result<Layout> {
    let Some(float) = float else {
        return Ok(source.clone());
    };
    if !is_float(float) {
        return Err(Error::extract(
            "every floating-point tensor",
            format!("a cast goes to F64, F32, F16 or BF16, not to {float}"),
        ));
    }
    let tensors = source.tensors().iter().map(|tensor| {
        let dtype = if is_float(tensor.dtype) {
            float
        } else {
            tensor.dtype
        };
        (tensor.name.clone(), dtype, tensor.shape.clone())
    });
    Ok(Layout::new(tensors)?)
}

pub(crate) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}
