//! The sender's HTTP routes: versions, questions for versions, and the workers' reports.
//! `lifeline` has the registrations.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use serde::Deserialize;
use tokio::time::sleep;
use weightsync_engine::Version;
use weightsync_mem::Want;

use super::workers::{ConnectionId, QuestionAnswer, ServingVersion, SharedSender, Uncounted};
use super::{caller, lifeline};
use crate::http::{Stopping, problem, range, read};
use crate::rpc::wire::{
    Asked, MAX_BODY, Question, RpcProblem, WantKind, WorkerMessage, cut, of_sender,
};

/// How many bytes of a version a connection gets at once.
const PART: usize = 256 << 10;

#[derive(Clone)]
pub(super) struct SenderApp {
    pub(super) shared: Arc<SharedSender>,
    pub(super) stopping: Stopping,
}

/// The routes of a sender.
pub(super) fn router(shared: Arc<SharedSender>, stopping: Stopping) -> Router {
    Router::new()
        .route(of_sender::WORKERS, post(lifeline::register))
        .route(of_sender::MESSAGES, post(message))
        .route(of_sender::SET, get(set))
        .route(of_sender::MODEL, get(model))
        .route(of_sender::IMAGE, get(image))
        .route(of_sender::STATUS, get(status))
        .with_state(SenderApp { shared, stopping })
}

pub(super) fn wrong(status: StatusCode, error: impl Into<String>) -> Response {
    let error = error.into();
    problem(
        status,
        RpcProblem {
            error,
            ..RpcProblem::default()
        },
    )
}

/// The answer for an unknown connection, or one of another sender.
fn gone() -> Response {
    wrong(StatusCode::GONE, Uncounted::Gone.to_string())
}

async fn message(
    State(app): State<SenderApp>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let Some(id) = app.shared.named(&name) else {
        return gone();
    };
    let message: WorkerMessage = match read(request, MAX_BODY).await {
        Ok(message) => message,
        Err((status, error)) => return wrong(status, error),
    };
    let shared = &app.shared;
    let counts = match message {
        WorkerMessage::Joined {} => shared.joined(id),
        WorkerMessage::Applied(applied) => shared.applied(id, &applied),
        WorkerMessage::Refused { sequence, reason } => shared.refused(id, sequence, cut(&reason)),
        WorkerMessage::Rejected { reason } => shared.rejected(id, cut(&reason)),
    };
    match counts {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(Uncounted::Gone) => gone(),
        Err(ahead @ Uncounted::Ahead { .. }) => {
            wrong(StatusCode::UNPROCESSABLE_ENTITY, ahead.to_string())
        }
    }
}

/// A question that waits. Dropping it withdraws the question.
struct WaitingQuestion<'a> {
    shared: &'a SharedSender,
    id: ConnectionId,
    question: u64,
}

impl Drop for WaitingQuestion<'_> {
    fn drop(&mut self) {
        self.shared.withdraw(self.id, self.question);
    }
}

async fn set(
    State(mut app): State<SenderApp>,
    Path(name): Path<String>,
    Query(question): Query<Question>,
) -> Response {
    let shared = &*app.shared;
    let Some(id) = shared.named(&name) else {
        return gone();
    };
    let Some(want) = wanted(shared, &question) else {
        let reason = "a question for a version names a model and the version";
        return wrong(StatusCode::UNPROCESSABLE_ENTITY, reason);
    };
    let over = end_of_wait(question.wait_ms);
    tokio::pin!(over);
    // Subscribed before the question is asked: an answer between the two is not missed.
    let Some(mut changes) = shared.changes(id) else {
        return gone();
    };
    let mut answer = shared.ask(id, want);
    let mut waiting = None;
    loop {
        match answer {
            QuestionAnswer::Set { sequence, members } => {
                let models = members.iter().map(caller::part).collect();
                return Json(Asked { sequence, models }).into_response();
            }
            QuestionAnswer::Unknown { known } => return no_such_version(known),
            // The worker's newer request gets the answer. This one ends without a word about the
            // version.
            QuestionAnswer::Replaced => return StatusCode::NO_CONTENT.into_response(),
            QuestionAnswer::Gone => return gone(),
            QuestionAnswer::Later(question) if waiting.is_none() => {
                // Asked only now: the segment may have answered the question meanwhile.
                waiting = Some(WaitingQuestion {
                    shared,
                    id,
                    question,
                });
                answer = shared.answer(id, question);
                continue;
            }
            QuestionAnswer::Later(_) => {}
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() {
                return gone();
            },
            // The guard in `waiting` withdraws the question, so that its answer pins no slot.
            () = &mut over => return StatusCode::NO_CONTENT.into_response(),
            () = app.stopping.wait() => return gone(),
        }
        answer = match &waiting {
            Some(waiting) => shared.answer(id, waiting.question),
            None => QuestionAnswer::Gone,
        };
    }
}

/// What a question asks for. `None` if it lacks the model or the version, or has a model that the
/// sender does not have.
fn wanted(shared: &SharedSender, question: &Question) -> Option<Want> {
    match (question.want, question.model, question.version) {
        (WantKind::Newest, ..) => Some(Want::Newest),
        (word, Some(model), Some(version)) if model < shared.ids().count() => {
            let version = Version(version);
            Some(match word {
                WantKind::Exactly => Want::Exactly { model, version },
                _ => Want::AtLeast { model, version },
            })
        }
        _ => None,
    }
}

/// Waits for so many milliseconds; without a number, for ever.
async fn end_of_wait(wait_ms: Option<u64>) {
    match wait_ms {
        Some(wait) => sleep(Duration::from_millis(wait)).await,
        None => std::future::pending().await,
    }
}

/// The answer to a question for a version that is not there. It names those that are.
fn no_such_version(known: Vec<Version>) -> Response {
    let error = "this version is no longer kept, or does not exist yet".into();
    let body = RpcProblem {
        error,
        known,
        ..RpcProblem::default()
    };
    problem(StatusCode::NOT_FOUND, body)
}

async fn status(State(app): State<SenderApp>) -> Response {
    Json(app.shared.status()).into_response()
}

async fn model(State(app): State<SenderApp>, Path(model): Path<usize>) -> Response {
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
    State(app): State<SenderApp>,
    Path((model, version)): Path<(usize, u64)>,
    Query(of): Query<OfConnection>,
    headers: HeaderMap,
) -> Response {
    let shared = &app.shared;
    // A successor of the sender may have its address, and a version of this number.
    let Some(id) = shared.named(&of.id) else {
        return gone();
    };
    let Some(snapshot) = shared.find(model, Version(version)) else {
        let reason = "this version is no longer kept";
        return wrong(StatusCode::NOT_FOUND, reason);
    };
    let all = snapshot.bytes().len() as u64;
    let (status, part) = match range::asked(&headers, all, None) {
        Ok(asked) => asked,
        Err(wrong_range) => {
            let mut headers = HeaderMap::new();
            let (status, reason) = wrong_range.answer(&mut headers);
            return (headers, wrong(status, reason)).into_response();
        }
    };
    let body = ImageBody {
        // The snapshot moves into the body, which pins the slot until the last byte is handed to
        // the connection.
        version: shared.serve(id, snapshot),
        left: part.start as usize..part.end as usize,
    };
    let mut response = Response::new(Body::new(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(CONTENT_TYPE, kind);
    range::describe(headers, status, &part, all);
    response
}

/// Part of a version. The version is kept while it is sent, and not copied.
struct ImageBody {
    version: Arc<ServingVersion>,
    left: Range<usize>,
}

/// A part of a version.
struct VersionPiece {
    version: Arc<ServingVersion>,
    range: Range<usize>,
}

impl AsRef<[u8]> for VersionPiece {
    fn as_ref(&self) -> &[u8] {
        &self.version.bytes()[self.range.clone()]
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
        let version = self.version.clone();
        // The bytes lie in the slot. This lends them to hyper without a copy, and the clone pins
        // the slot meanwhile.
        let piece = Bytes::from_owner(VersionPiece { version, range });
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left.len() as u64)
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty()
    }
}
