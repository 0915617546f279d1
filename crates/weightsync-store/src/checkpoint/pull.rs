//! Writing a version out as a checkpoint directory.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use weightsync_core::{Digest, ModelId, Version};

use super::{MAX_INDEX, find, name_of, read_small};
use crate::anchor;
use crate::error::{Damage, Result, StoreError};
use crate::progress::Work;
use crate::storage::{Directory, Metered, Storage, unique};
use crate::store::{LoadedModel, Store, Which};
use crate::writer::SaveOptions;

/// The file by which a directory is known to be one that [`Store::pull`] wrote.
pub const PULL_MARK: &str = "weightsync.json";

/// A version that was written out.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pulled {
    /// The directory.
    pub path: PathBuf,
    /// The model.
    pub model: ModelId,
    /// Its version.
    pub version: Version,
    /// The digest of its bytes.
    pub digest: Digest,
    /// The number of the version of the store.
    pub sequence: u64,
    /// The bytes of its tensors.
    pub bytes: u64,
    /// What was found to be damaged on the way, the newest first.
    pub damage: Vec<Damage>,
}

/// What a directory holds.
#[derive(Serialize, Deserialize)]
struct Mark {
    store: String,
    model: ModelId,
    version: Version,
    digest: Digest,
    files: BTreeSet<String>,
}

/// Whether bytes say what a directory holds.
#[cfg(feature = "fuzz")]
pub(crate) fn is_mark(bytes: &[u8]) -> bool {
    serde_json::from_slice::<Mark>(bytes).is_ok()
}

impl Store {
    /// Writes a version of a model to a directory, as a checkpoint that transformers and vLLM load as it
    /// is. `model` is not needed in a store of one model.
    ///
    /// **Guarantee.** The directory has its name only when it is whole and on the disk. One that an
    /// earlier call wrote is replaced: in one step where the file system can exchange two names, as
    /// those of Linux can; elsewhere the name is missing for a moment. Any other directory with something
    /// in it is refused. The model is in memory once.
    ///
    /// # Errors
    ///
    /// [`StoreError::Occupied`], those of [`load`](Self::load), and [`StoreError::SeveralModels`].
    pub fn pull(&self, which: &Which, model: Option<&ModelId>, out: &Path) -> Result<Pulled> {
        // Before anything large is read.
        let target = Target::new(out)?;
        let (loaded, mut files) = self.load_with_files(which, model)?;
        let LoadedModel {
            snapshot,
            sequence,
            damage,
        } = loaded;
        let digest = snapshot.published_digest();
        let digest = digest.unwrap_or_else(|| snapshot.digest());
        files.retain(|(name, _)| name != PULL_MARK);
        let unfinished = Unfinished::new(&target)?;
        let mut storage: Arc<dyn Storage> = Arc::new(Directory::new(&unfinished.path));
        if let Some(progress) = self.progress() {
            storage = Arc::new(Metered::new(storage, progress));
        }
        let bytes = snapshot.layout().payload_bytes();
        self.begins(Work::Writes, bytes)?;
        let budget = SaveOptions::default().shard_bytes;
        let written = anchor::write(&*storage, "", &snapshot, &files, budget)?;
        let mark = Mark {
            store: self.name(),
            model: snapshot.model().clone(),
            version: snapshot.version(),
            digest,
            files: written.into_iter().map(|file| file.name).collect(),
        };
        let text = serde_json::to_vec_pretty(&mark);
        let text = text.unwrap_or_else(|error| unreachable!("plain values become JSON: {error}"));
        anchor::write_file(&*storage, "", PULL_MARK, [&text[..]].into_iter())?;
        unfinished.place(&target)?;
        Ok(Pulled {
            path: target.path,
            model: mark.model,
            version: mark.version,
            digest,
            sequence,
            bytes,
            damage,
        })
    }
}

/// Where a directory is to be.
struct Target {
    path: PathBuf,
    /// The directory it is in.
    above: PathBuf,
}

impl Target {
    fn new(out: &Path) -> Result<Self> {
        let failed = || StoreError::file("writing", out.display().to_string());
        // One behind a link is replaced where it is, and not the link.
        let path = match fs::canonicalize(out) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let out = std::path::absolute(out).map_err(failed())?;
                let above = out.parent().unwrap_or(&out);
                fs::create_dir_all(above).map_err(failed())?;
                let name = out.file_name().unwrap_or_default();
                fs::canonicalize(above).map(|above| above.join(name))
            }
            found => found,
        };
        let path = path.map_err(failed())?;
        let above = path.parent().unwrap_or(&path).to_owned();
        let target = Self { path, above };
        target.is_replaceable()?;
        Ok(target)
    }

    /// Whether a checkpoint is there which an earlier call wrote, and nothing else.
    fn is_replaceable(&self) -> Result<bool> {
        let occupied = |what: String| StoreError::Occupied {
            path: self.path.display().to_string(),
            what,
        };
        match fs::symlink_metadata(&self.path) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(occupied("it is not a directory".into())),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => {
                return Err(StoreError::file("opening", self.path.display().to_string())(error));
            }
        }
        if is_mount(&self.path) {
            return Err(occupied("a file system is mounted there".into()));
        }
        let names = find::names(&self.path)?;
        if names.is_empty() {
            return Ok(false);
        }
        let mark = match names.iter().any(|name| name == PULL_MARK) {
            true => read_small(&self.path.join(PULL_MARK), MAX_INDEX)?,
            false => Vec::new(),
        };
        let Ok(mark) = serde_json::from_slice::<Mark>(&mark) else {
            return Err(occupied("it is not empty, and no pull wrote it".into()));
        };
        let other = names.iter().find(|name| {
            let ours = *name == PULL_MARK || mark.files.contains(*name);
            !ours || self.path.join(name).is_dir()
        });
        match other {
            Some(other) => Err(occupied(format!("it has {other}, which no pull wrote"))),
            None => Ok(true),
        }
    }
}

/// Whether a file system is mounted at a directory.
#[cfg(target_os = "linux")]
fn is_mount(path: &Path) -> bool {
    use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};

    let mount = statx(CWD, path, AtFlags::empty(), StatxFlags::TYPE);
    mount.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Whether a file system is mounted at a directory: it is another than that of the directory above.
#[cfg(not(target_os = "linux"))]
fn is_mount(path: &Path) -> bool {
    let device = |path: &Path| rustix::fs::stat(path).map(|found| found.st_dev);
    matches!((device(path), device(&path.join(".."))), (Ok(own), Ok(above)) if own != above)
}

/// How the name of a directory goes on that is being written.
const UNFINISHED: &str = ".unfinished-";

/// A directory next to its place. It is removed unless it gets there.
struct Unfinished {
    path: PathBuf,
    /// Locked: so that others know that it is being written.
    _lock: Option<File>,
}

impl Unfinished {
    fn new(target: &Target) -> Result<Self> {
        let start = format!(".{}{UNFINISHED}", name_of(&target.path));
        let make = || -> io::Result<Self> {
            tidy(&target.above, &start)?;
            loop {
                let path = target.above.join(format!("{start}{}", unique()));
                DirBuilder::new().create(&path)?;
                // Not every file system has locks for directories. Nothing is then tidied up there.
                let lock = File::open(&path)
                    .ok()
                    .filter(|file| file.try_lock().is_ok());
                // Another process may have taken it for one that is left over.
                if path.is_dir() {
                    return Ok(Self { path, _lock: lock });
                }
            }
        };
        make().map_err(StoreError::file(
            "writing",
            target.path.display().to_string(),
        ))
    }

    /// Gives it its name. What had that name is removed.
    fn place(self, target: &Target) -> Result<()> {
        let failed = |error| StoreError::file("writing", target.path.display().to_string())(error);
        // Somebody may have put something there meanwhile.
        match target.is_replaceable()? {
            // The directory is exchanged, and the drop removes the older one.
            true => exchange(&self.path, &target.path),
            false => fs::rename(&self.path, &target.path),
        }
        .map_err(|error| match error.kind() {
            ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => StoreError::Occupied {
                path: target.path.display().to_string(),
                what: "another process has put something there".into(),
            },
            _ => failed(error),
        })?;
        let synced = File::open(&target.above).and_then(|above| above.sync_all());
        synced.map_err(failed)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Of no use to anybody. It is not there if it has its name.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Exchanges two directories.
fn exchange(new: &Path, old: &Path) -> io::Result<()> {
    match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            let mut aside = new.as_os_str().to_owned();
            aside.push("-old");
            fs::rename(old, &aside)?;
            fs::rename(new, old)?;
            fs::rename(&aside, new)
        }
        exchanged => Ok(exchanged?),
    }
}

/// Removes what processes left that were killed while they wrote.
fn tidy(above: &Path, start: &str) -> io::Result<()> {
    for entry in fs::read_dir(above)? {
        let entry = entry?;
        if name_of(&entry.path()).starts_with(start)
            && entry.file_type()?.is_dir()
            && let Ok(file) = File::open(entry.path())
            && file.try_lock().is_ok()
        {
            // Another process may have been faster.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}
