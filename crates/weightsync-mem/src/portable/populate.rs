//! Faults pages in at their first use: other systems have no advice for it.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use rustix::io::Errno;

use crate::map::MemoryMap;

/// Large mappings begin at a multiple of this.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Does nothing: pages are allocated at the first write.
pub(crate) fn to_write(_map: &MemoryMap, _stop: &AtomicBool) -> Result<(), Errno> {
    Ok(())
}

/// Does nothing: pages are mapped at the first read.
pub(crate) fn to_read(_map: &MemoryMap, _pages: &Range<usize>) {}
