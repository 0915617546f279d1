//! Writing the weights of one model, whole or as changes.

use std::borrow::Cow;
use std::io;

use weightsync_core::ModelId;
use weightsync_engine::Snapshot;
use weightsync_engine::transport::ModelSpec;

use super::Writer;
use crate::anchor::{self, ExtraFiles};
use crate::catalog;
use crate::delta_file;
use crate::error::{Result, StoreError};
use crate::format::{Anchor, DELTA, DeltaFile, Hash, Stored, VersionKey, total};
use crate::progress::Work;

/// The most deltas in a row.
const CHAIN: usize = 32;

impl Writer {
    /// Writes the weights of one model, as changes if that is worth it.
    pub(super) fn write_model(&self, place: VersionKey, snapshot: &Snapshot) -> Result<Stored> {
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
        let newest = self.newest.get(model);
        // As changes, if the version before is in memory, has the layout and the files of this one,
        // and the changes stay small. Otherwise the version becomes an anchor.
        if let Some(newest) = newest
            && let Some(base) = &newest.base
            && newest.stored.spec == stored.spec
            && self.has_files(&newest.stored)
            && let Some(limit) = delta_limit(&newest.stored, snapshot.layout().bytes())
            && let Some(made) = delta_file::make(
                snapshot.layout(),
                storage.codec(),
                base.bytes(),
                snapshot.bytes(),
                limit,
            )
            && anchor::is_there(storage, &newest.stored)?
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
        let files = match newest {
            Some(newest) if self.options.files.is_empty() => self.carried_files(&newest.stored)?,
            _ => Cow::Borrowed(&self.options.files[..]),
        };
        let bytes = snapshot.layout().payload_bytes();
        self.store.begins(Work::Writes, bytes)?;
        let dir = place.file(model, "");
        let budget = self.options.shard_bytes;
        stored.anchor.files = anchor::write(storage, &dir, snapshot, &files, budget)?;
        Ok(stored)
    }

    /// Whether a version has the files that are to lie next to the weights.
    fn has_files(&self, stored: &Stored) -> bool {
        let files = &self.options.files;
        files.is_empty() || anchor::differing(files, &stored.anchor.files).is_empty()
    }

    /// The files next to the weights of the newest version of a model that has them whole.
    fn carried_files(&self, before: &Stored) -> Result<Cow<'_, ExtraFiles>> {
        let older = self.known.keys().rev().map(|&place| {
            let manifest = catalog::manifest(self.store.storage(), place)?;
            Ok(manifest.and_then(|one| one.model(&before.model).cloned()))
        });
        let mut failed = None;
        let mut seen = None;
        // The newest version that has its files whole is taken, from new to old.
        for stored in std::iter::once(Ok(Some(before.clone()))).chain(older) {
            let read = stored.and_then(|stored| {
                let is_new = |one: &Stored| seen.is_none_or(|seen| one.anchor.at < seen);
                // Versions share anchors, and each anchor is read once.
                let Some(stored) = stored.filter(is_new) else {
                    return Ok(None);
                };
                seen = Some(stored.anchor.at);
                Ok(Some((self.store.extra_files(&stored)?, stored.version)))
            });
            match (read, &failed) {
                (Ok(Some((files, _))), None) => return Ok(Cow::Owned(files)),
                // One without files had none yet, or was saved without them for a damage.
                (Ok(Some((files, version))), Some(failed)) if !files.is_empty() => {
                    tracing::warn!("{failed}; the files of {version} are taken");
                    return Ok(Cow::Owned(files));
                }
                (Ok(_), _) => {}
                (Err(error @ StoreError::Damaged(_)), _) => failed = failed.or(Some(error)),
                // What cannot be read may be whole.
                (Err(error @ StoreError::File { .. }), _) => failed = Some(error),
                (Err(error), _) => return Err(error),
            }
        }
        match failed {
            Some(StoreError::Damaged(damage)) => {
                tracing::warn!("{damage}; no version has the files whole: this one has none");
                Ok(Cow::Borrowed(&[]))
            }
            Some(error) => Err(error),
            None => Ok(Cow::Borrowed(&[])),
        }
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
            if there.as_deref() == Some(&bytes) {
                return match self.has_base(snapshot.model(), &hash) {
                    true => Ok(()),
                    // Another process wrote it, or a call that failed.
                    false => storage.settle(&path),
                };
            }
            // A damaged one is written again.
            if storage.swap(&path, there.as_deref(), &bytes)? {
                return Ok(());
            }
            // Another process was faster. Of one name there is one content.
            match storage.read(&path)?.as_deref() == Some(&bytes) {
                true => storage.settle(&path),
                false => Err(io::Error::other(
                    "another process writes it, and writes something else",
                )),
            }
        };
        write().map_err(StoreError::file("writing", storage.name(&path)))?;
        Ok(hash)
    }

    /// Whether the bytes of a model's newest version are known here, and it has this layout.
    fn has_base(&self, model: &ModelId, spec: &Hash) -> bool {
        let newest = self.newest.get(model);
        newest.is_some_and(|newest| newest.base.is_some() && newest.stored.spec == *spec)
    }
}

/// The most bytes that the changes of the next version may take; `None` if it is to be a full one.
fn delta_limit(newest: &Stored, image_bytes: u64) -> Option<u64> {
    let chain = total(newest.deltas.iter().map(|delta| delta.bytes));
    // All changes together stay below half a full version: reading them costs less than that.
    let left = (image_bytes / 2).checked_sub(chain)?;
    (newest.deltas.len() < CHAIN).then_some(left.min(image_bytes / 4))
}
