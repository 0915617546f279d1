//! Which versions a store has: by its head, or by the manifests if the head is damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;

use weightsync_core::{Epoch, ModelId, Run, Version};
use weightsync_engine::transport::polled::Pause;

use crate::error::{Damage, Result, StoreError};
use crate::format::{DATA, HEAD, Head, PublishedRun, StoreManifest, VERSIONS, VersionKey, unseal};
use crate::storage::Storage;

/// What a store has, as of one moment.
#[derive(Clone, Debug)]
pub(crate) struct Catalog {
    /// The head and its bytes, if it is there and whole.
    pub(crate) head: Option<(Vec<u8>, Head)>,
    /// The bytes of the file, whatever they are.
    pub(crate) raw_head: Option<Vec<u8>>,
    /// The published versions, oldest first.
    pub(crate) places: Vec<VersionKey>,
    /// Every manifest there is, published or not, by place.
    pub(crate) listed: Vec<VersionKey>,
    /// The versions that have names. If the head is damaged, those of the newest version.
    pub(crate) names: BTreeMap<String, VersionKey>,
    /// What is damaged.
    pub(crate) damage: Vec<Damage>,
}

impl Catalog {
    /// Reads the head and the names of the manifests.
    pub(crate) fn read(storage: &dyn Storage) -> Result<Self> {
        /// What is missing at so many looks is damage, however often the head changes.
        const LOOKS: usize = 5;
        let mut pause = Pause::new(storage.pauses());
        for _ in 1..LOOKS {
            let catalog = Self::look(storage)?;
            // Between the two reads a writer may have published versions and removed others.
            if !catalog.lacks_any() || storage.read(HEAD).ok().flatten() == catalog.raw_head {
                return Ok(catalog);
            }
            pause.until(None)?;
        }
        Self::look(storage)
    }

    /// Whether versions that the head counts are not there, or the head is not.
    fn lacks_any(&self) -> bool {
        match &self.head {
            Some((_, head)) => head.count > self.places.len() as u64,
            None => !self.listed.is_empty(),
        }
    }

    fn look(storage: &dyn Storage) -> Result<Self> {
        let file = || storage.name(HEAD);
        let (raw_head, found) = match read(storage, HEAD) {
            Err(StoreError::Damaged(damage)) => (None, damage),
            raw => (raw?, Damage::new(file(), "it is missing")),
        };
        let (head, found) = match &raw_head {
            Some(bytes) => match unseal::<Head>(&file(), bytes) {
                Ok(head) => (Some((bytes.clone(), head)), None),
                Err(StoreError::Damaged(damage)) => (None, Some(damage)),
                Err(error) => return Err(error),
            },
            None => (None, Some(found)),
        };
        // After the head: everything it publishes is listed.
        let names = storage.list(VERSIONS);
        let names = names.map_err(StoreError::file("listing", storage.name(VERSIONS)))?;
        let listed = names
            .iter()
            .filter_map(|name| VersionKey::of_manifest(name));
        let mut listed: Vec<_> = listed.collect();
        listed.sort_unstable();
        let mut catalog = Self {
            head,
            raw_head,
            places: Vec::new(),
            listed,
            names: BTreeMap::new(),
            damage: Vec::new(),
        };
        match &catalog.head {
            Some((_, head)) => {
                let listed = catalog.listed.iter().copied();
                catalog.places = listed.filter(|place| head.has(*place)).collect();
                catalog.names = head.names.clone();
                let (count, got) = (head.count, catalog.places.len() as u64);
                // The newest version is what readers want, so its absence is told by name.
                if let Some(newest) = head.newest()
                    && catalog.places.last() != Some(&newest)
                {
                    let file = storage.name(&newest.manifest());
                    catalog.damage.push(Damage::new(file, "it is missing"));
                } else if got < count {
                    let what = format!("{got} of {count} manifests are there");
                    catalog
                        .damage
                        .push(Damage::new(storage.name(VERSIONS), what));
                }
            }
            // A store without versions has no head yet.
            None if catalog.raw_head.is_none() && catalog.listed.is_empty() => {}
            None => {
                catalog.damage.extend(found);
                (catalog.places, catalog.names) =
                    chain(storage, &catalog.listed, &mut catalog.damage)?;
            }
        }
        Ok(catalog)
    }

    /// The runs whose versions are published, as the manifests say.
    fn listed_runs(&self) -> Vec<PublishedRun> {
        let mut runs = Vec::new();
        for place in &self.places {
            if runs.last().map(|run: &PublishedRun| run.epoch) != Some(place.epoch) {
                runs.push(PublishedRun::none(place.epoch));
            }
            if let Some(run) = runs.last_mut() {
                // What is listed between two versions of the chain is not a version.
                let last = VersionKey {
                    sequence: run.last,
                    ..*place
                };
                let from = self.listed.partition_point(|other| *other <= last);
                let to = self.listed.partition_point(|other| other < place);
                let skipped = self.listed.get(from..to).unwrap_or_default();
                run.failed
                    .extend(skipped.iter().map(|other| other.sequence));
                run.last = place.sequence;
            }
        }
        runs
    }

    /// The highest epoch that has left a trace in the store.
    fn highest_epoch(&self, storage: &dyn Storage, runs: &[PublishedRun]) -> Result<Epoch> {
        let data = storage.list(DATA);
        let data = data.map_err(StoreError::file("listing", storage.name(DATA)))?;
        let data = data
            .iter()
            .filter_map(|name| name.parse::<VersionKey>().ok());
        let data: Vec<_> = data.collect();
        // Above every epoch that left a trace, also that of a writer that never published.
        let epochs = self.listed.iter().chain(&data).map(|place| place.epoch);
        let epochs = epochs.chain(runs.iter().map(|run| run.epoch));
        Ok(epochs.max().unwrap_or(Epoch(0)))
    }

    /// The head that says what this catalog found, for a writer that takes over.
    pub(crate) fn next_head(
        &self,
        storage: &dyn Storage,
        id: [u8; 16],
        own: Option<Run>,
    ) -> Result<Head> {
        let mut runs;
        let mut dropped = BTreeSet::new();
        let versions;
        match &self.head {
            // Taken over: only the run that writes changes.
            Some((_, head)) => {
                runs = head.runs.clone();
                dropped.clone_from(&head.dropped);
                versions = head.versions.clone();
            }
            None => {
                // Rebuilt from the manifests.
                versions = self.versions(storage)?;
                runs = self.listed_runs();
            }
        }
        let highest = self.highest_epoch(storage, &runs)?;
        let run = match own {
            Some(run) => run,
            None => Run {
                epoch: highest.next().ok_or_else(|| no_epoch_left(storage))?,
                id,
            },
        };
        // A run that published nothing needs no entry, but for the last one: what it left is not
        // removed yet.
        let last = runs.last().map(|last| last.epoch);
        runs.retain(|old| old.epoch < run.epoch && (old.last > 0 || Some(old.epoch) == last));
        runs.push(PublishedRun::none(run.epoch));
        Ok(Head {
            run,
            runs,
            // The writer that claims the store names those that are missing, for the last time.
            count: self.places.len() as u64,
            names: self.names.clone(),
            dropped,
            versions,
        })
    }

    /// The newest version of each model that any manifest here names.
    fn versions(&self, storage: &dyn Storage) -> Result<BTreeMap<ModelId, Version>> {
        let mut versions = BTreeMap::new();
        for &place in &self.listed {
            match manifest(storage, place) {
                Ok(manifest) => {
                    for stored in manifest.into_iter().flat_map(|manifest| manifest.models) {
                        let newest = versions.entry(stored.model).or_insert(stored.version);
                        *newest = stored.version.max(*newest);
                    }
                }
                Err(StoreError::Damaged(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(versions)
    }

    /// The versions that are being removed and whose manifests are there still.
    pub(crate) fn half_dropped(&self) -> BTreeSet<VersionKey> {
        let head = self.head.as_ref();
        let dropped = head.map(|(_, head)| &head.dropped).into_iter().flatten();
        let listed = dropped.filter(|place| self.listed.binary_search(place).is_ok());
        listed.copied().collect()
    }
}

/// The head, if it is there and whole: all that is needed to find the newest version.
pub(crate) fn head(storage: &dyn Storage) -> Result<Option<Head>> {
    let Some(bytes) = read(storage, HEAD)? else {
        return Ok(None);
    };
    unseal(&storage.name(HEAD), &bytes).map(Some)
}

/// Reads a small file. What no store has written is damage.
pub(crate) fn read(storage: &dyn Storage, path: &str) -> Result<Option<Vec<u8>>> {
    storage.read(path).map_err(|error| match error.kind() {
        ErrorKind::IsADirectory | ErrorKind::InvalidData | ErrorKind::FileTooLarge => {
            Damage::new(storage.name(path), error.to_string()).into()
        }
        _ => StoreError::file("reading", storage.name(path))(error),
    })
}

/// The manifest of a version; `None` if it is not there.
pub(crate) fn manifest(storage: &dyn Storage, place: VersionKey) -> Result<Option<StoreManifest>> {
    let path = place.manifest();
    let file = storage.name(&path);
    let Some(bytes) = read(storage, &path)? else {
        return Ok(None);
    };
    let manifest: StoreManifest = unseal(&file, &bytes)?;
    // A copy of another version's manifest would name that version's files.
    match manifest.place == place {
        true => Ok(Some(manifest)),
        false => {
            let what = format!("it is that of {}, which is not its name", manifest.place);
            Err(Damage::new(file, what).into())
        }
    }
}

fn no_epoch_left(storage: &dyn Storage) -> StoreError {
    let reason = "a name there has the highest epoch there is, so no sender can come after it: remove it \
                  if no sender wrote it, or use another store";
    let invalid = std::io::Error::new(ErrorKind::InvalidData, reason);
    StoreError::File {
        action: "taking over",
        file: storage.name(DATA),
        source: invalid,
    }
}

/// The published versions, without a head: from the newest manifest that is whole, each names the
/// version before it. Where that ends, everything listed before counts that has a lower number. And the
/// names that the newest one knows.
fn chain(
    storage: &dyn Storage,
    listed: &[VersionKey],
    damage: &mut Vec<Damage>,
) -> Result<(Vec<VersionKey>, BTreeMap<String, VersionKey>)> {
    let mut rest = listed;
    let mut places = Vec::new();
    let mut names = None;
    let mut expected: Option<VersionKey> = None;
    while let Some((&place, before)) = rest.split_last() {
        // A writer that was replaced may have left manifests with the numbers of later versions.
        let newer: Option<&VersionKey> = places.last();
        if expected.is_some_and(|expected| place > expected)
            || newer.is_some_and(|newer| place.sequence >= newer.sequence)
        {
            rest = before;
            continue;
        }
        match manifest(storage, place) {
            Ok(Some(manifest)) => {
                places.push(place);
                names.get_or_insert(manifest.names);
                if manifest.previous.is_none() {
                    break;
                }
                // One that was removed does not say what came before it.
                expected = manifest
                    .previous
                    .filter(|previous| before.binary_search(previous).is_ok());
            }
            Ok(None) => {}
            // Nobody knows what came before it. The newest may not have been published.
            Err(StoreError::Damaged(found)) => {
                match places.is_empty() {
                    true => damage.push(found),
                    false => places.push(place),
                }
                expected = None;
            }
            Err(error) => return Err(error),
        }
        rest = before;
    }
    places.reverse();
    Ok((places, names.unwrap_or_default()))
}

#[cfg(test)]
mod tests;
