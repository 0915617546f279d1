//! The atomics the protocol is written in: the real ones, or loom's when the
//! protocol is being model-checked (`--cfg loom`).

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU64, Ordering, fence};
