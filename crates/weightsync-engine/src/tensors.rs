//! Named tensors of one's own: the simplest model there is.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::OnceLock;

use half::{bf16, f16};
use weightsync_core::{Dtype, Layout, TensorRef};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::{Error, Result};
use crate::extract::{CrateOnly, Extracted, TensorData, WeightExtractor};
use crate::load::{TensorView, WeightLoader};

/// A Rust type that is the element of a dtype.
pub trait Element: FromBytes + IntoBytes + Immutable + Copy + 'static {
    /// The dtype whose elements these are.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $rust { const DTYPE: Dtype = Dtype::$dtype; })*
    };
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f16 => F16, bf16 => BF16, f32 => F32, f64 => F64,
}

/// Named tensors in memory, in the order they were inserted: a trainer's
/// weights, or a worker's own copy of them.
///
/// ```
/// use weightsync::Tensors;
///
/// let mut weights = Tensors::new();
/// weights.insert("layer.weight", [2, 3], vec![0.0_f32; 6])?;
/// weights.slice_mut::<f32>("layer.weight")?[4] = 1.5;
/// assert_eq!(weights.slice::<f32>("layer.weight")?[4], 1.5);
/// assert!(weights.slice::<f64>("layer.weight").is_err());
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    tensors: Vec<(String, OwnedTensor)>,
    index: HashMap<String, usize>,
    /// Made when it is first asked for, forgotten when a tensor is put.
    layout: OnceLock<Layout>,
}

/// One of them. The bytes are kept in 64-bit words, so that they are aligned
/// for every element type.
#[derive(Clone, Debug)]
pub(crate) struct OwnedTensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    words: Vec<u64>,
    len: usize,
}

impl OwnedTensor {
    /// Zeros of exactly this many bytes.
    pub(crate) fn zeros(dtype: Dtype, shape: Vec<u64>, len: usize) -> Self {
        Self {
            dtype,
            shape,
            words: vec![0; len.div_ceil(8)],
            len,
        }
    }

    /// The length is checked, as any layout checks a tensor.
    pub(crate) fn new(name: &str, dtype: Dtype, shape: Vec<u64>, bytes: &[u8]) -> Result<Self> {
        // A layout of this one tensor checks what any layout checks.
        let layout = Layout::new([(name.to_owned(), dtype, shape.clone())])?;
        let (expected, got) = (layout.payload_bytes(), bytes.len() as u64);
        if expected != got {
            return Err(Error::WrongLength {
                name: name.into(),
                dtype,
                shape,
                expected,
                got,
            });
        }
        let mut tensor = Self::zeros(dtype, shape, bytes.len());
        tensor.bytes_mut().copy_from_slice(bytes);
        Ok(tensor)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.words.as_bytes()[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.words.as_mut_bytes()[..self.len]
    }
}

impl Tensors {
    /// No tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Zeros of a layout's names, dtypes and shapes: a worker's own copy to
    /// load into.
    pub fn zeros(layout: &Layout) -> Self {
        let mut tensors = Self::new();
        for spec in layout.tensors() {
            let len = spec.range.len as usize;
            let tensor = OwnedTensor::zeros(spec.dtype, spec.shape.clone(), len);
            tensors.put(&spec.name, tensor);
        }
        tensors
    }

    /// Adds a tensor, or replaces the one of that name in its place.
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
    /// [`Error::WrongLength`] if `bytes` has another length than the dtype and
    /// shape take.
    pub fn insert_bytes(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        bytes: &[u8],
    ) -> Result<()> {
        let tensor = OwnedTensor::new(name, dtype, shape.into(), bytes)?;
        self.put(name, tensor);
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(name, _)| name.as_str())
    }

    /// One tensor.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let index = *self.index.get(name).ok_or_else(|| self.unknown(name))?;
        let (name, tensor) = &self.tensors[index];
        Ok(TensorView::new(
            name,
            tensor.dtype,
            &tensor.shape,
            tensor.bytes(),
        ))
    }

    /// One tensor's elements.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`], or [`Error::WrongDtype`] if they are no `T`.
    pub fn slice<T: Element>(&self, name: &str) -> Result<&[T]> {
        let tensor = self.index.get(name).map(|&index| &self.tensors[index].1);
        let tensor = tensor.ok_or_else(|| self.unknown(name))?;
        typed(name, tensor.dtype, tensor.bytes())
    }

    /// One tensor's elements, to change in place.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`], or [`Error::WrongDtype`] if they are no `T`.
    pub fn slice_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T]> {
        let Some(&index) = self.index.get(name) else {
            return Err(self.unknown(name));
        };
        let tensor = &mut self.tensors[index].1;
        if T::DTYPE != tensor.dtype {
            return Err(Error::WrongDtype {
                name: name.into(),
                expected: T::DTYPE,
                got: tensor.dtype,
            });
        }
        // Tensors lie in words of 8 bytes, which are aligned for every element.
        let elements = <[T]>::mut_from_bytes(tensor.bytes_mut());
        Ok(elements.unwrap_or_else(|_| unreachable!("words are aligned and lengths whole")))
    }

    pub(crate) fn into_parts(self) -> Vec<(String, OwnedTensor)> {
        self.tensors
    }

    fn put(&mut self, name: &str, tensor: OwnedTensor) {
        // The layout is made again when it is asked for.
        self.layout.take();
        match self.index.get(name) {
            Some(&index) => self.tensors[index].1 = tensor,
            None => {
                self.index.insert(name.to_owned(), self.tensors.len());
                self.tensors.push((name.to_owned(), tensor));
            }
        }
    }

    fn unknown(&self, name: &str) -> Error {
        let known = self.names().map(str::to_owned).collect();
        Error::NoSuchTensor {
            name: name.into(),
            known,
        }
    }
}

impl WeightExtractor for Tensors {
    fn layout(&self) -> Result<Layout> {
        // Kept: with very many tensors, making it takes longer than the copy.
        if let Some(layout) = self.layout.get() {
            return Ok(layout.clone());
        }
        let tensors = self.tensors.iter();
        let specs = tensors.map(|(name, one)| (name.clone(), one.dtype, one.shape.clone()));
        let layout = Layout::new(specs)?;
        Ok(self.layout.get_or_init(|| layout).clone())
    }

    fn plain_bytes(&self, expected: &Layout, _: CrateOnly) -> Option<Vec<&[u8]>> {
        // Only a layout that was made before is known without a look at each tensor.
        let own = self.layout.get()?;
        (own == expected).then(|| {
            self.tensors
                .iter()
                .map(|(_, tensor)| tensor.bytes())
                .collect()
        })
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        let lent = self.tensors.iter().map(|(name, tensor)| {
            let data = TensorRef::new(tensor.dtype, &tensor.shape, tensor.bytes());
            let data = data.map_err(|source| Error::extract(name, source))?;
            Ok(Extracted {
                name,
                data: TensorData::InMemory(data),
            })
        });
        take(&lent.collect::<Result<Vec<_>>>()?)
    }
}

impl WeightLoader for Tensors {
    fn layout(&self) -> Result<Layout> {
        WeightExtractor::layout(self)
    }

    fn shape(&mut self, layout: &Layout) -> Result<bool> {
        if !self.is_empty() {
            return Ok(false);
        }
        *self = Self::zeros(layout);
        Ok(true)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        for view in tensors {
            let index = self.index.get(view.name()).copied();
            let own = index.map(|index| &mut self.tensors[index].1);
            // The layouts were compared before: every name is there and fits.
            let Some(own) = own else {
                return Err(self.unknown(view.name()));
            };
            own.bytes_mut().copy_from_slice(view.bytes());
        }
        Ok(())
    }
}

/// Bytes as elements, without a copy.
pub(crate) fn typed<'a, T: Element>(name: &str, dtype: Dtype, bytes: &'a [u8]) -> Result<&'a [T]> {
    if T::DTYPE != dtype {
        return Err(Error::WrongDtype {
            name: name.into(),
            expected: T::DTYPE,
            got: dtype,
        });
    }
    let elements = <[T]>::ref_from_bytes(bytes);
    Ok(elements.unwrap_or_else(|_| unreachable!("tensors are aligned and their lengths whole")))
}

/// Bytes as elements, copied only if they are not aligned for it.
pub(crate) fn typed_copy<'a, T: Element>(
    name: &str,
    dtype: Dtype,
    bytes: &'a [u8],
) -> Result<Cow<'a, [T]>> {
    if T::DTYPE != dtype {
        return Err(Error::WrongDtype {
            name: name.into(),
            expected: T::DTYPE,
            got: dtype,
        });
    }
    if let Ok(elements) = <[T]>::ref_from_bytes(bytes) {
        return Ok(Cow::Borrowed(elements));
    }
    let elements = bytes.chunks_exact(size_of::<T>()).map(T::read_from_bytes);
    Ok(Cow::Owned(
        elements.filter_map(std::result::Result::ok).collect(),
    ))
}
