//! The HTTP server: which connections it accepts, and how many at a time.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE, WWW_AUTHENTICATE};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use weightsync_engine::transport::raise_files;
use weightsync_net::log_limiter::{self, LogLimiter};
use weightsync_net::tls::{Asks, AsyncStream, Part, Tls, refusal};

use super::client::tune;
use super::{Bearer, Stopping};

/// The limits of a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Connections at a time that have not yet sent a request with the right bearer.
    pub(crate) strangers: usize,
    /// How many of them may be of one address.
    pub(crate) of_one: usize,
    /// How long one of those may take to send one.
    pub(crate) patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            strangers: 256,
            of_one: 64,
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
    Strangers,
    Connections,
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
    tls: Option<(Tls, Asks)>,
    strangers: Mutex<BTreeMap<u64, (IpAddr, Arc<Stranger>)>>,
    complaints: Mutex<LogLimiter>,
}

/// A connection that has not authenticated yet.
#[derive(Debug, Default)]
struct Stranger {
    is_known: AtomicBool,
    out: Notify,
}

impl Server {
    /// # Errors
    ///
    /// Those of the operating system.
    pub(crate) fn new(
        listener: TcpListener,
        bearer: Bearer,
        tls: Option<(Tls, Asks)>,
        limits: Limits,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            limits,
            admission: Arc::new(Admission {
                bearer,
                tls,
                strangers: Mutex::default(),
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
        let mut last = 0;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
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
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let mut room = room_for_connections();
            if connections.len() >= room && raise_files() {
                room = room_for_connections();
            }
            if connections.len() >= room {
                failed(&Errno::MFILE.into());
                self.admission.complain(Cause::Connections, &peer);
                continue;
            }
            last += 1;
            let limits = Limits {
                strangers: self.limits.strangers.min(room / 2),
                ..self.limits
            };
            let stranger = self.admission.enter(last, &limits, peer);
            connections.spawn(connection(
                stream,
                self.admission.clone(),
                (last, stranger),
                TowerToHyperService::new(router.clone()),
                stopping.clone(),
                self.limits.patience,
            ));
        }
        drop(listener);
        let all = async { while connections.join_next().await.is_some() {} };
        let _ = timeout(LAST_WORDS, all).await;
    }
}

/// How many connections there may be: up to half of the descriptors that this process may have.
/// Calls to workers take the other half.
fn room_for_connections() -> usize {
    let most = getrlimit(Resource::Nofile).current;
    most.map_or(usize::MAX, |most| (most / 2) as usize)
}

impl Admission {
    /// A stranger connects. If there are too many, the oldest stranger of its address is
    /// closed, or else the oldest of the address that has the most. A client with the right
    /// bearer is quick, so it is not the oldest for long.
    fn enter(&self, number: u64, limits: &Limits, peer: SocketAddr) -> Arc<Stranger> {
        let stranger = Arc::new(Stranger::default());
        let mut strangers = self.strangers();
        let out = crowded(&strangers, limits, peer.ip()).and_then(|crowded| {
            let mut of_it = strangers.iter().filter(|(_, (from, _))| *from == crowded);
            let oldest = *of_it.next()?.0;
            strangers.remove(&oldest)
        });
        strangers.insert(number, (peer.ip(), stranger.clone()));
        drop(strangers);
        if let Some((_, oldest)) = out {
            self.complain(Cause::Strangers, &peer);
            oldest.out.notify_one();
        }
        stranger
    }

    fn strangers(&self) -> MutexGuard<'_, BTreeMap<u64, (IpAddr, Arc<Stranger>)>> {
        self.strangers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs a problem, once a minute for each cause, so that a client cannot fill the log by
    /// sending nonsense.
    fn complain(&self, cause: Cause, about: &dyn std::fmt::Display) {
        let mut complaints = self
            .complaints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(held_back) = complaints.logs(&format!("{cause:?}"), Instant::now()) else {
            return;
        };
        drop(complaints);
        let what = match cause {
            Cause::Bearer => "a request without the right bearer is refused",
            Cause::Slow => "a connection that sends no request in time is dropped",
            Cause::Strangers => "too many connections without a request; the oldest is dropped",
            Cause::Connections => {
                "half of this process's descriptors are such connections; the server closes one \
                 more: raise the limit (ulimit -n)"
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

/// Decides at which address's cost another stranger comes in, if at any.
fn crowded(
    strangers: &BTreeMap<u64, (IpAddr, Arc<Stranger>)>,
    limits: &Limits,
    from: IpAddr,
) -> Option<IpAddr> {
    let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for (of, _) in strangers.values() {
        *counts.entry(*of).or_default() += 1;
    }
    if counts
        .get(&from)
        .is_some_and(|count| *count >= limits.of_one)
    {
        return Some(from);
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    let most = most.filter(|_| strangers.len() >= limits.strangers);
    most.map(|(address, _)| address)
}

async fn connection(
    stream: TcpStream,
    admission: Arc<Admission>,
    (number, stranger): (u64, Arc<Stranger>),
    router: TowerToHyperService<Router>,
    mut stopping: Stopping,
    patience: Duration,
) {
    let Ok(peer) = stream.peer_addr() else {
        // It is gone by now.
        admission.strangers().remove(&number);
        return;
    };
    // Likewise, and then it ends on its own.
    let _ = tune(&stream);
    let late = sleep(patience);
    tokio::pin!(late);
    let accepted = tokio::select! {
        // What a client has sent by then is read.
        biased;
        accepted = encrypted(stream, peer, &admission) => accepted,
        () = &mut late => {
            admission.complain(Cause::Slow, &peer);
            None
        }
        () = stranger.out.notified(), if !stranger.is_known.load(Ordering::Relaxed) => None,
        () = stopping.wait() => None,
    };
    let Some((stream, is_plain)) = accepted else {
        admission.strangers().remove(&number);
        return;
    };
    let came = Came {
        from: peer.ip().to_canonical(),
        is_encrypted: stream.is_encrypted(),
        part: stream.part(),
    };
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(came);
        let is_in = !is_plain && admission.bearer.is_in(request.headers());
        let asks_health = request.method() == Method::GET && request.uri().path() == HEALTH;
        if is_in && !stranger.is_known.swap(true, Ordering::Relaxed) {
            admission.strangers().remove(&number);
        }
        let router = is_in.then(|| router.clone());
        let challenge = (!is_plain).then(|| admission.bearer.challenge());
        if is_plain || !(is_in || asks_health) {
            let cause = if is_plain {
                Cause::Plain
            } else {
                Cause::Bearer
            };
            admission.complain(cause, &peer);
        }
        async move {
            match (router, challenge) {
                (_, Some(_)) if asks_health => Ok(Response::default()),
                (Some(router), _) => router.call(request).await,
                (None, Some(challenge)) => Ok(turned_away(challenge)),
                (None, None) => Ok(needs_tls()),
            }
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(served);
    let (mut waits, mut stops) = (true, false);
    loop {
        tokio::select! {
            // A client that has sent its request by then gets its answer.
            biased;
            // A faulty connection affects nobody else.
            _ = &mut served => break,
            () = &mut late, if waits => {
                waits = false;
                if !stranger.is_known.load(Ordering::Relaxed) {
                    admission.complain(Cause::Slow, &peer);
                    break;
                }
            }
            () = stranger.out.notified() => {
                if !stranger.is_known.load(Ordering::Relaxed) {
                    break;
                }
            }
            () = stopping.wait(), if !stops => {
                stops = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
    admission.strangers().remove(&number);
}

/// An extension of a request: the connection over which it came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Came {
    /// The client's address. That of a proxy, if there is one between.
    pub(crate) from: IpAddr,
    /// Whether it is HTTPS.
    pub(crate) is_encrypted: bool,
    /// What the client is, by its certificate.
    pub(crate) part: Option<Part>,
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
        None => (None, Asks::IfAny),
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
    headers.insert(UPGRADE, HeaderValue::from_static("TLS/1.3, HTTP/1.1"));
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
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::http::HttpThread;

    fn admission() -> Arc<Admission> {
        Arc::new(Admission {
            bearer: Bearer::to_sender(&[7; 16]),
            tls: None,
            strangers: Mutex::default(),
            complaints: Mutex::default(),
        })
    }

    #[test]
    fn strangers_of_one_address_evict_each_other() {
        let limits = Limits {
            strangers: 6,
            of_one: 4,
            ..Limits::default()
        };
        let admission = admission();
        let enter = |number: u64, last: u8| {
            admission.enter(number, &limits, SocketAddr::from(([10, 0, 0, last], 1)));
            admission.strangers().keys().copied().collect::<Vec<_>>()
        };
        assert_eq!(enter(0, 2), [0]);
        for number in 1..20 {
            enter(number, 1);
        }
        assert_eq!(enter(20, 1), [0, 17, 18, 19, 20]);
        // Too many in all: at the cost of the address that has the most.
        assert_eq!(enter(21, 3), [0, 17, 18, 19, 20, 21]);
        assert_eq!(enter(22, 4), [0, 18, 19, 20, 21, 22]);
    }

    #[test]
    fn authenticated_client_is_not_closed_for_others() {
        let (said, heard) = std::sync::mpsc::channel();
        let thread = HttpThread::start("test", move |stopping| async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap())
                .await
                .unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let stranger = Arc::new(Stranger::default());
            stranger.is_known.store(true, Ordering::Relaxed);
            stranger.out.notify_one();
            let router = Router::new().route("/", get(|| async { "here" }));
            let served = tokio::spawn(connection(
                stream,
                admission(),
                (1, stranger),
                TowerToHyperService::new(router),
                stopping,
                Duration::from_secs(30),
            ));
            // A refused client is refused before it has sent a byte.
            tokio::task::yield_now().await;
            let bearer = Bearer::to_sender(&[7; 16]).header();
            let request = format!(
                "GET / HTTP/1.1\r\nHost: x\r\nAuthorization: {}\r\nConnection: close\r\n\r\n",
                bearer.to_str().unwrap()
            );
            let mut answer = String::new();
            let _ = client.write_all(request.as_bytes()).await;
            let _ = client.read_to_string(&mut answer).await;
            let _ = said.send(answer);
            let _ = served.await;
        });
        let answer = heard.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
        drop(thread);
    }
}
