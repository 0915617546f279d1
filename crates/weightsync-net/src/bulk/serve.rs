//! The parent's end of a bulk link.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use weightsync_core::Run;

use super::store::{Held, Look, Store};
use super::{IDLE, STUCK};
use crate::relay::Item;
use crate::wire::frame::{self, CHUNK, ChunkHead, HEADER_BYTES, Header, Kind};
use crate::wire::message::{ChunkRange, Message, ToChild, ToParent};

/// How long a relay asks above for a version that it does not have.
const PATIENCE: Duration = Duration::from_secs(30);

/// After so long a child that waits and whose host does not answer is given up.
const OUT_OF_REACH: Duration = Duration::from_secs(12);

/// What a parent notices while it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// A child wants a version.
    Wanted { item: Item },
    /// It wants it no more: it has it, or is gone.
    Unwanted { item: Item },
    /// So much went to a child, in a time during which there was something for it.
    Speed {
        child: u64,
        bytes: u64,
        busy: Duration,
    },
}

/// Serves one child until it hangs up.
pub(crate) fn serve(
    mut socket: TcpStream,
    run: Run,
    store: &Arc<Store>,
    tell: &(dyn Fn(Served) + Send + Sync),
) -> io::Result<()> {
    socket.set_nodelay(true)?;
    keep_alive(&socket)?;
    socket.set_write_timeout(Some(STUCK))?;
    loop {
        let Some(ToParent::Fetch {
            run: theirs,
            agent,
            model,
            version,
            ranges,
        }) = read_fetch(&mut socket)?
        else {
            return Ok(());
        };
        let item = Item {
            model: model.into(),
            version,
        };
        if theirs != run {
            say_gone(&mut socket, "it belongs to another run")?;
            continue;
        }
        tell(Served::Wanted { item });
        let sent = serve_one(&mut socket, store, item, &ranges);
        tell(Served::Unwanted { item });
        let Sent { bytes, busy } = sent?;
        if bytes > 0 {
            tell(Served::Speed {
                child: agent,
                bytes,
                busy,
            });
        }
    }
}

/// Has the system find out when a child that waits is out of reach for good: its
/// thread would wait for ever, and there are only so many.
fn keep_alive(socket: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, OUT_OF_REACH / 2)?;
    sockopt::set_tcp_keepintvl(socket, OUT_OF_REACH / 6)?;
    Ok(sockopt::set_tcp_keepcnt(socket, 3)?)
}

struct Sent {
    bytes: u64,
    busy: Duration,
}

fn serve_one(
    socket: &mut TcpStream,
    store: &Store,
    item: Item,
    ranges: &[ChunkRange],
) -> io::Result<Sent> {
    let mut sent = Sent {
        bytes: 0,
        busy: Duration::ZERO,
    };
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
                    let since = Instant::now();
                    write_both(socket, &head.frame(), bytes)?;
                    sent.busy += since.elapsed();
                    sent.bytes += bytes.len() as u64;
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
fn read_fetch(socket: &mut TcpStream) -> io::Result<Option<ToParent>> {
    let mut header = [0; HEADER_BYTES];
    // A child waits for as long as it likes, but what it has begun to say it goes on
    // saying.
    let (first, rest) = header.split_at_mut(1);
    socket.set_read_timeout(None)?;
    match socket.read_exact(first) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    socket.set_read_timeout(Some(STUCK))?;
    socket.read_exact(rest)?;
    let header = Header::decode(&header, &[Kind::Bulk]).map_err(invalid)?;
    let mut payload = vec![0; header.len];
    socket.read_exact(&mut payload)?;
    header.check(&payload).map_err(invalid)?;
    ToParent::decode(&payload).map(Some).map_err(invalid)
}

fn say_gone(socket: &mut TcpStream, reason: &str) -> io::Result<()> {
    let reason = reason.into();
    say(socket, &ToChild::Gone { reason })
}

fn say(socket: &mut TcpStream, message: &ToChild) -> io::Result<()> {
    let mut bytes = Vec::new();
    let payload = message.encode().map_err(invalid)?;
    frame::encode(Kind::Bulk, &payload, &mut bytes).map_err(invalid)?;
    socket.write_all(&bytes)
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
