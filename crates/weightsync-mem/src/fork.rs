//! Telling a forked child from the process that opened an end, without a system
//! call per use.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// This process's number, as [`std::process::id`] but in a nanosecond: ends ask at
/// every use whether they were opened here.
///
/// It is kept in a page that a fork wipes (`MADV_WIPEONFORK`, Linux 4.14), so
/// that it is asked for once per process and still right in every child.
pub fn process_id() -> u32 {
    static PAGE: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    let Some(known) = PAGE.get_or_init(wiped_on_fork) else {
        return std::process::id();
    };
    match known.load(Ordering::Relaxed) {
        0 => {
            let own = std::process::id();
            known.store(own, Ordering::Relaxed);
            own
        }
        own => own,
    }
}

/// A zero that is zero again in every forked child. `None` where the kernel
/// cannot do it.
fn wiped_on_fork() -> Option<&'static AtomicU32> {
    const PAGE: usize = 4096;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel picks an unused address range, so no existing memory is
    // affected.
    let page =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, prot, MapFlags::PRIVATE) }
            .ok()?;
    // SAFETY: the range is exactly the page mapped above.
    if unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: the page was mapped above and nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(page, PAGE) };
        return None;
    }
    // SAFETY: the page is mapped readable and writable, aligned, never unmapped,
    // and accessed through this atomic alone.
    Some(unsafe { AtomicU32::from_ptr(page.cast()) })
}
