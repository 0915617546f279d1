//! A store in a directory.
//!
//! A file is written next to its place, synced, and renamed. One lock per store, held for moments,
//! makes replacing a file one step. A process that is alive holds a lock of its own, which the kernel
//! releases however the process ends. The directory may lie on a network file system that has locks.
//!
//! The path of the store may lead through links. Below it nothing is reached through a link, and only
//! regular files are opened: others may be able to write there.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::format::{LEASES, SPECS, VERSIONS};
use crate::scheme::{ENDS, WORKERS, is_worker_dir};

use weightsync_core::delta::Codec;
use weightsync_engine::Origin;
use weightsync_engine::files::{
    Inode, OpenDir, PLAIN, Unfinished, inode, is_unique, no_locks, remove_unfinished, unique,
};
use weightsync_engine::transport::interrupt;
use weightsync_engine::transport::threads;

use super::{
    Blob, Life, MAX_SMALL, NO_NAME, OF_VERSIONS, Peer, Presence, REMOVED, Storage, Upload,
    interrupted, is_of_a_store, is_temporary, look_for_interruption, no_file_of_a_store,
};

/// How long a lock is tried that others hold for moments.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a try pauses.
const PAUSE: Duration = Duration::from_millis(1);

/// The file whose lock makes a change one step.
const LOCK: &str = "lock";

/// How the names of unfinished files begin.
const UNFINISHED: &str = ".unfinished-";

/// A store in a directory.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    root: PathBuf,
}

impl Directory {
    /// A store in this directory. Nothing is made before something is written.
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn path(&self, path: &str) -> PathBuf {
        match path.is_empty() {
            true => self.root.clone(),
            false => self.root.join(path),
        }
    }

    /// The directory of a file, and the file's name there. With `make` it is made.
    fn at<'a>(&self, path: &'a str, make: bool) -> io::Result<(OpenDir, &'a str)> {
        if make {
            make_dirs(&self.root)?;
        }
        let mut dir = OpenDir::open(&self.root)?;
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        // By descriptor, step by step: nothing below the root is reached through a link.
        for part in above.split('/').filter(|part| !part.is_empty()) {
            let opened = match dir.dir(part) {
                Err(error) if make && error.kind() == ErrorKind::NotFound => {
                    dir.make_dir(part)?;
                    dir.dir(part)
                }
                opened => opened,
            };
            dir = opened.map_err(|error| named(error, &self.root.join(above)))?;
        }
        Ok((dir, name))
    }

    /// A file to read; `None` if there is none.
    fn file(&self, path: &str) -> io::Result<Option<File>> {
        let Some((dir, name)) = found(self.at(path, false))? else {
            return Ok(None);
        };
        found(dir.file(name))
    }

    /// A directory; `None` if there is none.
    fn dir(&self, path: &str) -> io::Result<Option<OpenDir>> {
        let Some((dir, name)) = found(self.at(path, false))? else {
            return Ok(None);
        };
        match name.is_empty() {
            true => Ok(Some(dir)),
            false => found(dir.dir(name)),
        }
    }

    /// The store's lock, until it is dropped. Makes the store's directory.
    fn lock(&self) -> io::Result<LockedFile> {
        let root = || self.at(LOCK, true).map(|(dir, _)| Some(dir));
        let locked = self.lock_in(root)?;
        locked.ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// The lock in a directory that `root` opens; `None` once that says that there is none.
    fn lock_in(
        &self,
        root: impl Fn() -> io::Result<Option<OpenDir>>,
    ) -> io::Result<Option<LockedFile>> {
        let until = Instant::now() + PATIENCE;
        loop {
            // Opened again each time: the file may be another one by now.
            let opened = match root() {
                Ok(Some(dir)) => dir.file_or_new(LOCK),
                Ok(None) => return Ok(None),
                Err(error) => Err(error),
            };
            match opened {
                Ok(file) => match file.try_lock() {
                    // The store may have been removed since the file was opened.
                    Ok(()) if inode(&file) == self.inode(LOCK) => {
                        return Ok(Some(LockedFile::new(file)));
                    }
                    Ok(()) | Err(TryLockError::WouldBlock) => {}
                    Err(TryLockError::Error(error)) => return Err(no_locks(error)),
                },
                // The store was removed in between, and is made again.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(named(error, &self.path(LOCK))),
            }
            if Instant::now() > until {
                return Err(io::Error::new(
                    ErrorKind::TimedOut,
                    format!(
                        "another process held the lock of {} for {PATIENCE:?}; end it if it hangs",
                        self.root.display()
                    ),
                ));
            }
            interrupt::sleep(PAUSE).map_err(interrupted)?;
        }
    }

    /// Which file has this path now.
    fn inode(&self, path: &str) -> Option<Inode> {
        let (dir, name) = self.at(path, false).ok()?;
        dir.inode_of(name).ok()
    }

    /// Whether a temporary store of this user is here.
    fn temporary(&self) -> io::Result<Temporary> {
        // The name alone proves nothing. Without it nothing else is looked at.
        if !is_temporary(name_of(&self.root)) {
            return Ok(Temporary::Foreign(NO_NAME.into()));
        }
        let root = match OpenDir::open_no_link(&self.root) {
            Ok(root) => root,
            Err(error) => match error.kind() {
                ErrorKind::NotFound => return Ok(Temporary::Absent),
                // A link, a file, or a directory of somebody else.
                ErrorKind::InvalidInput
                | ErrorKind::NotADirectory
                | ErrorKind::PermissionDenied => return Ok(Temporary::Foreign(error.to_string())),
                _ => return Err(error),
            },
        };
        if !root.is_own()? {
            return Ok(Temporary::Foreign("it belongs to another user".into()));
        }
        Ok(match stranger(&root, "")? {
            Some(stranger) => Temporary::Mixed(no_file_of_a_store(stranger.display())),
            None => Temporary::Own(root),
        })
    }

    /// Removes a temporary store that is empty. [`ErrorKind::NotFound`] if part of it goes meanwhile.
    fn remove_if(&self, empty: &dyn Fn() -> bool) -> io::Result<bool> {
        let root = match self.temporary()? {
            Temporary::Absent => return Ok(true),
            Temporary::Own(root) => root,
            Temporary::Foreign(why) => {
                tracing::debug!("{} is not removed: {why}", self.root.display());
                return Ok(false);
            }
            Temporary::Mixed(why) => {
                tracing::warn!("{} is not removed: {why}", self.root.display());
                return Ok(false);
            }
        };
        let name = name_of(&self.root);
        // By descriptor and inode: the path may lead elsewhere by the time something is removed.
        let (above, own) = (root.above()?, root.inode()?);
        let is_there = || found(above.inode_of(name)).map(|there| there == Some(own));
        // What was being removed when its process was killed has no lock any more.
        let (going, _lock) = match name.contains(REMOVED) {
            true if is_there()? => (name.to_owned(), None),
            true => return Ok(true),
            false => {
                let lock = self.lock_in(|| match is_there()? {
                    true => root.try_clone().map(Some),
                    false => Ok(None),
                })?;
                // Another process has removed it meanwhile.
                let Some(lock) = lock else { return Ok(true) };
                if !empty() {
                    return Ok(false);
                }
                // Renamed first: a process that comes meanwhile makes a directory of its own.
                let going = format!("{name}{REMOVED}{}", unique());
                above.rename(name, &going)?;
                (going, Some(lock))
            }
        };
        // Somebody may have put another directory there in between, or a file into this one.
        if above.inode_of(&going)? != own || stranger(&root, "")?.is_some() {
            if going != name {
                above.rename(&going, name)?;
            }
            return Ok(false);
        }
        // Only now is anything removed.
        root.remove_all()?;
        above.remove_dir(&going).map(|()| true)
    }

    /// A file next to its place, to be written.
    fn unfinished(&self, path: &str) -> io::Result<Unfinished> {
        let (dir, name) = self.at(path, true)?;
        Unfinished::new(dir, UNFINISHED, name, PLAIN)
    }
}

impl Storage for Directory {
    fn name(&self, path: &str) -> String {
        self.path(path).display().to_string()
    }

    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.file(path)? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        // One byte more than allowed tells a file that is too long.
        file.take(MAX_SMALL + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > MAX_SMALL {
            true => Err(too_large()),
            false => Ok(Some(bytes)),
        }
    }

    fn swap(&self, path: &str, old: Option<&[u8]>, new: &[u8]) -> io::Result<bool> {
        // Written and synced before the lock is taken: others wait for it.
        let mut file = self.unfinished(path)?;
        file.file.write_all(new)?;
        file.file.sync_all()?;
        let _lock = self.lock()?;
        // Under the lock: of two processes that expect the same bytes, one finds them.
        if self.read(path)?.as_deref() != old {
            return Ok(false);
        }
        file.place(true)?;
        Ok(true)
    }

    fn put(&self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.unfinished(path)?;
        file.file.write_all(bytes)?;
        file.place(false)
    }

    fn upload(&self, path: &str) -> io::Result<Box<dyn Upload>> {
        Ok(Box::new(Uploading {
            unfinished: self.unfinished(path)?,
            pending: 0,
            flusher: None,
        }))
    }

    fn open(&self, path: &str) -> io::Result<Option<Box<dyn Blob>>> {
        let Some(file) = self.file(path)? else {
            return Ok(None);
        };
        let bytes = file.metadata()?.len();
        Ok(Some(Box::new(OpenFile { file, bytes })))
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let Some(dir) = self.dir(dir)? else {
            return Ok(Vec::new());
        };
        let entries = dir.entries()?.into_iter();
        // A name that is not UTF-8 is nothing of ours; an unfinished file is not there.
        let names = entries.filter_map(|entry| entry.name.into_string().ok());
        Ok(names.filter(|name| !name.starts_with(UNFINISHED)).collect())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let Some((dir, name)) = found(self.at(path, false))? else {
            return Ok(());
        };
        found(remove(&dir, name)).map(|_| ())
    }

    fn announce(&self, path: &str, about: &[u8]) -> io::Result<Box<dyn Presence>> {
        // Under the lock: of two processes that find nobody there, one announces itself.
        let _lock = self.lock()?;
        if let Some(peer) = self.peer(path)?
            && peer.life() == Life::Here
        {
            return Err(ErrorKind::AlreadyExists.into());
        }
        // Locked before it gets its name, so that nobody sees it without its lock.
        let mut unfinished = self.unfinished(path)?;
        unfinished.file.write_all(about)?;
        // The clone keeps the lock of the unfinished file.
        let file = unfinished.file.try_clone()?;
        unfinished.place(false)?;
        Ok(Box::new(DirectoryPresence(LockedFile::new(file))))
    }

    fn peer(&self, path: &str) -> io::Result<Option<Box<dyn Peer>>> {
        let Some(file) = self.file(path)? else {
            return Ok(None);
        };
        let mut about = Vec::new();
        (&file).take(MAX_SMALL).read_to_end(&mut about)?;
        // It left in order. Its announcement is what comes before this byte.
        if about.last() == Some(&LEFT) {
            about.pop();
        }
        Ok(Some(Box::new(DirectoryPeer { about, file })))
    }

    fn tidy(&self) -> io::Result<()> {
        // What is unfinished among the weights goes with the whole directory of its version. What else
        // lies at the root of a disk is not the store's.
        let Some(root) = self.dir("")? else {
            return Ok(());
        };
        tidy(&root, 0)?;
        // Each worker has a directory below ENDS.
        for (dir, levels) in [(VERSIONS, 0), (SPECS, 0), (LEASES, 0), (ENDS, 2)] {
            if let Some(dir) = found(root.dir(dir))? {
                tidy(&dir, levels)?;
            }
        }
        // A worker that was killed in between has left a directory without a file. Nobody makes one
        // under the lock.
        let _lock = self.lock()?;
        if let Some(workers) = self.dir(WORKERS)? {
            for entry in workers.entries()?.into_iter().filter(|entry| entry.is_dir) {
                if entry.name.to_str().is_some_and(is_worker_dir) {
                    // The others are not empty.
                    let _ = workers.remove_dir(entry.name);
                }
            }
        }
        Ok(())
    }

    fn settle(&self, path: &str) -> io::Result<()> {
        if let Some(file) = self.file(path)? {
            file.sync_all()?;
        }
        let path = self.path(path);
        // Directories above the store may have been made for it. On another device they were there.
        let device = |dir: &Path| fs::metadata(dir).ok().map(|dir| dir.dev());
        let own = device(&self.root);
        for dir in path.ancestors().skip(1) {
            if dir.starts_with(&self.root) {
                sync_dir(dir)?;
            } else if device(dir) == own {
                // Others' directories may be closed to this user.
                let _ = sync_dir(dir);
            } else {
                break;
            }
        }
        Ok(())
    }

    fn why_not_temporary(&self) -> io::Result<Option<String>> {
        Ok(match self.temporary()? {
            Temporary::Absent | Temporary::Own(_) => None,
            Temporary::Foreign(why) | Temporary::Mixed(why) => Some(why),
        })
    }

    fn clear_temporary(&self) -> io::Result<()> {
        match self.temporary()? {
            Temporary::Absent => Ok(()),
            Temporary::Own(root) => OF_VERSIONS
                .iter()
                .try_for_each(|left| found(remove(&root, left)).map(|_| ())),
            Temporary::Foreign(why) | Temporary::Mixed(why) => {
                Err(io::Error::new(ErrorKind::InvalidInput, why))
            }
        }
    }

    fn vacate(&self, empty: &dyn Fn() -> bool) -> io::Result<bool> {
        // What is missing midway was removed by another process that removes the same store.
        Ok(found(self.remove_if(empty))?.unwrap_or(true))
    }

    fn notices_death(&self) -> bool {
        true
    }

    fn codec(&self) -> Codec {
        Codec::Fast
    }

    fn pauses(&self) -> (Duration, Duration) {
        (Duration::from_millis(1), Duration::from_millis(20))
    }
}

/// A large file, which goes to the disk while the rest of it is written.
struct Uploading {
    unfinished: Unfinished,
    /// Bytes written since the disk was asked to take them.
    pending: usize,
    flusher: Option<Flusher>,
}

/// A thread that syncs a file each time it is told to.
struct Flusher {
    wake: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl Uploading {
    /// How many bytes make a sync worth it.
    const FLUSHED: usize = 64 << 20;

    /// Has what was written so far go to the disk.
    fn flush(&mut self) -> io::Result<()> {
        let flusher = match &mut self.flusher {
            Some(flusher) => flusher,
            none => none.insert(Flusher::start(self.unfinished.file.try_clone()?)?),
        };
        // If the thread is still busy, it is asked again after the next bytes.
        if flusher.wake.try_send(()).is_ok() {
            self.pending = 0;
        }
        Ok(())
    }
}

impl Flusher {
    fn start(file: File) -> io::Result<Self> {
        let (wake, woken) = mpsc::sync_channel(1);
        let thread = threads::spawn("flush", move || {
            woken.iter().try_for_each(|()| file.sync_data())
        })?;
        Ok(Self { wake, thread })
    }

    /// Ends the thread. Its error is the file's: the system tells each of them once.
    fn end(self) -> io::Result<()> {
        drop(self.wake);
        let panicked = |_| Err(io::Error::other("the thread that syncs the file panicked"));
        self.thread.join().unwrap_or_else(panicked)
    }
}

impl Upload for Uploading {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        look_for_interruption()?;
        self.unfinished.file.write_all(bytes)?;
        self.pending += bytes.len();
        match self.pending < Self::FLUSHED {
            true => Ok(()),
            false => self.flush(),
        }
    }

    fn finish(mut self: Box<Self>) -> io::Result<()> {
        // A failed sync must not make a whole file, and the system tells its error once.
        if let Some(flusher) = self.flusher.take() {
            flusher.end()?;
        }
        self.unfinished.place(true)
    }
}

impl Drop for Uploading {
    fn drop(&mut self) {
        if let Some(flusher) = self.flusher.take() {
            // The file is removed, whatever became of it.
            let _ = flusher.end();
        }
    }
}

struct OpenFile {
    file: File,
    bytes: u64,
}

impl Blob for OpenFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, place: &mut [u8]) -> io::Result<()> {
        look_for_interruption()?;
        self.file.read_exact_at(place, offset)
    }
}

/// The last byte of the file of a process that left in order.
const LEFT: u8 = b'\n';

/// A file whose lock this process holds. A forked child has the same open file, and with it the lock:
/// closing the file in one of the two would not release it, so its owner does, and only its owner.
#[derive(Debug)]
struct LockedFile {
    file: File,
    owner: Origin,
}

impl LockedFile {
    fn new(file: File) -> Self {
        let owner = Origin::here();
        Self { file, owner }
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // A forked child would release the parent's lock.
        if self.owner.is_here() {
            let _ = self.file.unlock();
        }
    }
}

#[derive(Debug)]
struct DirectoryPresence(LockedFile);

impl Presence for DirectoryPresence {}

impl Drop for DirectoryPresence {
    fn drop(&mut self) {
        // Before the lock is released: this is no death.
        if self.0.owner.is_here() {
            let _ = self.0.file.write_all(&[LEFT]);
        }
    }
}

#[derive(Debug)]
struct DirectoryPeer {
    about: Vec<u8>,
    file: File,
}

impl Peer for DirectoryPeer {
    fn about(&self) -> &[u8] {
        &self.about
    }

    fn life(&self) -> Life {
        match self.file.try_lock_shared() {
            // What cannot be asked counts as alive: its place is not taken.
            Err(_) => return Life::Here,
            // Held for an instant; a second process that looks may see it.
            Ok(()) => drop(self.file.unlock()),
        }
        // The byte that says so comes after what was read.
        match self.file.metadata() {
            Ok(file) if file.len() > self.about.len() as u64 => Life::Left,
            _ => Life::Dead,
        }
    }
}

/// Removes a file, or a directory with everything in it, also while a writer that was replaced writes
/// there: it stops when it finds its directory gone.
fn remove(above: &OpenDir, name: &str) -> io::Result<()> {
    let dir = match above.dir(name) {
        Err(error) if error.kind() == ErrorKind::NotADirectory => return above.remove_file(name),
        dir => dir?,
    };
    let until = Instant::now() + PATIENCE;
    // A writer that was replaced may put another file there between the two steps.
    loop {
        match dir.remove_all().and_then(|()| above.remove_dir(name)) {
            Err(error)
                if error.kind() == ErrorKind::DirectoryNotEmpty && Instant::now() < until => {}
            removed => return removed,
        }
    }
}

/// What is at the path of a temporary store.
enum Temporary {
    Absent,
    /// A temporary store of this user, whose files are all its own.
    Own(OpenDir),
    /// Something else, and why.
    Foreign(String),
    /// A store of this user with something that no store has.
    Mixed(String),
}

/// Something in the directory of a store that no store has.
fn stranger(dir: &OpenDir, path: &str) -> io::Result<Option<PathBuf>> {
    for entry in dir.entries()? {
        let below = entry.name.to_str().map(|name| match path.is_empty() {
            true => name.to_owned(),
            false => format!("{path}/{name}"),
        });
        let is_known = |below: &String| {
            let name = below.rsplit('/').next().unwrap_or(below);
            let is_passing = below == LOCK || name.strip_prefix(UNFINISHED).is_some_and(is_unique);
            entry.is_file && is_passing
                || (entry.is_dir || entry.is_file) && is_of_a_store(below, entry.is_dir)
        };
        match below.filter(is_known) {
            None => return Ok(Some(Path::new(path).join(&entry.name))),
            Some(below) if entry.is_dir => {
                if let Some(inner) = found(dir.dir(&entry.name))?
                    && let Some(stranger) = stranger(&inner, &below)?
                {
                    return Ok(Some(stranger));
                }
            }
            Some(_) => {}
        }
    }
    Ok(None)
}

/// Removes unfinished files that no living process writes, also from so many levels of directories below.
fn tidy(dir: &OpenDir, levels: u32) -> io::Result<()> {
    remove_unfinished(dir, UNFINISHED)?;
    if levels > 0 {
        for entry in dir.entries()?.into_iter().filter(|entry| entry.is_dir) {
            if let Some(inner) = found(dir.dir(&entry.name))? {
                tidy(&inner, levels - 1)?;
            }
        }
    }
    Ok(())
}

/// Makes a directory and those above it, this user's alone, each durable.
fn make_dirs(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let above = dir.parent().filter(|above| !above.as_os_str().is_empty());
    if let Some(above) = above {
        make_dirs(above)?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        // Its name is durable, too.
        _ => above.map_or(Ok(()), sync_dir),
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    OpenDir::open(dir)?.sync()
}

/// The last name of a path, if it is UTF-8.
fn name_of(path: &Path) -> &str {
    let name = path.file_name().and_then(|name| name.to_str());
    name.unwrap_or_default()
}

/// `None` for what is not there.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// An error with the path that it is about.
fn named(error: io::Error, path: &Path) -> io::Error {
    match error.kind() {
        ErrorKind::NotFound => error,
        kind => io::Error::new(kind, format!("{}: {error}", path.display())),
    }
}

fn too_large() -> io::Error {
    io::Error::new(
        ErrorKind::FileTooLarge,
        format!("it is longer than {MAX_SMALL} bytes"),
    )
}
