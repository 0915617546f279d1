//! The sender tells the digests of a version's blocks, for children that do not trust relays.

use std::io;

use tokio::sync::oneshot;
use weightsync_core::Run;

use super::super::STUCK;
use super::{REPLACED, Serving, send, send_gone};
use crate::link::stream::{AsyncStream, Stream};
use crate::relay::Item;
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
        let mut stream = socket.into_blocking()?;
        stream.socket().set_write_timeout(Some(STUCK))?;
        let Some(watched) = self.threads.watch(stream.socket())? else {
            return Ok(None);
        };
        let (done, told) = oneshot::channel();
        let serving = self.clone();
        self.threads.spawn("weightsync-serve", move || {
            let result = serving.tell(&mut stream, run, item);
            drop((watched, permit));
            // The child may have gone meanwhile; then nobody receives this.
            let _ = done.send(result.map(|()| stream));
        })?;
        match told.await {
            Ok(stream) => stream?.into_async().map(Some),
            Err(_) => Ok(None),
        }
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
        let Some(_going) = held.goes_by(socket.socket())? else {
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
