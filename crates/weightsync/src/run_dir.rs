//! Which run this is, and where its senders are found.
//!
//! Without a run directory a run lives and dies with its process. With one, a
//! restarted trainer takes the next epoch from a counter file, comes back at
//! the same address with the same secret, and fences its predecessor off.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use weightsync_core::{Epoch, ModelId, Run};

use crate::error::{Error, Result};

/// The most that is read of the epoch file, in bytes.
const MAX_EPOCH_FILE: u64 = 64;

/// Where a model's sender listens, what lets a worker in, and whether it may
/// come back after a restart.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) address: String,
    pub(crate) secret: [u8; 16],
    pub(crate) restarts: bool,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("Place")
            .field("address", &self.address)
            .field("restarts", &self.restarts)
            .finish_non_exhaustive()
    }
}

/// A place that no other process can know or reuse.
pub(crate) fn anonymous(model: &ModelId) -> Result<Place> {
    Ok(Place {
        address: address(&random::<16>()?, model),
        secret: random()?,
        restarts: false,
    })
}

/// The place a run directory gives a model: the same in every process.
pub(crate) fn at(dir: &Path, model: &ModelId) -> Result<Place> {
    let key = shared_bytes(dir, "key")?;
    let [name, secret] = *key.as_chunks::<16>().0 else {
        unreachable!("32 bytes are two times 16")
    };
    Ok(Place {
        address: address(&name, model),
        secret,
        restarts: true,
    })
}

/// A run of the first epoch, with an id of its own.
pub(crate) fn anonymous_run() -> Result<Run> {
    Ok(Run {
        epoch: Epoch(1),
        id: random()?,
    })
}

/// The next run of a run directory: one epoch above every earlier one.
pub(crate) fn next_run(dir: &Path) -> Result<Run> {
    let path = dir.join("epoch");
    let mut file = locked(dir, &path)?;
    let mut text = String::new();
    (&mut file)
        .take(MAX_EPOCH_FILE)
        .read_to_string(&mut text)
        .map_err(failed("reading", &path))?;
    let last: u64 = match text.trim() {
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
    file.sync_all().map_err(failed("writing", &path))?;
    Ok(Run {
        epoch: Epoch(epoch),
        id: random()?,
    })
}

/// 32 random bytes that every process of the run directory shares.
fn shared_bytes(dir: &Path, name: &str) -> Result<[u8; 32]> {
    let path = dir.join(name);
    let mut file = locked(dir, &path)?;
    let mut bytes = Vec::new();
    (&mut file)
        .take(33)
        .read_to_end(&mut bytes)
        .map_err(failed("reading", &path))?;
    if let Ok(bytes) = <[u8; 32]>::try_from(&bytes[..]) {
        return Ok(bytes);
    }
    if !bytes.is_empty() {
        return Err(Error::File {
            action: "reading the key in",
            path,
            source: "it is not 32 bytes long; remove it while no trainer runs".into(),
        });
    }
    let fresh: [u8; 32] = random()?;
    file.write_all(&fresh).map_err(failed("writing", &path))?;
    file.sync_all().map_err(failed("writing", &path))?;
    Ok(fresh)
}

/// Opens a file of the run directory, for this user alone, under a lock that
/// ends with the file.
fn locked(dir: &Path, path: &PathBuf) -> Result<File> {
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir);
    made.map_err(failed("making the run directory", dir))?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(failed("opening", path))?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)
        .map_err(|errno| failed("locking", path)(errno.into()))?;
    Ok(file)
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File {
        action,
        path,
        source: source.into(),
    }
}

/// An abstract socket name from 16 bytes and the model's name: at most 107
/// bytes. A long name keeps the part that fits, and a hash tells it apart.
fn address(key: &[u8], model: &ModelId) -> String {
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = model.as_str();
    if name.len() <= 60 {
        return format!("weightsync/{hex}/{name}");
    }
    // FNV-1a: the same in every build, as a restarted trainer needs it.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!(
        "weightsync/{hex}/{}~{hash:016x}",
        &name[..name.floor_char_boundary(40)]
    )
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let got =
            rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty());
        match got {
            Ok(len) => filled += len,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(Error::Os {
                    action: "getting random bytes",
                    source: errno.into(),
                });
            }
        }
    }
    Ok(bytes)
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
        let addresses = names.map(|name| address(&[7; 16], &ModelId::new(name).unwrap()));
        for (index, one) in addresses.iter().enumerate() {
            assert!(one.len() <= 107, "{one}");
            assert!(!addresses[..index].contains(one), "{one}");
        }
        let other = address(&[8; 16], &ModelId::new("a").unwrap());
        assert!(
            !addresses.contains(&other),
            "another run directory is another address"
        );
    }
}
