//! Saving a checkpoint as the next version.

use std::path::Path;

use weightsync_core::{Digest, Epoch, ModelId, Run, Version};
use weightsync_engine::Snapshot;
use weightsync_engine::transport::ModelSpec;

use super::{Checkpoint, unusable};
use crate::anchor;
use crate::error::{Damage, Result, StoreError};
use crate::format::{Stored, is_version_name};
use crate::retention::Keep;
use crate::store::{ModelVersion, Store, Which, once};
use crate::writer::{SaveOptions, Saved, Writer};

/// The name of a model that nobody has named.
const MODEL: &str = "policy";

/// How a checkpoint is saved.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PushOptions {
    /// The model whose version it is: the only one of the store, or `policy`, if it is not set.
    pub model: Option<ModelId>,
    /// Which versions the store keeps.
    pub keep: Keep,
    /// Saves all bytes, also of weights that changed little or not at all.
    pub whole: bool,
    /// A name for the version.
    pub name: Option<String>,
}

impl PushOptions {
    /// The model whose version a checkpoint becomes, after this newest version.
    fn model_after(&self, newest: Option<&PreviousVersion>) -> Result<ModelId> {
        Ok(match (&self.model, newest) {
            (Some(model), _) => model.clone(),
            (None, Some(newest)) => newest.stored.model.clone(),
            (None, None) => ModelId::new(MODEL).map_err(weightsync_engine::Error::from)?,
        })
    }
}

/// What became of a checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pushed {
    /// The model.
    pub model: ModelId,
    /// The version with these weights.
    pub version: Version,
    /// The digest of its bytes.
    pub digest: Digest,
    /// The bytes of its tensors.
    pub bytes: u64,
    /// The newest version before.
    pub before: Option<Version>,
    /// What was saved; `None` if the newest version has these weights already.
    pub saved: Option<Saved>,
    /// Files next to the weights that are others than before: the version was saved whole for them.
    pub other_files: Vec<String>,
    /// What is damaged. Manifests that are missing are named for the last time, if something was saved.
    pub damage: Vec<Damage>,
}

/// The newest version of the model, before.
struct PreviousVersion {
    stored: Stored,
    spec: ModelSpec,
    /// Which of the checkpoint's files differ from those that are there.
    other_files: Vec<String>,
}

impl Store {
    /// Saves a checkpoint as the next version of a model, if it is another one than the newest. It is
    /// compared with that one, and only what changed is written where that is little. The small files
    /// of the checkpoint are saved with it; a checkpoint without any keeps those of the newest version.
    ///
    /// The store is claimed as by [`Writer::claim`], so a trainer that writes there cannot go on. A
    /// living sender is not disturbed: that is an error. If nothing is saved, nothing is claimed.
    ///
    /// # Errors
    ///
    /// [`StoreError::InUse`], [`StoreError::SeveralModels`], [`StoreError::Name`], those of
    /// [`Writer::save`] and of the checkpoint.
    pub fn push(&self, mut checkpoint: Checkpoint, options: &PushOptions) -> Result<Pushed> {
        if let Some(name) = options.name.as_ref().filter(|name| !is_version_name(name)) {
            return Err(StoreError::Name { name: name.clone() });
        }
        self.refuse_own_directory(&checkpoint)?;
        let (newest, damage) = self.newest_before(&checkpoint, options.model.as_ref())?;
        let model = options.model_after(newest.as_ref())?;
        let (mut comparable, mut other_files) = (false, Vec::new());
        if let Some(newest) = &newest {
            comparable = checkpoint.arrange(&newest.spec.layout, &newest.spec.attributes);
            other_files.clone_from(&newest.other_files);
        }
        checkpoint.progress = self.progress().cloned();
        let before = newest.as_ref().map(|newest| newest.stored.version);
        // Read whole before the store is claimed: a checkpoint that cannot be read changes nothing.
        let snapshot = unnumbered(&model, &checkpoint)?;
        let digest = snapshot.digest();
        let bytes = snapshot.layout().payload_bytes();
        let pushed = |version, saved, damage| Pushed {
            model: model.clone(),
            version,
            digest,
            bytes,
            before,
            saved,
            other_files: other_files.clone(),
            damage,
        };
        // Compared with those of another layout, or with other files, it would be saved whole anyway.
        let as_changes = comparable && other_files.is_empty() && !options.whole;
        // The newest version has these bytes and files: it gets the name, and nothing is saved.
        if let Some(newest) = &newest
            && as_changes
            && newest.stored.digest == digest
        {
            self.name_pushed(options, &model, newest.stored.version)?;
            return Ok(pushed(newest.stored.version, None, damage));
        }
        // A claim would fence a living sender off.
        self.refuse_living_sender()?;
        let save = SaveOptions {
            keep: options.keep,
            files: checkpoint.files,
            ..SaveOptions::default()
        };
        let mut writer = Writer::claim(self, save)?;
        if as_changes {
            writer.read_base()?;
        }
        let version = writer.version(&model).next();
        let saved =
            writer.save(&[renumbered(snapshot, writer.run(), version)?.with_digest(digest)])?;
        self.name_pushed(options, &model, version)?;
        Ok(pushed(
            version,
            Some(saved),
            together(writer.damage(), damage),
        ))
    }

    /// Gives a version the name that the options have, if they have one.
    ///
    /// # Errors
    ///
    /// Those of [`set_name`](Self::set_name).
    fn name_pushed(&self, options: &PushOptions, model: &ModelId, version: Version) -> Result<()> {
        let name = options.name.as_ref();
        let version = ModelVersion {
            model: Some(model.clone()),
            version,
        };
        name.map_or(Ok(()), |name| self.set_name(name, &version))
    }

    /// An error if the store would lie in the directory of the checkpoint. It would then be read in the
    /// checkpoint's place.
    fn refuse_own_directory(&self, checkpoint: &Checkpoint) -> Result<()> {
        if checkpoint.is_of_store() {
            return Ok(());
        }
        // A store that is no directory, or is not there yet, is nobody's.
        let Ok(store) = std::fs::canonicalize(self.name()) else {
            return Ok(());
        };
        let directory = |path: &Path| {
            // A file may be a link: its directory is where the link lies.
            let named = std::path::absolute(path).ok()?;
            let dir = if named.is_dir() {
                &*named
            } else {
                named.parent()?
            };
            std::fs::canonicalize(dir).ok()
        };
        let dirs = directory(&checkpoint.source).zip(directory(&checkpoint.path));
        // What was named, where the weights lie, and what is between the two.
        let is_own = dirs.is_some_and(|(source, found)| {
            let is_between = store.starts_with(&source) && found.starts_with(&store);
            store == source || store == found || is_between
        });
        match is_own {
            true => {
                let what = "it lies in the directory of the store: name another one for the store";
                Err(unusable(&checkpoint.path, what))
            }
            false => Ok(()),
        }
    }

    fn newest_before(
        &self,
        checkpoint: &Checkpoint,
        model: Option<&ModelId>,
    ) -> Result<(Option<PreviousVersion>, Vec<Damage>)> {
        let read = self.read(&Which::Newest, &|manifest| {
            let stored = match model {
                Some(id) => manifest.model(id),
                None => Some(self.stored_model(manifest, None)?),
            };
            let Some(stored) = stored else {
                return Ok(None);
            };
            let other_files = match checkpoint.files.is_empty() {
                true => Vec::new(),
                false => anchor::differing(&checkpoint.files, &stored.anchor.files),
            };
            Ok(Some(PreviousVersion {
                stored: stored.clone(),
                spec: self.spec(&stored.model, &stored.spec)?,
                other_files,
            }))
        });
        match read {
            Err(StoreError::Empty { damage, .. }) => Ok((None, damage)),
            read => read,
        }
    }
}

/// The weights of a checkpoint, as a version of no run.
fn unnumbered(model: &ModelId, checkpoint: &Checkpoint) -> Result<Snapshot> {
    let nobody = Run {
        epoch: Epoch(0),
        id: [0; 16],
    };
    Ok(Snapshot::of(
        model.as_str(),
        checkpoint,
        nobody,
        Version::NONE,
    )?)
}

/// What a writer has found damaged, and then what else was damaged before.
fn together(found: &[Damage], before: Vec<Damage>) -> Vec<Damage> {
    let mut all = found.to_vec();
    all.extend(before);
    once(all)
}

/// The same weights as a version of a run.
fn renumbered(snapshot: Snapshot, run: Run, version: Version) -> Result<Snapshot> {
    let spec = ModelSpec {
        id: snapshot.model().clone(),
        layout: snapshot.layout().clone(),
        attributes: snapshot.attributes().clone(),
    };
    let image = snapshot.into_image();
    let image = image.unwrap_or_else(|| unreachable!("nobody else has it"));
    Ok(Snapshot::received(&spec, run, version, image)?)
}
