//! Which tensors travel together: grouped by module, batched to a byte budget.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::iter::FusedIterator;
use std::vec;

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::error::Error;
use crate::index::NameIndex;
use crate::layout::{self, ByteRange, Layout};

/// Tensors that travel together, with their names, dtypes and shapes.
///
/// `T` stands for a tensor: its [`Placement`] in a version's bytes, a borrowed slice,
/// a framework's tensor. Names, dtypes, shapes and tensors are columns of equal length.
///
/// ```
/// use weightsync_core::{Dtype, WeightChunk};
///
/// let chunk = WeightChunk::new(
///     vec!["attn.q.weight".to_owned(), "attn.k.weight".to_owned()],
///     vec![Dtype::BF16, Dtype::F32],
///     vec![vec![8, 8], vec![8, 8]],
///     vec![[0u8; 128].to_vec(), [0u8; 256].to_vec()],
/// )?
/// .with_module_name("attn");
/// assert_eq!(chunk.total_bytes(), 128 + 256);
/// # Ok::<(), weightsync_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightChunk<T = Placement> {
    names: Vec<String>,
    dtypes: Vec<Dtype>,
    shapes: Vec<Vec<u64>>,
    tensors: Vec<T>,
    module_name: Option<String>,
    total_bytes: u64,
    packed: bool,
}

/// Where a tensor of a chunk stands in its layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placement {
    /// Its position in [`Layout::tensors`].
    pub index: usize,
    /// Its bytes.
    pub range: ByteRange,
}

/// How a layout is cut into chunks.
///
/// ```
/// use weightsync_core::{Chunking, Dtype, Layout};
///
/// let layout = Layout::new(["l.0.q.weight", "l.0.q.bias", "l.1.q.weight"].map(|name| {
///     (name.to_owned(), Dtype::F32, vec![100])
/// }))?;
/// let modules: Vec<_> = layout.chunks(Chunking::per_module()).collect();
/// assert_eq!(modules[0].names(), ["l.0.q.weight", "l.0.q.bias"]);
/// assert_eq!(modules[0].module_name(), Some("l.0"));
/// assert_eq!(layout.chunks(Chunking::per_module().with_budget(2000)).len(), 1);
/// # Ok::<(), weightsync_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Chunking {
    /// Whether the tensors of a module, as [`module_of`] says, stay together.
    pub by_module: bool,
    /// Bytes up to which modules (or tensors) share a chunk; `None` gives each its own.
    pub budget: Option<u64>,
}

/// The chunks of a layout, each tensor in exactly one: consumed once per send, never re-batched.
///
/// Groups come in the order of their first tensor, and the tensors of a group in layout order.
#[derive(Debug)]
pub struct Chunks {
    layout: Layout,
    plan: vec::IntoIter<TensorGroup>,
}

/// The module of a tensor: its dotted name without the last two parts, or `None` where that leaves
/// nothing (a name of one or two parts), which belongs to the model's root.
///
/// `layers.0.attn.q_proj.weight` belongs to `layers.0.attn`, so that query, key and value
/// projections travel together.
///
/// ```
/// use weightsync_core::chunk::module_of;
///
/// assert_eq!(module_of("layers.0.attn.q_proj.weight"), Some("layers.0.attn"));
/// assert_eq!(module_of("lm_head.weight"), None);
/// ```
pub fn module_of(name: &str) -> Option<&str> {
    name.rsplitn(3, '.')
        .nth(2)
        .filter(|module| !module.is_empty())
}

impl Layout {
    /// Cuts this layout into chunks.
    ///
    /// A chunk is closed when it holds bytes and the next module would take it over the budget;
    /// a module larger than the budget is a chunk of its own. All tensors of the model's root
    /// count as one module. Padding is not counted.
    pub fn chunks(&self, chunking: Chunking) -> Chunks {
        Chunks {
            layout: self.clone(),
            plan: batch(self, group(self, chunking.by_module), chunking.budget).into_iter(),
        }
    }
}

impl Iterator for Chunks {
    type Item = WeightChunk;

    fn next(&mut self) -> Option<WeightChunk> {
        self.plan.next().map(|group| chunk(&self.layout, group))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.plan.size_hint()
    }
}

impl ExactSizeIterator for Chunks {}
impl FusedIterator for Chunks {}

impl Chunking {
    /// One chunk per tensor.
    pub const fn per_tensor() -> Self {
        Chunking {
            by_module: false,
            budget: None,
        }
    }

    /// One chunk per module.
    pub const fn per_module() -> Self {
        Chunking {
            by_module: true,
            budget: None,
        }
    }

    /// Puts modules (or tensors) together up to this many bytes.
    #[must_use]
    pub const fn with_budget(self, bytes: u64) -> Self {
        Chunking {
            budget: Some(bytes),
            ..self
        }
    }
}

impl<T> WeightChunk<T> {
    /// Puts columns together; `total_bytes` follows from dtypes and shapes.
    ///
    /// # Errors
    /// [`Error::ChunkColumns`] if their lengths differ, [`Error::DuplicateName`],
    /// [`Error::TensorTooLarge`], [`Error::PartialByte`], and [`Error::TooLarge`] if there is
    /// more than a layout may hold.
    pub fn new(
        names: Vec<String>,
        dtypes: Vec<Dtype>,
        shapes: Vec<Vec<u64>>,
        tensors: Vec<T>,
    ) -> Result<Self, Error> {
        let lengths = [dtypes.len(), shapes.len(), tensors.len()];
        if lengths.iter().any(|&len| len != names.len()) {
            return Err(Error::ChunkColumns {
                names: names.len(),
                dtypes: dtypes.len(),
                shapes: shapes.len(),
                tensors: tensors.len(),
            });
        }
        layout::within("tensors in a chunk", names.len(), layout::MAX_TENSORS)?;
        let mut index = NameIndex::default();
        let mut total_bytes = 0;
        for (at, (name, (&dtype, shape))) in
            names.iter().zip(dtypes.iter().zip(&shapes)).enumerate()
        {
            // The index holds no names of its own: it looks them up in the column.
            if !index.insert(at, |at| &names[at]) {
                return Err(Error::DuplicateName { name: name.clone() });
            }
            // At most MAX_TENSORS × MAX_BYTES is 2^72: check as it grows.
            total_bytes += layout::tensor_bytes(dtype, shape)
                .map_err(|bits| layout::size_error(name.clone(), dtype, shape.clone(), bits))?;
            if total_bytes > layout::MAX_BYTES {
                return Err(Error::TooLarge {
                    what: "bytes of a chunk",
                    got: total_bytes,
                    limit: layout::MAX_BYTES,
                });
            }
        }
        Ok(WeightChunk {
            names,
            dtypes,
            shapes,
            tensors,
            module_name: None,
            total_bytes,
            packed: false,
        })
    }

    /// Says which module the tensors are.
    #[must_use]
    pub fn with_module_name(mut self, name: impl Into<String>) -> Self {
        self.module_name = Some(name.into());
        self
    }

    /// Says whether the tensors lie one after the other in one buffer.
    #[must_use]
    pub fn with_packed(mut self, packed: bool) -> Self {
        self.packed = packed;
        self
    }

    /// Replaces the value that stands for each tensor, in order; the other columns stay.
    pub fn map<U>(self, tensor: impl FnMut(T) -> U) -> WeightChunk<U> {
        WeightChunk {
            names: self.names,
            dtypes: self.dtypes,
            shapes: self.shapes,
            tensors: self.tensors.into_iter().map(tensor).collect(),
            module_name: self.module_name,
            total_bytes: self.total_bytes,
            packed: self.packed,
        }
    }

    /// The dotted names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The dtypes; they may differ.
    pub fn dtypes(&self) -> &[Dtype] {
        &self.dtypes
    }

    /// The shapes, in elements.
    pub fn shapes(&self) -> &[Vec<u64>] {
        &self.shapes
    }

    /// The tensors.
    pub fn tensors(&self) -> &[T] {
        &self.tensors
    }

    /// The tensors, without the rest.
    pub fn into_tensors(self) -> Vec<T> {
        self.tensors
    }

    /// The module, if the chunk was grouped by module and holds just one, not the root.
    pub fn module_name(&self) -> Option<&str> {
        self.module_name.as_deref()
    }

    /// Bytes of all tensors, without padding.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Whether the tensors lie one after the other in one buffer, with nothing but a layout's
    /// padding between them.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}

impl WeightChunk {
    /// The bytes from the first tensor to the end of the last, if nothing but these tensors and
    /// padding lies there.
    pub fn span(&self) -> Option<ByteRange> {
        let (first, last) = (self.tensors.first()?, self.tensors.last()?);
        self.packed.then(|| ByteRange {
            offset: first.range.offset,
            len: last.range.end() - first.range.offset,
        })
    }
}

/// Positions of tensors that travel together.
#[derive(Debug)]
struct TensorGroup {
    tensors: Vec<u32>,
    /// Whether these are the tensors of exactly one module.
    one_module: bool,
}

/// The units that batching must not split.
fn group(layout: &Layout, by_module: bool) -> Vec<TensorGroup> {
    let mut groups: Vec<TensorGroup> = Vec::new();
    let mut of_module = HashMap::new();
    // MAX_TENSORS fits in 32 bits.
    for (position, tensor) in (0u32..).zip(layout.tensors()) {
        let next = groups.len();
        // The first tensor of a module makes its group; later ones join it, wherever they stand in
        // the layout.
        let at = match by_module {
            true => *of_module.entry(module_of(&tensor.name)).or_insert(next),
            false => next,
        };
        if at == next {
            groups.push(TensorGroup {
                tensors: Vec::new(),
                one_module: by_module,
            });
        }
        groups[at].tensors.push(position);
    }
    groups
}

/// Joins neighbouring groups while they fit the budget.
fn batch(layout: &Layout, groups: Vec<TensorGroup>, budget: Option<u64>) -> Vec<TensorGroup> {
    // Without a budget each module, or tensor, is a chunk of its own.
    let Some(budget) = budget else {
        return groups;
    };
    let mut batches: Vec<TensorGroup> = Vec::new();
    let mut current = 0;
    for group in groups {
        let bytes: u64 = group
            .tensors
            .iter()
            .map(|&at| layout.tensors()[at as usize].range.len)
            .sum();
        match batches.last_mut() {
            // A batch without bytes takes any group, or an empty tensor would be a chunk of its own
            // in front of it.
            Some(batch) if current == 0 || current + bytes <= budget => {
                batch.tensors.extend(group.tensors);
                batch.one_module = false;
                current += bytes;
            }
            _ => {
                batches.push(group);
                current = bytes;
            }
        }
    }
    batches
}

fn chunk(layout: &Layout, group: TensorGroup) -> WeightChunk {
    let TensorGroup {
        tensors: positions,
        one_module,
    } = group;
    let specs = || positions.iter().map(|&at| &layout.tensors()[at as usize]);
    let module = specs().next().and_then(|tensor| module_of(&tensor.name));
    WeightChunk {
        names: specs().map(|tensor| tensor.name.clone()).collect(),
        dtypes: specs().map(|tensor| tensor.dtype).collect(),
        shapes: specs().map(|tensor| tensor.shape.clone()).collect(),
        tensors: positions
            .iter()
            .zip(specs())
            .map(|(&at, tensor)| Placement {
                index: at as usize,
                range: tensor.range,
            })
            .collect(),
        // Several modules in one chunk have no name together.
        module_name: module.filter(|_| one_module).map(str::to_owned),
        total_bytes: specs().map(|tensor| tensor.range.len).sum(),
        // Neighbours in the layout have nothing but padding between them.
        packed: positions.windows(2).all(|pair| pair[0] + 1 == pair[1]),
    }
}
