//! The sender tells the digests of a version's blocks, for children that do not trust relays.

use std::io;

use weightsync_core::Run;
use weightsync_link::stream::{AsyncStream, Stream};

use super::{REPLACED, Serving, send, send_gone};
use crate::agent::Item;
use crate::wire::message::{DIGEST_BYTES, ToChild};

/// The digests of this many blocks go out at once: the child can go on while others are made.
const BATCH: usize = 32;

impl Serving {
    /// Answers a request for digests. Returns the connection, unless the process ends.
    pub(super) async fn digests(
        &self,
        socket: AsyncStream,
        run: Run,
        item: Item,
    ) -> io::Result<Option<AsyncStream>> {
        // The semaphore is never closed.
        let Ok(permit) = self.digesting.clone().acquire_owned().await else {
            return Ok(None);
        };
        let serving = self.clone();
        let work = move |stream: &mut Stream| serving.tell(stream, run, item);
        let done = self.on_thread(socket, permit, work).await?;
        Ok(done.map(|(socket, ())| socket))
    }

    fn tell(&self, socket: &mut Stream, run: Run, item: Item) -> io::Result<()> {
        if let Err(reason) = self.has(run, item) {
            return send_gone(socket, reason);
        }
        if !self.store.is_sender() {
            return send_gone(socket, "only the sender tells digests");
        }
        let Some(held) = self.store.get(item) else {
            return send_gone(socket, "it is no longer kept");
        };
        // A revocation then ends a write to a child that does not read.
        let Some(_registered) = held.register(socket.socket())? else {
            // A version that is held keeps a slot, and the child may read slowly.
            drop(held);
            return send_gone(socket, REPLACED);
        };
        let blocks: Vec<usize> = (0..held.blocks()).collect();
        for batch in blocks.chunks(BATCH) {
            let mut digests = Vec::with_capacity(batch.len() * DIGEST_BYTES);
            for index in batch {
                match held.make_digest(*index).filter(|_| !held.is_revoked()) {
                    Some(digest) => digests.extend_from_slice(digest),
                    None => return send_gone(socket, REPLACED),
                }
            }
            send(socket, &ToChild::Digests { digests })?;
        }
        send(socket, &ToChild::End)
    }
}
