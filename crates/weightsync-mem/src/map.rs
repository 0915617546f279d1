//! Memory files and mappings of them.
//!
//! **Guarantee.** The memory under a mapping can neither shrink nor grow: its seals are checked
//! before it is mapped. A reader's mapping cannot be written, unless it is private. No mapping
//! reaches a forked child or a core file.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::{Error, os};
use crate::file;
use crate::fork::Origin;
use crate::populate::{self, HUGE_PAGE};

/// A memory file that its creator has mapped writable, sealed for everybody
/// else.
#[derive(Debug)]
pub(crate) struct OwnedFile {
    pub(crate) fd: OwnedFd,
    pub(crate) map: Arc<MemoryMap>,
}

impl OwnedFile {
    /// Creates, maps, faults in and seals `len` zero bytes.
    ///
    /// The pages are allocated here, so that running out of memory is an error
    /// of this call and not a signal in the middle of a copy.
    pub(crate) fn new(name: &str, len: usize) -> Result<Self, Error> {
        Self::new_unless(name, len, &AtomicBool::new(false))
    }

    /// As [`new`](Self::new), but stops soon after `stop` is set, with
    /// [`Error::SenderClosed`].
    pub(crate) fn new_unless(name: &str, len: usize, stop: &AtomicBool) -> Result<Self, Error> {
        // Sized and allocated before it is sealed: from then on its size is fixed.
        let fd = file::create(name)?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(os("sizing a memory file"))?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let map = MemoryMap::map(fd.as_fd(), len, prot, MapFlags::SHARED)?;
        match populate::to_write(&map, stop) {
            // Before Linux 5.14: allocate here, and map on first touch.
            Err(Errno::INVAL) => rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, len as u64)
            }),
            done => done,
        }
        .map_err(os("allocating shared memory"))?;
        // Some pages may be missing, so the file is not used.
        if stop.load(Ordering::Relaxed) {
            return Err(Error::SenderClosed);
        }
        file::seal(fd.as_fd())?;
        Ok(Self {
            fd,
            map: Arc::new(map),
        })
    }

    /// Writes `bytes` at the start, before any other process has the file.
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

/// A mapping of a memory file from its beginning; shared, except for
/// [`private`](MemoryMap::private) ones.
#[derive(Debug)]
pub(crate) struct MemoryMap {
    start: NonNull<u8>,
    len: usize,
    /// The process that made the mapping. In a forked child the addresses are not mapped
    /// (`MADV_DONTFORK`), and something else may be there.
    origin: Origin,
}

// SAFETY: the mapping is plain memory; every access through it goes through
// atomics, through the pin protocol, through an exclusive loan, or (of a private
// one) through the pointer of a view, whose holders see to it themselves.
unsafe impl Send for MemoryMap {}
// SAFETY: as above.
unsafe impl Sync for MemoryMap {}

impl MemoryMap {
    /// Maps another process's file read-only, after checking that it is sealed
    /// and large enough.
    pub(crate) fn of_peer(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        // The seals before the size. Without them the peer could shrink the file after this look,
        // and a read of the mapping would end this process.
        file::check_seals(fd)?;
        let size = rustix::fs::fstat(fd)
            .map_err(os("reading the size of a peer's memory"))?
            .st_size;
        if u64::try_from(size).unwrap_or(0) < len as u64 {
            return Err(Error::Protocol {
                expected: "a memory file of at least the announced length",
                got: format!("{size} bytes where {len} were announced"),
            });
        }
        let mapping = Self::map(fd, len, ProtFlags::READ, MapFlags::SHARED)?;
        // Now, so that no snapshot pays for page faults.
        populate::to_read(&mapping, &(0..len));
        Ok(mapping)
    }

    /// Maps a file that this process has already mapped, privately: a page is copied before it is
    /// written, and no other process sees the copy. Pages that were not written follow the file.
    pub(crate) fn private(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        // Few pages are ever written, so no memory is reserved for all of them.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let mapping = Self::map(fd, len, ProtFlags::READ | ProtFlags::WRITE, flags)?;
        // Only for reading: faulting in for writing would copy every page.
        populate::to_read(&mapping, &(0..len));
        Ok(mapping)
    }

    /// Drops the copies of pages of a private mapping, so that they show the file again. The pages
    /// must not be in use.
    pub(crate) fn restore(&self, pages: &Range<usize>) -> Result<(), Error> {
        let start = self.at(pages);
        // SAFETY: the range is inside this mapping, whose owner says that nobody
        // looks at it; the file's bytes take the place of the copies.
        unsafe { file::drop_copies(start, pages.len()) }
            .map_err(os("dropping what was written"))?;
        populate::to_read(self, pages);
        Ok(())
    }

    /// Whether the bytes from `start` on differ. They must not be written meanwhile.
    pub(crate) fn differs(&self, start: usize, other: &[u8]) -> bool {
        let place = self.at(&(start..start + other.len()));
        // SAFETY: the range is inside this mapping, which lives as long as
        // `self`, and whose owner says that nobody writes it meanwhile.
        let own = unsafe { std::slice::from_raw_parts(place.cast::<u8>(), other.len()) };
        own != other
    }

    pub(crate) fn at(&self, range: &Range<usize>) -> *mut c_void {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "bytes {range:?} of a mapping of {}",
            self.len
        );
        // SAFETY: the offset is inside the mapping (asserted).
        unsafe { self.as_ptr().add(range.start) }.cast()
    }

    /// Excluded from forked children and core files before it is faulted in: that takes seconds, in
    /// which a fork would copy it.
    fn map(
        fd: BorrowedFd<'_>,
        len: usize,
        prot: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, Error> {
        let start = map_aligned(fd, len, prot, flags).map_err(os("mapping shared memory"))?;
        let mapping = Self {
            start: NonNull::new(start.cast()).ok_or(Error::Protocol {
                expected: "a mapping",
                got: "address 0".into(),
            })?,
            len,
            origin: Origin::here(),
        };
        // SAFETY: the range is exactly the mapping made above.
        unsafe { file::keep_here(start, len) }?;
        Ok(mapping)
    }

    /// A copy of the first `len` bytes of a peer's file, so that they cannot change while they are
    /// parsed.
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

    /// Checks that this process made the mapping. Every access to the memory calls this first.
    pub(crate) fn usable(&self) -> Result<(), Error> {
        self.origin.check()
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

impl Drop for MemoryMap {
    fn drop(&mut self) {
        if self.usable().is_ok() {
            // SAFETY: the range was mapped by `new`, nothing borrowed from it
            // can outlive `self`, and this is the process that mapped it.
            let done = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }
}

/// Maps a file at an address where the kernel can use huge pages, if it is long enough for one.
fn map_aligned(
    fd: BorrowedFd<'_>,
    len: usize,
    prot: ProtFlags,
    flags: MapFlags,
) -> rustix::io::Result<*mut c_void> {
    // No huge page fits into it, wherever it begins.
    if len < HUGE_PAGE {
        // SAFETY: the kernel picks an unused address range, so no existing
        // memory is affected.
        return unsafe { file::map(std::ptr::null_mut(), len, prot, flags, fd, 0) };
    }
    let len = len.next_multiple_of(rustix::param::page_size());
    // A longer range is reserved, without memory. The file is mapped over it at the first address
    // that a huge page may have, and the rest is given back.
    let room = len + HUGE_PAGE;
    let none = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: as above.
    let reserved =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, none.0, none.1) }?;
    let before = reserved.addr().next_multiple_of(HUGE_PAGE) - reserved.addr();
    let start = reserved.wrapping_byte_add(before);
    // SAFETY: the range lies in the one reserved above, which nobody else uses.
    let mapped = unsafe { file::map(start, len, prot, flags | MapFlags::FIXED, fd, 0) };
    let unused = match mapped {
        Ok(_) => [
            (reserved, before),
            (start.wrapping_byte_add(len), HUGE_PAGE - before),
        ],
        // Nothing was mapped: all of it goes back.
        Err(_) => [(reserved, room), (reserved, 0)],
    };
    for (rest, len) in unused {
        if len > 0 {
            // SAFETY: what is left of the range reserved above, which nobody uses.
            let done = unsafe { rustix::mm::munmap(rest, len) };
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }
    mapped
}

/// A type that consists of atomics, laid out as declared.
///
/// # Safety
///
/// Any bytes must be a valid value, shared access from several processes must be defined, and the
/// alignment must not exceed a page.
pub(crate) unsafe trait Table {}
