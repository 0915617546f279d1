//! The child's end of bulk links: fetches one version over one or more connections.

mod apply;
mod requested;
mod verify;

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use weightsync_core::Run;
use weightsync_core::delta::Scratch;
use weightsync_link::frame::{
    BLOCK_HEAD_BYTES, DELTA_HEAD_BYTES, FrameHeader, FrameKind, HEADER_BYTES,
};
use weightsync_link::hello::LinkRole;
use weightsync_link::message::Message;
use weightsync_link::stream::Stream;
use weightsync_link::tls::TlsPeer;
use weightsync_link::{Credentials, blocking};
use weightsync_mem::PartialSlot;
use weightsync_mem::threads::LockExt as _;
use weightsync_simd::Crc64;

pub(crate) use self::apply::DeltaBase;
use self::requested::{Requested, ranges};
use super::serve::invalid;
use super::stop::Threads;
use super::store::{BlockStore, HeldVersion};
use super::throughput::{Throughput, Transferred};
use super::{PATIENCE, STALLED, WITHHELD};
use crate::agent::Item;
use crate::wire::image::{BlockHead, DeltaHead, ImageError, SPAN_BLOCKS};
use crate::wire::message::{MAX_RANGES, ToChild, ToParent, WantedBlocks};

/// How many bytes are read before their checksum is computed, so that they are still in the cache.
const GULP: usize = 256 << 10;

/// A process to fetch from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    /// Its number; 0 is the sender.
    pub(crate) agent: u64,
    /// Its bulk listener.
    pub(crate) address: SocketAddr,
}

impl Parent {
    /// What its certificate must be of.
    fn peer(self) -> TlsPeer<'static> {
        match self.agent {
            0 => TlsPeer::Sender(self.address.ip()),
            _ => TlsPeer::Relay(self.address.ip()),
        }
    }
}

/// How a fetch ended.
#[derive(Debug)]
pub(crate) enum FetchEnd {
    /// Every block has arrived.
    Whole,
    /// The parent did its part. Blocks are missing that a stopped fetch took, or whose digests came
    /// late.
    Partly,
    /// The parent does not have the version.
    NotThere,
    /// A connection broke, was silent for too long, or sent an invalid message.
    Broken(io::Error),
    /// The parent sent a block that is not the published one.
    Altered { block: usize },
    /// The deltas were made from other bytes than the base here.
    BaseMismatch(io::Error),
    /// The fetch was stopped.
    Stopped,
}

/// Open connections to parents, ready for the next fetch.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) credentials: Credentials,
    pub(crate) run: Run,
    /// This process's number, which the sender assigned.
    pub(crate) agent: u64,
    /// The most connections of one fetch.
    pub(crate) most: usize,
    /// Where the sender tells the digests of blocks, if blocks of relays are compared with them.
    pub(crate) digests: Option<SocketAddr>,
    /// How long a relay may say that it has nothing yet.
    pub(super) withheld: Duration,
    idle: Mutex<VecDeque<(Parent, Stream)>>,
    /// The throughput of each parent that is in use.
    meters: Mutex<Vec<(Parent, Weak<Throughput>)>>,
}

impl Connections {
    pub(crate) fn new(
        credentials: Credentials,
        (run, agent): (Run, u64),
        most: usize,
        digests: Option<SocketAddr>,
    ) -> Self {
        Self {
            credentials,
            run,
            agent,
            most,
            digests,
            withheld: WITHHELD,
            idle: Mutex::default(),
            meters: Mutex::default(),
        }
    }

    fn take(&self, parent: Parent) -> Option<Stream> {
        let mut idle = self.idle();
        // Connections to other parents are not needed any more.
        idle.retain(|(to, _)| *to == parent);
        idle.pop_front().map(|(_, socket)| socket)
    }

    fn give_back(&self, parent: Parent, socket: Stream) {
        let mut idle = self.idle();
        if idle.len() < self.most {
            idle.push_back((parent, socket));
        }
    }

    fn throughput(&self, parent: Parent) -> Arc<Throughput> {
        let mut meters = self.meters.locked();
        meters.retain(|(_, throughput)| throughput.strong_count() > 0);
        let known = meters.iter().find(|(of, _)| *of == parent);
        if let Some(throughput) = known.and_then(|(_, throughput)| throughput.upgrade()) {
            return throughput;
        }
        let throughput = Arc::new(Throughput::default());
        meters.push((parent, Arc::downgrade(&throughput)));
        throughput
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<(Parent, Stream)>> {
        self.idle.locked()
    }
}

/// A fetch under way. Dropping it stops it; its threads then end without a join.
pub(crate) struct BulkFetch {
    task: Arc<FetchTask>,
}

impl fmt::Debug for BulkFetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BulkFetch")
            .field("item", &self.task.item)
            .field("parent", &self.task.parent)
            .finish_non_exhaustive()
    }
}

/// What the threads of a fetch share.
struct FetchTask {
    item: Item,
    parent: Parent,
    connections: Arc<Connections>,
    slot: Arc<PartialSlot>,
    held: Arc<HeldVersion>,
    base: Option<DeltaBase>,
    store: Arc<BlockStore>,
    threads: Arc<Threads>,
    stopped: AtomicBool,
    /// A delta did not fit the base here.
    base_mismatch: AtomicBool,
    /// The first block that arrived and is not the published one.
    altered: OnceLock<usize>,
    /// The sender has not the version any more, so nothing can be compared.
    digests_gone: AtomicBool,
    /// How many connections have not ended.
    left: AtomicUsize,
    first_end: Mutex<Option<FetchEnd>>,
    /// The connections in use; stopping the fetch shuts them down.
    sockets: Mutex<Vec<TcpStream>>,
    /// The connection by which the sender tells digests; the end of the fetch shuts it down.
    digests: Mutex<Option<TcpStream>>,
    /// The throughput of this link over all fetches, and its value when `take_transferred` was last
    /// called.
    throughput: Arc<Throughput>,
    before: Mutex<Transferred>,
    /// Bytes of this fetch since then, as blocks and as deltas. Deltas are too small to tell how
    /// fast the link is.
    bytes: AtomicU64,
    coded: AtomicU64,
    done: Box<dyn Fn(FetchEnd, Transferred) + Send + Sync>,
}

impl BulkFetch {
    /// Begins to fetch the blocks missing in `slot`, next to `others` fetches. Calls `done` once,
    /// from any thread, with the bytes not [taken](Self::take_transferred) before. `done` must not
    /// block.
    pub(crate) fn start(
        (item, parent): (Item, Parent),
        (connections, others): (&Arc<Connections>, usize),
        (slot, held, base): (Arc<PartialSlot>, Arc<HeldVersion>, Option<DeltaBase>),
        store: &Arc<BlockStore>,
        threads: &Arc<Threads>,
        done: impl Fn(FetchEnd, Transferred) + Send + Sync + 'static,
    ) -> Self {
        let missing: Vec<usize> = slot.missing().collect();
        // One connection for each part that is large enough to be worth one.
        // The versions of a set share the connections. More would only compete for one link.
        let most = connections.most.saturating_sub(others);
        let count = most.min(missing.len().div_ceil(4)).max(1);
        let throughput = connections.throughput(parent);
        let task = Arc::new(FetchTask {
            item,
            parent,
            connections: connections.clone(),
            slot,
            held,
            base,
            store: store.clone(),
            threads: threads.clone(),
            stopped: AtomicBool::new(false),
            base_mismatch: AtomicBool::new(false),
            altered: OnceLock::new(),
            digests_gone: AtomicBool::new(false),
            left: AtomicUsize::new(count),
            first_end: Mutex::default(),
            sockets: Mutex::default(),
            digests: Mutex::default(),
            before: Mutex::new(throughput.transferred()),
            throughput,
            bytes: AtomicU64::new(0),
            coded: AtomicU64::new(0),
            done: Box::new(done),
        });
        // Before the blocks are asked for: a block whose digest is not here has to wait.
        task.clone().ask_digests();
        for part in 0..count {
            let turns = missing.iter().copied().enumerate();
            // The blocks of one span go over one connection, because they may come as one delta.
            let turn = |(turn, index): &(usize, usize)| match &task.base {
                Some(_) => index / SPAN_BLOCKS,
                None => *turn,
            };
            let mine = turns.filter(|one| turn(one) % count == part);
            let mine: Vec<usize> = mine.map(|(_, index)| index).collect();
            let own = task.clone();
            let work = move || {
                let end = own.fetch(&mine);
                own.end(end);
            };
            if let Err(error) = threads.spawn("fetch", work) {
                // As if this connection had failed. The others go on.
                task.end(Err(error));
            }
        }
        Self { task }
    }

    /// Takes the bytes transferred since the last call, if they are at least `least`; otherwise
    /// nothing.
    pub(crate) fn take_transferred(&self, least: u64) -> Transferred {
        self.task.take_transferred(least)
    }
}

impl Drop for BulkFetch {
    fn drop(&mut self) {
        self.task.stop();
    }
}

impl FetchTask {
    /// Fetches one connection's share.
    fn fetch(&self, indices: &[usize]) -> io::Result<Option<FetchEnd>> {
        if indices.is_empty() {
            self.wait_for_the_rest();
            return Ok(None);
        }
        let mut waiting = indices;
        // A connection that waited may be closed by now: then a new one is opened.
        let idle = self.connections.take(self.parent);
        if let Some(socket) = idle {
            match self.fetch_by(socket, waiting) {
                Err(error) if is_stale(&error) && !self.is_stopped() => {
                    // Blocks that arrived before the connection broke are not requested again.
                    let missing = |index: &usize| self.slot.read(*index).is_none();
                    let first = waiting.iter().position(missing).unwrap_or(waiting.len());
                    waiting = &waiting[first..];
                }
                end => return end,
            }
        }
        match self.connect(self.parent, |socket| self.sockets().push(socket))? {
            Some(socket) => self.fetch_by(socket, waiting),
            None => Ok(Some(FetchEnd::Stopped)),
        }
    }

    /// A new connection, whose socket is noted where the end of the fetch finds it; `None` if the fetch
    /// is over.
    fn connect(&self, parent: Parent, note: impl FnOnce(TcpStream)) -> io::Result<Option<Stream>> {
        let socket = TcpStream::connect_timeout(&parent.address, STALLED)?;
        // A stop of all threads also ends the handshake that follows.
        let Some(_watched) = self.threads.watch(&socket)? else {
            return Ok(None);
        };
        note(socket.try_clone()?);
        // Looked at after the socket was noted: either this sees the end, or the end finds the
        // socket.
        if self.is_over() {
            return Ok(None);
        }
        let (credentials, patience) = (&self.connections.credentials, Some(STALLED));
        blocking::prove(socket, credentials, parent.peer(), LinkRole::Bulk, patience).map(Some)
    }

    /// Waits while a stopped fetch still holds the missing blocks; it is about to release them.
    fn wait_for_the_rest(&self) {
        let over = || {
            let (slot, stopped) = (&self.slot, self.is_stopped());
            stopped || slot.is_whole() || slot.missing().next().is_some()
        };
        self.store.wait_until(over, STALLED);
    }

    fn fetch_by(&self, mut socket: Stream, indices: &[usize]) -> io::Result<Option<FetchEnd>> {
        let Some(_watched) = self.threads.watch(socket.socket())? else {
            return Ok(Some(FetchEnd::Stopped));
        };
        socket.socket().set_read_timeout(Some(STALLED))?;
        // As in `connect`: noted first, then checked, so that no stop misses the socket.
        self.sockets().push(socket.socket().try_clone()?);
        if self.is_stopped() {
            return Ok(Some(FetchEnd::Stopped));
        }
        // One request names only so many ranges. The next one follows once its blocks have come.
        for ranges in ranges(indices).chunks(MAX_RANGES) {
            let fetch = ToParent::Fetch(WantedBlocks {
                run: self.connections.run,
                agent: self.connections.agent,
                model: self.item.model as u8,
                version: self.item.version,
                base: self.base.as_ref().map(|base| base.snapshot.version()),
                ranges: ranges.to_vec(),
            });
            socket.write_all(&fetch.frame().map_err(invalid)?)?;
            let mut requested = Requested::new(ranges);
            match self.receive(&mut socket, &mut requested) {
                Ok(None) => {}
                Ok(end) => return Ok(end),
                // Nothing was read meanwhile, so the parent may have given the connection up. The rest
                // is fetched again; a parent that is gone is found out then.
                Err(error) if requested.digest_was_late && is_stale(&error) => {
                    return Ok(Some(FetchEnd::Partly));
                }
                Err(error) => return Err(error),
            }
            // The parent has said that it has sent everything.
            let mut missing = self.slot.missing();
            if let Some(index) = missing.find(|index| requested.awaits(*index)) {
                return Err(invalid(Misbehaved::Unsent { index }));
            }
        }
        // Nothing is outstanding, so the next fetch can use this connection.
        self.connections.give_back(self.parent, socket);
        Ok(None)
    }

    /// Takes blocks until the parent has sent all that were requested.
    fn receive(
        &self,
        socket: &mut Stream,
        requested: &mut Requested<'_>,
    ) -> io::Result<Option<FetchEnd>> {
        // A child without a base cannot apply a delta, so a parent that sends one breaks the
        // protocol.
        let allowed = match self.base {
            Some(_) => &[FrameKind::Bulk, FrameKind::Block, FrameKind::Delta][..],
            None => &[FrameKind::Bulk, FrameKind::Block],
        };
        let (mut scratch, mut last) = (Scratch::new(), Instant::now());
        loop {
            if self.is_stopped() {
                return Ok(Some(FetchEnd::Stopped));
            }
            let mut header = [0; HEADER_BYTES];
            read_exact(socket, &mut header)?;
            let header = FrameHeader::decode(&header, allowed).map_err(invalid)?;
            if header.kind == FrameKind::Delta {
                let mut head = [0; DELTA_HEAD_BYTES];
                read_exact(socket, &mut head)?;
                header.check(&head).map_err(invalid)?;
                let head = DeltaHead::decode(&head).map_err(invalid)?;
                let made = self.receive_delta(socket, &head, requested, &mut scratch);
                // Also after an error: the span is released then, and another fetch may take it.
                self.store.notify();
                made?;
                last = Instant::now();
                continue;
            }
            if header.kind == FrameKind::Block {
                let mut head = [0; BLOCK_HEAD_BYTES];
                read_exact(socket, &mut head)?;
                header.check(&head).map_err(invalid)?;
                let head = BlockHead::decode(&head).map_err(invalid)?;
                let taken = self.receive_block(socket, &head, requested);
                // The block is here, or another fetch may take it now.
                self.store.notify();
                taken?;
                last = Instant::now();
                continue;
            }
            match read_message(socket, &header)? {
                ToChild::Digests { .. } => return Err(invalid(Misbehaved::Unasked)),
                // The sender has each version whole. It may only have many others to serve first.
                ToChild::Idle if self.parent.agent == 0 => {}
                ToChild::Idle if last.elapsed() < self.connections.withheld => {}
                ToChild::Idle => return Err(io::Error::other(Misbehaved::Withheld)),
                ToChild::End => return Ok(None),
                ToChild::Gone { .. } => return Ok(Some(FetchEnd::NotThere)),
            }
        }
    }

    /// Reads one block into its place in the image.
    fn receive_block(
        &self,
        socket: &mut Stream,
        head: &BlockHead,
        requested: &mut Requested<'_>,
    ) -> io::Result<()> {
        let wrong = || invalid(ImageError::Block { head: *head });
        let index = head.index as usize;
        // The decoder has compared the block's length with `image_bytes`. If that fits, so does the
        // block.
        let of_this = usize::from(head.model) == self.item.model
            && head.version == self.item.version
            && head.image_bytes == self.slot.layout().bytes();
        if !of_this || !requested.arrive(index..index + 1) {
            return Err(wrong());
        }
        // Another fetch has taken the block. Its bytes still have to be read off the connection.
        let Some(mut piece) = self.slot.take(index) else {
            return skip(socket, head.bytes);
        };
        let arrival = self.throughput.begin(Instant::now());
        let mut crc = Crc64::new();
        for part in piece.chunks_mut(GULP) {
            read_exact(socket, part)?;
            crc.update(part);
            // Measured with the checksum: bytes that a buffer already holds come at the speed of
            // memory, and tell nothing about the link.
            arrival.more(part.len(), Instant::now());
            self.bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
        }
        // The wait for a digest, which may follow, is not the link's.
        drop(arrival);
        let crc = crc.value();
        // An error from here on drops `piece`, and the block is missing again.
        head.check_crc(crc).map_err(invalid)?;
        self.verify(index, &piece, requested)?;
        // Before the block can be seen: a thread that serves it need not compute the sum again.
        self.held.note_sum(index, crc);
        piece.keep();
        Ok(())
    }

    fn end(&self, end: io::Result<Option<FetchEnd>>) {
        let altered = self
            .altered
            .get()
            .map(|block| FetchEnd::Altered { block: *block });
        let end = match end {
            Ok(end) => end,
            // The error says so itself, or follows from the stop that `verify` made.
            Err(_) if altered.is_some() => altered,
            Err(_) if self.is_stopped() => Some(FetchEnd::Stopped),
            // Without digests no block of a relay can be used.
            Err(_) if self.digests_gone.load(Ordering::Acquire) => Some(FetchEnd::NotThere),
            Err(error) if self.base_mismatch.load(Ordering::Acquire) => {
                Some(FetchEnd::BaseMismatch(error))
            }
            Err(error) => Some(FetchEnd::Broken(error)),
        };
        // Held across the count, so the last connection sees how all others have ended.
        let mut first = self.first_end.locked();
        if end.is_some() && first.is_none() {
            *first = end;
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        self.end_digests();
        let end = first.take();
        drop(first);
        let end = match end {
            // If every block is here, it does not matter how a connection ended.
            _ if self.slot.is_whole() => FetchEnd::Whole,
            // Whatever the parent does to its other connections: it is named.
            _ if let Some(block) = self.altered.get() => FetchEnd::Altered { block: *block },
            Some(end) => end,
            None => FetchEnd::Partly,
        };
        (self.done)(end, self.take_transferred(0));
    }

    /// Takes the bytes transferred since the last call, if there are enough.
    fn take_transferred(&self, least: u64) -> Transferred {
        let mut before = self.before.locked();
        let bytes = self.bytes.load(Ordering::Relaxed);
        let coded = self.coded.load(Ordering::Relaxed);
        if bytes + coded < least {
            return Transferred::default();
        }
        // Subtracted, because other threads go on counting.
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.coded.fetch_sub(coded, Ordering::Relaxed);
        let all = self.throughput.transferred();
        let mut taken = all.share(std::mem::replace(&mut before, all), bytes);
        // The arrival of deltas is not timed. With many of them the rate would be too high.
        if coded > bytes / 8 {
            // A time of zero is no measurement.
            taken.busy = Duration::ZERO;
        }
        taken.bytes += coded;
        taken
    }

    /// Closes the connections, as data under way is no longer wanted.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Once all have ended, the next fetch may use these connections.
        if self.left.load(Ordering::Acquire) > 0 {
            for socket in self.sockets().iter() {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
        self.end_digests();
    }

    fn sockets(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.sockets.locked()
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire) || self.threads.is_stopped()
    }

    /// Whether nothing waits for blocks any more.
    fn is_over(&self) -> bool {
        self.is_stopped() || self.left.load(Ordering::Acquire) == 0
    }
}

/// Reads this many bytes and drops them.
fn skip(socket: &mut Stream, bytes: u32) -> io::Result<()> {
    let mut bytes = bytes as usize;
    let mut buffer = vec![0; bytes.min(GULP)];
    while bytes > 0 {
        let part = bytes.min(GULP);
        read_exact(socket, &mut buffer[..part])?;
        bytes -= part;
    }
    Ok(())
}

/// What a parent or the sender did wrong.
#[derive(Debug, thiserror::Error)]
enum Misbehaved {
    #[error("the parent says that it sent everything, but block {index} is missing")]
    Unsent { index: usize },
    #[error("the relay said for {WITHHELD:?} that it has nothing yet, and sent nothing else")]
    Withheld,
    #[error("the parent told digests, which nobody asked it for")]
    Unasked,
    #[error("block {index} is not the one that the sender published: its BLAKE3 digest is another")]
    Altered { index: usize },
    #[error("the sender did not tell the digest of block {index} within {PATIENCE:?}")]
    Untold { index: usize },
    /// The sender told two digests of one block, or one of a block that the version has not.
    #[error("the sender told a digest of block {index} that does not fit the version")]
    Contradicts { index: usize },
}

fn read_message(socket: &mut Stream, header: &FrameHeader) -> io::Result<ToChild> {
    let mut payload = vec![0; header.len];
    read_exact(socket, &mut payload)?;
    header.check(&payload).map_err(invalid)?;
    ToChild::decode(&payload).map_err(invalid)
}

/// Fills the buffer. A timeout is an error that says how long the other end was silent.
fn read_exact(socket: &mut Stream, bytes: &mut [u8]) -> io::Result<()> {
    let read = socket.read_exact(bytes);
    read.map_err(|error| {
        let silent = matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        );
        match silent {
            true => io::Error::new(
                io::ErrorKind::TimedOut,
                match socket.socket().read_timeout() {
                    Ok(Some(limit)) => format!("nothing arrived for {limit:?}"),
                    _ => "nothing arrived in time".into(),
                },
            ),
            false => error,
        }
    })
}

/// Whether an open connection has turned out to be closed by the parent.
fn is_stale(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        error.kind(),
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
    )
}
