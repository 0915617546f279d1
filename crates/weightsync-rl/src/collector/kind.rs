//! The kinds of collectors, as types: they decide what a
//! [`Builder`](super::Builder) offers and how a batch comes about.

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
pub trait Kind: Sealed {
    /// Whether a batch is from all workers together.
    const ALL_WORKERS: bool = false;
}

/// Collectors that have workers.
pub trait Remote: Kind {}

/// Collectors that can have several.
pub trait Many: Remote {}

/// Collectors whose batches are from one worker, first come, first served.
pub trait FirstCome: Remote {}

impl Kind for Here {}
impl Kind for Gathered {
    const ALL_WORKERS: bool = true;
}
impl Kind for FirstServed {}
impl Kind for OneWorker {}

impl Remote for Gathered {}
impl Remote for FirstServed {}
impl Remote for OneWorker {}

impl Many for Gathered {}
impl Many for FirstServed {}

impl FirstCome for FirstServed {}
impl FirstCome for OneWorker {}

/// What makes a batch of a kind.
pub(super) fn goal<K: Kind>() -> Goal {
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
