//! The names of versions.

use std::collections::BTreeMap;

use weightsync_core::{ModelId, Version};

use super::{ModelVersion, Store};
use crate::catalog::{self, Catalog};
use crate::error::{Damage, Result, StoreError};
use crate::format::{HEAD, VersionKey, is_version_name, seal};

impl Store {
    /// Gives the newest version in which the model has this version a name. The store keeps a named
    /// version until [`remove_name`](Self::remove_name). A name that another version has moves.
    ///
    /// # Errors
    ///
    /// [`StoreError::Name`], [`StoreError::NoSuchVersion`], [`StoreError::Damaged`] if the head is,
    /// [`StoreError::File`].
    pub fn set_name(&self, name: &str, version: &ModelVersion) -> Result<()> {
        if !is_version_name(name) {
            return Err(StoreError::Name { name: name.into() });
        }
        self.change_names(|catalog, names| {
            let place = self.find(catalog, version)?;
            names.insert(name.into(), place);
            Ok(())
        })
    }

    /// Takes a name back. The version is then kept or removed like any other.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSuchName`], and those of [`set_name`](Self::set_name).
    pub fn remove_name(&self, name: &str) -> Result<()> {
        self.change_names(|_, names| match names.remove(name) {
            Some(_) => Ok(()),
            None => Err(StoreError::NoSuchName {
                store: self.name(),
                name: name.into(),
                known: names.keys().cloned().collect(),
            }),
        })
    }

    /// Every name, and the versions of the models it stands for.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`], [`StoreError::Format`], [`StoreError::Damaged`].
    pub fn names(&self) -> Result<BTreeMap<String, Vec<(ModelId, Version)>>> {
        let catalog = Catalog::read(self.storage())?;
        let mut names = BTreeMap::new();
        for (name, place) in &catalog.names {
            if let Some(manifest) = catalog::manifest(self.storage(), *place)? {
                let models = manifest.models.iter();
                let versions = models.map(|stored| (stored.model.clone(), stored.version));
                names.insert(name.clone(), versions.collect());
            }
        }
        Ok(names)
    }

    fn change_names(
        &self,
        change: impl Fn(&Catalog, &mut BTreeMap<String, VersionKey>) -> Result<()>,
    ) -> Result<()> {
        loop {
            let catalog = Catalog::read(self.storage())?;
            // Without a head, names are read from manifests and cannot be changed.
            let Some((old, mut head)) = catalog.head.clone() else {
                return match catalog.damage.into_iter().next() {
                    Some(Damage { file, what }) => {
                        let what = format!("{what}; the next save writes it again");
                        Err(Damage { file, what }.into())
                    }
                    None => Err(StoreError::Empty {
                        store: self.name(),
                        damage: Vec::new(),
                    }),
                };
            };
            change(&catalog, &mut head.names)?;
            let name = || self.storage.name(HEAD);
            // Only onto the head that was read: a version published meanwhile must not be lost.
            let swapped = self.storage.swap(HEAD, Some(&old), &seal(&head));
            if swapped.map_err(StoreError::file("writing", name()))? {
                return Ok(());
            }
            // A version was published meanwhile.
        }
    }
}
