//! The handshake of TLS, before that of the link.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::access::Key;
use crate::hello::HelloError;
use crate::stream::{AsyncStream, Stream};
use crate::tls::session::{self, Handshake, IncomingBytes, OF_MESSAGES, TlsSession};
use crate::tls::{ClientAuth, Tls, TlsPeer};

/// How a client's first record of TLS begins.
const TLS_BEGINS: u8 = 22;

/// How long a peer may take to read why it was refused.
const DRAINED: Duration = Duration::from_millis(300);

/// What an end proves itself with.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The key that both ends have.
    pub key: Key,
    /// Without it links are plain.
    pub tls: Option<Tls>,
}

impl Credentials {
    /// Those of plain links.
    pub fn plain(secret: &[u8; 16]) -> Self {
        Self {
            key: Key::new(secret),
            tls: None,
        }
    }

    /// [`AsyncStream::dial`] over a socket that blocks, by a deadline.
    pub(crate) fn dialled_blocking(
        &self,
        socket: TcpStream,
        address: SocketAddr,
        peer: TlsPeer<'_>,
        until: Instant,
    ) -> io::Result<Stream> {
        let Some(tls) = self.tls.as_ref().filter(|tls| tls.covers(address)) else {
            return Ok(Stream::plain(socket));
        };
        let (mut session, mut incoming) = (tls.dial(peer)?, IncomingBytes::default());
        loop {
            let state = session.shake(&mut incoming);
            let outgoing = std::mem::take(session.outgoing());
            // Before the error is looked at: an alert tells the peer why.
            (&socket).write_all(&outgoing).map_err(ended)?;
            match state.map_err(session::failed)? {
                Handshake::Done => return Ok(Stream::encrypted(socket, session, incoming)),
                Handshake::Reads => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        // A socket refuses a timeout of zero.
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    socket.set_read_timeout(Some(left))?;
                    match (&socket).read(incoming.room(OF_MESSAGES)) {
                        Ok(0) => return Err(hung_up()),
                        Ok(count) => incoming.note_received(count),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(ended(error)),
                    }
                }
            }
        }
    }
}

impl AsyncStream {
    /// Encrypts a connection that this end has made, if there are certificates and its address is to
    /// be encrypted.
    ///
    /// # Errors
    ///
    /// Those of the socket, and one line for a handshake that fails.
    pub async fn dial(
        mut socket: tokio::net::TcpStream,
        tls: Option<&Tls>,
        address: SocketAddr,
        peer: TlsPeer<'_>,
    ) -> io::Result<Self> {
        let Some(tls) = tls.filter(|tls| tls.covers(address)) else {
            return Ok(Self::plain(socket));
        };
        let session = tls.dial(peer)?;
        shaken(&mut socket, session)
            .await
            .map(|(session, incoming)| Self::encrypted(socket, session, incoming))
    }

    /// Encrypts a connection that this end has accepted, if the peer begins so. The second value:
    /// whether the peer must encrypt, and does not. The caller then tells it so, in its protocol.
    ///
    /// # Errors
    ///
    /// Those of the socket, and one line for a handshake that fails, or a peer that begins one where
    /// this end has no certificates.
    pub async fn accept(
        mut socket: tokio::net::TcpStream,
        tls: Option<&Tls>,
        from: SocketAddr,
        asks: ClientAuth,
    ) -> io::Result<(Self, bool)> {
        let mut first = [0];
        // Looked at and left there, because either handshake begins with this byte.
        let is_tls = socket.peek(&mut first).await? == 1 && first[0] == TLS_BEGINS;
        let Some(tls) = tls else {
            if is_tls {
                return Err(io::Error::other(HelloError::NoCertificate));
            }
            return Ok((Self::plain(socket), false));
        };
        if !is_tls {
            return Ok((Self::plain(socket), tls.covers(from)));
        }
        match shaken(&mut socket, tls.accept(asks)?).await {
            Ok((session, incoming)) => Ok((Self::encrypted(socket, session, incoming), false)),
            Err(error) => {
                // To close with bytes unread would take back what the peer was told.
                let _ = socket.shutdown().await;
                let mut unread = [0; 1024];
                let drain = async { while matches!(socket.read(&mut unread).await, Ok(1..)) {} };
                let _ = tokio::time::timeout(DRAINED, drain).await;
                Err(error)
            }
        }
    }
}

/// The handshake. It computes on a thread of its own: that of the links must not be late for them,
/// however many strangers there are.
async fn shaken(
    socket: &mut tokio::net::TcpStream,
    mut session: TlsSession,
) -> io::Result<(TlsSession, IncomingBytes)> {
    let mut incoming = IncomingBytes::default();
    loop {
        let computed = tokio::task::spawn_blocking(move || {
            let state = session.shake(&mut incoming);
            (state, session, incoming)
        });
        let state;
        (state, session, incoming) = computed.await.map_err(io::Error::other)?;
        let outgoing = std::mem::take(session.outgoing());
        // Before the error is looked at, as in `dialled_blocking`.
        socket.write_all(&outgoing).await.map_err(ended)?;
        match state.map_err(session::failed)? {
            Handshake::Done => return Ok((session, incoming)),
            Handshake::Reads => {
                let room = incoming.room(OF_MESSAGES);
                match socket.read(room).await.map_err(ended)? {
                    0 => return Err(hung_up()),
                    count => incoming.note_received(count),
                }
            }
        }
    }
}

/// A peer that closes with bytes unread resets the connection.
fn ended(error: io::Error) -> io::Error {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    match error.kind() {
        BrokenPipe | ConnectionAborted | ConnectionReset => hung_up(),
        _ => error,
    }
}

fn hung_up() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, HelloError::TlsHungUp)
}
