//! The parent's end of a bulk link.

use std::io::{self, IoSlice, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, oneshot};
use weightsync_core::Run;

use super::stop::Threads;
use super::store::{Held, Look, Store};
use super::{IDLE, STUCK};
use crate::relay::Item;
use crate::wire::frame::{CHUNK, ChunkHead, HEADER_BYTES, Header, Kind};
use crate::wire::message::{ChunkRange, Message, ToChild, ToParent};

/// How long a relay asks above for a version that it does not have.
const PATIENCE: Duration = Duration::from_secs(30);

/// After so long a child that waits and whose host does not answer is given up.
const OUT_OF_REACH: Duration = Duration::from_secs(12);

/// How many fetches are served at once; others wait for their turn.
const AT_ONCE: usize = 64;

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
    pub(crate) tell: Arc<dyn Fn(Served) + Send + Sync>,
    at_once: Arc<Semaphore>,
}

impl Serving {
    pub(crate) fn new(
        (run, models): (Run, usize),
        store: Arc<Store>,
        threads: Arc<Threads>,
        tell: impl Fn(Served) + Send + Sync + 'static,
    ) -> Self {
        Self {
            run,
            models,
            store,
            threads,
            tell: Arc::new(tell),
            at_once: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }

    /// Serves one child until it hangs up. Between two fetches it costs a descriptor
    /// and no thread.
    pub(crate) async fn child(self, mut socket: tokio::net::TcpStream) {
        if let Err(error) = keep_alive(&socket) {
            tracing::debug!("a relay below is served without an eye on its host: {error}");
        }
        loop {
            match self.fetch(socket).await {
                Ok(Some(same)) => socket = same,
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!("a relay below is served no more: {error}");
                    return;
                }
            }
        }
    }

    async fn fetch(
        &self,
        mut socket: tokio::net::TcpStream,
    ) -> io::Result<Option<tokio::net::TcpStream>> {
        let Some(fetch) = read_fetch(&mut socket).await? else {
            return Ok(None);
        };
        let permit = loop {
            let permit = self.at_once.clone().acquire_owned();
            match tokio::time::timeout(IDLE, permit).await {
                Ok(Ok(permit)) => break permit,
                Ok(Err(_)) => return Ok(None),
                // It waits for its turn, and hears that this end is there.
                Err(_) => socket.write_all(&words(&ToChild::Idle)?).await?,
            }
        };
        let mut socket = socket.into_std()?;
        socket.set_nonblocking(false)?;
        socket.set_write_timeout(Some(STUCK))?;
        let Some(watched) = self.threads.watch(&socket)? else {
            return Ok(None);
        };
        let (done, served) = oneshot::channel();
        let own = self.clone();
        self.threads.spawn("weightsync-serve", move || {
            let result = own.serve(&mut socket, &fetch);
            drop((watched, permit));
            // Whoever waited for it may have gone.
            let _ = done.send(result.map(|()| socket));
        })?;
        let Ok(socket) = served.await else {
            return Ok(None);
        };
        let socket = socket?;
        socket.set_nonblocking(true)?;
        tokio::net::TcpStream::from_std(socket).map(Some)
    }

    fn serve(&self, socket: &mut TcpStream, fetch: &ToParent) -> io::Result<()> {
        let &ToParent::Fetch {
            run,
            agent,
            model,
            version,
            ref ranges,
        } = fetch;
        let item = Item {
            model: model.into(),
            version,
        };
        if run != self.run {
            return say_gone(socket, "it belongs to another run");
        }
        if item.model >= self.models {
            return say_gone(socket, "there is no such model");
        }
        (self.tell)(Served::Wanted { item });
        let sent = serve_one(socket, &self.store, item, ranges);
        (self.tell)(Served::Unwanted { item });
        match sent {
            Ok(0) => {}
            Ok(bytes) => (self.tell)(Served::Sent { bytes }),
            Err(error) => {
                tracing::debug!("agent {agent} has not got all of {item:?}: {error}");
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Has the system find out when a child that waits is out of reach for good.
fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, OUT_OF_REACH / 2)?;
    sockopt::set_tcp_keepintvl(socket, OUT_OF_REACH / 6)?;
    Ok(sockopt::set_tcp_keepcnt(socket, 3)?)
}

/// Sends what was asked for; how many bytes of it.
fn serve_one(
    socket: &mut TcpStream,
    store: &Store,
    item: Item,
    ranges: &[ChunkRange],
) -> io::Result<u64> {
    let mut sent = 0;
    let Some(held) = find(socket, store, item)? else {
        return Ok(sent);
    };
    let indices = ranges.iter().flat_map(|range| {
        let first = range.first as usize;
        first..first + range.count as usize
    });
    for index in indices {
        if index >= held.chunks() {
            say_gone(socket, "it has not so many chunks")?;
            return Ok(sent);
        }
        loop {
            match store.chunk(&held, index, IDLE) {
                Look::Ready(bytes, crc) => {
                    let head = ChunkHead {
                        model: item.model as u8,
                        version: item.version,
                        index: index as u32,
                        bytes: bytes.len() as u32,
                        crc,
                        image_bytes: held.image_bytes(),
                    };
                    write_both(socket, &head.frame(), bytes)?;
                    sent += bytes.len() as u64;
                    break;
                }
                Look::NotYet => say(socket, &ToChild::Idle)?,
                Look::Gone => {
                    say_gone(socket, "it was replaced by a newer one")?;
                    return Ok(sent);
                }
            }
        }
    }
    say(socket, &ToChild::End)?;
    Ok(sent)
}

/// The version, once there is anything of it here. `None`: the child was told that
/// there will not be.
fn find(socket: &mut TcpStream, store: &Store, item: Item) -> io::Result<Option<Arc<Held>>> {
    let since = Instant::now();
    let mut said = since;
    loop {
        if let Some(held) = store.get(item) {
            return Ok(Some(held));
        }
        let over = store.is_sender() || since.elapsed() > PATIENCE;
        if over || store.is_refused(item, since) {
            say_gone(socket, "it is not kept any more")?;
            return Ok(None);
        }
        store.wait_for(item, IDLE);
        if said.elapsed() >= IDLE {
            said = Instant::now();
            say(socket, &ToChild::Idle)?;
        }
    }
}

/// The child's next words; `None` once it has hung up.
async fn read_fetch(socket: &mut tokio::net::TcpStream) -> io::Result<Option<ToParent>> {
    let mut header = [0; HEADER_BYTES];
    // A child waits for as long as it likes, but what it has begun to say it goes on
    // saying.
    let (first, rest) = header.split_at_mut(1);
    match socket.read_exact(first).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    tokio::time::timeout(STUCK, socket.read_exact(rest))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let header = Header::decode(&header, &[Kind::Bulk]).map_err(invalid)?;
    let mut payload = vec![0; header.len];
    tokio::time::timeout(STUCK, socket.read_exact(&mut payload))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    header.check(&payload).map_err(invalid)?;
    ToParent::decode(&payload).map(Some).map_err(invalid)
}

fn say_gone(socket: &mut TcpStream, reason: &str) -> io::Result<()> {
    let reason = reason.into();
    say(socket, &ToChild::Gone { reason })
}

fn say(socket: &mut TcpStream, message: &ToChild) -> io::Result<()> {
    socket.write_all(&words(message)?)
}

fn words(message: &ToChild) -> io::Result<Vec<u8>> {
    message.frame().map_err(invalid)
}

fn write_both(socket: &mut TcpStream, mut head: &[u8], mut bytes: &[u8]) -> io::Result<()> {
    debug_assert!(bytes.len() <= CHUNK as usize);
    while !bytes.is_empty() || !head.is_empty() {
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
