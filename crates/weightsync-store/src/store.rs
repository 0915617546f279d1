//! A store, as its readers see it.

mod finding;
mod names;
mod waiting;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use weightsync_core::{Digest, ModelId, Run, Version};
use weightsync_engine::transport::{Image, ModelSpec};
use weightsync_engine::{Member, SetSnapshot, Snapshot};

use crate::address::Address;
use crate::anchor::{self, StoredBase};
use crate::catalog::{self, Catalog};
use crate::error::{self, Damage, Result, StoreError};
use crate::format::{HEAD, Hash, StoreManifest, Stored, VersionKey};
use crate::lease::Lease;
use crate::progress::{Progress, Work};
use crate::storage::{Metered, Storage};

pub(crate) use self::finding::once;

/// Versions of a model, or of several, in a directory or an object store.
///
/// **Guarantee.** Every version that is loaded is whole and has the digest that its writer made. A
/// file that was damaged is found before anything of it is used, and is named. Loading needs no
/// running trainer, and changes nothing but for a lease that lasts as long as the call.
///
/// ```
/// use weightsync_engine::{SenderSetup, Tensors};
/// use weightsync_store::{SaveOptions, Store, Which, Writer};
///
/// let dir = tempfile::tempdir()?;
/// let store = Store::open(dir.path().join("policy").to_str().unwrap())?;
/// let mut weights = Tensors::new();
/// weights.insert("layer.weight", [2, 2], [1.0_f32, 2.0, 3.0, 4.0])?;
/// let mut writer = Writer::claim(&store, SaveOptions::default())?;
/// writer.save_weights("policy", &weights)?;
///
/// let loaded = store.load(&Which::Newest)?;
/// let policy = loaded.set.only()?;
/// assert_eq!(policy.slice::<f32>("layer.weight")?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Store {
    storage: Arc<dyn Storage>,
    progress: Option<Progress>,
}

/// Which version to load.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Which {
    /// The newest that is whole: damaged versions are passed over, and named.
    Newest,
    /// The newest version of the store in which the model has this version.
    Exactly(ModelVersion),
    /// The newest, once the model has this version or a later one.
    AtLeast(ModelVersion),
    /// The version that was given this name.
    Named(String),
}

/// A version of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelVersion {
    /// The model; none is needed in a store of one model.
    pub model: Option<ModelId>,
    /// Its version.
    pub version: Version,
}

impl From<Version> for ModelVersion {
    fn from(version: Version) -> Self {
        Self {
            model: None,
            version,
        }
    }
}

/// What was loaded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// A version of each model.
    pub set: SetSnapshot,
    /// What was found to be damaged on the way, the newest first.
    pub damage: Vec<Damage>,
}

/// One model that was loaded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadedModel {
    /// Its version.
    pub snapshot: Snapshot,
    /// The number of the version of the store.
    pub sequence: u64,
    /// What was found to be damaged on the way, the newest first.
    pub damage: Vec<Damage>,
}

/// What a store has.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Versions {
    /// The versions that can be loaded unless their weights are damaged, oldest first.
    pub versions: Vec<StoredVersion>,
    /// How many versions the store has, with those that were not asked for.
    pub all: usize,
    /// What is damaged.
    pub damage: Vec<Damage>,
}

/// A version of a store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredVersion {
    /// Its number among all versions of the store.
    pub sequence: u64,
    /// The run that wrote it.
    pub run: Run,
    /// The process that wrote it.
    pub writer: String,
    /// When, in seconds since 1970 by the writer's clock.
    pub at: Duration,
    /// The names it was given.
    pub names: Vec<String>,
    /// Its models.
    pub models: Vec<StoredModel>,
}

/// One model of a version of a store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredModel {
    /// The model.
    pub model: ModelId,
    /// Its version.
    pub version: Version,
    /// The digest of its bytes.
    pub digest: Digest,
    /// Whether its version is another than before.
    pub changed: bool,
    /// The bytes that were written for it; 0 if it did not change.
    pub stored_bytes: u64,
    /// How many deltas are folded onto an anchor; 0 for an anchor.
    pub deltas: usize,
    /// The bytes that loading it reads: its anchor's weights, and its deltas.
    pub read_bytes: u64,
    /// Which share of its elements changed, where that is known.
    pub changes: Option<f64>,
    /// The directory of its anchor, which other programs can load if there are no deltas.
    pub directory: String,
}

/// Files next to the weights: their names and bytes.
type Files = Vec<(String, Vec<u8>)>;

impl Store {
    /// A store at an address: a directory, or, with the feature `objects`, `s3://bucket/path` and what
    /// else that feature brings. Nothing is read or made yet.
    ///
    /// # Errors
    ///
    /// [`StoreError::Address`].
    pub fn open(address: &str) -> Result<Self> {
        Ok(Self::at(&address.parse()?))
    }

    /// The same store, which says what its calls do while they do it. An error that `told` returns ends
    /// the call with that error, and what the call had begun leaves nothing. Threads of the call ask it,
    /// about once for every 4 MiB.
    #[must_use]
    pub fn with_progress(
        &self,
        told: impl Fn(Work) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let progress = Progress::new(told);
        Self {
            storage: Arc::new(Metered::new(self.storage.clone(), &progress)),
            progress: Some(progress),
        }
    }

    pub(crate) fn at(address: &Address) -> Self {
        Self::on(address.storage())
    }

    pub(crate) fn on(storage: Arc<dyn Storage>) -> Self {
        Self {
            storage,
            progress: None,
        }
    }

    pub(crate) fn progress(&self) -> Option<&Progress> {
        self.progress.as_ref()
    }

    /// Says what begins.
    pub(crate) fn begins(&self, work: impl FnOnce(u64) -> Work, bytes: u64) -> Result<()> {
        match &self.progress {
            Some(progress) => progress.begins(&self.name(), work(bytes)),
            None => Ok(()),
        }
    }

    pub(crate) fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    pub(crate) fn shared_storage(&self) -> Arc<dyn Storage> {
        self.storage.clone()
    }

    /// Where it is: an absolute path, or an address that other processes open.
    pub fn address(&self) -> String {
        self.name()
    }

    pub(crate) fn name(&self) -> String {
        self.storage.name("")
    }

    /// Every version, oldest first, and what is damaged. The weights are not read.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`], [`StoreError::Format`].
    pub fn versions(&self) -> Result<Versions> {
        self.newest_versions(usize::MAX)
    }

    /// So many of the newest versions, oldest first, and what is damaged among them.
    ///
    /// # Errors
    ///
    /// Those of [`versions`](Self::versions).
    pub fn newest_versions(&self, count: usize) -> Result<Versions> {
        let catalog = Catalog::read(self.storage())?;
        let mut found = Versions {
            versions: Vec::new(),
            all: catalog.places.len(),
            damage: catalog.damage.clone(),
        };
        for &place in catalog.places.iter().rev() {
            if found.versions.len() == count {
                break;
            }
            match catalog::manifest(self.storage(), place) {
                Ok(Some(manifest)) => {
                    found
                        .versions
                        .push(self.describe(&manifest, &catalog.names));
                }
                // Removed since the catalog was read.
                Ok(None) => {}
                Err(StoreError::Damaged(damage)) => found.damage.push(damage),
                Err(error) => return Err(error),
            }
        }
        // Read from the newest on, and told in order.
        found.versions.reverse();
        Ok(found)
    }

    /// The file that says which versions there are. Its bytes are others whenever a version was
    /// published, removed or named, and no other file is read for them.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`], [`StoreError::Damaged`].
    pub fn head(&self) -> Result<Option<Vec<u8>>> {
        catalog::read(self.storage(), HEAD)
    }

    fn describe(
        &self,
        manifest: &StoreManifest,
        names: &BTreeMap<String, VersionKey>,
    ) -> StoredVersion {
        let names = names.iter().filter(|(_, named)| **named == manifest.place);
        let names = names.map(|(name, _)| name.clone()).collect();
        let models = manifest.models.iter().map(|stored| {
            let directory = stored.anchor.at.file(&stored.model, "");
            StoredModel {
                model: stored.model.clone(),
                version: stored.version,
                digest: stored.digest,
                changed: stored.changed,
                stored_bytes: stored.written_bytes(),
                deltas: stored.deltas.len(),
                read_bytes: stored.read_bytes(None),
                changes: stored
                    .changes
                    .map(|[all, changed]| changed as f64 / all.max(1) as f64),
                directory: self.storage.name(directory.trim_end_matches('/')),
            }
        });
        StoredVersion {
            sequence: manifest.place.sequence,
            run: manifest.run,
            writer: format!("process {} on {}", manifest.by.pid, manifest.by.host),
            at: Duration::from_millis(manifest.at),
            names,
            models: models.collect(),
        }
    }

    /// Loads a version: reads its anchor, folds its deltas onto that, and compares the digest.
    /// [`Which::AtLeast`] does not wait here; see [`wait`](Self::wait).
    ///
    /// # Errors
    ///
    /// [`StoreError::Empty`], [`StoreError::NoSuchVersion`], [`StoreError::NoSuchName`],
    /// [`StoreError::Damaged`] for a version that was asked for by its number or name,
    /// [`StoreError::File`], [`StoreError::Format`].
    pub fn load(&self, which: &Which) -> Result<Loaded> {
        let (set, damage) = self.read(which, &|manifest| self.load_set(manifest))?;
        Ok(Loaded { set, damage })
    }

    /// The same for one model: the others are neither read nor checked. `model` is not needed in a
    /// store of one model.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load), and [`StoreError::SeveralModels`].
    pub fn load_one(&self, which: &Which, model: Option<&ModelId>) -> Result<LoadedModel> {
        let (loaded, ()) = self.read_one(which, model, &|_| Ok(()))?;
        Ok(loaded)
    }

    /// The same with the files that were saved with the weights: `config.json`, a tokenizer's.
    ///
    /// # Errors
    ///
    /// Those of [`load_one`](Self::load_one).
    pub fn load_with_files(
        &self,
        which: &Which,
        model: Option<&ModelId>,
    ) -> Result<(LoadedModel, Files)> {
        self.read_one(which, model, &|stored| self.extra_files(stored))
    }

    fn read_one<T>(
        &self,
        which: &Which,
        model: Option<&ModelId>,
        more: &dyn Fn(&Stored) -> Result<T>,
    ) -> Result<(LoadedModel, T)> {
        let ((snapshot, sequence, more), damage) = self.read(which, &|manifest| {
            let stored = self.stored_model(manifest, model)?;
            let more = more(stored)?;
            let snapshot = self.load_model(manifest, stored, None, None)?;
            Ok((snapshot, manifest.place.sequence, more))
        })?;
        let loaded = LoadedModel {
            snapshot,
            sequence,
            damage,
        };
        Ok((loaded, more))
    }

    /// Finds a version and reads something of it, under a lease. Also says what is damaged.
    pub(crate) fn read<T>(
        &self,
        which: &Which,
        read: &dyn Fn(&StoreManifest) -> Result<T>,
    ) -> Result<(T, Vec<Damage>)> {
        let mut damaged = None;
        // The usual case reads the head and one manifest, and lists nothing.
        if *which == Which::Newest {
            match self.read_by_head(read)? {
                ByHead::Read(value) => return Ok((value, Vec::new())),
                ByHead::Damaged(place, found) => damaged = Some((place, found)),
                ByHead::Unknown => {}
            }
        }
        let mut gone = None;
        loop {
            let catalog = Catalog::read(self.storage())?;
            let damage = catalog.damage.clone();
            let found = match which {
                Which::Newest => return self.read_newest(catalog, damage, damaged, read),
                Which::Named(name) => match catalog.names.get(name) {
                    Some(place) => *place,
                    None => {
                        return Err(StoreError::NoSuchName {
                            store: self.name(),
                            name: name.clone(),
                            known: catalog.names.into_keys().collect(),
                        });
                    }
                },
                Which::Exactly(asked) => self.find(&catalog, asked)?,
                Which::AtLeast(asked) => self.find_newest(&catalog, asked)?,
            };
            if let Some(value) = self.read_place(found, read)? {
                finding::tell(&damage, damage.len());
                return Ok((value, damage));
            }
            // It was removed since the catalog was read: the next one says so.
            if gone.replace(found) == Some(found) {
                let file = self.storage.name(&found.manifest());
                return Err(Damage::new(file, "it is missing").into());
            }
        }
    }

    /// Reads the newest version, where nothing is damaged: without a look at how many others there are.
    fn read_by_head<T>(&self, read: &dyn Fn(&StoreManifest) -> Result<T>) -> Result<ByHead<T>> {
        let newest = match catalog::head(self.storage()) {
            // No error yet: the catalog looks at the manifests, and names what is damaged.
            Err(StoreError::Damaged(_)) => None,
            head => head?.and_then(|head| head.newest()),
        };
        let Some(place) = newest else {
            return Ok(ByHead::Unknown);
        };
        match self.read_place(place, read) {
            Ok(Some(value)) => Ok(ByHead::Read(value)),
            Ok(None) => Ok(ByHead::Unknown),
            Err(StoreError::Damaged(found)) => Ok(ByHead::Damaged(place, found)),
            Err(error) => Err(error),
        }
    }

    fn read_newest<T>(
        &self,
        mut catalog: Catalog,
        mut damage: Vec<Damage>,
        mut damaged: Option<(VersionKey, Damage)>,
        read: &dyn Fn(&StoreManifest) -> Result<T>,
    ) -> Result<(T, Vec<Damage>)> {
        let known = damage.len();
        loop {
            let Some(&place) = catalog.places.last() else {
                return Err(StoreError::Empty {
                    store: self.name(),
                    damage: once(damage),
                });
            };
            // One that is known to be damaged is not read again.
            let found = match damaged.take_if(|(at, _)| *at == place) {
                Some((_, found)) => Err(found.into()),
                None => self.read_place(place, read),
            };
            match found {
                Ok(Some(value)) => {
                    let damage = once(damage);
                    finding::tell(&damage, known);
                    return Ok((value, damage));
                }
                // It was removed since, so there are newer ones.
                Ok(None) => {
                    let now = Catalog::read(self.storage())?;
                    match now.places.last() > Some(&place) {
                        // A newer catalog has a newer version. If it has none, the manifest is
                        // really missing.
                        true => catalog = now,
                        false => {
                            let file = self.storage.name(&place.manifest());
                            damage.push(Damage::new(file, "it is missing"));
                            catalog.places.pop();
                        }
                    }
                }
                // An older version is better than none, and the damage is told.
                Err(StoreError::Damaged(found)) => {
                    damage.push(found);
                    catalog.places.pop();
                }
                // The model came with a version that is damaged, or its name is mistyped.
                Err(StoreError::NoSuchModel { asked, known, .. }) if !damage.is_empty() => {
                    let Damage { file, what } = damage.swap_remove(0);
                    let what = format!(
                        "{what}; older versions have no model {asked:?}: if that is a typo, name one \
                         that they have ({})",
                        error::list(&known)
                    );
                    return Err(Damage::new(file, what).into());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads something of a version under a lease; `None` if it is not there any more.
    pub(crate) fn read_place<T>(
        &self,
        place: VersionKey,
        read: &dyn Fn(&StoreManifest) -> Result<T>,
    ) -> Result<Option<T>> {
        let _lease = Lease::take(&self.storage, place)?;
        // After the lease: what is there now is not removed before the lease ends.
        let Some(manifest) = catalog::manifest(self.storage(), place)? else {
            return Ok(None);
        };
        match read(&manifest) {
            // A reader that cannot write has no lease: what is missing may just have been removed.
            Err(StoreError::Damaged(_))
                if matches!(catalog::manifest(self.storage(), place), Ok(None)) =>
            {
                Ok(None)
            }
            read => read.map(Some),
        }
    }

    fn load_set(&self, manifest: &StoreManifest) -> Result<SetSnapshot> {
        let members = manifest.models.iter().map(|stored| {
            let (snapshot, changed) = (
                self.load_model(manifest, stored, None, None)?,
                stored.changed,
            );
            Ok(Member { snapshot, changed })
        });
        let members = members.collect::<Result<Vec<_>>>()?;
        Ok(SetSnapshot::new(manifest.place.sequence, members))
    }

    /// One model of a version, checked; of a version above `base` only what changed since is read. The
    /// caller has a lease.
    pub(crate) fn load_model(
        &self,
        manifest: &StoreManifest,
        stored: &Stored,
        spare: Option<Image>,
        base: Option<&StoredBase>,
    ) -> Result<Snapshot> {
        // The layout first: it says how large the image is, and what the files must have.
        let spec = self.spec(&stored.model, &stored.spec)?;
        self.begins(Work::Reads, stored.read_bytes(base))?;
        let image = anchor::read(self.storage(), manifest.place, stored, &spec, spare, base)?;
        let snapshot = Snapshot::received(&spec, manifest.run, stored.version, image)?;
        Ok(snapshot.with_digest(stored.digest))
    }

    /// A model's layout and attributes.
    pub(crate) fn spec(&self, model: &ModelId, hash: &Hash) -> Result<ModelSpec> {
        let path = hash.spec();
        let name = self.storage.name(&path);
        let damaged = |what: String| Damage::new(name.clone(), what);
        let bytes = catalog::read(self.storage(), &path)?;
        let bytes = bytes.ok_or_else(|| damaged("it is missing".into()))?;
        let got = Hash::of(&bytes);
        // Versions share this file, so its content alone says whether it is the right one.
        if got != *hash {
            return Err(damaged(format!(
                "its hash is {}, which is not its name",
                got.as_str()
            ))
            .into());
        }
        let spec: ModelSpec = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(format!("it is not what a store writes: {error}")))?;
        // A file of the right hash may still be that of another model.
        match spec.id == *model {
            true => Ok(spec),
            false => Err(damaged(format!("it is of {}, expected {model}", spec.id)).into()),
        }
    }

    /// The model of a version that was asked for.
    fn stored<'a>(&self, manifest: &'a StoreManifest, asked: &ModelVersion) -> Result<&'a Stored> {
        self.stored_model(manifest, asked.model.as_ref())
    }

    /// A model of a version, or its only one.
    pub(crate) fn stored_model<'a>(
        &self,
        manifest: &'a StoreManifest,
        model: Option<&ModelId>,
    ) -> Result<&'a Stored> {
        let known = || {
            manifest
                .models
                .iter()
                .map(|one| one.model.clone())
                .collect()
        };
        match (model, &manifest.models[..]) {
            (None, [one]) => Ok(one),
            (None, _) => Err(StoreError::SeveralModels {
                store: self.name(),
                known: known(),
            }),
            (Some(id), _) => manifest.model(id).ok_or_else(|| StoreError::NoSuchModel {
                store: self.name(),
                asked: id.to_string(),
                known: known(),
            }),
        }
    }
}

/// What came of reading the version that the head names.
enum ByHead<T> {
    Read(T),
    Damaged(VersionKey, Damage),
    /// It was removed meanwhile, or the head says nothing.
    Unknown,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.name()).finish()
    }
}

/// Now, in milliseconds since 1970. A clock that is wrong makes no difference: people read it.
pub(crate) fn now() -> u64 {
    let since = UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
