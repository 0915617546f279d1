//! Checking everything that a store has.

use std::collections::BTreeMap;

use crate::anchor::check_file;
use crate::catalog::Catalog;
use crate::error::{Damage, Result, StoreError};
use crate::format::{Crc, StoreManifest};
use crate::progress::Work;
use crate::store::{Store, once};

/// What a store was found to hold.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Scrubbed {
    /// How many versions can be loaded.
    pub sound: usize,
    /// How many versions there are.
    pub versions: usize,
    /// What is damaged.
    pub damage: Vec<Damage>,
}

/// The files that were read, as manifests describe them, and whether each is as it was written.
type ReadFiles = BTreeMap<(String, u64, Crc), bool>;

impl Store {
    /// Reads all files of all versions and compares their checksums, and loads every version and
    /// compares its digest. Nothing is changed.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`], [`StoreError::Format`]. Damage is no error here.
    pub fn scrub(&self) -> Result<Scrubbed> {
        /// How often all versions may be replaced while the first of them is opened.
        const LOOKS: usize = 100;
        for _ in 1..LOOKS {
            let (found, listed) = self.scrub_once()?;
            // All versions were removed while it looked: newer ones are there by now.
            if found.versions > 0 || listed == 0 {
                return Ok(found);
            }
        }
        Ok(self.scrub_once()?.0)
    }

    /// What was found, and how many versions there were before the first was opened.
    fn scrub_once(&self) -> Result<(Scrubbed, usize)> {
        let catalog = Catalog::read(self.storage())?;
        let mut found = Scrubbed {
            damage: catalog.damage.clone(),
            ..Scrubbed::default()
        };
        let mut read = ReadFiles::new();
        for &place in &catalog.places {
            match self.read_place(place, &|manifest| self.scrub_version(manifest, &read)) {
                // It was removed meanwhile.
                Ok(None) => {}
                Ok(Some(version)) => {
                    found.versions += 1;
                    found.sound += usize::from(version.is_sound);
                    read.extend(version.read);
                    found.damage.extend(version.damage);
                }
                Err(StoreError::Damaged(damage)) => {
                    found.versions += 1;
                    found.damage.push(damage);
                }
                Err(error) => return Err(error),
            }
        }
        found.damage = once(found.damage);
        Ok((found, catalog.places.len()))
    }

    /// Reads the files of a version that are not `known`, and loads it.
    fn scrub_version(
        &self,
        manifest: &StoreManifest,
        known: &ReadFiles,
    ) -> Result<ScrubbedVersion> {
        let mut version = ScrubbedVersion {
            is_sound: true,
            read: Vec::new(),
            damage: Vec::new(),
        };
        for stored in &manifest.models {
            let mut is_whole = true;
            for file in stored.files() {
                // Versions share files, and each is read once.
                if let Some(known) = known.get(&file) {
                    is_whole &= known;
                    continue;
                }
                let (path, bytes, crc64) = &file;
                self.begins(Work::Reads, *bytes)?;
                let found = check_file(self.storage(), path, *bytes, *crc64, &mut |_| Ok(()))?;
                is_whole &= found.is_none();
                version.read.push((file, found.is_none()));
                version.damage.extend(found);
            }
            // The files are what was written; whether that is the version is another question.
            if is_whole {
                match self.load_model(manifest, stored, None, None) {
                    Err(StoreError::Damaged(found)) => {
                        version.damage.push(found);
                        is_whole = false;
                    }
                    loaded => drop(loaded?),
                }
            }
            version.is_sound &= is_whole;
        }
        Ok(version)
    }
}

/// What was found of one version.
struct ScrubbedVersion {
    /// Whether it can be loaded.
    is_sound: bool,
    /// The files that were read for it, and whether each is as it was written.
    read: Vec<((String, u64, Crc), bool)>,
    /// What is damaged and was not known.
    damage: Vec<Damage>,
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use weightsync_engine::Tensors;

    use super::*;
    use crate::catalog;
    use crate::format::{FileEntry, seal};
    use crate::{SaveOptions, Writer};

    #[test]
    fn scrub_names_each_damaged_file_once() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let store = Store::open(root.to_str().unwrap()).unwrap();
        let options = SaveOptions {
            files: vec![("config.json".into(), b"{}".to_vec())],
            ..SaveOptions::default()
        };
        let mut writer = Writer::claim(&store, options).unwrap();
        let mut all = Tensors::new();
        all.insert("a", [64, 64], [0_f32; 4096]).unwrap();
        for step in 0..3 {
            all.slice_mut::<f32>("a").unwrap()[0] = step as f32;
            writer.save_weights("m", &all).unwrap();
        }
        writer.save_whole_next();
        writer.save_weights("m", &all).unwrap();
        let reads = Arc::new(AtomicUsize::new(0));
        let counted = reads.clone();
        let store = store.with_progress(move |work| {
            let begins = matches!(work, Work::Reads(_));
            counted.fetch_add(begins.into(), Ordering::Relaxed);
            Ok(())
        });
        let sound = store.scrub().unwrap();
        assert_eq!((sound.versions, sound.sound), (4, 4), "{:?}", sound.damage);
        let all = reads.swap(0, Ordering::Relaxed);

        // Of the three versions that need the first one's files, each is damaged, by one file.
        let first = store.versions().unwrap().versions[0].models[0]
            .directory
            .clone();
        fs::write(Path::new(&first).join("config.json"), b"[]").unwrap();
        let found = store.scrub().unwrap();
        assert_eq!((found.versions, found.sound), (4, 1), "{:?}", found.damage);
        assert_eq!(found.damage.len(), 1);
        assert!(found.damage[0].file.ends_with("config.json"));
        // The damaged file is read once, and the three versions are not loaded.
        assert_eq!(reads.load(Ordering::Relaxed), all - 3);
    }

    /// A manifest may name as many files as it has room for, and each of them may be damaged.
    #[test]
    fn scrub_ends_where_two_versions_miss_a_hundred_thousand_files() {
        const FILES: usize = 100_000;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let store = Store::open(root.to_str().unwrap()).unwrap();
        let mut writer = Writer::claim(&store, SaveOptions::default()).unwrap();
        let mut weights = Tensors::new();
        weights.insert("a", [64], [0_f32; 64]).unwrap();
        for step in 0..2 {
            weights.slice_mut::<f32>("a").unwrap()[0] = step as f32;
            writer.save_weights("m", &weights).unwrap();
        }
        let missing = (0..FILES).map(|index| FileEntry {
            name: format!("missing-{index}.json"),
            bytes: 1,
            crc64: Crc(0),
        });
        let missing: Vec<_> = missing.collect();
        for place in Catalog::read(store.storage()).unwrap().places {
            let manifest = catalog::manifest(store.storage(), place).unwrap();
            let mut manifest = manifest.unwrap();
            manifest.models[0].anchor.files.extend(missing.clone());
            let storage = store.storage();
            storage.put(&place.manifest(), &seal(&manifest)).unwrap();
        }
        let found = store.scrub().unwrap();
        assert_eq!((found.versions, found.sound), (2, 0));
        // The second version's are those of the first one.
        assert_eq!(found.damage.len(), FILES);
    }
}
