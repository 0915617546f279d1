//! The bells that end the other end's wait: eventfds, and an epoll of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};

use crate::error::{Error, os};

/// A bell that many threads ring and one listens to. Several rings add up to one.
#[derive(Debug)]
pub(crate) struct Doorbell(OwnedFd);

impl Doorbell {
    pub(crate) fn new() -> Result<Self, Error> {
        // Non-blocking: the end that rings must never wait because the counter is full.
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        rustix::event::eventfd(0, flags)
            .map(Self)
            .map_err(os("making an eventfd"))
    }

    /// A bell received from its owner.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    pub(crate) fn ring(&self) {
        // Fails only if the counter is full, so that it already rings, or if its owner is gone.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The sender's doorbells: one of its own, and one for each reader.
///
/// **Guarantee.** A reader can only ring. It cannot silence another reader's bell, nor make the
/// listener wait. Its bell costs no descriptor.
///
/// Each reader gets an eventfd of its own. The sender watches its *edges* (each ring is one) and
/// never reads it. So nothing that a reader does with it, such as reading it or making it blocking,
/// affects others. The sender closes its descriptor after handing the bell out: the kernel watches
/// the bell for as long as the reader has it.
#[derive(Debug)]
pub(crate) struct Doorbells {
    edges: OwnedFd,
    own: Arc<Doorbell>,
}

impl Doorbells {
    pub(crate) fn new() -> Result<Self, Error> {
        let edges = epoll::create(CreateFlags::CLOEXEC).map_err(os("making an epoll"))?;
        let own = Arc::new(Doorbell::new()?);
        let bells = Self { edges, own };
        bells.watch(&bells.own)?;
        Ok(bells)
    }

    /// The bell of this process.
    pub(crate) fn own(&self) -> &Arc<Doorbell> {
        &self.own
    }

    /// A new bell for a reader.
    pub(crate) fn for_reader(&self) -> Result<Doorbell, Error> {
        let bell = Doorbell::new()?;
        self.watch(&bell)?;
        Ok(bell)
    }

    pub(crate) fn ring(&self) {
        self.own.ring();
    }

    /// Forgets the rings so far: a later ring ends the next poll.
    pub(crate) fn silence(&self) {
        let mut rung = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 64];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // Once is enough: bells that do not fit into the buffer stay ready.
        let _ = epoll::wait(&self.edges, &mut rung, Some(&now));
    }

    fn watch(&self, bell: &Doorbell) -> Result<(), Error> {
        // Edge-triggered, so nobody has to read the eventfd: a level would stay until a read.
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&self.edges, bell, EventData::new_u64(0), edges)
            .map_err(os("watching a reader's bell"))
    }
}

impl AsFd for Doorbells {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.edges.as_fd()
    }
}
