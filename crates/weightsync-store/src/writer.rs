//! Saving versions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use weightsync_core::{ModelId, Run, Version};
use weightsync_engine::transport::{ModelSpec, random};
use weightsync_engine::{Snapshot, WeightExtractor};

use crate::catalog::{self, Catalog};
use crate::error::{Result, StoreError};
use crate::format::{
    Anchor, By, DATA, DELTA, DeltaFile, HEAD, Hash, Head, Manifest, Place, Stored, is_file_name,
    seal,
};
use crate::lease;
use crate::progress::Work;
use crate::retention::Keep;
use crate::store::{Store, now};
use crate::{anchor, delta_file};

/// The most deltas in a row.
const CHAIN: usize = 32;

/// How versions are saved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Which versions the store keeps.
    pub keep: Keep,
    /// The most bytes of tensors in one safetensors file.
    pub shard_bytes: u64,
    /// Files to save next to the weights of each full version, by name: `config.json`, a tokenizer's.
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
    /// The bytes of the head as they were last read or written.
    raw_head: Vec<u8>,
    /// Every manifest that is published, by place: the data each needs. `None` if it is damaged.
    known: BTreeMap<Place, Option<Vec<Place>>>,
    /// Places whose manifests are removed and whose data may be there still.
    removed: BTreeMap<Place, Vec<Place>>,
    /// The number of the next version.
    next: u64,
    /// The newest version of each model.
    newest: HashMap<ModelId, Newest>,
    /// The highest number of each model that anybody has tried to save.
    tried: HashMap<ModelId, Version>,
}

#[derive(Debug)]
struct Newest {
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
        if let Some((name, _)) = options.files.iter().find(|(name, _)| !is_extra_file(name)) {
            let name = name.clone();
            return Err(StoreError::ExtraFile { name });
        }
        let storage = store.storage();
        let id = random()?;
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
            tracing::warn!("{damage}");
        }
        let mut writer = Self {
            store: store.clone(),
            options,
            by: by(),
            head,
            raw_head,
            known: BTreeMap::new(),
            removed: BTreeMap::new(),
            next: 1,
            newest: HashMap::new(),
            tried: HashMap::new(),
        };
        writer.look(&catalog)?;
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
                models.map(|stored| self.store.load_model(manifest, stored, None))
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

    /// Saves versions of some models; the others stay as they are. Returns when they are durable and
    /// published.
    ///
    /// # Errors
    ///
    /// [`StoreError::VersionNotNewer`], [`StoreError::Fenced`]; [`StoreError::File`] if storage fails:
    /// the store is then as it was, unless its answer got lost after it had published the version.
    pub fn save(&mut self, models: &[Snapshot]) -> Result<Saved> {
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
        let place = Place {
            epoch: self.head.run.epoch,
            sequence: self.next,
        };
        self.next += 1;
        // If the answer of a failing store gets lost, nobody knows whether it published the version:
        // its number is used up.
        let numbers = models
            .iter()
            .map(|one| (one.model().clone(), one.version()));
        self.tried.extend(numbers);
        self.save_at(place, models)
    }

    fn save_at(&mut self, place: Place, models: &[Snapshot]) -> Result<Saved> {
        let written = models
            .iter()
            .map(|snapshot| self.write_model(place, snapshot));
        let stored = match written.collect::<Result<Vec<_>>>() {
            Ok(stored) => stored,
            Err(error) => {
                self.discard(place);
                return Err(error);
            }
        };
        let manifest = self.manifest(place, &stored);
        if let Err(error) = self.publish(place, &manifest) {
            match error {
                StoreError::Fenced { .. } => self.discard(place),
                // It may have been published. The next save, or the next writer, finds out.
                _ => drop(self.removed.insert(place, manifest.needs().collect())),
            }
            return Err(error);
        }
        self.known.insert(place, Some(manifest.needs().collect()));
        let mut saved = Saved {
            sequence: place.sequence,
            stored_bytes: 0,
            bytes: 0,
            versions: Vec::new(),
            changes: None,
        };
        let mut changes = Some([0, 0]);
        for (stored, snapshot) in stored.into_iter().zip(models) {
            saved.stored_bytes += match stored.deltas.last() {
                Some(delta) => delta.bytes,
                None => stored.anchor.files.iter().map(|file| file.bytes).sum(),
            };
            saved.bytes += snapshot.layout().payload_bytes();
            saved.versions.push((stored.model.clone(), stored.version));
            changes = changes
                .zip(stored.changes)
                .map(|([a, b], [all, changed])| [a + all, b + changed]);
            let newest = Newest {
                base: self.options.deltas.then(|| snapshot.clone()),
                stored,
            };
            self.newest.insert(snapshot.model().clone(), newest);
        }
        saved.changes = changes.map(|[all, changed]| changed as f64 / all.max(1) as f64);
        // The version is safe, whatever becomes of old ones.
        if let Err(error) = self.clean() {
            tracing::warn!("old versions are not removed yet: {error}");
        }
        Ok(saved)
    }

    /// Writes the weights of one model, as changes if that is worth it.
    fn write_model(&self, place: Place, snapshot: &Snapshot) -> Result<Stored> {
        let storage = self.store.storage();
        let model = snapshot.model();
        let spec = self.write_spec(snapshot)?;
        let mut stored = Stored {
            model: model.clone(),
            version: snapshot.version(),
            digest: snapshot
                .published_digest()
                .unwrap_or_else(|| snapshot.digest()),
            spec,
            changed: true,
            changes: None,
            anchor: Anchor {
                at: place,
                files: Vec::new(),
            },
            deltas: Vec::new(),
        };
        if let Some(newest) = self.newest.get(model)
            && let Some(base) = &newest.base
            && newest.stored.spec == stored.spec
            && let Some(limit) = delta_limit(&newest.stored, snapshot.layout().bytes())
            && let Some(made) =
                delta_file::make(snapshot.layout(), base.bytes(), snapshot.bytes(), limit)
        {
            self.store.begins(Work::Writes, made.bytes.len() as u64)?;
            let parts = [&made.bytes[..]].into_iter();
            let file = anchor::write_file(storage, &place.file(model, ""), DELTA, parts)?;
            stored.changes = Some([made.elements, made.changed]);
            stored.anchor = newest.stored.anchor.clone();
            stored.deltas = newest.stored.deltas.clone();
            stored.deltas.push(DeltaFile {
                at: place,
                bytes: file.bytes,
                crc64: file.crc64,
            });
            return Ok(stored);
        }
        let Self { options, .. } = self;
        let bytes = snapshot.layout().payload_bytes();
        self.store.begins(Work::Writes, bytes)?;
        stored.anchor.files = anchor::write(
            storage,
            &place.file(model, ""),
            snapshot,
            &options.files,
            options.shard_bytes,
        )?;
        Ok(stored)
    }

    /// Writes a model's layout and attributes, if they are not there.
    fn write_spec(&self, snapshot: &Snapshot) -> Result<Hash> {
        let storage = self.store.storage();
        let spec = ModelSpec {
            id: snapshot.model().clone(),
            layout: snapshot.layout().clone(),
            attributes: snapshot.attributes().clone(),
        };
        let bytes = serde_json::to_vec(&spec);
        let bytes = bytes.unwrap_or_else(|error| unreachable!("a model's spec is JSON: {error}"));
        let hash = Hash::of(&bytes);
        let path = hash.spec();
        let write = || -> io::Result<()> {
            let there = storage.read(&path)?;
            // A damaged one is written again.
            if there.as_deref() == Some(&bytes) || storage.swap(&path, there.as_deref(), &bytes)? {
                return Ok(());
            }
            match storage.read(&path)?.as_deref() == Some(&bytes) {
                true => Ok(()),
                false => Err(io::Error::other(
                    "another process writes it, and writes something else",
                )),
            }
        };
        write().map_err(StoreError::file("writing", storage.name(&path)))?;
        Ok(hash)
    }

    /// The manifest: what was written now, and all other models as they were.
    fn manifest(&self, place: Place, stored: &[Stored]) -> Manifest {
        let others = self.newest.values().map(|newest| &newest.stored);
        let others = others.filter(|other| !stored.iter().any(|new| new.model == other.model));
        let others = others.map(|other| Stored {
            changed: false,
            changes: None,
            ..other.clone()
        });
        let mut models: Vec<_> = stored.iter().cloned().chain(others).collect();
        models.sort_by(|a, b| a.model.cmp(&b.model));
        Manifest {
            place,
            previous: self.head.newest(),
            run: self.head.run,
            by: self.by.clone(),
            at: now(),
            models,
        }
    }

    /// Writes the manifest and then the head, which is the step that publishes the version.
    fn publish(&mut self, place: Place, manifest: &Manifest) -> Result<()> {
        let storage = self.store.shared_storage();
        let path = place.manifest();
        let created = storage.swap(&path, None, &seal(manifest));
        let file = StoreError::file("writing", storage.name(&path));
        match created {
            Ok(true) => {}
            // Nobody else writes files of this run.
            Ok(false) => return Err(file(io::ErrorKind::AlreadyExists.into())),
            Err(error) => return Err(file(error)),
        }
        let leased = lease::leased(&*storage)?;
        self.change_head(&|writer, head| {
            if let Some(run) = head.runs.last_mut() {
                let skipped = run.last + 1..place.sequence;
                // A number is skipped if its version failed. Its manifest may be there all the same.
                run.failed.extend(skipped.filter(|number| {
                    let epoch = place.epoch;
                    let sequence = *number;
                    writer.removed.contains_key(&Place { epoch, sequence })
                }));
                run.last = place.sequence;
            }
            let mut published: Vec<_> = writer.known.keys().copied().collect();
            published.retain(|place| head.has(*place));
            published.push(place);
            let used = leased.iter().chain(head.names.values()).copied();
            let dropped = writer.options.keep.dropped(&published, &used.collect());
            // Those dropped before are gone by now, or are removed with these.
            head.dropped
                .retain(|place| writer.known.contains_key(place));
            head.dropped.extend(dropped);
            // Versions that are gone need no entry.
            let oldest = writer
                .known
                .keys()
                .next()
                .copied()
                .unwrap_or(place)
                .min(place);
            head.runs
                .retain(|run| run.epoch >= oldest.epoch || run.epoch == head.run.epoch);
        })
    }

    /// Changes the head. Names that others set meanwhile stay.
    fn change_head(&mut self, change: &dyn Fn(&Self, &mut Head)) -> Result<()> {
        let storage = self.store.shared_storage();
        let file = || storage.name(HEAD);
        loop {
            let mut head = self.head.clone();
            change(self, &mut head);
            let new = seal(&head);
            let swapped = match storage.swap(HEAD, Some(&self.raw_head), &new) {
                // The answer may have got lost.
                Err(error) => match storage.read(HEAD) {
                    Ok(Some(there)) if there == new => true,
                    _ => return Err(StoreError::file("writing", file())(error)),
                },
                Ok(swapped) => swapped,
            };
            if swapped {
                self.head = head;
                self.raw_head = new;
                return Ok(());
            }
            self.read_head()?;
        }
    }

    /// Reads what somebody else made of the head.
    fn read_head(&mut self) -> Result<()> {
        let storage = self.store.storage();
        let catalog = Catalog::read(storage)?;
        match (catalog.head, catalog.damage.into_iter().next()) {
            (Some((raw, head)), _) if head.run == self.head.run => {
                self.raw_head = raw;
                self.head = head;
                // A version whose answer got lost was published after all.
                let (head, removed) = (&self.head, &mut self.removed);
                let found = removed.extract_if(.., |place, _| head.has(*place));
                self.known
                    .extend(found.map(|(place, needs)| (place, Some(needs))));
                Ok(())
            }
            (Some((_, head)), _) => Err(StoreError::Fenced {
                store: self.store.name(),
                own: self.head.run,
                by: head.run,
            }),
            // Nobody has taken it over as long as its bytes are ours to replace.
            (None, Some(damage)) => {
                tracing::warn!("{damage}; it is written again");
                match catalog.raw_head {
                    Some(raw) => self.raw_head = raw,
                    None => return Err(damage.into()),
                }
                Ok(())
            }
            (None, None) => Err(StoreError::Empty {
                store: self.store.name(),
                damage: Vec::new(),
            }),
        }
    }

    /// Removes what a version left that was not published.
    fn discard(&mut self, place: Place) {
        self.removed.insert(place, vec![place]);
        let storage = self.store.storage();
        for path in [place.manifest(), place.data()] {
            if let Err(error) = storage.remove(&path) {
                // The next save tries again.
                tracing::warn!("{} is not removed yet: {error}", storage.name(&path));
            }
        }
    }

    /// Looks at what is there, after the store was claimed, and removes what no version needs.
    fn look(&mut self, catalog: &Catalog) -> Result<()> {
        let storage = self.store.shared_storage();
        let failed = |action, path: &str| StoreError::file(action, storage.name(path));
        let data = storage.list(DATA).map_err(failed("listing", DATA))?;
        let data: Vec<Place> = data.iter().filter_map(|name| name.parse().ok()).collect();
        let all = catalog.listed.iter().chain(&data);
        let runs = self.head.runs.iter().map(|run| run.last);
        let highest = all.map(|place| place.sequence).chain(runs).max();
        self.next = highest.unwrap_or(0).saturating_add(1);
        for &place in &catalog.listed {
            let published = self.head.has(place);
            let manifest = match catalog::manifest(&*storage, place) {
                Ok(manifest) => manifest,
                Err(StoreError::Damaged(damage)) => {
                    tracing::warn!("{damage}");
                    self.known.extend(published.then_some((place, None)));
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(manifest) = manifest else { continue };
            if published {
                self.known.insert(place, Some(manifest.needs().collect()));
            }
            for stored in manifest.models {
                let tried = self.version(&stored.model).max(stored.version);
                self.tried.insert(stored.model.clone(), tried);
                if published {
                    let newest = Newest { stored, base: None };
                    self.newest.insert(newest.stored.model.clone(), newest);
                }
            }
        }
        // With damage, what counts as a version may be a guess: nothing is removed on that ground.
        if catalog.damage.is_empty() {
            storage.tidy().map_err(failed("tidying up", ""))?;
            for place in catalog
                .listed
                .iter()
                .filter(|place| !self.head.has(**place))
            {
                let path = place.manifest();
                storage.remove(&path).map_err(failed("removing", &path))?;
            }
            self.remove_data(&data)?;
        }
        Ok(())
    }

    /// Removes the versions that are dropped, and the data that no version and no reader needs.
    fn clean(&mut self) -> Result<()> {
        let storage = self.store.shared_storage();
        let mut gone = Vec::new();
        for &place in &self.head.dropped {
            let path = place.manifest();
            let removed = storage.remove(&path);
            removed.map_err(StoreError::file("removing", storage.name(&path)))?;
            gone.push(place);
        }
        for place in gone {
            if let Some(Some(needs)) = self.known.remove(&place) {
                self.removed.insert(place, needs);
            }
        }
        if self.removed.is_empty() {
            return Ok(());
        }
        // Those of versions that failed, whose manifests may be there still.
        for place in self.removed.keys() {
            let path = place.manifest();
            let removed = storage.remove(&path);
            removed.map_err(StoreError::file("removing", storage.name(&path)))?;
        }
        let mut candidates: BTreeSet<_> = self.removed.values().flatten().copied().collect();
        candidates.extend(self.removed.keys());
        self.remove_data(&candidates.into_iter().collect::<Vec<_>>())
    }

    /// Removes these data, as far as nothing needs them.
    fn remove_data(&mut self, candidates: &[Place]) -> Result<()> {
        let storage = self.store.shared_storage();
        // After the manifests are gone: a reader that came before has a lease by now.
        let leased = lease::leased(&*storage)?;
        let mut needed: BTreeSet<Place> = BTreeSet::new();
        for needs in self.known.values() {
            match needs {
                Some(needs) => needed.extend(needs),
                // It may need anything.
                None => return Ok(()),
            }
        }
        let read = leased.iter().filter_map(|place| self.removed.get(place));
        needed.extend(read.flatten());
        needed.extend(&leased);
        for place in candidates.iter().filter(|place| !needed.contains(place)) {
            let path = place.data();
            let removed = storage.remove(&path);
            removed.map_err(StoreError::file("removing", storage.name(&path)))?;
        }
        self.removed.retain(|place, _| leased.contains(place));
        Ok(())
    }
}

/// The most bytes that the changes of the next version may take; `None` if it is to be a full one.
fn delta_limit(newest: &Stored, image_bytes: u64) -> Option<u64> {
    let chain: u64 = newest.deltas.iter().map(|delta| delta.bytes).sum();
    // All changes together stay below half a full version: reading them costs less than that.
    let left = (image_bytes / 2).checked_sub(chain)?;
    (newest.deltas.len() < CHAIN).then_some(left.min(image_bytes / 4))
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
