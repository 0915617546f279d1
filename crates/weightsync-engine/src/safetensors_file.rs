//! Safetensors files, as a source of weights and as a place to keep them.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use safetensors::tensor::{Metadata, TensorInfo};
use weightsync_core::{Digest, Dtype, Layout};

use crate::error::{Error, Result};
use crate::extract::{Extracted, TensorData, WeightExtractor};
use crate::load::TensorView;
use crate::snapshot::Snapshot;

/// The longest header that is read: that of the format's own implementation.
const MAX_HEADER: u64 = 100_000_000;

/// The entry of the header that is not a tensor.
const METADATA: &str = "__metadata__";

/// A safetensors file as a source of weights. Each tensor is read straight into
/// its place; the file is not held in memory.
///
/// ```no_run
/// use weightsync::{SafetensorsFile, SenderSetup};
///
/// let checkpoint = SafetensorsFile::open("model.safetensors")?;
/// let setup = SenderSetup::new("policy", &checkpoint)?;
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    layout: Layout,
    /// Where each tensor begins in the file, in layout order.
    offsets: Vec<u64>,
    metadata: HashMap<String, String>,
}

impl SafetensorsFile {
    /// Opens a file and reads its header. The tensors come in the order of
    /// their places in the file.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it cannot be read or is no safetensors file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |source| Error::File {
            action: "opening",
            path: path.into(),
            source,
        };
        // Without O_NONBLOCK, opening a FIFO waits for its writer.
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .map_err(|error| failed(error.into()))?;
        let about = file.metadata().map_err(|error| failed(error.into()))?;
        if !about.is_file() {
            return Err(failed("it is not a regular file".into()));
        }
        let file_bytes = about.len();
        let too_short = || failed("it is shorter than 8 bytes".into());
        // It may have grown since: its length then is what counts.
        let after_start = file_bytes.checked_sub(8).ok_or_else(too_short)?;
        let mut start = [0; 8];
        file.read_exact(&mut start).map_err(|_| too_short())?;
        let header_bytes = u64::from_le_bytes(start);
        if header_bytes > MAX_HEADER || header_bytes > after_start {
            return Err(failed(
                format!("it says that its header has {header_bytes} bytes: not a safetensors file")
                    .into(),
            ));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header)
            .map_err(|error| failed(error.into()))?;
        // The crate's own `read_metadata` wants the tensors' bytes as well.
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| {
            failed(format!("its header is not that of a safetensors file: {error}").into())
        })?;
        let data_start = 8 + header_bytes;
        let data_bytes = after_start - header_bytes;
        if metadata.data_len() as u64 != data_bytes {
            return Err(failed(
                format!(
                    "its header describes {} bytes of tensors, but {data_bytes} follow: it is cut short or not whole",
                    metadata.data_len(),
                )
                .into(),
            ));
        }
        let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
        // Empty tensors share a place: their names keep the order the same each time.
        tensors.sort_by(|(a, first), (b, second)| {
            (first.data_offsets, a).cmp(&(second.data_offsets, b))
        });
        let mut specs = Vec::with_capacity(tensors.len());
        let mut offsets = Vec::with_capacity(tensors.len());
        for (name, info) in tensors {
            let dtype: Dtype = info.dtype.to_string().parse()?;
            offsets.push(data_start + info.data_offsets.0 as u64);
            specs.push((
                name,
                dtype,
                info.shape.iter().map(|&len| len as u64).collect(),
            ));
        }
        Ok(Self {
            path: path.into(),
            file,
            layout: Layout::new(specs)?,
            offsets,
            metadata: metadata.metadata().clone().unwrap_or_default(),
        })
    }

    /// The file's metadata.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Reads a part of the tensor at `index` of the layout: as many bytes as
    /// `place` has, from byte `start` of the tensor on. However long the tensor
    /// is, no more of it is held.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the tensor has no such bytes, or if they can no longer
    /// be read.
    pub fn read_at(&self, index: usize, start: u64, place: &mut [u8]) -> Result<()> {
        let failed = |source| Error::File {
            action: "reading",
            path: self.path.clone(),
            source,
        };
        let end = start.checked_add(place.len() as u64);
        let tensor = self.layout.tensors().get(index);
        let (Some(end), Some(tensor)) = (end, tensor) else {
            return Err(failed(format!("it has no tensor {index}").into()));
        };
        if end > tensor.range.len {
            let (name, len) = (&tensor.name, tensor.range.len);
            let beyond = format!("tensor {name:?} has {len} bytes, asked for {start} to {end}");
            return Err(failed(beyond.into()));
        }
        self.file
            .read_exact_at(place, self.offsets[index] + start)
            .map_err(|error| failed(error.into()))
    }
}

impl WeightExtractor for SafetensorsFile {
    fn layout(&self) -> Result<Layout> {
        Ok(self.layout.clone())
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        let reads: Vec<_> = self
            .offsets
            .iter()
            .map(|&offset| {
                move |place: &mut [u8]| {
                    self.file.read_exact_at(place, offset).map_err(|error| {
                        std::io::Error::new(
                            error.kind(),
                            format!("{}: {error}", self.path.display()),
                        )
                    })
                }
            })
            .collect();
        let lent = self
            .layout
            .tensors()
            .iter()
            .zip(&reads)
            .map(|(tensor, read)| Extracted {
                name: &tensor.name,
                data: TensorData::Read {
                    dtype: tensor.dtype,
                    shape: &tensor.shape,
                    read,
                },
            });
        take(&lent.collect::<Vec<_>>())
    }
}

/// Writes a snapshot, straight from where it lies, whole or not at all.
pub(crate) fn save(snapshot: &Snapshot, path: &Path) -> Result<Digest> {
    let failed = |source| Error::File {
        action: "writing",
        path: path.into(),
        source,
    };
    let digest = snapshot.digest();
    let metadata = HashMap::from([
        ("format".to_owned(), "pt".to_owned()),
        ("weightsync.model".to_owned(), snapshot.model().to_string()),
        (
            "weightsync.version".to_owned(),
            snapshot.version().0.to_string(),
        ),
        ("weightsync.digest".to_owned(), digest.to_string()),
    ]);
    if snapshot.layout().index_of(METADATA).is_some() {
        let reserved =
            format!("the format keeps the name {METADATA:?} for itself; rename the tensor");
        return Err(failed(reserved.into()));
    }
    let mut views = snapshot
        .tensors()
        .map(|view| match safetensors_dtype(view.dtype()) {
            Some(dtype) => Ok((dtype, view)),
            None => {
                let (dtype, name) = (view.dtype(), view.name());
                let unknown = format!("safetensors has no dtype {dtype} (tensor {name:?})");
                Err(failed(unknown.into()))
            }
        })
        .collect::<Result<Vec<_>>>()?;
    // Widest first, as the format's own implementation does, so that all lie aligned.
    views.sort_by(|(a, left), (b, right)| b.cmp(a).then(left.name().cmp(right.name())));
    let header = header(&views, metadata).map_err(failed)?;
    let parts = views.iter().map(|(_, view)| view.bytes());
    write_whole(path, std::iter::once(&header[..]).chain(parts))
        .map_err(|error| failed(error.into()))?;
    Ok(digest)
}

/// Everything before the first tensor, its length included.
fn header(
    views: &[(safetensors::Dtype, TensorView<'_>)],
    metadata: HashMap<String, String>,
) -> Result<Vec<u8>, weightsync_mem::BoxedError> {
    let mut end = 0;
    let infos = views.iter().map(|(dtype, view)| {
        let start = end;
        end += view.bytes().len();
        let info = TensorInfo {
            dtype: *dtype,
            shape: view.shape().iter().map(|&len| len as usize).collect(),
            data_offsets: (start, end),
        };
        (view.name().to_owned(), info)
    });
    let metadata = Metadata::new(Some(metadata), infos.collect())?;
    let mut text = serde_json::to_vec(&metadata)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let len = text.len() as u64;
    if len > MAX_HEADER {
        return Err(format!("its header would have {len} bytes, {MAX_HEADER} are possible").into());
    }
    Ok([&len.to_le_bytes(), &text[..]].concat())
}

/// A temporary file next to the place, synced, renamed.
fn write_whole<'a>(path: &Path, parts: impl Iterator<Item = &'a [u8]>) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let written = File::create(&temporary).and_then(|file| {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        parts
            .into_iter()
            .try_for_each(|part| file.write_all(part))?;
        let file = file
            .into_inner()
            .map_err(std::io::IntoInnerError::into_error)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    });
    if written.is_err() {
        // The part that was written is of no use to anybody.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// The format's own name for a dtype.
fn safetensors_dtype(dtype: Dtype) -> Option<safetensors::Dtype> {
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
