//! Faults the pages of a mapping in before they are used, with several threads, and as huge
//! pages where the kernel has some.
//!
//! Page faults are nearly all of the cost of a first send. With pages of 4 KiB, 1 GiB takes 0.5
//! s to make and 0.1 s in each reader. With huge pages it takes 0.07 s and no time in the
//! readers (Linux 6.18, two cores of a shared EPYC).

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::Advice;

use crate::map::MemoryMap;
use crate::threads;

/// The size of a huge page on x86-64, and on aarch64 with its usual pages. Where huge pages are
/// larger, small pages are used.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// How many bytes one thread faults in at a time.
const PIECE: usize = 64 << 20;

/// The most threads: with more, they wait for memory and for each other.
const MAX_THREADS: usize = 8;

/// How long the kernel may take to find huge pages for a piece. It moves other pages out of their
/// way, or the host of a virtual machine has to supply memory, for which small pages wait too.
///
/// First sends of 1 GiB to four readers took 0.2 to 1.1 s with 150 ms (those above 0.8 s had given
/// up), 0.15 to 0.4 s with 400 ms, 0.3 to 1 s with 2 s, and 0.7 to 3 s without huge pages
/// (six runs each in turn, Linux 6.18, two cores of a virtual machine).
const PATIENCE: Duration = Duration::from_millis(400);

/// Allocates and maps every page of a shared mapping for writing. Once `stop` is set, only pieces
/// that have begun are finished.
///
/// # Errors
///
/// [`Errno::NOMEM`] or [`Errno::FAULT`] if memory runs out, [`Errno::INVAL`] before Linux 5.14.
pub(crate) fn to_write(map: &MemoryMap, stop: &AtomicBool) -> Result<(), Errno> {
    // Asks for huge pages at the first touch, where shared memory may have them (`shmem_enabled`).
    // Fails in kernels without them.
    if map.len() >= HUGE_PAGE {
        let _ = advise(map, &(0..map.len()), Advice::LinuxHugepage);
    }
    let huge = AtomicBool::new(true);
    in_pieces(0..map.len(), |piece| {
        // The caller looks at `stop` as well, and then does not use the mapping.
        if stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Once the kernel has no huge pages or takes too long for them, the pieces that follow do
        // not try.
        if huge.load(Ordering::Relaxed) && !collapse(map, &piece)? {
            huge.store(false, Ordering::Relaxed);
        }
        // Also after a collapse: the end of a piece may be less than a huge page.
        advise(map, &piece, Advice::LinuxPopulateWrite)
    })
}

/// Maps pages for reading.
pub(crate) fn to_read(map: &MemoryMap, pages: &Range<usize>) {
    // A failure costs only time; kernels before 5.14 do not know the advice.
    let _ = in_pieces(pages.clone(), |piece| {
        advise(map, &piece, Advice::LinuxPopulateRead)
    });
}

/// Has the kernel collapse a piece into huge pages, which it does for any `shmem_enabled` except
/// `deny`, since Linux 6.1. False if the next piece need not try.
fn collapse(map: &MemoryMap, piece: &Range<usize>) -> Result<bool, Errno> {
    // Only whole huge pages. Pieces begin at multiples of them, as the mapping does.
    let pages = piece.start..piece.start + piece.len() / HUGE_PAGE * HUGE_PAGE;
    if pages.is_empty() {
        return Ok(true);
    }
    let since = Instant::now();
    // Touches one small page of each: without one there is nothing to collapse.
    for start in pages.clone().step_by(HUGE_PAGE) {
        let first = start..start + rustix::param::page_size();
        advise(map, &first, Advice::LinuxPopulateWrite)?;
    }
    let start = map.at(&pages);
    // SAFETY: the range is inside this mapping; its bytes stay the same.
    let done = unsafe { libc::madvise(start, pages.len(), libc::MADV_COLLAPSE) };
    let error = std::io::Error::last_os_error().raw_os_error();
    // A page that was in use for a moment does not mean that others will fail.
    let goes = done == 0 || matches!(error, Some(libc::EAGAIN | libc::EBUSY));
    Ok(goes && since.elapsed() < PATIENCE)
}

fn advise(map: &MemoryMap, pages: &Range<usize>, advice: Advice) -> Result<(), Errno> {
    let start = map.at(pages);
    // SAFETY: the range is inside this mapping; no byte of it changes by this advice.
    rustix::io::retry_on_intr(|| unsafe { rustix::mm::madvise(start, pages.len(), advice) })
}

/// Works on all pieces, in any order; returns the first failure.
fn in_pieces(
    pages: Range<usize>,
    work: impl Fn(Range<usize>) -> Result<(), Errno> + Sync,
) -> Result<(), Errno> {
    // Threads take the next piece when they are done with one, because some take far longer than
    // others.
    let count = pages.len().div_ceil(PIECE);
    let next = AtomicUsize::new(0);
    let take = || {
        let start = pages.start + next.fetch_add(1, Ordering::Relaxed) * PIECE;
        (start < pages.end).then(|| start..pages.end.min(start + PIECE))
    };
    let run = || std::iter::from_fn(take).try_for_each(&work);
    if count <= 1 {
        return run();
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..cores.min(count).min(MAX_THREADS))
            .map_while(|_| {
                // If a thread cannot start, the others do its work.
                threads::spawn_scoped(scope, "fault", run).ok()
            })
            .collect();
        // This thread works as well, so the work is done even if no other thread could start.
        let own = run();
        others.into_iter().fold(own, |done, thread| {
            let other = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done.and(other)
        })
    })
}

#[cfg(test)]
mod tests;
