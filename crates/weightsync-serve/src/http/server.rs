//! The HTTP server: which connections it accepts, and how many at a time.

use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE, WWW_AUTHENTICATE};
use hyper::rt::{self, ReadBufCursor};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};
use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_engine::transport::raise_files;
use weightsync_link::admission::{Admitted, ConnectionLimits, Doing, Full};
use weightsync_link::refusal;
use weightsync_link::stream::AsyncStream;
use weightsync_link::tls::{CertificateRole, ClientAuth, Tls};
use weightsync_mem::threads::LockExt as _;

use super::client::tune;
use super::{Bearer, Stopping};

/// The limits of a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Connections at a time, if there are descriptors for them.
    pub(crate) connections: usize,
    /// How long one of them may take to send a request with the right bearer.
    pub(crate) patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: usize::MAX,
            patience: Duration::from_secs(2),
        }
    }
}

/// How long an idle connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// The longest head of a request, in bytes, and the most headers in it.
const MAX_HEAD: usize = 16 << 10;
const MAX_HEADERS: usize = 32;

/// How long answers that are on their way may take once the server is to stop.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How long nothing is accepted once the system has no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);

/// Answered with an empty 200 also without the bearer: it says that the process serves, and nothing
/// else. A probe of Kubernetes cannot take a token from a secret.
const HEALTH: &str = "/healthz";

/// Causes of log messages, each logged once a minute.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Bearer,
    Slow,
    Closed,
    Full,
    OfOne,
    Accept,
    Tls,
    Plain,
}

/// A server that listens already, and does not serve yet.
#[derive(Debug)]
pub(crate) struct Server {
    listener: TcpListener,
    admission: Arc<Admission>,
    limits: Limits,
}

/// The state that all connections share.
#[derive(Debug)]
struct Admission {
    bearer: Bearer,
    /// The certificates, and what those who connect must have. Without it connections are plain.
    tls: Option<(Tls, ClientAuth)>,
    connections: Mutex<Admitted<Arc<Notify>>>,
    complaints: Mutex<LogLimiter>,
}

/// A connection, until this is dropped.
#[derive(Debug)]
struct Visit {
    admission: Arc<Admission>,
    from: SocketAddr,
    /// It has another number after it was closed for another connection and came back.
    number: AtomicU64,
    /// Whether it has sent a request with the right bearer.
    is_known: AtomicBool,
    /// It is closed for another connection.
    closed: Arc<Notify>,
    unsent: UnsentAnswer,
    limits: Limits,
}

impl Server {
    /// # Errors
    ///
    /// Those of the operating system.
    pub(crate) fn new(
        listener: TcpListener,
        bearer: Bearer,
        tls: Option<(Tls, ClientAuth)>,
        limits: Limits,
    ) -> io::Result<Self> {
        // Tokio refuses a blocking listener.
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            limits,
            admission: Arc::new(Admission {
                bearer,
                tls,
                connections: Mutex::default(),
                complaints: Mutex::default(),
            }),
        })
    }

    /// Serves until it is to stop, and then until the answers on their way are given,
    /// or [`LAST_WORDS`] are over. `failed` is told each time that a connection cannot be
    /// accepted.
    pub(crate) async fn serve(
        self,
        router: Router,
        mut stopping: Stopping,
        failed: impl Fn(&io::Error),
    ) {
        let listener = match tokio::net::TcpListener::from_std(self.listener) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "the server cannot serve");
                return;
            }
        };
        if let Some((tls, _)) = &self.admission.tls {
            // It ends with the runtime.
            tokio::spawn(tls.clone().watch());
        }
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                // Connections that have ended are collected at once, so that the set does not grow.
                Some(_) = connections.join_next(), if !connections.is_empty() => continue,
                () = stopping.wait() => break,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                // Out of descriptors, most likely.
                Err(_) if raise_files() => continue,
                Err(error) => {
                    failed(&error);
                    self.admission.complain(Cause::Accept, &error);
                    // The connection stays in the kernel's queue, so `accept` would fail again at
                    // once.
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let Ok(visit) = Visit::begin(&self.admission, self.limits, peer) else {
                // The stream drops here, which closes the connection: no other one may be closed
                // for it.
                failed(&Errno::MFILE.into());
                continue;
            };
            connections.spawn(connection(
                stream,
                visit,
                TowerToHyperService::new(router.clone()),
                stopping.clone(),
            ));
        }
        // From here on new connections are refused, so a client learns at once that the server is
        // gone.
        drop(listener);
        let all = async { while connections.join_next().await.is_some() {} };
        // Answers that go on, such as lines of signs of life, get this time to send their farewell.
        let _ = timeout(LAST_WORDS, all).await;
    }
}

impl Visit {
    /// A connection comes in, at the cost of another one if there are too many.
    fn begin(admission: &Arc<Admission>, limits: Limits, from: SocketAddr) -> Result<Self, Full> {
        let closed = Arc::new(Notify::new());
        let number = admission.enter(from, Doing::Unproved, limits, &closed)?;
        Ok(Self {
            admission: admission.clone(),
            from,
            number: number.into(),
            is_known: AtomicBool::new(false),
            closed,
            unsent: UnsentAnswer::default(),
            limits,
        })
    }

    /// A request with the right bearer begins. One that was read just when its connection was closed
    /// for another one comes in again.
    fn asks(&self) -> Result<Busy, Full> {
        // Relaxed: the server's runtime has one thread.
        self.is_known.store(true, Ordering::Relaxed);
        // The answer before may be on its way: the connection stays busy.
        drop(self.unsent.take());
        // A connection that was closed for another one has lost its number, although a request had
        // just been read.
        let mut number = self.number.load(Ordering::Relaxed);
        if !self.admission.connections().is_now(number, Doing::Busy) {
            let entered = self
                .admission
                .enter(self.from, Doing::Busy, self.limits, &self.closed);
            number = entered?;
            self.number.store(number, Ordering::Relaxed);
        }
        Ok(Busy {
            admission: self.admission.clone(),
            number,
        })
    }

    /// Answers a request of the connection. Without the right bearer, only health checks have an
    /// answer.
    fn answer(
        &self,
        request: Request<Incoming>,
        router: TowerToHyperService<Router>,
        is_plain: bool,
    ) -> impl Future<Output = Result<Response<Body>, Infallible>> + use<> {
        let admission = &self.admission;
        // A plain request that must be encrypted is refused also with the right bearer: anyone on
        // the way may have read it.
        let is_in = !is_plain && admission.bearer.is_in(request.headers());
        let asks_health = request.method() == Method::GET && request.uri().path() == HEALTH;
        // The busy mark begins before the handler runs: from here on the connection is not closed
        // for another one.
        let busy = is_in.then(|| self.asks());
        let unsent = self.unsent.clone();
        let challenge = (!is_plain).then(|| admission.bearer.challenge());
        // Health checks are not logged. All other refusals are, once a minute for each cause.
        if is_plain || !(is_in || asks_health) {
            let cause = if is_plain {
                Cause::Plain
            } else {
                Cause::Bearer
            };
            admission.complain(cause, &self.from);
        }
        async move {
            match (busy, challenge) {
                (_, Some(_)) if asks_health => Ok(Response::default()),
                (Some(Ok(busy)), _) => {
                    let answer = router.call(request).await;
                    answer.map(|answer| {
                        answer.map(|body| {
                            let busy = Some(busy);
                            Body::new(AnswerBody { body, busy, unsent })
                        })
                    })
                }
                (Some(Err(_)), _) => Ok(no_room()),
                (None, Some(challenge)) => Ok(turned_away(challenge)),
                (None, None) => Ok(needs_tls()),
            }
        }
    }

    fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Relaxed)
    }

    /// Waits until the connection is closed for another one.
    async fn is_closed(&self) {
        loop {
            // The permit may be an old one: the connection may have come in again since under
            // another number.
            self.closed.notified().await;
            let number = self.number.load(Ordering::Relaxed);
            if !self.admission.connections().has(number) {
                return;
            }
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let number = self.number.load(Ordering::Relaxed);
        self.admission.connections().leave(number);
    }
}

/// A request, until its answer is sent.
#[derive(Debug)]
struct Busy {
    admission: Arc<Admission>,
    number: u64,
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut connections = self.admission.connections();
        // It may have lost its number meanwhile. Then nothing changes.
        connections.is_now(self.number, Doing::Idle);
    }
}

/// The request of a connection whose answer is on its way, if all frames of that were taken.
#[derive(Clone, Debug, Default)]
struct UnsentAnswer(Arc<Mutex<Option<Busy>>>);

impl UnsentAnswer {
    fn take(&self) -> Option<Busy> {
        self.busy().take()
    }

    fn busy(&self) -> MutexGuard<'_, Option<Busy>> {
        self.0.locked()
    }
}

/// The body of an answer.
struct AnswerBody {
    body: Body,
    busy: Option<Busy>,
    unsent: UnsentAnswer,
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        // The body ends before its last bytes have left the process. The connection stays busy
        // until the stream is flushed.
        *self.unsent.busy() = self.busy.take();
    }
}

/// A connection's stream. A request is over when its answer has been written to it, to the end.
struct AnswerStream {
    stream: TokioIo<AsyncStream>,
    unsent: UnsentAnswer,
}

impl rt::Read for AnswerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, bytes)
    }
}

impl rt::Write for AnswerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Called when everything before has been written.
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(context));
        drop(self.unsent.take());
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }
}

impl http_body::Body for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

impl Admission {
    /// Adds a connection. If there are too many, an idle one is closed, or else one that has not shown
    /// the bearer.
    fn enter(
        &self,
        from: SocketAddr,
        doing: Doing,
        limits: Limits,
        closed: &Arc<Notify>,
    ) -> Result<u64, Full> {
        let mut connections = self.connections();
        // Calls to workers take the other half of the descriptors.
        let room = ConnectionLimits::within_descriptors(limits.connections, connections.count());
        let entered = connections.enter(from.ip(), doing, &room, closed.clone());
        drop(connections);
        match entered {
            Ok((number, None)) => Ok(number),
            Ok((number, Some(closed))) => {
                self.complain(Cause::Closed, &from);
                // `notify_one` stores a permit, so a connection that is not waiting just now sees
                // it later.
                closed.notify_one();
                Ok(number)
            }
            Err(full) => {
                let cause = match full {
                    Full::All => Cause::Full,
                    Full::OfOne => Cause::OfOne,
                };
                self.complain(cause, &from);
                Err(full)
            }
        }
    }

    fn connections(&self) -> MutexGuard<'_, Admitted<Arc<Notify>>> {
        self.connections.locked()
    }

    /// Logs a problem, once a minute for each cause, so that a client cannot fill the log by
    /// sending nonsense.
    fn complain(&self, cause: Cause, about: &dyn std::fmt::Display) {
        let mut complaints = self.complaints.locked();
        // The key is the cause alone: an attacker with many addresses gets one line a minute.
        let Some(held_back) = complaints.logs(&format!("{cause:?}"), Instant::now()) else {
            return;
        };
        drop(complaints);
        let what = match cause {
            Cause::Bearer => "a request without the right bearer is refused",
            Cause::Slow => "a connection that sends no request in time is dropped",
            Cause::Closed => {
                "there are too many connections; one that is idle, or has not shown the bearer, is \
                 closed for the one from"
            }
            Cause::Full => {
                "half of this process's descriptors are connections with requests; the server closes \
                 one more: raise the limit (ulimit -n)"
            }
            Cause::OfOne => {
                "three eighths of this process's descriptors are connections of one address with \
                 requests; the server closes one more: raise the limit (ulimit -n)"
            }
            Cause::Accept => "a connection cannot be accepted",
            Cause::Tls => "a connection's TLS handshake failed",
            Cause::Plain => {
                "a request without TLS is refused: give that end a certificate of the same authority"
            }
        };
        log_limiter::warn(held_back, &format!("{what}: {about}"));
    }
}

async fn connection(
    stream: TcpStream,
    visit: Visit,
    router: TowerToHyperService<Router>,
    mut stopping: Stopping,
) {
    let (admission, peer) = (&visit.admission, &visit.from);
    // A connection that is gone by now ends on its own.
    let _ = tune(&stream);
    // One clock for the handshake and the first request with the bearer.
    let late = sleep(visit.limits.patience);
    tokio::pin!(late);
    let encrypted = handshake(stream, &visit, late.as_mut(), &mut stopping).await;
    let Some((stream, is_plain)) = encrypted else {
        return;
    };
    // The certificate belongs to the connection, so its part is read once for all requests.
    let came = ConnectionInfo::of(&stream, peer);
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(came);
        visit.answer(request, router.clone(), is_plain)
    });
    let stream = AnswerStream {
        stream: TokioIo::new(stream),
        unsent: visit.unsent.clone(),
    };
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        // Also the limit for an idle connection between two requests.
        .header_read_timeout(IDLE)
        .max_headers(MAX_HEADERS)
        // The head is bounded, because it is read before the bearer can be checked.
        .max_buf_size(MAX_HEAD)
        .serve_connection(stream, service);
    tokio::pin!(served);
    // Each of the two acts once. The loop then goes on until the connection ends.
    let (mut waits, mut stops) = (true, false);
    loop {
        tokio::select! {
            // A client that has sent its request by then gets its answer.
            biased;
            // A faulty connection affects nobody else.
            _ = &mut served => break,
            // The time is over. A connection that has shown the bearer stays.
            () = &mut late, if waits => {
                waits = false;
                if !visit.is_known() {
                    admission.complain(Cause::Slow, peer);
                    break;
                }
            }
            () = visit.is_closed() => break,
            () = stopping.wait(), if !stops => {
                stops = true;
                // hyper finishes the answer that is on its way and takes no further request.
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

/// An extension of a request: the connection over which it came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionInfo {
    /// The client's address. That of a proxy, if there is one between.
    pub(crate) from: IpAddr,
    /// Whether it is HTTPS.
    pub(crate) is_encrypted: bool,
    /// What the client is, by its certificate.
    pub(crate) part: Option<CertificateRole>,
}

impl ConnectionInfo {
    fn of(stream: &AsyncStream, peer: &SocketAddr) -> Self {
        Self {
            from: peer.ip().to_canonical(),
            is_encrypted: stream.is_encrypted(),
            part: stream.part(),
        }
    }
}

/// Does the handshake of a connection, as [`encrypted`]. `None` also if the time is over before its
/// end, or if the connection or the server is closed.
async fn handshake(
    stream: TcpStream,
    visit: &Visit,
    late: Pin<&mut Sleep>,
    stopping: &mut Stopping,
) -> Option<(AsyncStream, bool)> {
    let (admission, peer) = (&visit.admission, &visit.from);
    tokio::select! {
        // What a client has sent by then is read.
        biased;
        accepted = encrypted(stream, *peer, admission) => accepted,
        () = late => {
            admission.complain(Cause::Slow, peer);
            None
        }
        () = visit.is_closed() => None,
        () = stopping.wait() => None,
    }
}

/// The connection, encrypted if it is to be, and whether it is plain and must not be. None: it has
/// failed, and the log says why if that is a matter of certificates.
async fn encrypted(
    stream: TcpStream,
    from: SocketAddr,
    admission: &Admission,
) -> Option<(AsyncStream, bool)> {
    let (tls, asks) = match &admission.tls {
        Some((tls, asks)) => (Some(tls), *asks),
        None => (None, ClientAuth::IfAny),
    };
    match AsyncStream::accept(stream, tls, from, asks).await {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            if let Some((why, _)) = refusal(&error) {
                admission.complain(Cause::Tls, &format_args!("{from} ({why})"));
            }
            None
        }
    }
}

/// The answer to a request of another machine without TLS.
fn needs_tls() -> Response<Body> {
    let mut response = Response::new(Body::from("this address is reached over HTTPS alone\n"));
    *response.status_mut() = StatusCode::UPGRADE_REQUIRED;
    let headers = response.headers_mut();
    // HTTP requires this header with a 426.
    headers.insert(UPGRADE, HeaderValue::from_static("TLS/1.3, HTTP/1.1"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The answer to a request whose connection was closed for another one when it came.
fn no_room() -> Response<Body> {
    let mut response = Response::new(Body::from("too many connections: ask again\n"));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The answer to a request without the right bearer.
fn turned_away(challenge: HeaderValue) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::UNAUTHORIZED;
    let headers = response.headers_mut();
    headers.insert(WWW_AUTHENTICATE, challenge);
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream as Client;

    use axum::routing::get;
    use weightsync_conformance::scale::longest;

    use super::*;
    use crate::http::{HttpThread, LinesBody};

    const SECRET: [u8; 16] = [7; 16];

    /// Bytes of an answer of one frame, many times what sockets hold.
    const LARGE: usize = 64 << 20;

    /// Serves this at a free port, for so many connections.
    fn serve(connections: usize, patience: Duration) -> (HttpThread, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let limits = Limits {
            connections,
            patience,
        };
        let server = Server::new(listener, Bearer::to_sender(&SECRET), None, limits).unwrap();
        // An answer that does not end.
        let held = || async {
            let (lines, answer) = LinesBody::answer(1);
            lines.try_send("here".into()).unwrap();
            tokio::spawn(async move { lines.closed().await });
            answer
        };
        let router = Router::new()
            .route("/", get(|| async { "here" }))
            .route("/large", get(|| async { vec![7; LARGE] }))
            .route("/held", get(held));
        let thread = HttpThread::start("test", move |stopping| {
            server.serve(router, stopping, |_| {})
        });
        (thread.unwrap(), at)
    }

    fn connect(at: SocketAddr) -> Client {
        let client = Client::connect(at).unwrap();
        client.set_read_timeout(Some(longest())).unwrap();
        client
    }

    /// Sends a request with the bearer.
    fn ask(mut client: &Client, path: &str) {
        let bearer = Bearer::to_sender(&SECRET).header();
        let bearer = bearer.to_str().unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {bearer}\r\n\r\n");
        // The server may have closed the connection.
        let _ = client.write_all(head.as_bytes());
    }

    /// Whether the server has answered "here"; it has closed the connection otherwise.
    fn is_answered(mut client: &Client) -> bool {
        let mut said = Vec::new();
        let mut byte = [0];
        while !said.ends_with(b"here") {
            match client.read(&mut byte) {
                Ok(1) => said.push(byte[0]),
                Ok(_) => return false,
                Err(error) => {
                    assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "it hangs");
                    return false;
                }
            }
        }
        said.starts_with(b"HTTP/1.1 200")
    }

    /// A client that has got an answer.
    fn answered(at: SocketAddr, path: &str) -> Client {
        let client = connect(at);
        ask(&client, path);
        assert!(is_answered(&client));
        client
    }

    #[test]
    fn idle_clients_keep_no_client_out() {
        // Of 8 connections, one address may have 6.
        let (_thread, at) = serve(8, longest());
        let come = || -> Vec<_> { (0..6).map(|_| answered(at, "/")).collect() };
        let idle = come();
        let _others = come();
        // Those that were idle for the longest time were closed for them.
        for client in &idle {
            assert!(!is_answered(client));
        }
    }

    #[test]
    fn busy_client_is_not_closed_for_others() {
        let (_thread, at) = serve(8, longest());
        let busy = answered(at, "/held");
        let known = connect(at);
        let mut others = Vec::new();
        for round in 0..20 {
            others.push(connect(at));
            // Of those that are idle, this one always has the newest request.
            for client in [&others[round], &known] {
                ask(client, "/");
                assert!(is_answered(client), "{round}");
            }
        }
        // The end of a chunk, and nothing more.
        (&busy).read_exact(&mut [0; 2]).unwrap();
        busy.set_nonblocking(true).unwrap();
        let said = (&busy).read(&mut [0]).unwrap_err();
        assert_eq!(said.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn client_that_reads_slowly_gets_its_answer_to_the_end() {
        let (_thread, at) = serve(8, longest());
        let mut slow = connect(at);
        ask(&slow, "/large");
        slow.read_exact(&mut [0]).unwrap();
        // These need all the room of their address.
        for _ in 0..2 {
            let _others: Vec<_> = (0..6).map(|_| answered(at, "/")).collect();
        }
        let read = slow.read_exact(&mut vec![0; LARGE]);
        assert!(read.is_ok(), "the answer is cut: {read:?}");
    }

    #[test]
    fn clients_with_requests_keep_to_the_room_of_their_address() {
        let (_thread, at) = serve(8, longest());
        let busy: Vec<_> = (0..6).map(|_| answered(at, "/held")).collect();
        let comes_in = || {
            let other = connect(at);
            ask(&other, "/");
            is_answered(&other)
        };
        assert!(!comes_in());
        drop(busy);
        // The server notices it a moment later.
        while !comes_in() {}
    }

    #[test]
    fn request_that_was_read_when_its_connection_was_closed_is_answered() {
        let admission = Arc::new(Admission {
            bearer: Bearer::to_sender(&SECRET),
            tls: None,
            connections: Mutex::default(),
            complaints: Mutex::default(),
        });
        let limits = Limits {
            connections: 4,
            ..Limits::default()
        };
        let from = SocketAddr::from(([10, 0, 0, 1], 1));
        let visit = Visit::begin(&admission, limits, from).unwrap();
        let others: Vec<_> = (0..3)
            .map(|_| Visit::begin(&admission, limits, from).unwrap())
            .collect();
        let is_here = |visit: &Visit| {
            let number = visit.number.load(Ordering::Relaxed);
            admission.connections().has(number)
        };
        // Two may come that have asked nothing.
        assert!(!is_here(&visit) && !is_here(&others[0]) && is_here(&others[1]));
        let busy = visit.asks().unwrap();
        assert!(is_here(&visit));
        // Now three of this address ask, which are as many as may.
        let asks: Vec<_> = others[1..].iter().map(Visit::asks).collect();
        assert!(asks.iter().all(Result::is_ok));
        let begin = || Visit::begin(&admission, limits, from);
        assert_eq!(begin().err(), Some(Full::OfOne));
        drop(busy);
        let newest = begin().unwrap();
        let _asks = newest.asks().unwrap();
        assert!(!is_here(&visit));
        assert_eq!(visit.asks().err(), Some(Full::OfOne));
    }
}
