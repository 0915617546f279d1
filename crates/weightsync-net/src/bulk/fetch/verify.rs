//! Compares what a relay sent with the sender's digests.

use std::io;
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use weightsync_link::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use weightsync_link::message::Message;
use weightsync_mem::threads::LockExt as _;

use super::super::serve::invalid;
use super::requested::Requested;
use super::{FetchTask, Misbehaved, Parent, read_exact, read_message};
use crate::agent::backoff;
use crate::bulk::PATIENCE;
use crate::wire::image::BLOCK_BYTES;
use crate::wire::message::{DIGEST_BYTES, ToChild, ToParent};

impl FetchTask {
    /// The sender, if this fetch compares blocks with its digests. What comes from the sender
    /// needs no digest: it comes by the same kind of link as the digests.
    fn teller(&self) -> Option<Parent> {
        let address = self
            .connections
            .digests
            .filter(|_| self.parent.agent != 0)?;
        Some(Parent { agent: 0, address })
    }

    pub(super) fn verifies(&self) -> bool {
        self.teller().is_some()
    }

    /// Begins to ask the sender for the digests of all blocks, if they are needed and not here.
    pub(super) fn ask_digests(self: Arc<Self>) {
        let Some(sender) = self.teller().filter(|_| self.next_unknown().is_some()) else {
            return;
        };
        let (own, threads) = (self.clone(), self.threads.clone());
        let work = move || {
            let mut backoff = backoff();
            while !own.is_over() {
                let read = own.read_digests(sender);
                // This connection is over. The next attempt notes one of its own.
                *own.digests() = None;
                match read {
                    Ok(()) => return,
                    Err(error) => {
                        tracing::debug!("the digests of {:?} do not come: {error}", own.item);
                        own.store.wait_until(|| own.is_over(), backoff.pause());
                    }
                }
            }
        };
        if let Err(error) = threads.spawn("digests", work) {
            // The blocks that wait for digests say in the end that none came.
            tracing::warn!("the digests of {:?} are not asked for: {error}", self.item);
        }
    }

    /// Ends the reading of digests: nothing waits for one any more.
    pub(super) fn end_digests(&self) {
        if let Some(socket) = self.digests().take() {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        // The thread may be in the pause between two attempts.
        self.store.notify();
    }

    fn digests(&self) -> MutexGuard<'_, Option<TcpStream>> {
        self.digests.locked()
    }

    fn next_unknown(&self) -> Option<usize> {
        (0..self.held.blocks()).find(|index| self.held.digest(*index).is_none())
    }

    fn read_digests(&self, sender: Parent) -> io::Result<()> {
        let note = |socket| *self.digests() = Some(socket);
        let Some(mut socket) = self.connect(sender, note)? else {
            return Ok(());
        };
        let Some(_watched) = self.threads.watch(socket.socket())? else {
            return Ok(());
        };
        // Others may be told first. A sender that is gone ends the fetch by the control link.
        socket.socket().set_read_timeout(Some(PATIENCE))?;
        let request = ToParent::Digests {
            run: self.connections.run,
            model: self.item.model as u8,
            version: self.item.version,
        };
        socket.write_all(&request.frame().map_err(invalid)?)?;
        let mut next = 0;
        loop {
            let mut header = [0; HEADER_BYTES];
            read_exact(&mut socket, &mut header)?;
            let header = FrameHeader::decode(&header, &[FrameKind::Bulk]).map_err(invalid)?;
            match read_message(&mut socket, &header)? {
                ToChild::Idle => {}
                ToChild::End => match self.next_unknown() {
                    Some(index) => return Err(invalid(Misbehaved::Unsent { index })),
                    None => return Ok(()),
                },
                ToChild::Gone { .. } => {
                    self.digests_gone.store(true, Ordering::Release);
                    self.store.notify();
                    return Ok(());
                }
                ToChild::Digests { digests } => {
                    let (digests, _) = digests.as_chunks::<DIGEST_BYTES>();
                    for digest in digests {
                        // An earlier attempt may have noted the digests before the connection
                        // broke.
                        if !self.held.note_digest(next, *digest) {
                            return Err(invalid(Misbehaved::Contradicts { index: next }));
                        }
                        next += 1;
                    }
                    self.store.notify();
                }
            }
        }
    }

    /// Compares a block, or the blocks of a span from this index on, with the sender's digests.
    /// Waits for a digest that is still to come.
    pub(super) fn verify(
        &self,
        first: usize,
        bytes: &[u8],
        requested: &mut Requested<'_>,
    ) -> io::Result<()> {
        if !self.verifies() {
            return Ok(());
        }
        for (at, block) in bytes.chunks(BLOCK_BYTES as usize).enumerate() {
            let index = first + at;
            let known = || self.held.digest(index).is_some();
            let over = || self.is_stopped() || self.digests_gone.load(Ordering::Acquire);
            if !known() {
                // Nothing is read from the parent meanwhile, so it may give the connection up.
                requested.digest_was_late = true;
                self.store.wait_until(|| known() || over(), PATIENCE);
            }
            // Also after a stop, or once the sender has no such version. `end` tells these apart.
            let Some(expected) = self.held.digest(index) else {
                return Err(invalid(Misbehaved::Untold { index }));
            };
            if blake3::hash(block) != *expected {
                let _ = self.altered.set(index);
                // The other connections to this parent could hold the report up.
                self.stop();
                return Err(invalid(Misbehaved::Altered { index }));
            }
        }
        Ok(())
    }
}
