//! Finds the pages of a private mapping that are copies and no longer the file's.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, os};
use crate::map::MemoryMap;

/// The page map of the process that opened it; not valid in a forked child.
#[derive(Debug)]
pub(crate) struct PageMap(OwnedFd);

impl PageMap {
    /// The page map of this process.
    ///
    /// # Errors
    ///
    /// If there is no `/proc`.
    pub(crate) fn open() -> Result<Self, Error> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open("/proc/self/pagemap", flags, Mode::empty())
            .map(Self)
            .map_err(os("opening this process's page map"))
    }

    /// The pages of a private mapping of a file that are this process's own, as
    /// ranges of bytes, in ascending order.
    ///
    /// The kernel looks at every page: 512 MiB take 4.5 ms where the file's pages
    /// lie about in memory, 1 MiB 12 µs, 16 KiB 1.3 µs (6.18, one core of a shared
    /// EPYC). Nearly all of it is finding out whose each page is: walking the
    /// table alone takes 0.45 ms of the 4.5.
    ///
    /// # Errors
    ///
    /// Where the kernel does not say.
    pub(crate) fn copied(&self, map: &MemoryMap) -> Result<Vec<Range<usize>>, Error> {
        match scan(&self.0, map) {
            // The kernel is older than 6.7, or forbids the call.
            Err(_) => read(&self.0, map),
            found => found,
        }
    }
}

/// The argument of `PAGEMAP_SCAN`; see `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// An element of its result.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

// The numbers of `PAGE_IS_FILE` and its neighbours in `linux/fs.h`.
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;

/// Asks for pages that are present or swapped out, and do not belong to a file.
fn scan(table: &OwnedFd, map: &MemoryMap) -> Result<Vec<Range<usize>>, Error> {
    let code = rustix::ioctl::opcode::read_write::<Scan>(b'f', 16);
    let first = map.as_ptr().addr() as u64;
    let end = first + map.len().next_multiple_of(rustix::param::page_size()) as u64;
    // The kernel fills at most these, and says where it stopped: the loop goes on from there.
    let mut regions = [Region::default(); 64];
    let mut found = Vec::new();
    let mut start = first;
    while start < end {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start,
            end,
            regions: regions.as_mut_ptr().expose_provenance() as u64,
            regions_len: regions.len() as u64,
            // Inverted: pages that do not belong to a file match.
            category_inverted: IS_FILE,
            category_mask: IS_FILE,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            ..Scan::default()
        };
        // SAFETY: the kernel writes `scan` and at most `regions_len` regions to
        // `regions`, both of which outlive the call; it changes nothing else.
        let count = unsafe { libc::ioctl(table.as_raw_fd(), code as _, &raw mut scan) };
        let count = usize::try_from(count).map_err(|_| {
            let errno = Errno::from_io_error(&std::io::Error::last_os_error());
            os("scanning this process's page map")(errno.unwrap_or(Errno::IO))
        })?;
        for region in &regions[..count] {
            // The last page may reach beyond the mapping's length.
            let offset = |at| map.len().min((at - first) as usize);
            push(&mut found, offset(region.start)..offset(region.end));
        }
        // A kernel that gets no further would keep this loop running for ever.
        if scan.walk_end <= start {
            return Err(os("scanning this process's page map")(Errno::IO));
        }
        start = scan.walk_end;
    }
    Ok(found)
}

/// The same, from the page table's entries, one by one.
fn read(table: &OwnedFd, map: &MemoryMap) -> Result<Vec<Range<usize>>, Error> {
    const FILE: u64 = 1 << 61;
    const SWAPPED: u64 = 1 << 62;
    const PRESENT: u64 = 1 << 63;
    let page = rustix::param::page_size();
    // The table has 8 bytes for each page of this process's address space.
    let mut entries = [0; 8 << 10];
    let mut found = Vec::new();
    let mut at = 0;
    while at < map.len() {
        let pages = (map.len() - at).div_ceil(page).min(entries.len() / 8);
        let place = ((map.as_ptr().addr() + at) / page * 8) as u64;
        let got = rustix::io::retry_on_intr(|| {
            rustix::io::pread(table.as_fd(), &mut entries[..pages * 8], place)
        })
        .map_err(os("reading this process's page map"))?;
        // A shorter read than requested is fine: the loop goes on behind what came.
        if got < 8 {
            return Err(os("reading this process's page map")(Errno::IO));
        }
        for entry in entries[..got].as_chunks::<8>().0 {
            let entry = u64::from_ne_bytes(*entry);
            if entry & FILE == 0 && entry & (PRESENT | SWAPPED) != 0 {
                push(&mut found, at..map.len().min(at + page));
            }
            at += page;
        }
    }
    Ok(found)
}

fn push(found: &mut Vec<Range<usize>>, next: Range<usize>) {
    // Neighbours are joined, so that fewer calls restore them.
    match found.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => found.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::OwnedFile;

    /// The scan and the table say the same: exactly the pages that were written.
    #[test]
    fn both_ways_find_exactly_the_pages_written() {
        let page = rustix::param::page_size();
        // More regions than one scan returns, and more pages than one read.
        let pages = 1500;
        let len = pages * page - 100;
        let file = OwnedFile::new("weightsync-test", len).unwrap();
        let map = MemoryMap::private(file.fd.as_fd(), len).unwrap();
        let table = PageMap::open().unwrap();
        let is = |expected: &[Range<usize>]| {
            let ways = [
                ("scan", scan(&table.0, &map)),
                ("read", read(&table.0, &map)),
                ("either", table.copied(&map)),
            ];
            for (way, found) in ways {
                match found {
                    Ok(found) => assert_eq!(found, expected, "{way}"),
                    // Not before Linux 6.7; the others must do.
                    Err(error) => assert_eq!(way, "scan", "{error}"),
                }
            }
        };
        is(&[]);
        let spread: Vec<usize> = (0..pages).filter(|at| at % 10 == 3).collect();
        for at in spread.iter().map(|at| at * page).chain([len - 1]) {
            write(&map, at);
        }
        let last = (pages - 1) * page..len;
        let mut expected: Vec<_> = spread.iter().map(|at| at * page..(at + 1) * page).collect();
        expected.push(last.clone());
        is(&expected);
        // Neighbours are one range.
        write(&map, 4 * page + 7);
        expected[0].end = 5 * page;
        is(&expected);
        for pages in &expected[1..] {
            map.restore(pages).unwrap();
        }
        is(&expected[..1]);
        map.restore(&expected[0]).unwrap();
        is(&[]);
    }

    fn write(map: &MemoryMap, at: usize) {
        assert!(at < map.len());
        // SAFETY: the address is inside the mapping (asserted).
        let byte = unsafe { map.as_ptr().add(at) };
        // SAFETY: the mapping is private and writable, and nobody else has it.
        unsafe { byte.write(1) };
    }
}
