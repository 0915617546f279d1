//! What lasts longer than the service: versions in a store, and the epochs of trainers in a file.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use weightsync_core::synchronizer::Method;
use weightsync_engine::files;
use weightsync_engine::transport::random;
use weightsync_engine::{
    AnyScheme, Epoch, InitInfo, ModelId, Result, SetSnapshot, Snapshot, Version,
};
use weightsync_mem::threads::LockExt as _;
use weightsync_store::{
    Comparison, Keep, ModelVersion, SaveOptions, Saver, Store, StoreError, StoreScheme,
    StoredWeights, Which, Writer,
};

use super::SyncError;
use super::service::SHOWN;

/// The file in the run directory.
const FILE: &str = "synchronizer.json";

/// The longest such file, in bytes.
const LONGEST: u64 = 1 << 20;

/// How many versions' steps the file has.
const STEPS: usize = 64;

/// What a service finds when it starts.
#[derive(Debug, Default)]
pub(super) struct RestoredState {
    /// The newest version of the store, and its step if that is known.
    pub(super) newest: Option<(Version, Option<u64>)>,
    /// Its weights, if the service holds versions.
    pub(super) weights: Vec<Snapshot>,
    /// Where explorers get versions, if they get them from the store.
    pub(super) source: Option<InitInfo>,
    /// The thread that saves versions, if the service holds them.
    pub(super) saver: Option<Saver>,
    /// The store, for those that read it by HTTP.
    pub(super) shelf: Option<Shelf>,
    pub(super) record: ServiceRecord,
}

/// The settings of what lasts.
#[derive(Clone, Debug, Default)]
pub(super) struct Lasting {
    /// The address of a store.
    pub(super) store: Option<String>,
    pub(super) keep: Keep,
    pub(super) run_dir: Option<PathBuf>,
}

impl Lasting {
    /// Refuses settings that do not fit each other.
    pub(super) fn check(&self, method: Method) -> Result<()> {
        let keep = (self.keep != Keep::default()).then(|| self.keep.to_string());
        let (setting, got, expected) = match (method, &self.store, keep) {
            (Method::Direct, Some(store), _) => (
                "store",
                store.clone(),
                "none: with the method nccl the synchronizer has no versions to keep",
            ),
            (Method::Checkpoint, _, Some(keep)) => (
                "keep",
                keep,
                "none: with the method checkpoint the trainer writes the store, and says what it keeps, as \
                 in the scheme store:URL,keep=all",
            ),
            (_, None, Some(keep)) => (
                "keep",
                keep,
                "none: it says which versions a store keeps, so give the store, too",
            ),
            _ => return Ok(()),
        };
        Err(super::settings::bad(setting, expected, &got))
    }

    pub(super) fn find(&self, method: Method) -> Result<RestoredState> {
        self.check(method)?;
        let mut found = RestoredState {
            record: ServiceRecord::read(self.run_dir.clone())?,
            ..RestoredState::default()
        };
        // Without a store every life of the service begins empty, but for its record.
        let Some(address) = &self.store else {
            return Ok(found);
        };
        let store = Store::open(address)?;
        // HTTP clients can read older versions, whatever the method.
        found.shelf = Some(Shelf::new(store.clone()));
        let newest = match method {
            Method::Direct => None,
            Method::Memory => {
                // The whole version is read: the service passes it on from its own memory.
                found.weights = match store.load(&Which::Newest) {
                    Ok(loaded) => {
                        let members = loaded.set.members().iter();
                        members.map(|member| member.snapshot.clone()).collect()
                    }
                    // A new store is no error: the first version comes from a trainer.
                    Err(StoreError::Empty { .. }) => Vec::new(),
                    Err(error) => return Err(error.into()),
                };
                let mut options = SaveOptions::default();
                options.keep = self.keep;
                // Claimed before the service starts: a store has one writer.
                found.saver = Some(Saver::start(Writer::claim(&store, options)?)?);
                found.weights.iter().map(Snapshot::version).max()
            }
            Method::Checkpoint => {
                // The trainer writes this store, and explorers read it. The service only looks
                // which version is newest.
                let versions = store.newest_versions(1)?.versions;
                let models = versions.last().map_or(&[][..], |newest| &newest.models);
                let ids: Vec<ModelId> = models.iter().map(|one| one.model.clone()).collect();
                // An empty store names no models. The trainer's own init info comes when it joins.
                if !ids.is_empty() {
                    let scheme = AnyScheme::new(StoreScheme::new(address)?);
                    found.source = Some(InitInfo::of(&scheme, &ids)?);
                }
                models.iter().map(|one| one.version).max()
            }
        };
        found.newest = newest.map(|version| {
            let step = found.record.steps.get(&version.0);
            (version, step.copied())
        });
        Ok(found)
    }
}

/// What a later life of the service has to know.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct ServiceRecord {
    /// The highest epoch of a trainer.
    pub(super) epoch: Epoch,
    /// Tells versions of this life, and of those with its record, from others of the same number.
    pub(super) lineage: u64,
    /// The highest number that was announced for a version.
    #[serde(default)]
    pub(super) highest: u64,
    /// The steps that made the newest versions.
    pub(super) steps: BTreeMap<u64, u64>,
    /// Whether the trainer has stopped in order.
    #[serde(default)]
    pub(super) stopped: bool,
    #[serde(skip)]
    file: Option<PathBuf>,
}

impl ServiceRecord {
    fn new() -> Result<Self> {
        let lineage = u64::from_le_bytes(random()?);
        Ok(Self {
            lineage,
            ..Self::default()
        })
    }

    fn read(run_dir: Option<PathBuf>) -> Result<Self> {
        let Some(dir) = run_dir else {
            return Self::new();
        };
        let file = dir.join(FILE);
        let failed = |source: io::Error| SyncError::Start {
            what: format!("use {}", file.display()),
            source,
        };
        std::fs::create_dir_all(&dir).map_err(failed)?;
        let read = files::open(&file).and_then(|from| {
            // Bounded: the file is input like any other.
            let mut bytes = Vec::new();
            from.take(LONGEST).read_to_end(&mut bytes).map(|_| bytes)
        });
        let mut record = match read {
            // A damaged file must not keep the service from starting. What is lost is the fence
            // against old trainers.
            Ok(bytes) => serde_json::from_slice::<Self>(&bytes).or_else(|error| {
                tracing::warn!(
                    "{} is damaged ({error}) and begun again: an old trainer is not fenced off now",
                    file.display()
                );
                Self::new()
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::new()?,
            Err(error) => return Err(failed(error).into()),
        };
        if record.is_spent() {
            tracing::warn!(
                "{} has the highest numbers that there are, which no trainer could follow: it is begun again",
                file.display()
            );
            record = Self::new()?;
        }
        record.file = Some(file);
        Ok(record)
    }

    /// Whether nothing can follow the epoch or the version. A service that believed a party wrote so.
    fn is_spent(&self) -> bool {
        // Such a number would refuse every later trainer, in every later life.
        self.epoch.0 == u64::MAX || self.highest == u64::MAX
    }

    /// Notes that a version is about to have this number.
    pub(super) fn announce(&mut self, version: Version) {
        self.highest = self.highest.max(version.0);
        self.note(self.epoch, None);
    }

    /// Notes whether the trainer has stopped in order.
    pub(super) fn set_stopped(&mut self, stopped: bool) {
        self.stopped = stopped;
        self.note(self.epoch, None);
    }

    /// Notes the epoch and a version, for a later life. A file that cannot be written is a warning: only a
    /// restart needs it.
    pub(super) fn note(&mut self, epoch: Epoch, version: Option<(Version, u64)>) {
        self.epoch = epoch;
        if let Some((version, step)) = version {
            self.steps.insert(version.0, step);
        }
        while self.steps.len() > STEPS {
            self.steps.pop_first();
        }
        if let Some(file) = &self.file
            && let Err(error) = self.write(file)
        {
            tracing::warn!("{} cannot be written: {error}", file.display());
        }
    }

    fn write(&self, file: &Path) -> io::Result<()> {
        let bytes = serde_json::to_vec(self)?;
        // The old file stays whole until the new one has taken its name, so a crash leaves one of
        // the two.
        files::replace(file, files::PRIVATE, false, |file| file.write_all(&bytes))
    }
}

/// A store as HTTP clients read it: what is known of the versions that were read last is kept for the next
/// requests, which may be for other ranges. Their weights are not. A version is compared with its digest
/// once, however often it is asked for.
#[derive(Clone, Debug)]
pub(super) struct Shelf(Arc<ShelfInner>);

#[derive(Debug)]
struct ShelfInner {
    store: Store,
    /// The one that was read last comes last.
    known: Mutex<VecDeque<Known>>,
    /// Of versions that are not known any more, too. The oldest comes first.
    compared: Mutex<VecDeque<Arc<Comparison>>>,
    listed: Mutex<NewestVersions>,
}

/// The numbers of the newest versions, and the head that lists them.
#[derive(Debug, Default)]
struct NewestVersions {
    head: Option<Vec<u8>>,
    versions: BTreeSet<Version>,
}

/// A version, and its models.
type Known = (Version, Vec<Arc<StoredWeights>>);

/// How many versions a shelf knows of: the newest, and one more. Each has a lease, so the store keeps it.
const KNOWN: usize = 2;

/// How many comparisons a shelf keeps. Each takes 8 bytes for a piece, and holds no file.
const COMPARED: usize = 256;

impl Shelf {
    pub(super) fn new(store: Store) -> Self {
        Self(Arc::new(ShelfInner {
            store,
            known: Mutex::default(),
            compared: Mutex::default(),
            listed: Mutex::default(),
        }))
    }

    pub(super) fn address(&self) -> String {
        self.0.store.address()
    }

    /// A version of each model that has it.
    ///
    /// # Errors
    ///
    /// Those of [`Store::weights`].
    pub(super) fn weights(&self, version: Version) -> Result<Vec<Arc<StoredWeights>>> {
        if let Some(weights) = again(&mut self.known(), version) {
            return Ok(weights);
        }
        // Any model that every version has will do. The newest version names one.
        let newest = self.0.store.newest_versions(1)?.versions;
        let models = newest.last().map_or(&[][..], |newest| &newest.models);
        let model = models.first().map(|one| one.model.clone());
        let which = Which::Exactly(ModelVersion { model, version });
        // No lock is held while the store is read, which may take long.
        let weights = self.0.store.weights(&which)?;
        // A comparison with the digest that an earlier download has begun goes on.
        let weights = weights.into_iter().map(|one| Arc::new(self.resume(one)));
        let weights: Vec<_> = weights.collect();
        let mut known = self.known();
        // Another request may have read it meanwhile.
        if let Some(weights) = again(&mut known, version) {
            return Ok(weights);
        }
        known.push_back((version, weights.clone()));
        if known.len() > KNOWN {
            known.pop_front();
        }
        Ok(weights)
    }

    /// Has a version go on with what was compared of it before.
    fn resume(&self, mut weights: StoredWeights) -> StoredWeights {
        let mut compared = self.0.compared.locked();
        // The pieces that were compared before need no second pass.
        for known in &*compared {
            weights = weights.resume(known);
        }
        let own = weights.comparison();
        // The version's own comparison moves to the end, as the one that was used last.
        compared.retain(|known| !Arc::ptr_eq(known, own));
        compared.push_back(own.clone());
        if compared.len() > COMPARED {
            compared.pop_front();
        }
        weights
    }

    /// Looks which of the newest versions the store has. Where nothing changed, its head alone is
    /// read.
    ///
    /// # Errors
    ///
    /// Those of [`Store::newest_versions`].
    pub(super) fn list(&self) -> Result<BTreeSet<Version>> {
        let head = self.0.store.head()?;
        let listed = self.listed();
        if listed.head == head {
            return Ok(listed.versions.clone());
        }
        drop(listed);
        // The head has changed, so the versions are read. The head that was read before them is
        // noted: if it has changed again meanwhile, the next call reads again.
        let found = self.0.store.newest_versions(SHOWN)?.versions;
        let model = found.last().and_then(|newest| newest.models.first());
        let model = model.map(|one| one.model.clone());
        let models = found.iter().flat_map(|version| &version.models);
        // Models may have different versions. Downloads name those of the first.
        let models = models.filter(|one| Some(&one.model) == model.as_ref());
        let versions: BTreeSet<_> = models.map(|one| one.version).collect();
        *self.listed() = NewestVersions {
            head,
            versions: versions.clone(),
        };
        Ok(versions)
    }

    /// What was listed last.
    pub(super) fn last_listed(&self) -> BTreeSet<Version> {
        self.listed().versions.clone()
    }

    fn listed(&self) -> MutexGuard<'_, NewestVersions> {
        self.0.listed.locked()
    }

    fn known(&self) -> MutexGuard<'_, VecDeque<Known>> {
        self.0.known.locked()
    }
}

/// A version that is known; it counts as the one that was read last.
fn again(known: &mut VecDeque<Known>, version: Version) -> Option<Vec<Arc<StoredWeights>>> {
    let at = known.iter().position(|(one, _)| *one == version)?;
    let found = known.remove(at)?;
    let weights = found.1.clone();
    known.push_back(found);
    Some(weights)
}

/// The newest version of a trainer's store, if its versions go to one.
pub(super) fn newest_of(from: &InitInfo) -> Result<Version> {
    let Some(address) = StoreScheme::address_of(from) else {
        return Ok(Version::NONE);
    };
    let store = Store::open(address)?;
    let newest = store.newest_versions(1)?.versions;
    let models = newest.iter().flat_map(|newest| &newest.models);
    // The highest of all models: the next version is above each of them.
    let versions = models.map(|model| model.version);
    Ok(versions.max().unwrap_or(Version::NONE))
}

/// A version of a store, for an explorer whose trainer is gone.
pub(super) fn load(from: &InitInfo, address: &str, version: Version) -> Result<SetSnapshot> {
    let store = Store::open(address)?;
    let model = from.models().first().cloned();
    // The fetch is for this version or a newer one.
    let which = Which::AtLeast(ModelVersion { model, version });
    Ok(store.load(&which)?.set)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service that believed a party which joined with the highest numbers wrote them.
    #[test]
    fn record_without_numbers_left_is_begun_again() {
        for (epoch, highest, is_kept) in [(7, 8, true), (u64::MAX, 8, false), (7, u64::MAX, false)]
        {
            let dir = tempfile::tempdir().unwrap();
            let read = || ServiceRecord::read(Some(dir.path().into())).unwrap();
            let mut record = read();
            record.announce(Version(highest));
            record.note(Epoch(epoch), None);
            let again = read();
            let expected = if is_kept { (epoch, highest) } else { (0, 0) };
            assert_eq!((again.epoch.0, again.highest), expected);
            assert_eq!(again.lineage == record.lineage, is_kept);
        }
    }
}
