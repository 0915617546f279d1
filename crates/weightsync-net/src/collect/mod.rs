//! Links between a collector's trainer and workers of other hosts: orders go down, frames come up.
//!
//! **Guarantee.** A part is handed on once all its bytes have come and each piece's checksum holds:
//! never half of it. The trainer writes only where its own order said, whatever a worker sends. An
//! end is gone when its connection is closed, or its host has answered no packet for 10 s; one that
//! is starved or stopped is waited for (`silence`). Each end sends something at least every second,
//! from a thread of its own, so that there is something to answer. Every connection has proved that
//! it has the secret.
//!
//! **Code goes down.** A worker runs what its trainer starts it with. Without certificates, a program
//! that can change the traffic between them can run programs on the worker, so a plain link off loopback
//! takes a permission of its own, which that for weights does not include.
//!
//! The trainer has two threads for each worker. One reads, checks each piece while it is in the
//! cache, and writes it into the collector's memory file. The other sends orders and signs of life.
//! No other thread waits for a slow worker. A worker has the same two threads, and sends parts from
//! the thread that calls.

mod incoming;
mod place;
#[cfg(test)]
mod tests;
mod trainer;
mod worker;

use std::io::{self, BufReader, IoSlice, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use weightsync_engine::transport::SILENT_SENDER;
use weightsync_link::frame::{FrameError, FrameHeader, FrameKind, HEADER_BYTES, MAX_PIECE, header};
use weightsync_link::message::{Message, MessageError};
use weightsync_link::silence::{Silence, SilenceLimits, SilentPeer};

pub use self::incoming::Rows;
pub use self::place::{NoticeKind, WorkerNotice, WorkerSeat};
pub use self::trainer::CollectorPort;
pub use self::worker::{CollectorLink, JoinOptions, JoinedWorker};

use self::incoming::PartError;
use weightsync_link::stream::{Stream, keep_alive};

/// How often an idle end sends a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long a worker may take to say what it wants once it has proved that it has the secret. One
/// whose link ends then asks again.
const ASKS: Duration = Duration::from_secs(10);

/// How long a worker may take to leave once its trainer has ended in order.
const LEAVE: Duration = Duration::from_secs(5);

/// The kinds of frames on these links.
const KINDS: &[FrameKind] = &[FrameKind::Control, FrameKind::Piece];

/// Why a link has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the connection was closed at the other end")]
    Closed,
    #[error("its host answered nothing for {HOST_SILENT:?}")]
    HostSilent,
    #[error("nothing arrived for {0:?}")]
    Silent(Duration),
    #[error("the connection failed: {0}")]
    Failed(io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error(transparent)]
    Part(#[from] PartError),
    #[error("it sends more messages than it was asked for")]
    Flood,
    #[error("its connection was closed for another one, as there were too many")]
    ForAnother,
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        // A reason that `WatchedStream` found comes through the reader as an error of the system.
        match error.downcast::<Self>() {
            Ok(gone) => gone,
            Err(error) => match error.kind() {
                io::ErrorKind::UnexpectedEof => Self::Closed,
                // The system has sent its packets again and again.
                io::ErrorKind::TimedOut => Self::HostSilent,
                _ => Self::Failed(error),
            },
        }
    }
}

/// How long a read waits before this end looks at the other host.
const LOOK: Duration = Duration::from_secs(1);

/// A host that answers no packet for this long is gone.
const HOST_SILENT: Duration = Duration::from_secs(10);

/// An end that sends nothing for this long is gone, though its host answers.
const SILENT: Duration = SILENT_SENDER;

/// When an end is silent that may send nothing for this long.
fn silence(end: Duration) -> Silence {
    Silence::new(SilenceLimits {
        look: LOOK,
        unanswered: 2,
        host: HOST_SILENT,
        end,
        unknown: end,
    })
}

/// A connection that one thread reads from and others write to. A read ends when the other end is
/// gone.
struct WatchedStream {
    stream: Arc<Stream>,
    silence: Silence,
}

impl Read for WatchedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&*self.stream).read(buffer) {
                // Nothing came within the socket's timeout.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let answers = weightsync_mem::host_answers(self.stream.socket());
                    match self.silence.goes_on(answers) {
                        None => {}
                        Some(SilentPeer::Host) => {
                            return Err(io::Error::other(LinkError::HostSilent));
                        }
                        Some(SilentPeer::End(time)) => {
                            return Err(io::Error::other(LinkError::Silent(time)));
                        }
                    }
                }
                Err(error) => return Err(error),
                Ok(count) => {
                    self.silence.ends();
                    return Ok(count);
                }
            }
        }
    }
}

/// The frames that arrive on a link.
struct FrameReader {
    socket: BufReader<WatchedStream>,
    payload: Vec<u8>,
}

impl FrameReader {
    /// Those of an end that may send nothing for this long while its host answers.
    fn new(stream: Arc<Stream>, silent: Duration) -> Self {
        let silence = silence(silent);
        Self {
            // For headers and messages. A piece passes it by.
            socket: BufReader::with_capacity(4 << 10, WatchedStream { stream, silence }),
            payload: Vec::new(),
        }
    }

    /// Sets how long the other end may send nothing from now on.
    fn wait_for(&mut self, silent: Duration) {
        self.socket.get_mut().silence = silence(silent);
    }

    /// The next frame, whole and undamaged.
    fn next(&mut self) -> Result<(FrameKind, &[u8]), LinkError> {
        let mut head = [0; HEADER_BYTES];
        self.socket.read_exact(&mut head)?;
        let header = FrameHeader::decode(&head, KINDS)?;
        // It grows to the largest frame so far. The header's decoder has bounded the length.
        if self.payload.len() < header.len {
            self.payload.resize(header.len, 0);
        }
        let payload = &mut self.payload[..header.len];
        self.socket.read_exact(payload)?;
        header.check(payload)?;
        Ok((header.kind, payload))
    }
}

fn write_frame(mut socket: &Stream, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    let head = header(kind, payload);
    let mut sent = 0;
    // Head and payload in one call, so that the head does not go out in a packet of its own.
    while sent < HEADER_BYTES {
        let both = [IoSlice::new(&head[sent..]), IoSlice::new(payload)];
        match socket.write_vectored(&both) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(now) => sent += now,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    socket.write_all(&payload[sent - HEADER_BYTES..])
}

fn write_message(socket: &Stream, message: &impl Message) -> Result<(), LinkError> {
    Ok(write_frame(socket, FrameKind::Control, &message.encode()?)?)
}

/// Sends bytes in pieces.
fn write_pieces(socket: &Stream, bytes: &[u8]) -> io::Result<()> {
    let mut pieces = bytes.chunks(MAX_PIECE);
    pieces.try_for_each(|piece| write_frame(socket, FrameKind::Piece, piece))
}

/// Has reads look at the other host from time to time. A write waits until the thread that reads
/// finds the other end gone, and shuts the connection down: a worker that does not get to run may
/// read nothing for long.
fn prepare(stream: &Stream) -> io::Result<()> {
    let socket = stream.socket();
    socket.set_nodelay(true)?;
    keep_alive(socket)?;
    socket.set_read_timeout(Some(LOOK))?;
    socket.set_write_timeout(None)
}
