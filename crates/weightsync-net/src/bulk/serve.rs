//! The parent's end of a bulk link.

mod digests;
mod transfer;

use std::collections::HashMap;
use std::io::{self, IoSlice, Write};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use weightsync_core::Run;
use weightsync_core::delta::Scratch;
use weightsync_link::admission::{Admitted, ConnectionLimits, Doing};
use weightsync_link::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use weightsync_link::message::Message;
use weightsync_mem::threads::LockExt as _;

use self::transfer::Transfer;
use super::delta::{Delta, SpanCoding};
use super::stop::Threads;
use super::store::{BlockStore, HeldVersion};
use super::{IDLE, STUCK};
use crate::agent::Item;
use crate::wire::image::{SPAN, SPAN_BLOCKS};
use crate::wire::message::{ToChild, ToParent, WantedBlocks};
use weightsync_link::stream::{AsyncStream, Stream, keep_alive};

/// How many fetches are served at once; others wait for their turn.
const AT_ONCE: usize = 64;

/// How many children are told digests at once; others wait for their turn.
const DIGESTING: usize = 8;

/// How long a turn is while other fetches wait. A block that has begun is sent to its end.
const TURN: Duration = Duration::from_millis(250);

/// A block that takes longer than this to send is given up while others wait. A delta as large as
/// two blocks gets twice the time. At 1 Mbit/s a block takes 8.4 s, and 67 s if eight connections
/// share the link.
const ON_ITS_WAY: Duration = Duration::from_secs(75);

/// A child that sends no fetch for this long loses its connection; it connects again for its next
/// fetch.
const QUIET: Duration = Duration::from_secs(60);

/// How many children may be connected, whether they fetch or not, if there are descriptors for them.
/// One more closes the connection that has sent no fetch for the longest time.
const CHILDREN: usize = 32_768;

/// A turn must send this many bytes to be used for measuring a link. The first few MiB may only
/// fill buffers.
const TELLING: u64 = 16 << 20;

/// The speeds of this many links are remembered.
const REMEMBERED: usize = 1024;

/// The reason that a child gets when a newer version takes the place of the one it fetches.
const REPLACED: &str = "a newer version has replaced it";

/// What a parent reports while it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServeEvent {
    /// A child wants a version.
    Wanted { item: Item },
    /// The child no longer wants the version: it has it, or has gone.
    Unwanted { item: Item },
    /// This many bytes were sent to a child.
    Sent { bytes: u64 },
}

/// What a process serves, and how many fetches at once.
#[derive(Clone)]
pub(crate) struct Serving {
    pub(crate) run: Run,
    /// How many models there are.
    pub(crate) models: usize,
    pub(crate) store: Arc<BlockStore>,
    pub(crate) threads: Arc<Threads>,
    pub(crate) notify: Arc<dyn Fn(ServeEvent) + Send + Sync>,
    at_once: Arc<Semaphore>,
    children: Arc<Mutex<Admitted<Arc<Notify>>>>,
    most_children: usize,
    digesting: Arc<Semaphore>,
    /// The measured speed of the link to each child, in bytes a second.
    rates: Arc<Mutex<HashMap<u64, u64>>>,
    quiet: Duration,
}

impl Serving {
    pub(crate) fn new(
        (run, models): (Run, usize),
        store: Arc<BlockStore>,
        threads: Arc<Threads>,
        notify: impl Fn(ServeEvent) + Send + Sync + 'static,
    ) -> Self {
        Self {
            run,
            models,
            store,
            threads,
            notify: Arc::new(notify),
            at_once: Arc::new(Semaphore::new(AT_ONCE)),
            children: Arc::default(),
            most_children: CHILDREN,
            digesting: Arc::new(Semaphore::new(DIGESTING)),
            rates: Arc::default(),
            quiet: QUIET,
        }
    }

    /// Serves one child until it hangs up or has been quiet for too long. A child that waits costs
    /// a descriptor, but no thread: a sender may have thousands of them. One that asks for nothing
    /// may lose its connection to another one.
    pub(crate) async fn child(self, mut socket: AsyncStream) {
        let closed = Arc::new(Notify::new());
        let Some(child) = self.admit(&socket, closed.clone()) else {
            tracing::debug!("a relay below is not served: the limit is reached");
            return;
        };
        if let Err(error) = keep_alive(socket.socket()) {
            tracing::debug!("a relay below is served, but its host cannot be watched: {error}");
        }
        loop {
            let request = tokio::select! {
                // What a child has sent by then is answered.
                biased;
                request = read_request(&mut socket, self.quiet) => request,
                () = closed.notified() => return,
            };
            // From here on this connection is not closed for another one. It may have been closed
            // just before.
            if !child.note_doing(Doing::Busy) {
                return;
            }
            let answered = match request {
                Ok(Some(request)) => self.answer(socket, request).await,
                Ok(None) => return,
                Err(error) => Err(error),
            };
            match answered {
                Ok(Some(same)) if child.note_doing(Doing::Idle) => socket = same,
                Ok(Some(_)) => return,
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!("a relay below is no longer served: {error}");
                    return;
                }
            }
        }
    }

    /// Takes a child in, at the cost of an idle one if there are too many. `None`: all are busy.
    fn admit(&self, socket: &AsyncStream, closed: Arc<Notify>) -> Option<Connected> {
        let from = socket.socket().peer_addr().ok()?.ip();
        let mut children = self.children.locked();
        let room = ConnectionLimits::within_descriptors(self.most_children, children.count());
        let entered = children.enter(from, Doing::Idle, &room, closed);
        drop(children);
        let (number, idle) = entered.ok()?;
        // Its own task sees this, and ends.
        if let Some(idle) = idle {
            idle.notify_one();
        }
        Some(Connected {
            all: self.children.clone(),
            number,
        })
    }

    async fn answer(
        &self,
        socket: AsyncStream,
        request: ToParent,
    ) -> io::Result<Option<AsyncStream>> {
        match request {
            ToParent::Fetch(wanted) => self.fetch(socket, wanted).await,
            ToParent::Digests {
                run,
                model,
                version,
            } => {
                let model = model.into();
                self.digests(socket, run, Item { model, version }).await
            }
        }
    }

    /// Why this process can never have a version.
    fn has(&self, run: Run, item: Item) -> Result<(), &'static str> {
        if run != self.run {
            return Err("the version belongs to another run");
        }
        match item.model < self.models {
            true => Ok(()),
            false => Err("there is no such model"),
        }
    }

    async fn fetch(
        &self,
        mut socket: AsyncStream,
        fetch: WantedBlocks,
    ) -> io::Result<Option<AsyncStream>> {
        let mut transfer = Transfer::new(self.clone(), fetch);
        loop {
            // Between two turns a fetch has no thread.
            let Some(permit) = self.turn(&mut socket, &mut transfer).await? else {
                return Ok(Some(socket));
            };
            let work = move |stream: &mut Stream| {
                let is_over = transfer.serve_turn(stream)?;
                Ok::<_, io::Error>((transfer, is_over))
            };
            let Some((same, (rest, is_over))) = self.on_thread(socket, permit, work).await? else {
                return Ok(None);
            };
            (socket, transfer) = (same, rest);
            if is_over {
                return Ok(Some(socket));
            }
        }
    }

    /// Has a thread work on a connection, which is returned with the result; `None` if the process
    /// ends.
    async fn on_thread<T: Send + 'static>(
        &self,
        socket: AsyncStream,
        permit: OwnedSemaphorePermit,
        work: impl FnOnce(&mut Stream) -> io::Result<T> + Send + 'static,
    ) -> io::Result<Option<(AsyncStream, T)>> {
        // The socket blocks for the turn: the thread of the links must not be late for bulk data.
        let mut stream = socket.into_blocking()?;
        stream.socket().set_write_timeout(Some(STUCK))?;
        let Some(watched) = self.threads.watch(stream.socket())? else {
            return Ok(None);
        };
        let (done, is_done) = oneshot::channel();
        self.threads.spawn("serve", move || {
            let result = work(&mut stream);
            // Before the result is told, so that the next fetch begins at once.
            drop((watched, permit));
            // The child may have gone meanwhile; then nobody receives this.
            let _ = done.send(result.map(|result| (stream, result)));
        })?;
        // The thread has panicked, and the panic hook has reported that.
        let Ok(done) = is_done.await else {
            return Ok(None);
        };
        let (stream, result) = done?;
        Ok(Some((stream.into_async()?, result)))
    }

    /// Waits for this fetch's turn, and sends `Idle` meanwhile so that the child does not take the
    /// parent for dead. `None` if the version is revoked first; the child has then been notified.
    async fn turn(
        &self,
        socket: &mut AsyncStream,
        transfer: &mut Transfer,
    ) -> io::Result<Option<OwnedSemaphorePermit>> {
        // The same future throughout: a new one would be last in the queue again.
        let permit = self.at_once.clone().acquire_owned();
        tokio::pin!(permit);
        loop {
            if let Ok(permit) = tokio::time::timeout(IDLE, &mut permit).await {
                return Ok(permit.ok());
            }
            if transfer.is_revoked() {
                // Releases the version now. It should not stay pinned while the child reads the
                // reason.
                transfer.held = None;
                let reason = REPLACED.into();
                let gone = words(&ToChild::Gone { reason })?;
                in_time(STUCK, socket.write_all(&gone)).await?;
                return Ok(None);
            }
            let idle = words(&ToChild::Idle)?;
            tokio::select! {
                last_sent = in_time(STUCK, socket.write_all(&idle)) => last_sent?,
                // A part of the message may be out, so the connection cannot go on.
                () = transfer.revoked() => return Err(io::Error::other(REPLACED)),
            }
        }
    }

    /// The state of a span's delta; waits a moment if it is not known yet.
    fn delta_state<'a>(
        &self,
        delta: &'a Delta,
        held: &HeldVersion,
        index: usize,
        scratch: &mut Scratch,
    ) -> DeltaState<'a> {
        let blocks = index * SPAN_BLOCKS..held.blocks().min((index + 1) * SPAN_BLOCKS);
        // A block that arrived dense here has no delta to pass on.
        let came_dense = || !held.is_whole() && blocks.clone().all(|block| held.has(block));
        if held.is_revoked() {
            return DeltaState::Gone;
        }
        match delta.span(index, held.layout(), scratch) {
            Some(SpanCoding::Coded(coded)) => DeltaState::Ready(coded.sent(), coded.crc()),
            Some(SpanCoding::Dense) => DeltaState::Dense,
            None if came_dense() => DeltaState::Dense,
            None => {
                let known = || delta.is_known(index) || came_dense() || held.is_revoked();
                // Not longer, because the child needs a sign of life every `IDLE`.
                self.store.wait_until(known, IDLE);
                match self.store.is_closed() {
                    true => DeltaState::Gone,
                    false => DeltaState::NotYet,
                }
            }
        }
    }

    /// Notes how fast a transfer was. Time that the child waited counts too: an estimate that is
    /// too slow only costs a fold.
    fn note_rate(&self, agent: u64, bytes: u64, took: Duration) {
        if bytes < TELLING {
            return;
        }
        let mut rates = self.rates();
        // An agent's number is never used again, so the numbers of agents that are gone would pile
        // up.
        if rates.len() >= REMEMBERED && !rates.contains_key(&agent) {
            rates.clear();
        }
        rates.insert(agent, (bytes as f64 / took.as_secs_f64()) as u64);
    }

    fn rates(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        self.rates.locked()
    }

    /// Whether other fetches wait for a turn.
    fn others_wait(&self) -> bool {
        // The semaphore does not tell how many wait. Without a free permit somebody may.
        self.at_once.available_permits() == 0
    }
}

/// A child's connection, until this is dropped.
struct Connected {
    all: Arc<Mutex<Admitted<Arc<Notify>>>>,
    number: u64,
}

impl Connected {
    /// Notes what it does. False if its connection is closed for another one.
    fn note_doing(&self, doing: Doing) -> bool {
        self.all.locked().is_now(self.number, doing)
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.all.locked().leave(self.number);
    }
}

/// The state of a span's delta.
enum DeltaState<'a> {
    /// The delta and its checksum.
    Ready(&'a [u8], u64),
    /// The span is sent as blocks.
    Dense,
    NotYet,
    /// The version will not come.
    Gone,
}

/// The child's next message; `None` once it has hung up or been quiet for too long.
async fn read_request(socket: &mut AsyncStream, quiet: Duration) -> io::Result<Option<ToParent>> {
    let mut header = [0; HEADER_BYTES];
    // A child that has sent the first byte must send the rest promptly, so the longer limit is only
    // for that byte.
    let (first, rest) = header.split_at_mut(1);
    match tokio::time::timeout(quiet, socket.read_exact(first)).await {
        Err(_) => return Ok(None),
        Ok(Ok(_)) => {}
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Ok(Err(error)) => return Err(error),
    }
    in_time(STUCK, socket.read_exact(rest)).await?;
    let header = FrameHeader::decode(&header, &[FrameKind::Bulk]).map_err(invalid)?;
    let mut payload = vec![0; header.len];
    in_time(STUCK, socket.read_exact(&mut payload)).await?;
    header.check(&payload).map_err(invalid)?;
    ToParent::decode(&payload).map(Some).map_err(invalid)
}

async fn in_time<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let done = tokio::time::timeout(limit, work).await;
    done.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

fn send_gone(socket: &mut Stream, reason: &str) -> io::Result<()> {
    let reason = reason.into();
    send(socket, &ToChild::Gone { reason })
}

fn send(socket: &mut Stream, message: &ToChild) -> io::Result<()> {
    socket.write_all(&words(message)?)
}

fn words(message: &ToChild) -> io::Result<Vec<u8>> {
    message.frame().map_err(invalid)
}

/// Writes both buffers, unless that takes too long.
fn write_both(
    socket: &mut Stream,
    mut head: &[u8],
    mut bytes: &[u8],
    late: impl Fn() -> bool,
) -> io::Result<()> {
    debug_assert!(bytes.len() <= SPAN as usize);
    while !bytes.is_empty() || !head.is_empty() {
        // Before each write: a child that reads a little at a time never lets one write time out.
        if late() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // In one call, so that the head does not go out in a packet of its own.
        let slices = [IoSlice::new(head), IoSlice::new(bytes)];
        let written = match socket.write_vectored(&slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let of_head = written.min(head.len());
        head = &head[of_head..];
        bytes = &bytes[written - of_head..];
    }
    Ok(())
}

pub(super) fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests;
