//! Which version of the store has a version of a model.

use std::collections::HashSet;

use weightsync_core::Version;

use super::{ModelVersion, Store};
use crate::catalog::{self, Catalog};
use crate::error::{Result, StoreError};
use crate::format::{StoreManifest, VersionKey};
use crate::{DAMAGE_TARGET, Damage};

impl Store {
    /// The newest version of the store in which the model has the version asked for. Versions of a
    /// model only grow, so half of those that are left are passed over at each step.
    pub(crate) fn find(&self, catalog: &Catalog, asked: &ModelVersion) -> Result<VersionKey> {
        let places = &catalog.places;
        let told = &mut HashSet::new();
        // The store has the model, or says what it has.
        self.newest(catalog, asked, told)?;
        let mut found = None;
        // A model's versions grow from place to place, so looking by halves reads few manifests.
        let (mut low, mut high) = (0, places.len());
        while low < high {
            let middle = low + (high - low) / 2;
            let mut readable = None;
            for (at, &place) in places.iter().enumerate().take(high).skip(middle) {
                // The version asked for may be another one.
                if let Some(manifest) = self.readable(place, told)? {
                    readable = Some((at, manifest));
                    break;
                }
            }
            match readable {
                Some((at, manifest)) if self.version_in(&manifest, asked) <= asked.version => {
                    found = Some((places[at], self.version_in(&manifest, asked)));
                    low = at + 1;
                }
                _ => high = middle,
            }
        }
        if let Some((place, got)) = found
            && got == asked.version
        {
            return Ok(place);
        }
        // One that cannot be read, between those before it and those after it, may be the one.
        for &place in &places[low..] {
            if catalog::manifest(self.storage(), place)?.is_some() {
                break;
            }
        }
        Err(self.no_such_version(catalog, asked, told)?)
    }

    /// The newest version of the store, if the model has the version asked for in it or a later one.
    pub(super) fn find_newest(
        &self,
        catalog: &Catalog,
        asked: &ModelVersion,
    ) -> Result<VersionKey> {
        let told = &mut HashSet::new();
        match self.newest(catalog, asked, told)? {
            Some((place, got)) if got >= asked.version => Ok(place),
            _ => Err(self.no_such_version(catalog, asked, told)?),
        }
    }

    /// The newest place with a whole manifest, and the version that the model has there.
    fn newest(
        &self,
        catalog: &Catalog,
        asked: &ModelVersion,
        told: &mut HashSet<Damage>,
    ) -> Result<Option<(VersionKey, Version)>> {
        for &place in catalog.places.iter().rev() {
            if let Some(manifest) = self.readable(place, told)? {
                return Ok(Some((place, self.stored(&manifest, asked)?.version)));
            }
        }
        Ok(None)
    }

    /// The manifest of a place, if it is there and whole. Damage is logged once for a call.
    fn readable(
        &self,
        place: VersionKey,
        told: &mut HashSet<Damage>,
    ) -> Result<Option<StoreManifest>> {
        match catalog::manifest(self.storage(), place) {
            Err(StoreError::Damaged(damage)) => {
                if told.insert(damage.clone()) {
                    tracing::warn!("{damage}");
                }
                Ok(None)
            }
            manifest => manifest,
        }
    }

    /// The version of the model there; none, if the model came later.
    fn version_in(&self, manifest: &StoreManifest, asked: &ModelVersion) -> Version {
        let stored = self.stored(manifest, asked);
        stored.map_or(Version::NONE, |stored| stored.version)
    }

    fn no_such_version(
        &self,
        catalog: &Catalog,
        asked: &ModelVersion,
        told: &mut HashSet<Damage>,
    ) -> Result<StoreError> {
        /// As many as the message names.
        const MOST: usize = 8;
        let mut known = Vec::new();
        for &place in catalog.places.iter().rev().take(MOST) {
            let manifest = self.readable(place, told)?;
            let version = manifest.map(|manifest| self.version_in(&manifest, asked));
            known.extend(version.filter(|version| !version.is_none()));
        }
        known.dedup();
        Ok(StoreError::NoSuchVersion {
            store: self.name(),
            asked: asked.version.to_string(),
            known,
        })
    }
}

/// The same damage, each once and where it was found first: what several versions need is damaged once.
pub(crate) fn once(mut damage: Vec<Damage>) -> Vec<Damage> {
    let mut known = HashSet::new();
    damage.retain(|found| known.insert(found.clone()));
    damage
}

/// Logs what was damaged on the way to a version that was read. The first `known` are of the store, the
/// others of newer versions.
pub(super) fn tell(damage: &[Damage], known: usize) {
    for (at, found) in damage.iter().enumerate() {
        match at < known {
            true => tracing::warn!(target: DAMAGE_TARGET, "{found}"),
            false => tracing::warn!(target: DAMAGE_TARGET, "{found}; an older version is loaded"),
        }
    }
}
