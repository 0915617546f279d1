//! Checking everything that a store has.

use std::collections::BTreeSet;

use crate::anchor::check_file;
use crate::catalog::Catalog;
use crate::error::{Damage, Result, StoreError};
use crate::format::StoreManifest;
use crate::progress::Work;
use crate::store::{Store, note};

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
        let mut seen = BTreeSet::new();
        for &place in &catalog.places {
            match self.read_place(place, &|manifest| self.scrub_version(manifest, &seen)) {
                // It was removed meanwhile.
                Ok(None) => {}
                Ok(Some((files, damage))) => {
                    found.versions += 1;
                    found.sound += usize::from(damage.is_empty());
                    seen.extend(files);
                    for damage in damage {
                        note(damage, &mut found.damage);
                    }
                }
                Err(StoreError::Damaged(damage)) => {
                    found.versions += 1;
                    note(damage, &mut found.damage);
                }
                Err(error) => return Err(error),
            }
        }
        Ok((found, catalog.places.len()))
    }

    /// The files that were read, and what of the version is damaged. Those in `seen` are whole.
    fn scrub_version(
        &self,
        manifest: &StoreManifest,
        seen: &BTreeSet<String>,
    ) -> Result<(Vec<String>, Vec<Damage>)> {
        let mut read = Vec::new();
        let mut damage = Vec::new();
        for stored in &manifest.models {
            let whole = damage.len();
            for (path, bytes, crc64) in stored.files() {
                // Versions share files, and each is read once.
                if seen.contains(&path) {
                    continue;
                }
                self.begins(Work::Reads, bytes)?;
                match check_file(self.storage(), &path, bytes, crc64, &mut |_| Ok(()))? {
                    Some(found) => damage.push(found),
                    None => read.push(path),
                }
            }
            // The files are what was written; whether that is the version is another question.
            if damage.len() == whole {
                match self.load_model(manifest, stored, None, None) {
                    Err(StoreError::Damaged(found)) => damage.push(found),
                    loaded => drop(loaded?),
                }
            }
        }
        Ok((read, damage))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use weightsync_engine::Tensors;

    use super::*;
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
        let sound = store.scrub().unwrap();
        assert_eq!((sound.versions, sound.sound), (4, 4), "{:?}", sound.damage);

        // Of the three versions that need the first one's files, each is damaged, by one file.
        let first = store.versions().unwrap().versions[0].models[0]
            .directory
            .clone();
        fs::write(Path::new(&first).join("config.json"), b"[]").unwrap();
        let found = store.scrub().unwrap();
        assert_eq!((found.versions, found.sound), (4, 1), "{:?}", found.damage);
        assert_eq!(found.damage.len(), 1);
        assert!(found.damage[0].file.ends_with("config.json"));
    }
}
