//! Replay buffers, bound to Python: columns by address, so that numpy and torch need no copy of
//! their own.

use std::path::PathBuf;

use pyo3::prelude::*;
use weightsync_engine::Origin;
use weightsync_rl::replay::{self, Column, Prioritised, Sampler, Schema, Slices};

use crate::errors::{SettingError, forked, rl_exception};
use crate::options::whole;
use crate::raw::{self, ByteSpan, RawAddress};
use crate::source::dtype_of;

/// Frames kept for learning from them again.
#[pyclass(frozen, module = "weightsync._native")]
pub struct ReplayBuffer {
    held: replay::ReplayBuffer,
    origin: Origin,
}

/// A sampler by its name, and its settings.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Chosen {
    sampler: String,
    #[pyo3(default)]
    alpha: Option<f64>,
    #[pyo3(default)]
    beta: Option<f64>,
    #[pyo3(default)]
    eps: Option<f64>,
    #[pyo3(default)]
    column: Option<String>,
    #[pyo3(default)]
    num_slices: Option<usize>,
    #[pyo3(default)]
    slice_len: Option<usize>,
    #[pyo3(default)]
    strict_len: Option<bool>,
}

/// A count of frames.
struct FrameCount(usize);

impl<'a, 'py> FromPyObject<'a, 'py> for FrameCount {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        whole("frames", "a whole number from 0 on", &value).map(Self)
    }
}

#[pymethods]
impl ReplayBuffer {
    /// Columns are `(name, dtype, shape)`, dtypes as safetensors spells them. Without a directory
    /// the frames are in memory.
    #[new]
    #[pyo3(signature = (columns, capacity, ndim = 1, sampler = None, seed = 0, directory = None))]
    fn new(
        py: Python<'_>,
        columns: Vec<(String, String, Vec<u64>)>,
        capacity: FrameCount,
        ndim: usize,
        sampler: Option<Chosen>,
        seed: u64,
        directory: Option<PathBuf>,
    ) -> PyResult<Self> {
        let columns = columns.into_iter().map(|(name, dtype, shape)| {
            let dtype = dtype_of(&name, &dtype)?;
            Ok(Column::new(name, dtype, shape))
        });
        let columns = columns.collect::<PyResult<Vec<_>>>()?;
        let sampler = sampler.map_or(Ok(Sampler::Uniform), Chosen::sampler)?;
        // Opening a directory checks its frames, which may take long.
        let made = py.detach(|| {
            let builder = replay::ReplayBuffer::builder(Schema::new(columns)?);
            let builder = builder.capacity(capacity.0).ndim(ndim);
            let builder = builder.sampler(sampler).seed(seed);
            match directory {
                Some(directory) => builder.directory(directory),
                None => builder.in_memory(),
            }
        });
        Ok(Self {
            held: made.map_err(|error| rl_exception(py, error))?,
            origin: Origin::here(),
        })
    }

    /// The capacity and the columns of the buffer in a directory; `None` if there is none.
    #[staticmethod]
    fn describe(py: Python<'_>, directory: PathBuf) -> PyResult<Option<(usize, Vec<Described>)>> {
        let found = py.detach(|| replay::ReplayBuffer::describe(directory));
        let found = found.map_err(|error| rl_exception(py, error))?;
        Ok(found.map(|(schema, capacity)| (capacity, described(&schema))))
    }

    /// Writes a batch of this shape, with the address of each column's row-major elements, and
    /// returns the ids of its frames, from the first on and before the second.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn extend(
        &self,
        py: Python<'_>,
        shape: Vec<usize>,
        addresses: Vec<RawAddress>,
    ) -> PyResult<(u64, u64)> {
        let held = self.here()?;
        // The number of frames follows from the shape, and bounds every address below.
        let frames = held.frames_of(&shape);
        let frames = frames.map_err(|error| rl_exception(py, error))?;
        let spans = self.spans(frames, addresses)?;
        let extend = |columns: &[&[u8]]| held.extend(&shape, columns);
        // SAFETY: the Python files make the promise of an address for each column of the batch.
        let lent = py.detach(|| unsafe { raw::lend(&spans, extend) });
        let ids = lent.map_err(|column| self.hollow(column))?;
        let ids = ids.map_err(|error| rl_exception(py, error))?;
        Ok((ids.start, ids.end))
    }

    /// Draws so many frames, and copies each column to its address. To the other addresses go the
    /// frames' ids (64 bits each), their importance weights (`F32`) and the mask (a byte each),
    /// where the sampler has them: whether it has weights, and a mask, is returned.
    #[pyo3(signature = (frames, addresses, ids, weights = None, mask = None))]
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn sample(
        &self,
        py: Python<'_>,
        frames: FrameCount,
        addresses: Vec<RawAddress>,
        ids: RawAddress,
        weights: Option<RawAddress>,
        mask: Option<RawAddress>,
    ) -> PyResult<(bool, bool)> {
        let held = self.here()?;
        let spans = self.spans(frames.0, addresses)?;
        let sample = |columns: &mut [&mut [u8]]| held.sample_into(frames.0, columns);
        // SAFETY: the Python files make the promise of an address for each column's room, which
        // nothing else uses until this returns.
        let lent = py.detach(|| unsafe { raw::lend_mut(&spans, sample) });
        let drawn = lent.map_err(|column| self.hollow(column))?;
        let drawn = drawn.map_err(|error| rl_exception(py, error))?;
        let found = (drawn.weights.is_some(), drawn.mask.is_some());
        // Native order: the arrays are numpy's or torch's own.
        let ids_bytes = drawn.ids.iter().flat_map(|id| id.to_ne_bytes());
        let weights_bytes = drawn.weights.into_iter().flatten();
        let mask_bytes = drawn.mask.into_iter().flatten();
        let parts = [
            (Some(ids), ids_bytes.collect::<Vec<u8>>()),
            (weights, weights_bytes.flat_map(f32::to_ne_bytes).collect()),
            (mask, mask_bytes.map(u8::from).collect()),
        ];
        // The columns are filled already. These arrays are small.
        for (address, bytes) in parts {
            // SAFETY: the Python files make the promise of an address, with room for so many frames.
            if address.is_some_and(|address| !unsafe { address.store(&bytes) }) {
                return Err(SettingError::new_err(
                    "there is no memory at address 0: give the address of an array",
                ));
            }
        }
        Ok(found)
    }

    /// Copies the frames of these ids, each column to its address.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn read(&self, py: Python<'_>, ids: Vec<u64>, addresses: Vec<RawAddress>) -> PyResult<()> {
        let held = self.here()?;
        let spans = self.spans(ids.len(), addresses)?;
        let read = |columns: &mut [&mut [u8]]| held.read_into(&ids, columns);
        // SAFETY: as in `sample`.
        let lent = py.detach(|| unsafe { raw::lend_mut(&spans, read) });
        let read = lent.map_err(|column| self.hollow(column))?;
        read.map_err(|error| rl_exception(py, error))
    }

    /// Gives frames other priorities. Frames that were overwritten meanwhile are ignored.
    fn update_priorities(
        &self,
        py: Python<'_>,
        ids: Vec<u64>,
        priorities: Vec<f32>,
    ) -> PyResult<()> {
        let held = self.here()?;
        let updated = py.detach(|| held.update_priorities(&ids, &priorities));
        updated.map_err(|error| rl_exception(py, error))
    }

    /// Sets the `beta` of a prioritised sampler.
    fn set_beta(&self, py: Python<'_>, beta: f64) -> PyResult<()> {
        let held = self.here()?;
        let set = py.detach(|| held.set_beta(beta));
        set.map_err(|error| rl_exception(py, error))
    }

    /// Waits until all frames are on the disk.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.here()?;
        let flushed = py.detach(|| held.flush());
        flushed.map_err(|error| rl_exception(py, error))
    }

    /// The ids of the frames that are there, from the first on and before the second.
    #[getter]
    fn ids(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let held = self.here()?;
        let ids = py.detach(|| held.ids());
        Ok((ids.start, ids.end))
    }

    /// The number of frames that fit.
    #[getter]
    fn capacity(&self) -> usize {
        self.held.capacity()
    }

    /// `(name, dtype, shape)` of every column.
    fn columns(&self) -> Vec<Described> {
        described(self.held.schema())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let held = self.here()?;
        Ok(py.detach(|| held.len()))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (frames, capacity) = (self.__len__(py)?, self.held.capacity());
        Ok(format!("<ReplayBuffer: {frames} of {capacity} frames>"))
    }
}

/// `(name, dtype, shape)` of a column.
type Described = (String, &'static str, Vec<u64>);

fn described(schema: &Schema) -> Vec<Described> {
    let columns = schema.columns().iter();
    let parts = columns.map(|it| (it.name().to_owned(), it.dtype().name(), it.shape().to_vec()));
    parts.collect()
}

impl ReplayBuffer {
    /// The buffer, in the process that made it: in a forked one its locks may be held by threads
    /// that are not there.
    fn here(&self) -> PyResult<&replay::ReplayBuffer> {
        match self.origin.is_here() {
            true => Ok(&self.held),
            false => Err(forked()),
        }
    }

    /// The bytes of so many frames in each column.
    fn spans(&self, frames: usize, addresses: Vec<RawAddress>) -> PyResult<Vec<ByteSpan>> {
        let schema = self.held.schema();
        let expected = schema.columns().len();
        if addresses.len() != expected {
            return Err(SettingError::new_err(format!(
                "expected the addresses of {expected} columns, got {}",
                addresses.len()
            )));
        }
        let spans = addresses.into_iter().enumerate().map(|(column, address)| {
            let len = frames.checked_mul(schema.frame_bytes(column));
            let len = len.filter(|len| isize::try_from(*len).is_ok());
            let len = len.ok_or_else(|| {
                SettingError::new_err(format!("no memory has room for {frames} frames"))
            })?;
            Ok(ByteSpan {
                address,
                before: 0,
                len,
            })
        });
        spans.collect()
    }

    fn hollow(&self, column: usize) -> PyErr {
        let name = self.held.schema().columns()[column].name();
        SettingError::new_err(format!(
            "column {name:?} has no memory of its own: give a contiguous array"
        ))
    }
}

impl Chosen {
    fn sampler(self) -> PyResult<Sampler> {
        Ok(match self.sampler.as_str() {
            "uniform" => Sampler::Uniform,
            "without_replacement" => Sampler::WithoutReplacement,
            "prioritised" => {
                let (alpha, beta) = (self.alpha.unwrap_or(0.7), self.beta.unwrap_or(0.5));
                let mut settings = Prioritised::new(alpha, beta);
                settings.eps = self.eps.unwrap_or(settings.eps);
                settings.into()
            }
            "slices" => {
                let column = self.column.ok_or_else(|| {
                    SettingError::new_err("slices need the column that numbers trajectories")
                })?;
                let mut settings = Slices::of(column);
                settings.num_slices = self.num_slices;
                settings.slice_len = self.slice_len;
                settings.strict_len = self.strict_len.unwrap_or(true);
                settings.into()
            }
            other => {
                return Err(SettingError::new_err(format!(
                    "there is no sampler {other:?}: expected 'uniform', 'without_replacement', \
                     'prioritised' or 'slices'"
                )));
            }
        })
    }
}
