//! The parent's end of a bulk link.

use std::collections::HashMap;
use std::io::{self, IoSlice, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use weightsync_core::delta::Scratch;
use weightsync_core::{Run, Version};

use super::delta::{Delta, Span};
use super::stop::Threads;
use super::store::{BlockState, Held, Store};
use super::{IDLE, PATIENCE, STUCK};
use crate::relay::Item;
use crate::wire::frame::{
    BLOCK, BlockHead, DeltaHead, HEADER_BYTES, Header, Kind, SPAN, SPAN_BLOCKS,
};
use crate::wire::message::{Message, ToChild, ToParent};

/// A waiting child is given up when its host has not answered for this long.
const OUT_OF_REACH: Duration = Duration::from_secs(12);

/// How many fetches are served at once; others wait for their turn.
const AT_ONCE: usize = 64;

/// How long a turn is while other fetches wait. A block that has begun is sent to its end.
const TURN: Duration = Duration::from_millis(250);

/// A block that takes longer than this to send is given up while others wait. A delta as large as
/// two blocks gets twice the time. At 1 Mbit/s a block takes 8.4 s, and 67 s if eight connections
/// share the link.
const ON_ITS_WAY: Duration = Duration::from_secs(75);

/// A child that sends no fetch for this long loses its connection; it connects again for its next
/// fetch.
const QUIET: Duration = Duration::from_secs(60);

/// How many children may be connected, whether they fetch or not.
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
pub(crate) enum Served {
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
    pub(crate) store: Arc<Store>,
    pub(crate) threads: Arc<Threads>,
    pub(crate) notify: Arc<dyn Fn(Served) + Send + Sync>,
    at_once: Arc<Semaphore>,
    children: Arc<Semaphore>,
    /// The measured speed of the link to each child, in bytes a second.
    rates: Arc<Mutex<HashMap<u64, u64>>>,
    quiet: Duration,
}

impl Serving {
    pub(crate) fn new(
        (run, models): (Run, usize),
        store: Arc<Store>,
        threads: Arc<Threads>,
        notify: impl Fn(Served) + Send + Sync + 'static,
    ) -> Self {
        Self {
            run,
            models,
            store,
            threads,
            notify: Arc::new(notify),
            at_once: Arc::new(Semaphore::new(AT_ONCE)),
            children: Arc::new(Semaphore::new(CHILDREN)),
            rates: Arc::default(),
            quiet: QUIET,
        }
    }

    /// Serves one child until it hangs up or has been quiet for too long. A child that waits costs
    /// a descriptor, but no thread: a sender may have thousands of them.
    pub(crate) async fn child(self, mut socket: tokio::net::TcpStream) {
        let Ok(_one) = self.children.clone().try_acquire_owned() else {
            tracing::debug!("a relay below is not served: the limit is reached");
            return;
        };
        if let Err(error) = keep_alive(&socket) {
            tracing::debug!("a relay below is served, but its host cannot be watched: {error}");
        }
        loop {
            match self.fetch(socket).await {
                Ok(Some(same)) => socket = same,
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!("a relay below is no longer served: {error}");
                    return;
                }
            }
        }
    }

    async fn fetch(
        &self,
        mut socket: tokio::net::TcpStream,
    ) -> io::Result<Option<tokio::net::TcpStream>> {
        let Some(fetch) = read_fetch(&mut socket, self.quiet).await? else {
            return Ok(None);
        };
        let mut transfer = Transfer::new(self.clone(), fetch);
        loop {
            let Some(permit) = self.turn(&mut socket, &mut transfer).await? else {
                return Ok(Some(socket));
            };
            let mut plain = socket.into_std()?;
            plain.set_nonblocking(false)?;
            plain.set_write_timeout(Some(STUCK))?;
            let Some(watched) = self.threads.watch(&plain)? else {
                return Ok(None);
            };
            let (done, served) = oneshot::channel();
            self.threads.spawn("weightsync-serve", move || {
                let result = transfer.go_on(&mut plain);
                drop((watched, permit));
                // The child may have gone meanwhile; then nobody receives this.
                let _ = done.send((transfer, result.map(|over| (plain, over))));
            })?;
            let Ok((same, result)) = served.await else {
                return Ok(None);
            };
            let (plain, over) = result?;
            plain.set_nonblocking(true)?;
            socket = tokio::net::TcpStream::from_std(plain)?;
            if over {
                return Ok(Some(socket));
            }
            transfer = same;
        }
    }

    /// Waits for this fetch's turn, and sends `Idle` meanwhile so that the child does not take the
    /// parent for dead. `None` if the version is revoked first; the child has then been notified.
    async fn turn(
        &self,
        socket: &mut tokio::net::TcpStream,
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
                () = transfer.revoked() => return Err(io::Error::other(REPLACED)),
            }
        }
    }

    /// Looks up the delta of a span, and waits a moment if it is not known yet.
    fn look<'a>(
        &self,
        delta: &'a Delta,
        held: &Held,
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
            Some(Span::Coded(coded)) => DeltaState::Ready(coded.sent(), coded.crc()),
            Some(Span::Dense) => DeltaState::Dense,
            None if came_dense() => DeltaState::Dense,
            None => {
                let known = || delta.is_known(index) || came_dense() || held.is_revoked();
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
        if rates.len() >= REMEMBERED && !rates.contains_key(&agent) {
            rates.clear();
        }
        rates.insert(agent, (bytes as f64 / took.as_secs_f64()) as u64);
    }

    fn rates(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        // Each change is one insertion, so the map is valid after a panic.
        self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether other fetches wait for a turn.
    fn others_wait(&self) -> bool {
        self.at_once.available_permits() == 0
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

/// Decides whether to give up a block or delta that is being sent.
struct Lateness<'a> {
    serving: &'a Serving,
    begun: Instant,
    limit: Duration,
}

impl<'a> Lateness<'a> {
    /// Starts the clock for a block or delta of this many bytes.
    fn new(serving: &'a Serving, bytes: usize) -> Self {
        let blocks = bytes.div_ceil(BLOCK as usize).max(1) as u32;
        Self {
            serving,
            begun: Instant::now(),
            limit: ON_ITS_WAY * blocks,
        }
    }

    fn is_so(&self) -> bool {
        self.begun.elapsed() >= self.limit && self.serving.others_wait()
    }
}

/// The blocks of a whole span, if `left` begins with all of them; otherwise none.
fn span_of(left: &[usize], blocks: usize) -> &[usize] {
    let first = left.first().copied().unwrap_or_default();
    let count = SPAN_BLOCKS.min(blocks.saturating_sub(first));
    let begins = first.is_multiple_of(SPAN_BLOCKS) && left.len() >= count && count > 0;
    match begins && left[count - 1] == first + count - 1 {
        true => &left[..count],
        false => &[],
    }
}

/// A fetch that is served in one turn or several.
struct Transfer {
    serving: Serving,
    fetch: ToParent,
    /// When its first turn began.
    since: Option<Instant>,
    /// When something was last sent to the child.
    last_sent: Instant,
    held: Option<Arc<Held>>,
    /// How many of the requested blocks have been sent.
    done: usize,
}

/// How a turn ended.
enum End {
    /// The fetch has ended.
    Over,
    /// Other fetches wait: it is their turn.
    Turn,
}

impl Transfer {
    fn new(serving: Serving, fetch: ToParent) -> Self {
        Self {
            serving,
            fetch,
            since: None,
            last_sent: Instant::now(),
            held: None,
            done: 0,
        }
    }

    fn item(&self) -> Item {
        let &ToParent::Fetch { model, version, .. } = &self.fetch;
        Item {
            model: model.into(),
            version,
        }
    }

    /// Serves one turn. True if the fetch has ended, false if it is another fetch's turn.
    fn go_on(&mut self, socket: &mut TcpStream) -> io::Result<bool> {
        let item = self.item();
        let &ToParent::Fetch { run, agent, .. } = &self.fetch;
        if run != self.serving.run {
            send_gone(socket, "the version belongs to another run")?;
            return Ok(true);
        }
        if item.model >= self.serving.models {
            send_gone(socket, "there is no such model")?;
            return Ok(true);
        }
        if self.since.is_none() {
            self.since = Some(Instant::now());
            (self.serving.notify)(Served::Wanted { item });
        }
        let (mut bytes, begun) = (0, Instant::now());
        let end = self.serve(socket, &mut bytes);
        self.serving.note_rate(agent, bytes, begun.elapsed());
        // Between two turns the version stays held, so that the fetch can go on.
        if !matches!(end, Ok(End::Turn)) {
            self.since = None;
            if let Some(held) = self.held.take().filter(|_| end.is_err()) {
                self.serving.store.broke_off(item, held);
            }
            (self.serving.notify)(Served::Unwanted { item });
        }
        if bytes > 0 {
            (self.serving.notify)(Served::Sent { bytes });
        }
        if let Err(error) = &end {
            tracing::debug!("agent {agent} did not get all of {item:?}: {error}");
        }
        end.map(|end| matches!(end, End::Over))
    }

    /// Sends the requested blocks for one turn, and adds the bytes sent to `sent`.
    fn serve(&mut self, socket: &mut TcpStream, sent: &mut u64) -> io::Result<End> {
        let begun = Instant::now();
        let held = match self.held.clone() {
            Some(held) => held,
            None => match self.find(socket, begun)? {
                Ok(held) => held,
                Err(end) => return Ok(end),
            },
        };
        self.held = Some(held.clone());
        let Some(_going) = held.goes_by(socket)? else {
            // Released before the child hears of it: a version that is held keeps a slot, and the
            // child may read slowly.
            self.held = None;
            drop(held);
            send_gone(socket, REPLACED)?;
            return Ok(End::Over);
        };
        let (item, serving) = (self.item(), self.serving.clone());
        let ToParent::Fetch { agent, ranges, .. } = &self.fetch;
        // Ranges ascend and do not overlap. So the end of the last one bounds the work that
        // follows.
        let behind = ranges.last().and_then(|range| range.end());
        if behind.is_some_and(|behind| behind as usize > held.blocks()) {
            send_gone(socket, "the version has fewer blocks than were requested")?;
            return Ok(End::Over);
        }
        let indices = ranges.iter().flat_map(|range| {
            let first = range.first as usize;
            first..first + range.count as usize
        });
        let indices: Vec<usize> = indices.skip(self.done).collect();
        let delta = self.base().and_then(|base| {
            let deltas = serving.store.deltas();
            // The sender may be comparing the version now: a short wait can save sending it whole.
            let known = || !deltas.is_announced();
            serving.store.wait_until(known, IDLE);
            deltas.find(item, base, serving.rates().get(agent).copied())
        });
        let mut scratch = Scratch::new();
        let mut left = &indices[..];
        while let Some(&index) = left.first() {
            if begun.elapsed() >= TURN && serving.others_wait() {
                return Ok(End::Turn);
            }
            let span = span_of(left, held.blocks());
            let whole = delta.as_ref().filter(|_| !span.is_empty());
            if let Some(delta) = whole {
                let index = index / SPAN_BLOCKS;
                match serving.look(delta, &held, index, &mut scratch) {
                    DeltaState::Ready(bytes, crc) => {
                        let head = DeltaHead {
                            model: item.model as u8,
                            version: item.version,
                            base: delta.base(),
                            index: index as u32,
                            bytes: bytes.len() as u32,
                            crc,
                            image_bytes: held.image_bytes(),
                        };
                        let late = Lateness::new(&serving, bytes.len());
                        write_both(socket, &head.frame(), bytes, || late.is_so())?;
                        *sent += (head.frame().len() + bytes.len()) as u64;
                        self.went(span.len());
                        left = &left[span.len()..];
                        // Folding the span has made the delta larger.
                        if delta.is_folded() {
                            serving.store.deltas().trim(item.model);
                        }
                        continue;
                    }
                    DeltaState::NotYet => {
                        self.send_idle(socket)?;
                        continue;
                    }
                    DeltaState::Gone => {
                        send_gone(socket, REPLACED)?;
                        return Ok(End::Over);
                    }
                    DeltaState::Dense => {}
                }
            }
            match serving.store.block(&held, index, IDLE) {
                BlockState::Ready(bytes, crc) => {
                    let head = BlockHead {
                        model: item.model as u8,
                        version: item.version,
                        index: index as u32,
                        bytes: bytes.len() as u32,
                        crc,
                        image_bytes: held.image_bytes(),
                    };
                    let late = Lateness::new(&serving, bytes.len());
                    write_both(socket, &head.frame(), bytes, || late.is_so())?;
                    *sent += bytes.len() as u64;
                    self.went(1);
                    left = &left[1..];
                }
                BlockState::NotYet => self.send_idle(socket)?,
                BlockState::Gone => {
                    send_gone(socket, REPLACED)?;
                    return Ok(End::Over);
                }
            }
        }
        send(socket, &ToChild::End)?;
        Ok(End::Over)
    }

    /// The version once part of it is here, or how the turn ends without it.
    fn find(
        &mut self,
        socket: &mut TcpStream,
        begun: Instant,
    ) -> io::Result<Result<Arc<Held>, End>> {
        let (item, serving) = (self.item(), self.serving.clone());
        let store = &serving.store;
        let since = self.since.unwrap_or(begun);
        loop {
            if let Some(held) = store.get(item) {
                return Ok(Ok(held));
            }
            let over = store.is_sender() || since.elapsed() > PATIENCE;
            if over || store.is_refused(item, since) {
                send_gone(socket, "it is no longer kept")?;
                return Ok(Err(End::Over));
            }
            if begun.elapsed() >= TURN && serving.others_wait() {
                return Ok(Err(End::Turn));
            }
            store.wait_for(item, IDLE);
            self.send_idle(socket)?;
        }
    }

    /// The older version that the child has.
    fn base(&self) -> Option<Version> {
        let ToParent::Fetch { base, .. } = self.fetch;
        base
    }

    /// Notes that this many more blocks were sent.
    fn went(&mut self, blocks: usize) {
        self.last_sent = Instant::now();
        self.done += blocks;
    }

    /// Whether the version is no longer served.
    fn is_revoked(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_revoked())
    }

    /// Ends once the version is no longer served.
    async fn revoked(&self) {
        while !self.is_revoked() {
            tokio::time::sleep(IDLE).await;
        }
    }

    /// Sends `Idle` if nothing was sent for a while.
    fn send_idle(&mut self, socket: &mut TcpStream) -> io::Result<()> {
        if self.last_sent.elapsed() < IDLE {
            return Ok(());
        }
        self.last_sent = Instant::now();
        send(socket, &ToChild::Idle)
    }
}

impl Drop for Transfer {
    /// The child left while its fetch waited for a turn.
    fn drop(&mut self) {
        if self.since.is_none() {
            return;
        }
        let (notify, item) = (self.serving.notify.clone(), self.item());
        // Reporting may block, which no async task may do.
        let spawned = self.serving.threads.spawn("weightsync-serve", move || {
            notify(Served::Unwanted { item });
        });
        if let Err(error) = spawned {
            tracing::warn!("{item:?} still counts as wanted: {error}");
        }
    }
}

/// Enables TCP keep-alive: the system notices when a waiting child's host is gone.
fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, OUT_OF_REACH / 2)?;
    sockopt::set_tcp_keepintvl(socket, OUT_OF_REACH / 6)?;
    Ok(sockopt::set_tcp_keepcnt(socket, 3)?)
}

/// The child's next message; `None` once it has hung up or been quiet for too long.
async fn read_fetch(
    socket: &mut tokio::net::TcpStream,
    quiet: Duration,
) -> io::Result<Option<ToParent>> {
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
    let header = Header::decode(&header, &[Kind::Bulk]).map_err(invalid)?;
    let mut payload = vec![0; header.len];
    in_time(STUCK, socket.read_exact(&mut payload)).await?;
    header.check(&payload).map_err(invalid)?;
    ToParent::decode(&payload).map(Some).map_err(invalid)
}

async fn in_time<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let done = tokio::time::timeout(limit, work).await;
    done.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

fn send_gone(socket: &mut TcpStream, reason: &str) -> io::Result<()> {
    let reason = reason.into();
    send(socket, &ToChild::Gone { reason })
}

fn send(socket: &mut TcpStream, message: &ToChild) -> io::Result<()> {
    socket.write_all(&words(message)?)
}

fn words(message: &ToChild) -> io::Result<Vec<u8>> {
    message.frame().map_err(invalid)
}

/// Writes both buffers, unless that takes too long.
fn write_both(
    socket: &mut TcpStream,
    mut head: &[u8],
    mut bytes: &[u8],
    late: impl Fn() -> bool,
) -> io::Result<()> {
    debug_assert!(bytes.len() <= SPAN as usize);
    while !bytes.is_empty() || !head.is_empty() {
        if late() {
            return Err(io::ErrorKind::TimedOut.into());
        }
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
