//! Looks at all of torch's tensors in one call. With ten thousand tensors, a few calls through the
//! interpreter for each would take longer than the copy.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

use crate::raw::{Exchange, Exchanged, RawAddress, TensorInfo};

/// The tensors of some dicts, as they were when this value was made.
///
/// A later call checks that the dicts still hold the same objects and no others, with the same
/// dtypes, shapes and memory order. The addresses may have changed, and are looked up again.
#[pyclass(name = "Tensors", frozen, module = "weightsync._native")]
pub struct DictTensors {
    exchange: Exchange,
    places: Vec<DictTensor>,
    others: Vec<(Py<PyDict>, Py<PyString>, Py<PyAny>)>,
    sizes: Vec<(Py<PyDict>, usize)>,
}

/// A dict, and a name in it.
type Entry<'py> = (Bound<'py, PyDict>, Bound<'py, PyString>);

/// One tensor, its dict and key, and its expected properties.
struct DictTensor {
    dict: Py<PyDict>,
    key: Py<PyString>,
    tensor: Exchanged,
    expected: Expected,
}

struct Expected {
    dtype: (u8, u8, u16),
    shape: Vec<i64>,
    /// Whether the tensor was in this host's memory.
    on_host: bool,
    row_major: bool,
    /// Whether its strides are those of a new tensor.
    new_strides: bool,
}

/// The addresses of tensors, and the strides of tensors that are not row-major.
pub struct MemoryLayout {
    pub addresses: Vec<RawAddress>,
    pub strides: Vec<(usize, Vec<i64>)>,
}

#[pymethods]
impl DictTensors {
    /// Tensors of `class`, as `(dict, key)` each. In `others` lies what must stay as well, such
    /// as modules in modules; `dicts` keep the number of entries they have. None if the tensors
    /// cannot all be looked at: one is of another class, or has no memory of its own.
    #[staticmethod]
    fn of(
        py: Python<'_>,
        class: &Bound<'_, PyType>,
        places: Vec<Entry<'_>>,
        others: Vec<Entry<'_>>,
        dicts: Vec<Bound<'_, PyDict>>,
    ) -> PyResult<Option<Self>> {
        let Some(exchange) = Exchange::of(class)? else {
            return Ok(None);
        };
        // Looked at once, when the module is walked for the first time. Later calls compare.
        let mut found = Vec::with_capacity(places.len());
        for (dict, key) in places {
            let tensor = dict.get_item(&key)?;
            // Another class has no exchange functions, so its memory cannot be looked at here.
            let Some(tensor) = tensor.and_then(|tensor| exchange.admit(&tensor)) else {
                return Ok(None);
            };
            // It has no memory of its own to look at.
            let Ok(expected) = exchange.look(py, &tensor, |seen| Expected::of(&seen)) else {
                return Ok(None);
            };
            found.push(DictTensor {
                dict: dict.unbind(),
                key: key.unbind(),
                tensor,
                expected,
            });
        }
        let others = others.into_iter().map(|(dict, key)| {
            let there = dict.get_item(&key)?;
            Ok(there.map(|there| (dict.unbind(), key.unbind(), there.unbind())))
        });
        let Some(others) = others.collect::<PyResult<Option<Vec<_>>>>()? else {
            return Ok(None);
        };
        let sizes = dicts.into_iter().map(|dict| {
            let len = dict.len();
            (dict.unbind(), len)
        });
        Ok(Some(Self {
            exchange,
            places: found,
            others,
            sizes: sizes.collect(),
        }))
    }

    /// Whether the tensors are unchanged.
    fn hold(&self, py: Python<'_>) -> PyResult<bool> {
        self.each(py, |_, _| true)
    }

    fn __len__(&self) -> usize {
        self.places.len()
    }

    fn __repr__(&self) -> String {
        format!("<Tensors: {}>", self.places.len())
    }

    /// A module may refer to its receiver, and this refers to the module's dicts.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Without this, a module that refers to its receiver would never be collected: the cycle
        // goes through these references.
        for place in &self.places {
            visit.call(&place.dict)?;
            visit.call(place.tensor.object())?;
        }
        for (dict, _, there) in &self.others {
            visit.call(dict)?;
            visit.call(there)?;
        }
        self.sizes.iter().try_for_each(|(dict, _)| visit.call(dict))
    }
}

/// Which tensors of a version are copied into which of [`DictTensors`].
#[pyclass(frozen, module = "weightsync._native")]
pub struct Copies {
    tensors: Py<DictTensors>,
    /// A place here, and one in the version's layout.
    pairs: Vec<(usize, usize)>,
}

#[pymethods]
impl Copies {
    /// From pairs: which of `tensors`, and which of the version.
    #[new]
    fn new(tensors: Py<DictTensors>, pairs: Vec<(usize, usize)>) -> Self {
        Self { tensors, pairs }
    }

    fn __repr__(&self) -> String {
        format!("<Copies: {} tensors>", self.pairs.len())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tensors)
    }
}

impl Copies {
    /// The address that each tensor is copied to, by its place in the version's layout. None if a
    /// tensor has changed, is not in this host's memory, is not row-major, or has another size than
    /// in `sent`.
    pub fn places(
        &self,
        py: Python<'_>,
        sent: &weightsync_engine::Layout,
    ) -> PyResult<Option<Vec<(usize, RawAddress)>>> {
        let tensors = self.tensors.get();
        // The sizes are checked before an address is used, so a copy never writes past a tensor.
        let fits = |(own, sent_at): &(usize, usize)| {
            let own = tensors.places.get(*own)?.expected.bytes()?;
            (sent.tensors().get(*sent_at)?.range.len == own).then_some(())
        };
        if !self.pairs.iter().all(|pair| fits(pair).is_some()) {
            return Ok(None);
        }
        let own = self.pairs.iter().map(|(own, _)| *own);
        // A lazy tensor stands for other values than its memory has: bytes that are copied there
        // would be read negated or conjugated.
        if tensors.any_lazy(py, own.clone())? {
            return Ok(None);
        }
        // The addresses are looked up at each load: a parameter may have got other memory
        // meanwhile.
        let Some(addresses) = tensors.row_major(py, own)? else {
            return Ok(None);
        };
        let sent = self.pairs.iter().map(|(_, sent)| *sent);
        Ok(Some(sent.zip(addresses).collect()))
    }
}

impl DictTensors {
    /// Where all values are now; none if the tensors are not what they were, or not in this
    /// host's memory as they are: on a device, or to be negated or conjugated by who reads them.
    pub fn memory_layout(&self, py: Python<'_>) -> PyResult<Option<MemoryLayout>> {
        let mut memory = MemoryLayout {
            addresses: Vec::with_capacity(self.places.len()),
            strides: Vec::new(),
        };
        let all = self.each(py, |index, seen| {
            // Collected in the walk that checks: with ten thousand tensors a second walk would
            // show.
            memory.addresses.push(seen.address);
            if !is_row_major(&seen) {
                memory.strides.push((index, seen.strides.to_vec()));
            }
            // Memory of a device cannot be read here.
            seen.device.is_host()
        })?;
        if !all || self.any_lazy(py, 0..self.places.len())? {
            return Ok(None);
        }
        Ok(Some(memory))
    }

    /// Where these of them are now; none as of [`memory_layout`](Self::memory_layout), or if one of them is not
    /// row-major. That they are what they were is for the caller to ask.
    fn row_major(
        &self,
        py: Python<'_>,
        which: impl Iterator<Item = usize>,
    ) -> PyResult<Option<Vec<RawAddress>>> {
        let mut addresses = Vec::with_capacity(which.size_hint().0);
        for index in which {
            let Some(place) = self.places.get(index) else {
                return Ok(None);
            };
            let address = self.exchange.look(py, &place.tensor, |seen| {
                let plain =
                    place.expected.on_host && place.expected.row_major && place.expected == seen;
                plain.then_some(seen.address)
            })?;
            match address {
                Some(address) => addresses.push(address),
                None => return Ok(None),
            }
        }
        Ok(Some(addresses))
    }

    /// Looks at all of them; whether they are what they were and `look` liked each.
    fn each(
        &self,
        py: Python<'_>,
        mut look: impl FnMut(usize, TensorInfo<'_>) -> bool,
    ) -> PyResult<bool> {
        // A parameter that was added or removed changes the size of its dict.
        if self
            .sizes
            .iter()
            .any(|(dict, len)| dict.bind(py).len() != *len)
        {
            return Ok(false);
        }
        for (dict, key, there) in &self.others {
            let now = dict.bind(py).get_item(key.bind(py))?;
            if now.is_none_or(|now| !now.is(there)) {
                return Ok(false);
            }
        }
        for (index, place) in self.places.iter().enumerate() {
            let now = place.dict.bind(py).get_item(place.key.bind(py))?;
            // By identity: a new tensor under an old name may have another dtype or shape.
            if now.is_none_or(|now| !now.is(place.tensor.object())) {
                return Ok(false);
            }
            // Dtype, shape and order are those of the first walk. Only the address may differ.
            let good = self.exchange.look(py, &place.tensor, |seen| {
                place.expected == seen && look(index, seen)
            });
            // One whose memory was taken away is not what it was.
            if !good.unwrap_or(false) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether values of these have yet to be negated or conjugated. Only torch can say, and is
    /// asked where that can be: such a tensor is complex, or a view of every second number of one.
    fn any_lazy(&self, py: Python<'_>, which: impl Iterator<Item = usize>) -> PyResult<bool> {
        // For all other tensors the question needs no call of Python.
        let places = which.filter_map(|index| self.places.get(index));
        for place in places.filter(|place| place.expected.may_be_lazy()) {
            let tensor = place.tensor.object().bind(py);
            for question in ["is_neg", "is_conj"] {
                if tensor.call_method0(question)?.is_truthy()? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

impl Expected {
    fn of(seen: &TensorInfo<'_>) -> Self {
        Self {
            dtype: dtype_of(seen),
            shape: seen.shape.to_vec(),
            on_host: seen.device.is_host(),
            row_major: is_row_major(seen),
            new_strides: has_strides_of_a_new_one(seen),
        }
    }

    /// Bytes of its elements; none if they are not whole.
    fn bytes(&self) -> Option<u64> {
        let (_, bits, lanes) = self.dtype;
        let mut lens = self.shape.iter().map(|len| u64::try_from(*len).ok());
        let element = u64::from(bits) * u64::from(lanes);
        let all = lens.try_fold(element, |all, len| all.checked_mul(len?))?;
        all.is_multiple_of(8).then_some(all / 8)
    }

    /// Whether a tensor like this may be one that is read through torch only.
    fn may_be_lazy(&self) -> bool {
        const FLOAT: u8 = 2;
        const COMPLEX: u8 = 5;
        // The imaginary part of a conjugated tensor is a view of floats, with a stride of two, that
        // has yet to be negated.
        match self.dtype.0 {
            COMPLEX => true,
            FLOAT => self.shape.is_empty() || !self.new_strides,
            _ => false,
        }
    }
}

impl PartialEq<TensorInfo<'_>> for Expected {
    fn eq(&self, seen: &TensorInfo<'_>) -> bool {
        self.dtype == dtype_of(seen)
            && self.shape == seen.shape
            && self.on_host == seen.device.is_host()
            && self.row_major == is_row_major(seen)
            && self.new_strides == has_strides_of_a_new_one(seen)
    }
}

fn dtype_of(seen: &TensorInfo<'_>) -> (u8, u8, u16) {
    let dtype = seen.dtype;
    (dtype.class, dtype.bits, dtype.lanes)
}

/// Whether its elements lie one behind the other, as torch's `is_contiguous` has it: the stride of a
/// dimension of one element leads nowhere.
fn is_row_major(seen: &TensorInfo<'_>) -> bool {
    has_strides(seen, |len| len != 1)
}

/// Whether the dimensions of one element have the strides of a new tensor, too. A view of one number of
/// a complex tensor has a stride of two.
fn has_strides_of_a_new_one(seen: &TensorInfo<'_>) -> bool {
    has_strides(seen, |_| true)
}

/// Whether the last index moves by one element, and each other one by a whole row: in those dimensions
/// whose length counts.
fn has_strides(seen: &TensorInfo<'_>, counts: impl Fn(i64) -> bool) -> bool {
    if seen.strides.len() != seen.shape.len() {
        // DLPack's word for row-major is no strides at all.
        return seen.strides.is_empty();
    }
    if seen.shape.contains(&0) {
        return true;
    }
    // From the last dimension to the first.
    let mut step = 1;
    let dimensions = seen.shape.iter().zip(seen.strides).rev();
    for (len, stride) in dimensions {
        if counts(*len) && *stride != step {
            return false;
        }
        step *= len;
    }
    true
}
