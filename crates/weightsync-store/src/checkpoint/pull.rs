//! Writing a version out as a checkpoint directory.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use weightsync_core::{Digest, ModelId, Version};
use weightsync_engine::files::{self, ListedEntry, OpenDir, is_unique, unique};

use super::{MAX_INDEX, is_plain_data, name_of};
use crate::anchor;
use crate::error::{Damage, Result, StoreError};
use crate::progress::Work;
use crate::storage::{Directory, Metered, Storage};
use crate::store::{LoadedModel, ModelVersion, Store, StoredModel, Which};
use crate::writer::SaveOptions;

/// The file by which a directory is known to be one that [`Store::pull`] wrote.
pub(super) const PULL_MARK: &str = "weightsync.json";

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
struct PullMark {
    store: String,
    model: ModelId,
    version: Version,
    digest: Digest,
    /// The files by name, and how they were written.
    files: BTreeMap<String, WrittenFile>,
}

/// A file as it was written: another one is of somebody else, whatever its name is.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct WrittenFile {
    bytes: u64,
    /// When it was changed last, in milliseconds since 1970. It is compared with itself alone.
    modified: u64,
}

impl WrittenFile {
    fn of(file: &File) -> io::Result<Self> {
        let about = file.metadata()?;
        let modified = about.modified()?.duration_since(UNIX_EPOCH);
        Ok(Self {
            bytes: about.len(),
            modified: modified.unwrap_or_default().as_millis() as u64,
        })
    }
}

/// Whether bytes say what a directory holds.
#[cfg(feature = "fuzz")]
pub(crate) fn is_mark(bytes: &[u8]) -> bool {
    serde_json::from_slice::<PullMark>(bytes).is_ok()
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
        self.pull_to(which, model, out, None)
    }

    /// The same for a version that was listed, where a program and not its user has chosen the directory.
    /// One is replaced only if it was pulled from this store and for this model, or has the same bytes: it
    /// may be the last copy of what another store had.
    ///
    /// # Errors
    ///
    /// As [`pull`](Self::pull).
    pub fn pull_again(
        &self,
        stored: &StoredModel,
        model: Option<&ModelId>,
        out: &Path,
    ) -> Result<Pulled> {
        let which = Which::Exactly(ModelVersion {
            model: model.cloned(),
            version: stored.version,
        });
        let origin = self.origin(&stored.model, Some(stored.digest));
        self.pull_to(&which, model, out, Some(origin))
    }

    /// Whether a pull of this store made a directory for this model. Others may have put something there
    /// since.
    pub fn has_pulled(&self, model: &ModelId, path: &Path) -> bool {
        let opened = OpenDir::open_no_link(path);
        let mark = opened.and_then(|dir| read_mark(&dir)).ok().flatten();
        mark.is_some_and(|mark| self.origin(model, None).is_of(&mark))
    }

    /// Removes a directory that a pull of this store wrote for this model.
    ///
    /// # Errors
    ///
    /// [`StoreError::Occupied`] if it has anything else; [`StoreError::File`].
    pub fn remove_pulled(&self, model: &ModelId, path: &Path) -> Result<()> {
        let origin = self.origin(model, None);
        let failed = || StoreError::file("removing", path.display().to_string());
        let dir = OpenDir::open_no_link(path).map_err(failed())?;
        check_written(&dir, path, Some(&origin))?;
        // Renamed first, and looked at again: somebody may write there, or exchange it.
        let name = name_of(path);
        let going = format!(".{name}{UNFINISHED}{}", unique());
        let above = dir.above().map_err(failed())?;
        above.rename(&name, &going).map_err(failed())?;
        let is_it = || Ok(above.inode_of(&going)? == dir.inode()?);
        match is_it().map_err(failed())? && check_written(&dir, path, Some(&origin)).is_ok() {
            true => {
                dir.remove_all().map_err(failed())?;
                above.remove_dir(&going).map_err(failed())
            }
            false => {
                above.rename(&going, &name).map_err(failed())?;
                Err(StoreError::Occupied {
                    path: path.display().to_string(),
                    what: "another process has put something there".into(),
                })
            }
        }
    }

    fn origin(&self, model: &ModelId, digest: Option<Digest>) -> PullOrigin {
        PullOrigin {
            store: self.name(),
            model: model.clone(),
            digest,
        }
    }

    fn pull_to(
        &self,
        which: &Which,
        model: Option<&ModelId>,
        out: &Path,
        origin: Option<PullOrigin>,
    ) -> Result<Pulled> {
        // Before anything large is read.
        let target = TargetDirectory::new(out, origin)?;
        let (loaded, mut files) = self.load_with_files(which, model)?;
        let LoadedModel {
            snapshot,
            sequence,
            damage,
        } = loaded;
        let digest = snapshot.published_digest();
        let digest = digest.unwrap_or_else(|| snapshot.digest());
        // A store may have files that this program would not have put there.
        files.retain(|(name, _)| {
            let is_left_out = !is_plain_data(name);
            if is_left_out {
                let store = self.name();
                tracing::warn!(
                    "{store} has a file named {name:?}, which is not written: a program may run it, or \
                     take it for an option; Store::files reads it"
                );
            }
            !is_left_out && name != PULL_MARK
        });
        // Written next to its place, so that nobody sees half a checkpoint under its name.
        let unfinished = UnfinishedDirectory::new(&target, self.mode())?;
        let mut storage: Arc<dyn Storage> = Arc::new(Directory::new(&unfinished.path));
        if let Some(progress) = self.progress() {
            storage = Arc::new(Metered::new(storage, progress));
        }
        let bytes = snapshot.layout().payload_bytes();
        self.begins(Work::Writes, bytes)?;
        let budget = SaveOptions::default().shard_bytes;
        let written = anchor::write(&*storage, "", &snapshot, &files, budget)?;
        let mark = PullMark {
            store: self.name(),
            model: snapshot.model().clone(),
            version: snapshot.version(),
            digest,
            files: unfinished.files(written.into_iter().map(|file| file.name))?,
        };
        let text = serde_json::to_vec_pretty(&mark);
        let text = text.unwrap_or_else(|error| unreachable!("plain values become JSON: {error}"));
        // A later pull may replace only what this mark lists, as it is now.
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

impl Store {
    /// The permissions of what is read from this store: others read no more than they can here. The
    /// process's umask is applied, too.
    fn mode(&self) -> u32 {
        match fs::metadata(self.name()) {
            // The files have to be written.
            Ok(about) => about.permissions().mode() & 0o777 | 0o700,
            // A store that is no directory has keys, and no permissions.
            Err(error) if error.kind() == ErrorKind::NotFound => 0o777,
            Err(_) => 0o700,
        }
    }
}

/// From where a directory has to have been pulled for this program to replace or remove it.
struct PullOrigin {
    store: String,
    model: ModelId,
    /// A directory of any origin with this digest may be replaced: it has the same bytes.
    digest: Option<Digest>,
}

impl PullOrigin {
    fn is_of(&self, mark: &PullMark) -> bool {
        (&self.store, &self.model) == (&mark.store, &mark.model) || self.digest == Some(mark.digest)
    }
}

/// Where a directory is to be.
struct TargetDirectory {
    path: PathBuf,
    /// The directory it is in.
    above: PathBuf,
    /// The origin of what is replaced there; `None`: any.
    origin: Option<PullOrigin>,
}

impl TargetDirectory {
    fn new(out: &Path, origin: Option<PullOrigin>) -> Result<Self> {
        let failed = || StoreError::file("writing", out.display().to_string());
        // One behind a link is replaced where it is, and not the link.
        let path = match fs::canonicalize(out) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let out = files::absolute(out).map_err(failed())?;
                let above = out.parent().unwrap_or(&out);
                fs::create_dir_all(above).map_err(failed())?;
                let name = out.file_name().unwrap_or_default();
                fs::canonicalize(above).map(|above| above.join(name))
            }
            found => found,
        };
        let path = path.map_err(failed())?;
        let above = path.parent().unwrap_or(&path).to_owned();
        let target = Self {
            path,
            above,
            origin,
        };
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
        // A mounted file system cannot be renamed away.
        if is_mount(&self.path) {
            return Err(occupied("a file system is mounted there".into()));
        }
        let opened = OpenDir::open_no_link(&self.path);
        let dir = opened.map_err(StoreError::file("opening", self.path.display().to_string()))?;
        check_written(&dir, &self.path, self.origin.as_ref())
    }
}

/// Whether a directory of this user has what [`Store::pull`] wrote, and nothing else; false if it is empty.
/// `named` is how errors name it. With an origin, it has to be of that.
fn check_written(dir: &OpenDir, named: &Path, origin: Option<&PullOrigin>) -> Result<bool> {
    let occupied = |what: String| StoreError::Occupied {
        path: named.display().to_string(),
        what,
    };
    let failed = || StoreError::file("reading", named.display().to_string());
    let entries = dir.entries().map_err(failed())?;
    if entries.is_empty() {
        return Ok(false);
    }
    if !dir.is_own().map_err(failed())? {
        return Err(occupied("it belongs to another user".into()));
    }
    let Some(mark) = read_mark(dir).map_err(failed())? else {
        return Err(occupied("it is not empty, and no pull wrote it".into()));
    };
    if origin.is_some_and(|origin| !origin.is_of(&mark)) {
        let (model, version, store) = (&mark.model, mark.version, &mark.store);
        let what = format!("it has {model} {version} of the store {store}, which is another one");
        return Err(occupied(what));
    }
    let is_ours = |entry: &&ListedEntry| {
        let name = entry.name.to_str();
        let known = |name: &str| name == PULL_MARK || mark.files.contains_key(name);
        entry.is_file && name.is_some_and(known)
    };
    if let Some(other) = entries.iter().find(|entry| !is_ours(entry)) {
        let other = other.name.to_string_lossy();
        return Err(occupied(format!("it has {other}, which no pull wrote")));
    }
    for (name, written) in &mark.files {
        let found = match dir.file(name) {
            // Removed since.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            file => file.and_then(|file| WrittenFile::of(&file)),
        };
        // Weights that a user has saved there have the same name.
        if found.map_err(failed())? != *written {
            let what = format!("it has {name}, which was changed since it was pulled");
            return Err(occupied(what));
        }
    }
    Ok(true)
}

/// What a directory says that it holds; `None` if it says nothing.
fn read_mark(dir: &OpenDir) -> io::Result<Option<PullMark>> {
    let mut mark = Vec::new();
    match dir.file(PULL_MARK) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?.take(MAX_INDEX).read_to_end(&mut mark)?,
    };
    Ok(serde_json::from_slice(&mark).ok())
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
struct UnfinishedDirectory {
    above: OpenDir,
    name: String,
    path: PathBuf,
    /// Locked: so that others know that it is being written.
    _lock: Option<File>,
    /// Whether the drop leaves it.
    is_kept: bool,
}

impl UnfinishedDirectory {
    fn new(target: &TargetDirectory, mode: u32) -> Result<Self> {
        let start = format!(".{}{UNFINISHED}", name_of(&target.path));
        let make = || -> io::Result<Self> {
            let above = OpenDir::open(&target.above)?;
            // What a pull that was killed has left.
            tidy(&above, &start)?;
            loop {
                let name = format!("{start}{}", unique());
                let path = target.above.join(&name);
                DirBuilder::new().mode(mode).create(&path)?;
                // Not every file system has locks for directories. Nothing is then tidied up there.
                let lock = File::open(&path)
                    .ok()
                    .filter(|file| file.try_lock().is_ok());
                // Another process may have taken it for one that is left over.
                if path.is_dir() {
                    return Ok(Self {
                        above,
                        name,
                        path,
                        _lock: lock,
                        is_kept: false,
                    });
                }
            }
        };
        make().map_err(StoreError::file(
            "writing",
            target.path.display().to_string(),
        ))
    }

    /// How these files of it were written.
    fn files(&self, names: impl Iterator<Item = String>) -> Result<BTreeMap<String, WrittenFile>> {
        let failed = || StoreError::file("reading", self.path.display().to_string());
        let dir = OpenDir::open_no_link(&self.path).map_err(failed())?;
        let files = names.map(|name| {
            let file = dir.file(&name).and_then(|file| WrittenFile::of(&file));
            Ok((name, file.map_err(failed())?))
        });
        files.collect()
    }

    /// Gives it its name. What had that name is removed.
    fn place(mut self, target: &TargetDirectory) -> Result<()> {
        let failed = |error| StoreError::file("writing", target.path.display().to_string())(error);
        // Somebody may have put something there meanwhile.
        match target.is_replaceable()? {
            // The directory is exchanged, and the drop removes the older one.
            // In one step where the system has it: `out` always leads to a whole checkpoint.
            true => exchange(&self.path, &target.path).and_then(|()| {
                let older = OpenDir::open_no_link(&self.path)?;
                let Err(error) = check_written(&older, &target.path, target.origin.as_ref()) else {
                    return Ok(());
                };
                // It is another one than was looked at. Nothing of it is removed, whatever becomes of it.
                self.is_kept = true;
                exchange(&self.path, &target.path).map_err(|failed| {
                    let what = format!("{error}; it is at {} now: {failed}", self.path.display());
                    io::Error::new(failed.kind(), what)
                })?;
                self.is_kept = false;
                Err(io::Error::new(ErrorKind::AlreadyExists, error))
            }),
            false => fs::rename(&self.path, &target.path),
        }
        .map_err(|error| match error.kind() {
            ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => StoreError::Occupied {
                path: target.path.display().to_string(),
                what: "another process has put something there".into(),
            },
            _ => failed(error),
        })?;
        // The new name is on the disk before the caller is told.
        let synced = File::open(&target.above).and_then(|above| above.sync_all());
        synced.map_err(failed)
    }
}

impl Drop for UnfinishedDirectory {
    fn drop(&mut self) {
        if !self.is_kept {
            // Of no use to anybody. It is not there if it has its name.
            let _ = self.above.remove_tree(&self.name);
        }
    }
}

/// Exchanges two directories.
fn exchange(new: &Path, old: &Path) -> io::Result<()> {
    match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => exchange_by_renaming(new, old),
        exchanged => Ok(exchanged?),
    }
}

/// As [`exchange`], where the system has no such call: for a moment nothing has the name.
fn exchange_by_renaming(new: &Path, old: &Path) -> io::Result<()> {
    let mut aside = new.as_os_str().to_owned();
    // No name that `tidy` removes: if this process is killed now, this is the only checkpoint.
    aside.push("-old");
    let aside = PathBuf::from(aside);
    fs::rename(old, &aside)?;
    let kept = |error: io::Error| {
        let aside = aside.display();
        let text = format!("{error}; what was at {} is now at {aside}", old.display());
        // Without the kind, by which callers say something else.
        io::Error::other(text)
    };
    if let Err(error) = fs::rename(new, old) {
        return Err(match fs::rename(&aside, old) {
            Ok(()) => error,
            Err(_) => kept(error),
        });
    }
    fs::rename(&aside, new).map_err(kept)
}

/// Removes what processes left that were killed while they wrote.
fn tidy(above: &OpenDir, start: &str) -> io::Result<()> {
    for entry in above.entries()? {
        let name = entry.name.to_str();
        let rest = name.and_then(|name| name.strip_prefix(start));
        if rest.is_some_and(is_unique)
            && let Ok(dir) = above.dir(&entry.name)
            && dir.is_own().unwrap_or(false)
            && dir.try_lock().unwrap_or(false)
        {
            // Another process may have been faster.
            let _ = above.remove_tree(&entry.name);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchange_by_renaming_puts_back_what_it_cannot_exchange() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join("new"), dir.path().join("old"));
        fs::create_dir_all(old.join("checkpoint")).unwrap();
        exchange_by_renaming(&new, &old).unwrap_err();
        assert!(old.join("checkpoint").is_dir());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::create_dir(&new).unwrap();
        exchange_by_renaming(&new, &old).unwrap();
        assert!(new.join("checkpoint").is_dir());
        assert_eq!(fs::read_dir(&old).unwrap().count(), 0);
    }
}
