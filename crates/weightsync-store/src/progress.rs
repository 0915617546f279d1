//! What a store says of its work while it does it.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::error::{Result, StoreError};

/// What a store does, for those who want to show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Work {
    /// So many bytes of weights are going to be read.
    Reads(u64),
    /// So many bytes of weights are going to be written.
    Writes(u64),
    /// So many more of them have been.
    Moved(u64),
}

/// Who is told. Its error ends the work: what was not finished is as if it had not begun.
#[derive(Clone)]
pub(crate) struct Progress(Arc<Told>);

type Told = dyn Fn(Work) -> io::Result<()> + Send + Sync;

impl Progress {
    pub(crate) fn new(told: impl Fn(Work) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(told))
    }

    pub(crate) fn moved(&self, bytes: usize) -> io::Result<()> {
        (self.0)(Work::Moved(bytes as u64))
    }

    /// `store` is named if the work ends here.
    pub(crate) fn begins(&self, store: &str, work: Work) -> Result<()> {
        (self.0)(work).map_err(StoreError::file("using", store))
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}
