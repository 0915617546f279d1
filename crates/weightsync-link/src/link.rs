//! Links: connections that are framed, authenticated and bounded, and that notice silence.
//!
//! **Guarantee.** Every message of a link comes from a process that has the key, whole and in
//! order. Each end sends something at least every 200 ms. An end that has sent nothing for 800
//! ms, and whose host has not answered what this end sent, counts as silent, and the link ends; so
//! does an end that has sent nothing for 5 s though its host answers. No wait on a link is unbounded:
//! a link also ends if its peer does not read.

use std::io;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{timeout, timeout_at};
use weightsync_core::Remedy;

use crate::frame::{self, Decoder, FrameError, FrameKind};
use crate::hello::{
    Agreed, ClientHandshake, HELLO_BYTES, HelloError, LinkRole, NONCE_BYTES, Next, Protocols,
    ServerHandshake, TurnsAway,
};
use crate::message::{Message, MessageError};
use crate::secure::Credentials;
use crate::silence::{Silence, SilenceLimits};
use crate::stream::AsyncStream;
use crate::tls::{ClientAuth, TlsPeer};

/// How often an idle end sends a sign of life.
const HEARTBEAT: Duration = Duration::from_millis(200);

/// A link on which nothing arrives for this long is silent, if the other host answers nothing either.
pub const SUSPECT: Duration = Duration::from_millis(800);

/// A link on which nothing arrives for this long is silent although the other host answers: its
/// process is stopped, or has not got to run for all this time.
pub const STARVED: Duration = Duration::from_secs(5);

/// When a link is silent. Each end sends something every [`HEARTBEAT`], so one look is enough for a host
/// that answers nothing.
const SILENCE: SilenceLimits = SilenceLimits {
    look: SUSPECT,
    unanswered: 1,
    host: Duration::ZERO,
    end: STARVED,
    unknown: SUSPECT,
};

/// A peer that reads nothing for this long is stuck.
const STUCK: Duration = Duration::from_secs(5);

/// How long a whole handshake may take.
pub const HANDSHAKE: Duration = Duration::from_secs(2);

/// How many messages may wait to be sent.
const QUEUE: usize = 4096;

/// The messages of one direction of a control link.
pub trait ControlMessage: Message + Send + 'static {
    /// The message that only shows that this end is alive.
    fn ping() -> Self;

    /// Whether it is that message.
    fn is_ping(&self) -> bool;
}

/// Why a link has ended.
#[derive(Debug)]
pub enum LinkEnd {
    /// The peer closed the connection.
    HungUp,
    /// Nothing arrived for too long.
    Silent(Duration),
    /// The peer reads nothing.
    Stuck,
    /// The peer reads more slowly than this end sends.
    Behind,
    /// The connection failed.
    Failed(io::Error),
    /// The peer sent an invalid frame.
    Frame(FrameError),
    /// The peer sent an invalid message.
    Message(MessageError),
}

impl LinkEnd {
    /// What the peer did wrong, in a word; `None` if it did nothing wrong.
    pub fn misbehaviour(&self) -> Option<&'static str> {
        match self {
            Self::Stuck => Some("stuck"),
            Self::Behind => Some("behind"),
            Self::Frame(_) => Some("frame"),
            Self::Message(_) => Some("message"),
            Self::HungUp | Self::Silent(_) | Self::Failed(_) => None,
        }
    }
}

impl std::fmt::Display for LinkEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HungUp => f.write_str("it hung up"),
            Self::Silent(time) => write!(f, "nothing arrived from it for {time:?}"),
            Self::Stuck => write!(f, "it has read nothing for {STUCK:?}"),
            Self::Behind => write!(f, "{QUEUE} messages wait for it"),
            Self::Failed(error) => write!(f, "{error}"),
            Self::Frame(error) => write!(f, "{error}"),
            Self::Message(error) => write!(f, "{error}"),
        }
    }
}

/// What a link is to send.
enum Outgoing {
    /// Frames.
    Frames(Arc<[u8]>),
    /// The end: everything before it is still sent.
    End,
}

/// One end of a control link. Dropping it hangs up.
pub struct Link<Out> {
    sender: mpsc::Sender<Outgoing>,
    /// The queue was full, so a message was lost.
    full: Arc<Notify>,
    /// A sign of life is expected: see [`Link::expect_sign`].
    sign: Arc<AtomicBool>,
    tasks: [JoinHandle<()>; 2],
    out: PhantomData<fn(Out)>,
}

impl<Out: ControlMessage> Link<Out> {
    /// Starts a link on a connection whose handshake is done. Each message goes to `events`,
    /// converted by `event`, and so does the end of the link. After that no message follows, but
    /// perhaps another end.
    pub fn start<In: ControlMessage, E: Send + 'static>(
        socket: AsyncStream,
        events: &mpsc::Sender<E>,
        event: impl Fn(Result<In, LinkEnd>) -> E + Send + Sync + Clone + 'static,
    ) -> Self {
        // Both halves have the connection for themselves.
        let host = socket.socket().as_fd().try_clone_to_owned().ok();
        let (reader, writer) = tokio::io::split(socket);
        // Bounded, so that `send` never waits: a full queue ends the link.
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (sink, make) = (events.clone(), event.clone());
        let sign = Arc::new(AtomicBool::new(false));
        let signs = sign.clone();
        let read = tokio::spawn(async move {
            if let Some(end) = read_all(reader, host, &sink, &make, &signs).await {
                let _ = sink.send(make(Err(end))).await;
            }
        });
        let sink = events.clone();
        let full = Arc::new(Notify::new());
        let overrun = full.clone();
        let write = tokio::spawn(async move {
            // A peer that reads slowly keeps the writer busy, so the overrun has to end it from
            // outside.
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

    /// Sends a message. Returns false if the queue is full: the peer does not keep up, and its link
    /// ends, which is an event as usual.
    pub fn send(&self, message: &Out) -> bool {
        match frames(std::slice::from_ref(message)) {
            Ok(frames) => self.send_frames(frames),
            Err(error) => {
                tracing::error!("an invalid message was not sent: {error}");
                false
            }
        }
    }

    /// Sends encoded frames.
    pub fn send_frames(&self, frames: Arc<[u8]>) -> bool {
        let sent = self.sender.try_send(Outgoing::Frames(frames));
        if let Err(TrySendError::Full(_)) = sent {
            self.full.notify_one();
        }
        sent.is_ok()
    }

    /// Follows the next thing that arrives with a ping among the events, whatever it is. What has
    /// arrived already, read or not, may be the last words of a process that is gone.
    pub fn expect_sign(&self) {
        self.sign.store(true, Ordering::Relaxed);
    }

    /// Sends everything queued so far, then hangs up; waits for that, but not long.
    pub async fn finish(mut self) {
        let _ = self.sender.try_send(Outgoing::End);
        // The writer ends with the last message. The reader is aborted when this is dropped.
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

/// Encodes messages as frames.
///
/// # Errors
///
/// [`MessageError`] for one that the other end would refuse.
pub fn frames<M: Message>(messages: &[M]) -> Result<Arc<[u8]>, MessageError> {
    let mut bytes = Vec::new();
    for message in messages {
        let payload = message.encode()?;
        // Messages are bounded to less than a frame takes.
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

async fn read_all<In: ControlMessage, E>(
    mut reader: ReadHalf<AsyncStream>,
    host: Option<OwnedFd>,
    events: &mpsc::Sender<E>,
    event: &(impl Fn(Result<In, LinkEnd>) -> E + Sync),
    sign: &AtomicBool,
) -> Option<LinkEnd> {
    let mut decoder = Decoder::new(&[FrameKind::Control]);
    let mut buffer = vec![0; 64 << 10];
    let mut silence = Silence::new(SILENCE);
    // A sign is expected, and all that came before has been read.
    let (mut expects, mut is_drained) = (false, false);
    loop {
        // A limit of zero takes only what has arrived already.
        let most = match expects && !is_drained {
            true => Duration::ZERO,
            false => SUSPECT,
        };
        let read = match timeout(most, reader.read(&mut buffer)).await {
            Err(_) if most.is_zero() => {
                is_drained = true;
                continue;
            }
            Err(_) => {
                let answers = host.as_ref().and_then(weightsync_mem::host_answers);
                match silence.goes_on(answers) {
                    None => continue,
                    Some(_) => return Some(LinkEnd::Silent(silence.lasted())),
                }
            }
            Ok(Err(error)) => return Some(LinkEnd::Failed(error)),
            Ok(Ok(0)) => return Some(LinkEnd::HungUp),
            Ok(Ok(read)) => read,
        };
        silence.ends();
        // Where one more asks meanwhile, these may be the last words for it.
        let asked = sign.swap(false, Ordering::Relaxed);
        let signs = expects && is_drained && !asked;
        if asked || signs {
            (expects, is_drained) = (asked, false);
        }
        if let Err(end) = hand_out(&mut decoder, &buffer[..read], events, event).await {
            return end;
        }
        if signs {
            events.send(event(Ok(In::ping()))).await.ok()?;
        }
    }
}

/// Hands out the messages that are whole with this input. An error is the end of the link, without
/// a reason if the receiver of the events has gone.
async fn hand_out<In: ControlMessage, E>(
    decoder: &mut Decoder,
    mut input: &[u8],
    events: &mpsc::Sender<E>,
    event: &(impl Fn(Result<In, LinkEnd>) -> E + Sync),
) -> Result<(), Option<LinkEnd>> {
    loop {
        let frame = match decoder.next(&mut input) {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(()),
            Err(error) => return Err(Some(LinkEnd::Frame(error))),
        };
        match In::decode(frame.payload) {
            // It has done its work by arriving: the silence is over.
            Ok(message) if message.is_ping() => {}
            Ok(message) => {
                // The receiver of the events has gone.
                // The send waits for room, so a peer that sends too much is no longer read.
                events.send(event(Ok(message))).await.map_err(|_| None)?;
            }
            Err(error) => return Err(Some(LinkEnd::Message(error))),
        }
    }
}

async fn write_all<Out: ControlMessage>(
    mut writer: WriteHalf<AsyncStream>,
    mut receiver: mpsc::Receiver<Outgoing>,
) -> Result<(), LinkEnd> {
    // Encoded once: an idle link sends five of them each second.
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
            // For each write, so a slow peer that still reads is not stuck.
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
///
/// # Errors
///
/// [`DialError`].
pub async fn dial(
    address: SocketAddr,
    credentials: &Credentials,
    peer: TlsPeer<'_>,
    role: LinkRole,
) -> Result<AsyncStream, DialError> {
    let connected = timeout(HANDSHAKE, TcpStream::connect(address)).await;
    let socket = connected.map_err(|_| DialError::Silent)??;
    // Messages are small. None of them may wait for the acknowledgement of the one before.
    socket.set_nodelay(true)?;
    let secured = timeout(
        HANDSHAKE,
        AsyncStream::dial(socket, credentials.tls.as_ref(), address, peer),
    )
    .await;
    let mut socket = secured.map_err(|_| DialError::Unanswered)??;
    let key = credentials.key.clone();
    let (mut client, hello) = ClientHandshake::new(key, role, Protocols::OURS, nonce()?);
    let shake = async {
        socket.write_all(&hello).await?;
        let mut wanted = HELLO_BYTES;
        loop {
            // Exactly what the handshake needs next. What follows it belongs to the frames.
            let mut bytes = vec![0; wanted];
            if let Err(error) = socket.read_exact(&mut bytes).await {
                return Err(match error.kind() {
                    io::ErrorKind::UnexpectedEof => DialError::Hello(client.hung_up()),
                    _ => error.into(),
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
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No connection was made in time.
    #[error("no connection within {HANDSHAKE:?}")]
    Silent,
    /// A connection was made, but got no answer in time.
    #[error("it did not answer within {HANDSHAKE:?}")]
    Unanswered,
    /// The connection failed.
    #[error(transparent)]
    Failed(io::Error),
    /// The peer failed the handshake.
    #[error(transparent)]
    Hello(HelloError),
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        match hello_of(&error) {
            Some(hello) => Self::Hello(hello.clone()),
            None => Self::Failed(error),
        }
    }
}

/// The error of a handshake that an error of a connection holds.
fn hello_of(error: &io::Error) -> Option<&HelloError> {
    error.get_ref()?.downcast_ref()
}

/// What ended a handshake, if that is the cause of this error; and whether another attempt gets
/// the same until somebody changes an end.
pub fn refusal(error: &(dyn std::error::Error + 'static)) -> Option<(String, bool)> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(hello) = error.downcast_ref::<io::Error>().and_then(hello_of) {
            // An end with an expired certificate waits for a new one, which somebody has to make.
            let lasts = matches!(hello, HelloError::Tls { .. }) || hello.remedy() != Remedy::Retry;
            return Some((hello.to_string(), lasts));
        }
        next = error.source();
    }
    None
}

/// Authenticates a client within [`HANDSHAKE`]. A client that fails is notified only if `answers`
/// allows it.
pub(crate) async fn greet(
    (socket, from): (TcpStream, SocketAddr),
    credentials: &Credentials,
    busy: bool,
    answers: impl Fn() -> bool,
) -> Result<(AsyncStream, Agreed), GreetError> {
    // One deadline for all steps: a stranger gains nothing by going slowly.
    let until = tokio::time::Instant::now() + HANDSHAKE;
    let tls = credentials.tls.as_ref();
    let secured = AsyncStream::accept(socket, tls, from, ClientAuth::Certificate);
    let secured = timeout_at(until, secured).await;
    let (mut socket, is_plain) = secured.map_err(|_| GreetError::Slow)??;
    // A plain client is told to encrypt even if there is no room: it would come back plain.
    let turns_away = match (is_plain, busy) {
        (true, _) => Some(TurnsAway::Plain),
        (false, true) => Some(TurnsAway::Busy),
        (false, false) => None,
    };
    let shake = async {
        let key = credentials.key.clone();
        let mut server = ServerHandshake::new(key, Protocols::OURS, turns_away, nonce()?);
        let mut wanted = HELLO_BYTES;
        loop {
            let mut bytes = vec![0; wanted];
            if let Err(error) = socket.read_exact(&mut bytes).await {
                return Err(match error.kind() {
                    io::ErrorKind::UnexpectedEof => GreetError::Hello(server.hung_up()),
                    _ => error.into(),
                });
            }
            let step = server.feed(&mut &bytes[..]);
            // A client that is refused for lack of room has done nothing wrong.
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
    let agreed = timeout_at(until, shake).await;
    let agreed = agreed.map_err(|_| GreetError::Slow)??;
    Ok((socket, agreed))
}

/// Why a client was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GreetError {
    /// The client took too long.
    #[error("its handshake took more than {HANDSHAKE:?}")]
    Slow,
    /// The connection failed.
    #[error(transparent)]
    Failed(io::Error),
    /// The client failed the handshake.
    #[error(transparent)]
    Hello(HelloError),
}

impl From<io::Error> for GreetError {
    fn from(error: io::Error) -> Self {
        match hello_of(&error) {
            Some(hello) => Self::Hello(hello.clone()),
            None => Self::Failed(error),
        }
    }
}

impl GreetError {
    /// Whether the client hung up before it did anything wrong.
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

/// Random bytes for one handshake.
pub(crate) fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    weightsync_engine::transport::random().map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
