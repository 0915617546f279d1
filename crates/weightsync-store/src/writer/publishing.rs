//! How a version is published: by replacing the head.

use weightsync_core::Run;

use super::{Needs, NewestSaved, Unsettled, Writer};
use crate::catalog;
use crate::error::{Damage, Result, StoreError};
use crate::format::{DATA, HEAD, Head, VERSIONS, VersionKey, seal, unseal};
use crate::lease;
use crate::retention::Keep;

impl Writer {
    /// Replaces the head, which is the step that publishes a version.
    pub(super) fn publish(&mut self, version: Unsettled) -> Result<()> {
        let leased = match self.options.keep {
            // Leases of readers that were killed stay until the next claim: nothing is removed here that
            // they could hold.
            Keep::All => Vec::new(),
            _ => lease::leased(self.store.storage())?,
        };
        let place = version.place;
        // Noted before the request: if its answer gets lost, the version may be published all the
        // same.
        self.unsettled = Some(version);
        self.change_head(&|writer, head| {
            if let Some(run) = head.runs.last_mut() {
                // A number is skipped if its version failed. Its manifest may be there all the same.
                let skipped = writer.removed.range(..place).map(|(skipped, _)| *skipped);
                let skipped = skipped.filter(|one| one.epoch == run.epoch);
                let skipped = skipped.map(|one| one.sequence);
                run.failed.extend(skipped.filter(|one| *one > run.last));
                run.last = place.sequence;
            }
            let saved = writer.unsettled.iter().flat_map(|one| &one.models);
            let saved = saved.map(|(stored, _)| (stored.model.clone(), stored.version));
            head.versions.extend(saved);
            let mut dropped = Vec::new();
            if writer.options.keep != Keep::All {
                let mut published: Vec<_> = writer.known.keys().copied().collect();
                published.retain(|place| head.has(*place));
                published.push(place);
                let used = leased.iter().chain(head.names.values()).copied();
                dropped = writer.options.keep.dropped(&published, &used.collect());
            }
            // Those dropped before are gone by now, or are removed with these. One whose manifest is
            // there would be a version again.
            head.dropped.retain(|place| {
                writer.known.contains_key(place) || writer.half_dropped.contains(place)
            });
            head.dropped.extend(dropped);
            // Versions that are gone need no entry.
            let there = writer.known.keys().chain(&writer.half_dropped);
            let oldest = there.min().unwrap_or(&place).epoch;
            head.runs
                .retain(|run| run.epoch >= oldest || run.epoch == place.epoch);
        })
    }

    /// Finds out whether the version was published whose answer got lost. In the end it is published,
    /// or never will be.
    pub(super) fn settle(&mut self) -> Result<()> {
        let Some(Unsettled { place, .. }) = self.unsettled else {
            return Ok(());
        };
        self.change_head(&|_, head| {
            // Storage that is slow may still be replacing the head that was read before. Of the two
            // replacements, one succeeds.
            if let Some(run) = head.runs.last_mut() {
                run.failed.insert(place.sequence);
            }
        })?;
        if self.unsettled.take().is_some() {
            self.discard(place);
        }
        Ok(())
    }

    /// Changes the head, unless the unsettled version turns out to be published. Names that others set
    /// meanwhile stay.
    fn change_head(&mut self, change: &dyn Fn(&Self, &mut Head)) -> Result<()> {
        let storage = self.store.shared_storage();
        loop {
            // On a copy: a refused request leaves what this writer knows.
            let mut head = self.head.clone();
            change(self, &mut head);
            let unsettled = self.unsettled.iter().map(|version| &version.place);
            let places = self.known.keys().chain(unsettled);
            head.count = places.filter(|place| head.has(**place)).count() as u64;
            let new = seal(&head);
            let swapped = storage.swap(HEAD, self.raw_head.as_deref(), &new);
            let swapped = swapped.map_err(StoreError::file("writing", storage.name(HEAD)));
            if let Ok(true) = swapped {
                (self.head, self.raw_head) = (head, Some(new));
                self.adopt();
                return Ok(());
            }
            // The request failed, or another process has replaced the head. The head itself tells.
            let before = self.raw_head.clone();
            let waited = self.unsettled.is_some();
            let looked = self.look_at_head();
            match (swapped, looked) {
                // It is published: the answer got lost.
                _ if waited && self.unsettled.is_none() => return Ok(()),
                (_, Err(error @ StoreError::Fenced { .. })) | (Ok(_), Err(error)) => {
                    return Err(error);
                }
                (Err(error), Err(_)) => return Err(error),
                // The head is as it was: the error is the answer.
                (Err(error), Ok(())) if self.raw_head == before => return Err(error),
                // Somebody else changed it meanwhile.
                (_, Ok(())) => {}
            }
        }
    }

    /// Reads what somebody else made of the head.
    pub(super) fn look_at_head(&mut self) -> Result<()> {
        if let Some(by) = self.successor {
            return Err(self.fenced(by));
        }
        let storage = self.store.storage();
        let raw = catalog::read(storage, HEAD)?;
        // Nobody has changed it since this writer looked.
        if raw == self.raw_head {
            return Ok(());
        }
        let file = storage.name(HEAD);
        let head = match &raw {
            Some(raw) => unseal::<Head>(&file, raw),
            None => Err(Damage::new(file, "it is missing").into()),
        };
        match head {
            Ok(head) if head.run == self.head.run => {
                if self.unsettled.is_some() {
                    // The call that replaced it may have failed before that was durable.
                    let settled = storage.settle(HEAD);
                    settled.map_err(StoreError::file("syncing", storage.name(HEAD)))?;
                }
                (self.head, self.raw_head) = (head, raw);
                self.adopt();
                Ok(())
            }
            Ok(head) => Err(self.step_aside(&head)),
            Err(StoreError::Damaged(damage)) => {
                // It is ours to replace, unless another writer has saved something.
                if let Some(by) = self.later_run()? {
                    self.successor = Some(by);
                    // No head tells whether the unsettled version was published: the successor may have
                    // gone on from it. So nothing of it is removed.
                    if let Some(Unsettled { place, .. }) = self.unsettled {
                        self.removed.remove(&place);
                    }
                    return Err(self.fenced(by));
                }
                // A store that was removed stays so.
                if raw.is_none() && !self.lists_known()? {
                    return Err(damage.into());
                }
                tracing::warn!("{damage}; it is written again");
                self.raw_head = raw;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Leaves the store to the run of this head. The unsettled version is settled if that run goes on
    /// from it.
    fn step_aside(&mut self, theirs: &Head) -> StoreError {
        self.successor = Some(theirs.run);
        if let Some(Unsettled { place, .. }) = self.unsettled {
            // The successor's head counts the version as published.
            if theirs.has(place) {
                self.unsettled = None;
            }
            if !theirs.never_had(place) {
                // It may be gone already, and its data be a part of later versions.
                self.removed.remove(&place);
            }
        }
        self.fenced(theirs.run)
    }

    fn fenced(&self, by: Run) -> StoreError {
        StoreError::Fenced {
            store: self.store.name(),
            own: self.head.run,
            by,
        }
    }

    /// Whether any version is there that this writer knows.
    fn lists_known(&self) -> Result<bool> {
        let storage = self.store.storage();
        let names = storage.list(VERSIONS);
        let names = names.map_err(StoreError::file("listing", storage.name(VERSIONS)))?;
        let mut places = names
            .iter()
            .filter_map(|name| VersionKey::of_manifest(name));
        Ok(places.any(|place| self.known.contains_key(&place)))
    }

    /// The run of a later writer that has written a manifest, or weights.
    fn later_run(&self) -> Result<Option<Run>> {
        let storage = self.store.storage();
        let list = |dir| {
            let names = storage.list(dir);
            names.map_err(StoreError::file("listing", storage.name(dir)))
        };
        let (manifests, data) = (list(VERSIONS)?, list(DATA)?);
        let places = manifests
            .iter()
            .filter_map(|name| VersionKey::of_manifest(name));
        // Data without a manifest count, too: a successor may be writing its first version.
        let places = places.chain(data.iter().filter_map(|name| name.parse().ok()));
        let own = self.head.run.epoch;
        let Some(latest) = places.max().filter(|place| place.epoch > own) else {
            return Ok(None);
        };
        let unknown = Run {
            epoch: latest.epoch,
            id: [0; 16],
        };
        let manifest = catalog::manifest(storage, latest).ok().flatten();
        Ok(Some(manifest.map_or(unknown, |manifest| manifest.run)))
    }

    /// Takes the version over into what is known, if the head has it.
    fn adopt(&mut self) {
        let head = &self.head;
        let Some(version) = self.unsettled.take_if(|version| head.has(version.place)) else {
            return;
        };
        let models = version.models.into_iter();
        let newest = models.map(|(stored, snapshot)| {
            let base = self.options.deltas.then_some(snapshot);
            (stored.model.clone(), NewestSaved { stored, base })
        });
        self.newest.extend(newest);
        self.removed.remove(&version.place);
        // Every model's newest state is a part of this version.
        let needs = self
            .newest
            .values()
            .flat_map(|newest| newest.stored.needs());
        let needs = match self.options.keep {
            Keep::All => Needs::Unread,
            Keep::Newest { .. } => Needs::These(needs.collect()),
        };
        self.known.insert(version.place, needs);
    }
}
