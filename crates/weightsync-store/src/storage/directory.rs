//! A store in a directory.
//!
//! A file is written next to its place, synced, and renamed. One lock per store, held for moments,
//! makes replacing a file one step. A process that is alive holds a lock of its own, which the kernel
//! releases however the process ends. The directory may lie on a network file system that has locks.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::format::{LEASES, SPECS, VERSIONS};
use crate::scheme::{ENDS, WORKERS};

use weightsync_core::delta::Codec;
use weightsync_engine::Origin;
use weightsync_engine::transport::interrupt;

use super::{
    Blob, Life, MAX_SMALL, Peer, Presence, Storage, Upload, interrupted, look_for_interruption,
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

    /// The store's lock, until it is dropped. Makes the store's directory.
    fn lock(&self) -> io::Result<Locked> {
        let until = Instant::now() + PATIENCE;
        loop {
            make_dirs(&self.root)?;
            let path = self.path(LOCK);
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            match options.open(&path) {
                Ok(file) => match file.try_lock() {
                    // The store may have been removed since the file was opened.
                    Ok(()) if inode(file.metadata()) == inode(fs::metadata(&path)) => {
                        return Ok(Locked::new(file));
                    }
                    Ok(()) | Err(TryLockError::WouldBlock) => {}
                    Err(TryLockError::Error(error)) => return Err(no_locks(error)),
                },
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    let text = format!("{}: {error}", path.display());
                    return Err(io::Error::new(error.kind(), text));
                }
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

    /// Puts a whole file in its place.
    fn write_whole(&self, path: &str, bytes: &[u8], synced: bool) -> io::Result<()> {
        let mut file = Unfinished::new(self.path(path))?;
        file.file.write_all(bytes)?;
        file.place(synced)
    }
}

impl Storage for Directory {
    fn name(&self, path: &str) -> String {
        self.path(path).display().to_string()
    }

    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = found(File::open(self.path(path)))? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        file.take(MAX_SMALL + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > MAX_SMALL {
            true => Err(too_large()),
            false => Ok(Some(bytes)),
        }
    }

    fn swap(&self, path: &str, old: Option<&[u8]>, new: &[u8]) -> io::Result<bool> {
        // Written and synced before the lock is taken: others wait for it.
        let mut file = Unfinished::new(self.path(path))?;
        file.file.write_all(new)?;
        file.file.sync_all()?;
        let _lock = self.lock()?;
        if self.read(path)?.as_deref() != old {
            return Ok(false);
        }
        file.place(true)?;
        Ok(true)
    }

    fn put(&self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.write_whole(path, bytes, false)
    }

    fn upload(&self, path: &str) -> io::Result<Box<dyn Upload>> {
        Ok(Box::new(Uploading {
            unfinished: Unfinished::new(self.path(path))?,
            pending: 0,
            flusher: None,
        }))
    }

    fn open(&self, path: &str) -> io::Result<Option<Box<dyn Blob>>> {
        let Some(file) = found(File::open(self.path(path)))? else {
            return Ok(None);
        };
        let bytes = file.metadata()?.len();
        Ok(Some(Box::new(OpenFile { file, bytes })))
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let Some(entries) = found(fs::read_dir(self.path(dir)))? else {
            return Ok(Vec::new());
        };
        let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok()));
        let mut names: Vec<_> = names.collect::<io::Result<_>>()?;
        // A name that is not UTF-8 is nothing of ours; an unfinished file is not there.
        names.retain(|name| {
            name.as_ref()
                .is_some_and(|name| !name.starts_with(UNFINISHED))
        });
        Ok(names.into_iter().flatten().collect())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let path = self.path(path);
        let removed = match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => remove_dir(&path),
            Ok(_) => fs::remove_file(&path),
            Err(error) => Err(error),
        };
        found(removed).map(|_| ())
    }

    fn announce(&self, path: &str, about: &[u8]) -> io::Result<Box<dyn Presence>> {
        let _lock = self.lock()?;
        if let Some(peer) = self.peer(path)?
            && peer.life() == Life::Here
        {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let mut unfinished = Unfinished::new(self.path(path))?;
        unfinished.file.write_all(about)?;
        // The clone keeps the lock of the unfinished file.
        let file = unfinished.file.try_clone()?;
        unfinished.place(false)?;
        Ok(Box::new(Here(Locked::new(file))))
    }

    fn peer(&self, path: &str) -> io::Result<Option<Box<dyn Peer>>> {
        let Some(file) = found(File::open(self.path(path)))? else {
            return Ok(None);
        };
        let mut about = Vec::new();
        (&file).take(MAX_SMALL).read_to_end(&mut about)?;
        if about.last() == Some(&LEFT) {
            about.pop();
        }
        Ok(Some(Box::new(Other { about, file })))
    }

    fn tidy(&self) -> io::Result<()> {
        // What is unfinished among the weights goes with the whole directory of its version. What else
        // lies at the root of a disk is not the store's.
        tidy(&self.root, false)?;
        for dir in [VERSIONS, SPECS, LEASES, ENDS] {
            tidy(&self.path(dir), true)?;
        }
        // A worker that was killed in between has left a directory without a file. Nobody makes one
        // under the lock.
        let _lock = self.lock()?;
        for dir in self.list(WORKERS)? {
            // The others are not empty.
            let _ = fs::remove_dir(self.path(WORKERS).join(dir));
        }
        Ok(())
    }

    fn settle(&self, path: &str) -> io::Result<()> {
        let path = self.path(path);
        if let Some(file) = found(File::open(&path))? {
            file.sync_all()?;
        }
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

    fn vacate(&self, empty: &dyn Fn() -> bool) -> io::Result<bool> {
        if found(fs::metadata(&self.root))?.is_none() {
            return Ok(true);
        }
        let _lock = self.lock()?;
        if !empty() {
            return Ok(false);
        }
        // Renamed first: a process that comes meanwhile makes a directory of its own.
        let mut going = self.root.clone().into_os_string();
        going.push(format!(".removed-{}", unique()));
        fs::rename(&self.root, &going)?;
        fs::remove_dir_all(&going)?;
        Ok(true)
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

/// A file next to its place. Dropped before it is placed, it is removed.
struct Unfinished {
    file: File,
    here: PathBuf,
    place: PathBuf,
    placed: bool,
}

impl Unfinished {
    /// Makes it, locked: so that [`Directory::tidy`] leaves it alone.
    fn new(place: PathBuf) -> io::Result<Self> {
        let dir = place.parent().unwrap_or(&place);
        make_dirs(dir)?;
        loop {
            let here = dir.join(format!("{UNFINISHED}{}", unique()));
            let mut options = File::options();
            options.write(true).read(true).create_new(true);
            let file = options.open(&here)?;
            match file.try_lock() {
                Ok(()) if inode(file.metadata()) == inode(fs::metadata(&here)) => {
                    return Ok(Self {
                        file,
                        here,
                        place,
                        placed: false,
                    });
                }
                // It was removed before it was locked.
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => {
                    let _ = fs::remove_file(&here);
                    return Err(no_locks(error));
                }
            }
        }
    }

    /// Renames it into its place; `synced`, when it is on the disk.
    fn place(&mut self, synced: bool) -> io::Result<()> {
        if synced {
            self.file.sync_all()?;
        }
        fs::rename(&self.here, &self.place)?;
        self.placed = true;
        match self.place.parent() {
            Some(dir) if synced => sync_dir(dir),
            _ => Ok(()),
        }
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
        let thread = std::thread::Builder::new()
            .name("weightsync-flush".into())
            .spawn(move || woken.iter().try_for_each(|()| file.sync_data()))?;
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

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.placed {
            // What was written is of no use to anybody.
            let _ = fs::remove_file(&self.here);
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
struct Locked {
    file: File,
    owner: Origin,
}

impl Locked {
    fn new(file: File) -> Self {
        let owner = Origin::here();
        Self { file, owner }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.owner.is_here() {
            let _ = self.file.unlock();
        }
    }
}

#[derive(Debug)]
struct Here(Locked);

impl Presence for Here {}

impl Drop for Here {
    fn drop(&mut self) {
        // Before the lock is released: this is no death.
        if self.0.owner.is_here() {
            let _ = self.0.file.write_all(&[LEFT]);
        }
    }
}

#[derive(Debug)]
struct Other {
    about: Vec<u8>,
    file: File,
}

impl Peer for Other {
    fn about(&self) -> &[u8] {
        &self.about
    }

    fn life(&self) -> Life {
        match self.file.try_lock_shared() {
            Err(_) => return Life::Here,
            // Held for an instant; a second process that looks may see it.
            Ok(()) => drop(self.file.unlock()),
        }
        match self.file.metadata() {
            Ok(file) if file.len() > self.about.len() as u64 => Life::Left,
            _ => Life::Dead,
        }
    }
}

/// Removes a directory with everything in it, also while a writer that was replaced writes there: it
/// stops when it finds its directory gone.
fn remove_dir(path: &Path) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        match fs::remove_dir_all(path) {
            Err(error)
                if error.kind() == ErrorKind::DirectoryNotEmpty && Instant::now() < until => {}
            removed => return removed,
        }
    }
}

/// Removes unfinished files that no living process writes.
fn tidy(dir: &Path, below: bool) -> io::Result<()> {
    for entry in found(fs::read_dir(dir))?.into_iter().flatten() {
        let entry = entry?;
        let path = entry.path();
        if found(entry.file_type())?.is_some_and(|kind| kind.is_dir()) {
            if below {
                tidy(&path, below)?;
            }
        } else if entry.file_name().to_string_lossy().starts_with(UNFINISHED)
            && let Some(file) = found(File::open(&path))?
            && file.try_lock().is_ok()
        {
            found(fs::remove_file(&path))?;
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
        _ => above.map_or(Ok(()), sync_dir),
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// `None` for what is not there.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn inode(found: io::Result<fs::Metadata>) -> Option<(u64, u64)> {
    found.ok().map(|found| (found.dev(), found.ino()))
}

/// A name that no other file of this process, or of another one that lives, has.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let salt: [u8; 8] = weightsync_engine::transport::random().unwrap_or_default();
    format!(
        "{}-{count}-{:016x}",
        std::process::id(),
        u64::from_le_bytes(salt)
    )
}

fn too_large() -> io::Error {
    io::Error::new(
        ErrorKind::FileTooLarge,
        format!("it is longer than {MAX_SMALL} bytes"),
    )
}

fn no_locks(error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("this file system has no locks, which a store needs: {error}"),
    )
}
