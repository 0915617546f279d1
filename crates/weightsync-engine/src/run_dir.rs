//! Which run this is, and where its senders are found.
//!
//! Without a run directory a run lives and dies with its process. With one, a
//! restarted trainer takes the next epoch from a counter file, and comes back with
//! the same secret once its predecessor is gone; workers that have seen it refuse
//! every earlier epoch. Its address is a new one each time, told in a file of the
//! directory, where workers look it up: a child that a dead trainer had forked may
//! keep the old one. The directory is this user's alone: a user who can write to it,
//! or read its key, can take the run over.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use weightsync_core::{Epoch, ModelId, Remedy, Run, SenderStatus};
use weightsync_mem::{Listener, ask_status, interrupt, is_served};

use crate::error::{Error, Result};
use crate::files;
use crate::transport::{Endpoint, deadline, random};

/// The most that is read of the epoch file, in bytes.
const MAX_EPOCH_FILE: u64 = 64;

/// How the name of a file with an address begins.
const ADDRESS: &str = "address-";

/// The most that is read of a file with an address, in bytes.
const MAX_ADDRESS_FILE: u64 = 128;

/// How long the key's lock is waited for. It is held for a read or a write of
/// 32 bytes, or for as long as it takes to listen and to say where.
const KEY_WAIT: Duration = Duration::from_secs(10);

/// The time between two attempts at a lock. There is no wait for one that ends.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// A place that no other process can know or reuse.
pub(crate) fn anonymous(models: &[ModelId]) -> Result<Endpoint> {
    Endpoint::new(
        address(&random::<16>()?, &set_name(models)),
        random()?,
        false,
    )
}

/// The place a run directory gives a set of models: the same in every process.
pub(crate) fn at(dir: &Path, models: &[ModelId]) -> Result<Endpoint> {
    let dir = &files::absolute(dir).map_err(failed("finding", dir))?;
    let key = shared_bytes(dir)?;
    let [name, secret] = *key.as_chunks::<16>().0 else {
        unreachable!("32 bytes are two times 16")
    };
    let set = set_name(models);
    let lookup = dir.join(format!("{ADDRESS}{:016x}", hash(&set)));
    Endpoint::new(address(&name, &set), secret, true)?.looked_up_in(lookup)
}

/// Listens at an address that no sender of a run directory had before, and says so
/// in `file`.
///
/// **Guarantee.** Of the trainers that come to one file, in any process, one at a
/// time listens: while it lives, the others are refused. What tells that it lives
/// is asked of the kernel by its socket, so it ends with the process itself, and
/// not with the children it forked.
///
/// # Errors
///
/// [`Error::AddressInUse`], [`Error::File`], [`Error::FileLocked`].
pub(crate) fn listen(file: &Path, models: &[ModelId]) -> Result<Listener> {
    let Some(dir) = file.parent() else {
        return Err(refused(file, "it is in no directory".into()));
    };
    // Held from the look at the one before until the new address is there.
    let _alone = locked(dir, KEY, Instant::now().checked_add(KEY_WAIT))?;
    // The kernel is asked whether that process lives. The file alone would outlive it.
    if let Some(address) = look_up(file)?
        && is_served(&address)?
    {
        return Err(Error::AddressInUse { address });
    }
    let address = address(&random::<16>()?, &set_name(models));
    // Listening comes before the file: a worker that looks the address up finds the sender.
    let listener = Listener::at(&address)?;
    let text = format!("{address}\n");
    let write = |file: &mut File| file.write_all(text.as_bytes());
    // Not synced: after a crash of the machine no sender is there.
    files::replace(file, files::PRIVATE, false, write).map_err(failed("writing", file))?;
    Ok(listener)
}

/// The address a sender has told in this file last, whether or not it is there
/// still.
///
/// # Errors
///
/// [`Error::File`] for a file that others could have written.
pub(crate) fn look_up(file: &Path) -> Result<Option<String>> {
    // No link leads to another file, and no FIFO makes the open wait.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = match openat(CWD, file, flags, Mode::empty()) {
        Ok(opened) => opened,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(not_opened(file, errno)),
    };
    check_owner(
        &opened,
        file,
        FileType::RegularFile,
        WRITABLE_BY_OTHERS,
        "600",
    )?;
    let mut text = Vec::new();
    let mut bounded = File::from(opened).take(MAX_ADDRESS_FILE);
    bounded
        .read_to_end(&mut text)
        .map_err(failed("reading", file))?;
    // A file without an address is none of ours; the next sender replaces it.
    let text = String::from_utf8(text).unwrap_or_default();
    let address = text.trim_end();
    // The file is not trusted further than this: the address is a name of weightsync's own.
    let fits = address.starts_with("weightsync/") && address.len() <= MAX_NAME;
    Ok(fits.then(|| address.into()))
}

/// The status of each living sender of a run directory.
///
/// # Errors
///
/// [`Error::NoSender`] if there is none; [`Error::File`] for a file that others could have written.
pub fn status_of_run_dir(dir: &Path, timeout: Duration) -> Result<Vec<SenderStatus>> {
    let entries = std::fs::read_dir(dir).map_err(failed("listing", dir))?;
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed("listing", dir))?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(ADDRESS)) {
            files.push(entry.path());
        }
    }
    files.sort();
    let mut all = Vec::new();
    for file in files {
        if let Some(address) = look_up(&file)?
            && let Some(status) = status_at(&address, timeout)?
        {
            all.push(status);
        }
    }
    match all.is_empty() {
        false => Ok(all),
        true => Err(Error::NoSender {
            address: dir.display().to_string(),
            waited: Duration::ZERO,
            last: Some(
                "no sender that lives has told its address in this directory; is it a run directory \
                 of a scheme in shared memory?"
                    .into(),
            ),
        }),
    }
}

/// The status of the sender at an address of shared memory; `None` if no sender is there.
///
/// # Errors
///
/// Those of [`ask_status`].
pub(crate) fn status_at(address: &str, timeout: Duration) -> Result<Option<SenderStatus>> {
    let Some(text) = ask_status(address, deadline(Some(timeout)))? else {
        return Ok(None);
    };
    let status = serde_json::from_slice(&text);
    status.map(Some).map_err(|error| Error::Transport {
        source: format!("the status of {address} cannot be read: {error}").into(),
        remedy: Remedy::GiveUp,
    })
}

/// Why there is no sender now where one has told its address in this file; `None` while it is there,
/// or if none was.
///
/// # Errors
///
/// As [`look_up`].
pub(crate) fn ended(file: &Path) -> Result<Option<String>> {
    let ended = match look_up(file)? {
        Some(address) => !is_served(&address)?,
        None => false,
    };
    let words = "nothing listens any more at the address that the last sender has told, so that \
                 sender has ended";
    Ok(ended.then(|| words.into()))
}

/// A name for a set: that of its only model, or all of them.
fn set_name(models: &[ModelId]) -> String {
    let names: Vec<_> = models.iter().map(ModelId::as_str).collect();
    names.join("+")
}

/// A run of the first epoch, with an id of its own.
pub(crate) fn anonymous_run() -> Result<Run> {
    Ok(Run {
        epoch: Epoch(1),
        id: random()?,
    })
}

/// The next run of a run directory: one epoch above every earlier one. Epochs
/// only grow: one that is then not used leaves a gap, which means nothing.
pub(crate) fn next_run(dir: &Path, until: Option<Instant>) -> Result<Run> {
    let path = dir.join(EPOCH.name);
    let LockedRunFile(file) = &mut locked(dir, EPOCH, until)?;
    // Bounded: a wrong file must not fill the memory.
    let mut text = String::new();
    Read::by_ref(file)
        .take(MAX_EPOCH_FILE)
        .read_to_string(&mut text)
        .map_err(failed("reading", &path))?;
    let last: u64 = match text.trim() {
        // A new file: no run was there before.
        "" => 0,
        number => number.parse().map_err(|_| Error::File {
            action: "reading the epoch in",
            path: path.clone(),
            source: format!("{number:?} is not a number; put the highest epoch used so far there")
                .into(),
        })?,
    };
    let epoch = last.checked_add(1).ok_or_else(|| Error::File {
        action: "advancing the epoch in",
        path: path.clone(),
        source: "no epoch is left".into(),
    })?;
    // Longer or equal text over shorter: a crash in between leaves a number
    // that is not lower. Only a person's own text may have been longer.
    let text = format!("{epoch}\n");
    file.seek(SeekFrom::Start(0))
        .map_err(failed("writing", &path))?;
    file.write_all(text.as_bytes())
        .map_err(failed("writing", &path))?;
    file.set_len(text.len() as u64)
        .map_err(failed("writing", &path))?;
    // On the disk before the epoch is used: no later run may get it again.
    file.sync_all().map_err(failed("writing", &path))?;
    Ok(Run {
        epoch: Epoch(epoch),
        id: random()?,
    })
}

/// 32 random bytes that every process of the run directory shares.
fn shared_bytes(dir: &Path) -> Result<[u8; 32]> {
    let path = dir.join(KEY.name);
    let LockedRunFile(file) = &mut locked(dir, KEY, Instant::now().checked_add(KEY_WAIT))?;
    let mut bytes = Vec::new();
    Read::by_ref(file)
        .take(33)
        .read_to_end(&mut bytes)
        .map_err(failed("reading", &path))?;
    if let Ok(bytes) = <[u8; 32]>::try_from(&bytes[..]) {
        return Ok(bytes);
    }
    // A new key would lock out the workers of a trainer that still runs.
    if !bytes.is_empty() {
        return Err(Error::File {
            action: "reading the key in",
            path,
            source: "it is not 32 bytes long; remove it while no trainer runs".into(),
        });
    }
    // The first process of the directory makes the key, under its lock. All others read it.
    let fresh: [u8; 32] = random()?;
    file.write_all(&fresh).map_err(failed("writing", &path))?;
    file.sync_all().map_err(failed("writing", &path))?;
    Ok(fresh)
}

/// A file of the run directory.
#[derive(Clone, Copy)]
struct RunFile {
    name: &'static str,
    /// What nobody else may do with it.
    closed: Mode,
}

/// Who reads the key can answer in the sender's place.
const KEY: RunFile = RunFile {
    name: "key",
    closed: Mode::RWXG.union(Mode::RWXO),
};

/// Who writes the epoch can fence the sender off.
const EPOCH: RunFile = RunFile {
    name: "epoch",
    closed: WRITABLE_BY_OTHERS,
};

const WRITABLE_BY_OTHERS: Mode = Mode::WGRP.union(Mode::WOTH);

/// Opens a file of the run directory, for this user alone, under a lock that
/// ends with the file.
fn locked(dir: &Path, entry: RunFile, until: Option<Instant>) -> Result<LockedRunFile> {
    // For this user alone: its files decide who may send.
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // A path with a typing error would lead its workers to nobody, for ever.
            return Err(Error::File {
                action: "making the run directory",
                path: dir.to_owned(),
                source: "the directory above it does not exist: make that first, or correct the \
                         path"
                    .into(),
            });
        }
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(failed("making the run directory", dir)(error));
        }
        _ => {}
    }
    // From here on by descriptor: a directory that is renamed meanwhile leads nowhere else.
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, dir, OFlags::RDONLY | flags, Mode::empty())
        .map_err(|errno| failed("opening the run directory", dir)(errno.into()))?;
    // A directory that others may write in could get another key or epoch.
    check_owner(&opened, dir, FileType::Directory, WRITABLE_BY_OTHERS, "700")?;

    let path = dir.join(entry.name);
    // NONBLOCK: were it a FIFO or a device, nothing is waited for before it is refused.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(
        &opened,
        entry.name,
        OFlags::RDWR | OFlags::CREATE | flags,
        Mode::RUSR | Mode::WUSR,
    )
    .map_err(|errno| not_opened(&path, errno))?;
    // Checked on the open file, which no rename can exchange any more.
    check_owner(&file, &path, FileType::RegularFile, entry.closed, "600")?;
    lock(&file, &path, until)?;
    Ok(LockedRunFile(file.into()))
}

/// A file under its lock.
struct LockedRunFile(File);

impl Drop for LockedRunFile {
    fn drop(&mut self) {
        // Closing would leave it to the copy of a child that was forked meanwhile.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

fn not_opened(path: &Path, errno: Errno) -> Error {
    match errno {
        Errno::LOOP => refused(
            path,
            "it is a symbolic link; put the file itself there".into(),
        ),
        errno => failed("opening", path)(errno.into()),
    }
}

/// Takes the lock, by `until` if that is given.
fn lock(file: impl AsFd, path: &Path, until: Option<Instant>) -> Result<()> {
    let since = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => continue,
            Err(Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(failed("locking", path)(errno.into())),
        }
        if weightsync_mem::passed(until) {
            return Err(Error::FileLocked {
                path: path.into(),
                waited: since.elapsed(),
            });
        }
        interrupt::sleep(LOCK_PAUSE)?;
    }
}

/// Refuses what is not of `kind`, not this user's, or open to others.
fn check_owner(
    file: impl AsFd,
    path: &Path,
    kind: FileType,
    closed: Mode,
    chmod: &str,
) -> Result<()> {
    let stat = fstat(file).map_err(|errno| failed("looking at", path)(errno.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != kind {
        let kind = match kind {
            FileType::Directory => "directory",
            _ => "regular file",
        };
        return Err(refused(path, format!("it is not a {kind}")));
    }
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        let owner = stat.st_uid;
        let words = format!(
            "it belongs to user {owner}, who could take over this run, but this process runs as \
             user {user}; use a run directory of this user"
        );
        return Err(refused(path, words));
    }
    if Mode::from_raw_mode(stat.st_mode).intersects(closed) {
        let words = format!(
            "its mode {:03o} gives others access, and they could take over this run; `chmod \
             {chmod} {}`",
            stat.st_mode & 0o777,
            path.display()
        );
        return Err(refused(path, words));
    }
    Ok(())
}

fn refused(path: &Path, words: String) -> Error {
    Error::File {
        action: "trusting",
        path: path.into(),
        source: words.into(),
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File {
        action,
        path,
        source: source.into(),
    }
}

/// The longest abstract socket name, in bytes.
const MAX_NAME: usize = 107;

/// An abstract socket name from 16 bytes and the set's name: at most 107
/// bytes. A long name keeps the part that fits, and a hash tells it apart.
fn address(key: &[u8], name: &str) -> String {
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    if name.len() <= 60 {
        return format!("weightsync/{hex}/{name}");
    }
    format!(
        "weightsync/{hex}/{}~{:016x}",
        &name[..name.floor_char_boundary(40)],
        hash(name)
    )
}

/// FNV-1a: the same in every build, as a restarted trainer needs it.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_fit_a_socket_and_tell_models_apart() {
        let long = "a".repeat(254);
        let names = [
            "a",
            "b",
            &long,
            &format!("{long}b"),
            &"ß".repeat(127),
            &"x".repeat(60),
        ];
        let addresses = names.map(|name| address(&[7; 16], name));
        for (index, one) in addresses.iter().enumerate() {
            assert!(one.len() <= 107, "{one}");
            assert!(!addresses[..index].contains(one), "{one}");
        }
        let other = address(&[8; 16], "a");
        assert!(
            !addresses.contains(&other),
            "another run directory is another address"
        );
    }
}
