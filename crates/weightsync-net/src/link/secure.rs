//! The handshake of TLS, before that of the link.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::stream::{AsyncStream, Stream};
use crate::access::Key;
use crate::tls::session::{self, Handshake, Incoming, Session};
use crate::tls::{Peer, Tls};
use crate::wire::hello::HelloError;

/// How a client's first record of TLS begins.
const TLS_BEGINS: u8 = 22;

/// What an end proves itself with.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) key: Key,
    /// Without it links are plain.
    pub(crate) tls: Option<Tls>,
}

impl Credentials {
    /// Those of plain links.
    #[cfg(test)]
    pub(crate) fn plain(secret: &[u8; 16]) -> Self {
        Self {
            key: Key::new(secret),
            tls: None,
        }
    }

    /// The certificates for a link to this address, if it is to be encrypted.
    fn tls_for(&self, address: SocketAddr) -> Option<&Tls> {
        self.tls.as_ref().filter(|tls| tls.covers(address))
    }

    /// Encrypts a connection that this end has made, if its address is to be.
    pub(crate) async fn dialled(
        &self,
        mut socket: tokio::net::TcpStream,
        address: SocketAddr,
        peer: Peer<'_>,
    ) -> io::Result<AsyncStream> {
        let Some(tls) = self.tls_for(address) else {
            return Ok(AsyncStream::plain(socket));
        };
        let (mut session, mut incoming) = (tls.dial(peer)?, Incoming::default());
        shake(&mut socket, &mut session, &mut incoming).await?;
        Ok(AsyncStream::encrypted(socket, session, incoming))
    }

    /// The same over a socket that blocks, by a deadline.
    pub(crate) fn dialled_blocking(
        &self,
        socket: TcpStream,
        address: SocketAddr,
        peer: Peer<'_>,
        until: Instant,
    ) -> io::Result<Stream> {
        let Some(tls) = self.tls_for(address) else {
            return Ok(Stream::plain(socket));
        };
        let (mut session, mut incoming) = (tls.dial(peer)?, Incoming::default());
        loop {
            let state = session.shake(&mut incoming);
            let outgoing = std::mem::take(session.outgoing());
            (&socket).write_all(&outgoing).map_err(ended)?;
            match state.map_err(session::failed)? {
                Handshake::Done => return Ok(Stream::encrypted(socket, session, incoming)),
                Handshake::Reads => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    socket.set_read_timeout(Some(left))?;
                    match (&socket).read(incoming.room()).map_err(ended)? {
                        0 => return Err(hung_up()),
                        count => incoming.came(count),
                    }
                }
            }
        }
    }

    /// Encrypts a connection that this end has accepted, if the peer begins so. One that must be
    /// encrypted, and is not, is told by the link's own handshake: the second value.
    pub(crate) async fn accepted(
        &self,
        mut socket: tokio::net::TcpStream,
        from: SocketAddr,
    ) -> io::Result<(AsyncStream, bool)> {
        let mut first = [0];
        let is_tls = socket.peek(&mut first).await? == 1 && first[0] == TLS_BEGINS;
        let Some(tls) = &self.tls else {
            if is_tls {
                return Err(io::Error::other(HelloError::NoCertificate));
            }
            return Ok((AsyncStream::plain(socket), false));
        };
        if !is_tls {
            return Ok((AsyncStream::plain(socket), tls.covers(from)));
        }
        let (mut session, mut incoming) = (tls.accept()?, Incoming::default());
        if let Err(error) = shake(&mut socket, &mut session, &mut incoming).await {
            // To close with bytes unread would take back what the peer was told.
            socket.shutdown().await?;
            while matches!(socket.read(incoming.room()).await, Ok(1..)) {}
            return Err(error);
        }
        Ok((AsyncStream::encrypted(socket, session, incoming), false))
    }
}

async fn shake(
    socket: &mut tokio::net::TcpStream,
    session: &mut Session,
    incoming: &mut Incoming,
) -> io::Result<()> {
    loop {
        let state = session.shake(incoming);
        let outgoing = std::mem::take(session.outgoing());
        socket.write_all(&outgoing).await.map_err(ended)?;
        match state.map_err(session::failed)? {
            Handshake::Done => return Ok(()),
            Handshake::Reads => match socket.read(incoming.room()).await.map_err(ended)? {
                0 => return Err(hung_up()),
                count => incoming.came(count),
            },
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
