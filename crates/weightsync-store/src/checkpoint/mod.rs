//! Checkpoints of other programs: as a source of weights, and as what a version is written out as.

mod find;
mod pickle;
mod pull;
mod push;
mod reach;

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use weightsync_core::{Layout, ModelId};
use weightsync_engine::transport::interrupt;
use weightsync_engine::{
    Attributes, Extracted, SafetensorsFile, Snapshot, Strategy, TensorData, WeightExtractor,
};

use self::find::{FoundCheckpoint, find};
use self::reach::Reach;
use crate::anchor::is_extra;
use crate::error::{Result, StoreError};
use crate::format::MAX_EXTRA;
use crate::progress::{Progress, Work};
use crate::storage::look_for_interruption;
use crate::store::{Store, Which};
use crate::writer::is_extra_file;

pub use self::pull::Pulled;
#[cfg(feature = "fuzz")]
pub(crate) use self::pull::is_mark;
pub use self::push::{PushOptions, Pushed};

/// The longest file that is taken along with the weights, and the most bytes of all of them.
const MAX_FILE: u64 = 64 << 20;

/// The longest index of a checkpoint.
const MAX_INDEX: u64 = 64 << 20;

/// Bytes that are read at once.
const PIECE: usize = 4 << 20;

/// A checkpoint on disk, as a source of weights. Tensors are read straight into their places.
///
/// It is a `.safetensors` file, or a directory with the weights in such files: one file, or several
/// with or without an index. The newest of `global_step_N` directories counts. The newest version of a
/// store of one model is a checkpoint, too.
///
/// **Guarantee.** Nothing in a checkpoint is executed: a pickled one is refused. Only files of the
/// directory are read. A link that leads out of it is refused, but for the links of Hugging Face's
/// cache. A checkpoint that lacks a tensor, or has one twice, is refused when it is opened: what its
/// index names is there, or, without an index, all the files that its files' names count up to.
///
/// ```no_run
/// use weightsync_store::{Checkpoint, SaveOptions, Store, Writer};
///
/// let checkpoint = Checkpoint::open("runs/ppo/global_step_40")?;
/// let store = Store::open("/srv/policy")?;
/// let mut writer = Writer::claim(&store, SaveOptions::default())?;
/// writer.save_weights("policy", &checkpoint)?;
/// # Ok::<(), weightsync_store::StoreError>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    /// What was asked for, and where the weights were found.
    source: PathBuf,
    path: PathBuf,
    weights: CheckpointWeights,
    layout: Layout,
    /// Of each tensor of the layout, the file it is in, and its index there.
    places: Vec<(usize, usize)>,
    attributes: Attributes,
    files: Vec<(String, Vec<u8>)>,
    progress: Option<Progress>,
}

#[derive(Debug)]
enum CheckpointWeights {
    Files(Vec<SafetensorsFile>),
    Stored(Snapshot),
}

impl Checkpoint {
    /// Opens a checkpoint: reads what describes its tensors, and the small files that a model needs.
    ///
    /// # Errors
    ///
    /// [`StoreError::Pickled`], [`StoreError::Checkpoint`] with what is wrong,
    /// [`StoreError::File`], and [`weightsync_engine::Error::File`] for a file that is not safetensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_as(path.as_ref(), false)
    }

    /// The same; links may lead anywhere. The maker of the checkpoint then chooses which files of this
    /// user become a part of it.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open).
    pub fn open_following_links(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_as(path.as_ref(), true)
    }

    fn open_as(path: &Path, follows: bool) -> Result<Self> {
        // A file is named by the user. In a directory, names come from the maker of the checkpoint.
        let reach = match follows || !path.is_dir() {
            true => Reach::Anything,
            false => Reach::of(path)?,
        };
        match find(path, &reach)? {
            FoundCheckpoint::Store => Self::of_store(path),
            FoundCheckpoint::Files { at, files, index } => {
                let found = Self::of_files(at, &files, index.as_deref(), &reach)?;
                Ok(Self {
                    source: path.into(),
                    ..found
                })
            }
        }
    }

    fn of_store(path: &Path) -> Result<Self> {
        let text = path
            .to_str()
            .ok_or_else(|| unusable(path, "its path is not UTF-8"))?;
        let store = Store::open(text)?;
        let (loaded, files) = store.load_with_files(&Which::Newest, None)?;
        let snapshot = loaded.snapshot;
        Ok(Self {
            source: path.into(),
            path: path.into(),
            layout: snapshot.layout().clone(),
            places: (0..snapshot.layout().len()).map(|at| (0, at)).collect(),
            attributes: snapshot.attributes().clone(),
            weights: CheckpointWeights::Stored(snapshot),
            files,
            progress: None,
        })
    }

    fn of_files(
        at: PathBuf,
        names: &[PathBuf],
        index: Option<&Path>,
        reach: &Reach,
    ) -> Result<Self> {
        let index = index.map(|path| read_index(path, reach)).transpose()?;
        let mut files = Vec::with_capacity(names.len());
        let mut tensors = Vec::new();
        let mut places = Vec::new();
        let mut seen: HashMap<String, usize> = HashMap::new();
        let mut unlisted = Vec::new();
        // Each tensor comes from one file, and the index, if there is one, agrees.
        for (number, path) in names.iter().enumerate() {
            let file = open_weights(path, reach)?;
            let name = name_of(path);
            for (own, tensor) in file.layout()?.tensors().iter().enumerate() {
                if let Some(other) = seen.insert(tensor.name.clone(), number) {
                    let other = name_of(&names[other]);
                    let what = format!("tensor {:?} is in {other} and in {name}", tensor.name);
                    return Err(unusable(&at, what));
                }
                let listed = is_listed(index.as_ref(), &tensor.name, &name);
                if !listed.map_err(|what| unusable(&at, what))? {
                    unlisted.push(tensor.name.clone());
                }
                tensors.push((tensor.name.clone(), tensor.dtype, tensor.shape.clone()));
                places.push((number, own));
            }
            files.push(file);
        }
        if let Some(first) = unlisted.first() {
            tracing::warn!(
                "{}: {} tensors, such as {first:?}, are taken along though its index does not list them",
                at.display(),
                unlisted.len()
            );
        }
        // An index may also name tensors that no file has.
        let mut said = index.iter().flatten();
        if let Some((tensor, file)) = said.find(|(tensor, _)| !seen.contains_key(*tensor)) {
            let what =
                format!("its index has tensor {tensor:?} in {file:?}, which does not have it");
            return Err(unusable(&at, what));
        }
        if tensors.is_empty() {
            return Err(unusable(&at, "it has no tensors"));
        }
        let layout = Layout::new(tensors).map_err(weightsync_engine::Error::from)?;
        Ok(Self {
            files: extra_files(&at, reach)?,
            source: at.clone(),
            path: at,
            weights: CheckpointWeights::Files(files),
            layout,
            places,
            attributes: Attributes::new(Strategy::StateDict),
            progress: None,
        })
    }

    /// Where the weights are: the file, or the directory that they were found in.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The small files that the model needs in addition to its weights: its configuration, and those of
    /// its tokenizer. A bare file has none.
    pub fn files(&self) -> &[(String, Vec<u8>)] {
        &self.files
    }

    fn is_of_store(&self) -> bool {
        matches!(self.weights, CheckpointWeights::Stored(_))
    }

    /// The same weights as another version of the model that is described: its tensors in that order,
    /// and what a checkpoint does not say about them. False if it is another model.
    fn arrange(&mut self, layout: &Layout, attributes: &Attributes) -> bool {
        let same = |tensor: &weightsync_core::TensorSpec| {
            let own = self.layout.index_of(&tensor.name)?;
            let found = &self.layout.tensors()[own];
            (found.dtype == tensor.dtype && found.shape == tensor.shape).then_some(own)
        };
        // In the order of the version before: the new version can then be saved as changes.
        let order: Option<Vec<_>> = layout.tensors().iter().map(same).collect();
        let Some(order) = order.filter(|order| order.len() == self.layout.len()) else {
            return false;
        };
        self.places = order.into_iter().map(|own| self.places[own]).collect();
        self.layout = layout.clone();
        self.attributes = attributes.clone();
        true
    }

    fn read_at(&self, place: (usize, usize), start: usize, piece: &mut [u8]) -> io::Result<()> {
        // Each piece is a place at which a signal can end the call.
        look_for_interruption()?;
        match &self.weights {
            CheckpointWeights::Files(files) => files[place.0]
                .read_at(place.1, start as u64, piece)
                .map_err(io::Error::other)?,
            CheckpointWeights::Stored(snapshot) => {
                let tensor = &snapshot.layout().tensors()[place.1];
                let bytes = tensor.range.of(snapshot.bytes()).unwrap_or_default();
                let bytes = bytes.get(start..start + piece.len());
                piece.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
            }
        }
        match &self.progress {
            Some(progress) => progress.moved(piece.len()),
            None => Ok(()),
        }
    }
}

impl WeightExtractor for Checkpoint {
    fn layout(&self) -> weightsync_engine::Result<Layout> {
        Ok(self.layout.clone())
    }

    fn extract(
        &self,
        take: &mut dyn FnMut(&[Extracted<'_>]) -> weightsync_engine::Result<()>,
    ) -> weightsync_engine::Result<()> {
        if let Some(progress) = &self.progress {
            let bytes = self.layout.payload_bytes();
            progress.begins(&self.path.display().to_string(), Work::Reads(bytes))?;
        }
        let reads = self.places.iter().map(|&place| {
            move |whole: &mut [u8]| -> io::Result<()> {
                let mut pieces = whole.chunks_mut(PIECE).enumerate();
                pieces.try_for_each(|(number, piece)| self.read_at(place, number * PIECE, piece))
            }
        });
        let reads: Vec<_> = reads.collect();
        let tensors = self.layout.tensors().iter().zip(&reads);
        let lent = tensors.map(|(tensor, read)| Extracted {
            name: &tensor.name,
            data: TensorData::Read {
                dtype: tensor.dtype,
                shape: &tensor.shape,
                read,
            },
        });
        take(&lent.collect::<Vec<_>>()).map_err(|error| match interrupt::is_interrupted() {
            // Then no tensor is at fault.
            true => weightsync_engine::Error::Interrupted,
            false => error,
        })
    }

    fn attributes(&self) -> weightsync_engine::Result<Attributes> {
        Ok(self.attributes.clone())
    }
}

/// Opens a file with weights.
///
/// # Errors
///
/// [`StoreError::Pickled`], and those of a file that is not safetensors.
fn open_weights(path: &Path, reach: &Reach) -> Result<SafetensorsFile> {
    let opened = reach.open(path)?;
    // Asked before the file is parsed, so that the error says how to convert it.
    let is_pickled = pickle::is_one(path, &opened);
    SafetensorsFile::of(opened, path).map_err(|error| match is_pickled {
        true => pickle::refused(path),
        false => error.into(),
    })
}

/// Whether the index lists a tensor that this file has. True if there is no index.
///
/// # Errors
///
/// It lists the tensor in another file.
fn is_listed(
    index: Option<&BTreeMap<String, String>>,
    tensor: &str,
    file: &str,
) -> Result<bool, String> {
    match index.map(|index| index.get(tensor)) {
        None => Ok(true),
        Some(Some(listed)) if *listed == file => Ok(true),
        Some(Some(other)) => Err(format!(
            "tensor {tensor:?} is in {file}, but its index has it in {other:?}"
        )),
        // As some programs write it.
        Some(None) => Ok(false),
    }
}

/// Which file each tensor is in.
fn read_index(path: &Path, reach: &Reach) -> Result<BTreeMap<String, String>> {
    #[derive(Deserialize)]
    struct SafetensorsIndex {
        weight_map: BTreeMap<String, String>,
    }
    let bytes = read_small(path, MAX_INDEX, reach)?;
    let index: SafetensorsIndex = serde_json::from_slice(&bytes).map_err(|error| {
        unusable(
            path,
            format!("it is not the index of a checkpoint: {error}"),
        )
    })?;
    Ok(index.weight_map)
}

/// The bytes of a small, plain file.
fn read_small(path: &Path, most: u64, reach: &Reach) -> Result<Vec<u8>> {
    let file = reach.open(path)?;
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        file.take(most + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > most {
            true => Err(io::Error::other(format!(
                "it is longer than {most} bytes, which is the most for a file like this"
            ))),
            false => Ok(bytes),
        }
    };
    read().map_err(StoreError::file("reading", path.display().to_string()))
}

/// The files of a directory that a model needs in addition to its weights.
fn extra_files(at: &Path, reach: &Reach) -> Result<Vec<(String, Vec<u8>)>> {
    if !at.is_dir() {
        return Ok(Vec::new());
    }
    let mut dir = at.to_owned();
    // Some trainers keep them apart from the weights.
    let below = at.join("huggingface");
    if !at.join("config.json").exists() && below.join("config.json").exists() {
        dir = below;
    }
    let mut names = find::names(&dir)?;
    // What a model needs to run, and nothing else of the trainer's directory.
    names.retain(|name| belongs_to_model(name) && dir.join(name).is_file());
    let mut files = Vec::with_capacity(names.len());
    // The bound is for all files together.
    let mut left = MAX_EXTRA;
    for name in names {
        let path = dir.join(&name);
        let bytes = read_small(&path, MAX_FILE.min(left), reach)?;
        left -= bytes.len() as u64;
        files.push((name, bytes));
    }
    Ok(files)
}

/// Whether a file next to weights is one that programs read to make the model.
fn belongs_to_model(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "merges.txt",
        "modules.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
    ];
    let by_pattern = name.starts_with("tokenizer")
        || name.starts_with("vocab")
        || name.ends_with("_config.json")
        || name.ends_with(".jinja");
    (NAMES.contains(&name) || by_pattern) && is_extra_file(name) && is_plain_data(name)
}

/// Whether a file next to weights is data by its name, which somebody else may have chosen: no code, nothing pickled,
/// and no option of a command that is given all names.
fn is_plain_data(name: &str) -> bool {
    const ENDS: &[&str] = &[
        "bpe", "csv", "jinja", "json", "jsonl", "md", "model", "tiktoken", "toml", "txt", "v3",
        "yaml", "yml",
    ];
    let end = name
        .rsplit_once('.')
        .map(|(_, end)| end.to_ascii_lowercase());
    !name.starts_with('-') && end.is_some_and(|end| ENDS.contains(&&*end))
}

fn unusable(path: &Path, what: impl Into<String>) -> StoreError {
    StoreError::Checkpoint {
        path: path.display().to_string(),
        what: what.into(),
    }
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

impl Store {
    /// The files that were saved with the weights of a version: `config.json`, a tokenizer's. `model` is
    /// not needed in a store of one model.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load), and [`StoreError::SeveralModels`].
    pub fn files(&self, which: &Which, model: Option<&ModelId>) -> Result<Vec<(String, Vec<u8>)>> {
        let read = self.read(which, &|manifest| {
            self.extra_files(self.stored_model(manifest, model)?)
        })?;
        Ok(read.0)
    }

    /// The files next to the weights of an anchor, checked. The caller has a lease.
    pub(crate) fn extra_files(
        &self,
        stored: &crate::format::Stored,
    ) -> Result<Vec<(String, Vec<u8>)>> {
        let files = stored.anchor.files.iter();
        let mut read = Vec::new();
        for file in files.filter(|file| is_extra(file)) {
            let path = stored.anchor.at.file(&stored.model, &file.name);
            let mut bytes = Vec::new();
            // Checked while it is read, because such files go to other programs as they are.
            let damage = crate::anchor::check_file(
                self.storage(),
                &path,
                file.bytes,
                file.crc64,
                &mut |piece| {
                    bytes.extend_from_slice(piece);
                    Ok(())
                },
            )?;
            match damage {
                Some(damage) => return Err(damage.into()),
                None => read.push((file.name.clone(), bytes)),
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests;
