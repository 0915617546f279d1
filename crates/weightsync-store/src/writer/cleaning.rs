//! What a writer finds when it claims a store, and what it removes.

use std::collections::BTreeSet;

use super::{Needs, NewestSaved, Writer};
use crate::catalog::{self, Catalog};
use crate::error::{Result, StoreError};
use crate::format::{DATA, Stored, VersionKey};
use crate::lease;

impl Writer {
    /// Removes what a version left that was not published. False if something may be left.
    pub(super) fn discard(&mut self, place: VersionKey) -> bool {
        self.removed.insert(place, vec![place]);
        let storage = self.store.storage();
        let mut gone = true;
        // The manifest first: without it the data are no version.
        for path in [place.manifest(), place.data()] {
            if let Err(error) = storage.remove(&path) {
                // The next save tries again.
                tracing::warn!("{} is not removed yet: {error}", storage.name(&path));
                gone = false;
            }
        }
        gone
    }

    /// Looks at what is there, after the store was claimed, and removes what no version needs.
    pub(super) fn take_stock(&mut self, catalog: &Catalog) -> Result<()> {
        let storage = self.store.shared_storage();
        let failed = |action, path: &str| StoreError::file(action, storage.name(path));
        // Also data without a manifest: a writer died while it wrote them.
        let data = storage.list(DATA).map_err(failed("listing", DATA))?;
        let data: Vec<VersionKey> = data.iter().filter_map(|name| name.parse().ok()).collect();
        let all = catalog.listed.iter().chain(&data);
        let runs = self.head.runs.iter().map(|run| run.last);
        let highest = all.map(|place| place.sequence).chain(runs).max();
        // Above all numbers that were ever used, in this run or an earlier one.
        self.next = highest.unwrap_or(0).saturating_add(1);
        // The data were listed after the claim. Those of a later run belong to a writer that has taken
        // over meanwhile, and this one does not know its versions.
        let own = self.head.run.epoch;
        let data: Vec<_> = data.into_iter().filter(|place| place.epoch < own).collect();
        // The newest manifests may be damaged or missing: the head knows their versions.
        self.tried.extend(self.head.versions.clone());
        for &place in &catalog.listed {
            if self.head.has(place) {
                self.known.insert(place, Needs::Unread);
                continue;
            }
            // It was not published, or the answer got lost.
            match catalog::manifest(&*storage, place) {
                Ok(manifest) => self.note_tried(manifest.iter().flat_map(|one| &one.models)),
                Err(StoreError::Damaged(damage)) => tracing::warn!("{damage}"),
                Err(error) => return Err(error),
            }
        }
        // The newest says how every model is.
        for (&place, needs) in self.known.iter_mut().rev() {
            match catalog::manifest(&*storage, place) {
                Ok(None) => {}
                Ok(Some(manifest)) => {
                    self.note_tried(&manifest.models);
                    let models = manifest.models.into_iter();
                    let newest = models.map(|stored| {
                        let newest = NewestSaved { stored, base: None };
                        (newest.stored.model.clone(), newest)
                    });
                    self.newest.extend(newest);
                    break;
                }
                Err(StoreError::Damaged(damage)) => {
                    tracing::warn!("{damage}");
                    *needs = Needs::Anything;
                }
                Err(error) => return Err(error),
            }
        }
        // With damage, what counts as a version may be a guess: nothing is removed on that ground.
        if catalog.damage.is_empty()
            && let Err(error) = self.tidy(&catalog.listed, &data)
        {
            tracing::warn!("what an earlier writer left is not removed yet: {error}");
            // After the next save.
            self.left_over = data.into_iter().collect();
        }
        Ok(())
    }

    /// Removes what was not published.
    fn tidy(&mut self, listed: &[VersionKey], data: &[VersionKey]) -> Result<()> {
        let storage = self.store.shared_storage();
        let failed = |action, path: &str| StoreError::file(action, storage.name(path));
        if let Err(error) = storage.tidy() {
            tracing::warn!("unfinished files are not removed yet: {error}");
        }
        for place in listed.iter().filter(|place| !self.head.has(**place)) {
            let path = place.manifest();
            storage.remove(&path).map_err(failed("removing", &path))?;
            self.half_dropped.remove(place);
        }
        self.remove_data(data)
    }

    /// Removes the versions that are dropped, and the data that no version and no reader needs.
    pub(super) fn clean(&mut self) -> Result<()> {
        let storage = self.store.shared_storage();
        let dropped: Vec<_> = self.head.dropped.iter().copied().collect();
        for &place in &dropped {
            // What it needs is not known any more when it is gone.
            self.read_needs(place)?;
        }
        for place in dropped {
            let path = place.manifest();
            let removed = storage.remove(&path);
            removed.map_err(StoreError::file("removing", storage.name(&path)))?;
            self.half_dropped.remove(&place);
            match self.known.remove(&place) {
                Some(Needs::These(needs)) => drop(self.removed.insert(place, needs)),
                Some(_) => drop(self.removed.insert(place, vec![place])),
                None => {}
            }
        }
        if self.removed.is_empty() && self.left_over.is_empty() {
            return Ok(());
        }
        // Those of versions that failed, whose manifests may be there still.
        for place in self.removed.keys() {
            let path = place.manifest();
            let removed = storage.remove(&path);
            removed.map_err(StoreError::file("removing", storage.name(&path)))?;
        }
        let mut candidates: BTreeSet<_> = self.removed.values().flatten().copied().collect();
        candidates.extend(self.removed.keys().chain(&self.left_over));
        self.remove_data(&candidates.into_iter().collect::<Vec<_>>())
    }

    /// Removes these data, as far as nothing needs them.
    fn remove_data(&mut self, candidates: &[VersionKey]) -> Result<()> {
        let storage = self.store.shared_storage();
        // After the manifests are gone: a reader that came before has a lease by now.
        let leased = lease::leased(&*storage)?;
        let (failed, old): (Vec<VersionKey>, Vec<_>) = candidates
            .iter()
            .filter(|place| !self.known.contains_key(place))
            .partition(|place| self.head.never_had(**place));
        let old = match old.is_empty() {
            true => old,
            false => self.unneeded(old, &leased)?,
        };
        // Versions are folded onto published ones alone, so nothing needs one that failed.
        for place in failed.iter().chain(&old) {
            let path = place.data();
            let removed = storage.remove(&path);
            removed.map_err(StoreError::file("removing", storage.name(&path)))?;
        }
        // What a version still needs is looked at again when that version is removed.
        self.removed.retain(|place, _| leased.contains(place));
        self.left_over.clear();
        Ok(())
    }

    /// Those of these data that no published version needs, and no reader.
    fn unneeded(
        &mut self,
        mut data: Vec<VersionKey>,
        leased: &[VersionKey],
    ) -> Result<Vec<VersionKey>> {
        let known: Vec<_> = self.known.keys().copied().collect();
        let mut needed: BTreeSet<_> = leased.iter().copied().collect();
        for place in known {
            match self.read_needs(place)? {
                Needs::These(needs) => needed.extend(needs),
                // It needs nothing that came later.
                _ => data.retain(|old| *old > place),
            }
        }
        for place in leased {
            match self.removed.get(place) {
                Some(needs) => needed.extend(needs),
                None if self.known.contains_key(place) => {}
                // An earlier writer has removed its manifest.
                None => data.retain(|old| old > place),
            }
        }
        data.retain(|place| !needed.contains(place));
        Ok(data)
    }

    /// What a version needs.
    fn read_needs(&mut self, place: VersionKey) -> Result<&Needs> {
        let needs = self.known.entry(place).or_insert(Needs::Unread);
        if let Needs::Unread = needs {
            *needs = match catalog::manifest(self.store.storage(), place) {
                Ok(Some(manifest)) => Needs::These(manifest.needs().collect()),
                Ok(None) => Needs::Anything,
                Err(StoreError::Damaged(damage)) => {
                    tracing::warn!("{damage}");
                    Needs::Anything
                }
                Err(error) => return Err(error),
            };
        }
        Ok(needs)
    }

    fn note_tried<'a>(&mut self, models: impl IntoIterator<Item = &'a Stored>) {
        for stored in models {
            let tried = self.version(&stored.model).max(stored.version);
            self.tried.insert(stored.model.clone(), tried);
        }
    }
}
