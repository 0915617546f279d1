//! Sources of weights: tensors by name, dtype, shape and address.

use std::sync::RwLock;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{PyTraverseError, PyVisit};
use weightsync_core::extract::TensorRef;
use weightsync_engine::transport::threads::RwLockExt as _;
use weightsync_engine::{
    Attributes, Dtype, Error, ExtraState, Extracted, MappedExtractor, Result, Strategy, TensorData,
    WeightExtractor, find_ties,
};
use weightsync_simd::stream_copy_slice;

use crate::errors::{Raised, SettingError, WrongTypeError, WrongWeightsError, exception};
use crate::mapping::Mapping;
use crate::plain;
use crate::raw::{self, ByteSpan, RawAddress};
use crate::tensors::DictTensors;

/// Names, dtypes and shapes of tensors, in order.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Layout(pub weightsync_engine::Layout);

#[pymethods]
impl Layout {
    /// A layout of `(name, dtype, shape)`, dtypes as safetensors spells them.
    #[new]
    fn new(tensors: Vec<(String, String, Vec<u64>)>) -> PyResult<Self> {
        let tensors = tensors.into_iter().map(|(name, dtype, shape)| {
            let dtype = dtype_of(&name, &dtype)?;
            Ok((name, dtype, shape))
        });
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        let layout = weightsync_engine::Layout::new(tensors);
        Ok(Self(layout.map_err(wrong_weights)?))
    }

    /// `(name, dtype, shape)` of every tensor.
    fn tensors(&self) -> Vec<(&str, &str, Vec<u64>)> {
        let specs = self.0.tensors().iter();
        let parts = specs.map(|one| (one.name.as_str(), one.dtype.name(), one.shape.clone()));
        parts.collect()
    }

    /// Bytes of all tensors.
    #[getter]
    fn payload_bytes(&self) -> u64 {
        self.0.payload_bytes()
    }

    /// The layout's identity: a hash, in hexadecimal digits.
    #[getter]
    fn id(&self) -> String {
        self.0.id().to_string()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn __repr__(&self) -> String {
        let (tensors, bytes) = (self.0.len(), self.0.payload_bytes());
        format!("<Layout: {tensors} tensors, {bytes} bytes>")
    }
}

/// The dtype of a safetensors name.
pub fn dtype_of(tensor: &str, name: &str) -> PyResult<Dtype> {
    name.parse().map_err(|_| {
        WrongTypeError::new_err(format!(
            "tensor {tensor:?} has the dtype {name:?}, which no model can have"
        ))
    })
}

pub fn wrong_weights(error: impl ToString) -> PyErr {
    WrongWeightsError::new_err(error.to_string())
}

/// The tensors of one model in this process's memory, with the addresses they
/// have now, and the mapping that they are sent through, if there is one. Reading
/// them is left to the caller: they have to stay where they are during a send.
#[pyclass(name = "Source", frozen, module = "weightsync._native")]
pub struct TensorSource(SourceForm);

enum SourceForm {
    AsItIs(Placed),
    Mapped(MappedExtractor<'static, Placed>),
    Streamed(Streamed),
}

/// Tensors that exist one after the other, each while it is copied.
struct Streamed {
    layout: weightsync_engine::Layout,
    /// Called with a tensor's index; the address of its elements, row-major, which are
    /// kept until the next call.
    fetch: Py<PyAny>,
}

/// Tensors in this process's memory.
struct Placed {
    tensors: Vec<NamedTensor>,
    layout: weightsync_engine::Layout,
    buffers: Vec<String>,
    format: Strategy,
    now: RwLock<Now>,
}

/// One tensor, without its place.
struct NamedTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    /// Bytes of its elements.
    len: usize,
}

/// What may differ from one send to the next.
struct Now {
    addresses: Vec<RawAddress>,
    /// Elements from one index to the next in each dimension, of those that are
    /// not row-major.
    strides: Vec<(usize, Vec<i64>)>,
    extra: Vec<(String, ExtraState)>,
}

#[pymethods]
impl TensorSource {
    /// Tensors as `(name, dtype, shape)`; the names of those that are buffers;
    /// `state_dict` or `tensordict`; extra state by name; what they are sent through.
    #[new]
    #[pyo3(signature = (tensors, buffers, format, extra, mapping = None))]
    fn new(
        tensors: Vec<(String, String, Vec<u64>)>,
        buffers: Vec<String>,
        format: &str,
        extra: Vec<(String, Bound<'_, PyAny>)>,
        mapping: Option<&Mapping>,
    ) -> PyResult<Self> {
        let tensors = tensors.into_iter().map(|(name, dtype, shape)| {
            let dtype = dtype_of(&name, &dtype)?;
            let bits = dtype.bits_of(&shape).filter(|bits| bits % 8 == 0);
            let len = bits.and_then(|bits| usize::try_from(bits / 8).ok());
            let len = len.ok_or_else(|| {
                WrongWeightsError::new_err(format!(
                    "tensor {name:?} cannot have the shape {shape:?}"
                ))
            })?;
            Ok(NamedTensor {
                name,
                dtype,
                shape,
                len,
            })
        });
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        let extra = extra.into_iter().map(|(name, value)| {
            let state =
                ExtraState::new(plain::from_python(&name, &value)?).map_err(wrong_weights)?;
            Ok((name, state))
        });
        let extra = extra.collect::<PyResult<Vec<_>>>()?;
        let specs = tensors.iter();
        let specs = specs.map(|one| (one.name.clone(), one.dtype, one.shape.clone()));
        let states = extra
            .iter()
            .map(|(name, state)| (name.clone(), Dtype::U8, vec![state.capacity() as u64]));
        // Extra state has a fixed room, so the layout does not change with the state.
        let layout = weightsync_engine::Layout::new(specs.chain(states)).map_err(wrong_weights)?;
        let placed = Placed {
            now: RwLock::new(Now {
                addresses: Vec::new(),
                strides: Vec::new(),
                extra,
            }),
            tensors,
            layout,
            buffers,
            format: format
                .parse()
                .map_err(|error| SettingError::new_err(ToString::to_string(&error)))?,
        };
        Ok(Self(match mapping {
            None => SourceForm::AsItIs(placed),
            Some(mapping) => SourceForm::Mapped(mapping.0.clone().into_extractor(placed)),
        }))
    }

    /// Tensors as `(name, dtype, shape)` that `fetch` makes: it is called with the index of
    /// each of them in order, while a send writes this one into its place, and returns where
    /// the elements lie, row-major. They stay until the next call. The first error ends the
    /// send, and nothing is published.
    #[staticmethod]
    fn streamed(tensors: Vec<(String, String, Vec<u64>)>, fetch: Py<PyAny>) -> PyResult<Self> {
        let layout = Layout::new(tensors)?.0;
        Ok(Self(SourceForm::Streamed(Streamed { layout, fetch })))
    }

    /// The place of every tensor, in order, with the strides (in elements) of
    /// those that are not row-major, and the extra states that have changed.
    #[pyo3(signature = (addresses, strides = None, extra = None))]
    fn place(
        &self,
        py: Python<'_>,
        addresses: Vec<RawAddress>,
        strides: Option<Bound<'_, PyDict>>,
        extra: Option<Vec<(String, Bound<'_, PyAny>)>>,
    ) -> PyResult<()> {
        let placed = self.placed()?;
        // Counted here, because `lend` pairs tensors and addresses by their places.
        let (expected, got) = (placed.tensors.len(), addresses.len());
        if expected != got {
            return Err(WrongWeightsError::new_err(format!(
                "expected {expected} addresses, got {got}"
            )));
        }
        let strides = strides.map_or(Ok(Vec::new()), |strides| {
            let strides = strides.iter().map(|(index, strides)| {
                let index: usize = index.extract()?;
                // The number of strides must be that of the dimensions, because the reach is
                // computed from both.
                let rank = placed.tensors.get(index).map(|tensor| tensor.shape.len());
                let strides: Vec<i64> = strides.extract()?;
                match rank == Some(strides.len()) {
                    true => Ok((index, strides)),
                    false => Err(WrongWeightsError::new_err(format!(
                        "tensor {index} cannot have {} strides",
                        strides.len()
                    ))),
                }
            });
            strides.collect::<PyResult<Vec<_>>>()
        })?;
        // The Python files place a source within the turn of its end. So no send reads under this
        // lock now, and the interpreter's lock may be kept.
        let mut now = placed.now.writing();
        for (name, value) in extra.into_iter().flatten() {
            let value = plain::from_python(&name, &value)?;
            let known = now.extra.iter_mut().find(|(one, _)| *one == name);
            let Some((_, state)) = known else {
                return Err(WrongWeightsError::new_err(format!(
                    "there is no extra state {name:?}"
                )));
            };
            // An unchanged state keeps its encoded bytes.
            if *state.value() != value {
                let set = state.set(value);
                set.map_err(|error| exception(py, failed(&name, error)))?;
            }
        }
        now.addresses = addresses;
        now.strides = strides;
        Ok(())
    }

    /// The same of tensors that are looked at all at once, in this order; False if
    /// they are not what they were, or cannot be read where they lie.
    fn place_tensors(&self, py: Python<'_>, tensors: &DictTensors) -> PyResult<bool> {
        let placed = self.placed()?;
        let Some(memory) = tensors.memory_layout(py)? else {
            return Ok(false);
        };
        if memory.addresses.len() != placed.tensors.len() {
            return Ok(false);
        }
        let mut now = placed.now.writing();
        now.addresses = memory.addresses;
        now.strides = memory.strides;
        Ok(true)
    }

    #[getter]
    fn layout(&self) -> Layout {
        Layout(self.given().clone())
    }

    fn __repr__(&self) -> String {
        let layout = self.given();
        let (tensors, bytes) = (layout.len(), layout.payload_bytes());
        format!("<Source: {tensors} tensors, {bytes} bytes>")
    }

    /// What makes the tensors may refer to this.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.0 {
            SourceForm::Streamed(streamed) => visit.call(&streamed.fetch),
            _ => Ok(()),
        }
    }
}

impl TensorSource {
    fn placed(&self) -> PyResult<&Placed> {
        match &self.0 {
            SourceForm::AsItIs(placed) => Ok(placed),
            SourceForm::Mapped(mapped) => Ok(mapped.source()),
            SourceForm::Streamed(_) => Err(WrongTypeError::new_err(
                "a streamed source makes its tensors itself: they have no places",
            )),
        }
    }

    /// The layout before any mapping.
    fn given(&self) -> &weightsync_engine::Layout {
        match &self.0 {
            SourceForm::AsItIs(placed) => &placed.layout,
            SourceForm::Mapped(mapped) => &mapped.source().layout,
            SourceForm::Streamed(streamed) => &streamed.layout,
        }
    }

    fn sent(&self) -> &dyn WeightExtractor {
        match &self.0 {
            SourceForm::AsItIs(placed) => placed,
            SourceForm::Mapped(mapped) => mapped,
            SourceForm::Streamed(streamed) => streamed,
        }
    }
}

impl WeightExtractor for TensorSource {
    fn layout(&self) -> Result<weightsync_engine::Layout> {
        self.sent().layout()
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        self.sent().extract(take)
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        self.sent().ties()
    }

    fn attributes(&self) -> Result<Attributes> {
        self.sent().attributes()
    }
}

impl Placed {
    /// Lends every tensor as it is now.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn lend(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        // Held for the whole send: nobody places the tensors elsewhere while they are read.
        let now = self.now.reading();
        // A send before the first placing has no addresses.
        if now.addresses.len() != self.tensors.len() {
            return Err(Error::Extract {
                name: "every tensor".into(),
                source: "the source was never placed".into(),
            });
        }
        // Strides are sorted by index, as the Python files make them: one pass over both lists
        // pairs them.
        let mut strides = now.strides.iter().peekable();
        let tensors = self.tensors.iter().zip(&now.addresses).enumerate();
        let tensors = tensors.map(|(index, (tensor, address))| {
            let strides = strides.next_if(|(one, _)| *one == index);
            let strides = strides.map(|(_, strides)| &strides[..]);
            Ok((tensor.span(*address, strides)?, strides))
        });
        let (spans, strides): (Vec<ByteSpan>, Vec<_>) =
            tensors.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let room: Vec<_> = now
            .extra
            .iter()
            .map(|(_, state)| [state.capacity() as u64])
            .collect();
        let extra = now.extra.iter().zip(&room).map(|((name, state), shape)| {
            let data = TensorRef::new(Dtype::U8, shape, state.bytes());
            let data = data.map_err(|error| failed(name, error))?;
            Ok(Extracted {
                name,
                data: TensorData::InMemory(data),
            })
        });
        let extra = extra.collect::<Result<Vec<_>>>()?;
        // Called once all bytes are lent. The library copies them within this call.
        let call = |bytes: &[&[u8]]| {
            let mut tensors = Vec::with_capacity(bytes.len() + extra.len());
            let lent = self.tensors.iter().zip(&spans).zip(&strides).zip(bytes);
            for (((tensor, span), strides), bytes) in lent {
                tensors.push(tensor.extracted(span, *strides, bytes)?);
            }
            tensors.extend(extra);
            take(&tensors)
        };
        // SAFETY: the Python files hand the addresses over at each placing, with what the tensors
        // are, and hold the tensors until the call from Python returns that placed them; a span is
        // within what a tensor's shape and strides cover.
        let lent = unsafe { raw::lend(&spans, call) };
        lent.unwrap_or_else(|hollow| Err(self.tensors[hollow].hollow()))
    }
}

impl NamedTensor {
    /// The tensor as its bytes say it.
    fn extracted<'a>(
        &'a self,
        span: &ByteSpan,
        strides: Option<&'a [i64]>,
        bytes: &'a [u8],
    ) -> Result<Extracted<'a>> {
        let data = match strides {
            None => TensorRef::new(self.dtype, &self.shape, bytes),
            Some(strides) => {
                // The offset of the first element, in elements, within the bytes that are lent.
                let offset = (span.before / self.size()) as u64;
                TensorRef::strided(self.dtype, &self.shape, strides, offset, bytes)
            }
        };
        Ok(Extracted {
            name: &self.name,
            data: TensorData::InMemory(data.map_err(|error| failed(&self.name, error))?),
        })
    }

    fn hollow(&self) -> Error {
        failed(
            &self.name,
            "it has no memory of its own: send the whole tensor, or its local part",
        )
    }

    /// The bytes of the tensor, or those that its strides reach.
    fn span(&self, address: RawAddress, strides: Option<&[i64]>) -> Result<ByteSpan> {
        let (before, len) = match strides {
            Some(strides) => self.reach(strides)?,
            None => (0, self.len),
        };
        Ok(ByteSpan {
            address,
            before,
            len,
        })
    }

    /// Bytes before the first element, and bytes in all, that strides reach.
    fn reach(&self, strides: &[i64]) -> Result<(usize, usize)> {
        // An empty tensor reaches nothing, whatever its strides.
        if self.len == 0 {
            return Ok((0, 0));
        }
        // Dtypes of less than a byte have no address for each element.
        let Some(size) = self.dtype.bytes() else {
            let why = "its elements share bytes, so it has no strides";
            return Err(failed(&self.name, why));
        };
        let size = u64::from(size);
        let too_far = || failed(&self.name, "its strides reach too far");
        let (mut low, mut high) = (0_i64, 0_i64);
        // Each dimension reaches from its first index to its last, forwards or backwards.
        for (len, stride) in self.shape.iter().zip(strides) {
            let last = i64::try_from(len - 1).ok();
            let reach = last.and_then(|last| last.checked_mul(*stride));
            let reach = reach.ok_or_else(too_far)?;
            let end = if reach < 0 { &mut low } else { &mut high };
            *end = end.checked_add(reach).ok_or_else(too_far)?;
        }
        let all = high.checked_sub(low).and_then(|last| last.checked_add(1));
        let bytes = |count: u64| usize::try_from(count.checked_mul(size)?).ok();
        let before = bytes(low.unsigned_abs()).ok_or_else(too_far)?;
        let all = all.and_then(|all| bytes(all.unsigned_abs()));
        Ok((before, all.ok_or_else(too_far)?))
    }

    fn size(&self) -> usize {
        self.dtype.bytes().unwrap_or(1) as usize
    }
}

impl Streamed {
    /// Copies a tensor to its place: Python makes it, and the copy needs no interpreter.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn write(&self, index: usize, place: &mut [u8]) -> std::io::Result<()> {
        // The lock is taken only to have Python make the tensor. The copy runs without it.
        let fetched = Python::try_attach(|py| {
            let address = self.fetch.bind(py).call1((index,))?;
            address.extract::<RawAddress>()
        });
        let address = match fetched {
            Some(Ok(address)) => address,
            Some(Err(error)) => return Err(std::io::Error::other(Raised::boxed(error))),
            None => return Err(std::io::Error::other("the interpreter has ended")),
        };
        let span = ByteSpan {
            address,
            before: 0,
            len: place.len(),
        };
        let copy = |bytes: &[&[u8]]| stream_copy_slice(place, bytes[0]);
        // SAFETY: the Python files keep the tensor until `fetch` is called again, which this thread
        // does after the copy. They have compared the tensor's dtype and shape with the place's, and
        // it is contiguous: all `place.len()` bytes are there.
        let copied = unsafe { raw::lend(&[span], copy) };
        copied.map_err(|_| std::io::Error::other("it has no memory of its own"))
    }
}

impl WeightExtractor for Streamed {
    fn layout(&self) -> Result<weightsync_engine::Layout> {
        Ok(self.layout.clone())
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        // One closure for each tensor: the library calls them in order, each with its place in the
        // slot.
        let reads = (0..self.layout.len()).map(|index| {
            move |place: &mut [u8]| -> std::io::Result<()> { self.write(index, place) }
        });
        let reads: Vec<_> = reads.collect();
        let tensors = self.layout.tensors().iter().zip(&reads);
        let tensors = tensors.map(|(spec, read)| Extracted {
            name: &spec.name,
            data: TensorData::Read {
                dtype: spec.dtype,
                shape: &spec.shape,
                read,
            },
        });
        take(&tensors.collect::<Vec<_>>())
    }
}

fn failed(name: &str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Extract {
        name: name.to_owned(),
        source: source.into(),
    }
}

impl WeightExtractor for Placed {
    fn layout(&self) -> Result<weightsync_engine::Layout> {
        Ok(self.layout.clone())
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        self.lend(take)
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        let mut ties = Vec::new();
        // Names with one address are ties.
        self.lend(&mut |tensors| {
            ties = find_ties(tensors);
            Ok(())
        })?;
        Ok(ties)
    }

    fn attributes(&self) -> Result<Attributes> {
        let now = self.now.reading();
        let extra = now.extra.iter().map(|(name, _)| name.clone()).collect();
        drop(now);
        let attributes = Attributes::new(self.format).with_ties(self.ties()?)?;
        Ok(attributes
            .with_buffers(self.buffers.clone())
            .with_extra_state(extra))
    }
}
