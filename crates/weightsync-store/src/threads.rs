//! Work that several threads share.

use std::num::NonZero;
use weightsync_engine::transport::threads;

/// More threads gain nothing: memory, or the disk, is what limits.
const MOST: usize = 4;

/// Runs the same work on as many threads as are worth it for so many parts, this one among them.
pub(crate) fn run(parts: usize, work: impl Fn() + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let others = cores.min(MOST).min(parts).saturating_sub(1);
    std::thread::scope(|scope| {
        for _ in 0..others {
            // Without another thread, this one does all.
            let _ = threads::spawn_scoped(scope, "store", &work);
        }
        // The caller's thread works, too, and sees its own interruptions.
        work();
    });
}
