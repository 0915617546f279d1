//! Memory files and mappings of them.
//!
//! **Guarantee.** A mapping covers memory that can neither shrink nor grow
//! underneath it (the seals are checked before anything is mapped), a reader's
//! mapping cannot be written but for a private one, and no mapping reaches a
//! forked child.

use std::ops::Range;
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

/// A mapping of a memory file, from its beginning: shared, but for
/// [`private`](Mapping::private) ones.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// The process that made it: in a forked child the addresses are not mapped
    /// (`MADV_DONTFORK`), and something else may live there.
    pid: u32,
}

// SAFETY: the mapping is plain memory; every access through it goes through
// atomics, through the pin protocol, through an exclusive loan, or (of a private
// one) through the pointer of a view, whose holders see to it themselves.
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

    /// Maps a file that this process has mapped already, so that what is written
    /// here is copied first, a page at a time, and nobody else sees it. What is
    /// not written stays the file's, and follows it.
    pub(crate) fn private(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        // Nearly nothing is ever written, so no room is set aside for all of it.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let mapping = Self::map(fd, len, ProtFlags::READ | ProtFlags::WRITE, flags)?;
        // Not `MAP_POPULATE`, which would copy every page.
        mapping.populate(&(0..len));
        Ok(mapping)
    }

    /// Makes pages of a private mapping the file's again; what was written there
    /// is gone. Nobody may be using them.
    pub(crate) fn restore(&self, pages: &Range<usize>) -> Result<(), Error> {
        let start = self.at(pages);
        // SAFETY: the range is inside this mapping, whose owner says that nobody
        // looks at it; the file's bytes take the place of the copies.
        unsafe { rustix::mm::madvise(start, pages.len(), Advice::LinuxDontNeed) }
            .map_err(os("dropping what was written"))?;
        self.populate(pages);
        Ok(())
    }

    /// Whether the bytes from `start` on are others. Nobody may be writing them.
    pub(crate) fn differs(&self, start: usize, other: &[u8]) -> bool {
        let place = self.at(&(start..start + other.len()));
        // SAFETY: the range is inside this mapping, which lives as long as
        // `self`, and whose owner says that nobody writes it meanwhile.
        let own = unsafe { std::slice::from_raw_parts(place.cast::<u8>(), other.len()) };
        own != other
    }

    /// Faults pages in to be read.
    fn populate(&self, pages: &Range<usize>) {
        let start = self.at(pages);
        // It saves time only, and kernels before 5.14 do not know it.
        // SAFETY: the range is inside this mapping; reading changes nothing.
        let _ = unsafe { rustix::mm::madvise(start, pages.len(), Advice::LinuxPopulateRead) };
    }

    fn at(&self, range: &Range<usize>) -> *mut std::ffi::c_void {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "bytes {range:?} of a mapping of {}",
            self.len
        );
        // SAFETY: the offset is inside the mapping (asserted).
        unsafe { self.as_ptr().add(range.start) }.cast()
    }

    fn new(fd: BorrowedFd<'_>, len: usize, prot: ProtFlags) -> Result<Self, Error> {
        Self::map(fd, len, prot, MapFlags::SHARED | MapFlags::POPULATE)
    }

    fn map(
        fd: BorrowedFd<'_>,
        len: usize,
        prot: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, Error> {
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
