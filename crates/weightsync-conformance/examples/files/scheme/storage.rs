//! Files that are whole or not there, and ends that are alive or not.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use weightsync_engine::transport::interrupt;
use weightsync_engine::transport::polled::Life;
use weightsync_engine::{Error, Result};

use super::FilesError;

/// How often an end looks whether there is something new.
pub const PAUSE: Duration = Duration::from_millis(2);

/// How long a lock is tried again that somebody else may hold for a moment.
const PATIENCE: Duration = Duration::from_secs(1);

/// The most that is read of a file that is not weights, in bytes.
const MAX_BYTES: u64 = 256 << 20;

/// How many digits a checksum has.
const SEAL_BYTES: usize = 16;

/// What the names of places begin with.
const PREFIX: &str = "weightsync-files.";

/// The name of a place; every text makes another.
pub fn name(address: &str) -> String {
    let letters = address.bytes().map(|byte| match byte {
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte => format!("%{byte:02x}"),
    });
    PREFIX.to_owned() + &letters.collect::<String>()
}

/// Whether this is a place of this user, and no link: nothing else is ever removed. What an init info
/// says of it proves nothing.
fn is_own(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    let rest = name.and_then(|name| name.strip_prefix(PREFIX));
    // Endpoints have such addresses: 32 digits between two slashes, which are `%2f` here.
    let digits = rest.and_then(|rest| rest.strip_prefix("weightsync%2f")?.split_once("%2f"));
    let is_hex = |text: &str| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.is_some_and(|(digits, _)| is_hex(digits))
        && fs::symlink_metadata(dir)
            .is_ok_and(|about| about.is_dir() && about.uid() == rustix::process::geteuid().as_raw())
}

/// Puts a file in its place in one step, whole. `synced`, it is on the disk, or
/// at the server, before it has its name.
pub fn put(path: &Path, bytes: &[u8], synced: bool) -> Result<()> {
    let unfinished = path.with_extension("new");
    let put = || {
        let mut file = File::create(&unfinished)?;
        file.write_all(bytes)?;
        if synced {
            file.sync_all()?;
        }
        fs::rename(&unfinished, path)
    };
    put().map_err(failed("writing", path))
}

/// Reads a value that was put there; `None` if there is none.
pub fn value<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    Ok(opened(path)?.map(|opened| opened.0))
}

/// Reads a value that was [`sealed`] and put there; `None` if there is none.
pub fn sealed_value<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("reading", path)(error)),
    }
    let (seal, value) = bytes.split_at(bytes.len().min(SEAL_BYTES));
    let expected = seal_of(value);
    if seal != expected.as_bytes() {
        return Err(Error::from(FilesError::Damaged {
            file: path.display().to_string(),
            expected: format!("seal {expected}"),
            got: format!("seal {}", String::from_utf8_lossy(seal)),
        }));
    }
    let value = serde_json::from_slice(value);
    Ok(Some(
        value.map_err(|error| failed("reading", path)(error.into()))?,
    ))
}

/// The bytes of a value, behind a checksum of them.
pub fn sealed(value: &impl Serialize) -> Result<Vec<u8>> {
    let value = encoded(value)?;
    Ok([seal_of(&value).as_bytes(), &value].concat())
}

/// FNV-1a, in hexadecimal digits: any one byte that is another is noticed.
fn seal_of(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// The bytes of a value.
pub fn encoded(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| failed("writing", Path::new("JSON"))(error.into()))
}

/// An end's own file: locked as long as this lives. The kernel releases the
/// lock when the process dies, however that dies.
#[derive(Debug)]
pub struct Presence(File);

impl Presence {
    /// Puts the file in its place, already locked.
    pub fn announce(path: &Path, about: &impl Serialize) -> Result<Self> {
        let bytes = encoded(about)?;
        let unfinished = path.with_extension("new");
        let announce = || {
            let mut file = File::create(&unfinished)?;
            file.lock()?; // at once: nobody else knows the file yet
            file.write_all(&bytes)?;
            fs::rename(&unfinished, path)?;
            Ok(Self(file))
        };
        announce().map_err(failed("writing", path))
    }
}

impl Drop for Presence {
    /// Says, before the lock goes, that this is no death.
    fn drop(&mut self) {
        let _ = self.0.write_all(b"\n");
    }
}

/// The other end, by its file.
#[derive(Debug)]
pub struct Peer<T> {
    pub about: T,
    file: File,
    bytes: u64,
}

impl<T: DeserializeOwned> Peer<T> {
    /// `None` if nobody has announced itself there.
    pub fn at(path: &Path) -> Result<Option<Self>> {
        let opened = opened(path)?;
        Ok(opened.map(|(about, bytes, file)| Self { about, file, bytes }))
    }
}

impl<T> Peer<T> {
    /// Whether it lives: it, and not another that has taken its name since.
    pub fn life(&self) -> Life {
        if self.file.try_lock_shared().is_err() {
            return Life::Here;
        }
        match self.file.metadata() {
            Ok(file) if file.len() > self.bytes => Life::Left,
            _ => Life::Dead,
        }
    }
}

/// A place that this process is in. The last process to leave removes it.
#[derive(Debug)]
pub struct Stay {
    pub dir: PathBuf,
    /// A sender's alone.
    pub lock: Option<File>,
    pub presence: Option<Presence>,
}

impl Stay {
    /// Makes the place a sender's, and empties it of what a dead one left. Its
    /// workers may live on: they have what they read, and find its file unlocked.
    pub fn settle(dir: &Path) -> Result<Self> {
        let until = Instant::now() + PATIENCE;
        let lock = loop {
            let late = Instant::now() > until;
            // Somebody who sweeps may take it away at any moment.
            match make_dir(dir) {
                Err(error) if late && !dir.is_dir() => return Err(error),
                _ => {}
            }
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            match try_lock(dir, &options) {
                Ok(Some(lock)) => break lock,
                Ok(None) if late => return Err(FilesError::InUse(dir.display().to_string()).into()),
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::NotFound && !late => {}
                Err(error) => return Err(failed("locking", dir)(error)),
            }
            interrupt::sleep(PAUSE)?;
        };
        for old in entries(dir).iter().filter(|old| !old.ends_with("lock")) {
            let _ = fs::remove_dir_all(old).or_else(|_| fs::remove_file(old));
        }
        Ok(Self {
            dir: dir.into(),
            lock: Some(lock),
            presence: None,
        })
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.presence = None;
        self.lock = None;
        sweep(&self.dir);
    }
}

/// Removes the places in `root` that everybody has left, or died in; returns
/// those that could not be removed.
pub fn sweep_all(root: &Path) -> Vec<PathBuf> {
    let mut places = entries(root);
    places.retain(|place| is_own(place) && !sweep(place));
    places
}

/// Removes a place that everybody has left, or died in. False if nobody is there
/// and it could not be removed.
fn sweep(dir: &Path) -> bool {
    let until = Instant::now() + PATIENCE;
    loop {
        // Also: it is gone.
        if !is_own(dir) {
            return true;
        }
        if is_taken_away(dir) && (fs::remove_dir_all(dir).is_ok() || !dir.exists()) {
            return true;
        }
        let locked = try_lock(dir, File::options().write(true));
        let held = matches!(locked, Ok(None));
        let gone = match locked {
            Ok(Some(_lock)) => {
                let workers = entries(&dir.join("workers"));
                let lived_in = workers.iter().any(|worker| is_here(&worker.join("alive")));
                lived_in || remove(dir)
            }
            // Another sweeps, or a sender begins.
            Ok(None) => is_here(&dir.join("sender")),
            // Another is sweeping it, or one that had only begun left it empty.
            Err(_) => fs::remove_dir(dir).is_ok() || !dir.exists(),
        };
        if gone || Instant::now() > until {
            return gone || held;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Takes a place away whole, so that a sender which comes meanwhile makes its own
/// and none of that is removed.
fn remove(dir: &Path) -> bool {
    let mut going = dir.as_os_str().to_owned();
    going.push(format!(".{}", std::process::id()));
    fs::rename(dir, &going).is_ok() && fs::remove_dir_all(&going).is_ok()
}

/// Whether this is what [`remove`] has taken away: it may have been killed before
/// all of it was gone, its lock first.
fn is_taken_away(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    let name = name.and_then(|name| name.strip_prefix(PREFIX));
    name.is_some_and(|name| name.contains('.'))
}

/// Makes a directory that is this user's alone.
pub fn make_dir(dir: &Path) -> Result<()> {
    let made = DirBuilder::new().mode(0o700).create(dir);
    made.map_err(failed("making", dir))
}

/// What is in a directory; nothing if it is not there.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(dir).into_iter().flatten().flatten();
    read.map(|entry| entry.path()).collect()
}

pub fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File {
        action,
        path,
        source: source.into(),
    }
}

fn is_here(path: &Path) -> bool {
    let peer = Peer::<IgnoredAny>::at(path);
    matches!(peer, Ok(Some(peer)) if peer.life() == Life::Here)
}

/// The place's lock; `None` if somebody else has it.
fn try_lock(dir: &Path, options: &OpenOptions) -> io::Result<Option<File>> {
    let path = dir.join("lock");
    let file = options.open(&path)?;
    if file.try_lock().is_err() {
        return Ok(None);
    }
    // Somebody may have swept here since it was opened.
    let inode = |found: io::Result<fs::Metadata>| found.map_or(0, |found| found.ino());
    let same = inode(file.metadata()) == inode(fs::metadata(&path));
    Ok(same.then_some(file))
}

/// A value, how many bytes it takes, and its file.
fn opened<T: DeserializeOwned>(path: &Path) -> Result<Option<(T, u64, File)>> {
    let open = || -> io::Result<_> {
        let file = File::open(path)?;
        let mut bytes = Vec::new();
        (&file).take(MAX_BYTES).read_to_end(&mut bytes)?;
        let bytes = bytes.trim_ascii_end(); // without the sign of one that left
        let value = serde_json::from_slice(bytes)?;
        Ok((value, bytes.len() as u64, file))
    };
    match open() {
        Ok(opened) => Ok(Some(opened)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("reading", path)(error)),
    }
}
