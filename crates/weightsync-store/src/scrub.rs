//! Checking everything that a store has.

use std::collections::BTreeSet;

use crate::anchor::check_file;
use crate::catalog::Catalog;
use crate::error::{Damage, Result, StoreError};
use crate::format::{DELTA, Manifest};
use crate::progress::Work;
use crate::store::Store;

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
                        add(&mut found.damage, damage);
                    }
                }
                Err(StoreError::Damaged(damage)) => {
                    found.versions += 1;
                    add(&mut found.damage, damage);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// The files that were read, and what of the version is damaged. Those in `seen` are whole.
    fn scrub_version(
        &self,
        manifest: &Manifest,
        seen: &BTreeSet<String>,
    ) -> Result<(Vec<String>, Vec<Damage>)> {
        let mut read = Vec::new();
        let mut damage = Vec::new();
        for stored in &manifest.models {
            let anchor = stored.anchor.files.iter().map(|file| {
                let path = stored.anchor.at.file(&stored.model, &file.name);
                (path, file.bytes, file.crc64)
            });
            let deltas = stored.deltas.iter().map(|file| {
                let path = file.at.file(&stored.model, DELTA);
                (path, file.bytes, file.crc64)
            });
            let whole = damage.len();
            for (path, bytes, crc64) in anchor.chain(deltas) {
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
                match self.load_model(manifest, stored, None) {
                    Err(StoreError::Damaged(found)) => damage.push(found),
                    loaded => drop(loaded?),
                }
            }
        }
        Ok((read, damage))
    }
}

/// A file of several versions is damaged once.
fn add(all: &mut Vec<Damage>, damage: Damage) {
    if !all.contains(&damage) {
        all.push(damage);
    }
}
