//! One end of a TLS connection, without a socket: bytes in, bytes out.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{ClientConfig, ServerConfig};

/// The most plaintext of one record.
const RECORD: usize = 16 << 10;

/// The most that a record takes beyond its plaintext: its header, a byte for its kind, and a tag.
const OVERHEAD: usize = 22;

/// Bytes that are encrypted at once: so many that few calls send them, so few that they are still in
/// the cache when they are sent.
pub(crate) const AT_ONCE: usize = 256 << 10;

/// One end of a connection.
pub(crate) struct Session {
    connection: Connection,
    /// What was decrypted and not read yet.
    plain: VecDeque<Vec<u8>>,
    /// How much of the first of these was read.
    taken: usize,
    /// The peer has ended its side in order.
    is_over: bool,
    /// This end has ended its side.
    is_closed: bool,
    /// What is to be sent, in the order in which it was encrypted.
    outgoing: Vec<u8>,
}

enum Connection {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// What a handshake waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handshake {
    Done,
    /// More of the peer's bytes.
    Reads,
}

/// What a call made of the peer's bytes.
struct Step {
    /// Bytes that were used.
    used: usize,
    next: StepEnd,
}

#[derive(PartialEq, Eq)]
enum StepEnd {
    /// Call again.
    Again,
    /// More of the peer's bytes are needed.
    Reads,
    /// The handshake is done, and there is nothing to read.
    Open,
}

impl Session {
    pub(crate) fn client(config: Arc<ClientConfig>, name: ServerName<'static>) -> Result<Self, rustls::Error> {
        let connection = UnbufferedClientConnection::new(config, name)?;
        Ok(Self::new(Connection::Client(Box::new(connection))))
    }

    pub(crate) fn server(config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        let connection = UnbufferedServerConnection::new(config)?;
        Ok(Self::new(Connection::Server(Box::new(connection))))
    }

    fn new(connection: Connection) -> Self {
        Self {
            connection,
            plain: VecDeque::new(),
            taken: 0,
            is_over: false,
            is_closed: false,
            outgoing: Vec::new(),
        }
    }

    /// What is to be sent, and the caller that takes it sends it before anything else.
    pub(crate) fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outgoing
    }

    /// Goes on with the handshake. There may be something to send, also after an error: it tells the
    /// peer why.
    pub(crate) fn shake(&mut self, incoming: &mut Incoming) -> Result<Handshake, rustls::Error> {
        loop {
            match self.step(incoming)? {
                StepEnd::Again => {}
                StepEnd::Open => return Ok(Handshake::Done),
                StepEnd::Reads => return Ok(Handshake::Reads),
            }
        }
    }

    /// Reads what has arrived. `None`: more of the peer's bytes are needed. Zero: the peer has ended
    /// its side.
    pub(crate) fn read(
        &mut self,
        buffer: &mut [u8],
        incoming: &mut Incoming,
    ) -> Result<Option<usize>, rustls::Error> {
        loop {
            if let Some(first) = self.plain.front() {
                let left = &first[self.taken..];
                let count = left.len().min(buffer.len());
                buffer[..count].copy_from_slice(&left[..count]);
                self.taken += count;
                if self.taken == first.len() {
                    self.plain.pop_front();
                    self.taken = 0;
                }
                return Ok(Some(count));
            }
            if self.is_over {
                return Ok(Some(0));
            }
            match self.step(incoming)? {
                StepEnd::Again => {}
                StepEnd::Reads | StepEnd::Open if !self.plain.is_empty() || self.is_over => {}
                StepEnd::Reads | StepEnd::Open => return Ok(None),
            }
        }
    }

    /// Encrypts bytes, which are then to be sent.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let room = bytes.len() + OVERHEAD * (bytes.len() / RECORD + 2);
        self.with_traffic(room, |traffic, out| match traffic {
            Traffic::Client(mut it) => it.encrypt(bytes, out),
            Traffic::Server(mut it) => it.encrypt(bytes, out),
        })
    }

    /// Ends this side: the peer then knows that nothing is missing.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.is_closed, true) {
            return Ok(());
        }
        self.with_traffic(64, |traffic, out| match traffic {
            Traffic::Client(mut it) => it.queue_close_notify(out),
            Traffic::Server(mut it) => it.queue_close_notify(out),
        })
    }

    fn with_traffic(
        &mut self,
        room: usize,
        work: impl FnOnce(Traffic<'_>, &mut [u8]) -> Result<usize, EncryptError>,
    ) -> io::Result<()> {
        // What the reader has left to send, such as a new key, goes first.
        let mut nothing = Incoming::default();
        while self.step(&mut nothing).map_err(failed)? == StepEnd::Again {}
        let outgoing = &mut self.outgoing;
        let before = outgoing.len();
        outgoing.resize(before + room, 0);
        let out = &mut outgoing[before..];
        let written = match &mut self.connection {
            Connection::Client(it) => match it.process_tls_records(&mut []).state {
                Ok(ConnectionState::WriteTraffic(it)) => work(Traffic::Client(it), out),
                state => return Err(not_open(state.err())),
            },
            Connection::Server(it) => match it.process_tls_records(&mut []).state {
                Ok(ConnectionState::WriteTraffic(it)) => work(Traffic::Server(it), out),
                state => return Err(not_open(state.err())),
            },
        };
        let written = written.map_err(io::Error::other);
        outgoing.truncate(before + written.as_ref().map_or(0, |written| *written));
        written.map(drop)
    }

    fn step(&mut self, incoming: &mut Incoming) -> Result<StepEnd, rustls::Error> {
        let Self {
            connection,
            plain,
            is_over,
            outgoing,
            ..
        } = self;
        let step = match connection {
            Connection::Client(it) => {
                one(it.process_tls_records(incoming.bytes()), plain, is_over, outgoing)
            }
            Connection::Server(it) => {
                one(it.process_tls_records(incoming.bytes()), plain, is_over, outgoing)
            }
        };
        match step {
            Ok(Step { used, next }) => {
                incoming.used(used);
                Ok(next)
            }
            Err((used, error)) => {
                incoming.used(used);
                // An alert for the peer.
                let mut nothing = Incoming::default();
                for _ in 0..2 {
                    let _ = match connection {
                        Connection::Client(it) => {
                            one(it.process_tls_records(nothing.bytes()), plain, is_over, outgoing)
                        }
                        Connection::Server(it) => {
                            one(it.process_tls_records(nothing.bytes()), plain, is_over, outgoing)
                        }
                    };
                }
                Err(error)
            }
        }
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Session")
    }
}

enum Traffic<'a> {
    Client(rustls::unbuffered::WriteTraffic<'a, rustls::client::ClientConnectionData>),
    Server(rustls::unbuffered::WriteTraffic<'a, rustls::server::ServerConnectionData>),
}

fn one<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    plain: &mut VecDeque<Vec<u8>>,
    is_over: &mut bool,
    outgoing: &mut Vec<u8>,
) -> Result<Step, (usize, rustls::Error)> {
    let used = status.discard;
    let state = status.state.map_err(|error| (used, error))?;
    let next = match state {
        ConnectionState::ReadTraffic(mut records) => {
            while let Some(record) = records.next_record() {
                let record = record.map_err(|error| (used, error))?;
                if !record.payload.is_empty() {
                    plain.push_back(record.payload.to_vec());
                }
            }
            StepEnd::Again
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let before = outgoing.len();
            let mut room = 4 << 10;
            let written = loop {
                outgoing.resize(before + room, 0);
                match data.encode(&mut outgoing[before..]) {
                    Ok(written) => break written,
                    Err(EncodeError::InsufficientSize(needs)) => room = needs.required_size,
                    Err(error @ EncodeError::AlreadyEncoded) => {
                        return Err((used, rustls::Error::General(error.to_string())));
                    }
                }
            };
            outgoing.truncate(before + written);
            StepEnd::Again
        }
        // The caller sends what was added before it reads.
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            StepEnd::Again
        }
        ConnectionState::BlockedHandshake => StepEnd::Reads,
        ConnectionState::WriteTraffic(_) => StepEnd::Open,
        ConnectionState::PeerClosed | ConnectionState::Closed => {
            *is_over = true;
            StepEnd::Open
        }
        _ => return Err((used, rustls::Error::General("an unknown state".into()))),
    };
    Ok(Step { used, next })
}

fn not_open(error: Option<rustls::Error>) -> io::Error {
    error.map_or_else(|| io::ErrorKind::BrokenPipe.into(), failed)
}

/// An error of TLS, as one of the connection.
pub(crate) fn failed(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Bytes of the peer that wait to be used.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
}

impl Incoming {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.to]
    }

    fn used(&mut self, count: usize) {
        self.from += count;
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        }
    }

    /// Where the next bytes go.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        // Without room for a record, what is here moves to the front.
        if self.bytes.len() - self.to < RECORD + OVERHEAD {
            self.bytes.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            let least = (self.to + 2 * RECORD).max(AT_ONCE);
            if self.bytes.len() < least {
                self.bytes.resize(least, 0);
            }
        }
        &mut self.bytes[self.to..]
    }

    /// So many bytes were put there.
    pub(crate) fn came(&mut self, count: usize) {
        self.to += count;
    }
}
