//! The kinds of collectors, as types: they decide what a
//! [`CollectorBuilder`](super::CollectorBuilder) offers and how a batch comes about.

use super::schedule::Goal;

/// In the caller's own thread.
#[derive(Clone, Copy, Debug)]
pub struct Here;

/// A batch is gathered from all workers.
#[derive(Clone, Copy, Debug)]
pub struct Gathered;

/// A batch is the part of whichever worker is first.
#[derive(Clone, Copy, Debug)]
pub struct FirstServed;

/// The same with one worker.
#[derive(Clone, Copy, Debug)]
pub struct OneWorker;

/// A kind of collector; the other traits say what else there is to set.
#[expect(private_bounds, reason = "no other kind can be made")]
pub trait CollectorKind: Sealed {
    /// Whether a batch is from all workers together.
    const ALL_WORKERS: bool = false;
}

/// Collectors that have workers.
pub trait Remote: CollectorKind {}

/// Collectors that can have several.
pub trait Many: Remote {}

/// Collectors whose batches are from one worker, first come, first served.
pub trait FirstCome: Remote {}

impl CollectorKind for Here {}
impl CollectorKind for Gathered {
    const ALL_WORKERS: bool = true;
}
impl CollectorKind for FirstServed {}
impl CollectorKind for OneWorker {}

impl Remote for Gathered {}
impl Remote for FirstServed {}
impl Remote for OneWorker {}

impl Many for Gathered {}
impl Many for FirstServed {}

impl FirstCome for FirstServed {}
impl FirstCome for OneWorker {}

/// What makes a batch of a kind.
pub(super) fn goal<K: CollectorKind>() -> Goal {
    if K::ALL_WORKERS {
        Goal::Everyone
    } else {
        Goal::Anyone
    }
}

trait Sealed {}
impl Sealed for Here {}
impl Sealed for Gathered {}
impl Sealed for FirstServed {}
impl Sealed for OneWorker {}
