//! Links: connections that are framed, authenticated and bounded, and that notice silence.
//!
//! **Guarantee.** Every message of a link comes from a process that has the key, whole and in
//! order. Each end sends something at least every 200 ms. An end that has sent nothing for 800
//! ms counts as silent, and the link ends. No wait on a link is unbounded: a link also ends if
//! its peer does not read.

mod admission;
pub(crate) mod blocking;
pub(crate) mod listen;
pub(crate) mod log_limiter;

use std::io;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::access::Key;
use crate::wire::frame::{self, Decoder, FrameError, Kind};
use crate::wire::hello::{
    Agreed, Client, HELLO_BYTES, HelloError, NONCE_BYTES, Next, Protocols, Role, Server,
};
use crate::wire::message::{FromRoot, Message, MessageError, ToRoot};

/// How often an end that has nothing to say says so.
const HEARTBEAT: Duration = Duration::from_millis(200);

/// A link on which nothing has come for so long is silent.
pub(crate) const SUSPECT: Duration = Duration::from_millis(800);

/// A peer that takes nothing for so long does not read.
const STUCK: Duration = Duration::from_secs(5);

/// How long a whole handshake may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(2);

/// How many messages may wait to be sent.
const QUEUE: usize = 4096;

/// Messages of a control link in one direction.
pub(crate) trait Word: Message + Send + 'static {
    /// What says that its end is there.
    fn ping() -> Self;
    fn is_ping(&self) -> bool;
}

impl Word for ToRoot {
    fn ping() -> Self {
        Self::Ping
    }

    fn is_ping(&self) -> bool {
        matches!(self, Self::Ping)
    }
}

impl Word for FromRoot {
    fn ping() -> Self {
        Self::Ping
    }

    fn is_ping(&self) -> bool {
        matches!(self, Self::Ping)
    }
}

/// Why a link has ended.
#[derive(Debug)]
pub(crate) enum LinkEnd {
    /// The other end has closed the connection.
    HungUp,
    /// Nothing has come for too long.
    Silent,
    /// It does not read what it is sent.
    Stuck,
    /// It reads, and more slowly than it is told things.
    Behind,
    /// The connection failed.
    Failed(io::Error),
    /// What came is no frame, or no message.
    Frame(FrameError),
    Message(MessageError),
}

impl LinkEnd {
    /// What the other end did that it must not, in a word.
    pub(crate) fn misbehaviour(&self) -> Option<&'static str> {
        match self {
            Self::Stuck => Some("stuck"),
            Self::Behind => Some("behind"),
            Self::Frame(_) => Some("frame"),
            Self::Message(_) => Some("message"),
            Self::HungUp | Self::Silent | Self::Failed(_) => None,
        }
    }
}

impl std::fmt::Display for LinkEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HungUp => f.write_str("it hung up"),
            Self::Silent => write!(f, "nothing arrived from it for {SUSPECT:?}"),
            Self::Stuck => write!(f, "it has read nothing for {STUCK:?}"),
            Self::Behind => write!(f, "{QUEUE} messages wait for it"),
            Self::Failed(error) => write!(f, "{error}"),
            Self::Frame(error) => write!(f, "{error}"),
            Self::Message(error) => write!(f, "{error}"),
        }
    }
}

/// What is handed to a link to be sent.
enum Outgoing {
    /// Frames.
    Frames(Arc<[u8]>),
    /// Nothing more comes; what was handed over is still sent.
    End,
}

/// One end of a control link. Dropped, it hangs up.
pub(crate) struct Link<Out> {
    sender: mpsc::Sender<Outgoing>,
    /// A message found no room.
    full: Arc<Notify>,
    /// The next sign of life is handed on.
    sign: Arc<AtomicBool>,
    tasks: [JoinHandle<()>; 2],
    out: PhantomData<fn(Out)>,
}

impl<Out: Word> Link<Out> {
    /// Takes over a connection whose handshake is done. Each message goes to
    /// `events`, as `event` makes one of it, and so does the end, after which
    /// nothing more comes but perhaps another end.
    pub(crate) fn start<In: Word, E: Send + 'static>(
        socket: TcpStream,
        events: &mpsc::Sender<E>,
        event: impl Fn(Result<In, LinkEnd>) -> E + Send + Sync + Clone + 'static,
    ) -> Self {
        let (reader, writer) = socket.into_split();
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (sink, make) = (events.clone(), event.clone());
        let sign = Arc::new(AtomicBool::new(false));
        let signs = sign.clone();
        let read = tokio::spawn(async move {
            if let Some(end) = read_all(reader, &sink, &make, &signs).await {
                let _ = sink.send(make(Err(end))).await;
            }
        });
        let sink = events.clone();
        let full = Arc::new(Notify::new());
        let overrun = full.clone();
        let write = tokio::spawn(async move {
            let written = tokio::select! {
                written = write_all::<Out>(writer, receiver) => written,
                () = overrun.notified() => Err(LinkEnd::Behind),
            };
            if let Err(end) = written {
                let _ = sink.send(event(Err(end))).await;
            }
        });
        Self {
            sender,
            full,
            sign,
            tasks: [read, write],
            out: PhantomData,
        }
    }

    /// Sends a message. False: it could not be sent. A peer that does not keep up loses
    /// its link by that: the end is an event like any other.
    pub(crate) fn send(&self, message: &Out) -> bool {
        match frames(std::slice::from_ref(message)) {
            Ok(frames) => self.send_frames(frames),
            Err(error) => {
                tracing::error!("an invalid message was not sent: {error}");
                false
            }
        }
    }

    /// Sends what was encoded before.
    pub(crate) fn send_frames(&self, frames: Arc<[u8]>) -> bool {
        let sent = self.sender.try_send(Outgoing::Frames(frames));
        if let Err(TrySendError::Full(_)) = sent {
            self.full.notify_one();
        }
        sent.is_ok()
    }

    /// Has the next that is read, whatever it is, followed by a ping among the events.
    pub(crate) fn expect_sign(&self) {
        self.sign.store(true, Ordering::Relaxed);
    }

    /// Sends what was handed over so far, then hangs up; waits for that, but not
    /// long.
    pub(crate) async fn finish(mut self) {
        let _ = self.sender.try_send(Outgoing::End);
        let [_, write] = &mut self.tasks;
        let _ = timeout(HEARTBEAT, write).await;
    }
}

impl<Out> Drop for Link<Out> {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl<Out> std::fmt::Debug for Link<Out> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Link")
    }
}

/// Messages as they travel.
pub(crate) fn frames<M: Message>(messages: &[M]) -> Result<Arc<[u8]>, MessageError> {
    let mut bytes = Vec::new();
    for message in messages {
        let payload = message.encode()?;
        // Messages are bounded below what a frame takes.
        if frame::encode(M::KIND, &payload, &mut bytes).is_err() {
            return Err(MessageError::TooLong {
                what: "bytes of a message",
                got: payload.len() as u64,
                limit: M::KIND.max_payload() as u64,
            });
        }
    }
    Ok(bytes.into())
}

async fn read_all<In: Word, E>(
    mut reader: OwnedReadHalf,
    events: &mpsc::Sender<E>,
    event: &(impl Fn(Result<In, LinkEnd>) -> E + Sync),
    sign: &AtomicBool,
) -> Option<LinkEnd> {
    let mut decoder = Decoder::new(&[Kind::Control]);
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = match timeout(SUSPECT, reader.read(&mut buffer)).await {
            Err(_) => return Some(LinkEnd::Silent),
            Ok(Err(error)) => return Some(LinkEnd::Failed(error)),
            Ok(Ok(0)) => return Some(LinkEnd::HungUp),
            Ok(Ok(read)) => read,
        };
        let signs = sign.swap(false, Ordering::Relaxed);
        let mut input = &buffer[..read];
        loop {
            let frame = match decoder.next(&mut input) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => return Some(LinkEnd::Frame(error)),
            };
            match In::decode(frame.payload) {
                Ok(message) if message.is_ping() => {}
                Ok(message) => {
                    // Nobody listens any more.
                    events.send(event(Ok(message))).await.ok()?;
                }
                Err(error) => return Some(LinkEnd::Message(error)),
            }
        }
        if signs {
            events.send(event(Ok(In::ping()))).await.ok()?;
        }
    }
}

async fn write_all<Out: Word>(
    mut writer: OwnedWriteHalf,
    mut receiver: mpsc::Receiver<Outgoing>,
) -> Result<(), LinkEnd> {
    let ping = frames(&[Out::ping()]).map_err(LinkEnd::Message)?;
    loop {
        let frames = match timeout(HEARTBEAT, receiver.recv()).await {
            Err(_) => ping.clone(),
            Ok(Some(Outgoing::Frames(frames))) => frames,
            Ok(Some(Outgoing::End) | None) => {
                let _ = writer.shutdown().await;
                return Ok(());
            }
        };
        let mut rest = &frames[..];
        while !rest.is_empty() {
            match timeout(STUCK, writer.write(rest)).await {
                Err(_) => return Err(LinkEnd::Stuck),
                Ok(Err(error)) => return Err(LinkEnd::Failed(error)),
                Ok(Ok(0)) => return Err(LinkEnd::HungUp),
                Ok(Ok(written)) => rest = &rest[written..],
            }
        }
    }
}

/// Connects, and proves both ends to each other.
pub(crate) async fn dial(
    address: SocketAddr,
    key: &Key,
    role: Role,
) -> Result<TcpStream, DialError> {
    let connected = timeout(HANDSHAKE, TcpStream::connect(address)).await;
    let mut socket = connected.map_err(|_| DialError::Silent)??;
    socket.set_nodelay(true)?;
    let (mut client, hello) = Client::new(key.clone(), role, Protocols::OURS, nonce()?);
    let shake = async {
        socket.write_all(&hello).await?;
        let mut wanted = HELLO_BYTES;
        loop {
            let mut bytes = vec![0; wanted];
            if let Err(error) = socket.read_exact(&mut bytes).await {
                return Err(match error.kind() {
                    io::ErrorKind::UnexpectedEof => DialError::Hello(client.hung_up()),
                    _ => DialError::Failed(error),
                });
            }
            let step = client.feed(&mut &bytes[..]);
            socket.write_all(&step.send).await?;
            match step.next {
                Next::Read(more) => wanted = more,
                Next::Done(_) => return Ok(()),
                Next::Close(error) => return Err(DialError::Hello(error)),
            }
        }
    };
    timeout(HANDSHAKE, shake)
        .await
        .map_err(|_| DialError::Unanswered)??;
    Ok(socket)
}

/// Why a connection was not made.
#[derive(Debug)]
pub(crate) enum DialError {
    /// No connection came about in time.
    Silent,
    /// A connection came about, and nobody answered on it in time.
    Unanswered,
    /// The connection failed.
    Failed(io::Error),
    /// The other end is not one to talk to.
    Hello(HelloError),
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl std::fmt::Display for DialError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => write!(f, "no connection within {HANDSHAKE:?}"),
            Self::Unanswered => write!(f, "it did not answer within {HANDSHAKE:?}"),
            Self::Failed(error) => write!(f, "{error}"),
            Self::Hello(error) => write!(f, "{error}"),
        }
    }
}

/// Lets a client prove itself; each client has [`HANDSHAKE`] for all of it. One that
/// fails is told so if `answers` says that.
pub(crate) async fn greet(
    socket: &mut TcpStream,
    key: &Key,
    busy: bool,
    answers: impl Fn() -> bool,
) -> Result<Agreed, GreetError> {
    let shake = async {
        let mut server = Server::new(key.clone(), Protocols::OURS, busy, nonce()?);
        let mut wanted = HELLO_BYTES;
        loop {
            let mut bytes = vec![0; wanted];
            if let Err(error) = socket.read_exact(&mut bytes).await {
                return Err(match error.kind() {
                    io::ErrorKind::UnexpectedEof => GreetError::Hello(server.hung_up()),
                    _ => GreetError::Failed(error),
                });
            }
            let step = server.feed(&mut &bytes[..]);
            // Who is told that there is no room has done nothing wrong.
            let failed =
                matches!(&step.next, Next::Close(error) if *error != HelloError::TurnedAway);
            if !failed || (!step.send.is_empty() && answers()) {
                socket.write_all(&step.send).await?;
            }
            match step.next {
                Next::Read(more) => wanted = more,
                Next::Done(agreed) => return Ok(agreed),
                Next::Close(error) => return Err(GreetError::Hello(error)),
            }
        }
    };
    timeout(HANDSHAKE, shake)
        .await
        .map_err(|_| GreetError::Slow)?
}

/// Why a client was refused.
#[derive(Debug)]
pub(crate) enum GreetError {
    /// It took too long.
    Slow,
    /// The connection failed.
    Failed(io::Error),
    /// It is not one to talk to.
    Hello(HelloError),
}

impl GreetError {
    /// Whether the client hung up, and had done nothing wrong by then.
    pub(crate) fn is_hang_up(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        match self {
            Self::Hello(HelloError::HungUp { .. }) => true,
            Self::Failed(error) => matches!(
                error.kind(),
                BrokenPipe | ConnectionAborted | ConnectionReset
            ),
            Self::Slow | Self::Hello(_) => false,
        }
    }
}

impl From<io::Error> for GreetError {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl std::fmt::Display for GreetError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Slow => write!(f, "its handshake took more than {HANDSHAKE:?}"),
            Self::Failed(error) => write!(f, "{error}"),
            Self::Hello(error) => write!(f, "{error}"),
        }
    }
}

/// Random bytes for one handshake.
pub(crate) fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    let mut filled = 0;
    while filled < nonce.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut nonce[filled..], flags)?;
    }
    Ok(nonce)
}

#[cfg(test)]
mod tests;
