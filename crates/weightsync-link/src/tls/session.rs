//! One end of a TLS connection, without a socket: bytes in, bytes out.

use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use super::{CertificateRole, verify};
use crate::hello::HelloError;

/// Bytes that are read, or encrypted, at once where a version travels: so many that few calls move
/// them, so few that they stay in the cache.
pub(crate) const AT_ONCE: usize = 256 << 10;

/// The same where messages do: a trainer may have thousands of such links.
pub(crate) const OF_MESSAGES: usize = 16 << 10;

/// One end of a connection.
pub(crate) struct TlsSession {
    connection: Connection,
    /// Why it has failed: nothing that comes after that is believed.
    failed: Option<rustls::Error>,
    /// This end has ended its side.
    is_closed: bool,
    /// What is to be sent, in the order in which it was encrypted.
    outgoing: Vec<u8>,
}

/// What a handshake waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handshake {
    Done,
    /// More of the peer's bytes.
    Reads,
}

impl TlsSession {
    pub(crate) fn client(
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<Self, rustls::Error> {
        ClientConnection::new(config, name).map(|one| Self::new(one.into()))
    }

    pub(crate) fn server(config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        ServerConnection::new(config).map(|one| Self::new(one.into()))
    }

    fn new(mut connection: Connection) -> Self {
        // Callers bound what they write.
        connection.set_buffer_limit(None);
        Self {
            connection,
            failed: None,
            is_closed: false,
            outgoing: Vec::new(),
        }
    }

    /// What is to be sent. The caller that takes it sends it before anything else.
    pub(crate) fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outgoing
    }

    /// Goes on with the handshake. There may be something to send, also after an error: it tells the
    /// peer why.
    pub(crate) fn shake(
        &mut self,
        incoming: &mut IncomingBytes,
    ) -> Result<Handshake, rustls::Error> {
        loop {
            // What is ready goes out before more is waited for.
            self.gather();
            if !self.connection.is_handshaking() {
                return Ok(Handshake::Done);
            }
            if incoming.is_empty() {
                return Ok(Handshake::Reads);
            }
            self.take_in(incoming)?;
        }
    }

    /// Reads what has arrived. `None`: more of the peer's bytes are needed. Zero: the peer has ended
    /// its side.
    pub(crate) fn read(
        &mut self,
        buffer: &mut [u8],
        incoming: &mut IncomingBytes,
    ) -> Result<Option<usize>, rustls::Error> {
        loop {
            // An error here says that there is nothing to read yet.
            if let Ok(count) = self.connection.reader().read(buffer) {
                return Ok(Some(count));
            }
            if incoming.is_empty() {
                return Ok(None);
            }
            self.take_in(incoming)?;
            self.gather();
        }
    }

    /// What the peer is, by the certificate that it has shown.
    pub(crate) fn part(&self) -> Option<CertificateRole> {
        let shown = self.connection.peer_certificates()?;
        verify::part_of(shown.first()?)
    }

    /// Encrypts bytes, which are then to be sent.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connection.writer().write_all(bytes)?;
        self.gather();
        Ok(())
    }

    /// Ends this side: the peer then knows that nothing is missing.
    pub(crate) fn close(&mut self) {
        if !std::mem::replace(&mut self.is_closed, true) {
            self.connection.send_close_notify();
            self.gather();
        }
    }

    fn take_in(&mut self, incoming: &mut IncomingBytes) -> Result<(), rustls::Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let mut bytes = incoming.bytes();
        let before = bytes.len();
        let taken = self.connection.read_tls(&mut bytes);
        // The connection has moved the beginning of the slice behind what it took.
        incoming.used(before - bytes.len());
        let done = match taken {
            Ok(_) => self.connection.process_new_packets().map(drop),
            Err(error) => Err(rustls::Error::General(error.to_string())),
        };
        if let Err(error) = &done {
            self.failed = Some(error.clone());
            // What tells the peer why.
            self.gather();
        }
        done
    }

    /// Takes what the connection has to send.
    fn gather(&mut self) {
        while self.connection.wants_write() {
            // A vector takes everything.
            let _ = self.connection.write_tls(&mut self.outgoing);
        }
    }
}

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsSession")
    }
}

/// An error of TLS, as one of the connection.
pub(crate) fn failed(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, HelloError::tls(&error))
}

/// The same of a link whose handshake is done. A peer that does not accept this end's certificate
/// says so only then.
pub(crate) fn broken(error: rustls::Error) -> io::Error {
    match error {
        rustls::Error::AlertReceived(_) => failed(error),
        _ => io::Error::new(
            io::ErrorKind::InvalidData,
            format!("what came is not what was encrypted: {error}"),
        ),
    }
}

/// Bytes of the peer that wait to be used.
#[derive(Debug, Default)]
pub(crate) struct IncomingBytes {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
}

impl IncomingBytes {
    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }

    fn used(&mut self, count: usize) {
        self.from += count;
    }

    /// Where the next bytes go, at most this many. What came before is used.
    pub(crate) fn room(&mut self, most: usize) -> &mut [u8] {
        debug_assert!(self.is_empty());
        (self.from, self.to) = (0, 0);
        if self.bytes.len() < most {
            self.bytes.resize(most, 0);
        }
        &mut self.bytes[..most]
    }

    /// Gives memory back that a link of messages does not need.
    pub(crate) fn shrink(&mut self) {
        if self.bytes.len() > OF_MESSAGES && self.is_empty() {
            self.bytes = Vec::new();
            self.clear();
        }
    }

    /// Drops what was not used, after an error.
    pub(crate) fn clear(&mut self) {
        (self.from, self.to) = (0, 0);
    }

    /// So many bytes were put there.
    pub(crate) fn note_received(&mut self, count: usize) {
        self.to += count;
    }
}
