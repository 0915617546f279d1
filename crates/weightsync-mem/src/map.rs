//! Memory files and mappings of them.
//!
//! **Guarantee.** A mapping covers memory that can neither shrink nor grow
//! underneath it (the seals are checked before anything is mapped), a reader's
//! mapping cannot be written, and no mapping reaches a forked child.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, os};
use crate::fork::process_id;

/// Seals every shared file carries: no resizing, and after the owner's own
/// mapping no writable mapping and no `write` by anybody.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::FUTURE_WRITE);

/// A memory file that its creator has mapped writable, sealed for everybody
/// else.
#[derive(Debug)]
pub(crate) struct OwnedFile {
    pub(crate) fd: OwnedFd,
    pub(crate) map: Arc<Mapping>,
}

impl OwnedFile {
    /// Creates, faults in, maps and seals `len` zero bytes.
    ///
    /// The pages are allocated here, so that running out of memory is an error
    /// of this call and not a signal in the middle of a copy.
    pub(crate) fn new(name: &str, len: usize) -> Result<Self, Error> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(os("creating a memory file"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(os("sizing a memory file"))?;
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, len as u64)
        })
        .map_err(os("allocating shared memory"))?;
        let map = Mapping::new(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)
            .map_err(os("sealing a memory file"))?;
        Ok(Self {
            fd,
            map: Arc::new(map),
        })
    }

    /// Writes `bytes` at the start, before the file is handed to anybody.
    pub(crate) fn fill(&self, bytes: &[u8]) {
        assert!(
            bytes.len() <= self.map.len,
            "{} bytes into {}",
            bytes.len(),
            self.map.len
        );
        // SAFETY: the mapping is writable and long enough (asserted), `bytes`
        // cannot overlap it, and nobody else has the file yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_ptr(), bytes.len()) }
    }
}

/// A shared mapping of a memory file, from its beginning.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// The process that made it: in a forked child the addresses are not mapped
    /// (`MADV_DONTFORK`), and something else may live there.
    pid: u32,
}

// SAFETY: the mapping is plain memory; every access through it goes through
// atomics, through the pin protocol, or through an exclusive loan.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps another process's file read-only, after checking that it is sealed
    /// and large enough.
    pub(crate) fn of_peer(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        let seals =
            rustix::fs::fcntl_get_seals(fd).map_err(os("reading the seals of a peer's memory"))?;
        if !seals.contains(SEALS) {
            return Err(Error::Protocol {
                expected: "a memory file sealed against resizing and writing",
                got: format!("seals {seals:?}"),
            });
        }
        let size = rustix::fs::fstat(fd)
            .map_err(os("reading the size of a peer's memory"))?
            .st_size;
        if u64::try_from(size).unwrap_or(0) < len as u64 {
            return Err(Error::Protocol {
                expected: "a memory file of at least the announced length",
                got: format!("{size} bytes where {len} were announced"),
            });
        }
        Self::new(fd, len, ProtFlags::READ)
    }

    fn new(fd: BorrowedFd<'_>, len: usize, prot: ProtFlags) -> Result<Self, Error> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel picks an unused address range, so no existing
        // memory is affected.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, fd, 0) }
            .map_err(os("mapping shared memory"))?;
        let mapping = Self {
            start: NonNull::new(start.cast()).ok_or(Error::Protocol {
                expected: "a mapping",
                got: "address 0".into(),
            })?,
            len,
            pid: process_id(),
        };
        // SAFETY: the range is exactly the mapping made above; keeping it out
        // of forked children changes nothing in this process.
        unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontFork) }
            .map_err(os("keeping shared memory out of forked children"))?;
        Ok(mapping)
    }

    /// A copy of the first `len` bytes of a peer's file, so that what is parsed
    /// cannot change meanwhile.
    pub(crate) fn copy_out(&self, len: usize) -> Vec<u8> {
        let len = len.min(self.len);
        let mut bytes = vec![0; len];
        // SAFETY: the mapping is readable for `len` bytes and cannot overlap a
        // fresh allocation.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr(), bytes.as_mut_ptr(), len) }
        bytes
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether this process is the one that made the mapping. Everything that
    /// touches the memory asks first.
    pub(crate) fn usable(&self) -> Result<(), Error> {
        let child = process_id();
        if child == self.pid {
            return Ok(());
        }
        Err(Error::Forked {
            owner: self.pid,
            child,
        })
    }

    /// The start of the mapping as a table of atomics.
    pub(crate) fn table<T: Table>(&self) -> &T {
        assert!(
            size_of::<T>() <= self.len,
            "mapping of {} bytes for a table of {}",
            self.len,
            size_of::<T>()
        );
        // SAFETY: the mapping is page-aligned, lives as long as `self`, covers
        // the table (asserted), and `Table` promises that the table consists of
        // atomics, for which any bytes are valid and shared access is defined.
        unsafe { self.start.cast::<T>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.usable().is_ok() {
            // SAFETY: the range was mapped by `new`, nothing borrowed from it
            // can outlive `self`, and this is the process that mapped it.
            let done = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }
}

/// A type made of atomics alone, laid out as declared.
///
/// # Safety
///
/// Any bytes must be a valid value, shared access from several processes must
/// be defined, and the alignment must not exceed a page.
pub(crate) unsafe trait Table {}
