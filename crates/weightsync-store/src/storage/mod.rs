//! Where a store keeps its files: one interface over directories and object stores.

mod directory;
#[cfg(test)]
pub(crate) mod faulty;
mod metered;
#[cfg(feature = "objects")]
pub(crate) mod objects;

use std::fmt;
use std::io;
use std::time::Duration;

use weightsync_core::delta::Codec;
use weightsync_engine::transport::interrupt;
pub(crate) use weightsync_engine::transport::polled::Life;
use weightsync_engine::{Error, files};

use crate::anchor::{INDEX, SAFETENSORS};
use crate::format::{DATA, DELTA, HEAD, Hash, LEASES, SPECS, VERSIONS, VersionKey};
use crate::lease;
use crate::scheme::{ALIVE, ENDS, SENDER, SENDER_LOCK, STATUS, WORKERS, is_worker_dir};

pub(crate) use self::directory::Directory;
pub(crate) use self::metered::Metered;

/// The most that is read of a file that is not weights, in bytes.
pub(crate) const MAX_SMALL: u64 = 256 << 20;

/// Files by their paths below the store's root: names with `/` between them.
///
/// **Guarantee.** A file is whole or not there. What a call has written is durable when the call
/// returns. A call by which a process dies may have happened or not.
pub(crate) trait Storage: fmt::Debug + Send + Sync {
    /// How a file is named in messages; the store itself, if the path is empty.
    fn name(&self, path: &str) -> String;

    /// The bytes of a small file; `None` if there is none.
    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>>;

    /// Replaces a small file, if it holds `old` (`None`: if there is none). False if it does not.
    /// Of several processes that replace the same bytes, one succeeds.
    fn swap(&self, path: &str, old: Option<&[u8]>, new: &[u8]) -> io::Result<bool>;

    /// Writes a small file; the last writer wins. It need not be durable.
    fn put(&self, path: &str, bytes: &[u8]) -> io::Result<()>;

    /// Makes a small file durable that is there, and its name: the call that wrote it failed, or the
    /// process died in between.
    fn settle(&self, path: &str) -> io::Result<()>;

    /// Begins a large file, which nobody sees before it is finished.
    fn upload(&self, path: &str) -> io::Result<Box<dyn Upload>>;

    /// A large file to read; `None` if there is none.
    fn open(&self, path: &str) -> io::Result<Option<Box<dyn Blob>>>;

    /// The names of what is directly in a directory, in any order; none if it is not there.
    fn list(&self, dir: &str) -> io::Result<Vec<String>>;

    /// Removes a file, or a directory with everything in it. One that is not there is no error.
    fn remove(&self, path: &str) -> io::Result<()>;

    /// Shows the others that this process is alive, for as long as the result lives.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if another process is alive there.
    fn announce(&self, path: &str, about: &[u8]) -> io::Result<Box<dyn Presence>>;

    /// The process that announced itself there last, whatever became of it.
    fn peer(&self, path: &str) -> io::Result<Option<Box<dyn Peer>>>;

    /// Removes what processes that died were writing.
    fn tidy(&self) -> io::Result<()>;

    /// Why this is no temporary store of this user; `None` if it is one, or one could be made here. Its
    /// name, its owner and all that is in it count. What a peer says proves nothing.
    fn why_not_temporary(&self) -> io::Result<Option<String>>;

    /// Removes the versions of a temporary store of this user.
    ///
    /// # Errors
    ///
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if it is [none](Self::why_not_temporary).
    fn clear_temporary(&self) -> io::Result<()>;

    /// Removes a temporary store of this user with everything in it, if `empty` says that nobody is there.
    /// Nobody can announce itself meanwhile. False if something is left.
    fn vacate(&self, empty: &dyn Fn() -> bool) -> io::Result<bool>;

    /// Whether the death of a process is noticed at once, and not by its silence.
    fn notices_death(&self) -> bool;

    /// How changes are written: the fast codec is applied several times as fast, the thin one takes
    /// fewer bytes.
    fn codec(&self) -> Codec;

    /// How long to wait before looking again: shortly after something changed, and in the end.
    fn pauses(&self) -> (Duration, Duration);
}

/// How the names of temporary stores begin; 32 hexadecimal digits follow.
pub(crate) const TEMPORARY: &str = "temporary-";

/// How the name of a temporary store goes on that is being removed; [`files::unique`] follows.
pub(crate) const REMOVED: &str = ".removed-";

/// Whether this is the name of a temporary store, or of one that is being removed.
pub(crate) fn is_temporary(name: &str) -> bool {
    let Some(name) = name.strip_prefix(TEMPORARY) else {
        return false;
    };
    let (digits, rest) = name.split_at_checked(32).unwrap_or((name, ""));
    let is_going = || rest.strip_prefix(REMOVED).is_some_and(files::is_unique);
    files::is_hex(digits, 32) && (rest.is_empty() || is_going())
}

/// What a store has of its versions.
const OF_VERSIONS: [&str; 5] = [HEAD, VERSIONS, DATA, SPECS, LEASES];

/// Why a path is no temporary store: its name.
const NO_NAME: &str = "its name is not `temporary-` and 32 hexadecimal digits";

/// Why a directory is no temporary store: what is in it.
fn no_file_of_a_store(stranger: impl fmt::Display) -> String {
    format!("{stranger} in it is no file of a store")
}

/// Whether a store has a directory, or a file, of this path. A temporary store has no other files in its
/// versions than weights.
pub(crate) fn is_of_a_store(path: &str, is_dir: bool) -> bool {
    // Each worker has a directory with two files.
    if let Some(below) = path.strip_prefix(WORKERS) {
        let names: Vec<&str> = below.split('/').skip(1).collect();
        return match (is_dir, &names[..]) {
            (true, []) => below.is_empty(),
            (true, [dir]) | (false, [dir, ALIVE | STATUS]) => is_worker_dir(dir),
            _ => false,
        };
    }
    let names: Vec<&str> = path.split('/').collect();
    let is_place = |name: &str| name.parse::<VersionKey>().is_ok();
    let is_plain = |name: &str| !name.is_empty() && !name.starts_with('.');
    match (is_dir, &names[..]) {
        (true, [VERSIONS | SPECS | DATA | LEASES | ENDS]) | (false, [HEAD]) => true,
        (true, [DATA, place]) => is_place(place),
        (true, [DATA, place, model]) => is_place(place) && is_plain(model),
        (false, [DATA, place, model, file]) => {
            let is_weights = [DELTA, INDEX].contains(file) || file.ends_with(SAFETENSORS);
            is_place(place) && is_plain(model) && is_weights
        }
        (false, [VERSIONS, name]) => VersionKey::of_manifest(name).is_some(),
        (false, [SPECS, name]) => Hash::of_spec(name).is_some(),
        (false, [LEASES, name]) => lease::is_one(name),
        (false, [ENDS, _]) => [SENDER, SENDER_LOCK].contains(&path),
        _ => false,
    }
}

/// A large file on its way. Dropped unfinished, it leaves nothing.
pub(crate) trait Upload: Send {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes the file durable and visible, replacing one of its name.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

/// A large file that is read, by several threads at once.
pub(crate) trait Blob: Send + Sync {
    /// Its length in bytes.
    fn bytes(&self) -> u64;

    /// Fills a buffer from an offset.
    fn read_at(&self, offset: u64, place: &mut [u8]) -> io::Result<()>;
}

/// This process, as others see it. Dropping it says that the process left in order; its file stays.
pub(crate) trait Presence: fmt::Debug + Send + Sync {}

/// Another process.
pub(crate) trait Peer: fmt::Debug + Send + Sync {
    /// What it announced.
    fn about(&self) -> &[u8];

    /// Whether it is there: it, and no other that has taken its name since.
    fn life(&self) -> Life;
}

/// An interruption of the calling thread, as this interface has it.
fn interrupted(error: impl Into<Error>) -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, error.into())
}

/// Whether the error is such an interruption. A caller's own error may be of the same kind.
pub(crate) fn is_interruption(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(inner, Some(Error::Interrupted))
}

/// A large file is read and written in pieces. Between two of them a signal can end the call.
pub(crate) fn look_for_interruption() -> io::Result<()> {
    interrupt::at_most(None).map(drop).map_err(interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_store_is_known_by_its_whole_name() {
        let digits = "0123456789abcdef0123456789abcdef";
        let own = format!("{TEMPORARY}{digits}");
        assert!(is_temporary(&own));
        assert!(is_temporary(&format!("{own}{REMOVED}{}", files::unique())));
        for name in [
            "temporary-results",
            "temporary-notes.txt",
            TEMPORARY,
            digits,
            &own[..own.len() - 1],
            &format!("{own}0"),
            &format!("{own}.old"),
            &format!("{own}{REMOVED}"),
            &format!("{own}{REMOVED}1-2"),
            &format!("{own}{REMOVED}1-2-3"),
            &own.to_uppercase(),
            &own.replace('a', "g"),
            "temporary-0123456789abcdef0123456789abcdé",
        ] {
            assert!(!is_temporary(name), "{name}");
        }
    }

    #[test]
    fn store_has_no_files_but_its_own() {
        let place = "00000000000000000001-00000000000000000002";
        let hash = blake3::hash(b"").to_hex();
        let lease = format!("{place}.0123456789abcdef");
        let worker = "ends/workers/3.0123456789abcdef";
        for (path, is_dir) in [
            ("head.json".into(), false),
            ("versions".into(), true),
            (format!("versions/{place}.json"), false),
            (format!("specs/{hash}.json"), false),
            (format!("data/{place}"), true),
            (format!("data/{place}/policy"), true),
            (format!("data/{place}/policy/model.safetensors"), false),
            (format!("data/{place}/policy/weights.delta"), false),
            (format!("leases/{lease}"), false),
            (format!("leases/conditions-{}", files::unique()), false),
            ("ends/sender".into(), false),
            ("ends/sender.lock".into(), false),
            ("ends/workers".into(), true),
            (worker.into(), true),
            (format!("{worker}/alive"), false),
            (format!("{worker}/status"), false),
        ] {
            assert!(is_of_a_store(&path, is_dir), "{path}");
            assert!(!is_of_a_store(&path, !is_dir), "{path}");
        }
        for path in [
            "thesis.tex",
            "versions/thesis.tex",
            "specs/thesis.json",
            "data/mine",
            &format!("data/{place}/policy/thesis.tex"),
            &format!("data/{place}/policy/mine/model.safetensors"),
            "leases/thesis.tex",
            "leases/conditions-of-sale.txt",
            &format!("leases/{}", lease.to_uppercase()),
            "ends/mine",
            "ends/workers/mine",
            "ends/workers-of-the-world",
            &format!("{worker}/thesis.tex"),
            &format!("{worker}/mine/alive"),
            "other/sender",
        ] {
            assert!(!is_of_a_store(path, true), "{path}");
            assert!(!is_of_a_store(path, false), "{path}");
        }
        // It can be the name of a model's directory.
        assert!(!is_of_a_store(&format!("data/{place}/thesis.tex"), false));
    }
}
