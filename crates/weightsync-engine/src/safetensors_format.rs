//! The safetensors format: the header of a file, read and written.

use std::collections::{BTreeMap, HashMap};
use std::io;

use safetensors::tensor::{Metadata, TensorInfo};
use weightsync_core::{Dtype, Layout, TensorSpec};
use weightsync_mem::BoxedError;

/// The longest header that is read: that of the format's own implementation.
const MAX_HEADER: u64 = 100_000_000;

/// The entry of the header that is not a tensor.
const METADATA: &str = "__metadata__";

/// What a header says.
#[derive(Clone, Debug)]
pub struct SafetensorsHeader {
    /// The tensors, in the order of their places in the file.
    pub tensors: Vec<(String, Dtype, Vec<u64>)>,
    /// Where each begins in the file.
    pub offsets: Vec<u64>,
    /// The file's metadata.
    pub metadata: HashMap<String, String>,
}

impl SafetensorsHeader {
    /// Reads the header of a file of `bytes` bytes. `read_at` fills a buffer from an offset of the
    /// file.
    ///
    /// # Errors
    ///
    /// If it is not the header of such a file, or cannot be read.
    pub fn read(
        bytes: u64,
        read_at: &mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<Self, BoxedError> {
        let after_start = bytes.checked_sub(8).ok_or("it is shorter than 8 bytes")?;
        let mut start = [0; 8];
        read_at(0, &mut start)?;
        let header_bytes = u64::from_le_bytes(start);
        // Before memory is taken: a file's own word may be anything.
        if header_bytes > MAX_HEADER || header_bytes > after_start {
            return Err(format!(
                "it says that its header has {header_bytes} bytes: not a safetensors file"
            )
            .into());
        }
        let mut header = vec![0; header_bytes as usize];
        read_at(8, &mut header)?;
        // The crate's own `read_metadata` wants the tensors' bytes as well.
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| format!("its header is not that of a safetensors file: {error}"))?;
        let data_start = 8 + header_bytes;
        let data_bytes = after_start - header_bytes;
        if metadata.data_len() as u64 != data_bytes {
            return Err(format!(
                "its header describes {} bytes of tensors, but {data_bytes} follow: it is cut \
                 short or not whole",
                metadata.data_len(),
            )
            .into());
        }
        let mut infos: Vec<_> = metadata.tensors().into_iter().collect();
        // Empty tensors share a place: their names keep the order the same each time.
        infos.sort_by(|(a, first), (b, second)| {
            (first.data_offsets, a).cmp(&(second.data_offsets, b))
        });
        let mut tensors = Vec::with_capacity(infos.len());
        let mut offsets = Vec::with_capacity(infos.len());
        for (name, info) in infos {
            let dtype: Dtype = info.dtype.to_string().parse()?;
            offsets.push(data_start + info.data_offsets.0 as u64);
            let shape = info.shape.iter().map(|&len| len as u64).collect();
            tensors.push((name, dtype, shape));
        }
        Ok(Self {
            tensors,
            offsets,
            metadata: metadata.metadata().clone().unwrap_or_default(),
        })
    }
}

/// One file of a checkpoint that is to be written.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Everything before the first tensor, its length included.
    pub header: Vec<u8>,
    /// The tensors in the order of their places, as indices of the layout.
    pub tensors: Vec<usize>,
    /// Bytes of all tensors.
    pub bytes: u64,
}

impl Shard {
    /// Cuts a model into files of at most `budget` bytes of tensors; a larger tensor has a file of its
    /// own. There is at least one file.
    ///
    /// # Errors
    ///
    /// If the format cannot hold such tensors.
    pub fn cut(
        layout: &Layout,
        budget: u64,
        metadata: &HashMap<String, String>,
    ) -> Result<Vec<Self>, BoxedError> {
        if layout.index_of(METADATA).is_some() {
            return Err(format!(
                "the format keeps the name {METADATA:?} for itself; rename the tensor"
            )
            .into());
        }
        let mut tensors = layout.tensors().iter().enumerate();
        let mut tensors = tensors.try_fold(Vec::new(), |mut all, (index, tensor)| {
            let dtype = dtype_of(tensor.dtype).ok_or_else(|| {
                let (dtype, name) = (tensor.dtype, &tensor.name);
                format!("safetensors has no dtype {dtype} (tensor {name:?})")
            })?;
            all.push((dtype, index, tensor));
            Ok::<_, BoxedError>(all)
        })?;
        // Widest first, as the format's own implementation does, so that all lie aligned.
        tensors.sort_by(|(a, _, left), (b, _, right)| b.cmp(a).then(left.name.cmp(&right.name)));
        let (mut shards, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
        for tensor in tensors {
            // A tensor larger than the budget has a file to itself.
            let len = tensor.2.range.len;
            if !part.is_empty() && bytes + len > budget {
                shards.push(Self::of(&std::mem::take(&mut part), metadata)?);
                bytes = 0;
            }
            bytes += len;
            part.push(tensor);
        }
        shards.push(Self::of(&part, metadata)?);
        Ok(shards)
    }

    fn of(
        part: &[(safetensors::Dtype, usize, &TensorSpec)],
        metadata: &HashMap<String, String>,
    ) -> Result<Self, BoxedError> {
        // Offsets count from the end of the header, without gaps: the format allows none.
        let mut end = 0;
        let infos = part.iter().map(|(dtype, _, tensor)| {
            let start = end;
            end += tensor.range.len as usize;
            let info = TensorInfo {
                dtype: *dtype,
                shape: tensor.shape.iter().map(|&len| len as usize).collect(),
                data_offsets: (start, end),
            };
            (tensor.name.clone(), info)
        });
        let metadata = Metadata::new(Some(metadata.clone()), infos.collect())?;
        // In the order of their keys: the same weights make the same file.
        let value: BTreeMap<String, serde_json::Value> =
            serde_json::from_value(serde_json::to_value(&metadata)?)?;
        let mut text = serde_json::to_vec(&value)?;
        // The format pads the header with spaces, so that the tensors behind it lie aligned.
        text.resize(text.len().next_multiple_of(8), b' ');
        let len = text.len() as u64;
        if len > MAX_HEADER {
            return Err(
                format!("its header would have {len} bytes, {MAX_HEADER} are possible").into(),
            );
        }
        Ok(Self {
            header: [&len.to_le_bytes(), &text[..]].concat(),
            tensors: part.iter().map(|(_, index, _)| *index).collect(),
            bytes: end as u64,
        })
    }
}

/// The format's own name for a dtype.
fn dtype_of(dtype: Dtype) -> Option<safetensors::Dtype> {
    use safetensors::Dtype as Theirs;
    Some(match dtype {
        Dtype::BOOL => Theirs::BOOL,
        Dtype::F4 => Theirs::F4,
        Dtype::F6_E2M3 => Theirs::F6_E2M3,
        Dtype::F6_E3M2 => Theirs::F6_E3M2,
        Dtype::U8 => Theirs::U8,
        Dtype::I8 => Theirs::I8,
        Dtype::F8_E5M2 => Theirs::F8_E5M2,
        Dtype::F8_E4M3 => Theirs::F8_E4M3,
        Dtype::F8_E8M0 => Theirs::F8_E8M0,
        Dtype::F8_E4M3FNUZ => Theirs::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ => Theirs::F8_E5M2FNUZ,
        Dtype::I16 => Theirs::I16,
        Dtype::U16 => Theirs::U16,
        Dtype::F16 => Theirs::F16,
        Dtype::BF16 => Theirs::BF16,
        Dtype::I32 => Theirs::I32,
        Dtype::U32 => Theirs::U32,
        Dtype::F32 => Theirs::F32,
        Dtype::C64 => Theirs::C64,
        Dtype::F64 => Theirs::F64,
        Dtype::I64 => Theirs::I64,
        Dtype::U64 => Theirs::U64,
        _ => return None,
    })
}
