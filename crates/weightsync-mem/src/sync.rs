//! The atomics of the protocol: the real ones, or loom's when loom checks the protocol (`--cfg
//! loom`).

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Loads a word that another process writes and this one maps read-only. What was stored
/// before the value that is found is visible from here on.
///
/// Of memory that cannot be written std promises relaxed loads alone, so a fence behind the
/// load takes the place of an acquire load.
pub fn load_acquire(word: &AtomicU64) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}
