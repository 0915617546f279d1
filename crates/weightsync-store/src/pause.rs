//! How long to wait before looking at a store again.

use std::time::{Duration, Instant};

use weightsync_engine::Error;
use weightsync_engine::transport::{Deadline, interrupt};

use crate::error::Result;
use crate::storage::Storage;

/// Pauses that grow while nothing happens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    last: Duration,
    next: Duration,
}

impl Pause {
    pub(crate) fn new(storage: &dyn Storage) -> Self {
        let (first, last) = storage.pauses();
        Self { last, next: first }
    }

    /// Sleeps, until the deadline at most. False if it has come.
    pub(crate) fn until(&mut self, deadline: Deadline) -> Result<bool> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        let pause = left.map_or(self.next, |left| left.min(self.next));
        interrupt::sleep(pause).map_err(Error::from)?;
        self.next = self.last.min(self.next * 5 / 4);
        Ok(true)
    }
}
