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
use weightsync_engine::Error;
use weightsync_engine::transport::interrupt;

pub(crate) use self::directory::{Directory, unique};
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

    /// Removes everything, if `empty` says that nobody is there. Nobody can announce itself
    /// meanwhile. False if somebody is there.
    fn vacate(&self, empty: &dyn Fn() -> bool) -> io::Result<bool>;

    /// Whether the death of a process is noticed at once, and not by its silence.
    fn notices_death(&self) -> bool;

    /// How changes are written: the fast codec is applied several times as fast, the thin one takes
    /// fewer bytes.
    fn codec(&self) -> Codec;

    /// How long to wait before looking again: shortly after something changed, and in the end.
    fn pauses(&self) -> (Duration, Duration);
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

/// What is known of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// It is alive.
    Here,
    /// It left in order.
    Left,
    /// It died, or is silent.
    Dead,
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
