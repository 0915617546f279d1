//! The HTTP routes of a service.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router, response};
use hyper::StatusCode;
use hyper::header::{HOST, HeaderMap, ORIGIN};
use hyper::http::uri::Authority;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{MissedTickBehavior, interval, timeout};
use weightsync_core::synchronizer::Party;
use weightsync_engine::Version;

use super::events::Events;
use super::files::Pieces;
use super::lasting::Shelf;
use super::link::{BEAT, PARTIES, PARTY, next_request};
use super::memory::HeldVersions;
use super::service::{Caller, ServiceInput};
use super::wire::{Join, MAX_BODY, Reply, RequestProblem};
use super::{files, watching};
use crate::http::{ConnectionInfo, LinesBody, Stopping, read};
use crate::rpc::wire::line;

/// The most readers of events at a time.
const READERS: usize = 256;

/// How many versions are looked for at a time, and how many pieces are read from the store. They take
/// threads that handshakes need too: however many clients ask, most of those threads stay free.
const LOOKS: usize = 8;
const READS: usize = 8;

/// How many pieces of the store are kept for the downloads that read them, of 4 MiB each.
const PIECES: usize = 32;

/// How long a store may take to list its versions.
const LISTED: Duration = Duration::from_secs(1);

/// What all routes share.
#[derive(Clone)]
pub(super) struct App {
    inputs: mpsc::Sender<ServiceInput>,
    pub(super) events: Events,
    pub(super) held: HeldVersions,
    /// The store with the versions that are not held.
    pub(super) shelf: Option<Shelf>,
    /// Whether requests have shown a token.
    pub(super) has_token: bool,
    /// Room for readers of events.
    pub(super) readers: Arc<Semaphore>,
    /// Turns to look for a version in memory, and for one in the store.
    pub(super) holds: BlockingTurns,
    pub(super) looks: BlockingTurns,
    /// The pieces of the store that downloads read.
    pub(super) pieces: Pieces,
    /// The turn to list the versions of the store.
    lists: BlockingTurns,
    /// The turn to compare a version with its digest, which reads all of it. Those that wait for it leave
    /// the turns of pieces to others.
    pub(super) compares: BlockingTurns,
}

/// Turns for calls that block.
#[derive(Clone)]
pub(super) struct BlockingTurns(Arc<Semaphore>);

impl BlockingTurns {
    pub(super) fn new(count: usize) -> Self {
        Self(Arc::new(Semaphore::new(count)))
    }

    /// Waits for a turn, and makes the call on a thread of its own. The turn lasts as long as the call,
    /// also if nobody waits for it any more. `None`: this end is ending.
    pub(super) async fn take<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        // Waits without a thread: only a call that has its turn takes one.
        let turn = self.0.clone().acquire_owned().await.ok()?;
        let called = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            call()
        });
        called.await.ok()
    }
}

impl App {
    pub(super) fn new(
        inputs: mpsc::Sender<ServiceInput>,
        events: Events,
        held: HeldVersions,
        shelf: Option<Shelf>,
        has_token: bool,
    ) -> Self {
        Self {
            inputs,
            events,
            held,
            shelf,
            has_token,
            readers: Arc::new(Semaphore::new(READERS)),
            holds: BlockingTurns::new(LOOKS),
            looks: BlockingTurns::new(LOOKS),
            pieces: Pieces::new(BlockingTurns::new(READS), PIECES),
            lists: BlockingTurns::new(1),
            compares: BlockingTurns::new(1),
        }
    }

    /// The newest versions of the store. A store that takes long to answer is not waited for: then
    /// they are those that it had at the last look.
    pub(super) async fn stored(&self) -> BTreeSet<Version> {
        let Some(shelf) = self.shelf.clone() else {
            return BTreeSet::new();
        };
        // Read before the turn: another request may hold it for long.
        let last = shelf.last_listed();
        // Dropped at the timeout, the call goes on and keeps its turn. Requests meanwhile get the
        // last list.
        match timeout(LISTED, self.lists.take(move || shelf.list())).await {
            Ok(Some(Ok(versions))) => versions,
            _ => last,
        }
    }

    pub(super) fn tell(&self, input: ServiceInput) {
        // The service ends after the server.
        let _ = self.inputs.send(input);
    }
}

/// The state of the routes.
#[derive(Clone)]
pub(super) struct RouteState {
    pub(super) app: App,
    pub(super) stopping: Stopping,
}

pub(super) fn router(app: App, stopping: Stopping) -> Router {
    let serving = Arc::new(RouteState { app, stopping });
    let own_pages = middleware::from_fn_with_state(serving.clone(), own_pages_only);
    Router::new()
        .route(PARTIES, post(join))
        .route(PARTY, post(ask))
        .route(files::VERSION, get(files::list))
        .route(files::FILE, get(files::file))
        .route("/v1/status", get(watching::status))
        .route("/v1/events", get(watching::events))
        .route("/events", get(watching::events))
        .route("/metrics", get(watching::metrics))
        .route("/", get(watching::page))
        .layer(own_pages)
        .with_state(serving)
}

/// Refuses what a page of another server asks for in a browser of this machine: it comes with that
/// server's name, as its origin or as the host that it looked up.
async fn own_pages_only(
    State(serving): State<Arc<RouteState>>,
    request: Request,
    next: Next,
) -> Response {
    let came = request.extensions().get::<ConnectionInfo>();
    let scheme = match came.is_some_and(|came| came.is_encrypted) {
        true => "https://",
        false => "http://",
    };
    match is_own(request.headers(), scheme, serving.app.has_token) {
        true => next.run(request).await,
        false => {
            let reason = "a page of another server asks: open the synchronizer by its address, or give \
                          the token";
            refused(StatusCode::FORBIDDEN, reason.into())
        }
    }
}

/// With a token, its header was checked before, and no other page has it.
fn is_own(headers: &HeaderMap, scheme: &str, has_token: bool) -> bool {
    let text = |name| headers.get(name).and_then(|text| text.to_str().ok());
    let host = text(HOST).unwrap_or_default();
    // A page of another server can have its name lead to this machine (DNS rebinding). The browser
    // then sends that name as the host.
    let authority = host.parse::<Authority>();
    let name = authority.as_ref().map_or("", Authority::host);
    let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    let is_known = has_token || is_address || name == "localhost";
    // A page of this server has its own address as its origin. A client that is no browser sends
    // none.
    is_known && text(ORIGIN).is_none_or(|origin| origin.strip_prefix(scheme) == Some(host))
}

pub(super) fn refused(status: StatusCode, reason: String) -> Response {
    (status, Json(RequestProblem::Refused { reason })).into_response()
}

fn problem(problem: RequestProblem) -> Response {
    let status = match &problem {
        RequestProblem::Unknown {} => StatusCode::GONE,
        RequestProblem::Replaced { .. } | RequestProblem::Refused { .. } => StatusCode::CONFLICT,
    };
    (status, Json(problem)).into_response()
}

/// A party's membership: its end is the party's.
struct MembershipGuard(App, Party);

impl Drop for MembershipGuard {
    fn drop(&mut self) {
        // However the connection ended: the service hears of it here.
        self.0.tell(ServiceInput::Gone(self.1));
    }
}

async fn join(
    State(serving): State<Arc<RouteState>>,
    Extension(came): Extension<ConnectionInfo>,
    request: Request,
) -> Response {
    let join: Join = match read(request, MAX_BODY).await {
        Ok(join) => join,
        Err((status, reason)) => return refused(status, reason),
    };
    let app = serving.app.clone();
    let (answered, answer) = oneshot::channel();
    let of_service = app.clone();
    // The service calls this in its own thread, so it must not wait.
    let answered = Box::new(
        move |joined: Result<super::wire::JoinAnswer, RequestProblem>| {
            let party = joined.as_ref().map(|joined| Party(joined.party)).ok();
            // The party is gone already.
            if answered.send(joined).is_err()
                && let Some(party) = party
            {
                of_service.tell(ServiceInput::Gone(party));
            }
        },
    );
    app.tell(ServiceInput::Join(
        Box::new(join),
        Caller::Client(came),
        answered,
    ));
    // The handler is dropped here if the client disconnects. The closure above then tells the
    // service.
    let joined = match answer.await {
        Ok(Ok(joined)) => joined,
        Ok(Err(why)) => return problem(why),
        Err(_) => return problem(RequestProblem::Unknown {}),
    };
    // From here on the end of the stream is the end of the party.
    let membership = MembershipGuard(app, Party(joined.party));
    let (lines, response) = LinesBody::answer(4);
    // The channel is new, so it has room.
    let _ = lines.try_send(line(&joined));
    let mut stopping = serving.stopping.clone();
    tokio::spawn(async move {
        let _membership = membership;
        let mut beats = interval(BEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // This waits for room: a party that does not read holds up only its own task.
                _ = beats.tick() => if lines.send(line(&true)).await.is_err() {
                    break;
                },
                () = lines.closed() => break,
                () = stopping.wait() => break,
            }
        }
    });
    response
}

/// A request that waits. Dropping it withdraws the request.
struct Asking {
    app: App,
    party: Party,
    number: u64,
    answered: bool,
}

impl Drop for Asking {
    fn drop(&mut self) {
        if !self.answered {
            self.app
                .tell(ServiceInput::Withdrawn(self.party, self.number));
        }
    }
}

async fn ask(
    State(serving): State<Arc<RouteState>>,
    Extension(came): Extension<ConnectionInfo>,
    Path(party): Path<u64>,
    request: Request,
) -> response::Result<Json<Reply>, Response> {
    let request = match read(request, MAX_BODY).await {
        Ok(request) => request,
        Err((status, reason)) => return Err(refused(status, reason)),
    };
    let (party, number) = (Party(party), next_request());
    let app = serving.app.clone();
    let (answered, answer) = oneshot::channel();
    // The client may have disconnected. The reply is then dropped, and `Asking` has withdrawn the
    // request.
    let answered = Box::new(move |reply| drop(answered.send(reply)));
    let caller = Caller::Client(came);
    app.tell(ServiceInput::Ask(party, number, caller, request, answered));
    // Made after the request was told, so the service never hears of a withdrawal before the
    // request.
    let mut asking = Asking {
        app,
        party,
        number,
        answered: false,
    };
    let mut stopping = serving.stopping.clone();
    // The service ends after the server, so a request that waits is ended here.
    let answer = tokio::select! {
        answer = answer => answer,
        () = stopping.wait() => return Err(problem(RequestProblem::Unknown {})),
    };
    asking.answered = true;
    match answer {
        Ok(Ok(reply)) => Ok(Json(reply)),
        Ok(Err(why)) => Err(problem(why)),
        Err(_) => Err(problem(RequestProblem::Unknown {})),
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn origin_of_another_scheme_is_another_server() {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("trainer:7100"));
        headers.insert(ORIGIN, HeaderValue::from_static("https://trainer:7100"));
        assert!(is_own(&headers, "https://", true));
        assert!(!is_own(&headers, "http://", true));
        headers.insert(ORIGIN, HeaderValue::from_static("http://trainer:7100"));
        assert!(is_own(&headers, "http://", true));
        assert!(!is_own(&headers, "https://", true));
    }

    #[test]
    fn addresses_of_this_server_need_no_token() {
        for (host, is_known) in [
            ("127.0.0.1:7100", true),
            ("[::1]:7100", true),
            ("[::1]", true),
            ("localhost", true),
            ("trainer:7100", false),
            ("", false),
        ] {
            let headers = HeaderMap::from_iter([(HOST, HeaderValue::from_static(host))]);
            assert_eq!(is_own(&headers, "http://", false), is_known, "{host}");
        }
    }
}
