//! Files and directories where others may have put something.
//!
//! **Guarantee.** Nothing here waits for the writer of a FIFO or for a device, and what is named below
//! an [`OpenDir`] is never reached through a symbolic link, also if somebody changes the names meanwhile.

use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// Opens a file to read it. The path may lead through links: it is a user's own word.
///
/// # Errors
///
/// Those of the system; [`ErrorKind::InvalidData`] for what is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // An open without NONBLOCK waits for the writer of a FIFO. NOCTTY: no terminal becomes this
    // process's own.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = File::options();
    let file = options.read(true).custom_flags(flags.bits() as i32);
    regular(file.open(path)?)
}

/// What to say where the directory in which this process works was removed: relative paths lead nowhere
/// then. `None` if it is there.
pub fn lost_directory() -> Option<&'static str> {
    let here = std::env::current_dir();
    let is_lost = here.is_err_and(|error| error.kind() == ErrorKind::NotFound);
    is_lost.then_some(
        "this process's working directory was removed: give an absolute path, or change to another \
         directory",
    )
}

/// The path, for processes that work in other directories.
///
/// # Errors
///
/// For a relative path, if this process's working directory was removed; for an empty one.
pub fn absolute(path: &Path) -> io::Result<PathBuf> {
    std::path::absolute(path).map_err(|error| match lost_directory() {
        Some(lost) if error.kind() == ErrorKind::NotFound => {
            io::Error::new(ErrorKind::NotFound, lost)
        }
        _ => error,
    })
}

/// A directory. What is done below it is done in this directory, wherever its path leads by then.
#[derive(Debug)]
pub struct OpenDir(OwnedFd);

/// What is directly in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedEntry {
    /// Its name.
    pub name: OsString,
    /// Whether it is a directory. A link to one is none.
    pub is_dir: bool,
    /// Whether it is a regular file.
    pub is_file: bool,
}

/// A file or a directory, whatever its name is: its device and its number there.
pub type Inode = (u64, u64);

/// The permissions of a file that may be read by whom the process's umask allows.
pub const PLAIN: u32 = 0o666;

/// The permissions of a file that this user alone may read.
pub const PRIVATE: u32 = 0o600;

/// How many levels of directories are removed from one: each takes a descriptor. Those that `weightsync`
/// makes have three.
const DEEPEST: u32 = 32;

const DIR: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

impl OpenDir {
    /// Opens a directory. The path may lead through links: it is a user's own word.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn open(path: &Path) -> io::Result<Self> {
        let open = |flags| rustix::fs::openat(CWD, path, flags, Mode::empty());
        match open(DIR) {
            // A user may write in a directory and not list it.
            #[cfg(target_os = "linux")]
            // With such a descriptor names in the directory can be opened, and not listed.
            Err(Errno::ACCESS) => Ok(Self(open(DIR | OFlags::PATH)?)),
            opened => Ok(Self(opened?)),
        }
    }

    /// The same; a path that is itself a link is an error.
    ///
    /// # Errors
    ///
    /// Those of the system; [`ErrorKind::InvalidInput`] for a link.
    pub fn open_no_link(path: &Path) -> io::Result<Self> {
        Self::open_at(CWD, path.as_os_str())
    }

    /// Opens a directory in this one.
    ///
    /// # Errors
    ///
    /// Those of the system; [`ErrorKind::InvalidInput`] for a link.
    pub fn dir(&self, name: impl AsRef<OsStr>) -> io::Result<Self> {
        Self::open_at(&self.0, name.as_ref())
    }

    fn open_at(at: impl AsFd + Copy, name: &OsStr) -> io::Result<Self> {
        match rustix::fs::openat(at, name, DIR | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(dir) => Ok(Self(dir)),
            Err(errno @ (Errno::LOOP | Errno::NOTDIR)) => {
                // Systems have different words for a link here, so a second look tells.
                let stat = rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW);
                let kind = stat.map(|stat| FileType::from_raw_mode(stat.st_mode as _));
                Err(match kind {
                    Ok(FileType::Symlink) => is_link(),
                    _ => errno.into(),
                })
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// The same directory again.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    /// Makes a directory for this user alone in this one. One that is there is no error.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn make_dir(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        match rustix::fs::mkdirat(&self.0, name.as_ref(), Mode::RWXU) {
            // The name is durable before anything in the directory is relied on.
            Ok(()) => self.sync(),
            Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens a file in this directory to read it.
    ///
    /// # Errors
    ///
    /// Those of the system; [`ErrorKind::InvalidInput`] for a link, and [`ErrorKind::InvalidData`] for
    /// what else is not a regular file.
    pub fn file(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.open_file(name.as_ref(), OFlags::RDONLY, 0)
    }

    /// The same, to read and write it.
    ///
    /// # Errors
    ///
    /// As [`file`](Self::file).
    pub fn file_to_write(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.open_file(name.as_ref(), OFlags::RDWR, 0)
    }

    /// The same; a file is made if there is none.
    ///
    /// # Errors
    ///
    /// As [`file`](Self::file).
    pub fn file_or_new(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.open_file(name.as_ref(), OFlags::RDWR | OFlags::CREATE, PLAIN)
    }

    /// Makes a file in this directory.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::AlreadyExists`] if anything has that name; those of the system.
    pub fn new_file(&self, name: impl AsRef<OsStr>, mode: u32) -> io::Result<File> {
        let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        self.open_file(name.as_ref(), new, mode)
    }

    fn open_file(&self, name: &OsStr, flags: OFlags, mode: u32) -> io::Result<File> {
        // No link, no wait for a FIFO's writer, no terminal, and nothing for programs that are
        // started.
        let safe = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode as _);
        match rustix::fs::openat(&self.0, name, flags | safe, mode) {
            Ok(file) => regular(file.into()),
            Err(Errno::LOOP) => Err(is_link()),
            // A FIFO or a socket.
            Err(Errno::NXIO | Errno::OPNOTSUPP) => Err(not_regular()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// What is in this directory.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn entries(&self) -> io::Result<Vec<ListedEntry>> {
        let mut entries = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                // Not every file system tells it with the name.
                FileType::Unknown => match self.kind(name) {
                    Ok(kind) => kind,
                    // Removed since it was listed.
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                },
                kind => kind,
            };
            entries.push(ListedEntry {
                name: name.into(),
                is_dir: kind == FileType::Directory,
                is_file: kind == FileType::RegularFile,
            });
        }
        Ok(entries)
    }

    fn kind(&self, name: &OsStr) -> io::Result<FileType> {
        let stat = rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(FileType::from_raw_mode(stat.st_mode as _))
    }

    /// Which file or directory has this name; a link itself, if it is one.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn inode_of(&self, name: impl AsRef<OsStr>) -> io::Result<Inode> {
        let stat = rustix::fs::statat(&self.0, name.as_ref(), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((stat.st_dev as u64, stat.st_ino as u64))
    }

    /// Which directory this is.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn inode(&self) -> io::Result<Inode> {
        let stat = rustix::fs::fstat(&self.0)?;
        Ok((stat.st_dev as u64, stat.st_ino as u64))
    }

    /// Whether this directory belongs to this process's user.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn is_own(&self) -> io::Result<bool> {
        let stat = rustix::fs::fstat(&self.0)?;
        Ok(stat.st_uid == rustix::process::geteuid().as_raw())
    }

    /// Locks this directory until it is closed. False if another process has locked it.
    ///
    /// # Errors
    ///
    /// Those of the system; not every file system has locks for directories.
    pub fn try_lock(&self) -> io::Result<bool> {
        match rustix::fs::flock(&self.0, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The directory that this one is in.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn above(&self) -> io::Result<Self> {
        self.dir("..")
    }

    /// Gives a file or directory in this one another name here.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn rename(&self, old: impl AsRef<OsStr>, new: impl AsRef<OsStr>) -> io::Result<()> {
        rustix::fs::renameat(&self.0, old.as_ref(), &self.0, new.as_ref())?;
        Ok(())
    }

    /// Removes a file.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn remove_file(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        rustix::fs::unlinkat(&self.0, name.as_ref(), AtFlags::empty())?;
        Ok(())
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn remove_dir(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        rustix::fs::unlinkat(&self.0, name.as_ref(), AtFlags::REMOVEDIR)?;
        Ok(())
    }

    /// Removes a directory with everything in it. What another process removes meanwhile is no error.
    ///
    /// # Errors
    ///
    /// As [`remove_all`](Self::remove_all); [`ErrorKind::InvalidInput`] for a link.
    pub fn remove_tree(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        self.remove_levels(name.as_ref(), DEEPEST)
    }

    /// Removes everything in this directory. What another process removes meanwhile is no error.
    ///
    /// # Errors
    ///
    /// Those of the system; another one for directories that are far deeper than any that
    /// `weightsync` makes.
    pub fn remove_all(&self) -> io::Result<()> {
        self.empty_levels(DEEPEST)
    }

    fn remove_levels(&self, name: &OsStr, levels: u32) -> io::Result<()> {
        // By descriptor: a name that has become a link meanwhile is refused.
        self.dir(name)?.empty_levels(levels)?;
        self.remove_dir(name)
    }

    fn empty_levels(&self, levels: u32) -> io::Result<()> {
        for entry in self.entries()? {
            let removed = match entry.is_dir {
                true if levels == 0 => return Err(too_deep()),
                true => self.remove_levels(&entry.name, levels - 1),
                // Of a link the link itself.
                false => self.remove_file(&entry.name),
            };
            match removed {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes what was made, renamed and removed in this directory durable, where the file system can.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn sync(&self) -> io::Result<()> {
        match rustix::fs::fsync(&self.0) {
            // It syncs no directories, or this one cannot be listed.
            Err(Errno::INVAL | Errno::BADF) => Ok(()),
            synced => Ok(synced?),
        }
    }
}

/// A file next to its place, under a name of its own. Dropped before it is placed, it is removed.
#[derive(Debug)]
pub struct Unfinished {
    /// The file, to be written. Its lock tells others that this process lives.
    pub file: File,
    dir: OpenDir,
    here: String,
    place: OsString,
    is_placed: bool,
}

impl Unfinished {
    /// Makes it, locked, under a name that begins with `start`.
    ///
    /// # Errors
    ///
    /// Those of the system; [`ErrorKind::InvalidData`] if the place is, or leads to, what is not a
    /// regular file.
    pub fn new(
        dir: OpenDir,
        start: &str,
        place: impl Into<OsString>,
        mode: u32,
    ) -> io::Result<Self> {
        let place = place.into();
        // A rename would put a file into the place of `/dev/null`, or of the link `/dev/stdout`, for
        // every program of the machine. Before anything is written, which may be a whole model.
        if let Ok(stat) = rustix::fs::statat(&dir.0, &place, AtFlags::empty())
            && FileType::from_raw_mode(stat.st_mode as _) != FileType::RegularFile
        {
            return Err(not_regular());
        }
        loop {
            let here = format!("{start}{}", unique());
            let file = dir.new_file(&here, mode)?;
            // Where a file system has no locks, nothing is taken for left over.
            let is_locked = !matches!(file.try_lock(), Err(TryLockError::WouldBlock));
            // It may have been removed before it was locked.
            if is_locked && inode(&file) == dir.inode_of(&here).ok() {
                return Ok(Self {
                    file,
                    dir,
                    here,
                    place,
                    is_placed: false,
                });
            }
        }
    }

    /// Renames it into its place; `synced`, when it is on the disk.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn place(&mut self, synced: bool) -> io::Result<()> {
        // The bytes are on the disk before the name is: no crash leaves a name without them.
        if synced {
            self.file.sync_all()?;
        }
        self.dir.rename(&self.here, &self.place)?;
        self.is_placed = true;
        match synced {
            // The name, too.
            true => self.dir.sync(),
            false => Ok(()),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_placed {
            // What was written is of no use to anybody.
            let _ = self.dir.remove_file(&self.here);
        }
    }
}

/// Removes files of this user from a directory whose names are `start` and [`unique`], and that no living
/// process writes: what killed processes have left.
///
/// # Errors
///
/// Those of the system.
pub fn remove_unfinished(dir: &OpenDir, start: &str) -> io::Result<()> {
    for entry in dir.entries()? {
        let name = entry.name.to_str();
        let rest = name.and_then(|name| name.strip_prefix(start));
        // Only names of this form: everything else in the directory is the user's.
        if !entry.is_file || !rest.is_some_and(is_unique) {
            continue;
        }
        let own = rustix::process::geteuid().as_raw();
        // Left over is a file of this user that no living process has locked.
        let removed = dir.file(&entry.name).and_then(|file| {
            match file.metadata()?.uid() == own && file.try_lock().is_ok() {
                true => dir.remove_file(&entry.name),
                false => Ok(()),
            }
        });
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Writes a file, and gives it its name once all of it is written, or on the disk where it is to be
/// `durable`. A file that had the name is replaced; of a link, the link itself.
///
/// # Errors
///
/// Those of the system, and of `write`; [`ErrorKind::InvalidData`] if what has the name is, or leads
/// to, a directory, a device, a pipe or a socket.
pub fn replace(
    path: &Path,
    mode: u32,
    durable: bool,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = beside(path, mode)?;
    write(&mut file.file)?;
    file.place(durable)
}

/// Writes a file, and gives it its name once all of it is on the disk. Of several processes that do so
/// at once, one succeeds.
///
/// # Errors
///
/// [`ErrorKind::AlreadyExists`] if a file has that name, [`ErrorKind::InvalidData`] if it is, or leads
/// to, what is no regular file; those of the system, and of `write`.
pub fn create(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = beside(path, mode)?;
    write(&mut file.file)?;
    // A link to the finished file: unlike a rename it fails if the name is taken. The drop removes
    // the first name.
    file.file.sync_all()?;
    let (dir, flags) = (&file.dir.0, AtFlags::empty());
    rustix::fs::linkat(dir, &file.here, dir, &file.place, flags)?;
    file.dir.sync()
}

fn beside(path: &Path, mode: u32) -> io::Result<Unfinished> {
    let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    // Kept open: the file is renamed in this directory, wherever its path leads by then.
    let dir = OpenDir::open(above.unwrap_or(Path::new(".")))?;
    let start = format!(".{}.weightsync-", name.to_string_lossy());
    // It is of no use, and no reason to fail.
    let _ = remove_unfinished(&dir, &start);
    Unfinished::new(dir, &start, name, mode)
}

/// A name that no other file of this process, or of another one that lives, has.
pub fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let salt: [u8; 8] = crate::transport::random().unwrap_or_default();
    let (pid, salt) = (std::process::id(), u64::from_le_bytes(salt));
    format!("{pid}-{count}-{salt:016x}")
}

/// Whether [`unique`] makes such names.
pub fn is_unique(name: &str) -> bool {
    let parts: Vec<_> = name.split('-').collect();
    let [pid, count, salt] = parts[..] else {
        return false;
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    digits(pid) && digits(count) && is_hex(salt, 16)
}

/// Whether these are so many hexadecimal digits, lower case, as names have of random bytes.
pub fn is_hex(text: &str, digits: usize) -> bool {
    let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    text.len() == digits && text.bytes().all(is_digit)
}

/// Which file this is.
pub fn inode(file: &File) -> Option<Inode> {
    let about = file.metadata().ok()?;
    Some((about.dev(), about.ino()))
}

/// The error of a file system on which no file can be locked.
pub fn no_locks(error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("this file system has no locks, which are needed here: {error}"),
    )
}

fn regular(file: File) -> io::Result<File> {
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(not_regular()),
    }
}

fn not_regular() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "it is not a regular file")
}

fn too_deep() -> io::Error {
    io::Error::other(format!(
        "there are directories in it more than {DEEPEST} levels deep, which no program of weightsync \
         makes: remove them yourself"
    ))
}

fn is_link() -> io::Error {
    io::Error::new(
        ErrorKind::InvalidInput,
        "it is a symbolic link; put the file or directory itself there",
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn open_dir_reaches_nothing_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("thesis.tex"), "all of it").unwrap();
        symlink(outside.path(), dir.path().join("link")).unwrap();
        symlink(
            outside.path().join("thesis.tex"),
            dir.path().join("file-link"),
        )
        .unwrap();
        std::fs::create_dir_all(dir.path().join("own/below")).unwrap();
        symlink(outside.path(), dir.path().join("own/below/link")).unwrap();
        let open = OpenDir::open(dir.path()).unwrap();
        let refusals = [
            open.dir("link").map(drop),
            open.file("file-link").map(drop),
            open.file_or_new("file-link").map(drop),
            open.remove_tree("link"),
            OpenDir::open_no_link(&dir.path().join("link")).map(drop),
        ];
        for refused in refusals {
            let error = refused.unwrap_err();
            assert!(error.to_string().contains("symbolic link"), "{error}");
        }
        open.new_file("file-link", PLAIN).unwrap_err();
        // Of a link in a tree that goes, the link itself goes.
        open.remove_tree("own").unwrap();
        assert!(!dir.path().join("own").exists());
        let text = std::fs::read_to_string(outside.path().join("thesis.tex")).unwrap();
        assert_eq!(text, "all of it");
    }

    #[test]
    fn tree_that_is_far_too_deep_is_not_descended() {
        let dir = tempfile::tempdir().unwrap();
        let open = OpenDir::open(dir.path()).unwrap();
        let make = |levels| {
            let path: std::path::PathBuf = std::iter::repeat_n("level", levels).collect();
            std::fs::create_dir_all(dir.path().join(path)).unwrap();
        };
        make(DEEPEST as usize);
        open.remove_all().unwrap();
        make(1 + DEEPEST as usize);
        let error = open.remove_all().unwrap_err();
        assert!(error.to_string().contains("deep"), "{error}");
        open.dir("level").unwrap().remove_all().unwrap();
    }

    #[test]
    fn open_waits_for_no_writer() {
        let dir = tempfile::tempdir().unwrap();
        let open = OpenDir::open(dir.path()).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(dir.path().join("fifo"))
            .status();
        assert!(made.unwrap().success());
        let refusals = [
            open.file("fifo").map(drop),
            open.file_or_new("fifo").map(drop),
            super::open(&dir.path().join("fifo")).map(drop),
            open.file(".").map(drop),
        ];
        for refused in refusals {
            let error = refused.unwrap_err();
            assert!(error.to_string().contains("not a regular file"), "{error}");
        }
    }

    #[test]
    fn replace_puts_no_file_in_place_of_what_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let made = std::process::Command::new("mkfifo")
            .arg(at("fifo"))
            .status();
        assert!(made.unwrap().success());
        std::fs::create_dir(at("directory")).unwrap();
        symlink(at("fifo"), at("to-fifo")).unwrap();
        symlink(at("directory"), at("to-directory")).unwrap();
        // As `/dev/stdout` does.
        symlink("/dev/null", at("to-device")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let names = [
            "fifo",
            "directory",
            "to-fifo",
            "to-directory",
            "to-device",
            "socket",
        ];
        for name in names {
            let before = std::fs::symlink_metadata(at(name)).unwrap().file_type();
            let write = |_: &mut File| unreachable!("{name} is refused before that");
            let error = replace(&at(name), PLAIN, false, write).unwrap_err();
            assert!(error.to_string().contains("not a regular file"), "{error}");
            let after = std::fs::symlink_metadata(at(name)).unwrap().file_type();
            assert_eq!(before, after, "{name}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), names.len());
        // A link that leads nowhere is only a name.
        symlink(at("nothing"), at("to-nothing")).unwrap();
        replace(&at("to-nothing"), PLAIN, false, |_| Ok(())).unwrap();
        assert!(
            std::fs::symlink_metadata(at("to-nothing"))
                .unwrap()
                .is_file()
        );
    }

    #[test]
    fn open_dir_stays_where_it_was_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (own, moved) = (dir.path().join("own"), dir.path().join("moved"));
        std::fs::create_dir(&own).unwrap();
        let open = OpenDir::open(&own).unwrap();
        std::fs::rename(&own, &moved).unwrap();
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join("theirs"), "").unwrap();
        open.new_file("ours", PLAIN).unwrap();
        assert!(moved.join("ours").exists());
        open.remove_all().unwrap();
        assert!(own.join("theirs").exists() && !moved.join("ours").exists());
        assert_eq!(
            open.above().unwrap().inode_of("moved").unwrap(),
            open.inode().unwrap()
        );
        assert!(open.is_own().unwrap());
    }

    #[test]
    fn replace_leaves_the_file_of_one_of_its_callers_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        // What a killed process has left, and what only looks like it.
        let left = dir.path().join(format!(".weights.weightsync-{}", unique()));
        let other = dir.path().join(".weights.weightsync-notes");
        for file in [&left, &other] {
            std::fs::write(file, "").unwrap();
        }
        std::fs::write(outside.path().join("theirs"), "theirs").unwrap();
        symlink(outside.path().join("theirs"), &path).unwrap();
        std::thread::scope(|scope| {
            for text in ["a", "b", "c", "d"] {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let text = text.repeat(1 << 16);
                        let write = |file: &mut File| file.write_all(text.as_bytes());
                        replace(path, PRIVATE, false, write).unwrap();
                        let there = std::fs::read_to_string(path).unwrap();
                        let first = &there[..1];
                        assert_eq!(there, first.repeat(1 << 16));
                    }
                });
            }
        });
        let failing = replace(&path, PRIVATE, true, |_| Err(ErrorKind::StorageFull.into()));
        assert_eq!(failing.unwrap_err().kind(), ErrorKind::StorageFull);
        let mut names: Vec<_> = OpenDir::open(dir.path()).unwrap().entries().unwrap();
        names.sort_by_key(|entry| entry.name.clone());
        let names: Vec<_> = names
            .iter()
            .map(|entry| entry.name.to_str().unwrap())
            .collect();
        assert_eq!(names, [".weights.weightsync-notes", "weights"]);
        let theirs = std::fs::read_to_string(outside.path().join("theirs")).unwrap();
        assert_eq!(theirs, "theirs");
    }
}
