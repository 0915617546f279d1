//! Saving versions.

mod cleaning;
mod publishing;
mod weights;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use weightsync_core::{ModelId, Run, Version};
use weightsync_engine::transport::random;
use weightsync_engine::{Origin, Snapshot, WeightExtractor};

use crate::catalog::{self, Catalog};
use crate::error::{DAMAGE_TARGET, Damage, Result, StoreError};
use crate::format::{
    By, HEAD, Head, MAX_EXTRA, StoreManifest, Stored, VersionKey, is_file_name, seal, total,
};
use crate::retention::Keep;
use crate::store::{Store, now};

/// How versions are saved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Which versions the store keeps.
    pub keep: Keep,
    /// The most bytes of tensors in one safetensors file.
    pub shard_bytes: u64,
    /// Files to save next to the weights of each full version, by name: `config.json`, a tokenizer's.
    /// If none are given, those of a model's newest version stay. If others are given than it has, the
    /// next version is a full one.
    pub files: Vec<(String, Vec<u8>)>,
    /// Whether versions are saved as changes where that takes few bytes.
    pub deltas: bool,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            keep: Keep::All,
            shard_bytes: 5 << 30,
            files: Vec::new(),
            deltas: true,
        }
    }
}

impl SaveOptions {
    /// Whether a writer takes them.
    ///
    /// # Errors
    ///
    /// [`StoreError::ExtraFile`], [`StoreError::ExtraFileTwice`],
    /// [`StoreError::ExtraFilesTooLarge`].
    pub fn check(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        for (name, _) in &self.files {
            let name = name.clone();
            if !is_extra_file(&name) {
                return Err(StoreError::ExtraFile { name });
            }
            if !names.insert(name.clone()) {
                return Err(StoreError::ExtraFileTwice { name });
            }
        }
        let got = total(self.files.iter().map(|(_, bytes)| bytes.len() as u64));
        if got > MAX_EXTRA {
            let most = MAX_EXTRA;
            return Err(StoreError::ExtraFilesTooLarge { got, most });
        }
        Ok(())
    }
}

/// The process that may save versions in a store.
///
/// **Guarantee.** A version is published by one step, after all of it is durable: a reader sees the
/// whole version or none of it, also if this process is killed at any moment. A writer that claims the
/// store later takes it over: this one then saves nothing more, and is told
/// [`Fenced`](StoreError::Fenced). A version that was saved is not lost to another writer.
#[derive(Debug)]
pub struct Writer {
    store: Store,
    options: SaveOptions,
    by: By,
    head: Head,
    /// The bytes of the head as they were last read or written; `None` if it is missing.
    raw_head: Option<Vec<u8>>,
    /// Every manifest that is published, by place.
    known: BTreeMap<VersionKey, Needs>,
    /// Places whose manifests are removed, or are to be, and whose data may be there still: what each
    /// needed.
    removed: BTreeMap<VersionKey, Vec<VersionKey>>,
    /// Versions that an earlier writer dropped, and whose manifests are there still.
    half_dropped: BTreeSet<VersionKey>,
    /// Data of earlier writers that may have to be removed still.
    left_over: BTreeSet<VersionKey>,
    /// The version that may or may not have been published.
    unsettled: Option<Unsettled>,
    /// The run that has taken the store over.
    successor: Option<Run>,
    /// The number of the next version.
    next: u64,
    /// The newest version of each model.
    newest: HashMap<ModelId, NewestSaved>,
    /// The highest number of each model that anybody has tried to save.
    tried: HashMap<ModelId, Version>,
    /// What was damaged when it was claimed.
    damage: Vec<Damage>,
    /// The process that claimed the store: a forked child would save under the same numbers.
    owner: Origin,
}

/// The places whose data a version needs.
#[derive(Debug)]
enum Needs {
    /// Its manifest was not read for this yet. Where nothing is ever removed, it never is.
    Unread,
    These(Vec<VersionKey>),
    /// Its manifest is damaged: anything that is not newer.
    Anything,
}

/// A version that is complete but for the head.
#[derive(Debug)]
struct Unsettled {
    place: VersionKey,
    models: Vec<(Stored, Snapshot)>,
}

#[derive(Debug)]
struct NewestSaved {
    stored: Stored,
    /// Its bytes, if they are known here: what the next version is compared with.
    base: Option<Snapshot>,
}

/// A version that was saved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Saved {
    /// Its number among all versions of the store.
    pub sequence: u64,
    /// The bytes that were written for its weights.
    pub stored_bytes: u64,
    /// The bytes of its weights.
    pub bytes: u64,
    /// The versions of its models.
    pub versions: Vec<(ModelId, Version)>,
    /// Which share of the elements changed, where that is known of all models.
    pub changes: Option<f64>,
}

impl Writer {
    /// Takes the store over, and makes it if there is none. What an earlier writer left unfinished is
    /// removed.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`], [`StoreError::Format`].
    pub fn claim(store: &Store, options: SaveOptions) -> Result<Self> {
        Self::claim_as(store, options, None)
    }

    /// The same as a run whose epoch somebody else counts, in a store that is only this run's.
    pub(crate) fn claim_as(store: &Store, options: SaveOptions, run: Option<Run>) -> Result<Self> {
        options.check()?;
        let storage = store.storage();
        let id = random()?;
        // Of several writers that claim the store at once, one replaces the head. The others look
        // again.
        let (catalog, head, raw_head) = loop {
            let catalog = Catalog::read(storage)?;
            let head = catalog.next_head(storage, id, run)?;
            let new = seal(&head);
            let swapped = storage.swap(HEAD, catalog.raw_head.as_deref(), &new);
            if swapped.map_err(StoreError::file("writing", storage.name(HEAD)))? {
                break (catalog, head, new);
            }
        };
        for damage in &catalog.damage {
            tracing::warn!(target: DAMAGE_TARGET, "{damage}");
        }
        // An earlier writer may have died before it had synced the directories it made.
        let settled = storage.settle(HEAD);
        settled.map_err(StoreError::file("syncing", storage.name(HEAD)))?;
        let mut writer = Self {
            store: store.clone(),
            options,
            by: by(),
            head,
            raw_head: Some(raw_head),
            known: BTreeMap::new(),
            removed: BTreeMap::new(),
            half_dropped: catalog.half_dropped(),
            left_over: BTreeSet::new(),
            unsettled: None,
            successor: None,
            next: 1,
            newest: HashMap::new(),
            tried: HashMap::new(),
            damage: catalog.damage.clone(),
            owner: Origin::here(),
        };
        // After the claim: no earlier writer can publish any more.
        writer.take_stock(&catalog)?;
        Ok(writer)
    }

    /// The run that this writer saves as.
    pub fn run(&self) -> Run {
        self.head.run
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What was damaged when the store was claimed. A manifest that was missing is named for the last
    /// time.
    pub fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// The newest version of a model that the store has, or that this writer tried to save.
    pub fn version(&self, model: &ModelId) -> Version {
        self.tried.get(model).copied().unwrap_or(Version::NONE)
    }

    /// Compares the next version with the newest one of the store, which is read for that. Without
    /// this, the first version that a writer saves is a full one.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`]. Damage is no error: the next version is then a full one.
    pub fn read_base(&mut self) -> Result<()> {
        let Some(newest) = self.head.newest() else {
            return Ok(());
        };
        let read = || {
            let storage = self.store.storage();
            let manifest = catalog::manifest(storage, newest)?;
            let models = manifest.iter().flat_map(|manifest| {
                let models = manifest.models.iter();
                models.map(|stored| self.store.load_model(manifest, stored, None, None))
            });
            models.collect::<Result<Vec<_>>>()
        };
        match read() {
            Ok(bases) => {
                for base in bases {
                    if let Some(newest) = self.newest.get_mut(base.model())
                        && newest.stored.version == base.version()
                    {
                        newest.base = Some(base);
                    }
                }
                Ok(())
            }
            Err(StoreError::Damaged(damage)) => {
                tracing::warn!("{damage}; the next version is saved whole");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Makes the next version of each model a full one.
    pub fn save_whole_next(&mut self) {
        for newest in self.newest.values_mut() {
            newest.base = None;
        }
    }

    /// Saves the next version of a model from any source of weights.
    ///
    /// # Errors
    ///
    /// Those of [`save`](Self::save), and of the source.
    pub fn save_weights(&mut self, model: &str, weights: &dyn WeightExtractor) -> Result<Saved> {
        let id = ModelId::new(model).map_err(weightsync_engine::Error::from)?;
        let version = self.version(&id).next();
        let snapshot = Snapshot::of(model, weights, self.run(), version)?;
        self.save(&[snapshot])
    }

    /// Saves those versions of some models that the store does not have.
    pub(crate) fn save_new(&mut self, mut models: Vec<Snapshot>) -> Result<Saved> {
        // What the caller gets, whether or not anything is left to save.
        let versions = models
            .iter()
            .map(|one| (one.model().clone(), one.version()));
        let versions: Vec<_> = versions.collect();
        // A version that is the newest already is not saved twice.
        models.retain(|one| {
            let newest = self.newest.get(one.model()).map(|newest| &newest.stored);
            !newest.is_some_and(|stored| {
                stored.version == one.version() && stored.digest == one.digest()
            })
        });
        if !models.is_empty() {
            return self.save(&models);
        }
        Ok(Saved {
            sequence: self.head.newest().map_or(0, |newest| newest.sequence),
            stored_bytes: 0,
            bytes: 0,
            versions,
            changes: None,
        })
    }

    /// Saves versions of some models; the others stay as they are. Returns when they are durable and
    /// published.
    ///
    /// # Errors
    ///
    /// [`StoreError::ModelsOnce`], [`StoreError::VersionNotNewer`], [`StoreError::Fenced`];
    /// [`StoreError::File`] if storage fails: the store is then as it was, unless its answer got lost
    /// after it had published the version.
    pub fn save(&mut self, models: &[Snapshot]) -> Result<Saved> {
        let owner = self.owner.check();
        owner.map_err(weightsync_engine::Error::from)?;
        let ids: BTreeSet<_> = models.iter().map(Snapshot::model).collect();
        if ids.is_empty() || ids.len() != models.len() {
            let given = models.iter().map(|one| one.model().clone());
            return Err(StoreError::ModelsOnce {
                given: given.collect(),
            });
        }
        for snapshot in models {
            let (model, got) = (snapshot.model(), snapshot.version());
            let newest = self.version(model);
            if got <= newest {
                return Err(StoreError::VersionNotNewer {
                    model: model.clone(),
                    newest,
                    got,
                });
            }
        }
        // If the answer of a failing store gets lost, nobody knows whether it published the version:
        // its number is used up, however early the save fails.
        let numbers = models
            .iter()
            .map(|one| (one.model().clone(), one.version()));
        self.tried.extend(numbers);
        // Before gigabytes are written that nobody may publish.
        self.look_at_head()?;
        self.settle()?;
        let place = VersionKey {
            epoch: self.head.run.epoch,
            sequence: self.next,
        };
        self.next = self.next.saturating_add(1);
        // However this ends, what it leaves is found again.
        self.removed.insert(place, vec![place]);
        let saved = self.save_at(place, models);
        let unknown = self.unsettled.is_some() && self.successor.is_none();
        // Where nobody knows whether the version is published, nothing of it is removed.
        if saved.is_err() && !unknown && self.removed.contains_key(&place) {
            self.discard(place);
        }
        match saved {
            // A writer that takes the store over removes what it finds unfinished: that is the reason.
            Err(error @ StoreError::File { .. }) => match self.look_at_head() {
                Err(fenced @ StoreError::Fenced { .. }) => Err(fenced),
                _ => Err(error),
            },
            saved => saved,
        }
    }

    fn save_at(&mut self, place: VersionKey, models: &[Snapshot]) -> Result<Saved> {
        // The weights come first, then the manifest, then the head: what is published is all there.
        let written = models
            .iter()
            .map(|snapshot| self.write_model(place, snapshot));
        let stored = match written.collect::<Result<Vec<_>>>() {
            Ok(stored) => stored,
            Err(error) => {
                // Without a manifest, nothing of it can come back.
                if self.discard(place) {
                    self.removed.remove(&place);
                }
                return Err(error);
            }
        };
        let manifest = self.manifest(place, &stored);
        let mut saved = Saved {
            sequence: place.sequence,
            stored_bytes: 0,
            bytes: 0,
            versions: Vec::new(),
            changes: None,
        };
        let mut changes = Some([0, 0]);
        for (stored, snapshot) in stored.iter().zip(models) {
            saved.stored_bytes += stored.written_bytes();
            saved.bytes += snapshot.layout().payload_bytes();
            saved.versions.push((stored.model.clone(), stored.version));
            changes = changes
                .zip(stored.changes)
                .map(|([a, b], [all, changed])| [a + all, b + changed]);
        }
        saved.changes = changes.map(|[all, changed]| changed as f64 / all.max(1) as f64);
        self.write_manifest(place, &manifest)?;
        let models = stored.into_iter().zip(models.iter().cloned()).collect();
        // Only then is the version published.
        self.publish(Unsettled { place, models })?;
        // The version is safe, whatever becomes of old ones.
        if self.successor.is_none()
            && let Err(error) = self.clean()
        {
            tracing::warn!("old versions are not removed yet: {error}");
        }
        Ok(saved)
    }

    /// The manifest: what was written now, and all other models as they were.
    fn manifest(&self, place: VersionKey, stored: &[Stored]) -> StoreManifest {
        // A model that was not saved now comes along as it is: a version of the store has all
        // models.
        let others = self.newest.values().map(|newest| &newest.stored);
        let others = others.filter(|other| !stored.iter().any(|new| new.model == other.model));
        let others = others.map(|other| Stored {
            changed: false,
            changes: None,
            ..other.clone()
        });
        let mut models: Vec<_> = stored.iter().cloned().chain(others).collect();
        models.sort_by(|a, b| a.model.cmp(&b.model));
        StoreManifest {
            place,
            previous: self.head.newest(),
            run: self.head.run,
            by: self.by.clone(),
            at: now(),
            names: self.head.names.clone(),
            models,
        }
    }

    fn write_manifest(&self, place: VersionKey, manifest: &StoreManifest) -> Result<()> {
        let storage = self.store.storage();
        let path = place.manifest();
        let created = storage.swap(&path, None, &seal(manifest));
        let file = StoreError::file("writing", storage.name(&path));
        match created {
            Ok(true) => Ok(()),
            // Nobody else writes files of this run.
            Ok(false) => Err(file(io::ErrorKind::AlreadyExists.into())),
            Err(error) => Err(file(error)),
        }
    }
}

/// Whether a user's file can lie next to the weights.
pub(crate) fn is_extra_file(name: &str) -> bool {
    is_file_name(name) && !name.ends_with(".safetensors") && !name.ends_with(".index.json")
}

fn by() -> By {
    By {
        host: host(),
        pid: std::process::id(),
    }
}

/// The name of this host, for messages.
pub(crate) fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "an unknown host".into(),
        name => name.into(),
    }
}

#[cfg(test)]
mod tests;
