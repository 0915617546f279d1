//! Requests to one peer: no proxies, no redirects, no cookies, and no names to resolve.

use std::error::Error;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, RANGE};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use weightsync_link::refusal;
use weightsync_link::stream::AsyncStream;
use weightsync_link::tls::{Tls, TlsPeer};
use weightsync_mem::threads::LockExt as _;

use super::Bearer;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(2);

/// How long an idle connection is kept, and how many. A server keeps it longer: a connection
/// that is just being closed costs a request a second attempt.
const KEEP: Duration = Duration::from_secs(20);
const KEPT: usize = 2;

/// How long sent bytes may stay unacknowledged before the system gives a connection up. A full
/// queue on the way may take seconds, so this is long. [`Client::is_reachable`] asks whether a
/// silent end is there.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);

/// The longest line that is read, in bytes.
const MAX_LINE: usize = 64 << 10;

/// Why a request has failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("connecting to {addr} failed: {source}")]
    Connect {
        addr: SocketAddr,
        source: std::io::Error,
    },
    #[error("{addr} did not answer within {after:.1?}")]
    Silent { addr: SocketAddr, after: Duration },
    #[error("the connection to {addr} broke: {}", cause(source))]
    Broken {
        addr: SocketAddr,
        source: hyper::Error,
    },
    #[error("no encrypted connection to {addr}: {why}")]
    Tls {
        addr: SocketAddr,
        why: String,
        /// Whether another attempt gets the same until somebody changes an end.
        is_final: bool,
    },
    #[error(
        "{addr} is reached over HTTPS alone: give this end a certificate of the same authority \
         (tls=, or WEIGHTSYNC_TLS_DIR)"
    )]
    NeedsTls { addr: SocketAddr },
    #[error(
        "{addr} answered {status}, which is no answer to the request: is another program or a proxy \
         at this address?"
    )]
    Status {
        addr: SocketAddr,
        status: StatusCode,
    },
    #[error("{addr} ended its answer after {got} bytes of {expected}")]
    Short {
        addr: SocketAddr,
        expected: u64,
        got: u64,
    },
    #[error("{addr} sent more than the {limit} bytes that this answer can have")]
    TooLong { addr: SocketAddr, limit: usize },
    #[error("{addr} sent invalid JSON: {source}")]
    Json {
        addr: SocketAddr,
        source: serde_json::Error,
    },
}

/// The first cause of a broken connection: what is above it says less.
fn cause(error: &hyper::Error) -> &dyn Error {
    let mut cause: &dyn Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause
}

/// How connections to a peer are encrypted.
#[derive(Clone, Debug)]
pub(crate) struct Encryption {
    /// Without certificates they are plain.
    pub(crate) tls: Option<Tls>,
    pub(crate) to: To,
}

/// What the peer's certificate must be.
#[derive(Clone, Debug)]
pub(crate) enum To {
    /// That of a trainer with this name, which the user knows.
    Service(String),
    /// That of a trainer.
    Sender,
    /// That of a worker.
    Worker,
}

impl Encryption {
    fn covers(&self, addr: SocketAddr) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.covers(addr))
    }

    async fn encrypt(&self, socket: TcpStream, addr: SocketAddr) -> std::io::Result<AsyncStream> {
        let peer = match &self.to {
            To::Service(host) => TlsPeer::Trainer(host),
            To::Sender => TlsPeer::Sender(addr.ip()),
            To::Worker => TlsPeer::Worker(addr.ip()),
        };
        AsyncStream::dial(socket, self.tls.as_ref(), addr, peer).await
    }
}

/// A peer that gets requests.
#[derive(Debug)]
pub(crate) struct Client {
    addr: SocketAddr,
    encryption: Encryption,
    host: HeaderValue,
    bearer: Bearer,
    // A stack, so the connection that was used last serves next, and the others reach their age.
    idle: Mutex<Vec<(Connection, Instant)>>,
}

/// A connection to the peer.
#[derive(Debug)]
struct Connection {
    requests: SendRequest<Full<Bytes>>,
    /// How the connection ends: it may end before a request, which then says only that it is closed.
    end: JoinHandle<hyper::Result<()>>,
}

/// Whether a peer can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reachability {
    /// The system accepts connections, so the process is there.
    Here,
    /// The system answers, but nothing listens.
    Refused,
    /// The system does not answer.
    Away,
}

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Bytes,
    /// The first byte of the body to send.
    pub(crate) from: u64,
}

impl Ask {
    pub(crate) fn get(path: impl Into<String>) -> Self {
        Self {
            method: Method::GET,
            path: path.into(),
            body: Bytes::new(),
            from: 0,
        }
    }

    pub(crate) fn post(path: impl Into<String>, body: &impl serde::Serialize) -> Self {
        let body = serde_json::to_vec(body)
            .unwrap_or_else(|_| unreachable!("requests are plain data with text keys"));
        Self {
            method: Method::POST,
            path: path.into(),
            body: body.into(),
            from: 0,
        }
    }
}

impl Client {
    pub(crate) fn new(addr: SocketAddr, bearer: Bearer, encryption: Encryption) -> Arc<Self> {
        // The number of an interface is this machine's own.
        let host = SocketAddr::new(addr.ip(), addr.port()).to_string();
        let host = HeaderValue::from_str(&host)
            .unwrap_or_else(|_| unreachable!("an address is a header's value"));
        Arc::new(Self {
            addr,
            encryption,
            host,
            bearer,
            idle: Mutex::default(),
        })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sends a request, and waits for the head of the answer. The request must be idempotent:
    /// the peer may close a kept connection just then, and the request is sent again.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        ask: Ask,
        patience: Duration,
    ) -> Result<HttpReply, Fault> {
        let answer = async {
            // The peer may have closed a kept connection. Its failure is not reported: a new
            // connection decides.
            if let Some(kept) = self.kept()
                && let Ok(reply) = self.ask_by(kept, &ask).await
            {
                return Ok(reply);
            }
            let fresh = self.connect().await?;
            self.ask_by(fresh, &ask).await
        };
        // One patience for all steps: connecting, the handshake and the wait for the head.
        match timeout(patience, answer).await {
            Ok(reply) => reply,
            Err(_) => Err(Fault::Silent {
                addr: self.addr,
                after: patience,
            }),
        }
    }

    /// Whether the peer's system answers within this time. It also answers for a stopped process.
    pub(crate) async fn is_reachable(&self, patience: Duration) -> bool {
        self.reach(patience).await == Reachability::Here
    }

    /// Tries to connect to the peer within that time.
    pub(crate) async fn reach(&self, patience: Duration) -> Reachability {
        // No request and no handshake: the kernel accepts for a process that is stopped too.
        match timeout(patience, TcpStream::connect(self.addr)).await {
            Ok(Ok(_)) => Reachability::Here,
            // The kernel answers with a reset: the host is up, and no process listens.
            Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => Reachability::Refused,
            Ok(Err(_)) | Err(_) => Reachability::Away,
        }
    }

    async fn ask_by(
        self: &Arc<Self>,
        mut connection: Connection,
        ask: &Ask,
    ) -> Result<HttpReply, Fault> {
        let mut request = Request::builder()
            .method(ask.method.clone())
            .uri(&ask.path)
            .header(HOST, self.host.clone())
            .header(AUTHORIZATION, self.bearer.header());
        if ask.method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if ask.from > 0 {
            request = request.header(RANGE, format!("bytes={}-", ask.from));
        }
        let request = request
            .body(Full::new(ask.body.clone()))
            .unwrap_or_else(|_| unreachable!("paths are made here"));
        let requests = &mut connection.requests;
        // A connection that the peer has closed can show it here, before the request is sent.
        let response = match requests.ready().await {
            Ok(()) => requests.send_request(request).await,
            Err(error) => Err(error),
        };
        let response = match response {
            Ok(response) => response,
            Err(source) => return Err(self.broken(source, connection.end).await),
        };
        // The peer answers plain requests of other machines with this status alone, so the fault
        // names the missing certificate.
        let is_plain = !self.encryption.covers(self.addr);
        if is_plain && response.status() == StatusCode::UPGRADE_REQUIRED {
            return Err(Fault::NeedsTls { addr: self.addr });
        }
        Ok(HttpReply {
            status: response.status(),
            body: response.into_body(),
            connection,
            client: self.clone(),
        })
    }

    async fn connect(&self) -> Result<Connection, Fault> {
        let failed = |source| Fault::Connect {
            addr: self.addr,
            source,
        };
        // TCP and TLS under one time limit: a peer that accepts and then says nothing does not hold
        // the caller.
        let made = async {
            let stream = TcpStream::connect(self.addr).await.map_err(failed)?;
            tune(&stream).map_err(failed)?;
            let encrypted = self.encryption.encrypt(stream, self.addr).await;
            encrypted.map_err(|source| match refusal(&source) {
                Some(refused) => self.refused(refused),
                None => failed(source),
            })
        };
        let stream = timeout(CONNECT, made).await.map_err(|_| Fault::Silent {
            addr: self.addr,
            after: CONNECT,
        })??;
        // The connection's own task drives the protocol. The handle here only passes requests to
        // it.
        let made = http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = made.map_err(|source| Fault::Broken {
            addr: self.addr,
            source,
        })?;
        Ok(Connection {
            requests: sender,
            // The task ends with the request's handle, and the waiting caller gets an error.
            end: tokio::spawn(connection),
        })
    }

    /// Why a request was not answered. A peer that does not accept this end's certificate says so after
    /// the handshake: while a request is sent, or before it.
    async fn broken(&self, source: hyper::Error, end: JoinHandle<hyper::Result<()>>) -> Fault {
        let mut refused = refusal(&source);
        if refused.is_none()
            && (source.is_canceled() || source.is_closed())
            && let Ok(Err(end)) = end.await
        {
            refused = refusal(&end);
        }
        match refused {
            Some(refused) => self.refused(refused),
            None => Fault::Broken {
                addr: self.addr,
                source,
            },
        }
    }

    fn refused(&self, (why, is_final): (String, bool)) -> Fault {
        Fault::Tls {
            addr: self.addr,
            why,
            is_final,
        }
    }

    fn kept(&self) -> Option<Connection> {
        let mut idle = self.idle.locked();
        while let Some((connection, since)) = idle.pop() {
            if !connection.requests.is_closed() && since.elapsed() < KEEP {
                return Some(connection);
            }
        }
        None
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle.locked();
        // The old ones go first, so that they do not take the place of this one.
        idle.retain(|(kept, since)| !kept.requests.is_closed() && since.elapsed() < KEEP);
        if idle.len() < KEPT {
            idle.push((connection, Instant::now()));
        }
    }
}

/// Options for the connections of both ends: small messages go at once, and a peer whose host is off
/// is noticed, also by an end that sends nothing. A peer that does not get to run is not: its system
/// answers.
pub(super) fn tune(stream: &TcpStream) -> std::io::Result<()> {
    // Signs of life are a few bytes. Nagle's algorithm would hold them back until the peer
    // acknowledges.
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    let asks = socket2::TcpKeepalive::new()
        // The first probe goes after 5 s without traffic, and the next ones every 2 s.
        .with_time(UNACKNOWLEDGED / 2)
        .with_interval(UNACKNOWLEDGED / 5);
    socket.set_tcp_keepalive(&asks)?;
    // Keepalive does not watch bytes that were sent. This bounds their wait for an acknowledgement.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
    Ok(())
}

/// An answer whose body has not been read yet.
#[derive(Debug)]
pub(crate) struct HttpReply {
    pub(crate) status: StatusCode,
    body: Incoming,
    connection: Connection,
    client: Arc<Client>,
}

impl HttpReply {
    /// The whole body, if it has at most `limit` bytes.
    pub(crate) async fn bytes(mut self, limit: usize, patience: Duration) -> Result<Bytes, Fault> {
        let mut all = BytesMut::new();
        while let Some(bytes) = self.next(patience).await? {
            if all.len() + bytes.len() > limit {
                let addr = self.client.addr;
                return Err(Fault::TooLong { addr, limit });
            }
            all.extend_from_slice(&bytes);
        }
        // Only a body that was read to its end leaves the connection at the beginning of an answer.
        self.client.keep(self.connection);
        Ok(all.freeze())
    }

    pub(crate) async fn json<T: DeserializeOwned>(
        self,
        limit: usize,
        patience: Duration,
    ) -> Result<T, Fault> {
        let addr = self.client.addr;
        let bytes = self.bytes(limit, patience).await?;
        serde_json::from_slice(&bytes).map_err(|source| Fault::Json { addr, source })
    }

    /// The next part of the body; `None` at its end.
    pub(crate) async fn next(&mut self, patience: Duration) -> Result<Option<Bytes>, Fault> {
        let addr = self.client.addr;
        loop {
            // The patience is for each frame, so a long body may take long, and a silent peer may
            // not.
            let frame = match timeout(patience, self.body.frame()).await {
                Ok(Some(frame)) => frame.map_err(|source| Fault::Broken { addr, source })?,
                Ok(None) => return Ok(None),
                Err(_) => {
                    return Err(Fault::Silent {
                        addr,
                        after: patience,
                    });
                }
            };
            // Trailers carry nothing here.
            if let Ok(bytes) = frame.into_data() {
                return Ok(Some(bytes));
            }
        }
    }

    /// Keeps the connection for the next request, after a body read to its end.
    pub(crate) fn keep(self) {
        self.client.keep(self.connection);
    }

    pub(crate) fn lines(self) -> Lines {
        Lines {
            reply: self,
            rest: BytesMut::new(),
        }
    }
}

/// A body of lines; each line is a JSON value.
#[derive(Debug)]
pub(crate) struct Lines {
    reply: HttpReply,
    rest: BytesMut,
}

impl Lines {
    /// The next value; `None` at the end. After [`Fault::Silent`] the caller may ask again.
    pub(crate) async fn next<T: DeserializeOwned>(
        &mut self,
        patience: Duration,
    ) -> Result<Option<T>, Fault> {
        let addr = self.reply.client.addr;
        loop {
            // Several lines may have come in one frame, so the rest is used up before the next
            // read.
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(end + 1);
                let value = serde_json::from_slice(&line);
                return value
                    .map(Some)
                    .map_err(|source| Fault::Json { addr, source });
            }
            // A peer that never ends its line would otherwise fill the memory.
            if self.rest.len() > MAX_LINE {
                let limit = MAX_LINE;
                return Err(Fault::TooLong { addr, limit });
            }
            // At the end a line without its newline was cut, and does not count.
            match self.reply.next(patience).await? {
                Some(bytes) => self.rest.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use weightsync_link::tls::{CertificateRequest, CertificateRole, ClientAuth, make};

    use super::*;
    use crate::http::HttpThread;

    fn pki(folder: &tempfile::TempDir, name: &str) -> std::path::PathBuf {
        let request = CertificateRequest {
            out: folder.path().join(name),
            hosts: vec!["127.0.0.1".into()],
            days: 2,
        };
        make(&request).unwrap();
        request.out
    }

    fn read(path: &std::path::Path, part: CertificateRole) -> Tls {
        Tls::read(path, part).unwrap().on_loopback()
    }

    #[test]
    fn refused_certificate_is_named_before_a_request() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (pki(&folder, "ours"), pki(&folder, "theirs"));
        // The client trusts the server, which does not trust the client.
        let authority = std::fs::read_to_string(ours.join("ca.pem")).unwrap();
        let file = theirs.join("worker.pem");
        let trusts = std::fs::read_to_string(&file).unwrap() + &authority;
        std::fs::write(&file, trusts).unwrap();
        let (server, client) = (
            read(&ours, CertificateRole::Trainer),
            read(&theirs, CertificateRole::Worker),
        );
        let (said, heard) = std::sync::mpsc::channel();
        let thread = HttpThread::start("test", move |_| async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            tokio::spawn(async move {
                let (stream, from) = listener.accept().await.unwrap();
                let refused =
                    AsyncStream::accept(stream, Some(&server), from, ClientAuth::Certificate);
                drop(refused.await);
            });
            let encryption = Encryption {
                tls: Some(client),
                to: To::Sender,
            };
            let client = Client::new(addr, Bearer::to_sender(&[7; 16]), encryption);
            let connection = client.connect().await.unwrap();
            // The refusal is here before the request is made.
            while !connection.requests.is_closed() {
                tokio::task::yield_now().await;
            }
            let asked = client.ask_by(connection, &Ask::get("/")).await;
            let _ = said.send(asked.map(|reply| reply.status));
        });
        let asked = heard.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(matches!(asked, Err(Fault::Tls { .. })), "{asked:?}");
        drop(thread);
    }
}
