//! Safetensors files, as a source of weights and as a place to keep them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use weightsync_core::{Digest, Layout};

use crate::error::{Error, Result};
use crate::extract::{Extracted, TensorData, WeightExtractor};
use crate::files;
use crate::safetensors_format::{SafetensorsHeader, Shard};
use crate::snapshot::Snapshot;

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
        let file = files::open(path).map_err(|error| Error::File {
            action: "opening",
            path: path.into(),
            source: error.into(),
        })?;
        Self::of(file, path)
    }

    /// The same of a file that is open. Errors name this path.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open).
    pub fn of(file: File, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |source| Error::File {
            action: "opening",
            path: path.into(),
            source,
        };
        let about = file.metadata().map_err(|error| failed(error.into()))?;
        // It may have grown since: its length then is what counts.
        let header =
            SafetensorsHeader::read(about.len(), &mut |at, place| file.read_exact_at(place, at));
        let header = header.map_err(failed)?;
        Ok(Self {
            path: path.into(),
            file,
            layout: Layout::new(header.tensors)?,
            offsets: header.offsets,
            metadata: header.metadata,
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
        // Not beyond the tensor, where the next one lies.
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
    let shards = Shard::cut(snapshot.layout(), u64::MAX, &metadata).map_err(failed)?;
    let parts = shards.iter().flat_map(|shard| {
        let tensors = shard
            .tensors
            .iter()
            .map(|&index| snapshot.tensor_bytes(index));
        std::iter::once(&shard.header[..]).chain(tensors)
    });
    write_whole(path, parts).map_err(|error| failed(error.into()))?;
    Ok(digest)
}

fn write_whole<'a>(path: &Path, parts: impl Iterator<Item = &'a [u8]>) -> std::io::Result<()> {
    files::replace(path, files::PLAIN, true, |file| {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let mut parts = parts.into_iter();
        parts.try_for_each(|part| file.write_all(part))?;
        file.flush()
    })
}
