//! The weights of a version: written as a checkpoint directory, and assembled from it and deltas.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use weightsync_core::Layout;
use weightsync_core::delta::{SPAN, Scratch};
use weightsync_core::digest::Digester;
use weightsync_engine::Snapshot;
use weightsync_engine::safetensors_format::{SafetensorsHeader, Shard};
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_engine::transport::{Image, ModelSpec};
use weightsync_simd::{Crc64, crc64};

use crate::delta_file::{self, DeltaIndex};
use crate::error::{Damage, Result, StoreError};
use crate::format::{Crc, DELTA, FileEntry, Stored, VersionKey};
use crate::storage::{Blob, Storage, Upload};
use crate::threads;

/// Bytes that are read or written at once: a multiple of 64, as a digest needs.
const PIECE: usize = 4 << 20;

/// The end of the names of files with weights.
pub(crate) const SAFETENSORS: &str = ".safetensors";

/// The file that says which file each tensor is in, if there are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// What is saved next to the weights, such as `config.json` and a tokenizer's files.
pub(crate) type ExtraFiles = [(String, Vec<u8>)];

/// Writes a full version of a model. `dir` is what its files' paths begin with, and `budget` the most
/// bytes of tensors in one file.
pub(crate) fn write(
    storage: &dyn Storage,
    dir: &str,
    snapshot: &Snapshot,
    extra: &ExtraFiles,
    budget: u64,
) -> Result<Vec<FileEntry>> {
    let layout = snapshot.layout();
    let metadata = metadata_of(snapshot);
    let unable = |source| {
        StoreError::from(weightsync_engine::Error::File {
            action: "writing",
            path: storage.name(dir).into(),
            source,
        })
    };
    // One file, or shards that are cut by the budget, as other programs expect them.
    let shards = Shard::cut(layout, budget, &metadata).map_err(unable)?;
    let mut files = Vec::new();
    let mut map = serde_json::Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = shard_name(index, shards.len());
        // The index says for each tensor which file has it.
        for &tensor in &shard.tensors {
            let tensor = layout.tensors()[tensor].name.clone();
            map.insert(tensor, name.clone().into());
        }
        let tensors = shard.tensors.iter().map(|&tensor| {
            let range = layout.tensors()[tensor].range;
            range.of(snapshot.bytes()).unwrap_or_default()
        });
        let parts = std::iter::once(&shard.header[..]).chain(tensors);
        files.push(write_file(storage, dir, &name, parts)?);
    }
    // A single file needs no index: programs find it by its name.
    if shards.len() > 1 {
        let index = serde_json::json!({
            "metadata": { "total_size": layout.payload_bytes() },
            "weight_map": map,
        });
        let text = index.to_string();
        let parts = [text.as_bytes()].into_iter();
        files.push(write_file(storage, dir, INDEX, parts)?);
    }
    for (name, bytes) in extra {
        let parts = [&bytes[..]].into_iter();
        files.push(write_file(storage, dir, name, parts)?);
    }
    Ok(files)
}

/// The metadata of each file with weights.
fn metadata_of(snapshot: &Snapshot) -> HashMap<String, String> {
    HashMap::from([
        ("format".to_owned(), "pt".to_owned()),
        ("weightsync.model".to_owned(), snapshot.model().to_string()),
        (
            "weightsync.version".to_owned(),
            snapshot.version().0.to_string(),
        ),
    ])
}

/// The name of a file with weights, one of `count`.
fn shard_name(index: usize, count: usize) -> String {
    // The names that transformers and vLLM look for.
    match count {
        1 => format!("model{SAFETENSORS}"),
        count => format!("model-{:05}-of-{count:05}{SAFETENSORS}", index + 1),
    }
}

/// Writes one file of a version.
pub(crate) fn write_file<'a>(
    storage: &dyn Storage,
    dir: &str,
    name: &str,
    parts: impl Iterator<Item = &'a [u8]>,
) -> Result<FileEntry> {
    let path = format!("{dir}{name}");
    // Made of the bytes as they are written, so that a later check of the file needs no version.
    let mut crc = Crc64::new();
    let mut bytes = 0;
    let write = || -> io::Result<()> {
        let mut upload = storage.upload(&path)?;
        let mut pending = Vec::with_capacity(PIECE);
        for part in parts {
            for piece in part.chunks(PIECE) {
                crc.update(piece);
                bytes += piece.len() as u64;
                append(&mut *upload, &mut pending, piece)?;
            }
        }
        upload.write(&pending)?;
        upload.finish()
    };
    write().map_err(StoreError::file("writing", storage.name(&path)))?;
    Ok(FileEntry {
        name: name.into(),
        bytes,
        crc64: Crc(crc.value()),
    })
}

/// Writes a piece; small ones are gathered.
fn append(upload: &mut dyn Upload, pending: &mut Vec<u8>, piece: &[u8]) -> io::Result<()> {
    // Small tensors are written together: each write is a call of the system, or a part of an
    // upload.
    if pending.len() + piece.len() > PIECE {
        upload.write(pending)?;
        pending.clear();
    }
    match piece.len() < PIECE / 4 {
        true => pending.extend_from_slice(piece),
        false => {
            upload.write(pending)?;
            pending.clear();
            upload.write(piece)?;
        }
    }
    Ok(())
}

/// The names of files that one has and the other has not, or that differ.
pub(crate) fn differing(files: &ExtraFiles, there: &[FileEntry]) -> Vec<String> {
    let there = || there.iter().filter(|file| is_extra(file));
    let changed = files.iter().filter(|(name, bytes)| {
        !there().any(|file| {
            file.name == *name
                && file.bytes == bytes.len() as u64
                && file.crc64 == Crc(crc64(bytes))
        })
    });
    let changed = changed.map(|(name, _)| name.clone());
    let gone = there().filter(|file| !files.iter().any(|(name, _)| *name == file.name));
    changed.chain(gone.map(|file| file.name.clone())).collect()
}

/// Whether a file of an anchor is neither weights nor their index.
pub(crate) fn is_extra(file: &FileEntry) -> bool {
    !file.name.ends_with(SAFETENSORS) && file.name != INDEX
}

/// A version that is in memory, and how it is stored.
#[derive(Clone, Debug)]
pub(crate) struct StoredBase {
    pub(crate) snapshot: Snapshot,
    pub(crate) stored: Stored,
}

impl StoredBase {
    /// Whether `stored` is this version with further deltas, or none.
    pub(crate) fn is_below(&self, stored: &Stored) -> bool {
        let own = &self.stored;
        // Then the base's bytes are those after the first of these deltas.
        own.model == stored.model
            && own.spec == stored.spec
            && own.anchor == stored.anchor
            && stored.deltas.starts_with(&own.deltas)
    }
}

/// Reads one version of a model and checks it. `spare` is memory that may be used again. Of a version
/// [above](StoredBase::is_below) a base, only the deltas since the base are read.
pub(crate) fn read(
    storage: &dyn Storage,
    manifest: VersionKey,
    stored: &Stored,
    spec: &ModelSpec,
    spare: Option<Image>,
    base: Option<&StoredBase>,
) -> Result<Image> {
    let layout = &spec.layout;
    // These deltas are in the base already.
    let known = base.map_or(0, |base| base.stored.deltas.len());
    let deltas = open_deltas(storage, stored, layout, known)?;
    let shards = match base {
        Some(_) => None,
        None => Some(open_shards(storage, stored, layout)?),
    };
    // The files are as long as the layout is, so it is no claim of a size that nothing has.
    let spare = spare.filter(|image| image.layout() == layout);
    let mut image = spare.unwrap_or_else(|| Image::zeros(layout));
    let mut digester = match &shards {
        // With deltas the digest is that of the folded image.
        Some(shards) => read_shards(storage, shards, &mut image, deltas.is_empty())?,
        None => Digester::new(layout.bytes()),
    };
    // A version without deltas is the anchor itself.
    if base.is_some() || !deltas.is_empty() {
        let base = base.map(|base| base.snapshot.bytes());
        digester = match fold(storage, &deltas, base, &mut image) {
            // It may be the first that does not fit one before it which is damaged.
            Err(StoreError::Damaged(found)) => {
                return Err(blame(storage, stored)?.unwrap_or(found).into());
            }
            folded => folded?,
        };
    }
    has_digest(storage, manifest, stored, digester).map(|()| image)
}

/// Refuses a version that has not the digest of its manifest, and names the file that is damaged.
pub(crate) fn has_digest(
    storage: &dyn Storage,
    manifest: VersionKey,
    stored: &Stored,
    digester: Digester,
) -> Result<()> {
    let digest = digester.finish().map_err(|error| {
        let file = storage.name(&manifest.manifest());
        Damage::new(file, error.to_string())
    })?;
    match digest == stored.digest {
        true => Ok(()),
        false => {
            let (model, expected) = (&stored.model, stored.digest);
            let what = format!("the files of {model} have digest {digest}, expected {expected}");
            let otherwise = Damage::new(storage.name(&manifest.manifest()), what);
            Err(blame(storage, stored)?.unwrap_or(otherwise).into())
        }
    }
}

/// A file of an anchor that holds tensors, and where each of them lies and belongs.
pub(crate) struct OpenShard {
    pub(crate) path: String,
    pub(crate) blob: Box<dyn Blob>,
    /// The index of each tensor in the layout, and its offset in the file.
    pub(crate) tensors: Vec<(usize, u64)>,
}

/// Opens the files with weights, and checks that they have every tensor once.
pub(crate) fn open_shards(
    storage: &dyn Storage,
    stored: &Stored,
    layout: &Layout,
) -> Result<Vec<OpenShard>> {
    let mut shards = Vec::new();
    // Every tensor has to come from one file, no more and no less.
    let mut found = vec![false; layout.len()];
    let files = stored.anchor.files.iter();
    for file in files.filter(|file| file.name.ends_with(SAFETENSORS)) {
        let path = stored.anchor.at.file(&stored.model, &file.name);
        let blob = open(storage, &path, file.bytes)?;
        let mut failed = None;
        // An error of the storage must not be told as damage: it is kept apart.
        let header = SafetensorsHeader::read(file.bytes, &mut |at, place| {
            let read = blob.read_at(at, place);
            read.map_err(|error| {
                let kind = error.kind();
                failed = Some(error);
                kind.into()
            })
        });
        let header = header.map_err(|error| match failed {
            // What cannot be read is not damaged for that.
            Some(error) => cut_short(storage, &path, error),
            None => Damage::new(storage.name(&path), error.to_string()).into(),
        })?;
        let mut tensors = Vec::with_capacity(header.tensors.len());
        for ((name, dtype, shape), offset) in header.tensors.into_iter().zip(header.offsets) {
            let index = layout.index_of(&name);
            let index = index.filter(|index| {
                let expected = &layout.tensors()[*index];
                expected.dtype == dtype && expected.shape == shape && !found[*index]
            });
            let Some(index) = index else {
                let what = format!("its tensor {name:?} is not one of the version");
                return Err(Damage::new(storage.name(&path), what).into());
            };
            found[index] = true;
            tensors.push((index, offset));
        }
        shards.push(OpenShard {
            path,
            blob,
            tensors,
        });
    }
    match found.iter().position(|found| !found) {
        None => Ok(shards),
        Some(missing) => {
            let file = storage.name(&stored.anchor.at.data());
            let name = &layout.tensors()[missing].name;
            Err(Damage::new(file, format!("no file has tensor {name:?}")).into())
        }
    }
}

/// A file of the version, of the length that its manifest says.
pub(crate) fn open(storage: &dyn Storage, path: &str, bytes: u64) -> Result<Box<dyn Blob>> {
    let name = || storage.name(path);
    let blob = storage.open(path).map_err(|error| match error.kind() {
        // A directory or a FIFO is in its place.
        io::ErrorKind::InvalidData => Damage::new(name(), error.to_string()).into(),
        _ => StoreError::file("opening", name())(error),
    })?;
    let blob = blob.ok_or_else(|| Damage::new(name(), "it is missing"))?;
    // The cheapest check comes first: a file that was cut short is found without a read.
    match blob.bytes() == bytes {
        true => Ok(blob),
        false => {
            let got = blob.bytes();
            Err(Damage::new(name(), format!("it has {got} bytes, expected {bytes}")).into())
        }
    }
}

/// Reads every tensor into its place. `digested`, the result has the digest of the image.
fn read_shards(
    storage: &dyn Storage,
    shards: &[OpenShard],
    image: &mut Image,
    digested: bool,
) -> Result<Digester> {
    struct ReadJob<'a> {
        shard: &'a OpenShard,
        offset: u64,
        /// Where it begins in the image.
        at: u64,
        place: &'a mut [u8],
    }
    let layout = image.layout().clone();
    // Cut into pieces, so that threads share large tensors, too.
    let mut places: Vec<_> = image.tensors_mut().into_iter().map(Some).collect();
    let mut jobs = Vec::new();
    for shard in shards {
        for &(index, offset) in &shard.tensors {
            let start = layout.tensors()[index].range.offset;
            // Each place is taken once: `open_shards` has found every tensor in one file.
            let place = places[index].take().unwrap_or_default();
            jobs.extend(place.chunks_mut(PIECE).enumerate().map(|(piece, place)| {
                let from = (piece * PIECE) as u64;
                ReadJob {
                    shard,
                    offset: offset + from,
                    at: start + from,
                    place,
                }
            }));
        }
    }
    let parts = jobs.len();
    let jobs = Mutex::new(jobs.into_iter());
    let all = Mutex::new(Ok(Digester::new(layout.bytes())));
    threads::run(parts, || {
        let work = || -> Result<Digester> {
            let mut digester = Digester::new(layout.bytes());
            loop {
                let job = jobs.locked().next();
                // One failure ends all threads. An interruption is seen by the caller's thread
                // alone, and ends the others this way.
                let Some(job) = job.filter(|_| !has_failed(&all)) else {
                    return Ok(digester);
                };
                let read = job.shard.blob.read_at(job.offset, job.place);
                read.map_err(|error| cut_short(storage, &job.shard.path, error))?;
                if digested {
                    let fed = digester.tensor(job.at, job.place);
                    fed.unwrap_or_else(|error| unreachable!("tensors lie in the image: {error}"));
                }
            }
        };
        merge(&all, work());
    });
    all.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Adds what a thread digested, or keeps the first error.
fn merge(all: &Mutex<Result<Digester>>, done: Result<Digester>) {
    let mut all = all.locked();
    match (&mut *all, done) {
        // Digests of parts add up in any order.
        (Ok(all), Ok(done)) => {
            let merged = all.merge(&done);
            merged.unwrap_or_else(|error| unreachable!("they are of one image: {error}"));
        }
        (Ok(_), Err(error)) => *all = Err(error),
        (Err(_), _) => {}
    }
}

/// Whether another thread has failed, or was interrupted: what this one does is of no more use.
fn has_failed(all: &Mutex<Result<Digester>>) -> bool {
    all.locked().is_err()
}

pub(crate) struct OpenDelta {
    pub(crate) path: String,
    pub(crate) blob: Box<dyn Blob>,
    pub(crate) index: DeltaIndex,
}

/// Opens the deltas after those that are `known`.
pub(crate) fn open_deltas(
    storage: &dyn Storage,
    stored: &Stored,
    layout: &Layout,
    known: usize,
) -> Result<Vec<OpenDelta>> {
    let open_delta = |file: &crate::format::DeltaFile| {
        let path = file.at.file(&stored.model, DELTA);
        let blob = open(storage, &path, file.bytes)?;
        let len = DeltaIndex::header_bytes(layout);
        if (len as u64) > file.bytes {
            let what = format!("it has {} bytes, expected {len} or more", file.bytes);
            return Err(Damage::new(storage.name(&path), what).into());
        }
        let mut header = vec![0; len];
        let read = blob.read_at(0, &mut header);
        read.map_err(|error| cut_short(storage, &path, error))?;
        let index = DeltaIndex::read(layout, &header, file.bytes);
        let index = index.map_err(|what| Damage::new(storage.name(&path), what))?;
        Ok(OpenDelta { path, blob, index })
    };
    stored.deltas[known..].iter().map(open_delta).collect()
}

/// Brings every span to the newest version, all deltas in one pass; from the base's bytes, if there is
/// one. The result has the digest.
fn fold(
    storage: &dyn Storage,
    deltas: &[OpenDelta],
    base: Option<&[u8]>,
    image: &mut Image,
) -> Result<Digester> {
    let layout = image.layout().clone();
    // Spans do not touch each other, so threads take them in any order.
    let spans = image.bytes_mut().chunks_mut(SPAN as usize).enumerate();
    let spans = Mutex::new(spans);
    let all = Mutex::new(Ok(Digester::new(layout.bytes())));
    threads::run(delta_file::spans(&layout), || {
        let work = || -> Result<Digester> {
            let mut digester = Digester::new(layout.bytes());
            let mut scratch = Scratch::new();
            let mut part = Vec::new();
            loop {
                let span = spans.locked().next();
                let Some((span, place)) = span.filter(|_| !has_failed(&all)) else {
                    return Ok(digester);
                };
                // Without a base the anchor lies in the image already.
                if let Some(base) = base {
                    let at = span * SPAN as usize;
                    place.copy_from_slice(&base[at..at + place.len()]);
                }
                for OpenDelta { path, blob, index } in deltas {
                    let delta = (&**path, &**blob, index);
                    apply(
                        storage,
                        delta,
                        (&layout, span),
                        place,
                        &mut part,
                        &mut scratch,
                    )?;
                }
                let fed = digester.tensor(span as u64 * SPAN, place);
                fed.unwrap_or_else(|error| unreachable!("spans lie in the image: {error}"));
            }
        };
        merge(&all, work());
    });
    all.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Brings a span to the version of a delta. `part` is memory for what is read.
pub(crate) fn apply(
    storage: &dyn Storage,
    (path, blob, index): (&str, &dyn Blob, &DeltaIndex),
    (layout, span): (&Layout, usize),
    place: &mut [u8],
    part: &mut Vec<u8>,
    scratch: &mut Scratch,
) -> Result<()> {
    let (offset, len) = index.part(span);
    // A span that did not change needs no read.
    if len == 0 {
        return Ok(());
    }
    part.resize(len, 0);
    let read = blob.read_at(offset, part);
    read.map_err(|error| cut_short(storage, path, error))?;
    let applied = index.apply(layout, span, part, place, scratch);
    applied.map_err(|error| Damage::new(storage.name(path), format!("span {span}: {error}")).into())
}

/// A file that became shorter since it was opened is damaged.
pub(crate) fn cut_short(storage: &dyn Storage, path: &str, error: io::Error) -> StoreError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Damage::new(storage.name(path), "it is cut short").into(),
        io::ErrorKind::IsADirectory => Damage::new(storage.name(path), "it is a directory").into(),
        _ => StoreError::file("reading", storage.name(path))(error),
    }
}

/// Finds the file that is not what was written there.
pub(crate) fn blame(storage: &dyn Storage, stored: &Stored) -> Result<Option<Damage>> {
    for (path, bytes, crc64) in stored.files() {
        // The first file that is not as it was written.
        if let Some(damage) = check_file(storage, &path, bytes, crc64, &mut |_| Ok(()))? {
            return Ok(Some(damage));
        }
    }
    Ok(None)
}

/// Whether every file of a version is there and has its length.
pub(crate) fn is_there(storage: &dyn Storage, stored: &Stored) -> Result<bool> {
    for (path, bytes, _) in stored.files() {
        match open(storage, &path, bytes) {
            Err(StoreError::Damaged(damage)) => {
                tracing::warn!("{damage}; the next version is saved whole");
                return Ok(false);
            }
            opened => drop(opened?),
        }
    }
    Ok(true)
}

/// Reads a file and compares its checksum; hands over every piece.
pub(crate) fn check_file(
    storage: &dyn Storage,
    path: &str,
    bytes: u64,
    crc64: Crc,
    take: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<Option<Damage>> {
    let blob = match open(storage, path, bytes) {
        Err(StoreError::Damaged(damage)) => return Ok(Some(damage)),
        opened => opened?,
    };
    let mut crc = Crc64::new();
    // Piece by piece: files are larger than the memory that a check may take.
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while at < bytes {
        let len = PIECE.min((bytes - at) as usize);
        let place = &mut piece[..len];
        match blob
            .read_at(at, place)
            .map_err(|error| cut_short(storage, path, error))
        {
            Err(StoreError::Damaged(damage)) => return Ok(Some(damage)),
            read => read?,
        }
        crc.update(place);
        take(place)?;
        at += len as u64;
    }
    let got = Crc(crc.value());
    Ok((got != crc64).then(|| {
        let what = format!("its checksum is {got}, expected {crc64}");
        Damage::new(storage.name(path), what)
    }))
}
