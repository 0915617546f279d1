//! Waiting for versions, and staying within a bound on staleness.

use std::time::{Duration, Instant};

use weightsync_core::ModelId;

use super::{Loaded, LoadedModel, ModelVersion, Store, StoredVersion, Which};
use weightsync_engine::transport::polled::Pause;

use crate::catalog::{self, Catalog};
use crate::error::{Result, StoreError};
use crate::format::{HEAD, VersionKey};

impl Store {
    /// Waits until a version is published that comes after `than`, by its number in the store, and
    /// describes the newest one. `None` at the deadline. No weights are read.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`], [`StoreError::Format`], and an interruption.
    pub fn wait_newer(
        &self,
        than: Option<u64>,
        timeout: Option<Duration>,
    ) -> Result<Option<StoredVersion>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut pause = Pause::new(self.storage().pauses());
        let mut seen = None;
        loop {
            let head = self.storage.read(HEAD);
            let head = head.map_err(StoreError::file("reading", self.storage.name(HEAD)))?;
            // Nothing is published without a new head.
            if seen.as_ref() != Some(&head) {
                seen = Some(head);
                let catalog = Catalog::read(self.storage())?;
                let newer = catalog.places.iter().rev();
                // From the newest on: what is behind it no longer matters to the caller.
                for &place in newer.take_while(|place| Some(place.sequence) > than) {
                    match catalog::manifest(self.storage(), place) {
                        Ok(Some(manifest)) => {
                            return Ok(Some(self.describe(&manifest, &catalog.names)));
                        }
                        Ok(None) => {}
                        Err(StoreError::Damaged(damage)) => tracing::warn!("{damage}"),
                        Err(error) => return Err(error),
                    }
                }
            }
            if !pause.until(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Loads a version, and waits for it until the deadline; `None` then. Only [`Which::AtLeast`] and
    /// the first version of all are waited for.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load), but for a version that may still come.
    pub fn wait(&self, which: &Which, timeout: Option<Duration>) -> Result<Option<Loaded>> {
        self.wait_for(which, timeout, &|| self.load(which))
    }

    /// The same for one model, as by [`load_one`](Self::load_one).
    ///
    /// # Errors
    ///
    /// Those of [`load_one`](Self::load_one), but for a version that may still come.
    pub fn wait_one(
        &self,
        which: &Which,
        model: Option<&ModelId>,
        timeout: Option<Duration>,
    ) -> Result<Option<LoadedModel>> {
        self.wait_for(which, timeout, &|| self.load_one(which, model))
    }

    fn wait_for<T>(
        &self,
        which: &Which,
        timeout: Option<Duration>,
        load: &dyn Fn() -> Result<T>,
    ) -> Result<Option<T>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut pause = Pause::new(self.storage().pauses());
        let mut seen = None;
        loop {
            // The same head has nothing new.
            let head = catalog::read(self.storage(), HEAD).ok().flatten();
            if head.is_none() || head != seen {
                match load() {
                    Err(StoreError::Empty { damage, .. }) if damage.is_empty() => {}
                    Err(StoreError::NoSuchVersion { .. }) if matches!(which, Which::AtLeast(_)) => {
                    }
                    loaded => return loaded.map(Some),
                }
                seen = head;
            }
            if !pause.until(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Loads the newest version unless `held` is at most `lag` versions of the store behind it: a
    /// reader with a bound on staleness calls this before each step.
    ///
    /// # Errors
    ///
    /// Those of [`load_one`](Self::load_one).
    pub fn load_unless_within(&self, held: &ModelVersion, lag: u64) -> Result<Option<LoadedModel>> {
        let newest = catalog::head(self.storage());
        let newest = newest.ok().flatten().and_then(|head| head.newest());
        // The usual case: nothing newer, and one manifest is read.
        if let Some(newest) = newest
            && self.is_at(newest, held)? == Some(true)
        {
            return Ok(None);
        }
        let catalog = Catalog::read(self.storage())?;
        let mut behind = 0;
        for &place in catalog.places.iter().rev() {
            match self.is_at(place, held)? {
                Some(true) if behind <= lag => return Ok(None),
                Some(true) => break,
                Some(false) => behind += 1,
                None => {}
            }
            if behind > lag {
                break;
            }
        }
        self.load_one(&Which::Newest, held.model.as_ref()).map(Some)
    }

    /// Whether the model has this version, or an older one, at a place; `None` where nothing can be
    /// read.
    fn is_at(&self, place: VersionKey, held: &ModelVersion) -> Result<Option<bool>> {
        match catalog::manifest(self.storage(), place) {
            Ok(Some(manifest)) => Ok(Some(self.stored(&manifest, held)?.version <= held.version)),
            Ok(None) | Err(StoreError::Damaged(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
