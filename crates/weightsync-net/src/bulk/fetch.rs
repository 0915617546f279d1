//! The child's end of bulk links: fetches one version over one or more connections.

mod make;

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use weightsync_core::Run;
use weightsync_core::delta::{Codec, DeltaError, Pattern, Scratch, apply, apply_onto, encode};
use weightsync_mem::{ChunkWrite, PartialSlot, Snapshot};
use weightsync_simd::Crc64;

pub(crate) use self::make::Base;
use super::SUSPECT;
use super::delta::{Coded, Delta, Span};
use super::serve::invalid;
use super::stop::Threads;
use super::store::{Held, Store};
use super::throughput::{Came, Throughput};
use crate::access::Key;
use crate::link::blocking;
use crate::relay::Item;
use crate::wire::frame::{
    self, CHUNK_HEAD_BYTES, ChunkHead, DELTA_HEAD_BYTES, DeltaHead, FrameError, HEADER_BYTES,
    Header, Kind, SPAN_CHUNKS,
};
use crate::wire::hello::Role;
use crate::wire::message::{ChunkRange, MAX_RANGES, Message, ToChild, ToParent};

/// How much is read before its checksum is made, so that it is still in the cache.
const GULP: usize = 256 << 10;

/// A process to fetch from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    /// Its number; 0 is the sender.
    pub(crate) agent: u64,
    /// Where it listens.
    pub(crate) address: SocketAddr,
}

/// How a fetch ended.
#[derive(Debug)]
pub(crate) enum FetchEnd {
    /// Everything has come.
    Whole,
    /// What was asked for has come; a fetch that was stopped still had the rest,
    /// which is nobody's fault.
    Partly,
    /// The parent does not have it.
    NotThere,
    /// A connection broke, was silent for too long, or said what cannot be.
    Broken(io::Error),
    /// What it is made from is not what the deltas that come are made from.
    Unfit(io::Error),
    /// It was stopped.
    Stopped,
}

/// Connections to parents that wait for the next fetch.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) key: Key,
    pub(crate) run: Run,
    /// This process, as the sender numbers it.
    pub(crate) agent: u64,
    /// Most connections of one fetch.
    pub(crate) most: usize,
    idle: Mutex<VecDeque<(Parent, TcpStream)>>,
    /// Of each parent that something comes from.
    meters: Mutex<Vec<(Parent, Weak<Throughput>)>>,
}

impl Connections {
    pub(crate) fn new(key: Key, run: Run, agent: u64, most: usize) -> Self {
        Self {
            key,
            run,
            agent,
            most,
            idle: Mutex::default(),
            meters: Mutex::default(),
        }
    }

    fn take(&self, parent: Parent) -> Option<TcpStream> {
        let mut idle = self.idle();
        // Connections to others are not needed any more.
        idle.retain(|(to, _)| *to == parent);
        idle.pop_front().map(|(_, socket)| socket)
    }

    fn give_back(&self, parent: Parent, socket: TcpStream) {
        let mut idle = self.idle();
        if idle.len() < self.most {
            idle.push_back((parent, socket));
        }
    }

    fn throughput(&self, parent: Parent) -> Arc<Throughput> {
        let mut meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        meters.retain(|(_, throughput)| throughput.strong_count() > 0);
        let known = meters.iter().find(|(of, _)| *of == parent);
        if let Some(throughput) = known.and_then(|(_, throughput)| throughput.upgrade()) {
            return throughput;
        }
        let throughput = Arc::new(Throughput::default());
        meters.push((parent, Arc::downgrade(&throughput)));
        throughput
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<(Parent, TcpStream)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A fetch under way. Dropped, it is stopped; its threads end without a join.
pub(crate) struct Fetch {
    shared: Arc<Shared>,
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetch")
            .field("item", &self.shared.item)
            .field("parent", &self.shared.parent)
            .finish_non_exhaustive()
    }
}

struct Shared {
    item: Item,
    parent: Parent,
    connections: Arc<Connections>,
    room: Arc<PartialSlot>,
    held: Arc<Held>,
    base: Option<Base>,
    store: Arc<Store>,
    threads: Arc<Threads>,
    stopped: AtomicBool,
    /// A delta does not fit what is here.
    unfit: AtomicBool,
    /// Connections that have not ended.
    left: AtomicUsize,
    first_end: Mutex<Option<FetchEnd>>,
    /// The connections in use, to be ended when it is stopped.
    sockets: Mutex<Vec<TcpStream>>,
    /// What came by this link, of this fetch and of others; and before it began, or what
    /// has come was taken last.
    throughput: Arc<Throughput>,
    before: Mutex<Came>,
    /// What came by this fetch since then: of chunks, and of deltas, whose bytes are too
    /// few to tell how fast the link is.
    bytes: AtomicU64,
    coded: AtomicU64,
    done: Box<dyn Fn(FetchEnd, Came) + Send + Sync>,
}

impl Fetch {
    /// Begins to fetch what is missing in `room`, next to so many `others`; `done` is
    /// called once, with what was not [taken](Self::take_came) before, from whichever
    /// thread: it must not wait.
    pub(crate) fn start(
        (item, parent): (Item, Parent),
        (connections, others): (&Arc<Connections>, usize),
        (room, held, base): (Arc<PartialSlot>, Arc<Held>, Option<Base>),
        store: &Arc<Store>,
        threads: &Arc<Threads>,
        done: impl Fn(FetchEnd, Came) + Send + Sync + 'static,
    ) -> Self {
        let missing: Vec<usize> = room.missing().collect();
        // A connection each for what is worth one.
        let most = connections.most.saturating_sub(others);
        let count = most.min(missing.len().div_ceil(4)).max(1);
        let throughput = connections.throughput(parent);
        let shared = Arc::new(Shared {
            item,
            parent,
            connections: connections.clone(),
            room,
            held,
            base,
            store: store.clone(),
            threads: threads.clone(),
            stopped: AtomicBool::new(false),
            unfit: AtomicBool::new(false),
            left: AtomicUsize::new(count),
            first_end: Mutex::default(),
            sockets: Mutex::default(),
            before: Mutex::new(throughput.came()),
            throughput,
            bytes: AtomicU64::new(0),
            coded: AtomicU64::new(0),
            done: Box::new(done),
        });
        for part in 0..count {
            let turns = missing.iter().copied().enumerate();
            // What comes as one delta comes by one connection.
            let turn = |(turn, index): &(usize, usize)| match &shared.base {
                Some(_) => index / SPAN_CHUNKS,
                None => *turn,
            };
            let mine = turns.filter(|one| turn(one) % count == part);
            let mine: Vec<usize> = mine.map(|(_, index)| index).collect();
            let own = shared.clone();
            let work = move || {
                let end = own.fetch(&mine);
                own.end(end);
            };
            if let Err(error) = threads.spawn("weightsync-fetch", work) {
                shared.end(Err(error));
            }
        }
        Self { shared }
    }

    /// What has come and was not taken before, if it is at least so many bytes;
    /// otherwise nothing.
    pub(crate) fn take_came(&self, least: u64) -> Came {
        self.shared.take_came(least)
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

impl Shared {
    /// One connection's part.
    fn fetch(&self, indices: &[usize]) -> io::Result<Option<FetchEnd>> {
        if indices.is_empty() {
            self.wait_for_the_rest();
            return Ok(None);
        }
        let mut waiting = indices;
        // One that waited may have been closed meanwhile: then a new one.
        let idle = self.connections.take(self.parent);
        if let Some(socket) = idle {
            match self.fetch_by(socket, waiting) {
                Err(error) if is_stale(&error) && !self.is_stopped() => {
                    let missing = |index: &usize| self.room.read(*index).is_none();
                    let first = waiting.iter().position(missing).unwrap_or(waiting.len());
                    waiting = &waiting[first..];
                }
                end => return end,
            }
        }
        let address = self.parent.address;
        let mut socket = TcpStream::connect_timeout(&address, SUSPECT)?;
        let Some(watched) = self.threads.watch(&socket)? else {
            return Ok(Some(FetchEnd::Stopped));
        };
        self.sockets().push(socket.try_clone()?);
        if self.is_stopped() {
            return Ok(Some(FetchEnd::Stopped));
        }
        blocking::prove(&mut socket, &self.connections.key, Role::Bulk, SUSPECT)?;
        drop(watched);
        self.fetch_by(socket, waiting)
    }

    /// A fetch that was stopped has all that is missing: it is about to release it.
    fn wait_for_the_rest(&self) {
        let over = || {
            let (room, stopped) = (&self.room, self.is_stopped());
            stopped || room.is_whole() || room.missing().next().is_some()
        };
        self.store.wait_until(over, SUSPECT);
    }

    fn fetch_by(&self, mut socket: TcpStream, indices: &[usize]) -> io::Result<Option<FetchEnd>> {
        let Some(_watched) = self.threads.watch(&socket)? else {
            return Ok(Some(FetchEnd::Stopped));
        };
        socket.set_read_timeout(Some(SUSPECT))?;
        self.sockets().push(socket.try_clone()?);
        if self.is_stopped() {
            return Ok(Some(FetchEnd::Stopped));
        }
        for ranges in ranges(indices).chunks(MAX_RANGES) {
            let fetch = ToParent::Fetch {
                run: self.connections.run,
                agent: self.connections.agent,
                model: self.item.model as u8,
                version: self.item.version,
                base: self.base.as_ref().map(|base| base.snapshot.version()),
                ranges: ranges.to_vec(),
            };
            let mut bytes = Vec::new();
            let payload = fetch.encode().map_err(invalid)?;
            frame::encode(Kind::Bulk, &payload, &mut bytes).map_err(invalid)?;
            socket.write_all(&bytes)?;
            if let Some(end) = self.receive(&mut socket)? {
                return Ok(Some(end));
            }
            // It has said that this was all.
            if let Some(index) = self.room.missing().find(|index| has(ranges, *index)) {
                return Err(invalid(Unsent { index }));
            }
        }
        self.connections.give_back(self.parent, socket);
        Ok(None)
    }

    /// Takes chunks until the parent has sent all that was asked for.
    fn receive(&self, socket: &mut TcpStream) -> io::Result<Option<FetchEnd>> {
        let allowed = match self.base {
            Some(_) => &[Kind::Bulk, Kind::Chunk, Kind::Delta][..],
            None => &[Kind::Bulk, Kind::Chunk],
        };
        let mut scratch = Scratch::new();
        loop {
            if self.is_stopped() {
                return Ok(Some(FetchEnd::Stopped));
            }
            let mut header = [0; HEADER_BYTES];
            read_exact(socket, &mut header)?;
            let header = Header::decode(&header, allowed).map_err(invalid)?;
            if header.kind == Kind::Delta {
                let mut head = [0; DELTA_HEAD_BYTES];
                read_exact(socket, &mut head)?;
                header.check(&head).map_err(invalid)?;
                let head = DeltaHead::decode(&head).map_err(invalid)?;
                let made = self.make(socket, &head, &mut scratch);
                self.store.notify();
                made?;
                continue;
            }
            if header.kind == Kind::Chunk {
                let mut head = [0; CHUNK_HEAD_BYTES];
                read_exact(socket, &mut head)?;
                header.check(&head).map_err(invalid)?;
                let taken = self.take(socket, &ChunkHead::decode(&head).map_err(invalid)?);
                // It is there, or somebody else may fetch it now.
                self.store.notify();
                taken?;
                continue;
            }
            let mut payload = vec![0; header.len];
            read_exact(socket, &mut payload)?;
            header.check(&payload).map_err(invalid)?;
            match ToChild::decode(&payload).map_err(invalid)? {
                ToChild::Idle => {}
                ToChild::End => return Ok(None),
                ToChild::Gone { .. } => return Ok(Some(FetchEnd::NotThere)),
            }
        }
    }

    /// Reads one chunk into its place.
    fn take(&self, socket: &mut TcpStream, head: &ChunkHead) -> io::Result<()> {
        let index = head.index as usize;
        let of_this = usize::from(head.model) == self.item.model
            && head.version == self.item.version
            && head.image_bytes == self.room.layout().bytes();
        let piece = self.room.take(index).filter(|_| of_this);
        let mut piece = piece.ok_or_else(|| invalid(FrameError::Chunk { head: *head }))?;
        let coming = self.throughput.begin(Instant::now());
        let mut crc = Crc64::new();
        for part in piece.chunks_mut(GULP) {
            read_exact(socket, part)?;
            crc.update(part);
            // With its checksum: what a buffer has taken before comes at the speed of
            // memory, and says nothing of the link.
            coming.more(part.len(), Instant::now());
            self.bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
        }
        drop(coming);
        let crc = crc.value();
        head.check_crc(crc).map_err(invalid)?;
        self.held.note_sum(index, crc);
        piece.keep();
        Ok(())
    }

    fn end(&self, end: io::Result<Option<FetchEnd>>) {
        let end = match end {
            Ok(end) => end,
            Err(_) if self.is_stopped() => Some(FetchEnd::Stopped),
            Err(error) if self.unfit.load(Ordering::Acquire) => Some(FetchEnd::Unfit(error)),
            Err(error) => Some(FetchEnd::Broken(error)),
        };
        let mut first = self
            .first_end
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if end.is_some() && first.is_none() {
            *first = end;
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let end = first.take();
        drop(first);
        let end = match end {
            _ if self.room.is_whole() => FetchEnd::Whole,
            Some(end) => end,
            None => FetchEnd::Partly,
        };
        (self.done)(end, self.take_came(0));
    }

    /// What has come and was not taken here before, if it is so much.
    fn take_came(&self, least: u64) -> Came {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = self.bytes.load(Ordering::Relaxed);
        let coded = self.coded.load(Ordering::Relaxed);
        if bytes + coded < least {
            return Came::default();
        }
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.coded.fetch_sub(coded, Ordering::Relaxed);
        let all = self.throughput.came();
        let mut came = all.share(std::mem::replace(&mut before, all), bytes);
        if coded > bytes / 8 {
            // No time is no measure.
            came.busy = Duration::ZERO;
        }
        came.bytes += coded;
        came
    }

    /// Ends the connections: what is on its way is not wanted any more.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        if self.left.load(Ordering::Acquire) > 0 {
            for socket in self.sockets().iter() {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
        self.store.notify();
    }

    fn sockets(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire) || self.threads.is_stopped()
    }
}

/// A parent has ended without a chunk that it was asked for.
#[derive(Debug, thiserror::Error)]
#[error("the parent says that it sent everything, but block {index} is missing")]
struct Unsent {
    index: usize,
}

/// Reads all of it; silence is an error of its own.
fn read_exact(socket: &mut TcpStream, bytes: &mut [u8]) -> io::Result<()> {
    socket.read_exact(bytes).map_err(|error| {
        let silent = matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        );
        match silent {
            true => io::Error::new(
                io::ErrorKind::TimedOut,
                format!("nothing arrived for {SUSPECT:?}"),
            ),
            false => error,
        }
    })
}

/// Whether a connection that waited has turned out to be closed.
fn is_stale(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        error.kind(),
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
    )
}

/// Whether ascending ranges have an index.
fn has(ranges: &[ChunkRange], index: usize) -> bool {
    let last = |range: &ChunkRange| (range.first + (range.count - 1)) as usize;
    let at = ranges.partition_point(|range| last(range) < index);
    ranges
        .get(at)
        .is_some_and(|range| range.first as usize <= index)
}

/// Ascending indices as ranges.
fn ranges(indices: &[usize]) -> Vec<ChunkRange> {
    let mut ranges: Vec<ChunkRange> = Vec::new();
    for &index in indices {
        match ranges.last_mut() {
            Some(last) if last.end() == Some(index as u32) => last.count += 1,
            _ => ranges.push(ChunkRange {
                first: index as u32,
                count: 1,
            }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_become_ranges() {
        let range = |first, count| ChunkRange { first, count };
        assert_eq!(ranges(&[]), []);
        assert_eq!(ranges(&[3]), [range(3, 1)]);
        assert_eq!(
            ranges(&[0, 1, 2, 5, 7, 8]),
            [range(0, 3), range(5, 1), range(7, 2)]
        );
        let some = ranges(&[0, 1, 2, 5, 7, 8]);
        let found: Vec<usize> = (0..11).filter(|index| has(&some, *index)).collect();
        assert_eq!(found, [0, 1, 2, 5, 7, 8]);
    }
}
