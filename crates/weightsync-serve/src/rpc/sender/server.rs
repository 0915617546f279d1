//! What a sender answers: registrations, which last as long as their workers;
//! versions, and questions for them; and what workers say.

use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::StatusCode;
use hyper::header::{ACCEPT_RANGES, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE};
use serde::Deserialize;
use tokio::time::{MissedTickBehavior, interval, sleep};
use weightsync::{Version, WorkerId};

use super::caller;
use super::state::{Kept, Shared};
use crate::http::{Ask, Client, Fault, Lines, LinesBody, Stopping, problem, read};
use crate::rpc::plan::{About, Answer, LaneId, Life, Want};
use crate::rpc::wire::{
    Asked, FromSender, FromWorker, MAX_BODY, MAX_DEVICE, PROTOCOL, Problem, Question, Register,
    WantWord, Welcome, Words, addr_of, cut, line, of_sender, of_worker,
};
use crate::rpc::{BEAT, PROBE, PROBE_AGAIN, PROBE_BEHIND, SILENCE};

/// How long a worker that registers may take to answer itself.
const CALLED_BACK: Duration = Duration::from_secs(2);

/// How long after a worker has hung up its last words may come by the other
/// connection.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How much of a version is handed to a connection at once, in bytes.
const PART: usize = 256 << 10;

#[derive(Clone)]
struct App {
    shared: Arc<Shared>,
    stopping: Stopping,
}

/// The routes of a sender.
pub(super) fn router(shared: Arc<Shared>, stopping: Stopping) -> Router {
    Router::new()
        .route(of_sender::WORKERS, post(register))
        .route(of_sender::WORDS, post(words))
        .route(of_sender::SET, get(set))
        .route(of_sender::MODEL, get(model))
        .route(of_sender::IMAGE, get(image))
        .with_state(App { shared, stopping })
}

fn wrong(status: StatusCode, error: impl Into<String>) -> Response {
    let error = error.into();
    problem(
        status,
        Problem {
            error,
            ..Problem::default()
        },
    )
}

/// A connection that is not there, or never was of this sender.
fn gone() -> Response {
    let words = "this sender has no such worker any more: register again";
    wrong(StatusCode::GONE, words)
}

async fn register(State(app): State<App>, request: Request) -> Response {
    let register: Register = match read(request, MAX_BODY).await {
        Ok(register) => register,
        Err((status, error)) => return wrong(status, error),
    };
    let (about, addr) = match check(&app.shared, &register) {
        Ok(checked) => checked,
        Err(refusal) => return *refusal,
    };
    let client = Client::new(addr, app.shared.bearer.clone());
    let lines = match call_back(&client, &register).await {
        Ok(lines) => lines,
        Err(error) => return wrong(StatusCode::FAILED_DEPENDENCY, error),
    };
    let shared = app.shared;
    let (lane, sequence) = shared.note(|plan| {
        let lane = plan.join(about);
        (lane, plan.sequence_for(lane))
    });
    let bell = shared.enter(lane);
    tokio::spawn(follow(shared.clone(), lane, client.clone(), lines));
    tokio::spawn(caller::call(shared.clone(), lane, client, bell));
    let welcome = FromSender::Welcome(Welcome {
        protocol: PROTOCOL,
        id: shared.name(lane),
        run: shared.run,
        pid: std::process::id(),
        models: shared.ids().cloned().collect(),
        sequence,
    });
    let (lines, response) = LinesBody::answer(4);
    // There is room for the first.
    let _ = lines.try_send(line(&welcome));
    tokio::spawn(beat(shared, lane, lines, app.stopping));
    response
}

/// What a registration says, if this sender can have such a worker.
fn check(shared: &Shared, register: &Register) -> Result<(About, SocketAddr), Box<Response>> {
    let refuse = |status, words: String| Err(Box::new(wrong(status, words)));
    if register.protocol != PROTOCOL {
        let words = format!(
            "this sender speaks protocol {PROTOCOL}, the worker {}: install the same weightsync \
             on both",
            register.protocol
        );
        return refuse(StatusCode::CONFLICT, words);
    }
    if register.seen > shared.run.epoch {
        let problem_body = Problem {
            error: format!(
                "this sender's {} is over: the worker has seen {}",
                shared.run.epoch, register.seen
            ),
            epoch: Some(shared.run.epoch),
            ..Problem::default()
        };
        return Err(Box::new(problem(StatusCode::CONFLICT, problem_body)));
    }
    if register.run.is_some_and(|run| run != shared.run) {
        let words = format!("this sender's is another run: {}", shared.run);
        return refuse(StatusCode::CONFLICT, words);
    }
    if register.device.len() > MAX_DEVICE {
        let words = format!("a device is named in at most {MAX_DEVICE} bytes");
        return refuse(StatusCode::UNPROCESSABLE_ENTITY, words);
    }
    let mut wanted = Vec::new();
    for model in &register.models {
        match shared.ids().position(|id| id == model) {
            Some(place) if !wanted.contains(&place) => wanted.push(place),
            _ => {
                let words = format!("this sender has no model {model}, or it is named twice");
                return refuse(StatusCode::UNPROCESSABLE_ENTITY, words);
            }
        }
    }
    let Some(addr) = addr_of(&register.url) else {
        let words = "the worker's url is http://ADDRESS:PORT".into();
        return refuse(StatusCode::UNPROCESSABLE_ENTITY, words);
    };
    if let Err(error) = shared.access.may_dial_with_secret(addr) {
        return refuse(StatusCode::FORBIDDEN, error.to_string());
    }
    let about = About {
        worker: WorkerId(register.worker),
        pid: register.pid,
        device: register.device.clone(),
        wanted,
    };
    Ok((about, addr))
}

/// Calls a worker that registers, and keeps its lifeline.
async fn call_back(client: &Arc<Client>, register: &Register) -> Result<Lines, String> {
    let failed = |why: String| format!("calling the worker back at {}: {why}", client.addr());
    let reply = client
        .ask(Ask::get(of_worker::LIFELINE), CALLED_BACK)
        .await
        .map_err(|fault| failed(fault.to_string()))?;
    if reply.status != StatusCode::OK {
        return Err(failed(format!("it answered {}", reply.status)));
    }
    let mut lines = reply.lines();
    match lines.next::<FromWorker>(CALLED_BACK).await {
        Ok(Some(FromWorker::Here { worker, pid }))
            if (worker, pid) == (register.worker, register.pid) =>
        {
            Ok(lines)
        }
        Ok(_) => Err(failed("it is another worker".into())),
        Err(fault) => Err(failed(fault.to_string())),
    }
}

/// Hears a worker to its end.
async fn follow(shared: Arc<Shared>, lane: LaneId, client: Arc<Client>, mut lines: Lines) {
    let mut probed: Option<Instant> = None;
    let life = loop {
        match lines.next::<FromWorker>(SILENCE).await {
            Ok(Some(FromWorker::Left {})) => break Life::Left,
            Ok(Some(_)) => {
                probed = None;
                hear(&shared, lane, false);
            }
            Err(Fault::Silent { .. }) => {
                hear(&shared, lane, true);
                if probed.is_none_or(|at| at.elapsed() >= PROBE_AGAIN) {
                    probed = Some(Instant::now());
                    let patience = match shared.has_begun(lane) {
                        true => PROBE_BEHIND,
                        false => PROBE,
                    };
                    if !client.is_reachable(patience).await {
                        break Life::Died;
                    }
                }
            }
            Ok(None) | Err(_) => break Life::Died,
        }
        if !shared.lock().is_here(lane) {
            return;
        }
    };
    end(&shared, lane, life);
}

fn hear(shared: &Shared, lane: LaneId, silent: bool) {
    if shared.lock().silent(lane, silent) {
        shared.note(|_| ());
        if silent {
            let lock = shared.lock();
            if let Some(about) = lock.about(lane) {
                let (worker, pid) = (about.worker, about.pid);
                drop(lock);
                tracing::warn!(%worker, pid, "nothing is heard of it; it may be stopped");
            }
        }
    }
}

fn end(shared: &Shared, lane: LaneId, life: Life) {
    shared.note(|plan| plan.end(lane, life));
    // Whoever calls it, or waits for its question, ends.
    shared.ring();
    shared.leave(lane);
}

/// Tells a worker that the sender is here, as long as it is.
async fn beat(
    shared: Arc<Shared>,
    lane: LaneId,
    lines: tokio::sync::mpsc::Sender<Bytes>,
    mut stopping: Stopping,
) {
    let mut beats = interval(BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut count = 0;
    loop {
        tokio::select! {
            _ = beats.tick() => {
                if !shared.lock().is_here(lane) {
                    return;
                }
                count += 1;
                // One that does not read has enough of them to read.
                let _ = lines.try_send(line(&FromSender::Beat(count)));
            }
            () = lines.closed() => {
                // Unless nothing would come by that one either.
                if !shared.lock().is_silent(lane) {
                    sleep(LAST_WORDS).await;
                }
                return end(&shared, lane, Life::Died);
            }
            () = stopping.wait() => {
                let _ = lines.send(line(&FromSender::Closed {})).await;
                return;
            }
        }
    }
}

async fn words(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let Some(lane) = app.shared.named(&id) else {
        return gone();
    };
    let words: Words = match read(request, MAX_BODY).await {
        Ok(words) => words,
        Err((status, error)) => return wrong(status, error),
    };
    let heard = app.shared.note(|plan| {
        if !plan.is_here(lane) {
            return false;
        }
        match words {
            Words::Applied(applied) => {
                let versions = caller::numbers(&applied);
                plan.applied(lane, applied.sequence, &versions);
            }
            Words::Refused { sequence, reason } => plan.refused(lane, sequence, cut(&reason)),
            Words::Rejected { reason } => plan.rejected(lane, cut(&reason)),
        }
        true
    });
    match heard {
        true => StatusCode::NO_CONTENT.into_response(),
        false => gone(),
    }
}

/// A question that waits. Dropped, it waits no more.
struct Waiting<'a> {
    shared: &'a Shared,
    lane: LaneId,
    question: Option<u64>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(question) = self.question {
            self.shared
                .note(|plan| plan.asks_no_more(self.lane, question));
        }
    }
}

async fn set(
    State(mut app): State<App>,
    Path(id): Path<String>,
    Query(question): Query<Question>,
) -> Response {
    let shared = &*app.shared;
    let Some(lane) = shared.named(&id) else {
        return gone();
    };
    let want = match (question.want, question.model, question.version) {
        (WantWord::Newest, ..) => Want::Newest,
        (word, Some(model), Some(version)) if model < shared.models.len() => match word {
            WantWord::Exactly => Want::Exactly(model, Version(version)),
            _ => Want::AtLeast(model, Version(version)),
        },
        _ => {
            let words = "a question for a version names a model and the version";
            return wrong(StatusCode::UNPROCESSABLE_ENTITY, words);
        }
    };
    let over = async {
        match question.wait_ms {
            Some(wait) => sleep(Duration::from_millis(wait)).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(over);
    let mut waiting = Waiting {
        shared,
        lane,
        question: None,
    };
    loop {
        let next = shared.next_publication();
        tokio::pin!(next);
        next.as_mut().enable();
        let answer = match waiting.question {
            None => shared.lock().ask(lane, want),
            Some(_) => shared.lock().answer(lane, want),
        };
        match answer {
            Answer::Set(order) => {
                waiting.question = None;
                let models = order.set.iter().map(|(_, kept)| kept.part());
                return Json(Asked {
                    sequence: order.sequence,
                    models: models.collect(),
                })
                .into_response();
            }
            Answer::Unknown { known } => {
                let error = "this version is not kept any more, or does not exist yet".into();
                let body = Problem {
                    error,
                    known,
                    ..Problem::default()
                };
                return problem(StatusCode::NOT_FOUND, body);
            }
            Answer::Gone => return gone(),
            Answer::Later(question) => {
                waiting.question.get_or_insert(question);
            }
        }
        tokio::select! {
            () = next => {}
            () = &mut over => return StatusCode::NO_CONTENT.into_response(),
            () = app.stopping.wait() => return gone(),
        }
    }
}

async fn model(State(app): State<App>, Path(model): Path<usize>) -> Response {
    let Some(described) = app.shared.described(model) else {
        return wrong(StatusCode::NOT_FOUND, "this sender has no such model");
    };
    let kind = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, kind)], Body::from(described)).into_response()
}

#[derive(Deserialize)]
struct OfConnection {
    id: String,
}

async fn image(
    State(app): State<App>,
    Path((model, version)): Path<(usize, u64)>,
    Query(of): Query<OfConnection>,
    headers: HeaderMap,
) -> Response {
    let shared = &app.shared;
    // A successor of the sender that was meant may have its address, and a version of
    // this number.
    let Some(lane) = shared.named(&of.id) else {
        return gone();
    };
    let Some(kept) = shared.find(model, Version(version)) else {
        let words = "this version is not kept any more";
        return wrong(StatusCode::NOT_FOUND, words);
    };
    shared.begins(lane);
    let all = kept.snapshot.bytes().len();
    let asked = headers.get(RANGE).map(|range| part_of(range, all));
    let (status, part) = match asked {
        None => (StatusCode::OK, 0..all),
        Some(Some(part)) => (StatusCode::PARTIAL_CONTENT, part),
        Some(None) => {
            let words = format!("one range of bytes within {all} was expected");
            let mut response = wrong(StatusCode::RANGE_NOT_SATISFIABLE, words);
            content_range(response.headers_mut(), format!("bytes */{all}"));
            return response;
        }
    };
    let (from, to) = (part.start, part.end);
    let mut response = Response::new(Body::new(ImageBody { kept, left: part }));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(CONTENT_TYPE, kind);
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if status == StatusCode::PARTIAL_CONTENT {
        content_range(headers, format!("bytes {from}-{}/{all}", to - 1));
    }
    response
}

fn content_range(headers: &mut HeaderMap, text: String) {
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert(CONTENT_RANGE, value);
    }
}

/// The one range that a request asks for of so many bytes.
fn part_of(range: &HeaderValue, all: usize) -> Option<Range<usize>> {
    let (first, last) = range
        .to_str()
        .ok()?
        .strip_prefix("bytes=")?
        .split_once('-')?;
    let number = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<usize>().ok()).flatten()
    };
    let part = match (first, last) {
        ("", last) => all.saturating_sub(number(last)?)..all,
        (first, "") => number(first)?..all,
        (first, last) => number(first)?..number(last)?.saturating_add(1).min(all),
    };
    (part.start < part.end).then_some(part)
}

/// Part of a version, which is kept as long as it is sent, and not copied.
struct ImageBody {
    kept: Arc<Kept>,
    left: Range<usize>,
}

/// A piece of a version.
struct Piece {
    kept: Arc<Kept>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.kept.snapshot.bytes()[self.range.clone()]
    }
}

impl http_body::Body for ImageBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let range = self.left.start..self.left.end.min(self.left.start + PART);
        if range.is_empty() {
            return Poll::Ready(None);
        }
        self.left.start = range.end;
        let kept = self.kept.clone();
        let piece = Bytes::from_owner(Piece { kept, range });
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left.len() as u64)
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_range_within_the_bytes_is_understood() {
        let part = |text: &str| part_of(&HeaderValue::from_str(text).unwrap(), 10);
        for (text, expected) in [
            ("bytes=0-", Some(0..10)),
            ("bytes=3-", Some(3..10)),
            ("bytes=3-3", Some(3..4)),
            ("bytes=3-100", Some(3..10)),
            ("bytes=-4", Some(6..10)),
            ("bytes=-40", Some(0..10)),
            ("bytes=10-", None),
            ("bytes=5-4", None),
            ("bytes=-0", None),
            ("bytes=-", None),
            ("bytes=a-b", None),
            ("bytes=+1-2", None),
            ("bytes=0-1,3-4", None),
            ("bytes=0-99999999999999999999999", None),
            ("items=0-1", None),
            ("", None),
        ] {
            assert_eq!(part(text), expected, "{text}");
        }
    }
}
