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
use super::store::{Held, Look, Store};
use super::{IDLE, PATIENCE, STUCK};
use crate::relay::Item;
use crate::wire::frame::{
    CHUNK, ChunkHead, DeltaHead, HEADER_BYTES, Header, Kind, SPAN, SPAN_CHUNKS,
};
use crate::wire::message::{Message, ToChild, ToParent};

/// After so long a child that waits and whose host does not answer is given up.
const OUT_OF_REACH: Duration = Duration::from_secs(12);

/// How many fetches are served at once; others wait for their turn.
const AT_ONCE: usize = 64;

/// How long a turn is while others wait for theirs: a chunk that has begun is ended.
const TURN: Duration = Duration::from_millis(250);

/// After so long on its way a chunk is given up while others wait for their turn, and a
/// delta of as many bytes as two chunks after twice as long: over 1 Mbit/s a chunk takes
/// 8.4 s, and 67 s if eight connections share that.
const ON_ITS_WAY: Duration = Duration::from_secs(75);

/// A child that has asked for nothing for so long loses its connection: it makes
/// another when it asks again.
const QUIET: Duration = Duration::from_secs(60);

/// How many children may be connected, whether or not they ask for anything.
const CHILDREN: usize = 32_768;

/// So many bytes that went to a child in one turn tell how fast its link is, whatever
/// buffers have taken of them.
const TELLING: u64 = 16 << 20;

/// Of so many children that is remembered.
const REMEMBERED: usize = 1024;

/// Why a version is not served to its end.
const REPLACED: &str = "it was replaced by a newer one";

/// What a parent notices while it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// A child wants a version.
    Wanted { item: Item },
    /// It wants it no more: it has it, or is gone.
    Unwanted { item: Item },
    /// So many bytes went to one.
    Sent { bytes: u64 },
}

/// What a process serves from, and how many fetches at once.
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
    /// How fast the link to each child is, in bytes a second, as far as it has shown.
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

    /// Serves one child until it hangs up, or asks for nothing any more. Between two
    /// fetches it costs a descriptor and no thread.
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
                // The child that waited for it may have gone.
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

    /// Waits for its turn, and has the child hear meanwhile that this end is there;
    /// `None` once what it is served is served no more, which it has heard.
    async fn turn(
        &self,
        socket: &mut tokio::net::TcpStream,
        transfer: &mut Transfer,
    ) -> io::Result<Option<OwnedSemaphorePermit>> {
        // One and the same wait: another would be the last in line again.
        let permit = self.at_once.clone().acquire_owned();
        tokio::pin!(permit);
        loop {
            if let Ok(permit) = tokio::time::timeout(IDLE, &mut permit).await {
                return Ok(permit.ok());
            }
            if transfer.is_revoked() {
                // Not for as long as the child takes to hear it.
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

    /// Looks for what changed in a span, and waits a moment for it if that is not known.
    fn look<'a>(
        &self,
        delta: &'a Delta,
        held: &Held,
        index: usize,
        scratch: &mut Scratch,
    ) -> LookDelta<'a> {
        let chunks = index * SPAN_CHUNKS..held.chunks().min((index + 1) * SPAN_CHUNKS);
        // One that comes dense here is passed on so.
        let came_dense = || !held.is_whole() && chunks.clone().all(|chunk| held.has(chunk));
        if held.is_revoked() {
            return LookDelta::Gone;
        }
        match delta.span(index, held.layout(), scratch) {
            Some(Span::Coded(coded)) => LookDelta::Ready(coded.sent(), coded.crc()),
            Some(Span::Dense) => LookDelta::Dense,
            None if came_dense() => LookDelta::Dense,
            None => {
                let known = || delta.is_known(index) || came_dense() || held.is_revoked();
                self.store.wait_until(known, IDLE);
                match self.store.is_closed() {
                    true => LookDelta::Gone,
                    false => LookDelta::NotYet,
                }
            }
        }
    }

    /// So much went to a child. What it waited for counts too: to take a link for slower
    /// than it is costs a fold.
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
        // Single insertions: it holds after a panic.
        self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody waits for a turn.
    fn others_wait(&self) -> bool {
        self.at_once.available_permits() == 0
    }
}

/// What a look for a span's delta finds.
enum LookDelta<'a> {
    /// The delta, and its checksum.
    Ready(&'a [u8], u64),
    /// Its chunks are to be sent.
    Dense,
    NotYet,
    /// The version will not come.
    Gone,
}

/// Whether what is on its way is to be given up.
struct Lateness<'a> {
    serving: &'a Serving,
    begun: Instant,
    limit: Duration,
}

impl<'a> Lateness<'a> {
    /// Of so many bytes, that begin to be sent.
    fn new(serving: &'a Serving, bytes: usize) -> Self {
        let chunks = bytes.div_ceil(CHUNK as usize).max(1) as u32;
        Self {
            serving,
            begun: Instant::now(),
            limit: ON_ITS_WAY * chunks,
        }
    }

    fn is_so(&self) -> bool {
        self.begun.elapsed() >= self.limit && self.serving.others_wait()
    }
}

/// The chunks of a whole span, if `left` begins with all of them; otherwise none.
fn span_of(left: &[usize], chunks: usize) -> &[usize] {
    let first = left.first().copied().unwrap_or_default();
    let count = SPAN_CHUNKS.min(chunks.saturating_sub(first));
    let begins = first.is_multiple_of(SPAN_CHUNKS) && left.len() >= count && count > 0;
    match begins && left[count - 1] == first + count - 1 {
        true => &left[..count],
        false => &[],
    }
}

/// A fetch that is served, in one turn or several.
struct Transfer {
    serving: Serving,
    fetch: ToParent,
    /// When its first turn began.
    since: Option<Instant>,
    /// When the child heard something last.
    last_sent: Instant,
    held: Option<Arc<Held>>,
    /// How many of the chunks that were asked for have gone out.
    done: usize,
}

/// How a turn has ended.
enum End {
    /// The child has all that it gets.
    Over,
    /// It is the others' turn.
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

    /// Serves until it is over (true), or until it is the others' turn.
    fn go_on(&mut self, socket: &mut TcpStream) -> io::Result<bool> {
        let item = self.item();
        let &ToParent::Fetch { run, agent, .. } = &self.fetch;
        if run != self.serving.run {
            send_gone(socket, "it belongs to another run")?;
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

    /// Sends what was asked for, as far as one turn goes; `sent` is how many bytes of it.
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
            self.held = None;
            drop(held);
            send_gone(socket, REPLACED)?;
            return Ok(End::Over);
        };
        let (item, serving) = (self.item(), self.serving.clone());
        let ToParent::Fetch { agent, ranges, .. } = &self.fetch;
        // They ascend, and none is asked for twice: what follows is bounded by this.
        let behind = ranges.last().and_then(|range| range.end());
        if behind.is_some_and(|behind| behind as usize > held.chunks()) {
            send_gone(socket, "it has fewer chunks")?;
            return Ok(End::Over);
        }
        let indices = ranges.iter().flat_map(|range| {
            let first = range.first as usize;
            first..first + range.count as usize
        });
        let indices: Vec<usize> = indices.skip(self.done).collect();
        let delta = self.base().and_then(|base| {
            let deltas = serving.store.deltas();
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
            let span = span_of(left, held.chunks());
            let whole = delta.as_ref().filter(|_| !span.is_empty());
            if let Some(delta) = whole {
                let index = index / SPAN_CHUNKS;
                match serving.look(delta, &held, index, &mut scratch) {
                    LookDelta::Ready(bytes, crc) => {
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
                        if delta.is_folded() {
                            serving.store.deltas().trim(item.model);
                        }
                        continue;
                    }
                    LookDelta::NotYet => {
                        self.send_idle(socket)?;
                        continue;
                    }
                    LookDelta::Gone => {
                        send_gone(socket, REPLACED)?;
                        return Ok(End::Over);
                    }
                    LookDelta::Dense => {}
                }
            }
            match serving.store.chunk(&held, index, IDLE) {
                Look::Ready(bytes, crc) => {
                    let head = ChunkHead {
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
                Look::NotYet => self.send_idle(socket)?,
                Look::Gone => {
                    send_gone(socket, REPLACED)?;
                    return Ok(End::Over);
                }
            }
        }
        send(socket, &ToChild::End)?;
        Ok(End::Over)
    }

    /// The version, once there is anything of it here; or how the turn ends without.
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

    /// So many chunks have gone out.
    fn went(&mut self, chunks: usize) {
        self.last_sent = Instant::now();
        self.done += chunks;
    }

    /// Whether what it is served is served no more.
    fn is_revoked(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_revoked())
    }

    /// Ends once that is so.
    async fn revoked(&self) {
        while !self.is_revoked() {
            tokio::time::sleep(IDLE).await;
        }
    }

    /// Says that this end is there, if it has said nothing for a while.
    fn send_idle(&mut self, socket: &mut TcpStream) -> io::Result<()> {
        if self.last_sent.elapsed() < IDLE {
            return Ok(());
        }
        self.last_sent = Instant::now();
        send(socket, &ToChild::Idle)
    }
}

impl Drop for Transfer {
    /// Its child has gone while it waited for its turn.
    fn drop(&mut self) {
        if self.since.is_none() {
            return;
        }
        let (notify, item) = (self.serving.notify.clone(), self.item());
        // The notified thread may have to be waited for, which no task may do.
        let spawned = self.serving.threads.spawn("weightsync-serve", move || {
            notify(Served::Unwanted { item });
        });
        if let Err(error) = spawned {
            tracing::warn!("{item:?} still counts as wanted: {error}");
        }
    }
}

/// Has the system find out when a child that waits is out of reach for good.
fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, OUT_OF_REACH / 2)?;
    sockopt::set_tcp_keepintvl(socket, OUT_OF_REACH / 6)?;
    Ok(sockopt::set_tcp_keepcnt(socket, 3)?)
}

/// The child's next words; `None` once it has hung up, or been quiet for too long.
async fn read_fetch(
    socket: &mut tokio::net::TcpStream,
    quiet: Duration,
) -> io::Result<Option<ToParent>> {
    let mut header = [0; HEADER_BYTES];
    // What a child has begun to say it goes on saying.
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

/// Writes both, unless it is too late for the rest of them.
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
