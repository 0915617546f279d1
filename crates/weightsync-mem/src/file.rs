//! Memory files as the kernel makes, seals and maps them.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::Advice;
pub(crate) use rustix::mm::mmap as map;

use crate::error::{Error, os};

/// The seals of every shared file: its size is fixed, and after the owner's own mapping nobody can
/// map it writable or write it.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::FUTURE_WRITE);

/// A memory file without bytes, without a name in any file system.
pub(crate) fn create(name: &str) -> Result<OwnedFd, Error> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    rustix::fs::memfd_create(name, flags).map_err(os("creating a memory file"))
}

/// Fixes the file's size, and forbids everybody to write it but through mappings that exist.
pub(crate) fn seal(fd: BorrowedFd<'_>) -> Result<(), Error> {
    // Sealed against further seals as well: a process that gets the descriptor cannot change what
    // others may do with the file.
    rustix::fs::fcntl_add_seals(fd, SEALS | SealFlags::SEAL).map_err(os("sealing a memory file"))
}

/// Refuses a peer's file that it could still resize or let others write.
pub(crate) fn check_seals(fd: BorrowedFd<'_>) -> Result<(), Error> {
    let seals =
        rustix::fs::fcntl_get_seals(fd).map_err(os("reading the seals of a peer's memory"))?;
    if !seals.contains(SEALS) {
        return Err(Error::Protocol {
            expected: "a memory file sealed against resizing and writing",
            got: format!("seals {seals:?}"),
        });
    }
    Ok(())
}

/// Keeps a mapping out of forked children and core files.
///
/// # Safety
///
/// The range is a mapping of the caller's.
pub(crate) unsafe fn keep_here(start: *mut c_void, len: usize) -> Result<(), Error> {
    // SAFETY: the caller's mapping; keeping it out of forked children changes nothing in this
    // process.
    unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontFork) }
        .map_err(os("keeping shared memory out of forked children"))?;
    // Else a crash would write every slot to a file before its death is seen.
    // SAFETY: as above.
    unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontDump) }
        .map_err(os("keeping shared memory out of core files"))
}

/// Drops the copies of pages of a private mapping, so that they show the file again.
///
/// # Safety
///
/// The range is inside a private mapping of a file, and nobody looks at it.
pub(crate) unsafe fn drop_copies(start: *mut c_void, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise; the file's bytes take the place of the copies.
    unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontNeed) }
}

/// Has every forked child find zeros in these pages.
///
/// # Safety
///
/// The range is an anonymous private mapping of the caller's.
pub(crate) unsafe fn wipe_on_fork(start: *mut c_void, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise; nothing changes in this process.
    unsafe { rustix::mm::madvise(start, len, Advice::LinuxWipeOnFork) }
}
