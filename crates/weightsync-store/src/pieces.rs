//! The weights of a version that are read a piece at a time.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, OnceLock};

use weightsync_core::delta::{SPAN, Scratch};
use weightsync_core::digest::Digester;
use weightsync_core::{Digest, Run, Version};
use weightsync_engine::Error;
use weightsync_engine::transport::ModelSpec;
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_simd::crc64;

use crate::anchor;
use crate::delta_file::{self, DeltaIndex};
use crate::error::{Damage, Result, StoreError};
use crate::format::{StoreManifest, Stored, VersionKey};
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
    manifest: VersionKey,
    run: Run,
    stored: Stored,
    spec: ModelSpec,
    /// The paths of the anchor's files with weights, and their bytes.
    shards: Vec<(String, u64)>,
    /// The file of each tensor, and where the tensor begins in it.
    tensors: Vec<(usize, u64)>,
    /// The paths of the deltas, their bytes, and where their parts lie.
    deltas: Vec<(String, u64, DeltaIndex)>,
    comparison: Arc<Comparison>,
}

/// What comparing a version with its digest has come to. It holds none of the version's files.
#[derive(Debug)]
pub struct Comparison {
    digest: Digest,
    bytes: u64,
    /// The checksum of each piece, once the whole has the digest.
    sums: OnceLock<Vec<u64>>,
    /// What a thread that gave up has left to the next one. Held by the thread that compares.
    begun: Mutex<Begun>,
}

/// The pieces that were read so far.
#[derive(Debug)]
struct Begun {
    digester: Digester,
    sums: Vec<u64>,
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
    fn open(store: &Store, manifest: &StoreManifest, stored: &Stored) -> Result<Self> {
        let storage = store.shared_storage();
        // The lease of `read` ends when it returns. This one lives as long as the weights.
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
            comparison: Arc::new(Comparison::new(stored.digest, spec.layout.bytes())),
            spec,
            storage,
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

    /// The digest of its bytes.
    pub fn digest(&self) -> Digest {
        self.stored.digest
    }

    /// Bytes of a piece of the version's image; the last one may be shorter.
    pub const PIECE: u64 = SPAN;

    /// Compares the whole version with its digest, if nobody has yet.
    ///
    /// # Errors
    ///
    /// [`StoreError::Damaged`], and those of the storage.
    pub fn compare(&self) -> Result<()> {
        self.compare_while(&|| true)
    }

    /// The same, as long as this holds. Where one call stops, the next goes on.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] if it holds no more; those of [`compare`](Self::compare).
    pub fn compare_while(&self, goes_on: &dyn Fn() -> bool) -> Result<()> {
        self.sums(goes_on).map(drop)
    }

    /// What comparing it has come to, for the same version when it is found again.
    pub fn comparison(&self) -> &Arc<Comparison> {
        &self.comparison
    }

    /// Goes on with what was compared before. A comparison of other bytes is not used.
    #[must_use]
    pub fn resume(mut self, known: &Arc<Comparison>) -> Self {
        let of = |one: &Comparison| (one.digest, one.bytes);
        // Sums of another version would call these files damaged.
        if of(known) == of(&self.comparison) {
            self.comparison = known.clone();
        }
        self
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
        // Nothing is handed out before the whole version was compared with its digest.
        let expected = self.sums(&|| true)?[piece];
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
    fn sums(&self, goes_on: &dyn Fn() -> bool) -> Result<&[u64]> {
        let known = &*self.comparison;
        // Held for the whole comparison: one thread makes it, and the others wait for its result.
        let mut begun = known.begun.locked();
        if let Some(sums) = known.sums.get() {
            return Ok(sums);
        }
        let layout = &self.spec.layout;
        let (mut bytes, mut scratch) = (Vec::new(), Scratch::new());
        // An interrupted comparison goes on where it ended.
        for piece in begun.sums.len()..delta_file::spans(layout) {
            if !goes_on() {
                return Err(Error::Interrupted.into());
            }
            match self.read(piece, &mut bytes, &mut scratch) {
                // It may be the first that does not fit one before it which is damaged.
                Err(StoreError::Damaged(found)) => {
                    let blamed = anchor::blame(&*self.storage, &self.stored)?;
                    return Err(blamed.unwrap_or(found).into());
                }
                read => read?,
            }
            begun.sums.push(crc64(&bytes));
            let fed = begun.digester.tensor(piece as u64 * SPAN, &bytes);
            fed.unwrap_or_else(|error| unreachable!("pieces lie in the image: {error}"));
        }
        // Taken out: if the digest is wrong, the next comparison begins from the start.
        let Begun { digester, sums } = mem::replace(&mut *begun, Begun::new(known.bytes));
        anchor::has_digest(&*self.storage, self.manifest, &self.stored, digester)?;
        Ok(known.sums.get_or_init(|| sums))
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
        // Tensors are in order, so those before the piece are skipped by halves.
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
            // Tensors that follow each other often lie in one file, which stays open.
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

impl Comparison {
    fn new(digest: Digest, bytes: u64) -> Self {
        Self {
            digest,
            bytes,
            sums: OnceLock::new(),
            begun: Mutex::new(Begun::new(bytes)),
        }
    }
}

impl Begun {
    fn new(bytes: u64) -> Self {
        Self {
            digester: Digester::new(bytes),
            sums: Vec::new(),
        }
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
