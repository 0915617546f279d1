//! The bells that end the other end's wait: a pair of sockets, since there is no eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use crate::error::{Error, os};
use crate::socket::pair;

/// A bell that many threads ring and one listens to. Several rings add up to one.
#[derive(Debug)]
pub(crate) struct Doorbell {
    rings: OwnedFd,
    /// `None` for a bell of another owner, which can only be rung.
    listens: Option<OwnedFd>,
}

impl Doorbell {
    pub(crate) fn new() -> Result<Self, Error> {
        let (rings, listens) = pair()?;
        Ok(Self {
            rings,
            listens: Some(listens),
        })
    }

    /// A bell received from its owner.
    pub(crate) fn from_fd(rings: OwnedFd) -> Self {
        Self {
            rings,
            listens: None,
        }
    }

    pub(crate) fn ring(&self) {
        // Fails only if the socket is full, so that it already rings, or if its owner is gone.
        let _ = rustix::io::write(&self.rings, &[1]);
    }

    pub(crate) fn silence(&self) {
        let Some(listens) = &self.listens else {
            return;
        };
        // A full read may have left some behind.
        let mut rung = [0; 64];
        while matches!(
            rustix::io::read(listens, &mut rung),
            Ok(64) | Err(Errno::INTR)
        ) {}
    }
}

/// The end to listen at, or of another owner's bell the end to ring.
impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listens.as_ref().unwrap_or(&self.rings).as_fd()
    }
}

/// The sender's doorbell, and those of its readers, which all ring it.
///
/// Readers are of this process here, so they need no bells that keep them apart.
#[derive(Debug)]
pub(crate) struct Doorbells {
    own: Arc<Doorbell>,
}

impl Doorbells {
    pub(crate) fn new() -> Result<Self, Error> {
        let own = Arc::new(Doorbell::new()?);
        Ok(Self { own })
    }

    /// The bell of this process.
    pub(crate) fn own(&self) -> &Arc<Doorbell> {
        &self.own
    }

    /// A new bell for a reader.
    pub(crate) fn for_reader(&self) -> Result<Doorbell, Error> {
        rustix::io::fcntl_dupfd_cloexec(&self.own.rings, 0)
            .map(Doorbell::from_fd)
            .map_err(os("making a reader's bell"))
    }

    pub(crate) fn ring(&self) {
        self.own.ring();
    }

    /// Forgets the rings so far: a later ring ends the next poll.
    pub(crate) fn silence(&self) {
        self.own.silence();
    }
}

impl AsFd for Doorbells {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }
}
