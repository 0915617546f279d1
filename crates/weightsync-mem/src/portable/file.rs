//! Memory files without seals. They never leave this process: [`Socket`](crate::socket::Socket)
//! connects no other.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::shm::{self, OFlags};

use crate::error::{Error, os};

/// A memory file without bytes. It has a name for a moment, which nobody else can use: it is made
/// for this user alone, and it must be new.
pub(crate) fn create(_name: &str) -> Result<OwnedFd, Error> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // macOS allows 31 bytes.
        let name = format!("/weightsync-{:x}-{number:x}", std::process::id());
        match shm::open(&name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => {
                shm::unlink(&name).map_err(os("removing a memory file's name"))?;
                return Ok(fd);
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(os("creating a memory file")(errno)),
        }
    }
}

/// There are no seals.
pub(crate) fn seal(_fd: BorrowedFd<'_>) -> Result<(), Error> {
    Ok(())
}

/// There are no seals, and they are not needed: the file is this process's own, because a
/// connection to another process is refused.
pub(crate) fn check_seals(_fd: BorrowedFd<'_>) -> Result<(), Error> {
    Ok(())
}

/// A forked child keeps the pages here. Its ends refuse to use them, as everywhere.
///
/// # Safety
///
/// The range is a mapping of the caller's.
pub(crate) unsafe fn keep_here(_start: *mut c_void, _len: usize) -> Result<(), Error> {
    Ok(())
}

/// Not possible: the caller makes a new mapping.
///
/// # Safety
///
/// The range is inside a private mapping of a file, and nobody looks at it.
pub(crate) unsafe fn drop_copies(_start: *mut c_void, _len: usize) -> Result<(), Errno> {
    Err(Errno::NOTSUP)
}

/// Not possible: the caller goes by the process's number.
///
/// # Safety
///
/// The range is an anonymous private mapping of the caller's.
pub(crate) unsafe fn wipe_on_fork(_start: *mut c_void, _len: usize) -> Result<(), Errno> {
    Err(Errno::NOTSUP)
}

/// Maps a file. A private mapping is a copy of it, because macOS maps memory files only shared.
///
/// # Safety
///
/// As of [`mmap`](rustix::mm::mmap). Nobody writes the file while a private mapping is made.
pub(crate) unsafe fn map(
    at: *mut c_void,
    len: usize,
    prot: ProtFlags,
    flags: MapFlags,
    fd: BorrowedFd<'_>,
    offset: u64,
) -> Result<*mut c_void, Errno> {
    if !flags.contains(MapFlags::PRIVATE) {
        // SAFETY: the caller's promise.
        return unsafe { rustix::mm::mmap(at, len, prot, flags, fd, offset) };
    }
    let shared = MapFlags::SHARED;
    // SAFETY: the kernel picks an unused address range, so no existing memory is affected.
    let file = unsafe { rustix::mm::mmap(null_mut(), len, ProtFlags::READ, shared, fd, offset) }?;
    // SAFETY: the caller's promise.
    let copy = unsafe { rustix::mm::mmap_anonymous(at, len, prot | ProtFlags::WRITE, flags) };
    if let Ok(copy) = copy {
        // SAFETY: both were mapped above for `len` bytes, the one for reading and the other for
        // writing, and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(file.cast::<u8>(), copy.cast::<u8>(), len) };
    }
    // SAFETY: it was mapped above, and nothing refers to it.
    let done = unsafe { rustix::mm::munmap(file, len) };
    debug_assert!(done.is_ok(), "{done:?}");
    copy
}
