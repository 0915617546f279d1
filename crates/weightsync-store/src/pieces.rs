//! The weights of a version that are read a piece at a time.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use weightsync_core::delta::{SPAN, Scratch};
use weightsync_core::digest::Digester;
use weightsync_core::{Run, Version};
use weightsync_engine::transport::ModelSpec;
use weightsync_simd::crc64;

use crate::anchor;
use crate::delta_file::{self, Index};
use crate::error::{Damage, Result, StoreError};
use crate::format::{Manifest, Place, Stored};
use crate::lease::Lease;
use crate::storage::{Blob, Storage};
use crate::store::{Store, Which};

/// The weights of one model of a version, which are read a piece at a time: a reader needs memory for
/// a piece, whatever the size of the model.
///
/// **Guarantee.** Every [piece](Self::piece) is of the version with the digest of its manifest: the
/// whole version is read and compared before the first one, and each piece is compared with the
/// checksum that it had then. No file is removed as long as this lives, where this process can take a
/// lease, and none is kept open between two pieces.
pub struct StoredWeights {
    storage: Arc<dyn Storage>,
    _lease: Lease,
    manifest: Place,
    run: Run,
    stored: Stored,
    spec: ModelSpec,
    /// The paths of the anchor's files with weights, and their bytes.
    shards: Vec<(String, u64)>,
    /// The file of each tensor, and where the tensor begins in it.
    tensors: Vec<(usize, u64)>,
    /// The paths of the deltas, their bytes, and where their parts lie.
    deltas: Vec<(String, u64, Index)>,
    /// The checksum of each piece, once the whole has the digest.
    sums: OnceLock<Vec<u64>>,
    /// Held by the thread that compares the whole.
    comparing: Mutex<()>,
}

impl Store {
    /// Finds a version, whose weights are then read a piece at a time. They are not compared with
    /// their digest yet, so a damaged version is found by the first piece.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load).
    pub fn weights(&self, which: &Which) -> Result<Vec<StoredWeights>> {
        let (weights, _) = self.read(which, &|manifest| {
            let models = manifest.models.iter();
            models
                .map(|stored| StoredWeights::open(self, manifest, stored))
                .collect()
        })?;
        Ok(weights)
    }
}

impl StoredWeights {
    /// The caller has a lease.
    fn open(store: &Store, manifest: &Manifest, stored: &Stored) -> Result<Self> {
        let storage = store.shared_storage();
        let lease = Lease::take(&storage, manifest.place)?;
        let spec = store.spec(&stored.model, &stored.spec)?;
        let layout = &spec.layout;
        let mut tensors = vec![(0, 0); layout.len()];
        let mut shards = Vec::new();
        for shard in anchor::open_shards(&*storage, stored, layout)? {
            for (index, offset) in shard.tensors {
                tensors[index] = (shards.len(), offset);
            }
            shards.push((shard.path, shard.blob.bytes()));
        }
        let deltas = anchor::open_deltas(&*storage, stored, layout, 0)?;
        let deltas = deltas.into_iter();
        Ok(Self {
            _lease: lease,
            manifest: manifest.place,
            run: manifest.run,
            stored: stored.clone(),
            shards,
            tensors,
            deltas: deltas
                .map(|delta| (delta.path, delta.blob.bytes(), delta.index))
                .collect(),
            spec,
            storage,
            sums: OnceLock::new(),
            comparing: Mutex::default(),
        })
    }

    /// The model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.stored.version
    }

    /// The run that wrote it.
    pub fn run(&self) -> Run {
        self.run
    }

    /// Bytes of a piece of the version's image; the last one may be shorter.
    pub const PIECE: u64 = SPAN;

    /// Compares the whole version with its digest, if nobody has yet.
    ///
    /// # Errors
    ///
    /// [`StoreError::Damaged`], and those of the storage.
    pub fn compare(&self) -> Result<()> {
        self.sums().map(drop)
    }

    /// The bytes of a piece.
    ///
    /// # Panics
    ///
    /// If the image has fewer pieces.
    ///
    /// # Errors
    ///
    /// Those of [`compare`](Self::compare).
    pub fn piece(&self, piece: usize) -> Result<Vec<u8>> {
        let expected = self.sums()?[piece];
        let mut bytes = Vec::new();
        self.read(piece, &mut bytes, &mut Scratch::new())?;
        let got = crc64(&bytes);
        if got == expected {
            return Ok(bytes);
        }
        let what = format!(
            "the files of {} have changed while they were read: piece {piece} has checksum \
             {got:016x}, expected {expected:016x}",
            self.spec.id
        );
        Err(Damage::new(self.storage.name(&self.manifest.manifest()), what).into())
    }

    /// The checksums of all pieces.
    fn sums(&self) -> Result<&[u64]> {
        let one = self.comparing.lock();
        let _one = one.unwrap_or_else(PoisonError::into_inner);
        if let Some(sums) = self.sums.get() {
            return Ok(sums);
        }
        let layout = &self.spec.layout;
        let mut digester = Digester::new(layout.bytes());
        let (mut bytes, mut scratch) = (Vec::new(), Scratch::new());
        let mut sums = Vec::with_capacity(delta_file::spans(layout));
        for piece in 0..delta_file::spans(layout) {
            match self.read(piece, &mut bytes, &mut scratch) {
                // It may be the first that does not fit one before it which is damaged.
                Err(StoreError::Damaged(found)) => {
                    let blamed = anchor::blame(&*self.storage, &self.stored)?;
                    return Err(blamed.unwrap_or(found).into());
                }
                read => read?,
            }
            sums.push(crc64(&bytes));
            let fed = digester.tensor(piece as u64 * SPAN, &bytes);
            fed.unwrap_or_else(|error| unreachable!("pieces lie in the image: {error}"));
        }
        anchor::has_digest(&*self.storage, self.manifest, &self.stored, digester)?;
        Ok(self.sums.get_or_init(|| sums))
    }

    /// Reads a piece from the anchor's files, and brings it to this version.
    fn read(&self, piece: usize, bytes: &mut Vec<u8>, scratch: &mut Scratch) -> Result<()> {
        let layout = &self.spec.layout;
        let range = delta_file::range_of(layout, piece);
        bytes.clear();
        bytes.resize(range.len(), 0);
        let (start, end) = (range.start as u64, range.end as u64);
        let mut open: Option<(usize, Box<dyn Blob>)> = None;
        let all = layout.tensors();
        let first = all.partition_point(|tensor| tensor.range.offset + tensor.range.len <= start);
        for (tensor, (shard, offset)) in all.iter().zip(&self.tensors).skip(first) {
            let from = start.max(tensor.range.offset);
            let to = end.min(tensor.range.offset + tensor.range.len);
            if tensor.range.offset >= end {
                break;
            }
            if from >= to {
                continue;
            }
            let (path, len) = &self.shards[*shard];
            let blob = match open.take_if(|(of, _)| of == shard) {
                Some((_, blob)) => blob,
                None => anchor::open(&*self.storage, path, *len)?,
            };
            let place = &mut bytes[(from - start) as usize..(to - start) as usize];
            blob.read_at(offset + (from - tensor.range.offset), place)
                .map_err(|error| anchor::cut_short(&*self.storage, path, error))?;
            open = Some((*shard, blob));
        }
        let mut part = Vec::new();
        for (path, len, index) in &self.deltas {
            if index.part(piece).1 > 0 {
                let blob = anchor::open(&*self.storage, path, *len)?;
                let delta = (&**path, &*blob, index);
                let span = (layout, piece);
                anchor::apply(&*self.storage, delta, span, bytes, &mut part, scratch)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for StoredWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredWeights")
            .field("store", &self.storage.name(""))
            .field("model", &self.spec.id)
            .field("version", &self.stored.version)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
